"""A model by its name on the hub: downloaded once, taken from the cache, or refused."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

import quantflow
from quantflow.benching.bench_job import BenchJob
from quantflow.errors import InputError
from quantflow.exporting.job import ExportJob
from quantflow.files.origin import origin_of
from quantflow.planning.recipe import Export, Quantize
from quantflow.progress import SILENT, Silent
from quantflow.runtime.chat_job import ChatJob
from quantflow.runtime.generate_job import GenerateJob
from quantflow.server import in_folders
from quantflow.server.settings import ServeJob
from quantflow.sources.models import model_folder, names_model
from tests.hub_server import COMMIT, OLDER, TOKEN, Hub, serving


class Told(Silent):
    """A progress that keeps its lines."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, text: str) -> None:
        self.lines.append(text)


@pytest.fixture
def hub(llama, tmp_path, monkeypatch) -> Iterator[Hub]:
    pickled = tmp_path / "pickled"
    pickled.mkdir()
    (pickled / "pytorch_model.bin").write_bytes(b"x")
    (pickled / "config.json").write_text("{}")
    packed = tmp_path / "packed"
    packed.mkdir()
    (packed / "model-q4.gguf").write_bytes(b"GGUF")
    server = Hub(
        {
            "org/llama": (llama, False),
            "org/private": (llama, True),
            "org/pickled": (pickled, False),
            "org/packed": (packed, False),
        }
    )
    with serving(server, monkeypatch, cache=tmp_path / "cache"):
        yield server


def test_a_model_is_downloaded_once_at_the_commit_of_its_revision(hub, llama, tmp_path):
    folder = model_folder("org/llama", progress=SILENT)
    assert folder == tmp_path / "cache" / "models--org--llama" / "snapshots" / COMMIT
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        assert (folder / name).read_bytes() == (llama / name).read_bytes()
    downloads = [path for command, path in hub.asked if command == "GET" and "/resolve/" in path]
    assert downloads and all(f"/resolve/{COMMIT}/" in path for path in downloads)
    hub.asked.clear()
    assert model_folder("org/llama", progress=SILENT) == folder
    assert not [path for _, path in hub.asked if "/resolve/" in path]
    assert (origin_of(folder).name, origin_of(folder).revision) == ("org/llama", COMMIT)
    assert origin_of(model_folder("org/llama", revision="v1", progress=SILENT)).revision == OLDER


def test_without_the_hub_the_cache_has_it(hub, monkeypatch):
    folder = model_folder("org/llama", progress=SILENT)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")  # nobody listens
    assert model_folder("org/llama", progress=SILENT) == folder
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    hub.asked.clear()
    assert model_folder("org/llama", progress=SILENT) == folder
    assert model_folder("org/llama", revision=COMMIT, progress=SILENT) == folder
    assert hub.asked == []
    for name, revision in (("org/other", None), ("org/llama", "v1")):
        with pytest.raises(
            InputError, match=r"no folder of this name, not in .*, and HF_HUB_OFFLINE is set"
        ):
            model_folder(name, revision=revision, progress=SILENT)


@pytest.mark.parametrize(
    ("name", "revision", "said"),
    [
        ("org/nobody", None, "org/nobody: no folder of this name, and no such model on http"),
        ("org/private", None, "no such model .*; check the name; of a private model, set HF_TOKEN"),
        ("org/llama", "v9", "org/llama: has no revision 'v9'"),
        (
            "org/pickled",
            None,
            r"pytorch_model.bin and no safetensors; convert it: python -c "
            r".*from_pretrained\('org/pickled'\)",
        ),
        ("org/packed", None, "1 GGUF files and no safetensors; name one: org/packed/model-q4.gguf"),
        (
            "nobody",
            None,
            "nobody: no such folder or file; give a folder, a name on the hub such as org/name, "
            "or a GGUF file",
        ),
        ("a/b/c", None, "a/b/c: no such folder or file"),
    ],
)
def test_what_is_no_model_is_refused_with_a_remedy(hub, name, revision, said):
    with pytest.raises(InputError, match=said):
        model_folder(name, revision=revision, progress=SILENT)


