"""Calibration and evaluation text: from a file to token sequences, in an order that a seed decides.

    .txt           UTF-8, documents separated by blank lines
    .jsonl         one JSON object per line, whose columns rows.py reads: `text`, `messages` and
                   others
    .safetensors   `tokens` and `lengths`, both 1-D, or `input_ids`, 2-D
    a folder       its .txt files, in the order of their names

Token ids in a file are taken as they are; text gets BOS and EOS as the tokenizer puts them. Nothing
is padded.

A line that cannot be read is left out and counted, unless more than LEFT_OUT lines and one in a
hundred are such, or half of all: then the first of them is refused by name.
"""

import hashlib
import random
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from quantflow.errors import InputError, UsageError
from quantflow.files.canonical import parse_json
from quantflow.files.folder import reading
from quantflow.measuring.rows import checked, document_of, needed
from quantflow.models.reading import read_file
from quantflow.models.token_ids import tokens_of

MIN_TOKENS = 2  # a shorter document predicts nothing
SUFFIXES = (".txt", ".jsonl", ".safetensors")
LEFT_OUT = 10  # lines that may be left out whatever the size of the file


@dataclass(frozen=True, kw_only=True)
class Text:
    """A text as token ids.

    Attributes:
        documents: token ids of each document; BOS and EOS as the tokenizer puts them, nothing
            truncated.
        left_out: lines that could not be read.
        note: a sentence on these lines, which names the first; None where there is none.
    """

    documents: list[list[int]]
    left_out: int = 0
    note: str | None = None


def read_documents(path: str | Path, tokenizer: PreTrainedTokenizerBase | None) -> list[list[int]]:
    """The documents of a text, where nobody is told of lines that are left out; see `read_text`."""
    return read_text(path, tokenizer).documents


def read_text(path: str | Path, tokenizer: PreTrainedTokenizerBase | None) -> Text:
    """Read a text.

    Args:
        path: a .txt, .jsonl or .safetensors file, or a folder of .txt files.
        tokenizer: the model's; may be None where the file holds token ids, whose range is then not
            checked here.

    Raises:
        InputError: an unreadable, empty or malformed file, or a token id outside the tokenizer's
            vocabulary; too many lines that cannot be read.
    """
    path = Path(path)
    if path.is_dir():
        files = sorted(path.rglob("*.txt"))
        if not files:
            raise InputError(
                f"{path}: a folder without .txt files", "give a folder of .txt files, or a file"
            )
        documents = [part for file in files for part in _read_text(file, tokenizer).documents]
        text = Text(documents=documents)
    else:
        readers = dict(zip(SUFFIXES, (_read_text, _read_lines, _read_tokens), strict=True))
        if path.suffix not in readers:
            raise InputError(
                f"{path}: suffix {path.suffix!r} is not known", f"use one of {', '.join(readers)}"
            )
        text = readers[path.suffix](path, tokenizer)
    if not any(text.documents):
        raise InputError(f"{path}: holds no document", "give a file with text in it")
    return text


def read_whole(path: Path, tokenizer: PreTrainedTokenizerBase | None) -> list[list[int]]:
    """The token ids of a text as llama.cpp reads it: a .txt file is one document.

    Other files have the documents of `read_text`.

    Raises:
        InputError: as `read_text`.
    """
    if path.suffix != ".txt" or path.is_dir():
        return [list(document) for document in read_text(path, tokenizer).documents]
    text = _decoded(path).removesuffix("\n")
    return [tokens_of(needed(tokenizer, path), text, where=str(path))]


