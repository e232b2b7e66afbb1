"""Folders that other programs quantized, through the verbs.

They are described, run, validated, quantized again, compared, refused.
"""

import itertools
import json
import shutil
import struct
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from quantflow.algorithms import rtn
from quantflow.core.qtensor import QuantizedLinear
from quantflow.core.scheme import LinearScheme, named, preset, with_group_size
from quantflow.formats import LAYOUTS
from quantflow.formats.llama_cpp import blocks, gguf
from quantflow.formats.weight_layout import integers
from quantflow.measuring.text import read_documents
from quantflow.models.tokenizer import load_tokenizer
from quantflow.runtime.artifact import open_folder
from quantflow.runtime.load import load
from tests.shared import run

DOWN = "model.layers.1.mlp.down_proj"


def grouped(bits: int, *, symmetric: bool = True, size: int = 32) -> LinearScheme:
    return named(integers(bits, size, symmetric=symmetric, where="a test"), None, "pack-quantized")


@dataclass(frozen=True)
class Case:
    layout: str
    scheme: LinearScheme
    ordered: bool = False


CASES = {
    "gptq": Case("gptq", grouped(4)),
    "gptq act-order": Case("gptq", grouped(4), ordered=True),
    "gptq_v2 8 bits": Case("gptq_v2", grouped(8, symmetric=False)),
    "auto_round": Case("auto_round", grouped(4)),
    "awq": Case("awq", grouped(4, symmetric=False)),
    "fp8": Case("fp8", with_group_size(preset("FP8_BLOCK"), 32)),
    "compressed-tensors": Case("compressed-tensors", grouped(4)),
    "modelopt": Case("modelopt", preset("NVFP4A16")),
}


@pytest.fixture(scope="module")
def foreign(llama, tmp_path_factory, write_foreign):
    """Return the folder of a case, and its weights, made on first use."""
    made = {}

    def make(name):
        if name not in made:
            case = CASES[name]
            folder = tmp_path_factory.mktemp("foreign") / name.replace(" ", "-")
            made[name] = (
                folder,
                write_foreign(folder, llama, case.layout, case.scheme, ordered=case.ordered),
            )
        return made[name]

    return make


def told(capsys, *line, code=0):
    capsys.readouterr()
    assert run(*line) == code, capsys.readouterr().err
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("name", CASES)
def test_inspect_says_how_a_folder_is_quantized(foreign, capsys, name):
    (folder, _), case = foreign(name), CASES[name]
    found = told(capsys, "inspect", folder, "--json")
    (row,) = found["quantized"]
    weights = case.scheme.weights
    assert (found["format"], found["runs"], found["verified"]) == (case.layout, None, 14)
    assert (row["bits"], row["group_size"], row["symmetric"]) == (
        weights.num_bits,
        weights.group_size,
        weights.symmetric,
    )
    assert row["act_order"] is case.ordered
    assert row["linears"] == 14 and row["which"]["model.layers.*.mlp.down_proj"] == 2
    assert found["left"] == {"lm_head.weight": 1, "model.embed_tokens.weight": 1}
    with safe_open(folder / "model.safetensors", "pt") as file:
        sizes = {key: file.get_tensor(key).nbytes for key in file.keys()}  # noqa: SIM118 - it is no dict
    assert found["bytes"] == sum(sizes.values())
    assert row["bytes"] == sum(size for key, size in sizes.items() if "_proj." in key)
    assert run("inspect", folder) == 0
    text = capsys.readouterr().out
    assert f"scheme: {case.scheme.name}" in text and "model.layers.*.mlp.down_proj: 2" in text


def test_inspect_of_headers_alone_does_not_see_a_damaged_value(foreign, tmp_path, capsys):
    folder = shutil.copytree(foreign("gptq act-order")[0], tmp_path / "f")
    tensors = load_file(folder / "model.safetensors")
    tensors[f"{DOWN}.scales"][0, 0] = -1
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    found = told(capsys, "inspect", folder, "--no-verify", "--json")
    assert found["verified"] == 0 and found["quantized"][0]["act_order"] is None
    assert run("inspect", folder) == 0  # a symmetric scale of either sign is one
    tensors[f"{DOWN}.scales"][0, 0] = 0
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    capsys.readouterr()
    assert run("inspect", folder) == 3 and f"{DOWN}.scales: scale 0.0" in capsys.readouterr().err


