"""Mixed precision of mixtures: one scheme for a layer's experts, and bits that a token reads."""

import json
from dataclasses import replace

import pytest
from safetensors.torch import load_file

from quantflow.errors import UsageError
from quantflow.exporting import export as export_stage
from quantflow.files.rank_folders import rank_folder
from quantflow.measuring import measure
from quantflow.measuring.job import MeasureJob
from quantflow.measuring.record import read_measurement, statistic
from quantflow.models.open import graph_for, open_files
from quantflow.planning.plan import resolve
from quantflow.planning.recipe import Calibration, Candidate, Measure, Override, Quantize
from quantflow.quantizing import quantize
from quantflow.quantizing.job import QuantizeJob
from quantflow.quantizing.mixed_precision.chosen_mixture import ChosenMixture
from quantflow.quantizing.mixed_precision.sensitivity import ChoiceItem
from quantflow.reporting.progress_line import ProgressLine
from tests.shared import run

QUIET = ProgressLine(quiet=True)
EXPERTS, CHOSEN = 4, 2
FEW = tuple(Candidate(scheme=f"W{bits}A16", group_size=32) for bits in (3, 4, 6))
ENTRY = Quantize(name="mixed", scheme="W4A16", algorithm="rtn_mse", target_bpw=4.7, candidates=FEW)
ATTENTION = Override(match="re:.*(self_attn|shared_expert)[.].*", scheme="FP8_DYNAMIC")


@pytest.fixture(scope="module")
def model(family_model):
    return family_model("qwen2_moe")


@pytest.fixture(scope="module")
def measured(tmp_path_factory, model, text_files):
    folder = tmp_path_factory.mktemp("measured")
    calibration = Calibration(source=str(text_files["calibration"]), samples=4, sequence_length=48)
    options = Measure(stats=("fisher",))
    measure.run(
        MeasureJob(model=model, output=folder, calibration=calibration, options=options), QUIET
    )
    return rank_folder(folder, 0, 1)


@pytest.fixture(scope="module")
def made(tmp_path_factory, model, measured):
    """Folder of an entry's layers, by what differs from ENTRY."""

    def make(**changes):
        job = QuantizeJob(
            model=model,
            output=tmp_path_factory.mktemp("mixed") / "out",
            entry=replace(ENTRY, **changes),
            measurement=measured,
        )
        return quantize.run(job, QUIET)

    return make


@pytest.fixture(scope="module")
def mixed(made):
    return made()


def record(folder):
    return json.loads((folder / "choice.json").read_text())


def schemes(folder):
    plan = json.loads((folder / "quantize.json").read_text())["plan"]["schemes"]
    return {
        name: (scheme["weights"]["kind"], scheme["weights"]["num_bits"])
        for name, scheme in plan.items()
    }


def stored(folder):
    """Bits and number of weights of each linear, from the files."""
    bits, weights = {}, {}
    for path in (folder / "layers").glob("*.safetensors"):
        for name, tensor in load_file(path).items():
            linear, _, part = name.rpartition(".")
            if part in ("weight_packed", "weight_scale", "weight_shape"):
                bits[linear] = bits.get(linear, 0) + 8 * tensor.nbytes
            if part == "weight_shape":
                weights[linear] = int(tensor.prod())
    return bits, weights


def test_a_sensitivity_of_an_expert_is_that_of_the_tokens_it_was_sent(model, measured):
    found = read_measurement(measured)
    for layer in graph_for(open_files(model).config).layers:
        counts = [
            int(statistic(found, gate, site="gradient", statistic="count"))
            for gate in layer.gates.values()
        ]
        tokens = int(statistic(found, layer.linears[0], site="gradient", statistic="count"))
        assert len(counts) == EXPERTS and sum(counts) == CHOSEN * tokens
        assert max(counts) < tokens


def test_the_experts_of_a_layer_get_one_scheme_and_their_shared_one_its_own(mixed):
    told, found = record(mixed), schemes(mixed)
    stacks = [item["linears"] for item in told["items"] if len(item["linears"]) == 3 * EXPERTS]
    assert len(stacks) == 2
    for layer, linears in enumerate(stacks):
        assert all(f"layers.{layer}.mlp.experts." in name for name in linears)
        assert len({found[name] for name in linears}) == 1
    fused = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    shared = ("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj")
    alone = [tuple(item["linears"]) for item in told["items"] if len(item["linears"]) < 12]
    for group in (fused, shared):
        assert tuple(f"model.layers.1.{name}" for name in group) in alone
    assert len(set(found.values())) > 1 and 4.4 < told["bits_per_weight"] <= 4.7


