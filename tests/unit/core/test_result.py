"""Results of an algorithm."""

import dataclasses
import json

import pytest
import torch

from quantflow.algorithms import ALGORITHMS
from quantflow.core.result import GroupResult
from quantflow.core.scheme import preset, with_group_size


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_decisions_survive_json_unchanged(algorithm):
    statistics = {
        "hessian_sum": torch.eye(8, dtype=torch.float64),
        "count": torch.tensor(8),
        "a|gradient_sum": torch.eye(2, dtype=torch.float64),
    }
    weights = {"a": torch.arange(16.0).reshape(2, 8)}
    scheme = with_group_size(preset("W4A16"), 4)
    result = ALGORITHMS[algorithm].quantize_group(
        weights, scheme, statistics=statistics, scale_dtype=torch.float32
    )
    assert json.loads(json.dumps(result["a"].decisions)) == result["a"].decisions
    assert result["a"].decisions["zero_groups"] == 0


def test_a_result_is_frozen_and_takes_keywords_only():
    result = GroupResult(weight=None, decisions={})
    with pytest.raises(dataclasses.FrozenInstanceError):
        result.weight = 1
    with pytest.raises(TypeError):
        GroupResult(None, {})
