"""The kinds of GPU that torch has: no other place names them to decide what a GPU can do.

| kind   | GPUs                       | torch's module | process groups |
|--------|----------------------------|----------------|----------------|
| `cuda` | NVIDIA's, and AMD's (ROCm) | torch.cuda     | NCCL, RCCL     |
| `xpu`  | Intel's                    | torch.xpu      | XCCL           |

Device memory, streams and pinned memory are asked through torch's module of the kind
(quantflow/core/device.py). What runs on one kind alone says so here: `CUDA` for torch's kernels by
NVIDIA, `GRAPHS` for decode steps that are captured. The module imports no torch.
"""

from collections.abc import Mapping
from functools import cache
from importlib.util import find_spec
from types import MappingProxyType

CUDA, XPU = "cuda", "xpu"
# kind of device -> torch's key of its kernels, which is the profiler's name of it too
GPUS: Mapping[str, str] = MappingProxyType({CUDA: "CUDA", XPU: "XPU"})
# kind -> attribute of torch.version -> name of what torch is built on
SOFTWARE: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {CUDA: {"cuda": "CUDA", "hip": "ROCm"}, XPU: {"xpu": "XPU"}}
)
GRAPHS = (CUDA,)


def kind_of(name: str) -> str:
    """The kind of a device's name: `cuda` of `cuda:1`."""
    return name.partition(":")[0]


def is_gpu(kind: str) -> bool:
    """Whether a kind of torch's devices is GPUs."""
    return kind in GPUS


def runs_triton(kind: str) -> bool:
    """Whether Triton's kernels run on a kind of device here: on GPUs, where the package is."""
    return is_gpu(kind) and has_triton()


@cache
def has_triton() -> bool:
    """Whether the package triton is installed, which torch for GPUs brings."""
    return find_spec("triton") is not None
