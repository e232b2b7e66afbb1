"""Gradients layer by layer are the whole model's, and their squares predict the KL divergence."""

import copy
from dataclasses import replace

import pytest
import torch
from torch.nn import functional
from transformers import (
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from quantflow.core.parallel import Workers
from quantflow.measuring.backward import backward, generator_for, sampled_gradient
from quantflow.models import stand_ins
from quantflow.models.capture import LayerStream
from quantflow.models.hidden import HiddenStates
from quantflow.models.load import open_source
from quantflow.models.open import graph_for

SHAPE = {
    "vocab_size": 23,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "max_position_embeddings": 32,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "initializer_range": 0.3,
}
MODELS = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE, num_key_value_heads=1)),
    "qwen3 tied": lambda: Qwen3ForCausalLM(
        Qwen3Config(**SHAPE, num_key_value_heads=1, head_dim=8, tie_word_embeddings=True)
    ),
    "gpt_neox": lambda: GPTNeoXForCausalLM(GPTNeoXConfig(**SHAPE)),
}
SEQUENCES = [torch.tensor([0, 5, 9, 2, 22, 7]), torch.tensor([3, 1, 4])]


def opened(folder, name="llama"):
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    model.save_pretrained(folder)
    return model, LayerStream(open_source(folder), graph_for(model.config))


def layer_inputs(stream, sequences):
    """Every layer's input and the last one's output, [layer][sequence], with their states."""
    states = stream.begin(sequences)
    inputs = [[state.hidden.clone() for state in states]]
    for layer in stream.graph.layers:
        with stream.layer(layer.index) as module:
            stream.advance(module, states)
        inputs.append([state.hidden.clone() for state in states])
    return states, inputs


def entering(state, hidden):
    store = HiddenStates(1)
    store.put(0, hidden)
    return replace(state, store=store, index=0)


def streamed(stream, sequences, *, workers=None):
    """(sequence, linear) -> (x, g), and (sequence, layer) -> the gradient by the input."""
    states, inputs = layer_inputs(stream, sequences)
    found, by_layer = {}, {}
    with stream.head():
        gradients = [
            sampled_gradient(stream, x, generator=generator_for(7, i))
            for i, x in enumerate(inputs[-1])
        ]
    for layer in reversed(stream.graph.layers):
        with stream.layer(layer.index) as module, backward(stream, module, layer) as through:

            def one(index, layer=layer, through=through, gradients=gradients):
                def observe(name, x, g):
                    found[index, name] = x.clone(), g.clone()

                return through(
                    entering(states[index], inputs[layer.index][index]), gradients[index], observe
                )

            gradients = (workers or Workers(1)).map(one, range(len(sequences)))
        by_layer |= {(index, layer.index): gradient for index, gradient in enumerate(gradients)}
    return found, by_layer


def whole(model, sequence, index, names):
    """The same by autograd through the whole model, with the labels that the seed draws."""
    model = copy.deepcopy(model).requires_grad_(False)
    seen = {}
    for name in names:
        model.get_submodule(name).register_forward_hook(
            lambda _m, args, y, name=name: seen.update({name: (args[0], y)}) or y.retain_grad()
        )
    embedded = model.get_input_embeddings()(sequence[None]).requires_grad_()
    logits = model(inputs_embeds=embedded, use_cache=False).logits[0]
    # fewer than 64
    labels = torch.multinomial(logits.detach().softmax(-1), 1, generator=generator_for(7, index))[
        :, 0
    ]
    functional.cross_entropy(logits, labels, reduction="sum").backward()
    return {name: (x, y.grad) for name, (x, y) in seen.items()}, embedded.grad


@pytest.mark.parametrize("name", MODELS)
def test_gradients_of_every_linear_are_those_of_the_whole_model(name, tmp_path):
    model, stream = opened(tmp_path, name)
    found, by_layer = streamed(stream, SEQUENCES)
    for index, sequence in enumerate(SEQUENCES):
        expected, embedded = whole(model, sequence, index, stream.graph.linears)
        torch.testing.assert_close(by_layer[index, 0], embedded, rtol=1e-4, atol=1e-6)
        for linear, (x, g) in expected.items():
            torch.testing.assert_close(found[index, linear][0], x, rtol=1e-4, atol=1e-6)
            torch.testing.assert_close(found[index, linear][1], g, rtol=1e-4, atol=1e-6)


