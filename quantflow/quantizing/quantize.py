"""Stage 2, quantize: choose qvalues and scales, one decoder layer at a time.

Reads    the model folder; a measurement, when the scheme, transforms or algorithm need statistics:
         of one rank, or of as many ranks as quantize, or Gaudi's files where maxima suffice; or
         llama.cpp's importance matrix in its place
Writes   <o>/layers/<index>.safetensors and .json, quantize.json, DONE.json;
         canary.safetensors and .json, unless file to file;
         head.safetensors and .json, where the head is quantized; mtp.safetensors and .json,
         where layers that predict further tokens are;
         recipe.yaml, choice.json, pareto.svg, where schemes are chosen
Resumes  at the layer where it stopped: finished layers and the hidden states that enter the next
         one are read back; at the step, where scales are tuned afterwards
         (quantflow/quantizing/tuning.py)
Fails    2 the recipe does not fit the model, 3 unusable or ineffective inputs,
         5 memory, disk or a held folder, 6 unsupported

Where no forward pass is needed, weights go from file to file
(quantflow/quantizing/file_to_file.py). Otherwise the canary, which is the calibration text's first
tokens, runs layer by layer, and with it all of the text where something reads it; one layer is in
memory (quantflow/quantizing/layer.py). Both ways work on a device too: layers, or rows of weights,
cross to it, and the results come back.

With N ranks N processes are started, each of which writes its slice of every linear into
<o>/rank-RRR-of-NNN/ (quantflow/quantizing/shards/share.py); unify makes one result of these shards.
File to file a rank reads no more than its slice. Where the model runs, every rank holds the whole
layer; the ranks share its work and exchange the results (quantflow/distributed/team.py).
"""

import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from quantflow import process_memory
from quantflow.accelerators import kind_of
from quantflow.core.determinism import single_threaded, tools
from quantflow.core.device import Device, open_device
from quantflow.core.dtypes import RUNNING
from quantflow.core.parallel import SEQUENTIAL, Workers
from quantflow.distributed.launch import (
    die_with_parent,
    launch,
    launched_folder,
    launched_rank,
    own_device,
    require_trust,
)
from quantflow.distributed.team import ALONE, Team, together
from quantflow.errors import UsageError
from quantflow.files import disk, stage_folder
from quantflow.files.canonical import canonical_json, digest_of, file_digest, read_json
from quantflow.files.digests import NAME as HASHES
from quantflow.files.digests import Digests
from quantflow.files.origin import origin_of
from quantflow.files.outputs import output_folder
from quantflow.files.rank_folders import rank_folder
from quantflow.measuring.record import Measurement
from quantflow.models import layer_store
from quantflow.models.identity import CANARY_TOKENS, identify, tensor_hash
from quantflow.models.open import ModelFiles, notes_of, refuse_not_finite
from quantflow.planning import head, mtp
from quantflow.planning.cost import hidden_bytes
from quantflow.planning.device_memory import (
    allow_on_device,
    keeps_hidden_states,
    quantize_on_device,
)
from quantflow.planning.plan import (
    OUTSIDE,
    Plan,
    float32_only,
    kept_for_few_inputs,
    left_out,
    narrowed,
    resolve,
    text_dtype,
)
from quantflow.planning.recipe import CHOICE, Quantize
from quantflow.planning.resources import Allowance, account, allow_quantize
from quantflow.planning.sizes import FLOAT, model_size
from quantflow.progress import Progress
from quantflow.quantizing import head_file
from quantflow.quantizing.file_to_file import quantize_files
from quantflow.quantizing.job import QuantizeJob
from quantflow.quantizing.measurement_input import known_hashes, measurement_of, refuse_foreign
from quantflow.quantizing.mixed_precision import choose, chosen_mixture
from quantflow.quantizing.mixed_precision.chosen_mixture import ChosenMixture
from quantflow.quantizing.planned_model import PlannedModel, planned
from quantflow.quantizing.shards.share import STAGE, WHOLE, CardShare
from quantflow.quantizing.static_inputs import inputs_of
from quantflow.quantizing.undercalibrated import (
    Short,
    check_before,
    described,
    short_in_records,
)
from quantflow.sources.models import model_folder
from quantflow.units import duration

