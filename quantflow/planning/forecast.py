"""The verb plan: needs and results of a run, from config.json, shard headers and recipe alone.

Reads    the model's headers and config.json; a probe reads the weights of one layer; no tokenizer,
         no text. Of a model on the hub nothing more is fetched, see quantflow/sources/headers.py
Writes   nothing
Fails    2 the recipe does not fit the model, 3 unusable model, 6 unsupported family, or a probe
         without the device

The numbers are those that the stages check before they begin (quantflow/planning/cost.py).
Calibration text is assumed to fill all its samples, which is the most that it can.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from quantflow import cpu_threads, process_memory
from quantflow.accelerators import is_gpu, kind_of
from quantflow.algorithms import REFIT, TUNE
from quantflow.core.determinism import products
from quantflow.core.device import HOST, open_device
from quantflow.core.dtypes import RUNNING
from quantflow.core.kv import kv_words
from quantflow.errors import QuantflowError, ResourceError, UnsupportedError, UsageError
from quantflow.files.canonical import canonical_json, readable_json
from quantflow.files.checkpoint import Checkpoint
from quantflow.files.side_files import side_files_of
from quantflow.models.graph import Graph, text_config
from quantflow.models.open import graph_for, notes_of, open_files
from quantflow.planning.artifact_config import artifact_config
from quantflow.planning.card_splits import SIZES, folded, obstacles
from quantflow.planning.cards import CARDS, known, speed_of, token_bytes
from quantflow.planning.cost import (
    MemoryNeed,
    need_export,
    need_files,
    need_layers,
    need_measure,
    need_synthetic,
    need_validate,
)
from quantflow.planning.device_memory import (
    DeviceMemoryNeed,
    measure_on_device,
    quantize_on_device,
    validate_on_device,
)
from quantflow.planning.durations import Speed
from quantflow.planning.file_size import weight_bytes, weight_of
from quantflow.planning.head import HeadPlan
from quantflow.planning.mtp import MtpPlan
from quantflow.planning.plan import Plan, kept_for_few_inputs, narrowed, resolve, text_dtype
from quantflow.planning.plan_job import PlanJob
from quantflow.planning.recipe import Recipe
from quantflow.planning.requirements import counts_in_measure, statistics_for
from quantflow.planning.resources import grant, memory_limit
from quantflow.planning.sizes import (
    ModelSize,
    elements_of,
    layer_bytes,
    model_size,
    mtp_file_bytes,
    outside_bytes,
    quantized_bytes,
    untied_bytes,
)
from quantflow.progress import Progress
from quantflow.sources.headers import described
from quantflow.sources.models import is_on_hub, model_folder
from quantflow.units import parse_size

CARD = 3000  # bytes of README.md
# bytes of the manifest about each source tensor, and about each linear's errors and decisions
PER_TENSOR = 420


def run(job: PlanJob, progress: Progress) -> dict[str, Any]:
    """The plan as plain data; `quantflow plan` makes tables of it."""
    model, revision = job.recipe.model, job.recipe.revision
    found: AbstractContextManager[Path]
    if job.probe:  # it reads weights
        found = nullcontext(model_folder(model, revision=revision, progress=progress))
    else:
        found = described(model, revision=revision, progress=progress)
    with found as folder:
        plan = _planned(replace(job, recipe=replace(job.recipe, model=str(folder))))
    if is_on_hub(model):
        plan["model"]["folder"] = model
    return plan


def _planned(job: PlanJob) -> dict[str, Any]:
    """The plan of a model in a folder."""
    recipe = job.recipe
    # memory is planned without the device
    device = open_device(recipe.compute.device) if job.probe else HOST
    source = open_files(recipe.model)
    checkpoint, config = source.checkpoint, source.config
    graph = graph_for(config)
    model = model_size(checkpoint.infos_with_unused, config, graph)
    shapes = {name: info.shape for name, info in checkpoint.infos.items()}
    unused = {name: one.info.shape for name, one in checkpoint.unused.items()}
    plans, refused = _resolved(job, graph, shapes, unused)
    planned = [plan.name for plan in plans]
    recipe = replace(recipe, quantize=tuple(e for e in recipe.quantize if e.name in planned))
    job = replace(job, recipe=recipe)
    lengths = _calibration_lengths(recipe, config)
    stats = (
        recipe.measure.stats
        if recipe.measure.stats is not None
        else statistics_for(recipe.quantize)
    )
    narrow = [plan.name for plan in plans if _text_dtype(recipe, plan) == torch.bfloat16]
    speed = None
    if job.probe:
        from quantflow.planning.probe import probe  # here: a plan without it need not wait for it

        dtype = RUNNING[recipe.compute.model_dtype]
        speed = probe(
            checkpoint,
            graph,
            plans,
            length=max(lengths),
            folder=job.folder,
            device=device,
            dtype=dtype,
            narrow=narrow,
        )
    on_cards = is_gpu(kind_of(recipe.compute.device)) and not job.probe
    cards = {
        name: speed_of(
            card,
            model,
            plans,
            dtype=RUNNING[recipe.compute.model_dtype],
            narrow=narrow,
        )
        for name, card in (CARDS if on_cards else {}).items()
    }
    stages = _stages(job, model, plans, lengths, stats, speed, cards)
    limit, why = memory_limit(recipe.resources, resident=process_memory.usage().resident)
    return {
        "model": {
            "folder": str(checkpoint.folder),
            "family": graph.family.model_type,
            "layers": len(graph.layers),
            "weights": sum(map(elements_of, model.infos.values())),
            "bytes": model.stored,
            "notes": notes_of(checkpoint, graph),
        },
        "limits": {"memory": limit, "memory_from": why, "cores": cpu_threads.usable_cores()},
        "calibration": {
            "samples": len(lengths),
            "sequence_length": max(lengths),
            "observers": list(stats),
        },
        "stages": stages,
        "left_out": [
            {"name": name, "cause": error.cause, "fix": error.remedy}
            for name, error in refused.items()
        ],
        "artifacts": [
            _artifact(checkpoint, graph, model, plan, recipe)
            | {"notes": _notes(plan, recipe, shapes)}
            | ({"token": _token(model, plan)} if on_cards else {})
            for plan in plans
        ],
        "total": {
            "peak_memory": max((stage["peak_memory"] for stage in stages), default=0),
            "disk": sum(stage["result"] for stage in stages)
            + max((stage["scratch"] for stage in stages), default=0),
            "seconds": sum(stage["seconds"] for stage in stages) if speed else None,
        },
    }


def _resolved(
    job: PlanJob,
    graph: Graph,
    shapes: Mapping[str, Sequence[int]],
    unused: Mapping[str, Sequence[int]],
) -> tuple[list[Plan], dict[str, QuantflowError]]:
    """The plans of the artifacts, and the refusals of those that are left out, by name.

    Raises:
        QuantflowError: an artifact is refused, and none is left out or none is left.
    """
    plans, refused = [], dict[str, QuantflowError]()
    for entry in job.recipe.quantize:
        try:
            plans.append(resolve(entry, graph, shapes, unused=unused, measured=job.measured))
        except (UsageError, UnsupportedError) as error:
            if not job.fitting:
                raise
            refused[entry.name] = error
    if refused and not plans:
        raise next(iter(refused.values()))
    return plans, refused


def _stages(
    job: PlanJob,
    model: ModelSize,
    plans: Sequence[Plan],
    lengths: Sequence[int],
    stats: Sequence[str],
    speed: Speed | None,
    cards: Mapping[str, Speed],
) -> list[dict[str, Any]]:
    """Needs of each stage of the run, in the order in which they run."""
    recipe = job.recipe
    stages = []

    def took(of: Callable[[Speed], float], plan: Plan | None = None) -> dict[str, Any]:
        seconds = {"seconds": None if speed is None else of(speed)}
        if not cards:
            return seconds
        there = {} if plan is not None and not known(plan) else cards
        return seconds | {"cards": {name: of(each) for name, each in there.items()}}

    dtype = RUNNING[job.recipe.compute.model_dtype]
    windows = [recipe.validate.sequence_length] * -(
        -recipe.validate.tokens // recipe.validate.sequence_length
    )
    if job.measured or any(plan.needs_measurement for plan in plans):
        share = lengths[: -(-len(lengths) // recipe.measure.ranks)]
        counts = counts_in_measure(recipe.quantize)
        own, written = recipe.calibration.synthetic, products(HOST)
        seconds = took(
            lambda each: (
                each.measure(model, share, stats, counts=counts)
                + (each.write_text(model, own * max(lengths), dtype=written) if own else 0)
            )
        )
        need = need_measure(model, lengths=share, stats=stats, counts=counts)
        if own:
            write = need_synthetic(model, length=max(lengths), dtype=written)
            need = replace(need, peaks=(*need.peaks, *write.peaks))
        there = measure_on_device(model, lengths=share, stats=stats, dtype=dtype)
        stages.append(
            _stage(
                "measure",
                None,
                need,
                job,
                seconds,
                there=there,
            )
        )
    for plan in plans:
        used = plan.text(lengths)
        need = (
            need_files(model, plan) if plan.file_to_file else need_layers(model, plan, lengths=used)
        )
        seconds = took(partial(_quantize, model=model, plan=plan, lengths=used), plan)
        there = quantize_on_device(model, plan, lengths=used, dtype=_text_dtype(recipe, plan))
        stages.append(_stage("quantize", plan.name, need, job, seconds, there=there))
        need = need_export(model, plan, shard_size=parse_size(recipe.export.shard_size))
        seconds = took(partial(_export, model=model, plan=plan))
        stages.append(_stage("export", plan.name, need, job, seconds))
        # `run` takes the shipped text where none is named
        if job.measured or recipe.validate.text is not None:
            need = need_validate(model, lengths=windows, models=3, head=plan.head)
            seconds = took(lambda each: each.validate(model, windows))
            there = validate_on_device(
                model, lengths=windows, models=3, dtype=dtype, head=plan.head
            )
            stages.append(_stage("validate", plan.name, need, job, seconds, there=there))
    return stages


def _text_dtype(recipe: Recipe, plan: Plan) -> torch.dtype:
    """The dtype in which the calibration text of an artifact runs."""
    entry = next(entry for entry in recipe.quantize if entry.name == plan.name)
    return RUNNING[text_dtype(recipe.compute, entry, plan)]


def _quantize(speed: Speed, model: ModelSize, plan: Plan, lengths: Sequence[int]) -> float:
    return speed.quantize(model, plan, lengths)


def _export(speed: Speed, model: ModelSize, plan: Plan) -> float:
    return speed.export(model, plan)


def _token(model: ModelSize, plan: Plan) -> dict[str, Any]:
    """Bytes that decoding a token reads on a GPU, and the most tokens a second of each card."""
    moved = token_bytes(model, plan)
    rates = {name: 1 / moved.least_seconds(card, positions=0) for name, card in CARDS.items()}
    return {"weights": moved.weights, "position": moved.position, "tokens_per_second": rates}


def _calibration_lengths(recipe: Recipe, config: Any) -> list[int]:
    longest = int(getattr(text_config(config), "max_position_embeddings", None) or 2048)
    return [recipe.calibration.sequence_length or min(recipe.calibration.usual_length, longest)] * (
        recipe.calibration.samples + recipe.calibration.synthetic
    )


def _stage(
    name: str,
    artifact: str | None,
    need: MemoryNeed,
    job: PlanJob,
    seconds: Mapping[str, Any],
    *,
    there: DeviceMemoryNeed | None = None,
) -> dict[str, Any]:
    """Needs of a stage; where it is refused, the least that it needs and the reason.

    Args:
        name: name of the stage.
        artifact: name of the artifact; None stands for all.
        need: memory of the host, and disk.
        job: job with the limits.
        seconds: duration, None where it is not known; and those by cards, where they are.
        there: memory of the device; None for a stage that runs no layers.
    """
    about = {
        "stage": name,
        "artifact": artifact,
        "result": need.result,
        "scratch": need.scratch,
        **seconds,
    }
    if job.recipe.compute.device != "cpu":
        about["device_memory"] = None if there is None else there.peak
        limit = job.recipe.resources.max_device_memory
        if there is not None and limit is not None and there.peak > parse_size(limit):
            refusal = (
                f"tensors of {name} take {there.peak} bytes on {job.recipe.compute.device}, "
                f"--max-device-memory is {limit}"
            )
            return about | {
                "peak_memory": need.peak(base=need.base, workers=1),
                "workers": 1,
                "refused": refusal,
            }
    try:
        allowed = grant(need, job.recipe.resources, folder=job.folder, base=need.base)
    except ResourceError as error:
        least = need.peak(base=need.base, workers=1)
        return about | {"peak_memory": least, "workers": 1, "refused": error.cause}
    return about | {"peak_memory": allowed.peak_bytes, "workers": allowed.workers, "refused": None}


def _notes(plan: Plan, recipe: Recipe, shapes: Mapping[str, Sequence[int]]) -> list[str]:
    """Sentences on linears that are quantized otherwise than the entry asks, or not at all."""
    entry = next(entry for entry in recipe.quantize if entry.name == plan.name)
    found = (narrowed(plan, entry, shapes), kept_for_few_inputs(plan, entry, shapes))
    return [note for note in found if note is not None]


def _artifact(
    checkpoint: Checkpoint, graph: Graph, model: ModelSize, plan: Plan, recipe: Recipe
) -> dict[str, Any]:
    """The artifact to come: bytes, bits per weight, coverage, schemes, and how it can be cut."""
    weights = bits = 0
    for linear, scheme in plan.quantized.items():
        info = weight_of(model.infos, plan, linear)
        weights += elements_of(info)
        bits += 8 * quantized_bytes(linear, scheme, info)
    covered = [
        model.infos[name]
        for linear in plan.quantized
        if (name := f"{linear}.weight") in model.infos
    ]
    return {
        "name": plan.name,
        "head": None if plan.head is None else plan.head.scheme.name,
        "mtp": None if plan.mtp is None else plan.mtp.scheme.name,
        "scheme": next(entry.scheme for entry in recipe.quantize if entry.name == plan.name),
        "chosen": next(entry.mixed for entry in recipe.quantize if entry.name == plan.name),
        "algorithm": plan.method,
        REFIT: plan.refit,
        TUNE: None if plan.tune is None else plan.tune.steps,
        "transforms": [transform for transform, _ in plan.transforms],
        "kv_cache": None if plan.kv_cache is None else kv_words(plan.kv_cache),
        "path": "file to file" if plan.file_to_file else "layer by layer",
        "output_bytes": output_bytes(
            checkpoint, graph, model, plan, shard_size=parse_size(recipe.export.shard_size)
        ),
        "tensor_bytes": outside_bytes(model, plan.head, plan.mtp, rotated=plan.rotation is not None)
        + sum(layer_bytes(model, plan.schemes, kv_cache=plan.kv_cache)),
        "bits_per_weight": bits / weights,
        "coverage": {
            "weights": sum(map(elements_of, covered)) / sum(map(elements_of, model.infos.values())),
            "bytes": sum(info.nbytes for info in covered) / model.stored,
        },
        "schemes": _scheme_table(graph, model, plan),
        "tensor_parallel": {
            str(size): folded(obstacles(model, graph, plan.schemes, size)) for size in SIZES
        },
    }


def output_bytes(
    checkpoint: Checkpoint, graph: Graph, model: ModelSize, plan: Plan, *, shard_size: int
) -> int:
    """Bytes of the artifact's folder: tensors and headers exactly, manifest and card nearly."""
    weights = weight_bytes(model.infos, graph, plan, kv_heads=model.kv_heads, shard_size=shard_size)
    schemes = plan.quantized
    config = len(
        readable_json(
            artifact_config(
                checkpoint.config,
                graph,
                plan,
                infos=checkpoint.infos,
                unused=checkpoint.unused,
                untied=plan.rotation is not None and model.tied,
            )
        )
    )
    copied = side_files_of(checkpoint).copied
    side = sum((checkpoint.folder / name).stat().st_size for name in copied)
    manifest = len(canonical_json(plan.as_json())) + PER_TENSOR * (len(model.infos) + len(schemes))
    return weights + config + side + manifest + CARD


