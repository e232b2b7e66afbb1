"""llama.cpp's blocks: bytes worked by hand, `gguf`'s dequantization as the judge, and refusals."""

import gguf
import numpy as np
import pytest
import torch
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize
from hypothesis import given, settings
from hypothesis import strategies as st

from quantflow.core import affine
from quantflow.core.block_types import BLOCK_TYPES
from quantflow.core.blocks import stored, stored_minima
from quantflow.core.dtypes import DTYPES
from quantflow.core.qtensor import QTensor
from quantflow.core.scheme import LLAMA_CPP_PRESETS, preset
from quantflow.errors import SchemeError
from quantflow.formats.llama_cpp.encoding import encode
from quantflow.formats.llama_cpp.gguf import BLOCKS
from quantflow.numerics.grid import weight_grids
from quantflow.numerics.rounding import rounded

TYPES = sorted(BLOCK_TYPES)


def quantized(weight: torch.Tensor, name: str, *, searched: bool = True) -> QTensor:
    """A weight rounded to nearest onto scales that lose little, or onto its whole range."""
    scheme, kind = preset(name).weights, BLOCK_TYPES[name]
    importance = torch.ones(weight.shape[1]) if searched else None
    grids = weight_grids(
        {"w": weight},
        scheme,
        scale_dtype=DTYPES[kind.scale_dtype],
        importance=importance,
        either_sign=True,
    )
    return rounded({"w": weight}, grids, scheme)["w"]


def read_back(blocks: torch.Tensor, name: str) -> np.ndarray:
    return dequantize(blocks.numpy(), GGMLQuantizationType[name])


@pytest.mark.parametrize("name", TYPES)
def test_gguf_knows_the_type_as_it_is_written(name):
    kind = GGMLQuantizationType[name]
    number, block = BLOCKS[name]
    assert (number, (block.elements, block.nbytes)) == (int(kind), gguf.GGML_QUANT_SIZES[kind])
    assert (
        LLAMA_CPP_PRESETS[name].weights.block_type == name
        and BLOCK_TYPES[name].elements == block.elements
    )


def test_a_block_of_q4_0_worked_by_hand():
    qvalue = torch.tensor([[*range(-8, 8), *range(7, -9, -1)]], dtype=torch.int8)
    weight = QTensor(qvalue=qvalue, scale=torch.tensor([[0.5]]), scheme=preset("Q4_0").weights)
    assert bytes(encode("w", weight)[0].tolist()) == bytes.fromhex(
        "0038 f0e1d2c3b4a5968778695a4b3c2d1e0f"
    )


def test_a_block_of_iq4_nl_worked_by_hand():
    points = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113]
    qvalue = torch.tensor([[*points, *points[::-1]]], dtype=torch.int8)
    weight = QTensor(qvalue=qvalue, scale=torch.tensor([[0.5]]), scheme=preset("IQ4_NL").weights)
    assert bytes(encode("w", weight)[0].tolist()) == bytes.fromhex(
        "0038 f0e1d2c3b4a5968778695a4b3c2d1e0f"
    )


def test_a_block_of_iq4_xs_worked_by_hand():
    points = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113]
    qvalue = torch.tensor([[*points, *points[::-1]] * 8], dtype=torch.int8)
    steps = torch.tensor([[-32.0, 31, 1, -1, 16, -17, 5, -6]])
    weight = QTensor(qvalue=qvalue, scale=0.5 * steps, scheme=preset("IQ4_XS").weights)
    # raised by 32 the steps are 0, 63, 33, 31, 48, 15, 37, 26: their highest two bits are 0 3 2 1
    # and 3 0 2 1, the nibbles below 0 f 1 f 0 f 5 a
    expected = bytes.fromhex("0038 6c63 f0f1f0a5") + bytes.fromhex(
        "f0e1d2c3b4a5968778695a4b3c2d1e0f" * 8
    )
    assert bytes(encode("w", weight)[0].tolist()) == expected


