"""examples/serving: the files agree with each other and with what the server says at /metrics."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

FOLDER = Path(__file__).resolve().parents[3] / "examples/serving"


def test_the_compose_file_names_files_that_are_there():
    compose = yaml.safe_load((FOLDER / "compose.yaml").read_text())
    assert set(compose["services"]) == {"quantflow", "prometheus", "grafana"}
    build = compose["services"]["quantflow"]["build"]
    assert (FOLDER / build["context"] / build["dockerfile"]).resolve() == FOLDER / "Containerfile"
    for service in compose["services"].values():
        for volume in service.get("volumes", ()):
            source = volume.partition(":")[0]
            assert source.startswith("${") or (FOLDER / source).exists(), volume
        assert all(port.startswith("127.0.0.1:") for port in service["ports"])
    (job,) = yaml.safe_load((FOLDER / "prometheus.yaml").read_text())["scrape_configs"]
    assert job["static_configs"] == [{"targets": ["quantflow:8000"]}]
    copied = re.findall(r"^COPY (.+) \S+$", (FOLDER / "Containerfile").read_text(), re.MULTILINE)
    for name in " ".join(copied).split():
        assert (FOLDER.parents[1] / name).exists(), name


def test_every_figure_of_the_dashboard_is_one_that_the_server_tells(server):
    server.generate("def", max_new_tokens=2)
    server.generate("")
    told = set(re.findall(r"^(\w+)", server.get("/metrics").body.decode(), re.MULTILINE))
    dashboard = json.loads((FOLDER / "grafana/dashboards/quantflow.json").read_text())
    asked = {
        name
        for panel in dashboard["panels"]
        for target in panel["targets"]
        for name in re.findall(r"\b(?:tgi|quantflow)_\w+", target["expr"])
    }
    assert len(asked) > 12 and asked <= told, asked - told


def loaded(server, texts, *options):
    command = [
        sys.executable,
        FOLDER / "run_generation.py",
        "--server_address",
        server.url,
        "--text",
        texts,
        "--json",
        *options,
    ]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    return done.returncode, json.loads(done.stdout) if done.stdout else None, done.stderr


def test_the_client_streams_as_many_requests_as_asked_for_and_leaves_long_prompts_out(
    server, tmp_path
):
    before = server.models.first.engine.counters()
    (tmp_path / "texts.txt").write_text("def f(x):\n\nimport os\n\n" + "value " * 40)
    few = (
        "--max_input_length",
        "16",
        "--max_output_length",
        "5",
        "--total_sample_count",
        "6",
        "--max_concurrent_requests",
        "3",
    )
    code, said, told = loaded(server, tmp_path / "texts.txt", *few)
    assert code == 0, told
    assert (said["requests"], said["failed"], said["errors"]) == (6, 0, [])
    assert 6 <= said["tokens"] <= 30 and said["tokens_per_second"] == pytest.approx(
        said["tokens"] / said["seconds"]
    )
    assert 0 < said["first_token_seconds"] <= said["request_seconds"] <= said["seconds"]
    assert server.settled().generated_tokens - before.generated_tokens >= said["tokens"]
    code, said, told = loaded(
        server, tmp_path / "texts.txt", "--max_output_length", "100000", "--total_sample_count", "2"
    )
    assert code == 1 and said["failed"] == 2 and "`max_new_tokens` must be <=" in said["errors"][0]


def test_the_client_says_what_it_cannot_ask(server, tmp_path):
    (tmp_path / "texts.jsonl").write_text('{"text": "import os and sys"}\n')
    code, _, told = loaded(server, tmp_path / "texts.jsonl", "--model_id", "another")
    assert code == 1 and "not another" in told
    code, _, told = loaded(server, tmp_path / "texts.jsonl", "--max_input_length", "1")
    assert code == 1 and "no prompt of 1 tokens or fewer" in told
    code, _, told = loaded(
        server, tmp_path / "texts.jsonl", "--server_address", "http://127.0.0.1:9"
    )
    assert (
        code == 1 and "http://127.0.0.1:9/info: " in told and "start a server there first" in told
    )
