"""Backends: ways to compute `x @ W.T + bias` with a quantized weight.

Each is a `quantflow.backends.backend.Backend`; reference.py is the oracle of the others. Nothing
falls back silently: a kernel that cannot run a linear says why, and `choose` returns the reasons
with its choice. The order of the table is that of preference: the device's kernels, our own (in
Triton for GPUs, in C for CPUs, compiled when they are first used), those of Intel's extension,
torch's, and last the oracle, which runs everything.
"""

from collections.abc import Mapping
from types import MappingProxyType

from quantflow.backends import cuda, hpu, ipex, own_kernels, reference, torch_kernels
from quantflow.backends.backend import Backend, Case
from quantflow.backends.triton import backends as triton_kernels
from quantflow.errors import UsageError

_ORDER = (
    hpu.BACKEND,
    *cuda.BACKENDS,
    *triton_kernels.BACKENDS,
    *own_kernels.BACKENDS,
    ipex.BACKEND,
    *torch_kernels.BACKENDS,
    reference.BACKEND,
)
BACKENDS: Mapping[str, Backend] = MappingProxyType({backend.name: backend for backend in _ORDER})


def choose(case: Case, *, backend: str = "auto") -> tuple[Backend, dict[str, str]]:
    """The backend for a linear, and why each backend that is preferred over it cannot run.

    Args:
        case: the linear.
        backend: key of BACKENDS, or `auto` for the first of them that can run the linear. Several,
            separated by commas, are tried in turn, such as `int4_pack,auto` where linears are
            quantized differently.

    Raises:
        UsageError: the backend is unknown, or cannot run this linear.
    """
    names_asked = backend.split(",")
    for word in sorted(set(names_asked) - {"auto", *BACKENDS}):
        raise UsageError(f"backend {word!r} is unknown", f"use one of auto, {', '.join(BACKENDS)}")
    reasons: dict[str, str] = {}
    for name in [
        name for word in names_asked for name in (BACKENDS if word == "auto" else (word,))
    ]:
        reason = BACKENDS[name].why_not(case)
        if reason is None:
            return BACKENDS[name], reasons
        reasons[name] = reason
    raise UsageError(
        f"backend {backend}: {'; '.join(reasons.values())}", "use backend auto or reference"
    )
