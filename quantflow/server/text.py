"""The text of an answer while it grows: whole characters, and no part of a hidden stop string."""

import math
from bisect import bisect_right
from collections.abc import Collection, Sequence
from functools import lru_cache
from typing import Any

from quantflow.models.token_ids import special_ids
from quantflow.runtime.decoding.text import TextStream, special_texts

_HALF = "\ufffd"


class AnswerText:
    """An answer's text, released as soon as it is certain.

    Its characters are whole then, and no stop string begins in it.

    Attributes:
        text: the released text.
    """

    def __init__(
        self,
        tokenizer: Any,
        prompt: Sequence[int],
        *,
        stops: Sequence[str],
        keeps_stop: bool,
        hidden: frozenset[int] | None = None,
    ) -> None:
        """Begin after a prompt.

        Args:
            tokenizer: tokenizer of prompt and answer.
            prompt: tokens of the prompt.
            stops: strings that end the answer.
            keeps_stop: whether the answer ends with its stop string, as TGI's does; otherwise it
                ends before it, as OpenAI's.
            hidden: tokens that have no text; None: the special ones.
        """
        self.text = ""
        self._whole = ""  # all that was decoded
        self._searches = [StopSearch(stop) for stop in stops]
        self._keeps_stop = keeps_stop
        self._stream = TextStream(tokenizer, prompt, tell=self._take, hidden=hidden)
        # Where a stop string holds a special token, it is searched in the text with special tokens.
        texts = special_texts(tokenizer, stops) if stops else {}
        self._unseen = {i: text for i, text in texts.items() if hidden is None or i in hidden}
        self._searched = 0  # characters
        # places in the searched text where unseen text ends, and how much of it stands before each
        self._places, self._before = [0], [0]

    def put(self, token: int) -> tuple[str, str]:
        """Add a token; return the decoded text that it completes, and text that may be shown.

        The decoded text holds stop strings too.
        """
        before = len(self._whole)
        self._stream.put(token)
        if (unseen := self._unseen.get(token)) is not None:
            self._search(unseen)
            self._places.append(self._searched)
            self._before.append(self._before[-1] + len(unseen))
        return self._whole[before:], self._show(self._certain())

    def end(self, *, stopped: bool) -> tuple[str, str]:
        """The rest: decoded text, and text that may be shown.

        Args:
            stopped: whether a stop string ended the answer.
        """
        before = len(self._whole)
        self._stream.end()
        length = len(self._whole)
        if stopped:
            stops = [
                (int(one.position), len(one.stop))
                for one in self._searches
                if one.position < math.inf
            ]
            place, size = min(stops, default=(self._searched, 0))
            length = self._place(place + size * self._keeps_stop)
        return self._whole[before:], self._show(length)

    def _show(self, length: int) -> str:
        """The text up to a length that was not released yet."""
        piece = self._whole[len(self.text) : length]
        self.text += piece
        return piece

    def _certain(self) -> int:
        """Length of the decoded text that no whole or begun stop string can reach into."""
        begin = min((one.begin for one in self._searches), default=self._searched)
        return self._place(int(begin))

    def _place(self, searched: int) -> int:
        """The place in the decoded text of a place in the searched one."""
        number = bisect_right(self._places, searched) - 1
        place = searched - self._before[number]
        if number + 1 < len(self._places):  # it may stand inside the next unseen text
            place = min(place, self._places[number + 1] - self._before[number + 1])
        return place

    def _take(self, piece: str) -> None:
        self._whole += piece
        self._search(piece)

    def _search(self, piece: str) -> None:
        self._searched += len(piece)
        for one in self._searches:
            one.put(piece)


class StopSearch:
    """The search for a string in a text that grows.

    It is Knuth, Morris and Pratt's, whose time grows as the text does.

    Attributes:
        stop: the string.
        position: position of its first occurrence; infinity without one.
    """

    def __init__(self, stop: str) -> None:
        """Begin before the text."""
        self.stop = stop
        self.position = math.inf
        # characters of the text, and those of the string that stand at its end
        self._length = self._same = 0
        # borders[n]: length of the longest proper beginning of stop[:n + 1] that is also its end;
        # only beginnings that were met have one
        self._borders = [0]

    @property
    def begin(self) -> float:
        """The position from which on the text may belong to the string."""
        return min(self.position, self._length - self._same)

    def put(self, piece: str) -> None:
        """Add to the text."""
        for character in piece:
            self._length += 1
            if self.position < math.inf:
                continue
            while self._same and self.stop[self._same] != character:
                self._same = self._borders[self._same - 1]
            self._same += self.stop[self._same] == character
            if self._same == len(self.stop):
                self.position = self._length - self._same
            elif self._same > len(self._borders):
                self._borders.append(self._border())

    def _border(self) -> int:
        """The border of the next longer beginning of the string."""
        known = self._borders[-1]
        last = self.stop[len(self._borders)]
        while known and self.stop[known] != last:
            known = self._borders[known - 1]
        return known + (self.stop[known] == last)


class Vocabulary:
    """Single tokens as people and clients see them.

    Attributes:
        special: ids of special tokens.
    """

    def __init__(self, tokenizer: Any) -> None:
        """Keep the tokenizer."""
        self._tokenizer = tokenizer
        self.special = special_ids(tokenizer)
        self.text = lru_cache(maxsize=1 << 16)(self._text)
        self.within = lru_cache(maxsize=1 << 16)(self._within)
        self._added = {
            str(token.content): (number, bool(token.special))
            for number, token in getattr(tokenizer, "added_tokens_decoder", {}).items()
        }
        letter = tokenizer.convert_tokens_to_ids("a")
        self._before = [] if letter in (None, tokenizer.unk_token_id) else [letter]

    def _text(self, token: int) -> str:
        """A token alone as text; half a character is U+FFFD."""
        return str(self._tokenizer.decode([token]))

    def _within(self, token: int) -> str:
        """The text that a token adds to another; some tokenizers drop a text's first space."""
        before = str(self._tokenizer.decode(self._before))
        return str(self._tokenizer.decode([*self._before, token]))[len(before) :]

    def hidden_but(self, texts: Collection[str]) -> frozenset[int] | None:
        """The special tokens but for some texts; None where none of these is a special token.

        Fast tokenizers know more special tokens than they name, such as Llama's
        `<|python_tag|>`.
        """
        kept = {self._added[text][0] for text in texts if self._added.get(text, (0, False))[1]}
        if not kept:
            return None
        special = {number for number, special in self._added.values() if special}
        return frozenset((special | self.special) - kept)

    def bytes_of(self, token: int) -> list[int]:
        """The UTF-8 of `within`, also where it is half a character."""
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
    """The byte of each character of a byte-level BPE (GPT-2's table, section 2.2 of its paper)."""
    printable = [
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    ]
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    return table | {chr(256 + place): byte for place, byte in enumerate(others)}
