"""Seconds and bytes as people read and write them."""

import re

from quantflow.errors import UsageError

UNITS = {
    "": 1,
    "B": 1,
    "KIB": 1 << 10,
    "MIB": 1 << 20,
    "GIB": 1 << 30,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
}


def duration(seconds: float) -> str:
    """Seconds for people: `42 s`, `12 min 05 s`, `3 h 07 min`."""
    whole = round(seconds)
    if whole < 120:
        return f"{whole} s"
    if whole < 7200:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def size(count: float) -> str:
    """Bytes for people, in powers of ten: `640 MB`, `3.12 GB`."""
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.0f} MB"


def parse_size(text: str) -> int:
    """Bytes that `4GiB`, `500MB` or `1000` stand for.

    Raises:
        UsageError: the text is not a number with a known unit.
    """
    match = re.fullmatch(r"\s*([0-9]{1,18}(?:\.[0-9]{1,18})?)\s*([A-Za-z]{0,3})\s*", text)
    if (
        match is None
        or match[2].upper() not in UNITS
        or not 1 <= (size := float(match[1]) * UNITS[match[2].upper()]) < 2**63
    ):
        shown = text if len(text) <= 40 else f"{text[:40]}..."
        raise UsageError(
            f"size {shown!r}",
            "write a positive number with B, KB, MB, GB, KiB, MiB or GiB, such as 4GiB",
        )
    return int(size)
