"""Calls and reasoning in the text of each family, at once and bit by bit.

The texts are written after the chat templates of released models and after reports of other
servers, which the cases name.
"""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quantflow.errors import UsageError
from quantflow.server import parsers
from quantflow.server.parsers.deltas import ArgumentsDelta, CallDelta, ReasoningDelta, TextDelta

TOOLS = {
    "weather": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    },
    "clock": {},
    "files.write": {
        "type": "object",
        "properties": {
            "path": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "text": {"type": ["string"]},
            "mode": {"enum": ["a", "w"]},
            "lines": {"$ref": "#/$defs/Lines"},
            "ratio": {"type": "number"},
            "any": {},
        },
        "$defs": {"Lines": {"type": "array", "items": {"type": "integer"}}},
    },
}
ROME = [CallDelta("weather"), ArgumentsDelta('{"city": "Rome"}')]
CLOCK = [CallDelta("clock"), ArgumentsDelta("{}")]
DEEPSEEK = "<｜tool▁calls▁begin｜>{}<｜tool▁calls▁end｜>"
V3 = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{}\n```json\n{}\n```<｜tool▁call▁end｜>"
V31 = "<｜tool▁call▁begin｜>{}<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
FOUR = [TextDelta("Four.")]
HM_FOUR = [ReasoningDelta("Hm."), *FOUR]
HARMONY = "<|channel|>analysis<|message|>Look it up.<|end|><|start|>assistant"