def test_a_layout_that_is_not_read_is_named(llama, tmp_path, capsys):
    folder = shutil.copytree(llama, tmp_path / "f")
    config = json.loads((folder / "config.json").read_text())
    words = {"quant_method": "aqlm", "meta": {"quantizer": ["program:1.2"]}}
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": words}))
    tensors = load_file(folder / "model.safetensors")
    tensors[f"{DOWN}.codes"] = torch.ones(8, 4, 1, dtype=torch.int16)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    found = told(capsys, "inspect", folder, "--json")
    assert (
        found["program"] == "program:1.2"
        and "quant_method 'aqlm' is not read here" in found["runs"]
    )


def without(key):
    return lambda tensors: tensors.pop(key)


def changed(key, change):
    def apply(tensors):
        tensors[key] = change(tensors[key]).contiguous()

    return apply


def swapped(words):
    """Return words with the nibbles of each byte in the other order."""
    data = words.view(torch.uint8)
    return ((data << 4) | (data >> 4)).view(torch.int32)


@pytest.mark.parametrize(
    ("name", "damage", "said"),
    [
        ("gptq", without(f"{DOWN}.scales"), f"{DOWN}.scales"),
        (
            "gptq",
            changed(f"{DOWN}.g_idx", lambda t: t.flip(0)),
            f"{DOWN}.g_idx: groups of inputs that do not stand together",
        ),
        (
            "gptq act-order",
            changed(f"{DOWN}.g_idx", lambda t: t * 0),
            f"{DOWN}.g_idx: group 0 has 128 inputs, each of 4 has",
        ),
        ("gptq", changed(f"{DOWN}.qweight", lambda t: t[:-1]), f"{DOWN}"),
        ("awq", without(f"{DOWN}.qzeros"), f"{DOWN}.qzeros"),
        ("fp8", without(f"{DOWN}.weight_scale_inv"), f"{DOWN}"),
        (
            "fp8",
            changed(f"{DOWN}.weight_scale_inv", lambda t: t * float("inf")),
            f"{DOWN}.weight_scale_inv",
        ),
        ("compressed-tensors", without(f"{DOWN}.weight_scale"), f"{DOWN}.weight_scale"),
        ("modelopt", without(f"{DOWN}.weight_scale_2"), f"{DOWN}.weight_scale_2"),
    ],
)
@pytest.mark.parametrize("verb", ["inspect", "generate"])
def test_a_damaged_folder_is_refused_with_the_tensors_name(
    foreign, tmp_path, capsys, name, damage, said, verb
):
    folder = shutil.copytree(foreign(name)[0], tmp_path / "f")
    tensors = load_file(folder / "model.safetensors")
    damage(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    line = (
        verb,
        folder,
        *(("--prompt", "value", "--max-new-tokens", "2", "-q") if verb == "generate" else ()),
    )
    assert run(*line) == 3
    assert said in capsys.readouterr().err


def test_nibbles_in_another_order_are_seen_by_their_zero_points(foreign, tmp_path, capsys):
    folder = shutil.copytree(foreign("awq")[0], tmp_path / "f")
    tensors = load_file(folder / "model.safetensors")
    tensors[f"{DOWN}.qweight"] = swapped(tensors[f"{DOWN}.qweight"])
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert run("inspect", folder) == 3
    assert (
        f"{DOWN}: codes and zero points of 256 groups do not belong together"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("name", "bits"), [("gptq", 8), ("gptq", 3), ("gptq_v2 8 bits", 4), ("awq", 8)]
)
def test_a_wrong_number_of_bits_is_refused(foreign, tmp_path, capsys, name, bits):
    folder = shutil.copytree(foreign(name)[0], tmp_path / "f")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["bits"] = bits
    (folder / "config.json").write_text(json.dumps(config))
    assert run("generate", folder, "--prompt", "value", "-q") in (3, 6)
    assert "bits" in (said := capsys.readouterr().err) or "_proj" in said


def test_a_truncated_file_is_refused(foreign, tmp_path, capsys):
    folder = shutil.copytree(foreign("gptq")[0], tmp_path / "f")
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    assert run("inspect", folder) == 3 and "model.safetensors" in capsys.readouterr().err


def test_inspect_says_which_part_of_a_model_a_gguf_file_is(tmp_path, capsys):
    fields = {
        "general.architecture": ("string", "llama"),
        "split.no": ("u16", 1),
        "split.count": ("u16", 3),
    }
    path = tmp_path / "m-00002-of-00003.gguf"
    data = torch.zeros(4, 32).numpy().tobytes()
    gguf.write(path, gguf.layout(fields, {"token_embd.weight": ("F32", (4, 32))}), lambda _: [data])
    assert told(capsys, "inspect", path, "--json")["part"] == "2 of 3"
    assert run("inspect", path) == 0 and "part: 2 of 3" in capsys.readouterr().out


@pytest.mark.slow
def test_inspect_says_what_a_gguf_file_holds(llama, tmp_path, capsys):
    line = ("quantize", llama, "-o", tmp_path / "a", "--scheme", "Q4_0", "--algorithm", "rtn", "-q")
    assert run(*line) == 0
    assert run("export", tmp_path / "a", "-o", tmp_path / "g", "--format", "gguf", "-q") == 0
    (path,) = (tmp_path / "g").glob("*.gguf")
    found = told(capsys, "inspect", path, "--json")
    assert (found["kind"], found["architecture"]) == ("gguf", "llama")
    assert found["types"]["Q4_0"]["names"]["blk.*.ffn_down.weight"] == 2
    layer = 2 * 64 * 64 + 2 * 32 * 64 + 3 * 128 * 64
    # the embedding is of that type too
    assert found["types"]["Q4_0"]["bytes"] == (2 * layer + 320 * 64) * 18 // 32
    data = bytearray(path.read_bytes())
    short = tmp_path / "short.gguf"
    short.write_bytes(data[:-64])
    assert (
        run("inspect", short) == 3 and "bytes where the header describes" in capsys.readouterr().err
    )
    infinite = tmp_path / "infinite.gguf"
    info = gguf.read_header(path, types=blocks.readable()).tensors["blk.1.ffn_up.weight"]
    struct.pack_into("<e", data, info.offset, float("inf"))
    infinite.write_bytes(data)
    assert run("inspect", infinite) == 3 and "blk.1.ffn_up.weight" in capsys.readouterr().err
    assert run("inspect", infinite, "--no-verify") == 0


@pytest.mark.parametrize("name", CASES)
def test_a_folder_runs_in_the_lean_decoder_and_is_timed(foreign, capsys, name):
    folder, _ = foreign(name)
    line = (
        "bench",
        folder,
        "-b",
        "1",
        "--input-tokens",
        "8",
        "--new-tokens",
        "4",
        "--runs",
        "1",
        "--warmups",
        "0",
    )
    found = told(capsys, *line, "--json", "-q")
    assert found["decoder"] == "lean" and found["batches"][0]["produced"] == 4


def divergence(
    model: Path, weights: dict[str, torch.Tensor], sequences: list[torch.Tensor]
) -> float:
    """Mean KL divergence of a model with other weights from the model, by transformers."""
    first, second = (
        AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval() for _ in range(2)
    )
    parameters, parts = dict(second.named_parameters()), []
    with torch.no_grad():
        for name, weight in weights.items():
            parameters[name].copy_(weight)
        for ids in sequences:
            p, q = (
                each(ids[None]).logits[0, :-1].double().log_softmax(-1) for each in (first, second)
            )
            parts.append((p.exp() * (p - q)).sum(-1))
    return float(torch.cat(parts).mean())


@pytest.fixture(scope="module")
def windows(llama, text_files):
    """Return the windows of so many tokens of the first documents."""
    documents = read_documents(text_files["heldout"], load_tokenizer(llama))[:4]

    def cut(size: int) -> list[torch.Tensor]:
        return [
            torch.tensor(ids[at : at + size])
            for ids in documents
            for at in range(0, len(ids), size)
        ]

    return cut


@pytest.mark.parametrize("name", ["gptq act-order", "awq"])
def test_validate_compares_a_folder_with_the_model_that_it_was_made_from(
    llama, foreign, windows, text_files, tmp_path, name
):
    folder, weights = foreign(name)
    sequences = windows(64)
    tokens = sum(map(len, sequences))
    line = (
        "validate",
        folder,
        "--baseline",
        llama,
        "--text",
        text_files["heldout"],
        "--tokens",
        tokens,
        "-q",
    )
    code = run(*line, "--sequence-length", 64, "--report", tmp_path / "r")
    found = json.loads((tmp_path / "r" / "validation.json").read_text())
    assert code == (0 if found["outcome"] == "pass" else 4)
    assert found["metrics"]["mean_kld"]["value"] == pytest.approx(
        divergence(llama, weights, sequences), rel=1e-3
    )
    assert found["algorithm"] == ("quantflow" if name.startswith("gptq") else "another program")
    # the strictest of the scheme: nobody knows how it was made
    assert found["gate"]["name"] == "int4"
    assert 4 < found["bits_per_weight"] < 6.5
    assert (tmp_path / "r" / "report.html").is_file()


def test_validate_refuses_a_model_that_the_folder_cannot_be_made_of(
    llama, family_model, foreign, text_files, tmp_path, capsys
):
    folder, _ = foreign("gptq")
    line = (
        "validate",
        folder,
        "--text",
        text_files["heldout"],
        "--report",
        tmp_path / "r",
        "--baseline",
    )
    assert run(*line, family_model("qwen3")) == 3
    assert "is a llama, the baseline a qwen3" in capsys.readouterr().err
    assert run(*line, llama, "--diagnose", "16") == 2
    assert "--diagnose of a folder without a manifest" in capsys.readouterr().err
    wider = shutil.copytree(llama, tmp_path / "wider")
    tensors = load_file(wider / "model.safetensors")
    tensors["model.layers.0.mlp.gate_proj.weight"] = torch.ones(160, 64, dtype=torch.bfloat16)
    save_file(tensors, wider / "model.safetensors", metadata={"format": "pt"})
    assert run(*line, wider) == 3
    assert (
        "mlp.gate_proj.weight: is [160, 64], the model needs [128, 64]" in capsys.readouterr().err
    )


def test_quantize_takes_a_folder_by_its_dequantized_weights_alone(foreign, tmp_path, capsys):
    folder, weights = foreign("gptq act-order")
    line = ("quantize", folder, "-o", tmp_path / "a", "--scheme", "W8A16", "-q")
    assert run(*line) == 3
    assert "--format dequantized" in capsys.readouterr().err
    assert run(*line, "--dequantize") == 0
    plain = load_file(tmp_path / "a.work" / "0-dequantized" / "model.safetensors")
    assert all(torch.equal(plain[name], weight) for name, weight in weights.items())
    artifact = open_folder(tmp_path / "a", backend="reference")
    for name, weight in weights.items():  # rounded once more, to steps of amax / 127.5 of a row
        step = weight.abs().amax(dim=1, keepdim=True) / 127.5
        found = artifact.decode(name.removesuffix(".weight")).dequantize()
        assert ((found - weight).abs() <= 0.51 * step + weight.abs() * 2**-8).all()
    assert run(*line, "--dequantize") == 0  # up to date


def test_quantize_refuses_to_dequantize_a_model(llama, tmp_path, capsys):
    assert (
        run("quantize", llama, "-o", tmp_path / "a", "--scheme", "W8A16", "--dequantize", "-q") == 2
    )
    assert "dequantized is made from an artifact" in capsys.readouterr().err


@pytest.mark.parametrize(
    "name", [name for name in CASES if name not in ("compressed-tensors", "gptq act-order")]
)
def test_a_folder_comes_back_from_another_layout_with_every_byte(foreign, tmp_path, name):
    folder, _ = foreign(name)
    assert (
        run("export", folder, "-o", tmp_path / "there", "--format", "compressed-tensors", "-q") == 0
    )
    assert (
        run(
            "export",
            tmp_path / "there",
            "-o",
            tmp_path / "back",
            "--format",
            CASES[name].layout,
            "-q",
        )
        == 0
    )
    first, last = (load_file(path / "model.safetensors") for path in (folder, tmp_path / "back"))
    assert first.keys() == last.keys()
    for key, tensor in first.items():
        assert tensor.dtype == last[key].dtype and tensor.shape == last[key].shape, key
        assert torch.equal(
            tensor.reshape(-1).view(torch.uint8), last[key].reshape(-1).view(torch.uint8)
        ), key
    before, after = (
        json.loads((path / "config.json").read_text()) for path in (folder, tmp_path / "back")
    )
    assert before["quantization_config"] == after["quantization_config"]


def test_diff_says_of_each_tensor_what_differs(foreign, llama, tmp_path, capsys):
    folder, weights = foreign("gptq")
    assert told(capsys, "diff", folder, folder, "--values", "--json")["counts"] == {"equal": 21}
    assert run("export", folder, "-o", tmp_path / "c", "--format", "compressed-tensors", "-q") == 0
    assert told(capsys, "diff", folder, tmp_path / "c", "--values", "--json")["counts"] == {
        "equal": 21
    }
    other = shutil.copytree(folder, tmp_path / "other")
    tensors = load_file(other / "model.safetensors")
    tensors[f"{DOWN}.scales"][0, 3] *= 2
    tensors["model.layers.0.self_attn.q_proj.qweight"][0, 5] ^= 1
    del tensors["lm_head.weight"]
    save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    found = told(capsys, "diff", folder, other, "--values", "--json")
    rows = {row["name"]: row for row in found["tensors"] if row["verdict"] != "equal"}
    assert {name: row["verdict"] for name, row in rows.items()} == {
        f"{DOWN}.weight": "scale differs",
        "model.layers.0.self_attn.q_proj.weight": "values differ",
        "lm_head.weight": "only in the first",
    }
    first = weights[f"{DOWN}.weight"]
    change = torch.zeros_like(first)
    change[3, :32] = first[3, :32]  # the scale of its first group is twice as large
    assert rows[f"{DOWN}.weight"]["largest"] == pytest.approx(float(change.abs().max()))
    assert rows[f"{DOWN}.weight"]["relative"] == pytest.approx(
        float(change.norm() / first.norm()), rel=1e-5
    )
    assert rows["model.layers.0.self_attn.q_proj.weight"]["changed"] == pytest.approx(1 / 64**2)
    assert run("diff", folder, other, "--values") == 0
    assert "18 equal" in capsys.readouterr().out
    assert run("diff", folder, other, "--text", "x") == 2


def with_measured_numbers(folder, output, *, input_scale, zero_point, cache, kind="float"):
    """Copy a folder of integers.

    The copy has static asymmetric inputs and quantized keys and values.
    """
    shutil.copytree(folder, output)
    config = json.loads((output / "config.json").read_text())
    words = {
        "num_bits": 8,
        "type": "int",
        "symmetric": False,
        "strategy": "tensor",
        "dynamic": False,
    }
    config["quantization_config"]["config_groups"]["group_0"]["input_activations"] = words
    config["quantization_config"]["kv_cache_scheme"] = words | {"type": kind, "symmetric": True}
    (output / "config.json").write_text(json.dumps(config))
    tensors = load_file(output / "model.safetensors")
    for name in [key.removesuffix("_packed") for key in tensors if key.endswith(".weight_packed")]:
        linear = name.removesuffix(".weight")
        tensors |= {
            f"{linear}.input_scale": torch.tensor([0.01]),
            f"{linear}.input_zero_point": torch.tensor([3]).char(),
        }
    for layer in range(2):
        tensors |= {
            f"model.layers.{layer}.self_attn.{part}_scale": torch.tensor([0.02]) for part in "kv"
        }
    tensors[f"{DOWN}.input_scale"] = torch.tensor([input_scale])
    tensors[f"{DOWN}.input_zero_point"] = torch.tensor([zero_point], dtype=torch.int8)
    tensors["model.layers.1.self_attn.v_scale"] = torch.tensor([cache])
    save_file(tensors, output / "model.safetensors", metadata={"format": "pt"})
    return output


def test_diff_compares_what_was_measured_of_inputs_keys_and_values(foreign, tmp_path, capsys):
    source = foreign("compressed-tensors")[0]
    first = with_measured_numbers(
        source, tmp_path / "a", input_scale=0.01, zero_point=3, cache=0.02
    )
    second = with_measured_numbers(
        source, tmp_path / "b", input_scale=0.03, zero_point=-5, cache=0.05
    )
    found = told(capsys, "diff", first, second, "--values", "--json")
    rows = {row["name"]: row for row in found["tensors"] if row["verdict"] != "equal"}
    assert {name: row["verdict"] for name, row in rows.items()} == {
        f"{DOWN}.input_scale": "scale differs",
        f"{DOWN}.input_zero_point": "values differ",
        "model.layers.1.self_attn.v_scale": "scale differs",
    }
    assert found["counts"] == {"equal": 21, "scale differs": 2, "values differ": 1}
    assert rows[f"{DOWN}.input_scale"]["largest"] == pytest.approx(0.02)
    assert rows[f"{DOWN}.input_zero_point"]["largest"] == 8
    assert rows["model.layers.1.self_attn.v_scale"]["left"] == "FP8 per_tensor"
    assert told(capsys, "diff", first, first, "--values", "--json")["counts"] == {"equal": 21}
    plain = told(capsys, "diff", source, first, "--values", "--json")["counts"]
    assert plain == {"equal": 21, "only in the second": 2 * 14 + 4}
    integers = with_measured_numbers(
        source, tmp_path / "c", input_scale=0.01, zero_point=3, cache=0.02, kind="int"
    )
    assert told(capsys, "diff", first, integers, "--values", "--json")["counts"] == {
        "equal": 21,
        "values differ": 4,
    }


def test_diff_says_how_far_two_folders_are_apart_on_a_text(
    foreign, llama, windows, text_files, capsys
):
    folder, weights = foreign("awq")
    sequences = windows(128)  # the most that the model takes
    line = (
        "diff",
        llama,
        folder,
        "--values",
        "--text",
        text_files["heldout"],
        "--tokens",
        sum(map(len, sequences)),
    )
    found = told(capsys, *line, "--json")
    assert found["counts"]["values differ"] == 14
    apart = found["divergence"]
    assert apart["windows"] == len(sequences) and apart["tokens"] == sum(map(len, sequences)) - len(
        sequences
    )
    assert apart["mean_kld"] == pytest.approx(divergence(llama, weights, sequences), rel=1e-3)
    assert apart["mean_kld"] < apart["largest_kld"] and 0 < apart["top1_agreement"] < 1


def test_fp8_per_tensor_is_read_as_transformers_spells_it_and_export_says_who_reads_ours(
    llama, tmp_path, capsys
):
    """Transformers' names are weight_scale_inv and activation_scale; vLLM's are others.

    They are weight_scale and input_scale. Both multiply.
    """
    tensors, layout, inputs = (
        load_file(llama / "model.safetensors"),
        LAYOUTS["fp8"],
        torch.tensor([0.5]),
    )
    made = {}
    for name in [key.removesuffix(".weight") for key in tensors if "_proj" in key]:
        weight = {name: tensors.pop(f"{name}.weight").float()}
        weight = rtn.quantize_group(
            weight, preset("FP8"), statistics={}, scale_dtype=torch.float32
        )[name].weight
        made |= layout.encode(
            name,
            QuantizedLinear(weight=weight, scheme=preset("FP8"), input_scale=inputs),
            scale_dtype=None,
        )
    folders = [tmp_path / "vllm", tmp_path / "transformers"]
    words = layout.quantization_config(
        dict.fromkeys(["a"], preset("FP8")), ignore=["lm_head"], model_type="llama"
    )
    spelled = {"weight_scale": "weight_scale_inv", "input_scale": "activation_scale"}
    for folder, leaves in zip(folders, ({}, spelled), strict=True):
        shutil.copytree(llama, folder)
        ours = {
            f"{key.rpartition('.')[0]}.{leaves.get(leaf, leaf)}": made[key]
            for key in made
            for leaf in [key.rpartition(".")[2]]
        }
        save_file(tensors | ours, folder / "model.safetensors", metadata={"format": "pt"})
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"quantization_config": words}))
    assert told(capsys, "inspect", folders[1], "--json")["quantized"][0]["scheme"] == "FP8"
    first, second = (open_folder(folder) for folder in folders)
    for name in first.linears:
        left, right = first.decode(name), second.decode(name)
        assert torch.equal(left.dequantize(), right.dequantize()) and torch.equal(
            left.input_scale, right.input_scale
        )
    assert run("export", folders[1], "-o", tmp_path / "f", "--format", "fp8") == 0
    assert "for vLLM alone, transformers does not read them" in capsys.readouterr().err
    assert (
        load_file(tmp_path / "f" / "model.safetensors").keys()
        == load_file(folders[0] / "model.safetensors").keys()
    )


