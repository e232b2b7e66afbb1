"""Artifacts made in the test, loaded, and compared with transformers' model of their weights."""

import json
from pathlib import Path

import pytest
import torch
from transformers import GPTNeoXConfig, LlamaConfig, Qwen2Config

from quantflow.backends import kernels, native
from quantflow.core.scheme import PRESETS, with_group_size
from quantflow.errors import InputError, IntegrityError, UnsupportedError, UsageError
from quantflow.formats import compressed_tensors as layout
from quantflow.models.open import graph_for
from quantflow.runtime.linear import QuantLinear
from quantflow.runtime.load import load

SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 96,
    "eos_token_id": 2,
}
LLAMA = LlamaConfig(
    **SIZES,
    intermediate_size=96,
    num_key_value_heads=2,
    tie_word_embeddings=False,
    architectures=["LlamaForCausalLM"],
)
TIED_QWEN2 = Qwen2Config(
    **SIZES,
    intermediate_size=96,
    num_key_value_heads=2,
    tie_word_embeddings=True,
    architectures=["Qwen2ForCausalLM"],
)
GPT_NEOX = GPTNeoXConfig(**SIZES, intermediate_size=128, architectures=["GPTNeoXForCausalLM"])
W4A16 = with_group_size(PRESETS["W4A16"], 32)
W4A16_ASYM = with_group_size(PRESETS["W4A16_ASYM"], 32)
TOKENS = torch.randint(3, 96, (1, 12), generator=torch.Generator().manual_seed(3))


def logits(model) -> torch.Tensor:
    with torch.inference_mode():
        return model(input_ids=TOKENS).logits


SCHEMES = {
    name: with_group_size(s, 32)
    if s.weights.group_size and s.weights.scale_format == "float"
    else s
    for name, s in PRESETS.items()
}
# else torch's kernels, as far as they go
OURS = native.why_not(kernels.SOURCE, cpu_flags=kernels.CPU_FLAGS) is None
if OURS:
    BACKENDS = {"W8A8": "w8a8", "W8A8_STATIC": "w8a8", "W8A16": "w8a16", "W4A8": "w4a8"}
    BACKENDS |= {name: "w4a16" for name in SCHEMES if name[:5] in ("W4A16", "W3A16", "W2A16")}
    BACKENDS |= {name: "w8a16" for name in SCHEMES if name[:2] in ("W6", "W5")}
    BACKENDS |= {"NVFP4A16": "mx", "MXFP4A16": "mx", "MXFP8A16": "mx"}
    BACKENDS |= {name: "fp8" for name in SCHEMES if name.startswith("FP8")}
else:
    BACKENDS = {"W8A8": "int8_mm", "W8A8_STATIC": "int8_mm", "W8A16": "int8_pack"}
    BACKENDS |= {"W4A16": "int4_pack", "W4A16_ASYM": "int4_pack"}


@pytest.mark.parametrize("name", SCHEMES)
def test_logits_are_those_of_the_model_with_dequantized_weights(name, tmp_path, make_artifact):
    expected = logits(make_artifact(tmp_path, LLAMA, SCHEMES[name]))
    for backend in ("auto", "reference"):
        runtime = load(tmp_path, backend=backend)
        wanted = BACKENDS.get(name, "reference") if backend == "auto" else "reference"
        assert set(runtime.backends.values()) == {wanted}
        assert set(runtime.backends) == set(graph_for(LLAMA).linears)
        # Another order of sums can move an input over a rounding boundary of its grid, so quantized
        # inputs get more room.
        room = 2e-5 if SCHEMES[name].input is None or backend == "reference" else 2e-2
        assert torch.allclose(logits(runtime.model), expected, atol=room, rtol=room)


@pytest.mark.parametrize(
    "config", [TIED_QWEN2, GPT_NEOX], ids=["biases, tied head", "renamed head"]
)
@pytest.mark.parametrize("name", ["W4A16", "FP8_DYNAMIC"])
def test_other_families_load_with_biases_tied_heads_and_renamed_tensors(
    config, name, tmp_path, make_artifact
):
    expected = logits(make_artifact(tmp_path, config, SCHEMES[name]))
    assert torch.allclose(logits(load(tmp_path).model), expected, atol=1e-4, rtol=1e-4)


def test_mixed_schemes_and_unquantized_linears_load_from_the_config_alone(tmp_path, make_artifact):
    def scheme_of(name):
        if name.endswith("down_proj"):
            return None
        return PRESETS["W8A16"] if "layers.0" in name else W4A16

    expected = logits(make_artifact(tmp_path, LLAMA, scheme_of))
    runtime = load(tmp_path)
    assert torch.allclose(logits(runtime.model), expected, atol=2e-5, rtol=2e-5)
    assert runtime.backends["model.layers.0.mlp.up_proj"] == BACKENDS["W8A16"]
    assert runtime.backends["model.layers.1.mlp.up_proj"] == BACKENDS["W4A16"]
    assert type(runtime.model.model.layers[0].mlp.down_proj) is torch.nn.Linear


