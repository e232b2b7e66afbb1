"""Mixtures of experts through the stages.

They keep a ledger of tokens, and treat experts that got too few.
"""

import json
import shutil

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, MixtralConfig, Qwen2MoeConfig

from quantflow import cpu_threads
from quantflow.core.scheme import preset, with_group_size
from quantflow.errors import StatisticsError, UsageError
from quantflow.exporting import export
from quantflow.exporting.job import ExportJob
from quantflow.files.inspect import summarize
from quantflow.files.rank_folders import rank_folder
from quantflow.files.verify import verify
from quantflow.formats import compressed_tensors
from quantflow.measuring import measure
from quantflow.measuring.job import MeasureJob
from quantflow.models.open import graph_for
from quantflow.planning.experts import Policy, policy_for
from quantflow.planning.plan_job import PlanJob
from quantflow.planning.recipe import Calibration, Measure, Quantize, recipe_from
from quantflow.progress import Silent
from quantflow.quantizing import quantize
from quantflow.quantizing.job import QuantizeJob
from quantflow.quantizing.undercalibrated import Short, described, short_of_tokens, treat
from quantflow.reporting.progress_line import ProgressLine
from quantflow.runtime.load import load
from quantflow.runtime.offload import load_offloaded
from quantflow.stages.cli import cli
from quantflow.stages.cli.output import exit_code
from quantflow.unifying import unify
from quantflow.unifying.job import UnifyJob

UNREACHED = 4  # of five experts, two per token
QUIET = ProgressLine(quiet=True)
NEEDED = 24  # tokens; every expert but the unreachable one gets more
GPTQ = {"scheme": "W4A16", "algorithm": "gptq", "group_size": 32, "expert_tokens": NEEDED}
STATIC = {"scheme": "FP8", "expert_tokens": NEEDED}


def starve(folder):
    """Make the last expert of a model of five unreachable.

    Of a row, its negative, another and its negative, two are positive.

    Its own row is zero, which is never among the two largest.
    """
    tensors = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(3)
    for name in [name for name in tensors if name.endswith(".gate.weight")]:
        first, second = torch.randn(2, tensors[name].shape[1], generator=generator)
        tensors[name] = torch.stack([first, -first, second, -second, 0 * first]).to(
            tensors[name].dtype
        )
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def starving(tmp_path_factory, llama):
    """Return a Mixtral of five experts, of which one gets no token whatever the text."""
    return starve(write(tmp_path_factory.mktemp("models") / "starving", llama, num_local_experts=5))