def ternary(name: str) -> QTensor:
    """-1 in every place but the first of each 32, where it is 1, and the second, where it is 0."""
    qvalue = torch.tensor([[1, 0, *[-1] * 30] * 8], dtype=torch.int8)
    return QTensor(qvalue=qvalue, scale=torch.tensor([[0.5]]), scheme=preset(name).weights)


def test_a_block_of_tq1_0_worked_by_hand():
    # raised by 1: 2, 1 and thirty 0. Five that stand 32 apart are alike: in base 3 22222 is 242 and
    # 11111 is 121, times 256 / 243 that is 254.9 and 127.5. Five that stand 16 apart are 2 0 2 0 2
    # from place 160 on, 162 + 18 + 2 = 182 or 191.7, and half of it. The last 16 begin at 240, in
    # the middle of a 32, and are 0
    expected = bytes.fromhex("ff80" + "00" * 30 + "c060" + "00" * 14 + "00000000" + "0038")
    assert bytes(encode("w", ternary("TQ1_0"))[0].tolist()) == expected


def test_a_block_of_tq2_0_worked_by_hand():
    # four that stand 32 apart are alike: 2 in each pair of bits, then 1
    expected = bytes.fromhex(("aa55" + "00" * 30) * 2 + "0038")
    assert bytes(encode("w", ternary("TQ2_0"))[0].tolist()) == expected


