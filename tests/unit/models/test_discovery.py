"""A decoder layer by one forward: as its family's row has it, and folds change no output."""

import functools
import shutil
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForImageTextToText

from quantflow.errors import InputError, UnsupportedError
from quantflow.models import discovery, joined
from quantflow.models.capture import LayerStream
from quantflow.models.carried import Carried
from quantflow.models.discovery import (
    ForwardRecord,
    LayerCall,
    TensorVersion,
    graph_of,
    layers_of,
    traced,
)
from quantflow.models.graph import UNTRACED
from quantflow.models.load import load_model, open_source
from quantflow.models.open import graph_for
from quantflow.models.skeleton import skeleton

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
DENSE = [name for name, family in UNTRACED.items() if family.mixture is None]
MIXTURES = [name for name, family in UNTRACED.items() if family.mixture is not None]
OTHERS = (  # whose linears no row has
    *(
        "bloom",
        "falcon",
        "gemma",
        "gemma2",
        "gemma3_text",
        "glm",
        "gptj",
        "granite",
        "helium",
        "cohere",
        "olmo2",
        "opt",
    ),
    *("phi", "phi3", "smollm3", "stablelm", "starcoder2"),
)


def config_of(kind, **more):
    return CONFIG_MAPPING[kind](**{**SIZES, **OWN.get(kind, {}), **more})


def relative(layer, group):
    """Return a group of the row's graph with the names of modules inside its layer."""
    return discovery._renamed(group, layer.relative)


@pytest.mark.parametrize("kind", DENSE)
def test_a_family_of_the_table_comes_out_as_the_table_has_it(kind):
    config = config_of(kind)
    graph, model = graph_for(config), skeleton(config)
    assert layers_of(model) == graph.family.layers
    for found, expected in zip(traced(model, graph.family.layers)[0], graph.layers, strict=True):
        assert found.groups == tuple(relative(expected, group) for group in expected.groups)
        assert (found.attention, found.routers) == (expected.inside(expected.attention), ())
        assert (found.kv_heads, found.value_dim) == (expected.kv_heads, expected.head_dim)
        assert not found.tuple_of


def facts(layer):
    """The parts of a layer but its routers, since a trace sees only those that are linears."""
    what = (layer.prefix, layer.attention, layer.groups, layer.block, layer.experts)
    return *what, layer.chosen, layer.repeats, layer.head_dim, layer.kv_heads


@pytest.mark.parametrize("kind", [*DENSE, *MIXTURES])
def test_the_whole_graph_of_a_family_is_the_tables_in_the_checkpoints_names(kind):
    config = config_of(kind)
    found, expected = graph_of(config), graph_for(config)
    assert found.family.discovered and not expected.family.discovered
    assert [facts(layer) for layer in found.layers] == [facts(layer) for layer in expected.layers]
    for mine, its in zip(found.layers, expected.layers, strict=True):
        assert {name: mine.module(name) for name in mine.linears} == {
            name: its.module(name) for name in its.linears
        }
        assert {*mine.routers} <= {*its.routers}
    assert (found.family.embedding, found.family.head) == (
        expected.family.embedding,
        expected.family.head,
    )
    assert not any(layer.idle for layer in found.layers) and not found.others


def test_a_range_that_values_are_cut_to_lets_no_factor_through():
    config = config_of("olmoe", clip_qkv=2.0)
    model = skeleton(config)
    (output,) = [
        group
        for group in traced(model, "model.layers")[0][0].groups
        if group.linears == ("self_attn.o_proj",)
    ]
    assert output.feeder is None


def random_model(config):
    torch.manual_seed(0)
    model = (
        AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval().requires_grad_(False)
    )
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
            factors = (
                torch.rand(features, generator=torch.Generator().manual_seed(folded)) * 2 + 0.5
            )
            if group.per_head:  # heads that share values share factors
                factors = factors.view(layer.kv_heads, layer.repeats, layer.head_dim)[:, :1].expand(
                    -1, layer.repeats, -1
                )
            fold_(model, layer, group, factors.reshape(-1))
            folded += 1
    after = model(input_ids=ids).logits
    assert float((after - before).norm() / before.norm()) < 2e-5
    assert folded >= len(graph.layers)


