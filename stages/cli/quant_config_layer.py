"""QUANT_CONFIG under the flags and the recipe: which file is meant, and what it says where nothing else does."""

import glob
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from quantflow.core.scheme import preset
from quantflow.errors import InputError, UsageError
from quantflow.formats.gaudi.devices import target
from quantflow.formats.gaudi.file_names import find_triples
from quantflow.formats.gaudi.gaudi_nodes import LINEAR, statistics_from
from quantflow.formats.gaudi.module_patterns import selected
from quantflow.formats.gaudi.quant_config import (
    GivenConfig,
    find_quant_config,
    read_quant_config,
    require_mode,
    without_meaning,
)
from quantflow.formats.gaudi.triple import read_triple
from quantflow.measurements.keys import parse_key
from quantflow.models.graph import graph_for
from quantflow.models.source import open_files
from quantflow.quantization.gaudi_measurement import are_gaudis
from quantflow.stages.cli.environment import quant_config_variable

FLAVOURS = {"E4M3": "e4m3fn", "E5M2": "e5m2"}
OBSERVED = {"maxabs": ["amax"], "maxabs_per_channel": ["amax", "channel_amax"]}


def given(verb: str, option: str | None, *, quiet: bool) -> GivenConfig | None:
    """Return the QUANT_CONFIG of --quant-config, or of the environment; say which of its keys the verb does not use.

    Raises:
        UsageError: the file does not exist, its mode belongs to another verb, a value is wrong.
        InputError: it cannot be read.
    """
    name = option or quant_config_variable()
    if name is None:
        return None
    path = find_quant_config(name)
    config = read_quant_config(path)
    require_mode(config, verb)
    unused = without_meaning(config, verb)
    if unused and not quiet:
        click.echo(f"{verb}: QUANT_CONFIG {path}: keys without meaning here: {', '.join(unused)}", err=True)
    return GivenConfig(config=config, path=path, quiet=quiet)


def tell_unread(verb: str) -> None:
    """Say that a verb does not look at QUANT_CONFIG, where it is set."""
    if quant_config_variable() is not None:
        click.echo(f"{verb}: QUANT_CONFIG is not read, the recipe says everything", err=True)


def measure_beneath(data: dict[str, Any], found: GivenConfig | None) -> dict[str, Any]:
    """Put the statistics of a QUANT_CONFIG's observer where neither recipe nor flags name any; changes and returns `data`."""
    if found is not None and not data.get("quantize"):
        measure = data.setdefault("measure", {})
        if isinstance(measure, dict) and measure.get("stats") is None:
            measure["stats"] = OBSERVED[found.config.observer]
    return data


def output_beneath(output: str | None, found: GivenConfig | None) -> str:
    """Return where measure writes: -o, or the folder that a QUANT_CONFIG's dump_stats_path names.

    Raises:
        UsageError: neither is given.
        InputError: that folder cannot be written.
    """
    if output is not None:
        return output
    if found is None:
        raise UsageError("measure: no folder to write", "give -o DIR, or a QUANT_CONFIG with dump_stats_path")
    path = Path(found.config.dump_stats_path)
    there = next(parent for parent in path.absolute().parents if parent.exists())  # the rest is made
    if not there.is_dir() or not os.access(there, os.W_OK):
        raise InputError(f"Measurements dump directory '{path.parent}' is non-writable", "mend dump_stats_path, or give -o DIR")
    return str(path)


def entry_beneath(
    entry: Mapping[str, Any], found: GivenConfig | None, *, model: Path, measurement: Path | None
) -> dict[str, Any]:
    """Return an entry of a recipe with what a QUANT_CONFIG says about FP8 where the entry says nothing.

    Raises:
        InputError: the model or the measurement cannot be opened.
        UnsupportedError: its family is not known.
    """
    scheme = entry.get("scheme")
    if found is None or not isinstance(scheme, str) or not scheme.startswith("FP8"):
        return dict(entry)
    config, preset_flavour = found.config, preset(scheme).weights.float8
    flavour = FLAVOURS[config.fp8_config]
    if config.device_for_scales is not None:
        flavour = target(config.device_for_scales.lower(), config.fp8_config).flavour
    elif "float8" not in entry and not found.quiet:
        click.echo(
            f"quantize: QUANT_CONFIG names no device, float8 is {flavour}; Gaudi2 needs device_for_scales GAUDI2 or "
            "--set quantize.0.float8=gaudi2",
            err=True,
        )
    linears = graph_for(open_files(model).config).linears
    ignored = [name for name in linears if not selected(name, LINEAR, allow=config.allowlist, block=config.blocklist)]
    if config.ignore_modules_wo_measures and measurement is not None and are_gaudis(measurement):
        measured = [
            name for found in find_triples(measurement).values() for name in statistics_from(read_triple(found).nodes)[0]
        ]
        ignored += sorted(set(linears) - {parse_key(key).name for key in measured} - set(ignored))
    beneath = {"float8": None if flavour == preset_flavour else flavour, "ignore": ignored or None}
    return {**{key: value for key, value in beneath.items() if value is not None}, **entry}


def measurement_beneath(measurement: str | None, entry: Mapping[str, Any], found: GivenConfig | None) -> Path | None:
    """Return the measurement that is given, else that of QUANT_CONFIG's dump_stats_path where FP8 needs one.

    That path names Gaudi's files, which begin with it, or the folder that `quantflow measure` wrote there.

    Raises:
        UsageError: both are there.
        InputError: the scheme needs a measurement, and there are no such files.
    """
    if measurement is not None:
        return Path(measurement)
    if found is None or entry.get("scheme") not in ("FP8", "FP8_STATIC"):
        return None
    path = Path(found.config.dump_stats_path)
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
