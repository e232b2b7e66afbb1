"""The places where an artifact loses, and a mend of them, for `validate --diagnose`.

    {"probes": {...} or null, "note", "mend": {...} or null,
     "positions", "kinds", "frequency": [{"name", "tokens", "mean_kld", "share", "top1_agreement"}],
     "windows": [{"window", "mean_kld", "position", "kld", "prompt", "baseline", "artifact"}]}

It is an option of validate, no verb of its own, because it reads what validate has at hand (the
windows, every token's divergence, both models open) and belongs on the same page. It is asked for
by a number of probes, no number of seconds: the same inputs give the same validation.json on any
machine. Progress says how long it will take.

quantflow.validating.probes and .mend have the records of `probes` and `mend`.

Breakdowns are of every predicted token of the text. Windows are those with the largest mean
divergence; `prompt` is the end of the window's tokens before the one that diverges most, and both
models continue all of these greedily, on the runtime as `generate` runs it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from quantflow import process_memory
from quantflow.exporting.canary import rounder
from quantflow.models.capture import LayerStream
from quantflow.models.load import Source
from quantflow.models.open import graph_for
from quantflow.models.tokenizer import load_tokenizer
from quantflow.numerics.divergence import Comparison
from quantflow.planning.finished_plan import head_from
from quantflow.planning.recipe import Resources, Validate
from quantflow.planning.resources import allow_validate, memory_limit
from quantflow.planning.sizes import ModelSize, model_size
from quantflow.progress import Progress
from quantflow.runtime.artifact import Artifact
from quantflow.runtime.decoding import generate
from quantflow.runtime.load import load
from quantflow.validating import breakdown, mend, probes
from quantflow.validating.layerwise import BASELINE
from quantflow.validating.swaps import CANDIDATE, Swap, Swapping
from quantflow.validating.task_scores import beyond_memory

WORST = 10  # windows that are continued
NEW_TOKENS = 24
SHOWN = 40  # tokens of a window before what is continued
SHARE = 2  # hidden states of probes take one part in so many of the memory that is left


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A validated artifact, as the comparison left it.

    Attributes:
        artifact: the artifact, opened as it is judged.
        source: the model of the artifact.
        sequences: the windows.
        comparison: comparison of the artifact with the source over all windows.
        options: options of the validation; `diagnose` is the largest number of probes.
        seed: seed that the recipe of the mend names.
        resources: the limits.
        kept: file of finished probes; whoever made its folder removes it.
        key: digest of all that goes into the validation.
    """

    artifact: Artifact
    source: Source
    sequences: Sequence[Tensor]
    comparison: Comparison
    options: Validate
    seed: int
    resources: Resources
    kept: Path
    key: str

    @property
    def folders(self) -> dict[str, Path]:
        """The folders of both models."""
        return {
            BASELINE: self.source.checkpoint.folder,
            "artifact": self.artifact.checkpoint.folder,
        }


def diagnose(subject: Subject, progress: Progress) -> tuple[dict[str, Any], str | None]:
    """The record, see the module's head, and the recipe of the mend where there is one.

    Raises:
        InputError: a hidden state or logits that are not finite.
    """
    tokenizer = load_tokenizer(subject.source.checkpoint.folder)
    comparison, sequences = subject.comparison, subject.sequences
    record: dict[str, Any] = {
        "positions": _plain(breakdown.by_position(comparison)),
        "kinds": _plain(breakdown.by_kind(comparison, sequences, tokenizer)),
        "frequency": _plain(breakdown.by_frequency(comparison, sequences)),
    }
    probed, recipe = _probed(subject, progress)
    windows, note = _windows(subject, tokenizer, progress)
    notes = [text for text in (probed.pop("note"), note) if text is not None]
    return {**record, **probed, "windows": windows, "note": "; ".join(notes) or None}, recipe


