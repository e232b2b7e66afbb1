"""The layers of one artifact where the model runs: canary and calibration text pass layer by layer.

Each layer is quantized (quantflow/quantizing/layer.py) or read back. Its file is written with the
hash of the canary's hidden state behind it, and the hidden states that enter the next layer are
kept. So a run that was stopped goes on at its layer.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from quantflow import process_memory
from quantflow.algorithms import ALGORITHMS
from quantflow.core.device import HOST, Device, fetched
from quantflow.core.parallel import Workers
from quantflow.distributed.team import Team
from quantflow.errors import StatisticsError
from quantflow.files import disk
from quantflow.files.canonical import canonical_json, digest_of
from quantflow.files.safetensors_header import read_header
from quantflow.measuring.record import Measurement
from quantflow.models import layer_store
from quantflow.models.capture import LayerStream, State
from quantflow.models.graph import Graph, Layer, text_config
from quantflow.models.hidden import HiddenStates
from quantflow.models.hooks import KVRounder
from quantflow.models.identity import CANARY_TOKENS, tensor_hash
from quantflow.models.load import Source
from quantflow.models.parameters import materialize_
from quantflow.models.reading import read_tensor
from quantflow.numerics.output_errors import unchanged
from quantflow.observers.hessian import HESSIAN_SUM
from quantflow.planning.plan import Plan
from quantflow.planning.recipe import Quantize
from quantflow.planning.resources import Allowance
from quantflow.progress import Progress
from quantflow.quantizing.cache_scales import kv_record, kv_scales_of, kv_tensors
from quantflow.quantizing.head_file import bring_up_to_date, read_head
from quantflow.quantizing.layer import FORMAT, QuantizedLayer, install_all, quantize_layer
from quantflow.quantizing.open_layer import Execution, LayerMeasurement, LayerText, OpenLayer
from quantflow.quantizing.rotated import Rotated
from quantflow.quantizing.rotation import prove_rotation, rotated_source, write_outside
from quantflow.quantizing.shards.share import CardShare, owners_of, sliced
from quantflow.quantizing.smoothing import is_factor
from quantflow.quantizing.static_inputs import gradient_sum, input_statistics
from quantflow.quantizing.undercalibrated import routed_tokens
from quantflow.units import size

# the folder, below that of the layers, of what leaves the last layer of the original model
ORIGINAL = "original"


@dataclass(frozen=True, kw_only=True)
class Forward:
    """The pass of the text through all layers, which quantizes each of them.

    Attributes:
        output: the stage's folder.
        folder: the folder of the layers' files: the stage's, or another where tuning finishes them.
        key: digest of everything that the result depends on.
        seed: seed of the canary's tokens where there is no measurement.
        workers: threads that run sequences and linears, where the device is the CPU.
        host_workers: threads for everything that is computed in host memory.
        share: the part of each tensor that is written.
        team: the cards that share the work; each has the whole layer.
        device: the device that runs layers, and computes from their weights and inputs.
        dtype: dtype in which the calibration text runs; the canary runs in float32.
        resident: whether hidden states stay on the device between layers.
    """

    output: Path
    folder: Path
    entry: Quantize
    plan: Plan
    source: Source
    graph: Graph
    measurement: Measurement | None
    key: str
    seed: int
    progress: Progress
    workers: Workers
    host_workers: Workers
    allowance: Allowance
    share: CardShare
    team: Team
    device: Device = HOST
    dtype: torch.dtype = torch.float32
    resident: bool = False

    def layers(self) -> None:
        """Bring every layer's file up to date; canary and text pass through the model."""
        source = rotated_source(self.source, self.graph, self.plan)
        tokens = canary_tokens(self.source, self.measurement, self.seed)
        if isinstance(source, Rotated):
            prove_rotation(self.source, source, self.graph, tokens)
            write_outside(self.output, source)
            for name in sorted(set(source.outside) - set(self.source.checkpoint.infos)):
                self.progress.say(
                    f"quantize {self.plan.name}: {name}, tied to the embedding before, is a tensor "
                    f"of its own: {size(source.info(name).nbytes)} more"
                )
        bring_up_to_date(
            self.output,
            self.plan,
            self.source.checkpoint,
            key=self.key,
            workers=self.host_workers,
            progress=self.progress,
        )
        stream = LayerStream(source, self.graph, device=self.device)
        # The canary is last, so that the others can go on before the layer is quantized. Refitting
        # and learned rounding need the text twice: after the original layers, and after the
        # quantized ones.
        text = self.team.mine(self._calibration)
        sequences = [*text, *(text if self.plan.twice else ()), tokens]
        opened = partial(
            HiddenStates,
            len(sequences),
            folder=layer_store.scratch(self.output),
            device=self.device,
            resident=self.resident,
        )
        start, hidden = layer_store.restart_together(
            self.folder, self.key, self.graph, opened=opened, span=self.team.span
        )
        text_stream = self._text_stream(stream)
        states = (
            stream.begin(sequences, hidden=hidden)
            if text_stream is stream
            else [
                *text_stream.begin(sequences[:-1], hidden=hidden),
                *stream.begin(sequences[-1:], hidden=hidden, first=len(sequences) - 1),
            ]
        )
        if not hidden.restored:
            hidden.commit(0, key=self.key, settled=self.team.wait)
        original = self.original()
        rest = self.graph.layers[start:]
        stage = f"quantize {self.plan.name}"
        last = states[-1].hidden
        steps = self.progress.steps(
            rest,
            stage=stage,
            unit="layer",
            before=start,
            samples=len(self._calibration),
            nbytes=self._bytes,
        )
        for layer in steps:
            process_memory.give_back_holes()
            with (
                stream.layer(layer.index, as_stored=as_stored(self.plan, layer)) as module,
                linears_restored(module),
            ):
                last = self._layer(
                    stream, text_stream, source, module, layer, states, original=original
                )
            if layer is not self.graph.layers[-1]:
                hidden.commit(layer.index + 1, key=self.key, settled=self.team.wait)
        hidden.close()
        process_memory.give_back_holes()
        if self.folder == self.output:
            write_canary(self.output, self.plan, stream, self.measurement, tokens=tokens, last=last)

    def original(self) -> HiddenStates | None:
        """The hidden states after the original model's last layer; None if none pass here.

        They are restored from disk, or still empty for the last layer to fill.
        """
        if self.plan.tune is None or quantized_inputs(self.entry):
            return None
        states = HiddenStates(
            len(self._calibration), folder=self.folder / ORIGINAL, device=self.device
        )
        states.restore(len(self.graph.layers), key=self.key)
        return states

    def _text_stream(self, stream: LayerStream) -> LayerStream:
        """The model in the dtype of the calibration text; `stream` where that is its own."""
        if self.dtype == stream.dtype:
            return stream
        return LayerStream(stream.weights, self.graph, dtype=self.dtype, device=self.device)

    def _layer(
        self,
        stream: LayerStream,
        text_stream: LayerStream,
        source: Source | Rotated,
        module: nn.Module,
        layer: Layer,
        states: Sequence[State],
        *,
        original: HiddenStates | None,
    ) -> Tensor:
        """Quantize a layer, or read it back, and advance the hidden states.

        Behind the last layer the calibration text's hidden states are put into `original`, where it
        does not have them.

        Returns:
            The canary's hidden state, [1, S, H].
        """
        twice = self.plan.twice
        *calibration, canary = states
        again = calibration[len(calibration) // 2 :] if twice else []
        calibration = calibration[: len(calibration) - len(again)]
        path = layer_store.layer_path(self.folder, layer.index)
        layer_key = digest_of([self.key, layer.index])
        # A card's part does not make the layer; cards that have it make it again together, to the
        # same bytes.
        kept = self.team.world == 1 and layer_store.finished(path, layer_key) is not None
        kv_scales = kv_scales_of(self.measurement, layer, self.plan.kv_cache)
        cache = (
            None if kv_scales is None else KVRounder({layer.index: kv_scales.to(self.device.kind)})
        )
        more = layer is not self.graph.layers[-1]
        # Behind the last layer nothing needs the text but tuning, which compares with `original`.
        keeps = not more and original is not None and not original.restored
        # The text goes on from the original layer's outputs, so it runs before the linears change.
        originals = (more and not quantized_inputs(self.entry)) or keeps
        quantized: QuantizedLayer | None = None
        if kept:
            if originals:
                with text_stream.beside(layer.index, module) as other:
                    text_stream.advance(other, calibration, workers=self.workers)
            read_back(module, layer, self.plan, path, device=self.device)
        else:
            quantized = quantize_layer(
                OpenLayer(stream=stream, source=source, module=module, layer=layer, plan=self.plan),
                LayerText(
                    canary=canary,
                    states=calibration,
                    again=again,
                    tokens=[len(sequence) for sequence in self._calibration],
                    keep_outputs=originals or self.plan.learned is not None,
                    stream=text_stream,
                    cache=cache,
                ),
                measured=self._measured(layer),
                execution=Execution(
                    workers=self.workers,
                    host_workers=self.host_workers,
                    ahead=self.allowance.in_flight,
                    progress=self.progress,
                    team=replace(self.team, owners=owners_of(layer, cards=self.team.world)),
                ),
            )
        if keeps and original is not None:
            for state in calibration:
                original.put(state.index, state.hidden)
            original.commit(layer.index + 1, key=self.key)
        output = stream.run(module, canary, cache=cache)
        if quantized is not None:
            record = {
                **quantized.record(),
                **kv_record(self.measurement, layer, self.plan.kv_cache),
            }
            record |= {
                "key": layer_key,
                "canary": tensor_hash(self.device.fetch(output)),
            } | self.share.record(layer)
            whole = {**quantized.tensors, **kv_tensors(layer, kv_scales)}
            tensors = sliced(whole, layer.linears, self.plan.schemes, self.share)
            if self.folder != self.output:  # tuning smooths the original layer with them
                tensors |= fetched(quantized.factors, self.device)
            layer_store.write_layer(path, tensors, record)
        if more:
            if twice or not originals:
                self.progress.doing("through the quantized layer")
                stream.advance(
                    module, again if twice else calibration, cache=cache, workers=self.workers
                )
            canary.store.put(canary.index, output)
        return output

    def _measured(self, layer: Layer) -> LayerMeasurement:
        """The measurement's share of a layer; nothing is measured of a rotated model's inputs."""
        if self.measurement is None:
            return LayerMeasurement()
        rotates = self.plan.rotation is not None
        statistics = {} if rotates else input_statistics(self.measurement, layer)
        # Hessians are accumulated here, those that were measured are not read
        if not self.device.is_host:
            statistics = {
                name: {
                    key: self.device.put(value)
                    for key, value in of.items()
                    if key != HESSIAN_SUM.name
                }
                for name, of in statistics.items()
            }
        return LayerMeasurement(
            statistics=statistics,
            routed=routed_tokens(self.measurement, layer),
            fed=self.plan.fed if rotates else self.measurement.meta.get("experts"),
            gradient=partial(gradient_sum, self.measurement),
        )

    @property
    def _calibration(self) -> Sequence[Tensor]:
        """The sequences that run through the layers, those of every card."""
        return () if self.measurement is None else self.plan.text(self.measurement.sequences)

    def _bytes(self, layer: Layer) -> int:
        prefix = f"{layer.prefix}."
        return sum(
            info.nbytes
            for name, info in self.source.checkpoint.infos.items()
            if name.startswith(prefix)
        )


def as_stored(plan: Plan, layer: Layer) -> bool:
    """Whether a layer's linears may be multiplied as they are stored while it is quantized.

    Transforms change weights, in float32. A linear that stays as it is runs in the artifact as any
    other module does, which is another order of sums than that of `in_parts`, and the canary is to
    be the artifact's.
    """
    return not plan.transforms and all(plan.schemes[name] is not None for name in layer.linears)


@torch.no_grad()
def write_canary(
    output: Path,
    plan: Plan,
    stream: LayerStream,
    measurement: Measurement | None,
    *,
    tokens: Tensor,
    last: Tensor,
) -> None:
    """Write the artifact's proof from its finished layers: tokens, their logits, layers' hashes.

    Args:
        output: the stage's folder.
        plan: the artifact's plan.
        stream: the model.
        measurement: the measurement that the layers were calibrated by.
        tokens: token ids [S].
        last: hidden state after the last layer, [1, S, H].

    Raises:
        StatisticsError: all linears are those of plain round to nearest.
    """
    with stream.head(read_head(output, plan.head)):
        logits = stream.device.fetch(stream.finish(last))
    layer_store.save(output / "canary.safetensors", {"tokens": tokens, "logits": logits})
    records = [layer_store.record(output, layer.index) for layer in stream.graph.layers]
    refuse_unchanged(plan, records, measurement)
    canary = {"layers": [record["canary"] for record in records], "logits": tensor_hash(logits)}
    disk.write_atomic(output / "canary.json", canonical_json(canary))


def refuse_unchanged(
    plan: Plan, records: Sequence[Mapping[str, Any]], measurement: Measurement | None
) -> None:
    """Refuse layers that a calibrated algorithm left exactly as plain round to nearest leaves them.

    One linear may be so: a small one, or one of 8 bits. If all are, the statistics said nothing,
    and whoever chose the algorithm over rtn has to know. The layers' records decide, so a resumed
    run and one that was not stopped say the same. Linears that a policy for experts rounds to
    nearest do not count.

    Raises:
        StatisticsError: all are; names the calibration and the number of linears.
    """
    if measurement is None or (
        HESSIAN_SUM.name not in ALGORITHMS[plan.algorithm].NEEDS and not plan.learns
    ):
        return
    decisions = {name: of for record in records for name, of in record["decisions"].items()}
    if unchanged(decisions):
        counts = measurement.meta["counts"]
        calibration = measurement.meta["calibration"]["hash"][:16]
        compared = sum("same_as_rtn" in of for of in decisions.values())
        raise StatisticsError(
            f"quantize {plan.name}: {plan.method} with calibration {calibration} "
            f"({counts['samples']} sequences, "
            f"{counts['tokens']} tokens) changed nothing: all {compared} linears are what rtn "
            "makes of them",
            f"{'give it more iterations, ' if plan.learned is not None else ''}look at the text "
            "with `quantflow calibration "
            "inspect` and measure again, or use --algorithm rtn",
        )


def quantized_inputs(entry: Quantize) -> bool:
    """Whether later layers are calibrated on the quantized layers' outputs, not the original's.

    The original by default. On the example model, with 65,536 calibration tokens and 16,384
    held-out ones, the mean KLD of GPTQ is 0.00996 on original and 0.00998 on quantized inputs
    (W4A16), 0.00848 and 0.00861 (W4A16_ASYM); and original inputs need one pass of the text through
    each layer, quantized ones two.
    """
    return bool(entry.quantized_inputs)


def canary_tokens(source: Source, measurement: Measurement | None, seed: int) -> Tensor:
    """The canary's token ids [S]: the head of the first calibration sequence, or seeded ones."""
    if measurement is not None and measurement.sequences:
        return measurement.sequences[0][:CANARY_TOKENS]
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(
        text_config(source.config).vocab_size, (CANARY_TOKENS,), generator=generator
    )


def read_back(
    module: nn.Module, layer: Layer, plan: Plan, path: Path, *, device: Device = HOST
) -> None:
    """Put a finished layer's tensors into its module, which is on the device."""
    infos, _ = read_header(path)
    tensors = {name: read_tensor(path, info) for name, info in infos.items() if not is_factor(name)}
    parts = {
        part
        for name, scheme in plan.schemes.items()
        if scheme is not None
        for part in FORMAT.tensor_names(name, scheme)
    }
    of_cache = set() if layer.attention is None else set(FORMAT.kv_tensor_names(layer.attention))
    rest = {
        layer.relative(name): device.put(tensor)
        for name, tensor in tensors.items()
        if name not in parts | of_cache
    }
    # Biases first: a quantized linear that is put in place keeps the bias that is there.
    materialize_(module, rest, dtype=torch.float32)
    install_all(module, layer, plan, tensors, device=device)


@contextmanager
def linears_restored(module: nn.Module) -> Iterator[None]:
    """Put back every linear that was replaced inside; the model's skeleton is used again."""
    originals = {
        name: child for name, child in module.named_modules() if isinstance(child, nn.Linear)
    }
    try:
        yield
    finally:
        for name, child in originals.items():
            module.set_submodule(name, child)
