"""Names and messages made harmless for terminals and pages.

A name may hold characters that move the cursor or hide text.
"""

import re

# Controls but tab and newline, other ends of lines, characters that reverse the direction of
# writing, half surrogate pairs.
_RAW = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)


def plain(text: str) -> str:
    """A text with such characters spelled out as Python's strings spell them; lines stay lines."""
    return _RAW.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def one_line(text: str) -> str:
    """A text with such characters and its line ends spelled out, as one line."""
    return plain(text).replace("\n", "\\n")
