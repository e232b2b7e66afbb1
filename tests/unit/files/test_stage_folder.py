"""A stage's folder: its holder, its end, and what a crash leaves."""

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from quantflow.errors import InputError, IntegrityError, ResourceError, UsageError
from quantflow.files import disk, stage_folder
from quantflow.files.stage_folder import (
    DONE,
    done,
    finish,
    is_up_to_date,
    locked,
    publish,
    refuse_other_result,
    require_done,
    write_atomic,
)
from tests.shared import slow

HOLD = """
import sys
from pathlib import Path
from quantflow.files.stage_folder import locked
with locked(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.readline()
"""


@pytest.fixture
def holder(tmp_path):
    """Another process that holds the folder's lock until its stdin closes."""
    command = [sys.executable, "-c", HOLD, str(tmp_path / "out")]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def made(folder: Path, *, inputs, content: str = "x", stage: str = "s") -> Path:
    with publish(folder, stage=stage, inputs=inputs) as temporary:
        (temporary / "file").write_text(content)
    return folder


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_folder_held_by_a_live_process_is_refused_with_its_pid(tmp_path, holder):
    with pytest.raises(ResourceError) as caught, locked(tmp_path / "out"):
        pass
    assert (
        f"process {holder.pid} " in caught.value.cause
        and str(tmp_path / "out") in caught.value.cause
    )


def test_a_killed_process_leaves_no_lock(tmp_path, holder):
    holder.kill()
    holder.wait()
    with locked(tmp_path / "out"):
        pass


def test_a_lock_is_released_at_the_end_and_by_an_exception(tmp_path):
    for _ in range(2):
        with pytest.raises(KeyError), locked(tmp_path / "a" / "out"):
            raise KeyError
    with locked(tmp_path / "a" / "out"), locked(tmp_path / "a" / "other"):
        pass


def test_the_pid_in_a_lock_is_the_last_holders_alone(tmp_path, holder):
    holder.kill()
    holder.wait()
    with locked(tmp_path / "out"):
        assert (tmp_path / ".out.lock").read_text() == str(os.getpid())


def test_a_published_folder_is_complete_and_leaves_nothing_beside_it(tmp_path):
    made(tmp_path / "out", inputs={"a": 1})
    assert names(tmp_path) == ["out"] and names(tmp_path / "out") == [DONE, "file"]
    record = json.loads((tmp_path / "out" / DONE).read_text())
    assert record["stage"] == "s" and record["inputs"] == {"a": 1}
    sha256 = "2d711642b726b04401627ca9fbac32f5c8530fb1903cc4db02258717921a4881"  # of "x"
    assert record["files"] == {"file": {"sha256": sha256, "bytes": 1}}


def test_nothing_stands_under_the_final_name_while_it_is_written(tmp_path):
    with publish(tmp_path / "out", stage="s", inputs={}) as temporary:
        (temporary / "file").write_text("x")
        assert not (tmp_path / "out").exists() and not (temporary / DONE).exists()


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_exception_leaves_the_old_folder_as_it_was(tmp_path, error):
    made(tmp_path / "out", inputs={"a": 1}, content="old")
    with pytest.raises(error), publish(tmp_path / "out", stage="s", inputs={"a": 2}) as temporary:
        (temporary / "file").write_text("new")
        raise error
    assert (tmp_path / "out" / "file").read_text() == "old" and names(tmp_path) == ["out"]
    assert is_up_to_date(tmp_path / "out", {"a": 1})


def test_an_exception_without_an_old_folder_leaves_none(tmp_path):
    with pytest.raises(ValueError), publish(tmp_path / "out", stage="s", inputs={}) as temporary:
        (temporary / "file").write_text("new")
        raise ValueError
    assert names(tmp_path) == []


def test_a_new_result_replaces_the_old_folder_whole(tmp_path):
    made(tmp_path / "out", inputs={"a": 1})
    with publish(tmp_path / "out", stage="s", inputs={"a": 2}) as temporary:
        (temporary / "other").write_text("y")
    assert names(tmp_path / "out") == [DONE, "other"]


