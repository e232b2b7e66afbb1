"""yaqa, signround and tuning of mixtures of experts: each expert by the tokens it was sent."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from quantflow.algorithms import ALGORITHMS, yaqa
from quantflow.files.rank_folders import rank_folder
from quantflow.measuring import measure
from quantflow.measuring.job import MeasureJob
from quantflow.numerics import output_blocks
from quantflow.planning.recipe import Calibration, Measure, Quantize, Tune
from quantflow.quantizing import quantize
from quantflow.quantizing.job import QuantizeJob
from quantflow.reporting.progress_line import ProgressLine

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


@pytest.mark.parametrize("policy", ["damp", "rtn", "all"])
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
            if short:
                gradient += gradient.diagonal().mean() * torch.eye(len(gradient))
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
