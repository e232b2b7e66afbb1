"""Text files to token sequences."""

import hashlib
import json
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from quantflow.errors import InputError, UsageError
from quantflow.measuring.text import (
    hash_sequences,
    inspect_calibration,
    read_documents,
    read_whole,
    select,
)
from quantflow.planning.recipe import Calibration

WORDS = ["<s>", "</s>", "<pad>", "?", "one", "two", "three", "four", "user", "assistant"]
TEMPLATE = "{{ bos_token }}{% for m in messages %} {{ m.role }} {{ m.content }}{% endfor %}"
REFUSING = "{{ raise_exception('no system role') }}"
DOCUMENTS = st.lists(st.lists(st.integers(0, 9), max_size=7), min_size=1, max_size=12)


def make_tokenizer(**options):
    """Words are tokens; BOS (0) in front, as Llama's tokenizer does it."""
    backend = Tokenizer(
        models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="?")
    )
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    special = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "?"}
    return PreTrainedTokenizerFast(tokenizer_object=backend, **(special | options))


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


def write(folder, name, content):
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def refused(path, tokenizer, message):
    with pytest.raises(InputError, match=message) as error:
        read_documents(path, tokenizer)
    assert error.value.exit_code == 3


@pytest.mark.parametrize(
    "text",
    [
        "one two\nthree\n\nfour",
        "\n\none two\nthree\n \t\n\n\nfour\n\n",
        "one two\r\nthree\r\n\r\nfour\r\n",
        "\ufeffone two\nthree\n\nfour",
    ],
)
def test_documents_of_a_text_file_are_separated_by_blank_lines(tmp_path, tokenizer, text):
    assert read_documents(write(tmp_path, "a.txt", text), tokenizer) == [[0, 4, 5, 6], [0, 7]]


def test_a_whole_text_file_is_one_document_and_other_files_are_as_they_were(tmp_path, tokenizer):
    (tmp_path / "a.txt").write_text("one two\n\nthree\n")
    assert read_whole(tmp_path / "a.txt", tokenizer) == [[0, 4, 5, 6]]
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n{"text": "two"}\n')
    assert read_whole(tmp_path / "a.jsonl", tokenizer) == [[0, 4], [0, 5]]


def test_a_json_line_holds_text_messages_or_token_ids_and_notes_are_not_read(tmp_path):
    lines = [
        {"text": "one two", "source": "somewhere"},
        {
            "messages": [
                {"role": "user", "content": "three"},
                {"role": "assistant", "content": "four"},
            ]
        },
        {"input_ids": [5, 4, 5]},
    ]
    path = write(tmp_path, "a.jsonl", "\n".join(map(json.dumps, lines)) + "\n\n")
    documents = read_documents(path, make_tokenizer(chat_template=TEMPLATE))
    assert documents[0] == [0, 4, 5]
    assert documents[2] == [5, 4, 5]
    assert documents[1][-4:] == [8, 6, 9, 7]
    assert documents[1].count(0) == 1


def test_a_line_separator_inside_a_json_string_does_not_end_the_line(tmp_path, tokenizer):
    path = write(tmp_path, "a.jsonl", '{"text": "one\u2028two\u0085three"}')
    assert read_documents(path, tokenizer) == [[0, 4, 5, 6]]


def test_token_ids_are_read_from_safetensors_in_both_forms(tmp_path):
    flat = {"tokens": torch.tensor([1, 2, 3, 4, 5]), "lengths": torch.tensor([2, 0, 3])}
    save_file(flat, tmp_path / "a.safetensors")
    assert read_documents(tmp_path / "a.safetensors", None) == [[1, 2], [], [3, 4, 5]]
    save_file(flat | {"indices": torch.tensor([4, 0, 2])}, tmp_path / "b.safetensors")
    assert read_documents(tmp_path / "b.safetensors", None) == [[1, 2], [], [3, 4, 5]]
    save_file(
        {"input_ids": torch.tensor([[1, 2], [3, 4]], dtype=torch.int32)}, tmp_path / "c.safetensors"
    )
    assert read_documents(tmp_path / "c.safetensors", None) == [[1, 2], [3, 4]]


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
@pytest.mark.parametrize("content", ["", "\n \n\n"])
def test_a_file_without_documents_is_refused(tmp_path, tokenizer, name, content):
    refused(
        write(tmp_path, name, content),
        tokenizer,
        rf"{name}: holds no document; give a file with text in it",
    )


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
def test_bytes_that_are_not_utf8_are_refused_with_their_offset(tmp_path, tokenizer, name):
    refused(
        write(tmp_path, name, b"one \xff two"), tokenizer, rf"{name}: not UTF-8 at byte 4; convert"
    )