if TYPE_CHECKING:
    from quantflow.models.load import Source

VERSION = 3  # of what this stage computes; part of every state key
# settings that older results do not name: named where they are given
LATER = (
    "refit",
    "linears",
    "scale_method",
    "scale_arithmetic",
    "bits_of",
    "mtp",
    "imatrix",
    "target_size",
)
PARTS = (
    "layers",
    OUTSIDE,
    head.FILE,
    head.RECORD,
    mtp.FILE,
    mtp.RECORD,
    "canary.safetensors",
    "canary.json",
    "quantize.json",
    *choose.PARTS,
)


def run(job: QuantizeJob, progress: Progress, *, opened: PlannedModel | None = None) -> Path:
    """Quantize the model; the result is the finished folder. Whatever is up to date is left alone.

    Args:
        job: the artifact's job.
        progress: listener for every layer.
        opened: the model and its plan, where the caller needed them already.
    """
    _check_compute(job)
    model = planned(job) if opened is None else opened
    if job.entry.imatrix is not None:
        # imported here: file to file starts without transformers' configurations
        from quantflow.quantizing.importance import refuse_unread

        refuse_unread(model.plan, imatrix=job.entry.imatrix, measured=job.measurement is not None)
    _say_what_stays(job, model, progress)
    plan = model.plan
    if job.entry.mixed:
        return _choose_and_quantize(job, model, progress)
    if job.ranks == 1:
        return _quantize(job, model, progress)
    # imported here: one process alone starts without transformers' configurations
    from quantflow.quantizing.shards.cutting import shares_of

    shares = shares_of(model.source, model.graph, plan, ranks=job.ranks)
    folders = [rank_folder(job.output, share.rank, share.world) for share in shares]
    launched = launched_rank()
    if launched is None:
        _launch(job, model, dict(zip(folders, shares, strict=True)), progress)
        return job.output
    if launched[1] != job.ranks:
        raise UsageError(
            f"quantize: --ranks {job.ranks}, torchrun started {launched[1]}", "give the same number"
        )
    if not plan.file_to_file:  # file to file no rank meets another
        require_trust("quantize", trusted=job.trust_network)
    die_with_parent()
    rank = launched[0]
    mine = replace(job, output=folders[launched[0]])
    quiet = progress.hushed() if rank else progress
    device = _device(job)
    with (
        nullcontext(ALONE)
        if plan.file_to_file
        else together(rank=rank, world=job.ranks, device=device) as team
    ):
        if not team.direct:
            quiet.say(
                f"quantize {job.entry.name}: torch has no backend for {device.name}, ranks "
                "exchange through host memory"
            )
        _quantize(mine, model, quiet, share=shares[rank], team=team)
    return job.output


def open_model(job: QuantizeJob, progress: Progress) -> PlannedModel:
    """The model of a job, by any of its names, opened, and its plan."""
    return planned(settled(job, progress))


def settled(job: QuantizeJob, progress: Progress) -> QuantizeJob:
    """The job with the folder of its model; settling a settled job changes nothing.

    Raises:
        QuantflowError: there is no such model; the output lies in what is read.
    """
    reads = {"the model": job.model, "the measurement": job.measurement}
    return replace(
        job,
        model=model_folder(job.model, revision=job.revision, progress=progress),
        output=output_folder(job.output, reads=reads),
    )


