"""transformers, eager, for runtime.py; see _serve.py.

SETTINGS: model, dtype, threads. Needs torch and transformers.
"""

from typing import Any

import torch
import transformers
from _serve import Program, Timed, clocked, serve
from transformers import AutoModelForCausalLM, DynamicCache


def load(settings: dict[str, Any]) -> Program:
    """Load a checkpoint; its modules run as they are."""
    torch.set_num_threads(settings["threads"])
    model = AutoModelForCausalLM.from_pretrained(
        settings["model"], dtype=getattr(torch, settings["dtype"])
    ).eval()
    embedding = model.get_input_embeddings().weight
    weights = sum(parameter.nbytes for parameter in model.parameters())
    if not model.config.tie_word_embeddings:
        weights -= embedding.nbytes

    def run(rows: list[list[int]], new: int) -> Timed:
        cache = DynamicCache(config=model.config)

        def forward(ids: torch.Tensor) -> torch.Tensor:
            logits = model(
                input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1
            ).logits
            return logits[:, -1].argmax(dim=-1, keepdim=True)

        with torch.inference_mode():
            return clocked(forward, torch.tensor(rows), new)

    return Program(version=transformers.__version__, weight_bytes=weights, run=run)


if __name__ == "__main__":
    serve(load)
