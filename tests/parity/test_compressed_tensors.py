"""Our artifact in other people's hands: compressed-tensors' own compressors and stock transformers.

A tiny Llama of each preset is written with `encode` and `quantization_config` and loaded with
`AutoModelForCausalLM.from_pretrained`. In float32 its logits are bit-equal to those of a model that
has our dequantized weights and our fake-quantized inputs, for every preset but those with packed
zero points (W4A16_ASYM, W3A16_ASYM, W2A16_ASYM), which compressed-tensors 0.20 does not load.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from compressed_tensors.compressors.base import BaseCompressor
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from compressed_tensors.quantization import (
    QuantizationConfig,
    QuantizationStatus,
    apply_quantization_config,
)
from compressed_tensors.quantization.lifecycle.forward import fake_quantize, forward_quantize
from compressed_tensors.quantization.quant_scheme import PRESET_SCHEMES
from compressed_tensors.quantization.utils import calculate_qparams
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    CompressedTensorsConfig,
    DynamicCache,
    GPTNeoXConfig,
    LlamaConfig,
    LlamaForCausalLM,
)

from quantflow.algorithms import rtn, rtn_mse
from quantflow.core import affine, packing
from quantflow.core.kv import SCHEMES as KV_SCHEMES
from quantflow.core.kv import KVScales, kv_scales, kv_words
from quantflow.core.qtensor import QuantizedLinear
from quantflow.core.scheme import PRESETS, LinearScheme, with_group_size
from quantflow.formats import compressed_tensors
from quantflow.numerics.activations import static_input
from quantflow.numerics.grid import either_sign
from quantflow.runtime.transformers_decoder import rounded_cache

SCHEMES = {
    name: with_group_size(s, 32)
    if s.weights.group_size and s.weights.scale_format == "float"
    else s
    for name, s in PRESETS.items()
}
ASYMMETRIC = [name for name, scheme in SCHEMES.items() if not scheme.weights.symmetric]
MICROSCALED = [name for name, scheme in SCHEMES.items() if scheme.weights.scale_format != "float"]
LOADABLE = [name for name in SCHEMES if name not in ASYMMETRIC]
# names that they do not have
OURS = ("W8A8_STATIC", "W6A16_ASYM", "W5A16_ASYM", "W3A16_ASYM", "W2A16_ASYM")
GROUPS = (
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    ("self_attn.o_proj",),
    ("mlp.gate_proj", "mlp.up_proj"),
    ("mlp.down_proj",),
)
TOKENS = (torch.arange(40) * 7 % 64)[None]


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def quantized_group(
    weights: Mapping[str, torch.Tensor],
    scheme: LinearScheme,
    x: torch.Tensor,
    *,
    scale_dtype: torch.dtype,
) -> dict[str, QuantizedLinear]:
    """Round to nearest, with scales of either sign where a search chooses it.

    The values that a static input needs are taken from `x`.
    """
    algorithm = rtn_mse if either_sign(scheme) else rtn
    results = algorithm.quantize_group(weights, scheme, statistics={}, scale_dtype=scale_dtype)
    signs = (
        torch.cat([result.weight.scale.sign().flatten() for result in results.values()])
        .unique()
        .tolist()
    )
    assert signs == ([-1, 1] if either_sign(scheme) else [1])
    scale = zero_point = None
    if scheme.input is not None and scheme.input.measured:
        seen = {"amax": x.abs().max(), "min_val": x.amin(0), "max_val": x.amax(0)}
        scale, zero_point = static_input(seen, scheme.input)
    return {
        name: QuantizedLinear(
            weight=result.weight, scheme=scheme, input_scale=scale, input_zero_point=zero_point
        )
        for name, result in results.items()
    }


def their_group(scheme: LinearScheme):
    config = compressed_tensors.quantization_config({"l": scheme}, ignore=[], model_type="llama")
    return QuantizationConfig.model_validate(config).config_groups["group_0"]


# ---- the library's own functions


@pytest.mark.parametrize("name", SCHEMES)
def test_their_model_accepts_our_config_and_means_the_same(name):
    scheme, group = SCHEMES[name], their_group(SCHEMES[name])
    strategies = {
        "per_tensor": "tensor",
        "per_channel": "channel",
        "per_group": "group",
        "per_token": "token",
    }
    strategies["per_block"] = "block"
    if scheme.weights.scale_format == "e4m3":
        strategies["per_group"] = "tensor_group"
    for ours, theirs in ((scheme.weights, group.weights), (scheme.input, group.input_activations)):
        assert (ours is None) == (theirs is None)
        if ours is not None:
            assert (theirs.type, theirs.num_bits) == (ours.kind, ours.num_bits)
            in_blocks = ours.granularity == "per_block"
            assert theirs.strategy == strategies[ours.granularity]
            assert theirs.group_size == (None if in_blocks else ours.group_size)
            assert theirs.block_structure == ([ours.group_size] * 2 if in_blocks else None)
            assert (theirs.symmetric, bool(theirs.dynamic)) == (ours.symmetric, ours.dynamic)
    assert (group.format, group.targets, group.output_activations) == (
        scheme.layout,
        ["Linear"],
        None,
    )


@pytest.mark.parametrize("name", [name for name in SCHEMES if name not in (*OURS, "W8A16")])
def test_a_preset_means_what_theirs_means(name):
    config = compressed_tensors.quantization_config(
        {"l": PRESETS[name]}, ignore=[], model_type="llama"
    )
    ours = QuantizationConfig.model_validate(config).config_groups["group_0"]
    theirs = QuantizationConfig(config_groups={name: ["Linear"]}).config_groups[name]
    same = (
        "num_bits",
        "type",
        "symmetric",
        "strategy",
        "group_size",
        "block_structure",
        "dynamic",
        "scale_dtype",
    )
    for args, other in (
        (ours.weights, theirs.weights),
        (ours.input_activations, theirs.input_activations),
    ):
        assert (args is None) == (other is None)
        assert args is None or all(getattr(args, field) == getattr(other, field) for field in same)


def test_four_presets_are_ours_alone():  # W8A16 is per channel here, and in groups of 128 there
    assert not PRESET_SCHEMES.keys() & set(OURS)
    assert PRESET_SCHEMES["W8A16"]["weights"].strategy == "group"
    assert PRESETS["W8A16"].weights.granularity == "per_channel"


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("shape", [(24, 96), (7, 32)], ids=str)
def test_their_compressor_writes_our_tensors_and_reads_our_weight(name, shape):
    scheme, weight = SCHEMES[name], random(*shape)
    linear = quantized_group({"l": weight}, scheme, random(4, shape[1]), scale_dtype=torch.float32)[
        "l"
    ]
    ours = {
        key.removeprefix("l."): tensor
        for key, tensor in compressed_tensors.encode("l", linear).items()
    }
    group, compressor = their_group(scheme), BaseCompressor.get_value_from_registry(scheme.layout)
    zero_point = linear.weight.zero_point
    state = {"weight": weight, "weight_scale": ours["weight_scale"]}
    if scheme.weights.scale_format == "e4m3":
        state |= {
            "weight_scale": ours["weight_scale"].float(),
            "weight_global_scale": ours["weight_global_scale"],
        }
    elif scheme.weights.scale_format == "e8m0":
        state["weight_scale"] = linear.weight.scale
    if zero_point is not None:
        state["weight_zero_point"] = zero_point
    theirs = compressor.compress(state, group)
    assert set(theirs) == {key for key in ours if key.startswith("weight")}
    for key, tensor in theirs.items():
        assert (tensor.dtype, tensor.shape) == (ours[key].dtype, ours[key].shape)
        assert torch.equal(tensor.float(), ours[key].float()), key
    assert torch.equal(
        compressor.decompress(dict(theirs), group)["weight"], linear.weight.dequantize()
    )


@pytest.mark.parametrize("shape", [(64, 96), (70, 32)], ids=str)
def test_the_scale_of_a_block_is_theirs(shape):
    scheme, weight = SCHEMES["FP8_BLOCK"], random(*shape)
    result = rtn.quantize_group({"l": weight}, scheme, statistics={}, scale_dtype=torch.float32)[
        "l"
    ].weight
    padded = (
        nn.functional.pad(weight, (0, 0, 0, -shape[0] % 32))
        .unflatten(0, (-1, 32))
        .unflatten(2, (-1, 32))
    )
    scale, _ = calculate_qparams(
        padded.amin((1, 3)), padded.amax((1, 3)), their_group(scheme).weights
    )
    assert torch.equal(result.scale[::32], scale)


@pytest.mark.parametrize("num_bits", [2, 3, 4, 5, 6, 8])
@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (9, 40), (8, 33), (32, 64), (70, 11)], ids=str)
@pytest.mark.parametrize("axis", [0, 1])
def test_their_packing_is_ours_along_both_axes(num_bits, shape, axis):
    half = 1 << (num_bits - 1)
    values = torch.randint(-half, half, shape, generator=torch.Generator().manual_seed(0)).to(
        torch.int8
    )
    rows, words = (
        (values, pack_to_int32(values, num_bits))
        if axis == 1
        else (values.T, pack_to_int32(values, num_bits, 0).T)
    )
    assert torch.equal(packing.pack(rows, num_bits), words)
    assert torch.equal(packing.unpack(words, num_bits, shape[axis]), rows)


@pytest.mark.parametrize(
    "name", [name for name, scheme in SCHEMES.items() if scheme.input is not None]
)
def test_their_forward_pass_fake_quantizes_the_input_as_ours(name):
    scheme, x = SCHEMES[name], random(2, 9, 64) * torch.logspace(-3, 3, 9)[:, None]
    x[1, 4] = 0  # a row of zeros
    # x[1] saturates
    linear = quantized_group({"l": random(8, 64)}, scheme, x[0] * 0.5, scale_dtype=torch.float32)[
        "l"
    ]
    arguments = their_group(scheme).input_activations
    if arguments.dynamic:
        module = nn.Linear(64, 8)
        module.quantization_status = QuantizationStatus.COMPRESSED
        if linear.input_scale is not None:
            module.input_global_scale = nn.Parameter(linear.input_scale)
        theirs = forward_quantize(module, x, "input", arguments)
    else:
        theirs = fake_quantize(x, linear.input_scale, linear.input_zero_point, arguments)
    assert torch.equal(linear.fake_quantize_input(x), theirs)


# ---- stock transformers


@dataclass
class Artifact:
    """A folder as `from_pretrained` wants it, and what is in it."""

    folder: Path
    source: LlamaForCausalLM
    linears: dict[str, QuantizedLinear]


def write_artifact(
    folder: Path,
    layer_schemes: Sequence[LinearScheme],
    *,
    dtype: torch.dtype = torch.float32,
    kv_scales: Sequence[KVScales] = (),
) -> Artifact:
    """Quantize a Llama with two layers, a scheme for each.

    `dtype` is that of its scales where the layout packs.
    """
    config = LlamaConfig(
        hidden_size=64, intermediate_size=128, vocab_size=64, num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=False, initializer_range=0.2,
        architectures=["LlamaForCausalLM"],
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        source = LlamaForCausalLM(config).eval()
    seen: dict[str, torch.Tensor] = {}
    names = [
        f"model.layers.{index}.{name}" for index in (0, 1) for group in GROUPS for name in group
    ]
    hooks = [
        source.get_submodule(name).register_forward_pre_hook(
            lambda _, args, name=name: seen.update({name: args[0][0]})
        )
        for name in names
    ]
    with torch.no_grad():
        # the second half of TOKENS is not calibrated, so static inputs saturate there
        source(TOKENS[:, :20])
    for hook in hooks:
        hook.remove()
    tensors = {name: value.clone() for name, value in source.state_dict().items()}
    linears: dict[str, QuantizedLinear] = {}
    for index, scheme in enumerate(layer_schemes):
        scale_dtype = compressed_tensors.scale_dtype(scheme, dtype)
        for group in GROUPS:
            weights = {
                f"model.layers.{index}.{name}": tensors.pop(f"model.layers.{index}.{name}.weight")
                for name in group
            }
            quantized = quantized_group(
                weights, scheme, seen[next(iter(weights))], scale_dtype=scale_dtype
            )
            for name, linear in quantized.items():
                tensors |= compressed_tensors.encode(name, linear, scale_dtype=scale_dtype)
            linears |= quantized
    for index, scales in enumerate(kv_scales):
        tensors |= compressed_tensors.encode_kv(f"model.layers.{index}.self_attn", scales)
    document = config.to_dict() | {
        "quantization_config": compressed_tensors.quantization_config(
            {name: linear.scheme for name, linear in linears.items()},
            ignore=["lm_head"],
            model_type="llama",
            kv_cache=kv_scales[0].scheme if kv_scales else None,
        )
    }
    (folder / "config.json").write_text(json.dumps(document))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return Artifact(folder, source, linears)


def logits_by_the_formulas(artifact: Artifact) -> torch.Tensor:
    """The source's forward pass with dequantized weights and fake-quantized inputs.  [1, S, V]"""
    for name, linear in artifact.linears.items():
        module = artifact.source.get_submodule(name)
        module.weight.data = linear.weight.dequantize()
        module.register_forward_pre_hook(
            lambda _, args, linear=linear: (linear.fake_quantize_input(args[0]),)
        )
    with torch.no_grad():
        return artifact.source(TOKENS).logits


