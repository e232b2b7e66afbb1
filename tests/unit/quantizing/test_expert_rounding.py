"""yaqa, signround and tuning of mixtures of experts: each expert by the tokens it was sent."""

import json
import shutil
import threading
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from quantflow import cpu_threads
from quantflow.algorithms import ALGORITHMS, yaqa
from quantflow.core.orthogonal import rotated, rotation
from quantflow.core.scheme import preset, with_group_size
from quantflow.errors import StatisticsError
from quantflow.files.rank_folders import rank_folder
from quantflow.formats import compressed_tensors
from quantflow.measuring import measure
from quantflow.measuring.job import MeasureJob
from quantflow.models.load import open_source
from quantflow.models.open import graph_for
from quantflow.numerics import output_blocks
from quantflow.planning.cost import _quantizing, backward_bytes, need_layers
from quantflow.planning.plan import resolve
from quantflow.planning.recipe import Calibration, Measure, Quantize, SignRound, Tune
from quantflow.planning.sizes import model_size
from quantflow.quantizing import layer as layer_module
from quantflow.quantizing import quantize
from quantflow.quantizing.job import QuantizeJob
from quantflow.reporting.progress_line import ProgressLine
from tests.shared import slow_but

QUIET = ProgressLine(quiet=True)
UNREACHED = 4  # of five experts, two per token
BEST = {
    "scheme": "W4A16",
    "algorithm": "best",
    "group_size": 32,
    "transforms": (),
    "tune": Tune(steps=0),
}


def expert(number, layer=0):
    return f"model.layers.{layer}.block_sparse_moe.experts.{number}"


@pytest.fixture(scope="module")
def starving(tmp_path_factory, family_model):
    """Return a Mixtral of five experts, of which one gets no token whatever the text."""
    folder = tmp_path_factory.mktemp("models") / "starving"
    config = AutoConfig.from_pretrained(family_model("mixtral"), num_local_experts=5)
    torch.manual_seed(2)
    AutoModelForCausalLM.from_config(config).to(torch.bfloat16).save_pretrained(folder)
    for path in family_model("mixtral").glob("token*"):
        shutil.copy(path, folder)
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.endswith("block_sparse_moe.gate.weight")]:
        # of two rows and their negatives two are positive
        first, second, *_ = tensors[name].clone()
        tensors[name] = torch.stack([first, -first, second, -second, 0 * first])
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def measurement(starving, text_files, tmp_path_factory):
    calibration = Calibration(source=str(text_files["calibration"]), samples=6, sequence_length=48)
    job = MeasureJob(
        model=starving,
        output=tmp_path_factory.mktemp("measured") / "m",
        calibration=calibration,
        options=Measure(stats=("gradient",)),
    )
    return rank_folder(measure.run(job, QUIET), 0, 1)


def made(model, output, measurement, **words):
    entry = Quantize(name="x", **words)
    return quantize.run(
        QuantizeJob(model=model, output=output, entry=entry, measurement=measurement), QUIET
    )


def records(folder):
    return [json.loads(path.read_text()) for path in sorted((folder / "layers").glob("*.json"))]


def tensors(folder):
    found = {}
    for path in sorted((folder / "layers").glob("*.safetensors")):
        found |= load_file(path)
    return found


@torch.no_grad()
def inputs_by_hand(model, measurement):
    """Expert's linear of layer 0 -> the rows that enter it, of the family's own weights."""
    stock = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    experts, rows = stock.model.layers[0].mlp.experts, {}

    def see(_module, args):
        x, chosen, _ = args
        for number in range(5):
            sent = x[(chosen == number).any(dim=-1)]
            gate, up = (sent @ experts.gate_up_proj[number].T).chunk(2, dim=-1)
            inner = torch.nn.functional.silu(gate) * up
            for linear, entering in (("w1", sent), ("w3", sent), ("w2", inner)):
                rows.setdefault(f"{expert(number)}.{linear}", []).append(entering)

    experts.register_forward_pre_hook(see)
    kept = load_file(measurement / "calibration.safetensors")
    for sequence in torch.split(kept["tokens"], kept["lengths"].tolist()):
        stock(sequence[None])
    return {name: torch.cat(parts).double() for name, parts in rows.items()}