def _scheme_table(graph: Graph, model: ModelSize, plan: Plan) -> list[dict[str, Any]]:
    """Rows of tensors and their schemes.

    Equal linears of several layers or experts share a row, and so do the tensors outside.
    """
    rows: dict[tuple[Any, ...], list[tuple[int, int]]] = {}
    for layer in graph.layers:
        experts = {
            name: group.expert for group in layer.groups if group.expert for name in group.linears
        }
        for linear in (*layer.linears, *layer.routers):
            info = model.infos[f"{linear}.weight"]
            scheme = plan.schemes.get(linear)
            after = info.nbytes if scheme is None else quantized_bytes(linear, scheme, info)
            spelled = "copied" if scheme is None else _words(scheme)
            place, number = _place(layer.inside(linear), layer.inside(experts.get(linear, "")))
            key = (
                place,
                info.shape,
                "copied, a router" if linear in layer.routers else spelled,
                info.nbytes,
                after,
            )
            rows.setdefault(key, []).append((layer.index, number))
    table = [
        {
            "tensors": f"{graph.family.layers}.{_spans(layer for layer, _ in where)}."
            + place.replace("*", _spans(number for _, number in where)),
            "count": len(where),
            "shape": list(shape),
            "scheme": spelled,
            "bytes_before": len(where) * before,
            "bytes_after": len(where) * after,
        }
        for (place, shape, spelled, before, after), where in rows.items()
    ]
    linears = {f"{name}.weight" for name in (*graph.linears, *graph.routers)}
    if plan.head is not None:
        table.append(_head_row(model, plan.head))
        linears.add(f"{plan.head.linear}.weight")
    if plan.mtp is not None:
        table.append(_mtp_row(model, plan.mtp))
        linears |= {f"{name}.weight" for name in plan.mtp.schemes}
    past = tuple(f"{layer.prefix}." for layer in graph.layers if layer.skipped)
    rest = [
        info
        for name, info in model.infos.items()
        if name not in linears and not name.startswith(past)
    ]
    copied = {
        "layers that text goes past": [
            info for name, info in model.infos.items() if name.startswith(past)
        ],
        "embeddings, heads": [info for info in rest if len(info.shape) > 1],
        "norms, biases": [info for info in rest if len(info.shape) <= 1],
    }
    for name, chosen in copied.items():
        if not chosen and name.startswith("layers"):
            continue
        size = sum(info.nbytes for info in chosen)
        about = {"tensors": name, "count": len(chosen), "shape": None, "scheme": "copied"}
        after = size
        if name.startswith("embeddings"):
            after += untied_bytes(model, plan.head, rotated=plan.rotation is not None)
        table.append({**about, "bytes_before": size, "bytes_after": after})
    return table


