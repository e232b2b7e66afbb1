"""The ledger's entries: the fate of every source tensor, as the manifest has it."""

from collections.abc import Mapping, Sequence
from types import ModuleType

from quantflow.core.scheme import LinearScheme
from quantflow.files.ledger import UNUSED, LedgerEntry
from quantflow.models.graph import Graph
from quantflow.models.open import ModelFiles
from quantflow.planning.head import HeadPlan


def tensor_entries(
    source: ModelFiles,
    graph: Graph,
    schemes: Mapping[str, LinearScheme],
    changed: set[str],
    encoder: ModuleType,
    *,
    head: HeadPlan | None,
) -> tuple[LedgerEntry, ...]:
    """The ledger's entry for every source tensor.

    Args:
        source: checkpoint of the source.
        graph: linears of the model.
        schemes: linear -> its scheme, for those that are quantized.
        changed: names of tensors that absorbed a transform, of a head that it untied too.
        encoder: format of the artifact.
        head: record of the quantized head; None where it is as in the source.
    """
    linears, routers, idle = set(graph.linears), set(graph.routers), set(graph.idle)
    prefixes = tuple(f"{layer.prefix}." for layer in graph.layers)
    weight = f"{graph.family.head}.weight"
    untied: tuple[str, ...] = ()
    if weight in changed and weight not in source.checkpoint.infos:
        untied = (weight,) if head is None else encoder.tensor_names(head.linear, head.scheme)
    entries = []
    for name, (_, info) in source.checkpoint.located.items():
        linear = name.removesuffix(".weight")
        becomes: tuple[str, ...] = (name,)
        action, reason = "copied", "not a linear of a decoder layer"
        if name in source.checkpoint.unused:
            reason = f"{UNUSED}{source.checkpoint.unused[name].reason}"
            if name.endswith(".weight") and linear in schemes:
                becomes = encoder.tensor_names(linear, schemes[linear])
                action, reason = "quantized", f"{reason}, {schemes[linear].name}"
        elif name in source.checkpoint.whole:
            becomes, action, reason = _of_parts(source.checkpoint.whole[name][2], schemes, encoder)
        elif name.endswith(".weight") and linear in schemes:
            becomes, action, reason = (
                encoder.tensor_names(linear, schemes[linear]),
                "quantized",
                schemes[linear].name,
            )
        elif name in changed:
            action, reason = "changed", "absorbed a transform"
            if linear == graph.family.embedding and untied:
                becomes = (name, *untied)
                reason = f"{reason}; so did {graph.family.head}, which was tied to it"
        elif head is not None and head.tied and name == head.tensor:
            becomes = (name, *encoder.tensor_names(head.linear, head.scheme))
            reason = f"the embedding; {head.linear}, which was tied to it, is {head.scheme.name}"
        elif linear in linears:
            reason = "ignored by the recipe"
        elif linear in routers:
            reason = "a router decides by it, never quantized"
        elif linear in idle:
            reason = "no token of a causal forward goes through it, or it is read elsewhere too"
        elif len(info.shape) > 2 and name.startswith(prefixes):
            reason = "no matrix"
        entries.append(
            LedgerEntry(
                name=name,
                dtype=info.dtype,
                shape=info.shape,
                nbytes=info.nbytes,
                action=action,  # type: ignore[arg-type]
                reason=reason,
                becomes=becomes,
            )
        )
    return tuple(entries)


def _of_parts(
    names: Sequence[str], schemes: Mapping[str, LinearScheme], encoder: ModuleType
) -> tuple[tuple[str, ...], str, str]:
    """The artifact's tensors, action and reason of a source tensor that is read in parts."""
    written: list[str] = []
    used: dict[str, None] = {}
    for name in names:
        linear = name.removesuffix(".weight")
        quantized = schemes.get(linear) if name != linear else None
        written += [name] if quantized is None else encoder.tensor_names(linear, quantized)
        used |= {} if quantized is None else {quantized.name: None}
    if used:
        return tuple(written), "quantized", ", ".join(used)
    return (
        tuple(written),
        "changed",
        f"in {len(names)} parts, or turned" if len(names) > 1 else "turned: [out, in]",
    )
