"""The cost of rounding inputs that an artifact's schemes leave alone, measured in export.

The source, the artifact and the artifact with rounded inputs
(`quantflow.core.scheme.with_rounded_inputs`) predict the canary's tokens. The manifest keeps two
mean divergences in nats, both over the whole vocabulary:

    kld              KL(artifact || artifact with rounded inputs)
    kld_of_artifact  KL(source || artifact)

A runtime rounds inputs where the first is a twentieth of the second or less
(`quantflow.files.manifest.rounds_inputs`): it multiplies integers then, for an error that does not
show beside that of the weights.
"""

import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quantflow.core.scheme import with_rounded_inputs
from quantflow.exporting.canary import rounder
from quantflow.files.safetensors_header import read_header
from quantflow.models.capture import LayerStream
from quantflow.models.graph import text_config
from quantflow.models.identity import CANARY_TOKENS
from quantflow.models.load import open_source
from quantflow.models.open import graph_for
from quantflow.models.reading import read_tensor
from quantflow.models.weights import Weights
from quantflow.numerics.divergence import token_kld
from quantflow.runtime.artifact import Artifact, Inputs, open_artifact


def on_canary(folder: Path, source: Path, quantized: Path) -> dict[str, Any] | None:
    """`cost_of_rounding` on the canary, whose logits are the artifact's: that has been proved.

    Args:
        folder: folder of the artifact.
        source: folder of the model.
        quantized: quantized folder of the artifact.
    """
    path = quantized / "canary.safetensors"
    infos, _ = read_header(path)
    return cost_of_rounding(
        folder,
        source,
        read_tensor(path, infos["tokens"]),
        logits=read_tensor(path, infos["logits"]),
    )


def on_seeded_tokens(folder: Path, source: Path) -> dict[str, Any] | None:
    """`cost_of_rounding` on as many random tokens as a canary has, where there is none."""
    vocabulary = text_config(open_source(source).config).vocab_size
    tokens = torch.randint(vocabulary, (CANARY_TOKENS,), generator=torch.Generator().manual_seed(0))
    return cost_of_rounding(folder, source, tokens)


def cost_of_rounding(
    folder: Path, source: Path, tokens: Tensor, *, logits: Tensor | None = None
) -> dict[str, Any] | None:
    """The manifest's `rounded_inputs`; one layer of one model is in memory at a time.

    Args:
        folder: folder of the artifact, whose files have been verified.
        source: folder of its source.
        tokens: token ids, int64 [S].
        logits: logits of the artifact, [1, S, V]; None computes them.

    Returns:
        None where no linear could have its inputs rounded, or a divergence is no number.
    """
    artifact = _open(folder, "stored")
    if all(
        with_rounded_inputs(placement.scheme) is None for placement in artifact.linears.values()
    ):
        return None
    logits = _logits(artifact, tokens) if logits is None else logits
    rounded, original = (
        _logits(_open(folder, "rounded"), tokens),
        _logits(open_source(source), tokens),
    )
    pairs = {"kld": (logits, rounded), "kld_of_artifact": (original, logits)}
    divergences = {
        name: float(token_kld(left[0], right[0]).mean()) for name, (left, right) in pairs.items()
    }
    return (
        {**divergences, "tokens": len(tokens)}
        if all(map(math.isfinite, divergences.values()))
        else None
    )


def _open(folder: Path, inputs: Inputs) -> Artifact:
    return open_artifact(
        folder, backend="reference", dtype=torch.float32, verify=False, inputs=inputs
    )


def _logits(weights: Weights, tokens: Tensor) -> Tensor:
    """The logits of a model, [1, S, V] float32."""
    cache = rounder(weights) if isinstance(weights, Artifact) else None
    stream = LayerStream(weights, graph := graph_for(weights.config), cache=cache)
    states = stream.begin([tokens])
    for layer in graph.layers:
        with stream.layer(layer.index) as module:
            stream.advance(module, states)
    return stream.finish(states[0].hidden).float()