def _say_what_stays(job: QuantizeJob, model: PlannedModel, progress: Progress) -> None:
    """Say, once among all ranks, where the plan differs from what the entry seems to ask."""
    if launched_folder() is not None:
        return
    plan = model.plan
    shapes = model.shapes
    nbytes = {name: info.nbytes for name, info in model.source.checkpoint.infos.items()}
    left = None if job.entry.linears else left_out(plan.name, model.graph, shapes, nbytes)
    notes = (narrowed(plan, job.entry, shapes), kept_for_few_inputs(plan, job.entry, shapes), left)
    for note in notes_of(model.source.checkpoint, model.graph):
        progress.say(f"quantize {plan.name}: {note}")
    for note in filter(None, notes):
        progress.say(f"quantize {note}")
    why = float32_only(job.entry, plan)
    if why is not None and job.compute.dtype == "bfloat16" and not plan.file_to_file:
        progress.say(f"quantize {plan.name}: layers run in float32, not bfloat16: {why}")


def _text_dtype(job: QuantizeJob, plan: Plan) -> torch.dtype:
    """The dtype in which the calibration text runs through the layers."""
    return RUNNING[text_dtype(job.compute, job.entry, plan)]


def _device(job: QuantizeJob) -> Device:
    """The device of this process, one of several where there are several ranks."""
    return open_device(own_device(job.compute.device))


def _check_compute(job: QuantizeJob) -> None:
    """Refuse what does not go with a device, and a device that is not there.

    Raises:
        UsageError: several ranks on one device by its number.
        UnsupportedError: no such device, or fewer of them than ranks.
    """
    device = _device(job)
    name = job.entry.name
    if job.ranks > 1 and ":" in job.compute.device:
        raise UsageError(
            f"quantize {name}: {job.ranks} ranks with --device {job.compute.device}, which they "
            "would share",
            f"give --device {kind_of(job.compute.device)}: each rank takes the GPU of its number",
        )
    if job.ranks > 1 and not device.is_host and launched_rank() is None:
        open_device(f"{job.compute.device}:{job.ranks - 1}")  # raises unless each rank has one


def _choose_and_quantize(job: QuantizeJob, model: PlannedModel, progress: Progress) -> Path:
    """Choose the schemes and quantize with them, until the result costs what was allowed."""
    if job.ranks > 1:
        raise UsageError(
            f"quantize: {CHOICE} with --ranks {job.ranks}",
            "choose with one process; give the recipe.yaml that it writes to the ranks",
        )
    mixture = choose.mixture_of(
        job.output,
        job.entry,
        model.plan,
        model=job.model,
        measurement_path=job.measurement,
        source=model.source,
        graph=model.graph,
        resources=job.resources,
        parts=PARTS,
        progress=progress,
    )
    while True:
        chosen = replace(job, entry=mixture.resolved())
        progress.say(f"quantize {job.entry.name}: {mixture.description}")
        plan = resolve(chosen.entry, model.graph, model.shapes, unused=model.unused)
        _quantize(chosen, replace(model, plan=plan, mixture=mixture), progress)
        if stage_folder.done(job.output) is not None:
            return job.output
        again = chosen_mixture.read(job.output, job.entry, model.graph, key=mixture.key)
        mixture = again or mixture


def _launch(
    job: QuantizeJob, model: PlannedModel, shares: Mapping[Path, CardShare], progress: Progress
) -> None:
    """Start one process per rank, after the source was hashed once for all of them."""
    plan = model.plan
    source = model.source
    measured, measurement = measurement_of(
        job.measurement,
        plan,
        scheme=job.entry.scheme,
        source=source,
        graph=model.graph,
        progress=progress,
        ranks=job.ranks,
    )
    disk.make_folder(job.output)
    digests = Digests(job.output / HASHES, also=known_hashes(measured))
    about = {
        **_inputs(job, plan, source, measurement),
        "model": identify(source.checkpoint, digests),
    }
    refuse_foreign(measurement, model=job.model, fingerprint=about["model"], folder=measured)
    del measurement  # each rank reads it, beside this process
    inputs = {folder: {**about, **share.inputs()} for folder, share in shares.items()}
    if all(stage_folder.is_up_to_date(folder, made_from) for folder, made_from in inputs.items()):
        progress.say(f"quantize {job.entry.name}: up to date")
        return
    for folder, made_from in inputs.items():
        stage_folder.refuse_other_result(folder, made_from, force=job.force, parts=PARTS)
    launch("quantize", job, ranks=job.ranks, progress=progress)


