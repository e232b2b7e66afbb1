"""A layer that predicts further tokens (MTP), trained for the example model, and its acceptance.

    python benchmarks/mtp_draft.py

The layer is that of DeepSeek V3 (DeepSeek-AI 2024, arXiv:2412.19437, section 2.2): the embedding of
the next token and the model's last hidden state, each through a norm, side by side through a
linear, then one decoder layer and a norm; embedding and head are the model's own. It begins as the
model's last layer over the hidden state and is trained on the example's own text to say the token
after the next, while the model stays as it is. It is written beyond the last layer, with the names
of the released checkpoint, and the model is quantized to W4A16, with the layer kept and quantized.

Printed for the model and for each artifact: the guesses that the model takes, along held-out text
and in text that it generates greedily from held-out prompts, the forwards that this takes, and
whether the tokens are those without the layer. Uses one thread.
"""

import argparse
import copy
import json
import math
import subprocess
import sys
import time
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from quantflow.runtime.decoding import Counts, Further, generate
from quantflow.runtime.load import Loaded, load
from quantflow.runtime.mtp import AheadLayer
from quantflow.runtime.timed_decoder import Timed
from quantflow.validating.ahead import acceptance

ROOT = Path(__file__).resolve().parents[1]
EXAMPLE = ROOT / "examples/tiny-llama"
sys.path.insert(0, str(EXAMPLE))
import stdlib_text  # noqa: E402

SEQUENCE, BATCH, PROMPT, NEW = 512, 2, 48, 64


class Ahead(nn.Module):
    """The layer that is trained; its parameters have the names of DeepSeek V3's checkpoint."""

    def __init__(self, model: LlamaForCausalLM) -> None:
        """Begin as the model's last layer over the hidden state."""
        super().__init__()
        norm, width = model.model.norm, model.config.hidden_size
        self.enorm, self.hnorm = copy.deepcopy(norm), copy.deepcopy(norm)
        for each in (self.enorm, self.hnorm):
            nn.init.ones_(each.weight)
        self.eh_proj = nn.Linear(2 * width, width, bias=False)
        with torch.no_grad():
            self.eh_proj.weight.copy_(torch.cat([torch.eye(width) / 2, torch.eye(width)], dim=1))
        self.block = copy.deepcopy(model.model.layers[-1])
        self.norm = copy.deepcopy(norm)

    def forward(self, model: LlamaForCausalLM, tokens: Tensor, hidden: Tensor) -> Tensor:
        """The logits [B, S, V] of what follows tokens [B, S]; hidden [B, S, H] is before each."""
        parts = [self.enorm(model.model.embed_tokens(tokens)), self.hnorm(hidden)]
        x = self.eh_proj(torch.cat(parts, dim=-1))
        places = torch.arange(tokens.shape[1])[None]
        rotary = model.model.rotary_emb(x, places)
        mask = torch.full((tokens.shape[1],) * 2, -torch.inf).triu(1)[None, None]
        x = self.block(x, attention_mask=mask, position_embeddings=rotary, position_ids=places)
        return model.lm_head(self.norm(x))

    def released(self, layer: int) -> dict[str, Tensor]:
        """The tensors under their released names, bfloat16."""
        names = {"norm": "shared_head.norm"}
        tensors = {}
        for name, tensor in self.state_dict().items():
            own, _, part = name.rpartition(".")
            own = names.get(own, own).removeprefix("block.")
            tensors[f"model.layers.{layer}.{own}.{part}"] = tensor.bfloat16().contiguous()
        return tensors


def train(model: LlamaForCausalLM, tokens: Tensor, *, steps: int, peak: float) -> Ahead:
    """The layer after so many steps; `tokens` is the text, [T]."""
    ahead, generator = Ahead(model), torch.Generator().manual_seed(0)
    optimizer = torch.optim.AdamW(ahead.parameters(), lr=peak, betas=(0.9, 0.95))
    begin, smooth = time.monotonic(), math.log(model.config.vocab_size)
    for step in range(1, steps + 1):
        starts = torch.randint(len(tokens) - SEQUENCE, (BATCH,), generator=generator).tolist()
        batch = torch.stack([tokens[start : start + SEQUENCE] for start in starts])  # [B, S]
        with torch.no_grad():
            hidden = model.model(batch).last_hidden_state
        logits = ahead(model, batch[:, 1:-1], hidden[:, :-2])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 2:].flatten())
        loss.backward()
        for group in optimizer.param_groups:
            group["lr"] = peak * min(1.0, step / 10, 2 * (1 - step / steps))
        optimizer.step()
        optimizer.zero_grad()
        smooth += 0.05 * (loss.item() - smooth)
        if step % 20 == 0:
            spent = time.monotonic() - begin
            print(f"step {step} of {steps}, {spent:.0f} s, loss {smooth:.3f} nats", flush=True)
    return ahead


