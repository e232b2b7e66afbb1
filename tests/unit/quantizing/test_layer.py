"""What of a decoder layer runs after it was quantized."""

from types import SimpleNamespace

import torch
from torch import nn

from quantflow.quantizing.layer import install_all


def test_a_linear_that_is_not_quantized_runs_from_float32_as_in_the_proof_of_export():
    module = nn.ModuleDict({"up": nn.Linear(8, 4).to(torch.bfloat16).requires_grad_(False)})
    stored = module["up"].weight.clone()
    layer = SimpleNamespace(
        linears=["model.layers.0.up"], relative=lambda name: name.removeprefix("model.layers.0.")
    )
    install_all(module, layer, SimpleNamespace(schemes={"model.layers.0.up": None}), {})
    assert module["up"].weight.dtype == torch.float32
    assert torch.equal(module["up"].weight, stored.float())