# family, text of the model, what it holds
CASES = {
    "hermes": (
        "hermes",
        'Sure: <tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>',
        [TextDelta("Sure: "), *ROME],
    ),
    "hermes, two calls": (
        "hermes",
        '<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>\n'
        '<tool_call>{"name": "clock"}</tool_call>',
        [*ROME, *CLOCK],
    ),
    "hermes, not closed": (
        "hermes",
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}',
        ROME,
    ),
    "hermes, one unknown name among three": (
        "hermes",
        '<tool_call>{"name": "clock"}</tool_call><tool_call>{"name": "sun", "arguments": '
        '{"a": 1}}</tool_call><tool_call>{"name": "clock"}</tool_call>',
        [
            *CLOCK,
            TextDelta('<tool_call>{"name": "sun", "arguments": {"a": 1}}</tool_call>'),
            *CLOCK,
        ],
    ),
    "hermes, arguments before the name, marks in a string": (
        "hermes",
        '<tool_call>{"arguments": {"city": "</tool_call>}\\""}, "name": "weather"}</tool_call>',
        [CallDelta("weather"), ArgumentsDelta('{"city": "</tool_call>}\\""}')],
    ),
    "hermes, arguments as text": (
        "hermes",
        '<tool_call>{"name": "weather", "arguments": "{\\"city\\": \\"Rome\\"}"}</tool_call>',
        ROME,
    ),
    "hermes, no arguments": (
        "hermes",
        '<tool_call>{"name": "clock", "arguments": null}</tool_call>',
        CLOCK,
    ),
    "hermes, no JSON": (
        "hermes",
        "<tool_call>clock</tool_call> and a < b <tool",
        [TextDelta("<tool_call>clock</tool_call> and a < b <tool")],
    ),
    "an answer that is JSON, and no call": (
        "hermes",
        '{"city": "Rome", "name": "weather"}',
        [TextDelta('{"city": "Rome", "name": "weather"}')],
    ),
    "JSON of another name": (
        "hermes",
        '{"name": "Ann", "arguments": [1, {"b": "}"}], "age": 3} she said',
        [TextDelta('{"name": "Ann", "arguments": [1, {"b": "}"}], "age": 3} she said')],
    ),
    "llama": ("llama", '{"name": "weather", "parameters": {"city": "Rome"}}', ROME),
    # vllm-project/vllm#8343, ggml-org/llama.cpp#22581: the tag as text
    "llama, python tag": (
        "llama",
        '<|python_tag|>{"type": "function", "name": "weather", "parameters": {"city": "Rome"}}; '
        '{"name": "clock", "parameters": {}}',
        [*ROME, *CLOCK],
    ),
    "llama, built-in": ("llama", '<|python_tag|>weather.call(city="Rome")', ROME),
    "llama, custom format": ("llama", '<function=weather>{"city": "Rome"}</function>', ROME),
    "llama, code": (
        "llama",
        "<|python_tag|>print(1)",
        [TextDelta("<|python_tag|>print(1)")],
    ),
    "pythonic": (
        "pythonic",
        '[weather(city="Rome, (it", days=-2), clock()]',
        [CallDelta("weather"), ArgumentsDelta('{"city": "Rome, (it", "days": -2}'), *CLOCK],
    ),
    "pythonic, between marks": (
        "pythonic",
        "<|python_start|>[weather(city='Ro\\'me', days=true)]<|python_end|>",
        [CallDelta("weather"), ArgumentsDelta('{"city": "Ro\'me", "days": true}')],
    ),
    "pythonic, without names": (
        "pythonic",
        '[weather("Rome", 2)]',
        [CallDelta("weather"), ArgumentsDelta('{"city": "Rome", "days": 2}')],
    ),
    "pythonic, nested": (
        "pythonic",
        "[files.write(any={'a': [None, (1, 2)]}, text=\"x=1\")]",
        [CallDelta("files.write"), ArgumentsDelta('{"any": {"a": [null, [1, 2]]}, "text": "x=1"}')],
    ),
    # vllm-project/vllm#46863: Llama 4 writes JSON too
    "pythonic, JSON": (
        "pythonic",
        '{"type": "function", "name": "weather", "parameters": {"city": "Rome"}}',
        ROME,
    ),
    "pythonic, a list": ("pythonic", "[1] is a [source]", [TextDelta("[1] is a [source]")]),
    "mistral": (
        "mistral",
        '[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Rome"}}, {"name": "clock", '
        '"arguments": {}, "id": "8xYz12AbC"}]',
        [*ROME, *CLOCK],
    ),
    "mistral, from v11 on": (
        "mistral",
        'Hm.[TOOL_CALLS]weather[ARGS]{"city": "Rome"}[TOOL_CALLS]clock[CALL_ID]8xYz12AbC[ARGS]{}',
        [TextDelta("Hm."), *ROME, *CLOCK],
    ),
    "mistral, no mark before arguments": ("mistral", "[TOOL_CALLS]clock{}", CLOCK),
    "mistral, unknown": (
        "mistral",
        "[TOOL_CALLS]sun[ARGS]{}[TOOL_CALLS]clock[ARGS]{}",
        [TextDelta("[TOOL_CALLS]sun[ARGS]{}"), *CLOCK],
    ),
    "deepseek v3": (
        "deepseek",
        DEEPSEEK.format(V3.format("weather", '{"city": "Rome"}') + "\n" + V3.format("clock", "{}")),
        [*ROME, *CLOCK],
    ),
    "deepseek v3.1": (
        "deepseek",
        "Ok."
        + DEEPSEEK.format(V31.format("weather", '{"city": "Rome"}') + V31.format("clock", "{}")),
        [TextDelta("Ok."), *ROME, *CLOCK],
    ),
    "qwen coder": (
        "qwen_coder",
        'Well.\n<tool_call>\n<function=weather>\n<parameter=city>\nRo\n"me\n</parameter>\n'
        "<parameter=days>\n5\n</parameter>\n</function>\n</tool_call>",
        [
            TextDelta("Well.\n"),
            CallDelta("weather"),
            ArgumentsDelta('{"city": "Ro\\n\\"me", "days": 5}'),
        ],
    ),
    # vllm-project/vllm#57699: the last parameter is not closed
    "qwen coder, parameter not closed": (
        "qwen_coder",
        '<tool_call>\n<function=files.write>\n<parameter=any>\n{"mode": "AIR"}\n</function>\n'
        "</tool_call>",
        [CallDelta("files.write"), ArgumentsDelta('{"any": {"mode": "AIR"}}')],
    ),
    # vllm-project/vllm#22975, waybarrios/vllm-mlx#55: two calls, the first tag left out
    "qwen coder, without the tag": (
        "qwen_coder",
        "<function=clock>\n</function>\n<tool_call>\n<function=weather>\n<parameter=city>Rome"
        "</parameter></function></tool_call>",
        [*CLOCK, *ROME],
    ),
    "qwen coder, types": (
        "qwen_coder",
        "<tool_call><function=files.write><parameter=path>null</parameter><parameter=text>5"
        "</parameter><parameter=mode>a</parameter><parameter=lines>[1, 2]</parameter>"
        "<parameter=ratio>1</parameter><parameter=any>True</parameter></function></tool_call>",
        [
            CallDelta("files.write"),
            ArgumentsDelta(
                '{"path": null, "text": "5", "mode": "a", "lines": [1, 2], "ratio": 1, "any": true}'
            ),
        ],
    ),
    "seed oss": (
        "qwen_coder",
        "Hm.<seed:tool_call>\n<function=weather>\n<parameter=city>Rome</parameter>\n</function>\n"
        "</seed:tool_call>",
        [TextDelta("Hm."), *ROME],
    ),
    "nemotron": (
        "nemotron",
        '<TOOLCALL>[{"name": "weather", "arguments": {"city": "Rome"}}, {"name": "clock", '
        '"arguments": "{}"}]</TOOLCALL>',
        [*ROME, *CLOCK],
    ),
    "lfm2, JSON between marks": (
        "pythonic",
        '<|tool_call_start|>[{"name": "weather", "arguments": {"city": "Rome"}}]<|tool_call_end|>',
        ROME,
    ),
    "apriel": (
        "hermes",
        '<tool_calls>[{"name": "weather", "arguments": {"city": "Rome"}, "id": "a"}, '
        '{"name": "clock", "arguments": {}}]</tool_calls>',
        [*ROME, *CLOCK],
    ),
    "qwen coder, JSON": ("qwen_coder", '<tool_call>{"name": "clock"}</tool_call>', CLOCK),
    "glm": (
        "glm",
        "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Rome</arg_value>\n"
        "<arg_key>days</arg_key>\n<arg_value>5</arg_value>\n</tool_call>\n<tool_call>clock"
        "</tool_call>",
        [CallDelta("weather"), ArgumentsDelta('{"city": "Rome", "days": 5}'), *CLOCK],
    ),
    "glm, on one line": (
        "glm",
        "<tool_call>weather<arg_key>city</arg_key><arg_value>Rome</arg_value></tool_call>",
        ROME,
    ),
    "granite": (
        "granite",
        '<|tool_call|>[{"name": "weather", "arguments": {"city": "Rome"}}, {"name": "clock"}]',
        [*ROME, *CLOCK],
    ),
    "granite, other tag": (
        "granite",
        '<tool_call>[{"name": "weather", "arguments": {"city": "Rome"}}]',
        ROME,
    ),
    "harmony": (
        "harmony",
        f"{HARMONY}<|channel|>commentary to=functions.weather <|constrain|>json<|message|>"
        '{"city": "Rome"}',
        [ReasoningDelta("Look it up."), *ROME],
    ),
    "harmony, the tool before the channel": (
        "harmony",
        ' to=functions.weather<|channel|>commentary json<|message|>{"city": "Rome"}<|call|>',
        ROME,
    ),
    # waybarrios/vllm-mlx#562: the tool on the channel of reasoning
    "harmony, analysis": (
        "harmony",
        f"{HARMONY}<|channel|>analysis to=functions.clock code<|message|>{{}}<|call|>",
        [ReasoningDelta("Look it up."), *CLOCK],
    ),
    "harmony, preamble and end": (
        "harmony",
        f"{HARMONY}<|channel|>commentary<|message|>I look.<|end|>"
        "<|start|>assistant<|channel|>final<|message|>Sunny.",
        [ReasoningDelta("Look it up."), TextDelta("I look.\nSunny.")],
    ),
    "harmony, without channels": ("harmony", "Sunny.", [TextDelta("Sunny.")]),
}


