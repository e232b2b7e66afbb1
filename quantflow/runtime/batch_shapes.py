"""Shapes of a server's batches on transformers' modules: settings, arithmetic, and the warm-up.

A Gaudi captures a graph of every shape, torch.compile compiles one, and a GPU replays one. So rows
and prompts are padded to few sizes, and all of them run once before the server answers:

    steps      rows: the next multiple of `step_rows`, or the next of `graph_sizes`
    prompts    rows: the next multiple of `prompt_rows`
               length: `prompt_length`, by `pad_to`

The records are plain: a command line knows them without torch. Source of names, defaults and the
lengths of prompts: text-generation-inference 2.0 on Gaudi.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from quantflow.accelerators import GRAPHS
from quantflow.errors import UsageError
from quantflow.runtime.shapes import round_up
from quantflow.settings import check_numbers, setting

SERVE = ("serve",)
GAUDI = "hpu"
STEP_ROWS, PROMPT_ROWS, PAD_TO = 8, 4, 128  # where a Gaudi is told nothing
GRAPH_SIZES = (1, 2, 4, 8, 16, 32)  # where a GPU is told nothing
NO_PADDING = 1  # a multiple that pads nothing


def prompt_length(length: int, *, pad_to: int, longest: int) -> int:
    """Columns that prompts of `length` and less are padded to.

    One column less than a multiple of `pad_to`, so that the first new token fills the multiple. A
    prompt of the longest length has its own.

    Args:
        length: tokens of the longest prompt of the batch.
        pad_to: the multiple; 0: nothing is padded.
        longest: most tokens of a prompt.
    """
    if not pad_to or length >= longest:
        return length
    return min(round_up(length + 1, pad_to), longest) - 1


@dataclass(frozen=True, kw_only=True)
class Buckets:
    """Sizes that a server pads its batches to, as they are asked for; None: not asked for.

    Attributes:
        step_rows: multiple of the rows of a step.
        prompt_rows: multiple of the prompts that are computed together.
        pad_to: multiple of the length of prompts; 0: none.
        graph_sizes: rows of steps that a GPU captures, with commas; "0": none.
        warm_up: all shapes run before the server answers.
    """

    step_rows: int | None = setting(
        None,
        "--batch-bucket-size",
        variable="BATCH_BUCKET_SIZE",
        metavar="N",
        least=1,
        verbs=SERVE,
        help="Run transformers' modules with rows padded to a multiple of N in each step "
        f"(default: {STEP_ROWS} on hpu).",
    )
    prompt_rows: int | None = setting(
        None,
        "--prefill-batch-bucket-size",
        variable="PREFILL_BATCH_BUCKET_SIZE",
        metavar="N",
        least=1,
        verbs=SERVE,
        help=f"The same for prompts that are computed together (default: {PROMPT_ROWS} on hpu).",
    )
    pad_to: int | None = setting(
        None,
        "--pad-sequence-to-multiple-of",
        variable="PAD_SEQUENCE_TO_MULTIPLE_OF",
        metavar="N",
        least=0,
        verbs=SERVE,
        help="Pad prompts to a multiple of N tokens, less one; 0: not at all "
        f"(default: {PAD_TO} on hpu).",
    )
    graph_sizes: str | None = setting(
        None,
        "--cuda-graphs",
        variable="CUDA_GRAPHS",
        metavar="N,N",
        verbs=SERVE,
        help="Rows of the steps that are captured on cuda, to which others are padded; 0: none "
        f"(default: {','.join(map(str, GRAPH_SIZES))}).",
    )
    warm_up: bool = setting(
        True,
        "--warm-up/--no-warm-up",
        variable="WARMUP_ENABLED",
        verbs=SERVE,
        help="Run all padded shapes once before the first request.",
    )

    def __post_init__(self) -> None:
        """Refuse sizes that are none.

        Raises:
            UsageError: naming them.
        """
        check_numbers(self)
        if self.graph_sizes is not None and self.graph_sizes != "0":
            listed = re.fullmatch(
                r"\s*[1-9][0-9]{0,3}\s*(,\s*[1-9][0-9]{0,3}\s*)*", self.graph_sizes
            )
            if listed is None:
                raise UsageError(
                    f"cuda_graphs={self.graph_sizes!r}", "give numbers of rows, such as 1,2,4, or 0"
                )

    @property
    def asked(self) -> bool:
        """Whether a device that pads nothing by itself shall pad."""
        return (self.step_rows, self.prompt_rows, self.pad_to) != (None, None, None)

    def step_multiple(self, device: str) -> int:
        """The multiple of the rows of a step on a device."""
        return self.step_rows or (STEP_ROWS if device == GAUDI else NO_PADDING)

    def rules(self, device: str, *, rows: int, longest: int, prefill_tokens: int) -> "BucketRules":
        """The sizes on a device.

        Args:
            device: type of the device.
            rows: most rows that run.
            longest: most tokens of a prompt.
            prefill_tokens: most tokens of prompts that are computed together.

        Raises:
            UsageError: prompts are shorter than the multiple that they are padded to.
        """
        gaudi = device == GAUDI
        pad_to = self.pad_to if self.pad_to is not None else PAD_TO if gaudi else 0
        if self.pad_to is None:
            pad_to = min(pad_to, longest)
        elif pad_to > longest:
            raise UsageError(
                f"pad_sequence_to_multiple_of={pad_to}: prompts have {longest} tokens at most",
                "use less, or a larger --max-input-tokens",
            )
        graphs: tuple[int, ...] = ()
        if device in GRAPHS and self.step_rows is None:
            graphs = tuple(size for size in self._graphs() if size <= rows)
        return BucketRules(
            step_rows=self.step_multiple(device),
            prompt_rows=self.prompt_rows or (PROMPT_ROWS if gaudi else NO_PADDING),
            pad_to=pad_to,
            graph_sizes=graphs,
            rows=rows,
            longest=longest,
            together=max(1, min(prefill_tokens // longest, rows)),
        )

    def _graphs(self) -> tuple[int, ...]:
        """Rows of the steps that are captured, each once, in order."""
        if self.graph_sizes is None:
            return GRAPH_SIZES
        if self.graph_sizes == "0":
            return ()
        return tuple(sorted({int(size) for size in self.graph_sizes.split(",")}))


NO_BUCKETS = Buckets()


@dataclass(frozen=True, kw_only=True)
class BucketRules:
    """Sizes that batches are padded to.

    Attributes:
        step_rows, prompt_rows, pad_to: as in `Buckets`, decided.
        graph_sizes: rows of steps that are captured; empty: steps have multiples of `step_rows`.
        rows: most rows that run.
        longest: most tokens of a prompt.
        together: most prompts that are computed together.
    """

    step_rows: int
    prompt_rows: int
    pad_to: int
    graph_sizes: tuple[int, ...] = ()
    rows: int
    longest: int
    together: int

    def step(self, count: int) -> int:
        """Rows of a step of `count` rows."""
        if self.graph_sizes:
            return next((size for size in self.graph_sizes if size >= count), count)
        return round_up(count, self.step_rows)

    def prompts(self, count: int, length: int) -> tuple[int, int]:
        """Rows and columns of `count` prompts, of which the longest has `length` tokens."""
        columns = prompt_length(length, pad_to=self.pad_to, longest=self.longest)
        return round_up(count, self.prompt_rows), columns

    @property
    def slots(self) -> int:
        """Rows of the largest step."""
        return max(self.step(self.rows), *self.graph_sizes, 0)

    def steps(self) -> Iterator[int]:
        """Rows of every step that is warmed up: all that there are, but for those of any number."""
        if self.graph_sizes:
            yield from self.graph_sizes
        elif self.step_rows > NO_PADDING:
            yield from range(self.step_rows, self.slots + 1, self.step_rows)

    def every_prompt(self) -> Iterator[tuple[int, int]]:
        """Rows and columns of all prompts that are warmed up; none where nothing is padded."""
        if not self.pad_to:
            return
        lengths = [*range(self.pad_to - 1, self.longest - 1, self.pad_to), self.longest - 1]
        columns = sorted({length for length in (*lengths, self.longest) if length > 0})
        most = round_up(self.together, self.prompt_rows)
        for rows in range(self.prompt_rows, most + 1, self.prompt_rows):
            for length in columns:
                yield rows, length


@dataclass(frozen=True, kw_only=True)
class Gaudi:
    """How a Gaudi runs transformers' modules.

    | lazy_mode | graphs | limit_graphs | prompts                   | steps                     |
    |-----------|--------|--------------|---------------------------|---------------------------|
    | yes       | yes    | no           | captured                  | captured                  |
    | yes       | yes    | yes          | as they are               | captured                  |
    | yes       | no     | any          | as they are               | as they are               |
    | no        | any    | any          | compiled by torch.compile | compiled by torch.compile |

    Attributes:
        lazy_mode: the bridge collects operators before it runs them; False: eager mode.
        graphs: shapes are captured.
        limit_graphs: prompts are not, which saves memory where they are long.
    """

    lazy_mode: bool = setting(
        True,
        "--lazy-mode/--no-lazy-mode",
        variable="PT_HPU_LAZY_MODE",
        verbs=SERVE,
        help="On hpu: lazy mode, or eager mode with torch.compile and without graphs.",
    )
    graphs: bool = setting(
        True,
        "--hpu-graphs/--no-hpu-graphs",
        variable="ENABLE_HPU_GRAPH",
        verbs=SERVE,
        help="On hpu in lazy mode: capture a graph of each shape.",
    )
    limit_graphs: bool = setting(
        False,
        "--limit-hpu-graphs",
        variable="LIMIT_HPU_GRAPH",
        verbs=SERVE,
        help="On hpu: capture no graph of prompts, which saves memory.",
    )

    @property
    def compiles(self) -> bool:
        """Whether torch.compile compiles the modules."""
        return not self.lazy_mode

    @property
    def captures(self) -> bool:
        """Whether graphs of steps are captured."""
        return self.lazy_mode and self.graphs

    @property
    def captures_prompts(self) -> bool:
        """Whether graphs of prompts are captured."""
        return self.captures and not self.limit_graphs

    @property
    def line(self) -> str:
        """The choice in words."""
        if self.compiles:
            return "eager mode, compiled by torch.compile, no graphs"
        if not self.captures:
            return "lazy mode, no graphs"
        return "lazy mode, graphs of " + ("prompts and steps" if self.captures_prompts else "steps")


CAPTURED = Gaudi()
