"""llama.cpp's base of a KL divergence, written from a model that runs layer by layer."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from torch import Tensor

from quantflow.core.device import Device
from quantflow.formats.llama_cpp.logits_base import LogitsBase, open_logits_base, writing_base
from quantflow.models.tokenizer import load_tokenizer
from quantflow.numerics.divergence import Comparison
from quantflow.validating.layerwise import BASELINE, Comparing, Judge

# (token ids of chunks, what becomes of their logits) -> the run of the source alone
Running = Callable[[Sequence[Tensor], Judge], Comparing]


def leading_bos(folder: Path) -> int | None:
    """The token that a model's tokenizer puts before a text; None where it puts none."""
    tokenizer = load_tokenizer(folder)
    before = list(tokenizer("a", verbose=False)["input_ids"])
    bos = tokenizer.bos_token_id
    return int(bos) if bos is not None and before[:1] == [bos] else None


def write_base(
    path: Path,
    tokens: Tensor,
    *,
    vocabulary: int,
    bos: int | None,
    device: Device,
    running: Running,
) -> LogitsBase:
    """Run the source over the chunks of a text, write its base, and open it.

    Args:
        path: the file; one that is there is replaced.
        tokens: [N, C] int64, as the text has them.
        vocabulary: tokens that the source's head knows.
        bos: token in the place of each chunk's first; None for none.
        device: where the source runs.
        running: the run.
    """
    sequences = LogitsBase(path=path, tokens=tokens, vocabulary=vocabulary).sequences(bos)
    with writing_base(path, tokens, vocabulary) as writer:

        def written(chunk: int, logits: dict[str, Tensor]) -> Mapping[str, Comparison]:
            writer.write(chunk, device.fetch(logits[BASELINE]))
            return {}

        running(sequences, written).scores()
    return open_logits_base(path)