def read(pieces, *, calls="auto", reasoning="none", cut=False, tools=TOOLS, **options):
    """What a reader finds in a text that comes in pieces; neighbours are joined."""
    reader = parsers.parsers_of("", calls=calls, reasoning=reasoning).reader(tools, **options)
    found = [delta for piece in pieces for delta in reader.feed(piece)]
    found += reader.end(cut=cut)
    whole = []
    for delta in found:
        assert isinstance(delta, CallDelta) or delta.text, "a delta of nothing"
        if whole and type(whole[-1]) is type(delta) and not isinstance(delta, CallDelta):
            whole[-1] = type(delta)(whole[-1].text + delta.text)
        else:
            whole.append(delta)
    return whole


@pytest.mark.parametrize("name", CASES)
def test_a_family_reads_what_its_models_write(name):
    calls, text, expected = CASES[name]
    assert read([text], calls=calls) == expected
    for one in expected:
        if isinstance(one, ArgumentsDelta):
            assert isinstance(json.loads(one.text), dict)


@pytest.mark.parametrize("name", CASES)
def test_a_text_in_pieces_holds_what_the_whole_one_does(name):
    calls, text, expected = CASES[name]
    assert read(list(text), calls=calls) == expected

    @settings(max_examples=6, deadline=None)
    @given(
        st.lists(st.integers(0, len(text)), max_size=6), st.integers(0, len(text)), st.booleans()
    )
    def split(places, length, cut):
        """Also one that ends anywhere, of its own accord or by its length."""
        short = text[:length]
        ends = sorted(place for place in places if place <= length)
        pieces = [short[a:b] for a, b in zip([0, *ends], [*ends, length], strict=True)]
        assert read(pieces, calls=calls, cut=cut) == read([short], calls=calls, cut=cut)

    split()


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([*parsers.CALL_PARSERS]),
    st.lists(
        st.sampled_from(
            [
                "<think>", "</think>", "<tool_call>", "</tool_call>", '{"name": "clock"', "}", "[",
                ', "arguments": {', '"a": "', "\\", '"', "<function=clock>", "<parameter=x>", "\n",
                "</function>", "<arg_key>", "clock", "(", ")", "a=1", "[TOOL_CALLS]", "[ARGS]", " ",
                "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<|channel|>",
                "<|start|>assistant", "<|message|>", "<|python_tag|>", "<|python_start|>", "é", "]",
            ]
        ),
        max_size=12,
    ),
    st.integers(1, 5),
)  # fmt: skip
def test_any_text_of_marks_reads_the_same_in_pieces(family, words, size):
    text = "".join(words)
    pieces = [text[place : place + size] for place in range(0, len(text), size)]
    options = {"calls": family, "reasoning": "think"}
    assert read(pieces, **options) == read([text], **options)


