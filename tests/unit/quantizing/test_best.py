"""`--algorithm best` and `good`: gradients measured, weights rounded, resumed, refused."""

import json
import weakref
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from quantflow import cpu_threads
from quantflow.algorithms import COMBINATIONS, yaqa
from quantflow.core import determinism
from quantflow.errors import StatisticsError, UsageError
from quantflow.files.rank_folders import rank_folder
from quantflow.measuring import measure
from quantflow.measuring.backward import generator_for
from quantflow.measuring.job import MeasureJob
from quantflow.measuring.stored import Deferred
from quantflow.models.load import load_model, open_source
from quantflow.numerics import output_blocks
from quantflow.planning.recipe import Calibration, KVCacheSettings, Measure, Quantize, Tune
from quantflow.planning.requirements import algorithm_of, entries_of, statistics_for, transforms_of
from quantflow.quantizing import quantize
from quantflow.quantizing.job import QuantizeJob
from quantflow.reporting.progress_line import ProgressLine
from quantflow.stages.cli import cli
from quantflow.stages.cli.output import exit_code
from tests.shared import slow, slow_but

QUIET = ProgressLine(quiet=True)
# tune: test_tune.py
ENTRY = Quantize(name="best", scheme="W4A16", algorithm="best", group_size=32, tune=Tune(steps=0))

STATS = ("mean_abs", "fisher", "gradient")  # what awq, a choice of schemes and yaqa read


def calibration(text_files):
    return Calibration(source=str(text_files["calibration"]), samples=6, sequence_length=48)


@pytest.fixture(scope="module")
def measured(tmp_path_factory, llama, text_files):
    folder = tmp_path_factory.mktemp("measured")
    job = MeasureJob(
        model=llama,
        output=folder,
        calibration=calibration(text_files),
        options=Measure(stats=STATS),
    )
    measure.run(job, QUIET)
    return rank_folder(folder, 0, 1)


@pytest.fixture(scope="module")
def best(tmp_path_factory, llama, measured):
    return made(llama, measured, tmp_path_factory.mktemp("best") / "out")


def made(llama, measured, folder, entry=ENTRY, progress=QUIET):
    return quantize.run(
        QuantizeJob(model=llama, output=folder, entry=entry, measurement=measured),
        progress,
    )


def files(folder):
    return {path.name: path.read_bytes() for path in sorted((folder / "layers").iterdir())}


def test_sums_of_gradients_are_those_of_the_whole_model_by_autograd(llama, measured):
    model = load_model(open_source(llama), dtype=torch.float32).requires_grad_(False)
    names = ("model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj")
    seen = {}
    for name in names:
        model.get_submodule(name).register_forward_hook(
            lambda _module, _args, y, name=name: seen.update({name: y}) or y.retain_grad()
        )
    expected = dict.fromkeys(names, 0.0)
    kept = load_file(measured / "calibration.safetensors")
    for index, tokens in enumerate(torch.split(kept["tokens"], kept["lengths"].tolist())):
        embedded = model.get_input_embeddings()(tokens[None]).requires_grad_()
        logits = model(inputs_embeds=embedded, use_cache=False).logits[0]
        # at most 64
        labels = torch.multinomial(
            logits.detach().softmax(-1), 1, generator=generator_for(0, index)
        )[:, 0]
        torch.nn.functional.cross_entropy(logits, labels, reduction="sum").backward()
        for name, y in seen.items():
            gradient = y.grad[0].double()  # [S, O]
            expected[name] += gradient.T @ gradient
    statistics = load_file(measured / "statistics.safetensors")
    for name in names:
        found = statistics[f"{name}|gradient|gradient_sum"]
        torch.testing.assert_close(
            found.double(), expected[name], rtol=1e-4, atol=1e-5 * float(expected[name].max())
        )
        squares = statistics[f"{name}|gradient|square_sum"]  # fisher's, of the same gradients
        torch.testing.assert_close(found.diagonal().double(), squares, rtol=1e-5, atol=0)
        assert statistics[f"{name}|gradient|count"] == len(kept["tokens"])


