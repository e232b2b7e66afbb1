"""llama.cpp's base of a KL divergence: one model's log-probabilities over one text, as a file.

`llama-perplexity --save-all-logits FILE` writes it, and `llama-perplexity --kl-divergence
--kl-divergence-base FILE` judges any model of the same vocabulary by it. Numbers are little-endian:

    bytes            content
    8                `_logits_`
    4                int32 C, tokens of a chunk
    4                int32 V, tokens of the vocabulary
    4                int32 N, chunks
    4 * N * C        int32 token ids, chunk after chunk
    rest             for each chunk a row for each of its positions C // 2 .. C - 2, which predict
                     the tokens after them:
                         float32   scale
                         float32   the least log-probability of the row
                         uint16    V codes, and one more that is 0 where V is odd:
                                   log p = scale * code + least

Chunks are consecutive, and their first half is context alone. Whoever runs a chunk puts the
tokenizer's BOS in the place of its first token, where the tokenizer adds one. The least
log-probability is at most 16 nats below the largest, so what is smaller counts as nothing.
Source: tools/perplexity/perplexity.cpp of llama.cpp.
"""

import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from quantflow.errors import InputError
from quantflow.files import disk
from quantflow.numerics.divergence import Comparison
from quantflow.numerics.perplexity import check_logits, row_blocks

MAGIC = b"_logits_"
LEAST = 16.0  # nats below the largest log-probability that a row reaches down to
_COUNTS = struct.Struct("<iii")
_STEPS = 65535.0
_HEAD = 4  # uint16 of a row before its codes: two float32
_MOST_TOKENS = 1 << 31


