"""`serve` as a command line.

Tested are limits that hold and their sources, older names, and variables that are not read.
"""

import os

import pytest

from quantflow.errors import UsageError
from quantflow.runtime.batch_shapes import Buckets, Gaudi
from quantflow.server import settings
from quantflow.server.models import batch_limits, traced_steps
from quantflow.server.settings import ServeJob
from quantflow.stages import serve as stage
from quantflow.stages.cli import cli
from quantflow.stages.cli.output import exit_code


@pytest.fixture
def served(monkeypatch):
    """Return the job that a command line hands over."""
    found = []
    monkeypatch.setattr(stage, "serve", lambda job, progress: found.append(job))

    def call(*arguments, code=0):
        found.clear()
        assert exit_code(cli, ["serve", "ART", *arguments]) == code
        return found[0] if found else None

    return call


def test_variables_of_tgi_count_where_no_option_is_given(served, monkeypatch):
    monkeypatch.setenv("MAX_INPUT_TOKENS", "7")
    monkeypatch.setenv("MAX_CONCURRENT_REQUESTS", "9")
    job = served("--max-concurrent-requests", "3")
    assert (job.limits.max_input_tokens, job.limits.max_concurrent_requests) == (7, 3)
    assert job.origins["max_input_tokens"] == "MAX_INPUT_TOKENS"
    assert job.origins["max_concurrent_requests"] == "--max-concurrent-requests"


def test_the_variable_of_token_ids_is_read(served, monkeypatch):
    assert served().token_ids is False and served("--token-ids").token_ids is True
    monkeypatch.setenv("SKIP_TOKENIZER_IN_TGI", "true")
    assert served().token_ids is True
    monkeypatch.setenv("SKIP_TOKENIZER_IN_TGI", "false")
    assert served().token_ids is False


def test_the_variable_of_the_queues_threshold_is_read(served, monkeypatch):
    assert served().limits.queue_threshold_ms is None
    monkeypatch.setenv("QUEUE_THRESHOLD_MS", "120")
    job = served()
    assert batch_limits(job.limits, positions=64).queue_threshold_ms == 120
    monkeypatch.setenv("QUEUE_THRESHOLD_MS", "soon")
    served(code=2)


def test_the_variables_of_gaudis_profiler_are_read(served, monkeypatch, tmp_path):
    assert served().profile_steps == 0
    values = {
        "STEP": "3",
        "WAITSTEP": "2",
        "WARMUPSTEP": "1",
        "PATH": str(tmp_path),
        "RECORD_SHAPES": "true",
    }
    for name, value in values.items():
        monkeypatch.setenv(f"PROF_{name}", value)
    job = served()
    assert (job.profile_steps, job.profile_wait, job.profile_warmup) == (3, 2, 1)
    assert (job.profile, job.profile_shapes) == (tmp_path, True)
    served("--profile-steps", "-1", code=2)


def test_the_variable_of_the_ranks_that_are_traced_is_read(served, monkeypatch, capsys):
    assert served().traced_ranks == {0}
    monkeypatch.setenv("PROF_STEP", "3")
    monkeypatch.setenv("PROF_RANKS", "1, 3")
    assert served("--ranks", "4").traced_ranks == {1, 3}
    assert served("--ranks", "4", "--profile-ranks", "2").traced_ranks == {2}
    served("--ranks", "2", code=2)
    assert "profile_ranks=1, 3 of 2 ranks" in capsys.readouterr().err
    served("--ranks", "2", "--profile-ranks", "all", code=2)
    assert "profile_ranks='all'" in capsys.readouterr().err


def test_each_rank_that_is_traced_has_a_file_of_its_own(served, tmp_path):
    job = served("--ranks", "3", "--profile", str(tmp_path), "--profile-ranks", "0,2")
    assert traced_steps("org/code", job) is None  # no steps were asked for
    options = ("--profile-steps", "2", "--profile-wait", "1", "--profile-shapes")
    job = served("--ranks", "3", "--profile", str(tmp_path), "--profile-ranks", "0,2", *options)
    traced = [traced_steps("org/code", job, rank=rank) for rank in range(3)]
    assert [one and one.path.name for one in traced] == [
        "org-code.json",
        None,
        "org-code-rank2.json",
    ]
    assert all((one.skip, one.count, one.shapes) == (1, 2, True) for one in traced if one)


def test_older_names_of_limits_are_read_and_said(served, capsys):
    job = served("--max-prefill-total-tokens", "99", "--max-input-length", "11")
    assert (job.limits.max_batch_prefill_tokens, job.limits.max_input_tokens) == (99, 11)
    assert job.origins["max_batch_prefill_tokens"] == "--max-prefill-total-tokens"
    assert (
        "--max-prefill-total-tokens is read as --max-batch-prefill-tokens"
        in capsys.readouterr().err
    )
    served("--max-prefill-total-tokens", "99", "--max-batch-prefill-tokens", "98", code=2)
    assert (
        "--max-prefill-total-tokens 99 beside --max-batch-prefill-tokens 98; give one"
        in capsys.readouterr().err.replace("\n  fix: ", "; ")
    )


