"""Results of an algorithm for one linear: its quantized weight and the decisions behind it."""

from dataclasses import dataclass

from quantflow.core.qtensor import QTensor

JSON = None | bool | int | float | str | list["JSON"] | dict[str, "JSON"]


@dataclass(frozen=True, kw_only=True)
class GroupResult:
    """The result for one linear of a group.

    Attributes:
        weight: quantized weight, [out_features, in_features].
        decisions: entries of the manifest about it, plain JSON values; the same inputs give the
            same values.
    """

    weight: QTensor
    decisions: dict[str, JSON]
