"""Bit packing against shifts written out in numpy, and against compressed-tensors."""

import numpy as np
import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32, unpack_from_int32
from hypothesis import given, settings
from hypothesis import strategies as st

from quantflow.core.packing import pack, unpack
from quantflow.errors import SchemeError


def test_one_word_of_4_bits_worked_by_hand():
    # -8 -> 0, -7 -> 1, 0 -> 8, 7 -> 15, lowest bits first
    qvalue = torch.tensor([[-8, -7, 0, 7, 1, 2, 3, -1]], dtype=torch.int8)
    assert pack(qvalue, 4).tolist() == [[0x7BA9F810]]


def test_one_word_of_8_bits_worked_by_hand():
    # -128 -> 0, 127 -> 255, 0 -> 128, -127 -> 1
    qvalue = torch.tensor([[-128, 127, 0, -127]], dtype=torch.int8)
    assert pack(qvalue, 8).tolist() == [[0x0180FF00]]


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


@pytest.mark.parametrize("num_bits", [4, 8])
@pytest.mark.parametrize("columns", range(1, 20))
def test_any_number_of_columns_round_trips_and_fills_the_last_word_with_zero_bits(num_bits, columns):
    offset, count = 1 << (num_bits - 1), 32 // num_bits
    generator = torch.Generator().manual_seed(columns)
    qvalue = torch.randint(-offset, offset, (3, columns), generator=generator).to(torch.int8)
    words = pack(qvalue, num_bits)
    assert words.shape == (3, -(-columns // count))
    assert words.dtype == torch.int32
    assert torch.equal(unpack(words, num_bits, columns), qvalue)
    used = columns % count
    if used:
        last = words[:, -1].numpy().view(np.uint32)
        assert (last >> np.uint32(used * num_bits) == 0).all()


@settings(max_examples=60, deadline=None)
@given(num_bits=st.sampled_from([4, 8]), rows=st.integers(1, 4), columns=st.integers(1, 40), data=st.data())
def test_unpack_undoes_pack(num_bits, rows, columns, data):
    offset = 1 << (num_bits - 1)
    values = data.draw(st.lists(st.integers(-offset, offset - 1), min_size=rows * columns, max_size=rows * columns))
    qvalue = torch.tensor(values, dtype=torch.int8).reshape(rows, columns)
    assert torch.equal(unpack(pack(qvalue, num_bits), num_bits, columns), qvalue)


@pytest.mark.parametrize("num_bits", [4, 8])
@pytest.mark.parametrize("columns", [1, 7, 8, 64, 129])
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


def test_a_qvalue_that_does_not_fit_is_refused_and_the_message_gives_both_ranges():
    with pytest.raises(SchemeError, match=r"qvalue spans -9\.\.3, 4 bits hold -8\.\.7; quantize with the same num_bits"):
        pack(torch.tensor([[-9, 3]], dtype=torch.int8), 4)
    with pytest.raises(SchemeError, match=r"spans 0\.\.8"):
        pack(torch.tensor([[0, 8]], dtype=torch.int8), 4)


@pytest.mark.parametrize("num_bits", [0, 3, 16])
def test_other_widths_are_refused(num_bits):
    with pytest.raises(SchemeError, match=f"num_bits={num_bits}; words hold 4 or 8 bit elements"):
        pack(torch.zeros(1, 8, dtype=torch.int8), num_bits)
    with pytest.raises(SchemeError, match=f"num_bits={num_bits}"):
        unpack(torch.zeros(1, 1, dtype=torch.int32), num_bits, 8)


@pytest.mark.parametrize("in_features", [0, 8, 17])
def test_words_that_do_not_match_the_recorded_shape_are_refused(in_features):
    with pytest.raises(SchemeError, match=f"2 words of 8 elements, in_features={in_features}; .* damaged"):
        unpack(torch.zeros(1, 2, dtype=torch.int32), 4, in_features)
