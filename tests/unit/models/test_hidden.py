"""Hidden states between two layers: the same in memory and on disk, whole after interruption."""

import hashlib
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quantflow.errors import InputError, UsageError
from quantflow.models.hidden import WRITTEN, HiddenStates

SHAPES = [(1, 3, 4), (1, 1, 4), (1, 5, 4)]
NBYTES = [48, 16, 80]


def generation(seed):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def put_all(hidden, tensors):
    for index, tensor in enumerate(tensors):
        hidden.put(index, tensor)


def test_what_was_put_is_what_is_read(tmp_path):
    hidden = HiddenStates(3, folder=tmp_path)
    for label in range(3):
        tensors = generation(label)
        put_all(hidden, tensors)
        hidden.commit(label, key="k")
        assert all(torch.equal(hidden.get(index), tensor) for index, tensor in enumerate(tensors))


def test_with_a_folder_nothing_stays_in_memory(tmp_path):
    hidden, tensor = HiddenStates(1, folder=tmp_path), torch.ones(1, 2, 4)
    put = weakref.ref(tensor.untyped_storage())
    hidden.put(0, tensor)
    del tensor
    assert put() is None


def test_while_a_generation_is_put_later_sequences_are_still_of_the_current_one(tmp_path):
    hidden = HiddenStates(3, folder=tmp_path)
    old, new = generation(0), generation(1)
    put_all(hidden, old)
    hidden.commit(0, key="k")
    for index in range(3):
        assert torch.equal(hidden.get(index), old[index])
        hidden.put(index, new[index])
        assert torch.equal(hidden.get(index), new[index])


def test_generations_may_differ_in_dtype_and_shape(tmp_path):
    """A layer that keeps its sum in float32 (Mamba) returns that where it was given bfloat16."""
    hidden = HiddenStates(3, folder=tmp_path)
    old = [tensor.to(torch.bfloat16) for tensor in generation(0)]
    new = [tensor[..., :2] for tensor in generation(1)]
    put_all(hidden, old)
    hidden.commit(0, key="k")
    for index in range(3):
        assert torch.equal(hidden.get(index), old[index])
        hidden.put(index, new[index])
        assert torch.equal(hidden.get(index), new[index])
    hidden.commit(1, key="k")
    again = HiddenStates(3, folder=tmp_path)
    assert again.restore(1, key="k")
    for index, tensor in enumerate(new):
        assert torch.equal(hidden.get(index), tensor) and torch.equal(again.get(index), tensor)


def test_without_a_folder_generations_follow_each_other_in_memory():
    hidden = HiddenStates(3)
    for seed in range(3):
        put_all(hidden, generation(seed))
        hidden.commit(seed, key="k")
        assert all(
            torch.equal(hidden.get(index), tensor) for index, tensor in enumerate(generation(seed))
        )
    assert not hidden.restore(2, key="k")


def test_what_is_not_committed_when_it_ends_takes_no_disk(tmp_path):
    hidden = HiddenStates(3, folder=tmp_path)
    put_all(hidden, generation(0))
    hidden.commit(0, key="k")
    put_all(hidden, generation(1))
    hidden.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["00000.hidden", "00000.json"]
    assert HiddenStates(3, folder=tmp_path).restore(0, key="k")


def test_the_file_is_the_bytes_of_the_sequences_under_their_hash(tmp_path):
    hidden = HiddenStates(3, folder=tmp_path)
    tensors = generation(7)
    put_all(hidden, tensors)
    hidden.commit(12, key="k")
    expected = b"".join(tensor.numpy().tobytes() for tensor in tensors)
    assert (tmp_path / "00012.hidden").read_bytes() == expected
    assert hashlib.sha256(expected).hexdigest() in (tmp_path / "00012.json").read_text()
    assert len(expected) == sum(NBYTES)


def test_only_the_committed_generation_stays_and_a_new_process_takes_it_up(tmp_path):
    hidden = HiddenStates(3, folder=tmp_path)
    for label in range(3):
        put_all(hidden, generation(label))
        hidden.commit(label, key="k")
    hidden.put(0, generation(9)[0])  # killed in the middle of the next generation
    hidden.close()
    again = HiddenStates(3, folder=tmp_path)
    assert not again.restore(1, key="k")
    assert again.restore(2, key="k")
    assert all(torch.equal(again.get(index), tensor) for index, tensor in enumerate(generation(2)))
    put_all(again, generation(3))
    again.commit(3, key="k")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["00003.hidden", "00003.json"]


def test_where_all_generations_are_kept_each_is_taken_up_by_its_label(tmp_path):
    hidden = HiddenStates(3, folder=tmp_path, keep=True)
    for label in range(3):
        put_all(hidden, generation(label))
        hidden.commit(label, key="k")
    hidden.close()
    for label in (1, 0, 2):
        again = HiddenStates(3, folder=tmp_path, keep=True)
        assert again.restore(label, key="k")
        assert all(
            torch.equal(again.get(index), tensor) for index, tensor in enumerate(generation(label))
        )


