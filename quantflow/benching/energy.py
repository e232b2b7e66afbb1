"""Energy of this machine's processors, by Intel's RAPL counters, which Linux has for AMD too.

Everything that the machine did meanwhile is in them. A counter is in microjoules and begins anew at
its own maximum. The kernel lets only root read it, unless somebody allows more.
"""

from dataclasses import dataclass
from pathlib import Path

_POWERCAP = Path("/sys/class/powercap")


@dataclass(frozen=True, kw_only=True)
class EnergyReading:
    """The counters at one moment.

    Attributes:
        microjoules: count of each processor, by the folder of its counter.
    """

    microjoules: dict[Path, int]

    def since(self) -> float | None:
        """The joules from then until now; None where a counter cannot be read any more."""
        total = 0
        for folder, before in self.microjoules.items():
            now, most = _number(folder / "energy_uj"), _number(folder / "max_energy_range_uj")
            if now is None or (now < before and most is None):
                return None
            total += now - before if now >= before else now + (most or 0) - before
        return total / 1e6


def package_joules(powercap: Path = _POWERCAP) -> EnergyReading | None:
    """The counters of all processors, without those of their parts.

    None where there is no counter, or one that cannot be read.
    """
    counters = {}
    for folder in sorted(powercap.glob("intel-rapl:*")):
        if folder.name.count(":") == 1:  # intel-rapl:0 is a processor, intel-rapl:0:1 a part of it
            value = _number(folder / "energy_uj")
            if value is None:
                return None
            counters[folder] = value
    return EnergyReading(microjoules=counters) if counters else None


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None
