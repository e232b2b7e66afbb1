"""Stage 4, export: write the artifact, reopen it in a fresh process, and publish it only when the canary agrees.

Reads    a finished quantize folder and the model it was made from
Writes   <o>: config.json, weights, side files, quantflow.json, README.md; the whole folder appears at once
Resumes  an artifact whose manifest names the same inputs is left alone; an unfinished one starts again
Fails    3 unfinished or foreign input, 5 the folder is held or the disk is full, 7 the proof or a hash disagrees
"""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
from torch import Tensor

from quantflow.artifact.canonical import digest_of, file_digest, read_json, readable_json
from quantflow.artifact.checkpoint import CONFIG, INDEX
from quantflow.artifact.ledger import FileEntry, Ledger, LedgerEntry
from quantflow.artifact.manifest import MANIFEST_NAME, build_manifest, read_manifest, write_manifest
from quantflow.artifact.verify import verify
from quantflow.core.float8 import FLAVOURS
from quantflow.core.scheme import LinearScheme, TensorScheme
from quantflow.errors import InputError, IntegrityError, QuantflowError, UsageError
from quantflow.formats import FORMATS
from quantflow.models.graph import Graph, graph_for
from quantflow.models.load import Source, fingerprint, open_source
from stages import _workspace
from stages._card import model_card
from stages._config import nearest, parse_size
from stages._progress import Progress
from stages.quantize import tools

SIDE_FILES = re.compile(
    r"(tokenizer.*\.(json|model)|vocab\.(json|txt)|merges\.txt|special_tokens_map\.json|added_tokens\.json|"
    r"chat_template.*|generation_config\.json|.*processor_config\.json|LICEN[CS]E.*|NOTICE.*|USE_POLICY.*)"
)


@dataclass(frozen=True, kw_only=True)
class Job:
    """One artifact to be written.

    Attributes:
        quantized: a finished quantize folder.
        model: the source folder; None reads where quantize found it.
        replace: redo an artifact that was made from other inputs, instead of refusing.
    """

    quantized: Path
    output: Path
    model: Path | None = None
    format: str = "compressed-tensors"
    shard_size: str = "4GiB"
    replace: bool = False


def run(job: Job, progress: Progress) -> Path:
    """Export and prove the artifact and return its folder; one that is up to date is left alone."""
    if job.format not in FORMATS:
        raise UsageError(f"format {job.format!r} is unknown", nearest(job.format, list(FORMATS)))
    record = _workspace.require_done(job.quantized, stage="quantize")
    summary = read_json(job.quantized / "quantize.json")
    made_from = digest_of([record["inputs"], job.format, parse_size(job.shard_size)])
    with _workspace.locked(job.output):
        if _is_up_to_date(job.output, made_from):
            progress.say(f"export {job.output.name}: up to date")
            return job.output
        _refuse_other_result(job, made_from)
        source = open_source(job.model or Path(summary["source"]["folder"]))
        expected, found = record["inputs"]["model"], fingerprint(source.checkpoint)
        if found != expected:
            raise InputError(
                f"{source.checkpoint.folder}: is model {found[:16]}, {job.quantized} was made from {expected[:16]}",
                "give the model that was quantized with --model, or quantize this one",
            )
        with _workspace.publish(job.output, stage=None, inputs={}) as folder:
            _write(job, folder, source, summary, made_from)
            progress.say(f"export {job.output.name}: proving it in a fresh process")
            _prove(folder, job.quantized)
    return job.output


def _is_up_to_date(folder: Path, made_from: str) -> bool:
    if not (folder / MANIFEST_NAME).is_file():
        return False
    try:
        verify(folder)
    except QuantflowError:  # a damaged artifact is written again
        return False
    return bool(read_manifest(folder)["made_from"] == made_from)


def _refuse_other_result(job: Job, made_from: str) -> None:
    """Refuse to replace a folder that is no artifact, and, unless forced, an artifact made from other inputs."""
    if not job.output.exists() or not any(job.output.iterdir()):
        return
    if not (job.output / MANIFEST_NAME).is_file():
        raise UsageError(f"{job.output}: holds files and no {MANIFEST_NAME}", "choose another -o, or an empty folder")
    try:
        other = read_manifest(job.output)["made_from"] != made_from
        cause = "was made from other inputs"
    except QuantflowError:
        other, cause = True, f"has a damaged {MANIFEST_NAME}"
    if other and not job.replace:
        raise UsageError(f"{job.output}: {cause}", "choose another -o, or pass --force to replace it")


