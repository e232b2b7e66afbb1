"""The remedy of a gate that fails: another scheme, or another model where tokens are near ties."""

import pytest

from quantflow.errors import GateError
from quantflow.validating.verdict import TIES, raise_for_verdict


def failed(divergence, *reasons):
    return {
        "outcome": "fail",
        "expect": "pass",
        "artifact": "a",
        "gate": {"name": "int4"},
        "reasons": list(reasons),
        "metrics": {"mean_kld": {"value": divergence}},
        "perplexity": {"baseline": 4166.5},
    }


def remedy_of(result):
    with pytest.raises(GateError) as caught:
        raise_for_verdict(result, allow_inconclusive=False)
    return caught.value.remedy


def test_near_ties_of_a_model_that_was_not_trained_are_said():
    told = remedy_of(failed(4.2e-5, "top1_agreement: 95 % bound 0.897 is outside >= 0.9"))
    assert told.startswith(
        "the most likely tokens are near ties (mean KLD 0.00004 nats, perplexity of the source "
        "4,166), as in a model that was not trained"
    )


@pytest.mark.parametrize(
    "result",
    [
        failed(2 * TIES, "top1_agreement: 0.897"),
        failed(4.2e-5, "top1_agreement: 0.897", "ppl_ratio: 1.2"),
    ],
)
def test_a_model_that_did_change_gets_the_usual_remedy(result):
    assert remedy_of(result).startswith("use a finer scheme")
