"""What came out: rows of the table, kept as JSON, and the bars."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from _report import Bar, gb, table, write_results

from _accuracy.rows import (
    ACTIVE,
    AUTOROUND,
    EIGHT,
    FILES,
    FLOAT4,
    INPUTS,
    LOWER,
    MIXED,
    NARROWER,
    OURS,
    SEARCHED,
    UPPER,
    WEIGHTS,
)

PART = "accuracy"
COLUMNS = (
    "model",
    "program",
    "scheme",
    "bits per weight",
    "KLD mean",
    "KLD 99.9 %",
    "perplexity",
    "top-1",
    "seconds",
    "RSS",
)
GPTQ_PEERS = ("GPTQModel", "llm-compressor GPTQ")
GPTQ_KLD, GPTQ_COST, BEST_KLD, INPUTS_KLD, FLOAT4_KLD = 1.02, 0.6, 0.85, 1.0, 0.85
EXPERTS_KLD = 0.8  # in place of BEST_KLD and FLOAT4_KLD, of models with experts
IMPORTANCE, FILE_KLD, JUDGED_FILES = (
    "llama.cpp imatrix",
    0.7,
    ("Q4_K_M.gguf", "Q4_0.gguf", "Q3_K_M.gguf"),
)
EIGHT_KLD = MIXED_KLD = 1.0  # below, by however much
Q8_0, Q4_K_M = ("llama.cpp", "Q8_0"), ("llama.cpp", "Q4_K_M")
SAME_BITS = 1e-6


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """One row.

    Attributes:
        bits: per weight, counted from the files.
        active: the same of the weights that a token reads; None of a model without experts.
        mean_kld, kld_p999: nats.
        usual_kld: mean_kld as the artifact runs by default, where that rounds inputs which the
            scheme leaves alone.
        ppl_ratio: perplexity over the original's.
        top1_agreement: 0..1.
        seconds, cpu: of the whole processes, imports included; wall and processor.
        rss: bytes, of the largest process.
        quantizing: seconds of quantization alone, as the peer's script clocks them; None of
            quantflow.
        idle: whether the machine did nothing else meanwhile; otherwise seconds are neither shown
            nor judged.
        runs: the seconds of each run that this one stands for, in the order in which they were run.
    """

    model: str
    program: str
    scheme: str
    bits: float
    mean_kld: float
    kld_p999: float
    ppl_ratio: float
    top1_agreement: float
    seconds: float
    cpu: float
    rss: int
    quantizing: float | None = None
    version: str = ""
    settings: dict[str, Any] = field(default_factory=dict)
    active: float | None = None
    usual_kld: float | None = None
    idle: bool = True
    runs: list[float] = field(default_factory=list)

    @property
    def key(self) -> tuple[str, str, str]:
        """What a later run of the same replaces."""
        return self.model, self.program, self.scheme


def read(path: Path | None, *, tokens: int) -> dict[tuple[str, str, str], Outcome]:
    """The rows of a results file.

    There are none without a file, or where its evaluation had another number of tokens.
    """
    if path is None or not path.exists():
        return {}
    earlier = json.loads(path.read_text()).get(PART, {})
    if earlier.get("tokens") != tokens:
        return {}
    return {outcome.key: outcome for outcome in (Outcome(**row) for row in earlier["rows"])}


def write(
    path: Path, about: dict[str, Any], outcomes: Sequence[Outcome], judged: Sequence[Bar]
) -> None:
    """Write the results file."""
    write_results(path, about, PART, {"rows": [asdict(outcome) for outcome in outcomes]}, judged)


def middle(runs: Sequence[Outcome]) -> Outcome:
    """The run that stands for all runs of a row: the one in the middle by seconds.

    Of an even number of runs it is the slower one.
    """
    chosen = sorted(runs, key=lambda run: run.seconds)[len(runs) // 2]
    return replace(chosen, runs=[run.seconds for run in runs])


def ordered(outcomes: Iterable[Outcome], models: Sequence[str]) -> list[Outcome]:
    """Rows by model, then scheme as rows.py has them (others by their bits), then divergence."""
    schemes = [*(scheme.name for scheme in (*WEIGHTS, *NARROWER)), *INPUTS, *FLOAT4, *FILES]

    def place(row: Outcome) -> tuple[int, int, float, float]:
        shared = (
            (schemes.index(row.scheme), 0.0) if row.scheme in schemes else (len(schemes), row.bits)
        )
        return (models.index(row.model), *shared, row.mean_kld)

    return sorted(outcomes, key=place)


def as_table(outcomes: Iterable[Outcome]) -> str:
    """Return the table in Markdown."""
    rows = [
        (
            row.model,
            row.program,
            row.scheme,
            _bits(row),
            _both(row),
            f"{row.kld_p999:.4f}",
            f"{row.ppl_ratio:.4f}",
            f"{row.top1_agreement:.2%}",
            f"{row.seconds:.0f}" if row.idle else "",
            gb(row.rss),
        )
        for row in outcomes
    ]
    return table(COLUMNS, rows)


def judge(outcomes: Iterable[Outcome]) -> list[Bar]:
    """Return the bars of every model, of those rows that are there."""
    models: dict[str, dict[tuple[str, str], Outcome]] = {}
    for row in outcomes:
        models.setdefault(row.model, {})[row.program, row.scheme] = row
    judged = []
    for rows in models.values():
        sparse = any(row.active is not None for row in rows.values())
        few, float4 = (EXPERTS_KLD, EXPERTS_KLD) if sparse else (BEST_KLD, FLOAT4_KLD)
        for scheme in (*WEIGHTS, *NARROWER):
            limit = EIGHT_KLD if scheme == EIGHT else few
            judged += [*_gptq(rows, scheme.name), *_best(rows, scheme.name, limit=limit)]
        judged += [*_eight(rows), *_mixed(rows)]
        for name in ("W8A8", "FP8"):
            judged += _inputs(rows, name, limit=INPUTS_KLD)
        for name in FLOAT4:
            judged += _inputs(rows, name, limit=float4)
        judged += [*_files(rows), *_no_slower(rows)]
    return judged


Rows = dict[tuple[str, str], Outcome]


def _gptq(rows: Rows, scheme: str) -> list[Bar]:
    """GPTQ alone, next to each of the others' at equal settings."""
    ours, judged = rows.get((f"{OURS} gptq", scheme)), []
    for peer in GPTQ_PEERS:
        theirs = rows.get((peer, scheme))
        if ours is None or theirs is None:
            continue
        judged.append(_kld_bar(ours, theirs, limit=GPTQ_KLD))
        judged += _time_bars(ours, theirs, limit=GPTQ_COST)
        memory = f"{gb(ours.rss)} of {gb(theirs.rss)}"
        judged.append(
            _bar(ours, theirs, "peak RSS", ours.rss / theirs.rss, limit=GPTQ_COST, numbers=memory)
        )
    return judged