def logits_of_stock(folder: Path, **options: object) -> torch.Tensor:
    model, report = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True, **options
    )
    assert not any(report.values()), report
    with torch.no_grad():
        return model.eval()(TOKENS).logits


@pytest.mark.proof(
    formats="compressed-tensors",
    direction="written",
    programs={"transformers": "transformers", "compressed-tensors": "compressed-tensors"},
    compared="logits by the formulas, bit for bit",
)
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16], ids=["float32-scales", "bfloat16-scales"]
)
@pytest.mark.parametrize("name", [name for name in LOADABLE if name not in MICROSCALED])
def test_stock_transformers_computes_our_formulas_bit_for_bit(tmp_path, name, dtype):
    artifact = write_artifact(tmp_path, [SCHEMES[name]] * 2, dtype=dtype)
    with torch.no_grad():
        exact = artifact.source(TOKENS).logits
    stock, ours = logits_of_stock(tmp_path), logits_by_the_formulas(artifact)
    assert torch.equal(stock, ours)
    assert not torch.equal(stock, exact)  # or nothing was quantized
    # of this random model less is left when it is rounded to 3 or 2 bits
    if SCHEMES[name].weights.num_bits > 3:
        assert (stock - exact).norm() < 0.5 * exact.norm()


@pytest.mark.proof(
    formats="compressed-tensors",
    direction="written",
    programs={"transformers": "transformers", "compressed-tensors": "compressed-tensors"},
    compared="every weight and global scale of the microscaled schemes, bit for bit",
)
@pytest.mark.parametrize("name", MICROSCALED)
def test_stock_transformers_makes_our_microscaled_weights_in_bfloat16_bit_for_bit(tmp_path, name):
    """compressed-tensors 0.20 makes them bfloat16 in any model; our values are exact in it."""
    artifact = write_artifact(tmp_path, [SCHEMES[name]] * 2, dtype=torch.bfloat16)
    model, report = AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.bfloat16, output_loading_info=True
    )
    assert not any(report.values()), report
    with torch.no_grad():
        # the first forward pass makes the weights
        assert model.eval()(TOKENS).logits.isfinite().all()
    for linear_name, linear in artifact.linears.items():
        module = model.get_submodule(linear_name)
        assert torch.equal(module.weight.float(), linear.weight.dequantize())
        if linear.input_scale is not None:
            assert torch.equal(module.input_global_scale, linear.input_scale)


