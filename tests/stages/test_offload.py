"""Generation from disk and validation layer by layer.

The numbers are those of the whole models, in a fraction of their memory.
"""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from quantflow.models import layer_store
from quantflow.planning.recipe import Resources, Validate
from quantflow.reporting.progress_line import ProgressLine
from quantflow.runtime.generation import GenerateJob as Generate
from quantflow.runtime.generation import run as generate
from quantflow.stages.cli import cli
from quantflow.stages.cli.output import exit_code
from quantflow.validating import validate as stage
from quantflow.validating.job import ValidateJob
from tests.conftest import write_model

ROOT = Path(__file__).resolve().parents[2]
GATE = "thresholds: {ppl_ratio: 100, mean_kld: 100, kld_p999: 100, top1_agreement: 0.0}\n"
PEAK = """
import sys
from pathlib import Path
# imported here, so that it is not counted as memory of the weights
from transformers.models.llama import modeling_llama
import quantflow.runtime.offload
from quantflow.runtime.generation import GenerateJob, run
artifact = Path(sys.argv[1])
job = GenerateJob(artifact=artifact, prompts=("value scale",), max_new_tokens=3, disk_offload=True)
def peak():
    lines = [line for line in open("/proc/self/status") if line.startswith("VmHWM")]
    return int(lines[0].split()[1]) * 1024
before = peak()
tokens = run(job, lambda text: None)["outputs"][0]["tokens"]
print(tokens, peak() - before)
"""


def quantflow(*arguments) -> None:
    assert exit_code(cli, [str(argument) for argument in arguments]) == 0


@pytest.fixture(scope="module")
def artifact(tmp_path_factory, llama):
    work = tmp_path_factory.mktemp("offload")
    quantflow(
        "quantize",
        "--no-export",
        llama,
        "-o",
        work / "2",
        "--scheme",
        "W4A16",
        "--group-size",
        "32",
        "--algorithm",
        "rtn",
        "-q",
    )
    quantflow("export", work / "2", "-o", work / "4", "-q")
    return work / "4"


@pytest.fixture
def job(artifact, llama, text_files, tmp_path):
    (tmp_path / "gate.yaml").write_text(GATE)
    options = Validate(
        text=str(text_files["heldout"]),
        tokens=256,
        sequence_length=64,
        gate=str(tmp_path / "gate.yaml"),
    )
    return ValidateJob(artifact=artifact, baseline=llama, report=tmp_path / "5", options=options)


def changed(job, **values):
    return ValidateJob(**{**vars(job), **values})


def test_generation_from_disk_prints_the_text_of_the_loaded_model(artifact):
    pieces = {True: [], False: []}
    results = {}
    for offload, said in pieces.items():
        job = Generate(
            artifact=artifact, prompts=("value scale",), max_new_tokens=12, disk_offload=offload
        )
        results[offload] = generate(job, said.append)["outputs"]
    assert results[True] == results[False]
    assert pieces[True] == pieces[False]
    assert len(results[True][0]["tokens"]) > 1


def test_generation_of_a_mixture_from_disk_says_how_often_experts_were_in_memory(mixture, capsys):
    line = ["generate", mixture, "--prompt", "value scale", "--max-new-tokens", "6", "--json"]
    results = []
    for options in ((), ("--disk-offload",), ("--disk-offload", "--max-memory", "64GB")):
        capsys.readouterr()
        quantflow(*line, "--decoder", "transformers" if not options else "auto", *options)
        said = capsys.readouterr()
        results.append(json.loads(said.out))
        experts = results[-1]["experts"]
        if not options:
            assert experts is None
            continue
        assert experts["hits"] > 0
        assert experts["misses"] > 0
        assert experts["hit_rate"] == experts["hits"] / (experts["hits"] + experts["misses"])
        rate = results[-1]["timing"]["tokens_per_second"]
        assert (
            f"generate: {rate:.2f} tokens per second; {experts['hits']} of "
            f"{experts['hits'] + experts['misses']} chosen experts were in memory "
            f"({experts['hit_rate']:.0%}), " in said.err
        )
    assert results[0]["outputs"] == results[1]["outputs"] == results[2]["outputs"]


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (("--max-memory", "4GB"), 2, "generate: max_memory without disk_offload"),
        (("--disk-offload", "--max-memory", "4 apples"), 2, "size '4 apples'"),
        (("--disk-offload", "--max-memory", "50MB"), 5, "--max-memory 50MB leaves 0"),
    ],
)
def test_limits_of_generation_that_mean_nothing_are_refused(
    mixture, options, code, message, capsys
):
    line = ["generate", str(mixture), "--prompt", "value scale", *options]
    assert exit_code(cli, line) == code
    assert message in capsys.readouterr().err


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    work = tmp_path_factory.mktemp("mixture")
    source = write_model(work / "model", "mixtral")
    rounding = ("--scheme", "W8A16", "--algorithm", "rtn", "--export", work / "4", "-q")
    quantflow("quantize", source, "-o", work / "2", *rounding)
    return work / "4"


