"""The modules that a QUANT_CONFIG quantizes: its allowlist and blocklist, with checked patterns.

An empty allowlist takes every module. Else a module is taken when its class is among `types`, or
any pattern of `names` matches somewhere in its path. The blocklist is asked afterwards in the same
way, so it wins. A pattern that means something else than it looks like is refused and explained.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from quantflow.errors import InputError, UsageError
from quantflow.files.patterns import Pattern

_CLASS_OF_NUMBERS = re.compile(r"\[(\d+)-(\d+)\]")
_LONGEST = 256


@dataclass(frozen=True, kw_only=True)
class ModuleList:
    """An allowlist or a blocklist.

    Attributes:
        names: regular expressions that match anywhere in a module's path.
        types: class names.
    """

    names: tuple[str, ...] = ()
    types: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        """Whether it lists anything."""
        return bool(self.names or self.types)

    def holds(self, path: str, layer_type: str) -> bool:
        """Whether a module is on the list."""
        return layer_type in self.types or any(pattern.search(path) for pattern in self._patterns)

    @cached_property
    def _patterns(self) -> tuple[Pattern, ...]:
        return tuple(map(Pattern, self.names))


def module_list(key: str, value: object) -> ModuleList:
    """Read `allowlist` or `blocklist`.

    Raises:
        UsageError: the value is no table of `names` and `types`, or a pattern means something else
            than it looks like.
    """
    if not isinstance(value, Mapping):
        raise UsageError(f"{key}: {value!r} is no table", 'write {"types": [], "names": []}')
    unknown = sorted(set(value) - {"names", "types"})
    if unknown:
        raise UsageError(f"{key}: key {unknown[0]!r} is unknown", "use names and types")
    lists: dict[str, tuple[str, ...]] = {}
    for part, items in value.items():
        if not isinstance(items, list) or not all(isinstance(item, str) for item in items):
            raise UsageError(
                f"{key}.{part}: {items!r} is no list of text", f'write "{part}": ["..."]'
            )
        lists[part] = tuple(items)
    for pattern in lists.get("names", ()):
        _check_pattern(key, pattern)
    return ModuleList(**lists)


def selected(path: str, layer_type: str, *, allow: ModuleList, block: ModuleList) -> bool:
    """Whether a module is quantized."""
    return (not allow or allow.holds(path, layer_type)) and not block.holds(path, layer_type)


def _check_pattern(key: str, pattern: str) -> None:
    """Refuse a text that is no regular expression, and square brackets around numbers.

    Such brackets do not mean those numbers.

    Raises:
        UsageError: one of the two; the message has the pattern that was meant.
    """
    for match in _CLASS_OF_NUMBERS.finditer(pattern):
        if max(len(match[1]), len(match[2])) > 1:
            raise UsageError(
                f"{key}.names: pattern {pattern!r}: {match[0]} is one character, not a number: "
                f"{_characters(match)}",
                f"write {_meant(pattern, match)!r}",
            )
    try:
        Pattern(pattern)
    except InputError as error:
        raise UsageError(f"{key}.names: {error.cause}", error.remedy) from error


def _characters(match: "re.Match[str]") -> str:
    """Description of the characters that a class such as [29-31] matches."""
    first, last = match[1], match[2]
    single = [*dict.fromkeys(first[:-1] + last[1:])]
    low, high = first[-1], last[0]
    listed = [f"{character!r}" for character in single]
    if low > high:
        return f"{', '.join(listed)} and the range {low}-{high}, which runs backwards"
    return ", ".join([*listed, f"and {low!r} to {high!r}" if low < high else repr(low)])


def _meant(pattern: str, match: "re.Match[str]") -> str:
    """The pattern with the numbers written out."""
    first, last = sorted((int(match[1]), int(match[2])))
    if last - first >= _LONGEST:
        return pattern.replace(match[0], r"\d+")
    numbers = "|".join(str(number) for number in range(first, last + 1))
    return pattern.replace(match[0], f"({numbers})")


def as_table(modules: ModuleList) -> dict[str, Any]:
    """The list in QUANT_CONFIG's words."""
    names: Sequence[str] = modules.names
    return {"types": list(modules.types), "names": list(names)}
