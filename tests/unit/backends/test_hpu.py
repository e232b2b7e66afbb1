"""The Gaudi backend against a stand-in for its bridge: its calls, its results, its reasons.

The stand-in does in float32 what the bridge is published to do. Whether the device does the same
was not tried.
"""

import sys
from dataclasses import replace
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace

import pytest
import torch

from quantflow.backends import BACKENDS, choose, hpu
from quantflow.backends.backend import Case
from quantflow.core.qtensor import QTensor, QuantizedLinear
from quantflow.core.scheme import PRESETS, LinearScheme, with_float8
from quantflow.errors import UnsupportedError, UsageError
from quantflow.runtime.load import load

HPU_BACKEND, REFERENCE = BACKENDS["hpu"], BACKENDS["reference"]
HPU, CPU = torch.device("hpu"), torch.device("cpu")
FP8 = with_float8(PRESETS["FP8"], "gaudi2")


def reason(scheme: LinearScheme = FP8, *, device=HPU, dtype=torch.bfloat16) -> str | None:
    return HPU_BACKEND.why_not(Case(scheme=scheme, device=device, shape=(8, 16), dtype=dtype))


@pytest.fixture
def bridge(monkeypatch):
    """A stand-in for habana_frameworks and its operators, which keeps what it was called with."""
    calls = []

    def cast(x, scale, stochastic, is_amax, dtype):
        calls.append(("cast", scale.item(), stochastic, is_amax, dtype))
        return (x.float() * scale).clamp(-240, 240).to(dtype), None

    def gemm(*, A, trans_A, B, trans_B, D, out_dtype, A_scale_inv, B_scale_inv, bias, accumulate):
        assert (trans_A, trans_B, D, accumulate) == (False, True, None, False)
        calls.append(("gemm", A.dtype, B.dtype))
        result = A.float() @ B.float().t() * A_scale_inv * B_scale_inv
        return (result if bias is None else result + bias).to(out_dtype)

    package, inner = ModuleType("habana_frameworks"), ModuleType("habana_frameworks.torch")
    package.__spec__ = ModuleSpec("habana_frameworks", None)
    state = SimpleNamespace(available=True, name="GAUDI2", wrapped=[], calls=calls)
    inner.hpu = SimpleNamespace(
        is_available=lambda: state.available,
        get_device_name=lambda: state.name,
        wrap_in_hpu_graph=lambda model: state.wrapped.append(model) or model,
    )
    monkeypatch.setitem(sys.modules, "habana_frameworks", package)
    monkeypatch.setitem(sys.modules, "habana_frameworks.torch", inner)
    monkeypatch.setattr(
        torch.ops, "hpu", SimpleNamespace(cast_to_fp8_v2=cast, fp8_gemm_v2=gemm), raising=False
    )
    return state


def linear_of(scheme: LinearScheme, *, input_scale: float = 2.0**-4) -> QuantizedLinear:
    generator = torch.Generator().manual_seed(0)
    qvalue = (torch.randn(8, 16, generator=generator) * 30).clamp(-240, 240).to(torch.float8_e4m3fn)
    rows = 8 if scheme.weights.granularity == "per_channel" else 1
    scale = torch.exp2(torch.randint(-6, -2, (rows, 1), generator=generator).float())
    return QuantizedLinear(
        weight=QTensor(qvalue=qvalue, scale=scale, scheme=scheme.weights),
        scheme=scheme,
        input_scale=torch.tensor([input_scale]),
    )


CHANNEL = replace(FP8, weights=replace(FP8.weights, granularity="per_channel"))


@pytest.mark.parametrize("scheme", [FP8, CHANNEL], ids=["per tensor", "per channel"])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("lead", [(3,), (2, 5), ()])
def test_the_product_is_that_of_the_reference_with_the_measured_scales(
    bridge, scheme, biased, lead
):
    linear = linear_of(scheme)
    assert reason(scheme) is None
    x = torch.randn(*lead, 16, generator=torch.Generator().manual_seed(1)).bfloat16()
    bias = torch.arange(8.0).bfloat16() if biased else None
    found = HPU_BACKEND.linear(x, HPU_BACKEND.prepare(linear, torch.bfloat16), bias)
    expected = REFERENCE.linear(x, REFERENCE.prepare(linear, torch.bfloat16), bias)
    assert found.shape == expected.shape and found.dtype == torch.bfloat16
    assert torch.allclose(found.float(), expected.float(), rtol=2**-6, atol=2**-6)
    assert bridge.calls[0] == ("cast", 16.0, False, False, torch.float8_e4m3fn)
    assert bridge.calls[1] == ("gemm", torch.float8_e4m3fn, torch.float8_e4m3fn)


def test_inputs_beyond_the_measured_maximum_saturate_at_the_scale_that_was_measured(bridge):
    prepared = HPU_BACKEND.prepare(linear_of(FP8, input_scale=0.5), torch.bfloat16)
    at, beyond = (
        HPU_BACKEND.linear(torch.full((1, 16), value).bfloat16(), prepared, None)
        for value in (120.0, 1e4)
    )
    assert torch.equal(at, beyond)


def test_without_the_package_the_reason_names_it():
    assert "habana_frameworks" in reason() and "not installed" in reason()
    assert "not installed" in hpu.missing_here()


def test_on_another_device_the_reason_names_the_device():
    assert reason(device=CPU) == "hpu runs on hpu, not on cpu"
    with pytest.raises(UsageError, match="backend hpu: hpu runs on hpu, not on cpu"):
        choose(Case(scheme=FP8, device=CPU, shape=(8, 16), dtype=torch.bfloat16), backend="hpu")


def test_a_package_without_a_device_and_one_that_fails_to_import_are_told(bridge, monkeypatch):
    bridge.available = False
    assert reason() == "hpu needs a Gaudi device; habana_frameworks finds none"
    monkeypatch.setitem(sys.modules, "habana_frameworks.torch", None)
    assert "importing it failed" in reason()


@pytest.mark.parametrize(
    ("scheme", "dtype", "said"),
    [
        (PRESETS["W8A8"], torch.bfloat16, "e4m3fn weights"),
        (PRESETS["W4A16"], torch.bfloat16, "e4m3fn weights"),
        (PRESETS["FP8_DYNAMIC"], torch.bfloat16, "measured e4m3fn input scale"),
        (FP8, torch.float32, "bfloat16 inputs on hpu"),
        (
            PRESETS["FP8"],
            torch.bfloat16,
            "holds 240 on GAUDI2, weights in e4m3fn reach 448; quantize with float8 gaudi2",
        ),
    ],
)
def test_what_gaudi_cannot_run_is_said(bridge, scheme, dtype, said):
    assert said in reason(scheme, dtype=dtype)


def test_gaudi3_holds_the_whole_of_e4m3fn_and_is_preferred_over_the_reference(bridge):
    bridge.name = "GAUDI3"
    chosen, reasons = choose(
        Case(scheme=PRESETS["FP8"], device=HPU, shape=(8, 16), dtype=torch.bfloat16)
    )
    assert chosen.name == "hpu" and reasons == {} and next(iter(BACKENDS)) == "hpu"


def test_graphs_are_the_bridges(bridge):
    model = torch.nn.Linear(2, 2)
    hpu.wrap_in_graph(model)
    assert bridge.wrapped == [model]


def test_loading_for_gaudi_without_it_is_refused_before_anything_is_read(tmp_path):
    with pytest.raises(UnsupportedError, match="device hpu: needs the package habana_frameworks"):
        load(tmp_path / "missing", device="hpu")
