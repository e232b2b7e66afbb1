"""C that is compiled when first used: its cache, damage to it, and errors where there is none."""

import ctypes
import hashlib
import os
import pwd
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from quantflow.backends import native
from quantflow.errors import IntegrityError, UnsupportedError
from quantflow.files import disk

if not any(shutil.which(name) for name in ("gcc", "cc")):
    pytest.skip("no C compiler here", allow_module_level=True)

SOURCE = """
#include <omp.h>
int answer(void) { return ANSWER; }
int threads(void) { int n = 0;
_Pragma("omp parallel reduction(+:n)") n += 1;
return n; }
"""


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    """An empty cache folder of this test's own."""
    native._attempt.cache_clear()
    monkeypatch.setenv("QUANTFLOW_CACHE", str(tmp_path / "cache"))
    yield tmp_path / "cache"
    native._attempt.cache_clear()


def source(folder: Path, answer: object = 42, name: str = "small.c") -> Path:
    path = folder / name
    path.write_text(SOURCE.replace("ANSWER", str(answer)))
    return path


@pytest.fixture
def built(cache, monkeypatch):
    """A function that compiles a source and loads nothing; the library's path."""

    def build(path: Path) -> Path:
        with monkeypatch.context() as patched:
            patched.setattr(native.ctypes, "CDLL", lambda _, **kept: None)
            native._load(path)
        (library,) = cache.iterdir()
        return library

    return build


def in_another_process(path: Path) -> subprocess.Popen:
    """Start a process that prints the answer of the library, or the error."""
    code = f"""
from pathlib import Path
from quantflow.backends import native
from quantflow.errors import UnsupportedError
try:
    print(native.library(Path({str(path)!r})).answer())
except UnsupportedError as error:
    print(error)
"""
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)


def test_a_source_is_compiled_once_and_loaded_from_the_cache_by_the_next_process(
    tmp_path, cache, monkeypatch
):
    path = source(tmp_path)
    assert native.library(path).answer() == 42
    (built,) = cache.glob("small-*.so")
    before = built.stat().st_mtime_ns
    native._attempt.cache_clear()
    monkeypatch.setattr(native, "_build", None)  # compiling again would call None
    assert native.library(path).answer() == 42
    assert built.stat().st_mtime_ns == before
    assert list(cache.iterdir()) == [built]  # nothing temporary is left


def test_another_source_compiler_or_cpu_gets_a_library_of_its_own(tmp_path, cache, monkeypatch):
    native.library(source(tmp_path, 1))
    native._attempt.cache_clear()
    assert native.library(source(tmp_path, 2)).answer() == 2
    for name in ("_cpu", "_identity"):
        native._attempt.cache_clear()
        with monkeypatch.context() as patched:
            patched.setattr(native, name, lambda *_: {"flags": "x"} if name == "_cpu" else b"x")  # noqa: B023, called in this turn
            native.library(source(tmp_path, 2))
    assert len(list(cache.iterdir())) == 4


