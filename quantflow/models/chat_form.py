"""A conversation in the form that its chat template takes.

Templates leave out what they do not know, without a word: a role, tools, a variable. So what a
template does not know is put in another way, or refused.
"""

import hashlib
import json
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

Messages = Sequence[Mapping[str, Any]]
_KIMI = "<|tool_call_argument_begin|>"
_NINE = re.compile("[A-Za-z0-9]{9}")
_ASKS_FOR_NINE = re.compile(r"length\s*!=\s*9|length 9")
ROLES = ("system", "user", "assistant", "tool")
# text-generation-inference's words for a template that does not know tools
TOOL_PROMPT = (
    "Given the functions available, please respond with a JSON for a function call with its proper "
    "arguments that best answers the given prompt. Respond in the format "
    "{name: function name, parameters: dictionary of argument name and its value}."
    "Do not use variables."
)


def quotes(template: str, word: str) -> bool:
    """Whether a template names a word, such as a role or a key of a message."""
    return re.search(rf"""(['"]){re.escape(word)}\1""", template) is not None


def with_known_roles(messages: Messages, template: str) -> list[Mapping[str, Any]]:
    """Messages whose roles the template may know: `developer` is `system` where it does not.

    Raises:
        ValueError: a role that neither the template nor any other one knows.
    """
    written = dict.fromkeys(ROLES, "") | {"developer": "system"}
    known: list[Mapping[str, Any]] = []
    for message in messages:
        role = message.get("role")
        if not isinstance(role, str):
            raise ValueError(f"a role is {type(role).__name__}, a text is needed")
        if role not in ROLES and written.get(role) != "" and quotes(template, role):
            written[role] = ""
        if role not in written:
            raise ValueError(f"no role {role[:60]!r}; roles are {', '.join(ROLES)}, developer")
        known.append({**message, "role": written[role]} if written[role] else message)
    return known


def doubtful_roles(messages: Messages, template: str, text: str) -> list[str]:
    """Roles that the template does not name, and whose messages do not stand in its text.

    Args:
        messages: messages of the conversation.
        template: text of the template.
        text: text that it made of the messages.
    """
    doubtful: dict[str, None] = {}
    place = 0
    for message in messages:
        role, content = str(message.get("role")), message.get("content")
        if role in ("user", "assistant") or role in doubtful or not isinstance(content, str):
            continue
        found = text.find(content.strip(), place)
        if found < 0:
            doubtful[role] = None
        else:
            place = found
    return [role for role in doubtful if not quotes(template, role)]


def with_short_ids(messages: Messages, template: str) -> list[Mapping[str, Any]]:
    """Messages whose calls have ids of nine letters and digits, where the template asks for these.

    Mistral's templates do; ids of other servers become the beginning of their digest, the same in
    a call and in its result.
    """
    if _ASKS_FOR_NINE.search(template) is None:
        return list(messages)
    changed: list[Mapping[str, Any]] = []
    for message in messages:
        fields = dict(message)
        if isinstance(calls := fields.get("tool_calls"), list):
            fields["tool_calls"] = [
                {**call, "id": _nine(call["id"])} if isinstance(call.get("id"), str) else call
                for call in calls
            ]
        if isinstance(result := fields.get("tool_call_id"), str):
            fields["tool_call_id"] = _nine(result)
        changed.append(fields)
    return changed


def with_counted_ids(messages: Messages, template: str) -> list[Mapping[str, Any]]:
    """Messages whose calls are `functions.weather:0` and so on, for a template of Kimi's.

    The numbers count the calls of the conversation. Kimi K2 ends its turns without a word where the
    history has ids of another form, which another model or a client has made.
    """
    if _KIMI not in template:
        return list(messages)
    count, names = 0, dict[str, str]()  # id in the conversation -> id for the template
    changed: list[Mapping[str, Any]] = []
    for message in messages:
        fields = dict(message)
        if isinstance(calls := fields.get("tool_calls"), list):
            fields["tool_calls"] = counted = []
            for call in calls:
                function = call.get("function") if isinstance(call, Mapping) else None
                name = function.get("name") if isinstance(function, Mapping) else None
                if isinstance(name, str):
                    identifier = f"functions.{name}:{count}"
                    names[str(call.get("id"))] = identifier
                    call = {**call, "id": identifier}
                counted.append(call)
                count += 1
        if isinstance(result := fields.get("tool_call_id"), str):
            fields["tool_call_id"] = names.get(result, result)
        changed.append(fields)
    return changed


def with_written_arguments(messages: Messages) -> list[Mapping[str, Any]]:
    """Messages whose earlier calls have their arguments as JSON texts."""
    written: list[Mapping[str, Any]] = []
    for message in messages:
        calls = message.get("tool_calls")
        if isinstance(calls, list):
            message = {**message, "tool_calls": [_with_text(call) for call in calls]}
        written.append(message)
    return written


def _with_text(call: Any) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or isinstance(function.get("arguments", ""), str):
        return call
    arguments = json.dumps(function["arguments"], ensure_ascii=False)
    return {**call, "function": {**function, "arguments": arguments}}


def _nine(identifier: str) -> str:
    if _NINE.fullmatch(identifier):
        return identifier
    return hashlib.sha256(identifier.encode(errors="replace")).hexdigest()[:9]


def with_tools(
    messages: Messages, tools: Sequence[Mapping[str, Any]], *, prompt: str | None = None
) -> list[Mapping[str, Any]]:
    """Messages that name the tools themselves, for a template that does not.

    The last message of the user gets them, or the last one where there is none.

    Args:
        messages: messages of the conversation.
        tools: JSON schemas of functions.
        prompt: text behind the tools; None is `TOOL_PROMPT`.
    """
    places = [place for place, one in enumerate(messages) if one.get("role") == "user"]
    place = places[-1] if places else len(messages) - 1
    written = json.dumps(list(tools), ensure_ascii=False)
    text = f"\n---\n{written}\n{TOOL_PROMPT if prompt is None else prompt}"
    content = messages[place].get("content") or ""
    added = {**messages[place], "content": f"{content}{text}"}
    return [*messages[:place], added, *messages[place + 1 :]]


def with_read_names(options: Mapping[str, Any], read: Collection[str]) -> Mapping[str, Any]:
    """Variables under the names that the template reads.

    Clients say `enable_thinking`, as Qwen's templates do; DeepSeek's and Granite's read `thinking`.

    Args:
        options: variables by name.
        read: names that the template reads.
    """
    said, meant = "enable_thinking", "thinking"
    if said not in options or said in read or meant not in read or meant in options:
        return options
    return {meant if name == said else name: value for name, value in options.items()}


def goes_on(messages: Messages) -> bool:
    """Whether a conversation ends with a message of the assistant that can be continued."""
    last = messages[-1] if messages else {}
    content = last.get("content")
    begun = isinstance(content, str) and bool(content.strip())
    return last.get("role") == "assistant" and begun and not last.get("tool_calls")
