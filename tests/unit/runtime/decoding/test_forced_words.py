import pytest
import torch

from quantflow.errors import UsageError
from quantflow.runtime.decoding import Beams, Sampling, generate
from quantflow.runtime.decoding.constrained import progress
from tests.shared import slow

NEW = 8


def owes(text, words):
    """The number of missing tokens, and the next ones, found by trying every position."""
    joined = [tuple(word) for word in words]
    missing = [
        w for w in joined if w not in [tuple(text[i : i + len(w)]) for i in range(len(text))]
    ]
    under_way = {
        w: max(k for k in range(len(w)) if k == 0 or tuple(text[-k:]) == w[:k]) for w in missing
    }
    most = max(under_way.values(), default=0)
    return sum(map(len, missing)) - most, {w[k] for w, k in under_way.items() if k == most}


def oracle(model, row, *, words, beams, new, end):
    """Grid beam search with equal banks, without a cache."""
    lines, done = [((), 0.0)], []
    for n in range(1, new + 1):
        pool = {}
        for text, score in lines:
            with torch.no_grad():
                steps = model(torch.tensor([[*row, *text]])).logits[0, -1].log_softmax(-1)
            missing, paying = owes(text, words)
            for token, step in enumerate(steps.tolist()):
                if not (token == end and missing):
                    pool[(*text, token)] = (score + step, token in paying)
        likely = sorted(pool, key=lambda text: -pool[text][0])[: 2 * beams]
        for line, _ in lines:
            likely += sorted(
                (text for text in pool if text[:-1] == line), key=lambda text: -pool[text][0]
            )[:beams]
        near = set(likely) | {text for text in pool if pool[text][1]}
        tried = [text for text in near if owes(text, words)[0] <= new - n]
        tried.sort(key=lambda text: -pool[text][0])
        done += [
            (pool[text][0] / n, text)
            for text in tried
            if (n == new or text[-1] == end) and not owes(text, words)[0]
        ]
        done = sorted(done, reverse=True)[:beams]
        open_ = [text for text in tried if n < new and text[-1] != end]
        banks = [
            [t for t in open_ if owes(t, words)[0] == d]
            for d in sorted({owes(t, words)[0] for t in open_})
        ]
        turns = sorted((i, d, text) for d, bank in enumerate(banks) for i, text in enumerate(bank))
        lines = [(text, pool[text][0]) for _, _, text in turns[:beams]]
        if not lines or (
            len(done) == beams and max(score for _, score in lines) / n <= done[-1][0]
        ):
            break
    return [list(text) for _, text in done]


# each case is a tuple of words, which are tuples of tokens
@pytest.mark.parametrize("words", [slow((((321,),),)), slow((((623, 1217),),)), ((15, 13), (200,))])
def test_forced_words_are_said_and_the_sequences_are_those_of_grid_beam_search(tiny, rows, words):
    row, end = rows[0], 274
    ids = torch.tensor([row])
    method = Beams(count=3, force_words=words)
    found = generate(
        tiny, ids, max_new_tokens=NEW, method=method, returned=2, eos_token_id=end, pad_token_id=2
    )
    expected = oracle(tiny, row, words=words, beams=3, new=NEW, end=end)[:2]
    longest = max(map(len, expected))
    assert found[:, len(row) :].tolist() == [
        text + [2] * (longest - len(text)) for text in expected
    ]
    for text in expected:
        assert owes(text, words)[0] == 0


def test_the_words_would_not_be_said_otherwise(tiny, rows):
    word = tuple(rows[1][:2])
    for row in rows[:2]:
        free = generate(tiny, torch.tensor([row]), max_new_tokens=NEW, method=Beams(count=3))[
            0, len(row) :
        ].tolist()
        forced = generate(
            tiny,
            torch.tensor([row]),
            max_new_tokens=NEW,
            method=Beams(count=3, force_words=(word,)),
        )
        assert owes(free, [word])[0] > 0
        assert owes(forced[0, len(row) :].tolist(), [word])[0] == 0


def test_a_word_as_long_as_the_text_may_be_is_all_that_is_said(tiny, rows):
    word = (7, 9, 7, 9, 11)
    method = Beams(count=2, force_words=(word,))
    found = generate(tiny, torch.tensor([rows[0]]), max_new_tokens=5, method=method)
    assert found[0, len(rows[0]) :].tolist() == list(word)


