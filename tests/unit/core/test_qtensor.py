"""QTensor and QuantizedLinear hold their invariants or refuse to exist."""

import math
import sys
from dataclasses import FrozenInstanceError, replace
from types import SimpleNamespace

import pytest
import torch

from quantflow import accelerators
from quantflow.core import affine, qtensor
from quantflow.core.qtensor import QTensor, QuantizedLinear
from quantflow.core.scheme import LinearScheme, TensorScheme, preset, with_group_size
from quantflow.errors import SchemeError

CHANNEL = TensorScheme(kind="int", num_bits=8, granularity="per_channel")
TENSOR = TensorScheme(kind="float", num_bits=8, granularity="per_tensor")
GROUP = TensorScheme(kind="int", num_bits=4, granularity="per_group", group_size=2)
GROUP_ASYM = replace(GROUP, symmetric=False)


def int8(*rows: list[int]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.int8)


def grouped(**changes: object) -> QTensor:
    fields: dict[str, object] = {
        "qvalue": int8([-8, 7, 0, 1], [1, 2, 3, 4]),
        "scale": torch.tensor([[0.5, 2.0], [1.0, 3.0]]),
        "zero_point": int8([-8, 1], [0, 4]),
        "scheme": GROUP_ASYM,
    }
    return QTensor(**(fields | changes))  # type: ignore[arg-type]


def test_dequantize_by_group_with_zero_points_worked_by_hand():
    assert grouped().dequantize().tolist() == [[0.0, 7.5, -2.0, 0.0], [1.0, 2.0, -3.0, 0.0]]


def test_dequantize_by_channel_and_by_tensor_worked_by_hand():
    channel = QTensor(
        qvalue=int8([2, -4], [1, 3]), scale=torch.tensor([[0.5], [10.0]]), scheme=CHANNEL
    )
    assert channel.dequantize().tolist() == [[1.0, -2.0], [10.0, 30.0]]
    qvalue = torch.tensor([[448.0, -1.0], [0.5, 0.0]]).to(torch.float8_e4m3fn)
    tensor = QTensor(qvalue=qvalue, scale=torch.tensor([[2.0]]), scheme=TENSOR)
    assert tensor.dequantize().tolist() == [[896.0, -2.0], [1.0, 0.0]]
    assert tensor.dequantize().dtype == torch.float32


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"qvalue": torch.zeros(2, 4)},
            r"qvalue is torch.float32 \[2, 4\], the scheme needs torch.int8 \[O, I\]",
        ),
        ({"qvalue": torch.zeros(4, dtype=torch.int8)}, r"qvalue is torch.int8 \[4\]"),
        ({"qvalue": torch.zeros(0, 4, dtype=torch.int8)}, r"qvalue is empty, \[0, 4\]"),
        ({"qvalue": torch.zeros(2, 0, dtype=torch.int8)}, r"qvalue is empty, \[2, 0\]"),
        (
            {"qvalue": torch.zeros(2, 5, dtype=torch.int8)},
            r"qvalue: in_features=5 is not a multiple of group_size=2",
        ),
        (
            {"scale": torch.ones(2, 1)},
            r"scale is torch.float32 \[2, 1\], qvalue \[2, 4\] needs float32 \[2, 2\]",
        ),
        ({"scale": torch.ones(2, 2, dtype=torch.float64)}, r"scale is torch.float64 \[2, 2\]"),
        ({"zero_point": None}, r"zero_point is absent, symmetric=False"),
        (
            {"scheme": GROUP},
            r"zero_point is present, symmetric=True; give a zero_point exactly when",
        ),
        ({"zero_point": int8([0], [0])}, r"zero_point is torch.int8 \[2, 1\], scale is \[2, 2\]"),
        ({"zero_point": torch.zeros(2, 2)}, r"zero_point is torch.float32 \[2, 2\]"),
    ],
)
def test_a_qtensor_of_wrong_shape_or_dtype_cannot_be_made(changes, message):
    with pytest.raises(SchemeError, match=message):
        grouped(**changes)


