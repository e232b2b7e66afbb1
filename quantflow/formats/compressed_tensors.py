"""The compressed-tensors layout: what stock transformers and vLLM load. Its groups, words and rules are theirs.

A linear called NAME is stored as

| layout          | tensors                                                                                         |
|-----------------|-------------------------------------------------------------------------------------------------|
| float-quantized | NAME.weight e4m3fn [O, I], NAME.weight_scale                                                    |
| int-quantized   | NAME.weight int8 [O, I], NAME.weight_scale, NAME.weight_zero_point (asymmetric)                 |
| pack-quantized  | NAME.weight_packed int32 [O, W], NAME.weight_scale, NAME.weight_shape int64 [2] = (O, I),       |
|                 | NAME.weight_zero_point int32 [ceil(O * num_bits / 32), G], packed down the columns (asymmetric) |
|                 | of a scheme with minima float32 [O, G], minimum / scale; qvalues are then stored less 2^(b-1)   |
| mxfp8           | NAME.weight e4m3fn [O, I], NAME.weight_scale uint8 [O, G] (e8m0)                                |
| mxfp4-pack      | NAME.weight_packed uint8 [O, I / 2] (e2m1), NAME.weight_scale uint8 [O, G] (e8m0)               |
| nvfp4-pack      | NAME.weight_packed uint8 [O, I / 2] (e2m1), NAME.weight_scale e4m3fn [O, G],                    |
|                 | NAME.weight_global_scale float32 [1]; NAME.input_global_scale float32 [1] where inputs are too  |
| a static input  | NAME.input_scale float32 [1], NAME.input_zero_point int8 [1] (asymmetric)                       |
| a cache         | ATTENTION.k_scale, ATTENTION.v_scale float32, [1] per tensor or [kv_heads, 1, 1] per head       |

Of inputs that are mixed by a Hadamard matrix on their way, `transform_config` names the linear and
the block (`head_dim`). weight_scale is [1] per tensor, [O, 1] per channel, [O, G] per group,
[ceil(O / g), G] per block of g x g; in the model's dtype for pack-quantized, else float32. A single
number is read from shape [] too. Where blocks of llama.cpp's can hold the weight it has their
scales' dtype, which `scale_dtype` of the group says; IQ4_NL, whose shape is Q8_0's, is named by
`block_type` in `observer_kwargs`. Scales in e4m3 are divided by the global_scale beside them. Those
of symmetric integers may be negative (docs/backends.md, "Negative scales"). compressed-tensors 0.20
cannot load its own pack-quantized files with zero points, except with `dequantize=True`. Longer
than 300 lines because tensors and config are one contract, hence one file. Source:
github.com/vllm-project/compressed-tensors, release 0.20.0, `compressors/` and
`quantization/quant_args.py`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Annotated, Any, TypedDict, cast

import torch
from torch import Tensor

from quantflow.core import affine, float8, microscaling, packing
from quantflow.core.block_types import BLOCK_TYPES
from quantflow.core.dtypes import DTYPES
from quantflow.core.groups import expand_rows
from quantflow.core.kv import SCHEMES as KV_SCHEMES
from quantflow.core.kv import KVScales
from quantflow.core.qtensor import QTensor, QuantizedLinear
from quantflow.core.scheme import (
    FLOAT4,
    Granularity,
    Kind,
    Layout,
    LinearScheme,
    ScaleFormat,
    TensorScheme,
    named,
    with_float8,
)
from quantflow.errors import InputError, SchemeError, UnsupportedError
from quantflow.files.patterns import Pattern
from quantflow.files.schema import Between, check

NAME = "compressed-tensors"
LAYOUT_VERSION = 1

_STRATEGIES: dict[str, Granularity] = {
    "tensor": "per_tensor",
    "channel": "per_channel",
    "group": "per_group",
    "block": "per_block",
    "token": "per_token",
    "attn_head": "per_head",
}
ROW_MULTIPLE = 32  # rows whose zero points fill whole words, at any number of bits
_TENSOR_GROUP = "tensor_group"  # the strategy of groups beside a global_scale
_DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
}
_SCALES = frozenset({torch.float64, torch.float32, torch.float16, torch.bfloat16})
# Loaders match the names of their modules; where these differ from the checkpoint's, a linear is
# listed by both.
_MODULE_NAMES = {("gpt_neox", "embed_out"): "lm_head"}
_BLOCK_TYPE = "block_type"  # in `observer_kwargs`
# What to do instead of a float8 that has other codes than e4m3fn, the only one that the layout's
# loaders know.
_INSTEAD = {
    "e5m2": "leave float8 out: e4m3fn has a mantissa bit more, and its scales do for weights "
    "what e5m2's range is for",
    "e4m3fnuz": "leave float8 out: e4m3fn's codes mean half as much in e4m3fnuz, and vLLM "
    "doubles the scales on AMD's MI300",
}


def scale_dtype(scheme: LinearScheme, model_dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the weight's scales as this layout stores them; e8m0 is stored as bytes."""
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
_SCALE_DTYPES = {"e8m0": "torch.uint8", "e4m3": "torch.float8_e4m3fn"}  # as configs name them


