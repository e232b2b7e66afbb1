"""Several models beside one source: divergence over one text, with paired bounds.

Reads    the source, or llama.cpp's base of its log-probabilities; the candidates: artifacts, other
         programs' folders, GGUF files, models and models that are served; an evaluation text
Writes   <output>/compare.json, compare.html and compare.svg; llama.cpp's base, where it is asked
Resumes  a comparison of the same inputs is left alone; one that was stopped goes on with its layer
Fails    3 a text, a base or a candidate that cannot be used; 5 too little memory or disk

All but served ones run through our runtime's reference equation, a layer of one model in memory at
a time, as in `validate` (quantflow/validating/layerwise.py), on the same windows. Two protocols:

    a model as source     every window's tokens are scored, by KL over all the vocabulary
    a base as source      llama.cpp's: the second half of each chunk, and its formula, so that
                          `llama-perplexity --kl-divergence` prints the same figures

Each candidate also has its difference from the first one, over the same draws of windows: what the
text does to both is no part of it.
"""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quantflow.core.determinism import single_threaded, tools
from quantflow.core.device import Device, open_device
from quantflow.core.dtypes import RUNNING
from quantflow.errors import InputError, UsageError
from quantflow.exporting.canary import rounder
from quantflow.files import disk, stage_folder
from quantflow.files.canonical import digest_of, read_json
from quantflow.files.digests import Digests
from quantflow.files.outputs import output_folder
from quantflow.files.safetensors_header import TensorInfo
from quantflow.formats.llama_cpp.logits_base import (
    LogitsBase,
    chunks_of,
    is_logits_base,
    open_logits_base,
)
from quantflow.measuring.text import hash_sequences, read_text, read_whole
from quantflow.measuring.text_sources import text_digest, text_path
from quantflow.models import layer_store
from quantflow.models.capture import LayerStream
from quantflow.models.graph import text_config
from quantflow.models.open import graph_for
from quantflow.models.skeleton import skeleton
from quantflow.models.source import fingerprint
from quantflow.models.token_ids import refuse_beyond
from quantflow.models.tokenizer import load_tokenizer
from quantflow.numerics.divergence import Comparison, brought_back, join, scores
from quantflow.planning.resources import Allowance, allow_validate
from quantflow.planning.sizes import model_size
from quantflow.progress import Progress
from quantflow.runtime.artifact import (
    Artifact,
    inputs_asked,
    is_model,
    open_folder,
    require_rounded,
)
from quantflow.shipped import EVALUATION
from quantflow.sources.models import SUFFIX, model_folder
from quantflow.validating import llama_cpp_engine
from quantflow.validating.base_files import leading_bos, write_base
from quantflow.validating.bootstrap import bootstrap
from quantflow.validating.compare_job import CompareJob, CompareResult
from quantflow.validating.compare_page import indented, write_pages
from quantflow.validating.layerwise import BASELINE, Comparing, Judge
from quantflow.validating.llama_cpp_engine import LlamaCppModel
from quantflow.validating.paired import differences, recorded, window_scores
from quantflow.validating.served_engine import RemoteModel, open_served
from quantflow.validating.windows import evaluation_sequences

VERSION = 1
RESAMPLES = 2000
FILES = ("compare.json", "compare.html", "compare.svg")
STAGE = "compare"


@dataclass(frozen=True, kw_only=True)
class ComparedModel:
    """A model that takes part.

    Attributes:
        name: the user's name for it.
        key: name of its hidden states' folder: a word without a slash.
        folder: its folder; that of a GGUF file holds what was imported from it. Where llama.cpp
            runs the file, it is the file.
        artifact: the same opened; None where llama.cpp or a server runs it.
        served: a model that a server runs; None for all others.
    """

    name: str
    key: str
    folder: Path
    artifact: Artifact | None
    served: RemoteModel | None = None

    @property
    def opened(self) -> Artifact:
        """What our runtime runs."""
        assert self.artifact is not None  # asked of those alone that run here
        return self.artifact

    @property
    def vocabulary(self) -> int:
        """Tokens that its head knows."""
        return int(text_config(self.opened.config).vocab_size)

    @property
    def bos(self) -> int | None:
        """The token that its tokenizer puts before a text; None where it puts none."""
        return leading_bos(self.folder)

    def identity(self, digests: Digests) -> Any:
        """The hashes of its files, or what a server answers."""
        if self.served is not None:
            return self.served.identity()
        if self.artifact is None:
            return [llama_cpp_engine.ENGINE, digests.of_all([self.folder])[self.folder]]
        return fingerprint(self.artifact.checkpoint, digests)

    def about(self) -> tuple[str, int | None, int | None]:
        """What it stores: its schemes or types, the bytes, and the number of weights.

        Of a served model neither is known.
        """
        if self.served is not None:
            return "served", None, None
        if self.artifact is None:
            return llama_cpp_engine.about(self.folder)
        nbytes = sum(info.nbytes for info in self.artifact.checkpoint.infos.values())
        parameters = skeleton(self.artifact.config).parameters()
        return _stored(self.artifact), nbytes, sum(each.numel() for each in parameters)


