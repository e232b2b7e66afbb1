"""Seconds of GPTQ for the experts of a layer, one by one and together.

    python benchmarks/expert_seconds.py

A layer shaped as a released model's, with random weights and random rows in the place of the tokens
that the router sends to an expert: 262,144 tokens (128 sequences of 2048), each to the chosen ones.
Printed are a core's seconds for one expert, by part, and for all experts of a layer; then those of
rounding eight equal experts one after the other and together, a column of all eight at a time, with
the same bits. Needs about two minutes on one core.
"""

import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from quantflow.algorithms import ALGORITHMS
from quantflow.core import affine
from quantflow.core.qtensor import qvalue_dtype
from quantflow.core.scheme import TensorScheme, preset, with_group_size
from quantflow.numerics import feedback
from quantflow.observers.hessian import HessianObserver

TOKENS, TOGETHER, GROUP = 262_144, 8, 128
# experts, chosen ones, features of the hidden state, features between an expert's linears
SHAPES = {"OLMoE-1B-7B": (64, 8, 2048, 1024), "Qwen3-30B-A3B": (128, 8, 2048, 768)}
SCHEME = with_group_size(preset("W4A16"), GROUP)


def main() -> int:
    """Print both tables."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print("layer            part         one expert    all experts")
    for name, (experts, chosen, hidden, width) in SHAPES.items():
        parts = {"Hessians": 0.0, "gptq": 0.0}
        for features, outputs in ((hidden, (width, width)), (width, (hidden,))):
            rows = torch.randn(TOKENS * chosen // experts, features)
            observer = HessianObserver(features=features)
            parts["Hessians"] += seconds(partial(observer.update, rows))[0]
            state = observer.state()
            weights = {
                str(number): torch.randn(count, features) * 0.02
                for number, count in enumerate(outputs)
            }
            told: dict[str, Any] = {"statistics": state, "scale_dtype": torch.bfloat16}
            rounding = partial(ALGORITHMS["gptq"].quantize_group, weights, SCHEME, **told)
            parts["gptq"] += seconds(rounding)[0]
        for part, spent in parts.items():
            print(f"{name:16} {part:10} {spent:10.2f} s {experts * spent:12.0f} s")
    print("\ncolumns x rows    one by one    together   same bits")
    for features, rows_of_one in ((2048, 2048), (1024, 2048), (768, 2048), (256, 512)):
        compare(features, rows_of_one)
    return 0


def seconds(work: Callable[[], Any]) -> tuple[float, Any]:
    """A core's seconds for some work, and its result."""
    began = time.process_time()
    result = work()
    return time.process_time() - began, result


def compare(features: int, rows: int) -> None:
    """Print the seconds of rounding equal experts in both ways, whether the qvalues are equal."""
    factors, scales, weights = [], [], []
    for _ in range(TOGETHER):
        x = torch.randn(2 * features, features)
        factors.append(feedback.feedback_of(x.T @ x, name="random"))
        weights.append(torch.randn(rows, features) * 0.02)
        groups = weights[-1].view(rows, features // GROUP, GROUP)
        scales.append((groups.abs().amax(-1) / 7).T.contiguous())

    def one_by_one() -> list[Tensor]:
        return [
            feedback.round_columns_(
                feedback.gathered([weight], order=factor.order),
                scale,
                None,
                scheme=SCHEME.weights,
                feedback=factor,
            )
            for weight, scale, factor in zip(weights, scales, factors, strict=True)
        ]

    def together() -> list[Tensor]:
        works = [
            feedback.gathered([weight], order=factor.order)
            for weight, factor in zip(weights, factors, strict=True)
        ]
        return round_together_(torch.stack(works), torch.stack(scales), SCHEME.weights, factors)

    one_by_one()
    (alone, expected), (joined, found) = seconds(one_by_one), seconds(together)
    same = all(torch.equal(*pair) for pair in zip(expected, found, strict=True))
    print(f"{features:7} x {rows:5} {alone:10.2f} s {joined:10.2f} s   {same}")


def round_together_(
    work: Tensor, scales: Tensor, scheme: TensorScheme, factors: Sequence[feedback.Feedback]
) -> list[Tensor]:
    """The qvalues [I, R] of each expert, as `round_columns_` makes them of one.

    Products are those of one expert at a time, so that their sums have one order; everything else
    is done for all experts at once.

    Args:
        work: [E, I, R], modified.
        scales: [E, G, R].
        scheme: symmetric integers.
        factors: of each expert's Hessian.
    """
    experts, columns, rows = work.shape
    flat = scales.flatten(0, 1)
    first = torch.arange(experts)[:, None] * scales.shape[1]
    group_size = columns // scales.shape[1]
    places = torch.stack([factor.order for factor in factors])  # [E, I]
    of_column = (places // group_size + first).T.contiguous()  # [I, E], rows of `flat`
    qvalue = torch.empty(columns, experts, rows, dtype=qvalue_dtype(scheme))
    rounded = torch.empty(experts, rows)
    for stop in range(columns, 0, -feedback.BLOCK):
        start = max(0, stop - feedback.BLOCK)
        target = torch.empty(experts, stop - start, rows)
        within = []
        for own, errors, factor in zip(target, work, factors, strict=True):
            lower = factor.lower
            torch.addmm(errors[start:stop], lower[stop:, start:stop].T, errors[stop:], out=own)
            within.append(lower[start:stop, start:stop].T.contiguous())
        for end in range(stop - start, 0, -feedback._SUB_BLOCK):
            begin = max(0, end - feedback._SUB_BLOCK)
            for own, errors, inner in zip(target, work, within, strict=True):
                own[begin:end].addmm_(inner[begin:end, end:], errors[start + end : stop])
            for i in range(end - 1, begin - 1, -1):
                for own, errors, inner in zip(target, work, within, strict=True):
                    if i + 1 < end:
                        known = errors[start + i + 1 : start + end]
                        own[i].addmv_(known.T, inner[i, i + 1 : end])
                scale = flat.index_select(0, of_column[start + i])
                torch.div(target[:, i], scale, out=rounded)
                qvalue[start + i] = affine.round_(rounded, None, scheme)
                work[:, start + i] -= rounded.mul_(scale)
    found = torch.empty(experts, columns, rows, dtype=qvalue.dtype)
    for number, factor in enumerate(factors):
        found[number, factor.order] = qvalue[:, number]
    return list(found)


if __name__ == "__main__":
    sys.exit(main())