def _input_suffix(inputs: TensorScheme) -> str:
    """Return the name, within a linear, of the number that calibration decided for an input."""
    return "input_global_scale" if inputs.scale_format == "e4m3" else "input_scale"


def tensor_names(name: str, scheme: LinearScheme) -> tuple[str, ...]:
    """Return the names of the tensors that `encode` makes of the linear `name` (without `.weight`)."""
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
    """Return the tensors that `encode` makes of the linear `name`, before there is a weight to encode.

    Args:
        name: the linear's source name, without `.weight`.
        scheme: of the linear.
        shape: of its weight, (O, I).
        model_dtype: of its weight in the source.

    Returns:
        full name -> (dtype as safetensors names it, shape), in `encode`'s order.

    Raises:
        UnsupportedError: the layout does not hold the scheme, or its blocks do not divide I.
        InputError: the group size does not divide I, or a shape that is not (O, I).
    """
    _check_layout(scheme)
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
    """Return the fewest rows that are encoded by themselves: their zero points fill whole words, or they are a block.

    Units are as small with 8 bits as with 4: a layer's sums of errors depend on the cut.
    """
    if scheme.weights.granularity == "per_block":
        return scheme.weights.block_rows
    return max(8, packing.elements_of_whole_words(scheme.weights.num_bits))


def row_spans(
    name: str, scheme: LinearScheme, *, first: int, count: int
) -> dict[str, tuple[int, int]]:
    """Return where some rows of the linear `name` stand in its tensors, so that it is encoded and decoded piece by piece.

    Args:
        name: the linear's source name, without `.weight`.
        scheme: of the linear.
        first: the first of the rows, a multiple of `row_multiple`.
        count: how many rows, a multiple of it too unless they are the last.

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
    """Return the tensors that hold `linear`.

    Args:
        name: the linear's source name, without `.weight`.
        linear: not modified; the weight's tensors are not copied where they are stored as they are.
        scale_dtype: what `scale_dtype` returned when the weight was quantized.

    Raises:
        UnsupportedError: the layout does not hold the scheme.
        SchemeError: a scale is not exact in `scale_dtype`, or the values break QTensor's
            invariants.
    """
    weight, scheme = linear.weight, linear.scheme.weights
    _check_layout(linear.scheme)
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
    """Return the scales of a weight as they are stored, [O or 1, G].

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
        scheme: as it was encoded, or as `schemes_from_config` reads it.

    Raises:
        InputError: a tensor is missing, has another dtype or shape, or holds a scale that is none
            (`affine.is_scale`).
        UnsupportedError: the layout does not hold the scheme.
    """
    _check_layout(scheme)
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
    global_scale = None
    if weights.scale_format == "e8m0":
        codes = _tensor(tensors, f"{name}.weight_scale", torch.uint8, shape)
        if (codes == microscaling.NAN_E8M0).any():
            raise InputError(
                f"{name}.weight_scale: scale nan (code {microscaling.NAN_E8M0})",
                "scales are finite; export again",
            )
        scale = microscaling.unpack_e8m0(codes)
    else:
        scale = _scale(tensors, f"{name}.weight_scale", shape, weights=weights)
    if weights.scale_format == "e4m3":
        _tensor(tensors, f"{name}.weight_scale", torch.float8_e4m3fn)
        global_scale = _scale(tensors, f"{name}.weight_global_scale", (1,))
        scale = scale / global_scale
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


def kv_tensor_names(attention: str) -> tuple[str, str]:
    """Return the names of the scales of the keys and of the values that the module `attention` writes to its cache."""
    return f"{attention}.k_scale", f"{attention}.v_scale"


def kv_tensor_specs(
    attention: str, scheme: TensorScheme, kv_heads: int
) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return the tensors that `encode_kv` makes: full name -> (dtype as safetensors names it, shape)."""
    return dict.fromkeys(kv_tensor_names(attention), ("F32", _kv_shape(scheme, kv_heads)))