def _best(rows: Rows, scheme: str, *, limit: float) -> list[Bar]:
    """`best`, next to the best peer with the same settings, or with as many bits or fewer.

    Where no peer has the same settings there is no bar: fewer bits alone are no comparison.
    """
    ours = rows.get((f"{OURS} best", scheme))
    if ours is None:
        return []
    peers = [
        row
        for row in rows.values()
        if not row.program.startswith(OURS)
        and row.scheme not in (*INPUTS, *FILES)
        and (row.scheme == scheme or row.bits <= ours.bits + SAME_BITS)
    ]
    if not any(row.scheme == scheme for row in peers):
        return []
    return [_kld_bar(ours, min(peers, key=lambda row: row.mean_kld), limit=limit)]


def _eight(rows: Rows) -> list[Bar]:
    """`best` of 8 bits, next to a peer's that has finer groups and half a bit more."""
    ours, theirs = rows.get((f"{OURS} best", EIGHT.name)), rows.get(Q8_0)
    return (
        [_kld_bar(ours, theirs, limit=EIGHT_KLD)] if ours is not None and theirs is not None else []
    )


def _mixed(rows: Rows) -> list[Bar]:
    """Mixtures beside the uniform schemes and peers' mixtures.

    The uniform schemes around a mixture give a straight line. A model with experts has the uniform
    scheme of 4.25 bits beside it too. llama.cpp's mixture has more bits, and a peer that searches
    schemes is told as many.
    """
    judged = []
    for (program, scheme), ours in rows.items():
        if scheme not in (*MIXED, *ACTIVE) or not program.startswith(OURS):
            continue
        uniform = rows.get((program, NARROWER[0].name))
        if uniform is not None and ours.bits <= uniform.bits + SAME_BITS:
            judged.append(_kld_bar(ours, uniform, limit=MIXED_KLD))
        if scheme in (SEARCHED, *ACTIVE):
            judged += [
                _kld_bar(ours, theirs, limit=MIXED_KLD)
                for peer in AUTOROUND
                if (theirs := rows.get((peer, SEARCHED))) is not None
            ]
        lower, upper = rows.get((program, LOWER.name)), rows.get((program, UPPER.name))
        if lower is not None and upper is not None and lower.bits <= ours.bits <= upper.bits:
            share = (ours.bits - lower.bits) / (upper.bits - lower.bits)
            line = lower.mean_kld + share * (upper.mean_kld - lower.mean_kld)
            judged.append(
                Bar(
                    what=f"{ours.model}, {scheme}, {program}: KLD",
                    promised=f"<= {MIXED_KLD}x the line from {LOWER.name} to {UPPER.name}",
                    found=f"{ours.mean_kld / line:.2f}x, {_kld(ours.mean_kld)} of {_kld(line)}",
                    met=ours.mean_kld <= MIXED_KLD * line,
                )
            )
        theirs = rows.get(Q4_K_M)
        if theirs is not None and ours.bits <= theirs.bits:
            judged.append(_kld_bar(ours, theirs, limit=MIXED_KLD))
    return judged


