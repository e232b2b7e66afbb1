"""Schemes: how the weights and inputs of a linear are quantized, as plain data.

The names in PRESETS are the field's and have compressed-tensors' meaning, with these exceptions.
W8A8_STATIC, and the _ASYM of W6A16, W5A16, W3A16 and W2A16, are ours. W8A16 has a scale per
channel, as kernels for it want; compressed-tensors 0.20 has one per 128 columns. A scheme validates
itself and computes nothing.
"""

from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, get_args

from quantflow.core.block_types import BLOCK_TYPES, BlockType
from quantflow.core.scale_rules import ARITHMETIC_NAMES, SCALE_METHODS, Rule
from quantflow.errors import SchemeError

Kind = Literal["int", "float"]
Granularity = Literal[
    "per_tensor", "per_channel", "per_group", "per_block", "per_token", "per_head"
]
Layout = Literal[
    "float-quantized",
    "int-quantized",
    "pack-quantized",
    "nvfp4-pack-quantized",
    "mxfp4-pack-quantized",
    "mxfp8-quantized",
]
ScaleFormat = Literal["float", "e8m0", "e4m3"]
INT_BITS = (2, 3, 4, 5, 6, 8)
FLOAT8_FLAVOURS = ("e4m3fn", "e5m2", "e4m3fnuz", "gaudi2")
FLOAT4 = "e2m1"
SCALE_ROUNDINGS = ("none", "pow2")
INPUT_OBSERVERS = ("amax", "mse", "percentile")


