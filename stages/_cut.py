"""How a model is cut over the cards that quantize it together, and the plans and sizes that cannot be cut."""

from collections.abc import Iterator

from quantflow.errors import UsageError
from quantflow.models.configuration import load_config
from quantflow.models.graph import Graph
from quantflow.models.sharding import placements
from quantflow.models.source import ModelFiles
from stages._plan import Plan
from stages._share import Share
from stages._tensor_parallel import cut_columns

_REMEDY = "use rtn without a measurement, or leave --ranks out: one process streams the model in bounded memory"


def shares_of(source: ModelFiles, graph: Graph, plan: Plan, *, ranks: int) -> list[Share]:
    """Return what each rank quantizes; reads config.json and headers alone.

    Key and value heads that are fewer than the ranks go to several of them, as runtimes do.

    Raises:
        UsageError: the plan needs more than a slice of each weight, or heads, rows, columns or groups do not divide.
        UnsupportedError: transformers has no tensor-parallel plan for the family.
    """
    if ranks < 1:
        raise UsageError(f"ranks={ranks}", "give 1 or more")
    for reason in _whole(plan):
        raise UsageError(f"{plan.name}: --ranks {ranks}: {reason}, a rank has a slice of each weight", _REMEDY)
    config = load_config(source.checkpoint)
    shapes = {name: info.shape for name, info in source.checkpoint.infos.items()}
    shares = []
    for rank in range(ranks):
        held = placements(config, shapes, tp=ranks, rank=rank, copy_kv_heads=True)
        shares.append(Share(rank=rank, world=ranks, placements={name: held[name] for name in graph.linears}))
    for name, placement in shares[0].placements.items():
        why = cut_columns(placement["full_shape"][1], ranks, plan.schemes[name]) if placement["axis"] == 1 else None
        if why is not None:
            raise UsageError(f"{name}: {why}", "use fewer ranks, or a group size that divides what a rank holds")
    return shares


def _whole(plan: Plan) -> Iterator[str]:
    """Yield why a plan needs more than a slice of each weight."""
    for scheme in filter(None, plan.schemes.values()):
        if scheme.weights.granularity == "per_block":
            yield f"{scheme.name} has one scale for a block of rows"
    if plan.file_to_file:
        return
    if plan.needs_hessian:
        yield f"{plan.algorithm} runs the calibration text through the model"
    for name, _ in plan.transforms:
        yield f"{name} changes a norm and all linears behind it together"
    if plan.needs:
        yield f"the scheme needs {', '.join(sorted(plan.needs))} of each linear's input"
    for scheme in filter(None, plan.schemes.values()):
        if scheme.weights.granularity == "per_tensor":
            yield f"{scheme.name} has one scale for a whole weight"
    yield "a measurement is given, and its first tokens run through the model"
