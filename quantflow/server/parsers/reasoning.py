"""Reasoning before an answer, between two marks.

Some templates write the first mark themselves, at the end of the prompt. Models also begin a call
without the second one: the call's mark ends the reasoning too.
"""

from dataclasses import dataclass

from quantflow.server.parsers.deltas import ReasoningDelta, TextDelta
from quantflow.server.parsers.source import AnswerSource, Steps


@dataclass(frozen=True, kw_only=True)
class ReasoningMarks:
    """The marks of a family's reasoning.

    Attributes:
        openings: texts that begin it.
        closing: text that ends it.
        signs: texts of which a template of the family has one.
        tokens: special tokens that an opening holds beside other text.
        silent: whether an answer begins with reasoning though neither it nor the prompt says so.
    """

    openings: tuple[str, ...]
    closing: str
    signs: tuple[str, ...]
    tokens: tuple[str, ...] = ()
    silent: bool = False

    def begun(self, prompt: str, prefix: str) -> bool:
        """Whether an answer goes on with reasoning.

        Args:
            prompt: prompt of the answer.
            prefix: beginning of the answer that the prompt ends with; empty where it has none.
        """
        last = max(prefix.rfind(one) for one in self.openings)
        if last >= 0 or self.closing in prefix:
            return last > prefix.rfind(self.closing)
        end = prompt.rstrip()
        return end.endswith(self.openings) or (self.silent and not end.endswith(self.closing))


def thoughts(
    source: AnswerSource, marks: ReasoningMarks, *, begun: bool, calls: tuple[str, ...]
) -> Steps[None]:
    """Read the reasoning that an answer begins with, and yield it.

    Args:
        source: source of the answer.
        marks: marks around it.
        begun: whether the answer begins within it.
        calls: marks of calls, which end it too.
    """
    source.record()
    yield from source.space()
    opened = False
    for opening in marks.openings:
        opened = opened or (yield from source.accept(opening))
    if not opened and not begun:
        yield TextDelta(source.recorded())
        return
    source.recorded()
    mark = yield from source.until(marks.closing, *calls, wrap=ReasoningDelta)
    if mark == marks.closing:
        source.take(len(mark))
        yield from source.space()
