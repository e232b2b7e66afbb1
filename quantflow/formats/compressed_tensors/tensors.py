"""The tensors of a linear, and of an attention's KV cache, in the compressed-tensors layout."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import torch
from torch import Tensor

from quantflow.core import affine, float8, microscaling, packing
from quantflow.core.dtypes import DTYPES
from quantflow.core.groups import expand_rows
from quantflow.core.kv import KVScales
from quantflow.core.qtensor import PackedLinear, QTensor, QuantizedLinear, require_scales
from quantflow.core.scheme import (
    FLOAT4,
    Layout,
    LinearScheme,
    TensorScheme,
)
from quantflow.errors import InputError, SchemeError, UnsupportedError

NAME = "compressed-tensors"
LAYOUT_VERSION = 1
ROW_MULTIPLE = 32  # rows whose zero points fill whole words, at any number of bits
_DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
}
_SCALES = frozenset({torch.float64, torch.float32, torch.float16, torch.bfloat16})
# What to do instead of a float8 that has other codes than e4m3fn, the only one that the layout's
# loaders know.
_INSTEAD = {
    "e5m2": "leave float8 out: e4m3fn has a mantissa bit more, and its scales do for weights "
    "what e5m2's range is for",
    "e4m3fnuz": "leave float8 out: e4m3fn's codes mean half as much in e4m3fnuz, and vLLM "
    "doubles the scales on AMD's MI300",
}


def scale_dtype(scheme: LinearScheme, model_dtype: torch.dtype) -> torch.dtype:
    """Dtype of the weight's scales as this layout stores them; e8m0 is stored as bytes."""
    if scheme.weights.block is not None:
        return DTYPES[scheme.weights.block.scale_dtype]
    if scheme.weights.scale_format != "float":
        return {"e8m0": torch.float8_e8m0fnu, "e4m3": torch.float8_e4m3fn}[
            scheme.weights.scale_format
        ]
    return model_dtype if scheme.layout == "pack-quantized" else torch.float32


_SUFFIXES: Mapping[Layout, tuple[str, ...]] = MappingProxyType(
    {
        "float-quantized": ("weight", "weight_scale"),
        "int-quantized": ("weight", "weight_scale"),
        "pack-quantized": ("weight_packed", "weight_scale", "weight_shape"),
        "mxfp8-quantized": ("weight", "weight_scale"),
        "mxfp4-pack-quantized": ("weight_packed", "weight_scale"),
        "nvfp4-pack-quantized": ("weight_packed", "weight_scale", "weight_global_scale"),
    }
)
# The scales beside which these layouts' loaders know what a group is.
_GROUP_SIZES = {"mxfp8-quantized": 32, "mxfp4-pack-quantized": 32, "nvfp4-pack-quantized": 16}


def _input_suffix(inputs: TensorScheme) -> str:
    """Name, within a linear, of the input's scale that calibration decided."""
    return "input_global_scale" if inputs.scale_format == "e4m3" else "input_scale"


def tensor_names(name: str, scheme: LinearScheme) -> tuple[str, ...]:
    """Names of the tensors that `encode` makes of the linear `name` (without `.weight`)."""
    suffixes = list(_SUFFIXES[scheme.layout])
    if not scheme.weights.symmetric:
        suffixes.append("weight_zero_point")
    if scheme.input is not None and scheme.input.measured:
        suffixes.append(_input_suffix(scheme.input))
        if not scheme.input.symmetric:
            suffixes.append("input_zero_point")
    return tuple(f"{name}.{suffix}" for suffix in suffixes)


