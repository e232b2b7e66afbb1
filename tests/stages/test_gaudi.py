"""Gaudi's files in and out of the verbs.

A measurement becomes its files, its files become an artifact, ranks are merged.
"""

import json
import math
import os
import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GPT2Config, GPT2LMHeadModel

from quantflow.core.scale_rules import SCALE_METHODS
from quantflow.files.manifest import read_manifest
from quantflow.formats.gaudi.file_names import FileName, find_triples
from quantflow.formats.gaudi.quant_config import read_quant_config
from quantflow.formats.gaudi.triple import Node, read_triple, write_triple
from quantflow.measuring.record import read_measurement
from quantflow.models import capture
from quantflow.runtime.artifact import open_artifact
from tests.shared import run, slow_but

A = "model.layers.1.self_attn"


@pytest.fixture
def refused(capsys):
    def check(code, *arguments):
        capsys.readouterr()
        assert run(*arguments) == code, capsys.readouterr().err
        return capsys.readouterr().err

    return check


@pytest.fixture(autouse=True)
def without_variable(monkeypatch):
    monkeypatch.delenv("QUANT_CONFIG", raising=False)


@pytest.fixture(scope="module")
def measured(tmp_path_factory, llama, text_files) -> Path:
    folder = tmp_path_factory.mktemp("measured") / "m"
    line = ("--calibration", text_files["calibration"], "--samples", "4", "--stats", "amax")
    assert run("measure", llama, "-o", folder, *line) == 0
    return folder


@pytest.fixture(scope="module")
def exported(tmp_path_factory, measured, llama) -> Path:
    """Gaudi's files of the measurement, for Gaudi2."""
    folder = tmp_path_factory.mktemp("exported") / "gaudi"
    assert (
        run(
            "export",
            measured,
            "-o",
            folder,
            "--format",
            "inc",
            "--device",
            "gaudi2",
            "--model",
            llama,
        )
        == 0
    )
    return folder


def files(folder: Path) -> list[str]:
    return sorted(
        path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()
    )


def nodes_of(path: Path, **options):
    return read_triple(find_triples(path, **options)[0]).nodes


def plan_of(folder: Path) -> dict:
    return json.loads((folder / "quantize.json").read_text())["plan"]["schemes"]


def config_file(path: Path, **values) -> Path:
    path.write_text(json.dumps({"mode": "QUANTIZE"} | values))
    return path


def test_the_folder_has_what_each_runtime_mounts(exported):
    assert files(exported) == [
        "DONE.json",
        "hqt_output/measure_hooks_maxabs.json",
        "hqt_output/measure_hooks_maxabs.npz",
        "hqt_output/measure_hooks_maxabs_MAXABS_HW.json",
        "hqt_output/measure_hooks_maxabs_MAXABS_HW.npz",
        "hqt_output/measure_hooks_maxabs_mod_list.json",
        "quantization_config/maxabs_quant.json",
        "vllm/g2/inc_output_hooks_maxabs_0_1.json",
        "vllm/g2/inc_output_hooks_maxabs_0_1.npz",
        "vllm/g2/inc_output_hooks_maxabs_0_1_mod_list.json",
        "vllm/g2/inc_output_hooks_maxabs_MAXABS_HW_0_1.json",
        "vllm/g2/inc_output_hooks_maxabs_MAXABS_HW_0_1.npz",
        "vllm/maxabs_quant_g2.json",
    ]


def test_maxima_are_those_of_the_measurement_and_products_have_the_caches(exported, measured):
    statistics = read_measurement(measured / "rank-000-of-001").statistics
    nodes = nodes_of(exported / "hqt_output")
    for name in (f"{A}.q_proj", f"{A}.o_proj", "model.layers.0.mlp.down_proj"):
        assert nodes[name].inputs[0].item() == statistics[f"{name}|input|amax"].item()
        assert nodes[name].weight.item() == statistics[f"{name}|weight|amax"].item()
        assert nodes[name].outputs == ()
    assert [value.item() for value in nodes[f"{A}.matmul_qk"].inputs] == [
        statistics[f"{A}|query|amax"].item(),
        statistics[f"{A}|k_cache|amax"].item(),
    ]
    assert [value.item() for value in nodes[f"{A}.matmul_av"].inputs] == [
        1.0,
        statistics[f"{A}|v_cache|amax"].item(),
    ]
    assert len(nodes) == 2 * (7 + 4)


def test_scales_are_those_of_the_method_in_the_toolkits_arithmetic(exported):
    maxima, scales = (
        nodes_of(exported / "hqt_output"),
        nodes_of(exported / "hqt_output", method="MAXABS_HW"),
    )
    assert maxima.keys() == scales.keys()
    for name, node in maxima.items():
        raw = (node.inputs[0].max().bfloat16() / 60).float().item()
        exponent = min(4, max(-8, 4 * math.ceil(math.ceil(math.log2(raw) - 1e-9) / 4)))
        assert scales[name].inputs[0].item() == 2.0**exponent, name


def test_the_configuration_names_the_files_and_blocks_what_was_not_measured(exported):
    config = read_quant_config(exported / "quantization_config" / "maxabs_quant.json")
    assert (config.mode, config.observer, config.dump_stats_path) == (
        "QUANTIZE",
        "maxabs",
        "./hqt_output/measure",
    )
    assert config.scale_method.default.name == "maxabs_hw"
    assert config.blocklist.names == ("lm_head", "embed_out", "fused_scaled_dot_product_attention")
    assert find_triples(exported / config.dump_stats_path)
    vllm = read_quant_config(exported / "vllm" / "maxabs_quant_g2.json")
    assert find_triples(exported / "vllm" / vllm.dump_stats_path)
    assert "softmax" in vllm.blocklist.names and "matmul_qk" not in vllm.blocklist.names


def test_vllms_files_have_its_names_and_the_outputs_it_measures(exported):
    nodes = nodes_of(exported / "vllm" / "g2")
    assert (
        f"{A}.qkv_proj" in nodes
        and f"{A}.attn.impl.matmul_av" in nodes
        and f"{A}.q_proj" not in nodes
    )
    assert len(nodes[f"{A}.o_proj"].outputs) == 2 and nodes[f"{A}.qkv_proj"].outputs == ()


