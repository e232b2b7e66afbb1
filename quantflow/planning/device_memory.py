"""Memory of a device other than the CPU: bytes of each stage's tensors, from shapes alone.

One sequence is under way at a time, and `groups.AT_ONCE` units of elementwise work. What stays in
host memory (files, hidden states, what is written) is in the plan of `quantflow.planning.cost`,
whose formulas this module uses. That plan counts the CPU's work too, so the host of a device takes
less than it says.

Tensors alone are counted. The device's runtime takes some hundred megabytes beside them, and its
allocator keeps freed blocks; a limit that a user gives should leave room for both.

    need = measure_on_device(model, lengths=[2048] * 32, stats=("amax",), dtype=torch.float32)
    allow_on_device(need, resources, device)  # before a weight is read
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from quantflow import cpu_threads
from quantflow.algorithms import ALGORITHMS
from quantflow.core import groups
from quantflow.core.device import WORKSPACE_BYTES, Device
from quantflow.errors import ResourceError
from quantflow.models.stand_ins import HEAD_ROWS
from quantflow.observers import goes_back, of_gradients
from quantflow.observers.hessian import (
    DEVICE_ROWS,
    HESSIAN_SUM,
    HessianObserver,
    folding_bytes_on_device,
    observer_bytes,
)
from quantflow.planning import cost
from quantflow.planning.head import HeadPlan
from quantflow.planning.plan import SAMPLE_ROWS, Plan
from quantflow.planning.recipe import Resources
from quantflow.planning.resources import round_up
from quantflow.planning.sizes import FLOAT, LayerSize, ModelSize
from quantflow.transforms import TRANSFORMS
from quantflow.units import parse_size
from quantflow.units import size as text_of

# of a device's memory, where hidden states stay on it: its allocator keeps gaps between tensors
SPENT = 0.85


@dataclass(frozen=True, kw_only=True)
class DeviceMemoryNeed:
    """Bytes that a stage's tensors take on a device.

    Attributes:
        stage: name of the stage.
        peaks: description of a step -> bytes of all tensors that are there then.
    """

    stage: str
    peaks: Mapping[str, int]

    @property
    def peak(self) -> int:
        """Bytes in the largest step, and those that cuBLAS allocates for its first product."""
        return max(self.peaks.values()) + WORKSPACE_BYTES


def measure_on_device(
    model: ModelSize, *, lengths: Sequence[int], stats: Sequence[str], dtype: torch.dtype
) -> DeviceMemoryNeed:
    """Device memory of measure: a layer, a sequence's forward, its statistics and those before it.

    Args:
        model: sizes of the model.
        lengths: tokens of each sequence.
        stats: observers of every linear's input.
        dtype: dtype of weights and hidden states.
    """
    longest = max(lengths, default=0)
    size = dtype.itemsize
    layer = size * model.layer.elements
    forwards = [name for name in stats if not of_gradients(name)]
    backwards = [name for name in stats if of_gradients(name)]
    growing = max(
        cost.live_bytes(each, forwards) + _higher_strips(each, forwards) for each in model.layers
    )
    running = cost.forward_bytes(model, longest) * size // FLOAT + max(
        cost.watching_bytes(model, forwards, longest), _folding(model, forwards, longest)
    )
    samples = len(lengths)
    parts = max(cost.further_parts_bytes(each, forwards, samples=samples) for each in model.layers)
    peaks = {
        "a sequence runs": layer + 2 * growing + parts + running,
        "statistics are taken": layer
        + growing
        + max(cost.statistics_bytes(each, forwards) for each in model.layers),
    }
    if goes_back(stats):
        sums = max(cost.statistics_bytes(each, backwards) for each in model.layers)
        back = cost.backward_bytes(model, longest) + cost.watching_bytes(model, backwards, longest)
        peaks["gradients leave the head"] = model.head[1] + cost.way_back_bytes(
            model, longest, copies=3
        )
        parts = max(
            cost.further_parts_bytes(each, backwards, samples=samples) for each in model.layers
        )
        peaks["a gradient goes back"] = layer + 2 * sums + parts + back
    return DeviceMemoryNeed(stage="measure", peaks=peaks)


def _higher_strips(layer: LayerSize, stats: Sequence[str]) -> int:
    """The bytes that a device's Hessians take beyond those of host memory."""
    if HessianObserver.NAME not in stats:
        return 0
    return sum(observer_bytes(k, rows=DEVICE_ROWS) - observer_bytes(k) for _, _, k in layer.groups)


