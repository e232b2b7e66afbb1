"""Token ids of texts, and against the model that is to read them."""

import threading
from collections.abc import Sequence
from contextlib import nullcontext

from torch import Tensor
from transformers import BatchEncoding, PreTrainedTokenizerBase

from quantflow.errors import InputError
from quantflow.models.panics import is_panic, panics_refused


def tokens_of(
    tokenizer: PreTrainedTokenizerBase, text: str, *, where: str, special: bool = True
) -> list[int]:
    """Return the tokens of a text.

    Args:
        tokenizer: of the model.
        text: of any length.
        where: the text, for the message.
        special: add the tokens that the tokenizer puts around a text, such as BOS.

    Raises:
        InputError: the tokenizer has no token for a part of the text, and none for what is unknown.
    """
    ids: list[int] = encoding_of(tokenizer, text, where=where, special=special)["input_ids"]
    return ids


def encoding_of(
    tokenizer: PreTrainedTokenizerBase,
    text: str,
    *,
    where: str,
    special: bool = True,
    offsets: bool = False,
) -> BatchEncoding:
    """Return the tokens of a text with what the tokenizer says of them; see `tokens_of`.

    Args:
        tokenizer: of the model.
        text: of any length.
        where: the text, for the message.
        special: as in `tokens_of`.
        offsets: also `offset_mapping`, where each token begins and ends in the text.
    """
    options = {"return_offsets_mapping": True} if offsets else {}
    cause, remedy = (
        f"{where}: the tokenizer cannot read the text",
        "copy the tokenizer files of the model into its folder",
    )
    # streams are the process's: one thread may turn them aside
    alone = threading.current_thread() is threading.main_thread()
    try:
        with panics_refused(cause, remedy) if alone else nullcontext():
            return tokenizer(text, add_special_tokens=special, verbose=False, **options)
    except InputError:
        raise
    except BaseException as error:  # the Rust tokenizers raise bare Exception, and panic
        if not isinstance(error, Exception) and not is_panic(error):
            raise
        raise InputError(f"{cause} ({' '.join(str(error).split())[:200]})", remedy) from error


def refuse_beyond(
    tokens: Sequence[Sequence[int] | Tensor], rows: int | None, *, where: str
) -> None:
    """Refuse token ids that the model has no row of its embedding for: its tokenizer is another model's, or larger.

    Args:
        tokens: token ids of several texts.
        rows: of the embedding; None is not known.
        where: the texts, for the message.

    Raises:
        InputError: naming the largest id.
    """
    largest = max((int(max(row)) for row in tokens if len(row)), default=0)
    if rows is not None and largest >= rows:
        raise InputError(
            f"{where}: token id {largest}, the model has {rows}",
            "give the model its own tokenizer files",
        )
