"""JSON in and out, in steps so short that other threads run between them.

Python's own reader and writer keep all other threads out until they are done: 0.1 s and more for
the largest body and for the largest answers. So text of many values is read by the reader in
Python, and long lists are written some items at a time.
"""

import json
from collections.abc import Iterator
from itertools import islice
from json.scanner import py_make_scanner  # type: ignore[attr-defined]
from typing import Any

from quantflow.server.errors import Refused

MANY = 50_000  # values that the reader in C takes in about 10 ms
AT_ONCE = 64  # items of a list that are written at once
PIECE = 1 << 16  # characters of a piece of the output, or a little more

_encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode


def parse(data: bytes) -> Any:
    """The value of JSON: UTF-8, without NaN and without half surrogate pairs.

    Raises:
        Refused: the bytes are no such JSON.
    """
    most = sum(map(data.count, (b",", b"[", b"{")))  # there are no more values than these and one
    try:
        text = data.decode()
        value = (_IN_C if most < MANY else _IN_PYTHON).decode(text)
        if "\\ud" in text or "\\uD" in text:
            for piece in pieces(value):
                piece.encode()  # half a surrogate pair is no text
        return value
    except (ValueError, RecursionError) as error:
        name = (
            "too deep"
            if isinstance(error, RecursionError)
            else next(iter(str(error).splitlines()), "")[:200]
        )
        raise Refused("bad_json", f"Failed to parse the request body as JSON: {name}") from None


def pieces(value: Any) -> Iterator[str]:
    """Yield the JSON of a value in pieces; an iterator is a list.

    Raises:
        ValueError: a number is not finite.
    """
    waiting: list[str] = []
    length = 0
    for part in _parts(value):
        waiting.append(part)
        length += len(part)
        if length >= PIECE:
            yield "".join(waiting)
            waiting, length = [], 0
    yield "".join(waiting)


def _parts(value: Any) -> Iterator[str]:
    """Short parts; a short list or an object is written by its items, which may be long."""
    if isinstance(value, dict):
        before = "{"
        for key, item in value.items():
            yield f"{before}{_encode(key)}:"
            yield from _parts(item)
            before = ","
        yield "{}" if before == "{" else "}"
    elif isinstance(value, list | Iterator):
        before = "["
        if isinstance(value, list) and len(value) <= AT_ONCE:
            for item in value:
                yield before
                yield from _parts(item)
                before = ","
        else:
            items = iter(value)
            while some := list(islice(items, AT_ONCE)):
                yield before + _encode(some)[1:-1]
                before = ","
        yield "[]" if before == "[" else "]"
    else:
        yield _encode(value)


def _decoder(*, in_python: bool) -> json.JSONDecoder:
    decoder = json.JSONDecoder(parse_constant=_no_constant)
    if in_python:
        decoder.scan_once = py_make_scanner(decoder)  # type: ignore[attr-defined]
    return decoder


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


_IN_C, _IN_PYTHON = _decoder(in_python=False), _decoder(in_python=True)
