"""Opening a Hugging Face folder, and every folder that is refused."""

import json
import os
import struct

import pytest

from quantflow.errors import InputError
from quantflow.files.checkpoint import open_checkpoint, refuse_quantized

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
A, B = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def shard(path, *names):
    entries = {
        name: {"dtype": "U8", "shape": [1], "data_offsets": [i, i + 1]}
        for i, name in enumerate(names)
    }
    text = json.dumps(entries).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(len(names)))


def single(folder, config=None):
    (folder / "config.json").write_text(
        json.dumps({"model_type": "llama"} if config is None else config)
    )
    shard(folder / "model.safetensors", "x", "y")
    return folder


def sharded(folder, weight_map=None):
    (folder / "config.json").write_text("{}")
    shard(folder / A, "x")
    shard(folder / B, "y", "z")
    weight_map = {"x": A, "y": B, "z": B} if weight_map is None else weight_map
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": weight_map})
    )
    return folder


def refused(folder, match):
    with pytest.raises(InputError, match=match) as caught:
        open_checkpoint(folder)
    assert caught.value.exit_code == 3
    assert caught.value.remedy


def test_a_folder_with_one_file_gives_config_tensors_and_files(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    checkpoint = open_checkpoint(single(tmp_path))
    assert checkpoint.config == {"model_type": "llama"}
    assert {name: file for name, (file, _) in checkpoint.tensors.items()} == {
        "x": "model.safetensors",
        "y": "model.safetensors",
    }
    assert checkpoint.files == ("config.json", "model.safetensors", "tokenizer.json")
    assert checkpoint.infos["y"].nbytes == 1


def test_a_folder_with_shards_gives_each_tensor_its_shard(tmp_path):
    checkpoint = open_checkpoint(sharded(tmp_path))
    assert {name: file for name, (file, _) in checkpoint.tensors.items()} == {
        "x": A,
        "y": B,
        "z": B,
    }
    assert checkpoint.shards == (A, B)


def test_links_to_files_are_followed_as_in_a_hub_snapshot(tmp_path):
    (tmp_path / "blobs").mkdir()
    (tmp_path / "snapshot").mkdir()
    for path in sorted(sharded(tmp_path / "blobs").iterdir()):
        (tmp_path / "snapshot" / path.name).symlink_to(path)
    assert set(open_checkpoint(tmp_path / "snapshot").tensors) == {"x", "y", "z"}


def test_an_index_may_name_one_file_called_like_the_unsharded_one(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    shard(tmp_path / "model.safetensors", "x")
    (tmp_path / "model.safetensors.index.json").write_text(
        '{"weight_map": {"x": "model.safetensors"}}'
    )
    assert open_checkpoint(tmp_path).shards == ("model.safetensors",)


def test_a_missing_and_an_empty_folder_are_refused(tmp_path):
    refused(tmp_path / "missing", "missing")
    refused(tmp_path, "empty")


def test_a_folder_without_config_is_refused(tmp_path):
    single(tmp_path)
    (tmp_path / "config.json").unlink()
    refused(tmp_path, r"no config\.json")


@pytest.mark.parametrize("text", ["[]", "null", "{", '{"a": 1, "a": 2}', "\ufeff{}"])
def test_a_config_that_is_not_one_strict_table_is_refused(tmp_path, text):
    single(tmp_path)
    (tmp_path / "config.json").write_text(text)
    refused(tmp_path, r"config\.json")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth"])
def test_pickled_weights_are_refused_unread_with_the_command_that_converts_them(tmp_path, name):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / name).write_bytes(b"cos\nsystem\n(S'touch pwned'\ntR.")
    refused(tmp_path, f"{name}.*python -c .*save_pretrained")


def test_a_folder_without_any_weights_is_refused(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    refused(tmp_path, r"no model\.safetensors and no model\.safetensors\.index\.json")


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.model"])
def test_a_git_lfs_pointer_is_refused_with_the_command_that_fetches_it(tmp_path, name):
    single(tmp_path)
    (tmp_path / name).write_text(POINTER)
    refused(tmp_path, f"{name}.*git lfs pull")


def test_a_git_lfs_pointer_as_shard_is_refused(tmp_path):
    sharded(tmp_path)
    (tmp_path / B).write_text(POINTER)
    refused(tmp_path, f"{B}.*git lfs pull")


def test_a_truncated_shard_is_refused_by_name(tmp_path):
    sharded(tmp_path)
    (tmp_path / B).write_bytes((tmp_path / B).read_bytes()[:-1])
    refused(tmp_path, f"{B}: truncated")


def test_a_tensor_in_two_shards_is_refused_whichever_the_index_names(tmp_path):
    for owner in (A, B):
        sharded(tmp_path, {"w": A, "x": owner, "y": B, "z": B})
        shard(tmp_path / A, "w", "x")
        shard(tmp_path / B, "x", "y", "z")
        refused(tmp_path, "'x' in two shards")


def test_a_tensor_that_the_index_does_not_name_is_refused(tmp_path):
    refused(sharded(tmp_path, {"x": A, "y": B}), "does not name 'z'")


def test_a_tensor_that_its_shard_does_not_hold_is_refused(tmp_path):
    refused(sharded(tmp_path, {"x": A, "y": B, "z": B, "w": A}), "names 'w'")
    refused(sharded(tmp_path, {"x": A, "y": A, "z": B}), "names 'y'")


def test_a_missing_shard_is_refused_by_name(tmp_path):
    sharded(tmp_path)
    (tmp_path / B).unlink()
    refused(tmp_path, f"{B}'?, which is missing")


def test_a_shard_that_the_index_does_not_name_is_refused(tmp_path):
    sharded(tmp_path)
    shard(tmp_path / "model-00003-of-00003.safetensors", "w")
    refused(tmp_path, "model-00003-of-00003.safetensors: a shard that no index names")


def test_shards_without_an_index_are_refused(tmp_path):
    sharded(tmp_path)
    (tmp_path / "model.safetensors.index.json").unlink()
    refused(tmp_path, "without model.safetensors.index.json")
    shard(tmp_path / "model.safetensors", "x")
    refused(tmp_path, "a shard that no index names")


def test_two_sets_of_weights_are_refused(tmp_path):
    sharded(tmp_path)
    shard(tmp_path / "model.safetensors", "x")
    refused(tmp_path, "both")


TRAVERSALS = [
    "../x",
    "/etc/passwd",
    "sub/x",
    "..",
    ".",
    "",
    "..\\x",
    "a\0b",
    "./" + A,
    "a" * 4096 + "/b",
]


@pytest.mark.parametrize("target", TRAVERSALS)
def test_an_index_that_leads_out_of_the_folder_is_refused(tmp_path, target):
    folder = tmp_path / "model"
    (folder / "sub").mkdir(parents=True)
    for name in ("x.safetensors", "model/sub/x.safetensors"):
        shard(tmp_path / name, "x")
    refused(sharded(folder, {"x": target, "y": B, "z": B}), "leads out of the folder")
    if target:
        refused(
            sharded(folder, {"x": f"{target}/x.safetensors", "y": B, "z": B}),
            "leads out of the folder",
        )


@pytest.mark.parametrize(
    "target", ["config.json", "CON", "x" * 4096, "pytorch_model.bin", "missing.safetensors"]
)
def test_an_index_that_names_what_is_not_a_shard_is_refused(tmp_path, target):
    refused(sharded(tmp_path, {"x": target, "y": B, "z": B}), "index.json")


@pytest.mark.parametrize(
    "text",
    [
        "[]",
        "{}",
        '{"weight_map": []}',
        '{"weight_map": {"x": 1}}',
        '{"weight_map": {"x": "a", "x": "b"}}',
        "x",
    ],
)
def test_an_index_without_a_table_of_names_is_refused(tmp_path, text):
    sharded(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(text)
    refused(tmp_path, "index.json")


def test_an_index_or_a_file_without_tensors_is_refused(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    shard(tmp_path / "model.safetensors")
    refused(tmp_path, "no tensor")


def test_a_folder_a_fifo_or_a_dangling_link_as_weights_is_refused_at_once(tmp_path):
    single(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "model.safetensors").mkdir()
    refused(tmp_path, "no model.safetensors")
    (tmp_path / "model.safetensors").rmdir()
    os.mkfifo(tmp_path / "model.safetensors")
    refused(tmp_path, "not a regular file")
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "model.safetensors").symlink_to("gone")
    refused(tmp_path, "not a regular file")


@pytest.mark.parametrize(
    ("config", "match"),
    [
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config.*with gptq"),
        ({"quantization_config": {}}, "with unknown"),
        ({"compression_config": {"quant_method": "compressed-tensors"}}, "with compressed-tensors"),
    ],
)
def test_a_source_that_is_quantized_already_is_opened_and_refused_by_method(
    tmp_path, config, match
):
    checkpoint = open_checkpoint(single(tmp_path, config))
    with pytest.raises(InputError, match=match):
        refuse_quantized(checkpoint)


def test_a_source_in_original_precision_is_not_refused(tmp_path):
    refuse_quantized(open_checkpoint(single(tmp_path, {"quantization_config": None})))
