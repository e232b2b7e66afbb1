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
# Tables and lists: each takes Python some 64 to 232 bytes, and 2 bytes of the file.
MAX_CONTAINERS = 4_000_000
MAX_ITEMS = 24_000_000  # commas
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def canonical_json(value: Any) -> bytes:
    """The canonical bytes of a JSON value: sorted keys, no spaces, UTF-8.

    Raises:
        InputError: the value holds NaN or an infinity, a key that is not a string, or a type that
            JSON does not have.
    """
    return _dump(value, indent=None)


def readable_json(value: Any) -> bytes:
    """The indented bytes of a JSON value, as files on disk have it, with a newline at the end.

    Raises:
        InputError: see `canonical_json`.
    """
    return _dump(value, indent=1) + b"\n"


def digest_of(value: Any) -> str:
    """The sha256 of a value's canonical JSON, 64 hexadecimal digits.

    Raises:
        InputError: see `canonical_json`.
    """
    return hashlib.sha256(canonical_json(value)).hexdigest()


def file_digest(path: Path) -> str:
    """The sha256 of a file's bytes, 64 hexadecimal digits; 1 MiB of the file is held at a time.

    Raises:
        InputError: the file cannot be read.
    """
    # one buffer for all blocks: fresh pages would cost time too
    digest = hashlib.sha256()
    block = memoryview(bytearray(HASH_BLOCK))
    with reading(path) as file:
        while count := file.readinto(block):
            digest.update(block[:count])
    return digest.hexdigest()


def read_json(path: Path, *, constants: bool = False) -> Any:
    """Read a JSON file strictly; see `parse_json`.

    Args:
        path: the file.
        constants: whether NaN and the infinities are numbers in it.

    Raises:
        InputError: the file cannot be read, is a git-LFS pointer, is over 128 MiB, or is not strict
            JSON; the message names the file.
    """
    return parse_json(json_bytes(path), str(path), constants=constants)


def json_bytes(path: Path) -> bytes:
    """The content of a JSON file.

    Raises:
        InputError: the file cannot be read, is a git-LFS pointer, or is over 128 MiB; the message
            names the file.
    """
    with reading(path) as file:
        data = file.read(MAX_JSON_BYTES + 1)
    refuse_pointer(data, path)
    if len(data) > MAX_JSON_BYTES:
        raise InputError(
            f"{path}: over {MAX_JSON_BYTES} bytes of JSON", "give the file that belongs there"
        )
    return data


def parse_json(data: bytes, name: str, *, constants: bool = False) -> Any:
    """Parse JSON, refusing what other parsers read differently.

    Args:
        data: UTF-8 without a byte order mark.
        name: name of the file, for the message.
        constants: whether NaN and the infinities are numbers, as Python's own writer spells them.

    Raises:
        InputError: the text is not UTF-8, not JSON, has a duplicate key, NaN or an infinity (also
            1e999), a lone surrogate, nesting deeper than 100, or more tables, lists and items than
            MAX_CONTAINERS and MAX_ITEMS; the message names the file.
    """
    refuse_many_items(data, name)
    try:
        text = data.decode()
        value = json.loads(
            text,
            object_pairs_hook=_unique_keys,
            parse_constant=float if constants else _refuse_constant,
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
    """Refuse JSON that takes many times its size in memory, before any of it is parsed.

    Args:
        data: JSON; brackets and commas in texts count as well.
        name: name of the file, for the message.

    Raises:
        InputError: there are more tables, lists and items than MAX_CONTAINERS and MAX_ITEMS.
    """
    containers = data.count(b"[") + data.count(b"{")
    items = data.count(b",")
    if containers > MAX_CONTAINERS or items > MAX_ITEMS:
        raise InputError(
            f"{name}: {containers} tables and lists, {items} items; {MAX_CONTAINERS} and "
            f"{MAX_ITEMS} are read",
            "give the file that belongs there",
        )


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
    """(depth, the containers at that depth), outermost first, one level past MAX_DEPTH at most."""
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
