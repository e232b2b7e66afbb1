"""A GGUF file as a source: export's files come back, foreign readers agree, and refusals."""

import json
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import gguf as foreign
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, normalizers
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from quantflow.errors import InputError, UnsupportedError
from quantflow.exporting.gguf_export import run as export
from quantflow.exporting.job import ExportJob
from quantflow.files.origin import origin_of
from quantflow.formats.llama_cpp import gguf
from quantflow.formats.llama_cpp.blocks import read_rows, readable
from quantflow.formats.llama_cpp.metadata import ROPE_FACTORS, rope_factors
from quantflow.formats.llama_cpp.pieces import pieces
from quantflow.formats.llama_cpp.tokenizer_files import write_tokenizer
from quantflow.models.load import load_model, open_source
from quantflow.models.tokenizer import load_tokenizer
from quantflow.planning.recipe import Export
from quantflow.progress import SILENT
from quantflow.sources.gguf_import import import_gguf

TEXTS = ("value scale round.", " group  of 128,\n\nin 2026: élan", "<s>token</s> range!", "")


@pytest.fixture(scope="module")
def exported(family_model, tmp_path_factory):
    """The GGUF file of a family in bf16, made on first use."""
    made = {}

    def make(family: str) -> Path:
        if family not in made:
            job = ExportJob(
                source=family_model(family),
                output=tmp_path_factory.mktemp("gguf") / family,
                options=Export(format="gguf", dtype="bf16"),
            )
            (made[family],) = export(job, SILENT).glob("*.gguf")
        return made[family]

    return make


def rewritten(
    source: Path, target: Path, *, kind: str | None = None, fields=None, without=(), tensors=None
) -> Path:
    """Write a file again with llama.cpp's own package: other types, tensors and fields.

    A field of None is removed.
    """
    header = gguf.read_header(source)
    metadata = {**header.metadata, **(fields or {})}
    writer = foreign.GGUFWriter(target, metadata.pop("general.architecture")[1])
    for key, given in metadata.items():
        if given is not None:
            number = gguf.KINDS[given[0].strip("[]")][0]
            if given[0].startswith("["):
                writer.add_array(key, given[1])
            else:
                writer.add_key_value(key, given[1], foreign.GGUFValueType(number))
    values = {
        name: read_rows(source, info, 0, info.shape[0]).float()
        for name, info in header.tensors.items()
    }
    for name, value in {**values, **(tensors or {})}.items():
        if name in without:
            continue
        type_ = foreign.GGMLQuantizationType[kind if kind and value.ndim > 1 else "F32"]
        writer.add_tensor(name, foreign.quantize(value.numpy(), type_), raw_dtype=type_)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3", "gpt_neox"])
def test_what_export_wrote_comes_back(exported, family_model, tmp_path, family):
    source = family_model(family)
    folder = import_gguf(exported(family), tmp_path, SILENT)
    found, expected = (
        load_file(folder / "model.safetensors"),
        load_file(source / "model.safetensors"),
    )
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype and torch.equal(found[name], value), name
    ids = torch.arange(24)[None] + 5
    ours, theirs = (load_model(open_source(path), dtype=torch.float32) for path in (folder, source))
    assert torch.equal(ours(ids).logits, theirs(ids).logits)  # the configuration says the same
    words, originals = load_tokenizer(folder), load_tokenizer(source)
    for text in TEXTS:
        assert words(text)["input_ids"] == originals(text)["input_ids"], text
        assert words.decode(words(text)["input_ids"]) == originals.decode(
            originals(text)["input_ids"]
        )
    assert (words.bos_token_id, words.eos_token_id) == (
        originals.bos_token_id,
        originals.eos_token_id,
    )


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "F16"])
def test_numbers_are_those_of_transformers_own_loading(exported, tmp_path, kind):
    path = rewritten(exported("llama"), tmp_path / "m.gguf", kind=kind)
    folder = import_gguf(path, tmp_path / "cache", SILENT)
    found = load_file(folder / "model.safetensors")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    theirs = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)["tensors"]
    assert found.keys() == theirs.keys()
    dtype = torch.float16 if kind == "F16" else torch.bfloat16
    for name, value in theirs.items():
        expected = value.to(dtype)
        if value.ndim == 1 and not torch.equal(expected.float(), value):
            expected = value  # a vector that 16 bits do not hold stays as it is
        assert found[name].dtype == expected.dtype and torch.equal(found[name], expected), name
    assert json.loads((folder / "config.json").read_text())["dtype"] == str(dtype).removeprefix(
        "torch."
    )


