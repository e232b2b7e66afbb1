"""Rows as data sets have them: their columns, tool calls, parts of content, and bad ones."""

import json

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from quantflow.errors import InputError
from quantflow.measuring.rows import document_of, kind_of
from quantflow.measuring.text import LEFT_OUT, read_text

WORDS = ["?", "weather", "in", "Rome", "21", "C", "be", "brief", "CALL", "city", "TOOL"]
WORDS += ["<user>", "<assistant>", "<tool>", "<system>"]
TEMPLATE = (
    "{% for t in tools or [] %}TOOL {{ t.function.name }} {% endfor %}"
    "{% for m in messages %}<{{ m.role }}> {{ m.content }} "
    "{% for c in m.tool_calls or [] %}CALL {{ c.function.name }} "
    "{% for k, v in c.function.arguments.items() %}{{ k }} {{ v }} {% endfor %}{% endfor %}"
    "{% endfor %}"
)
CALL = {"type": "function", "id": "1", "function": {"name": "weather", "arguments": '{"city":"C"}'}}
TOOLS = [{"type": "function", "function": {"name": "weather"}}]
ASKED = {"role": "user", "content": "weather in Rome"}
SAID = "<user> weather in Rome <assistant> 21 C"


def make_tokenizer(**options):
    vocabulary = {word: index for index, word in enumerate(WORDS)}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="?", **options)


@pytest.fixture(scope="module")
def chat():
    return make_tokenizer(chat_template=TEMPLATE)


@pytest.fixture(scope="module")
def plain():
    return make_tokenizer()


def words_of(row, tokenizer):
    """The row's tokens as words; unknown ones as ?."""
    return " ".join(WORDS[token] for token in document_of(row, "row 1", tokenizer))


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        (
            {
                "messages": [
                    ASKED,
                    {"role": "assistant", "content": None, "tool_calls": [CALL]},
                    {"role": "tool", "content": "21 C", "tool_call_id": "1"},
                ],
                "tools": TOOLS,
            },
            "TOOL weather <user> weather in Rome <assistant> CALL weather city C <tool> 21 C",
        ),
        (
            {"messages": [ASKED, {"role": "assistant", "tool_calls": [CALL]}], "tools": None},
            "<user> weather in Rome <assistant> CALL weather city C",
        ),
        (
            {"messages": [ASKED], "tools": json.dumps(TOOLS)},
            "TOOL weather <user> weather in Rome",
        ),
        (
            {
                "messages": [
                    {"role": "user", "content": [{"type": "text", "text": "weather in"}, " Rome"]},
                    {"role": "assistant", "content": [{"type": "text", "text": "21 C"}]},
                ]
            },
            SAID,
        ),
        (
            {
                "conversations": [
                    {"from": "human", "value": "weather in Rome"},
                    {"from": "gpt", "value": "21 C"},
                ],
                "system": "be brief",
            },
            f"<system> be brief {SAID}",
        ),
        (
            {
                "conversations": [
                    {"from": "system", "value": "be brief"},
                    {"from": "human", "value": "weather in Rome"},
                    {"from": "function_call", "value": "weather"},
                    {"from": "observation", "value": "21"},
                ],
                "system": "C",
            },
            "<system> be brief <user> weather in Rome <assistant> weather <tool> 21",
        ),
        ({"conversations": [ASKED]}, "<user> weather in Rome"),
        ({"instruction": "weather in Rome", "input": "", "output": "21 C"}, SAID),
        ({"instruction": "weather", "input": "in Rome", "output": "21 C"}, SAID),
        ({"instruction": "weather in Rome", "response": "21 C"}, SAID),
        ({"prompt": "weather in Rome", "response": "21 C", "input": "no"}, SAID),
        (
            {"prompt": [ASKED], "completion": [{"role": "assistant", "content": "21 C"}]},
            SAID,
        ),
        ({"prompt": "weather in", "completion": " Rome 21"}, "weather in Rome 21"),
        ({"text": "21 C", "messages": [ASKED]}, "<user> weather in Rome"),
        ({"text": "21 C", "instruction": "weather", "output": "in"}, "21 C"),
        ({"text": "21 C", "input_ids": [1]}, "21 C"),
        ({"text": None, "content": "21 C"}, "21 C"),
        ({"prompt": "21 C", "completion": None}, "21 C"),
    ],
)
def test_a_row_becomes_the_document_that_a_chat_model_would_read(chat, row, expected):
    assert words_of(row, chat) == expected


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"text": "21 C", "messages": [ASKED]}, "21 C"),
        ({"instruction": "weather", "input": "in Rome", "output": "21 C"}, "weather in Rome 21 C"),
        ({"prompt": "weather", "response": "21 C"}, "weather 21 C"),
    ],
)
def test_without_a_template_text_goes_before_conversations(plain, row, expected):
    assert words_of(row, plain) == expected


