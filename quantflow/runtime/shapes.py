"""The shapes that a model runs in, where each costs a compilation: settings and their arithmetic.

A Gaudi captures a graph of every shape, and torch.compile compiles one. Prompts and batches of all
sizes then cost minutes, so they are padded to few sizes. On a CPU without torch.compile nothing is
gained. The records are plain: a command line knows them without torch.
"""

from dataclasses import dataclass
from typing import Any

from quantflow.errors import UsageError
from quantflow.settings import check_numbers, setting

VERBS = ("generate", "bench")


def round_up(count: int, multiple: int) -> int:
    """The least multiple that is no smaller than `count`."""
    return -(-count // multiple) * multiple


@dataclass(frozen=True, kw_only=True)
class Shapes:
    """Shapes of prompts and of the KV cache of transformers' modules.

    Attributes:
        static: the cache has room for the whole text from the start.
        bucket_size: columns that the cache grows by; with `internal`, of which attention reads a
            multiple. None: it has its whole length.
        internal: the cache has its whole length, and attention reads the begin of it.
        reduce_recompile: prompts are padded on the CPU to a multiple of `bucket_size`, so that the
            device sees few lengths.
    """

    static: bool = setting(
        False,
        "--static-shapes",
        verbs=VERBS,
        help="Run transformers' modules over a cache that has its whole length from the start: a "
        "shape for the prompt, and one for all steps.",
    )
    bucket_size: int | None = setting(
        None,
        "--bucket-size",
        metavar="N",
        least=1,
        verbs=VERBS,
        help="Run transformers' modules over a cache that grows by N tokens at a time.",
    )
    internal: bool = setting(
        False,
        "--bucket-internal",
        verbs=VERBS,
        help="With --bucket-size: the cache has its whole length, of which attention reads a "
        "multiple of N tokens.",
    )
    reduce_recompile: bool = setting(
        False,
        "--reduce-recompile",
        verbs=VERBS,
        help="With --bucket-size: pad prompts on the CPU to a multiple of N tokens.",
    )

    def __post_init__(self) -> None:
        """Refuse settings that do not go together.

        Raises:
            UsageError: naming them.
        """
        check_numbers(self)
        for name in ("internal", "reduce_recompile"):
            if getattr(self, name) and self.bucket_size is None:
                flag = "bucket_internal" if name == "internal" else name
                raise UsageError(f"{flag} without bucket_size", "give --bucket-size, such as 128")
        if self.static and self.bucket_size is not None and not self.internal:
            raise UsageError(
                "static_shapes with bucket_size: the cache would not have its whole length",
                "leave one of them out, or give --bucket-internal",
            )

    @property
    def fixed(self) -> bool:
        """Whether anything was asked for."""
        return self.static or self.bucket_size is not None

    def padding(self, length: int) -> int:
        """Columns of padding before a prompt of `length` columns."""
        if not self.reduce_recompile or self.bucket_size is None:
            return 0
        return round_up(length, self.bucket_size) - length

    def allocated(self, length: int, capacity: int) -> int:
        """Columns of the cache of a text of `length` that may grow to `capacity`."""
        if self.bucket_size is None:
            return capacity
        return round_up(capacity if self.internal else length, self.bucket_size)

    def read(self, length: int, capacity: int) -> int:
        """Columns of the cache that attention reads at a length of `length`."""
        if self.bucket_size is None:
            return capacity
        return round_up(length, self.bucket_size)


NO_SHAPES = Shapes()


def shapes_of(decoder: Any) -> dict[str, Any] | None:
    """Shapes that a decoder has run in, as plain data; None where they were not fixed.

    `forwards` has rows, tokens, columns that attention read, columns of the cache, and the number
    of forwards; `cache_lengths` the columns that the cache had; `compilations` the graphs that
    torch.compile made, None without it.
    """
    counts = getattr(decoder, "shapes", None)
    if counts is None:
        return None
    compilations = decoder.compilations
    return {
        "forwards": [[*shape, count] for shape, count in counts.items()],
        "cache_lengths": list(decoder.cache_lengths),
        "compilations": None if compilations is None else compilations(),
    }


def shapes_line(shapes: dict[str, Any]) -> str:
    """The numbers of `shapes_of` in words."""
    lengths, compiled = len(shapes["cache_lengths"]), shapes["compilations"]
    line = f"{len(shapes['forwards'])} shapes were run, over a cache of {lengths} lengths"
    return line if compiled is None else f"{line}; torch.compile made {compiled} graphs"
