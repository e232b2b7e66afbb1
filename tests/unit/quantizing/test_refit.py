"""`refit`: what it sums is what two whole models compute; records, resuming, refusals, gains."""

import json
import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from quantflow.algorithms.refit import RefitSums
from quantflow.errors import UsageError
from quantflow.exporting import export
from quantflow.exporting.job import ExportJob
from quantflow.files.rank_folders import rank_folder
from quantflow.measuring import measure
from quantflow.measuring.job import MeasureJob
from quantflow.models.capture import LayerStream
from quantflow.models.family import FAMILIES
from quantflow.models.load import load_model, open_source
from quantflow.models.open import graph_for
from quantflow.planning.cost import folding_bytes, refitting_moments
from quantflow.planning.finished_plan import plan_from
from quantflow.planning.plan import resolve
from quantflow.planning.recipe import (
    Calibration,
    KVCacheSettings,
    Measure,
    Quantize,
    SignRound,
    Tune,
)
from quantflow.planning.requirements import refit_of
from quantflow.planning.sizes import model_size
from quantflow.quantizing import quantize, refitting, refitting_experts
from quantflow.quantizing.job import QuantizeJob
from quantflow.quantizing.refitting import LayerRefit
from quantflow.quantizing.refitting_experts import ExpertsRefit
from quantflow.reporting.progress_line import ProgressLine
from quantflow.runtime.artifact import open_artifact
from quantflow.stages.cli import cli
from quantflow.stages.cli.output import exit_code
from tests.shared import slow_but
from tests.unit.quantizing.test_rotated_families import config_of, renamed, written

QUIET = ProgressLine(quiet=True)
MIXTURES = [name for name, row in FAMILIES.items() if row.mixture is not None]
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


def put_into(stock, artifact, names, leaves):
    """Give transformers' own mixture the quantized weights of linears, experts' into its stacks."""
    for name in names:
        weight = artifact.decode(name).weight.dequantize()
        if ".experts." not in name:
            stock.get_submodule(name).weight.data.copy_(weight)
            continue
        before, rest = name.split(".experts.")
        number, leaf = rest.split(".")
        layer = stock.model.layers[int(before.split(".")[2])]
        experts, width = layer.mlp.experts, layer.mlp.experts.down_proj.shape[2]
        place = leaves.index(leaf)
        stack = experts.down_proj if place == 2 else experts.gate_up_proj
        rows = slice(None) if place == 2 else slice(place * width, (place + 1) * width)
        stack.data[int(number)][rows].copy_(weight)


@torch.no_grad()
def sent_to_experts(stock, layer, sequences):
    """(x [T, H], numbers [T, k]) of every sequence, as transformers' own router sends it."""
    found = []
    hook = stock.model.layers[layer].mlp.experts.register_forward_pre_hook(
        lambda _module, args: found.append((args[0].flatten(0, -2), args[1]))
    )
    for sequence in sequences:
        stock(sequence[None])
    hook.remove()
    return found


def inner_of(stock, layer, number, x):
    """What down of an expert reads, by its formula."""
    gate, up = (x @ stock.model.layers[layer].mlp.experts.gate_up_proj[number].T).chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


