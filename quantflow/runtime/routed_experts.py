"""A mixture of experts in the place of an MLP: a router chooses the experts of each token.

    y[t] = sum_e weight[t, e] * down_e(activation(gate_e(x[t])) * up_e(x[t]))

The sum is over the chosen experts, in ascending order.
The weights are the softmax of the router's scores over all experts; those of the chosen ones are
divided by their sum where the family does so. A shared expert sees every token, times the sigmoid
of a score of its own. An expert's products are computed over the tokens that are routed to it, and
over no others. Sources: Shazeer et al. 2017, arXiv:1701.06538; Yang et al. 2024, arXiv:2407.10671,
section 2.2.2 (the shared expert).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quantflow.runtime.operations import Projection

ExpertProjections = tuple[Projection, Projection]  # gate and up side by side, down


@dataclass(frozen=True, kw_only=True, eq=False)
class RoutedExperts:
    """The experts of a layer.

    Attributes:
        router: from x to the score of each expert, [N, E].
        experts: in the order of the scores.
        chosen: number of experts that a token goes to.
        normalized: the weights of the chosen ones are divided by their sum.
        shared: the expert of every token, and the score of its weight, [N, 1]; or None.
    """

    router: Projection
    experts: Sequence[ExpertProjections]
    chosen: int
    normalized: bool
    shared: tuple[ExpertProjections, Projection] | None = None

    def __call__(self, x: Tensor, gate: Callable[[Tensor], Tensor]) -> Tensor:
        """The output of the experts for hidden states.

        Args:
            x: [N, H] float32.
            gate: function between an expert's products, [n, 2 I] to [n, I].

        Returns:
            [N, H] float32.
        """
        # [N, k]
        weights, numbers = torch.topk(torch.softmax(self.router(x), dim=-1), self.chosen, dim=-1)
        if self.normalized:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        total = torch.zeros_like(x)
        for number in torch.unique(numbers).tolist():
            token, place = torch.where(numbers == number)
            up, down = self.experts[number]
            total.index_add_(0, token, down(gate(up(x[token]))) * weights[token, place, None])
        if self.shared is not None:
            (up, down), score = self.shared
            total += torch.sigmoid(score(x)) * down(gate(up(x)))
        return total
