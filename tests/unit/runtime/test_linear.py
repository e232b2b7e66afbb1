import copy
from dataclasses import replace

import pytest
import torch
from compressed_tensors.transform.utils.hadamard import deterministic_hadamard_matrix

from quantflow.algorithms.rtn import quantize_group
from quantflow.backends import BACKENDS, choose
from quantflow.backends.backend import Case
from quantflow.core.qtensor import QTensor, QuantizedLinear
from quantflow.core.scheme import PRESETS, with_group_size
from quantflow.errors import SchemeError
from quantflow.runtime.linear import QuantLinear


def linear() -> QuantizedLinear:
    scheme = PRESETS["W8A16"]
    qvalue = torch.arange(-24, 24, dtype=torch.int8).reshape(3, 16)
    weight = QTensor(
        qvalue=qvalue, scale=torch.tensor([[0.5], [1.0], [2.0]]), scheme=scheme.weights
    )
    return QuantizedLinear(weight=weight, scheme=scheme)


def test_an_input_that_selects_a_column_returns_that_column_of_the_weight_plus_the_bias():
    x = torch.zeros(2, 1, 16)
    x[:, :, 15] = 1
    for name in ("reference", "int8_pack"):
        module = QuantLinear(
            linear(),
            bias=torch.tensor([1.0, 2.0, 3.0]),
            backend=BACKENDS[name],
            dtype=torch.float32,
        )
        # Column 15 holds -9, 7 and 23, times 0.5, 1 and 2.
        assert module(x).tolist() == [[[-3.5, 9.0, 49.0]]] * 2


def test_it_has_no_parameters_and_no_state_and_its_copy_computes_the_same():
    module = QuantLinear(
        linear(), bias=torch.ones(3), backend=BACKENDS["int8_pack"], dtype=torch.bfloat16
    )
    assert list(module.parameters()) == []
    assert module.state_dict() == {}
    x = torch.ones(1, 16, dtype=torch.bfloat16)
    assert torch.equal(copy.deepcopy(module)(x), module(x))
    assert module(x).dtype == torch.bfloat16
    assert repr(module) == "QuantLinear(in_features=16, out_features=3, backend=int8_pack)"


@pytest.mark.parametrize(
    "name", ["W8A16", "W8A8", "W8A8_STATIC", "FP8", "FP8_DYNAMIC", "W4A16", "W4A8"]
)
@pytest.mark.parametrize("backend", ["reference", "auto"])
def test_inputs_are_mixed_before_anything_else_happens_to_them(name, backend):
    """What is mixed by the matrix of compressed-tensors, given to the linear that mixes nothing."""
    plain = (
        PRESETS[name]
        if PRESETS[name].weights.group_size is None
        else with_group_size(PRESETS[name], 32)
    )
    weight = torch.randn(16, 64, generator=torch.Generator().manual_seed(0))
    qtensor = quantize_group({"q": weight}, plain, statistics={}, scale_dtype=torch.float32)[
        "q"
    ].weight
    static = plain.input is not None and not plain.input.dynamic
    given = {
        "weight": qtensor,
        "input_scale": torch.tensor([0.03]) if static else None,
        "input_zero_point": torch.tensor([3], dtype=torch.int8)
        if static and not plain.input.symmetric
        else None,
    }
    case = Case(scheme=plain, device=torch.device("cpu"), shape=(16, 64), dtype=torch.float32)
    chosen = choose(case, backend=backend)[0]
    modules = [
        QuantLinear(
            QuantizedLinear(scheme=scheme, **given), bias=None, backend=chosen, dtype=torch.float32
        )
        for scheme in (plain, replace(plain, rotation=32))
    ]
    x = torch.randint(-8, 9, (2, 3, 64), generator=torch.Generator().manual_seed(1)).float()
    matrix = deterministic_hadamard_matrix(32, dtype=torch.float32)
    mixed = (x.unflatten(-1, (2, 32)) @ matrix).flatten(-2) * 32**-0.5  # sums of integers are exact
    assert torch.equal(modules[1](x), modules[0](mixed))
    assert not torch.equal(modules[1](x), modules[0](x))


@pytest.mark.parametrize("rotation", [0, 1, 3, 12, -4])
def test_a_rotation_of_no_power_of_two_is_refused(rotation):
    with pytest.raises(SchemeError, match=f"W8A16: rotation={rotation}; mix 2, 4, 8"):
        replace(PRESETS["W8A16"], rotation=rotation)
