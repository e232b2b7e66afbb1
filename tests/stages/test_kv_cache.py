"""A quantized cache from the measurement to the verdict."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, DynamicCache

from quantflow.errors import (
    IntegrityError,
    QuantflowError,
    StatisticsError,
    UnsupportedError,
    UsageError,
)
from quantflow.exporting import export
from quantflow.exporting.job import ExportJob
from quantflow.files.inspect import summarize
from quantflow.files.manifest import read_manifest
from quantflow.files.verify import verify
from quantflow.measuring import measure
from quantflow.measuring.job import MeasureJob
from quantflow.measuring.record import read_measurement
from quantflow.planning.plan_job import PlanJob
from quantflow.planning.recipe import (
    Calibration,
    Candidate,
    KVCacheSettings,
    Measure,
    Quantize,
    Recipe,
    Validate,
    kv_cache_flag,
    read_yaml,
    recipe_from,
)
from quantflow.quantizing import quantize
from quantflow.quantizing.job import QuantizeJob
from quantflow.reporting.progress_line import ProgressLine
from quantflow.runtime.artifact import open_artifact
from quantflow.runtime.load import load
from quantflow.runtime.offload import load_offloaded
from quantflow.stages.cli import cli
from quantflow.stages.cli.output import exit_code
from quantflow.validating import validate
from quantflow.validating.job import ValidateJob
from tests.shared import run, slow_but

QUIET = ProgressLine(quiet=True)
ATTENTION = "model.layers.{}.self_attn"
CACHES = [
    KVCacheSettings(scheme=s, granularity=g)
    for s in ("FP8", "INT8")
    for g in ("per_tensor", "per_head")
]


EACH = pytest.mark.parametrize(
    "cache",
    slow_but(CACHES, CACHES[0], CACHES[3]),
    ids=lambda cache: f"{cache.scheme} {cache.granularity}",
)


@pytest.fixture(scope="module")
def made(llama: Path, measured_family: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a function that makes an artifact, once."""
    found: dict[KVCacheSettings | None, tuple[Path, Path]] = {}

    def make(cache: KVCacheSettings | None) -> tuple[Path, Path]:
        if cache not in found:
            folder = tmp_path_factory.mktemp("kv")
            entry = Quantize(name="x", scheme="W8A8", kv_cache=cache)
            job = QuantizeJob(
                model=llama, output=folder / "q", entry=entry, measurement=measured_family("llama")
            )
            quantized = quantize.run(job, QUIET)
            found[cache] = (
                quantized,
                export.run(ExportJob(source=quantized, output=folder / "artifact"), QUIET),
            )
        return found[cache]

    return make


