"""Sparse attention: an indexer chooses the positions that a query of latent attention sees.

The indexer has a few small heads of its own. Their queries come from compressed queries, the one
key that they share from the hidden state, and so does the weight of each head. The first features
of both are rotated by their position. Among the positions up to its own a query sees the `chosen`
ones with the largest

    score = sum over heads h of weight[h] * max(0, query[h] . key)

Of equal scores the earlier position is chosen. A factor that is positive and alike in all scores
changes no choice, so those of transformers' modules (1 / sqrt(features) and 1 / sqrt(heads)) are
left out. Keys are kept beside the latents, in the same kind of cache; they are as rounded as that.

A text of at most `chosen` positions is attended to whole: its indexer keeps keys and scores
nothing. In a longer one decode.c computes the scores of all positions before a query
(`select_columns`) and then attention over the chosen ones. It passes over groups of 64 positions of
which none is chosen, and reads the others whole, so it saves less than the share of positions that
are not chosen. A layer without an indexer sees what the layer before it does.

DeepSeek's own code multiplies the indexer's queries and keys by a Hadamard matrix, which changes no
product, and rounds both to float8, which does; transformers' modules and this one do neither. In a
float8 cache the keys are rounded here too, but not rotated before. Sources: DeepSeek-AI 2025,
arXiv:2512.02556, section 2.1; GLM-5 Team 2026, arXiv:2602.15763; for layers that share a choice
arXiv:2603.12201.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from quantflow.models.architecture import Blueprint, Indexer
from quantflow.runtime import operations
from quantflow.runtime.artifact import Artifact
from quantflow.runtime.latent_attention import LatentQueries
from quantflow.runtime.operations import IndexInputs, Norm, Projection
from quantflow.runtime.packed import Pack
from quantflow.runtime.projection import projection


@dataclass(frozen=True, kw_only=True, eq=False)
class IndexedQueries:
    """The queries and keys of a layer's attention, and those of its indexer.

    Attributes:
        sizes: its sizes.
        attention: from hidden states to what attention takes.
        queries: from compressed queries to those of all heads of the indexer.
        entering: from the hidden state to the indexer's key and the heads' weights.
        key_norm: norm of keys.
    """

    sizes: Indexer
    attention: LatentQueries
    queries: Projection
    entering: Projection
    key_norm: Norm

    def __call__(self, x: Tensor) -> IndexInputs:
        """What attention and the index take of hidden states [N, H]; nothing is rotated yet."""
        compressed, rest = self.attention.compressed(x)
        both = self.entering(x)
        key, weights = both[:, : self.sizes.head_dim], both[:, self.sizes.head_dim :]
        return IndexInputs(
            attention=self.attention.of_compressed(compressed, rest),
            index=torch.cat([self.queries(compressed), key], dim=1),
            weights=weights.contiguous(),
        )


def indexer(
    artifact: Artifact,
    blueprint: Blueprint,
    prefix: str,
    attention: LatentQueries,
    pack: Pack | None,
) -> IndexedQueries:
    """Read the indexer of a layer.

    Args:
        artifact: artifact of the model.
        blueprint: the model, with an indexer.
        prefix: name of the layer.
        attention: queries and keys of the layer's attention.
        pack: file where weights are looked for first, and kept.

    Raises:
        InputError: a tensor that holds what it must not.
    """
    sizes, latent = blueprint.indexer, blueprint.latent
    assert sizes is not None and latent is not None
    names, dim = sizes.names, sizes.head_dim
    head = torch.arange(dim)
    if sizes.pairs:  # the two of a pair lie half of the rotated features apart in decode.c
        rotated, others = head[: latent.rotated], head[latent.rotated :]
        head = torch.cat([rotated[0::2], rotated[1::2], others])
    heads = (torch.arange(sizes.heads)[:, None] * dim + head).flatten()
    norm = artifact.read(
        [f"{prefix}.{names.key_norm}.{leaf}" for leaf in ("weight", "bias")], torch.float32
    )
    weight, bias = (tensor[head].contiguous() for tensor in norm.values())
    entering = [f"{prefix}.{name}" for name in (names.key, names.weights)]
    return IndexedQueries(
        sizes=sizes,
        attention=attention,
        queries=projection(artifact, [f"{prefix}.{names.queries}"], pack, order=heads),
        entering=projection(
            artifact, entering, pack, order=torch.cat([head, dim + torch.arange(sizes.heads)])
        ),
        key_norm=Norm(weight=weight, bias=bias),
    )


def why_not(blueprint: Blueprint) -> str | None:
    """Why decode.c cannot run a model's indexers, in a sentence; None when it can."""
    sizes = blueprint.indexer
    return None if sizes is None else operations.why_not_indexer(sizes.head_dim)