def _write(job: Job, folder: Path, source: Source, summary: Mapping[str, Any], made_from: str) -> None:
    graph = graph_for(source.config)
    layers = [read_json(path) for path in sorted((job.quantized / "layers").glob("*.json"))]
    schemes = {name: _scheme(data) for name, data in summary["plan"]["schemes"].items() if data is not None}
    owners = _write_weights(folder, job, source, graph, layers, schemes)
    files = _copy_side_files(folder, source)
    _write_config(folder, source, graph, schemes)
    ledger = Ledger(tensors=owners, files=files)
    sizes = {name: (source.checkpoint.folder / name).stat().st_size for name in source.checkpoint.files}
    ledger.check(source.checkpoint.infos, source_files=sizes)
    flavours = sorted({t.float8 for s in schemes.values() for t in (s.weights, s.input) if t and t.kind == "float"})
    canary = read_json(job.quantized / "canary.json")
    body = {
        "kind": "artifact",
        "source": {
            "name": summary["source"]["name"],
            "revision": summary["source"]["revision"],
            "files": {name: file_digest(source.checkpoint.folder / name) for name in _model_files(source)},
        },
        "recipe": {**summary["recipe"], "resolved": summary["plan"], "format": job.format},
        "measurement": summary["measurement"],
        "float8": {"flavour": flavours[0], "largest": FLAVOURS[flavours[0]].largest} if flavours else None,
        "ledger": ledger.to_json(),
        "layers": [{key: record[key] for key in ("errors", "decisions", "changed")} for record in layers],
        "proof": {"kind": "canary", "layers": len(canary["layers"]), "digest": digest_of(canary)},
        "tools": {**tools(), "quantflow_layout": FORMATS[job.format].LAYOUT_VERSION},
        "made_from": made_from,
    }
    manifest = build_manifest(folder, body=body)
    (folder / "README.md").write_text(model_card(manifest), encoding="utf-8")
    write_manifest(folder, manifest)


def _scheme(data: Mapping[str, Any]) -> LinearScheme:
    """Return the scheme that quantize.json spells."""
    inputs = data["input"]
    return LinearScheme(
        **{
            **data,
            "weights": TensorScheme(**data["weights"]),
            "input": None if inputs is None else TensorScheme(**inputs),
            "transforms": tuple(data["transforms"]),
        }
    )


def _write_weights(
    folder: Path,
    job: Job,
    source: Source,
    graph: Graph,
    layers: Sequence[Mapping[str, Any]],
    schemes: Mapping[str, LinearScheme],
) -> tuple[LedgerEntry, ...]:
    """Write the shards and return the ledger's entry for every source tensor."""
    changed = {name for record in layers for name in record["changed"]}
    encoder = FORMATS[job.format]
    entries = []
    for name, (_, info) in source.checkpoint.tensors.items():
        linear = name.removesuffix(".weight")
        becomes: tuple[str, ...] = (name,)
        action, reason = "copied", "not a linear of a decoder layer"
        if name.endswith(".weight") and linear in schemes:
            becomes, action, reason = encoder.tensor_names(linear, schemes[linear]), "quantized", schemes[linear].name
        elif linear in graph.linears:
            reason = "ignored by the recipe"
        elif name in changed:
            action, reason = "changed", "absorbed a smoothing"
        entries.append(
            LedgerEntry(
                name=name,
                dtype=info.dtype,
                shape=info.shape,
                nbytes=info.nbytes,
                action=action,  # type: ignore[arg-type]
                reason=reason,
                becomes=becomes,
            )
        )
    _write_shards(folder, _tensors(job, source, graph), parse_size(job.shard_size))
    return tuple(entries)


