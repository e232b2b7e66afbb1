"""A measurement as a folder: three files, each with its hash, checked when written and when read.

statistics.safetensors    `<source name>|<site>|<statistic>`, see
                          quantflow/observers/keys.py
calibration.safetensors   tokens [total], lengths [n], indices [n], all int64: this rank's sequences
                          of token ids one after the other, and their numbers in the whole
                          calibration set
measurement.json          everything else, `meta`:

{layout_version: 1, kind: "measurement", model: {name, fingerprint, family},
 mesh: {rank, world, tp, dp, ep}, dtype, seed,
 calibration: {hash, samples, tokens, sequence_length} of the whole set; left_out: lines of the text
 that could not be read, where there are any,
 observers: [names],
 tensors: {source name: its placement, see quantflow/distributed/placement.py},
 counts: {samples, tokens} of this rank, tools,
 experts: of a mixture, whether an expert was shown the tokens that were `routed` to it, or `all`,
 routed: the ledger of tokens of each expert, made from the statistics by routing.py,
 device: the name and generation of the device, where it was no CPU (those are in tools),
 unified: the record of merging, see merging/ranks.py,
 expanded: the record of cutting, see quantflow/unifying/expand.py,
 files: {name: sha256}, digest: sha256 of the canonical JSON of all this without digest}

Rank r of mesh.world = dp * tp ranks is card r % tp of replica r // tp; the cards of a replica run
the same sequences.
"""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from quantflow.core.parallel import SEQUENTIAL, Workers
from quantflow.distributed.placement import check_placement
from quantflow.errors import InputError, IntegrityError, StatisticsError, UnsupportedError
from quantflow.files import disk
from quantflow.files.canonical import digest_of, file_digest, read_json, readable_json
from quantflow.files.rank_folders import MOST_RANKS
from quantflow.measuring.routing import ledger_of
from quantflow.measuring.stored import (
    Headers,
    StoredStatistics,
    as_tensors,
    hash_of,
    read_small,
    write_tensors,
)
from quantflow.observers import observers_for
from quantflow.observers.keys import Key, are_states, by_site, is_matrix, observers_at

LAYOUT_VERSION = 1
META_NAME = "measurement.json"
STATISTICS_NAME = "statistics.safetensors"
CALIBRATION_NAME = "calibration.safetensors"

_FIELDS: tuple[tuple[str, type], ...] = (
    ("layout_version", int),
    ("model.name", str),
    ("model.fingerprint", str),
    ("model.family", str),
    ("mesh.rank", int),
    ("mesh.world", int),
    ("mesh.tp", int),
    ("mesh.dp", int),
    ("mesh.ep", int),
    ("dtype", str),
    ("seed", int),
    ("calibration.hash", str),
    ("calibration.samples", int),
    ("calibration.tokens", int),
    ("calibration.sequence_length", int),
    ("observers", list),
    ("tensors", dict),
    ("counts.samples", int),
    ("counts.tokens", int),
    ("tools", dict),
)
_KEYS = {path.split(".")[0] for path, _ in _FIELDS} | {"kind"}
_WRITTEN_KEYS = {"files", "digest", "routed"}
_OPTIONAL_KEYS = {"device", "experts", "unified", "expanded"}
_AGAIN = "measure again, or copy the folder again from where it was measured"


@dataclass(frozen=True, kw_only=True, eq=False)
class Measurement:
    """The measurement of one rank.

    Attributes:
        meta: the fields of measurement.json; `files` and `digest` only after it was read from a
            folder.
        statistics: `<source name>|<site>|<statistic>` -> tensor.
        sequences: token ids of this rank's samples, each int64 [length].
        indices: the number of each sequence in the whole calibration set, ascending.
        origin: the folder it was read from, for messages.
    """

    meta: dict[str, Any]
    statistics: Mapping[str, Tensor]
    sequences: list[Tensor]
    indices: list[int]
    origin: str = ""

    @property
    def who(self) -> str:
        """The rank's name in messages: its folder where there is one, and its number."""
        rank = f"rank {self.meta['mesh']['rank']}"
        return f"{self.origin}: {rank}" if self.origin else rank


def statistic(measurement: Measurement, name: str, *, site: str, statistic: str) -> Tensor:
    """One statistic of a tensor.

    Raises:
        StatisticsError: it was not measured; says which `--stats` would have.
    """
    value = measurement.statistics.get(str(Key(name, site, statistic)))
    if value is None:
        observers = observers_for([statistic])
        raise StatisticsError(
            f"{name}: the measurement has no {statistic} of its {site}",
            f"measure with --stats {','.join(observers) or statistic}",
        )
    return value


def write_measurement(folder: Path, measurement: Measurement) -> dict[str, str]:
    """Write the three files into an existing folder; equal measurements give equal bytes.

    Returns:
        The sha256 of each file.

    Raises:
        InputError: meta and sequences contradict each other.
        OSError: a file cannot be written.
        StatisticsError: a statistic is not one of an observer's states.
    """
    files = {
        name: write_tensors(folder / name, held) for name, held in _contents(measurement).items()
    }
    record = readable_json(_recorded(measurement, files))
    disk.write_file(folder / META_NAME, record)
    return {**files, META_NAME: hashlib.sha256(record).hexdigest()}