def _head_row(model: ModelSize, head: HeadPlan) -> dict[str, Any]:
    """The row of the head; a tied head has no bytes of its own before."""
    info = model.infos[head.tensor]
    return {
        "tensors": f"{head.linear}, tied before" if head.tied else head.linear,
        "count": 1,
        "shape": list(info.shape),
        "scheme": _words(head.scheme),
        "bytes_before": 0 if head.tied else info.nbytes,
        "bytes_after": quantized_bytes(head.linear, head.scheme, info),
    }


def _mtp_row(model: ModelSize, mtp: MtpPlan) -> dict[str, Any]:
    """The row of the quantized linears of layers that predict further tokens."""
    infos = [model.infos[f"{name}.weight"] for name in mtp.schemes]
    return {
        "tensors": "linears of layers that predict further tokens (MTP)",
        "count": len(infos),
        "shape": None,
        "scheme": _words(mtp.scheme),
        "bytes_before": sum(info.nbytes for info in infos),
        "bytes_after": mtp_file_bytes(model, mtp),
    }


def _place(linear: str, expert: str) -> tuple[str, int]:
    """A linear's name in its layer with `*` for its expert's number; the number, or 0."""
    if not expert:
        return linear, 0
    experts, _, number = expert.rpartition(".")
    return f"{experts}.*.{linear.removeprefix(f'{expert}.')}", int(number)


def _spans(indices: Iterable[int]) -> str:
    return spans(sorted(set(indices)))


def _words(scheme: Any) -> str:
    """A scheme in one cell: `W4A16 int4 per_group 128`."""
    weights = scheme.weights
    parts = [scheme.name, f"{weights.kind}{weights.num_bits}", weights.granularity]
    parts += [str(weights.group_size)] if weights.group_size else []
    return " ".join(parts + ([] if weights.symmetric else ["asymmetric"]))


def spans(indices: Sequence[int]) -> str:
    """Ascending indices in short: 0, 1, 2, 5 is `{0-2,5}`, and 3 alone is `3`."""
    parts: list[list[int]] = []
    for index in indices:
        if parts and parts[-1][1] == index - 1:
            parts[-1][1] = index
        else:
            parts.append([index, index])
    ranges = [str(first) if first == last else f"{first}-{last}" for first, last in parts]
    return ranges[0] if len(indices) == 1 else "{" + ",".join(ranges) + "}"
