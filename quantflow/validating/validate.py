"""Stage 5, validate: compare an artifact with its source, and let a gate decide.

Reads    the artifact, or a folder that another program quantized, the source model, an evaluation
         text; an older artifact of the model, or its validation
Writes   <report>/validation.json and report.html, with the artifact's digest; nothing into the
         artifact
         <report>/tasks.json and tasks-baseline.json, lm-eval's documents, where tasks are asked
         <report>/mend.yaml, the recipe of the cheapest mend, where a diagnosis has one
         <base>, llama.cpp's base of the source, where it is asked for and not there
         <cache>/<key>/ what every validation of that model over that text shares, see `Shared`
Resumes  a validation of the same artifact, text and protocol is left alone; one that was stopped
         goes on with its layer
Fails    3 unusable text, or text that was calibrated on; 4 the gate failed, was inconclusive, or
         passed where a failure was expected, or the artifact is worse than the older one;
         7 the artifact is damaged

Layer by layer: memory holds one layer of one model, then the heads, whatever the models' size
(quantflow/validating/layerwise.py). Protocol: float32, the artifact on the reference backend, its
cache rounded, windows of one length, KL over all the vocabulary. The noise floor is the baseline in
bf16 against itself in float32; where `compute` asks for bf16, in float32 against itself in bf16.
Layers, heads and divergences are computed on one device (quantflow/core/device.py); bounds,
diagnosis and tasks on the CPU.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quantflow import cpu_threads, process_memory
from quantflow.algorithms import REFIT, TUNE
from quantflow.core.determinism import single_threaded, tools
from quantflow.core.device import Device, open_device
from quantflow.core.dtypes import RUNNING
from quantflow.core.parallel import Workers
from quantflow.errors import InputError, UnsupportedError, UsageError
from quantflow.exporting.canary import rounder
from quantflow.files import disk, stage_folder
from quantflow.files.canonical import canonical_json, digest_of, read_json
from quantflow.files.digests import Digests
from quantflow.files.outputs import beside, output_folder
from quantflow.formats.llama_cpp.logits_base import LogitsBase, chunks_of, open_logits_base
from quantflow.measuring.text import hash_sequences, read_text, read_whole
from quantflow.measuring.text_sources import text_digest, text_path
from quantflow.models import layer_store
from quantflow.models.capture import LayerStream
from quantflow.models.graph import text_config
from quantflow.models.identity import CANARY_TOKENS, tensor_hash
from quantflow.models.load import Source, open_source, reading_ahead
from quantflow.models.open import graph_for
from quantflow.models.skeleton import skeleton
from quantflow.models.source import fingerprint
from quantflow.models.token_ids import refuse_beyond
from quantflow.models.tokenizer import load_tokenizer
from quantflow.numerics.divergence import Comparison
from quantflow.planning.device_memory import allow_on_device, validate_on_device
from quantflow.planning.finished_plan import head_from, kv_words_of
from quantflow.planning.recipe import Compute, Validate
from quantflow.planning.resources import allow_validate, compare
from quantflow.planning.sizes import model_size
from quantflow.progress import Progress
from quantflow.runtime.artifact import (
    Artifact,
    inputs_asked,
    is_artifact,
    open_folder,
    require_rounded,
)
from quantflow.shipped import EVALUATION
from quantflow.sources.models import is_on_hub, model_folder
from quantflow.units import duration
from quantflow.validating import recovery
from quantflow.validating.ahead import acceptance, first_tokens
from quantflow.validating.base_files import leading_bos, write_base
from quantflow.validating.bootstrap import bootstrap
from quantflow.validating.diagnosis import Subject, diagnose
from quantflow.validating.foreign_manifest import manifest_of
from quantflow.validating.gate import gate_files, judge, read_gate
from quantflow.validating.job import ValidateJob
from quantflow.validating.layerwise import BASELINE, Comparing
from quantflow.validating.layerwise import Judge as LogitsJudge
from quantflow.validating.mend import RECIPE
from quantflow.validating.paired import recorded
from quantflow.validating.regression import compare_with, read_validation
from quantflow.validating.report import row_of, write_report
from quantflow.validating.task_scores import TaskScores, check_tasks, files_of, score_tasks
from quantflow.validating.validation_record import Validation
from quantflow.validating.windows import evaluation_sequences

VERSION = 4
RESAMPLES = 2000
CACHE = "validation-cache"
_OF_ANOTHER = 0.05  # nats that a source in another program is away from itself at most


@dataclass(frozen=True, kw_only=True)
class Shared:
    """What validations of one model over one text share.

    It is the noise floor, and the hidden states after the baseline's last layer:

        <cache>/<key>/floor.json       {"key", "floor"}, the noise floor's metrics with their bounds
        <cache>/<key>/00030.hidden     the hidden states, as quantflow/models/hidden.py writes them

    Attributes:
        key: sha256 over the canonical JSON of [the protocol: windows, tokens, their hash, dtype,
            device, resamples, seed; the hashes of the model's files; the versions of the tools and
            the instruction set].
        folder: folder of the key. Files in it appear whole, and one that does not match its hash is
            made again.
    """

    key: str
    folder: Path

    def has_baseline(self, layers: int) -> bool:
        """Whether the states after the last of so many layers seem to be there.

        Only reading them shows whether they are whole.
        """
        return (self.folder / f"{layers:05d}.json").is_file()

    @property
    def floor(self) -> dict[str, dict[str, float]] | None:
        """The noise floor, where an earlier validation kept it."""
        try:
            record = read_json(self.folder / "floor.json")
            floor: dict[str, dict[str, float]] = record["floor"]
            return (
                floor
                if record["key"] == self.key and record["digest"] == digest_of(floor)
                else None
            )
        except (InputError, KeyError, TypeError):  # missing or damaged: made again, never used
            return None

    def keep(self, floor: Mapping[str, Mapping[str, float]]) -> None:
        """Keep the noise floor."""
        disk.make_folder(self.folder)
        record = {"key": self.key, "floor": floor, "digest": digest_of(floor)}
        disk.write_shared(self.folder / "floor.json", canonical_json(record))


def run(job: ValidateJob, progress: Progress) -> dict[str, Any]:
    """Validate, and return the content of validation.json.

    `quantflow.validating.verdict` turns it into an exit code.
    """
    check_compute(job.options, job.compute)
    device = open_device(job.compute.device)
    source = open_source(job.baseline)
    manifest = manifest_of(job.artifact, source)
    if job.options.diagnose is not None and not is_artifact(job.artifact):
        cause = (
            f"{job.artifact}: --diagnose of a folder without a manifest, "
            "which says how it was quantized"
        )
        raise UsageError(cause, "leave --diagnose out")
    digests = Digests()
    _refuse_other_baseline(job, manifest, source, digests)
    base = _base(job, source, digests, progress, device=device)
    inputs = _inputs(job, manifest, source, digests)
    older = None if job.previous is None else _older(job, job.previous, progress)
    if older is not None:
        inputs["previous"] = digest_of(older["windows"])
    with (
        stage_folder.locked(job.folder),
        single_threaded(),
        device.deterministic(),
        torch.no_grad(),
    ):
        if stage_folder.is_up_to_date(job.folder, inputs):
            disk.remove_tree(layer_store.scratch(job.folder))
            progress.say(f"validate {job.artifact.name}: up to date")
            result: dict[str, Any] = read_json(job.folder / "validation.json")
            return result
        parts = ("validation.json", "report.html", "tasks*.json", RECIPE)
        stage_folder.refuse_other_result(job.folder, inputs, force=job.force, parts=parts)
        validation, documents = _validate(
            job, manifest, source, inputs, older, progress, base=base, device=device
        )
        result = validation.as_json()
        with stage_folder.publish(job.folder, stage="validate", inputs=inputs) as folder:
            disk.write_file(folder / "validation.json", _indented(result))
            for name, content in documents.items():
                disk.write_file(folder / name, content)
            write_report(folder / "report.html", [row_of(result, manifest)])
        disk.remove_tree(layer_store.scratch(job.folder))
    return result


def settled(job: ValidateJob, progress: Progress) -> ValidateJob:
    """The job with a folder or a file for every name.

    Raises:
        QuantflowError: there is no such model or text; the report lies in what is read.
    """
    reads = {"the artifact": job.artifact, "the baseline": job.baseline}
    return replace(
        job,
        artifact=model_folder(job.artifact, progress=progress)
        if is_on_hub(job.artifact)
        else job.artifact,
        baseline=model_folder(job.baseline, revision=job.revision, progress=progress),
        report=output_folder(job.folder, flag="--report", reads=reads),
        options=with_evaluation_text(job.options, progress),
    )


def with_evaluation_text(options: Validate, progress: Progress) -> Validate:
    """The options with a file or a folder as text; without a text it is the shipped one.

    Raises:
        InputError: there is no such text.
    """
    text = EVALUATION if options.text is None else text_path(options.text, progress)
    return replace(options, text=str(text))


def check_compute(options: Validate, compute: Compute) -> None:
    """Refuse options that do not go with a device, or with models that run in bfloat16.

    Raises:
        UnsupportedError: a diagnosis, whose probes run in float32 on the CPU and are compared with
            what the models lose.
        UsageError: a diagnosis beside a base.
    """
    if options.diagnose is not None and (
        compute.device,
        compute.model_dtype,
    ) != ("cpu", "float32"):
        raise UnsupportedError(
            f"validate: --diagnose with --device {compute.device} --dtype {compute.model_dtype}, "
            "probes run in float32 on the CPU",
            "leave --device and --dtype out, or --diagnose",
        )
    if options.diagnose is not None and options.base is not None:
        raise UsageError(
            f"validate: --diagnose with --base {options.base}, its probes are compared with the "
            "source itself",
            "leave one of them out",
        )


def _older(job: ValidateJob, previous: Path, progress: Progress) -> dict[str, Any]:
    """The validation of the older artifact.

    Where only the artifact is there, it is validated as the newer one is.
    """
    if previous.is_file() or (previous / "validation.json").is_file():
        return read_validation(previous)
    source = open_source(job.baseline)
    manifest = manifest_of(previous, source)
    older = replace(
        job,
        artifact=previous,
        report=beside(previous, "-validation"),
        options=replace(job.options, diagnose=None),
        previous=None,
        expect="pass",
        force=False,
    )
    if not stage_folder.is_up_to_date(older.folder, _inputs(older, manifest, source, Digests())):
        older = replace(
            older, report=job.folder.with_name(f"{job.folder.name}-previous"), force=True
        )
    return run(replace(older, cache=job.cache or job.folder.parent / CACHE), progress)


def _refuse_other_baseline(
    job: ValidateJob, manifest: Mapping[str, Any], source: Source, digests: Digests
) -> None:
    """Refuse to compare an artifact with a model that it was not made from.

    Raises:
        InputError: a weight file of the baseline is not one that the manifest names. Another
            program's folder names none.
    """
    if not is_artifact(job.artifact):
        return
    recorded = set(manifest["source"]["files"].values())
    shards = [source.checkpoint.folder / name for name in source.checkpoint.shards]
    with Workers(cpu_threads.usable_cores()) as workers:
        actual = digests.of_all(shards, map_all=workers.map)
    for path, digest in actual.items():
        if digest not in recorded:
            raise InputError(
                f"{path}: has sha256 {digest[:16]}, the artifact was made from other weights",
                f"give the model {manifest['source']['name']!r} that was quantized as --baseline",
            )


def _inputs(
    job: ValidateJob, manifest: Mapping[str, Any], source: Source, digests: Digests
) -> dict[str, Any]:
    options = {**asdict(job.options), "text": text_digest(Path(str(job.options.text)))}
    del options["ranks"]  # they answer as one does
    for name in ("mtp", "base"):  # a validation without them is that of older versions
        if options[name] is None:
            del options[name]
    if job.options.base is not None:
        options["base"] = digests.of_all([Path(job.options.base)])[Path(job.options.base)]
    return {
        "artifact": manifest["digest"],
        "baseline": fingerprint(source.checkpoint, digests),
        "options": options,
        "gate": gate_files(job.options.gate),
        "expect": job.expect,
        "seed": job.seed,
        "tasks": files_of(job.options),
        **open_device(job.compute.device).key(),
        **({} if job.compute.model_dtype == "float32" else {"dtype": job.compute.model_dtype}),
        "version": VERSION,
        "tools": tools(),
    }


def _validate(
    job: ValidateJob,
    manifest: Mapping[str, Any],
    source: Source,
    inputs: Mapping[str, Any],
    older: Mapping[str, Any] | None,
    progress: Progress,
    *,
    base: LogitsBase | None,
    device: Device,
) -> tuple[Validation, dict[str, bytes]]:
    """The validation, and the files beside validation.json: name -> content."""
    asked = inputs_asked(exact=job.options.exact, rounded_inputs=job.options.rounded_inputs)
    resolved, name = manifest["recipe"]["resolved"], manifest["recipe"]["name"]
    scheme, algorithm = manifest["recipe"]["scheme"], resolved["algorithm"]
    parameters = sum(parameter.numel() for parameter in skeleton(source.config).parameters())
    # A gate that cannot be read is refused before the models run.
    loaded_gate = read_gate(
        job.options.gate,
        scheme=scheme,
        algorithm=resolved.get("judged_as", algorithm),
        parameters=parameters,
    )
    tasks = check_tasks(job.artifact, job.baseline, job.options)
    recovery.refuse_unasked(loaded_gate.for_noise(1.0), tasks)
    sequences = _sequences(job, manifest, progress, base=base)
    refuse_beyond(sequences, text_config(source.config).vocab_size, where=str(job.options.text))
    protocol = _protocol(job, sequences, inputs, device=device)
    key = digest_of([protocol, inputs["baseline"], tools()])
    shared = Shared(key=key, folder=(job.cache or job.folder.parent / CACHE) / key)
    floor = shared.floor
    artifact = open_folder(
        job.artifact,
        backend="reference",
        dtype=RUNNING[job.compute.model_dtype],
        inputs=asked,  # what runs by default is judged
    )
    if job.options.rounded_inputs:
        require_rounded(artifact)
    with reading_ahead(source, device) as read:
        compared = _compare_with_baseline(
            job,
            read,
            artifact=replace(artifact, linears_device=device.kind),
            inputs=inputs,
            sequences=sequences,
            base=base,
            shared=shared,
            with_noise=floor is None,
            device=device,
            progress=progress,
        )
    candidate = compared["candidate"]
    metrics = _bounds(candidate, job.seed)
    if floor is None:
        floor = _bounds(compared["noise"], job.seed)
        shared.keep(floor)
    gate = loaded_gate.for_noise(floor["top1_agreement"]["value"])
    documents: dict[str, bytes] = {}
    scored: dict[str, Any] = {}
    if job.options.tasks:
        answers = _asked(job, inputs, progress)
        scored["tasks"] = answers.record
        documents["tasks.json"] = _indented(answers.artifact)
        documents["tasks-baseline.json"] = _indented(answers.baseline)
    if job.options.mtp is not None:
        scored["mtp"] = _ahead(job, sequences, progress)
    diagnosis = None
    if job.options.diagnose is not None:
        subject = Subject(
            artifact=artifact,
            source=source,
            sequences=sequences,
            comparison=candidate,
            options=job.options,
            seed=job.seed,
            resources=job.resources,
            kept=layer_store.scratch(job.folder) / "probes.json",
            key=digest_of(inputs),
        )
        diagnosis, mend = diagnose(subject, progress)
        if mend is not None:
            documents[RECIPE] = mend.encode()
    bounds = {metric: (bound["lower"], bound["upper"]) for metric, bound in metrics.items()}
    verdict = judge(gate, bounds, recovery.asked(gate, {"artifact": name, **scored}))
    validation = Validation(
        artifact=name,
        digest=manifest["digest"],
        baseline=inputs["baseline"],
        parameters=parameters,
        scheme=scheme,
        kv_cache=kv_words_of(resolved),
        algorithm=" + ".join(
            [*filter(resolved.get, [REFIT]), algorithm, *filter(resolved.get, [TUNE])]
        ),
        transforms=resolved["transforms"],
        model=manifest["source"]["name"],
        size=sum(entry["bytes"] for entry in manifest["files"].values()),
        bits_per_weight=bits_per_weight(artifact),
        perplexity={
            "baseline": _perplexity(candidate.nll_baseline),
            "candidate": _perplexity(candidate.nll_candidate),
        },
        metrics=metrics,
        noise_floor=floor,
        gate=gate.record(),
        windows=recorded(candidate),
        expect=job.expect,
        allow_inconclusive=job.options.allow_inconclusive,
        rounded_inputs=any(linear.rounded for linear in artifact.linears.values()),
        protocol=protocol,
        outcome=verdict.outcome,
        reasons=verdict.reasons,
        diagnosis=diagnosis,
        **scored,
    )
    if older is not None:
        regression = compare_with(older, validation.as_json(), gate=gate)
        validation = replace(validation, regression=regression)
    return validation, documents


def _indented(document: Mapping[str, Any]) -> bytes:
    """The bytes of a JSON file for people: indented, its keys in order."""
    return json.dumps(document, indent=1, sort_keys=True).encode()


def _asked(job: ValidateJob, inputs: Mapping[str, Any], progress: Progress) -> TaskScores:
    return score_tasks(
        job.artifact,
        job.baseline,
        options=job.options,
        resources=job.resources,
        kept=job.cache or job.folder.parent / CACHE,
        key=inputs["baseline"],
        progress=progress,
    )


def _ahead(job: ValidateJob, sequences: list[Tensor], progress: Progress) -> dict[str, Any]:
    """The guesses of both models' layers that predict further tokens."""
    text, exact = first_tokens(sequences, job.options.mtp or 0), job.options.exact
    both = {
        "baseline": acceptance(job.baseline, text, exact=exact),
        "candidate": acceptance(
            job.artifact, text, exact=exact, rounded_inputs=job.options.rounded_inputs
        ),
    }
    shares = [f"{one['acceptance']:.1%}" for one in both.values()]
    progress.say(
        f"validate {job.artifact.name}: MTP guesses taken: {shares[0]} of the model's, {shares[1]} "
        "of the artifact's"
    )
    return both


