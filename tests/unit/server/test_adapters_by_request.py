"""`serve --adapter`: a request chooses by `model` or `adapter_id`."""

import pytest

from quantflow.errors import InputError, UnsupportedError, UsageError
from quantflow.server.models import Models, open_model
from quantflow.server.settings import ServeJob

SHAPES = {f"model.layers.{layer}.mlp.down_proj": (512, 1024) for layer in range(4)}


@pytest.fixture(scope="module")
def adapters(write_adapter, tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate(("pirate", "poet"), start=1):
        write_adapter(folder / name, SHAPES, seed=seed, rank=1)
    return tuple(f"{name}={folder / name}" for name in ("pirate", "poet"))


@pytest.fixture(scope="module")
def adapting(serve, adapters):
    with serve(adapters=adapters, name="base") as server:
        yield server


def test_openais_clients_name_an_adapter_as_a_model(adapting):
    listed = adapting.get("/v1/models").json()["data"]
    assert [(one["id"], one.get("parent")) for one in listed] == [
        ("base", None),
        ("pirate", "base"),
        ("poet", "base"),
    ]
    body = {"prompt": "def main(self", "max_tokens": 12, "temperature": 0}
    found = {
        name: adapting.post("/v1/completions", body | {"model": name}).json()
        for name in ("base", "pirate", "poet")
    }
    assert {name: answer["model"] for name, answer in found.items()} == {
        name: name for name in found
    }
    assert len({answer["choices"][0]["text"] for answer in found.values()}) == 3
    chat = {
        "messages": [{"role": "user", "content": "def"}],
        "max_tokens": 3,
        "model": "poet",
        "temperature": 0,
    }
    assert adapting.post("/v1/chat/completions", chat).json()["model"] == "poet"
    streamed = adapting.post("/v1/completions", body | {"model": "pirate", "stream": True}).events()
    assert (
        "".join(event["choices"][0]["text"] for event in streamed[:-1])
        == found["pirate"]["choices"][0]["text"]
    )


def test_tgis_clients_name_an_adapter_by_its_id(adapting):
    texts = {
        name: adapting.generate("def main(self", max_new_tokens=12, adapter_id=name).json()[
            "generated_text"
        ]
        for name in (None, "pirate", "poet")
    }
    assert len(set(texts.values())) == 3
    openai = adapting.post(
        "/v1/completions",
        {"prompt": "def main(self", "max_tokens": 12, "temperature": 0, "model": "poet"},
    )
    assert openai.json()["choices"][0]["text"] == texts["poet"]
    body = {"inputs": "def main(self", "parameters": {"max_new_tokens": 12, "adapter_id": "poet"}}
    last = adapting.post("/generate_stream", body).events()[-1]
    assert last["generated_text"] == texts["poet"]


def test_an_adapter_that_there_is_not_is_404_and_says_which_there_are(adapting):
    said = "The model `parrot` does not exist. There are: base, pirate, poet"
    found = adapting.generate("def", adapter_id="parrot")
    assert (found.status, found.json()) == (404, {"error": said, "error_type": "model_not_found"})
    found = adapting.post("/v1/completions", {"prompt": "def", "model": "parrot"})
    assert (found.status, found.json()["error"]["message"]) == (404, said)


def test_what_cannot_be_adapted_is_refused_at_the_start(
    artifact, adapters, write_adapter, tmp_path
):
    write_adapter(tmp_path / "wrong", {"model.layers.0.self_attn.k_proj": (512, 512)}, seed=1)
    job = ServeJob(artifact=artifact, adapters=(f"wrong={tmp_path / 'wrong'}",))
    with pytest.raises(
        InputError,
        match=r"adapter_model.safetensors: model.layers.0.self_attn.k_proj maps 512 to 256",
    ):
        Models(job, open_model(artifact, job))
    job = ServeJob(artifact=artifact, adapters=adapters, decoder="transformers")
    with pytest.raises(
        UnsupportedError, match="pirate, poet: requests choose adapters of the lean decoder alone"
    ):
        Models(job, open_model(artifact, job))
    with pytest.raises(UsageError, match="'poet' names no adapter; write NAME=DIR"):
        ServeJob(artifact=artifact, adapters=("poet",))
    with pytest.raises(UsageError, match="model 'a' stands for two folders"):
        ServeJob(artifact=artifact, adapters=("a=x",), models=("a=y",))