def test_every_type_that_the_package_dequantizes_is_read_row_by_row(tmp_path):
    kinds = {kind.name: kind for kind in readable().values()}
    assert {"Q4_K", "Q6_K", "IQ2_XXS", "IQ4_NL", "IQ4_XS", "TQ1_0", "MXFP4", "BF16"} <= kinds.keys()
    generator = np.random.default_rng(0)
    for name, kind in kinds.items():
        type_ = foreign.GGMLQuantizationType[name]
        columns = 2 * kind.elements if kind.elements > 1 else 8
        for _ in range(200):  # random scales may be NaN or Inf
            raw = generator.integers(
                0, 256, (6, columns // kind.elements * kind.nbytes), dtype=np.uint8
            )
            with np.errstate(all="ignore"):
                expected = foreign.dequantize(raw, type_).astype(np.float32)
            if np.isfinite(expected).all():
                break
        writer = foreign.GGUFWriter(tmp_path / name, "llama")
        writer.add_tensor("first", np.ones((3, 5), dtype=np.float32))
        writer.add_tensor("t", raw, raw_dtype=type_)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        info = gguf.read_header(tmp_path / name, types=readable()).tensors["t"]
        assert info.shape == (6, columns) and info.dtype == name
        rows = torch.cat(
            [read_rows(tmp_path / name, info, start, start + 2) for start in (0, 2, 4)]
        )
        assert torch.equal(rows.float(), torch.from_numpy(expected.reshape(6, columns))), name


def test_an_import_is_made_once_and_again_where_it_was_damaged(exported, tmp_path):
    said = []

    @dataclass(frozen=True)
    class Telling:
        patience: float = 0.0

        def say(self, text):
            said.append(text)

        def steps(self, items, **_):
            return iter(items)

    path = Path(shutil.copy(exported("llama"), tmp_path / "model.gguf"))
    folder = import_gguf(path, tmp_path / "cache", Telling())
    stamp = (folder / "model.safetensors").stat().st_mtime_ns
    assert import_gguf(path, tmp_path / "cache", Telling()) == folder and len(said) == 1
    assert (folder / "model.safetensors").stat().st_mtime_ns == stamp
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[:-2] + b"\x00\x01")
    assert import_gguf(path, tmp_path / "cache", Telling()) == folder and len(said) == 2
    assert (folder / "model.safetensors").read_bytes() == content


def test_a_manifest_can_name_the_file_and_its_hash(exported, tmp_path):
    folder = import_gguf(exported("llama"), tmp_path, SILENT)
    origin = origin_of(folder)
    sha256 = json.loads((folder / "DONE.json").read_text())["inputs"]["sha256"]
    assert (origin.name, origin.revision) == ("model-bf16.gguf", f"sha256:{sha256}")


def test_llama_3_is_known_by_its_factors(exported, tmp_path):
    rope = {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
    }
    rope["original_max_position_embeddings"] = 8192
    words = {
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": 64,
        "num_attention_heads": 4,
        "intermediate_size": 1,
    }
    factors = rope_factors(
        SimpleNamespace(**words, vocab_size=1, max_position_embeddings=128, rope_parameters=rope)
    )
    path = rewritten(exported("llama"), tmp_path / "m.gguf", tensors={ROPE_FACTORS: factors})
    config = json.loads((import_gguf(path, tmp_path / "cache", SILENT) / "config.json").read_text())
    assert config["rope_parameters"] == rope
    other = rewritten(
        exported("llama"), tmp_path / "o.gguf", tensors={ROPE_FACTORS: factors * 1.01}
    )
    with pytest.raises(UnsupportedError, match="is no Llama 3's"):
        import_gguf(other, tmp_path / "cache", SILENT)


