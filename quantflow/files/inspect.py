"""A folder's content as plain data: an artifact, a model, measurements. Hashes are `verify`'s."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from quantflow.errors import InputError
from quantflow.files.canonical import read_json
from quantflow.files.checkpoint import CONFIG, Checkpoint, open_checkpoint
from quantflow.files.layers_ahead import lost_words
from quantflow.files.ledger import Ledger
from quantflow.files.manifest import MANIFEST_NAME, read_manifest
from quantflow.files.safetensors_header import TensorInfo, read_header

MEASUREMENT_NAME = "measurement.json"
STATISTICS_NAME = "statistics.safetensors"
IR_NAME, IR_WEIGHTS = "openvino_model.xml", "openvino_model.bin"
_IR_LARGEST = 256 << 20  # bytes of a graph; that of a hundred layers has a tenth of it
_WORD = re.compile(r'(\w+)="([^"]*)"')
_RANK_FOLDER = re.compile(r"rank-\d+-of-\d+")
_MEASUREMENT_KEYS = (
    *("layout_version", "model", "mesh", "dtype", "seed"),
    *("calibration", "observers", "counts", "tools", "digest"),
)


def summarize(folder: Path) -> dict[str, Any]:
    """Content of an artifact, a model, one rank's measurement, or a folder of them.

    Only headers and JSON are read. For a folder of OpenVINO the graph is read, and no constant.

    Returns:
        A table whose `kind` is artifact, checkpoint, measurement, measurements or openvino_ir.

    Raises:
        InputError: the folder is none of these, or damaged.
        IntegrityError: the manifest of an artifact was changed.
        UnsupportedError: an artifact has a newer layout version.
    """
    if (folder / MANIFEST_NAME).exists():
        return _artifact(folder)
    if (folder / MEASUREMENT_NAME).exists():
        return _measurement(folder)
    ranks = sorted(path for path in folder.glob("rank-*") if _RANK_FOLDER.fullmatch(path.name))
    if ranks:
        return {"kind": "measurements", "ranks": {path.name: _measurement(path) for path in ranks}}
    if (folder / IR_NAME).exists():
        return _graph(folder)
    return {"kind": "checkpoint", **_model(open_checkpoint(folder))}


def _artifact(folder: Path) -> dict[str, Any]:
    manifest = read_manifest(folder)
    ledger = Ledger.from_json(manifest["ledger"])
    reasons = Counter((entry.action, entry.reason) for entry in ledger.tensors)
    model = _model(open_checkpoint(folder))
    source_bytes = ledger.bytes_by_action()
    copied = (
        "layout_version",
        "digest",
        "source",
        "recipe",
        "measurement",
        "float8",
        "proof",
        "tools",
    )
    return {
        "kind": "artifact",
        **{key: manifest[key] for key in copied},
        "source_bytes": source_bytes,
        "fraction_of_source": model["bytes"] / source_bytes["source"]
        if source_bytes["source"]
        else None,
        "actions": [
            {"action": action, "reason": reason, "tensors": count}
            for (action, reason), count in sorted(reasons.items())
        ],
        **({"measured_tensors": len(ledger.measured)} if ledger.measured else {}),
        "layers": len(manifest["layers"] or ()),
        **({"output_error": errors} if (errors := output_errors(manifest["layers"] or ())) else {}),
        **_experts(manifest["layers"] or ()),
        **model,
    }


def _model(checkpoint: Checkpoint) -> dict[str, Any]:
    config = checkpoint.config
    quantization = config.get("quantization_config")
    return {
        "model_type": config.get("model_type"),
        "architectures": config.get("architectures"),
        "quant_method": quantization.get("quant_method")
        if isinstance(quantization, dict)
        else None,
        "format": quantization.get("format") if isinstance(quantization, dict) else None,
        **_cache(quantization),
        "tensors": len(checkpoint.tensors),
        "bytes": sum(info.nbytes for info in checkpoint.infos.values()),
        "dtypes": _by_dtype(checkpoint.infos.values()),
        "shards": list(checkpoint.shards),
        "files": list(checkpoint.files),
        **({"notes": notes} if (notes := _notes(checkpoint)) else {}),
    }


def _notes(checkpoint: Checkpoint) -> list[str]:
    lost = lost_words(checkpoint.config, checkpoint.infos_with_unused)
    return [*checkpoint.notes, *([] if lost is None else [lost])]


def _graph(folder: Path) -> dict[str, Any]:
    """Content of OpenVINO's graph: its source artifact, and its constants by element type.

    OpenVINO writes each element of the graph on a line of its own. The attributes of a constant
    follow on the next line.

    Raises:
        InputError: the file is no such graph, or has constants beyond the end of the weights.
    """
    path, weights = folder / IR_NAME, folder / IR_WEIGHTS
    try:
        nbytes, size = path.stat().st_size, weights.stat().st_size
        if nbytes > _IR_LARGEST:
            raise InputError(
                f"{path}: {nbytes} bytes, at most {_IR_LARGEST} are read", "export it again"
            )
        lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: {error}", "download the folder again") from error
    kinds: dict[str, dict[str, int]] = {}
    source = None
    for line, below in pairwise([*lines, ""]):
        if line == "<quantflow>" and below.startswith("<artifact "):
            source = dict(_WORD.findall(below)).get("value")
        if not (line.startswith("<layer ") and ' type="Const"' in line):
            continue
        attributes = dict(_WORD.findall(below))
        begin, length = (attributes.get(key, "") for key in ("offset", "size"))
        if not (
            re.fullmatch("[0-9]{1,18}", begin)
            and re.fullmatch("[0-9]{1,18}", length)
            and "element_type" in attributes
        ):
            raise InputError(
                f"{path}: a constant without element_type, offset and size",
                "download the folder again",
            )
        if int(begin) + int(length) > size:
            cause = f"{weights}: {size} bytes, a constant ends at {int(begin) + int(length)}"
            raise InputError(cause, "the file is truncated; download the folder again")
        row = kinds.setdefault(attributes["element_type"], {"constants": 0, "bytes": 0})
        row["constants"] += 1
        row["bytes"] += int(length)
    config = read_json(folder / CONFIG) if (folder / CONFIG).exists() else {}
    return {
        "kind": "openvino_ir",
        "model_type": config.get("model_type") if isinstance(config, Mapping) else None,
        "artifact": source,
        "constants": dict(sorted(kinds.items())),
        "bytes": size,
        "files": sorted(each.name for each in folder.iterdir() if each.is_file()),
    }


def _cache(quantization: Any) -> dict[str, Any]:
    """Scheme of keys and values in short; nothing where they stay as they are."""
    scheme = quantization.get("kv_cache_scheme") if isinstance(quantization, dict) else None
    if not isinstance(scheme, dict):
        return {}
    return {"kv_cache": f"{scheme.get('type')}{scheme.get('num_bits')} {scheme.get('strategy')}"}


def _measurement(folder: Path) -> dict[str, Any]:
    path = folder / MEASUREMENT_NAME
    record = read_json(path)
    if not isinstance(record, Mapping) or record.get("kind") != "measurement":
        raise InputError(
            f"{path}: not the record of a measurement",
            "give a folder that `quantflow measure` wrote",
        )
    statistics, _ = read_header(folder / STATISTICS_NAME)
    tensors = record.get("tensors")
    rows = tensors.values() if isinstance(tensors, Mapping) else ()
    kinds = Counter(str(row.get("kind")) for row in rows if isinstance(row, Mapping))
    names = Counter("|".join(key.split("|")[1:]) for key in statistics)
    return {
        "kind": "measurement",
        **{key: record.get(key) for key in _MEASUREMENT_KEYS},
        "tensors": dict(sorted(kinds.items())),
        "statistics": dict(sorted(names.items())),
        "bytes": sum(info.nbytes for info in statistics.values()),
        **_routed(record.get("experts"), record.get("routed")),
    }


def _routed(fed: Any, routed: Any) -> dict[str, Any]:
    """Tokens that the router sent to each layer's experts in short; nothing without experts."""
    if not isinstance(routed, Mapping):
        return {}
    ledgers = {experts: row for experts, row in routed.items() if isinstance(row, Mapping)}
    rows = {
        experts: {key: row.get(key) for key in ("least", "median")}
        for experts, row in ledgers.items()
    }
    return {"experts": fed, "tokens_per_expert": rows}


