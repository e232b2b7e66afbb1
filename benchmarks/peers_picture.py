"""The picture in the README: quantflow beside its peers.

It is drawn from the tables in docs/accuracy.md and benchmarks/README.md.

    python benchmarks/peers_picture.py          writes docs/peers.svg

Nothing is measured here. A figure that changes in a table changes in the picture; a test compares
the two.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MODEL = "tiny-llama"
SCHEMES = {"W4A16 g128": "4 bits", "W3A16 g64": "3 bits", "W2A16 g64": "2 bits"}
PROGRAMS = ("quantflow best", "quantflow gptq", "AutoRound", "llm-compressor GPTQ", "GPTQModel")
RUNTIMES = (
    "quantflow W4A16",
    "quantflow W4A8",
    "quantflow W8A8",
    "OpenVINO int4",
    "OpenVINO int8",
    "llama.cpp Q4_0",
    "llama.cpp Q8_0",
    "transformers bf16",
)
OURS, PEERS, INK, FAINT = "#1f5fa8", "#a9b4c0", "#1b2430", "#5b6774"
WIDTH, MARGIN, GAP, LABEL, VALUE, ROW, BAR = 980, 20, 24, 144, 58, 24, 15


@dataclass(frozen=True, kw_only=True)
class Panel:
    """Bars below a title; `bars` are (label, length, value as the table has it)."""

    title: str
    bars: tuple[tuple[str, float, str], ...]


def table(path: Path, heading: str, *, after: str = "") -> list[dict[str, str]]:
    """The rows of the first Markdown table whose header begins with `heading`.

    The table stands behind a line `after`.

    Raises:
        ValueError: there is none.
    """
    text = path.read_text()
    start = text.index(after)
    begin = text.index(f"| {heading} |", start)
    lines = text[begin:].split("\n\n")[0].splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [dict(zip(cells[0], row, strict=True)) for row in cells[2:]]


def accuracy_panels(rows: Sequence[dict[str, str]]) -> list[Panel]:
    """Return a panel per scheme: the mean KL divergence of every program."""
    panels = []
    for scheme, title in SCHEMES.items():
        kld = {
            row["program"]: row["KLD mean"]
            for row in rows
            if row["model"] == MODEL and row["scheme"] == scheme
        }
        bars = tuple((program, float(kld[program]), kld[program]) for program in PROGRAMS)
        panels.append(Panel(title=f"{title} ({scheme})", bars=bars))
    return panels


def runtime_panel(rows: Sequence[dict[str, str]]) -> Panel:
    """Return the decoded tokens a second of every program, fastest first."""
    speed = {row["program"]: row["decode tokens/s"] for row in rows}
    bars = [(program, float(speed[program]), speed[program]) for program in RUNTIMES]
    return Panel(title="", bars=tuple(sorted(bars, key=lambda bar: -bar[1])))


def draw_panel(panel: Panel, *, x: float, y: float, width: float) -> list[str]:
    """Return the SVG of a panel whose bars share one scale from zero."""
    longest = max(length for _, length, _ in panel.bars)
    room = width - LABEL - VALUE
    parts = []
    if panel.title:
        parts.append(f'<text x="{x}" y="{y + 12}" class="panel">{escape(panel.title)}</text>')
        y += 22
    for index, (label, length, value) in enumerate(panel.bars):
        top, ours = y + index * ROW, label.startswith("quantflow")
        end = x + LABEL + room * length / longest
        name = ' class="ours"' if ours else ""
        parts.append(
            f'<text x="{x + LABEL - 8}" y="{top + 12}" '
            f'text-anchor="end"{name}>{escape(label)}</text>'
        )
        parts.append(
            f'<rect x="{x + LABEL}" y="{top}" width="{end - x - LABEL:.1f}" height="{BAR}" rx="2" '
            f'fill="{OURS if ours else PEERS}"/>'
        )
        parts.append(f'<text x="{end + 6:.1f}" y="{top + 12}"{name}>{escape(value)}</text>')
    return parts


def picture() -> str:
    """Return the SVG."""
    accuracy = accuracy_panels(table(ROOT / "docs/accuracy.md", "model | program"))
    runtime = runtime_panel(
        table(ROOT / "benchmarks/README.md", "program | prefill tokens/s", after="One at once:")
    )
    column = (WIDTH - 2 * MARGIN - 2 * GAP) / 3
    parts = [
        f'<text x="{MARGIN}" y="34" class="title">Accuracy: mean KL divergence to the original, '
        "shorter is better</text>",
        f'<text x="{MARGIN}" y="53" class="note">the 13.6 M parameter example model, same '
        "calibration text, same bits "
        "(peers up to 0.05 more), 16,000 held-out tokens; nats per token</text>",
    ]
    y = 72.0
    for index, panel in enumerate(accuracy):
        parts += draw_panel(panel, x=round(MARGIN + index * (column + GAP), 1), y=y, width=column)
    y += 22 + ROW * len(PROGRAMS) + 34
    parts += [
        f'<text x="{MARGIN}" y="{y}" class="title">Speed: decoded tokens per second, longer is '
        "better</text>",
        f'<text x="{MARGIN}" y="{y + 19}" class="note">1.1 B parameters, one sequence, 256 '
        "prompt tokens, 32 new ones, "
        "2 cores of an AMD EPYC (Zen 5), median of 5 rounds</text>",
    ]
    parts += draw_panel(runtime, x=MARGIN, y=y + 36, width=WIDTH - 2 * MARGIN)
    height = y + 36 + ROW * len(RUNTIMES) + MARGIN
    style = (
        "text{font:13px system-ui,-apple-system,'Segoe "
        f"UI',Helvetica,Arial,sans-serif;fill:{INK}}}"
        f".title{{font-size:17px;font-weight:600}}.panel{{font-weight:600}}.note{{fill:{FAINT}}}.ours{{font-weight:600}}"
    )
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" '
        f'width="{WIDTH}" height="{height:.0f}" '
        'role="img" aria-label="quantflow beside its peers: accuracy and speed">'
    )
    background = f'<rect width="{WIDTH}" height="{height:.0f}" fill="#ffffff"/>'
    return "\n".join(
        [head, f"<style>{re.sub(' +', ' ', style)}</style>", background, *parts, "</svg>", ""]
    )


if __name__ == "__main__":
    (ROOT / "docs/peers.svg").write_text(picture())
