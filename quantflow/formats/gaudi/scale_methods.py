"""The scale methods of Gaudi's toolkit as data: one row each, and the dictionary form that mixes them.

A method says how activations get their scale and how weights get theirs. The dictionary form names a method for single
nodes, decoder layers and module types; the most particular one that fits is taken: nodes, layers, layer_types, default.
Source: neural_compressor.torch.algorithms.fp8_quant, release 3.10.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, get_args

from quantflow.errors import UsageError
from quantflow.formats.gaudi.devices import Granularity, Rounding, Rule, Value

ACTIVATION_BACKOFF, WEIGHT_BACKOFF = 0.25, 0.5
_PARTS = ("weight", "activation")
_FIELDS = {
    "granularity": ("ScaleGranularity", get_args(Granularity)),
    "scale_value_type": ("ScaleValueType", get_args(Value)),
    "rounding_method": ("ScaleRoundMethod", get_args(Rounding)),
}
_LAYER = re.compile(r"layers[./](\d+)(?:[./]|$)")


@dataclass(frozen=True, kw_only=True)
class ScaleMethod:
    """One row: how activations and weights get their scales; `name` is the toolkit's."""

    name: str
    activation: Rule
    weight: Rule

    @property
    def dynamic(self) -> bool:
        """Whether activations get their scales at run time."""
        return self.activation.dynamic

    @property
    def needs_weights(self) -> bool:
        """Whether the weights themselves are needed, not their maxima alone."""
        return self.weight.granularity == "PCS" or self.weight.value == "OPT"

    @property
    def needs_measurement(self) -> bool:
        """Whether anything that was measured is read."""
        return "MAXABS" in (self.activation.value, self.weight.value) and not self.dynamic


def _rule(granularity: Granularity, value: Value, rounding: Rounding, backoff: float = 1.0, **more: Any) -> Rule:
    return Rule(granularity=granularity, value=value, rounding=rounding, backoff=backoff, **more)


_BARE = _rule("PTS", "MAXABS", "IDENTITY")  # what the dictionary form's default means where it says nothing
_UNIT = _rule("PTS", "FIXED_VALUE", "SCALE_UNIT")
_SINGLE = _rule("PTS", "FIXED_VALUE", "HW_ALIGNED_FIXED")
_ACT_HW = _rule("PTS", "MAXABS", "HW_ALIGNED", ACTIVATION_BACKOFF)
_ACT_POW2 = _rule("PTS", "MAXABS", "POW2", ACTIVATION_BACKOFF)
_ACT_RAW = _rule("PTS", "MAXABS", "IDENTITY", ACTIVATION_BACKOFF)
_ACT_TOKEN = _rule("PCS", "MAXABS", "POW2", WEIGHT_BACKOFF, dynamic=True)
_HW = _rule("PTS", "MAXABS", "HW_ALIGNED", WEIGHT_BACKOFF)
_POW2 = _rule("PTS", "MAXABS", "POW2", WEIGHT_BACKOFF)
_RAW = _rule("PTS", "MAXABS", "IDENTITY", WEIGHT_BACKOFF)
_HW_SEARCH = _rule("PTS", "OPT", "HW_ALIGNED", WEIGHT_BACKOFF)
_POW2_SEARCH = _rule("PTS", "OPT", "POW2", WEIGHT_BACKOFF, exponents=tuple(range(-10, 10)))
_CHANNEL = _rule("PCS", "MAXABS", "POW2", WEIGHT_BACKOFF)
_CHANNEL_SEARCH = _rule("PCS", "OPT", "POW2", WEIGHT_BACKOFF, exponents=tuple(range(-3, 5)))

