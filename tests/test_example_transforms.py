"""Transforms on the example model and its variant with planted outliers.

The function is the same, and quantization loses less.
"""

import json
import runpy
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from torch import Tensor

from quantflow.core.parallel import SEQUENTIAL
from quantflow.distributed.team import ALONE
from quantflow.files.canonical import read_json
from quantflow.files.rank_folders import rank_folder
from quantflow.measuring import measure
from quantflow.measuring.job import MeasureJob
from quantflow.measuring.record import read_measurement
from quantflow.models.capture import LayerStream
from quantflow.models.layer_store import layer_path
from quantflow.models.load import load_model, open_source
from quantflow.models.open import graph_for
from quantflow.models.parameters import materialize_
from quantflow.models.tokenizer import load_tokenizer
from quantflow.numerics.divergence import join, score
from quantflow.numerics.perplexity import logits_of
from quantflow.planning.finished_plan import plan_from
from quantflow.planning.plan import resolve
from quantflow.planning.recipe import Calibration, Quantize
from quantflow.quantizing import quantize
from quantflow.quantizing.job import QuantizeJob
from quantflow.quantizing.layer_by_layer import read_back
from quantflow.quantizing.layer_traffic import Traffic, collect_traffic
from quantflow.quantizing.open_layer import Execution, LayerText, OpenLayer
from quantflow.quantizing.rotated import Rotated
from quantflow.quantizing.smoothing import smooth_
from quantflow.quantizing.static_inputs import input_statistics
from quantflow.reporting.progress_line import ProgressLine
from quantflow.transforms import hadamard

