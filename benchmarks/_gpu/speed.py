"""Whole models on the device, and steps that are replayed as a graph.

The models are random ones, made there layer by layer, without files.
"""

import gc
import statistics
from dataclasses import dataclass, replace
from functools import partial

import torch
from _report import gb
from _synthetic import Shape, llama_config
from torch import Tensor, nn
from transformers import LlamaConfig

from _gpu.products import (
    DTYPE,
    SEED,
    Clock,
    per_second,
    random_linear,
    read_speed,
    scaled_mm_seconds,
)
from _gpu.record import Found, Place
from _gpu.stages import artifact
from quantflow.backends import choose, cuda
from quantflow.backends.backend import Case
from quantflow.benching.generation_speed import random_prompts, time_run
from quantflow.benching.kernel_speed import weight_bytes
from quantflow.core.scheme import LinearScheme, preset
from quantflow.models.parameters import materialize_
from quantflow.models.skeleton import skeleton
from quantflow.runtime.decoder import Decoder
from quantflow.runtime.graphs import GraphDecoder
from quantflow.runtime.linear import QuantLinear
from quantflow.runtime.load import load
from quantflow.runtime.transformers_decoder import TransformersDecoder

SCHEMES = ("FP8", "FP8_DYNAMIC", "W8A8", "W4A16", None)  # None: bfloat16, not quantized
PREFILL_BAR, DECODE_BAR = 0.80, 0.85
BATCH, SHORT = 8, 128  # sequences at once, and the tokens of their prompts
STEPS = 32  # whose bits are compared


@dataclass(frozen=True, kw_only=True)
class RandomModel:
    """A model of random weights on the device.

    Attributes:
        model: transformers' modules, QuantLinear in place of the layers' linears.
        layer_shapes: (out_features, in_features) of the linears of one layer.
        layers: how many there are.
        read: bytes that a decode step reads: linears as their kernels hold them, norms, the head.
        backends: names of what runs the linears.
    """

    model: nn.Module
    layer_shapes: tuple[tuple[int, int], ...]
    layers: int
    read: int
    backends: tuple[str, ...]


def small(place: Place, found: Found) -> None:
    """Time the smaller of the random models."""
    names = list(place.amounts.shapes)
    if len(names) < 2:
        found.absent("a smaller random model", f"size {place.size} has one")
        return
    decoders(place, found, names[0], judged=False)


def large(place: Place, found: Found) -> None:
    """Time the largest of the random models, and judge it."""
    decoders(place, found, list(place.amounts.shapes)[-1], judged=True)


def decoders(place: Place, found: Found, name: str, *, judged: bool) -> None:
    """Time prefill and decode of one shape in every scheme.

    A failure is recorded, and the next scheme goes on.

    Args:
        place: of the check.
        found: is told.
        name: of the shape.
        judged: whether speeds have bars.
    """
    amounts = place.amounts
    shape = replace(amounts.shapes[name], layers=amounts.layers[name])
    clock = Clock(device=torch.device(place.device), rounds=amounts.rounds)
    speed = read_speed(clock)
    found.figure("plain read of the memory", speed / 1e9, "GB/s")
    found.figure(
        "shape",
        f"{shape.hidden} hidden, {shape.intermediate} intermediate, "
        f"{shape.layers} layers of {name}",
    )
    found.figure("prompt and steps", f"{amounts.prompt}, {amounts.steps}", "tokens")
    alone: dict[tuple[int, int], float | None] = {}
    for scheme in SCHEMES:
        called = scheme or "bfloat16"
        try:
            made = random_model(
                shape, None if scheme is None else preset(scheme), device=clock.device
            )
            prefill, step = _timed(made, clock.device, place, found, called)
            _told(made, prefill, step, called, speed, found, judged=judged)
            if scheme is not None and scheme.startswith("FP8"):
                for size in set(made.layer_shapes) - alone.keys():
                    alone[size] = scaled_mm_seconds(clock, amounts.prompt, size, found)
                _beside_cublas(made, prefill, alone, called, amounts.prompt, found, judged=judged)
        except (RuntimeError, NotImplementedError) as error:
            line = (str(error).strip() or type(error).__name__).splitlines()[0]
            found.claim(f"{called}", promised="it runs", found=line[:300], met=False)
        made = None
        gc.collect()
        if place.on_gpu:
            torch.cuda.empty_cache()


