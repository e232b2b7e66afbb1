"""Kimi K2, whose config.json names code beside the weights, is a DeepSeek V3; no code is run."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from quantflow.runtime.load import load
from tests.gguf_mixtures import write_mixture
from tests.shared import run

# what moonshotai/Kimi-K2-Instruct's config.json has beside sizes
RELEASED = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "auto_map": {
        "AutoConfig": "configuration_deepseek.DeepseekV3Config",
        "AutoModel": "modeling_deepseek.DeepseekV3Model",
        "AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM",
    },
    "aux_loss_alpha": 0.001,
    "ep_size": 1,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 131072,
    "model_type": "kimi_k2",
    "moe_layer_freq": 1,
    "n_group": 1,
    "norm_topk_prob": True,
    "num_nextn_predict_layers": 0,
    "pretraining_tp": 1,
    "rope_scaling": {
        "beta_fast": 1.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 50000.0,
    "routed_scaling_factor": 2.827,
    "scoring_func": "sigmoid",
    "seq_aux": True,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "transformers_version": "4.48.3",
}
IDS = torch.randint(3, 90, (1, 10), generator=torch.Generator().manual_seed(2))


@pytest.fixture(scope="module")
def kimi(tmp_path_factory):
    """A folder as released, and the same one as a DeepSeek V3."""
    folder = write_mixture(
        tmp_path_factory.mktemp("kimi") / "kimi", "deepseek_v3", qk_rope_head_dim=16
    )
    sizes = json.loads((folder / "config.json").read_text())
    for key in ("rope_parameters", "topk_group", "dtype", "transformers_version"):
        sizes.pop(key, None)
    (folder / "config.json").write_text(json.dumps({**sizes, **RELEASED}))
    for name in ("configuration_deepseek.py", "modeling_deepseek.py"):
        (folder / name).write_text("raise RuntimeError('this code was run')\n")
    plain = shutil.copytree(folder, folder.with_name("deepseek"))
    without = {key: value for key, value in RELEASED.items() if key != "auto_map"}
    own = {**sizes, **without, "model_type": "deepseek_v3"}
    (plain / "config.json").write_text(json.dumps(own))
    return folder, plain


def logits(decoder):
    with torch.inference_mode():
        decoder.begin(rows=1, capacity=16)
        steps = [decoder.forward(IDS[:, :6], last_only=False)]
        steps += [decoder.forward(IDS[:, at : at + 1], last_only=False) for at in range(6, 10)]
    return torch.cat(steps, dim=1)


def test_as_released_it_runs_in_both_decoders_token_by_token_as_transformers_deepseek(kimi):
    folder, plain = kimi
    theirs = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32).eval()
    with torch.inference_mode():
        expected = theirs(IDS).logits
    for decoder in ("lean", "transformers"):
        found = logits(load(folder, decoder=decoder).decoder)
        assert (found - expected).abs().max() < 2e-5 * expected.abs().max()


@pytest.mark.parametrize("scheme", ["W4A16", pytest.param("FP8_DYNAMIC", marks=pytest.mark.slow)])
def test_artifacts_have_the_bits_of_deepseeks_and_keep_config_and_code(kimi, scheme, tmp_path):
    line = ("--scheme", scheme, "--algorithm", "rtn", "--group-size", "32", "-q")
    line = line if scheme == "W4A16" else (*line[:4], "-q")
    for folder in kimi:
        artifact = tmp_path / folder.name
        assert run("quantize", folder, "-o", tmp_path / "q", "--export", artifact, *line) == 0
        shutil.rmtree(tmp_path / "q")
    mine, theirs = (load_file(tmp_path / folder.name / "model.safetensors") for folder in kimi)
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)
    config = json.loads((tmp_path / "kimi" / "config.json").read_text())
    assert config["model_type"] == "kimi_k2"
    assert config["auto_map"] == RELEASED["auto_map"]
    assert (tmp_path / "kimi" / "modeling_deepseek.py").is_file()
    for decoder in ("lean", "transformers"):
        found, expected = (
            logits(load(tmp_path / folder.name, decoder=decoder).decoder) for folder in kimi
        )
        assert torch.equal(found, expected)


def test_in_float8_blocks_as_released_it_is_read_as_deepseeks(kimi, tmp_path):
    folders = [shutil.copytree(folder, tmp_path / folder.name) for folder in kimi]
    for folder in folders:
        tensors = load_file(folder / "model.safetensors")
        for name in [name for name in tensors if name.endswith(("_proj.weight", "mqa.weight"))]:
            rows, columns = tensors[name].shape
            scale = tensors[name].float().abs().max() / 448
            tensors[name] = (tensors[name].float() / scale).to(torch.float8_e4m3fn)
            blocks = (-(-rows // 32), -(-columns // 32))
            tensors[f"{name}_scale_inv"] = torch.full(blocks, float(scale))
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        config = json.loads((folder / "config.json").read_text())
        words = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
        words |= {"weight_block_size": [32, 32]}
        (folder / "config.json").write_text(json.dumps({**config, "quantization_config": words}))
    found, expected = (logits(load(folder, decoder="auto").decoder) for folder in folders)
    assert torch.equal(found, expected)
