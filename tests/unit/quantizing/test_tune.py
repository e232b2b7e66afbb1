"""`tune`: scales follow the model's predictions; records, resuming, memory and refusals."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from quantflow import cpu_threads
from quantflow.algorithms import COMBINATIONS, tune
from quantflow.core import determinism
from quantflow.errors import UsageError
from quantflow.exporting import export
from quantflow.exporting.job import ExportJob
from quantflow.files.rank_folders import rank_folder
from quantflow.measuring import measure
from quantflow.measuring.job import MeasureJob
from quantflow.models import layer_store, stand_ins
from quantflow.models.capture import LayerStream
from quantflow.models.load import load_model, open_source
from quantflow.planning.finished_plan import plan_from
from quantflow.planning.recipe import (
    Calibration,
    Measure,
    Override,
    Quantize,
    SignRound,
    Tune,
    Validate,
    recipe_from,
)
from quantflow.planning.requirements import tune_of
from quantflow.quantizing import quantize
from quantflow.quantizing.job import QuantizeJob
from quantflow.reporting.progress_line import ProgressLine
from quantflow.runtime.artifact import open_artifact
from quantflow.stages.cli import cli
from quantflow.stages.cli.output import exit_code
from quantflow.validating import validate
from quantflow.validating.job import ValidateJob
from tests.shared import slow, slow_but

QUIET = ProgressLine(quiet=True)
FEW = Tune(steps=6, sequences=2)
ENTRY = Quantize(name="tuned", scheme="W3A16", algorithm="rtn", group_size=32, tune=FEW)


@pytest.fixture(scope="module")
def measured(tmp_path_factory, llama, text_files):
    folder = tmp_path_factory.mktemp("measured")
    calibration = Calibration(source=str(text_files["calibration"]), samples=5, sequence_length=48)
    measure.run(
        MeasureJob(
            model=llama,
            output=folder,
            calibration=calibration,
            options=Measure(stats=("mean_abs", "gradient")),
        ),
        QUIET,
    )
    return rank_folder(folder, 0, 1)


def made(model, measured, folder, entry=ENTRY, **options):
    return quantize.run(
        QuantizeJob(model=model, output=folder, entry=entry, measurement=measured, **options),
        QUIET,
    )


@pytest.fixture(scope="module")
def tuned(tmp_path_factory, llama, measured):
    return made(llama, measured, tmp_path_factory.mktemp("tuned") / "out")


@pytest.fixture(scope="module")
def untuned(tmp_path_factory, llama, measured):
    return made(
        llama, measured, tmp_path_factory.mktemp("untuned") / "out", replace(ENTRY, tune=None)
    )


SMOOTHED = {"transforms": ({"awq": {}},)}  # which divides norms, and the rows of v and up


@pytest.fixture(scope="module")
def smoothed_tuned(tmp_path_factory, llama, measured):
    return made(
        llama, measured, tmp_path_factory.mktemp("smoothed") / "out", replace(ENTRY, **SMOOTHED)
    )


@pytest.fixture(scope="module")
def smoothed_untuned(tmp_path_factory, llama, measured):
    folder = tmp_path_factory.mktemp("smoothed_untuned") / "out"
    return made(llama, measured, folder, replace(ENTRY, **SMOOTHED, tune=None))


def files(folder):
    return {path.name: path.read_bytes() for path in sorted((folder / "layers").iterdir())}


def records(folder):
    return [json.loads(path.read_text()) for path in sorted((folder / "layers").glob("*.json"))]


def sequences_of(measured):
    kept = load_file(measured / "calibration.safetensors")
    return torch.split(kept["tokens"], kept["lengths"].tolist())


def exported(folder, to):
    return open_artifact(
        export.run(ExportJob(source=folder, output=to), QUIET), backend="reference"
    )


def with_weights(llama, artifact):
    """The original model of transformers with the artifact's dequantized weights, and its norms."""
    model = load_model(open_source(llama), dtype=torch.float32)
    norms = [name for name, _ in model.named_parameters() if "norm" in name]
    for name, tensor in artifact.read(norms).items():
        model.get_parameter(name).data.copy_(tensor)
    for name in artifact.linears:
        model.get_submodule(name).weight.data.copy_(artifact.decode(name).weight.dequantize())
    return model


