"""The cost model: memory and disk of each stage, from shapes and the recipe alone.

There is one function per stage. It describes the largest of the stage's processes: export's proof
runs in a process of its own, and each rank of measure is one. What Python and its libraries take is
not in it; `MemoryNeed.peak` adds that.

Below the stages are the parts of a model while they run. What belongs to a method comes from the
method: algorithms and transforms say what their mathematics takes (`working_bytes`), observers what
their states and updates take.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter

import torch

from quantflow.algorithms import ALGORITHMS, BLOCK_ALGORITHMS, refit, tune
from quantflow.core import groups
from quantflow.models.stand_ins import HEAD_ROWS, LINEAR_ROWS, LINEAR_TOKENS, logit_rows
from quantflow.numerics import output_blocks
from quantflow.numerics.fixed_tree import PARTS
from quantflow.numerics.sensitivity import ROWS as SAMPLED_ROWS
from quantflow.observers import (
    goes_back,
    holds_matrix,
    observer_named,
    of_gradients,
    state_bytes,
    summed_in_parts,
)
from quantflow.observers.amax import AmaxObserver
from quantflow.observers.hessian import (
    DEVICE_ROWS,
    HESSIAN_SUM,
    ROWS,
    folding_bytes,
    observer_bytes,
)
from quantflow.planning.experts import SIDE_BY_SIDE
from quantflow.planning.head import HeadPlan
from quantflow.planning.plan import SAMPLE_ROWS, Plan
from quantflow.planning.sizes import (
    FLOAT,
    ONE_FILE,
    Group,
    LayerSize,
    ModelSize,
    elements_of,
    head_file_bytes,
    layer_bytes,
    mtp_file_bytes,
    outside_bytes,
    quantized_bytes,
)
from quantflow.transforms import TRANSFORMS

FILES_BASE = 240_000_000  # a process with Python, torch and quantflow: 237 to 239 MB
# A stage that runs the model also imports transformers' model code: 354 to 362 MB.
MODEL_BASE = 360_000_000
# Code and buffers that torch and transformers load when the first layer runs: 20 to 28 MB.
LIBRARIES = 30_000_000
WRITTEN_AT_ONCE = 32  # sequences of a batch that the model writes; it decides what they are
BEGUN = 16  # tokens of each that it is given, likewise
CANARY_TOKENS = 64
BUFFERS = 24 << 20  # through which files are copied, compared and decoded
WAITING = 3  # units per worker, file to file, that are under way or wait to be written
# Units of file to file beyond the workers' own, since a unit waits for the disk before it computes.
READERS = 2
# Weights of a unit: few enough for the float32 copies to stay in a core's cache, and enough for
# Python's share of the time to be small.
UNIT = 1 << 20
UNIT_FILES = 4  # bytes per weight of a unit: as stored and as written

MemoryPeak = tuple[int, int]  # bytes whatever is chosen, bytes per worker


@dataclass(frozen=True, kw_only=True)
class MemoryNeed:
    """Memory and disk that a stage takes, in bytes.

    Attributes:
        stage: name of the stage.
        peaks: pairs of (memory beside the process itself, memory per unit that runs at once), one
            for each step of the stage.
        result: bytes of files that stay.
        scratch: bytes of files that the stage removes at its end.
        base: bytes of the process itself, once it has imported what the stage uses.
    """

    stage: str
    peaks: tuple[MemoryPeak, ...]
    result: int = 0
    scratch: int = 0
    base: int = MODEL_BASE

    def peak(self, *, base: int, workers: int) -> int:
        """Memory of the process with so many workers."""
        return base + max(fixed + workers * each for fixed, each in self.peaks)


def need_measure(
    model: ModelSize, *, lengths: Sequence[int], stats: Sequence[str], counts: bool = True
) -> MemoryNeed:
    """Memory and disk of measure: a layer in float32, a sequence's forward per worker, statistics.

    Without statistics no layer runs, unless there are experts whose tokens are counted. Hidden
    states are on disk, and so are each layer's statistics until all are there. Then all are in
    memory together, except for matrices, which are read one at a time. Where gradients are measured
    too, the input of each layer waits on disk for the backward pass. There, a sequence's sums of
    products of gradients stand beside the sums of all sequences before it.

    Args:
        model: sizes of the model.
        lengths: tokens of each sequence.
        stats: observers of every linear's input.
        counts: whether the tokens of experts are counted (`counts_in_measure`).
    """
    ids = 8 * sum(lengths)
    if not stats and not (model.sparse and counts):
        return MemoryNeed(stage="measure", peaks=((2 * ids, 0),), result=ids)
    statistics = sum(statistics_bytes(layer, stats) for layer in model.layers)
    longest = max(lengths, default=0)
    hidden = hidden_bytes(model, lengths)
    forwards = [name for name in stats if not of_gradients(name)]
    backwards = [name for name in stats if of_gradients(name)]
    small = sum(
        statistics_bytes(layer, [name for name in stats if not holds_matrix(name)])
        for layer in model.layers
    )
    matrix = max(matrix_bytes(layer, stats) for layer in model.layers)
    largest = max(statistics_bytes(layer, forwards) for layer in model.layers)
    growing = max(live_bytes(layer, forwards) for layer in model.layers)
    worker = forward_bytes(model, longest) + watching_bytes(model, forwards, longest) + growing
    samples = len(lengths)
    parts = max(further_parts_bytes(layer, forwards, samples=samples) for layer in model.layers)
    peaks: tuple[MemoryPeak, ...] = (
        (LIBRARIES + embedding_bytes(model, lengths), 0),
        (LIBRARIES + layer_in_memory(model.layer) + growing + parts, worker),
        (LIBRARIES + layer_in_memory(model.layer) + largest, 0),
        (LIBRARIES + 2 * (small + matrix), 0),
    )
    # Two generations of hidden states while layers run; at the end one, and the statistics.
    scratch = hidden + max(hidden, statistics)
    if goes_back(stats):
        scratch = (len(model.layers) + 1 + 2) * hidden + statistics
        sums = max(statistics_bytes(layer, backwards) for layer in model.layers)
        back = backward_bytes(model, longest) + watching_bytes(model, backwards, longest)
        parts = max(
            further_parts_bytes(layer, backwards, samples=samples) for layer in model.layers
        )
        peaks = (
            *peaks,
            (LIBRARIES + head_in_memory(model, None), way_back_bytes(model, longest, copies=3)),
            (LIBRARIES + layer_in_memory(model.layer) + sums + parts, back + sums),
        )
    return MemoryNeed(stage="measure", peaks=peaks, result=ids + statistics, scratch=scratch)


def need_synthetic(
    model: ModelSize, *, length: int, dtype: torch.dtype, sequences: int = 0
) -> MemoryNeed:
    """Memory and disk of calibration text that the model writes: the model and its cache.

    A tied head is laid out a second time.

    Args:
        model: sizes of the model.
        length: tokens of the longest sequence.
        dtype: dtype of the weights and the cache.
        sequences: sequences of the file, those of the given text among them.
    """
    tokens = WRITTEN_AT_ONCE * length
    cache = 2 * tokens * len(model.layers) * model.kv_heads * model.head_dim * dtype.itemsize
    weights = sum(map(elements_of, model.infos.values())) + model.tied * model.head[0]
    running = max(
        forward_bytes(model, WRITTEN_AT_ONCE * BEGUN),
        4 * FLOAT * WRITTEN_AT_ONCE * model.vocabulary,
    )
    return MemoryNeed(
        stage="measure",
        peaks=((LIBRARIES + weights * dtype.itemsize + cache + running, 0),),
        result=8 * sequences * length,
    )


def need_choice(model: ModelSize) -> MemoryNeed:
    """Memory of the choice of schemes.

    A worker holds rows of the widest weight as stored, in float32, rounded, and their error; and an
    eighth as many rows again, for types with a codebook.
    """
    widest = max(k for layer in model.layers for _, _, k in layer.groups)
    return MemoryNeed(
        stage="choose",
        base=FILES_BASE,
        peaks=((0, 5 * FLOAT * SAMPLED_ROWS * widest * 9 // 8 + groups.unit_bytes(widest)),),
    )


def need_layers(model: ModelSize, plan: Plan, *, lengths: Sequence[int]) -> MemoryNeed:
    """Memory and disk of quantize layer by layer.

    The calibration text runs through the layer while the Hessians grow, half of each. Transforms
    compare their candidates. Each group is then quantized with its whole Hessian, beside the halves
    of the groups after it. At last the quantized layer runs again, beside the content of its file.
    """
    longest = max(lengths, default=CANARY_TOKENS)
    hidden = hidden_bytes(model, lengths) * (2 if plan.twice else 1)
    encoded = layer_bytes(model, plan.schemes, kv_cache=plan.kv_cache)
    halves = sum(half_hessians(model, plan))
    kept = FLOAT * SAMPLE_ROWS * sum(k for _, _, k in folds(model.layer)) if plan.needs_rows else 0
    forward = forward_bytes(model, longest)
    inputs = inputs_bytes(model, plan, longest) if plan.needs_text else 0
    widest = max(k for _, _, k in model.layer.groups)
    # one more sequence, which the Hessians add at the moment
    folding = inputs + (folding_bytes(widest, longest) if plan.needs_hessian else 0)
    layer = layer_in_memory(model.layer) if plan.in_float32 else layer_as_stored(model)
    parts = 0 if plan.in_float32 else parts_bytes(model, longest)
    peaks = (
        (LIBRARIES + embedding_bytes(model, lengths), 0),
        (LIBRARIES + layer + halves + kept + folding, forward + inputs + parts),
        *(
            (LIBRARIES + layer + halves + 2 * kept + fixed, each)
            for fixed, each in _searching(model, plan)
        ),
        *((LIBRARIES + fixed, each) for fixed, each in _quantizing(model, plan)),
        *((LIBRARIES + fixed, each) for fixed, each in refitting_moments(model, plan, longest)),
        *((LIBRARIES + fixed, each) for fixed, each in learning_moments(model, plan, longest)),
        *((LIBRARIES + fixed, each) for fixed, each in tuning_moments(model, plan, longest)),
        (LIBRARIES + max(encoded) + installing_bytes(model, plan), 0),
        (LIBRARIES + max(encoded) + installed_bytes(model), forward),
        (LIBRARIES + head_bytes(model, CANARY_TOKENS, plan.head), 0),
        *(_rounding(part.algorithm) for part in (plan.head, plan.mtp) if part is not None),
    )
    turned = 0
    if plan.rotation is not None:  # the head, as stored and rotated, on its way to a file
        peaks = (*peaks, (LIBRARIES + 2 * model.head[1], 0))
        turned = model.outside + (model.head[1] if model.tied else 0)
    result = (
        sum(encoded) + head_file_bytes(model, plan.head) + mtp_file_bytes(model, plan.mtp) + turned
    )
    scratch = 2 * hidden + tuning_disk(model, plan, lengths, layers=sum(encoded))
    return MemoryNeed(stage="quantize", peaks=peaks, result=result, scratch=scratch)


def need_files(model: ModelSize, plan: Plan) -> MemoryNeed:
    """Memory and disk of quantize from file to file.

    A worker holds the unit that it rounds, and units that wait to be written.
    """
    apart = [part.algorithm for part in (plan.head, plan.mtp) if part is not None]
    algorithms = [plan.algorithm, *apart]
    result = sum(layer_bytes(model, plan.schemes, kv_cache=plan.kv_cache))
    result += head_file_bytes(model, plan.head) + mtp_file_bytes(model, plan.mtp)
    return MemoryNeed(
        stage="quantize", base=FILES_BASE, peaks=tuple(map(_rounding, algorithms)), result=result
    )


def need_export(model: ModelSize, plan: Plan, *, shard_size: int) -> MemoryNeed:
    """Memory and disk of export and its proof.

    In an artifact of several files the layer files are linked, and the rest is copied. The proof of
    a canary holds one quantized layer, and after the last layer the head as stored.
    """
    layers = layer_bytes(model, plan.schemes, kv_cache=plan.kv_cache)
    outside = outside_bytes(model, plan.head, plan.mtp, rotated=plan.rotation is not None)
    whole = outside + sum(layers) <= min(shard_size, ONE_FILE)
    linked = 0 if whole else sum(size for size in layers if size <= shard_size)
    peaks: tuple[MemoryPeak, ...] = ((BUFFERS, 0),)
    base = FILES_BASE if plan.file_to_file else MODEL_BASE
    if not plan.file_to_file:
        running = installed_bytes(model) + forward_bytes(model, CANARY_TOKENS)
        proof = max(
            installing_bytes(model, plan), running, head_bytes(model, CANARY_TOKENS, plan.head)
        )
        peaks = (*peaks, (LIBRARIES + proof, 0))
    return MemoryNeed(stage="export", base=base, peaks=peaks, result=outside + sum(layers) - linked)


def need_validate(
    model: ModelSize, *, lengths: Sequence[int], models: int, head: HeadPlan | None = None
) -> MemoryNeed:
    """Memory and disk of validate: a layer in float32, heads, a window and logits per worker.

    Args:
        model: sizes of the model.
        lengths: tokens of each window.
        models: number of models that run.
        head: plan of the candidate's head; None leaves it as it is.
    """
    longest = max(lengths, default=0)
    hidden = hidden_bytes(model, lengths)
    logits = FLOAT * longest * model.vocabulary
    peaks = (
        (LIBRARIES + embedding_bytes(model, lengths), 0),
        (LIBRARIES + layer_in_memory(model.layer), forward_bytes(model, longest)),
        (
            LIBRARIES + (models - 1) * model.head[1] + head_in_memory(model, head),
            FLOAT * HEAD_ROWS * model.hidden + (models + 1) * logits,
        ),
    )
    return MemoryNeed(stage="validate", peaks=peaks, result=hidden, scratch=models * hidden)


def _rounding(algorithm: str) -> MemoryPeak:
    """Units from file to file that workers round, that wait to be written, that are read ahead."""
    worker = ALGORITHMS[algorithm].working_bytes(0, 0) + WAITING * UNIT_FILES * groups.UNIT_ELEMENTS
    return LIBRARIES + READERS * worker, worker


def inputs_bytes(model: ModelSize, plan: Plan, tokens: int) -> int:
    """Inputs of a layer's groups, kept from a sequence's forward until the Hessians add them.

    An expert has the inputs of the tokens that the router sends to it, or of all where its policy
    says so.
    """
    every = plan.fed == "all"
    features = sum(k for _, _, k in model.layer.groups) if every else model.layer.features
    return math.ceil(FLOAT * tokens * features)


def folds(layer: LayerSize) -> list[Group]:
    """Groups of linears into whose input factors can be folded, the ones that a search concerns."""
    return [group for group, folds in zip(layer.groups, layer.folds, strict=True) if folds]


def _searching(model: ModelSize, plan: Plan) -> list[MemoryPeak]:
    """Each group while a transform compares candidates: its whole Hessian, the transform's work."""
    peaks = []
    for name, options in plan.smoothings:
        reads = TRANSFORMS[name].needs(options)
        for _, outputs, k in folds(model.layer):
            hessian = HESSIAN_SUM.nbytes(k) if HESSIAN_SUM.name in reads else 0
            fixed, one = (
                TRANSFORMS[name].working_bytes(
                    k, sum(outputs), options=options, samples=SAMPLE_ROWS, workers=workers
                )
                for workers in (0, 1)
            )
            peaks.append((hessian + fixed, one - fixed))
    return peaks


