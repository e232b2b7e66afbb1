"""What a user may ask for, checked once: how tokens are drawn, what may be said, and by which method."""

import math
from dataclasses import dataclass

from torch import Tensor

from quantflow.errors import UsageError
from quantflow.runtime.decoder import Decoder
from quantflow.runtime.decoding.logits import min_p, top_k, top_p, typical_p

Words = tuple[tuple[int, ...], ...]


def require(fits: bool, told: str, remedy: str) -> None:
    """Refuse a value.

    Raises:
        UsageError: unless it fits.
    """
    if not fits:
        raise UsageError(told, remedy)


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the next token is drawn. The filters apply in this order: temperature, top_k, top_p, min_p, typical_p.

    Attributes:
        temperature: logits are divided by it; above 0.
        top_k: keep the k most likely tokens; None keeps all.
        top_p: keep the most likely tokens whose probabilities together reach p, 0 < p <= 1; None keeps all.
        min_p: keep tokens at least p times as likely as the most likely, 0 <= p <= 1; None keeps all.
        typical_p: keep the most typical tokens whose probabilities together reach p, 0 < p < 1; None keeps all.
        seed: of the generator; the same seed gives the same tokens.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    typical_p: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse values outside their ranges.

        Raises:
            UsageError: naming the value.
        """
        usable = 0 < self.temperature < math.inf
        require(usable, f"temperature={self.temperature}", "use a positive number, or greedy decoding")
        require(self.top_k is None or self.top_k >= 1, f"top_k={self.top_k}", "use 1 or more")
        require(self.top_p is None or 0 < self.top_p <= 1, f"top_p={self.top_p}", "use 0 < top_p <= 1")
        require(self.min_p is None or 0 <= self.min_p <= 1, f"min_p={self.min_p}", "use 0 <= min_p <= 1")
        typical = self.typical_p is None or 0 < self.typical_p < 1
        require(typical, f"typical_p={self.typical_p}", "use 0 < typical_p < 1")


def filtered(logits: Tensor, sampling: Sampling, *, least: int = 1) -> Tensor:
    """Return logits with temperature and filters applied; each filter keeps at least `least` tokens.  logits: [..., V]."""
    scores = logits.float() / sampling.temperature
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
    """Return the probabilities that tokens are drawn with.

    Args:
        logits: [..., V].
        sampling: all but the seed is read.

    Returns:
        [..., V] float32, sum 1. Tokens as likely as the k-th are kept with it, as transformers does.
    """
    return filtered(logits, sampling).softmax(dim=-1)


@dataclass(frozen=True, kw_only=True)
class Rules:
    """What may be said; applied before anything is chosen, in the order of the attributes.

    Attributes:
        repetition_penalty: above 1 makes tokens of prompt and text less likely, below 1 more; positive.
        frequency_penalty: subtracted from a token's logit for every time it was generated.
        presence_penalty: subtracted once from a token's logit if it was generated.
        no_repeat_ngram_size: no n-gram of so many tokens stands twice in prompt and text; 0: any may.
        bad_words: token ids of words that are never generated.
        min_length: the text does not end before prompt and new tokens are so many.
        min_new_tokens: the text does not end before so many new tokens.
    """

    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    no_repeat_ngram_size: int = 0
    bad_words: Words = ()
    min_length: int = 0
    min_new_tokens: int = 0

    def __post_init__(self) -> None:
        """Refuse values outside their ranges.

        Raises:
            UsageError: naming the value.
        """
        usable = 0 < self.repetition_penalty < math.inf
        require(usable, f"repetition_penalty={self.repetition_penalty}", "use a positive number; 1 changes nothing")
        for name in ("frequency_penalty", "presence_penalty"):
            require(-2 <= getattr(self, name) <= 2, f"{name}={getattr(self, name)}", "use -2 to 2; 0 changes nothing")
        for name in ("no_repeat_ngram_size", "min_length", "min_new_tokens"):
            require(getattr(self, name) >= 0, f"{name}={getattr(self, name)}", "use 0 or more; 0 changes nothing")
        require(all(self.bad_words), "bad_words: a word of no token", "leave it out")


@dataclass(frozen=True, kw_only=True)
class Beams:
    """Beam search: the continuations that are likeliest as a whole.

    Attributes:
        count: sequences that are followed at once; with `sampling` their continuations are drawn.
        length_penalty: a sequence's score is its log-probability / (new tokens ** length_penalty).
        early_stopping: True ends at `count` finished sequences, False where the running ones look unable to win at their
            present length, "never" where they cannot win at any length.
        force_words: token ids of words that every returned sequence contains.
    """

    count: int
    length_penalty: float = 1.0
    early_stopping: bool | str = False
    force_words: Words = ()

    def __post_init__(self) -> None:
        """Refuse values outside their ranges.

        Raises:
            UsageError: naming the value.
        """
        require(self.count >= 1, f"beams={self.count}", "use 1 or more")
        known = self.early_stopping in (True, False, "never")
        require(known, f"early_stopping={self.early_stopping}", "use true, false or never")
        require(all(self.force_words), "force_words: a word of no token", "leave it out")


@dataclass(frozen=True, kw_only=True)
class Contrastive:
    """Contrastive search (Su et al. 2022, equation 5): likely tokens that are unlike what was said.

    Attributes:
        alpha: weight of the degeneration penalty, 0 <= alpha <= 1.
        top_k: candidates of each step, above 1.
    """

    alpha: float
    top_k: int

    def __post_init__(self) -> None:
        """Refuse values outside their ranges.

        Raises:
            UsageError: naming the value.
        """
        require(0 <= self.alpha <= 1, f"penalty_alpha={self.alpha}", "use 0 <= penalty_alpha <= 1")
        require(self.top_k > 1, f"top_k={self.top_k} with penalty_alpha", "use 2 or more candidates")


@dataclass(frozen=True, kw_only=True)
class Draft:
    """Speculation by a smaller model of the same vocabulary.

    Attributes:
        decoder: the draft; made with `crops=True` where it is a TransformersDecoder.
        tokens: proposed at a time.
    """

    decoder: Decoder
    tokens: int = 5

    def __post_init__(self) -> None:
        """Refuse a count below 1.

        Raises:
            UsageError: naming it.
        """
        require(self.tokens >= 1, f"draft tokens={self.tokens}", "use 1 or more")


@dataclass(frozen=True, kw_only=True)
class Lookup:
    """Speculation by the text itself: what followed the last tokens where they stood before.

    Attributes:
        tokens: proposed at a time.
        ngram: the longest end of the text that is looked for; shorter ones are tried after it.
    """

    tokens: int = 10
    ngram: int = 2

    def __post_init__(self) -> None:
        """Refuse counts below 1.

        Raises:
            UsageError: naming them.
        """
        require(self.tokens >= 1 and self.ngram >= 1, f"lookup tokens={self.tokens}, ngram={self.ngram}", "use 1 or more")
