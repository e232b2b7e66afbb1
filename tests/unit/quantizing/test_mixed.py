"""Mixed precision: sensitivities, schemes within bits or divergence, and the choice as a recipe."""

import json
import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace

import pytest
import torch
from gguf import GGUFReader
from safetensors.torch import load_file

from quantflow.core.block_types import BLOCK_TYPES
from quantflow.core.scheme import scheme_words
from quantflow.errors import GateError, StatisticsError, UsageError
from quantflow.exporting import export
from quantflow.exporting.job import ExportJob
from quantflow.files.manifest import read_manifest
from quantflow.files.rank_folders import rank_folder
from quantflow.measuring import measure
from quantflow.measuring.backward import generator_for
from quantflow.measuring.job import MeasureJob
from quantflow.models.load import load_model, open_source
from quantflow.models.open import graph_for
from quantflow.numerics.divergence import token_kld
from quantflow.planning.file_size import SPARE
from quantflow.planning.plan import resolve
from quantflow.planning.recipe import (
    Calibration,
    Candidate,
    HeadSettings,
    Measure,
    Override,
    Quantize,
    Tune,
    read_yaml,
    recipe_from,
)
from quantflow.planning.requirements import entries_of, statistics_for, transforms_of
from quantflow.quantizing import quantize
from quantflow.quantizing.job import QuantizeJob
from quantflow.quantizing.mixed_precision import chosen_mixture
from quantflow.quantizing.mixed_precision.chosen_mixture import ChosenMixture
from quantflow.quantizing.mixed_precision.sensitivity import ChoiceItem, _units, candidates_of
from quantflow.reporting.progress_line import ProgressLine
from quantflow.runtime.load import load
from tests.shared import run

QUIET = ProgressLine(quiet=True)
SMALL = tuple(
    Candidate(scheme=f"W{bits}A16", group_size=size) for bits in (3, 4, 6) for size in (32, 64)
)
ENTRY = Quantize(name="mixed", scheme="W4A16", target_bpw=4.7, candidates=SMALL)


@pytest.fixture(scope="module")
def measured(tmp_path_factory, llama, text_files):
    folder = tmp_path_factory.mktemp("measured")
    calibration = Calibration(source=str(text_files["calibration"]), samples=6, sequence_length=48)
    measure.run(
        MeasureJob(
            model=llama,
            output=folder,
            calibration=calibration,
            options=Measure(stats=("amax", "fisher")),
        ),
        QUIET,
    )
    return rank_folder(folder, 0, 1)


@pytest.fixture(scope="module")
def mixed(tmp_path_factory, llama, measured):
    folder = tmp_path_factory.mktemp("mixed") / "out"
    return quantize.run(
        QuantizeJob(model=llama, output=folder, entry=ENTRY, measurement=measured), QUIET
    )


def record(folder):
    return json.loads((folder / "choice.json").read_text())


def schemes(folder):
    plan = json.loads((folder / "quantize.json").read_text())["plan"]["schemes"]
    return {
        name: (scheme["weights"]["num_bits"], scheme["weights"]["group_size"])
        for name, scheme in plan.items()
    }


def layers(folder):
    return {
        path.name: path.read_bytes() for path in sorted((folder / "layers").glob("*.safetensors"))
    }


def test_the_bits_are_those_of_the_files_and_no_more_than_asked_for(mixed):
    bits = weights = 0
    for path in (mixed / "layers").glob("*.safetensors"):
        for name, tensor in load_file(path).items():
            if (
                name.endswith(("weight_packed", "weight_scale", "weight_shape"))
                and "norm" not in name
            ):
                bits += 8 * tensor.numel() * tensor.element_size()
            if name.endswith("weight_shape"):
                weights += int(tensor.prod())
    told = record(mixed)
    assert told["bits_per_weight"] == bits / weights
    assert 4.5 < told["bits_per_weight"] <= 4.7


def test_linears_that_runtimes_fuse_have_one_scheme(mixed):
    found = schemes(mixed)
    assert len(set(found.values())) > 1
    for layer in range(2):
        for group in (
            ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
            ("mlp.gate_proj", "mlp.up_proj"),
        ):
            assert len({found[f"model.layers.{layer}.{name}"] for name in group}) == 1


