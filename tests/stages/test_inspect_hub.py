"""`inspect org/name`: what headers say of a published folder, without its weights."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from tests.hub_server import COMMIT, Hub, serving
from tests.shared import run

NO_CARDS = "config.json: num_attention_heads: 4 heads over 8"
O_PROJ = "model.layers.*.self_attn.o_proj: 64 columns over {} are {}, groups have 32"
DOWN_PROJ = "model.layers.*.mlp.down_proj: 128 columns over 8 are 16, groups have 32"


@pytest.fixture(scope="module")
def made(llama, tmp_path_factory) -> dict[str, Path]:
    """An artifact in groups of 32, the same as AutoAWQ writes it, and one of rows."""
    folder = tmp_path_factory.mktemp("published")
    words = ("quantize", llama, "-o", folder / "int4", "--scheme", "W4A16_ASYM", "-q")
    assert run(*words, "--algorithm", "rtn", "--group-size", "32") == 0
    assert run("export", folder / "int4", "-o", folder / "awq", "--format", "awq", "-q") == 0
    assert run("quantize", llama, "-o", folder / "fp8", "--scheme", "FP8_DYNAMIC", "-q") == 0
    return {name: folder / name for name in ("int4", "awq", "fp8")}


@pytest.fixture
def hub(tmp_path, monkeypatch) -> Iterator[Hub]:
    with serving(Hub({}), monkeypatch, cache=tmp_path / "cache") as server:
        yield server


@pytest.fixture
def inspected(hub, tmp_path, capsys) -> Callable[..., dict[str, Any]]:
    """What `inspect` says of a copy of a folder on the hub; it fetches no weight."""

    def call(folder: Path, change: Callable[[Path], None] = lambda _: None) -> dict[str, Any]:
        copy = Path(shutil.copytree(folder, tmp_path / "published"))
        change(copy)
        hub.repositories["org/it"] = (copy, False)
        capsys.readouterr()
        assert run("inspect", "org/it", "--json") == 0
        beginning = (copy / "model.safetensors").read_bytes()[:8]
        header = 8 + int.from_bytes(beginning, "little")
        assert hub.served["model.safetensors"] <= max(header, 100_000)
        return json.loads(capsys.readouterr().out)

    return call


def config(**changes: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / "config.json"
        table = json.loads(path.read_text())
        for key, value in changes.items():
            target = table["quantization_config"] if key in table["quantization_config"] else table
            target[key] = value
        path.write_text(json.dumps(table))
        (folder / "quantflow.json").unlink(missing_ok=True)  # nobody's artifact any more

    return change


def test_an_artifact_is_described_as_its_folder_is(inspected, made, capsys):
    there = inspected(made["int4"])
    assert (there.pop("repository"), there.pop("revision")) == ("org/it", COMMIT)
    assert run("inspect", made["int4"], "--cards", "--json") == 0
    assert there == json.loads(capsys.readouterr().out)
    assert there["kind"] == "artifact" and there["faults"] == []


def test_groups_say_which_numbers_of_cards_divide_them(inspected, made):
    found = inspected(made["awq"])
    assert found["quant_method"] == "awq" and found["verified"] == 0
    assert found["quantized"][0]["group_size"] == 32
    assert found["tensor_parallel"] == {
        "1": [],
        "2": [],
        "4": [O_PROJ.format(4, 16)],
        "8": [NO_CARDS, O_PROJ.format(8, 8), DOWN_PROJ],
    }
    assert found["runs_on"] == {
        "quantflow": "yes",
        "vllm, W4A16_ASYM": "NVIDIA from Ampere (8.0) on, x86 CPUs",
    }


def test_float8_names_the_cards_that_multiply_it(inspected, made):
    found = inspected(made["fp8"])
    assert found["runs_on"]["vllm, FP8_DYNAMIC"].startswith("NVIDIA from Ada (8.9) on, AMD")
    assert found["tensor_parallel"]["4"] == []


def test_layers_for_speculative_decoding_that_are_missing_are_said(inspected, made):
    found = inspected(made["fp8"], config(num_nextn_predict_layers=1))
    assert found["faults"] == [
        "layers for speculative decoding (MTP) are missing: config.json: num_nextn_predict_layers "
        "1, no tensor is of them; an engine runs without it alone"
    ]


def test_a_matrix_that_no_list_names_is_said(inspected, made):
    assert inspected(made["awq"], config(modules_to_not_convert=[]))["faults"] == [
        "lm_head (1): not quantized and not in modules_to_not_convert; vLLM makes quantized "
        "parameters for it"
    ]


def test_part_of_a_name_is_enough_for_awq(inspected, made):
    assert inspected(made["awq"], config(modules_to_not_convert=["head"]))["faults"] == []


def test_a_linear_that_is_quantized_and_in_the_list_is_said(inspected, made):
    listed = ["lm_head", "layers.1.mlp.up_proj"]
    assert inspected(made["awq"], config(modules_to_not_convert=listed))["faults"] == [
        "model.layers.*.mlp.up_proj (1): quantized, and modules_to_not_convert names it; vLLM "
        "takes it for floats"
    ]


def test_a_list_that_makes_a_folder_unreadable_is_named_as_the_cause(hub, made, tmp_path, capsys):
    copy = Path(shutil.copytree(made["fp8"], tmp_path / "published"))
    config(ignore=[])(copy)
    hub.repositories["org/it"] = (copy, False)
    for name in ("org/it", copy):
        assert run("inspect", name) == 3
        told = capsys.readouterr().err
        assert (
            "lm_head.weight_scale" in told and "lm_head (1): not quantized and not in ign" in told
        )
        assert "mend the list in config.json" in told


def test_a_model_that_is_not_quantized_says_its_cards(inspected, llama):
    found = inspected(llama)
    assert found["kind"] == "checkpoint" and found["runs_on"] == {"quantflow": "yes"}
    assert found["tensor_parallel"] == {"1": [], "2": [], "4": [], "8": [NO_CARDS]}


def test_damage_that_shows_in_headers_is_refused_with_the_tensor(hub, made, tmp_path, capsys):
    copy = Path(shutil.copytree(made["awq"], tmp_path / "damaged"))
    tensors = load_file(copy / "model.safetensors")
    tensors.pop("model.layers.1.mlp.up_proj.scales")
    save_file(tensors, copy / "model.safetensors", {"format": "pt"})
    hub.repositories["org/it"] = (copy, False)
    assert run("inspect", "org/it") == 3
    assert "model.layers.1.mlp.up_proj" in capsys.readouterr().err


def test_people_read_words(hub, made, capsys):
    hub.repositories["org/it"] = (made["awq"], False)
    assert run("inspect", "org/it") == 0
    out, err = capsys.readouterr()
    assert "of 1 files of weights the headers are read" in err
    assert "  2: every head, row and group divides" in out and "faults: none seen" in out
    assert f"  4: {O_PROJ.format(4, 16)}" in out


def test_a_name_that_is_not_there_and_backends_of_one_are_refused(hub, made, capsys):
    assert run("inspect", "org/nobody") == 3
    assert "no such model on" in capsys.readouterr().err
    assert run("inspect", "org/nobody", "--backends") == 2


def test_a_gguf_file_of_the_hub_is_read_whole(hub, llama, tmp_path, capsys):
    words = ("export", llama, "-o", tmp_path / "gguf", "--format", "gguf", "--dtype", "bf16", "-q")
    assert run(*words) == 0
    hub.repositories["org/files"] = (tmp_path / "gguf", False)
    capsys.readouterr()
    assert run("inspect", "org/files/model-bf16.gguf", "--json") == 0
    there = capsys.readouterr().out
    assert run("inspect", tmp_path / "gguf" / "model-bf16.gguf", "--json") == 0
    assert there == capsys.readouterr().out
    assert run("inspect", "org/files") == 3
    assert "name one: org/files/model-bf16.gguf" in capsys.readouterr().err
