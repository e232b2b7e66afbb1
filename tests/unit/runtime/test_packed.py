"""Weights kept for the kernels: the same decoder without preparing, and nothing damaged."""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, Qwen2Config

from quantflow.backends import kernels, native
from quantflow.core.scheme import PRESETS, with_group_size
from quantflow.errors import InputError, IntegrityError
from quantflow.files import disk
from quantflow.runtime.artifact import Artifact
from quantflow.runtime.load import load
from quantflow.runtime.packed import Pack

SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 96,
    "vocab_size": 96,
    "max_position_embeddings": 64,
}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2}
LLAMA = LlamaConfig(**SIZES, tie_word_embeddings=False, architectures=["LlamaForCausalLM"])
QWEN2 = Qwen2Config(**SIZES, tie_word_embeddings=True, architectures=["Qwen2ForCausalLM"])
W4A16 = with_group_size(PRESETS["W4A16_ASYM"], 32)
PROMPT = torch.randint(3, 96, (2, 9), generator=torch.Generator().manual_seed(0))
MAPS = Path("/proc/self/maps")
OURS = native.why_not(kernels.SOURCE, cpu_flags=kernels.CPU_FLAGS) is None


def logits(loaded) -> torch.Tensor:
    loaded.decoder.begin(rows=2, capacity=9)
    return loaded.decoder.forward(PROMPT, last_only=False)


def pack_of(folder):
    (found,) = (folder.parent / f"{folder.name}-packed").iterdir()
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("config", "scheme"), [(LLAMA, W4A16), (QWEN2, PRESETS["W8A8"])], ids=["W4A16_ASYM", "W8A8"]
)
def test_a_second_load_gives_the_same_bits_and_prepares_nothing(
    config, scheme, dtype, tmp_path, make_artifact, monkeypatch
):
    folder = tmp_path / "artifact"
    make_artifact(folder, config, scheme)
    expected = logits(load(folder, decoder="auto", dtype=dtype))
    assert torch.equal(logits(load(folder, decoder="auto", dtype=dtype, pack=True)), expected)
    if OURS:
        monkeypatch.setattr(
            Artifact, "decode", lambda *_args: pytest.fail("a weight was prepared again")
        )
    assert torch.equal(logits(load(folder, decoder="auto", dtype=dtype, pack=True)), expected)


def test_other_choices_and_another_artifact_have_files_of_their_own(tmp_path, make_artifact):
    folder = tmp_path / "artifact"
    make_artifact(folder, LLAMA, W4A16)
    load(folder, decoder="auto", pack=True)
    first = pack_of(folder)
    load(folder, decoder="auto", pack=True, dtype=torch.bfloat16)
    load(folder, decoder="auto", pack=True, backend="reference")
    assert len(list(first.parent.iterdir())) == 3


@pytest.mark.parametrize("where", [0.5, -1], ids=["in the middle", "the last byte"])
def test_a_flipped_bit_is_an_integrity_error_unless_nothing_is_verified(
    where, tmp_path, make_artifact
):
    folder = tmp_path / "artifact"
    make_artifact(folder, LLAMA, W4A16)
    load(folder, decoder="auto", pack=True)
    path = pack_of(folder)
    content = bytearray(path.read_bytes())
    content[int(len(content) * where) if where > 0 else -1] ^= 1
    path.write_bytes(content)
    with pytest.raises(
        IntegrityError, match="its data is not what was written; remove the file; it is made again"
    ):
        load(folder, decoder="auto", pack=True)
    # a weight; at the end lies what tells C where the weights are, which is looked at anyway
    if where > 0:
        load(folder, decoder="auto", pack=True, verify=False)


def flip(content: bytearray, at: int) -> None:
    content[at] ^= 128


def exchange(content: bytearray, at: int) -> None:
    content[at : at + 8192] = content[at + 4096 : at + 8192] + content[at : at + 4096]


