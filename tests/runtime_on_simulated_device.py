"""The runtime on a device, which is simulated.

Weights and scales cross once, when they are loaded, then token ids and logits alone.

The device is simulated, no GPU ran this. test_device.py runs these tests in a process of their own.
"""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer, StaticLayer

import quantflow
from quantflow.backends import BACKENDS
from quantflow.core.kv import KVScales
from quantflow.core.qtensor import QTensor, QuantizedLinear, qvalue_dtype
from quantflow.core.scheme import PRESETS, LinearScheme
from quantflow.planning.recipe import Calibration, HeadSettings, KVCacheSettings, Quantize
from quantflow.runtime import decoding, modules
from quantflow.runtime import load as runtime
from quantflow.runtime.decoder import Decoder
from quantflow.runtime.decoding import Beams, Contrastive, Lookup, Rules, generate
from quantflow.runtime.decoding.constrained import constrained_search
from quantflow.runtime.graphs import GraphDecoder
from quantflow.runtime.transformers_decoder import TransformersDecoder
from tests.simulated_gpu import GPU, KIND, AcrossError, SimulatedGpu

STEPS = 4
ARTIFACTS: dict[str, dict[str, Any]] = {
    "zero points": {"scheme": "W4A16_ASYM", "algorithm": "rtn", "group_size": 32},
    "static inputs, a head, a cache": {
        "scheme": "FP8",
        "kv_cache": KVCacheSettings(scheme="FP8", granularity="per_head"),
        "head": HeadSettings(scheme="W8A16"),
    },
    "asymmetric inputs": {"scheme": "W8A8_STATIC", "algorithm": "rtn"},
    "inputs per token": {"scheme": "FP8_DYNAMIC", "algorithm": "rtn"},
    "microscaled": {"scheme": "NVFP4", "algorithm": "rtn"},
}


def put(tensor: Tensor) -> Tensor:
    return tensor.to(GPU)


def fetch(tensor: Tensor) -> Tensor:
    return tensor.to("cpu")


@pytest.fixture
def simulated(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimulatedGpu]:
    """The device, entered by the test; weights cross in `filled`, and what is named beside it."""
    monkeypatch.setattr(runtime, "_MISSING", {**runtime._MISSING, KIND: lambda _: None})
    # Under inference_mode the operators that a mode sees are others; no gradient is needed here
    # either.
    monkeypatch.setattr(decoding, "_run", torch.no_grad()(decoding._run.__wrapped__))
    for name in ("begin", "forward", "forward_hidden", "keep"):
        monkeypatch.setattr(
            GraphDecoder, name, torch.no_grad()(getattr(GraphDecoder, name).__wrapped__)
        )
    # so that `torch.tensor` goes the way of every other operator
    torch._C._set_only_lift_cpu_tensors(True)
    made_empty = (DynamicLayer.lazy_initialization, StaticLayer.lazy_initialization)
    gpu = SimulatedGpu(
        modules.filled, QuantizedLinear.to, KVScales.to, put, fetch, constrained_search, *made_empty
    )
    monkeypatch.setattr(gpu, "computed", Waiting(gpu))
    yield gpu
    torch._C._set_only_lift_cpu_tensors(False)