EXAMPLE = Path(__file__).parents[1] / "examples" / "tiny-llama"
GATES = Path(__file__).parents[1] / "configs" / "gates"
QUIET = ProgressLine(quiet=True)
SLOW, SWEEP = pytest.mark.slow, pytest.mark.sweep
STDLIB = runpy.run_path(str(EXAMPLE / "stdlib_text.py"))
PLANT = runpy.run_path(str(EXAMPLE / "plant_outliers.py"))
MODELS = ["embedded", "outliers"]
pytestmark = pytest.mark.skipif(
    not (EXAMPLE / "model.safetensors").is_file(),
    reason="examples/tiny-llama/model.safetensors is not there; it is part of the repository",
)


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return the example model, or its variant with outliers, made once."""
    made = {"embedded": EXAMPLE}

    def folder(model: str) -> Path:
        if model not in made:
            made[model] = shutil.copytree(EXAMPLE, tmp_path_factory.mktemp("models") / model)
            tensors = load_file(EXAMPLE / "model.safetensors")
            PLANT["plant_outliers_"](tensors)
            save_file(tensors, made[model] / "model.safetensors", metadata={"format": "pt"})
        return made[model]

    return folder


@pytest.fixture(scope="module")
def measured(
    folder_of: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Path]:
    """Return what some sequences of at most 512 tokens show of a model, taken once."""
    taken: dict[tuple[str, int], Path] = {}

    def take(model: str, samples: int = 16) -> Path:
        if (model, samples) not in taken:
            text = tmp_path_factory.mktemp("text") / "calibration.jsonl"
            pieces = STDLIB["excerpts"](samples)
            text.write_text(
                "".join(json.dumps({"text": piece}) + "\n" for piece in pieces), encoding="utf-8"
            )
            calibration = Calibration(source=str(text), samples=samples, sequence_length=512)
            output = tmp_path_factory.mktemp("measured") / model
            job = MeasureJob(model=folder_of(model), output=output, calibration=calibration)
            taken[model, samples] = measure.run(job, QUIET)
        return taken[model, samples]

    return take


@pytest.fixture(scope="module")
def windows() -> list[Tensor]:
    """Eight windows of 512 held-out tokens."""
    tokenizer, tokens = load_tokenizer(EXAMPLE), list[int]()
    for piece in STDLIB["heldout_pieces"]():
        tokens += tokenizer(piece, truncation=True, max_length=1024)["input_ids"]
        if len(tokens) >= 8 * 512:
            break
    return list(torch.tensor(tokens[: 8 * 512]).reshape(8, 512))


@pytest.fixture(scope="module")
def baseline(windows: list[Tensor]) -> list[Tensor]:
    """The logits of the source, which are those of both models."""
    model = logits_of(load_model(open_source(EXAMPLE), dtype=torch.float32))
    return [model(window) for window in windows]


@pytest.fixture(scope="module")
def kld(folder_of, measured, windows, baseline, tmp_path_factory) -> Callable[..., float]:
    """Return the mean KL divergence of a quantized model from its source, in nats per token."""

    def run(
        model: str, scheme: str, algorithm: str, *transforms: dict, samples: int = 16, **options
    ) -> float:
        output = tmp_path_factory.mktemp("quantized") / "q"
        entry = Quantize(
            name="x", scheme=scheme, algorithm=algorithm, transforms=transforms, **options
        )
        job = QuantizeJob(
            model=folder_of(model), output=output, entry=entry, measurement=measured(model, samples)
        )
        quantize.run(job, QUIET)
        candidate = logits_of(model_of(folder_of(model), output))
        scores = [
            score(one, candidate(window), window)
            for one, window in zip(baseline, windows, strict=True)
        ]
        found = float(join(scores).kld.mean())
        print(f"{model} {scheme} {algorithm} {transforms} {options}: mean KLD {found:.5f}")
        return found

    return run


def model_of(source: Path, quantized: Path):
    """Return the quantized model, without an export."""
    model, graph = (
        load_model(open_source(source), dtype=torch.float32),
        graph_for(open_source(source).config),
    )
    plan = plan_from(read_json(quantized / "quantize.json"))
    for layer in graph.layers:
        read_back(
            model.get_submodule(layer.prefix), layer, plan, layer_path(quantized, layer.index)
        )
    if (quantized / "outside.safetensors").is_file():
        materialize_(model, load_file(quantized / "outside.safetensors"), dtype=torch.float32)
    return model


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


HALVES = ("W8A8_STATIC", {"smoothquant": {"alpha": 0.5, "linears": True}})
SEARCHED = ("W8A8", {"smoothquant": {"alpha": "auto"}})
AWQ = ("W4A16", {"awq": {}})


@pytest.mark.parametrize(
    ("model", "scheme", "transform"),
    [
        pytest.param("outliers", *HALVES, id="smoothquant-outliers", marks=SLOW),
        pytest.param("embedded", *HALVES, id="smoothquant-embedded", marks=SLOW),
        *(
            pytest.param(model, *SEARCHED, id=f"searched-smoothquant-{model}", marks=SLOW)
            for model in MODELS
        ),
        *(pytest.param(model, *AWQ, id=f"awq-{model}", marks=SLOW) for model in MODELS),
    ],
)
def test_what_is_folded_into_every_layer_leaves_the_logits_as_they_were(
    folder_of, measured, windows, model, scheme, transform
):
    source = open_source(folder_of(model))
    graph, shapes = (
        graph_for(source.config),
        {name: info.shape for name, info in source.checkpoint.infos.items()},
    )
    plan = resolve(
        Quantize(name="x", scheme=scheme, algorithm="rtn", transforms=(transform,)), graph, shapes
    )
    measurement = read_measurement(rank_folder(measured(model), 0, 1))
    stream = LayerStream(source, graph)
    *states, canary = stream.begin([*plan.text(measurement.sequences[:4]), windows[0]])
    changed = 0
    for layer in graph.layers:
        with stream.layer(layer.index) as module:
            opened = OpenLayer(stream=stream, source=source, module=module, layer=layer, plan=plan)
            tokens = [len(state.hidden[0]) for state in states]
            text = LayerText(
                canary=canary, states=states, tokens=tokens, keep_outputs=True, stream=stream
            )
            execution = Execution(
                workers=SEQUENTIAL, host_workers=SEQUENTIAL, ahead=1, progress=QUIET, team=ALONE
            )
            before = {name: opened.weight(name).clone() for name in layer.linears}
            traffic = (
                collect_traffic(opened, text, execution=execution) if plan.needs_text else Traffic()
            )
            statistics = {
                name: {**of, **traffic.statistics.get(name, {})}
                for name, of in input_statistics(measurement, layer).items()
            }
            smooth_(opened, statistics, hessians=traffic.hessians, execution=execution)
            changed += sum(
                not torch.equal(opened.weight(name), weight) for name, weight in before.items()
            )
            stream.advance(module, [canary])
    found = stream.finish(canary.hidden)[0]
    expected = logits_of(load_model(source, dtype=torch.float32))(windows[0])
    difference = relative(found, expected)
    print(f"{model} {transform}: {changed} of 28 weights changed, logits by {difference:.2e}")
    assert changed > 20
    assert difference < 1e-5


@pytest.mark.parametrize(
    ("model", "heads", "down"),
    [
        ("outliers", True, True),
        pytest.param("outliers", True, False, marks=SLOW),
        pytest.param("outliers", False, False, marks=SLOW),
        *(
            pytest.param("embedded", heads, down, marks=SLOW)
            for heads, down in ((True, False), (False, False), (True, True))
        ),
    ],
)
def test_a_rotated_model_has_the_logits_of_its_source(
    folder_of, windows, tmp_path, model, heads, down
):
    """In float32, so that no embedding is rounded to bfloat16 on the way."""
    folder = shutil.copytree(folder_of(model), tmp_path / "float32")
    tensors = {
        name: tensor.float() for name, tensor in load_file(folder / "model.safetensors").items()
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    source = open_source(folder)
    graph = graph_for(source.config)
    rotations = hadamard.solve(
        hidden=512, head_dim=64, options={"seed": 0, "heads": heads, "down": down}
    )
    blocks = {name: 1024 for name in graph.linears if down and name.endswith("down_proj")}
    stream = LayerStream(
        Rotated(source, graph, rotations, quantized=graph.linears, blocks=blocks), graph
    )
    (state,) = stream.begin([windows[0]])
    for layer in graph.layers:
        with stream.layer(layer.index) as module:
            if layer.index == 1:
                turned = module.get_submodule("mlp.down_proj").weight.detach().clone()
            stream.advance(module, [state])
    plain = load_model(source, dtype=torch.float32)
    assert relative(turned, plain.get_parameter("model.layers.1.mlp.down_proj.weight")) > 1
    difference = relative(stream.finish(state.hidden)[0], logits_of(plain)(windows[0]))
    print(f"{model}, heads={heads}, down={down}: logits changed by {difference:.2e}")
    assert difference < 1e-5


@pytest.mark.slow
def test_static_int8_inputs_with_outliers_need_smoothing(kld):
    plain, auto = (
        kld("outliers", "W8A8_STATIC", "rtn", *given)
        for given in ((), ({"smoothquant": {"alpha": "auto"}},))
    )
    limit = yaml.safe_load((GATES / "int8.yaml").read_text(encoding="utf-8"))["thresholds"][
        "mean_kld"
    ]
    # the gate of the scheme lets it through, and refuses the plain one
    assert 0 < auto < limit < plain


@pytest.mark.sweep
def test_with_the_demos_calibration_the_searched_folds_beat_those_into_norms_at_one_half(kld):
    """down_proj reads no norm's output: there the search folds into up_proj.

    Every channel then reaches the end of the static range, so the range has to be that of enough
    text.
    """
    norms, auto = (
        kld("outliers", "W8A8_STATIC", "rtn", {"smoothquant": {"alpha": alpha}}, samples=128)
        for alpha in (0.5, "auto")
    )
    assert 0 < auto < 0.6 * norms


@pytest.mark.parametrize(
    ("scheme", "options", "bound"),
    [
        pytest.param("W4A16", {}, 0.85, id="W4A16-g128", marks=SWEEP),
        pytest.param("W4A16", {"group_size": 64}, 0.9, id="W4A16-g64", marks=SWEEP),
        pytest.param("W3A16", {}, 0.75, id="W3A16-g128", marks=SWEEP),
        pytest.param("W3A16", {"group_size": 64}, 0.75, id="W3A16-g64", marks=SLOW),
    ],
)
def test_awq_loses_less_than_rounding_to_nearest(kld, scheme, options, bound):
    rtn, awq = (
        kld("embedded", scheme, "rtn", *transforms, **options)
        for transforms in ((), ({"awq": {}},))
    )
    assert 0 < awq < bound * rtn


@pytest.mark.sweep
def test_weights_alone_need_smoothing_too_where_inputs_have_outliers(kld):
    """The reason that best searches how far to smooth.

    A step of a weight counts as much more as its input's channel is larger.
    """
    plain, best = (
        kld("outliers", "W8A16", "best", *given)
        for given in ((), ({"smoothquant": {"alpha": "auto"}},))
    )
    assert 0 < best < plain / 20


@pytest.mark.parametrize(("scheme", "factor"), [("W8A8_STATIC", 400), ("W4A8", 40)])
@SLOW
def test_a_rotation_takes_nearly_all_that_outliers_cost(kld, scheme, factor):
    plain, rotated = (
        kld("outliers", scheme, "rtn", *transforms) for transforms in ((), ({"hadamard": {}},))
    )
    assert 0 < rotated < plain / factor


@pytest.mark.slow
@pytest.mark.parametrize(("scheme", "factor"), [("W8A8_STATIC", 6), ("W8A8", 1.5)])
def test_inputs_of_down_proj_that_are_mixed_on_the_way_take_most_of_what_a_folded_rotation_leaves(
    kld, scheme, factor
):
    """The reason for it: nothing can be folded in behind the gate.

    There one channel of a few tokens sets the range of all.
    """
    folded, mixed = (
        kld("embedded", scheme, "rtn", {"hadamard": {"down": down}}) for down in (False, True)
    )
    assert 0 < mixed < folded / factor