def _tensors(job: Job, source: Source, graph: Graph) -> Iterator[tuple[str, Tensor]]:
    """Yield the artifact's tensors: what lies outside the layers, then layer by layer."""
    prefixes = tuple(f"{layer.prefix}." for layer in graph.layers)
    for name in source.names:
        if not name.startswith(prefixes):
            yield name, source.read([name])[name]
    for layer in graph.layers:
        path = job.quantized / "layers" / f"{layer.index:05d}.safetensors"
        yield from sorted(safetensors.torch.load(path.read_bytes()).items())


def _write_shards(folder: Path, tensors: Iterator[tuple[str, Tensor]], limit: int) -> None:
    """Write tensors in their order into files of at most `limit` bytes (one tensor may exceed it), with an index."""
    shard: dict[str, Tensor] = {}
    size, total = 0, 0
    where: list[list[str]] = []

    def flush() -> None:
        path = folder / f"shard-{len(where)}"
        path.write_bytes(safetensors.torch.save(shard, metadata={"format": "pt"}))
        where.append(list(shard))

    for name, tensor in tensors:
        if shard and size + tensor.nbytes > limit:
            flush()
            shard, size = {}, 0
        shard[name] = tensor.contiguous()
        size += tensor.nbytes
        total += tensor.nbytes
    flush()
    names = [f"model-{i + 1:05d}-of-{len(where):05d}.safetensors" for i in range(len(where))]
    if len(names) == 1:
        names = ["model.safetensors"]
    for index, name in enumerate(names):
        (folder / f"shard-{index}").replace(folder / name)
    if len(names) > 1:
        weight_map = {tensor: name for name, held in zip(names, where, strict=True) for tensor in held}
        (folder / INDEX).write_bytes(readable_json({"metadata": {"total_size": total}, "weight_map": weight_map}))


def _model_files(source: Source) -> list[str]:
    """Return the files that make the source what it is: config, weights, index and what is copied."""
    checkpoint = source.checkpoint
    return [name for name in checkpoint.files if name in (CONFIG, INDEX, *checkpoint.shards) or _is_side_file(name, source)]


def _is_side_file(name: str, source: Source) -> bool:
    code = name.endswith(".py") and "auto_map" in source.checkpoint.config
    return code or SIDE_FILES.fullmatch(name) is not None


def _copy_side_files(folder: Path, source: Source) -> tuple[FileEntry, ...]:
    entries = []
    for name in source.checkpoint.files:
        path = source.checkpoint.folder / name
        action, reason = "dropped", "not part of what a runtime loads"
        if name == CONFIG:
            action, reason = "rewritten", "quantization_config added"
        elif name in source.checkpoint.shards or name == INDEX:
            action, reason = "rewritten", "weights, see tensors"
        elif _is_side_file(name, source):
            action, reason = "copied", "side file"
            shutil.copyfile(path, folder / name)
        entries.append(FileEntry(name=name, nbytes=path.stat().st_size, action=action, reason=reason))  # type: ignore[arg-type]
    return tuple(entries)


def _write_config(folder: Path, source: Source, graph: Graph, schemes: Mapping[str, LinearScheme]) -> None:
    """Write the source's config.json with the layout's quantization_config added and nothing else changed."""
    config = dict(source.checkpoint.config)
    untouched = [name for name in graph.linears if name not in schemes]
    head = [name.removesuffix(".weight") for name in source.names if name in ("lm_head.weight", "embed_out.weight")]
    config["quantization_config"] = FORMATS["compressed-tensors"].quantization_config(
        schemes, ignore=[*untouched, *(head or ["lm_head"])], model_type=graph.family.model_type
    )
    (folder / CONFIG).write_bytes(readable_json(config))


def _prove(folder: Path, quantized: Path) -> None:
    """Load the artifact in a fresh process and compare the canary, layer by layer.

    Raises:
        IntegrityError: a layer or the logits differ.
        InputError: the process failed otherwise.
    """
    command = [sys.executable, "-m", "stages._proof", str(folder.resolve()), str(quantized.resolve())]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode == 0:
        return
    lines = result.stderr.strip().splitlines() or ["no message"]
    try:
        message = json.loads(lines[-1])
    except json.JSONDecodeError as error:
        raise InputError(f"{folder}: the proof process ended with {result.returncode}: {lines[-1]}", "report this") from error
    raise IntegrityError(message["cause"], message["remedy"])
