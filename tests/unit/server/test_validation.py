"""Refusals in TGI's order and with TGI's words; the texts are from TGI's source, not ours."""

import itertools
import math

import pytest
from pydantic import ValidationError

from quantflow.errors import UsageError
from quantflow.server.asked import asked_by
from quantflow.server.bodies import CompletionBody, Parameters
from quantflow.server.errors import STATUS, Refused
from quantflow.server.settings import Limits, ServeJob
from quantflow.server.validation import Asked, check, check_truncate, new_tokens

P = "Input validation error: "
# The order is that of TGI's checks.
TEXTS = {
    "best_of above the limit": ({"best_of": 3}, "`best_of` must be > 0 and <= 2. Given: 3"),
    "best_of without sampling": ({"best_of": 2}, "you must use sampling when `best_of` is > 1"),
    "temperature": ({"temperature": 0.0}, "`temperature` must be strictly positive"),
    "repetition_penalty": (
        {"repetition_penalty": 0.0},
        "`repetition_penalty` must be strictly positive",
    ),
    "frequency_penalty": (
        {"frequency_penalty": 2.5},
        "`frequency_penalty` must be >= -2.0 and <= 2.0",
    ),
    "watermark": ({"watermark": True}, "`watermark` = true is not supported"),
    "top_p": ({"top_p": 1.0}, "`top_p` must be > 0.0 and < 1.0"),
    "typical_p": ({"typical_p": 0.0}, "`typical_p` must be > 0.0 and < 1.0"),
    "top_k": ({"top_k": 0}, "`top_k` must be strictly positive"),
    "max_new_tokens": ({"max_new_tokens": 0}, "`max_new_tokens` must be strictly positive"),
    "stop": ({"stop": list("abcde")}, "`stop` supports up to 4 stop sequences. Given: 5"),
    "seed": (
        {"best_of": 2, "do_sample": True, "seed": 1},
        "`seed` must not be set when `best_of` > 1",
    ),
    "top_n_tokens": ({"top_n_tokens": 6}, "`top_n_tokens` must be >= 0 and <= 5. Given: 6"),
}


def refusal(parameters, text="def", **options):
    with pytest.raises(Refused) as caught:
        check(asked_by(Parameters(**parameters), **options), Limits(), text=text)
    return caught.value


@pytest.mark.parametrize("name", TEXTS)
def test_each_condition_has_tgis_words(name):
    parameters, text = TEXTS[name]
    refused = refusal(parameters)
    assert (refused.status, refused.body()) == (
        422,
        {"error": P + text, "error_type": "validation"},
    )


def test_the_first_condition_that_fails_is_told():
    for (_, (first, text)), (_, (second, _)) in itertools.combinations(TEXTS.items(), 2):
        if first.keys() & second.keys() or "best_of" in second:
            continue
        # a parameter of sampling turns sampling on, so that "without sampling" cannot fail
        if (
            "best_of" in first
            and second.keys() & {"temperature", "top_p", "typical_p", "top_k"}
            and "do_sample" not in first
        ):
            continue
        assert refusal({**first, **second}).text == P + text, (first, second)


def test_an_empty_prompt_is_told_after_the_parameters():
    assert refusal({}, text="").text == P + "`inputs` cannot be empty"
    assert refusal({"top_n_tokens": 6}, text="").text == P + TEXTS["top_n_tokens"][1]


def test_streams_have_one_continuation_and_no_prefill():
    told = refusal({"best_of": 2, "do_sample": True}, streams=True).text
    assert told == P + "`best_of` != 1 is not supported when streaming tokens"
    told = refusal({"decoder_input_details": True}, streams=True).text
    assert told == P + "`decoder_input_details` == true is not supported when streaming tokens"


def test_a_watermark_on_float8_weights_is_refused_in_gaudis_words():
    with pytest.raises(Refused, match=r"`watermark` = true is not allowed with FP8 quantization\."):
        check(Asked(watermark=True), Limits(), text="def", float8=True)


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"max_input_tokens": 0}, "max_input_tokens=0; use 1 or more"),
        ({"max_batch_size": 0}, "max_batch_size=0; use 1 or more"),
        (
            {"max_input_tokens": 9, "max_total_tokens": 9},
            "max_input_tokens=9, max_total_tokens=9; keep max_input_tokens < max_total_tokens",
        ),
    ],
)
def test_limits_that_let_nothing_through_are_refused_before_a_model_is_loaded(limits, message):
    with pytest.raises(UsageError, match=message):
        Limits(**limits)
    assert Limits(max_top_n_tokens=0, max_waiting_tokens=0, queue_threshold_ms=0)


