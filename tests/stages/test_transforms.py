"""Transforms through the stages.

Their decisions are recorded, their changes are in the ledger, and the function is kept.
"""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from quantflow.errors import StatisticsError, UnsupportedError, UsageError
from quantflow.exporting import export
from quantflow.exporting.gguf_source import open_weights
from quantflow.exporting.job import ExportJob
from quantflow.files.verify import verify
from quantflow.measuring import measure
from quantflow.measuring.job import MeasureJob
from quantflow.models import layer_store
from quantflow.models.load import load_model, open_source
from quantflow.planning.recipe import Calibration, Measure, Quantize
from quantflow.quantizing import quantize, rotated
from quantflow.quantizing.job import QuantizeJob
from quantflow.reporting.progress_line import ProgressLine
from quantflow.runtime.artifact import open_artifact
from quantflow.runtime.generation import GenerateJob as Generate
from quantflow.runtime.generation import run as generate
from quantflow.runtime.load import load
from tests.shared import run, slow_but

QUIET = ProgressLine(quiet=True)
AWQ = {"scheme": "W4A16", "group_size": 32, "algorithm": "rtn", "transforms": ({"awq": {}},)}
AUTO = {"scheme": "W8A8_STATIC", "transforms": ({"smoothquant": {"alpha": "auto"}},)}
HADAMARD = {"scheme": "W8A16", "transforms": ({"hadamard": {}},)}
DOWN = {"scheme": "W8A16", "transforms": ({"hadamard": {"down": True}},)}
BOTH = {
    "scheme": "W8A8_STATIC",
    "transforms": ({"hadamard": {}}, {"smoothquant": {"alpha": "auto"}}),
}


def quantized(model: Path, measurement: Path | None, folder: Path, entry: dict, **options) -> Path:
    words = Quantize(name="x", **entry)
    return quantize.run(
        QuantizeJob(model=model, output=folder, entry=words, measurement=measurement, **options),
        QUIET,
    )


def decisions_of(folder: Path) -> dict:
    found = {}
    for path in sorted((folder / "layers").glob("*.json")):
        found |= json.loads(path.read_text())["decisions"]
    return found


