"""GPUs by NVIDIA: float8 weights times float8 inputs (`torch._scaled_mm`), and decode steps captured as a graph.

    y = (q_x @ q_w.T) * scale_x * scale_w + bias,    q_x = cast(x / scale_x)

fp8_mm: one scale each goes in as it is (tensor-wise); as soon as weights have one per channel or inputs one per token, both go
in as vectors (row-wise). Sums are float32, the output bfloat16. Integer weights: torch_kernels.py.

Nothing here was run on a GPU; docs/backends.md says what was checked instead.
Source: torch 2.13, aten/src/ATen/native/cuda/{ScaledBlas.cpp, ScaledBlasDeviceUtils.cpp, RowwiseScaledMM.cu}: what the product
checks, and that capability 8.9 and from 9.0 on have it.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from quantflow.backends.backend import BFLOAT16, E4M3_WEIGHTS, Backend, divides, is_e4m3, keep, need, on, weights_per
from quantflow.core.qtensor import QuantizedLinear

NAME = "cuda"
_MULTIPLE = 16  # of both features
_WARM_UP = 3  # runs before a capture: what is set up at the first call must not be captured


def missing_here() -> str | None:
    """Return what this machine lacks to run on a GPU, in words, or None."""
    return None if torch.cuda.is_available() else f"a GPU, torch {torch.__version__} finds none"


def capture(step: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """Return what does as `step` does, replayed as one graph; it returns the same tensor every time.

    Args:
        step: reads and writes tensors that stay where they are, waits for none of them, and may run twice without harm.
    """
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(_WARM_UP):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = step()

    def replay() -> Tensor:
        graph.replay()
        return result

    return replay


def _linear(x: Tensor, linear: QuantizedLinear, bias: Tensor | None) -> Tensor:
    """Return x @ W.T + bias.  x: [..., I] bfloat16; returns [..., O]."""
    codes, scale = linear.quantize_input(x.reshape(-1, x.shape[-1]))  # [M, I], [M, 1] or [1]
    weight, weight_scale = linear.weight.qvalue.t(), linear.weight.scale.t()  # [I, O] column-major, [1, O] or [1, 1]
    if scale.numel() != 1 or weight_scale.numel() != 1:
        scale = scale.expand(len(codes), 1).contiguous()
        weight_scale = weight_scale.expand(1, weight.shape[1]).contiguous()
    result = torch._scaled_mm(codes, weight, scale, weight_scale, bias=bias, out_dtype=x.dtype)
    return result.reshape(*x.shape[:-1], result.shape[1])  # [..., O]


BACKEND = Backend(
    name="fp8_mm",
    needs=(
        on(NAME, capability=(8, 9)),
        E4M3_WEIGHTS,
        weights_per("per_tensor", "per_channel"),
        need("needs e4m3fn inputs, {c.taken}", lambda c: is_e4m3(c.scheme.input)),
        BFLOAT16,
        divides(_MULTIPLE, 0),
        divides(_MULTIPLE, 1),
    ),
    prepare=keep,
    linear=_linear,
)
