"""OpenVINO's IR without OpenVINO: packed integers, and refusals before a graph is traced."""

from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, MistralConfig, MixtralConfig

from quantflow.core.scheme import preset, with_group_size
from quantflow.errors import UnsupportedError
from quantflow.exporting import openvino_export
from quantflow.formats import openvino_ir
from quantflow.stages.cli import cli
from quantflow.stages.cli.output import exit_code

SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 32,
}


class Stored:
    """A constant as OpenVINO's Python has it: plain bytes where elements have four bits."""

    def __init__(self, kind, shape, data):
        self.kind, self.shape, self.data = kind, shape, data.numpy()

    def get_element_type(self):
        return SimpleNamespace(get_type_name=lambda: self.kind)

    def get_output_shape(self, port):
        return self.shape


def test_two_codes_of_four_bits_are_a_byte_the_first_in_its_lower_half():
    codes = torch.tensor([[-8, 7, 1], [0, -1, 2]], dtype=torch.int8)
    assert openvino_ir._bytes(codes, 4, 0).tolist() == [0x78, 0x01, 0x2F]
    assert openvino_ir._bytes(codes, 4, 8).tolist() == [0xF0, 0x89, 0xA7]
    assert openvino_ir._bytes(codes[:1], 4, 8).tolist() == [0xF0, 0x09]
    assert openvino_ir._bytes(codes, 8, 0).tolist() == [248, 7, 1, 0, 255, 2]
    assert openvino_ir._bytes(codes, 8, 128).tolist() == [120, 135, 129, 128, 127, 130]


@pytest.mark.parametrize(
    ("bits", "kind", "offset"), [(4, "i4", 0), (4, "u4", 8), (8, "i8", 0), (8, "u8", 128)]
)
def test_every_code_is_read_back(bits, kind, offset):
    half = 1 << (bits - 1)
    codes = torch.arange(-half, half - 1, dtype=torch.int8)  # an odd number of them
    stored = Stored(kind, [1, len(codes)], openvino_ir._bytes(codes, bits, offset))
    assert openvino_ir._integers(stored).tolist() == (codes.to(torch.int16) + offset).tolist()


def test_a_weight_is_the_scale_of_its_group_times_code_less_zero_point():
    weight = openvino_ir.Weight(
        codes=torch.tensor([[1, 2, 3, 4]], dtype=torch.int16),
        zero_point=torch.tensor([[1, 5]], dtype=torch.int16),
        scale=torch.tensor([[0.5, 2.0]]),
    )
    assert weight.dequantize().tolist() == [[0.0, 0.5, -4.0, -2.0]]


@pytest.mark.parametrize("name", ["W4A16", "W4A16_ASYM", "W8A16"])
def test_integers_of_4_and_8_bits_are_held_with_groups_and_with_rows(name):
    assert openvino_ir.why_not(preset(name)) is None
    if "4" in name:
        assert openvino_ir.why_not(with_group_size(preset(name), 32)) is None


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("W8A8", "scheme W8A8 quantizes inputs"),
        ("FP8_DYNAMIC", "scheme FP8_DYNAMIC quantizes inputs"),
        (
            "W3A16",
            "scheme W3A16 has weights of int3 per_group, the IR holds integers of 4 or 8 bits",
        ),
        ("NVFP4A16", "scheme NVFP4A16 has weights of float4 per_group"),
        ("Q4_0", "scheme Q4_0 is llama.cpp's"),
    ],
)
def test_other_schemes_are_refused_by_name(name, said):
    assert said in openvino_ir.why_not(preset(name))


def opened(config, **others):
    words = {"kv_cache": None, "linears": {}, **others}
    return SimpleNamespace(config=config, checkpoint=SimpleNamespace(folder="f"), **words)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (
            MixtralConfig(**SIZES, intermediate_size=64, num_local_experts=2),
            "f: mixtral: openvino: its experts depend on the text",
        ),
        (
            MistralConfig(**SIZES, intermediate_size=64, sliding_window=16),
            "f: mistral: openvino: its attention is in windows",
        ),
        (
            LlamaConfig(
                **SIZES,
                intermediate_size=64,
                rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0},
            ),
            "f: llama: openvino: rotations of type dynamic depend on the length",
        ),
    ],
)
def test_families_whose_graph_depends_on_the_text_are_refused(config, said):
    with pytest.raises(UnsupportedError) as refused:
        openvino_export._refuse(opened(config))
    assert said in str(refused.value)


def test_a_linear_of_another_scheme_and_a_quantized_cache_are_refused():
    linear = SimpleNamespace(scheme=preset("W8A8"))
    with pytest.raises(
        UnsupportedError, match="model.q: openvino: scheme W8A8 quantizes inputs.*quantize to W4A16"
    ):
        openvino_export._refuse(opened(LlamaConfig(**SIZES), linears={"model.q": linear}))
    with pytest.raises(UnsupportedError, match="f: keys and values are quantized"):
        openvino_export._refuse(opened(LlamaConfig(**SIZES), kv_cache=object()))


def run(*words, capsys):
    code = exit_code(cli, ["export", *map(str, words), "--format", "openvino", "-q"])
    return code, capsys.readouterr().err


def test_without_the_packages_the_command_that_installs_them_is_said(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(openvino_ir, "PACKAGES", ("no_such_package",))
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "config.json").write_text('{"quantization_config": {"quant_method": "gptq"}}')
    packed = {"x.qweight": torch.zeros(1, 8, dtype=torch.int32)}
    save_file(packed, tmp_path / "a" / "model.safetensors")
    code, said = run(tmp_path / "a", "-o", tmp_path / "b", capsys=capsys)
    assert (
        code == 6
        and "no_such_package is not installed" in said
        and "pip install 'quantflow-llm[openvino]'" in said
    )


def test_a_dtype_of_scales_that_the_ir_does_not_have_and_a_model_are_refused(
    llama, tmp_path, capsys
):
    code, said = run(llama, "-o", tmp_path / "b", "--dtype", "bf16", capsys=capsys)
    assert code == 2 and "dtype 'bf16' of format openvino is unknown" in said
    code, said = run(llama, "-o", tmp_path / "b", capsys=capsys)
    assert code == 2 and "is made from an artifact" in said
