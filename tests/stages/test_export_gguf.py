"""Export for llama.cpp.

Every weight is in its place, bytes repeat, the proof notices changes, and some models are refused.
"""

import json
import os
import shutil
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGUFReader
from gguf.quants import dequantize
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from quantflow.exporting import export as export_stage
from quantflow.exporting import gguf_export
from quantflow.exporting.gguf_source import open_weights
from quantflow.formats.llama_cpp import gguf
from quantflow.formats.llama_cpp.file_plan import planned
from quantflow.models.reading import read_tensor
from quantflow.progress import SILENT
from quantflow.runtime.artifact import open_artifact
from quantflow.runtime.load import load
from quantflow.sources.gguf_import import import_gguf
from tests.shared import run, slow

NAMES = {  # of a layer, beside those that are permuted
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
YARN = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64}


def export(source: Path, output: Path, *more: str) -> Path:
    assert run("export", source, "-o", output, "--format", "gguf", *more) == 0
    (path,) = output.glob("*.gguf")
    return path


def tensors_of(path: Path) -> dict[str, torch.Tensor]:
    return {name: read_tensor(path, info) for name, info in gguf.read_header(path).tensors.items()}


def interleaved(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Return rows with the halves of each head woven together, one row at a time."""
    size = len(weight) // heads
    return torch.stack(
        [
            weight[head * size + half * (size // 2) + i]
            for head in range(heads)
            for i in range(size // 2)
            for half in range(2)
        ]
    )


@pytest.fixture
def copy(tmp_path, llama) -> Path:
    return Path(shutil.copytree(llama, tmp_path / "model"))


@pytest.mark.parametrize("dtype", ["bf16", "f16", "f32"])
def test_every_weight_of_a_llama_is_in_its_place(llama, tmp_path, dtype):
    path = export(llama, tmp_path / "o", "--dtype", dtype)
    assert path.name == f"model-{dtype}.gguf"
    found, source = tensors_of(path), load_file(llama / "model.safetensors")
    matrix = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}[dtype]
    expected = {"token_embd.weight": "model.embed_tokens.weight", "output.weight": "lm_head.weight"}
    expected |= {"output_norm.weight": "model.norm.weight"}
    for i in range(2):
        expected |= {
            f"blk.{i}.{a}.weight": f"model.layers.{i}.{b}.weight" for a, b in NAMES.items()
        }
    values = {name: source[theirs] for name, theirs in expected.items()}
    for i in range(2):
        attention = f"model.layers.{i}.self_attn"
        values[f"blk.{i}.attn_q.weight"] = interleaved(source[f"{attention}.q_proj.weight"], 4)
        values[f"blk.{i}.attn_k.weight"] = interleaved(source[f"{attention}.k_proj.weight"], 2)
    assert found.keys() == values.keys()
    for name, value in values.items():
        wanted = torch.float32 if value.ndim == 1 else matrix
        assert found[name].dtype == wanted and torch.equal(found[name], value.to(wanted)), name


def test_the_dtype_is_the_models_where_none_is_given(llama, tmp_path):
    path = export(llama, tmp_path / "o")
    assert path.name == "model-bf16.gguf"
    assert gguf.read_header(path).metadata["general.file_type"] == ("u32", 32)


@pytest.mark.parametrize("family", ["mistral", "qwen2", "qwen3", "gpt_neox"])
def test_every_tensor_of_each_family_is_written(family_model, tmp_path, family):
    model = family_model(family)
    path = export(model, tmp_path / "o", "--dtype", "f32")
    found, source = tensors_of(path), load_file(model / "model.safetensors")
    assert sum(t.numel() for t in found.values()) == sum(t.numel() for t in source.values())
    total = sum(t.double().sum().item() for t in source.values())  # rows change places, sums do not
    assert sum(t.double().sum().item() for t in found.values()) == pytest.approx(total, abs=1e-9)
    # transformers splits text its own way for Qwen2, whatever the pre_tokenizer of tokenizer.json
    # says
    expected = "qwen2" if family == "qwen2" else "gpt-2"
    assert gguf.read_header(path).metadata["tokenizer.ggml.pre"] == ("string", expected)


def test_queries_keys_and_values_of_a_neox_are_one_after_the_other(family_model, tmp_path):
    model = family_model("gpt_neox")
    found, source = (
        tensors_of(export(model, tmp_path / "o", "--dtype", "f32")),
        load_file(model / "model.safetensors"),
    )
    for part in ("weight", "bias"):
        fused = source[f"gpt_neox.layers.1.attention.query_key_value.{part}"].float()
        heads = fused.split(48)  # four heads, 16 rows each of q, k and v
        expected = torch.cat([head[16 * i : 16 * (i + 1)] for i in range(3) for head in heads])
        assert torch.equal(found[f"blk.1.attn_qkv.{part}"], expected)


def test_an_artifact_is_written_dequantized(llama, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(export_stage, "_prove", lambda *_: {})
    assert (
        run("quantize", "--no-export", llama, "-o", tmp_path / "q", "--scheme", "FP8_DYNAMIC") == 0
    )
    assert run("export", tmp_path / "q", "-o", tmp_path / "a") == 0
    found = tensors_of(export(tmp_path / "a", tmp_path / "o", "--dtype", "f32"))
    assert "14 linears quantize their inputs too" in capsys.readouterr().err
    artifact = open_artifact(tmp_path / "a")
    up = artifact.decode("model.layers.1.mlp.up_proj").weight
    assert torch.equal(found["blk.1.ffn_up.weight"], up.scale * up.qvalue.float())
    keys = artifact.decode("model.layers.1.self_attn.k_proj").weight
    assert torch.equal(
        found["blk.1.attn_k.weight"], interleaved(keys.scale * keys.qvalue.float(), 2)
    )
    source = load_file(llama / "model.safetensors")
    assert torch.equal(found["token_embd.weight"], source["model.embed_tokens.weight"].float())
    assert not torch.equal(
        found["blk.1.ffn_up.weight"], source["model.layers.1.mlp.up_proj.weight"].float()
    )


def blocks_of(path: Path) -> dict[str, tuple[str, np.ndarray]]:
    """Return every tensor of a file by gguf's own reader: its type, and its real values."""
    return {
        found.name: (
            found.tensor_type.name,
            dequantize(found.data, found.tensor_type).reshape(found.shape[::-1]),
        )
        for found in GGUFReader(path).tensors
    }


@pytest.mark.parametrize(
    ("scheme", "head"), [("Q4_0", "Q8_0"), ("IQ4_NL", "Q8_0"), ("Q8_0", "Q8_0")]
)
def test_an_artifact_of_llama_cpps_types_keeps_its_values(
    llama, tmp_path, monkeypatch, capsys, scheme, head
):
    monkeypatch.setattr(export_stage, "_prove", lambda *_: {})
    assert (
        run(
            "quantize",
            "--no-export",
            llama,
            "-o",
            tmp_path / "q",
            "--scheme",
            scheme,
            "--algorithm",
            "rtn_mse",
        )
        == 0
    )
    assert run("export", tmp_path / "q", "-o", tmp_path / "a") == 0
    path = export(tmp_path / "a", tmp_path / "o")
    assert path.name == f"model-{scheme.lower()}.gguf"
    found, artifact = blocks_of(path), open_artifact(tmp_path / "a")
    assert found["token_embd.weight"][0] == scheme and found["output.weight"][0] == head
    assert (
        f"15 matrices in {scheme}, 1 matrices in {head}" in capsys.readouterr().err
        or scheme == head
    )
    for mine, theirs in NAMES.items():
        if not theirs.endswith("layernorm"):
            weight = artifact.decode(f"model.layers.1.{theirs}").weight
            kind, values = found[f"blk.1.{mine}.weight"]
            assert kind == scheme and np.array_equal(values, weight.dequantize().numpy()), theirs
    for mine, theirs, heads in (("attn_q", "q_proj", 4), ("attn_k", "k_proj", 2)):
        weight = artifact.decode(f"model.layers.0.self_attn.{theirs}").weight.dequantize()
        assert np.array_equal(found[f"blk.0.{mine}.weight"][1], interleaved(weight, heads).numpy())
    embedding = load_file(llama / "model.safetensors")["model.embed_tokens.weight"].float().numpy()
    error = (
        np.square(found["token_embd.weight"][1] - embedding).mean() / np.square(embedding).mean()
    )
    assert error < (1e-4 if scheme == "Q8_0" else 0.01)
    header = gguf.read_header(path, types=gguf.WRITTEN)
    assert header.metadata["general.file_type"] == (
        "u32",
        {"Q4_0": 2, "IQ4_NL": 25, "Q8_0": 7}[scheme],
    )
    assert header.metadata["general.quantization_version"] == ("u32", 2)
    plain = tensors_of(export(tmp_path / "a", tmp_path / "f32", "--dtype", "f32"))
    assert np.array_equal(plain["blk.1.attn_v.weight"].numpy(), found["blk.1.attn_v.weight"][1])


@pytest.fixture(scope="module")
def wide(tmp_path_factory, llama) -> Path:
    """A Llama of eight layers whose rows are whole blocks of 256, with the other's tokenizer."""
    folder = tmp_path_factory.mktemp("models") / "wide"
    shape = {
        "hidden_size": 256,
        "intermediate_size": 256,
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
    }
    torch.manual_seed(1)
    config = LlamaConfig(
        **shape, vocab_size=320, num_key_value_heads=2, bos_token_id=0, eos_token_id=1
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(llama / name, folder)
    return folder


@pytest.mark.parametrize(
    ("scheme", "usual", "values", "down", "output", "number"),
    [  # of eight layers those with more bits are 0, 3, 6 and 7
        slow(("Q3_K_M", "Q3_K", ["Q5_K"] * 2 + ["Q4_K"] * 6, ["Q4_K"] * 8, "Q4_K", 12)),
        (
            "Q4_K_M",
            "Q4_K",
            *[["Q6_K", "Q4_K", "Q4_K", "Q6_K", "Q4_K", "Q4_K", "Q6_K", "Q6_K"]] * 2,
            "Q4_K",
            15,
        ),
        slow(
            (
                "Q5_K_M",
                "Q5_K",
                *[["Q6_K", "Q5_K", "Q5_K", "Q6_K", "Q5_K", "Q5_K", "Q6_K", "Q6_K"]] * 2,
                "Q5_K",
                17,
            )
        ),
        slow(("Q4_K_S", "Q4_K", ["Q5_K"] * 4 + ["Q4_K"] * 4, ["Q5_K"] + ["Q4_K"] * 7, "Q4_K", 14)),
        # rtn weighs no input
        slow(("IQ4_XS", "IQ4_XS", ["IQ4_XS"] * 8, ["Q5_K"] + ["IQ4_XS"] * 7, "IQ4_XS", 30)),
    ],
)
def test_a_mixture_gives_each_linear_llama_cpps_type(
    wide, tmp_path, monkeypatch, scheme, usual, values, down, output, number
):
    monkeypatch.setattr(export_stage, "_prove", lambda *_: {})
    assert (
        run(
            "quantize",
            "--no-export",
            wide,
            "-o",
            tmp_path / "q",
            "--scheme",
            scheme,
            "--algorithm",
            "rtn",
        )
        == 0
    )
    assert run("export", tmp_path / "q", "-o", tmp_path / "a") == 0
    path = export(tmp_path / "a", tmp_path / "o")
    found, artifact = blocks_of(path), open_artifact(tmp_path / "a")
    assert path.name == f"model-{scheme.lower()}.gguf"
    assert gguf.read_header(path, types=gguf.WRITTEN).metadata["general.file_type"] == (
        "u32",
        number,
    )
    for layer in range(8):
        kinds = {
            name: found[f"blk.{layer}.{name}.weight"][0]
            for name in ("attn_q", "attn_k", "ffn_gate", "ffn_up")
        }
        assert set(kinds.values()) == {usual}
        assert found[f"blk.{layer}.attn_v.weight"][0] == values[layer], layer
        assert found[f"blk.{layer}.ffn_down.weight"][0] == down[layer], layer
        assert found[f"blk.{layer}.attn_output.weight"][0] == output
    assert found["token_embd.weight"][0] == usual and found["output.weight"][0] == "Q6_K"
    for mine, theirs in (
        ("ffn_down", "mlp.down_proj"),
        ("ffn_up", "mlp.up_proj"),
        ("attn_v", "self_attn.v_proj"),
    ):
        weight = artifact.decode(f"model.layers.3.{theirs}").weight.dequantize().numpy()
        assert np.array_equal(found[f"blk.3.{mine}.weight"][1], weight)


def test_a_ternary_file_has_an_embedding_of_four_bits(wide, tmp_path, monkeypatch):
    monkeypatch.setattr(export_stage, "_prove", lambda *_: {})
    words = ("--scheme", "TQ1_0", "--algorithm", "rtn")
    assert run("quantize", "--no-export", wide, "-o", tmp_path / "q", *words) == 0
    assert run("export", tmp_path / "q", "-o", tmp_path / "a") == 0
    found = blocks_of(export(tmp_path / "a", tmp_path / "o"))
    kinds = {name: kind for name, (kind, _) in found.items()}
    assert (kinds["token_embd.weight"], kinds["output.weight"]) == ("Q4_K", "Q6_K")
    assert kinds["blk.3.ffn_down.weight"] == "TQ1_0"
    weight = open_artifact(tmp_path / "a").decode("model.layers.3.mlp.down_proj").weight
    assert np.array_equal(found["blk.3.ffn_down.weight"][1], weight.dequantize().numpy())


@pytest.mark.parametrize(("scheme", "number"), [("Q4_K_M", 15), ("Q4_K", 14), ("Q3_K", 11)])
def test_a_file_is_called_what_was_asked_for_though_no_linear_has_the_type(
    llama, tmp_path, monkeypatch, scheme, number
):
    monkeypatch.setattr(export_stage, "_prove", lambda *_: {})
    assert (
        run(
            "quantize",
            "--no-export",
            llama,
            "-o",
            tmp_path / "q",
            "--scheme",
            scheme,
            "--algorithm",
            "rtn",
        )
        == 0
    )
    assert run("export", tmp_path / "q", "-o", tmp_path / "a") == 0
    path = export(tmp_path / "a", tmp_path / "o")
    assert path.name == f"model-{scheme.lower()}.gguf"
    assert gguf.read_header(path, types=gguf.WRITTEN).metadata["general.file_type"] == (
        "u32",
        number,
    )
    assert scheme.removesuffix("_M") not in {kind for kind, _ in blocks_of(path).values()}


def test_rows_that_are_no_whole_blocks_have_types_of_smaller_ones(
    llama, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(export_stage, "_prove", lambda *_: {})
    assert (
        run(
            "quantize",
            "--no-export",
            llama,
            "-o",
            tmp_path / "q",
            "--scheme",
            "Q4_K_M",
            "--algorithm",
            "rtn",
        )
        == 0
    )
    assert (
        "a type of blocks of 32 in 14 linears, whose inputs 256 does not divide"
        in capsys.readouterr().err
    )
    assert run("export", tmp_path / "q", "-o", tmp_path / "a") == 0
    found = blocks_of(export(tmp_path / "a", tmp_path / "o"))
    assert found["blk.0.attn_q.weight"][0] == "Q5_0" and found["blk.1.ffn_down.weight"][0] == "Q8_0"
    assert found["output.weight"][0] == "Q8_0"


@pytest.mark.slow
def test_an_artifact_with_minima_runs_and_its_file_is_read_back(wide, tmp_path):
    line = ("quantize", wide, "-o", tmp_path / "a", "--scheme", "Q4_K_M", "--algorithm", "rtn_mse")
    assert run(*line) == 0  # proved in a fresh process
    assert "have minima that are real numbers" in (tmp_path / "a" / "README.md").read_text()
    artifact, ids = open_artifact(tmp_path / "a"), torch.tensor([[0, 5, 9, 60, 7]])
    with torch.no_grad():
        logits = load(tmp_path / "a").model(ids).logits
        whole = import_gguf(
            export(tmp_path / "a", tmp_path / "f32", "--dtype", "f32"), tmp_path / "cache", SILENT
        )
        plain = load(whole).model(ids).logits
    assert torch.allclose(logits, plain, atol=1e-5)
    folder = import_gguf(export(tmp_path / "a", tmp_path / "o"), tmp_path / "cache", SILENT)
    read = load_file(folder / "model.safetensors")
    for name in ("self_attn.q_proj", "self_attn.v_proj", "mlp.down_proj", "mlp.up_proj"):
        for layer in (0, 1):
            weight = artifact.decode(f"model.layers.{layer}.{name}").weight.dequantize().bfloat16()
            assert torch.equal(read[f"model.layers.{layer}.{name}.weight"], weight), name


def test_pieces_of_any_size_make_the_same_file(llama, tmp_path, monkeypatch):
    expected = export(llama, tmp_path / "whole").read_bytes()
    monkeypatch.setattr(gguf_export, "PIECE_BYTES", 1000)
    assert export(llama, tmp_path / "pieces").read_bytes() == expected


def test_a_finished_result_is_left_alone_and_another_replaces_it_only_when_forced(
    llama, tmp_path, capsys
):
    path = export(llama, tmp_path / "o")
    before, inode = sha256(path.read_bytes()).hexdigest(), os.stat(path).st_ino
    record = json.loads((tmp_path / "o" / "DONE.json").read_text())
    assert record["stage"] == "export" and record["files"][path.name]["sha256"] == before
    capsys.readouterr()
    assert export(llama, tmp_path / "o") == path
    assert "up to date" in capsys.readouterr().err and os.stat(path).st_ino == inode
    assert run("export", llama, "-o", tmp_path / "o", "--format", "gguf", "--dtype", "f16") == 2
    assert 'finished result with dtype = "BF16", now "F16"' in capsys.readouterr().err
    assert export(llama, tmp_path / "o", "--dtype", "f16", "--force").name == "model-f16.gguf"
    moved = Path(shutil.copytree(llama, tmp_path / "elsewhere"))
    assert sha256(export(moved, tmp_path / "again").read_bytes()).hexdigest() == before


def test_tied_embeddings_are_written_once(copy, tmp_path):
    tensors = load_file(copy / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    change(copy / "config.json", tie_word_embeddings=True)
    found = tensors_of(export(copy, tmp_path / "o"))
    assert "output.weight" not in found and "token_embd.weight" in found


def test_llama_3s_rotary_factors_are_a_tensor_of_the_file(copy, tmp_path):
    rope = {
        "rope_type": "llama3",
        "rope_theta": 1e4,
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
    }
    change(copy / "config.json", rope_parameters={**rope, "original_max_position_embeddings": 64})
    factors = tensors_of(export(copy, tmp_path / "o"))["rope_freqs.weight"]
    assert (
        factors.dtype == torch.float32
        and factors.shape == (8,)
        and factors[0] == 1
        and factors[-1] == 4
    )


def change(path: Path, **values) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def test_a_sliding_window_bounds_the_context_and_is_told(family_model, tmp_path, capsys):
    model = Path(shutil.copytree(family_model("mistral"), tmp_path / "m"))
    change(model / "config.json", sliding_window=100)
    path = export(model, tmp_path / "o")
    assert gguf.read_header(path).metadata["llama.context_length"] == ("u32", 100)
    assert "context_length is 100, the sliding window" in capsys.readouterr().err


@pytest.mark.parametrize(
    "name", ["token_embd.weight", "blk.1.attn_q.weight", "blk.0.ffn_norm.weight"]
)
def test_one_changed_bit_is_found_and_nothing_is_published(
    llama, tmp_path, monkeypatch, capsys, name
):
    write = gguf.write

    def damaged(path, planned, pieces):
        write(path, planned, pieces)
        data = bytearray(path.read_bytes())
        data[planned.tensors[name].offset + planned.tensors[name].nbytes - 2] ^= 1
        path.write_bytes(data)

    monkeypatch.setattr(gguf, "write", damaged)
    assert run("export", llama, "-o", tmp_path / "o", "--format", "gguf") == 7
    assert f"{name}: the file's values are not those of model." in capsys.readouterr().err
    assert not (tmp_path / "o").exists()


def test_a_changed_header_is_found(llama, tmp_path, monkeypatch, capsys):
    write = gguf.write

    def damaged(path, planned, pieces):
        write(path, planned, pieces)
        path.write_bytes(path.read_bytes().replace(b"gpt-2", b"gpt-3", 1))

    monkeypatch.setattr(gguf, "write", damaged)
    assert run("export", llama, "-o", tmp_path / "o", "--format", "gguf") == 7
    assert "model-bf16.gguf: its header is not what was written" in capsys.readouterr().err


def test_the_proof_does_not_depend_on_how_the_file_was_cut(llama, tmp_path, monkeypatch):
    path = export(llama, tmp_path / "o")
    weights = open_weights(llama)
    monkeypatch.setattr(gguf_export, "PIECE_BYTES", 300)
    gguf_export.prove(path, weights, planned(weights, "BF16"))


def no_tokenizer(model):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (model / name).unlink()


def not_a_number(model):
    tensors = load_file(model / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 5] = float("nan")
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})


def too_large(model):
    tensors = load_file(model / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 5] = -1e5
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})