@pytest.mark.parametrize(
    "names",
    [("FP8_DYNAMIC", "W4A16"), ("W8A8_STATIC", "W8A16"), ("W4A8", "W3A16"), ("W2A16", "FP8_BLOCK")],
    ids="+".join,
)
def test_stock_transformers_loads_two_schemes_in_one_model(tmp_path, names):
    artifact = write_artifact(tmp_path, [SCHEMES[name] for name in names])
    assert torch.equal(logits_of_stock(tmp_path), logits_by_the_formulas(artifact))


@pytest.mark.parametrize("scheme", KV_SCHEMES, ids=kv_words)
@pytest.mark.parametrize("name", ["FP8", "W8A8", "W4A16"])
def test_stock_transformers_rounds_keys_and_values_as_our_formula_does(tmp_path, name, scheme):
    """Bit for bit, of a whole prompt and of a step after it.

    Half of the values lie beyond those that the scales were made of.
    """
    heads = 1 if scheme.granularity == "per_tensor" else 2
    scales = [
        kv_scales(
            scheme,
            keys=torch.linspace(0.6, 0.9, heads) * (index + 1),
            values=torch.linspace(0.3, 0.5, heads),
        )
        for index in (0, 1)
    ]
    artifact = write_artifact(tmp_path, [SCHEMES[name]] * 2, kv_scales=scales)
    plain = logits_by_the_formulas(artifact)
    stock, report = AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, output_loading_info=True
    )
    assert not any(report.values()), report
    for cut in (TOKENS.shape[1], 25):
        theirs, ours = (
            DynamicCache(config=stock.config),
            rounded_cache(artifact.source.config, scales),
        )
        with torch.no_grad():
            for part in filter(torch.numel, (TOKENS[:, :cut], TOKENS[:, cut:])):
                expected = artifact.source(part, past_key_values=ours, use_cache=True).logits
                found = stock.eval()(part, past_key_values=theirs, use_cache=True).logits
                assert torch.equal(found, expected)
        for one, other, of_layer in zip(theirs.layers, ours.layers, scales, strict=True):
            assert torch.equal(one.keys, other.keys) and torch.equal(one.values, other.values)
            top = (448 if scheme.kind == "float" else 128) * of_layer.keys.reshape(-1, 1, 1)
            assert (one.keys.abs() >= top * 0.99).any()  # something saturated
    assert not torch.equal(expected, plain[:, -expected.shape[1] :])
    with torch.no_grad():  # a forward without a cache rounds them too
        whole = artifact.source(
            TOKENS, past_key_values=rounded_cache(artifact.source.config, scales), use_cache=True
        ).logits
        assert torch.equal(stock.eval()(TOKENS, use_cache=False).logits, whole)


