"""Tensors from files, models on meta, and the way between them."""

import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    OpenAIGPTConfig,
    PreTrainedTokenizerFast,
)

from quantflow.errors import InputError, UnsupportedError
from quantflow.files.checkpoint import open_checkpoint
from quantflow.models import reading
from quantflow.models.load import load_model, open_source
from quantflow.models.parameters import materialize_, release_
from quantflow.models.reading import read_tensors
from quantflow.models.skeleton import skeleton
from quantflow.models.tokenizer import load_tokenizer

SHAPE = {
    "vocab_size": 16,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
WEIGHT = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture
def folder(tmp_path):
    LlamaForCausalLM(LlamaConfig(**SHAPE)).save_pretrained(tmp_path)
    return tmp_path


def write_folder(folder, tensors):
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return open_checkpoint(folder)


def change_config(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_a_read_tensor_is_what_safetensors_reads(folder):
    source = open_source(folder)
    expected = load_file(folder / "model.safetensors")
    assert set(source.names) == set(expected)
    for name, tensor in source.read(source.names).items():
        assert tensor.dtype == torch.float32
        assert torch.equal(tensor, expected[name])


def test_sharded_checkpoints_are_read_from_every_shard(folder, tmp_path):
    model = LlamaForCausalLM(LlamaConfig(**SHAPE))
    model.save_pretrained(tmp_path / "shards", max_shard_size="1KB")
    source = open_source(tmp_path / "shards")
    assert len(source.checkpoint.shards) > 1
    for name, tensor in source.read(source.names).items():
        assert torch.equal(tensor, model.state_dict()[name])


def test_every_dtype_of_the_table_is_read_bit_by_bit(tmp_path):
    values = torch.tensor([[0, 1, 2], [3, 4, 5]])
    tensors = {name: values.to(dtype) for name, dtype in reading.DTYPES.items()}
    tensors |= {"scalar": torch.tensor(7), "empty": torch.empty(0, 3, dtype=torch.bfloat16)}
    checkpoint = write_folder(tmp_path, tensors)
    for name, tensor in read_tensors(checkpoint, checkpoint.tensors).items():
        assert (tensor.dtype, tensor.shape) == (tensors[name].dtype, tensors[name].shape)
        assert torch.equal(
            tensor.flatten().view(torch.uint8), tensors[name].flatten().view(torch.uint8)
        )


def test_dtype_converts_floating_tensors_only_and_the_order_is_that_of_the_request(tmp_path):
    checkpoint = write_folder(
        tmp_path, {"a": torch.ones(2, dtype=torch.bfloat16), "b": torch.ones(2, dtype=torch.int32)}
    )
    read = read_tensors(checkpoint, ["b", "a"], dtype=torch.float32)
    assert [(name, tensor.dtype) for name, tensor in read.items()] == [
        ("b", torch.int32),
        ("a", torch.float32),
    ]


def test_reads_that_return_early_are_continued(folder, monkeypatch):
    original = os.preadv
    monkeypatch.setattr(
        os, "preadv", lambda handle, views, offset: original(handle, [views[0][:7]], offset)
    )
    expected = load_file(folder / "model.safetensors")[WEIGHT]
    assert torch.equal(open_source(folder).read([WEIGHT])[WEIGHT], expected)


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs Linux's /proc")
def test_a_checkpoint_is_not_mapped(folder):
    path = str(folder / "model.safetensors")
    with safe_open(path, "pt") as file:
        kept = file.get_tensor(WEIGHT)
        assert path in Path("/proc/self/maps").read_text()
    del kept, file
    source = open_source(folder)
    tensors = source.read(source.names)
    assert tensors
    assert path not in Path("/proc/self/maps").read_text()


def test_reading_leaves_no_file_open(folder):
    source = open_source(folder)
    before = set(os.listdir("/dev/fd"))
    source.read(source.names)
    assert len(os.listdir("/dev/fd")) == len(before)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.float8_e4m3fn]
)
def test_nan_is_refused_by_name(tmp_path, dtype):
    bad = torch.tensor([1.0, float("nan"), 2.0]).to(dtype)
    checkpoint = write_folder(tmp_path, {"good": torch.ones(1), "bad": bad})
    with pytest.raises(
        InputError,
        match=r"^bad: 1 values of model\.safetensors are NaN or Inf, all must be finite; ",
    ):
        read_tensors(checkpoint, ["good", "bad"])


@pytest.mark.parametrize("value", [float("inf"), float("-inf")])
def test_an_infinity_in_the_last_checked_part_is_refused(tmp_path, monkeypatch, value):
    monkeypatch.setattr(reading, "_CHECK_ELEMENTS", 4)
    checkpoint = write_folder(tmp_path, {"bad": torch.tensor([[1.0, 2, 3], [4, 5, value]])})
    with pytest.raises(InputError, match="bad: 1 values"):
        read_tensors(checkpoint, ["bad"])


