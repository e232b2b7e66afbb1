"""Calibration text that the model writes itself."""

import math
from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from quantflow.core import determinism
from quantflow.errors import ResourceError, UsageError
from quantflow.exporting.artifact_job import ArtifactJob
from quantflow.files.canonical import read_json
from quantflow.files.manifest import MANIFEST_NAME
from quantflow.files.rank_folders import rank_folder
from quantflow.files.stage_folder import done
from quantflow.measuring import measure, synthetic
from quantflow.measuring.job import MeasureJob
from quantflow.measuring.record import read_measurement
from quantflow.models.tokenizer import load_tokenizer
from quantflow.planning.cost import MODEL_BASE, WRITTEN_AT_ONCE
from quantflow.planning.plan_job import PlanJob
from quantflow.planning.recipe import Calibration, Measure, Quantize, Recipe, Resources
from quantflow.progress import SILENT, Silent
from tests.conftest import DISCOVERED, FAMILIES

GIVEN, LENGTH, OWN = 4, 24, 6


class Heard(Silent):
    """Progress that keeps the units of its steps."""

    def __init__(self):
        self.batches = []

    def steps(self, items, *, stage, **fields):
        for item in super().steps(items, stage=stage, **fields):
            if "writes" in stage:
                self.batches.append(item)
            yield item


@pytest.fixture
def text(tmp_path):
    """A file of four sequences of 24 token ids."""
    ids = torch.randint(3, 60, (GIVEN, LENGTH), generator=torch.Generator().manual_seed(5))
    path = tmp_path / "ids.safetensors"
    save_file({"input_ids": ids}, path)
    return path


def _job(model, output, text, *, own=OWN, ranks=1, **more):
    calibration = Calibration(
        source=str(text), samples=GIVEN, sequence_length=LENGTH, synthetic=own
    )
    options = Measure(stats=("amax",), ranks=ranks)
    return MeasureJob(model=model, output=output, calibration=calibration, options=options, **more)


def _measured(job, progress=SILENT, *, ranks=1):
    measure.run(job, progress)
    read = [read_measurement(rank_folder(job.output, rank, ranks)) for rank in range(ranks)]
    numbered = {
        index: sequence.tolist()
        for one in read
        for index, sequence in zip(one.indices, one.sequences, strict=True)
    }
    return read[0].meta, [numbered[index] for index in sorted(numbered)]


