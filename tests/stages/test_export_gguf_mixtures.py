"""Mixtures of experts for llama.cpp: names, shapes and bytes of each family, what is refused."""

import json
import shutil
from pathlib import Path

import gguf as theirs
import numpy as np
import pytest
import torch
from gguf import GGUFReader
from gguf.constants import MODEL_ARCH, MODEL_ARCH_NAMES, MODEL_TENSORS, TENSOR_NAMES
from gguf.quants import dequantize
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from quantflow.errors import InputError, UnsupportedError
from quantflow.exporting import export as export_stage
from quantflow.formats.llama_cpp import gguf
from quantflow.formats.llama_cpp.experts import file_tensors, require_computed
from quantflow.formats.llama_cpp.metadata import metadata
from quantflow.formats.llama_cpp.mixture_designs import MIXTURE_DESIGNS
from quantflow.models.reading import read_tensor
from tests.gguf_mixtures import MIXTURES, publish_mxfp4, write_mixture
from tests.shared import run

YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Folder of a family, made once."""
    folders: dict[str, Path] = {}

    def make(family: str) -> Path:
        if family not in folders:
            folders[family] = write_mixture(tmp_path_factory.mktemp("gguf") / family, family)
        return folders[family]

    return make


def export(source: Path, output: Path, *more: str) -> Path:
    assert run("export", source, "-o", output, "--format", "gguf", *more) == 0
    (path,) = output.glob("*.gguf")
    return path


def tensors_of(path: Path) -> dict[str, torch.Tensor]:
    return {name: read_tensor(path, info) for name, info in gguf.read_header(path).tensors.items()}


@pytest.mark.parametrize("family", MIXTURES)
def test_every_number_of_each_family_is_in_a_tensor_that_llama_cpp_names(made, tmp_path, family):
    model = made(family)
    path = export(model, tmp_path / "o", "--dtype", "f32")
    found, source = tensors_of(path), load_file(model / "model.safetensors")
    assert sum(t.numel() for t in found.values()) == sum(t.numel() for t in source.values())
    total = sum(t.double().sum().item() for t in source.values())  # rows change places, sums do not
    assert sum(t.double().sum().item() for t in found.values()) == pytest.approx(total, abs=1e-6)
    fields = gguf.read_header(path).metadata
    name = fields["general.architecture"][1]
    (arch,) = (kind for kind in MODEL_ARCH if MODEL_ARCH_NAMES[kind] == name)
    known = {
        TENSOR_NAMES[tensor].format(bid=layer)
        for tensor in MODEL_TENSORS[arch]
        for layer in range(3)
    }
    assert {name.rpartition(".")[0] for name in found} <= known
    assert fields[f"{name}.expert_used_count"] == ("u32", 2)
    keys = {value for value in vars(theirs.Keys.LLM).values() if isinstance(value, str)}
    keys |= {value for value in vars(theirs.Keys.Attention).values() if isinstance(value, str)}
    keys |= {value for value in vars(theirs.Keys.Rope).values() if isinstance(value, str)}
    named = {key.replace("{arch}", name) for key in keys}
    assert {key for key in fields if key.startswith(f"{name}.")} <= named


def test_experts_are_stacked_in_their_order_and_routers_stay_in_float32(made, tmp_path):
    model = made("qwen2_moe")
    path = export(model, tmp_path / "o", "--dtype", "bf16")
    found, source = tensors_of(path), load_file(model / "model.safetensors")
    for file, linear in (("gate", "gate_proj"), ("up", "up_proj"), ("down", "down_proj")):
        experts = [source[f"model.layers.1.mlp.experts.{i}.{linear}.weight"] for i in range(6)]
        assert torch.equal(found[f"blk.1.ffn_{file}_exps.weight"], torch.stack(experts))
        shared = source[f"model.layers.1.mlp.shared_expert.{linear}.weight"]
        assert torch.equal(found[f"blk.1.ffn_{file}_shexp.weight"], shared)
    for file, module in (("ffn_gate_inp", "gate"), ("ffn_gate_inp_shexp", "shared_expert_gate")):
        router = source[f"model.layers.1.mlp.{module}.weight"].float().squeeze(0)
        assert torch.equal(found[f"blk.1.{file}.weight"], router)


def test_gpt_oss_has_sinks_and_biases_and_its_experts_are_no_longer_woven(made, tmp_path):
    model = made("gpt_oss")
    found = tensors_of(export(model, tmp_path / "o", "--dtype", "f16"))
    source = load_file(model / "model.safetensors")
    stem = "model.layers.2.mlp.experts"
    both, biases = source[f"{stem}.gate_up_proj"], source[f"{stem}.gate_up_proj_bias"]
    down = source[f"{stem}.down_proj"].transpose(1, 2)
    for turn, name in enumerate(("gate", "up")):
        weight = both[:, :, turn::2].transpose(1, 2)
        assert torch.equal(found[f"blk.2.ffn_{name}_exps.weight"], weight.half())
        assert torch.equal(found[f"blk.2.ffn_{name}_exps.bias"], biases[:, turn::2].float())
    assert torch.equal(found["blk.2.ffn_down_exps.weight"], down.half())
    sinks = source["model.layers.2.self_attn.sinks"].float()
    assert torch.equal(found["blk.2.attn_sinks.weight"], sinks)


def test_compressed_keys_are_transposed_head_by_head(made, tmp_path):
    model = made("deepseek_v3")
    found = tensors_of(export(model, tmp_path / "o", "--dtype", "f32"))
    both = load_file(model / "model.safetensors")["model.layers.2.self_attn.kv_b_proj.weight"]
    heads = both.float().view(4, 32 + 16, 32)
    assert torch.equal(found["blk.2.attn_k_b.weight"], heads[:, :32].transpose(1, 2))
    assert torch.equal(found["blk.2.attn_v_b.weight"], heads[:, 32:])
    assert "blk.0.ffn_gate.weight" in found and "blk.1.exp_probs_b.bias" in found


def test_tensors_of_layers_that_predict_further_tokens_are_left_out_and_said(
    made, tmp_path, capsys
):
    model = Path(shutil.copytree(made("glm4_moe"), tmp_path / "m"))
    tensors = load_file(model / "model.safetensors")
    further = {"model.layers.3.eh_proj.weight": torch.ones(64, 128, dtype=torch.bfloat16)}
    save_file({**tensors, **further}, model / "model.safetensors", metadata={"format": "pt"})
    found = tensors_of(export(model, tmp_path / "o", "--dtype", "f32"))
    assert not [name for name in found if name.startswith("blk.3.")]
    assert "left out" in capsys.readouterr().err


def test_an_expert_of_gpt_oss_in_mxfp4_keeps_its_codes_and_its_exponents(made, tmp_path, capsys):
    """Beside the blocks that llama.cpp's converter makes of the published ones."""
    model = Path(shutil.copytree(made("gpt_oss"), tmp_path / "m"))
    publish_mxfp4(model)
    config = json.loads((model / "config.json").read_text())
    config["rope_parameters"]["truncate"] = False
    (model / "config.json").write_text(json.dumps(config))
    path = export(model, tmp_path / "o")
    assert "bounds of YaRN's ramp" in capsys.readouterr().err
    assert path.name == "model-mxfp4.gguf"
    source = load_file(model / "model.safetensors")
    stem = "model.layers.1.mlp.experts"
    found = {tensor.name: tensor for tensor in GGUFReader(path).tensors}
    for name, leaf, rows in (
        ("gate", "gate_up_proj", slice(0, None, 2)),
        ("up", "gate_up_proj", slice(1, None, 2)),
        ("down", "down_proj", slice(None)),
    ):
        blocks = source[f"{stem}.{leaf}_blocks"][:, rows].numpy()
        scales = source[f"{stem}.{leaf}_scales"][:, rows].numpy()
        tensor = found[f"blk.1.ffn_{name}_exps.weight"]
        assert tensor.tensor_type == theirs.GGMLQuantizationType.MXFP4
        stored = tensor.data.reshape(*scales.shape, 17)
        assert np.array_equal(stored[..., 0], scales)
        codes = np.stack([blocks & 15, blocks >> 4], -1).reshape(*scales.shape, 32)
        assert np.array_equal(stored[..., 1:] & 15, codes[..., :16])
        assert np.array_equal(stored[..., 1:] >> 4, codes[..., 16:])
        points = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
        real = np.where(codes & 8, -1, 1) * points[codes & 7] * 2.0 ** (scales[..., None] - 127.0)
        assert np.array_equal(dequantize(tensor.data, tensor.tensor_type), real.reshape(
            *scales.shape[:2], -1).astype(np.float32))  # fmt: skip
    assert found["blk.1.attn_q.weight"].tensor_type == theirs.GGMLQuantizationType.BF16
    assert found["token_embd.weight"].tensor_type == theirs.GGMLQuantizationType.BF16


