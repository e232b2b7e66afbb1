"""A mixture of experts in the place of an MLP: a router chooses the experts of each token.

    y[t] = sum_e weight[t, e] * down_e(activation(gate_e(x[t])) * up_e(x[t]))

The sum is over the chosen experts, in ascending order. `quantflow.models.architecture.Routing` says
how the router's logits become weights. Where they scale inputs, an expert reads weight[t, e] *
x[t], and what it puts out counts as it is (Llama 4). A shared expert sees every token, in some
families times the sigmoid of a score of its own. An expert's products are computed over the tokens
that are routed to it, and over no others. Sources: Shazeer et al. 2017, arXiv:1701.06538; Yang et
al. 2024, arXiv:2407.10671, section 2.2.2 (the shared expert); DeepSeek-AI 2024, arXiv:2412.19437,
section 2.1.2 (sigmoid scores, their correction, groups of experts); Liu et al. 2024,
arXiv:2409.12136 (SparseMixer).
"""

import ctypes
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quantflow.backends import kernels, native
from quantflow.models.architecture import Form, Routing
from quantflow.models.family import GroupScores, RouterScores
from quantflow.runtime import operations
from quantflow.runtime.operations import ACTIVATIONS, Projection

ExpertProjections = tuple[Projection, Projection]  # gate and up side by side, down
_SCORES = tuple(RouterScores)  # decode.c's `enum scores`


@dataclass(frozen=True, kw_only=True, eq=False)
class Exchange:
    """What ranks that hold some rows of every expert give each other.

    Attributes:
        inner, shared_inner: from the rank's inputs of `down` to those of all ranks, of the experts
            and of the shared one.
        outputs: from the rank's features of what the mixture puts out to all.
    """

    inner: Callable[[Tensor], Tensor]
    shared_inner: Callable[[Tensor], Tensor]
    outputs: Callable[[Tensor], Tensor]


