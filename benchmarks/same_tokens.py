"""How often each way to run an artifact chooses the token of the reference backend in float32, of 2,048 tokens of Python.

python benchmarks/same_tokens.py artifacts/runtime/example/*-head-W8A16        README.md says what is run
"""

import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from _report import table
from torch import Tensor
from transformers import AutoTokenizer

from quantflow.runtime.load import load

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "tiny-llama"
ROWS, LENGTH = 8, 256
WAYS = (
    ("lean", "reference", torch.float32),
    ("lean", "auto", torch.float32),
    ("lean", "auto", torch.bfloat16),
    ("lean", "w4a16_int8,auto", torch.float32),
    ("transformers", "reference", torch.bfloat16),
)


def main(arguments: Sequence[str]) -> int:
    """Print a row for each artifact of the example model and each way that can run it."""
    text = "".join((EXAMPLE / name).read_text() for name in ("train.py", "plant_outliers.py"))
    tokens = torch.tensor(AutoTokenizer.from_pretrained(EXAMPLE)(text)["input_ids"][: ROWS * LENGTH]).view(ROWS, LENGTH)
    rows = []
    for folder in map(Path, arguments):
        expected = [
            chosen(folder, tokens, decoder=decoder, backend="reference", dtype=torch.float32)
            for decoder in ("transformers", "lean")
        ]
        for decoder, backend, dtype in WAYS:
            if "int8" not in backend or folder.name.startswith("W4A16"):
                found = chosen(folder, tokens, decoder=decoder, backend=backend, dtype=dtype)
                same = [f"{(found == each).float().mean().item():.2%}" for each in expected]
                rows.append((folder.name, decoder, backend, str(dtype).removeprefix("torch."), *same))
    print(table(("artifact", "decoder", "backend", "dtype", "as transformers' modules", "as the lean decoder"), rows))
    return 0


def chosen(folder: Path, tokens: Tensor, *, decoder: str, backend: str, dtype: torch.dtype) -> Tensor:
    """Return the most likely token after each position, int64 [B, T]."""
    made = load(folder, decoder=decoder, backend=backend, dtype=dtype, verify=False).decoder
    made.begin(rows=len(tokens), capacity=tokens.shape[1])
    return made.forward(tokens, last_only=False).argmax(dim=-1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