def tensor_specs(
    name: str, scheme: LinearScheme, shape: Sequence[int], model_dtype: torch.dtype
) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Tensors that `encode` will make of the linear `name`, known before its weight is.

    Args:
        name: the linear's source name, without `.weight`.
        scheme: scheme of the linear.
        shape: shape of its weight, (O, I).
        model_dtype: dtype of its weight in the source.

    Returns:
        full name -> (dtype as safetensors names it, shape), in `encode`'s order.

    Raises:
        UnsupportedError: the layout does not hold the scheme, or its blocks do not divide I.
        InputError: the group size does not divide I, or a shape that is not (O, I).
    """
    require_held(scheme)
    weights, packed = scheme.weights, scheme.layout == "pack-quantized"
    scale = _scale_shape(weights, shape, name=name)
    stored = "I8" if weights.kind == "int" else "F8_E4M3"
    scale_name = {"e8m0": "U8", "e4m3": "F8_E4M3"}.get(weights.scale_format) or _DTYPE_NAMES[
        scale_dtype(scheme, model_dtype)
    ]
    specs: dict[str, tuple[str, tuple[int, ...]]] = {
        "weight": (stored, tuple(shape)),
        "weight_packed": ("I32", (shape[0], -(-shape[1] * weights.num_bits // 32))),
        "weight_scale": (scale_name, scale),
        "weight_global_scale": ("F32", (1,)),
        "weight_shape": ("I64", (2,)),
        "weight_zero_point": ("I8", scale),
        "input_scale": ("F32", (1,)),
        "input_global_scale": ("F32", (1,)),
        "input_zero_point": ("I8", (1,)),
    }
    if weights.kind == "float" and weights.num_bits == 4:
        specs["weight_packed"] = ("U8", (shape[0], shape[1] // 2))
    if weights.minima:
        specs["weight_zero_point"] = ("F32", scale)
    elif packed and len(scale) == 2:
        specs["weight_zero_point"] = ("I32", (-(-scale[0] * weights.num_bits // 32), scale[1]))
    return {key: specs[key.removeprefix(f"{name}.")] for key in tensor_names(name, scheme)}


def row_multiple(scheme: LinearScheme) -> int:
    """Fewest rows that can be encoded by themselves.

    Their zero points fill whole words, or they are one block. 8 is the least, whatever the number
    of bits: a layer's sums of errors depend on the cut.
    """
    if scheme.weights.granularity == "per_block":
        return scheme.weights.block_rows
    return max(8, packing.elements_of_whole_words(scheme.weights.num_bits))


def row_spans(
    name: str, scheme: LinearScheme, *, first: int, count: int
) -> dict[str, tuple[int, int]]:
    """Rows of each tensor of the linear `name` that some of its rows stand in.

    A linear is encoded and decoded piece by piece with them.

    Args:
        name: the linear's source name, without `.weight`.
        scheme: scheme of the linear.
        first: first of the rows, a multiple of `row_multiple`.
        count: number of rows, a multiple of `row_multiple` too unless they are the last.

    Returns:
        full name -> (first row in that tensor, how many); without the tensors that describe the
        whole linear, the scale of per_tensor weights among them.

    Raises:
        SchemeError: the rows do not begin at a whole word.
    """
    multiple = row_multiple(scheme)
    if first % multiple:
        raise SchemeError(
            f"{name}: rows from {first} do not begin at a whole word or block",
            f"take multiples of {multiple} rows",
        )
    whole = {
        "weight_shape",
        "weight_global_scale",
        "input_scale",
        "input_global_scale",
        "input_zero_point",
    }
    if scheme.weights.granularity == "per_tensor":
        whole |= {"weight_scale", "weight_zero_point"}
    spans = {}
    for key in tensor_names(name, scheme):
        suffix = key.removeprefix(f"{name}.")
        if suffix in whole:
            continue
        if (
            suffix == "weight_zero_point"
            and scheme.layout == "pack-quantized"
            and not scheme.weights.minima
        ):
            spans[key] = (
                first * scheme.weights.num_bits // 32,
                -(-count * scheme.weights.num_bits // 32),
            )
        elif suffix == "weight_scale":
            block_rows = scheme.weights.block_rows
            spans[key] = (first // block_rows, -(-count // block_rows))
        else:
            spans[key] = (first, count)
    return spans


def encode(
    name: str, linear: QuantizedLinear, *, scale_dtype: torch.dtype = torch.float32
) -> dict[str, Tensor]:
    """Tensors that hold `linear`.

    Args:
        name: the linear's source name, without `.weight`.
        linear: linear to store; not modified. Tensors of its weight that are stored unchanged are
            not copied.
        scale_dtype: dtype that `scale_dtype` returned when the weight was quantized.

    Raises:
        UnsupportedError: the layout does not hold the scheme.
        SchemeError: a scale is not exact in `scale_dtype`, or the values break QTensor's
            invariants.
    """
    weight, scheme = linear.weight, linear.scheme.weights
    require_held(linear.scheme)
    weight.validate(name)
    scale = _stored_scale(name, weight, scale_dtype)
    scale = (
        scale[:: scheme.block_rows].reshape(_scale_shape(scheme, weight.qvalue.shape)).contiguous()
    )
    tensors = {f"{name}.weight_scale": scale}
    if scheme.num_bits == 4 and scheme.kind == "float":
        tensors[f"{name}.weight_packed"] = microscaling.pack_e2m1(weight.qvalue)
        if weight.global_scale is not None:
            tensors[f"{name}.weight_global_scale"] = weight.global_scale.clone()
    elif linear.scheme.layout == "pack-quantized":
        centred = weight.qvalue - _first(scheme) if scheme.minima else weight.qvalue
        tensors[f"{name}.weight_packed"] = packing.pack(centred, scheme.num_bits)
        tensors[f"{name}.weight_shape"] = torch.tensor(weight.qvalue.shape, dtype=torch.int64)
        if weight.zero_point is not None and scheme.minima:
            tensors[f"{name}.weight_zero_point"] = weight.zero_point.contiguous()
        elif weight.zero_point is not None:
            packed = packing.pack(weight.zero_point.T, scheme.num_bits)  # [G, words]
            tensors[f"{name}.weight_zero_point"] = packed.T.contiguous()
    else:
        tensors[f"{name}.weight"] = weight.qvalue
        if weight.zero_point is not None:
            tensors[f"{name}.weight_zero_point"] = weight.zero_point.reshape(
                _scale_shape(scheme, weight.qvalue.shape)
            )
    # Linears with one input may hold one tensor for its scale; safetensors refuses tensors that
    # share memory.
    if linear.input_scale is not None:
        assert linear.scheme.input is not None  # QuantizedLinear refuses a scale without it
        tensors[f"{name}.{_input_suffix(linear.scheme.input)}"] = linear.input_scale.clone()
    if linear.input_zero_point is not None:
        tensors[f"{name}.input_zero_point"] = linear.input_zero_point.clone()
    return {key: tensors[key] for key in tensor_names(name, linear.scheme)}


def _stored_scale(name: str, weight: QTensor, scale_dtype: torch.dtype) -> Tensor:
    """Scales of a weight as they are stored, [O or 1, G].

    Raises:
        SchemeError: they are not exact as such.
    """
    if weight.scheme.scale_format == "e8m0":
        return microscaling.pack_e8m0(weight.scale)
    if weight.scheme.scale_format == "e4m3":
        if weight.global_scale is None:
            raise SchemeError(
                f"{name}: no global_scale beside scales in e4m3",
                "quantize with a grid that has one",
            )
        scale = affine.local_scales(weight.scale, weight.global_scale)
        back = float8.widen(scale) / weight.global_scale
    else:
        scale = weight.scale.to(scale_dtype)
        back = scale.float()
    if not torch.equal(back, weight.scale):
        raise SchemeError(
            f"{name}: scales are not exact in {scale_dtype}",
            "quantize with the scale_dtype that the layout stores",
        )
    return scale


def decode(name: str, tensors: Mapping[str, Tensor], scheme: LinearScheme) -> QuantizedLinear:
    """Undo `encode`.

    Args:
        name: the linear's source name, without `.weight`.
        tensors: full name -> tensor; may hold other linears too; not modified.
        scheme: the scheme that was encoded, or that `schemes_from_config` reads.

    Raises:
        InputError: a tensor is missing, has another dtype or shape, or holds a scale that is none
            (`affine.is_scale`).
        UnsupportedError: the layout does not hold the scheme.
    """
    require_held(scheme)
    weights = scheme.weights
    if weights.kind == "float" and weights.num_bits == 4:
        qvalue = microscaling.unpack_e2m1(_tensor(tensors, f"{name}.weight_packed", torch.uint8))
    elif scheme.layout == "pack-quantized":
        packed = _tensor(tensors, f"{name}.weight_packed", torch.int32)
        rows, columns = _tensor(tensors, f"{name}.weight_shape", torch.int64, (2,)).tolist()
        packed_shape = (rows, -(-columns * weights.num_bits // 32))
        if packed.shape != packed_shape:
            raise InputError(
                f"{name}.weight_packed: {list(packed.shape)}, weight_shape ({rows}, {columns}) "
                f"needs {list(packed_shape)}",
                "the file is damaged; export again",
            )
        qvalue = packing.unpack(packed, weights.num_bits, columns)
        if weights.minima:
            qvalue += _first(weights)
    else:
        expected = torch.int8 if weights.kind == "int" else float8.FLAVOURS[weights.float8].dtype
        qvalue = _tensor(tensors, f"{name}.weight", expected)
    shape = _scale_shape(weights, qvalue.shape, name=name)
    scale, global_scale = _scales_of(name, tensors, weights, shape)
    grid = (1, 1) if weights.granularity == "per_tensor" else shape
    zero_point = input_scale = input_zero_point = None
    if not weights.symmetric:
        zero_point = _zero_point(
            tensors, f"{name}.weight_zero_point", scheme=scheme, shape=shape
        ).reshape(grid)
    if scheme.input is not None and scheme.input.measured:
        input_scale = _scale(tensors, f"{name}.{_input_suffix(scheme.input)}", (1,))
        if not scheme.input.symmetric:
            input_zero_point = _tensor(tensors, f"{name}.input_zero_point", torch.int8, (1,))
    if weights.granularity == "per_block":
        scale, grid = expand_rows(scale, weights.block_rows, len(qvalue)), (len(qvalue), shape[1])
    weight = QTensor(
        qvalue=qvalue,
        scale=scale.reshape(grid),
        zero_point=zero_point,
        scheme=weights,
        global_scale=global_scale,
    )
    try:
        weight.validate(name)
    except SchemeError as error:
        raise InputError(error.cause, "the file is damaged; export again") from error
    return QuantizedLinear(
        weight=weight, scheme=scheme, input_scale=input_scale, input_zero_point=input_zero_point
    )


def packed(name: str, tensors: Mapping[str, Tensor], scheme: LinearScheme) -> PackedLinear | None:
    """The linear that `decode` returns, its codes as stored; None where they are not e2m1's.

    Args and errors are those of `decode`; see `weight_layout.PackedLayout`.
    """
    weights = scheme.weights
    if (weights.kind, weights.num_bits, scheme.input) != ("float", 4, None):
        return None
    require_held(scheme)
    codes = _tensor(tensors, f"{name}.weight_packed", torch.uint8)
    shape = _scale_shape(weights, (*codes.shape[:-1], 2 * codes.shape[-1]), name=name)
    scale, _ = _scales_of(name, tensors, weights, shape)
    try:
        require_scales(name, scale, weights)
    except SchemeError as error:
        raise InputError(error.cause, "the file is damaged; export again") from error
    return PackedLinear(codes=codes, scale=scale, scheme=scheme)


def _scales_of(
    name: str, tensors: Mapping[str, Tensor], weights: TensorScheme, shape: tuple[int, ...]
) -> tuple[Tensor, Tensor | None]:
    """Scales of a linear, float32 of `shape`, and its global scale, [1], where it has one."""
    if weights.scale_format == "e8m0":
        codes = _tensor(tensors, f"{name}.weight_scale", torch.uint8, shape)
        if (codes == microscaling.NAN_E8M0).any():
            raise InputError(
                f"{name}.weight_scale: scale nan (code {microscaling.NAN_E8M0})",
                "scales are finite; export again",
            )
        return microscaling.unpack_e8m0(codes), None
    scale = _scale(tensors, f"{name}.weight_scale", shape, weights=weights)
    if weights.scale_format != "e4m3":
        return scale, None
    _tensor(tensors, f"{name}.weight_scale", torch.float8_e4m3fn)
    global_scale = _scale(tensors, f"{name}.weight_global_scale", (1,))
    return scale / global_scale, global_scale


def kv_tensor_names(attention: str) -> tuple[str, str]:
    """Names of the scales of keys and of values in the KV cache of the module `attention`."""
    return f"{attention}.k_scale", f"{attention}.v_scale"


def kv_tensor_specs(
    attention: str, scheme: TensorScheme, kv_heads: int
) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Tensors that `encode_kv` makes: full name -> (dtype as safetensors names it, shape)."""
    return dict.fromkeys(kv_tensor_names(attention), ("F32", _kv_shape(scheme, kv_heads)))


