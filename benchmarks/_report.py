"""Tables, bars and the results file that all parts share."""

import json
import os
import platform
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Bar:
    """What was promised and what came out, both as text."""

    what: str
    promised: str
    found: str
    met: bool


def table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a Markdown table; the first column is text, the others are right-aligned."""
    lines = [columns, ["---", *["---:"] * (len(columns) - 1)], *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def bars(found: Sequence[Bar]) -> str:
    """Return the bars as a Markdown table."""
    rows = [(bar.what, bar.promised, bar.found, "met" if bar.met else "MISSED") for bar in found]
    return table(("bar", "promised", "found", ""), rows)


def gb(size: float) -> str:
    """Return bytes as GB (10^9)."""
    return f"{size / 1e9:.2f} GB"


def rate(size: float, seconds: float) -> str:
    """Return bytes a second as GB/s."""
    return f"{size / 1e9 / seconds:.2f} GB/s"


def off(planned: float | None, actual: float) -> str:
    """Return planned, actual and the relative error of the plan."""
    if planned is None:
        return f"no plan, {gb(actual)}"
    return f"{gb(planned)}, {gb(actual)}, {(planned - actual) / max(actual, 1):+.1%}"


def machine(folder: Path) -> dict[str, Any]:
    """Say what this was measured on."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    names = [
        line.split(":", 1)[1].strip()
        for line in _lines("/proc/cpuinfo")
        if line.startswith("model name")
    ]
    return {
        "processor": names[0] if names else platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory": memory,
        "load": os.getloadavg()[0],
        "disk_free": shutil.disk_usage(folder).free,
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
    }


def write_results(
    path: Path, about: dict[str, Any], part: str, figures: dict[str, Any], found: Sequence[Bar]
) -> None:
    """Put the figures of one part into the results file; the other parts in it stay."""
    results = json.loads(path.read_text()) if path.exists() else {}
    results[part] = {**about, **figures, "bars": [asdict(bar) for bar in found]}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(results, indent=2, sort_keys=True) + "\n")


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines() if Path(path).exists() else []
