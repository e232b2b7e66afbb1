import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from quantflow.errors import InputError
from quantflow.numerics.divergence import compare, join, score, token_kld
from quantflow.numerics.perplexity import logits_of, perplexity


def log(*probabilities: float) -> list[float]:
    return [math.log(p) for p in probabilities]


def test_one_token_worked_by_hand():
    # p = (1/2, 1/2), q = (3/4, 1/4): KL = 1/2 ln(2/3) + 1/2 ln 2 = 1/2 ln(4/3); the text continues
    # with token 1.
    baseline = torch.tensor([log(0.5, 0.5), [9.0, -9.0]])
    candidate = torch.tensor([log(0.75, 0.25), [-9.0, 9.0]])
    result = score(baseline, candidate, torch.tensor([0, 1]))
    assert result.lengths.tolist() == [1]
    assert result.kld.tolist() == pytest.approx([0.5 * math.log(4 / 3)])
    assert result.nll_baseline.tolist() == pytest.approx([math.log(2)])
    assert result.nll_candidate.tolist() == pytest.approx([math.log(4)])
    assert result.agreement.tolist() == [True]


def test_the_order_of_the_arguments_is_kl_of_baseline_to_candidate():
    # p puts all on token 0: KL(p || q) = ln(1 / 0.5) is finite, KL(q || p) is about 0.5 * 50.
    baseline, candidate = torch.tensor([[50.0, 0.0]]), torch.tensor([[0.0, 0.0]])
    assert token_kld(baseline, candidate).item() == pytest.approx(math.log(2))


@settings(max_examples=30)
@given(st.integers(0, 2**20), st.sampled_from([1e-3, 1.0, 30.0]), st.integers(1, 300))
def test_kld_agrees_with_torch_in_float64_and_is_never_negative(seed, size, rows):
    generator = torch.Generator().manual_seed(seed)
    p, q = torch.randn(2, rows, 17, generator=generator) * size
    expected = functional.kl_div(
        q.double().log_softmax(-1), p.double().log_softmax(-1), log_target=True, reduction="none"
    ).sum(-1)
    actual = token_kld(p, q)
    assert torch.allclose(actual, expected, rtol=1e-4, atol=2e-6)
    assert (actual >= 0).all()
    assert token_kld(p, p).tolist() == [0.0] * rows


def test_rounding_leaves_no_kld_below_zero():
    p = torch.randn(200, 500, generator=torch.Generator().manual_seed(0))
    q = p * (1 + 1e-7)
    log_p, log_q = p.log_softmax(-1), q.log_softmax(-1)
    assert ((log_p.exp() * (log_p - log_q)).double().sum(-1) < 0).any()
    assert (token_kld(p, q) >= 0).all()


def test_adding_a_constant_to_the_logits_changes_nothing():
    logits = torch.linspace(-3, 3, 12).reshape(2, 6)
    assert token_kld(logits, logits + 5).max() < 1e-6


def test_perplexity_agrees_with_the_cross_entropy_of_torch_over_all_tokens():
    generator = torch.Generator().manual_seed(0)
    table = torch.randn(11, 11, generator=generator)  # a bigram model
    sequences = [torch.randint(11, (length,), generator=generator) for length in (2, 9, 30)]
    nll = [
        functional.cross_entropy(table[s[:-1]].double(), s[1:], reduction="sum").item()
        for s in sequences
    ]
    assert perplexity(lambda tokens: table[tokens], sequences) == pytest.approx(
        math.exp(sum(nll) / 38), rel=1e-6
    )


def test_a_uniform_model_has_the_perplexity_of_its_vocabulary():
    assert perplexity(
        lambda tokens: torch.zeros(len(tokens), 7), [torch.tensor([1, 2, 3])]
    ) == pytest.approx(7)


def test_sequences_stand_one_after_the_other_in_a_comparison():
    tables = torch.randn(2, 5, 5, generator=torch.Generator().manual_seed(1))
    sequences = [torch.tensor([0, 1, 2]), torch.tensor([3, 4])]
    result = compare(lambda t: tables[0, t], lambda t: tables[1, t], sequences)
    parts = [score(tables[0, t], tables[1, t], t) for t in sequences]
    assert result.lengths.tolist() == [2, 1]
    assert torch.equal(result.kld, torch.cat([part.kld for part in parts]))
    assert torch.equal(result.agreement, torch.cat([part.agreement for part in parts]))
    assert result.agreement.shape == result.nll_baseline.shape == result.nll_candidate.shape == (3,)


def test_logits_of_runs_one_unpadded_sequence_without_gradients():
    class Model(torch.nn.Module):
        def forward(self, input_ids, use_cache):
            assert input_ids.shape == (1, 3)
            assert not use_cache
            assert not torch.is_grad_enabled()
            return type("Output", (), {"logits": functional.one_hot(input_ids, 4).float()})

    assert logits_of(Model())(torch.tensor([2, 0, 1])).tolist() == [
        [0, 0, 1, 0],
        [1, 0, 0, 0],
        [0, 1, 0, 0],
    ]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_logits_that_are_not_finite_are_refused_with_their_owner_and_position(value):
    good = torch.zeros(3, 4)
    bad = good.clone()
    bad[2, 1] = value
    tokens = torch.tensor([0, 1, 2])
    with pytest.raises(InputError, match=r"^candidate: logits at position 2 hold NaN or Inf; "):
        score(good, bad, tokens)
    with pytest.raises(InputError, match=r"^baseline: logits at position 2 hold NaN or Inf; "):
        score(bad, good, tokens)
    with pytest.raises(InputError, match=r"^model: logits at position 2 "):
        perplexity(lambda _: bad, [tokens])


def test_logits_that_do_not_belong_to_the_tokens_are_refused():
    with pytest.raises(InputError, match=r"^baseline: logits \[3, 4\] for tokens \[2\]"):
        score(torch.zeros(3, 4), torch.zeros(2, 4), torch.tensor([0, 1]))
    with pytest.raises(InputError, match=r"^baseline: logits \[1, 4\] for tokens \[1\]"):
        score(torch.zeros(1, 4), torch.zeros(1, 4), torch.tensor([0]))
    with pytest.raises(InputError, match=r"^baseline: token ids span 0..4, the vocabulary has 4"):
        score(torch.zeros(2, 4), torch.zeros(2, 4), torch.tensor([0, 4]))
    with pytest.raises(InputError, match=r"^candidate: a vocabulary of 5, the baseline has 4"):
        score(torch.zeros(2, 4), torch.zeros(2, 5), torch.tensor([0, 1]))
    for nothing in (lambda: join([]), lambda: perplexity(lambda _: torch.zeros(2, 4), [])):
        with pytest.raises(InputError, match=r"^evaluation: no sequences; give an evaluation text"):
            nothing()