@pytest.mark.parametrize(
    ("family", "leaves"),
    slow_but(
        [
            ("qwen2_moe", ("gate_proj", "up_proj", "down_proj")),
            ("qwen3_moe", ("gate_proj", "up_proj", "down_proj")),
            ("mixtral", ("w1", "w3", "w2")),
        ],
        ("qwen2_moe", ("gate_proj", "up_proj", "down_proj")),
    ),
)
def test_experts_sum_what_the_quantized_router_sends_them(
    family, leaves, family_model, measured_family, tmp_path, monkeypatch
):
    """Gates and ups together over all tokens, each down over its own; against stock models."""
    model, measured = family_model(family), measured_family(family)
    of_all, of_each, inside = [], [], []
    sums_of_all, add, update = ExpertsRefit._sums_of_all, refitting_experts._add, RefitSums.update

    def watched_all(self, first, **options):
        inside.append(first)
        of_all.append([])
        try:
            return sums_of_all(self, first, **options)
        finally:
            inside.clear()

    def watched(self, *parts):
        if inside:
            of_all[-1].append(parts)
        return update(self, *parts)

    def watched_add(sums, arrived, number):
        of_each.append((number, [pairs[number] for pairs in arrived if number in pairs]))
        return add(sums, arrived, number)

    with monkeypatch.context() as patch:
        patch.setattr(ExpertsRefit, "_sums_of_all", watched_all)
        patch.setattr(RefitSums, "update", watched)
        patch.setattr(refitting_experts, "_add", watched_add)
        folder = made(
            model, measured, tmp_path / "q", replace(ENTRY, experts="damp", expert_tokens=1)
        )
    artifact = exported(folder, tmp_path / "a")
    sequences = sequences_of(measured)
    original, other = (
        AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval() for _ in range(2)
    )
    close = {"rtol": 1e-4, "atol": 1e-4}
    assert len(of_all) == 2
    for layer in range(2):
        names = [
            name for name in artifact.linears if f".{layer}." in name[: len("model.layers.0.")]
        ]
        experts = [name for name in names if ".experts." in name]
        last = [name for name in experts if name.endswith(leaves[2])]
        put_into(other, artifact, [name for name in names if name not in experts], leaves)
        was, sent = (sent_to_experts(each, layer, sequences) for each in (original, other))
        assert len(of_all[layer]) == len(sequences)
        for (x, _), (seen, _), parts in zip(was, sent, of_all[layer], strict=True):
            torch.testing.assert_close(parts[0], x, **close)
            torch.testing.assert_close(parts[1], seen, **close)
            assert parts[2] is None
        put_into(other, artifact, [name for name in experts if name not in last], leaves)
        count = len(original.model.layers[layer].mlp.experts.gate_up_proj)
        found = {number: [] for number in range(count)}
        while of_each and sum(map(len, found.values())) < sum(
            len(torch.unique(numbers)) for _, numbers in sent
        ):
            number, pairs = of_each.pop(0)
            found[number] += pairs
        for number, pairs in found.items():
            rows = [(numbers == number).any(-1) for _, numbers in sent]
            a = torch.cat(
                [
                    inner_of(original, layer, number, x[some])
                    for (x, _), some in zip(was, rows, strict=True)
                ]
            )
            b = torch.cat(
                [
                    inner_of(other, layer, number, x[some])
                    for (x, _), some in zip(sent, rows, strict=True)
                ]
            )
            one, two = (torch.cat(part) for part in zip(*pairs, strict=True))
            assert one.shape == a.shape
            # in another order of tokens
            torch.testing.assert_close(one.T @ two, a.T @ b, **close)
            torch.testing.assert_close(two.T @ two, b.T @ b, **close)
        put_into(other, artifact, last, leaves)
    assert not of_each
    told = json.loads((folder / "layers" / "00001.json").read_text())["decisions"]
    assert all(0 < told[name]["refit"] < 1 for name in experts)


def test_experts_with_few_tokens_keep_their_weights(family_model, measured_family, tmp_path):
    entry = replace(ENTRY, experts="damp", expert_tokens=10**6)
    folder = made(family_model("qwen3_moe"), measured_family("qwen3_moe"), tmp_path, entry)
    told = json.loads((folder / "layers" / "00001.json").read_text())["decisions"]
    assert {".experts." in name for name, of in told.items() if "refit" in of} == {False}


@pytest.mark.parametrize("family", slow_but(MIXTURES, "gpt_oss", "deepseek_v3", "llama4_text"))
def test_experts_of_every_family_are_refitted(family, family_model, tmp_path):
    """But for those that read scaled inputs."""
    read_as = FAMILIES[family].read_as
    written(config_of(read_as or family), tmp_path / "model")
    if read_as is not None:
        renamed(tmp_path / "model", family)
    for path in family_model("mixtral").glob("token*"):
        shutil.copy(path, tmp_path / "model")
    rows = [{"input_ids": [2 + (7 * at + number) % 40 for at in range(64)]} for number in range(4)]
    text = tmp_path / "text.jsonl"
    text.write_text("".join(json.dumps(row) + "\n" for row in rows))
    entry = replace(ENTRY, experts="damp", expert_tokens=1, group_size=4)
    folder = quantize.run(
        QuantizeJob(
            model=tmp_path / "model",
            output=tmp_path / "q",
            entry=entry,
            measurement=measure.run(
                MeasureJob(
                    model=tmp_path / "model",
                    output=tmp_path / "m",
                    calibration=Calibration(source=str(text), samples=4, sequence_length=64),
                    options=Measure(stats=()),
                ),
                QUIET,
            ),
        ),
        QUIET,
    )
    records = [json.loads(path.read_text()) for path in sorted((folder / "layers").glob("*.json"))]
    told = {name: of for record in records for name, of in record["decisions"].items()}
    graph = graph_for(open_source(tmp_path / "model").config)
    experts = [
        name
        for layer in graph.layers
        for group in layer.groups
        if group.expert is not None
        for name in group.linears
    ]
    assert experts and all("refit" in told[name] for name in told.keys() - set(experts))
    moved = {name for name in experts if told[name].get("refit")}
    assert (len(moved) == 0) == (family == "llama4_text")


