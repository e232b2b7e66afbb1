"""Weights of 4 and 8 bits in the layout of kernels.c, and the call that multiplies with them.

own_kernels.py says which linears run here. A linear of 4 bits is stored as qvalue + 8 and may have
zero points. One of 2 or 3 bits is stored in 4. One of 5 or 6 bits is stored in 8, with its zero
points subtracted. Floats are stored as their codes, of 4 or 8 bits. Scales that bfloat16 holds
exactly, as those of most layouts are, are kept so.
"""

import ctypes
import functools
import math
import mmap
import platform
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn import functional

from quantflow.backends import native
from quantflow.core import affine, groups, microscaling
from quantflow.core.qtensor import PackedLinear, QTensor, QuantizedLinear
from quantflow.core.scheme import TensorScheme
from quantflow.errors import IntegrityError, UsageError

SOURCE = Path(__file__).with_name("kernels.c")
# what kernels.c needs; it uses AVX512-VNNI and AMX too where there are those
CPU_FLAGS = ("asimddp",) if platform.machine() == "aarch64" else ("avx2", "fma")

_W4, _W8, _F8, _F4 = 0, 1, 2, 3
_ASIS, _INT8, _E4M3 = 0, 1, 2
_LANES = 16  # rows of a register
_ROWS = 64  # rows are padded to a multiple of this
COLUMNS = 16  # columns are padded to a multiple of this; a group's columns must be one
_OWN_MAPPING = 1 << 20  # bytes from which a tensor is a mapping of its own
# |qx + 128 - zero_point| <= 383 and |qw| <= 128: a sum of so many products stays in an int32, the
# offset that it begins with included.
MAX_IN_FEATURES = (2**31 - 1) // (383 * 128)


class _Weight(ctypes.Structure):
    """`struct weight` of kernels.c."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("rows", "columns", "group", "groups")),
        *((name, ctypes.c_void_p) for name in ("data", "scale", "zero", "offset")),
        *((name, ctypes.c_float) for name in ("input_scale", "input_largest")),
        *(
            (name, ctypes.c_int32)
            for name in ("input_zero", "input_grouped", "kind", "input", "wide", "bf16")
        ),
    ]


@dataclass(frozen=True, kw_only=True, eq=False)
class Prepared:
    """A weight as kernels.c reads it.

    Attributes:
        dtype: dtype of the inputs.
        tensors: tensors that `weight` points to, by its field: data, scale, zero, offset.
        weight: `struct weight`; its rows and columns are out_features and in_features. It lives as
            long as this record.
        call: `quantflow_linear`(address of weight, x, tokens, bias or None, y, 1 for bfloat16 or 0
            for float32), which takes `data_ptr()` of contiguous tensors and checks nothing; it
            returns 0, or 1 where there was no memory.
    """

    dtype: torch.dtype
    tensors: dict[str, Tensor]
    weight: Any
    call: Any

    def __deepcopy__(self, memo: object) -> Self:
        """The record itself: nothing changes it, and a copy would point to this one's tensors."""
        return self


def prepare(linear: QuantizedLinear, dtype: torch.dtype) -> Prepared:
    """Arrange a weight that meets the backend's requirements; the linear is not kept.

    Raises:
        UnsupportedError: the library cannot be had.
    """
    weight, inputs = linear.weight, linear.scheme.input
    rows, columns = weight.qvalue.shape
    group = weight.scheme.group_size or columns + -columns % COLUMNS
    narrow_kind, wide_kind = (_F4, _F8) if weight.scheme.kind == "float" else (_W4, _W8)
    kind = wide_kind if weight.scheme.num_bits > 4 else narrow_kind
    input_zero = 0 if linear.input_zero_point is None else int(linear.input_zero_point)
    integer = inputs is not None and inputs.kind == "int"
    scale = _scales(_factor(kind, inputs) * weight.scale.expand(rows, -1))
    tensors = {"data": _data(weight, kind, group=group), "scale": scale}
    if kind == _W4 and weight.zero_point is not None:
        tensors["zero"] = _lanes(
            (weight.zero_point + 8).to(torch.uint8).expand(rows, -1), padding=8
        )
    if kind == _W8 and integer:
        tensors["offset"] = _offsets(weight, input_zero)
    record = _Weight(
        rows=rows,
        columns=columns,
        group=group,
        groups=scale.shape[1],
        input_scale=0.0 if linear.input_scale is None else float(linear.input_scale),
        input_zero=input_zero,
        kind=kind,
        wide=scale.dtype == torch.float32,
        bf16=dtype == torch.bfloat16,
        **_input_fields(inputs),
    )
    return _prepared(record, tensors, dtype)