def test_rotations_and_windows_come_along(exported, tmp_path):
    yarn = {
        "llama.rope.scaling.type": ("string", "yarn"),
        "llama.rope.scaling.factor": ("f32", 4.0),
    }
    yarn |= {
        "llama.rope.scaling.original_context_length": ("u32", 32),
        "llama.attention.sliding_window": ("u32", 48),
    }
    path = rewritten(exported("llama"), tmp_path / "m.gguf", fields=yarn)
    config = json.loads((import_gguf(path, tmp_path / "cache", SILENT) / "config.json").read_text())
    assert (config["model_type"], config["sliding_window"]) == ("mistral", 48)
    assert config["rope_parameters"] == {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 32,
    }


@pytest.mark.parametrize(("family", "name"), [("qwen2", "qwen2"), ("gpt_neox", "gptneox")])
def test_a_window_in_a_family_whose_files_have_none_is_refused(exported, tmp_path, family, name):
    field = {f"{name}.attention.sliding_window": ("u32", 48)}
    path = rewritten(exported(family), tmp_path / "m.gguf", fields=field)
    with pytest.raises(UnsupportedError, match=f"attention.sliding_window 48 of a {family}"):
        import_gguf(path, tmp_path / "cache", SILENT)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"general.architecture": ("string", "mamba")}, "general.architecture 'mamba'"),
        ({"llama.logit_scale": ("f32", 2.0)}, "field llama.logit_scale = '2.0' is not understood"),
        ({"llama.expert_count": ("u32", 8)}, "llama.expert_count is 8"),
        ({"llama.rope.dimension_count": ("u32", 8)}, "8 of 16 features of a head are rotated"),
        ({"llama.rope.scaling.type": ("string", "longrope")}, "rope.scaling.type 'longrope'"),
        ({"llama.attention.value_length": ("u32", 8)}, "keys of 16 features and values of 8"),
        ({"split.count": ("u16", 3)}, "one of 3 files"),
        ({"split.count": ("u16", 3), "split.no": ("u16", 1)}, "2 of 3 files"),
        (
            {"tokenizer.ggml.pre": ("string", "deepseek-llm")},
            "tokenizer.ggml.pre 'deepseek-llm', known are gpt-2",
        ),
        ({"tokenizer.ggml.model": ("string", "bert")}, "tokenizer.ggml.model 'bert'"),
    ],
)
def test_what_is_not_understood_is_refused_by_name(exported, tmp_path, fields, said):
    path = rewritten(exported("llama"), tmp_path / "m.gguf", fields=fields)
    with pytest.raises(UnsupportedError, match=said):
        import_gguf(path, tmp_path / "cache", SILENT)
    assert not [found for found in (tmp_path / "cache").glob("m-*") if found.is_dir()]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"llama.embedding_length": None}, "embedding_length is None"),
        (
            {"split.count": ("string", "3")},
            "split.count is '3' of kind string, an integer is needed",
        ),
        (
            {"llama.block_count": ("u32", 3)},
            "model.layers.2.input_layernorm.weight: not in the checkpoint",
        ),
        (
            {"llama.feed_forward_length": ("u32", 64)},
            r"gate_proj.weight: \[128, 64\] in the checkpoint, .* \[64, 64\]",
        ),
        ({"tokenizer.ggml.tokens": None}, "no field tokenizer.ggml.tokens"),
        (
            {"tokenizer.ggml.eos_token_id": ("u32", 999)},
            "eos_token_id is 999, there are 320 tokens",
        ),
        ({"tokenizer.ggml.tokens": ("[string]", ["a"] * 320)}, "are both 'a'"),
    ],
)
def test_a_file_that_contradicts_itself_is_refused(exported, tmp_path, fields, said):
    path = rewritten(exported("llama"), tmp_path / "m.gguf", fields=fields)
    with pytest.raises(InputError, match=said):
        import_gguf(path, tmp_path / "cache", SILENT)


