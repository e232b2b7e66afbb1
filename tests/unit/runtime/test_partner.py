"""Conversations that outgrow the context, reasoning, and servers that answer anything."""

import io
import json
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quantflow.errors import InputError, QuantflowError, ResourceError, UsageError
from quantflow.runtime import remote_partner
from quantflow.runtime.chat_job import ChatJob
from quantflow.runtime.partner import (
    FORGETS,
    Conversation,
    ConversationTooLong,
    TextPiece,
    Thinking,
)


class Counting:
    """A partner whose context holds some words, and whose answers are `answer`."""

    def __init__(self, words, answer="yes"):
        self.words, self.said, self.text = words, [], answer

    def answer(self, messages):
        if sum(len(message["content"].split()) for message in messages) > self.words:
            raise ConversationTooLong("too many words", "write fewer")
        self.said.append([(message["role"], message["content"]) for message in messages])
        yield TextPiece("hm", reasoning=True)
        yield TextPiece(self.text)


@pytest.fixture
def told():
    return []


def asked(conversation, text):
    return "".join(piece.text for piece in conversation.ask(text) if not piece.reasoning)


def test_the_oldest_turns_are_left_out_and_the_system_message_stays(told):
    """instructlab/instructlab#559, zeroclaw-labs/zeroclaw#3908: every further message failed."""
    partner = Counting(words=8)
    conversation = Conversation(partner, system="be brief", tell=told.append)
    for text in ("a b", "c d", "e f", "g h"):  # a turn has three words
        assert asked(conversation, text) == "yes"
    assert partner.said[1] == [
        ("system", "be brief"),
        ("user", "a b"),
        ("assistant", "yes"),
        ("user", "c d"),
    ]
    assert partner.said[2] == [
        ("system", "be brief"),
        ("user", "c d"),
        ("assistant", "yes"),
        ("user", "e f"),
    ]
    assert partner.said[3][1:] == [("user", "e f"), ("assistant", "yes"), ("user", "g h")]
    assert told == [FORGETS]
    conversation.reset()
    assert asked(conversation, "a b") == "yes" and partner.said[-1][1:] == [("user", "a b")]


def test_a_message_that_is_too_long_alone_is_refused_and_not_kept(told):
    partner = Counting(words=4)
    conversation = Conversation(partner, tell=told.append)
    with pytest.raises(ConversationTooLong):
        asked(conversation, "a b c d e")
    assert asked(conversation, "a b") == "yes"
    assert partner.said == [[("user", "a b")]] and told == []


def test_an_answer_that_was_stopped_stays_as_far_as_it_came(told):
    partner = Counting(words=99)
    conversation = Conversation(partner, tell=told.append)
    pieces = conversation.ask("a")
    assert [next(pieces), next(pieces)] == [TextPiece("hm", reasoning=True), TextPiece("yes")]
    pieces.close()
    asked(conversation, "b")
    assert partner.said[-1] == [("user", "a"), ("assistant", "yes"), ("user", "b")]


def thought(pieces, *, begun=False):
    """Reasoning and text of an answer that comes in pieces."""
    thinking, found = Thinking(begun=begun), []
    for piece in pieces:
        found += thinking.put(piece)
    found += thinking.end()
    return tuple(
        "".join(piece.text for piece in found if piece.reasoning == kind) for kind in (True, False)
    )


@pytest.mark.parametrize(
    ("text", "begun", "expected"),
    [
        ("<think>a < b</think>yes", False, ("a < b", "yes")),
        ("\n<think>\na</think>\n\nyes", False, ("\na", "\n\nyes")),
        ("a</think>yes", True, ("a", "yes")),
        ("a</think>yes", False, ("", "a</think>yes")),
        ("<think>cut </thi", False, ("cut </thi", "")),
        ("<thin", False, ("", "<thin")),
        ("The tag <think> opens it</think>", False, ("", "The tag <think> opens it</think>")),
        ("", False, ("", "")),
    ],
)
def test_reasoning_stands_in_its_tag_at_the_beginning(text, begun, expected):
    assert thought([text], begun=begun) == expected
    assert thought(text, begun=begun) == expected  # character by character


@given(st.text("<think/> a", max_size=40), st.lists(st.integers(0, 40), max_size=5), st.booleans())
def test_reasoning_is_the_same_however_the_answer_is_cut_into_pieces(text, cuts, begun):
    places = [0, *sorted(cuts), len(text)]
    pieces = [text[a:b] for a, b in zip(places, places[1:], strict=False)]
    pieces = [piece for piece in pieces if piece]
    assert thought(pieces, begun=begun) == thought([text], begun=begun)


