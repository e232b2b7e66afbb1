"""Inputs that are mixed on the way: the hook comes with the weights of a layer, goes with them, and keeps its function."""

from types import MappingProxyType

import torch

from quantflow.models.capture import LayerStream
from quantflow.models.load import open_source
from quantflow.models.open import graph_for
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