def test_numbers_that_are_none_and_files_that_end_are_refused(exported, tmp_path):
    broken = torch.zeros(64, 64)
    broken[3, 5] = float("nan")
    path = rewritten(
        exported("llama"), tmp_path / "m.gguf", tensors={"blk.1.attn_v.weight": broken[:32]}
    )
    with pytest.raises(
        InputError, match=r"blk\.1\.attn_v\.weight: 1 values of m.gguf are NaN or Inf"
    ):
        import_gguf(path, tmp_path / "cache", SILENT)
    whole = exported("llama").read_bytes()
    (tmp_path / "short.gguf").write_bytes(whole[:-100])
    with pytest.raises(InputError, match="short.gguf: .* bytes where the header describes"):
        import_gguf(tmp_path / "short.gguf", tmp_path / "cache", SILENT)
    (tmp_path / "empty.gguf").write_bytes(b"")
    with pytest.raises(InputError, match="begins with b''"):
        import_gguf(tmp_path / "empty.gguf", tmp_path / "cache", SILENT)
    missing = rewritten(exported("llama"), tmp_path / "l.gguf", without=("blk.0.ffn_up.weight",))
    with pytest.raises(InputError, match="up_proj.weight: not in the checkpoint"):
        import_gguf(missing, tmp_path / "cache", SILENT)


def test_sentence_pieces_come_back(tmp_path):
    text = [f"<0x{value:02X}>" for value in range(256)]
    vocabulary = {
        t: i
        for i, t in enumerate(
            ["<unk>", "<s>", "</s>", *text, "\u2581", "a", "b", "ab", "\u2581a", "\u2581ab"]
        )
    }
    merges = [("a", "b"), ("\u2581", "a"), ("\u2581", "ab"), ("\u2581a", "b")]
    original = Tokenizer(
        models.BPE(
            vocab=vocabulary, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True
        )
    )
    original.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    original.add_special_tokens(["<unk>", "<s>", "</s>"])
    special = {"bos": 1, "eos": 2, "unknown": 0, "padding": None}
    table = json.loads(original.to_str())
    fields = pieces(
        table, size=len(vocabulary) + 2, special=special, around=([1], []), folder=tmp_path
    )
    write_tokenizer(fields, tmp_path, Path("m.gguf"), context=128)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    words = load_tokenizer(tmp_path)
    assert len(words) == len(vocabulary)  # ids that fill the embedding up are no tokens
    for given in ("ab ab", "a b  aab", "b\u00e9a", "", "<s>ab"):
        assert words(given)["input_ids"] == [1, *original.encode(given).ids], given
        assert words.decode(
            words(given)["input_ids"], skip_special_tokens=True
        ) == given.removeprefix("<s>"), given


def test_special_tokens_and_templates_come_along(exported, tmp_path):
    header = gguf.read_header(exported("llama"))
    template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    fields = {**header.metadata, "tokenizer.chat_template": ("string", template)}
    fields |= {
        "tokenizer.ggml.eot_token_id": ("u32", 7),
        "tokenizer.ggml.add_eos_token": ("bool", True),
    }
    write_tokenizer(fields, tmp_path, Path("m.gguf"), context=128)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    words = load_tokenizer(tmp_path)
    ids = words("scale")["input_ids"]
    assert ids[0] == 0 and ids[-1] == 1 and words.model_max_length == 128
    assert (
        words.apply_chat_template([{"role": "user", "content": "hello"}], tokenize=False) == "hello"
    )
    assert json.loads((tmp_path / "generation_config.json").read_text()) == {
        "bos_token_id": 0,
        "eos_token_id": [1, 7],
    }


def test_without_the_package_gguf_a_file_is_refused_by_its_name(monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)  # as if it were not installed
    readable.cache_clear()
    with pytest.raises(UnsupportedError, match="package gguf") as refused:
        readable()
    assert refused.value.exit_code == 6 and refused.value.remedy == "pip install gguf"
    monkeypatch.undo()
    assert len(readable()) > 3