def test_ranks_that_share_the_text_measure_summands(
    llama, text_files, measured, tmp_path, monkeypatch
):
    monkeypatch.setattr(determinism, "products", lambda _device: torch.float32)
    found = []
    job = MeasureJob(
        model=llama,
        output=tmp_path / "two",
        calibration=calibration(text_files),
        options=Measure(stats=("gradient",)),
    )
    for rank in range(2):
        measure._measure_rank(job, QUIET, rank=rank, world=2)
        found.append(load_file(rank_folder(tmp_path / "two", rank, 2) / "statistics.safetensors"))
    whole = load_file(measured / "statistics.safetensors")
    keys = [key for key in whole if key.endswith("gradient_sum")]
    assert len(keys) == 14
    for key in keys:
        torch.testing.assert_close(
            found[0][key] + found[1][key],
            whole[key],
            rtol=1e-4,
            atol=1e-6 * float(whole[key].max()),
        )


@pytest.fixture(scope="module")
def in_bfloat16(tmp_path_factory, llama, text_files):
    """What gradients alone are measured in where the device multiplies in bfloat16."""
    job = MeasureJob(
        model=llama,
        output=tmp_path_factory.mktemp("in_bfloat16"),
        calibration=calibration(text_files),
        options=Measure(stats=("gradient",)),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(determinism, "products", lambda _device: torch.bfloat16)
        return rank_folder(measure.run(job, QUIET), 0, 1)


def test_sums_of_gradients_in_bfloat16_are_those_in_float32_and_round_weights_as_well(
    llama, in_bfloat16, measured, best, tmp_path, monkeypatch
):
    """Alone they are measured in it; beside squares, which choices of schemes read, in float32."""
    monkeypatch.setattr(determinism, "products", lambda _device: torch.bfloat16)
    alone = in_bfloat16
    found, exact = (load_file(folder / "statistics.safetensors") for folder in (alone, measured))
    for key in [key for key in exact if key.endswith("gradient_sum")]:
        error = float((found[key] - exact[key]).norm() / exact[key].norm())
        assert 0 < error < 0.02, key
        assert torch.equal(
            found[key.replace("gradient_sum", "count")], exact[key.replace("gradient_sum", "count")]
        )
    for key in [key for key in found if "|gradient|" not in key]:
        assert torch.equal(found[key], exact[key]), key
    losses = []
    for folder in (made(llama, alone, tmp_path / "2"), best):
        layers = [
            json.loads(content)["decisions"]
            for name, content in files(folder).items()
            if name.endswith(".json")
        ]
        losses.append(sum(of["loss"] for decisions in layers for of in decisions.values()))
    assert losses[0] == pytest.approx(losses[1], rel=0.02)


def test_a_rotated_model_is_rounded_by_rotated_gradients_and_smoothed(llama, measured, tmp_path):
    """The measurement's gradients serve; no observer of quantize's own takes inputs for them."""
    transforms = ({"hadamard": {}}, {"smoothquant": {"alpha": "auto"}})
    folder = made(llama, measured, tmp_path / "q", replace(ENTRY, transforms=transforms))
    plan = json.loads((folder / "quantize.json").read_text())["plan"]
    assert plan["algorithm"] == "yaqa"
    for path in (folder / "layers").glob("*.json"):
        for name, of in json.loads(path.read_text())["decisions"].items():
            assert 0 < of["loss"] < of["loss_start"] < 1, name
            assert "smoothquant" in of


def test_what_was_decided_of_each_linear_is_in_its_layers_record(best):
    record = json.loads((best / "layers" / "00001.json").read_text())
    decisions = record["decisions"]["model.layers.1.self_attn.o_proj"]
    assert decisions["gradient_damping"] == 0.3 and decisions["damping"] == 0.01
    assert 0 < decisions["loss"] < decisions["loss_start"] < 1
    assert decisions["moved"] > 0
    assert json.loads((best / "quantize.json").read_text())["plan"]["algorithm"] == "yaqa"


class Stopped(BaseException):
    """What ends a measurement on its way back."""


def stopping(*, before=None, inside=None):
    """A progress that ends the run after so many layers of the way back, or sequences of one."""
    seen, back = [], ("measure backwards", "layer")

    class StopAt(ProgressLine):
        def steps(self, items, **told):
            for number, item in enumerate(items):
                seen.append((told["stage"], told["unit"]))
                if seen[-1] == back and number == before:
                    raise Stopped
                yield item

        def doing(self, text):
            if seen[-1] == back and text == inside:
                raise Stopped

    return StopAt(quiet=True)


def test_a_measurement_stopped_anywhere_on_the_way_back_ends_in_the_same_bytes(
    llama, text_files, measured, tmp_path
):
    job = MeasureJob(
        model=llama,
        output=tmp_path,
        calibration=calibration(text_files),
        options=Measure(stats=STATS),
    )
    for where in (
        {"before": 0},
        {"inside": "sequence 3 of 6"},
        {"before": 1},
        {"inside": "sequence 1 of 6"},
    ):
        with pytest.raises(Stopped):
            measure.run(job, stopping(**where))
    finished = sorted(path.name for path in tmp_path.glob(".*.work/backwards/layers/*.json"))
    assert finished == ["00001.json"]  # the last layer comes first
    measure.run(job, QUIET)
    again = rank_folder(tmp_path, 0, 1)
    for name in ("statistics.safetensors", "calibration.safetensors", "measurement.json"):
        assert (again / name).read_bytes() == (measured / name).read_bytes()


def test_sums_in_bfloat16_have_the_same_bytes_however_many_run_at_once_and_wherever_it_stopped(
    llama, text_files, in_bfloat16, tmp_path, monkeypatch
):
    monkeypatch.setattr(determinism, "products", lambda _device: torch.bfloat16)
    monkeypatch.setattr(cpu_threads, "usable_cores", lambda: 3)
    job = MeasureJob(
        model=llama,
        output=tmp_path / "2",
        calibration=calibration(text_files),
        options=Measure(stats=("gradient",)),
    )
    with pytest.raises(Stopped):
        measure.run(job, stopping(inside="sequence 3 of 6"))
    again = rank_folder(measure.run(job, QUIET), 0, 1)
    for name in ("statistics.safetensors", "measurement.json"):
        assert (again / name).read_bytes() == (in_bfloat16 / name).read_bytes()


def test_what_was_measured_in_float32_is_not_gone_on_with_in_bfloat16(
    llama, text_files, tmp_path, monkeypatch
):
    """Nor does it equal one in bfloat16: the CPU is part of a measurement's inputs."""
    job = MeasureJob(
        model=llama,
        output=tmp_path,
        calibration=calibration(text_files),
        options=Measure(stats=("gradient",)),
    )
    monkeypatch.setattr(determinism, "products", lambda _device: torch.float32)
    with pytest.raises(Stopped):
        measure.run(job, stopping(before=1))
    monkeypatch.setattr(determinism, "products", lambda _device: torch.bfloat16)
    seen = []

    class Watching(ProgressLine):
        def steps(self, items, **told):
            seen.extend([told["stage"]] * len(items) if told["unit"] == "layer" else [])
            yield from items

    measure.run(job, Watching(quiet=True))
    assert seen == ["measure"] * 2 + ["measure backwards"] * 2


def test_sums_of_gradients_are_read_for_the_linears_of_one_input_and_then_let_go_of(
    llama, measured, tmp_path, monkeypatch
):
    alive, most, original = weakref.WeakSet(), [], Deferred.__getitem__

    def read(self, key):
        found = original(self, key)
        if key.endswith("gradient_sum"):
            alive.add(found)
            most.append(len(alive))
        return found

    monkeypatch.setattr(Deferred, "__getitem__", read)
    made(llama, measured, tmp_path / "out")
    # each looked at once, and read for its weight; q, k and v together
    assert len(most) == 2 * 14 and max(most) == 3


def test_the_result_is_the_same_whatever_the_memory_and_wherever_it_was_stopped(
    best, llama, measured, tmp_path, monkeypatch
):
    original = quantize.allow_quantize
    monkeypatch.setattr(
        quantize,
        "allow_quantize",
        lambda *a, **k: replace(original(*a, **k), workers=2, in_flight=2),
    )

    class Stopped(BaseException):
        pass

    class StopAtTheSecond(ProgressLine):
        def steps(self, items, **told):
            for number, item in enumerate(items):
                if number == 1:
                    raise Stopped
                yield item

    with pytest.raises(Stopped):
        made(llama, measured, tmp_path / "out", progress=StopAtTheSecond(quiet=True))
    assert len(files(tmp_path / "out")) == 2
    assert files(made(llama, measured, tmp_path / "out")) == files(best)


@pytest.mark.parametrize(
    ("word", "algorithm", "statistics"),
    [
        ("W4A16:best", "yaqa", ("gradient",)),
        ("W2A16_ASYM:best", "yaqa", ("gradient",)),
        ("W4A8:best", "yaqa", ("gradient",)),
        ("W4A16:yaqa", "yaqa", ("gradient",)),
        ("W8A16:best", "gptq", ()),
        ("W4A16:best@4.25", "yaqa", ("fisher", "gradient")),
        ("W8A8:best", "gptq", ("channel_amax",)),  # smoothed
        ("FP8_DYNAMIC:best", "gptq", ()),
        ("FP8_BLOCK:best", "gptq", ()),
        ("FP8:best", "gptq", ("amax",)),
        ("W4A16:good", "gptq", ()),
        ("W2A16_ASYM:good", "gptq", ()),
        ("W8A16:good", "gptq", ()),
        ("W4A16:good@4.25", "gptq", ("fisher",)),
        ("W8A8:good", "gptq", ("channel_amax",)),
        ("FP8:good", "gptq", ("amax",)),
    ],
)
def test_a_combination_is_the_algorithm_that_fits_the_scheme(word, algorithm, statistics):
    (entry,) = entries_of(word)
    assert algorithm_of(entry) == algorithm
    assert statistics_for([entry]) == statistics


def test_smoothing_and_rotations_go_with_yaqa():
    assert algorithm_of(replace(ENTRY, transforms=({"awq": {}},))) == "yaqa"
    assert statistics_for([replace(ENTRY, transforms=({"awq": {}},))]) == ("mean_abs", "gradient")
    rotated = ({"hadamard": {}}, {"awq": {}})
    assert algorithm_of(replace(ENTRY, transforms=rotated)) == "yaqa"
    assert statistics_for([replace(ENTRY, transforms=rotated)]) == ("mean_abs", "gradient")


AUTO = ("smoothquant", {"alpha": "auto", "linears": True})


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ({"scheme": "W4A16", "algorithm": "best"}, (AUTO,)),
        ({"scheme": "W8A16", "algorithm": "best"}, (AUTO,)),
        ({"scheme": "W4A8", "algorithm": "best"}, (AUTO,)),
        (
            {"scheme": "W4A16", "algorithm": "best", "kv_cache": KVCacheSettings(scheme="FP8")},
            (("smoothquant", {"alpha": "auto", "linears": False}),),
        ),
        (
            {"scheme": "W8A8", "algorithm": "best"},
            (("smoothquant", {"alpha": 0.5, "linears": False}),),
        ),
        ({"scheme": "FP8_DYNAMIC", "algorithm": "best"}, ()),
        ({"scheme": "MXFP8", "algorithm": "best"}, ()),
        ({"scheme": "NVFP4", "algorithm": "best"}, (AUTO,)),
        ({"scheme": "NVFP4A16", "algorithm": "best"}, ()),
        ({"scheme": "MXFP4", "algorithm": "good"}, (AUTO,)),
        ({"scheme": "MXFP4", "algorithm": "best", "transforms": ()}, ()),
        ({"scheme": "MXFP4", "algorithm": "gptq"}, ()),
        ({"scheme": "W4A16", "algorithm": "gptq"}, ()),
        ({"scheme": "W4A16", "algorithm": "best", "transforms": ()}, ()),
        ({"scheme": "W4A16", "algorithm": "best", "target_bpw": 4.25}, ()),
        ({"scheme": "W4A16", "algorithm": "good"}, (AUTO,)),
        ({"scheme": "W4A16", "algorithm": "good", "transforms": ()}, ()),
        (
            {"scheme": "W8A8", "algorithm": "good"},
            (("smoothquant", {"alpha": 0.5, "linears": False}),),
        ),
        ({"scheme": "FP8_DYNAMIC", "algorithm": "good"}, ()),
    ],
)
def test_combinations_search_how_far_to_smooth_where_the_entry_names_nothing_else(words, expected):
    assert transforms_of(Quantize(name="a", **words)) == expected


