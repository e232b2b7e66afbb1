"""The model run layer by layer equals the model run by transformers."""

import gc
from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from transformers import (
    AutoModelForCausalLM,
    CodeGenConfig,
    CodeGenForCausalLM,
    DeepseekV4Config,
    DeepseekV4ForCausalLM,
    DynamicCache,
    Gemma4Config,
    Gemma4ForConditionalGeneration,
    GemmaConfig,
    GemmaForCausalLM,
    GPT2Config,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PhiConfig,
    PhiForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from quantflow.core.parallel import Workers
from quantflow.errors import InputError, UnsupportedError, UsageError
from quantflow.models.capture import LayerStream
from quantflow.models.hooks import KVRecorder, QueryRecorder, RepeatedHeads, watch
from quantflow.models.load import open_source
from quantflow.models.open import graph_for
from quantflow.models.parameters import release_
from quantflow.numerics import product

SHAPE = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
GROUPED = SHAPE | {
    "num_key_value_heads": 2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
MODELS = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**GROUPED)),
    "llama tied": lambda: LlamaForCausalLM(LlamaConfig(**GROUPED, tie_word_embeddings=True)),
    "llama with biases and llama3 rope": lambda: LlamaForCausalLM(
        LlamaConfig(
            **(GROUPED | {"rope_parameters": LLAMA3_ROPE}), attention_bias=True, mlp_bias=True
        )
    ),
    "llama bfloat16": lambda: LlamaForCausalLM(LlamaConfig(**GROUPED)).to(torch.bfloat16),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**GROUPED)),
    "mistral with a short window": lambda: MistralForCausalLM(
        MistralConfig(**GROUPED, sliding_window=4)
    ),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**GROUPED)),
    "qwen2 with a window in its last layer": lambda: Qwen2ForCausalLM(
        Qwen2Config(**GROUPED, use_sliding_window=True, sliding_window=4, max_window_layers=2)
    ),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**GROUPED, head_dim=16)),
    "gemma, whose embedding multiplies": lambda: GemmaForCausalLM(
        GemmaConfig(**GROUPED, head_dim=8)
    ),
    "gpt_neox": lambda: GPTNeoXForCausalLM(GPTNeoXConfig(**SHAPE)),
    "gpt_neox in series": lambda: GPTNeoXForCausalLM(
        GPTNeoXConfig(**SHAPE, use_parallel_residual=False)
    ),
}
SEQUENCES = [
    torch.tensor(ids)
    for ids in ([3, 7, 11, 2, 49, 0, 7, 7, 21], [5, 6], [9, 8, 7, 6, 5, 4, 3, 2, 1])
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Name of a model -> its checkpoint.

    Weights are large enough that no path through the model is negligible.
    """
    generator = torch.Generator().manual_seed(0)
    made = {}
    for name, make in MODELS.items():
        model = make()
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator) * 0.3
            parameter.data.copy_(noise if parameter.ndim == 2 else noise + 1)
        made[name] = tmp_path_factory.mktemp("model")
        model.save_pretrained(made[name])
    return made


@pytest.fixture(params=MODELS)
def folder(request, folders):
    return folders[request.param]


def stream_of(folder, **options):
    source = open_source(folder)
    return LayerStream(source, graph_for(source.config), **options)


def stock_of(folder, dtype=torch.float32):
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation="sdpa"
    ).eval()


def through_layers(stream, states, cache=None):
    for index in range(len(stream.graph.layers)):
        with stream.layer(index) as layer:
            stream.advance(layer, states, cache=cache)
    return states


def meta_parameters(module):
    return [parameter.is_meta for parameter in module.parameters()]


@torch.no_grad()
def test_logits_of_the_stream_are_those_of_the_stock_model(folder):
    stream = stream_of(folder)
    states = through_layers(stream, stream.begin(SEQUENCES))
    model = stock_of(folder)
    for sequence, state in zip(SEQUENCES, states, strict=True):
        expected = model(sequence[None]).logits
        assert expected.std() > 0.1
        assert torch.equal(stream.finish(state.hidden), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_layers_and_head_in_bfloat16_are_widened_where_the_cpu_is_slow_at_it(
    folders, monkeypatch, dtype
):
    rows, linear = [], product._linear
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    monkeypatch.setattr(
        product, "_linear", lambda *given: (rows.append(len(given[1])), linear(*given))[1]
    )
    stream = stream_of(folders["llama"], dtype=dtype)
    (state,) = through_layers(stream, stream.begin(SEQUENCES[:1]))
    linears = len(rows)
    stream.finish(state.hidden)
    # seven of a layer, the head
    assert (linears, rows[linears:]) == ((3 * 7, [50]) if dtype == torch.bfloat16 else (0, []))


def test_threads_that_put_the_head_on_at_once_have_the_logits_of_one(folder):
    stream = stream_of(folder)
    hidden = [
        torch.randn(1, count, 32, generator=torch.Generator().manual_seed(count))
        for count in (1, 9, 5, 70) * 5
    ]
    alone = [stream.finish(x) for x in hidden]
    with stream.head(), Workers(4) as workers:
        together = workers.map(stream.finish, hidden)
    assert all(torch.equal(one, other) for one, other in zip(alone, together, strict=True))


@torch.no_grad()
def test_logits_in_bfloat16_are_those_of_the_stock_model_in_bfloat16(folders):
    stream = stream_of(folders["qwen3"], dtype=torch.bfloat16)
    (state,) = through_layers(stream, stream.begin(SEQUENCES[:1]))
    assert torch.equal(
        stream.finish(state.hidden),
        stock_of(folders["qwen3"], torch.bfloat16)(SEQUENCES[0][None]).logits,
    )


def test_hidden_states_between_layers_are_those_of_the_stock_model(folder):
    stream = stream_of(folder)
    states = stream.begin(SEQUENCES[:1])
    seen = []
    model = stock_of(folder)
    for layer in model.get_submodule(stream.graph.family.layers):
        layer.register_forward_hook(lambda _module, args, output: seen.append((args[0], output)))
    with torch.no_grad():
        model(SEQUENCES[0][None])
    for index, (before, after) in enumerate(seen):
        assert torch.equal(states[0].hidden, before)
        with stream.layer(index) as layer:
            stream.advance(layer, states)
        assert torch.equal(states[0].hidden, after)


def test_running_a_layer_twice_gives_the_same_and_leaves_the_state_alone(folder):
    stream = stream_of(folder)
    (state,) = stream.begin(SEQUENCES[:1])
    before = state.hidden.clone()
    with stream.layer(0) as layer:
        first, second = stream.run(layer, state), stream.run(layer, state)
    assert torch.equal(first, second)
    assert torch.equal(state.hidden, before)
    assert not torch.equal(first, before)


def test_each_linear_of_the_decoder_layers_is_in_the_graph_once(folder):
    model = stock_of(folder)
    graph = graph_for(model.config)
    inside = {
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and "layers." in name
    }
    assert len(graph.linears) == len(set(graph.linears)) == len(inside)
    assert set(graph.linears) == inside
    assert [layer.index for layer in graph.layers] == [0, 1, 2]


def test_linears_of_a_group_receive_one_tensor_which_is_the_output_of_its_norm(folder):
    stream = stream_of(folder)
    states = stream.begin(SEQUENCES[:1])
    for node in stream.graph.layers:
        inputs, outputs, order = {}, {}, []
        with stream.layer(node.index) as layer:

            def note(name, x, y, inputs=inputs, outputs=outputs, order=order):
                inputs[name], outputs[name] = x, y
                order.append(name)

            names = [*node.linears, *(group.norm for group in node.groups if group.norm)]
            callbacks = {
                node.relative(name): (lambda x, y, name=name: note(name, x, y)) for name in names
            }
            with watch(layer, callbacks):
                stream.advance(layer, states)
        assert [name for name in order if name in node.linears] == list(node.linears)
        for group in node.groups:
            for linear in group.linears:
                assert inputs[linear] is inputs[group.linears[0]]
            if group.norm:
                assert inputs[group.linears[0]] is outputs[group.norm]
        firsts = [inputs[group.linears[0]] for group in node.groups]
        assert len({id(first) for first in firsts}) == len(firsts)
        assert isinstance(stream.model.get_submodule(node.attention), nn.Module)


def test_watched_output_is_the_linear_of_the_watched_input_and_hooks_are_gone_afterwards(folders):
    stream = stream_of(folders["llama"])
    states = stream.begin(SEQUENCES[:1])
    seen = []
    with stream.layer(0) as layer:
        with watch(layer, {"mlp.down_proj": lambda x, y: seen.append((x, y))}):
            stream.run(layer, states[0])
        stream.run(layer, states[0])
        ((x, y),) = seen
        assert torch.equal(y, x @ layer.mlp.down_proj.weight.T)


def test_watching_a_name_that_is_not_there_is_refused(folders):
    stream = stream_of(folders["llama"])
    with (
        stream.layer(0) as layer,
        pytest.raises(
            UsageError, match=r"mlp\.dwon_proj: not in LlamaDecoderLayer; use one of self_attn"
        ),
        watch(layer, {"mlp.dwon_proj": print}),
    ):
        pass


@torch.no_grad()
def test_recorded_keys_and_values_are_what_a_dynamic_cache_stores(folder):
    stream = stream_of(folder)
    seen = {}
    recorder = KVRecorder(lambda index, key, value: seen.setdefault(index, (key, value)))
    states = through_layers(stream, stream.begin(SEQUENCES[:1]), cache=recorder)
    cache = DynamicCache()
    logits = stock_of(folder)(SEQUENCES[0][None], past_key_values=cache).logits
    assert list(seen) == [0, 1, 2]
    for index, (key, value) in seen.items():
        assert torch.equal(key, cache.layers[index].keys)
        assert torch.equal(value, cache.layers[index].values)
    assert torch.equal(stream.finish(states[0].hidden), logits)


@torch.no_grad()
def test_a_cache_that_a_layer_is_given_without_its_name_is_recorded_too(tmp_path):
    """GPT-2 hands it to its blocks by position."""
    config = GPT2Config(vocab_size=128, n_embd=32, n_layer=2, n_head=2, n_positions=64)
    torch.manual_seed(0)
    stock = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    stock.save_pretrained(tmp_path)
    stream, seen = stream_of(tmp_path), {}
    recorder = KVRecorder(lambda index, key, value: seen.setdefault(index, (key, value)))
    sequence, cache = torch.arange(20), DynamicCache()
    through_layers(stream, stream.begin([sequence]), cache=recorder)
    stock(sequence[None], past_key_values=cache)
    assert list(seen) == [0, 1]
    for index, (key, value) in seen.items():
        torch.testing.assert_close(key, cache.layers[index].keys)
        torch.testing.assert_close(value, cache.layers[index].values)


@torch.no_grad()
def test_recorded_queries_are_what_attention_multiplies_with_the_keys(folder):
    """Q and K make the layer's own attention probabilities: Q after RoPE, and after its norm."""
    stream = stream_of(folder)
    model = stock_of(folder)
    model.set_attn_implementation("eager")
    expected = model(SEQUENCES[0][None], output_attentions=True).attentions
    (state,) = stream.begin(SEQUENCES[:1])
    for index in range(3):
        queries, keys = [], []
        with stream.layer(index) as layer:
            with QueryRecorder(queries.append):
                hidden = stream.run(
                    layer,
                    state,
                    cache=KVRecorder(lambda _index, key, _value, keys=keys: keys.append(key)),
                )
            assert torch.equal(hidden, stream.run(layer, state))  # watching changes nothing
        (query,), (key,) = queries, keys
        key = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
        # [1, heads, S]
        last = (query[:, :, -1:] @ key.transpose(-1, -2) / query.shape[-1] ** 0.5)[:, :, 0]
        seen = expected[index][:, :, -1]
        assert torch.allclose(
            last.masked_fill(seen == 0, float("-inf")).softmax(dim=-1), seen, atol=1e-5
        )
        state.store.put(state.index, hidden)


@pytest.mark.parametrize("by_name", [False, True])
def test_attention_with_repeated_heads_is_that_with_shared_ones(by_name):
    query, key, value = torch.randn(1, 4, 5, 8), torch.randn(1, 2, 5, 8), torch.randn(1, 2, 5, 8)
    attention, given = (
        functional.scaled_dot_product_attention,
        {"query": query, "key": key, "value": value},
    )
    args, kwargs = ((), given) if by_name else (tuple(given.values()), {})
    seen = []

    class Watched(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            if func is attention:
                seen.append((args[1].shape[1], (kwargs or {}).get("enable_gqa", False)))
            return func(*args, **(kwargs or {}))

    shared = attention(*args, **kwargs, is_causal=True, enable_gqa=True)
    with Watched(), RepeatedHeads():
        repeated = attention(*args, **kwargs, is_causal=True, enable_gqa=True)
        alike = attention(query, query, query)
    assert torch.allclose(repeated, shared, atol=1e-6) and torch.equal(
        alike, attention(query, query, query)
    )
    assert seen == [(4, False), (4, False)]


def test_recorded_keys_are_rotated(folders):
    """The first layer sees only embeddings: a token at two positions has two keys, one value."""
    stream = stream_of(folders["llama"])
    seen = []
    (state,) = stream.begin([torch.tensor([7, 7])])
    with stream.layer(0) as layer:
        stream.run(layer, state, cache=KVRecorder(lambda *stored: seen.append(stored)))
    ((index, key, value),) = seen
    assert index == 0
    assert not torch.allclose(key[:, :, 0], key[:, :, 1])
    assert torch.allclose(value[:, :, 0], value[:, :, 1])


def test_weights_are_in_memory_only_while_they_are_used(folder):
    stream = stream_of(folder)
    assert all(meta_parameters(stream.model))
    states = stream.begin(SEQUENCES)
    assert all(meta_parameters(stream.model))
    with stream.layer(1) as layer:
        assert not any(meta_parameters(layer))
        assert sum(not absent for absent in meta_parameters(stream.model)) == len(
            meta_parameters(layer)
        )
    assert all(meta_parameters(stream.model))
    with stream.head():
        assert not all(meta_parameters(stream.model))
        stream.finish(states[0].hidden)
        assert not all(meta_parameters(stream.model))
    assert all(meta_parameters(stream.model))


def test_a_layer_is_released_when_its_block_fails(folders):
    stream = stream_of(folders["llama"])
    with pytest.raises(ZeroDivisionError), stream.layer(0):
        raise ZeroDivisionError
    assert all(meta_parameters(stream.model))


def test_the_head_is_read_once_for_many_sequences(folders, monkeypatch):
    stream = stream_of(folders["llama"])
    states = stream.begin(SEQUENCES)
    read = []
    original = type(stream.weights).read
    monkeypatch.setattr(
        type(stream.weights),
        "read",
        lambda self, names, dtype=None: original(self, read_note(read, names), dtype),
    )
    with stream.head():
        for state in states:
            stream.finish(state.hidden)
    assert sorted(read) == ["lm_head.weight", "model.norm.weight"]


def read_note(read, names):
    names = list(names)
    read.extend(names)
    return names


def test_nothing_runs_behind_the_last_layer_while_calls_are_recorded(folders):
    source = open_source(folders["llama"])
    stream = LayerStream(source, graph_for(source.config))
    stream.model.model.norm.forward = None  # a call would raise
    (state,) = stream.begin(SEQUENCES[:1])
    assert len(state.calls) == 3 and state.hidden.shape == (1, len(SEQUENCES[0]), 32)


def test_recorded_arguments_are_shared_over_layers_and_equally_long_sequences(folders):
    stream = stream_of(folders["mistral with a short window"])
    first, short, third = stream.begin(SEQUENCES)
    for name in ("attention_mask", "position_ids"):
        assert isinstance(first.calls[0].kwargs[name], torch.Tensor)
        assert (
            first.calls[0].kwargs[name]
            is first.calls[2].kwargs[name]
            is third.calls[1].kwargs[name]
        )
    assert (
        first.calls[0].kwargs["position_embeddings"][0]
        is third.calls[2].kwargs["position_embeddings"][0]
    )
    assert short.calls[0].kwargs["position_ids"].shape == (1, 2)


def test_a_checkpoint_with_both_of_two_tied_weights_that_differ_is_run_as_transformers_runs_it(
    folders, tmp_path
):
    model = stock_of(folders["llama"])
    model.config.tie_word_embeddings = True
    model.config.save_pretrained(tmp_path)
    save_file(model.state_dict(), tmp_path / "model.safetensors", {"format": "pt"})
    stream = stream_of(tmp_path)
    (state,) = through_layers(stream, stream.begin(SEQUENCES[:1]))
    with torch.no_grad(), stream.head():
        assert torch.equal(stream.finish(state.hidden), model(SEQUENCES[0][None]).logits)
        assert torch.equal(
            stream.begin(SEQUENCES[:1])[0].hidden, model.model.embed_tokens(SEQUENCES[0][None])
        )


@pytest.mark.parametrize(
    ("sequence", "message"),
    [
        (
            torch.tensor([1, 50]),
            r"sequence 1: token ids 1\.\.50, the model embeds 0\.\.49; use the tokenizer",
        ),
        (torch.tensor([-1, 5]), r"sequence 1: token ids -1\.\.5"),
        (torch.empty(0, dtype=torch.int64), r"sequence 1: shape \[0\], \[S\] is needed"),
        (torch.tensor([[1, 2]]), r"sequence 1: shape \[1, 2\]"),
    ],
)
def test_a_sequence_that_the_model_cannot_embed_is_refused(folders, sequence, message):
    with pytest.raises(InputError, match=message):
        stream_of(folders["llama"]).begin([SEQUENCES[0], sequence])


def test_a_graph_that_lacks_a_linear_of_the_model_is_refused(folders):
    source = open_source(folders["llama"])
    graph = graph_for(source.config)
    short = replace(graph, layers=graph.layers[:2])
    with pytest.raises(
        UnsupportedError, match=r"model\.layers\.2\.mlp\.down_proj: in the model only"
    ):
        LayerStream(source, short)


@pytest.mark.parametrize(
    "name", ["llama bfloat16", "llama with biases and llama3 rope", "gpt_neox"]
)
def test_a_layer_whose_linears_stay_as_stored_gives_the_same_outputs_and_is_released(folders, name):
    stream = stream_of(folders[name])
    state = stream.begin(SEQUENCES)[0]
    with stream.layer(1) as layer:
        wanted = stream.run(layer, state)
    with stream.layer(1, as_stored=True) as layer:
        linears = [part for part in layer.modules() if isinstance(part, nn.Linear)]
        stored = torch.bfloat16 if name == "llama bfloat16" else torch.float32
        assert {part.weight.dtype for part in linears} == {stored}
        others = {id(part.weight) for part in linears}
        assert {value.dtype for value in layer.parameters() if id(value) not in others} == {
            torch.float32
        }
        found = stream.run(layer, state)
        # What is converted is multiplied by another library, which adds up in another order.
        assert (found - wanted).abs().max() <= (
            0 if stored == torch.float32 else 1e-6 * wanted.abs().max()
        )
    assert all(value.is_meta for value in layer.parameters())
    with stream.layer(1) as layer:
        assert torch.equal(stream.run(layer, state), wanted)


def test_who_has_a_layer_can_let_go_of_a_weight_as_stored(folders):
    stream = stream_of(folders["llama bfloat16"])
    with stream.layer(1, as_stored=True) as layer:
        linears = [part for part in layer.modules() if isinstance(part, nn.Linear)]
        places = {part.weight.data_ptr() for part in linears}
        for part in linears:
            release_(part, ["weight"])
        gc.collect()
        tensors = [
            value
            for value in gc.get_objects()
            if type(value) in (torch.Tensor, nn.Parameter) and not value.is_meta
        ]
        assert not [
            value.shape
            for value in tensors
            if value.dtype == torch.bfloat16 and value.data_ptr() in places
        ]


def test_a_head_with_a_bias_adds_it(tmp_path):
    model = PhiForCausalLM(PhiConfig(**SHAPE)).eval()
    model.lm_head.bias.data.normal_(generator=torch.Generator().manual_seed(0))
    model.save_pretrained(tmp_path)
    source = open_source(tmp_path)
    stream = LayerStream(source, graph_for(source.config))
    (state,) = stream.begin(SEQUENCES[:1])
    for index in range(len(stream.graph.layers)):
        with stream.layer(index) as layer:
            stream.advance(layer, [state])
    with torch.no_grad():
        assert torch.allclose(
            stream.finish(state.hidden), model(SEQUENCES[0][None]).logits, atol=1e-5
        )


def written(model, folder):
    """Give a model random weights and write it."""
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.normal_(0, 0.3, generator=generator)
    model.save_pretrained(folder)
    return model.eval()


@pytest.mark.parametrize("padding", [0, 2, 40])  # the last is not in the text
@torch.no_grad()
def test_a_text_that_names_an_image_has_paddings_row_in_its_place(tmp_path, padding):
    """The model takes one row of the embedding's weight by itself, and looks the others up."""
    image = int(SEQUENCES[0][1])
    sizes = {
        "num_key_value_heads": 2,
        "head_dim": 8,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 50,
    }
    text = SHAPE | sizes | {"layer_types": ["full_attention"] * 3, "pad_token_id": padding}
    config = Gemma4Config(
        text_config=text, vision_config=None, audio_config=None, image_token_id=image
    )
    model = written(Gemma4ForConditionalGeneration(config), tmp_path)
    stream = stream_of(tmp_path)
    (state,) = through_layers(stream, stream.begin(SEQUENCES[:1]))
    found = stream.finish(state.hidden)
    expected = model(SEQUENCES[0][None]).logits
    assert expected.std() > 0.1 and torch.allclose(found, expected, atol=1e-5)


@torch.no_grad()
def test_attention_that_keeps_states_of_its_own_in_the_cache_runs_without_them(tmp_path):
    kinds = ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"]
    rates = {"compressed_sparse_attention": 2, "heavily_compressed_attention": 4}
    sizes = {
        "head_dim": 16,
        "qk_rope_head_dim": 8,
        "q_lora_rank": 16,
        "o_lora_rank": 8,
        "o_groups": 2,
        "index_n_heads": 2,
    }
    sizes |= {
        "index_head_dim": 16,
        "index_topk": 2,
        "moe_intermediate_size": 24,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
    }
    config = DeepseekV4Config(
        **SHAPE, **sizes, layer_types=kinds, mlp_layer_types=["moe"] * 3, compress_rates=rates
    )
    model = written(DeepseekV4ForCausalLM(config), tmp_path)
    stream = stream_of(tmp_path)
    seen = []
    recorder = KVRecorder(lambda index, _key, _value: seen.append(index))
    (state,) = through_layers(stream, stream.begin(SEQUENCES[:1]), cache=recorder)
    expected = model(SEQUENCES[0][None]).logits
    assert seen == [0, 1, 2]
    assert expected.std() > 0.1 and torch.allclose(stream.finish(state.hidden), expected, atol=1e-5)


@torch.no_grad()
def test_a_configuration_that_knows_no_padding_is_embedded(tmp_path):
    config = CodeGenConfig(
        vocab_size=50, n_embd=32, n_layer=2, n_head=4, rotary_dim=4, bos_token_id=0, eos_token_id=1
    )
    assert not hasattr(config, "pad_token_id")
    model = CodeGenForCausalLM(config).eval()
    model.save_pretrained(tmp_path)
    (state,) = stream_of(tmp_path).begin(SEQUENCES[:1])
    assert torch.equal(state.hidden, model.get_input_embeddings()(SEQUENCES[0][None]))