def test_the_recipe_run_again_gives_the_same_bytes(mixed, llama, measured, tmp_path, capsys):
    recipe = mixed / "recipe.yaml"
    assert (
        run(
            "quantize",
            llama,
            "-o",
            tmp_path / "again",
            "--recipe",
            recipe,
            "--measurement",
            measured,
        )
        == 0
    )
    assert layers(tmp_path / "again") == layers(mixed)
    entry = recipe_from(read_yaml(recipe)).quantize[0]
    assert (entry.target_bpw, entry.scheme, entry.name) == (None, "W4A16", "mixed")
    capsys.readouterr()
    assert run("plan", recipe, "--json") == 0
    planned = json.loads(capsys.readouterr().out)["artifacts"][0]
    assert planned["bits_per_weight"] == record(mixed)["bits_per_weight"]
    assert not planned["chosen"]


def test_a_plan_says_where_schemes_are_chosen_when_it_runs(llama, capsys):
    wide = ("--set", "quantize.0.group_size=32")
    assert (
        run("plan", llama, "--for", "W4A16@4.7", *wide, "--samples", "2", "--sequence-length", "48")
        == 0
    )
    out = capsys.readouterr().out
    assert "statistics: fisher" in out
    assert (
        "schemes are chosen when it runs, by what was measured; the figures are those of W4A16 "
        "for all" in out
    )


def test_an_edited_recipe_is_followed(mixed, llama, measured, tmp_path):
    text = (mixed / "recipe.yaml").read_text()
    edited = tmp_path / "recipe.yaml"
    edited.write_text(text + '      - {match: "model.layers.0.self_attn.o_proj", scheme: W8A16}\n')
    assert (
        run(
            "quantize", llama, "-o", tmp_path / "out", "--recipe", edited, "--measurement", measured
        )
        == 0
    )
    assert schemes(tmp_path / "out") == schemes(mixed) | {
        "model.layers.0.self_attn.o_proj": (8, None)
    }


def test_the_same_command_finds_it_up_to_date_and_stops_and_goes_on_to_the_same_bytes(
    mixed, llama, measured, tmp_path
):
    before = {
        path: path.stat().st_mtime_ns
        for path in mixed.rglob("*")
        if path.is_file() and ".lock" not in path.name
    }
    quantize.run(QuantizeJob(model=llama, output=mixed, entry=ENTRY, measurement=measured), QUIET)
    assert {path: path.stat().st_mtime_ns for path in before} == before

    class Stopped(BaseException):
        pass

    class StopAt(ProgressLine):
        def steps(self, items, *, stage, **told):
            for number, item in enumerate(items):
                if stage == self.stage and number == 1:
                    raise Stopped
                yield item

    job = QuantizeJob(model=llama, output=tmp_path / "found", entry=ENTRY, measurement=measured)
    for stage in ("choose mixed", "quantize mixed", "measure mixed"):
        progress = StopAt(quiet=True)
        object.__setattr__(progress, "stage", stage)
        with pytest.raises(Stopped):
            quantize.run(job, progress)
        assert not (tmp_path / "found" / "DONE.json").exists()
    quantize.run(job, QUIET)
    assert layers(tmp_path / "found") == layers(mixed)
    for name in ("choice.json", "recipe.yaml", "pareto.svg"):
        assert (tmp_path / "found" / name).read_bytes() == (mixed / name).read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == ["found"]


@pytest.mark.slow
def test_within_a_divergence_the_fewest_bits_are_chosen_by_measuring_and_a_stopped_run_goes_on(
    mixed, llama, measured, tmp_path
):
    allowed = 1.3 * record(mixed)["measured_kld"]
    entry = replace(ENTRY, target_bpw=None, max_kld=allowed)

    class Told(ProgressLine):
        def say(self, text):
            self.lines.append(text)

    class Stopped(BaseException):
        pass

    class StopBefore(Told):
        def say(self, text):
            super().say(text)
            if "mean KLD" in text and "on" in text and "tokens" in text:
                raise Stopped  # measured, and nothing done about it yet

    def run_with(kind, folder):
        progress = kind(quiet=True)
        object.__setattr__(progress, "lines", [])
        quantize.run(
            QuantizeJob(model=llama, output=folder, entry=entry, measurement=measured),
            progress,
        )
        return progress.lines

    lines = run_with(Told, tmp_path / "whole")
    told = record(tmp_path / "whole")
    assert told["measured_kld"] <= allowed and told["max_kld"] == allowed
    assert told["bits_per_weight"] < record(mixed)["bits_per_weight"]
    rounds = [line for line in lines if "calibration tokens" in line]
    assert len(rounds) == len(told["rounds"]) >= 2  # predictions of a random model are not exact
    stops = 0
    while not (tmp_path / "again" / "DONE.json").exists():
        try:
            run_with(StopBefore, tmp_path / "again")
        except Stopped:
            stops += 1
    assert stops == len(rounds)
    assert layers(tmp_path / "again") == layers(tmp_path / "whole")
    assert record(tmp_path / "again") == told
    assert run_with(Told, tmp_path / "whole")[-1] == "quantize mixed: up to date"


