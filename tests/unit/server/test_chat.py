"""A conversation in the terminal: the same answers from the artifact and from a server."""

import io

import pytest

from quantflow.stages.cli import cli
from quantflow.stages.cli.output import exit_code

LINES = "def\n/system You write Python.\nimport os\n/reset\n/nonsense\n\ndef\n/exit\nnot said\n"
OPTIONS = ("--temperature", "0", "--max-new-tokens", "12")


@pytest.fixture
def talk(monkeypatch, capsys):
    """Run the verb over lines of stdin; return the exit code, stdout and stderr."""

    def run(*arguments, lines=LINES):
        monkeypatch.setattr("sys.stdin", io.StringIO(lines))
        capsys.readouterr()
        code = exit_code(cli, ["chat", *map(str, arguments), *OPTIONS])
        return code, *capsys.readouterr()

    return run


def answers(server):
    """The server's answers in the conversation of LINES."""

    def ask(*messages):
        pairs = [{"role": role, "content": content} for role, content in messages]
        body = {"messages": pairs, "temperature": 0, "max_tokens": 12}
        return server.post("/v1/chat/completions", body).json()["choices"][0]["message"]["content"]

    first = ask(("user", "def"))
    system, turn = ("system", "You write Python."), [("user", "def"), ("assistant", first)]
    second = ask(system, *turn, ("user", "import os"))
    return first, second, ask(system, ("user", "def"))


def test_an_artifact_and_a_server_say_the_same(server, artifact, template, talk):
    expected = "\n".join(answers(server)) + "\n"
    code, out, err = talk(artifact, "--chat-template", template)
    assert (code, out) == (0, expected)
    assert err.count("12 tokens, ") == 3 and "/reset" in err
    assert talk("--url", server.url, "-q", lines=LINES.replace("/nonsense", "")) == (
        0,
        expected,
        "",
    )


def test_mistakes_have_a_cause_and_a_remedy(server, artifact, template, talk):
    for arguments, code, told in (
        ((), 2, "give one of them"),
        ((artifact, "--url", server.url), 2, "give one of them"),
        ((artifact,), 2, "no chat template"),
        (("--url", "127.0.0.1:8000"), 2, "write http://HOST:PORT"),
        (("--url", "http://127.0.0.1:9"), 5, "check that the server runs there"),
        (("--url", server.url, "--model", "another"), 3, "does not exist"),
        (("--url", server.url, "--system", "x " * 2000), 3, "tokens"),
        (
            (artifact, "--chat-template", template, "--system", "x " * 2000),
            2,
            "begin a new one with /reset",
        ),
    ):
        found, _, err = talk(*arguments)
        assert found == code and told in err and "Traceback" not in err, (arguments, err)