def divergence(original, model, sequences):
    total = 0.0
    for sequence in sequences:
        pair = (
            each(sequence[None]).logits[0].double().log_softmax(-1) for each in (model, original)
        )
        total = total + torch.nn.functional.kl_div(*pair, reduction="sum", log_target=True)
    return total / sum(map(len, sequences))


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("", id="as it is"),
        pytest.param("smoothed_", id="smoothed", marks=pytest.mark.slow),
    ],
)
def test_the_recorded_divergences_are_those_of_the_artifacts_before_and_after(
    llama, measured, request, tmp_path, kind
):
    untuned, tuned = (
        request.getfixturevalue(f"{kind}untuned"),
        request.getfixturevalue(f"{kind}tuned"),
    )
    original, sequences = (
        load_model(open_source(llama), dtype=torch.float32),
        sequences_of(measured),
    )
    with torch.no_grad():
        start, end = (
            float(
                divergence(
                    original,
                    with_weights(llama, exported(folder, tmp_path / folder.parent.name)),
                    sequences,
                )
            )
            for folder in (untuned, tuned)
        )
    assert end < start
    for record in records(tuned):
        assert {"norm" in name for name in record["changed"]} == ({True} if kind else set())
        for told in record["decisions"].values():
            assert told["tune"]["divergence_start"] == pytest.approx(start, rel=1e-3)
            assert told["tune"]["divergence"] == pytest.approx(end, rel=1e-3)
            assert told["tune"]["steps"] == 6 and told["tune"]["rescaled"] > 0


@pytest.mark.parametrize(
    ("products", "tokens", "tolerance"),
    [
        slow((torch.float32, 1, 1e-3)),
        (torch.float32, 20, 1e-3),
        slow((torch.float32, 64, 1e-3)),
        (torch.bfloat16, 20, 3e-2),
    ],
)
def test_the_first_step_is_against_the_gradient_of_the_whole_model(
    llama, measured, untuned, tmp_path, monkeypatch, products, tokens, tolerance
):
    """The first step's slopes by autograd through transformers' model, `tokens` per head part."""
    monkeypatch.setattr(determinism, "products", lambda _device: products)
    monkeypatch.setattr(stand_ins, "LOGITS", 1)
    monkeypatch.setattr(stand_ins, "FEWEST", tokens)
    seen, step = [], tune.stepped

    def watched(start, before, found, **of):
        seen.append((start, found))
        return step(start, before, found, **of)

    monkeypatch.setattr(tune, "stepped", watched)
    made(llama, measured, tmp_path / "one", replace(ENTRY, tune=replace(FEW, steps=1)))
    artifact = exported(untuned, tmp_path / "artifact")
    original, model = (
        load_model(open_source(llama), dtype=torch.float32),
        with_weights(llama, artifact),
    )
    sequences = sequences_of(measured)
    for parameter in model.parameters():
        parameter.requires_grad_()
    # of five by twos: 0 and 3, 1 and 4, 2
    divergence(original, model, [sequences[0], sequences[3]]).backward()
    assert len(seen) == len(artifact.linears)
    for name in artifact.linears:
        weight = artifact.decode(name).weight
        exact = (
            (model.get_submodule(name).weight.grad * weight.dequantize())
            .reshape(*weight.scale.shape, -1)
            .sum(-1)
        )
        (found,) = [slope for start, slope in seen if torch.equal(start.qvalue, weight.qvalue)]
        torch.testing.assert_close(
            found, exact, rtol=tolerance, atol=tolerance * float(exact.abs().max())
        )


@pytest.mark.slow
def test_products_in_bfloat16_gain_what_those_in_float32_gain(
    llama, measured, tmp_path, monkeypatch
):
    gains = {}
    for products in (torch.float32, torch.bfloat16):
        monkeypatch.setattr(determinism, "products", lambda _device, products=products: products)
        (told, *_) = records(made(llama, measured, tmp_path / str(products)))[0][
            "decisions"
        ].values()
        assert told["tune"]["products"] == str(products).removeprefix("torch.")
        gains[products] = told["tune"]["divergence_start"] - told["tune"]["divergence"]
    assert gains[torch.bfloat16] == pytest.approx(gains[torch.float32], rel=0.03)


