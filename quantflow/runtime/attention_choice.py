"""How transformers' modules compute attention: the words of `--attention`, checked once.

The record is plain; `quantflow.runtime.attention` computes.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from quantflow.errors import UsageError, nearest

KINDS = ("eager", "sdpa", "fused")
ONLY_FUSED = ("causal", "recompute", "fast-softmax")
BFLOAT16_SOFTMAX = "bfloat16-softmax"
WORDS = (*KINDS, BFLOAT16_SOFTMAX, *ONLY_FUSED)
ATTENTION_HELP = (
    "Attention of transformers' modules: eager, sdpa (torch's) or fused (Gaudi's kernel on hpu, "
    "elsewhere torch's flash kernel); with fused also causal (no mask for rows of one length), "
    "recompute and fast-softmax (both on hpu); with eager also bfloat16-softmax; also several."
)


@dataclass(frozen=True, kw_only=True)
class Attention:
    """A choice of attention.

    Attributes:
        kind: eager, sdpa or fused.
        bfloat16_softmax: the softmax is computed in bfloat16, not in float32.
        causal: rows of one length have no mask: the kernel is told that it is causal.
        recompute: Gaudi's kernel keeps no softmax of the prompt.
        fast_softmax: Gaudi's kernel takes its faster softmax.
    """

    kind: str
    bfloat16_softmax: bool = False
    causal: bool = False
    recompute: bool = False
    fast_softmax: bool = False

    @property
    def name(self) -> str:
        """Name that transformers knows the choice by."""
        if self.kind != "fused" and not self.bfloat16_softmax:
            return self.kind
        flags = ("bfloat16_softmax", "causal", "recompute", "fast_softmax")
        return "_".join(("quantflow", self.kind, *(flag for flag in flags if getattr(self, flag))))


def attention_of(words: Sequence[str]) -> Attention | None:
    """The choice that words make; None without any.

    Raises:
        UsageError: a word is unknown, or two do not go together.
    """
    if not words:
        return None
    for word in words:
        if word not in WORDS:
            raise UsageError(f"attention={word!r}", nearest(word, WORDS))
    kinds = [word for word in KINDS if word in words]
    if len(kinds) > 1:
        raise UsageError(f"attention={' and '.join(kinds)}", "give one of them")
    if not kinds and BFLOAT16_SOFTMAX in words:
        kinds = ["eager"]
    kind = kinds[0] if kinds else "none of eager, sdpa and fused"
    wrong = [word for word in ONLY_FUSED if word in words]
    if wrong and kind != "fused":
        raise UsageError(f"attention={wrong[0]} with {kind}", "give --attention fused too")
    if BFLOAT16_SOFTMAX in words and kind == "sdpa":
        raise UsageError(
            "attention=bfloat16-softmax with sdpa: torch's kernel has its own softmax",
            "give --attention eager",
        )
    return Attention(
        kind=kind,
        bfloat16_softmax=BFLOAT16_SOFTMAX in words,
        causal="causal" in words,
        recompute="recompute" in words,
        fast_softmax="fast-softmax" in words,
    )
