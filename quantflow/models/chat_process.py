"""The process of `quantflow.models.chat_template`: JSON lines of conversations to lines of text.

The caller ends the process when a conversation takes too long. An alarm does so where the caller
was killed meanwhile. Ctrl-C is left to the caller.
"""

import json
import math
import resource
import signal
import sys
from typing import Any

import jinja2.meta
from transformers.utils.chat_template_utils import _compile_jinja_template, render_jinja_template

MEMORY = 1 << 30  # bytes beyond those of the process at its start


def main() -> None:
    """Serve until stdin ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with open("/proc/self/statm") as file:
        size = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY, size + MEMORY))
    answers = sys.stdout.buffer
    answers.write(b"ready\n")
    answers.flush()
    for line in sys.stdin.buffer:
        order = json.loads(line)
        signal.alarm(math.ceil(order["seconds"]) + 1)
        said = json.dumps(_rendered(order)).encode() + b"\n"
        signal.alarm(0)
        answers.write(said)
        answers.flush()


def _rendered(order: dict[str, Any]) -> dict[str, Any]:
    try:
        if order.get("reads"):
            return {"reads": _variables(order["template"])}
        template, longest = order["template"], order["longest"]
        texts, _ = render_jinja_template(
            conversations=[order["messages"]],
            tools=order["tools"],
            chat_template=template,
            add_generation_prompt=order["answer"],
            continue_final_message=order["continues"],
            **order["variables"],
        )
        text = str(texts[0])
        text.encode()
        if len(text) > longest:
            return {"why": f"{len(text)} characters, {longest} are taken"}
        return {"text": text}
    except Exception as error:  # a template can raise any exception
        said = " ".join(str(error).split()) or type(error).__name__
        return {"why": said[:200].encode(errors="replace").decode()}


def _variables(template: str) -> list[str]:
    """The names of the variables that a template reads, in the environment that renders it."""
    environment = _compile_jinja_template(template).environment
    return sorted(jinja2.meta.find_undeclared_variables(environment.parse(template)))


if __name__ == "__main__":
    main()
