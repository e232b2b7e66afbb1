"""The table of formats: every row is a module that keeps the table's promise."""

import dataclasses
from importlib import import_module
from pathlib import Path

import pytest

from quantflow.errors import UsageError
from quantflow.exporting.exporters import EXPORTERS, exporter
from quantflow.exporting.job import ExportJob
from quantflow.formats import FORMATS
from quantflow.formats.llama_cpp import gguf
from quantflow.planning.recipe import Export
from quantflow.progress import SILENT


@pytest.mark.parametrize("name", EXPORTERS)
def test_every_format_has_a_module_that_writes_and_refuses_the_options_of_others(name):
    row = EXPORTERS[name]
    for module in filter(None, (row.module, row.foreign)):
        assert callable(import_module(module).run)
    (foreign,) = ({"scale_method": "x"} if "scale_method" not in row.options else {"dtype": "x"},)
    job = ExportJob(source=Path("s"), output=Path("o"), options=Export(format=name, **foreign))
    with pytest.raises(UsageError, match=f"beside format {name}"):
        row.run(job, SILENT)


def test_options_of_a_format_are_words_of_a_recipe_and_every_word_is_some_formats():
    words = {field.name for field in dataclasses.fields(Export)} - {"format"}
    assert {option for row in EXPORTERS.values() for option in row.options} == words


def test_artifacts_layouts_and_the_names_of_files_are_in_the_table():
    assert set(FORMATS) | {gguf.NAME} <= set(EXPORTERS)
    assert Export().format in FORMATS


def test_an_unknown_format_is_refused_with_the_nearest():
    with pytest.raises(UsageError, match="export: format 'ggfu' is unknown; .*gguf"):
        exporter("ggfu")


def test_a_model_beside_the_one_that_becomes_a_gguf_is_refused():
    request = ExportJob(
        source=Path("s"), output=Path("o"), options=Export(format="gguf"), model=Path("x")
    )
    with pytest.raises(
        UsageError, match="--model x beside format gguf; give the model's folder instead"
    ):
        exporter("gguf").run(request, SILENT)