def encode_kv(attention: str, scales: KVScales) -> dict[str, Tensor]:
    """Tensors that hold the scales of the KV cache of the module `attention`."""
    shape = _kv_shape(scales.scheme, scales.keys.numel())
    both = (scales.keys, scales.values)
    return {
        name: scale.reshape(shape).clone()
        for name, scale in zip(kv_tensor_names(attention), both, strict=True)
    }


def decode_kv(
    attention: str,
    tensors: Mapping[str, Tensor],
    scheme: TensorScheme,
    *,
    kv_heads: int,
    names: tuple[str, str] | None = None,
) -> KVScales:
    """Undo `encode_kv`.

    Args:
        attention: source name of the attention module.
        tensors: full name -> tensor; may hold others too; not modified.
        scheme: the scheme that `kv_scheme_from_config` reads.
        kv_heads: kv heads of the model.
        names: names of the two tensors in another layout, where one number may be []; None: this
            layout's.

    Raises:
        InputError: a tensor is missing, has another dtype or shape, or holds a scale that is not
            finite and positive.
    """
    shape = _kv_shape(scheme, kv_heads)
    single = {
        name: tensor.reshape(1)
        for name, tensor in tensors.items()
        if names is not None and tensor.ndim == 0
    }
    keys, values = (
        _scale({**tensors, **single}, name, shape).flatten()
        for name in names or kv_tensor_names(attention)
    )
    return KVScales(scheme=scheme, keys=keys, values=values)