def _known(field: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise SchemeError(f"{field}={value!r} is unknown", f"use one of {', '.join(allowed)}")


@dataclass(frozen=True, kw_only=True)
class TensorScheme:
    """The scheme of one tensor.

    Attributes:
        kind: `int` (two's complement of `num_bits`) or `float` (the flavour named by `float8`).
        num_bits: one of INT_BITS; for floats the flavour's, 8 or 4.
        granularity: elements that share a scale; `per_token` needs `dynamic`; `per_head` is for
            keys and values alone.
        group_size: input features per group; with `per_block` also the rows that share a scale.
            Only with these two.
        symmetric: whether the range is centred on zero and zero_point is None.
        dynamic: whether the scale is computed from each input at run time instead of being stored.
        float8: one of FLOAT8_FLAVOURS, or FLOAT4; only read when `kind` is `float`.
        scale_format: format of the scales of groups: `float` as the layout stores them, `e8m0`
            powers of two (microscaled, MX), or `e4m3` beside one global scale of the whole tensor
            (NVFP4), which is measured where the tensor is an input.
        scale_rounding: `pow2` rounds a scale of float8 up to a power of two, as hardware that
            shifts exponents wants it: a stored one, or those of a dynamic input in groups.
        scale_rule: rule that derives a stored scale of float8; None is amax / largest, rounded by
            `scale_rounding`. Neither of the two is compared: a stored scale is a scale like any
            other. What rounds or writes inputs asks `rounds_at_run_time`.
        scale_arithmetic: one of ARITHMETIC_NAMES, the dtype in which `scale_rule` derives it.
        observer: range of a static input: all measured values (`amax`), or a clip by the squared
            error (`mse`) or at a `percentile`. It is not compared: no layout says how a scale was
            chosen.
        block_type: llama.cpp's type (quantflow/core/block_types.py) whose blocks can hold the
            weight as it is; None restricts scales by their dtype alone.
    """

    kind: Kind
    num_bits: int
    granularity: Granularity
    group_size: int | None = None
    symmetric: bool = True
    dynamic: bool = False
    float8: str = "e4m3fn"
    scale_format: ScaleFormat = "float"
    scale_rounding: str = field(default="none", compare=False)
    scale_rule: Rule | None = field(default=None, compare=False)
    scale_arithmetic: str = field(default="exact", compare=False)
    observer: str = field(default="amax", compare=False)
    block_type: str | None = None

    def __post_init__(self) -> None:
        """Refuse unknown values and combinations that have no meaning.

        Raises:
            SchemeError: naming the two fields that disagree.
        """
        _known("kind", self.kind, get_args(Kind))
        _known("granularity", self.granularity, get_args(Granularity))
        _known("float8", self.float8, (*FLOAT8_FLAVOURS, FLOAT4))
        _known("scale_format", self.scale_format, get_args(ScaleFormat))
        if self.scale_format != "float" and (self.kind, self.granularity, self.scale_rounding) != (
            "float",
            "per_group",
            "none",
        ):
            raise SchemeError(
                f"scale_format={self.scale_format!r} with kind={self.kind!r}, "
                f"granularity={self.granularity!r}, "
                f"scale_rounding={self.scale_rounding!r}",
                "e8m0 and e4m3 are formats of the scales of groups of floats, and round them by "
                "themselves",
            )
        _known("scale_rounding", self.scale_rounding, SCALE_ROUNDINGS)
        _known("observer", self.observer, INPUT_OBSERVERS)
        of_groups = not self.dynamic or self.granularity == "per_group"
        if self.scale_rounding != "none" and not (self.kind == "float" and of_groups):
            raise SchemeError(
                f"scale_rounding={self.scale_rounding!r} with kind={self.kind!r}, "
                f"granularity={self.granularity!r}, dynamic={self.dynamic}",
                "stored scales of float8 and those of groups of inputs are rounded to powers of "
                "two, no others",
            )
        _known("scale_arithmetic", self.scale_arithmetic, ARITHMETIC_NAMES)
        if self.scale_rule is not None:
            self._check_scale_rule(self.scale_rule)
        if self.num_bits not in (
            INT_BITS if self.kind == "int" else (4,) if self.float8 == FLOAT4 else (8,)
        ):
            flavour = "" if self.kind == "int" else f", float8={self.float8!r}"
            raise SchemeError(
                f"num_bits={self.num_bits} with kind={self.kind!r}{flavour}",
                f"use 2, 3, 4, 5, 6 or 8 for int and 8 for float, 4 for {FLOAT4}",
            )
        if (self.granularity in ("per_group", "per_block")) != (self.group_size is not None):
            raise SchemeError(
                f"granularity={self.granularity!r} with group_size={self.group_size}",
                "give group_size with per_group and per_block, and only there",
            )
        if self.group_size is not None and self.group_size < 1:
            raise SchemeError(
                f"group_size={self.group_size}", "use a positive divisor of in_features"
            )
        if (self.granularity == "per_token") and not self.dynamic:
            raise SchemeError(
                "granularity='per_token' with dynamic=False", "a scale per token is always dynamic"
            )
        if self.granularity == "per_head" and self.dynamic:
            raise SchemeError(
                "granularity='per_head' with dynamic=True",
                "the scales of heads are measured and stored",
            )
        if self.granularity == "per_block" and (self.kind != "float" or self.dynamic):
            raise SchemeError(
                f"granularity='per_block' with kind={self.kind!r}, dynamic={self.dynamic}",
                "blocks are of float8 weights",
            )
        if self.block_type is not None:
            _known("block_type", self.block_type, tuple(BLOCK_TYPES))
            kind = BLOCK_TYPES[self.block_type]
            shape = (self.kind, self.num_bits, self.granularity, self.group_size, self.symmetric)
            if shape != ("int", kind.num_bits, "per_group", kind.group_size, not kind.minima):
                raise SchemeError(
                    f"block_type={kind.name} with {self.kind}{self.num_bits} {self.granularity} "
                    f"of {self.group_size}",
                    f"it holds int{kind.num_bits} in groups of {kind.group_size}; leave the "
                    "group size out",
                )
        if self.kind == "float" and not self.symmetric:
            raise SchemeError(
                "kind='float' with symmetric=False", "float8 has no zero_point; use symmetric=True"
            )

    def _check_scale_rule(self, rule: Rule) -> None:
        granularity = {"PTS": "per_tensor", "PCS": "per_channel"}[rule.granularity]
        shape = (
            self.kind,
            self.num_bits,
            self.granularity,
            self.dynamic or rule.dynamic,
            self.scale_rounding,
        )
        if shape != ("float", 8, granularity, False, "none"):
            raise SchemeError(
                f"a scale rule {rule.granularity} with {self.kind}{self.num_bits} "
                f"{self.granularity}, dynamic={shape[3]}, "
                f"scale_rounding={self.scale_rounding!r}",
                "rules are of the stored scales of float8, of tensors or channels, and round "
                "them by themselves",
            )

    @property
    def block_rows(self) -> int:
        """The rows of a weight that share the scale of a group.

        It is 1 except with `per_block`, and not read with `per_tensor`.
        """
        return (
            self.group_size
            if self.granularity == "per_block" and self.group_size is not None
            else 1
        )

    @property
    def block(self) -> BlockType | None:
        """The record of `block_type`."""
        return None if self.block_type is None else BLOCK_TYPES[self.block_type]

    @property
    def minima(self) -> bool:
        """Whether groups have a minimum, a real number.

        Zero points are then float32 and qvalues begin at 0.
        """
        return self.block is not None and self.block.minima

    @property
    def code_bits(self) -> int:
        """The bits that distinguish the points, of a codebook to the nearest bit.

        They are fewer than `num_bits` where a block type has points of its own.
        """
        kind = self.block
        if kind is None or not kind.points:
            return self.num_bits
        if kind.codebook is not None:
            return round(kind.codebook.bits)
        return (len(kind.points) - 1).bit_length()

    @property
    def measured(self) -> bool:
        """Whether calibration decides a number of such an input: its scale or global scale."""
        return not self.dynamic or self.scale_format == "e4m3"

    @property
    def rounds_at_run_time(self) -> bool:
        """Whether scales that each input gets at run time are rounded up to powers of two."""
        return self.dynamic and self.scale_rounding != "none"

    @property
    def qmin(self) -> int:
        """Smallest qvalue of an int scheme."""
        if self.block is not None and self.block.points:
            return self.block.points[0]
        return 0 if self.minima else -(1 << (self.num_bits - 1))

    @property
    def qmax(self) -> int:
        """Largest qvalue of an int scheme."""
        if self.block is not None and self.block.points:
            return self.block.points[-1]
        return self.qmin + (1 << self.num_bits) - 1


_FLOAT_LAYOUTS: dict[tuple[int, str], Layout] = {
    (8, "float"): "float-quantized",
    (8, "e8m0"): "mxfp8-quantized",
    (4, "e8m0"): "mxfp4-pack-quantized",
    (4, "e4m3"): "nvfp4-pack-quantized",
}


@dataclass(frozen=True, kw_only=True)
class LinearScheme:
    """The scheme of one linear: its weight, its input, its layout on disk, and the usual method.

    Attributes:
        name: preset's name, for people; `replace`d schemes keep it.
        weights: scheme of the weight.
        input: scheme of the input; None when the input stays in the model's dtype.
        layout: form of the qvalues in a file.
        algorithm, transforms: methods of a recipe that names none.
        rotation: number of neighbouring inputs that a Hadamard matrix mixes before anything else, a
            power of two (`quantflow.core.orthogonal.mixed`); the weight then belongs to mixed
            inputs. None where inputs are not mixed.
    """

    name: str
    weights: TensorScheme
    input: TensorScheme | None
    layout: Layout
    algorithm: str = "rtn"
    transforms: tuple[str, ...] = ()
    rotation: int | None = None

    def __post_init__(self) -> None:
        """Refuse weights and inputs that no linear here computes; there is no silent substitute.

        Raises:
            SchemeError: dynamic weights, an input that is neither static per tensor nor symmetric
                per token nor in the groups or blocks of the weights; a layout that cannot hold the
                weights, or a rotation of no power of two.
        """
        _known("layout", self.layout, get_args(Layout))
        if self.rotation is not None and (self.rotation < 2 or self.rotation & (self.rotation - 1)):
            raise SchemeError(f"{self.name}: rotation={self.rotation}", "mix 2, 4, 8, ... inputs")
        if self.weights.dynamic:
            raise SchemeError(
                f"{self.name}: weights with dynamic=True", "the scale of a weight is always stored"
            )
        if self.weights.granularity == "per_head":
            raise SchemeError(
                f"{self.name}: weights with granularity='per_head'",
                "heads are those of keys and values",
            )
        inputs = self.input
        if inputs is not None:
            static = inputs.granularity == "per_tensor" and not inputs.dynamic
            per_token = inputs.granularity == "per_token" and inputs.symmetric
            per_group = (inputs.granularity, inputs.dynamic, inputs.symmetric) == (
                "per_group",
                True,
                True,
            )
            # integers have scales that are floats, whatever those of the weights are
            formats = (
                {self.weights.scale_format, "float"}
                if inputs.kind == "int"
                else {self.weights.scale_format}
            )
            same_groups = (
                inputs.group_size == self.weights.group_size and inputs.scale_format in formats
            )
            if not (static or per_token or (per_group and same_groups)):
                raise SchemeError(
                    f"{self.name}: input with granularity={inputs.granularity!r}, "
                    f"dynamic={inputs.dynamic}, "
                    f"symmetric={inputs.symmetric}",
                    "use a static input per_tensor, a dynamic symmetric one per_token, or one in "
                    "groups of the weights' size",
                )
        weights = self.weights
        fitting: tuple[str, ...] = ("int-quantized", "pack-quantized")
        if weights.kind == "float":
            fitting = (_FLOAT_LAYOUTS.get((weights.num_bits, weights.scale_format), "none"),)
        if self.layout not in fitting:
            raise SchemeError(
                f"{self.name}: layout={self.layout!r} with weights of kind={weights.kind!r}, "
                f"{weights.num_bits} bits, "
                f"scale_format={weights.scale_format!r}",
                f"use {' or '.join(fitting)}",
            )


def scheme_words(scheme: LinearScheme | TensorScheme) -> dict[str, Any]:
    """A scheme as plain data, for state keys and manifests; rare fields only where they are set.

    `quantflow.planning.finished_plan.scheme_from` undoes it.
    """
    data = asdict(scheme)
    for part in (data, data.get("weights"), data.get("input")):
        if part is not None and part.get("block_type", "") is None:
            del part["block_type"]
        if part is not None and part.get("scale_format", "") == "float":
            del part["scale_format"]
        if part is not None and part.get("scale_rule", "") is None:
            del part["scale_rule"], part["scale_arithmetic"]
    return data


_FP8_TENSOR = TensorScheme(kind="float", num_bits=8, granularity="per_tensor")
_FP8_CHANNEL = TensorScheme(kind="float", num_bits=8, granularity="per_channel")
_FP8_TOKEN = TensorScheme(kind="float", num_bits=8, granularity="per_token", dynamic=True)
_FP8_BLOCK = TensorScheme(kind="float", num_bits=8, granularity="per_block", group_size=128)
_FP8_GROUP = TensorScheme(
    kind="float", num_bits=8, granularity="per_group", group_size=128, dynamic=True
)
_INT8_CHANNEL = TensorScheme(kind="int", num_bits=8, granularity="per_channel")
_INT8_TOKEN = TensorScheme(kind="int", num_bits=8, granularity="per_token", dynamic=True)
_INT8_STATIC = TensorScheme(kind="int", num_bits=8, granularity="per_tensor", symmetric=False)
_INT4_GROUP = TensorScheme(kind="int", num_bits=4, granularity="per_group", group_size=128)

_MXFP4 = TensorScheme(
    kind="float",
    num_bits=4,
    float8=FLOAT4,
    granularity="per_group",
    group_size=32,
    scale_format="e8m0",
)
_MXFP8 = TensorScheme(
    kind="float", num_bits=8, granularity="per_group", group_size=32, scale_format="e8m0"
)
_NVFP4 = TensorScheme(
    kind="float",
    num_bits=4,
    float8=FLOAT4,
    granularity="per_group",
    group_size=16,
    scale_format="e4m3",
)


def _microscaled(name: str, weights: TensorScheme, *, inputs: bool = True) -> LinearScheme:
    """A scheme of microscaled weights; quantized inputs are in the same groups."""
    layout = _FLOAT_LAYOUTS[weights.num_bits, weights.scale_format]
    return LinearScheme(
        name=name,
        weights=weights,
        input=replace(weights, dynamic=True) if inputs else None,
        layout=layout,
    )


def _in_groups(
    name: str, weights: TensorScheme, inputs: TensorScheme | None = None
) -> LinearScheme:
    return LinearScheme(
        name=name, weights=weights, input=inputs, layout="pack-quantized", algorithm="gptq"
    )


PRESETS: dict[str, LinearScheme] = {
    scheme.name: scheme
    for scheme in (
        LinearScheme(name="FP8", weights=_FP8_TENSOR, input=_FP8_TENSOR, layout="float-quantized"),
        LinearScheme(
            name="FP8_DYNAMIC", weights=_FP8_CHANNEL, input=_FP8_TOKEN, layout="float-quantized"
        ),
        LinearScheme(
            name="FP8_BLOCK", weights=_FP8_BLOCK, input=_FP8_GROUP, layout="float-quantized"
        ),
        LinearScheme(
            name="W8A8",
            weights=_INT8_CHANNEL,
            input=_INT8_TOKEN,
            layout="int-quantized",
            transforms=("smoothquant",),
        ),
        LinearScheme(
            name="W8A8_STATIC",
            weights=_INT8_CHANNEL,
            input=_INT8_STATIC,
            layout="int-quantized",
            transforms=("smoothquant",),
        ),
        LinearScheme(name="W8A16", weights=_INT8_CHANNEL, input=None, layout="pack-quantized"),
        _in_groups("W6A16", replace(_INT4_GROUP, num_bits=6)),
        _in_groups("W6A16_ASYM", replace(_INT4_GROUP, num_bits=6, symmetric=False)),
        _in_groups("W5A16", replace(_INT4_GROUP, num_bits=5)),
        _in_groups("W5A16_ASYM", replace(_INT4_GROUP, num_bits=5, symmetric=False)),
        _in_groups("W4A16", _INT4_GROUP),
        _in_groups("W4A16_ASYM", replace(_INT4_GROUP, symmetric=False)),
        _in_groups("W4A8", _INT4_GROUP, _INT8_TOKEN),
        _in_groups("W4AFP8", _INT4_GROUP, _FP8_TOKEN),
        _in_groups("W3A16", replace(_INT4_GROUP, num_bits=3)),
        _in_groups("W3A16_ASYM", replace(_INT4_GROUP, num_bits=3, symmetric=False)),
        _in_groups("W2A16", replace(_INT4_GROUP, num_bits=2)),
        _in_groups("W2A16_ASYM", replace(_INT4_GROUP, num_bits=2, symmetric=False)),
        _microscaled("NVFP4", _NVFP4),
        _microscaled("NVFP4A16", _NVFP4, inputs=False),
        _microscaled("MXFP4", _MXFP4),
        _microscaled("MXFP4A16", _MXFP4, inputs=False),
        _microscaled("MXFP8", _MXFP8),
        _microscaled("MXFP8A16", _MXFP8, inputs=False),
    )
}


def _of_blocks(kind: BlockType) -> LinearScheme:
    weights = TensorScheme(
        kind="int",
        num_bits=kind.num_bits,
        granularity="per_group",
        group_size=kind.group_size,
        symmetric=not kind.minima,
        block_type=kind.name,
    )
    return _in_groups(kind.name, weights)


# Schemes that a GGUF file holds without a change of values, by llama.cpp's names.
LLAMA_CPP_PRESETS: dict[str, LinearScheme] = {
    name: _of_blocks(kind) for name, kind in BLOCK_TYPES.items()
}
# llama.cpp's mixture of types -> the type of most linears. A plan gives each linear its own
# (formats/llama_cpp/mixtures.py).
MIXTURES: dict[str, str] = {
    "Q2_K_S": "Q2_K",
    "Q3_K_M": "Q3_K",
    "Q3_K_S": "Q3_K",
    "Q3_K_L": "Q3_K",
    "Q4_K_M": "Q4_K",
    "Q4_K_S": "Q4_K",
    "Q5_K_M": "Q5_K",
    "Q5_K_S": "Q5_K",
    "IQ2_XXS": "IQ2_XXS",
    "IQ2_XS": "IQ2_XS",
    "IQ2_M": "IQ2_S",
    "IQ3_XXS": "IQ3_XXS",
    "IQ3_S": "IQ3_S",
    "IQ3_M": "IQ3_S",
    "IQ3_XS": "IQ3_S",
    "IQ4_NL": "IQ4_NL",
    "IQ4_XS": "IQ4_XS",
}
ALIASES = {"FP8_STATIC": "FP8", "INT8": "W8A8"}


# a mixture may be called as the type of most of its linears
SCHEME_NAMES: tuple[str, ...] = tuple(
    dict.fromkeys((*PRESETS, *ALIASES, *LLAMA_CPP_PRESETS, *MIXTURES))
)


def preset(name: str) -> LinearScheme:
    """The scheme of that name.

    Raises:
        SchemeError: no preset has that name; the message lists those that exist.
    """
    name = ALIASES.get(name, name)
    if name in MIXTURES:
        return replace(LLAMA_CPP_PRESETS[MIXTURES[name]], name=name)
    scheme = PRESETS.get(name) or LLAMA_CPP_PRESETS.get(name)
    if scheme is None:
        raise SchemeError(f"scheme {name!r} is unknown", f"use one of {', '.join(SCHEME_NAMES)}")
    return scheme


def named(weights: TensorScheme, inputs: TensorScheme | None, layout: Layout) -> LinearScheme:
    """The scheme of these weights and inputs, under its preset's name.

    It is the preset that has them, at any group size, else one called `custom`.

    Raises:
        SchemeError: no linear has these weights, inputs and layout together.
    """
    custom = LinearScheme(name="custom", weights=weights, input=inputs, layout=layout)
    for preset_scheme in (*PRESETS.values(), *LLAMA_CPP_PRESETS.values()):
        fixed = (
            preset_scheme.weights.block is not None
            or preset_scheme.weights.scale_format != "float"
            or preset_scheme.weights.group_size is None
        )
        candidate = (
            preset_scheme
            if fixed or weights.group_size is None
            else with_group_size(preset_scheme, weights.group_size)
        )
        if (candidate.weights, candidate.input, candidate.layout) == (weights, inputs, layout):
            return candidate
    return custom


def with_group_size(scheme: LinearScheme, group_size: int) -> LinearScheme:
    """The scheme with weights in groups or blocks of `group_size`, and grouped inputs likewise.

    Raises:
        SchemeError: the scheme's weights have no groups.
    """
    if scheme.weights.group_size is None:
        raise SchemeError(
            f"scheme {scheme.name} has {scheme.weights.granularity} weights, "
            f"group_size={group_size} was given",
            "drop group_size, or choose a scheme with groups such as W4A16",
        )
    if scheme.weights.scale_format != "float":
        if group_size == scheme.weights.group_size:
            return scheme
        raise SchemeError(
            f"scheme {scheme.name} has groups of {scheme.weights.group_size}, "
            f"group_size={group_size} was given",
            "drop group_size: the format fixes it",
        )
    inputs = scheme.input
    if inputs is not None and inputs.group_size is not None:
        inputs = replace(inputs, group_size=group_size)
    return replace(scheme, weights=replace(scheme.weights, group_size=group_size), input=inputs)


# features that share the scale of a rounded input, by the kind of the weights
INPUT_GROUPS: dict[Kind, tuple[int, ...]] = {"int": (32, 64, 128), "float": (16, 32)}


def with_rounded_inputs(scheme: LinearScheme) -> LinearScheme | None:
    """The scheme with inputs rounded to int8 at run time, in the groups of the weights.

    A scale for each 16 to 128 features keeps the error far below that of weights of at most 4 bits,
    and the product of a group is one of integers: twice a value of e2m1 is one.

    Returns:
        None where inputs are quantized already, or weights have more bits, other groups or minima.
    """
    weights = scheme.weights
    if (
        scheme.input is not None
        or weights.num_bits > 4
        or weights.minima
        or weights.granularity != "per_group"
        or weights.group_size not in INPUT_GROUPS[weights.kind]
    ):
        return None
    inputs = TensorScheme(
        kind="int", num_bits=8, granularity="per_group", group_size=weights.group_size, dynamic=True
    )
    return replace(scheme, input=inputs)


def with_float8(scheme: LinearScheme, flavour: str) -> LinearScheme:
    """The scheme with another float8 flavour of its weights and its input.

    Raises:
        SchemeError: the scheme holds integers, or the flavour is unknown.
    """
    if scheme.layout != "float-quantized":
        has = "integer weights" if scheme.weights.kind == "int" else "microscaled weights"
        raise SchemeError(
            f"scheme {scheme.name} has {has}, float8={flavour!r} was given",
            "drop float8, or use FP8",
        )
    inputs = None if scheme.input is None else replace(scheme.input, float8=flavour)
    return replace(scheme, weights=replace(scheme.weights, float8=flavour), input=inputs)


def with_scale_rounding(scheme: LinearScheme, rounding: str) -> LinearScheme:
    """The scheme with rounded stored scales, those of its weights and of a static input.

    Raises:
        SchemeError: the scheme holds integers, or the rounding is unknown.
    """
    if scheme.layout != "float-quantized":
        has = "integer weights" if scheme.weights.kind == "int" else "microscaled weights"
        raise SchemeError(
            f"scheme {scheme.name} has {has}, scale_rounding={rounding!r} was given",
            "drop it, or use FP8",
        )
    inputs = scheme.input
    if inputs is not None and not inputs.dynamic:
        inputs = replace(inputs, scale_rounding=rounding)
    return replace(scheme, weights=replace(scheme.weights, scale_rounding=rounding), input=inputs)


def with_scale_method(
    scheme: LinearScheme, name: str, *, arithmetic: str = "exact"
) -> LinearScheme:
    """The scheme with the scales of its weights and its static input by a method of SCALE_METHODS.

    Args:
        scheme: FP8; methods with a scale per channel give its weights such scales.
        name: name of the method.
        arithmetic: one of ARITHMETIC_NAMES.

    Raises:
        SchemeError: the scheme has no static scales of float8, the method or the arithmetic is
            unknown, or the method computes scales at run time.
    """
    _known("scale_method", name, tuple(SCALE_METHODS))
    method = SCALE_METHODS[name]
    weights = scheme.weights
    inputs = scheme.input
    if method.dynamic:
        raise SchemeError(
            f"scheme {scheme.name}: scale_method {name} computes the scales of inputs at run time",
            "use a static method such as maxabs_hw, or FP8_DYNAMIC without one",
        )
    of_tensors = weights.kind == "float" and weights.granularity == "per_tensor"
    if not of_tensors or inputs is None or inputs.dynamic:
        raise SchemeError(
            f"scheme {scheme.name} has no static scales of float8 tensors, scale_method={name!r} "
            "was given",
            "drop it, or use FP8",
        )
    granularity: Granularity = "per_channel" if method.weight.granularity == "PCS" else "per_tensor"
    return replace(
        scheme,
        weights=replace(
            weights, granularity=granularity, scale_rule=method.weight, scale_arithmetic=arithmetic
        ),
        input=replace(inputs, scale_rule=method.activation, scale_arithmetic=arithmetic),
    )


def with_input_observer(scheme: LinearScheme, observer: str) -> LinearScheme:
    """The scheme with another choice of the range of its static input.

    Raises:
        SchemeError: the scheme has no static input, or the observer is unknown.
    """
    if scheme.input is None or scheme.input.dynamic:
        raise SchemeError(
            f"scheme {scheme.name} has no static input, input_observer={observer!r} was given",
            "drop it, or use FP8",
        )
    return replace(scheme, input=replace(scheme.input, observer=observer))
