"""`refit`: what it sums is what two whole models compute; records, resuming, refusals, gains."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from quantflow.algorithms.refit import RefitSums
from quantflow.errors import UsageError
from quantflow.exporting import export
from quantflow.exporting.job import ExportJob
from quantflow.files.rank_folders import rank_folder
from quantflow.measuring import measure
from quantflow.measuring.job import MeasureJob
from quantflow.models.capture import LayerStream
from quantflow.models.load import load_model, open_source
from quantflow.planning.finished_plan import plan_from
from quantflow.planning.recipe import (
    Calibration,
    KVCacheSettings,
    Measure,
    Quantize,
    SignRound,
    Tune,
)
from quantflow.planning.requirements import refit_of
from quantflow.quantizing import quantize, refitting
from quantflow.quantizing.job import QuantizeJob
from quantflow.quantizing.refitting import LayerRefit
from quantflow.reporting.progress_line import ProgressLine
from quantflow.runtime.artifact import open_artifact
from quantflow.stages.cli import cli
from quantflow.stages.cli.output import exit_code
from tests.shared import slow_but

QUIET = ProgressLine(quiet=True)
ENTRY = Quantize(name="fitted", scheme="W3A16", algorithm="gptq", group_size=32, refit=True)


def made(model, measured, folder, entry=ENTRY, **options):
    return quantize.run(
        QuantizeJob(model=model, output=folder, entry=entry, measurement=measured, **options),
        QUIET,
    )


def files(folder):
    return {path.name: path.read_bytes() for path in sorted((folder / "layers").iterdir())}


def exported(folder, to):
    return open_artifact(
        export.run(ExportJob(source=folder, output=to), QUIET), backend="reference"
    )


def sequences_of(measured):
    kept = load_file(rank_folder(measured, 0, 1) / "calibration.safetensors")
    return torch.split(kept["tokens"], kept["lengths"].tolist())


def inputs_of(model, names, sequences):
    """Linear -> (its input, its output) of every sequence, by transformers' own model."""
    seen = {name: [] for name in names}
    hooks = [
        model.get_submodule(name).register_forward_hook(
            lambda _module, args, output, name=name: seen[name].append((args[0], output))
        )
        for name in names
    ]
    hidden = []
    with torch.no_grad():
        for sequence in sequences:
            hidden.append(model(sequence[None], output_hidden_states=True).hidden_states)
    for hook in hooks:
        hook.remove()
    return seen, hidden


@torch.no_grad()
def lost_by(model, original, sequences):
    """The divergence of a model from the original, summed over all tokens."""
    total = 0.0
    for sequence in sequences:
        pair = (each(sequence[None]).logits[0].log_softmax(-1) for each in (model, original))
        total += float(torch.nn.functional.kl_div(*pair, reduction="sum", log_target=True))
    return total


@pytest.mark.parametrize(
    ("family", "writers"),
    slow_but(
        [
            ("llama", ("self_attn.o_proj", "mlp.down_proj")),
            ("qwen3", ("self_attn.o_proj", "mlp.down_proj")),
            ("gpt_neox", ("attention.dense", "mlp.dense_4h_to_h")),
            ("gemma2", ()),  # norms lie between
            ("granite", ()),  # a factor lies between
        ],
        ("llama", ("self_attn.o_proj", "mlp.down_proj")),
        ("gpt_neox", ("attention.dense", "mlp.dense_4h_to_h")),
        ("gemma2", ()),
    ),
)
def test_sums_are_over_the_inputs_and_the_hidden_states_of_two_whole_models(
    family, writers, family_model, measured_family, tmp_path, monkeypatch
):
    """The second layer's: the other model of transformers has the quantized weights so far."""
    model, measured = family_model(family), measured_family(family)
    updates, asked, update, summed = {}, [], RefitSums.update, LayerRefit._summed

    def watched_sums(self, group, **options):
        asked.append(group.linears)
        return summed(self, group, **options)

    def watched(self, *parts):
        updates.setdefault(asked[-1], []).append(parts)
        return update(self, *parts)

    with monkeypatch.context() as patch:
        patch.setattr(LayerRefit, "_summed", watched_sums)
        patch.setattr(RefitSums, "update", watched)
        folder = made(model, measured, tmp_path / "q")
    artifact = exported(folder, tmp_path / "a")
    source = open_source(model)
    original, other = (load_model(source, dtype=torch.float32) for _ in range(2))
    sequences = sequences_of(measured)
    assert len(updates) == len(asked) > 4
    layers = len(original.get_decoder().layers) if family != "gpt_neox" else 2
    assert layers == 2
    for group, parts in updates.items():
        first = group[0]
        inside = ".1." in first
        relative = first.split(".1." if inside else ".0.", 1)[1]
        before = (
            [name for name in writers if name != relative][: writers.index(relative)]
            if (relative in writers)
            else []
        )
        prefix = first.removesuffix(relative)
        names = [first, *(prefix + name for name in before)]
        (a, hidden_a), (b, hidden_b) = (
            inputs_of(each, names, sequences) for each in (original, other)
        )
        for number, (x, seen, gap) in enumerate(parts):
            close = {"rtol": 1e-4, "atol": 1e-5}
            torch.testing.assert_close(x, a[first][number][0], **close)
            torch.testing.assert_close(seen, b[first][number][0], **close)
            assert (gap is not None) == (relative in writers), first
            if gap is not None:
                expected = hidden_a[number][int(inside)] - hidden_b[number][int(inside)]
                for name in names[1:]:
                    expected = expected + a[name][number][1] - b[name][number][1]
                torch.testing.assert_close(gap, expected, **close)
        for name in group:  # quantized from here on
            weight = artifact.decode(name).weight.dequantize()
            other.get_submodule(name).weight.data.copy_(weight)


