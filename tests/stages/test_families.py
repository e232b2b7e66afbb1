"""Every supported family through every stage.

All runs in this process but for the proof, which is a process of its own.
"""

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors import safe_open
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, RwkvConfig, XLMConfig

from quantflow.errors import GateError, UnsupportedError
from quantflow.exporting import export
from quantflow.exporting.job import ExportJob
from quantflow.files.verify import verify
from quantflow.measuring import measure
from quantflow.measuring.job import MeasureJob
from quantflow.planning.recipe import Calibration, Quantize, Validate
from quantflow.quantizing import quantize
from quantflow.quantizing.job import QuantizeJob
from quantflow.reporting.progress_line import ProgressLine
from quantflow.runtime.load import load
from quantflow.validating import validate
from quantflow.validating.job import ValidateJob
from quantflow.validating.verdict import raise_for_verdict

QUIET = ProgressLine(quiet=True)
LAX = {"ppl_ratio": 1e9, "mean_kld": 1e9, "kld_p999": 1e9, "top1_agreement": 0.0}
# Of one decoder layer; mixtures: attention, four experts of three linears each, a shared expert.
LINEARS = {
    "llama": 7,
    "mistral": 7,
    "qwen2": 7,
    "qwen3": 7,
    "gpt_neox": 4,
    "mixtral": 16,
    "qwen2_moe": 19,
    "qwen3_moe": 16,
    "olmoe": 16,
    **dict.fromkeys(
        ("bloom", "codegen", "falcon", "falcon new", "falcon alibi", "gpt_bigcode", "mpt", "phi3"),
        4,
    ),
    **dict.fromkeys(("gptj", "opt", "phi", "starcoder2"), 6),
    **dict.fromkeys(
        ("cohere", "gemma", "gemma2", "gemma3", "granite", "olmo2", "smollm3", "stablelm"), 7
    ),
}

Entry = dict[str, Any]
FP8 = {"scheme": "FP8"}
FP8_DYNAMIC = {"scheme": "FP8_DYNAMIC"}
FP8_BLOCK = {"scheme": "FP8_BLOCK", "group_size": 32}
W8A8 = {"scheme": "W8A8"}
W8A8_STATIC = {"scheme": "W8A8_STATIC", "transforms": ({"smoothquant": {"alpha": 0.5}},)}
W8A16 = {"scheme": "W8A16"}
W4A16 = {"scheme": "W4A16", "algorithm": "gptq", "group_size": 32}
W4A16_ASYM = {"scheme": "W4A16_ASYM", "algorithm": "gptq", "group_size": 32}
W4A8 = {"scheme": "W4A8", "algorithm": "gptq", "group_size": 32}
W3A16_ASYM = {"scheme": "W3A16_ASYM", "algorithm": "gptq", "group_size": 32}

SLOW = (  # of the families in no table
    *(
        "bloom",
        "codegen",
        "cohere",
        "falcon new",
        "falcon alibi",
        "gemma",
        "gemma3",
        "gpt_bigcode",
        "gptj",
        "granite",
        "mpt",
    ),
    *("olmo2", "opt", "phi3", "smollm3", "stablelm", "starcoder2"),
)

# Largest ||logits - source logits|| / ||source logits|| that a scheme may cost: measured, and about
# half as much again. These random models amplify errors far more than trained ones do; a mistaken
# name, axis or scale gives more than 1.
COMBINATIONS = [
    ("llama", W4A16, 0.6),
    ("llama", FP8, 0.25),
    ("llama", W8A8_STATIC, 0.15),
    ("llama", W4A8, 0.6),
    ("llama", FP8_BLOCK, 0.15),
    ("llama", W3A16_ASYM, 0.95),
    ("mistral", W4A16_ASYM, 0.6),
    ("mistral", FP8, 0.25),
    ("qwen2", W4A16, 0.6),
    ("qwen2", FP8, 0.25),
    ("qwen2", W8A16, 0.05),
    ("qwen3", W4A16, 0.6),
    ("qwen3", FP8, 0.25),
    ("qwen3", W8A8, 0.08),
    ("gpt_neox", W4A16, 0.6),
    ("gpt_neox", FP8, 0.25),
    ("gpt_neox", W8A8_STATIC, 0.15),
    ("gpt_neox", FP8_DYNAMIC, 0.15),
    ("mixtral", {**W4A16, "experts": "rtn", "expert_tokens": 16}, 0.6),
    ("mixtral", {**FP8, "experts": "share_max"}, 0.3),
    ("qwen2_moe", {**W4A16_ASYM, "experts": "all"}, 0.6),
    ("qwen3_moe", {**W4A16, "experts": "rtn", "expert_tokens": 16}, 0.6),
    ("qwen3_moe", W8A8, 0.15),
    ("olmoe", {**W4A16, "experts": "all"}, 0.6),
    ("olmoe", FP8_DYNAMIC, 0.3),
    ("phi", W8A8_STATIC, 0.09),
    ("gemma2", W4A16, 0.4),
    ("falcon", FP8, 0.1),
    *((family, W4A16, 0.6) for family in SLOW),
    *((family, W8A8_STATIC, 0.17) for family in SLOW),
]


