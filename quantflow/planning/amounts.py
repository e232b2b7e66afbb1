"""What the parts of a model take in memory while they run, in bytes, from its sizes alone."""

from collections.abc import Sequence

from quantflow.algorithms import BLOCK_ALGORITHMS, tune
from quantflow.models.stand_ins import HEAD_ROWS, LINEAR_ROWS, LINEAR_TOKENS, logit_rows
from quantflow.numerics import output_blocks
from quantflow.observers.fisher import FisherObserver
from quantflow.observers.gradient import GradientObserver
from quantflow.observers.hessian import observer_bytes
from quantflow.planning.compatibility import LEARNING
from quantflow.planning.head import HeadPlan
from quantflow.planning.plan import Plan
from quantflow.planning.sizes import FLOAT, LayerSize, ModelSize, elements_of, head_file_bytes

GRADIENTS = (FisherObserver.NAME, GradientObserver.NAME)  # the statistics that the way back is run for


def goes_back(stats: Sequence[str]) -> bool:
    """Return whether a statistic is of gradients."""
    return not set(GRADIENTS).isdisjoint(stats)


def layer_in_memory(layer: LayerSize) -> int:
    """A layer in float32, and its largest tensor as stored while it is converted."""
    return FLOAT * layer.elements + layer.largest[1]


def layer_as_stored(model: ModelSize) -> int:
    """A layer whose linears keep their weights as stored; what else it has is in float32."""
    linears = [name for names, _, _ in model.layer.groups for name in names]
    weights = sum(elements_of(model.infos[f"{name}.weight"]) for name in linears)
    return stored_bytes(model, linears) + FLOAT * (model.layer.elements - weights)


def stored_bytes(model: ModelSize, linears: Sequence[str]) -> int:
    """The weights of these linears as stored."""
    return sum(model.infos[f"{name}.weight"].nbytes for name in linears)


def parts_bytes(model: ModelSize, tokens: int) -> int:
    """The rows of such a weight that are in float32 at once, a copy of the tokens they meet, and what they make, twice."""
    features, some = max(k for _, _, k in model.layer.groups), min(tokens, LINEAR_TOKENS)
    return FLOAT * (LINEAR_ROWS * (2 * some + features) + some * features)


def hidden_bytes(model: ModelSize, lengths: Sequence[int]) -> int:
    """The float32 hidden states of sequences of these lengths."""
    return FLOAT * model.hidden * sum(lengths)


def embedding_bytes(model: ModelSize, lengths: Sequence[int]) -> int:
    """Rows of the embedding that the sequences name, at most one per token, as stored and in float32."""
    return 2 * FLOAT * model.hidden * min(model.vocabulary, sum(lengths))


def forward_bytes(model: ModelSize, tokens: int) -> int:
    """A float32 forward of one sequence through a layer: residual and norm, and the wider of attention and MLP.

    A mixture's experts run one after the other, each on all tokens at most: it has their sum, and one's input and output.
    """
    queries, keys = model.heads * model.head_dim, model.kv_heads * model.head_dim
    attention = 3 * queries + 2 * keys + 2 * queries  # q, its rotation, k and v, both repeated over the heads
    wide = max((width for _, outputs, _ in model.layer.groups for width in outputs), default=0)
    return FLOAT * tokens * ((6 if model.sparse else 3) * model.hidden + max(attention, 3 * wide))


def backward_bytes(model: ModelSize, tokens: int) -> int:
    """What a sequence's forward through a layer keeps for its way back, and the gradients that are under way then.

    Each norm keeps about four tensors of the hidden size, attention what it was asked and gave and both again repeated over the
    heads, and an MLP the tensors between its linears; and every linear its input.
    """
    queries, keys = model.heads * model.head_dim, model.kv_heads * model.head_dim
    wide = max((width for _, outputs, _ in model.layer.groups for width in outputs), default=0)
    kept = 12 * model.hidden + 8 * queries + 4 * keys + 6 * wide
    return FLOAT * tokens * kept


def observing_bytes(model: ModelSize, tokens: int) -> int:
    """What observers hold while they look at one input: magnitudes, and bins of eight bytes."""
    return 3 * FLOAT * tokens * max(k for _, _, k in model.layer.groups)


def head_bytes(model: ModelSize, tokens: int, head: HeadPlan | None = None) -> int:
    """The head as stored, a part of it in float32, and the logits of one sequence, in parts and joined."""
    return head_in_memory(model, head) + FLOAT * HEAD_ROWS * model.hidden + 2 * FLOAT * tokens * model.vocabulary


def way_back_bytes(model: ModelSize, tokens: int, *, copies: int) -> int:
    """What a thread has of a sequence's way back through the head: rows of it, thrice, and copies of a part's logits."""
    return FLOAT * (3 * HEAD_ROWS * model.hidden + copies * min(tokens, logit_rows(model.vocabulary)) * model.vocabulary)


def head_in_memory(model: ModelSize, head: HeadPlan | None) -> int:
    """The head as stored; one that is quantized while it is unpacked: as stored, and twice a byte for each weight."""
    return model.head[1] if head is None else head_file_bytes(model, head) + 2 * elements_of(model.infos[head.tensor])


