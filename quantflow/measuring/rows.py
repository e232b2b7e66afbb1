"""One document of a row of a data set: its conversation, its text, or its token ids.

The first of these whose columns the row has makes the document. Conversations go through the chat
template, with the row's `tools`; without a template text goes before them.

| columns | document |
|---|---|
| `messages` | a conversation; `content` is text or parts of text, or absent beside tool calls |
| `conversations` | one in ShareGPT's form, `from` and `value`, or in that of `messages` |
| `text` | text |
| `input_ids` | token ids, as they are |
| `prompt`, `completion` | text, joined as it is; a conversation where both are lists of messages |
| `prompt`, `response` | a question and its answer |
| `instruction`, `input`, `output` | the same in Alpaca's form; `input` may be absent |
| `prompt`, `code`, `content` | text, of the first that is there |

A question and its answer are a conversation, and two paragraphs where there is no template.
"""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from quantflow.errors import InputError
from quantflow.models.chat_template import chat_tokens, with_arguments
from quantflow.models.token_ids import tokens_of

_CHATS = ("messages", "conversations")
_PLAIN = ("prompt", "code", "content")
_JOINED = ("prompt", "completion")
_ANSWERED = (("prompt", "response"), ("instruction", "output"), ("instruction", "response"))
_KINDS: tuple[tuple[str, ...], ...] = (
    ("text",),
    ("input_ids",),
    _JOINED,
    *_ANSWERED,
    *((column,) for column in _PLAIN),
)
_OF_CHATS = tuple((column,) for column in _CHATS)
COLUMNS = (
    *_CHATS,
    *dict.fromkeys(column for kind in _KINDS for column in kind),
    *("input", "system", "tools"),
)
KINDS_REMEDY = (
    "give each row text, messages, conversations, input_ids, prompt and response, or instruction "
    "and output"
)
# who speaks in ShareGPT's form -> role
_ROLES = {
    "system": "system",
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "bing", "bard", "model"), "assistant"),
    "function_call": "assistant",
    **dict.fromkeys(("tool", "observation", "function_response", "function"), "tool"),
}
_NO_CONTENT_WITH = ("tool_calls", "function_call")


def kind_of(
    row: Mapping[str, Any], *, template: bool = True, words: bool = True
) -> tuple[str, ...] | None:
    """The columns of a row that make its document; None where it has none.

    Args:
        row: a row; a column whose value is None counts where no other does.
        template: whether the tokenizer has a chat template.
        words: whether there is a tokenizer.
    """
    kinds = (*_OF_CHATS, *_KINDS) if template else (*_KINDS, *_OF_CHATS)
    if not words:
        kinds = (("input_ids",), *kinds)
    for present in ({key for key in row if row[key] is not None}, row.keys()):
        for kind in kinds:
            if present >= set(kind):
                return kind
    return None


def document_of(row: Any, where: str, tokenizer: PreTrainedTokenizerBase | None) -> list[int]:
    """The token ids of a row's document.

    Args:
        row: a JSON object; keys beside the columns of the table are its own notes.
        where: name of the row, for messages.
        tokenizer: the model's; may be None where the row has token ids.

    Raises:
        InputError: a row without such columns, or with values of another type; what the chat
            template refuses; a token id outside the tokenizer's vocabulary.
    """
    if not isinstance(row, dict):
        raise InputError(f"{where}: {type(row).__name__}, a JSON object is needed", KINDS_REMEDY)
    template = tokenizer is not None and tokenizer.chat_template is not None
    kind = kind_of(row, template=template, words=tokenizer is not None)
    if kind is None:
        raise InputError(f"{where}: keys {sorted(row)} hold no text", KINDS_REMEDY)
    if kind == ("input_ids",):
        ids = row["input_ids"]
        if not isinstance(ids, list) or not all(type(token) is int for token in ids):
            raise InputError(f"{where}: input_ids is not a list of integers", "give token ids")
        return checked(ids, where, tokenizer)
    words = needed(tokenizer, where)
    if kind in _OF_CHATS:
        return _conversation(kind[0], row[kind[0]], row, where, words)
    values = [row[column] for column in kind]
    if kind[0] == "prompt" and all(isinstance(value, list) for value in values):
        return _conversation(" + ".join(kind), [m for v in values for m in v], row, where, words)
    texts = [_string(column, row[column], where) for column in kind]
    if kind in _ANSWERED:
        more = _string("input", row.get("input") or "", where)
        question = f"{texts[0]}\n\n{more}" if more and kind[0] == "instruction" else texts[0]
        if template:
            turns = (("user", question), ("assistant", texts[1]))
            messages = [{"role": role, "content": content} for role, content in turns]
            return _conversation(" + ".join(kind), messages, row, where, words)
        texts = [f"{question}\n\n{texts[1]}"]
    return tokens_of(words, "".join(texts), where=where)


