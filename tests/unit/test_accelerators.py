"""Kinds of GPU: one place names them, and GPUs of all kinds go the same ways."""

import io
import tokenize
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import quantflow
from quantflow import accelerators
from quantflow.accelerators import GPUS, is_gpu, kind_of
from quantflow.backends import BACKENDS
from quantflow.backends.backend import Case
from quantflow.core.device import open_device
from quantflow.core.scheme import preset
from quantflow.errors import UnsupportedError
from quantflow.numerics import product

PACKAGE = Path(quantflow.__file__).parent
HERE = PACKAGE / "accelerators.py"
INTELS = SimpleNamespace(name="Max 1550", version="12.60.7", has_fp64=True)
AMDS = SimpleNamespace(name="MI300X", major=9, minor=4)
NVIDIAS = SimpleNamespace(name="H100", major=9, minor=0)


@pytest.fixture
def found(monkeypatch):
    """Let torch find two GPUs of a kind."""

    def find(kind, properties, **versions):
        module = torch.get_device_module(kind)
        monkeypatch.setattr(module, "is_available", lambda: True)
        monkeypatch.setattr(module, "device_count", lambda: 2)
        monkeypatch.setattr(module, "get_device_properties", lambda device: properties)
        for name in ("cuda", "hip", "xpu"):
            monkeypatch.setattr(torch.version, name, versions.get(name), raising=False)
        if kind == "cuda":
            capability = (properties.major, properties.minor)
            monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)

    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    return find


def test_no_other_file_names_a_kind_of_gpu_in_a_string():
    named = []
    for path in sorted(PACKAGE.rglob("*.py")):
        for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
            if token.type == tokenize.STRING and token.string.strip("\"'") in GPUS:
                named.append(path)
    assert set(named) == {HERE}


def test_kinds_are_read_from_the_names_of_devices():
    assert [kind_of(name) for name in ("cpu", "cuda", "cuda:11", "xpu:1")] == [
        "cpu",
        "cuda",
        "cuda",
        "xpu",
    ]
    assert [is_gpu(kind) for kind in ("cuda", "xpu", "cpu", "hpu", "mps")] == [True] * 2 + [
        False
    ] * 3


@pytest.mark.parametrize(
    ("kind", "properties", "versions", "key"),
    [
        (
            "cuda",
            NVIDIAS,
            {"cuda": "13.0"},
            {"model": "H100", "capability": "9.0", "cuda": "13.0", "workspace": ":4096:8"},
        ),
        (
            "cuda",
            AMDS,
            {"hip": "7.1"},
            {"model": "MI300X", "capability": "9.4", "hip": "7.1", "workspace": ":4096:8"},
        ),
        (
            "xpu",
            INTELS,
            {"xpu": "20250302"},
            {"model": "Max 1550", "capability": "12.60.7", "xpu": "20250302"},
        ),
    ],
    ids=["NVIDIA", "AMD", "Intel"],
)
def test_a_gpu_of_each_maker_is_opened_and_in_the_key(found, kind, properties, versions, key):
    found(kind, properties, **versions)
    device = open_device(f"{kind}:1")
    assert device.name == f"{kind}:1" and device.is_gpu
    assert device.key() == {"device": {"kind": kind, **key}}
    with pytest.raises(UnsupportedError, match=f"--device {kind}:2: torch finds 2") as refused:
        open_device(f"{kind}:2")
    assert refused.value.remedy == f"use {kind}:0 to {kind}:1"


@pytest.mark.parametrize(
    ("kind", "versions", "built", "needed"),
    [
        ("cuda", {}, "is built without CUDA or ROCm", "CUDA or ROCm"),
        ("cuda", {"hip": "7.1"}, "is built for ROCm 7.1", "CUDA or ROCm"),
        ("xpu", {}, "is built without XPU", "XPU"),
        ("xpu", {"xpu": "20250302"}, "is built for XPU 20250302", "XPU"),
    ],
)
def test_a_gpu_that_is_not_there_says_what_torch_is_built_for(
    found, monkeypatch, kind, versions, built, needed
):
    found(kind, NVIDIAS, **versions)
    monkeypatch.setattr(torch.get_device_module(kind), "is_available", lambda: False)
    with pytest.raises(UnsupportedError, match=f"torch .* {built} and finds no device") as refused:
        open_device(kind)
    assert refused.value.exit_code == 6
    assert refused.value.remedy.endswith(f"a torch for {needed}")


def test_a_gpu_without_float64_is_refused(found):
    found("xpu", SimpleNamespace(**{**vars(INTELS), "name": "Arc A770", "has_fp64": False}))
    with pytest.raises(UnsupportedError, match="--device xpu: Arc A770 has no float64"):
        open_device("xpu")


def case(kind, scheme):
    return Case(scheme=scheme, device=torch.device(kind, 0), shape=(128, 256), dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("kind", "properties", "versions"),
    [
        ("cuda", NVIDIAS, {"cuda": "13.0"}),
        ("cuda", AMDS, {"hip": "7.1"}),
        ("xpu", INTELS, {"xpu": "20250302"}),
    ],
    ids=["NVIDIA", "AMD", "Intel"],
)
def test_tritons_kernels_are_taken_on_gpus_of_all_makers_and_nvidias_on_its_own(
    found, monkeypatch, kind, properties, versions
):
    found(kind, properties, **versions)
    monkeypatch.setattr(accelerators, "has_triton", lambda: True)
    monkeypatch.setattr("quantflow.backends.triton.backends.has_triton", lambda: True)
    for name, scheme in (("triton_w4a16", "W4A16"), ("triton_w8a16", "W8A16")):
        assert BACKENDS[name].why_not(case(kind, preset(scheme))) is None
    nvidias = BACKENDS["fp8_mm"].why_not(case(kind, preset("FP8")))
    assert (nvidias is None) == (properties is NVIDIAS)


def test_tritons_kernels_are_refused_on_an_old_card_by_nvidia_and_where_no_gpu_is(
    found, monkeypatch
):
    monkeypatch.setattr("quantflow.backends.triton.backends.has_triton", lambda: True)
    found("cuda", SimpleNamespace(**{**vars(NVIDIAS), "major": 7}), cuda="13.0")
    taken = BACKENDS["triton_w4a16"].why_not
    assert "needs compute capability 8.0" in taken(case("cuda", preset("W4A16")))
    monkeypatch.setattr(torch.xpu, "is_available", lambda: False)
    assert "needs a GPU" in taken(case("xpu", preset("W4A16")))
    elsewhere = replace(case("cuda", preset("W4A16")), device=torch.device("hpu"))
    assert taken(elsewhere) == "triton_w4a16 runs on cuda and xpu, not on hpu"


def test_sums_in_float32_are_asked_of_torchs_kernels_not_of_a_name(monkeypatch):
    asked = []

    def has(operator, key):
        asked.append((operator, key))
        return key == "XPU"

    product._sums_in_float32.cache_clear()
    monkeypatch.setattr(torch._C, "_dispatch_has_kernel_for_dispatch_key", has)
    found = {kind: product._sums_in_float32(kind) for kind in ("cpu", "cuda", "xpu", "simulated")}
    product._sums_in_float32.cache_clear()
    assert found == {"cpu": False, "cuda": False, "xpu": True, "simulated": False}
    assert asked == [("aten::mm.dtype", "CUDA"), ("aten::mm.dtype", "XPU")]
