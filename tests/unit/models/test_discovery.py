"""What one forward finds out about a decoder layer: what the table says of its families, and folds that change no output."""

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from quantflow.errors import UnsupportedError
from quantflow.models import discovery
from quantflow.models.discovery import Called, Moment, Record, graph_of, layers_of, traced
from quantflow.models.graph import FAMILIES, graph_for
from quantflow.models.load import skeleton

SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 1,
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 96,
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 4,
    "n_layers": 2,
    "n_heads": 4,
    "d_model": 64,
    "ffn_dim": 128,
    "word_embed_proj_dim": 64,
}
HEADS = {"head_dim": 16}
OWN = {
    "gpt_neox": {"num_key_value_heads": 4},
    "gemma": HEADS,
    "gemma2": HEADS,
    "gemma3_text": HEADS,
    "gptj": {"rotary_dim": 8},
    "helium": HEADS,
}
DENSE = ("llama", "mistral", "qwen2", "qwen3", "gpt_neox")
MIXTURES = ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe")
OTHERS = (  # in no table
    *("bloom", "falcon", "gemma", "gemma2", "gemma3_text", "glm", "gptj", "granite", "helium", "cohere", "olmo2", "opt"),
    *("phi", "phi3", "smollm3", "stablelm", "starcoder2"),
)


def config_of(kind, **more):
    return CONFIG_MAPPING[kind](**{**SIZES, **OWN.get(kind, {}), **more})


def relative(layer, group):
    """Return a group of the table's graph with the names of modules inside its layer."""
    return discovery._renamed(group, layer.relative)


@pytest.mark.parametrize("kind", DENSE)
def test_a_family_of_the_table_comes_out_as_the_table_has_it(kind):
    config = config_of(kind)
    graph, model = graph_for(config), skeleton(config)
    assert layers_of(model) == graph.family.layers
    for found, expected in zip(traced(model, graph.family.layers), graph.layers, strict=True):
        assert found.groups == tuple(relative(expected, group) for group in expected.groups)
        assert (found.attention, found.routers) == (expected.inside(expected.attention), ())
        assert (found.kv_heads, found.value_dim) == (expected.kv_heads, expected.head_dim)
        assert not found.in_tuple


@pytest.mark.parametrize("kind", MIXTURES)
def test_a_mixture_of_the_table_comes_out_as_the_table_has_it(kind):
    """Of the experts those that some token was sent to; a router that is no linear of torch's is not seen."""
    config = config_of(kind)
    graph, model = graph_for(config), skeleton(config)
    for found, expected in zip(traced(model, graph.family.layers), graph.layers, strict=True):
        groups = [relative(expected, group) for group in expected.groups]
        assert all(group in groups for group in found.groups)
        assert [group for group in groups if group.expert is None] == [group for group in found.groups if group.expert is None]
        assert any(group.expert for group in found.groups)
        assert set(found.routers) <= {expected.relative(name) for name in expected.routers}


def test_a_range_that_values_are_cut_to_lets_no_factor_through():
    config = config_of("olmoe", clip_qkv=2.0)
    model = skeleton(config)
    (output,) = [group for group in traced(model, "model.layers")[0].groups if group.linears == ("self_attn.o_proj",)]
    assert output.feeder is None


def random_model(config):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval().requires_grad_(False)
    for parameter in model.parameters():
        parameter += torch.randn_like(parameter) * 0.1
    return model


def fold_(model, layer, group, factors):
    """Multiply the columns of a group by factors, and divide what its input comes from."""
    for name in group.linears:
        model.get_submodule(layer.module(name)).weight.mul_(factors)
    source = model.get_submodule(layer.module(group.norm or group.feeder))
    for parameter in (source.weight, getattr(source, "bias", None)):
        if parameter is not None:
            shared = factors
            if group.per_head:
                shared = factors.view(layer.kv_heads, layer.repeats, layer.head_dim)[:, 0].flatten()
            parameter.div_(shared if parameter.ndim == 1 else shared[:, None])


