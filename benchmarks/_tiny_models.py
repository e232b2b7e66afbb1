"""Tiny random models of any type that transformers knows.

Each has the type's own configuration class with every size made small.

    config = tiny_config("gemma2")
    write_model(config, folder)            random weights, bfloat16, and the example's tokenizer

Sizes go by the names that all families share; a type that needs more has its own beside them.

Sizes of parts (the language model inside a wrapper, the vision tower beside it) are made small in
their own configurations.
"""

import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from _synthetic import TOKENIZER_FILES
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedConfig,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "tiny-llama"
VOCABULARY = 4096  # of the example's tokenizer
LARGEST = 30_000_000  # parameters; more is no tiny model
# Pattern of a configuration's key -> its small value. The first that matches the whole key counts;
# only whole numbers are set.
SIZES: tuple[tuple[str, Any], ...] = (
    (r"(text_)?vocab_size|vocab_size_per_layer_input|n_vocab", VOCABULARY),
    (r"(bos|eos|pad|decoder_start|sep|mask)_token_id", 1),
    (r"hidden_size_per_layer_input|embedding_size|embd_pdrop_size", 64),
    (
        r"(encoder_|decoder_|moe_|shared_|dense_|base_)?(hidden_size|hidden_dim|model_dim|embed_dim|emb_dim|d_model|n_embd|dim_model)",
        64,
    ),
    (r"word_embed_proj_dim|dim|lru_width|attention_hidden_size|hidden_dimension", 64),
    (
        r"(dense_|mlp_)?intermediate_size(_mlp)?|.*ffn_dim|n_inner|d_ff|d_inner_size|ff_dim|ffn_hidden_size|.*_ffn_hidden_size",
        128,
    ),
    (r"(moe|shared_expert|shared|expert|.*expert.*)_?intermediate_size|expert_ffn_hidden_size", 96),
    (
        r"num_hidden_layers|n_layers?|num_layers|(encoder|decoder)_layers|num_decoder_layers|num_encoder_layers|depth",
        2,
    ),
    (
        r"num_(attention_)?heads|n_heads?|(encoder|decoder)_attention_heads|num_encoder_attention_heads|num_decoder_attention_heads",
        4,
    ),
    (r"num_key_value_heads|num_kv_heads|attention_kv_heads", 2),
    (r"(attention_|global_|swa_|linear_(key|value)_)?head_dim|kv_channels|d_kv", 16),
    (
        r"max_position_embeddings|n_positions|n_ctx|max_seq_len|max_sequence_length|max_source_positions|max_target_positions",
        128,
    ),
    (r"sliding_window|attention_window_size|attention_chunk_size", 8),
    (r"(num|n)_(local_|routed_|moe_)?experts|moe_num_experts|num_experts", 4),
    (r"(num_experts_per_tok(en)?|moe_k|moe_topk|top_k_experts|moe_top_k|num_experts_per_token)", 2),
    (r"n_group|topk_group|num_expert_group", 1),
    (r"n_shared_experts|num_shared_experts|moe_num_shared_experts", 1),
    (r"q_lora_rank", 64),
    (r"kv_lora_rank", 32),
    (r"qk_rope_head_dim", 8),
    (r"qk_nope_head_dim|v_head_dim", 16),
    (r"qk_head_dim", 24),
    (r"first_k_dense_replace|num_dense_layers", 1),
    (r"image_size", 28),
)
INDEXER = {
    "indexer_n_heads": 4,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 16,
    "indexer_budget": 8,
    "indexer_compress_ratio": 4,
}
ROTATED = (  # their text by three positions at once
    *(
        "glm46v",
        "glm4v",
        "glm_ocr",
        "glmga",
        "paddleocr_vl",
        "qwen2_5_omni_thinker",
        "qwen2_5_vl",
        "qwen2_vl",
    ),
    "qwen3_omni_moe_thinker",
)
# half a head together
ROTATED_IN_THREE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
SHARED_ATTENTION = {  # the second layer's is the third's too
    "num_hidden_layers": 3,
    "layers_block_type": ["linear_attention", "hybrid", "hybrid"],
    "attention_hidden_size": 128,
    "attention_head_dim": 32,
}
OWN: dict[str, dict[str, Any]] = {  # what one type needs beside that
    "axk2": {"gated_norm_rank": 32},
    "bamba": {"attn_layer_indices": [1]},
    "codegen": {"rotary_dim": 8},
    "cohere_compass_text": {
        "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10000.0}}
    },
    "dbrx": {
        "attn_config.kv_n_heads": 2,
        "attn_config.rope_theta": 10000.0,
        "attn_config.clip_qkv": 8.0,
    },
    "deepseek_v2": {"topk_method": "greedy", "num_experts_per_tok": 2},
    "deepseek_v4": {
        "num_hidden_layers": 4,
        "layer_types": [
            "sliding_attention",
            "compressed_sparse_attention",
            "heavily_compressed_attention",
            "sliding_attention",
        ],
        "mlp_layer_types": ["hash_moe", "hash_moe", "moe", "moe"],
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
    },
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "dots3_note_text": {"num_key_value_heads": 4},
    "gemma3n_text": {"num_kv_shared_layers": 0},
    "gemma4_assistant": {"hidden_size_per_layer_input": 0},
    **dict.fromkeys(
        ("glm_moe_dsa", "hy_v4"), {"indexer_types": ["full", "shared"], "index_topk": 8}
    ),
    "gpt_neo": {"attention_types": [[["global"], 2]]},
    "gptj": {"rotary_dim": 8},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "jamba": {
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
    },
    "lfm2_moe": {"layer_types": ["full_attention", "conv"]},
    "mamba2": {"num_heads": 8},
    # text goes past the second
    "mllama": {"text_config.num_hidden_layers": 3, "text_config.cross_attention_layers": [1]},
    "nemotron": {"head_dim": 16, "num_key_value_heads": 2},
    # none of its towers is as deep as the decoder
    "phi4_multimodal": {"vision_config.num_hidden_layers": 3},
    "recurrent_gemma": {"num_hidden_layers": 3},  # the third keeps keys and values
    "qwen4_exp": {f"text_config.{key}": value for key, value in INDEXER.items()},
    "qwen4_exp_text": INDEXER,
    **dict.fromkeys(ROTATED, {"text_config.rope_parameters": ROTATED_IN_THREE}),
    "glm4v_moe": {
        "text_config.rope_parameters": {
            **ROTATED_IN_THREE,
            "mrope_section": [1, 1, 2],
            "partial_rotary_factor": 0.5,
        }
    },
    "xlstm": {"qk_dim_factor": 1.0},
    "xmod": {"default_language": "en_XX"},
    **dict.fromkeys(("zamba", "zamba2"), SHARED_ATTENTION),
    "zaya": {"num_experts": 2, "num_experts_per_tok": 1},
}
READS_IMAGES = tuple(
    kind
    for kind in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    if kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
)
_WRAPPED = ("mllama",)  # what its causal language model saves is read by no class of transformers
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {  # more layouts of a type
    "falcon-40b": ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "falcon-alibi": (
        "falcon",
        {
            "alibi": True,
            "multi_query": False,
            "parallel_attn": False,
            "bias": True,
            "num_kv_heads": 4,
        },
    ),
}
KINDS = tuple(sorted({*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *READS_IMAGES, *VARIANTS}))


