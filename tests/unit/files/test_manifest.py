"""The manifest quantflow.json: built, written, read, and refused."""

import hashlib
import json
import os

import pytest

from quantflow.errors import InputError, IntegrityError, UnsupportedError
from quantflow.files.manifest import (
    BODY_KEYS,
    LAYOUT_VERSION,
    build_manifest,
    read_manifest,
    write_manifest,
)

BODY = {
    "kind": "artifact",
    "source": {"name": "tiny-é", "revision": None, "files": {}},
    "recipe": {
        "name": "a",
        "scheme": "W8A16",
        "alpha": 1e-05,
        "resolved": {"algorithm": "rtn", "transforms": [], "schemes": {}},
    },
    "measurement": None,
    "float8": None,
    "ledger": None,
    "layers": [],
    "proof": {"kind": "canary", "layers": 0, "digest": "0" * 64},
    "tools": {},
    "made_from": "0" * 64,
}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.json").write_bytes(b"{}")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "x").write_bytes(b"abc")
    (tmp_path / "README.md").write_bytes(b"card")
    (tmp_path / ".gitattributes").write_bytes(b"")
    return tmp_path


def forge(folder, change):
    """Write a manifest that `change` altered, with the digest that fits it.

    A faulty or newer tool would write one like it.
    """
    manifest = change(build_manifest(folder, body=BODY))
    content = {key: value for key, value in manifest.items() if key != "digest"}
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    manifest["digest"] = hashlib.sha256(text.encode()).hexdigest()
    text = json.dumps(manifest, sort_keys=True, indent=1, ensure_ascii=False) + "\n"
    (folder / "quantflow.json").write_text(text)


def test_a_manifest_records_the_hash_of_every_file_but_the_unhashed_ones(folder):
    manifest = build_manifest(folder, body=BODY)
    assert manifest["files"] == {
        "config.json": {"sha256": hashlib.sha256(b"{}").hexdigest(), "bytes": 2},
        "sub/x": {"sha256": hashlib.sha256(b"abc").hexdigest(), "bytes": 3},
    }
    assert manifest["layout_version"] == LAYOUT_VERSION == 1


def test_a_hash_that_is_known_is_taken_as_it_is_for_that_file_alone(folder):
    known = "ab" * 32
    manifest = build_manifest(folder, body=BODY, hashes={"sub/x": known, "not/there": known})
    assert manifest["files"] == {
        "config.json": {"sha256": hashlib.sha256(b"{}").hexdigest(), "bytes": 2},
        "sub/x": {"sha256": known, "bytes": 3},
    }


def test_the_digest_is_the_sha256_of_the_canonical_json_without_it(folder):
    manifest = build_manifest(folder, body=BODY)
    digest = manifest.pop("digest")
    text = json.dumps(manifest, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    assert digest == hashlib.sha256(text.encode()).hexdigest()


def test_what_is_written_is_read_back(folder):
    manifest = build_manifest(folder, body=BODY)
    write_manifest(folder, manifest)
    assert read_manifest(folder) == manifest


def test_building_again_after_writing_gives_the_same_bytes(folder):
    write_manifest(folder, build_manifest(folder, body=BODY))
    first = (folder / "quantflow.json").read_bytes()
    os.utime(folder / "config.json", (0, 0))
    write_manifest(folder, build_manifest(folder, body=dict(reversed(BODY.items()))))
    assert (folder / "quantflow.json").read_bytes() == first


def test_the_digest_follows_every_part_of_the_body_and_every_file(folder):
    digests = {build_manifest(folder, body=BODY)["digest"]}
    for key in BODY_KEYS:
        digests.add(build_manifest(folder, body={**BODY, key: "other"})["digest"])
    (folder / "config.json").write_bytes(b"[]")
    digests.add(build_manifest(folder, body=BODY)["digest"])
    assert len(digests) == len(BODY_KEYS) + 2


def test_unhashed_files_do_not_change_the_digest(folder):
    before = build_manifest(folder, body=BODY)["digest"]
    (folder / "README.md").write_bytes(b"another card")
    assert build_manifest(folder, body=BODY)["digest"] == before


def test_a_body_with_a_missing_or_unknown_key_is_refused_by_name(folder):
    with pytest.raises(InputError, match="unknown key time"):
        build_manifest(folder, body={**BODY, "time": 0})
    with pytest.raises(InputError, match="lacks proof"):
        build_manifest(folder, body={key: value for key, value in BODY.items() if key != "proof"})


def test_a_body_with_a_number_that_is_not_finite_is_refused(folder):
    with pytest.raises(InputError):
        build_manifest(folder, body={**BODY, "layers": [{"error": float("nan")}]})


def test_a_link_in_the_folder_is_refused_by_name(folder):
    (folder / "link").symlink_to("config.json")
    with pytest.raises(InputError, match="link: not a regular file"):
        build_manifest(folder, body=BODY)


def test_a_manifest_that_was_changed_after_its_digest_is_not_written(folder):
    manifest = {**build_manifest(folder, body=BODY), "recipe": {}}
    with pytest.raises(IntegrityError, match=r"quantflow\.json"):
        write_manifest(folder, manifest)
    assert not (folder / "quantflow.json").exists()


def test_a_missing_manifest_and_a_missing_folder_are_input_errors(folder):
    for path in (folder, folder / "missing"):
        with pytest.raises(InputError, match=r"no quantflow\.json"):
            read_manifest(path)


def test_an_intact_manifest_of_a_newer_layout_is_unsupported(folder):
    forge(folder, lambda manifest: {**manifest, "layout_version": 2, "news": []})
    with pytest.raises(
        UnsupportedError, match="layout version 2, this quantflow knows 1"
    ) as caught:
        read_manifest(folder)
    assert caught.value.exit_code == 6


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text.replace('"alpha": 1e-05', '"alpha": 2e-05'),
        lambda text: text.replace("1e-05", "1E-05"),
        lambda text: text.replace('"layout_version": 1', '"layout_version": 2'),
        lambda text: text.replace("é", "\\u00e9"),
        lambda text: text.replace('"digest"', '"digesu"'),
        lambda text: text[:-1],
        lambda text: text + "\n",
        lambda text: text.replace("\n", "\r\n"),
        lambda text: json.dumps(json.loads(text)),
        lambda text: text.replace("{", '{"kind": "artifact", ', 1),
        lambda text: "",
        lambda text: "[]\n",
        lambda text: "null\n",
    ],
)
def test_any_other_bytes_than_those_written_are_an_integrity_error_that_names_the_manifest(
    folder, change
):
    write_manifest(folder, build_manifest(folder, body=BODY))
    text = (folder / "quantflow.json").read_text()
    assert change(text) != text
    (folder / "quantflow.json").write_text(change(text), newline="")
    with pytest.raises(IntegrityError, match=r"quantflow\.json") as caught:
        read_manifest(folder)
    assert caught.value.exit_code == 7


