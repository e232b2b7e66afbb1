"""Transformers' modules as a decoder: step by step as in one forward, with a family's own cache."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM, MiniMaxConfig, MiniMaxForCausalLM

from quantflow.runtime.transformers_decoder import TransformersDecoder

SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
TOKENS = torch.arange(3, 19)[None]


def check_steps(model):
    """Compare a prompt and single tokens behind it with one forward over all of them."""
    model.eval()
    with torch.no_grad():
        expected = model(TOKENS, use_cache=False).logits
        decoder = TransformersDecoder(model)
        decoder.begin(rows=1, capacity=TOKENS.shape[1])
        steps = [decoder.forward(part) for part in (TOKENS[:, :9], *TOKENS[:, 9:].split(1, dim=1))]
    torch.testing.assert_close(torch.stack(steps, dim=1), expected[:, 8:], rtol=1e-4, atol=1e-5)


def test_a_llama_continues_from_the_cache_of_transformers():
    torch.manual_seed(0)
    check_steps(LlamaForCausalLM(LlamaConfig(**SIZES)))


def test_a_family_with_a_cache_of_its_own_gets_that():
    torch.manual_seed(0)
    kinds = ["linear_attention", "full_attention"]
    check_steps(
        MiniMaxForCausalLM(
            MiniMaxConfig(**SIZES, head_dim=8, layer_types=kinds, num_local_experts=4)
        )
    )
