"""The quantized head: its values, both ways to them, tied and untied.

Its record in the artifact and the programs that run it are tested too.
"""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GPTNeoXConfig, LlamaConfig

from quantflow.core.parallel import SEQUENTIAL
from quantflow.errors import IntegrityError, UsageError
from quantflow.exporting import export as export_stage
from quantflow.exporting.proof_process import prove
from quantflow.files.ledger import Ledger
from quantflow.files.manifest import build_manifest, read_manifest, write_manifest
from quantflow.files.safetensors_header import read_header
from quantflow.files.verify import verify
from quantflow.formats.llama_cpp import gguf
from quantflow.models.capture import LayerStream
from quantflow.models.open import graph_for
from quantflow.models.reading import read_tensor
from quantflow.planning.head import head_of
from quantflow.planning.recipe import HeadSettings, Quantize
from quantflow.quantizing import weight_rows
from quantflow.quantizing.weight_rows import head_block, units_of
from quantflow.runtime.adapters import attach_
from quantflow.runtime.artifact import open_artifact
from quantflow.runtime.load import load
from quantflow.runtime.offload import load_offloaded
from quantflow.validating.validate import bits_per_weight
from tests.shared import run

VOCABULARY = 323  # no multiple of 16: kernels pad their rows
SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "initializer_range": 0.1,
}
CONFIGS = {
    "untied": lambda: LlamaConfig(**SHAPE, num_key_value_heads=2),
    "tied": lambda: LlamaConfig(**SHAPE, num_key_value_heads=2, tie_word_embeddings=True),
    "neox": lambda: GPTNeoXConfig(**SHAPE),
}
HEADS = {"untied": "lm_head", "tied": "lm_head", "neox": "embed_out"}
WEIGHTS = {
    "untied": "lm_head.weight",
    "tied": "model.embed_tokens.weight",
    "neox": "embed_out.weight",
}
IDS = torch.arange(5, 45).reshape(2, 20)


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def models(tmp_path_factory, llama) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    for name, config in CONFIGS.items():
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config()).to(torch.bfloat16).save_pretrained(folder / name)
        for path in llama.glob("*token*"):
            shutil.copy(path, folder / name / path.name)
    assert WEIGHTS["tied"] in load_file(folder / "tied/model.safetensors")
    assert "lm_head.weight" not in load_file(folder / "tied/model.safetensors")
    return {name: folder / name for name in CONFIGS}


@pytest.fixture(scope="module")
def measured(models, text_files) -> dict[str, Path]:
    found = {}
    for name, model in models.items():
        found[name] = model.with_name(f"{name}-measured")
        text = ["--calibration", text_files["calibration"], "--samples", 4, "--sequence-length", 32]
        assert run("measure", model, "-o", found[name], *text, "--stats", "channel_amax") == 0
    return found


@pytest.fixture(scope="module")
def make(models, measured, tmp_path_factory):
    """A function that quantizes and exports, in this process.

    The same words give the same folders.
    """
    made: dict[tuple, tuple[Path, Path]] = {}

    def call(name: str, *words: str, way: str = "tensors") -> tuple[Path, Path]:
        key = (name, way, *words)
        if key not in made:
            folder = tmp_path_factory.mktemp("made")
            also = ["--measurement", measured[name]] if way == "canary" else []
            assert (
                run("quantize", "--no-export", models[name], "-o", folder / "q", *words, *also) == 0
            )
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(export_stage, "_prove", lambda *_: {})
                assert run("export", folder / "q", "-o", folder / "a") == 0
            made[key] = folder / "q", folder / "a"
        return made[key]

    return call


W8 = ("--scheme", "W8A16", "--head", "W8A16")
W4 = ("--scheme", "W4A16", "--group-size", "32", "--algorithm", "rtn", "--head", "W8A16")


