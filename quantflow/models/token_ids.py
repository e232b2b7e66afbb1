"""Token ids of texts, and their check against the model that reads them."""

import threading
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import lru_cache
from types import MappingProxyType

from torch import Tensor
from transformers import BatchEncoding, PreTrainedTokenizerBase

from quantflow.errors import InputError
from quantflow.models.panics import is_panic, panics_refused


def tokens_of(
    tokenizer: PreTrainedTokenizerBase, text: str, *, where: str, special: bool = True
) -> list[int]:
    """The tokens of a text.

    Args:
        tokenizer: the model's tokenizer.
        text: text of any length.
        where: name of the text, for the message.
        special: whether to add the tokens that the tokenizer puts around a text, such as BOS.

    Raises:
        InputError: the tokenizer has no token for a part of the text, and no unknown token.
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
    """The tokens of a text with the tokenizer's further output; see `tokens_of`.

    Args:
        tokenizer: the model's tokenizer.
        text: text of any length.
        where: name of the text, for the message.
        special: whether to add the tokens that the tokenizer puts around a text.
        offsets: whether to add `offset_mapping`, the begin and end of each token in the text.

    Raises:
        InputError: the tokenizer has no token for a part of the text, and no unknown token.
    """
    options = {"return_offsets_mapping": True} if offsets else {}
    cause = f"{where}: the tokenizer cannot read the text"
    remedy = "copy the tokenizer files of the model into its folder"
    # streams are the process's: only one thread, the main one, may redirect them
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


@lru_cache(maxsize=4)  # a tokenizer makes a new table of its added tokens for each question
def texts_of_special(tokenizer: PreTrainedTokenizerBase) -> Mapping[int, str]:
    """The special tokens: ids of those that a tokenizer names or flags as special, with their text.

    A text is decoded without them. A tokenizer names few of them: Llama 3 flags `<|eot_id|>` and
    names it nowhere.
    """
    added = getattr(tokenizer, "added_tokens_decoder", {})
    ids = {*tokenizer.all_special_ids, *(i for i, one in added.items() if one.special)}
    return MappingProxyType({i: str(tokenizer.convert_ids_to_tokens(i)) for i in ids})


def special_ids(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """The ids of special tokens; see `texts_of_special`."""
    return frozenset(texts_of_special(tokenizer))


def refuse_beyond(
    tokens: Sequence[Sequence[int] | Tensor], rows: int | None, *, where: str
) -> None:
    """Refuse token ids for which the model's embedding has no row.

    Its tokenizer is then another model's, or larger.

    Args:
        tokens: token ids of several texts.
        rows: rows of the embedding; None where they are not known.
        where: name of the texts, for the message.

    Raises:
        InputError: naming the largest id.
    """
    largest = max((int(max(row)) for row in tokens if len(row)), default=0)
    if rows is not None and largest >= rows:
        raise InputError(
            f"{where}: token id {largest}, the model has {rows}",
            "give the model its own tokenizer files",
        )