def test_a_variable_that_is_not_read_is_said_at_the_start(served, monkeypatch, capsys):
    monkeypatch.setenv("CUDA_MEMORY_FRACTION", "0.5")
    served()
    assert (
        "CUDA_MEMORY_FRACTION=0.5 is not read: give --kv-memory, such as 50%"
        in capsys.readouterr().err
    )


def test_memory_for_keys_and_values_is_a_size_or_a_share_of_what_is_free(served, monkeypatch):
    monkeypatch.setattr(settings, "available_bytes", lambda: 1000)
    assert served("--kv-memory", "50%").kv_bytes == 500
    assert served("--kv-memory", "12.5%").kv_bytes == 125
    assert served("--kv-memory", "4KiB").kv_bytes == 4096
    assert served().kv_bytes is None
    for wrong in ("0%", "101%", "half%", "%", "nan%"):
        with pytest.raises(UsageError, match=f"kv_memory={wrong}; give a size"):
            ServeJob(artifact=None, name="a", kv_memory=wrong)


def test_the_variables_of_gaudis_buckets_are_read(served, monkeypatch):
    assert served().buckets == Buckets() and not served().pads
    monkeypatch.setenv("BATCH_BUCKET_SIZE", "16")
    monkeypatch.setenv("PREFILL_BATCH_BUCKET_SIZE", "1")
    monkeypatch.setenv("PAD_SEQUENCE_TO_MULTIPLE_OF", "128")
    monkeypatch.setenv("WARMUP_ENABLED", "False")
    job = served("--prefill-batch-bucket-size", "2")
    assert job.buckets == Buckets(step_rows=16, prompt_rows=2, pad_to=128, warm_up=False)
    assert job.pads and job.origins["step_rows"] == "BATCH_BUCKET_SIZE"
    assert served("--warm-up").buckets.warm_up
    served("--batch-bucket-size", "0", code=2)


@pytest.mark.parametrize(
    ("lazy", "enabled", "limited", "compiles", "steps", "prompts"),
    [
        ("1", "true", "false", False, True, True),
        ("1", "true", "true", False, True, False),
        ("1", "false", "false", False, False, False),
        ("1", "false", "true", False, False, False),
        *(
            ("0", enabled, limited, True, False, False)
            for enabled in ("true", "false")
            for limited in ("true", "false")
        ),
    ],
)
def test_the_variables_of_gaudis_graphs_are_read(
    served, monkeypatch, lazy, enabled, limited, compiles, steps, prompts
):
    assert served().gaudi == Gaudi()
    monkeypatch.setenv("PT_HPU_LAZY_MODE", lazy)
    monkeypatch.setenv("ENABLE_HPU_GRAPH", enabled)
    monkeypatch.setenv("LIMIT_HPU_GRAPH", limited)
    found = served().gaudi
    assert (found.compiles, found.captures, found.captures_prompts) == (compiles, steps, prompts)


def test_the_variables_of_flash_attention_are_read(served, monkeypatch, capsys):
    assert served().attention == ()
    monkeypatch.setenv("USE_FLASH_ATTENTION", "false")
    assert served().attention == ()
    monkeypatch.setenv("USE_FLASH_ATTENTION", "True")
    assert served().attention == ("fused",)
    monkeypatch.setenv("FLASH_ATTENTION_RECOMPUTE", "true")
    assert served().attention == ("fused", "recompute")
    monkeypatch.delenv("USE_FLASH_ATTENTION")
    served(code=2)
    assert "attention=recompute with none of eager, sdpa and fused" in capsys.readouterr().err


def test_sizes_of_cuda_graphs_are_read(served, monkeypatch):
    assert served().buckets.graph_sizes is None
    assert served("--cuda-graphs", "1,2,4,8").buckets.graph_sizes == "1,2,4,8"
    monkeypatch.setenv("CUDA_GRAPHS", "0")
    assert served().buckets.graph_sizes == "0"
    served("--cuda-graphs", "1,0,4", code=2)


def test_a_quant_config_gives_gaudis_graph_compiler_its_defaults_for_float8(
    served, monkeypatch, capsys
):
    defaults = {
        "ENABLE_EXPERIMENTAL_FLAGS": "true",
        "USE_DEFAULT_QUANT_PARAM": "true",
        "UPDATE_GRAPH_OUTPUT_MME": "false",
        "ENABLE_CALC_DYNAMIC_RANGE": "false",
        "UPDATE_MME_OUTPUT_PRECISION_FILTER": "v_proj,matmul_av",
        "EXPERIMENTAL_WEIGHT_SHARING": "FALSE",
    }

    def found(*words):
        monkeypatch.setattr(os, "environ", {**os.environ, **given})
        served(*words)
        return {name: os.environ[name] for name in defaults if name in os.environ}

    given = {}
    assert found("--device", "hpu") == {}
    given = {"QUANT_CONFIG": "maxabs_quant.json"}
    assert found() == {}
    given["UPDATE_GRAPH_OUTPUT_MME"] = "true"  # what somebody has set stays
    assert found("--device", "hpu") == {**defaults, "UPDATE_GRAPH_OUTPUT_MME": "true"}
    told = capsys.readouterr().err
    assert "EXPERIMENTAL_WEIGHT_SHARING=FALSE is set" in told
    assert "UPDATE_GRAPH_OUTPUT_MME=" not in told