def test_the_same_command_again_changes_no_byte_and_another_one_is_refused(
    exported, measured, llama, refused
):
    before = {name: (exported / name).read_bytes() for name in files(exported)}
    line = ("export", measured, "-o", exported, "--format", "inc", "--model", llama)
    assert run(*line, "--device", "gaudi2") == 0
    assert "device" in refused(2, *line, "--device", "gaudi3")
    assert {name: (exported / name).read_bytes() for name in files(exported)} == before


def test_two_folders_have_the_same_bytes(tmp_path, exported, measured, llama):
    folder = tmp_path / "deep" / "er"
    assert (
        run(
            "export",
            measured,
            "-o",
            folder,
            "--format",
            "inc",
            "--device",
            "gaudi2",
            "--model",
            llama,
        )
        == 0
    )
    for name in files(exported):
        assert (folder / name).read_bytes() == (exported / name).read_bytes()


def test_numpy_reads_the_npz_as_the_toolkit_does(exported):
    with np.load(
        exported / "hqt_output" / "measure_hooks_maxabs.npz", allow_pickle=True
    ) as archive:
        table = archive["arr_0"].item()
    assert table["Nodes"][f"{A}.q_proj"]["inputs"][0].shape == (1, 1) and table["LocalRank"] is None


@pytest.mark.parametrize(
    "method", ["maxabs_pow2_opt_weight", "act_maxabs_hw_weights_pcs_maxabs_pow2"]
)
def test_methods_that_look_at_weights_need_the_model(tmp_path, measured, llama, refused, method):
    line = ("export", measured, "--format", "inc", "--device", "gaudi3", "--scale-method", method)
    assert "--model" in refused(3, *line, "-o", tmp_path / "a")
    assert not (tmp_path / "a").exists()
    assert run(*line, "-o", tmp_path / "a", "--model", llama) == 0
    scales = nodes_of(tmp_path / "a" / "hqt_output", method=method.upper())
    assert scales[f"{A}.q_proj"].weight.shape == ((64,) if "pcs" in method else ())


def test_a_given_configuration_decides_method_lists_name_and_outputs(tmp_path, measured):
    values = {
        "scale_method": "maxabs_pow2",
        "blocklist": {"names": ["mlp"], "types": ["Matmul"]},
        "measure_exclude": "NONE",
        "dump_stats_path": "/somewhere/run7",
        "measure_on_hpu": False,
    }
    path = config_file(tmp_path / "mine.json", **values)
    line = ("export", measured, "-o", tmp_path / "a", "--format", "inc", "--device", "gaudi3")
    assert run(*line, "--quant-config", path) == 0
    config = read_quant_config(tmp_path / "a" / "quantization_config" / "mine.json")
    assert config.dump_stats_path == "./hqt_output/run7" and config.blocklist.names[0] == "mlp"
    assert config.measure_on_hpu is False
    maxima = nodes_of(tmp_path / "a" / "hqt_output" / "run7")
    assert maxima[f"{A}.q_proj"].outputs
    scales = nodes_of(tmp_path / "a" / "hqt_output" / "run7", method="MAXABS_POW2")
    assert f"{A}.q_proj" in scales and f"{A}.k_cache" in scales
    assert not any("mlp" in name or "matmul" in name for name in scales)


def test_the_dictionary_form_has_no_file_of_scales(tmp_path, measured):
    part = {
        "granularity": "PTS",
        "scale_value_type": "FIXED_VALUE",
        "rounding_method": "SCALE_UNIT",
    }
    path = config_file(
        tmp_path / "a.json", scale_method={"default": {"weight": part, "activation": part}}
    )
    line = (
        "export",
        measured,
        "-o",
        tmp_path / "a",
        "--format",
        "inc",
        "--device",
        "gaudi2",
        "--quant-config",
        path,
    )
    assert run(*line) == 0
    assert not [
        name
        for name in files(tmp_path / "a")
        if "SCALE" in name.upper() and "hooks_maxabs_" in name
    ]


@pytest.mark.parametrize(
    ("options", "values", "code", "said"),
    [
        ((), {}, 2, "give --device gaudi2, gaudi3, cpu"),
        (("--device", "gaudi4"), {}, 2, "did you mean 'gaudi3'"),
        (("--device", "cpu"), {}, 2, "only QDQ mode is supported on CPU device"),
        (("--device", "cpu"), {"use_qdq": True}, 6, "no hardware scales"),
        (("--device", "gaudi2"), {"mode": "MEASURE"}, 2, "QUANT_CONFIG has mode MEASURE"),
        (("--device", "gaudi2"), {"device_for_scales": "GAUDI3"}, 2, "device_for_scales"),
        (("--device", "gaudi2", "--scale-method", "maxabs"), {}, 2, "Enter one of"),
        (
            ("--device", "gaudi2"),
            {"dynamic_quantization": True, "scale_method": "maxabs_pcs_pow2"},
            2,
            "dynamic_quantization uses no files",
        ),
    ],
)
def test_what_cannot_be_exported_is_refused(
    tmp_path, measured, refused, options, values, code, said
):
    path = config_file(tmp_path / "a.json", **values)
    line = (
        "export",
        measured,
        "-o",
        tmp_path / "a",
        "--format",
        "inc",
        "--quant-config",
        path,
        *options,
    )
    assert said in refused(code, *line)
    assert not (tmp_path / "a").exists()


def test_a_quantized_folder_or_another_model_is_refused(
    tmp_path, measured, llama, family_model, refused
):
    assert run("quantize", "--no-export", llama, "-o", tmp_path / "q", "--scheme", "W8A16") == 0
    inc = ("-o", tmp_path / "a", "--format", "inc", "--device", "gaudi2")
    assert "format inc is made from a measurement" in refused(2, "export", tmp_path / "q", *inc)
    assert "measured on model" in refused(
        3, "export", measured, *inc, "--model", family_model("mistral")
    )
    assert "rank-*-of-*" in refused(3, "export", tmp_path / "nothing", *inc)