def _bounds(comparison: Comparison, seed: int) -> dict[str, dict[str, float]]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: asdict(bound)
        for name, bound in bootstrap(comparison, generator=generator, resamples=RESAMPLES).items()
    }


def _base(
    job: ValidateJob, source: Source, digests: Digests, progress: Progress, *, device: Device
) -> LogitsBase | None:
    """llama.cpp's base that the artifact is judged by, written first where it is not there."""
    if job.options.base is None:
        return None
    path, text = Path(job.options.base), Path(str(job.options.text))
    if path.exists():
        return open_logits_base(path)
    vocabulary = int(text_config(source.config).vocab_size)
    tokens = chunks_of(
        read_whole(text, load_tokenizer(job.baseline)),
        length=job.options.sequence_length,
        tokens=job.options.tokens,
    )
    refuse_beyond(list(tokens), vocabulary, where=str(text))
    graph, dtype = graph_for(source.config), RUNNING[job.compute.model_dtype]
    model = fingerprint(source.checkpoint, digests)

    def running(sequences: Sequence[Tensor], of_logits: LogitsJudge) -> Comparing:
        lengths = [len(each) for each in sequences]
        allowance = allow_validate(
            job.resources,
            model_size(source.checkpoint.infos, source.config, graph),
            lengths=lengths,
            models=1,
            folder=job.folder,
        )
        return Comparing(
            streams={BASELINE: LayerStream(source, graph, dtype=dtype, device=device)},
            sequences=sequences,
            folder=layer_store.scratch(job.folder),
            keys={BASELINE: digest_of([model, hash_sequences(sequences), str(dtype), tools()])},
            stage=f"validate {job.artifact.name}",
            progress=progress,
            workers=allowance.workers if device.is_host else 1,
            judge=of_logits,
        )

    with (
        stage_folder.locked(job.folder),
        single_threaded(),
        device.deterministic(),
        torch.no_grad(),
    ):
        base = write_base(
            path,
            tokens,
            vocabulary=vocabulary,
            bos=leading_bos(job.baseline),
            device=device,
            running=running,
        )
        disk.remove_tree(layer_store.scratch(job.folder))
    progress.say(f"{path}: {len(tokens)} chunks of {tokens.shape[1]} tokens")
    return base