def tiny_config(kind: str) -> PreTrainedConfig:
    """Return a configuration of a type in which every size is small.

    Args:
        kind: a model type of transformers, or a key of `VARIANTS`.

    Raises:
        Exception: whatever the configuration refuses.
    """
    base, more = VARIANTS.get(kind, (kind, {}))
    found = {**_small(CONFIG_MAPPING[base]), **more}
    for key, value in OWN.get(base, {}).items():
        part, _, name = key.rpartition(".")
        (found[part] if part else found)[name] = value
    return CONFIG_MAPPING[base](**found)


def _small(config_class: Any) -> dict[str, Any]:
    blank = config_class()
    found: dict[str, Any] = {}
    for name in getattr(blank, "sub_configs", {}):
        own = getattr(blank, name, None)
        if own is not None:
            found[name] = (
                {**_small(type(own)), "model_type": own.model_type}
                if type(own).model_type
                else _small(type(own))
            )
    for name, value in blank.to_dict().items():
        if isinstance(value, bool) or name in found:
            continue
        for pattern, small in SIZES:
            if re.fullmatch(pattern, name) and (
                isinstance(value, int)
                or (value is None and "token_id" not in name and name in ("head_dim",))
            ):
                found[name] = small
                break
    if "qk_rope_head_dim" in found:  # latent attention: only these features are rotated
        found |= {"head_dim": found["qk_rope_head_dim"]} if "head_dim" in found else {}
        found |= {"num_key_value_heads": 4} if "num_key_value_heads" in found else {}
    return found | _both_kinds(blank.to_dict().get("layer_types"))


def _both_kinds(kinds: Sequence[str] | None) -> dict[str, Any]:
    """The kinds of two layers where only the later layers keep keys and values.

    The first two of such a configuration keep none.

    A cache without keys and values does not know how long the text is: transformers runs no such
    model token by token.
    """
    attention = next(
        (kind for kind in ("full_attention", "indexed_attention") if kind in (kinds or ())), None
    )
    if kinds and attention and set(kinds[:2]) <= {"linear_attention", "conv"}:
        return {"layer_types": [kinds[0], attention]}
    return {}


def auto_class(config: PreTrainedConfig) -> Any:
    """Factory of transformers for a configuration.

    It is that of causal language models, else of those that read images too.
    """
    causal = (
        type(config) in AutoModelForCausalLM._model_mapping and config.model_type not in _WRAPPED
    )
    return AutoModelForCausalLM if causal else AutoModelForImageTextToText


def parameters_of(config: PreTrainedConfig) -> int:
    """Return how many parameters the model of a configuration has."""
    with torch.device("meta"):
        model = auto_class(config).from_config(config)
    return sum(parameter.numel() for parameter in model.parameters())


@torch.no_grad()
def randomize_(model: Any) -> None:
    """Fill matrices and biases with random numbers; norms stay as they are."""
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1:
            parameter.normal_(0, 0.1)
        elif name.endswith("bias"):
            parameter.normal_(0, 0.05)


def write_model(config: PreTrainedConfig, folder: Path) -> None:
    """Write a tiny random model of a configuration, with a tokenizer.

    Raises:
        ValueError: it isn't tiny: the configuration calls its sizes by other names.
    """
    count = parameters_of(config)
    if count > LARGEST:
        raise ValueError(f"{count:,} parameters: its configuration goes by other names")
    torch.manual_seed(0)
    model = auto_class(config).from_config(config)
    randomize_(model)
    with torch.no_grad():
        for name, table in model.named_buffers():
            # the experts of each token, zeros before a checkpoint is read
            if name.endswith(".tid2eid"):
                table.copy_(
                    (torch.arange(len(table))[:, None] + torch.arange(table.shape[1]))
                    % config.n_routed_experts
                )
    model.to(torch.bfloat16).save_pretrained(folder)
    for name in TOKENIZER_FILES:
        shutil.copyfile(EXAMPLE / name, folder / name)
