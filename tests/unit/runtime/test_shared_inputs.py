"""Linears of one input round it once, to the same bits; operators are counted."""

import copy
import gc

import pytest
import torch
from torch import nn

from benchmarks import layer_operators
from quantflow.backends import BACKENDS
from quantflow.core.qtensor import QTensor, QuantizedLinear
from quantflow.core.scheme import PRESETS
from quantflow.runtime.linear import QuantLinear, SharedInput, share_inputs_


@pytest.mark.parametrize(("scheme", "backend"), layer_operators.CASES)
def test_a_layer_rounds_four_inputs_in_the_place_of_seven_to_the_same_bits(scheme, backend):
    row = layer_operators.counts(scheme, backend)
    assert row["same"]
    # q, k and v share one, and so do gate and up
    assert row["before"] - row["after"] == 3 * row["rounding"] > 0
    # four roundings become one kernel each, and what pads tokens or turns scales; the reference
    # has no codes that it could take
    left = {"fp8_mm": 1, "int8_mm": 2, "fp8_block_mm": 3, "reference": row["rounding"]}[backend]
    assert row["after"] - row["by_kernel"] == 4 * (row["rounding"] - left)
    # two norms, one operator in place of eight
    assert row["by_kernel"] - row["with_norms"] == 2 * 7


def linear(scheme="FP8", *, scale=0.5, **changes) -> QuantLinear:
    scheme = PRESETS[scheme]
    weight = QTensor(
        qvalue=torch.eye(16).to(torch.float8_e4m3fn),
        scale=torch.ones(1, 1) if scheme.weights.granularity == "per_tensor" else torch.ones(16, 1),
        scheme=scheme.weights,
    )
    quantized = QuantizedLinear(
        weight=weight,
        scheme=scheme,
        input_scale=torch.tensor([scale]) if scheme.input.measured else None,
        **changes,
    )
    return QuantLinear(quantized, bias=None, backend=BACKENDS["reference"], dtype=torch.float32)


def group(**linears: nn.Module) -> nn.Module:
    module = nn.ModuleDict(linears)
    share_inputs_(module, [list(linears)])
    return module


def test_linears_that_round_alike_share_and_others_do_not():
    order = torch.arange(16).flip(0)
    module = group(
        q=linear(),
        k=linear(scale=0.25),
        v=linear(),
        per_token=linear("FP8_DYNAMIC"),
        reordered=linear(order=order),
        plain=nn.Linear(16, 4),
    )
    assert module["q"].shared is module["v"].shared is not None
    assert module["k"].shared not in (None, module["q"].shared)
    assert module["per_token"].shared not in (None, module["q"].shared, module["k"].shared)
    assert module["reordered"].shared is None
    x = torch.randn(3, 16)
    # twice the step, half as fine: what one rounds does not reach the other
    for name, step in (("q", 0.5), ("k", 0.25), ("v", 0.5)):
        expected = (x / step).to(torch.float8_e4m3fn).float() * step
        assert torch.equal(module[name](x), expected)
    assert torch.equal(module["reordered"](x), linear()(x.flip(1)))


def test_another_input_of_the_same_numbers_or_none_is_rounded_itself(monkeypatch):
    module = group(q=linear(), k=linear())
    rounded = []
    inner = module["q"]._round_input
    for name in "qk":
        monkeypatch.setattr(
            module[name],
            "_round_input",
            lambda x, prepared: rounded.append(x) or inner(x, prepared),
        )
    x, other = torch.randn(2, 16), torch.randn(2, 16)
    assert torch.equal(module["q"](x), module["k"](x))
    assert len(rounded) == 1
    assert torch.equal(module["k"](other), linear()(other))
    assert torch.equal(module["q"](x), linear()(x))
    assert len(rounded) == 3


def test_nothing_is_kept_once_the_input_is_gone():
    shared, x = SharedInput(), torch.ones(2)
    assert shared.rounded(x, lambda given, prepared: given + prepared, 1).tolist() == [2, 2]
    assert shared.rounded(x, lambda given, prepared: given + prepared, 5).tolist() == [2, 2]
    assert shared._kept is not None
    del x
    gc.collect()
    assert shared._kept is None


def test_a_copy_of_a_model_shares_inputs_of_its_own():
    module = group(q=linear(), k=linear())
    other = copy.deepcopy(module)
    assert other["q"].shared is other["k"].shared is not module["q"].shared
    x = torch.randn(1, 16)
    assert torch.equal(other["k"](x), module["q"](x))


def test_an_input_is_kept_in_inference_mode_as_well():
    module = group(q=linear("FP8_DYNAMIC"), k=linear("FP8_DYNAMIC"))
    with torch.inference_mode():
        x = torch.randn(1, 16) * 3
        assert torch.equal(module["q"](x), module["k"](x))
        assert module["q"].shared._kept[0]() is x
