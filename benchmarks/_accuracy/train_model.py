"""Train one of the benchmark's models: FAMILY --minutes M or --steps N, --output DIR.

examples/tiny-llama has to be on PYTHONPATH.

On the text, with the tokenizer, optimizers and schedule of examples/tiny-llama/train.py; another
family and other widths, so that nothing is tuned to one model. The weights are saved in bf16. The
last line says how far it came.

With --text the text is that of other files, a tenth of which is held out, and a tokenizer is
trained on it. DIR then holds calibration.jsonl and heldout.jsonl too, which accuracy.py takes where
it is given the folder:

    export PYTHONPATH=examples/tiny-llama
    python benchmarks/_accuracy/train_model.py wide-llama --steps 500 --text novel.txt --output DIR
    python benchmarks/accuracy.py --models DIR --only W4A16
"""

import argparse
import random
import shutil
from collections.abc import Sequence
from pathlib import Path

import stdlib_text
import torch
import train
from transformers import (
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from quantflow.core import determinism
from quantflow.models.tokenizer import load_tokenizer

EXAMPLE = Path(train.__file__).parent
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")
PEAK, DECAY = 3e-3, 0.1
HELD_OUT = 10  # of so many pieces of a text one is held out
SHARED = {
    "vocab_size": train.VOCABULARY,
    "max_position_embeddings": 1024,
    "bos_token_id": 0,
    "eos_token_id": 1,
}


def gpt_neox() -> PreTrainedModel:
    """A configuration of 4 layers of hidden 512 with biases, LayerNorm and GELU.

    q/k/v are fused, and the two branches are parallel.
    """
    sizes = {
        "hidden_size": 512,
        "intermediate_size": 2048,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
    }
    return GPTNeoXForCausalLM(GPTNeoXConfig(**SHARED, **sizes, tie_word_embeddings=False))


def wide_llama() -> PreTrainedModel:
    """Return 3 layers of hidden 768, 12 heads and 4 KV heads of 64, SwiGLU of 2304."""
    sizes = {
        "hidden_size": 768,
        "intermediate_size": 2304,
        "num_hidden_layers": 3,
        "num_attention_heads": 12,
    }
    return LlamaForCausalLM(
        LlamaConfig(**SHARED, **sizes, num_key_value_heads=4, tie_word_embeddings=False)
    )


def qwen3_moe() -> PreTrainedModel:
    """Return 3 sparse layers of hidden 256: 16 experts of 256, 4 of which each token is sent to.

    They have 12 M weights, of which a token meets 5 M. The loss has the family's own term that
    spreads tokens over the experts.
    """
    sizes = {
        "hidden_size": 256,
        "moe_intermediate_size": 256,
        "intermediate_size": 256,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
    }
    routing = {
        "num_experts": 16,
        "num_experts_per_tok": 4,
        "norm_topk_prob": True,
        "output_router_logits": True,
        "router_aux_loss_coef": 0.01,
    }
    return Qwen3MoeForCausalLM(
        Qwen3MoeConfig(**SHARED, **sizes, **routing, tie_word_embeddings=False)
    )


FAMILIES = {"gpt-neox": gpt_neox, "wide-llama": wide_llama, "qwen3-moe": qwen3_moe}
# Sequences of a step where they are fewer: an expert's share of a step is small anyway, and more
# steps teach the router more.
SEQUENCES = {"qwen3-moe": 2}


def pieces(text: str) -> list[str]:
    """A text cut at line ends into pieces of `stdlib_text.EXCERPT_CHARACTERS` or a little more."""
    found, piece = [], ""
    for line in text.splitlines(keepends=True):
        piece += line
        if len(piece) >= stdlib_text.EXCERPT_CHARACTERS:
            found.append(piece)
            piece = ""
    return found


def own_text(paths: Sequence[Path], output: Path, *, seed: int) -> tuple[list[str], list[str]]:
    """The pieces of text files to train on and those held out, written beside the model.

    Raises:
        SystemExit: the files hold less than HELD_OUT pieces.
    """
    texts = [piece for path in paths for piece in pieces(path.read_text(encoding="utf-8"))]
    if len(texts) < HELD_OUT:
        raise SystemExit(
            f"{', '.join(map(str, paths))}: {len(texts)} pieces of "
            f"{stdlib_text.EXCERPT_CHARACTERS} characters, {HELD_OUT} are needed"
        )
    random.Random(seed).shuffle(texts)
    training, heldout = texts[len(texts) // HELD_OUT :], texts[: len(texts) // HELD_OUT]
    stdlib_text.write_jsonl(output / "calibration.jsonl", training)
    stdlib_text.write_jsonl(output / "heldout.jsonl", heldout)
    return training, heldout


def main() -> None:
    """Train and save."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("family", choices=FAMILIES)
    budget = parser.add_mutually_exclusive_group(required=True)
    budget.add_argument("--minutes", type=float, default=0.0, help="of wall time")
    budget.add_argument("--steps", type=int, help="the same model however busy the machine is")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument(
        "--seed", type=int, default=0, help="of the weights and of the order of the text"
    )
    parser.add_argument(
        "--text", type=Path, nargs="+", metavar="FILE", help="plain text to train on instead"
    )
    given = parser.parse_args()
    torch.manual_seed(given.seed)
    given.output.mkdir(parents=True, exist_ok=True)
    if given.text:
        sides = own_text(given.text, given.output, seed=given.seed)
        tokenizer = train.train_tokenizer(sides[0], given.output)
    else:
        sides = tuple(stdlib_text.documents(heldout=side) for side in (False, True))
        tokenizer = load_tokenizer(EXAMPLE)
        for name in TOKENIZER_FILES:
            shutil.copyfile(EXAMPLE / name, given.output / name)
    tokens, heldout = (train.tokenize(tokenizer, side) for side in sides)
    model = FAMILIES[given.family]()
    told = {
        "minutes": given.minutes,
        "steps": given.steps,
        "peak": PEAK,
        "decay": DECAY,
        "seed": given.seed,
        "snapshot": given.output,
        "products": determinism.products(),
        "sequences": SEQUENCES.get(given.family, train.BATCH),
    }
    record = train.train(model, tokens, heldout, **told)
    if hasattr(model.config, "output_router_logits"):  # the term is for training alone
        model.config.output_router_logits = False
    train.save(model, given.output)
    loss = train.heldout_loss(model.to(torch.bfloat16).float(), heldout, 16384)
    print(
        f"{loss:.3f} nats per held-out token after {record['steps']} steps, {record['tokens']} "
        "tokens"
    )


if __name__ == "__main__":
    main()
