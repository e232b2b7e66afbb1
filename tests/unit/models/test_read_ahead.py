"""Tensors that are read before they are asked for."""

import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from quantflow.core.device import HOST
from quantflow.errors import InputError
from quantflow.files.checkpoint import open_checkpoint
from quantflow.models.load import open_source, reading_ahead
from quantflow.models.read_ahead import THREAD, ReadAhead


def test_a_tensor_that_was_wanted_is_taken_once_and_no_other_is(llama: Path) -> None:
    ahead = ReadAhead(open_checkpoint(llama), HOST)
    stored = load_file(llama / "model.safetensors")
    first, second = "model.layers.0.mlp.up_proj.weight", "model.norm.weight"
    ahead.want([first, second])
    for name in (second, first):
        taken = ahead.take(name)
        assert (
            taken is not None
            and torch.equal(taken, stored[name])
            and taken.dtype == stored[name].dtype
        )
        assert ahead.take(name) is None
    assert ahead.take("model.embed_tokens.weight") is None
    ahead.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith(THREAD)]


def test_what_nobody_took_is_dropped_when_others_are_wanted(llama: Path) -> None:
    ahead = ReadAhead(open_checkpoint(llama), HOST)
    ahead.want(["model.norm.weight"])
    ahead.want(["model.layers.1.mlp.up_proj.weight"])
    assert ahead.take("model.norm.weight") is None
    assert ahead.take("model.layers.1.mlp.up_proj.weight") is not None
    ahead.close()


def test_damage_is_told_by_whoever_takes_the_tensor(llama: Path, tmp_path: Path) -> None:
    tensors = load_file(llama / "model.safetensors")
    tensors["model.norm.weight"][3] = torch.nan
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((llama / "config.json").read_bytes())
    ahead = ReadAhead(open_checkpoint(tmp_path), HOST)
    ahead.want(["model.norm.weight"])
    with pytest.raises(
        InputError, match="model.norm.weight: 1 values of model.safetensors are NaN or Inf"
    ):
        ahead.take("model.norm.weight")
    ahead.close()


def test_on_the_cpu_nothing_is_read_ahead(llama: Path) -> None:
    source = open_source(llama)
    with reading_ahead(source, HOST) as read:
        assert read is source and read.ahead is None
