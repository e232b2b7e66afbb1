"""The check of a request's values: TGI's conditions in TGI's order, each with TGI's words.

The first that fails is the answer. Lengths are known after tokenizing, so `check_truncate` and
`new_tokens` check them then; the grammar comes last (grammar.py).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from quantflow.runtime.generate_job import Rules, Sampling, Words
from quantflow.runtime.generation_config import SamplingDefaults
from quantflow.server.bodies import Grammar
from quantflow.server.errors import invalid, too_many_prompt_tokens, too_many_tokens
from quantflow.server.settings import Limits

HIGHEST_TEMPERATURE = 1e4  # beyond it every token is equally likely in float32 anyway
# every step of the engine looks at these one by one
MOST_STOP_TOKENS, MOST_BAD_CHARACTERS = 64, 500
MOST_STOPS = 64  # of OpenAI's routes, since editors send a dozen; TGI's have an option
Bias = Mapping[str, float] | Sequence[tuple[int, float]]  # token -> what is added; False forbids it


@dataclass(frozen=True, kw_only=True)
class Asked:
    """The request for one continuation, in either interface; None stands for no value.

    Attributes:
        best_of: number of continuations among which the best is returned.
        choices: number of continuations that are all returned.
        temperature, top_k, top_p, min_p, typical_p, top_n_sigma, do_sample: settings of sampling;
            temperature 0 is greedy where `zero_is_greedy`, and `top_k` 0 is all tokens there.
        repetition_penalty, frequency_penalty, presence_penalty, logit_bias: changes of the logits.
        max_new_tokens: largest number of tokens; None is as many as fit.
        no_repeat_ngram_size: length of n-grams that stand once at most; 0 is none.
        bad_words: words that are never generated.
        allowed_token_ids: tokens beside which none is generated; None allows all.
        stop, seed, truncate, watermark, top_n_tokens, grammar: TGI's parameters.
        stop_token_ids: tokens that end the text and are no part of it.
        ignores_ends: whether the model's end tokens do not end the text; they end a grammar's.
        min_tokens: tokens before which no token ends the text.
        keeps_stop: whether the text keeps what ended it of `stop` and `stop_token_ids`; None is the
            interface's own way.
        special: whether the tokenizer puts its special tokens around the prompt; None is the
            route's own way.
        shows_special: whether special tokens have their text in the answer.
        top_n_limit, stop_limit: limits of `top_n_tokens` and of the number of stop strings, where
            the interface has its own.
        streams, prefill: whether the answer is streamed; whether it holds the prompt's
            log-probabilities.
        echoes: whether it begins with the prompt, also where it is streamed, and may be nothing
            else.
    """

    best_of: int | None = None
    choices: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    typical_p: float | None = None
    top_n_sigma: float | None = None
    do_sample: bool = False
    zero_is_greedy: bool = False
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: Bias | None = None
    no_repeat_ngram_size: int = 0
    bad_words: tuple[str, ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    max_new_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignores_ends: bool = False
    min_tokens: int = 0
    keeps_stop: bool | None = None
    special: bool | None = None
    shows_special: bool = False
    seed: int | None = None
    truncate: int | None = None
    watermark: bool = False
    top_n_tokens: int | None = None
    top_n_limit: int | None = None
    stop_limit: int | None = None
    grammar: Grammar | None = None
    streams: bool = False
    prefill: bool = False
    echoes: bool = False

    @property
    def rows(self) -> int:
        """Number of continuations that are generated."""
        return max(self.best_of or 1, self.choices or 1)

    @property
    def samples(self) -> bool:
        """Whether tokens are drawn, by TGI's rule."""
        if self.zero_is_greedy and self.temperature == 0:
            return False
        filters = (
            *(self.temperature, self.top_k, self.top_p, self.min_p, self.typical_p),
            self.top_n_sigma,
        )
        return self.do_sample or any(value is not None for value in filters)

    def with_defaults(self, defaults: SamplingDefaults) -> "Asked":
        """The request, with the maker's settings of sampling where it says nothing.

        A request of TGI's that does not sample stays greedy, as TGI promises.
        """
        if not self.zero_is_greedy and not self.samples:
            return self
        given: dict[str, Any] = defaults.values()
        if not self.zero_is_greedy and given.get("temperature") == 0:
            del given["temperature"]  # the request asks for samples
        return replace(
            self, **{name: value for name, value in given.items() if getattr(self, name) is None}
        )

    def sampling(self, seed: int) -> Sampling | None:
        """The engine's settings of sampling; None takes the likeliest token.

        Args:
            seed: seed of this continuation.
        """
        if not self.samples:
            return None
        return Sampling(
            temperature=1.0 if self.temperature is None else self.temperature,
            top_k=self.top_k or None,
            top_p=self.top_p,
            min_p=self.min_p,
            typical_p=None if self.typical_p == 1 else self.typical_p,
            top_n_sigma=self.top_n_sigma,
            seed=seed,
        )

    def rules(self, *, bad_words: Words = ()) -> Rules:
        """The engine's penalties and lengths.

        Args:
            bad_words: tokens of `bad_words`.
        """
        return Rules(
            repetition_penalty=1.0 if self.repetition_penalty is None else self.repetition_penalty,
            frequency_penalty=self.frequency_penalty or 0.0,
            presence_penalty=self.presence_penalty or 0.0,
            no_repeat_ngram_size=self.no_repeat_ngram_size,
            bad_words=bad_words,
            min_new_tokens=self.min_tokens,
        )