@pytest.fixture(scope="session")
def served():
    """Let every server answer some bytes, and return what `chat --url` makes of them."""

    class Connection:
        def __init__(self, place, timeout):
            self.response_class = None

        def request(self, method, path, data, headers):
            self.method = method

        def getresponse(self):
            sock = SimpleNamespace(makefile=lambda *_, **__: io.BytesIO(Connection.answer))
            response = self.response_class(sock, method=self.method)
            response.begin()
            return response

    def talk(answer, *, model="m"):
        Connection.answer = answer
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(remote_partner, "HTTPConnection", Connection)
            partner = remote_partner.RemotePartner(ChatJob(url="http://host:1", model=model))
            if model is None:
                return partner.name
            pieces = list(partner.answer([{"role": "user", "content": "hi"}]))
        return "".join(piece.text for piece in pieces if not piece.reasoning), partner.tokens

    return talk


def http(body, *, status="200 OK", headers=""):
    return f"HTTP/1.1 {status}\r\n{headers}\r\n".encode() + body


def stream(*events, end=b"data: [DONE]\n\n"):
    lines = [f"data: {json.dumps(event)}\n\n".encode() for event in events]
    return http(b"".join(lines) + end)


def delta(text, **others):
    return {"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": None}], **others}


def test_a_stream_is_read_as_servers_write_it(served):
    """microsoft/foundry-local#905, Osmantic/ODS#1809: last events without a choice.

    NousResearch/hermes-agent#90301: a choice without a delta.
    """
    events = [
        {"choices": [{"delta": {"role": "assistant", "content": None}}], "usage": None},
        delta("a"),
        {"choices": [{"delta": {"content": "", "reasoning_content": "hm"}}]},
        {"choices": [{"index": 0, "finish_reason": "stop"}]},
        {"choices": None},
        {"choices": [], "usage": {"completion_tokens": 2}},
    ]
    assert served(stream(delta("say "), *events)) == ("say a", 2)
    assert served(stream(*events, end=b"")) == ("a", 2)  # a reason is an end as well
    body = stream(delta("b")).partition(b"\r\n\r\n")[2]
    parts = [body[:7], body[7:20], body[20:]]
    chunks = b"".join(f"{len(part):x}\r\n".encode() + part + b"\r\n" for part in parts)
    chunked = http(chunks + b"0\r\n\r\n", headers="Transfer-Encoding: chunked\r\n")
    assert served(chunked) == ("b", 0)
    assert served(http(b'{"data": [{"id": "name"}]}'), model=None) == "name"


WRONG = [
    (5, "5, a table is needed"),
    ({"choices": 5}, "choices: 5"),
    ({"choices": [None]}, r"choices\[0\]: None"),
    ({"choices": [{"delta": {"content": 5}}]}, "content: 5"),
    ({"choices": [{"delta": {"content": [{"type": "text"}]}}]}, "content"),
    ({"choices": [], "usage": {"completion_tokens": "many"}}, "completion_tokens: 'many'"),
    ({"choices": [], "usage": {"completion_tokens": 1e300}}, "completion_tokens"),
    ({"error": {"message": "no more"}}, "no more"),
    ({"error": "no more"}, "no more"),
]


@pytest.mark.parametrize(("event", "told"), WRONG, ids=str)
def test_an_event_of_another_shape_ends_with_what_is_wrong(event, told, served):
    with pytest.raises(InputError, match=told):
        served(stream(delta("a"), event))


BODIES = [
    b'{"choices": [], "usage": {"completion_tokens": 1e999}}',
    b'{"choices": [], "usage": {"completion_tokens": NaN}}',
    b"[" * 100_000,
    b'{"a":' * 100_000,
    b'"\xff"',
    b'{"choices": [{"delta": {"content": "\\ud800"}}]}',
    b"1" * 10_000,
    b"x" * (remote_partner.LONGEST_BODY + 1),
]


@pytest.mark.parametrize("data", BODIES, ids=lambda data: str(data[:30]))
def test_what_is_no_strict_json_of_bounded_length_ends_with_a_sentence(data, served):
    with pytest.raises(InputError, match="http://host:1: an"):
        served(http(b"data: " + data + b"\n\n"))
    with pytest.raises(InputError, match="http://host:1: "):
        served(http(data), model=None)
    with pytest.raises(InputError, match="http://host:1/.*: status 500"):
        served(http(data, status="500 No"))


