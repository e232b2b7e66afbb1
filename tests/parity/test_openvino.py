"""OpenVINO on the IR that `export --format openvino` writes: its tokens, logits and weights.

It has an environment of its own, which OPENVINO_ENV names (openvino-genai 2026.4, with openvino and
openvino-tokenizers); without it the tests are skipped. `export` runs in this environment, with that
one's packages behind its own. The model is the example. OpenVINO is asked for float32 of inputs,
keys and values: by itself it rounds all three.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from quantflow.runtime.artifact import open_folder
from quantflow.runtime.decoding import generate
from quantflow.runtime.load import load
from quantflow.stages.cli import cli
from quantflow.stages.cli.output import exit_code

MODEL = Path(__file__).resolve().parents[2] / "examples" / "tiny-llama"
ENVIRONMENT = os.environ.get("OPENVINO_ENV") or None
PROMPT = "def main():\n    "
NEW = 24
EXPORT = """
import sys
sys.path.append(sys.argv.pop(1))
from quantflow.stages.cli import main
sys.exit(main())
"""
# The graph's constants as OpenVINO unpacks them, greedy tokens and text by GenAI, logits by the
# plugin.
THEIRS = """
import json, sys
import numpy as np
import openvino as ov
import openvino_genai
from safetensors.numpy import save_file

folder, output, prompt, new = *sys.argv[1:4], int(sys.argv[4])
exact = {
    "INFERENCE_PRECISION_HINT": "f32",
    "KV_CACHE_PRECISION": "f32",
    "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0",
}
model, found = ov.Core().read_model(f"{folder}/openvino_model.xml"), {}


def values(node):
    return node.get_data(
        dtype=np.float32
    )  # with the bytes' own dtype it would give two codes as one


def result(node):
    kind, inputs = node.get_type_name(), [each.get_node() for each in node.input_values()]
    if kind == "Constant":
        return values(node)
    if kind == "Convert":
        return result(inputs[0])
    if kind == "Reshape":
        return result(inputs[0]).reshape(inputs[1].data)
    return {"Subtract": np.subtract, "Multiply": np.multiply}[kind](
        result(inputs[0]), result(inputs[1])
    )


for product in model.get_ordered_ops():
    if product.get_type_name() != "MatMul":
        continue
    node = product.input_value(1).get_node()
    leaf = node
    while leaf.get_type_name() in ("Convert", "Reshape", "Multiply", "Subtract"):
        leaf = leaf.input_value(0).get_node()
    if leaf.get_type_name() == "Constant" and leaf.get_element_type().get_type_name() in (
        "u4",
        "i4",
        "u8",
        "i8",
    ):
        found[leaf.get_friendly_name()] = np.ascontiguousarray(result(node))
compiled = ov.Core().compile_model(model, "CPU", exact)
kinds = {}
for operation in compiled.get_runtime_model().get_ops():
    told = operation.get_rt_info()
    if (
        str(told["layerType"].value if hasattr(told["layerType"], "value") else told["layerType"])
        == "FullyConnected"
    ):
        weight = operation.input_value(1).get_element_type().get_type_name()
        kinds[weight] = kinds.get(weight, 0) + 1
pipe = openvino_genai.LLMPipeline(folder, "CPU", **exact)
encoded = pipe.get_tokenizer().encode(prompt)
ids = encoded.input_ids.data
chosen = openvino_genai.GenerationConfig(
    max_new_tokens=new, min_new_tokens=new, do_sample=False, ignore_eos=True
)
tokens = pipe.generate(encoded, chosen).tokens[0]
text = pipe.generate(prompt, chosen)
request, length, parts = compiled.create_infer_request(), 0, []
request.reset_state()
for piece in [ids, *(np.array([[token]]) for token in tokens)]:
    start, length = length, length + piece.shape[1]
    request.infer(
        {
            "input_ids": piece.astype(np.int64),
            "attention_mask": np.ones((1, length), dtype=np.int64),
            "position_ids": np.arange(start, length)[None],
            "beam_idx": np.zeros(1, dtype=np.int32),
        }
    )
    parts.append(request.get_tensor("logits").data.copy())
