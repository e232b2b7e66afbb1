"""Static inputs, and one scale per weight, on N cards: unified, the tensors are one process's."""

import json
import shutil
from pathlib import Path

import pytest
import safetensors.torch
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from quantflow.core.parallel import Workers
from quantflow.errors import InputError, IntegrityError, UsageError
from quantflow.exporting import export
from quantflow.exporting.job import ExportJob
from quantflow.exporting.proof_process import _prove_tensors
from quantflow.files.checkpoint import open_checkpoint
from quantflow.measuring import measure
from quantflow.measuring.job import MeasureJob
from quantflow.planning.recipe import Calibration, Measure, Override, Quantize
from quantflow.quantizing import quantize
from quantflow.quantizing.job import QuantizeJob
from quantflow.reporting.progress_line import ProgressLine
from quantflow.unifying import unify
from quantflow.unifying.job import UnifyJob
from tests.shared import slow_but

QUIET = ProgressLine(quiet=True)
EXAMPLE = Path(__file__).parents[3] / "examples" / "tiny-llama"
LARGEST = 448.0  # of e4m3fn


def entry(scheme: str, **options) -> Quantize:
    return Quantize(name="x", scheme=scheme, algorithm="rtn", transforms=(), **options)


def together(shards: Path, output: Path, **options) -> Path:
    return unify.run(UnifyJob(measurement=shards, output=output, **options), QUIET)


def layers(folder: Path) -> list[bytes]:
    found = [path.read_bytes() for path in sorted(folder.rglob("layers/*.safetensors"))]
    assert found
    return found


def tensors(folder: Path, layer: int = 0) -> dict[str, torch.Tensor]:
    found = safetensors.torch.load_file(folder / "layers" / f"{layer:05d}.safetensors")
    return {name.removeprefix(f"model.layers.{layer}."): tensor for name, tensor in found.items()}


