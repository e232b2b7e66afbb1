"""The ranks that share one copy of the model: each one's place among them, and how they keep step.

Rank r of a world of dp x tp is card r % tp of replica r // tp. The cards of a replica run the same
sequences, layer by layer, and add up their parts of every row-sharded linear. So they begin at one
layer, and keep its input until all of them have that of the next. The sums are of tensors on the
cards' devices; everything else that they exchange is in host memory.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from quantflow.core.device import Device
from quantflow.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class Replica:
    """One rank's place.

    Attributes:
        index: number of its replica, hence its share of the sequences.
        count: number of replicas (dp).
        cards: number of ranks that share the model (tp).
        card: this rank's number among them.
        placements: source name -> the part of it that this rank holds; empty where the model is not
            cut.
        mesh: the cards of this replica; None where there is one.
        among_zeros: layers see all heads and features, of which those of other cards are zeros
            (`quantflow.distributed.transformers_split`); else the card's alone.
    """

    index: int
    count: int
    cards: int = 1
    card: int = 0
    placements: Mapping[str, Mapping[str, Any]]
    mesh: DeviceMesh | None = None
    among_zeros: bool = False

    def span(self, value: int) -> tuple[int, int]:
        """The least and the greatest of the cards' values."""
        if self.mesh is None:
            return value, value
        both = torch.tensor([value, -value])
        distributed.all_reduce(both, op=distributed.ReduceOp.MIN, group=self.mesh.get_group())
        return int(both[0]), -int(both[1])

    def all(self, holds: bool) -> bool:
        """Whether something holds on every card."""
        return self.span(int(holds))[0] == 1

    def wait(self) -> None:
        """Wait until every card has come here."""
        self.span(0)


def meshed(world: int, tp: int, *, device: Device) -> DeviceMesh | None:
    """The cards of this process's replica, whose devices are of one kind.

    Every process of the world has to call it.
    """
    if tp == 1:
        return None
    return init_device_mesh(device.kind.type, (world // tp, tp), mesh_dim_names=("dp", "tp"))["tp"]


def sizes(ranks: int, tp: int | None, dp: int | None, ep: int | None = None) -> tuple[int, int]:
    """The number of replicas and the number of ranks that share each, (dp, tp or ep).

    Args:
        ranks: number of ranks of the world.
        tp: ranks that share a model; None means 1, or the rest beside dp.
        dp: replicas; None means the rest beside tp.
        ep: ranks that share a mixture by its experts; None means 1.

    Raises:
        UsageError: the numbers disagree.
    """
    for name, value in (("ranks", ranks), ("tp", tp), ("dp", dp), ("ep", ep)):
        if value is not None and value < 1:
            raise UsageError(f"{name}={value}", "give 1 or more")
    if (ep or 1) > 1:
        if (tp or 1) > 1:
            raise UsageError(
                f"measure: tp={tp} with ep={ep}",
                "give one: with --ep every card has all that is no expert's",
            )
        if (dp or ranks // (ep or 1)) * (ep or 1) != ranks:
            raise UsageError(
                f"measure: {ranks} ranks, ep={ep} x dp={dp or ranks // (ep or 1)}",
                "give ranks = ep x dp",
            )
        tp = ep
    cards = tp or (ranks // dp if dp else 1)
    replicas = dp or ranks // cards
    if cards * replicas != ranks:
        raise UsageError(
            f"measure: {ranks} ranks, tp={tp or cards} x dp={dp or replicas}",
            "give ranks = tp x dp",
        )
    return replicas, cards
