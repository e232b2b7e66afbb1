"""The cut of a model over cards that quantize it together; sizes that do not fit are refused."""

from quantflow.distributed.sharding import placements
from quantflow.errors import UnsupportedError, UsageError
from quantflow.models.configuration import load_config
from quantflow.models.graph import Graph
from quantflow.models.open import ModelFiles
from quantflow.planning.card_splits import cut_columns
from quantflow.planning.plan import Plan
from quantflow.quantizing.shards.share import CardShare


def shares_of(source: ModelFiles, graph: Graph, plan: Plan, *, ranks: int) -> list[CardShare]:
    """The share of each rank; config.json and headers alone are read.

    Fewer kv heads than ranks go to several ranks each, as runtimes do. Where the model runs, a rank
    has some of the experts, whole; otherwise a part of each.

    Raises:
        UsageError: heads, rows, columns, groups or experts do not divide, scales span blocks of
            rows, or are searched.
        UnsupportedError: the family has no tensor-parallel plan, or one linear of queries, keys and
            values whose part for a card lies apart.
    """
    if ranks < 1:
        raise UsageError(f"ranks={ranks}", "give 1 or more")
    for scheme in filter(None, plan.schemes.values()):
        if scheme.weights.granularity == "per_block":
            cause = (
                f"{plan.name}: --ranks {ranks}: {scheme.name} has one scale for a block of rows, "
                "which a cut may split"
            )
            raise UsageError(cause, "choose scales per channel or group, or leave --ranks out")
        rule = scheme.weights.scale_rule
        if plan.file_to_file and rule is not None and rule.value == "OPT":
            cause = (
                f"{plan.name}: --ranks {ranks}: a scale_method that searches the whole, and each "
                "card has a part"
            )
            raise UsageError(
                cause, "use a method without search such as maxabs_hw, or leave --ranks out"
            )
    config = load_config(source.checkpoint)
    shapes = {name: info.shape for name, info in source.checkpoint.infos.items()}
    ep = ranks if graph.sparse and not plan.file_to_file else 1
    shares = []
    for rank in range(ranks):
        held = placements(config, shapes, tp=ranks, rank=rank, ep=ep)
        shares.append(
            CardShare(
                rank=rank, world=ranks, placements={name: held[name] for name in graph.linears}
            )
        )
    for name, placement in shares[0].placements.items():
        if "spans" in placement:
            raise UnsupportedError(
                f"{name}: the queries, keys and values of a card are rows that lie apart",
                "leave --ranks out; `measure --tp`, `generate` and `serve` share this model",
            )
        why = (
            cut_columns(placement["full_shape"][1], ranks, plan.schemes[name])
            if placement["axis"] == 1
            else None
        )
        if why is not None:
            raise UsageError(
                f"{name}: {why}", "use fewer ranks, or a group size that divides what a rank holds"
            )
    return shares