def _quantizing(model: ModelSize, plan: Plan) -> list[MemoryPeak]:
    """Each group while its Hessian is made whole from its half, and then while it is quantized.

    Held are what its algorithm takes, the weights from this group on, its qvalues and their
    encoding, the encodings of the groups before it, and the halves of the Hessians of the groups
    after it. The last of its schemes overwrites the Hessian.
    """
    peaks = []
    done = 0
    algorithm = ALGORITHMS[plan.algorithm]
    halves = half_hessians(model, plan)
    left = FLOAT * model.layer.elements if plan.in_float32 else layer_as_stored(model)
    for index, (names, outputs, k) in enumerate(model.layer.groups):
        rows = sum(outputs)
        in_place = len({plan.schemes[name] for name in names} - {None}) < 2
        factor = algorithm.working_bytes(k, rows, workers=0, in_place=in_place)
        each = algorithm.working_bytes(k, rows, workers=1, in_place=in_place) - factor
        if plan.clips:
            factor += _clipped_bytes(plan, names, rows=rows, features=k)
            each = max(each, 2 * groups.unit_bytes(k))
        encoded = sum(_encoded_bytes(model, plan, name) for name in names)
        held = left + sum(halves[index + 1 :]) + done
        whole = HESSIAN_SUM.nbytes(k) if plan.needs_hessian else 0
        # gradients are read when the group's turn comes and are freed with it
        factor += gradient_bytes(outputs) if plan.needs_gradients else 0
        if plan.needs_gradients and plan.rotation is not None:
            factor += max(output_blocks.rotation_bytes(o) for o in outputs)
        factor += FLOAT * rows * k if plan.refit else 0  # refitted weights
        own = whole + factor + rows * k + encoded
        if model.layer.shares[index] < 1 and k <= SIDE_BY_SIDE:
            peaks.append((held, max(whole + halves[index], own + each)))
        else:
            peaks += [(held + whole + halves[index], 0), (held + own, each)]
        done += encoded if plan.learned is None else started_bytes(plan, names, outputs, k)
        if plan.refit:
            # as it runs, for the groups after it
            done += FLOAT * rows * k if model.layer.turns[index] < 2 else 0
        elif plan.learned is None:
            left -= FLOAT * rows * k if plan.in_float32 else stored_bytes(model, names)
    return peaks


