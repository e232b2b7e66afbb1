"""The ledger of tokens that a router sends to each expert."""

from dataclasses import replace

import pytest
import torch

from quantflow.errors import InputError
from quantflow.files.canonical import read_json
from quantflow.measuring.merging.ranks import unify
from quantflow.measuring.record import Measurement, read_measurement, write_measurement
from quantflow.measuring.routing import ledger_of, routed_key, summary

EXPERTS = "model.layers.0.mlp.experts"


def counts(*tokens, experts=EXPERTS):
    return {
        routed_key(f"{experts}.{number}.gate_proj"): torch.tensor(count)
        for number, count in enumerate(tokens)
    }


def measured(tokens, *, rank, world, fed="routed"):
    """What a rank writes that saw one sample of two tokens."""
    gates = [f"{EXPERTS}.{number}.gate_proj" for number in range(len(tokens))]
    meta = {
        "layout_version": 1,
        "kind": "measurement",
        "model": {"name": "tiny", "fingerprint": "f" * 64, "family": "qwen3_moe"},
        "mesh": {"rank": rank, "world": world, "tp": 1, "dp": world, "ep": 1},
        "dtype": "float32",
        "seed": 0,
        "calibration": {
            "hash": "c" * 64,
            "samples": world,
            "tokens": 2 * world,
            "sequence_length": 2,
        },
        "observers": [],
        "experts": fed,
        "tensors": {
            name: {"kind": "replicated", "axis": None, "offset": 0, "full_shape": [4, 3]}
            for name in gates
        },
        "counts": {"samples": 1, "tokens": 2},
        "tools": {},
    }
    return Measurement(
        meta=meta, statistics=counts(*tokens), sequences=[torch.tensor([1, 2])], indices=[rank]
    )


def test_a_key_is_that_of_the_experts_first_linear():
    assert (
        routed_key(f"{EXPERTS}.3.gate_proj")
        == "model.layers.0.mlp.experts.3.gate_proj|routed|count"
    )


def test_the_ledger_lists_every_expert_by_number_with_the_least_and_the_median():
    second = "model.layers.1.block_sparse_moe.experts"
    statistics = {
        **counts(7, 0, 30, 5),
        **counts(4, 2, experts=second),
        "model.norm|input|amax": torch.tensor(1.0),
    }
    assert ledger_of(statistics) == {
        EXPERTS: {"tokens": [7, 0, 30, 5], "least": 0, "median": 6},
        second: {"tokens": [4, 2], "least": 2, "median": 3},
    }


def test_numbers_are_no_words():
    assert ledger_of(counts(*range(12)))[EXPERTS]["tokens"] == list(range(12))  # 10 is not before 2


def test_experts_of_other_ranks_are_unknown_and_not_zero():
    statistics = {key: value for key, value in counts(7, 1, 3).items() if ".1." not in key}
    assert ledger_of(statistics)[EXPERTS] == {"tokens": [7, None, 3], "least": 3, "median": 5}


def test_a_model_without_experts_has_no_ledger():
    assert ledger_of({"model.layers.0.mlp.up_proj|input|count": torch.tensor(4)}) == {}


def test_a_summary_of_nothing_is_a_mistake():
    with pytest.raises(ValueError, match=r"min\(\)|empty"):
        summary([])


def test_a_measurement_is_written_with_its_ledger_and_read_again(tmp_path):
    write_measurement(tmp_path, measured([2, 0, 1], rank=0, world=1))
    assert read_json(tmp_path / "measurement.json")["routed"] == {
        EXPERTS: {"tokens": [2, 0, 1], "least": 0, "median": 1}
    }
    assert read_measurement(tmp_path).meta["experts"] == "routed"


def test_tokens_add_up_over_ranks_and_an_expert_that_got_none_is_named(tmp_path):
    (merged,) = unify(
        [measured([2, 0, 0], rank=0, world=2), measured([1, 0, 1], rank=1, world=2)], [[0, 1]]
    )
    assert merged.meta["unified"]["unseen"] == [f"{EXPERTS}.1.gate_proj"]
    write_measurement(tmp_path, merged)
    assert read_json(tmp_path / "measurement.json")["routed"][EXPERTS]["tokens"] == [3, 0, 1]


def test_ranks_that_showed_their_experts_other_tokens_are_not_merged():
    ranks = [measured([2, 0], rank=0, world=2), measured([1, 1], rank=1, world=2, fed="all")]
    with pytest.raises(InputError, match=r"rank 1: experts is 'all', on rank 0 'routed'"):
        unify(ranks, [[0, 1]])


def test_an_unknown_field_beside_the_ledger_is_still_refused(tmp_path):
    one = measured([2], rank=0, world=1)
    with pytest.raises(InputError, match=r"unknown \['expert'\]"):
        write_measurement(tmp_path, replace(one, meta={**one.meta, "expert": 1}))
