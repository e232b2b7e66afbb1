"""A folder that is read once: what is read later are the bytes that were hashed, or an error."""

import gc
import hashlib
import json
import os
import random
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from quantflow.errors import InputError, IntegrityError
from quantflow.files import disk, sealed
from quantflow.files.canonical import digest_of, readable_json
from quantflow.files.checkpoint import open_checkpoint
from quantflow.files.manifest import MANIFEST_NAME
from quantflow.files.sealed import seal
from quantflow.models.reading import check_stored, read_columns, read_rows, read_tensor
from tests.shared import open_in

BLOCK = 1 << 12


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(sealed, "BLOCK", BLOCK)


@pytest.fixture
def tensors() -> dict[str, torch.Tensor]:
    """Tensors that end within blocks, fill several, and share one."""
    made = torch.Generator().manual_seed(0)
    return {
        "large": torch.randn(77, 101, generator=made),
        "block": torch.randn(BLOCK // 4, generator=made),
        "a": torch.randn(3, generator=made),
        "b": torch.randn(5, 2, generator=made).to(torch.bfloat16),
    }


@pytest.fixture
def folder(tmp_path, tensors, monkeypatch) -> Path:
    """A folder with a manifest of its files; what else an artifact's manifest has is left out."""
    folder = tmp_path / "artifact"
    (folder / "sub").mkdir(parents=True)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text('{"model_type": "llama"}')
    (folder / "sub" / "more.txt").write_bytes(bytes(range(256)) * 40)
    names = ["model.safetensors", "config.json", "sub/more.txt"]
    files = {
        name: {
            "sha256": hashlib.sha256((folder / name).read_bytes()).hexdigest(),
            "bytes": (folder / name).stat().st_size,
        }
        for name in names
    }
    (folder / MANIFEST_NAME).write_bytes(readable_json({"files": files, "digest": "0"}))
    monkeypatch.setattr(
        sealed, "read_manifest", lambda place: json.loads((place / MANIFEST_NAME).read_text())
    )
    return folder


def read(folder):
    """The sealed folder, and its tensors' places in the files."""
    opened = seal(folder)
    return opened, open_checkpoint(opened.place).with_seal(opened)


def test_hashes_copies_and_tensors_are_those_of_the_files(folder, tensors):
    opened, checkpoint = read(folder)
    for name, digest in opened.digests.items():
        assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == digest, name
    for name in ("config.json", "sub/more.txt", MANIFEST_NAME):
        assert (opened.place / name).read_bytes() == (folder / name).read_bytes()
    assert opened.place.stat().st_mode & 0o777 == 0o700
    for name, (file, info) in checkpoint.tensors.items():
        path = checkpoint.folder / file
        assert torch.equal(read_tensor(path, info), tensors[name])
        check_stored(path, info)
        if tensors[name].dim() == 2:
            rows = torch.tensor([4, 0, 1, 2])
            assert torch.equal(read_rows(path, info, rows), tensors[name][rows])
            assert torch.equal(read_columns(path, info, slice(1, 2)), tensors[name][:, 1:2])


def test_large_files_have_larger_blocks_so_that_states_stay_few():
    assert sealed.block_of(0) == sealed.block_of(BLOCK << 14) == BLOCK
    assert sealed.block_of((BLOCK << 14) + 1) == 2 * BLOCK
    assert sealed.block_of(BLOCK << 20) == BLOCK << 6


def test_the_copy_of_a_weight_file_has_its_header_and_no_weight(folder, tensors):
    """A reader that does not know of the seal finds zeros, never what somebody put there."""
    opened, checkpoint = read(folder)
    copy, whole = ((place / "model.safetensors") for place in (opened.place, folder))
    length = 8 + int.from_bytes(whole.read_bytes()[:8], "little")
    assert copy.read_bytes() == whole.read_bytes()[:length].ljust(whole.stat().st_size, b"\0")
    plain = open_checkpoint(opened.place).tensors["large"][1]
    assert not read_tensor(copy, plain).any()
    assert plain == checkpoint.tensors["large"][1]  # the same place; one of them is compared


def test_spans_of_any_length_are_read_whole_by_many_threads(folder):
    opened, _ = read(folder)
    file, content = opened.files["model.safetensors"], (folder / "model.safetensors").read_bytes()
    draw = random.Random(0)

    def piece(_):
        begin, end = sorted(draw.randrange(len(content) + 1) for _ in range(2))
        view = memoryview(bytearray(end - begin))
        file.read_into(view, begin)
        return bytes(view) == content[begin:end]

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(piece, range(400)))


