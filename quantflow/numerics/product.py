"""Products of matrices on the CPU, by the fastest library for the dtype and the CPU.

float32: oneDNN multiplies where there is AVX-512, torch's default elsewhere. That default is MKL,
which does not use AVX-512 on CPUs that are not Intel's; on an AMD CPU with AVX-512, oneDNN takes
half the time. Both are float32 throughout and differ in the order of their sums, which for one
shape on one thread is always the same. oneDNN is reached by `Tensor.to_mkldnn`, a copy that some
dozens of rows repay: for calibration text, not for a token at a time.

It compiles code for every shape that it meets, and keeps it: half a megabyte and a millisecond of
each. The router of a mixture sends another number of tokens to every expert in every sequence, so
their rows are filled up to few numbers (`filled`).

bfloat16: oneDNN needs AVX-512 for it. Without it, torch's default is several times slower than
float32, so matrices are widened: products of two bfloat16 are exact in float32, and both ways
differ in the order of their sums alone.
"""

from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from quantflow.accelerators import GPUS
from quantflow.core.groups import spans

_WIDENED = 1 << 22  # weights that are widened at once, 16 MiB
FILLED = 64  # rows are filled up to a multiple of these


def operand(x: Tensor) -> Tensor:
    """The first operand of `product`: a oneDNN copy of x [..., I] where that is faster, else x."""
    return x.to_mkldnn() if _copied(x) else x


def filled(x: Tensor) -> Tensor:
    """Rows x [N, I] and rows of zeros up to a multiple of FILLED, where `operand` copies x; else x.

    A single row stays alone, since oneDNN has other code for it. Other rows keep their bits, and so
    does a sum over the rows.
    """
    missing = -len(x) % FILLED if len(x) > 1 and _copied(x) else 0
    return functional.pad(x, (0, 0, 0, missing)) if missing else x


def _copied(x: Tensor) -> bool:
    """Whether oneDNN multiplies x, and faster than torch's default."""
    fits = x.dtype == torch.float32 and x.device.type == "cpu" and x.numel() > 0
    there: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return fits and there and torch.backends.cpu.get_cpu_capability() == "AVX512"


def product(left: Tensor, right: Tensor, bias: Tensor | None = None) -> Tensor:
    """Product left @ right.T + bias, [..., O], as an ordinary tensor; gradients flow.

    Args:
        left: [..., I], from `operand`.
        right: [O, I], an ordinary tensor of the same dtype.
        bias: [O], or None.
    """
    made = functional.linear(left, right, bias)
    return made.to_dense() if made.is_mkldnn else made


def summed_over_rows(left: Tensor, right: Tensor) -> Tensor:
    """left.T @ right, [A, B] float32, of [N, A] and [N, B] in one float dtype.

    Where torch has a kernel for it, tensor cores multiply bfloat16 and float16 as they are, with
    sums in float32. Elsewhere both are widened; the products are exact either way, the order of
    sums is another.
    """
    if left.dtype != torch.float32 and _sums_in_float32(left.device.type):
        return torch.mm(left.T, right, out_dtype=torch.float32)
    return left.float().T @ right.float()


@cache
def _sums_in_float32(kind: str) -> bool:
    """Whether torch multiplies matrices of a kind of device into sums of a wider dtype."""
    key = GPUS.get(kind)
    return key is not None and torch._C._dispatch_has_kernel_for_dispatch_key("aten::mm.dtype", key)


def widened(dtype: torch.dtype) -> AbstractContextManager[Any]:
    """A block in which the thread's bfloat16 linears are computed in float32, where that is faster.

    Args:
        dtype: dtype of the model that the block runs.
    """
    slow = dtype == torch.bfloat16 and torch.backends.cpu.get_cpu_capability() == "AVX2"
    return _Widened() if slow else nullcontext()


class _Widened(TorchFunctionMode):
    """Computes `linear` of bfloat16 on the CPU in float32, some of the weight's rows at a time.

    Each output is rounded once.
    """

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if (
            function is functional.linear
            and len(args) > 1
            and args[0].dtype == torch.bfloat16
            and args[0].device.type == "cpu"
        ):
            return _linear(*args, **kwargs or {})
        return function(*args, **kwargs or {})


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    wide = input.float()
    parts = []
    for rows in spans(weight.shape[0], max(1, _WIDENED // weight.shape[1])):
        added = None if bias is None else bias[rows].float()
        parts.append(functional.linear(wide, weight[rows].float(), added).to(input.dtype))
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)
