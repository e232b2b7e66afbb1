"""Opening a Hugging Face folder, and every folder that is refused."""

import json
import os
import struct

import pytest

from quantflow.errors import InputError
from quantflow.files.checkpoint import is_quantized, open_checkpoint, refuse_quantized

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
SIZES = {"BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "BF16": 2, "F32": 4, "I32": 4, "I64": 8}
A, B = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def shard(path, *names):
    entries = {
        name: {"dtype": "U8", "shape": [1], "data_offsets": [i, i + 1]}
        for i, name in enumerate(names)
    }
    text = json.dumps(entries).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(len(names)))


def typed(path, dtypes):
    """A file of tensors with one element each."""
    entries, end = {}, 0
    for name, dtype in dtypes.items():
        begin, end = end, end + SIZES[dtype]
        entries[name] = {"dtype": dtype, "shape": [1], "data_offsets": [begin, end]}
    text = json.dumps(entries).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(end))


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


@pytest.mark.parametrize(
    "name", ["pytorch_model.bin", "onnx/model.onnx", "model-00003-of-00003.safetensors"]
)
@pytest.mark.parametrize("kind", ["pointer", "broken link", "fifo"])
def test_a_file_that_nobody_reads_decides_nothing(tmp_path, name, kind):
    path = single(tmp_path) / name
    path.parent.mkdir(exist_ok=True)
    if kind == "pointer":
        path.write_text(POINTER)
    elif kind == "fifo":
        os.mkfifo(path)
    else:
        path.symlink_to("gone")
    assert set(open_checkpoint(tmp_path).tensors) == {"x", "y"}


def test_a_pickle_alone_that_is_a_git_lfs_pointer_is_refused_as_one(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_text(POINTER)
    refused(tmp_path, "pytorch_model.bin.*git lfs pull")


def test_a_git_lfs_pointer_as_shard_is_refused(tmp_path):
    sharded(tmp_path)
    (tmp_path / B).write_text(POINTER)
    refused(tmp_path, f"{B}.*git lfs pull")


def test_a_truncated_shard_is_refused_by_name(tmp_path):
    sharded(tmp_path)
    (tmp_path / B).write_bytes((tmp_path / B).read_bytes()[:-1])
    refused(tmp_path, f"{B}: truncated")


@pytest.mark.parametrize(("owner", "other"), [(A, B), (B, A)])
def test_of_a_tensor_in_two_shards_the_index_says_which_counts(tmp_path, owner, other):
    sharded(tmp_path, {"w": A, "x": owner, "y": B, "z": B})
    shard(tmp_path / A, "w", "x")
    shard(tmp_path / B, "x", "y", "z")
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.tensors["x"][0] == owner
    assert checkpoint.notes == (
        f"x of {other}: not read, model.safetensors.index.json names {owner} for it",
    )


def test_a_tensor_in_two_shards_is_refused_where_the_index_names_none(tmp_path):
    sharded(tmp_path, {"w": A, "y": B, "z": B})
    shard(tmp_path / A, "w", "x")
    shard(tmp_path / B, "x", "y", "z")
    refused(tmp_path, f"'x' in two shards, {A} and {B}")


def test_a_tensor_that_the_index_does_not_name_is_read_as_other_loaders_read_it(tmp_path):
    checkpoint = open_checkpoint(sharded(tmp_path, {"x": A, "y": B}))
    assert checkpoint.tensors["z"][0] == B
    assert checkpoint.notes == (
        f"z of {B}: model.safetensors.index.json does not name it, it is read all the same",
    )


def test_a_tensor_that_its_shard_does_not_hold_is_refused(tmp_path):
    refused(sharded(tmp_path, {"x": A, "y": B, "z": B, "w": A}), "names 'w'")
    refused(sharded(tmp_path, {"x": A, "y": A, "z": B}), "names 'y'")


def test_a_missing_shard_is_refused_by_name(tmp_path):
    sharded(tmp_path)
    (tmp_path / B).unlink()
    refused(tmp_path, f"{B}'?, which is missing")


def test_a_shard_that_no_index_names_is_not_read(tmp_path):
    sharded(tmp_path)
    (tmp_path / "model-00003-of-00003.safetensors").write_text("damaged")
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.shards == (A, B)
    assert checkpoint.notes == (
        "model-00003-of-00003.safetensors: no index names such a shard, it is not read",
    )


def test_shards_without_an_index_are_refused_unless_one_file_holds_the_weights(tmp_path):
    sharded(tmp_path)
    (tmp_path / "model.safetensors.index.json").unlink()
    refused(tmp_path, "without model.safetensors.index.json")
    shard(tmp_path / "model.safetensors", "v")
    assert set(open_checkpoint(tmp_path).tensors) == {"v"}


def test_one_file_goes_before_an_index_that_does_not_name_it_as_in_transformers(tmp_path):
    sharded(tmp_path)
    shard(tmp_path / "model.safetensors", "v")
    (tmp_path / B).unlink()
    checkpoint = open_checkpoint(tmp_path)
    assert (checkpoint.shards, checkpoint.index) == (("model.safetensors",), "")
    assert checkpoint.notes == (
        "model.safetensors holds the weights; model.safetensors.index.json does not name it and "
        "is not read",
        f"{A}: no index names such a shard, it is not read",
    )


def test_mistrals_own_file_and_pickles_beside_the_weights_change_nothing(tmp_path):
    sharded(tmp_path)
    plain = open_checkpoint(tmp_path)
    for name in ("consolidated.safetensors", "pytorch_model.bin", "adapter_model.safetensors"):
        (tmp_path / name).write_text("damaged")
    checkpoint = open_checkpoint(tmp_path)
    assert (checkpoint.tensors, checkpoint.notes) == (plain.tensors, ())


def test_safetensors_by_another_name_alone_are_named(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    shard(tmp_path / "consolidated.safetensors", "x")
    refused(tmp_path, "index.json, only consolidated.safetensors")


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
    refused(tmp_path, "model.safetensors: not a regular file")
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "model.safetensors").symlink_to("gone")
    refused(tmp_path, "model.safetensors: not a regular file")


@pytest.mark.parametrize("name", ["config.json", A, "tokenizer.json"])
def test_a_broken_link_in_the_place_of_a_file_that_is_read_is_refused_by_name(tmp_path, name):
    sharded(tmp_path)
    (tmp_path / name).unlink(missing_ok=True)
    (tmp_path / name).symlink_to("gone")
    refused(tmp_path, f"{name}: not a regular file")


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


BITSANDBYTES = {"quant_method": "bitsandbytes", "load_in_4bit": True}
PLAIN = {"a.weight": "BF16", "a.bias": "F32"}


@pytest.mark.parametrize(
    "left",
    [
        {"quantization_config": BITSANDBYTES},
        {"quantization_config": {}},
        {"compression_config": {"format": "pack-quantized"}},
        {"text_config": {"hidden_size": 1, "quantization_config": BITSANDBYTES}},
    ],
)
def test_a_quantization_config_beside_plain_floats_is_left_over_and_said(tmp_path, left):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **left}))
    typed(tmp_path / "model.safetensors", PLAIN)
    checkpoint = open_checkpoint(tmp_path)
    refuse_quantized(checkpoint)
    assert not checkpoint.quantized_by
    assert checkpoint.left_over.startswith("config.json: ")
    assert "quantization_config" not in json.dumps(checkpoint.config)
    assert "compression_config" not in checkpoint.config
    assert checkpoint.notes == (
        f"{checkpoint.left_over} says that the model is quantized, every weight is stored in "
        "floating point: left over, it is neither read nor copied",
    )
    assert not is_quantized(tmp_path, {"model_type": "llama", **left})