def write(folder, tokenizer_of, **options):
    torch.manual_seed(2)
    sizes = {
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    config = MixtralConfig(
        **sizes,
        num_key_value_heads=2,
        num_experts_per_tok=2,
        max_position_embeddings=128,
        initializer_range=0.1,
        **options,
    )
    AutoModelForCausalLM.from_config(config).to(torch.bfloat16).save_pretrained(folder)
    for path in tokenizer_of.glob("token*"):
        (folder / path.name).write_bytes(path.read_bytes())
    return folder


def measured(model, folder, text, entries=(), **options):
    calibration = Calibration(source=str(text), samples=6, sequence_length=48)
    job = MeasureJob(
        model=model,
        output=folder,
        calibration=calibration,
        options=Measure(**options),
        entries=entries,
    )
    measure.run(job, QUIET)
    return rank_folder(folder, 0, 1)


@pytest.fixture(scope="module")
def measurement(starving, text_files, tmp_path_factory):
    return measured(starving, tmp_path_factory.mktemp("measured") / "m", text_files["calibration"])


@pytest.fixture(scope="module")
def fed(starving, text_files, tmp_path_factory):
    """Return a measurement that showed every expert every token."""
    return measured(
        starving,
        tmp_path_factory.mktemp("measured") / "all",
        text_files["calibration"],
        experts="all",
    )


def made(model, output, measurement, **words):
    entry = Quantize(name="x", **words)
    return quantize.run(
        QuantizeJob(model=model, output=output, entry=entry, measurement=measurement),
        QUIET,
    )


@pytest.fixture(scope="module")
def nearest(starving, measurement, tmp_path_factory):
    """The model rounded to nearest in four bits."""
    words = {"scheme": "W4A16", "algorithm": "rtn", "group_size": 32}
    return made(starving, tmp_path_factory.mktemp("nearest") / "q", measurement, **words)


@pytest.fixture(scope="module")
def rounded(starving, measurement, tmp_path_factory):
    """The model by GPTQ, whose expert without tokens is rounded to nearest."""
    folder = tmp_path_factory.mktemp("rounded") / "q"
    return made(starving, folder, measurement, **GPTQ, experts="rtn")


def layers(folder):
    return [json.loads(path.read_text()) for path in sorted((folder / "layers").glob("*.json"))]


def tensors(folder):
    found = {}
    for path in sorted((folder / "layers").glob("*.safetensors")):
        found |= load_file(path)
    return found


def expert(number, layer=0):
    return f"model.layers.{layer}.block_sparse_moe.experts.{number}"


@torch.no_grad()
def tokens_by_hand(model, measurement):
    """Tokens that the router of the family's own model sends to each of five experts, by layer."""
    stock = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    with safe_open(measurement / "calibration.safetensors", framework="pt") as file:
        sequences = torch.split(file.get_tensor("tokens"), file.get_tensor("lengths").tolist())
    counts = torch.zeros(2, 5, dtype=torch.int64)
    for sequence in sequences:
        for layer, logits in enumerate(
            stock(sequence[None], output_router_logits=True).router_logits
        ):
            counts[layer] += torch.bincount(logits.topk(2).indices.flatten(), minlength=5)
    return counts.tolist()


def test_the_measurement_says_how_many_tokens_reached_each_expert(starving, measurement):
    expected = tokens_by_hand(starving, measurement)
    found = json.loads((measurement / "measurement.json").read_text())
    assert [
        found["routed"][f"model.layers.{layer}.block_sparse_moe.experts"]["tokens"]
        for layer in (0, 1)
    ] == expected
    assert [counts[UNREACHED] for counts in expected] == [0, 0]
    # two layers, two experts per token
    assert sum(map(sum, expected)) == 2 * 2 * found["counts"]["tokens"]
    assert found["experts"] == "routed"
    assert (
        summarize(measurement)["tokens_per_expert"]["model.layers.0.block_sparse_moe.experts"][
            "least"
        ]
        == 0
    )


def test_tokens_are_counted_though_no_statistic_is_asked_for(starving, text_files, tmp_path):
    folder = measured(starving, tmp_path / "m", text_files["calibration"], stats=())
    found = json.loads((folder / "measurement.json").read_text())
    assert [row["tokens"] for row in found["routed"].values()] == tokens_by_hand(starving, folder)
    assert found["observers"] == []


class Told(Silent):
    """A progress that keeps the lines for people."""

    def __init__(self):
        """Begin without lines."""
        self.lines = []

    def say(self, text):
        """Keep the line."""
        self.lines.append(text)


@pytest.mark.parametrize("policy", ["damp", "rtn", "all"])
def test_quantize_counts_tokens_itself_where_the_policy_acts_on_one_layer_at_a_time(
    starving, text_files, tmp_path, policy, monkeypatch
):
    entry = Quantize(name="x", **GPTQ, experts=policy)
    counted = measured(starving, tmp_path / "counted", text_files["calibration"], stats=())
    with monkeypatch.context() as patched:
        patched.delattr(measure, "Observation")  # no layer runs
        plain = measured(starving, tmp_path / "plain", text_files["calibration"], (entry,))
    assert "routed" not in json.loads((plain / "measurement.json").read_text())
    told, made_from = Told(), {}
    for name, folder in (("counted", counted), ("plain", plain)):
        output = tmp_path / f"{name}-quantized"
        job = QuantizeJob(model=starving, output=output, entry=entry, measurement=folder)
        made_from[name] = quantize.run(job, told if folder is plain else QUIET)
    found, expected = made_from["plain"], made_from["counted"]
    for path in sorted(expected.glob("layers/*.safetensors")):
        assert (found / "layers" / path.name).read_bytes() == path.read_bytes()
    assert (found / "canary.json").read_bytes() == (expected / "canary.json").read_bytes()
    records = layers(found)
    # a layer's key names the measurement
    assert records == [
        {**other, "key": mine["key"]} for mine, other in zip(records, layers(expected), strict=True)
    ]
    assert [layer["experts"]["tokens"] for layer in records] == tokens_by_hand(starving, plain)
    line = (
        "quantize x: 2 experts got fewer calibration tokens than needed: "
        f"{expert(UNREACHED)} (0 of {NEEDED}), {expert(UNREACHED, 1)} (0 of {NEEDED}); "
        f"--experts {policy}"
    )
    assert (line in told.lines) == (policy != "all")


def test_a_measurement_without_counts_leaves_the_refusal_to_the_first_layer_that_is_short(
    starving, text_files, tmp_path
):
    damping = Quantize(name="x", **GPTQ, experts="damp")
    plain = measured(starving, tmp_path / "m", text_files["calibration"], (damping,))
    with pytest.raises(StatisticsError) as caught:
        made(starving, tmp_path / "q", plain, **GPTQ)
    assert caught.value.cause == (
        "model.layers.0: 1 expert got fewer calibration tokens than needed: "
        f"{expert(UNREACHED)} (0 of {NEEDED})"
    )


def test_a_measurement_that_counted_serves_an_entry_that_counts_itself_and_not_the_other_way_round(
    starving, text_files, tmp_path
):
    refusing, damping = (Quantize(name="x", **GPTQ, experts=policy) for policy in ("error", "damp"))
    folder, text = tmp_path / "m", text_files["calibration"]
    counted = measured(starving, folder, text, (refusing,))
    record = (counted / "measurement.json").read_bytes()
    assert "routed" in json.loads(record)
    again = measured(starving, folder, text, (damping,))
    assert (again / "measurement.json").read_bytes() == record
    measured(starving, tmp_path / "plain", text, (damping,))
    with pytest.raises(UsageError, match="holds a finished result with uncounted = true"):
        measured(starving, tmp_path / "plain", text, (refusing,))


def test_an_expert_that_saw_nothing_has_the_statistics_of_nothing(measurement):
    statistics = load_file(measurement / "statistics.safetensors")
    for linear in ("w1", "w2", "w3"):
        assert statistics[f"{expert(UNREACHED)}.{linear}|input|amax"] == 0
        assert statistics[f"{expert(UNREACHED)}.{linear}|input|count"] == 0
        assert statistics[f"{expert(UNREACHED)}.{linear}|output|amax"] == 0
        assert statistics[f"{expert(0)}.{linear}|input|amax"] > 0
    routed = {key.split("|")[0] for key in statistics if "|routed|" in key}
    assert routed == {f"{expert(number, layer)}.w1" for number in range(5) for layer in (0, 1)}
    assert statistics[f"{expert(0)}.w1|input|count"] == statistics[f"{expert(0)}.w1|routed|count"]


def test_the_number_of_workers_changes_no_byte(
    starving, measurement, text_files, tmp_path, monkeypatch
):
    monkeypatch.setattr(cpu_threads, "usable_cores", lambda: 1)
    alone = measured(starving, tmp_path / "m", text_files["calibration"])
    for name in ("statistics.safetensors", "measurement.json"):
        assert (alone / name).read_bytes() == (measurement / name).read_bytes()


@pytest.mark.parametrize("words", [GPTQ, STATIC], ids=["gptq", "static"])
def test_by_default_an_expert_without_tokens_is_an_error_before_a_layer_is_quantized(
    starving, measurement, tmp_path, words
):
    with pytest.raises(StatisticsError) as caught:
        made(starving, tmp_path / "q", measurement, **words)
    assert caught.value.cause == (
        "x: 2 experts got fewer calibration tokens than needed: "
        f"{expert(UNREACHED)} (0 of {NEEDED}), {expert(UNREACHED, 1)} (0 of {NEEDED})"
    )
    assert "--experts all, damp, rtn or share_max" in caught.value.remedy
    assert not list((tmp_path / "q").glob("layers/*"))


def test_what_reads_no_statistics_needs_no_tokens(starving, measurement, tmp_path):
    for scheme in ("FP8_DYNAMIC", "W8A16"):
        folder = made(starving, tmp_path / scheme, measurement, scheme=scheme)
        assert [layer["experts"]["tokens"][UNREACHED] for layer in layers(folder)] == [0, 0]
        assert [layer["experts"]["short"] for layer in layers(folder)] == [{}, {}]


def test_rtn_rounds_the_short_expert_to_nearest_and_says_so(rounded, nearest):
    found, plain = tensors(rounded), tensors(nearest)
    same = {
        name
        for name in found
        if torch.equal(found[name], plain[name]) and name.endswith("weight_packed")
    }
    assert same == {
        f"{expert(UNREACHED, layer)}.{linear}.weight_packed"
        for layer in (0, 1)
        for linear in ("w1", "w2", "w3")
    }
    for layer, record in enumerate(layers(rounded)):
        assert (
            record["decisions"][f"{expert(UNREACHED, layer)}.w2"]["experts"]
            == f"0 of {NEEDED} tokens: rounded to nearest"
        )
        assert "experts" not in record["decisions"][f"{expert(0, layer)}.w2"]
        assert record["experts"]["short"] == {
            f"{expert(UNREACHED, layer)}.w1": {"tokens": 0, "needed": NEEDED},
            f"{expert(UNREACHED, layer)}.w2": {"tokens": 0, "needed": NEEDED},
        }
        # the canary does not reach it either
        assert set(record["errors"][f"{expert(UNREACHED, layer)}.w1"]) == {"weight"}
        assert {"weight", "output"} == set(
            record["errors"][f"model.layers.{layer}.self_attn.q_proj"]
        )


def test_damp_shrinks_the_hessian_of_what_few_tokens_there_are(
    starving, measurement, nearest, tmp_path
):
    fewest = min(tokens_by_hand(starving, measurement)[0][:4])
    words = {**GPTQ, "expert_tokens": fewest + 1}
    folder = made(starving, tmp_path / "q", measurement, **words, experts="damp")
    (record, _), found = layers(folder), tensors(folder)
    short = {name.rpartition(".")[0] for name in record["experts"]["short"]}
    assert expert(UNREACHED) in short and len(short) > 1
    plain = tensors(made(starving, tmp_path / "plain", measurement, **{**GPTQ, "expert_tokens": 0}))
    to_nearest = tensors(nearest)
    for number in range(5):
        name = f"{expert(number)}.w2"
        assert ("experts" in record["decisions"][name]) == (expert(number) in short)
        assert torch.equal(found[f"{name}.weight_packed"], plain[f"{name}.weight_packed"]) == (
            # of which nothing is known either way
            expert(number) not in short or number == UNREACHED
        )
        assert torch.equal(found[f"{name}.weight_packed"], to_nearest[f"{name}.weight_packed"]) == (
            number == UNREACHED
        )


def test_all_shows_the_expert_every_token_and_beats_rtn_on_them(
    starving, measurement, nearest, tmp_path
):
    folder = made(starving, tmp_path / "q", measurement, **GPTQ, experts="all")
    tokens = json.loads((measurement / "measurement.json").read_text())["counts"]["tokens"]
    for layer, record in enumerate(layers(folder)):
        assert {
            record["decisions"][f"{expert(number, layer)}.w2"]["tokens"] for number in range(5)
        } == {tokens}
        assert record["experts"]["fed"] == "all"
        # the ledger still says what the router did
        assert record["experts"]["tokens"][UNREACHED] == 0
        assert record["experts"]["short"] == {}
    error = output_error(starving, folder, measurement)
    assert error < 0.8 * output_error(starving, nearest, measurement)


@torch.no_grad()
def output_error(model, folder, measurement):
    """Squared norm of x (W - Q)^T, of the unreached expert's first linear in layer 0.

    x is the input of that layer's experts.
    """
    stock = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    inputs = []
    hook = stock.model.layers[0].mlp.register_forward_pre_hook(
        lambda _module, args: inputs.append(args[0][0])
    )
    with safe_open(measurement / "calibration.safetensors", framework="pt") as file:
        for sequence in torch.split(file.get_tensor("tokens"), file.get_tensor("lengths").tolist()):
            stock(sequence[None])
    hook.remove()
    name = f"{expert(UNREACHED)}.w1"
    decoded = compressed_tensors.decode(name, tensors(folder), with_group_size(preset("W4A16"), 32))
    weight = load_file(model / "model.safetensors")[f"{name}.weight"].float()
    return float((torch.cat(inputs) @ (weight - decoded.weight.dequantize()).T).square().sum())


def test_share_max_gives_all_experts_of_a_layer_the_widest_static_range(
    starving, measurement, tmp_path
):
    found = tensors(made(starving, tmp_path / "q", measurement, **STATIC, experts="share_max"))
    statistics = load_file(measurement / "statistics.safetensors")
    for layer in (0, 1):
        for linear in ("w1", "w2", "w3"):
            scales = {
                float(found[f"{expert(number, layer)}.{linear}.input_scale"]) for number in range(5)
            }
            widest = max(
                float(statistics[f"{expert(number, layer)}.{linear}|input|amax"])
                for number in range(5)
            )
            assert scales == {float(torch.tensor(widest) / 448)}


def test_rtn_gives_a_short_expert_the_widest_range_and_leaves_the_others_theirs(
    starving, measurement, tmp_path
):
    found = tensors(made(starving, tmp_path / "q", measurement, **STATIC, experts="rtn"))
    statistics = load_file(measurement / "statistics.safetensors")
    own = [float(statistics[f"{expert(number)}.w2|input|amax"]) for number in range(5)]
    scales = [float(found[f"{expert(number)}.w2.input_scale"]) for number in range(5)]
    assert scales == [float(torch.tensor(amax) / 448) for amax in (*own[:4], max(own))]


def test_an_asymmetric_range_is_shared_from_its_lowest_to_its_highest_end():
    layer = graph_for(MixtralConfig(num_hidden_layers=1, num_local_experts=2)).layers[0]
    ranges = {0: ([-3.0, 0.0], [1.0, 2.0]), 1: ([-1.0, -4.0], [0.0, 5.0])}
    statistics = {
        f"{expert(number)}.w2": {
            "min_val": torch.tensor(low),
            "max_val": torch.tensor(high),
            "abs_sum": torch.ones(2),
        }
        for number, (low, high) in ranges.items()
    }
    found = treat(layer, Policy(name="share_max", inputs=True), statistics, []).statistics
    for number in (0, 1):
        assert found[f"{expert(number)}.w2"]["min_val"].tolist() == [-3.0, -4.0]
        assert found[f"{expert(number)}.w2"]["max_val"].tolist() == [1.0, 5.0]
        assert found[f"{expert(number)}.w2"]["abs_sum"].tolist() == [1.0, 1.0]  # not a range


def test_all_with_static_inputs_needs_a_measurement_that_showed_all(
    starving, measurement, fed, tmp_path
):
    with pytest.raises(
        StatisticsError, match="the measurement showed each expert routed tokens"
    ) as caught:
        made(starving, tmp_path / "no", measurement, **STATIC, experts="all")
    assert caught.value.remedy == "measure again with --experts all"
    found = tensors(made(starving, tmp_path / "q", fed, **STATIC, experts="all"))
    assert float(found[f"{expert(UNREACHED)}.w1.input_scale"]) == float(
        found[f"{expert(0)}.w1.input_scale"]
    )
    statistics = load_file(fed / "statistics.safetensors")
    assert statistics[f"{expert(UNREACHED)}.w2|input|amax"] > 0
    assert statistics[f"{expert(UNREACHED)}.w1|routed|count"] == 0
    # nothing is short of tokens
    assert set(tensors(made(starving, tmp_path / "plain", fed, scheme="FP8"))) == set(found)


def test_an_expert_needs_two_tokens_per_feature_for_its_weights_and_a_hundred_for_its_range():
    assert Policy(weights=True).needed(2048) == 4096
    assert Policy(inputs=True).needed(2048) == 100
    assert Policy(weights=True, inputs=True).needed(2048) == 4096
    assert Policy(weights=True, inputs=True).needed(16) == 100
    assert Policy(weights=True, inputs=True, tokens=7).needed(2048) == 7


def test_groups_of_an_expert_are_short_of_tokens_each_by_its_own_features():
    layer = graph_for(MixtralConfig(num_hidden_layers=1, num_local_experts=2)).layers[0]
    shapes = {f"{name}.weight": (8, 10 if name.endswith("w2") else 16) for name in layer.linears}
    schemes = dict.fromkeys(layer.linears, "something")
    tokens = {expert(0): 31, expert(1): 32}

    def short(policy, schemes=schemes):
        found = short_of_tokens(layer, policy, tokens, schemes=schemes, shapes=shapes)
        return [
            (
                item.group.linears[0].removeprefix(f"{layer.block}.experts."),
                item.tokens,
                item.needed,
            )
            for item in found
        ]

    assert short(Policy(weights=True)) == [("0.w1", 31, 32)]
    assert short(Policy(tokens=32)) == [("0.w1", 31, 32), ("0.w2", 31, 32)]
    assert short(Policy(tokens=0)) == []
    unquantized = {**schemes, f"{expert(0)}.w1": None, f"{expert(0)}.w3": None}
    assert short(Policy(weights=True), unquantized) == []


def test_a_policy_that_an_algorithm_has_no_use_for_is_refused():
    with pytest.raises(
        UsageError, match="experts share_max with an algorithm that reads statistics"
    ):
        policy_for("x", policy="share_max", tokens=None, weights=True, inputs=True)
    assert policy_for("x", policy="error", tokens=None, weights=False, inputs=False) is None
    for words in ({"experts": "most"}, {"expert_tokens": -1}):
        with pytest.raises(UsageError, match="experts|expert_tokens"):
            Quantize(name="x", scheme="FP8", **words)


def test_experts_of_a_model_that_has_none_are_refused(llama, text_files, tmp_path):
    with pytest.raises(UsageError, match="experts=all, a llama has no experts"):
        measured(llama, tmp_path / "m", text_files["calibration"], experts="all")


def test_ranks_that_round_to_nearest_share_the_widest_range_too(
    starving, measurement, tmp_path, cards
):
    alone = tensors(made(starving, tmp_path / "alone", measurement, **STATIC, experts="share_max"))
    entry = Quantize(name="x", **STATIC, experts="share_max")
    cards(starving, tmp_path / "shards", entry, ranks=2, measurement=measurement)
    for rank in (0, 1):
        shard = tensors(rank_folder(tmp_path / "shards", rank, 2))
        for name in [name for name in shard if name.endswith("input_scale")]:
            assert torch.equal(shard[name], alone[name])
    job = UnifyJob(measurement=tmp_path / "shards", output=tmp_path / "joined", model=starving)
    found = tensors(unify.run(job, QUIET))
    assert found.keys() == alone.keys()
    assert all(
        torch.equal(found[name].view(torch.uint8), alone[name].view(torch.uint8))
        for name in found
        if found[name].ndim
    )


def test_replicas_that_measure_a_part_each_are_merged_into_what_one_measured(
    starving, measurement, text_files, tmp_path
):
    calibration = Calibration(source=str(text_files["calibration"]), samples=6, sequence_length=48)
    job = MeasureJob(
        model=starving, output=tmp_path / "m", calibration=calibration, options=Measure(ranks=2)
    )
    for rank in (0, 1):
        measure._measure_rank(job, QUIET, rank=rank, world=2)
    merged = unify.run(UnifyJob(measurement=tmp_path / "m", output=tmp_path / "u"), QUIET)
    folder = merged if (merged / "measurement.json").exists() else rank_folder(merged, 0, 1)
    found, one = (load_file(path / "statistics.safetensors") for path in (folder, measurement))
    assert found.keys() == one.keys()
    assert all(
        torch.equal(found[key], one[key])
        for key in one
        if key.endswith(("amax", "|count", "|counts", "_val"))
    )
    ledgers = [
        json.loads((path / "measurement.json").read_text())["routed"]
        for path in (folder, measurement)
    ]
    assert ledgers[0] == ledgers[1]
    unseen = json.loads((folder / "measurement.json").read_text())["unified"]["unseen"]
    assert unseen == [f"{expert(UNREACHED, layer)}.w1" for layer in (0, 1)]


def test_a_run_that_was_stopped_goes_on_to_the_same_bytes(starving, measurement, rounded, tmp_path):
    again = shutil.copytree(rounded, tmp_path / "again")
    for name in ("layers/00001.safetensors", "layers/00001.json", "DONE.json"):
        (again / name).unlink()
    made(starving, tmp_path / "again", measurement, **GPTQ, experts="rtn")
    for name in (
        "layers/00000.json",
        "layers/00001.safetensors",
        "layers/00001.json",
        "canary.json",
    ):
        assert (again / name).read_bytes() == (rounded / name).read_bytes()


def test_dense_and_sparse_layers_of_one_model_go_through(llama, text_files, tmp_path):
    torch.manual_seed(1)
    sizes = {
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
    }
    config = Qwen2MoeConfig(
        **sizes,
        num_key_value_heads=2,
        num_experts=3,
        num_experts_per_tok=1,
        moe_intermediate_size=32,
        mlp_only_layers=[0],
        shared_expert_intermediate_size=32,
        decoder_sparse_step=1,
        max_position_embeddings=128,
        initializer_range=0.1,
    )
    model = tmp_path / "model"
    AutoModelForCausalLM.from_config(config).to(torch.bfloat16).save_pretrained(model)
    for path in llama.glob("token*"):
        (model / path.name).write_bytes(path.read_bytes())
    measurement = measured(model, tmp_path / "m", text_files["calibration"])
    quantized = made(model, tmp_path / "q", measurement, **GPTQ, experts="all")
    assert [("experts" in layer, len(layer["errors"])) for layer in layers(quantized)] == [
        (False, 7),
        (True, 16),
        (True, 16),
    ]
    artifact = export.run(ExportJob(source=quantized, output=tmp_path / "a"), QUIET)
    kept = json.loads((artifact / "config.json").read_text())["quantization_config"]["ignore"]
    assert kept == [
        *(
            f"model.layers.{layer}.mlp.{name}"
            for layer in (1, 2)
            for name in ("gate", "shared_expert_gate")
        ),
        "lm_head",
    ]


@pytest.fixture(scope="module")
def artifact(rounded, tmp_path_factory):
    job = ExportJob(source=rounded, output=tmp_path_factory.mktemp("artifact") / "a")
    return export.run(job, QUIET)


def test_the_artifact_says_what_became_of_every_expert_and_router(artifact):
    verify(artifact)
    manifest = json.loads((artifact / "quantflow.json").read_text())
    assert [layer["experts"]["tokens"][UNREACHED] for layer in manifest["layers"]] == [0, 0]
    reasons = {entry["name"]: entry["reason"] for entry in manifest["ledger"]["tensors"]}
    assert (
        reasons["model.layers.0.block_sparse_moe.gate.weight"]
        == "a router decides by it, never quantized"
    )
    assert summarize(artifact)["experts"]["model.layers.1.block_sparse_moe.experts"]["short"] == 1
    card = (artifact / "README.md").read_text()
    assert (
        "routers are not quantized. Calibration tokens per expert in 2 layers: at least 0" in card
    )
    assert "2 experts were short of tokens." in card
    assert (
        "pack-quantized: Stock transformers loads it with the experts' weights dequantized" in card
    )
    with safe_open(artifact / "model.safetensors", framework="pt") as file:
        assert f"{expert(UNREACHED)}.w1.weight_packed" in file.keys()  # noqa: SIM118 - not a mapping


@torch.no_grad()
def test_the_runtime_computes_what_the_familys_own_model_makes_of_the_dequantized_weights(
    starving, artifact, tmp_path
):
    tokens = torch.randint(2, 300, (1, 24), generator=torch.Generator().manual_seed(5))
    scheme, stored, source = (
        with_group_size(preset("W4A16"), 32),
        load_file(artifact / "model.safetensors"),
        tmp_path / "m",
    )
    weights = {
        name: compressed_tensors.decode(
            name.removesuffix(".weight"), stored, scheme
        ).weight.dequantize()
        if f"{name}_packed" in stored
        else stored[name].float()
        for name in load_file(starving / "model.safetensors")
    }
    source.mkdir()
    (source / "config.json").write_bytes((starving / "config.json").read_bytes())
    save_file(weights, source / "model.safetensors", metadata={"format": "pt"})
    expected = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)(tokens).logits
    loaded = load(artifact, backend="reference", exact=True)
    assert sum(name.startswith(expert(UNREACHED)) for name in loaded.backends) == 3
    found = loaded.model(tokens).logits
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()
    streamed = load_offloaded(artifact, backend="reference", exact=True).model(tokens).logits
    assert torch.equal(streamed, found)