def test_it_comes_nearer_to_the_original_than_without(llama, measured_family, tmp_path):
    measured = measured_family("llama")
    original = load_model(open_source(llama), dtype=torch.float32)
    found = {}
    for fits in (True, False):
        entry = replace(ENTRY, refit=fits, scheme="W2A16")
        artifact = exported(
            made(llama, measured, tmp_path / f"q{fits}", entry), tmp_path / f"a{fits}"
        )
        other = load_model(open_source(llama), dtype=torch.float32)
        for name in artifact.linears:
            other.get_submodule(name).weight.data.copy_(artifact.decode(name).weight.dequantize())
        found[fits] = lost_by(other, original, sequences_of(measured))
    assert found[True] < 0.8 * found[False]


def test_a_stopped_run_and_several_workers_give_the_same_bytes(
    llama, measured_family, tmp_path, monkeypatch
):
    measured = measured_family("llama")
    whole = made(llama, measured, tmp_path / "whole")
    refit, stopped = LayerRefit.refit, []

    def broken(self, group, **options):
        if "layers.1" in group.linears[0] and "down_proj" in group.linears[0]:
            stopped.append(group)
            raise KeyboardInterrupt
        return refit(self, group, **options)

    with monkeypatch.context() as patch:
        patch.setattr(LayerRefit, "refit", broken)
        with pytest.raises(KeyboardInterrupt):
            made(llama, measured, tmp_path / "again")
    assert stopped
    assert files(made(llama, measured, tmp_path / "again")) == files(whole)
    # and where the layers' files are there, but not the hidden states between them
    for path in (tmp_path / "again").glob("*.json"):
        path.unlink()
    assert files(made(llama, measured, tmp_path / "again")) == files(whole)


def test_the_record_and_the_key_say_so(llama, measured_family, tmp_path):
    measured = measured_family("llama")
    told = {}
    for fits in (True, False):
        folder = made(llama, measured, tmp_path / str(fits), replace(ENTRY, refit=fits))
        told[fits] = json.loads((folder / "quantize.json").read_text())
    assert told[True]["plan"]["refit"] is True
    assert "refit" not in told[False]["plan"]
    assert [plan_from(told[fits]).refit for fits in (True, False)] == [True, False]
    export.run(ExportJob(source=tmp_path / "True", output=tmp_path / "artifact"), QUIET)
    assert "weights refitted" in (tmp_path / "artifact" / "README.md").read_text()
    assert files(tmp_path / "True") != files(tmp_path / "False")
    record = json.loads((tmp_path / "True" / "layers" / "00001.json").read_text())["decisions"]
    assert all(0 < told["refit"] < 1 for told in record.values())
    first = json.loads((tmp_path / "True" / "layers" / "00000.json").read_text())["decisions"]
    moved = {name.rpartition(".")[2]: told["refit"] for name, told in first.items()}
    assert moved["q_proj"] == moved["k_proj"] == moved["v_proj"] == 0  # nothing lies before them
    assert moved["o_proj"] > 0
    plain = json.loads((tmp_path / "False" / "layers" / "00001.json").read_text())["decisions"]
    assert not any("refit" in told for told in plain.values())


def test_experts_are_not_refitted_and_what_is_beside_them_is(
    family_model, measured_family, tmp_path, monkeypatch
):
    asked, summed = [], LayerRefit._summed

    def watched(self, group, **options):
        asked.extend(group.linears)
        return summed(self, group, **options)

    monkeypatch.setattr(LayerRefit, "_summed", watched)
    model = family_model("qwen2_moe")
    made(model, measured_family("qwen2_moe"), tmp_path, replace(ENTRY, experts="damp"))
    assert not [name for name in asked if ".experts." in name]
    assert {name.rpartition("layers.0.")[2] for name in asked if ".0." in name} >= {
        "self_attn.q_proj",
        "self_attn.o_proj",
        "mlp.shared_expert.down_proj",
    }


def test_a_writer_is_only_what_the_canary_proves(llama, measured_family, tmp_path, monkeypatch):
    """A layer that adds half of what a linear puts out is not what the row of its family says."""
    found, writers_of = [], refitting.writers_of

    def watched(opened, canary, *, outputs, output):
        as_is = writers_of(opened, canary, outputs=outputs, output=output)
        last = as_is[-1]
        halved = {**outputs, last: outputs[last] / 2}
        found.append((as_is, writers_of(opened, canary, outputs=halved, output=output)))
        return as_is

    monkeypatch.setattr("quantflow.quantizing.layer.writers_of", watched)
    made(llama, measured_family("llama"), tmp_path)
    assert [(len(proven), halved) for proven, halved in found] == [(2, ()), (2, ())]


