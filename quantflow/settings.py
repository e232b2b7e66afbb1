"""Settings: fields of records that say of themselves how a command line and a reference speak of them.

    samples: int = setting(128, help="Sequences at most (default 128).", flag="--samples", verbs=("measure", "plan"))

is the one declaration of a setting. Its name is the key of a recipe and the keyword of a record,
its annotation the type, its flag the option of the verbs it names. The command line makes its
options by `settings_of` and lays their values over a recipe.
"""

import dataclasses
import math
import re
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from quantflow.errors import UsageError, nearest

KEY = "setting"  # of a field's metadata
DEVICES = ("cpu", "cuda", "cuda:0", "hpu")  # cuda:N is the GPU of that number


def device_flag(name: str) -> str:
    """Return the name of a device as `--device` says it; whether it is there is not looked at.

    Raises:
        UsageError: a word that names none.
    """
    if not re.fullmatch(r"cpu|cuda(:[0-9]{1,3})?|hpu", name):
        raise UsageError(f"device={name!r}", nearest(name, DEVICES))
    return name


@dataclass(frozen=True, kw_only=True)
class Declared:
    """What a field says of itself beside its name, type and default.

    Attributes:
        help: one sentence; per verb where a verb uses the setting for something else.
        flag: the option: `--samples`, `--yes/--no`, or `-b --batch-size` with a short one. None: no
            option.
        metavar: what stands for the value in the help; None is the type.
        verbs: the verbs with this option.
        choices: the words that are allowed; empty where the record itself refuses wrong ones.
        shown: the help says the default.
        negated: the option of a bool says that it is not so.
        parse: makes the option's text what a recipe holds; None where click's value is it.
        least, most: of a whole number; see `check_numbers`.
        variable: of the environment, which is read where the option is not given.
    """

    help: str | Mapping[str, str] = ""
    flag: str | None = None
    metavar: str | None = None
    verbs: tuple[str, ...] = ()
    choices: tuple[str, ...] = ()
    shown: bool = False
    negated: bool = False
    parse: Callable[[str], Any] | None = None
    least: int = -(2**63)
    most: int = 2**63 - 1  # what C and torch hold
    variable: str | None = None

    def help_of(self, verb: str) -> str:
        """Return the sentence for a verb's help."""
        return self.help if isinstance(self.help, str) else self.help[verb]


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A field of a record, or of a record inside it.

    Attributes:
        record: the class that has the field.
        path: keys that lead to it from the outermost record: ("tune", "steps").
        kind: bool, int, float or str; of a tuple that of its items.
        multiple: the field is a tuple.
        default: None where the record has none.
        declared: what it says of itself.
    """

    record: type
    path: tuple[str, ...]
    kind: type
    multiple: bool
    default: Any
    declared: Declared

    @property
    def key(self) -> str:
        """The path as `--set` spells it."""
        return ".".join(self.path)


def setting(
    default: Any = dataclasses.MISSING,
    *,
    help: str | Mapping[str, str],
    flag: str | None = None,
    metavar: str | None = None,
    verbs: tuple[str, ...] = (),
    choices: tuple[str, ...] = (),
    shown: bool = False,
    negated: bool = False,
    parse: Callable[[str], Any] | None = None,
    least: int = -(2**63),
    most: int = 2**63 - 1,
    variable: str | None = None,
) -> Any:
    """Return a dataclass field that is a setting; see `Declared`. Without a default the field must be given."""
    declared = Declared(
        help=help,
        flag=flag,
        metavar=metavar,
        verbs=tuple(help) if isinstance(help, Mapping) else verbs,
        choices=choices,
        shown=shown,
        negated=negated,
        parse=parse,
        least=least,
        most=most,
        variable=variable,
    )
    return dataclasses.field(default=default, metadata={KEY: declared})


def check_numbers(record: Any) -> None:
    """Refuse whole numbers outside of what their settings allow, and NaN; a record's `__post_init__` calls it.

    Raises:
        UsageError: naming the field and its value.
    """
    for item in dataclasses.fields(record):
        declared, value = item.metadata.get(KEY), getattr(record, item.name)
        if declared is not None and isinstance(value, float) and math.isnan(value):
            raise UsageError(f"{item.name}={value}", "give a number")
        if declared is None or type(value) is not int or declared.least <= value <= declared.most:
            continue
        bound = (
            f"{declared.least} or more" if value < declared.least else f"{declared.most} or less"
        )
        raise UsageError(f"{item.name}={value}", f"give {bound}")


def settings_of(record: type, verb: str) -> tuple[Setting, ...]:
    """Return the settings of a record, and of the records inside it, that are options of a verb; in the order of the fields."""
    return tuple(
        item
        for item in every_setting(record)
        if item.declared.flag is not None and verb in item.declared.verbs
    )


def every_setting(record: type, path: tuple[str, ...] = ()) -> tuple[Setting, ...]:
    """Return all settings of a record and of the records inside it; entries of a list are records of their own."""
    hints, found = typing.get_type_hints(record), []
    for item in dataclasses.fields(record):
        options = _without_none(hints[item.name])
        if KEY in item.metadata:
            kind, multiple = _kind(options[0]) if len(options) == 1 else (str, False)
            found.append(
                Setting(
                    record=record,
                    path=(*path, item.name),
                    kind=kind,
                    multiple=multiple,
                    default=None if item.default is dataclasses.MISSING else item.default,
                    declared=item.metadata[KEY],
                )
            )
        # one option for a whole record says all of it
        if item.metadata.get(KEY, Declared()).flag is None:
            for option in options:
                if isinstance(option, type) and dataclasses.is_dataclass(option):
                    found += every_setting(option, (*path, item.name))
    return tuple(found)


def _without_none(hint: Any) -> tuple[Any, ...]:
    if isinstance(hint, types.UnionType):
        return tuple(option for option in typing.get_args(hint) if option is not type(None))
    return (hint,)


def _kind(hint: Any) -> tuple[type, bool]:
    """Return the type of a value or of a tuple's items, and whether it is a tuple's."""
    if typing.get_origin(hint) is tuple:
        return _kind(typing.get_args(hint)[0])[0], True
    return (hint if hint in (bool, int, float) else str), False