def test_a_norm_that_multiplies_by_one_more_than_its_weight_takes_no_factors():
    norms = {
        kind: [group.norm for group in graph_for(config_of(kind)).layers[0].groups]
        for kind in ("gemma", "granite")
    }
    assert set(norms["gemma"]) == {None}
    assert norms["granite"][0] == "model.layers.0.input_layernorm"


def test_a_norm_that_experts_read_past_the_router_takes_no_factors():
    """JetMoE's experts read a view of the norm's output, which the router reads too."""
    groups = (
        graph_for(config_of("jetmoe", kv_channels=16, num_key_value_heads=2, num_local_experts=4))
        .layers[0]
        .groups
    )
    assert {group.norm for group in groups} == {None}


def test_linears_that_share_an_input_are_one_group_wherever_they_lie():
    """A parallel residual: attention and MLP read one norm."""
    (first, *_) = graph_for(config_of("phi")).layers[0].groups
    assert [name.rpartition(".")[2] for name in first.linears] == [
        "q_proj",
        "k_proj",
        "v_proj",
        "fc1",
    ]
    assert first.norm == "model.layers.0.input_layernorm" and first.fused


def test_the_graph_says_where_the_embedding_and_the_head_are_and_what_layers_return():
    family = graph_for(config_of("gptj")).family
    assert (family.layers, family.embedding, family.head, family.tuple_of) == (
        "transformer.h",
        "transformer.wte",
        "lm_head",
        2,
    )
    assert family.model_type not in UNTRACED


def test_a_model_is_as_it_was_after_it_was_traced():
    model = skeleton(config_of("phi"))
    before = {
        name: (parameter.shape, parameter.is_meta) for name, parameter in model.named_parameters()
    }
    traced(model, "model.layers")
    assert {
        name: (parameter.shape, parameter.is_meta) for name, parameter in model.named_parameters()
    } == before
    assert not any(
        "forward" in module.__dict__ or module._forward_hooks for module in model.modules()
    )


