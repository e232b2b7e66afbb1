import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.generation import logits_process as peer

from quantflow.errors import UsageError
from quantflow.runtime.decoding import Rules, Sampling, generate, logits
from quantflow.runtime.decoding.options import filtered
from quantflow.runtime.decoding.request import Request, allowed
from tests.shared import slow

VOCABULARY, ROWS, LENGTH = 23, 3, 12
SEEDS = st.integers(0, 2**20)


def case(seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return logits [B, V], tokens [B, L] and padding [B]."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(ROWS, VOCABULARY, generator=generator) * 3
    tokens = torch.randint(VOCABULARY // 3, (ROWS, LENGTH), generator=generator)
    return scores, tokens, torch.tensor([0, 2, 5])


@settings(max_examples=40)
@given(seed=SEEDS, value=st.sampled_from([0.01, 0.3, 0.9, 0.99]), least=st.sampled_from([1, 2, 4]))
def test_filters_are_those_of_transformers(seed, value, least):
    scores, tokens, _ = case(seed)
    options = {"min_tokens_to_keep": least}
    count = int(1 + value * 20)
    assert torch.equal(
        logits.top_k(scores, count, least=least),
        peer.TopKLogitsWarper(count, **options)(tokens, scores),
    )
    assert torch.equal(
        logits.top_p(scores, value, least=least),
        peer.TopPLogitsWarper(value, **options)(tokens, scores),
    )
    assert torch.equal(
        logits.min_p(scores, value, least=least),
        peer.MinPLogitsWarper(value, **options)(tokens, scores),
    )
    assert torch.equal(
        logits.typical_p(scores, value, least=least),
        peer.TypicalLogitsWarper(value, **options)(tokens, scores),
    )


@settings(max_examples=40)
@given(seed=SEEDS, count=st.sampled_from([0.3, 1.0, 2.5]), never=st.integers(0, 20))
def test_top_n_sigma_is_llama_cpps(seed, count, never):
    """ggml-org/llama.cpp#11233: mean and deviation over the tokens that are not forbidden."""
    scores, _, _ = case(seed)
    scores[:, :never] = -math.inf
    for row, found in zip(scores.tolist(), logits.top_n_sigma(scores, count).tolist(), strict=True):
        left = [score for score in row if score > -math.inf]
        mean = sum(left) / len(left)
        spread = math.sqrt(sum((score - mean) ** 2 for score in left) / len(left))
        lowest = max(left) - count * spread
        for score, kept in zip(row, found, strict=True):
            if abs(score - lowest) > 1e-4:
                assert kept == (score if score > lowest else -math.inf)
    # the temperature does not change which tokens are kept
    warm, cold = (
        filtered(scores, Sampling(temperature=t, top_n_sigma=count)).isfinite() for t in (0.5, 4.0)
    )
    assert (warm != cold).sum() <= 1
    least = logits.top_n_sigma(scores, 1e-6, least=3).isfinite().sum(dim=-1)
    assert least.tolist() == [3] * ROWS


# the nucleus of flat logits is longer than what is looked at first
@pytest.mark.parametrize("spread", [0.01, 3.0])
def test_a_nucleus_of_a_large_vocabulary_is_that_of_transformers(spread):
    scores = torch.randn(2, 5000, generator=torch.Generator().manual_seed(4)) * spread
    found = logits.top_p(scores, 0.9)
    assert torch.equal(found, peer.TopPLogitsWarper(0.9)(torch.zeros(2, 1), scores))
    assert (int(found[0].isfinite().sum()) > 1024) == (spread < 1)


@settings(max_examples=40)
@given(seed=SEEDS, penalty=st.sampled_from([0.5, 1.3, 2.0]), size=st.integers(1, 4))
def test_penalties_are_those_of_transformers(seed, penalty, size):
    scores, tokens, padding = case(seed)
    repeated = peer.RepetitionPenaltyLogitsProcessor(penalty, prompt_ignore_length=padding)(
        tokens, scores
    )
    assert torch.equal(
        logits.repetition_penalty(scores, tokens, penalty, padding=padding), repeated
    )
    expected = peer.NoRepeatNGramLogitsProcessor(size)(tokens, scores)
    assert torch.equal(logits.no_repeat_ngrams(scores, tokens, size, padding=None), expected)
    for row, pad in enumerate(padding.tolist()):  # a padded row is treated as it would be alone
        alone = peer.NoRepeatNGramLogitsProcessor(size)(
            tokens[row : row + 1, pad:], scores[row : row + 1]
        )
        assert torch.equal(
            logits.no_repeat_ngrams(scores, tokens, size, padding=padding)[row], alone[0]
        )


@settings(max_examples=40)
@given(
    seed=SEEDS,
    words=st.lists(st.lists(st.integers(0, 6), min_size=1, max_size=3), min_size=1, max_size=8),
)
def test_bad_words_are_forbidden_where_transformers_forbids_them(seed, words):
    scores, tokens, padding = case(seed)
    expected = peer.NoBadWordsLogitsProcessor(words)(tokens, scores)
    assert torch.equal(logits.ban_words(scores, tokens, words, padding=None), expected)
    whole = [0] * (LENGTH + 1)
    assert torch.equal(logits.ban_words(scores, tokens, [whole], padding=padding), scores)


def test_a_bad_word_does_not_begin_in_the_padding():
    scores, tokens = torch.zeros(2, 5), torch.tensor([[3, 1], [3, 1]])
    banned = logits.ban_words(scores, tokens, [(3, 1, 4)], padding=torch.tensor([1, 0]))
    assert banned.tolist() == [[0, 0, 0, 0, 0], [0, 0, 0, 0, -math.inf]]


def test_temperature_comes_before_the_filters_which_changes_what_is_kept():
    scores = torch.tensor([[math.log(0.5), math.log(0.3), math.log(0.2)]])
    kept = filtered(scores, Sampling(temperature=0.25, top_p=0.85)).isfinite()
    assert kept.tolist() == [[True, False, False]]  # 0.5^4 is 0.866 of the sum of fourth powers
    filters_first = logits.top_p(scores, 0.85) / 0.25  # bloom.py's order: it would keep all three
    assert filters_first.isfinite().all()


def test_frequency_and_presence_worked_by_hand():
    generated = torch.tensor([[4, 4, 1], [0, 2, 3]])
    found = logits.frequency_penalty(torch.ones(2, 5), generated, frequency=0.25, presence=0.5)
    assert found.tolist() == [[1, 0.25, 1, 1, 0], [0.25, 1, 0.25, 0.25, 1]]


def test_frequency_counts_what_was_generated_and_not_the_prompt():
    request = Request(
        input_ids=torch.tensor([[1, 1]]), max_new_tokens=2, rules=Rules(frequency_penalty=1.0)
    )
    assert allowed(torch.zeros(1, 3), torch.tensor([[1, 1, 2]]), request).tolist() == [[0, 0, -1]]


def test_ids_beyond_the_head_are_passed_over():
    tokens = torch.tensor([[7, 1, 7]])
    for found in (
        logits.repetition_penalty(torch.ones(1, 4), tokens, 2.0, padding=None),
        logits.frequency_penalty(torch.ones(1, 4), tokens, frequency=0.5, presence=0),
    ):
        assert found.tolist() == [[1, 0.5, 1, 1]]
    assert logits.no_repeat_ngrams(
        torch.ones(1, 4), tokens, 1, padding=None
    ).isfinite().tolist() == [[True, False, True, True]]


@pytest.mark.parametrize(
    "rules",
    [
        slow({"repetition_penalty": 1.5}),
        slow({"no_repeat_ngram_size": 2}),
        {"bad_words": ((200,), (321, 13))},
        slow({"min_new_tokens": 6}),
        {"min_length": 14},
        slow({"repetition_penalty": 1.2, "no_repeat_ngram_size": 3, "min_new_tokens": 3}),
    ],
)
def test_rules_give_the_tokens_of_transformers(tiny, rows, peer, rules):
    end = 274
    for row in rows:
        ids = torch.tensor([row])
        theirs = {
            ("bad_words_ids" if k == "bad_words" else k): (
                [list(w) for w in v] if k == "bad_words" else v
            )
            for k, v in rules.items()
        }
        expected = peer(ids, max_new_tokens=10, eos_token_id=end, **theirs)
        assert torch.equal(
            generate(tiny, ids, max_new_tokens=10, eos_token_id=end, rules=Rules(**rules)), expected
        )


def test_no_ngram_stands_twice(tiny, batch):
    ids, padding = batch
    plain = generate(tiny, ids, max_new_tokens=24, padding=padding)
    found = generate(
        tiny, ids, max_new_tokens=24, padding=padding, rules=Rules(no_repeat_ngram_size=2)
    )

    def repeats(tokens):
        rows = [row[pad:] for row, pad in zip(tokens.tolist(), padding.tolist(), strict=True)]
        prompts = [row[pad:] for row, pad in zip(ids.tolist(), padding.tolist(), strict=True)]
        pairs = [list(zip(row, row[1:], strict=False)) for row in rows]
        own = [list(zip(row, row[1:], strict=False)) for row in prompts]
        return sum(
            len(p) - len(set(p)) - (len(o) - len(set(o))) for p, o in zip(pairs, own, strict=True)
        )

    assert repeats(plain) > 0
    assert repeats(found) == 0


def test_rules_that_forbid_everything_are_an_error_and_not_a_token(tiny, rows):
    rules = Rules(bad_words=tuple((token,) for token in range(4096)))
    with pytest.raises(
        UsageError, match=r"^rules: every token is forbidden after 11 tokens; forbid fewer"
    ):
        generate(tiny, torch.tensor([rows[0]]), max_new_tokens=1, rules=rules)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"repetition_penalty": 0.0},
            "repetition_penalty=0.0; use a positive number; 1 changes nothing",
        ),
        ({"frequency_penalty": 2.5}, "frequency_penalty=2.5; use -2 to 2; 0 changes nothing"),
        ({"presence_penalty": math.nan}, "presence_penalty=nan; use -2 to 2; 0 changes nothing"),
        ({"no_repeat_ngram_size": -1}, "no_repeat_ngram_size=-1; use 0 or more; 0 changes nothing"),
        ({"min_new_tokens": -1}, "min_new_tokens=-1; use 0 or more; 0 changes nothing"),
        ({"bad_words": ((1,), ())}, "bad_words: a word of no token; leave it out"),
    ],
)
def test_rules_outside_their_ranges_are_refused(options, message):
    with pytest.raises(UsageError) as caught:
        Rules(**options)
    assert str(caught.value) == message


def test_padding_does_not_count_towards_a_least_length():
    rules = Rules(min_length=4)
    request = Request(
        input_ids=torch.zeros(2, 4).long(),
        padding=torch.tensor([3, 0]),
        max_new_tokens=2,
        rules=rules,
        ends=(1,),
    )
    found = allowed(torch.zeros(2, 3), torch.zeros(2, 4).long(), request)
    assert found.tolist() == [[0, -math.inf, 0], [0, 0, 0]]
