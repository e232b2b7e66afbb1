"""Whether the lean decoder computes what transformers' modules compute: layer by layer, with one layer in memory.

A layer is given the hidden state that transformers' layer was given; what each adds to it is compared, token by token.
Two computations of one formula in float32 differ by the order of their sums, so the bound is half of its digits, 2^-12 (it
rounds to 2^-24), and 2^-20 of the hidden state, to which that was added. Where inputs or keys and values are rounded to
codes, a number in the middle between two falls to either. So each of these tensors adds the distance of neighbouring codes
to the bound.
"""

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn import functional

from quantflow.core.scheme import TensorScheme
from quantflow.models.graph import graph_for
from quantflow.runtime import architecture, lean
from quantflow.runtime.artifact import Artifact
from quantflow.runtime.kv_cache import KIND_OF, KVCache
from quantflow.runtime.operations import NO_NORM, Operations

BOUND = 2.0**-12  # of what a layer adds, where no input is rounded
_RESIDUAL = 2.0**-20  # of the hidden state
_STEPS = {"int": 2.0**-7, "float": 2.0**-3}  # of neighbouring codes: 8 bits, e4m3


class LeanCheck:
    """The lean decoder of an artifact, a layer at a time.

    Attributes:
        reason: why the lean decoder does not run it, or what it computes otherwise, in a sentence; None so far.
    """

    def __init__(self, artifact: Artifact) -> None:
        """Take an artifact that was opened for the CPU in float32; no weight is read."""
        self._artifact, found = artifact, architecture.read(artifact.checkpoint.config)
        self.reason = lean.why_not(artifact)
        if self.reason is None and not isinstance(found, str):
            self._made, self._scales = found, artifact.kv_scales()
            self._bound = BOUND + sum(map(_step, self._rounded()))

    @torch.inference_mode()
    def layer(self, index: int, given: Tensor, expected: Tensor) -> None:
        """Compare a layer.

        Args:
            index: which one.
            given: what transformers' layer was given, [1, S, H] float32.
            expected: what it returned.
        """
        if self.reason is not None:
            return
        made, positions = self._made, given.shape[1]
        block = lean.block(self._artifact, made, index, None)
        scales = self._scales[index : index + 1]
        kind = KIND_OF[scales[0].scheme.kind] if scales else "float32"
        shape = {"rows": 1, "layers": 1, "kv_heads": made.heads.shared, "capacity": positions, "head_dim": made.heads.dim}
        cache = KVCache(kind=kind, scales=scales, **shape)
        operations = Operations(made.heads, [block], made.form)
        operations.begin(cache, [rope.table(cache.capacity) for rope in made.ropes])
        operations.step(positions)
        x = given[0].clone()  # [S, H]
        operations.last_norm(x, operations.run(x), NO_NORM)
        self._compare(f"layer {index}", x - given[0], (expected - given)[0], least=expected[0])

    @torch.inference_mode()
    def logits(self, given: Tensor, expected: Tensor) -> None:
        """Compare the logits of the last token, as `layer`.  given: [1, S, H]; expected: [1, S, V]."""
        if self.reason is None:
            _, norm, head = lean.ends(self._artifact, self._made, None)
            hidden = Operations(self._made.heads, [], self._made.form).last_norm(given[0, -1:].clone(), None, norm)
            self._compare("logits", lean.scaled(head(hidden), self._made), expected[0, -1:], least=expected[0, -1:])

    @torch.inference_mode()
    def embedding(self, tokens: Tensor, expected: Tensor) -> None:
        """Compare the hidden state before the first layer.  tokens: int64 [S]; expected: [1, S, H]."""
        if self.reason is None:
            ids, places = torch.unique(tokens, return_inverse=True)
            rows = self._artifact.read_rows(f"{self._made.names.embedding}.weight", ids).float()
            found = functional.embedding(places, rows) * self._made.embedding_scale
            self._compare("the embedding", found, expected[0], least=expected[0])

    def _compare(self, what: str, found: Tensor, expected: Tensor, *, least: Tensor) -> None:
        """Note a token whose difference is larger than the bound of what is expected and the rounding of `least`."""
        error, size = (found - expected).norm(dim=-1), expected.norm(dim=-1)
        share = error / (size + _RESIDUAL / self._bound * least.norm(dim=-1)).clamp(min=torch.finfo(torch.float32).tiny)
        worst = float(share.max())
        if not worst <= self._bound:  # NaN too
            told = f"{what}: it differs from transformers' modules by {worst:.2g} of what they compute on the canary"
            self.reason = f"{told}, {self._bound:.2g} are rounding"

    def _rounded(self) -> Iterable[TensorScheme]:
        """Return the scheme of every tensor that a layer rounds: what its groups of linears read, its keys and its values."""
        (layer, *_), linears = graph_for(self._artifact.config).layers, self._artifact.linears
        read = [linears[group.linears[0]].scheme.input for group in layer.groups if group.linears[0] in linears]
        cached = [scale.scheme for scale in self._scales[:1] for _ in ("keys", "values")]
        return [*(scheme for scheme in read if scheme is not None), *cached]


def _step(scheme: TensorScheme) -> float:
    """Return how far apart neighbouring codes are, as a share of the largest of integers, of each number of floats."""
    return _STEPS[scheme.kind] if scheme.num_bits == 8 else 2.0 ** (1 - scheme.num_bits)