@pytest.mark.parametrize(("alpha", "transforms"), [("none", []), slow(("auto", [dict([AUTO])]))])
def test_the_command_line_smooths_as_it_is_told(llama, measured, tmp_path, alpha, transforms):
    given = [
        "quantize",
        llama,
        "-o",
        tmp_path / "2",
        "--scheme",
        "W4A16",
        "--group-size",
        32,
        "--algorithm",
        "best",
    ]
    given += ["--measurement", measured, "--tune", 0, "--smoothquant", alpha, "-q"]
    assert exit_code(cli, [str(word) for word in given]) == 0
    assert (
        json.loads((tmp_path / "2" / "quantize.json").read_text())["plan"]["transforms"]
        == transforms
    )


GOOD = ("--scheme", "W2A16", "--group-size", 32, "--algorithm", "good")


@pytest.mark.slow
def test_good_needs_the_token_ids_alone_and_loses_less_than_gptq(llama, text_files, tmp_path):
    job = MeasureJob(
        model=llama,
        output=tmp_path / "1",
        calibration=calibration(text_files),
        options=Measure(stats=()),
    )
    measured = rank_folder(measure.run(job, QUIET), 0, 1)
    given = ["quantize", llama, "-o", tmp_path / "2", *GOOD, "--measurement", measured, "-q"]
    assert exit_code(cli, [str(word) for word in given]) == 0
    plan = json.loads((tmp_path / "2" / "quantize.json").read_text())["plan"]
    assert plan["algorithm"] == "gptq" and plan["transforms"] == [dict([AUTO])]
    assert plan["tune"] == {
        "steps": COMBINATIONS["good"].steps,
        "sequences": COMBINATIONS["good"].sequences,
    }
    (told, *_) = json.loads((tmp_path / "2" / "layers" / "00000.json").read_text())[
        "decisions"
    ].values()
    assert told["tune"]["steps"] == COMBINATIONS["good"].steps
    assert told["tune"]["divergence"] < 0.9 * told["tune"]["divergence_start"]  # of gptq, smoothed


