"""Intel's extension for PyTorch (IPEX) computes from our checkpoints what the weights say.

We compute from those that neural-compressor wrote for it what they compute. The programs have
environments of their own; without one the tests that need it are skipped.

| variable        | holds                                                                        |
|-----------------|------------------------------------------------------------------------------|
| IPEX_ENV        | intel-extension-for-pytorch 2.8, torch 2.8, and what quantflow needs         |
| IPEX_LOADER_ENV | the same two, and transformers 4.51.3, for which its `llm.optimize` was made |
| IPEX_2_1_ENV    | intel-extension-for-pytorch 2.1.100, torch 2.1.0, transformers 4.31.0, and   |
|                 | neural-compressor 2.3.2, six                                                 |

Release 2.8 takes checkpoints in GPTQ's and AWQ's layouts; the one with `packed_weight`
(quantflow/formats/ipex.py) is that of 2.1, which also takes other names of its tensors.
neural-compressor up to 2.3 writes it.
"""

import json
import os
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from quantflow.core.qtensor import QTensor, QuantizedLinear
from quantflow.core.scheme import named
from quantflow.files.checkpoint import KEYS
from quantflow.formats import LAYOUTS
from quantflow.formats.weight_layout import integers
from quantflow.runtime.load import load
from tests.shared import run

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "tiny-llama"
ROWS, COLUMNS = 64, 256
LINEARS, FUSED = 28, 20  # quantized linears of the example, and those that 2.8 does not fuse
SCRIPT = """
import json, sys, torch
import intel_extension_for_pytorch as ipex
from safetensors.torch import load_file, save_file
from intel_extension_for_pytorch.quantization import (
    WoqLowpMode,
    WoqWeightDtype,
    get_weight_only_quant_qconfig_mapping,
)
from intel_extension_for_pytorch.utils.weight_only_quantization import (
    _convert_woq_with_low_precision_checkpoint,
)

folder, (method, ordered, rows, columns) = sys.argv[1], json.loads(sys.argv[2])
tensors, x = load_file(f"{folder}/packed.safetensors"), load_file(f"{folder}/x.safetensors")["x"]
model = torch.nn.Sequential(torch.nn.Linear(columns, rows, bias=False)).eval()
mapping = get_weight_only_quant_qconfig_mapping(
    weight_dtype=WoqWeightDtype.INT4, lowp_mode=WoqLowpMode.NONE
)
told = {"quant_method": method, **({"desc_act": ordered} if method == "gptq" else {})}
made = _convert_woq_with_low_precision_checkpoint(model, mapping, tensors, told)
assert type(made[0]).__name__ == "WeightOnlyQuantizedLinear", made
with torch.no_grad():
    save_file({"y": made(x).float().contiguous()}, f"{folder}/y.safetensors")
"""
# A Llama of their transformers, before programs that load a checkpoint into it or write one.
LLAMA = """
import json, sys, torch
from pathlib import Path
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

torch.set_num_threads(1)
folder, output = Path(sys.argv[1]), sys.argv[2]
words = json.loads((folder / "config.json").read_text())
named = (
    "hidden_size intermediate_size max_position_embeddings num_attention_heads "
    "num_hidden_layers num_key_value_heads rms_norm_eps vocab_size tie_word_embeddings"
)
config = LlamaConfig(**{key: words[key] for key in named.split()})
config.architectures = ["LlamaForCausalLM"]
model = LlamaForCausalLM(config).eval().float()


def finish(model, quantized):
    # Save the logits and say how many linears are quantized.
    ids = torch.arange(2, 42)[None]
    with torch.no_grad():
        found = model(ids, attention_mask=torch.ones_like(ids), position_ids=torch.arange(40)[None])
    logits = found[0] if isinstance(found, tuple) else found.logits
    save_file({"logits": logits.float().contiguous()}, output)
    print(sum(type(module).__name__ == quantized for module in model.modules()))
"""
LOAD_2_1 = """
import intel_extension_for_pytorch
from intel_extension_for_pytorch.quantization import (
    WoqLowpMode,
    get_weight_only_quant_qconfig_mapping,
)
from intel_extension_for_pytorch.utils.weight_only_quantization import (
    _convert_woq_with_low_precision_checkpoint,
)

(path,) = folder.glob("*.pt")
table = torch.load(path)
rest = {name: tensor for name, tensor in table.items() if tensor.is_floating_point()}
model.load_state_dict(rest, strict=False)  # it takes the linears alone from a checkpoint
told = folder / "quant_config.json"
keys = json.loads(told.read_text()) if told.exists() else None
mapping = get_weight_only_quant_qconfig_mapping(
    weight_dtype=torch.quint4x2, lowp_mode=WoqLowpMode.NONE
)
finish(_convert_woq_with_low_precision_checkpoint(model, mapping, table, keys), "IpexWoqLinear")
"""
LOAD_2_8 = """
import intel_extension_for_pytorch as ipex
from intel_extension_for_pytorch.llm.utils import load_low_precision_checkpoint
from intel_extension_for_pytorch.quantization import (
    WoqLowpMode,
    WoqWeightDtype,
    get_weight_only_quant_qconfig_mapping,
)

checkpoint = load_low_precision_checkpoint(str(folder))
mapping = get_weight_only_quant_qconfig_mapping(
    weight_dtype=WoqWeightDtype.INT4,
    lowp_mode=WoqLowpMode.NONE,
    group_size=checkpoint[1]["group_size"],
)
made = ipex.llm.optimize(
    model,
    dtype=torch.float32,
    quantization_config=mapping,
    low_precision_checkpoint=checkpoint,
    deployment_mode=False,
    inplace=True,
)
finish(made, "WeightOnlyQuantizedLinear")
"""
# The weights of the folder, and a few random texts to calibrate with.
SOURCE = """
weights = load_file(folder / "model.safetensors")
model.load_state_dict({name: tensor.float() for name, tensor in weights.items()}, strict=False)
draw = torch.Generator().manual_seed(0)
texts = torch.randint(2, words["vocab_size"], (4, 64), generator=draw)
target, ordered = Path(sys.argv[3]), sys.argv[4] == "True"
"""
WRITE_2_1 = """
from neural_compressor import PostTrainingQuantConfig, quantization

chosen = {"bits": 4, "group_size": 128, "scheme": "asym", "algorithm": "GPTQ"}
asked = PostTrainingQuantConfig(
    approach="weight_only",
    op_type_dict={".*": {"weight": chosen}},
    op_name_dict={".*lm_head": {"weight": {"dtype": "fp32"}}},
    recipes={"gptq_args": {"act_order": ordered, "nsamples": 4, "use_max_length": False}},
)
loader = torch.utils.data.DataLoader(texts, batch_size=1)
made = quantization.fit(model, asked, calib_dataloader=loader).export_compressed_model(
    compression_dtype=torch.int32, compression_dim=1, scale_dtype=torch.float16
)
torch.save(made.state_dict(), target / "gptq_checkpoint_g128.pt")
for module in made.modules():
    if type(module).__name__ == "WeightOnlyLinear":  # its products would be float16's
        module.scale, module.float_type = module.scale.float(), torch.float32
finish(made, "WeightOnlyLinear")
"""
# A linear of every kind beside the reference's product.
BACKEND = """
import torch
from quantflow.backends import ipex
from quantflow.backends.backend import Case
from quantflow.core.qtensor import QTensor, QuantizedLinear
from quantflow.core.scheme import preset, with_group_size

draw = torch.Generator().manual_seed(11)
for name, size in (("W4A16", 32), ("W4A16", 128), ("W4A16_ASYM", 64)):
    for dtype, allowed in ((torch.float32, 1e-5), (torch.bfloat16, 2e-2)):
        scheme = with_group_size(preset(name), size)
        qvalue = torch.randint(-8, 8, (64, 256), generator=draw).to(torch.int8)
        scale = torch.rand(64, 256 // size, generator=draw) * 0.1 + 0.01
        zero = (
            None
            if name == "W4A16"
            else torch.randint(-8, 8, scale.shape, generator=draw).to(torch.int8)
        )
        weight = QTensor(qvalue=qvalue, scale=scale, zero_point=zero, scheme=scheme.weights)
        linear = QuantizedLinear(weight=weight, scheme=scheme)
        case = Case(scheme=scheme, device=torch.device("cpu"), shape=(64, 256), dtype=dtype)
        assert ipex.BACKEND.why_not(case) is None, ipex.BACKEND.why_not(case)
        x, bias = (
            torch.randn(2, 3, 256, generator=draw).to(dtype),
            torch.randn(64, generator=draw).to(dtype),
        )
        y = ipex.BACKEND.linear(x, ipex.BACKEND.prepare(linear, dtype), bias)
        expected = x.float() @ linear.dequantize().T + bias.float()
        error = float((y.float() - expected).abs().max() / expected.abs().max())
        print(name, size, dtype, error)
        assert y.dtype == dtype and y.shape == expected.shape and error < allowed, (
            name,
            size,
            dtype,
            error,
        )
"""
pytestmark = pytest.mark.slow


