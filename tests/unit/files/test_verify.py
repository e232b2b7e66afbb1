"""Whatever happens to an artifact is noticed, and the message names where."""

import hashlib
import json
import os
import shutil
import struct
import subprocess
import sys

import pytest

from quantflow.errors import InputError, IntegrityError, QuantflowError, UnsupportedError
from quantflow.files.ledger import Ledger, LedgerEntry
from quantflow.files.manifest import build_manifest, read_manifest, write_manifest
from quantflow.files.verify import verify
from tests.shared import slow_but

FILES = (
    "config.json",
    "model.safetensors",
    "tokenizer.json",
    "chat_template.jinja",
    "quantflow.json",
)


def tensors_file(path, tensors):
    entries, begin = {}, 0
    for name, shape in tensors.items():
        entries[name] = {"dtype": "U8", "shape": shape, "data_offsets": [begin, begin + shape[0]]}
        begin += shape[0]
    text = json.dumps(entries, separators=(",", ":")).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(range(begin)))


BODY = {
    "kind": "artifact",
    "source": {"name": "tiny", "revision": None, "files": {}},
    "recipe": {
        "name": "a",
        "scheme": "W8A16",
        "resolved": {"algorithm": "rtn", "transforms": [], "schemes": {}},
    },
    "measurement": None,
    "float8": None,
    "layers": [],
    "proof": {"kind": "canary", "layers": 0, "digest": "0" * 64},
    "tools": {},
    "made_from": "0" * 64,
}


def ledger(**becomes):
    tensors = tuple(
        LedgerEntry(
            name=name,
            dtype="U8",
            shape=(3,),
            nbytes=3,
            action="copied" if names == [name] else "quantized" if names else "dropped",
            reason="r",
            becomes=tuple(names),
        )
        for name, names in becomes.items()
    )
    return Ledger(tensors=tensors).to_json()


def seal(folder, account):
    write_manifest(folder, build_manifest(folder, body={**BODY, "ledger": account}))
    return folder


@pytest.fixture
def artifact(tmp_path):
    folder = tmp_path / "artifact"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type":"llama"}')
    (folder / "tokenizer.json").write_text('{"v":{}}')
    (folder / "chat_template.jinja").write_text("{{ x }}")
    (folder / "README.md").write_text("card")
    tensors_file(folder / "model.safetensors", {"n": [3], "w_scale": [2]})
    return seal(folder, ledger(n=["n"], w=["w_scale"], gone=[]))


def refused(folder, name, error=IntegrityError):
    with pytest.raises(QuantflowError) as caught:
        verify(folder)
    assert type(caught.value) is error, caught.value
    assert name in caught.value.cause
    return caught.value


def test_an_intact_artifact_is_reported_with_its_counts(artifact):
    report = verify(artifact)
    sizes = {name: (artifact / name).stat().st_size for name in FILES if name != "quantflow.json"}
    assert report["digest"] == json.loads((artifact / "quantflow.json").read_text())["digest"]
    assert (report["files"], report["bytes"]) == (4, sum(sizes.values()))
    assert (report["tensors"], report["tensor_bytes"]) == (2, 5)
    assert report["source_bytes"] == {
        "source": 9,
        "quantized": 3,
        "copied": 3,
        "changed": 0,
        "dropped": 3,
    }
    assert report["unhashed"] == ["README.md"]


def test_a_manifest_that_was_read_before_is_not_read_again_and_files_are_checked_alike(artifact):
    manifest, expected = read_manifest(artifact), verify(artifact)
    (artifact / "quantflow.json").write_text("{}")
    assert verify(artifact, manifest=manifest) == expected
    (artifact / "config.json").write_text("{}")
    with pytest.raises(IntegrityError, match=r"^config\.json: 2 bytes, quantflow\.json records 22"):
        verify(artifact, manifest=manifest)