def caches_of(
    model: Path, sequences: list[torch.Tensor]
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The largest key and value of each head of each layer, from transformers' own cache."""
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    seen = []
    for sequence in sequences:
        cache = DynamicCache(config=loaded.config)
        with torch.no_grad():
            loaded(sequence[None], past_key_values=cache, use_cache=True)
        seen.append(
            [
                (layer.keys[0].abs().amax((1, 2)), layer.values[0].abs().amax((1, 2)))
                for layer in cache.layers
            ]
        )
    return [
        tuple(torch.stack(part).amax(0) for part in zip(*layers, strict=True))
        for layers in zip(*seen, strict=True)
    ]


def test_measure_sees_each_head_as_transformers_caches_it(
    llama: Path, measured_family: Any
) -> None:
    measurement = read_measurement(measured_family("llama") / "rank-000-of-001")
    for index, (keys, values) in enumerate(caches_of(llama, measurement.sequences)):
        for site, expected in (("k", keys), ("v", values)):
            heads = measurement.statistics[f"{ATTENTION.format(index)}|{site}_heads|channel_amax"]
            assert torch.allclose(heads, expected, rtol=1e-5) and len(set(heads.tolist())) == 2
            assert (
                measurement.statistics[f"{ATTENTION.format(index)}|{site}_cache|amax"]
                == heads.max()
            )


@EACH
def test_an_artifact_holds_the_scales_of_what_was_measured(
    cache: KVCacheSettings, made: Any, measured_family: Any
) -> None:
    statistics = read_measurement(measured_family("llama") / "rank-000-of-001").statistics
    _, artifact = made(cache)
    tensors = load_file(artifact / "model.safetensors")
    half_range = {"FP8": 448, "INT8": 127.5}[cache.scheme]
    for layer in (0, 1):
        for site in ("k", "v"):
            heads = statistics[f"{ATTENTION.format(layer)}|{site}_heads|channel_amax"].double()
            expected = (
                heads.max().reshape(1)
                if cache.granularity == "per_tensor"
                else heads.reshape(2, 1, 1)
            )
            scale = tensors[f"{ATTENTION.format(layer)}.{site}_scale"]
            assert scale.dtype == torch.float32 and scale.shape == expected.shape
            assert torch.allclose(scale.double(), expected / half_range, rtol=1e-6)
    config = json.loads((artifact / "config.json").read_text())["quantization_config"][
        "kv_cache_scheme"
    ]
    assert (
        config["strategy"] == {"per_tensor": "tensor", "per_head": "attn_head"}[cache.granularity]
    )
    assert (config["type"], config["num_bits"]) == (
        {"FP8": "float", "INT8": "int"}[cache.scheme],
        8,
    )


def test_weights_are_those_of_the_artifact_without(made: Any) -> None:
    plain, cached = (load_file(made(cache)[1] / "model.safetensors") for cache in (None, CACHES[1]))
    added = {f"{ATTENTION.format(layer)}.{site}_scale" for layer in (0, 1) for site in ("k", "v")}
    assert cached.keys() - plain.keys() == added and plain.keys() <= cached.keys()
    assert all(
        torch.equal(plain[name].view(torch.uint8), cached[name].view(torch.uint8)) for name in plain
    )


def test_ledger_manifest_inspect_and_card_name_them(made: Any) -> None:
    _, artifact = made(CACHES[1])
    manifest = read_manifest(artifact)
    names = [f"{ATTENTION.format(layer)}.{site}_scale" for layer in (0, 1) for site in ("k", "v")]
    assert manifest["ledger"]["measured"] == names
    assert manifest["recipe"]["kv_cache"] == {"scheme": "FP8", "granularity": "per_head"}
    assert manifest["float8"] == {"flavour": "e4m3fn", "largest": 448.0}
    assert [len(layer["kv_cache"]["k_amax"]) for layer in manifest["layers"]] == [2, 2]
    assert verify(artifact)["tensors"] == len(load_file(artifact / "model.safetensors"))
    found = summarize(artifact)
    assert (found["kv_cache"], found["measured_tensors"]) == ("float8 attn_head", 4)
    assert (
        "| keys and values | FP8 per_head, scales measured" in (artifact / "README.md").read_text()
    )
    _, plain = made(None)
    assert (
        "measured" not in read_manifest(plain)["ledger"]
        and "keys and values" not in (plain / "README.md").read_text()
    )


@EACH
def test_plan_counts_the_tensors(cache: KVCacheSettings, made: Any, llama: Path) -> None:
    _, artifact = made(cache)
    entry = Quantize(name="x", scheme="W8A8", kv_cache=cache)
    (found,) = PlanJob(recipe=Recipe(model=str(llama), quantize=(entry,))).run()["artifacts"]
    assert found["tensor_bytes"] == verify(artifact)["tensor_bytes"]
    assert found["kv_cache"] == f"{cache.scheme} {cache.granularity}"


class Rounding(DynamicCache):
    """The reference formula in float64 arithmetic, with torch's own float8."""

    def __init__(self, config: Any, tensors: dict[str, torch.Tensor], scheme: str) -> None:
        super().__init__(config=config)
        self.tensors, self.scheme = tensors, scheme

    def _round(self, x: torch.Tensor, name: str) -> torch.Tensor:
        scale = self.tensors[name]
        ratio = x / scale
        if self.scheme == "FP8":
            return ratio.clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale
        return ratio.round().clamp(-128, 127) * scale

    def update(
        self, key_states: Any, value_states: Any, layer_idx: int, *args: Any, **kwargs: Any
    ) -> Any:
        rounded = [
            self._round(x, f"{ATTENTION.format(layer_idx)}.{site}_scale")
            for site, x in (("k", key_states), ("v", value_states))
        ]
        return super().update(*rounded, layer_idx, *args, **kwargs)


def divergence(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    p, q = p.double().log_softmax(-1), q.double().log_softmax(-1)
    return (p.exp() * (p - q)).sum(-1)


@EACH
def test_validate_measures_the_model_with_its_cache_quantized(
    cache: KVCacheSettings, made: Any, llama: Path, text_files: dict[str, Path], tmp_path: Path
) -> None:
    _, artifact = made(cache)
    options = Validate(text=str(text_files["heldout"]), tokens=600, sequence_length=40)
    job = ValidateJob(
        artifact=artifact,
        baseline=llama,
        report=tmp_path / "r",
        options=options,
        cache=tmp_path / "n",
    )
    result = validate.run(job, QUIET)
    assert result["kv_cache"] == f"{cache.scheme} {cache.granularity}"
    model = load(artifact, backend="reference").model
    source = AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float32)
    tensors = load_file(artifact / "model.safetensors")
    found, plain = [], []
    for sequence in validate._sequences(job, read_manifest(artifact), QUIET):
        with torch.no_grad():
            expected = source(sequence[None]).logits[0, :-1]
            rounding = Rounding(model.config, tensors, cache.scheme)
            found.append(
                divergence(expected, model(sequence[None], past_key_values=rounding).logits[0, :-1])
            )
            plain.append(divergence(expected, model(sequence[None]).logits[0, :-1]))
    value = result["metrics"]["mean_kld"]["value"]
    assert value == pytest.approx(torch.cat(found).mean().item(), rel=1e-4)
    assert value != pytest.approx(torch.cat(plain).mean().item(), rel=1e-3)


@EACH
@pytest.mark.parametrize("decoder", ["lean", "transformers"])
def test_both_decoders_keep_the_cache_as_the_artifact_says(
    cache: KVCacheSettings, decoder: str, made: Any
) -> None:
    _, artifact = made(cache)
    ids = torch.randint(3, 320, (1, 40), generator=torch.Generator().manual_seed(1))
    model = load(artifact, backend="reference").model
    rounding = Rounding(model.config, load_file(artifact / "model.safetensors"), cache.scheme)
    loaded = load(artifact, decoder=decoder, backend="reference")
    loaded.decoder.begin(rows=1, capacity=40)
    with torch.no_grad():
        plain = model(ids).logits[0]
        expected = model(ids, past_key_values=rounding, use_cache=True).logits[0]
        steps = [loaded.decoder.forward(ids[:, :30], last_only=False)[0]]
        steps += [loaded.decoder.forward(ids[:, at : at + 1]) for at in range(30, 40)]
    found = torch.cat(steps)
    assert loaded.name == decoder
    # Inputs are quantized too: another order of a sum can move one over a rounding boundary.
    assert (found - expected).norm() < 0.5 * (plain - expected).norm()


def test_an_explicit_kind_wins_over_the_artifact(made: Any) -> None:
    _, artifact = made(CACHES[0])
    kinds = {}
    for kind in ("auto", "float32", "float8", "int8"):
        decoder: Any = load(artifact, decoder="auto", kv_cache=kind, backend="reference").decoder
        decoder.begin(rows=1, capacity=8)
        kinds[kind] = (
            decoder.cache.kind,
            len(decoder.cache.key_steps),
            len(decoder.cache.key_scales),
        )
    assert kinds == {
        "auto": ("float8", 2, 0),
        "float32": ("float32", 0, 0),
        "float8": ("float8", 0, 0),
        "int8": ("int8", 0, 2),
    }


def test_a_changed_scale_is_noticed_by_the_canary(made: Any, tmp_path: Path) -> None:
    """The proof runs with the cache quantized, so a wrong scale changes what the layers compute."""
    from quantflow.exporting.canary import prove_canary

    quantized, artifact = made(CACHES[0])
    copy = shutil.copytree(artifact, tmp_path / "copy")
    prove_canary(copy, quantized)
    tensors = load_file(copy / "model.safetensors")
    tensors[f"{ATTENTION.format(1)}.v_scale"] *= 1.5
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(IntegrityError, match="layer 1: the artifact computes"):
        prove_canary(copy, quantized)


def test_a_missing_scale_and_one_that_nothing_asks_for_are_refused(
    made: Any, tmp_path: Path
) -> None:
    _, artifact = made(CACHES[0])
    copy = shutil.copytree(artifact, tmp_path / "copy")
    tensors = load_file(copy / "model.safetensors")
    del tensors[f"{ATTENTION.format(1)}.v_scale"]
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        QuantflowError,
        match=r"self_attn.v_scale: its cache's scheme needs it, it is not in the artifact",
    ):
        open_artifact(copy, verify=False)
    again = shutil.copytree(artifact, tmp_path / "again")
    config = json.loads((again / "config.json").read_text())
    config["quantization_config"]["kv_cache_scheme"] = None
    (again / "config.json").write_text(json.dumps(config))
    with pytest.raises(QuantflowError, match="k_scale"):
        open_artifact(again, verify=False)


