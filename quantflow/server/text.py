"""The text of an answer while it grows: whole characters only, and nothing of a stop string that must not be shown."""

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from quantflow.runtime.decoding.text import TextStream

_HALF = "\ufffd"


class AnswerText:
    """Hands out an answer's text as soon as it is certain: its characters are whole, and no stop string begins in it.

    Attributes:
        text: what was handed out.
    """

    def __init__(
        self, tokenizer: Any, prompt: Sequence[int], *, stops: Sequence[str], keeps_stop: bool
    ) -> None:
        """Begin after a prompt.

        Args:
            tokenizer: of prompt and answer.
            prompt: its tokens.
            stops: strings that end the answer.
            keeps_stop: the answer ends with its stop string, as TGI's; otherwise before it, as
                OpenAI's.
        """
        self.text = ""
        self._whole = ""  # all that was decoded
        self._searches, self._keeps_stop = [StopSearch(stop) for stop in stops], keeps_stop
        self._stream = TextStream(tokenizer, prompt, tell=self._take)

    def put(self, token: int) -> tuple[str, str]:
        """Add a token; return what it completed, stop strings and all, and what may be shown of the answer now."""
        before = len(self._whole)
        self._stream.put(token)
        return self._whole[before:], self._show(self._certain())

    def end(self, *, stopped: bool) -> tuple[str, str]:
        """Return what is left: decoded text, and what may be shown of the answer.

        Args:
            stopped: a stop string ended the answer.
        """
        before = len(self._whole)
        self._stream.end()
        length = len(self._whole)
        if stopped:
            found = [
                (int(one.found), len(one.stop)) for one in self._searches if one.found < math.inf
            ]
            place, size = min(found, default=(length, 0))
            length = place + size * self._keeps_stop
        return self._whole[before:], self._show(length)

    def _show(self, length: int) -> str:
        """Return the text up to a length that was not handed out."""
        piece = self._whole[len(self.text) : length]
        self.text += piece
        return piece

    def _certain(self) -> int:
        """Return how much of the decoded text no stop string can reach into: those that stand there, and begun ones."""
        return int(min((one.begin for one in self._searches), default=len(self._whole)))

    def _take(self, piece: str) -> None:
        self._whole += piece
        for one in self._searches:
            one.put(piece)


class StopSearch:
    """Looks for a string in a text that grows: Knuth, Morris and Pratt's search, whose time grows as the text does.

    Attributes:
        stop: the string.
        found: where it stands first; infinity: nowhere yet.
    """

    def __init__(self, stop: str) -> None:
        """Begin before the text."""
        self.stop, self.found = stop, math.inf
        # characters of the text, and those of the string that stand at its end
        self._length = self._same = 0
        # of each beginning of the string that was met: the longest that is its end, and not all of
        # it
        self._borders = [0]

    @property
    def begin(self) -> float:
        """From where on the text may be the string's."""
        return min(self.found, self._length - self._same)

    def put(self, piece: str) -> None:
        """Add to the text."""
        for character in piece:
            self._length += 1
            if self.found < math.inf:
                continue
            while self._same and self.stop[self._same] != character:
                self._same = self._borders[self._same - 1]
            self._same += self.stop[self._same] == character
            if self._same == len(self.stop):
                self.found = self._length - self._same
            elif self._same > len(self._borders):
                self._borders.append(self._border())

    def _border(self) -> int:
        """Return the border of the beginning that is one longer than the longest whose border is known."""
        known, last = self._borders[-1], self.stop[len(self._borders)]
        while known and self.stop[known] != last:
            known = self._borders[known - 1]
        return known + (self.stop[known] == last)


class Vocabulary:
    """Single tokens as people and clients see them.

    Attributes:
        special: ids of special tokens.
    """

    def __init__(self, tokenizer: Any) -> None:
        """Take the tokenizer."""
        self._tokenizer = tokenizer
        self.special = frozenset(tokenizer.all_special_ids)
        self.text = lru_cache(maxsize=1 << 16)(self._text)
        self.within = lru_cache(maxsize=1 << 16)(self._within)
        letter = tokenizer.convert_tokens_to_ids("a")
        self._before = [] if letter in (None, tokenizer.unk_token_id) else [letter]

    def _text(self, token: int) -> str:
        """Return a token alone as text; half a character is U+FFFD."""
        return str(self._tokenizer.decode([token]))

    def _within(self, token: int) -> str:
        """Return what a token adds to a text; some tokenizers drop the space that a text begins with."""
        before = str(self._tokenizer.decode(self._before))
        return str(self._tokenizer.decode([*self._before, token]))[len(before) :]

    def bytes_of(self, token: int) -> list[int]:
        """Return the UTF-8 of `within`, also where it is half a character."""
        text = self.within(token)
        if _HALF in text:
            piece = str(self._tokenizer.convert_ids_to_tokens(token))
            if piece.startswith("<0x") and piece.endswith(">") and len(piece) == 6:
                return [int(piece[3:5], 16)]
            table = byte_level_alphabet()
            if all(character in table for character in piece):
                return [table[character] for character in piece]
        return list(text.encode())


@lru_cache(maxsize=1)
def byte_level_alphabet() -> dict[str, int]:
    """Return which byte each character of a byte-level BPE stands for (GPT-2's table, section 2.2 of its paper)."""
    printable = [
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    ]
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    return table | {chr(256 + place): byte for place, byte in enumerate(others)}
