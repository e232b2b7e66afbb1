"""Recipes, gates, texts and QUANT_CONFIG presets that are shipped with the package, by name."""

from pathlib import Path

from quantflow import configs
from quantflow.errors import UsageError, nearest

SHIPPED = Path(configs.__file__).parent
TEXTS = SHIPPED / "calibration"
# the texts of measure and validate where none is named
CALIBRATION = TEXTS / "default.jsonl"
EVALUATION = TEXTS / "default-evaluation.jsonl"


def find_config(kind: str, name: str) -> Path:
    """The file of `name`: a path, or a shipped file configs/<kind>/<name>.yaml.

    Raises:
        UsageError: neither exists.
    """
    if Path(name).is_file():
        return Path(name)
    shipped = SHIPPED / kind
    names = sorted(path.stem for path in shipped.glob("*.yaml"))
    if name in names:
        return shipped / f"{name}.yaml"
    raise UsageError(
        f"{kind}: no file {name!r} and no shipped one of that name", nearest(name, names)
    )


def shipped_texts() -> dict[str, Path]:
    """Name -> file of the shipped texts."""
    return {path.stem: path for path in sorted(TEXTS.glob("*.jsonl"))}