def _probed(subject: Subject, progress: Progress) -> tuple[dict[str, Any], str | None]:
    """The record of probes and mend, and the mend's recipe."""
    artifact, source = subject.artifact, subject.source
    graph, manifest = graph_for(source.config), artifact.manifest
    streams = {
        BASELINE: LayerStream(source, graph),
        CANDIDATE: LayerStream(artifact, graph_for(artifact.config), cache=rounder(artifact)),
    }
    chosen = probes.sampled(subject.sequences)
    sample = [subject.sequences[number] for number in chosen]
    first = [stream.begin(sample[:1])[0].hidden for stream in streams.values()]
    if not torch.equal(*first):
        note = (
            "the hidden states are rotated, so no linear of the artifact goes into the source "
            "alone: "
            "no probes were run"
        )
        return {"probes": None, "mend": None, "note": note}, None
    sizes = model_size(source.checkpoint.infos, source.config, graph)
    allowance = allow_validate(
        subject.resources,
        sizes,
        lengths=[len(window) for window in sample],
        models=len(streams),
        folder=subject.kept.parent,
        head=head_from(manifest["recipe"]["resolved"]),
    )
    swapping = Swapping(
        streams=streams,
        sequences=sample,
        stage=f"diagnose {manifest['recipe']['name']}",
        progress=progress,
        workers=allowance.workers,
        at_once=_at_once(sizes, tokens=sum(map(len, sample)), resources=subject.resources),
    )
    prober = probes.Prober(swapping=swapping, path=subject.kept, key=subject.key)
    units = probes.units_of(
        graph, artifact.linears.keys(), folded=_folded(manifest), head=artifact.head
    )
    count = int(subject.options.diagnose or 0)
    progress.say(
        f"diagnose {manifest['recipe']['name']}: {min(count, 2 * len(units) + probes.FOR_MENDS)} "
        "probes at most, "
        f"{len(sample)} windows, {sum(map(len, sample)):,} tokens"
    )
    whole = prober.klds({CANDIDATE: Swap(base=CANDIDATE, taken=())})[CANDIDATE]
    probed = probes.run_probes(prober, units, whole=whole, count=count)
    to_mend = mend.ArtifactToMend(
        manifest=manifest,
        source=source,
        graph=graph,
        units=units,
        probed=probed,
        sampled_kld=whole,
        kld=float(subject.comparison.kld.mean()),
    )
    mended = mend.cheapest(to_mend, prober, model=str(source.checkpoint.folder), seed=subject.seed)
    tries = 0 if mended is None else len(mended[0]["tried"])
    record = {
        "tokens": sum(map(len, sample)),
        "windows": chosen,
        "mean_kld": whole,
        "asked": count,
        "run": 2 * len(probed) + tries,
        "units": [each.record() for each in probed],
        "left_out": len(units) - len(probed),
    }
    remedy, recipe = mended if mended is not None else (None, None)
    return {"probes": record, "mend": remedy, "note": None}, recipe


def _folded(manifest: Mapping[str, Any]) -> set[str]:
    """The linears whose inputs were smoothed."""
    decisions = [pair for layer in manifest["layers"] or () for pair in layer["decisions"].items()]
    return {
        name
        for name, decided in decisions
        if any(isinstance(value, Mapping) and probes.FACTOR in value for value in decided.values())
    }


def _at_once(sizes: ModelSize, *, tokens: int, resources: Resources) -> int:
    """The number of swaps whose hidden states fit into memory, at least one.

    One layer and the head of both models, in float32, are in memory beside them.
    """
    resident = process_memory.usage().resident
    limit, _ = memory_limit(resources, resident=resident)
    left = limit - resident - 2 * 4 * (sizes.layer.elements + sizes.head[0])
    return max(1, left // SHARE // (4 * tokens * sizes.hidden))


def _windows(
    subject: Subject, tokenizer: PreTrainedTokenizerBase, progress: Progress
) -> tuple[list[dict[str, Any]], str | None]:
    """The worst windows with both continuations, and the reason where there are none."""
    worst = breakdown.worst_windows(subject.comparison, WORST)
    by_window = torch.split(subject.comparison.kld, subject.comparison.lengths.tolist())
    prompts = [subject.sequences[index][: position + 1].tolist() for index, _, position in worst]
    records = [
        {
            "window": index,
            "mean_kld": mean,
            "position": position + 1,
            "kld": float(by_window[index][position]),
            "prompt": str(tokenizer.decode(prompt[-SHOWN:])),
        }
        for (index, mean, position), prompt in zip(worst, prompts, strict=True)
    ]
    for folder in subject.folders.values():
        reason = beyond_memory(folder, subject.resources)
        if reason is not None:
            return [
                {**record, BASELINE: None, "artifact": None} for record in records
            ], f"no continuations: {reason}"
    steps = progress.steps(
        [(name, number) for name in subject.folders for number in range(len(prompts))],
        stage="continue",
        unit="window",
    )
    for name, folder in subject.folders.items():
        loaded = load(
            folder,
            decoder="auto",
            exact=subject.options.exact,
            rounded_inputs=subject.options.rounded_inputs and name != BASELINE,
        )
        for prompt, record in zip(prompts, records, strict=True):
            next(steps)
            room = loaded.decoder.positions
            ids = prompt if room is None else prompt[-max(1, room - NEW_TOKENS) :]
            tokens = generate(
                loaded.decoder,
                torch.tensor([ids]),
                max_new_tokens=NEW_TOKENS,
                eos_token_id=loaded.eos_token_ids,
            )
            record[name] = str(tokenizer.decode(tokens[0, len(ids) :].tolist()))
        del loaded
    for _ in steps:  # ends the last one
        pass
    return records, None


def _plain(parts: Sequence[breakdown.TokenPart]) -> list[dict[str, Any]]:
    return [asdict(part) for part in parts]
