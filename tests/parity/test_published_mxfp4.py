"""A folder as gpt-oss is published, MXFP4 experts in stacks: the verbs, beside transformers."""

import json
import shutil

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GptOssConfig, Mxfp4Config

from quantflow.runtime.artifact import Artifact, open_folder
from quantflow.runtime.load import load
from quantflow.stages.cli import cli
from quantflow.stages.cli.output import exit_code
from tests.shared import slow

LAYERS, EXPERTS, HIDDEN, WIDTH = 2, 3, 64, 96
DOWN = "model.layers.1.mlp.experts.down_proj"
SIZES = {
    "vocab_size": 320,
    "hidden_size": HIDDEN,
    "intermediate_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "num_local_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "sliding_window": 16,
    "max_position_embeddings": 128,
    "pad_token_id": 1,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}


def run(*arguments):
    return exit_code(cli, [str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def published(llama, tmp_path_factory):
    """The folder; its codes are every byte, its scales small enough for a finite model."""
    folder = tmp_path_factory.mktemp("published") / "gpt-oss"
    draw = torch.Generator().manual_seed(7)
    model = AutoModelForCausalLM.from_config(GptOssConfig(**SIZES), dtype=torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():  # biases too, which begin as zeros
            parameter += torch.randn(parameter.shape, generator=draw) * 0.05
    model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    for index in range(LAYERS):
        for leaf, rows, columns in (
            ("gate_up_proj", 2 * WIDTH, HIDDEN),
            ("down_proj", HIDDEN, WIDTH),
        ):
            name = f"model.layers.{index}.mlp.experts.{leaf}"
            # as gpt-oss's code has it: transposed
            assert tensors.pop(name).shape == (EXPERTS, columns, rows)
            shape = (EXPERTS, rows, columns // 32)
            tensors[f"{name}_blocks"] = torch.randint(256, (*shape, 16), generator=draw).to(
                torch.uint8
            )
            tensors[f"{name}_scales"] = torch.randint(119, 123, shape, generator=draw).to(
                torch.uint8
            )
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    left = [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ]
    words = {"quant_method": "mxfp4", "modules_to_not_convert": left}
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": words}))
    AutoTokenizer.from_pretrained(llama).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def theirs(published):
    """transformers' model of it, dequantized."""
    words = Mxfp4Config(dequantize=True)
    return AutoModelForCausalLM.from_pretrained(
        published, quantization_config=words, dtype=torch.float32
    ).eval()


def damaged(published, folder, change):
    shutil.copytree(published, folder)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    return folder


@pytest.mark.proof(
    formats="mxfp4",
    direction="read",
    programs={"transformers": "transformers"},
    compared="a folder as gpt-oss is published: every expert's weights as it dequantizes them, "
    "bit for bit; logits within 1e-4",
)
def test_every_expert_has_the_values_that_transformers_dequantizes(published, theirs):
    artifact = open_folder(published)
    assert len(artifact.linears) == LAYERS * EXPERTS * 3
    for index, layer in enumerate(theirs.model.layers):
        for number in range(EXPERTS):
            prefix = f"model.layers.{index}.mlp.experts.{number}"
            gate, up = (
                artifact.decode(f"{prefix}.{leaf}").dequantize()
                for leaf in ("gate_proj", "up_proj")
            )
            both = layer.mlp.experts.gate_up_proj[number].T
            assert torch.equal(gate, both[::2]) and torch.equal(up, both[1::2])
            assert torch.equal(
                artifact.decode(f"{prefix}.down_proj").dequantize(),
                layer.mlp.experts.down_proj[number].T,
            )
            assert torch.equal(
                artifact.bias(f"{prefix}.up_proj"),
                layer.mlp.experts.gate_up_proj_bias[number][1::2],
            )
    for backend in ("auto", "reference"):
        require_logits(load(published, backend=backend).model, theirs)


def require_logits(model, theirs):
    ids = torch.arange(5, 65)[None]
    with torch.inference_mode():
        found, expected = model(ids).logits, theirs(ids).logits
    assert (found - expected).abs().max() < 1e-4 * expected.abs().max()


@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_the_lean_decoder_reads_its_experts_as_they_are(backend, published, theirs):
    loaded = load(published, decoder="lean", backend=backend)
    ids = torch.arange(5, 65)[None]
    loaded.decoder.begin(rows=1, capacity=60)
    with torch.inference_mode():
        expected = theirs(ids).logits
        found = [loaded.decoder.forward(ids[:, :40], last_only=False)]
        found += [loaded.decoder.forward(ids[:, at : at + 1])[:, None] for at in range(40, 60)]
    assert (torch.cat(found, dim=1) - expected).abs().max() < 1e-4 * expected.abs().max()


@pytest.mark.parametrize("form", ["mxfp4", "compressed-tensors"])
def test_codes_that_stay_packed_while_they_are_loaded_give_the_same_bits(
    form, published, tmp_path, monkeypatch
):
    folder = published
    if form != "mxfp4":
        folder = tmp_path / "a"
        assert run("export", published, "-o", folder, "--format", form, "-q") == 0
    ids, found = torch.arange(5, 65)[None], []
    for never, instead in (("packed", lambda *_: None), ("decode", None)):
        with monkeypatch.context() as patched:
            patched.setattr(Artifact, never, instead)  # None: a call is an error
            decoder = load(folder, decoder="lean", dtype=torch.bfloat16).decoder
        decoder.begin(rows=1, capacity=60)
        found.append([decoder.forward(ids[:, :59], last_only=False), decoder.forward(ids[:, 59:])])
    assert all(torch.equal(*each) for each in zip(*found, strict=True))


def test_inputs_are_rounded_where_that_is_asked_for_and_runs_say_so(published, tmp_path, capsys):
    stored, rounded = (load(published, decoder="lean", rounded_inputs=on) for on in (False, True))
    assert {linear.scheme.input for linear in stored.artifact.linears.values()} == {None}
    count = LAYERS * EXPERTS * 3
    assert (stored.rounded_inputs, rounded.rounded_inputs) == (0, count)
    assert set(rounded.backends.values()) == {"w4a8"}
    ids = torch.arange(64, 192).reshape(32, 4)
    whole = {}
    for on in (False, True):
        model = load(published, backend="reference", rounded_inputs=on).model
        with torch.inference_mode():
            whole[on] = model(ids).logits
    rounded.decoder.begin(rows=32, capacity=4)
    found = rounded.decoder.forward(ids, last_only=False)
    off = (found - whole[True]).norm(dim=-1) / (whole[True] - whole[False]).norm(dim=-1)
    # sums in another order round a few inputs to another code
    assert (off < 0.01).float().mean() > 0.5
    line = ("--max-new-tokens", "2", "-q", "--json")
    for asked, told in ((), 0), (("--rounded-inputs",), count):
        assert run("generate", published, "--prompt", "value", *line, *asked) == 0
        assert json.loads(capsys.readouterr().out)["rounded_inputs"] == told
    assert run("generate", published, "--prompt", "a", "--exact", "--rounded-inputs") == 2
    assert "exact and rounded_inputs together" in capsys.readouterr().err
    line = ("--tokens", "128", "--sequence-length", "64", "-o", tmp_path / "c", "--json", "-q")
    assert run("compare", published, published, "--rounded-inputs", *line) == 0
    (row,) = json.loads(capsys.readouterr().out)["candidates"]
    assert row["rounded_inputs"] and row["metrics"]["mean_kld"]["value"] > 0


def test_inspect_generate_and_bench_take_it(published, capsys):
    assert run("inspect", published, "--json") == 0
    told = json.loads(capsys.readouterr().out)
    (row,) = told["quantized"]
    assert (told["format"], told["runs"], told["verified"]) == ("mxfp4", None, LAYERS * EXPERTS * 3)
    assert row["which"] == {
        f"model.layers.*.mlp.experts.*.{leaf}": LAYERS * EXPERTS
        for leaf in ("gate_proj", "up_proj", "down_proj")
    }
    assert told["bits_per_weight"] == 4.25 and row["group_size"] == 32
    assert run("generate", published, "--prompt", "value", "--max-new-tokens", "4", "-q") == 0
    line = (
        "bench",
        published,
        "-b",
        "1",
        "--input-tokens",
        "8",
        "--new-tokens",
        "4",
        "--runs",
        "1",
        "--warmups",
        "0",
    )
    assert run(*line, "-q") == 0


def test_it_becomes_an_artifact_of_the_same_values(published, theirs, tmp_path):
    assert (
        run("export", published, "-o", tmp_path / "a", "--format", "compressed-tensors", "-q") == 0
    )
    require_logits(load(tmp_path / "a", backend="reference").model, theirs)
    assert run("export", tmp_path / "a", "-o", tmp_path / "b", "--format", "mxfp4", "-q") == 0
    found, expected = (
        load_file(folder / "model.safetensors") for folder in (tmp_path / "b", published)
    )
    assert found.keys() == expected.keys()
    assert all(
        torch.equal(found[name], tensor) and found[name].dtype == tensor.dtype
        for name, tensor in expected.items()
    )
    assert json.loads((tmp_path / "b/config.json").read_text()) == json.loads(
        (published / "config.json").read_text()
    )


@pytest.mark.proof(
    formats="mxfp4",
    direction="written",
    programs={"transformers": "transformers"},
    compared="logits of experts that quantflow rounded, within 1e-4",
)
def test_transformers_computes_from_what_is_written_what_the_artifact_says(
    published, text_files, tmp_path
):
    assert run("export", published, "-o", tmp_path / "m", "--format", "dequantized", "-q") == 0
    line = ("--scheme", "MXFP4A16", "--algorithm", "rtn_mse", "--ignore", "re:.*self_attn.*", "-q")
    assert run("quantize", tmp_path / "m", "-o", tmp_path / "a", *line) == 0
    assert run("export", tmp_path / "a", "-o", tmp_path / "b", "--format", "mxfp4", "-q") == 0
    words = Mxfp4Config(dequantize=True)
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path / "b", quantization_config=words, dtype=torch.float32
    ).eval()
    require_logits(load(tmp_path / "a", backend="reference").model, theirs)
    require_logits(load(tmp_path / "b", backend="reference").model, theirs)
    found = []
    # experts in one tensor have an entry of three dimensions in the source's ledger
    for name in ("a", "b"):
        line = (
            "--baseline",
            tmp_path / "m",
            "--text",
            text_files["heldout"],
            "--tokens",
            "256",
            "--sequence-length",
            "64",
        )
        assert run(
            "validate", tmp_path / name, *line, "--report", tmp_path / f"report-{name}", "-q"
        ) in (0, 4, 5)
        found.append(json.loads((tmp_path / f"report-{name}" / "validation.json").read_text()))
    assert [each["bits_per_weight"] for each in found] == [4.25, 4.25]
    assert found[0]["metrics"]["mean_kld"] == found[1]["metrics"]["mean_kld"]


@pytest.mark.parametrize(
    ("scheme", "left", "words"),
    [
        (
            "MXFP4A16",
            "re:.*(self_attn|experts.1).*",
            "experts.1.gate_proj.weight_blocks: not there, "
            "model.layers.0.mlp.experts.gate_up_proj_blocks",
        ),
        slow(
            ("MXFP4A16", "lm_head", ": no linear of an expert of gpt-oss; mxfp4 holds these alone")
        ),
        slow(("MXFP4", "re:.*self_attn.*", "scheme MXFP4, the layout holds MXFP4A16")),
        ("W4A16", "re:.*self_attn.*", "scheme W4A16, the layout holds MXFP4A16"),
    ],
)
def test_what_the_layout_does_not_hold_is_refused(published, tmp_path, capsys, scheme, left, words):
    assert run("export", published, "-o", tmp_path / "m", "--format", "dequantized", "-q") == 0
    line = ("--scheme", scheme, "--algorithm", "rtn", "--group-size", "32", "--ignore", left, "-q")
    assert run("quantize", tmp_path / "m", "-o", tmp_path / "a", *line) == 0
    assert run("export", tmp_path / "a", "-o", tmp_path / "b", "--format", "mxfp4", "-q") == 6
    assert words in capsys.readouterr().err and not (tmp_path / "b").exists()


def test_dequantized_it_is_the_model_that_stock_transformers_loads(published, theirs, tmp_path):
    assert run("export", published, "-o", tmp_path / "d", "--format", "dequantized", "-q") == 0
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "d", dtype=torch.float32)
    for (name, found), (_, expected) in zip(
        model.named_parameters(), theirs.named_parameters(), strict=True
    ):
        assert torch.equal(found, expected), name
    assert (
        run(
            "quantize",
            published,
            "-o",
            tmp_path / "q",
            "--scheme",
            "W8A16",
            "--algorithm",
            "rtn",
            "--dequantize",
            "-q",
        )
        == 0
    )
    with safe_open(tmp_path / "q.work" / "0-dequantized" / "model.safetensors", "pt") as file:
        assert file.get_slice(DOWN).get_dtype() == "BF16"  # which holds every value
    # is quantized, and nothing said so
    assert run("quantize", published, "-o", tmp_path / "r", "--scheme", "W8A16", "-q") == 3


def test_experts_of_another_family_are_refused(family_model, tmp_path, capsys):
    line = ("--scheme", "MXFP4A16", "--algorithm", "rtn", "--ignore", "re:.*self_attn.*", "-q")
    assert run("quantize", family_model("qwen3_moe"), "-o", tmp_path / "a", *line) == 0
    assert run("export", tmp_path / "a", "-o", tmp_path / "b", "--format", "mxfp4", "-q") == 6
    assert "model type qwen3_moe, format mxfp4 is of gpt_oss" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop(f"{DOWN}_scales"), f"{DOWN}_scales: missing"),
        (lambda t: t.pop(f"{DOWN}_blocks"), f"{DOWN}_scales: scales, and no {DOWN}_blocks"),
        (
            lambda t: t[f"{DOWN}_scales"][2].fill_(255),
            "experts.2.down_proj.weight_scales: 192 of 192 scales are NaN",
        ),
        (
            lambda t: t.update({f"{DOWN}_blocks": t[f"{DOWN}_blocks"][:, :, :2]}),
            f"{DOWN}_blocks: is [3, 64, 2, 16]",
        ),
        (
            lambda t: t.update({f"{DOWN}_scales": t[f"{DOWN}_scales"].int()}),
            f"{DOWN}_scales: is I32, U8",
        ),
        (lambda t: t.update({f"{DOWN}_bias": t[f"{DOWN}_bias"][:, :32]}), f"{DOWN}_bias: [3, 32]"),
        (lambda t: t.pop(f"{DOWN}_bias"), "experts.0.down_proj.bias"),
        (
            lambda t: [
                t.update({f"{DOWN}{end}": t[f"{DOWN}{end}"][:2]})
                for end in ("_blocks", "_scales", "_bias")
            ],
            "experts.2",
        ),
    ],
    ids=[
        "no scales",
        "no blocks",
        "NaN",
        "other groups",
        "dtype",
        "short bias",
        "no bias",
        "fewer experts",
    ],
)
def test_a_damaged_folder_is_refused_by_name(published, tmp_path, capsys, change, words):
    folder = damaged(published, tmp_path / "f", change)
    assert run("inspect", folder) == 3 and words in capsys.readouterr().err
    assert (
        run("generate", folder, "--prompt", "value", "-q") == 3 and words in capsys.readouterr().err
    )