@pytest.mark.parametrize("name", ASYMMETRIC)
def test_zero_points_of_packed_weights_do_not_load_plainly(tmp_path, name):
    artifact = write_artifact(tmp_path, [SCHEMES[name]] * 2)
    with pytest.raises(RuntimeError, match="ignore_mismatched_sizes"):
        logits_of_stock(tmp_path)
    with pytest.warns(UserWarning, match="loading attributes"):
        dequantized = logits_of_stock(
            tmp_path, quantization_config=CompressedTensorsConfig(dequantize=True)
        )
    assert torch.equal(dequantized, logits_by_the_formulas(artifact))


@pytest.mark.parametrize("name", ASYMMETRIC)
def test_what_is_written_with_zero_points_reads_back(tmp_path, name):
    artifact = write_artifact(tmp_path, [SCHEMES[name]] * 2, dtype=torch.bfloat16)
    tensors = load_file(tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    schemes = compressed_tensors.schemes_from_config(config, [*artifact.linears, "lm_head"])
    assert schemes.pop("lm_head") is None
    for name, linear in artifact.linears.items():
        read = compressed_tensors.decode(name, tensors, schemes[name])
        expected = affine.dequantize(
            linear.weight.qvalue,
            linear.weight.scale.repeat_interleave(32, 1),
            linear.weight.zero_point.repeat_interleave(32, 1),
        )
        assert torch.equal(read.weight.dequantize(), expected)


def test_the_head_of_gpt_neox_stays_unquantized_under_its_module_name():
    config = GPTNeoXConfig(
        hidden_size=32,
        intermediate_size=64,
        vocab_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
    )
    model = AutoModelForCausalLM.from_config(config)
    document = compressed_tensors.quantization_config(
        {"gpt_neox.layers.0.attention.dense": SCHEMES["W8A8"]},
        ignore=["embed_out"],
        model_type="gpt_neox",
    )
    apply_quantization_config(
        model, QuantizationConfig.model_validate(document), show_progress=False
    )
    quantized = {
        name for name, module in model.named_modules() if hasattr(module, "quantization_scheme")
    }
    linears = {name for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    assert linears - quantized == {"lm_head"}
