"""The second moment of a linear's input: the Hessian by which GPTQ makes up for rounding errors."""

from collections.abc import Iterable, Iterator, Mapping
from typing import ClassVar, Self

import torch
from torch import Tensor

from quantflow.core.groups import spans
from quantflow.errors import StatisticsError
from quantflow.numerics import statistics
from quantflow.numerics.product import FILLED, filled, operand, product, summed_over_rows
from quantflow.numerics.statistics import ADDED, COUNT, Statistic

# All are part of the result, because the shape of a product chooses its kernel.
ROWS = 256  # rows of the sum in a strip that is added to at once
COLUMNS = 4 * ROWS  # most columns of the sum in one product
# On a device a strip has more rows and is one product: tiles for all of its processors.
DEVICE_ROWS = 2048


HESSIAN_SUM = Statistic(
    name="hessian_sum",
    fold=ADDED,
    cards=None,
    shape=lambda channels: (channels, channels),
    cut=lambda value, part: value[part, part],
    diagonal=Tensor.diagonal,
    remedy="measure with --stats without hessian; quantize accumulates Hessians itself, on the "
    "whole model",
)


class HessianObserver:
    """Sum of x^T x over all samples, and the number of samples.

    The sum is float32: that halves the memory of GPTQ's largest tensor, and is enough. The product
    of one call is rounded once and added, so n calls leave an error of about sqrt(n) * 2^-24 in an
    entry, 7e-7 for 128 of them, of either sign. Independent errors make a matrix of a norm at most
    sqrt(K) times as large, 8e-5 of the diagonal at K = 14336: a hundredth of the damping that GPTQ
    adds to it. (128 sequences of 2048 tokens at K = 512 were measured at 5e-7 in an entry and at
    most 4e-6 in norm.)

    Only the blocks on and below the diagonal are kept: strips of rows that end at it, half of the
    whole sum, or somewhat more on a device, whose strips are higher. There inputs in bfloat16 are
    multiplied as they are (`quantflow.numerics.product.summed_over_rows`): a product of two of them
    is exact in float32, so this loses nothing. `state` makes the whole; `take` does so in little
    more memory than the whole takes. The order of the calls is part of the result's last digits:
    one call per sequence, in sample order, is the canonical one.

    Algebra: merge is commutative, and associative up to rounding in float32: fold in a fixed tree.
    The count is exact. An unseen observer is neutral. Not idempotent: samples merged twice count
    twice. Source: Frantar et al. 2022, arXiv:2210.17323, section 3. Its H is 2 X X^T; GPTQ does not
    depend on a constant factor, so the 2 is dropped here.

    Args:
        features: size K of the last dimension of every x.
    """

    NAME: ClassVar[str] = "hessian"
    STATISTICS: ClassVar[Mapping[str, Statistic]] = statistics.table(HESSIAN_SUM, COUNT)
    SITES: ClassVar[tuple[str, ...]] = ("input",)

    def __init__(self, features: int) -> None:
        """Begin without samples; the first ones take the memory, 2 * K * (K + 256) bytes."""
        self._features = features
        # each [stop - start, stop], rows start..stop of the sum up to the diagonal; none when
        # unseen
        self._strips: list[Tensor] = []
        self._count = torch.zeros((), dtype=torch.int64)

    @property
    def hessian(self) -> Tensor:
        """Mean of x^T x, [K, K] float32; zeros when unseen."""
        return self.state()["hessian_sum"] / self._count.clamp_min(1)

    def update(self, x: Tensor) -> None:
        """Take in samples x [..., K], any float dtype; each of its rows counts one.

        Raises:
            StatisticsError: x has other features, holds NaN or Inf, or the sum overflows; nothing
                is taken in.
        """
        rows = statistics.finite_rows(x, self._features, observer=self.NAME)
        strips = self._strips or _zeros(self._features, device=rows.device)
        diagonal = [
            strip[:, span].diagonal()
            for span, strip in zip(_cuts(self._features, rows.device), strips, strict=True)
        ]
        statistics.refuse_overflow(
            rows, diagonal, what=f"input {list(x.shape)}", observer=self.NAME
        )
        # A product that is rounded once and then added loses less than one that accumulates in the
        # sum, and updates then fold as merges do.
        if rows.device.type == "cpu":
            _add_(strips, rows)
        else:
            add_on_device_(strips, x.detach().reshape(-1, self._features))
        self._strips, self._count = strips, self._count + rows.shape[0]

    def merge(self, other: Self) -> None:
        """Take in the samples of `other`.

        Raises:
            StatisticsError: the number of features differs.
        """
        statistics.refuse_other_shape(self._shape, other._shape, observer=self.NAME)
        if other._strips:
            self._strips = self._strips or _zeros(self._features, device=other._strips[0].device)
            for mine, more in zip(self._strips, other._strips, strict=True):
                mine += more
        self._count = self._count + other._count

    def divide_(self, factors: Tensor) -> None:
        """Turn this into the observer of all samples divided by factors [K] float32, not zero."""
        # there are no strips when unseen
        for span, strip in zip(_cuts(self._features, factors.device), self._strips, strict=False):
            strip /= factors[span, None]
            strip /= factors[: span.stop]

    @classmethod
    def live_bytes(cls, features: int) -> int:
        """The bytes of an observer that has seen samples."""
        return observer_bytes(features)

    @staticmethod
    def update_bytes(features: int, samples: int) -> int:
        """The bytes that an update takes beside its samples and the observer."""
        return max(statistics.update_bytes(features, samples), folding_bytes(features, samples))

    def state(self) -> dict[str, Tensor]:
        """{"hessian_sum": [K, K] float32, "count": [] int64}, a copy beside the strips."""
        return self._state(reversed(self._strips))

    def take(self) -> dict[str, Tensor]:
        """The `state`, after which the observer is unseen; a strip is freed once it is copied."""
        state = self._state(_popped(self._strips))
        self._count = torch.zeros((), dtype=torch.int64)
        return state

    def _state(self, strips: Iterable[Tensor]) -> dict[str, Tensor]:
        size, device = self._features, self._count.device
        return {
            "hessian_sum": whole_of(strips, size, device=device)
            if self._strips
            else torch.zeros(size, size, device=device),
            "count": self._count,
        }

    @property
    def _shape(self) -> tuple[int, int]:
        return self._features, self._features

    @classmethod
    def from_state(cls, state: Mapping[str, Tensor]) -> Self:
        """The observer that had this state; the sum is copied.

        Raises:
            StatisticsError: the state is not one of this observer's.
        """
        expected = {"hessian_sum": (torch.float32, (None, None)), "count": (torch.int64, ())}
        hessian_sum, count = statistics.checked_state(state, expected, observer=cls.NAME)
        statistics.refuse_negative(
            hessian_sum.diagonal(), "the diagonal of hessian_sum", observer=cls.NAME
        )
        statistics.refuse_negative(count, "count", observer=cls.NAME)
        observer = cls(hessian_sum.shape[0])
        observer._strips = [
            hessian_sum[span, : span.stop].clone()
            for span in _cuts(observer._features, hessian_sum.device)
        ]
        observer._count = count
        return observer