def divergence(artifact, llama, measured):
    """An artifact's mean divergence from its source on the calibration text, and its tokens."""
    original, quantized = (
        load_model(open_source(llama), dtype=torch.float32),
        load(artifact, backend="reference", exact=True).model,
    )
    sequences = torch.split(
        load_file(measured / "calibration.safetensors")["tokens"],
        load_file(measured / "calibration.safetensors")["lengths"].tolist(),
    )
    total = 0.0
    with torch.no_grad():
        for sequence in sequences:
            left, right = (
                model(sequence[None], use_cache=False).logits[0] for model in (original, quantized)
            )
            total += float(token_kld(left, right).sum())
    tokens = sum(len(sequence) for sequence in sequences)
    return total / tokens, tokens


def test_what_is_measured_is_the_divergence_of_the_exported_artifact(
    mixed, llama, measured, tmp_path
):
    artifact = export.run(ExportJob(source=mixed, output=tmp_path / "artifact"), QUIET)
    expected, tokens = divergence(artifact, llama, measured)
    assert record(mixed)["measured_kld"] == pytest.approx(expected, rel=1e-3)
    assert record(mixed)["tokens"] == tokens
    chosen = read_manifest(artifact)["recipe"]["chosen"]
    assert chosen == record(mixed)
    assert (
        f"mixed precision of {chosen['bits_per_weight']:.2f} bits per weight by gptq"
        in (artifact / "README.md").read_text()
    )


@pytest.mark.slow
def test_the_choice_leaves_the_head_alone_and_what_is_measured_is_with_the_head_as_it_will_be(
    mixed, llama, measured, tmp_path
):
    entry = replace(ENTRY, head=HeadSettings(scheme="W3A16", algorithm="rtn", group_size=64))
    job = QuantizeJob(model=llama, output=tmp_path / "q", entry=entry, measurement=measured)
    artifact = export.run(
        ExportJob(source=quantize.run(job, QUIET), output=tmp_path / "artifact"), QUIET
    )
    found, plain = record(job.output), record(mixed)
    for key in ("items", "bits_per_weight", "predicted_kld", "tokens"):
        assert found[key] == plain[key], key
    expected, _ = divergence(artifact, llama, measured)
    assert found["measured_kld"] == pytest.approx(expected, rel=1e-3)
    assert found["measured_kld"] > 1.05 * plain["measured_kld"]  # 3 bits of the head are seen
    assert recipe_from(read_yaml(job.output / "recipe.yaml")).quantize[0].head == entry.head
    assert "The head (lm_head) is W3A16 by rtn." in (artifact / "README.md").read_text()


def test_sensitivities_are_those_of_the_whole_model_by_autograd(llama, measured):
    model = load_model(open_source(llama), dtype=torch.float32).requires_grad_(False)
    names = ("model.layers.0.self_attn.k_proj", "model.layers.1.mlp.down_proj")
    seen = {}
    for name in names:
        model.get_submodule(name).register_forward_hook(
            lambda _module, args, y, name=name: seen.update({name: (args[0], y)}) or y.retain_grad()
        )
    rows, columns = ({name: 0.0 for name in names} for _ in range(2))
    calibration = load_file(measured / "calibration.safetensors")
    for index, tokens in enumerate(
        torch.split(calibration["tokens"], calibration["lengths"].tolist())
    ):
        embedded = model.get_input_embeddings()(tokens[None]).requires_grad_()
        logits = model(inputs_embeds=embedded, use_cache=False).logits[0]
        # at most 64
        labels = torch.multinomial(
            logits.detach().softmax(-1), 1, generator=generator_for(0, index)
        )[:, 0]
        torch.nn.functional.cross_entropy(logits, labels, reduction="sum").backward()
        for name, (x, y) in seen.items():
            squares = y.grad[0].double().square()  # [S, O]
            rows[name] += squares.sum(dim=0)
            columns[name] += (
                x[0].detach().double().square() * squares.mean(dim=1, keepdim=True)
            ).sum(dim=0)
    statistics = load_file(measured / "statistics.safetensors")
    for name in names:
        torch.testing.assert_close(
            statistics[f"{name}|gradient|square_sum"], rows[name], rtol=1e-4, atol=0
        )
        torch.testing.assert_close(
            statistics[f"{name}|guided_input|square_sum"], columns[name], rtol=1e-4, atol=0
        )
        assert statistics[f"{name}|gradient|count"] == len(calibration["tokens"])