@pytest.mark.parametrize("word", slow_but(COMBINATIONS, "good"))
def test_what_combinations_do_can_be_named_instead(llama, measured, tmp_path, word):
    """A combination is its parts: the same tensors; records differ by the recipe's words."""
    combination = COMBINATIONS[word]
    tune = Tune(steps=2, sequences=2)
    entry = replace(ENTRY, algorithm=word, tune=tune)
    smoothed = (dict([AUTO]),)
    parts = replace(entry, algorithm=combination.rounding, transforms=smoothed, refit=True)
    one, other = (
        files(made(llama, measured, tmp_path / name, each))
        for name, each in (("1", entry), ("2", parts))
    )
    tensors = [name for name in one if name.endswith(".safetensors")]
    assert len(tensors) == 2 and all(one[name] == other[name] for name in tensors)


def given_to_yaqa(llama, measured, folder, monkeypatch, **words):
    """The weight, gradients and input Hessian that yaqa got for each linear, in float64."""
    seen, original = {}, yaqa.quantize_group

    def watched(weights, scheme, *, statistics, **options):
        for name, weight in weights.items():
            gradients = output_blocks.block_of(
                statistics[f"{name}|gradient_sum"], slice(0, len(weight))
            )
            seen[name] = tuple(
                each.double().clone() for each in (weight, gradients, statistics["hessian_sum"])
            )
        return original(weights, scheme, statistics=statistics, **options)

    with monkeypatch.context() as patch:
        patch.setattr(yaqa, "quantize_group", watched)
        made(llama, measured, folder, replace(ENTRY, refit=False, **words))
    return seen