save_file({**found, "logits": np.concatenate(parts, axis=1)}, output)
print(
    "RESULT",
    json.dumps({"ids": ids.tolist(), "tokens": list(tokens), "text": str(text), "kinds": kinds}),
)
"""
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        ENVIRONMENT is None, reason="OPENVINO_ENV names no environment with openvino-genai"
    ),
]


def run(*line: str | Path) -> subprocess.CompletedProcess[str]:
    settings = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        list(map(str, line)),
        env={**os.environ, **settings},
        capture_output=True,
        text=True,
        check=False,
        stdin=subprocess.DEVNULL,
    )


def exported(folder: Path, output: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run `export --format openvino` here, with OpenVINO from its own environment."""
    (site,) = Path(str(ENVIRONMENT)).glob("lib/python3*/site-packages")
    return run(
        sys.executable,
        "-c",
        EXPORT,
        site,
        "export",
        folder,
        "-o",
        output,
        "--format",
        "openvino",
        *words,
    )


def quantized(output: Path, scheme: str) -> Path:
    words = ["--scheme", scheme, "--algorithm", "rtn", "-q"]
    assert exit_code(cli, ["quantize", str(MODEL), "-o", str(output), *words]) == 0
    return output


@pytest.mark.proof(
    formats="openvino",
    direction="written",
    programs={"OpenVINO GenAI": "openvino-genai", "openvino-tokenizers": "openvino-tokenizers"},
    compared="every quantized weight, bit for bit; greedy tokens and their text; logits within "
    "1e-4 of float32; the plugin "
    "multiplies the codes",
    environment="OPENVINO_ENV",
)
@pytest.mark.parametrize(
    ("scheme", "dtype", "kind"),
    [
        ("W4A16", "f16", "i4"),
        ("W4A16", "f32", "i4"),
        ("W4A16_ASYM", "f16", "u4"),
        ("W8A16", "f16", "i8"),
    ],
)
def test_openvino_computes_what_the_artifact_says(tmp_path, scheme, dtype, kind):
    folder = quantized(tmp_path / "a", scheme)
    done = exported(folder, tmp_path / "ir", "--dtype", dtype)
    assert done.returncode == 0, done.stderr[-3000:]
    python = Path(str(ENVIRONMENT)) / "bin" / "python"
    told = run(
        python, "-c", THEIRS, tmp_path / "ir", tmp_path / "found.safetensors", PROMPT, str(NEW)
    )
    assert told.returncode == 0, told.stderr[-3000:]
    (line,) = (line for line in told.stdout.splitlines() if line.startswith("RESULT "))
    answer, found = (
        json.loads(line.removeprefix("RESULT ")),
        load_file(tmp_path / "found.safetensors"),
    )
    artifact = open_folder(folder, backend="reference")
    logits = found.pop("logits")
    assert found.keys() == {f"self.model.{name}.weight" for name in artifact.linears}
    for name in artifact.linears:
        assert torch.equal(
            found[f"self.model.{name}.weight"], artifact.decode(name).weight.dequantize()
        ), name
    assert answer["kinds"][kind] == len(artifact.linears)
    ours = load(folder, decoder="transformers", backend="reference")
    ids = ours.tokenizer(PROMPT, return_tensors="pt").input_ids
    assert answer["ids"] == ids.tolist()
    tokens = generate(ours.model, ids, max_new_tokens=NEW)[0, ids.shape[1] :]
    assert answer["tokens"] == tokens.tolist()
    assert answer["text"] == ours.tokenizer.decode(tokens, skip_special_tokens=True)
    with torch.no_grad():
        expected = ours.model(torch.cat([ids, tokens[None]], dim=1)).logits
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4)


def test_a_gptq_folder_of_another_program_becomes_an_ir(tmp_path):
    artifact = quantized(tmp_path / "a", "W4A16")
    assert (
        exit_code(
            cli, ["export", str(artifact), "-o", str(tmp_path / "gptq"), "--format", "gptq", "-q"]
        )
        == 0
    )
    done = exported(tmp_path / "gptq", tmp_path / "ir")
    assert done.returncode == 0, done.stderr[-3000:]
    again = exported(tmp_path / "gptq", tmp_path / "ir")
    assert again.returncode == 0 and "up to date" in again.stderr