def check(asked: Asked, limits: Limits, *, text: str | None, float8: bool = False) -> None:
    """Refuse what TGI refuses before it tokenizes.

    Args:
        asked: request to check.
        limits: limits of the server.
        text: prompt; None where the prompt is tokens.
        float8: whether the model's weights are float8; TGI's refusal of a watermark names that.

    Raises:
        Refused: of kind validation.
    """
    _check_best_of(asked, limits)
    if asked.temperature is not None and not (asked.zero_is_greedy and asked.temperature == 0):
        _require(asked.temperature > 0, "`temperature` must be strictly positive")
        _require(
            asked.temperature >= 1e-6, "`temperature` must be >= 0.000001, or sampling must be off"
        )
        _require(
            asked.temperature <= HIGHEST_TEMPERATURE,
            f"`temperature` must be <= {HIGHEST_TEMPERATURE:.1f}",
        )
    penalty = asked.repetition_penalty
    _require(penalty is None or penalty > 0, "`repetition_penalty` must be strictly positive")
    _require(
        penalty is None or 1e-3 <= penalty <= 1e3,
        "`repetition_penalty` must be >= 0.001 and <= 1000.0",
    )
    for name in ("frequency_penalty", "presence_penalty"):
        value = getattr(asked, name)
        _require(value is None or -2 <= value <= 2, f"`{name}` must be >= -2.0 and <= 2.0")
    why = "allowed with FP8 quantization." if float8 else "supported"
    # this server cannot watermark a text, so that the parameter is only ever refused
    _require(not asked.watermark, f"`watermark` = true is not {why}")
    # OpenAI's clients send 1.0 for "all"; TGI's are refused for it.
    top_p = None if asked.zero_is_greedy and asked.top_p == 1 else asked.top_p
    _require(top_p is None or 0 < top_p < 1, "`top_p` must be > 0.0 and < 1.0")
    _require(asked.min_p is None or 0 <= asked.min_p <= 1, "`min_p` must be >= 0.0 and <= 1.0")
    typical_p = None if asked.zero_is_greedy and asked.typical_p == 1 else asked.typical_p
    _require(typical_p is None or 0 < typical_p < 1, "`typical_p` must be > 0.0 and < 1.0")
    top_k = None if asked.zero_is_greedy and asked.top_k == 0 else asked.top_k
    _require(top_k is None or top_k > 0, "`top_k` must be strictly positive")
    alone = asked.echoes and not asked.streams
    _require(asked.max_new_tokens != 0 or alone, "`max_new_tokens` must be strictly positive")
    most = limits.max_stop_sequences if asked.stop_limit is None else asked.stop_limit
    _require(
        len(asked.stop) <= most,
        f"`stop` supports up to {most} stop sequences. Given: {len(asked.stop)}",
    )
    _require(all(asked.stop), "`stop` must not hold an empty string")
    count, most = len(asked.stop_token_ids), MOST_STOP_TOKENS
    _require(count <= most, f"`stop_token_ids` supports up to {most} tokens. Given: {count}")
    _require(asked.allowed_token_ids != (), "`allowed_token_ids` must not be empty")
    _require(all(asked.bad_words), "`bad_words` must not hold an empty string")
    count, most = sum(map(len, asked.bad_words)), MOST_BAD_CHARACTERS
    _require(count <= most, f"`bad_words` supports up to {most} characters. Given: {count}")
    _require(
        not asked.min_tokens or asked.grammar is None,
        "`min_tokens` with a grammar, or with a call that must be made: the grammar says where "
        "the text ends",
    )
    _require(
        asked.best_of in (None, 1) or asked.seed is None,
        "`seed` must not be set when `best_of` > 1",
    )
    top_n = limits.max_top_n_tokens if asked.top_n_limit is None else asked.top_n_limit
    top_tokens = asked.top_n_tokens or 0
    _require(
        top_tokens <= top_n, f"`top_n_tokens` must be >= 0 and <= {top_n}. Given: {top_tokens}"
    )
    _require(text != "", "`inputs` cannot be empty")