SCALE_METHODS: Mapping[str, ScaleMethod] = MappingProxyType(
    {
        name: ScaleMethod(name=name, activation=activation, weight=weight)
        for name, activation, weight in (
            ("unit_scale", _UNIT, _UNIT),
            ("hw_aligned_single_scale", _SINGLE, _SINGLE),
            ("maxabs_hw", _ACT_HW, _HW),
            ("maxabs_pow2", _ACT_POW2, _POW2),
            ("maxabs_arbitrary", _ACT_RAW, _RAW),
            ("maxabs_hw_opt_weight", _ACT_HW, _HW_SEARCH),
            ("maxabs_pow2_opt_weight", _ACT_POW2, _POW2_SEARCH),
            ("act_maxabs_hw_weights_pcs_maxabs_pow2", _ACT_HW, _CHANNEL),
            ("act_maxabs_hw_weights_pcs_opt_pow2", _ACT_HW, _CHANNEL_SEARCH),
            ("act_maxabs_pow2_weights_pcs_maxabs_pow2", _ACT_POW2, _CHANNEL),
            ("act_maxabs_pow2_weights_pcs_opt_pow2", _ACT_POW2, _CHANNEL_SEARCH),
            ("act_maxabs_pcs_pow2_weight_maxabs_pts_pow2_hw", _ACT_TOKEN, _HW),
            ("maxabs_pcs_pow2", _ACT_TOKEN, _CHANNEL),
        )
    }
)
DEFAULT_METHOD = "maxabs_hw"


@dataclass(frozen=True, kw_only=True)
class MethodConfig:
    """Which method each node has.

    Attributes:
        default: where nothing more particular fits.
        nodes: module path -> method.
        layers: number of the decoder layer -> method.
        layer_types: class name of the module -> method.
        plain: the configuration was one name; only then are scales kept in files.
    """

    default: ScaleMethod
    nodes: Mapping[str, ScaleMethod] = field(default_factory=dict)
    layers: Mapping[int, ScaleMethod] = field(default_factory=dict)
    layer_types: Mapping[str, ScaleMethod] = field(default_factory=dict)
    plain: bool = True

    @property
    def methods(self) -> tuple[ScaleMethod, ...]:
        """Every method that is named, the default first."""
        return (self.default, *self.nodes.values(), *self.layers.values(), *self.layer_types.values())

    def method(self, node: str, layer_type: str) -> ScaleMethod:
        """Return the method of a node: its own, its layer's, its type's, or the default."""
        if node in self.nodes:
            return self.nodes[node]
        found = _LAYER.search(node)
        if found is not None and int(found[1]) in self.layers:
            return self.layers[int(found[1])]
        return self.layer_types.get(layer_type, self.default)


def method_config(value: object) -> MethodConfig:
    """Read `scale_method`: a name in any case, or the dictionary form.

    Raises:
        UsageError: an unknown name or key, no default, or a combination that is none of SCALE_METHODS.
    """
    if isinstance(value, str):
        return MethodConfig(default=_named(value))
    if not isinstance(value, Mapping):
        raise UsageError(f"scale_method: {value!r} is neither a name nor a table", _names())
    unknown = sorted(set(value) - {"default", "nodes", "layers", "layer_types"})
    if unknown:
        raise UsageError(f"scale_method: key {unknown[0]!r} is unknown", "use default, nodes, layers, layer_types")
    if "default" not in value:
        raise UsageError("Scale method config should contain a default scale method.", "add a `default` with both parts")
    tables = {key: value.get(key) or {} for key in ("nodes", "layers", "layer_types")}
    for key, table in tables.items():
        if not isinstance(table, Mapping):
            raise UsageError(f"scale_method: {key} is {table!r}", "write a table of names and methods")
        for name in table if key == "layers" else ():
            if not str(name).isdecimal():
                raise UsageError(f"scale_method: layers has the key {name!r}", "use the number of the decoder layer")
    default = _combined(value["default"], "default")
    made = {
        key: {name: _combined(item, f"{key}.{name}", default) for name, item in table.items()} for key, table in tables.items()
    }
    return MethodConfig(
        default=default,
        nodes=made["nodes"],
        layers={int(name): method for name, method in made["layers"].items()},
        layer_types=made["layer_types"],
        plain=False,
    )