@pytest.mark.parametrize("name", ["quantize_config.json", "hf_quant_config.json"])
def test_a_file_that_says_how_plain_floats_are_quantized_is_left_over(tmp_path, name):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / name).write_text("{}")
    typed(tmp_path / "model.safetensors", PLAIN)
    checkpoint = open_checkpoint(tmp_path)
    refuse_quantized(checkpoint)
    assert (checkpoint.left_over, checkpoint.config) == (name, {"model_type": "llama"})


@pytest.mark.parametrize(
    "more",
    [
        {"b.weight": "U8", "b.weight.absmax": "F32"},  # bitsandbytes, 4 bits
        {"b.weight": "I8", "b.SCB": "F32"},  # bitsandbytes, 8 bits
        {"b.weight": "F8_E4M3"},
        {"b.qweight": "I32"},
        {"b.weight_packed": "I32"},
        {"b.weight": "BF16", "b.weight_scale": "BF16"},  # rounded, stored as floats
        {"self_attn.k_scale": "F32"},  # keys and values alone
        {"experts.down_proj_blocks": "U8"},
    ],
)
def test_one_quantized_tensor_makes_the_quantization_config_count(tmp_path, more):
    config = {"model_type": "llama", "quantization_config": BITSANDBYTES}
    (tmp_path / "config.json").write_text(json.dumps(config))
    typed(tmp_path / "model.safetensors", PLAIN | more)
    checkpoint = open_checkpoint(tmp_path)
    assert (checkpoint.left_over, checkpoint.config) == ("", config)
    assert is_quantized(tmp_path, config)
    with pytest.raises(InputError, match="bitsandbytes"):
        refuse_quantized(checkpoint)


def test_masks_that_old_checkpoints_hold_are_no_quantized_weights(tmp_path):
    (tmp_path / "config.json").write_text('{"quantization_config": {}}')
    masks = {"h.0.attn.bias": "U8", "h.0.attn.causal": "BOOL", "position_ids": "I64"}
    typed(tmp_path / "model.safetensors", PLAIN | masks)
    assert open_checkpoint(tmp_path).left_over


def test_a_source_in_original_precision_is_not_refused(tmp_path):
    refuse_quantized(open_checkpoint(single(tmp_path, {"quantization_config": None})))
