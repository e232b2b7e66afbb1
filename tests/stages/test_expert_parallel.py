"""Experts spread over cards: each measures its own, and together they are one process."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, DeepseekV3Config, GptOssConfig

from quantflow.distributed.placement import share
from quantflow.errors import InputError
from quantflow.measuring.merging.ranks import unify
from quantflow.measuring.record import Measurement, read_measurement, write_measurement
from tests.conftest import LATENT, OF_DEEPSEEK, SHAPE, write_tokenizer
from tests.shared import run

STATS = "amax,channel_amax,mean_abs"


def line(text_files: dict[str, Path]) -> tuple[object, ...]:
    return ("--calibration", text_files["calibration"], "--samples", "4", "--stats", STATS)


@pytest.fixture(scope="module")
def alone(tmp_path_factory, family_model, text_files) -> Path:
    """A Mixtral measured by one process."""
    folder = tmp_path_factory.mktemp("alone") / "m"
    assert run("measure", family_model("mixtral"), "-o", folder, *line(text_files)) == 0
    return folder


def same_bytes(folder: Path, expected: Path) -> bool:
    name = "rank-000-of-001/statistics.safetensors"
    return (folder / name).read_bytes() == (expected / name).read_bytes()


@pytest.mark.slow
def test_two_cards_measure_what_one_process_does(tmp_path, family_model, text_files, alone):
    words = (*line(text_files), "--ranks", "2", "--ep", "2")
    assert run("measure", family_model("mixtral"), "-o", tmp_path / "m", *words) == 0
    ranks = [read_measurement(folder) for folder in sorted((tmp_path / "m").glob("rank-*"))]
    for card, rank in enumerate(ranks):
        assert rank.meta["mesh"] == {"rank": card, "world": 2, "tp": 2, "dp": 1, "ep": 2}
        numbers = {
            int(key.split(".experts.")[1].split(".")[0])
            for key in rank.statistics
            if ".experts." in key
        }
        assert numbers == {2 * card, 2 * card + 1}
        assert "model.layers.0.self_attn.q_proj|input|amax" in rank.statistics
    assert run("unify", "-m", tmp_path / "m", "-o", tmp_path / "u") == 0
    assert same_bytes(tmp_path / "u", alone)
    # each rank's files for vLLM have its own experts, as its cards count them
    inc = ("--format", "inc", "--device", "gaudi2")
    assert run("export", tmp_path / "m", "-o", tmp_path / "g", *inc) == 0
    back = ("unify", "--expert-parallel", "-m", tmp_path / "g" / "vllm" / "g2")
    assert run(*back, "-o", tmp_path / "one") == 0
    assert run("export", alone, "-o", tmp_path / "whole", *inc) == 0
    from tests.stages.test_gaudi import nodes_of

    whole, merged = nodes_of(tmp_path / "whole" / "vllm" / "g2"), nodes_of(tmp_path / "one")
    assert whole.keys() == merged.keys()
    for name, node in whole.items():
        for key, value in node.tensors.items():
            if not key.startswith("output 0"):
                assert torch.equal(value, merged[name].tensors[key]), (name, key)


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "ep", "fed"), [(4, 4, "routed"), (2, 2, "all")])
def test_four_cards_and_experts_that_are_shown_every_token_are_one_process_too(
    tmp_path, family_model, text_files, alone, ranks, ep, fed
):
    model = family_model("mixtral")
    words = (*line(text_files), "--experts", fed)
    assert run("measure", model, "-o", tmp_path / "one", *words) == 0
    options = ("--ranks", str(ranks), "--ep", str(ep))
    assert run("measure", model, "-o", tmp_path / "m", *words, *options) == 0
    assert run("unify", "-m", tmp_path / "m", "-o", tmp_path / "u") == 0
    assert same_bytes(tmp_path / "u", tmp_path / "one")
    assert same_bytes(tmp_path / "one", alone) == (fed == "routed")


@pytest.mark.slow
def test_experts_that_a_checkpoint_stacks_are_spread_too(tmp_path, text_files):
    """gpt-oss has one tensor for the gates and ups of all experts, and one for their biases."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {**SHAPE, "num_key_value_heads": 2, "head_dim": 16}
    config = GptOssConfig(**sizes, num_local_experts=4, num_experts_per_tok=2)
    AutoModelForCausalLM.from_config(config).to(torch.bfloat16).save_pretrained(tmp_path / "model")
    write_tokenizer(tmp_path / "model")
    words = ("measure", tmp_path / "model", *line(text_files))
    assert run(*words, "-o", tmp_path / "one") == 0
    assert run(*words, "-o", tmp_path / "m", "--ranks", "2", "--ep", "2") == 0
    assert run("unify", "-m", tmp_path / "m", "-o", tmp_path / "u") == 0
    assert same_bytes(tmp_path / "u", tmp_path / "one")