def test_a_fisher_statistic_is_the_same_whatever_the_memory_and_however_often_it_was_stopped(
    llama, text_files, measured, tmp_path, monkeypatch
):
    calibration = Calibration(source=str(text_files["calibration"]), samples=6, sequence_length=48)
    job = MeasureJob(
        model=llama,
        output=tmp_path / "found",
        calibration=calibration,
        options=Measure(stats=("amax", "fisher")),
    )
    original = measure.allow_measure
    monkeypatch.setattr(
        measure, "allow_measure", lambda *a, **k: replace(original(*a, **k), workers=1, in_flight=1)
    )

    class Stopped(BaseException):
        pass

    class StopAfter(ProgressLine):
        def steps(self, items, *, stage, **told):
            for number, item in enumerate(items):
                if number == 1 and (stage, told["unit"]) not in self.seen:
                    self.seen.add((stage, told["unit"]))
                    raise Stopped
                yield item

    progress = StopAfter(quiet=True)
    object.__setattr__(progress, "seen", set())
    stops = 0
    while True:
        try:
            measure.run(job, progress)
            break
        except Stopped:
            stops += 1
    assert stops == 3  # forwards, at the head, backwards
    again = rank_folder(tmp_path / "found", 0, 1)
    assert (again / "statistics.safetensors").read_bytes() == (
        measured / "statistics.safetensors"
    ).read_bytes()
    assert [path.name for path in (tmp_path / "found").iterdir() if path.is_dir()] == [
        "rank-000-of-001"
    ]


@pytest.mark.slow
def test_ranks_that_share_the_text_measure_the_same_sensitivities(
    llama, text_files, measured, tmp_path
):
    found = []
    calibration = Calibration(source=str(text_files["calibration"]), samples=6, sequence_length=48)
    job = MeasureJob(
        model=llama,
        output=tmp_path / "two",
        calibration=calibration,
        options=Measure(stats=("fisher",)),
    )
    for rank in range(2):
        measure._measure_rank(job, QUIET, rank=rank, world=2)
        found.append(load_file(rank_folder(tmp_path / "two", rank, 2) / "statistics.safetensors"))
    whole = load_file(measured / "statistics.safetensors")
    for key in found[0]:
        if "|gradient|" in key or "|guided_input|" in key:
            torch.testing.assert_close(found[0][key] + found[1][key], whole[key], rtol=1e-9, atol=0)


def test_ranks_that_share_the_model_are_refused(llama, text_files, tmp_path):
    calibration = Calibration(source=str(text_files["calibration"]))
    job = MeasureJob(
        model=llama,
        output=tmp_path / "x",
        calibration=calibration,
        options=Measure(stats=("fisher",), ranks=2, tp=2),
    )
    with pytest.raises(UsageError, match="statistic fisher with tp=2; .* measure it with --tp 1"):
        measure.run(job, QUIET)


def mixture(llama, entry, *, rounds=(), costs=(80.0, 20.0, 5.0)):
    """Two items of 1000 weights, the first twice as sensitive; 3, 4 and 5 bits; 10 tokens."""
    options = [
        {
            n: (bits * 1000, cost * factor)
            for n, (bits, cost) in enumerate(zip((3, 4, 5), costs, strict=True))
        }
        for factor in (2, 1)
    ]
    linears = ("model.layers.0.self_attn.o_proj", "model.layers.1.mlp.down_proj")
    items = tuple(
        ChoiceItem(linears=(name,), weights=1000, options=of)
        for name, of in zip(linears, options, strict=True)
    )
    graph = graph_for(open_source(llama).config)
    return ChosenMixture(
        key="", entry=entry, graph=graph, items=items, tokens=10, fixed=(0, 0), rounds=rounds
    )


THREE = tuple(Candidate(scheme=f"W{bits}A16") for bits in (3, 4, 5))


def wanting(**limit):
    return Quantize(name="mixed", scheme="W4A16", candidates=THREE, **limit)


