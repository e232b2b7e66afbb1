"""A decoder layer with other weights: bits and gradients of a model that has them."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from quantflow.models.capture import LayerStream
from quantflow.models.load import open_source
from quantflow.models.open import graph_for
from quantflow.models.trained_layer import running

SEQUENCES = [torch.tensor([0, 5, 9, 2, 22, 7]), torch.tensor([3, 1, 4])]


def opened(folder):
    source = open_source(folder)
    return LayerStream(source, graph_for(source.config))


@pytest.mark.parametrize("name", ["llama", "gpt_neox"])
@pytest.mark.parametrize("as_stored", [True, False])
def test_outputs_and_gradients_are_those_of_the_layer_with_these_weights(
    family_model, name, as_stored
):
    model = AutoModelForCausalLM.from_pretrained(family_model(name), dtype=torch.float32)
    stream = opened(family_model(name))
    layer, states = stream.graph.layers[0], stream.begin(SEQUENCES)
    generator = torch.Generator().manual_seed(1)
    chosen = layer.linears[1:]  # the first keeps its own
    with stream.layer(0, as_stored=as_stored) as module:
        own = {
            linear: module.get_submodule(layer.relative(linear)).weight for linear in layer.linears
        }
        weights = {
            linear: (torch.randn(own[linear].shape, generator=generator) * 0.1).requires_grad_()
            for linear in chosen
        }
        with running(stream, module, layer, states, weights) as run:
            outputs = [run(number) for number in range(2)]
            gradients = torch.autograd.grad(outputs[1].square().sum(), list(weights.values()))
        for linear, weight in own.items():
            found = module.get_submodule(layer.relative(linear))
            assert found.weight is weight and found._parameters["weight"] is weight
    theirs = dict(model.named_parameters())
    for linear, weight in weights.items():
        theirs[f"{linear}.weight"].data.copy_(weight.detach())
    seen = []
    model.get_submodule(layer.prefix).register_forward_hook(
        lambda _module, _args, output: seen.append(output)
    )
    for sequence, output in zip(SEQUENCES, outputs, strict=True):
        model(sequence[None])
        torch.testing.assert_close(output, seen.pop(), rtol=1e-5, atol=1e-5)
    model(SEQUENCES[1][None])
    parameters = [theirs[f"{linear}.weight"] for linear in weights]
    for found, expected in zip(
        gradients, torch.autograd.grad(seen.pop().square().sum(), parameters), strict=True
    ):
        torch.testing.assert_close(
            found, expected, rtol=1e-3, atol=1e-4 * float(expected.abs().max())
        )


def test_the_layer_gets_its_weights_back_after_an_error(llama):
    stream = opened(llama)
    layer, states = stream.graph.layers[0], stream.begin(SEQUENCES)
    with stream.layer(0) as module:
        own = [parameter for _, parameter in sorted(module.named_parameters())]
        weights = {name: torch.zeros(3, 3) for name in layer.linears}
        with pytest.raises(RuntimeError), running(stream, module, layer, states, weights) as run:
            run(0)
        assert [parameter for _, parameter in sorted(module.named_parameters())] == own
