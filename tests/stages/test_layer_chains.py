"""Layers that are no plain chain of hidden states, through the stages.

Some hand more to the next, and text goes past some.
"""

from functools import partial

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

import quantflow
from quantflow.models.load import open_source
from quantflow.models.open import graph_for
from quantflow.planning.recipe import Calibration, Export, Quantize, Recipe, SignRound, Validate
from quantflow.planning.sizes import model_size
from quantflow.progress import Silent
from quantflow.runtime.load import load
from quantflow.runtime.offload import load_offloaded
from tests.shared import slow_but

KINDS = {"glm_moe_dsa": AutoModelForCausalLM, "mllama": AutoModelForImageTextToText}
ENTRIES = {
    "gptq": Quantize(name="small", scheme="W4A16", algorithm="gptq", group_size=32),
    "smoothquant": Quantize(
        name="small", scheme="W8A8", transforms=({"smoothquant": {"alpha": 0.5}},)
    ),
    "signround": Quantize(
        name="small",
        scheme="W4A16",
        algorithm="signround",
        group_size=32,
        signround=SignRound(iterations=8),
    ),
}
# of the logits; inputs of W8A8 are rounded here alone
DIFFERENCE = {"gptq": 1e-5, "smoothquant": 0.3, "signround": 1e-5}


class Stopped(Exception):
    """What ends a run."""


class StopsInTheSecondLayer(Silent):
    def steps(self, items, *, stage, **told):
        for number, item in enumerate(items):
            if stage.startswith("quantize") and number == 1:
                raise Stopped
            yield item


@pytest.fixture(scope="module")
def measured(family_model, text_files, tmp_path_factory):
    """Return the measurement of a family, taken once."""
    taken = {}

    def take(family):
        if family not in taken:
            calibration = Calibration(
                source=str(text_files["calibration"]), samples=8, sequence_length=64
            )
            folder, artifacts = (
                tmp_path_factory.mktemp("measured") / family,
                tuple(ENTRIES.values()),
            )
            taken[family] = quantflow.measure(
                family_model(family), folder, calibration=calibration, entries=artifacts
            ).folder
        return taken[family]

    return take


@pytest.mark.parametrize(
    ("family", "entry"),
    slow_but(
        [(family, entry) for family in KINDS for entry in ENTRIES],
        ("mllama", "smoothquant"),
        ("glm_moe_dsa", "gptq"),
    ),
)
@torch.no_grad()
def test_the_artifact_is_what_stock_transformers_runs(
    family, entry, family_model, measured, text_files, tmp_path
):
    model = family_model(family)
    quantized = quantflow.quantize(
        model, tmp_path / "q", entry=ENTRIES[entry], measurement=measured(family)
    )
    artifact = quantflow.export(quantized.folder, tmp_path / "a").folder  # with its proof
    quantflow.export(
        artifact, tmp_path / "plain", options=Export(format="dequantized", dtype="f32")
    )
    ids = torch.randint(2, 300, (1, 24), generator=torch.Generator().manual_seed(1))
    stock = (
        KINDS[family]
        .from_pretrained(tmp_path / "plain", dtype=torch.float32)
        .eval()(input_ids=ids)
        .logits
    )
    ours = load(
        artifact, decoder="transformers", backend="reference", dtype=torch.float32, exact=True
    ).decoder
    ours.begin(rows=1, capacity=24)
    found = ours.forward(ids, last_only=False)
    assert float((found - stock).norm() / stock.norm()) < DIFFERENCE[entry]
    if entry == "gptq":
        judged = Validate(text=str(text_files["heldout"]), tokens=256, sequence_length=64)
        found = quantflow.validate(artifact, model, report=tmp_path / "report", options=judged)
        assert found.outcome in ("pass", "fail", "inconclusive")


@pytest.mark.slow
@torch.no_grad()
def test_a_model_whose_images_are_read_by_weights_in_another_form(family_model, tmp_path):
    """Transformers splits the tower's queries, keys and values while it loads them.

    Text needs none of them.
    """
    entry = Quantize(name="small", scheme="W8A16", algorithm="rtn")
    quantized = quantflow.quantize(source := family_model("kimi_k25"), tmp_path / "q", entry=entry)
    artifact = quantflow.export(quantized.folder, tmp_path / "a").folder
    plain = quantflow.export(
        artifact, tmp_path / "plain", options=Export(format="dequantized", dtype="f32")
    ).folder
    expected, found = (load_file(folder / "model.safetensors") for folder in (source, plain))
    assert expected.keys() == found.keys()
    tower = [name for name in expected if name.startswith("vision_tower")]
    assert any(name.endswith("wqkv.weight") for name in tower)
    assert all(torch.equal(found[name], expected[name]) for name in tower)
    ids = torch.randint(2, 300, (1, 24), generator=torch.Generator().manual_seed(1))
    stock = (
        AutoModelForImageTextToText.from_pretrained(plain, dtype=torch.float32)
        .eval()(input_ids=ids)
        .logits
    )
    for open_ in (partial(load, decoder="transformers"), load_offloaded):
        loaded = open_(artifact, dtype=torch.float32, exact=True)
        loaded.decoder.begin(rows=1, capacity=24)
        logits = loaded.decoder.forward(ids, last_only=False)
        assert float((logits - stock).norm() / stock.norm()) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("family", KINDS)
def test_a_run_that_was_stopped_goes_on_to_the_same_bytes(family, family_model, measured, tmp_path):
    model, entry = family_model(family), ENTRIES["signround"]
    whole = quantflow.quantize(
        model, tmp_path / "whole", entry=entry, measurement=measured(family)
    ).folder
    with pytest.raises(Stopped):
        quantflow.quantize(
            model,
            tmp_path / "parts",
            entry=entry,
            measurement=measured(family),
            progress=StopsInTheSecondLayer(),
        )
    parts = quantflow.quantize(
        model, tmp_path / "parts", entry=entry, measurement=measured(family)
    ).folder
    names = sorted(path.name for path in (whole / "layers").iterdir())
    assert len(names) >= 4
    for name in names:
        assert (whole / "layers" / name).read_bytes() == (parts / "layers" / name).read_bytes(), (
            name
        )


def test_plan_names_layers_that_text_goes_past(family_model):
    (artifact,) = quantflow.plan(
        Recipe(model=str(family_model("mllama")), quantize=(ENTRIES["gptq"],))
    )["artifacts"]
    (past,) = [row for row in artifact["schemes"] if row["tensors"] == "layers that text goes past"]
    assert past["scheme"] == "copied" and past["count"] > 9


def test_what_is_carried_counts_beside_the_hidden_state(family_model):
    source = open_source(family_model("glm_moe_dsa"))
    size = model_size(source.checkpoint.infos, source.config, graph_for(source.config))
    assert (size.hidden, size.between) == (64, 64 + 8)
