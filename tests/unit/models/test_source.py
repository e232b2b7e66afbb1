"""A checkpoint opened as files: what a graph needs is there, transformers is not."""

import json
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from quantflow.errors import InputError, UnsupportedError
from quantflow.files.checkpoint import open_checkpoint
from quantflow.files.digests import Digests
from quantflow.models.load import open_source
from quantflow.models.model_tensors import listed
from quantflow.models.open import graph_for, open_files
from quantflow.models.source import fingerprint

SHAPE = {
    "vocab_size": 16,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}


@pytest.fixture
def folder(tmp_path):
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**SHAPE)).save_pretrained(tmp_path)
    return tmp_path


def change_config(folder, **changes):
    path = folder / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


def test_the_graph_of_the_files_is_that_of_transformers_configuration(folder):
    assert graph_for(open_files(folder).config) == graph_for(open_source(folder).config)
    assert open_files(folder).names == open_source(folder).names


def test_a_key_that_config_json_lacks_is_an_attribute_that_is_missing(folder):
    config = open_files(folder).config
    assert config.hidden_size == 8
    assert getattr(config, "no_such_key", None) is None


@pytest.mark.parametrize(
    ("key", "value"), [("num_hidden_layers", None), ("hidden_size", "8"), ("vocab_size", 0)]
)
def test_a_size_that_is_missing_or_no_number_is_named(folder, key, value):
    change_config(folder, **{key: value})
    with pytest.raises(InputError, match=rf"config\.json: {key} is {value!r}"):
        open_files(folder)


def test_another_family_and_quantized_weights_are_refused(folder):
    change_config(folder, model_type="mamba")
    with pytest.raises(UnsupportedError, match="model_type 'mamba'"):
        open_files(folder)
    change_config(folder, model_type="llama", quantization_config={"quant_method": "gptq"})
    path = folder / "model.safetensors"
    packed = {"model.layers.0.mlp.up_proj.qweight": torch.ones(1, 8, dtype=torch.int32)}
    save_file(load_file(path) | packed, path, {"format": "pt"})
    with pytest.raises(InputError, match="gptq"):
        open_files(folder)


def test_the_fingerprint_follows_weights_and_config_and_nothing_else(folder):
    def now():
        return fingerprint(open_checkpoint(folder))

    first = now()
    (folder / "README.md").write_text("hello")
    assert now() == first
    path = folder / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    second = now()
    change_config(folder, rms_norm_eps=1e-3)
    assert len({first, second, now()}) == 3
    assert len(first) == 64


def test_the_fingerprint_is_the_same_with_hashes_that_are_known_already(folder, tmp_path):
    digests = Digests(tmp_path / "hashes.json")
    expected = fingerprint(open_checkpoint(folder))
    assert fingerprint(open_checkpoint(folder), digests) == expected
    assert fingerprint(open_checkpoint(folder), digests) == expected


def test_files_are_opened_and_graphs_drawn_without_transformers(tmp_path):
    config = {"model_type": "llama", **SHAPE}
    tensors = {name: torch.ones(shape) for name, shape in listed(config).shapes.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config))
    program = (
        "import sys, quantflow.quantizing.quantize, quantflow.exporting.export, "
        "quantflow.exporting.proof_process\n"
        "import quantflow.planning.forecast\n"
        "from quantflow.models.open import open_files\n"
        "from quantflow.models.open import graph_for\n"
        f"assert len(graph_for(open_files({str(tmp_path)!r}).config).linears) == 14\n"
        "assert 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize("pattern", ["re:.*mlp.*", "transformer.h.0.attn.c_proj"])
def test_named_linears_that_are_stored_transposed_are_refused(tmp_path, pattern):
    config = GPT2Config(n_embd=8, n_layer=1, n_head=2, vocab_size=16, n_positions=8)
    GPT2LMHeadModel(config).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedError, match=r"c_attn: weight \[8, 24\] .* its bias has 24"):
        open_files(tmp_path, linears=[pattern])
    assert open_files(tmp_path).config.model_type == "gpt2"