def test_smoothing_changes_weights_hessians_and_gradients_so_that_no_output_counts_otherwise(
    llama, measured, tmp_path, monkeypatch
):
    """The gradient by y / d is d times that by y, so tr(G W H W^T) stays, for v and up too."""
    plain = given_to_yaqa(llama, measured, tmp_path / "1", monkeypatch, transforms=())
    smooth = given_to_yaqa(llama, measured, tmp_path / "2", monkeypatch, transforms=({"awq": {}},))
    fed = [name for name in plain if not torch.equal(plain[name][1], smooth[name][1])]
    assert {name.rpartition(".")[2] for name in fed} == {"v_proj", "up_proj"}
    for name, (weight, gradients, hessian) in smooth.items():
        assert not torch.equal(weight, plain[name][0]), name
        before, after = (
            torch.einsum("op,oi,ij,pj->", g, w, h, w)
            for w, g, h in (plain[name], (weight, gradients, hessian))
        )
        torch.testing.assert_close(after, before, rtol=1e-4, atol=0)


def test_a_measurement_for_gradients_alone_is_enough_for_the_search(best, llama, measured):
    keys = load_file(measured / "statistics.safetensors")
    assert not [key for key in keys if key.endswith("|input|channel_amax")]
    decisions = json.loads((best / "layers" / "00000.json").read_text())["decisions"]
    found = [of["smoothquant"] for of in decisions.values() if "smoothquant" in of]
    assert len(found) == 7 and any(of["alpha"] is not None for of in found)