@pytest.mark.parametrize(
    "harm",
    ["other key", "bit flipped", "cut short", "record cut short", "record gone", "other count"],
)
def test_a_generation_that_is_damaged_or_foreign_is_not_taken_up(tmp_path, harm):
    hidden = HiddenStates(3, folder=tmp_path)
    put_all(hidden, generation(0))
    hidden.commit(4, key="k")
    file, record = tmp_path / "00004.hidden", tmp_path / "00004.json"
    content = file.read_bytes()
    if harm == "bit flipped":
        file.write_bytes(bytes([content[0] ^ 1]) + content[1:])
    if harm == "cut short":
        file.write_bytes(content[:-1])
    if harm == "record cut short":
        record.write_bytes(record.read_bytes()[:-5])
    if harm == "record gone":
        record.unlink()
    again = HiddenStates(2 if harm == "other count" else 3, folder=tmp_path)
    assert not again.restore(4, key="other" if harm == "other key" else "k")


def test_sequences_are_put_in_order_and_all_of_them(tmp_path):
    hidden = HiddenStates(3, folder=tmp_path)
    with pytest.raises(UsageError, match="sequence 1 put, 0 is next"):
        hidden.put(1, torch.zeros(1, 1, 4))
    hidden.put(0, torch.zeros(1, 1, 4))
    with pytest.raises(UsageError, match="1 of 3 sequences"):
        hidden.commit(0, key="k")


def test_a_file_that_was_cut_while_it_was_used_is_named(tmp_path):
    hidden = HiddenStates(3, folder=tmp_path)
    put_all(hidden, generation(0))
    hidden.commit(0, key="k")
    (tmp_path / "00000.hidden").write_bytes(b"1234")
    with pytest.raises(InputError, match="00000.hidden ends"):
        hidden.get(2)


def test_discard_leaves_nothing(tmp_path):
    hidden = HiddenStates(3, folder=tmp_path / "private")
    put_all(hidden, generation(0))
    hidden.commit(0, key="k")
    hidden.put(0, generation(1)[0])
    hidden.discard()
    assert list(tmp_path.iterdir()) == []


def test_a_file_of_somebody_else_in_the_folder_stays(tmp_path):
    """A folder that was named wrongly, such as a model's own, loses nothing."""
    for name in ("model.safetensors", "config.json"):
        (tmp_path / name).write_text(name)
    hidden = HiddenStates(3, folder=tmp_path)
    for label in range(2):
        put_all(hidden, generation(label))
        hidden.commit(label, key="k")
    left = ["00001.hidden", "00001.json", "config.json", "model.safetensors"]
    assert sorted(path.name for path in tmp_path.iterdir()) == left
    with pytest.raises(OSError, match="not empty"):
        hidden.discard()
    assert sorted(path.name for path in tmp_path.iterdir()) == left[2:]


@settings(max_examples=25)
@given(lengths=st.lists(st.integers(1, 6), min_size=1, max_size=6), dtype=st.booleans())
def test_any_lengths_come_back_in_any_dtype(tmp_path_factory, lengths, dtype):
    folder = tmp_path_factory.mktemp("hidden")
    tensors = [
        torch.randn(1, length, 3).to(torch.bfloat16 if dtype else torch.float32)
        for length in lengths
    ]
    hidden = HiddenStates(len(lengths), folder=folder)
    put_all(hidden, tensors)
    hidden.commit(0, key="k")
    again = HiddenStates(len(lengths), folder=folder)
    assert again.restore(0, key="k")
    for store in (hidden, again):
        assert all(torch.equal(store.get(index), tensor) for index, tensor in enumerate(tensors))


def same(one, other):
    """Whether two tensors are one in memory."""
    return one.data_ptr() == other.data_ptr() and one.shape == other.shape


def test_of_resident_generations_every_eighth_is_written_and_taken_up(tmp_path):
    hidden = HiddenStates(3, folder=tmp_path, resident=True)
    for label in range(2 * WRITTEN + 3):
        tensors = generation(label)
        put_all(hidden, tensors)
        hidden.commit(label, key="k")
        assert all(same(hidden.get(index), tensor) for index, tensor in enumerate(tensors))
        last = label // WRITTEN * WRITTEN
        assert [path.name for path in sorted(tmp_path.glob("*.hidden"))] == [
            f"{last:05d}.hidden" for _ in range(last > 0)
        ]
    again = HiddenStates(3, folder=tmp_path, resident=True)
    assert not again.restore(2 * WRITTEN + 2, key="k")
    assert again.restore(2 * WRITTEN, key="k")
    old, new = generation(2 * WRITTEN), generation(2 * WRITTEN + 1)
    for index in range(3):  # one is replaced while those behind it are still on disk
        assert torch.equal(again.get(index), old[index])
        again.put(index, new[index])
        assert same(again.get(index), new[index])


def test_ranks_wait_for_each_other_at_every_resident_generation(tmp_path):
    hidden, waited = HiddenStates(3, folder=tmp_path, resident=True), []
    for label in range(WRITTEN + 1):
        put_all(hidden, generation(label))
        hidden.commit(label, key="k", settled=lambda label=label: waited.append(label))
    assert waited == list(range(WRITTEN + 1))


def test_a_resident_generation_that_is_not_whole_is_not_committed(tmp_path):
    hidden = HiddenStates(3, folder=tmp_path, resident=True)
    hidden.put(0, generation(0)[0])
    with pytest.raises(UsageError, match="1 of 3 sequences"):
        hidden.commit(WRITTEN, key="k")
