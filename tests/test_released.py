"""Released repositories of the benchmark: their facts, their maker, and the table."""

import json
import shutil
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
import torch

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def part(monkeypatch: pytest.MonkeyPatch):
    """What imports a module as the benchmark's programs see it."""
    monkeypatch.syspath_prepend(str(BENCHMARKS / "peers"))
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return import_module


@pytest.fixture
def models(part):
    return part("_released_models")


def test_every_entry_says_where_its_facts_come_from(models):
    found = models.entries()
    assert len(found) >= 60 and len({entry["family"] for entry in found.values()}) >= 40
    for name, entry in found.items():
        assert entry["sources"], name
        assert all(
            each["repository"] and each["path"] and each["commit"] != "main" and each["what"]
            for each in entry["sources"]
        ), name
        assert entry["names"] == sorted(set(entry["names"])), name
        files = list(map(str, entry["files"]))
        assert len(set(files)) == len(files), name


def test_numbers_between_dots_of_a_name_become_one_pattern(models):
    assert models.normal("h.12.attn.bias") == "h.{}.attn.bias"
    assert models.normal("0.weight") == "{}.weight"
    assert (
        models.normal("model.layers.3.experts.7.w1.weight")
        == "model.layers.{}.experts.{}.w1.weight"
    )
    assert models.normal("visual.fc1.conv1d.0") == "visual.fc1.conv1d.{}"


def test_gpt2_is_written_as_it_was_released(models, tmp_path):
    """No prefix, masks beside the weights, no head, and pickled weights beside safetensors."""
    entry = models.entries(["gpt2"])["gpt2"]
    models.write_repository(entry, tmp_path / "gpt2")
    names = set(models.load_file(tmp_path / "gpt2" / "model.safetensors"))
    assert {"wte.weight", "h.0.attn.bias", "h.1.attn.bias", "ln_f.bias"} < names
    assert "lm_head.weight" not in names and not any(n.startswith("transformer.") for n in names)
    assert (tmp_path / "gpt2" / "onnx" / "decoder_model.onnx").read_text().startswith("version ")
    assert set(torch.load(tmp_path / "gpt2" / "pytorch_model.bin")) == names


@pytest.mark.slow
def test_every_entry_makes_the_names_that_were_released(models, tmp_path):
    for name, entry in models.entries().items():
        models.write_repository(entry, tmp_path / name)
        shutil.rmtree(tmp_path / name)


def test_an_entry_whose_tensors_are_called_otherwise_is_refused(models, tmp_path):
    entry = models.entries(["gpt2"])["gpt2"]
    other = {**entry, "names": [*entry["names"][1:], "h.{}.attn.masked_bias"]}
    with pytest.raises(models.Untrue, match=r"made but not released: \['h.\{\}.attn.bias'\]; "):
        models.write_repository(other, tmp_path / "gpt2")


def test_an_index_leads_to_every_tensor_of_shards(models, tmp_path):
    entry = models.entries(["llama-2-7b"])["llama-2-7b"]
    models.write_repository(entry, tmp_path / "llama")
    index = json.loads((tmp_path / "llama" / "model.safetensors.index.json").read_text())
    files = {
        name: file.name
        for file in (tmp_path / "llama").glob("*.safetensors")
        for name in models.load_file(file)
    }
    assert index["weight_map"] == files and len(set(files.values())) == 2


@pytest.mark.parametrize("layout", ["gptq", "awq"])
def test_integer_layouts_hold_the_weight_to_half_a_step(part, layout):
    """Read by the readers of the peers' folders, which know nothing of this writer."""
    layouts, shared = part("_released_layouts"), part("_shared")
    weight = torch.randn(16, 64, generator=torch.Generator().manual_seed(0))
    told = layouts.LAYOUTS[layout]({"x.weight": weight}, {"linears": "weight"})
    tensors = {name: value.numpy() for name, value in told.items()}
    if layout == "gptq":
        found = shared.gptq_weight(tensors, "x", bits=4, minus_one=True)
    else:
        found = shared.awq_weight(tensors, "x")
    step = np.abs(weight.numpy()).reshape(16, 2, 32).max(-1).repeat(32, 1) / 7
    assert (np.abs(found - weight.numpy()) <= 0.51 * step + 1e-6).all()


