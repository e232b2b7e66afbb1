"""Checkpoint names against module names."""

import re

import pytest
from transformers import CONFIG_MAPPING, AutoConfig, GPTNeoXConfig, LlamaConfig, MixtralConfig
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming, rename_source_key

from quantflow.errors import InputError, UnsupportedError
from quantflow.models import names
from quantflow.models.graph import UNTRACED
from quantflow.models.names import HubNames, NameMap
from quantflow.models.parameters import twins
from quantflow.models.skeleton import skeleton

SHAPE = {
    "vocab_size": 16,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}
NEOX_LAYER = "gpt_neox.layers.0"


@pytest.fixture(scope="module")
def neox():
    return skeleton(GPTNeoXConfig(**SHAPE))


@pytest.fixture(scope="module")
def llama():
    return skeleton(LlamaConfig(**SHAPE))


@pytest.fixture(scope="module")
def tied():
    return skeleton(LlamaConfig(**SHAPE, tie_word_embeddings=True))


def test_the_head_of_gpt_neox_has_two_names(neox):
    names = [name.replace("lm_head", "embed_out") for name in neox.state_dict()]
    binding = NameMap(neox).bind(names)
    assert binding.to_module["embed_out.weight"] == "lm_head.weight"
    assert binding.to_source["lm_head.weight"] == "embed_out.weight"
    assert (
        binding.to_source[f"{NEOX_LAYER}.mlp.dense_h_to_4h.bias"]
        == f"{NEOX_LAYER}.mlp.dense_h_to_4h.bias"
    )
    assert (binding.beside, binding.unused) == ((), ())


def test_a_name_of_the_artifact_that_is_no_parameter_stays_as_it_is(neox, llama):
    assert NameMap(neox).module_name("embed_out.weight_packed") == "lm_head.weight_packed"
    name = "model.layers.0.mlp.up_proj.weight_scale"
    assert NameMap(llama).module_name(name) == name


@pytest.mark.parametrize("model_type", UNTRACED)
def test_of_no_family_does_the_table_rename_a_parameters_own_name(model_type):
    model = skeleton(AutoConfig.for_model(model_type, **SHAPE, num_key_value_heads=2))
    renamings = [
        item for item in get_model_conversion_mapping(model) if isinstance(item, WeightRenaming)
    ]
    own = model.state_dict()
    assert all(
        rename_source_key(name, renamings, [], model.base_model_prefix, own)[0] == name
        for name in own
    )


def test_the_table_is_not_asked_for_while_every_name_is_a_parameters_own(llama, monkeypatch):
    monkeypatch.setattr(
        names,
        "get_model_conversion_mapping",
        lambda _model: pytest.fail("it takes a tenth of a second"),
    )
    assert len(NameMap(llama).bind(llama.state_dict()).to_module) == len(llama.state_dict())


def test_buffers_of_old_checkpoints_are_unused_and_listed(neox):
    old = [
        f"{NEOX_LAYER}.attention.{name}" for name in ("bias", "masked_bias", "rotary_emb.inv_freq")
    ]
    assert NameMap(neox).bind([*neox.state_dict(), *old]).unused == tuple(old)


UNUSED = (
    "mtp.layers.0.self_attn.q_proj.weight",
    "model.layers.1.mlp.up_proj.weight",
    "v_head.summary.weight",
    "model.layers.0.self_attn.rotary_emb.inv_freq",
)


def test_a_tensor_of_no_module_is_unused(llama):
    binding = NameMap(llama).bind([*llama.state_dict(), *UNUSED])
    assert binding.unused == UNUSED
    assert set(binding.to_module) == set(llama.state_dict())


def test_experts_of_a_layer_that_the_model_does_not_have_are_unused():
    model = skeleton(MixtralConfig(**SHAPE, num_key_value_heads=2, num_local_experts=2))
    hub = HubNames(model)
    names = [hub.of(name) for name in model.state_dict()]
    ahead = [name.replace("layers.0", "layers.1") for name in names if "layers.0" in name]
    assert NameMap(model).bind([*names, *ahead]).unused == tuple(ahead)


def test_a_tensor_that_its_own_module_lacks_is_refused(llama):
    extra = "model.layers.0.self_attn.q_proj.bias"
    with pytest.raises(InputError, match=rf"{extra}: in the checkpoint, but the model has no"):
        NameMap(llama).bind([*llama.state_dict(), extra])


@pytest.mark.parametrize(
    "named",
    [
        lambda name: name.removeprefix("model."),
        lambda name: f"_orig_mod.{name}",
        lambda name: f"module.{name}",
        lambda name: f"model.{name}" if name.startswith("model.") else name,
        lambda name: name.replace("layers.0.", "layers.0._fsdp_wrapped_module."),
    ],
    ids=["no prefix", "compiled", "data parallel", "twice", "FSDP"],
)
def test_names_of_other_programs_are_spelled_as_transformers_writes_them(llama, named):
    own = list(llama.state_dict())
    spelled = NameMap(llama).spelled([named(name) for name in own], ())
    assert spelled == {named(name): name for name in own if named(name) != name}


def test_tensors_that_are_read_in_parts_get_the_prefix_too(llama):
    whole = "model.layers.0.mlp.experts.gate_up_proj"
    short = whole.removeprefix("model.")
    assert NameMap(llama).spelled([short], {whole}) == {short: whole}


