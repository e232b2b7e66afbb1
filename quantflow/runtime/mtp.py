"""A layer that predicts tokens further ahead (MTP), run as the draft of the lean decoder.

It has a KV cache of its own: the column of token t is made of the hidden state before t and of t,
so it depends on nothing after t, and the first token has none. Guesses further ahead run the same
layer on its own output, as vLLM and transformers do. `quantflow.files.layers_ahead` says how it is
wired.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from quantflow.errors import UnsupportedError
from quantflow.files.layers_ahead import Ahead, layers_ahead
from quantflow.models.architecture import Blueprint
from quantflow.runtime.artifact import Artifact
from quantflow.runtime.kv_cache import KVCache
from quantflow.runtime.lean import ModelParts, block, norm_of
from quantflow.runtime.operations import Norm, Operations, Projection, normalized
from quantflow.runtime.projection import projection

REMEDY = "leave mtp out; a lookup or an assistant model proposes tokens too"


class DraftLayer(Protocol):
    """A layer that predicts further tokens, with a cache of one sequence; see `AheadLayer`."""

    @property
    def logits(self) -> Callable[[Tensor], Tensor]:
        """The model's head, from what `forward` returns."""

    def begin(self, capacity: int) -> None:
        """Empty the cache and make room for so many columns."""

    def crop(self, length: int) -> None:
        """Forget every column from `length` on."""

    def forward(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        """Append the columns of tokens; the states from which the tokens after them are guessed."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Wiring:
    """What stands around the decoder layer of a layer ahead.

    Attributes:
        token_norm, hidden_norm: norms of the embedding and of the hidden state.
        joint: from both side by side to the layer's input.
        hidden_first: the hidden state comes first.
        norm: norm of what the layer gives.
    """

    token_norm: Norm
    hidden_norm: Norm
    joint: Projection
    hidden_first: bool
    norm: Norm


class AheadLayer:
    """The layer of one model, and its cache of one sequence.

    Attributes:
        logits: the model's head, from what `forward` returns.
    """

    def __init__(self, artifact: Artifact, shared: ModelParts) -> None:
        """Read the first layer that predicts further tokens.

        Args:
            artifact: artifact of the model.
            shared: what the decoder that runs it shares.

        Raises:
            UnsupportedError: there is no such layer, or it is none of the model's own kind.
            InputError: a tensor that holds what it must not.
        """
        blueprint, artifact = shared.blueprint, with_unused(artifact)
        ahead, folder = ahead_of(artifact), artifact.checkpoint.folder
        names = {*artifact.checkpoint.tensors, *(f"{name}.weight" for name in artifact.linears)}
        own = _blueprint_of(blueprint, ahead, names)
        if isinstance(own, str):
            raise UnsupportedError(f"{folder}: {ahead.prefix}: {own}", REMEDY)
        self._wiring = Wiring(
            token_norm=norm_of(artifact, blueprint, ahead.token_norm),
            hidden_norm=norm_of(artifact, blueprint, ahead.hidden_norm),
            joint=projection(artifact, [ahead.joint]),
            hidden_first=ahead.hidden_first,
            norm=norm_of(artifact, blueprint, ahead.norm),
        )
        self.logits, self._shared = shared.logits, shared
        self._operations = Operations(
            blueprint.heads,
            [block(artifact, own, ahead.index, None)],
            blueprint.form,
            rounds=shared.rounds,
        )
        self._cache: KVCache | None = None

    @property
    def width(self) -> int:
        """Features of a hidden state."""
        return self._shared.embed(torch.tensor([0])).shape[1]

    def begin(self, capacity: int) -> None:
        """Empty the cache and make room for so many columns."""
        cache = self._cache
        if cache is not None and cache.capacity >= capacity:
            cache.clear(1)
        else:
            self._cache = cache = self._shared.new_cache(
                layers=1, scales=(), rows=1, capacity=capacity
            )
        self._operations.begin(cache, self._shared.rotary_tables(cache.capacity))

    @property
    def length(self) -> int:
        """Columns in the cache."""
        return 0 if self._cache is None else self._cache.length

    def crop(self, length: int) -> None:
        """Forget every column from `length` on."""
        if self._cache is not None:
            self._cache.crop(length)

    @torch.inference_mode()
    def forward(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        """Append the columns of tokens; the states from which the tokens after them are guessed.

        Args:
            hidden: [T, H] float32, the model's hidden state before each token, after its last
                norm; or what this function returned.
            tokens: [T] int64.

        Returns:
            [T, H] float32.
        """
        assert self._cache is not None  # begin was called
        self._operations.step(len(tokens))
        self._cache.length += len(tokens)
        return self._run(hidden, tokens)

    def begin_blocks(self, *, blocks: int, columns: int, positions: int) -> KVCache:
        """Empty the cache and divide it into blocks; see `LeanDecoder.begin_blocks`."""
        self._cache = cache = self._shared.new_cache(
            layers=1, scales=(), rows=blocks, capacity=columns
        )
        self._operations.begin(cache, self._shared.rotary_tables(positions))
        return cache

    @torch.inference_mode()
    def forward_rows(
        self, hidden: Tensor, tokens: Tensor, *, first: Tensor, start: Tensor, table: Tensor
    ) -> Tensor:
        """Append columns to sequences in blocks, as `forward` does to one.

        The column of a token has the place of the token, so the first column is empty.

        Args:
            hidden: [N, H] float32, see `forward`.
            tokens: [N] int64, of all B sequences, one after the other.
            first: see `LeanDecoder.forward_rows`, as the other two.
            start: [B] int64.
            table: [B, W] int64.

        Returns:
            [N, H] float32.
        """
        self._operations.step_rows(first, start, table, torch.ones_like(start))
        return self._run(hidden, tokens)

    def _run(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        """Run the layer on the columns of a step."""
        wiring, eps = self._wiring, self._shared.blueprint.heads.eps
        parts = [
            normalized(self._shared.embed(tokens), wiring.token_norm, eps),
            normalized(hidden, wiring.hidden_norm, eps),
        ]
        x = wiring.joint(torch.cat(parts[::-1] if wiring.hidden_first else parts, dim=1))
        delta = self._operations.run(x)
        # a copy: the next step writes into the same memory
        return self._operations.last_norm(x, delta, wiring.norm).clone()


def ahead_of(artifact: Artifact) -> Ahead:
    """The first layer of an artifact that predicts further tokens.

    Args:
        artifact: an artifact as `with_unused` makes it.

    Raises:
        UnsupportedError: there is none, or one of its norms is missing.
    """
    names, folder = artifact.checkpoint.tensors, artifact.checkpoint.folder
    found = layers_ahead(names)
    if not found:
        raise UnsupportedError(f"{folder}: no layer predicts further tokens (MTP)", REMEDY)
    ahead, *_ = found
    if missing := [name for name in ahead.norms if f"{name}.weight" not in names]:
        raise UnsupportedError(
            f"{folder}: {missing[0]}.weight is missing, of the layer that predicts further "
            "tokens (MTP)",
            REMEDY,
        )
    return ahead


def with_unused(artifact: Artifact) -> Artifact:
    """The artifact with the tensors that no module of transformers has, quantized ones too."""
    checkpoint = artifact.checkpoint
    sealed = checkpoint.sealed
    unused = {
        name: (
            one.file,
            one.info if sealed is None else replace(one.info, sealed=sealed.files.get(one.file)),
        )
        for name, one in checkpoint.unused.items()
    }
    return replace(
        artifact,
        checkpoint=replace(checkpoint, tensors={**checkpoint.tensors, **unused}),
        linears={**artifact.linears, **artifact.mtp},
    )


def _blueprint_of(blueprint: Blueprint, ahead: Ahead, names: Collection[str]) -> Blueprint | str:
    """The model's blueprint with the layer ahead in its lists, or why there is none."""
    inside = {name for name in names if name.startswith(f"{ahead.prefix}.")}
    mixture, sparse = blueprint.mixture, False
    if mixture is not None:
        experts = f"{ahead.prefix}.{mixture.block}.experts."
        sparse = any(name.startswith(experts) for name in inside)
    if not sparse and f"{ahead.prefix}.{blueprint.names.down}.weight" not in inside:
        return "its layer that predicts further tokens (MTP) is none of the model's own kind"
    if any(blueprint.windows):
        return "it is not known whether a layer that predicts further tokens (MTP) has a window"
    *others, _ = range(ahead.index + 1)  # lists are looked up by the layer's index
    indexer = blueprint.indexer
    if indexer is not None:
        own = f"{ahead.prefix}.{indexer.names.key}.weight" in inside
        if not own:
            return "its layer that predicts further tokens (MTP) has no indexer of its own"
        indexer = replace(indexer, layers=(True,) * (ahead.index + 1))
    return replace(
        blueprint,
        indexer=indexer,
        names=replace(blueprint.names, layers=ahead.layers),
        sparse=(*(False for _ in others), sparse),
        windows=(0,) * (ahead.index + 1),
        linear=(),
        rope_of_layer=(blueprint.rope_of_layer[-1],) * (ahead.index + 1),
    )
