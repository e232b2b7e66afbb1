"""N cards that quantize a mixture together, each with some of the experts.

Unified, they make every byte that one process makes.
"""

import json
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from quantflow.errors import InputError, UsageError
from quantflow.measuring import measure
from quantflow.measuring.job import MeasureJob
from quantflow.models.open import graph_for, open_files
from quantflow.planning.plan import resolve
from quantflow.planning.recipe import Calibration, Measure, Quantize
from quantflow.quantizing import quantize
from quantflow.quantizing.job import QuantizeJob
from quantflow.quantizing.shards.cutting import shares_of
from quantflow.quantizing.shards.share import owners_of, put_together, sliced
from quantflow.unifying import unify
from tests.forked_ranks import QUIET, Ranks, forked_ranks, hashes, inputs, together

# 4 experts, of which a token goes to 2, and one that every token goes to
FAMILY = "qwen2_moe"
SAMPLES = 5
# of the tokens below some experts get fewer than this, and some more
GPTQ = {"scheme": "W4A16", "group_size": 16, "experts": "damp", "expert_tokens": 110}
EXPERT = "model.layers.1.mlp.experts"


@pytest.fixture(scope="module")
def measurement(
    family_model, text_files: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    return measure.run(
        MeasureJob(
            model=family_model(FAMILY),
            output=tmp_path_factory.mktemp("measured") / "m",
            calibration=Calibration(
                source=str(text_files["calibration"]), samples=SAMPLES, sequence_length=48
            ),
            options=Measure(stats=("amax", "channel_amax", "mean_abs", "gradient")),
        ),
        QUIET,
    )


@pytest.fixture(scope="module")
def ranks(
    family_model, measurement: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Ranks]:
    """A function that quantizes with N processes; see `forked_ranks`."""
    with forked_ranks(tmp_path_factory.mktemp("server"), family_model(FAMILY), measurement) as run:
        yield run


@pytest.fixture(scope="module")
def alone(
    family_model, measurement: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[dict], Path]:
    """A function that gives what one process quantizes, made once."""
    made: dict[str, Path] = {}

    def run(recipe: dict) -> Path:
        key = json.dumps(recipe)
        if key not in made:
            made[key] = quantize.run(
                QuantizeJob(
                    model=family_model(FAMILY),
                    output=tmp_path_factory.mktemp("alone") / "whole",
                    entry=entry_of(recipe),
                    measurement=measurement,
                ),
                QUIET,
            )
        return made[key]

    return run


@pytest.fixture(scope="module")
def shards(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """A function that gives the GPTQ output of N cards, made once, which is not to be changed."""
    made: dict[int, Path] = {}

    def run(world: int) -> Path:
        if world not in made:
            made[world] = tmp_path_factory.mktemp("shards") / "shards"
            ranks(made[world], GPTQ, world=world)
        return made[world]

    return run


def entry_of(recipe: dict) -> Quantize:
    words = {
        key: tuple(value) if isinstance(value, list) else value for key, value in recipe.items()
    }
    return Quantize(name="x", **words)


def shares(folder: Path, *, world: int, **recipe: Any):
    source = open_files(folder)
    graph = graph_for(source.config)
    shapes = {name: info.shape for name, info in source.checkpoint.infos.items()}
    plan = resolve(entry_of(recipe or GPTQ), graph, shapes, ranks=world)
    return shares_of(source, graph, plan, ranks=world), graph, plan


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
def test_cards_with_some_of_the_experts_each_are_one_process(alone, shards, tmp_path, world):
    made = together(shards(world), tmp_path / "made")
    # two layers, their records, quantize.json, the canary and its hashes
    assert len(hashes(made)) == 7
    assert hashes(made) == hashes(alone(GPTQ)) and inputs(made) == inputs(alone(GPTQ))
    (short,) = {
        len(json.loads(path.read_text())["experts"]["short"]) > 0
        for path in (made / "layers").glob("*.json")
    }
    assert short  # the policy treats some experts, and not all
    rows = {row["linear"]: row for row in unify.summary(made)["joined"]}
    assert rows[f"{EXPERT}.3.down_proj"]["joined"] == "one part"
    assert rows["model.layers.1.self_attn.q_proj"]["cards"] == world


@pytest.mark.slow
@pytest.mark.parametrize(
    "recipe",
    [
        pytest.param({**GPTQ, "experts": "all", "transforms": [{"awq": {"clip": True}}]}, id="awq"),
        pytest.param({**GPTQ, "experts": "rtn", "algorithm": "yaqa"}, id="yaqa"),
        pytest.param({"scheme": "W8A8", "algorithm": "gptq", "experts": "damp"}, id="smoothquant"),
        pytest.param(
            {
                "scheme": "FP8",
                "transforms": [{"smoothquant": {"alpha": 0.5}}],
                "experts": "share_max",
                "expert_tokens": 110,
            },
            id="static",
        ),
        pytest.param({**GPTQ, "quantized_inputs": True}, id="quantized-inputs"),
    ],
)
def test_every_policy_and_method_is_what_one_process_writes(alone, ranks, tmp_path, recipe):
    ranks(tmp_path / "shards", recipe, world=2)
    made = together(tmp_path / "shards", tmp_path / "made")
    assert hashes(made) == hashes(alone(recipe)) and inputs(made) == inputs(alone(recipe))


@pytest.mark.slow
def test_four_shards_become_two_of_a_smaller_world(shards, alone, tmp_path):
    made = together(shards(4), tmp_path / "made", groups=("01", "23"))
    assert hashes(made) == hashes(shards(2))
    assert hashes(together(made, tmp_path / "one")) == hashes(alone(GPTQ))


@pytest.mark.slow
def test_a_shard_has_the_experts_of_its_card_whole_and_nothing_of_the_others(shards, alone):
    name = "layers/00001.safetensors"
    whole = load_file(alone(GPTQ) / name)
    for rank in (0, 1):
        part = load_file(shards(2) / f"rank-00{rank}-of-002" / name)
        held = {key for key in part if key.startswith(EXPERT)}
        numbers = (2 * rank, 2 * rank + 1)
        assert held == {
            key for key in whole for number in numbers if key.startswith(f"{EXPERT}.{number}.")
        }
        assert all(part[key].equal(whole[key]) for key in held)
        query = "model.layers.1.self_attn.q_proj.weight_packed"
        assert part[query].equal(whole[query][32 * rank : 32 * rank + 32])


@pytest.mark.slow
def test_a_rank_that_dies_ends_the_others_and_the_same_command_continues(alone, ranks, tmp_path):
    codes = ranks(tmp_path / "shards", GPTQ, world=2, dies=(0, 1))
    assert codes[0] == -signal.SIGKILL and codes[1] != 0
    ranks(tmp_path / "shards", GPTQ, world=2)
    assert hashes(together(tmp_path / "shards", tmp_path / "made")) == hashes(alone(GPTQ))


@pytest.mark.slow
def test_shards_of_which_none_or_two_hold_an_expert_are_refused(shards, tmp_path):
    from quantflow.unifying import shards as joining

    opened = joining.open_shards(shards(2))
    name = f"{EXPERT}.1.up_proj"
    for length, told in ((0, "0 of 2 shards hold"), (1, "2 of 2 shards hold")):
        for shard in opened:
            shard.share.placements[name]["length"] = length  # type: ignore[index]
        with pytest.raises(InputError, match=rf"experts\.1\.up_proj: an expert that {told}"):
            joining.join(
                opened, tmp_path / "made", groups=[[0, 1]], model=None, force=False, progress=QUIET
            )
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("world", [2, 4])
def test_parts_of_a_layer_are_its_file_again(family_model, alone, world):
    """One process's file, cut as its cards would hold it."""
    folder = alone({"scheme": "W8A8", "experts": "damp"})
    held, graph, plan = shares(
        family_model(FAMILY), world=world, scheme="W8A8", algorithm="gptq", experts="damp"
    )
    for layer in graph.layers:
        whole = load_file(folder / "layers" / f"{layer.index:05d}.safetensors")
        parts = [(share, sliced(whole, layer.linears, plan.schemes, share)) for share in held]
        experts = [
            {key for key in part if f".experts.{number}." in key}
            for number, (_, part) in zip(range(0, 4, 4 // world), parts, strict=True)
        ]
        assert all(experts) and len({len(part) for _, part in parts}) == 1
        made, counts = put_together(parts, layer.linears, plan.schemes)
        assert made.keys() == whole.keys()
        assert all(made[key].equal(whole[key]) for key in whole)
        assert {counts[name] for name in layer.linears if ".experts." in name} == {1}
        # those of the first cards alone have no tensor of the last card's experts
        some, counts = put_together(parts[:-1], layer.linears, plan.schemes)
        assert counts[f"{layer.prefix}.mlp.experts.3.up_proj"] == 0
        assert not any(".experts.3." in key for key in some)


def test_an_expert_is_one_cards_and_the_other_groups_take_turns(family_model):
    _, graph, _ = shares(family_model(FAMILY), world=2)
    groups = graph.layers[0].groups
    owners = owners_of(graph.layers[0], cards=2)
    of_experts = {
        group.expert.rpartition(".")[2]: owner
        for group, owner in zip(groups, owners, strict=True)
        if group.expert is not None
    }
    assert of_experts == {"0": 0, "1": 0, "2": 1, "3": 1}
    rest = [owner for group, owner in zip(groups, owners, strict=True) if group.expert is None]
    assert rest == [0, 1, 0, 1]  # q with k and v, o, and the shared expert's two
    dense = graph_for(open_files(family_model("llama")).config).layers[0]
    assert owners_of(dense, cards=3) == (0, 1, 2, 0)


def test_a_mixture_whose_attention_no_plan_cuts_is_spread_by_its_experts(family_model):
    """OLMoE normalizes all queries together, so transformers cuts what follows in its own way."""
    held, _, _ = shares(family_model("olmoe"), world=2)
    kinds = {
        name.partition(".0.")[2]: part["kind"]
        for name, part in held[1].placements.items()
        if ".layers.0." in name and ".experts." not in name
    }
    cut = {f"self_attn.{letter}_proj": "column" for letter in "qkv"}
    assert kinds == {**cut, "self_attn.o_proj": "replicated"}


def test_whole_experts_need_no_groups_that_divide_them_but_a_number_of_cards_that_does(
    family_model,
):
    """The down projection of an expert has 96 columns, three groups of 32."""
    held, _, _ = shares(
        family_model("qwen3_moe"), world=2, scheme="W4A16", group_size=32, experts="damp"
    )
    down = [share.placements["model.layers.0.mlp.experts.2.down_proj"] for share in held]
    assert [(part["kind"], part["length"]) for part in down] == [("expert", 0), ("expert", 1)]
    # rounded to nearest, file to file, every card has a part of each: 48 columns
    with pytest.raises(UsageError, match="96 columns over 2 are 48, groups have 32"):
        shares(family_model("qwen3_moe"), world=2, scheme="W4A16", group_size=32, algorithm="rtn")
    with pytest.raises(UsageError, match="experts over 8 cards"):
        shares(family_model("qwen3_moe"), world=8)
