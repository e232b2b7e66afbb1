"""The probabilities that tokens are drawn with, and the methods that have a model of their own."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from quantflow.runtime.decoder import Decoder
from quantflow.runtime.decoding.logits import min_p, top_k, top_n_sigma, top_p, typical_p
from quantflow.runtime.generate_job import Sampling, require

if TYPE_CHECKING:
    from quantflow.runtime.mtp import DraftLayer


def filtered(logits: Tensor, sampling: Sampling, *, least: int = 1) -> Tensor:
    """The logits with temperature and filters applied, [..., V].

    Args:
        logits: [..., V].
        sampling: temperature and filters.
        least: number of tokens that each filter keeps at least.
    """
    scores = logits.float() / sampling.temperature
    if sampling.top_n_sigma is not None:
        scores = top_n_sigma(scores, sampling.top_n_sigma, least=least)
    if sampling.top_k is not None:
        scores = top_k(scores, sampling.top_k, least=least)
    if sampling.top_p is not None and sampling.top_p < 1:
        scores = top_p(scores, sampling.top_p, least=least)
    if sampling.min_p is not None:
        scores = min_p(scores, sampling.min_p, least=least)
    if sampling.typical_p is not None:
        scores = typical_p(scores, sampling.typical_p, least=least)
    return scores


def distribution(logits: Tensor, sampling: Sampling) -> Tensor:
    """The probabilities that tokens are drawn with.

    Args:
        logits: [..., V].
        sampling: temperature and filters; the seed is not read.

    Returns:
        [..., V] float32, sum 1. Tokens as likely as the k-th are kept with it, as transformers
        does.
    """
    return filtered(logits, sampling).softmax(dim=-1)


@dataclass(frozen=True, kw_only=True, eq=False)
class Further:
    """Speculation by the model's own layer that predicts further tokens (MTP).

    Attributes:
        layer: that layer.
        tokens: number of tokens that are proposed at a time.
    """

    layer: "DraftLayer"
    tokens: int = 1

    def __post_init__(self) -> None:
        """Refuse a count below 1.

        Raises:
            UsageError: naming it.
        """
        require(self.tokens >= 1, f"mtp={self.tokens}", "use 1 or more")


@dataclass(frozen=True, kw_only=True)
class Draft:
    """Speculation by a smaller model of the same vocabulary.

    Attributes:
        decoder: draft model; made with `crops=True` where it is a TransformersDecoder.
        tokens: number of tokens that are proposed at a time.
    """

    decoder: Decoder
    tokens: int = 5

    def __post_init__(self) -> None:
        """Refuse a count below 1.

        Raises:
            UsageError: naming it.
        """
        require(self.tokens >= 1, f"draft tokens={self.tokens}", "use 1 or more")
