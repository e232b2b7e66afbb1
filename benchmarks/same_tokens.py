"""How often each way to run an artifact chooses the token of the reference backend in float32.

After each of 2,048 tokens of Python; and along 50 prompts of 16 of them with the 64 tokens by which
transformers' modules continue each greedily: a model is surer of its own text than of people's.

python benchmarks/same_tokens.py artifacts/runtime/example/*-head-W8A16

README.md says what is run.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from _report import table
from torch import Tensor
from transformers import AutoTokenizer

from quantflow.runtime.decoder import Decoder
from quantflow.runtime.decoding import generate
from quantflow.runtime.load import load

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "tiny-llama"
ROWS, LENGTH = 8, 256
PROMPTS, PROMPT, APART, NEW = 50, 16, 40, 64
HEADINGS = (
    "artifact",
    "decoder",
    "backend",
    "dtype",
    "as transformers' modules",
    "as the lean decoder",
    "along greedy output",
)
WAYS = (
    ("lean", "reference", torch.float32),
    ("lean", "auto", torch.float32),
    ("lean", "auto", torch.bfloat16),
    ("transformers", "reference", torch.bfloat16),
)


def main(arguments: Sequence[str]) -> int:
    """Print a row for each artifact of the example model and each way that can run it."""
    text = "".join((EXAMPLE / name).read_text() for name in ("train.py", "plant_outliers.py"))
    ids = torch.tensor(AutoTokenizer.from_pretrained(EXAMPLE)(text)["input_ids"])
    tokens = ids[: ROWS * LENGTH].view(ROWS, LENGTH)
    prompts = ids.unfold(0, PROMPT, APART)[:PROMPTS]
    rows = []
    for folder in map(Path, arguments):
        references = [opened(folder, decoder=decoder) for decoder in ("transformers", "lean")]
        expected = [chosen(reference, tokens) for reference in references]
        continued = generate(references[0], prompts, max_new_tokens=NEW)  # [PROMPTS, PROMPT + NEW]
        for decoder, backend, dtype in WAYS:
            made = opened(folder, decoder=decoder, backend=backend, dtype=dtype)
            found, along = chosen(made, tokens), chosen(made, continued[:, :-1])[:, PROMPT - 1 :]
            pairs = (*((found, each) for each in expected), (along, continued[:, PROMPT:]))
            same = [f"{(mine == its).float().mean().item():.2%}" for mine, its in pairs]
            rows.append((folder.name, decoder, backend, str(dtype).removeprefix("torch."), *same))
    print(table(HEADINGS, rows))
    return 0


def opened(
    folder: Path, *, decoder: str, backend: str = "reference", dtype: torch.dtype = torch.float32
) -> Decoder:
    """Return a way to run an artifact."""
    return load(
        folder, decoder=decoder, backend=backend, dtype=dtype, verify=False, exact=True
    ).decoder


def chosen(decoder: Decoder, tokens: Tensor) -> Tensor:
    """Return the most likely token after each position, int64 [B, T]."""
    decoder.begin(rows=len(tokens), capacity=tokens.shape[1])
    return decoder.forward(tokens, last_only=False).argmax(dim=-1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
