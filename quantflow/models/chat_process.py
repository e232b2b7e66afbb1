"""The process of `quantflow.models.chat_template`: a line of JSON is a conversation, the line that answers is its text."""

import json
import resource
import sys

from transformers.utils.chat_template_utils import render_jinja_template

MEMORY = 1 << 30  # bytes beyond what the process has when it begins


def main() -> None:
    """Serve until stdin ends."""
    with open("/proc/self/statm") as file:
        size = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY, size + MEMORY))
    answers = sys.stdout.buffer
    answers.write(b"ready\n")
    answers.flush()
    for line in sys.stdin.buffer:
        answers.write(json.dumps(_rendered(json.loads(line))).encode() + b"\n")
        answers.flush()


def _rendered(order: dict[str, object]) -> dict[str, str]:
    try:
        template, longest = order["template"], order["longest"]
        texts, _ = render_jinja_template(
            conversations=[order["messages"]],
            chat_template=template,
            add_generation_prompt=order["answer"],
            **order["special"],  # type: ignore[arg-type]
        )
        text = str(texts[0])
        text.encode()
        if len(text) > int(str(longest)):
            return {"why": f"{len(text)} characters, {longest} are taken"}
        return {"text": text}
    except Exception as error:  # a template raises what its maker wants
        said = " ".join(str(error).split()) or type(error).__name__
        return {"why": said[:200].encode(errors="replace").decode()}


if __name__ == "__main__":
    main()
