"""Train the example model from scratch: a byte-level BPE tokenizer, then a 13.6 M parameter Llama.

In:  the interpreter's standard library (stdlib_text.py), a time budget.
Out: config.json, generation_config.json, model.safetensors (bf16), the tokenizer, training.json
     (steps, losses, held-out loss) and loss.png, the picture that the model card shows.

Muon (Jordan et al. 2024) moves the matrices of the decoder layers, AdamW everything else; the
learning rate warms up, stays, and falls linearly to zero over the last half of the budget. The
weights that are saved are rounded to bf16; the held-out loss is that of the rounded weights.

Example: python examples/tiny-llama/train.py --minutes 100 --output examples/tiny-llama
"""

import argparse
import copy
import json
import math
import platform
import time
from pathlib import Path

import matplotlib
import stdlib_text
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

matplotlib.use("Agg")
from matplotlib import pyplot

VOCABULARY = 4096
SEQUENCE = 512
BATCH = 8  # sequences per step


def train_tokenizer(texts: list[str], output: Path) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE of 4,096 tokens and save it as a Hugging Face tokenizer."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", model_max_length=1024
    )
    fast.save_pretrained(output)
    return fast


def build_model() -> LlamaForCausalLM:
    """The untrained model.

    It has 4 layers of hidden 512, 8 heads and 4 kv heads of 64, SwiGLU of 1024.
    """
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=512,
            intermediate_size=1024,
            num_hidden_layers=4,
            num_attention_heads=8,
            num_key_value_heads=4,
            head_dim=64,
            max_position_embeddings=1024,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
            tie_word_embeddings=False,
            bos_token_id=0,
            eos_token_id=1,
            initializer_range=0.02,
        )
    )


def tokenize(tokenizer: PreTrainedTokenizerFast, texts: list[str]) -> torch.Tensor:
    """Return every document as `<s> ... </s>`, end to end, [T]."""
    ids: list[int] = []
    for encoded in tokenizer(texts)["input_ids"]:
        ids += [*encoded, tokenizer.eos_token_id]
    return torch.tensor(ids)


@torch.no_grad()
def heldout_loss(model: PreTrainedModel, tokens: torch.Tensor, limit: int) -> float:
    """Return nats per token over the first `limit` tokens, in sequences of SEQUENCE."""
    model.eval()
    total, count = 0.0, 0
    for start in range(0, min(limit, len(tokens) - SEQUENCE), SEQUENCE):
        piece = tokens[start : start + SEQUENCE][None]  # [1, S]
        total += model(piece, labels=piece).loss.item() * (SEQUENCE - 1)
        count += SEQUENCE - 1
    model.train()
    return total / count


def optimizers(
    model: PreTrainedModel, *, peak: float, decay: float
) -> list[tuple[torch.optim.Optimizer, float]]:
    """Return each optimizer with its peak learning rate."""
    matrices = [p for n, p in model.named_parameters() if "layers" in n and p.ndim == 2]
    rest = [p for n, p in model.named_parameters() if not ("layers" in n and p.ndim == 2)]
    muon = torch.optim.Muon(
        matrices, lr=0.0, weight_decay=decay, momentum=0.95, adjust_lr_fn="match_rms_adamw"
    )
    adamw = torch.optim.AdamW(rest, lr=0.0, betas=(0.9, 0.95), weight_decay=decay / 4)
    return [(muon, peak), (adamw, peak)]


def save(model: PreTrainedModel, output: Path) -> None:
    """Write the weights rounded to bf16, leaving the model in float32."""
    copy.deepcopy(model).to(torch.bfloat16).save_pretrained(output)


def rate(done: float) -> float:
    """Return the factor on the peak learning rate when a share `done` of the budget is used."""
    return min(1.0, done / 0.01 + 0.01, max(0.0, (1.0 - done) / 0.5))


