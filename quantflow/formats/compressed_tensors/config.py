"""The `quantization_config` of the compressed-tensors layout, from schemes and back."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Annotated, Any, TypedDict, cast

from quantflow.core.block_types import BLOCK_TYPES
from quantflow.core.dtypes import DTYPES
from quantflow.core.kv import SCHEMES as KV_SCHEMES
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
from quantflow.errors import InputError, SchemeError
from quantflow.files.patterns import Pattern
from quantflow.files.schema import Between, check
from quantflow.formats.compressed_tensors.tensors import NAME, require_held, unsupported

_STRATEGIES: dict[str, Granularity] = {
    "tensor": "per_tensor",
    "channel": "per_channel",
    "group": "per_group",
    "block": "per_block",
    "token": "per_token",
    "attn_head": "per_head",
}
_TENSOR_GROUP = "tensor_group"  # the strategy of groups beside a global_scale
# Loaders match the names of their modules; where these differ from the checkpoint's, a linear is
# listed by both.
_MODULE_NAMES = {("gpt_neox", "embed_out"): "lm_head"}
_BLOCK_TYPE = "block_type"  # in `observer_kwargs`
_SCALE_DTYPES = {"e8m0": "torch.uint8", "e4m3": "torch.float8_e4m3fn"}  # as configs name them
_EXPERT = ".experts."
# layout, weights and inputs of a config group
_Kind = tuple[Layout, TensorScheme, TensorScheme | None]


def kv_scheme_from_config(config: Mapping[str, Any]) -> TensorScheme | None:
    """Scheme of keys and values that a `quantization_config` names; None for the model's dtype.

    Raises:
        UnsupportedError: another one than those of `quantflow.core.kv`.
    """
    arguments = config.get("kv_cache_scheme")
    if arguments is None:
        return None
    if not isinstance(arguments, dict):
        raise unsupported(f"kv_cache_scheme is {arguments!r}")
    try:
        scheme = _tensor_scheme(arguments)
    except SchemeError as error:
        raise unsupported(f"kv_cache_scheme is of an unknown kind: {error.cause}") from error
    if scheme not in KV_SCHEMES:
        description = (
            f"{scheme.kind}{scheme.num_bits} {scheme.granularity}, symmetric={scheme.symmetric}, "
            f"dynamic={scheme.dynamic}"
        )
        raise unsupported(
            f"kv_cache_scheme is {description}; 8 bits, symmetric, static, per tensor or per head "
            "are known"
        )
    return scheme


def quantization_config(
    schemes: Mapping[str, LinearScheme],
    *,
    ignore: Sequence[str],
    model_type: str,
    kv_cache: TensorScheme | None = None,
    modules: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, Any]:
    """The `quantization_config` of config.json.

    One scheme for all linears targets the class Linear, as the field's own tools write it. Several
    schemes target names.

    Args:
        schemes: source name -> scheme, every quantized linear of the model.
        ignore: source names of the model's other linears, lm_head among them unless it is
            quantized.
        model_type: config.json's; by it loaders may know a linear by another name too.
        kv_cache: scheme of keys and values; None for the model's dtype.
        modules: source name -> name in the model in memory, where that differs and `model_type`
            alone does not say it.

    Raises:
        UnsupportedError: the layout does not hold a scheme.
        SchemeError: `schemes` is empty, or a linear is both quantized and ignored.
    """
    both = sorted(set(schemes) & set(ignore))
    if both or not schemes:
        cause = f"{both[0]}: both quantized and ignored" if both else "no linear is quantized"
        raise SchemeError(cause, "quantize at least one linear, and list each under one of the two")
    targets: dict[_Kind, list[str]] = {}
    for name, scheme in schemes.items():
        require_held(scheme)
        targets.setdefault((scheme.layout, scheme.weights, scheme.input), []).append(name)
    targets = _experts_first(targets)
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


def _experts_first(targets: dict[_Kind, list[str]]) -> dict[_Kind, list[str]]:
    """Schemes with that of the experts first, where all experts have one.

    Stock transformers stacks the experts of a layer, and reads all of them by the first group
    whose targets are names.
    """
    experts = [kind for kind, names in targets.items() if any(_EXPERT in name for name in names)]
    if len(experts) != 1:
        return targets
    return {experts[0]: targets[experts[0]], **targets}


def _with_aliases(names: Sequence[str], model_type: str, modules: Mapping[str, str]) -> list[str]:
    """Source names, and after them the other names by which loaders know some of them."""
    aliases = [modules.get(name) or _MODULE_NAMES.get((model_type, name)) for name in names]
    return list(dict.fromkeys([*names, *(alias for alias in aliases if alias is not None)]))


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
    """Linears that a transform is applied to, and the side of each."""

    targets: list[str]
    location: str
    ignore: list[str] | None


class _TransformGroup(TypedDict, total=False):
    """One transform."""

    type: str
    head_dim: int | None
    randomize: bool
    apply: list[_Applied]


class _TransformConfig(TypedDict, total=False):
    """Transforms that are applied while the model runs."""

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
    """Scheme of every linear; None for those that are not quantized.

    A scheme that equals a preset (at any group size) is that preset; any other is called `custom`.

    Args:
        config: the `quantization_config` of config.json.
        linears: source names of all linears of the model.
        flavour: flavour of float8 schemes. The configuration has no word for it, quantflow's
            manifest does.
        modules: source name -> name of a linear in the model in memory, where that differs; targets
            and ignore may mean either.

    Raises:
        UnsupportedError: a method, strategy, format or option that this version does not know.
        InputError: config_groups is missing, or a pattern is not a regular expression.
    """
    check(config, _QuantizationConfig, where="config.json: quantization_config")
    for key, expected in (("quant_method", NAME), ("quantization_status", "compressed")):
        if config.get(key) != expected:
            raise unsupported(f"{key} is {config.get(key)!r}, {expected!r} is known")
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
            raise unsupported(f"{label} has no weights, or quantizes outputs")
        scheme = _linear_scheme(label, group, layout=group.get("format") or config.get("format"))
        schemes[label] = (
            with_float8(scheme, flavour) if scheme.layout == "float-quantized" else scheme
        )
    # what is not known of the cache is refused, whoever asks for linears alone
    kv_scheme_from_config(config)
    rotations = _rotations(config)
    resolved: dict[str, LinearScheme | None] = {}
    for name, label in groups_of_linears(config, linears, modules=modules).items():
        own = None if label is None else schemes[label]
        rotation = next(
            (rotations[each] for each in (name, modules.get(name, name)) if each in rotations), None
        )
        if rotation is not None and own is None:
            raise unsupported(
                f"transform_config mixes the inputs of {name}, which is not quantized"
            )
        resolved[name] = (
            replace(own, rotation=rotation) if own is not None and rotation is not None else own
        )
    return resolved


def groups_of_linears(
    config: Mapping[str, Any],
    linears: Sequence[str],
    *,
    modules: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, str | None]:
    """Group of `config_groups` of every linear; None for those that are not quantized.

    Args:
        config: the `quantization_config` of config.json, in the form of `schemes_from_config`.
        linears: source names of all linears of the model.
        modules: source name -> name in the model in memory, where that differs.

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
    """Entry of quantization_config that names the inputs that are mixed; empty where none are."""
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
    """Linears whose inputs are mixed -> features that are mixed together.

    Any other transform is refused.
    """
    groups = (config.get("transform_config") or {}).get("config_groups") or {}
    blocks: dict[str, int] = {}
    for label, group in groups.items():
        block = group.get("head_dim")
        plain = group.get("type") == "hadamard" and not group.get("randomize")
        plain = plain and isinstance(block, int) and block > 1 and not block & (block - 1)
        for part in group.get("apply", ()):
            wide = [target for target in part.get("targets", ()) if _is_wide(target)]
            if not plain or part.get("location") != "input" or part.get("ignore") or wide:
                raise unsupported(
                    f"transform_config: {label} is no hadamard of named inputs in blocks of "
                    "head_dim"
                )
            blocks.update(dict.fromkeys(part["targets"], block))
    return blocks