@pytest.fixture(scope="module")
def deepseek(tmp_path_factory, text_files) -> Measurement:
    """A DeepSeek-V3 with 64 experts measured by one process."""
    folder = tmp_path_factory.mktemp("deepseek")
    torch.manual_seed(0)
    sizes: dict[str, Any] = {**SHAPE, **LATENT, **OF_DEEPSEEK, "n_routed_experts": 64}
    sizes |= {"moe_intermediate_size": 32, "first_k_dense_replace": 1, "n_group": 1}
    config = DeepseekV3Config(**sizes, topk_group=1, initializer_range=0.1)
    AutoModelForCausalLM.from_config(config).to(torch.bfloat16).save_pretrained(folder / "model")
    write_tokenizer(folder / "model")
    words = ("--calibration", text_files["calibration"], "--samples", "2", "--stats", "amax")
    assert run("measure", folder / "model", "-o", folder / "m", *words) == 0
    return read_measurement(folder / "m" / "rank-000-of-001")


def card_of(whole: Measurement, card: int, *, of: int) -> Measurement:
    """What one card with some of the experts would have measured."""
    tensors: dict[str, Any] = {}
    for name, placement in whole.meta["tensors"].items():
        _, inside, rest = name.partition(".experts.")
        if not inside:
            tensors[name] = placement
            continue
        expert = {"kind": "expert", "axis": None, "offset": int(rest.split(".")[0]), "length": 1}
        shape = {"experts": 64, "full_shape": placement["full_shape"]}
        tensors[name] = share(name, {**expert, **shape}, cards=of, card=card)
    statistics = {
        key: value
        for key, value in whole.statistics.items()
        if tensors[key.split("|")[0]].get("length") != 0
    }
    mesh = {"rank": card, "world": of, "tp": of, "dp": 1, "ep": of}
    meta = {key: value for key, value in whole.meta.items() if key not in ("digest", "files")}
    return replace(
        whole, meta={**meta, "tensors": tensors, "mesh": mesh}, statistics=statistics, origin=""
    )


GROUPS = [list(range(first, first + 8)) for first in range(0, 64, 8)]


def test_sixty_four_cards_become_eight_and_one(deepseek):
    cards = [card_of(deepseek, card, of=64) for card in range(64)]
    eight = unify(cards, GROUPS)
    for index, one in enumerate(eight):
        numbers = {
            int(key.split(".experts.")[1].split(".")[0])
            for key in one.statistics
            if ".experts." in key
        }
        assert numbers == set(range(8 * index, 8 * index + 8))
        assert one.meta["mesh"] == {"rank": index, "world": 8, "tp": 8, "dp": 1, "ep": 8}
        for key, value in one.statistics.items():
            assert torch.equal(value, deepseek.statistics[key])
    (whole,) = unify(eight, [list(range(8))])
    assert whole.statistics.keys() == deepseek.statistics.keys()
    for key, value in deepseek.statistics.items():
        assert torch.equal(whole.statistics[key], value)


