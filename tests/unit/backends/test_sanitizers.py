"""The C code under AddressSanitizer and UBSan: the runtime's tests again, in a checked build."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from quantflow.backends import native
from quantflow.runtime import operations
from tests.shared import compiler_with

ROOT = Path(__file__).resolve().parents[3]
TESTS = [  # every entry of C, and every way in which Python calls it
    "tests/unit/backends/test_kernels.py",
    "tests/unit/numerics/test_compiled_rounding.py",
    "tests/unit/runtime/test_operations.py",
    "tests/unit/runtime/test_kv_cache.py",
    "tests/unit/runtime/test_int4_cache.py",
    "tests/unit/runtime/test_delta_net.py",
    "tests/unit/runtime/test_packed.py",
    "tests/unit/runtime/test_hostile_artifacts.py",
]
WHOLE_MODELS = ["tests/unit/runtime/test_lean.py"]
# Counts numbers that lie between two codes of a cache; sums in another order, as this build's are,
# move some of them.
OTHER_SUMS = "not test_a_smaller_cache_gives"
# unknown: a register begins inside and ends outside
BEYOND = "AddressSanitizer: (heap-buffer-overflow|unknown-crash)"


def library_of(name: str) -> str | None:
    """Return a library of the compiler's, None where it has none of this name."""
    compiler = os.environ.get("CC", "gcc")
    found = subprocess.run(
        [compiler, f"-print-file-name={name}"], capture_output=True, text=True, check=False
    ).stdout.strip()
    return found if Path(found).is_absolute() and Path(found).exists() else None


def sanitizer() -> str | None:
    """Return what is loaded first: libasan, and the library whose exceptions it watches.

    Without the second one libasan ends the process at torch's first exception.
    """
    libraries = [library_of(name) for name in ("libasan.so", "libstdc++.so.6")]
    return None if libraries[0] is None else " ".join(filter(None, libraries))


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """The folder of the checked builds: a build takes minutes."""
    return tmp_path_factory.mktemp("cache")


def checked(arguments, cache, **variables):
    """Run Python in a process whose C code is checked."""
    library = sanitizer()
    if native.why_not(operations.SOURCE, cpu_flags=()) is not None or library is None:
        pytest.skip("no compiler with AddressSanitizer")
    environment = {
        **os.environ,
        "LD_PRELOAD": library,
        "ASAN_OPTIONS": "detect_leaks=0",  # Python frees at its end what it wants to
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "QUANTFLOW_NATIVE": "checked",
        "QUANTFLOW_CACHE": str(cache),
        **variables,
    }
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "tests",
    [TESTS, pytest.param(WHOLE_MODELS, marks=pytest.mark.sweep)],
    ids=["entries", "whole models"],
)
def test_the_tests_of_the_runtime_pass_under_the_sanitizers(tests, cache, tmp_path):
    options = ["-q", "-p", "no:cacheprovider", f"--basetemp={tmp_path / 'tests'}", "-k", OTHER_SUMS]
    result = checked(["-m", "pytest", *options, *tests], cache)
    assert result.returncode == 0, (result.stdout[-4000:], result.stderr[-4000:])


@pytest.mark.slow
def test_tiles_stay_within_their_memory(cache, tmp_path):
    """AMX's instructions read memory that the sanitizer does not see; their emulation is C."""
    compiler = compiler_with(tmp_path, "-DQUANTFLOW_EMULATE_TILES")
    options = ["-q", "-p", "no:cacheprovider", f"--basetemp={tmp_path / 'tests'}"]
    tests = [
        "tests/unit/backends/test_kernels.py::test_many_tokens_get_the_bits_that_each_gets_alone",
        "tests/unit/runtime/test_operations.py",
    ]
    # half of a product in the last features; blocks that break a tile, and a window within one
    chosen = "dtype0 or True-48 or 16-33-bfloat16-True"
    result = checked(["-m", "pytest", *options, "-k", chosen, *tests], cache, CC=compiler)
    assert result.returncode == 0, (result.stdout[-4000:], result.stderr[-4000:])


WRONG = """
import torch
from quantflow.runtime.operations import _Norm, compiled
x = torch.zeros(16)
{call}
"""


NULL = (
    "compiled().add_norm(x.data_ptr(), None, _Norm(), _Norm(), None, 1, 16, 1e-5, 0, 1.0, 0, 1.0)"
)
EMPTY = "compiled().gate(x.data_ptr(), x.data_ptr(), 1, 0, 0, 1, 1.0, 0.0)"
OVERFLOW = "y = torch.zeros(4); compiled().gate(x.data_ptr(), y.data_ptr(), 1, 8, 0, 1, 1.0, 0.0)"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("call", "told"),
    [
        (NULL, "decode.c:.*: not x && out"),
        (EMPTY, "decode.c:.*: not .*width > 0"),
        (OVERFLOW, BEYOND),
    ],
    ids=["null", "empty", "overflow"],
)
def test_a_broken_promise_ends_the_checked_process_with_the_line(call, told, cache):
    result = checked(["-c", WRONG.format(call=call)], cache)
    assert result.returncode != 0 and re.search(told, result.stderr), result.stderr[-2000:]