def test_a_float8_qtensor_needs_the_dtype_of_its_flavour():
    qvalue = torch.zeros(2, 2).to(torch.float8_e4m3fn)
    QTensor(qvalue=qvalue, scale=torch.ones(1, 1), scheme=replace(TENSOR, float8="gaudi2"))
    with pytest.raises(
        SchemeError,
        match=r"qvalue is torch.float8_e4m3fn \[2, 2\], the scheme needs torch.float8_e5m2",
    ):
        QTensor(qvalue=qvalue, scale=torch.ones(1, 1), scheme=replace(TENSOR, float8="e5m2"))


def test_symmetric_integers_with_a_negative_scale_worked_by_hand():
    turned = grouped(scale=torch.tensor([[-0.5, 2.0], [1.0, -3.0]]), zero_point=None, scheme=GROUP)
    turned.validate("w")
    assert turned.dequantize().tolist() == [[4.0, -3.5, 0.0, 2.0], [1.0, 2.0, -9.0, -12.0]]


@pytest.mark.parametrize("value", [0.0, -0.0, math.nan, math.inf, -math.inf])
def test_a_scale_of_symmetric_integers_that_is_zero_or_not_finite_is_named(value):
    bad = grouped(scale=torch.tensor([[-0.5, 2.0], [1.0, value]]), zero_point=None, scheme=GROUP)
    with pytest.raises(
        SchemeError, match=rf"w: scale {value}, it is finite and not zero; quantize"
    ):
        bad.validate("w")


def test_a_negative_scale_of_float8_is_named():
    qvalue = torch.zeros(2, 2).to(torch.float8_e4m3fn)
    with pytest.raises(SchemeError, match=r"w: scale -1\.0, it is finite and positive"):
        QTensor(qvalue=qvalue, scale=-torch.ones(1, 1), scheme=TENSOR).validate("w")


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf])
def test_a_scale_that_is_not_finite_and_positive_is_named(value):
    bad = grouped(scale=torch.tensor([[0.5, 2.0], [1.0, value]]))
    with pytest.raises(
        SchemeError, match=rf"layer\.q_proj: scale {value}, it is finite and positive"
    ):
        bad.validate("layer.q_proj")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"qvalue": int8([8, 0, 0, 0], [0, 0, 0, 0])},
            r"w: qvalue spans 0\.\.8, 4 bits hold -8\.\.7",
        ),
        ({"qvalue": int8([0, 0, 0, 0], [0, 0, 0, -9])}, r"w: qvalue spans -9\.\.0"),
        ({"zero_point": int8([0, 0], [0, 8])}, r"w: zero_point spans 0\.\.8, 4 bits hold -8\.\.7"),
    ],
)
def test_integers_outside_their_bits_are_named(changes, message):
    with pytest.raises(SchemeError, match=message):
        grouped(**changes).validate("w")


@pytest.mark.parametrize(
    ("flavour", "code"), [("e4m3fn", 0x7F), ("e4m3fn", 0xFF), ("gaudi2", 0x78), ("gaudi2", 0x7F)]
)
def test_codes_of_a_flavour_that_mean_nothing_are_refused(flavour, code):
    qvalue = torch.tensor([[0, code]], dtype=torch.uint8).view(torch.float8_e4m3fn)
    bad = QTensor(qvalue=qvalue, scale=torch.ones(1, 1), scheme=replace(TENSOR, float8=flavour))
    with pytest.raises(SchemeError, match=rf"w: qvalue (nan|256\.0), the largest of {flavour} is"):
        bad.validate("w")