@pytest.fixture
def handed(monkeypatch):
    """The statistics that yaqa is handed, by linear."""
    seen = {}
    round_group = yaqa.quantize_group

    def spy(weights, scheme, *, statistics, **more):
        for name in weights:
            seen[name] = {
                "hessian_sum": statistics["hessian_sum"].clone(),
                "gradient_sum": statistics[f"{name}|gradient_sum"].clone(),
                "tokens": int(statistics["count"]),
            }
        return round_group(weights, scheme, statistics=statistics, **more)

    monkeypatch.setattr(ALGORITHMS["yaqa"], "quantize_group", spy)
    return seen


@pytest.mark.parametrize("policy", slow_but(["damp", "rtn", "all"], "damp"))
def test_yaqa_rounds_an_expert_by_the_tokens_and_gradients_of_its_own(
    starving, measurement, tmp_path, handed, policy
):
    """An expert with too few tokens gets its policy: sums shrunk, or plain rounding."""
    rows = inputs_by_hand(starving, measurement)
    counts = {number: len(rows[f"{expert(number)}.w1"]) for number in range(5)}
    needed = sorted(counts.values())[2]  # two experts have fewer, one of them none
    folder = made(
        starving, tmp_path / "q", measurement, **BEST, experts=policy, expert_tokens=needed
    )
    measured = load_file(measurement / "statistics.safetensors")
    (record, _) = records(folder)
    everyone = torch.cat([rows[f"{expert(number)}.w1"] for number in (0, 1)])
    for number in range(5):
        for linear in ("w1", "w2", "w3"):
            name = f"{expert(number)}.{linear}"
            short = counts[number] < needed
            if short and policy == "rtn":
                assert name not in handed
                assert "rounded to nearest" in record["decisions"][name]["experts"]
                continue
            hessian = rows[name].T @ rows[name]
            gradient = measured[f"{name}|gradient|gradient_sum"].double()
            assert (counts[number] > 0) == bool(gradient.any())
            # the fewer tokens for its outputs, the more of its mean on top
            share = 1.0 if short else min(1.0, len(gradient) / counts[number])
            gradient += share * gradient.diagonal().mean() * torch.eye(len(gradient))
            if short and policy == "damp":
                hessian += hessian.diagonal().mean() * torch.eye(len(hessian))
            found = handed[name]
            close(found["gradient_sum"], gradient)
            if policy == "all":  # the two experts of +x and -x see all tokens between them
                assert found["tokens"] == len(everyone)
                if linear != "w2":
                    close(found["hessian_sum"], everyone.T @ everyone)
            else:
                assert found["tokens"] == counts[number]
                close(found["hessian_sum"], hessian)
    assert sorted(record["experts"]["short"]) == sorted(
        f"{expert(number)}.{linear}"
        for number in range(5)
        for linear in ("w1", "w2")
        if counts[number] < needed and policy != "all"
    )
    for name in handed:
        decisions = records(folder)[int(name.split(".")[2])]["decisions"][name]
        assert decisions["loss"] <= decisions["loss_start"]


def test_experts_of_a_rotated_mixture_are_rounded_by_their_own_rotated_sums(
    starving, measurement, tmp_path, handed
):
    """Inputs are observed rotated, measured gradients follow; norms multiply by 1 here."""
    rows, words = inputs_by_hand(starving, measurement), BEST | {"transforms": ({"hadamard": {}},)}
    made(starving, tmp_path / "q", measurement, **words, experts="damp", expert_tokens=1)
    measured, by = load_file(measurement / "statistics.safetensors"), rotation(64, seed=0)
    reached = [number for number in range(5) if len(rows[f"{expert(number)}.w1"])]
    assert len(reached) == 4
    for number in reached:
        for linear in ("w1", "w2", "w3"):
            name, x = f"{expert(number)}.{linear}", rows[f"{expert(number)}.{linear}"]
            y = x if linear == "w2" else rotated(x, by).double()
            # embedding and router are rounded to bfloat16, and a token may be sent elsewhere
            assert far(handed[name]["hessian_sum"], y.T @ y) < 0.05, name
            assert linear == "w2" or far(handed[name]["hessian_sum"], x.T @ x) > 0.3, name
            gradient = measured[f"{name}|gradient|gradient_sum"]
            plain = gradient + min(1.0, len(gradient) / len(x)) * gradient.diagonal().mean() * (
                torch.eye(len(gradient))
            )
            turned = rotated(rotated(plain, by).T, by).T if linear == "w2" else plain
            assert far(handed[name]["gradient_sum"], turned) < 0.05, name
            assert linear != "w2" or far(handed[name]["gradient_sum"], plain) > 0.3, name


