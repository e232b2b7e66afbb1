"""Token ids beyond the embedding's rows are named from the files alone."""

import json

import pytest

from quantflow.files.checkpoint import Checkpoint
from quantflow.files.safetensors_header import TensorInfo
from quantflow.models.graph import Graph, family_for
from quantflow.models.tokenizer_vocabulary import beyond_embedding

ROWS = 4


def opened(folder):
    name = "model.embed_tokens.weight"
    info = TensorInfo(name=name, dtype="BF16", shape=(ROWS, 2), offset=0, nbytes=16)
    return Checkpoint(folder=folder, config={}, tensors={name: ("a", info)}, files=())


GRAPH = Graph(family=family_for("llama"), layers=())
BPE = {"model": {"vocab": {"a": 0, "b": 3}}, "added_tokens": [{"id": 2, "content": "<s>"}]}
UNIGRAM = {"model": {"vocab": [["a", 0.0]] * 5}}


def test_ids_that_have_a_row_are_nothing_to_say(tmp_path):
    (tmp_path / "tokenizer.json").write_text(json.dumps(BPE))
    assert beyond_embedding(opened(tmp_path), GRAPH) is None


@pytest.mark.parametrize(
    ("name", "table", "token"),
    [
        ("tokenizer.json", BPE | {"added_tokens": [{"id": 4, "content": "<think>"}]}, "<think>"),
        ("tokenizer.json", UNIGRAM, "a"),
        ("added_tokens.json", {"<pad>": 4}, "<pad>"),
    ],
)
def test_the_largest_id_without_a_row_is_named(tmp_path, name, table, token):
    (tmp_path / name).write_text(json.dumps(table))
    assert beyond_embedding(opened(tmp_path), GRAPH) == (
        f"warning: {name}: token {token!r} has id 4, model.embed_tokens has 4 rows: no text with "
        "such a token can be read"
    )


@pytest.mark.parametrize(
    "content", ["", "[]", "{", '{"b": 9}', '{"model": 3}', '{"model": {"vocab": 1}}']
)
def test_a_file_that_is_no_tokenizer_is_left_to_its_reader(tmp_path, content):
    (tmp_path / "tokenizer.json").write_text(content)
    assert beyond_embedding(opened(tmp_path), GRAPH) is None