def int8_by_hand(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Qvalues and scales [O, 1] of symmetric int8 per row.

    The scale is amax / 127.5 in bfloat16; qvalues are the nearest of -128..127.
    """
    scale = (weight.double().abs().amax(dim=1, keepdim=True) / 127.5).float().to(torch.bfloat16)
    return (weight.double() / scale.double()).round().clamp(-128, 127), scale


def source_head(models, name: str) -> torch.Tensor:
    return load_file(models[name] / "model.safetensors")[WEIGHTS[name]]


@pytest.mark.parametrize("way", ["tensors", "canary"])
@pytest.mark.parametrize("name", CONFIGS)
def test_the_head_has_the_bytes_that_are_worked_out_by_hand(models, make, name, way):
    _, artifact = make(name, *W4, way=way)
    found, source, head = (
        load_file(artifact / "model.safetensors"),
        load_file(models[name] / "model.safetensors"),
        HEADS[name],
    )
    qvalue, scale = int8_by_hand(source[WEIGHTS[name]])
    assert found[f"{head}.weight_shape"].tolist() == [VOCABULARY, 64]
    assert torch.equal(found[f"{head}.weight_scale"], scale)
    stored = found[f"{head}.weight_packed"].view(torch.uint8).to(torch.int16) - 128
    assert torch.equal(stored.double(), qvalue)
    assert f"{head}.weight" not in found
    embedding = {"neox": "gpt_neox.embed_in.weight"}.get(name, "model.embed_tokens.weight")
    assert torch.equal(found[embedding], source[embedding])


@pytest.mark.parametrize("name", CONFIGS)
def test_both_ways_write_the_same_head_whatever_the_units(
    make, models, tmp_path, monkeypatch, name
):
    (files, _), (layers, _) = make(name, *W4), make(name, *W4, way="canary")
    expected = (files / "head.safetensors").read_bytes()
    assert (layers / "head.safetensors").read_bytes() == expected
    monkeypatch.setattr(weight_rows, "UNIT", 1024)
    assert run("quantize", "--no-export", models[name], "-o", tmp_path / "q", *W4) == 0
    assert (tmp_path / "q/head.safetensors").read_bytes() == expected
    records = [
        json.loads((folder / "head.json").read_text()) for folder in (files, layers, tmp_path / "q")
    ]
    assert len({record["values"][HEADS[name]] for record in records}) == 1
    assert {record["decisions"][HEADS[name]]["zero_groups"] for record in records} == {0}


@pytest.mark.parametrize("name", CONFIGS)
def test_the_config_says_that_nothing_is_tied_and_that_the_head_is_quantized(make, name):
    config = json.loads((make(name, *W4)[1] / "config.json").read_text())
    assert config["tie_word_embeddings"] is False
    quantization = config["quantization_config"]
    assert quantization["ignore"] == []
    by_bits = {
        group["weights"]["num_bits"]: group["targets"]
        for group in quantization["config_groups"].values()
    }
    assert by_bits[8] == (["embed_out", "lm_head"] if name == "neox" else ["lm_head"])
    alike = json.loads((make(name, *W8)[1] / "config.json").read_text())["quantization_config"]
    assert [group["targets"] for group in alike["config_groups"].values()] == [
        ["Linear"]
    ] and alike["ignore"] == []


@pytest.mark.parametrize("name", CONFIGS)
def test_without_a_head_nothing_of_the_config_is_changed(make, models, name):
    config = json.loads((make(name, "--scheme", "W8A16")[1] / "config.json").read_text())
    ignored = config.pop("quantization_config")["ignore"]
    assert config == json.loads((models[name] / "config.json").read_text())
    assert ignored == (["embed_out", "lm_head"] if name == "neox" else ["lm_head"])


@pytest.mark.parametrize("name", CONFIGS)
def test_the_ledger_has_every_byte_and_says_what_the_tied_embedding_became(make, name):
    _, artifact = make(name, *W4)
    manifest = read_manifest(artifact)
    ledger = Ledger.from_json(manifest["ledger"])
    entry = next(entry for entry in ledger.tensors if entry.name == WEIGHTS[name])
    made = tuple(
        f"{HEADS[name]}.{leaf}" for leaf in ("weight_packed", "weight_scale", "weight_shape")
    )
    if name == "tied":
        assert (entry.action, entry.becomes) == ("copied", (WEIGHTS[name], *made))
        assert "lm_head" in entry.reason and "W8A16" in entry.reason
    else:
        assert (entry.action, entry.becomes, entry.reason) == ("quantized", made, "W8A16")
    assert verify(artifact)["source_bytes"] == ledger.bytes_by_action()
    assert (
        manifest["head"]["linear"] == HEADS[name]
        and 0 < manifest["head"]["errors"][HEADS[name]]["weight"] < 1e-3
    )
    card = (artifact / "README.md").read_text()
    assert f"The head ({HEADS[name]}) is W8A16 by rtn" in card and ("no longer tied" in card) == (
        name == "tied"
    )


def test_a_copy_beside_an_untied_head_has_to_be_the_sources_form(make):
    _, artifact = make("tied", *W4)
    ledger = Ledger.from_json(read_manifest(artifact)["ledger"])
    infos = open_artifact(artifact).checkpoint.infos
    ledger.check_artifact(infos)
    with pytest.raises(IntegrityError, match="copied from BF16"):
        ledger.check_artifact(infos | {WEIGHTS["tied"]: infos["lm_head.weight_scale"]})


def test_bits_per_weight_count_the_head_tied_or_not(make):
    """W4A16 g32 takes 4 + 16 / 32 bits, W8A16 8 + 16 / 64 bits.

    weight_shape has 128 bits for each linear.
    """
    layer = 64 * (64 + 32 + 32 + 64) + 3 * 64 * 96
    expected = (2 * (4.5 * layer + 7 * 128) + 8.25 * VOCABULARY * 64 + 128) / (
        2 * layer + VOCABULARY * 64
    )
    for name in ("untied", "tied"):
        _, artifact = make(name, *W4)
        assert bits_per_weight(open_artifact(artifact)) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("words", [W4, W8, ("--scheme", "W8A16", "--head", "FP8_DYNAMIC")])
@pytest.mark.parametrize("name", CONFIGS)
def test_plan_tells_the_bytes_and_bits_of_what_is_made(make, models, capsys, name, words):
    _, artifact = make(name, *words)
    capsys.readouterr()
    scheme, head = words[1], words[-1]
    assert (
        run("plan", models[name], "--for", f"{scheme}:rtn", "--head", head, "--json") == 0
        if scheme == "W8A16"
        else True
    )
    if scheme != "W8A16":
        recipe = artifact.parent / "recipe.yaml"
        entry = {
            "name": "x",
            "scheme": scheme,
            "group_size": 32,
            "algorithm": "rtn",
            "head": {"scheme": head},
        }
        recipe.write_text(json.dumps({"model": str(models[name]), "quantize": [entry]}))
        assert run("plan", recipe, "--json") == 0
    (planned,) = json.loads(capsys.readouterr().out)["artifacts"]
    infos = open_artifact(artifact).checkpoint.infos
    assert planned["tensor_bytes"] == sum(info.nbytes for info in infos.values())
    assert planned["bits_per_weight"] == pytest.approx(
        bits_per_weight(open_artifact(artifact)), rel=1e-12
    )
    rows = [row for row in planned["schemes"] if row["tensors"].startswith(HEADS[name])]
    (row,) = rows
    assert row["bytes_after"] == sum(
        info.nbytes for key, info in infos.items() if key.startswith(f"{HEADS[name]}.")
    )
    assert row["bytes_before"] == (0 if name == "tied" else 2 * VOCABULARY * 64)
    source = sum(t.nbytes for t in load_file(models[name] / "model.safetensors").values())
    assert sum(row["bytes_before"] for row in planned["schemes"]) == source
    assert sum(row["bytes_after"] for row in planned["schemes"]) == planned["tensor_bytes"]
    assert planned["coverage"]["bytes"] <= 1 and planned["head"] == head


def by_hand(models, name: str, artifact: Path) -> torch.Tensor:
    """Logits of transformers' model with the layers' dequantized weights.

    The head's are from its qvalues in float64.
    """
    model = AutoModelForCausalLM.from_pretrained(models[name], dtype=torch.float32).eval()
    runtime = load(artifact, backend="reference").model
    qvalue, scale = int8_by_hand(source_head(models, name))
    with torch.no_grad():
        hidden = runtime.base_model(IDS).last_hidden_state.double()  # [B, T, H]
        logits = hidden @ (qvalue * scale.double()).T
        plain = model(IDS).logits
    assert float((logits - plain).abs().max()) > 0.01  # something was quantized
    return logits.float()


@pytest.mark.parametrize("name", CONFIGS)
def test_every_way_to_run_it_gives_the_logits_of_the_dequantized_head(make, models, tmp_path, name):
    _, made = make(name, *W4)
    artifact = Path(shutil.copytree(made, tmp_path / "a"))
    expected = by_hand(models, name, artifact)
    close = {"rtol": 0, "atol": 3e-5}
    with torch.no_grad():
        torch.testing.assert_close(
            load(artifact, backend="reference").model(IDS).logits, expected, **close
        )
        torch.testing.assert_close(load(artifact).model(IDS).logits, expected, **close)
        torch.testing.assert_close(load_offloaded(artifact).model(IDS).logits, expected, **close)
    stream = LayerStream(
        opened := open_artifact(artifact, backend="reference"), graph_for(opened.config)
    )
    states = stream.begin(list(IDS))
    for index in range(2):
        with stream.layer(index) as module:
            stream.advance(module, states)
    torch.testing.assert_close(
        torch.cat([stream.finish(state.hidden) for state in states]), expected, **close
    )
    for pack in (False, True, True) if name != "neox" else ():
        loaded = load(artifact, decoder="lean", pack=pack)
        assert loaded.backends["lm_head"] != "reference" or set(loaded.backends.values()) == {
            "reference"
        }
        loaded.decoder.begin(rows=2, capacity=20)
        assert loaded.decoder.vocab_size == VOCABULARY
        torch.testing.assert_close(loaded.decoder.forward(IDS), expected[:, -1], **close)


@pytest.mark.parametrize(
    "head",
    [
        "W4A16:hqq:32",
        "W4A16_ASYM:rtn_mse:32",
        "W3A16:rtn:64",
        "W8A8",
        "FP8_DYNAMIC",
        "FP8_BLOCK:32",
        "W4A8:rtn:32",
    ],
)
def test_every_scheme_that_needs_no_statistics_runs_and_is_proven(make, models, head):
    quantized, artifact = make("tied", "--scheme", "W8A16", "--head", head)
    prove(artifact, quantized, models["tied"], workers=SEQUENTIAL)
    loaded = load(artifact, decoder="lean")
    loaded.decoder.begin(rows=2, capacity=20)
    with torch.no_grad():
        expected = load(artifact, backend="reference").model(IDS).logits
    scheme = open_artifact(artifact).linears["lm_head"].scheme
    # An input that lies between two integers may be rounded to either after sums in another order.
    tolerance = 1e-4 if scheme.input is None else 0.05
    torch.testing.assert_close(loaded.decoder.forward(IDS), expected[:, -1], rtol=0, atol=tolerance)


@pytest.mark.parametrize("way", ["tensors", "canary"])
@pytest.mark.parametrize("name", CONFIGS)
def test_the_proof_holds_and_one_changed_bit_of_the_head_breaks_it(
    make, models, tmp_path, name, way
):
    quantized, made = make(name, *W4, way=way)
    prove(made, quantized, models[name], workers=SEQUENTIAL)
    artifact = Path(shutil.copytree(made, tmp_path / "a"))
    tensors = load_file(artifact / "model.safetensors")
    tensors[f"{HEADS[name]}.weight_packed"].view(-1)[:1].view(torch.uint8)[0] ^= 1
    save_file(tensors, artifact / "model.safetensors", metadata={"format": "pt"})
    manifest = read_manifest(artifact)
    body = {
        key: value
        for key, value in manifest.items()
        if key not in ("layout_version", "files", "digest")
    }
    write_manifest(artifact, build_manifest(artifact, body=body))
    said = f"{HEADS[name]}: the exported artifact decodes" if way == "tensors" else "logits: differ"
    with pytest.raises(IntegrityError, match=said):
        prove(artifact, quantized, models[name], workers=SEQUENTIAL)


@pytest.mark.parametrize("name", ["untied", "tied"])
def test_a_rotated_models_head_is_rotated_first_and_rounded_then(make, models, name):
    recipe = models[name].parent / "rotated.yaml"
    entry = {
        "name": "x",
        "scheme": "W8A16",
        "transforms": ["hadamard"],
        "head": {"scheme": "W8A16"},
    }
    recipe.write_text(json.dumps({"model": str(models[name]), "quantize": [entry]}))
    quantized, artifact = make(name, "--recipe", str(recipe))
    rotated, found = (
        load_file(quantized / "outside.safetensors"),
        load_file(artifact / "model.safetensors"),
    )
    qvalue, scale = int8_by_hand(rotated["lm_head.weight"])
    assert torch.equal(found["lm_head.weight_packed"].view(torch.uint8).double() - 128, qvalue)
    assert torch.equal(found["lm_head.weight_scale"], scale)
    # folded into the head
    assert torch.equal(found["model.norm.weight"], torch.ones_like(found["model.norm.weight"]))
    assert "lm_head.weight" not in found
    prove(artifact, quantized, models[name], workers=SEQUENTIAL)
    with torch.no_grad():
        plain = AutoModelForCausalLM.from_pretrained(models[name], dtype=torch.float32)(IDS).logits
        logits = load(artifact, backend="reference").model(IDS).logits
    # 8 bits, and bfloat16 of the rotated weights
    assert float((logits - plain).norm() / plain.norm()) < 0.03


def test_a_tied_head_of_a_rotated_model_is_a_tensor_of_its_own(models, tmp_path, capsys):
    """A rotation folds the last norm into the head alone, so the two differ."""
    model = shutil.copytree(models["tied"], tmp_path / "model")
    source = load_file(model / "model.safetensors")
    source["model.norm.weight"] *= torch.linspace(0.5, 2, 64).to(torch.bfloat16)
    save_file(source, model / "model.safetensors", metadata={"format": "pt"})
    quantized, artifact = tmp_path / "q", tmp_path / "a"
    words = ("--scheme", "W8A16", "--set", 'quantize.0.transforms=["hadamard"]')
    assert run("quantize", model, "-o", quantized, *words, "--export", artifact) == 0
    grown = "lm_head.weight, tied to the embedding before, is a tensor of its own: 0 MB more"
    assert grown in capsys.readouterr().err
    recipe = tmp_path / "recipe.yaml"
    entry = {"name": "x", "scheme": "W8A16", "transforms": ["hadamard"]}
    recipe.write_text(json.dumps({"model": str(model), "quantize": [entry]}))
    capsys.readouterr()
    assert run("plan", recipe, "--json") == 0
    told = json.loads(capsys.readouterr().out)
    (planned,) = told["artifacts"]
    # the layers, and beside them the embedding, the head and the last norm, rotated
    (stage,) = [each for each in told["stages"] if each["stage"] == "quantize"]
    files = [quantized / "outside.safetensors", *(quantized / "layers").glob("*.safetensors")]
    written = sum(info.nbytes for path in files for info in read_header(path)[0].values())
    assert stage["result"] == written
    infos = open_artifact(artifact).checkpoint.infos
    assert planned["tensor_bytes"] == sum(info.nbytes for info in infos.values())
    assert sum(row["bytes_after"] for row in planned["schemes"]) == planned["tensor_bytes"]
    size = sum(path.stat().st_size for path in artifact.iterdir())
    assert planned["output_bytes"] == pytest.approx(size, rel=0.02)
    found = load_file(artifact / "model.safetensors")
    head, embedding = found["lm_head.weight"], found["model.embed_tokens.weight"]
    assert head.shape == embedding.shape and not torch.equal(head, embedding)
    lengths = [tensor.float().norm(dim=1) for tensor in (embedding, source[WEIGHTS["tied"]])]
    torch.testing.assert_close(*lengths, rtol=1e-2, atol=0)
    assert json.loads((artifact / "config.json").read_text())["tie_word_embeddings"] is False
    ledger = Ledger.from_json(read_manifest(artifact)["ledger"])
    (entry,) = [each for each in ledger.tensors if each.name == WEIGHTS["tied"]]
    assert entry.becomes == (WEIGHTS["tied"], "lm_head.weight")
    assert "lm_head, which was tied to it" in entry.reason
    prove(artifact, quantized, model, workers=SEQUENTIAL)
    assert verify(artifact)
    with torch.no_grad():
        plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)(IDS)
        stock = AutoModelForCausalLM.from_pretrained(artifact, dtype=torch.float32)(IDS).logits
    logits = load(artifact, backend="reference").model(IDS).logits
    # 8 bits, and bfloat16 of the rotated weights
    assert float((logits - plain.logits).norm() / plain.logits.norm()) < 0.03
    assert float((stock - plain.logits).norm() / plain.logits.norm()) < 0.03


@pytest.mark.parametrize("way", ["tensors", "canary"])
def test_a_finished_head_stays_and_one_that_is_damaged_or_of_another_plan_does_not(
    models, measured, tmp_path, way
):
    also = ["--measurement", measured["tied"]] if way == "canary" else []
    words = [
        "quantize",
        "--no-export",
        models["tied"],
        "-o",
        tmp_path / "q",
        "--scheme",
        "W8A16",
        *also,
    ]
    head, done = tmp_path / "q/head.safetensors", tmp_path / "q/DONE.json"
    assert run(*words, "--head", "W8A16") == 0
    content, before = head.read_bytes(), head.stat()
    assert json.loads(done.read_text())["files"]["head.safetensors"]["bytes"] == len(content)
    done.unlink()
    assert run(*words, "--head", "W8A16") == 0
    assert (head.stat().st_ino, head.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    head.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert run(*words, "--head", "W8A16") == 0 and head.read_bytes() == content
    assert run(*words, "--head", "W4A16:rtn:32", "--force") == 0 and len(head.read_bytes()) < len(
        content
    )
    assert (
        run(*words, "--force") == 0 and not head.exists() and not head.with_suffix(".json").exists()
    )


def test_another_head_is_another_result_and_is_not_replaced_unasked(models, tmp_path, capsys):
    words = ["quantize", "--no-export", models["tied"], "-o", tmp_path / "q", "--scheme", "W8A16"]
    assert run(*words, "--head", "W8A16") == 0
    assert run(*words) == 2
    assert "holds a finished result" in capsys.readouterr().err


def test_a_large_head_is_cut_into_units_that_hold_every_row_once():
    from quantflow.files.safetensors_header import TensorInfo

    rows, columns = 128_001, 8192
    info = TensorInfo(
        name="model.embed_tokens.weight",
        dtype="BF16",
        shape=(rows, columns),
        offset=8,
        nbytes=2 * rows * columns,
    )
    entry = Quantize(
        name="x", scheme="W8A16", head=HeadSettings(scheme="W4A16_ASYM", algorithm="hqq")
    )
    graph = graph_for(LlamaConfig(hidden_size=columns, num_hidden_layers=1, num_attention_heads=64))
    plan = head_of(entry, graph, {info.name: info.shape})
    assert plan is not None and plan.tied and plan.linear == "lm_head"
    at = 0
    for unit in units_of(head_block(plan, Path("model.safetensors"), info)):
        assert (unit.at, unit.linear, unit.offset) == (at, "lm_head", 8 + 2 * columns * at)
        assert unit.count * columns <= 1 << 20
        at += unit.count
    assert at == rows


@pytest.mark.parametrize(
    ("head", "said"),
    [
        ("W4A16", "algorithm gptq of scheme W4A16 reads the calibration text"),
        ("W4A16:yaqa", "algorithm yaqa"),
        ("W4A16:best", "--head W4A16:hqq"),
        ("W4A16:quack", "'quack' is unknown"),
        ("FP8", "scheme FP8 has a static input"),
        ("W8A8_STATIC:rtn", "such as FP8_DYNAMIC, W8A8 or W8A16"),
        ("FP8_DYNAMIC:hqq", "use algorithm rtn for float8"),
        ("W9A16", "scheme 'W9A16' is unknown"),
        ("W4A16:rtn:48", "lm_head has 64 inputs, W4A16 groups of 48"),
        ("W8A16:rtn:32", "group_size=32 was given"),
        ("W4A16:rtn:hqq", "2 words after the scheme"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_read(models, tmp_path, capsys, head, said):
    assert (
        run("quantize", models["tied"], "-o", tmp_path / "q", "--scheme", "W8A16", "--head", head)
        == 2
    )
    assert said in capsys.readouterr().err
    assert not (tmp_path / "q").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [(["--ranks", "2"], "--ranks 2"), (["--ignore", "lm_head"], "ignore names lm_head")],
)
def test_cards_and_ignore_do_not_go_with_a_head(models, tmp_path, capsys, words, said):
    assert run("quantize", models["untied"], "-o", tmp_path / "q", *W8, *words) == 2
    assert said in capsys.readouterr().err and not (tmp_path / "q").exists()


def test_a_checkpoint_without_a_matrix_for_its_head_is_refused():
    graph = graph_for(LlamaConfig(hidden_size=64, num_hidden_layers=1, num_attention_heads=4))
    entry = Quantize(name="x", scheme="W8A16", head=HeadSettings(scheme="W8A16"))
    with pytest.raises(
        Exception, match=r"lm_head.weight, model.embed_tokens.weight: neither is a matrix"
    ):
        head_of(entry, graph, {"model.embed_tokens.weight": (64,)})
    with pytest.raises(UsageError, match="static input"):
        head_of(
            Quantize(name="x", scheme="W8A16", head=HeadSettings(scheme="FP8")),
            graph,
            {"lm_head.weight": (8, 64)},
        )


@pytest.mark.parametrize("name", ["untied", "tied"])
def test_a_gguf_file_holds_the_dequantized_head(make, models, tmp_path, name):
    _, artifact = make(name, *W4)
    assert run("export", artifact, "-o", tmp_path / "g", "--format", "gguf", "--dtype", "f32") == 0
    (path,) = (tmp_path / "g").glob("*.gguf")
    infos = gguf.read_header(path).tensors
    qvalue, scale = int8_by_hand(source_head(models, name))
    assert torch.equal(
        read_tensor(path, infos["output.weight"]).double(),
        (qvalue * scale.double()).float().double(),
    )
    embedding = load_file(models[name] / "model.safetensors")["model.embed_tokens.weight"]
    assert torch.equal(read_tensor(path, infos["token_embd.weight"]), embedding.float())


def test_an_adapter_of_the_head_stays_beside_it(make, tmp_path):
    _, artifact = make("tied", *W4)
    generator = torch.Generator().manual_seed(1)
    down, up = (
        torch.randn(2, 64, generator=generator),
        torch.randn(VOCABULARY, 2, generator=generator),
    )
    stem = "base_model.model.lm_head.lora_"
    save_file(
        {f"{stem}A.weight": down, f"{stem}B.weight": up}, tmp_path / "adapter_model.safetensors"
    )
    (tmp_path / "adapter_config.json").write_text(
        json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 2})
    )
    model = load(artifact, backend="reference").model
    with torch.no_grad():
        before, hidden = model(IDS).logits, model.base_model(IDS).last_hidden_state
        assert attach_(model, tmp_path, merge=True).beside == ("lm_head",)
        torch.testing.assert_close(
            model(IDS).logits, before + hidden @ (up @ down).T, rtol=1e-4, atol=1e-4
        )
