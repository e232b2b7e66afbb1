"""Durable writes: the content under a name after the failure of each call."""

import errno
import grp
import os
import pwd
import threading
from pathlib import Path

import pytest

from quantflow.files import disk

CALLS = ("open", "write", "fsync", "replace")


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def failing(number: int, real, at: int):
    """The function `real` with its call number `at` failing, counted from 0."""
    seen = iter(range(1000))

    def call(*arguments, **options):
        if next(seen) == at:
            raise OSError(number, os.strerror(number))
        return real(*arguments, **options)

    return call


def test_an_atomic_write_leaves_the_content_and_nothing_beside_it(tmp_path):
    disk.write_atomic(tmp_path / "a", b"1")
    disk.write_atomic(tmp_path / "a", b"22")
    assert (tmp_path / "a").read_bytes() == b"22" and names(tmp_path) == ["a"]


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
def test_a_fault_before_the_new_name_leaves_the_old_content_and_nothing_beside_it(
    tmp_path, monkeypatch, call, number
):
    disk.write_atomic(tmp_path / "a", b"old")
    monkeypatch.setattr(os, call, failing(number, getattr(os, call), 0))
    with pytest.raises(OSError) as caught:
        disk.write_atomic(tmp_path / "a", b"new")
    monkeypatch.undo()
    assert caught.value.errno == number
    assert (tmp_path / "a").read_bytes() == b"old" and names(tmp_path) == ["a"]


def test_a_shared_file_is_written_by_one_process_after_the_other(tmp_path, monkeypatch):
    """A second writer comes between the first one's write and its rename, and waits."""
    renamed, done = disk.replace, []

    def write(content):
        disk.write_shared(tmp_path / "a", content)
        done.append(content)

    second = threading.Thread(target=write, args=(b"2",))

    def interrupted(temporary, path):
        monkeypatch.setattr(disk, "replace", renamed)
        second.start()
        second.join(0.2)
        assert second.is_alive() and temporary.read_bytes() == b"first"
        renamed(temporary, path)

    monkeypatch.setattr(disk, "replace", interrupted)
    write(b"first")
    second.join(20)
    assert sorted(done) == [b"2", b"first"]
    assert (tmp_path / "a").read_bytes() == b"2" and names(tmp_path) == ["a"]


def test_what_a_killed_writer_of_a_shared_file_left_is_taken_over(tmp_path):
    (tmp_path / ".a.tmp").write_bytes(b"a part that is longer")
    disk.write_shared(tmp_path / "a", b"1")
    assert (tmp_path / "a").read_bytes() == b"1" and names(tmp_path) == ["a"]


def test_a_fault_of_the_folder_is_reported_and_the_new_content_is_whole(tmp_path, monkeypatch):
    disk.write_atomic(tmp_path / "a", b"old")
    monkeypatch.setattr(os, "fsync", failing(errno.EIO, os.fsync, 1))  # the file's own is the first
    with pytest.raises(OSError):
        disk.write_atomic(tmp_path / "a", b"new")
    assert (tmp_path / "a").read_bytes() == b"new" and names(tmp_path) == ["a"]


