"""The text of an answer while it grows: whole characters only, and nothing of a stop string that must not be shown."""

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

    def __init__(self, tokenizer: Any, prompt: Sequence[int], *, stops: Sequence[str], keeps_stop: bool) -> None:
        """Begin after a prompt.

        Args:
            tokenizer: of prompt and answer.
            prompt: its tokens.
            stops: strings that end the answer.
            keeps_stop: the answer ends with its stop string, as TGI's; otherwise before it, as OpenAI's.
        """
        self.text = ""
        self._whole = ""  # all that was decoded
        self._stops, self._keeps_stop = tuple(stops), keeps_stop
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
            places = [(self._whole.find(stop), stop) for stop in self._stops]
            met = min(((place, stop) for place, stop in places if place >= 0), default=None)
            if met is not None:
                length = met[0] + len(met[1]) * self._keeps_stop
        return self._whole[before:], self._show(length)

    def _show(self, length: int) -> str:
        """Return the text up to a length that was not handed out."""
        piece = self._whole[len(self.text) : length]
        self.text += piece
        return piece

    def _certain(self) -> int:
        """Return how much of the decoded text no stop string can reach into: those that stand there, and begun ones."""
        longest = max((len(stop) for stop in self._stops), default=1) - 1
        begin = max(0, len(self.text) - longest)
        met = [place for stop in self._stops if (place := self._whole.find(stop, begin)) >= 0]
        if met:
            return min(met)
        tail = self._whole[-longest:] if longest else ""
        held = next((len(tail) - i for i in range(len(tail)) if any(stop.startswith(tail[i:]) for stop in self._stops)), 0)
        return len(self._whole) - held

    def _take(self, piece: str) -> None:
        self._whole += piece


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

    def _text(self, token: int) -> str:
        """Return a token alone as text; half a character is U+FFFD."""
        return str(self._tokenizer.decode([token]))

    def bytes_of(self, token: int) -> list[int]:
        """Return a token's UTF-8, also where it is half a character."""
        text = self.text(token)
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
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    return table | {chr(256 + place): byte for place, byte in enumerate(others)}