def half_hessians(model: ModelSize, plan: Plan, *, rows: int = ROWS) -> list[int]:
    """The bytes of each group's Hessian while the original's text runs, in strips of so many rows.

    A group that is refitted has one of its own later, but for those of experts.
    """
    return [
        observer_bytes(k, rows=rows)
        if plan.needs_hessian and (plan.searches_hessian or not plan.refit or turn)
        else 0
        for (_, _, k), turn in zip(model.layer.groups, model.layer.turns, strict=True)
    ]


def refitting_moments(
    model: ModelSize, plan: Plan, tokens: int, *, rows: int = ROWS
) -> list[tuple[int, int]]:
    """Memory while sums are taken, and while weights are solved for, in the order of both.

    Held are all weights of the layer, the groups before as they run and as they are encoded, and
    half Hessians of experts. Each worker runs a sequence, and has another's input and hidden state.
    The sums are those of a group, of what all experts read, or of what each expert's last linear
    reads, which all are there at once.

    Args:
        model: sizes of the model.
        plan: plan of the artifact.
        tokens: tokens of the longest sequence.
        rows: rows of a strip of a Hessian.
    """
    moments: list[tuple[int, int]] = []
    if not plan.refit:
        return moments
    layer = model.layer
    held = FLOAT * layer.elements if plan.in_float32 else layer_as_stored(model)
    held += sum(half_hessians(model, plan, rows=rows))
    for turn, found in groupby(
        sorted(zip(layer.turns, layer.groups, layer.shares, strict=True), key=itemgetter(0)),
        itemgetter(0),
    ):
        same = [(group, share) for _, group, share in found]
        for batch in [[one] for one in same] if turn == 0 else [same]:
            (_, outputs, k), _ = batch[0]
            hidden = model.hidden if turn == 0 and len(outputs) == 1 else 0
            solvers = len(batch) if turn == 2 else 1
            sent = sum(share for _, share in batch) if turn == 2 else 1
            sums = solvers * (observer_bytes(k, rows=rows) + refit.sums_bytes(k, hidden=hidden))
            seen = math.ceil(FLOAT * tokens * (k * sent + hidden))
            width = max(sum(outputs) for (_, outputs, _), _ in batch)
            none, one = (refit.working_bytes(k, width, workers=count) for count in (0, 1))
            adding = folding_bytes(k, tokens) + seen
            moments.append((held + sums + adding, forward_bytes(model, tokens) + 2 * seen))
            whole = HESSIAN_SUM.nbytes(k) + none
            before = sums - observer_bytes(k, rows=rows)
            for (names, outputs, _), _ in batch:
                as_run = FLOAT * sum(outputs) * k if turn < 2 else 0
                held += as_run + sum(_encoded_bytes(model, plan, name) for name in names)
            moments.append((held - as_run + before + whole, one - none))
    return moments


