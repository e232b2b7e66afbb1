"""Tools of a chat: which the model is shown, and the grammar that forces a call.

A forced call (`required`, or a function by name) is a grammar, so its JSON always fits. With `auto`
the model writes what it was trained to write, and `quantflow.server.parsers` reads it.
"""

from collections.abc import Sequence
from typing import Any

from quantflow.server.bodies import Grammar, Tool, ToolChoice
from quantflow.server.errors import bad_tool
from quantflow.server.grammar import require_shallow

_NOTHING: dict[str, Any] = {"type": "object", "properties": {}}  # of a function without parameters
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
    # all of them together, since they become one grammar
    require_shallow(*map(_schema_of, tools))
    calls = [_call_schema(tool, f"#/$defs/{number}") for number, tool in enumerate(tools)]
    schemas = {
        str(number): _moved(_schema_of(tool), f"#/$defs/{number}")
        for number, tool in enumerate(tools)
    }
    return Grammar(type="json", value={"anyOf": calls, "$defs": schemas})


def schemas(tools: Sequence[Tool]) -> dict[str, dict[str, Any]]:
    """The schema of each tool's arguments, by the tool's name."""
    return {tool.function.name: _schema_of(tool) for tool in tools}


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
    return tool.function.parameters or tool.function.arguments or _NOTHING


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