@pytest.mark.parametrize("name", slow_but(FILES, *FILES[:-1]))  # the manifest is long
def test_every_flipped_bit_of_every_hashed_file_is_an_integrity_error_that_names_it(artifact, name):
    path = artifact / name
    # in place: rewriting the file thousands of times is slow on some disks
    with path.open("r+b", buffering=0) as file:
        for position, byte in enumerate(path.read_bytes()):
            for bit in range(8):
                os.pwrite(file.fileno(), bytes([byte ^ 1 << bit]), position)
                refused(artifact, name)
            os.pwrite(file.fileno(), bytes([byte]), position)
    verify(artifact)


def test_every_changed_byte_of_a_shard_or_its_index_is_an_integrity_error_that_names_it(artifact):
    (artifact / "model.safetensors").unlink()
    names = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    tensors_file(artifact / names[0], {"n": [3]})
    tensors_file(artifact / names[1], {"w_scale": [2]})
    index = {"metadata": {"total_size": 5}, "weight_map": {"n": names[0], "w_scale": names[1]}}
    (artifact / "model.safetensors.index.json").write_text(json.dumps(index))
    verify(seal(artifact, ledger(n=["n"], w=["w_scale"])))
    for name in (*names, "model.safetensors.index.json"):
        data = (artifact / name).read_bytes()
        for position, byte in enumerate(data):
            (artifact / name).write_bytes(
                data[:position] + bytes([byte ^ 1]) + data[position + 1 :]
            )
            refused(artifact, name)
        (artifact / name).write_bytes(data)
    (artifact / names[0]).rename(artifact / "x")
    (artifact / names[1]).rename(artifact / names[0])
    (artifact / "x").rename(artifact / names[1])
    refused(artifact, names[0])


@pytest.mark.parametrize("name", FILES)
def test_every_truncation_and_any_appended_byte_is_an_integrity_error_that_names_it(artifact, name):
    path = artifact / name
    data = path.read_bytes()
    for added in (b"\0", b"\n", bytes(8), bytes(4096)):
        path.write_bytes(data + added)
        refused(artifact, name)
    path.write_bytes(data)
    for size in reversed(range(len(data))):
        os.truncate(path, size)
        refused(artifact, name)


@pytest.mark.parametrize("name", [name for name in FILES if name != "quantflow.json"])
def test_a_removed_renamed_linked_or_replaced_file_is_named(artifact, tmp_path, name):
    (artifact / name).rename(tmp_path / "aside")
    refused(artifact, name)
    shutil.copy(tmp_path / "aside", artifact / "other")
    refused(artifact, name)
    (artifact / "other").unlink()
    (artifact / name).symlink_to(tmp_path / "aside")
    refused(artifact, name)
    (artifact / name).unlink()
    (artifact / name).mkdir()
    refused(artifact, name)
    (artifact / name).rmdir()
    os.mkfifo(artifact / name)
    refused(artifact, name)


@pytest.mark.parametrize(
    "name", ["modeling_x.py", "model-00002-of-00002.safetensors", ".hidden", "sub/x", "README.MD"]
)
def test_an_added_file_is_named(artifact, name):
    (artifact / name).parent.mkdir(exist_ok=True)
    (artifact / name).write_bytes(b"")
    refused(artifact, name)


def test_two_files_that_changed_places_are_noticed(artifact):
    (artifact / "tokenizer.json").rename(artifact / "x")
    (artifact / "config.json").rename(artifact / "tokenizer.json")
    (artifact / "x").rename(artifact / "config.json")
    refused(artifact, "config.json")


def test_a_link_in_place_of_the_manifest_or_the_card_is_named(artifact, tmp_path):
    for name in ("README.md", "quantflow.json"):
        (artifact / name).rename(tmp_path / name)
        (artifact / name).symlink_to(tmp_path / name)
        refused(artifact, name)
        (artifact / name).unlink()
        (tmp_path / name).rename(artifact / name)