def encode_kv(attention: str, scales: KVScales) -> dict[str, Tensor]:
    """Return the tensors that hold the scales of the cache of the module `attention`."""
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
        scheme: as `kv_scheme_from_config` reads it.
        kv_heads: of the model.
        names: of the two tensors, where they are another layout's; a single number may be [] then.

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


def kv_scheme_from_config(config: Mapping[str, Any]) -> TensorScheme | None:
    """Return how config.json's `quantization_config` says that keys and values are kept, None for as they are.

    Raises:
        UnsupportedError: in another way than those of `quantflow.core.kv`.
    """
    arguments = config.get("kv_cache_scheme")
    if arguments is None:
        return None
    if not isinstance(arguments, dict):
        raise _unsupported(f"kv_cache_scheme is {arguments!r}")
    try:
        scheme = _tensor_scheme(arguments)
    except SchemeError as error:
        raise _unsupported(f"kv_cache_scheme is of an unknown kind: {error.cause}") from error
    if scheme not in KV_SCHEMES:
        description = f"{scheme.kind}{scheme.num_bits} {scheme.granularity}, symmetric={scheme.symmetric}, dynamic={scheme.dynamic}"
        raise _unsupported(
            f"kv_cache_scheme is {description}; 8 bits, symmetric, static, per tensor or per head are "
            "known"
        )
    return scheme


def _kv_shape(scheme: TensorScheme, kv_heads: int) -> tuple[int, ...]:
    return (1,) if scheme.granularity == "per_tensor" else (kv_heads, 1, 1)


def quantization_config(
    schemes: Mapping[str, LinearScheme],
    *,
    ignore: Sequence[str],
    model_type: str,
    kv_cache: TensorScheme | None = None,
    modules: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, Any]:
    """Return the `quantization_config` of config.json.

    One scheme for all targets the class Linear, the way the field's own tools do; several schemes
    target names.

    Args:
        schemes: source name -> scheme, every quantized linear of the model.
        ignore: source names of the model's other linears, lm_head among them unless it is
            quantized.
        model_type: config.json's; decides whether loaders know a linear by another name too.
        kv_cache: how keys and values are kept; None for as they are.
        modules: source name -> what the model in memory calls it, where that differs and
            `model_type` alone does not say it.

    Raises:
        UnsupportedError: the layout does not hold a scheme.
        SchemeError: `schemes` is empty, or a linear is both quantized and ignored.
    """
    both = sorted(set(schemes) & set(ignore))
    if both or not schemes:
        cause = f"{both[0]}: both quantized and ignored" if both else "no linear is quantized"
        raise SchemeError(cause, "quantize at least one linear, and list each under one of the two")
    targets: dict[tuple[Layout, TensorScheme, TensorScheme | None], list[str]] = {}
    for name, scheme in schemes.items():
        _check_layout(scheme)
        targets.setdefault((scheme.layout, scheme.weights, scheme.input), []).append(name)
    groups = {
        f"group_{index}": {
            "targets": _with_aliases(names, model_type, modules)
            if len(targets) > 1
            else ["Linear"],
            "weights": _arguments(weights),
            "input_activations": None if inputs is None else _arguments(inputs),
            "output_activations": None,
            "format": layout,
        }
        for index, ((layout, weights, inputs), names) in enumerate(targets.items())
    }
    layouts = {layout for layout, _, _ in targets}
    return {
        "quant_method": NAME,
        "format": layouts.pop() if len(layouts) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "global_compression_ratio": None,
        "ignore": _with_aliases(ignore, model_type, modules),
        "kv_cache_scheme": None if kv_cache is None else _arguments(kv_cache),
        "config_groups": groups,
        **_transform_config(schemes),
    }


