"""A stage's job as JSON, so that another process does exactly the same job.

A dataclass of this package, and the values that JSON has no word for:

    {"record": "quantflow.measuring.job:MeasureJob", "fields": {...}}
    {"path": "..."}   {"tuple": [...]}   {"mapping": {...}}

No setting is spelled again as an option of a command line, so none can be lost on the way.
"""

import dataclasses
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from quantflow.errors import InputError


def encode(value: Any) -> Any:
    """A job as plain data.

    Raises:
        TypeError: it holds something else than records, paths, containers, numbers and text.
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        kind = type(value)
        fields = {
            field.name: encode(getattr(value, field.name)) for field in dataclasses.fields(value)
        }
        return {"record": f"{kind.__module__}:{kind.__qualname__}", "fields": fields}
    if isinstance(value, Path):
        return {"path": str(value)}
    if isinstance(value, tuple):
        return {"tuple": [encode(item) for item in value]}
    if isinstance(value, list):
        return [encode(item) for item in value]
    if isinstance(value, Mapping):
        return {"mapping": {str(key): encode(item) for key, item in value.items()}}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"{type(value).__name__} is no part of a job")


def decode(data: Any) -> Any:
    """The job that `encode` made plain data of.

    Raises:
        InputError: it names something else than a record of this package.
    """
    if isinstance(data, list):
        return [decode(item) for item in data]
    if not isinstance(data, dict):
        return data
    match data:
        case {"path": str(text)}:
            return Path(text)
        case {"tuple": list(items)}:
            return tuple(decode(item) for item in items)
        case {"mapping": dict(items)}:
            return {key: decode(item) for key, item in items.items()}
        case {"record": str(name), "fields": dict(fields)} if name.startswith("quantflow."):
            module, _, kind = name.partition(":")
            record = getattr(import_module(module), kind, None)
            if isinstance(record, type) and dataclasses.is_dataclass(record):
                return record(**{key: decode(item) for key, item in fields.items()})
    raise InputError(f"job: {str(data)[:80]} is no record of quantflow", "start the ranks again")