def test_a_range_of_static_inputs_is_measured_and_the_channels_with_it():
    searched = ({"smoothquant": {"alpha": "auto"}},)
    entry = Quantize(name="a", scheme="W8A8_STATIC", algorithm="gptq", transforms=searched)
    assert statistics_for([entry]) == ("channel_amax", "min_max")


def test_what_has_to_be_measured_first_is_told(llama, text_files, tmp_path):
    needs = "channel_amax, count, gradient_sum, hessian_sum, rows, the calibration text"
    with pytest.raises(UsageError, match=f"needs {needs}, none is given"):
        made(llama, None, tmp_path / "out", replace(ENTRY, tune=None, scheme="W2A16"))
    job = MeasureJob(
        model=llama,
        output=tmp_path / "1",
        calibration=calibration(text_files),
        options=Measure(stats=()),
    )
    measure.run(job, QUIET)
    # the engine takes the measurement as it is; the job would have completed it
    with pytest.raises(
        StatisticsError,
        match=r"q_proj\|gradient\|gradient_sum: .* measure again with --stats gradient",
    ):
        made(llama, tmp_path / "1", tmp_path / "out")


def test_ranks_that_share_the_model_are_refused(llama, text_files, tmp_path):
    given = calibration(text_files)
    job = MeasureJob(
        model=llama,
        output=tmp_path / "x",
        calibration=given,
        options=Measure(stats=("gradient",), ranks=2, tp=2),
    )
    with pytest.raises(UsageError, match="statistic gradient with tp=2; .* measure it with --tp 1"):
        measure.run(job, QUIET)