def test_a_down_that_the_quantized_router_sends_no_token_keeps_its_weights(
    family_model, measured_family, tmp_path, monkeypatch
):
    sums_of_each = ExpertsRefit._sums_of_each

    def without_the_second(self, last, **options):
        found = sums_of_each(self, last, **options)
        return {name: sums for name, sums in found.items() if not name.endswith(".experts.1")}

    monkeypatch.setattr(ExpertsRefit, "_sums_of_each", without_the_second)
    entry = replace(ENTRY, experts="damp", expert_tokens=1)
    folder = made(family_model("qwen3_moe"), measured_family("qwen3_moe"), tmp_path, entry)
    told = json.loads((folder / "layers" / "00001.json").read_text())["decisions"]
    kept = {name.rpartition("layers.1.")[2] for name, of in told.items() if "refit" not in of}
    assert kept == {"mlp.experts.1.down_proj"}


def test_a_mixture_holds_the_sums_of_all_downs_at_once_and_one_of_what_all_read(family_model):
    source = open_source(family_model("qwen3_moe"))
    graph, infos = graph_for(source.config), source.checkpoint.infos
    sizes = model_size(infos, source.config, graph)
    entry = replace(ENTRY, experts="damp")
    plan = resolve(entry, graph, {name: info.shape for name, info in infos.items()})
    moments = refitting_moments(sizes, plan, 10)
    assert len(moments) == 2 * (2 + 1 + 1)  # attention's two groups, all readers, all downs
    (reading, _), _, (downs, each), _ = moments[-4:]
    hidden, width, experts = 64, 96, 4
    halves = 4 * (hidden**2 + width**2)  # one strip each, which ends at the diagonal
    readers = experts * 2 * width * hidden
    sums = experts * 2 * 4 * width**2 - 2 * 4 * hidden**2  # D and half of C, of each; of one before
    adding = folding_bytes(width, 10) - folding_bytes(hidden, 10)
    adding += 4 * 10 * (2 * width - hidden)  # a sequence: what two experts make of each token
    more = downs - reading - 4 * readers - sums - adding
    # gates and ups encoded: 3 bits, and a bfloat16 scale for 32 of them
    assert more == pytest.approx(readers * (3 / 8 + 2 / 32), rel=0.01)
    assert each > 2 * 4 * 10 * 2 * width  # what two experts of each token make of it, twice
    assert reading > 4 * hidden**2 + experts * halves
    assert refitting_moments(sizes, replace(plan, refit=False), 10) == []


def test_a_mixture_comes_nearer_to_the_original_by_its_experts(
    family_model, measured_family, tmp_path, monkeypatch
):
    model, measured = family_model("qwen3_moe"), measured_family("qwen3_moe")
    original = load_model(open_source(model), dtype=torch.float32)
    found = {}
    for kept in (True, False):
        with monkeypatch.context() as patch:
            if kept:
                patch.setattr(ExpertsRefit, "refit", lambda *_, **__: None)
            entry = replace(ENTRY, scheme="W2A16", experts="damp", expert_tokens=1)
            folder = made(model, measured, tmp_path / f"q{kept}", entry)
        artifact = exported(folder, tmp_path / f"a{kept}")
        other = load_model(open_source(model), dtype=torch.float32)
        for name in artifact.linears:
            other.get_submodule(name).weight.data.copy_(artifact.decode(name).weight.dequantize())
        found[kept] = lost_by(other, original, sequences_of(measured))
    assert found[False] < 0.9 * found[True]


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


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_the_quantized_cache_is_in_what_groups_are_fitted_to(
    family, family_model, measured_family, tmp_path, monkeypatch
):
    seen, inside, run = [], [], LayerStream.run

    def watched(self, module, state, *, cache=None):
        if inside:
            seen.append(cache is not None)
        return run(self, module, state, cache=cache)

    def noted(method):
        def call(self, group, **options):
            inside.append(group)
            try:
                return method(self, group, **options)
            finally:
                inside.clear()

        return call

    entry = replace(ENTRY, kv_cache=KVCacheSettings(scheme="INT8"), experts="damp", expert_tokens=1)
    measured = measured_family(family)
    with monkeypatch.context() as patch:
        patch.setattr(LayerStream, "run", watched)
        patch.setattr(LayerRefit, "_summed", noted(LayerRefit._summed))
        patch.setattr(ExpertsRefit, "begin", noted(ExpertsRefit.begin))
        made(family_model(family), measured, tmp_path / "rounded", entry)
    assert seen.count(True) == seen.count(False) > 0  # the original has none
    groups = 4  # of each layer: two of attention, and the MLP's or the experts'
    assert len(seen) == 2 * groups * 2 * len(sequences_of(measured))
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