def _quantize(
    job: QuantizeJob,
    model: PlannedModel,
    progress: Progress,
    *,
    share: CardShare = WHOLE,
    team: Team = ALONE,
) -> Path:
    """Quantize the share of this process into the job's folder, together with the team."""
    began = time.monotonic()
    plan = model.plan
    source = model.source
    graph = model.graph
    mixture = model.mixture
    folder, measurement = measurement_of(
        job.measurement,
        plan,
        scheme=job.entry.scheme,
        source=source,
        graph=graph,
        progress=progress,
        ranks=job.ranks,
    )
    shorts = check_before(
        plan.name,
        plan.experts,
        graph,
        measurement,
        schemes=plan.schemes,
        shapes=model.shapes,
        observed=plan.fed if plan.rotation is not None else None,
    )
    _say_short(shorts, job.entry, progress)
    known = (
        inputs_of(measurement, graph, plan.schemes, policy=plan.experts, shorts=shorts)
        if plan.file_to_file
        else {}
    )
    if job.entry.imatrix is not None:
        from quantflow.quantizing.importance import with_importance  # here: see above

        known = with_importance(
            known, plan, path=Path(job.entry.imatrix), checkpoint=source.checkpoint
        )
    device = _device(job)
    with (
        stage_folder.locked(job.output),
        single_threaded(),
        device.deterministic(),
        torch.no_grad(),
    ):
        # A folder of anything else is refused before a file is written into it.
        stage_folder.refuse_other_result(job.output, {}, force=True, parts=PARTS)
        disk.make_folder(job.output)
        also = [] if share is WHOLE else [job.output.parent / HASHES]
        digests = Digests(job.output / HASHES, also=[*also, *known_hashes(folder)])
        inputs = weightless = {**_inputs(job, plan, source, measurement), **share.inputs()}
        # The source's hash is part of the inputs. File to file it is taken while the files are read
        # anyway, unless a measurement or a finished result has to be compared with it now.
        ahead = plan.file_to_file and measurement is None and stage_folder.done(job.output) is None
        if not ahead:
            inputs = {**weightless, "model": identify(source.checkpoint, digests)}
            refuse_foreign(measurement, model=job.model, fingerprint=inputs["model"], folder=folder)
        # A card that is finished still helps the others, until all are.
        if team.all(stage_folder.is_up_to_date(job.output, inputs)):
            layer_store.remove_scratch(job.output)
            progress.say(f"quantize {job.entry.name}: up to date")
            return job.output
        stage_folder.refuse_other_result(job.output, inputs, force=job.force, parts=PARTS)
        allowance, on_device, resident = _allow(
            job, model, measurement, share=share, ranks=team.world
        )
        process_memory.reset_peak()
        device.begin_peak()
        refuse_not_finite(source.checkpoint, graph)
        begun = f"quantize {job.entry.name}: the unfinished result was made with"
        layer_store.begin(
            job.output,
            inputs,
            say=lambda text: progress.say(f"{begun} {text}; its layers are made again"),
        )
        layer_store.remove_others(job.output, [layer.index for layer in graph.layers])
        head_file.remove_others(job.output, plan)
        if plan.file_to_file:
            quantize_files(
                job.output,
                plan,
                source=source,
                graph=graph,
                key=digest_of(weightless),
                digests=digests,
                allowance=allowance,
                progress=progress,
                share=share,
                inputs=known,
                device=device,
            )
            inputs = {**weightless, "model": identify(source.checkpoint, digests)}
        else:
            key = digest_of(inputs)
            runnable = _runnable(source)
            _run_layers(
                job,
                model,
                measurement,
                source=runnable,
                key=key,
                allowance=allowance,
                progress=progress,
                share=share,
                team=team,
                resident=resident,
            )
            if mixture is not None and measurement is not None:
                stays = _settled(
                    job, model, mixture, measurement, source=runnable, key=key, progress=progress
                )
                if not stays:
                    return job.output  # unfinished: schemes are chosen again
            if not shorts and plan.experts is not None:  # the measurement counted none
                records = [layer_store.record(job.output, each.index) for each in graph.layers]
                _say_short(short_in_records(graph, records), job.entry, progress)
        disk.write_atomic(
            job.output / "quantize.json", canonical_json(_summary(job, model, measurement))
        )
        hashes = layer_store.hashes(job.output, graph) | head_file.hashes(job.output)
        stage_folder.finish(
            job.output, stage="quantize" if share is WHOLE else STAGE, inputs=inputs, hashes=hashes
        )
        # Scratch stays until every card is finished: one that resumes needs the others' states.
        team.wait()
        layer_store.remove_scratch(job.output)
        progress.say(
            f"quantize {job.entry.name}: {len(plan.quantized)} linears of {len(graph.layers)} "
            f"layers, {'file to file' if plan.file_to_file else 'layer by layer'}; "
            f"{duration(time.monotonic() - began)}"
        )
        for line in account(
            f"quantize {job.entry.name}", allowance, job.output, on_device=on_device, device=device
        ):
            progress.note(line)
    return job.output