def test_an_unknown_suffix_and_a_missing_file_are_refused(tmp_path, tokenizer):
    refused(
        write(tmp_path, "a.csv", "one"),
        tokenizer,
        r"suffix '\.csv' is not known; use one of \.txt, \.jsonl",
    )
    refused(tmp_path / "absent.txt", tokenizer, r"absent\.txt: No such file")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": "two"', r"line 2: not strict JSON"),
        ('{"text": "two", "text": "three"}', r"line 2: not strict JSON .*twice"),
        ('"two"', r"line 2: str, a JSON object is needed"),
        (
            '{"question": "two"}',
            r"line 2: keys \['question'\] hold no text; give each row text, messages, ",
        ),
        ('{"text": 3}', r"line 2: text is int, a string is needed"),
        ('{"text": null}', r"line 2: text is NoneType"),
        ('{"input_ids": "4 5"}', r"line 2: input_ids is not a list of integers"),
        ('{"input_ids": [4, 5.0]}', r"line 2: input_ids is not a list of integers"),
        ('{"input_ids": [4, true]}', r"line 2: input_ids is not a list of integers"),
        ('{"input_ids": [4, 10]}', r"line 2: token id 10, the tokenizer has 0\.\.9"),
        ('{"input_ids": [4, -1]}', r"line 2: token id -1, the tokenizer has 0\.\.9"),
        ('{"messages": []}', r"line 2: messages is not a list of messages; .*\{role, content\}"),
        ('{"messages": [{"role": "user"}]}', r"line 2: messages: message 1 has no content"),
        (
            '{"messages": [{"role": "user", "content": "two"}]}',
            r"line 2: messages, but the tokenizer has no chat",
        ),
    ],
)
def test_a_broken_line_is_refused_with_its_number(tmp_path, tokenizer, line, message):
    refused(write(tmp_path, "a.jsonl", '{"text": "one"}\n' + line), tokenizer, message)


def test_what_a_chat_template_refuses_is_refused_with_the_line(tmp_path):
    path = write(tmp_path, "a.jsonl", '{"messages": [{"role": "system", "content": "one"}]}')
    refused(
        path,
        make_tokenizer(chat_template=REFUSING),
        r"line 1: refused by the chat template \(no system role\)",
    )


def test_text_without_a_tokenizer_is_refused(tmp_path):
    refused(write(tmp_path, "a.txt", "one"), None, r"a\.txt: text, and the model has no tokenizer")
    refused(
        write(tmp_path, "a.jsonl", '{"text": "one"}'),
        None,
        r"line 1: text, and the model has no tokenizer",
    )


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (
            {"tokens": torch.tensor([1, 2, 3]), "lengths": torch.tensor([2, 2])},
            r"lengths add up to 4 .*tokens holds 3",
        ),
        ({"tokens": torch.tensor([1]), "lengths": torch.tensor([2, -1])}, r"smallest -1"),
        ({"tokens": torch.tensor([1, 2])}, r"holds \{'tokens': \[2\]\}; store `tokens`"),
        ({"input_ids": torch.tensor([1, 2])}, r"holds \{'input_ids': \[2\]\}; store"),
        (
            {"input_ids": torch.tensor([[1, 2]]), "attention_mask": torch.tensor([[1, 1]])},
            "attention_mask",
        ),
        ({"tokens": torch.tensor([[1]]), "lengths": torch.tensor([1])}, r"'tokens': \[1, 1\]"),
        (
            {"input_ids": torch.tensor([[1.0, 2.0]])},
            r"input_ids is torch\.float32, token ids are integers",
        ),
        (
            {"input_ids": torch.tensor([[1, 2], [3, 99]])},
            r"document 1: token id 99, the tokenizer has 0\.\.9",
        ),
        ({"input_ids": torch.empty((0, 4), dtype=torch.int64)}, "holds no document"),
        (
            {"tokens": torch.tensor([], dtype=torch.int64), "lengths": torch.tensor([0, 0])},
            "holds no document",
        ),
    ],
)
def test_malformed_token_files_are_refused(tmp_path, tokenizer, tensors, message):
    save_file(tensors, tmp_path / "a.safetensors")
    refused(tmp_path / "a.safetensors", tokenizer, message)


def test_selected_sequences_are_truncated_documents_and_short_ones_are_dropped():
    sequences = select([[1], [], [2, 3], [4, 5, 6, 7]], 10, sequence_length=3, seed=0)
    assert sorted(sequence.tolist() for sequence in sequences) == [[2, 3], [4, 5, 6]]
    assert all(sequence.dtype == torch.int64 for sequence in sequences)


def test_packed_sequences_are_full_and_hold_the_documents_one_after_the_other():
    sequences = select([[1, 2, 3], [4, 5], [6, 7]], 10, sequence_length=3, seed=0, pack=True)
    assert [len(sequence) for sequence in sequences] == [3, 3]
    joined = torch.cat(sequences).tolist()
    orders = [[1, 2, 3, 4, 5, 6, 7], [1, 2, 3, 6, 7, 4, 5], [4, 5, 1, 2, 3, 6, 7]]
    orders += [[6, 7, 1, 2, 3, 4, 5], [4, 5, 6, 7, 1, 2, 3], [6, 7, 4, 5, 1, 2, 3]]
    assert joined in [order[:6] for order in orders]


