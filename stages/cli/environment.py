"""What the environment says about a command line: whether live lines are wanted, and which QUANT_CONFIG is meant."""

import os


def bars_wanted() -> bool:
    """Return whether a terminal gets live lines; `TQDM_DISABLE=1` says no."""
    return os.environ.get("TQDM_DISABLE", "") in ("", "0")


def quant_config_variable() -> str | None:
    """Return what QUANT_CONFIG names, or None where it is unset or empty."""
    return os.environ.get("QUANT_CONFIG") or None