def test_gaudis_own_files_are_postprocessed_and_the_originals_kept_when_asked(tmp_path, exported):
    source = tmp_path / "source"
    source.mkdir()
    triple = read_triple(find_triples(exported / "hqt_output")[0])
    nodes = dict(triple.nodes)
    node = nodes[f"{A}.matmul_qk"]
    nodes[f"{A}.matmul_qk"] = type(node)(inputs=(node.inputs[0], torch.tensor([[123.0]])))
    write_triple(source, FileName(prefix="run"), type(triple)(nodes=nodes, modules=triple.modules))
    for keep in ((), ("--keep-orig",)):
        folder = tmp_path / f"out{len(keep)}"
        assert (
            run("export", source, "-o", folder, "--format", "inc", "--device", "gaudi2", *keep) == 0
        )
        found = nodes_of(folder / "hqt_output")
        assert (
            found[f"{A}.matmul_qk"].inputs[1].item()
            == found[f"{A}.k_cache"].inputs[0].item()
            != 123
        )
        originals = [name for name in files(folder) if "orig_" in name]
        assert len(originals) == (3 if keep else 0) and not (folder / "vllm").exists()
    assert (
        nodes_of(folder / "hqt_output" / "orig_measure")[f"{A}.matmul_qk"].inputs[1].item() == 123
    )


def test_nodes_whose_kind_the_files_do_not_say_are_named_and_left_to_the_toolkit(
    tmp_path, exported, capsys
):
    (files,) = find_triples(exported / "hqt_output").values()
    triple, one = read_triple(files), torch.ones(1, 1)
    strange = {
        "model.layers.0.another": Node(inputs=(one,), outputs=(one,)),
        "model.layers.0.other": Node(inputs=()),
    }
    softmax = {
        "model.layers.0.self_attn.softmax": Node(inputs=(one * 300,), outputs=(one,)),
        "model.layers.0.mlp.moe_op": Node(inputs=(one,), outputs=(one,) * 5),
    }
    (tmp_path / "theirs").mkdir()
    write_triple(
        tmp_path / "theirs",
        files.name,
        replace(triple, nodes={**triple.nodes, **strange, **softmax}, modules=()),
    )
    assert (
        run(
            "export",
            tmp_path / "theirs",
            "-o",
            tmp_path / "f",
            "--format",
            "inc",
            "--device",
            "gaudi2",
        )
        == 0
    )
    said = (
        "scales of 2 nodes are left to the toolkit, which knows what they are: "
        "model.layers.0.another, model.layers.0.other"
    )
    assert said in capsys.readouterr().err
    (scales,) = find_triples(tmp_path / "f" / "hqt_output", method="MAXABS_HW").values()
    found = read_triple(scales).nodes
    assert found.keys() == {*triple.nodes, *softmax}
    assert found["model.layers.0.self_attn.softmax"].inputs == ()


@pytest.fixture(scope="module")
def mixture(tmp_path_factory, family_model, text_files) -> Path:
    """The measurement of a Mixtral."""
    folder = tmp_path_factory.mktemp("mixture") / "m"
    line = ("--calibration", text_files["calibration"], "--samples", "4", "--stats", "amax")
    assert run("measure", family_model("mixtral"), "-o", folder, *line) == 0
    return folder


def test_a_mixture_has_the_operators_of_both_runtimes_and_comes_back(
    tmp_path, family_model, mixture, capsys
):
    inc = ("--format", "inc", "--device", "gaudi2", "--model", family_model("mixtral"))
    assert run("export", mixture, "-o", tmp_path / "g", *inc) == 0
    statistics = read_measurement(mixture / "rank-000-of-001").statistics
    block = "model.layers.1.block_sparse_moe"
    inside = [statistics[f"{block}.experts.{number}.w2|input|amax"].item() for number in range(4)]
    seen = max(statistics[f"{block}.experts.{number}.w1|input|amax"].item() for number in range(4))
    habana = nodes_of(tmp_path / "g" / "hqt_output")
    vllm = nodes_of(tmp_path / "g" / "vllm" / "g2")
    for node in (
        habana[block],
        vllm[f"{block}.experts.moe_op"],
        vllm[f"{block}.experts.routed_experts.moe_op"],
    ):
        assert node.inputs[0].item() == seen
        assert [value.item() for value in node.outputs[1:]] == inside
    for config in ("quantization_config/maxabs_quant.json", "vllm/maxabs_quant_g2.json"):
        names = json.loads((tmp_path / "g" / config).read_text())["blocklist"]["names"]
        assert any(re.search(name, f"{block}.gate") for name in names)
        assert not any(re.search(name, f"{block}.experts.0.w1") for name in names)
    # both make the artifact that the measurement makes
    made = {}
    for name in ("hqt_output/measure", "vllm/g2/inc_output"):
        taken = ("--scheme", "FP8", "--measurement", tmp_path / "g" / name)
        goal = tmp_path / name.partition("/")[0]
        capsys.readouterr()
        assert run("quantize", family_model("mixtral"), "-o", goal, *taken) == 3
        assert "--experts share_max: all experts of a layer" in capsys.readouterr().err
        options = ("--experts", "share_max")
        assert run("quantize", family_model("mixtral"), "-o", goal, *taken, *options) == 0
        made[name] = load_file(goal / "layers" / "00001.safetensors")
    first, second = made.values()
    assert all(torch.equal(first[name], second[name]) for name in first)
    shared = [float(first[f"{block}.experts.{number}.w2.input_scale"]) for number in range(4)]
    assert shared == [shared[0]] * 4 and shared[0] == pytest.approx(max(inside) / 448)


def test_linears_of_attention_without_a_measured_cache_are_exported_and_it_is_said(
    tmp_path, llama, text_files, capsys, monkeypatch
):
    """Queries alone were measured: a cache that is passed by its place was not seen once."""
    monkeypatch.setattr(capture, "_with_cache", lambda module, args, cache: args)
    model = tmp_path / "gpt2"
    vocabulary = json.loads((llama / "config.json").read_text())["vocab_size"]
    sizes = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128}
    GPT2LMHeadModel(GPT2Config(vocab_size=vocabulary, **sizes)).save_pretrained(model)
    for path in llama.glob("tokenizer*"):
        shutil.copy(path, model)
    line = ("--calibration", text_files["calibration"], "--samples", "2", "--stats", "amax")
    assert run("measure", model, "-o", tmp_path / "m", *line) == 0
    inc = ("--format", "inc", "--device", "gaudi2", "--model", model)
    assert run("export", tmp_path / "m", "-o", tmp_path / "a", *inc) == 0
    told = capsys.readouterr().err
    assert "attention modules are left out, transformer.h.0.attn first: their keys and" in told
    nodes = read_triple(find_triples(tmp_path / "a" / "hqt_output")[0]).nodes
    assert "transformer.h.0.attn.c_proj" in nodes and "transformer.h.0.attn" not in nodes


