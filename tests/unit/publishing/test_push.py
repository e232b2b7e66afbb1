"""An artifact on its way to the hub: what arrives, what is said of it, and what goes wrong."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub.utils._http as hub_http
import pytest
import yaml
from huggingface_hub import constants

from quantflow.files.manifest import read_manifest
from quantflow.files.verify import verify
from quantflow.progress import SILENT
from quantflow.publishing.card import license_named_in, made_by
from quantflow.sources.models import model_folder
from tests.hub_server import TOKEN, Hub, files_of, serving
from tests.shared import run

# of huggingface_hub's own upload without Xet
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=<...>':DeprecationWarning")
APACHE = "             Apache License\n             Version 2.0, January"


@pytest.fixture(scope="module")
def source(llama, tmp_path_factory) -> Path:
    """The artifact, in a folder whose name on the hub is not known, with a licence."""
    folder = tmp_path_factory.mktemp("push")
    shutil.copytree(llama, folder / "llama")
    (folder / "llama" / "LICENSE").write_text(APACHE)
    made = ("quantize", folder / "llama", "-o", folder / "w8a16", "--scheme", "W8A16", "-q")
    assert run(*made, "--set", "quantize.0.name=mine") == 0
    return folder / "w8a16"


@pytest.fixture
def artifact(source, tmp_path) -> Path:
    return Path(shutil.copytree(source, tmp_path / "made"))


@pytest.fixture
def hub(tmp_path, monkeypatch) -> Iterator[Hub]:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)  # a server speaks the older protocol
    monkeypatch.setattr(hub_http.time, "sleep", lambda _: None)  # between two tries
    with serving(Hub({}, tmp_path / "hub"), monkeypatch, cache=tmp_path / "cache") as server:
        yield server


def said(capsys) -> str:
    return capsys.readouterr().err


def metadata(hub: Hub, name: str = "org/made") -> dict:
    text = (hub.repositories[name][0] / "README.md").read_text()
    return yaml.safe_load(text.split("---\n")[1])


def test_everything_arrives_in_one_commit_private_and_intact(hub, artifact, capsys):
    assert run("push", artifact, "org/made", "--json") == 0
    told = json.loads(capsys.readouterr().out)
    folder, private = hub.repositories["org/made"]
    there = files_of(folder)
    assert private and len(hub.commits) == 1
    assert there.keys() - {".gitattributes"} == files_of(artifact).keys() == told["files"].keys()
    for name in read_manifest(artifact)["files"].keys() | {"quantflow.json"}:
        assert there[name].read_bytes() == (artifact / name).read_bytes()
    assert told["address"] == f"{hub.address}/org/made" and told["commit"] == f"{1:040x}"
    assert told["bytes"] == sum(there[name].stat().st_size for name in told["files"])
    verify(model_folder("org/made", progress=SILENT))


def test_the_end_is_an_address_and_the_next_command(hub, artifact, capsys):
    assert run("push", artifact, "org/made", "--revision", "v2") == 0
    out, err = capsys.readouterr()
    assert out.splitlines()[0] == f"{hub.address}/org/made/tree/v2"
    assert 'run it:  quantflow generate org/made --revision v2 --prompt "..."' in out
    assert "it was not validated, and the card says so; `quantflow validate" in err
    assert TOKEN not in out + err
    assert (hub.branches["org/made", "v2"] / "quantflow.json").exists()
    assert not (hub.repositories["org/made"][0] / "quantflow.json").exists()


def test_a_dry_run_lists_files_and_asks_nothing(hub, artifact, capsys):
    assert run("push", artifact, "org/made", "--dry-run") == 0
    out = capsys.readouterr().out
    size = (artifact / "model.safetensors").stat().st_size
    assert f"{size:>17,}  model.safetensors" in out and "private" in out
    assert hub.asked == [] and hub.repositories == {}


def test_the_card_has_what_the_hub_reads(hub, artifact):
    assert run("push", artifact, "org/made", "--base-model", "meta/llama") == 0
    assert metadata(hub) == {
        "base_model": "meta/llama",
        "base_model_relation": "quantized",
        "quantized_by": "org",
        "license": "apache-2.0",
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["quantflow", "compressed-tensors", "w8a16", "int8", "rtn"],
    }
    text = (hub.repositories["org/made"][0] / "README.md").read_text()
    assert "Not compared with its source." in text
    assert "    quantflow quantize meta/llama -o mine --scheme W8A16\n" in text
    assert f"| digest | `{read_manifest(artifact)['digest']}` |" in text


def test_the_licence_of_the_sources_card_goes_before_the_text_beside_it(hub, artifact, llama):
    hub.repositories["meta/llama"] = (llama, False)
    hub.cards["meta/llama"] = {"license": "other", "license_name": "mine", "license_link": "x"}
    assert run("push", artifact, "org/made", "--base-model", "meta/llama") == 0
    found = {key: value for key, value in metadata(hub).items() if key.startswith("license")}
    assert found == hub.cards["meta/llama"]


def test_a_source_without_a_name_on_the_hub_is_said_and_left_out(hub, artifact, capsys):
    assert run("push", artifact, "org/made") == 0
    assert "is no name on the hub, so the card has no base_model" in said(capsys)
    assert not {"base_model", "base_model_relation"} & metadata(hub).keys()


def test_the_card_has_the_validations_table(hub, artifact, llama, text_files, capsys):
    text = text_files["heldout"]
    words = ("validate", artifact, "--baseline", llama.parent / "gone", "--text", text)
    assert run(*words) == 3  # no such source: nothing to read
    model = artifact.parent / "llama"
    shutil.copytree(llama, model)
    (model / "LICENSE").write_text(APACHE)
    assert run("validate", artifact, "--baseline", model, "--text", text, "-q") in (0, 4)
    record = json.loads((artifact.parent / "made-validation" / "validation.json").read_text())
    assert run("push", artifact, "org/made") == 0
    card = (hub.repositories["org/made"][0] / "README.md").read_text()
    assert f"{record['metrics']['mean_kld']['value']:.5f}" in card and record["outcome"] in card
    assert f"on {record['protocol']['tokens']} tokens" in card
    record["digest"] = "0" * 64
    (artifact.parent / "made-validation" / "validation.json").write_text(json.dumps(record))
    capsys.readouterr()
    assert run("push", artifact, "org/again") == 0
    assert "is of another artifact, so the card has no validation" in said(capsys)


def test_a_card_that_somebody_wrote_goes_as_it_is(hub, artifact, capsys):
    (artifact / "README.md").write_text("mine")
    assert run("push", artifact, "org/made") == 0
    assert (hub.repositories["org/made"][0] / "README.md").read_text() == "mine"
    assert "README.md was changed since export; it goes as it is" in said(capsys)


def test_metadata_that_the_hub_does_not_take_is_said_before_the_commit(hub, artifact, capsys):
    (artifact / "README.md").write_text("---\nlicense: [\n---\n")
    hub.refuse, hub.failures = {"/api/validate-yaml": 400}, 1
    assert run("push", artifact, "org/made") == 3
    assert "Invalid metadata in README.md" in said(capsys) and hub.commits == []


def test_a_damaged_artifact_never_leaves(hub, artifact, capsys):
    data = bytearray((artifact / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (artifact / "model.safetensors").write_bytes(data)
    assert run("push", artifact, "org/made") == 7
    assert run("push", artifact, "org/made", "--dry-run") == 7
    assert hub.asked == [] and "model.safetensors: sha256" in said(capsys)


def test_a_folder_that_is_no_artifact_is_refused(hub, llama, capsys):
    assert run("push", llama, "org/made") == 3
    assert hub.asked == [] and "no quantflow.json" in said(capsys)


@pytest.mark.parametrize("name", ["made", "a/b/c", "org/..", "org/na--me", "org/" + "n" * 100])
def test_a_name_that_the_hub_does_not_take_is_refused_first(hub, artifact, capsys, name):
    assert run("push", artifact, name) == 2
    assert hub.asked == [] and "is no name on the hub" in said(capsys)


def test_without_a_token_nothing_is_asked(hub, artifact, monkeypatch, capsys):
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", "/nonexistent")
    assert run("push", artifact, "org/made") == 3
    assert hub.asked == [] and "no token of the hub" in said(capsys)


def test_offline_nothing_is_asked(hub, artifact, monkeypatch, capsys):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert run("push", artifact, "org/made") == 3
    assert hub.asked == [] and "HF_HUB_OFFLINE is set" in said(capsys)


@pytest.mark.parametrize(
    ("status", "words"),
    [(401, "the hub does not take this token"), (403, "this token may not write there")],
)
def test_a_token_that_may_not_write_is_told_so(hub, artifact, capsys, status, words):
    hub.refuse, hub.failures = {"/api/repos/create": status}, 1
    assert run("push", artifact, "org/made") == 3
    assert words in said(capsys) and hub.commits == []


def test_a_hub_that_is_away_is_said(hub, artifact, monkeypatch, capsys):
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")  # nobody listens
    assert run("push", artifact, "org/made") == 3
    assert "http://127.0.0.1:9 cannot be reached" in said(capsys)


def test_what_was_uploaded_before_an_error_is_not_sent_again(hub, artifact, capsys):
    hub.refuse, hub.failures = {"/lfs/": 500}, 10**6
    assert run("push", artifact, "org/made") == 3
    assert "run it again: what was uploaded stays" in said(capsys) and hub.commits == []
    hub.failures = 0
    hub.refuse = {"/api/models/org/made/commit": 500}
    hub.failures = 1
    hub.asked.clear()
    assert run("push", artifact, "org/made") == 3
    sent = hub.uploads()
    assert sent == len(hub.stored) > 0 and hub.commits == []
    hub.asked.clear()
    assert run("push", artifact, "org/made") == 0
    assert hub.uploads() == 0 and len(hub.commits) == 1
    verify(model_folder("org/made", progress=SILENT))


def test_a_repository_that_everybody_sees_is_not_used_by_mistake(hub, artifact, tmp_path, capsys):
    (tmp_path / "open").mkdir()
    hub.repositories["org/open"] = (tmp_path / "open", False)
    assert run("push", artifact, "org/open") == 2
    assert "exists, and everybody can see it" in said(capsys) and hub.commits == []
    assert run("push", artifact, "org/open", "--public") == 0
    assert run("push", artifact, "org/new", "--public") == 0
    assert hub.repositories["org/new"][1] is False


def test_files_of_something_else_are_removed_only_when_asked(hub, artifact, tmp_path, capsys):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "model-00001-of-00002.safetensors").write_text("x")
    hub.repositories["org/other"] = (tmp_path / "other", True)
    assert run("push", artifact, "org/other") == 2
    assert "has 1 files that the artifact lacks, such as model-00001-of-00002" in said(capsys)
    assert run("push", artifact, "org/other", "--force") == 0
    assert hub.commits[-1][2] == ["model-00001-of-00002.safetensors"]
    verify(model_folder("org/other", progress=SILENT))


@pytest.mark.parametrize(
    ("text", "name"),
    [
        (APACHE, "apache-2.0"),
        ("MIT License\n\nCopyright", "mit"),
        ("LLAMA 3.1 COMMUNITY LICENSE AGREEMENT", "llama3.1"),
        ("META LLAMA 3 COMMUNITY LICENSE AGREEMENT", "llama3"),
        ("Terms of nobody", None),
        ("x" * 5000 + "MIT License", None),
    ],
)
def test_a_licence_is_known_by_how_it_begins(text, name):
    assert license_named_in(text) == name


def test_the_command_has_every_setting_that_is_no_default_and_no_word_of_a_shell(source):
    manifest = read_manifest(source)
    recipe = {**manifest["recipe"], "algorithm": "gptq", "ignore": ["re:.*up$"], "seed": 3}
    counts = {"samples": 8, "tokens": 512}
    measured = {"counts": counts, "calibration": {"hash": "x", "sequence_length": 64}}
    named = {**manifest["source"], "name": "a; rm -rf b", "revision": None}
    changed = {**manifest, "recipe": recipe, "source": named, "measurement": measured}
    assert made_by(changed, None) == (
        "quantflow quantize 'a; rm -rf b' -o mine --scheme W8A16 --algorithm gptq "
        "--set 'quantize.0.ignore=[\"re:.*up$\"]' --seed 3 --samples 8 --sequence-length 64"
    )
