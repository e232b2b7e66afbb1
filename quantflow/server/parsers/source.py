"""A text that grows, and the steps of a parser that reads it.

A parser is a generator: it yields what it found, or None where it needs more text. It is written
from top to bottom as the format is, and it finds the same in a text that comes at once and in one
that comes character by character, since every step here waits until more text cannot change it.
"""

from collections.abc import Callable, Generator
from typing import TypeVar

from quantflow.server.parsers.deltas import Delta, TextDelta

T = TypeVar("T")
Steps = Generator[Delta | None, None, T]
Pieces = Generator[str | None, None, T]
Wrap = Callable[[str], Delta]
_IN_JSON = frozenset('{}[],:"+-.0123456789eEtrufalsn \t\r\n')
_AFTER_LITERAL = frozenset(",}] \t\r\n<")


class AnswerSource:
    """The text that was not read yet.

    Attributes:
        text: text that came and was not read.
        ended: whether no more will come.
        cut: whether the text ended by its length, so that what is open is not whole.
    """

    def __init__(self) -> None:
        """Begin without text."""
        self.text, self.ended, self.cut = "", False, False
        self._recorded: list[str] | None = None

    @property
    def complete(self) -> bool:
        """Whether all text was read, and its writer ended it."""
        return self.ended and not self.cut and not self.text

    def record(self) -> None:
        """Keep what is read from here on, for `recorded`."""
        self._recorded = []

    def recorded(self) -> str:
        """The text that was read since `record`; the record ends."""
        found, self._recorded = "".join(self._recorded or ()), None
        return found

    def take(self, count: int) -> str:
        """Read characters that are there."""
        found, self.text = self.text[:count], self.text[count:]
        if self._recorded is not None:
            self._recorded.append(found)
        return found

    def character(self) -> Steps[str]:
        """The next character, not read yet; empty at the end."""
        while not self.text and not self.ended:
            yield None
        return self.text[:1]

    def starts(self, literal: str) -> Steps[bool]:
        """Whether a literal comes next; it is not read yet."""
        while len(self.text) < len(literal) and not self.ended and literal.startswith(self.text):
            yield None
        return self.text.startswith(literal)

    def accept(self, literal: str) -> Steps[bool]:
        """Whether a literal comes next; if so, it is read."""
        found = yield from self.starts(literal)
        if found:
            self.take(len(literal))
        return found

    def space(self) -> Steps[None]:
        """Read white space."""
        while True:
            self.take(len(self.text) - len(self.text.lstrip()))
            if self.text or self.ended:
                return
            yield None

    def until(self, *markers: str, wrap: Wrap) -> Steps[str | None]:
        """Yield text up to the first of some markers, which is not read yet.

        Returns:
            The marker; None where the text ended without one.
        """
        return (yield from _wrapped(self._until(markers), wrap))

    def collect(self, *markers: str) -> Steps[tuple[str, str | None]]:
        """The text up to the first of some markers, and the marker, which is not read yet."""
        return (yield from _joined(self._until(markers)))

    def json_value(self, *, wrap: Wrap) -> Steps[bool]:
        """Yield the pieces of the JSON value that comes next, as they stand.

        Returns:
            Whether the value is whole. Otherwise the text ended, or what follows is no JSON.
        """
        return (yield from _wrapped(self._json(), wrap))

    def json_text(self) -> Steps[str | None]:
        """The JSON value that comes next, as it stands; None where it is not whole."""
        text, whole = yield from _joined(self._json())
        return text if whole else None

    def rest_of_object(self, *, wrap: Wrap) -> Steps[bool]:
        """Yield the rest of a JSON object that was begun; see `json_value`."""
        return (yield from _wrapped(self._nested(depth=1), wrap))

    def rest(self) -> Steps[None]:
        """Yield all text."""
        yield from self.until(wrap=TextDelta)

    def _until(self, markers: tuple[str, ...]) -> Pieces[str | None]:
        while True:
            place, marker = len(self.text), None
            for one in markers:
                if 0 <= (found := self.text.find(one)) < place:
                    place, marker = found, one
            sure = place if self.ended else min(place, self._begun(markers))
            if sure:
                yield self.take(sure)
            if marker is not None and sure == place:
                return marker
            if self.ended:
                return None
            yield None

    def _begun(self, markers: tuple[str, ...]) -> int:
        """The place from which on the text may be the beginning of a marker."""
        longest = max(map(len, markers), default=1)
        for place in range(max(0, len(self.text) - longest + 1), len(self.text)):
            if any(one.startswith(self.text[place:]) for one in markers):
                return place
        return len(self.text)

    def _json(self) -> Pieces[bool]:
        while not self.text and not self.ended:
            yield None
        if self.text[:1] in ("{", "[", '"'):
            return (yield from self._nested())
        if not self.text or self.text[0] not in "-0123456789tfn":
            return False
        while True:
            end = next((i for i, c in enumerate(self.text) if c in _AFTER_LITERAL), None)
            piece = self.take(len(self.text) if end is None else end)
            if piece:
                yield piece
            if end is not None or self.ended:
                return True
            yield None

    def _nested(self, depth: int = 0) -> Pieces[bool]:
        """An object, a list or a string, of which `depth` objects were begun."""
        quoted = escaped = False
        while True:
            for place, character in enumerate(self.text):
                if escaped:
                    escaped = False
                elif quoted:
                    quoted, escaped = character != '"', character == "\\"
                elif character == '"':
                    quoted = True
                elif character not in _IN_JSON:
                    if place:
                        yield self.take(place)
                    return False
                else:
                    depth += (character in "{[") - (character in "}]")
                if not depth and not quoted:
                    yield self.take(place + 1)
                    return True
            if self.text:
                yield self.take(len(self.text))
            if self.ended:
                return False
            yield None


def _wrapped(pieces: Pieces[T], wrap: Wrap) -> Steps[T]:
    """Yield pieces as deltas."""
    while True:
        try:
            piece = next(pieces)
        except StopIteration as end:
            found: T = end.value
            return found
        yield None if piece is None else wrap(piece)


def _joined(pieces: Pieces[T]) -> Steps[tuple[str, T]]:
    """All pieces as one text, and the result."""
    kept: list[str] = []
    while True:
        try:
            piece = next(pieces)
        except StopIteration as end:
            return "".join(kept), end.value
        if piece is None:
            yield None
        else:
            kept.append(piece)
