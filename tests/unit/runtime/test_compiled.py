"""Transformers' modules under torch.compile's backend `eager`, which writes no C++."""

import json
import shutil
from functools import partial

import pytest
import torch

from quantflow.errors import UnsupportedError, UsageError
from quantflow.runtime.load import load
from quantflow.stages.cli import cli
from quantflow.stages.cli.output import exit_code

WORDS = (
    "--prompt",
    "value scale",
    "round",
    "--batch-size",
    "2",
    "--max-new-tokens",
    "12",
    "--ignore-eos",
    "--json",
    "-q",
)


@pytest.fixture
def compiling(monkeypatch):
    """Return how often a graph was compiled."""
    graphs = []

    def counted(graph, inputs):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=counted))
    yield graphs
    torch._dynamo.reset()


def said(capsys, *words):
    assert exit_code(cli, ["generate", *map(str, (*words, *WORDS))]) == 0, capsys.readouterr().err
    return json.loads(capsys.readouterr().out)


@pytest.mark.slow
def test_compiled_modules_say_the_tokens_of_those_that_are_not(llama, compiling, capsys):
    expected = said(capsys, llama, "--decoder", "transformers")
    assert not compiling
    found = said(capsys, llama, "--torch_compile")
    assert found["outputs"] == expected["outputs"]
    assert found["decoder"]["name"] == "transformers"
    assert found["decoder"]["reasons"][0].endswith("torch_compile was asked for")
    assert 1 <= len(compiling) < 12  # not one for every length of the cache


def test_what_cannot_be_compiled_is_refused(llama, monkeypatch, capsys):
    with pytest.raises(
        UsageError, match="torch_compile: the lean decoder has no modules to compile"
    ):
        load(llama, decoder="lean", compiled=True)
    for more, told in (
        ("--disk-offload", "disk_offload with torch_compile"),
        ("--ranks=2", "2 ranks with torch_compile"),
    ):
        assert exit_code(cli, ["generate", str(llama), "--torch-compile", more, *WORDS]) == 2
        assert told in capsys.readouterr().err
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(
        UnsupportedError,
        match=r"torch_compile: none of g\+\+, clang\+\+, c\+\+ is on PATH; install g\+\+",
    ):
        load(llama, decoder="transformers", compiled=True)
