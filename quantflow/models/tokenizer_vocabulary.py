"""The largest token id in a tokenizer's files beside the rows of the model's embedding.

A folder whose tokenizer has more tokens than the embedding has rows can be quantized, and every
text with such a token is refused later, by whatever runs it. The files say so at once.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from quantflow.files.canonical import json_bytes
from quantflow.files.checkpoint import Checkpoint
from quantflow.models.graph import Graph
from quantflow.models.tokenizer_bounds import TOKENIZER

_ADDED = "added_tokens.json"


def beyond_embedding(checkpoint: Checkpoint, graph: Graph) -> str | None:
    """A sentence about token ids without a row of the embedding; None where all have one.

    Args:
        checkpoint: the model's folder.
        graph: graph of the model, which names the embedding.
    """
    place = checkpoint.tensors.get(f"{graph.family.embedding}.weight")
    largest = max(_ids(checkpoint.folder), default=None)
    if place is None or largest is None or largest[0] < place[1].shape[0]:
        return None
    number, token, name = largest
    return (
        f"warning: {name}: token {str(token)[:40]!r} has id {number}, {graph.family.embedding} has "
        f"{place[1].shape[0]} rows: no text with such a token can be read"
    )


def _ids(folder: Path) -> Iterator[tuple[int, str, str]]:
    """Id, text and file of the tokens; a file that is no such table has none."""
    for name in (TOKENIZER, _ADDED):
        if not (folder / name).is_file():
            continue
        try:
            table = json.loads(json_bytes(folder / name))
        except (ValueError, RecursionError):  # its reader says what is wrong
            continue
        pairs = _in_tokenizer(table) if name == TOKENIZER else _items(table)
        yield from ((number, str(token), name) for token, number in pairs if type(number) is int)


def _in_tokenizer(table: Any) -> Iterator[tuple[Any, Any]]:
    """Pairs of token and id in tokenizer.json: the model's, and those that were added."""
    model, added = (
        (table.get(key) for key in ("model", "added_tokens"))
        if isinstance(table, dict)
        else (None, None)
    )
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    yield from _items(vocabulary)
    if isinstance(vocabulary, list) and vocabulary:  # Unigram: pairs of token and score
        last = vocabulary[-1]
        yield last[0] if isinstance(last, list) and last else last, len(vocabulary) - 1
    for one in added if isinstance(added, list) else ():
        if isinstance(one, dict):
            yield one.get("content"), one.get("id")


def _items(table: Any) -> Iterator[tuple[Any, Any]]:
    yield from table.items() if isinstance(table, dict) else ()