@pytest.mark.parametrize("kind", OTHERS)
def test_every_fold_that_is_found_changes_no_output(kind):
    config = config_of(kind)
    graph, model = graph_for(config), random_model(config)
    assert graph.family.discovered
    ids = torch.randint(2, 96, (1, 12), generator=torch.Generator().manual_seed(1))
    before = model(input_ids=ids).logits
    folded = 0
    for layer in graph.layers:
        for group in layer.groups:
            if not group.folds:
                continue
            features = model.get_submodule(layer.module(group.linears[0])).weight.shape[1]
            factors = torch.rand(features, generator=torch.Generator().manual_seed(folded)) * 2 + 0.5
            if group.per_head:  # heads that share values share factors
                factors = factors.view(layer.kv_heads, layer.repeats, layer.head_dim)[:, :1].expand(-1, layer.repeats, -1)
            fold_(model, layer, group, factors.reshape(-1))
            folded += 1
    after = model(input_ids=ids).logits
    assert float((after - before).norm() / before.norm()) < 2e-5
    assert folded >= len(graph.layers)


def test_a_norm_that_multiplies_by_one_more_than_its_weight_takes_no_factors():
    norms = {kind: [group.norm for group in graph_for(config_of(kind)).layers[0].groups] for kind in ("gemma", "granite")}
    assert set(norms["gemma"]) == {None}
    assert norms["granite"][0] == "model.layers.0.input_layernorm"


def test_linears_that_share_an_input_are_one_group_wherever_they_lie():
    """A parallel residual: attention and MLP read one norm."""
    (first, *_) = graph_for(config_of("phi")).layers[0].groups
    assert [name.rpartition(".")[2] for name in first.linears] == ["q_proj", "k_proj", "v_proj", "fc1"]
    assert first.norm == "model.layers.0.input_layernorm" and first.fused


def test_the_graph_says_where_the_embedding_and_the_head_are_and_what_layers_return():
    family = graph_for(config_of("gptj")).family
    assert (family.layers, family.embedding, family.head, family.in_tuple) == (
        "transformer.h",
        "transformer.wte",
        "lm_head",
        True,
    )
    assert family.model_type not in FAMILIES


def test_a_model_is_as_it_was_after_it_was_traced():
    model = skeleton(config_of("phi"))
    before = {name: (parameter.shape, parameter.is_meta) for name, parameter in model.named_parameters()}
    traced(model, "model.layers")
    assert {name: (parameter.shape, parameter.is_meta) for name, parameter in model.named_parameters()} == before
    assert not any("forward" in module.__dict__ or module._forward_hooks for module in model.modules())


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("gpt2", "gpt2: transformer.h.0.attn.c_attn is stored transposed"),
        ("gpt_oss", "gpt_oss: "),
        ("mamba", "no token went through it in a forward of mamba"),
    ],
)
def test_what_stands_in_the_way_is_said(kind, told):
    with pytest.raises(UnsupportedError, match=told):
        graph_of(config_of(kind))


def test_layers_that_read_more_of_earlier_ones_than_the_hidden_state_are_refused():
    """They could not be replayed one by one."""
    first, second, aside = Moment(1), Moment(2), Moment(3)
    record = Record(outputs={aside: "layers.0.value"})
    names = ["layers.0", "layers.1"]
    record.called["layers.0"] = Called(hidden=first, others=(), output=second)
    record.called["layers.1"] = Called(hidden=second, others=(), output=Moment(4))
    discovery._require_chain(record, names, "odd")
    record.called["layers.1"] = Called(hidden=second, others=(aside,), output=Moment(4))
    with pytest.raises(UnsupportedError, match=r"odd: layers.1 reads layers.0.value beside the hidden state"):
        discovery._require_chain(record, names, "odd")
    record.called["layers.1"] = Called(hidden=first, others=(), output=Moment(4))
    with pytest.raises(UnsupportedError, match=r"odd: layers.1 does not read what the layer before it returned"):
        discovery._require_chain(record, names, "odd")
    del record.called["layers.1"]
    with pytest.raises(UnsupportedError, match=r"odd: layers.1 was not called with one hidden state"):
        discovery._require_chain(record, names, "odd")