def _with_aliases(names: Sequence[str], model_type: str, modules: Mapping[str, str]) -> list[str]:
    """Return source names, and after them those by which loaders know some of them too."""
    known = [modules.get(name) or _MODULE_NAMES.get((model_type, name)) for name in names]
    return list(dict.fromkeys([*names, *(name for name in known if name is not None)]))


class _Arguments(TypedDict, total=False):
    """How a tensor is quantized, in compressed-tensors' words."""

    num_bits: Annotated[int, Between(1, 64)]
    type: str
    symmetric: bool
    strategy: str | None
    group_size: Annotated[int, Between(-1, 2**31)] | None
    dynamic: bool | str
    actorder: str | bool | None
    block_structure: list[int] | None
    scale_dtype: str | None
    zp_dtype: str | None
    observer_kwargs: dict[str, Any] | None


class _ConfigGroup(TypedDict, total=False):
    """Linears that are quantized alike."""

    targets: list[str]
    weights: _Arguments | None
    input_activations: _Arguments | None
    output_activations: _Arguments | None
    format: str | None


class _Applied(TypedDict, total=False):
    """Where a transform is."""

    targets: list[str]
    location: str
    ignore: list[str] | None


class _TransformGroup(TypedDict, total=False):
    """A transform."""

    type: str
    head_dim: int | None
    randomize: bool
    apply: list[_Applied]


class _TransformConfig(TypedDict, total=False):
    """What is mixed while the model runs."""

    config_groups: dict[str, _TransformGroup] | None


class _QuantizationConfig(TypedDict, total=False):
    """The values of a quantization_config that are read."""

    format: str | None
    ignore: list[str] | None
    kv_cache_scheme: _Arguments | None
    config_groups: dict[str, _ConfigGroup]
    transform_config: _TransformConfig | None


def schemes_from_config(
    config: Mapping[str, Any],
    linears: Sequence[str],
    *,
    flavour: str = "e4m3fn",
    modules: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, LinearScheme | None]:
    """Return the scheme of every linear, None for those that are not quantized.

    A scheme that equals a preset (at any group size) is that preset; any other is called `custom`.

    Args:
        config: the `quantization_config` of config.json.
        linears: the source names of all linears of the model.
        flavour: of float8 schemes; the config has no word for it, quantflow's manifest does.
        modules: source name -> what the model in memory calls a linear, where that differs; targets
            and ignore may mean either.

    Raises:
        UnsupportedError: a method, strategy, format or option that this version does not know.
        InputError: config_groups is missing, or a pattern is not a regular expression.
    """
    check(config, _QuantizationConfig, where="config.json: quantization_config")
    for key, expected in (("quant_method", NAME), ("quantization_status", "compressed")):
        if config.get(key) != expected:
            raise _unsupported(f"{key} is {config.get(key)!r}, {expected!r} is known")
    groups = config.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise InputError(
            "config.json: quantization_config has no config_groups",
            "the file is damaged; export again",
        )
    schemes: dict[str, LinearScheme] = {}
    for label, group in groups.items():
        if (
            not isinstance(group, dict)
            or not isinstance(group.get("weights"), dict)
            or group.get("output_activations")
        ):
            raise _unsupported(f"{label} has no weights, or quantizes outputs")
        scheme = _linear_scheme(label, group, layout=group.get("format") or config.get("format"))
        schemes[label] = (
            with_float8(scheme, flavour) if scheme.layout == "float-quantized" else scheme
        )
    # what is not known of the cache is refused, whoever asks for linears alone
    kv_scheme_from_config(config)
    rotations = _rotations(config)
    resolved: dict[str, LinearScheme | None] = {}
    for name, label in groups_of_linears(config, linears, modules=modules).items():
        by_linear = None if label is None else schemes[label]
        rotation = next(
            (rotations[each] for each in (name, modules.get(name, name)) if each in rotations), None
        )
        if rotation is not None and by_linear is None:
            raise _unsupported(
                f"transform_config mixes the inputs of {name}, which is not quantized"
            )
        resolved[name] = (
            replace(by_linear, rotation=rotation)
            if by_linear is not None and rotation is not None
            else by_linear
        )
    return resolved