@pytest.mark.parametrize(
    ("limit", "picks"),
    [
        ({"target_bpw": 3.0}, (0, 0)),
        ({"target_bpw": 3.4}, (0, 0)),
        ({"target_bpw": 3.5}, (1, 0)),  # the more sensitive one first
        ({"target_bpw": 4.0}, (1, 1)),  # not (2, 0): 10 + 80 nats against 40 + 20
        ({"target_bpw": 9.0}, (2, 2)),
        ({"max_kld": 6.0}, (1, 1)),  # 60 nats over 10 tokens
        ({"max_kld": 5.9}, (2, 1)),  # 10 + 20
        ({"max_kld": 24.0}, (0, 0)),
    ],
)
def test_choices_within_bits_and_within_divergence_worked_by_hand(llama, limit, picks):
    assert mixture(llama, wanting(**limit)).picks == picks


def test_predictions_are_corrected_by_what_was_measured_until_it_holds_and_no_bits_are_left_to_save(
    llama,
):
    start = mixture(llama, wanting(max_kld=6.0))
    assert start.picks == (1, 1)
    high = start.with_round(12.0)  # twice what was predicted
    assert not high.rounds[-1].accepted and high.ratio == 2.0
    # 15 nats, taken twice, over 10 tokens: 3; (2, 1) would be 6, which leaves nothing for errors
    assert high.picks == (2, 2)
    held = high.with_round(5.5)  # close enough to 6
    assert held.rounds[-1].accepted and held.picks == (2, 2)
    # half of what was predicted: (1, 0) is now worth 120 / 2 / 10 = 6, without room for errors
    low = start.with_round(3.0)
    assert low.rounds[-1].accepted and low.picks == (1, 1)
    lower = start.with_round(1.0)
    assert not lower.rounds[-1].accepted and lower.picks == (0, 0)  # 240 / 6 / 10 = 4


def test_after_the_last_round_the_smallest_that_held_is_taken_or_what_was_measured_is_told(llama):
    rounds = tuple(
        chosen_mixture.Round(picks=picks, predicted=1.0, measured=measured, accepted=False)
        for picks, measured in [((2, 2), 1.0), ((1, 1), 5.0), ((1, 0), 7.0)] * 2
    )
    assert len(rounds) == chosen_mixture.ROUNDS
    last = mixture(llama, wanting(max_kld=6.0), rounds=rounds)
    assert last.picks == (1, 1)
    assert last.with_round(5.0).rounds[-1].accepted
    none = mixture(llama, wanting(max_kld=0.9), rounds=rounds)
    with pytest.raises(
        GateError, match=r"max_kld=0\.9, measured 5\.000 bits: 1, 4\.000 bits: 5, 3\.500 bits: 7"
    ):
        _ = none.picks


def test_limits_that_no_candidates_keep_are_refused_with_what_they_take(llama):
    with pytest.raises(
        UsageError, match=r"target_bpw=2\.9, the smallest candidates take 3\.0000; give more bits"
    ):
        _ = mixture(llama, wanting(target_bpw=2.9)).picks
    with pytest.raises(
        UsageError,
        match=r"max_kld=1\.0, the finest candidates are predicted to cost 1\.5; allow more",
    ):
        _ = mixture(llama, wanting(max_kld=1.0)).picks


@pytest.mark.slow
def test_linears_that_overrides_name_keep_their_scheme_and_count(llama, measured, tmp_path):
    fixed = Override(match="re:.*down_proj$", scheme="W8A16")
    entry = replace(
        ENTRY, target_bpw=5.2, overrides=(fixed,), ignore=("model.layers.1.self_attn.o_proj",)
    )
    folder = quantize.run(
        QuantizeJob(model=llama, output=tmp_path / "out", entry=entry, measurement=measured),
        QUIET,
    )
    plan = json.loads((folder / "quantize.json").read_text())["plan"]["schemes"]
    assert plan["model.layers.1.self_attn.o_proj"] is None
    assert {plan[f"model.layers.{i}.mlp.down_proj"]["name"] for i in (0, 1)} == {"W8A16"}
    named = {name for item in record(folder)["items"] for name in item["linears"]}
    assert len(named) == 14 - 3 and not any("down_proj" in name for name in named)
    shapes = {name: info.shape for name, info in open_source(llama).checkpoint.infos.items()}
    resolved = recipe_from(read_yaml(folder / "recipe.yaml")).quantize[0]
    again = resolve(resolved, graph_for(open_source(llama).config), shapes).schemes
    assert {name: None if s is None else scheme_words(s) for name, s in again.items()} == {
        name: None if s is None else {**s, "transforms": tuple(s["transforms"])}
        for name, s in plan.items()
    }
    assert record(folder)["bits_per_weight"] <= 5.2


