"""Listing folders and opening files."""

import os

import pytest

from quantflow.errors import InputError
from quantflow.files.folder import list_files, reading


def test_files_of_sub_folders_are_listed_with_slashes_in_sorted_order(tmp_path):
    (tmp_path / "b").mkdir()
    for name in ("z", "b/a", "a", ".hidden"):
        (tmp_path / name).touch()
    assert list_files(tmp_path, follow_links=False).files == (".hidden", "a", "b/a", "z")


def test_folders_of_git_and_of_the_download_cache_are_not_listed_but_only_at_the_top(tmp_path):
    for name in (".git", ".cache", "sub/.git"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "x").touch()
    assert list_files(tmp_path, follow_links=False).files == ("sub/.git/x",)


def test_a_link_counts_as_its_file_only_where_links_are_followed(tmp_path):
    (tmp_path / "target").touch()
    (tmp_path / "link").symlink_to("target")
    followed, kept = (list_files(tmp_path, follow_links=follow) for follow in (True, False))
    assert (followed.files, followed.others) == (("link", "target"), ())
    assert (kept.files, kept.others) == (("target",), ("link",))


@pytest.mark.parametrize("follow", [True, False])
def test_links_to_folders_dangling_links_fifos_and_odd_names_are_not_files(tmp_path, follow):
    (tmp_path / ".git").symlink_to(tmp_path)
    (tmp_path / "dangling").symlink_to("nowhere")
    (tmp_path / "loop").symlink_to("loop")
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / os.fsdecode(b"\xff")).touch()
    listing = list_files(tmp_path, follow_links=follow)
    assert listing.files == ()
    assert listing.others == (".git", "\\udcff", "dangling", "fifo", "loop")


def test_a_missing_folder_and_a_file_in_its_place_are_refused_by_name(tmp_path):
    (tmp_path / "file").touch()
    for name in ("missing", "file"):
        with pytest.raises(InputError, match=name):
            list_files(tmp_path / name, follow_links=True)


def test_opening_what_is_not_a_regular_file_is_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "folder").mkdir()
    for name in ("fifo", "folder", "missing", "x" * 300):
        with pytest.raises(InputError, match=name), reading(tmp_path / name):
            pass
    with (
        pytest.raises(InputError, match="not a regular file"),
        reading(tmp_path.__class__("/dev/zero")),
    ):
        pass