def _folding(model: ModelSize, stats: Sequence[str], tokens: int) -> int:
    """The bytes of an update of the widest Hessian."""
    widest = max(k for _, _, k in model.layer.groups)
    return folding_bytes_on_device(widest, tokens) if HessianObserver.NAME in stats else 0


def quantize_on_device(
    model: ModelSize,
    plan: Plan,
    *,
    lengths: Sequence[int],
    dtype: torch.dtype,
    ranks: int = 1,
) -> DeviceMemoryNeed:
    """Device memory of quantize, on the path that the plan takes.

    Args:
        model: sizes of the model.
        plan: plan of the artifact.
        lengths: tokens of each calibration sequence.
        dtype: dtype in which they run.
        ranks: number of ranks that share the work of a layer, with a device each. What a rank
            receives from another stands beside its own inputs.
    """
    if plan.file_to_file:
        return _files(plan)
    longest = max(lengths, default=cost.CANARY_TOKENS)
    size = dtype.itemsize
    halves = sum(cost.half_hessians(model, plan, rows=DEVICE_ROWS))
    samples = min(SAMPLE_ROWS, sum(lengths))
    kept = FLOAT * samples * sum(k for _, _, k in cost.folds(model.layer)) if plan.needs_rows else 0
    inputs = cost.inputs_bytes(model, plan, longest) * size // FLOAT if plan.needs_text else 0
    widest = max(k for _, _, k in model.layer.groups)
    folding = folding_bytes_on_device(widest, longest) if plan.needs_hessian else 0
    folding += size * longest * widest if plan.needs_text and ranks > 1 else 0
    layer = cost.layer_in_memory(model.layer) if plan.in_float32 else cost.layer_as_stored(model)
    folding += 2 * FLOAT * longest * model.between  # what enters the layer and what leaves it
    narrow = dtype != torch.float32
    # one linear, while it multiplies
    converted = size * model.layer.largest[0] if narrow or not plan.in_float32 else 0
    forward = cost.forward_bytes(model, longest)
    running = forward * size // FLOAT + converted
    peaks = {
        "a sequence runs": layer + halves + kept + inputs + max(folding, running),
        "the quantized layer is put in place": cost.installing_bytes(model, plan),
        "a sequence runs through the quantized layer": cost.installed_bytes(model) + forward,
        "logits of the canary": cost.head_bytes(model, cost.CANARY_TOKENS, plan.head),
    }
    for name, options in plan.smoothings:
        reads = HESSIAN_SUM.name in TRANSFORMS[name].needs(options)
        for _, outputs, k in cost.folds(model.layer):
            rows = sum(outputs)
            hessian = HESSIAN_SUM.nbytes(k) if reads else 0
            taken = TRANSFORMS[name].working_bytes(
                k, rows, options=options, samples=samples, workers=1
            )
            more = _units_beyond_the_first(rows, k)
            peaks[f"{name} of {k} features"] = layer + halves + 2 * kept + hessian + taken + more
    for index, (held, rows, k) in enumerate(cost.groups_in_turn(model, plan)):
        algorithm = ALGORITHMS[plan.algorithm]
        taken = (
            algorithm.working_bytes(k, rows, workers=_units(rows, k), in_place=True)
            if algorithm.ON_DEVICE
            else 0
        )
        peaks[f"group {index}"] = held + taken + rows * k
    refitting = cost.refitting_moments(model, plan, longest, rows=DEVICE_ROWS)
    for index, (fixed, each) in enumerate(refitting):
        peaks[f"refitting {index}"] = fixed + each
    for index, (fixed, each) in enumerate(cost.learning_moments(model, plan, longest)):
        peaks[f"learning {index}"] = fixed + each
    for index, (fixed, each) in enumerate(cost.tuning_moments(model, plan, longest)):
        peaks[f"tuning {index}"] = fixed + each
    return DeviceMemoryNeed(stage="quantize", peaks=peaks)