@pytest.mark.slow
def test_the_original_is_that_of_the_model_where_layers_are_quantized_on_quantized_inputs(
    llama, measured, tmp_path
):
    """The original passes by itself then, not while its layers are quantized."""
    folder = made(llama, measured, tmp_path / "2", replace(ENTRY, quantized_inputs=True))
    original, sequences = (
        load_model(open_source(llama), dtype=torch.float32),
        sequences_of(measured),
    )
    (told, *_) = records(folder)[0]["decisions"].values()
    assert told["tune"]["steps"] == 6
    with torch.no_grad():
        end = float(
            divergence(original, with_weights(llama, exported(folder, tmp_path / "a")), sequences)
        )
    assert told["tune"]["divergence"] == pytest.approx(end, rel=1e-3)


def test_the_original_model_runs_once(llama, measured, tmp_path, monkeypatch):
    """While it is quantized; tuning runs the quantized layers alone."""
    runs, advance = [], LayerStream.advance
    monkeypatch.setattr(
        LayerStream,
        "advance",
        lambda self, *args, **told: runs.append(self) or advance(self, *args, **told),
    )
    made(llama, measured, tmp_path / "2")
    assert runs == []


def test_scales_alone_are_changed(tuned, untuned):
    changed = 0
    for name in sorted(path.name for path in (tuned / "layers").glob("*.safetensors")):
        after, before = load_file(tuned / "layers" / name), load_file(untuned / "layers" / name)
        assert after.keys() == before.keys()
        for key in after:
            same = torch.equal(after[key], before[key])
            assert same or key.endswith("weight_scale"), key
            changed += not same
    assert changed == 14  # of every linear


def test_errors_of_the_weights_and_of_the_canary_are_those_of_the_tuned_scales(
    llama, tuned, untuned, tmp_path
):
    artifact, original = (
        exported(tuned, tmp_path / "artifact"),
        load_model(open_source(llama), dtype=torch.float32),
    )
    for record, before in zip(records(tuned), records(untuned), strict=True):
        for name, errors in record["errors"].items():
            weight = original.get_submodule(name).weight.double()
            difference = (
                artifact.decode(name).weight.dequantize().double() - weight
            ).square().sum() / weight.square().sum()
            assert errors["weight"] == pytest.approx(float(difference.detach()), rel=1e-6)
            assert 0 < errors["output"] != before["errors"][name]["output"]


def killed(monkeypatch, after, *arguments, counted=lambda path: True):
    """Run `made`, and end it before the layer's file that comes after so many."""
    write, count = layer_store.write_layer, []

    def counting(path, tensors, record):
        if counted(path):
            if len(count) == after:
                raise KeyboardInterrupt
            count.append(path)
        write(path, tensors, record)

    with monkeypatch.context() as patch:
        patch.setattr(layer_store, "write_layer", counting)
        with pytest.raises(KeyboardInterrupt):
            made(*arguments)