@pytest.mark.parametrize("damage", ["truncated", "empty", "flipped"])
def test_a_damaged_library_is_compiled_again(tmp_path, built, damage):
    path = source(tmp_path)
    library = built(path)
    content = bytearray(library.read_bytes())
    content[len(content) // 2] ^= 1
    whole = len(content)
    library.write_bytes(
        {"truncated": content[: whole // 2], "empty": b"", "flipped": content}[damage]
    )
    assert native.library(path).answer() == 42
    assert library.stat().st_size == whole


def test_of_two_processes_that_need_a_library_at_once_one_compiles_it(tmp_path, cache, monkeypatch):
    compiler, calls, path = tmp_path / "gcc", tmp_path / "calls", source(tmp_path)
    compiler.write_text(f'#!/bin/sh\necho >> {calls}\nsleep 2\nexec gcc "$@"\n')
    compiler.chmod(0o700)
    monkeypatch.setenv("CC", str(compiler))
    both = [in_another_process(path) for _ in range(2)]
    assert [process.communicate()[0] for process in both] == ["42\n", "42\n"]
    assert len(list(cache.iterdir())) == 1 and calls.read_text() == "\n"


def test_it_takes_as_many_threads_as_torch(tmp_path):
    built, before = native.library(source(tmp_path)), torch.get_num_threads()
    for count in (1, 2):
        torch.set_num_threads(count)
        try:
            assert built.threads() == count
        finally:
            torch.set_num_threads(before)


def test_a_missing_compiler_is_named_with_a_remedy(tmp_path, monkeypatch):
    path = source(tmp_path)
    monkeypatch.setenv("CC", "no-such-compiler")
    with pytest.raises(
        UnsupportedError,
        match=r"^no C compiler \(no-such-compiler\); install gcc, or set CC to a compiler$",
    ):
        native.library(path)
    assert (
        native.why_not(path, cpu_flags=())
        == "no C compiler (no-such-compiler); install gcc, or set CC to a compiler"
    )


def test_a_source_that_does_not_compile_says_what_the_compiler_said_and_is_tried_once(
    tmp_path, cache, monkeypatch
):
    path = source(tmp_path, "nonsense")
    with pytest.raises(
        UnsupportedError,
        match=r"^small\.c: .*gcc exits 1: .*nonsense.* undeclared.*; set CC to a gcc",
    ):
        native.library(path)
    assert list(cache.iterdir()) == []
    monkeypatch.setattr(native, "_build", None)
    assert "exits 1" in native.why_not(path, cpu_flags=())


def test_a_cache_that_cannot_be_made_says_what_to_set(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("QUANTFLOW_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(
        UnsupportedError,
        match=r"/file/cache: Not a directory; set QUANTFLOW_CACHE to a folder of your own",
    ):
        native.library(source(tmp_path))


def test_a_user_without_a_home_is_told_what_to_set(tmp_path, monkeypatch):
    for name in ("QUANTFLOW_CACHE", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)

    def unknown(number):
        raise KeyError(number)

    monkeypatch.setattr(pwd, "getpwuid", unknown)  # as in a container whose user /etc/passwd lacks
    with pytest.raises(
        UnsupportedError,
        match=r"HOME is not set and user \d+ has no home folder; set QUANTFLOW_CACHE",
    ):
        native.library(source(tmp_path))
    assert "HOME is not set" in native.why_not(source(tmp_path), cpu_flags=())


def test_a_cache_that_can_only_be_read_serves_what_it_holds_and_says_so_otherwise(
    tmp_path, cache, monkeypatch
):
    held, missing = source(tmp_path), source(tmp_path, 7, "other.c")
    native.library(held)
    native._attempt.cache_clear()

    def refuse(**_options):
        raise PermissionError(13, "Permission denied", str(cache))

    # root, who runs some of these tests, may write anywhere
    monkeypatch.setattr(native.tempfile, "TemporaryDirectory", refuse)
    assert native.library(held).answer() == 42
    with pytest.raises(
        UnsupportedError, match=r"/other-\w+\.so: Permission denied; set QUANTFLOW_CACHE"
    ):
        native.library(missing)


def test_code_is_not_loaded_from_a_folder_that_others_may_write(tmp_path, cache):
    cache.mkdir()
    cache.chmod(0o777)
    with pytest.raises(
        UnsupportedError,
        match=r"/cache: others may write code to it that this process would run; set",
    ):
        native.library(source(tmp_path))


@pytest.fixture(params=[0o000, 0o002, 0o077], ids=oct)
def umask(request):
    was = os.umask(request.param)
    yield request.param
    os.umask(was)


def test_code_is_for_its_owner_to_write_whatever_the_umask(tmp_path, cache, umask):
    """Several users of triton-lang/triton#518 share one cache folder."""
    cache.mkdir()
    cache.chmod(0o755)
    assert native.library(source(tmp_path)).answer() == 42
    (path,) = cache.iterdir()
    assert path.stat().st_mode & 0o777 == 0o644


def test_folders_above_a_new_cache_are_the_users_alone_whatever_the_umask(
    tmp_path, monkeypatch, umask
):
    monkeypatch.setenv("QUANTFLOW_CACHE", str(tmp_path / "a" / "b" / "cache"))
    assert native.library(source(tmp_path)).answer() == 42
    for place in ("a", "a/b", "a/b/cache"):
        assert (tmp_path / place).stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("mode", [0o664, 0o646, 0o777, 0o775])
def test_code_that_others_may_write_to_is_compiled_again(tmp_path, built, mode):
    """The seal at the file's end is a hash, which whoever writes the file can compute.

    unslothai/unsloth-zoo#906 says the same of the hash beside a cached artifact.
    """
    path = source(tmp_path)
    library = built(path)
    forged = library.read_bytes()[: -native._DIGEST_BYTES] + b"code of another user"
    library.write_bytes(forged + hashlib.sha256(forged).digest())
    library.chmod(mode)
    assert native.library(path).answer() == 42
    assert forged not in library.read_bytes() and library.stat().st_mode & 0o777 == 0o644


@pytest.mark.skipif(os.getuid() != 0, reason="a file is given away by root alone")
def test_code_of_another_user_is_compiled_again(tmp_path, built):
    path = source(tmp_path)
    library = built(path)
    os.chown(library, 4321, 4321)
    assert native.library(path).answer() == 42
    assert library.stat().st_uid == 0


@pytest.mark.parametrize("mode", [0o777, 0o775])
def test_code_is_not_loaded_where_a_folder_above_can_be_exchanged(tmp_path, monkeypatch, mode):
    """A parent that others may write to lets them rename the folder (unslothai/unsloth-zoo#906)."""
    above = tmp_path / "shared"
    monkeypatch.setenv("QUANTFLOW_CACHE", str(above / "mine" / "cache"))
    path = source(tmp_path)
    assert native.library(path).answer() == 42
    native._attempt.cache_clear()
    monkeypatch.setattr(disk, "_is_own_group", lambda gid: False)
    above.chmod(mode)
    with pytest.raises(UnsupportedError, match=r"/shared: others may write code to it"):
        native.library(path)
    native._attempt.cache_clear()
    above.chmod(mode | 0o1000)  # names in a sticky folder belong to the owners of their files
    assert native.library(path).answer() == 42


def test_the_cache_follows_xdg_and_is_the_users_alone(tmp_path, monkeypatch):
    monkeypatch.setenv("QUANTFLOW_CACHE", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert native.library(source(tmp_path)).answer() == 42
    folder = tmp_path / "xdg" / "quantflow"
    assert folder.stat().st_mode & 0o777 == 0o700
    assert len(list(folder.iterdir())) == 1


def test_an_instruction_set_that_the_cpu_lacks_is_named_before_anything_is_compiled(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(native, "_build", None)
    assert native.why_not(source(tmp_path), cpu_flags=("avx9000",)) == "this CPU has no avx9000"


def test_a_library_that_can_be_had_has_no_reason_and_takes_addresses_of_tensors(tmp_path):
    path = source(tmp_path)
    assert native.why_not(path, cpu_flags=()) is None
    tensor = torch.tensor([5, 6], dtype=torch.int32)
    assert ctypes.c_int32.from_address(native.address(tensor)).value == 5
    assert native.address(None) is None


FIELDS = """#include <stddef.h>
struct field { const char *structure, *field; long long offset, bytes; };
struct pair { long long first, second; };
const struct field *structure_fields(void) {
    static const struct field fields[] = {
        {"Pair", "first", offsetof(struct pair, first), 8},
        {"Pair", "second", offsetof(struct pair, second), 8},
        {"Pair", NULL, sizeof(struct pair), 0}, {NULL, NULL, 0, 0}};
    return fields;
}
"""


def fields_source(folder: Path) -> Path:
    path = folder / "fields.c"
    path.write_text(FIELDS)
    return path


def structure(*fields):
    return type("_Pair", (ctypes.Structure,), {"_fields_": list(fields)})


def test_a_structure_with_the_fields_of_c_passes(tmp_path):
    pair = structure(("first", ctypes.c_int64), ("second", ctypes.c_int64))
    native.require_same_fields(fields_source(tmp_path), pair)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ([("second", ctypes.c_int64), ("first", ctypes.c_int64)], "Pair, first: .*8.* in Python"),
        (
            [("first", ctypes.c_int64), ("second", ctypes.c_int64), ("third", ctypes.c_int64)],
            "Pair, its end: .*16.* in C and .*24",
        ),
        ([("first", ctypes.c_int64)], "Pair, its end: .*16.* in C and .*8"),
        (
            [("first", ctypes.c_int64), ("second", ctypes.c_int32)],
            r"Pair, second: .*\(8, 8\) in C and \(8, 4\)",
        ),
    ],
)
def test_a_structure_whose_fields_lie_elsewhere_than_in_c_is_refused(tmp_path, fields, message):
    with pytest.raises(IntegrityError, match=message):
        native.require_same_fields(fields_source(tmp_path), structure(*fields))
