"""Swaps are whole models of transformers in which some weights are the other model's."""

from dataclasses import replace

import pytest
import torch
from torch.nn import functional

from quantflow.exporting import export
from quantflow.exporting.job import ExportJob
from quantflow.models.capture import LayerStream
from quantflow.models.load import load_model, open_source
from quantflow.models.open import graph_for
from quantflow.planning.recipe import HeadSettings, Quantize
from quantflow.progress import SILENT
from quantflow.quantizing import quantize
from quantflow.quantizing.job import QuantizeJob
from quantflow.runtime.artifact import open_artifact
from quantflow.validating.layerwise import BASELINE
from quantflow.validating.swaps import CANDIDATE, Swap, Swapping

GATE, DOWN = "model.layers.0.mlp.gate_proj", "model.layers.1.mlp.down_proj"
BOTH = (BASELINE, CANDIDATE)


@pytest.fixture(scope="module")
def artifact(llama, tmp_path_factory):
    folder = tmp_path_factory.mktemp("artifact")
    entry = Quantize(
        name="a",
        scheme="W4A16",
        algorithm="rtn",
        group_size=32,
        head=HeadSettings(scheme="W4A16", algorithm="rtn", group_size=32),
    )
    quantize.run(QuantizeJob(model=llama, output=folder / "2", entry=entry), SILENT)
    return open_artifact(
        export.run(ExportJob(source=folder / "2", output=folder / "4"), SILENT),
        backend="reference",
    )


@pytest.fixture(scope="module")
def windows():
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(2, 300, (length,), generator=generator) for length in (12, 31, 7)]


@pytest.fixture(scope="module")
def swapping(llama, artifact, windows):
    source = open_source(llama)
    streams = {
        BASELINE: LayerStream(source, graph_for(source.config)),
        CANDIDATE: LayerStream(artifact, graph_for(artifact.config)),
    }
    return Swapping(
        streams=streams, sequences=windows, stage="t", progress=SILENT, workers=1, at_once=100
    )


@pytest.fixture(scope="module")
def logits_of(llama, artifact, windows):
    """The logits of a transformers model with the artifact's weights in the named linears."""

    def run(quantized):
        model = load_model(open_source(llama), dtype=torch.float32)
        head = model.lm_head.weight.detach().clone()
        with torch.no_grad():
            for name in quantized:
                weight = (
                    artifact.decode(artifact.head if name == "lm_head" else name)
                    .weight.dequantize()
                    .float()
                )
                if name == "lm_head":
                    head = weight
                else:
                    model.get_submodule(name).weight.copy_(weight)
            return [model.model(window[None]).last_hidden_state[0] @ head.T for window in windows]

    return run


@pytest.fixture(scope="module")
def expected(logits_of):
    """The mean divergence of such a model from the one without them, by torch's function."""
    whole = logits_of(())

    def run(quantized):
        total = 0.0
        for ours, theirs in zip(logits_of(quantized), whole, strict=True):
            p, q = theirs[:-1].double().log_softmax(-1), ours[:-1].double().log_softmax(-1)
            total += float(functional.kl_div(q, p, log_target=True, reduction="sum"))
        return total / sum(len(logits) - 1 for logits in whole)

    return run


def test_a_linear_alone_and_all_but_it_are_the_models_with_these_weights(
    swapping, artifact, expected
):
    everything = [*artifact.linears, "lm_head"]
    everything.remove(artifact.head) if artifact.head != "lm_head" else everything.pop()
    layer = [name for name in artifact.linears if name.startswith("model.layers.0.")]
    chosen = [(GATE,), (DOWN,), (GATE, DOWN), tuple(layer), ("lm_head",), ("lm_head", DOWN)]
    only = swapping.klds([Swap(base=BASELINE, taken=names) for names in chosen])
    others = swapping.klds([Swap(base=CANDIDATE, taken=names) for names in chosen])
    for names, alone, rest in zip(chosen, only, others, strict=True):
        assert alone == pytest.approx(expected(names), rel=1e-3), names
        assert rest == pytest.approx(
            expected([name for name in everything if name not in names]), rel=1e-3
        ), names
    assert min(only) > 0 and len({round(value, 9) for value in only}) == len(only)


def test_a_swap_of_nothing_is_its_base(swapping, artifact, expected):
    names = [name for name in artifact.linears if name != artifact.head]
    none, whole = swapping.klds([Swap(base=base, taken=()) for base in BOTH])
    assert none == 0.0 and whole == pytest.approx(expected([*names, "lm_head"]), rel=1e-3)


def test_neither_workers_nor_how_many_run_together_change_a_bit(swapping):
    swaps = [
        Swap(base=base, taken=names) for base in BOTH for names in ((GATE,), (DOWN,), (GATE, DOWN))
    ]
    found = swapping.klds(swaps)
    assert replace(swapping, workers=2).klds(swaps) == found
    assert replace(swapping, at_once=1).klds(swaps) == found
    assert replace(swapping, at_once=4).klds(swaps[::-1]) == found[::-1]


def test_modules_that_were_made_stand_there_and_the_model_is_as_it_was_afterwards(swapping):
    class Zeros(torch.nn.Module):
        def forward(self, x):
            return torch.zeros(*x.shape[:-1], 64)

    one, same = Swap(base=CANDIDATE, taken=(DOWN,)), Swap(base=CANDIDATE, taken=())
    before, whole = swapping.klds([one, same])
    (zeroed,) = swapping.klds([replace(one, made={DOWN: Zeros()})])
    assert zeroed != before
    assert swapping.klds([one, same]) == [before, whole]
