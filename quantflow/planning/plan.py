"""The plan of one artifact: every linear's scheme, from the recipe, graph and shard headers."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Any, TypeVar

from quantflow.algorithms import (
    ALGORITHMS,
    BLOCK_ALGORITHMS,
    LEARNING,
    REFIT,
    TUNE,
    refit,
    supports_of,
    tune,
)
from quantflow.core.block_types import BLOCK_TYPES, SMALLER
from quantflow.core.groups import COMMON_SIZES, group_size_for
from quantflow.core.scheme import (
    MIXTURES,
    LinearScheme,
    TensorScheme,
    preset,
    scheme_words,
    with_group_size,
)
from quantflow.errors import InputError, SchemeError, UnsupportedError, UsageError
from quantflow.formats import DEFAULT, FORMATS
from quantflow.formats.llama_cpp.mixtures import Position, type_of
from quantflow.models.graph import Graph, LinearGroup
from quantflow.models.matching import matching
from quantflow.observers import observers_for
from quantflow.observers.hessian import HESSIAN_SUM
from quantflow.observers.histogram import COUNTS
from quantflow.observers.rows import NAME as ROWS
from quantflow.planning import requirements
from quantflow.planning.compatibility import (
    KNOWN,
    check_algorithm,
    check_model,
    check_tuning,
    mixing_inputs,
)
from quantflow.planning.experts import Policy, fed_by, policy_for
from quantflow.planning.head import HeadPlan, head_of, refuse_ranks
from quantflow.planning.kv_cache import kv_cache_of
from quantflow.planning.mtp import MtpPlan, mtp_of, refuse_mtp_ranks
from quantflow.planning.recipe import ACTIVE, Compute, Quantize, SignRound, Tune
from quantflow.planning.requirements import (
    GRADIENT_SUM,
    algorithm_of,
    base_of,
    learned_of,
    needs_of,
    override_of,
    refit_of,
    transforms_of,
    tune_of,
)
from quantflow.planning.stock_transformers import in_one_size
from quantflow.transforms import ROTATIONS, TRANSFORMS, awq

# file of a quantize folder: tensors outside the layers that differ from the source's
OUTSIDE = "outside.safetensors"
SEQUENCES = 32  # calibration sequences that run where only rows are needed
APART = 4  # one sequence of so many gives rows, where the others give a static range
SAMPLE_ROWS = 1024  # rows of each input on which a search tries its candidates
# Rows and columns that a matrix has at least: a convolution has a few weights a channel, a mixer
# few inputs.
MATRIX = 16
LEFT_OUT = 0.01  # share of the layers' bytes that may stay as they are without a warning
Item = TypeVar("Item")


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One entry of the recipe, resolved.

    Attributes:
        name: name of the artifact.
        schemes: scheme of every linear of the decoder layers, in model order; None is not
            quantized.
        algorithm: key of ALGORITHMS.
        transforms: (name, options) in the order in which they run.
        needs: statistics of a linear's input that the methods read.
        file_to_file: whether weights go from file to file and the model never runs. One process
            does so where rows are quantized by themselves and no measurement is given; several
            ranks do where weights are rounded to nearest.
        experts: policy for undercalibrated experts; None where no expert is quantized by
            statistics.
        head: quantization of the head; None leaves it as it is.
        mtp: quantization of the layers that predict further tokens; None leaves them as they are.
        kv_cache: scheme of keys and values; None leaves them as they are.
        learned: settings of learned rounding, which starts from the algorithm's result; None
            without.
        tune: settings for tuning the scales of all layers together at the end; None leaves them.
        refit: whether weights are fitted to the inputs of the quantized model before they are
            quantized.
    """

    name: str
    schemes: Mapping[str, LinearScheme | None]
    algorithm: str
    transforms: tuple[tuple[str, Mapping[str, Any]], ...]
    needs: frozenset[str]
    file_to_file: bool = False
    experts: Policy | None = None
    head: HeadPlan | None = None
    mtp: MtpPlan | None = None
    kv_cache: TensorScheme | None = None
    learned: SignRound | None = None
    tune: Tune | None = None
    refit: bool = False

    @property
    def method(self) -> str:
        """The algorithm as recipes name it."""
        return self.algorithm if self.learned is None else LEARNING

    @property
    def versions(self) -> dict[str, int]:
        """Versions of the methods that compute the result."""
        by_name = {name: KNOWN[name].VERSION for name, _ in self.transforms}
        by_name[self.algorithm] = ALGORITHMS[self.algorithm].VERSION
        by_name |= {} if self.learned is None else {LEARNING: BLOCK_ALGORITHMS[LEARNING].VERSION}
        by_name |= {} if self.tune is None else {TUNE: tune.VERSION}
        by_name |= {REFIT: refit.VERSION} if self.refit else {}
        apart = {"head": self.head, "mtp": self.mtp}
        return by_name | {
            key: ALGORITHMS[part.algorithm].VERSION
            for key, part in apart.items()
            if part is not None
        }

    @property
    def quantized(self) -> dict[str, LinearScheme]:
        """Every linear that is quantized; the head comes behind the layers', MTP layers last."""
        found = {name: scheme for name, scheme in self.schemes.items() if scheme is not None}
        head = {} if self.head is None else {self.head.linear: self.head.scheme}
        return {**found, **head, **({} if self.mtp is None else self.mtp.schemes)}

    @property
    def needs_hessian(self) -> bool:
        """Whether the Hessian of the inputs is collected from all of the calibration text."""
        return HESSIAN_SUM.name in self.needs

    @property
    def searches_hessian(self) -> bool:
        """Whether a transform's search reads the Hessian of the original's inputs."""
        return any(
            HESSIAN_SUM.name in TRANSFORMS[name].needs(options) for name, options in self.smoothings
        )

    @property
    def needs_gradients(self) -> bool:
        """Whether the algorithm reads the measured gradients by each output."""
        return GRADIENT_SUM in self.needs

    @property
    def needs_rows(self) -> bool:
        """Whether a transform tries its candidates on inputs from the calibration text."""
        return ROWS in self.needs

    @property
    def needs_text(self) -> bool:
        """Whether calibration text runs through the model again, layer by layer."""
        return self.needs_hessian or self.needs_rows or bool(self.observed) or self.learns

    def collects(self, *, experts: bool) -> bool:
        """Whether a layer's statistics are collected while the original's text runs through it.

        A dense layer that is refitted needs none but those of its searches.
        """
        if not self.refit:
            return self.needs_text
        return experts or self.searches_hessian or self.needs_rows or bool(self.observed)

    @property
    def learns(self) -> bool:
        """Whether learned rounding or tuning follows gradients on all of the calibration text."""
        return self.learned is not None or self.tune is not None

    @property
    def twice(self) -> bool:
        """Whether the text also runs through the quantized layers while they are quantized."""
        return self.learned is not None or self.refit

    def rounds_by_refit(self, group: LinearGroup) -> bool:
        """Whether a group is rounded by the Hessian of the inputs that it is refitted to.

        Those of experts are rounded by that of the original's, which the policy for few tokens
        treats.
        """
        return self.refit and group.expert is None

    @property
    def rotation(self) -> tuple[str, Mapping[str, Any]] | None:
        """The transform of the whole model that comes before all others, or None."""
        return next((item for item in self.transforms if item[0] in ROTATIONS), None)

    @property
    def in_float32(self) -> bool:
        """Whether some layer's weights are in float32 while it is quantized.

        Transforms change them. A layer with a linear that stays as it is runs as it does in the
        artifact, which is in float32.
        """
        return bool(self.transforms) or None in self.schemes.values()

    @property
    def smoothings(self) -> tuple[tuple[str, Mapping[str, Any]], ...]:
        """The transforms that change each layer by itself."""
        return tuple(item for item in self.transforms if item[0] in TRANSFORMS)

    @property
    def observed(self) -> tuple[str, ...]:
        """Observers of inputs that quantize runs: those it sees anyway, and rotated ones.

        Rotated inputs are in no measurement. Gradients are: those by rotated outputs follow from
        the measured ones.
        """
        wanted = requirements.seen_in_quantize(self.needs) if self.rotation is None else self.needs
        return observers_for(wanted - {ROWS, HESSIAN_SUM.name, GRADIENT_SUM})

    @property
    def fed(self) -> str:
        """Tokens that an expert sees while the text runs through quantize: `routed`, or `all`."""
        return fed_by(self.experts, ranges=self.rotation is not None)

    @property
    def clips(self) -> bool:
        """Whether a transform cuts the ranges of weights before the algorithm quantizes."""
        return _clips(self.transforms, self.algorithm)

    @property
    def rows_apart(self) -> int:
        """Number of sequences of which one gives rows.

        It is 1, or more where a static range is tried on the rows: the other sequences give that
        range.
        """
        inputs = [scheme.input for scheme in self.schemes.values() if scheme is not None]
        return (
            APART
            if self.needs_rows and any(scheme is not None and scheme.measured for scheme in inputs)
            else 1
        )

    def text(self, sequences: Sequence[Item]) -> Sequence[Item]:
        """The part of the calibration text that runs through the model.

        It is all of it, sequences at equal distances, or nothing.
        """
        if self.needs_hessian or self.observed or self.rows_apart > 1 or self.learns:
            return sequences
        if not self.needs_rows or not sequences:
            return ()
        count = min(SEQUENCES, len(sequences))
        return [sequences[index * len(sequences) // count] for index in range(count)]

    @property
    def needs_measurement(self) -> bool:
        """Whether a measurement has to be given."""
        return bool(self.needs) or self.kv_cache is not None or self.learns

    def as_json(self) -> dict[str, Any]:
        """The plan as plain data, for state keys and manifests."""
        schemes = {
            name: None if scheme is None else scheme_words(scheme)
            for name, scheme in self.schemes.items()
        }
        transforms = [{name: dict(options)} for name, options in self.transforms]
        head = {} if self.head is None else {"head": self.head.as_json()}
        parts = (("learned", self.learned), (TUNE, self.tune))
        more = {key: asdict(part) for key, part in parts if part is not None}
        more |= {} if self.kv_cache is None else {"kv_cache": scheme_words(self.kv_cache)}
        more |= {} if self.mtp is None else {"mtp": self.mtp.as_json()}
        return {
            "schemes": schemes,
            "algorithm": self.method,
            "transforms": transforms,
            **({REFIT: True} if self.refit else {}),
            **head,
            **more,
        }


def float32_only(entry: Quantize, plan: Plan) -> str | None:
    """The reason why a plan's layers run in float32, whatever the dtype; None without one."""
    if not plan.needs_text:
        return "no text passes through them"
    if plan.learns:
        return "rounding is learned in float32"
    if plan.refit:
        return "weights are refitted in float32"
    if entry.quantized_inputs:
        return "the text passes through the quantized layers"
    return None


def text_dtype(compute: Compute, entry: Quantize, plan: Plan) -> str:
    """The dtype in which the calibration text runs through the layers."""
    return "float32" if float32_only(entry, plan) else compute.text_dtype


def resolve(
    entry: Quantize,
    graph: Graph,
    shapes: Mapping[str, Sequence[int]],
    *,
    unused: Mapping[str, Sequence[int]] = MappingProxyType({}),
    measured: bool = True,
    ranks: int = 1,
) -> Plan:
    """The plan for one entry of the recipe.

    Args:
        entry: entry of the recipe.
        graph: linears of the model.
        shapes: source tensor name -> shape, from the shard headers.
        unused: the same of the tensors that no module of the model has.
        measured: whether a measurement will be given; with one, the artifact of one process is
            proven by running its first tokens.
        ranks: number of ranks that share the model.

    Raises:
        UsageError: a pattern matches nothing, an algorithm or transform is unknown or does not fit,
            a group size does not divide a linear's input, nothing is left to quantize, or several
            ranks are to quantize the head.
        InputError: the checkpoint lacks a linear of the family.
        UnsupportedError: ranges of the inputs of experts are to be cut, or no file holds a scheme;
            see also `kv_cache_of`.
    """
    if entry.bits_of == ACTIVE and not graph.sparse:
        raise UsageError(
            f"{entry.name}: bits_of={entry.bits_of} of a {graph.family.model_type}, which has no "
            "experts",
            "leave bits_of out: a token reads every weight",
        )
    base, algorithm, learned = base_of(entry), algorithm_of(entry), learned_of(entry)
    schemes = _schemes(entry, graph, shapes, base=base)
    used = [scheme for scheme in schemes.values() if scheme is not None]
    methods = [algorithm] if learned is None else [algorithm, LEARNING]
    for method in methods:
        for scheme in dict.fromkeys(used):
            check_algorithm(entry.name, method, scheme)
        check_model(entry.name, method, supports_of(method), graph=graph, ranks=ranks)
    layout = FORMATS[DEFAULT]
    kinds = {str(number): scheme for number, scheme in enumerate(dict.fromkeys(used))}
    # called for its refusals alone: a scheme that no file could hold ends here
    layout.quantization_config(kinds, ignore=(), model_type=graph.family.model_type)
    transforms = transforms_of(entry)
    tuning = tune_of(entry)
    schemes = mixing_inputs(
        entry.name, schemes, graph, shapes, transforms=transforms, algorithm=methods[-1]
    )
    for scheme in dict.fromkeys(used) if tuning is not None else ():
        check_tuning(entry.name, scheme, transforms=transforms)
    if tuning is not None:
        check_model(entry.name, TUNE, supports_of(TUNE), graph=graph, ranks=ranks)
    refits = refit_of(entry)
    if refits:
        check_model(entry.name, REFIT, supports_of(REFIT), graph=graph, ranks=ranks)
    for name, _ in transforms:
        check_model(entry.name, name, KNOWN[name].SUPPORTS, graph=graph, ranks=ranks)
    head = head_of(entry, graph, shapes, ignored=_ignored(entry, shapes))
    refuse_ranks(entry.name, head, ranks=ranks)
    rotates = any(name in ROTATIONS for name, _ in transforms)
    mtp = mtp_of(entry, graph, unused, rotates=rotates)
    refuse_mtp_ranks(entry.name, mtp, ranks=ranks)
    needs = needs_of(entry, used)
    if COUNTS.name in needs and graph.sparse:
        raise UnsupportedError(
            f"{entry.name}: input_observer={entry.input_observer!r} of a "
            f"{graph.family.model_type}; experts share ranges, not histograms",
            "leave input_observer out",
        )
    alone = ALGORITHMS[algorithm].BY_ROW and not transforms and learned is None and tuning is None
    by_row = all(
        scheme.weights.granularity in ("per_channel", "per_group", "per_block")
        and scheme.weights.scale_format != "e4m3"
        for scheme in used
    )
    if entry.linears and not (alone and by_row and not (measured or needs)):
        raise UsageError(
            f"{entry.name}: linears are named, and {methods[-1]} with {entry.scheme} runs the "
            "model",
            "round weights alone: --algorithm rtn with W8A16, W4A16 or FP8_DYNAMIC, no transform "
            "and no measurement",
        )
    if ranks > 1 and any(scheme.weights.scale_format == "e4m3" for scheme in used):
        raise UnsupportedError(
            f"{entry.name}: scheme {entry.scheme} with --ranks {ranks}; its cards would each "
            "choose a global_scale",
            "quantize in one process, or choose MXFP4, whose scales are of their groups alone",
        )
    kv_cache = kv_cache_of(entry, graph, transforms, ranks=ranks)
    to_nearest = ALGORITHMS[algorithm].TO_NEAREST  # cards round slices of rows and of columns by it
    return Plan(
        name=entry.name,
        schemes=schemes,
        algorithm=algorithm,
        transforms=transforms,
        needs=needs,
        file_to_file=alone
        and (by_row and not (measured or needs or kv_cache) if ranks == 1 else to_nearest),
        kv_cache=kv_cache,
        experts=_experts(
            entry,
            graph,
            schemes,
            weights=bool(ALGORITHMS[algorithm].NEEDS)
            or _clips(transforms, algorithm)
            or learned is not None,
        ),
        head=head,
        mtp=mtp,
        learned=learned,
        tune=tuning,
        refit=refits,
    )


def _schemes(
    entry: Quantize, graph: Graph, shapes: Mapping[str, Sequence[int]], *, base: LinearScheme
) -> dict[str, LinearScheme | None]:
    """Scheme of every linear: None where `ignore` names it, `base` where one will be chosen."""
    ignored = _ignored(entry, shapes)
    schemes: dict[str, LinearScheme | None] = {
        name: None if name in ignored else base for name in graph.linears
    }
    adapts = set(schemes) if entry.group_size is None else set()
    named = overridden(entry, graph)  # a name of both a type and a mixture means the type there
    for override in entry.overrides:
        for name in matching(override.match, list(graph.linears), f"{entry.name}: overrides"):
            schemes[name] = None if name in ignored else override_of(entry, override)
            adapts = adapts - {name} if override.group_size is not None else adapts | {name}
    of_mixtures = {
        name: scheme
        for name, scheme in schemes.items()
        if scheme is not None
        and scheme.name in MIXTURES
        and not (name in named and scheme.name in BLOCK_TYPES)
    }
    schemes |= _of_mixtures(of_mixtures, graph, weighed=_weighed(entry))
    for name in adapts:
        scheme = schemes[name]
        features = _features(shapes, name)
        schemes[name] = (
            None if scheme is None or _too_narrow(scheme, features) else _fitting(scheme, features)
        )
    used = {name: scheme for name, scheme in schemes.items() if scheme is not None}
    if not entry.mixed and used.keys() <= adapts:
        schemes |= in_one_size(used, graph)
    # where schemes are chosen, only overridden linears must fit now: the choice fits the others
    overridden_names = overridden(entry, graph) if entry.mixed else frozenset(schemes)
    for name, scheme in schemes.items():
        if scheme is not None:
            features = _features(shapes, name)
            if name in overridden_names:
                try:
                    group_size_for(scheme.weights, features, name=name)
                except SchemeError as error:
                    raise SchemeError(f"{entry.name}: {error.cause}", error.remedy) from error
    if not any(schemes.values()):
        raise UsageError(
            f"{entry.name}: ignore leaves none of {len(schemes)} linears to quantize",
            "ignore fewer",
        )
    return schemes


def _of_mixtures(
    mixtures: Mapping[str, LinearScheme], graph: Graph, *, weighed: bool
) -> dict[str, LinearScheme]:
    """The scheme of every linear that was given a mixture of types, by its role in a layer."""
    by_linear: dict[str, LinearScheme] = {}
    experts = max(layer.experts for layer in graph.layers)
    for number, layer in enumerate(graph.layers):
        position = Position(
            layer=number,
            layers=len(graph.layers),
            repeats=layer.repeats,
            experts=experts,
            weighed=weighed,
        )
        for name in mixtures.keys() & set(layer.linears):
            family = graph.family.model_type
            kind = type_of(
                mixtures[name].name, layer.inside(name), family=family, position=position
            )
            by_linear[name] = preset(kind)
    return by_linear


def _weighed(entry: Quantize) -> bool:
    """Whether rounding knows how much each input matters."""
    return entry.imatrix is not None or bool(ALGORITHMS[algorithm_of(entry)].NEEDS)


def _fitting(scheme: LinearScheme, features: int) -> LinearScheme:
    """A preset with the largest common group size that divides a linear's inputs.

    It is the scheme itself where its own size divides them, or where no common size does. For a
    type of blocks that do not fit it is the type with smaller blocks. The linears of a group share
    their inputs, and so the size.
    """
    size, kind = scheme.weights.group_size, scheme.weights.block
    if kind is not None:
        return (
            preset(SMALLER[kind.name])
            if features % kind.elements and kind.name in SMALLER
            else scheme
        )
    if (
        size is None
        or scheme.weights.granularity != "per_group"
        or scheme.weights.scale_format != "float"
    ):
        return scheme
    if features % size == 0:
        return scheme
    return next(
        (
            with_group_size(scheme, less)
            for less in COMMON_SIZES
            if less < size and features % less == 0
        ),
        scheme,
    )


def _too_narrow(scheme: LinearScheme, features: int) -> bool:
    """Whether a preset leaves a linear: fewer inputs than a matrix has, and no whole groups."""
    size = scheme.weights.group_size
    return size is not None and features < MATRIX and features % size != 0


def kept_for_few_inputs(
    plan: Plan, entry: Quantize, shapes: Mapping[str, Sequence[int]]
) -> str | None:
    """A sentence about the linears that stay as they are for too few inputs, or None.

    Args:
        plan: resolved plan.
        entry: entry of the recipe.
        shapes: tensor of the checkpoint -> its shape.
    """
    ignored = _ignored(entry, shapes)
    kept = [name for name, scheme in plan.schemes.items() if scheme is None and name not in ignored]
    if not kept:
        return None
    more = f" and {len(kept) - 1} more stay" if kept[1:] else " stays"
    return (
        f"{plan.name}: {kept[0]}{more} as in the source: fewer than {MATRIX} inputs, no whole group"
    )


def narrowed(plan: Plan, entry: Quantize, shapes: Mapping[str, Sequence[int]]) -> str | None:
    """A sentence about linears with smaller groups or blocks than the scheme's, or None.

    Args:
        plan: resolved plan.
        entry: entry of the recipe.
        shapes: tensor of the checkpoint -> its shape.
    """
    size = base_of(entry).weights.group_size
    used = [scheme for scheme in plan.schemes.values() if scheme is not None]
    smaller = sum(scheme.weights.block_type in SMALLER.values() for scheme in used)
    if smaller and base_of(entry).weights.block_type in SMALLER and not entry.overrides:
        return (
            f"{plan.name}: a type of blocks of 32 in {smaller} linears, whose inputs 256 does "
            "not divide"
        )
    sizes = [scheme.weights.group_size for scheme in used]
    counts = {
        less: sizes.count(less)
        for less in COMMON_SIZES
        if size is not None and less < size and less in sizes
    }
    if not counts or entry.overrides or entry.mixed:
        return None
    listed = ", ".join(f"of {less} in {count} linears" for less, count in counts.items())
    if size is not None and any(
        scheme is not None and scheme.weights.group_size in counts
        for name, scheme in plan.schemes.items()
        if _features(shapes, name) % size == 0
    ):
        return (
            f"{plan.name}: groups {listed}: {size} does not divide the inputs of all, and stock "
            "transformers loads one size for this type"
        )
    return f"{plan.name}: groups {listed}, whose inputs {size} does not divide"


def left_out(
    name: str, graph: Graph, shapes: Mapping[str, Sequence[int]], nbytes: Mapping[str, int]
) -> str | None:
    """A warning of matrices in decoder layers that no linear of the graph reads; None without any.

    Stacked experts are such matrices. Convolutions along the sequence, with a few weights a
    channel, are no matrices.

    Args:
        name: name of the artifact.
        graph: graph of the model; its linears, routers and idle linears are read.
        shapes: tensor of the checkpoint -> its shape.
        nbytes: tensor of the checkpoint -> its bytes.
    """
    read_tensors = {f"{linear}.weight" for linear in (*graph.linears, *graph.routers, *graph.idle)}
    prefixes = tuple(f"{layer.prefix}." for layer in graph.layers)
    inside = [tensor for tensor in shapes if tensor.startswith(prefixes)]
    matrices = [
        tensor
        for tensor in inside
        if len(shapes[tensor]) > 1 and sorted(shapes[tensor])[-2] >= MATRIX
    ]
    left = [tensor for tensor in matrices if tensor not in read_tensors]
    size, whole = (sum(nbytes[tensor] for tensor in some) for some in (left, inside))
    if not left or size < LEFT_OUT * whole:
        return None
    more = f" and {len(left) - 1} more" if left[1:] else ""
    return (
        f"{name}: warning: {left[0]} {list(shapes[left[0]])}{more} are not quantized: {size:,} "
        f"of the layers' {whole:,} bytes; no linear reads them, their family multiplies by them "
        "in its own way"
    )


def _ignored(entry: Quantize, shapes: Mapping[str, Sequence[int]]) -> frozenset[str]:
    """Modules that `ignore` names, linears of the layers or not."""
    modules = [name.removesuffix(".weight") for name in shapes if name.endswith(".weight")]
    return frozenset(
        name
        for pattern in entry.ignore
        for name in matching(pattern, modules, f"{entry.name}: ignore")
    )


def _features(shapes: Mapping[str, Sequence[int]], name: str) -> int:
    """Number of inputs of a linear."""
    shape = shapes.get(f"{name}.weight")
    if shape is None:
        raise InputError(
            f"{name}.weight: not in the checkpoint",
            "check that config.json belongs to these weights",
        )
    return shape[1]


def _experts(
    entry: Quantize, graph: Graph, schemes: Mapping[str, LinearScheme | None], *, weights: bool
) -> Policy | None:
    """Policy for undercalibrated experts; None where none is quantized by statistics.

    Args:
        entry: entry of the recipe.
        graph: graph of the model.
        schemes: scheme of each linear.
        weights: whether the algorithm, or a transform that cuts ranges for it, reads statistics.
    """
    names = [
        name
        for layer in graph.layers
        for group in layer.groups
        if group.expert
        for name in group.linears
    ]
    used = [scheme for scheme in map(schemes.get, names) if scheme is not None]
    static = any(scheme.input is not None and scheme.input.measured for scheme in used)
    reads = bool(used) and weights
    return policy_for(
        entry.name, policy=entry.experts, tokens=entry.expert_tokens, weights=reads, inputs=static
    )


def _clips(transforms: Sequence[tuple[str, Mapping[str, Any]]], algorithm: str) -> bool:
    whole_range = ALGORITHMS[algorithm].TO_NEAREST
    return any(
        name == awq.NAME and awq.clips(options, whole_range=whole_range)
        for name, options in transforms
    )


def overridden(entry: Quantize, graph: Graph) -> frozenset[str]:
    """Linears that an override names.

    Raises:
        UsageError: a pattern matches nothing.
    """
    linears = list(graph.linears)
    return frozenset(
        n
        for each in entry.overrides
        for n in matching(each.match, linears, f"{entry.name}: overrides")
    )
