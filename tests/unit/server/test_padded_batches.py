"""A server of transformers' modules in padded batches, on a CPU and on a stand-in of Gaudi."""

import itertools
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace

import pytest
import torch

from quantflow.errors import UnsupportedError, UsageError
from quantflow.progress import SILENT
from quantflow.runtime import modules, static_shapes
from quantflow.runtime.batch_shapes import Buckets, Gaudi
from quantflow.runtime.row_modules import PROMPT, STEP
from quantflow.server import models as served_models
from quantflow.server import process as server_process
from quantflow.server.models import Models, open_model
from quantflow.server.process import closing_lines, opening_lines
from quantflow.server.settings import Limits, ServeJob
from quantflow.server.vllm import command_of
from tests.shared import slow_but

TEXTS = ("def main(", "import os\n", "class A:\n    def __init__(self, name):", "x", "return")
LIMITS = Limits(max_input_tokens=24, max_total_tokens=40, max_batch_size=4)
BUCKETS = Buckets(step_rows=4, prompt_rows=4, pad_to=12)


@pytest.fixture(scope="module")
def expected(serve):
    """What transformers' modules say one after the other, over their own cache."""
    with serve(decoder="transformers", limits=LIMITS) as server:
        assert server.models.first.engine.shapes() is None
        assert "one row at a time" in "\n".join(opening_lines(server.models.job, server.models))
        for device, said in (("cpu", 0), ("cuda", 1), ("cuda:1", 1), ("hpu", 0)):
            job = replace(server.models.job, device=device)
            lines = opening_lines(job, server.models)
            assert sum("fast way on a GPU is --engine vllm" in line for line in lines) == said
        return [server.generate(text, max_new_tokens=9).json() for text in TEXTS]


def answers(server):
    """What a server says to all texts at once."""
    with ThreadPoolExecutor(len(TEXTS)) as threads:
        asked = threads.map(lambda text: server.generate(text, max_new_tokens=9), TEXTS)
        return [answer.json() for answer in asked]


def test_padded_batches_change_no_text_and_their_shapes_are_told(serve, expected):
    with serve(buckets=BUCKETS, limits=LIMITS) as server:
        told = opening_lines(server.models.job, server.models)
        assert "batches are padded: 4 shapes are warmed up" in told
        assert server.models.first.loaded.name == "transformers"
        assert answers(server) == expected
        shapes = server.models.first.engine.shapes()
        assert shapes.run.keys() == {
            *((PROMPT, 4, columns) for columns in (11, 23, 24)),
            (STEP, 4, 1),
        }
        assert shapes.run[STEP, 4, 1] > 8
        (line,) = closing_lines(server.models)
    assert line == (
        "shapes of python-model: 3 shapes of prompts and 1 of steps were run, 0 of them not "
        "warmed up"
    )


@pytest.mark.slow
def test_a_choice_of_attention_reaches_the_modules_and_changes_no_text(serve, expected):
    for buckets in (Buckets(), BUCKETS):
        words = ("fused", "recompute")
        with serve(attention=words, buckets=buckets, limits=LIMITS) as server:
            model = server.models.first.loaded.model
            assert model.config._attn_implementation == "quantflow_fused_recompute"
            assert answers(server) == expected
            told = "\n".join(opening_lines(server.models.job, server.models))
            assert "recompute: Gaudi's kernel alone has it" in told


class Graphs:
    """A stand-in for `habana_frameworks.torch.hpu`: it counts forwards that it captures and not.

    Attributes:
        captured: shape of the ids -> forwards.
        bypassed: the same, of those that are told to be no graph.
    """

    def __init__(self):
        self.captured, self.bypassed = Counter(), Counter()

    def wrap_in_hpu_graph(self, model):
        forward = model.forward

        def wrapped(*, bypass_hpu_graphs=False, **batch):
            counted = self.bypassed if bypass_hpu_graphs else self.captured
            counted[tuple(batch["input_ids"].shape)] += 1
            return forward(**batch)

        model.forward = wrapped
        return model