def is_logits_base(path: Path) -> bool:
    """Whether a file begins as such a base."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(len(MAGIC)) == MAGIC


@dataclass(frozen=True, kw_only=True)
class LogitsBase:
    """A base on disk; a row is read when it is asked for.

    Attributes:
        path: the file.
        tokens: [N, C] int64, as the file has them.
        vocabulary: V.
    """

    path: Path
    tokens: Tensor
    vocabulary: int

    @property
    def first(self) -> int:
        """The first position of a chunk that is scored."""
        return int(self.tokens.shape[1]) // 2

    @property
    def rows(self) -> int:
        """Scored positions of a chunk."""
        return int(self.tokens.shape[1]) - 1 - self.first

    def sequences(self, bos: int | None) -> list[Tensor]:
        """The chunks as a model runs them, [C] int64 each.

        Args:
            bos: token that takes the place of each first one; None where the tokenizer adds none.
        """
        chunks = self.tokens.clone()
        if bos is not None:
            chunks[:, 0] = bos
        return list(chunks)

    def log_probabilities(self, chunk: int) -> Tensor:
        """The rows of a chunk, [rows, V] float32."""
        width = _width(self.vocabulary)
        size = self.rows * width
        with self.path.open("rb") as file:
            file.seek(_rows_begin(self.tokens.shape) + chunk * size * 2)
            raw = np.fromfile(file, dtype="<u2", count=size).reshape(self.rows, width)
        scale, least = (
            torch.from_numpy(part.copy())
            for part in np.ascontiguousarray(raw[:, :_HEAD]).view("<f4").T
        )
        codes = torch.from_numpy(raw[:, _HEAD : _HEAD + self.vocabulary].astype(np.float32))
        return codes.mul_(scale[:, None]).add_(least[:, None])

    def compare(self, chunk: int, logits: Mapping[str, Tensor]) -> dict[str, Comparison]:
        """Models' logits of one chunk beside the base, by llama.cpp's own formulas.

        KL sums the base's tokens above `LEAST` nats; it may be a little below zero, since the
        base is rounded.

        Args:
            chunk: its number.
            logits: name -> [C, V].

        Raises:
            InputError: a vocabulary differs, or `check_logits` refuses the logits.
        """
        log_p = self.log_probabilities(chunk)
        following = self.tokens[chunk, self.first + 1 :]  # [rows]
        found = {}
        for name, each in logits.items():
            check_logits(each, self.tokens[chunk], name=name)
            if each.shape[1] != self.vocabulary:
                raise InputError(
                    f"{name}: a vocabulary of {each.shape[1]}, {self.path} has {self.vocabulary}",
                    "compare it with a base that was written from its own source",
                )
            found[name] = _compared(log_p, each[self.first : -1].float(), following)
        return found


def _compared(log_p: Tensor, logits: Tensor, following: Tensor) -> Comparison:
    """The rows of a chunk; log_p and logits are [T, V], `following` the tokens that came, [T]."""
    klds, alike = [], []
    for rows in row_blocks(log_p):
        base, log_q = log_p[rows], logits[rows].log_softmax(dim=-1)
        terms = (base - log_q).mul_(base.exp()).masked_fill_(base <= -LEAST, 0)
        klds.append(terms.sum(dim=-1, dtype=torch.float64))
        alike.append(base.argmax(dim=-1) == log_q.argmax(dim=-1))
    nll = torch.logsumexp(logits, dim=-1) - logits.gather(1, following[:, None])[:, 0]
    return Comparison(
        lengths=torch.tensor([len(following)]),
        kld=torch.cat(klds),
        agreement=torch.cat(alike),
        nll_baseline=-log_p.gather(1, following[:, None])[:, 0].double(),
        nll_candidate=nll.double(),
    )


def open_logits_base(path: Path) -> LogitsBase:
    """Open a base and check that its size is what its head says.

    Raises:
        InputError: another kind of file, one that is cut, or token ids beyond the vocabulary.
    """
    again = "write it again with `quantflow compare --write-base` or llama-perplexity"
    with path.open("rb") as file:
        head = file.read(len(MAGIC) + _COUNTS.size)
        if head[: len(MAGIC)] != MAGIC or len(head) < len(MAGIC) + _COUNTS.size:
            raise InputError(f"{path}: no base of a KL divergence, or one that is cut", again)
        size, vocabulary, chunks = _COUNTS.unpack(head[len(MAGIC) :])
        if size < 4 or vocabulary < 2 or chunks < 1 or size * chunks >= _MOST_TOKENS:
            raise InputError(
                f"{path}: {chunks} chunks of {size} tokens, a vocabulary of {vocabulary}", again
            )
        need = _rows_begin((chunks, size)) + chunks * (size - 1 - size // 2) * 2 * _width(
            vocabulary
        )
        there = path.stat().st_size
        if there != need:
            raise InputError(f"{path}: {there:,} bytes, its head asks for {need:,}", again)
        ids = np.fromfile(file, dtype="<i4", count=chunks * size).reshape(chunks, size)
    if ids.min() < 0 or ids.max() >= vocabulary:
        raise InputError(f"{path}: token ids outside of 0..{vocabulary - 1}", again)
    return LogitsBase(
        path=path, tokens=torch.from_numpy(ids.astype(np.int64)), vocabulary=vocabulary
    )


@dataclass(frozen=True, kw_only=True)
class BaseWriter:
    """A base that is written; chunks may come in any order and from several threads.

    Attributes:
        descriptor: the open file.
        shape: (N, C).
        vocabulary: V.
    """

    descriptor: int
    shape: tuple[int, int]
    vocabulary: int

    def write(self, chunk: int, logits: Tensor) -> None:
        """Write the rows of a chunk.

        Args:
            chunk: its number.
            logits: [C, V] float32, of the chunk as a model runs it.
        """
        first = self.shape[1] // 2
        rows = encoded(logits[first:-1])
        disk.pwrite_all(
            self.descriptor, rows.tobytes(), _rows_begin(self.shape) + chunk * rows.nbytes
        )


@contextmanager
def writing_base(path: Path, tokens: Tensor, vocabulary: int) -> Iterator[BaseWriter]:
    """Yield the writer of a base; the file appears whole, when the block ends well.

    Args:
        path: the file; one that is there is replaced.
        tokens: [N, C] int64, as the text has them.
        vocabulary: V.
    """
    chunks, size = tokens.shape
    temporary = disk.temporary_for(path)
    descriptor = disk.create(temporary)
    try:
        with disk.naming(path):
            disk.write_all(descriptor, MAGIC + _COUNTS.pack(size, vocabulary, chunks))
            disk.write_all(descriptor, tokens.numpy().astype("<i4").tobytes())
            yield BaseWriter(descriptor=descriptor, shape=(chunks, size), vocabulary=vocabulary)
            os.fsync(descriptor)
        disk.replace(temporary, path)
    finally:
        os.close(descriptor)
        disk.remove(temporary)


def encoded(logits: Tensor) -> np.ndarray[tuple[int, int], np.dtype[np.uint16]]:
    """Rows of logits as the file has them, [T, width] uint16.

    Args:
        logits: [T, V] float32.
    """
    logits = logits.float()
    count, vocabulary = logits.shape
    largest = logits.amax(dim=-1)
    least = torch.maximum(logits.amin(dim=-1), largest - LEAST)
    total = (logits - largest[:, None]).exp().sum(dim=-1, dtype=torch.float64).log().float()
    scale = (largest - least) / _STEPS
    codes = ((logits - least[:, None]) * (1 / scale)[:, None]).round().clamp_(0, _STEPS)
    codes[scale == 0] = 0
    rows = np.zeros((count, _width(vocabulary)), dtype="<u2")
    head = torch.stack([scale, least - largest - total], dim=1).numpy().astype("<f4")
    rows[:, :_HEAD] = head.view("<u2")
    rows[:, _HEAD : _HEAD + vocabulary] = codes.numpy().astype("<u2")
    return rows


def chunks_of(documents: Sequence[Sequence[int]], *, length: int, tokens: int) -> Tensor:
    """A text in consecutive chunks, [N, C] int64; the rest that fills none is left out.

    Args:
        documents: token ids; they follow each other.
        length: C.
        tokens: at most so many.

    Raises:
        InputError: the text fills fewer than two chunks, which bounds need.
    """
    ids = [token for document in documents for token in document][:tokens]
    count = len(ids) // length
    if count < 2:
        raise InputError(
            f"the text: {len(ids)} tokens fill {count} chunks of {length}, 2 are needed",
            "give a longer --text, more --tokens or a smaller --sequence-length",
        )
    return torch.tensor(ids[: count * length], dtype=torch.int64).view(count, length)


def _width(vocabulary: int) -> int:
    """uint16 of a row."""
    return 2 * ((vocabulary + 1) // 2) + _HEAD


def _rows_begin(shape: Sequence[int]) -> int:
    """The offset of the first row in the file."""
    return len(MAGIC) + _COUNTS.size + 4 * shape[0] * shape[1]
