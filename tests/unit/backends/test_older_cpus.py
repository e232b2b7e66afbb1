"""The C code as it is compiled for a CPU with AVX2 and without AVX-512, whatever CPU runs this."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from quantflow.backends import kernels, native

ROOT = Path(__file__).parents[3]
TESTS = [
    "tests/unit/backends/test_kernels.py",
    "tests/unit/backends/test_backends.py",
    "tests/unit/runtime/test_operations.py",
    "tests/unit/runtime/test_kv_cache.py",
    "tests/unit/runtime/test_lean.py",
    "tests/unit/runtime/batching/test_invariance.py",
]
# Counts numbers that lie between two codes of a cache; sums in another order, as this build's are,
# move some of them.
OTHER_SUMS = "not test_a_smaller_cache_gives"


@pytest.mark.slow
@pytest.mark.skipif(
    native.why_not(kernels.SOURCE, cpu_flags=(*kernels.CPU_FLAGS, "avx512f")) is not None,
    reason="needs a CPU with AVX-512: without it the default tests run this code",
)
def test_the_tests_of_kernels_and_decoder_pass_as_on_a_cpu_without_avx512(tmp_path):
    compiler = tmp_path / "gcc"
    compiler.write_text('#!/bin/sh\nexec gcc "$@" -march=x86-64-v3\n')  # the last -march counts
    compiler.chmod(0o700)
    environment = {**os.environ, "CC": str(compiler), "QUANTFLOW_CACHE": str(tmp_path / "cache")}
    options = ["-q", "-p", "no:cacheprovider", f"--basetemp={tmp_path / 'tests'}", "-k", OTHER_SUMS]
    command = [sys.executable, "-m", "pytest", *options, *TESTS]
    result = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, (result.stdout[-4000:], result.stderr[-4000:])
    assert {path.name.partition("-")[0] for path in (tmp_path / "cache").iterdir()} == {
        "kernels",
        "decode",
    }
