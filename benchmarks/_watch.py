"""Run a program and watch its seconds, memory and disk.

Memory is peak resident size as the kernel counts it, anonymous and file pages apart.

`/usr/bin/time -v` gives the largest peak of any one process that was waited for; but stages of
quantflow let the kernel count anew when they begin, so the peak is sampled too (VmHWM), and what
counts is the larger. Sampling /proc gives what it cannot: RssAnon and RssFile summed over the whole
tree of processes (pages that two of them share are counted twice). Linux only.
"""

import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

TIME = "/usr/bin/time"
INTERVAL = 0.2  # seconds between two looks at memory
DISK_INTERVAL = 1.0  # seconds between two looks at the disk, which cost more


@dataclass(frozen=True, kw_only=True)
class Run:
    """What one program took.

    Attributes:
        seconds: of the whole process, imports included.
        cpu: seconds of processor time, user and system, which other programs on the machine disturb
            less.
        rss: bytes, the larger of "Maximum resident set size" of /usr/bin/time and the largest VmHWM
            that a sample saw.
        anon: bytes, the largest sum of RssAnon over the process tree that a sample saw.
        file: bytes, the largest sum of RssFile.
        disk: bytes, the most that lay below the watched folder, over what lay there at the start.
        code: the exit status; that of /usr/bin/time for a program that was killed.
        output: what it printed on stdout.
    """

    seconds: float
    cpu: float
    rss: int
    anon: int
    file: int
    disk: int
    code: int
    output: str

    def figures(self) -> dict[str, float | int]:
        """Return the numbers without the output."""
        return {key: value for key, value in asdict(self).items() if key != "output"}


class Failed(Exception):
    """A program that had to succeed did not.

    The text names it and shows the end of its output.
    """


def run(
    command: Sequence[str | Path],
    *,
    log: Path,
    folder: Path | None = None,
    until: Callable[[float], bool] | None = None,
    environment: dict[str, str] | None = None,
    where: Path | None = None,
) -> Run:
    """Run `command` under /usr/bin/time and sample its tree.

    Args:
        command: the program and its arguments.
        log: what it prints on stderr is appended here; the resource report goes to `<log>.time`.
        folder: whose growth on disk is watched.
        until: asked with the seconds so far at every sample; True kills the tree with SIGKILL.
        environment: variables added to this process's own.
        where: the working directory; llm-compressor leaves a folder of logs in it.

    Raises:
        Failed: the exit status is not 0 and it was not killed here.
    """
    report = log.with_name(log.name + ".time")
    log.parent.mkdir(parents=True, exist_ok=True)
    words = [TIME, "-v", "-o", str(report), *map(str, command)]
    before = disk_bytes(folder)
    anon = file = disk = peak = 0
    killed = False
    with log.open("ab") as errors, log.with_name(log.name + ".out").open("w+b") as output:
        begin = time.monotonic()
        looked = begin
        variables = {**os.environ, **(environment or {})}
        process = subprocess.Popen(words, stdout=output, stderr=errors, env=variables, cwd=where)
        try:
            while process.poll() is None:
                now = time.monotonic()
                a, f, p = _resident(process.pid)
                anon, file, peak = max(anon, a), max(file, f), max(peak, p)
                if now - looked > DISK_INTERVAL:
                    disk, looked = max(disk, disk_bytes(folder) - before), now
                if until is not None and not killed and until(now - begin):
                    killed = True
                    kill_tree(process.pid)
                try:
                    process.wait(INTERVAL)
                except subprocess.TimeoutExpired:
                    continue
        finally:
            if process.poll() is None:  # this program was interrupted: leave nothing behind
                kill_tree(process.pid)
                process.wait()
        seconds = time.monotonic() - begin
        output.seek(0)
        text = output.read().decode(errors="replace")
    disk = max(disk, disk_bytes(folder) - before)
    if process.returncode != 0 and not killed:
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
        raise Failed(f"{' '.join(map(str, command))}: exit {process.returncode}\n{tail}")
    said = dict(
        re.findall(r"^\s*(User|System|Maximum)[^:]*: ([\d.]+)$", report.read_text(), re.MULTILINE)
    )
    cpu, rss = float(said["User"]) + float(said["System"]), max(int(said["Maximum"]) * 1024, peak)
    return Run(
        seconds=seconds,
        cpu=cpu,
        rss=rss,
        anon=anon,
        file=file,
        disk=disk,
        code=process.returncode,
        output=text,
    )


def kill_tree(pid: int) -> None:
    """Send SIGKILL to every living descendant of `pid`, parents first.

    `pid` itself gets none.
    """
    for child in _descendants(pid):
        try:
            os.kill(child, signal.SIGKILL)
        except ProcessLookupError:
            continue  # it ended by itself


def disk_bytes(folder: Path | None) -> int:
    """Return the bytes of blocks below `folder`; a file with several links counts once."""
    seen: dict[tuple[int, int], int] = {}
    for root, _, names in os.walk(folder) if folder is not None else ():
        for name in names:
            try:
                status = os.lstat(os.path.join(root, name))
            except FileNotFoundError:
                continue  # renamed or removed meanwhile
            seen[status.st_dev, status.st_ino] = status.st_blocks * 512
    return sum(seen.values())


def evict(paths: Sequence[Path]) -> bool:
    """Let the page cache forget these files, and nothing else.

    The result is whether less than a hundredth stays.

    Libraries stay cached, so that a program that imports them is not slower than `cp` for that
    reason. Needs no root.
    """
    os.sync()  # dirty pages stay
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)
    words = ["fincore", "--bytes", "--noheadings", "--output", "RES", *map(str, paths)]
    cached = sum(
        map(int, subprocess.run(words, check=True, capture_output=True, text=True).stdout.split())
    )
    return cached < sum(path.stat().st_size for path in paths) / 100


def need_tools() -> None:
    """Raise where a program that this needs is missing."""
    for name, package in ((TIME, "time"), ("fincore", "util-linux-extra, or util-linux")):
        if shutil.which(name) is None:
            raise Failed(f"{name}: not found; install it with `apt-get install` ({package})")


def _descendants(pid: int) -> list[int]:
    """Return the processes below `pid`, parents before children."""
    found: list[int] = []
    for task in _names(f"/proc/{pid}/task"):
        try:
            children = Path(f"/proc/{pid}/task/{task}/children").read_text().split()
        except OSError:
            continue  # the thread ended
        for child in map(int, children):
            found += [child, *_descendants(child)]
    return found


def _names(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def _resident(pid: int) -> tuple[int, int, int]:
    """(RssAnon, RssFile with shared memory) in bytes, and the largest VmHWM.

    The first two are summed over `pid` and all below it.
    """
    anon = file = peak = 0
    for member in (pid, *_descendants(pid)):
        try:
            text = Path(f"/proc/{member}/status").read_text()
        except OSError:
            continue  # it ended
        sizes = {
            key: int(value) * 1024
            for key, value in re.findall(r"^(Rss\w+|VmHWM):\s+(\d+) kB", text, re.MULTILINE)
        }
        anon += sizes.get("RssAnon", 0)
        file += sizes.get("RssFile", 0) + sizes.get("RssShmem", 0)
        peak = max(peak, sizes.get("VmHWM", 0))
    return anon, file, peak