@pytest.fixture
def gaudi(monkeypatch):
    """The CPU as a Gaudi: graphs that are captured, and what torch.compile is called with."""
    package, inner, graphs = ModuleType("habana_frameworks"), ModuleType("torch"), Graphs()
    package.__spec__, inner.hpu = ModuleSpec("habana_frameworks", None), graphs
    monkeypatch.setitem(sys.modules, "habana_frameworks", package)
    monkeypatch.setitem(sys.modules, "habana_frameworks.torch", inner)
    for module in (modules, static_shapes, served_models):
        monkeypatch.setattr(module.hpu, "NAME", "cpu")
    compiled = []

    def compile_(forward, **words):
        compiled.append(words)
        return forward

    monkeypatch.setattr(torch, "compile", compile_)
    return SimpleNamespace(graphs=graphs, compiled=compiled)


PROMPTS = {(4, columns) for columns in (11, 23, 24)}
BACKEND = {
    "dynamic": False,
    "backend": "hpu_backend",
    "options": {"keep_input_mutations": True},
}


@pytest.mark.parametrize(
    ("lazy", "graphs", "limited"),
    slow_but(
        itertools.product([False, True], repeat=3),
        (False, True, False),
        (True, False, True),
        (True, True, False),
        (True, True, True),
    ),
)
def test_the_mode_and_two_switches_say_what_is_captured(
    serve, expected, gaudi, lazy, graphs, limited
):
    mode = Gaudi(lazy_mode=lazy, graphs=graphs, limit_graphs=limited)
    with serve(buckets=BUCKETS, limits=LIMITS, gaudi=mode) as server:
        assert answers(server) == expected
    found = gaudi.graphs
    assert gaudi.compiled == ([] if lazy else [BACKEND])
    if not (lazy and graphs):
        assert not found.captured and not found.bypassed
    elif limited:
        assert {*found.captured} == {(4, 1)} and {*found.bypassed} == PROMPTS
    else:
        assert {*found.captured} == {(4, 1)} | PROMPTS and not found.bypassed


@pytest.mark.parametrize(
    ("mode", "line"),
    [
        (Gaudi(), "lazy mode, graphs of prompts and steps"),
        (Gaudi(limit_graphs=True), "lazy mode, graphs of steps"),
        (Gaudi(graphs=False), "lazy mode, no graphs"),
        (Gaudi(lazy_mode=False), "eager mode, compiled by torch.compile, no graphs"),
    ],
)
def test_the_start_says_what_a_gaudi_captures_and_which_switches_do_nothing_elsewhere(
    artifact, mode, line
):
    engine = SimpleNamespace(shapes=lambda: None)
    models = SimpleNamespace(first=SimpleNamespace(engine=engine))
    job = ServeJob(artifact=artifact, device="hpu", gaudi=mode)
    assert server_process._shape_lines(job, models) == [f"hpu: {line}"]
    job = ServeJob(artifact=artifact, gaudi=mode, origins={"graphs": "ENABLE_HPU_GRAPH"})
    assert server_process._shape_lines(job, models) == ["ENABLE_HPU_GRAPH: of hpu, not of cpu"]


def test_what_does_not_go_with_padded_batches_is_refused(artifact, tmp_path):
    for settings in ({"buckets": BUCKETS}, {"torch_compile": True}):
        with pytest.raises(UsageError, match="with the lean decoder, which pads nothing"):
            ServeJob(artifact=artifact, decoder="lean", **settings)
        job = ServeJob(artifact=artifact, name="m", port=0, ranks=2, **settings)
        with pytest.raises(UsageError, match="2 ranks with padded batches"):
            server_process.run(job, SILENT)
    with pytest.raises(UsageError, match="attention='quick'"):
        ServeJob(artifact=artifact, attention=("quick",))
    job = ServeJob(
        artifact=artifact,
        engine="vllm",
        buckets=BUCKETS,
        origins={"step_rows": "--batch-bucket-size"},
    )
    with pytest.raises(UsageError, match="--batch-bucket-size with --engine vllm"):
        command_of(job)


def test_a_model_that_cannot_run_in_batches_is_refused_or_runs_one_row_at_a_time(
    artifact, monkeypatch
):
    monkeypatch.setattr(served_models.row_modules, "why_not", lambda _: "its cache slides")
    job = ServeJob(artifact=artifact, limits=LIMITS, buckets=BUCKETS)
    with pytest.raises(UnsupportedError, match="padded batches: its cache slides"):
        Models(job, open_model(artifact, job))
    loaded = SimpleNamespace(model=1, artifact=SimpleNamespace(device=torch.device("hpu")))
    found = served_models._together(loaded, ServeJob(artifact=artifact, device="hpu"))
    assert found == (None, "rows run one after the other: its cache slides")
