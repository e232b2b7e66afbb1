"""Tiny random mixtures of the families that llama.cpp runs, with released configurations' words."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from tests.conftest import write_tokenizer

_SHAPE: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 1,
    "num_experts_per_tok": 2,
    "tie_word_embeddings": False,
}
_LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "n_routed_experts": 8,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "original_max_position_embeddings": 64,
    "factor": 4.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}
MIXTURES: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 4},
    "qwen2_moe": {
        "num_experts": 6,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 96,
    },
    "qwen3_moe": {
        "head_dim": 32,
        "num_experts": 6,
        "moe_intermediate_size": 32,
        "norm_topk_prob": True,
    },
    "olmoe": {"num_key_value_heads": 4, "num_experts": 6},
    "gpt_oss": {
        "head_dim": 16,
        "num_local_experts": 4,
        "sliding_window": 16,
        "rope_parameters": {**_YARN, "rope_theta": 150000.0, "truncate": True},
    },
    "deepseek_v2": {**_LATENT, "q_lora_rank": None, "routed_scaling_factor": 1.0},
    "deepseek_v3": {
        **_LATENT,
        "q_lora_rank": 32,
        "n_group": 4,
        "topk_group": 2,
        "rope_parameters": {**_YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
    },
    "glm4_moe": {
        "head_dim": 16,
        "n_routed_experts": 8,
        "moe_intermediate_size": 32,
        "first_k_dense_replace": 1,
        "use_qk_norm": True,
        "attention_bias": True,
        "routed_scaling_factor": 1.5,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.5,
        },
    },
}


def write_mixture(folder: Path, family: str, **changes: Any) -> Path:
    """Write a model of a family whose biases and norms matter too, in bfloat16."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = CONFIG_MAPPING[family](**{**_SHAPE, **MIXTURES[family], **changes})
        config.initializer_range = 0.15
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            tensors = [*model.named_parameters(), *model.named_buffers()]
            for name, tensor in tensors:
                if "bias" in name.rpartition(".")[2] or name.endswith("sinks"):
                    tensor.normal_(0, 0.2)
                elif "norm" in name and name.endswith("weight"):
                    tensor.normal_(1, 0.2)
    model.to(torch.bfloat16).save_pretrained(folder)
    write_tokenizer(folder)
    return folder


def publish_mxfp4(folder: Path, *, seed: int = 7) -> None:
    """Give a gpt-oss the form in which it is published: experts in blocks and exponents."""
    draw = torch.Generator().manual_seed(seed)
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        count, columns, rows = tensors.pop(name).shape
        shape = (count, rows, columns // 32)
        codes = torch.randint(256, (*shape, 16), generator=draw).to(torch.uint8)
        tensors[f"{name}_blocks"] = codes
        exponents = torch.randint(119, 123, shape, generator=draw).to(torch.uint8)
        tensors[f"{name}_scales"] = exponents
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    left = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens"]
    words = {"quant_method": "mxfp4", "modules_to_not_convert": [*left, "lm_head"]}
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": words}))