def test_float8_blocks_and_their_last_ragged_one_hold_the_weight(part):
    layouts = part("_released_layouts")
    weight = torch.randn(200, 130, generator=torch.Generator().manual_seed(0))
    told = layouts.LAYOUTS["fp8_block"]({"x.weight": weight}, {"linears": "weight"})
    scale = told["x.weight_scale_inv"]
    assert scale.shape == (2, 2) and told["x.weight"].dtype == torch.float8_e4m3fn
    spread = scale.repeat_interleave(128, 0)[:200].repeat_interleave(128, 1)[:, :130]
    error = (told["x.weight"].float() * spread - weight).abs()
    assert (error <= weight.abs() / 16 + spread * 2**-10).all()


def test_four_bit_floats_decode_to_the_nearest_value(part):
    """Two codes in a byte, the first in the low half; 16 of them share a scale."""
    layouts = part("_released_layouts")
    weight = torch.tensor([[0.5, -1.0, 6.0, 3.0, -0.4, 0.0, 2.0, 1.5] * 2])
    told = layouts.LAYOUTS["nvfp4"]({"x.weight": weight}, {"linears": "weight"})
    codes = torch.stack([told["x.weight"] & 15, told["x.weight"] >> 4], -1).flatten()
    values = layouts.E2M1[(codes & 7).long()] * (1 - 2 * (codes >> 3).float())
    scale = float(told["x.weight_scale"].float()[0, 0] * told["x.weight_scale_2"])
    assert scale == pytest.approx(1.0, rel=1e-6)
    expected = [0.5, -1.0, 6.0, 3.0, -0.5, 0.0, 2.0, 1.5] * 2
    assert (values * scale).tolist() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({}, None),
        ({"missing": ["lm_head.weight"]}, "1 keys missing: lm_head.weight"),
        ({"unexpected": ["mtp.fc.weight"]}, None),
        ({"unexpected": ["mtp.fc.weight_packed"]}, None),
        ({"unexpected": ["x.weight"]}, "1 keys unexpected: x.weight"),
    ],
)
def test_keys_of_an_artifact_are_compared_with_those_of_its_source(part, change, told):
    stock = part("_released_stock")
    source = {"missing": [], "unexpected": ["mtp.fc.weight"], "mismatched": []}
    assert stock.difference({**source, **change}, source) == told


def test_logits_are_far_by_their_share_of_the_norm(part):
    far = part("released")._far
    assert far([[1.0, 0.1]], [[1.0, 0.0]], 0.3) is None
    assert far([[-1.0, 0.0]], [[1.0, 0.0]], 0.3) == "its logits are off by 2.00 of the norm"
    assert far([[1.0]], [[1.0, 0.0]], 0.3) == "its logits have another shape, [1, 1] and [1, 2],"


def test_an_artifact_that_ours_refuses_ends_with_1_and_other_failures_with_0(
    part, tmp_path, capsys
):
    released = part("released")
    rows = {
        "gpt2": {"made": None, "source": None, "W4A16 quantize": "exit 3: no"},
        "qwen-7b-chat": {"made": None, "refused": None},
    }
    results = tmp_path / "r.json"
    results.write_text(json.dumps(rows))
    words = ["--table", "--results", str(results)]
    assert released.main(words) == 0
    told = capsys.readouterr().out
    assert "2 repositories of 2 families; 1 of 2 (50%) pass every step." in told
    assert "- source: 1 of 1 (100%)" in told and "- inspect: 0 of 1 (0%)" in told
    assert "1. openai-community/gpt2: exit 3: no" in told
    rows["gpt2"] |= {"W4A16 export": None, "W4A16 generate": "exit 6: no"}
    results.write_text(json.dumps(rows))
    assert released.main(words) == 1
    rows["gpt2"] = {"made": "made but not released: x"}
    results.write_text(json.dumps(rows))
    assert released.main(words) == 1


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--only", "nothing-like-it"], "--only nothing-like-it: no name of released/ contains"),
        (["--only", "qwen-7b-chat", "--work", "."], "qwen-7b-chat: exists already; delete it"),
    ],
)
def test_what_cannot_be_run_is_said_before_anything_is(
    part, tmp_path, capsys, monkeypatch, words, told
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "qwen-7b-chat").mkdir()
    with pytest.raises(SystemExit, match="2"):
        part("released").main(words)
    assert told in capsys.readouterr().err


def test_the_page_shows_the_results_of_the_file(part):
    released = part("released")
    rows = json.loads((BENCHMARKS / "released.json").read_text())
    chosen = released.entries()
    assert sorted(rows) == sorted(chosen)
    text = released.page_text(chosen, {name: rows[name] for name in chosen})
    assert f"{released.BEGIN}\n{text}\n{released.END}" in released.PAGE.read_text()