def _timed(
    made: RandomModel, device: torch.device, place: Place, found: Found, called: str
) -> tuple[float, float]:
    """Median seconds of a prompt and of a decode step of one sequence.

    Those of several sequences and the memory are recorded.
    """
    amounts, decoder = place.amounts, decoder_of(made.model, device)
    if place.on_gpu:
        torch.cuda.reset_peak_memory_stats(device)
    medians = {}
    for rows, length in ((1, amounts.prompt), (BATCH, min(amounts.prompt, SHORT))):
        runs = []
        for turn in range(amounts.runs + 1):  # the first captures the graph, and is not counted
            prompts = random_prompts(rows, length, vocab_size=decoder.vocab_size, seed=turn)
            run = time_run(decoder, prompts, new_tokens=amounts.steps + 1)
            if turn:
                runs.append((run.first_seconds, statistics.median(run.step_seconds)))
        medians[rows] = tuple(statistics.median(times) for times in zip(*runs, strict=True))
    prefill, step = medians[1]
    found.figure(f"{called}: runs by", ", ".join(made.backends))
    found.figure(f"{called}: prefill", amounts.prompt / prefill, "tokens/s")
    found.figure(f"{called}: decode", 1 / step, "tokens/s")
    found.figure(f"{called}: decode, {BATCH} at once", BATCH / medians[BATCH][1], "tokens/s")
    if place.on_gpu:
        found.figure(
            f"{called}: peak memory of the device", gb(torch.cuda.max_memory_allocated(device))
        )
    return prefill, step


def _told(
    made: RandomModel,
    prefill: float,
    step: float,
    called: str,
    speed: float,
    found: Found,
    *,
    judged: bool,
) -> None:
    """Tell how much of the memory's speed a decode step has."""
    share = made.read / step / speed
    found.figure(f"{called}: bytes that a token reads", made.read / 1e6, "MB")
    found.figure(f"{called}: decode, of a plain read of these bytes", share)
    if judged:
        found.bar(
            f"{called}: decode, one sequence, of a plain read of its bytes",
            promised=f"{DECODE_BAR:.0%}",
            found=f"{share:.0%}",
            met=share >= DECODE_BAR,
        )


def _beside_cublas(
    made: RandomModel,
    prefill: float,
    alone: dict[tuple[int, int], float | None],
    called: str,
    prompt: int,
    found: Found,
    *,
    judged: bool,
) -> None:
    """Tell how much of the speed of its float8 products alone a whole prefill has."""
    seconds = [alone[size] for size in made.layer_shapes]
    if any(one is None for one in seconds):
        found.absent(f"{called}: prefill beside torch._scaled_mm", "torch has no such product here")
        return
    products = made.layers * sum(one for one in seconds if one is not None)
    work = sum(per_second(prompt, size, 1.0) for size in made.layer_shapes) * made.layers
    found.figure(f"{called}: prefill, products of the layers alone", work / prefill, "TFLOP/s")
    found.figure(f"{called}: the same products by torch._scaled_mm", work / products, "TFLOP/s")
    if judged:
        share = products / prefill
        found.bar(
            f"{called}: prefill, of its products by torch._scaled_mm",
            promised=f"{PREFILL_BAR:.0%}",
            found=f"{share:.0%}",
            met=share >= PREFILL_BAR,
        )


def decoder_of(model: nn.Module, device: torch.device) -> Decoder:
    """The decoder of a model as `quantflow.load` has it.

    A GPU replays steps; elsewhere it uses transformers' cache.
    """
    if device.type == cuda.NAME:
        return GraphDecoder(model, device=device, capture=partial(cuda.capture, device=device))
    return TransformersDecoder(model, device=device)