def groups_in_turn(model: ModelSize, plan: Plan) -> list[tuple[int, int, int]]:
    """Each group while a device quantizes it: (bytes beside its algorithm's work, rows, features).

    Held are the weights from this group on, its whole Hessian and the halves of those after it, cut
    weights where ranges are cut, and, while rounding is learned, the starting points of the groups
    before it. The rows are those of all its linears.
    """
    turns = []
    done = 0
    halves = half_hessians(model, plan, rows=DEVICE_ROWS)
    left = FLOAT * model.layer.elements if plan.in_float32 else layer_as_stored(model)
    for index, (names, outputs, k) in enumerate(model.layer.groups):
        rows = sum(outputs)
        hessian = HESSIAN_SUM.nbytes(k) if plan.needs_hessian else 0
        held = left + sum(halves[index + 1 :]) + hessian + done
        held += _clipped_bytes(plan, names, rows=rows, features=k) if plan.clips else 0
        held += FLOAT * rows * k if plan.refit else 0
        turns.append((held, rows, k))
        if plan.refit:
            done += FLOAT * rows * k if model.layer.turns[index] < 2 else 0
        elif plan.learned is None:
            left -= FLOAT * rows * k if plan.in_float32 else stored_bytes(model, names)
        else:
            done += started_bytes(plan, names, outputs, k)
    return turns