@pytest.mark.parametrize("byte", [8, BLOCK - 1, BLOCK, 3 * BLOCK + 5, -1])
def test_a_byte_that_is_changed_in_place_is_found_by_whoever_reads_its_block(folder, byte):
    """gramineproject/graphene#53: a mapped file that changes between its check and its copy."""
    opened, checkpoint = read(folder)
    path = folder / "model.safetensors"
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.seek(byte % size)
        old = file.read(1)
        file.seek(byte % size)
        file.write(bytes([old[0] ^ 1]))
    changed = byte % size // BLOCK
    for file, info in checkpoint.tensors.values():
        blocks = range(info.offset // BLOCK, (info.offset + info.nbytes - 1) // BLOCK + 1)
        if changed in blocks:
            said = r"model\.safetensors: bytes \d+ to \d+ are not those that were hashed when"
            with pytest.raises(IntegrityError, match=said):
                read_tensor(checkpoint.folder / file, info)
        else:
            read_tensor(checkpoint.folder / file, info)


def test_a_file_that_is_exchanged_or_removed_is_read_as_it_was(folder, tensors):
    """FinGuardName/FinBound#80 hashed a file and loaded whatever had its name afterwards."""
    _, checkpoint = read(folder)
    save_file({name: tensor + 1 for name, tensor in tensors.items()}, folder / "forged")
    os.replace(folder / "forged", folder / "model.safetensors")
    (folder / "config.json").write_text("{}")
    shutil.rmtree(folder)
    for name, (file, info) in checkpoint.tensors.items():
        assert torch.equal(read_tensor(checkpoint.folder / file, info), tensors[name])


def test_a_file_that_gets_shorter_is_an_error(folder):
    opened, checkpoint = read(folder)
    os.truncate(folder / "model.safetensors", 5000)
    file, info = checkpoint.tensors["large"]
    with pytest.raises(IntegrityError, match="are not those that were hashed"):
        read_tensor(checkpoint.folder / file, info)
    del opened


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda folder: (folder / "config.json").write_text("{}"), r"config\.json: 2 bytes, quant"),
        (lambda folder: (folder / "config.json").unlink(), r"config\.json: recorded in"),
        (lambda folder: (folder / "more").touch(), r"more: in the folder, not recorded"),
        (lambda folder: (folder / "config.json").rename(folder / "x"), "config.json: recorded"),
        (lambda folder: os.mkfifo(folder / "pipe"), "pipe: a link or special file"),
        (lambda folder: os.symlink("config.json", folder / "link"), "link: a link or special"),
        (
            lambda folder: (folder / "config.json").write_text(
                "version https://git-lfs.github.com"
            ),
            r"a git-LFS pointer instead of the file's content; run `git lfs pull`",
        ),
    ],
    ids=["size", "missing", "added", "renamed", "fifo", "link", "pointer"],
)
def test_other_names_and_sizes_than_the_manifests_are_refused_before_more_is_read(
    folder, change, said, tmp_path, monkeypatch
):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    change(folder)
    with pytest.raises(IntegrityError, match=said):
        seal(folder)
    assert list(tmp_path.iterdir()) == [folder]  # no copy is left


def test_the_private_folder_goes_with_the_last_reader_and_holds_no_descriptor_after(folder):
    opened, checkpoint = read(folder)
    place = opened.place
    del opened
    gc.collect()
    assert place.is_dir() and open_in(folder) and open_in(place)  # the checkpoint reads there
    del checkpoint
    gc.collect()
    assert not place.exists() and not open_in(folder) and not open_in(place)


def test_a_private_folder_that_others_could_exchange_is_not_used(folder, tmp_path, monkeypatch):
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    monkeypatch.setenv("TMPDIR", str(shared))
    monkeypatch.setattr("tempfile.tempdir", None)
    with pytest.raises(InputError, match="/shared; set TMPDIR to a folder of your own"):
        seal(folder)
    assert list(shared.iterdir()) == []


def test_files_that_no_reader_takes_whole_are_not_copied(folder, monkeypatch):
    monkeypatch.setattr(sealed, "MAX_COPIED", 5000)
    opened = seal(folder)
    copy = opened.place / "sub" / "more.txt"
    assert copy.stat().st_size == 10240 and not any(copy.read_bytes())
    assert digest_of(opened.digests) and disk.replaceable(opened.place) is None


def test_private_folders_of_processes_that_were_killed_are_removed_and_no_others(
    folder, tmp_path, monkeypatch
):
    private = tmp_path / "private"
    private.mkdir()
    monkeypatch.setenv("TMPDIR", str(private))
    monkeypatch.setattr("tempfile.tempdir", None)
    held = seal(folder)
    left, young = private / f"{sealed._PREFIX}left", private / f"{sealed._PREFIX}young"
    for place in (left, young):
        (place / "sub").mkdir(parents=True)
    for place in (left, held.place):
        os.utime(place, (0, 0))
    again = seal(folder)
    assert sorted(private.iterdir()) == sorted([held.place, young, again.place])


def test_a_forked_process_leaves_the_private_folder_to_the_one_that_made_it(folder):
    opened = seal(folder)
    sealed._remove(opened.place, os.open(opened.place, os.O_RDONLY), os.getpid() + 1)
    assert opened.place.is_dir()