def run(job: CompareJob, progress: Progress) -> CompareResult:
    """Compare, and write the pages."""
    device = open_device(job.compute.device)
    is_base = is_logits_base(job.source)
    if is_base and job.write_base is not None:
        raise UsageError(f"compare: --write-base of {job.source}, a base itself", "give its model")
    reads: dict[str, str | Path | None] = {"the source": job.source}
    if job.servers and (is_base or job.write_base is not None):
        raise UsageError(
            f"compare: {job.servers[0]} with llama.cpp's base",
            "give the model as SOURCE and leave --write-base out: a server tells of few tokens",
        )
    reads |= {f"the candidate {each}": each for each in job.candidates}
    job = replace(job, output=output_folder(job.folder, reads=reads))
    assert job.output is not None
    text = None if is_base else _text(job, progress)
    opened = partial(_side, job=job, device=device, progress=progress)
    source = None if is_base else opened(job.source, key=BASELINE)
    sides = [opened(each, key=f"candidate-{index}") for index, each in enumerate(job.candidates)]
    sides += [_served(each, job, index) for index, each in enumerate(job.servers)]
    _refuse_doubles(sides)
    if job.rounded_inputs:
        artifacts = [side.artifact for side in sides if side.artifact is not None]
        if not artifacts:
            raise UsageError(
                "compare: rounded inputs of candidates that other programs run", "leave them out"
            )
        require_rounded(*artifacts)
    inputs = _inputs(job, source, sides, text)
    with (
        stage_folder.locked(job.output),
        single_threaded(),
        device.deterministic(),
        torch.no_grad(),
    ):
        written = job.write_base is None or job.write_base.exists()
        if written and stage_folder.is_up_to_date(job.output, inputs):
            disk.remove_tree(layer_store.scratch(job.output))
            progress.say(f"{STAGE}: up to date")
            return CompareResult(folder=job.output, values=read_json(job.output / FILES[0]))
        stage_folder.refuse_other_result(job.output, inputs, force=job.force, parts=FILES)
        values = _compare(job, source, sides, text, digest_of(inputs), progress, device=device)
        with stage_folder.publish(job.output, stage=STAGE, inputs=inputs) as folder:
            disk.write_file(folder / FILES[0], indented(values))
            write_pages(folder, values)
        disk.remove_tree(layer_store.scratch(job.output))
    return CompareResult(folder=job.output, values=values)


def _text(job: CompareJob, progress: Progress) -> Path:
    return EVALUATION if job.text is None else text_path(job.text, progress)


def _side(
    model: Path, *, key: str, job: CompareJob, device: Device, progress: Progress
) -> ComparedModel:
    """A model opened as what runs it here by default, on the reference equation."""
    if job.engine is not None and key != BASELINE and model.suffix == SUFFIX and model.is_file():
        llama_cpp_engine.binding()
        return ComparedModel(name=str(model), key=key, folder=model, artifact=None)
    folder = model_folder(model, progress=progress)
    inputs = inputs_asked(exact=False, rounded_inputs=job.rounded_inputs and key != BASELINE)
    artifact = open_folder(
        folder,
        backend="auto" if is_model(folder) else "reference",
        dtype=RUNNING[job.compute.model_dtype],
        inputs=inputs,
    )
    artifact = replace(artifact, linears_device=device.kind)
    return ComparedModel(name=str(model), key=key, folder=folder, artifact=artifact)


def _served(address: str, job: CompareJob, index: int) -> ComparedModel:
    model = open_served(address, key=job.server_key)
    return ComparedModel(
        name=model.name, key=f"served-{index}", folder=job.source, artifact=None, served=model
    )


def _refuse_doubles(sides: Sequence[ComparedModel]) -> None:
    names = [side.name for side in sides]
    for name in names:
        if names.count(name) > 1:
            raise UsageError(f"compare: {name} is given twice", "name each candidate once")


def _inputs(
    job: CompareJob, source: ComparedModel | None, sides: Sequence[ComparedModel], text: Path | None
) -> dict[str, Any]:
    digests = Digests()
    base = digests.of_all([job.source])[job.source] if source is None else None
    return {
        "source": base if source is None else source.identity(digests),
        "candidates": {side.name: side.identity(digests) for side in sides},
        "text": None if text is None else text_digest(text),
        "tokens": job.tokens,
        "sequence_length": job.sequence_length,
        "base": job.write_base is not None,
        **({"rounded_inputs": True} if job.rounded_inputs else {}),
        "seed": job.seed,
        **open_device(job.compute.device).key(),
        "dtype": job.compute.model_dtype,
        "version": VERSION,
        "tools": tools(),
    }


