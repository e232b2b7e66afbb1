"""SmoothQuant: move the size of outlier channels from a linear's input into its weight.

    x @ W.T  =  (x / s) @ (W * s).T        s_j = amax_x_j ** alpha / amax_w_j ** (1 - alpha)

amax_x_j is the largest magnitude of input channel j, amax_w_j that of column j over all linears of
the fold. Heads that share their values share the larger of theirs. `alpha: auto` tries 0.00 to 1.00
by 0.05, with inputs and weights quantized by the scheme, and takes the alpha whose outputs differ
least from the original ones on a sample of calibration rows. The fold stays as it is where no alpha
improves on it. Source: Xiao et al. 2022, arXiv:2211.10438, section 4, equation 4; the search is
Intel Neural Compressor's `alpha="auto"`, with the whole fold's outputs as its measure.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from quantflow.core.parallel import SEQUENTIAL, Workers
from quantflow.core.support import AS_MEASURED, AS_MEASURED_HISTOGRAMS, Refusal, Supports
from quantflow.errors import StatisticsError, UsageError
from quantflow.numerics import trial
from quantflow.numerics.smoothing import Fold, Outcome, Smoothing, column_amax, fitted
from quantflow.observers.channel_amax import CHANNEL_AMAX
from quantflow.observers.rows import NAME as ROWS

NAME: str = "smoothquant"
VERSION: int = 2
SUPPORTS = Supports(
    mixed_inputs=Refusal(remedy=f"leave {NAME} out, or write down: false"),
    histograms=AS_MEASURED_HISTOGRAMS,
    chosen_schemes=AS_MEASURED,
)
# the option by which a KV cache's values change, so that measured scales do not fit
CHANGES_VALUES = "linears"
# options of `best`, where a scheme has no transforms of its own
SEARCHED: Mapping[str, Any] = {"alpha": "auto"}
OPTIONS: Mapping[str, Any] = {"alpha": 0.5, "linears": None}
ALPHAS = tuple(step / 20 for step in range(21))


def checked(options: Mapping[str, Any]) -> dict[str, Any]:
    """A recipe's options, checked.

    Args:
        options: `alpha`, the share of the difficulty that moves, from 0 (weights keep theirs) to 1
            (all of the input's), or `auto`; `linears`, whether linears absorb factors too, where
            the fold has no norm. None is true only where alpha is searched, since no one alpha is
            right for these folds.

    Raises:
        UsageError: an option has no meaning.
    """
    alpha, linears = options["alpha"], options["linears"]
    number = isinstance(alpha, float | int) and not isinstance(alpha, bool)
    if alpha != "auto" and not (number and 0 <= alpha <= 1):
        raise UsageError(f"smoothquant alpha={alpha!r}", "give a number from 0 to 1, or auto")
    if not isinstance(linears, bool | None):
        raise UsageError(f"smoothquant linears={linears!r}", "give true or false")
    return {
        "alpha": float(alpha) if number else alpha,
        "linears": alpha == "auto" if linears is None else linears,
    }


def needs(options: Mapping[str, Any]) -> tuple[str, ...]:
    """The statistics of the input that `solve` reads with these options."""
    return (CHANNEL_AMAX.name, ROWS) if options["alpha"] == "auto" else (CHANNEL_AMAX.name,)


def working_bytes(
    features: int, rows: int, *, options: Mapping[str, Any], samples: int, workers: int
) -> int:
    """The most memory that `solve` takes beyond weights and statistics, in bytes.

    It is that of `quantflow.numerics.trial`.
    """
    if options["alpha"] != "auto":
        return 0
    return trial.working_bytes(features, rows, samples=samples, workers=workers)


def solve(fold: Fold, *, options: Mapping[str, Any], workers: Workers = SEQUENTIAL) -> Outcome:
    """Choose the factors of one fold.

    Args:
        fold: linears, with the statistic `channel_amax` [I] of their input; for `alpha: auto` also
            `rows` [R, I], and the statistics that the static input of a scheme needs.
        options: result of `checked`.
        workers: compare several alphas at once; how many changes nothing but the time.

    Returns:
        The factors; decisions: alpha (None where no alpha improves), error and error_before (both
        relative and squared, of the rows, where alpha was searched), the smallest and the largest
        factor.

    Raises:
        UsageError: an option has no meaning.
        InputError: the fold is empty, a weight has another number of input features, or is not
            finite.
        StatisticsError: a statistic is missing, has another shape, is negative or not finite.
    """
    alpha = checked(options)["alpha"]
    features = fold.features
    amax_x = fold.statistic(CHANNEL_AMAX.name, (features,))
    if not (torch.isfinite(amax_x) & (amax_x >= 0)).all():
        raise StatisticsError(
            "smoothquant: channel_amax holds a negative value, NaN or Inf", "measure again"
        )
    amax_w = column_amax(fold.weights, features=features)
    x, w = (
        fold.absorber.shared(amax.double(), lambda split: split.amax(1))
        for amax in (amax_x, amax_w)
    )
    if alpha != "auto":
        smoothing = _with(alpha, x, w, fold)
        return Outcome(smoothing=smoothing, decisions={"alpha": alpha, **_range(smoothing)})
    rows = fold.statistic(ROWS, (None, features))
    compared = trial.trial(fold)

    def loss(alpha: float | None) -> float:
        factors = (
            torch.ones(features, device=rows.device)
            if alpha is None
            else _with(alpha, x, w, fold).factors
        )
        return compared.output_loss(factors, rows)

    before, *losses = workers.map(loss, (None, *ALPHAS))
    power = compared.power(rows) or 1.0
    least = min(losses)
    decisions = {"error_before": before / power, "error": min(before, least) / power}
    if not least < before:
        return Outcome(
            smoothing=None,
            decisions={"alpha": None, "kept": "no alpha lowers the error", **decisions},
        )
    alpha = ALPHAS[losses.index(least)]
    smoothing = _with(alpha, x, w, fold)
    return Outcome(
        smoothing=smoothing, decisions={"alpha": alpha, **decisions, **_range(smoothing)}
    )


def _with(alpha: float, amax_x: Tensor, amax_w: Tensor, fold: Fold) -> Smoothing:
    wanted = amax_x**alpha / amax_w ** (1 - alpha)
    return fitted(wanted, absorber=fold.absorber, carries=(amax_x > 0) & (amax_w > 0))


def _range(smoothing: Smoothing) -> dict[str, Any]:
    factors = smoothing.factors
    return {"smallest_factor": float(factors.min()), "largest_factor": float(factors.max())}
