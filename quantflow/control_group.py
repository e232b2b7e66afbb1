"""Limits of the control group that this process runs in: what a container may use of the machine.

Linux counts processes in a tree of groups, and each group on the way up limits those below it. A
file of version 2 holds one number or `max`; version 1 has other names and a tree for each kind.
Sources: the kernel's admin-guide/cgroup-v2.rst and cgroup-v1/memory.rst, sched-bwc.rst.
"""

from contextlib import suppress
from pathlib import Path

_PROC = Path("/proc")
_MOUNTED = Path("/sys/fs/cgroup")
_UNLIMITED = 1 << 60  # version 1 says "none" by a number of about 2^63


def cpu_quota() -> float | None:
    """Cores' worth of time that the group may take; None without a limit."""
    found = []
    for folder in _folders("cpu"):
        with suppress(OSError, ValueError):
            quota, period = (folder / "cpu.max").read_text().split()
            if quota != "max":
                found.append(int(quota) / int(period))
        with suppress(OSError, ValueError):
            quota, period = (
                (folder / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period")
            )
            if int(quota) > 0:  # -1 is no limit
                found.append(int(quota) / int(period))
    return min(found, default=None)


def memory_limit() -> int | None:
    """Bytes that the group may use; None without a limit."""
    return min((limit for limit, _ in _memory()), default=None)


def memory_left() -> int | None:
    """Bytes that the group may still use, its file cache counted as free; None without a limit."""
    return min((max(0, limit - used) for limit, used in _memory()), default=None)


def _memory() -> list[tuple[int, int]]:
    """Limit and used bytes, without file cache, of each group that has a limit."""
    found = []
    for folder in _folders("memory"):
        for limit, used in (
            ("memory.max", "memory.current"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes"),
        ):
            with suppress(OSError, ValueError):
                most = int((folder / limit).read_text())
                if most < _UNLIMITED:
                    found.append((most, int((folder / used).read_text()) - _cache(folder)))
    return found


def _cache(folder: Path) -> int:
    """Bytes of file cache that the kernel can take back at once."""
    with suppress(OSError, ValueError):
        for line in (folder / "memory.stat").read_text().splitlines():
            name, _, value = line.partition(" ")
            if name in ("inactive_file", "total_inactive_file"):
                return int(value)
    return 0


def _folders(controller: str) -> list[Path]:
    """Folders of a controller's files: the process's group, then the groups that hold it.

    A container sees its own group as the mounted root, while /proc may name it by the host's path,
    which is not there.
    """
    found = []
    with suppress(OSError, ValueError):
        for line in (_PROC / "self" / "cgroup").read_text().splitlines():
            _, names, path = line.split(":", 2)
            if names and controller not in names.split(","):
                continue
            for root in [_MOUNTED / names, _MOUNTED / controller] if names else [_MOUNTED]:
                own = Path(path.lstrip("/"))
                found += [root / part for part in (own, *own.parents)]
    return [folder for folder in dict.fromkeys(found or [_MOUNTED]) if folder.is_dir()]
