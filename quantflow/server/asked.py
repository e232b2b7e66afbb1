"""The fields of a body, under whatever server's names they stand, as one request."""

from typing import Any

from quantflow.server.bodies import Asking, Grammar, OpenAIBody, Parameters, ResponseFormat
from quantflow.server.errors import invalid
from quantflow.server.validation import MOST_STOPS, Asked

MOST_LOGPROBS = 20  # OpenAI's own limit


def asked_by(parameters: Parameters, *, streams: bool = False) -> Asked:
    """The request that TGI's parameters make."""
    return Asked(
        best_of=parameters.best_of,
        top_k=parameters.top_k,
        do_sample=parameters.do_sample,
        max_new_tokens=parameters.max_new_tokens,
        stop=_stop(parameters.stop, parameters.stop_sequences),
        seed=parameters.seed,
        watermark=parameters.watermark,
        top_n_tokens=parameters.top_n_tokens,
        grammar=constraint_of(parameters),
        streams=streams,
        prefill=parameters.decoder_input_details,
        **_common(parameters),
    )


def asked_of(
    body: OpenAIBody,
    *,
    grammar: Grammar | None,
    limit: int | None,
    top: int,
    prefill: bool = False,
    echoes: bool = False,
    best_of: int | None = None,
) -> Asked:
    """The request that a body of OpenAI's makes.

    Args:
        body: body of a chat or a completion.
        grammar: constraint of the answer.
        limit: largest number of tokens; None is as many as fit.
        top: likeliest tokens per step.
        prefill: whether the answer holds the prompt's log-probabilities.
        echoes: whether it begins with the prompt.
        best_of: number of continuations among which the best is returned.
    """
    stop = [body.stop] if isinstance(body.stop, str) else body.stop
    return Asked(
        best_of=best_of,
        choices=body.n,
        top_k=0 if body.top_k == -1 else body.top_k,  # both mean all tokens elsewhere
        do_sample=True,
        zero_is_greedy=True,
        max_new_tokens=limit,
        stop=_stop(stop, body.stop_sequences),
        seed=None if body.seed in (None, -1) else body.seed % 2**64,
        top_n_tokens=top,
        top_n_limit=MOST_LOGPROBS,
        stop_limit=MOST_STOPS,
        grammar=grammar,
        streams=bool(body.stream),
        prefill=prefill,
        echoes=echoes,
        **_common(body),
    )


def limit_of(body: OpenAIBody, *, default: int | None) -> int | None:
    """The largest number of new tokens; None is as many as fit, which -1 means too.

    Args:
        body: body of a chat or a completion.
        default: number where the body has none.
    """
    newer = body.max_completion_tokens is not None
    given = _one(body, "max_completion_tokens" if newer else "max_tokens", "n_predict")
    return default if given is None else None if given == -1 else int(given)


def constraint_of(body: Asking) -> Grammar | None:
    """The constraint of an answer, by whatever name.

    Raises:
        Refused: of kind validation; the body has several.
    """
    found = {
        name: Grammar(type=kind, value=value)
        for name, kind in _CONSTRAINTS.items()
        if (value := getattr(body, name)) is not None
    }
    if (own := getattr(body, "grammar", None)) not in (None, ""):
        found["grammar"] = Grammar(type="grammar", value=own) if isinstance(own, str) else own
    if (inner := body.structured_outputs) is not None:
        values = {**dict(inner), "json_object": inner.json_object or None}
        found |= {
            f"structured_outputs.{name.removesuffix('_value')}": Grammar(type=kind, value=value)
            for name, kind in _STRUCTURED.items()
            if (value := values[name]) is not None
        }
    format = getattr(body, "response_format", None)
    if format is not None and (wanted := grammar_of(format)) is not None:
        found["response_format"] = wanted
    if len(found) > 1:
        raise invalid(f"{' and '.join(f'`{name}`' for name in found)}: one constraint is possible")
    return next(iter(found.values()), None)


def grammar_of(format: ResponseFormat) -> Grammar | None:
    """The grammar of a response format."""
    if format.type == "text":
        return None
    wrapped = format.json_schema
    # some clients leave OpenAI's wrapper out, and give the schema itself
    inner = wrapped.get("schema", wrapped) if wrapped is not None else format.own_schema
    value = format.value if inner is None else inner
    if format.type == "json_object" and not value:
        return Grammar(type="json_object")
    return Grammar(type="regex" if format.type == "regex" else "json", value=value)


_CONSTRAINTS: dict[str, Any] = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "json_schema": "json",
    "regex": "regex",
    "ebnf": "grammar",
}
_STRUCTURED: dict[str, Any] = {
    "json_value": "json",
    "regex": "regex",
    "choice": "choice",
    "grammar": "grammar",
    "json_object": "json_object",
}


def _common(body: Asking) -> dict[str, Any]:
    """The fields that both interfaces have."""
    plain = ("temperature", "top_p", "min_p", "typical_p", "frequency_penalty", "presence_penalty")
    sigma = body.top_n_sigma
    allowed = body.allowed_token_ids
    return {
        **{name: getattr(body, name) for name in (*plain, "logit_bias")},
        "repetition_penalty": _one(body, "repetition_penalty", "repeat_penalty"),
        "no_repeat_ngram_size": body.no_repeat_ngram_size or 0,
        "bad_words": tuple(body.bad_words or ()),
        "allowed_token_ids": None if allowed is None else tuple(allowed),
        "top_n_sigma": None if sigma is None or sigma <= 0 else sigma,
        "truncate": _one(body, "truncate", "truncate_prompt_tokens"),
        "special": body.add_special_tokens,
        "shows_special": body.skip_special_tokens is False,
        "stop_token_ids": tuple(dict.fromkeys(body.stop_token_ids or ())),
        "ignores_ends": bool(body.ignore_eos),
        "min_tokens": _one(body, "min_tokens", "min_new_tokens") or 0,
        "keeps_stop": _one(body, "include_stop_str_in_output", "no_stop_trim"),
    }


def _stop(stop: list[str] | None, older: list[str] | None) -> tuple[str, ...]:
    if stop and older and stop != older:
        raise invalid("`stop` and `stop_sequences` are one field, and differ")
    return tuple(stop or older or ())


def _one(body: Any, name: str, other: str) -> Any:
    """The value of a field that two servers name differently.

    Raises:
        Refused: of kind validation; both names stand in the body, with different values.
    """
    value, second = getattr(body, name), getattr(body, other)
    if value is not None and second is not None and value != second:
        raise invalid(f"`{name}` = {value} and `{other}` = {second} are one field, and differ")
    return second if value is None else value