def test_ranks_have_files_of_their_own(tmp_path, measured, llama, refused):
    assert run("unify", "--expand", "2", "-m", measured, "-o", tmp_path / "m") == 0
    assert (
        run("export", tmp_path / "m", "-o", tmp_path / "a", "--format", "inc", "--device", "gaudi2")
        == 0
    )
    found = find_triples(tmp_path / "a" / "hqt_output")
    assert list(found) == [0, 1] and [read_triple(one).local_rank for one in found.values()] == [
        0,
        1,
    ]
    per_channel = ("--scale-method", "act_maxabs_pow2_weights_pcs_maxabs_pow2", "--model", llama)
    assert (
        run(
            "export",
            tmp_path / "m",
            "-o",
            tmp_path / "b",
            "--format",
            "inc",
            "--device",
            "gaudi2",
            *per_channel,
        )
        == 0
    )
    assert not [name for name in files(tmp_path / "b") if "PCS" in name]

    one = ("-m", tmp_path / "a" / "hqt_output", "-o", tmp_path / "new" / "unified")
    assert run("unify", "-g", "01", *one) == 0
    merged = read_triple(find_triples(tmp_path / "new" / "unified")[0])
    assert run("unify", "-g", "01", "-m", tmp_path / "m", "-o", tmp_path / "u") == 0
    ours = read_measurement(tmp_path / "u" / "rank-000-of-001").statistics
    for name in (f"{A}.q_proj", "model.layers.0.mlp.down_proj"):
        assert merged.nodes[name].inputs[0].item() == ours[f"{name}|input|amax"].item()
    assert merged.local_rank == -1
    shutil.rmtree(tmp_path / "m" / "rank-001-of-002")
    half = (
        "export",
        tmp_path / "m",
        "-o",
        tmp_path / "half",
        "--format",
        "inc",
        "--device",
        "gaudi2",
    )
    assert "holds ranks [0] of 2" in refused(3, *half)


def test_fp8_is_quantized_from_gaudis_files_with_the_scales_of_our_measurement(
    tmp_path, measured, exported, llama
):
    for name, source in (("ours", measured), ("gaudi", exported / "hqt_output")):
        line = ("-o", tmp_path / name, "--scheme", "FP8", "--measurement", source)
        assert run("quantize", llama, *line) == 0
    for index in range(2):
        ours, theirs = (
            load_file(tmp_path / name / "layers" / f"{index:05d}.safetensors")
            for name in ("ours", "gaudi")
        )
        assert ours.keys() == theirs.keys()
        for name, tensor in ours.items():
            assert torch.equal(
                tensor.flatten().view(torch.uint8), theirs[name].flatten().view(torch.uint8)
            ), name


def another(llama: Path, folder: Path) -> Path:
    """Return a copy of a model with one weight changed."""
    other = Path(shutil.copytree(llama, folder))
    tensors = load_file(other / "model.safetensors")
    tensors[f"{A}.q_proj.weight"] *= 1.25
    save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
    return other


def test_scales_are_not_made_from_gaudis_maxima_and_another_models_weights(
    tmp_path, exported, llama, refused
):
    line = (
        "export",
        exported / "hqt_output",
        "-o",
        tmp_path / "a",
        "--format",
        "inc",
        "--device",
        "gaudi2",
    )
    pcs = ("--scale-method", "act_maxabs_hw_weights_pcs_maxabs_pow2")
    assert "the largest weight is" in refused(
        3, *line, *pcs, "--model", another(llama, tmp_path / "other")
    )
    assert run(*line, *pcs, "--model", llama) == 0


@pytest.mark.parametrize(
    ("folder", "device", "code"), [("g3", "gaudi2", 3), ("g2", "gaudi3", 3), ("g2", "gaudi2", 0)]
)
def test_files_of_a_folder_that_is_called_after_the_other_gaudi_are_refused(
    tmp_path, exported, refused, folder, device, code
):
    shutil.copytree(exported / "hqt_output", tmp_path / folder)
    line = (
        "export",
        tmp_path / folder,
        "-o",
        tmp_path / "a",
        "--format",
        "inc",
        "--device",
        device,
    )
    said = refused(code, *line)
    assert code == 0 or f"folder {folder} is of another device than {device}" in said


def test_scales_per_channel_have_the_format_that_the_toolkit_makes_of_theirs(
    tmp_path, measured, llama
):
    line = (
        "export",
        measured,
        "-o",
        tmp_path / "a",
        "--format",
        "inc",
        "--device",
        "gaudi2",
        "--model",
        llama,
    )
    assert run(*line, "--scale-method", "act_maxabs_pow2_weights_pcs_opt_pow2") == 0
    assert (
        json.loads((tmp_path / "a/quantization_config/maxabs_quant.json").read_text())[
            "scale_format"
        ]
        == "CONST"
    )


def test_gaudis_files_of_another_model_or_of_several_ranks_are_refused(
    tmp_path, exported, llama, refused
):
    line = ("--scheme", "FP8", "--measurement", exported / "hqt_output")
    said = refused(3, "quantize", another(llama, tmp_path / "other"), "-o", tmp_path / "q", *line)
    assert f"{A}.q_proj: the largest weight is" in said
    triple = read_triple(find_triples(exported / "hqt_output")[0])
    (tmp_path / "two").mkdir()
    for rank in range(2):
        write_triple(
            tmp_path / "two",
            FileName(prefix="m", rank=rank, world=2),
            type(triple)(nodes=triple.nodes),
        )
    two = ("--scheme", "FP8", "--measurement", tmp_path / "two")
    assert "holds 2 ranks, quantize reads one" in refused(
        3, "quantize", llama, "-o", tmp_path / "q", *two
    )
    assert "holds 2 ranks" in refused(
        3, "quantize", llama, "-o", tmp_path / "q", *two, "--ranks", "4"
    )
    (tmp_path / "part").mkdir()
    nodes = {
        name: node
        for name, node in triple.nodes.items()
        if not name.endswith("layers.1.mlp.up_proj")
    }
    write_triple(tmp_path / "part", FileName(prefix="m"), type(triple)(nodes=nodes))
    part = ("--scheme", "FP8", "--measurement", tmp_path / "part")
    said = refused(3, "quantize", llama, "-o", tmp_path / "q", *part)
    assert (
        "Layer 'model.layers.1.mlp.up_proj' cannot be quantized because no measures were supplied"
        in said
    )
    given = config_file(tmp_path / "a.json", ignore_modules_wo_measures=True)
    assert run("quantize", llama, "-o", tmp_path / "q", *part, "--quant-config", given) == 0
    assert [name for name, scheme in plan_of(tmp_path / "q").items() if scheme is None] == [
        "model.layers.1.mlp.up_proj"
    ]


