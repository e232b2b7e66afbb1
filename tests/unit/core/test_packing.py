"""Bit packing against shifts written out in numpy, and against compressed-tensors."""

import numpy as np
import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32, unpack_from_int32
from hypothesis import given, settings
from hypothesis import strategies as st

from quantflow.core.packing import elements_of_whole_words, pack, unpack
from quantflow.errors import SchemeError


def test_one_word_of_4_bits_worked_by_hand():
    # -8 -> 0, -7 -> 1, 0 -> 8, 7 -> 15, lowest bits first
    qvalue = torch.tensor([[-8, -7, 0, 7, 1, 2, 3, -1]], dtype=torch.int8)
    assert pack(qvalue, 4).tolist() == [[0x7BA9F810]]


def test_one_word_of_8_bits_worked_by_hand():
    # -128 -> 0, 127 -> 255, 0 -> 128, -127 -> 1
    qvalue = torch.tensor([[-128, 127, 0, -127]], dtype=torch.int8)
    assert pack(qvalue, 8).tolist() == [[0x0180FF00]]


def test_one_word_of_2_bits_worked_by_hand():
    # -2 -> 0, -1 -> 1, 0 -> 2, 1 -> 3: four elements are the byte 0b11_10_01_00
    qvalue = torch.tensor([[-2, -1, 0, 1] * 4], dtype=torch.int8)
    assert pack(qvalue, 2).tolist() == [[0xE4E4E4E4 - 2**32]]
    assert pack(qvalue[:, :5], 2).tolist() == [[0x000000E4]]


def test_elements_of_3_bits_across_two_word_boundaries_worked_by_hand():
    # -4 is stored as zero bits. Element 10 stands at bits 30 to 32, element 21 at bits 63 to 65:
    # 0b101 is split into 01 and 1, 0b110 into 0 and 11.
    qvalue = torch.full((1, 32), -4, dtype=torch.int8)
    qvalue[0, 10], qvalue[0, 21] = 0b101 - 4, 0b110 - 4
    assert pack(qvalue, 3).tolist() == [[0b01 << 30, 0b1, 0b11]]
    assert torch.equal(
        unpack(torch.tensor([[0b01 << 30, 0b1, 0b11]], dtype=torch.int32), 3, 32), qvalue
    )


def test_the_first_bytes_of_3_bits_worked_by_hand():
    # 0 1 2 3 4 5 6 7, lowest bits first: 111 110 101 100 011 010 001 000 is 0xFAC688
    qvalue = torch.arange(-4, 4, dtype=torch.int8)[None]
    assert pack(qvalue, 3).tolist() == [[0xFAC688]]


def test_the_first_bytes_of_5_and_6_bits_worked_by_hand():
    # 1 2 3 4 5 6 7 8, lowest bits first. 5 bits: 01000 00111 00110 00101 00100 00011 00010 00001 is
    # 0x41CC520C41.
    qvalue = torch.arange(1, 9, dtype=torch.int8)[None]
    assert pack(qvalue - 16, 5).tolist() == [[0xCC520C41 - 2**32, 0x41]]
    # 6 bits: 001000 000111 000110 000101 000100 000011 000010 000001 is 0x207185103081.
    assert pack(qvalue - 32, 6).tolist() == [[0x85103081 - 2**32, 0x2071]]


