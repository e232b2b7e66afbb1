import pytest
from hypothesis import given
from hypothesis import strategies as st

from quantflow.errors import InputError, UsageError
from quantflow.validating.windows import evaluation_sequences


def test_documents_are_cut_in_order_and_a_single_token_left_over_is_dropped():
    sequences = evaluation_sequences(
        [[1, 2, 3, 4, 5], [6], [7, 8, 9]], tokens=100, sequence_length=2
    )
    assert [sequence.tolist() for sequence in sequences] == [[1, 2], [3, 4], [7, 8]]


def test_the_last_window_is_cut_at_the_number_of_tokens():
    sequences = evaluation_sequences([[1, 2, 3, 4], [5, 6, 7, 8]], tokens=6, sequence_length=4)
    assert [sequence.tolist() for sequence in sequences] == [[1, 2, 3, 4], [5, 6]]


@given(
    st.lists(st.lists(st.integers(0, 99), max_size=30), max_size=8),
    st.integers(2, 60),
    st.integers(2, 20),
)
def test_windows_are_pieces_of_documents_and_keep_within_both_limits(
    documents, tokens, sequence_length
):
    if not any(len(document) >= 2 for document in documents):
        return
    sequences = [
        sequence.tolist()
        for sequence in evaluation_sequences(
            documents, tokens=tokens, sequence_length=sequence_length
        )
    ]
    assert all(2 <= len(sequence) <= sequence_length for sequence in sequences)
    available = sum(len(d) - (len(d) % sequence_length == 1) for d in documents)
    total = sum(map(len, sequences))
    assert min(tokens, available) - 1 <= total <= min(tokens, available)
    for sequence in sequences:
        assert any(
            document[start : start + len(sequence)] == sequence
            for document in documents
            for start in range(0, len(document), sequence_length)
        )


def test_text_without_two_consecutive_tokens_and_limits_below_two_are_refused():
    with pytest.raises(
        InputError, match=r"^evaluation: 2 documents hold no two consecutive tokens; give a longer"
    ):
        evaluation_sequences([[1], []], tokens=9, sequence_length=9)
    with pytest.raises(
        UsageError, match=r"^evaluation: tokens=9, sequence_length=1; use 2 or more"
    ):
        evaluation_sequences([[1, 2]], tokens=9, sequence_length=1)
