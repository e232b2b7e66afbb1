"""Grammars of texts as masks over the vocabulary: JSON schemas, regular expressions, choices, GBNF.

llguidance computes them (Earley parsing over a trie of the tokens, in Rust). xgrammar was measured
beside it on the same 49,152 tokens; docs/serving.md has the figures. A grammar is compiled once and
kept, and a request follows a copy of it.
"""

import json
import threading
from collections import OrderedDict
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from quantflow.runtime.decoding.text import stop_string
from quantflow.server.bodies import Grammar
from quantflow.server.errors import invalid
from quantflow.server.schemas import closed

KEPT = 256  # compiled grammars
LONGEST = 100_000  # characters of a grammar
LONGEST_GBNF = 10_000  # its translation is in Python, and takes the square of the rules
DEEPEST = 64  # objects and lists inside each other in a schema
JSON_TYPES = ("json", "json_schema", "json_object")
NOT_SUPPORTED = "grammar is not supported"
ANY_OBJECT = {"type": "object"}
# One space at most: otherwise models go on and on with newlines. Keywords that no mask can follow
# are left out, as a `format` that is not known is no more than a note.
OPTIONS = {"whitespace_flexible": True, "whitespace_pattern": "[ ]?", "lenient": True}


class GrammarMask:
    """One request's way through a grammar: a `quantflow.runtime.batching.TokenMask`.

    Attributes:
        left_out: what the mask does not hold to, in llguidance's sentences.
    """

    def __init__(self, matcher: Any, *, vocab_size: int) -> None:
        """Keep a matcher of this request alone.

        Args:
            matcher: matcher of llguidance.
            vocab_size: V; the matcher's own vocabulary may be longer.
        """
        self._matcher = matcher
        self.left_out: tuple[str, ...] = tuple(matcher.get_grammar_warnings())
        self._words = -(-vocab_size // 32)

    def allowed(self, tokens: Sequence[int]) -> Tensor | None:
        """Tokens that may come next, [ceil(V / 32)] int32.

        Raises:
            Refused: the grammar needs more work in a step than is allowed.
        """
        del tokens  # `advance` has followed them
        bits = self._matcher.compute_bitmask()
        self._raise_for_error()
        return torch.frombuffer(bytearray(bits), dtype=torch.int32)[: self._words]

    def advance(self, token: int) -> None:
        """Follow the grammar by the chosen token."""
        if not self._matcher.is_stopped():
            self._matcher.consume_token(token)
            self._raise_for_error()

    def _raise_for_error(self) -> None:
        if self._matcher.is_error():
            raise invalid(f"grammar is not valid: {_short(self._matcher.get_error())}")


class AfterReasoning:
    """A mask that begins behind an answer's reasoning, which may be any text."""

    def __init__(self, mask: GrammarMask, tokenizer: Any, closing: str) -> None:
        """Keep the mask; `closing` is the text that ends the reasoning."""
        self._mask = mask
        self._closes = stop_string(tokenizer, [closing])
        self._reasoning: list[int] | None = []  # its tokens; None where it is over
        self.left_out = mask.left_out

    def allowed(self, tokens: Sequence[int]) -> Tensor | None:
        """Tokens that may come next; see `GrammarMask`."""
        return self._mask.allowed(tokens) if self._reasoning is None else None

    def advance(self, token: int) -> None:
        """Follow the reasoning, then the grammar."""
        if self._reasoning is None:
            self._mask.advance(token)
            return
        self._reasoning.append(token)
        if self._closes(self._reasoning) is not None:
            self._reasoning = None


class AllowedTokens:
    """A mask of some tokens, and of what another one allows among them."""

    def __init__(self, tokens: Sequence[int], *, vocab_size: int, mask: Any = None) -> None:
        """Keep the tokens.

        Args:
            tokens: tokens that may come.
            vocab_size: V.
            mask: another mask of the same request, or None.
        """
        may = torch.zeros(-(-vocab_size // 32) * 32, dtype=torch.bool)
        may[torch.tensor(tokens, dtype=torch.int64)] = True
        self._bits = packed(may)
        self._mask = mask
        self.left_out: tuple[str, ...] = getattr(mask, "left_out", ())

    def allowed(self, tokens: Sequence[int]) -> Tensor | None:
        """Tokens that may come next; see `GrammarMask`."""
        bits = None if self._mask is None else self._mask.allowed(tokens)
        return self._bits if bits is None else self._bits & bits

    def advance(self, token: int) -> None:
        """Let the other mask follow."""
        if self._mask is not None:
            self._mask.advance(token)


def packed(may: Tensor) -> Tensor:
    """A mask [V] bool, V a multiple of 32, as [V / 32] int32; token t is bit t % 32."""
    weights = torch.ones(32, dtype=torch.int64) << torch.arange(32)
    return (may.view(-1, 32) * weights).sum(dim=-1).to(torch.int32)


class Grammars:
    """Compiled grammars of one model."""

    def __init__(self, tokenizer: Any, *, vocab_size: int, ends: Sequence[int]) -> None:
        """Keep the vocabulary, which is read when the first grammar is compiled.

        Args:
            tokenizer: fast tokenizer.
            vocab_size: V, the length of a row of logits.
            ends: tokens that end a text; the grammar allows them where it is complete.
        """
        self._tokenizer, self._vocab_size, self._ends = tokenizer, vocab_size, list(ends)
        self._trie: Any = None
        self._kept: OrderedDict[str, Any] = OrderedDict()
        self._lock = threading.Lock()

    def mask(self, grammar: Grammar) -> GrammarMask:
        """A request's way through a grammar; the call blocks while the grammar is compiled.

        Raises:
            Refused: of kind validation; the grammar is wrong or too large, or llguidance is not
                installed.
        """
        if find_spec("llguidance") is None:
            raise invalid(f"{NOT_SUPPORTED}: llguidance is not installed")
        text = _text_of(grammar)
        with self._lock:
            matcher = self._kept.get(text)
            if matcher is None:
                matcher = self._kept[text] = self._compiled(text)
            self._kept.move_to_end(text)
            while len(self._kept) > KEPT:
                self._kept.popitem(last=False)
            return GrammarMask(matcher.deep_copy(), vocab_size=self._vocab_size)

    def _compiled(self, text: str) -> Any:
        from llguidance import LLMatcher, LLParserLimits
        from llguidance.hf import from_tokenizer

        if self._trie is None:
            try:
                self._trie = from_tokenizer(
                    self._tokenizer, n_vocab=self._vocab_size, eos_token=self._ends or None
                )
            except Exception as error:  # it cannot spell some tokenizers' tokens as bytes
                raise invalid(
                    f"{NOT_SUPPORTED} by this model's tokenizer: {_short(str(error))}"
                ) from error
        limits = LLParserLimits(
            max_items_in_row=2000,
            initial_lexer_fuel=1_000_000,
            step_lexer_fuel=200_000,
            step_max_items=50_000,
            max_lexer_states=50_000,
            max_grammar_size=100_000,
            verbose_errors=False,
        )
        matcher = LLMatcher(self._trie, text, log_level=0, limits=limits)
        if matcher.is_error():
            raise invalid(f"grammar is not valid: {_short(matcher.get_error())}")
        return matcher


def _text_of(grammar: Grammar) -> str:
    """A grammar in llguidance's form.

    Raises:
        Refused: of kind validation.
    """
    from llguidance import LLMatcher, grammar_from

    value = grammar.value
    if grammar.type in JSON_TYPES:
        if grammar.type == "json_schema" and isinstance(value, dict):
            value = value.get("schema", value)  # TGI 3 has OpenAI's wrapper
        any_object = grammar.type == "json_object" and value in (None, True)
        schema = ANY_OBJECT if any_object else _schema(value)
        _require_size(json.dumps(schema))
        text = json.dumps({**closed(schema), "x-guidance": OPTIONS})
        _require_size(text, most=4 * LONGEST)
        return str(LLMatcher.grammar_from_json_schema(text))
    if grammar.type == "choice":
        choices = value if isinstance(value, list) else []
        if not choices or not all(isinstance(word, str) and word for word in choices):
            raise invalid("grammar is not valid: choices are texts, one or more")
        text = "start: " + " | ".join(map(json.dumps, choices))
        _require_size(text)
        return str(LLMatcher.grammar_from_lark(text))
    if not isinstance(value, str) or not value:
        kind = "grammar" if grammar.type == "grammar" else "regular expression"
        raise invalid(f"grammar is not valid: a {kind} is a text")
    _require_size(value)
    if grammar.type == "grammar":
        _require_size(value, most=LONGEST_GBNF)
        try:
            return grammar_from("grammar", value)
        except (ValueError, RecursionError) as error:
            raise invalid(f"grammar is not valid: {_short(error)}") from error
    return str(LLMatcher.grammar_from_regex(value))


def _schema(value: Any) -> dict[str, Any]:
    """A schema that is given as an object or as its text."""
    if isinstance(value, str):
        _require_size(value)
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise invalid(f"grammar is not valid: {_short(error)}") from error
    if not isinstance(value, dict):
        raise invalid("grammar is not valid: a JSON schema is an object")
    require_shallow(value)
    return value


def require_shallow(*values: Any) -> None:
    """Refuse objects and lists that are nested too deeply, or together hold more than is allowed.

    Raises:
        Refused: of kind validation.
    """
    level, count = list(values), 0
    for _ in range(DEEPEST):
        # all values of a level are at least as many characters
        count += len(level)
        if count > LONGEST:
            raise invalid(f"grammar is not valid: more than {LONGEST} characters")
        level = [
            part
            for item in level
            if isinstance(item, dict | list)
            for part in (item.values() if isinstance(item, dict) else item)
        ]
    if any(isinstance(item, dict | list) for item in level):
        raise invalid(f"grammar is not valid: deeper than {DEEPEST}")


def _require_size(text: str, *, most: int = LONGEST) -> None:
    if len(text) > most:
        raise invalid(f"grammar is not valid: {len(text)} characters, {most} are allowed")


def _short(error: object) -> str:
    """A foreign message in one line, at most 500 characters of it."""
    return " ".join(str(error).split())[:500]