def _clipped_bytes(plan: Plan, names: Sequence[str], *, rows: int, features: int) -> int:
    """Cut weights in float32, and the blocks of the Hessian that decide where to cut."""
    sizes = [
        (scheme.weights.group_size or features)
        for name in names
        if (scheme := plan.schemes[name]) is not None
    ]
    return FLOAT * features * (rows + max(sizes, default=0))


def _encoded_bytes(model: ModelSize, plan: Plan, name: str) -> int:
    scheme, info = plan.schemes[name], model.infos[f"{name}.weight"]
    return info.nbytes if scheme is None else quantized_bytes(name, scheme, info)


def installed_bytes(model: ModelSize) -> int:
    """A layer of quantized linears on the reference backend: their weights in float32."""
    return FLOAT * model.layer.elements


def installing_bytes(model: ModelSize, plan: Plan) -> int:
    """A quantized layer while its largest linear is dequantized, beside its qvalues of one byte."""
    names = (
        name
        for names, _, _ in model.layer.groups
        for name in names
        if plan.schemes[name] is not None
    )
    return installed_bytes(model) + max(
        (elements_of(model.infos[f"{name}.weight"]) for name in names), default=0
    )


def layer_in_memory(layer: LayerSize) -> int:
    """A layer in float32, and its largest tensor as stored while it is converted."""
    return FLOAT * layer.elements + layer.largest[1]