def difference(model: Path, artifact: Path) -> float:
    """Return ||logits - those of the source|| / ||those of the source||."""
    tokens = torch.randint(2, 300, (1, 64), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        expected = load_model(open_source(model), dtype=torch.float32)(tokens).logits
        found = load(artifact, backend="reference").model(tokens).logits
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize("entry", [AWQ, AUTO], ids=["awq", "smoothquant"])
def test_what_a_search_found_is_in_the_record_of_every_linear(
    family_model, measured_family, tmp_path, entry
):
    name = next(iter(entry["transforms"][0]))
    found = decisions_of(
        quantized(family_model("llama"), measured_family("llama"), tmp_path / "q", entry)
    )
    assert len(found) == 14
    for linear, decisions in found.items():
        told = decisions[name]
        assert 0 <= told["error"] <= told["error_before"], linear
        assert (told["alpha"] is None) == ("kept" in told)
    assert (
        found["model.layers.0.self_attn.q_proj"][name]
        == found["model.layers.0.self_attn.v_proj"][name]
    )
    assert (
        sum(
            decisions[name]["error"] < decisions[name]["error_before"]
            for decisions in found.values()
        )
        > 7
    )
    assert all("clipped_groups" in decisions for decisions in found.values()) == (name == "awq")


@pytest.mark.parametrize(
    ("search", "family"),
    slow_but(
        [
            (search, family)
            for search in ("awq", "auto")
            for family in ("llama", "qwen2", "gpt_neox")
        ],
        ("awq", "llama"),
        ("auto", "qwen2"),
    ),
)
def test_a_searched_artifact_is_proven_and_close_to_its_source(
    family, family_model, measured_family, tmp_path, search
):
    """In eight bits, where a factor that is not undone would show."""
    entry = {
        "awq": AWQ | {"scheme": "W8A16", "group_size": None},
        "auto": AUTO | {"scheme": "W8A8"},
    }[search]
    folder = quantized(family_model(family), measured_family(family), tmp_path / "q", entry)
    artifact = export.run(ExportJob(source=folder, output=tmp_path / "artifact"), QUIET)
    found = difference(family_model(family), artifact)
    print(f"{family}: {found:.4f}")
    assert 0 < found < 0.08
    ledger = json.loads((artifact / "quantflow.json").read_text())["ledger"]["tensors"]
    changed = {item["name"] for item in ledger if item["action"] == "changed"}
    assert any("norm" in name for name in changed)
    transform = next(iter(entry["transforms"][0]))
    told = [
        of
        for name, of in decisions_of(folder).items()
        if name.endswith("o_proj") and transform in of
    ]
    divided = any(of[transform]["alpha"] is not None for of in told)  # qwen2's values have a bias
    assert any(name.endswith("v_proj.bias") for name in changed) == (divided and family == "qwen2")


def test_linears_absorb_nothing_where_the_recipe_says_so(family_model, measured_family, tmp_path):
    entry = {**AUTO, "transforms": ({"smoothquant": {"alpha": "auto", "linears": False}},)}
    found = decisions_of(
        quantized(family_model("llama"), measured_family("llama"), tmp_path / "q", entry)
    )
    assert {
        name.rpartition(".")[2] for name, told in found.items() if "smoothquant" not in told
    } == {"o_proj", "down_proj"}


def test_a_layer_that_is_read_back_has_the_biases_that_were_divided(
    family_model, measured_family, tmp_path, monkeypatch
):
    """Killed when the first layer was written, and before the hidden states after it were.

    The next layer is made from those.
    """
    model, measurement = family_model("qwen2"), measured_family("qwen2")
    halves = {"smoothquant": {"alpha": 0.5, "linears": True}}
    entry = {
        "scheme": "W8A8",
        "algorithm": "gptq",
        "quantized_inputs": True,
        "transforms": (halves,),
    }
    whole = quantized(model, measurement, tmp_path / "whole", entry)
    assert (
        "model.layers.0.self_attn.v_proj.bias"
        in json.loads((whole / "layers" / "00000.json").read_text())["changed"]
    )
    write = layer_store.write_layer

    def killed(path, tensors, record):
        write(path, tensors, record)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(layer_store, "write_layer", killed)
        with pytest.raises(KeyboardInterrupt):
            quantized(model, measurement, tmp_path / "again", entry)
    quantized(model, measurement, tmp_path / "again", entry)
    for path in sorted((whole / "layers").iterdir()):
        assert (tmp_path / "again" / "layers" / path.name).read_bytes() == path.read_bytes(), (
            path.name
        )


def test_a_linear_whose_rows_share_a_scale_absorbs_nothing_and_says_why(
    family_model, measured_family, tmp_path
):
    entry = {"scheme": "FP8", "transforms": ({"smoothquant": {"alpha": 0.5, "linears": True}},)}
    found = decisions_of(
        quantized(family_model("llama"), measured_family("llama"), tmp_path / "q", entry)
    )
    assert (
        found["model.layers.0.mlp.down_proj"]["smoothquant"]
        == "skipped: rows of mlp.up_proj share scales"
    )
    assert found["model.layers.0.mlp.up_proj"]["smoothquant"]["alpha"] == 0.5


def test_a_linear_that_is_not_quantized_absorbs_powers_of_two(
    family_model, measured_family, tmp_path
):
    """Its weight stays in the source's dtype: the rows are divided, and nothing is rounded."""
    entry = {**AUTO, "ignore": ("re:.*v_proj", "re:.*q_proj", "re:.*k_proj")}
    model = family_model("llama")
    folder = quantized(model, measured_family("llama"), tmp_path / "q", entry)
    name = "model.layers.0.self_attn.v_proj.weight"
    before = load_file(model / "model.safetensors")[name].float()
    after = load_file(folder / "layers" / "00000.safetensors")[name]
    assert after.dtype == torch.bfloat16
    ratios = (before / after.float()).nan_to_num(1.0)
    assert torch.equal(ratios, ratios.median(dim=1, keepdim=True).values.expand_as(ratios))
    assert torch.equal(torch.log2(ratios), torch.log2(ratios).round())
    assert not torch.equal(before, after.float())


def test_a_measurement_without_what_awq_reads_is_refused_by_name(
    family_model, text_files, tmp_path
):
    calibration = Calibration(source=str(text_files["calibration"]), samples=2, sequence_length=32)
    job = MeasureJob(
        model=family_model("llama"),
        output=tmp_path / "m",
        calibration=calibration,
        options=Measure(stats=("amax",)),
    )
    with pytest.raises(
        StatisticsError,
        match=r"q_proj\|input\|abs_sum: the measurement does not hold it; measure again",
    ):
        quantized(family_model("llama"), measure.run(job, QUIET), tmp_path / "q", AWQ)


@pytest.mark.parametrize(
    "family", slow_but(["llama", "qwen2", "qwen3", "mistral"], "qwen2", "qwen3")
)
def test_a_rotated_artifact_is_proven_and_computes_what_its_source_does(
    family, family_model, tmp_path
):
    """Eight bits per channel lose little.

    Most of the loss is the rounding of embedding and head to the source's bfloat16.
    """
    folder = quantized(family_model(family), None, tmp_path / "q", HADAMARD)
    artifact = export.run(ExportJob(source=folder, output=tmp_path / "artifact"), QUIET)
    found = difference(family_model(family), artifact)
    print(f"{family}: {found:.4f}")
    assert 0 < found < 0.05
    ledger = json.loads((artifact / "quantflow.json").read_text())["ledger"]["tensors"]
    changed = {item["name"] for item in ledger if item["action"] == "changed"}
    assert {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"} <= changed
    assert torch.equal(
        load_file(artifact / "model.safetensors")["model.norm.weight"].float(), torch.ones(64)
    )


def test_a_linear_that_is_not_quantized_is_rotated_and_called_changed(family_model, tmp_path):
    entry = {**HADAMARD, "ignore": ("re:.*o_proj",)}
    folder = quantized(family_model("llama"), None, tmp_path / "q", entry)
    artifact = export.run(ExportJob(source=folder, output=tmp_path / "artifact"), QUIET)
    assert difference(family_model("llama"), artifact) < 0.05
    ledger = {
        item["name"]: item
        for item in json.loads((artifact / "quantflow.json").read_text())["ledger"]["tensors"]
    }
    assert ledger["model.layers.0.self_attn.o_proj.weight"]["action"] == "changed"
    assert ledger["model.layers.0.self_attn.o_proj.weight"]["reason"] == "absorbed a transform"


@pytest.mark.parametrize("family", slow_but(["llama", "qwen3"], "llama"))
def test_an_artifact_that_mixes_inputs_on_the_way_is_proven_and_computes_what_its_source_does(
    family, family_model, tmp_path
):
    folder = quantized(family_model(family), None, tmp_path / "q", DOWN)
    artifact = export.run(ExportJob(source=folder, output=tmp_path / "artifact"), QUIET)
    verify(artifact)
    found = difference(family_model(family), artifact)
    print(f"{family}: {found:.4f}")
    assert 0 < found < 0.05
    groups = json.loads((artifact / "config.json").read_text())["quantization_config"][
        "transform_config"
    ]["config_groups"]
    (apply,) = groups["hadamard_128"]["apply"]
    assert apply == {
        "location": "input",
        "targets": [f"model.layers.{index}.mlp.down_proj" for index in range(2)],
    }
    assert "Stock transformers 5.23 ignores that" in (artifact / "README.md").read_text()
    folded = quantized(family_model(family), None, tmp_path / "folded", HADAMARD)
    ours, theirs = (load_file(path / "layers" / "00000.safetensors") for path in (folder, folded))
    other = {name for name in ours if not torch.equal(ours[name], theirs[name])}
    assert other == {
        f"model.layers.0.mlp.down_proj.{part}" for part in ("weight_packed", "weight_scale")
    }


@pytest.fixture(scope="module")
def mixing(family_model, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("mixing")
    export.run(
        ExportJob(
            source=quantized(family_model("llama"), None, folder / "q", DOWN), output=folder / "a"
        ),
        QUIET,
    )
    return folder / "a"


def test_the_lean_decoder_says_why_it_does_not_run_it_and_auto_takes_modules(mixing):
    told = "it mixes no inputs by Hadamard matrices, as down_proj of this artifact needs"
    assert any(told in reason for reason in load(mixing, decoder="auto").reasons)
    with pytest.raises(UnsupportedError, match=told):
        load(mixing, decoder="lean")


def test_llama_cpp_cannot_have_it(mixing):
    with pytest.raises(
        UnsupportedError,
        match=r"down_proj: its inputs are mixed in blocks of 128, which llama.cpp does not do",
    ):
        open_weights(mixing)


def test_weights_on_disk_give_the_same_tokens(mixing):
    outputs = []
    for offload in (False, True):
        job = Generate(
            artifact=mixing,
            prompts=("value scale",),
            max_new_tokens=8,
            disk_offload=offload,
            backend="reference",
        )
        outputs.append(generate(job, lambda _: None)["outputs"])
    assert [one["text"] for one in outputs[0]] == [one["text"] for one in outputs[1]]


def test_an_ignored_down_projection_gets_its_inputs_as_they_are(family_model, tmp_path):
    entry = {**DOWN, "ignore": ("re:.*layers.0.mlp.down_proj",)}
    artifact = export.run(
        ExportJob(
            source=quantized(family_model("llama"), None, tmp_path / "q", entry),
            output=tmp_path / "a",
        ),
        QUIET,
    )
    assert difference(family_model("llama"), artifact) < 0.05
    placements = open_artifact(artifact).linears
    assert placements["model.layers.1.mlp.down_proj"].scheme.rotation == 128
    assert [name for name, of in placements.items() if of.scheme.rotation is not None] == [
        "model.layers.1.mlp.down_proj"
    ]


@pytest.mark.parametrize(
    ("more", "other"),
    [
        ({"transforms": ({"hadamard": {"down": True}}, {"smoothquant": {}})}, "smoothquant"),
        ({"scheme": "W4A16", "group_size": 32, "algorithm": "signround"}, "signround"),
    ],
    ids=["smoothquant", "signround"],
)
def test_what_does_not_go_through_a_mixed_input_is_refused(
    family_model, measured_family, tmp_path, more, other
):
    with pytest.raises(
        UsageError,
        match=f"x: hadamard with down: true and {other}; leave {other} out, or write down: false",
    ):
        quantized(family_model("llama"), measured_family("llama"), tmp_path / "q", DOWN | more)


def test_static_inputs_of_a_rotated_model_are_observed_in_it(
    family_model, measured_family, tmp_path
):
    """The measurement has seen other inputs.

    The bound: static ranges of a random model cost much, foreign ones all.
    """
    model = family_model("llama")
    folder = quantized(model, measured_family("llama"), tmp_path / "q", BOTH)
    artifact = export.run(ExportJob(source=folder, output=tmp_path / "artifact"), QUIET)
    assert difference(model, artifact) < 0.5
    scale = load_file(folder / "layers" / "00000.safetensors")[
        "model.layers.0.self_attn.q_proj.input_scale"
    ]
    plain = quantized(
        model, measured_family("llama"), tmp_path / "plain", {**AUTO, "transforms": ()}
    )
    other = load_file(plain / "layers" / "00000.safetensors")[
        "model.layers.0.self_attn.q_proj.input_scale"
    ]
    assert not torch.equal(scale, other)


@pytest.mark.parametrize("name", ["model.norm", "model.layers.0.input_layernorm"])
def test_a_rotation_that_changes_the_function_is_refused(family_model, tmp_path, monkeypatch, name):
    """A norm that keeps its weight, although it was folded into what reads it."""
    model = shutil.copytree(family_model("llama"), tmp_path / "model")
    tensors = load_file(model / "model.safetensors")
    tensors[f"{name}.weight"] *= torch.linspace(0.1, 3, 64).to(torch.bfloat16)
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    real = rotated.Rotated.read

    def read(self, names, dtype=None):
        found = real(self, names, dtype)
        if f"{name}.weight" in found:
            found[f"{name}.weight"] = tensors[f"{name}.weight"].to(found[f"{name}.weight"].dtype)
        return found

    monkeypatch.setattr(rotated.Rotated, "read", read)
    with pytest.raises(
        StatisticsError, match="hadamard changed the output by .*; this family's norms"
    ):
        quantized(model, None, tmp_path / "q", HADAMARD)


def test_a_family_whose_norms_subtract_the_mean_is_not_rotated(family_model, tmp_path):
    with pytest.raises(
        UnsupportedError, match="norms of family gpt_neox subtract the mean.*; leave hadamard out"
    ):
        quantized(family_model("gpt_neox"), None, tmp_path / "q", HADAMARD)


@pytest.mark.parametrize("way", ["a measurement beside text", "one command", "a recipe", "a plan"])
def test_a_family_that_is_not_rotated_is_refused_before_it_is_measured(
    family_model, text_files, tmp_path, capsys, way
):
    model, text = family_model("gpt_neox"), str(text_files["calibration"])
    entry = {"name": "x", "scheme": "W4A16", "algorithm": "gptq", "transforms": ["hadamard"]}
    recipe = tmp_path / "r.yaml"
    recipe.write_text(
        json.dumps({"model": str(model), "calibration": {"source": text}, "quantize": [entry]})
    )
    made, measured = tmp_path / "out", tmp_path / "measured"
    words = ("--scheme", "W4A16", "--algorithm", "gptq", "--calibration", text)
    turned = ("--set", 'quantize.0.transforms=["hadamard"]')
    lines = {
        "a measurement beside text": (
            "quantize",
            model,
            *words,
            *turned,
            "--measurement",
            measured,
        ),
        "one command": ("quantize", model, *words, *turned),
        "a recipe": ("run", recipe),
        "a plan": ("plan", recipe),
    }
    output = () if way == "a plan" else ("-o", made)
    assert run(*lines[way], *output) == 6
    told = capsys.readouterr()
    assert "leave hadamard out" in told.err and "measure:" not in told.err + told.out
    assert not measured.exists() and not (made / "1-measure").exists()


def test_what_an_earlier_attempt_rotated_is_not_exported_by_a_later_one(
    family_model, measured_family, tmp_path
):
    model = family_model("llama")
    folder = quantized(model, measured_family("llama"), tmp_path / "q", HADAMARD)
    assert (folder / "outside.safetensors").is_file()
    quantized(model, measured_family("llama"), tmp_path / "q", AWQ, force=True)
    assert not (folder / "outside.safetensors").exists()
    artifact = export.run(ExportJob(source=folder, output=tmp_path / "artifact"), QUIET)
    source, written = (load_file(path / "model.safetensors") for path in (model, artifact))
    assert torch.equal(source["model.embed_tokens.weight"], written["model.embed_tokens.weight"])


@pytest.mark.parametrize(
    ("transforms", "message"),
    [
        (
            ({"awq": {}}, {"hadamard": {}}),
            "transforms awq, hadamard; rotate once, before all other transforms",
        ),
        (({"hadamard": {}}, {"hadamard": {"seed": 1}}), "rotate once"),
        (({"hadamard": {"sed": 1}},), "hadamard has no option 'sed'; did you mean 'seed'"),
        (({"hadamar": {}},), "transform 'hadamar' is unknown; did you mean 'hadamard'"),
        (({"awq": {"clip": 3}},), "x: awq clip=3"),
    ],
)
def test_transforms_that_cannot_be_are_refused_before_a_weight_is_read(
    family_model, tmp_path, transforms, message
):
    with pytest.raises(UsageError, match=message):
        quantized(
            family_model("llama"),
            None,
            tmp_path / "q",
            {"scheme": "W8A16", "transforms": transforms},
        )


def test_several_cards_do_not_rotate(family_model, tmp_path):
    with pytest.raises(UsageError, match="hadamard with --ranks 2; quantize with one process"):
        quantized(family_model("llama"), None, tmp_path / "q", HADAMARD, ranks=2)