def entry_with(**changes: Any) -> Quantize:
    return Quantize(**{"name": "x", "scheme": "W8A8", "kv_cache": CACHES[1], **changes})


def test_resuming_with_another_cache_makes_the_layers_again(
    llama: Path, measured_family: Any, tmp_path: Path
) -> None:
    job = QuantizeJob(
        model=llama, output=tmp_path / "q", entry=entry_with(), measurement=measured_family("llama")
    )
    quantize.run(job, QUIET)
    first = (tmp_path / "q" / "layers" / "00000.safetensors").read_bytes()
    (tmp_path / "q" / "DONE.json").unlink()
    (tmp_path / "q" / "layers" / "00001.json").unlink()
    quantize.run(job, QUIET)  # stopped after a layer: the first is read back, with its scales
    assert (tmp_path / "q" / "layers" / "00000.safetensors").read_bytes() == first
    export.run(ExportJob(source=tmp_path / "q", output=tmp_path / "artifact"), QUIET)
    other = replace(job, entry=entry_with(kv_cache=CACHES[0]))
    with pytest.raises(UsageError, match="kv_cache"):
        quantize.run(other, QUIET)
    quantize.run(replace(other, force=True), QUIET)
    assert load_file(tmp_path / "q" / "layers" / "00000.safetensors")[
        f"{ATTENTION.format(0)}.k_scale"
    ].shape == (1,)