def layer_as_stored(model: ModelSize) -> int:
    """A layer whose linears keep their weights as stored; its other tensors are in float32."""
    linears = [name for names, _, _ in model.layer.groups for name in names]
    weights = sum(elements_of(model.infos[f"{name}.weight"]) for name in linears)
    return stored_bytes(model, linears) + FLOAT * (model.layer.elements - weights)


def stored_bytes(model: ModelSize, linears: Sequence[str]) -> int:
    """Weights of these linears as stored."""
    return sum(model.infos[f"{name}.weight"].nbytes for name in linears)


def parts_bytes(model: ModelSize, tokens: int) -> int:
    """Rows of a stored weight in float32 at once, a copy of their tokens, their outputs twice."""
    features = max(k for _, _, k in model.layer.groups)
    some = min(tokens, LINEAR_TOKENS)
    return FLOAT * (LINEAR_ROWS * (2 * some + features) + some * features)


def hidden_bytes(model: ModelSize, lengths: Sequence[int]) -> int:
    """Float32 hidden states of sequences of these lengths, with what is carried beside them."""
    return FLOAT * model.between * sum(lengths)


def embedding_bytes(model: ModelSize, lengths: Sequence[int]) -> int:
    """Rows of the embedding that the sequences use, as stored and in float32."""
    return 2 * FLOAT * model.hidden * min(model.vocabulary, sum(lengths))


def forward_bytes(model: ModelSize, tokens: int) -> int:
    """A sequence's float32 forward: residual, norm, the wider of attention and MLP.

    A mixture's experts run one after the other, each on all tokens at most. Held are their sum, and
    one expert's input and output.
    """
    queries, keys = model.heads * model.head_dim, model.kv_heads * model.head_dim
    # q and its rotation, k and v, and both repeated over the heads
    attention = 3 * queries + 2 * keys + 2 * queries
    wide = max((width for _, outputs, _ in model.layer.groups for width in outputs), default=0)
    return FLOAT * tokens * ((6 if model.sparse else 3) * model.hidden + max(attention, 3 * wide))


