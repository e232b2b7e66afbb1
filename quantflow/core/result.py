"""What an algorithm hands back for one linear: its quantized weight and what was decided on the way."""

from dataclasses import dataclass

from quantflow.core.qtensor import QTensor

JSON = None | bool | int | float | str | list["JSON"] | dict[str, "JSON"]


@dataclass(frozen=True, kw_only=True)
class GroupResult:
    """The result for one linear of a group.

    Attributes:
        weight: the quantized weight, [out_features, in_features].
        decisions: what the manifest records about it, plain JSON values; the same inputs give the
            same values.
    """

    weight: QTensor
    decisions: dict[str, JSON]
