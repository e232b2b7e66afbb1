"""verify, diff, export and validate of names on the hub: what each of them fetches."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hub_server import COMMIT, Hub, serving
from tests.shared import run

WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module")
def made(llama, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("named")
    for name, scheme in (("w8a16", "W8A16"), ("fp8", "FP8_DYNAMIC")):
        assert run("quantize", llama, "-o", folder / name, "--scheme", scheme, "-q") == 0
    return folder


@pytest.fixture
def hub(made, llama, tmp_path, monkeypatch) -> Iterator[Hub]:
    monkeypatch.chdir(tmp_path)
    names = {f"org/{name}": (made / name, False) for name in ("w8a16", "fp8")}
    server = Hub({**names, "org/llama": (llama, False)})
    with serving(server, monkeypatch, cache=tmp_path / "cache"):
        yield server


def header(folder: Path) -> int:
    return 8 + int.from_bytes((folder / WEIGHTS).read_bytes()[:8], "little")


def test_verify_compares_the_hubs_own_hashes_and_reads_headers(hub, made, monkeypatch, capsys):
    monkeypatch.setattr("quantflow.sources.headers._FIRST", 64)
    assert run("verify", "org/w8a16", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert hub.served[WEIGHTS] == header(made / "w8a16")
    assert (found.pop("repository"), found.pop("revision")) == ("org/w8a16", COMMIT)
    assert found.pop("by_the_hub") == 1  # the weights, and what is small is read
    assert run("verify", made / "w8a16", "--json") == 0
    assert found == json.loads(capsys.readouterr().out)


def test_verify_finds_a_changed_file_by_the_hubs_hash(hub, made, capsys):
    hub.recorded[WEIGHTS] = "0" * 64
    assert run("verify", "org/w8a16") == 7
    assert f"{WEIGHTS}: sha256 {'0' * 64}" in capsys.readouterr().err


def test_verify_finds_a_small_file_that_was_changed_and_one_that_was_added(
    hub, made, tmp_path, capsys
):
    for name in ("generation_config.json", "extra.json"):
        copy = Path(shutil.copytree(made / "w8a16", tmp_path / name))
        (copy / name).write_text("{}")
        hub.repositories["org/changed"] = (copy, False)
        shutil.rmtree(tmp_path / "cache", ignore_errors=True)
        assert run("verify", "org/changed") == 7
        assert capsys.readouterr().err.count(name) >= 1


def test_verify_fetches_what_the_hub_has_no_hash_of(hub, made, monkeypatch, capsys):
    monkeypatch.setattr("tests.hub_server.LARGE", 10**9)
    assert run("verify", "org/w8a16", "--json") == 0
    assert json.loads(capsys.readouterr().out)["by_the_hub"] == 0
    assert hub.served[WEIGHTS] == (made / "w8a16" / WEIGHTS).stat().st_size


def test_a_signature_of_a_name_is_not_taken_for_checked(hub, tmp_path, capsys):
    assert run("verify", "org/w8a16", "--key", tmp_path / "key.pem") == 2
    assert "download it" in capsys.readouterr().err and hub.asked == []


def test_diff_reads_manifests_alone(hub, made, capsys):
    assert run("diff", "org/w8a16", "org/fp8", "--json") == 0
    there = capsys.readouterr().out
    assert hub.served.keys() == {"quantflow.json"}
    assert run("diff", made / "w8a16", made / "fp8", "--json") == 0
    assert there == capsys.readouterr().out
    assert run("diff", "org/llama", "org/fp8") == 3
    assert "org/llama: no quantflow.json" in capsys.readouterr().err


def test_diff_of_values_reads_both(hub, made, capsys):
    assert run("diff", "org/w8a16", made / "w8a16", "--values", "--json") == 0
    assert set(json.loads(capsys.readouterr().out)["counts"]) == {"equal"}


def test_export_takes_an_artifact_by_its_name(hub, made, tmp_path):
    for source, out in (("org/w8a16", "there"), (made / "w8a16", "here")):
        words = ("export", source, "-o", tmp_path / out, "--format", "dequantized", "-q")
        assert run(*words) == 0
    here, there = (tmp_path / out / WEIGHTS for out in ("here", "there"))
    assert here.read_bytes() == there.read_bytes()


@pytest.mark.slow
def test_validate_takes_an_artifact_by_its_name_and_reports_here(hub, made, text_files, tmp_path):
    words = ("--text", text_files["heldout"], "--baseline", "org/llama", "-q")
    assert run("validate", "org/w8a16", *words) in (0, 4)
    assert run("validate", made / "w8a16", *words, "--report", tmp_path / "here") in (0, 4)
    there, here = (
        json.loads((tmp_path / name / "validation.json").read_text())
        for name in ("w8a16-validation", "here")
    )
    assert there["metrics"] == here["metrics"] and there["digest"] == here["digest"]
