"""Remembered hashes: when a file is read again, and when not."""

import hashlib
import json
import os
from concurrent.futures import ThreadPoolExecutor

import pytest

from quantflow.errors import InputError
from quantflow.files import digests
from quantflow.files.digests import Digests


@pytest.fixture
def read(monkeypatch):
    """The files that were read, in order; a file counts as settled at once."""
    seen = []
    real = digests.file_digest

    def record(path):
        seen.append(path.name)
        return real(path)

    monkeypatch.setattr(digests, "file_digest", record)
    monkeypatch.setattr(digests, "_SETTLED_NS", -(10**12))
    return seen


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def test_a_file_is_read_once_and_never_again_by_a_later_process(tmp_path, read):
    (tmp_path / "a").write_bytes(b"1")
    memory = Digests(tmp_path / ".hashes.json")
    assert memory.of(tmp_path / "a") == memory.of(tmp_path / "a") == sha256(b"1")
    assert Digests(tmp_path / ".hashes.json").of(tmp_path / "a") == sha256(b"1")
    assert read == ["a"]


def test_another_memory_is_read_and_not_written(tmp_path, read):
    (tmp_path / "a").write_bytes(b"1")
    (tmp_path / "b").write_bytes(b"2")
    Digests(tmp_path / "first.json").of(tmp_path / "a")
    content = (tmp_path / "first.json").read_bytes()
    second = Digests(
        tmp_path / "second.json", also=[tmp_path / "first.json", tmp_path / "missing.json"]
    )
    assert second.of(tmp_path / "a") == sha256(b"1") and second.of(tmp_path / "b") == sha256(b"2")
    assert read == ["a", "b"] and (tmp_path / "first.json").read_bytes() == content


@pytest.mark.parametrize("change", ["content", "replaced", "same size and time"])
def test_a_changed_file_is_read_again(tmp_path, read, change):
    path = tmp_path / "a"
    path.write_bytes(b"1")
    memory = Digests(tmp_path / "m.json")
    memory.of(path)
    times = os.stat(path)
    if change == "replaced":
        (tmp_path / "b").write_bytes(b"2")
        (tmp_path / "b").replace(path)
    else:
        path.write_bytes(b"22" if change == "content" else b"2")
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert memory.of(path) == sha256(path.read_bytes()) != sha256(b"1")
    assert Digests(tmp_path / "m.json").of(path) == sha256(path.read_bytes())


def test_a_file_that_was_written_just_now_is_not_remembered(tmp_path, monkeypatch, read):
    monkeypatch.setattr(digests, "_SETTLED_NS", 10**12)
    (tmp_path / "a").write_bytes(b"1")
    memory = Digests(tmp_path / "m.json")
    memory.of(tmp_path / "a")
    memory.of(tmp_path / "a")
    assert read == ["a", "a"] and not (tmp_path / "m.json").exists()


def test_a_link_is_the_file_that_it_leads_to(tmp_path, read):
    (tmp_path / "a").write_bytes(b"1")
    (tmp_path / "link").symlink_to(tmp_path / "a")
    memory = Digests()
    assert memory.of(tmp_path / "link") == memory.of(tmp_path / "a") == sha256(b"1")
    assert len(read) == 1


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b'{"version": 2, "files": {}}',
        b'{"version": 1, "files": {"a": 1}}',
        b'{"version": 1, "files": []}',
    ],
)
def test_a_damaged_or_foreign_memory_is_made_again(tmp_path, read, content):
    (tmp_path / "m.json").write_bytes(content)
    (tmp_path / "a").write_bytes(b"1")
    assert Digests(tmp_path / "m.json").of(tmp_path / "a") == sha256(b"1")
    assert len(json.loads((tmp_path / "m.json").read_bytes())["files"]) == 1


def test_an_entry_of_another_form_is_ignored(tmp_path, read):
    (tmp_path / "a").write_bytes(b"1")
    Digests(tmp_path / "m.json").of(tmp_path / "a")
    content = json.loads((tmp_path / "m.json").read_bytes())
    for row in content["files"].values():
        del row["ctime_ns"]
    (tmp_path / "m.json").write_text(json.dumps(content))
    assert Digests(tmp_path / "m.json").of(tmp_path / "a") == sha256(b"1")
    assert read == ["a", "a"]


def test_several_files_are_hashed_in_order_and_by_several_threads(tmp_path, read):
    paths = [tmp_path / str(i) for i in range(20)]
    for path in paths:
        path.write_bytes(path.name.encode())
    expected = {path: sha256(path.name.encode()) for path in paths}
    assert Digests(tmp_path / "m.json").of_all([*paths, paths[0]]) == expected
    with ThreadPoolExecutor(4) as pool:
        assert Digests(tmp_path / "n.json").of_all(paths, map_all=pool.map) == expected
    assert len(json.loads((tmp_path / "n.json").read_bytes())["files"]) == 20


def test_a_memory_whose_folder_is_not_there_yet_is_written_once_it_is(tmp_path, read):
    (tmp_path / "a").write_bytes(b"1")
    memory = Digests(tmp_path / "out" / "m.json")
    memory.of(tmp_path / "a")
    assert not (tmp_path / "out").exists()
    (tmp_path / "out").mkdir()
    memory.save()
    assert Digests(tmp_path / "out" / "m.json").of(tmp_path / "a") == sha256(b"1") and read == ["a"]


def test_a_missing_file_is_an_input_error(tmp_path):
    with pytest.raises(InputError, match="missing"):
        Digests().of(tmp_path / "missing")
