"""Train a LoRA adapter with PEFT and accelerate.

`quantflow generate --adapter` runs it and `quantize --adapter` merges it.

In:  a Hugging Face model, or the weights of an artifact
     (`quantflow export ARTIFACT -o DIR --format dequantized --dtype f32`), and text: .jsonl with
     `text` in each line, or .txt with blank lines between documents.
Out: DIR with adapter_config.json and adapter_model.safetensors, and a report as one line of JSON:
     loss and perplexity of the held-out tenth of the text before and after, its share of tokens
     that are the likeliest, seconds, peak memory.

Documents are joined, each with the tokenizer's BOS, and cut into sequences of --length. Only the
adapter is trained, by AdamW.

Example: python examples/lora/finetune.py ./llama --text notes.jsonl -o lora --steps 200
         torchrun --nproc-per-node 2 examples/lora/finetune.py ./llama --text notes.jsonl -o lora
"""

import argparse
import json
import math
import resource
import time
from pathlib import Path

import torch
from accelerate import Accelerator
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

HELD_OUT = 0.1  # of the sequences


def documents(path: Path) -> list[str]:
    """Return the texts of a file."""
    text = path.read_text()
    if path.suffix == ".jsonl":
        return [json.loads(line)["text"] for line in text.splitlines() if line.strip()]
    return [part for part in text.split("\n\n") if part.strip()]


def sequences(texts: list[str], tokenizer: PreTrainedTokenizerBase, *, length: int) -> Tensor:
    """Return the token ids of texts, joined and cut, [N, length] int64."""
    ids = [token for text in texts for token in tokenizer(text)["input_ids"]]
    count = len(ids) // length
    if count < 2:
        raise SystemExit(
            f"{len(ids)} tokens are {count} sequences of {length}; give more text, or a smaller "
            "--length"
        )
    return torch.tensor(ids[: count * length]).view(count, length)


def loss_of(model: nn.Module, batch: Tensor) -> tuple[Tensor, Tensor]:
    """Mean loss of the next tokens in nats, and the share that are the likeliest.

    batch: [B, T] int64.
    """
    logits = model(input_ids=batch).logits[:, :-1].float()  # [B, T - 1, V]
    wanted = batch[:, 1:]
    return functional.cross_entropy(logits.flatten(0, 1), wanted.flatten()), (
        logits.argmax(-1) == wanted
    ).float().mean()


@torch.no_grad()
def judged(model: nn.Module, held_out: Tensor, batch_size: int) -> dict[str, float]:
    """Return loss, perplexity and accuracy of sequences that are not trained on."""
    model.eval()
    found = torch.tensor([loss_of(model, batch) for batch in held_out.split(batch_size)]).mean(
        dim=0
    )
    model.train()
    return {"loss": float(found[0]), "perplexity": math.exp(found[0]), "accuracy": float(found[1])}


def main() -> None:
    """Train, save, and say what happened."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--length", type=int, default=448, help="tokens of a sequence")
    parser.add_argument("--batch-size", type=int, default=2)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--alpha", type=float, default=32)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--targets", nargs="+", default=["q_proj", "k_proj", "v_proj", "o_proj"])
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()

    torch.manual_seed(options.seed)
    accelerator = Accelerator(cpu=not torch.accelerator.is_available())
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    rows = sequences(documents(options.text), tokenizer, length=options.length)
    kept = max(1, int(len(rows) * HELD_OUT))
    held_out = rows[-kept:].to(accelerator.device)
    base = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
    words = {"r": options.rank, "lora_alpha": options.alpha, "lora_dropout": options.dropout}
    model = get_peft_model(
        base, LoraConfig(task_type="CAUSAL_LM", target_modules=options.targets, **words)
    )
    optimizer = torch.optim.AdamW(
        (each for each in model.parameters() if each.requires_grad), lr=options.learning_rate
    )
    order = torch.Generator().manual_seed(options.seed)
    loader = DataLoader(rows[:-kept], batch_size=options.batch_size, shuffle=True, generator=order)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    before, begin, done = judged(model, held_out, options.batch_size), time.perf_counter(), 0
    while done < options.steps:
        for batch in loader:
            accelerator.backward(loss_of(model, batch)[0])
            optimizer.step()
            optimizer.zero_grad()
            done += 1
            if done == options.steps:
                break
    seconds = time.perf_counter() - begin
    after = judged(model, held_out, options.batch_size)
    if accelerator.is_main_process:
        accelerator.unwrap_model(model).save_pretrained(options.output)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        print(
            json.dumps(
                {
                    "before": before,
                    "after": after,
                    "steps": done,
                    "seconds": seconds,
                    "peak_bytes": peak,
                }
            )
        )


if __name__ == "__main__":
    main()