def test_the_plan_counts_what_is_written(starving, artifact, text_files):
    recipe = recipe_from(
        {
            "model": str(starving),
            "calibration": {
                "source": str(text_files["calibration"]),
                "samples": 6,
                "sequence_length": 48,
            },
            "quantize": [{"name": "x", **GPTQ, "experts": "rtn"}],
        }
    )
    found = PlanJob(recipe=recipe).run()
    (planned,) = found["artifacts"]
    with safe_open(artifact / "model.safetensors", framework="pt") as file:
        held = [file.get_tensor(name) for name in file.keys()]  # noqa: SIM118 - not a mapping
    assert planned["tensor_bytes"] == sum(tensor.numel() * tensor.element_size() for tensor in held)
    rows = {row["tensors"]: (row["count"], row["scheme"]) for row in planned["schemes"]}
    assert rows["model.layers.{0-1}.block_sparse_moe.experts.{0-4}.w1"] == (
        10,
        "W4A16 int4 per_group 32",
    )
    assert rows["model.layers.{0-1}.block_sparse_moe.gate"] == (2, "copied, a router")
    assert sum(row["bytes_before"] for row in planned["schemes"]) == found["model"]["bytes"]
    assert (
        abs(planned["output_bytes"] / sum(path.stat().st_size for path in artifact.iterdir()) - 1)
        < 0.2
    )