def validate_on_device(
    model: ModelSize,
    *,
    lengths: Sequence[int],
    models: int,
    dtype: torch.dtype,
    head: HeadPlan | None = None,
) -> DeviceMemoryNeed:
    """Device memory of validate: a layer, the heads, a window's forward, all models' logits.

    Args:
        model: sizes of the model.
        lengths: tokens of each window.
        models: number of models that run: baseline, candidate, noise.
        dtype: dtype of weights and hidden states.
        head: quantization of the candidate's head; None leaves it as it is.
    """
    longest = max(lengths, default=0)
    size = dtype.itemsize
    largest = model.layer.largest[0]
    logits = FLOAT * longest * model.vocabulary
    peaks = {
        "a window runs": size * model.layer.elements
        + cost.forward_bytes(model, longest) * size // FLOAT,
        "a quantized layer is put in place": size * model.layer.elements + (1 + FLOAT) * largest,
        "logits are compared": (models - 1) * model.head[1]
        + cost.head_in_memory(model, head)
        + FLOAT * HEAD_ROWS * model.hidden
        + (models + 1) * logits,
    }
    return DeviceMemoryNeed(stage="validate", peaks=peaks)


def allow_on_device(need: DeviceMemoryNeed, resources: Resources, device: Device) -> int | None:
    """Bytes that a stage's tensors are expected to take on a device; None where it is the CPU.

    Raises:
        ResourceError: they are more than --max-device-memory, or than the device has free.
    """
    if device.is_host:
        return None
    limit, why = _limit(resources, device)
    if limit is not None and need.peak > limit:
        moment = max(need.peaks, key=lambda name: need.peaks[name])
        raise ResourceError(
            f"{need.stage}: tensors take {need.peak} bytes ({text_of(need.peak)}) of "
            f"{device.name} where {moment}, "
            f"{limit} ({text_of(limit)}) {why}",
            f"give --max-device-memory {round_up(need.peak)} or more where it has as much, "
            "shorter sequences, or --device cpu",
        )
    return need.peak


def keeps_hidden_states(
    need: DeviceMemoryNeed, nbytes: int, resources: Resources, device: Device
) -> bool:
    """Whether hidden states of so many bytes fit on a device beside all else, with room to spare.

    They do not where its memory is not known.
    """
    limit, _ = (None, "") if device.is_host else _limit(resources, device)
    return limit is not None and need.peak + nbytes <= SPENT * limit


def _limit(resources: Resources, device: Device) -> tuple[int | None, str]:
    """The bytes that tensors may take on a device, None where it is not known; and why."""
    limit, why = device.free_bytes(), f"are free on {device.name}"
    if resources.max_device_memory is not None:
        allowed = parse_size(resources.max_device_memory)
        if limit is None or allowed <= limit:
            limit, why = allowed, f"is --max-device-memory {resources.max_device_memory}"
    return limit, why


def _files(plan: Plan) -> DeviceMemoryNeed:
    """File to file: units of every thread as stored and written, and the work of rounding them."""
    threads = cpu_threads.usable_cores() + cost.READERS
    names = [plan.algorithm, *([] if plan.head is None else [plan.head.algorithm])]
    units = -(-cost.UNIT // groups.UNIT_ELEMENTS)
    unit = (
        max(ALGORITHMS[name].working_bytes(0, 0, workers=units) for name in names)
        + cost.UNIT_FILES * cost.UNIT
    )
    return DeviceMemoryNeed(stage="quantize", peaks={"rows are rounded": threads * unit})


def _units(rows: int, features: int) -> int:
    """Units of elementwise work, on some rows of a weight, that a device takes as one."""
    return min(groups.AT_ONCE, -(-rows * features // groups.UNIT_ELEMENTS))


def _units_beyond_the_first(rows: int, features: int) -> int:
    return (_units(rows, features) - 1) * groups.unit_bytes(features)