def test_what_stands_in_the_way_is_said():
    with pytest.raises(
        UnsupportedError,
        match=r"xlm: transformer.attentions.1 does not read what the layer before it returned",
    ):
        graph_of(CONFIG_MAPPING["xlm"](vocab_size=96, emb_dim=64, n_layers=2, n_heads=4))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A random model of a family as transformers has it, and the folder that it was saved to."""

    @functools.cache
    def make(kind):
        model = random_model(config_of(kind, **STORED[kind]))
        for buffer in model.buffers():  # those that a checkpoint holds are no zeros there
            if buffer.ndim == 1 and buffer.is_floating_point() and not buffer.any():
                buffer.normal_(0, 0.1)
        folder = tmp_path_factory.mktemp(kind)
        model.save_pretrained(folder)
        return model, folder

    return make


LATENT = {
    "q_lora_rank": 48,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}
SPARSE_ATTENTION = {
    "indexer_types": ["full", "shared"],
    "index_topk": 4,
    "index_n_heads": 2,
    "index_head_dim": 16,
}
STORED = {  # what one obstacle each needs
    "gpt2": {},  # transposed
    # experts in one tensor, transposed, interleaved, with biases
    "gpt_oss": {"head_dim": 16, "layer_types": None},
    "granitemoe": {},  # experts in one tensor of another name
    "deepseek_v3": {
        **LATENT,
        "num_key_value_heads": 4,
        "n_routed_experts": 4,
        "n_group": 1,
        "topk_group": 1,
    }
    # latent attention, shared experts, buffers
    | {"first_k_dense_replace": 1, "n_shared_experts": 1},
    "glm_moe_dsa": {
        **LATENT,
        **SPARSE_ATTENTION,
        "num_key_value_heads": 4,
        "n_routed_experts": 4,
        "n_group": 1,
    }
    # the second layer attends to the tokens that the first one chose
    | {"topk_group": 1, "n_shared_experts": 1},
    # the same, of several streams of hidden states
    "hy_v4": {**SPARSE_ATTENTION, **LATENT, "n_routed_experts": 4},
    # routers read what the router before computed
    "zaya": {"num_experts": 4, "num_experts_per_tok": 1, "head_dim": 16},
    "gemma2": {},  # an embedding that multiplies
    # idle linears
    "bart": {
        "decoder_layers": 2,
        "decoder_attention_heads": 4,
        "decoder_ffn_dim": 128,
        "encoder_layers": 1,
    },
    "mamba": {"num_hidden_layers": 2},  # no attention
    "openai-gpt": {},  # layers return lists
    "olmo_hybrid": {
        "layer_types": ["linear_attention", "full_attention"],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 2,
    }
    # three convolutions of the checkpoint are one
    | {"linear_key_head_dim": 16, "linear_value_head_dim": 16},
    # embeddings of another width
    "rembert": {"input_embedding_size": 32, "output_embedding_size": 48, "is_decoder": True},
    "llama4_text": {
        "head_dim": 16,
        "intermediate_size_mlp": 128,
        "attention_chunk_size": 8,
    }  # it looks at the embedding's weight
    # and its experts read scaled inputs, in every second layer
    | {"num_local_experts": 4, "interleave_moe_layer_step": 2},
    # experts in three tensors of two axes
    "dbrx": {
        "d_model": 64,
        "n_heads": 4,
        "n_layers": 2,
        "max_seq_len": 64,
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 1.0, "rope_theta": 10000.0},
        "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2},
    },
}
IDS = torch.randint(2, 96, (1, 12), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("kind", STORED)
@torch.no_grad()
def test_a_checkpoint_is_read_as_transformers_reads_it(kind, saved):
    model, folder = saved(kind)
    found = load_model(open_source(folder), dtype=torch.float32)(
        input_ids=IDS, use_cache=False
    ).logits
    expected = model(input_ids=IDS, use_cache=False).logits
    assert float((found - expected).norm() / expected.norm()) < 2e-6


def compare_layer_by_layer(stream, model):
    states = stream.begin([IDS[0]])
    for index in range(len(stream.graph.layers)):
        with stream.layer(index) as layer:
            stream.advance(layer, states)
    expected = model(input_ids=IDS, use_cache=False).logits
    assert float((stream.finish(states[0].hidden) - expected).norm() / expected.norm()) < 2e-6


@pytest.mark.parametrize("kind", STORED)
@torch.no_grad()
def test_layer_by_layer_it_is_the_model(kind, saved):
    model, folder = saved(kind)
    source = open_source(folder)
    stream = LayerStream(source, graph_for(source.config))
    compare_layer_by_layer(stream, model)


def test_a_weight_that_is_stored_transposed_is_read_as_rows_of_outputs(saved):
    model, folder = saved("gpt2")
    name = "transformer.h.0.attn.c_attn.weight"
    (found,) = open_source(folder).read([name]).values()
    assert torch.equal(found, model.transformer.h[0].attn.c_attn.weight.T) and found.is_contiguous()


def test_every_linear_of_every_expert_is_a_tensor_of_its_own(saved):
    model, folder = saved("gpt_oss")
    source = open_source(folder)
    experts, own = "model.layers.1.mlp.experts", model.model.layers[1].mlp.experts
    for number in range(4):
        read = source.read(
            [
                f"{experts}.{number}.{leaf}"
                for leaf in ("gate_proj.weight", "up_proj.bias", "down_proj.weight")
            ]
        )
        gate, up_bias, down = read.values()
        assert torch.equal(gate, own.gate_up_proj[number, :, 0::2].T)
        assert torch.equal(up_bias, own.gate_up_proj_bias[number, 1::2])
        assert torch.equal(down, own.down_proj[number].T)
    assert (
        f"{experts}.down_proj" in source.checkpoint.located
        and f"{experts}.down_proj" not in source.names
    )


def test_experts_of_llama_4_are_columns_of_two_tensors_and_its_router_is_none(saved):
    model, folder = saved("llama4_text")
    source, own = open_source(folder), model.model.layers[1].feed_forward.experts
    experts, width = "model.layers.1.feed_forward.experts", own.down_proj.shape[1]
    for number in range(4):
        names = [f"{experts}.{number}.{leaf}_proj.weight" for leaf in ("gate", "up", "down")]
        gate, up, down = source.read(names).values()
        assert torch.equal(gate, own.gate_up_proj[number, :, :width].T)
        assert torch.equal(up, own.gate_up_proj[number, :, width:].T)
        assert torch.equal(down, own.down_proj[number].T)
    dense, sparse = graph_for(source.config).layers[:2]
    assert (dense.experts, sparse.experts, sparse.chosen) == (0, 4, 2)
    assert sparse.routers == ("model.layers.1.feed_forward.router",)


def test_experts_of_dbrx_are_rows_of_three_tensors_the_last_one_transposed(saved):
    model, folder = saved("dbrx")
    source, own = open_source(folder), model.transformer.blocks[1].ffn.experts.mlp
    experts, width = "transformer.blocks.1.ffn.experts", own.ffn_hidden_size
    for number in range(4):
        names = [f"{experts}.{number}.{leaf}.weight" for leaf in ("w1", "v1", "w2")]
        gate, up, down = source.read(names).values()
        rows = slice(number * width, (number + 1) * width)
        assert torch.equal(gate, own.w1[rows])
        assert torch.equal(up, own.v1[rows])
        assert torch.equal(down, own.w2[rows].T)
    layer = graph_for(source.config).layers[1]
    assert (layer.experts, layer.chosen) == (4, 2)
    assert layer.routers == ("transformer.blocks.1.ffn.router.layer",)


def test_latent_attention_by_hand():
    layer = graph_for(config_of("deepseek_v3", **STORED["deepseek_v3"])).layers[1]
    inside = "model.layers.1."
    found = {
        tuple(layer.inside(name) for name in group.linears): group
        for group in layer.groups
        if group.expert is None
    }
    reads = found["self_attn.q_a_proj", "self_attn.kv_a_proj_with_mqa"]
    assert reads.norm == f"{inside}input_layernorm"
    assert found[("self_attn.q_b_proj",)].norm == f"{inside}self_attn.q_a_layernorm"
    assert found[("self_attn.kv_b_proj",)].norm == f"{inside}self_attn.kv_a_layernorm"
    shared = found["mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj"]
    assert shared.norm is None and shared.fused  # the router reads that norm too
    assert (layer.experts, layer.chosen, len(layer.gates)) == (4, 2, 4)


def test_linears_that_no_token_goes_through_are_named_and_left_alone():
    layer = graph_for(config_of("bart", **STORED["bart"])).layers[0]
    assert [layer.inside(name) for name in layer.idle] == [
        f"encoder_attn.{name}" for name in ("k_proj", "v_proj", "q_proj", "out_proj")
    ]
    assert not {*layer.idle} & {*layer.linears}


TEXT = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
CROSS = {**TEXT, "pad_token_id": 1, "num_hidden_layers": 3, "cross_attention_layers": [1]}
TILES = {
    "num_global_layers": 1,
    "attention_heads": 2,
    "vision_output_dim": 64,
    "intermediate_layers_indices": [0],
}
JOINED = {
    **TEXT,
    "num_hidden_layers": 2,
    "head_dim": 16,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}
JOINED |= {
    "dense_intermediate_size": 128,
    "shared_intermediate_size": 96,
    "mlp_layer_types": ["dense", "sparse"],
}
SEES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "patch_size": 14,
}


@pytest.fixture(scope="module")
def reads_images(tmp_path_factory):
    """Return a random model that reads images too, and the folder that it was saved to."""

    def make(kind, text, vision):
        config = CONFIG_MAPPING[kind](
            text_config=text, vision_config=SEES | {"image_size": 28} | vision
        )
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32).eval()
        folder = tmp_path_factory.mktemp(kind)
        model.save_pretrained(folder)
        return model, folder

    return make


@torch.no_grad()
def test_a_layer_that_text_goes_past_has_idle_linears_and_changes_nothing(reads_images):
    model, folder = reads_images("mllama", CROSS, TILES)
    source = open_source(folder)
    stream = LayerStream(source, graph := graph_for(source.config))
    assert [layer.skipped for layer in graph.layers] == [False, True, False]
    assert graph.layers[1].groups == () and graph.layers[1].attention is None
    idle = [graph.layers[1].inside(name) for name in graph.layers[1].idle]
    assert idle[:3] == ["cross_attn.q_proj", "cross_attn.k_proj", "cross_attn.v_proj"]
    compare_layer_by_layer(stream, model)


def test_a_layer_without_attention_names_none():
    layer = graph_for(config_of("mamba", num_hidden_layers=2)).layers[0]
    assert layer.attention is None
    assert [layer.inside(name) for name in layer.linears] == [
        "mixer.in_proj",
        "mixer.x_proj",
        "mixer.out_proj",
    ]
    # whose weight the scan reads itself
    assert [layer.inside(name) for name in layer.idle] == ["mixer.dt_proj"]


def test_layers_that_read_more_of_earlier_ones_than_the_hidden_state_are_refused():
    """They could not be replayed one by one."""
    first, second, aside = TensorVersion(1), TensorVersion(2), TensorVersion(3)
    names = ["layers.0", "layers.1"]
    record = ForwardRecord(outputs={aside: "layers.0.value"}, ran={*names, "layers.1.mlp"})
    odd = SimpleNamespace(model_type="odd")
    record.called["layers.0"] = LayerCall(hidden=first, others=(), output=second, features=(8,))
    record.called["layers.1"] = LayerCall(hidden=second, others=(), output=TensorVersion(4))
    assert discovery._chain(record, names, odd) is None
    record.called["layers.1"] = LayerCall(
        hidden=second, others=(("more", aside),), output=TensorVersion(4)
    )
    with pytest.raises(
        UnsupportedError, match=r"odd: layers.1 reads layers.0.value beside the hidden state"
    ):
        discovery._chain(record, names, odd)
    record.called["layers.0"].beside[1] = (aside, torch.float32, (1, 12, 3))
    carried = Carried(argument="more", output=1, dtype=None, width=3, hidden=(8,))
    assert discovery._chain(record, names, odd) == carried
    record.called["layers.0"].beside[1] = (aside, torch.float32, (1, 4, 12, 3))  # of another form
    with pytest.raises(
        UnsupportedError, match=r"odd: layers.1 reads layers.0.value beside the hidden state"
    ):
        discovery._chain(record, names, odd)
    record.called["layers.1"] = LayerCall(hidden=first, others=(), output=TensorVersion(4))
    with pytest.raises(
        UnsupportedError, match=r"odd: layers.1 does not read what the layer before it returned"
    ):
        discovery._chain(record, names, odd)
    del record.called["layers.1"]
    with pytest.raises(
        UnsupportedError, match=r"odd: layers.1 was not called with one hidden state"
    ):
        discovery._chain(record, names, odd)
    record.ran.remove("layers.1")  # a container whose modules are called without it
    with pytest.raises(
        UnsupportedError, match=r"odd: layers.1 was not called with one hidden state"
    ):
        discovery._chain(record, names, odd)
    record.ran.clear()
    with pytest.raises(UnsupportedError, match=r"odd: none of layers.\* ran"):
        discovery._chain(record, names, odd)


def test_layers_that_share_a_weight_are_refused_with_both_names():
    kinds = ["linear_attention", "hybrid", "hybrid"]
    sizes = {
        "num_hidden_layers": 3,
        "attention_hidden_size": 128,
        "attention_head_dim": 32,
        "n_mamba_heads": 2,
    }
    config = config_of("zamba", **sizes, layers_block_type=kinds)
    with pytest.raises(
        UnsupportedError,
        match=r"layers[.]2[.]shared_transf.* and .*layers[.]1[.].* are one weight of two layers",
    ):
        graph_of(config)


def test_experts_that_a_checkpoint_holds_in_another_form_are_refused_with_their_name():
    with pytest.raises(
        UnsupportedError,
        match=r"mlp[.]experts[.]gate_up_proj: a checkpoint holds these experts in another",
    ):
        graph_of(config_of("inkling2_text", head_dim=16))


@torch.no_grad()
def test_a_linear_that_a_checkpoint_holds_in_several_tensors_is_several_linears(
    reads_images, monkeypatch
):
    model, folder = reads_images("minimax_m3_vl", JOINED, {})
    source = open_source(folder)
    stream = LayerStream(source, graph := graph_for(source.config))
    names = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
    assert [name for name in graph.layers[0].linears if ".mlp." in name] == [
        f"{graph.layers[0].prefix}.{name}" for name in names
    ]
    assert (
        graph.layers[0].relative(f"{graph.layers[0].prefix}.mlp.up_proj")
        == "mlp.gate_up_proj.parts.1"
    )
    compare_layer_by_layer(stream, model)
    monkeypatch.setattr(joined, "_NAMED_JOINED", "another")
    discovery._graph_of.cache_clear()
    with pytest.raises(
        UnsupportedError,
        match=r"layers\.0\.mlp\.gate_up_proj: a checkpoint holds this linear in several tensors",
    ):
        graph_of(source.config)
    discovery._graph_of.cache_clear()


@pytest.mark.parametrize("which", ["model", "released"])
@torch.no_grad()
def test_experts_are_read_whichever_way_round_a_checkpoint_has_their_axes(qwen3_vl_mixture, which):
    model, folders = qwen3_vl_mixture
    experts, own = (
        "model.language_model.layers.1.mlp.experts",
        model.model.language_model.layers[1].mlp.experts,
    )
    source = open_source(folders[which])
    for number in range(4):
        names = [
            f"{experts}.{number}.{leaf}.weight" for leaf in ("gate_proj", "up_proj", "down_proj")
        ]
        gate, up, down = source.read(names).values()
        assert torch.equal(torch.cat([gate, up]), own.gate_up_proj[number]) and torch.equal(
            down, own.down_proj[number]
        )


def test_experts_of_neither_shape_are_refused_with_both(qwen3_vl_mixture, tmp_path):
    _, folders = qwen3_vl_mixture
    shutil.copytree(folders["released"], folder := tmp_path / "f")
    tensors = load_file(folder / "model.safetensors")
    name = "model.language_model.layers.1.mlp.experts.down_proj"
    tensors[name] = tensors[name].reshape(4, 32, -1)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        InputError,
        match=r"down_proj: \[4, 32, 192\] in model.safetensors, \[4, 64, 96\] by config.json",
    ):
        open_source(folder)


def test_a_shared_expert_with_as_many_features_as_there_are_experts_is_no_router():
    # Qwen3-Next-80B: 512 experts, and a shared one of 512 features
    graph = graph_for(
        CONFIG_MAPPING["qwen3_next"](
            hidden_size=64,
            num_hidden_layers=2,
            layer_types=["linear_attention", "full_attention"],
            num_attention_heads=4,
            num_key_value_heads=2,
            vocab_size=96,
            num_experts=8,
            num_experts_per_tok=2,
            moe_intermediate_size=8,
            shared_expert_intermediate_size=8,
        )
    )
    for layer in graph.layers:
        assert [name.removeprefix(f"{layer.prefix}.mlp.") for name in layer.routers] == [
            "shared_expert_gate"
        ]
        assert f"{layer.prefix}.mlp.shared_expert.gate_proj" in layer.linears
