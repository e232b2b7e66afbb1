"""Between tokens and text: stop strings, text that is shown while it grows, and words as tokens."""

from collections.abc import Callable, Mapping, Sequence

from transformers import PreTrainedTokenizerBase

from quantflow.models.token_ids import special_ids, texts_of_special, tokens_of
from quantflow.runtime.generate_job import Words

_HALF = "\ufffd"  # the character to which the bytes of an unfinished character decode
# tokens that are decoded before a text: some tokenizers drop the space that a text begins with
_CONTEXT = 5


class TextStream:
    """Hands out the text of tokens as soon as it is certain.

    A character may need several tokens.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        prompt: Sequence[int],
        *,
        tell: Callable[[str], None],
        hidden: frozenset[int] | None = None,
    ) -> None:
        """Begin after a prompt.

        Args:
            tokenizer: tokenizer of prompt and tokens.
            prompt: tokens of the prompt.
            tell: called with each new piece, which is never empty.
            hidden: tokens that have no text; None: the special ones.
        """
        self._tokenizer, self._tell, self._hidden = tokenizer, tell, hidden
        self._tokens = list(prompt[-_CONTEXT:])
        # tokens from `_told` on are decoded, so that a piece has its context; from `_whole` on they
        # have not been handed out
        self._told, self._whole = 0, len(self._tokens)

    def put(self, token: int) -> None:
        """Add a token."""
        self._tokens.append(token)
        self._say(final=False)

    def end(self) -> None:
        """Hand out the rest, whole characters or not."""
        self._say(final=True)

    def _say(self, *, final: bool) -> None:
        before, after = (
            self._decode(self._tokens[self._told : self._whole]),
            self._decode(self._tokens[self._told :]),
        )
        if len(after) > len(before) and (final or not after.endswith(_HALF)):
            self._told, self._whole = self._whole, len(self._tokens)
            self._tell(after[len(before) :])

    def _decode(self, tokens: list[int]) -> str:
        if self._hidden is None:
            return str(self._tokenizer.decode(tokens, skip_special_tokens=True))
        shown = [token for token in tokens if token not in self._hidden]
        return str(self._tokenizer.decode(shown, skip_special_tokens=False))


def continuation(
    tokenizer: PreTrainedTokenizerBase,
    prompt: Sequence[int],
    tokens: Sequence[int],
    *,
    ends: Sequence[int] = (),
) -> str:
    """The text of tokens that follow a prompt, up to an end token, special tokens left out."""
    pieces: list[str] = []
    stream = TextStream(tokenizer, prompt, tell=pieces.append)
    for token in before_end(tokens, ends):
        stream.put(token)
    stream.end()
    return "".join(pieces)


def before_end(tokens: Sequence[int], ends: Sequence[int]) -> Sequence[int]:
    """The tokens before the first end token, which is no part of a text, special or not."""
    return tokens[: next((n for n, token in enumerate(tokens) if token in ends), len(tokens))]


def special_texts(tokenizer: PreTrainedTokenizerBase, strings: Sequence[str]) -> Mapping[int, str]:
    """The text of each special token, where one of some strings holds such a text; else none."""
    texts = texts_of_special(tokenizer)
    return texts if any(text in one for text in texts.values() for one in strings) else {}


def stop_at(
    tokenizer: PreTrainedTokenizerBase, strings: Sequence[str]
) -> Callable[[Sequence[int]], bool]:
    """The `stop` of `generate`: whether the text of new tokens has just come to hold a string."""
    which = stop_string(tokenizer, strings)
    return lambda tokens: which(tokens) is not None


def stop_string(
    tokenizer: PreTrainedTokenizerBase, strings: Sequence[str], *, prompt: Sequence[int] = ()
) -> Callable[[Sequence[int]], str | None]:
    """A function from new tokens to the string that their text has just come to hold, or None.

    Of several strings it is the first. The function decodes as many of the last tokens as the
    longest string has bytes, and a few more. Special tokens have a text where a string holds one.

    Args:
        tokenizer: tokenizer of the tokens.
        strings: one string or more.
        prompt: tokens before the new ones, where they are known; some tokenizers drop the space
            that a text begins with.
    """
    special = frozenset() if special_texts(tokenizer, strings) else special_ids(tokenizer)
    reach = max(len(string.encode()) for string in strings) + _CONTEXT
    before = [token for token in prompt[-_CONTEXT:] if token not in special]
    begin = len(tokenizer.decode(before))

    def stops(tokens: Sequence[int]) -> str | None:
        recent = [token for token in tokens[-2 * reach :] if token not in special][-reach:]
        text = (
            tokenizer.decode([*before, *recent])[begin:]
            if len(tokens) < reach
            else tokenizer.decode(recent)
        )
        return next((string for string in strings if string in text), None)

    return stops


def word_ids(
    tokenizer: PreTrainedTokenizerBase, words: Sequence[str], *, before: Sequence[str]
) -> Words:
    """The tokens of each word behind each of some texts, such as a space and nothing.

    Duplicates are left out.
    """
    spelled = [space + word for word in words for space in before]
    token_lists = (
        tuple(tokens_of(tokenizer, text, where=f"word {text!r}", special=False)) for text in spelled
    )
    return tuple(dict.fromkeys(ids for ids in token_lists if ids))