def of_entries(name: str, numbers: list[int], negative: dict[int, int]) -> torch.Tensor:
    """Qvalues of a block: entries by their numbers in `gguf`'s table, and signs of 8 neighbours.

    Args:
        name: type.
        numbers: numbers of the first entries; the others are 0.
        negative: place of 8 neighbours -> their signs, bit j for the j-th; 0 where not given.
    """
    table = getattr(gguf.quants, name)
    table.init_grid()
    grid = table.grid.reshape(-1, table.grid.shape[-1])
    places = np.zeros(256 // grid.shape[1], dtype=int)
    places[: len(numbers)] = numbers
    signs = np.ones((32, 8))
    for place, bits in negative.items():
        signs[place] = [-1 if bits >> j & 1 else 1 for j in range(8)]
    return torch.from_numpy(grid[places].reshape(1, 256) * signs.reshape(1, 256)).to(torch.int8)


def entry_block(name: str, numbers: list[int], negative: dict[int, int]) -> bytes:
    """The bytes of a block whose scales are 0.5 times 31, 1, 3, 5 and 31 again and again."""
    kind = BLOCK_TYPES[name]
    steps = ([31.0, 1, 3, 5] * 4)[: kind.groups]
    scale = torch.tensor([steps]) * 0.5 / kind.divisor
    qvalue = of_entries(name, numbers, negative)
    weight = QTensor(qvalue=qvalue, scale=scale, scheme=preset(name).weights)
    return bytes(encode("w", weight)[0].tolist())


# d is 0.5, 3800 with its low byte second; steps 31, 1, 3, 5 are stored as 15, 0, 1, 2: 0f 21
def test_a_block_of_iq3_s_worked_by_hand():
    # the third entry is 300, 256 + 44 = 2c with the ninth bit; the tenth is 511
    found = entry_block("IQ3_S", [0, 1, 300, 0, 0, 0, 0, 0, 0, 511], {0: 0b1, 31: 0x83})
    assert found == bytes.fromhex(
        "0038"
        + ("00012c00000000" + "0000ff" + "00" * 54)
        + ("0402" + "00" * 6)
        + ("01" + "00" * 30 + "83")
        + "0f210f21"
    )


def test_a_block_of_iq3_xxs_worked_by_hand():
    # seven of the signs 82 are 02, and 15 is moved by 28; in the second 32 the first eight have 01
    # and the third 7f, which is moved by 14: 1fc000
    found = entry_block("IQ3_XXS", [7, 255], {0: 0x82, 4: 0x81, 6: 0xFF})
    words = "020000f0 01c01f00 00000010 00000020 000000f0 00000000 00000010 00000020"
    assert found == bytes.fromhex("0038 07ff" + "00" * 62 + words)


def test_a_block_of_iq2_s_worked_by_hand():
    # 1023 is ff with both high bits, 513 is 01 with the second: 3 and 2 << 2 in the first byte
    found = entry_block("IQ2_S", [1023, 513, 0, 0, 256], {1: 0x01, 30: 0x80})
    assert found == bytes.fromhex(
        "0038"
        + ("ff01000000" + "00" * 27)
        + ("0001" + "00" * 28 + "8000")
        + ("0b01" + "00" * 6)
        + "0f21" * 4
    )


def test_a_block_of_iq2_xs_worked_by_hand():
    # 511 with seven signs 01 << 9 is 03ff, 300 with 7f << 9 is ff2c
    found = entry_block("IQ2_XS", [511, 300], {0: 0x81, 1: 0xFF})
    assert found == bytes.fromhex("0038" + "ff032cff" + "0000" * 30 + "0f21" * 4)


def test_a_block_of_iq2_xxs_worked_by_hand():
    # four numbers, then their signs and the step: 05 | 7f << 21 | 15 << 28 is ffe00005
    found = entry_block("IQ2_XXS", [1, 2, 3, 255, 9], {0: 0x05, 3: 0xFF})
    assert found == bytes.fromhex(
        "0038"
        + ("010203ff" + "0500e0ff")
        + ("09000000" + "00000000")
        + ("00000000" + "00000010")
        + ("00000000" + "00000020")
        + ("00000000" + "000000f0" + "00000000" + "00000000")
        + ("00000000" + "00000010" + "00000000" + "00000020")
    )


def test_neighbours_that_are_no_entry_and_odd_signs_are_refused():
    alone = of_entries("IQ2_XXS", [], {})
    alone[0, :8] = torch.tensor([43, 43, 43, 43, 43, 43, 25, 25])
    assert not (gguf.quants.IQ2_XXS.grid == alone[0, :8].numpy()).all(axis=-1).any()
    odd = of_entries("IQ2_XXS", [], {5: 0x01})
    for qvalue in (alone, odd):
        weight = QTensor(
            qvalue=qvalue, scale=torch.full((1, 8), 31.0), scheme=preset("IQ2_XXS").weights
        )
        with pytest.raises(SchemeError, match=r"w: a qvalue is no point of IQ2_XXS"):
            encode("w", weight)


def test_values_between_points_of_iq4_nl_go_to_the_nearer_and_from_the_middle_up():
    values = torch.tensor(
        [[-999.0, -115.6, -115.5, -4.5, -4.6, 0.0, 6.9, 7.0, 100.9, 101.0, 999.0]]
    )
    found = affine.quantize(values, torch.ones(1, 1), None, preset("IQ4_NL").weights)
    assert found.tolist() == [[-127, -127, -104, 1, -10, 1, 1, 13, 89, 113, 113]]


def test_a_qvalue_that_is_no_point_of_iq4_nl_is_refused():
    weight = fixed("IQ4_NL", [0.5], qvalue=0)
    with pytest.raises(SchemeError, match=r"w: a qvalue is no point of IQ4_NL; quantize again"):
        encode("w", weight)


def test_a_block_of_q5_0_worked_by_hand():
    # unsigned 0 15 16 31 0 ... 17
    qvalue = torch.tensor([[-16, -1, 0, 15, *[-16] * 12, *[-16] * 15, 1]], dtype=torch.int8)
    weight = QTensor(qvalue=qvalue, scale=torch.tensor([[-2.0]]), scheme=preset("Q5_0").weights)
    assert bytes(encode("w", weight)[0].tolist()) == bytes.fromhex(
        "00c0 0c000080 000f000f 0000000000000000 00000010"
    )


def test_a_block_of_q8_0_worked_by_hand():
    qvalue = torch.tensor([[-128, 127, *[0] * 29, -1]], dtype=torch.int8)
    weight = QTensor(qvalue=qvalue, scale=torch.tensor([[2.0**-24]]), scheme=preset("Q8_0").weights)
    assert (
        bytes(encode("w", weight)[0].tolist()) == bytes.fromhex("0100 807f") + bytes(29) + b"\xff"
    )


def fixed(
    name: str, scale: list[float], minimum: list[float] | None = None, qvalue: int = 0
) -> QTensor:
    """A block of one row whose values are given."""
    scheme, kind = preset(name).weights, BLOCK_TYPES[name]
    scales = torch.tensor([scale])
    zero_point = None if minimum is None else torch.tensor([minimum]) / scales
    qvalues = torch.full((1, kind.elements), qvalue, dtype=torch.int8)
    return QTensor(qvalue=qvalues, scale=scales, zero_point=zero_point, scheme=scheme)


def test_the_steps_of_q4_k_worked_by_hand():
    steps, minima = [63.0, 1, 2, 3, 33, 62, 17, 16], [0.0, 1, 63, 3, 48, 5, 6, 15]
    weight = fixed(
        "Q4_K", [0.5 * step for step in steps], [0.25 * step for step in minima], qvalue=15
    )
    # scales: 63 with 33 >> 4 on top is bf, 1 with 62 >> 4 is c1, ...; minima: 0 with 48 >> 4 is c0,
    # 1, 63, 3 with nothing; low halves, of a scale below and of a minimum above: 33 and 48 are 01,
    # 62 and 5 are 5e, 17 and 6 are 61, 16 and 15 are f0
    expected = bytes.fromhex("0038 0034 bfc14243 c0013f03 015e61f0") + b"\xff" * 128
    assert bytes(encode("w", weight)[0].tolist()) == expected


def test_the_scales_of_q6_k_worked_by_hand():
    weight = fixed("Q6_K", [-0.5 * step for step in (-128, 127, *range(1, 15))], qvalue=-32)
    expected = bytes(192) + bytes([128, 127, *range(1, 15)]) + bytes.fromhex("00b8")
    assert bytes(encode("w", weight)[0].tolist()) == expected


def test_scales_that_are_no_multiples_are_refused():
    scales = [0.5 * step for step in (63, 1, 2, 3, 33, 62, 17)] + [0.3]
    with pytest.raises(
        SchemeError,
        match=r"w: the scales of a block are no multiples of a float16 by integers of 6 bits",
    ):
        encode("w", fixed("Q4_K", scales, [0.0] * 8))


@pytest.mark.parametrize("name", TYPES)
@given(seed=st.integers(0, 2**31), size=st.sampled_from([1e-9, 1e-3, 10.0, 100.0]))
@settings(max_examples=25)
def test_scales_that_a_block_holds_are_left_as_they_are(name, seed, size):
    kind, generator = BLOCK_TYPES[name], torch.Generator().manual_seed(seed)
    wanted = torch.rand(3, 2 * kind.groups, generator=generator).add_(1e-3) * size
    if not kind.minima and kind.codebook is None:  # there signs are those of entries
        wanted *= torch.rand(wanted.shape, generator=generator).sub_(0.5).sign()
    once = stored(wanted, kind)
    assert torch.equal(stored(once, kind), once)
    if kind.scale_bits is None and size > 1:
        assert torch.equal(once, wanted.half().float())
    if kind.scale_bits is not None and size > 1:  # the largest of a block is nearly what was wanted
        top, was = (x.view(3, 2, -1).abs().amax(dim=-1) for x in (once, wanted))
        assert torch.allclose(top, was, rtol=2**-10)
    if kind.minima:
        minima = stored_minima(wanted, kind)
        assert torch.equal(stored_minima(minima, kind), minima)


@pytest.mark.parametrize("name", TYPES)
def test_searched_scales_lose_less_than_the_whole_range(name):
    weight = torch.randn(64, 512, generator=torch.Generator().manual_seed(3))
    errors = [
        (quantized(weight, name, searched=searched).dequantize() - weight).square().mean()
        for searched in (True, False)
    ]
    assert errors[0] < (0.98 if name != "Q8_0" else 1.0001) * errors[1]


def test_more_bits_lose_less():
    weight = torch.randn(64, 512, generator=torch.Generator().manual_seed(4))
    loss = {
        name: float((quantized(weight, name).dequantize() - weight).square().mean())
        for name in TYPES
    }
    assert (
        loss["Q8_0"]
        < loss["Q6_K"]
        < loss["Q5_K"]
        < loss["Q4_K"]
        < loss["Q4_0"]
        < loss["Q3_K"]
        < loss["Q2_K"]
        < loss["TQ2_0"]
        == loss["TQ1_0"]
    )
    assert loss["IQ4_NL"] < loss["IQ4_XS"] < 0.9 * loss["Q4_0"]
    # at 3.44, 3.06, 2.56, 2.31 and 2.06 bits, beside 3.44 and 2.63 of the K types
    assert (
        loss["IQ3_S"]
        < loss["Q3_K"]
        < loss["IQ3_XXS"]
        < loss["IQ2_S"]
        < loss["IQ2_XS"]
        < loss["IQ2_XXS"]
    )
    assert loss["IQ2_S"] < loss["Q2_K"]


@pytest.mark.parametrize("name", TYPES)
@settings(max_examples=12)
@given(data=st.data())
def test_ggufs_values_of_any_block_are_ours(name, data):
    rows, blocks = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 2))
    seed, size = (
        data.draw(st.integers(0, 2**31)),
        data.draw(st.sampled_from([1e-30, 1e-8, 1e-4, 1.0, 300.0])),
    )
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, blocks * BLOCK_TYPES[name].elements, generator=generator) * size
    weight[:, :: data.draw(st.integers(1, 40))] *= data.draw(st.sampled_from([0.0, 1.0, 20.0]))
    found = quantized(weight, name, searched=data.draw(st.booleans()))
    assert np.array_equal(read_back(encode("w", found), name), found.dequantize().numpy())


