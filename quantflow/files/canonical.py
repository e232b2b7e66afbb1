"""One byte form for JSON, one hash, and a strict reader.

The canonical form has sorted keys, no spaces and no escapes that UTF-8 does not need, so equal
values have equal bytes on every machine. The readable form is the same text with one space of
indentation; it too is unique for a value.
"""

import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from quantflow.errors import InputError
from quantflow.files.folder import reading, refuse_pointer

HASH_BLOCK = 1024 * 1024
MAX_DEPTH = 100
MAX_JSON_BYTES = 128 * 1024 * 1024
# tables and lists: each takes Python some 64 to 232 bytes, where the file has 2
MAX_CONTAINERS = 4_000_000
MAX_ITEMS = 24_000_000  # commas
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def canonical_json(value: Any) -> bytes:
    """Return the one byte form of a JSON value: sorted keys, no spaces, UTF-8.

    Raises:
        InputError: the value holds NaN or an infinity, a key that is not a string, or what JSON
            cannot express.
    """
    return _dump(value, indent=None)


def readable_json(value: Any) -> bytes:
    """Return the one indented byte form of a JSON value, as files on disk have it, with a newline at the end.

    Raises:
        InputError: as `canonical_json`.
    """
    return _dump(value, indent=1) + b"\n"


def digest_of(value: Any) -> str:
    """Return the sha256 of a value's canonical JSON, 64 hexadecimal digits.

    Raises:
        InputError: as `canonical_json`.
    """
    return hashlib.sha256(canonical_json(value)).hexdigest()


def file_digest(path: Path) -> str:
    """Return the sha256 of a file's bytes, 64 hexadecimal digits, holding 1 MiB of it at a time.

    Raises:
        InputError: the file cannot be read.
    """
    # one block for all: fresh pages cost time too
    digest, block = hashlib.sha256(), memoryview(bytearray(HASH_BLOCK))
    with reading(path) as file:
        while count := file.readinto(block):
            digest.update(block[:count])
    return digest.hexdigest()


def read_json(path: Path) -> Any:
    """Read a JSON file strictly; see `parse_json`.

    Raises:
        InputError: naming the file: it cannot be read, is a git-LFS pointer, is over 128 MiB, or is
            not strict JSON.
    """
    return parse_json(json_bytes(path), str(path))


def json_bytes(path: Path) -> bytes:
    """Return the content of a JSON file.

    Raises:
        InputError: naming the file: it cannot be read, is a git-LFS pointer, or is over 128 MiB.
    """
    with reading(path) as file:
        data = file.read(MAX_JSON_BYTES + 1)
    refuse_pointer(data, path)
    if len(data) > MAX_JSON_BYTES:
        raise InputError(
            f"{path}: over {MAX_JSON_BYTES} bytes of JSON", "give the file that belongs there"
        )
    return data


def parse_json(data: bytes, name: str) -> Any:
    """Parse JSON, refusing what other parsers read differently.

    Args:
        data: UTF-8 without a byte order mark.
        name: the file, for the message.

    Raises:
        InputError: naming the file: not UTF-8, not JSON, a duplicate key, NaN or an infinity (also
            1e999), a lone surrogate, nested deeper than 100, or more tables, lists and items than
            MAX_CONTAINERS and MAX_ITEMS.
    """
    refuse_many_items(data, name)
    try:
        text = data.decode()
        value = json.loads(
            text,
            object_pairs_hook=_unique_keys,
            parse_constant=_refuse_constant,
            parse_float=_finite_float,
        )
        if _SURROGATE.search(text):
            json.dumps(value, ensure_ascii=False).encode()  # fails where a surrogate has no partner
    except (ValueError, RecursionError, MemoryError) as error:
        raise InputError(
            f"{name}: not strict JSON ({error})", "restore the file from where it came from"
        ) from error
    if any(depth > MAX_DEPTH for depth, _ in _levels(value)):
        raise InputError(
            f"{name}: JSON nested deeper than {MAX_DEPTH}",
            "restore the file from where it came from",
        )
    return value


def refuse_many_items(data: bytes, name: str) -> None:
    """Refuse JSON that takes many times its size in memory, before any of it is made.

    Args:
        data: JSON; brackets and commas in texts count as well.
        name: the file, for the message.

    Raises:
        InputError: more tables, lists and items than MAX_CONTAINERS and MAX_ITEMS.
    """
    counted = (data.count(b"[") + data.count(b"{"), data.count(b","))
    if counted[0] > MAX_CONTAINERS or counted[1] > MAX_ITEMS:
        cause = f"{name}: {counted[0]} tables and lists, {counted[1]} items; {MAX_CONTAINERS} and {MAX_ITEMS} are read"
        raise InputError(cause, "give the file that belongs there")


def _dump(value: Any, *, indent: int | None) -> bytes:
    separators = (",", ":") if indent is None else (",", ": ")
    try:
        text = json.dumps(
            value,
            sort_keys=True,
            ensure_ascii=False,
            allow_nan=False,
            indent=indent,
            separators=separators,
        )
        data = text.encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise InputError(
            f"a value for a JSON file: {error}", "record only finite numbers, text and tables"
        ) from error
    for depth, level in _levels(value):
        odd = [
            key
            for node in level
            if isinstance(node, dict)
            for key in node
            if not isinstance(key, str)
        ]
        if odd or depth > MAX_DEPTH:
            cause = (
                f"the key {odd[0]!r} is not a string" if odd else f"nested deeper than {MAX_DEPTH}"
            )
            raise InputError(
                f"a value for a JSON file: {cause}", "record flat tables with names as keys"
            )
    return data


def _levels(value: Any) -> Iterator[tuple[int, list[Any]]]:
    """Yield (depth, the containers at that depth), outermost first, one level past MAX_DEPTH at most."""
    level = [value]
    for depth in range(1, MAX_DEPTH + 2):
        level = [node for node in level if isinstance(node, dict | list | tuple)]
        if not level:
            return
        yield depth, level
        level = [
            child for node in level for child in (node.values() if isinstance(node, dict) else node)
        ]


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        twice, _ = Counter(name for name, _ in pairs).most_common(1)[0]
        raise ValueError(f"the key {twice!r} appears twice")
    return table


def _refuse_constant(literal: str) -> None:
    raise ValueError(f"the literal {literal}")


def _finite_float(literal: str) -> float:
    number = float(literal)
    if not math.isfinite(number):
        raise ValueError(f"the number {literal} is out of range")
    return number
