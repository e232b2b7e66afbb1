"""Blocks of llama.cpp's: bytes worked by hand, `gguf`'s own dequantization as the judge, and what no block holds."""

import gguf
import numpy as np
import pytest
import torch
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize
from hypothesis import given
from hypothesis import strategies as st

from quantflow.core.blocks import BLOCK_TYPES
from quantflow.core.qtensor import QTensor
from quantflow.core.scheme import LLAMA_CPP_PRESETS, preset
from quantflow.errors import SchemeError
from quantflow.formats.llama_cpp.encoding import encode
from quantflow.formats.llama_cpp.gguf import BLOCKS
from quantflow.numerics.grid import weight_grids
from quantflow.numerics.rounding import rounded

TYPES = sorted(BLOCK_TYPES)


def quantized(weight: torch.Tensor, name: str, *, searched: bool = True) -> QTensor:
    """Return a weight rounded to nearest onto scales that lose little, or onto its whole range."""
    scheme, kind = preset(name).weights, BLOCK_TYPES[name]
    importance = torch.ones(weight.shape[1]) if searched else None
    grids = weight_grids({"w": weight}, scheme, scale_dtype=kind.scale_dtype, importance=importance, either_sign=True)
    return rounded({"w": weight}, grids, scheme)["w"]


def read_back(blocks: torch.Tensor, name: str) -> np.ndarray:
    return dequantize(blocks.numpy(), GGMLQuantizationType[name])


@pytest.mark.parametrize("name", TYPES)
def test_gguf_knows_the_type_as_it_is_written(name):
    kind = GGMLQuantizationType[name]
    number, block = BLOCKS[name]
    assert (number, (block.elements, block.nbytes)) == (int(kind), gguf.GGML_QUANT_SIZES[kind])
    assert LLAMA_CPP_PRESETS[name].weights.block_type == name and BLOCK_TYPES[name].elements == block.elements


def test_a_block_of_q4_0_worked_by_hand():
    qvalue = torch.tensor([[*range(-8, 8), *range(7, -9, -1)]], dtype=torch.int8)
    weight = QTensor(qvalue=qvalue, scale=torch.tensor([[0.5]]), scheme=preset("Q4_0").weights)
    assert bytes(encode("w", weight)[0].tolist()) == bytes.fromhex("0038 f0e1d2c3b4a5968778695a4b3c2d1e0f")


def test_a_block_of_q5_0_worked_by_hand():
    qvalue = torch.tensor([[-16, -1, 0, 15, *[-16] * 12, *[-16] * 15, 1]], dtype=torch.int8)  # unsigned 0 15 16 31 0 ... 17
    weight = QTensor(qvalue=qvalue, scale=torch.tensor([[-2.0]]), scheme=preset("Q5_0").weights)
    assert bytes(encode("w", weight)[0].tolist()) == bytes.fromhex("00c0 0c000080 000f000f 0000000000000000 00000010")


def test_a_block_of_q8_0_worked_by_hand():
    qvalue = torch.tensor([[-128, 127, *[0] * 29, -1]], dtype=torch.int8)
    weight = QTensor(qvalue=qvalue, scale=torch.tensor([[2.0**-24]]), scheme=preset("Q8_0").weights)
    assert bytes(encode("w", weight)[0].tolist()) == bytes.fromhex("0100 807f") + bytes(29) + b"\xff"


@pytest.mark.parametrize("name", TYPES)
@given(data=st.data())
def test_ggufs_values_of_any_block_are_ours(name, data):
    rows, blocks = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 2))
    seed, size = data.draw(st.integers(0, 2**31)), data.draw(st.sampled_from([1e-30, 1e-8, 1e-4, 1.0, 300.0]))
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, blocks * BLOCK_TYPES[name].elements, generator=generator) * size
    weight[:, :: data.draw(st.integers(1, 40))] *= data.draw(st.sampled_from([0.0, 1.0, 20.0]))
    found = quantized(weight, name, searched=data.draw(st.booleans()))
    assert np.array_equal(read_back(encode("w", found), name), found.dequantize().numpy())


@pytest.mark.parametrize("name", TYPES)
def test_zeros_stay_zeros(name):
    found = quantized(torch.zeros(2, 256), name)
    assert not read_back(encode("w", found), name).any()


@pytest.mark.parametrize("name", TYPES)
def test_a_weight_too_large_for_float16_is_refused(name):
    found = quantized(torch.full((1, 256), 1e9), name)
    with pytest.raises(SchemeError, match=r"w: scale inf, it is finite and"):
        encode("w", found)


def test_a_scale_that_is_no_float16_and_weights_of_no_type_are_refused():
    qvalue = torch.zeros(1, 32, dtype=torch.int8)
    with pytest.raises(SchemeError, match=r"w: a scale is no float16; quantize the weight again"):
        encode("w", QTensor(qvalue=qvalue, scale=torch.tensor([[0.1]]), scheme=preset("Q4_0").weights))
    plain = preset("W8A16").weights
    with pytest.raises(SchemeError, match=r"w: weights of no type of llama\.cpp's; quantize with one of Q4_0"):
        encode("w", QTensor(qvalue=qvalue, scale=torch.ones(1, 1), scheme=plain))