def test_the_loaded_model_is_frozen_and_says_what_it_is(tmp_path, make_artifact):
    make_artifact(tmp_path, LLAMA, W4A16)
    runtime = load(tmp_path)
    assert not runtime.model.training
    assert not any(parameter.requires_grad for parameter in runtime.model.parameters())
    assert isinstance(runtime.model.model.layers[1].self_attn.q_proj, QuantLinear)
    assert f"in_features=64, out_features=32, backend={BACKENDS['W4A16']}" in repr(
        runtime.model.model.layers[1].self_attn.k_proj
    )
    assert runtime.artifact.manifest["kind"] == "artifact"
    assert not hasattr(runtime.model.config, "quantization_config")
    assert runtime.tokenizer is None
    assert runtime.eos_token_ids == (2,)
    reasons = runtime.artifact.linears["model.layers.0.mlp.up_proj"].reasons
    assert reasons["hpu"] == "hpu runs on hpu, not on cpu"
    assert reasons["w8a8"] == "w8a8 needs symmetric int8 weights, scheme W4A16 has int4 per group"


def test_bfloat16_logits_stay_near_those_of_float32(tmp_path, make_artifact):
    expected = logits(make_artifact(tmp_path, LLAMA, W4A16))
    actual = logits(load(tmp_path, dtype=torch.bfloat16).model)
    assert actual.dtype == torch.bfloat16
    assert (actual.float() - expected).norm() / expected.norm() < 0.02


def test_a_backend_that_cannot_run_a_linear_is_an_error(tmp_path, make_artifact):
    make_artifact(tmp_path, LLAMA, W4A16)
    with pytest.raises(UsageError, match=r"^backend int8_mm: int8_mm needs symmetric int8 weights"):
        load(tmp_path, backend="int8_mm")
    with pytest.raises(UsageError, match=r"^dtype torch.int8; use one of torch.float32"):
        load(tmp_path, dtype=torch.int8)


@pytest.fixture(scope="module")
def intact(tmp_path_factory, make_artifact) -> Path:
    """An artifact with a static input, so that every kind of scale is there."""
    folder = tmp_path_factory.mktemp("intact")
    make_artifact(folder, LLAMA, PRESETS["W8A8_STATIC"])
    return folder


@pytest.fixture
def damaged(intact, tmp_path) -> Path:
    for path in intact.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    return tmp_path


LINEAR = "model.layers.1.mlp.up_proj"


@pytest.mark.parametrize("name", ["weight", "weight_scale", "input_scale", "input_zero_point"])
def test_a_missing_tensor_of_a_quantized_linear_is_an_error(damaged, name, edit_tensors):
    edit_tensors(damaged, lambda tensors: tensors.pop(f"{LINEAR}.{name}"))
    with pytest.raises(
        InputError,
        match=rf"^{LINEAR}\.{name}: its linear's scheme needs it, it is not in the artifact;",
    ):
        load(damaged, verify=False)


def test_a_missing_parameter_is_an_error(damaged, edit_tensors):
    edit_tensors(damaged, lambda tensors: tensors.pop("model.norm.weight"))
    with pytest.raises(
        InputError, match=r"^model.norm.weight: needed by the model, not in the checkpoint"
    ):
        load(damaged, verify=False)


def test_a_whole_linear_that_is_missing_is_an_error(damaged, edit_tensors):
    def drop(tensors):
        for key in [key for key in tensors if key.startswith(LINEAR)]:
            del tensors[key]

    edit_tensors(damaged, drop)
    with pytest.raises(
        InputError, match=rf"^{LINEAR}\.weight: needed by the model, not in the checkpoint"
    ):
        load(damaged, verify=False)


@pytest.mark.parametrize(
    "name",
    ["model.extra.weight", f"{LINEAR}.weight_zero_point", "model.layers.2.mlp.up_proj.weight"],
)
def test_a_tensor_that_nothing_uses_is_an_error(damaged, name, edit_tensors):
    edit_tensors(damaged, lambda tensors: tensors.update({name: torch.ones(4)}))
    with pytest.raises(
        InputError, match=rf"^{name}: in the checkpoint, but the model has no parameter {name};"
    ):
        load(damaged, verify=False)


