"""Gated delta nets in the place of attention: their weights, and the states that they keep.

A token's queries, keys and values go through a short causal convolution. Each head of values then
has a state S, a matrix from keys to values, which every token changes in turn:

    S <- a S;    S <- S + k (b (v - S'k))';    out = S'q

a and b come from the hidden state; out goes through a norm and a gate. So a sequence keeps a state
of one size however long it is: S, and the last inputs of the convolution. Unlike keys and values, a
state is that of all tokens so far. It cannot be cropped to fewer, nor be shared by sequences that
only begin alike. decode.c computes the rule, token by token whatever comes in one step, so the
state after a token does not depend on the steps.

Lightning attention (MiniMax) keeps a state of the same kind by a simpler rule, without convolution
and scores. Queries, keys and values go through silu, and with h the head, counted from 1, of H, and
l the layer of L, from 0:

    S <- exp(-rate) S + k v';    out = S'q
    rate = 2^(-8 h / H) (1 - l / (L - 1 + 1e-5) + 1e-5)

One norm of all heads follows, and the sigmoid of a gate multiplies it. Sources: Yang,
Kautz and Hatamizadeh 2024, arXiv:2412.06464; Qwen3-Next's module in transformers, whose layer this
is; Qin et al. 2024, arXiv:2401.04658; MiniMax 2025, arXiv:2501.08313, and its module in
transformers.
"""

import ctypes
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quantflow.backends import native
from quantflow.models.architecture import Blueprint, Delta
from quantflow.runtime import operations
from quantflow.runtime.artifact import Artifact
from quantflow.runtime.operations import Projection
from quantflow.runtime.packed import Pack
from quantflow.runtime.projection import projection


@dataclass(frozen=True, kw_only=True, eq=False)
class DeltaNet:
    """The gated delta net of a layer.

    Attributes:
        sizes: its sizes.
        scores: from the hidden state to two numbers for each head of values, [N, 2 value_heads];
            to none in lightning attention.
        convolution: [kernel, channels] float32; None in lightning attention.
        rate, shift: how fast a head's state fades, [value_heads] float32; no shift in lightning
            attention.
        norm: [value_dim] float32, in lightning attention [value_heads * value_dim].
    """

    sizes: Delta
    scores: Projection
    convolution: Tensor | None
    rate: Tensor
    shift: Tensor | None
    norm: Tensor

    def structure(self, inputs: Tensor, states: Tensor, kept: list[Any]) -> ctypes.Structure:
        """The layer's part as decode.c reads it.

        Args:
            inputs: last inputs of the convolution, as `quantflow.runtime.kv_cache.DeltaStates` has
                them.
            states: states of the heads, as that has them.
            kept: what the structure points to is added.
        """
        sizes, fields = self.sizes, dict[str, Any]()
        if operations.in_c(self.scores):
            fields["scores"] = operations.structure_of(self.scores, kept)
        tensors = {
            "convolution": self.convolution,
            "rate": self.rate,
            "shift": self.shift,
            "norm": self.norm,
            "inputs": inputs,
            "states": states,
        }
        kept.append(tensors)
        return operations.delta_structure(
            **fields,
            **{name: native.address(tensor) for name, tensor in tensors.items()},
            key_heads=sizes.key_heads,
            value_heads=sizes.value_heads,
            key_dim=sizes.key_dim,
            value_dim=sizes.value_dim,
            kernel=sizes.kernel,
            lightning=sizes.lightning,
            eps=sizes.eps,
        )


def delta_net(
    artifact: Artifact, sizes: Delta, index: int, prefix: str, pack: Pack | None
) -> tuple[tuple[Projection, Projection], DeltaNet]:
    """Read the gated delta net of a layer: its first and its last product, and what lies between.

    Args:
        artifact: artifact of the model.
        sizes: sizes of the gated delta net.
        index: number of the layer.
        prefix: name of the layer.
        pack: file where weights are looked for first, and kept.

    Raises:
        InputError: a tensor that holds what it must not.
    """
    names = sizes.names

    def vector(name: str) -> Tensor:
        return artifact.read([f"{prefix}.{name}"], torch.float32)[f"{prefix}.{name}"]

    def of(linears: tuple[str, ...], order: Tensor | None) -> Projection:
        return projection(artifact, [f"{prefix}.{name}" for name in linears], pack, order=order)

    if sizes.lightning:
        lightning = DeltaNet(
            sizes=sizes,
            scores=lambda x: x[:, :0],
            convolution=None,
            rate=_rates(artifact, sizes, index, f"{prefix}.{names.rate}"),
            shift=None,
            norm=vector(f"{names.norm}.weight"),
        )
        return (of(names.inputs, _order_of_three(sizes)), of((names.output,), None)), lightning
    entering, scores = _orders(sizes)
    # [channels, 1, kernel] in the checkpoint
    convolution = vector(f"{names.convolution}.weight").flatten(1).T.contiguous()
    between = DeltaNet(
        sizes=sizes,
        scores=of(names.scores, scores),
        convolution=convolution,
        rate=vector(names.rate).exp(),
        shift=vector(names.shift),
        norm=vector(f"{names.norm}.weight"),
    )
    return (of(names.inputs, entering), of((names.output,), None)), between


def why_not(blueprint: Blueprint) -> str | None:
    """Why decode.c cannot run a model's gated delta nets, in a sentence; None when it can."""
    sizes = blueprint.delta
    if sizes is None:
        return None
    return operations.why_not_delta(sizes.key_dim, sizes.value_dim, sizes.kernel)


def _rates(artifact: Artifact, sizes: Delta, index: int, name: str) -> Tensor:
    """The rates of lightning attention's heads, [heads] float32: as stored, or by their formula.

    Args:
        artifact: artifact of the model; released files hold no rates.
        sizes: sizes of the attention.
        index: number of the layer.
        name: name of the stored rates.
    """
    if name in artifact.checkpoint.tensors:
        return artifact.read([name], torch.float32)[name].flatten()
    slopes = (1 / 2 ** (8 / sizes.value_heads)) ** (torch.arange(sizes.value_heads) + 1)
    return slopes * (1 - index / (sizes.layers - 1 + 1e-5) + 1e-5)


def _order_of_three(sizes: Delta) -> Tensor:
    """The rows of lightning attention's entering product in decode.c's order, int64.

    The model has a head's query, key and value together, and gates behind all heads.
    """
    heads, dim = sizes.value_heads, sizes.value_dim
    rows = torch.arange(3 * heads * dim).view(heads, 3, dim)
    gates = 3 * heads * dim + torch.arange(heads * dim)
    return torch.cat([rows.transpose(0, 1).flatten(), gates])


def _orders(sizes: Delta) -> tuple[Tensor | None, Tensor | None]:
    """The rows of both entering products in the order in which decode.c takes them.

    All queries come first, then all keys, values, gates; the scores that count values, then those
    of what stays. None where the model has that order.
    """
    if not sizes.names.by_head:
        return None, None
    each = sizes.value_heads // sizes.key_heads  # heads of values that share a key head

    def apart(*widths: int) -> Tensor:
        rows = torch.arange(sizes.key_heads * sum(widths)).view(sizes.key_heads, -1)
        return torch.cat([part.flatten() for part in torch.split(rows, list(widths), dim=1)])

    values = each * sizes.value_dim
    return apart(sizes.key_dim, sizes.key_dim, values, values), apart(each, each)
