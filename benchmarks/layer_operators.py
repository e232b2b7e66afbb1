"""Operators that a decoder layer runs, by how the inputs of its linears are rounded.

    python benchmarks/layer_operators.py           # the table of docs/gpu.md
    python benchmarks/layer_operators.py --json

Needs no GPU. A layer of a small Llama in bfloat16 runs one token on the CPU, over a cache, with the
linears of the backends that a GPU has, and a mode of torch counts the operators that it calls. On a
GPU each is a kernel; views, which are none, are not counted. What runs on GPUs alone, torch's
products of float8 and our kernel that rounds an input, is replaced by one operator of its values.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from quantflow.algorithms import rtn  # noqa: E402
from quantflow.backends import BACKENDS, cuda, torch_kernels  # noqa: E402
from quantflow.core import affine, qtensor  # noqa: E402
from quantflow.core.qtensor import QuantizedLinear  # noqa: E402
from quantflow.core.scheme import PRESETS, LinearScheme, TensorScheme  # noqa: E402
from quantflow.runtime.fused_gates import ACTIVATIONS, fuse_gates_  # noqa: E402
from quantflow.runtime.fused_norms import NormForm, fuse_norms_  # noqa: E402
from quantflow.runtime.fused_rope import fuse_rotary_, turned_halves  # noqa: E402
from quantflow.runtime.linear import QuantLinear, share_inputs_  # noqa: E402

# scheme, and the backend that runs it on a GPU of capability 9
CASES = (
    ("FP8", "fp8_mm"),
    ("FP8_DYNAMIC", "fp8_mm"),
    ("FP8_BLOCK", "fp8_block_mm"),
    ("W8A8", "int8_mm"),
    ("W8A8_STATIC", "int8_mm"),
    ("W4A8", "reference"),
    ("NVFP4", "reference"),
    ("MXFP4", "reference"),
)
WIDTH, INNER = 256, 512
GROUPS = (
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    ("self_attn.o_proj",),
    ("mlp.gate_proj", "mlp.up_proj"),
    ("mlp.down_proj",),
)


class Counted(TorchDispatchMode):
    """Counts operators that compute or copy.

    Attributes:
        names: the operators, in their order.
    """

    def __init__(self) -> None:
        """Nothing is counted yet."""
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator."""
        aliased = [result.alias_info for result in func._schema.returns]
        views = any(alias is not None and not alias.is_write for alias in aliased)
        if not views and "empty" not in str(func):
            self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def quantized(name: str, weight: Tensor, scheme: LinearScheme, backend: str) -> QuantLinear:
    """A linear, rounded to nearest."""
    made = rtn.quantize_group({name: weight}, scheme, statistics={}, scale_dtype=torch.float32)
    taken = scheme.input
    measured = taken is not None and taken.measured
    linear = QuantizedLinear(
        weight=made[name].weight,
        scheme=scheme,
        input_scale=torch.tensor([0.0625]) if measured else None,
        input_zero_point=torch.tensor([3], dtype=torch.int8)
        if measured and taken is not None and not taken.symmetric
        else None,
    )
    return QuantLinear(linear, bias=None, backend=BACKENDS[backend], dtype=torch.bfloat16)