def random_model(shape: Shape, scheme: LinearScheme | None, *, device: torch.device) -> RandomModel:
    """Return a Llama of random weights, made on the device one linear at a time.

    Args:
        shape: its sizes.
        scheme: of the layers' linears, or None for bfloat16.
        device: where it is made, and stays.
    """
    config = LlamaConfig(**{**llama_config(shape), "max_position_embeddings": 1 << 13})
    model = skeleton(config)
    generator = torch.Generator(device).manual_seed(SEED)
    read, names, shapes = 0, [], []
    linears = {
        name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)
    }
    for index, (name, module) in enumerate(linears.items()):
        size = (module.out_features, module.in_features)
        if ".layers.0." in name:
            shapes.append(size)
        if scheme is None or ".layers." not in name:
            continue
        backend, _ = choose(Case(scheme=scheme, device=device, shape=size, dtype=DTYPE))
        linear = random_linear(scheme, size, device=device, seed=index)
        prepared = QuantLinear(linear, bias=None, backend=backend, dtype=DTYPE)
        model.set_submodule(name, prepared)
        read += weight_bytes(prepared._prepared)
        names.append(backend.name)
    for name, parameter in list(model.named_parameters()):
        values = _values(name, parameter.shape, generator, device)
        materialize_(model, {name: values}, dtype=DTYPE)
        read += 0 if "embed_tokens" in name else values.nbytes
    model.to(device)
    used = tuple(dict.fromkeys(names)) or ("torch",)
    return RandomModel(
        model=model, layer_shapes=tuple(shapes), layers=shape.layers, read=read, backends=used
    )


def _values(
    name: str, shape: torch.Size, generator: torch.Generator, device: torch.device
) -> Tensor:
    """Return ones for a norm, random numbers else, in bfloat16."""
    if len(shape) == 1:
        return torch.ones(shape, dtype=DTYPE, device=device)
    values = torch.randn(shape, generator=generator, device=device)
    return values.mul_(0.05 if "embed" in name else shape[1] ** -0.5).to(DTYPE)


def graph(place: Place, found: Found) -> None:
    """Decode the example artifact in three ways.

    They are steps that are replayed, the same steps one by one, and transformers' own cache.
    """
    for dtype in (torch.float32, DTYPE) if place.on_gpu else (torch.float32,):
        _graph(place, found, dtype)


def _graph(place: Place, found: Found, dtype: torch.dtype) -> None:
    """Compare bits of steps, and in float32, where the order of sums hardly counts, tokens."""
    device, called = torch.device(place.device), str(dtype).removeprefix("torch.")
    loaded = load(
        artifact(place, "W4A16"), decoder="transformers", device=place.kind, dtype=dtype, exact=True
    )
    model = loaded.model
    assert model is not None  # these are transformers' modules
    for reason in loaded.reasons[1:]:
        found.absent("replayed steps", reason)
    found.figure(f"{called}: linears run by", ", ".join(sorted(set(loaded.backends.values()))))
    decoders: dict[str, Decoder] = {
        "steps one by one": GraphDecoder(model, device=device, capture=lambda step: step),
        "transformers' own cache": TransformersDecoder(model, device=device),
    }
    if device.type == cuda.NAME:
        decoders = {"replayed steps": decoder_of(model, device), **decoders}
    else:
        found.absent(
            "steps replayed as a CUDA graph", "there is no GPU; the same steps ran one by one"
        )
    prompt = random_prompts(2, 12, vocab_size=loaded.decoder.vocab_size, seed=SEED)
    logits = {name: greedy(decoder, prompt) for name, decoder in decoders.items()}
    (first, ours), *others = logits.items()
    for name, theirs in others:
        pair = f"{called}: {first} and {name}"
        found.figure(f"{pair}: largest difference of logits", float((ours - theirs).abs().max()))
        if name == "steps one by one":
            same = torch.equal(ours, theirs)
            found.claim(
                pair, promised="the same bits", found="the same" if same else "others", met=same
            )
        elif dtype == torch.float32:
            same = torch.equal(ours.argmax(-1), theirs.argmax(-1))
            found.claim(
                pair, promised="the same tokens", found="the same" if same else "others", met=same
            )
    for name, decoder in decoders.items():
        run = time_run(decoder, prompt[:1], new_tokens=STEPS)
        found.figure(
            f"{called}: {name}, tokens per second", 1 / statistics.median(run.step_seconds)
        )


def greedy(decoder: Decoder, prompt: Tensor) -> Tensor:
    """Return the logits of STEPS tokens chosen greedily, [steps, B, V] float32 on the CPU."""
    decoder.begin(rows=len(prompt), capacity=prompt.shape[1] + STEPS)
    found, step = [], prompt.to(decoder.device)
    with torch.inference_mode():
        for _ in range(STEPS):
            logits = decoder.forward(step)
            found.append(logits.float().cpu())
            step = logits.argmax(dim=-1, keepdim=True)
    return torch.stack(found)