def test_a_name_that_is_not_there_is_refused(folder):
    with pytest.raises(InputError, match="model.norm.wieght: not in "):
        open_source(folder).read(["model.norm.wieght"])


def test_a_file_that_shrank_after_it_was_opened_is_refused(folder):
    source = open_source(folder)
    path = folder / "model.safetensors"
    last = max(source.checkpoint.infos.values(), key=lambda info: info.offset)
    os.truncate(path, path.stat().st_size - 5)
    with pytest.raises(
        InputError, match=rf"{last.name}: model\.safetensors ends 5 bytes early; download"
    ):
        source.read([last.name])


def test_a_dtype_without_a_torch_name_is_refused(tmp_path):
    header = json.dumps(
        {"odd": {"dtype": "F8_E4M3FNUZ", "shape": [1], "data_offsets": [0, 1]}}
    ).encode()
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(
        len(header).to_bytes(8, "little") + header + b"\x01"
    )
    with pytest.raises(UnsupportedError, match="odd: dtype F8_E4M3FNUZ"):
        read_tensors(open_checkpoint(tmp_path), ["odd"])


def test_an_unsupported_family_is_refused_when_it_is_opened(tmp_path):
    GPT2LMHeadModel(
        GPT2Config(vocab_size=8, n_embd=8, n_layer=1, n_head=1, n_positions=8)
    ).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    for model_type in ("vit", ["gpt2"], None):
        path.write_text(json.dumps(json.loads(path.read_text()) | {"model_type": model_type}))
        with pytest.raises(
            UnsupportedError, match="model_type .* is no causal language model of transformers"
        ):
            open_source(tmp_path)
    path.write_text(
        json.dumps(
            json.loads(path.read_text()) | {"model_type": "gpt2", "architectures": ["GPT2ForX"]}
        )
    )
    with pytest.raises(
        UnsupportedError,
        match=r"architectures \['GPT2ForX'\].*; this type is supported as GPT2LMHeadModel",
    ):
        open_source(tmp_path)


def test_an_already_quantized_source_is_refused(folder):
    change_config(folder, quantization_config={"quant_method": "gptq"})
    path = folder / "model.safetensors"
    packed = {"model.layers.0.mlp.up_proj.qweight": torch.ones(1, 8, dtype=torch.int32)}
    save_file(load_file(path) | packed, path, {"format": "pt"})
    with pytest.raises(InputError, match="gptq"):
        open_source(folder)


def test_a_configuration_that_transformers_refuses_names_the_file(folder):
    change_config(folder, hidden_size="eight")
    with pytest.raises(InputError, match=r"config\.json: "):
        open_source(folder)


def test_code_that_comes_with_a_checkpoint_is_not_run(folder):
    change_config(
        folder, auto_map={"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
    )
    (folder / "evil.py").write_text("raise SystemExit('ran')")
    assert type(open_source(folder).config) is LlamaConfig


def test_skeleton_has_no_storage_but_real_rotary_buffers():
    config = LlamaConfig(**SHAPE)
    before = torch.get_rng_state()
    model = skeleton(config)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(
        parameter.is_meta and not parameter.requires_grad for parameter in model.parameters()
    )
    assert not any(module.training for module in model.modules())
    expected = 10000.0 ** (-torch.arange(0, 4, 2) / 4)
    assert torch.allclose(model.model.rotary_emb.inv_freq, expected)
    assert model.config._attn_implementation == "sdpa"
    assert model.config is not config


def test_threads_that_make_skeletons_leave_the_functions_that_draw_weights():
    drawing = torch.nn.init.normal_
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: skeleton(LlamaConfig(**SHAPE)), range(16)))
    assert torch.nn.init.normal_ is drawing
    assert torch.isfinite(LlamaForCausalLM(LlamaConfig(**SHAPE)).lm_head.weight).all()


@pytest.mark.parametrize("tied", [False, True])
def test_a_materialized_model_is_the_stock_model(tmp_path, tied):
    LlamaForCausalLM(LlamaConfig(**SHAPE, tie_word_embeddings=tied)).save_pretrained(tmp_path)
    source = open_source(tmp_path)
    model = skeleton(source.config)
    materialize_(model, source.read(source.names), dtype=torch.float32)
    ids = torch.tensor([[1, 2, 3]])
    with torch.no_grad():
        assert torch.equal(
            model(ids).logits, AutoModelForCausalLM.from_pretrained(tmp_path)(ids).logits
        )
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied


@torch.no_grad()
def test_buffers_are_computed_in_the_dtype_that_the_model_runs_in(tmp_path):
    """OpenAI's GPT multiplies its mask, a float buffer, into the weights of attention's values."""
    config = OpenAIGPTConfig(vocab_size=96, n_embd=64, n_layer=2, n_head=4, n_positions=32)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "m")
    stock = AutoModelForCausalLM.from_pretrained(tmp_path / "m", dtype=torch.bfloat16).eval()
    found = load_model(open_source(tmp_path / "m"), dtype=torch.bfloat16)
    ids = torch.arange(2, 20)[None]
    assert torch.equal(found(ids).logits, stock(ids).logits)