def _compare(
    job: CompareJob,
    source: ComparedModel | None,
    sides: Sequence[ComparedModel],
    text: Path | None,
    key: str,
    progress: Progress,
    *,
    device: Device,
) -> dict[str, Any]:
    """The content of compare.json."""
    base: LogitsBase | None = None
    if source is None:
        base = open_logits_base(job.source)
    elif job.write_base is not None:
        base = _write_base(job, source, text, key, progress, device=device)
    own = [side for side in sides if side.artifact is not None]
    with ExitStack() as stack:
        longest = job.sequence_length if base is None else int(base.tokens.shape[1])
        engines = {
            side.key: stack.enter_context(
                closing(llama_cpp_engine.open_model(side.folder, longest=longest))
            )
            for side in sides
            if side.artifact is None and side.served is None
        }
        served = {side.key: side.served for side in sides if side.served is not None}
        if base is None:
            assert source is not None and text is not None
            sequences = _windows(job, source, text, progress)
            vocabulary, where = source.vocabulary, source.name
        else:
            everybody: list[ComparedModel | LlamaCppModel] = [*own, *engines.values()]
            if source is not None:
                everybody.insert(0, source)
            sequences = base.sequences(everybody[0].bos)
            vocabulary, where = base.vocabulary, str(base.path)
        for side in (side for side in sides if side.served is None):
            runs = engines.get(side.key, side)
            if runs.vocabulary != vocabulary:
                raise InputError(
                    f"{side.name}: a vocabulary of {runs.vocabulary}, {where} has {vocabulary}",
                    "compare models that were made from one source",
                )
        refuse_beyond(sequences, vocabulary, where=str(text or job.source))

        def judge(number: int, logits: dict[str, Tensor]) -> Mapping[str, Comparison]:
            tokens = sequences[number]
            logits |= {name: device.put(each.logits(tokens)) for name, each in engines.items()}
            if base is not None:
                return base.compare(number, {key: device.fetch(of) for key, of in logits.items()})
            logits |= {key: one.logits(tokens, logits[BASELINE]) for key, one in served.items()}
            found = scores(logits.pop(BASELINE), logits, device.put(tokens))
            return {key: brought_back(each, device) for key, each in found.items()}

        running = own if base is not None or source is None else [source, *own]
        compared: Mapping[str, Comparison] = {}
        if running and sides:
            streams = {side.key: _stream(side, job, device) for side in running}
            compared = _comparing(
                job, running[0], streams, sequences, key, progress, device=device, judge=judge
            ).scores()
        elif sides:
            steps = progress.steps(range(len(sequences)), stage=STAGE, unit="window")
            parts = [judge(number, {}) for number in steps]
            compared = {name: join(part[name] for part in parts) for name in engines}
    rows = [_row(side, compared[side.key], job.seed) for side in sides]
    return {
        "source": str(job.source),
        "base": None if base is None else str(base.path),
        "text": None if text is None else str(job.text or text.name),
        "protocol": {
            "scored": "windows" if base is None else "second half of each chunk",
            "windows": len(sequences),
            "tokens": sum(map(len, sequences)),
            "predicted": int(next(iter(compared.values())).lengths.sum()) if compared else 0,
            "sequence_length": max(map(len, sequences), default=0),
            "hash": hash_sequences(sequences),
            "dtype": job.compute.model_dtype,
            **device.key(),
            "resamples": RESAMPLES,
            "seed": job.seed,
        },
        "candidates": rows,
        "pairs": _pairs(rows, job.seed),
    }


def _windows(
    job: CompareJob, source: ComparedModel, text: Path, progress: Progress
) -> list[Tensor]:
    read = read_text(text, load_tokenizer(source.folder))
    if read.note is not None:
        progress.say(f"{STAGE}: {read.note}")
    return evaluation_sequences(
        read.documents, tokens=job.tokens, sequence_length=job.sequence_length
    )


def _stream(side: ComparedModel, job: CompareJob, device: Device) -> LayerStream:
    return LayerStream(
        side.opened,
        graph_for(side.opened.config),
        dtype=RUNNING[job.compute.model_dtype],
        cache=rounder(side.opened, device),
        device=device,
    )