def test_without_a_measurement_it_says_what_to_run(llama: Path, tmp_path: Path) -> None:
    job = QuantizeJob(model=llama, output=tmp_path / "q", entry=entry_with(scheme="FP8_DYNAMIC"))
    with pytest.raises(
        UsageError,
        match=r"FP8_DYNAMIC with rtn needs the largest keys and values of the cache, none is given",
    ):
        quantize.run(job, QUIET)
    assert not (tmp_path / "q").exists()


def test_a_measurement_of_no_layers_or_from_before_says_what_to_run(
    llama: Path, text_files: dict[str, Path], tmp_path: Path
) -> None:
    calibration = Calibration(source=str(text_files["calibration"]), samples=2, sequence_length=16)
    bare = measure.run(
        MeasureJob(
            model=llama, output=tmp_path / "m", calibration=calibration, options=Measure(stats=())
        ),
        QUIET,
    )
    for cache, key in ((CACHES[0], r"k_cache\|amax"), (CACHES[1], r"k_heads\|channel_amax")):
        entry = entry_with(scheme="W8A16", kv_cache=cache)
        job = QuantizeJob(model=llama, output=tmp_path / "q", entry=entry, measurement=bare)
        message = (
            rf"layers.0.self_attn\|{key}: the measurement does not hold it.*; "
            "run `quantflow measure` again with --stats"
        )
        with pytest.raises(StatisticsError, match=message):
            quantize.run(job, QUIET)
    assert not (tmp_path / "q").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"transforms": ({"smoothquant": {"linears": True}},)},
            r"with smoothquant, which changes the values .*linears: true",
        ),
        (
            {"scheme": "W4A16", "group_size": 32, "transforms": ({"awq": {}},)},
            r"with awq.*; write awq: \{linears: false\}",
        ),
        (
            {"scheme": "W8A16", "transforms": ({"hadamard": {}},)},
            r"with hadamard.*; write hadamard: \{heads: false\}",
        ),
        (
            {"scheme": "FP8", "float8": "gaudi2"},
            r"kv_cache FP8 per_head with float8=gaudi2; use INT8, or leave float8 out",
        ),
    ],
)
def test_what_makes_other_values_than_were_measured_is_refused(
    changes: dict[str, Any], message: str, llama: Path, measured_family: Any, tmp_path: Path
) -> None:
    entry = entry_with(**changes)
    job = QuantizeJob(
        model=llama, output=tmp_path / "q", entry=entry, measurement=measured_family("llama")
    )
    with pytest.raises(UsageError, match=message):
        quantize.run(job, QUIET)


