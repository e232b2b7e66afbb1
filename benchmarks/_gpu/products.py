"""Single linears on the device: that each kernel computes what the equation says, and how fast.

A weight is random, made on the device. Seconds are medians of calls, each after a buffer was
written that is larger than the caches, so that the weight comes from memory; on a GPU they are the
device's own, between two events.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional

from _gpu.record import Found, Place
from quantflow.backends import BACKENDS, choose
from quantflow.backends.backend import Backend, Case
from quantflow.benching.kernel_speed import weight_bytes
from quantflow.core.qtensor import QTensor, QuantizedLinear, qvalue_dtype
from quantflow.core.scheme import LinearScheme, preset

SCHEMES = ("FP8", "FP8_DYNAMIC", "FP8_BLOCK", "W8A8", "W8A16", "W4A16")
FLUSH = 256 << 20  # bytes written before each call
OF_NORM = 0.01  # outputs are rounded to bfloat16, 2^-9 each, and so are scales of W8A16 and W4A16
DTYPE = torch.bfloat16
SEED = 0


def products(place: Place, found: Found) -> None:
    """Time a plain read of the device's memory, then every scheme's product.

    A product is timed at one token and at a prompt's.
    """
    clock = Clock(device=torch.device(place.device), rounds=place.amounts.rounds)
    speed = read_speed(clock)
    found.figure("plain read of the memory", speed / 1e9, "GB/s")
    if (promised := makers_speed(place)) is not None:
        found.figure("memory, as its clock and width have it", promised / 1e9, "GB/s")
    for shape in place.amounts.products:
        size = f"{shape[0]}x{shape[1]}"
        many = place.amounts.prompt
        best = scaled_mm_seconds(clock, many, shape, found)
        if best is not None:
            found.figure(
                f"{size}, {many} tokens: torch._scaled_mm alone",
                per_second(many, shape, best),
                "TFLOP/s",
            )
        plain = torch.randn(shape, device=clock.device).to(DTYPE)
        for tokens in (1, many):
            x = inputs(tokens, shape[1], clock.device)
            seconds = clock.seconds(lambda x=x, plain=plain: functional.linear(x, plain))
            _told(
                found,
                f"{size}, {tokens} tokens: bfloat16 of torch",
                tokens,
                shape,
                seconds,
                plain.nbytes,
                speed,
            )
        for name in SCHEMES:
            _scheme(preset(name), shape, clock, found, speed=speed, many=many, best=best)


def _scheme(
    scheme: LinearScheme,
    shape: tuple[int, int],
    clock: "Clock",
    found: Found,
    *,
    speed: float,
    many: int,
    best: float | None,
) -> None:
    """Check and time one scheme; what fails is told, and the next goes on."""
    size = f"{shape[0]}x{shape[1]}"
    try:
        linear = random_linear(scheme, shape, device=clock.device, seed=SEED)
        backend, _ = choose(Case(scheme=scheme, device=clock.device, shape=shape, dtype=DTYPE))
        prepared = backend.prepare(linear, DTYPE)
        for tokens in (1, many):
            x = inputs(tokens, shape[1], clock.device)
            difference = apart_from_reference(backend, prepared, linear, x)
            what = f"{size}, {tokens} tokens: {scheme.name} by {backend.name}"
            found.claim(
                what,
                promised=f"{OF_NORM:g} of the norm",
                found=f"{difference:.2g}",
                met=difference <= OF_NORM,
            )
            seconds = clock.seconds(lambda x=x: backend.linear(x, prepared, None))
            _told(found, what, tokens, shape, seconds, weight_bytes(prepared), speed)
            if tokens > 1 and best is not None and scheme.weights.kind == "float":
                found.figure(
                    f"{what}, its inputs' rounding with it, of torch._scaled_mm", best / seconds
                )
    except (RuntimeError, NotImplementedError) as error:
        line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        found.claim(f"{size}: {scheme.name}", promised="it runs", found=line[:300], met=False)


def _told(
    found: Found,
    what: str,
    tokens: int,
    shape: tuple[int, int],
    seconds: float,
    nbytes: int,
    speed: float,
) -> None:
    """Report a time as its bound.

    That is bytes of the weight per second at one token, operations per second at many.
    """
    if tokens == 1:
        found.figure(
            what, nbytes / seconds / 1e9, f"GB/s, {nbytes / seconds / speed:.0%} of a plain read"
        )
    else:
        found.figure(what, per_second(tokens, shape, seconds), "TFLOP/s")


def per_second(tokens: int, shape: tuple[int, int], seconds: float) -> float:
    """Return 10^12 multiplications and additions per second of a product."""
    return 2 * tokens * shape[0] * shape[1] / seconds / 1e12


@dataclass(kw_only=True)
class Clock:
    """Times calls on a device.

    Attributes:
        device: where they run.
        rounds: how many; the first two are not counted.
    """

    device: torch.device
    rounds: int
    _buffer: Tensor = field(init=False)

    def __post_init__(self) -> None:
        """Make the buffer that empties the caches."""
        self._buffer = torch.zeros(FLUSH // 4, dtype=torch.int32, device=self.device)

    def seconds(self, call: Callable[[], object], *, cold: bool = True) -> float:
        """Return the median seconds of a call; `cold` ones find nothing of theirs in the caches."""
        taken = []
        for _ in range(self.rounds + 2):
            if cold:
                self._buffer.add_(1)
            taken.append(self._once(call))
        return statistics.median(taken[2:])

    def _once(self, call: Callable[[], object]) -> float:
        if self.device.type != "cuda":
            begin = time.perf_counter()
            call()
            return time.perf_counter() - begin
        begin_event, end_event = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin_event.record()
        call()
        end_event.record()
        torch.cuda.synchronize(self.device)
        return begin_event.elapsed_time(end_event) / 1e3


def read_speed(clock: Clock) -> float:
    """Bytes per second of a plain read of much more than the caches hold.

    It is the better of a sum and a copy.
    """
    data = torch.zeros(
        FLUSH,
        dtype=torch.float32 if clock.device.type == "cuda" else torch.int8,
        device=clock.device,
    )
    other = torch.empty_like(data)
    copied = 2 * data.nbytes / clock.seconds(lambda: other.copy_(data), cold=False)
    return max(
        copied, data.nbytes / clock.seconds(lambda: data.view(torch.float32).sum(), cold=False)
    )


def makers_speed(place: Place) -> float | None:
    """Bytes per second of the device's memory by clock and width, two transfers a cycle.

    None if torch is silent.
    """
    if not place.on_gpu:
        return None
    about = torch.cuda.get_device_properties(place.device)
    clock, width = (
        getattr(about, "memory_clock_rate", None),
        getattr(about, "memory_bus_width", None),
    )
    return 2 * clock * 1e3 * width / 8 if clock and width else None  # kHz, bits


def scaled_mm_seconds(
    clock: Clock, tokens: int, shape: tuple[int, int], found: Found
) -> float | None:
    """Seconds of torch's own product of e4m3 with scales of one, which is cuBLAS' on a GPU.

    None where it has none.
    """
    codes = inputs(tokens, shape[1], clock.device).to(torch.float8_e4m3fn)
    weight = torch.randn(shape, device=clock.device).to(torch.float8_e4m3fn).t()
    one = torch.ones((), device=clock.device)
    try:
        return clock.seconds(lambda: torch._scaled_mm(codes, weight, one, one, out_dtype=DTYPE))
    except (RuntimeError, NotImplementedError) as error:
        found.absent(
            f"torch._scaled_mm of {shape[0]}x{shape[1]}", str(error).strip().splitlines()[0][:200]
        )
        return None


def inputs(tokens: int, features: int, device: torch.device) -> Tensor:
    """Return random inputs, [tokens, features] bfloat16."""
    generator = torch.Generator(device).manual_seed(SEED)
    return torch.randn(tokens, features, generator=generator, device=device).to(DTYPE)


def random_linear(
    scheme: LinearScheme, shape: tuple[int, int], *, device: torch.device, seed: int
) -> QuantizedLinear:
    """A linear of random codes made on the device.

    Its outputs are about as large as its inputs.

    Args:
        scheme: symmetric, of integers or e4m3, per tensor, channel, group or block.
        shape: (out_features, in_features).
        device: where it is made.
        seed: of the codes.
    """
    weights, generator = scheme.weights, torch.Generator(device).manual_seed(seed)
    if weights.kind == "float":
        codes = torch.randn(shape, generator=generator, device=device).mul_(64).clamp_(-448, 448)
        qvalue, deviation = codes.to(qvalue_dtype(weights)), 64.0
    else:
        low, high = weights.qmin, weights.qmax + 1
        qvalue = torch.randint(
            low, high, shape, generator=generator, device=device, dtype=torch.int8
        )
        deviation = (high - low) / 12**0.5
    size = (
        (1, 1)
        if weights.granularity == "per_tensor"
        else (shape[0], shape[1] // (weights.group_size or shape[1]))
    )
    block = weights.block_rows
    scale = (
        torch.rand(size, generator=generator, device=device)
        .add_(0.5)
        .div_(deviation * shape[1] ** 0.5)
    )
    if block > 1:  # its rows have one scale
        scale = scale[::block].repeat_interleave(block, dim=0)[: shape[0]]
    static = scheme.input is not None and scheme.input.measured
    return QuantizedLinear(
        weight=QTensor(qvalue=qvalue, scale=scale, zero_point=None, scheme=weights),
        scheme=scheme,
        # normal inputs, hardly one beyond 6
        input_scale=torch.tensor([6.0 / 448], device=device) if static else None,
    )


def apart_from_reference(
    backend: Backend, prepared: object, linear: QuantizedLinear, x: Tensor
) -> float:
    """Return how far outputs are from the equation in float32, in units of their norm."""
    reference = BACKENDS["reference"]
    exact = reference.linear(x.float(), reference.prepare(linear, torch.float32), None)
    return float((backend.linear(x, prepared, None).float() - exact).norm() / exact.norm())