def test_the_flags_reach_the_stages_and_a_wrong_word_is_answered_with_the_right_ones(
    starving, measurement, tmp_path, capsys
):
    def said(*arguments):
        code = exit_code(cli, [str(argument) for argument in arguments])
        out, err = capsys.readouterr()
        return code, out + err

    code, text = said(
        "measure",
        starving,
        "-o",
        tmp_path,
        "--calibration",
        "x",
        "--experts",
        "all",
        "--dry-run",
        "--json",
    )
    assert (code, json.loads(text)["options"]["experts"]) == (0, "all")
    flags = ("--scheme", "W4A16", "--experts", "damp", "--expert-tokens", 7)
    code, text = said("quantize", starving, "-o", tmp_path, *flags, "--dry-run", "--json")
    entry = json.loads(text)["entry"]
    assert (code, entry["experts"], entry["expert_tokens"]) == (0, "damp", 7)
    for arguments in (
        ("quantize", starving, "-o", tmp_path, "--scheme", "FP8", "--experts", "shared"),
        ("measure", starving, "-o", tmp_path, "--calibration", "x", "--experts", "every"),
    ):
        code, text = said(*arguments)
        assert code == 2
        assert "valid: " in text
    code, text = said(
        "quantize", starving, "-o", tmp_path / "q", "--scheme", "FP8", "--measurement", measurement
    )
    assert code == 3
    assert "experts got fewer calibration tokens than needed" in text
    assert (
        "fix: give more or other calibration text, or say what becomes of them: --experts all, "
        "damp, rtn" in text
    )


def test_what_a_short_expert_lacks_is_told_once_per_expert():
    layer = graph_for(MixtralConfig(num_hidden_layers=1, num_local_experts=2)).layers[0]
    groups = [group for group in layer.groups if group.expert == expert(1)]
    shorts = [
        Short(group=groups[0], tokens=2, needed=16),
        Short(group=groups[1], tokens=2, needed=24),
    ]
    assert (
        described(shorts)
        == f"1 expert got fewer calibration tokens than needed: {expert(1)} (2 of 24)"
    )
