"""What a QUANT_CONFIG says about an FP8 artifact, as the recipe's keys, and where its measurement is."""

import glob
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quantflow.core.scheme import preset
from quantflow.errors import UsageError
from quantflow.formats.gaudi.devices import target
from quantflow.formats.gaudi.file_names import find_triples
from quantflow.formats.gaudi.gaudi_nodes import LINEAR, statistics_from
from quantflow.formats.gaudi.module_patterns import selected
from quantflow.formats.gaudi.quant_config import QuantConfig
from quantflow.formats.gaudi.triple import read_triple
from quantflow.measurements.keys import parse_key
from quantflow.models.graph import graph_for
from quantflow.models.source import open_files
from quantflow.quantization.gaudi_measurement import are_gaudis

FLAVOURS = {"E4M3": "e4m3fn", "E5M2": "e5m2"}


def under_quant_config(
    entry: Mapping[str, Any], config: QuantConfig, *, model: Path, measurement: Path | None
) -> tuple[dict[str, Any], list[str]]:
    """Return an entry of a recipe with what a QUANT_CONFIG says about FP8 where the entry says nothing, and notes about it.

    Raises:
        InputError: the model or the measurement cannot be opened.
        UnsupportedError: its family is not known.
    """
    scheme = entry.get("scheme")
    if not isinstance(scheme, str) or not scheme.startswith("FP8"):
        return dict(entry), []
    preset_flavour, notes = preset(scheme).weights.float8, []
    flavour = FLAVOURS[config.fp8_config]
    if config.device_for_scales is not None:
        flavour = target(config.device_for_scales.lower(), config.fp8_config).flavour
    elif "float8" not in entry:
        notes = [
            f"QUANT_CONFIG names no device, float8 is {flavour}; Gaudi2 needs device_for_scales GAUDI2 or "
            "--set quantize.0.float8=gaudi2"
        ]
    linears = graph_for(open_files(model).config).linears
    ignored = [name for name in linears if not selected(name, LINEAR, allow=config.allowlist, block=config.blocklist)]
    if config.ignore_modules_wo_measures and measurement is not None and are_gaudis(measurement):
        triples = find_triples(measurement).values()
        measured = {parse_key(key).name for triple in triples for key in statistics_from(read_triple(triple).nodes)[0]}
        ignored += sorted(set(linears) - measured - set(ignored))
    beneath = {"float8": None if flavour == preset_flavour else flavour, "ignore": ignored or None}
    return {**{key: value for key, value in beneath.items() if value is not None}, **entry}, notes


def quant_config_measurement(config: QuantConfig) -> Path:
    """Return the measurement that dump_stats_path names: Gaudi's files, which begin with it, or a folder of ours.

    Raises:
        UsageError: both are there.
        InputError: neither is there.
    """
    path = Path(config.dump_stats_path)
    ours = any(path.glob("rank-*-of-*"))
    theirs = any(path.parent.glob(f"{glob.escape(path.name)}_hooks_*"))
    if ours and theirs:
        raise UsageError(
            f"dump_stats_path {path}: is both a folder of `quantflow measure` and the prefix of Gaudi's files",
            "name the one that is meant with --measurement",
        )
    if not ours:
        find_triples(path)
    return path
