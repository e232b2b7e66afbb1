"""Text of names and messages made harmless for terminals and pages: a name may hold what moves the cursor, or hides text."""

import re

# Controls but tab and newline, what reverses the direction of writing, other ends of lines, halves
# of characters.
_RAW = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)


def plain(text: str) -> str:
    """Return a text with such characters spelled out as Python's strings spell them; lines stay lines."""
    return _RAW.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def one_line(text: str) -> str:
    """Return the same as one line."""
    return plain(text).replace("\n", "\\n")
