"""A model on the hub by its headers: the same plan as of its folder, and no weight is fetched."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import save_file

from quantflow.errors import InputError
from quantflow.files.checkpoint import open_checkpoint
from quantflow.files.origin import origin_of
from quantflow.planning.plan_job import PlanJob, entries
from quantflow.planning.recipe import Recipe
from quantflow.progress import SILENT
from quantflow.sources.headers import described
from quantflow.sources.models import model_folder
from tests.hub_server import COMMIT, Hub, serving


@pytest.fixture
def model(llama, tmp_path) -> Path:
    folder = Path(shutil.copytree(llama, tmp_path / "model"))
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "font.ttf").write_bytes(b"x" * 5000)
    return folder


@pytest.fixture
def hub(model, tmp_path, monkeypatch) -> Iterator[Hub]:
    with serving(Hub({"org/llama": (model, False)}), monkeypatch, cache=tmp_path / "cache") as one:
        yield one


def weights_served(hub: Hub) -> int:
    return sum(nbytes for name, nbytes in hub.served.items() if name.endswith(".safetensors"))


def test_headers_are_those_of_the_download_and_the_folder_is_gone_afterwards(hub, model):
    expected = open_checkpoint(model)
    with described("org/llama", revision=None, progress=SILENT) as folder:
        found = open_checkpoint(folder)
        assert found.infos == expected.infos and found.files == expected.files
        assert found.config == expected.config
        assert (origin_of(folder).name, origin_of(folder).revision) == ("org/llama", COMMIT)
        assert (folder / "tokenizer.json").read_bytes() == (model / "tokenizer.json").read_bytes()
        for name in expected.files:
            assert (folder / name).stat().st_size == (model / name).stat().st_size
    assert not folder.exists()
    assert "font.ttf" not in hub.served
    assert not list(Path(constants.HF_HUB_CACHE).rglob("*.safetensors"))


def test_the_plan_of_a_name_is_that_of_its_folder_without_its_weights(
    hub, model, tmp_path, monkeypatch
):
    header = int.from_bytes((model / "model.safetensors").read_bytes()[:8], "little")
    monkeypatch.setattr("quantflow.sources.headers._FIRST", 64)

    def planned(name: str) -> dict:
        recipe = Recipe(model=name, quantize=entries("W4A16,FP8_DYNAMIC"))
        done = dict(PlanJob(recipe=recipe, folder=tmp_path).run())
        for resident in ("limits", "stages", "total"):  # of this process at that moment
            done.pop(resident)
        return done

    here, there = planned(str(model)), planned("org/llama")
    assert there["model"].pop("folder") == "org/llama" and here["model"].pop("folder")
    assert there == here
    assert weights_served(hub) == 8 + header


def test_a_model_that_is_in_the_cache_is_read_there(hub):
    folder = model_folder("org/llama", progress=SILENT)
    hub.served.clear()
    with described("org/llama", revision=None, progress=SILENT) as found:
        assert found == folder
    assert hub.served == {}


def test_what_describes_a_model_is_no_model_offline(hub, monkeypatch):
    with described("org/llama", revision=None, progress=SILENT):
        pass
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(InputError, match=r"not in .* and HF_HUB_OFFLINE is set"):
        model_folder("org/llama", progress=SILENT)


def test_of_several_shards_each_header_is_read_once(hub, model):
    save_file({"a": torch.zeros(999, 99)}, model / "model.safetensors")
    tensors = {f"t{n}": torch.zeros(500, 500) for n in range(3)}
    for name, tensor in tensors.items():
        save_file({name: tensor}, model / f"{name}.safetensors")
    (model / "model.safetensors").unlink()
    where = '", "'.join(f'{name}": "{name}.safetensors' for name in tensors)
    (model / "model.safetensors.index.json").write_text(f'{{"weight_map": {{"{where}"}}}}')
    with described("org/llama", revision=None, progress=SILENT) as folder:
        assert open_checkpoint(folder).infos.keys() == tensors.keys()
    assert weights_served(hub) == 3 * 100_000


@pytest.mark.parametrize("damage", [b"\xff" * 4000, (10**6).to_bytes(8, "little") + b"{}"])
def test_a_file_that_is_no_safetensors_is_named(hub, model, damage):
    (model / "model.safetensors").write_bytes(damage)
    with (
        pytest.raises(InputError, match=r"org/llama/model.safetensors: a header of \d+ bytes"),
        described("org/llama", revision=None, progress=SILENT),
    ):
        pass


def test_a_truncated_upload_shows_in_its_header_alone(hub, model):
    path = model / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with (
        described("org/llama", revision=None, progress=SILENT) as folder,
        pytest.raises(InputError, match="truncated"),
    ):
        open_checkpoint(folder)


def test_a_server_without_ranges_sends_no_more_than_the_beginning(hub, model, monkeypatch):
    save_file({"a": torch.zeros(4000, 999)}, model / "model.safetensors")
    hub.knows_ranges = False
    with described("org/llama", revision=None, progress=SILENT) as folder:
        assert open_checkpoint(folder).infos.keys() == {"a"}
