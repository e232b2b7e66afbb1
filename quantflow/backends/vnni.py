"""Our own kernels (quantflow/core/kernels.c, AVX512-VNNI), each under the name of the linears that it runs.

w8a8: integer products. The input is quantized per token at run time, or with the stored scale and zero point of a static
scheme. The instruction multiplies unsigned with signed bytes: inputs are shifted by 128, which begins every sum at
-(128 + zero_point) * sum(weight). The sums are exact integers.

w4a8: the same in groups; a zero point of the weight is taken out as zero_point * sum(input). With bfloat16 inputs both are more
exact than the oracle, which rounds the dequantized input.

w4a16, w8a16: the integers qvalue - zero_point become bfloat16 or float32 in registers, exactly; the inputs are not rounded, and
the scale of a group multiplies its sum. Nothing is rounded but the sums, so they are closer to the exact product than the
oracle, which rounds the dequantized weight. 2 and 3 bits are stored in 4, 5 and 6 in 8.

fp8: e4m3 weights are kept as bytes and widened to bfloat16 in registers, exactly; inputs as they are, or quantized to e4m3. No
CPU multiplies float8; a product of two e4m3 values, or of one and a bfloat16, is exact in float32. Source: Micikevicius et
al. 2022, arXiv:2209.05433.

w4a16_int8: a scheme that leaves inputs alone, run with inputs quantized to int8 per token as w4a8 does. Another model than the
artifact's: faster for prompts and batches, and less exact.
"""

from collections.abc import Callable
from dataclasses import replace

import torch

from quantflow.core import float8, kernels
from quantflow.core.backend import Backend
from quantflow.core.kernels import Prepared
from quantflow.core.qtensor import QuantizedLinear
from quantflow.core.scheme import LinearScheme, TensorScheme

Lack = Callable[[LinearScheme], str | None]  # what is needed, and what the scheme has instead; None where that is no other
_TOKENS = TensorScheme(kind="int", num_bits=8, granularity="per_token", dynamic=True)


def _four_bits(scheme: LinearScheme) -> str | None:
    weights = scheme.weights
    if weights.kind == "int" and weights.num_bits <= 4:
        return None
    return f"integer weights of at most 4 bits, scheme {scheme.name} has {weights.kind}{weights.num_bits}"


def _eight_bits(scheme: LinearScheme) -> str | None:
    weights = scheme.weights
    alike = (weights.kind, weights.num_bits, weights.symmetric) == ("int", 8, True)
    return None if alike else f"symmetric int8 weights, scheme {scheme.name} has others"


def _five_bits_or_more(scheme: LinearScheme) -> str | None:
    weights = scheme.weights
    if weights.kind == "int" and (weights.num_bits in (5, 6) or (weights.num_bits == 8 and weights.symmetric)):
        return None
    return f"symmetric int8 weights, or 5 or 6 bits, scheme {scheme.name} has others"


def _int8_inputs(scheme: LinearScheme) -> str | None:
    inputs = scheme.input
    if inputs is not None and (inputs.kind, inputs.num_bits) == ("int", 8):
        return None
    return f"int8 inputs, scheme {scheme.name} has {'none' if inputs is None else inputs.kind}"


def _symmetric_int8_inputs(scheme: LinearScheme) -> str | None:
    inputs = scheme.input
    if inputs is not None and (inputs.kind, inputs.num_bits, inputs.symmetric) == ("int", 8, True):
        return None
    return f"symmetric int8 inputs, scheme {scheme.name} has {'none' if inputs is None else 'others'}"


def _inputs_as_they_are(scheme: LinearScheme) -> str | None:
    return None if scheme.input is None else f"inputs in the model's dtype, scheme {scheme.name} quantizes them"


def _e4m3(scheme: LinearScheme) -> str | None:
    tensors = (
        {"weights": scheme.weights} if scheme.input is None else {"weights": scheme.weights, "inputs or none": scheme.input}
    )
    for what, tensor in tensors.items():
        if tensor.kind != "float" or float8.FLAVOURS[tensor.float8].dtype != torch.float8_e4m3fn:
            found = tensor.float8 if tensor.kind == "float" else f"{tensor.kind}{tensor.num_bits}"
            return f"e4m3fn {what}, scheme {scheme.name} has {found}"
    return None


def _with_int8_inputs(linear: QuantizedLinear, dtype: torch.dtype) -> Prepared:
    return kernels.prepare(replace(linear, scheme=replace(linear.scheme, input=_TOKENS)), dtype)


def _kernel(name: str, *lacks: Lack, prepare: Callable[[QuantizedLinear, torch.dtype], Prepared] = kernels.prepare) -> Backend:
    def why_not(scheme: LinearScheme, device: torch.device, *, shape: tuple[int, int], dtype: torch.dtype) -> str | None:
        for lack in lacks:
            found = lack(scheme)
            if found is not None:
                return f"{name} needs {found}"
        return kernels.why_not(scheme, device, shape=shape, dtype=dtype, name=name)

    return Backend(name=name, why_not=why_not, prepare=prepare, linear=kernels.linear)


BACKENDS = (
    _kernel("w8a8", _eight_bits, _int8_inputs),
    _kernel("w4a8", _four_bits, _symmetric_int8_inputs),
    _kernel("w4a16", _four_bits, _inputs_as_they_are),
    _kernel("w8a16", _five_bits_or_more, _inputs_as_they_are),
    _kernel("fp8", _e4m3),
)
BY_NAME_ONLY = (_kernel("w4a16_int8", _four_bits, _inputs_as_they_are, prepare=_with_int8_inputs),)
