"""The divergence of an unfinished quantized model from the original, on calibration text.

Both models run layer by layer beside each other, so a layer of the source is read once: as it is
for the original, then with its quantized linears in place; each has its own head where that is
quantized too. The text is the head of the calibration set, which gptq has fitted the weights to;
the cost on other text is validate's to say.
"""

from functools import partial
from pathlib import Path

from torch import Tensor

from quantflow.core.device import HOST, Device
from quantflow.core.parallel import Workers
from quantflow.files import disk
from quantflow.measuring.record import Measurement
from quantflow.models import layer_store
from quantflow.models.capture import LayerStream
from quantflow.models.graph import Graph
from quantflow.models.hidden import HiddenStates
from quantflow.models.hooks import KVRounder
from quantflow.models.load import Source
from quantflow.models.parameters import release_
from quantflow.numerics.divergence import token_kld
from quantflow.planning.plan import Plan
from quantflow.planning.recipe import Resources
from quantflow.planning.resources import allow_validate
from quantflow.planning.sizes import model_size
from quantflow.process_memory import give_back_holes
from quantflow.progress import Progress
from quantflow.quantizing.cache_scales import kv_scales_of
from quantflow.quantizing.head_file import read_head
from quantflow.quantizing.layer_by_layer import linears_restored, read_back
from quantflow.quantizing.mixed_precision import choose, chosen_mixture
from quantflow.quantizing.mixed_precision.chosen_mixture import ChosenMixture

TOKENS = 16384  # that are compared at most, in whole sequences
MODELS = ("original", "quantized")


def settle(
    folder: Path,
    mixture: ChosenMixture,
    plan: Plan,
    *,
    model: Path,
    source: Source,
    graph: Graph,
    measurement: Measurement,
    key: str,
    revision: str | None,
    seed: int,
    resources: Resources,
    progress: Progress,
    device: Device = HOST,
) -> bool:
    """Whether the folder's schemes cost no more than allowed; then the choice is written there.

    Args:
        folder: the stage's folder, every layer finished.
        mixture: the candidates; its rounds are kept in the folder.
        plan: plan with the chosen schemes.
        model: the source folder.
        source: the model.
        graph: names of its linears.
        measurement: measurement whose sequences the models are compared on.
        key: digest of the layers' inputs.
        revision: revision of the source, for the recipe that is written.
        seed: seed of the run, for that recipe.
        resources: memory and disk.
        progress: listener for each layer.
        device: device of both models.
    """
    after = mixture
    if not mixture.settled:
        sequences = _head(measurement.sequences)
        measured = divergence(
            folder,
            plan,
            source=source,
            graph=graph,
            sequences=sequences,
            key=key,
            resources=resources,
            progress=progress,
            cache=_rounder(measurement, plan, graph, device),
            device=device,
        )
        after = mixture.with_round(measured)
        chosen_mixture.write(folder, after)
        progress.say(
            f"quantize {mixture.entry.name}: mean KLD {measured:.4g}, predicted "
            f"{mixture.ratio * mixture.predicted(mixture.picks):.4g}, on "
            f"{sum(map(len, sequences))} calibration tokens"
        )
    if after.settled:
        choose.tell(folder, after, model=model, revision=revision, seed=seed)
    return after.settled


def divergence(
    folder: Path,
    plan: Plan,
    *,
    source: Source,
    graph: Graph,
    sequences: list[Tensor],
    key: str,
    resources: Resources,
    progress: Progress,
    cache: KVRounder | None = None,
    device: Device = HOST,
) -> float:
    """The mean KL divergence of a folder's quantized layers from the original, nats per token.

    Args:
        folder: the stage's folder, every layer finished.
        plan: its plan.
        source: the original model.
        graph: names of its linears.
        sequences: token ids [S] of each sequence.
        key: digest of the layers' inputs.
        resources: memory and disk.
        progress: listener for each layer.
        cache: rounding of the quantized model's keys and values, where its cache is quantized too.
        device: device of both models.
    """
    scratch = folder.parent / f".{folder.name}.divergence"
    sizes = model_size(source.checkpoint.infos, source.config, graph)
    lengths = [len(sequence) for sequence in sequences]
    allowance = allow_validate(
        resources, sizes, lengths=lengths, folder=scratch, models=len(MODELS), head=plan.head
    )
    stream = LayerStream(source, graph, device=device)
    disk.remove_tree(scratch)
    hidden = {
        name: HiddenStates(len(sequences), folder=scratch / name, device=device) for name in MODELS
    }
    states = {name: stream.begin(sequences, hidden=hidden[name]) for name in MODELS}
    try:
        with Workers(allowance.workers if device.is_host else 1) as workers:
            for name in MODELS:
                hidden[name].commit(0, key=key)
            for layer in progress.steps(
                graph.layers, stage=f"measure {plan.name}", unit="layer", samples=len(sequences)
            ):
                give_back_holes()
                with stream.layer(layer.index) as module, linears_restored(module):
                    for name in MODELS:
                        if name == "quantized":
                            # both at once would be two layers
                            for linear in filter(plan.schemes.get, layer.linears):
                                release_(module.get_submodule(layer.relative(linear)), ["weight"])
                            read_back(
                                module,
                                layer,
                                plan,
                                layer_store.layer_path(folder, layer.index),
                                device=device,
                            )
                        stream.advance(
                            module,
                            states[name],
                            cache=cache if name == "quantized" else None,
                            workers=workers,
                        )
                        hidden[name].commit(layer.index + 1, key=key)
        total = 0.0
        head = read_head(folder, plan.head)
        with stream.head():
            logits = partial(_logits, stream, hidden)
            for number in range(len(sequences)):
                expected = logits("original", number)
                with stream.head(head):
                    total += float(token_kld(expected, logits("quantized", number)).sum())
        return total / sum(lengths)
    finally:
        for kept in hidden.values():
            kept.close()
        disk.remove_tree(scratch)


def _rounder(
    measurement: Measurement, plan: Plan, graph: Graph, device: Device
) -> KVRounder | None:
    found = {layer.index: kv_scales_of(measurement, layer, plan.kv_cache) for layer in graph.layers}
    scales = {
        index: scales.to(device.kind) for index, scales in found.items() if scales is not None
    }
    return KVRounder(scales) if scales else None


def _logits(stream: LayerStream, hidden: dict[str, HiddenStates], name: str, number: int) -> Tensor:
    return stream.finish(hidden[name].get(number))[0].float()  # [S, V]


def _head(sequences: list[Tensor]) -> list[Tensor]:
    """The first sequences, at least one, that have TOKENS tokens at most."""
    first = list(sequences[:1])
    left = TOKENS - len(sequences[0])
    for sequence in sequences[1:]:
        left -= len(sequence)
        if left < 0:
            break
        first.append(sequence)
    return first
