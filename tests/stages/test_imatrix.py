"""Importance matrices from our statistics, and rounding by one in the place of a measurement."""

import shutil

import pytest
import torch
from gguf import GGUFReader
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from quantflow.formats.llama_cpp.imatrix import (
    Entry,
    ImportanceMatrix,
    read_imatrix,
    write_gguf,
    write_older,
)
from quantflow.runtime.artifact import open_artifact
from tests.gguf_mixtures import write_mixture
from tests.shared import run


@pytest.fixture(scope="module")
def measured(llama, text_files, tmp_path_factory):
    """A measurement of the mean squares, and the exported matrix."""
    folder = tmp_path_factory.mktemp("imatrix")
    assert measure(llama, folder / "m", text_files) == 0
    assert export(folder / "m", folder / "i", llama) == 0
    return folder


def measure(model, output, text_files, stats="mean_square"):
    text = ("--calibration", text_files["calibration"], "--samples", 6, "--sequence-length", 48)
    return run("measure", model, "-o", output, *text, "--stats", stats)


def export(source, output, model):
    return run("export", source, "-o", output, "--format", "imatrix", "--model", model)


def quantize(model, output, imatrix, *more, scheme="Q4_0"):
    return run("quantize", model, "-o", output, "--scheme", scheme, "--imatrix", imatrix, *more)


def sequences(measurement):
    (path,) = measurement.rglob("calibration.safetensors")
    with safe_open(path, "pt") as file:
        return file.get_tensor("tokens").split(file.get_tensor("lengths").tolist())