def needed(tokenizer: PreTrainedTokenizerBase | None, where: str | Path) -> PreTrainedTokenizerBase:
    """The tokenizer.

    Raises:
        InputError: there is none.
    """
    if tokenizer is None:
        raise InputError(
            f"{where}: text, and the model has no tokenizer", "add the tokenizer, or give token ids"
        )
    return tokenizer


def checked(tokens: list[int], where: str, tokenizer: PreTrainedTokenizerBase | None) -> list[int]:
    """The token ids.

    Raises:
        InputError: one is negative, or outside the tokenizer's vocabulary.
    """
    limit = None if tokenizer is None else len(tokenizer)
    for token in tokens:
        if token < 0 or (limit is not None and token >= limit):
            allowed = "at least 0" if limit is None else f"0..{limit - 1}"
            raise InputError(
                f"{where}: token id {token}, the tokenizer has {allowed}",
                "tokenize with this model's tokenizer",
            )
    return tokens


def _string(column: str, value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise InputError(
            f"{where}: {column} is {type(value).__name__}, a string is needed", "quote the text"
        )
    return value


def _conversation(
    column: str,
    messages: Any,
    row: Mapping[str, Any],
    where: str,
    tokenizer: PreTrainedTokenizerBase,
) -> list[int]:
    if not isinstance(messages, list) or not messages:
        raise InputError(
            f"{where}: {column} is not a list of messages", "give a list of {role, content}"
        )
    shown = [
        _message(message, f"{where}: {column}: message {number}")
        for number, message in enumerate(messages, start=1)
    ]
    system = row.get("system")
    if isinstance(system, str) and system and shown[0]["role"] != "system":
        shown.insert(0, {"role": "system", "content": system})
    if tokenizer.chat_template is None:
        raise InputError(
            f"{where}: {column}, but the tokenizer has no chat template",
            "give `text`, or a chat model",
        )
    tools = _tools(row.get("tools"), where)
    return chat_tokens(tokenizer, shown, where=where, answer=False, tools=tools)


def _message(message: Any, where: str) -> dict[str, Any]:
    """A message as templates expect it: the role, and text alone as its content."""
    if not isinstance(message, dict):
        raise InputError(
            f"{where} is {type(message).__name__}", "give objects with role and content"
        )
    if "role" not in message and "from" in message:
        speaker = message["from"]
        if not isinstance(speaker, str) or speaker not in _ROLES:
            raise InputError(
                f"{where} is from {speaker!r}", f"name one of {', '.join(_ROLES)} as `from`"
            )
        message = {"role": _ROLES[speaker], "content": message.get("value")}
    if not isinstance(message.get("role"), str):
        raise InputError(f"{where} has no role", "give role and content as strings")
    content = message.get("content")
    if content is None and any(message.get(key) for key in _NO_CONTENT_WITH):
        content = ""
    if isinstance(content, list):
        content = "".join(_part(part, where) for part in content)
    if not isinstance(content, str):
        raise InputError(
            f"{where} has no content and no tool_calls"
            if content is None
            else f"{where} has content of type {type(content).__name__}",
            "give content as a string, or as a list of {type: text, text}",
        )
    shown = {**message, "content": content}
    if calls := message.get("tool_calls"):
        if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
            raise InputError(
                f"{where}: tool_calls is not a list of objects", "give them as the model made them"
            )
        shown["tool_calls"] = [with_arguments(call) for call in calls]
    return shown


def _part(part: Any, where: str) -> str:
    kind = part.get("type", "text") if isinstance(part, dict) else type(part).__name__
    text = part.get("text") if isinstance(part, dict) else part
    if kind not in ("text", "str") or not isinstance(text, str):
        raise InputError(
            f"{where} has a part of type {kind!r}",
            "give parts of text alone: calibration reads no images",
        )
    return text


def _tools(tools: Any, where: str) -> Sequence[Mapping[str, Any]] | None:
    """A row's functions, which some data sets keep as a string of JSON; None without any."""
    if isinstance(tools, str):
        with suppress(ValueError, RecursionError):
            tools = json.loads(tools) if tools.strip() else None
    if not tools:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise InputError(
            f"{where}: tools is not a list of objects", "give the JSON schemas of functions"
        )
    return tools