def backward_bytes(model: ModelSize, tokens: int) -> int:
    """Tensors that a sequence's forward keeps for its backward, and gradients under way.

    Each norm keeps about four tensors of the hidden size. Attention keeps its inputs and outputs
    and both once more repeated over the heads. An MLP keeps the tensors between its linears. Every
    linear keeps its input. Of experts those that a token is sent to keep theirs, a copy of the
    token's hidden state each.
    """
    queries, keys = model.heads * model.head_dim, model.kv_heads * model.head_dim
    wide = max((width for _, outputs, _ in model.layer.groups for width in outputs), default=0)
    kept = 12 * model.hidden + 8 * queries + 4 * keys + 6 * wide
    if model.sparse:
        kept += math.ceil(
            sum(
                share * (k + 2 * sum(outputs))
                for (_, outputs, k), share in zip(
                    model.layer.groups, model.layer.shares, strict=True
                )
            )
        )
    return FLOAT * tokens * kept


def head_bytes(model: ModelSize, tokens: int, head: HeadPlan | None = None) -> int:
    """The head as stored, a part of it in float32, a sequence's logits in parts and joined."""
    return (
        head_in_memory(model, head)
        + FLOAT * HEAD_ROWS * model.hidden
        + 2 * FLOAT * tokens * model.vocabulary
    )


def way_back_bytes(model: ModelSize, tokens: int, *, copies: int) -> int:
    """A thread's part of a backward through the head: its rows thrice, copies of logits.

    Args:
        model: sizes of the model.
        tokens: tokens of the sequence.
        copies: number of copies of a part's logits.
    """
    return FLOAT * (
        3 * HEAD_ROWS * model.hidden
        + copies * min(tokens, logit_rows(model.vocabulary)) * model.vocabulary
    )


def head_in_memory(model: ModelSize, head: HeadPlan | None) -> int:
    """The head as stored; a quantized one while it is unpacked, with two bytes per weight."""
    return (
        model.head[1]
        if head is None
        else head_file_bytes(model, head) + 2 * elements_of(model.infos[head.tensor])
    )


def statistics_bytes(layer: LayerSize, stats: Sequence[str]) -> int:
    """Statistics of a layer, each under the name of its linear, those of a shared input too.

    Every weight and output has an amax, whatever observers run.
    """
    total = 0
    for names, outputs, features in layer.groups:
        total += 2 * len(names) * state_bytes(AmaxObserver.NAME, features)
        total += sum(
            state_bytes(name, seen) for name in stats for seen in _seen(name, outputs, features)
        )
    return total


def live_bytes(layer: LayerSize, stats: Sequence[str]) -> int:
    """The observers of a layer while data flows, under every name of their statistics."""
    return sum(
        observer_named(name).live_bytes(seen)
        for _, outputs, features in layer.groups
        for name in stats
        for seen in _seen(name, outputs, features)
    )


def further_parts_bytes(layer: LayerSize, stats: Sequence[str], *, samples: int) -> int:
    """What observers of all sequences take beyond one each: sums are kept in parts."""
    return max(0, min(PARTS, samples) - 1) * sum(
        state_bytes(name, seen)
        for _, outputs, features in layer.groups
        for name in stats
        if summed_in_parts(name)
        for seen in _seen(name, outputs, features)
    )


def watching_bytes(model: ModelSize, stats: Sequence[str], tokens: int) -> int:
    """The largest working memory of an observer that reads one tensor of a sequence."""
    return max(
        (
            observer_named(name).update_bytes(seen, tokens)
            for _, outputs, features in model.layer.groups
            for name in stats
            for seen in _seen(name, outputs, features)
        ),
        default=0,
    )


def matrix_bytes(layer: LayerSize, stats: Sequence[str]) -> int:
    """The largest matrix among the statistics of a layer, which are read one at a time."""
    sizes = (
        state_bytes(name, seen)
        for _, outputs, features in layer.groups
        for name in stats
        if holds_matrix(name)
        for seen in _seen(name, outputs, features)
    )
    return max(sizes, default=0)