def _kv_shape(scheme: TensorScheme, kv_heads: int) -> tuple[int, ...]:
    return (1,) if scheme.granularity == "per_tensor" else (kv_heads, 1, 1)


def require_held(scheme: LinearScheme) -> None:
    """Refuse a scheme that is sound but that this layout cannot hold."""
    size = _GROUP_SIZES.get(scheme.layout, scheme.weights.group_size)
    if scheme.weights.group_size != size:
        raise unsupported(
            f"{scheme.name}: {scheme.layout} weights in groups of {scheme.weights.group_size}, "
            f"loaders know {size}"
        )
    if scheme.layout == "pack-quantized" and scheme.weights.granularity == "per_tensor":
        raise unsupported(f"{scheme.name}: pack-quantized weights with one scale per tensor")
    if scheme.input is not None and scheme.input.rounds_at_run_time:
        raise unsupported(
            f"{scheme.name}: inputs whose scales are rounded up to powers of two, the layout has "
            "no words for them",
            "keep it in format fp8, or export --format dequantized",
        )
    for tensor in (scheme.weights, scheme.input):
        if tensor is None or tensor.kind != "float" or tensor.float8 == FLOAT4:
            continue
        if float8.FLAVOURS[tensor.float8].dtype != torch.float8_e4m3fn:
            cause = (
                f"{scheme.name}: float8 flavour {tensor.float8!r}, the layout holds e4m3fn codes"
            )
            raise unsupported(cause, _INSTEAD[tensor.float8])