@pytest.mark.slow
def test_what_best_mixes_is_chosen_for_the_weights_as_they_are_and_then_smoothed(
    llama, text_files, tmp_path
):
    entry = replace(ENTRY, algorithm="best", tune=Tune(steps=0))
    assert transforms_of(entry) == ()
    calibration = Calibration(source=str(text_files["calibration"]), samples=6, sequence_length=48)
    job = MeasureJob(
        model=llama,
        output=tmp_path / "m",
        calibration=calibration,
        options=Measure(stats=statistics_for([entry])),
    )
    measured = measure.run(job, QUIET)
    folder = quantize.run(
        QuantizeJob(model=llama, output=tmp_path / "out", entry=entry, measurement=measured),
        QUIET,
    )
    (recipe,) = recipe_from(read_yaml(folder / "recipe.yaml")).quantize
    assert transforms_of(recipe) == (("smoothquant", {"alpha": "auto", "linears": True}),)
    decisions = json.loads((folder / "layers" / "00000.json").read_text())["decisions"]
    assert all("smoothquant" in of for of in decisions.values())
    assert record(folder)["bits_per_weight"] <= 4.7


def test_candidates_are_integers_of_all_widths_with_zero_points_where_the_scheme_has_them(llama):
    symmetric = candidates_of(Quantize(name="x", scheme="W4A16", target_bpw=4.0))
    assert len(symmetric) == 16 and Candidate(scheme="W5A16", group_size=64) in symmetric
    asymmetric = candidates_of(Quantize(name="x", scheme="W4A16_ASYM", target_bpw=4.0))
    assert {each.scheme for each in asymmetric} == {
        *(f"W{bits}A16_ASYM" for bits in (2, 3, 4, 5, 6)),
        "W8A16",
    }
    with pytest.raises(
        UsageError, match="candidate FP8_DYNAMIC; choose from schemes of integer weights"
    ):
        candidates_of(
            Quantize(
                name="x",
                scheme="W4A16",
                target_bpw=4.0,
                candidates=(Candidate(scheme="FP8_DYNAMIC"),),
            )
        )


def test_candidates_beside_a_type_of_llama_cpp_are_its_types():
    types = [
        each.scheme for each in candidates_of(Quantize(name="x", scheme="Q4_K_M", target_bpw=4))
    ]
    assert {"Q2_K", "IQ2_XXS", "IQ3_S", "IQ4_XS", "Q6_K", "Q8_0"} < set(types)
    assert not {"TQ1_0", "TQ2_0"} & set(types) and set(types) < set(BLOCK_TYPES)
    with pytest.raises(UsageError, match="candidates Q4_K and W4A16; choose among llama.cpp's"):
        candidates_of(
            Quantize(
                name="x",
                scheme="Q4_K",
                target_bpw=4.0,
                candidates=(Candidate(scheme="W4A16"), Candidate(scheme="Q4_K")),
            )
        )


def test_a_choice_beside_a_mixture_of_llama_cpps_spells_out_every_linear(llama):
    """Or a linear of that name would get the type that the mixture gives to its role."""
    candidates = tuple(Candidate(scheme=name, group_size=32) for name in ("IQ3_S", "Q4_K", "Q5_K"))
    entry = Quantize(name="mixed", scheme="IQ3_S", candidates=candidates, target_bpw=3.5)
    chosen = mixture(llama, entry)
    assert chosen.picks == (1, 0)
    assert [each.scheme for each in chosen.resolved().overrides] == ["Q4_K", "IQ3_S"]


def test_among_types_of_llama_cpp_bits_are_those_of_the_file_and_nothing_is_fused(
    llama, measured, tmp_path
):
    """gguf-py counts the bytes. Rows of 64 inputs fit types with blocks of 32 alone."""
    entry = Quantize(name="types", scheme="Q4_K_M", algorithm="rtn", target_bpw=5.2)
    folder = quantize.run(
        QuantizeJob(model=llama, output=tmp_path / "q", entry=entry, measurement=measured), QUIET
    )
    assert run("export", folder, "-o", tmp_path / "a", "-q") == 0
    assert run("export", tmp_path / "a", "-o", tmp_path / "f", "--format", "gguf", "-q") == 0
    (file,) = (tmp_path / "f").glob("*.gguf")
    tensors = [
        tensor
        for tensor in GGUFReader(file).tensors
        if tensor.name.startswith("blk.") and "norm" not in tensor.name
    ]
    bits = sum(8 * int(tensor.n_bytes) for tensor in tensors)
    told = record(folder)
    weights = sum(int(tensor.n_elements) for tensor in tensors)
    assert told["bits_per_weight"] == bits / weights
    assert 4.9 < told["bits_per_weight"] <= 5.2
    types = {tensor.name: tensor.tensor_type.name for tensor in tensors}
    assert len(set(types.values())) > 1
    assert all(len(item["linears"]) == 1 for item in told["items"])
    resolved = recipe_from(read_yaml(folder / "recipe.yaml")).quantize[0]
    source = open_source(llama)
    shapes = {name: info.shape for name, info in source.checkpoint.infos.items()}
    again = resolve(resolved, graph_for(source.config), shapes).schemes
    assert sorted(scheme.name for scheme in again.values()) == sorted(types.values())


