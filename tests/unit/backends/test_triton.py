"""Products by Triton's kernels beside the equation, in its interpreter; skipped without Triton.

What needs no Triton is tested everywhere: how codes are packed, and many tokens, for which the
weight is dequantized.
"""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from quantflow.backends import BACKENDS
from quantflow.backends.backend import Case
from quantflow.backends.triton import backends, layout
from quantflow.core.scheme import preset
from tests.triton_weights import IDS, WEIGHTS, drawn

CPU = torch.device("cpu")
TRITON_XPU = os.environ.get("TRITON_XPU") or None
PRODUCTS = {"w4a16", "w8a16"}
ALONE = {"rope", "gate"}  # their programs' threads exchange nothing
KERNELS = {"gptq", "rounding", "norm", *PRODUCTS, *ALONE}


def needs_triton(test):
    skipped = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
    return pytest.mark.slow(skipped(test))


@pytest.mark.parametrize("block", [32, 64, 128])
@pytest.mark.parametrize("rows", [1, 5])
def test_codes_that_are_packed_come_back(block, rows):
    codes = torch.randint(0, 16, (rows, 3 * block)).to(torch.uint8)
    words = layout.packed(codes, block)
    assert words.shape == (rows, 3 * block // 2)
    assert torch.equal(layout.unpacked(words, block), codes)
    # a byte's upper half is the column half a block further on
    assert int(words[0, 1]) == int(codes[0, 1]) + 16 * int(codes[0, 1 + block // 2])


@pytest.mark.parametrize("rounded", [True, False], ids=["bfloat16 scales", "float32 scales"])
@pytest.mark.parametrize(("name", "size", "shape"), WEIGHTS, ids=IDS)
def test_a_weight_is_dequantized_with_one_rounding(name, size, shape, rounded):
    linear = drawn(name, size, shape, rounded=rounded)
    stored = backends._prepare(linear, torch.bfloat16)
    assert stored.exact == rounded or shape[0] == 1
    assert torch.equal(backends.dequantized(stored), linear.dequantize().bfloat16())


@pytest.mark.parametrize("tokens", [0, backends.FEW + 1])
@pytest.mark.parametrize(("name", "size", "shape"), WEIGHTS[2:7:2], ids=IDS[2:7:2])
def test_products_of_many_tokens_or_none_have_the_bits_of_the_reference(name, size, shape, tokens):
    linear = drawn(name, size, shape)
    x, bias = torch.randn(tokens, shape[1]).bfloat16(), torch.randn(shape[0]).bfloat16()
    reference, backend = BACKENDS["reference"], BACKENDS[f"triton_{name.lower()[:5]}"]
    expected = reference.linear(x, reference.prepare(linear, torch.bfloat16), bias)
    found = backend.linear(x, backend.prepare(linear, torch.bfloat16), bias)
    assert torch.equal(found, expected)


@pytest.mark.parametrize(
    ("tokens", "rows", "steps", "expected"),
    [
        (1, 4096, 32, (16, 32, 2)),  # 128 programs of outputs
        (1, 32, 8, (16, 32, 8)),  # no share without a step
        (64, 28672, 32, (64, 64, 1)),
        (33, 64, 100, (64, 64, 100)),
    ],
)
def test_the_shares_of_the_columns_fill_a_card(tokens, rows, steps, expected):
    assert layout.sizes(tokens, rows, steps) == expected


@pytest.mark.parametrize("name", ["triton_w4a16", "triton_w8a16"])
def test_a_cpu_is_refused(name):
    case = Case(scheme=preset("W4A16"), device=CPU, shape=(64, 256), dtype=torch.bfloat16)
    assert BACKENDS[name].why_not(case) == f"{name} runs on cuda and xpu, not on cpu"


@needs_triton
def test_kernels_compute_what_the_equation_says_in_the_interpreter(run_apart, monkeypatch):
    """In a process of its own: Triton decides when it is imported."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    run_apart("triton_interpreted.py", "-W", "default")


def compiled(*paths):
    """The rows of benchmarks/triton_compiled.py, with the packages of these folders."""
    script = Path(__file__).parents[3] / "benchmarks" / "triton_compiled.py"
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(map(str, (script.parents[1], *paths)))
    done = subprocess.run(
        [sys.executable, script, "--json"], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout)


@needs_triton
def test_every_kernel_compiles_for_every_card_and_fits_its_shared_memory():
    found = compiled()
    assert {row["card"] for row in found} == {"sm_80", "sm_90a", "sm_100a", "gfx942"}
    for row in found:
        limit = 64 << 10 if row["card"] == "gfx942" else 160 << 10
        assert row["shared"] <= limit and (row["shared"] == 0) == (row["kernel"] in ALONE), row
        assert row["spilled"] == 0, row
        assert row["instructions"] > 100, row
        # products multiply on tensor cores, and nothing else does
        assert (row["matrix"] > 0) == (row["kernel"] in PRODUCTS), row
    assert {row["kernel"] for row in found} == KERNELS


@pytest.mark.slow
@pytest.mark.skipif(TRITON_XPU is None, reason="TRITON_XPU names no folder of the package")
def test_every_kernel_compiles_for_intels_card():
    found = compiled(TRITON_XPU)
    assert {row["card"] for row in found} == {"max1550"}
    for row in found:
        assert row["shared"] <= 128 << 10 and (row["shared"] == 0) == (row["kernel"] in ALONE), row
        assert row["instructions"] > (100 if row["kernel"] in ALONE else 1000), row
        assert (row["matrix"] > 0) == (row["kernel"] in PRODUCTS), row
    assert {row["kernel"] for row in found} == KERNELS
