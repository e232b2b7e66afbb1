"""Files beside config.json and weights: which come along, which stay behind, and why."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from quantflow.files.checkpoint import open_checkpoint
from quantflow.files.side_file_kinds import LARGEST, UNREAD, side_files
from quantflow.files.side_files import side_files_of


def left(*names: str, code: bool = False, nbytes: int = 1) -> dict[str, str]:
    return side_files(dict.fromkeys(names, nbytes), code=code).left


@pytest.mark.parametrize(
    "name",
    [
        "tokenizer.json",
        "tekken.json",
        "tiktoken.model",
        "qwen.tiktoken",
        "spiece.model",
        "sentencepiece.bpe.model",
        "vocab.bpe",
        "bpe.codes",
        "vocab.txt",
        "wordpiece_vocab.txt",
        "merges.txt",
        "chat_template.jinja",
        "additional_chat_templates/tool_use.jinja",
        "generation_config.json",
        "preprocessor_config.json",
        "video_preprocessor_config.json",
        "audio_config.json",
        "tokenization_kimi.py",
        "image_processing_phi4.py",
        "SimSun.ttf",
        "LICENSE",
        "LICENSE.txt",
        "NOTICE.md",
    ],
)
def test_what_a_runtime_may_read_comes_along(name):
    assert side_files({name: 1}, code=False).copied == (name,)


@pytest.mark.parametrize(
    "name",
    [
        "pytorch_model.bin",
        "consolidated.00.pth",
        "consolidated.safetensors",
        "params.json",
        "model.safetensors.index.fp32.json",
        "pytorch_model.bin.index.json",
        "tf_model.h5",
        "flax_model.msgpack",
        "rust_model.ot",
        "model-Q4_K_M.gguf",
        "original/tokenizer.model",
        "hf_quant_config.json",
        "quantize_config.json",
        "recipe.yaml",
        "quantflow.json",
        "DONE.json",
        "README.md",
        "figures/benchmark.png",
        "trainer_state.json",
        "training_args.json",
        "all_results.json",
        "events.out.tfevents.1.host",
        "train.parquet",
        "train.py",
        ".gitattributes",
        ".ipynb_checkpoints/tokens.json",
    ],
)
def test_what_no_runtime_reads_stays_behind(name):
    assert left(name) == {name: UNREAD}


def test_a_sub_folder_that_holds_weights_is_another_form_of_the_model():
    names = ("onnx/model.onnx", "onnx/config.json", "checkpoint-5/a/rng.pth", "checkpoint-5/b.json")
    assert left("voices/config.json", *names) == dict.fromkeys(sorted(names), UNREAD)


def test_a_large_file_comes_along_only_under_a_tokenizers_name():
    assert left("tokenizer.json", "data.json", nbytes=LARGEST) == {}
    assert left("tokenizer.json", "data.json", nbytes=LARGEST + 1) == {"data.json": "over 64 MB"}


@pytest.mark.parametrize("name", ["a\nb.json", "a\x1b[2J.json", "..\\a.json", "../a.json", "a//b"])
def test_a_name_that_other_systems_do_not_take_stays_behind(name):
    assert left(name) == {name: "a name that is not portable"}


def test_a_line_names_a_few_files_of_each_reason():
    files = {f"{n}.png": 1 for n in range(7)} | {"data.json": LARGEST + 1, "README.md": 1}
    files |= {"onnx/a.onnx": 1, "onnx/b.json": 1, ".gitattributes": 1}
    assert str(side_files(files, code=False)) == (
        f"0.png, 1.png, 2.png, 3.png, 4.png and 3 more ({UNREAD}); data.json (over 64 MB)"
    )
    assert str(side_files({"onnx/a.onnx": 1, "onnx/b.json": 1}, code=False)) == f"onnx/ ({UNREAD})"
    assert str(side_files({"README.md": 1, ".gitattributes": 1}, code=False)) == ""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    save_file({"w": torch.zeros(2)}, tmp_path / "model" / "model.safetensors")
    (tmp_path / "model" / "config.json").write_text('{"model_type": "llama"}')
    return tmp_path / "model"


def copied(folder: Path) -> set[str]:
    return set(side_files_of(open_checkpoint(folder)).copied)


@pytest.mark.parametrize("where", ["config.json", "tokenizer_config.json"])
def test_code_comes_along_where_any_configuration_names_it(folder, where):
    (folder / "kimi.py").write_text("")
    (folder / "tokenizer_config.json").write_text("{}")
    assert copied(folder) == {"tokenizer_config.json"}
    named = {"model_type": "llama", "auto_map": {"AutoTokenizer": ["kimi.Tokens", None]}}
    (folder / where).write_text(json.dumps(named))
    assert copied(folder) == {"kimi.py", "tokenizer_config.json"}


def test_a_link_is_followed_where_it_stays_or_was_meant(folder, tmp_path):
    (tmp_path / "secret").write_text("{}")
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "tokenizer.json").write_text("{}")
    blobs = tmp_path / "models--org--name" / "blobs"
    blobs.mkdir(parents=True)
    (blobs / "abc").write_text("{}")
    (folder / "sub").mkdir()
    links = {
        "chat_template.jinja": tmp_path / "secret",
        "LICENSE": tmp_path / "secret",
        "sub/config.json": tmp_path / "config.json",  # of a program that keeps a password there
        "tokenizer.json": tmp_path / "tokenizer.json",
        "vocab.bpe": blobs / "abc",
        "extra.json": folder / "own.json",
    }
    (folder / "own.json").write_text("{}")
    for name, target in links.items():
        (folder / name).symlink_to(target)
    assert copied(folder) == {"tokenizer.json", "vocab.bpe", "extra.json", "own.json"}
    found = side_files_of(open_checkpoint(folder)).left
    assert found == dict.fromkeys(
        ("LICENSE", "chat_template.jinja", "sub/config.json"), "a link out of the folder"
    )