def _say_short(shorts: Sequence[Short], entry: Quantize, progress: Progress) -> None:
    if shorts:
        progress.say(f"quantize {entry.name}: {described(shorts)}; --experts {entry.experts}")


def _allow(
    job: QuantizeJob,
    model: PlannedModel,
    measurement: Measurement | None,
    *,
    share: CardShare,
    ranks: int,
) -> tuple[Allowance, int | None, bool]:
    """Memory and disk of the work, bytes of a device, and whether hidden states stay on it.

    They stay where the device has room for two generations of them.

    Raises:
        ResourceError: they do not suffice.
    """
    plan = model.plan
    source = model.source
    text = () if measurement is None else plan.text(measurement.sequences)
    lengths = [len(sequence) for sequence in text]
    held = share if plan.file_to_file else WHOLE  # where the model runs, a card has whole layers
    checkpoint = source.checkpoint
    read = checkpoint.infos if plan.mtp is None else checkpoint.infos_with_unused
    sizes = model_size(
        {name: held.info(info) for name, info in read.items()},
        source.config,
        model.graph,
    )
    allowance = allow_quantize(job.resources, sizes, plan, lengths=lengths, folder=job.output)
    need = quantize_on_device(
        sizes, plan, lengths=lengths, dtype=_text_dtype(job, plan), ranks=ranks
    )
    device = _device(job)
    there = allow_on_device(need, job.resources, device)
    # two generations, of both texts where the text runs twice
    both = 2 * hidden_bytes(sizes, lengths) * _text_dtype(job, plan).itemsize // FLOAT
    both *= 2 if plan.twice else 1
    if not lengths or not keeps_hidden_states(need, both, job.resources, device):
        return allowance, there, False
    return allowance, need.peak + both, True


def _runnable(files: ModelFiles) -> "Source":
    """The open files with the configuration of transformers, which running the model needs."""
    # imported here: file to file starts without transformers' model code
    from quantflow.models.configuration import load_config
    from quantflow.models.load import Source

    return Source(checkpoint=files.checkpoint, config=load_config(files.checkpoint))


def _run_layers(
    job: QuantizeJob,
    model: PlannedModel,
    measurement: Measurement | None,
    *,
    source: "Source",
    key: str,
    allowance: Allowance,
    progress: Progress,
    share: CardShare,
    team: Team,
    resident: bool,
) -> None:
    """Bring every layer up to date by running the model, layer by layer."""
    # imported here: file to file starts without transformers' model code
    from quantflow.models.load import reading_ahead
    from quantflow.quantizing.layer_by_layer import Forward
    from quantflow.quantizing.tuning import tune

    plan = model.plan
    folder = job.output if plan.tune is None else layer_store.untuned(job.output)
    disk.make_folder(folder / "layers")
    device = _device(job)
    with (
        Workers(allowance.workers) as workers,
        reading_ahead(source, device) as read_source,
    ):
        forward = Forward(
            output=job.output,
            folder=folder,
            entry=job.entry,
            plan=plan,
            source=read_source,
            graph=model.graph,
            measurement=measurement,
            key=key,
            seed=job.seed,
            progress=progress,
            workers=workers if device.is_host else SEQUENTIAL,
            host_workers=workers,
            allowance=allowance,
            share=share,
            team=team,
            device=device,
            dtype=_text_dtype(job, plan),
            resident=resident,
        )
        forward.layers()
        if plan.tune is not None:
            tune(forward, plan.tune, sequences=[] if measurement is None else measurement.sequences)


