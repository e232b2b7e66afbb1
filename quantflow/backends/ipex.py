"""Intel's extension for PyTorch (IPEX) for int4 weights on a CPU, inputs as they are.

The extension is compiled for one release of torch, and ended with 2.8, the oldest that quantflow
takes. Beside another torch this backend says so. An artifact was made and run in an environment of
that torch and the extension (tests/parity/test_ipex.py).

The kernel's weight is (q - zero) * scale with q and zero in 0..15; ours are 8 lower. Two columns
are in a byte, the even one in its lower half. Source: the extension's
`nn/modules/weight_only_quantization.py`, 2.8.
"""

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import Tensor

from quantflow.backends import backend
from quantflow.backends.backend import Backend, Case, divides, is_int, requirement
from quantflow.core.qtensor import QuantizedLinear

DISTRIBUTION, PACKAGE = "intel-extension-for-pytorch", "intel_extension_for_pytorch"
_PER_ROW = -1  # as a group size
_INPUTS_AS_THEY_ARE, _PLAIN = 0, 0  # low-precision mode, format of the weight


def missing_here() -> str | None:
    """What this machine lacks to run the extension, in words; None when nothing is missing.

    The extension is not imported beside a torch that it was not compiled for: that ends the
    process.
    """
    try:
        installed = version(DISTRIBUTION)
    except PackageNotFoundError:
        return f"the package {DISTRIBUTION}, which is not installed"
    if _release(installed) != _release(torch.__version__):
        return (
            f"torch {_release(installed)}, which {DISTRIBUTION} {installed} was compiled for, "
            f"not {torch.__version__}"
        )
    try:
        import_module(PACKAGE)
    except (ImportError, OSError, RuntimeError) as error:
        return f"{DISTRIBUTION} in working order; importing it failed: {error}"
    return None


def _release(version_text: str) -> str:
    """The first two numbers of a version."""
    return ".".join(version_text.split(".")[:2])


def _prepare(linear: QuantizedLinear, dtype: torch.dtype) -> Any:
    """The kernel's own context of a weight, which holds it packed."""
    del dtype
    weight = linear.weight
    codes = (weight.qvalue + 8).to(torch.uint8)
    packed = codes[:, ::2] | codes[:, 1::2] << 4  # [O, I / 2]
    zero = (
        torch.zeros_like(weight.scale) if weight.zero_point is None else weight.zero_point.float()
    )
    size = weight.scheme.group_size or _PER_ROW
    pack = torch.ops.ipex_prepack.weight_only_qlinear_prepack_int4
    return pack(
        packed,
        weight.scale,
        zero + 8,
        None,
        None,
        None,
        size,
        _INPUTS_AS_THEY_ARE,
        0,
        False,
        _PLAIN,
    )


def _linear(x: Tensor, prepared: Any, bias: Tensor | None) -> Tensor:
    """The product x @ W.T + bias. x: [..., I]; returns [..., O]."""
    result: Tensor = torch.ops.torch_ipex.ipex_woq_linear(
        x.contiguous(), prepared.get_data_handle()
    )
    return result if bias is None else result + bias


def _lacking(case: Case) -> str | None:
    del case
    return None if (missing := missing_here()) is None else f"needs {missing}"


_REQUIREMENTS = (
    backend.on("cpu"),
    _lacking,
    backend.FLOATS,
    requirement("needs int4 weights, {c.stored}", lambda c: is_int(c.weights, 4)),
    backend.weights_per("per_group", "per_channel"),
    backend.INPUTS_AS_THEY_ARE,
    divides(2, 1),
)
BACKEND = Backend(name="ipex", requirements=_REQUIREMENTS, prepare=_prepare, linear=_linear)
