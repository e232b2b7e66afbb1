"""Products of float32 matrices on the CPU: by oneDNN where there is AVX-512, by what torch takes otherwise.

torch takes MKL, which leaves AVX-512 alone on CPUs that are not Intel's; on an AMD CPU that has it oneDNN takes half the time.
Both are float32 throughout and differ in the order of their sums, which for one shape on one thread is always the same. oneDNN
is reached by `Tensor.to_mkldnn`, a copy that some dozens of rows repay: for calibration text, not for a token at a time.
"""

import torch
from torch import Tensor
from torch.nn import functional


def operand(x: Tensor) -> Tensor:
    """Return what `product` takes as its first operand: a copy as oneDNN has it, or x itself.  x: [..., I]."""
    fits = x.dtype == torch.float32 and x.device.type == "cpu" and x.numel() > 0
    there: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    faster = torch.backends.cpu.get_cpu_capability() == "AVX512"
    return x.to_mkldnn() if fits and there and faster else x


def product(left: Tensor, right: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return left @ right.T + bias, [..., O], as an ordinary tensor; gradients flow.

    Args:
        left: [..., I], as `operand` returns it.
        right: [O, I], an ordinary tensor of the same dtype.
        bias: [O], or None.
    """
    made = functional.linear(left, right, bias)
    return made.to_dense() if made.is_mkldnn else made