@pytest.mark.parametrize(
    "after",
    slow_but([0, 3, 10, 13], 3),
    ids=["in the first step", "in the second", "late", "while it writes"],
)
def test_a_run_that_was_killed_goes_on_at_its_step_to_the_same_bytes(
    llama, measured, tuned, tmp_path, monkeypatch, after
):
    """Each step writes two layers: it is killed before one, or before the last finished one."""
    finished = tmp_path / "out" / "layers"
    killed(
        monkeypatch,
        after,
        llama,
        measured,
        tmp_path / "out",
        counted=lambda path: "steps" in path.parts or path.parent == finished,
    )
    begun, rate = [], tune.rate
    monkeypatch.setattr(
        tune,
        "rate",
        lambda bits, *, step, steps: begun.append(step) or rate(bits, step=step, steps=steps),
    )
    made(llama, measured, tmp_path / "out")
    assert files(tmp_path / "out") == files(tuned)
    assert sorted(set(begun)) == list(range(min(6, after // 2), 6))


@pytest.mark.parametrize(
    "after",
    [slow(0), slow(1), slow(5), slow(15)],
    ids=["no layer", "a layer", "in the second step", "while it writes"],
)
def test_what_was_smoothed_goes_on_wherever_it_was_killed(
    llama, measured, smoothed_tuned, tmp_path, monkeypatch, after
):
    arguments = (llama, measured, tmp_path / "out", replace(ENTRY, **SMOOTHED))
    killed(monkeypatch, after, *arguments)
    assert files(made(*arguments)) == files(smoothed_tuned)


def test_workers_change_no_byte(llama, measured, tuned, tmp_path, monkeypatch):
    monkeypatch.setattr(cpu_threads, "usable_cores", lambda: 3)
    assert files(made(llama, measured, tmp_path / "out")) == files(tuned)


def test_the_report_says_that_scales_were_tuned(llama, tuned, text_files, tmp_path):
    exported(tuned, tmp_path / "artifact")
    options = Validate(text=str(text_files["heldout"]), tokens=600, sequence_length=40)
    job = ValidateJob(
        artifact=tmp_path / "artifact", baseline=llama, report=tmp_path / "r", options=options
    )
    assert validate.run(job, QUIET)["algorithm"] == "rtn + tune"


def test_nothing_but_the_result_is_left(tuned):
    assert sorted(path.name for path in tuned.parent.iterdir()) == [".out.lock", "out"]


@pytest.mark.parametrize("kind", ["", slow("smoothed_")], ids=["as it is", "smoothed"])
def test_scales_that_make_it_no_better_stay_as_they_were(
    llama, measured, request, tmp_path, monkeypatch, kind
):
    """So do errors, which quantizing found of the weights at hand, smoothed or not."""
    untuned = request.getfixturevalue(f"{kind}untuned")
    monkeypatch.setattr(tune, "RATE", 40.0)  # leaps, not steps
    folder = made(llama, measured, tmp_path / "out", replace(ENTRY, **(SMOOTHED if kind else {})))
    for name in sorted(path.name for path in (folder / "layers").glob("*.safetensors")):
        after, before = load_file(folder / "layers" / name), load_file(untuned / "layers" / name)
        assert after.keys() == before.keys()
        assert all(torch.equal(after[key], before[key]) for key in before)
    for record, before in zip(records(folder), records(untuned), strict=True):
        assert record["canary"] == before["canary"]
        for name, errors in record["errors"].items():
            assert errors == pytest.approx(before["errors"][name], rel=1e-4)
        for told in record["decisions"].values():
            assert told["tune"]["steps"] == told["tune"]["rescaled"] == 0
            assert told["tune"]["divergence"] >= told["tune"]["divergence_start"]


@pytest.mark.parametrize(
    ("family", "words"),
    [
        pytest.param(
            "llama",
            {"algorithm": "signround", "signround": SignRound(iterations=4, sequences=2)},
            id="signround",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "llama",
            {"algorithm": "gptq", "scheme": "W4A16_ASYM"},
            id="gptq-asym",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "llama",
            {"algorithm": "gptq", "scheme": "W2A16"},
            id="gptq-negative",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "llama",
            {
                "ignore": ("re:.*k_proj",),
                "overrides": (Override(match="re:.*q_proj", scheme="W8A16"),),
            },
            id="mixed",
            marks=pytest.mark.slow,
        ),
        pytest.param("gpt_neox", {"scheme": "W2A16_ASYM"}, id="gpt-neox", marks=pytest.mark.slow),
        pytest.param(
            "gpt_neox", {"transforms": ({"awq": {}},)}, id="norms-with-bias", marks=pytest.mark.slow
        ),
        pytest.param("qwen2", {"transforms": ({"awq": {}},)}, id="values-with-bias"),
        pytest.param(
            "llama",
            {"transforms": ({"awq": {}},), "ignore": ("re:.*v_proj",)},
            id="values-as-stored",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_it_goes_on_from_every_algorithm_and_the_proof_holds(
    family_model, measured_family, tmp_path, family, words
):
    folder = made(
        family_model(family), measured_family(family), tmp_path / "2", replace(ENTRY, **words)
    )
    for record in records(folder):
        # of what is quantized
        for told in (record["decisions"][name] for name in record["errors"]):
            assert (
                told["tune"]["steps"] == 0
                or told["tune"]["divergence"] < told["tune"]["divergence_start"]
            )
    exported(folder, tmp_path / "artifact")  # which proves the canary
    assert "scales tuned end to end" in (tmp_path / "artifact" / "README.md").read_text()
    summary = json.loads((folder / "quantize.json").read_text())
    assert summary["plan"]["tune"] == {"steps": 6, "sequences": 2}
    assert plan_from(summary).tune == FEW


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ({"scheme": "W2A16"}, True),
        ({"scheme": "W2A16_ASYM"}, True),
        ({"scheme": "W2A16", "transforms": ({"awq": {}},)}, True),
        ({"scheme": "W2A16", "transforms": ({"hadamard": {}},)}, False),
        ({"scheme": "W3A16"}, False),  # refitted
        ({"scheme": "W4A16"}, False),
        ({"scheme": "W4A16", "refit": False}, True),
        ({"scheme": "W4A16", "quantized_inputs": True}, True),
        ({"scheme": "W8A16"}, False),
        ({"scheme": "W8A8"}, False),
        ({"scheme": "FP8_DYNAMIC"}, False),
        ({"scheme": "W2A16", "tune": Tune(steps=0)}, False),
    ],
)
@pytest.mark.parametrize("word", COMBINATIONS)
def test_combinations_tune_weights_of_few_bits(word, words, expected):
    usual = Tune(steps=COMBINATIONS[word].steps, sequences=COMBINATIONS[word].sequences)
    assert tune_of(Quantize(name="a", algorithm=word, **words)) == (usual if expected else None)


def test_others_tune_where_they_are_told():
    assert tune_of(Quantize(name="a", scheme="W4A16", algorithm="yaqa")) is None
    assert tune_of(Quantize(name="a", scheme="W4A16", algorithm="gptq", tune=FEW)) == FEW


@pytest.mark.parametrize(
    ("algorithm", "sequences"), [("best", 4), ("good", 2), ("gptq", 8), ("yaqa", 8)]
)
def test_other_steps_take_as_many_sequences_as_the_algorithm(algorithm, sequences):
    entry = Quantize(name="a", scheme="W4A16", algorithm=algorithm, tune=Tune(steps=64))
    assert tune_of(entry) == Tune(steps=64, sequences=sequences)
    named = replace(entry, tune=Tune(steps=64, sequences=3))
    assert tune_of(named) == named.tune


def test_steps_come_from_the_command_line(llama, measured, tmp_path):
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
        "rtn",
    )
    given += ("--measurement", measured, "--tune", 1, "-q")
    assert exit_code(cli, [str(word) for word in given]) == 0
    assert json.loads((tmp_path / "2" / "quantize.json").read_text())["plan"]["tune"] == {
        "steps": 1,
        "sequences": 8,
    }


def test_without_a_measurement_the_text_is_asked_for(llama, tmp_path):
    entry = Quantize(name="x", scheme="W4A16", group_size=32, algorithm="rtn", tune=Tune(steps=1))
    with pytest.raises(
        UsageError, match="W4A16 with rtn needs the calibration text, none is given"
    ):
        quantize.run(QuantizeJob(model=llama, output=tmp_path / "2", entry=entry), QUIET)


@pytest.mark.parametrize(
    ("words", "options", "message"),
    [
        (
            {"scheme": "FP8_DYNAMIC", "group_size": None},
            {},
            "tuned: tune with scheme FP8_DYNAMIC; it tunes scales per channel or",
        ),
        (
            {"scheme": "W8A8", "group_size": None, "transforms": ()},
            {},
            "tune with scheme W8A8; .* inputs as they are",
        ),
        (
            {"transforms": ({"hadamard": {}},)},
            {},
            "tune with hadamard; .* leave `tune` out, or give `--tune 0`",
        ),
        (
            {},
            {"ranks": 2},
            "tune with --ranks 2; it runs in one process; .* or quantize with one process",
        ),
    ],
)
def test_what_does_not_go_together_is_refused_with_what_to_do(
    llama, measured, tmp_path, words, options, message
):
    with pytest.raises(UsageError, match=message):
        made(llama, measured, tmp_path / "2", replace(ENTRY, **words), **options)
    assert not (tmp_path / "2").exists()


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (
            {"steps": -1},
            "tune: steps=-1, sequences=None; give steps from 0 and sequences",
        ),
        ({"sequences": 0}, "tune: steps=32, sequences=0"),
        ({"steps": "many"}, "steps: 'many' is str, not int"),
        ({"step": 5}, "unknown key 'step'; did you mean 'steps'"),
    ],
)
def test_options_that_mean_nothing_are_refused(option, message):
    with pytest.raises(UsageError, match=message):
        recipe_from({"model": "m", "quantize": [{"name": "a", "scheme": "W4A16", "tune": option}]})