def recorded(measurement: Measurement) -> Measurement:
    """A measurement with the record, and so the digest, that its files would have.

    Raises:
        InputError: meta and sequences contradict each other.
        StatisticsError: a statistic is not one of an observer's states.
    """
    files = {name: hash_of(held) for name, held in _contents(measurement).items()}
    return replace(measurement, meta=_recorded(measurement, files))


def _contents(measurement: Measurement) -> dict[str, Mapping[str, Tensor]]:
    """The tensors of each file, checked."""
    _check_fields(measurement.meta, name="the measurement")
    _check_counts(measurement, name="the measurement")
    _check_statistics(measurement)
    calibration = {
        **as_tensors(measurement.sequences),
        "indices": torch.tensor(measurement.indices, dtype=torch.int64),
    }
    return {STATISTICS_NAME: measurement.statistics, CALIBRATION_NAME: calibration}


def _recorded(measurement: Measurement, files: Mapping[str, str]) -> dict[str, Any]:
    """The record beside files of these sha256."""
    meta = {key: value for key, value in measurement.meta.items() if key not in _WRITTEN_KEYS} | {
        "files": dict(files)
    }
    meta |= {"routed": ledger} if (ledger := ledger_of(measurement.statistics)) else {}
    return {**meta, "digest": digest_of(meta)}


def read_measurement(folder: Path) -> Measurement:
    """Read and check a measurement.

    Its matrices are checked one by one, and read again when they are asked for.

    Raises:
        InputError: a file is missing or not of its format, or the three contradict each other.
        UnsupportedError: a newer version of quantflow wrote it.
        IntegrityError: a file differs from its recorded hash.
        StatisticsError: a statistic is NaN, Inf, negative, or of the wrong shape; names the tensor.
    """
    meta = read_meta(folder)
    _check_files(folder, meta)
    measurement = _open(folder, meta, read_small)
    _check_statistics(measurement)
    return measurement


def open_measurements(
    metas: Mapping[Path, dict[str, Any]], *, workers: Workers = SEQUENTIAL
) -> list[Measurement]:
    """Check the files of many ranks and read all but their statistics.

    Statistics are read when they are asked for, unchecked.

    Args:
        metas: folder -> its record, see `read_meta`.
        workers: number of ranks that are hashed at once.

    Raises:
        InputError: a file is not of its format, or the three contradict each other.
        IntegrityError: a file differs from its recorded hash.
    """
    headers = Headers()
    workers.map(lambda folder: _check_files(folder, metas[folder]), metas)
    return [
        _open(folder, meta, lambda path: StoredStatistics(path, headers))
        for folder, meta in metas.items()
    ]


def read_meta(folder: Path) -> dict[str, Any]:
    """Read and check the record of a measurement; no other file is looked into.

    Raises:
        InputError: a file is missing, or the record is none.
        UnsupportedError: a newer version of quantflow wrote it.
        IntegrityError: the record differs from its digest.
    """
    for name in (META_NAME, STATISTICS_NAME, CALIBRATION_NAME):
        if not (folder / name).is_file():
            raise InputError(
                f"{folder / name}: no such file", "give a folder that `quantflow measure` finished"
            )
    meta = _read_meta(folder / META_NAME)
    _check_fields(meta, name=str(folder))
    return meta


def _check_files(folder: Path, meta: Mapping[str, Any]) -> None:
    for name in (STATISTICS_NAME, CALIBRATION_NAME):
        actual = file_digest(folder / name)
        if actual != meta["files"][name]:
            raise IntegrityError(
                f"{folder / name}: sha256 is {actual}, recorded {meta['files'][name]}", _AGAIN
            )


def _open(
    folder: Path, meta: dict[str, Any], statistics: Callable[[Path], Mapping[str, Tensor]]
) -> Measurement:
    sequences, indices = _read_sequences(folder / CALIBRATION_NAME)
    measurement = Measurement(
        meta=meta,
        statistics=statistics(folder / STATISTICS_NAME),
        sequences=sequences,
        indices=indices,
        origin=str(folder),
    )
    _check_counts(measurement, name=str(folder))
    return measurement


def _read_meta(path: Path) -> dict[str, Any]:
    meta = read_json(path)
    if not isinstance(meta, dict) or meta.get("kind") != "measurement":
        raise InputError(
            f"{path}: not the record of a measurement",
            "give a folder that `quantflow measure` wrote",
        )
    version = meta.get("layout_version")
    if type(version) is int and version > LAYOUT_VERSION:
        raise UnsupportedError(
            f"{path}: layout_version {version}, this quantflow reads up to {LAYOUT_VERSION}",
            "install a newer quantflow",
        )
    actual = digest_of({key: value for key, value in meta.items() if key != "digest"})
    if meta.get("digest") != actual:
        raise IntegrityError(
            f"{path}: digest of its content is {actual}, recorded {meta.get('digest')}", _AGAIN
        )
    files = meta.get("files")
    if not isinstance(files, dict) or set(files) != {STATISTICS_NAME, CALIBRATION_NAME}:
        raise InputError(
            f"{path}: files is {files!r}, expected a hash for each of two files", _AGAIN
        )
    return meta


