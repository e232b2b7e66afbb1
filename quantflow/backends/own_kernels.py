"""Our own kernels (quantflow/backends/kernels.c), each under the name of the linears that it runs.

w8a8: integer products. The input is quantized per token at run time, or with the stored scale and
zero point of a static scheme. AVX512-VNNI multiplies unsigned with signed bytes: inputs are shifted
by 128, so that every sum begins at -(128 + zero_point) * sum(weight). The sums are exact integers.

w4a8: the same in groups; inputs have a scale per token, or one in each group of the weights. A zero
point of the weight is subtracted as zero_point * sum(input). Twice a value of e2m1 is a whole
number: it is multiplied as one, by half the scale. With bfloat16 inputs w8a8 and w4a8 are more
exact than the oracle, which rounds the dequantized input.

w4a16, w8a16: the integers qvalue - zero_point become bfloat16 or float32 in registers, exactly. The
inputs are not rounded, and the scale of a group multiplies its sum. Only the sums are rounded, so
the result is closer to the exact product than the oracle's, which rounds the dequantized weight. 2
and 3 bits are stored in 4, 5 and 6 in 8.

fp8: e4m3 weights are kept as bytes and widened to bfloat16 in registers, exactly; inputs stay as
they are, or are quantized to e4m3. No CPU multiplies float8; a product of two e4m3 values, or of
one and a bfloat16, is exact in float32. Source: Micikevicius et al. 2022, arXiv:2209.05433.

mx: microscaled weights keep their codes, those of e4m3 as fp8 does, those of e2m1 two to a byte, as
on disk. The scale of a group is a float.

A scheme that leaves inputs alone, run with rounded ones
(`quantflow.core.scheme.with_rounded_inputs`), becomes one with int8 inputs in groups: w4a8 runs it.
"""

from quantflow.backends import backend, kernels, native
from quantflow.backends.backend import is_e2m1, is_e4m3, is_int, requirement
from quantflow.core.scheme import TensorScheme


def _library(_case: backend.Case) -> str | None:
    reason = native.why_not(kernels.SOURCE, cpu_flags=kernels.CPU_FLAGS)
    return None if reason is None else f"cannot be had here: {reason}"


def _more(weights: TensorScheme) -> bool:
    return is_int(weights, 5, 6) or (is_int(weights, 8) and weights.symmetric)


_FOUR = requirement(
    "needs integer weights of at most 4 bits, {c.stored}", lambda c: is_int(c.weights, 2, 3, 4)
)
_FOUR_OR_E2M1 = requirement(
    "needs weights of at most 4 bits, integers or e2m1, {c.stored}",
    lambda c: is_int(c.weights, 2, 3, 4) or is_e2m1(c.weights),
)
_MORE = requirement(
    "needs symmetric int8 weights, or 5 or 6 bits, {c.stored}", lambda c: _more(c.weights)
)
_SYMMETRIC = requirement(
    "needs symmetric inputs, {c.taken}",
    lambda c: c.scheme.input is not None and c.scheme.input.symmetric,
)
_E4M3 = requirement(
    "needs e4m3fn inputs or none, their scales as they come, {c.taken}",
    lambda c: (
        c.scheme.input is None
        or (is_e4m3(c.scheme.input) and not c.scheme.input.rounds_at_run_time)
    ),
)
_MICROSCALED = requirement(
    "needs microscaled weights, {c.stored}", lambda c: c.weights.scale_format != "float"
)
_OURS = (
    backend.on("cpu"),
    backend.FLOATS,
    requirement(
        f"needs groups that {kernels.COLUMNS} divides, not group_size {{c.weights.group_size}}",
        lambda c: (c.weights.group_size or 0) % kernels.COLUMNS == 0,
    ),
    backend.sums_in_int32(kernels.MAX_IN_FEATURES),
    _library,
)

BACKENDS = tuple(
    backend.Backend(
        name=name,
        requirements=(*own, *_OURS),
        prepare=kernels.prepare,
        linear=kernels.linear,
        prepare_packed=kernels.prepare_packed if name in ("mx", "w4a8") else None,
    )
    for name, own in {
        "w8a8": (backend.INT8_WEIGHTS, backend.INT8_INPUTS),
        "w4a8": (_FOUR_OR_E2M1, backend.INT8_INPUTS, _SYMMETRIC),
        "w4a16": (_FOUR, backend.INPUTS_AS_THEY_ARE),
        "w8a16": (_MORE, backend.INPUTS_AS_THEY_ARE),
        "fp8": (backend.E4M3_WEIGHTS, _E4M3),
        "mx": (_MICROSCALED, backend.INPUTS_AS_THEY_ARE),
    }.items()
)
