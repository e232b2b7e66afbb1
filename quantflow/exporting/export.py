"""Stage 4, export: write the artifact, prove it in a fresh process, and only then publish it.

Reads    a finished quantize folder and the model it was made from
Writes   <o>: config.json, weights, side files, quantflow.json, README.md; the whole folder appears
         at once
Resumes  an artifact whose manifest names the same inputs is left alone; an unfinished one starts
         again
Fails    3 unfinished, foreign or ununified input, 5 the folder is held or the disk is full,
         7 the proof or a hash disagrees
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypedDict

from quantflow import process_memory
from quantflow.core.determinism import tools
from quantflow.errors import InputError, IntegrityError, QuantflowError, UsageError, nearest
from quantflow.exporting.job import ExportJob
from quantflow.exporting.ledger_entries import tensor_entries
from quantflow.exporting.model_card import model_card
from quantflow.exporting.proof import Prover, proving
from quantflow.exporting.weight_files import Stored, linked, shards_for, write_shards
from quantflow.files import disk, schema, stage_folder
from quantflow.files.canonical import digest_of, file_digest, read_json, readable_json
from quantflow.files.checkpoint import CONFIG
from quantflow.files.digests import NAME as HASHES
from quantflow.files.digests import Digests
from quantflow.files.ledger import FileEntry, Ledger
from quantflow.files.manifest import (
    MANIFEST_NAME,
    build_manifest,
    read_manifest,
    with_note,
    write_manifest,
)
from quantflow.files.safetensors_header import read_header
from quantflow.files.side_file_kinds import SideFiles
from quantflow.files.side_files import side_files_of
from quantflow.files.verify import verify
from quantflow.formats import FORMATS
from quantflow.models import layer_store
from quantflow.models.graph import Graph
from quantflow.models.open import ModelFiles, graph_for, open_files
from quantflow.models.source import fingerprint
from quantflow.planning.artifact_config import artifact_config
from quantflow.planning.finished_plan import SUMMARY, float8_of, plan_from, read_summary
from quantflow.planning.head import FILE
from quantflow.planning.kv_cache import kv_names
from quantflow.planning.mtp import FILE as MTP_FILE
from quantflow.planning.plan import OUTSIDE
from quantflow.planning.resources import Allowance, allow_export, compare
from quantflow.planning.sizes import model_size
from quantflow.progress import Progress
from quantflow.quantizing import head_file
from quantflow.quantizing.shards.share import refuse_shards
from quantflow.units import parse_size

# of a layer's record, in the manifest
LAYER_KEYS = ("errors", "decisions", "changed", "experts", "kv_cache")


def check(job: ExportJob) -> None:
    """Refuse mistakes that show before there is anything to export.

    Raises:
        UsageError: an unknown format, or a folder that is the quantized one.
    """
    if job.options.format not in FORMATS:
        raise UsageError(
            f"format {job.options.format!r} of a quantized model is unknown",
            nearest(job.options.format, list(FORMATS)),
        )
    if job.output.resolve() == job.source.resolve():
        raise UsageError(
            f"{job.output}: the artifact's folder and the quantized one", "give two folders"
        )


def run(job: ExportJob, progress: Progress, *, prover: Prover | None = None) -> Path:
    """Export the artifact, prove it, and return its folder.

    The proof runs in a process that `proving` started, or that starts here.
    """
    check(job)
    refuse_shards(job.source)
    record = stage_folder.require_done(job.source, stage="quantize", unread="layers/*.safetensors")
    _require_recorded(record["files"], job.source)
    summary = read_summary(job.source)
    asked = [
        job.options.format,
        parse_size(job.options.shard_size),
        *(["measure_inputs"] if job.options.measure_inputs else []),
    ]
    made_from = digest_of([record["inputs"], *asked])
    with stage_folder.locked(job.output):
        if _is_up_to_date(job.output, made_from):
            progress.say(f"export {job.output.name}: up to date")
            return job.output
        _refuse_other_result(job, made_from)
        named = summary["recipe"].get("linears", ())
        source = open_files(job.model or Path(summary["source"]["folder"]), linears=named)
        digests = Digests(also=[job.source / HASHES])
        expected, actual = _model_of(record, job.source), fingerprint(source.checkpoint, digests)
        if actual != expected:
            raise InputError(
                f"{source.checkpoint.folder}: is model {actual[:16]}, {job.source} was made "
                f"from {expected[:16]}",
                "give the model that was quantized with --model, or quantize this one",
            )
        _require_linears(summary, source, job.source)
        allowance = _allowance(job, source, summary)
        process_memory.reset_peak()
        fresh = proving() if prover is None else nullcontext(prover)
        with fresh as proof, stage_folder.publish(job.output, stage=None, inputs={}) as folder:
            proof.expect(summary["proof"])
            beside = side_files_of(source.checkpoint)
            if left := str(beside):
                progress.say(f"export {job.output.name}: left behind: {left}")
            links, not_finite = _write(
                job, folder, source, summary, record, made_from, digests, beside
            )
            if not_finite:
                more = f" and {len(not_finite) - 1} more" if not_finite[1:] else ""
                progress.say(
                    f"export {job.output.name}: {not_finite[0]}{more}, which the model does not "
                    "read: NaN or Inf, copied as they are"
                )
            progress.say(f"export {job.output.name}: proving it in a fresh process")
            places = (folder, job.source, source.checkpoint.folder)
            notes = _prove(
                partial(
                    proof.prove,
                    *places,
                    workers=allowance.workers,
                    measures=job.options.measure_inputs,
                ),
                links,
            )
            if reason := notes.get("lean_decoder"):
                progress.say(
                    f"export {job.output.name}: the lean decoder will not run it: {reason}"
                )
            for key, note in notes.items():
                write_manifest(folder, with_note(read_manifest(folder), key, note))
        used = process_memory.largest_peak()
        progress.note(compare(f"export {job.output.name}", planned=allowance.peak_bytes, used=used))
    return job.output


class _Inputs(TypedDict):
    model: str


def _model_of(record: Mapping[str, Any], quantized: Path) -> str:
    """The fingerprint of the model that a folder was quantized from.

    Raises:
        InputError: DONE.json does not have it.
    """
    where, remedy = f"{quantized / stage_folder.DONE}: inputs", "quantize the model again"
    schema.check(record["inputs"], _Inputs, where=where, remedy=remedy)
    return str(record["inputs"]["model"])


def _require_recorded(files: Mapping[str, Any], quantized: Path) -> None:
    """Refuse a folder with files of layers that DONE.json does not record.

    Raises:
        InputError: naming the first.
    """
    paths = [
        quantized / SUMMARY,
        *(quantized / "layers").glob("*.json"),
        *(quantized / "layers").glob("*.safetensors"),
    ]
    missing = sorted({path.relative_to(quantized).as_posix() for path in paths} - files.keys())
    if missing:
        raise InputError(
            f"{quantized / stage_folder.DONE}: files: has no {missing[0]}",
            "quantize the model again",
        )


def _require_linears(summary: Mapping[str, Any], source: ModelFiles, quantized: Path) -> None:
    """Refuse a plan that says nothing of a linear of the model.

    Raises:
        InputError: naming the first.
    """
    missing = [
        name for name in graph_for(source.config).linears if name not in summary["plan"]["schemes"]
    ]
    if missing:
        cause = f"{quantized / SUMMARY}: plan.schemes: nothing of {missing[0]}, which the model has"
        raise InputError(cause, "quantize the model again")


def _allowance(job: ExportJob, source: ModelFiles, summary: Mapping[str, Any]) -> Allowance:
    size = model_size(source.checkpoint.infos_with_unused, source.config, graph_for(source.config))
    return allow_export(
        job.resources,
        size,
        plan_from(summary),
        shard_size=parse_size(job.options.shard_size),
        folder=job.output,
    )


def _is_up_to_date(folder: Path, made_from: str) -> bool:
    if not (folder / MANIFEST_NAME).is_file():
        return False
    try:
        verify(folder)
    except QuantflowError:  # a damaged artifact is written again
        return False
    return bool(read_manifest(folder)["made_from"] == made_from)


def _refuse_other_result(job: ExportJob, made_from: str) -> None:
    """Refuse to replace a folder that is no artifact, or an artifact of other inputs.

    `force` allows the second.
    """
    if not job.output.exists() or not any(job.output.iterdir()):
        return
    if not (job.output / MANIFEST_NAME).is_file():
        raise UsageError(
            f"{job.output}: holds files and no {MANIFEST_NAME}",
            "choose another -o, or an empty folder",
        )
    try:
        other = read_manifest(job.output)["made_from"] != made_from
        cause = "was made from other inputs"
    except QuantflowError:
        other, cause = True, f"has a damaged {MANIFEST_NAME}"
    if other and not job.force:
        raise UsageError(
            f"{job.output}: {cause}", "choose another -o, or pass --force to replace it"
        )


def _write(
    job: ExportJob,
    folder: Path,
    source: ModelFiles,
    summary: Mapping[str, Any],
    record: Mapping[str, Any],
    made_from: str,
    digests: Digests,
    beside: SideFiles,
) -> tuple[Mapping[str, Path], list[str]]:
    """Write the artifact.

    Returns:
        Its files that are links, with the quantized files behind them; unused tensors with NaN or
        Inf.
    """
    graph, plan = graph_for(source.config), plan_from(summary)
    layers = layer_store.records(job.source)
    schemes, head = plan.quantized, head_file.record_of(job.source)
    mtp = head_file.mtp_record_of(job.source)
    links, not_finite = _write_weights(folder, job, source, graph, record["files"])
    files = _copy_side_files(folder, source, beside)
    checkpoint = source.checkpoint
    rotated = set(_outside(job.source))
    config = artifact_config(
        checkpoint.config,
        graph,
        plan,
        infos=checkpoint.infos,
        unused=checkpoint.unused,
        untied=not rotated <= set(checkpoint.infos),
    )
    disk.write_file(folder / CONFIG, readable_json(config))
    changed = {name for layer in layers for name in layer["changed"]} | rotated
    entries = tensor_entries(
        source, graph, schemes, changed, FORMATS[job.options.format], head=plan.head
    )
    ledger = Ledger(tensors=entries, files=files, measured=kv_names(graph, plan.kv_cache))
    sizes = {
        name: (source.checkpoint.folder / name).stat().st_size for name in source.checkpoint.files
    }
    stored = {name: info for name, (_, info) in source.checkpoint.located.items()}
    ledger.check(stored, source_files=sizes)
    body = {
        "kind": "artifact",
        "source": {
            "name": summary["source"]["name"],
            "revision": summary["source"]["revision"],
            **({"stored_names": renamed} if (renamed := checkpoint.stored_names) else {}),
            "files": {
                name: digests.of(source.checkpoint.folder / name)
                for name in _model_files(source, beside)
            },
        },
        "recipe": {**summary["recipe"], "resolved": summary["plan"], "format": job.options.format},
        "measurement": summary["measurement"],
        "float8": float8_of(plan),
        "ledger": ledger.to_json(),
        "layers": [{key: layer[key] for key in LAYER_KEYS if key in layer} for layer in layers],
        **(
            {
                "head": {
                    "linear": plan.head.linear,
                    "errors": head["errors"],
                    "decisions": head["decisions"],
                }
            }
            if plan.head
            else {}
        ),
        **({"mtp": {key: mtp[key] for key in ("errors", "decisions")}} if mtp else {}),
        "proof": _proof_of(job, summary, layers, [part for part in (head, mtp) if part]),
        "tools": {**tools(), "quantflow_layout": FORMATS[job.options.format].LAYOUT_VERSION},
        "made_from": made_from,
    }
    # The proof reads every file and compares it with these hashes, so what is hashed already is not
    # hashed here again.
    hashes = {
        name: record["files"][f"layers/{path.name}"]["sha256"] for name, path in links.items()
    }
    manifest = build_manifest(folder, body=body, hashes=hashes)
    disk.write_file(
        folder / "README.md", model_card(manifest, config["quantization_config"]).encode()
    )
    write_manifest(folder, manifest)
    return links, not_finite


def _proof_of(
    job: ExportJob,
    summary: Mapping[str, Any],
    layers: Sequence[Mapping[str, Any]],
    others: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    """The manifest's record of the proof, which is given before the artifact is published."""
    if summary["proof"] == "tensors":
        values = [part["values"] for part in (*layers, *others)]
        return {"kind": "tensors", "layers": len(layers), "digest": digest_of(values)}
    canary = read_json(job.source / "canary.json")
    made_on = {word: value for word, value in summary.get("device", {}).items() if word != "name"}
    device = {"device": made_on} if made_on else {}
    return {
        "kind": "canary",
        "layers": len(canary["layers"]),
        "digest": digest_of(canary),
        **device,
    }


