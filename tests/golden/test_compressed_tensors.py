"""One small weight per layout of compressed-tensors: every stored byte, worked by hand."""

import pytest
import torch

from quantflow.core.qtensor import QTensor, QuantizedLinear
from quantflow.core.scheme import PRESETS, with_group_size
from quantflow.formats import compressed_tensors


def stored(tensor: torch.Tensor) -> tuple[torch.dtype, list[int], str]:
    """The dtype, the shape and the bytes as a little-endian file holds them, in hexadecimal."""
    return (
        tensor.dtype,
        list(tensor.shape),
        tensor.contiguous().view(torch.uint8).numpy().tobytes().hex(),
    )


FP8 = QuantizedLinear(  # 1.0 is 0x38, -448 is 0xfe, 0.5 is 0x30, 2^-9 (the smallest) is 0x01
    weight=QTensor(
        qvalue=torch.tensor([[1.0, -448.0], [0.5, 2**-9]]).to(torch.float8_e4m3fn),
        scale=torch.tensor([[0.5]]),
        scheme=PRESETS["FP8"].weights,
    ),
    scheme=PRESETS["FP8"],
    input_scale=torch.tensor([2.0]),
)
FP8_DYNAMIC = QuantizedLinear(
    weight=QTensor(
        qvalue=torch.tensor([[1.0, -448.0], [0.5, 0.0]]).to(torch.float8_e4m3fn),
        scale=torch.tensor([[0.5], [1.0]]),
        scheme=PRESETS["FP8_DYNAMIC"].weights,
    ),
    scheme=PRESETS["FP8_DYNAMIC"],
)
FP8_BLOCK_2 = QuantizedLinear(  # blocks of 2 x 2; the third row has one of its own
    weight=QTensor(
        qvalue=torch.tensor([[1.0, -448.0, 0.5, 0.0]] * 3).to(torch.float8_e4m3fn),
        scale=torch.tensor([[0.5, 1.0], [0.5, 1.0], [2.0, 4.0]]),
        scheme=with_group_size(PRESETS["FP8_BLOCK"], 2).weights,
    ),
    scheme=with_group_size(PRESETS["FP8_BLOCK"], 2),
)
W8A8_STATIC = QuantizedLinear(  # two's complement: -128 is 80, -1 is ff
    weight=QTensor(
        qvalue=torch.tensor([[-128, 127, -1], [0, 1, 2]], dtype=torch.int8),
        scale=torch.tensor([[0.5], [1.0]]),
        scheme=PRESETS["W8A8_STATIC"].weights,
    ),
    scheme=PRESETS["W8A8_STATIC"],
    input_scale=torch.tensor([2.0]),
    input_zero_point=torch.tensor([-3], dtype=torch.int8),
)
W8A16 = QuantizedLinear(  # plus 128: 00 ff 7f 80 | 81, then three zero bytes
    weight=QTensor(
        qvalue=torch.tensor([[-128, 127, -1, 0, 1]], dtype=torch.int8),
        scale=torch.tensor([[0.5]]),
        scheme=PRESETS["W8A16"].weights,
    ),
    scheme=PRESETS["W8A16"],
)
# plus 8, lowest bits first: 0 f 7 8 is the bytes f0 87; 9 a b c is a9 cb
W4A16_ASYM_G2 = QuantizedLinear(
    weight=QTensor(
        qvalue=torch.tensor([[-8, 7, -1, 0], [1, 2, 3, 4]], dtype=torch.int8),
        scale=torch.tensor([[0.5, 1.0], [2.0, 4.0]]),
        # columns: 0 8 is 80, f 7 is 7f
        zero_point=torch.tensor([[-8, 7], [0, -1]], dtype=torch.int8),
        scheme=with_group_size(PRESETS["W4A16_ASYM"], 2).weights,
    ),
    scheme=with_group_size(PRESETS["W4A16_ASYM"], 2),
)
W3A16_ASYM_G6 = QuantizedLinear(
    # Plus 4, lowest bits first. Row 0 is 0 1 2 3 4 5 6 7 and four times 7: 24 bits 88c6fa, then fff
    # and zeros. Row 1 is 7 and eleven times 0: 07.
    weight=QTensor(
        qvalue=torch.tensor([[*range(-4, 4), 3, 3, 3, 3], [3] + [-4] * 11], dtype=torch.int8),
        scale=torch.tensor([[0.5, 1.0], [2.0, 4.0]]),
        # columns: 0 5 is 28, 7 3 is 1f
        zero_point=torch.tensor([[-4, 3], [1, -1]], dtype=torch.int8),
        scheme=with_group_size(PRESETS["W3A16_ASYM"], 6).weights,
    ),
    scheme=with_group_size(PRESETS["W3A16_ASYM"], 6),
)
W2A16_G4 = QuantizedLinear(  # plus 2, lowest bits first: 0 1 2 3 is e4, 3 3 0 0 is 0f
    weight=QTensor(
        qvalue=torch.tensor([[-2, -1, 0, 1, 1, 1, -2, -2]], dtype=torch.int8),
        scale=torch.tensor([[0.5, 1.0]]),
        scheme=with_group_size(PRESETS["W2A16"], 4).weights,
    ),
    scheme=with_group_size(PRESETS["W2A16"], 4),
)