def _seen(name: str, outputs: Sequence[int], features: int) -> list[int]:
    """Feature counts of all tensors that an observer sees of linears that share an input.

    There is one for each linear and site.
    """
    sites = observer_named(name).SITES
    return [width if site == "gradient" else features for width in outputs for site in sites]


def gradient_bytes(outputs: Sequence[int]) -> int:
    """Sums of products of the gradients by the outputs of some linears, in blocks of outputs."""
    return sum(map(output_blocks.nbytes, outputs))


def started_bytes(plan: Plan, names: Sequence[str], outputs: Sequence[int], features: int) -> int:
    """Starting points of learned rounding for linears that share an input.

    Each has a byte per qvalue, and scales and zero points.
    """
    quantized = [
        (scheme, rows)
        for name, rows in zip(names, outputs, strict=True)
        if (scheme := plan.schemes[name]) is not None
    ]
    return sum(
        rows * (features + 5 * (features // (scheme.weights.group_size or features)))
        for scheme, rows in quantized
    )


def learning_moments(model: ModelSize, plan: Plan, tokens: int) -> list[tuple[int, int]]:
    """Memory while a layer's rounding is learned, and while its result is encoded.

    All of the layer's weights, their starting points and the algorithm's work are held. Each worker
    brings a sequence forward and back, with its target beside it.
    """
    if plan.learned is None:
        return []
    held = FLOAT * model.layer.elements if plan.in_float32 else layer_as_stored(model)
    weights, scales = _weights_and_scales(model, plan)
    started = weights + 5 * scales
    widest = max(k for _, _, k in model.layer.groups)
    algorithm = BLOCK_ALGORITHMS[plan.method]
    none, one = (
        algorithm.working_bytes(weights, scales, widest=widest, workers=count) for count in (0, 1)
    )
    run = backward_bytes(model, tokens) + 3 * FLOAT * tokens * model.hidden
    return [(held + started + none, one - none + run), (held + 3 * started, 0)]


def tuning_moments(model: ModelSize, plan: Plan, tokens: int) -> list[tuple[int, int]]:
    """Memory while a layer brings sequences forward and back to tune, and while heads compare.

    For a part of a sequence a worker holds the logits of both models, the gradient, and the tensors
    between them.
    """
    if plan.tune is None:
        return []
    weights, scales = _weights_and_scales(model, plan)
    none, one = (tune.working_bytes(weights, scales, workers=count) for count in (0, 1))
    run = backward_bytes(model, tokens) + 3 * FLOAT * tokens * model.hidden
    return [
        (layer_as_stored(model) + none, one - none + run),
        (head_in_memory(model, None), way_back_bytes(model, tokens, copies=5)),
    ]


def tuning_disk(model: ModelSize, plan: Plan, lengths: Sequence[int], *, layers: int) -> int:
    """Bytes of files while scales are tuned.

    The files are the layers as they were, the factors that smoothed them, hidden states, and the
    tuned values twice. Every sequence has the input of the first layer and the output of the last,
    which is there twice while it is written. The sequences of a step have the input of each layer,
    and a gradient on either side of one.

    Args:
        model: sizes of the model.
        plan: plan of the artifact.
        lengths: tokens of each sequence.
        layers: bytes of the layers' files.
    """
    if plan.tune is None:
        return 0
    _, scales = _weights_and_scales(model, plan)
    some = hidden_bytes(model, sorted(lengths)[-plan.tune.batch :])
    count = len(model.layers)
    if plan.smoothings:
        layers += (
            count
            * FLOAT
            * sum(len(names) * k + sum(outputs) for names, outputs, k in model.layer.groups)
        )
    return (
        layers
        + 3 * hidden_bytes(model, lengths)
        + (count + 3) * some
        + 2 * tune.state_bytes(scales) * count
    )


def _weights_and_scales(model: ModelSize, plan: Plan) -> tuple[int, int]:
    """Number of quantized weights in the largest layer, and number of their scales."""
    started = sum(
        started_bytes(plan, names, outputs, k) for names, outputs, k in model.layer.groups
    )
    names = [
        name
        for linears, _, _ in model.layer.groups
        for name in linears
        if plan.schemes[name] is not None
    ]
    weights = sum(elements_of(model.infos[f"{name}.weight"]) for name in names)
    return weights, (started - weights) // 5