def _sequences(
    job: ValidateJob,
    manifest: Mapping[str, Any],
    progress: Progress,
    *,
    base: LogitsBase | None = None,
) -> list[Tensor]:
    """The evaluation windows.

    Raises:
        InputError: the text that they are cut from holds the first tokens of a calibration
            sequence, wherever.
    """
    documents: Sequence[Sequence[int]]
    if base is not None:
        documents, tokens = [base.tokens.flatten().tolist()], base.tokens.numel()
        sequences, where = base.sequences(leading_bos(job.baseline)), str(base.path)
    else:
        text = read_text(Path(str(job.options.text)), load_tokenizer(job.baseline))
        documents, where = text.documents, str(job.options.text)
        if text.note is not None:
            progress.say(f"validate {job.artifact.name}: {text.note}")
        tokens, length = job.options.tokens, job.options.sequence_length
        sequences = evaluation_sequences(documents, tokens=tokens, sequence_length=length)
    if manifest["measurement"] is None:
        return sequences
    head = min(CANARY_TOKENS, manifest["measurement"]["calibration"]["sequence_length"])
    calibrated = set(manifest["measurement"]["sequence_heads"])
    left = tokens
    # a heading that both texts have is shorter than a head
    for number, document in enumerate(documents, start=1):
        used = torch.tensor(document[:left], dtype=torch.int64)
        left -= len(used)
        position = next(
            (
                at
                for at in range(len(used) - head + 1)
                if tensor_hash(used[at : at + head]) in calibrated
            ),
            None,
        )
        if position is not None:
            raise InputError(
                f"{where}: document {number}, tokens {position} to "
                f"{position + head - 1}: the first {head} tokens "
                "of a calibration sequence",
                "evaluate on text that the artifact was not calibrated on",
            )
    return sequences


