"""Which program wrote a quantized folder, as far as its files say so."""

from collections.abc import Collection, Mapping
from typing import Any

_RECIPE = "recipe.yaml"  # llm-compressor keeps what it did beside the weights


def program_of(config: Mapping[str, Any], files: Collection[str]) -> str | None:
    """The program, with its version where that is said; None where nothing says it.

    Args:
        config: the `quantization_config` of config.json.
        files: names of the folder's files.
    """
    if (version := config.get("autoround_version")) is not None:
        return f"AutoRound {version}"
    meta, producer = config.get("meta"), config.get("producer")
    quantizer = meta.get("quantizer") if isinstance(meta, Mapping) else None
    if quantizer:
        return ", ".join(map(str, quantizer)) if isinstance(quantizer, list) else str(quantizer)
    if isinstance(producer, Mapping) and "name" in producer:
        return " ".join(str(producer[key]) for key in ("name", "version") if key in producer)
    return "llm-compressor" if _RECIPE in files else None
