"""The folder that a stage writes: never inside one that it reads, and the folder behind a link.

A lock or a log beside an output that lies in an artifact is a file that its manifest does not name:
the artifact would not verify again.
"""

import os
from collections.abc import Mapping
from pathlib import Path

from quantflow.errors import UsageError

# bytes of a name, so that the longer names beside it are valid too
_LONGEST = 255 - len("-validation") - len("..lock")


def output_folder(
    output: str | Path, *, flag: str = "-o", reads: Mapping[str, str | Path | None]
) -> Path:
    """The folder that a stage writes; nothing is created or opened.

    Args:
        output: path from the user. A link stands for the folder behind it, so that the folder is
            replaced and not the link; `.` has its name.
        flag: name of the option, for the message.
        reads: description -> folder that the stage reads; None is not read.

    Raises:
        UsageError: the name is empty or too long, links form a circle, or the folder lies in one
            that is read.
    """
    if not str(output):
        raise UsageError(f"{flag}: the name of the folder is empty", f"give {flag} DIR")
    try:
        real = Path(output).resolve()
    except (OSError, RuntimeError, ValueError) as error:  # a circle of links; a zero byte
        raise UsageError(f"{flag} {output}: {error}", "give another folder") from error
    size = len(os.fsencode(real.name))
    if size > _LONGEST:
        raise UsageError(
            f"{flag}: a name of {size} bytes; a lock and a log beside it have longer ones, and 255 "
            "bytes are the most",
            f"give one of {_LONGEST} bytes at most",
        )
    for what, folder in reads.items():
        if folder is not None and real.is_relative_to(Path(folder).resolve()):
            raise UsageError(
                f"{flag} {output}: lies in {what}, {folder}, which is only read", "write beside it"
            )
    asked = Path(output)
    return real if asked.is_symlink() or asked.name in ("", "..") else asked


def beside(folder: str | Path, suffix: str) -> Path:
    """The name beside a folder with a suffix: `work/4-export` -> `work/4-export-validation`."""
    path = Path(folder)
    path = path.resolve() if path.name in ("", "..") else path
    return path.with_name(f"{path.name}{suffix}")
