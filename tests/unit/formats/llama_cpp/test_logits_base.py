"""llama.cpp's base of a KL divergence: its bytes, its values and its formula, number by number."""

import math
import struct

import numpy as np
import pytest
import torch

from quantflow.errors import InputError
from quantflow.formats.llama_cpp.logits_base import (
    chunks_of,
    encoded,
    is_logits_base,
    open_logits_base,
    writing_base,
)

VOCABULARY, CHUNK = 7, 6  # an odd vocabulary has one code more in each row


def logits(seed: int, *, spread: float = 6.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return spread * torch.randn(CHUNK, VOCABULARY, generator=generator)


def written(path, *, chunks: int = 2):
    tokens = torch.arange(chunks * CHUNK).view(chunks, CHUNK) % VOCABULARY
    with writing_base(path, tokens, VOCABULARY) as writer:
        for chunk in reversed(range(chunks)):  # threads keep no order
            writer.write(chunk, logits(chunk))
    return tokens


def by_hand(row: list[float]) -> tuple[float, float, list[int]]:
    """A row's scale, least log-probability and codes, in float64."""
    largest = max(row)
    least = max(min(row), largest - 16)
    total = math.log(sum(math.exp(value - largest) for value in row))
    scale = (largest - least) / 65535
    codes = [round((value - least) / scale) if value > least else 0 for value in row]
    return scale, least - largest - total, codes


def test_the_bytes_are_those_of_the_format(tmp_path):
    tokens = written(tmp_path / "base")
    data = (tmp_path / "base").read_bytes()
    assert data[:20] == b"_logits_" + struct.pack("<iii", CHUNK, VOCABULARY, 2)
    assert data[20:68] == struct.pack("<12i", *tokens.flatten().tolist())
    width, rows = 2 * (4 + 8), 2  # positions 3 and 4 of each chunk
    assert len(data) == 68 + 2 * rows * width
    for chunk in range(2):
        for number in range(rows):
            at = 68 + (chunk * rows + number) * width
            scale, least, *codes = struct.unpack("<ff8H", data[at : at + width])
            right = by_hand(logits(chunk)[3 + number].tolist())
            assert scale == pytest.approx(right[0], rel=1e-6)
            assert least == pytest.approx(right[1], rel=1e-6)
            assert codes[-1] == 0
            assert np.abs(np.subtract(codes[:-1], right[2])).max() <= 1  # float32 at a half


def test_values_come_back_within_half_a_step_and_far_ones_at_sixteen_nats():
    row = torch.tensor([[0.0, -3.0, -15.9, -40.0, 1.0, 0.5, 0.25]])
    rows = encoded(row)
    scale, least = rows[:, :4].copy().view("<f4")[0]
    values = scale * rows[0, 4:11].astype(np.float32) + least
    log_p = row.log_softmax(dim=-1)[0].numpy()
    near = [0, 1, 4, 5, 6]
    assert np.abs(values - log_p)[near].max() <= scale
    assert values[3] == least == pytest.approx(log_p.max() - 16, abs=1e-5)


def test_a_row_of_equal_logits_has_no_scale():
    rows = encoded(torch.full((1, 4), 2.5))
    scale, least = rows[:, :4].copy().view("<f4")[0]
    assert (scale, least) == (0, pytest.approx(-math.log(4)))
    assert not rows[0, 4:].any()


def test_the_divergence_is_llama_cpps_sum_over_what_the_base_holds(tmp_path):
    tokens = written(tmp_path / "base")
    base = open_logits_base(tmp_path / "base")
    candidate = logits(9)
    found = base.compare(1, {"q": candidate})["q"]
    assert found.lengths.tolist() == [2]
    for number in range(2):
        log_p = base.log_probabilities(1)[number].double()
        log_q = candidate[3 + number].double().log_softmax(dim=-1)
        kld = sum(p.exp() * (p - q) for p, q in zip(log_p, log_q, strict=True) if p > -16)
        following = tokens[1, 4 + number]
        assert found.kld[number] == pytest.approx(float(kld), rel=1e-5)
        assert found.nll_candidate[number] == pytest.approx(-float(log_q[following]), rel=1e-5)
        assert found.nll_baseline[number] == pytest.approx(-float(log_p[following]), rel=1e-6)
        assert found.agreement[number] == (log_p.argmax() == log_q.argmax())


def test_what_lies_below_sixteen_nats_counts_as_nothing(tmp_path):
    """A candidate that denies a token of 1e-8 loses nothing: the base does not know of it."""
    rows = torch.zeros(CHUNK, VOCABULARY)
    rows[:, 0] = 18.5
    with writing_base(tmp_path / "b", torch.zeros(2, CHUNK, dtype=torch.int64), VOCABULARY) as base:
        for chunk in range(2):
            base.write(chunk, rows)
    other = rows.clone()
    other[:, 1:] = -50.0
    found = open_logits_base(tmp_path / "b").compare(0, {"q": other})["q"]
    assert found.kld.abs().max() < 1e-6


def test_chunks_begin_with_bos_where_the_tokenizer_adds_one(tmp_path):
    tokens = written(tmp_path / "base")
    base = open_logits_base(tmp_path / "base")
    assert [chunk.tolist() for chunk in base.sequences(None)] == tokens.tolist()
    assert [chunk.tolist() for chunk in base.sequences(5)] == [
        [5, *row[1:]] for row in tokens.tolist()
    ]


def test_a_text_fills_whole_chunks():
    assert chunks_of([[1, 2, 3], [4, 5]], length=2, tokens=9).tolist() == [[1, 2], [3, 4]]
    with pytest.raises(InputError, match="3 tokens fill 1 chunks of 2, 2 are needed"):
        chunks_of([[1, 2, 3], [4, 5]], length=2, tokens=3)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda data: b"GGUF" + data[4:], "no base of a KL divergence"),
        (lambda data: data[:12], "or one that is cut"),
        (lambda data: data[:-2], "its head asks for"),
        (lambda data: data + b"\0", "its head asks for"),
        (lambda data: data[:8] + struct.pack("<iii", 6, 7, -1) + data[20:], "-1 chunks"),
        (lambda data: data[:8] + struct.pack("<iii", 1 << 30, 7, 2) + data[20:], "chunks of"),
        (lambda data: data[:20] + struct.pack("<i", 7) + data[24:], "outside of 0..6"),
        (lambda data: data[:20] + struct.pack("<i", -1) + data[24:], "outside of 0..6"),
    ],
)
def test_a_file_that_is_no_whole_base_is_refused(tmp_path, change, says):
    path = tmp_path / "base"
    written(path)
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(InputError, match=says):
        open_logits_base(path)


def test_other_logits_than_the_vocabularys_are_refused(tmp_path):
    written(tmp_path / "base")
    with pytest.raises(InputError, match="q: a vocabulary of 9, .*base has 7"):
        open_logits_base(tmp_path / "base").compare(0, {"q": torch.zeros(CHUNK, 9)})


def test_a_base_that_was_not_finished_is_not_there(tmp_path):
    path = tmp_path / "base"
    tokens = torch.zeros(2, CHUNK, dtype=torch.int64)
    with pytest.raises(RuntimeError), writing_base(path, tokens, VOCABULARY):
        raise RuntimeError("stopped")
    assert list(tmp_path.iterdir()) == []
    assert not is_logits_base(path)
    written(path)
    assert is_logits_base(path)