def swap_words(content: bytearray, at: int) -> None:
    """Words of four bytes of one row and one column of a block; a row's differ in one byte."""
    at -= at % 4
    for other in (at + 4, at + 4096):
        content[at : at + 4], content[other : other + 4] = (
            content[other : other + 4],
            content[at : at + 4],
        )


@pytest.mark.parametrize("change", [flip, exchange, swap_words])
@pytest.mark.parametrize("page", [0, 7, 42])
def test_a_flipped_bit_and_two_exchanged_pages_of_a_large_tensor_are_integrity_errors(
    change, page, tmp_path
):
    pack = Pack(tmp_path / "a.safetensors", verify=True)
    pack.get(
        "x",
        lambda: {
            "y": torch.arange(1 << 16, dtype=torch.int32)[: 45 * 1024 + 16],
            "z": torch.arange(7),
        },
    )
    pack.save()
    content = bytearray(pack.path.read_bytes())
    change(content, len(content) - 7 * 8 - (45 * 1024 + 16) * 4 + page * 4096)
    pack.path.write_bytes(content)
    with pytest.raises(
        IntegrityError, match="its data is not what was written; remove the file; it is made again"
    ):
        Pack(pack.path, verify=True)


@pytest.mark.parametrize(
    "back",
    [1, 7 * 8, 7 * 8 + 1, 7 * 8 + 64],
    ids=["last", "first of the last", "last before it", "tail"],
)
def test_bytes_outside_of_whole_pages_count_too(back, tmp_path):
    pack = Pack(tmp_path / "a.safetensors", verify=True)
    pack.get("x", lambda: {"y": torch.arange(8192 + 16, dtype=torch.int32), "z": torch.arange(7)})
    pack.save()
    content = bytearray(pack.path.read_bytes())
    flip(content, len(content) - back)
    pack.path.write_bytes(content)
    with pytest.raises(
        IntegrityError, match="its data is not what was written; remove the file; it is made again"
    ):
        Pack(pack.path, verify=True)


def test_a_tensor_by_another_name_and_a_file_of_none_are_integrity_errors(tmp_path):
    path = tmp_path / "a.safetensors"
    pack = Pack(path, verify=True)
    pack.get("x", lambda: {"y": torch.arange(16)})
    pack.save()
    path.write_bytes(path.read_bytes().replace(b"x|y", b"x|z"))
    with pytest.raises(
        IntegrityError, match="its data is not what was written; remove the file; it is made again"
    ):
        Pack(path, verify=True)
    save_file({}, path)
    with pytest.raises(
        IntegrityError, match="a.safetensors: holds no tensor; remove the file; it is made again"
    ):
        Pack(path, verify=True)


@pytest.mark.parametrize("size", [0, 10, 100, -64])
def test_a_file_that_ends_early_is_an_integrity_error(size, tmp_path):
    path = tmp_path / "a.safetensors"
    pack = Pack(path, verify=True)
    pack.get("x", lambda: {"y": torch.arange(1000)})
    pack.save()
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(IntegrityError, match="remove the file; it is made again"):
        Pack(path, verify=True)


def test_a_changed_config_beside_a_whole_pack_is_still_noticed(tmp_path, make_artifact):
    folder = tmp_path / "artifact"
    make_artifact(folder, LLAMA, W4A16)
    load(folder, decoder="auto", pack=True)
    (folder / "config.json").write_text(
        (folder / "config.json").read_text().replace("silu", "relu")
    )
    with pytest.raises(IntegrityError, match=r"config\.json"):
        load(folder, decoder="auto", pack=True)


