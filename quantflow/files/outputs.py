"""Where a stage may write: never inside what it reads, and in the folder that a link stands for.

A lock or a log beside an output that lies in an artifact is a file that its manifest does not name:
it would not verify again.
"""

import os
from collections.abc import Mapping
from pathlib import Path

from quantflow.errors import UsageError

# bytes of a name, so that those beside it are names too
_LONGEST = 255 - len("-validation") - len("..lock")


def output_folder(
    output: str | Path, *, flag: str = "-o", reads: Mapping[str, str | Path | None]
) -> Path:
    """Return where a stage writes; nothing is made or looked into.

    Args:
        output: what the user gave. A link stands for the folder that it names, so that the folder
            is replaced and not the link; `.` has its name.
        flag: what the option is called.
        reads: what the stage reads, by what it is called; None is not read.

    Raises:
        UsageError: no name at all, a name that is too long, links in a circle, or a folder in one
            that is read.
    """
    if not str(output):
        raise UsageError(f"{flag}: the name of the folder is empty", f"give {flag} DIR")
    try:
        real = Path(output).resolve()
    except (
        OSError,
        RuntimeError,
        ValueError,
    ) as error:  # links in a circle; a name with a zero byte
        raise UsageError(f"{flag} {output}: {error}", "give another folder") from error
    size = len(os.fsencode(real.name))
    if size > _LONGEST:
        cause = f"{flag}: a name of {size} bytes; a lock and a log beside it have longer ones, and 255 bytes are the most"
        raise UsageError(cause, f"give one of {_LONGEST} bytes at most")
    for what, folder in reads.items():
        if folder is not None and real.is_relative_to(Path(folder).resolve()):
            raise UsageError(
                f"{flag} {output}: lies in {what}, {folder}, which is only read", "write beside it"
            )
    given = Path(output)
    return real if given.is_symlink() or given.name in ("", "..") else given


def beside(folder: str | Path, suffix: str) -> Path:
    """Return the name beside a folder that is its own and a suffix: `work/4-export` -> `work/4-export-validation`."""
    path = Path(folder)
    path = path.resolve() if path.name in ("", "..") else path
    return path.with_name(f"{path.name}{suffix}")