def _compare_with_baseline(
    job: ValidateJob,
    source: Source,
    *,
    artifact: Artifact,
    inputs: Mapping[str, Any],
    sequences: Sequence[Tensor],
    base: LogitsBase | None,
    shared: Shared,
    with_noise: bool,
    device: Device,
    progress: Progress,
) -> dict[str, Comparison]:
    """The candidate's comparison with the baseline, and the noise's where that is not known.

    The noise is the baseline in another dtype against itself. With a base all are compared with
    what it holds, by its formula.

    Raises:
        InputError: the base has another vocabulary, or is another model's.
    """
    graph, dtype = graph_for(source.config), RUNNING[job.compute.model_dtype]
    candidate = LayerStream(
        artifact,
        graph_for(artifact.config),
        dtype=dtype,
        cache=rounder(artifact, device),
        device=device,
    )
    streams = {
        BASELINE: LayerStream(source, graph, dtype=dtype, device=device),
        "candidate": candidate,
    }
    if with_noise:
        other = torch.bfloat16 if dtype == torch.float32 else torch.float32
        streams["noise"] = LayerStream(source, graph, dtype=other, device=device)
    sizes = model_size(source.checkpoint.infos, source.config, graph)
    lengths = [len(sequence) for sequence in sequences]
    head = head_from(artifact.manifest["recipe"]["resolved"]) if artifact.manifest else None
    allowance = allow_validate(
        job.resources, sizes, lengths=lengths, models=len(streams), folder=job.folder, head=head
    )
    ran = [
        name for name in streams if name != BASELINE or not shared.has_baseline(len(graph.layers))
    ]
    reused = {"noise": not with_noise, BASELINE: BASELINE not in ran}
    kept = (
        f", {' and '.join(name for name in reused if reused[name])} kept from before"
        if any(reused.values())
        else ""
    )
    need = validate_on_device(sizes, lengths=lengths, models=len(streams), dtype=dtype, head=head)
    allow_on_device(need, job.resources, device)
    process_memory.reset_peak()
    comparing = Comparing(
        streams=streams,
        sequences=sequences,
        folder=layer_store.scratch(job.folder),
        keys={
            name: digest_of([shared.key if name != "candidate" else digest_of(inputs), name])
            for name in streams
        },
        kept=shared.folder,
        stage=f"validate {job.artifact.name}",
        progress=progress,
        workers=allowance.workers if device.is_host else 1,
        judge=None if base is None else partial(_beside_base, base, device),
    )
    took = f" on {device.name}"
    if device.is_host:
        took = f", about {duration(comparing.seconds(kept=streams.keys() - set(ran)))}"
    progress.say(
        f"validate {job.artifact.name}: {len(sequences)} windows, {sum(lengths):,} "
        f"tokens{took}{kept}"
    )
    compared = comparing.scores()
    if base is not None:
        _refuse_other_base(base, compared.pop(BASELINE))
    progress.note(
        compare("validate", planned=allowance.peak_bytes, used=process_memory.usage().peak)
    )
    return compared


