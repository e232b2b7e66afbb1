"""Texts by file, folder, shipped name and data set of the hub, and what is refused."""

import json
import socket
import sys
from types import ModuleType, SimpleNamespace

import pytest
from huggingface_hub import constants

from quantflow.errors import InputError, UnsupportedError
from quantflow.measuring import text_sources
from quantflow.measuring.text import read_documents
from quantflow.measuring.text_sources import text_digest, text_path
from quantflow.models.tokenizer import load_tokenizer
from quantflow.planning.recipe import Calibration
from quantflow.progress import SILENT
from quantflow.shipped import CALIBRATION, EVALUATION
from quantflow.sources.data_sets import require_reachable


@pytest.fixture
def datasets(monkeypatch, tmp_path):
    """The package `datasets` with made-up data sets: name -> splits, or rows of one split."""
    tables = {
        "org/plain": {
            "test": [{"text": "held out"}],
            "train": [{"id": 1, "text": "one"}, {"id": 2, "text": "two"}],
        },
        "org/chat": {"train": [{"messages": [{"role": "user", "content": "hi"}]}]},
        "org/code": {"train": [{"content": "def f(): ...", "path": "f.py"}]},
        "org/both": {"train": [{"id": 1, "text": "a", "messages": [], "tools": None}]},
        "org/alpaca": {"train": [{"instruction": "a", "input": object(), "output": "b"}]},
        "org/odd": {"train": [{"question": "why?"}]},
        "org/splits": {"left": [], "right": []},
    }
    asked = []

    def load_dataset(path, name=None, *, split=None, streaming=False):
        asked.append((path, name, split, streaming))
        if path not in tables:
            raise FileNotFoundError(f"Dataset {path} doesn't exist on the Hub")
        return tables[path] if split is None else tables[path][split]

    module = ModuleType("datasets")
    module.load_dataset = load_dataset
    module.__spec__ = SimpleNamespace(name="datasets")
    monkeypatch.setitem(sys.modules, "datasets", module)
    monkeypatch.setattr(text_sources, "require_reachable", lambda _name: None)
    monkeypatch.setattr(constants, "HF_HOME", str(tmp_path))
    return asked


def test_what_exists_goes_first_then_shipped_names(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert (
        text_path("default", SILENT) == CALIBRATION
        and text_path("default-evaluation", SILENT) == EVALUATION
    )
    (tmp_path / "default").mkdir()
    assert text_path("default", SILENT).resolve() == tmp_path / "default"
    # the reader says that it is not there
    assert str(text_path("missing.txt", SILENT)) == "missing.txt"
    with pytest.raises(
        InputError,
        match="nothing here: no such text; give a .txt, .jsonl, .safetensors file, a folder",
    ):
        text_path("nothing here", SILENT)


def test_a_folder_is_its_text_files_in_the_order_of_their_names(tmp_path, llama):
    (tmp_path / "b.txt").write_text("round\n\ngroup")
    (tmp_path / "a.txt").write_text("scale")
    (tmp_path / "notes.md").write_text("not read")
    words = load_tokenizer(llama)
    assert read_documents(tmp_path, words) == [
        words(text)["input_ids"] for text in ("scale", "round", "group")
    ]
    before = text_digest(tmp_path)
    (tmp_path / "notes.md").write_text("still not read")
    assert text_digest(tmp_path) == before
    (tmp_path / "a.txt").write_text("scales")
    assert text_digest(tmp_path) != before
    assert Calibration(source=str(tmp_path)).packs
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="a folder without .txt files"):
        read_documents(tmp_path / "empty", words)


def test_the_shipped_text_is_packed_and_short():
    assert (Calibration().packs, Calibration().usual_length) == (True, 512)
    assert (
        Calibration(source=str(CALIBRATION)).packs,
        Calibration(source="default").usual_length,
    ) == (True, 512)
    assert (Calibration(source="x.jsonl").packs, Calibration(source="x.jsonl").usual_length) == (
        False,
        2048,
    )


@pytest.mark.parametrize(
    ("source", "lines", "asked"),
    [
        ("org/plain", [{"text": "one"}, {"text": "two"}], ("org/plain", None, None, True)),
        ("org/plain:en@test", [{"text": "held out"}], ("org/plain", "en", "test", True)),
        (
            "org/chat",
            [{"messages": [{"role": "user", "content": "hi"}]}],
            ("org/chat", None, None, True),
        ),
        ("org/code", [{"text": "def f(): ..."}], ("org/code", None, None, True)),
        (
            "org/both",
            [{"messages": [], "text": "a", "tools": None}],
            ("org/both", None, None, True),
        ),
        (
            "org/alpaca",
            [{"instruction": "a", "output": "b", "input": None}],
            ("org/alpaca", None, None, True),
        ),
    ],
)
def test_a_data_set_becomes_a_file_once(datasets, source, lines, asked):
    path = text_path(source, SILENT)
    assert [json.loads(line) for line in path.read_text().splitlines()] == lines
    assert text_path(source, SILENT) == path and datasets == [asked]


def test_a_data_set_is_cut_at_so_many_rows(datasets, monkeypatch):
    monkeypatch.setattr(text_sources, "ROWS", 1)
    assert len(text_path("org/plain", SILENT).read_text().splitlines()) == 1


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("org/odd", "org/odd: columns question; give each row text, messages"),
        ("org/splits", "org/splits: has splits left, right; name one: org/name@split"),
        ("org/splits@left", "has no row"),
        ("org/none", "org/none: Dataset org/none doesn't exist on the Hub"),
    ],
)
def test_data_sets_without_text_are_refused(datasets, source, said):
    with pytest.raises(InputError, match=said):
        text_path(source, SILENT)


def test_a_hub_that_does_not_answer_is_said_at_once(datasets, monkeypatch):
    with socket.socket() as taken:  # bound and not listening: every connection is refused
        taken.bind(("127.0.0.1", 0))
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{taken.getsockname()[1]}")
        monkeypatch.setattr(text_sources, "require_reachable", require_reachable)
        with pytest.raises(InputError, match=r"org/plain: no file .* cannot be reached; check"):
            text_path("org/plain", SILENT)
    assert not datasets


def test_without_the_package_its_name_is_said(monkeypatch, tmp_path):
    monkeypatch.setattr(constants, "HF_HOME", str(tmp_path))
    monkeypatch.setattr(text_sources, "find_spec", lambda _: None)
    with pytest.raises(
        UnsupportedError, match="is not installed; check the path, or pip install datasets"
    ):
        text_path("org/plain", SILENT)


def test_lines_of_other_columns_are_read_too(tmp_path, llama):
    rows = [{"prompt": "scale"}, {"code": "round"}, {"content": "group", "note": 1}]
    (tmp_path / "t.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = load_tokenizer(llama)
    assert read_documents(tmp_path / "t.jsonl", words) == [
        words(text)["input_ids"] for text in ("scale", "round", "group")
    ]
