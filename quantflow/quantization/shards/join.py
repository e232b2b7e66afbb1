"""What N cards quantized becomes one result, or G of a smaller world: unify for the shards of `quantize --ranks`.

The result is what `quantize` (or `quantize --ranks G`) writes from the same source, byte for byte. DONE.json lists one more:

    joined.json    per linear: how its parts were joined, of how many cards with how many channels together, and in how
                   many of these the card's scale was not the largest, so that they were rounded again from the source

File to file each unit of the source is read once more beside what the cards made of it: the figures of error are sums in
one order, values that need another scale are rounded from the original ones, and what is copied is copied from there.
Where the model ran, every card saw whole layers (quantflow/quantization/shards/slices.py): the parts are put together, and
nothing else is read.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quantflow.artifact import disk, stage_folder
from quantflow.artifact.canonical import canonical_json, digest_of, read_json
from quantflow.artifact.digests import NAME as HASHES
from quantflow.artifact.digests import Digests
from quantflow.artifact.safetensors_header import read_header
from quantflow.core.determinism import single_threaded, tools
from quantflow.distributed.launch import rank_folder
from quantflow.errors import InputError, QuantflowError, UsageError
from quantflow.measurements.placement import check_cover, joined, share
from quantflow.models import layer_store
from quantflow.models.graph import graph_for
from quantflow.models.identity import identify
from quantflow.models.reading import read_tensor
from quantflow.models.source import ModelFiles, open_files
from quantflow.planning.finished_plan import plan_from
from quantflow.planning.plan import Plan
from quantflow.planning.recipe import Resources
from quantflow.planning.resources import allow_quantize
from quantflow.planning.sizes import model_size
from quantflow.progress import Progress
from quantflow.quantization.file_to_file import quantize_files
from quantflow.quantization.shards.opened import COLUMNS, HOW, OpenedShard, Parts
from quantflow.quantization.shards.share import STAGE, CardShare, shard_folders
from quantflow.quantization.shards.slices import Part, Schemes, put_together

REPORT = "joined.json"


def join(
    shards: Sequence[OpenedShard],
    output: Path,
    *,
    groups: Sequence[Sequence[int]],
    model: Path | None,
    replace: bool,
    progress: Progress,
) -> Path:
    """Write one result per group, and return `output`; one that is up to date is left alone.

    Args:
        shards: as `open_shards` returns them.
        output: one group's result itself; of several, the folder of rank-GGG-of-GGG. It appears at once.
        groups: ranks, each in one of them.
        model: the source; None reads where quantize found it. Not read where the model ran.
        replace: redo a finished result that was made from other inputs, instead of refusing.
        progress: is told after each layer.

    Raises:
        UsageError: a group is not made of neighbouring ranks, or the groups differ in size.
        InputError: the source is not there or another one, or the shards were made by other library versions.
    """
    _check_groups(groups, world=len(shards))
    ran = read_json(shards[0].folder / "quantize.json")["proof"] == "canary"
    source = None if ran else _source(shards, model)
    targets = [_target(shards, rank=rank, world=len(groups)) for rank in range(len(groups))]
    inputs: dict[str, Any] = {**shards[0].made_from}
    stage = "quantize"
    if len(groups) > 1:
        inputs, stage = {"shards": [{**inputs, **target.inputs()} for target in targets]}, "unify"
    with stage_folder.locked(output), single_threaded(), torch.no_grad():
        if stage_folder.is_up_to_date(output, inputs):
            progress.say("unify: up to date")
            return output
        stage_folder.refuse_other_result(output, inputs, force=replace)
        with stage_folder.publish(output, stage=stage, inputs=inputs) as temporary:
            for target, group in zip(targets, groups, strict=True):
                folder = temporary if len(groups) == 1 else rank_folder(temporary, target.rank, target.world)
                _write(folder, [shards[rank] for rank in group], target, source=source, progress=progress)
    return output


def _write(
    folder: Path, shards: Sequence[OpenedShard], target: CardShare, *, source: ModelFiles | None, progress: Progress
) -> None:
    """Write what the shards of one group are together."""
    disk.make_folder(folder / "layers")
    summary, inputs = read_json(shards[0].folder / "quantize.json"), {**shards[0].made_from, **target.inputs()}
    plan = plan_from(summary)
    if source is None:
        linears = _put_together(folder, shards, target, plan=plan, key=digest_of(inputs), progress=progress)
    else:
        linears = _round_together(folder, shards, target, plan=plan, source=source, inputs=inputs, progress=progress)
    disk.write_atomic(folder / "quantize.json", canonical_json(summary))
    disk.write_atomic(folder / REPORT, canonical_json({"shards": [shard.share.rank for shard in shards], "linears": linears}))
    if target.world > 1:
        stage_folder.finish(folder, stage=STAGE, inputs=inputs)


def _round_together(
    folder: Path,
    shards: Sequence[OpenedShard],
    target: CardShare,
    *,
    plan: Plan,
    source: ModelFiles,
    inputs: Mapping[str, Any],
    progress: Progress,
) -> list[dict[str, Any]]:
    """Write the layers with what needs another scale rounded again from the source; return how each linear was joined."""
    graph, parts = graph_for(source.config), Parts(shards)
    infos = {name: target.info(info) for name, info in source.checkpoint.infos.items()}
    quantize_files(
        folder,
        plan,
        source=source,
        graph=graph,
        key=digest_of({key: value for key, value in inputs.items() if key != "model"}),
        digests=_digests(shards),
        allowance=allow_quantize(Resources(), model_size(infos, source.config, graph), plan, lengths=[], folder=folder),
        progress=progress,
        share=target,
        inputs=parts.inputs(plan),
        choose=parts,
    )
    return [parts.report[name] for name in graph.linears if name in parts.report]


def _put_together(
    folder: Path, shards: Sequence[OpenedShard], target: CardShare, *, plan: Plan, key: str, progress: Progress
) -> list[dict[str, Any]]:
    """Write the layers from the parts of all cards, and the canary that each of them ran; return how each linear was joined.

    Raises:
        InputError: the canary was another one on a card: it did not compute what the first did.
    """
    rows: list[dict[str, Any]] = []
    paths = sorted((shards[0].folder / "layers").glob("*.safetensors"))
    for path in progress.steps(paths, stage=f"unify {plan.name}", unit="layer"):
        records = [read_json(shard.folder / "layers" / path.with_suffix(".json").name) for shard in shards]
        for shard, other in zip(shards, records, strict=True):
            if other["canary"] != records[0]["canary"]:
                raise InputError(
                    f"{shard.folder / 'layers' / path.name}: its card computed {other['canary'][:16]} on the canary, the "
                    f"first one {records[0]['canary'][:16]}",
                    "quantize all shards with one command, on machines of one kind",
                )
        record, linears = records[0], list(records[0].pop("placements"))
        parts: list[Part] = [(shard.share, _tensors(shard.folder / "layers" / path.name)) for shard in shards]
        tensors, counts = put_together(parts, linears, plan.schemes)
        told: dict[str, Any] = {"key": digest_of([key, int(path.stem)])}
        if target.world > 1:
            told["placements"] = {name: dict(target.placements[name]) for name in linears}
        layer_store.write_layer(folder / "layers" / path.name, tensors, {**record, **told})
        rows += [_row(name, counts[name], shards[0].share, tensors, plan.schemes) for name in linears if plan.schemes[name]]
    for name in ("canary.safetensors", "canary.json"):
        disk.copy(shards[0].folder / name, folder / name)
    return rows


def _tensors(path: Path) -> dict[str, Tensor]:
    return {name: read_tensor(path, info) for name, info in read_header(path)[0].items()}


def _row(name: str, cards: int, share: CardShare, tensors: Mapping[str, Tensor], schemes: Schemes) -> dict[str, Any]:
    """Return what the report says about a linear."""
    how = HOW[share.placements[name]["axis"]] if cards > 1 else "one part"
    return dict(zip(COLUMNS, (name, how, cards, len(tensors[f"{name}.weight_scale"]), 0), strict=True))


def summary(folder: Path) -> dict[str, Any]:
    """Return what a finished folder of `join` says about how it was made, all groups together."""
    reports = [path / REPORT for path in (folder, *shard_folders(folder)) if (path / REPORT).is_file()]
    rows = [row for report in reports for row in read_json(report)["linears"]]
    return {"folder": str(folder), "joined": rows}


def _source(shards: Sequence[OpenedShard], model: Path | None) -> ModelFiles:
    """Open the checkpoint that the shards were made from.

    Raises:
        InputError: it is not there, it is another one, or this machine would round in another way.
    """
    folder = model or Path(read_json(shards[0].folder / "quantize.json")["source"]["folder"])
    try:
        source = open_files(folder)
    except QuantflowError as error:
        raise InputError(
            f"{error.cause}; rows that several cards hold parts of are rounded again from the source",
            "give the model that was quantized with --model",
        ) from error
    expected, found = shards[0].inputs["model"], identify(source.checkpoint, _digests(shards))
    if found != expected:
        raise InputError(
            f"{folder}: is model {found[:16]}, {shards[0].folder} was made from {expected[:16]}",
            "give the model that was quantized with --model",
        )
    other = stage_folder.difference(shards[0].inputs["tools"], tools())
    if other is not None:
        key, old, new = other
        raise InputError(
            f"{shards[0].folder}: was made with {key} {old}, here is {new}, which may round in another way",
            "unify where the shards were quantized, or quantize here",
        )
    return source


def _digests(shards: Sequence[OpenedShard]) -> Digests:
    """Return the hashes of the source's files, as far as quantize left them."""
    return Digests(also=[shards[0].folder.parent / HASHES, shards[0].folder / HASHES])


def _check_groups(groups: Sequence[Sequence[int]], *, world: int) -> None:
    size = world // len(groups)
    if [list(group) for group in groups] != [list(range(first, first + size)) for first in range(0, world, size)]:
        raise UsageError(
            f"unify: groups {[list(group) for group in groups]} of {world} shards",
            "a card of the smaller world holds what neighbours hold: give groups of one size, in order, such as 01 23",
        )


def _target(shards: Sequence[OpenedShard], *, rank: int, world: int) -> CardShare:
    """Return what one group's result holds: what that card of the smaller world would."""
    placements = {}
    for name in shards[0].share.placements:
        parts = [shard.share.placements[name] for shard in shards]
        check_cover(name, parts)
        placements[name] = share(name, joined(parts), cards=world, card=rank)
    return CardShare(rank=rank, world=world, placements=placements)