@pytest.mark.parametrize("name", ["TQ1_0", "TQ2_0"])
def test_a_ternary_weight_stays_as_it_is(name):
    generator = torch.Generator().manual_seed(6)
    signs = torch.randint(-1, 2, (8, 512), generator=generator).float()
    weight = signs * torch.tensor([0.013, 3.0]).half().float().repeat_interleave(256)
    assert torch.equal(quantized(weight, name).dequantize(), weight)


@pytest.mark.parametrize("name", TYPES)
def test_zeros_stay_zeros(name):
    found = quantized(torch.zeros(2, 256), name)
    # the smallest float16 times a point of 1, where zero is no point
    largest = 2.0**-24 if name.startswith("IQ") else 0.0
    assert np.abs(read_back(encode("w", found), name)).max() == largest


def test_zeros_rounded_by_their_range_alone_have_the_smallest_scale_of_iq4_nl():
    found = quantized(torch.zeros(2, 64), "IQ4_NL", searched=False)
    assert found.dequantize().unique().tolist() == [2.0**-24]


@pytest.mark.parametrize("name", TYPES)
def test_a_weight_too_large_for_float16_is_refused(name):
    found = quantized(torch.full((1, 256), 1e9), name)
    with pytest.raises(
        SchemeError, match=r"w: (scale -?(inf|nan), it is finite and|a minimum is not finite)"
    ):
        encode("w", found)


def test_a_scale_that_is_no_float16_and_weights_of_no_type_are_refused():
    qvalue = torch.zeros(1, 32, dtype=torch.int8)
    with pytest.raises(SchemeError, match=r"w: a scale is no float16; quantize the weight again"):
        encode(
            "w", QTensor(qvalue=qvalue, scale=torch.tensor([[0.1]]), scheme=preset("Q4_0").weights)
        )
    plain = preset("W8A16").weights
    with pytest.raises(
        SchemeError, match=r"w: weights of no type of llama\.cpp's; quantize with one of Q4_0"
    ):
        encode("w", QTensor(qvalue=qvalue, scale=torch.ones(1, 1), scheme=plain))