def test_a_rotation_that_leaves_heads_alone_goes_with_it(
    llama: Path, measured_family: Any, tmp_path: Path
) -> None:
    entry = entry_with(scheme="W8A16", transforms=({"hadamard": {"heads": False}},))
    job = QuantizeJob(
        model=llama, output=tmp_path / "q", entry=entry, measurement=measured_family("llama")
    )
    quantized = quantize.run(job, QUIET)
    # with its proof
    export.run(ExportJob(source=quantized, output=tmp_path / "artifact"), QUIET)


def test_several_cards_and_an_attention_that_no_loader_knows_are_refused(
    llama: Path, measured_family: Any, family_model: Any, tmp_path: Path
) -> None:
    job = QuantizeJob(
        model=llama,
        output=tmp_path / "q",
        entry=entry_with(),
        measurement=measured_family("llama"),
        ranks=2,
    )
    with pytest.raises(
        UsageError, match=r"kv_cache FP8 per_head with --ranks 2; quantize with one process"
    ):
        quantize.run(job, QUIET)
    job = QuantizeJob(
        model=family_model("gpt_neox"), output=tmp_path / "q", entry=entry_with(scheme="W8A16")
    )
    with pytest.raises(
        UnsupportedError,
        match=r"kv_cache FP8 per_head of a gpt_neox, whose keys and values come from one",
    ):
        quantize.run(job, QUIET)


@pytest.mark.parametrize("family", slow_but(["qwen3", "mixtral"], "qwen3"))
def test_norms_over_heads_and_mixtures_have_caches_too(
    family: str, measured_family: Any, family_model: Any, tmp_path: Path
) -> None:
    entry = entry_with(scheme="FP8_DYNAMIC")
    job = QuantizeJob(
        model=family_model(family),
        output=tmp_path / "q",
        entry=entry,
        measurement=measured_family(family),
    )
    artifact = export.run(
        ExportJob(source=quantize.run(job, QUIET), output=tmp_path / "artifact"), QUIET
    )
    assert len(read_manifest(artifact)["ledger"]["measured"]) == 4


