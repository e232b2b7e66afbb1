"""GPUs by NVIDIA: float8 weights times float8 inputs (`torch._scaled_mm`), and decode steps captured as a graph.

    y = (q_x @ q_w.T) * scale_x * scale_w + bias,    q_x = cast(x / scale_x)

fp8_mm: one scale each goes in as it is (tensor-wise); as soon as weights have one per channel or inputs one per token, both go
in as vectors (row-wise). Sums are float32, the output bfloat16. Integer weights: torch_kernels.py.

Nothing here was run on a GPU; docs/backends.md says what was checked instead.
Source: torch 2.13, aten/src/ATen/native/cuda/{ScaledBlas.cpp, ScaledBlasDeviceUtils.cpp, RowwiseScaledMM.cu}: what the product
checks, and that capability 8.9 and from 9.0 on have it.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from quantflow.core import affine
from quantflow.core.backend import BFLOAT16, E4M3_WEIGHTS, Backend, Case, is_e4m3, need, on, weights_per
from quantflow.core.qtensor import QuantizedLinear
from quantflow.core.scheme import TensorScheme
from quantflow.errors import UnsupportedError

NAME = "cuda"
_MULTIPLE = 16  # of both features
_WARM_UP = 3  # runs before a capture: what is set up at the first call must not be captured


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A weight as the product takes it, and how inputs are quantized.

    Attributes:
        weight: [I, O] e4m3fn, a transposed view of row-major [O, I].
        scale: [1, 1] tensor-wise, [1, O] row-wise; float32.
        input_scheme: of the input.
        input_scale: [1] float32 for a static input.
    """

    weight: Tensor
    scale: Tensor
    input_scheme: TensorScheme
    input_scale: Tensor | None


def require() -> None:
    """Check that there is a GPU.

    Raises:
        UnsupportedError: torch finds none.
    """
    if not torch.cuda.is_available():
        raise UnsupportedError(
            f"device {NAME}: torch {torch.__version__} finds no GPU", "use device cpu, or a torch that is built for the GPU"
        )


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


def _prepare(linear: QuantizedLinear, dtype: torch.dtype) -> Prepared:
    """Keep the codes and the scales; `dtype` is not needed, scales are float32."""
    assert linear.scheme.input is not None  # its needs refuse such a scheme
    scale, rows = linear.weight.scale.reshape(1, -1), len(linear.weight.qvalue)
    return Prepared(
        weight=linear.weight.qvalue.contiguous().t(),
        scale=scale.expand(1, rows).contiguous() if linear.scheme.input.dynamic else scale,
        input_scheme=linear.scheme.input,
        input_scale=linear.input_scale,
    )


def _linear(x: Tensor, prepared: Prepared, bias: Tensor | None) -> Tensor:
    """Return x @ W.T + bias.  x: [..., I] bfloat16; returns [..., O]."""
    rows = x.reshape(-1, x.shape[-1])  # [M, I]
    scale = prepared.input_scale
    if scale is None:
        scale = affine.scale_per_token(rows, prepared.input_scheme)  # [M, 1]
    codes = affine.quantize(rows, scale, None, prepared.input_scheme)
    if prepared.scale.numel() > 1:
        scale = scale.expand(len(rows), 1).contiguous()  # [M, 1]
    result = torch._scaled_mm(codes, prepared.weight, scale, prepared.scale, bias=bias, out_dtype=x.dtype)
    return result.reshape(*x.shape[:-1], prepared.weight.shape[1])  # [..., O]


def _inputs(case: Case) -> bool:
    inputs = case.scheme.input
    return inputs is not None and is_e4m3(inputs) and inputs.granularity in ("per_tensor", "per_token")


BACKEND = Backend(
    name="fp8_mm",
    needs=(
        on(NAME, capability=(8, 9)),
        E4M3_WEIGHTS,
        weights_per("per_tensor", "per_channel"),
        need("needs e4m3fn inputs per tensor or per token, {c.inputs}", _inputs),
        BFLOAT16,
        need(
            f"needs features that {_MULTIPLE} divides, not {{c.shape[0]}} by {{c.shape[1]}}",
            lambda case: not any(size % _MULTIPLE for size in case.shape),
        ),
    ),
    prepare=_prepare,
    linear=_linear,
)
