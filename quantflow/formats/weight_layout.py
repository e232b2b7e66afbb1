"""One interface for the layouts of other programs, and what those layouts share.

Every layout converts to and from `QuantizedLinear`, whose equation is `real = scale * (qvalue -
zero_point)`. No conversion rounds: what a layout cannot hold exactly is refused with the tensor and
the value that would change.

A folder's headers say which linears are quantized: a linear has the layout's tensors, or a plain
weight. Its config.json says the rest. Both have to agree with the shapes of the tensors.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from quantflow.core import affine
from quantflow.core.groups import to_groups
from quantflow.core.qtensor import PackedLinear, QTensor, QuantizedLinear
from quantflow.core.scheme import LinearScheme, TensorScheme
from quantflow.errors import InputError, SchemeError, UnsupportedError
from quantflow.files.safetensors_header import TensorInfo

Infos = Mapping[str, TensorInfo]
SAME_NAMES: Mapping[str, str] = MappingProxyType({})  # no module has another name than its tensors
# quant_method of AutoRound, which packs in several layouts
AUTO_ROUND = ("auto-round", "intel/auto-round")
_AGAIN = "download the folder again, or make it again with the program that wrote it"


class TensorLayout(Protocol):
    """How the tensors of one quantized linear are named and read.

    `quantflow.formats.compressed_tensors` is one too.
    """

    def tensor_names(self, name: str, scheme: LinearScheme) -> tuple[str, ...]:
        """Names of the tensors that hold the linear `name` (without `.weight`)."""

    def decode(
        self, name: str, tensors: Mapping[str, Tensor], scheme: LinearScheme
    ) -> QuantizedLinear:
        """The linear.

        Args:
            name: its source name, without `.weight`.
            tensors: full name -> tensor; may hold other linears too; not modified.
            scheme: scheme that the layout's configuration says.

        Raises:
            InputError: a tensor is missing, or has another dtype, shape or value than the scheme
                allows; it names the tensor.
        """


@runtime_checkable
class PackedLayout(TensorLayout, Protocol):
    """A layout whose codes of e2m1 a kernel takes as they are stored."""

    def packed(
        self, name: str, tensors: Mapping[str, Tensor], scheme: LinearScheme
    ) -> PackedLinear | None:
        """The linear that `decode` returns, its codes packed; None where it has other weights.

        Args and errors are those of `decode`.
        """


class WeightLayout(TensorLayout, Protocol):
    """A layout as a value: its fields hold what differs between two files of one kind.

    That is a version or a packing, for example.
    """

    @property
    def name(self) -> str:
        """Key of the layout in `quantflow.formats.LAYOUTS`."""

    @property
    def reordered(self) -> bool:
        """Whether groups may be of inputs that lie apart, so that `decode` returns an order."""

    def with_order(self) -> "WeightLayout":
        """The layout as it is written where `reordered` holds; itself if it has no words for it."""

    def why_not(self, scheme: LinearScheme, shape: tuple[int, int]) -> str | None:
        """Reason why the layout cannot hold a linear of `shape` (O, I); None when it can."""

    def encode(
        self, name: str, linear: QuantizedLinear, *, scale_dtype: torch.dtype
    ) -> dict[str, Tensor]:
        """Tensors of a linear that `why_not` has no reason against, in the order of `tensor_names`.

        Args:
            name: its source name, without `.weight`.
            linear: linear of a scheme that the layout holds; not modified.
            scale_dtype: dtype in which the scales of integers are stored.

        Raises:
            UnsupportedError: the layout would change a value; the message has the tensor and both
                values.
        """

    def quantization_config(
        self,
        schemes: Mapping[str, LinearScheme],
        *,
        ignore: Sequence[str],
        model_type: str,
        modules: Mapping[str, str] = SAME_NAMES,
    ) -> dict[str, Any]:
        """The `quantization_config` of config.json.

        Args:
            schemes: source name -> scheme, every quantized linear of the model; not empty.
            ignore: the model's other linears, by all names that loaders know.
            model_type: config.json's.
            modules: source name -> name in the model in memory, where that differs.

        Raises:
            UnsupportedError: the layout has no words for schemes that differ between linears.
        """

    def schemes(
        self,
        config: Mapping[str, Any],
        shapes: Mapping[str, tuple[int, int]],
        infos: Infos,
        modules: Mapping[str, str] = SAME_NAMES,
    ) -> dict[str, LinearScheme]:
        """Scheme of each quantized linear.

        Args:
            config: the `quantization_config` of config.json.
            shapes: source name -> (O, I) of all linears of the model.
            infos: headers of all tensors.
            modules: source name -> name in the model in memory, where that differs; a configuration
                may mean either.

        Raises:
            UnsupportedError: a bit width, group size or option that this version does not know.
            InputError: the configuration and a tensor's shape disagree; it names the tensor.
        """


def integers(num_bits: int, group_size: int, *, symmetric: bool, where: str) -> TensorScheme:
    """Scheme of integer weights as most configurations spell it.

    A group size of -1 is a scale per row.

    Raises:
        UnsupportedError: a bit width or group size that no layout here has.
    """
    per_row = group_size == -1
    try:
        return TensorScheme(
            kind="int",
            num_bits=num_bits,
            granularity="per_channel" if per_row else "per_group",
            group_size=None if per_row else group_size,
            symmetric=symmetric,
        )
    except SchemeError as error:
        raise UnsupportedError(f"config.json: {where}: {error.cause}", error.remedy) from error


def why_not_mixed(scheme: LinearScheme) -> str | None:
    """Reason why a layout without words for Hadamard matrices cannot hold a scheme, or None."""
    if scheme.rotation is None:
        return None
    return f"its inputs are mixed in blocks of {scheme.rotation}, the layout has no words for it"


def why_not_integers(scheme: LinearScheme, bits: Sequence[int], held: str) -> str | None:
    """Reason why a layout of integer weights in groups or rows cannot hold a scheme, or None.

    Args:
        scheme: scheme of a linear.
        bits: numbers of bits that the layout holds.
        held: the layout's weights, at the end of the sentence.
    """
    weights = scheme.weights
    if scheme.input is not None:
        return f"scheme {scheme.name} quantizes inputs, the layout has no words for it"
    if weights.block_type is not None:
        return f"scheme {scheme.name} is llama.cpp's, with scales and minima of its own"
    if (mixed := why_not_mixed(scheme)) is not None:
        return mixed
    grouped = weights.granularity in ("per_group", "per_channel")
    if weights.kind != "int" or weights.num_bits not in bits or not grouped:
        kind = f"{weights.kind}{weights.num_bits} {weights.granularity}"
        return f"scheme {scheme.name} has weights of {kind}, {held}"
    return None


def only_scheme(schemes: Mapping[str, LinearScheme], layout: str) -> LinearScheme:
    """The scheme of all linears.

    Raises:
        UnsupportedError: two linears have different schemes.
    """
    first_name, first = next(iter(schemes.items()))
    for name, scheme in schemes.items():
        if (scheme.weights, scheme.input) != (first.weights, first.input):
            cause = (
                f"{name}: scheme {scheme.name}, {first_name} has {first.name}; {layout} has one "
                "for all"
            )
            raise UnsupportedError(
                cause, "keep it as compressed-tensors, or quantize all linears alike"
            )
    return first


def matrix(
    tensors: Mapping[str, Tensor], key: str, axes: str = "[out_features, in_features]"
) -> Tensor:
    """A matrix among a linear's tensors, of any dtype.

    Args:
        tensors: full name -> tensor.
        key: full name of the matrix.
        axes: its axes, for the message.

    Raises:
        InputError: it is missing, or no matrix.
    """
    stored = tensors.get(key)
    if stored is None or stored.ndim != 2:
        cause = f"{key}: {'missing' if stored is None else f'is {list(stored.shape)}'}"
        raise InputError(f"{cause}, {axes} is needed", _AGAIN)
    return stored


def tensor(
    tensors: Mapping[str, Tensor], key: str, dtypes: tuple[torch.dtype, ...], shape: tuple[int, ...]
) -> Tensor:
    """A tensor after comparing its dtype and shape.

    Raises:
        InputError: it is missing, or has another dtype or shape.
    """
    stored = tensors.get(key)
    if stored is None:
        raise InputError(f"{key}: missing, its linear's other tensors are there", _AGAIN)
    if stored.dtype not in dtypes or tuple(stored.shape) != shape:
        needed = " or ".join(str(dtype) for dtype in dtypes)
        cause = (
            f"{key}: is {stored.dtype} {list(stored.shape)}, config.json needs {needed} "
            f"{list(shape)}"
        )
        raise InputError(
            cause, "check bits and group_size in config.json; or download the folder again"
        )
    return stored


def scales(
    tensors: Mapping[str, Tensor], key: str, shape: tuple[int, ...], weights: TensorScheme
) -> Tensor:
    """Scales of a weight, float32 of `shape`, after looking at their values.

    Raises:
        InputError: one is no scale (`affine.is_scale`).
    """
    values = tensor(tensors, key, (torch.float16, torch.bfloat16, torch.float32), shape).float()
    bad = ~affine.is_scale(values, weights)
    if bad.any():
        raise InputError(
            f"{key}: scale {values[bad][0].item()}, scales are finite and "
            f"{affine.sign_of_scales(weights)}",
            _AGAIN,
        )
    return values


def single_scale(tensors: Mapping[str, Tensor], key: str, weights: TensorScheme) -> Tensor:
    """A scale of one number, float32 [], which some write as [1].

    Raises:
        InputError: it is missing, is several numbers, or is no scale.
    """
    stored = tensors.get(key)
    one = stored is not None and stored.numel() == 1
    return scales(
        {key: stored.reshape(())} if stored is not None and one else tensors, key, (), weights
    )


def zero_point_of(weight: QTensor) -> Tensor:
    """Zero points of a weight of integers, int8 [O, G]; zeros where it is symmetric."""
    if weight.zero_point is None:
        return torch.zeros_like(weight.scale, dtype=torch.int8)
    return weight.zero_point


def beside_positive(qvalue: Tensor, zero_point: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Codes and zero points that mean beside |scale| what these mean beside scale, to the bit.

    scale * (q - z) is -scale * (~q - ~z).

    Args:
        qvalue: int8 [O, I].
        zero_point: int8 [O, G].
        scale: scales of either sign, [O, G].
    """
    turned = (scale < 0).to(torch.int8).neg()  # [O, G], all bits set where the sign changes
    split = to_groups(qvalue, qvalue.shape[1] // scale.shape[1])  # [O, G, g]
    return (split ^ turned[..., None]).reshape(qvalue.shape), zero_point ^ turned


def stored_scales(name: str, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Scales in a dtype that holds them exactly.

    Raises:
        UnsupportedError: the dtype does not hold a scale; the first is named.
    """
    stored = scale.to(dtype)
    in_dtype = f" in {str(dtype).removeprefix('torch.')}"
    require_same_scales(
        name,
        scale,
        stored.float(),
        where=in_dtype,
        instead="export with --dtype bf16 or f32, where the reader takes such scales",
    )
    return stored


def require_same_scales(
    name: str, before: Tensor, after: Tensor, *, instead: str, where: str = ""
) -> None:
    """Refuse scales that a layout would change.

    Args:
        name: name of the linear or the tensor.
        before: scales of the weight, float32 [O, G].
        after: scales that a reader would have, float32 [O, G].
        instead: remedy of the error.
        where: the stored form, at the end of the message.

    Raises:
        UnsupportedError: a scale changes; the first is named, with its row, group and both values.
    """
    changed = before != after
    if changed.any():
        row, group = changed.nonzero()[0].tolist()
        cause = (
            f"{name}: {int(changed.sum())} of {before.numel()} scales would change, the first "
            f"(row {row}, group {group}) from "
            f"{before[row, group].item()!r} to {after[row, group].item()!r}{where}"
        )
        raise UnsupportedError(cause, instead)


def checked(name: str, weight: QTensor) -> QTensor:
    """The weight after comparing its values with its scheme.

    Raises:
        InputError: a value is out of range.
    """
    try:
        weight.validate(name)
    except SchemeError as error:
        raise InputError(error.cause, _AGAIN) from error
    return weight


def number(config: Mapping[str, Any], *keys: str) -> int:
    """Integer of the first of several keys that is there.

    Raises:
        InputError: none of the keys is there, or its value is no integer.
    """
    value = next((config[key] for key in keys if config.get(key) is not None), None)
    if type(value) is not int:
        raise InputError(
            f"config.json: quantization_config: {keys[0]} is {value!r}, an integer is needed",
            _AGAIN,
        )
    return value


def flag(config: Mapping[str, Any], key: str, *, default: bool) -> bool:
    """A boolean of the configuration.

    Raises:
        InputError: the value is no boolean.
    """
    value = config.get(key)
    if value is None:
        return default
    if type(value) is not bool:
        raise InputError(
            f"config.json: quantization_config: {key} is {value!r}, true or false is needed", _AGAIN
        )
    return value


def order_of(key: str, group_of: Tensor, *, groups: int) -> Tensor | None:
    """Order of inputs in which groups stand side by side, [I]; None where they do already.

    Raises:
        InputError: a group that is not there, or that has more inputs than the others.
    """
    if groups == 1 and not group_of.any():
        return None
    size = len(group_of) // groups
    low, high = int(group_of.min()), int(group_of.max())
    if low < 0 or high >= groups:
        raise InputError(
            f"{key}: groups {low} to {high}, {groups} have scales", "download the folder again"
        )
    counts = torch.bincount(group_of, minlength=groups)
    if (wrong := (counts != size).nonzero()).numel():
        group = int(wrong[0])
        cause = f"{key}: group {group} has {int(counts[group])} inputs, each of {groups} has {size}"
        raise InputError(cause, "check group_size in config.json, or download the folder again")
    order = torch.argsort(group_of, stable=True)
    return None if torch.equal(order, torch.arange(len(order))) else order