def test_each_row_of_a_padded_batch_says_the_words(tiny, batch, rows):
    ids, padding = (part[:2] for part in batch)
    method = Beams(count=2, force_words=((321, 13),))
    found = generate(tiny, ids, max_new_tokens=5, padding=padding, method=method, returned=2)
    assert found.shape == (4, ids.shape[1] + 5)
    for i, row in enumerate(rows[:2]):
        alone = generate(tiny, torch.tensor([row]), max_new_tokens=5, method=method, returned=2)
        assert torch.equal(found[2 * i : 2 * i + 2, int(padding[i]) :], alone)
        assert torch.equal(found[2 * i, : ids.shape[1]], ids[i])


END, WORD, MORE, START, OTHER_END = range(5)


@pytest.mark.parametrize(
    ("early_stopping", "expected"),
    [(False, [WORD, END]), (True, [WORD, END]), ("never", [WORD, MORE, END])],
)
def test_a_line_that_is_no_better_than_the_worst_of_a_full_pool_ends_the_search(
    chain, early_stopping, expected
):
    # After two tokens: log(1/2) / 2 is finished and log(1/2) / 2 runs on; one more token would make
    # it log(1/2) / 3.
    decoder = chain({START: {WORD: 1.0}, WORD: {END: 0.5, MORE: 0.5}, MORE: {END: 1.0}})
    method = Beams(count=1, early_stopping=early_stopping, force_words=((WORD,),))
    found = generate(
        decoder, torch.tensor([[START]]), max_new_tokens=4, method=method, eos_token_id=END
    )
    assert found[0, 1:].tolist() == expected


def test_the_pool_holds_as_many_sequences_as_there_are_beams(chain):
    # Two lines end at the second token, one is kept: it is full with log(0.5) / 2, which log(0.4) /
    # 2 does not reach.
    decoder = chain(
        {START: {WORD: 1.0}, WORD: {END: 0.5, OTHER_END: 0.1, MORE: 0.4}, MORE: {END: 1.0}}
    )
    method = Beams(count=1, force_words=((WORD,),))
    found = generate(
        decoder,
        torch.tensor([[START]]),
        max_new_tokens=4,
        method=method,
        eos_token_id=[END, OTHER_END],
    )
    assert found[0, 1:].tolist() == [WORD, END]


def test_a_text_that_ends_before_it_has_said_its_words_is_not_returned(chain):
    decoder = chain(
        {START: {WORD: 0.1, MORE: 0.9}, MORE: {WORD: 0.5, MORE: 0.5}, WORD: {MORE: 1.0}}
    )
    method = Beams(count=2, force_words=((WORD,),))
    options = {"max_new_tokens": 3, "method": method, "stop": lambda new: len(new) == 1}
    found = generate(decoder, torch.tensor([[START]]), **options)
    assert found[0, 1:].tolist() == [WORD]  # the likelier MORE ends there too, and owes the word
    with pytest.raises(UsageError, match=r"^force_words: 1 of 2 sequences found; use more beams$"):
        generate(decoder, torch.tensor([[START]]), returned=2, **options)


def test_a_line_that_can_no_longer_say_its_words_takes_no_beam(chain):
    # After two tokens W X has said the word, A W and B W owe one token; B B is likelier than B W
    # and owes two of one.
    a, b, w, x, start = range(5)
    table = {
        start: {w: 0.2, a: 0.4, b: 0.4},
        a: {w: 0.5, a: 0.5},
        b: {w: 0.4, b: 0.6},
        w: {x: 1.0},
        x: {a: 1.0},
    }
    method = Beams(count=3, force_words=((w, x),))
    found = generate(
        chain(table), torch.tensor([[start]]), max_new_tokens=3, method=method, returned=3
    )
    assert sorted(found[:, 1:].tolist()) == [[a, w, x], [b, w, x], [w, x, a]]


def test_what_a_text_owes_worked_by_hand():
    words = ((1, 2, 3), (2, 5))
    assert progress((), words) == (5, {1, 2})
    assert progress((1,), words) == (4, {2})
    # the longer beginning counts, though 2 also begins the other word
    assert progress((1, 2), words) == (3, {3})
    assert progress((1, 2, 4), words) == (5, {1, 2})  # broken off
    assert progress((1, 2, 3), words) == (2, {2})
    assert progress((1, 2, 3, 2, 5), words) == (0, set())


def test_words_that_cannot_be_said_are_refused(tiny, rows):
    ids, method = torch.tensor([rows[0]]), Beams(count=2, force_words=((1, 2), (3,)))
    with pytest.raises(
        UsageError,
        match=r"^force_words: 3 tokens, max_new_tokens=2, sampling=None; allow as many new tokens",
    ):
        generate(tiny, ids, max_new_tokens=2, method=method)
    with pytest.raises(
        UsageError, match=r"^force_words: 3 tokens, max_new_tokens=9, sampling=Sampling"
    ):
        generate(tiny, ids, max_new_tokens=9, method=method, sampling=Sampling())
