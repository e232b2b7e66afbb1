"""Click options, made from the settings that records declare, and the way back to records.

A recipe's settings (quantflow/planning/recipe.py) are laid over `--set`, that over the recipe file,
that over QUANT_CONFIG, that over the defaults of the records. Options that are no setting of a
recipe and that several verbs have are declared here.
"""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from quantflow import cpu_threads
from quantflow.errors import UsageError
from quantflow.planning.recipe import Quantize, Recipe, apply_settings, read_yaml
from quantflow.settings import Setting, settings_of
from quantflow.shipped import find_config

Command = Callable[..., Any]
Decorator = Callable[[Command], Command]


class Folder(click.ParamType):  # type: ignore[type-arg]  # generic in newer releases of click only
    """A folder that is written.

    The empty text, which a shell makes of an unset variable, is none.
    """

    name = "folder"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        """The path of the folder."""
        if not str(value):
            self.fail("the name of the folder is empty", param, ctx)
        return Path(value)


FOLDER = Folder()
SET = click.option(
    "--set", "settings", metavar="KEY=VALUE", multiple=True, help="Change one value of the recipe."
)
JSON = click.option(
    "--json", "as_json", is_flag=True, help="Print the result as one JSON document."
)
QUIET = click.option("-q", "--quiet", is_flag=True, help="No progress.")
DEBUG = click.option("--debug", is_flag=True, help="Show the traceback of an error.")


def _threads(_context: click.Context, _parameter: click.Parameter, value: int | None) -> None:
    if value is not None:
        cpu_threads.take(value)


THREADS = click.option(
    "--threads",
    metavar="N",
    type=click.IntRange(min=1),
    expose_value=False,
    callback=_threads,
    help="Threads that compute (default: one per core that this process may use).",
)
COMMON = (
    click.option(
        "--recipe", metavar="FILE", help="Take values from this recipe; flags win over it."
    ),
    SET,
    JSON,
    click.option(
        "--force", is_flag=True, help="Replace a finished result that was made from other inputs."
    ),
    click.option("--dry-run", is_flag=True, help="Say what would be done and do nothing."),
    THREADS,
    QUIET,
    click.option("-v", "--verbose", is_flag=True, help="Progress from the first step on."),
    DEBUG,
)
NO_VERIFY = click.option(
    "--no-verify",
    is_flag=True,
    help="Read records and headers alone: a changed weight is not noticed.",
)
TRUST_NETWORK = click.option(
    "--trust-network",
    is_flag=True,
    help="Ranks of your torchrun may meet at its address, which anybody on the network can write "
    "to.",
)
QUANT_CONFIG = click.option(
    "--quant-config",
    metavar="FILE",
    help="Gaudi's JSON, or a shipped one by its name; below the recipe (default: the "
    "environment's QUANT_CONFIG).",
)


def common(command: Command) -> Command:
    """Add the options of every verb that computes."""
    return _decorated(command, COMMON)


def offline(command: Command) -> Command:
    """Add the options of the verbs that only read."""
    return _decorated(command, (JSON, DEBUG))


def recipe_settings(verb: str, *first: str) -> Decorator:
    """Add the recipe settings of a verb, those of the sections `first` before the others."""

    def add(command: Command) -> Command:
        entry, whole = _of_recipe(verb)
        by_section = {"quantize": list(entry)}
        for item in whole:
            by_section.setdefault(item.path[0], []).append(item)
        sections = [*first, *(name for name in by_section if name not in first)]
        items = [item for section in sections for item in by_section[section]]
        return _decorated(command, [_option(item, verb, layered=True) for item in items])

    return add


def job_settings(verb: str, *records: type) -> Decorator:
    """Add the settings of jobs; an option that several of them have is declared by the first."""

    def add(command: Command) -> Command:
        items = {
            _parameter(item): item
            for record in reversed(records)
            for item in reversed(settings_of(record, verb))
        }
        return _decorated(
            command, [_option(item, verb, layered=False) for item in reversed(items.values())]
        )

    return add


def given(verb: str, record: type, values: Mapping[str, Any]) -> list[tuple[Setting, Any]]:
    """The settings of a record that a command line gives, with the values of a record or recipe."""
    found = []
    for item in settings_of(record, verb):
        value = values[_parameter(item)]
        if value is None or (item.multiple and value == ()):
            continue
        if item.declared.negated:
            value = not value
        found.append((item, value if item.declared.parse is None else item.declared.parse(value)))
    return found