@pytest.mark.parametrize("scheme", ["Q4_K_M", "W4A16"])
def test_a_size_bounds_the_files_and_little_of_it_is_left(llama, measured, tmp_path, scheme):
    """Of GGUF with llama.cpp's types, header and tokenizer among it; else of safetensors."""

    def made(target):
        candidates = None if scheme == "Q4_K_M" else SMALL
        entry = Quantize(
            name="size", scheme=scheme, algorithm="rtn", target_size=target, candidates=candidates
        )
        return quantize.run(
            QuantizeJob(model=llama, output=tmp_path / target, entry=entry, measurement=measured),
            QUIET,
        )

    def size(folder):
        assert run("export", folder, "-o", tmp_path / "a", "-q") == 0
        files = list((tmp_path / "a").glob("*.safetensors"))
        if scheme == "Q4_K_M":
            line = ("export", tmp_path / "a", "-o", tmp_path / "f", "--format", "gguf", "-q")
            assert run(*line) == 0
            files = list((tmp_path / "f").glob("*.gguf"))
        return sum(path.stat().st_size for path in files)

    with pytest.raises(UsageError, match="target_size=1KB, the smallest candidates take") as least:
        made("1KB")
    numbers = [int(word.replace(",", "")) for word in re.findall(r"[0-9,]{5,}", str(least.value))]
    target = sum(numbers) + 20_000
    folder = made(f"{target}B")
    written = size(folder)
    linears = sum(len(item["linears"]) for item in record(folder)["items"])
    step = max(  # bytes between a choice and the next larger one
        max(option["bits"] for option in item["options"]) // 8 for item in record(folder)["items"]
    )
    assert target - step - SPARE * linears < written <= target
    assert record(folder)["target_size"] == f"{target}B"


def test_experts_of_a_layer_share_a_type_of_llama_cpp_tensor_by_tensor(family_model):
    graph = graph_for(open_source(family_model("qwen3_moe")).config)
    (layer, *_) = graph.layers
    wanted = frozenset(layer.linears)
    experts = [names for names, routed in _units(layer, wanted, apart=True) if routed]
    assert [{name.rpartition(".")[2] for name in names} for names in experts] == [
        {"gate_proj"},
        {"up_proj"},
        {"down_proj"},
    ]
    assert all(len(names) == layer.experts for names in experts)
    (together,) = (
        n for n, of_experts in _units(layer, frozenset(layer.linears), apart=False) if of_experts
    )
    assert sorted(together) == sorted(sum(experts, []))


def test_an_override_by_a_name_of_both_a_type_and_a_mixture_means_the_type(llama):
    """llama.cpp's file IQ3_S has other types in some linears, its type IQ3_S is one of them."""
    source = open_source(llama)
    graph = graph_for(source.config)
    shapes = {f"{name}.weight": (256, 256) for name in graph.linears}
    output = "re:.*o_proj$"
    entry = Quantize(
        name="x", scheme="IQ3_XXS", overrides=(Override(match=output, scheme="IQ3_XXS"),)
    )
    found = resolve(entry, graph, shapes).schemes
    plain = resolve(replace(entry, overrides=()), graph, shapes).schemes
    assert {s.name for n, s in plain.items() if n.endswith("o_proj")} == {"IQ3_S"}
    assert {s.name for n, s in found.items() if n.endswith("o_proj")} == {"IQ3_XXS"}
    assert {n: s for n, s in found.items() if not n.endswith("o_proj")} == {
        n: s for n, s in plain.items() if not n.endswith("o_proj")
    }


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            {"target_bpw": 4.0, "max_kld": 0.1},
            "target_bpw=4.0 beside max_kld=0.1; give one of them",
        ),
        (
            {"target_bpw": 4.0, "target_size": "4GB"},
            "target_bpw=4.0 beside target_size=4GB; give one of them",
        ),
        ({"target_bpw": 0.0}, "target_bpw=0.0; give a positive number"),
        ({"target_size": "4XB"}, "size '4XB'; write a positive number"),
        (
            {"target_size": "4GB", "bits_of": "active"},
            "target_size=4GB of active bits; a file holds all; leave bits_of out",
        ),
        ({"max_kld": float("nan")}, "max_kld=nan; give a positive number"),
        ({"candidates": THREE}, "3 candidates, and nothing to choose; .* leave candidates out"),
        ({"candidates": (), "target_bpw": 4.0}, "0 candidates, target_bpw=4.0; name at least one"),
    ],
)
def test_words_that_no_choice_follows_are_refused(words, message):
    with pytest.raises(UsageError, match=message):
        Quantize(name="x", scheme="W4A16", **words)