def write(folder: Path, ahead: Ahead) -> None:
    """The example model with the layer, as a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    config = json.loads((EXAMPLE / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
    for path in (*EXAMPLE.glob("*token*"), EXAMPLE / "generation_config.json"):
        (folder / path.name).write_bytes(path.read_bytes())
    tensors = load_file(EXAMPLE / "model.safetensors")
    tensors |= ahead.released(int(config["num_hidden_layers"]))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def report(name: str, folder: Path, text: Tensor, prompts: list[Tensor]) -> None:
    """Print a folder's acceptance, and its forwards with and without the layer."""
    windows = list(text.split(SEQUENCE))
    along = acceptance(folder, [window[None] for window in windows], exact=True)
    print(
        f"{name}: along {len(text)} held-out tokens {along['taken']} of {along['guesses']} guesses "
        f"taken ({along['acceptance']:.1%})"
    )
    loaded = load(folder, decoder="lean", exact=True)
    plain, forwards, _ = texts(loaded, prompts, 0)
    for tokens in (1, 2, 3):
        found, fewer, counts = texts(loaded, prompts, tokens)
        print(
            f"{name}: --mtp {tokens}: {counts.taken} of {counts.proposed} guesses taken "
            f"({counts.taken / counts.proposed:.1%}), {fewer} forwards in place of {forwards}, "
            f"{sum(map(torch.equal, found, plain))} of {len(plain)} texts the same"
        )


def texts(loaded: Loaded, prompts: list[Tensor], tokens: int) -> tuple[list[Tensor], int, Counts]:
    """Greedy texts, the forwards that they took, and the guesses of `tokens` at a time."""
    decoder, counts = Timed(loaded.decoder), Counts()
    method = None
    if tokens:
        layer = AheadLayer(loaded.artifact, loaded.decoder.shared)
        method = Further(layer=layer, tokens=tokens)
    found = [
        generate(decoder, prompt[None], max_new_tokens=NEW, method=method, counts=counts)
        for prompt in prompts
    ]
    return found, decoder.summary()["forwards"], counts


def verb(*words: str | Path) -> None:
    """Run a verb of quantflow."""
    command = [sys.executable, "-m", "quantflow", *map(str, words)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def main() -> int:
    """Train, write, quantize, report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=160, help="of training, 1,024 tokens each")
    parser.add_argument("--peak", type=float, default=1e-3, help="largest learning rate")
    parser.add_argument("--work", type=Path, default=ROOT / "artifacts/mtp-draft")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(EXAMPLE)
    model = AutoModelForCausalLM.from_pretrained(EXAMPLE, dtype=torch.float32)
    model.requires_grad_(False)
    train_text, held_out = (
        torch.tensor([token for ids in tokenizer(documents)["input_ids"] for token in ids])
        for documents in (stdlib_text.documents(heldout=one) for one in (False, True))
    )
    source = arguments.work / "model"
    if not (source / "model.safetensors").exists():  # else an earlier run has trained it
        write(source, train(model, train_text, steps=arguments.steps, peak=arguments.peak))
    text = held_out[: 8 * SEQUENCE]
    prompts = [held_out[at : at + PROMPT] for at in range(9 * SEQUENCE, 17 * SEQUENCE, SEQUENCE)]
    report("model", source, text, prompts)
    measurement = arguments.work / "1-measure"
    verb("measure", source, "-o", measurement, "--for", "W4A16:gptq")
    for number, words in enumerate(([], ["--mtp", "W4A16:hqq"])):
        artifact = arguments.work / f"4-export-{number}"
        place = ("-o", arguments.work / f"2-quantize-{number}", "--export", artifact)
        words = ["--scheme", "W4A16", *words]
        verb("quantize", source, *place, "--measurement", measurement, *words)
        report(" ".join(words), artifact, text, prompts)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
