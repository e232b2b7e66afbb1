"""Inputs that nobody would write, from a seed.

Bytes and JSON values change in the ways that break readers.
"""

import copy
import json
import random
from collections.abc import Sequence
from typing import Any

NUMBERS = (
    0,
    1,
    -1,
    2,
    7,
    127,
    128,
    255,
    2**31 - 1,
    2**31,
    -(2**31),
    2**32,
    2**53,
    2**63 - 1,
    2**63,
    -(2**63),
    10**30,
    10**400,
)
TEXTS = (
    *(
        "",
        " ",
        "0",
        "-1",
        "None",
        "nan",
        "inf",
        "true",
        "/",
        "..",
        "../../etc/passwd",
        "/dev/zero",
        "\x00",
        "\n",
        "a\nb: c",
    ),
    *(
        "\x1b[31mred\x1b[0m\x07",
        "<script>alert(1)</script>",
        "{{7*7}}",
        "é",
        "\ud800",
        "\U0001f600" * 9,
        "x" * 5000,
    ),
    *(
        "re:(a+)+$",
        "re:[",
        "%s%n",
        "__class__",
        "\u202eabc",
        "F32",
        "FP8",
        "linear",
        "gelu",
        "auto",
    ),
)
OTHERS = (
    None,
    True,
    False,
    0.0,
    -0.0,
    0.5,
    -1.5,
    1e-320,
    1e308,
    [],
    {},
    [[]],
    [None],
    [0],
    [-1],
    ["x"],
    {"": 0},
    {"a": {"b": [1]}},
)
WORDS = (
    b"{",
    b"}",
    b"[",
    b"]",
    b'"',
    b",",
    b":",
    b"\\u0000",
    b"1e999",
    b"NaN",
    b"null",
    b"-0",
    b"\x00",
    b"\xff\xfe",
    b"\xed\xa0\x80",
)


def changed_bytes(random: random.Random, data: bytes, others: Sequence[bytes] = ()) -> bytes:
    """Data with one to four changes: bits, bytes, numbers, cuts, repeats, parts of other inputs."""
    made = bytearray(data)
    for _ in range(random.choice((1, 1, 1, 2, 3, 4))):
        at = random.randrange(len(made) + 1)
        size = min(random.choice((1, 1, 2, 4, 8, 16, 64, 256)), len(made) - at)
        match random.randrange(9):
            case 0 if at < len(made):
                made[at] ^= 1 << random.randrange(8)
            case 1 if at < len(made):
                made[at] = random.choice((0, 1, 127, 128, 255, random.randrange(256)))
            case 2:
                number = random.choice(NUMBERS[:-2])
                width = random.choice((1, 2, 4, 8))
                made[at : at + width] = (number % (1 << 8 * width)).to_bytes(
                    width, random.choice(("little", "big"))
                )
            case 3:
                del made[at : at + size]
            case 4:
                made[at:at] = made[at : at + size] * random.choice((1, 2, 50))
            case 5:
                del made[at:]
            case 6:
                made[at:at] = random.choice(WORDS)
            case 7:
                other = random.choice(others or (data,))
                begin = random.randrange(len(other) + 1)
                made[at : at + size] = other[begin : begin + random.randrange(64)]
            case _:
                made[at : at + size] = random.randbytes(size)
    return bytes(made)


def changed_value(random: random.Random, value: Any, *, changes: int = 1) -> Any:
    """A JSON value that is changed somewhere in it.

    Values differ; keys are missing, twice, renamed or swapped.
    """
    made = copy.deepcopy(value)
    for _ in range(changes):
        found = [place for place in places(made) if place]
        if not found:
            return strange(random)
        change_(random, made, random.choice(found))
    return made


def change_(random: random.Random, value: Any, place: Sequence[Any]) -> None:
    """Change a JSON value at one place, which is the path of keys and numbers that leads there."""
    *parents, last = place
    holder = value
    for key in parents:
        holder = holder[key]
    match random.randrange(6):
        case 0:
            del holder[last]
        case 1 if isinstance(holder, dict):
            holder[random.choice((*TEXTS[:-10], str(last).upper()))] = holder.pop(last)
        case 1:
            holder[last:last] = [copy.deepcopy(holder[last])] * random.choice((1, 3, 100))
        case 2:
            holder[last] = _wrapped(random, holder[last])
        case 3:
            holder[last] = _near(random, holder[last])
        case _:
            holder[last] = strange(random)


def strange(random: random.Random) -> Any:
    """Return a value that readers forget about."""
    return copy.deepcopy(
        random.choice((random.choice(NUMBERS), random.choice(TEXTS), random.choice(OTHERS)))
    )


def as_json(value: Any) -> bytes:
    """Return the JSON of a value, lone surrogates as they are escaped."""
    return json.dumps(value).encode()


def _near(random: random.Random, value: Any) -> Any:
    """Return a value of the same kind."""
    match value:
        case bool():
            return not value
        case int():
            return random.choice(
                (
                    value + 1,
                    value - 1,
                    -value,
                    value * 2,
                    value // 2,
                    value * 1000,
                    str(value),
                    float(value % 2**53),
                )
            )
        case float():
            return random.choice(
                (-value, value * 1e9, int(max(-1e300, min(value, 1e300))), str(value), 0.0)
            )
        case str():
            return random.choice(
                (
                    value.upper(),
                    value[:-1],
                    value + value,
                    value + "\n",
                    f" {value}",
                    value[::-1],
                    [value],
                )
            )
        case list():
            return random.choice(
                (value[:-1], value * 2, value[::-1], [value], dict.fromkeys(map(str, value)))
            )
        case dict():
            return random.choice((list(value), {**value, "more": 1}, [value], {}))
    return strange(random)


def _wrapped(random: random.Random, value: Any) -> Any:
    for _ in range(random.choice((1, 2, 120))):
        value = [value] if random.random() < 0.5 else {"a": value}
    return value


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the path of every value inside a value; of long lists the first ones."""
    found = [path]
    items = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value[:20])
        if isinstance(value, list)
        else ()
    )
    for key, item in items:
        found += places(item, (*path, key))
    return found
