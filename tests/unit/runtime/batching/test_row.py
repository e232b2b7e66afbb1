"""How a row chooses its next token."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from quantflow.runtime.batching.request import BatchRequest
from quantflow.runtime.batching.row import BatchRow
from quantflow.runtime.batching.runner import scored
from quantflow.runtime.batching.stream import Stream

VALUES = st.sampled_from([-2.5, -1.0, 0.0, 0.1, 0.7, 1.0, 1.7])  # few, so that many are equal
BIASES = st.sampled_from([float("-inf"), -100.0, -1.0, -0.1, 0.0, 0.3, 1.0, 100.0])


@given(
    logits=st.lists(VALUES, min_size=2, max_size=9),
    bias=st.dictionaries(st.integers(0, 8), BIASES, max_size=4),
)
def test_the_choice_with_a_bias_is_the_first_of_the_highest_biased_logits(logits, bias):
    bias = {token: value for token, value in bias.items() if token < len(logits)}
    request = BatchRequest(input_ids=(0,), max_new_tokens=1, logit_bias=bias)
    row = BatchRow(Stream(request, on_cancel=lambda _: None), vocab_size=len(logits), stop=None)
    biased = torch.tensor(logits)
    for token, value in bias.items():
        biased[token] += value
    if biased.isneginf().all():
        return
    shared = torch.tensor([logits])
    assert row.next(scored(shared)).id == int(biased.argmax())
    assert shared.tolist() == torch.tensor([logits]).tolist()  # whoever else reads them