def _input_fields(inputs: TensorScheme | None) -> dict[str, Any]:
    """The fields of `struct weight` that say how inputs are quantized at run time."""
    if inputs is None:
        return {"input": _ASIS}
    return {
        "input": _INT8 if inputs.kind == "int" else _E4M3,
        "input_largest": affine.half_range(inputs),
        "input_grouped": inputs.granularity == "per_group",
    }


def _factor(kind: int, inputs: TensorScheme | None) -> float:
    """The factor of a weight's scales: e2m1 is multiplied with integers as twice its values."""
    return 0.5 if kind == _F4 and inputs is not None and inputs.kind == "int" else 1.0


def prepare_packed(linears: Sequence[PackedLinear], dtype: torch.dtype) -> Prepared:
    """Arrange linears with rows below each other as one weight: that of `prepare`, to the bit.

    Codes go from where they are read to their lines, so that no qvalue is unpacked.

    Args:
        linears: linears of one scheme and one number of input features.
        dtype: dtype of the inputs.

    Raises:
        UnsupportedError: the library cannot be had.
    """
    group = linears[0].scheme.weights.group_size
    assert group is not None  # weights of e2m1 are in groups
    rows, columns = sum(linear.shape[0] for linear in linears), linears[0].shape[1]
    lines = columns // 8  # COLUMNS divides a group, and a group the columns
    data = lasting((rows + -rows % _ROWS) // 32, lines, 2, _LANES, dtype=torch.int32)
    arrange, first = native.library(SOURCE).quantflow_arrange, 0
    arrange.argtypes = [ctypes.c_void_p, *[ctypes.c_int64] * 4, ctypes.c_void_p]
    arrange.restype = None
    for linear in linears:
        codes, count = linear.codes.contiguous(), linear.shape[0]
        arrange(codes.data_ptr(), lines, count, first, lines, data.data_ptr())
        first += count
    scales = [linear.scale for linear in linears]
    inputs = linears[0].scheme.input
    scale = _scales(_factor(_F4, inputs) * (scales[0] if len(scales) == 1 else torch.cat(scales)))
    record = _Weight(
        rows=rows,
        columns=columns,
        group=group,
        groups=columns // group,
        kind=_F4,
        wide=scale.dtype == torch.float32,
        bf16=dtype == torch.bfloat16,
        **_input_fields(inputs),
    )
    return _prepared(record, {"data": data, "scale": scale}, dtype)


def dump(prepared: Prepared) -> dict[str, Tensor]:
    """The tensors of a record and the bytes of its `struct weight`, for `restore`."""
    return {
        "weight": torch.frombuffer(bytearray(prepared.weight), dtype=torch.uint8),
        **prepared.tensors,
    }


def restore(parts: Mapping[str, Tensor], dtype: torch.dtype, *, shape: tuple[int, int]) -> Prepared:
    """The record that `dump` was given, with these tensors.

    Args:
        parts: what `dump` returned, from wherever it was kept.
        dtype: dtype of the inputs that it was prepared for.
        shape: (out_features, in_features).

    Raises:
        IntegrityError: it is another weight, or C would read beyond a tensor.
    """
    tensors = {name: tensor for name, tensor in parts.items() if name != "weight"}
    record = parts["weight"].numpy().tobytes() if "weight" in parts else b""
    wrong = "another record" if len(record) != ctypes.sizeof(_Weight) else None
    weight = _Weight() if wrong else _Weight.from_buffer_copy(record)
    wrong = wrong or _why_unsafe(weight, tensors, shape)
    if wrong is not None:
        raise IntegrityError(
            f"a kept weight {list(shape)}: {wrong}", "remove the pack; it is made again"
        )
    return _prepared(weight, tensors, dtype)


def _why_unsafe(weight: Any, tensors: Mapping[str, Tensor], shape: tuple[int, int]) -> str | None:
    """Why kernels.c must not be given a record and these tensors, or None."""
    if (
        (weight.rows, weight.columns) != shape
        or not 0 < weight.rows < 1 << 31
        or not 0 < weight.columns <= MAX_IN_FEATURES
    ):
        return f"the record is of {weight.rows} rows, {weight.columns} columns"
    if (
        weight.group <= 0
        or weight.group % COLUMNS
        or weight.groups != -(-weight.columns // weight.group)
    ):
        return f"{weight.groups} groups of {weight.group} columns"
    flags = (weight.input_grouped, weight.wide, weight.bf16)
    if (
        weight.kind not in (_W4, _W8, _F8, _F4)
        or weight.input not in (_ASIS, _INT8, _E4M3)
        or not set(flags) <= {0, 1}
    ):
        return f"kind {weight.kind}, input {weight.input}, flags {flags}"
    if weight.kind == _F8 and weight.input == _INT8:
        return "float8 values with int8 inputs"
    padded = weight.rows + -weight.rows % _ROWS
    scales, columns = padded * weight.groups, weight.group * weight.groups
    sizes = {
        "data": (torch.int32, padded * columns // (8 if weight.kind in (_W4, _F4) else 4)),
        "scale": (torch.float32 if weight.wide else torch.bfloat16, scales),
    }
    if weight.kind == _W4 and "zero" in tensors:
        sizes["zero"] = (torch.uint8, scales)
    if weight.kind == _W8 and weight.input == _INT8:
        sizes["offset"] = (torch.int32, scales)
    actual = {name: (tensor.dtype, tensor.numel()) for name, tensor in tensors.items()}
    return None if actual == sizes else f"tensors {actual} where {sizes} belong"


def _prepared(weight: Any, tensors: dict[str, Tensor], dtype: torch.dtype) -> Prepared:
    # all four are set: a restored record has addresses of another process
    for field in ("data", "scale", "zero", "offset"):
        setattr(weight, field, native.address(tensors.get(field)))
    return Prepared(
        dtype=dtype, tensors=tensors, weight=weight, call=_function(native.library(SOURCE))
    )


@functools.cache
def _function(library: ctypes.CDLL) -> Any:
    """`quantflow_linear` of a library of kernels.c; its structure is compared with `_Weight` once.

    Raises:
        IntegrityError: they have other fields.
    """
    native.require_same_fields(SOURCE, _Weight)
    call = library.quantflow_linear
    call.argtypes = [*[ctypes.c_void_p] * 2, ctypes.c_int64, *[ctypes.c_void_p] * 2, ctypes.c_int32]
    return call


def several() -> int:
    """The address of `quantflow_linears`, which multiplies with several weights in one call.

    Raises:
        UnsupportedError: the library cannot be had.
    """
    return native.function_address(native.library(SOURCE).quantflow_linears)


def linear(
    x: Tensor, prepared: Prepared, bias: Tensor | None, *, order: Tensor | None = None
) -> Tensor:
    """The product x @ W.T + bias in x's dtype, [..., O].

    Args:
        x: [..., I] in the prepared dtype; or float32 for a weight prepared for bfloat16: inputs
            that the scheme does not quantize are then rounded to it, outputs are not.
        prepared: the weight.
        bias: [O] in x's dtype, or None.
        order: int64 [I], input that each column of the weight multiplies; None where column i
            multiplies input i.

    Raises:
        UsageError: inputs or a bias that the weight was not prepared for; C would read other
            memory.
    """
    rows, columns, dtype = prepared.weight.rows, prepared.weight.columns, prepared.dtype
    if x.dtype not in (dtype, torch.float32) or x.shape[-1] != columns or x.device.type != "cpu":
        cause = (
            f"inputs: {x.dtype} {list(x.shape)} on {x.device}, the weight was prepared for "
            f"{dtype} [..., {columns}] on cpu"
        )
        raise UsageError(cause, "give inputs of that dtype and shape")
    if bias is not None and (
        bias.dtype != x.dtype or bias.shape != (rows,) or not bias.is_contiguous()
    ):
        cause = f"bias: {bias.dtype} {list(bias.shape)}, inputs and outputs are {x.dtype} [{rows}]"
        raise UsageError(cause, "give a bias of that dtype and shape")
    x = x.contiguous() if order is None else x[..., order]
    result = x.new_empty(*x.shape[:-1], rows)
    tokens = x.numel() // columns
    pointers = (
        ctypes.addressof(prepared.weight),
        x.data_ptr(),
        tokens,
        native.address(bias),
        result.data_ptr(),
    )
    if prepared.call(*pointers, x.dtype == torch.bfloat16):
        raise MemoryError(f"inputs of {tokens} tokens of {columns} features")
    return result  # [..., O]


def lasting(*shape: int, dtype: torch.dtype) -> Tensor:
    """Zeros for values that stay as long as the model.

    Large ones are a mapping of their own. glibc's heap would put them between the larger tensors
    of which they are made, and keep the holes that these leave: twice the memory of the weights.
    """
    size = math.prod(shape) * dtype.itemsize
    if size < _OWN_MAPPING:
        return torch.zeros(shape, dtype=dtype)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(shape)


def _scales(scale: Tensor) -> Tensor:
    """Scales of rows and groups, [O, G] float32, as [B, G, 16], in bfloat16 where it has them."""
    lanes = _lanes(scale, padding=0)
    narrow = lanes.to(torch.bfloat16)
    return narrow if torch.equal(narrow.float(), lanes) else lanes


def _lanes(values: Tensor, *, padding: int) -> Tensor:
    """Values of rows and groups, [O, G], as [B, G, 16] of whole 64 rows."""
    padded = functional.pad(values, (0, 0, 0, -len(values) % _ROWS), value=padding)
    return padded.view(-1, _LANES, values.shape[1]).transpose(1, 2).contiguous()  # [B, G, 16]


def _data(weight: QTensor, kind: int, *, group: int) -> Tensor:
    """The lines of a weight: [pairs of 16 rows, lines, 2, 16] int32."""
    codes = (
        weight.qvalue.view(torch.int8)
        if kind == _F8
        else microscaling.codes_of_e2m1(weight.qvalue)
        if kind == _F4
        else weight.qvalue + 8
        if kind == _W4
        else weight.qvalue
    )
    # a weight with zero points has 6 bits or fewer here, so the differences fit into int8
    if kind == _W8 and weight.zero_point is not None:
        codes = (
            groups.to_groups(codes, codes.shape[1] // weight.scale.shape[1])
            - weight.zero_point[..., None]
        ).flatten(1)
    codes = functional.pad(codes, (0, -codes.shape[1] % group, 0, -len(codes) % _ROWS))
    if kind in (_W4, _F4):
        halves = codes.view(torch.uint8).view(len(codes), -1, 2, 4)  # [O, lines, 2, 4]
        codes = halves[:, :, 0] | halves[:, :, 1] << 4  # [O, lines, 4]
    words = codes.reshape(len(codes), -1).view(torch.int32)  # [O, lines]
    # [O / 32, lines, 2, 16]
    in_lines = words.view(-1, 2, _LANES, words.shape[1]).permute(0, 3, 1, 2)
    return lasting(*in_lines.shape, dtype=torch.int32).copy_(in_lines)


def _offsets(weight: QTensor, input_zero: int) -> Tensor:
    """The offset at which a sum of 8-bit weights by int8 inputs + 128 begins, [B, G, 16] int32."""
    split = weight.qvalue.view(len(weight.qvalue), weight.scale.shape[1], -1)  # [O, G, g]
    return _lanes(split.sum(dim=-1, dtype=torch.int32) * -(128 + input_zero), padding=0)
