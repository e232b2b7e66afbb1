"""Names that match a recipe's pattern."""

from collections.abc import Callable, Sequence

from quantflow.errors import InputError, UsageError, nearest
from quantflow.files.patterns import Pattern


def matching(pattern: str, names: Sequence[str], where: str) -> list[str]:
    """The names that an exact name or a `re:` pattern matches, at least one.

    Args:
        pattern: the recipe's pattern.
        names: candidates.
        where: the recipe's key, for the message.

    Raises:
        UsageError: the pattern matches nothing, or is no regular expression.
    """
    match: Callable[[str], object] = pattern.__eq__
    if pattern.startswith("re:"):
        try:
            match = Pattern(pattern[3:]).match
        except InputError as error:
            raise UsageError(f"{where}: {error.cause}", error.remedy) from error
    try:
        matches = [name for name in names if match(name)]
    except InputError as error:
        raise UsageError(f"{where}: {error.cause}", error.remedy) from error
    if not matches:
        raise UsageError(
            f"{where}: {pattern!r} matches none of {len(names)} modules",
            f"{nearest(pattern, names[:7])}, ...",
        )
    return matches