@pytest.mark.parametrize(
    ("options", "needs"),
    [
        (("--scheme", "W4A16", "--algorithm", "gptq", "--group-size", "32"), "hessian_sum"),
        (("--scheme", "W8A8_STATIC"), "min_val"),
        (("--scheme", "FP8", "--smoothquant", "0.5"), "channel_amax"),
    ],
)
def test_what_needs_more_than_maxima_is_refused(tmp_path, exported, llama, refused, options, needs):
    said = refused(
        2,
        "quantize",
        llama,
        "-o",
        tmp_path / "q",
        *options,
        "--measurement",
        exported / "hqt_output",
    )
    assert needs in said and "Gaudi's files hold maxima alone" in said


@pytest.mark.slow
def test_a_configuration_alone_quantizes_fp8_from_the_files_that_it_names(
    tmp_path, exported, llama, monkeypatch, capsys
):
    stats = str(exported / "hqt_output" / "measure")
    values = {
        "device_for_scales": "GAUDI2",
        "blocklist": {"names": ["down_proj"]},
        "hp_dtype": "FP32",
        "method": "HOOKS",
    }
    path = config_file(tmp_path / "a.json", dump_stats_path=stats, **values)
    monkeypatch.setenv("QUANT_CONFIG", str(path))
    assert run("quantize", llama, "-o", tmp_path / "q") == 0
    assert "keys without meaning" not in capsys.readouterr().err
    schemes = plan_of(tmp_path / "q")
    assert {name for name, scheme in schemes.items() if scheme is None} == {
        f"model.layers.{index}.mlp.down_proj" for index in range(2)
    }
    scheme = schemes[f"{A}.q_proj"]
    assert (scheme["weights"]["float8"], scheme["input"]["float8"]) == ("gaudi2", "gaudi2")
    assert run("export", tmp_path / "q", "-o", tmp_path / "artifact") == 0
    manifest = read_manifest(tmp_path / "artifact")
    assert manifest["float8"] == {"flavour": "gaudi2", "largest": 240.0}
    assert manifest["measurement"]["calibration"]["hash"] == "unknown"
    assert "what text they are of is not known" in (tmp_path / "artifact" / "README.md").read_text()
    weight = load_file(tmp_path / "artifact" / "model.safetensors")[f"{A}.q_proj.weight"]
    assert weight.float().abs().max() <= 240


def test_quantize_says_which_float8_it_takes_where_no_device_is_named(
    tmp_path, exported, llama, monkeypatch, capsys
):
    path = config_file(
        tmp_path / "a.json", dump_stats_path=str(exported / "hqt_output" / "measure")
    )
    monkeypatch.setenv("QUANT_CONFIG", str(path))
    assert run("quantize", llama, "-o", tmp_path / "q") == 0
    assert (
        "names no device, float8 is e4m3fn; Gaudi2 needs device_for_scales GAUDI2"
        in capsys.readouterr().err
    )
    assert plan_of(tmp_path / "q")[f"{A}.q_proj"]["weights"]["float8"] == "e4m3fn"


def test_flags_and_the_recipe_win_over_the_configuration(tmp_path, exported, measured, llama):
    values = {
        "device_for_scales": "GAUDI2",
        "blocklist": {"names": ["down_proj"]},
        "dump_stats_path": "/nowhere/x",
    }
    path = config_file(tmp_path / "a.json", **values)
    line = ("--quant-config", path, "--measurement", measured, "--ignore", f"{A}.q_proj")
    assert (
        run("quantize", llama, "-o", tmp_path / "q", *line, "--set", "quantize.0.float8=e4m3fn")
        == 0
    )
    schemes = plan_of(tmp_path / "q")
    assert [name for name, scheme in schemes.items() if scheme is None] == [f"{A}.q_proj"]
    assert schemes[f"{A}.k_proj"]["weights"]["float8"] == "e4m3fn"
    assert (
        run(
            "quantize",
            "--no-export",
            llama,
            "-o",
            tmp_path / "w8",
            "--quant-config",
            path,
            "--scheme",
            "W8A16",
        )
        == 0
    )
    assert all(plan_of(tmp_path / "w8").values())  # its lists are about FP8


def test_a_missing_measure_step_is_told_with_the_path(tmp_path, llama, refused):
    path = config_file(
        tmp_path / "a.json", dump_stats_path=str(tmp_path / "hqt_output" / "measure")
    )
    said = refused(3, "quantize", llama, "-o", tmp_path / "q", "--quant-config", path)
    assert (
        "hqt_output/measure: holds no measurement" in said
        and "measure with Gaudi's toolkit first" in said
    )


def test_measuring_with_the_configuration_of_quantize_is_refused(
    tmp_path, llama, text_files, refused, monkeypatch
):
    line = ("measure", llama, "-o", tmp_path / "m", "--calibration", text_files["calibration"])
    assert "QUANT_CONFIG has mode QUANTIZE, measure needs MEASURE" in refused(
        2, *line, "--quant-config", "maxabs_quant"
    )
    monkeypatch.setenv("QUANT_CONFIG", "maxabs_measure.json")
    said = refused(2, "quantize", llama, "-o", tmp_path / "q", "--scheme", "W8A16")
    assert "QUANT_CONFIG has mode MEASURE, quantize needs QUANTIZE" in said
    assert not (tmp_path / "m").exists() and not (tmp_path / "q").exists()