def test_what_has_to_be_measured_first_is_told(llama, text_files, tmp_path):
    assert statistics_for(entries_of("W4A16@4.25")) == ("fisher",)
    with pytest.raises(UsageError, match="'four' is no number of bits; write W4A16@4.25"):
        entries_of("W4A16@four")
    job = QuantizeJob(model=llama, output=tmp_path / "out", entry=ENTRY)
    with pytest.raises(UsageError, match="needs count, hessian_sum, square_sum, none is given"):
        quantize.run(job, QUIET)
    text = ("--calibration", text_files["calibration"], "--samples", 2)
    assert run("measure", llama, "-o", tmp_path / "1", *text, "--for", "W4A16") == 0
    # as for measurements that cannot be completed, such as those of several ranks
    with pytest.raises(
        StatisticsError, match="no square_sum of its gradient; measure with --stats fisher"
    ):
        quantize.run(replace(job, measurement=tmp_path / "1"), QUIET)
    with pytest.raises(
        UsageError, match="target_size or max_kld with --ranks 2; choose with one process"
    ):
        quantize.run(QuantizeJob(model=llama, output=tmp_path / "out", entry=ENTRY, ranks=2), QUIET)


@pytest.mark.parametrize("transform", ["smoothquant", "awq", "hadamard"])
def test_transforms_are_refused_before_anything_is_measured_or_chosen(llama, tmp_path, transform):
    entry = Quantize(name="x", scheme="W4A16", target_bpw=4.5, transforms=({transform: None},))
    message = f"target_size or max_kld with transform {transform}; .* leave transforms out"
    with pytest.raises(UsageError, match=message):
        statistics_for([entry])
    with pytest.raises(UsageError, match=message):
        quantize.run(QuantizeJob(model=llama, output=tmp_path / "out", entry=entry), QUIET)
    assert not (tmp_path / "out").exists()


def test_a_verb_prints_the_choice_and_draws_the_pareto_curve(llama, measured, tmp_path, capsys):
    line = (
        "quantize",
        llama,
        "-o",
        tmp_path / "out",
        "--target-bpw",
        "4.6",
        "--measurement",
        measured,
    )
    assert run(*line) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0].split("  ")[0] == "scheme" and out[-1] == str(tmp_path / "out")
    total = next(row for row in out if row.startswith("all"))
    assert "100.0%" in total and "measured" in total
    drawing = ElementTree.fromstring((tmp_path / "out" / "pareto.svg").read_text())
    labels = [text.text for text in drawing.iter("{http://www.w3.org/2000/svg}text")]
    assert "W4A16 g32" in labels and "chosen" in labels and "best mixtures, predicted" in labels


def test_a_kept_choice_of_something_else_or_damaged_is_made_again(mixed, llama, tmp_path):
    graph = graph_for(open_source(llama).config)
    (path,) = mixed.glob(".choice-*.json")
    kept = path.read_text()
    key = json.loads(kept)["key"]
    (tmp_path / path.name).write_text(kept)
    found = chosen_mixture.read(tmp_path, ENTRY, graph, key=key)
    assert found.settled and found.picks == tuple(item["chosen"] for item in record(mixed)["items"])
    assert chosen_mixture.read(tmp_path, ENTRY, graph, key="other") is None
    for damaged in (
        kept[:100],
        kept.replace('"picks"', '"peaks"'),
        kept.replace(key, key[:16]),
        "[]",
    ):
        (tmp_path / path.name).write_text(damaged)
        assert chosen_mixture.read(tmp_path, ENTRY, graph, key=key) is None