def test_lengths_have_tgis_words():
    most = {"max_input_tokens": 10, "max_total_tokens": 12}
    assert new_tokens(Asked(max_new_tokens=2), prompt=10, **most) == 2
    assert new_tokens(Asked(), prompt=5, **most) == 7
    with pytest.raises(Refused) as caught:
        new_tokens(Asked(max_new_tokens=8), prompt=5, **most)
    assert caught.value.text == (
        P
        + (
            "`inputs` tokens + `max_new_tokens` must be <= 12. Given: 5 `inputs` tokens and 8 "
            "`max_new_tokens`"
        )
    )
    with pytest.raises(Refused) as caught:
        new_tokens(Asked(max_new_tokens=1), prompt=11, **most)
    assert caught.value.text == P + "`inputs` must have less than 11 tokens. Given: 11"
    for wrong in (0, 11):
        with pytest.raises(Refused) as caught:
            check_truncate(Asked(truncate=wrong), max_input_tokens=10)
        assert (
            caught.value.text
            == P + f"`truncate` must be strictly positive and less than 11. Given: {wrong}"
        )
    check_truncate(Asked(truncate=10), max_input_tokens=10)


def test_tokens_are_drawn_when_tgi_draws_them():
    assert not Asked().samples and Asked(do_sample=True).samples
    assert all(
        Asked(**{name: value}).samples
        for name, value in (("temperature", 0.5), ("top_k", 3), ("top_p", 0.5))
    )
    assert not Asked(do_sample=True, temperature=0.0, zero_is_greedy=True).samples


def test_kinds_have_tgis_statuses():
    expected = {
        "validation": 422,
        "generation": 424,
        "overloaded": 429,
        "incomplete_generation": 500,
    }
    expected |= {
        "template_error": 422,
        "tool_error": 422,
        "healthcheck": 503,
        "no fast tokenizer": 404,
    }
    assert {kind: STATUS[kind] for kind in expected} == expected


@pytest.mark.parametrize(
    "parameters",
    [
        {"max_new_tokens": "20"},
        {"temperature": "0.5"},
        {"do_sample": "yes"},
        {"do_sample": 1},
        {"seed": True},
        {"top_k": 2.0},
    ],
    ids=str,
)
def test_no_text_is_a_number_and_no_number_true(parameters):
    with pytest.raises(ValidationError):
        Parameters.model_validate(parameters)


@pytest.mark.parametrize(
    "prompt", [["1", 2], [["1"], [2]], [True, False], [1.0], [1, [2]]], ids=str
)
def test_a_prompt_is_texts_or_tokens(prompt):
    with pytest.raises(ValidationError):
        CompletionBody.model_validate({"prompt": prompt})


def test_whole_numbers_may_stand_where_others_may():
    assert Parameters.model_validate({"temperature": 1, "top_p": 0.5}).temperature == 1.0


@pytest.mark.parametrize(
    ("record", "given", "told"),
    [
        (Limits, {"validation_workers": 0}, "validation_workers=0"),
        (Limits, {"max_top_n_tokens": -1}, "max_top_n_tokens=-1"),
        (ServeJob, {"client_timeout": math.nan}, "client_timeout=nan"),
        (ServeJob, {"client_timeout": math.inf}, "client_timeout=inf"),
        (ServeJob, {"drain_seconds": math.nan}, "drain_seconds=nan"),
        (ServeJob, {"model_memory": "lots"}, "size 'lots'"),
        (ServeJob, {"kv_memory": "lots"}, "size 'lots'"),
    ],
    ids=str,
)
def test_options_that_are_none_are_refused_at_the_start(record, given, told, tmp_path):
    with pytest.raises(UsageError, match=told):
        record(**given, **({"artifact": tmp_path} if record is ServeJob else {}))