class Stored(NamedTuple):
    """What the safetensors library itself says about a tensor."""

    tensor: Tensor
    nbytes: int


def read_folder(folder: Path) -> dict[str, Stored]:
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as shard:
            for name in shard.keys():  # noqa: SIM118 - not a mapping
                tensor = shard.get_tensor(name)
                found[name] = Stored(tensor=tensor, nbytes=tensor.numel() * tensor.element_size())
    return found


def take_measurement(model: Path, folder: Path, text: Path) -> Path:
    calibration = Calibration(source=str(text), samples=8, sequence_length=64)
    return measure.run(MeasureJob(model=model, output=folder, calibration=calibration), QUIET)


def make_artifact(model: Path, measurement: Path, folder: Path, entry: Entry) -> Path:
    words = Quantize(name="small", **entry)
    job = QuantizeJob(
        model=model, output=folder / "quantized", entry=words, measurement=measurement
    )
    quantized = quantize.run(job, QUIET)
    return export.run(ExportJob(source=quantized, output=folder / "artifact"), QUIET)


def judge(model: Path, artifact: Path, text: Path, thresholds: dict[str, float]) -> dict[str, Any]:
    gate = artifact.parent / "gate.yaml"
    gate.write_text(f"thresholds: {json.dumps(thresholds)}\n")
    options = Validate(text=str(text), tokens=256, sequence_length=64, gate=str(gate))
    report = artifact.parent / f"report-{thresholds['mean_kld']}"
    return validate.run(
        ValidateJob(artifact=artifact, baseline=model, report=report, options=options),
        QUIET,
    )


def logits_from_transformers(model: Path, tokens: Tensor) -> Tensor:
    with torch.no_grad():
        return AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)(tokens).logits


@pytest.fixture(scope="session")
def measurement_of(
    family_model: Callable[[str], Path],
    text_files: dict[str, Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[str], Path]:
    """Return the measurement of a family, taken once."""
    taken: dict[str, Path] = {}

    def take(family: str) -> Path:
        if family not in taken:
            folder = tmp_path_factory.mktemp("measurements") / family
            taken[family] = take_measurement(
                family_model(family), folder, text_files["calibration"]
            )
        return taken[family]

    return take


@pytest.fixture(scope="session")
def artifact_of(
    family_model: Callable[[str], Path],
    measurement_of: Callable[[str], Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[str, Entry], Path]:
    """The artifact of a family and a scheme, made once.

    The process that proves it takes seconds to start.
    """
    made: dict[tuple[str, str], Path] = {}

    def make(family: str, entry: Entry) -> Path:
        key = (family, entry["scheme"])
        if key not in made:
            folder = tmp_path_factory.mktemp("artifacts")
            made[key] = make_artifact(family_model(family), measurement_of(family), folder, entry)
        return made[key]

    return make


def check_ledger(model: Path, artifact: Path, *, quantized: int) -> None:
    source, written = read_folder(model), read_folder(artifact)
    entries = json.loads((artifact / "quantflow.json").read_text())["ledger"]["tensors"]
    assert sorted(entry["name"] for entry in entries) == sorted(source)
    assert sum(entry["nbytes"] for entry in entries) == sum(
        stored.nbytes for stored in source.values()
    )
    assert {entry["name"]: entry["nbytes"] for entry in entries} == {
        name: item.nbytes for name, item in source.items()
    }
    assert sorted(name for entry in entries for name in entry["becomes"]) == sorted(written)
    assert sum(entry["action"] == "quantized" for entry in entries) == quantized
    for entry in entries:
        if entry["action"] == "copied":
            assert torch.equal(written[entry["name"]].tensor, source[entry["name"]].tensor), entry[
                "name"
            ]


def relative_difference(model: Path, artifact: Path) -> float:
    tokens = torch.randint(2, 300, (1, 64), generator=torch.Generator().manual_seed(3))
    expected = logits_from_transformers(model, tokens)
    with torch.no_grad():
        found = load(artifact, backend="reference").model(tokens).logits
    return float((found - expected).norm() / expected.norm())


# of each family; the others are slow
FIRST = {family: entry for family, entry, _ in reversed(COMBINATIONS)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "entry", "bound"),
    [
        pytest.param(
            *case,
            id=f"{case[0]}-{case[1]['scheme']}",
            marks=[pytest.mark.slow]
            * (case[0] in SLOW or (case[1] is not FIRST[case[0]] and case[0] != "llama")),
        )
        for case in COMBINATIONS
    ],
)
def test_a_family_goes_through_every_stage(
    family: str,
    entry: Entry,
    bound: float,
    family_model: Callable[[str], Path],
    artifact_of: Callable[[str, Entry], Path],
    text_files: dict[str, Path],
) -> None:
    model, artifact = family_model(family), artifact_of(family, entry)
    verify(artifact)
    check_ledger(model, artifact, quantized=2 * LINEARS[family])
    manifest = json.loads((artifact / "quantflow.json").read_text())
    assert manifest["proof"]["kind"] == "canary"
    assert manifest["proof"]["layers"] == 2
    difference = relative_difference(model, artifact)
    print(f"{family} {entry['scheme']}: {difference:.4f}")
    assert 0 < difference < bound
    result = judge(model, artifact, text_files["heldout"], LAX)
    assert result["outcome"] == "pass"
    assert result["digest"] == manifest["digest"]
    assert all(math.isfinite(metric["value"]) for metric in result["metrics"].values())


def test_a_gate_that_nothing_meets_fails_with_exit_code_4(
    family_model: Callable[[str], Path],
    artifact_of: Callable[[str, Entry], Path],
    text_files: dict[str, Path],
) -> None:
    result = judge(
        family_model("llama"),
        artifact_of("llama", W8A8_STATIC),
        text_files["heldout"],
        {**LAX, "mean_kld": 0.0},
    )
    assert result["outcome"] == "fail"
    with pytest.raises(GateError, match="mean_kld") as caught:
        raise_for_verdict(result, allow_inconclusive=False)
    assert caught.value.exit_code == 4


def test_the_tensors_of_gpt_neox_keep_the_names_of_the_source(
    family_model: Callable[[str], Path], artifact_of: Callable[[str, Entry], Path]
) -> None:
    artifact = artifact_of("gpt_neox", W8A8_STATIC)
    written = read_folder(artifact)
    assert torch.equal(
        written["embed_out.weight"].tensor,
        read_folder(family_model("gpt_neox"))["embed_out.weight"].tensor,
    )
    assert written["gpt_neox.layers.1.attention.query_key_value.weight"].tensor.dtype == torch.int8
    assert "gpt_neox.layers.1.attention.query_key_value.bias" in written
    config = json.loads((artifact / "config.json").read_text())["quantization_config"]
    assert "embed_out" in config["ignore"]


def write_variant(folder: Path, tokenizer_of: Path, dtype: torch.dtype, *, tied: bool) -> Path:
    """Write a one-layer Llama with the tokenizer of another model."""
    torch.manual_seed(1)
    shape = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
    }
    config = LlamaConfig(
        vocab_size=320,
        **shape,
        num_key_value_heads=2,
        max_position_embeddings=128,
        bos_token_id=0,
        eos_token_id=1,
        tie_word_embeddings=tied,
        initializer_range=0.1,
    )
    AutoModelForCausalLM.from_config(config).to(dtype).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(tokenizer_of / name, folder / name)
    return folder


