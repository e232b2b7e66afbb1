"""Files of earlier versions are read, or refused with the command that makes them again.

make.py wrote them.
"""

import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from quantflow.exporting import export as export_stage
from quantflow.files.inspect import summarize
from quantflow.files.verify import verify
from quantflow.measuring.record import read_measurement
from quantflow.runtime.load import load
from tests.shared import run

VERSIONS = sorted(path for path in Path(__file__).parent.glob("[0-9]*") if path.is_dir())
TOKENS = torch.tensor([[3, 10, 17, 24, 31, 9]])


@pytest.fixture(params=VERSIONS, ids=lambda path: path.name)
def version(request, tmp_path):
    """A copy of one version's folders, without the time stamps of the checkout."""
    return Path(shutil.copytree(request.param, tmp_path / "v"))


def test_there_is_a_version():
    assert [path.name for path in VERSIONS] == ["0.1.0"]


@pytest.mark.parametrize("decoder", ["lean", "transformers"])
def test_an_artifact_verifies_and_has_nearly_the_logits_of_its_source(version, decoder):
    report = verify(version / "artifact")
    assert report["layout_version"] == 1 and summarize(version / "artifact")["kind"] == "artifact"
    loaded = load(version / "artifact", decoder=decoder)
    loaded.decoder.begin(rows=1, capacity=TOKENS.shape[1])
    with torch.no_grad():
        expected = AutoModelForCausalLM.from_pretrained(version / "model", dtype=torch.float32)(
            TOKENS
        ).logits
    found = loaded.decoder.forward(TOKENS, last_only=False)
    # W8A8_STATIC
    assert torch.corrcoef(torch.stack([found.flatten(), expected.flatten()]))[0, 1] > 0.99


def test_a_measurement_is_read_and_quantized_from(version, tmp_path):
    measured = read_measurement(version / "measurement" / "rank-000-of-001")
    assert [len(sequence) for sequence in measured.sequences] == [12] * 6
    line = ("quantize", version / "model", "-o", tmp_path / "q", "--scheme", "W8A8_STATIC")
    assert run(*line, "--measurement", version / "measurement") == 0


def test_a_half_finished_folder_goes_on_or_says_that_its_layers_are_made_again(
    version, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(export_stage, "_prove", lambda *_: {})
    line = ("--scheme", "W8A8_STATIC", "--measurement", version / "measurement")
    kept = (version / "unfinished" / "layers" / "00000.safetensors").stat().st_ino
    for folder in (version / "unfinished", tmp_path / "new"):
        assert run("quantize", version / "model", "-o", folder, *line) == 0
    goes_on = (version / "unfinished" / "layers" / "00000.safetensors").stat().st_ino == kept
    # by other libraries, say
    assert goes_on != ("its layers are made again" in capsys.readouterr().err)
    for name in ("layers/00000.safetensors", "layers/00001.safetensors"):
        assert (version / "unfinished" / name).read_bytes() == (
            tmp_path / "new" / name
        ).read_bytes()
    assert (
        run("export", version / "unfinished", "-o", tmp_path / "a", "--model", version / "model")
        == 0
    )


def test_a_newer_layout_is_refused_with_what_to_do(version, capsys):
    from quantflow.files.canonical import digest_of, read_json, readable_json

    for path, verb in (
        (version / "artifact" / "quantflow.json", ("verify", version / "artifact")),
        (
            version / "measurement" / "rank-000-of-001" / "measurement.json",
            (
                "quantize",
                version / "model",
                "-o",
                version / "q",
                "--scheme",
                "FP8",
                "--measurement",
                version / "measurement",
            ),
        ),
    ):
        body = read_json(path) | {"layout_version": 99}
        body.pop("digest")
        path.write_bytes(readable_json({**body, "digest": digest_of(body)}))
        # DONE.json has the hash of the record too
        assert run(*verb) in ((6,) if verb[0] == "verify" else (6, 7))
        assert "  fix:" in capsys.readouterr().err