def test_a_text_shorter_than_one_packed_sequence_is_one_short_sequence():
    assert [s.tolist() for s in select([[1, 2]], 10, sequence_length=8, seed=0, pack=True)] == [
        [1, 2]
    ]


@given(
    documents=DOCUMENTS, samples=st.integers(1, 9), length=st.integers(2, 5), seed=st.integers(0, 3)
)
def test_selection_is_a_deterministic_choice_among_the_usable_documents(
    documents, samples, length, seed
):
    usable = Counter(tuple(document[:length]) for document in documents if len(document) >= 2)
    if not usable:
        with pytest.raises(InputError):
            select(documents, samples, sequence_length=length, seed=seed)
        return
    first = select(documents, samples, sequence_length=length, seed=seed)
    second = select(documents, samples, sequence_length=length, seed=seed)
    chosen = Counter(tuple(sequence.tolist()) for sequence in first)
    assert [sequence.tolist() for sequence in first] == [sequence.tolist() for sequence in second]
    assert chosen.total() == min(samples, usable.total())
    assert chosen <= usable


def test_another_seed_gives_another_order_and_fewer_samples_a_prefix():
    documents = [[index, index + 1] for index in range(40)]
    chosen = [s.tolist() for s in select(documents, 40, sequence_length=2, seed=0)]
    assert chosen != documents
    assert chosen != [s.tolist() for s in select(documents, 40, sequence_length=2, seed=1)]
    assert chosen[:5] == [s.tolist() for s in select(documents, 5, sequence_length=2, seed=0)]


@pytest.mark.parametrize("documents", [[[4]], [[], [1]]])
def test_documents_of_one_token_are_refused(documents):
    message = (
        rf"{len(documents)} documents of at most 1 token, 2 tokens are needed; give longer "
        "documents"
    )
    with pytest.raises(InputError, match=message):
        select(documents, 4, sequence_length=8, seed=0)


@pytest.mark.parametrize(
    ("samples", "length", "message"), [(0, 8, "samples=0"), (4, 1, "sequence_length=1")]
)
def test_impossible_requests_are_refused(samples, length, message):
    with pytest.raises(UsageError, match=message):
        select([[1, 2]], samples, sequence_length=length, seed=0)


def test_the_hash_of_sequences_by_hand():
    expected = hashlib.sha256(
        b"\x02\0\0\0\0\0\0\0" + b"\x01\0\0\0\0\0\0\0" + b"\x00\x01\0\0\0\0\0\0" + b"\x00" * 8
    ).hexdigest()
    assert hash_sequences([torch.tensor([1, 256]), torch.tensor([], dtype=torch.int64)]) == expected


def test_the_hash_depends_on_boundaries_and_order_and_not_on_the_integer_type():
    a, b, c = torch.tensor([1, 2]), torch.tensor([3]), torch.tensor([1, 2, 3])
    assert len({hash_sequences(s) for s in ([a, b], [b, a], [c], [])}) == 4
    assert hash_sequences([a.to(torch.int32)]) == hash_sequences([a])


def test_inspection_counts_by_hand(tokenizer):
    documents = [[0, 4, 5], [0, 0, 4, 5, 6], [4], [0, 4, 5], [7, 0, 2, 2], [0, 0, 0]]
    assert inspect_calibration(documents, tokenizer, sequence_length=3) == {
        "documents": 6,
        "tokens": 19,
        "shortest": 1,
        "longest": 5,
        "padding": 2,
        "bos": {"0": 2, "1": 2, "2": 2},
        "duplicates": 1,
        "too_short": 1,
        "truncated": {"documents": 2, "tokens": 3},
    }


def test_eos_that_is_also_the_padding_token_is_not_counted_as_padding():
    report = inspect_calibration([[0, 4, 1]], make_tokenizer(pad_token="</s>"), sequence_length=8)
    assert report["padding"] == 0


def test_inspection_without_special_tokens(tokenizer):
    backend = tokenizer.backend_tokenizer
    report = inspect_calibration(
        [[4, 5]], PreTrainedTokenizerFast(tokenizer_object=backend), sequence_length=8
    )
    assert (report["padding"], report["bos"]) == (0, {"0": 1, "1": 0, "2": 0})


def test_paragraphs_of_plain_text_are_packed_and_lines_of_jsonl_are_kept_whole():
    packs = {name: Calibration(source=name).packs for name in ("a.txt", "a.jsonl", "a.safetensors")}
    assert packs == {"a.txt": True, "a.jsonl": False, "a.safetensors": False}
    assert (
        not Calibration(source="a.txt", pack=False).packs
        and Calibration(source="a.jsonl", pack=True).packs
    )