def squares_by_transformers(folder, names, rows):
    """The mean square of the inputs of some linears, by hooks on transformers' own modules."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    sums = dict.fromkeys(names, 0.0)

    def hook(name):
        def add(_module, arguments):
            sums[name] = sums[name] + arguments[0].double().square().flatten(0, -2).sum(dim=0)

        return add

    for name in names:
        model.get_submodule(name).register_forward_pre_hook(hook(name))
    with torch.no_grad():
        for row in rows:
            model(row[None])
    count = sum(map(len, rows))
    return {name: (total / count).float() for name, total in sums.items()}


def test_the_matrix_has_the_mean_squares_that_transformers_modules_read(measured, llama):
    found = read_imatrix(measured / "i" / "imatrix.gguf")
    names = {
        "blk.0.attn_k.weight": "model.layers.0.self_attn.k_proj",
        "blk.1.attn_output.weight": "model.layers.1.self_attn.o_proj",
        "blk.1.ffn_down.weight": "model.layers.1.mlp.down_proj",
    }
    expected = squares_by_transformers(llama, list(names.values()), sequences(measured / "m"))
    for name, module in names.items():
        torch.testing.assert_close(
            found.entries[name].mean_squares(), expected[module], rtol=1e-4, atol=1e-7
        )
    assert (found.chunks, found.chunk_size) == (6, 48)
    layers = {name.split(".")[1] for name in found.entries}
    assert len(found.entries) == 7 * len(layers)


def test_both_forms_have_the_same_means(measured):
    forms = [
        read_imatrix(measured / "i" / name).entries for name in ("imatrix.gguf", "imatrix.dat")
    ]
    assert forms[0].keys() == forms[1].keys()
    for name, entry in forms[0].items():
        torch.testing.assert_close(entry.mean_squares(), forms[1][name].mean_squares())


def test_hessians_give_the_same_matrix(measured, llama, text_files, tmp_path):
    assert measure(llama, tmp_path / "m", text_files, "hessian") == 0
    assert export(tmp_path / "m", tmp_path / "i", llama) == 0
    one, other = (
        read_imatrix(folder / "i" / "imatrix.gguf").entries for folder in (measured, tmp_path)
    )
    for name, entry in one.items():
        torch.testing.assert_close(
            other[name].mean_squares(), entry.mean_squares(), rtol=1e-5, atol=0
        )


@pytest.mark.parametrize("form", ["imatrix.gguf", "imatrix.dat"])
def test_rounding_by_a_matrix_loses_less_of_the_output_than_rounding_without(
    measured, llama, tmp_path, form
):
    path = measured / "i" / form
    assert quantize(llama, tmp_path / "with", path) == 0
    plain = ("quantize", llama, "-o", tmp_path / "without", "--scheme", "Q4_0")
    assert run(*plain, "--algorithm", "rtn_mse") == 0
    source = load_file(llama / "model.safetensors")
    entries = read_imatrix(path).entries
    losses = {}
    for name in ("with", "without"):
        artifact = open_artifact(tmp_path / name)
        losses[name] = 0.0
        for entry, part in (("attn_v", "self_attn.v_proj"), ("ffn_down", "mlp.down_proj")):
            linear = f"model.layers.1.{part}"
            error = artifact.decode(linear).weight.dequantize() - source[f"{linear}.weight"].float()
            importance = entries[f"blk.1.{entry}.weight"].mean_squares()
            losses[name] += float((error.square() * importance).sum())
    assert losses["with"] < 0.97 * losses["without"], losses
    assert artifact.manifest["recipe"]["algorithm"] == "rtn_mse"


def test_the_same_matrix_under_another_name_is_up_to_date_and_another_is_not(
    measured, llama, tmp_path, capsys
):
    path = shutil.copy(measured / "i" / "imatrix.gguf", tmp_path / "i.gguf")
    assert quantize(llama, tmp_path / "q", path, "--no-export") == 0
    assert quantize(llama, tmp_path / "q", path, "--no-export") == 0
    assert "up to date" in capsys.readouterr().err
    matrix = read_imatrix(path)
    entries = {
        name: Entry(sums=entry.sums.flip(0), counts=entry.counts)
        for name, entry in matrix.entries.items()
    }
    write_gguf(path, ImportanceMatrix(entries=entries))
    assert quantize(llama, tmp_path / "q", path, "--no-export") != 0
    assert "--force" in capsys.readouterr().err


def test_experts_have_a_matrix_each_and_an_expert_without_tokens_counts_alike(
    text_files, tmp_path, capsys
):
    model = write_mixture(tmp_path / "qwen3_moe", "qwen3_moe")
    assert measure(model, tmp_path / "m", text_files) == 0
    assert export(tmp_path / "m", tmp_path / "i", model) == 0
    entry = read_imatrix(tmp_path / "i" / "imatrix.gguf").entries["blk.1.ffn_gate_exps.weight"]
    tokens = sum(map(len, sequences(tmp_path / "m")))
    assert entry.counts.shape == (6,) and int(entry.counts.sum()) == 2 * tokens
    assert entry.sums.shape == (6 * 64,)
    tensors = {t.name: t for t in GGUFReader(tmp_path / "i" / "imatrix.gguf").tensors}
    assert tensors["blk.1.ffn_down_exps.weight.in_sum2"].data.shape == (6, 32)
    assert "blk.1.ffn_gate_inp.weight.in_sum2" not in tensors
    assert quantize(model, tmp_path / "q", tmp_path / "i" / "imatrix.gguf") == 0
    # an expert whose importance is of one input alone is exact where others are not
    entries = dict(read_imatrix(tmp_path / "i" / "imatrix.gguf").entries)
    sums = torch.full((6, 64), 1e-4)
    sums[3, :] = 0.0
    sums[3, 5] = 1e4
    entries["blk.1.ffn_gate_exps.weight"] = Entry(sums=sums.flatten(), counts=torch.ones(6))
    write_older(tmp_path / "i.dat", ImportanceMatrix(entries=entries, chunks=1))
    assert quantize(model, tmp_path / "one", tmp_path / "i.dat", scheme="IQ4_NL") == 0
    artifact = open_artifact(tmp_path / "one")
    source = load_file(model / "model.safetensors")

    def error(expert):
        name = f"model.layers.1.mlp.experts.{expert}.gate_proj"
        weight = source[f"{name}.weight"].float()
        return float((artifact.decode(name).weight.dequantize() - weight)[:, 5].norm())

    assert error(3) < 0.2 * error(2)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--algorithm", "gptq"), "with gptq, which does not read it"),
        (("--algorithm", "rtn"), "with rtn, which does not read it"),
        (("--kv-cache", "FP8"), "what needs one"),
    ],
)
def test_what_does_not_read_a_matrix_refuses_it(measured, llama, tmp_path, capsys, more, message):
    path = measured / "i" / "imatrix.gguf"
    assert quantize(llama, tmp_path / "q", path, "--no-export", *more) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "q" / "layers").exists()


def test_a_measurement_beside_a_matrix_is_refused(measured, llama, tmp_path, capsys):
    path, more = measured / "i" / "imatrix.gguf", ("--measurement", measured / "m")
    assert quantize(llama, tmp_path / "q", path, *more) == 2
    assert "beside a measurement" in capsys.readouterr().err


def changed(path, change):
    matrix = read_imatrix(path)
    return ImportanceMatrix(entries=change(dict(matrix.entries)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda e: {**e, "blk.9.attn_q.weight": e["blk.0.attn_q.weight"]},
            "an entry of blk.9.attn_q",
        ),
        (lambda e: {k: v for k, v in e.items() if "ffn_up" not in k}, "no entry of blk.0.ffn_up"),
        (
            lambda e: {**e, "blk.0.ffn_up.weight": Entry(sums=torch.ones(3), counts=torch.ones(1))},
            "blk.0.ffn_up.weight has 3 values, the model's tensor reads 1 x 64",
        ),
    ],
)
def test_a_matrix_of_another_model_is_refused_before_a_layer_is_written(
    measured, llama, tmp_path, capsys, change, message
):
    write_gguf(tmp_path / "i.gguf", changed(measured / "i" / "imatrix.gguf", change))
    assert quantize(llama, tmp_path / "q", tmp_path / "i.gguf", "--no-export") == 3
    assert message in capsys.readouterr().err
    assert not (tmp_path / "q" / "layers").exists()


def test_what_cannot_be_exported_is_refused_by_name(measured, llama, text_files, tmp_path, capsys):
    assert run("export", measured / "m", "-o", tmp_path / "i", "--format", "imatrix") == 2
    assert "give --model" in capsys.readouterr().err
    other = write_mixture(tmp_path / "other", "mixtral")
    assert export(measured / "m", tmp_path / "i", other) == 3
    assert "give the model that was measured" in capsys.readouterr().err
    assert measure(llama, tmp_path / "amax", text_files, "amax") == 0
    assert export(tmp_path / "amax", tmp_path / "i", llama) == 3
    assert "measure with --stats mean_square" in capsys.readouterr().err