def test_a_folder_that_is_not_there_is_refused_with_the_command_that_fetches_one(tmp_path):
    with pytest.raises(InputError, match="/bloom 3b: no such folder or file") as caught:
        model_folder(str(tmp_path / "bloom 3b"), progress=SILENT)
    command = f"hf download org/name --local-dir '{tmp_path}/bloom 3b'"
    assert caught.value.remedy.endswith(f"; `{command}` fetches one into this place")


def test_a_hub_that_is_away_and_a_cache_that_is_empty(hub, monkeypatch):
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(
        InputError,
        match=r"org/llama: no folder of this name, not in .* and http://127.0.0.1:9 cannot be "
        r"reached",
    ):
        model_folder("org/llama", progress=SILENT)


def test_files_of_weights_are_refused_by_kind(tmp_path):
    for name, said in (
        ("model.safetensors", "give its folder"),
        ("pytorch_model.bin", "pickled weights"),
        ("model.pt", "pickled weights"),
        ("notes.txt", "no model"),
    ):
        (tmp_path / name).write_bytes(b"x")
        with pytest.raises(InputError, match=said):
            model_folder(tmp_path / name, progress=SILENT)


def test_names_of_models_are_told_from_recipes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "mine.yaml").write_text("")
    named = {
        "recipes": True,
        "org/name": True,
        "x.gguf": True,
        "recipes/mine.yaml": False,
        "tiny-llama": False,
    }
    assert {text: names_model(text) for text in named} == named