@pytest.fixture(scope="module")
def model(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four heads, two kv heads.

    Card 1 of 4 has the largest query. Card 0's part of layer 0's o_proj and all of layer 1's
    down_proj are zeros: their scale is 1, and every other one is smaller.
    """
    folder = tmp_path_factory.mktemp("models") / "measured"
    torch.manual_seed(4)
    shape = {"vocab_size": 320, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}
    made = LlamaForCausalLM(LlamaConfig(**shape, **heads, initializer_range=0.1))
    with torch.no_grad():
        first, second = made.model.layers
        first.self_attn.q_proj.weight[20, 5] = 3.0
        first.self_attn.o_proj.weight[:, :16] = 0.0
        second.mlp.down_proj.weight.zero_()
    made.to(torch.bfloat16).save_pretrained(folder)
    for path in llama.glob("token*"):
        shutil.copy(path, folder)
    return folder


@pytest.fixture(scope="module")
def measured(model, text_files, tmp_path_factory) -> Path:
    calibration = Calibration(source=str(text_files["calibration"]), samples=8, sequence_length=64)
    folder = tmp_path_factory.mktemp("measured") / "m"
    return measure.run(MeasureJob(model=model, output=folder, calibration=calibration), QUIET)


def one(model: Path, output: Path, recipe: Quantize, measured: Path) -> Path:
    return quantize.run(
        QuantizeJob(model=model, output=output, entry=recipe, measurement=measured), QUIET
    )


@pytest.mark.parametrize(
    ("scheme", "ranks"),
    slow_but(
        [(scheme, ranks) for scheme in ("FP8", "W8A8_STATIC", "W8A16") for ranks in (2, 4)],
        ("FP8", 4),
        ("W8A8_STATIC", 2),
    ),
)
def test_shards_unified_hold_the_tensors_of_one_process(
    model, measured, tmp_path, cards, monkeypatch, scheme, ranks
):
    whole = one(model, tmp_path / "whole", entry(scheme), measured)
    # many units, cut at other rows than the cards'
    monkeypatch.setattr("quantflow.quantizing.weight_rows.UNIT", 1536)
    shards = cards(model, tmp_path / "shards", entry(scheme), ranks=ranks, measurement=measured)
    made = together(shards, tmp_path / "made")
    assert layers(made) == layers(whole)
    for name in ("00000.json", "00001.json"):
        expected, found = (
            json.loads((folder / "layers" / name).read_text()) for folder in (whole, made)
        )
        assert found["decisions"] == expected["decisions"]
        for linear, errors in expected["errors"].items():
            # float32 sums of other units
            assert found["errors"][linear]["weight"] == pytest.approx(errors["weight"], rel=1e-6)


@pytest.mark.slow
def test_the_artifacts_of_the_embedded_model_are_the_same_but_for_what_proved_them(
    text_files, tmp_path, cards
):
    calibration = Calibration(source=str(text_files["calibration"]), samples=4, sequence_length=64)
    job = MeasureJob(
        model=EXAMPLE,
        output=tmp_path / "m",
        calibration=calibration,
        options=Measure(stats=("amax",)),
    )
    measured = measure.run(job, QUIET)
    whole = one(EXAMPLE, tmp_path / "whole", entry("FP8"), measured)
    shards = cards(EXAMPLE, tmp_path / "shards", entry("FP8"), ranks=2, measurement=measured)
    made = together(shards, tmp_path / "made")
    ours, theirs = (
        export.run(ExportJob(source=path, output=path.with_suffix(".out")), QUIET)
        for path in (made, whole)
    )
    for name in ("model.safetensors", "config.json"):
        assert (ours / name).read_bytes() == (theirs / name).read_bytes()


def test_a_card_takes_the_scale_of_its_own_part_and_unify_the_largest(
    model, measured, tmp_path, cards
):
    shards = cards(model, tmp_path / "shards", entry("FP8"), ranks=4, measurement=measured)
    source = safetensors.torch.load_file(model / "model.safetensors")
    attention = "model.layers.0.self_attn"
    queries, keys, values = (
        source[f"{attention}.{name}_proj.weight"].float().abs() for name in "qkv"
    )
    scales = []
    for rank in range(4):
        own = slice(16 * rank, 16 * rank + 16)
        # the head of keys and values, which two cards hold
        shared = slice(16 * (rank // 2), 16 * (rank // 2) + 16)
        largest = max(float(part.max()) for part in (queries[own], keys[shared], values[shared]))
        found = tensors(shards / f"rank-{rank:03d}-of-004")
        scales += [float(found[f"self_attn.{name}_proj.weight_scale"]) for name in "qkv"]
        assert scales[-3:] == [float(torch.tensor(largest) / LARGEST)] * 3
    assert len(set(scales)) == 4
    made = tensors(together(shards, tmp_path / "made"))
    assert {float(made[f"self_attn.{name}_proj.weight_scale"]) for name in "qkv"} == {
        float(torch.tensor(3.0) / LARGEST)
    }
    rows = {row["linear"]: row for row in unify.summary(tmp_path / "made")["joined"]}
    # all rows but those of the card with the largest value
    assert rows[f"{attention}.q_proj"]["requantized"] == 48
    # of both heads the copies with the smaller scale are taken
    assert rows[f"{attention}.k_proj"]["requantized"] == 32


def test_a_part_of_zeros_has_no_say_in_the_scale(model, measured, tmp_path, cards):
    shards = cards(model, tmp_path / "shards", entry("FP8"), ranks=4, measurement=measured)
    assert tensors(shards / "rank-000-of-004")["self_attn.o_proj.weight_scale"].tolist() == [1.0]
    made = together(shards, tmp_path / "made")
    expected = safetensors.torch.load_file(model / "model.safetensors")[
        "model.layers.0.self_attn.o_proj.weight"
    ].float()
    assert tensors(made)["self_attn.o_proj.weight_scale"].tolist() == [
        float(expected.abs().max() / LARGEST)
    ]
    assert tensors(made, layer=1)["mlp.down_proj.weight_scale"].tolist() == [1.0]


@pytest.mark.slow
def test_four_shards_become_two_of_a_smaller_world(model, measured, tmp_path, cards):
    shards = cards(model, tmp_path / "four", entry("FP8"), ranks=4, measurement=measured)
    two = cards(model, tmp_path / "two", entry("FP8"), ranks=2, measurement=measured)
    made = together(shards, tmp_path / "made", groups=("01", "23"))
    assert layers(made) == layers(two)
    assert layers(together(made, tmp_path / "one")) == layers(
        one(model, tmp_path / "whole", entry("FP8"), measured)
    )


def test_linears_of_one_input_with_two_schemes_share_a_scale_within_each(
    model, measured, tmp_path, cards
):
    recipe = entry(
        "FP8",
        ignore=("re:.*up_proj",),
        overrides=(Override(match="re:.*q_proj", scheme="FP8_DYNAMIC"),),
    )
    whole = one(model, tmp_path / "whole", recipe, measured)
    shards = cards(model, tmp_path / "shards", recipe, ranks=2, measurement=measured)
    assert layers(together(shards, tmp_path / "made")) == layers(whole)


def test_a_foreign_or_missing_measurement_is_refused_by_every_rank(
    model, llama, measured, tmp_path, cards
):
    with pytest.raises(InputError, match=r"measured on model [0-9a-f]{16}"):
        cards(llama, tmp_path / "shards", entry("FP8"), ranks=2, only=(1,), measurement=measured)
    with pytest.raises(UsageError, match="FP8 with rtn needs amax, none is given"):
        cards(model, tmp_path / "shards", entry("FP8"), ranks=2, only=(0,))
    assert not list(tmp_path.rglob("*.safetensors"))


@pytest.mark.parametrize("key", ["q_proj.input_scale", "o_proj.weight_scale"])
def test_the_proof_sees_another_scale(model, measured, tmp_path, cards, key):
    shards = cards(model, tmp_path / "shards", entry("FP8"), ranks=2, measurement=measured)
    made = together(shards, tmp_path / "made")
    artifact = export.run(ExportJob(source=made, output=tmp_path / "out"), QUIET)
    path = artifact / "model.safetensors"
    stored = safetensors.torch.load_file(path)
    stored[f"model.layers.1.self_attn.{key}"] *= 2
    safetensors.torch.save_file(stored, path)
    with (
        Workers(1) as workers,
        pytest.raises(
            IntegrityError, match=rf"layers\.1\.self_attn\.{key[:6]}: .* decodes to values"
        ),
    ):
        _prove_tensors(open_checkpoint(artifact), made, workers=workers)