def _arguments(scheme: TensorScheme) -> dict[str, Any]:
    """QuantizationArgs of compressed-tensors for one tensor."""
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
        scale_format = "e4m3"
        strategy = "group"
        arguments = {**arguments, "dynamic": dynamic == "local"}
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
    block_type = _block_type(scheme, arguments)
    return scheme if block_type is None else replace(scheme, block_type=block_type)


def _inferred_strategy(arguments: Mapping[str, Any]) -> str | None:
    """Strategy that compressed-tensors takes where none is named; None where it takes none."""
    size = arguments.get("group_size")
    if arguments.get("block_structure") is not None or size == 0:
        return None
    return "tensor" if size is None else "channel" if size == -1 else "group"


def _block_type(scheme: TensorScheme, arguments: Mapping[str, Any]) -> str | None:
    """Type of llama.cpp's blocks that the groups are; None for none of them.

    The shape and the dtypes of scales and minima decide. A type with points of its own is named,
    since its shape is another's.
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
    """Scheme of one config group: the preset that it equals, else a custom one."""
    inputs = group.get("input_activations")
    try:
        scheme = named(
            _tensor_scheme(group["weights"]),
            None if inputs is None else _tensor_scheme(inputs),
            layout,
        )
    except SchemeError as error:
        raise unsupported(f"{label}: {error.cause}") from error
    require_held(scheme)
    return scheme


def _specificity(target: str) -> tuple[bool, bool, str]:
    """Order of targets as compressed-tensors has it: exact names, then patterns, then the class."""
    return (target == "Linear", target.startswith("re:"), target)


def _is_wide(target: str) -> bool:
    return target == "Linear" or target.startswith("re:")


def _meant(target: str) -> Callable[[str], bool]:
    """Test of a name by a wide target: `re:` and a pattern, or the class Linear.

    Raises:
        InputError: the pattern is not a regular expression.
    """
    return (
        Pattern(target.removeprefix("re:")).match if target.startswith("re:") else lambda name: True
    )
