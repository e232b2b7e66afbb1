"""NVIDIA GPUs: float8 weights times float8 inputs, and decode steps captured as a graph.

    y = (q_x @ q_w.T) * scale_x * scale_w + bias,    q_x = cast(x / scale_x)

fp8_mm (`torch._scaled_mm`): one scale of the weight and one of the inputs go in as they are
(tensor-wise). As soon as weights have one per channel or inputs one per token, both go in as
vectors (row-wise). Sums are float32, the output is bfloat16. Integer weights: torch_kernels.py.

fp8_block_mm (`scaled_mm`): one scale for 128 rows by 128 columns of the weight, one for 128 columns
of a token:

    y = sum over blocks b of 128 columns  (q_x[b] @ q_w[b].T) * scale_x[b] * scale_w[b]  + bias

Both scales are column-major, those of the weight padded to fours along its columns, as cuBLAS 12.9
reads them; it has this product for capability 9 alone. Tokens are padded to sixteens.

Nothing here was run on a GPU; docs/backends.md says what was checked instead. Source: torch 2.13,
aten/src/ATen/native/cuda/{ScaledBlas.cpp, ScaledBlasDeviceUtils.cpp, RowwiseScaledMM.cu}: what the
product checks, and which capabilities have it.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from quantflow.accelerators import CUDA
from quantflow.backends.backend import (
    BFLOAT16,
    E4M3_WEIGHTS,
    Backend,
    Case,
    divides,
    is_e4m3,
    keep,
    on,
    requirement,
    weights_per,
)
from quantflow.core.qtensor import QuantizedLinear, quantize_input
from quantflow.core.scheme import TensorScheme

NAME = CUDA
_MULTIPLE = 16  # divides both features, and the padded tokens of the product in blocks
_BLOCK = 128
_BLOCKS_SINCE = (12, 9)  # the CUDA version whose cuBLAS multiplies blocks
_WARM_UP = 3  # runs before a capture, so that no set-up of a first call is captured


def capture(step: Callable[[], Tensor], *, device: torch.device) -> Callable[[], Tensor]:
    """A function that does as `step` does, replayed as one graph.

    The function returns the same tensor every time.

    Args:
        step: reads and writes tensors that stay where they are, waits for none of them, and may run
            twice without harm.
        device: device of these tensors; streams and graphs belong to one GPU.
    """
    with torch.cuda.device(device):
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(_WARM_UP):
                step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        # A stream is given, since torch keeps one stream for captures for the whole process, and
        # that one belongs to one GPU. What other threads allocate meanwhile does not end it.
        with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
            result = step()

    def replay() -> Tensor:
        with torch.cuda.device(device):
            graph.replay()
        return result

    return replay


def _round_input(x: Tensor, linear: QuantizedLinear) -> tuple[Tensor, Tensor]:
    """The codes of the tokens, [M, I], and their scale, [M, 1] or [1]."""
    return linear.quantize_input(x.reshape(-1, x.shape[-1]))


def _linear(
    x: Tensor,
    linear: QuantizedLinear,
    bias: Tensor | None,
    rounded: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """The product x @ W.T + bias. x: [..., I] bfloat16; returns [..., O]."""
    codes, scale = _round_input(x, linear) if rounded is None else rounded
    # [I, O] column-major, [1, O] or [1, 1]
    weight, weight_scale = linear.weight.qvalue.t(), linear.weight.scale.t()
    if scale.numel() != 1 or weight_scale.numel() != 1:
        scale = scale.expand(len(codes), 1).contiguous()
        weight_scale = weight_scale.expand(1, weight.shape[1]).contiguous()
    result = torch._scaled_mm(codes, weight, scale, weight_scale, bias=bias, out_dtype=x.dtype)
    return result.reshape(*x.shape[:-1], result.shape[1])  # [..., O]


# A weight in blocks: qvalues [O, I]; scales [I / 128 padded to fours, O / 128], column-major; the
# scheme of its inputs.
Blocks = tuple[Tensor, Tensor, TensorScheme]


def _block_prepare(linear: QuantizedLinear, dtype: torch.dtype) -> Blocks:
    del dtype
    assert linear.scheme.input is not None  # it is among the requirements
    scale = linear.weight.scale[::_BLOCK]  # [O / 128, I / 128]
    padded = functional.pad(scale, (0, -scale.shape[1] % 4)).contiguous()
    return linear.weight.qvalue, padded.t(), linear.scheme.input


def _block_round_input(x: Tensor, prepared: Blocks) -> tuple[Tensor, Tensor]:
    """The codes of the padded tokens, [M, I], and their scales, [M, I / 128], column-major."""
    scheme = prepared[2]
    rows = x.reshape(-1, x.shape[-1])  # [M, I]
    tokens = len(rows)
    # no tokens at all are padded too: cuBLAS refuses an empty product
    rows = functional.pad(rows, (0, 0, 0, -tokens % _MULTIPLE if tokens else _MULTIPLE))
    split = rows.reshape(len(rows), -1, _BLOCK)  # [M, I / 128, 128]
    codes, scale = quantize_input(split, scheme)  # [M, I / 128, 128], [M, I / 128, 1]
    return codes.flatten(1), scale[..., 0].t().contiguous().t()


def _block_linear(
    x: Tensor, prepared: Blocks, bias: Tensor | None, rounded: tuple[Tensor, Tensor] | None = None
) -> Tensor:
    """The product x @ W.T + bias. x: [..., I] bfloat16; returns [..., O]."""
    weight, weight_scale, _ = prepared
    codes, scale = _block_round_input(x, prepared) if rounded is None else rounded
    tokens = x.shape[:-1].numel()
    recipes: Any = functional.ScalingType
    result: Tensor = functional.scaled_mm(
        codes,
        weight.t(),
        scale,
        recipes.BlockWise1x128,
        weight_scale,
        recipes.BlockWise128x128,
        output_dtype=x.dtype,
    )[:tokens]
    if bias is not None:
        result = result + bias
    return result.reshape(*x.shape[:-1], result.shape[1])  # [..., O]


def _in_blocks(case: Case) -> bool:
    taken = case.scheme.input
    return (
        is_e4m3(taken)
        and taken.dynamic
        and taken.granularity == "per_group"
        and taken.group_size == _BLOCK
    )


def _on_nine(case: Case) -> str | None:
    """The requirement of capability 9, none later, and of a CUDA whose cuBLAS has the product."""
    capability, cuda = torch.cuda.get_device_capability(case.device), str(torch.version.cuda)
    if capability[0] != 9:
        return f"needs compute capability 9, {case.device} has {capability[0]}.{capability[1]}"
    if tuple(map(int, cuda.split(".")[:2])) < _BLOCKS_SINCE:
        return f"needs CUDA {'.'.join(map(str, _BLOCKS_SINCE))}, torch is built for {cuda}"
    return None


_FP8 = Backend(
    name="fp8_mm",
    requirements=(
        on(NAME, capability=(8, 9)),
        E4M3_WEIGHTS,
        weights_per("per_tensor", "per_channel"),
        requirement("needs e4m3fn inputs, {c.taken}", lambda c: is_e4m3(c.scheme.input)),
        BFLOAT16,
        divides(_MULTIPLE, 0),
        divides(_MULTIPLE, 1),
    ),
    prepare=keep,
    linear=_linear,
    round_input=_round_input,
)
_FP8_BLOCK = Backend(
    name="fp8_block_mm",
    requirements=(
        on(NAME, capability=(9, 0)),
        requirement(
            f"needs torch 2.10, {torch.__version__} has no product in blocks",
            lambda c: hasattr(functional, "scaled_mm"),
        ),
        _on_nine,
        E4M3_WEIGHTS,
        weights_per("per_block"),
        requirement("needs e4m3fn inputs in groups of 128, {c.taken}", _in_blocks),
        requirement(
            "needs blocks of 128, not {c.weights.group_size}",
            lambda c: c.weights.group_size == _BLOCK,
        ),
        BFLOAT16,
        divides(_BLOCK, 0),
        divides(_BLOCK, 1),
    ),
    prepare=_block_prepare,
    linear=_block_linear,
    round_input=_block_round_input,
)
BACKENDS = (_FP8, _FP8_BLOCK)
