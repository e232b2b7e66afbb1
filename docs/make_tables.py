"""Writes the table of what goes with what into docs/recipes.md.

Algorithms and transforms state it themselves.

python docs/make_tables.py            write it
python docs/make_tables.py --check    exit 1 where the file is stale
"""

import sys
from collections.abc import Callable
from pathlib import Path

from quantflow.algorithms import (
    ALGORITHMS,
    BLOCK_ALGORITHMS,
    COMBINATIONS,
    NEAREST,
    REFIT,
    TUNE,
    supports_of,
)
from quantflow.core.scheme import PRESETS, LinearScheme
from quantflow.core.support import Refusal, Supports
from quantflow.planning.compatibility import KNOWN
from quantflow.transforms import ROTATIONS

PAGE = Path(__file__).with_name("recipes.md")
BEGIN, END = "<!-- table: begin -->", "<!-- table: end -->"
ALGORITHM_COLUMNS = (*ALGORITHMS, *BLOCK_ALGORITHMS, REFIT, TUNE)
COLUMNS = (*ALGORITHM_COLUMNS, *KNOWN)
FEATURES = 4096  # of the linear whose memory is named

Refused = Callable[[Supports], Refusal | None]


class Notes:
    """The footnotes of a table, numbered in the order in which cells need them."""

    def __init__(self) -> None:
        """Start without any."""
        self.texts: list[str] = []

    def cell(self, refusal: Refusal | None) -> str:
        """Return `yes`, or `no` with the number of the note that says why."""
        if refusal is None:
            return "yes"
        error = refusal.error(
            "", family="such a model", others="an algorithm with a yes in this row"
        )
        text = "; ".join(part for part in (error.cause.lstrip(";, "), error.remedy) if part)
        text = text.replace("of family such a model", "of such a model")
        if text.startswith("whose "):
            text = f"its {text.removeprefix('whose ')}"
        if text not in self.texts:
            self.texts.append(text)
        return f"no ({self.texts.index(text) + 1})"


def table() -> str:
    """Return the table and its notes."""
    notes = Notes()
    rows = [*_scheme_rows(notes), *_transform_rows(notes)]
    for label, refused in _things():
        rows.append(
            [label, *(notes.cell(refused(_supports(name))) for name in COLUMNS), *_each_word("")]
        )
    rows += [_head_row(), _cache_row(), _reads_row(), _memory_row()]
    lines = [_line(["", *(f"`{name}`" for name in (*COLUMNS, *COMBINATIONS))])]
    lines.append(_line(["---"] * (len(COLUMNS) + len(COMBINATIONS) + 1)))
    lines += [_line(row) for row in rows]
    return "\n".join(
        [*lines, "", *(f"{number}. {text}." for number, text in enumerate(notes.texts, start=1))]
    )


def page(text: str) -> str:
    """Return the page with the table between its marks."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{table()}\n{END}{after}"


def _supports(name: str) -> Supports:
    return KNOWN[name].SUPPORTS if name in KNOWN else supports_of(name)


def _scheme_rows(notes: Notes) -> list[list[str]]:
    """Return a row for every set of schemes that all methods treat alike."""
    alike: dict[tuple[str, ...], list[str]] = {}
    for scheme in PRESETS.values():
        cells = [notes.cell(_supports(name).scheme(scheme)) for name in COLUMNS]
        alike.setdefault((*cells, *(_combined(word, scheme) for word in COMBINATIONS)), []).append(
            scheme.name
        )
    return [[", ".join(names), *cells] for cells, names in alike.items()]


def _combined(word: str, scheme: LinearScheme) -> str:
    combination = COMBINATIONS[word]
    refits = combination.refits(scheme)
    steps = [REFIT] * refits + [combination.algorithm(scheme.weights)]
    steps += [TUNE] * combination.tunes(scheme, rotated=False, refits=refits)
    return ", ".join(steps)


def _each_word(cell: str) -> list[str]:
    return [cell] * len(COMBINATIONS)


def _transform_rows(notes: Notes) -> list[list[str]]:
    rows = []
    for transform in KNOWN:
        turn = ROTATIONS.get(transform)
        cells = [
            notes.cell(_supports(name).rotations if turn and name not in KNOWN else None)
            for name in COLUMNS
        ]
        cells[COLUMNS.index(transform)] = ""
        rows.append(
            [
                f"`{transform}`",
                *cells,
                *("yes" for _ in COMBINATIONS),
            ]
        )
        if turn is not None:
            mixed = [
                notes.cell(supports.mixed_inputs or (None if name in KNOWN else supports.rotations))
                for name, supports in ((name, _supports(name)) for name in COLUMNS)
            ]
            mixed[COLUMNS.index(transform)] = ""
            rows.append(
                [
                    f"`{transform}: {{{turn.MIXES_INPUTS}: true}}`",
                    *mixed,
                    *("yes" for _ in COMBINATIONS),
                ]
            )
    return rows


def _things() -> tuple[tuple[str, Refused], ...]:
    return (
        ("mixtures of experts", lambda supports: supports.mixtures),
        ("norms that subtract the mean (GPT-NeoX)", lambda supports: supports.centred_norms),
        ("`--ranks N` of quantize", lambda supports: supports.ranks),
        ("`target_bpw`, `target_size`, `max_kld`", lambda supports: supports.chosen_schemes),
        ("`quantized_inputs`", lambda supports: supports.layer_inputs),
        ("`input_observer`: mse, percentile", lambda supports: supports.histograms),
    )


def _head_row() -> list[str]:
    """The algorithms that round the head.

    They read the weight alone, and of float8 it is the one to nearest.
    """
    by_row = {
        name: "yes" if name == NEAREST else "integers"
        for name, each in ALGORITHMS.items()
        if each.BY_ROW
    }
    return [
        "`head`",
        *(by_row.get(name, "no" if name in ALGORITHM_COLUMNS else "") for name in COLUMNS),
        *_each_word("no"),
    ]


def _cache_row() -> list[str]:
    cells = [
        f"`{KNOWN[name].CHANGES_VALUES}: false`" if name in KNOWN else "yes" for name in COLUMNS
    ]
    return ["`kv_cache`", *cells, *_each_word("yes")]


def _reads_row() -> list[str]:
    needs = {name: algorithm.NEEDS for name, algorithm in ALGORITHMS.items()}
    needs |= {
        name: transform.needs(transform.checked(transform.OPTIONS))
        for name, transform in KNOWN.items()
    }
    words = {name: ", ".join(found) or "nothing" for name, found in needs.items()}
    return [
        "reads",
        *(words.get(name, "the calibration text") for name in COLUMNS),
        *_each_word(""),
    ]


def _memory_row() -> list[str]:
    sizes = {
        name: each.working_bytes(FEATURES, FEATURES, workers=1) for name, each in ALGORITHMS.items()
    }
    cells = [f"{sizes[name] / 1e6:.0f} MB" if name in sizes else "" for name in COLUMNS]
    return [
        f"memory beside the weights, {FEATURES} x {FEATURES}, one worker",
        *cells,
        *_each_word(""),
    ]


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def main() -> int:
    """Write the page, or say whether it is stale."""
    text = PAGE.read_text()
    wanted = page(text)
    if "--check" in sys.argv[1:]:
        if text != wanted:
            print(f"{PAGE}: stale; run `python {Path(__file__).name}` in docs", file=sys.stderr)
        return int(text != wanted)
    PAGE.write_text(wanted)
    return 0


if __name__ == "__main__":
    sys.exit(main())
