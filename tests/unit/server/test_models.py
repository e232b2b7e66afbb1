"""Several models in one server: loaded when they are named, dropped when there is no room."""

import shutil
import threading
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from quantflow.errors import UnsupportedError, UsageError
from quantflow.server import models
from quantflow.server.models import open_model, weight_bytes
from quantflow.server.settings import ServeJob

ROOT = Path(__file__).resolve().parents[3]
PROMPT = "class Stack:\n    def"


@pytest.fixture(scope="module")
def twins(artifact, tmp_path_factory):
    """Two more folders with the same model."""
    folder = tmp_path_factory.mktemp("twins")
    for name in ("b", "c"):
        shutil.copytree(artifact, folder / name)
    return folder


def ask(server, model, count=4):
    body = {"prompt": PROMPT, "model": model, "max_tokens": count, "temperature": 0}
    return server.post("/v1/completions", body)


def loaded(server):
    return [model["id"] for model in server.get("/v1/models").json()["data"] if model["loaded"]]


def test_a_model_is_loaded_when_it_is_named_and_dropped_when_another_needs_its_room(
    serve, artifact, twins
):
    two = str(2 * weight_bytes(artifact) + 1)
    with serve(
        models=(f"b={twins / 'b'}", f"c={twins / 'c'}"),
        model_memory=two,
        name="a",
        kv_memory="64MiB",
    ) as server:
        assert [model["id"] for model in server.get("/v1/models").json()["data"]] == ["a", "b", "c"]
        assert loaded(server) == ["a"]
        texts = [ask(server, "b").json()["choices"][0]["text"] for _ in range(2)]
        assert loaded(server) == ["a", "b"]
        texts += [ask(server, name).json()["choices"][0]["text"] for name in ("c", "a", "b")]
        assert loaded(server) == ["a", "b"] and len(set(texts)) == 1
        assert ask(server, "b").json()["model"] == "b"
        # four requests at once load the model once
        threads = [threading.Thread(target=ask, args=(server, "c")) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert loaded(server) == ["a", "c"]
        missing = ask(server, "d")
        assert missing.status == 404 and missing.json()["error"]["type"] == "model_not_found"


def test_a_model_that_answers_is_not_dropped(serve, artifact, twins):
    two = str(2 * weight_bytes(artifact) + 1)
    with serve(
        models=(f"b={twins / 'b'}", f"c={twins / 'c'}"),
        model_memory=two,
        name="a",
        kv_memory="64MiB",
    ) as server:
        ask(server, "b")
        place = server.models.places["b"]
        place.served.rows += 1
        assert ask(server, "c").status == 429
        place.served.rows -= 1
        assert ask(server, "c").status == 200


def test_a_model_that_prepares_an_answer_is_not_dropped(serve, artifact, twins, monkeypatch):
    two, rendering, go = str(2 * weight_bytes(artifact) + 1), threading.Event(), threading.Event()
    with serve(
        models=(f"b={twins / 'b'}", f"c={twins / 'c'}"),
        model_memory=two,
        name="a",
        kv_memory="64MiB",
    ) as server:
        ask(server, "b")
        render = models.chat_template.render

        def slowly(*given, **words):
            rendering.set()
            go.wait(20)
            return render(*given, **words)

        monkeypatch.setattr(models.chat_template, "render", slowly)
        body = {"model": "b", "messages": [{"role": "user", "content": "def"}], "max_tokens": 2}
        found = []
        thread = threading.Thread(
            target=lambda: found.append(server.post("/v1/chat/completions", body))
        )
        thread.start()
        assert rendering.wait(20)
        assert ask(server, "c").status == 429
        go.set()
        thread.join()
        assert found[0].status == 200 and ask(server, "c").status == 200


def test_models_that_are_asked_for_together_keep_the_memory_together(serve, artifact, twins):
    two, names = 2 * weight_bytes(artifact) + 1, ("b", "c", "d")
    shutil.copytree(artifact, twins / "d")
    given_models = tuple(f"{name}={twins / name}" for name in names)
    with serve(models=given_models, model_memory=str(two), name="a", kv_memory="64MiB") as server:
        most, answers = [], []

        def watched():
            while len(answers) < len(names):
                most.append(
                    sum(place.served is not None for place in server.models.places.values())
                )

        threads = [
            threading.Thread(target=lambda name=name: answers.append(ask(server, name).status))
            for name in names
        ]
        for thread in (*threads, watcher := threading.Thread(target=watched)):
            thread.start()
        for thread in (*threads, watcher):
            thread.join()
        assert set(answers) <= {200, 429} and 200 in answers and max(most) == 2


def test_a_folder_that_is_no_artifact_is_told_and_takes_no_other_with_it(serve, tmp_path):
    with serve(models=(f"b={tmp_path}",), name="a", kv_memory="64MiB") as server:
        refused = ask(server, "b")
        assert refused.status == 424 and "no quantflow.json" in refused.json()["error"]["message"]
        assert ask(server, "a").status == 200


def test_a_model_that_is_not_quantized_is_served_as_transformers_runs_it(serve):
    source = ROOT / "examples/tiny-llama"
    with serve(artifact=source, kv_memory="64MiB") as server:
        ids = AutoTokenizer.from_pretrained(source)(PROMPT, return_tensors="pt")["input_ids"]
        model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
        expected = model.generate(ids, max_new_tokens=8, do_sample=False)[
            0, ids.shape[1] :
        ].tolist()
        details = server.generate(PROMPT, max_new_tokens=8, details=True).json()["details"]
        assert [token["id"] for token in details["tokens"]] == expected
        card = server.get("/card").json()
        assert (card["schemes"], card["digest"], card["name"]) == ({}, None, "tiny-llama")


def test_names_stand_for_one_folder_each(artifact):
    with pytest.raises(UsageError, match="two folders"):
        ServeJob(artifact=artifact, name="a", models=("a=x",))
    with pytest.raises(UsageError, match="NAME=MODEL"):
        ServeJob(artifact=artifact, models=("b",))


@pytest.mark.parametrize("device", ["cuda", "cuda:1", "hpu"])
def test_a_device_that_is_not_there_is_told_before_a_model_is_read(device, tmp_path):
    if device != "hpu" and torch.cuda.is_available():
        pytest.skip("this machine has what the test says it lacks")
    with pytest.raises(UnsupportedError, match=f"device {device}: needs "):
        open_model(tmp_path / "nothing", ServeJob(artifact=tmp_path / "nothing", device=device))


def test_models_are_loaded_on_the_device_that_is_asked_for(monkeypatch, tmp_path):
    seen = {}
    monkeypatch.setattr(models, "load", lambda folder, **words: seen.update(words))
    open_model(tmp_path, ServeJob(artifact=tmp_path, device="cuda", dtype="bfloat16"))
    assert (seen["device"], seen["dtype"]) == ("cuda", torch.bfloat16)


def test_vllm_chooses_its_devices_itself(tmp_path):
    with pytest.raises(UsageError, match="device cuda with engine vllm"):
        ServeJob(artifact=tmp_path, device="cuda", engine="vllm")