def spelled(config: MethodConfig) -> Any:
    """Return what `method_config` reads as `config`."""
    if config.plain:
        return config.default.name
    tables: dict[str, Mapping[Any, ScaleMethod]] = {
        "nodes": config.nodes,
        "layers": config.layers,
        "layer_types": config.layer_types,
    }
    made = {key: {str(name): _parts(method) for name, method in table.items()} for key, table in tables.items() if table}
    return {"default": _parts(config.default), **made}


def _parts(method: ScaleMethod) -> dict[str, dict[str, Any]]:
    return {
        part: {**dict(zip(_FIELDS, _spelled(rule), strict=True)), "backoff": rule.backoff}
        for part, rule in (("weight", method.weight), ("activation", method.activation))
    }


def _named(name: str) -> ScaleMethod:
    method = SCALE_METHODS.get(name.lower())
    if method is None:
        raise UsageError(
            f"Invalid 'scale_method' value in custom config ('{name}'). Enter one of {list(SCALE_METHODS)}", _names()
        )
    return method


def _names() -> str:
    return f"use one of {', '.join(SCALE_METHODS)}"


def _combined(value: object, where: str, default: ScaleMethod | None = None) -> ScaleMethod:
    """Return the method whose row has these two parts, with the back-offs given; what is missing is the default's."""
    if not isinstance(value, Mapping) or set(value) - set(_PARTS):
        raise UsageError(f"scale_method.{where}: {value!r}", "give a table with `weight` and `activation`")
    bases = {
        "weight": _BARE if default is None else default.weight,
        "activation": _BARE if default is None else default.activation,
    }
    wanted = {part: _part(value.get(part, {}), f"{where}.{part}", bases[part]) for part in _PARTS}
    for method in SCALE_METHODS.values():
        rules = {"weight": method.weight, "activation": method.activation}
        if all(_spelled(rules[part]) == wanted[part][0] for part in _PARTS):
            made = {part: replace(rules[part], backoff=wanted[part][1]) for part in _PARTS}
            return replace(method, weight=made["weight"], activation=made["activation"])
    spelled_parts = "; ".join(f"{part}: {' '.join(words)}" for part, (words, _) in wanted.items())
    raise UsageError(
        f"Unsupported config: scale method config for {where} = {spelled_parts} is not supported",
        "give the parts of one of the scale methods",
    )


def _part(part: object, where: str, base: Rule) -> tuple[tuple[str, ...], float]:
    """Return ((granularity, scale_value_type, rounding_method), backoff) of one part, checked; missing ones are `base`'s."""
    if not isinstance(part, Mapping):
        raise UsageError(f"scale_method.{where}: {part!r} is no table", f"give {', '.join(_FIELDS)}")
    unknown = sorted(set(part) - {*_FIELDS, "backoff", "params"})
    if unknown:
        raise UsageError(
            f"scale_method.{where}: key {unknown[0]!r} is unknown", f"use {', '.join(_FIELDS)}, backoff and params"
        )
    if part.get("params"):
        raise UsageError(
            f"scale_method.{where}: params {part['params']!r} are not known here", "leave them out: each method has its own"
        )
    words = []
    for (key, (kind, valid)), usual in zip(_FIELDS.items(), _spelled(base), strict=True):
        word = str(part.get(key, usual)).upper()
        if word not in valid:
            raise UsageError(
                f"Invalid input '{part[key]}' for {kind}. Enter one of {list(valid)}", f"mend scale_method.{where}.{key}"
            )
        words.append(word)
    backoff = part.get("backoff", base.backoff)
    if isinstance(backoff, bool) or not isinstance(backoff, int | float) or not 0 < backoff <= 1:
        raise UsageError(f"scale_method.{where}: backoff {backoff!r}", "give a number above 0, at most 1")
    return tuple(words), float(backoff)


def _spelled(rule: Rule) -> tuple[str, ...]:
    return (rule.granularity, rule.value, rule.rounding)
