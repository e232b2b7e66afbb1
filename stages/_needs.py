"""The formulas: what each stage takes in memory and on disk, from shapes and the recipe alone, one function per stage.

They describe the largest of a stage's processes, without what Python and its libraries take (`Need.peak` adds it):
export's proof runs in a process of its own, each rank of measure is one.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from quantflow.algorithms import ALGORITHMS
from quantflow.core import groups
from quantflow.core.sensitivity import ROWS as SAMPLED_ROWS
from quantflow.models.stand_ins import HEAD_ROWS, LINEAR_ROWS
from quantflow.observers.fisher import FisherObserver
from quantflow.observers.hessian import ROWS, observer_bytes
from stages._plan import Plan
from stages._shards import ONE_FILE
from stages._sizes import FLOAT, LayerSize, ModelSize, layer_bytes, quantized_bytes

FILES_BASE = 235_000_000  # a process with Python, torch and quantflow
MODEL_BASE = 365_000_000  # and transformers' model code, which only a stage that runs the model imports
LIBRARIES = 30_000_000  # code and buffers that torch and transformers load when the first layer runs
CANARY_TOKENS = 64
BUFFERS = 64 << 20  # that files are copied and compared through
WAITING = 3  # units per worker, file to file, that are under way or wait to be written
READERS = 2  # units of file to file beyond the workers' own, since a unit waits for the disk before it computes
UNIT_FILES = 4  # bytes of each of their weights: as stored and as written

GRADIENTS = FisherObserver.NAME  # the statistic that the way back is run for

Moment = tuple[int, int]  # bytes whatever is chosen, bytes per worker


@dataclass(frozen=True, kw_only=True)
class Need:
    """What a stage takes, in bytes.

    Attributes:
        moments: the largest of these counts: memory beside the process itself, and of each unit that runs at once.
        cache: hidden states in all, any part of which can wait on disk.
        result: files that stay.
        scratch: files that are removed at the end of the stage.
        base: the process itself, once it has imported what the stage uses.
    """

    stage: str
    moments: tuple[Moment, ...]
    cache: int = 0
    result: int = 0
    scratch: int = 0
    base: int = MODEL_BASE

    def peak(self, *, base: int, workers: int, cache: int) -> int:
        """Return the memory of the process with that choice."""
        return base + max(fixed + workers * each for fixed, each in self.moments) + cache


def need_measure(model: ModelSize, *, lengths: Sequence[int], stats: Sequence[str]) -> Need:
    """Return what measure takes: a layer in float32, a sequence's forward per worker, hidden states, statistics.

    Each layer's statistics wait on disk until all are there; then they are in memory together. Where gradients are measured
    too, what enters each layer waits on disk for the way back.
    """
    ids = 8 * sum(lengths)
    if not stats:
        return Need(stage="measure", moments=((2 * ids, 0),), result=ids)
    statistics = sum(_statistics_bytes(layer, stats) for layer in model.layers)
    longest = max(lengths, default=0)
    hidden = _hidden_bytes(model, lengths)
    largest = max(_statistics_bytes(layer, stats) for layer in model.layers)
    growing = max(_statistics_bytes(layer, stats, whole=False) for layer in model.layers)
    worker = _forward_bytes(model, longest) + _observing_bytes(model, longest) + growing
    moments: tuple[Moment, ...] = (
        (LIBRARIES + _embedding_bytes(model, lengths), 0),
        (LIBRARIES + _layer_in_memory(model.layer) + growing, worker),
        (LIBRARIES + _layer_in_memory(model.layer) + largest, 0),
        (LIBRARIES + 2 * statistics, 0),
    )
    # Two generations of hidden states while layers run; at the end one, beside what the layers found, which is written again.
    scratch = hidden + max(hidden, statistics)
    if GRADIENTS in stats:
        scratch = (len(model.layers) + 1 + 2) * hidden + statistics
        moments = (
            *moments,
            (LIBRARIES + _head_bytes(model, longest), 0),
            (LIBRARIES + _layer_in_memory(model.layer) + growing, _backward_bytes(model, longest) + growing),
        )
    return Need(stage="measure", moments=moments, cache=hidden, result=ids + statistics, scratch=scratch)


def need_choice(model: ModelSize) -> Need:
    """Return what choosing schemes takes: per worker rows of the widest weight, as stored, in float32, rounded, their error."""
    widest = max(k for layer in model.layers for _, _, k in layer.groups)
    return Need(stage="choose", base=FILES_BASE, moments=((0, 5 * FLOAT * SAMPLED_ROWS * widest + groups.unit_bytes(widest)),))


def need_layers(model: ModelSize, plan: Plan, *, lengths: Sequence[int]) -> Need:
    """Return what quantize takes layer by layer.

    The calibration text runs through the layer while the Hessians grow, half of each; then each group is quantized with its
    whole Hessian and the halves of the groups after it; then the quantized layer, beside what its file will hold, runs again.
    """
    longest = max(lengths, default=CANARY_TOKENS) if plan.needs_hessian else CANARY_TOKENS
    hidden = _hidden_bytes(model, lengths) if plan.needs_hessian else 0
    encoded = layer_bytes(model, plan.schemes)
    halves = sum(observer_bytes(k) for _, _, k in model.layer.groups) if plan.needs_hessian else 0
    forward = _forward_bytes(model, longest)
    inputs = _inputs_bytes(model, longest) if plan.needs_hessian else 0
    folding = inputs + _folding_bytes(model) if plan.needs_hessian else 0  # one sequence more, being added up
    layer = _layer_in_memory(model.layer) if plan.transforms else _layer_as_stored(model)
    parts = 0 if plan.transforms else _parts_bytes(model, longest)
    moments = (
        (LIBRARIES + _embedding_bytes(model, lengths), 0),
        (LIBRARIES + layer + halves + folding, forward + inputs + parts),
        *((LIBRARIES + fixed, each) for fixed, each in _quantizing(model, plan)),
        (LIBRARIES + max(encoded) + _installing_bytes(model, plan), 0),
        (LIBRARIES + max(encoded) + _installed_bytes(model), forward),
        (LIBRARIES + _head_bytes(model, CANARY_TOKENS), 0),
    )
    return Need(stage="quantize", moments=moments, cache=hidden, result=sum(encoded), scratch=2 * hidden)


def need_files(model: ModelSize, plan: Plan) -> Need:
    """Return what quantize takes file to file: per worker the unit that it rounds, and those that wait to be written."""
    worker = ALGORITHMS[plan.algorithm].working_bytes(0, 0) + WAITING * UNIT_FILES * groups.UNIT_ELEMENTS
    moments = ((LIBRARIES + READERS * worker, worker),)
    return Need(stage="quantize", base=FILES_BASE, moments=moments, result=sum(layer_bytes(model, plan.schemes)))


def need_export(model: ModelSize, plan: Plan, *, shard_size: int) -> Need:
    """Return what export and its proof take: of a model that is no single file, layer files are linked, the rest is copied.

    The proof of a canary holds one quantized layer, and after the last of them the head as stored.
    """
    layers = layer_bytes(model, plan.schemes)
    whole = model.outside + sum(layers) <= min(shard_size, ONE_FILE)
    linked = 0 if whole else sum(size for size in layers if size <= shard_size)
    moments: tuple[Moment, ...] = ((BUFFERS, 0),)
    base = FILES_BASE if plan.file_to_file else MODEL_BASE
    if not plan.file_to_file:
        running = _installed_bytes(model) + _forward_bytes(model, CANARY_TOKENS)
        proof = max(_installing_bytes(model, plan), running, _head_bytes(model, CANARY_TOKENS))
        moments = (*moments, (LIBRARIES + proof, 0))
    return Need(stage="export", base=base, moments=moments, result=model.outside + sum(layers) - linked)


def need_validate(model: ModelSize, *, lengths: Sequence[int], models: int) -> Need:
    """Return what validate takes: a layer in float32, a window's forward per worker, every model's hidden states, heads."""
    longest = max(lengths, default=0)
    hidden = _hidden_bytes(model, lengths)
    logits = FLOAT * longest * model.vocabulary
    moments = (
        (LIBRARIES + _embedding_bytes(model, lengths), 0),
        (LIBRARIES + _layer_in_memory(model.layer), _forward_bytes(model, longest)),
        (LIBRARIES + models * (model.head[1] + logits), FLOAT * HEAD_ROWS * model.hidden + 2 * logits),
    )
    return Need(stage="validate", moments=moments, cache=models * hidden, scratch=(models + 1) * hidden)


def _layer_in_memory(layer: LayerSize) -> int:
    """A layer in float32, and its largest tensor as stored while it is converted."""
    return FLOAT * layer.elements + layer.largest[1]


def _layer_as_stored(model: ModelSize) -> int:
    """A layer whose linears keep their weights as stored; what else it has is in float32."""
    linears = [name for names, _, _ in model.layer.groups for name in names]
    return _stored_bytes(model, linears) + FLOAT * (model.layer.elements - sum(_weights(model, name) for name in linears))


def _stored_bytes(model: ModelSize, linears: Sequence[str]) -> int:
    return sum(model.infos[f"{name}.weight"].nbytes for name in linears)


def _parts_bytes(model: ModelSize, tokens: int) -> int:
    """The rows of such a weight that are in float32 at once, and what they make of a sequence."""
    return FLOAT * LINEAR_ROWS * (tokens + max(k for _, _, k in model.layer.groups))


def _folding_bytes(model: ModelSize) -> int:
    """What a Hessian takes while one input is added: the product for its largest strip."""
    return FLOAT * ROWS * max(k for _, _, k in model.layer.groups)


def _hidden_bytes(model: ModelSize, lengths: Sequence[int]) -> int:
    return FLOAT * model.hidden * sum(lengths)


def _embedding_bytes(model: ModelSize, lengths: Sequence[int]) -> int:
    """Rows of the embedding that the sequences name, at most one per token, as stored and in float32."""
    return 2 * FLOAT * model.hidden * min(model.vocabulary, sum(lengths))


def _forward_bytes(model: ModelSize, tokens: int) -> int:
    """A float32 forward of one sequence through a layer: residual and norm, and the wider of attention and MLP."""
    queries, keys = model.heads * model.head_dim, model.kv_heads * model.head_dim
    attention = 3 * queries + 2 * keys + 2 * queries  # q, its rotation, k and v, both repeated over the heads
    wide = max((width for _, outputs, _ in model.layer.groups for width in outputs), default=0)
    return FLOAT * tokens * (3 * model.hidden + max(attention, 3 * wide))


def _backward_bytes(model: ModelSize, tokens: int) -> int:
    """What a sequence's forward through a layer keeps for its way back, and the gradients that are under way then.

    Each norm keeps about four tensors of the hidden size, attention what it was asked and gave and both again repeated over the
    heads, and an MLP the tensors between its linears; and every linear its input.
    """
    queries, keys = model.heads * model.head_dim, model.kv_heads * model.head_dim
    wide = max((width for _, outputs, _ in model.layer.groups for width in outputs), default=0)
    kept = 12 * model.hidden + 8 * queries + 4 * keys + 6 * wide
    return FLOAT * tokens * kept


def _observing_bytes(model: ModelSize, tokens: int) -> int:
    """What observers hold while they look at one input: magnitudes, and bins of eight bytes."""
    return 3 * FLOAT * tokens * max(k for _, _, k in model.layer.groups)


def _inputs_bytes(model: ModelSize, tokens: int) -> int:
    """The inputs of a layer's groups, kept from a sequence's forward until they are folded into the Hessians."""
    return FLOAT * tokens * sum(k for _, _, k in model.layer.groups)


def _head_bytes(model: ModelSize, tokens: int) -> int:
    """The head as stored, a part of it in float32, and the logits of one sequence, in parts and joined."""
    return model.head[1] + FLOAT * HEAD_ROWS * model.hidden + 2 * FLOAT * tokens * model.vocabulary


def _statistics_bytes(layer: LayerSize, stats: Sequence[str], *, whole: bool = True) -> int:
    """Statistics of a layer, each under the name of its linear, those of a shared input too; Hessians whole or half."""
    per_feature = {"channel_amax": 4, "min_max": 8, "mean_abs": 8, GRADIENTS: 8}
    total = 0
    for names, outputs, k in layer.groups:
        each = 16 + k * sum(per_feature.get(name, 0) for name in stats)
        each += (8 * 514 if "histogram" in stats else 0) + (
            (4 * k * k if whole else observer_bytes(k)) if "hessian" in stats else 0
        )
        total += each * len(names) + (8 * sum(outputs) if GRADIENTS in stats else 0)
    return total


def _quantizing(model: ModelSize, plan: Plan) -> list[Moment]:
    """Each group while its Hessian is made whole from its half, and then while it is quantized.

    What its algorithm takes, the weights from this group on, qvalues and what they are encoded to, what the groups before
    it were encoded to, and the halves of the Hessians that are left. The Hessian is overwritten by the last of its schemes.
    """
    moments, done, algorithm = [], 0, ALGORITHMS[plan.algorithm]
    halves = [observer_bytes(k) if plan.needs_hessian else 0 for _, _, k in model.layer.groups]
    left = FLOAT * model.layer.elements if plan.transforms else _layer_as_stored(model)
    for index, (names, outputs, k) in enumerate(model.layer.groups):
        rows = sum(outputs)
        in_place = len({plan.schemes[name] for name in names} - {None}) < 2
        factor = algorithm.working_bytes(k, rows, workers=0, in_place=in_place)
        each = algorithm.working_bytes(k, rows, workers=1, in_place=in_place) - factor
        encoded = sum(_encoded_bytes(model, plan, name) for name in names)
        held = left + sum(halves[index + 1 :]) + (4 * k * k if plan.needs_hessian else 0) + done
        moments += [(held + halves[index], 0), (held + factor + rows * k + encoded, each)]
        done += encoded
        left -= FLOAT * rows * k if plan.transforms else _stored_bytes(model, names)
    return moments


def _encoded_bytes(model: ModelSize, plan: Plan, name: str) -> int:
    scheme, info = plan.schemes[name], model.infos[f"{name}.weight"]
    return info.nbytes if scheme is None else quantized_bytes(name, scheme, info)


def _installed_bytes(model: ModelSize) -> int:
    """A layer of quantized linears on the reference backend, which holds their weights in float32."""
    return FLOAT * model.layer.elements


def _installing_bytes(model: ModelSize, plan: Plan) -> int:
    """The same while its largest linear is dequantized, beside its qvalues of one byte."""
    names = (name for names, _, _ in model.layer.groups for name in names if plan.schemes[name] is not None)
    return _installed_bytes(model) + max((_weights(model, name) for name in names), default=0)


def _weights(model: ModelSize, name: str) -> int:
    rows, columns = model.infos[f"{name}.weight"].shape
    return rows * columns