def _settled(
    job: QuantizeJob,
    model: PlannedModel,
    mixture: ChosenMixture,
    measurement: Measurement,
    *,
    source: "Source",
    key: str,
    progress: Progress,
) -> bool:
    """Whether the chosen schemes stay, by the divergence that they are measured to cost."""
    from quantflow.quantizing.mixed_precision.measured_divergence import settle  # here: see above

    return settle(
        job.output,
        mixture,
        model.plan,
        model=job.model,
        source=source,
        graph=model.graph,
        measurement=measurement,
        key=key,
        revision=job.revision,
        seed=job.seed,
        resources=job.resources,
        progress=progress,
        device=_device(job),
    )


def _inputs(
    job: QuantizeJob, plan: Plan, source: ModelFiles, measurement: Measurement | None
) -> dict[str, Any]:
    """Everything that the result depends on but the weights."""
    return {
        "config": digest_of(source.checkpoint.config),
        "recipe": _recipe(job.entry),
        "plan": plan.as_json(),
        "measurement": None if measurement is None else measurement.meta["digest"],
        **(
            {}
            if job.entry.imatrix is None
            else {"importance": file_digest(Path(job.entry.imatrix))}
        ),
        "seed": job.seed,
        "revision": job.revision,
        "versions": {"quantize": VERSION, **plan.versions},
        **_device(job).key(),
        **_named(_text_dtype(job, plan)),
        "tools": tools(),
    }


def _named(dtype: torch.dtype) -> dict[str, str]:
    """The dtype as results name it; nothing of float32."""
    return {} if dtype == torch.float32 else {"dtype": str(dtype).removeprefix("torch.")}


def _recipe(entry: Quantize) -> dict[str, Any]:
    """The entry as the result's inputs name it; `expect` is validate's affair.

    Of an importance matrix it has the file's name, without the folder.
    """
    return {
        key: Path(value).name if key == "imatrix" else value
        for key, value in asdict(entry).items()
        if key != "expect" and (key not in LATER or value)
    }


def _summary(
    job: QuantizeJob, model: PlannedModel, measurement: Measurement | None
) -> dict[str, Any]:
    """The facts that export needs besides the layers."""
    plan = model.plan
    calibrated_by = None
    if measurement is not None:
        meta = measurement.meta
        hashes = [tensor_hash(sequence[:CANARY_TOKENS]) for sequence in measurement.sequences]
        calibrated_by = {
            key: meta[key] for key in ("digest", "calibration", "mesh", "dtype", "seed", "counts")
        }
        calibrated_by["sequence_heads"] = hashes
        if "unified" in meta:
            calibrated_by["unified"] = {
                key: meta["unified"].get(key) for key in ("world", "ranks", "missing")
            }
    chosen = {} if model.mixture is None else {"chosen": read_json(job.output / choose.RECORD)}
    origin = origin_of(job.model)
    device = _device(job)
    return {
        "source": {
            "folder": str(job.model),
            "name": origin.name,
            "revision": origin.revision or job.revision,
        },
        "recipe": {**_recipe(job.entry), "seed": job.seed, **chosen},
        "plan": plan.as_json(),
        "measurement": calibrated_by,
        "proof": "tensors" if plan.file_to_file else "canary",
        **({} if device.is_host else {"device": {"name": device.name, **device.key()["device"]}}),
        **_named(_text_dtype(job, plan)),
    }