def test_bits_are_those_of_all_files_or_those_that_a_token_reads(mixed, made):
    active = made(bits_of="active")
    for folder, share in ((mixed, 1.0), (active, CHOSEN / EXPERTS)):
        bits, weights = stored(folder)
        part = {name: share if ".experts." in name else 1.0 for name in weights}
        total = sum(part[name] * weights[name] for name in weights)
        expected = sum(part[name] * bits[name] for name in weights) / total
        assert record(folder)["bits_per_weight"] == pytest.approx(expected, rel=1e-12)
    assert "bits_of" not in record(mixed) and record(active)["bits_of"] == "active"
    assert "active bits per weight" in (active / "recipe.yaml").read_text()
    assert "weight that a token reads" in (active / "pareto.svg").read_text()


def test_the_recipe_names_experts_by_one_pattern_and_repeats_the_bytes(
    mixed, model, measured, tmp_path
):
    text = (mixed / "recipe.yaml").read_text()
    assert "experts[.][0-9]+[.]" in text.replace("\\\\", "\\") and "experts[.]3" not in text
    line = ("--recipe", mixed / "recipe.yaml", "--measurement", measured, "-q")
    assert run("quantize", model, "-o", tmp_path / "again", *line) == 0
    for path in (mixed / "layers").glob("*.safetensors"):
        assert (tmp_path / "again" / "layers" / path.name).read_bytes() == path.read_bytes()


def test_attention_and_the_shared_expert_in_fp8_stand_beside_chosen_experts(
    made, model, measured, tmp_path, monkeypatch
):
    folder = made(overrides=(ATTENTION,), target_bpw=5.8)
    found = schemes(folder)
    experts = {kind for name, kind in found.items() if ".experts." in name}
    others = {kind for name, kind in found.items() if ".experts." not in name}
    assert others == {("float", 8)} and {kind for kind, _ in experts} == {"int"}
    assert {bits for _, bits in experts} <= {3, 4, 6} and record(folder)["bits_per_weight"] <= 5.8
    # an expert's bits count half as much of what a token reads, where attention counts whole
    active = made(overrides=(ATTENTION,), target_bpw=6.4, bits_of="active")
    assert record(active)["bits_per_weight"] <= 6.4
    monkeypatch.setattr(export_stage, "_prove", lambda *_: {})
    assert run("export", folder, "-o", tmp_path / "a", "-q") == 0
    config = json.loads((tmp_path / "a" / "config.json").read_text())["quantization_config"]
    kinds = {group["weights"]["type"] for group in config["config_groups"].values()}
    assert kinds == {"float", "int"}


def item(linears, bits, *, share):
    return ChoiceItem(
        linears=tuple(linears),
        weights=100,
        share=share,
        options={0: (300, 8.0), 1: (bits, 1.0)},
    )


def test_active_bits_buy_the_experts_what_stored_bits_buy_the_attention():
    """By hand: either costs 100 bits more; of the experts' a token reads a quarter."""
    items = (item("a", 400, share=1), item("b", 400, share=0.25))
    given = {"key": "k", "graph": None, "items": items, "tokens": 1, "fixed": (0, 0)}
    stored_bits = ChosenMixture(entry=replace(ENTRY, target_bpw=3.5), **given)
    assert sum(stored_bits.picks) == 1 and stored_bits.bits_per_weight(stored_bits.picks) == 3.5
    counted = replace(ENTRY, target_bpw=3.5, bits_of="active")
    active = ChosenMixture(entry=counted, **given)
    # 3.5 of 125 weights is 437 bits: 300 + 75 and 25 more for the experts, not 100 for the others
    assert active.picks == (0, 1) and active.bits_per_weight((0, 1)) == 400 / 125
    assert active.bits_per_weight((1, 0)) == 475 / 125


def test_what_counts_bits_that_are_read_is_refused_where_there_are_no_experts(llama, model):
    files = open_files(llama)
    shapes = {name: info.shape for name, info in files.checkpoint.infos.items()}
    with pytest.raises(UsageError, match="bits_of=active of a llama, which has no experts"):
        resolve(replace(ENTRY, bits_of="active"), graph_for(files.config), shapes)
    with pytest.raises(UsageError, match="bits_of='actve'"):
        replace(ENTRY, bits_of="actve")
    with pytest.raises(UsageError, match="bits_of=active and nothing to choose"):
        Quantize(name="x", scheme="W4A16", bits_of="active")


@pytest.mark.slow
def test_within_a_divergence_a_mixture_takes_fewer_bits(mixed, made):
    allowed = 1.5 * record(mixed)["measured_kld"]
    folder = made(target_bpw=None, max_kld=allowed)
    told = record(folder)
    assert told["measured_kld"] <= allowed
    assert told["bits_per_weight"] < record(mixed)["bits_per_weight"]


def test_mixed_schemes_are_closer_to_the_model_than_one_scheme_of_as_many_bits(made):
    one = record(made(candidates=(Candidate(scheme="W4A16", group_size=32),), target_bpw=9.0))
    several = record(made(target_bpw=one["bits_per_weight"]))
    assert several["bits_per_weight"] <= one["bits_per_weight"]
    assert several["measured_kld"] < 0.95 * one["measured_kld"]
