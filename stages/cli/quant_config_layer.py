"""QUANT_CONFIG under the flags and the recipe: the file, and its values."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantflow.errors import InputError, UsageError
from quantflow.stages.cli.environment import quant_config_variable
from quantflow.stages.cli.output import note

if TYPE_CHECKING:
    from quantflow.formats.gaudi.quant_config import GivenConfig

OBSERVED = {"maxabs": ["amax"], "maxabs_per_channel": ["amax", "channel_amax"]}


def given_config(verb: str, option: str | None, *, quiet: bool) -> "GivenConfig | None":
    """The QUANT_CONFIG of --quant-config, or of the environment.

    Keys that the verb does not use are reported.

    Raises:
        UsageError: the file does not exist, its mode belongs to another verb, a value is wrong.
        InputError: it cannot be read.
    """
    name = option or quant_config_variable()
    if name is None:
        return None
    from quantflow.formats.gaudi import quant_config  # here: most commands have none

    path = quant_config.find_quant_config(name)
    config = quant_config.read_quant_config(path)
    quant_config.require_mode(config, verb)
    given = quant_config.GivenConfig(config=config, path=path, quiet=quiet)
    unused = quant_config.without_meaning(config, verb)
    if unused:
        note(
            f"{verb}: QUANT_CONFIG {given.path}: keys without meaning here: {', '.join(unused)}",
            quiet=quiet,
        )
    return given


def tell_unread(verb: str) -> None:
    """Say that a verb does not look at QUANT_CONFIG, where it is set."""
    if quant_config_variable() is not None:
        note(f"{verb}: QUANT_CONFIG is not read, the recipe says everything")


def measure_beneath(data: dict[str, Any], config: "GivenConfig | None") -> dict[str, Any]:
    """Put the statistics of a QUANT_CONFIG's observer into `data`.

    It is done where neither recipe nor flags name any; `data` is returned.
    """
    if config is not None and not data.get("quantize"):
        measure = data.setdefault("measure", {})
        if isinstance(measure, dict) and measure.get("stats") is None:
            measure["stats"] = OBSERVED[config.config.observer]
    return data


def output_beneath(output: Path | None, config: "GivenConfig | None") -> Path:
    """The folder of measure: -o, or the one that a QUANT_CONFIG's dump_stats_path names.

    Raises:
        UsageError: neither is given.
        InputError: that folder cannot be written.
    """
    if output is not None:
        return output
    if config is None:
        raise UsageError(
            "measure: no folder to write", "give -o DIR, or a QUANT_CONFIG with dump_stats_path"
        )
    path = Path(config.config.dump_stats_path)
    # the rest is made
    there = next(parent for parent in path.absolute().parents if parent.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        raise InputError(
            f"Measurements dump directory '{path.parent}' is non-writable",
            "mend dump_stats_path, or give -o DIR",
        )
    return path


def entry_beneath(
    entry: Mapping[str, Any], config: "GivenConfig | None", *, model: Path, measurement: Path | None
) -> dict[str, Any]:
    """An entry of a recipe, with FP8 values of a QUANT_CONFIG where the entry has none.

    Raises:
        InputError: the model or the measurement cannot be opened.
        UnsupportedError: its family is not known.
    """
    if config is None:
        return dict(entry)
    from quantflow.quantizing.quant_config_defaults import under_quant_config  # here: as above

    values, notes = under_quant_config(entry, config.config, model=model, measurement=measurement)
    for line in notes:
        note(f"quantize: {line}", quiet=config.quiet)
    return values


def measurement_beneath(
    measurement: str | None, entry: Mapping[str, Any], config: "GivenConfig | None"
) -> Path | None:
    """The given measurement, else QUANT_CONFIG's dump_stats_path where FP8 needs one.

    Raises:
        UsageError: that path names both Gaudi's files and a folder of `quantflow measure`.
        InputError: the scheme needs a measurement, and there are no such files.
    """
    if measurement is not None:
        return Path(measurement)
    if config is None or entry.get("scheme") not in ("FP8", "FP8_STATIC"):
        return None
    from quantflow.quantizing.quant_config_defaults import (
        quant_config_measurement,  # here: as above
    )

    return quant_config_measurement(config.config)
