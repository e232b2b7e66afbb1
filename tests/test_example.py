"""The example model's programs: its text, its planted outliers, and GPTQ's gain on it."""

import importlib.util
import json
import shutil
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig

from quantflow.algorithms import ALGORITHMS
from quantflow.core.scheme import preset
from quantflow.exporting import export
from quantflow.exporting.job import ExportJob
from quantflow.measuring import measure
from quantflow.measuring.job import MeasureJob
from quantflow.models.load import load_model, open_source
from quantflow.models.open import graph_for
from quantflow.models.tokenizer import load_tokenizer
from quantflow.numerics.divergence import join, score
from quantflow.numerics.perplexity import logits_of
from quantflow.planning.recipe import Calibration, Measure, Quantize, SignRound
from quantflow.quantizing import quantize
from quantflow.quantizing.job import QuantizeJob
from quantflow.reporting.progress_line import ProgressLine
from quantflow.runtime.load import load

EXAMPLE = Path(__file__).parents[1] / "examples" / "tiny-llama"
QUIET = ProgressLine(quiet=True)
needs_weights = pytest.mark.skipif(
    not (EXAMPLE / "model.safetensors").is_file(),
    reason="examples/tiny-llama/model.safetensors is not there; it is part of the repository",
)


def program(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"tiny_llama_{name}", EXAMPLE / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


STDLIB = program("stdlib_text")
PLANT = program("plant_outliers")


def read_files(paths: list[Path]) -> list[str]:
    return [path.read_text(encoding="utf-8", errors="replace") for path in paths]


def test_the_heldout_modules_exist_in_this_interpreter() -> None:
    assert set(STDLIB.heldout_names()) <= set(STDLIB.module_files())
    assert len(STDLIB.documents(heldout=True)) >= len(STDLIB.heldout_names())


def test_training_and_heldout_text_share_no_file() -> None:
    training, heldout = (STDLIB.documents(heldout=side) for side in (False, True))
    assert not set(training) & set(heldout)
    names = {name.split(".")[0] for name in STDLIB.heldout_names()}
    root = Path(sysconfig.get_paths()["stdlib"])
    # read without the program: a held-out module is a file or a folder of that name
    for name in names:
        paths = (
            [root / f"{name}.py"]
            if (root / f"{name}.py").exists()
            else sorted((root / name).rglob("*.py"))
        )
        assert paths
        assert not set(read_files(paths)) & {text for text in training if len(text) > 200}


def test_no_calibration_excerpt_is_heldout_text() -> None:
    heldout = "\n".join(STDLIB.documents(heldout=True))
    excerpts = STDLIB.excerpts(16)
    assert len(excerpts) == 16
    assert all(len(text) <= 4000 and text not in heldout for text in excerpts)


def test_the_text_leaves_out_tests_and_what_is_not_the_library() -> None:
    root = Path(sysconfig.get_paths()["stdlib"])
    files = [path.relative_to(root) for paths in STDLIB.module_files().values() for path in paths]
    assert len(files) > 300
    for path in files:
        assert not {
            "test",
            "tests",
            "idle_test",
            "site-packages",
            "dist-packages",
            "encodings",
        } & set(path.parts)
    assert len({str(path) for path in files}) == len(files)


def test_the_text_is_the_same_each_time() -> None:
    assert STDLIB.excerpts(3, seed=1) == STDLIB.excerpts(3, seed=1) != STDLIB.excerpts(3, seed=2)
    assert STDLIB.heldout_pieces() == STDLIB.heldout_pieces()


@pytest.fixture(scope="module")
def small_model(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of the example's shape but for vocabulary and depth.

    Its norms are not all one.
    """
    folder = tmp_path_factory.mktemp("example") / "model"
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=320,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        bos_token_id=0,
        eos_token_id=1,
        initializer_range=0.1,
    )
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
    model.to(torch.bfloat16).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(llama / name, folder / name)
    return folder


def plant(model: Path, folder: Path) -> Path:
    tensors = load_file(model / "model.safetensors")
    PLANT.plant_outliers_(tensors)
    shutil.copytree(model, folder)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def heldout_tokens(model: Path, count: int) -> Tensor:
    tokenizer = load_tokenizer(model)
    tokens: list[int] = []
    for piece in STDLIB.heldout_pieces():
        tokens += tokenizer(piece, truncation=True, max_length=1024)["input_ids"]
        if len(tokens) >= count:
            break
    return torch.tensor(tokens[:count])


def logits_and_norm_peaks(folder: Path, tokens: Tensor) -> tuple[Tensor, dict[str, float]]:
    """Return the float32 logits and the largest |output| of each norm inside the decoder layers."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    peaks: dict[str, float] = {}

    def watch(name: str) -> Callable[[nn.Module, Any, Tensor], None]:
        def hook(_module: nn.Module, _inputs: Any, output: Tensor) -> None:
            peaks[name] = float(output.abs().max())

        return hook

    for name, module in model.named_modules():
        if name.endswith("layernorm"):
            module.register_forward_hook(watch(name))
    with torch.no_grad():
        return model(tokens[None]).logits, peaks


def check_planted(model: Path, folder: Path, *, layers: int) -> None:
    tokens = heldout_tokens(model, 200)
    expected, before = logits_and_norm_peaks(model, tokens)
    found, after = logits_and_norm_peaks(plant(model, folder), tokens)
    relative = float((found - expected).abs().max() / expected.abs().max())
    growth = [after[name] / before[name] for name in before]
    print(
        f"relative difference of the logits {relative:.2e}, norm outputs grew by "
        f"{min(growth):.0f} to {max(growth):.0f}"
    )
    assert len(growth) == 2 * layers
    assert relative <= 1e-5
    assert min(growth) >= 16


def test_planted_outliers_change_activations_and_not_the_function(
    small_model: Path, tmp_path: Path
) -> None:
    check_planted(small_model, tmp_path / "planted", layers=2)


@needs_weights
def test_outliers_planted_in_the_example_change_activations_and_not_its_function(
    tmp_path: Path,
) -> None:
    check_planted(EXAMPLE, tmp_path / "planted", layers=4)


def test_planting_is_exact_in_bf16(small_model: Path) -> None:
    """Factors are powers of two: every product of a norm weight and a column is the bits it was."""
    before, after = (
        load_file(small_model / "model.safetensors"),
        load_file(small_model / "model.safetensors"),
    )
    PLANT.plant_outliers_(after)
    norm, query = "model.layers.1.input_layernorm.weight", "model.layers.1.self_attn.q_proj.weight"
    changed = (before[norm] != after[norm]).nonzero().flatten()
    assert len(changed) == 6
    assert torch.equal(
        before[norm].float() * before[query].float(), after[norm].float() * after[query].float()
    )
    ratios = (after[norm] / before[norm])[changed].tolist()
    assert set(ratios) <= {32.0, 64.0, 128.0, 256.0}
    assert torch.equal(before["model.norm.weight"], after["model.norm.weight"])


@pytest.fixture
def text(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "calibration.jsonl"
    path.write_text(
        "".join(json.dumps({"text": piece}) + "\n" for piece in STDLIB.excerpts(128)),
        encoding="utf-8",
    )
    yield path


def mean_kld(
    text: Path,
    folder: Path,
    algorithms: tuple[str, ...],
    stats: tuple[str, ...],
    *,
    signround: SignRound | None = None,
) -> dict[str, float]:
    """The loss of the example in 4 bits by each algorithm, in nats per held-out token.

    It is measured as the demo does it.
    """
    calibration = Calibration(source=str(text), samples=128, sequence_length=512)
    job = MeasureJob(
        model=EXAMPLE,
        output=folder / "measured",
        calibration=calibration,
        options=Measure(stats=stats),
    )
    measured = measure.run(job, QUIET)
    windows = heldout_tokens(EXAMPLE, 16384).reshape(32, 512)
    baseline = logits_of(load_model(open_source(EXAMPLE), dtype=torch.float32))
    found = {}
    for algorithm in algorithms:
        learned = signround if algorithm == "signround" else None
        entry = Quantize(name=algorithm, scheme="W4A16", algorithm=algorithm, signround=learned)
        made = quantize.run(
            QuantizeJob(
                model=EXAMPLE, output=folder / algorithm, entry=entry, measurement=measured
            ),
            QUIET,
        )
        artifact = export.run(
            ExportJob(source=made, output=folder / f"{algorithm}-artifact"), QUIET
        )
        candidate = logits_of(load(artifact, backend="reference").model)
        comparison = join(
            [score(baseline(window), candidate(window), window) for window in windows]
        )
        found[algorithm] = float(comparison.kld.mean())
    print(f"mean KL divergence in nats per token: {found}")
    return found


@needs_weights
@pytest.mark.sweep
def test_gptq_keeps_the_example_much_closer_to_its_source_than_rounding_to_nearest(
    text: Path, tmp_path: Path
) -> None:
    kld = mean_kld(text, tmp_path, ("rtn", "gptq"), measure.DEFAULT_STATS)
    assert 0 < kld["gptq"] < 0.4 * kld["rtn"]


@needs_weights
@pytest.mark.sweep
def test_best_keeps_the_example_closer_to_its_source_than_gptq_and_good_lies_between(
    text: Path, tmp_path: Path
) -> None:
    kld = mean_kld(text, tmp_path, ("gptq", "good", "best"), ("gradient",))
    assert 0 < kld["best"] < 0.85 * kld["gptq"]
    assert kld["best"] < kld["good"] < kld["gptq"]


@needs_weights
@pytest.mark.sweep
def test_learned_rounding_keeps_the_example_closer_to_its_source_than_rounding_to_nearest(
    text: Path, tmp_path: Path
) -> None:
    few = SignRound(iterations=200, sequences=2)
    kld = mean_kld(text, tmp_path, ("rtn", "signround"), (), signround=few)
    assert 0 < kld["signround"] < 0.5 * kld["rtn"]


@needs_weights
@pytest.mark.slow
def test_scales_fitted_to_the_weights_keep_the_example_closer_than_those_of_the_whole_range():
    windows = heldout_tokens(EXAMPLE, 4096).reshape(8, 512)
    source = open_source(EXAMPLE)
    model = load_model(source, dtype=torch.float32)
    baseline = [logits_of(model)(window) for window in windows]
    linears = {name: model.get_submodule(name).weight for name in graph_for(source.config).linears}
    originals = {name: weight.detach().clone() for name, weight in linears.items()}
    kld = {}
    for algorithm in ("rtn", "rtn_mse", "hqq"):
        for name, weight in originals.items():
            told = {"statistics": {}, "scale_dtype": torch.bfloat16}
            made = ALGORITHMS[algorithm].quantize_group({name: weight}, preset("W4A16"), **told)[
                name
            ]
            linears[name].data.copy_(made.weight.dequantize())
        scores = [
            score(logits, logits_of(model)(window), window)
            for logits, window in zip(baseline, windows, strict=True)
        ]
        kld[algorithm] = float(join(scores).kld.mean())
    print(f"mean KL divergence in nats per token: {kld}")
    assert 0 < kld["hqq"] < kld["rtn"]
    assert 0 < kld["rtn_mse"] < kld["rtn"]
