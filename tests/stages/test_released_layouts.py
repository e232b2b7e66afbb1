"""Checkpoints as they are released: more tensors than the model has, fewer, other names.

Each is made here from a small model that transformers writes. What transformers loads is quantized,
and what is not used is copied and said; what lacks something is refused before a byte is written,
whether the model runs or not.
"""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from quantflow.errors import InputError
from quantflow.files.manifest import read_manifest
from quantflow.models.open import open_files
from quantflow.runtime.load import load
from tests.conftest import VOCABULARY, write_tokenizer
from tests.shared import run, slow

SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
}
GPT2 = {"vocab_size": VOCABULARY, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64}
QWEN3_NEXT = SIZES | {
    "layer_types": ["linear_attention", "full_attention"],
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "partial_rotary_factor": 0.25,
}
GLM4_MOE = SIZES | {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
    "num_nextn_predict_layers": 1,
}
IDS = torch.arange(5, 21)[None]


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Return a function that writes a small model, or a copy of it that a test changes."""
    folders: dict[str, Path] = {}

    def write(model_type, *, sizes=SIZES, dtype=torch.bfloat16, **more):
        key = json.dumps([model_type, more, str(dtype)], default=str)
        if key not in folders:
            torch.manual_seed(0)
            folder = tmp_path_factory.mktemp("models") / model_type
            config = CONFIG_MAPPING[model_type](**sizes, **more)
            model = AutoModelForCausalLM.from_config(config).to(dtype)
            model.save_pretrained(folder)
            write_tokenizer(folder)
            folders[key] = folder
        copy = tmp_path_factory.mktemp("copies") / model_type
        shutil.copytree(folders[key], copy)
        return copy

    return write


def rewritten(folder, change):
    """Give the tensors of a folder to `change`, and store what it returns."""
    path = folder / "model.safetensors"
    save_file(change(load_file(path)), path, metadata={"format": "pt"})
    return folder


def ahead(folder, *, of="model.layers.1.", to, more):
    """Add a layer that predicts further ahead: a copy of another layer, and tensors of its own."""

    def add(tensors):
        copied = {
            name.replace(of, to): tensor.clone()
            for name, tensor in tensors.items()
            if name.startswith(of)
        }
        return tensors | copied | {name: torch.ones(*shape) for name, shape in more.items()}

    return rewritten(folder, add)


def quantized(folder, *words):
    """Make the artifact of a folder."""
    assert run("quantize", folder, "-o", folder.parent / "artifact", *words) == 0
    return folder.parent / "artifact"


def logits_of(artifact):
    return load(artifact, decoder="transformers").model(IDS).logits


def unused_in(artifact):
    entries = read_manifest(artifact)["ledger"]["tensors"]
    return {e["name"]: e["reason"] for e in entries if e["reason"].startswith("unused: ")}


FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}


def ignored_by_vllm(module, ignore):
    """Return whether vLLM takes a module for one that is not quantized, by its matching rule.

    A module that it fuses of several is ignored where all of them are; where some are, it refuses.
    """
    *place, name = module.split(".")
    found = {".".join([*place, part]) in ignore for part in FUSED.get(name, (name,))}
    assert len(found) == 1
    return found.pop()


MTP = {
    "qwen3_next": (QWEN3_NEXT, "mtp.layers.0.", {"mtp.fc.weight": (64, 128)}),
    "glm4_moe": (GLM4_MOE, "model.layers.2.", {"model.layers.2.eh_proj.weight": (64, 128)}),
}


@pytest.mark.parametrize(
    ("model_type", "scheme"), [slow(("qwen3_next", "FP8_DYNAMIC")), ("glm4_moe", "W4A16")]
)
def test_layers_that_predict_further_ahead_are_copied_and_named(written, model_type, scheme):
    sizes, place, more = MTP[model_type]
    plain = written(model_type, sizes=sizes)
    expected = logits_of(quantized(plain, "--scheme", scheme, "--algorithm", "rtn"))
    source = ahead(written(model_type, sizes=sizes), to=place, more=more)
    artifact = quantized(source, "--scheme", scheme, "--algorithm", "rtn")
    copied = {name for name in load_file(source / "model.safetensors") if name.startswith(place)}
    assert set(unused_in(artifact)) == copied | set(more)
    assert set(unused_in(artifact).values()) == {"unused: predicts tokens further ahead (MTP)"}
    left = json.loads((artifact / "config.json").read_text())["quantization_config"]["ignore"]
    matrices = {
        name.removesuffix(".weight")
        for name, tensor in load_file(source / "model.safetensors").items()
        if name in unused_in(artifact) and tensor.ndim == 2
    }
    assert matrices <= set(left)
    for module in (f"{place}self_attn.qkv_proj", f"{place}mlp.experts.3.down_proj", *matrices):
        assert ignored_by_vllm(module, left)
    assert not ignored_by_vllm("model.layers.1.self_attn.qkv_proj", left)
    # SGLang's draft model of a layer beyond the last has names of its own
    for module in ("model.decoder.self_attn.q_proj", "model.decoder.mlp.experts.3.down_proj"):
        patterns = [each.removeprefix("re:") for each in left if each.startswith("re:")]
        beyond = model_type == "glm4_moe"
        assert any(re.match(pattern, module) for pattern in patterns) == beyond
    assert torch.equal(logits_of(artifact), expected)
    assert run("verify", artifact) == 0
    assert "| copied, not used by the model |" in (artifact / "README.md").read_text()


@pytest.mark.slow
def test_a_calibrated_method_copies_them_too(written, text_files):
    sizes, place, more = MTP["qwen3_next"]
    source = ahead(written("qwen3_next", sizes=sizes), to=place, more=more)
    words = ("--samples", 4, "--sequence-length", 16, "--experts", "rtn")
    measurement = source.parent / "measurement"
    text = text_files["calibration"]
    assert run("measure", source, "-o", measurement, "--calibration", text, *words[:4]) == 0
    output, artifact = source.parent / "quantized", source.parent / "artifact"
    words = ("--scheme", "W4A16", "--measurement", measurement, "--experts", "rtn")
    assert run("quantize", source, "-o", output, *words) == 0
    assert run("export", output, "-o", artifact) == 0
    assert "mtp.fc.weight" in unused_in(artifact)


def test_layers_beyond_the_configuration_and_a_value_head_are_unused(written):
    source = ahead(written("llama"), to="model.layers.2.", more={"v_head.summary.weight": (1, 64)})
    reasons = set(unused_in(quantized(source, "--scheme", "W8A16")).values())
    assert reasons == {
        "unused: of a layer beyond the 2 of config.json",
        "unused: a value head",
    }


def test_old_buffers_may_hold_infinities(written):
    def old(tensors):
        buffers = {}
        for index in range(2):
            place = f"gpt_neox.layers.{index}.attention."
            buffers[f"{place}bias"] = torch.ones(1, 1, 64, 64, dtype=torch.bool).tril()
            buffers[f"{place}masked_bias"] = torch.tensor(-1e9).half()
            buffers[f"{place}rotary_emb.inv_freq"] = torch.tensor([1.0, 0.1]).half()
        assert buffers["gpt_neox.layers.0.attention.masked_bias"].isinf()
        return tensors | buffers

    sizes = {key: value for key, value in SIZES.items() if key not in GROUPED}
    source = rewritten(written("gpt_neox", sizes=sizes, dtype=torch.float16), old)
    artifact = quantized(source, "--scheme", "W8A16")
    assert len(unused_in(artifact)) == 6
    assert logits_of(artifact).isfinite().all()
    gguf = source.parent / "model.gguf"
    assert run("export", source, "-o", gguf, "--format", "gguf") == 0


GROUPED = {"num_key_value_heads", "head_dim"}


@pytest.mark.parametrize("scheme", ["W8A16", "W4A16"])
@pytest.mark.parametrize(
    "lost", ["model.norm.weight", "model.embed_tokens.weight", "lm_head.weight"]
)
def test_a_tensor_that_is_not_there_is_missed_before_anything_is_written(
    written, lost, scheme, capsys
):
    source = rewritten(
        written("llama"), lambda tensors: {k: v for k, v in tensors.items() if k != lost}
    )
    output = source.parent / "quantized"
    words = ("--scheme", scheme, "--algorithm", "rtn")
    assert run("quantize", source, "-o", output, *words) == 3
    assert f"{lost}: needed by the model, not in the checkpoint (1 missing)" in (
        capsys.readouterr().err
    )
    assert not output.exists()


def test_a_row_too_many_is_found_in_the_headers(written):
    def longer(tensors):
        name = "model.embed_tokens.weight"
        return tensors | {name: torch.cat([tensors[name], tensors[name][-1:]])}

    source = rewritten(written("llama"), longer)
    with pytest.raises(
        InputError, match=r"embed_tokens\.weight: is \[321, 64\], the model needs \[320, 64\]"
    ):
        open_files(source)


NAMES = {
    "gpt2 without its prefix": ("gpt2", GPT2, lambda name: name.removeprefix("transformer.")),
    "llama without its prefix": ("llama", SIZES, lambda name: name.removeprefix("model.")),
    "compiled": ("llama", SIZES, lambda name: f"_orig_mod.{name}"),
    "mixtral without its prefix": (
        "mixtral",
        SIZES | {"num_local_experts": 2},
        lambda name: name.removeprefix("model."),
    ),
    "bloom without its prefix": (
        "bloom",
        {"vocab_size": VOCABULARY, "hidden_size": 64, "n_layer": 2, "n_head": 4},
        lambda name: name.removeprefix("transformer."),
    ),
}

USUAL_NAMES = ("gpt2 without its prefix", "mixtral without its prefix")


@pytest.mark.parametrize(
    "case",
    [pytest.param(name, marks=[] if name in USUAL_NAMES else [pytest.mark.slow]) for name in NAMES],
)
def test_names_as_they_were_released_make_the_same_artifact(written, case):
    model_type, sizes, named = NAMES[case]
    words = ("--scheme", "W4A16", "--algorithm", "rtn")
    expected = quantized(written(model_type, sizes=sizes), *words)
    source = rewritten(
        written(model_type, sizes=sizes),
        lambda tensors: {named(name): tensor for name, tensor in tensors.items()},
    )
    artifact = quantized(source, *words)
    theirs, ours = (load_file(each / "model.safetensors") for each in (expected, artifact))
    assert theirs.keys() == ours.keys()
    assert all(torch.equal(theirs[name], ours[name]) for name in theirs)
    assert read_manifest(artifact)["source"]["stored_names"]
    assert run("verify", artifact) == 0


def test_two_names_of_one_tensor_are_refused(written):
    name = "model.norm.weight"
    source = rewritten(
        written("llama"), lambda tensors: tensors | {"norm.weight": tensors[name].clone()}
    )
    with pytest.raises(InputError, match=rf"norm\.weight: is {name}, as {name} is; remove one"):
        open_files(source)