@pytest.mark.parametrize(
    "words",
    [
        {"kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"}},
        {"kv_cache_quant_algo": "FP8"},
    ],
)
def test_the_cache_of_a_modelopt_folder_is_that_of_compressed_tensors(
    foreign, tmp_path, capsys, words
):
    theirs, ours = shutil.copytree(foreign("modelopt")[0], tmp_path / "theirs"), tmp_path / "ours"
    assert run("export", theirs, "-o", ours, "--format", "compressed-tensors", "-q") == 0
    arguments = {
        "num_bits": 8,
        "type": "float",
        "symmetric": True,
        "strategy": "tensor",
        "dynamic": False,
    }
    names = {theirs: ("k_proj.k_scale", "v_proj.v_scale"), ours: ("k_scale", "v_scale")}
    for folder, leaves in names.items():
        tensors, config = (
            load_file(folder / "model.safetensors"),
            json.loads((folder / "config.json").read_text()),
        )
        config["quantization_config"] |= (
            words if folder == theirs else {"kv_cache_scheme": arguments}
        )
        (folder / "config.json").write_text(json.dumps(config))
        for layer, (leaf, value) in itertools.product(
            range(2), zip(leaves, (0.25, 2.0), strict=True)
        ):
            scale = torch.tensor(value + layer)
            tensors[f"model.layers.{layer}.self_attn.{leaf}"] = (
                scale if folder == theirs else scale.reshape(1)
            )
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    left, right = (open_folder(folder).kv_scales() for folder in (theirs, ours))
    assert [(float(each.keys), float(each.values)) for each in left] == [(0.25, 2.0), (1.25, 3.0)]
    assert all(
        one.scheme == two.scheme and one.keys == two.keys
        for one, two in zip(left, right, strict=True)
    )
    ids, found = torch.arange(20)[None], []
    for folder in (theirs, ours):
        decoder = load(folder, decoder="lean").decoder
        decoder.begin(rows=1, capacity=32)
        found.append(decoder.forward(ids, last_only=False))
    assert torch.equal(*found)
    assert told(capsys, "inspect", theirs, "--json")["kv_cache"] == "float8"
    tensors = load_file(theirs / "model.safetensors")
    tensors["model.layers.1.self_attn.v_proj.v_scale"] *= 0
    save_file(tensors, theirs / "model.safetensors", metadata={"format": "pt"})
    assert (
        run("inspect", theirs) == 3
        and "self_attn.v_proj.v_scale: scale 0.0" in capsys.readouterr().err
    )
    del tensors["model.layers.1.self_attn.v_proj.v_scale"]
    save_file(tensors, theirs / "model.safetensors", metadata={"format": "pt"})
    assert (
        run("inspect", theirs) == 3
        and "self_attn.v_proj.v_scale: its cache's scheme" in capsys.readouterr().err
    )
