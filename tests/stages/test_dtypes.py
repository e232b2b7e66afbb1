"""Values that a dtype does not hold are refused, and a folder has the dtype that was asked for."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, DeepseekV3Config, DeepseekV3ForCausalLM

from quantflow.errors import UsageError
from quantflow.exporting import plain_files
from quantflow.exporting.artifact_job import ArtifactJob
from quantflow.planning.recipe import Quantize
from tests.shared import run

UP, EMBEDDING = "model.layers.0.mlp.up_proj.weight", "model.embed_tokens.weight"
BIAS = "model.layers.0.mlp.gate.e_score_correction_bias"  # float32 in models of bfloat16
EVERYTHING_ELSE = 0.004  # of the logits' norm that rounding every weight to float16 may change
DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}


def changed(model: Path, folder: Path, change) -> Path:
    """Return a copy of a model whose tensors `change` has changed."""
    shutil.copytree(model, folder)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def artifact_of(model: Path, folder: Path, *more: str) -> Path:
    assert run("quantize", model, "-o", folder, "--scheme", "W8A16", "-q", *more) == 0
    return folder


def dequantized(artifact: Path, folder: Path, *more: str) -> int:
    return run("export", artifact, "-o", folder, "--format", "dequantized", "-q", *more)


@pytest.fixture(scope="module")
def artifact(llama, tmp_path_factory):
    return artifact_of(llama, tmp_path_factory.mktemp("dtypes") / "artifact")


def logits(folder: Path) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    with torch.no_grad():
        return model.float()(torch.arange(2, 40)[None]).logits


def large(tensors):
    tensors[UP][0, 0] = 70000.0


def large_embedding(tensors):
    tensors[EMBEDDING][5, 3] = -70000.0


def tiny(tensors):
    tensors[UP].copy_(torch.sign(tensors[UP]) * 2e-10)


def tiny_norm(tensors):
    tensors["model.norm.weight"].fill_(1e-10)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        # 70000 rounds to 70144 in the model's bfloat16, and once more in 8 bits
        (large, f"{UP}: 70104 does not fit F16, whose largest is 65504 (1 of 8,192 values)"),
        (
            large_embedding,
            f"{EMBEDDING}: 70144 does not fit F16, whose largest is 65504 (1 of 20,480 values)",
        ),
        (tiny, f"{UP}: 128 of 128 rows become 0 in F16, whose smallest is 5.96e-08 (their"),
        (tiny_norm, "model.norm.weight: 1 of 1 rows become 0 in F16, whose smallest is 5.96e-08"),
    ],
)
def test_dequantized_float16_that_does_not_hold_a_tensor_is_refused(
    llama, tmp_path, capsys, change, told
):
    made = artifact_of(changed(llama, tmp_path / "model", change), tmp_path / "a")
    assert dequantized(made, tmp_path / "o", "--dtype", "f16") == 2
    said = capsys.readouterr().err
    assert told in said and "give --dtype bf16" in said
    assert not (tmp_path / "o").exists() and not list(tmp_path.glob(".o.tmp*"))
    assert dequantized(made, tmp_path / "o", "--dtype", "bf16") == 0
    found = load_file(tmp_path / "o" / "model.safetensors")
    assert all(torch.isfinite(tensor).all() and tensor.any() for tensor in found.values())


def test_gguf_in_float16_whose_rows_vanish_is_refused(llama, tmp_path, capsys):
    made = artifact_of(changed(llama, tmp_path / "model", tiny), tmp_path / "a")
    line = ("export", made, "-o", tmp_path / "o", "--format", "gguf", "-q", "--dtype")
    assert run(*line, "f16") == 2
    assert f"{UP}: 128 of 128 rows become 0 in F16" in capsys.readouterr().err
    assert not (tmp_path / "o").exists()
    assert run(*line, "bf16") == 0


def test_gguf_says_which_rows_vanish_in_blocks(llama, tmp_path, capsys):
    def unused(tensors):
        tensors[EMBEDDING][7] = 1e-12

    model = changed(llama, tmp_path / "model", unused)
    made = tmp_path / "a"
    assert run("quantize", model, "-o", made, "--scheme", "Q8_0", "--algorithm", "rtn", "-q") == 0
    assert run("export", made, "-o", tmp_path / "o", "--format", "gguf") == 0
    said = capsys.readouterr()
    assert (
        f"{EMBEDDING}: 1 of 320 rows become 0 in Q8_0, whose scales are float16 (their largest "
        "value is 1e-12)"
    ) in said.out + said.err


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_tensor_and_config_json_have_the_dtype(artifact, llama, tmp_path, dtype):
    assert dequantized(artifact, tmp_path / "o", "--dtype", dtype) == 0
    found = load_file(tmp_path / "o" / "model.safetensors")
    assert {tensor.dtype for tensor in found.values()} == {DTYPES[dtype]}
    config, source = (
        json.loads((folder / "config.json").read_text()) for folder in (tmp_path / "o", llama)
    )
    word = str(DTYPES[dtype]).removeprefix("torch.")
    assert config == {**source, "dtype": word}
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "o", dtype="auto").dtype == DTYPES[dtype]
    before = load_file(llama / "model.safetensors")
    for name in (EMBEDDING, "model.norm.weight", "lm_head.weight"):
        assert torch.equal(found[name], before[name].to(DTYPES[dtype]))


def test_float16_computes_what_float32_does(artifact, tmp_path):
    for dtype in ("f16", "f32"):
        assert dequantized(artifact, tmp_path / dtype, "--dtype", dtype) == 0
    found, expected = logits(tmp_path / "f16"), logits(tmp_path / "f32")
    assert 0 < (found - expected).norm() < EVERYTHING_ELSE * expected.norm()


def test_parts_of_a_configuration_get_the_dtype_too(family_model, tmp_path):
    model = changed(family_model("mllama"), tmp_path / "model", lambda tensors: None)
    config = json.loads((model / "config.json").read_text())
    config["text_config"]["torch_dtype"] = "bfloat16"
    (model / "config.json").write_text(json.dumps(config))
    made = artifact_of(model, tmp_path / "a")
    assert dequantized(made, tmp_path / "o", "--dtype", "f16") == 0
    config["text_config"]["torch_dtype"] = config["dtype"] = "float16"
    assert json.loads((tmp_path / "o" / "config.json").read_text()) == config
    found = load_file(tmp_path / "o" / "model.safetensors")
    assert {tensor.dtype for tensor in found.values()} == {torch.float16}


def test_what_transformers_keeps_in_float32_stays(tmp_path):
    sizes = {"vocab_size": 96, "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
    latent = {"q_lora_rank": 64, "kv_lora_rank": 32, "qk_rope_head_dim": 8, "v_head_dim": 16}
    config = DeepseekV3Config(
        **sizes,
        **experts,
        **latent,
        num_key_value_heads=4,
        qk_nope_head_dim=16,
        moe_intermediate_size=96,
        first_k_dense_replace=0,
    )
    exact = torch.tensor([0.1, 0.2, 0.3, 0.4])  # none is a bfloat16

    def wide(tensors):
        tensors[BIAS] = exact.clone()

    model = DeepseekV3ForCausalLM(config).bfloat16()
    model.save_pretrained(tmp_path / "source")
    made = artifact_of(changed(tmp_path / "source", tmp_path / "model", wide), tmp_path / "a")
    for dtype in ("bf16", "f32"):
        assert dequantized(made, tmp_path / dtype, "--dtype", dtype) == 0
        found = load_file(tmp_path / dtype / "model.safetensors")
        assert torch.equal(found.pop(BIAS), exact)
        assert {tensor.dtype for tensor in found.values()} == {DTYPES[dtype]}


@pytest.mark.parametrize("format", ["dequantized", "awq"])
def test_a_file_that_differs_from_what_was_written_is_not_published(
    llama, tmp_path, capsys, monkeypatch, format
):
    made = tmp_path / "a"
    line = ("--scheme", "W4A16_ASYM", "--algorithm", "rtn", "--group-size", "32", "-q")
    assert run("quantize", llama, "-o", made, *line) == 0
    write = plain_files.write_model

    def damaged(folder, specs, tensors, **more):
        pairs = ((n, t.neg() if n == "model.norm.weight" else t) for n, t in tensors)
        return write(folder, specs, pairs, **more)

    for module in ("dequantized_export", "layout_export"):
        monkeypatch.setattr(f"quantflow.exporting.{module}.write_model", damaged)
    assert run("export", made, "-o", tmp_path / "o", "--format", format, "-q") == 7
    told = "model.norm.weight: model.safetensors holds other values than were written"
    assert told in capsys.readouterr().err
    assert not (tmp_path / "o").exists()


def test_an_adapter_beyond_the_models_dtype_is_refused(llama, tmp_path, write_adapter, capsys):
    half = changed(llama, tmp_path / "model", halves)
    config = json.loads((half / "config.json").read_text())
    (half / "config.json").write_text(json.dumps(config | {"dtype": "float16"}))
    write_adapter(tmp_path / "lora", {UP.removesuffix(".weight"): (128, 64)}, seed=3)
    factors = load_file(tmp_path / "lora" / "adapter_model.safetensors")
    save_file(
        {name: factor * 1000 for name, factor in factors.items()},
        tmp_path / "lora" / "adapter_model.safetensors",
    )
    line = ("quantize", half, "-o", tmp_path / "a", "--scheme", "W8A16", "-q")
    assert run(*line, "--adapter", tmp_path / "lora") == 2
    said = capsys.readouterr().err
    assert f"{UP}: " in said and "does not fit F16, whose largest is 65504" in said
    assert "store the model in bfloat16 and merge again" in said
    assert not (tmp_path / "a").exists() and not (tmp_path / "a.work" / "0-merged").exists()


def halves(tensors):
    for name in tensors:
        tensors[name] = tensors[name].half()


def test_a_rotation_beyond_the_models_dtype_is_refused(llama, tmp_path):
    def great(tensors):
        halves(tensors)
        tensors[EMBEDDING] = tensors[EMBEDDING].sign() * 60000

    model = changed(llama, tmp_path / "model", great)
    entry = Quantize(name="x", scheme="W8A16", transforms=({"hadamard": {}},))
    job = ArtifactJob(model=model, output=tmp_path / "a", entry=entry)
    with pytest.raises(UsageError) as error:
        job.run()
    assert error.value.cause.startswith(f"{EMBEDDING}: ")
    assert "does not fit F16, whose largest is 65504" in error.value.cause
    assert error.value.remedy.endswith("or leave the transform out")
    assert not (tmp_path / "a").exists()


def test_scales_of_blocks_that_float16_does_not_hold_name_a_way_on(llama, tmp_path, capsys):
    def huge(tensors):
        tensors[UP][0, 0] = 1e9

    model = changed(llama, tmp_path / "model", huge)
    line = ("quantize", model, "-o", tmp_path / "a", "--scheme", "Q8_0", "--algorithm", "rtn")
    assert run(*line, "-q") == 2
    said = capsys.readouterr().err
    assert "model.layers.0.mlp.up_proj: scale inf, it is finite and" in said
    assert "quantize with a scheme whose scales have the model's dtype" in said