def test_two_threads_find_the_same_bits_as_one(tmp_path):
    _, stream = opened(tmp_path)
    sequences = SEQUENCES * 4
    torch.set_num_threads(1)
    alone, _ = streamed(stream, sequences)
    with Workers(2) as workers:
        together, _ = streamed(stream, sequences, workers=workers)
    assert alone.keys() == together.keys()
    for key, (x, g) in alone.items():
        assert torch.equal(x, together[key][0]) and torch.equal(g, together[key][1]), key


def test_nothing_is_left_in_the_model_after_a_layer(tmp_path):
    _, stream = opened(tmp_path)
    streamed(stream, SEQUENCES)
    assert all(parameter.is_meta for parameter in stream.model.parameters())
    assert not any(module._forward_hooks for module in stream.model.modules())


def test_the_gradient_at_the_head_is_that_of_one_label_per_position(tmp_path):
    model, stream = opened(tmp_path)
    hidden = torch.randn(1, 5, 16, generator=torch.Generator().manual_seed(1))
    gradient = sampled_gradient(stream, hidden, generator=generator_for(0, 0))
    leaf = hidden.clone().requires_grad_()
    logits = model.lm_head(model.model.norm(leaf))[0]
    # each row is the gradient of -log p(y) for one y, written out for all 23
    for position in range(5):
        of_labels = [
            torch.autograd.grad(-logits[position].log_softmax(-1)[y], leaf, retain_graph=True)[0][
                0, position
            ]
            for y in range(23)
        ]
        nearest = min(float((gradient[0, position] - one).abs().max()) for one in of_labels)
        assert nearest < 1e-5


def test_in_parts_the_head_gives_the_gradient_of_the_whole_sequence_with_the_same_labels(
    tmp_path, monkeypatch
):
    _, stream = opened(tmp_path)
    hidden = torch.randn(1, 150, 16, generator=torch.Generator().manual_seed(1))
    whole = sampled_gradient(stream, hidden, generator=generator_for(0, 0))
    monkeypatch.setattr(stand_ins, "LOGITS", 1)
    assert [part.stop - part.start for part in stream.parts(150)] == [64, 64, 22]
    parts = sampled_gradient(stream, hidden, generator=generator_for(0, 0))
    assert torch.allclose(parts, whole, atol=1e-6)
    assert (whole.abs().amax(-1) > 0.1).all()  # another label would be another gradient


def test_labels_belong_to_the_seed_and_the_number_of_the_sequence():
    drawn = {
        (seed, index): torch.rand(4, generator=generator_for(seed, index))
        for seed in (0, 1, -1)
        for index in (0, 1)
    }
    assert len({tuple(values.tolist()) for values in drawn.values()}) == 6
    assert torch.equal(drawn[1, 0], torch.rand(4, generator=generator_for(1, 0)))


@pytest.mark.slow
def test_half_the_squared_gradient_predicts_the_divergence_that_a_small_change_of_a_weight_makes(
    tmp_path,
):
    """With labels that the model draws, the mean of <g, dy>^2 / 2 is the KL divergence itself."""
    model, stream = opened(tmp_path)
    sequence = SEQUENCES[0]
    linear = "model.layers.1.mlp.down_proj"
    change = 0.01 * torch.randn(16, 24, generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        log_p = model(sequence[None]).logits[0].log_softmax(-1)
        changed = copy.deepcopy(model)
        changed.get_submodule(linear).weight += change
        log_q = changed(sequence[None]).logits[0].log_softmax(-1)
        divergence = float((log_p.exp() * (log_p - log_q)).sum())
    states, inputs = layer_inputs(stream, [sequence])
    squares, draws = 0.0, 600
    layers = stream.graph.layers
    with (
        stream.head(),
        stream.layer(2) as last,
        stream.layer(1) as middle,
        backward(stream, last, layers[2]) as upper,
        backward(stream, middle, layers[1]) as lower,
    ):
        for draw in range(draws):
            seen = {}
            gradient = sampled_gradient(stream, inputs[3][0], generator=generator_for(draw, 0))
            gradient = upper(entering(states[0], inputs[2][0]), gradient, lambda name, x, g: None)
            lower(
                entering(states[0], inputs[1][0]),
                gradient,
                lambda name, x, g, seen=seen: seen.update({name: (x, g)}),
            )
            x, g = seen[linear]
            squares += float((g * (x @ change.T)).sum()) ** 2
    assert squares / draws / 2 == pytest.approx(divergence, rel=0.15)