def test_done_is_written_after_every_other_file(tmp_path, monkeypatch):
    seen = []

    def record(path, content):
        seen.append((path.name, names(path.parent)))
        path.write_bytes(content)

    monkeypatch.setattr(stage_folder, "write_atomic", record)
    made(tmp_path / "out", inputs={})
    assert seen == [(DONE, ["file"])]


def test_what_a_crash_left_is_cleared_and_a_moved_result_put_back(tmp_path):
    made(tmp_path / "out", inputs={"a": 1}, content="old")
    (tmp_path / "out").rename(tmp_path / ".out.old")  # killed between the two renames
    (tmp_path / ".out.tmp").mkdir()
    (tmp_path / ".out.tmp" / "half").write_text("half")
    with pytest.raises(ValueError), publish(tmp_path / "out", stage="s", inputs={}) as temporary:
        assert names(temporary) == []
        raise ValueError
    assert (tmp_path / "out" / "file").read_text() == "old" and names(tmp_path) == ["out"]


def test_an_old_folder_beside_a_new_one_is_only_removed(tmp_path):
    made(tmp_path / "out", inputs={"a": 1}, content="new")
    (tmp_path / ".out.old").mkdir()
    with pytest.raises(ValueError), publish(tmp_path / "out", stage="s", inputs={}):
        raise ValueError
    assert (tmp_path / "out" / "file").read_text() == "new" and names(tmp_path) == ["out"]


def test_an_artifact_is_published_without_done(tmp_path):
    with publish(tmp_path / "out", stage=None, inputs={}) as temporary:
        (temporary / "file").write_text("x")
    assert names(tmp_path / "out") == ["file"]


def test_a_folder_is_up_to_date_for_the_same_inputs_only(tmp_path):
    folder = made(tmp_path / "out", inputs={"a": [1, 2]})
    assert is_up_to_date(folder, {"a": (1, 2)})  # tuples are lists in JSON
    assert not is_up_to_date(folder, {"a": [1, 3]})
    assert not is_up_to_date(tmp_path / "missing", {})


@pytest.mark.parametrize("damage", ["changed", "longer", "missing"])
def test_a_damaged_file_is_not_up_to_date_and_is_named_by_its_reader(tmp_path, damage):
    folder = made(tmp_path / "out", inputs={"a": 1})
    if damage == "missing":
        (folder / "file").unlink()
    else:
        (folder / "file").write_text({"changed": "y", "longer": "xx"}[damage])
    assert not is_up_to_date(folder, {"a": 1})
    with pytest.raises(IntegrityError) as caught:
        require_done(folder, stage="s")
    assert str(folder / "file") in caught.value.cause


def test_an_earlier_stages_folder_has_to_be_there_finished_and_of_that_stage(tmp_path):
    assert require_done(made(tmp_path / "out", inputs={"a": 1}), stage="s")["inputs"] == {"a": 1}
    with pytest.raises(InputError, match="does not exist"):
        require_done(tmp_path / "missing", stage="s")
    (tmp_path / "half").mkdir()
    with pytest.raises(InputError, match="unfinished"):
        require_done(tmp_path / "half", stage="s")
    with pytest.raises(InputError, match="written by 's', 'quantize' is needed"):
        require_done(tmp_path / "out", stage="quantize")


@pytest.mark.parametrize(
    "text",
    [
        *(
            "[]",
            "{}",
            '{"stage": "s"}',
            "{",
            '{"stage": 1, "inputs": {}, "files": {}}',
            '{"stage": "s", "inputs": {}, "files": []}',
        ),
        *(
            '{"stage": "s", "inputs": [], "files": {}}',
            '{"stage": "s", "inputs": {}, "files": {"a": {"bytes": 1}}}',
        ),
    ],
)
def test_a_done_file_that_says_nothing_is_an_input_error(tmp_path, text):
    (tmp_path / DONE).write_text(text)
    with pytest.raises(InputError, match=DONE):
        done(tmp_path)


