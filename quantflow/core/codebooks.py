"""Nearest entries of a codebook: neighbours whose magnitudes are rounded as one.

In llama.cpp's types IQ3_S, IQ3_XXS, IQ2_S, IQ2_XS and IQ2_XXS a block stores, for 4 or 8
neighbours, the number of an entry that holds their magnitudes, and their signs. The nearest entry
of values x, already divided by their scale, with importances m is

    argmin over entries g of  sum_j m_j (|x_j| - g_j)^2,

found by comparing all of them: without its constant part it is one product of matrices,
[m, -2 m |x|] @ [g^2, g]^T. Signs are those of x.

Where the type has even signs, 8 neighbours have an even number of negative ones, and where x has an
odd number, one sign has to differ: with |x_j| replaced by -|x_j| the same product says what entry
is nearest then. The `_FLIPS` cheapest signs by m_j |x_j| are compared, each with an entry of its
own; two more changes never pay. Where 8 neighbours are two entries, the one changes that loses
less.

The tables are those of the package `gguf`, imported when one is read. Source:
github.com/ggml-org/ggml, `ggml-common.h`, for the tables and the rule of signs.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module

import torch
from torch import Tensor

from quantflow.core.block_types import BlockType, Codebook

_Terms = Callable[[Tensor, Tensor], Tensor]

_AT_ONCE = 1 << 19  # distances in memory at a time: 2 MiB
_FLIPS = 3  # signs that may differ; all of them together lose 0.01 % less at most
_SIGNED = 8  # neighbours whose signs stand together


@functools.cache
def entries(kind: BlockType, device: torch.device) -> Tensor:
    """The entries of a type with a codebook, magnitudes, [entries, length] float32."""
    book = _book(kind)
    table = getattr(import_module("gguf.quants"), kind.name)
    table.init_grid()
    return torch.tensor(table.grid, dtype=torch.float32, device=device).view(
        book.entries, book.length
    )


@functools.cache
def _numbers(kind: BlockType, device: torch.device) -> Tensor:
    """The number of the entry by its magnitudes' own numbers; -1 where there is none, int16."""
    sizes = kind.points[len(kind.points) // 2 :]
    numbers = torch.full((len(sizes) ** _book(kind).length,), -1, dtype=torch.int16, device=device)
    table = entries(kind, device)
    numbers[_key(table, kind)] = torch.arange(len(table), dtype=torch.int16, device=device)
    return numbers


def _book(kind: BlockType) -> Codebook:
    assert kind.codebook is not None
    return kind.codebook


def _key(magnitudes: Tensor, kind: BlockType) -> Tensor:
    """The place of each vector of magnitudes in `_numbers`. [..., length] -> [...] int64."""
    sizes = torch.tensor(
        kind.points[len(kind.points) // 2 :], dtype=torch.float32, device=magnitudes.device
    )
    digits = torch.bucketize(magnitudes, sizes)
    powers = len(sizes) ** torch.arange(magnitudes.shape[-1], device=magnitudes.device)
    return (digits * powers).sum(dim=-1)


def numbers(qvalue: Tensor, kind: BlockType) -> Tensor:
    """The numbers of the entries of neighbours, [..., I / length] int16; -1 for no entry.

    Args:
        qvalue: [..., I] int8, points of the type.
        kind: type with a codebook.
    """
    vectors = qvalue.float().abs().view(*qvalue.shape[:-1], -1, _book(kind).length)
    return _numbers(kind, qvalue.device)[_key(vectors, kind)]


def holds(qvalue: Tensor, kind: BlockType) -> bool:
    """Whether neighbours of qvalues [O, I], points of the type, are entries, and signs even."""
    if (numbers(qvalue, kind) < 0).any():
        return False
    return not _book(kind).even_signs or not _odd(qvalue.view(-1, _SIGNED)).any()


def _odd(values: Tensor) -> Tensor:
    """Whether an odd number of values is negative. [..., 8] -> [...] bool."""
    return (values < 0).sum(dim=-1) % 2 == 1


def round_(scaled: Tensor, kind: BlockType, importance: Tensor | None = None) -> Tensor:
    """Replace values by the points of the nearest entries; return them.

    Args:
        scaled: [..., g] x / scale, float32, contiguous; g is a multiple of 8.
        kind: type with a codebook.
        importance: positive, broadcastable against scaled; None counts all alike.
    """
    table, length = entries(kind, scaled.device), _book(kind).length
    features = torch.cat([table.square(), table], dim=1).T  # [2 length, entries]
    matters = torch.ones_like(scaled) if importance is None else importance.expand_as(scaled)
    matters = matters.reshape(-1, length)
    step = max(_SIGNED, _AT_ONCE // len(table))
    values = scaled.view(-1, length)
    for first in range(0, len(values), step):
        part, weights = values[first : first + step], matters[first : first + step]
        terms, costs = _by_importance(part, weights), part.abs() * weights
        part.copy_(_nearest(part, kind, terms=terms, features=features, costs=costs))
    return scaled


def _by_importance(values: Tensor, matters: Tensor) -> _Terms:
    """The factors of squared magnitudes and of magnitudes, for [V, length] each."""
    linear = values * matters * -2

    def terms(signs: Tensor, rows: Tensor) -> Tensor:
        return torch.cat([matters[rows], linear[rows] * signs], dim=1)

    return terms


def round_units(scaled: Tensor, kind: BlockType, metric: Tensor) -> Tensor:
    """The points nearest to units of neighbours under a metric, [R, u].

    Args:
        scaled: [R, u] x / scale, float32; u is `unit` of the type.
        kind: type with a codebook.
        metric: [u, u], symmetric and positive definite: an error e costs e metric e^T. Where a unit
            is two entries, errors of different entries do not meet in it.
    """
    table, length = entries(kind, scaled.device), _book(kind).length
    first, second = torch.triu_indices(length, length, device=scaled.device).unbind()
    features = torch.cat([table[:, first] * table[:, second], table], dim=1).T  # [F, entries]
    parts = range(0, scaled.shape[1], length)
    corners = torch.stack([metric[at : at + length, at : at + length] for at in parts])
    products = corners[:, first, second] * (1 + (first != second).float())  # [v, pairs]
    values = scaled.reshape(-1, length)
    linear = (scaled.view(-1, len(corners), 1, length) @ corners).reshape(-1, length) * -2

    def terms(signs: Tensor, rows: Tensor) -> Tensor:
        pairs = products[rows % len(corners)] * (signs[:, first] * signs[:, second])
        return torch.cat([pairs, linear[rows] * signs], dim=1)

    costs = (scaled.abs() * metric.diagonal()).view(-1, length)
    return _nearest(values, kind, terms=terms, features=features, costs=costs).view_as(scaled)


def unit(kind: BlockType) -> int:
    """Neighbours that are rounded together: those of an entry, or of even signs."""
    return _SIGNED if _book(kind).even_signs else _book(kind).length


def _nearest(
    values: Tensor, kind: BlockType, *, terms: _Terms, features: Tensor, costs: Tensor
) -> Tensor:
    """The points nearest to some vectors, [V, length].

    Args:
        values: [V, length]; V is whole groups of signs.
        kind: type with a codebook.
        terms: function from signs [n, length] and the numbers of their n vectors to the factors of
            features, [n, F].
        features: [F, entries]; their sum, weighed by the terms, is an entry's distance.
        costs: [V, length], by which the signs that may differ are chosen.
    """
    every = torch.arange(len(values), device=values.device)
    signs = torch.where(values < 0, -1.0, 1.0)
    least, number = (terms(signs, every) @ features).min(dim=1)
    if _book(kind).even_signs:
        rows = every.view(-1, _SIGNED // values.shape[1])  # [S, v]
        rows = rows[_odd(values.view(-1, _SIGNED))]
        flat = rows.flatten()
        other = _with_another_sign(flat, signs[flat], terms=terms, features=features, costs=costs)
        loses = (other.distance - least[flat]).view_as(rows)
        chosen = torch.arange(len(rows), device=rows.device) * rows.shape[1] + loses.argmin(dim=1)
        number[flat[chosen]] = other.number[chosen]
        signs[flat[chosen], other.place[chosen]] *= -1
    return entries(kind, values.device)[number].mul_(signs)


@dataclass(frozen=True, kw_only=True)
class _Changed:
    """Some vectors with one sign changed: the place of the sign, the entry, its distance, [n]."""

    place: Tensor
    number: Tensor
    distance: Tensor


def _with_another_sign(
    rows: Tensor, signs: Tensor, *, terms: _Terms, features: Tensor, costs: Tensor
) -> _Changed:
    """The sign and the entry that lose least where one sign of a vector has to change.

    Args:
        rows: [n], numbers of the vectors.
        signs: [n, length], their signs.
        terms: as in `_nearest`.
        features: as in `_nearest`.
        costs: as in `_nearest`.
    """
    best = _Changed(
        place=torch.zeros_like(rows),
        number=torch.zeros_like(rows),
        distance=torch.full(rows.shape, torch.inf, device=rows.device),
    )
    for place in costs[rows].topk(_FLIPS, dim=1, largest=False).indices.unbind(1):
        changed = signs.scatter(1, place[:, None], -signs.gather(1, place[:, None]))
        distance, number = (terms(changed, rows) @ features).min(dim=1)
        better = distance < best.distance
        best = _Changed(
            place=torch.where(better, place, best.place),
            number=torch.where(better, number, best.number),
            distance=torch.where(better, distance, best.distance),
        )
    return best