def another_shape(model):
    tensors = load_file(model / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"] = torch.zeros(127, 64, dtype=torch.bfloat16)
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})


def integers(model):
    tensors = load_file(model / "model.safetensors")
    tensors["model.norm.weight"] = torch.ones(64, dtype=torch.int32)
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})


def unknown(model):
    change(model / "config.json", model_type="gpt2", architectures=["GPT2LMHeadModel"])


def yarn(model):
    change(model / "config.json", rope_parameters={**YARN, "rope_theta": 1e4})


def metaspace(model):
    table = json.loads((model / "tokenizer.json").read_text())
    table["pre_tokenizer"] = {
        "type": "Metaspace",
        "replacement": "▁",
        "prepend_scheme": "first",
        "split": False,
    }
    (model / "tokenizer.json").write_text(json.dumps(table))


@pytest.mark.parametrize(
    ("damage", "code", "said"),
    [
        (no_tokenizer, 3, "no usable tokenizer"),
        (
            not_a_number,
            3,
            "model.layers.1.mlp.up_proj.weight: 1 values of model.safetensors are NaN or Inf",
        ),
        (
            too_large,
            2,
            "model.layers.1.mlp.up_proj.weight: 99840 does not fit F16, whose largest is 65504",
        ),
        (
            another_shape,
            3,
            "up_proj.weight: is [127, 64], the model needs [128, 64]",
        ),
        (integers, 3, "model.norm.weight: is I32, and no scheme says how it is quantized"),
        (unknown, 3, "transformer.h.0.attn.c_attn.bias: needed by the model"),
        (yarn, 6, "rope_type 'yarn'"),
        (metaspace, 6, "BPE behind Metaspace"),
    ],
)
def test_a_model_that_cannot_be_written_is_refused_and_nothing_is_left(
    copy, tmp_path, capsys, damage, code, said
):
    damage(copy)
    assert run("export", copy, "-o", tmp_path / "o", "--format", "gguf", "--dtype", "f16") == code
    told = [
        line
        for line in capsys.readouterr().err.splitlines()
        if line.startswith(("error:", "  fix:"))
    ]
    assert len(told) == 2 and said in told[0]
    assert not (tmp_path / "o").exists() and not list(tmp_path.glob(".o.tmp"))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--format", "gguf", "--dtype", "bf61"), "dtype 'bf61' of format gguf is unknown"),
        (("--format", "gguf", "--model", "x"), "--model x beside format gguf"),
        (("--format", "gguf", "--shard-size", "1MB"), "shard_size 1MB beside format gguf"),
        (("--format", "gguf", "--max-disk", "10KB"), "--max-disk is 10KB"),
    ],
)
def test_options_that_contradict_each_other_are_refused(llama, tmp_path, capsys, arguments, said):
    assert run("export", llama, "-o", tmp_path / "o", *arguments) == (
        5 if "--max-disk" in arguments else 2
    )
    assert said in capsys.readouterr().err and not (tmp_path / "o").exists()


def test_what_quantize_wrote_becomes_an_artifact_first(llama, tmp_path, capsys):
    assert run("quantize", "--no-export", llama, "-o", tmp_path / "q", "--scheme", "W8A16") == 0
    assert run("export", tmp_path / "q", "-o", tmp_path / "o", "--format", "gguf") == 2
    assert "is what quantize wrote" in capsys.readouterr().err