@pytest.mark.parametrize("code", [0x7C, 0xFC, 0x7E])
def test_infinities_of_e5m2_are_refused(code):
    qvalue = torch.tensor([[code]], dtype=torch.uint8).view(torch.float8_e5m2)
    with pytest.raises(SchemeError, match=r"w: qvalue (nan|inf)"):
        QTensor(
            qvalue=qvalue, scale=torch.ones(1, 1), scheme=replace(TENSOR, float8="e5m2")
        ).validate("w")


def test_values_at_the_ends_of_their_range_are_valid():
    grouped(qvalue=int8([-8, 7, -8, 7], [0, 0, 0, 0]), zero_point=int8([-8, 7], [0, 0])).validate(
        "w"
    )
    QTensor(qvalue=int8([-128, 127]), scale=torch.tensor([[1e-38]]), scheme=CHANNEL).validate("w")
    qvalue = torch.tensor([[448.0, -448.0]]).to(torch.float8_e4m3fn)
    QTensor(qvalue=qvalue, scale=torch.ones(1, 1), scheme=TENSOR).validate("w")


def test_a_qtensor_is_frozen_and_compares_by_identity():
    one, two = grouped(), grouped()
    with pytest.raises(FrozenInstanceError):
        one.scale = two.scale  # type: ignore[misc]
    assert one == one
    assert one != two


def weight(scheme: LinearScheme) -> QTensor:
    dtype = torch.float8_e4m3fn if scheme.weights.kind == "float" else torch.int8
    rows = 1 if scheme.weights.granularity == "per_tensor" else 2
    return QTensor(
        qvalue=torch.zeros(2, 4).to(dtype), scale=torch.ones(rows, 1), scheme=scheme.weights
    )


SCALE, ZERO_POINT = torch.tensor([0.5]), torch.tensor([-3], dtype=torch.int8)


@pytest.mark.parametrize(
    ("name", "inputs"),
    [
        ("FP8", {"input_scale": SCALE}),
        ("FP8_DYNAMIC", {}),
        ("W8A8", {}),
        ("W8A8_STATIC", {"input_scale": SCALE, "input_zero_point": ZERO_POINT}),
        ("W8A16", {}),
    ],
)
def test_a_linear_has_exactly_the_input_scales_that_its_scheme_names(name, inputs):
    scheme = preset(name)
    QuantizedLinear(weight=weight(scheme), scheme=scheme, **inputs)
    for other in (
        {},
        {"input_scale": SCALE},
        {"input_scale": SCALE, "input_zero_point": ZERO_POINT},
    ):
        if other.keys() != inputs.keys():
            with pytest.raises(
                SchemeError, match=rf"scheme {name}: input_scale (present|absent), input_zero_point"
            ):
                QuantizedLinear(weight=weight(scheme), scheme=scheme, **other)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (
            {"input_scale": torch.tensor(0.5)},
            r"input_scale is torch.float32 \[\], the scheme needs torch.float32 \[1\]",
        ),
        ({"input_scale": SCALE.double()}, r"input_scale is torch.float64 \[1\]"),
        ({"input_zero_point": torch.tensor([1])}, r"input_zero_point is torch.int64 \[1\]"),
    ],
)
def test_input_scales_of_another_shape_or_dtype_are_refused(inputs, message):
    scheme = preset("W8A8_STATIC")
    fields = {"input_scale": SCALE, "input_zero_point": ZERO_POINT} | inputs
    with pytest.raises(SchemeError, match=message):
        QuantizedLinear(weight=weight(scheme), scheme=scheme, **fields)


def test_a_weight_quantized_with_another_scheme_is_refused():
    with pytest.raises(
        SchemeError, match=r"scheme W8A16: weights are .*num_bits=8.*, the weight has .*num_bits=4"
    ):
        QuantizedLinear(weight=grouped(scheme=GROUP, zero_point=None), scheme=preset("W8A16"))