def test_token_ids_go_first_where_there_is_no_tokenizer():
    assert document_of({"text": "21 C", "input_ids": [3, 1]}, "row 1", None) == [3, 1]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"question": "C"}, r"row 1: keys \['question'\] hold no text; give each row text"),
        ({"messages": []}, "row 1: messages is not a list of messages"),
        ({"messages": "hi"}, "row 1: messages is not a list of messages"),
        ({"messages": ["hi"]}, "row 1: messages: message 1 is str"),
        ({"messages": [{"content": "C"}]}, "message 1 has no role"),
        ({"messages": [ASKED, {"role": "user"}]}, "message 2 has no content and no tool_calls"),
        ({"messages": [{"role": "user", "content": 3}]}, "message 1 has content of type int"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]},
            "message 1 has a part of type 'image_url'",
        ),
        ({"conversations": [{"from": "narrator", "value": "C"}]}, "message 1 is from 'narrator'"),
        (
            {"messages": [{"role": "assistant", "tool_calls": ["weather"]}]},
            "message 1: tool_calls is not a list of objects",
        ),
        ({"messages": [ASKED], "tools": "all"}, "row 1: tools is not a list of objects"),
        ({"instruction": "C", "input": 3, "output": "C"}, "row 1: input is int"),
        ({"prompt": "C", "response": 3}, "row 1: response is int"),
    ],
)
def test_what_is_wrong_with_a_row_is_named(chat, row, message):
    with pytest.raises(InputError, match=message):
        document_of(row, "row 1", chat)


def test_the_columns_of_a_row_are_chosen_alike_for_files_and_data_sets():
    assert kind_of({"text": "a", "messages": []}) == ("messages",)
    assert kind_of({"text": "a", "messages": []}, template=False) == ("text",)
    assert kind_of({"answer": "a"}) is None


def write(folder, good, bad):
    path = folder / "rows.jsonl"
    lines = ['{"text": "21 C"}'] * good
    for index in range(bad):
        lines.insert(3 * index + 1, '{"text": 3}')
    path.write_text("\n".join(lines))
    return path


def test_bad_lines_are_left_out_counted_and_the_first_is_named(tmp_path, plain):
    text = read_text(write(tmp_path, 90, LEFT_OUT), plain)
    assert (len(text.documents), text.left_out) == (90, LEFT_OUT)
    path = tmp_path / "rows.jsonl"
    assert text.note == (
        f"10 of 100 lines cannot be read and are left out, the first is {path}: line 2: text is "
        "int, a string is needed"
    )
    clean = read_text(write(tmp_path, 3, 0), plain)
    assert (clean.left_out, clean.note) == (0, None)


def test_one_line_in_a_hundred_may_be_bad_in_a_large_file(tmp_path, plain):
    assert read_text(write(tmp_path, 1980, 20), plain).left_out == 20
    with pytest.raises(InputError, match=r"line 2: text is int.*\(21 of 62 lines cannot be read"):
        read_text(write(tmp_path, 1979, 21), plain)


def test_too_many_bad_lines_and_half_of_few_are_refused_by_the_first(tmp_path, plain):
    with pytest.raises(InputError, match=r"line 2: text is int.*\(11 of 32 lines cannot be read"):
        read_text(write(tmp_path, 80, 11), plain)
    with pytest.raises(InputError, match=r"line 2: text is int, a string is needed; quote"):
        read_text(write(tmp_path, 1, 1), plain)
