"""A rotated model: its hooks come and go with the weights, and its gradients are known."""

from types import MappingProxyType, SimpleNamespace

import pytest
import torch

from quantflow.core.device import HOST
from quantflow.measuring.backward import backward
from quantflow.models.capture import LayerStream
from quantflow.models.load import open_source
from quantflow.models.open import graph_for
from quantflow.quantizing.layer import _gradient
from quantflow.quantizing.open_layer import LayerMeasurement
from quantflow.quantizing.rotated import Rotated
from quantflow.transforms import hadamard

DOWN = "model.layers.0.mlp.down_proj"


def test_a_layer_has_the_hook_while_it_has_its_weights_and_computes_the_same(family_model):
    source = open_source(family_model("llama"))
    graph = graph_for(source.config)
    rotations = hadamard.solve(hidden=64, head_dim=16, options=hadamard.OPTIONS)
    outputs, weights = [], []
    for blocks in (MappingProxyType({}), MappingProxyType({DOWN: 128})):
        stream = LayerStream(
            Rotated(source, graph, rotations, quantized=graph.linears, blocks=blocks), graph
        )
        (state,) = stream.begin([torch.arange(2, 50)])
        for _ in range(2):  # the same module twice: one hook, not two
            with stream.layer(0) as module:
                down = module.get_submodule("mlp.down_proj")
                assert len(down._forward_pre_hooks) == len(blocks)
                outputs.append(stream.run(module, state))
                weights.append(down.weight.detach().clone())
            assert not down._forward_pre_hooks
    assert not torch.allclose(weights[0], weights[2], atol=0.01)
    assert torch.equal(outputs[2], outputs[3])
    torch.testing.assert_close(outputs[2], outputs[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("family", "heads"), [("llama", True), ("llama", False), ("qwen2_moe", True)]
)
def test_gradient_sums_are_those_of_the_rotated_models_outputs(family_model, family, heads):
    """Judged by autograd through both models, from the same gradient behind the last layer."""
    source = open_source(family_model(family))
    graph = graph_for(source.config)
    rotations = hadamard.solve(hidden=64, head_dim=16, options={**hadamard.OPTIONS, "heads": heads})
    turned = Rotated(source, graph, rotations, quantized=graph.linears).in_float32()
    leaving = torch.randn(1, 48, 64, generator=torch.Generator().manual_seed(0))

    def sums(weights, gradient):
        found = {}
        stream = LayerStream(weights, graph)
        (state,) = stream.begin([torch.arange(2, 50)])
        layer = graph.layers[0]
        with stream.layer(0) as module, backward(stream, module, layer) as through:
            through(state, gradient, lambda name, _, g: found.update({name: g.flatten(0, -2)}))
        found = {name: gradients.T @ gradients for name, gradients in found.items()}
        return found

    original = sums(source, leaving)
    expected = sums(turned, hadamard.residual(leaving, rotations.residual))
    changed = set()
    for name, value in original.items():
        got = turned.gradient_sum(name, value)
        # the rotated embedding is rounded to the source's dtype
        assert (got - expected[name]).norm() < 0.01 * expected[name].norm(), name
        if (got - value).norm() > 0.3 * value.norm():
            changed.add(name.rpartition(".")[2])
    assert changed == {"o_proj", "down_proj"} | ({"v_proj"} if heads else set())


def test_an_algorithm_reads_the_gradients_of_the_rotated_model(family_model):
    source = open_source(family_model("llama"))
    graph = graph_for(source.config)
    rotations = hadamard.solve(hidden=64, head_dim=16, options=hadamard.OPTIONS)
    turned = Rotated(source, graph, rotations, quantized=graph.linears)
    gradients = torch.randn(100, 64, generator=torch.Generator().manual_seed(0))
    measured = LayerMeasurement(gradient=lambda _: gradients.T @ gradients)
    divisors = torch.full((64,), 2.0)
    found = _gradient(
        SimpleNamespace(source=turned, device=HOST), measured, {f"{DOWN}|divisors": divisors}, DOWN
    )
    expected = 2 * hadamard.residual(gradients, rotations.residual)
    torch.testing.assert_close(found, expected.T @ expected, rtol=1e-4, atol=1e-3)
