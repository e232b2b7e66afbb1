"""The environment of a command line: live lines, QUANT_CONFIG, and variables that nobody reads.

docs/environment.md has every variable.
"""

import os
from collections.abc import Mapping

UNREAD = {
    "CUDA_MEMORY_FRACTION": "give --kv-memory, such as 50%",
    "QUANT_CONFIG": "measure, quantize and export read it; serve the artifact that they made. With "
    "--device hpu it sets what Gaudi's graph compiler reads for float8",
}  # what other servers read: `serve` says of one that is set why nothing happens


def bars_wanted() -> bool:
    """Whether a terminal gets live lines; `TQDM_DISABLE=1` says no."""
    return os.environ.get("TQDM_DISABLE", "") in ("", "0")


def quant_config_variable() -> str | None:
    """The value of QUANT_CONFIG, or None where it is unset or empty."""
    return os.environ.get("QUANT_CONFIG") or None


def server_key() -> str | None:
    """The key of a server that `compare` asks, or None where it is unset or empty."""
    return os.environ.get("OPENAI_API_KEY") or None


def set_defaults(values: Mapping[str, str]) -> list[str]:
    """Set variables that are not set, for libraries that are imported later; a line for each."""
    missing = {name: value for name, value in values.items() if name not in os.environ}
    os.environ.update(missing)
    return [f"{name}={value} is set" for name, value in missing.items()]


def set_variables(options: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """Of variables that stand for options, variable -> option: those that are set.

    Returns:
        Option -> the variable and its value. REVISION and DTYPE are words that much else uses, so
        they count beside MODEL_ID alone.
    """
    wanted = set(options) if os.environ.get("MODEL_ID") else {*options} - {"REVISION", "DTYPE"}
    return {
        option: (name, os.environ[name])
        for name, option in options.items()
        if name in wanted and os.environ.get(name)
    }


def unread_variables() -> list[str]:
    """A line for each variable of `UNREAD` that is set."""
    return [
        f"{name}={os.environ[name]} is not read: {why}"
        for name, why in UNREAD.items()
        if os.environ.get(name)
    ]
