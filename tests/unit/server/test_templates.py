"""Chat templates that take time, memory or the stack: they are refused, and work goes on.

Server, pipeline and `chat` each meet all of them.
"""

import io

import pytest

import quantflow
from quantflow.errors import InputError
from quantflow.models import chat_template
from quantflow.stages.cli import cli
from quantflow.stages.cli.output import exit_code
from tests.shared import slow_but

# The first message names the attack, so that one server and one process see all of them.
ATTACKS = {
    "center": ("{{ 'x'.center(2 * 10 ** 9) }}", "MemoryError"),
    "loops": (
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "more than 1 s",
    ),
    "recursion": (
        "{% macro again(n) %}{{ again(n + 1) }}{% endmacro %}{{ again(0) }}",
        "maximum recursion depth",
    ),
    "output": ("{% for a in range(99999) %}{{ 'x' * 1000 }}{% endfor %}", "characters"),
    "power": ("{% set n = 9 %}{{ n ** (n ** n) }}", "more than 1 s"),
    "python": ("{{ messages.__class__.__base__.__subclasses__() }}", "is unsafe"),
    "raise": ("{{ raise_exception('not\ntoday') }}", "not today"),
}
MOST = slow_but(ATTACKS, *ATTACKS.keys() - {"power"})  # of two that are ended by the clock one
CASES = "".join(f"{{% elif word == '{name}' %}}{text}" for name, (text, _) in ATTACKS.items())
TEMPLATE = f"""{{{{ bos_token }}}}{{% set word = messages[0].content %}}\
{{% if false %}}{CASES}{{% else %}}\
{{% for m in messages %}}{{{{ m.role }}}}: {{{{ m.content }}}}\
{{% if m.name is defined %}} ({{{{ m.name }}}}){{% endif %}}
{{% endfor %}}{{% if tools %}}tools: {{{{ tools | tojson }}}}
{{% endif %}}{{% if mood is defined %}}{{{{ mood }}}}
{{% endif %}}{{% if add_generation_prompt %}}assistant:{{% endif %}}{{% endif %}}"""
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "clock",
            "description": "é <&>",
            "parameters": {"b": 1, "a": [None, 2.5]},
        },
    }
]


def asks(word):
    return [{"role": "user", "content": word}]


@pytest.fixture
def seconds(name, monkeypatch):
    """Give an attack on the clock a second, and the others their time on a busy machine too."""
    if ATTACKS[name][1] == "more than 1 s":
        monkeypatch.setattr(chat_template, "SECONDS", 1.0)


@pytest.fixture(scope="module")
def hostile(tmp_path_factory):
    path = tmp_path_factory.mktemp("hostile") / "chat.jinja"
    path.write_text(TEMPLATE)
    return path


@pytest.fixture(scope="module")
def server(serve, hostile):
    with serve(chat_template=hostile) as asking:
        yield asking


@pytest.fixture(scope="module")
def generator(artifact):
    with quantflow.pipeline(artifact) as generator:
        generator.tokenizer.chat_template = TEMPLATE
        yield generator


@pytest.mark.parametrize("name", MOST)
def test_a_server_refuses_a_hostile_template_and_answers_the_next_request(
    name, server, generator, seconds
):
    for path in ("/v1/chat/completions", "/chat_tokenize"):
        answer = server.post(path, {"messages": asks(name), "max_tokens": 2})
        body = answer.json()
        assert (answer.status, body["error_type"]) == (422, "template_error"), body
        assert ATTACKS[name][1] in answer.body.decode() and len(answer.body) < 700
    expected = generator.tokenizer.apply_chat_template(
        asks("def"), tokenize=False, add_generation_prompt=True
    )
    assert (
        server.post("/chat_tokenize", {"messages": asks("def")}).json()["templated_text"]
        == expected
    )
    assert server.generate("def", max_new_tokens=1).status == 200


@pytest.mark.parametrize("name", MOST)
def test_a_pipeline_refuses_a_hostile_template_with_a_sentence(name, generator, seconds):
    with pytest.raises(InputError, match="pipeline: refused by the chat template") as caught:
        generator(asks(name), max_new_tokens=2)
    assert ATTACKS[name][1] in caught.value.cause and "\n" not in caught.value.cause
    (answer,) = generator(asks("def"), max_new_tokens=2)
    assert answer["generated_text"][-1]["role"] == "assistant"


@pytest.mark.parametrize("name", MOST)
def test_chat_refuses_a_hostile_template_with_a_sentence(
    name, artifact, hostile, seconds, monkeypatch, capsys
):
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{name}\n"))
    code = exit_code(
        cli, ["chat", str(artifact), "--chat-template", str(hostile), "--max-new-tokens", "2"]
    )
    err = capsys.readouterr().err
    assert (
        code == 3
        and "conversation: refused by the chat template" in err
        and ATTACKS[name][1] in err
    ), err
    assert "Traceback" not in err


@pytest.mark.parametrize("tools", [None, TOOLS])
@pytest.mark.parametrize("answer", [True, False])
@pytest.mark.parametrize("options", [{}, {"mood": "calm ☃"}, {"bos_token": "<other>"}])
def test_a_text_is_that_of_transformers(tools, answer, options, generator):
    messages = [
        {"role": "system", "content": " é\U0001f600\n", "name": None},
        {"role": "user", "content": "'\"<&>\\", "name": "Ann"},
    ]
    words = {"tools": tools, "tokenize": False, "add_generation_prompt": answer}
    expected = generator.tokenizer.apply_chat_template(messages, **words, **options)
    rendered = chat_template.render(
        generator.tokenizer, messages, answer=answer, tools=tools, options=options
    )
    assert (rendered.text, rendered.unread) == (expected, ())


def test_a_template_that_is_too_deep_to_be_compiled_is_refused(generator):
    deep = "{{ " + "(" * 50_000 + "1" + ")" * 50_000 + " }}"
    nested = "{% if 1 %}" * 3000 + "{% endif %}" * 3000
    folded = "{{ 'x' * 2 ** 40 }}"  # computed where it is compiled
    for template in (deep, nested, folded):
        with pytest.raises(chat_template.NotRendered):
            chat_template.render(generator.tokenizer, asks("def"), answer=True, template=template)
    assert "user: def" in chat_template.render(generator.tokenizer, asks("def"), answer=True).text


def test_what_answers_is_gone_with_the_server(serve, hostile):
    with serve(chat_template=hostile) as asking:
        model = asking.models.first
        assert asking.post("/chat_tokenize", {"messages": asks("def")}).status == 200
        process = model._renderer._process
        assert process.poll() is None
    assert process.poll() is not None


def test_a_model_without_a_template_says_how_to_give_one(serve):
    with serve(chat_template=None) as asking:
        answer = asking.post("/v1/chat/completions", {"messages": asks("def"), "max_tokens": 1})
    assert answer.status == 422
    assert answer.json()["error"]["message"] == (
        "Template error: template not found: the model has none; start the server with "
        "--chat-template FILE"
    )