def test_a_tied_head_stays_one_tensor(
    llama: Path, text_files: dict[str, Path], tmp_path: Path
) -> None:
    model = write_variant(tmp_path / "model", llama, torch.bfloat16, tied=True)
    assert "lm_head.weight" not in read_folder(model)
    measurement = take_measurement(model, tmp_path / "measured", text_files["calibration"])
    artifact = make_artifact(model, measurement, tmp_path, W4A16)
    assert "lm_head.weight" not in read_folder(artifact)
    assert json.loads((artifact / "config.json").read_text())["tie_word_embeddings"] is True
    check_ledger(model, artifact, quantized=7)
    runtime = load(artifact)
    assert runtime.model.lm_head.weight is runtime.model.model.embed_tokens.weight
    assert relative_difference(model, artifact) < 0.5
    assert judge(model, artifact, text_files["heldout"], LAX)["outcome"] == "pass"


def test_a_float32_source_keeps_float32_where_it_is_not_quantized(
    llama: Path, text_files: dict[str, Path], tmp_path: Path
) -> None:
    model = write_variant(tmp_path / "model", llama, torch.float32, tied=False)
    measurement = take_measurement(model, tmp_path / "measured", text_files["calibration"])
    artifact = make_artifact(model, measurement, tmp_path, W4A16)
    written = read_folder(artifact)
    scale = written["model.layers.0.mlp.down_proj.weight_scale"].tensor
    assert (scale.dtype, list(scale.shape)) == (torch.float32, [64, 3])  # 96 inputs in groups of 32
    assert written["model.norm.weight"].tensor.dtype == torch.float32
    check_ledger(model, artifact, quantized=7)
    assert relative_difference(model, artifact) < 0.5
    assert judge(model, artifact, text_files["heldout"], LAX)["outcome"] == "pass"


@pytest.mark.parametrize(
    ("config", "name"),
    [
        (XLMConfig(vocab_size=64, emb_dim=16, n_layers=2, n_heads=2), "xlm"),
        (RwkvConfig(vocab_size=64, hidden_size=16, num_hidden_layers=2, context_length=64), "rwkv"),
    ],
    ids=["xlm", "rwkv"],
)
def test_an_unsupported_family_is_refused_by_its_name(
    config: Any, name: str, text_files: dict[str, Path], tmp_path: Path
) -> None:
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    job = QuantizeJob(
        model=tmp_path / "model", output=tmp_path / "out", entry=Quantize(name="x", scheme="W8A16")
    )
    with pytest.raises(UnsupportedError, match=name) as caught:
        quantize.run(job, QUIET)
    assert caught.value.exit_code == 6
    with pytest.raises(UnsupportedError, match=name):
        take_measurement(tmp_path / "model", tmp_path / "measured", text_files["calibration"])
    assert not (tmp_path / "out").exists()
