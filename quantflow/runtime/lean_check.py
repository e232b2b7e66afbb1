"""Comparison of the lean decoder with transformers' modules, layer by layer, one in memory.

A layer gets the hidden state that transformers' layer got; what each adds to it is compared, token
by token. Two computations of one formula in float32 differ by the order of their sums, so the bound
is half of its digits, 2^-12 (it rounds to 2^-24), and 2^-20 of the hidden state, to which the sum
was added.

Where inputs or keys and values are rounded to codes, a number in the middle between two falls to
either, and what follows differs by more. So the lean decoder also computes the layer without that
rounding. Either decoder is away from that by what rounding costs the token, so twice that is added
to the bound. A layer whose inputs have outliers loses most to rounding, and differs most.
"""

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional

from quantflow.models import architecture
from quantflow.runtime import lean
from quantflow.runtime.artifact import Artifact
from quantflow.runtime.kv_cache import KIND_OF, KVCache
from quantflow.runtime.operations import NO_NORM, Operations

BOUND = 2.0**-12  # share of what a layer adds, where no input is rounded
_RESIDUAL = 2.0**-20  # share of the hidden state


class LeanCheck:
    """The lean decoder of an artifact, a layer at a time.

    Attributes:
        reason: why the lean decoder does not run the artifact, or which part it computes
            differently, in a sentence; None: nothing so far.
    """

    def __init__(self, artifact: Artifact) -> None:
        """Take an artifact that was opened for the CPU in float32; no weight is read."""
        self._artifact, blueprint = artifact, architecture.read(artifact.checkpoint.config)
        self.reason = lean.why_not(artifact)
        if self.reason is None and not isinstance(blueprint, str):
            self._blueprint, self._scales = blueprint, lean.kv_scales(artifact, blueprint)
            self._unrounded = _unrounded(artifact)
            # of the last layer with an indexer: what queries see, with rounded inputs and without
            self._selections: dict[bool, Tensor | None] = {}

    @torch.inference_mode()
    def layer(self, index: int, hidden: Tensor, expected: Tensor) -> None:
        """Compare a layer.

        Args:
            index: index of the layer.
            hidden: input of transformers' layer, [1, S, H] float32.
            expected: output of that layer, [1, S, H].
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
        """Compare the logits of the last token. hidden: [1, S, H]; expected: [1, S, V]."""
        if self.reason is None:
            actual = self._last_logits(self._artifact, hidden[0, -1:])
            exact = (
                actual
                if self._unrounded is self._artifact
                else self._last_logits(self._unrounded, hidden[0, -1:])
            )
            self._compare("logits", actual, expected[0, -1:], exact=exact, least=expected[0, -1:])

    @torch.inference_mode()
    def embedding(self, tokens: Tensor, expected: Tensor) -> None:
        """Compare the hidden state before the first layer.

        Args:
            tokens: int64 [S].
            expected: [1, S, H].
        """
        if self.reason is None:
            ids, places = torch.unique(tokens, return_inverse=True)
            rows = self._artifact.read_rows(
                f"{self._blueprint.names.embedding}.weight", ids
            ).float()
            embedded = lean.embedded(
                functional.embedding(places, rows),
                self._blueprint,
                lean.entrance(self._artifact, self._blueprint, None),
                torch.arange(len(tokens)),
            )
            self._compare("the embedding", embedded, expected[0], exact=embedded, least=expected[0])

    def _added(self, artifact: Artifact, index: int, hidden: Tensor, *, rounded: bool) -> Tensor:
        """What a layer adds to a hidden state [S, H], with keys and values rounded or not."""
        blueprint, positions = self._blueprint, len(hidden)
        linear = blueprint.is_linear(index)
        place = index - sum(blueprint.linear[:index])  # among the layers that keep columns
        scales = self._scales[place : place + 1] if rounded and not linear else ()
        kind = KIND_OF[scales[0].scheme.kind] if scales else "float32"
        shape = lean.cache_shape(blueprint)
        cache = KVCache(
            kind=kind,
            rows=1,
            layers=0 if linear else 1,
            capacity=positions,
            scales=scales,
            states=lean.delta_states(blueprint, sequences=1, layers=1) if linear else None,
            **shape,
        )
        operations = Operations(
            blueprint.heads, [lean.block(artifact, blueprint, index, None)], blueprint.form
        )
        operations.begin(cache, [rope.table(cache.capacity) for rope in blueprint.ropes])
        operations.step(positions)
        operations.selection = self._selections.get(rounded)
        x = hidden.clone()
        operations.last_norm(x, operations.run(x), NO_NORM)
        self._selections[rounded] = operations.selection
        return x - hidden

    def _last_logits(self, artifact: Artifact, last: Tensor) -> Tensor:
        """Logits [1, V] of a hidden state [1, H] behind the layers."""
        _, norm, head = lean.ends(artifact, self._blueprint, None)
        hidden = Operations(self._blueprint.heads, [], self._blueprint.form).last_norm(
            last.clone(), None, norm
        )
        exit_linear = lean.exit_linear(artifact, self._blueprint, None)
        hidden = hidden if exit_linear is None else exit_linear(hidden)
        return lean.scaled(head(hidden), self._blueprint)

    def _compare(
        self, what: str, actual: Tensor, expected: Tensor, *, exact: Tensor, least: Tensor
    ) -> None:
        """Note the token whose difference is most above its bound.

        Args:
            what: name of what is compared.
            actual: what the lean decoder computes, [S, H].
            expected: what transformers computes, [S, H].
            exact: `actual` without rounded inputs, keys and values.
            least: what `expected` was added to.
        """
        error, size = (actual - expected).norm(dim=-1), expected.norm(dim=-1)
        bound = BOUND * size + _RESIDUAL * least.norm(dim=-1) + 2 * (actual - exact).norm(dim=-1)
        above = error / bound.clamp(min=torch.finfo(torch.float32).tiny)
        worst = int(above.argmax())
        if not float(above[worst]) <= 1:  # NaN too
            share, allowed = (float(each[worst] / size[worst]) for each in (error, bound))
            cause = (
                f"{what}: it differs from transformers' modules by {share:.2g} of what they "
                "compute on the canary"
            )
            self.reason = f"{cause}, {allowed:.2g} are rounding"


def _unrounded(artifact: Artifact) -> Artifact:
    """The artifact with linears that take their inputs as they are; itself where all do."""
    linears = {
        name: replace(each, scheme=replace(each.scheme, input=None))
        for name, each in artifact.linears.items()
    }
    rounds = any(each.scheme.input is not None for each in artifact.linears.values())
    return replace(artifact, linears=linears) if rounds else artifact
