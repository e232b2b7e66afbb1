"""Random models with a layer that predicts further tokens (MTP), as folders with released names."""

import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Glm4MoeConfig,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
)
from transformers.modeling_layers import MtpLayer, MtpModel

SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 96,
    "vocab_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 128,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
FAMILIES = {
    "deepseek_v3": DeepseekV3Config(
        **SIZES,
        kv_lora_rank=32,
        q_lora_rank=48,
        qk_rope_head_dim=16,
        qk_nope_head_dim=16,
        v_head_dim=16,
        architectures=["DeepseekV3ForCausalLM"],
    ),
    "glm4_moe": Glm4MoeConfig(
        **SIZES, head_dim=16, use_qk_norm=True, architectures=["Glm4MoeForCausalLM"]
    ),
}


def write(folder, config, change=lambda model, ahead: None):
    """Write a random model with one layer ahead, as released: names beyond the last layer."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        ahead = MtpModel(model, 1)
        for parameter in model.parameters():
            parameter.data += torch.randn_like(parameter) * 0.05
        for parameter in ahead.layers.parameters():  # some of them are memory as it was
            parameter.data = torch.randn_like(parameter) * 0.05 + (parameter.ndim == 1)
    change(model, ahead)
    model.eval().save_pretrained(folder)
    layer, tensors = ahead.layers[0].eval(), load_file(folder / "model.safetensors")
    inside = {
        name.removeprefix("mtp_block."): tensor
        for name, tensor in layer.state_dict().items()
        if "mlp.experts" not in name
    }
    inside["shared_head.norm.weight"] = inside.pop("post_norm.weight")
    experts = layer.mtp_block.mlp.experts
    for number in range(config.n_routed_experts):
        gate, up = experts.gate_up_proj[number].chunk(2)
        inside |= {
            f"mlp.experts.{number}.gate_proj.weight": gate,
            f"mlp.experts.{number}.up_proj.weight": up,
            f"mlp.experts.{number}.down_proj.weight": experts.down_proj[number],
        }
    prefix = f"model.layers.{config.num_hidden_layers}"
    tensors |= {f"{prefix}.{name}": tensor.detach().clone() for name, tensor in inside.items()}
    tensors |= {f"{prefix}.shared_head.head.weight": model.lm_head.weight.detach().clone()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return model, ahead


def bigram_(model, ahead):
    """Make the next token a function of the last one, which both know."""
    for module in (model.model, ahead):
        for layer in module.layers:
            block = getattr(layer, "mtp_block", layer)
            block.self_attn.o_proj.weight.data.zero_()
            for name, parameter in block.mlp.named_parameters():
                if "down_proj" in name:
                    parameter.data.zero_()
    ahead.layers[0].enorm.weight.data.fill_(1)
    ahead.layers[0].post_norm.weight.data = model.model.norm.weight.data.clone()
    width = model.config.hidden_size
    ahead.layers[0].eh_proj.weight.data = torch.cat(
        [torch.eye(width), torch.zeros(width, width)], dim=1
    )


def ids(count, seed):
    return torch.randint(3, 96, (1, count), generator=torch.Generator().manual_seed(seed))


APART = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 96,
    "max_position_embeddings": 128,
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}
DELTA_FAMILIES = {
    "qwen3_next": Qwen3NextConfig(**APART, **EXPERTS, architectures=["Qwen3NextForCausalLM"]),
    "qwen3_5": Qwen3_5TextConfig(**APART, architectures=["Qwen3_5ForCausalLM"]),
}


def write_apart(folder, config):
    """Write a random model with one layer ahead under `mtp`, as Qwen3-Next is released."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        last = model.model.layers[-1]
        layer = MtpLayer(model.config, type(last), type(last.input_layernorm), 3).eval()
        for parameter in (*model.parameters(), *layer.parameters()):
            parameter.data = torch.randn_like(parameter) * 0.08
    model.save_pretrained(folder)
    names = {"eh_proj": "fc", "enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden"}
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in layer.state_dict().items():
        first, _, rest = name.partition(".")
        if "experts." in name:
            place = f"mtp.layers.0.{rest.rpartition('.')[0]}"
            for number, matrix in enumerate(tensor):
                parts = {"down_proj": matrix}
                if name.endswith("gate_up_proj"):
                    parts = dict(zip(("gate_proj", "up_proj"), matrix.chunk(2), strict=True))
                tensors |= {f"{place}.{number}.{key}.weight": each for key, each in parts.items()}
        elif first == "mtp_block":
            tensors[f"mtp.layers.0.{rest}"] = tensor
        else:
            tensors[f"mtp.{names.get(first, 'norm')}.{rest}"] = tensor
    tensors = {name: tensor.detach().clone().contiguous() for name, tensor in tensors.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    layer.mtp_block.self_attn.layer_idx = 0
    return model, layer