def test_the_card_git_attributes_and_download_bookkeeping_may_change(artifact):
    (artifact / "README.md").write_text("another")
    (artifact / ".gitattributes").write_text("*.safetensors filter=lfs")
    (artifact / ".cache").mkdir()
    (artifact / ".cache" / "x").touch()
    assert verify(artifact)["unhashed"] == [".gitattributes", "README.md"]


def test_a_file_that_git_lfs_did_not_fetch_gives_the_command_that_does(artifact):
    (artifact / "model.safetensors").write_text(
        "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
    )
    assert "git lfs pull" in refused(artifact, "model.safetensors").remedy


def test_a_folder_without_manifest_and_no_folder_are_input_errors(artifact, tmp_path):
    (artifact / "quantflow.json").unlink()
    refused(artifact, "no quantflow.json", InputError)
    refused(tmp_path / "missing", "missing", InputError)


def test_an_intact_artifact_of_a_newer_layout_is_unsupported(artifact, monkeypatch):
    monkeypatch.setattr("quantflow.files.manifest.LAYOUT_VERSION", 2)
    seal(artifact, ledger(n=["n"], w=["w_scale"]))
    monkeypatch.undo()
    refused(artifact, "layout version 2", UnsupportedError)


def test_a_tensor_that_the_ledger_does_not_claim_is_named(artifact):
    seal(artifact, ledger(n=["n"], w=[]))
    refused(artifact, "'w_scale'")


def test_a_claim_that_no_tensor_keeps_is_named(artifact):
    seal(artifact, ledger(n=["n"], w=["w_scale", "w_zero_point"]))
    refused(artifact, "'w_zero_point'")


def test_a_copy_that_lost_an_element_is_named(artifact):
    tensors_file(artifact / "model.safetensors", {"n": [2], "w_scale": [2]})
    seal(artifact, ledger(n=["n"], w=["w_scale"]))
    refused(artifact, "'n': copied from U8 [3], is U8 [2]")


def test_byte_sums_that_do_not_add_up_are_noticed(artifact):
    account = ledger(n=["n"], w=["w_scale"])
    account["bytes"]["source"] += 1
    seal(artifact, account)
    refused(artifact, "byte sums")


def test_a_recorded_size_that_is_wrong_is_noticed_although_the_hash_is_right(artifact):
    manifest = json.loads((artifact / "quantflow.json").read_text())
    manifest["files"]["config.json"]["bytes"] += 1
    del manifest["digest"]
    text = json.dumps(manifest, sort_keys=True, separators=(",", ":"))
    write_manifest(artifact, {**manifest, "digest": hashlib.sha256(text.encode()).hexdigest()})
    refused(artifact, "config.json: 22 bytes, quantflow.json records 23")


def test_weights_beside_the_ones_that_load_are_named_although_they_are_hashed(artifact):
    tensors_file(artifact / "consolidated.safetensors", {"n": [3]})
    seal(artifact, ledger(n=["n"], w=["w_scale"]))
    refused(artifact, "consolidated.safetensors")


def test_a_malformed_header_with_the_recorded_hash_is_an_input_error(artifact):
    data = (artifact / "model.safetensors").read_bytes()
    (artifact / "model.safetensors").write_bytes(data + b"x")
    seal(artifact, ledger(n=["n"], w=["w_scale"]))
    refused(artifact, "model.safetensors", InputError)


def test_an_index_that_contradicts_its_shards_is_an_input_error(artifact):
    (artifact / "model.safetensors.index.json").write_text(
        '{"weight_map": {"n": "model.safetensors"}}'
    )
    seal(artifact, ledger(n=["n"], w=["w_scale"]))
    refused(artifact, "w_scale", InputError)


def test_the_package_never_imports_torch_numpy_or_safetensors(artifact):
    code = (
        "import sys; from pathlib import Path; "
        "import quantflow.files.diff, quantflow.files.inspect, quantflow.files.verify as v; "
        f"v.verify(Path({str(artifact)!r})); print(sorted({{'torch', 'numpy', 'safetensors'}} & "
        "set(sys.modules)))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout == "[]\n"
