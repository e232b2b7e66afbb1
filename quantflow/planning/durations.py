"""The seconds that the stages will take, from rates that a probe of one layer measured."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from quantflow.algorithms import ALGORITHMS, BLOCK_ALGORITHMS, tune
from quantflow.numerics import output_blocks
from quantflow.observers import goes_back
from quantflow.observers.gradient import GradientObserver
from quantflow.planning.plan import Plan
from quantflow.planning.sizes import (
    FLOAT,
    ModelSize,
    elements_of,
    head_file_bytes,
    layer_bytes,
    mtp_file_bytes,
    outside_bytes,
)


@dataclass(frozen=True, kw_only=True)
class GptqSpeed:
    """Seconds of GPTQ for R rows of K columns, as three rates.

    Attributes:
        cubic: seconds per K^3, for the factor.
        linear: seconds per R K, for the columns.
        square: seconds per R K^2, for the columns.
    """

    cubic: float
    linear: float
    square: float

    def seconds(self, rows: int, columns: int) -> float:
        """Seconds of one worker."""
        return (
            self.cubic * columns**3 + self.linear * rows * columns + self.square * rows * columns**2
        )


@dataclass(frozen=True, kw_only=True)
class Speed:
    """Rates of one worker.

    Attributes:
        cores: workers in host memory.
        units: sequences, or groups of linears, that are under way at once where layers run: the
            cores, or 1 on a device.
        ahead: whether a layer is read while the one before it runs, as on a device.
        read, written, hashed: seconds per byte. A read ends where layers run; a write includes the
            wait for the disk.
        token: seconds of one token through one layer in float32, at the probe's sequence length.
        run: the same in the dtype in which measure and validate run layers.
        observed: observer -> seconds per element of an input.
        hessian: seconds per token and squared feature of a Hessian.
        narrow: artifact whose calibration text runs in bfloat16 -> its `token` and `hessian`.
        gradient: seconds per token and kept product of a sum of gradients.
        rounded: artifact -> seconds per weight, rounded to nearest and encoded.
        gptq: artifact -> rates of rounding with a Hessian; artifacts that need no Hessian are
            missing.
    """

    cores: int
    units: int
    ahead: bool
    read: float
    written: float
    hashed: float
    token: float
    run: float
    observed: Mapping[str, float]
    hessian: float
    gradient: float
    rounded: Mapping[str, float]
    gptq: Mapping[str, GptqSpeed]
    narrow: Mapping[str, tuple[float, float]] = field(default_factory=dict)

    def measure(
        self,
        model: ModelSize,
        lengths: Sequence[int],
        stats: Sequence[str],
        *,
        counts: bool = True,
    ) -> float:
        """Seconds of measure: it hashes the source, reads it, runs it, and observes every input."""
        hashing = self.hashed * model.stored / self.cores
        if not stats and not (model.sparse and counts):
            return hashing
        tokens = sum(lengths)
        features = sum(layer.features for layer in model.layers)
        # a backward runs each layer again, and its gradients take the products of two forwards
        passes = 4 if goes_back(stats) else 1
        running = passes * self.run * tokens * len(model.layers)
        running += (
            tokens
            * features
            * sum(self.observed[name] for name in stats if name != GradientObserver.NAME)
        )
        if GradientObserver.NAME in stats:
            products = sum(
                share * width * output_blocks.width(width)
                for layer in model.layers
                for (_, outputs, _), share in zip(layer.groups, layer.shares, strict=True)
                for width in outputs
            )
            running += tokens * self.gradient * products
        hidden = 2 * self.written * FLOAT * model.between * tokens * len(model.layers)
        return hashing + self._while_read(model, running / self.units) + hidden

    def write_text(self, model: ModelSize, tokens: int, *, dtype: torch.dtype) -> float:
        """Seconds in which the model writes so many tokens of calibration text in a dtype.

        Drawn one after the other, in batches, a token takes the time of two that a layer runs in a
        sequence in float32, and in bfloat16 of one: 32 sequences of SmolLM2 with 256 tokens are
        foretold 24 and 12 s, and took 20 and 14 (two cores of an AMD EPYC, Zen 5).
        """
        head = self.run * model.head[0] / max(layer.elements for layer in model.layers)
        token = self.run * len(model.layers) + head
        times = 2 if dtype == torch.float32 else 1
        return self._while_read(model, times * token * tokens / self.units)

    def quantize(self, model: ModelSize, plan: Plan, lengths: Sequence[int]) -> float:
        """Seconds of quantize, on the path that the plan takes."""
        head = 0 if plan.head is None else elements_of(model.infos[plan.head.tensor])
        for name in () if plan.mtp is None else plan.mtp.schemes:
            head += elements_of(model.infos[f"{name}.weight"])
        result = sum(layer_bytes(model, plan.schemes, kv_cache=plan.kv_cache))
        result += head_file_bytes(model, plan.head) + mtp_file_bytes(model, plan.mtp)
        writing = (self.written + self.hashed) * result
        if plan.file_to_file:
            weights = head + sum(layer.elements for layer in model.layers)
            return max(
                self.read * model.stored + self.rounded[plan.name] * weights / self.units, writing
            )
        tokens = sum(lengths)
        work = self.rounded[plan.name] * head
        rounds = 0.0
        rounding = self.gptq.get(plan.name)
        token, hessian = self.narrow.get(plan.name, (self.token, self.hessian))
        for layer in model.layers:
            for (names, outputs, k), share, turn in zip(
                layer.groups, layer.shares, layer.turns, strict=True
            ):
                rows = sum(
                    width
                    for name, width in zip(names, outputs, strict=True)
                    if plan.schemes[name] is not None
                )
                if rounding is not None:
                    rounds += rounding.seconds(rows, k)
                    # half of a matrix; where weights are refitted a whole one beside it, and of
                    # experts both beside the half
                    sums = {0: 3, 1: 1, 2: 4}[turn] if plan.refit else 1
                    work += sums * hessian * share * tokens * k * k
                else:
                    rounds += self.rounded[plan.name] * rows * k
        passes = 2 if plan.needs_text else 0  # before the layer is quantized, and after
        runs = passes * len(lengths)
        if plan.refit:
            # the original's once more to the layer's end; and both to each group, on the mean
            # through half of the layer; experts go together
            turns = model.layer.turns
            runs += len(lengths) * (1 + turns.count(0) + len({*turns} - {0}))
        if plan.learned is not None:
            options = {"iterations": plan.learned.iterations, "sequences": plan.learned.sequences}
            runs += BLOCK_ALGORITHMS[plan.method].runs(len(lengths), **options)
        if plan.tune is not None:
            tuned = tune.runs(len(lengths), steps=plan.tune.steps, sequences=plan.tune.batch)
            runs += tuned  # and the head: the original's logits, and the other's there and back
            work += (
                tuned
                * self.token
                * tokens
                / max(1, len(lengths))
                * model.head[0]
                / model.layer.elements
            )
        work += runs * token * tokens / max(1, len(lengths)) * len(model.layers)
        rounders = self.units if ALGORITHMS[plan.algorithm].ON_DEVICE else self.cores
        working = work / self.units + rounds / rounders
        # one read of all weights comes first: they are checked before a layer runs
        return self.read * model.stored + self._while_read(model, working) + writing

    def export(self, model: ModelSize, plan: Plan) -> float:
        """Seconds of export: copy what is not linked, hash, read all again for the proof."""
        outside = outside_bytes(model, plan.head, plan.mtp, rotated=plan.rotation is not None)
        result = outside + sum(layer_bytes(model, plan.schemes, kv_cache=plan.kv_cache))
        return self.written * outside + 2 * (self.hashed / self.cores + self.read) * result + PROOF

    def validate(self, model: ModelSize, lengths: Sequence[int]) -> float:
        """Seconds of validate: three models over every window, and their heads."""
        tokens = sum(lengths)
        head = self.run * model.head[0] / max(layer.elements for layer in model.layers)
        return 3 * self._while_read(
            model, (self.run * len(model.layers) + head) * tokens / self.units
        )

    def _while_read(self, model: ModelSize, working: float) -> float:
        """Seconds of reading all layers and working on them."""
        reading = self.read * model.stored
        return max(reading, working) if self.ahead else reading + working


PROOF = 5.0  # seconds that a fresh process takes to import what it needs