@dataclass(frozen=True, kw_only=True, eq=False)
class RoutedExperts:
    """The experts of a layer.

    Attributes:
        router: from x to the logit of each expert, [N, E].
        experts: in the order of the logits.
        routing: how logits become weights.
        form: activation of the experts.
        correction: added to the scores where experts are chosen, float32 [E]; None: nothing.
        shared: the expert of every token; None: there is none.
        shared_score: from x to the logit of the shared expert's weight, [N, 1]; None: it counts 1.
        exchange: with the ranks that hold the other rows of the experts; None: this process holds
            all.
    """

    router: Projection
    experts: Sequence[ExpertProjections]
    routing: Routing
    form: Form
    correction: Tensor | None = None
    shared: ExpertProjections | None = None
    shared_score: Projection | None = None
    exchange: Exchange | None = None

    @functools.cached_property
    def structure(self) -> ctypes.Structure | None:
        """The mixture as decode.c runs it; None where Python has to call a product.

        All experts are then of one shape, all quantized for kernels.c or none, and all here.
        """
        if self.exchange is not None:
            return None
        every_token = [self.router, *(self.shared or ()), self.shared_score]
        others = [each for each in every_token if each is not None]
        linears: list[Any] = [linear for expert in self.experts for linear in expert]
        if not all(map(operations.in_c, others + linears)):
            return None
        shapes = {tuple(map(operations.shape_in_c, expert)) for expert in self.experts}
        ordered = any(linear.keywords.get("order") is not None for linear in others + linears)
        if ordered or len(shapes) > 1 or len(set(map(operations.is_plain, linears))) > 1:
            return None
        kept, fields = self._kept, dict[str, Any]()
        for at, name in enumerate(("up", "down")):
            products = [operations.structure_of(expert[at], kept) for expert in self.experts]
            for field, of in ((name, "weight"), (f"{name}_bias", "bias")):
                pointers = (ctypes.c_void_p * len(products))(*(getattr(p, of) for p in products))
                kept.append(pointers)
                fields[field] = ctypes.addressof(pointers)
        of_all = ("router", "shared_up", "shared_down", "shared_score")
        shared_up, shared_down = self.shared or (None, None)
        for name, each in zip(
            of_all, (self.router, shared_up, shared_down, self.shared_score), strict=True
        ):
            if each is not None:
                fields[name] = operations.structure_of(each, kept)
        several = native.function_address(operations.compiled().plain_linears)
        if not operations.is_plain(linears[0]):
            several = kernels.several()
        return operations.experts_structure(**self._routing_fields(), **fields, linears=several)

    @functools.cached_property
    def _kept(self) -> list[Any]:
        """What structures point to, which must live as long as they."""
        return []

    def _routing_fields(self) -> dict[str, Any]:
        """The fields of the structure that are no products."""
        routing, form = self.routing, self.form
        return {
            "correction": native.address(self.correction),
            "experts": routing.experts,
            "chosen": routing.chosen,
            "scores": _SCORES.index(routing.scores),
            "groups": routing.groups,
            "chosen_groups": routing.chosen_groups,
            "counted": 2 if routing.group_scores is GroupScores.BEST_TWO else 1,
            "normalized": routing.normalized,
            "scales_inputs": routing.scales_inputs,
            "activation": ACTIVATIONS.index(form.activation),
            "gated": form.gated,
            "near": routing.near,
            "least": routing.least,
            "factor": routing.factor,
            "alpha": form.alpha,
            "limit": form.limit,
        }

    def __call__(self, x: Tensor, gate: Callable[[Tensor], Tensor]) -> Tensor:
        """The output of the experts for hidden states.

        Args:
            x: [N, H] float32.
            gate: function between an expert's products, [n, 2 I] to [n, I].

        Returns:
            [N, H] float32.
        """
        out, rows = torch.empty_like(x), len(x)
        if self.structure is not None:
            if operations.compiled().mixture(self.structure, x.data_ptr(), rows, out.data_ptr()):
                raise MemoryError(f"inputs of {rows} tokens")
            return out
        c, chosen = operations.compiled(), self.routing.chosen
        structure = operations.experts_structure(**self._routing_fields())
        logits = self.router(x)  # [N, E]
        weights, wanted = torch.empty(rows, chosen), torch.empty_like(logits)
        numbers, slots = torch.empty(2, rows * chosen, dtype=torch.int64)
        first = torch.empty(self.routing.experts + 1, dtype=torch.int64)
        c.route(
            structure,
            *map(native.address, (logits, wanted)),
            rows,
            *map(native.address, (weights, numbers)),
        )
        c.sort_rows(structure, native.address(numbers), rows, *map(native.address, (first, slots)))
        choices, bounds = slots.argsort(), first.tolist()  # [N k], the choice at each place
        sorted_x = x[choices // chosen]  # [N k, H]
        if self.routing.scales_inputs:
            sorted_x = sorted_x * weights.flatten()[choices, None]
        called = [
            (expert, begin, end)
            for expert, begin, end in zip(self.experts, bounds, bounds[1:], strict=False)
            if begin < end
        ]
        # `gate` puts its output where the next call does
        inner = torch.cat([gate(up(sorted_x[begin:end])).clone() for (up, _), begin, end in called])
        if self.exchange is not None:
            inner = self.exchange.inner(inner)  # [N k, I]
        of_experts = torch.cat([down(inner[begin:end]) for (_, down), begin, end in called])
        shared = score = None
        if self.shared is not None:
            up, down = self.shared
            inner = gate(up(x))
            shared = down(inner if self.exchange is None else self.exchange.shared_inner(inner))
            score = None if self.shared_score is None else self.shared_score(x)
        width = of_experts.shape[1]  # a rank puts out some features
        out = out if width == x.shape[1] else torch.empty(rows, width)
        of_outputs = None if self.routing.scales_inputs else weights
        parts = (of_experts, of_outputs, slots, shared, score, out)
        c.combine(structure, *map(native.address, parts), rows, width)
        return out if self.exchange is None else self.exchange.outputs(out)
