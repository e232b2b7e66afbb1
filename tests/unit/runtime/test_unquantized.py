"""A model that is not quantized runs in both decoders, after the checks that need no hash."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GemmaConfig, LlamaConfig, MixtralConfig, PhiConfig

from quantflow.errors import InputError, UnsupportedError, UsageError
from quantflow.runtime.load import load
from quantflow.runtime.offload import load_offloaded

SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 96,
    "vocab_size": 96,
    "eos_token_id": 2,
}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
CONFIGS = {
    "llama": LlamaConfig(**SIZES, architectures=["LlamaForCausalLM"]),
    "gemma": GemmaConfig(**SIZES, head_dim=16, architectures=["GemmaForCausalLM"]),
    "phi": PhiConfig(**SIZES, architectures=["PhiForCausalLM"]),
    "mixtral": MixtralConfig(**SIZES, num_local_experts=4, architectures=["MixtralForCausalLM"]),
}
IDS = torch.randint(3, 96, (2, 9), generator=torch.Generator().manual_seed(0))


def saved(folder, family: str, dtype=torch.float32):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(CONFIGS[family]).to(dtype).eval()
    model.save_pretrained(folder)
    return model


def logits(decoder) -> torch.Tensor:
    decoder.begin(rows=2, capacity=9)
    with torch.inference_mode():
        return torch.stack([decoder.forward(IDS[:, :8]), decoder.forward(IDS[:, 8:])])


@pytest.mark.parametrize("decoder", ["lean", "transformers"])
@pytest.mark.parametrize("family", CONFIGS)
def test_its_logits_are_those_of_transformers(family, decoder, tmp_path):
    expected = saved(tmp_path, family)(IDS).logits[:, 7:].transpose(0, 1)
    loaded = load(tmp_path, decoder=decoder)
    assert (loaded.name, loaded.backends, loaded.artifact.manifest) == (decoder, {}, {})
    assert torch.allclose(logits(loaded.decoder), expected, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("decoder", ["lean", "transformers"])
def test_in_bfloat16_its_logits_are_those_of_transformers_within_its_rounding(decoder, tmp_path):
    expected = saved(tmp_path, "llama", torch.bfloat16).float()(IDS).logits[:, 7:].transpose(0, 1)
    found = logits(load(tmp_path, decoder=decoder, dtype=torch.bfloat16).decoder)
    assert (found - expected).norm() < 2 * torch.finfo(torch.bfloat16).eps * expected.norm()
    # what it is in float32
    assert not torch.equal(found, logits(load(tmp_path, decoder=decoder).decoder))


def test_float16_logits_are_those_of_transformers_and_the_lean_decoder_says_why_not(
    tmp_path,
):
    expected = saved(tmp_path, "llama", torch.float16).float()(IDS).logits[:, 7:].transpose(0, 1)
    loaded = load(tmp_path, decoder="auto", dtype=torch.float16)
    assert loaded.name == "transformers" and loaded.reasons[0].endswith(
        "it holds weights in float32 or bfloat16, not in float16"
    )
    found = logits(loaded.decoder)
    assert (found - expected).norm() < 2 * torch.finfo(torch.float16).eps * expected.norm()
    # what it is in float32
    assert not torch.equal(found, logits(load(tmp_path, decoder="transformers").decoder))


def test_auto_takes_the_lean_decoder_and_weights_may_stay_on_disk(tmp_path):
    expected = saved(tmp_path, "llama")(IDS).logits
    assert load(tmp_path, decoder="auto").name == "lean"
    assert torch.equal(load_offloaded(tmp_path).model(IDS).logits, expected)


def test_what_contradicts_the_configuration_is_refused_by_name(tmp_path):
    saved(tmp_path, "llama")
    name, path = "model.layers.1.mlp.up_proj.weight", tmp_path / "model.safetensors"
    whole = load_file(path)
    for change, message in (
        ({name: whole[name][:64].clone()}, rf"{name}: is \[64, 64\], the model needs \[96, 64\]"),
        ({name: None}, f"{name}: needed by the model, not in the checkpoint"),
        (
            {f"{name.removesuffix('weight')}bias": torch.ones(2)},
            "up_proj.bias: in the checkpoint, but the model has no parameter",
        ),
        (
            {name: whole[name].to(torch.int8)},
            f"{name}: is I8, and no scheme says how it is quantized",
        ),
    ):
        save_file(
            {key: value for key, value in (whole | change).items() if value is not None},
            path,
            metadata={"format": "pt"},
        )
        with pytest.raises(InputError, match=message):
            load(tmp_path, decoder="auto")
    save_file(whole | {name: whole[name] * float("nan")}, path, metadata={"format": "pt"})
    with pytest.raises(InputError, match=name):
        load(tmp_path, decoder="lean")
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(InputError, match="model.safetensors"):
        load(tmp_path, decoder="auto")


def test_what_an_artifact_alone_has_is_refused(tmp_path):
    saved(tmp_path, "llama")
    with pytest.raises(
        UsageError, match="a pack of a model that is not quantized, which has no hash"
    ):
        load(tmp_path, decoder="auto", pack=True)
    with pytest.raises(UsageError, match="backend int4_pack for a model that is not quantized"):
        load(tmp_path, decoder="auto", backend="int4_pack")
    config = json.loads((tmp_path / "config.json").read_text())
    weights = load_file(tmp_path / "model.safetensors")
    packed = {"model.layers.0.mlp.up_proj.qweight": torch.ones(8, 96, dtype=torch.int32)}
    refusals = {
        "gptq": (InputError, "bits is None"),
        "bitsandbytes": (UnsupportedError, "'bitsandbytes' is not read here"),
    }
    for method, (kind, message) in refusals.items():
        (tmp_path / "config.json").write_text(
            json.dumps(config | {"quantization_config": {"quant_method": method}})
        )
        save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
        load(tmp_path, decoder="auto")  # beside plain floats it is left over
        save_file(weights | packed, tmp_path / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(kind, match=message):
            load(tmp_path, decoder="auto")