def test_the_flag_and_the_recipe_mean_the_same() -> None:
    assert kv_cache_flag("FP8") == {"scheme": "FP8"} and kv_cache_flag(None) is None
    assert kv_cache_flag("INT8:per_head") == {"scheme": "INT8", "granularity": "per_head"}
    recipe = recipe_from(
        {
            "model": "m",
            "quantize": [{"name": "a", "scheme": "W8A8", "kv_cache": {"scheme": "INT8"}}],
        }
    )
    assert recipe.quantize[0].kv_cache == KVCacheSettings(scheme="INT8", granularity="per_tensor")


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("FP6", "kv_cache: scheme='FP6'"),
        ("FP8:per_token", "kv_cache: granularity='per_token'"),
        ("FP8:", "granularity=''"),
    ],
)
def test_a_misspelt_flag_is_two_lines_and_exit_2(
    flag: str, message: str, llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [
        "quantize",
        str(llama),
        "-o",
        str(tmp_path / "q"),
        "--scheme",
        "W8A8",
        "--kv-cache",
        flag,
    ]
    assert exit_code(cli, given) == 2
    told = capsys.readouterr().err.splitlines()
    assert len(told) == 2 and message in told[0] and "valid: " in told[1]


def test_measuring_for_a_recipe_with_a_cache_runs_the_layers() -> None:
    from quantflow.planning.requirements import statistics_for

    assert statistics_for([Quantize(name="x", scheme="W4A16")]) == ()
    assert statistics_for([Quantize(name="x", scheme="W4A16", kv_cache=CACHES[0])]) == ("amax",)


def test_weights_on_disk_run_with_the_same_cache(made: Any) -> None:
    _, artifact = made(CACHES[3])
    ids = torch.randint(3, 320, (1, 12), generator=torch.Generator().manual_seed(2))
    found = []
    for opened in (load, load_offloaded):
        decoder = opened(artifact).decoder
        decoder.begin(rows=1, capacity=12)
        found.append(decoder.forward(ids, last_only=False))
    plain = load(artifact).model(ids).logits
    assert torch.equal(*found) and not torch.allclose(found[0], plain, rtol=1e-4)


def test_gaudis_files_give_one_scale_of_a_cache_and_none_of_a_head(
    llama: Path, measured_family: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = str(tmp_path / "gaudi")
    assert (
        run(
            "export",
            measured_family("llama"),
            "-o",
            folder,
            "--format",
            "inc",
            "--device",
            "gaudi2",
        )
        == 0
    )
    given = (
        "quantize",
        llama,
        "--scheme",
        "FP8",
        "--measurement",
        f"{folder}/hqt_output",
        "--kv-cache",
    )
    assert run(*given, "INT8", "-o", tmp_path / "q") == 0
    statistics = read_measurement(measured_family("llama") / "rank-000-of-001").statistics
    for layer in (0, 1):
        amax = statistics[f"{ATTENTION.format(layer)}|k_cache|amax"]
        scale = load_file(tmp_path / "q" / "layers" / f"0000{layer}.safetensors")[
            f"{ATTENTION.format(layer)}.k_scale"
        ]
        assert scale.tolist() == pytest.approx([amax.item() / 127.5])
    capsys.readouterr()
    assert run(*given, "INT8:per_head", "-o", tmp_path / "h") == 3
    assert "or use per_tensor: Gaudi's files hold one maximum of a cache" in capsys.readouterr().err


@pytest.mark.slow
def test_chosen_schemes_are_settled_with_the_cache_and_their_recipe_repeats_it(
    llama: Path, text_files: dict[str, Path], tmp_path: Path
) -> None:
    calibration = Calibration(source=str(text_files["calibration"]), samples=4, sequence_length=48)
    stats = ("amax", "fisher")
    measured = measure.run(
        MeasureJob(
            model=llama,
            output=tmp_path / "m",
            calibration=calibration,
            options=Measure(stats=stats),
        ),
        QUIET,
    )
    candidates = tuple(Candidate(scheme=scheme, group_size=32) for scheme in ("W6A16", "W4A16"))
    costs = {}
    for name, cache in (
        ("plain", None),
        ("cached", KVCacheSettings(scheme="INT8", granularity="per_head")),
    ):
        entry = Quantize(
            name="x", scheme="W4A16", target_bpw=6.0, candidates=candidates, kv_cache=cache
        )
        job = QuantizeJob(model=llama, output=tmp_path / name, entry=entry, measurement=measured)
        quantize.run(job, QUIET)
        costs[name] = json.loads((tmp_path / name / "choice.json").read_text())["measured_kld"]
    assert costs["plain"] != costs["cached"]
    (again,) = recipe_from(read_yaml(tmp_path / "cached" / "recipe.yaml")).quantize
    assert again.kv_cache == KVCacheSettings(scheme="INT8", granularity="per_head")
    quantize.run(
        QuantizeJob(model=llama, output=tmp_path / "again", entry=again, measurement=measured),
        QUIET,
    )
    for index in (0, 1):
        first, second = (
            tmp_path / name / "layers" / f"0000{index}.safetensors" for name in ("cached", "again")
        )
        assert first.read_bytes() == second.read_bytes()