def layer_of(scheme: str, backend: str) -> tuple[LlamaForCausalLM, nn.Module]:
    """A model of one layer, whose linears are quantized, and that layer."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            hidden_size=WIDTH,
            intermediate_size=INNER,
            num_hidden_layers=1,
            num_attention_heads=8,
            num_key_value_heads=4,
            vocab_size=64,
        )
    )
    model = model.to(torch.bfloat16).eval().requires_grad_(False)
    layer = model.model.layers[0]
    for name in (name for group in GROUPS for name in group):
        weight = layer.get_submodule(name).weight.float()
        layer.set_submodule(name, quantized(name, weight, PRESETS[scheme], backend))
    return model, layer


@contextmanager
def as_on_a_gpu() -> Iterator[None]:
    """Products that a CPU lacks are one operator, with its values; int8's tokens are padded."""

    def of_scaled(
        codes: Tensor, weight: Tensor, scale: Tensor, other: Tensor, **options: Any
    ) -> Tensor:
        with _disable_current_modes():
            product = (codes.float() * scale) @ (weight.float() * other)
        return product.to(options["out_dtype"])

    def of_blocks(
        codes: Tensor, weight: Tensor, scale: Tensor, _: Any, other: Tensor, __: Any, **options: Any
    ) -> Tensor:
        with _disable_current_modes():
            rows = codes.float() * scale.repeat_interleave(128, dim=1)
            blocks = other[: weight.shape[0] // 128].repeat_interleave(128, dim=0)
            product = rows @ (weight.float() * blocks.repeat_interleave(128, dim=1))
        return product.to(options["output_dtype"])

    with (
        mock.patch.object(torch, "_scaled_mm", of_scaled),
        mock.patch.object(functional, "scaled_mm", of_blocks),
        mock.patch.object(torch_kernels, "on_gpu", lambda _: True),
    ):
        yield


@contextmanager
def rounded_by_the_kernel() -> Iterator[None]:
    """An input is rounded by one operator, with the values of several."""

    def rounded(
        x: Tensor, scheme: TensorScheme, scale: Tensor | None = None, zero: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        with _disable_current_modes():
            scale = affine.scale_per_token(x, scheme) if scale is None else scale
            codes = affine.quantize(x, scale, zero, scheme)
        return codes.clone(), scale

    with (
        mock.patch.object(qtensor, "quantize_input", rounded),
        mock.patch.object(cuda, "quantize_input", rounded),
    ):
        yield


def norm_by_the_kernel(
    x: Tensor, weight: Tensor, *, eps: float, offset: float, early: bool
) -> Tensor:
    """A norm by one operator, with the values of several."""
    with _disable_current_modes():
        made = NormForm(offset=offset, early=early).compute(x, weight, eps=eps)
    return made.clone()


def rotary_by_the_kernel(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Queries and keys turned by one operator, with the values of several."""
    with _disable_current_modes():
        turned_q, turned_k = turned_halves(q, k, cos, sin)
    return turned_q.clone(), turned_k


def gate_by_the_kernel(gate: Tensor, up: Tensor, *, activation: str) -> Tensor:
    """The gate of an MLP by one operator, with the values of two."""
    with _disable_current_modes():
        made = ACTIVATIONS[activation](gate) * up
    return made.clone()


@torch.no_grad()
def run(model: LlamaForCausalLM, layer: nn.Module, x: Tensor) -> tuple[Tensor, list[str]]:
    """The output of a layer for a token behind four others, and the operators that it called."""
    cache = DynamicCache(config=model.config)
    places = torch.arange(5)[None]
    cos, sin = model.model.rotary_emb(x, position_ids=places)
    with as_on_a_gpu():
        layer(x[:, :4], past_key_values=cache, position_embeddings=(cos[:, :4], sin[:, :4]))
        token, turned = x[:, 4:].contiguous(), (cos[:, 4:], sin[:, 4:])
        with Counted() as counted:
            output = layer(token, past_key_values=cache, position_embeddings=turned)
    return output, counted.names


def counts(scheme: str, backend: str) -> dict[str, Any]:
    """The operators of a layer: each linear rounds, one for all, and that one by a kernel.

    `rounding` is how many of them round one input; `same` says whether the outputs are equal.
    """
    model, layer = layer_of(scheme, backend)
    x = torch.randn(1, 5, WIDTH, generator=torch.Generator().manual_seed(1)).bfloat16()
    apart, before = run(model, layer, x)
    share_inputs_(layer, GROUPS)
    together, after = run(model, layer, x)
    with rounded_by_the_kernel():
        fused, by_kernel = run(model, layer, x)
        fuse_norms_(layer, rms_norm=norm_by_the_kernel)
        normed, with_norms = run(model, layer, x)
        fuse_rotary_(layer, rotary=rotary_by_the_kernel)
        fuse_gates_(layer, gated=gate_by_the_kernel)
        turned, with_all = run(model, layer, x)
    linear = layer.get_submodule(GROUPS[0][0])
    with torch.no_grad(), as_on_a_gpu(), Counted() as counted:
        BACKENDS[backend].round_input(x[:, :1], linear._prepared)  # type: ignore[misc]
    return {
        "scheme": scheme,
        "backend": backend,
        "before": len(before),
        "after": len(after),
        "by_kernel": len(by_kernel),
        "with_norms": len(with_norms),
        "with_all": len(with_all),
        "rounding": len(counted.names),
        "same": all(torch.equal(apart, other) for other in (together, fused, normed, turned)),
    }


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", action="store_true")
    rows = [counts(*case) for case in CASES]
    if parser.parse_args().json:
        print(json.dumps(rows))
        return 0
    print(
        "| scheme | product | one rounding by torch | layer, each linear rounds | layer, once for "
        "all | layer, once by our kernel | and norms by our kernel | and rotation and gate |"
    )
    print("|---|---|---:|---:|---:|---:|---:|---:|")
    for row in rows:
        print(
            "| {scheme} | {backend} | {rounding} | {before} | {after} | {by_kernel} | "
            "{with_norms} | {with_all} |".format(**row)
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
