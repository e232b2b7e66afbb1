"""Seconds and bytes as people read them."""


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