def train(
    model: PreTrainedModel,
    tokens: torch.Tensor,
    heldout: torch.Tensor,
    *,
    minutes: float,
    peak: float,
    decay: float,
    seed: int,
    snapshot: Path,
    products: torch.dtype = torch.bfloat16,
    sequences: int = BATCH,
    steps: int | None = None,
) -> dict[str, object]:
    """Train in place for `minutes` of wall time, `sequences` a step; the record of the run.

    Where `steps` are given these are the budget, and how busy the machine is makes no difference to
    the weights. A snapshot is saved every 200 steps. Products of matrices are in `products`.
    """
    generator = torch.Generator().manual_seed(seed)
    pairs = optimizers(model, peak=peak, decay=decay)
    forward = torch.compile(model)
    begin, step, seen = time.monotonic(), 0, 0
    curve: list[tuple[int, float]] = []
    heldout_curve: list[tuple[int, float]] = []
    order: list[int] = []
    smooth = math.log(VOCABULARY)

    def used() -> float:
        """The share of the budget that is behind."""
        return step / steps if steps else (time.monotonic() - begin) / (minutes * 60)

    while (done := used()) < 1.0:
        if len(order) < sequences:  # a new epoch, cut at another offset
            offset = int(torch.randint(SEQUENCE, (), generator=generator))
            starts = torch.arange(offset, len(tokens) - SEQUENCE, SEQUENCE)
            order = starts[torch.randperm(len(starts), generator=generator)].tolist()
        batch = torch.stack([tokens[s : s + SEQUENCE] for s in order[:sequences]])  # [B, S]
        order = order[sequences:]
        # weights and optimizer state stay float32
        with torch.autocast("cpu", torch.bfloat16, enabled=products == torch.bfloat16):
            loss = forward(batch, labels=batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, peak in pairs:
            for group in optimizer.param_groups:
                group["lr"] = peak * rate(done)
            optimizer.step()
            optimizer.zero_grad()
        step += 1
        seen += batch.numel()
        smooth += 0.05 * (loss.item() - smooth)
        if step % 10 == 0:
            curve.append((step, loss.item()))
            print(
                f"step {step} done {done:.3f} loss {smooth:.3f} "
                f"{seen / (time.monotonic() - begin):.0f} tokens/s",
                flush=True,
            )
        if step % 200 == 0:
            heldout_curve.append((step, heldout_loss(model, heldout, 16384)))
            save(model, snapshot)
            print(f"step {step} held-out {heldout_curve[-1][1]:.4f}", flush=True)
    return {
        "steps": step,
        "tokens": seen,
        "seconds": time.monotonic() - begin,
        "loss": curve,
        "heldout": heldout_curve,
    }


def continued(earlier: dict[str, object], record: dict[str, object]) -> dict[str, object]:
    """Return the record of two runs, the second of which began with the weights of the first."""
    steps = earlier["steps"]
    shifted = {
        key: earlier[key] + [(steps + step, loss) for step, loss in record[key]]
        for key in ("loss", "heldout")
    }
    return {
        **{key: earlier[key] + record[key] for key in ("steps", "tokens", "seconds")},
        **shifted,
    }


def draw(record: dict[str, object], path: Path) -> None:
    """Write the loss curve."""
    figure, axes = pyplot.subplots(figsize=(7, 4))
    axes.plot(
        *zip(*record["loss"], strict=True),
        linewidth=0.6,
        alpha=0.6,
        label="training, every 10th step",
    )
    axes.plot(
        *zip(*record["heldout"], strict=True), marker="o", markersize=3, label="held-out modules"
    )
    axes.set_xlabel("step")
    axes.set_ylabel("nats per token")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=100)


def main() -> None:
    """Train, round to bf16, measure, save."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=100)
    parser.add_argument("--peak", type=float, default=3e-3, help="largest learning rate")
    parser.add_argument(
        "--decay",
        type=float,
        default=0.1,
        help="weight decay of the matrices; the rest gets a quarter",
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="of the weights and of the order of the text"
    )
    parser.add_argument(
        "--init",
        type=Path,
        help="go on with the weights and tokenizer that an earlier run saved here",
    )
    parser.add_argument("--snapshot", type=Path, default=Path("artifacts/tiny-llama-training"))
    parser.add_argument("--output", type=Path, default=Path(__file__).parent)
    arguments = parser.parse_args()
    torch.manual_seed(arguments.seed)
    texts = stdlib_text.documents(heldout=False)
    tokenizer = train_tokenizer(texts, arguments.output)
    tokens = tokenize(tokenizer, texts)
    heldout = tokenize(tokenizer, stdlib_text.documents(heldout=True))
    print(f"{len(tokens)} training tokens, {len(heldout)} held-out tokens", flush=True)
    model, earlier = build_model(), None
    if arguments.init:
        model.load_state_dict(load_file(arguments.init / "model.safetensors"))
        earlier = json.loads((arguments.init / "training.json").read_text(encoding="utf-8"))
    record = train(
        model,
        tokens,
        heldout,
        minutes=arguments.minutes,
        peak=arguments.peak,
        decay=arguments.decay,
        seed=arguments.seed,
        snapshot=arguments.snapshot,
    )
    record = continued(earlier, record) if earlier else record
    save(model, arguments.output)
    model.to(torch.bfloat16)
    record |= {
        "python": platform.python_version(),
        "training_tokens": len(tokens),
        "heldout_tokens": len(heldout),
        "heldout_nats_per_token": heldout_loss(model.float(), heldout, len(heldout)),
    }
    (arguments.output / "training.json").write_text(json.dumps(record) + "\n", encoding="utf-8")
    draw(record, arguments.output / "loss.png")
    print(
        f"held-out: {record['heldout_nats_per_token']:.4f} nats per token after "
        f"{record['steps']} steps"
    )


if __name__ == "__main__":
    main()