def statistics_bytes(layer: LayerSize, stats: Sequence[str], *, whole: bool = True) -> int:
    """Statistics of a layer, each under the name of its linear, those of a shared input too; Hessians whole or half."""
    per_feature = {"channel_amax": 4, "min_max": 8, "mean_abs": 8, FisherObserver.NAME: 8}
    total = 0
    for names, outputs, k in layer.groups:
        each = 16 + k * sum(per_feature.get(name, 0) for name in stats)
        each += (8 * 514 if "histogram" in stats else 0) + (
            (4 * k * k if whole else observer_bytes(k)) if "hessian" in stats else 0
        )
        total += each * len(names) + (8 * sum(outputs) if FisherObserver.NAME in stats else 0)
        total += gradient_bytes(outputs) if GradientObserver.NAME in stats else 0
    return total


def watching_bytes(model: ModelSize, tokens: int) -> int:
    """What observers hold while they look at one gradient: its squares, and the product of its largest block."""
    wide = max(width for _, outputs, _ in model.layer.groups for width in outputs)
    return FLOAT * (tokens * wide + output_blocks.width(wide) ** 2)


def gradient_bytes(outputs: Sequence[int]) -> int:
    """The sums of products of the gradients by the outputs of some linears, in blocks of outputs."""
    return sum(map(output_blocks.nbytes, outputs))


def matrix_bytes(layer: LayerSize, stats: Sequence[str]) -> int:
    """The largest matrix among the statistics of a layer, which are read one at a time."""
    hessians = [FLOAT * k * k for _, _, k in layer.groups if "hessian" in stats]
    gradients = [output_blocks.nbytes(o) for _, outputs, _ in layer.groups for o in outputs if GradientObserver.NAME in stats]
    return max([0, *hessians, *gradients])


def started_bytes(plan: Plan, names: Sequence[str], outputs: Sequence[int], features: int) -> int:
    """Qvalues of linears that share an input and wait to be learned from, a byte each, their scales and zero points."""
    quantized = [
        (scheme, rows) for name, rows in zip(names, outputs, strict=True) if (scheme := plan.schemes[name]) is not None
    ]
    return sum(rows * (features + 5 * (features // (scheme.weights.group_size or features))) for scheme, rows in quantized)


def learning_moments(model: ModelSize, plan: Plan, tokens: int) -> list[tuple[int, int]]:
    """While a layer's rounding is learned, and while what came out is encoded: all of its weights, what it starts from, that.

    Each worker brings a sequence there and back, with its target beside it.
    """
    if plan.learned is None:
        return []
    held = FLOAT * model.layer.elements if plan.transforms else layer_as_stored(model)
    weights, scales = _quantized(model, plan)
    started = weights + 5 * scales
    widest = max(k for _, _, k in model.layer.groups)
    algorithm = BLOCK_ALGORITHMS[LEARNING]
    none, one = (algorithm.working_bytes(weights, scales, widest=widest, workers=count) for count in (0, 1))
    run = backward_bytes(model, tokens) + 3 * FLOAT * tokens * model.hidden
    return [(held + started + none, one - none + run), (held + 3 * started, 0)]


def tuning_moments(model: ModelSize, plan: Plan, tokens: int) -> list[tuple[int, int]]:
    """While a layer brings sequences forward and back with the weights that are tuned, and while the head compares them.

    Of a part of a sequence a worker has both models' logits, the gradient, and what stands between them.
    """
    if plan.tune is None:
        return []
    weights, scales = _quantized(model, plan)
    none, one = (tune.working_bytes(weights, scales, workers=count) for count in (0, 1))
    run = backward_bytes(model, tokens) + 3 * FLOAT * tokens * model.hidden
    return [
        (layer_as_stored(model) + none, one - none + run),
        (head_in_memory(model, None), way_back_bytes(model, tokens, copies=5)),
    ]


def tuning_disk(model: ModelSize, plan: Plan, lengths: Sequence[int], *, layers: int) -> int:
    """Files while scales are tuned: the layers as they were and what smoothed them, hidden states, and what is tuned, twice.

    Of every sequence there is what enters the first layer and what leaves the last one, twice while that is written; of
    those of a step what enters each layer, and a gradient on either side of one.

    Args:
        model: its sizes.
        plan: the artifact's.
        lengths: tokens of each sequence.
        layers: bytes of the layers' files.
    """
    if plan.tune is None:
        return 0
    _, scales = _quantized(model, plan)
    some = hidden_bytes(model, sorted(lengths)[-plan.tune.sequences :])
    count = len(model.layers)
    if plan.smoothings:
        layers += count * FLOAT * sum(len(names) * k + sum(outputs) for names, outputs, k in model.layer.groups)
    return layers + 3 * hidden_bytes(model, lengths) + (count + 3) * some + 2 * 3 * FLOAT * scales * count


def _quantized(model: ModelSize, plan: Plan) -> tuple[int, int]:
    """Return how many weights of the largest layer are quantized, and how many scales they have."""
    started = sum(started_bytes(plan, names, outputs, k) for names, outputs, k in model.layer.groups)
    names = [name for linears, _, _ in model.layer.groups for name in linears if plan.schemes[name] is not None]
    weights = sum(elements_of(model.infos[f"{name}.weight"]) for name in names)
    return weights, (started - weights) // 5