def _experts(layers: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Tokens per expert of an artifact in short, and the number of experts that lacked tokens."""
    rows = {}
    for row in [layer["experts"] for layer in layers if "experts" in layer]:
        tokens = row["tokens"]
        counts = {"least": min(tokens), "median": median(tokens)} if tokens else {}
        rows[row["experts"]] = {
            "fed": row["fed"],
            **counts,
            "short": len({name.rpartition(".")[0] for name in row["short"]}),
        }
    return {"experts": rows} if rows else {}


def output_errors(layers: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Output errors on the calibration text in short, from the `layers` of a manifest.

    Returns:
        `linears` (how many were compared), `median` and `median_rtn` (relative, of the algorithm
            and of
        plain round to nearest), `worst` and its `worst_linear`, `worse_than_rtn` and `same_as_rtn`
            (how
        many linears are). Empty where the layers have none.
    """
    rows = [
        (name, decisions["output_error"], decisions["output_error_rtn"], decisions["same_as_rtn"])
        for layer in layers
        for name, decisions in layer.get("decisions", {}).items()
        if decisions.get("output_error") is not None
        and decisions.get("output_error_rtn") is not None
    ]
    if not rows:
        return {}
    worst = max(rows, key=lambda row: row[1])
    return {
        "linears": len(rows),
        "median": median(error for _, error, _, _ in rows),
        "median_rtn": median(error for _, _, error, _ in rows),
        "worst": worst[1],
        "worst_linear": worst[0],
        "worse_than_rtn": sum(error > rtn for _, error, rtn, _ in rows),
        "same_as_rtn": sum(same for _, _, _, same in rows),
    }


def _by_dtype(infos: Iterable[TensorInfo]) -> dict[str, dict[str, int]]:
    """Tensors and bytes by dtype, the largest share first."""
    table: dict[str, dict[str, int]] = {}
    for info in infos:
        row = table.setdefault(info.dtype, {"tensors": 0, "bytes": 0})
        row["tensors"] += 1
        row["bytes"] += info.nbytes
    return dict(sorted(table.items(), key=lambda item: (-item[1]["bytes"], item[0])))