@pytest.mark.slow
def test_verbs_take_names_and_the_token_stays_unsaid(hub, tmp_path):
    home = tmp_path / "home"
    environment = {
        **os.environ,
        "HF_ENDPOINT": hub.address,
        "HF_HOME": str(home),
        "HF_TOKEN": TOKEN,
    }
    command = [
        sys.executable,
        "-m",
        "quantflow",
        "quantize",
        "org/private",
        "--scheme",
        "FP8_DYNAMIC",
    ]
    command += ["--no-export", "-o", str(tmp_path / "out"), "-v"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert f"Bearer {TOKEN}" in hub.tokens and "org/private at aaaaaaaaaaaa" in done.stderr
    summary = json.loads((tmp_path / "out" / "quantize.json").read_text())
    assert (summary["source"]["name"], summary["source"]["revision"]) == ("org/private", COMMIT)
    written = [
        path for path in [*(tmp_path / "out").rglob("*"), tmp_path / "out.log"] if path.is_file()
    ]
    assert (
        all(TOKEN.encode() not in path.read_bytes() for path in written)
        and TOKEN not in done.stderr + done.stdout
    )
    offline = {**environment, "HF_HUB_OFFLINE": "1", "HF_ENDPOINT": "http://127.0.0.1:9"}
    again = subprocess.run(command, env=offline, capture_output=True, text=True)
    assert again.returncode == 0 and "up to date" in again.stderr


def test_a_file_of_the_hub_is_imported(hub, llama, tmp_path, monkeypatch):
    from quantflow.exporting.gguf_export import run as export

    export(
        ExportJob(
            source=llama, output=tmp_path / "gguf", options=Export(format="gguf", dtype="bf16")
        ),
        SILENT,
    )
    hub.repositories["org/files"] = (tmp_path / "gguf", False)
    monkeypatch.setattr(constants, "HF_HOME", str(tmp_path / "home"))
    folder = model_folder("org/files/model-bf16.gguf", progress=SILENT)
    assert folder.is_relative_to(tmp_path / "home") and (folder / "model.safetensors").exists()
    assert origin_of(folder).name == "model-bf16.gguf"
    job = in_folders(ServeJob(artifact=tmp_path / "gguf/model-bf16.gguf"), SILENT)
    assert (job.artifact, job.first_name) == (folder, "model-bf16.gguf")
    words = {"prompts": ("value",), "max_new_tokens": 4}
    imported = GenerateJob(artifact=Path("org/files/model-bf16.gguf"), **words).run()
    assert imported["outputs"] == GenerateJob(artifact=folder, **words).run()["outputs"]


def test_the_hubs_model_runs_as_its_folder_does_at_the_revision_that_is_asked_for(
    hub, llama, tmp_path
):
    words = {"prompts": ("value",), "max_new_tokens": 4}
    here = GenerateJob(artifact=llama, **words).run()
    there = GenerateJob(artifact=Path("org/llama"), revision="v1", **words).run()
    assert there["outputs"] == here["outputs"]
    timed = BenchJob(
        artifact=Path("org/llama"),
        revision="v1",
        input_tokens=(4,),
        new_tokens=2,
        runs=1,
        warmups=0,
    ).run()
    assert timed["artifact"].endswith(f"models--org--llama/snapshots/{OLDER}")
    assert not (tmp_path / "cache/models--org--llama/snapshots" / COMMIT).exists()
    with pytest.raises(InputError, match="org/llama: has no revision 'v9'"):
        GenerateJob(artifact=Path("org/llama"), revision="v9", **words).run()
    with pytest.raises(
        InputError,
        match="nobody: no such folder or file; give a folder, a name on the hub such as org/name",
    ):
        GenerateJob(artifact=Path("nobody"), **words).run()


def test_a_chat_and_a_server_call_the_hubs_model_by_its_name(hub, tmp_path):
    template = tmp_path / "chat.jinja"
    template.write_text("{% for m in messages %}{{ m['content'] }}{% endfor %}")
    partner = ChatJob(artifact=Path("org/llama"), chat_template=template).partner()
    assert partner.name == "org/llama"
    partner.close()
    job = in_folders(
        ServeJob(artifact=Path("org/llama"), revision="v1", models=("other=org/llama",)), SILENT
    )
    assert (job.first_name, job.artifact.name) == ("org/llama", OLDER)
    assert job.models == (f"other={job.artifact.with_name(COMMIT)}",)
    with pytest.raises(InputError, match="org/nobody: no folder of this name, and no such model"):
        in_folders(ServeJob(artifact=Path("org/llama"), models=("other=org/nobody",)), SILENT)


def test_of_an_artifact_on_the_hub_every_file_is_taken(hub, llama, tmp_path):
    made = quantflow.make_artifact(
        llama, tmp_path / "fp8", entry=Quantize(name="fp8", scheme="FP8_DYNAMIC")
    ).folder
    hub.repositories["org/fp8"] = (made, False)
    words = {"prompts": ("value",), "max_new_tokens": 4}
    # verifies what the manifest names
    there = GenerateJob(artifact=Path("org/fp8"), **words).run()
    assert there["outputs"] == GenerateJob(artifact=made, **words).run()["outputs"]
    assert {path.name for path in model_folder("org/fp8", progress=SILENT).iterdir()} == {
        path.name for path in made.iterdir()
    }


def test_sub_folders_come_where_a_runtime_reads_them_and_the_rest_is_named(hub, llama, tmp_path):
    model = tmp_path / "model"
    shutil.copytree(llama, model)
    beside = ("additional_chat_templates/tool_use.jinja", "tekken.json", "tokenization_x.py")
    other = ("onnx/model.onnx", "onnx/config.json", "original/params.json", "figures/a.png")
    for name in (*beside, *other, "consolidated.safetensors", "pytorch_model.bin", "README.md"):
        (model / name).parent.mkdir(exist_ok=True)
        (model / name).write_text("{}")
    hub.repositories["org/full"] = (model, False)
    told = Told()
    folder = model_folder("org/full", progress=told)
    here = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert here == {path.name for path in llama.iterdir()} | set(beside)
    assert told.lines[1] == (
        "source: left on the hub: consolidated.safetensors, figures/, onnx/, original/, "
        "pytorch_model.bin (not part of what a runtime loads)"
    )
    again = Told()
    assert model_folder("org/full", progress=again) == folder and again.lines == []
