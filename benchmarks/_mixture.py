"""A checkpoint shaped as gpt-oss, its experts in MXFP4 as they are published, of any size.

The weights are random, and are drawn in the form in which they are written: no copy in bf16 is
made. A code of an expert is any of the sixteen, an exponent one of three, so that a product's
outputs are about as large as its inputs. The same size and seed give the same bytes. Memory is
bounded by the largest tensor.
"""

import json
import math
import shutil
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from _synthetic import TOKENIZER_FILES, bf16_bits, is_made, safetensors_header, stamp
from numpy.typing import NDArray

GROUP = 32  # inputs that share an exponent
EXPONENTS = (118, 121)  # 2**-9 to 2**-7: a code of 1.9 on average times these is 1 / sqrt(2880)
Spec = tuple[str, str, tuple[int, ...]]


@dataclass(frozen=True, kw_only=True)
class MixtureShape:
    """The sizes that decide a checkpoint.

    Attributes:
        hidden: features of the hidden state.
        intermediate: features between an expert's linears.
        layers, heads, kv_heads, head_dim, vocab: as in the configuration.
        experts: of a layer.
        chosen: of them, for each token.
    """

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    experts: int
    chosen: int
    vocab: int

    @property
    def weights(self) -> int:
        """Elements of all matrices."""
        return self._matrices(self.experts)

    @property
    def active(self) -> int:
        """Elements that a token is multiplied by: its experts', and no embedding."""
        return self._matrices(self.chosen) - self.vocab * self.hidden

    def specs(self) -> dict[str, list[Spec]]:
        """Name, dtype and shape of each tensor, by the part of the model that shares a file."""
        table, norm = (self.vocab, self.hidden), (self.hidden,)
        parts = {str(index): self._layer(index) for index in range(self.layers)}
        ends = [
            ("model.embed_tokens.weight", "BF16", table),
            ("model.norm.weight", "BF16", norm),
            ("lm_head.weight", "BF16", table),
        ]
        return {**parts, "ends": ends}

    def _layer(self, index: int) -> list[Spec]:
        hidden, wide, experts = self.hidden, self.intermediate, self.experts
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        linears = {
            "self_attn.q_proj": (queries, hidden),
            "self_attn.k_proj": (keys, hidden),
            "self_attn.v_proj": (keys, hidden),
            "self_attn.o_proj": (hidden, queries),
            "mlp.router": (experts, hidden),
        }
        shapes: dict[str, tuple[int, ...]] = {
            "input_layernorm.weight": (hidden,),
            "post_attention_layernorm.weight": (hidden,),
            "self_attn.sinks": (self.heads,),
        }
        for name, (rows, columns) in linears.items():
            shapes |= {f"{name}.weight": (rows, columns), f"{name}.bias": (rows,)}
        specs = [(name, "BF16", shape) for name, shape in shapes.items()]
        for stack, (rows, columns) in {
            "gate_up_proj": (2 * wide, hidden),
            "down_proj": (hidden, wide),
        }.items():
            name, blocks = f"mlp.experts.{stack}", columns // GROUP
            specs += [
                (f"{name}_bias", "BF16", (experts, rows)),
                (f"{name}_blocks", "U8", (experts, rows, blocks, GROUP // 2)),
                (f"{name}_scales", "U8", (experts, rows, blocks)),
            ]
        return [(f"model.layers.{index}.{name}", dtype, shape) for name, dtype, shape in specs]

    def _matrices(self, experts: int) -> int:
        attention = 2 * self.hidden * self.head_dim * (self.heads + self.kv_heads)
        mixture = 3 * experts * self.hidden * self.intermediate + self.experts * self.hidden
        return self.layers * (attention + mixture) + 2 * self.vocab * self.hidden


# "gpt-oss-3B" has the layers, widths and chosen experts of gpt-oss-20b, half of its experts and a
# smaller vocabulary: 3.1 B of 10.4 B weights for a token, in 6.7 GB
MIXTURES = {
    "gpt-oss-3B": MixtureShape(
        hidden=2880,
        intermediate=2880,
        layers=24,
        heads=64,
        kv_heads=8,
        head_dim=64,
        experts=16,
        chosen=4,
        vocab=32000,
    ),
    "gpt-oss-50MB": MixtureShape(
        hidden=512,
        intermediate=512,
        layers=4,
        heads=8,
        kv_heads=2,
        head_dim=64,
        experts=16,
        chosen=4,
        vocab=4096,
    ),
}


def make_mixture(folder: Path, shape: MixtureShape, *, seed: int, tokenizer: Path) -> None:
    """Write the checkpoint, or leave it alone where it was finished with the same shape and seed.

    Args:
        folder: where it goes; `<folder>.json` beside it says that it is finished.
        shape: its sizes.
        seed: of the weights.
        tokenizer: the folder whose tokenizer is copied.
    """
    if is_made(folder, shape, seed=seed):
        return
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for name in TOKENIZER_FILES:
        shutil.copyfile(tokenizer / name, folder / name)
    (folder / "config.json").write_text(json.dumps(gpt_oss_config(shape), indent=2) + "\n")
    places: dict[str, str] = {}
    for part, specs in shape.specs().items():
        places |= dict.fromkeys((name for name, _, _ in specs), f"model-{part}.safetensors")
        _write(folder / f"model-{part}.safetensors", specs, shape, seed)
    size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    index = {"metadata": {"total_size": size}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index) + "\n")
    stamp(folder, shape, seed=seed)


def gpt_oss_config(shape: MixtureShape) -> dict[str, object]:
    """config.json of a shape, with the released model's other values."""
    kinds = ["sliding_attention", "full_attention"]
    left = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens"]
    return {
        "architectures": ["GptOssForCausalLM"],
        "attention_bias": True,
        "attention_dropout": 0.0,
        "bos_token_id": 0,
        "dtype": "bfloat16",
        "eos_token_id": 1,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "layer_types": [kinds[index % 2] for index in range(shape.layers)],
        "max_position_embeddings": 131072,
        "model_type": "gpt_oss",
        "num_attention_heads": shape.heads,
        "num_experts_per_tok": shape.chosen,
        "num_hidden_layers": shape.layers,
        "num_key_value_heads": shape.kv_heads,
        "num_local_experts": shape.experts,
        "pad_token_id": 1,
        "quantization_config": {
            "modules_to_not_convert": [*left, "lm_head"],
            "quant_method": "mxfp4",
        },
        "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "rope_type": "yarn",
            "truncate": False,
        },
        "rope_theta": 150000,
        "sliding_window": 128,
        "swiglu_limit": 7.0,
        "tie_word_embeddings": False,
        "vocab_size": shape.vocab,
    }


def _write(path: Path, specs: list[Spec], shape: MixtureShape, seed: int) -> None:
    """Write one safetensors file, tensor after tensor."""
    with path.open("wb") as file:
        file.write(safetensors_header(specs))
        for name, _, size in specs:
            file.write(_draw(name, size, shape, seed).data)


def _draw(name: str, size: tuple[int, ...], shape: MixtureShape, seed: int) -> NDArray[np.generic]:
    """The bytes of a tensor, or its bf16 bits as uint16."""
    random = np.random.Generator(np.random.SFC64([seed, *name.encode()]))
    if name.endswith("_blocks"):
        return np.frombuffer(random.bytes(math.prod(size)), dtype=np.uint8)
    if name.endswith("_scales"):
        return random.integers(*EXPONENTS, size=size, dtype=np.uint8)
    values = random.standard_normal(size, dtype=np.float32)
    if "norm" in name:
        return bf16_bits(1 + np.float32(0.1) * values)
    gain = 1 / math.sqrt(size[-1])
    if len(size) == 1 or name.endswith("_bias") or "embed_tokens" in name:
        gain = 0.05
    elif "o_proj" in name:
        gain /= math.sqrt(2 * shape.layers)
    return bf16_bits(values * np.float32(gain))
