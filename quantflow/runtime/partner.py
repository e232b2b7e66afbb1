"""A conversation, and the side that answers in it: an artifact here, or a server over HTTP."""

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from quantflow.errors import QuantflowError, UsageError

Messages = Sequence[Mapping[str, str]]
FORGETS = "the context is full: the oldest turns are left out from here on; /reset begins anew"
_OPEN, _CLOSE = "<think>", "</think>"


class ConversationTooLong(UsageError):
    """A conversation that the model's context does not hold; nothing was answered."""


@dataclass(frozen=True)
class TextPiece:
    """Some text of an answer.

    Attributes:
        text: the text, never empty.
        reasoning: it is what the model thinks before its answer.
    """

    text: str
    reasoning: bool = False


class Partner(Protocol):
    """The side that answers.

    Attributes:
        name: name for people.
        tokens: tokens of the last answer.
    """

    name: str
    tokens: int

    def answer(self, messages: Messages) -> Iterator[TextPiece]:
        """Yield the pieces of the next message; closing the iterator ends it.

        Raises:
            ConversationTooLong: before the first piece.
            QuantflowError: it cannot answer.
        """

    def close(self) -> None:
        """Let go of the model or the connection."""


class Conversation:
    """A conversation that leaves out its oldest turns where the context does not hold them all.

    Attributes:
        system: system message, which always stays; None: there is none.
    """

    def __init__(
        self, partner: Partner, *, system: str | None = None, tell: Callable[[str], None]
    ) -> None:
        """Begin.

        Args:
            partner: the side that answers.
            system: system message.
            tell: called with a line when turns are left out, once until `reset`.
        """
        self.system = system
        self._partner, self._tell = partner, tell
        self._turns: list[tuple[str, str]] = []  # question and answer
        self._told = False

    def reset(self) -> None:
        """Begin anew, with the system message."""
        self._turns.clear()
        self._told = False

    def ask(self, text: str) -> Generator[TextPiece, None, None]:
        """Yield the pieces of the next answer.

        An answer that was stopped stays in the conversation as far as it came, one that failed does
        not. Reasoning is no part of the conversation: models are trained without that of earlier
        turns.

        Raises:
            ConversationTooLong: the message alone is too long.
            QuantflowError: the partner cannot answer.
        """
        pieces: list[str] = []
        try:
            for piece in self._answer(text):
                if not piece.reasoning:
                    pieces.append(piece.text)
                yield piece
        except QuantflowError:
            raise
        except BaseException:
            self._turns.append((text, "".join(pieces)))
            raise
        self._turns.append((text, "".join(pieces)))

    def _answer(self, text: str) -> Iterator[TextPiece]:
        while True:
            try:
                yield from self._partner.answer(self._messages(text))
                return
            except ConversationTooLong:
                if not self._turns:
                    raise
            del self._turns[0]
            if not self._told:
                self._told = True
                self._tell(FORGETS)

    def _messages(self, text: str) -> Messages:
        said = [] if self.system is None else [("system", self.system)]
        for question, answer in self._turns:
            said += [("user", question), ("assistant", answer)]
        return [{"role": role, "content": content} for role, content in [*said, ("user", text)]]


class Thinking:
    """Tells the reasoning of an answer from its text: what stands in <think> at its beginning."""

    def __init__(self, *, begun: bool = False) -> None:
        """Begin.

        Args:
            begun: the prompt itself ends with <think>.
        """
        self._inside: bool | None = True if begun else None  # None: not known yet
        self._held = ""

    def put(self, text: str) -> Iterator[TextPiece]:
        """Take some text, and yield what is certain."""
        self._held += text
        if self._inside is None:
            begin = self._held.lstrip()
            if _OPEN.startswith(begin):
                return  # perhaps the beginning of the tag
            self._inside = begin.startswith(_OPEN)
            if self._inside:
                self._held = begin.removeprefix(_OPEN)
        if self._inside:
            before, found, after = self._held.partition(_CLOSE)
            if found:
                self._inside, self._held = False, after
            else:
                kept = _half_tag(before)
                before, self._held = before[: len(before) - kept], before[len(before) - kept :]
            if before:
                yield TextPiece(before, reasoning=True)
        if not self._inside and self._held:
            text, self._held = self._held, ""
            yield TextPiece(text)

    def end(self) -> Iterator[TextPiece]:
        """Yield what was held back."""
        if self._held:
            yield TextPiece(self._held, reasoning=bool(self._inside))


def _half_tag(text: str) -> int:
    """Number of characters at a text's end that may be the beginning of </think>."""
    return next(
        (length for length in range(len(_CLOSE) - 1, 0, -1) if text.endswith(_CLOSE[:length])), 0
    )