def test_tensors_of_every_dtype_and_shape_come_back_and_whole_cache_lines_begin_at_one(
    tmp_path,
):
    written = {
        "a": {"x": torch.arange(7, dtype=torch.int8), "y": torch.randn(3, 5)},
        "b|c": {
            "x": torch.randn(2, 16).bfloat16(),
            "y": torch.arange(32, dtype=torch.int32).view(2, 16).t(),
        },
    }
    pack = Pack(tmp_path / "new" / "a.safetensors", verify=True)
    for key, parts in written.items():
        pack.get(key, lambda parts=parts: parts)
    pack.save()
    # any reader of safetensors reads it
    assert load_file(pack.path).keys() == {"a|x", "a|y", "b|c|x", "b|c|y"}
    again = Pack(pack.path, verify=True)
    assert again.complete and "b" not in again
    for key, parts in written.items():
        found = again.get(key, dict)
        assert found.keys() == parts.keys() and all(
            torch.equal(found[name], parts[name]) for name in parts
        )
    assert all(tensor.data_ptr() % 64 == 0 for tensor in again.get("b|c", dict).values())


@pytest.mark.skipif(not MAPS.exists(), reason="only Linux says what is mapped")
def test_a_pack_is_mapped_as_long_as_something_of_it_is_used(tmp_path):
    pack = Pack(tmp_path / "a.safetensors", verify=True)
    pack.get("x", lambda: {"y": torch.arange(1000)})
    pack.save()
    found = Pack(pack.path, verify=True).get("x", dict)
    assert str(pack.path) in MAPS.read_text()
    found["y"] += 1  # in this process alone
    assert torch.equal(Pack(pack.path, verify=True).get("x", dict)["y"], torch.arange(1000))
    del found
    assert str(pack.path) not in MAPS.read_text()


def test_the_pack_is_not_where_the_artifact_is_whose_files_stay_as_they_were(
    tmp_path, make_artifact
):
    folder = tmp_path / "artifact"
    make_artifact(folder, LLAMA, W4A16)
    before = sorted(path.name for path in folder.iterdir())
    assert dataclasses.is_dataclass(load(folder, decoder="auto", pack=True))
    assert sorted(path.name for path in folder.iterdir()) == before


@pytest.mark.parametrize("mode", [0o775, 0o757])
def test_a_pack_that_others_may_write_to_is_not_read(mode, tmp_path, make_artifact):
    folder = tmp_path / "artifact"
    make_artifact(folder, LLAMA, W4A16)
    load(folder, decoder="auto", pack=True)
    path = pack_of(folder)
    for place in (path, path.parent):
        was = place.stat().st_mode
        place.chmod(mode)
        with pytest.raises(
            InputError,
            match=f"{place.name}: others may write to it, and it decides what the model says",
        ):
            load(folder, decoder="auto", pack=True)
        place.chmod(was)
    load(folder, decoder="auto", pack=True)


def test_what_a_killed_process_had_begun_is_removed_and_what_another_one_writes_is_not(tmp_path):
    gone = subprocess.run(
        [sys.executable, "-c", "import os; print(os.getpid())"],
        capture_output=True,
        text=True,
        check=True,
    )
    dead, alive = (
        tmp_path / f".made-by-{number}-x" for number in (gone.stdout.strip(), os.getppid())
    )
    for folder in (dead, alive):
        folder.mkdir()
        (folder / "a.safetensors").write_bytes(b"half")
    pack = Pack(tmp_path / "a.safetensors", verify=True)
    pack.get("x", lambda: {"y": torch.arange(16)})
    pack.save()
    assert sorted(path.name for path in tmp_path.iterdir()) == [alive.name, "a.safetensors"]


def test_a_pack_is_for_its_owner_to_write_whatever_the_umask(tmp_path):
    was = os.umask(0)
    try:
        pack = Pack(tmp_path / "new" / "a.safetensors", verify=True)
        pack.get("x", lambda: {"y": torch.arange(16)})
        pack.save()
    finally:
        os.umask(was)
    assert Pack(pack.path, verify=True).complete