def _inputs(rows: Rows, scheme: str, *, limit: float) -> list[Bar]:
    """`best` where there is one, else the best of quantflow's, next to the best peer."""
    peers = [
        row for row in rows.values() if row.scheme == scheme and not row.program.startswith(OURS)
    ]
    ours = _nearest_of_ours(rows, scheme)
    return (
        [_kld_bar(ours, min(peers, key=lambda row: row.mean_kld), limit=limit)]
        if ours is not None and peers
        else []
    )


def _nearest_of_ours(rows: Rows, scheme: str) -> Outcome | None:
    """Return the row of `best` where there is one, else the best of quantflow's, else None."""
    ours = [row for row in rows.values() if row.scheme == scheme and row.program.startswith(OURS)]
    best = rows.get((f"{OURS} best", scheme))
    return best if best is not None or not ours else min(ours, key=lambda row: row.mean_kld)


def _files(rows: Rows) -> list[Bar]:
    """Files of llama.cpp's types, beside its own quantizer's with an importance matrix.

    llama.cpp runs both.
    """
    judged = []
    for name in JUDGED_FILES:
        ours, theirs = _nearest_of_ours(rows, name), rows.get((IMPORTANCE, name))
        if ours is not None and theirs is not None:
            judged.append(_kld_bar(ours, theirs, limit=FILE_KLD))
    return judged


def _no_slower(rows: Rows) -> list[Bar]:
    """`best`, next to AutoRound's default."""
    judged = []
    for scheme in (WEIGHTS[0], NARROWER[0]):
        ours, theirs = (
            rows.get((f"{OURS} best", scheme.name)),
            rows.get((next(iter(AUTOROUND)), scheme.name)),
        )
        if ours is not None and theirs is not None:
            judged += _time_bars(ours, theirs, limit=1.0)
    return judged


def _time_bars(ours: Outcome, theirs: Outcome, *, limit: float) -> list[Bar]:
    """Return the bar of seconds, where both were run on an idle machine."""
    if not (ours.idle and theirs.idle):
        return []
    numbers = f"{ours.seconds:.1f} s of {theirs.seconds:.1f} s"
    return [
        _bar(ours, theirs, "seconds", ours.seconds / theirs.seconds, limit=limit, numbers=numbers)
    ]


def _kld_bar(ours: Outcome, theirs: Outcome, *, limit: float) -> Bar:
    numbers = f"{_kld(ours.mean_kld)} of {_kld(theirs.mean_kld)}"
    return _bar(ours, theirs, "KLD", ours.mean_kld / theirs.mean_kld, limit=limit, numbers=numbers)


def _bar(
    ours: Outcome, theirs: Outcome, what: str, ratio: float, *, limit: float, numbers: str
) -> Bar:
    peer = theirs.program if theirs.scheme == ours.scheme else f"{theirs.program} {theirs.scheme}"
    return Bar(
        what=f"{ours.model}, {ours.scheme}, {ours.program}: {what}",
        promised=f"<= {limit}x {peer}",
        found=f"{ratio:.2f}x, {numbers}",
        met=ratio <= limit,
    )


def _bits(row: Outcome) -> str:
    """Bits per weight, and of those that a token reads where they are others."""
    stored, active = f"{row.bits:.3f}", f"{row.active or row.bits:.3f}"
    return stored if active == stored else f"{stored}, {active} active"


def _both(row: Outcome) -> str:
    """The mean divergence, and that with inputs as they are by default where it is another."""
    exact = _kld(row.mean_kld)
    return exact if row.usual_kld is None else f"{exact}, by default {_kld(row.usual_kld)}"


def _kld(nats: float) -> str:
    """Return a divergence with three digits that say something."""
    return f"{nats:.5f}" if nats >= 1e-3 else f"{nats:.7f}"
