"""Tools of a chat: which the model is shown, and the grammar that forces a call.

A forced call (`required`, or a function by name) is a grammar, so its JSON always fits. With `auto`
the model writes what it was trained to write, and `quantflow.server.parsers` reads it.
"""

from collections.abc import Sequence
from typing import Any

from quantflow.server.bodies import (
    ChatBody,
    FunctionName,
    Grammar,
    Message,
    Tool,
    ToolCall,
    ToolChoice,
)
from quantflow.server.errors import bad_tool, invalid
from quantflow.server.grammar import require_shallow

_NOTHING: dict[str, Any] = {"type": "object", "properties": {}}  # of a function without parameters
Choice = str | ToolChoice | None


def in_new_form(body: ChatBody) -> ChatBody:
    """A chat whose functions are tools: OpenAI's older form has `functions` and `function_call`.

    A message's `function_call` becomes its call, and a message of the role function its result.

    Raises:
        Refused: of kind validation; both forms stand in one body, or a choice among no functions.
    """
    changed: dict[str, Any] = {}
    if body.functions is not None or body.function_call is not None:
        if body.tools or body.tool_choice is not None:
            raise invalid("`functions` and `tools` are one field in two forms: give one of them")
        name = body.function_call
        if isinstance(name, str) and name not in ("auto", "none"):
            raise invalid('`function_call` is "auto", "none", or {"name": ...}')
        choice = ToolChoice(function=name) if isinstance(name, FunctionName) else name
        tools = [Tool(function=one) for one in body.functions or ()]
        changed |= {"tools": tools, "tool_choice": choice, "parallel_tool_calls": False}
    if any(one.function_call is not None or one.role == "function" for one in body.messages):
        changed["messages"] = _with_calls(body.messages)
    return body.model_copy(update=changed) if changed else body


def _with_calls(messages: Sequence[Message]) -> list[Message]:
    """Messages in the newer form; a result belongs to the last call before it."""
    written: list[Message] = []
    number = 0
    for message in messages:
        update: dict[str, Any] = {}
        if message.function_call is not None:
            if message.tool_calls:
                raise invalid(
                    "`messages.function_call` and `tool_calls` are one field in two forms"
                )
            number += 1
            call = ToolCall(id=f"call_{number}", function=message.function_call)
            update = {"tool_calls": [call], "function_call": None}
        elif message.role == "function" and message.name:
            update = {"role": "tool", "tool_call_id": f"call_{number}"}
        written.append(message.model_copy(update=update) if update else message)
    return written


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