def test_the_models_sequences_follow_those_of_the_text(llama, tmp_path, text):
    plain, given = _measured(_job(llama, tmp_path / "plain", text, own=0))
    meta, every = _measured(_job(llama, tmp_path / "own", text))
    assert every[:GIVEN] == given
    own = every[GIVEN:]
    assert len(own) == OWN
    for number, sequence in enumerate(own):
        begun_by = given[number % GIVEN]
        assert len(sequence) == LENGTH
        assert sequence[: LENGTH // 2] == begun_by[: LENGTH // 2]
        assert sequence[LENGTH // 2 :] != begun_by[LENGTH // 2 :]
    # two that begin alike are drawn apart
    assert own[0] != own[GIVEN]
    # its head has more rows than the tokenizer has tokens
    known = len(load_tokenizer(llama))
    assert known < AutoConfig.from_pretrained(llama).vocab_size
    assert max(map(max, own)) < known
    assert meta["calibration"]["synthetic"] == OWN
    assert meta["calibration"]["samples"] == GIVEN + OWN
    assert "synthetic" not in plain["calibration"]


def test_sequences_are_as_long_as_those_that_begin_them(llama, tmp_path):
    text = tmp_path / "ids.safetensors"
    tokens = torch.arange(3, 3 + 12 + 5)
    save_file({"tokens": tokens, "lengths": torch.tensor([12, 5])}, text)
    _, every = _measured(_job(llama, tmp_path / "m", text, own=3))
    lengths = [len(sequence) for sequence in every]
    assert sorted(lengths[:2]) == [5, 12]
    assert lengths[2:] == [lengths[0], lengths[1], lengths[0]]


def test_tokens_are_those_that_the_model_predicts(llama, tmp_path, text, monkeypatch):
    # a head so large that one token has all of the probability: the draw is then greedy
    sure = tmp_path / "sure"
    model = AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float32)
    with torch.no_grad():
        model.lm_head.weight.mul_(1e4)
    model.save_pretrained(sure)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (sure / file).write_bytes((llama / file).read_bytes())
    monkeypatch.setattr(determinism, "products", lambda device: torch.float32)
    _, every = _measured(_job(sure, tmp_path / "m", text))
    begun = torch.tensor([sequence[: LENGTH // 2] for sequence in every[GIVEN:]])
    wanted = model.generate(
        begun,
        attention_mask=torch.ones_like(begun),
        max_new_tokens=LENGTH // 2,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    assert every[GIVEN:] == wanted.tolist()


def test_draws_follow_the_models_distribution(llama, tmp_path, text, monkeypatch):
    """The mean of a drawn token's log probability is minus the entropy; a filter would raise it."""
    peaked = tmp_path / "peaked"
    model = AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float32)
    with torch.no_grad():
        model.lm_head.weight.mul_(8)
    model.save_pretrained(peaked)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (peaked / file).write_bytes((llama / file).read_bytes())
    monkeypatch.setattr(determinism, "products", lambda device: torch.float32)
    _, every = _measured(_job(peaked, tmp_path / "m", text, own=64))
    own = torch.tensor(every[GIVEN:])
    known = len(load_tokenizer(llama))
    with torch.no_grad():
        logits = model(own).logits[:, LENGTH // 2 - 1 : -1, :known]
    log = logits.log_softmax(-1).double()
    entropy = -(log.exp() * log).sum(-1)
    assert 0.5 < float(entropy.mean()) < 0.8 * math.log(known)
    off = log.gather(-1, own[:, LENGTH // 2 :, None])[..., 0] + entropy
    assert abs(float(off.mean())) < 3 * float(off.std()) / math.sqrt(off.numel())


def test_a_finished_text_is_kept_and_another_seed_is_refused(llama, tmp_path, text):
    job = _job(llama, tmp_path / "m", text)
    _, first = _measured(job)
    heard = Heard()
    _, again = _measured(job, heard)
    assert (again, heard.batches) == (first, [])
    with pytest.raises(UsageError, match="seed = 0, now 1"):
        measure.run(replace(job, seed=1), SILENT)
    _, other = _measured(replace(job, seed=1, force=True))
    assert other[GIVEN:] != first[GIVEN:]


def test_a_stopped_text_goes_on_at_its_batch(llama, tmp_path, text, monkeypatch):
    monkeypatch.setattr(synthetic, "WRITTEN_AT_ONCE", 2)
    _, whole = _measured(_job(llama, tmp_path / "whole", text))
    assert whole[GIVEN] != whole[GIVEN + 4]  # they begin alike, in two batches
    continued, calls = synthetic._continued, []

    def stops(decoder, batch, **options):
        calls.append(batch)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return continued(decoder, batch, **options)

    monkeypatch.setattr(synthetic, "_continued", stops)
    job = _job(llama, tmp_path / "m", text)
    with pytest.raises(KeyboardInterrupt):
        measure.run(job, SILENT)
    assert done(job.output / synthetic.NAME) is None
    heard = Heard()
    _, resumed = _measured(job, heard)
    assert resumed == whole
    assert heard.batches == [1, 2]
    assert not (job.output / ".text.work").exists()


def test_ranks_share_one_text(llama, tmp_path, text):
    _, alone = _measured(_job(llama, tmp_path / "one", text))
    _, shared = _measured(_job(llama, tmp_path / "two", text, ranks=2), ranks=2)
    assert shared == alone


def test_torchrun_is_refused_with_the_way_that_works(llama, tmp_path, text, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29500")
    with pytest.raises(UsageError, match="synthetic=6 under torchrun") as refused:
        measure.run(_job(llama, tmp_path / "m", text, trust_network=True), SILENT)
    assert "text/calibration.safetensors" in refused.value.remedy
    assert not (tmp_path / "m").exists()


def test_a_model_that_does_not_fit_is_refused_before_it_writes(llama, tmp_path, text):
    job = _job(llama, tmp_path / "m", text, resources=Resources(max_memory="100MB"))
    with pytest.raises(ResourceError, match="measure: needs"):
        measure.run(job, SILENT)
    assert not (job.output / synthetic.NAME).exists()


def test_an_artifact_is_made_with_it(llama, tmp_path, text):
    job = ArtifactJob(
        model=llama,
        output=tmp_path / "a",
        entry=Quantize(name="a", scheme="W4A16", algorithm="best", group_size=16),
        calibration=_job(llama, tmp_path, text).calibration,
    )
    job.run(SILENT)
    measured = read_measurement(rank_folder(job.work / "1-measure", 0, 1))
    assert len(measured.sequences) == GIVEN + OWN
    manifest = read_json(job.output / MANIFEST_NAME)
    assert manifest["measurement"]["calibration"]["synthetic"] == OWN


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(name, marks=() if name in ("mixtral", "gpt_neox") else pytest.mark.slow)
        for name in (*FAMILIES, *DISCOVERED)
    ],
)
def test_every_family_writes(family_model, tmp_path, text, family):
    job = _job(family_model(family), tmp_path / "m", text, own=3)
    job = replace(job, options=Measure(stats=()))
    _, every = _measured(job)
    assert [len(sequence) for sequence in every] == [LENGTH] * (GIVEN + 3)
    # what is drawn is compared above, for one family; here every family draws
    assert len({tuple(sequence[LENGTH // 2 :]) for sequence in every[GIVEN:]}) == 3


def _planned(model, entry, *, own, length=LENGTH):
    calibration = Calibration(samples=GIVEN, sequence_length=length, synthetic=own)
    recipe = Recipe(model=str(model), calibration=calibration, quantize=(entry,))
    found = PlanJob(recipe=recipe).run()
    (stage,) = [stage for stage in found["stages"] if stage["stage"] == "measure"]
    return found["calibration"], stage


def test_the_plan_counts_the_sequences_and_the_model_in_memory(tmp_path):
    # an embedding and a head of 300 MB in bfloat16, beside which a measurement holds one layer
    shape = {
        "vocab_size": 600_000,
        "hidden_size": 128,
        "intermediate_size": 128,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    model = LlamaForCausalLM(LlamaConfig(**shape)).bfloat16()
    model.save_pretrained(tmp_path)
    entry = Quantize(name="a", scheme="W4A16", algorithm="gptq")
    told, without = _planned(tmp_path, entry, own=0)
    assert told["samples"] == GIVEN
    told, beside = _planned(tmp_path, entry, own=OWN)
    assert told["samples"] == GIVEN + OWN
    weights = model.num_parameters() * determinism.products().itemsize
    assert beside["peak_memory"] > without["peak_memory"]
    assert beside["peak_memory"] > MODEL_BASE + weights
    told, longer = _planned(tmp_path, entry, own=OWN, length=2 * LENGTH)
    cache = 2 * WRITTEN_AT_ONCE * LENGTH * 128 * determinism.products().itemsize
    assert longer["peak_memory"] == beside["peak_memory"] + cache