def checked_hessian(
    statistics: Mapping[str, Tensor], weights: Mapping[str, Tensor], *, algorithm: str
) -> tuple[Tensor, int]:
    """The statistics `hessian_sum` and `count` of an input, checked.

    Values off the diagonal are checked by `feedback_of`, while it copies them.

    Args:
        statistics: statistics of the input that all `weights` share.
        weights: name -> [O, I].
        algorithm: name of the algorithm that needs them, for messages.

    Raises:
        StatisticsError: a statistic is missing, has another shape, or is damaged.
    """
    for statistic in (HESSIAN_SUM.name, COUNT.name):
        if statistic not in statistics:
            raise StatisticsError(
                f"{next(iter(weights))}: statistic {statistic} is missing",
                f"measure for {algorithm}",
            )
    hessian_sum = statistics[HESSIAN_SUM.name]
    tokens = int(statistics[COUNT.name])
    for name, weight in weights.items():
        if tuple(hessian_sum.shape) != (weight.shape[-1], weight.shape[-1]):
            raise StatisticsError(
                f"{name}: hessian_sum is {list(hessian_sum.shape)}, weight is {list(weight.shape)}",
                "measure with this model, and quantize together only linears that share an input",
            )
    diagonal = hessian_sum.diagonal()
    if not torch.isfinite(diagonal).all() or (diagonal < 0).any() or tokens < 0:
        raise StatisticsError(
            f"{next(iter(weights))}: hessian_sum holds NaN, Inf or a negative diagonal, or "
            f"count={tokens} is negative",
            "measure again",
        )
    return hessian_sum, tokens