def test_one_tied_name_sets_both_and_two_names_set_each():
    model = skeleton(LlamaConfig(**SHAPE, tie_word_embeddings=True))
    first, second = torch.ones(16, 8), torch.zeros(16, 8)
    materialize_(model, {"lm_head.weight": first}, dtype=torch.float32)
    assert model.model.embed_tokens.weight is model.lm_head.weight
    materialize_(
        model, {"model.embed_tokens.weight": first, "lm_head.weight": second}, dtype=torch.float32
    )
    assert torch.equal(model.model.embed_tokens.weight, first)
    assert torch.equal(model.lm_head.weight, second)


def test_materialize_converts_and_release_gives_the_memory_back():
    model = skeleton(LlamaConfig(**SHAPE))
    layer = model.model.layers[0]
    materialize_(
        layer, {"mlp.up_proj.weight": torch.ones(12, 8, dtype=torch.bfloat16)}, dtype=torch.float32
    )
    assert layer.mlp.up_proj.weight.dtype == torch.float32
    release_(layer, ["mlp.up_proj.weight"])
    assert layer.mlp.up_proj.weight.is_meta
    materialize_(layer, {"mlp.up_proj.weight": torch.ones(12, 8)}, dtype=torch.bfloat16)
    assert layer.mlp.up_proj.weight.dtype == torch.bfloat16
    release_(model)
    assert all(parameter.is_meta for parameter in model.parameters())
    assert not model.model.rotary_emb.inv_freq.is_meta


def test_another_shape_is_refused_with_both_shapes():
    model = skeleton(LlamaConfig(**SHAPE))
    with pytest.raises(
        InputError, match=r"up_proj\.weight: checkpoint holds \[8, 12\], the model needs \[12, 8\]"
    ):
        materialize_(model, {WEIGHT: torch.ones(8, 12)}, dtype=torch.float32)


@pytest.mark.parametrize(
    "name", ["model.layers.9.mlp.up_proj.weight", "model.norm.bias", "model.rotary_emb.inv_freq"]
)
def test_a_name_that_is_no_parameter_is_refused(name):
    with pytest.raises(InputError, match=f"{name}: no parameter of LlamaForCausalLM"):
        materialize_(skeleton(LlamaConfig(**SHAPE)), {name: torch.ones(1)}, dtype=torch.float32)


def test_gpt_neox_checkpoints_name_their_head_embed_out(tmp_path):
    """The premise of the name map: if this changes, the map's other tests lose their meaning."""
    GPTNeoXForCausalLM(GPTNeoXConfig(**SHAPE)).save_pretrained(tmp_path)
    assert "embed_out.weight" in open_source(tmp_path).names


def test_a_tokenizer_is_loaded_from_its_folder(tmp_path):
    backend = Tokenizer(models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="?").save_pretrained(tmp_path)
    assert load_tokenizer(tmp_path)("b a c")["input_ids"] == [1, 0, 2]


def test_a_folder_without_tokenizer_is_refused(folder):
    with pytest.raises(InputError, match=r"no usable tokenizer \(.+\); copy the tokenizer files"):
        load_tokenizer(folder)


def test_a_damaged_tokenizer_is_refused(folder):
    (folder / "tokenizer.json").write_text("{")
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"})
    )
    with pytest.raises(InputError, match="no usable tokenizer"):
        load_tokenizer(folder)


@pytest.mark.parametrize(
    ("file", "content", "package", "extra"),
    [
        ("tokenizer.model", b"\n\x0e\n\x05<unk>", "sentencepiece", "tokenizers"),
        ("tokenizer.model", b"IQ== 0\nIg== 1\n", "tiktoken", "tokenizers"),
        ("tiktoken.model", b"IQ== 0\nIg== 1\n", "tiktoken", "tokenizers"),
        ("tekken.json", b"{}", "mistral-common", "mistral"),
    ],
)
def test_a_package_that_a_tokenizer_needs_is_named(
    folder, monkeypatch, file, content, package, extra
):
    for module in ("sentencepiece", "tiktoken", "mistral_common"):
        monkeypatch.setitem(sys.modules, module, None)  # as if it were not installed
    (folder / file).write_bytes(content)
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "LlamaTokenizer"}))
    remedy = rf"pip install 'quantflow-llm\[{extra}\]'"
    said = rf"{file}: read by {package}, which is not installed; {remedy}"
    with pytest.raises(UnsupportedError, match=said):
        load_tokenizer(folder)


def test_a_tokenizer_that_is_code_is_not_run_and_not_taken_for_a_missing_package(folder):
    (folder / "tiktoken.model").write_bytes(b"IQ== 0\n")
    (folder / "mine.py").write_text("raise SystemExit('run')")
    named = {"tokenizer_class": "Mine", "auto_map": {"AutoTokenizer": ["mine.Mine", None]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(named))
    with pytest.raises(InputError, match="its tokenizer is code of its own, which is not run here"):
        load_tokenizer(folder)
