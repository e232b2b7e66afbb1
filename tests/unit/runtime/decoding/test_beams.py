import itertools

import pytest
import torch

from quantflow.errors import UsageError
from quantflow.runtime.decoding import Beams, Rules, Sampling, generate
from tests.shared import slow_but

NEW = 10
PAD = 2  # as in conftest.py


@pytest.fixture(scope="module")
def ends(tiny, batch) -> list[int]:
    """Two tokens that beams of the first two prompts come to say."""
    ids, padding = (part[:2] for part in batch)
    found = generate(tiny, ids, max_new_tokens=NEW, padding=padding, method=Beams(count=3))
    return found[:, ids.shape[1] + 4].tolist()


@pytest.mark.parametrize(
    ("length_penalty", "early_stopping"),
    slow_but(
        [(penalty, early) for penalty in (-1.0, 0.0, 1.0, 2.0) for early in (True, False, "never")],
        (-1.0, True),
        (0.0, False),
        (1.0, "never"),
        (2.0, False),
    ),
)
def test_beams_are_those_of_transformers(tiny, batch, peer, ends, length_penalty, early_stopping):
    ids, padding = (part[:2] for part in batch)
    options = {"num_beams": 3, "length_penalty": length_penalty, "early_stopping": early_stopping}
    expected = peer(
        ids, padding, max_new_tokens=NEW, eos_token_id=ends, num_return_sequences=2, **options
    )
    beams = Beams(count=3, length_penalty=length_penalty, early_stopping=early_stopping)
    found = generate(
        tiny,
        ids,
        max_new_tokens=NEW,
        padding=padding,
        method=beams,
        returned=2,
        eos_token_id=ends,
        pad_token_id=PAD,
    )
    assert found.tolist() == expected.tolist()
    assert torch.isin(found[:, ids.shape[1] : -1], torch.tensor(ends)).any()


@pytest.mark.slow
def test_when_beams_end_is_said_by_early_stopping_as_in_transformers(tiny, rows, peer):
    ids, new = torch.tensor([rows[3]]), 20
    end = int(generate(tiny, ids, max_new_tokens=new, method=Beams(count=2))[0, ids.shape[1] + 2])
    said = {}
    for penalty, early in itertools.product((1.0, 2.0), (True, False, "never")):
        options = {"length_penalty": penalty, "early_stopping": early}
        beams = Beams(count=2, **options)
        found = generate(
            tiny, ids, max_new_tokens=new, method=beams, eos_token_id=end, pad_token_id=PAD
        ).tolist()
        assert (
            found
            == peer(ids, max_new_tokens=new, eos_token_id=end, num_beams=2, **options).tolist()
        )
        said[penalty, early] = found
    assert said[1.0, "never"] != said[1.0, False] and said[2.0, True] != said[2.0, False]


@pytest.mark.slow
def test_the_best_beam_is_at_least_as_likely_as_the_greedy_sequence(tiny, rows):
    def likelihood(sequence, start):
        steps = tiny(sequence).logits[0, start - 1 : -1].log_softmax(-1)
        return float(steps.gather(1, sequence[0, start:, None]).sum())

    better = 0
    for row in rows:
        ids = torch.tensor([row])
        with torch.no_grad():
            greedy = likelihood(generate(tiny, ids, max_new_tokens=NEW), len(row))
            best = likelihood(
                generate(tiny, ids, max_new_tokens=NEW, method=Beams(count=4)), len(row)
            )
        assert best >= greedy - 1e-4
        better += best > greedy + 1e-3
    assert better


def test_one_beam_is_greedy(tiny, batch):
    ids, padding = batch
    expected = generate(tiny, ids, max_new_tokens=NEW, padding=padding)
    assert torch.equal(
        generate(tiny, ids, max_new_tokens=NEW, padding=padding, method=Beams(count=1)), expected
    )


@pytest.mark.parametrize("seed", [0, 5])
def test_sampled_beams_are_those_of_transformers(tiny, batch, peer, ends, seed):
    ids, padding = batch
    options = {"temperature": 1.3, "top_k": 20, "top_p": 0.9}
    torch.manual_seed(seed)
    expected = peer(
        ids, padding, max_new_tokens=NEW, num_beams=3, do_sample=True, eos_token_id=ends, **options
    )
    chosen = Sampling(seed=seed, **options)
    options = {
        "method": Beams(count=3),
        "sampling": chosen,
        "eos_token_id": ends,
        "pad_token_id": PAD,
    }
    assert (
        generate(tiny, ids, max_new_tokens=NEW, padding=padding, **options).tolist()
        == expected.tolist()
    )


def test_rules_apply_to_beams(tiny, rows, peer):
    ids = torch.tensor([rows[0]])
    bad = [[7], rows[0][-2:]]
    options = {"repetition_penalty": 1.4, "no_repeat_ngram_size": 2}
    expected = peer(ids, max_new_tokens=NEW, num_beams=3, bad_words_ids=bad, **options)
    rules = Rules(bad_words=tuple(map(tuple, bad)), **options)
    assert torch.equal(
        generate(tiny, ids, max_new_tokens=NEW, method=Beams(count=3), rules=rules), expected
    )


def test_a_padded_row_gives_the_beams_that_it_gives_alone(tiny, rows, batch, ends):
    ids, padding = batch
    options = {
        "max_new_tokens": NEW,
        "method": Beams(count=3),
        "eos_token_id": ends,
        "pad_token_id": PAD,
    }
    together = generate(tiny, ids, padding=padding, **options)
    for row, pad, result in zip(rows, padding.tolist(), together.tolist(), strict=True):
        alone = generate(tiny, torch.tensor([row]), **options)[0].tolist()
        assert result[pad:][: len(alone)] == alone
        assert set(result[pad:][len(alone) :]) <= {PAD}


def test_several_sequences_are_sorted_and_differ(tiny, rows):
    found = generate(
        tiny, torch.tensor([rows[0]]), max_new_tokens=8, method=Beams(count=4), returned=4
    )
    assert len({tuple(row) for row in found.tolist()}) == 4
    with torch.no_grad():
        steps = (
            tiny(found)
            .logits[:, :-1]
            .log_softmax(-1)
            .gather(2, found[:, 1:, None])[:, len(rows[0]) - 1 :, 0]
            .sum(1)
        )
    assert all(a >= b - 1e-4 for a, b in itertools.pairwise(steps.tolist()))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"count": 0}, "beams=0; use 1 or more"),
        ({"count": 2, "early_stopping": "maybe"}, "early_stopping=maybe; use true, false or never"),
        ({"count": 2, "force_words": ((),)}, "force_words: a word of no token; leave it out"),
    ],
)
def test_values_outside_their_ranges_are_refused(options, message):
    with pytest.raises(UsageError) as caught:
        Beams(**options)
    assert str(caught.value) == message


def test_more_sequences_than_beams_and_a_stream_of_beams_are_refused(tiny, rows):
    ids = torch.tensor([rows[0]])
    with pytest.raises(
        UsageError, match=r"^returned=3: 2 sequences differ; sample, or use as many beams$"
    ):
        generate(tiny, ids, max_new_tokens=2, method=Beams(count=2), returned=3)
    with pytest.raises(UsageError, match=r"^stream: more than one sequence grows; "):
        generate(tiny, ids, max_new_tokens=2, method=Beams(count=2), stream=print)
