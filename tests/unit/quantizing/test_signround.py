"""`--algorithm signround`: learning, its inputs and start, its records, memory and refusals."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from quantflow.errors import StatisticsError, UsageError
from quantflow.exporting import export
from quantflow.exporting.job import ExportJob
from quantflow.files.rank_folders import rank_folder
from quantflow.measuring import measure
from quantflow.measuring.job import MeasureJob
from quantflow.models.load import load_model, open_source
from quantflow.planning.finished_plan import plan_from
from quantflow.planning.recipe import (
    Calibration,
    Measure,
    Override,
    Quantize,
    SignRound,
    recipe_from,
)
from quantflow.planning.requirements import algorithm_of, entries_of, statistics_for
from quantflow.quantizing import quantize
from quantflow.quantizing.job import QuantizeJob
from quantflow.reporting.progress_line import ProgressLine
from quantflow.runtime.load import load
from quantflow.stages.cli import cli
from quantflow.stages.cli.output import exit_code

QUIET = ProgressLine(quiet=True)
FEW = SignRound(iterations=12, sequences=3)
ENTRY = Quantize(
    name="learned", scheme="W4A16", algorithm="signround", group_size=32, signround=FEW
)


def measured_of(model, text_files, folder, stats=None):
    calibration = Calibration(source=str(text_files["calibration"]), samples=5, sequence_length=48)
    job = MeasureJob(
        model=model, output=folder, calibration=calibration, options=Measure(stats=stats)
    )
    measure.run(job, QUIET)
    return rank_folder(folder, 0, 1)


@pytest.fixture(scope="module")
def measured(tmp_path_factory, llama, text_files):
    return measured_of(llama, text_files, tmp_path_factory.mktemp("measured"))


def made(model, measured, folder, entry=ENTRY, **options):
    return quantize.run(
        QuantizeJob(model=model, output=folder, entry=entry, measurement=measured, **options),
        QUIET,
    )


def records(folder):
    return [json.loads(path.read_text()) for path in sorted((folder / "layers").glob("*.json"))]


def layer_outputs(model, sequences, index):
    """What a decoder layer of a whole model puts out for every sequence."""
    seen = []
    handle = model.model.layers[index].register_forward_hook(
        lambda _module, _args, output: seen.append(output.double())
    )
    with torch.no_grad():
        for sequence in sequences:
            model(sequence[None])
    handle.remove()
    return seen


def test_the_recorded_loss_is_that_of_the_artifacts_layers_on_what_its_own_layers_before_put_out(
    llama, measured, tmp_path
):
    folder = made(llama, measured, tmp_path / "2")
    artifact = export.run(ExportJob(source=folder, output=tmp_path / "artifact"), QUIET)
    original, quantized = (
        load_model(open_source(llama), dtype=torch.float32),
        load(artifact, backend="reference", exact=True).model,
    )
    kept = load_file(measured / "calibration.safetensors")
    sequences = torch.split(kept["tokens"], kept["lengths"].tolist())
    for index, record in enumerate(records(folder)):
        pairs = list(
            zip(
                *(layer_outputs(model, sequences, index) for model in (original, quantized)),
                strict=True,
            )
        )
        loss = sum(float((found - target).square().sum()) for target, found in pairs)
        expected = loss / sum(float(target.square().sum()) for target, _ in pairs)
        for told in record["decisions"].values():
            assert told["block_loss"] == pytest.approx(expected, rel=1e-3)
            assert 0 < told["block_loss"] < told["block_loss_start"]
            assert (told["iterations"], told["start"]["algorithm"]) == (12, "rtn")
            assert told["moved"] > 0 and told["same_as_rtn"] is False
    summary = json.loads((folder / "quantize.json").read_text())
    assert summary["plan"]["algorithm"] == "signround"
    assert summary["plan"]["learned"] == {"iterations": 12, "sequences": 3, "start": "rtn"}
    plan = plan_from(summary)
    assert (plan.algorithm, plan.method, plan.learned) == ("rtn", "signround", FEW)
    assert "linears quantized: W4A16 by signround." in (artifact / "README.md").read_text()


@pytest.mark.parametrize(
    ("family", "words"),
    [
        pytest.param(
            "llama", {"signround": replace(FEW, start="gptq")}, id="gptq", marks=pytest.mark.slow
        ),
        pytest.param(
            "llama",
            {"signround": replace(FEW, start="hqq"), "scheme": "W3A16_ASYM"},
            id="hqq-asym",
            marks=pytest.mark.slow,
        ),
        pytest.param("llama", {"transforms": ({"awq": {}},)}, id="awq", marks=pytest.mark.slow),
        pytest.param(
            "llama",
            {"transforms": ({"hadamard": {}},), "signround": replace(FEW, start="gptq")},
            id="hadamard-gptq",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "llama",
            {"scheme": "W8A8", "group_size": None, "signround": replace(FEW, start="gptq")},
            id="w8a8-smoothquant-gptq",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "llama",
            {
                "ignore": ("re:.*k_proj",),
                "overrides": (Override(match="re:.*q_proj", scheme="W8A16"),),
            },
            id="mixed",
        ),
        pytest.param("gpt_neox", {"scheme": "W4A16_ASYM"}, id="gpt-neox", marks=pytest.mark.slow),
    ],
)
def test_it_goes_on_from_other_algorithms_with_transforms_and_other_schemes(
    family_model, measured_family, tmp_path, family, words
):
    entry = replace(ENTRY, **words)
    folder = made(family_model(family), measured_family(family), tmp_path / "2", entry)
    for record in records(folder):
        for told in record["decisions"].values():
            assert told["block_loss"] <= told["block_loss_start"]
            assert told["start"]["algorithm"] == entry.signround.start
            assert "output_error" not in told  # the start's, which stands with it
        assert len({told["block_loss"] for told in record["decisions"].values()}) == 1


@pytest.mark.slow
def test_from_yaqa_the_measurement_holds_gradients(llama, text_files, tmp_path):
    entry = replace(ENTRY, signround=replace(FEW, start="yaqa"))
    assert statistics_for([entry]) == ("gradient",)
    measured = measured_of(llama, text_files, tmp_path / "1", stats=("gradient",))
    for record in records(made(llama, measured, tmp_path / "2", entry)):
        for told in record["decisions"].values():
            assert (
                told["block_loss"] <= told["block_loss_start"]
                and told["start"]["loss"] <= told["start"]["loss_start"]
            )


def test_a_text_of_which_nothing_could_be_learned_is_an_error(llama, text_files, tmp_path):
    (tmp_path / "model").mkdir()
    for path in llama.iterdir():
        (tmp_path / "model" / path.name).write_bytes(path.read_bytes())
    tensors = load_file(llama / "model.safetensors")
    for name, tensor in tensors.items():
        if "proj" in name:  # on the grid already: nothing is lost, and no gradient says where to go
            steps = torch.randint(-8, 8, tensor.shape, generator=torch.Generator().manual_seed(0))
            steps[:, ::32], steps[:, 1::32] = -8, 7
            tensors[name] = (steps / 64).to(tensor.dtype)
    save_file(tensors, tmp_path / "model" / "model.safetensors", metadata={"format": "pt"})
    measured = measured_of(tmp_path / "model", text_files, tmp_path / "1")
    with pytest.raises(
        StatisticsError,
        match=r"learned: signround with calibration \w{16} .* changed nothing: all 14 linears",
    ):
        made(tmp_path / "model", measured, tmp_path / "2", replace(ENTRY, scheme="W4A16_ASYM"))


def test_options_come_from_the_recipe_and_from_set(llama, measured, tmp_path):
    entry = {
        "name": "a",
        "scheme": "W4A16",
        "algorithm": "signround",
        "signround": {"iterations": 50},
    }
    (found,) = recipe_from({"model": "m", "quantize": [entry]}).quantize
    assert found.signround == SignRound(iterations=50, sequences=8, start="rtn")
    assert algorithm_of(found) == "rtn"
    assert algorithm_of(replace(found, signround=SignRound(start="gptq"))) == "gptq"
    given = (
        "quantize",
        llama,
        "-o",
        tmp_path / "2",
        "--scheme",
        "W4A16",
        "--group-size",
        32,
        "--algorithm",
        "signround",
    )
    given += ("--measurement", measured, "--set", "quantize.0.signround.iterations=12", "-q")
    assert exit_code(cli, [str(word) for word in given]) == 0
    assert records(tmp_path / "2")[0]["decisions"]["model.layers.0.mlp.up_proj"]["iterations"] == 12


def test_what_has_to_be_measured_is_the_text_alone(llama, tmp_path):
    assert statistics_for(entries_of("W4A16:signround")) == ()
    entry = Quantize(name="x", scheme="W4A16", group_size=32, algorithm="signround")
    with pytest.raises(
        UsageError, match="W4A16 with signround needs the calibration text, none is given"
    ) as caught:
        quantize.run(QuantizeJob(model=llama, output=tmp_path / "2", entry=entry), QUIET)
    assert "learned" not in caught.value.cause


@pytest.mark.parametrize(
    ("words", "options", "kind", "message"),
    [
        (
            {"scheme": "FP8_DYNAMIC", "group_size": None},
            {},
            UsageError,
            "signround with scheme FP8_DYNAMIC; signround chooses",
        ),
        (
            {},
            {"ranks": 2},
            UsageError,
            "learned: signround with --ranks 2; quantize with one process",
        ),
        (
            {"signround": SignRound(start="best")},
            {},
            UsageError,
            "start='best' is no algorithm to start from; .*rtn",
        ),
        (
            {"signround": SignRound(start="signround")},
            {},
            UsageError,
            "start='signround' is no algorithm to start from",
        ),
        (
            {"algorithm": "gptq"},
            {},
            UsageError,
            "signround beside algorithm gptq; give `algorithm: signround`",
        ),
        ({"algorithm": None}, {}, UsageError, "signround beside algorithm gptq"),
        (
            {"quantized_inputs": False},
            {},
            UsageError,
            "quantized_inputs=False with signround; .* leave quantized_inputs out",
        ),
        (
            {"target_bpw": 4.0, "group_size": None},
            {},
            UsageError,
            "target_bpw, target_size or max_kld with signround; choose with gptq",
        ),
    ],
)
def test_what_does_not_go_together_is_refused_with_what_to_do(
    llama, measured, tmp_path, words, options, kind, message
):
    with pytest.raises(kind, match=message):
        made(llama, measured, tmp_path / "2", replace(ENTRY, **words), **options)
    assert not (tmp_path / "2").exists()


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"iterations": 0}, "signround: iterations=0; give 1 or more"),
        ({"sequences": -1}, "signround: sequences=-1; give 1 or more"),
        ({"iterations": "many"}, "iterations: 'many' is str, not int"),
        ({"iteration": 5}, "unknown key 'iteration'; did you mean 'iterations'"),
    ],
)
def test_options_that_mean_nothing_are_refused(option, message):
    entry = {"name": "a", "scheme": "W4A16", "algorithm": "signround", "signround": option}
    with pytest.raises(UsageError, match=message):
        recipe_from({"model": "m", "quantize": [entry]})