def test_a_file_system_that_cannot_sync_folders_is_good_enough(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fsync", failing(errno.EINVAL, os.fsync, 1))
    disk.write_atomic(tmp_path / "a", b"new")
    assert (tmp_path / "a").read_bytes() == b"new"


def test_a_content_is_synced_before_it_gets_its_name(tmp_path, monkeypatch):
    order = []
    for call in ("fsync", "replace"):
        real = getattr(os, call)

        def record(*arguments, call=call, real=real):
            order.append(call)
            return real(*arguments)

        monkeypatch.setattr(os, call, record)
    disk.write_atomic(tmp_path / "a", b"1")
    assert order == ["fsync", "replace", "fsync"]


@pytest.mark.parametrize(
    "data", [b"", b"a", bytes(range(256)) * 9, bytearray(b"abc"), memoryview(b"abcd").cast("I")]
)
def test_a_system_that_writes_little_at_once_still_writes_everything(tmp_path, monkeypatch, data):
    write, pwrite = os.write, os.pwrite
    monkeypatch.setattr(os, "write", lambda descriptor, view: write(descriptor, view[:7]))
    monkeypatch.setattr(
        os, "pwrite", lambda descriptor, view, offset: pwrite(descriptor, view[:5], offset)
    )
    disk.write_file(tmp_path / "a", data)
    descriptor = disk.create(tmp_path / "b")
    disk.pwrite_all(descriptor, data, 3)
    os.close(descriptor)
    assert (tmp_path / "a").read_bytes() == bytes(data)
    assert (tmp_path / "b").read_bytes() == (b"\0\0\0" + bytes(data) if len(data) else b"")


def test_a_written_file_replaces_a_longer_one(tmp_path):
    disk.write_file(tmp_path / "a", b"long")
    disk.write_file(tmp_path / "a", b"s")
    assert (tmp_path / "a").read_bytes() == b"s"


def test_a_link_is_the_same_file_and_an_existing_target_is_refused(tmp_path):
    (tmp_path / "a").write_bytes(b"1")
    disk.link_or_copy(tmp_path / "a", tmp_path / "b")
    assert os.stat(tmp_path / "a").st_ino == os.stat(tmp_path / "b").st_ino
    with pytest.raises(FileExistsError):
        disk.link_or_copy(tmp_path / "a", tmp_path / "b")


def test_without_links_the_content_is_copied(tmp_path, monkeypatch):
    content = os.urandom(disk.COPY_BLOCK + 5)
    (tmp_path / "a").write_bytes(content)
    monkeypatch.setattr(os, "link", failing(errno.EXDEV, os.link, 0))
    disk.link_or_copy(tmp_path / "a", tmp_path / "b")
    assert (tmp_path / "b").read_bytes() == content
    assert os.stat(tmp_path / "a").st_ino != os.stat(tmp_path / "b").st_ino


def test_a_full_disk_is_no_reason_to_copy_instead_of_linking(tmp_path, monkeypatch):
    (tmp_path / "a").write_bytes(b"1")
    monkeypatch.setattr(os, "link", failing(errno.ENOSPC, os.link, 0))
    with pytest.raises(OSError) as caught:
        disk.link_or_copy(tmp_path / "a", tmp_path / "b")
    assert caught.value.errno == errno.ENOSPC and names(tmp_path) == ["a"]


@pytest.mark.parametrize(("call", "at"), [("read", 0), ("write", 0), ("write", 1), ("fsync", 0)])
def test_a_copy_that_fails_leaves_no_part_of_itself(tmp_path, monkeypatch, call, at):
    (tmp_path / "a").write_bytes(bytes(disk.COPY_BLOCK + 5))
    monkeypatch.setattr(os, call, failing(errno.EIO, getattr(os, call), at))
    with pytest.raises(OSError):
        disk.copy(tmp_path / "a", tmp_path / "b")
    assert names(tmp_path) == ["a"]


def test_removing_and_making_what_is_done_already_is_no_error(tmp_path):
    disk.remove(tmp_path / "missing")
    disk.make_folder(tmp_path / "a" / "b" / "c")
    disk.make_folder(tmp_path / "a" / "b" / "c")
    assert (tmp_path / "a" / "b" / "c").is_dir()
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(FileExistsError):
        disk.make_folder(tmp_path / "file")


def test_free_bytes_are_those_of_the_file_system_that_a_folder_will_be_on(tmp_path):
    expected = os.statvfs(tmp_path).f_bavail * os.statvfs(tmp_path).f_frsize
    assert abs(disk.free_bytes(tmp_path / "not" / "yet") - expected) < 1 << 30
    assert disk.free_bytes(tmp_path) > 0


@pytest.mark.parametrize("mode", [0o777, 0o775, 0o757])
def test_the_folder_in_which_others_could_exchange_a_path_is_found_through_links_too(
    tmp_path, monkeypatch, mode
):
    monkeypatch.setattr(disk, "_is_own_group", lambda gid: False)
    shared, own = tmp_path / "shared", tmp_path / "own"
    (shared / "inside" / "deep").mkdir(parents=True)
    own.mkdir()
    (shared / "link").symlink_to(own)
    (own / "first").symlink_to("../shared/link")  # through the shared folder to an own one
    (own / "file").touch()
    paths = [shared / "inside" / "deep", own / "first" / "file", own / ".." / "shared" / "inside"]
    assert [disk.replaceable(path) for path in paths] == [None] * 3
    shared.chmod(mode)
    assert [disk.replaceable(path) for path in paths] == [shared] * 3
    assert disk.replaceable(own / "file") is None
    shared.chmod(mode | 0o1000)
    assert [disk.replaceable(path) for path in paths] == [None] * 3


@pytest.mark.skipif(os.getuid() != 0, reason="a folder is given away by root alone")
def test_a_folder_of_another_user_is_one_in_which_its_owner_can_exchange_what_is_there(tmp_path):
    folder = tmp_path / "theirs"
    folder.mkdir()
    os.chown(folder, 4321, 4321)
    for mode in (0o755, 0o1755):
        folder.chmod(mode)
        assert disk.replaceable(folder / "mine") == folder


def test_the_group_that_a_user_has_alone_may_write(tmp_path, monkeypatch):
    """With umask 002 ~/.cache is 0775, of the group that has the user's name and nobody else."""
    name = pwd.getpwuid(os.getuid()).pw_name
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache").chmod(0o775)
    for group, members, alone in ((name, [], True), (name, ["eve"], False), ("staff", [], False)):
        entry = grp.struct_group((group, "x", 0, members))
        monkeypatch.setattr(disk.grp, "getgrgid", lambda gid, entry=entry: entry)
        assert (disk.replaceable(tmp_path / "cache" / "quantflow") is None) == alone


def test_the_owner_of_folders_outside_of_a_sandbox_is_no_user_in_it(monkeypatch):
    maps = {"/proc/self/uid_map": "0 1000 1", "/proc/sys/kernel/overflowuid": "65534"}
    monkeypatch.setattr(Path, "read_text", lambda path: maps[str(path)])
    assert disk._is_unmapped(65534) and not disk._is_unmapped(1000)
    maps["/proc/self/uid_map"] = "0 0 4294967295"  # no sandbox: a user as others are
    assert not disk._is_unmapped(65534)