def groups_of_linears(
    config: Mapping[str, Any],
    linears: Sequence[str],
    *,
    modules: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, str | None]:
    """Return which of `config_groups` every linear is of, None for those that are not quantized.

    Args:
        config: the `quantization_config` of config.json, as `schemes_from_config` takes it.
        linears: the source names of all linears of the model.
        modules: as `schemes_from_config` takes it.

    Raises:
        InputError: a pattern is not a regular expression.
    """
    by_target: dict[str, str] = {}
    for label, group in config["config_groups"].items():
        by_target.update(dict.fromkeys(group.get("targets", ()), label))
    ignore = set(config.get("ignore") or ())
    # A name is looked up; only what may mean several linears is compared with each: mixtures have
    # tens of thousands.
    wide_targets, wide_ignore = (
        {word: _meant(word) for word in words if _is_wide(word)} for words in (by_target, ignore)
    )
    groups: dict[str, str | None] = {}
    for name in linears:
        names = dict.fromkeys((name, modules.get(name, name)))
        matches = [target for target, means in wide_targets.items() if any(map(means, names))]
        matches += [each for each in names if each in by_target]
        ignored = not ignore.isdisjoint(names) or any(
            means(each) for means in wide_ignore.values() for each in names
        )
        groups[name] = None if ignored or not matches else by_target[min(matches, key=_specificity)]
    return groups


def _transform_config(schemes: Mapping[str, LinearScheme]) -> dict[str, Any]:
    """Return the entry of quantization_config that says which inputs are mixed; empty where none are."""
    blocks: dict[int, list[str]] = {}
    for name, scheme in schemes.items():
        if scheme.rotation is not None:
            blocks.setdefault(scheme.rotation, []).append(name)
    if not blocks:
        return {}
    groups = {
        f"hadamard_{block}": {
            "type": "hadamard",
            "head_dim": block,
            "apply": [{"targets": names, "location": "input"}],
        }
        for block, names in blocks.items()
    }
    return {"transform_config": {"config_groups": groups}}


def _rotations(config: Mapping[str, Any]) -> dict[str, int]:
    """Return which linears have their inputs mixed -> how many together; what else transforms may do is refused."""
    groups = (config.get("transform_config") or {}).get("config_groups") or {}
    blocks: dict[str, int] = {}
    for label, group in groups.items():
        block = group.get("head_dim")
        plain = group.get("type") == "hadamard" and not group.get("randomize")
        plain = plain and isinstance(block, int) and block > 1 and not block & (block - 1)
        for part in group.get("apply", ()):
            wide = [target for target in part.get("targets", ()) if _is_wide(target)]
            if not plain or part.get("location") != "input" or part.get("ignore") or wide:
                raise _unsupported(
                    f"transform_config: {label} is no hadamard of named inputs in blocks of "
                    "head_dim"
                )
            blocks.update(dict.fromkeys(part["targets"], block))
    return blocks


def _check_layout(scheme: LinearScheme) -> None:
    """Refuse a scheme that is sound but that this layout cannot hold."""
    size = _GROUP_SIZES.get(scheme.layout, scheme.weights.group_size)
    if scheme.weights.group_size != size:
        raise _unsupported(
            f"{scheme.name}: {scheme.layout} weights in groups of {scheme.weights.group_size}, "
            f"loaders know {size}"
        )
    if scheme.layout == "pack-quantized" and scheme.weights.granularity == "per_tensor":
        raise _unsupported(f"{scheme.name}: pack-quantized weights with one scale per tensor")
    for tensor in (scheme.weights, scheme.input):
        if tensor is None or tensor.kind != "float" or tensor.float8 == FLOAT4:
            continue
        if float8.FLAVOURS[tensor.float8].dtype != torch.float8_e4m3fn:
            cause = (
                f"{scheme.name}: float8 flavour {tensor.float8!r}, the layout holds e4m3fn codes"
            )
            raise _unsupported(cause, _INSTEAD[tensor.float8])