def in_environment(variable, *words, cwd=None):
    """The output of its Python, which imports quantflow from this repository."""
    if not os.environ.get(variable):
        pytest.skip(f"{variable} names no environment with intel-extension-for-pytorch")
    line = [str(Path(os.environ[variable]).absolute() / "bin" / "python"), *map(str, words)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        line, capture_output=True, text=True, check=False, env=environment, cwd=cwd
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.proof(
    formats="awq, gptq",
    direction="written",
    programs={"intel-extension-for-pytorch": "intel-extension-for-pytorch"},
    compared="products with 4-bit weights that it loaded as a low-precision checkpoint: within "
    "1e-5 of float32's largest",
    environment="IPEX_ENV",
)
@pytest.mark.parametrize(
    ("layout", "symmetric", "ordered"),
    [("gptq", True, False), ("gptq", False, False), ("gptq", False, True), ("awq", False, False)],
    ids=["gptq", "gptq with zero points", "gptq with desc_act", "awq"],
)
def test_the_extension_computes_from_our_tensors_what_the_weights_say(
    tmp_path, layout, symmetric, ordered
):
    found = named(integers(4, 32, symmetric=symmetric, where="a test"), None, "pack-quantized")
    generator, weights = torch.Generator().manual_seed(5), found.weights
    qvalue = torch.randint(-8, 8, (ROWS, COLUMNS), generator=generator).to(torch.int8)
    scale = 2.0 ** torch.randint(-6, -2, (ROWS, COLUMNS // 32), generator=generator)
    zero_point = (
        None if symmetric else torch.randint(-7, 8, scale.shape, generator=generator).to(torch.int8)
    )
    weight = QTensor(qvalue=qvalue, scale=scale, zero_point=zero_point, scheme=weights)
    linear = QuantizedLinear(weight=weight, scheme=found)
    packed = LAYOUTS[layout]
    if ordered:
        group_of = torch.arange(COLUMNS // 32).repeat_interleave(32)[
            torch.randperm(COLUMNS, generator=generator)
        ]
        linear, packed = (
            replace(linear, order=torch.argsort(group_of, stable=True)),
            packed.with_order(),
        )
    save_file(
        packed.encode("0", linear, scale_dtype=torch.float16), tmp_path / "packed.safetensors"
    )
    x = torch.randn(7, COLUMNS, generator=generator)
    save_file({"x": x}, tmp_path / "x.safetensors")
    asked = json.dumps([layout, ordered, ROWS, COLUMNS])
    in_environment("IPEX_ENV", "-c", SCRIPT, tmp_path, asked)
    expected = x @ linear.dequantize().T
    error = float(
        (load_file(tmp_path / "y.safetensors")["y"] - expected).abs().max() / expected.abs().max()
    )
    print(f"{layout}: largest difference {error:.2e} of the largest output")
    assert error < 1e-5


def test_the_backend_computes_what_the_weights_say():
    print(in_environment("IPEX_ENV", "-c", BACKEND))


@pytest.mark.parametrize("scheme", ["W4A16", "W4A16_ASYM"])
def test_an_artifact_runs_on_the_extension_and_writes_the_tokens_of_the_reference(tmp_path, scheme):
    """The whole of quantflow beside the extension's torch: rounded, exported, proved, run."""
    program = ("IPEX_ENV", "-m", "quantflow")
    asked = ("quantize", EXAMPLE, "-o", tmp_path / "a", "--scheme", scheme)
    in_environment(*program, *asked, "--algorithm", "rtn", "-q")
    asked = ("generate", tmp_path / "a", "--prompt", "def main(", "--max-new-tokens", "24", "-q")
    texts = {
        backend: in_environment(*program, *asked, "--backend", backend)
        for backend in ("ipex", "reference")
    }
    assert len(texts["ipex"]) > 20 and texts["ipex"] == texts["reference"]


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """The example in 4 bits, as folders of the layouts that IPEX takes."""
    folder = tmp_path_factory.mktemp("exported")
    for scheme, layouts in (("W4A16_ASYM", ("ipex", "gptq", "awq")), ("W4A16", ("gptq",))):
        asked = ("--scheme", scheme, "--group-size", "128", "--algorithm", "rtn", "-q")
        assert run("quantize", EXAMPLE, "-o", folder / scheme, *asked) == 0
        for layout in layouts:
            output = folder / f"{layout} of {scheme}"
            line = ("export", folder / scheme, "-o", output, "--format", layout, "-q")
            assert run(*line) == 0
    return folder


def assert_same_logits(
    variable, program, folder, tmp_path, *arguments, source=None, linears=LINEARS
):
    """Their logits, and how many linears they quantized, are ours of the folder.

    Args:
        variable: names the environment.
        program: what runs there, after LLAMA.
        folder: what quantflow runs.
        tmp_path: a folder for their logits.
        arguments: more for the program.
        source: the folder that it reads; None means `folder`.
        linears: how many quantized linears its model has.
    """
    output = tmp_path / "y.safetensors"
    words = ("-c", LLAMA + program, source or folder, output, *arguments)
    assert int(in_environment(variable, *words, cwd=tmp_path).split()[-1]) == linears
    theirs = load_file(output)["logits"]
    with torch.no_grad():
        ours = load(folder, decoder="transformers").model(torch.arange(2, 42)[None]).logits
    error = float((theirs - ours).abs().max() / ours.abs().max())
    print(f"{folder.name}: largest difference {error:.2e} of the largest logit")
    assert error < 1e-5


@pytest.mark.proof(
    formats="ipex",
    direction="written",
    programs={"intel-extension-for-pytorch": "intel-extension-for-pytorch"},
    compared="logits of the example from the file, which its loader takes, under the usual names "
    "and under others: within 1e-5 of float32's largest",
    environment="IPEX_2_1_ENV",
)
@pytest.mark.parametrize(
    "keys",
    [
        None,
        {
            "weight_key": "qweight",
            "scale_key": "scales",
            "zero_point_key": "qzeros",
            "bias_key": "bias",
        },
    ],
    ids=["usual names", "other names"],
)
def test_the_release_of_the_layout_computes_our_logits_from_the_file(exported, tmp_path, keys):
    folder = exported / "ipex of W4A16_ASYM"
    if keys is not None:
        folder = shutil.copytree(folder, tmp_path / "renamed")
        (path,) = folder.glob("*.pt")
        leaves = {KEYS[key]: keys[key] for key in KEYS}
        table = {}
        for name, tensor in torch.load(path, weights_only=True).items():
            owner, _, leaf = name.rpartition(".")
            table[f"{owner}.{leaves.get(leaf, leaf)}"] = tensor
        torch.save(table, path)
        (folder / "quant_config.json").write_text(json.dumps(keys))
    assert_same_logits("IPEX_2_1_ENV", LOAD_2_1, folder, tmp_path)


@pytest.mark.proof(
    formats="awq, gptq",
    direction="written",
    programs={"intel-extension-for-pytorch": "intel-extension-for-pytorch"},
    compared="logits of the example from the folder, which its loader takes whole, safetensors or "
    "a .pt file: within 1e-5 of float32's largest",
    environment="IPEX_LOADER_ENV",
)
@pytest.mark.parametrize(
    ("name", "pickled"),
    [
        ("gptq of W4A16", False),
        ("gptq of W4A16_ASYM", False),
        ("gptq of W4A16_ASYM", True),
        ("awq of W4A16_ASYM", False),
        ("awq of W4A16_ASYM", True),
    ],
    ids=["symmetric", "gptq", "gptq in .pt", "awq", "awq in .pt"],
)
def test_its_loader_takes_our_folder_and_computes_our_logits(exported, tmp_path, name, pickled):
    folder = exported / name
    if pickled:
        folder = shutil.copytree(folder, tmp_path / "pickled")
        torch.save(load_file(folder / "model.safetensors"), folder / "gptq_checkpoint.pt")
        for other in ("model.safetensors", "quantflow.json"):
            (folder / other).unlink(missing_ok=True)
    assert_same_logits("IPEX_LOADER_ENV", LOAD_2_8, folder, tmp_path, linears=FUSED)


@pytest.fixture
def unquantized(tmp_path):
    """The example's folder without weights, in which a program writes its checkpoint."""
    folder = tmp_path / "written"
    unwanted = shutil.ignore_patterns("*.safetensors", "*.py", "*.png", "training.json")
    return shutil.copytree(EXAMPLE, folder, ignore=unwanted)


@pytest.mark.proof(
    formats="ipex",
    direction="read",
    programs={
        "neural-compressor": "neural-compressor",
        "intel-extension-for-pytorch": "intel-extension-for-pytorch",
    },
    compared="logits of the example from the file that its GPTQ wrote, as its linears compute them "
    "and, without `gptq_perm`, the extension: within 1e-5 of float32's largest",
    environment="IPEX_2_1_ENV",
)
@pytest.mark.parametrize("ordered", [False, True], ids=["in order", "gptq_perm"])
def test_a_file_that_neural_compressor_wrote_for_it_has_its_logits(unquantized, tmp_path, ordered):
    write = ("IPEX_2_1_ENV", SOURCE + WRITE_2_1, unquantized, tmp_path, unquantized, ordered)
    assert_same_logits(*write, source=EXAMPLE)
    if not ordered:
        assert_same_logits("IPEX_2_1_ENV", LOAD_2_1, unquantized, tmp_path)
