"""A mixture of experts in the place of an MLP: a router chooses the experts of each token.

    y[t] = sum_e weight[t, e] * down_e(activation(gate_e(x[t])) * up_e(x[t]))

The sum is over the chosen experts, in ascending order. `quantflow.models.architecture.Routing` says
how the router's logits become weights. A shared expert sees every token, in some families times the
sigmoid of a score of its own. An expert's products are computed over the tokens that are routed to
it, and over no others. Sources: Shazeer et al. 2017, arXiv:1701.06538; Yang et al. 2024,
arXiv:2407.10671, section 2.2.2 (the shared expert); DeepSeek-AI 2024, arXiv:2412.19437, section
2.1.2 (sigmoid scores, their correction, groups of experts); Liu et al. 2024, arXiv:2409.12136
(SparseMixer).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quantflow.models.architecture import Routing
from quantflow.models.family import GroupScores, RouterScores
from quantflow.runtime.operations import Projection

ExpertProjections = tuple[Projection, Projection]  # gate and up side by side, down


@dataclass(frozen=True, kw_only=True, eq=False)
class RoutedExperts:
    """The experts of a layer.

    Attributes:
        router: from x to the logit of each expert, [N, E].
        experts: in the order of the logits.
        routing: how logits become weights.
        correction: added to the scores where experts are chosen, float32 [E]; None: nothing.
        shared: the expert of every token; None: there is none.
        shared_score: from x to the logit of the shared expert's weight, [N, 1]; None: it counts 1.
    """

    router: Projection
    experts: Sequence[ExpertProjections]
    routing: Routing
    correction: Tensor | None = None
    shared: ExpertProjections | None = None
    shared_score: Projection | None = None

    def __call__(self, x: Tensor, gate: Callable[[Tensor], Tensor]) -> Tensor:
        """The output of the experts for hidden states.

        Args:
            x: [N, H] float32.
            gate: function between an expert's products, [n, 2 I] to [n, I].

        Returns:
            [N, H] float32.
        """
        weights, numbers = route(self.router(x), self.routing, self.correction)  # [N, k]
        total = torch.zeros_like(x)
        for number in torch.unique(numbers).tolist():
            token, place = torch.where(numbers == number)
            up, down = self.experts[number]
            total.index_add_(0, token, down(gate(up(x[token]))) * weights[token, place, None])
        if self.shared is not None:
            up, down = self.shared
            added = down(gate(up(x)))
            score = self.shared_score
            total += added if score is None else torch.sigmoid(score(x)) * added
        return total


def route(logits: Tensor, routing: Routing, correction: Tensor | None) -> tuple[Tensor, Tensor]:
    """The weights [N, k] of each token's experts, and their numbers, int64 [N, k].

    Args:
        logits: float32 [N, E].
        routing: how they become weights.
        correction: added to the scores where experts are chosen, [E]; None: nothing.
    """
    if routing.scores is RouterScores.SPARSE_MIXER:
        return _mix(logits, routing)
    scores = logits.sigmoid()
    if routing.scores is RouterScores.SOFTMAX:
        scores = torch.softmax(logits, dim=-1)
    wanted = scores if correction is None else scores + correction
    if routing.groups > 1:
        grouped = wanted.view(len(wanted), routing.groups, -1)  # [N, G, E / G]
        counted = 2 if routing.group_scores is GroupScores.BEST_TWO else 1
        best = grouped.topk(counted, dim=-1).values.sum(dim=-1)  # [N, G]
        left_out = torch.ones_like(best, dtype=torch.bool)
        left_out.scatter_(1, best.topk(routing.chosen_groups, dim=-1).indices, value=False)
        wanted = grouped.masked_fill(left_out[..., None], -torch.inf).flatten(1)
    numbers = wanted.topk(routing.chosen, dim=-1).indices
    weights = scores.gather(1, numbers)
    if routing.normalized:
        weights = weights / weights.sum(dim=-1, keepdim=True).clamp(min=routing.least)
    return weights * routing.factor, numbers


def _mix(logits: Tensor, routing: Routing) -> tuple[Tensor, Tensor]:
    """Choose one expert after the other; see `RouterScores.SPARSE_MIXER`."""
    left, weights, numbers = logits, [], []
    for _ in range(routing.chosen):
        largest, number = left.max(dim=-1, keepdim=True)  # [N, 1]
        far = (largest - logits) / torch.maximum(logits.abs(), largest) > routing.near
        shares = torch.softmax(left.masked_fill(far, -torch.inf), dim=-1)
        weights.append(shares.gather(1, number))
        numbers.append(number)
        left = left.scatter(1, number, -torch.inf)
    return torch.cat(weights, dim=-1), torch.cat(numbers, dim=-1)
