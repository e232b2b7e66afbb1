"""A diagnosis as a table and a sentence for people. Imports no torch."""

from collections.abc import Mapping
from typing import Any

COLUMNS = ("quantized", "only this", "all but this", "gain")
SHOWN = 10


def cells(diagnosis: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """The linears that gain most when left alone, in the order of COLUMNS, nats per token."""
    units = [] if diagnosis["probes"] is None else diagnosis["probes"]["units"]
    costly = sorted(
        (unit for unit in units if not unit["whole"]), key=lambda unit: -float(unit["gain"])
    )
    return [
        (unit["name"], *(f"{unit[key]:.3g}" for key in ("only_this", "all_but_this", "gain")))
        for unit in costly[:SHOWN]
    ]


def mend_words(mend: Mapping[str, Any]) -> str:
    """A mend in words: `W8A16 for model.layers.0.mlp.down_proj (+1,024 bytes)`."""
    names = ", ".join(mend["linears"])
    what = (
        f"{names} left as in the source"
        if mend["scheme"] is None
        else f"{mend['scheme']} for {names}"
    )
    return f"{what} ({mend['bytes']:+,} bytes)"


def hint(result: Mapping[str, Any]) -> str:
    """The sentence that says how to mend an artifact, from its validation.json with a diagnosis."""
    diagnosis = result["diagnosis"]
    mend = diagnosis["mend"]
    if mend is None:
        return str(
            diagnosis["note"] or "No linear stands out: a finer scheme for all of them is the mend"
        )
    now = result["metrics"]["mean_kld"]["value"]
    return (
        f"Mend: {mend_words(mend)}: mean KLD {now:.4g}, predicted {mend['mean_kld']:.4g}; "
        f"{mend['recipe']} is its recipe"
    )