def test_metrics_are_those_of_both_models_run_whole_by_transformers(job):
    result = stage.run(job, ProgressLine(quiet=True))
    sequences = stage._sequences(job, {"measurement": None}, ProgressLine(quiet=True))
    baseline = AutoModelForCausalLM.from_pretrained(job.baseline, dtype=torch.float32)
    candidate = AutoModelForCausalLM.from_pretrained(job.artifact, dtype=torch.float32)
    kld, agreement, nll = [], [], []
    with torch.inference_mode():
        for tokens in sequences:
            p, q = (
                model(tokens[None]).logits[0, :-1].double().log_softmax(-1)
                for model in (baseline, candidate)
            )
            kld.append((p.exp() * (p - q)).sum(-1))
            agreement.append((p.argmax(-1) == q.argmax(-1)).double())
            nll.append(-p.gather(1, tokens[1:, None])[:, 0])
    assert result["protocol"]["windows"] == len(sequences) > 2
    assert result["metrics"]["mean_kld"]["value"] == pytest.approx(
        torch.cat(kld).mean().item(), rel=1e-3
    )
    assert result["metrics"]["top1_agreement"]["value"] == pytest.approx(
        torch.cat(agreement).mean().item(), abs=0.01
    )
    assert result["perplexity"]["baseline"] == pytest.approx(
        math.exp(torch.cat(nll).mean()), rel=1e-5
    )
    assert 0 < result["noise_floor"]["mean_kld"]["value"] < 0.1


def test_workers_change_no_bit_of_a_validation(job, tmp_path, monkeypatch):
    stage.run(job, ProgressLine(quiet=True))
    expected = (job.report / "validation.json").read_bytes()
    plan = stage.allow_validate

    def small(*arguments, **options):
        return type(allowed := plan(*arguments, **options))(**{**vars(allowed), "workers": 1})

    monkeypatch.setattr(stage, "allow_validate", small)
    other = changed(job, report=tmp_path / "other", cache=tmp_path / "nothing")
    stage.run(other, ProgressLine(quiet=True))
    assert (other.report / "validation.json").read_bytes() == expected


def test_a_validation_that_was_stopped_goes_on_with_its_layer_and_ends_with_the_same_numbers(
    job, tmp_path, monkeypatch
):
    stage.run(job, ProgressLine(quiet=True))
    stopped = changed(job, report=tmp_path / "stopped", cache=tmp_path / "nothing")
    layers = []
    advance = stage.LayerStream.advance

    def stop(self, *arguments, **options):
        if len(layers) == 3:  # the candidate's second layer
            raise KeyboardInterrupt
        layers.append(self)
        advance(self, *arguments, **options)

    monkeypatch.setattr(stage.LayerStream, "advance", stop)
    with pytest.raises(KeyboardInterrupt):
        stage.run(stopped, ProgressLine(quiet=True))
    assert not (stopped.report / "validation.json").exists()
    assert layer_store.scratch(stopped.report).is_dir()

    def count(self, *arguments, **options):
        layers.append(self)
        advance(self, *arguments, **options)

    monkeypatch.setattr(stage.LayerStream, "advance", count)
    stage.run(stopped, ProgressLine(quiet=True))
    assert len(layers) == 3 * 2  # three models of two layers, none of which ran twice
    assert (stopped.report / "validation.json").read_bytes() == (
        job.report / "validation.json"
    ).read_bytes()
    assert not layer_store.scratch(stopped.report).exists()


def test_a_validation_that_does_not_fit_says_what_it_needs_before_it_reads_a_layer(job):
    tight = changed(job, resources=Resources(max_memory="1MB"))
    with pytest.raises(Exception, match=r"^validate: needs \d+ bytes of memory .*--max-memory 1MB"):
        stage.run(tight, ProgressLine(quiet=True))
    assert not (job.report / "validation.json").exists()


@pytest.mark.slow
def test_the_peak_of_generation_from_disk_is_a_fraction_of_the_weights(large_artifact):
    folder, nbytes = large_artifact
    expected = generate(
        Generate(artifact=folder, prompts=("value scale",), max_new_tokens=3), lambda _: None
    )["outputs"][0]["tokens"]
    found = subprocess.run(
        [sys.executable, "-c", PEAK, folder], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    tokens, _, grown = found.strip().rpartition(" ")
    assert json.loads(tokens) == expected
    assert nbytes > 80e6
    assert int(grown) < 40e6


@pytest.fixture(scope="module")
def large_artifact(tmp_path_factory, llama):
    """An artifact, and its bytes.

    Two thirds are embedding and head, the rest two layers of W8A16.
    """
    work = tmp_path_factory.mktemp("large")
    config = AutoConfig.from_pretrained(llama)
    config.update(
        {
            "hidden_size": 512,
            "intermediate_size": 8192,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
        }
    )
    config.update({"head_dim": 128, "vocab_size": 30000})
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(work / "model")
    for path in llama.glob("*token*"):
        (work / "model" / path.name).write_bytes(path.read_bytes())
    quantflow(
        "quantize",
        "--no-export",
        work / "model",
        "-o",
        work / "2",
        "--scheme",
        "W8A16",
        "--algorithm",
        "rtn",
        "-q",
    )
    quantflow("export", work / "2", "-o", work / "4", "-q")
    return work / "4", sum(path.stat().st_size for path in (work / "4").glob("*.safetensors"))