def _comparing(
    job: CompareJob,
    sized: ComparedModel,
    streams: Mapping[str, LayerStream],
    sequences: Sequence[Tensor],
    key: str,
    progress: Progress,
    *,
    device: Device,
    judge: Judge,
) -> Comparing:
    """The runs of some models; memory is granted by the size of one of them."""
    assert job.output is not None
    graph = graph_for(sized.opened.config)
    allowance: Allowance = allow_validate(
        job.resources,
        model_size(_unquantized(sized.opened), sized.opened.config, graph),
        lengths=[len(each) for each in sequences],
        models=len(streams),
        folder=job.output,
    )
    return Comparing(
        streams=streams,
        sequences=sequences,
        folder=layer_store.scratch(job.output),
        keys={name: digest_of([key, name]) for name in streams},
        stage=STAGE,
        progress=progress,
        workers=allowance.workers if device.is_host else 1,
        judge=judge,
    )


def _unquantized(artifact: Artifact) -> dict[str, TensorInfo]:
    """The tensors of an artifact as its source has them; a linear as bfloat16, as most are."""
    infos = artifact.checkpoint.infos
    found = {}
    for name in artifact.names:
        linear = artifact.linears.get(name.removesuffix(".weight"))
        if linear is not None:
            count = linear.shape[0] * linear.shape[1]
            found[name] = TensorInfo(
                name=name, dtype="BF16", shape=linear.shape, offset=0, nbytes=2 * count
            )
        else:
            found[name] = infos[name]
    return found


def _write_base(
    job: CompareJob,
    source: ComparedModel,
    text: Path | None,
    key: str,
    progress: Progress,
    *,
    device: Device,
) -> LogitsBase:
    """Run the source over the text's chunks, write llama.cpp's base, and open it."""
    assert job.write_base is not None and text is not None
    documents = read_whole(text, load_tokenizer(source.folder))
    tokens = chunks_of(documents, length=job.sequence_length, tokens=job.tokens)
    refuse_beyond(list(tokens), source.vocabulary, where=str(text))
    streams = {BASELINE: _stream(source, job, device)}

    def running(sequences: Sequence[Tensor], judge: Judge) -> Comparing:
        return _comparing(
            job, source, streams, sequences, key, progress, device=device, judge=judge
        )

    base = write_base(
        job.write_base,
        tokens,
        vocabulary=source.vocabulary,
        bos=source.bos,
        device=device,
        running=running,
    )
    progress.say(f"{STAGE}: {base.path}: {len(tokens)} chunks of {tokens.shape[1]} tokens")
    return base


def _row(side: ComparedModel, comparison: Comparison, seed: int) -> dict[str, Any]:
    """A candidate's part of compare.json."""
    generator = torch.Generator().manual_seed(seed)
    bounds = bootstrap(comparison, generator=generator, resamples=RESAMPLES)
    stored, nbytes, weights = side.about()
    return {
        "name": side.name,
        "stored": stored,
        "rounded_inputs": side.artifact is not None
        and any(linear.rounded for linear in side.artifact.linears.values()),
        "bytes": nbytes,
        "bits_per_weight": None if nbytes is None or weights is None else 8 * nbytes / weights,
        **({} if side.served is None else {"logprobs_per_position": side.served.count}),
        "perplexity": float(comparison.nll_candidate.mean().exp()),
        "source_perplexity": float(comparison.nll_baseline.mean().exp()),
        "metrics": {name: asdict(bound) for name, bound in bounds.items()},
        "windows": recorded(comparison),
    }


def _stored(artifact: Artifact) -> str:
    """The schemes of the linears, the most frequent first, or the dtype of a plain model."""
    names = [placement.scheme.name for placement in artifact.linears.values()]
    if not names:
        kinds = [info.dtype for info in artifact.checkpoint.infos.values()]
        return max(set(kinds), key=kinds.count)
    return ", ".join(sorted(set(names), key=lambda name: (-names.count(name), name)))


def _pairs(rows: Sequence[Mapping[str, Any]], seed: int) -> list[dict[str, Any]]:
    """Each further candidate against the first: its divergence minus that one's, with bounds.

    Where one is known from below, it may be worse than it is told, and never better.
    """
    if len(rows) < 2:
        return []
    first, *others = (
        (row["name"], window_scores(row["windows"], name=row["name"])) for row in rows
    )
    found = []
    against = partial(differences, metrics=("mean_kld",), seed=seed, others=len(others) - 1)
    from_below = {row["name"] for row in rows if "logprobs_per_position" in row}
    for name, windows in others:
        difference = against(windows, first[1])["mean_kld"]
        worse = difference.lower > 0 and first[0] not in from_below
        better = difference.upper < 0 and name not in from_below
        verdict = "worse" if worse else "better" if better else "undecided"
        found.append({"name": name, "against": first[0], "verdict": verdict, **asdict(difference)})
    return found
