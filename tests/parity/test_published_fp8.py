"""A folder as DeepSeek V3.1 is published, FP8 in blocks with powers of two, beside transformers."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional
from transformers import AutoModelForCausalLM, FineGrainedFP8Config

from quantflow.exporting import export as export_stage
from quantflow.runtime.artifact import open_folder
from quantflow.runtime.load import load
from tests.gguf_mixtures import write_mixture
from tests.shared import run

BLOCK = 32


def of_powers(x: torch.Tensor) -> torch.Tensor:
    """Inputs as DeepSeek's kernel rounds them: a power of two at or above amax / 448 per group."""
    groups = x.double().unflatten(-1, (-1, BLOCK))
    largest = groups.abs().amax(-1, keepdim=True).clamp(min=1e-30)
    scale = 2.0 ** (largest / 448).log2().ceil()
    codes = (groups / scale).float().to(torch.float8_e4m3fn)
    return (codes.double() * scale).flatten(-2).to(x.dtype)


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """The folder, and the weights that its codes and scales stand for."""
    folder = write_mixture(tmp_path_factory.mktemp("fp8") / "m", "deepseek_v3")
    tensors, real = load_file(folder / "model.safetensors"), {}
    for name in [name for name in tensors if name.endswith(("_proj.weight", "mqa.weight"))]:
        weight = tensors[name].float()
        rows, columns = weight.shape
        high = -(-rows // BLOCK)
        padded = torch.zeros(high * BLOCK, columns)
        padded[:rows] = weight
        blocks = padded.view(high, BLOCK, -1, BLOCK)
        scale = 2.0 ** (blocks.abs().amax((1, 3)) / 448).log2().ceil()
        codes = (blocks / scale[:, None, :, None]).to(torch.float8_e4m3fn)
        tensors[name] = codes.view(-1, columns)[:rows].contiguous()
        tensors[f"{name}_scale_inv"] = scale
        real[name] = (codes.float() * scale[:, None, :, None]).view(-1, columns)[:rows]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    words = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
    words |= {"scale_fmt": "ue8m0", "weight_block_size": [BLOCK, BLOCK]}
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": words}))
    return folder, real


@pytest.mark.proof(
    formats="fp8",
    direction="read",
    programs={"transformers": "transformers"},
    compared="a DeepSeek V3 with `scale_fmt` ue8m0, experts too: every weight, bit for bit; logits "
    "of its modules with inputs rounded to powers of two, within 1e-4",
)
@pytest.mark.parametrize("rounded", [True, False])
def test_a_mixture_with_scales_of_powers_of_two_runs_as_transformers_with_rounded_inputs(
    published, tmp_path, monkeypatch, rounded
):
    """Every linear of attention, dense MLP, experts and shared experts, but not the router."""
    folder, real = published
    assert run("export", folder, "-o", tmp_path / "d", "--format", "dequantized", "-q") == 0
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path / "d", dtype=torch.float32, experts_implementation="eager"
    ).eval()
    stored = load_file(tmp_path / "d" / "model.safetensors")
    assert all(torch.equal(stored[name].float(), weight) for name, weight in real.items())
    kept = {
        parameter.untyped_storage().data_ptr()
        for name, parameter in theirs.named_parameters()
        if name.endswith(("embed_tokens.weight", "lm_head.weight", "gate.weight"))
    }
    linear, seen = functional.linear, []

    def rounding(x, weight, bias=None):
        if not rounded or weight.untyped_storage().data_ptr() in kept:
            return linear(x, weight, bias)
        seen.append(weight.shape)
        return linear(of_powers(x), weight, bias)

    ids = torch.arange(5, 65)[None]
    monkeypatch.setattr(functional, "linear", rounding)
    with torch.inference_mode():
        expected = theirs(ids).logits
    monkeypatch.undo()
    with torch.inference_mode():
        found = load(folder, backend="reference", exact=True).model(ids).logits
    apart = float((found - expected).abs().max() / expected.abs().max())
    print(f"inputs rounded: {rounded}, largest difference {apart:.1e} of the largest logit")
    assert apart < 1e-4 if rounded else apart > 1e-3
    assert len(seen) > 30 or not rounded
    artifact = open_folder(folder)
    assert all(p.scheme.input.scale_rounding == "pow2" for p in artifact.linears.values())


BIG = {"hidden_size": 128, "intermediate_size": 256, "moe_intermediate_size": 128}
RANKS = {"kv_lora_rank": 128, "q_lora_rank": 128, "v_head_dim": 32}


@pytest.mark.proof(
    formats="fp8",
    direction="written",
    programs={"transformers": "transformers"},
    compared="a DeepSeek V3 in FP8_BLOCK under DeepSeek's names: every weight of experts, and of "
    "linears whose rows the blocks divide, bit for bit",
)
def test_a_mixture_is_written_as_deepseek_ships_its_own(tmp_path, monkeypatch):
    monkeypatch.setattr(export_stage, "_prove", lambda *_: {})
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
    model = write_mixture(tmp_path / "m", "deepseek_v3", **BIG, **RANKS, **rope)
    q, a, folder = tmp_path / "q", tmp_path / "a", tmp_path / "f"
    assert run("quantize", model, "-o", q, "--scheme", "FP8_BLOCK", "--no-export", "-q") == 0
    assert run("export", q, "-o", a, "-q") == 0
    assert run("export", a, "-o", folder, "--format", "fp8", "-q") == 0
    tensors, source = (load_file(f / "model.safetensors") for f in (folder, model))
    quantized = {name for name in source if name.endswith(("_proj.weight", "mqa.weight"))}
    scales = {f"{name}_scale_inv" for name in quantized}
    assert tensors.keys() == source.keys() | scales
    for name, tensor in tensors.items():
        wanted = torch.float8_e4m3fn if name in quantized else None
        assert tensor.dtype == (wanted or (torch.float32 if name in scales else torch.bfloat16))
    words = json.loads((folder / "config.json").read_text())["quantization_config"]
    assert words["weight_block_size"] == [128, 128] and words["quant_method"] == "fp8"
    theirs = AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=FineGrainedFP8Config(dequantize=True), dtype=torch.float32
    )
    ours, compared = open_folder(folder), 0
    for number in (1, 2):
        stack = theirs.model.layers[number].mlp.experts
        for expert in range(8):
            stem = f"model.layers.{number}.mlp.experts.{expert}"
            real = [ours.decode(f"{stem}.{leaf}_proj").dequantize() for leaf in ("gate", "up")]
            assert torch.equal(stack.gate_up_proj[expert], torch.cat(real))
            down = ours.decode(f"{stem}.down_proj").dequantize()
            assert torch.equal(stack.down_proj[expert], down)
    for name, placement in ours.linears.items():
        if ".experts." not in name and placement.shape[0] % 128 == 0:
            found = theirs.get_submodule(name).weight
            assert torch.equal(ours.decode(name).dequantize(), found)
            compared += 1
    assert compared >= 12
