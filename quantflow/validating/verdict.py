"""The errors for verdicts that are not the expected ones, which decide the exit code."""

from collections.abc import Mapping
from typing import Any

from quantflow.errors import GateError

TIES = 1e-3  # nats of mean KL divergence


def raise_for_verdict(result: Mapping[str, Any], *, allow_inconclusive: bool) -> None:
    """Do nothing when the outcome is the expected one.

    Raises:
        GateError: the gate failed, could not decide, or passed although a failure was expected; or
            the artifact is worse than the older one, or may be.
    """
    outcome, expected, name = result["outcome"], result["expect"], result["artifact"]
    if outcome == expected or (outcome == "inconclusive" and allow_inconclusive):
        _raise_for_regression(result, allow_inconclusive=allow_inconclusive)
        return
    if outcome == "inconclusive":
        raise GateError(
            f"{name}: inconclusive: {'; '.join(result['reasons'])}",
            "give more --tokens, or --allow-inconclusive",
        )
    if outcome == "pass":
        raise GateError(
            f"{name}: passes gate {result['gate']['name']}, a failure was expected",
            "drop `expect: fail`",
        )
    raise GateError(
        f"{name}: fails gate {result['gate']['name']}: {'; '.join(result['reasons'])}",
        _near_ties(result) or "use a finer scheme, another algorithm or more calibration text",
    )


def _near_ties(result: Mapping[str, Any]) -> str | None:
    """The remedy where the most likely tokens alone differ, and hardly in probability.

    Distributions that are as close as TIES differ by at most 0.0224 in the probability of any set
    of tokens (Pinsker's inequality), so tokens that change places were about as likely.
    """
    divergence = result["metrics"]["mean_kld"]["value"]
    top1_alone = all(reason.startswith("top1_agreement") for reason in result["reasons"])
    if not top1_alone or divergence > TIES:
        return None
    return (
        f"the most likely tokens are near ties (mean KLD {divergence:.5f} nats, perplexity of the "
        f"source {result['perplexity']['baseline']:,.0f}), as in a model that was not trained: "
        "judge a trained one, or give thresholds of your own with --gate FILE"
    )


def _raise_for_regression(result: Mapping[str, Any], *, allow_inconclusive: bool) -> None:
    """Do nothing where a validation was not compared with an older one, or passed.

    Raises:
        GateError: it is a regression, or undecided.
    """
    regression = result.get("regression")
    if (
        regression is None
        or regression["outcome"] == "pass"
        or (regression["outcome"] == "inconclusive" and allow_inconclusive)
    ):
        return
    beside = f"{result['artifact']} beside {regression['previous']['artifact']}"
    why = "; ".join(regression["reasons"])
    if regression["outcome"] == "inconclusive":
        raise GateError(
            f"{beside}: inconclusive: {why}",
            "give more --tokens, a larger max_regression, or --allow-inconclusive",
        )
    raise GateError(
        f"{beside}: a regression: {why}",
        "see what changed with `quantflow diff`, or keep the older artifact",
    )