def select(
    documents: Sequence[Sequence[int]],
    samples: int,
    *,
    sequence_length: int,
    seed: int | None,
    pack: bool = False,
) -> list[Tensor]:
    """Choose calibration sequences.

    Documents of fewer than two tokens are dropped, the rest shuffled. Without `pack` each becomes
    one sequence, cut at `sequence_length`; with it they are joined and cut into equal sequences,
    and the incomplete last one is dropped unless it is the only one.

    Args:
        documents: token ids of each document.
        samples: largest number of sequences; fewer documents give fewer sequences.
        sequence_length: largest number of tokens of a sequence.
        seed: seed of the shuffle; the same seed gives the same sequences. None keeps the order.
        pack: join documents.

    Returns:
        Sequences, int64 [S] with 2 <= S <= sequence_length.

    Raises:
        UsageError: samples < 1 or sequence_length < 2.
        InputError: no document has two tokens.
    """
    if samples < 1:
        raise UsageError(f"samples={samples}, at least 1 is needed", "ask for more samples")
    if sequence_length < MIN_TOKENS:
        raise UsageError(
            f"sequence_length={sequence_length}, at least {MIN_TOKENS} is needed",
            "ask for more tokens",
        )
    usable = [list(document) for document in documents if len(document) >= MIN_TOKENS]
    if not usable:
        longest = max((len(document) for document in documents), default=0)
        raise InputError(
            f"calibration text: {len(documents)} documents of at most {longest} token, "
            f"{MIN_TOKENS} tokens are needed",
            "give longer documents",
        )
    if seed is not None:
        random.Random(seed).shuffle(usable)
    if pack:
        usable = _packed(usable, sequence_length)
    return [
        torch.tensor(document[:sequence_length], dtype=torch.int64) for document in usable[:samples]
    ]


def hash_sequences(sequences: Sequence[Tensor]) -> str:
    """The sha256 of token sequences, their lengths and their order; 64 hexadecimal digits."""
    digest = hashlib.sha256()
    for sequence in sequences:
        digest.update(len(sequence).to_bytes(8, "little"))
        digest.update(_token_bytes(sequence))
    return digest.hexdigest()


def inspect_calibration(
    documents: Sequence[Sequence[int]], tokenizer: PreTrainedTokenizerBase, *, sequence_length: int
) -> dict[str, Any]:
    """Counts that describe documents as calibration text.

    Args:
        documents: token ids of each document.
        tokenizer: tokenizer with the padding and BOS tokens.
        sequence_length: length at which documents would be cut.

    Returns:
        documents, tokens, shortest, longest, padding (tokens), bos (number of documents that begin
        with 0, 1, and 2 or more of it), duplicates (documents equal to an earlier one), too_short
        (fewer than two tokens), truncated {documents, tokens}.
    """
    lengths = [len(document) for document in documents]
    bos = Counter(_leading(document, tokenizer.bos_token_id) for document in documents)
    # Some tokenizers pad with EOS; a document's own EOS is not padding.
    pads = tokenizer.pad_token_id is not None and tokenizer.pad_token_id != tokenizer.eos_token_id
    return {
        "documents": len(lengths),
        "tokens": sum(lengths),
        "shortest": min(lengths, default=0),
        "longest": max(lengths, default=0),
        "padding": sum(list(document).count(tokenizer.pad_token_id) for document in documents)
        if pads
        else 0,
        "bos": {str(count): bos[count] for count in (0, 1, 2)},
        "duplicates": len(lengths) - len({tuple(document) for document in documents}),
        "too_short": sum(length < MIN_TOKENS for length in lengths),
        "truncated": {
            "documents": sum(length > sequence_length for length in lengths),
            "tokens": sum(max(0, length - sequence_length) for length in lengths),
        },
    }


def _read_text(path: Path, tokenizer: PreTrainedTokenizerBase | None) -> Text:
    tokenizer = needed(tokenizer, path)
    parts = re.split(r"\n[ \t]*\n\s*", _decoded(path).replace("\r\n", "\n"))
    where = str(path)
    return Text(
        documents=[
            tokens_of(tokenizer, part.strip("\n"), where=where) for part in parts if part.strip()
        ]
    )