def test_the_input_as_a_linear_sees_it_worked_by_hand():
    x = torch.tensor([[1.3, -0.2], [127.5, 1.0]])
    assert (
        QuantizedLinear(weight=weight(preset("W8A16")), scheme=preset("W8A16")).fake_quantize_input(
            x
        )
        is x
    )
    static = QuantizedLinear(
        weight=weight(preset("W8A8_STATIC")),
        scheme=preset("W8A8_STATIC"),
        input_scale=SCALE,
        input_zero_point=ZERO_POINT,
    )
    # 1.3 / 0.5 - 3 = -0.4 -> 0 -> 1.5; -0.2 / 0.5 - 3 = -3.4 -> -3 -> 0; 255 - 3 clamps to 127 ->
    # 65; 2 - 3 -> -1 -> 1
    assert static.fake_quantize_input(x).tolist() == [[1.5, 0.0], [65.0, 1.0]]
    dynamic = QuantizedLinear(weight=weight(preset("W8A8")), scheme=preset("W8A8"))
    assert dynamic.fake_quantize_input(x)[1].tolist() == [127.0, 1.0]
    fp8 = QuantizedLinear(weight=weight(preset("FP8")), scheme=preset("FP8"), input_scale=SCALE)
    # 2.6 lies between 2.5 and 2.75; -0.4 between -0.40625 and -0.375; 255 rounds to 256; 2 is exact
    assert fp8.fake_quantize_input(x).tolist() == [[1.25, -0.203125], [128.0, 1.0]]


def test_an_input_beside_blocks_has_a_scale_per_token_and_group_worked_by_hand():
    scheme = with_group_size(preset("FP8_BLOCK"), 2)
    blocks = QTensor(
        qvalue=torch.ones(1, 4).to(torch.float8_e4m3fn),
        scale=torch.ones(1, 2),
        scheme=scheme.weights,
    )
    # Scales 896 / 448 = 2 and 7 / 448 = 1 / 64; 0.1 * 64 = 6.4 lies between 6 and 6.5. Then scale
    # 1, 1.0625 is a tie, to even.
    x = torch.tensor([[3.0, 896.0, 7.0, 0.1], [-448.0, 1.0625, 0.0, 0.0]])
    found = QuantizedLinear(weight=blocks, scheme=scheme).fake_quantize_input(x)
    assert found.tolist() == [[3.0, 896.0, 7.0, 6.5 / 64], [-448.0, 1.0, 0.0, 0.0]]


class Elsewhere:
    """An input of a device that is not here."""

    def __init__(self, kind):
        self.device = torch.device(kind)


def test_an_input_is_rounded_by_the_kernel_on_a_gpu_alone_and_where_it_takes_the_scheme(
    monkeypatch,
):
    def on_cpu(x, scheme):
        return f"scale of {x.device.type}"

    monkeypatch.setattr(affine, "scale_per_token", on_cpu)
    monkeypatch.setattr(affine, "quantize", lambda x, scale, zero, scheme: f"codes by {scale}")
    kernel = SimpleNamespace(
        takes=lambda scheme: scheme.kind == "int",
        rounded=lambda x, scale, zero, scheme: ("codes", "scales"),
    )
    int8, float8 = preset("W8A8").input, preset("FP8_DYNAMIC").input
    monkeypatch.setitem(sys.modules, "quantflow.core.rounding_kernel", kernel)
    monkeypatch.setattr(accelerators, "has_triton", lambda: True)
    for kind in ("cuda", "xpu"):
        assert qtensor.quantize_input(Elsewhere(kind), int8) == ("codes", "scales")
    for kind, scheme in (("cuda", float8), ("cpu", int8), ("hpu", int8)):
        expected = f"scale of {kind}"
        found = qtensor.quantize_input(Elsewhere(kind), scheme)
        assert found == (f"codes by {expected}", expected)
    monkeypatch.setattr(accelerators, "has_triton", lambda: False)
    assert qtensor.quantize_input(Elsewhere("cuda"), int8)[1] == "scale of cuda"
