"""Stage 3 for Gaudi's own files: one folder's ranks merged under the names of its toolkit.

    P_hooks_maxabs_<r>_<w>.npz, .json, _mod_list.json
        -> P_hooks_maxabs_<group>_<groups>..., of one group P_hooks_maxabs..., which vLLM's runtime
           calls P_hooks_maxabs_0_1...

unified.json beside them records the merged ranks, the rank that set each maximum, the maxima that
are bounds, and the ranks that look unlike the others. Files of scales are not merged: the toolkit,
or `quantflow export --format inc`, derives them from the merged maxima.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from quantflow.errors import InputError
from quantflow.files import disk, stage_folder
from quantflow.files.canonical import read_json, readable_json
from quantflow.formats.gaudi.file_names import FileName, find_triples
from quantflow.formats.gaudi.gaudi_nodes import are_vllms
from quantflow.formats.gaudi.row_parallel import is_row_parallel
from quantflow.formats.gaudi.triple import read_triple, write_triple
from quantflow.measuring.merging.gaudi_files import Merged, expand_triple, unify_triples
from quantflow.measuring.merging.one_statistic import BOUNDED
from quantflow.observers.amax import AMAX
from quantflow.observers.channel_amax import CHANNEL_AMAX
from quantflow.progress import Progress
from quantflow.quantizing.gaudi_measurement import digests

ACCOUNT = "unified.json"
_OF_THE_WHOLE = "the whole's, which bounds it"


def run(
    measurement: Path,
    output: Path,
    *,
    groups_of: Callable[[int], Sequence[Sequence[int]]],
    allow_missing: bool,
    expert_parallel: bool | None,
    expand: int | None,
    force: bool,
    progress: Progress,
) -> Path:
    """Merge the ranks, or expand one; the result is the folder, or the one there when up to date.

    Args:
        measurement: a folder with every rank's files, or folder/prefix.
        output: the folder of the merged files; they keep the prefix.
        groups_of: number of ranks -> their groups.
        allow_missing: go on without ranks that are missing, where every rank holds a copy of the
            model.
        expert_parallel: whether a rank holds some of the experts or a part of each; None where the
            files say it.
        expand: number of ranks to make of one instead of merging.
        force: redo a finished result that was made from other inputs, instead of refusing.
        progress: listener for each group.
    """
    # unify_triples names the rank of a file that is missing.
    files = find_triples(measurement, partial=True)
    name = next(iter(files.values())).name
    world = name.world or 1
    if expand is not None and world > 1:
        raise InputError(
            f"{measurement}: holds {world} ranks, one is expanded",
            "run `quantflow unify` on it first",
        )
    groups = groups_of(world)
    inputs = {
        "files": digests(files),
        "groups": groups,
        "allow_missing": allow_missing,
        **({} if expert_parallel is None else {"expert_parallel": expert_parallel}),
        **({} if expand is None else {"expand": expand}),
    }
    with stage_folder.locked(output):
        if stage_folder.is_up_to_date(output, inputs):
            progress.say("unify: up to date")
            return output
        stage_folder.refuse_other_result(output, inputs, force=force)
        triples = {rank: read_triple(files_of_rank) for rank, files_of_rank in files.items()}
        merged = (
            unify_triples(
                triples,
                groups,
                world=world,
                allow_missing=allow_missing,
                expert_parallel=expert_parallel,
            )
            if expand is None
            else expand_triple(triples[0], expand, expert_parallel=expert_parallel)
        )
        with stage_folder.publish(output, stage="unify", inputs=inputs) as temporary:
            for rank, one in enumerate(merged):
                numbered = len(merged) > 1 or are_vllms(one.triple.nodes)
                write_triple(
                    temporary,
                    _renamed(name, rank, world=len(merged) if numbered else None),
                    one.triple,
                )
            disk.write_file(temporary / ACCOUNT, readable_json(_account(merged, world=world)))
        for rank, one in enumerate(merged):
            _tell(progress, rank, one)
    return output


def holds_account(folder: Path) -> bool:
    """Whether a folder is one that `run` wrote."""
    return (folder / ACCOUNT).is_file()


def summary(folder: Path) -> dict[str, Any]:
    """The record of a finished folder of `run`, all groups together."""
    account = read_json(folder / ACCOUNT)
    problems: dict[str, list[Any]] = {"missing": [], "outliers": [], "bounds": [], "unseen": []}
    for group in account["groups"]:
        for key in ("missing", "outliers", "bounds"):
            problems[key] += group[key]
    return {
        "folder": str(folder),
        "mesh": {"world": len(account["groups"])},
        "merged": account["merged"],
        **problems,
    }


def _renamed(name: FileName, rank: int, *, world: int | None) -> FileName:
    """The name of a merged rank; without a world size, that of the toolkit's single process."""
    return FileName(
        prefix=name.prefix,
        observer=name.observer,
        rank=None if world is None else rank,
        world=world,
    )


def _account(merged: Sequence[Merged], *, world: int) -> dict[str, Any]:
    rules: Counter[tuple[str, str]] = Counter()
    groups = []
    for one in merged:
        bounds = set(one.account.bounds)
        for node, content in one.triple.nodes.items():
            for key, value in content.tensors.items():
                rule = (
                    BOUNDED
                    if f"{node}|{key}" in bounds
                    else _OF_THE_WHOLE
                    if one.expanded
                    else "maximum"
                    if len(one.ranks) > 1
                    else "kept"
                )
                rules[AMAX.name if value.numel() == 1 else CHANNEL_AMAX.name, rule] += 1
        account: Mapping[str, Any] = asdict(one.account)
        groups.append(
            {"ranks": list(one.ranks), "missing": list(one.missing), "parts": one.parts, **account}
        )
    rows = [
        {"statistic": statistic, "rule": rule, "count": count}
        for (statistic, rule), count in sorted(rules.items())
    ]
    return {"world": world, "merged": rows, "groups": groups}


def _tell(progress: Progress, rank: int, one: Merged) -> None:
    """Say what somebody should look at."""
    if one.account.outliers:
        outlier = one.account.outliers[0]
        progress.say(
            f"unify: {outlier.key}: rank {outlier.rank} saw {outlier.amax:.4g}, the median rank "
            f"{outlier.median:.4g} "
            f"({len(one.account.outliers)} such, see {ACCOUNT})"
        )
    linears = [name for name in one.triple.nodes if is_row_parallel(name)]
    reduced = [name for name in linears if len(one.triple.nodes[name].outputs) == 2]
    if one.expanded and rank == 0 and reduced:
        progress.say(
            f"unify: outputs of {len(reduced)} linears before the sum over cards are not known; "
            f"those after it stand in their place, such as {reduced[0]}"
        )
    if one.missing:
        progress.say(f"unify: rank {rank} is without ranks {', '.join(map(str, one.missing))}")
    if one.account.bounds:
        progress.say(
            f"unify: {len(one.account.bounds)} outputs were measured before the sum over cards "
            "and are bounded, such as "
            f"{one.account.bounds[0]}"
        )
