"""Settings: fields of records that declare themselves for the command line and the reference.

    samples: int = setting(128, "--samples", verbs=("measure",), help="Sequences (default 128).")

is the one declaration of a setting. Its name is the key of a recipe and the keyword of a record,
its annotation the type, its flag the option of the verbs. The command line makes its options from
`settings_of` and lays their values over a recipe.
"""

import dataclasses
import math
import re
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from quantflow.accelerators import GPUS
from quantflow.errors import UsageError, nearest

KEY = "setting"  # key in a field's metadata
# cuda:N is the GPU of that number
DEVICES = ("cpu", *(name for kind in GPUS for name in (kind, f"{kind}:0")), "hpu")
_DEVICE = re.compile(rf"cpu|({'|'.join(GPUS)})(:[0-9]{{1,3}})?|hpu")


def device_flag(name: str) -> str:
    """Name of a device as `--device` gives it; whether the device exists is not checked.

    Raises:
        UsageError: the name is no device's.
    """
    if not _DEVICE.fullmatch(name):
        raise UsageError(f"device={name!r}", nearest(name, DEVICES))
    return name


@dataclass(frozen=True, kw_only=True)
class Declared:
    """The declaration of a field beside its name, type and default.

    Attributes:
        help: one sentence, or one per verb where the verbs use the setting differently.
        flag: option: `--samples`, `--yes/--no`, or `-b --batch-size` with a short one; None
            without.
        metavar: word for the value in the help; None is the type.
        verbs: verbs that have the option.
        choices: allowed words; empty where the record itself refuses wrong ones.
        shown: whether the help shows the default.
        negated: whether the option of a bool sets it to false.
        parse: function from the option's text to a recipe's value; None keeps click's value.
        least, most: bounds of a whole number; see `check_numbers`.
        variable: environment variable that is read where the option is not given.
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
        """The sentence for a verb's help."""
        return self.help if isinstance(self.help, str) else self.help[verb]


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A field of a record, or of a record inside it.

    Attributes:
        record: class that has the field.
        path: keys that lead to it from the outermost record: ("tune", "steps").
        kind: bool, int, float or str; for a tuple the kind of its items.
        multiple: whether the field is a tuple.
        default: default of the field; None where it has none.
        declared: declaration of the field.
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
    flag: str | None = None,
    *,
    help: str | Mapping[str, str],
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
    """A dataclass field that is a setting, see `Declared`; required without a default."""
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
    """Refuse NaN, and whole numbers outside the bounds of their settings.

    A record's `__post_init__` calls it.

    Raises:
        UsageError: a number is out of bounds; the message names the field and its value.
    """
    for item in dataclasses.fields(record):
        declared = item.metadata.get(KEY)
        value = getattr(record, item.name)
        if declared is not None and isinstance(value, float) and math.isnan(value):
            raise UsageError(f"{item.name}={value}", "give a number")
        if declared is None or type(value) is not int or declared.least <= value <= declared.most:
            continue
        bound = (
            f"{declared.least} or more" if value < declared.least else f"{declared.most} or less"
        )
        raise UsageError(f"{item.name}={value}", f"give {bound}")


def settings_of(record: type, verb: str) -> tuple[Setting, ...]:
    """Settings of a record and of the records inside it that are options of a verb, in order."""
    return tuple(
        item
        for item in every_setting(record)
        if item.declared.flag is not None and verb in item.declared.verbs
    )


def every_setting(record: type, path: tuple[str, ...] = ()) -> tuple[Setting, ...]:
    """All settings of a record and of the records inside it.

    Entries of a list are records of their own.
    """
    hints = typing.get_type_hints(record)
    settings = []
    for item in dataclasses.fields(record):
        options = _without_none(hints[item.name])
        if KEY in item.metadata:
            kind, multiple = _kind(options[0]) if len(options) == 1 else (str, False)
            settings.append(
                Setting(
                    record=record,
                    path=(*path, item.name),
                    kind=kind,
                    multiple=multiple,
                    default=None if item.default is dataclasses.MISSING else item.default,
                    declared=item.metadata[KEY],
                )
            )
        # a record that is one option as a whole has no options for its fields
        if item.metadata.get(KEY, Declared()).flag is None:
            for option in options:
                if isinstance(option, type) and dataclasses.is_dataclass(option):
                    settings += every_setting(option, (*path, item.name))
    return tuple(settings)


def _without_none(hint: Any) -> tuple[Any, ...]:
    if isinstance(hint, types.UnionType):
        return tuple(option for option in typing.get_args(hint) if option is not type(None))
    return (hint,)


def _kind(hint: Any) -> tuple[type, bool]:
    """Type of a value or of a tuple's items, and whether it is a tuple."""
    if typing.get_origin(hint) is tuple:
        return _kind(typing.get_args(hint)[0])[0], True
    return (hint if hint in (bool, int, float) else str), False