FILE = {"sha256": "0" * 64, "bytes": 1}
MALFORMED = {
    "an unknown key": {"extra": 1},
    "another kind": {"kind": "measurement"},
    "version zero": {"layout_version": 0},
    "version true": {"layout_version": True},
    "version text": {"layout_version": "1"},
    "files is a list": {"files": []},
    "a short hash": {"files": {"x": {**FILE, "sha256": "0" * 63}}},
    "an upper-case hash": {"files": {"x": {**FILE, "sha256": "A" * 64}}},
    "negative bytes": {"files": {"x": {**FILE, "bytes": -1}}},
    "fractional bytes": {"files": {"x": {**FILE, "bytes": 1.0}}},
    "a row with another key": {"files": {"x": {**FILE, "mode": 1}}},
    "a row without a hash": {"files": {"x": {"bytes": 1}}},
    "an unhashed file": {"files": {"README.md": FILE}},
}


@pytest.mark.parametrize("change", MALFORMED.values(), ids=MALFORMED.keys())
def test_an_intact_manifest_of_another_form_is_refused(folder, change):
    forge(folder, lambda manifest: {**manifest, **change})
    with pytest.raises(InputError, match=r"quantflow\.json"):
        read_manifest(folder)


def test_an_intact_manifest_without_a_key_is_refused_by_name(folder):
    forge(
        folder, lambda manifest: {key: value for key, value in manifest.items() if key != "ledger"}
    )
    with pytest.raises(InputError, match="lacks ledger"):
        read_manifest(folder)


def test_a_git_lfs_pointer_in_place_of_the_manifest_names_the_command(folder):
    (folder / "quantflow.json").write_text(
        "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
    )
    with pytest.raises(InputError, match="git lfs pull"):
        read_manifest(folder)


@pytest.mark.parametrize(
    ("place", "key"),
    [
        (("source",), "files"),
        (("source",), "revision"),
        (("recipe",), "scheme"),
        (("recipe",), "resolved"),
        (("recipe", "resolved"), "transforms"),
        (("layers", 0), "errors"),
        (("layers", 0), "decisions"),
        (("layers", 0, "errors", "q"), "weight"),
        (("measurement", "calibration"), "sequence_length"),
        (("measurement",), "sequence_heads"),
        (("proof",), "kind"),
    ],
    ids=str,
)
def test_a_key_that_something_reads_and_is_missing_is_an_input_error_that_names_it(
    folder, place, key
):
    layer = {"errors": {"q": {"weight": 0.5}}, "decisions": {"q": {}}}
    measured = {
        "calibration": {"hash": "", "sequence_length": 8},
        "counts": {"samples": 1, "tokens": 8},
        "sequence_heads": [],
    }
    body = json.loads(json.dumps({**BODY, "layers": [layer], "measurement": measured}))
    write_manifest(folder, build_manifest(folder, body=body))
    read_manifest(folder)
    holder = body
    for step in place:
        holder = holder[step]
    del holder[key]
    (folder / "quantflow.json").unlink()
    write_manifest(folder, build_manifest(folder, body=body))
    with pytest.raises(InputError, match=rf"{key}: None, a value is needed"):
        read_manifest(folder)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("source", None),
        ("layers", {}),
        ("layers", [5]),
        ("recipe", {}),
        ("proof", {}),
        ("tools", None),
        ("made_from", 5),
    ],
    ids=str,
)
def test_a_part_of_another_kind_is_an_input_error(folder, key, value):
    write_manifest(folder, build_manifest(folder, body={**BODY, key: value}))
    with pytest.raises(InputError, match=key):
        read_manifest(folder)
