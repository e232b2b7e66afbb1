"""`scale_method` of a QUANT_CONFIG: a method by its name, or the dictionary form that mixes them.

The dictionary form names a method for single nodes, decoder layers and module types. The most
particular one that fits is taken: nodes, layers, layer_types, default. The methods are rows of
quantflow/core/scale_rules.py.

Source: neural_compressor.torch.algorithms.fp8_quant, release 3.10.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, get_args

from quantflow.core.scale_rules import (
    SCALE_METHODS,
    Rule,
    ScaleGranularity,
    ScaleMethod,
    ScaleRounding,
    ScaleValue,
)
from quantflow.errors import UsageError

_PARTS = ("weight", "activation")
_FIELDS = {
    "granularity": ("ScaleGranularity", get_args(ScaleGranularity)),
    "scale_value_type": ("ScaleValueType", get_args(ScaleValue)),
    "rounding_method": ("ScaleRoundMethod", get_args(ScaleRounding)),
}
_LAYER = re.compile(r"layers[./](\d+)(?:[./]|$)")
# the default of a dictionary that says nothing else
_BARE = Rule(granularity="PTS", value="MAXABS", rounding="IDENTITY")
DEFAULT_METHOD = "maxabs_hw"


@dataclass(frozen=True, kw_only=True)
class MethodConfig:
    """The scale method of each node.

    Attributes:
        default: method where nothing more particular fits.
        nodes: module path -> method.
        layers: number of the decoder layer -> method.
        layer_types: class name of the module -> method.
        plain: whether the configuration was one name; only then are scales kept in files.
    """

    default: ScaleMethod
    nodes: Mapping[str, ScaleMethod] = field(default_factory=dict)
    layers: Mapping[int, ScaleMethod] = field(default_factory=dict)
    layer_types: Mapping[str, ScaleMethod] = field(default_factory=dict)
    plain: bool = True

    @property
    def methods(self) -> tuple[ScaleMethod, ...]:
        """Every method that is named, the default first."""
        return (
            self.default,
            *self.nodes.values(),
            *self.layers.values(),
            *self.layer_types.values(),
        )

    def method(self, node: str, layer_type: str) -> ScaleMethod:
        """Method of a node: its own, its layer's, its type's, or the default."""
        if node in self.nodes:
            return self.nodes[node]
        layer = _LAYER.search(node)
        if layer is not None and int(layer[1]) in self.layers:
            return self.layers[int(layer[1])]
        return self.layer_types.get(layer_type, self.default)


def method_config(value: object) -> MethodConfig:
    """Read `scale_method`: a name in any case, or the dictionary form.

    Raises:
        UsageError: an unknown name or key, no default, or a combination that is none of
            SCALE_METHODS.
    """
    if isinstance(value, str):
        return MethodConfig(default=_named(value))
    if not isinstance(value, Mapping):
        raise UsageError(f"scale_method: {value!r} is neither a name nor a table", _names())
    unknown = sorted(set(value) - {"default", "nodes", "layers", "layer_types"})
    if unknown:
        raise UsageError(
            f"scale_method: key {unknown[0]!r} is unknown",
            "use default, nodes, layers, layer_types",
        )
    if "default" not in value:
        raise UsageError(
            "Scale method config should contain a default scale method.",
            "add a `default` with both parts",
        )
    tables = {key: value.get(key) or {} for key in ("nodes", "layers", "layer_types")}
    for key, table in tables.items():
        if not isinstance(table, Mapping):
            raise UsageError(
                f"scale_method: {key} is {table!r}", "write a table of names and methods"
            )
        for name in table if key == "layers" else ():
            if not str(name).isdecimal():
                raise UsageError(
                    f"scale_method: layers has the key {name!r}",
                    "use the number of the decoder layer",
                )
    default = _combined(value["default"], "default")
    methods = {
        key: {name: _combined(item, f"{key}.{name}", default) for name, item in table.items()}
        for key, table in tables.items()
    }
    return MethodConfig(
        default=default,
        nodes=methods["nodes"],
        layers={int(name): method for name, method in methods["layers"].items()},
        layer_types=methods["layer_types"],
        plain=False,
    )


def spelled(config: MethodConfig) -> Any:
    """The value that `method_config` reads as `config`."""
    if config.plain:
        return config.default.name
    tables: dict[str, Mapping[Any, ScaleMethod]] = {
        "nodes": config.nodes,
        "layers": config.layers,
        "layer_types": config.layer_types,
    }
    spelled_tables = {
        key: {str(name): _parts(method) for name, method in table.items()}
        for key, table in tables.items()
        if table
    }
    return {"default": _parts(config.default), **spelled_tables}


def _parts(method: ScaleMethod) -> dict[str, dict[str, Any]]:
    return {
        part: {**dict(zip(_FIELDS, _spelled(rule), strict=True)), "backoff": rule.backoff}
        for part, rule in (("weight", method.weight), ("activation", method.activation))
    }


def _named(name: str) -> ScaleMethod:
    method = SCALE_METHODS.get(name.lower())
    if method is None:
        raise UsageError(
            f"Invalid 'scale_method' value in custom config ('{name}'). Enter one of "
            f"{list(SCALE_METHODS)}",
            _names(),
        )
    return method


def _names() -> str:
    return f"use one of {', '.join(SCALE_METHODS)}"


def _combined(value: object, where: str, default: ScaleMethod | None = None) -> ScaleMethod:
    """Method whose row has these two parts, with their back-offs.

    A part that is missing is the default's.
    """
    if not isinstance(value, Mapping) or set(value) - set(_PARTS):
        raise UsageError(
            f"scale_method.{where}: {value!r}", "give a table with `weight` and `activation`"
        )
    bases = {
        "weight": _BARE if default is None else default.weight,
        "activation": _BARE if default is None else default.activation,
    }
    wanted = {part: _part(value.get(part, {}), f"{where}.{part}", bases[part]) for part in _PARTS}
    for method in SCALE_METHODS.values():
        rules = {"weight": method.weight, "activation": method.activation}
        if all(_spelled(rules[part]) == wanted[part][0] for part in _PARTS):
            by_part = {part: replace(rules[part], backoff=wanted[part][1]) for part in _PARTS}
            return replace(method, weight=by_part["weight"], activation=by_part["activation"])
    spelled_parts = "; ".join(f"{part}: {' '.join(words)}" for part, (words, _) in wanted.items())
    raise UsageError(
        f"Unsupported config: scale method config for {where} = {spelled_parts} is not supported",
        "give the parts of one of the scale methods",
    )


def _part(part: object, where: str, base: Rule) -> tuple[tuple[str, ...], float]:
    """((granularity, scale_value_type, rounding_method), backoff) of one part, checked.

    A field that is missing is `base`'s.
    """
    if not isinstance(part, Mapping):
        raise UsageError(
            f"scale_method.{where}: {part!r} is no table", f"give {', '.join(_FIELDS)}"
        )
    unknown = sorted(set(part) - {*_FIELDS, "backoff", "params"})
    if unknown:
        raise UsageError(
            f"scale_method.{where}: key {unknown[0]!r} is unknown",
            f"use {', '.join(_FIELDS)}, backoff and params",
        )
    if part.get("params"):
        raise UsageError(
            f"scale_method.{where}: params {part['params']!r} are not known here",
            "leave them out: each method has its own",
        )
    parts = []
    for (key, (kind, valid)), usual in zip(_FIELDS.items(), _spelled(base), strict=True):
        word = str(part.get(key, usual)).upper()
        if word not in valid:
            raise UsageError(
                f"Invalid input '{part[key]}' for {kind}. Enter one of {list(valid)}",
                f"mend scale_method.{where}.{key}",
            )
        parts.append(word)
    backoff = part.get("backoff", base.backoff)
    if isinstance(backoff, bool) or not isinstance(backoff, int | float) or not 0 < backoff <= 1:
        raise UsageError(
            f"scale_method.{where}: backoff {backoff!r}", "give a number above 0, at most 1"
        )
    return tuple(parts), float(backoff)


def _spelled(rule: Rule) -> tuple[str, ...]:
    return (rule.granularity, rule.value, rule.rounding)
