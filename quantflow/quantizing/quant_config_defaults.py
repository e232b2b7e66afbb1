"""The settings of a QUANT_CONFIG for an FP8 artifact, as the recipe's keys, and its measurement."""

import glob
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quantflow.core.device_scales import target
from quantflow.core.scheme import preset
from quantflow.errors import UsageError
from quantflow.formats.gaudi.file_names import find_triples
from quantflow.formats.gaudi.gaudi_nodes import LINEAR, statistics_from
from quantflow.formats.gaudi.module_patterns import selected
from quantflow.formats.gaudi.quant_config import QuantConfig
from quantflow.formats.gaudi.triple import read_triple
from quantflow.models.open import graph_for, open_files
from quantflow.observers.keys import parse_key
from quantflow.quantizing.gaudi_measurement import are_gaudis

FLAVOURS = {"E4M3": "e4m3fn", "E5M2": "e5m2"}


def under_quant_config(
    entry: Mapping[str, Any], config: QuantConfig, *, model: Path, measurement: Path | None
) -> tuple[dict[str, Any], list[str]]:
    """An entry of a recipe over the FP8 settings of a QUANT_CONFIG, and notes about these.

    The entry's own settings win.

    Raises:
        InputError: the model or the measurement cannot be opened.
        UnsupportedError: its family is not known.
        UsageError: its scale_method is none that quantize computes.
    """
    scheme = entry.get("scheme")
    if not isinstance(scheme, str) or not scheme.startswith("FP8"):
        return dict(entry), []
    preset_flavour = preset(scheme).weights.float8
    notes = []
    flavour = FLAVOURS[config.fp8_config]
    if config.device_for_scales is not None:
        flavour = target(config.device_for_scales.lower(), config.fp8_config).flavour
    elif "float8" not in entry:
        notes = [
            f"QUANT_CONFIG names no device, float8 is {flavour}; Gaudi2 needs device_for_scales "
            "GAUDI2 or "
            "--set quantize.0.float8=gaudi2"
        ]
    linears = graph_for(open_files(model).config).linears
    ignored = [
        name
        for name in linears
        if not selected(name, LINEAR, allow=config.allowlist, block=config.blocklist)
    ]
    if config.ignore_modules_wo_measures and measurement is not None and are_gaudis(measurement):
        triples = find_triples(measurement).values()
        measured = {
            parse_key(key).name
            for triple in triples
            for key in statistics_from(read_triple(triple).nodes, known=linears)[0]
        }
        ignored += sorted(set(linears) - measured - set(ignored))
    methods, said = _scale_method(entry, config)
    beneath = {
        "float8": None if flavour == preset_flavour else flavour,
        "ignore": ignored or None,
        **methods,
    }
    return {**{key: value for key, value in beneath.items() if value is not None}, **entry}, [
        *notes,
        *said,
    ]


def _scale_method(
    entry: Mapping[str, Any], config: QuantConfig
) -> tuple[dict[str, Any], list[str]]:
    """The recipe's keys for a QUANT_CONFIG's scales, and notes; none where the entry has its own.

    Raises:
        UsageError: the dictionary form, or a method that computes scales at run time.
    """
    own_keys = [key for key in ("scale_method", "scale_rounding") if entry.get(key) is not None]
    name = config.scale_method.default.name
    scheme = preset(entry["scheme"])
    if own_keys:
        return {}, []
    if scheme.weights.granularity != "per_tensor":
        unused = (
            f"scale_method {name} makes scales at run time, and so does {entry['scheme']}, by its "
            "own rule"
            if config.scale_method.default.dynamic
            else f"scale_method {name} is of scales per tensor, {entry['scheme']} has its own; use "
            "--scheme FP8"
        )
        return {}, [unused] if "scale_method" in config.given else []
    if not config.scale_method.plain:
        raise UsageError(
            "QUANT_CONFIG: scale_method is a table of several, quantize has one method for all "
            "linears",
            "name one, give --set quantize.0.scale_method=maxabs_hw, or pass the table on: "
            "quantflow export --format inc",
        )
    if config.scale_method.default.dynamic:
        raise UsageError(
            f"QUANT_CONFIG: scale_method {name} computes the scales of inputs at run time, FP8 "
            "stores them",
            "name a static method, or quantize with --scheme FP8_DYNAMIC",
        )
    notes = (
        []
        if "scale_method" in config.given
        else [f"QUANT_CONFIG names no scale_method, it is {name}"]
    )
    return {"scale_method": name, "scale_arithmetic": config.hp_dtype}, notes


def quant_config_measurement(config: QuantConfig) -> Path:
    """The measurement that dump_stats_path names: the prefix of Gaudi's files, or a folder of ours.

    Raises:
        UsageError: both are there, or the path is empty.
        InputError: neither is there.
    """
    if not config.dump_stats_path:
        raise UsageError(
            "QUANT_CONFIG: dump_stats_path is empty, so it names no measurement",
            "name one with --measurement, or make scales at run time: --scheme FP8_DYNAMIC",
        )
    path = Path(config.dump_stats_path)
    ours = any(path.glob("rank-*-of-*"))
    theirs = any(path.parent.glob(f"{glob.escape(path.name)}_hooks_*"))
    if ours and theirs:
        raise UsageError(
            f"dump_stats_path {path}: is both a folder of `quantflow measure` and the prefix of "
            "Gaudi's files",
            "name the one that is meant with --measurement",
        )
    if not ours:
        find_triples(path)
    return path
