"""A conversation in the terminal: the same answers from the artifact and from a server."""

import io
import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from quantflow import cpu_threads
from quantflow.stages.cli import cli
from quantflow.stages.cli.output import exit_code

LINES = "def\n/system You write Python.\nimport os\n/reset\n/nonsense\n\ndef\n/exit\nnot said\n"
OPTIONS = ("--temperature", "0", "--max-new-tokens", "12")


@pytest.fixture
def talk(monkeypatch, capsys):
    """Run the verb over lines of stdin; return the exit code, stdout and stderr."""

    def run(*arguments, lines=LINES, terminal=False):
        stdin = io.StringIO(lines)
        monkeypatch.setattr("sys.stdin", stdin)
        for stream in (stdin, sys.stdout) if terminal else ():
            monkeypatch.setattr(stream, "isatty", lambda: True)
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
    assert err.splitlines()[1] == cpu_threads.line()
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
        (("--url", server.url, "--system", "x " * 2000), 2, "tokens"),
        (
            (artifact, "--chat-template", template, "--system", "x " * 2000),
            2,
            "write a shorter message, or begin a new conversation with /reset",
        ),
    ):
        found, _, err = talk(*arguments)
        assert found == code and told in err and "Traceback" not in err, (arguments, err)


def test_a_conversation_that_fills_the_context_goes_on(server, artifact, template, talk):
    """Two long turns: every further message failed until /reset."""
    long = " ".join(["value"] * 400)
    lines = f"{long}\n{long}\n{long}\n"
    system = ("--system", "You write Python.")
    for partner in (
        (artifact, "--chat-template", template),
        ("--url", server.url, "--max-new-tokens", "300"),
    ):
        code, out, err = talk(*partner, *system, lines=lines)
        assert code == 0, err
        assert err.count("the context is full: the oldest turns are left out") == 1
        assert err.count(" tokens, ") == 3 and len(out) > 3


ESCAPES = "\x1b]0;owned\x07\x1b]52;c;ZXZpbA==\x07\x9b2J\u202egnp.exe"


@pytest.fixture
def hostile():
    """A server whose name, reasoning, texts and errors hold escapes; it answers once."""
    answers = [
        {"choices": [{"delta": {"reasoning_content": f"hm{ESCAPES}"}}]},
        {"choices": [{"delta": {"content": f"text{ESCAPES}"}, "finish_reason": "stop"}]},
    ]

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.say(200, json.dumps({"data": [{"id": f"name{ESCAPES}"}]}))

        def do_POST(self):
            if answers:
                events = [f"data: {json.dumps(event)}\n\n" for event in answers]
                answers.clear()
                self.say(200, "".join(events))
            else:
                self.say(500, json.dumps({"error": {"message": f"error{ESCAPES}"}}))

        def say(self, status, body):
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, *_):
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as httpd:
        threading.Thread(target=httpd.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{httpd.server_port}"
        httpd.shutdown()


def test_what_a_server_says_is_spelled_out_on_a_terminal(hostile, talk):
    """cadis#1723 and vercel/ai#20052: OSC 52 of a model's text wrote the clipboard."""
    code, out, err = talk("--url", hostile, lines="one\ntwo\n", terminal=True)
    assert code == 0
    spelled = r"\x1b]0;owned\x07\x1b]52;c;ZXZpbA==\x07\x9b2J\u202egnp.exe"
    assert f"name{spelled}. /system" in err and f"error{spelled}" in err
    dim, plain_again = "\x1b[2m", "\x1b[0m"  # of the program itself
    assert f"{dim}hm{spelled}{plain_again}\n\ntext{spelled}\n" in out
    left = (out + err).replace(dim, "").replace(plain_again, "")
    assert not set("\x1b\x07\x9b\u202e") & set(left)


def test_a_file_gets_the_answer_as_it_is_and_no_reasoning(hostile, talk):
    assert talk("--url", hostile, "-q", lines="one\n") == (0, f"text{ESCAPES}\n", "")


def test_reasoning_can_be_left_out(hostile, talk):
    code, out, _ = talk("--url", hostile, "--no-reasoning", lines="one\n", terminal=True)
    assert code == 0 and "hm" not in out and "text" in out


def test_a_prompt_that_opens_the_reasoning_itself_is_known(artifact, template, talk, tmp_path):
    opened = tmp_path / "thinks.jinja"
    opened.write_text(template.read_text().replace("assistant:{%", "assistant: <think>\n{%"))
    code, out, err = talk(artifact, "--chat-template", opened, lines="def\n")
    assert (code, out) == (0, "\n") and "12 tokens" in err  # all of it is reasoning
    code, out, _ = talk(artifact, "--chat-template", opened, lines="def\n", terminal=True)
    assert code == 0 and "\x1b[2m" in out