def unsupported(
    cause: str, instead: str = "use a preset scheme, or a quantflow that knows this one"
) -> UnsupportedError:
    """Error that names the layout."""
    return UnsupportedError(f"compressed-tensors: {cause}", instead)


def _scale_shape(
    scheme: TensorScheme, shape: Sequence[int], *, name: str = "weight"
) -> tuple[int, ...]:
    """Stored shape of the scales of a weight of `shape`."""
    if len(shape) == 2 and scheme.granularity == "per_block" and shape[1] % scheme.block_rows:
        raise UnsupportedError(
            f"{name}.weight: {shape[1]} input features, blocks of {scheme.block_rows} do not "
            "divide them",
            "use blocks that divide the inputs of every linear",
        )
    if len(shape) != 2 or (scheme.group_size is not None and shape[1] % scheme.group_size):
        raise InputError(
            f"{name}: weight is {list(shape)}, group_size={scheme.group_size}",
            "the file is damaged; export again",
        )
    rows = -(-shape[0] // scheme.block_rows)
    return (
        (1,)
        if scheme.granularity == "per_tensor"
        else (rows, shape[1] // (scheme.group_size or shape[1]))
    )


def _first(scheme: TensorScheme) -> int:
    """Offset that is added to stored integers, which are centred on zero; qvalues begin at 0."""
    return 1 << (scheme.num_bits - 1)


def _tensor(
    tensors: Mapping[str, Tensor],
    key: str,
    dtype: torch.dtype | None,
    shape: tuple[int, ...] | None = None,
) -> Tensor:
    """A tensor after comparing its dtype and shape; None compares nothing."""
    tensor = tensors.get(key)
    if tensor is None:
        raise InputError(f"{key}: missing", "the artifact is incomplete; export again")
    if (dtype is not None and tensor.dtype != dtype) or (
        shape is not None and tuple(tensor.shape) != shape
    ):
        raise InputError(
            f"{key}: is {tensor.dtype} {list(tensor.shape)}, the scheme needs "
            f"{dtype or 'any dtype'} {shape or ''}",
            "the file is damaged or its config belongs to another one; export again",
        )
    return tensor


def _scale(
    tensors: Mapping[str, Tensor],
    key: str,
    shape: tuple[int, ...],
    *,
    weights: TensorScheme | None = None,
) -> Tensor:
    """Scales, float32, after looking at their values; [] is read as [1].

    `weights` is the scheme of the weights that the scales belong to; None for scales of inputs and
    of a KV cache.
    """
    single = tensors.get(key) if shape == (1,) else None
    if single is not None and single.ndim == 0:
        tensors = {key: single.reshape(1)}
    stored = _tensor(tensors, key, None, shape)
    if stored.dtype not in _SCALES and not (weights is not None and weights.scale_format == "e4m3"):
        raise InputError(
            f"{key}: is {stored.dtype}, a scale is a float of 16 bits or more",
            "export the artifact again",
        )
    scale = stored.float()
    bad = ~(
        torch.isfinite(scale) & (scale > 0) if weights is None else affine.is_scale(scale, weights)
    )
    if bad.any():
        sign = "positive" if weights is None else affine.sign_of_scales(weights)
        raise InputError(
            f"{key}: scale {scale[bad][0].item()}", f"scales are finite and {sign}; export again"
        )
    return scale


def _zero_point(
    tensors: Mapping[str, Tensor], key: str, *, scheme: LinearScheme, shape: tuple[int, ...]
) -> Tensor:
    """Zero points of the weight: int8 of `shape`, or float32 where the scheme has minima."""
    if scheme.layout != "pack-quantized":
        return _tensor(tensors, key, torch.int8, shape)
    if scheme.weights.minima:
        return _tensor(tensors, key, torch.float32, shape)
    num_bits, rows = scheme.weights.num_bits, shape[0]
    packed = _tensor(tensors, key, torch.int32, (-(-rows * num_bits // 32), shape[1]))
    return packing.unpack(packed.T, num_bits, rows).T.contiguous()  # [O, G]