def far(found, expected):
    """Return how far one sum is from another, as a share of that one."""
    return float((found.double() - expected).norm() / expected.double().norm())


def close(found, expected):
    torch.testing.assert_close(
        found.double(), expected, rtol=1e-4, atol=1e-5 * float(expected.abs().max() + 1e-12)
    )


def test_shrunk_sums_of_gradients_have_their_mean_on_top_block_by_block():
    outputs = output_blocks.MOST + 2 * output_blocks.ALIGNED
    sums = torch.rand(outputs, output_blocks.width(outputs))
    kept = sums.clone()
    output_blocks.shrink_(sums)
    for rows in output_blocks.blocks(outputs):
        before, after = (output_blocks.block_of(of, rows) for of in (kept, sums))
        wanted = before + before.diagonal().mean() * torch.eye(len(before))
        torch.testing.assert_close(after, wanted)
    assert not output_blocks.shrink_(torch.zeros(4, 4)).any()


def dequantized(model, quantized, folder, layers=(0, 1)):
    """The family's own model with the weights of some quantized layers."""
    scheme, found = with_group_size(preset("W4A16"), 32), tensors(quantized)
    weights = load_file(model / "model.safetensors")
    for name in graph_for(open_source(model).config).linears:
        if int(name.split(".")[2]) in layers:
            decoded = compressed_tensors.decode(name, found, scheme)
            weights[f"{name}.weight"] = decoded.weight.dequantize()
    shutil.copytree(model, folder)
    weights = {name: weight.float() for name, weight in weights.items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def sequences_of(measurement):
    kept = load_file(measurement / "calibration.safetensors")
    return torch.split(kept["tokens"], kept["lengths"].tolist())


def short_linears(needed, counts):
    return {
        f"{expert(number, layer)}.{linear}"
        for layer in (0, 1)
        for number in range(5)
        for linear in ("w1", "w2", "w3")
        if counts[layer][number] < needed
    }


def tokens_of(measurement):
    found = json.loads((measurement / "measurement.json").read_text())["routed"]
    return [found[f"model.layers.{layer}.block_sparse_moe.experts"]["tokens"] for layer in (0, 1)]


GPTQ = {"scheme": "W4A16", "algorithm": "gptq", "group_size": 32, "transforms": ()}
LEARNED = {**GPTQ, "algorithm": "signround"}


def parts_of(found, linear):
    return {name: tensor for name, tensor in found.items() if name.startswith(f"{linear}.")}


@pytest.mark.parametrize(("policy", "first"), [("damp", "rtn"), ("all", "gptq")])
def test_signround_learns_a_layer_with_its_experts_and_leaves_those_with_few_tokens(
    starving, measurement, tmp_path, policy, first
):
    """The recorded error is that of the family's own layer with the artifact's weights."""
    counts = tokens_of(measurement)
    needed = sorted(counts[0])[2]
    words = {"experts": policy, "expert_tokens": needed}
    learned = SignRound(iterations=20, sequences=2, start=first)
    start = made(starving, tmp_path / "start", measurement, **{**GPTQ, "algorithm": first}, **words)
    folder = made(
        starving, tmp_path / "learned", measurement, **LEARNED, signround=learned, **words
    )
    before, after = tensors(start), tensors(folder)
    short = short_linears(needed, counts)
    assert any(int(name.split(".")[5]) == UNREACHED for name in short) and len(short) > 6
    for record in records(folder):
        moved = 0
        for name, decisions in record["decisions"].items():
            same = all(
                torch.equal(tensor, parts_of(after, name)[key])
                for key, tensor in parts_of(before, name).items()
            )
            if name in short:
                assert same and "iterations" not in decisions
                assert decisions["experts"].endswith("; its rounding is not learned")
            else:
                assert same == (decisions["moved"] + decisions["rescaled"] == 0)
                moved += decisions["moved"] * (".experts." in name)
                if first == "rtn":
                    assert decisions["block_loss"] < 0.9 * decisions["block_loss_start"]
        assert (first == "rtn") <= (moved > 0)
    original = AutoModelForCausalLM.from_pretrained(starving, dtype=torch.float32).eval()
    name = "model.layers.0.self_attn.q_proj"
    for which, key in ((start, "block_loss_start"), (folder, "block_loss")):
        quantized = dequantized(starving, which, tmp_path / f"{which.name}-plain", layers=(0,))
        power = error = 0.0
        with torch.no_grad():
            for sequence in sequences_of(measurement):
                wanted, found = (
                    model.model(sequence[None], output_hidden_states=True).hidden_states[1]
                    for model in (original, quantized)
                )
                power += float(wanted.double().square().sum())
                error += float((found - wanted).double().square().sum())
        recorded = records(folder)[0]["decisions"][name][key]
        assert error / power == pytest.approx(recorded, rel=1e-3)


def test_tuning_lowers_the_divergence_of_a_mixture_and_leaves_experts_with_few_tokens(
    starving, measurement, tmp_path
):
    """The recorded divergence is that of the family's own model with the artifact's weights."""
    counts = tokens_of(measurement)
    needed = sorted(counts[0])[2]
    words = {**GPTQ, "experts": "damp", "expert_tokens": needed}
    start = made(starving, tmp_path / "gptq", measurement, **words)
    folder = made(
        starving, tmp_path / "tuned", measurement, **words, tune=Tune(steps=6, sequences=2)
    )
    before, after = tensors(start), tensors(folder)
    short = short_linears(needed, counts)
    rescaled = 0
    for layer, record in enumerate(records(folder)):
        for name, decisions in record["decisions"].items():
            told = decisions["tune"]
            scale = f"{name}.weight_scale"
            if name in short:
                number = int(name.split(".")[5])
                assert torch.equal(before[scale], after[scale]) and told["rescaled"] == 0
                assert (told["tokens"], told["needed"]) == (counts[layer][number], needed)
            else:
                assert "needed" not in told
                assert told["rescaled"] == int((before[scale] != after[scale]).sum())
                rescaled += told["rescaled"] * (".experts." in name)
    assert rescaled > 0
    told = records(folder)[0]["decisions"]["model.layers.0.self_attn.q_proj"]["tune"]
    assert told["divergence"] < told["divergence_start"]
    original = AutoModelForCausalLM.from_pretrained(starving, dtype=torch.float32).eval()
    sequences = sequences_of(measurement)
    for which, key in ((start, "divergence_start"), (folder, "divergence")):
        quantized = dequantized(starving, which, tmp_path / f"{which.name}-plain")
        total = 0.0
        with torch.no_grad():
            for sequence in sequences:
                wanted, found = (
                    model(sequence[None]).logits[0].double().log_softmax(-1)
                    for model in (original, quantized)
                )
                total += float((wanted.exp() * (wanted - found)).sum())
        assert total / sum(map(len, sequences)) == pytest.approx(told[key], rel=1e-3)


def test_presets_of_a_mixture_are_those_of_a_dense_model_and_plan_counts_their_cost(
    starving, measurement, tmp_path
):
    graph = graph_for(open_source(starving).config)
    infos = open_source(starving).checkpoint.infos
    shapes = {name: info.shape for name, info in infos.items()}
    sizes = model_size(infos, open_source(starving).config, graph)
    costs = {}
    for word, algorithm in (("gptq", "gptq"), ("good", "gptq"), ("best", "yaqa")):
        entry = Quantize(name="x", scheme="W4A16", algorithm=word, group_size=32)
        plan = resolve(entry, graph, shapes)
        assert (plan.algorithm, plan.refit, plan.tune) == (algorithm, word != "gptq", None)
        assert plan.experts is not None and plan.experts.weights
        need = need_layers(sizes, plan, lengths=[48] * 6)
        costs[word] = (need.scratch, max(fixed + each for fixed, each in need.peaks))
    assert costs["gptq"] < costs["good"] <= costs["best"]
    learned = resolve(Quantize(name="x", **LEARNED), graph, shapes)
    assert learned.algorithm == "rtn" and learned.experts is not None and learned.experts.weights
    with pytest.raises(StatisticsError, match=r"experts\.4 \(0 of 256\)"):
        made(starving, tmp_path / "q", measurement, **LEARNED)


@pytest.mark.parametrize("refit", [False, True])
def test_experts_side_by_side_have_the_bits_of_one_worker(
    refit, starving, text_files, tmp_path, monkeypatch
):
    calibration = Calibration(source=str(text_files["calibration"]), samples=6, sequence_length=48)
    entry = Quantize(
        name="x",
        scheme="W4A16",
        algorithm="gptq",
        group_size=32,
        experts="damp",
        expert_tokens=8,
        refit=refit,
    )
    job = MeasureJob(
        model=starving, output=tmp_path / "m", calibration=calibration, options=Measure(stats=())
    )
    ids = rank_folder(measure.run(job, QUIET), 0, 1)
    made_with = {}
    for workers in (1, 2):
        monkeypatch.setattr(cpu_threads, "usable_cores", lambda workers=workers: workers)
        running = set()
        plain = layer_module._quantize_group

        def watched(*args, plain=plain, running=running, **kwargs):
            running.add(threading.get_ident())
            return plain(*args, **kwargs)

        with monkeypatch.context() as patched:
            patched.setattr(layer_module, "_quantize_group", watched)
            folder = quantize.run(
                QuantizeJob(
                    model=starving,
                    output=tmp_path / str(workers),
                    entry=entry,
                    measurement=ids,
                ),
                QUIET,
            )
        made_with[workers] = (tensors(folder), records(folder))
        # with two workers attention runs in this thread, and experts in the two others
        assert (len(running - {threading.get_ident()}) > 0) == (workers == 2)
    (one, noted), (two, noted_too) = made_with[1], made_with[2]
    assert one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)
    assert noted == noted_too


