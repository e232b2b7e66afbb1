"""The same recipe gives the same digest, wherever and on however many threads.

Another recipe or seed gives another.

The model of the test of the threads is wide enough that torch splits sums and Cholesky factors
between two threads, which changes their last bits: with the one-thread rule of the stages taken
out, it fails.
"""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from quantflow.measuring import measure
from quantflow.measuring.job import MeasureJob
from quantflow.planning.recipe import Calibration, Quantize, recipe_from
from quantflow.quantizing import quantize
from quantflow.quantizing.job import QuantizeJob
from quantflow.reporting.progress_line import ProgressLine
from quantflow.stages import run

QUIET = ProgressLine(quiet=True)


@pytest.fixture
def recipe(llama: Path, text_files: dict[str, Path], tmp_path: Path) -> dict[str, Any]:
    """One INT4 artifact of the tiny Llama."""
    gate = tmp_path / "gate.json"
    gate.write_text(
        json.dumps(
            {
                "thresholds": {
                    "ppl_ratio": 9e9,
                    "mean_kld": 9e9,
                    "kld_p999": 9e9,
                    "top1_agreement": 0.0,
                }
            }
        )
    )
    return {
        "model": str(llama),
        "calibration": {
            "source": str(text_files["calibration"]),
            "samples": 6,
            "sequence_length": 48,
        },
        "quantize": [{"name": "int4", "scheme": "W4A16", "algorithm": "gptq", "group_size": 32}],
        "validate": {
            "text": str(text_files["heldout"]),
            "tokens": 256,
            "sequence_length": 64,
            "gate": str(gate),
        },
    }


def run_recipe(recipe: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return the manifest of the artifact."""
    run.run(run.RunJob(recipe=recipe_from(recipe), name="test", folder=folder), QUIET)
    manifest: dict[str, Any] = json.loads(
        (folder / "4-export" / "int4" / "quantflow.json").read_text()
    )
    return manifest


@pytest.mark.slow
def test_the_digest_depends_on_the_recipe_and_the_seed_and_on_no_folder(
    recipe: dict[str, Any], tmp_path: Path
) -> None:
    first = run_recipe(recipe, tmp_path / "first")
    second = run_recipe(recipe, tmp_path / "elsewhere" / "second")
    assert second == first
    report = "5-validate/int4/validation.json"
    assert (tmp_path / "first" / report).read_bytes() == (
        tmp_path / "elsewhere" / "second" / report
    ).read_bytes()

    # over a finished run, which must not count as up to date
    seeded = run_recipe({**recipe, "seed": 1}, tmp_path / "first")
    assert seeded["digest"] != first["digest"]
    # other calibration text was chosen
    assert seeded["files"]["model.safetensors"] != first["files"]["model.safetensors"]

    entry = {**recipe["quantize"][0], "group_size": 64}
    coarser = run_recipe({**recipe, "quantize": [entry]}, tmp_path / "elsewhere" / "second")
    assert coarser["digest"] not in (first["digest"], seeded["digest"])


@pytest.fixture(scope="module")
def wide_llama(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One layer, 512 wide."""
    folder = tmp_path_factory.mktemp("wide") / "model"
    torch.manual_seed(2)
    config = LlamaConfig(
        vocab_size=320,
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=1,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=128,
        bos_token_id=0,
        eos_token_id=1,
    )
    AutoModelForCausalLM.from_config(config).to(torch.bfloat16).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(llama / name, folder / name)
    return folder


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def test_the_number_of_threads_changes_no_byte(
    wide_llama: Path, text_files: dict[str, Path], threads: Callable[[int], None], tmp_path: Path
) -> None:
    found = []
    for count in (1, 2, 8):
        threads(count)
        folder = tmp_path / str(count)
        calibration = Calibration(
            source=str(text_files["calibration"]), samples=6, sequence_length=128, pack=True
        )
        job = MeasureJob(model=wide_llama, output=folder / "measured", calibration=calibration)
        measured = measure.run(job, QUIET)
        entry = Quantize(name="x", scheme="W4A16", algorithm="gptq", group_size=128)
        quantize.run(
            QuantizeJob(
                model=wide_llama, output=folder / "quantized", entry=entry, measurement=measured
            ),
            QUIET,
        )
        assert torch.get_num_threads() == count  # given back as it was
        names = [
            "measured/rank-000-of-001/statistics.safetensors",
            "quantized/layers/00000.safetensors",
        ]
        names += ["quantized/layers/00000.json", "quantized/canary.safetensors"]
        found.append([(folder / name).read_bytes() for name in names])
    assert found[0] == found[1] == found[2]
