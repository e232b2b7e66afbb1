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
KIMI = "<|tool_call_begin|>{}<|tool_call_argument_begin|>{}<|tool_call_end|>"
SECTION = "<|tool_calls_section_begin|>{}<|tool_calls_section_end|>"
DSML = '<｜DSML｜invoke name="{}">\n{}\n</｜DSML｜invoke>\n'
DSML_PARAMETER = '<｜DSML｜parameter name="{}" string="{}">{}</｜DSML｜parameter>'
DSML_CITY = DSML_PARAMETER.format("city", "true", "Rome")
DSML_CALLS = "<｜DSML｜function_calls>\n{}</｜DSML｜function_calls>"
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
    # the templates of moonshotai/Kimi-K2-Instruct and Kimi-K2-Thinking
    "kimi": (
        "kimi",
        "Let me see."
        + SECTION.format(
            KIMI.format("functions.weather:0", '{"city": "Rome"}')
            + KIMI.format("functions.clock:1", "{}")
        ),
        [TextDelta("Let me see."), *ROME, *CLOCK],
    ),
    "kimi, a dotted name, and one that nobody offered": (
        "kimi",
        SECTION.format(
            "\n"
            + KIMI.format("functions.sun:3", '{"a": 1}')
            + "\n"
            + KIMI.format(" functions.files.write:12 ", '\n{"path": "a:1"}\n')
        ),
        [
            TextDelta(
                "<|tool_calls_section_begin|>\n<|tool_call_begin|>functions.sun:3<|tool_call_argument_begin|>"
                '{"a": 1}<|tool_call_end|>\n'
            ),
            CallDelta("files.write"),
            ArgumentsDelta('{"path": "a:1"}'),
        ],
    ),
    "kimi, the name alone, and no section": (
        "kimi",
        KIMI.format("weather", '{"city": "Rome"}'),
        ROME,
    ),
    # the template of MiniMaxAI/MiniMax-M2
    "minimax": (
        "minimax",
        'Sure.\n<minimax:tool_call>\n<invoke name="weather">\n<parameter name="city">Rome'
        '</parameter>\n<parameter name="days">5</parameter>\n</invoke>\n<invoke name="clock">\n'
        "</invoke>\n</minimax:tool_call>",
        [
            TextDelta("Sure.\n"),
            CallDelta("weather"),
            ArgumentsDelta('{"city": "Rome", "days": 5}'),
            *CLOCK,
        ],
    ),
    "minimax, types and marks in a text": (
        "minimax",
        '<minimax:tool_call><invoke name="files.write"><parameter name="path">null</parameter>'
        '<parameter name="text">if a < b:\n  x = "<invoke>"\n</parameter><parameter name="lines">'
        '[1, 2]</parameter><parameter name="any">{"a": null}</parameter></invoke>'
        "</minimax:tool_call>",
        [
            CallDelta("files.write"),
            ArgumentsDelta(
                '{"path": null, "text": "if a < b:\\n  x = \\"<invoke>\\"\\n", "lines": [1, 2], '
                '"any": {"a": null}}'
            ),
        ],
    ),
    "minimax, a tool that nobody offered": (
        "minimax",
        '<minimax:tool_call><invoke name="sun"></invoke><invoke name="clock"></invoke>'
        "</minimax:tool_call>",
        [TextDelta('<minimax:tool_call><invoke name="sun"></invoke>'), *CLOCK],
    ),
    # the encoding of deepseek-ai/DeepSeek-V3.2
    "dsml": (
        "dsml",
        "I look.\n\n"
        + DSML_CALLS.format(DSML.format("weather", DSML_CITY) + DSML.format("clock", "")),
        [TextDelta("I look.\n\n"), *ROME, *CLOCK],
    ),
    # its attribute says more than the schema: a text that looks like a number, or like null
    "dsml, types": (
        "dsml",
        DSML_CALLS.format(
            DSML.format(
                "files.write",
                DSML_PARAMETER.format("path", "true", "null")
                + DSML_PARAMETER.format("any", "true", "5")
                + "\n"
                + DSML_PARAMETER.format("lines", "false", "[1]")
                + DSML_PARAMETER.format("ratio", "false", "0.5"),
            )
        ),
        [
            CallDelta("files.write"),
            ArgumentsDelta('{"path": "null", "any": "5", "lines": [1], "ratio": 0.5}'),
        ],
    ),
    "dsml, as DeepSeek V4 has it": (
        "dsml",
        f"<｜DSML｜tool_calls>\n{DSML.format('weather', DSML_CITY)}</｜DSML｜tool_calls>",
        ROME,
    ),
    # the template of google/gemma-4-31B-it
    "gemma": (
        "gemma",
        '<|tool_call>call:weather{city:<|"|>Rome<|"|>,days:5}<tool_call|>'
        "<|tool_call>call:clock{}<tool_call|>",
        [CallDelta("weather"), ArgumentsDelta('{"city": "Rome", "days": 5}'), *CLOCK],
    ),
    "gemma, nested": (
        "gemma",
        'Now. <|tool_call>call:files.write{any:{a:[1,<|"|>x, "y": {}<|"|>,{}],<|"|>b c<|"|>:null},'
        "lines:[],ratio:-1.5,mode:None,text:true}<tool_call|>",
        [
            TextDelta("Now. "),
            CallDelta("files.write"),
            ArgumentsDelta(
                '{"any": {"a": [1, "x, \\"y\\": {}", {}], "b c": null}, "lines": [], '
                '"ratio": -1.5, "mode": null, "text": true}'
            ),
        ],
    ),
    "gemma, JSON's quotes and spaces": (
        "gemma",
        '<|tool_call>call:weather{ "city": "Ro\\u006de" }<tool_call|>',
        ROME,
    ),
    "gemma, a tool that nobody offered": (
        "gemma",
        "<|tool_call>call:sun{a:1}<tool_call|>",
        [TextDelta("<|tool_call>call:sun{a:1}<tool_call|>")],
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
                "<|tool_calls_section_begin|>", "<|tool_call_begin|>", "functions.clock:0", ":",
                "{", "<|tool_call_argument_begin|>", "<minimax:tool_call>", '<invoke name="clock">',
                '<parameter name="x">', "</invoke>", "<｜DSML｜function_calls>", "<|tool_call>",
                '<｜DSML｜invoke name="clock">', '<｜DSML｜parameter name="x" string="true">',
                "</｜DSML｜parameter>", "</｜DSML｜invoke>", "call:clock{", '<|"|>', "<tool_call|>",
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
    for calls, begin in (
        ("minimax", '<minimax:tool_call><invoke name="weather"><parameter name="city">Ro'),
        ("dsml", '<｜DSML｜invoke name="weather"><｜DSML｜parameter name="city" string="true">Ro'),
        ("gemma", '<|tool_call>call:weather{city:<|"|>Ro'),
    ):
        reader = parsers.parsers_of("", calls=calls).reader(TOOLS)
        assert reader.feed(begin) == [CallDelta("weather"), ArgumentsDelta('{"city": "Ro')]
        assert reader.feed('"m') == [ArgumentsDelta('\\"m')]
    reader = parsers.parsers_of("", calls="kimi").reader(TOOLS)
    begin = "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0"
    assert reader.feed(f"{begin}<|tool_call_argument_begin|>") == []
    assert reader.feed('{"ci') == [CallDelta("weather"), ArgumentsDelta('{"ci')]


@pytest.mark.parametrize(
    ("calls", "text", "expected"),
    [
        ("hermes", '<tool_call>{"name": "weather", "arguments": {"ci', '{"ci'),
        ("glm", "<tool_call>weather<arg_key>city</arg_key><arg_value>Ro", '{"city": "Ro'),
        ("qwen_coder", "<function=weather><parameter=days>1", '{"days": '),
        ("pythonic", '[weather(city="a", days=', '{"city": "a"'),
        ("mistral", '[TOOL_CALLS]weather[ARGS]{"city": ', '{"city": '),
        ("kimi", '<|tool_call_begin|>weather:0<|tool_call_argument_begin|>{"city"', '{"city"'),
        ("minimax", '<invoke name="weather"><parameter name="days">1', '{"days": '),
        ("gemma", '<|tool_call>call:weather{city:<|"|>a<|"|>,days:1', '{"city": "a", "days": '),
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
        ("minimax", '<invoke name="weather"><parameter name="city">Rome</parameter>\n'),
        ("dsml", f'<｜DSML｜invoke name="weather">{DSML_CITY}'),
        ("gemma", '<|tool_call>call:weather{city:<|"|>Rome<|"|>'),
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
        ("gemma", "", "<|channel>thought\nHm.\n<channel|>Four.", HM_FOUR),
        ("gemma", "<|turn>model\n<|channel>thought\n<channel|>", "Four.", FOUR),
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
        ("minimax", '<invoke name="f"><parameter name="x">5</parameter></invoke>'),
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
    "kimi": "<|tool_calls_section_begin|>{{ call.id }}<|tool_call_argument_begin|><think></think>",
    "minimax": '<minimax:tool_call><invoke name="{{ n }}"><parameter name="a"><think>',
    "dsml": "{% set dsml_token = '｜DSML｜' %}<{{ dsml_token }}function_calls><think>",
    "gemma": "<|tool_call>call:{{ n }}<tool_call|><|channel>thought\n<channel|>",
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_shows_its_family(name):
    families = parsers.parsers_of(TEMPLATES[name])
    assert families.calls is parsers.CALL_PARSERS[name] and families.offers
    marks = {name: name for name in ("mistral", "granite", "gemma")} | dict.fromkeys(
        ("deepseek", "glm", "hermes", "kimi", "minimax", "dsml"), "think"
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


def test_reading_keeps_the_special_tokens_that_it_needs():
    """The tokenizers of these families have parts of their marks as tokens of their own."""
    dsml = parsers.parsers_of(TEMPLATES["dsml"])
    assert "｜DSML｜" in dsml.kept(tools=True) and "｜DSML｜" not in dsml.kept(tools=False)
    gemma = parsers.parsers_of(TEMPLATES["gemma"]).kept(tools=True)
    assert {"<|channel>", "<channel|>", '<|"|>'} <= set(gemma)


def test_lists_within_lists_end_a_call_of_gemmas():
    """A generator within a generator for each would end in a RecursionError."""
    for depth in (60, 5000):
        text = f"<|tool_call>call:clock{{a:{'[' * depth}{']' * depth}}}<tool_call|>."
        found = read([text], calls="gemma")
        assert found[0] == CallDelta("clock") and isinstance(found[-1], TextDelta)
    assert json.loads(read([text.replace("[" * 5000, "[" * 3).replace("]" * 5000, "]" * 3)],
                           calls="gemma")[1].text) == {"a": [[[]]]}  # fmt: skip


def test_names_of_other_servers_mean_the_same():
    for name, family in parsers.TOOL_NAMES.items():
        assert parsers.parsers_of("", calls=name).calls is parsers.CALL_PARSERS[family]
    for name in parsers.REASONING_NAMES:
        parsers.check_names(calls="auto", reasoning=name)
    with pytest.raises(UsageError, match="tool_parser=hermse"):
        parsers.check_names(calls="hermse", reasoning="auto")
    with pytest.raises(UsageError, match="reasoning_parser=thnik"):
        parsers.check_names(calls="auto", reasoning="thnik")