class Waiting:
    """What computes on the device, and counts the numbers that the host waited for."""

    def __init__(self, gpu: SimulatedGpu) -> None:
        self.computed, self.count = gpu.computed, 0

    def __call__(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return self.computed(func, args, kwargs)


def waited(gpu: SimulatedGpu) -> int:
    return gpu.computed.count  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def artifacts(
    llama: Path, text_files: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    folder, made = tmp_path_factory.mktemp("artifacts"), {}
    calibration = Calibration(source=str(text_files["calibration"]), samples=3, sequence_length=32)
    measured = quantflow.measure(llama, folder / "1", calibration=calibration).folder
    for name, words in ARTIFACTS.items():
        quantflow.quantize(
            llama, folder / "2" / name, entry=Quantize(name="a", **words), measurement=measured
        )
        made[name] = quantflow.export(folder / "2" / name, folder / name).folder
    return made


def prompt(rows: int = 2, length: int = 7) -> Tensor:
    return torch.randint(2, 300, (rows, length), generator=torch.Generator().manual_seed(0))


def logits(decoder: Decoder, ids: Tensor, *, padding: Tensor | None = None) -> list[Tensor]:
    """Return the logits of a prompt and of some steps of given tokens, in host memory."""
    decoder.begin(rows=len(ids), capacity=ids.shape[1] + STEPS)
    found = [
        fetch(decoder.forward(put(ids) if decoder.device.type == KIND else ids, padding=padding))
    ]
    for step in range(STEPS):
        token = torch.full((len(ids), 1), 5 + step)
        found.append(fetch(decoder.forward(put(token) if decoder.device.type == KIND else token)))
    return found


def open_there(folder: Path) -> runtime.Loaded:
    return runtime.load(folder, decoder="transformers", device=GPU, exact=True)


@pytest.mark.parametrize("name", ARTIFACTS)
def test_a_decoder_on_a_device_has_the_logits_of_the_cpu_and_only_ids_and_logits_cross_for_a_token(
    name: str, artifacts: dict[str, Path], simulated: SimulatedGpu
) -> None:
    here = runtime.load(artifacts[name], decoder="transformers", backend="reference", exact=True)
    expected = logits(here.decoder, prompt())
    with simulated:
        there = open_there(artifacts[name])
        assert set(there.backends.values()) == {"reference"}
        assert there.model is not None
        for layer in there.model.model.layers:
            # inputs that are rounded at all are rounded once for all that receive them
            attention, mlp = layer.self_attn, layer.mlp
            rounds = name != "zero points"
            assert (attention.q_proj.shared is not None) == rounds
            assert attention.q_proj.shared is attention.k_proj.shared is attention.v_proj.shared
            assert mlp.gate_proj.shared is mlp.up_proj.shared
            assert not rounds or mlp.gate_proj.shared is not attention.q_proj.shared
        put_before, fetched_before = simulated.put_bytes, simulated.fetched_bytes
        found = logits(there.decoder, prompt())
        ids = prompt().nbytes + STEPS * 2 * 8
        assert simulated.put_bytes - put_before == ids
        assert simulated.fetched_bytes - fetched_before == sum(tensor.nbytes for tensor in expected)
    # Where inputs are rounded, another order of sums turns some to the other neighbour.
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours - theirs).norm() <= (1e-4 if name == "zero points" else 0.02) * theirs.norm()


@pytest.mark.parametrize("padded", [False, True])
def test_steps_of_a_fixed_cache_cross_no_more_and_wait_for_no_number(
    padded: bool,
    artifacts: dict[str, Path],
    simulated: SimulatedGpu,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # as under a capture
    monkeypatch.setattr("transformers.masking_utils.is_tracing", lambda *_: True)
    here = runtime.load(
        artifacts["zero points"], decoder="transformers", backend="reference", exact=True
    )
    assert here.model is not None
    padding = torch.tensor([0, 2])
    expected = logits(
        TransformersDecoder(here.model), prompt(), padding=padding if padded else None
    )
    with simulated:
        there = open_there(artifacts["zero points"])
        assert there.model is not None
        decoder = GraphDecoder(there.model, device=GPU, capture=lambda step: step)
        told = put(padding) if padded else None
        logits(decoder, prompt())  # the cache takes its memory
        before, waits = simulated.put_bytes, waited(simulated)
        found = logits(decoder, prompt(), padding=told)
        assert waited(simulated) == waits
        assert simulated.put_bytes - before == prompt().nbytes + STEPS * 2 * 8
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)


PLAIN_SCALES = {
    name: scheme for name, scheme in PRESETS.items() if scheme.weights.scale_format == "float"
}


def random_linear(scheme: LinearScheme, shape: tuple[int, int]) -> QuantizedLinear:
    weights = scheme.weights
    codes = torch.randint(-2, 2, shape, generator=torch.Generator().manual_seed(0))
    size = (
        (1, 1)
        if weights.granularity == "per_tensor"
        else (shape[0], shape[1] // (weights.group_size or shape[1]))
    )
    zero_point = None if weights.symmetric else torch.ones(size, dtype=torch.int8)
    qvalue = codes.to(qvalue_dtype(weights))
    linear = QTensor(
        qvalue=qvalue, scale=torch.full(size, 0.5), zero_point=zero_point, scheme=weights
    )
    static = scheme.input is not None and scheme.input.measured
    return QuantizedLinear(
        weight=linear,
        scheme=scheme,
        input_scale=torch.full((1,), 0.1) if static else None,
        input_zero_point=torch.ones(1, dtype=torch.int8)
        if static and not scheme.input.symmetric
        else None,
    )


@pytest.mark.parametrize("name", PLAIN_SCALES)
def test_the_reference_waits_for_no_number_so_that_a_step_can_be_captured(
    name: str, simulated: SimulatedGpu
) -> None:
    linear, reference = random_linear(PLAIN_SCALES[name], (128, 256)), BACKENDS["reference"]
    x = torch.randn(2, 256, generator=torch.Generator().manual_seed(1))
    expected = reference.linear(x, reference.prepare(linear, torch.float32), None)
    with simulated:
        prepared, there = reference.prepare(linear.to(GPU), torch.float32), put(x)
        before = waited(simulated)
        found = fetch(reference.linear(there, prepared, None))
        assert waited(simulated) == before
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


METHODS: dict[str, dict[str, Any]] = {
    "greedily": {},
    "with rules": {
        "rules": Rules(
            repetition_penalty=1.2,
            frequency_penalty=0.1,
            no_repeat_ngram_size=2,
            bad_words=((7, 8),),
        ),
        "padding": torch.tensor([0, 2]),
    },
    "beams": {"method": Beams(count=2), "eos_token_id": 1},
    "forced words": {"method": Beams(count=2, force_words=((9,),))},
    "contrastive": {"method": Contrastive(alpha=0.6, top_k=3)},
    "lookup": {"method": Lookup(tokens=2), "rows": 1},
}


@pytest.mark.parametrize("fixed", [False, True], ids=["a growing cache", "a fixed cache"])
@pytest.mark.parametrize("way", METHODS)
def test_every_way_to_generate_stays_on_the_device(
    way: str, fixed: bool, artifacts: dict[str, Path], simulated: SimulatedGpu
) -> None:
    words = dict(METHODS[way])
    ids, padding = prompt(words.pop("rows", 2)), words.pop("padding", None)
    crops = way == "lookup"
    here = runtime.load(
        artifacts["zero points"],
        decoder="transformers",
        backend="reference",
        exact=True,
        crops=crops,
    )
    expected = generate(here.decoder, ids, max_new_tokens=6, padding=padding, **words)
    with simulated:
        there = runtime.load(
            artifacts["zero points"], decoder="transformers", device=GPU, exact=True, crops=crops
        )
        assert there.model is not None
        decoder = (
            GraphDecoder(there.model, device=GPU, capture=lambda step: step)
            if fixed
            else there.decoder
        )
        generate(decoder, put(ids), max_new_tokens=2, **words)  # the cache takes its memory
        before = simulated.put_bytes
        told = None if padding is None else put(padding)
        found = fetch(generate(decoder, put(ids), max_new_tokens=6, padding=told, **words))
        more = simulated.put_bytes - before - ids.nbytes - (0 if told is None else told.nbytes)
    # Forced words keep what they follow in lists; a fixed cache of another number of rows brings a
    # count for each layer.
    layers, caches = 2, 12 if fixed and way in ("beams", "contrastive") else 0
    assert way == "forced words" or more <= 8 * layers * caches
    assert torch.equal(found, expected)


@pytest.mark.parametrize("broken", ["scales of caches stay in host memory", "weights stay there"])
def test_the_simulation_fails_where_a_crossing_of_the_runtime_is_forgotten(
    broken: str,
    artifacts: dict[str, Path],
    simulated: SimulatedGpu,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    owner = KVScales if broken.startswith("scales") else QuantizedLinear
    monkeypatch.setattr(owner, "to", lambda self, device: self)
    with (
        simulated,
        pytest.raises((AcrossError, RuntimeError), match="two devices|crosses outside|subclass"),
    ):
        logits(open_there(artifacts["static inputs, a head, a cache"]).decoder, prompt())


def test_scales_that_are_there_are_handed_back() -> None:
    scales = SimpleNamespace(keys=torch.ones(1), values=torch.ones(1))
    assert KVScales.to(scales, torch.device("cpu")) is scales
