"""The quantized weight and the linear that has one: values that all stages pass on."""

import math
from dataclasses import dataclass, replace
from importlib import import_module

import torch
from torch import Tensor

from quantflow.accelerators import runs_triton
from quantflow.core import affine, blocks, float8, groups, microscaling, orthogonal
from quantflow.core.scheme import LinearScheme, TensorScheme
from quantflow.errors import SchemeError


def quantize_input(
    x: Tensor, scheme: TensorScheme, scale: Tensor | None = None, zero_point: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The qvalues of an input and their scale: by one kernel on a GPU, to the same bits.

    Args:
        x: [..., features].
        scheme: scheme of the input.
        scale: [1], scale of a static input; None computes one of each row.
        zero_point: [1], zero point of a static asymmetric input; else None.

    Returns:
        qvalues: [..., features]; scale: [..., 1], one per row, or the stored [1].
    """
    if runs_triton(x.device.type):
        kernel = import_module("quantflow.core.rounding_kernel")
        if kernel.takes(scheme):
            codes, scales = kernel.rounded(x, scale, zero_point, scheme)
            return codes, scales
    scale = affine.scale_per_token(x, scheme) if scale is None else scale
    return affine.quantize(x, scale, zero_point, scheme), scale


def qvalue_dtype(scheme: TensorScheme) -> torch.dtype:
    """The dtype of a weight's qvalues: int8 for integers, the flavour's for float8."""
    return float8.FLAVOURS[scheme.float8].dtype if scheme.kind == "float" else torch.int8


def require_scales(name: str, scale: Tensor, scheme: TensorScheme) -> None:
    """Refuse scales of a weight that are none (`affine.is_scale`).

    Args:
        name: weight's name, for messages.
        scale: scales, of any shape.
        scheme: scheme of the weight.

    Raises:
        SchemeError: naming `name` and the first value that is no scale.
    """
    bad = ~affine.is_scale(scale, scheme)
    if bad.any():
        value = scale[bad][0].item()
        remedy = "quantize the weight again"
        if math.isinf(value):  # `affine.stored` says so of a weight beyond the scales' dtype
            remedy = (
                "quantize with a scheme whose scales have the model's dtype, such as W4A16, or "
                "leave the linear out with --ignore"
            )
        raise SchemeError(
            f"{name}: scale {value}, it is finite and {affine.sign_of_scales(scheme)}", remedy
        )


@dataclass(frozen=True, kw_only=True, eq=False)  # == on tensors has no single answer; identity does
class QTensor:
    """A quantized two-dimensional weight.

    real ~= scale * (qvalue - zero_point), scale repeated over the columns of its group. Shapes and
    dtypes are checked when it is made, values by `validate`.

    Attributes:
        qvalue: [O, I], int8 for integers of any num_bits, unpacked; else the flavour's dtype.
        scale: [O or 1, G] float32, finite, positive, or of either sign for symmetric integers; G
            divides I. It is [1, 1] when per_tensor, and has equal rows within a block when
            per_block.
        zero_point: int8 of scale's shape; None exactly when the scheme is symmetric; float32 where
            the scheme has minima (minimum = scale * zero_point).
        scheme: scheme of the weight.
        global_scale: [1] float32 with scale_format e4m3, where scale = (an e4m3 value) /
            global_scale; else None.
    """

    qvalue: Tensor
    scale: Tensor
    zero_point: Tensor | None = None
    scheme: TensorScheme
    global_scale: Tensor | None = None

    def __post_init__(self) -> None:
        """Check shapes and dtypes.

        Raises:
            SchemeError: one of the invariants on shape or dtype does not hold.
        """
        expected = qvalue_dtype(self.scheme)
        if self.qvalue.dtype != expected or self.qvalue.ndim != 2:
            raise SchemeError(
                f"qvalue is {self.qvalue.dtype} {list(self.qvalue.shape)}, the scheme needs "
                f"{expected} [O, I]",
                "quantize the weight with this scheme",
            )
        rows, columns = self.qvalue.shape
        if not (rows and columns):
            raise SchemeError(
                f"qvalue is empty, [{rows}, {columns}]",
                "leave a linear without weights unquantized",
            )
        size = groups.group_size_for(self.scheme, columns, name="qvalue")
        shape = (1, 1) if self.scheme.granularity == "per_tensor" else (rows, columns // size)
        if tuple(self.scale.shape) != shape or self.scale.dtype != torch.float32:
            raise SchemeError(
                f"scale is {self.scale.dtype} {list(self.scale.shape)}, qvalue [{rows}, "
                f"{columns}] needs float32 {list(shape)}",
                "compute the scale at the scheme's granularity",
            )
        zero_point = self.zero_point
        if (zero_point is None) != self.scheme.symmetric:
            raise SchemeError(
                f"zero_point is {'absent' if zero_point is None else 'present'}, "
                f"symmetric={self.scheme.symmetric}",
                "give a zero_point exactly when the scheme is asymmetric",
            )
        dtype = torch.float32 if self.scheme.minima else torch.int8
        if zero_point is not None and (zero_point.shape, zero_point.dtype) != (
            self.scale.shape,
            dtype,
        ):
            raise SchemeError(
                f"zero_point is {zero_point.dtype} {list(zero_point.shape)}, scale is "
                f"{list(self.scale.shape)}",
                f"give an {str(dtype).removeprefix('torch.')} zero_point of scale's shape",
            )

    def validate(self, name: str) -> None:
        """Check the values of scale, qvalue and zero point.

        A scale is valid (`affine.is_scale`) and equal within a block; qvalue and zero point are
        within the scheme's range.

        Args:
            name: weight's name, for messages.

        Raises:
            SchemeError: naming `name` and the first value that is out of range.
        """
        require_scales(name, self.scale, self.scheme)
        block_rows = self.scheme.block_rows
        if block_rows > 1 and not torch.equal(
            groups.expand_rows(self.scale[::block_rows], block_rows, len(self.scale)), self.scale
        ):
            raise SchemeError(
                f"{name}: {block_rows} rows of a block have several scales",
                "quantize the rows of a block together",
            )
        if self.scheme.kind == "float":
            flavour = self.scheme.float8
            magnitude = float8.largest_magnitude(self.qvalue)
            if not magnitude <= float8.FLAVOURS[flavour].largest:  # NaN is not <= anything
                raise SchemeError(
                    f"{name}: qvalue {magnitude}, the largest of {flavour} is "
                    f"{float8.FLAVOURS[flavour].largest}",
                    "the weight or its file is damaged; quantize again",
                )
            if self.scheme.num_bits < 8 and not microscaling.holds_e2m1(self.qvalue):
                raise SchemeError(
                    f"{name}: a qvalue is none of {flavour}'s",
                    "the weight or its file is damaged; quantize again",
                )
            return
        kind = self.scheme.block
        if kind is not None and kind.points and not blocks.holds(self.qvalue, kind):
            raise SchemeError(f"{name}: a qvalue is no point of {kind.name}", "quantize again")
        if (
            self.scheme.minima
            and self.zero_point is not None
            and not torch.isfinite(self.scale * self.zero_point).all()
        ):
            raise SchemeError(f"{name}: a minimum is not finite", "quantize the weight again")
        whole = None if self.scheme.minima else self.zero_point
        for field, values in (("qvalue", self.qvalue), ("zero_point", whole)):
            if values is not None and (
                values.min() < self.scheme.qmin or values.max() > self.scheme.qmax
            ):
                raise SchemeError(
                    f"{name}: {field} spans {values.min().item()}..{values.max().item()}, "
                    f"{self.scheme.num_bits} bits hold {self.scheme.qmin}..{self.scheme.qmax}",
                    "quantize again",
                )

    def rows(self, rows: slice) -> "QTensor":
        """Some of the rows, as views; they need not be whole blocks."""

        def cut(values: Tensor) -> Tensor:
            return values if self.scheme.granularity == "per_tensor" else values[rows]

        zero_point = None if self.zero_point is None else cut(self.zero_point)
        return replace(self, qvalue=self.qvalue[rows], scale=cut(self.scale), zero_point=zero_point)

    def to(self, device: torch.device) -> "QTensor":
        """The weight on a device; itself where it is there already."""
        if self.qvalue.device == device:
            return self
        zero_point = None if self.zero_point is None else self.zero_point.to(device)
        global_scale = None if self.global_scale is None else self.global_scale.to(device)
        return replace(
            self,
            qvalue=self.qvalue.to(device),
            scale=self.scale.to(device),
            zero_point=zero_point,
            global_scale=global_scale,
        )

    def dequantize(self) -> Tensor:
        """The float32 approximation, [O, I]."""
        # `real` is new memory and is changed in place, so no second float32 copy is made
        real = float8.widen(self.qvalue)
        split = groups.to_groups(real, real.shape[1] // self.scale.shape[1])  # [O, G, g]
        minimum = self.minimum
        if minimum is not None:
            split *= self.scale[..., None]
            split -= minimum[..., None]
            return real
        if self.zero_point is not None:
            split -= self.zero_point[..., None]
        split *= self.scale[..., None]
        return real

    @property
    def minimum(self) -> Tensor | None:
        """The minimum that is subtracted from scale * qvalue, exactly as a block holds it, [O, G].

        None where the scheme has no minima.
        """
        if self.zero_point is None or self.scheme.block is None or not self.scheme.minima:
            return None
        return blocks.stored_minima(self.scale * self.zero_point, self.scheme.block)


@dataclass(frozen=True, kw_only=True, eq=False)
class PackedLinear:
    """A linear with weights of e2m1 in groups, its codes two to a byte as files hold them.

    Its qvalues are `microscaling.unpack_e2m1(codes)`, which take twice the memory. Whoever makes
    one has checked the scales: each is finite and positive.

    Attributes:
        codes: [O, I / 2] uint8, contiguous, the even column in the lower half.
        scale: [O, G] float32.
        scheme: scheme of the linear; it leaves inputs alone.
    """

    codes: Tensor
    scale: Tensor
    scheme: LinearScheme

    @property
    def shape(self) -> tuple[int, int]:
        """(out_features, in_features)."""
        return self.codes.shape[0], 2 * self.codes.shape[1]


@dataclass(frozen=True, kw_only=True, eq=False)
class QuantizedLinear:
    """A linear's quantized weight and, where its input is static, the input's scale.

    Attributes:
        weight: the QTensor, [out_features, in_features].
        scheme: the whole scheme; `scheme.weights` equals `weight.scheme`.
        input_scale: [1] float32, only for a static input; the global scale of one with scale_format
            e4m3.
        input_zero_point: [1] int8, only for a static asymmetric input.
        order: [in_features] int64, the input that each column of the weight multiplies (act-order);
            None where column i multiplies input i.
    """

    weight: QTensor
    scheme: LinearScheme
    input_scale: Tensor | None = None
    input_zero_point: Tensor | None = None
    order: Tensor | None = None

    def __post_init__(self) -> None:
        """Check the weight's scheme, and that the input's scale is there exactly when it is needed.

        Raises:
            SchemeError: the weight has another scheme; the input's scale is missing, superfluous or
                not [1].
        """
        if self.weight.scheme != self.scheme.weights:
            raise SchemeError(
                f"scheme {self.scheme.name}: weights are {self.scheme.weights}, the weight has "
                f"{self.weight.scheme}",
                "quantize the weight with the scheme of its linear",
            )
        inputs = self.scheme.input
        needs_scale = inputs is not None and inputs.measured
        needs_zero_point = needs_scale and inputs is not None and not inputs.symmetric
        if (self.input_scale is not None) != needs_scale or (
            self.input_zero_point is not None
        ) != needs_zero_point:
            raise SchemeError(
                f"scheme {self.scheme.name}: input_scale "
                f"{'present' if self.input_scale is not None else 'absent'}, "
                f"input_zero_point {'present' if self.input_zero_point is not None else 'absent'}",
                "a static input has a scale, an asymmetric one also a zero_point, any other has "
                "neither",
            )
        for name, value, dtype in (
            ("input_scale", self.input_scale, torch.float32),
            ("input_zero_point", self.input_zero_point, torch.int8),
        ):
            if value is not None and (tuple(value.shape), value.dtype) != ((1,), dtype):
                raise SchemeError(
                    f"{name} is {value.dtype} {list(value.shape)}, the scheme needs {dtype} [1]",
                    "a static input has one scale for the whole tensor",
                )

    def mixed_input(self, x: Tensor) -> Tensor:
        """The input in the order of the weight's columns, and mixed where the scheme says so.

        Args:
            x: [..., in_features].
        """
        x = x if self.order is None else x[..., self.order]
        return x if self.scheme.rotation is None else orthogonal.mixed(x, self.scheme.rotation)

    def dequantize(self) -> Tensor:
        """The float32 weight whose column i multiplies input i, [O, I].

        Inputs are mixed already.
        """
        real = self.weight.dequantize()
        return real if self.order is None else real[:, torch.argsort(self.order)]

    def fake_quantize_input(self, x: Tensor) -> Tensor:
        """The input as the quantized linear sees it, in x's dtype.

        Args:
            x: [..., in_features], mixed already.
        """
        return affine.fake_quantize_input(
            x, self.scheme.input, self.input_scale, self.input_zero_point
        )

    def quantize_input(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The qvalues of an input and their scale.

        The scheme quantizes inputs, statically or per token.

        Args:
            x: [..., in_features].

        Returns:
            qvalues: [..., in_features]; scale: [..., 1], one per token, or the stored [1].
        """
        assert self.scheme.input is not None
        return quantize_input(x, self.scheme.input, self.input_scale, self.input_zero_point)

    def to(self, device: torch.device) -> "QuantizedLinear":
        """The linear on a device; itself where it is there already."""
        parts = (self.weight.qvalue, self.input_scale, self.input_zero_point, self.order)
        if all(part is None or part.device == device for part in parts):
            return self

        def moved(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor.to(device)

        return replace(
            self,
            weight=self.weight.to(device),
            input_scale=moved(self.input_scale),
            input_zero_point=moved(self.input_zero_point),
            order=moved(self.order),
        )