def test_a_redirect_is_told_and_not_followed(served):
    moved = http(b"", status="307 Moved", headers="Location: https://other/v1/\r\n")
    with pytest.raises(InputError, match="status 307, which leads to https://other/v1/"):
        served(moved)


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"HTTP/2 200\r\n\r\n",
        stream(delta("a"), end=b""),
        http(b'{"choices": [{"message": {"content": "not streamed"}}]}'),
        http(b"5\r\nda", headers="Transfer-Encoding: chunked\r\n"),
        http(b"-1\r\n" + b"x" * 99, headers="Transfer-Encoding: chunked\r\n"),
        http(b"-5\r\n" + b"x" * 99, headers="Transfer-Encoding: chunked\r\n"),
        http(b"", headers="A: " + "a" * 70_000 + "\r\n"),
    ],
    ids=lambda answer: str(answer[:40]),
)
def test_an_answer_that_breaks_off_says_so(answer, served):
    with pytest.raises(ResourceError, match="http://host:1: "):
        served(answer)


def test_a_response_has_a_length_at_most(served, monkeypatch):
    monkeypatch.setattr(remote_partner, "LONGEST_RESPONSE", 100_000)
    endless = b"HTTP/1.1 100 Continue\r\n\r\n" * 10_000
    for answer in (
        endless + stream(delta("a")),
        stream(*[delta("a")] * 10_000),
        http(b": nothing\n" * 20_000),
        http(b"-1\r\n" + b"x" * 200_000, headers="Transfer-Encoding: chunked\r\n"),
    ):
        with pytest.raises(ResourceError, match="more than 100000 bytes"):
            served(answer)


@pytest.mark.parametrize(
    ("status", "error"),
    [
        ("400 Bad", {"message": "too long", "code": "context_length_exceeded"}),
        ("400 Bad", {"message": "too long", "type": "exceed_context_size_error"}),
        (
            "400 Bad",
            {"message": "This model's maximum context length is 9 tokens.", "code": 400},
        ),
        ("422 No", "Input validation error: `inputs` must have less than 9 tokens. Given: 10"),
    ],
)
def test_servers_words_for_a_full_context_are_known(status, error, served):
    """ggml-org/llama.cpp, vLLM and TGI, as zeroclaw-labs/zeroclaw#3908 lists them."""
    with pytest.raises(ConversationTooLong):
        served(http(json.dumps({"error": error}).encode(), status=status))
    with pytest.raises(InputError, match="another"):
        served(http(b'{"error": {"message": "another", "code": [5]}}', status=status))


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["choices", "delta", "content", "usage", "completion_tokens", "error", "data", "id"]
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=8,
)
GOOD = stream(delta("a"), {"choices": [], "usage": {"completion_tokens": 2}})


@st.composite
def damaged(draw):
    """A good response with some bytes changed, left out or put in."""
    data = bytearray(GOOD)
    for _ in range(draw(st.integers(1, 3))):
        place = draw(st.integers(0, len(data)))
        data[place : place + draw(st.integers(0, 9))] = draw(st.binary(max_size=4))
    return bytes(data)


@given(
    st.one_of(
        st.binary(max_size=60).map(http),
        st.binary(max_size=60),
        st.lists(VALUES, max_size=3).map(lambda values: stream(*values)),
        VALUES.map(lambda value: http(json.dumps(value).encode())),
        VALUES.map(lambda value: http(json.dumps(value).encode(), status="503 No")),
        damaged(),
    ),
    st.sampled_from(["m", None]),
)
def test_whatever_a_server_answers_is_an_answer_or_an_error_with_a_remedy(served, answer, model):
    try:
        served(answer, model=model)
    except QuantflowError as error:
        assert error.cause.startswith("http://host:1") and error.remedy


@pytest.mark.parametrize(
    "url",
    [
        "127.0.0.1:8000",
        "http://",
        "http://[",
        "http://host:99999",
        "http://host:port",
        "http://user:word@host",
        "http://ho st/",
        "ftp://host",
        "http://host/\x1b]0;",
    ],
)
def test_an_address_that_is_none_is_refused_before_anything_is_asked(url):
    with pytest.raises(UsageError, match="write http://HOST:PORT"):
        ChatJob(url=url)


def test_an_api_key_that_no_header_may_hold_is_refused():
    with pytest.raises(UsageError, match="API key") as refused:
        ChatJob(url="http://host", api_key="secret\r\nX: y")
    assert "secret" not in str(refused.value)


def test_a_host_that_cannot_be_looked_up_is_not_there():
    with pytest.raises(ResourceError, match="check that the server runs there"):
        ChatJob(url=f"http://{'a' * 70}.invalid", model=None).partner()