def test_an_embedding_whose_only_twin_is_a_quantized_head_is_an_error(
    tmp_path, make_artifact, edit_tensors, quantize
):
    make_artifact(tmp_path, TIED_QWEN2, PRESETS["W8A16"])

    def untie(tensors):
        embedding = tensors.pop("model.embed_tokens.weight")
        tensors |= layout.encode("lm_head", quantize("lm_head", embedding, PRESETS["W8A16"]))

    edit_tensors(tmp_path, untie)
    with pytest.raises(
        InputError,
        match=r"^model.embed_tokens.weight: needed by the model, not in the artifact; export",
    ):
        load(tmp_path, verify=False)


def test_a_weight_beside_its_packed_form_is_an_error(tmp_path, make_artifact, edit_tensors):
    make_artifact(tmp_path, LLAMA, W4A16)
    edit_tensors(tmp_path, lambda tensors: tensors.update({f"{LINEAR}.weight": torch.ones(96, 64)}))
    with pytest.raises(
        InputError, match=rf"^{LINEAR}\.weight: stored beside its quantized form; export"
    ):
        load(tmp_path, verify=False)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(
            (name, value)
            for name in ("weight_scale", "input_scale")
            for value in (float("nan"), float("inf"), 0.0)
        )
    ]
    + [("input_scale", -1.0)],  # a negative one of integer weights without zero points is a scale
)
def test_a_scale_that_is_none_is_an_error(damaged, name, value, edit_tensors):
    edit_tensors(damaged, lambda tensors: tensors[f"{LINEAR}.{name}"][-1].fill_(value))
    with pytest.raises(InputError, match=rf"^{LINEAR}\.{name}: "):
        load(damaged, verify=False)


def test_a_parameter_with_nan_is_an_error(damaged, edit_tensors):
    edit_tensors(damaged, lambda tensors: tensors["model.norm.weight"][3].fill_(float("nan")))
    with pytest.raises(InputError, match=r"^model.norm.weight: 1 values"):
        load(damaged, verify=False)


def test_a_weight_of_another_shape_is_an_error(damaged, edit_tensors):
    def shrink(tensors):
        for name in ("weight", "weight_scale"):
            tensors[f"{LINEAR}.{name}"] = tensors[f"{LINEAR}.{name}"][:-1].clone()

    edit_tensors(damaged, shrink)
    with pytest.raises(
        InputError,
        match=rf"^{LINEAR}: weight is \[95, 64\], bias None, the model needs \[96, 64\];",
    ):
        load(damaged, verify=False)


@pytest.mark.parametrize(
    "name", ["model.safetensors", "config.json", "generation_config.json", "quantflow.json"]
)
def test_one_flipped_bit_in_any_file_is_an_integrity_error(damaged, name):
    content = bytearray((damaged / name).read_bytes())
    content[len(content) // 2] ^= 1
    (damaged / name).write_bytes(content)
    with pytest.raises(IntegrityError):
        load(damaged)


@pytest.mark.parametrize("verify", [True, False])
def test_an_intact_artifact_loads_with_and_without_hashing(intact, verify):
    assert logits(load(intact, verify=verify).model).isfinite().all()


def test_a_folder_that_is_no_artifact_is_refused(damaged):
    config = json.loads((damaged / "config.json").read_text())
    del config["quantization_config"]
    (damaged / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        InputError,
        match=r"config\.json: no quantization_config; give the folder of an exported artifact",
    ):
        load(damaged, verify=False)
    # now it is a model, of quantized tensors that nothing describes
    (damaged / "quantflow.json").unlink()
    with pytest.raises(
        InputError,
        match=r"_scale: in the checkpoint, but the model has no parameter .*; check that "
        r"config\.json",
    ):
        load(damaged)
    (damaged / "model.safetensors").unlink()
    with pytest.raises(
        InputError, match=r"no model\.safetensors .*; give a folder that holds the model's weights"
    ):
        load(damaged)
    (damaged / "config.json").unlink()
    with pytest.raises(InputError, match=r"no quantflow\.json; give the folder of an artifact"):
        load(damaged)


def test_a_quantization_that_this_version_does_not_know_is_unsupported(damaged, edit_config):
    config = json.loads((damaged / "config.json").read_text())["quantization_config"]
    edit_config(damaged, quantization_config=config | {"quant_method": "gptq"})
    with pytest.raises(UnsupportedError, match="quant_method is 'gptq'"):
        load(damaged, verify=False)


def test_end_tokens_are_those_of_generation_config_and_config_together(damaged):
    (damaged / "generation_config.json").write_text('{"eos_token_id": [5, 6]}')
    assert load(damaged, verify=False).eos_token_ids == (5, 6, 2)
    (damaged / "generation_config.json").write_text("{}")
    assert load(damaged, verify=False).eos_token_ids == (2,)
