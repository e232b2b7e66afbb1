"""examples/serving: the files agree with each other and with what the server says at /metrics."""

import json
import re
from pathlib import Path

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