def _beside_base(
    base: LogitsBase, device: Device, number: int, logits: dict[str, Tensor]
) -> Mapping[str, Comparison]:
    """Every model's comparison with the base over one chunk."""
    return base.compare(number, {name: device.fetch(of) for name, of in logits.items()})


def _refuse_other_base(base: LogitsBase, source: Comparison) -> None:
    """Refuse a base whose log-probabilities the source itself does not have.

    Another program's kernels and dtypes move them by less than this.

    Raises:
        InputError: with the source's divergence.
    """
    divergence = float(source.kld.mean())
    if divergence > _OF_ANOTHER:
        raise InputError(
            f"{base.path}: the baseline's own divergence from it is {divergence:.3g} nats, it is "
            "of another model",
            "give the base of the model that was quantized, or none",
        )


def bits_per_weight(artifact: Artifact) -> float:
    """Stored bits, scales and zero points included, per weight of the quantized linears."""
    infos, nbytes, weights = artifact.checkpoint.infos, 0, 0
    for name, placement in artifact.linears.items():
        nbytes += sum(
            infos[key].nbytes for key in artifact.layout.tensor_names(name, placement.scheme)
        )
        weights += placement.shape[0] * placement.shape[1]
    return 8 * nbytes / weights


def _perplexity(nll: Tensor) -> float:
    return float(nll.mean().exp())


def _protocol(
    job: ValidateJob, sequences: Sequence[Tensor], inputs: Mapping[str, Any], *, device: Device
) -> dict[str, Any]:
    length, base = job.options.sequence_length, inputs["options"].get("base")
    protocol = {
        "windows": len(sequences),
        "tokens": sum(len(s) for s in sequences),
        "sequence_length": length if base is None else len(sequences[0]),
        **({} if base is None else {"scored": "second half of each chunk", "base": base}),
        "text": hash_sequences(sequences),
        "dtype": job.compute.model_dtype,
        **device.key(),
        "bound": "one-sided 95 %",
        "resamples": RESAMPLES,
        "seed": job.seed,
    }
    return {**protocol, "hash": digest_of(protocol)}
