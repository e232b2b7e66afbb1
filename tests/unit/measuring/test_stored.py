"""Statistics read from their file one at a time are what the whole file holds."""

import hashlib
import os
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save, save_file

from quantflow.errors import InputError
from quantflow.measuring.stored import Headers, StoredStatistics, read_small, write_tensors


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    """A megabyte of tensors, three dtypes, every kind of shape: more than one read takes."""
    generator = torch.Generator().manual_seed(0)
    made = {}
    for number in range(120):
        size = [1, 3, 514, 2500, 20_000][number % 5]
        made[f"{number:03d}|input|counts"] = torch.randint(99, (514,), generator=generator)
        made[f"{number:03d}|input|abs_sum"] = torch.rand(size, generator=generator).double()
        made[f"{number:03d}|input|amax"] = torch.rand((), generator=generator)
    made["a|input|channel_amax"] = torch.rand(70_000, generator=generator)  # longer than a block
    made["b|input|hessian_sum"] = torch.rand(40, 40, generator=generator)
    made["0|input|channel_amax"] = torch.empty(0)
    path = tmp_path_factory.mktemp("stored") / "statistics.safetensors"
    save_file(made, path)
    return path


@pytest.mark.parametrize("order", ["sorted", "reversed", "random", "twice"])
def test_each_tensor_is_read_as_it_stands_in_any_order(file, order):
    expected, stored = load_file(file), StoredStatistics(file, Headers())
    keys = sorted(expected, reverse=order == "reversed") * (2 if order == "twice" else 1)
    if order == "random":
        random.Random(0).shuffle(keys)
    kept = [(key, stored[key]) for key in keys]
    for key, value in kept:  # after all were read: no block is written over
        assert value.dtype == expected[key].dtype and value.shape == expected[key].shape
        assert torch.equal(value, expected[key]), key
    assert stored.keys() == expected.keys() and len(stored) == len(expected)


def test_ranks_with_the_same_header_share_it_and_others_do_not(file, tmp_path):
    headers = Headers()
    same = {key: value * 0 for key, value in load_file(file).items()}
    save_file(same, tmp_path / "same.safetensors")
    save_file({**same, "d|input|amax": torch.zeros(())}, tmp_path / "other.safetensors")
    first = headers.read(file)
    assert headers.read(tmp_path / "same.safetensors") is first
    assert headers.read(tmp_path / "other.safetensors") is not first
    assert (
        StoredStatistics(tmp_path / "same.safetensors", headers)["a|input|channel_amax"].sum() == 0
    )


def test_a_header_that_is_known_is_not_taken_for_that_of_a_shorter_file(file, tmp_path):
    headers = Headers()
    headers.read(file)
    (tmp_path / "short").write_bytes(file.read_bytes()[:-8])
    with pytest.raises(InputError, match=r"short: truncated"):
        headers.read(tmp_path / "short")


def test_a_dtype_that_no_statistic_has_is_refused(tmp_path):
    save_file({"x": torch.ones(2, dtype=torch.bfloat16)}, tmp_path / "x")
    with pytest.raises(InputError, match=r"x: x is BF16, expected one of F32, F64, I64"):
        StoredStatistics(tmp_path / "x", Headers())


def test_a_file_that_shrinks_meanwhile_is_named(file, tmp_path):
    path = tmp_path / "shrinking"
    path.write_bytes(file.read_bytes())
    stored = StoredStatistics(path, Headers())
    with path.open("r+b") as writable:
        writable.truncate(path.stat().st_size - 100_000)
    last = max(stored, key=lambda key: (stored._infos[key].offset, stored._infos[key].nbytes))
    assert stored._infos[last].nbytes > 0
    with pytest.raises(InputError, match=r"shrinking: .* has \d+ bytes, \d+ when it was opened"):
        stored[last]


NAMES = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=4).filter(
    lambda name: name != "__metadata__"
)
SHAPES = st.sampled_from([(), (0,), (1,), (3,), (2, 5)])
SPECS = st.tuples(SHAPES, st.sampled_from([torch.float32, torch.float64, torch.int64]))


@given(st.dictionaries(NAMES, SPECS, max_size=8))
def test_what_is_written_is_what_the_format_s_own_writer_makes(tmp_path_factory, specs):
    tensors = {name: (torch.rand(shape) * 9).to(dtype) for name, (shape, dtype) in specs.items()}
    path = tmp_path_factory.mktemp("written") / "f"
    digest = write_tensors(path, tensors)
    assert path.read_bytes() == save(tensors)
    assert digest == hashlib.sha256(path.read_bytes()).hexdigest()


def test_tensors_longer_than_what_is_written_at_once_stand_between_short_ones(tmp_path):
    sizes = {
        "a": 7,
        "b": 3_000_000,
        "c": 0,
        "d": 900_000,
        "e": 900_000,
        "f": 5,
        "g": 1 << 20,
        "h": (1 << 20) + 1,
        "i": 1,
    }
    tensors = {name: torch.arange(size).float() for name, size in sizes.items()}
    assert write_tensors(tmp_path / "f", tensors) == hashlib.sha256(save(tensors)).hexdigest()
    assert (tmp_path / "f").read_bytes() == save(tensors)


def test_tensors_that_share_memory_or_lie_across_it_are_each_written_whole(tmp_path):
    whole = torch.rand(40, 30)
    tensors = {
        "across": whole.T,
        "column": whole[:, 3],
        "row": whole[5],
        "whole": whole,
        "again": whole,
        "learned": whole + 0,
    }
    tensors["learned"].requires_grad_()
    write_tensors(tmp_path / "f", tensors)
    apart = {
        name: value.detach().clone(memory_format=torch.contiguous_format)
        for name, value in tensors.items()
    }
    assert (tmp_path / "f").read_bytes() == save(apart)


def test_matrices_are_read_whenever_they_are_asked_for_and_kept_by_nobody(tmp_path):
    tensors = {
        "a|input|amax": torch.tensor(2.0),
        "a|input|hessian_sum": torch.eye(200),
        "a|input|count": torch.tensor(3),
    }
    tensors["a|gradient|gradient_sum"] = 2 * torch.eye(300)
    write_tensors(tmp_path / "f", tensors)
    read = read_small(tmp_path / "f")
    assert sorted(read) == sorted(tensors) and len(read) == 4
    for key, value in tensors.items():
        assert torch.equal(read[key], value) and key in read
        assert read.spec(key) == ("I64" if key.endswith("count") else "F32", tuple(value.shape))
    one, two = read["a|gradient|gradient_sum"], read["a|gradient|gradient_sum"]
    one.zero_()
    assert torch.equal(two, 2 * torch.eye(300))
    assert read["a|input|amax"] is read["a|input|amax"]
    with pytest.raises(KeyError):
        read["b|input|amax"]
    assert (
        write_tensors(tmp_path / "g", read)
        == hashlib.sha256((tmp_path / "f").read_bytes()).hexdigest()
    )


def test_a_matrix_whose_file_ends_early_is_named(tmp_path):
    write_tensors(tmp_path / "f", {"a|input|hessian_sum": torch.eye(300)})
    read = read_small(tmp_path / "f")
    os.truncate(tmp_path / "f", 1000)
    with pytest.raises(
        InputError, match=r"f: a\|input\|hessian_sum has \d+ bytes, 360000 when it was opened"
    ):
        read["a|input|hessian_sum"]