@pytest.mark.parametrize("num_bits", [2, 3, 5, 6])
def test_rows_are_the_bits_of_one_large_number(num_bits):
    generator = torch.Generator().manual_seed(num_bits)
    half = 1 << (num_bits - 1)
    qvalue = torch.randint(-half, half, (7, 101), generator=generator).to(torch.int8)
    for row, words in zip(
        qvalue.tolist(), pack(qvalue, num_bits).numpy().view(np.uint32).tolist(), strict=True
    ):
        number = sum((value + half) << (index * num_bits) for index, value in enumerate(row))
        assert words == [
            (number >> (32 * word)) & 0xFFFFFFFF for word in range(-(-101 * num_bits // 32))
        ]


@pytest.mark.parametrize(
    ("num_bits", "elements"), [(2, 16), (3, 32), (4, 8), (5, 32), (6, 16), (8, 4)]
)
def test_this_many_elements_fill_whole_words(num_bits, elements):
    assert elements_of_whole_words(num_bits) == elements


def test_a_word_whose_top_bit_is_set_is_the_negative_int32_of_the_same_bits():
    assert pack(torch.full((1, 8), 7, dtype=torch.int8), 4).tolist() == [[-1]]  # all ones
    assert pack(torch.tensor([[-8] * 7 + [0]], dtype=torch.int8), 4).tolist() == [[-(2**31)]]


@pytest.mark.parametrize("half", [0, 1])
def test_every_pair_of_bytes_packs_to_itself_and_back_in_4_bits(half):
    number = np.arange(65536, dtype=np.int64)
    nibbles = np.stack([(number >> shift) & 15 for shift in (0, 4, 8, 12)], axis=1)
    elements = np.full((65536, 8), 0, dtype=np.int64)
    elements[:, 4 * half : 4 * half + 4] = nibbles
    words = (number << (16 * half)).astype(np.uint32).view(np.int32)[:, None]
    qvalue = torch.from_numpy((elements - 8).astype(np.int8))
    assert torch.equal(pack(qvalue, 4), torch.from_numpy(words))
    assert torch.equal(unpack(torch.from_numpy(words), 4, 8), qvalue)


@pytest.mark.parametrize("half", [0, 1])
def test_every_pair_of_bytes_packs_to_itself_and_back_in_8_bits(half):
    number = np.arange(65536, dtype=np.int64)
    elements = np.zeros((65536, 4), dtype=np.int64)
    elements[:, 2 * half] = number & 255
    elements[:, 2 * half + 1] = number >> 8
    words = (number << (16 * half)).astype(np.uint32).view(np.int32)[:, None]
    qvalue = torch.from_numpy((elements - 128).astype(np.int8))
    assert torch.equal(pack(qvalue, 8), torch.from_numpy(words))
    assert torch.equal(unpack(torch.from_numpy(words), 8, 4), qvalue)


@pytest.mark.parametrize("num_bits", [2, 3, 4, 5, 6, 8])
@pytest.mark.parametrize("columns", [*range(1, 20), 31, 32, 33, 43, 64])
def test_any_number_of_columns_round_trips_and_fills_the_last_word_with_zero_bits(
    num_bits, columns
):
    offset = 1 << (num_bits - 1)
    generator = torch.Generator().manual_seed(columns)
    qvalue = torch.randint(-offset, offset, (3, columns), generator=generator).to(torch.int8)
    words = pack(qvalue, num_bits)
    assert words.shape == (3, -(-columns * num_bits // 32))
    assert words.is_contiguous()
    assert words.dtype == torch.int32
    assert torch.equal(unpack(words, num_bits, columns), qvalue)
    used = columns * num_bits % 32
    if used:
        last = words[:, -1].numpy().view(np.uint32)
        assert (last >> np.uint32(used) == 0).all()


@settings(max_examples=60)
@given(
    num_bits=st.sampled_from([2, 3, 4, 5, 6, 8]),
    rows=st.integers(1, 4),
    columns=st.integers(1, 40),
    data=st.data(),
)
def test_unpack_undoes_pack(num_bits, rows, columns, data):
    offset = 1 << (num_bits - 1)
    values = data.draw(
        st.lists(st.integers(-offset, offset - 1), min_size=rows * columns, max_size=rows * columns)
    )
    qvalue = torch.tensor(values, dtype=torch.int8).reshape(rows, columns)
    assert torch.equal(unpack(pack(qvalue, num_bits), num_bits, columns), qvalue)


@pytest.mark.parametrize("num_bits", [2, 3, 4, 5, 6, 8])
@pytest.mark.parametrize("columns", [1, 7, 8, 11, 64, 129])
def test_words_are_those_of_compressed_tensors(num_bits, columns):
    offset = 1 << (num_bits - 1)
    generator = torch.Generator().manual_seed(columns)
    qvalue = torch.randint(-offset, offset, (5, columns), generator=generator).to(torch.int8)
    theirs = pack_to_int32(qvalue, num_bits)
    assert torch.equal(pack(qvalue, num_bits), theirs)
    assert torch.equal(unpack_from_int32(pack(qvalue, num_bits), num_bits, qvalue.shape), qvalue)


def test_no_rows_and_no_columns_pack_to_nothing():
    assert pack(torch.empty(0, 9, dtype=torch.int8), 4).shape == (0, 2)
    assert pack(torch.empty(3, 0, dtype=torch.int8), 4).shape == (3, 0)
    assert unpack(torch.empty(0, 2, dtype=torch.int32), 4, 9).shape == (0, 9)
    for num_bits in (2, 3):
        assert pack(torch.empty(0, 33, dtype=torch.int8), num_bits).shape == (0, num_bits + 1)
        assert pack(torch.empty(3, 0, dtype=torch.int8), num_bits).shape == (3, 0)
        assert unpack(torch.empty(3, 0, dtype=torch.int32), num_bits, 0).shape == (3, 0)
        assert unpack(torch.empty(0, num_bits, dtype=torch.int32), num_bits, 32).shape == (0, 32)


def test_columns_of_a_transposed_tensor_pack_as_its_copy():
    qvalue = torch.randint(-4, 4, (40, 20), generator=torch.Generator().manual_seed(0)).to(
        torch.int8
    )
    assert torch.equal(pack(qvalue.T, 3), pack(qvalue.T.contiguous(), 3))
    assert torch.equal(unpack(pack(qvalue, 3).T.contiguous().T, 3, 20), qvalue)


def test_a_qvalue_that_does_not_fit_is_refused_and_the_message_gives_both_ranges():
    with pytest.raises(
        SchemeError,
        match=r"qvalue spans -9\.\.3, 4 bits hold -8\.\.7; quantize with the same num_bits",
    ):
        pack(torch.tensor([[-9, 3]], dtype=torch.int8), 4)
    with pytest.raises(SchemeError, match=r"spans 0\.\.8"):
        pack(torch.tensor([[0, 8]], dtype=torch.int8), 4)
    with pytest.raises(SchemeError, match=r"qvalue spans -4\.\.4, 3 bits hold -4\.\.3"):
        pack(torch.tensor([[-4, 4]], dtype=torch.int8), 3)
    with pytest.raises(SchemeError, match=r"qvalue spans -3\.\.0, 2 bits hold -2\.\.1"):
        pack(torch.tensor([[0, -3]], dtype=torch.int8), 2)


@pytest.mark.parametrize("num_bits", [0, 1, 7, 16])
def test_other_widths_are_refused(num_bits):
    with pytest.raises(
        SchemeError, match=f"num_bits={num_bits}; words hold elements of 2, 3, 4, 5, 6 or 8 bits"
    ):
        pack(torch.zeros(1, 8, dtype=torch.int8), num_bits)
    with pytest.raises(SchemeError, match=f"num_bits={num_bits}"):
        unpack(torch.zeros(1, 1, dtype=torch.int32), num_bits, 8)


@pytest.mark.parametrize("in_features", [0, 8, 17])
def test_words_that_do_not_match_the_recorded_shape_are_refused(in_features):
    needed = -(-in_features * 4 // 32)
    with pytest.raises(
        SchemeError, match=f"2 words, in_features={in_features} of 4 bits need {needed}; .* damaged"
    ):
        unpack(torch.zeros(1, 2, dtype=torch.int32), 4, in_features)


@pytest.mark.parametrize(("in_features", "needed"), [(10, 1), (22, 3)])
def test_words_of_3_bits_hold_21_elements_in_two(in_features, needed):
    assert unpack(torch.zeros(1, 2, dtype=torch.int32), 3, 21).tolist() == [[-4] * 21]
    with pytest.raises(
        SchemeError, match=f"2 words, in_features={in_features} of 3 bits need {needed}; .* damaged"
    ):
        unpack(torch.zeros(1, 2, dtype=torch.int32), 3, in_features)
