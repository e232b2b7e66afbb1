"""llama.cpp's types under the algorithms: their weights fit into blocks, and feedback pays."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize

from quantflow.algorithms import gptq, hqq, rtn, rtn_mse, signround, tune, yaqa
from quantflow.algorithms.yaqa.points import nearest_
from quantflow.core.block_types import BLOCK_TYPES
from quantflow.core.qtensor import QTensor
from quantflow.core.scheme import preset
from quantflow.formats.llama_cpp.encoding import encode

TYPES = ("Q4_0", "Q4_1", "IQ4_NL", "IQ4_XS", "TQ2_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")
CODEBOOKS = ("IQ3_S", "IQ3_XXS", "IQ2_S", "IQ2_XS", "IQ2_XXS")
INPUTS, OUTPUTS = 256, 24


def problem() -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], torch.Tensor]:
    """A weight, its statistics, and inputs of which neighbours go together."""
    generator = torch.Generator().manual_seed(7)
    weight = torch.randn(OUTPUTS, INPUTS, generator=generator) * 0.05
    inputs = torch.randn(400, INPUTS, generator=generator) @ torch.randn(
        INPUTS, INPUTS, generator=generator
    )
    gradients = torch.randn(400, OUTPUTS, generator=generator) @ torch.randn(
        OUTPUTS, OUTPUTS, generator=generator
    )
    statistics = {
        "hessian_sum": inputs.T @ inputs,
        "count": torch.tensor(400.0),
        "w|gradient_sum": gradients.T @ gradients,
    }
    return {"w": weight}, statistics, inputs


def made(algorithm, name: str) -> tuple[QTensor, float]:
    """An algorithm's result for the weight, and the relative squared error of its output."""
    weights, statistics, inputs = problem()
    dtype = BLOCK_TYPES[name].scale_dtype
    result = algorithm.quantize_group(
        weights, preset(name), statistics=statistics, scale_dtype=dtype
    )["w"].weight
    exact = inputs @ weights["w"].T
    return result, float(
        (inputs @ result.dequantize().T - exact).square().sum() / exact.square().sum()
    )


def in_blocks(weight: QTensor) -> np.ndarray:
    return dequantize(encode("w", weight).numpy(), GGMLQuantizationType[weight.scheme.block_type])


@pytest.mark.parametrize("name", [*TYPES, *CODEBOOKS])
def test_feedback_on_a_types_grid_makes_the_outputs_error_smaller(name):
    errors = {algorithm.NAME: made(algorithm, name)[1] for algorithm in (rtn, rtn_mse, gptq)}
    assert errors["gptq"] < 0.7 * min(errors["rtn"], errors["rtn_mse"]), errors


@pytest.mark.parametrize(
    ("algorithm", "name"),
    [
        *itertools.product((rtn, gptq, yaqa), TYPES),
        *itertools.product((rtn, rtn_mse, gptq, yaqa), CODEBOOKS),
    ],
    ids=lambda part: getattr(part, "NAME", part),
)
def test_what_an_algorithm_makes_is_what_blocks_hold(algorithm, name):
    weight, _ = made(algorithm, name)
    assert np.array_equal(in_blocks(weight), weight.dequantize().numpy())


def test_steps_of_yaqa_end_on_points_of_iq4_nl():
    points = np.array(
        [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], dtype=np.float32
    )
    values = np.linspace(-140, 130, 1999, dtype=np.float32)
    found = values.copy()
    nearest_(found, preset("IQ4_NL").weights)
    assert np.isin(found, points).all()
    assert np.array_equal(np.abs(found - values), np.abs(points[:, None] - values).min(axis=0))


@pytest.mark.parametrize("name", [*TYPES, *CODEBOOKS])
def test_tuned_scales_are_such_as_blocks_hold(name):
    start, _ = made(rtn_mse, name)
    tuned, dtype = tune.begin("w", start), BLOCK_TYPES[name].scale_dtype
    same = tune.made(start, tuned, scale_dtype=dtype)
    assert torch.equal(same.dequantize(), start.dequantize())
    moved = replace(tuned, u=torch.full_like(tuned.u, 0.1))
    weight = tune.made(start, moved, scale_dtype=dtype)
    assert np.array_equal(in_blocks(weight), weight.dequantize().numpy())
    ratio = float(weight.dequantize().norm() / start.dequantize().norm())
    assert ratio == pytest.approx(np.exp(0.1), rel=0.01)  # scales grow, and minima with them


@pytest.mark.parametrize("method", [hqq, signround], ids=lambda method: method.NAME)
def test_methods_that_take_scales_one_by_one_refuse_those_of_a_block(method):
    for name in ("Q4_1", "IQ4_NL", "IQ4_XS", "Q3_K", "Q4_K", "IQ3_S"):
        assert method.SUPPORTS.scheme(preset(name)) is not None
    assert method.SUPPORTS.scheme(preset("Q4_0")) is None


@pytest.mark.parametrize("name", CODEBOOKS)
def test_moves_of_entries_make_the_models_error_smaller_than_gptqs(name):
    weights, statistics, _ = problem()
    outputs, inputs = statistics["w|gradient_sum"], statistics["hessian_sum"]

    def loss(algorithm) -> float:
        errors = weights["w"] - made(algorithm, name)[0].dequantize()
        return float((outputs @ errors @ inputs @ errors.T).trace())

    assert loss(yaqa) < 0.7 * loss(gptq)