@pytest.mark.parametrize("mode", [0o775, 0o757])
def test_a_pack_that_can_be_exchanged_is_neither_read_nor_made(mode, tmp_path, monkeypatch):
    """Whoever may write to a folder above it can put another folder under its name."""
    above = tmp_path / "shared"
    path = above / "packed" / "a.safetensors"
    pack = Pack(path, verify=True)
    pack.get("x", lambda: {"y": torch.arange(16)})
    pack.save()
    monkeypatch.setattr(disk, "_is_own_group", lambda gid: False)
    above.chmod(mode)
    for name in ("a.safetensors", "b.safetensors"):
        with pytest.raises(InputError, match="/shared: others may write to it and exchange packed"):
            Pack(path.with_name(name), verify=True)
    above.chmod(mode | 0o1000)
    assert Pack(path, verify=True).complete


RECORD = [
    name for name, _ in kernels._Weight._fields_ if name not in ("data", "scale", "zero", "offset")
]
SIZES_OF_C = ("rows", "columns", "group", "groups")


@pytest.mark.skipif(not OURS, reason="this CPU's packs hold no records")
@pytest.mark.parametrize("field", RECORD)
@pytest.mark.parametrize("value", [-1, 0, 1, 2, 3, 17, 1 << 20, (1 << 31) - 1])
def test_a_changed_record_is_an_integrity_error_or_leads_c_nowhere_else(field, value, quantize):
    """A pack with an agreeing hash; the sanitizers' run of this test sees every place C reads."""
    weight = torch.randn(96, 64, generator=torch.Generator().manual_seed(0))
    for scheme in (W4A16, PRESETS["W8A8"], PRESETS["FP8_DYNAMIC"]):
        parts = kernels.dump(kernels.prepare(quantize("x", weight, scheme), torch.float32))
        record = kernels._Weight.from_buffer_copy(parts["weight"].numpy().tobytes())
        same = value == getattr(record, field)
        setattr(record, field, value)
        changed = parts | {"weight": torch.frombuffer(bytearray(record), dtype=torch.uint8)}
        try:
            restored = kernels.restore(changed, torch.float32, shape=(96, 64))
        except IntegrityError as error:
            assert error.cause.startswith("a kept weight [96, 64]: ") and not same
        else:
            assert same or field not in SIZES_OF_C
            assert kernels.linear(torch.randn(13, 64), restored, None).shape == (13, 96)


@pytest.mark.skipif(not OURS, reason="this CPU's packs hold no records")
def test_tensors_that_are_missing_cut_or_of_another_dtype_are_integrity_errors(quantize):
    weight = torch.randn(96, 64, generator=torch.Generator().manual_seed(0))
    for scheme in (W4A16, PRESETS["W8A8"]):
        parts = kernels.dump(kernels.prepare(quantize("x", weight, scheme), torch.float32))
        assert torch.equal(
            kernels.restore(parts, torch.float32, shape=(96, 64)).tensors["data"], parts["data"]
        )
        wrong = [
            {name: tensor for name, tensor in parts.items() if name != left}
            for left in parts
            if left != "zero"
        ]
        wrong += [parts | {name: tensor.flatten()[1:]} for name, tensor in parts.items()]
        wrong += [parts | {name: tensor.double()} for name, tensor in parts.items()]
        for changed in wrong:
            with pytest.raises(IntegrityError, match="a kept weight"):
                kernels.restore(changed, torch.float32, shape=(96, 64))


def test_a_plain_weight_of_another_shape_in_a_pack_is_an_integrity_error(tmp_path, make_artifact):
    folder = tmp_path / "artifact"
    make_artifact(folder, LLAMA, W4A16)
    load(folder, decoder="auto", pack=True)
    path = pack_of(folder)
    tensors = load_file(path)
    path.unlink()
    forged = Pack(path, verify=True)  # whose hash agrees
    for name, tensor in tensors.items():
        key, _, part = name.rpartition("|")
        if key == "model.embed_tokens.weight":
            tensor = tensor[:4].clone()
        forged.get(key, dict)[part] = tensor
    forged.save()
    with pytest.raises(
        IntegrityError,
        match=r"model.embed_tokens.weight: torch.float32 \[4, 64\] where \[96, 64\] belongs",
    ):
        load(folder, decoder="auto", pack=True)
