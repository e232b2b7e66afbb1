"""AutoRound itself: its rounded weights and gradients are ours, and its optimizer's steps.

It lives in an environment of its own, whose folder AUTOROUND_ENV names (a virtual environment with
auto-round 0.16.1); without it this is skipped.
"""

import os
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from quantflow.algorithms import rtn
from quantflow.algorithms.signround.learned import Learned
from quantflow.core.scheme import LinearScheme, TensorScheme

VARIABLE, RELEASE = "AUTOROUND_ENV", "0.16.1"
pytestmark = pytest.mark.skipif(
    not os.environ.get(VARIABLE), reason=f"{VARIABLE} names no environment with auto-round"
)
ITERATIONS = 16  # steps are multiples of powers of two, so that both know what lies half way

# Runs in the other environment: a linear, whose rounding is learned by its own functions.
THEIRS = """
import sys
import torch
from importlib.metadata import version
from auto_round.data_type.int import quant_tensor_asym, quant_tensor_sym
from auto_round.algorithms.quantization.sign_round.sign_sgd import SignSGD
from safetensors.torch import load_file, save_file

torch.set_num_threads(1)
assert version("auto-round") == sys.argv[3]
given = load_file(sys.argv[1])
weight, scale, low, high, x = (given[name] for name in ("weight", "scale", "low", "high", "x"))
size, iterations = weight.shape[1] // scale.shape[1], int(sys.argv[4])
offset = torch.zeros(weight.numel() // size, size, requires_grad=True)
top, bottom = (torch.ones(scale.numel(), requires_grad=True) for _ in range(2))
about = {"bits": 4, "group_size": size, "scale_dtype": torch.float32}


def rounded():
    if "zero_point" in given:
        bounds = {"tensor_min": low.flatten(), "tensor_max": high.flatten()}
        return quant_tensor_asym(
            weight, v=offset, min_scale=bottom, max_scale=top, **bounds, **about
        )
    return quant_tensor_sym(
        weight, v=offset, max_scale=top, init_scale=scale.reshape(-1, 1), **about
    )


optimizer = SignSGD([offset, top, bottom], lr=1 / iterations, weight_decay=0)
schedule = torch.optim.lr_scheduler.LinearLR(
    optimizer, start_factor=1.0, end_factor=0.0, total_iters=iterations
)
found = {}
for step in range(iterations):
    made = rounded()[0]
    loss = ((x @ made.T - x @ weight.T) ** 2).sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    schedule.step()
    with torch.no_grad():
        offset.clamp_(-0.5, 0.5), top.clamp_(0, 1), bottom.clamp_(0, 1)
    if step == 0:
        found["first"] = made.detach().clone()
found["last"], found["scale"] = rounded()[0].detach(), rounded()[1].detach().reshape(scale.shape)
found |= {"offset": offset.detach(), "top": top.detach(), "bottom": bottom.detach()}
save_file({name: tensor.contiguous() for name, tensor in found.items()}, sys.argv[2])
"""


@pytest.mark.parametrize("symmetric", [True, False])
def test_sixteen_steps_of_the_package_end_at_the_same_weight(symmetric, tmp_path):
    generator = torch.Generator().manual_seed(3)
    scheme = TensorScheme(
        kind="int", num_bits=4, granularity="per_group", group_size=32, symmetric=symmetric
    )
    weight = torch.randn(24, 64, generator=generator)
    x = torch.randn(100, 64, generator=generator) @ torch.randn(64, 64, generator=generator) / 8
    linear = LinearScheme(name="test", weights=scheme, input=None, layout="pack-quantized")
    start = rtn.quantize_group({"w": weight}, linear, statistics={}, scale_dtype=torch.float32)[
        "w"
    ].weight
    given = {"weight": weight, "scale": start.scale, "x": x}
    zero = torch.zeros_like(start.scale) if start.zero_point is None else start.zero_point.float()
    given |= {"low": start.scale * (scheme.qmin - zero), "high": start.scale * (scheme.qmax - zero)}
    given |= {} if start.zero_point is None else {"zero_point": start.zero_point}
    save_file(given, tmp_path / "given.safetensors")
    python = Path(os.environ[VARIABLE]) / "bin" / "python"
    command = [
        python,
        "-c",
        THEIRS,
        tmp_path / "given.safetensors",
        tmp_path / "found.safetensors",
        RELEASE,
        ITERATIONS,
    ]
    subprocess.run(
        [str(word) for word in command], check=True, cwd=tmp_path, env={"PATH": os.environ["PATH"]}
    )
    theirs = load_file(tmp_path / "found.safetensors")

    learned, rows = Learned.of("w", weight, start, scale_dtype=torch.float32), slice(0, 24)
    first = learned.real(rows, *learned.learned(rows))
    torch.testing.assert_close(first, theirs["first"], rtol=1e-6, atol=1e-7)
    for step in range(ITERATIONS):
        made = learned.real(rows, *learned.learned(rows)).requires_grad_()
        (gradient,) = torch.autograd.grad(((x @ made.T - x @ weight.T) ** 2).sum(), made)
        learned.step_(rows, gradient, rate=(1 - step / ITERATIONS) / ITERATIONS)
    assert (learned.offset.flatten() == theirs["offset"].flatten()).float().mean() > 0.995
    assert (learned.high.flatten() == theirs["top"]).float().mean() > 0.95
    last = learned.real(rows, *learned.learned(rows))
    assert torch.isclose(last, theirs["last"], rtol=1e-5, atol=1e-6).float().mean() > 0.95
