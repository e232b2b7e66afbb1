"""The evaluation, the same for every program.

Its dequantized weights stand in the float32 model, whose inputs are rounded as the scheme says:
those of a scheme of weights alone are exact.

    bits per weight = 8 * bytes of packed weights, scales and zero points
                      / weights of the quantized linears

Active bits count each linear by the share of it that a token reads, less than 1 of an expert's.

The metrics are those of quantflow.validating, of held-out windows, against the original model in
float32. Of a GGUF file that llama.cpp ran the logits are llama.cpp's, with its rounding of inputs,
and the bits are those of the whole file.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _watch import Failed
from safetensors.torch import load_file
from torch import Tensor, nn

from quantflow.core.affine import fake_quantize_input
from quantflow.core.scheme import TensorScheme
from quantflow.formats.compressed_tensors import tensor_names
from quantflow.models.load import Source, load_model, open_source
from quantflow.models.names import NameMap
from quantflow.models.open import graph_for
from quantflow.numerics.divergence import join, score
from quantflow.numerics.perplexity import logits_of
from quantflow.quantizing.mixed_precision.sensitivity import share_of
from quantflow.runtime.artifact import Inputs, open_artifact
from quantflow.validating.bootstrap import bootstrap

NOT_WEIGHTS = ("weight_shape", "input_scale", "input_global_scale", "input_zero_point")


@dataclass(frozen=True, kw_only=True, eq=False)
class Input:
    """How the input of a linear is rounded; `scale` [1] and `zero_point` [1] of a static one."""

    scheme: TensorScheme
    scale: Tensor | None = None
    zero_point: Tensor | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class Candidate:
    """A quantized model as plain tensors.

    Attributes:
        weights: source name of each quantized linear -> its dequantized weight [O, I] float32.
        changed: source name -> the other tensors that are no longer the source's, such as smoothed
            norms, or that it lacks: a head that is tied to the embedding there.
        inputs: source name of a linear -> how its input is rounded; those that are not are left
            out.
        stored: bytes of packed weights, scales and zero points.
        each: the same of each linear; may be empty where all have as many bits per weight.
    """

    weights: Mapping[str, Tensor]
    changed: Mapping[str, Tensor] = field(default_factory=dict)
    inputs: Mapping[str, Input] = field(default_factory=dict)
    stored: int
    each: Mapping[str, int] = field(default_factory=dict)

    @property
    def bits(self) -> float:
        """Bits per weight of the quantized linears."""
        return bits_per_weight(self.stored, [weight.numel() for weight in self.weights.values()])

    def active_bits(self, shares: Mapping[str, float]) -> float:
        """Bits per weight that a token reads.

        Args:
            shares: source name of a linear -> share of it that a token reads, on average.
        """
        if not self.each:
            return self.bits
        stored = sum(size * shares[name] for name, size in self.each.items())
        return bits_per_weight(
            stored, [weight.numel() * shares[name] for name, weight in self.weights.items()]
        )


def bits_per_weight(stored: float, counts: Sequence[float]) -> float:
    """Return the bits of `stored` bytes for each of so many weights."""
    return 8 * stored / sum(counts)


def of_artifact(folder: Path, source: Source, *, inputs: Inputs) -> Candidate:
    """Read an artifact of quantflow.

    Args:
        folder: of the artifact.
        source: the original.
        inputs: those that the scheme leaves alone: `stored` are exact, `usual` are rounded in
            groups where export found that cheap, as the artifact runs by default.
    """
    artifact = open_artifact(folder, backend="reference", inputs=inputs)
    weights, entering, each = {}, {}, {}
    for name, placement in artifact.linears.items():
        linear = artifact.decode(name)
        weights[name] = linear.weight.dequantize()
        if linear.scheme.input is not None:
            entering[name] = Input(
                scheme=linear.scheme.input,
                scale=linear.input_scale,
                zero_point=linear.input_zero_point,
            )
        parts = [
            part for part in tensor_names(name, placement.scheme) if not part.endswith(NOT_WEIGHTS)
        ]
        each[name] = sum(artifact.checkpoint.infos[part].nbytes for part in parts)
    quantized = {f"{name}.weight" for name in weights}
    others = artifact.read([name for name in artifact.names if name not in quantized])
    before = source.read(set(others).intersection(source.names))
    changed = {
        name: tensor
        for name, tensor in others.items()
        if name not in before or not torch.equal(tensor, before[name])
    }
    return Candidate(
        weights=weights, changed=changed, inputs=entering, stored=sum(each.values()), each=each
    )


def of_peer(folder: Path) -> Candidate:
    """The output of a peer's script.

    It is weights.safetensors, and report.json with `bytes`, `each`, `linears`, `input`, `scales`.
    """
    tensors, report = (
        load_file(folder / "weights.safetensors"),
        json.loads((folder / "report.json").read_text()),
    )
    weights = {name: tensors.pop(f"{name}.weight") for name in report["linears"]}
    inputs = {}
    if report["input"] is not None:
        scheme = TensorScheme(**report["input"])
        static = {name: torch.tensor([scale]) for name, scale in report["scales"].items()}
        inputs = {name: Input(scheme=scheme, scale=static.get(name)) for name in weights}
        if scheme.measured and static.keys() != weights.keys():
            raise Failed(f"{folder}: static inputs, {len(static)} scales of {len(weights)} linears")
    return Candidate(
        weights=weights,
        changed=tensors,
        inputs=inputs,
        stored=report["bytes"],
        each=report["each"],
    )


class Judge:
    """Scores of candidates of one model.

    It keeps the original's logits, float32 [S, V] for every window.

    Attributes:
        source: the original.
        shares: source name of a linear -> share of it that a token reads, on average.
    """

    def __init__(self, model: Path, windows: Sequence[Tensor]) -> None:
        """Run the original model over the windows, int64 [S] each."""
        self.source, self._windows = open_source(model), windows
        logits = logits_of(load_model(self.source, dtype=torch.float32))
        self._baseline = [logits(window) for window in windows]
        layers = graph_for(self.source.config).layers
        self.shares = {name: share_of(layer, name) for layer in layers for name in layer.linears}

    def score(self, candidate: Candidate) -> dict[str, float]:
        """Return ppl_ratio, mean_kld and kld_p999 in nats, top1_agreement.

        Raises:
            Failed: a linear of the decoder layers that the candidate leaves out, or a weight of
                another shape.
        """
        if missing := sorted(set(graph_for(self.source.config).linears) - candidate.weights.keys()):
            raise Failed(
                f"{missing[0]}: not quantized, so bits would not be comparable ({len(missing)} "
                "such linears)"
            )
        model = load_model(self.source, dtype=torch.float32)
        put_(model, candidate)
        return self.score_logits(map(logits_of(model), self._windows))

    def score_file(self, folder: Path) -> tuple[float, dict[str, float]]:
        """Bits per element of a file that llama.cpp ran, and metrics of its logits.

        Args:
            folder: logits.f32, float32 [V] for each token of each window, and file.json:
                `vocabulary`, `bytes`, `elements`.

        Raises:
            Failed: logits of another number of tokens, or of another vocabulary.
        """
        report, path = json.loads((folder / "file.json").read_text()), folder / "logits.f32"
        size, tokens = report["vocabulary"], sum(map(len, self._windows))
        if path.stat().st_size != 4 * size * tokens or size != self._baseline[0].shape[1]:
            raise Failed(
                f"{path}: {path.stat().st_size} bytes, {tokens} tokens of "
                f"{self._baseline[0].shape[1]} logits were wanted "
                f"(llama.cpp has {size} in its vocabulary)"
            )
        logits = np.memmap(path, dtype="<f4", mode="r", shape=(tokens, size))

        def windows() -> Iterator[Tensor]:
            start = 0
            for window in self._windows:
                yield torch.from_numpy(np.array(logits[start : start + len(window)]))
                start += len(window)

        return bits_per_weight(report["bytes"], [report["elements"]]), self.score_logits(windows())

    def score_logits(self, logits: Iterable[Tensor]) -> dict[str, float]:
        """Return the metrics of logits, float32 [S, V] for every window."""
        windows = zip(self._baseline, logits, self._windows, strict=True)
        comparison = join(score(known, found, window) for known, found, window in windows)
        found = bootstrap(comparison, generator=torch.Generator().manual_seed(0), resamples=1)
        return {name: bounds.value for name, bounds in found.items()}


def put_(model: nn.Module, candidate: Candidate) -> None:
    """Give a model a candidate's weights, and its linears the hooks that round what enters them.

    Raises:
        Failed: a weight of another shape.
    """
    names = NameMap(model)  # type: ignore[arg-type]
    head: Any = model.get_output_embeddings()  # type: ignore[operator]
    if {"lm_head.weight", "embed_out.weight"} & candidate.changed.keys():
        head.weight = nn.Parameter(head.weight.detach().clone())  # no longer the embedding's
    for name, tensor in {
        **{f"{key}.weight": value for key, value in candidate.weights.items()},
        **candidate.changed,
    }.items():
        parameter = model.get_parameter(names.module_name(name))
        if parameter.shape != tensor.shape:
            raise Failed(f"{name}: {list(tensor.shape)}, the model has {list(parameter.shape)}")
        parameter.data.copy_(tensor)
    for name, entering in candidate.inputs.items():
        module = model.get_submodule(names.module_name(f"{name}.weight").removesuffix(".weight"))
        module.register_forward_pre_hook(partial(_rounded, entering))


def _rounded(entering: Input, _module: nn.Module, arguments: tuple[Tensor]) -> tuple[Tensor]:
    return (
        fake_quantize_input(arguments[0], entering.scheme, entering.scale, entering.zero_point),
    )
