"""N cards that quantize together where the model runs.

Unified, they make every byte that one process makes.
"""

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import safetensors.torch
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from quantflow.errors import InputError
from quantflow.exporting import export
from quantflow.exporting.job import ExportJob
from quantflow.measuring import measure
from quantflow.measuring.job import MeasureJob
from quantflow.planning.recipe import Calibration, Quantize
from quantflow.quantizing import quantize
from quantflow.quantizing.job import QuantizeJob
from quantflow.reporting.progress_line import ProgressLine
from quantflow.unifying import unify
from tests.forked_ranks import Ranks, command, forked_ranks, hashes, inputs, together

pytestmark = pytest.mark.slow

QUIET = ProgressLine(quiet=True)
GPTQ = {"scheme": "W4A16", "group_size": 8}
SAMPLES = 5


@pytest.fixture(scope="module")
def ranks(
    model: Path, measurement: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Ranks]:
    """A function that quantizes with N processes; see `forked_ranks`."""
    with forked_ranks(tmp_path_factory.mktemp("server"), model, measurement) as run:
        yield run


@pytest.fixture(scope="module")
def model(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight heads, two for keys and values; three layers; biases."""
    folder = tmp_path_factory.mktemp("models") / "eight"
    torch.manual_seed(1)
    shape = {"vocab_size": 320, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 2, "max_position_embeddings": 128}
    made = LlamaForCausalLM(
        LlamaConfig(**shape, **heads, initializer_range=0.1, attention_bias=True, mlp_bias=True)
    )
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0, 0.1)
    made.to(torch.bfloat16).save_pretrained(folder)
    for path in llama.glob("token*"):
        (folder / path.name).write_bytes(path.read_bytes())
    return folder


@pytest.fixture(scope="module")
def measurement(
    model: Path, text_files: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """Five sequences of two lengths."""
    folder = tmp_path_factory.mktemp("measured") / "m"
    text = folder.parent / "text.jsonl"
    lines = text_files["calibration"].read_text().splitlines()
    short = json.dumps({"text": json.loads(lines[0])["text"][:40]})
    text.write_text("\n".join([*lines[1:3], short, *lines[3:]][:SAMPLES]) + "\n")
    calibration = Calibration(source=str(text), samples=SAMPLES, sequence_length=48)
    measured = measure.run(MeasureJob(model=model, output=folder, calibration=calibration), QUIET)
    lengths = safetensors.torch.load_file(measured / "rank-000-of-001" / "calibration.safetensors")[
        "lengths"
    ].tolist()
    assert len(lengths) == SAMPLES and len(set(lengths)) == 2
    return measured


@pytest.fixture(scope="module")
def alone(
    model: Path, measurement: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[dict], Path]:
    """Return a function that returns what one process quantizes, made once."""
    made: dict[str, Path] = {}

    def run(recipe: dict) -> Path:
        key = json.dumps(recipe)
        if key not in made:
            values = {
                name: tuple(value) if isinstance(value, list) else value
                for name, value in recipe.items()
            }
            entry, output = Quantize(name="x", **values), tmp_path_factory.mktemp("alone") / "whole"
            made[key] = quantize.run(
                QuantizeJob(model=model, output=output, entry=entry, measurement=measurement),
                QUIET,
            )
        return made[key]

    return run


@pytest.fixture(scope="module")
def shards(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """A function that returns the GPTQ output of N cards, made once.

    The output is not to be changed.
    """
    made: dict[int, Path] = {}

    def run(world: int) -> Path:
        if world not in made:
            made[world] = tmp_path_factory.mktemp("shards") / "shards"
            ranks(made[world], GPTQ, world=world)
        return made[world]

    return run


@pytest.mark.parametrize(
    "world", [2, 4, pytest.param(8, marks=pytest.mark.slow)]
)  # eight: more than sequences, and than groups
def test_gptq_on_several_cards_unified_is_what_one_process_writes(alone, shards, tmp_path, world):
    made = together(shards(world), tmp_path / "made")
    # three layers, their records, quantize.json, the canary and its hashes
    assert len(hashes(made)) == 9
    assert hashes(made) == hashes(alone(GPTQ)) and inputs(made) == inputs(alone(GPTQ))


@pytest.mark.parametrize(
    ("recipe", "world"),
    [
        pytest.param({"scheme": "W8A8"}, 2, id="smoothquant"),
        pytest.param({"scheme": "W8A8_STATIC"}, 4, id="static", marks=pytest.mark.slow),
        pytest.param(
            {"scheme": "W4A16_ASYM", "group_size": 16, "quantized_inputs": True},
            2,
            id="asymmetric-on-quantized-inputs",
        ),
        pytest.param(
            {
                "scheme": "W4A16",
                "group_size": 16,
                "ignore": ["re:.*down_proj", "re:.*[.]1[.].*q_proj"],
            },
            4,
            id="ignored",
        ),
        pytest.param(
            {"scheme": "W8A8", "algorithm": "gptq"},
            2,
            id="smoothquant-and-gptq",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"scheme": "FP8", "transforms": [{"smoothquant": {"alpha": 0.5}}]}, 4, id="per-tensor"
        ),
        pytest.param(
            {"scheme": "W4A16", "group_size": 16, "algorithm": "hqq"},
            2,
            id="hqq",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"scheme": "W4A16", "group_size": 16, "transforms": [{"awq": {"clip": True}}]},
            2,
            id="awq-and-gptq",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"scheme": "W8A8_STATIC", "transforms": [{"smoothquant": {"alpha": "auto"}}]},
            4,
            id="searched-smoothquant",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_every_plan_that_runs_the_model_is_what_one_process_writes(
    alone, ranks, tmp_path, recipe, world
):
    ranks(tmp_path / "shards", recipe, world=world)
    made = together(tmp_path / "shards", tmp_path / "made")
    assert hashes(made) == hashes(alone(recipe)) and inputs(made) == inputs(alone(recipe))


def test_a_family_whose_queries_keys_and_values_are_one_linear(
    family_model, ranks, text_files, tmp_path
):
    neox, recipe = family_model("gpt_neox"), {"scheme": "W4A16", "group_size": 16}
    calibration = Calibration(source=str(text_files["calibration"]), samples=3, sequence_length=32)
    measured = measure.run(
        MeasureJob(model=neox, output=tmp_path / "m", calibration=calibration), QUIET
    )
    job = QuantizeJob(
        model=neox,
        output=tmp_path / "whole",
        entry=Quantize(name="x", **recipe),
        measurement=measured,
    )
    ranks(tmp_path / "shards", recipe, world=2, of=(neox, measured))
    assert hashes(together(tmp_path / "shards", tmp_path / "made")) == hashes(
        quantize.run(job, QUIET)
    )


def test_the_unified_shards_are_exported_with_the_proof_of_the_canary(shards, tmp_path):
    made = together(shards(2), tmp_path / "made")
    artifact = export.run(ExportJob(source=made, output=tmp_path / "artifact"), QUIET)
    assert json.loads((artifact / "quantflow.json").read_text())["proof"]["kind"] == "canary"


def test_the_source_is_not_needed_to_put_the_shards_together(shards, alone, tmp_path, monkeypatch):
    def nothing(*_args, **_options):
        raise AssertionError("the source was opened")

    monkeypatch.setattr("quantflow.unifying.shards.open_files", nothing)
    assert hashes(together(shards(2), tmp_path / "made")) == hashes(alone(GPTQ))


def test_four_shards_become_two_of_a_smaller_world(shards, alone, tmp_path):
    made = together(shards(4), tmp_path / "made", groups=("01", "23"))
    assert len(hashes(made)) == 18 and hashes(made) == hashes(shards(2))
    for rank in ("rank-000-of-002", "rank-001-of-002"):
        assert inputs(made / rank) == inputs(shards(2) / rank)
    assert hashes(together(made, tmp_path / "one")) == hashes(alone(GPTQ))


def test_a_shard_holds_its_part_of_every_tensor(shards, alone):
    layer = "model.layers.1"
    whole = safetensors.torch.load_file(alone(GPTQ) / "layers" / "00001.safetensors")
    part = safetensors.torch.load_file(
        shards(4) / "rank-002-of-004" / "layers" / "00001.safetensors"
    )
    assert part.keys() == whole.keys()
    columns = part[f"{layer}.mlp.down_proj.weight_packed"]
    # 32 of 128 columns, eight a word
    assert torch.equal(columns, whole[f"{layer}.mlp.down_proj.weight_packed"][:, 8:12])
    assert torch.equal(
        part[f"{layer}.mlp.down_proj.weight_scale"],
        whole[f"{layer}.mlp.down_proj.weight_scale"][:, 8:12],
    )
    assert part[f"{layer}.mlp.down_proj.weight_shape"].tolist() == [64, 32]
    assert torch.equal(
        part[f"{layer}.self_attn.q_proj.weight_packed"],
        whole[f"{layer}.self_attn.q_proj.weight_packed"][32:48],
    )
    assert torch.equal(
        part[f"{layer}.self_attn.q_proj.bias"], whole[f"{layer}.self_attn.q_proj.bias"][32:48]
    )
    assert torch.equal(
        part[f"{layer}.self_attn.k_proj.bias"], whole[f"{layer}.self_attn.k_proj.bias"][8:]
    )
    assert torch.equal(
        part[f"{layer}.self_attn.o_proj.bias"], whole[f"{layer}.self_attn.o_proj.bias"]
    )
    record = json.loads((shards(4) / "rank-002-of-004" / "layers" / "00001.json").read_text())
    expected = json.loads((alone(GPTQ) / "layers" / "00001.json").read_text())
    assert (
        record["placements"][f"{layer}.mlp.down_proj"]["offset"],
        record["placements"][f"{layer}.mlp.down_proj"]["axis"],
    ) == (64, 1)
    assert {key: record[key] for key in ("errors", "decisions", "canary", "changed")} == {
        key: expected[key] for key in ("errors", "decisions", "canary", "changed")
    }


def test_the_report_says_how_each_linear_was_joined(shards, tmp_path):
    rows = {
        row["linear"]: row
        for row in unify.summary(together(shards(4), tmp_path / "made"))["joined"]
    }
    assert len(rows) == 21
    down = {
        "linear": "model.layers.0.mlp.down_proj",
        "joined": "columns side by side",
        "cards": 4,
        "channels": 64,
    }
    assert rows["model.layers.0.mlp.down_proj"] == {**down, "requantized": 0}
    # each of two heads is on two cards
    assert rows["model.layers.2.self_attn.k_proj"]["cards"] == 2


@pytest.mark.parametrize(
    ("recipe", "dies", "starts"),
    [
        pytest.param(GPTQ, (1, 0), 0, id="before-the-first-layer", marks=pytest.mark.slow),
        pytest.param(GPTQ, (1, 1), 0, id="in-the-first-layer", marks=pytest.mark.slow),
        pytest.param(GPTQ, (0, 2), 1, id="in-the-second-layer"),
        pytest.param(
            {**GPTQ, "quantized_inputs": True},
            (0, 2),
            1,
            id="on-quantized-inputs",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_rank_that_dies_ends_the_others_and_the_same_command_continues(
    alone, ranks, tmp_path, recipe, dies, starts
):
    output = tmp_path / "shards"
    codes = ranks(output, recipe, world=2, dies=dies)
    assert codes[dies[0]] == -signal.SIGKILL and codes[1 - dies[0]] != 0
    assert not list(output.glob("*/DONE.json"))
    # of five sequences every second one, and the canary
    for rank, count in ((0, 4), (1, 3)) if starts else ():
        (kept,) = {
            len(json.loads(path.read_text())["shapes"])
            for path in output.glob(f".rank-00{rank}-of-002.hidden/*.json")
        }
        assert kept == count
    first = [path for path in sorted(output.glob("*/layers/*.json")) if int(path.stem) < starts]
    written = {path: path.stat().st_mtime_ns for path in first}
    assert len(written) == 2 * starts
    ranks(output, recipe, world=2)
    assert {path: path.stat().st_mtime_ns for path in first} == written
    assert not list(output.glob(".*.hidden"))
    assert hashes(together(output, tmp_path / "made")) == hashes(alone(recipe))


def test_a_rank_that_is_finished_helps_the_others(alone, ranks, tmp_path):
    output = tmp_path / "shards"
    ranks(output, GPTQ, world=2)
    (output / "rank-001-of-002" / "DONE.json").unlink()
    (output / "rank-001-of-002" / "layers" / "00001.safetensors").unlink()
    ranks(output, GPTQ, world=2)
    before = {path: path.stat().st_mtime_ns for path in output.rglob("*.safetensors")}
    ranks(output, GPTQ, world=2)  # up to date
    assert before == {path: path.stat().st_mtime_ns for path in before}
    assert hashes(together(output, tmp_path / "made")) == hashes(alone(GPTQ))


def test_cards_that_computed_something_else_are_refused(shards, tmp_path):
    folder = shutil.copytree(shards(2), tmp_path / "shards")
    path = folder / "rank-001-of-002" / "layers" / "00001.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "canary": "0" * 64}))
    done = json.loads((path.parents[1] / "DONE.json").read_text())
    done["files"]["layers/00001.json"] = {
        "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        "bytes": path.stat().st_size,
    }
    (path.parents[1] / "DONE.json").write_text(json.dumps(done))
    with pytest.raises(InputError, match="its card computed 0000000000000000 on the canary"):
        together(folder, tmp_path / "made")
    assert not (tmp_path / "made").exists()


@pytest.mark.slow
def test_a_killed_rank_is_named_and_the_same_command_line_continues(
    model, measurement, alone, tmp_path
):
    output = tmp_path / "shards"
    line = [sys.executable, "-m", "quantflow", *command(model, measurement, output, GPTQ, 2)]
    lock, hidden = output / ".rank-001-of-002.lock", output / ".rank-001-of-002.hidden"
    with subprocess.Popen(
        line, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as process:
        while process.poll() is None and not (hidden / "00000.json").exists():
            time.sleep(0.001)
        os.kill(int(lock.read_text()), signal.SIGKILL)
        began, told = time.monotonic(), process.communicate()[1]
    assert process.returncode == 5 and "rank 1 of 2 was ended by SIGKILL" in told, told
    assert time.monotonic() - began < 20
    again = subprocess.run(line, capture_output=True, text=True, check=False, timeout=300)
    assert again.returncode == 0 and again.stdout.strip() == str(output), again.stderr
    assert hashes(together(output, tmp_path / "made")) == hashes(alone(GPTQ))
