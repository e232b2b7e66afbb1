import copy

import torch

from quantflow.backends import BACKENDS
from quantflow.core.qtensor import QTensor, QuantizedLinear
from quantflow.core.scheme import PRESETS
from quantflow.runtime.linear import QuantLinear


def linear() -> QuantizedLinear:
    scheme = PRESETS["W8A16"]
    qvalue = torch.arange(-24, 24, dtype=torch.int8).reshape(3, 16)
    weight = QTensor(qvalue=qvalue, scale=torch.tensor([[0.5], [1.0], [2.0]]), scheme=scheme.weights)
    return QuantizedLinear(weight=weight, scheme=scheme)


def test_an_input_that_selects_a_column_returns_that_column_of_the_weight_plus_the_bias():
    x = torch.zeros(2, 1, 16)
    x[:, :, 15] = 1
    for name in ("reference", "int8_pack"):
        module = QuantLinear(linear(), bias=torch.tensor([1.0, 2.0, 3.0]), backend=BACKENDS[name], dtype=torch.float32)
        # Column 15 holds -9, 7 and 23, times 0.5, 1 and 2.
        assert module(x).tolist() == [[[-3.5, 9.0, 49.0]]] * 2


def test_it_has_no_parameters_and_no_state_and_its_copy_computes_the_same():
    module = QuantLinear(linear(), bias=torch.ones(3), backend=BACKENDS["int8_pack"], dtype=torch.bfloat16)
    assert list(module.parameters()) == []
    assert module.state_dict() == {}
    x = torch.ones(1, 16, dtype=torch.bfloat16)
    assert torch.equal(copy.deepcopy(module)(x), module(x))
    assert module(x).dtype == torch.bfloat16
    assert repr(module) == "QuantLinear(in_features=16, out_features=3, backend=int8_pack)"