GOLDEN = {
    "FP8": (
        FP8,
        torch.float32,
        {
            "l.weight": (torch.float8_e4m3fn, [2, 2], "38fe3001"),
            "l.weight_scale": (torch.float32, [1], "0000003f"),
            "l.input_scale": (torch.float32, [1], "00000040"),
        },
    ),
    "FP8_DYNAMIC": (
        FP8_DYNAMIC,
        torch.float32,
        {
            "l.weight": (torch.float8_e4m3fn, [2, 2], "38fe3000"),
            "l.weight_scale": (torch.float32, [2, 1], "0000003f0000803f"),
        },
    ),
    "FP8_BLOCK": (
        FP8_BLOCK_2,
        torch.float32,
        {
            "l.weight": (torch.float8_e4m3fn, [3, 4], "38fe3000" * 3),
            "l.weight_scale": (torch.float32, [2, 2], "0000003f0000803f0000004000008040"),
        },
    ),
    "W8A8_STATIC": (
        W8A8_STATIC,
        torch.float32,
        {
            "l.weight": (torch.int8, [2, 3], "807fff000102"),
            "l.weight_scale": (torch.float32, [2, 1], "0000003f0000803f"),
            "l.input_scale": (torch.float32, [1], "00000040"),
            "l.input_zero_point": (torch.int8, [1], "fd"),
        },
    ),
    "W8A16": (
        W8A16,
        torch.bfloat16,
        {
            "l.weight_packed": (torch.int32, [1, 2], "00ff7f8081000000"),
            "l.weight_scale": (torch.bfloat16, [1, 1], "003f"),
            "l.weight_shape": (torch.int64, [2], "01000000000000000500000000000000"),
        },
    ),
    "W4A16_ASYM": (
        W4A16_ASYM_G2,
        torch.bfloat16,
        {
            "l.weight_packed": (torch.int32, [2, 1], "f0870000a9cb0000"),
            "l.weight_scale": (torch.bfloat16, [2, 2], "003f803f00408040"),
            "l.weight_shape": (torch.int64, [2], "02000000000000000400000000000000"),
            "l.weight_zero_point": (torch.int32, [1, 2], "800000007f000000"),
        },
    ),
    "W3A16_ASYM": (
        W3A16_ASYM_G6,
        torch.bfloat16,
        {
            "l.weight_packed": (torch.int32, [2, 2], "88c6faff0f0000000700000000000000"),
            "l.weight_scale": (torch.bfloat16, [2, 2], "003f803f00408040"),
            "l.weight_shape": (torch.int64, [2], "02000000000000000c00000000000000"),
            "l.weight_zero_point": (torch.int32, [1, 2], "280000001f000000"),
        },
    ),
    "W2A16": (
        W2A16_G4,
        torch.bfloat16,
        {
            "l.weight_packed": (torch.int32, [1, 1], "e40f0000"),
            "l.weight_scale": (torch.bfloat16, [1, 2], "003f803f"),
            "l.weight_shape": (torch.int64, [2], "01000000000000000800000000000000"),
        },
    ),
}


@pytest.mark.parametrize("name", GOLDEN)
def test_encode_writes_these_bytes(name):
    linear, scale_dtype, expected = GOLDEN[name]
    tensors = compressed_tensors.encode("l", linear, scale_dtype=scale_dtype)
    assert {key: stored(tensor) for key, tensor in tensors.items()} == expected


@pytest.mark.parametrize("name", GOLDEN)
def test_decode_reads_these_bytes(name):
    linear, _, expected = GOLDEN[name]
    tensors = {
        key: torch.frombuffer(bytearray.fromhex(content), dtype=torch.uint8)
        .view(dtype)
        .reshape(shape)
        for key, (dtype, shape, content) in expected.items()
    }
    decoded = compressed_tensors.decode("l", tensors, linear.scheme)
    assert torch.equal(decoded.weight.qvalue.float(), linear.weight.qvalue.float())
    assert torch.equal(decoded.weight.scale, linear.weight.scale)
    for ours, expected_tensor in (
        (decoded.weight.zero_point, linear.weight.zero_point),
        (decoded.input_scale, linear.input_scale),
        (decoded.input_zero_point, linear.input_zero_point),
    ):
        assert (ours is None) == (expected_tensor is None)
        assert ours is None or torch.equal(ours, expected_tensor)


def test_the_config_is_this_document():
    config = compressed_tensors.quantization_config(
        {"model.layers.0.mlp.up_proj": with_group_size(PRESETS["W4A16"], 32)},
        ignore=["lm_head"],
        model_type="llama",
    )
    assert config == {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "global_compression_ratio": None,
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {
                    "num_bits": 4,
                    "type": "int",
                    "symmetric": True,
                    "strategy": "group",
                    "group_size": 32,
                    "dynamic": False,
                },
                "input_activations": None,
                "output_activations": None,
                "format": "pack-quantized",
            }
        },
    }


def test_the_arguments_of_blocks_are_these():
    scheme = with_group_size(PRESETS["FP8_BLOCK"], 64)
    (group,) = compressed_tensors.quantization_config({"q": scheme}, ignore=[], model_type="llama")[
        "config_groups"
    ].values()
    same = {"num_bits": 8, "type": "float", "symmetric": True}
    blocks = {
        "strategy": "block",
        "group_size": None,
        "block_structure": [64, 64],
        "dynamic": False,
    }
    assert group["weights"] == same | blocks
    assert group["input_activations"] == same | {
        "strategy": "group",
        "group_size": 64,
        "dynamic": True,
    }
