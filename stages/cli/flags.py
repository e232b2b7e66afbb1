"""Options that several verbs share, beside those of every verb."""

import functools
from collections.abc import Callable
from typing import Any

import click

from quantflow.errors import UsageError

Command = Callable[..., Any]


def bounded(command: Command) -> Command:
    """Add the options of the verbs that keep to limits; `limits` takes them from the verb's values."""
    options = [
        click.option(
            "--max-memory", metavar="SIZE", help="Memory of the process at most, such as 4GiB (default: what is free)."
        ),
        click.option("--max-disk", metavar="SIZE", help="Bytes written at most (default: what is free)."),
        click.option("--disk-offload", is_flag=True, default=None, help="Use a tenth of the memory; the rest waits on disk."),
    ]
    return functools.reduce(lambda decorated, option: option(decorated), reversed(options), command)


def quant_configured(command: Command) -> Command:
    """Add --quant-config."""
    told = "Gaudi's JSON, or a shipped one by its name; below the recipe (default: the environment's QUANT_CONFIG)."
    return click.option("--quant-config", metavar="FILE", help=told)(command)


def headed(command: Command) -> Command:
    """Add --head."""
    told = "Quantize the head too: W8A16, W4A16:hqq, W4A16:hqq:64 (default: leave it as it is); a tied one is untied."
    return click.option("--head", metavar="SCHEME[:ALGORITHM[:GROUP]]", help=told)(command)


def head_from(text: str | None) -> dict[str, Any] | None:
    """Return what --head says as a recipe would hold it, None where it is not given.

    Raises:
        UsageError: it has more parts than three, or a group size that is no number.
    """
    if text is None:
        return None
    scheme, *rest = text.split(":")
    size = rest.pop() if rest and rest[-1].isdecimal() else None
    if len(rest) > 1:
        raise UsageError(
            f"--head {text}: {len(rest)} words after the scheme", "write SCHEME:ALGORITHM:GROUP, such as W4A16:hqq:64"
        )
    given = {"scheme": scheme, "algorithm": rest[0] if rest else None, "group_size": None if size is None else int(size)}
    return {key: value for key, value in given.items() if value is not None}


def limits(shared: dict[str, Any]) -> dict[str, Any]:
    """Return the flags of `bounded` as values of a recipe, to be laid over it."""
    return {f"resources.{name}": shared[name] for name in ("max_memory", "max_disk", "disk_offload")}


def transforms_from(alpha: str | None) -> list[dict[str, Any]] | None:
    """Return what --smoothquant says as a recipe would hold it: a number, `auto`, or `none` for no transforms."""
    if alpha is None or alpha == "none":
        return None if alpha is None else []
    try:
        value: float | str = float(alpha)
    except ValueError:
        value = alpha
    return [{"smoothquant": {"alpha": value}}]
