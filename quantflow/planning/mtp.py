"""Quantized layers that predict further tokens (MTP): their linears, and the algorithm.

    <o>/mtp.safetensors    the layers as the artifact holds them
    <o>/mtp.json           their record, like a layer's (quantflow/quantizing/file_to_file.py)

A causal forward does not run them, so nothing is measured of their inputs. Like the head they go
from file to file in units of rows, by an algorithm and a scheme that read weights alone. Quantized
are the linears that the model's own layers have too. Routers, the linear that joins the embedding
and the hidden state, and a copy of the embedding or of the head stay as they are, as in the
released folders of DeepSeek V3.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quantflow.core.scheme import LinearScheme, scheme_words
from quantflow.errors import UnsupportedError, UsageError
from quantflow.files.layers_ahead import layers_ahead
from quantflow.models.graph import Graph
from quantflow.planning.head import algorithm_of_weights
from quantflow.planning.recipe import Quantize
from quantflow.planning.requirements import override_of

FILE, RECORD = "mtp.safetensors", "mtp.json"  # in a quantize folder
_BY_ROW = ("per_channel", "per_group", "per_block")


@dataclass(frozen=True, kw_only=True)
class MtpPlan:
    """The quantization of layers that predict further tokens.

    Attributes:
        schemes: source name of each linear -> its scheme.
        algorithm: key of ALGORITHMS that reads weights alone.
    """

    schemes: Mapping[str, LinearScheme]
    algorithm: str

    @property
    def scheme(self) -> LinearScheme:
        """The scheme of the first linear, which is that of all."""
        return next(iter(self.schemes.values()))

    def as_json(self) -> dict[str, Any]:
        """The plan as plain data, for state keys and manifests."""
        return {
            "schemes": {name: scheme_words(scheme) for name, scheme in self.schemes.items()},
            "algorithm": self.algorithm,
        }


def mtp_of(
    entry: Quantize,
    graph: Graph,
    unused: Mapping[str, Sequence[int]],
    *,
    rotates: bool = False,
) -> MtpPlan | None:
    """The quantization of the layers; None where the entry leaves them as they are.

    Args:
        entry: entry of the recipe.
        graph: graph of the model.
        unused: shapes of the tensors that no module of the model has.
        rotates: whether a transform rotates the model's hidden states, which the layers read.

    Raises:
        UsageError: the model has no such layer, the scheme or algorithm needs statistics, or its
            groups do not divide the input of a linear.
        UnsupportedError: a scale of whole weights, experts that are one tensor, or a rotation of a
            model with such a layer, whether it is quantized or not.
        SchemeError: a group size stands beside a scheme without groups.
    """
    found = layers_ahead(unused)
    if rotates and found:
        raise UnsupportedError(
            f"{entry.name}: a rotation of the model, whose {found[0].prefix} predicts further "
            "tokens (MTP) and cannot follow it: it reads what the last norm puts out, and its "
            "head, whose weights change",
            "leave the rotation out, or take that layer's tensors out of the folder and its count "
            "out of config.json",
        )
    if entry.mtp is None:
        return None
    scheme = override_of(entry, entry.mtp)
    if not found:
        raise UsageError(
            f"{entry.name}: mtp: the model has no layer that predicts further tokens (MTP)",
            "leave mtp out",
        )
    algorithm = algorithm_of_weights(
        entry.name, "mtp", entry.mtp, scheme, place="layers that no text runs through"
    )
    weights = scheme.weights
    if weights.granularity not in _BY_ROW or weights.scale_format == "e4m3":
        raise UnsupportedError(
            f"{entry.name}: mtp: scheme {entry.mtp.scheme} has a scale of a whole weight, and "
            "rows are rounded by themselves",
            "choose FP8_DYNAMIC, FP8_BLOCK, W8A16, W4A16 or MXFP4A16",
        )
    inside = {layer.inside(name) for layer in graph.layers for name in layer.linears}
    names = []
    for ahead in found:
        own = [name for name in unused if name.startswith(f"{ahead.prefix}.")]
        stacks = [name for name in own if ".experts." in name and len(unused[name]) == 3]
        if stacks:
            raise UnsupportedError(
                f"{entry.name}: mtp: {stacks[0]} holds all experts in one tensor",
                "leave mtp out: the layer stays as it is",
            )
        names += _linears(own, ahead.prefix, inside)
    for name in names:
        features = unused[f"{name}.weight"][1]
        if features % (weights.group_size or 1):
            raise UsageError(
                f"{entry.name}: mtp: {name} has {features} inputs, {scheme.name} groups of "
                f"{weights.group_size}",
                "give a group size that divides them, such as --mtp W4A16:rtn:32, or a scheme "
                "without groups",
            )
    if not names:
        raise UsageError(
            f"{entry.name}: mtp: {found[0].prefix} has no linear of the model's own layers",
            "leave mtp out: the layer stays as it is",
        )
    return MtpPlan(schemes=dict.fromkeys(names, scheme), algorithm=algorithm)


def refuse_mtp_ranks(name: str, mtp: MtpPlan | None, *, ranks: int) -> None:
    """Refuse several ranks for a model whose layers that predict further tokens are quantized.

    Raises:
        UsageError: there are several.
    """
    if mtp is not None and ranks > 1:
        raise UsageError(
            f"{name}: mtp {mtp.scheme.name} with --ranks {ranks}, which cuts the linears of the "
            "model's own layers alone",
            "quantize with one process, or leave mtp out",
        )


def _linears(names: Sequence[str], prefix: str, inside: Collection[str]) -> list[str]:
    """The linears of a layer that some layer of the model has under the same name."""
    linears = [name.removesuffix(".weight") for name in names if name.endswith(".weight")]
    return [name for name in linears if name.removeprefix(f"{prefix}.") in inside]