def _unsupported(
    cause: str, instead: str = "use a preset scheme, or a quantflow that knows this one"
) -> UnsupportedError:
    return UnsupportedError(f"compressed-tensors: {cause}", instead)


def _scale_shape(
    scheme: TensorScheme, shape: Sequence[int], *, name: str = "weight"
) -> tuple[int, ...]:
    """Return the stored shape of the scales of a weight of `shape`."""
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
    """Return what is added to stored integers, which are centred on zero, where qvalues begin at 0."""
    return 1 << (scheme.num_bits - 1)


def _tensor(
    tensors: Mapping[str, Tensor],
    key: str,
    dtype: torch.dtype | None,
    shape: tuple[int, ...] | None = None,
) -> Tensor:
    """Return a tensor after comparing its dtype and shape; None compares nothing."""
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
    """Return scales after looking at their values; [] is read as [1].  weights: their scheme, if they are of weights."""
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
    """Return the weight's zero points, int8 of `shape`, or float32 where the scheme has minima."""
    if scheme.layout != "pack-quantized":
        return _tensor(tensors, key, torch.int8, shape)
    if scheme.weights.minima:
        return _tensor(tensors, key, torch.float32, shape)
    num_bits, rows = scheme.weights.num_bits, shape[0]
    packed = _tensor(tensors, key, torch.int32, (-(-rows * num_bits // 32), shape[1]))
    return packing.unpack(packed.T, num_bits, rows).T.contiguous()  # [O, G]


def _arguments(scheme: TensorScheme) -> dict[str, Any]:
    """Return compressed-tensors' QuantizationArgs for one tensor."""
    strategy = next(
        key for key, granularity in _STRATEGIES.items() if granularity == scheme.granularity
    )
    arguments: dict[str, Any] = {
        "num_bits": scheme.num_bits,
        "type": scheme.kind,
        "symmetric": scheme.symmetric,
        "strategy": strategy,
        "group_size": scheme.group_size,
        "dynamic": scheme.dynamic,
    }
    if scheme.scale_format != "float":
        dtype = _SCALE_DTYPES[scheme.scale_format]
        arguments |= {"scale_dtype": dtype, "zp_dtype": dtype}
    if scheme.scale_format == "e4m3":
        arguments |= {"strategy": _TENSOR_GROUP, "dynamic": "local" if scheme.dynamic else False}
    if scheme.granularity == "per_block":
        arguments |= {"group_size": None, "block_structure": [scheme.group_size, scheme.group_size]}
    if scheme.block is not None:
        arguments["scale_dtype"] = str(DTYPES[scheme.block.scale_dtype])
        # shape and dtypes are those of another type, and loaders hand these words on
        if scheme.block.points:
            arguments["observer_kwargs"] = {_BLOCK_TYPE: scheme.block_type}
    if scheme.minima:
        arguments["zp_dtype"] = "torch.float32"
    return arguments


def _tensor_scheme(arguments: Mapping[str, Any]) -> TensorScheme:
    """Undo `_arguments`; an option that changes numbers and is not known here is refused."""
    strategy = arguments.get("strategy") or _inferred_strategy(arguments)
    num_bits, kind = arguments.get("num_bits", 8), arguments.get("type", "int")
    scale_format: ScaleFormat = "float"
    if kind == "float" and num_bits == 4 and strategy == _TENSOR_GROUP:
        dynamic = arguments.get("dynamic", False)
        if dynamic not in (False, "local"):
            raise SchemeError(
                f"strategy {strategy!r} with dynamic={dynamic!r}", "use false or 'local'"
            )
        scale_format, strategy, arguments = (
            "e4m3",
            "group",
            {**arguments, "dynamic": dynamic == "local"},
        )
    elif (
        kind == "float"
        and strategy == "group"
        and (num_bits == 4 or arguments.get("scale_dtype") == _SCALE_DTYPES["e8m0"])
    ):
        scale_format = "e8m0"
    if kind == "float" and arguments.get("scale_dtype") not in (
        None,
        _SCALE_DTYPES.get(scale_format),
    ):
        raise SchemeError(
            f"scale_dtype {arguments['scale_dtype']!r} with strategy {strategy!r}", "leave it out"
        )
    if strategy not in _STRATEGIES:
        raise SchemeError(f"strategy {strategy!r}", f"use one of {', '.join(_STRATEGIES)}")
    dynamic, actorder = arguments.get("dynamic", False), arguments.get("actorder")
    if dynamic not in (True, False) or actorder not in (None, "weight", "static"):
        raise SchemeError(
            f"dynamic={dynamic!r}, actorder={actorder!r}", "use true or false, and null or weight"
        )
    granularity = _STRATEGIES[strategy]
    group_size = arguments.get("group_size") if granularity == "per_group" else None
    if granularity == "per_block":
        structure = arguments.get("block_structure")
        if not isinstance(structure, list) or len(structure) != 2 or structure[0] != structure[1]:
            raise SchemeError(
                f"strategy 'block' with block_structure={structure!r}",
                "use square blocks, such as [128, 128]",
            )
        group_size = structure[0]
    scheme = TensorScheme(
        kind=cast(Kind, kind),
        num_bits=num_bits,
        float8=FLOAT4 if (kind, num_bits) == ("float", 4) else "e4m3fn",
        scale_format=scale_format,
        granularity=granularity,
        group_size=group_size,
        symmetric=arguments.get("symmetric", True),
        dynamic=dynamic,
    )
    kind = _block_type(scheme, arguments)
    return scheme if kind is None else replace(scheme, block_type=kind)


def _inferred_strategy(arguments: Mapping[str, Any]) -> str | None:
    """Return the strategy that compressed-tensors takes where none is given; None where it takes none."""
    size = arguments.get("group_size")
    if arguments.get("block_structure") is not None or size == 0:
        return None
    return "tensor" if size is None else "channel" if size == -1 else "group"


def _block_type(scheme: TensorScheme, arguments: Mapping[str, Any]) -> str | None:
    """Return the type of llama.cpp's that groups are of, by their shape and the dtypes of scales and minima; None for none.

    One with points of its own is named, since its shape is that of another.
    """
    name = (arguments.get("observer_kwargs") or {}).get(_BLOCK_TYPE)
    dtypes = (arguments.get("scale_dtype"), arguments.get("zp_dtype"))
    shape = (scheme.kind, scheme.num_bits, scheme.group_size, scheme.symmetric, *dtypes)
    for kind in BLOCK_TYPES.values():
        minima = "torch.float32" if kind.minima else None
        if name != (kind.name if kind.points else None):
            continue
        if shape == (
            "int",
            kind.num_bits,
            kind.group_size,
            not kind.minima,
            str(DTYPES[kind.scale_dtype]),
            minima,
        ):
            return kind.name
    return None


def _linear_scheme(label: str, group: Mapping[str, Any], *, layout: Any) -> LinearScheme:
    """Return the scheme of one config group: the preset it equals, else a custom one."""
    inputs = group.get("input_activations")
    try:
        scheme = named(
            _tensor_scheme(group["weights"]),
            None if inputs is None else _tensor_scheme(inputs),
            layout,
        )
    except SchemeError as error:
        raise _unsupported(f"{label}: {error.cause}") from error
    _check_layout(scheme)
    return scheme


def _specificity(target: str) -> tuple[bool, bool, str]:
    """Order targets as compressed-tensors does: exact names first, then patterns, then the class."""
    return (target == "Linear", target.startswith("re:"), target)


def _is_wide(target: str) -> bool:
    return target == "Linear" or target.startswith("re:")


def _meant(target: str) -> Callable[[str], bool]:
    """Return which names a wide target of compressed-tensors means: `re:` and a pattern, or the class Linear.

    Raises:
        InputError: no regular expression.
    """
    return (
        Pattern(target.removeprefix("re:")).match if target.startswith("re:") else lambda name: True
    )
