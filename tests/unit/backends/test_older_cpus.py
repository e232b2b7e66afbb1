"""The C code as it is compiled for other CPUs, whatever CPU runs this.

One has AVX2 and no AVX-512; one has registers of 4 lanes, as ARM's have; one has tiles (AMX), which
C emulates.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from quantflow.backends import kernels, native
from tests.shared import compiler_with

REASON = native.why_not(kernels.SOURCE, cpu_flags=kernels.CPU_FLAGS)
ROOT = Path(__file__).parents[3]
TESTS = [
    "tests/unit/backends/test_kernels.py",
    "tests/unit/backends/test_backends.py",
    "tests/unit/runtime/test_operations.py",
    "tests/unit/runtime/test_kv_cache.py",
    "tests/unit/runtime/test_int4_cache.py",
    "tests/unit/runtime/test_lean.py",
    "tests/unit/runtime/batching/test_invariance.py",
    "tests/unit/numerics/test_compiled_rounding.py",
]
# Counts numbers that lie between two codes of a cache; sums in another order, as this build's are,
# move some of them.
OTHER_SUMS = "not test_a_smaller_cache_gives"


def run_as(tmp_path, option, tests, *, chosen):
    """Run tests with C that is compiled with one option more, the last of its command."""
    compiler = compiler_with(tmp_path, option)
    environment = {**os.environ, "CC": compiler, "QUANTFLOW_CACHE": str(tmp_path / "cache")}
    options = ["-q", "-p", "no:cacheprovider", f"--basetemp={tmp_path / 'tests'}", "-k", chosen]
    command = [sys.executable, "-m", "pytest", *options, *tests]
    result = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, (result.stdout[-4000:], result.stderr[-4000:])
    return {path.name.partition("-")[0] for path in (tmp_path / "cache").iterdir()}


@pytest.mark.slow
@pytest.mark.skipif(
    native.why_not(kernels.SOURCE, cpu_flags=(*kernels.CPU_FLAGS, "avx512f")) is not None,
    reason="needs a CPU with AVX-512: without it the default tests run this code",
)
def test_the_tests_of_kernels_and_decoder_pass_as_on_a_cpu_without_avx512(tmp_path):
    built = run_as(tmp_path, "-march=x86-64-v3", TESTS, chosen=OTHER_SUMS)
    assert {"kernels", "decode", "rounding"} <= built


@pytest.mark.slow
@pytest.mark.skipif(REASON is not None, reason=str(REASON))
def test_the_tests_of_decoder_and_rounding_pass_in_registers_of_four_lanes(tmp_path):
    tests = [*TESTS[2:6], "tests/unit/runtime/test_delta_net.py", TESTS[-1]]
    built = run_as(tmp_path, "-march=x86-64", tests, chosen=OTHER_SUMS)
    assert {"decode", "rounding"} <= built and "kernels" not in built


@pytest.mark.slow
@pytest.mark.skipif(REASON is not None, reason=str(REASON))
@pytest.mark.parametrize("march", ["x86-64-v3", pytest.param("native", marks=pytest.mark.sweep)])
def test_the_tests_of_kernels_and_attention_pass_with_tiles_that_c_emulates(tmp_path, march):
    option = f"-march={march} -DQUANTFLOW_EMULATE_TILES"
    built = run_as(tmp_path, option, TESTS[:3], chosen=OTHER_SUMS)
    assert {"kernels", "decode"} <= built
