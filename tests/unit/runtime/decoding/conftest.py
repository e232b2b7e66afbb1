"""The embedded model, in float32, and prompts of its own tokens."""

from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

ROOT = Path(__file__).resolve().parents[4]
PAD = 2  # not 0: transformers takes a pad of 0 for none and fills ended beams with the end token
TEXTS = [
    "import os\nimport sys\n\ndef main():",
    "class Stack:\n    def",
    'if __name__ == "__main__":\n    for',
    "return self.",
]


def left_padded(rows: list[list[int]], *, pad: int = PAD) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids [B, S] and padding [B]."""
    longest = max(map(len, rows))
    padding = torch.tensor([longest - len(row) for row in rows])
    return torch.tensor([[pad] * (longest - len(row)) + row for row in rows]), padding


@pytest.fixture(scope="session")
def tiny() -> PreTrainedModel:
    """Return examples/tiny-llama."""
    return AutoModelForCausalLM.from_pretrained(
        ROOT / "examples/tiny-llama", dtype=torch.float32
    ).eval()


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerBase:
    """Return its tokenizer."""
    return AutoTokenizer.from_pretrained(ROOT / "examples/tiny-llama")


@pytest.fixture(scope="session")
def rows(tokenizer) -> list[list[int]]:
    """Return prompts of different lengths."""
    return [tokenizer(text)["input_ids"] for text in TEXTS]


@pytest.fixture(scope="session")
def batch(rows) -> tuple[torch.Tensor, torch.Tensor]:
    """Return them as one batch, and its padding."""
    return left_padded(rows)


@pytest.fixture(scope="session")
def peer(tiny):
    """Return transformers' own generate, for a batch and its padding."""

    def run(ids, padding=None, **options):
        mask = (
            torch.ones_like(ids)
            if padding is None
            else (torch.arange(ids.shape[1]) >= padding[:, None]).long()
        )
        options = {"do_sample": False, "pad_token_id": PAD, "eos_token_id": None} | options
        tiny.generation_config.eos_token_id = None
        return tiny.generate(ids, attention_mask=mask, **options)

    return run


class Chain:
    """A decoder whose next token and hidden state depend on the last token alone."""

    positions, device = None, torch.device("cpu")

    def __init__(
        self, table: dict[int, dict[int, float]], states: list[list[float]] | None = None
    ) -> None:
        """Take the probabilities of each token's successors, and a state of every token."""
        self.vocab_size = 1 + max(token for row in table.values() for token in (*row, *table))
        self._logits = torch.full((self.vocab_size, self.vocab_size), -torch.inf)
        for token, row in table.items():
            for following, probability in row.items():
                self._logits[token, following] = torch.tensor(probability).log()
        self._states = torch.tensor(states or [[1.0]] * self.vocab_size)

    def begin(self, *, rows, capacity): ...

    def keep(self, rows): ...

    def crop(self, length): ...

    def forward(self, input_ids, *, padding=None, last_only=True):
        return self._logits[input_ids[:, -1] if last_only else input_ids]

    def forward_hidden(self, input_ids, *, padding=None):
        return self._logits[input_ids], self._states[input_ids]


@pytest.fixture(scope="session")
def chain():
    """Return `Chain`."""
    return Chain