def test_one_measurement_is_spread_over_cards_with_some_of_the_experts_and_back(
    tmp_path, deepseek, capsys
):
    folder = tmp_path / "m" / "rank-000-of-001"
    folder.mkdir(parents=True)
    write_measurement(folder, deepseek)
    done = {"stage": "measure", "inputs": {}, "files": {}}
    (folder / "DONE.json").write_text(json.dumps(done))
    spread = ("unify", "--expert-parallel", "--expand", "8")
    assert run(*spread, "-m", tmp_path / "m", "-o", tmp_path / "eight") == 0
    for card, path in enumerate(sorted((tmp_path / "eight").glob("rank-*"))):
        found, expected = read_measurement(path), card_of(deepseek, card, of=8)
        assert found.meta["mesh"] == expected.meta["mesh"]
        assert found.meta["tensors"] == expected.meta["tensors"]
        assert found.statistics.keys() == expected.statistics.keys()
        for key, value in expected.statistics.items():
            assert torch.equal(found.statistics[key], value)
    assert run("unify", "-m", tmp_path / "eight", "-o", tmp_path / "one") == 0
    assert same_bytes(tmp_path / "one", tmp_path / "m")
    for folder, words, told in (
        ("m", ("--expert-parallel", "--expand", "3"), "64 experts over 3 cards"),
        ("one", ("--no-expert-parallel", "--expand", "2"), "each expert was measured whole"),
        ("one", ("--expert-parallel",), "which says what each rank holds"),
    ):
        capsys.readouterr()
        assert run("unify", *words, "-m", tmp_path / folder, "-o", tmp_path / "x") == 2
        assert told in capsys.readouterr().err
    assert not (tmp_path / "x").exists()


def test_a_lost_a_doubled_and_a_foreign_card_are_refused(deepseek):
    cards = [card_of(deepseek, card, of=64) for card in range(64)]
    with pytest.raises(InputError, match=r"64 ranks: missing 17, twice none"):
        unify([*cards[:17], *cards[18:]], GROUPS)
    doubled = replace(cards[40], meta={**cards[40].meta, "mesh": cards[39].meta["mesh"]})
    with pytest.raises(InputError, match=r"missing 40, twice 39"):
        unify([*cards[:40], doubled, *cards[41:]], GROUPS)
    # its experts under another card's number
    posing = replace(cards[39], meta={**cards[39].meta, "mesh": cards[40].meta["mesh"]})
    with pytest.raises(InputError, match=r"model\.layers\.1\.mlp\.experts\.40\..* none of 64"):
        unify([*cards[:40], posing, *cards[41:]], GROUPS)
    model = {**cards[5].meta["model"], "fingerprint": "0" * 64}
    foreign = replace(cards[5], meta={**cards[5].meta, "model": model})
    with pytest.raises(InputError, match=r"rank 5: model.fingerprint is '0000"):
        unify([*cards[:5], foreign, *cards[6:]], GROUPS)


def test_numbers_that_do_not_fit_are_refused(tmp_path, family_model, llama, text_files, capsys):
    mixture, olmoe, options = family_model("mixtral"), family_model("olmoe"), line(text_files)
    for model, words, code, told in (
        (llama, ("--ranks", "2", "--ep", "2"), 2, "--ep 2, a llama has no experts"),
        (mixture, ("--ranks", "3", "--ep", "3"), 2, "4 experts over 3 cards"),
        (mixture, ("--ranks", "4", "--ep", "2", "--tp", "2"), 2, "tp=2 with ep=2"),
        (mixture, ("--ranks", "3", "--ep", "2"), 2, "3 ranks, ep=2 x dp=1"),
        (olmoe, ("--ranks", "2", "--tp", "2"), 6, "cuts it as 'rowwise_split_input'"),
    ):
        capsys.readouterr()
        assert run("measure", model, "-o", tmp_path / "m", *options, *words) == code
        assert told in capsys.readouterr().err
    assert not list(tmp_path.glob("m/rank-*"))