def _write_weights(
    folder: Path,
    job: ExportJob,
    source: ModelFiles,
    graph: Graph,
    recorded: Mapping[str, Mapping[str, Any]],
) -> tuple[Mapping[str, Path], list[str]]:
    """Write the shards.

    Returns:
        Those that are links, with their targets; unused tensors with NaN or Inf.

    Raises:
        IntegrityError: a layer's file differs from its recorded hash.
    """
    prefixes = tuple(f"{layer.prefix}." for layer in graph.layers)
    changed = _outside(job.source)
    replaced = {f"{linear}.weight" for linear in head_file.record_of(job.source).get("errors", ())}
    outside = [
        changed.get(name) or Stored(path=source.checkpoint.folder / file, info=info)
        for name, (file, info) in source.checkpoint.tensors.items()
        if not name.startswith(prefixes) and name not in replaced
    ]
    outside += [
        stored
        for name, stored in changed.items()
        if name not in source.checkpoint.tensors and name not in replaced
    ]
    outside += _stored(job.source / FILE) if replaced else []
    ahead = head_file.mtp_record_of(job.source).get("errors", ())
    outside += [
        Stored(path=source.checkpoint.folder / one.file, info=one.info, read=False)
        for name, one in source.checkpoint.unused.items()
        if name.removesuffix(".weight") not in ahead
    ]
    outside += _stored(job.source / MTP_FILE) if ahead else []
    paths = [job.source / "layers" / f"{layer.index:05d}.safetensors" for layer in graph.layers]
    layers = [_stored(path) for path in paths]
    shards = shards_for(outside, layers, limit=parse_size(job.options.shard_size))
    links = linked(shards)
    for path in paths:
        if (
            path not in links.values()
            and file_digest(path) != recorded[f"layers/{path.name}"]["sha256"]
        ):
            raise _damaged(path)
    return links, write_shards(folder, shards)