def _read_sequences(path: Path) -> tuple[list[Tensor], list[int]]:
    try:
        tensors: dict[str, Tensor] = load_file(path)
    except (OSError, SafetensorError) as error:
        raise InputError(f"{path}: cannot be read as safetensors ({error})", _AGAIN) from error
    tokens, lengths, indices = (tensors.get(name) for name in ("tokens", "lengths", "indices"))
    if len(tensors) != 3 or tokens is None or lengths is None or indices is None:
        raise InputError(
            f"{path}: holds {sorted(tensors)}, expected tokens, lengths, indices", _AGAIN
        )
    for name, value in tensors.items():
        if value.dtype != torch.int64 or value.ndim != 1 or (value.numel() and value.min() < 0):
            raise InputError(
                f"{path}: {name} is {value.dtype} {list(value.shape)}, expected int64 [n] of at "
                "least 0",
                _AGAIN,
            )
    if int(lengths.sum()) != tokens.numel():
        raise InputError(
            f"{path}: lengths add up to {int(lengths.sum())}, there are {tokens.numel()} tokens",
            _AGAIN,
        )
    return list(torch.split(tokens, lengths.tolist())), indices.tolist()


def _check_counts(measurement: Measurement, *, name: str) -> None:
    meta = measurement.meta
    tokens = sum(sequence.numel() for sequence in measurement.sequences)
    pairs = (
        ("counts.samples", meta["counts"]["samples"], "sequences", len(measurement.sequences)),
        ("indices", len(measurement.indices), "sequences", len(measurement.sequences)),
        ("counts.tokens", meta["counts"]["tokens"], "tokens in the sequences", tokens),
    )
    for left, left_value, right, right_value in pairs:
        if left_value != right_value:
            raise InputError(f"{name}: {left} is {left_value}, {right} are {right_value}", _AGAIN)
    indices = measurement.indices
    samples = meta["calibration"]["samples"]
    if sorted(set(indices)) != indices or not all(0 <= index < samples for index in indices):
        raise InputError(
            f"{name}: sample numbers {indices[:8]} are not ascending within 0..{samples - 1}",
            _AGAIN,
        )


def _check_statistics(measurement: Measurement) -> None:
    name = measurement.origin or "the measurement"
    sites = by_site({text: text for text in measurement.statistics})
    alike: dict[tuple[Any, ...], list[dict[str, Tensor]]] = {}  # by what they hold
    # matrices, of which one is in memory at a time
    single = dict[tuple[str, str], dict[str, str]]()
    for (tensor, site), texts in sites.items():
        if tensor not in measurement.meta["tensors"]:
            raise StatisticsError(
                f"{name}: {tensor}|{site} was measured, `tensors` does not list it", _AGAIN
            )
        if any(map(is_matrix, texts.values())):
            single[tensor, site] = texts
            continue
        statistics = {statistic: measurement.statistics[text] for statistic, text in texts.items()}
        structure = tuple(
            (statistic, value.dtype, value.shape) for statistic, value in statistics.items()
        )
        alike.setdefault(structure, []).append(statistics)
    for (tensor, site), texts in (
        single if all(map(are_states, alike.values())) else sites
    ).items():
        observers_at(
            tensor,
            site,
            statistics={
                statistic: measurement.statistics[text] for statistic, text in texts.items()
            },
        )


def _check_fields(meta: Mapping[str, Any], *, name: str) -> None:
    unknown = set(meta) - _KEYS - _WRITTEN_KEYS - _OPTIONAL_KEYS
    missing = _KEYS - set(meta)
    if unknown or missing:
        raise InputError(
            f"{name}: fields missing {sorted(missing)}, unknown {sorted(unknown)}", _AGAIN
        )
    if (meta["layout_version"], meta["kind"]) != (LAYOUT_VERSION, "measurement"):
        raise InputError(
            f"{name}: layout_version {meta['layout_version']!r}, kind {meta['kind']!r}", _AGAIN
        )
    for path, expected in _FIELDS:
        value: Any = meta
        for part in path.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        if type(value) is not expected:
            raise InputError(f"{name}: {path} is {value!r}, expected {expected.__name__}", _AGAIN)
    for key in ("world", "tp", "dp", "ep"):
        if not 1 <= meta["mesh"][key] <= MOST_RANKS:
            raise InputError(f"{name}: mesh.{key} is no number from 1 to {MOST_RANKS}", _AGAIN)
    rank, world = meta["mesh"]["rank"], meta["mesh"]["world"]
    if not 0 <= rank < world:
        raise InputError(f"{name}: mesh.rank is {rank} of mesh.world {world}", _AGAIN)
    for tensor, placement in meta["tensors"].items():
        check_placement(tensor, placement, where=name)