def test_measure_takes_its_statistics_from_the_configuration_unless_told_otherwise(
    tmp_path, llama, text_files
):
    line = (
        "--calibration",
        text_files["calibration"],
        "--samples",
        "2",
        "--quant-config",
        "maxabs_measure",
    )
    assert run("measure", llama, "-o", tmp_path / "a", *line) == 0
    assert run("measure", llama, "-o", tmp_path / "b", *line, "--stats", "min_max,amax") == 0
    found = [
        read_measurement(tmp_path / name / "rank-000-of-001").meta["observers"] for name in "ab"
    ]
    assert found == [["amax"], ["min_max", "amax"]]


def test_a_users_configuration_files_lead_from_measure_to_quantize(
    tmp_path, llama, text_files, monkeypatch, refused, capsys
):
    """QUANT_CONFIG alone names the folder of measure and quantize, as it does for the toolkit."""
    monkeypatch.chdir(tmp_path)
    assert "no folder to write" in refused(
        2, "measure", llama, "--calibration", text_files["calibration"]
    )
    (tmp_path / "file").touch()
    line = (
        "--quant-config",
        config_file(tmp_path / "a.json", mode="MEASURE", dump_stats_path="file/measure"),
    )
    said = refused(3, "measure", llama, "--calibration", text_files["calibration"], *line)
    assert "Measurements dump directory 'file' is non-writable" in said
    monkeypatch.setenv("QUANT_CONFIG", "maxabs_measure.json")
    assert run("measure", llama, "--calibration", text_files["calibration"], "--samples", "2") == 0
    assert (tmp_path / "hqt_output" / "measure" / "rank-000-of-001" / "DONE.json").exists()
    # and nothing else
    assert capsys.readouterr().err.startswith(
        "measure: 124 tokens in 2 sequences, 2 layers, amax; "
    )
    monkeypatch.setenv("QUANT_CONFIG", "maxabs_quant.json")
    assert run("quantize", llama, "-o", "q") == 0
    assert "keys without meaning" not in capsys.readouterr().err
    shutil.copytree("hqt_output/measure", "ours")
    assert run("export", "ours", "-o", "gaudi", "--format", "inc", "--device", "gaudi2") == 0
    for path in (tmp_path / "gaudi" / "hqt_output").iterdir():
        shutil.copy(path, "hqt_output")
    assert "is both a folder of `quantflow measure` and the prefix" in refused(
        2, "quantize", llama, "-o", "q2"
    )
    shutil.rmtree("hqt_output/measure")
    assert run("quantize", llama, "-o", "q2") == 0  # the same maxima, out of Gaudi's files
    for index in range(2):
        assert (tmp_path / f"q/layers/{index:05d}.safetensors").exists()
        ours, theirs = (load_file(f"{name}/layers/{index:05d}.safetensors") for name in ("q", "q2"))
        assert all(
            torch.equal(ours[key].view(torch.uint8), theirs[key].view(torch.uint8)) for key in ours
        )


def test_run_says_that_it_does_not_read_the_variable(monkeypatch, refused):
    monkeypatch.setenv("QUANT_CONFIG", "maxabs_quant")
    assert "run: QUANT_CONFIG is not read" in refused(2, "run", "no-such-recipe")


# share the scale of their weights, where it is per tensor
FUSED = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
FIXED = {
    "unit_scale": {"gaudi2": 1.0, "gaudi3": 1.0},
    "hw_aligned_single_scale": {"gaudi2": 16.0, "gaudi3": 128.0},
}
STATIC = [name for name, method in SCALE_METHODS.items() if not method.dynamic]


def quantized_by(folder: Path, llama: Path, measured: Path, *options) -> dict:
    """Return the tensors of all layers of an FP8 result."""
    line = (
        "quantize",
        "--no-export",
        llama,
        "-o",
        folder,
        "--measurement",
        measured,
        "--scheme",
        "FP8",
        *options,
    )
    assert run(*line) == 0
    parts = [load_file(path) for path in sorted((folder / "layers").glob("*.safetensors"))]
    return {name: tensor for part in parts for name, tensor in part.items()}


@pytest.mark.parametrize(
    ("device", "method"),
    slow_but(
        [(device, name) for device in ("gaudi2", "gaudi3") for name in STATIC if name not in FIXED],
        *(("gaudi2", name) for name in STATIC if name not in FIXED),
        ("gaudi3", "maxabs_hw"),
    ),
)
def test_an_artifact_has_the_scales_that_the_toolkit_takes_from_our_files(
    tmp_path, measured, llama, method, device
):
    """Scales are bit for bit those of the files that a Gaudi would load.

    They come of the same maxima and weights, in the same arithmetic.
    """
    path = config_file(tmp_path / "a.json", scale_method=method, device_for_scales=device.upper())
    found = quantized_by(tmp_path / "q", llama, measured, "--quant-config", path)
    line = (
        "export",
        measured,
        "-o",
        tmp_path / "a",
        "--format",
        "inc",
        "--device",
        device,
        "--scale-method",
        method,
    )
    assert run(*line, "--model", llama) == 0
    theirs = nodes_of(tmp_path / "a" / "hqt_output", method=method.upper())
    linears = [name for name, node in theirs.items() if node.weight is not None]
    assert len(linears) == 14
    per_channel = SCALE_METHODS[method].weight.granularity == "PCS"
    for name in linears:
        assert found[f"{name}.input_scale"].item() == theirs[name].inputs[0].item(), name
        if per_channel or not name.endswith(FUSED):
            assert torch.equal(
                found[f"{name}.weight_scale"].flatten(), theirs[name].weight.flatten()
            ), name
    groups = [[f"{A}.{leaf}" for leaf in ("q_proj", "k_proj", "v_proj")]]
    groups.append([f"model.layers.0.mlp.{leaf}" for leaf in ("gate_proj", "up_proj")])
    for names in groups if SCALE_METHODS[method].weight.value != "OPT" and not per_channel else []:
        shared = {found[f"{name}.weight_scale"].item() for name in names}
        assert shared == {max(theirs[name].weight.item() for name in names)}


@pytest.mark.parametrize("method", FIXED)
@pytest.mark.parametrize("device", ["gaudi2", "gaudi3"])
def test_a_fixed_scale_is_that_of_every_weight_and_input(tmp_path, measured, llama, method, device):
    path = config_file(tmp_path / "a.json", scale_method=method, device_for_scales=device.upper())
    found = quantized_by(tmp_path / "q", llama, measured, "--quant-config", path)
    scales = [tensor.item() for name, tensor in found.items() if name.endswith("_scale")]
    assert len(scales) == 28 and set(scales) == {FIXED[method][device]}