def test_a_worker_has_the_whole_hessian_of_its_own_expert_and_of_others_all_share_one(starving):
    source = open_source(starving)
    graph, infos = graph_for(source.config), source.checkpoint.infos
    sizes = model_size(infos, source.config, graph)
    entry = Quantize(name="x", scheme="W4A16", algorithm="gptq", group_size=32, experts="damp")
    plan = resolve(entry, graph, {name: info.shape for name, info in infos.items()})
    every = replace(sizes.layer, shares=(1.0,) * len(sizes.layer.shares))
    together = _quantizing(replace(sizes, layers=(every,)), plan)
    apart = _quantizing(replace(sizes, layers=(sizes.layer,)), plan)
    # behind both peaks of q, k, v and of o: gate and up of the first expert, 256 rows of 64
    (making, _), (rounding, unit), (fixed, each) = together[4], together[5], apart[4]
    assert apart[:4] == together[:4]
    assert fixed + each == max(making, rounding + unit)  # one worker
    whole, qvalues = 4 * 64 * 64, 256 * 64
    encoded = 256 * 64 // 2 + 2 * 256 * 2 + 2 * 16  # packed, scales of bfloat16, two shapes
    assert rounding - fixed == each - unit == whole + qvalues + encoded


def test_what_a_sequence_keeps_for_its_way_back_grows_with_the_chosen_experts(starving):
    source = open_source(starving)
    sizes = model_size(source.checkpoint.infos, source.config, graph_for(source.config))
    more = replace(
        sizes,
        layers=tuple(
            replace(layer, shares=tuple(min(1.0, 2 * share) for share in layer.shares))
            for layer in sizes.layers
        ),
    )
    chosen = 2 * (64 + 2 * 2 * 128 + 128 + 2 * 64)  # gate and up of 128, down; twice a token
    assert backward_bytes(more, 10) - backward_bytes(sizes, 10) == 4 * 10 * chosen
