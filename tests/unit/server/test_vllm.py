"""`serve --engine vllm`: the command that follows from an artifact's files.

vLLM itself is a program that prints its arguments.
"""

import json
import os
import shutil
import stat
import subprocess
import sys

import pytest

from quantflow.errors import UnsupportedError, UsageError
from quantflow.server import vllm
from quantflow.server.settings import Limits, ServeJob
from quantflow.stages.cli import cli
from quantflow.stages.cli.output import exit_code


def test_the_command_says_what_the_artifact_says(artifact, capsys):
    limits = Limits(max_total_tokens=512, max_batch_size=8)
    words = vllm.command_of(
        ServeJob(
            artifact=artifact,
            engine="vllm",
            limits=limits,
            tensor_parallel=2,
            adapters=("a=/a", "b=/b"),
        )
    )
    expected = [
        "vllm",
        "serve",
        str(artifact),
        "--served-model-name",
        "python-model",
        "--host",
        "127.0.0.1",
        "--port",
        "8000",
    ]
    expected += [
        "--dtype",
        "bfloat16",
        "--tensor-parallel-size",
        "2",
        "--enable-lora",
        "--lora-modules",
        "a=/a",
        "b=/b",
    ]
    expected += ["--max-model-len", "512", "--max-num-seqs", "8"]
    assert words == expected
    job = ServeJob(
        artifact=artifact, engine="vllm", tool_parser="llama", reasoning_parser="deepseek_r1"
    )
    assert vllm.command_of(job)[-5:] == [
        "--enable-auto-tool-choice",
        "--tool-call-parser",
        "llama3_json",
        "--reasoning-parser",
        "deepseek_r1",
    ]
    command = ["serve", str(artifact), "--engine", "vllm", "--dry-run", "--port", "8001"]
    assert exit_code(cli, command) == 0
    assert capsys.readouterr().out.split()[:3] == ["vllm", "serve", str(artifact)]


def changed(artifact, folder, change):
    """A job for a copy whose config.json was changed; nothing checks its hashes."""
    shutil.copytree(artifact, folder)
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (folder / "config.json").write_text(json.dumps(config))
    return ServeJob(artifact=folder, engine="vllm")


def test_float8_keys_and_values_are_kept_in_float8(artifact, tmp_path):
    def change(config):
        config["quantization_config"]["kv_cache_scheme"] = {
            "type": "float",
            "num_bits": 8,
            "strategy": "tensor",
        }

    words = vllm.command_of(changed(artifact, tmp_path / "kv", change))
    assert words[words.index("--kv-cache-dtype") + 1] == "fp8"


def test_what_vllm_cannot_do_is_refused(artifact, tmp_path):
    def zero_points(config):
        for group in config["quantization_config"]["config_groups"].values():
            group["weights"]["symmetric"] = False

    with pytest.raises(UnsupportedError, match="zero points"):
        vllm.command_of(changed(artifact, tmp_path / "asymmetric", zero_points))
    with pytest.raises(UsageError, match="8 heads"):
        vllm.command_of(ServeJob(artifact=artifact, engine="vllm", tensor_parallel=3))


@pytest.mark.parametrize(
    "options",
    [
        {"kv_memory": "1GiB"},
        {"token_ids": True},
        {"protect_health": True},
        {"allowed_host": ("example",)},
        {"disable_grammar_support": True},
        {"payload_limit": 10},
        {"backend": "reference"},
        {"dtype": "bfloat16"},
        {"limits": Limits(max_concurrent_requests=8)},
        {"limits": Limits(max_input_tokens=100)},
    ],
    ids=str,
)
def test_an_option_that_vllm_is_not_told_of_is_refused(artifact, options):
    limits = options.get("limits")
    names = (
        [name for name, value in vars(limits).items() if value != vars(Limits())[name]]
        if limits
        else list(options)
    )
    (name,) = names
    with pytest.raises(UsageError, match=f"--{name.replace('_', '-')} with --engine vllm"):
        vllm.command_of(ServeJob(artifact=artifact, engine="vllm", **options))


def test_without_vllm_it_is_said_in_two_lines(artifact, monkeypatch, capsys):
    monkeypatch.setenv("PATH", "")
    assert exit_code(cli, ["serve", str(artifact), "--engine", "vllm"]) == 6
    assert "install vllm" in capsys.readouterr().err


def test_vllm_takes_the_process_over_and_its_key_is_on_no_command_line(artifact, tmp_path):
    program = tmp_path / "vllm"
    told = "print(json.dumps([sys.argv[1:], os.environ['VLLM_API_KEY']]))"
    program.write_text(f"#!{sys.executable}\nimport json, os, sys\n{told}\nsys.exit(9)\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    command = [sys.executable, "-m", "quantflow", "serve", str(artifact), "--engine", "vllm"]
    environment = {**os.environ, "PATH": str(tmp_path), "API_KEY": "secret"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    words, key = json.loads(done.stdout)
    assert (done.returncode, words[:2], key) == (
        9,
        ["serve", str(artifact)],
        "secret",
    ) and "secret" not in words