def test_arguments_come_as_they_are_written():
    """vllm-project/vllm#43267, #30439 and #32536: the client saw nothing until the call's end."""
    reader = parsers.parsers_of("").reader(TOOLS)
    assert reader.feed('<tool_call>{"name": "weather", ') == []
    assert reader.feed('"arguments": {"ci') == [CallDelta("weather"), ArgumentsDelta('{"ci')]
    assert reader.feed('ty": "Ro') == [ArgumentsDelta('ty": "Ro')]
    reader = parsers.parsers_of("", calls="qwen_coder").reader(TOOLS)
    assert reader.feed("<function=weather><parameter=city>Ro")[-1] == ArgumentsDelta('{"city": "Ro')
    assert reader.feed('"m') == [ArgumentsDelta('\\"m')]


@pytest.mark.parametrize(
    ("calls", "text", "expected"),
    [
        ("hermes", '<tool_call>{"name": "weather", "arguments": {"ci', '{"ci'),
        ("glm", "<tool_call>weather<arg_key>city</arg_key><arg_value>Ro", '{"city": "Ro'),
        ("qwen_coder", "<function=weather><parameter=days>1", '{"days": '),
        ("pythonic", '[weather(city="a", days=', '{"city": "a"'),
        ("mistral", '[TOOL_CALLS]weather[ARGS]{"city": ', '{"city": '),
    ],
)
def test_a_call_that_is_cut_off_has_the_arguments_so_far(calls, text, expected):
    assert read([text], calls=calls, cut=True) == [CallDelta("weather"), ArgumentsDelta(expected)]