def test_the_quantized_cache_is_in_what_groups_are_fitted_to(
    llama, measured_family, tmp_path, monkeypatch
):
    seen, inside, run, summed = [], [], LayerStream.run, LayerRefit._summed

    def watched(self, module, state, *, cache=None):
        if inside:
            seen.append(cache is not None)
        return run(self, module, state, cache=cache)

    def watched_sums(self, group, **options):
        inside.append(group)
        try:
            return summed(self, group, **options)
        finally:
            inside.clear()

    entry = replace(ENTRY, kv_cache=KVCacheSettings(scheme="INT8"))
    measured = measured_family("llama")
    with monkeypatch.context() as patch:
        patch.setattr(LayerStream, "run", watched)
        patch.setattr(LayerRefit, "_summed", watched_sums)
        made(llama, measured, tmp_path / "rounded", entry)
    assert seen.count(True) == seen.count(False) > 0  # the original has none
    assert exported(tmp_path / "rounded", tmp_path / "artifact").linears


@pytest.mark.parametrize(
    ("words", "cause"),
    [
        ({"algorithm": "rtn"}, "refit with algorithm rtn"),
        ({"algorithm": "hqq"}, "refit with algorithm hqq"),
        ({"algorithm": "signround", "signround": SignRound()}, "refit with algorithm signround"),
        ({"quantized_inputs": True}, "quantized_inputs=True with refit"),
        ({"quantized_inputs": False}, "quantized_inputs=False with refit"),
    ],
)
def test_what_cannot_be_refitted_is_refused(words, cause):
    with pytest.raises(UsageError, match=cause):
        refit_of(replace(ENTRY, **words))


def test_ranks_are_refused(llama, measured_family, tmp_path):
    words = ["quantize", str(llama), "-o", str(tmp_path / "out"), "--scheme", "W4A16"]
    words += ["--group-size", "32", "--refit", "--ranks", "2"]
    assert exit_code(cli, [*words, "--measurement", str(measured_family("llama"))]) == 2
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("scheme", "words", "fits"),
    [
        ("W4A16", {}, True),
        ("W2A16", {}, True),
        ("NVFP4", {}, True),
        ("IQ3_S", {}, True),
        ("W8A16", {}, False),
        ("FP8", {}, False),
        ("W4A16", {"refit": False}, False),
        ("W4A16", {"quantized_inputs": False}, False),
        ("W4A16", {"algorithm": "good"}, True),
        ("FP8", {"algorithm": "good"}, False),
        ("W4A16", {"algorithm": "gptq"}, False),
        ("W4A16", {"algorithm": "gptq", "refit": True}, True),
    ],
)
def test_good_and_best_refit_below_8_bits_unless_told_not_to(scheme, words, fits):
    entry = Quantize(name="a", scheme=scheme, **{"algorithm": "best", **words})
    assert refit_of(entry) == fits


def test_plan_names_it(llama, capsys):
    words = ["plan", str(llama), "--for", "W4A16:best,W4A16:gptq", "--group-size", "32"]
    assert exit_code(cli, words) == 0
    said = capsys.readouterr().out
    assert "W4A16 by smoothquant refit yaqa, layer by layer" in said
    assert "W4A16 by gptq, layer by layer" in said


def test_best_tunes_what_it_refitted(llama, tmp_path, text_files):
    folder = measure.run(
        MeasureJob(
            model=llama,
            output=tmp_path / "measured",
            calibration=Calibration(
                source=str(text_files["calibration"]), samples=5, sequence_length=48
            ),
            options=Measure(stats=("channel_amax", "gradient")),
        ),
        QUIET,
    )
    entry = Quantize(
        name="best",
        scheme="W2A16",
        algorithm="best",
        group_size=32,
        tune=Tune(steps=3, sequences=2),
    )
    folder = made(llama, folder, tmp_path / "q", entry)
    told = json.loads((folder / "quantize.json").read_text())
    assert told["plan"]["refit"] is True
    decisions = json.loads((folder / "layers" / "00001.json").read_text())["decisions"]
    tuned = decisions["model.layers.1.mlp.down_proj"]["tune"]
    assert 0 < tuned["divergence"] < tuned["divergence_start"]
    # the original's predictions are those of the original, whose states passed through it twice
    artifact = exported(folder, tmp_path / "a")
    other, original = (load_model(open_source(llama), dtype=torch.float32) for _ in range(2))
    norms = [name for name, _ in other.named_parameters() if "norm" in name]
    for name, tensor in artifact.read(norms).items():
        other.get_parameter(name).data.copy_(tensor)
    for name in artifact.linears:
        other.get_submodule(name).weight.data.copy_(artifact.decode(name).weight.dequantize())
    sequences = sequences_of(tmp_path / "measured")
    lost = lost_by(other, original, sequences) / sum(map(len, sequences))
    assert tuned["divergence"] == pytest.approx(lost, rel=0.03)  # by products in bfloat16