def check_truncate(asked: Asked, *, max_input_tokens: int) -> None:
    """Refuse a truncation to nothing, or to more than is allowed.

    Raises:
        Refused: of kind validation.
    """
    given = asked.truncate
    fits = given is None or 0 < given <= max_input_tokens
    _require(
        fits,
        f"`truncate` must be strictly positive and less than {max_input_tokens + 1}. "
        f"Given: {given}",
    )


def new_tokens(asked: Asked, *, prompt: int, max_input_tokens: int, max_total_tokens: int) -> int:
    """Number of tokens that may be added to a prompt.

    Args:
        asked: request with `max_new_tokens`; None there means as many as fit.
        prompt: tokens of the prompt.
        max_input_tokens: limit of a prompt.
        max_total_tokens: limit of a prompt with the added tokens.

    Raises:
        Refused: of kind validation, when they do not fit.
    """
    _require(prompt > 0, "`inputs` cannot be empty")
    new = asked.max_new_tokens
    if new is not None and prompt + new > max_total_tokens:
        raise too_many_tokens(prompt=prompt, new=new, total=max_total_tokens)
    require_prompt(prompt, max_input_tokens=max_input_tokens, max_total_tokens=max_total_tokens)
    new = max_total_tokens - prompt if new is None else new
    _require(
        asked.min_tokens <= new,
        f"`min_tokens` must be <= `max_new_tokens`. Given: {asked.min_tokens} and {new}",
    )
    return new


def require_prompt(prompt: int, *, max_input_tokens: int, max_total_tokens: int) -> None:
    """Refuse a prompt of too many tokens.

    Raises:
        Refused: of kind validation.
    """
    if prompt > max_input_tokens:
        raise too_many_prompt_tokens(given=prompt, most=max_input_tokens, total=max_total_tokens)


def _check_best_of(asked: Asked, limits: Limits) -> None:
    best_of = 1 if asked.best_of is None else asked.best_of
    if asked.streams:
        _require(best_of == 1, "`best_of` != 1 is not supported when streaming tokens")
        _require(
            not asked.prefill or asked.echoes,
            "`decoder_input_details` == true is not supported when streaming tokens",
        )
    cause = f"`best_of` must be > 0 and <= {limits.max_best_of}. Given: {best_of}"
    _require(0 < best_of <= limits.max_best_of, cause)
    _require(best_of == 1 or asked.samples, "you must use sampling when `best_of` is > 1")
    choices = 1 if asked.choices is None else asked.choices
    most = limits.max_client_batch_size
    _require(0 < choices <= most, f"`n` must be > 0 and <= {most}. Given: {choices}")


def _require(fits: bool, text: str) -> None:
    if not fits:
        raise invalid(text)