def _read_lines(path: Path, tokenizer: PreTrainedTokenizerBase | None) -> Text:
    # Only "\n" ends a line: JSON strings may hold the other separators that str.splitlines knows.
    numbered = enumerate(_decoded(path).split("\n"), start=1)
    lines = [(number, line) for number, line in numbered if line.strip()]
    limit = max(LEFT_OUT, len(lines) // 100)
    documents: list[list[int]] = []
    bad: list[InputError] = []
    for count, (number, line) in enumerate(lines, start=1):
        where = f"{path}: line {number}"
        try:
            documents.append(document_of(parse_json(line.encode(), where), where, tokenizer))
        except InputError as error:
            bad.append(error)
        if len(bad) > limit or (count == len(lines) and 2 * len(bad) >= count):
            first = bad[0]
            more = f" ({len(bad)} of {count:,} lines cannot be read)" if bad[1:] else ""
            raise InputError(f"{first.cause}{more}", first.remedy) from first
    if not bad:
        return Text(documents=documents)
    note = f"{len(bad):,} of {len(lines):,} lines cannot be read and are left out, the first is "
    return Text(documents=documents, left_out=len(bad), note=note + bad[0].cause)


def _read_tokens(path: Path, tokenizer: PreTrainedTokenizerBase | None) -> Text:
    tensors = read_file(path)
    for name, tensor in tensors.items():
        if tensor.is_floating_point() or tensor.dtype == torch.bool:
            raise InputError(
                f"{path}: {name} is {tensor.dtype}, token ids are integers", "store int64"
            )
    rows = enumerate(_rows(path, tensors))
    return Text(
        documents=[checked(row, f"{path}: document {number}", tokenizer) for number, row in rows]
    )


def _rows(path: Path, tensors: Mapping[str, Tensor]) -> list[list[int]]:
    if set(tensors) == {"input_ids"} and tensors["input_ids"].ndim == 2:
        rows: list[list[int]] = tensors["input_ids"].tolist()
        return rows
    # `indices` is what a measurement keeps beside its tokens; the order of the documents is that of
    # `lengths`.
    if set(tensors) - {"indices"} != {"tokens", "lengths"} or {
        tensors["tokens"].ndim,
        tensors["lengths"].ndim,
    } != {1}:
        shapes = {name: list(tensor.shape) for name, tensor in tensors.items()}
        raise InputError(
            f"{path}: holds {shapes}", "store `tokens` [T] and `lengths` [n], or `input_ids` [n, S]"
        )
    lengths: list[int] = tensors["lengths"].tolist()
    if min(lengths, default=0) < 0 or sum(lengths) != len(tensors["tokens"]):
        raise InputError(
            f"{path}: lengths add up to {sum(lengths)} (smallest {min(lengths, default=0)}), "
            f"tokens holds {len(tensors['tokens'])}",
            "write the file again",
        )
    tokens: list[int] = tensors["tokens"].tolist()
    return [
        tokens[end - length : end] for length, end in zip(lengths, accumulate(lengths), strict=True)
    ]


def _decoded(path: Path) -> str:
    with reading(path) as file:
        data = file.read()
    try:
        return data.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        raise InputError(
            f"{path}: not UTF-8 at byte {error.start}", "convert the file to UTF-8"
        ) from error


def _packed(documents: list[list[int]], sequence_length: int) -> list[list[int]]:
    joined = [token for document in documents for token in document]
    parts = [
        joined[start : start + sequence_length] for start in range(0, len(joined), sequence_length)
    ]
    return [part for part in parts if len(part) == sequence_length] or parts


def _leading(document: Sequence[int], token: int | None) -> int:
    """The number of repetitions of `token` at the beginning, 2 at most."""
    return sum(
        1 for count in (1, 2) if token is not None and list(document[:count]) == [token] * count
    )


def _token_bytes(sequence: Tensor) -> bytes:
    return sequence.to(torch.int64).numpy().astype("<i8").tobytes()