@pytest.mark.slow
def test_scale_methods_give_other_bytes_but_where_a_search_finds_what_the_maximum_gives(
    tmp_path, measured, llama
):
    """Of the four scales that Gaudi2 applies for free, the search takes those of the maxima."""
    alike = [["maxabs_hw", "maxabs_hw_opt_weight"]]
    found = {}
    for method in STATIC:
        path = config_file(
            tmp_path / f"{method}.json", scale_method=method, device_for_scales="GAUDI2"
        )
        tensors = quantized_by(tmp_path / method, llama, measured, "--quant-config", path)
        found[method] = {
            name: tensor.view(torch.uint8).numpy().tobytes()
            for name, tensor in sorted(tensors.items())
        }
    for method in STATIC:
        same = [other for other in STATIC if found[other] == found[method]]
        assert same == [method] or same in alike


def test_a_search_per_tensor_is_over_all_that_share_the_scale(tmp_path, measured, llama):
    path = config_file(
        tmp_path / "a.json", scale_method="maxabs_pow2_opt_weight", device_for_scales="GAUDI3"
    )
    found = quantized_by(tmp_path / "q", llama, measured, "--quant-config", path)
    names = [f"{A}.{leaf}" for leaf in ("q_proj", "k_proj", "v_proj")]
    model = load_file(llama / "model.safetensors")
    whole = torch.cat([model[f"{name}.weight"] for name in names]).double()
    losses = {}
    for exponent in range(-10, 10):
        scaled = (whole / 2.0**exponent).clamp(-448, 448).float().to(torch.float8_e4m3fn).double()
        losses[2.0**exponent] = (scaled * 2.0**exponent - whole).square().sum().item()
    best = max(scale for scale, loss in losses.items() if loss == min(losses.values()))
    assert {found[f"{name}.weight_scale"].item() for name in names} == {best}


def test_the_default_method_is_said_and_a_recipe_or_a_flag_says_otherwise(
    tmp_path, measured, llama, capsys
):
    path = config_file(tmp_path / "a.json", device_for_scales="GAUDI2")
    given = quantized_by(tmp_path / "given", llama, measured, "--quant-config", path)
    assert "QUANT_CONFIG names no scale_method, it is maxabs_hw" in capsys.readouterr().err
    named = config_file(tmp_path / "b.json", device_for_scales="GAUDI2", scale_method="maxabs_hw")
    same = quantized_by(tmp_path / "same", llama, measured, "--quant-config", named)
    assert "scale_method" not in capsys.readouterr().err
    assert all(
        torch.equal(same[name].view(torch.uint8), given[name].view(torch.uint8)) for name in given
    )
    ours = ("--set", "quantize.0.scale_rounding=none")
    plain = quantized_by(tmp_path / "plain", llama, measured, "--quant-config", path, *ours)
    alone = quantized_by(tmp_path / "alone", llama, measured, "--set", "quantize.0.float8=gaudi2")
    assert all(
        torch.equal(plain[name].view(torch.uint8), alone[name].view(torch.uint8)) for name in alone
    )
    exact = ("--set", "quantize.0.float8=gaudi2", "--set", "quantize.0.scale_method=maxabs_hw")
    recipe = quantized_by(tmp_path / "recipe", llama, measured, *exact)
    assert recipe[f"{A}.o_proj.weight_scale"].item() in (2.0**-8, 2.0**-4, 1.0, 16.0)


@pytest.mark.parametrize("scheme", ["FP8_DYNAMIC", "FP8_BLOCK"])
def test_schemes_with_other_scales_say_that_the_method_is_not_used(tmp_path, llama, capsys, scheme):
    path = config_file(tmp_path / "a.json", scale_method="maxabs_pow2")
    line = (
        "quantize",
        "--no-export",
        llama,
        "-o",
        tmp_path / "q",
        "--scheme",
        scheme,
        "--quant-config",
        path,
        "--group-size",
    )
    assert run(*(line[:-1] if scheme == "FP8_DYNAMIC" else (*line, "32"))) == 0
    assert (
        f"scale_method maxabs_pow2 is of scales per tensor, {scheme} has its own"
        in capsys.readouterr().err
    )


TABLE = {
    "default": {
        part: {
            "granularity": "PTS",
            "scale_value_type": "FIXED_VALUE",
            "rounding_method": "SCALE_UNIT",
        }
        for part in ("weight", "activation")
    }
}


@pytest.mark.parametrize(
    ("values", "options", "said"),
    [
        (
            {"scale_method": TABLE},
            (),
            "scale_method is a table of several, quantize has one method for all linears",
        ),
        (
            {"scale_method": "maxabs_pcs_pow2", "dynamic_quantization": True},
            (),
            "scale_method maxabs_pcs_pow2 computes the scales of inputs at run time, FP8 stores "
            "them",
        ),
        (None, ("quantize.0.scale_method=maxabs_hv",), "did you mean 'maxabs_hw'"),
        (
            None,
            ("quantize.0.scale_method=maxabs_hw", "quantize.0.scale_rounding=pow2"),
            "beside scale_rounding=pow2",
        ),
        (None, ("quantize.0.scale_arithmetic=BF16",), "scale_arithmetic=BF16 without scale_method"),
        (
            None,
            ("quantize.0.scale_method=maxabs_pcs_pow2",),
            "computes the scales of inputs at run time",
        ),
        (
            None,
            ("quantize.0.scale_method=maxabs_hw", "quantize.0.scheme=FP8_DYNAMIC"),
            "no static scales of float8 tensors",
        ),
        (
            None,
            ("quantize.0.scale_method=maxabs_hw", "quantize.0.scheme=W8A8_STATIC"),
            "no static scales of float8 tensors",
        ),
    ],
)
def test_a_scale_method_that_quantize_does_not_compute_is_refused_by_name(
    tmp_path, measured, llama, refused, values, options, said
):
    given = () if values is None else ("--quant-config", config_file(tmp_path / "a.json", **values))
    settings = [word for option in options for word in ("--set", option)]
    scheme = () if any("scheme=" in option for option in options) else ("--scheme", "FP8")
    recipe = tmp_path / "r.yaml"
    recipe.write_text(json.dumps({"quantize": [{"name": "x", "scheme": "FP8"}]}))
    line = (
        "quantize",
        llama,
        "-o",
        tmp_path / "q",
        "--measurement",
        measured,
        "--recipe",
        recipe,
        *scheme,
        *given,
        *settings,
    )
    assert said in refused(2, *line)
    assert not (tmp_path / "q").exists()


