"""Tools of a chat: the grammar that forces a call, and the calls in a text.

A forced call (`required`, or a function by name) is a grammar, so its JSON always fits. With `auto`
the model writes what it was trained to write, and two ways of writing a call are read:
`<tool_call>{...}</tool_call>`, as Hermes, Qwen and SmolLM have it, and an answer that is nothing
but `{"name": ..., "arguments" or "parameters": ...}`, as Llama 3 does.
"""

import json
import re
import secrets
from collections.abc import Sequence
from typing import Any

from quantflow.server.bodies import Grammar, Tool, ToolChoice
from quantflow.server.errors import bad_tool
from quantflow.server.grammar import require_shallow

OPENING = "<tool_call>"
_CALL = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)
_ANYTHING = {"type": "object"}
Choice = str | ToolChoice | None


def offered(tools: Sequence[Tool] | None, choice: Choice) -> list[Tool]:
    """The tools that the model is shown.

    Raises:
        Refused: of kind tool_error; the choice names none of them.
    """
    name = _named(choice)
    if not tools or choice == "none":
        if name is not None or choice == "required":
            raise bad_tool("tool_choice without tools")
        return []
    if name is not None and all(tool.function.name != name for tool in tools):
        raise bad_tool(f"Tool with name {name[:100]} not found")
    if any(tool.type != "function" for tool in tools):
        raise bad_tool("tools are functions")
    return list(tools)


def forced(tools: Sequence[Tool], choice: Choice) -> Grammar | None:
    """The grammar of a call that must be made; None where none must.

    Raises:
        Refused: of kind validation; a schema is too deep.
    """
    if (name := _named(choice)) is not None:
        tools = [tool for tool in tools if tool.function.name == name]
    elif choice != "required":
        return None
    for tool in tools:
        require_shallow(_schema_of(tool))
    calls = [_call_schema(tool, f"#/$defs/{number}") for number, tool in enumerate(tools)]
    schemas = {
        str(number): _moved(_schema_of(tool), f"#/$defs/{number}")
        for number, tool in enumerate(tools)
    }
    return Grammar(type="json", value={"anyOf": calls, "$defs": schemas})


def parted(text: str, tools: Sequence[Tool]) -> tuple[str, list[dict[str, Any]]]:
    """The text outside an answer's calls, and the calls of known tools, as OpenAI writes them.

    Where one of the calls is none, the result is the whole text and no call. Space around calls is
    no text.
    """
    marked = _CALL.findall(text)
    outside = _CALL.sub("", text) if marked else ""
    calls = []
    for piece in marked or [text]:
        try:
            value = json.loads(piece)
        except (ValueError, RecursionError):
            return text, []
        if not isinstance(value, dict) or value.get("name") not in [
            tool.function.name for tool in tools
        ]:
            return text, []
        arguments = value.get("arguments", value.get("parameters", {}))
        written = (
            arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        )
        function = {"name": value["name"], "arguments": written}
        calls.append(
            {"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": function}
        )
    return outside if outside.strip() else "", calls


def before_call(text: str) -> int:
    """Length of an answer's beginning before anything that is a call or may become one."""
    if text.lstrip().startswith("{"):
        return 0
    begun = next(
        length for length in range(len(OPENING) - 1, -1, -1) if text.endswith(OPENING[:length])
    )
    place = text.find(OPENING)
    place = len(text) - begun if place < 0 else place
    return place if text[:place].strip() else 0


def shown_to_template(tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """Tools as chat templates expect them."""
    shown = []
    for tool in tools:
        function = {
            "name": tool.function.name,
            "description": tool.function.description or "",
            "parameters": _schema_of(tool),
        }
        shown.append({"type": "function", "function": function})
    return shown


def _named(choice: Choice) -> str | None:
    """The function that must be called: OpenAI's object names it, or TGI's bare word."""
    if isinstance(choice, ToolChoice):
        return choice.function.name
    return None if choice in (None, "auto", "none", "required") else choice


def _call_schema(tool: Tool, arguments: str) -> dict[str, Any]:
    """The schema of a call, with a reference to the schema of its arguments."""
    properties = {"name": {"const": tool.function.name}, "arguments": {"$ref": arguments}}
    return {
        "type": "object",
        "properties": properties,
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


def _schema_of(tool: Tool) -> dict[str, Any]:
    """The schema of a tool's arguments."""
    return tool.function.parameters or tool.function.arguments or _ANYTHING


def _moved(schema: Any, place: str) -> Any:
    """A schema, or a part of it, at another place of a document; its own references lead there."""
    if isinstance(schema, list):
        return [_moved(one, place) for one in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {key: _moved(value, place) for key, value in schema.items()}
    own = moved.get("$ref")
    return (
        moved | {"$ref": place + own[1:]} if isinstance(own, str) and own.startswith("#") else moved
    )
