"""AWQ: enlarge the weights of channels that matter, so that rounding costs less, and clip ranges.

    x @ W.T  =  (x / s) @ (W * s).T
    s_j = mean|x_j| ** alpha    or    mean|x_j| ** alpha / mean|w_j| ** (1 - alpha)

with s divided by sqrt(max s * min s). mean|w_j| is the mean over all rows of |w| over the largest
magnitude of its group. alpha goes from 0.00 to 0.95 by 0.05 in both forms. The candidate is taken
whose outputs differ least from the original ones with the weights rounded to nearest. That
difference is exact over all calibration tokens, tr(E H E^T) with E = W' - W and H = X^T X: no
sample of the inputs is needed. The fold stays as it is where no candidate improves on it.

Then the clip: each group of a row is clipped to 1.00 to 0.55 of its largest magnitude by 0.05. The
clip is taken whose own part of the output error, e H_gg e^T, is smallest. It changes the function,
as rounding does, and is part of rounding. Sources: Lin et al. 2023, arXiv:2306.00978, section 3.2;
AutoAWQ 0.2.9, `quantize/quantizer.py`, for the second form and the clip, with the outputs of the
fold's linears as the measure of both, where AutoAWQ takes those of the block around them.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from quantflow.core import groups
from quantflow.core.parallel import SEQUENTIAL, Workers
from quantflow.core.scheme import TensorScheme
from quantflow.core.support import AS_MEASURED, AS_MEASURED_HISTOGRAMS, Refusal, Supports
from quantflow.errors import StatisticsError, UsageError
from quantflow.numerics import trial
from quantflow.numerics.grid import weight_grids
from quantflow.numerics.rounding import rounded
from quantflow.numerics.smoothing import Fold, Outcome, Smoothing, fitted
from quantflow.numerics.statistics import COUNT
from quantflow.observers.hessian import HESSIAN_SUM
from quantflow.observers.mean_abs import ABS_SUM

NAME: str = "awq"
VERSION: int = 1
SUPPORTS = Supports(
    mixed_inputs=Refusal(remedy=f"leave {NAME} out, or write down: false"),
    histograms=AS_MEASURED_HISTOGRAMS,
    chosen_schemes=AS_MEASURED,
)
# the option by which a KV cache's values change, so that measured scales do not fit
CHANGES_VALUES = "linears"
OPTIONS: Mapping[str, Any] = {"duo": "both", "clip": "auto", "linears": True}
ALPHAS = tuple(step / 20 for step in range(20))
SHARES = tuple(1 - step / 20 for step in range(10))  # clips, as shares of a group's amax
_CLIPPED = ("per_channel", "per_group")  # elsewhere a row's range is not its own
_Candidate = tuple[float, bool]  # alpha, and whether s is divided by the weights' part


def checked(options: Mapping[str, Any]) -> dict[str, Any]:
    """A recipe's options, checked.

    Args:
        options: `duo`, whether s is divided by the weights' part: false, true, or `both` tries
            both; `clip`, true, false, or `auto`: where the algorithm takes the whole range of a
            weight; `linears`, whether linears absorb factors too, where the fold has no norm.

    Raises:
        UsageError: an option has no meaning.
    """
    for name, words in (("duo", ("both",)), ("clip", ("auto",)), ("linears", ())):
        if not isinstance(options[name], bool) and options[name] not in words:
            raise UsageError(
                f"awq {name}={options[name]!r}", f"give {', '.join(['true', 'false', *words])}"
            )
    return dict(options)


def needs(options: Mapping[str, Any]) -> tuple[str, ...]:
    """The statistics of the input that `solve` and `clipped` read."""
    del options
    return (ABS_SUM.name, HESSIAN_SUM.name, COUNT.name)


def clips(options: Mapping[str, Any], *, whole_range: bool) -> bool:
    """Whether weights are clipped before an algorithm quantizes them.

    `whole_range` says that the algorithm takes a weight's whole range, rather than choose one.
    """
    return options["clip"] is True or (options["clip"] == "auto" and whole_range)


def working_bytes(
    features: int, rows: int, *, options: Mapping[str, Any], samples: int, workers: int
) -> int:
    """The most memory that `solve` takes beyond weights and statistics, in bytes.

    It is that of `quantflow.numerics.trial`.
    """
    del options, samples
    return trial.working_bytes(features, rows, samples=0, workers=workers)


def solve(fold: Fold, *, options: Mapping[str, Any], workers: Workers = SEQUENTIAL) -> Outcome:
    """Choose the factors of one fold.

    Args:
        fold: linears, with the statistics `abs_sum` [I], `count` [] and `hessian_sum` [I, I]
            float32 of their input.
        options: result of `checked`.
        workers: compare several candidates at once; how many changes nothing but the time.

    Returns:
        The factors; decisions: alpha (None where no candidate improves) and duo, error and
        error_before (relative and squared, of the outputs), the smallest and the largest factor.

    Raises:
        UsageError: an option has no meaning.
        InputError: the fold is empty, a weight has another number of input features, or is not
            finite.
        StatisticsError: a statistic is missing, has another shape, is negative or not finite.
    """
    duo = checked(options)["duo"]
    features = fold.features
    hessian = fold.statistic(HESSIAN_SUM.name, (features, features))
    abs_sum = fold.statistic(ABS_SUM.name, (features,))
    count = int(fold.statistic(COUNT.name, ()))
    if not (torch.isfinite(abs_sum) & (abs_sum >= 0)).all() or count < 1:
        raise StatisticsError(
            f"awq: abs_sum holds a negative value, NaN or Inf, or count={count}", "measure again"
        )
    means = abs_sum.double() / count, _weight_means(fold, features=features)
    x, w = (fold.absorber.shared(mean, lambda split: split.mean(1)) for mean in means)
    compared = trial.trial(fold)

    def loss(candidate: _Candidate | None) -> float:
        factors = (
            torch.ones(features, device=hessian.device)
            if candidate is None
            else _with(candidate, x, w, fold).factors
        )
        return compared.weight_loss(factors, hessian)

    candidates = [
        (alpha, form) for form in (False, True) if duo in ("both", form) for alpha in ALPHAS
    ]
    before, *losses = workers.map(loss, (None, *candidates))
    power = compared.weight_power(hessian) or 1.0
    least = min(losses)
    decisions: dict[str, Any] = {
        "error_before": before / power,
        "error": min(before, least) / power,
    }
    if not least < before:
        return Outcome(
            smoothing=None,
            decisions={"alpha": None, "kept": "no factors lower the error", **decisions},
        )
    candidate = candidates[losses.index(least)]
    smoothing = _with(candidate, x, w, fold)
    extent = {
        "smallest_factor": float(smoothing.factors.min()),
        "largest_factor": float(smoothing.factors.max()),
    }
    return Outcome(
        smoothing=smoothing,
        decisions={"alpha": candidate[0], "duo": candidate[1], **decisions, **extent},
    )


def clipped(
    weights: Mapping[str, Tensor],
    scheme: TensorScheme,
    *,
    hessian_sum: Tensor,
    scale_dtype: torch.dtype,
    workers: Workers = SEQUENTIAL,
) -> tuple[dict[str, Tensor], dict[str, float]]:
    """The weights with each group of a row clipped where rounding it then loses least.

    Args:
        weights: name -> [O, I], any float dtype, linears that share an input; not modified.
        scheme: int, per channel or per group; with any other the weights are returned as they are.
        hessian_sum: [I, I] float32, the sum of x^T x over the input's rows.
        scale_dtype: dtype in which the layout stores scales.
        workers: run units of rows; how many there are changes nothing but the time.

    Returns:
        name -> [O, I] float32; name -> the share of its groups that are clipped.
    """
    if scheme.kind != "int" or scheme.granularity not in _CLIPPED:
        return dict(weights), {}
    features = hessian_sum.shape[0]
    size = groups.group_size_for(scheme, features)
    # [G, g, g]
    blocks = torch.stack([hessian_sum[span, span] for span in groups.spans(features, size)])

    cut_weights = {
        name: weight.new_empty(weight.shape, dtype=torch.float32)
        for name, weight in weights.items()
    }

    def unit(item: tuple[str, slice]) -> int:
        name, rows = item
        cut_weights[name][rows], count = _cut(
            weights[name][rows].float(), blocks, scheme=scheme, scale_dtype=scale_dtype
        )
        return count

    shares: dict[str, float] = {}
    for name, weight in weights.items():
        counts = workers.map(unit, [(name, rows) for rows in groups.row_units(weight)])
        shares[name] = sum(counts) / (len(weight) * len(blocks))
    return cut_weights, shares


def _weight_means(fold: Fold, *, features: int) -> Tensor:
    """The mean over all rows of |w| over the largest magnitude of its group, [I] float64."""
    total = torch.zeros(
        features, dtype=torch.float64, device=next(iter(fold.weights.values())).device
    )
    for name, weight in fold.weights.items():
        size = groups.group_size_for(fold.schemes[name].weights, features, name=name)
        for rows in groups.row_units(weight):
            split = groups.to_groups(weight[rows].float(), size).abs()  # [O, G, g]
            total += (
                (split / (split.amax(dim=-1, keepdim=True) + 1e-6))
                .flatten(1)
                .sum(dim=0, dtype=torch.float64)
            )
    return total / sum(len(weight) for weight in fold.weights.values())


def _with(candidate: _Candidate, x: Tensor, w: Tensor, fold: Fold) -> Smoothing:
    """The factors of a candidate; x is mean |x| and w the weights' means, [I] float64 each."""
    alpha, duo = candidate
    carries = (x > 0) & (w > 0)
    wanted = (x**alpha / (w ** (1 - alpha) + 1e-4) if duo else x**alpha).clamp_min(1e-4)
    if carries.any():  # channels that carry nothing do not enter the normalisation
        wanted = wanted / (wanted[carries].max() * wanted[carries].min()).sqrt()
    return fitted(wanted, absorber=fold.absorber, carries=carries)