def test_files_in_sub_folders_are_recorded_and_hidden_ones_are_not(tmp_path):
    (tmp_path / "layers").mkdir()
    (tmp_path / "layers" / "0").write_text("x")
    (tmp_path / ".leftover").write_text("x")
    finish(tmp_path, stage="s", inputs={})
    assert list(done(tmp_path)["files"]) == ["layers/0"]


@pytest.mark.parametrize(
    ("new", "said"),
    [
        ({"seed": 1, "plan": {"size": 32, "names": ["a"]}}, "seed = 0, now 1"),
        ({"seed": 0, "plan": {"size": 64, "names": ["a"]}}, "plan.size = 32, now 64"),
        ({"seed": 0, "plan": {"size": 32, "names": ["b"]}}, 'plan.names = ["a"], now ["b"]'),
        ({"seed": 0, "plan": {"size": 32, "names": ["a"], "more": 1}}, "plan.more = null, now 1"),
        ({"seed": 0}, 'plan = {"names": ["a"], "size": 32}, now null'),
    ],
)
def test_a_result_made_from_other_inputs_is_refused_by_the_field_that_differs(tmp_path, new, said):
    folder = made(tmp_path / "out", inputs={"seed": 0, "plan": {"size": 32, "names": ["a"]}})
    with pytest.raises(UsageError) as caught:
        refuse_other_result(folder, new, force=False)
    assert said in caught.value.cause and "--force" in caught.value.remedy
    refuse_other_result(folder, new, force=True)


def test_the_same_inputs_and_no_result_are_not_refused(tmp_path):
    refuse_other_result(tmp_path / "missing", {"a": 1}, force=False)
    folder = made(tmp_path / "out", inputs={"a": [1]})
    (folder / "file").unlink()  # damaged: written again
    refuse_other_result(folder, {"a": (1,)}, force=False)


def test_a_folder_that_holds_something_else_is_refused_even_by_force(tmp_path):
    (tmp_path / "thesis.tex").write_text("years")
    for force in (False, True):
        with pytest.raises(UsageError, match=r"'thesis\.tex' and no DONE\.json"):
            refuse_other_result(tmp_path, {}, force=force, parts=("layers",))


def test_an_unfinished_folder_of_the_same_stage_is_continued(tmp_path):
    (tmp_path / "layers").mkdir()
    (tmp_path / ".canary.json.tmp").write_text("cut off")
    refuse_other_result(tmp_path, {}, force=False, parts=("layers",))
    with pytest.raises(UsageError):
        refuse_other_result(tmp_path, {}, force=False)


def test_an_atomic_write_replaces_the_file_and_leaves_nothing_beside_it(tmp_path):
    write_atomic(tmp_path / "a", b"1")
    write_atomic(tmp_path / "a", b"2")
    assert (tmp_path / "a").read_bytes() == b"2" and names(tmp_path) == ["a"]


def test_an_atomic_write_that_fails_leaves_the_old_content(tmp_path, monkeypatch):
    write_atomic(tmp_path / "a", b"1")

    def fail(_descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError):
        write_atomic(tmp_path / "a", b"2")
    assert (tmp_path / "a").read_bytes() == b"1"


CALLS = ("open", "write", "pwrite", "fsync", "replace", "mkdir", "unlink", "rmdir", "rename")


class Faults:
    """Makes one call of `os` fail, counted over all of CALLS; the calls before it are real."""

    def __init__(self, monkeypatch, at: int, number: int) -> None:
        self.count, self.at, self.number = 0, at, number
        for name in CALLS:
            monkeypatch.setattr(os, name, self._wrapped(getattr(os, name)))

    def _wrapped(self, real):
        def call(*arguments, **options):
            self.count += 1
            if self.count - 1 == self.at:
                raise OSError(self.number, os.strerror(self.number))
            return real(*arguments, **options)

        return call