def job_values(verb: str, record: type, options: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a job that a command line gives.

    An inner record is made where any of its fields is given.
    """
    values: dict[str, Any] = {}
    inner: dict[str, tuple[type, dict[str, Any]]] = {}
    for item, value in given(verb, record, options):
        if item.record is record:
            values[item.path[-1]] = value
        else:
            inner.setdefault(item.path[0], (item.record, {}))[1][item.path[-1]] = value
    return values | {name: kind(**fields) for name, (kind, fields) in inner.items()}


def recipe_flags(verb: str, values: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The values of the options of `recipe_settings` by key: of the recipe, and of an entry."""
    whole, entry = (
        {
            item.key: list(value) if item.multiple else value
            for item, value in given(verb, record, values)
        }
        for record in (Recipe, Quantize)
    )
    return whole, entry


def recipe_data(
    recipe: str | None,
    settings: Sequence[str],
    flags: Mapping[str, Any],
    *,
    otherwise: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """A recipe file under --set under the flags, as a mapping.

    Args:
        recipe: path or shipped name of the recipe; None is no file.
        settings: items of --set.
        flags: values by key.
        otherwise: content in place of a file where there is none.
    """
    data = read_yaml(find_config("recipes", recipe)) if recipe else dict(otherwise or {})
    return overlay(apply_settings(data, settings), flags)


def overlay(data: dict[str, Any], flags: Mapping[str, Any]) -> dict[str, Any]:
    """Put the flags that are not None over a recipe's mapping, in place: `calibration.samples`.

    Raises:
        UsageError: the recipe has something else where a flag needs a mapping.
    """
    for path, value in flags.items():
        if value is None:
            continue
        *parents, last = path.split(".")
        target = data
        for part in parents:
            if target.get(part) is None:
                target[part] = {}
            target = target[part]
            if not isinstance(target, dict):
                raise UsageError(
                    f"recipe.{part}: {target!r} is not a mapping",
                    "write `key: value` lines below it",
                )
        target[last] = value
    return data


def _of_recipe(verb: str) -> tuple[tuple[Setting, ...], tuple[Setting, ...]]:
    """A verb's settings of an entry of `quantize`, and of the whole recipe."""
    return settings_of(Quantize, verb), settings_of(Recipe, verb)


def origins(verb: str, record: type, context: click.Context) -> dict[str, str]:
    """The option or the variable that each given setting of a record is from."""
    found = {}
    for item in settings_of(record, verb):
        source = context.get_parameter_source(_parameter(item))
        if source is ParameterSource.COMMANDLINE:
            found[item.path[-1]] = str(item.declared.flag)
        elif source is ParameterSource.ENVIRONMENT:
            found[item.path[-1]] = str(item.declared.variable)
    return found


def _parameter(item: Setting) -> str:
    """The name of an option's value: `--max-memory` is max_memory."""
    flags = str(item.declared.flag).partition("/")[0].split()
    return max(flags, key=len).removeprefix("--").replace("-", "_")


def _option(item: Setting, verb: str, *, layered: bool) -> Decorator:
    """The option of a setting.

    A `layered` one has no default, since something beneath it may have a value.
    """
    declared = item.declared
    words: dict[str, Any] = {"help": declared.help_of(verb) or None, "metavar": declared.metavar}
    if item.kind is bool:
        unset = layered or item.default is None
        words |= {"is_flag": True, "default": None if unset else item.default != declared.negated}
    elif declared.parse is None or declared.choices:
        words |= {
            "type": click.Choice(declared.choices) if declared.choices else item.kind,
            "multiple": item.multiple,
        }
    if declared.shown and not layered:
        words |= {
            "default": list(item.default) if item.multiple else item.default,
            "show_default": True,
        }
    if declared.variable is not None:
        words |= {"envvar": declared.variable, "show_envvar": True}
    return click.option(*str(declared.flag).split(), _parameter(item), **words)


def _decorated(command: Command, options: Iterable[Decorator]) -> Command:
    return functools.reduce(
        lambda decorated, option: option(decorated), reversed(list(options)), command
    )