def test_experts_in_llama_cpps_types_stay_in_their_blocks(made, tmp_path, monkeypatch):
    monkeypatch.setattr(export_stage, "_prove", lambda *_: {})
    model, q, a = made("deepseek_v3"), tmp_path / "q", tmp_path / "a"
    line = ("--no-export", "--scheme", "Q4_0", "--algorithm", "rtn")
    assert run("quantize", model, "-o", q, *line) == 0 and run("export", q, "-o", a) == 0
    found = {tensor.name: tensor for tensor in GGUFReader(export(a, tmp_path / "o")).tensors}
    plain = tensors_of(export(a, tmp_path / "f", "--dtype", "f32"))
    kinds = {name: tensor.tensor_type.name for name, tensor in found.items()}
    assert kinds["blk.1.ffn_down_exps.weight"] == kinds["blk.1.attn_v_b.weight"] == "Q4_0"
    assert kinds["blk.1.attn_k_b.weight"] == "Q8_0"  # of transposed rows there are no blocks
    assert kinds["blk.1.ffn_gate_inp.weight"] == kinds["blk.1.exp_probs_b.bias"] == "F32"
    for name in ("blk.1.ffn_down_exps", "blk.1.attn_v_b", "blk.2.ffn_gate_shexp", "blk.0.ffn_up"):
        tensor = found[f"{name}.weight"]
        real = dequantize(tensor.data, tensor.tensor_type)
        assert np.array_equal(real, plain[f"{name}.weight"].numpy().reshape(real.shape))
    keys = found["blk.1.attn_k_b.weight"]
    real, wanted = dequantize(keys.data, keys.tensor_type), plain["blk.1.attn_k_b.weight"].numpy()
    assert np.abs(real - wanted).max() < np.abs(wanted).max() / 200