def test_a_bias_of_a_linear_is_not_taken_for_an_old_buffer(neox):
    binding = NameMap(neox).bind(neox.state_dict())
    assert f"{NEOX_LAYER}.attention.dense.bias" in binding.to_module


def test_every_parameter_is_bound_both_ways(llama):
    binding = NameMap(llama).bind(llama.state_dict())
    assert set(binding.to_source) == set(llama.state_dict())
    assert {source: module for module, source in binding.to_source.items()} == binding.to_module


@pytest.mark.parametrize("kept", ["model.embed_tokens.weight", "lm_head.weight"])
def test_one_of_two_tied_names_is_enough(tied, kept):
    names = [name for name in tied.state_dict() if name == kept or name not in twins(tied)]
    binding = NameMap(tied).bind(names)
    assert (
        binding.to_source["lm_head.weight"]
        == binding.to_source["model.embed_tokens.weight"]
        == kept
    )
    assert len(binding.to_module) == len(names)


def test_twins_of_an_untied_model_are_none(llama, tied):
    assert twins(llama) == {}
    assert twins(tied)["lm_head.weight"] == "model.embed_tokens.weight"
    assert twins(tied)["model.embed_tokens.weight"] == "lm_head.weight"


def test_a_parameter_without_tensor_is_refused_by_name(llama):
    names = [name for name in llama.state_dict() if "down_proj" not in name]
    with pytest.raises(
        InputError, match=r"model\.layers\.0\.mlp\.down_proj\.weight: needed .*\(1 missing\)"
    ):
        NameMap(llama).bind(names)


def test_two_tensors_for_one_parameter_are_refused(neox):
    with pytest.raises(
        InputError,
        match="embed_out.weight: names the same parameter lm_head.weight as lm_head.weight",
    ):
        NameMap(neox).bind([*neox.state_dict(), "embed_out.weight"])


def test_an_expert_of_mixtral_has_other_names_in_the_model():
    names = NameMap(skeleton(MixtralConfig(**SHAPE, num_local_experts=2, num_key_value_heads=2)))
    found = names.module_name("model.layers.0.block_sparse_moe.experts.1.w2.weight")
    assert found == "model.layers.0.mlp.experts.1.w2.weight"
    assert (
        names.module_name("model.layers.0.block_sparse_moe.gate.weight")
        == "model.layers.0.mlp.gate.weight"
    )


def test_weights_that_are_merged_on_load_are_refused_by_name():
    config = MixtralConfig(**SHAPE, num_local_experts=2, num_key_value_heads=2)
    with pytest.raises(UnsupportedError, match=r"experts\.2\.w1\.weight: merged or split on load"):
        NameMap(skeleton(config)).bind(["model.layers.0.block_sparse_moe.experts.2.w1.weight"])


@pytest.fixture(scope="module")
def kimi():
    """A model beside an image tower whose queries, keys and values are one tensor in a file."""
    text = {
        **SHAPE,
        "model_type": "deepseek_v3",
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
    }
    vision = {
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 64,
    }
    return skeleton(CONFIG_MAPPING["kimi_k25"](text_config=text, vision_config=vision))


def stored(model):
    """The names of a checkpoint."""
    names = [HubNames(model).of(name) for name in model.state_dict()]
    names = [
        re.sub(r"attn\.q_proj(?=\.(weight|bias)$)", "wqkv", name) if "blocks" in name else name
        for name in names
    ]
    return [name for name in names if not re.search(r"blocks.*\.attn\.[kv]_proj", name)]


def test_what_is_split_for_images_is_left_out(kimi):
    found = NameMap(kimi).bind(names := stored(kimi))
    block = "vision_tower.encoder.blocks.0"
    assert found.beside == (f"{block}.wqkv.weight", f"{block}.wqkv.bias")
    left = {*kimi.state_dict()} - {*found.to_source}
    assert left == {
        f"model.vision_tower.layers.0.attn.{one}_proj.{leaf}"
        for one in "qkv"
        for leaf in ("weight", "bias")
    }
    assert {*names} == {*found.to_module, *found.beside}


def test_a_tensor_that_is_split_for_images_is_missed(kimi):
    names = [name for name in stored(kimi) if not name.endswith("wqkv.bias")]
    with pytest.raises(
        InputError, match=r"vision_tower\.layers\.0\.attn\.k_proj\.bias: needed .*\(3 missing\)"
    ):
        NameMap(kimi).bind(names)


@pytest.mark.parametrize("family", ["bailing_hybrid", "olmo_hybrid"])
def test_the_kernels_of_a_joined_convolution_keep_the_names_of_the_checkpoint(family):
    """They were taken for names of another version, and stock transformers found no convolution.

    huggingface/transformers issue 47407 has such weights filled with random numbers.
    """
    sizes = SHAPE | {"num_hidden_layers": 2, "pad_token_id": 0, "eos_token_id": 1}
    model = skeleton(CONFIG_MAPPING[family](**sizes))
    hub = HubNames(model)
    source = [hub.of(name) for name in model.state_dict()]
    kernels = {name.split(".")[-2] for name in source if "conv1d" in name}
    assert kernels == {"q_conv1d", "k_conv1d", "v_conv1d"}
    found = NameMap(model)
    assert found.spelled(source, ()) == {}
    assert found.bind(source).to_source == dict(zip(model.state_dict(), source, strict=True))