def _cut(
    weight: Tensor, blocks: Tensor, *, scheme: TensorScheme, scale_dtype: torch.dtype
) -> tuple[Tensor, int]:
    """Some rows of a weight, clipped, and the number of clipped groups.

    Args:
        weight: [O, I] float32.
        blocks: diagonal blocks of the Hessian, [G, g, g].
        scheme: scheme of the weight.
        scale_dtype: dtype in which its scales are stored.
    """
    split = groups.to_groups(weight, blocks.shape[-1])  # [O, G, g]
    amax = split.abs().amax(dim=-1, keepdim=True)  # [O, G, 1]
    best, least = split, amax.new_full(amax.shape[:2], torch.inf)
    chosen = torch.ones_like(least)
    for share in SHARES:
        limit = amax * share
        cut = split.clamp(-limit, limit)
        grids = weight_grids({"": cut.flatten(1)}, scheme, scale_dtype=scale_dtype)
        # [O, G, g]
        error = (
            rounded({"": cut.flatten(1)}, grids, scheme)[""].dequantize().reshape(split.shape)
            - split
        )
        columns = error.transpose(0, 1)  # [G, O, g]
        loss = ((columns @ blocks) * columns).sum(dim=-1).T  # [O, G]
        better = loss < least
        best = torch.where(better[..., None], cut, best)
        chosen = torch.where(better, torch.full_like(chosen, share), chosen)
        least = torch.where(better, loss, least)
    return best.flatten(1), int((chosen < 1).sum())
