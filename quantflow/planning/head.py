"""The quantized head of a model: which tensor is its weight, and which algorithm rounds it.

    <o>/head.safetensors    the quantized head, as the artifact holds it
    <o>/head.json           its record, like a layer's (quantflow/quantizing/file_to_file.py)

The head always goes from file to file in units of rows, also where the layers run. No statistics of
its input are collected, so neither its algorithm nor its scheme may need any. A head that is tied
to the embedding is quantized from the embedding's rows and becomes a tensor of its own beside it;
config.json then says that the two are not tied. In a rotated model the rotated head is quantized.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from quantflow.algorithms import ALGORITHMS, COMBINATIONS, NEAREST
from quantflow.core.scheme import LinearScheme, scheme_words
from quantflow.errors import InputError, UsageError, nearest
from quantflow.models.graph import Graph
from quantflow.planning.recipe import HeadSettings, MtpSettings, Quantize
from quantflow.planning.requirements import override_of

FILE, RECORD = "head.safetensors", "head.json"  # in a quantize folder
# name of the head's module in every family, and in checkpoints that were saved under that name
_MODULE = "lm_head"


@dataclass(frozen=True, kw_only=True)
class HeadPlan:
    """The quantization of the head.

    Attributes:
        linear: source name of the head.
        tensor: source tensor that is its weight; the embedding's where they are tied.
        scheme: scheme of the head.
        algorithm: key of ALGORITHMS that reads the weight alone.
    """

    linear: str
    tensor: str
    scheme: LinearScheme
    algorithm: str

    @property
    def tied(self) -> bool:
        """Whether the source has one tensor for the head and the embedding."""
        return self.tensor != f"{self.linear}.weight"

    def as_json(self) -> dict[str, Any]:
        """The plan as plain data, for state keys and manifests."""
        return {**asdict(self), "scheme": scheme_words(self.scheme)}


def head_of(
    entry: Quantize,
    graph: Graph,
    shapes: Mapping[str, Sequence[int]],
    *,
    ignored: Collection[str] = (),
) -> HeadPlan | None:
    """The quantization of the head; None where the entry leaves it as it is.

    Args:
        entry: entry of the recipe.
        graph: graph of the model.
        shapes: source tensor name -> shape.
        ignored: names that the entry's `ignore` matches.

    Raises:
        UsageError: the scheme or algorithm needs statistics, its groups do not divide the head's
            input, or `ignore` names the head.
        SchemeError: a group size stands beside a scheme without groups.
        InputError: the checkpoint has neither a head nor an embedding.
    """
    if entry.head is None:
        return None
    scheme = override_of(entry, entry.head)
    linear, tensor = names_of(graph, shapes)
    if linear in ignored:
        cause = f"{entry.name}: ignore names {linear}, head gives it {entry.head.scheme}"
        raise UsageError(cause, "take one of the two out")
    algorithm = algorithm_of_weights(entry.name, "head", entry.head, scheme, place="the head")
    features = shapes[tensor][1]
    if features % (scheme.weights.group_size or 1):
        raise UsageError(
            f"{entry.name}: head: {linear} has {features} inputs, {scheme.name} groups of "
            f"{scheme.weights.group_size}",
            "give a group size that divides them, such as --head W4A16:hqq:32, or a scheme "
            "without groups",
        )
    return HeadPlan(linear=linear, tensor=tensor, scheme=scheme, algorithm=algorithm)


def names_of(graph: Graph, shapes: Mapping[str, Sequence[int]]) -> tuple[str, str]:
    """Source name of the head, and of the tensor that is its weight.

    Raises:
        InputError: neither the head nor the embedding is a matrix of the checkpoint.
    """
    family = graph.family
    linear = next(
        (name for name in (family.head, _MODULE) if f"{name}.weight" in shapes), family.head
    )
    for tensor in (f"{linear}.weight", f"{family.embedding}.weight"):
        if len(shapes.get(tensor, ())) == 2:
            return linear, tensor
    raise InputError(
        f"{linear}.weight, {family.embedding}.weight: neither is a matrix of the checkpoint",
        "check that config.json belongs to these weights",
    )


def is_tied(graph: Graph, names: Collection[str]) -> bool:
    """Whether a checkpoint of these tensors has none for the head, which is its embedding then."""
    return not any(f"{name}.weight" in names for name in (graph.family.head, _MODULE))


def refuse_ranks(name: str, head: HeadPlan | None, *, ranks: int) -> None:
    """Refuse several ranks for a model whose head is quantized.

    Raises:
        UsageError: there are several.
    """
    if head is not None and ranks > 1:
        raise UsageError(
            f"{name}: head {head.scheme.name} with --ranks {ranks}, which cuts the linears of "
            "the layers alone",
            "quantize with one process, or leave the head as it is",
        )


def algorithm_of_weights(
    name: str, key: str, settings: HeadSettings | MtpSettings, scheme: LinearScheme, *, place: str
) -> str:
    """The algorithm that rounds linears of whose inputs nothing is measured.

    Args:
        name: name of the artifact.
        key: key of the recipe that names them.
        settings: content of that key.
        scheme: scheme of the linears.
        place: the linears in words.

    Raises:
        UsageError: it is unknown, it or the scheme needs statistics, or it does not go with float8.
    """
    names = [word for word, algorithm in ALGORITHMS.items() if algorithm.BY_ROW]
    algorithm = settings.algorithm or scheme.algorithm
    if algorithm not in (*ALGORITHMS, *COMBINATIONS):
        raise UsageError(
            f"{name}: {key}: algorithm {algorithm!r} is unknown", nearest(algorithm, names)
        )
    if algorithm not in names:
        raise UsageError(
            f"{name}: {key}: algorithm {algorithm} of scheme {settings.scheme} reads the "
            f"calibration text, of which nothing is collected for {place}",
            f"give one that reads weights alone ({', '.join(names)}): --{key} "
            f"{settings.scheme}:hqq, or {key}: {{algorithm: hqq}}",
        )
    if scheme.input is not None and scheme.input.measured:
        raise UsageError(
            f"{name}: {key}: scheme {settings.scheme} has a static input, whose range is not "
            f"measured for {place}",
            "choose one with a dynamic input or none, such as FP8_DYNAMIC, W8A8 or W8A16",
        )
    if algorithm != NEAREST and scheme.weights.kind != "int":
        raise UsageError(
            f"{name}: {key}: algorithm {algorithm} with scheme {settings.scheme}",
            f"use algorithm {NEAREST} for float8",
        )
    return algorithm
