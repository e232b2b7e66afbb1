"""Tools of a chat: the grammar that forces a call, and the calls that a text holds.

A forced call (`required`, or a function by name) is a grammar, so its JSON always fits. With `auto` the model writes what it
was trained to write, and two ways of writing a call are read: `<tool_call>{...}</tool_call>`, as Hermes, Qwen and SmolLM have
it, and an answer that is nothing but `{"name": ..., "arguments" or "parameters": ...}`, as Llama 3 does.
"""

import json
import re
import secrets
from collections.abc import Sequence
from typing import Any

from quantflow.server.bodies import Grammar, Tool, ToolChoice
from quantflow.server.errors import bad_tool, invalid

OPENING = "<tool_call>"
_CALL = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)
_ANYTHING = {"type": "object"}
Choice = str | ToolChoice | None


def offered(tools: Sequence[Tool] | None, choice: Choice) -> list[Tool]:
    """Return the tools that the model is shown.

    Raises:
        Refused: of kind tool_error; a choice that names none of them.
    """
    if not tools or choice == "none":
        if isinstance(choice, ToolChoice) or choice == "required":
            raise bad_tool("tool_choice without tools")
        return []
    if isinstance(choice, ToolChoice) and all(tool.function.name != choice.function.name for tool in tools):
        raise bad_tool(f"Tool with name {choice.function.name[:100]} not found")
    if any(tool.type != "function" for tool in tools):
        raise bad_tool("tools are functions")
    return list(tools)


def forced(tools: Sequence[Tool], choice: Choice) -> Grammar | None:
    """Return the grammar of a call that must be made; None where none must."""
    if isinstance(choice, ToolChoice):
        tools = [tool for tool in tools if tool.function.name == choice.function.name]
    elif choice != "required":
        return None
    calls = [_call_schema(tool) for tool in tools]
    return Grammar(type="json", value=calls[0] if len(calls) == 1 else {"anyOf": calls})


def calls_in(text: str, tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """Return the calls of known tools that a text makes, as OpenAI writes them; empty where it makes none."""
    pieces = _CALL.findall(text) or [text]
    found = []
    for piece in pieces:
        try:
            value = json.loads(piece)
        except (ValueError, RecursionError):
            return []
        if not isinstance(value, dict) or value.get("name") not in [tool.function.name for tool in tools]:
            return []
        arguments = value.get("arguments", value.get("parameters", {}))
        written = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        function = {"name": value["name"], "arguments": written}
        found.append({"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": function})
    return found


def may_be_call(text: str) -> bool:
    """Return whether the beginning of an answer may still become a call, so that it is not shown as text yet."""
    begin = text.lstrip()
    return begin.startswith("{") or OPENING.startswith(begin[: len(OPENING)])


def shown_to_template(tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """Return tools as chat templates expect them."""
    shown = []
    for tool in tools:
        function = {"name": tool.function.name, "description": tool.function.description or "", "parameters": _schema_of(tool)}
        shown.append({"type": "function", "function": function})
    return shown


def _call_schema(tool: Tool) -> dict[str, Any]:
    properties = {"name": {"const": tool.function.name}, "arguments": _schema_of(tool)}
    return {"type": "object", "properties": properties, "required": ["name", "arguments"], "additionalProperties": False}


def _schema_of(tool: Tool) -> dict[str, Any]:
    schema = tool.function.parameters or tool.function.arguments or _ANYTHING
    if "$ref" in json.dumps(schema):
        raise invalid(f"grammar is not valid: the parameters of {tool.function.name[:100]} hold a $ref")
    return schema
