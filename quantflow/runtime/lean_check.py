"""Whether the lean decoder computes what transformers' modules compute: layer by layer, with one layer in memory.

A layer is given the hidden state that transformers' layer was given; what each adds to it is
compared, token by token. Two computations of one formula in float32 differ by the order of their
sums, so the bound is half of its digits, 2^-12 (it rounds to 2^-24), and 2^-20 of the hidden state,
to which that was added. Where inputs or keys and values are rounded to codes, a number in the
middle between two falls to either, and what follows differs by more. So the lean decoder also
computes the layer without that rounding. Either decoder is away from that by what rounding costs
the token, so twice that is added to the bound. A layer whose inputs have outliers loses most to it,
and differs most.
"""

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional

from quantflow.runtime import architecture, lean
from quantflow.runtime.artifact import Artifact
from quantflow.runtime.kv_cache import KIND_OF, KVCache
from quantflow.runtime.operations import NO_NORM, Operations

BOUND = 2.0**-12  # of what a layer adds, where no input is rounded
_RESIDUAL = 2.0**-20  # of the hidden state


class LeanCheck:
    """The lean decoder of an artifact, a layer at a time.

    Attributes:
        reason: why the lean decoder does not run it, or what it computes otherwise, in a sentence;
            None so far.
    """

    def __init__(self, artifact: Artifact) -> None:
        """Take an artifact that was opened for the CPU in float32; no weight is read."""
        self._artifact, blueprint = artifact, architecture.read(artifact.checkpoint.config)
        self.reason = lean.why_not(artifact)
        if self.reason is None and not isinstance(blueprint, str):
            self._made, self._scales = blueprint, artifact.kv_scales()
            self._unrounded = _unrounded(artifact)

    @torch.inference_mode()
    def layer(self, index: int, hidden: Tensor, expected: Tensor) -> None:
        """Compare a layer.

        Args:
            index: which one.
            hidden: what transformers' layer was given, [1, S, H] float32.
            expected: what it returned.
        """
        if self.reason is not None:
            return
        added = self._added(self._artifact, index, hidden[0], rounded=True)
        rounds = self._unrounded is not self._artifact or self._scales
        exact = self._added(self._unrounded, index, hidden[0], rounded=False) if rounds else added
        self._compare(
            f"layer {index}", added, (expected - hidden)[0], exact=exact, least=expected[0]
        )

    @torch.inference_mode()
    def logits(self, hidden: Tensor, expected: Tensor) -> None:
        """Compare the logits of the last token, as `layer`.  given: [1, S, H]; expected: [1, S, V]."""
        if self.reason is None:
            found = self._last_logits(self._artifact, hidden[0, -1:])
            exact = (
                found
                if self._unrounded is self._artifact
                else self._last_logits(self._unrounded, hidden[0, -1:])
            )
            self._compare("logits", found, expected[0, -1:], exact=exact, least=expected[0, -1:])

    @torch.inference_mode()
    def embedding(self, tokens: Tensor, expected: Tensor) -> None:
        """Compare the hidden state before the first layer.  tokens: int64 [S]; expected: [1, S, H]."""
        if self.reason is None:
            ids, places = torch.unique(tokens, return_inverse=True)
            rows = self._artifact.read_rows(f"{self._made.names.embedding}.weight", ids).float()
            embedded = functional.embedding(places, rows) * self._made.embedding_scale
            self._compare("the embedding", embedded, expected[0], exact=embedded, least=expected[0])

    def _added(self, artifact: Artifact, index: int, hidden: Tensor, *, rounded: bool) -> Tensor:
        """Return what a layer adds to a hidden state [S, H], with keys and values rounded or not."""
        blueprint, positions = self._made, len(hidden)
        scales = self._scales[index : index + 1] if rounded else ()
        kind = KIND_OF[scales[0].scheme.kind] if scales else "float32"
        shape = {
            "rows": 1,
            "layers": 1,
            "kv_heads": blueprint.heads.shared,
            "capacity": positions,
            "head_dim": blueprint.heads.dim,
        }
        cache = KVCache(kind=kind, scales=scales, **shape)
        operations = Operations(
            blueprint.heads, [lean.block(artifact, blueprint, index, None)], blueprint.form
        )
        operations.begin(cache, [rope.table(cache.capacity) for rope in blueprint.ropes])
        operations.step(positions)
        x = hidden.clone()
        operations.last_norm(x, operations.run(x), NO_NORM)
        return x - hidden

    def _last_logits(self, artifact: Artifact, given: Tensor) -> Tensor:
        """Return the logits [1, V] of a hidden state [1, H] behind the layers."""
        _, norm, head = lean.ends(artifact, self._made, None)
        hidden = Operations(self._made.heads, [], self._made.form).last_norm(
            given.clone(), None, norm
        )
        return lean.scaled(head(hidden), self._made)

    def _compare(
        self, what: str, actual: Tensor, expected: Tensor, *, exact: Tensor, least: Tensor
    ) -> None:
        """Note the token whose difference is most above its bound: digits of what is expected and of `least`, and rounding.

        Args:
            what: is compared.
            actual: [S, H].
            expected: what transformers computes.
            exact: `actual` without rounded inputs, keys and values.
            least: what it was added to.
        """
        error, size = (actual - expected).norm(dim=-1), expected.norm(dim=-1)
        bound = BOUND * size + _RESIDUAL * least.norm(dim=-1) + 2 * (actual - exact).norm(dim=-1)
        above = error / bound.clamp(min=torch.finfo(torch.float32).tiny)
        worst = int(above.argmax())
        if not float(above[worst]) <= 1:  # NaN too
            share, allowed = (float(each[worst] / size[worst]) for each in (error, bound))
            cause = f"{what}: it differs from transformers' modules by {share:.2g} of what they compute on the canary"
            self.reason = f"{cause}, {allowed:.2g} are rounding"


def _unrounded(artifact: Artifact) -> Artifact:
    """Return an artifact whose linears take their inputs as they are; itself where all do."""
    linears = {
        name: replace(each, scheme=replace(each.scheme, input=None))
        for name, each in artifact.linears.items()
    }
    rounds = any(each.scheme.input is not None for each in artifact.linears.values())
    return replace(artifact, linears=linears) if rounds else artifact