@pytest.mark.parametrize(
    ("calls", "text"),
    [
        ("glm", "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Rome</arg_value>\n"),
        ("qwen_coder", "<function=weather><parameter=city>Rome</parameter>"),
        ("pythonic", '[weather(city="Rome"'),
    ],
)
def test_a_call_that_its_writer_forgot_to_close_is_closed(calls, text):
    if calls == "pythonic":
        text += ","
    assert read([text], calls=calls) == ROME


@pytest.mark.parametrize(
    ("reasoning", "prompt", "text", "expected"),
    [
        ("think", "", "<think>\nHm.\n\n</think>\n\nFour.", HM_FOUR),
        ("think", "user: 2+2\n<think>\n", "Hm.\n</think>Four.", HM_FOUR),
        ("think", "<think>\n\n</think>\n\n", "Four.", FOUR),
        ("think", "what is <think>?\nassistant:", "A tag.", [TextDelta("A tag.")]),
        ("think", "", "Say <think> twice.", [TextDelta("Say <think> twice.")]),
        ("think", "", "<think>\n\n</think>\n\nFour.", FOUR),
        ("think", "", "<think>never ends", [ReasoningDelta("never ends")]),
        ("deepseek_r1", "", "Hm.\n</think>\n\nFour.", HM_FOUR),
        ("deepseek_r1", "<think></think>", "Four.", FOUR),
        ("mistral", "", "[THINK]Hm.[/THINK]Four.", HM_FOUR),
        ("seed_oss", "", "<seed:think>Hm.</seed:think>Four.", HM_FOUR),
        ("kimi", "", "◁think▷Hm.◁/think▷Four.", HM_FOUR),
        (
            "granite",
            "",
            "Here's my thought process: Hm. Here is my response: Four.",
            HM_FOUR,
        ),
        ("none", "", "<think>Hm.</think>Four.", [TextDelta("<think>Hm.</think>Four.")]),
    ],
)
def test_reasoning_is_no_part_of_the_answer(reasoning, prompt, text, expected):
    for pieces in ([text], list(text)):
        assert read(pieces, reasoning=reasoning, prompt=prompt, tools={}) == expected


def test_a_call_ends_the_reasoning_that_the_model_forgot_to_end():
    """vllm-project/vllm#39056: Qwen 3.5 calls within its reasoning, and the call was lost."""
    text = "<think>I ask.\n<tool_call><function=clock></function></tool_call>"
    for pieces in ([text], list(text)):
        found = read(pieces, calls="qwen_coder", reasoning="think")
        assert found == [ReasoningDelta("I ask."), *CLOCK]
    assert read([text], reasoning="think", tools={}) == [
        ReasoningDelta("I ask.\n<tool_call><function=clock></function></tool_call>")
    ]


def test_an_answer_goes_on_where_its_prompt_ended():
    options = {"reasoning": "think", "tools": {}}
    assert read(["b</think>c"], prompt="<think>a", prefix="<think>a", **options) == [
        ReasoningDelta("b"),
        TextDelta("c"),
    ]
    assert read(["d"], prompt="<think>a</think>c", prefix="<think>a</think>c", **options) == [
        TextDelta("d")
    ]
    prompt = "<|start|>assistant<|channel|>final<|message|>Sun"
    assert read(["ny."], calls="harmony", prompt=prompt) == [TextDelta("ny.")]
    assert read(["Hm."], calls="harmony", prompt="<|start|>assistant<|channel|>analysis<|message|>"
                ) == [ReasoningDelta("Hm.")]  # fmt: skip


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": []},
        {"properties": {"x": 5}},
        {"properties": {"x": {"anyOf": 5, "type": {}, "enum": "a", "$ref": 1}}},
        {"properties": {"x": {"$ref": "#/properties/x"}}},
        {"properties": {"x": {"anyOf": [{"$ref": "#/properties/x"}] * 50}}},
        {"properties": {"x": {"$ref": "http://elsewhere/x"}}},
        {"properties": {"x": {"type": ["integer", 5]}}},
    ],
    ids=str,
)
def test_a_schema_that_is_none_leaves_the_arguments(schema):
    tools = {"f": schema}
    for calls, text in (
        ("qwen_coder", "<function=f><parameter=x>5</parameter></function>"),
        ("glm", "<tool_call>f<arg_key>x</arg_key><arg_value>5</arg_value></tool_call>"),
        ("pythonic", "[f(x=5)]"),
    ):
        assert read([text], calls=calls, tools=tools) == [
            CallDelta("f"),
            ArgumentsDelta('{"x": 5}'),
        ]
    assert read(["[f(5)]"], calls="pythonic", tools=tools)[0] == CallDelta("f")


