"""The C code as it is compiled for ARM, run by qemu: kernels.c beside the same C for AVX2.

Integers are summed exactly, floats in one order, so that both give the same bits. The other one
is what test_older_cpus.py runs the tests of kernels.c with.
"""

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from quantflow.backends import kernels, native
from quantflow.core.scheme import with_rounded_inputs
from quantflow.runtime import operations
from tests.unit.backends.test_kernels import random_linear, scheme_of

HERE = Path(__file__).parent
RUN_LINEAR, CHECK_LANES = HERE / "run_linear.c", HERE.parent / "runtime" / "check_lanes.c"
TEAM = kernels.SOURCE.with_name("team.c")
INCLUDES = [f"-I{source.parent}" for source in (kernels.SOURCE, operations.SOURCE)]
FLAGS = ["-O3", "-std=gnu11", "-fopenmp", "-fno-math-errno", "-static", "-Werror=vla"]
COMPILERS = {
    "arm": ["aarch64-linux-gnu-gcc", "-march=armv8.2-a+dotprod"],
    "x86": ["gcc", "-march=x86-64-v3"],
}
QEMU = "qemu-aarch64"
MISSING = [name for name in (*(c[0] for c in COMPILERS.values()), QEMU) if not shutil.which(name)]
REASON = native.why_not(kernels.SOURCE, cpu_flags=("avx2", "fma"))
INTEGERS = ["W8A8", "W8A8_STATIC", "W4A8", "W4A16 rounded", "W3A16 rounded"]
INTEGERS += ["MXFP4A16 rounded", "NVFP4A16 rounded"]
FLOATS = ["W4A16", "W4A16_ASYM", "W8A16", "W6A16", "FP8_DYNAMIC", "FP8", "MXFP4A16", "NVFP4A16"]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(MISSING), reason=f"needs {', '.join(MISSING)}"),
    pytest.mark.skipif(REASON is not None, reason=str(REASON)),
]


def written(number):
    return bytes(ctypes.c_int64(number))


def tensor_of(tensor):
    """A tensor as run_linear.c reads it."""
    content = b"" if tensor is None else tensor.view(torch.uint8).numpy().tobytes()
    return written(len(content)) + content


def outputs(program, prepared, x, bias, *, threads=1):
    """The outputs [T, O] that a program of run_linear.c writes."""
    fields = ("data", "scale", "zero", "offset")
    numbers = (threads, len(x), x.dtype == torch.bfloat16)
    parts = [
        bytes(prepared.weight),
        *(tensor_of(prepared.tensors.get(name)) for name in fields),
        *(written(number) for number in numbers),
        tensor_of(x),
        tensor_of(bias),
    ]
    done = subprocess.run(
        program, input=b"".join(parts), capture_output=True, check=True, timeout=120
    )
    return torch.frombuffer(bytearray(done.stdout), dtype=x.dtype).view(len(x), -1)


def built(cpu, source, folder):
    """The command of a program for a CPU."""
    program = folder / f"{source.stem}-{cpu}"
    files = ["-o", program, source, TEAM, "-lm"]
    subprocess.run([*COMPILERS[cpu], *FLAGS, *INCLUDES, *files], check=True)
    return [QEMU, program] if cpu == "arm" else [program]


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    """The command of run_linear.c by CPU."""
    folder = tmp_path_factory.mktemp("programs")
    return {cpu: built(cpu, RUN_LINEAR, folder) for cpu in COMPILERS}


def linear_of_name(name, columns):
    name, _, rounded = name.partition(" ")
    scheme = scheme_of(name, 16 if name.startswith("NVFP4") else 32)
    return random_linear(
        name, (70, columns), scheme=with_rounded_inputs(scheme) if rounded else scheme
    )


def bits(tensor):
    return tensor.view(torch.int16 if tensor.dtype == torch.bfloat16 else torch.int32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", [*INTEGERS, *FLOATS])
def test_arm_and_avx2_give_the_same_bits(programs, name, dtype):
    generator = torch.Generator().manual_seed(1)
    linear = linear_of_name(name, 96)
    prepared = kernels.prepare(linear, dtype)
    bias = torch.randn(70, generator=generator).to(dtype)
    x = torch.randn(7, 96, generator=generator) * torch.tensor([[1e-3, 1, 1, 30, 1, 0, 1]]).T
    x[1, 5], x[2, 40] = 1e4, -3e3  # far beyond a static scale
    x = x.to(dtype)
    for tokens in (1, 2, 3, 4, 7):
        found = {cpu: outputs(programs[cpu], prepared, x[:tokens], bias) for cpu in programs}
        assert torch.equal(bits(found["arm"]), bits(found["x86"]))


def test_numbers_that_are_not_finite_stay_so(programs):
    x = torch.randn(4, 96, generator=torch.Generator().manual_seed(2))
    x[0, 3], x[1, 90], x[2, 0] = torch.nan, torch.inf, -torch.inf
    for name in ("W8A8", "W4A16", "FP8_DYNAMIC", "W4A16 rounded"):
        prepared = kernels.prepare(linear_of_name(name, 96), torch.float32)
        found = {cpu: outputs(programs[cpu], prepared, x, None) for cpu in programs}
        assert torch.equal(found["arm"].isfinite(), found["x86"].isfinite())
        assert not found["arm"][:3].isfinite().any() and found["arm"][3].isfinite().all()


def test_bits_do_not_depend_on_threads_or_other_tokens(programs):
    x = torch.randn(9, 160, generator=torch.Generator().manual_seed(3))
    for name in ("W8A8", "W4A16", "FP8"):
        prepared = kernels.prepare(linear_of_name(name, 160), torch.float32)
        one = torch.cat([outputs(programs["arm"], prepared, row[None], None) for row in x])
        assert torch.equal(outputs(programs["arm"], prepared, x, None, threads=3), one)


def test_codes_of_eight_bits_at_their_ends_sum_exactly(programs):
    """The shift by 128 leaves no trace: all codes at -128 and 127, by inputs of both signs."""
    linear = random_linear("W8A8", (64, 2048))
    linear.weight.qvalue[:32], linear.weight.qvalue[32:] = -128, 127
    prepared = kernels.prepare(linear, torch.float32)
    signs = torch.ones(2, 2048)
    signs[1] = -1
    found = {cpu: outputs(programs[cpu], prepared, signs, None) for cpu in programs}
    assert torch.equal(found["arm"], found["x86"])
    exact = signs @ linear.weight.dequantize().T
    torch.testing.assert_close(found["arm"], exact, rtol=0.005, atol=0)  # 1 is code 127 of 127.5


@pytest.mark.parametrize("cpu", COMPILERS)
def test_registers_of_the_decoder_do_what_plain_c_does(tmp_path, cpu):
    done = subprocess.run(
        built(cpu, CHECK_LANES, tmp_path), capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stdout) == (0, "")