def test_experts_of_a_layer_in_several_types_are_refused_by_name(
    made, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(export_stage, "_prove", lambda *_: {})
    model, q, a = made("qwen3_moe"), tmp_path / "q", tmp_path / "a"
    recipe = tmp_path / "r.yaml"
    first = {"match": "re:.*layers[.]1[.].*experts[.]3[.]up_proj", "scheme": "Q8_0"}
    entry = {"name": "a", "scheme": "Q4_0", "algorithm": "rtn", "overrides": [first]}
    recipe.write_text(json.dumps({"model": str(model), "quantize": [entry]}))
    assert run("quantize", model, "-o", q, "--no-export", "--recipe", recipe) == 0
    assert run("export", q, "-o", a) == 0
    assert run("export", a, "-o", tmp_path / "o", "--format", "gguf") == 2
    told = capsys.readouterr().err
    assert "blk.1.ffn_up_exps.weight" in told and "experts.3.up_proj.weight is Q8_0" in told
    export(a, tmp_path / "f", "--dtype", "f16")


@pytest.mark.parametrize(
    ("family", "changes", "told"),
    [
        ("qwen3_moe", {"norm_topk_prob": False}, "norm_topk_prob False"),
        ("qwen2_moe", {"decoder_sparse_step": 2}, "decoder_sparse_step 2"),
        ("qwen2_moe", {"hidden_size": 128, "head_dim": 16}, "heads of 64 features in all"),
        ("qwen3_moe", {"mlp_only_layers": [1]}, r"mlp_only_layers \[1\]"),
        ("olmoe", {"num_key_value_heads": 2}, "num_key_value_heads 2"),
        ("deepseek_v2", {"topk_method": "group_limited_greedy"}, "topk_method"),
        ("gpt_oss", {"swiglu_limit": 5.0}, "swiglu_limit 5.0"),
        ("gpt_oss", {"layer_types": ["full_attention"] * 3}, "layer_types does not begin"),
        ("deepseek_v3", {"rope_interleave": False}, "rope_interleave False"),
        ("mixtral", {"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        (
            "mixtral",
            {"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4}},
            "rope_type 'llama3'",
        ),
        (
            "deepseek_v3",
            {"rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.7}},
            "mscale 1.0, mscale_all_dim 0.7",
        ),
        ("gpt_oss", {"rope_parameters": {**YARN, "attention_factor": 1.5}}, "attention_factor 1.5"),
    ],
)
def test_what_llama_cpp_computes_otherwise_is_refused_by_its_key(made, family, changes, told):
    model = made(family)
    config = AutoConfig.from_pretrained(model)
    for key, value in changes.items():
        setattr(config, key, value)
    with pytest.raises(UnsupportedError, match=told):
        require_computed(config, MIXTURE_DESIGNS[family])
        metadata(config)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"model.layers.1.mlp.gate.weight": (9, 64)}, r"gate.weight: \[9, 64\] in the checkpoint"),
        ({"model.layers.2.self_attn.kv_b_proj.weight": (9, 32)}, r"kv_b_proj.weight: \[9, 32\]"),
        ({"model.layers.1.mlp.experts.8.up_proj.weight": (32, 64)}, "experts.8.up_proj.weight: in"),
        ({"model.layers.1.mlp.experts.7.up_proj.weight": None}, "experts.7.up_proj.weight: not in"),
    ],
)
def test_a_checkpoint_that_is_not_what_its_configuration_says_is_refused(made, change, told):
    model = made("deepseek_v3")
    tensors = load_file(model / "model.safetensors")
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()} | change
    shapes = {name: shape for name, shape in shapes.items() if shape is not None}
    with pytest.raises(InputError, match=told):
        file_tensors(AutoConfig.from_pretrained(model), shapes)