def publish_files(folder: Path, content: str) -> None:
    with locked(folder), publish(folder, stage="s", inputs={"a": content}) as temporary:
        for name in ("one", "two"):
            disk.write_file(temporary / name, content.encode())


@pytest.mark.parametrize(("number", "old"), [(errno.EIO, True), slow((errno.ENOSPC, False))])
def test_a_fault_at_any_call_leaves_a_whole_folder_or_none_and_the_next_run_finishes(
    tmp_path, monkeypatch, number, old
):
    at, failed, reached = 0, 0, True
    while reached:
        folder = tmp_path / str(at) / "out"
        if old:
            publish_files(folder, "old")
        with monkeypatch.context() as patch:
            faults = Faults(patch, at, number)
            try:
                publish_files(folder, "new")
            except InputError as error:  # reading back what was written, to hash it
                assert os.strerror(number) in error.cause
                failed += 1
            except OSError as error:
                assert error.errno == number
                failed += 1
        reached = faults.count > at
        if folder.exists():
            content = (folder / "one").read_text()
            assert is_up_to_date(folder, {"a": content}) and names(folder) == [DONE, "one", "two"]
            assert content == "new" or old
        publish_files(folder, "new")
        assert is_up_to_date(folder, {"a": "new"}) and names(folder.parent) == [".out.lock", "out"]
        at += 1
    assert failed >= 20


def test_a_folder_that_a_crash_left_half_renamed_is_back_before_anything_is_decided(tmp_path):
    made(tmp_path / "out", inputs={"a": 1})
    (tmp_path / "out").rename(tmp_path / ".out.old")
    with locked(tmp_path / "out"):
        assert is_up_to_date(tmp_path / "out", {"a": 1})
    assert names(tmp_path) == [".out.lock", "out"]


def test_a_fault_while_the_content_goes_to_the_disk_is_not_passed_over(tmp_path, monkeypatch):
    def fail(_descriptor):
        raise OSError(errno.EIO, "Input/output error")

    with pytest.raises(OSError), publish(tmp_path / "out", stage=None, inputs={}) as temporary:
        (temporary / "file").write_text("x")
        monkeypatch.setattr(os, "fsync", fail)
    assert not (tmp_path / "out").exists()


def test_hashes_that_are_known_are_not_computed_again(tmp_path, monkeypatch):
    (tmp_path / "layers").mkdir()
    for name in ("layers/0.safetensors", "layers/0.json", "other"):
        (tmp_path / name).write_text(name)
    read = []
    real = stage_folder.file_digest
    monkeypatch.setattr(
        stage_folder, "file_digest", lambda path: read.append(path.name) or real(path)
    )
    known = {"layers/0.safetensors": real(tmp_path / "layers" / "0.safetensors")}
    finish(tmp_path, stage="s", inputs={}, hashes=known)
    assert sorted(read) == ["0.json", "other"]
    assert is_up_to_date(tmp_path, {})


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("layers/0.safetensors", "Layers/0.safetensors", None),
        ("layers/0.safetensors", "longer than it was before", "layers/0.safetensors"),
        ("layers/0.json", "Layers/0.json", "layers/0.json"),
        ("other", "Other", "other"),
    ],
)
def test_files_that_the_caller_will_hash_are_compared_by_size_alone(tmp_path, name, content, said):
    (tmp_path / "layers").mkdir()
    for each in ("layers/0.safetensors", "layers/0.json", "other"):
        (tmp_path / each).write_text(each)
    finish(tmp_path, stage="s", inputs={})
    (tmp_path / name).write_text(content)
    if said is None:
        require_done(tmp_path, stage="s", unread="layers/*.safetensors")
    else:
        with pytest.raises(IntegrityError, match=said):
            require_done(tmp_path, stage="s", unread="layers/*.safetensors")
