"""Options that several verbs share, beside those of every verb."""

import functools
from collections.abc import Callable
from typing import Any

import click

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


def limits(shared: dict[str, Any]) -> dict[str, Any]:
    """Return the flags of `bounded` as values of a recipe, to be laid over it."""
    return {f"resources.{name}": shared[name] for name in ("max_memory", "max_disk", "disk_offload")}


def number_or_word(text: str) -> float | str:
    """Return a flag's value as a recipe would hold it: `0.5` is a number, `auto` is a word."""
    try:
        return float(text)
    except ValueError:
        return text