def _outside(quantized: Path) -> dict[str, Stored]:
    """The tensors outside the layers that quantize changed, and a head that it untied."""
    path = quantized / OUTSIDE
    return {stored.info.name: stored for stored in _stored(path)} if path.is_file() else {}


def _stored(path: Path) -> list[Stored]:
    return [Stored(path=path, info=info) for info in read_header(path)[0].values()]


def _damaged(path: Path) -> IntegrityError:
    return IntegrityError(
        f"{path}: differs from the hash in {stage_folder.DONE}", "run `quantflow quantize` again"
    )


def _model_files(source: ModelFiles, beside: SideFiles) -> list[str]:
    """The files that make the source what it is: config, weights, index and copied files."""
    checkpoint = source.checkpoint
    made_of = {CONFIG, checkpoint.index, *checkpoint.shards, *beside.copied}
    return [name for name in checkpoint.files if name in made_of]


def _copy_side_files(folder: Path, source: ModelFiles, beside: SideFiles) -> tuple[FileEntry, ...]:
    entries, checkpoint = [], source.checkpoint
    for name in checkpoint.files:
        path = checkpoint.folder / name
        action: Literal["copied", "rewritten", "dropped"] = "copied"
        reason = "side file"
        if name == CONFIG:
            change = "replaced, the source's was left over" if checkpoint.left_over else "added"
            action, reason = "rewritten", f"quantization_config {change}"
        elif name in (*checkpoint.shards, checkpoint.index):
            action, reason = "rewritten", "weights, see tensors"
        elif name in beside.left:
            action, reason = "dropped", beside.left[name]
        else:
            disk.make_folder((folder / name).parent)
            disk.copy(path, folder / name)
        size = path.stat().st_size
        entries.append(FileEntry(name=name, nbytes=size, action=action, reason=reason))
    return tuple(entries)


def _prove(prove: Callable[[], dict[str, Any]], links: Mapping[str, Path]) -> dict[str, Any]:
    """Prove the artifact; a linked file that is damaged is named as quantize wrote it.

    Returns:
        The optional keys of the manifest.

    Raises:
        IntegrityError: a file, a tensor, a layer or the logits differ.
        QuantflowError: of another kind, as the process met it.
    """
    try:
        return prove()
    except IntegrityError as error:
        for name, path in links.items():
            if error.cause.startswith(f"{name}: "):
                raise _damaged(path) from error
        raise