def test_an_artifact_of_a_scale_method_is_an_ordinary_one(tmp_path, measured, llama):
    path = config_file(
        tmp_path / "a.json",
        scale_method="act_maxabs_hw_weights_pcs_opt_pow2",
        device_for_scales="GAUDI2",
    )
    quantized_by(tmp_path / "q", llama, measured, "--quant-config", path)
    assert run("export", tmp_path / "q", "-o", tmp_path / "artifact") == 0
    assert run("verify", tmp_path / "artifact") == 0
    resolved = read_manifest(tmp_path / "artifact")["recipe"]["resolved"]["schemes"][f"{A}.q_proj"]
    assert (
        resolved["weights"]["scale_rule"]["value"] == "OPT"
        and resolved["weights"]["granularity"] == "per_channel"
    )
    assert resolved["input"]["scale_arithmetic"] == "BF16"
    opened = open_artifact(tmp_path / "artifact", backend="reference")
    assert {placement.scheme.weights.granularity for placement in opened.linears.values()} == {
        "per_channel"
    }


@pytest.mark.parametrize(
    "method", ["maxabs_hw_opt_weight", "act_maxabs_hw_weights_pcs_maxabs_pow2"]
)
def test_a_scale_method_where_the_model_runs_has_the_scales_of_file_to_file(
    tmp_path, measured, llama, text_files, method
):
    """gptq moves codes, no scale."""
    path = config_file(tmp_path / "a.json", scale_method=method, device_for_scales="GAUDI2")
    files = quantized_by(
        tmp_path / "files", llama, measured, "--quant-config", path, "--algorithm", "rtn"
    )
    layers = quantized_by(
        tmp_path / "layers", llama, measured, "--quant-config", path, "--algorithm", "gptq"
    )
    scales = [name for name in files if name.endswith("_scale")]
    assert len(scales) == 28 and all(torch.equal(files[name], layers[name]) for name in scales)
    codes = [name for name in files if name.endswith("proj.weight")]
    assert any(
        not torch.equal(files[name].view(torch.uint8), layers[name].view(torch.uint8))
        for name in codes
    )


@pytest.mark.slow
def test_cards_that_quantize_their_parts_take_a_method_of_maxima_and_refuse_a_search(
    tmp_path, measured, llama, refused
):
    """The largest of the parts' maxima is the whole's; the best of the parts' searches is not."""
    line = (
        "quantize",
        llama,
        "--measurement",
        measured,
        "--scheme",
        "FP8",
        "--set",
        "quantize.0.float8=gaudi2",
        "--set",
    )
    for method in ("maxabs_hw", "act_maxabs_hw_weights_pcs_maxabs_pow2"):
        said = f"quantize.0.scale_method={method}"
        assert run(*line, said, "-o", tmp_path / f"{method}-2", "--ranks", "2") == 0
        assert (
            run("unify", "-m", tmp_path / f"{method}-2", "-o", tmp_path / f"{method}-joined") == 0
        )
        assert run("quantize", "--no-export", *line[1:], said, "-o", tmp_path / method) == 0
        for index in range(2):
            name = f"layers/{index:05d}.safetensors"
            assert (tmp_path / f"{method}-joined" / name).read_bytes() == (
                tmp_path / method / name
            ).read_bytes()
    searched = "quantize.0.scale_method=maxabs_hw_opt_weight"
    message = refused(2, *line, searched, "-o", tmp_path / "s", "--ranks", "2")
    assert "a scale_method that searches" in message and not (tmp_path / "s").exists()


def test_an_algorithm_that_searches_scales_refuses_those_of_a_method(
    tmp_path, measured, llama, refused
):
    method = "quantize.0.scale_method=act_maxabs_hw_weights_pcs_maxabs_pow2"
    line = (
        "quantize",
        llama,
        "--measurement",
        measured,
        "--scheme",
        "FP8",
        "--algorithm",
        "rtn_mse",
        "--set",
        method,
    )
    assert "whose scales follow from its scale_method" in refused(2, *line, "-o", tmp_path / "q")


def test_integers_have_no_float8(tmp_path, llama, refused):
    line = ("quantize", llama, "-o", tmp_path / "q", "--scheme")
    assert "integer weights" in refused(2, *line, "W8A16", "--set", "quantize.0.float8=gaudi2")
    assert "float8='e4m3'" in refused(2, *line, "FP8", "--set", "quantize.0.float8=e4m3")


class Canary:
    """Makes a folder when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


@pytest.mark.parametrize("verb", ["unify", "quantize", "export"])
def test_no_verb_runs_what_a_file_asks_for(tmp_path, exported, llama, refused, verb):
    source, sung = tmp_path / "source", tmp_path / "sung"
    shutil.copytree(exported / "hqt_output", source)
    np.savez(source / "measure_hooks_maxabs.npz", {"Nodes": Canary(sung), "Mode": "DynamicRange"})
    line = {
        "unify": ("unify", "-m", source, "-o", tmp_path / "o"),
        "quantize": (
            "quantize",
            llama,
            "-o",
            tmp_path / "o",
            "--scheme",
            "FP8",
            "--measurement",
            source,
        ),
        "export": ("export", source, "-o", tmp_path / "o", "--format", "inc", "--device", "gaudi2"),
    }[verb]
    said = refused(3, *line)
    assert (
        "the pickle asks for the name" in said
        and "nothing of it was run" in said
        and not sung.exists()
    )
    with np.load(source / "measure_hooks_maxabs.npz", allow_pickle=True) as archive:
        archive["arr_0"]
    assert sung.exists()  # it does sing for those who let it


def test_a_damaged_file_names_itself(tmp_path, exported, refused):
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "m_hooks_maxabs.npz").write_bytes(
        (exported / "hqt_output" / "measure_hooks_maxabs.npz").read_bytes()[:-30]
    )
    assert "m_hooks_maxabs.npz" in refused(3, "unify", "-m", broken, "-o", tmp_path / "o")