def test_of_several_calls_the_first_alone_is_handed_on():
    text = '{"name": "clock"}; {"name": "weather", "parameters": {"city": "Rome"}}'
    assert read([text], parallel=False) == CLOCK
    assert read(list(text), parallel=False) == CLOCK


def test_without_tools_marks_of_calls_are_text():
    text = '<tool_call>{"name": "clock"}</tool_call>'
    for calls in ("hermes", "qwen_coder", "none"):
        assert read([text], calls=calls, tools={} if calls != "none" else TOOLS) == [
            TextDelta(text)
        ]


def test_white_space_alone_is_a_text_where_nothing_else_is():
    assert read([" \n"]) == [TextDelta(" \n")] and read([]) == []
    assert read([" ", " a "]) == [TextDelta("  a ")]


TEMPLATES = {  # a line that each family's templates have
    "harmony": "{{ '<|start|>assistant<|channel|>final<|message|>' }}",
    "mistral": "{{ '[TOOL_CALLS]' + call.function.name + '[ARGS]' }}[THINK]",
    "deepseek": "{{ '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + name }}</think>",
    "qwen_coder": "{{ '<tool_call>\\n<function=' + call.name }}<parameter=",
    "glm": "<tool_call>{{ call.name }}<arg_key>{{ k }}</arg_key><think></think>",
    "granite": "{{ '<|tool_call|>' }} Here is my thought process:",
    "pythonic": "[func_name1(params_name1=params_value1), func_name2(params)]",
    "hermes": '{{ \'<tool_call>\\n{"name": "\' + call.name }}<think>',
    "nemotron": "{{ '<TOOLCALL>[' + fn.name }}",
    "llama": "{{ '<|python_tag|>' }}",
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_shows_its_family(name):
    families = parsers.parsers_of(TEMPLATES[name])
    assert families.calls is parsers.CALL_PARSERS[name] and families.offers
    marks = {"mistral": "mistral", "granite": "granite"} | dict.fromkeys(
        ("deepseek", "glm", "hermes"), "think"
    )
    assert families.marks is (parsers.REASONING_PARSERS[marks[name]] if name in marks else None)


def test_a_template_that_shows_none_has_hermes_calls_and_no_reasoning():
    families = parsers.parsers_of("{{ messages[0].content }}")
    assert families.calls is parsers.CALL_PARSERS["hermes"] and families.marks is None
    none = parsers.parsers_of(TEMPLATES["harmony"], calls="none", reasoning="none")
    assert none.calls is None and none.kept(tools=True) == ()
    thinks = parsers.parsers_of(TEMPLATES["harmony"], calls="none")
    text = f"{HARMONY}<|channel|>final<|message|>Four."
    reader = thinks.reader(TOOLS)
    assert reader.feed(text) + reader.end() == [ReasoningDelta("Look it up."), TextDelta("Four.")]


def test_names_of_other_servers_mean_the_same():
    for name, family in parsers.TOOL_NAMES.items():
        assert parsers.parsers_of("", calls=name).calls is parsers.CALL_PARSERS[family]
    for name in parsers.REASONING_NAMES:
        parsers.check_names(calls="auto", reasoning=name)
    with pytest.raises(UsageError, match="tool_parser=hermse"):
        parsers.check_names(calls="hermse", reasoning="auto")
    with pytest.raises(UsageError, match="reasoning_parser=thnik"):
        parsers.check_names(calls="auto", reasoning="thnik")