def shrink_(hessian_sum: Tensor) -> None:
    """Add the mean of its diagonal to a Hessian's diagonal.

    The measured matrix then counts half, the assumption that all features are alike the other half.
    With few samples most directions of the input were not seen, and the measured part of the others
    is largely chance. With as many samples as features GPTQ makes up for rounding errors along
    chance; shrunk it is better than round to nearest for any number of samples
    (benchmarks/expert_tokens.py). A sum of zeros stays zero. Source: Ledoit and Wolf 2004, "A
    well-conditioned estimator for large-dimensional covariance matrices", with one half as the
    intensity.

    Args:
        hessian_sum: [K, K] float32, modified.
    """
    diagonal = hessian_sum.diagonal()
    diagonal += diagonal.double().mean().float()


def folding_bytes(features: int, samples: int) -> int:
    """The bytes of an update.

    They are transposed columns, those of a strip once more and in oneDNN's form, and a product,
    twice.
    """
    wide = min(features, COLUMNS)
    samples += -samples % FILLED
    return 4 * ((wide + 2 * ROWS) * samples + 2 * ROWS * wide)


def folding_bytes_on_device(features: int, samples: int) -> int:
    """The bytes of an update there: samples in float32, and the product of the last strip.

    Where bfloat16 is widened to be multiplied, both operands are there once more.
    """
    return 4 * features * (3 * samples + min(features, DEVICE_ROWS))


def observer_bytes(features: int, *, rows: int = ROWS) -> int:
    """The bytes of an observer that has seen samples: its strips of so many rows."""
    return sum(4 * (span.stop - span.start) * span.stop for span in spans(features, rows))


def _cuts(features: int, device: torch.device) -> list[slice]:
    """The rows of each strip."""
    return spans(features, ROWS if device.type == "cpu" else DEVICE_ROWS)


def _add_(strips: Iterable[Tensor], rows: Tensor) -> None:
    """Add x^T x of rows [N, K] float32 in host memory to the strips of a sum."""
    features = rows.shape[1]
    for columns in spans(features, COLUMNS):
        right = _turned(rows, columns)
        for span, strip in zip(spans(features, ROWS), strips, strict=True):
            if span.stop > columns.start:
                stop = min(span.stop, columns.stop)
                within = slice(span.start - columns.start, span.stop - columns.start)
                left = operand(right[within] if stop == span.stop else _turned(rows, span))
                strip[:, columns.start : stop] += product(left, right[: stop - columns.start])


def add_products_(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add left^T right, of rows [N, A] and [N, B] float32, to a sum [A, B]; all on one device."""
    if total.device.type != "cpu":
        for span in spans(len(total), DEVICE_ROWS):
            total[span] += summed_over_rows(left[:, span], right)
        return
    for columns in spans(right.shape[1], COLUMNS):
        turned = _turned(right, columns)
        for span in spans(left.shape[1], ROWS):
            total[span, columns] += product(operand(_turned(left, span)), turned)


def add_on_device_(strips: Iterable[Tensor], rows: Tensor) -> None:
    """Add x^T x of rows [N, K], any float dtype, to the strips of a sum, a product for each."""
    for span, strip in zip(spans(rows.shape[1], DEVICE_ROWS), strips, strict=True):
        strip += summed_over_rows(rows[:, span], rows[:, : span.stop])


def _zeros(features: int, *, device: torch.device) -> list[Tensor]:
    return [
        torch.zeros(span.stop - span.start, span.stop, device=device)
        for span in _cuts(features, device)
    ]


def _turned(rows: Tensor, columns: slice) -> Tensor:
    """Some columns of rows [N, K], `filled`, transposed and contiguous, [C, N or more].

    Each of the steps is one that torch does quickly.
    """
    return filled(rows[:, columns].contiguous()).T.contiguous()


def _popped(strips: list[Tensor]) -> Iterator[Tensor]:
    while strips:
        yield strips.pop()


def whole_of(strips: Iterable[Tensor], features: int, *, device: torch.device) -> Tensor:
    """The sum, [features, features], from its strips, the last one first.

    In this order memory is taken about as fast as it is freed: the last strip fills a tenth of the
    pages, not all of them.
    """
    whole = torch.empty(features, features, device=device)
    for strip in strips:
        first = strip.shape[1] - strip.shape[0]
        for part in spans(strip.shape[0], ROWS):  # few rows: a corner is there three times
            rows = slice(first + part.start, first + part.stop)
            whole[rows, : rows.stop] = strip[part, : rows.stop]
            whole[: rows.start, rows] = strip[part, : rows.start].T
            corner = whole[rows, rows]
            corner.copy_(corner.tril() + corner.tril(-1).T)
    return whole
