"""Gaudi's toolkit itself, neural-compressor, on a CPU.

It measures, and we merge and derive; we write, and it takes what is written.

What it can do without a Gaudi is emulation by explicit quantize and dequantize, with four of its
scale methods. It lives in an environment of its own, whose folder NEURAL_COMPRESSOR_ENV names;
without it all of this is skipped.
"""

import itertools
import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from quantflow.core.device_scales import scale_from_amax, target, weight_scale
from quantflow.core.qtensor import QTensor, QuantizedLinear
from quantflow.core.scale_rules import SCALE_METHODS
from quantflow.core.scheme import named
from quantflow.formats import LAYOUTS
from quantflow.formats.gaudi.file_names import FileName, find_triples
from quantflow.formats.gaudi.gaudi_nodes import postprocess
from quantflow.formats.gaudi.scale_methods import method_config
from quantflow.formats.gaudi.scales import scales_from
from quantflow.formats.gaudi.triple import SCALES, Node, Triple, read_triple, write_triple
from quantflow.formats.ipex import IPEXLayout
from quantflow.formats.weight_layout import integers
from quantflow.runtime.load import load
from quantflow.stages.cli import cli
from quantflow.stages.cli.output import exit_code

pytestmark = pytest.mark.slow

VARIABLE, RELEASE = "NEURAL_COMPRESSOR_ENV", "3.10"
EMBEDDED = Path(__file__).resolve().parents[2] / "examples" / "tiny-llama"
METHODS = [
    "unit_scale",
    "maxabs_pow2",
    "maxabs_arbitrary",
    "act_maxabs_pow2_weights_pcs_maxabs_pow2",
]

# Runs in the other environment: a model of three linears, whose inputs differ from rank to rank.
TINY = """
import json, os, sys
import numpy as np
import torch
from torch import nn
from neural_compressor.torch.quantization import FP8Config, convert, finalize_calibration, prepare

torch.manual_seed(0)
torch.set_num_threads(1)


class Tiny(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.last = (
            nn.Linear(24, 40),
            nn.Linear(40, 24, bias=False),
            nn.Linear(24, 16),
        )

    def forward(self, x):
        return self.last(torch.relu(self.second(torch.relu(self.first(x)))))


def inputs(rank):
    generator = torch.Generator().manual_seed(10 + rank)
    return (torch.randn(6, 24, generator=generator) * (1 + 4 * rank)).bfloat16()


model = Tiny().bfloat16().eval()
options = json.loads(sys.argv[2])
config = FP8Config(observer="maxabs", use_qdq="True", **options)
with torch.no_grad():
    model = prepare(model, config) if sys.argv[1] == "measure" else convert(model, config)
    if sys.argv[1] == "measure":
        model(inputs(int(os.environ["LOCAL_RANK"])))
        finalize_calibration(model)
    else:
        found = {"logits": torch.cat([model(inputs(rank)) for rank in range(2)]).float().numpy()}
        for name, module in model.named_modules():
            if hasattr(module, "quant_input"):
                for key, scale in (
                    ("input", module.quant_input.scale),
                    ("weight", module.dequant_weights.scale),
                ):
                    found[f"{name}.{key}"] = (
                        torch.as_tensor(scale).detach().float().flatten().numpy()
                    )
        np.savez(sys.argv[3], **found)
"""

# A stock Llama with the files that `export --format inc` wrote: QUANT_CONFIG is all that it is
# told.
STOCK = """
import sys
import numpy as np
import torch
from transformers import AutoModelForCausalLM
from neural_compressor.torch.quantization import FP8Config, convert

torch.set_num_threads(1)
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.bfloat16).eval()
model = convert(model, FP8Config.from_json_file(sys.argv[2]))
patched = [
    name for name, module in model.named_modules() if type(module).__name__ == "PatchedLinear"
]
with torch.no_grad():
    logits = model(torch.arange(2, 42)[None]).logits
np.savez(sys.argv[3], logits=logits.float().numpy(), patched=np.array(patched))
"""


@pytest.fixture(scope="module")
def toolkit() -> Path:
    """The interpreter of an environment with neural-compressor and without quantflow.

    Without one the test is skipped; the message says how to make it.
    """
    folder = os.environ.get(VARIABLE, "")
    python = Path(folder).absolute() / "bin" / "python"
    how = (
        "python3 -m venv ENV; ENV/bin/pip install torch==2.13.0 transformers==5.23.0 "
        f"neural-compressor-pt=={RELEASE}"
    )
    if not folder:
        pytest.skip(
            f"{VARIABLE} does not name an environment with neural-compressor; make one: {how}"
        )
    ask = "from importlib.metadata import version; print(version('neural-compressor-pt'))"
    found = (
        subprocess.run([str(python), "-c", ask], capture_output=True, text=True, check=False)
        if python.exists()
        else None
    )
    version = "nothing" if found is None or found.returncode else found.stdout.strip()
    if version != RELEASE:
        pytest.skip(
            f"{VARIABLE}={folder} holds neural-compressor-pt {version}, {RELEASE} is needed: {how}"
        )
    return python


@pytest.fixture(scope="module")
def call(toolkit: Path) -> Callable[..., None]:
    """Run a program of the other environment in a folder."""

    def run(program: str, *arguments: object, cwd: Path, **variables: str) -> None:
        line = [str(toolkit), "-c", program, *map(str, arguments)]
        plain = {"PATH": "/usr/bin:/bin", "HOME": str(cwd), "OMP_NUM_THREADS": "1", **variables}
        result = subprocess.run(
            line, cwd=cwd, env=plain, capture_output=True, text=True, check=False
        )
        assert result.returncode == 0, result.stderr[-3000:]

    return run


@pytest.fixture(scope="module")
def measured(call: Callable[..., None], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two ranks of the toolkit measured, in one folder."""
    folder = tmp_path_factory.mktemp("measured")
    (folder / "both").mkdir()
    for rank in range(2):
        options = {"mode": "MEASURE", "dump_stats_path": f"{folder}/rank{rank}/measure"}
        # the toolkit moves away what another rank left in the same folder
        (folder / f"rank{rank}").mkdir()
        call(TINY, "measure", json.dumps(options), cwd=folder, LOCAL_RANK=str(rank), WORLD_SIZE="2")
        for path in (folder / f"rank{rank}").glob("measure_hooks_maxabs*"):
            path.rename(folder / "both" / path.name)
    return folder / "both"


def by_hand(measured: Path, output: Path) -> None:
    """Merge two ranks by the maximum, in a few lines of numpy."""
    tables = [
        np.load(measured / f"measure_hooks_maxabs_{rank}_2.npz", allow_pickle=True)["arr_0"].item()
        for rank in range(2)
    ]
    merged = tables[0]
    for name, node in tables[1]["Nodes"].items():
        ours = merged["Nodes"][name]
        ours["inputs"] = [
            np.maximum(a, b) for a, b in zip(ours["inputs"], node["inputs"], strict=True)
        ]
        ours["params"]["weight"] = np.maximum(ours["params"]["weight"], node["params"]["weight"])
    merged["LocalRank"] = -1
    output.mkdir()
    np.savez(output / "measure_hooks_maxabs.npz", merged)
    listed = json.loads((measured / "measure_hooks_maxabs_0_2.json").read_text())
    for name, node in merged["Nodes"].items():
        listed["Nodes"][name]["inputs"] = [value.tolist() for value in node["inputs"]]
        listed["Nodes"][name]["params"]["weight"] = node["params"]["weight"].tolist()
    listed["LocalRank"] = -1
    (output / "measure_hooks_maxabs.json").write_text(json.dumps(listed))


def quantize(folder: Path, method: str) -> str:
    """The options of convert."""
    return json.dumps(
        {"mode": "QUANTIZE", "scale_method": method, "dump_stats_path": f"{folder}/measure"}
    )


def run(*arguments: object) -> int:
    return exit_code(cli, [str(argument) for argument in arguments])


def unified(measured: Path, output: Path) -> Path:
    """Merge as a user does."""
    assert run("unify", "-g", "01", "-m", measured, "-o", output) == 0
    return output


def test_two_ranks_are_read_and_the_files_are_as_published(measured: Path) -> None:
    files = find_triples(measured)
    assert list(files) == [0, 1]
    ranks = [read_triple(found) for found in files.values()]
    assert [triple.local_rank for triple in ranks] == [0, 1]
    assert set(ranks[0].nodes) == {"first", "second", "last"} == set(ranks[0].modules)
    assert (
        ranks[0].nodes["first"].inputs[0].shape == (1, 1)
        and ranks[0].nodes["first"].weight is not None
    )
    assert ranks[1].nodes["first"].inputs[0] > ranks[0].nodes["first"].inputs[0]


@pytest.mark.proof(
    formats="inc",
    direction="both",
    programs={"neural-compressor": "neural-compressor-pt"},
    compared="logits of its model from files that unify merged, to the bit",
    environment="NEURAL_COMPRESSOR_ENV",
)
@pytest.mark.parametrize("method", METHODS)
def test_convert_takes_our_merged_files_and_computes_what_it_does_with_files_merged_by_hand(
    call: Callable[..., None], measured: Path, tmp_path: Path, method: str
) -> None:
    by_hand(measured, tmp_path / "theirs")
    unified(measured, tmp_path / "ours")
    for name in ("ours", "theirs"):
        call(
            TINY,
            "convert",
            quantize(tmp_path / name, method),
            tmp_path / f"{name}.npz",
            cwd=tmp_path,
        )
    ours, theirs = (np.load(tmp_path / f"{name}.npz")["logits"] for name in ("ours", "theirs"))
    assert np.array_equal(ours, theirs) and np.isfinite(ours).all() and ours.std() > 0
    print(f"\n{method}: {ours.size} logits equal, the largest {abs(ours).max():.4f}")


# The toolkit's own rounding to the hardware's scales, and its searches, which look for a device
# only to put the weight there.
RULES = """
import sys
import numpy as np
import torch
from neural_compressor.torch.algorithms.fp8_quant._core import fp_utils
from neural_compressor.torch.algorithms.fp8_quant._core.scale_methods import (
    round_scales_function as rounding,
)
from neural_compressor.torch.utils.auto_accelerator import INCAcceleratorType

to = torch.Tensor.to
torch.Tensor.to = lambda self, *args, **kwargs: (
    self if args == ("hpu",) else to(self, *args, **kwargs)
)
given, found = np.load(sys.argv[1]), {}
maxima, weight = torch.from_numpy(given["maxima"]), torch.from_numpy(given["weight"])
for device, kind in (("gaudi2", INCAcceleratorType.GAUDI2), ("gaudi3", INCAcceleratorType.GAUDI3)):
    largest = fp_utils.get_fullscale(torch.float8_e4m3fn, kind)
    fp_utils.cast_to_fp8_fcn = lambda x, dtype: x.clamp(-largest, largest).to(dtype)
    pow2, hardware = rounding.ScaleToPow2(), rounding.ScaleToHwAligned(kind)
    for side, backoff in (("activation", 0.25), ("weight", 0.5)):
        raw = fp_utils.calc_scale_from_maxabs(maxima.bfloat16(), largest, backoff)
        found[f"{device}.{side}.maxabs_pow2"] = pow2.calc(raw).float().numpy()
        found[f"{device}.{side}.maxabs_hw"] = hardware.calc(raw).float().numpy()
    lists = {
        "maxabs_hw_opt_weight": fp_utils.get_fp8_hw_alligned_scales_by_device(
            torch.float8_e4m3fn, kind
        ),
        "maxabs_pow2_opt_weight": [2.0**s for s in range(-10, 10)],
    }
    for method, candidates in lists.items():
        best = fp_utils.mmse_scale(
            weight, [torch.tensor(s) for s in candidates], torch.float8_e4m3fn, torch.float32
        )
        found[f"{device}.{method}"] = np.float32(best.item())
    reference = pow2.calc(weight.abs().amax(dim=1) / (largest * 0.5))
    best = fp_utils.mmse_scale_multi(
        weight.t(), reference, [2.0**s for s in range(-3, 5)], torch.float8_e4m3fn, torch.float32
    )
    found[f"{device}.act_maxabs_hw_weights_pcs_opt_pow2"] = pow2.calc(best.flatten()).numpy()
np.savez(sys.argv[2], **found)
"""


def test_rounding_to_the_hardwares_scales_and_searches_are_the_toolkits(
    call: Callable[..., None], tmp_path: Path
) -> None:
    """Its functions run on a CPU where its scale methods do not."""
    generator = torch.Generator().manual_seed(0)
    maxima = torch.exp2(torch.rand(20_000, generator=generator) * 40 - 20).bfloat16().float()
    weight = torch.randn(48, 64, generator=generator) * torch.exp2(
        torch.randint(-6, 3, (48, 1), generator=generator)
    )
    np.savez(tmp_path / "given.npz", maxima=maxima.numpy(), weight=weight.numpy())
    call(RULES, tmp_path / "given.npz", tmp_path / "found.npz", cwd=tmp_path)
    with np.load(tmp_path / "found.npz") as archive:
        found = dict(archive)
    for device in ("gaudi2", "gaudi3"):
        goal = target(device)
        for side in ("activation", "weight"):
            for method in ("maxabs_pow2", "maxabs_hw"):
                rule = getattr(SCALE_METHODS[method], side)
                ours = scale_from_amax(maxima, rule, target=goal, arithmetic="BF16")
                assert np.array_equal(ours.numpy(), found.pop(f"{device}.{side}.{method}")), (
                    device,
                    side,
                    method,
                )
        for method in (
            "maxabs_hw_opt_weight",
            "maxabs_pow2_opt_weight",
            "act_maxabs_hw_weights_pcs_opt_pow2",
        ):
            ours = weight_scale(weight, SCALE_METHODS[method].weight, target=goal)
            assert np.array_equal(ours.numpy(), found.pop(f"{device}.{method}")), (device, method)
    assert not found


KINDS = """
import json, sys
from types import SimpleNamespace
import torch
from neural_compressor.torch.algorithms.fp8_quant._core.common import ModuleConfig
from neural_compressor.torch.algorithms.fp8_quant._core.patching_common import _mod_types
from neural_compressor.torch.algorithms.fp8_quant._core.scale_methods import (
    ops_quantizer,
    scale_method_config,
)
from neural_compressor.torch.utils.auto_accelerator import INCAcceleratorType

given, found = json.loads(sys.argv[1]), {}
words = {"dynamic_quantization": False, "scale_format": None, "use_qdq": False, "fake_quant": False}
words |= {
    "device_for_scales": INCAcceleratorType.GAUDI2,
    "mod_dict": {kind: kind for kind in _mod_types},
}
module = SimpleNamespace(__hqt_config__=SimpleNamespace(cfg=words))
params = {"hp_dtype": torch.bfloat16, "lp_dtype": torch.float8_e4m3fn}
for method in json.loads(sys.argv[2]):
    chosen = scale_method_config.scale_method_config_mapping[
        scale_method_config.ScaleMethodString[method.upper()]
    ]
    for kind, values in given.items():
        seen = ModuleConfig(
            *([torch.tensor([[value]]).bfloat16() for value in part] for part in values)
        )
        made = ops_quantizer.get_op_quantizer(
            chosen, module, seen, params, kind
        ).get_scales_module_config()
        found[f"{method} {kind}"] = [
            [float(value) for value in part] for part in (made.inputs, made.outputs)
        ]
open("found.json", "w").write(json.dumps(found))
"""
OF_KIND = {  # of the toolkit's -> a name, and the maxima of inputs and outputs
    "kv_cache": ("self_attn.k_cache", ([50.0], [])),
    "matmul": ("self_attn.matmul_qk", ([1.0, 50.0], [])),
    "b2b_matmul": ("self_attn.attn.impl.batch2block_matmul", ([1.0, 50000.0], [7.0])),
    "softmax": ("self_attn.attn.impl.softmax", ([300.0], [1.0])),
    "fused_sdpa": (
        "self_attn.fused_scaled_dot_product_attention",
        ([10.0, 2000.0, 3.0], [2.5, 0.9]),
    ),
}


def test_modules_without_weights_have_the_scales_that_the_toolkit_computes(
    call: Callable[..., None], tmp_path: Path
) -> None:
    """Its classes compute those of Gaudi2 on a CPU where no module of theirs runs."""
    methods = [
        "unit_scale",
        "hw_aligned_single_scale",
        "maxabs_hw",
        "maxabs_pow2",
        "maxabs_arbitrary",
    ]
    call(
        KINDS,
        json.dumps({kind: values for kind, (_, values) in OF_KIND.items()}),
        json.dumps(methods),
        cwd=tmp_path,
    )
    found = json.loads((tmp_path / "found.json").read_text())
    for method, (kind, (name, (inputs, outputs))) in itertools.product(methods, OF_KIND.items()):
        seen = (tuple(torch.tensor([[value]]) for value in part) for part in (inputs, outputs))
        node = {name: Node(**dict(zip(("inputs", "outputs"), seen, strict=True)))}
        ours = scales_from(node, method_config(method), target=target("gaudi2"), arithmetic="BF16")[
            name
        ]
        theirs = found.pop(f"{method} {kind}")
        assert [
            [float(value) for value in part] for part in (ours.inputs, ours.outputs)
        ] == theirs, (method, kind)
    assert not found


WEIGHTS = """
import sys, torch

exec(sys.argv[1].split("model = Tiny()")[0])
torch.save(
    {
        name: p.detach().bfloat16()
        for name, p in Tiny().named_parameters()
        if name.endswith("weight")
    },
    sys.argv[2],
)
"""


@pytest.fixture(scope="module")
def weights(
    call: Callable[..., None], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, torch.Tensor]:
    """The weights of the other environment's model."""
    folder = tmp_path_factory.mktemp("weights")
    call(WEIGHTS, TINY, folder / "weights.pt", cwd=folder)
    found: dict[str, torch.Tensor] = torch.load(folder / "weights.pt", weights_only=True)
    return found


@pytest.mark.parametrize("method", METHODS)
def test_scales_are_equal_to_the_bit_and_convert_takes_ours(
    call: Callable[..., None],
    measured: Path,
    weights: dict[str, torch.Tensor],
    tmp_path: Path,
    method: str,
) -> None:
    """The toolkit derives scales from our merged maxima, as we do; then it runs on ours alone."""
    folder = unified(measured, tmp_path / "ours")
    call(TINY, "convert", quantize(folder, method), tmp_path / "derived.npz", cwd=tmp_path)
    maxima = read_triple(find_triples(folder)[0])
    ours = scales_from(
        maxima.nodes,
        method_config(method),
        target=target("cpu"),
        arithmetic="BF16",
        read_weight=lambda name: weights[f"{name}.weight"],
    )
    derived = np.load(tmp_path / "derived.npz")
    for name, node in ours.items():  # what its modules hold
        assert node.weight is not None
        assert np.array_equal(derived[f"{name}.input"], node.inputs[0].flatten().numpy()), name
        assert np.array_equal(derived[f"{name}.weight"], node.weight.flatten().numpy()), name
    if method == "unit_scale":  # it keeps no file of scales that depend on nothing
        assert not list(folder.glob("*UNIT_SCALE*"))
        return

    (files,) = find_triples(folder, method=method.upper()).values()
    theirs = read_triple(files)
    assert ours.keys() == theirs.nodes.keys()
    for name, node in ours.items():
        expected = theirs.nodes[name].tensors
        assert node.tensors.keys() == expected.keys(), name
        for key, value in node.tensors.items():
            assert torch.equal(value, expected[key]), (name, key)
    for path in folder.glob(f"{files.name.stem}*"):
        path.unlink()
    write_triple(folder, files.name, Triple(nodes=ours, mode=SCALES, local_rank=maxima.local_rank))
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    call(TINY, "convert", quantize(folder, method), tmp_path / "taken.npz", cwd=tmp_path)
    assert np.array_equal(np.load(tmp_path / "taken.npz")["logits"], derived["logits"])
    # it had nothing to derive
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before

    doubled = {name: replace(node, inputs=(node.inputs[0] * 2,)) for name, node in ours.items()}
    write_triple(
        folder, files.name, Triple(nodes=doubled, mode=SCALES, local_rank=maxima.local_rank)
    )
    call(TINY, "convert", quantize(folder, method), tmp_path / "doubled.npz", cwd=tmp_path)
    # so it does read them
    assert np.load(tmp_path / "doubled.npz")["first.input"] == 2 * derived["first.input"]


def test_the_toolkits_postprocessing_changes_what_ours_does(toolkit: Path, tmp_path: Path) -> None:
    attention = "model.layers.0.self_attn.attn.impl"
    cells = {value: torch.tensor([[value]]) for value in (1.0, 2.5, 3.0, 4.0, 0.1)}
    nodes = {
        f"{attention}.matmul_qk": Node(inputs=(cells[1.0], cells[2.5])),
        f"{attention}.matmul_av": Node(inputs=(cells[1.0], cells[3.0])),
        f"{attention}.k_cache": Node(inputs=(cells[4.0],)),
        f"{attention}.v_cache": Node(inputs=(cells[0.1],)),
        "lm_head": Node(inputs=(cells[1.0],), weight=cells[3.0]),
    }
    name = FileName(prefix="inc_output", rank=0, world=1)
    (tmp_path / "in").mkdir()
    write_triple(tmp_path / "in", name, Triple(nodes=nodes, local_rank=0))
    package = (
        "neural_compressor.torch.algorithms.fp8_quant.scripts.postprocessing_vllm_measurements"
    )
    line = [
        str(toolkit),
        "-m",
        package,
        "-m",
        str(tmp_path / "in"),
        "-o",
        str(tmp_path / "out"),
        "-k",
    ]
    subprocess.run(line, check=True, capture_output=True, cwd=tmp_path)
    theirs = read_triple(find_triples(tmp_path / "out")[0]).nodes
    ours = postprocess(nodes)
    assert theirs.keys() == ours.keys()
    for node, content in ours.items():
        expected = theirs[node].tensors
        assert {key: value.tolist() for key, value in content.tensors.items()} == {
            key: value.tolist() for key, value in expected.items()
        }


# Every static method on a small model: which of them a CPU can run.
EVERY = """
import copy, json, sys
import torch
from torch import nn
from neural_compressor.torch.quantization import FP8Config, convert, finalize_calibration, prepare

torch.set_num_threads(1)
base, x = (
    nn.Sequential(nn.Linear(24, 40), nn.Linear(40, 24)).bfloat16().eval(),
    torch.ones(2, 24).bfloat16(),
)
options = {"observer": "maxabs", "use_qdq": "True", "dump_stats_path": "./stats/measure"}
with torch.no_grad():
    model = prepare(copy.deepcopy(base), FP8Config(mode="MEASURE", **options))
    model(x)
    finalize_calibration(model)
    ran = []
    for method in json.loads(sys.argv[1]):
        try:
            convert(
                copy.deepcopy(base), FP8Config(mode="QUANTIZE", scale_method=method, **options)
            )(x)
            ran.append(method)
        except (
            KeyError,
            ModuleNotFoundError,
        ):  # no hardware scales of a CPU, and a search that runs on the device
            pass
open("ran.json", "w").write(json.dumps(ran))
"""


def test_these_are_all_the_methods_that_run_without_a_gaudi(
    call: Callable[..., None], tmp_path: Path
) -> None:
    static = [name for name, method in SCALE_METHODS.items() if not method.dynamic]
    (tmp_path / "stats").mkdir()
    call(EVERY, json.dumps(static), cwd=tmp_path)
    assert json.loads((tmp_path / "ran.json").read_text()) == METHODS and len(static) == 11


@pytest.fixture(scope="module")
def embedded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What we measured of the model that is in this repository, on the source of Python itself."""
    folder = tmp_path_factory.mktemp("embedded")
    text = [sys.executable, str(EMBEDDED / "stdlib_text.py"), "--output", str(folder / "text")]
    subprocess.run(text, check=True, capture_output=True)
    line = (
        "--calibration",
        folder / "text" / "calibration.jsonl",
        "--samples",
        "8",
        "--sequence-length",
        "256",
    )
    assert (
        run(
            "measure",
            EMBEDDED,
            "-o",
            folder / "measured",
            *line,
            "--quant-config",
            "maxabs_measure",
        )
        == 0
    )
    return folder / "measured"


# One of two ranks, each with the whole model and text of its own, as QUANT_CONFIG says.
WEIGHT_ONLY = """
import json, sys, torch
from safetensors.torch import load_file, save_file
from neural_compressor.torch.algorithms.weight_only.modules import INCWeightOnlyLinear


def module(rows, columns, size, pointed):
    told = {
        "use_optimum_format": False,
        "compression_dim": 1,
        "compression_dtype": torch.int32,
        "scale_dtype": torch.float32,
    }
    return INCWeightOnlyLinear(columns, rows, bits=4, group_size=size, zp=pointed, **told)


ours, found = load_file("ours.safetensors"), {}
for name, (rows, columns, size, pointed) in json.loads(sys.argv[1]).items():
    made = module(rows, columns, size, True)
    made.qweight.copy_(ours[f"{name}.packed_weight"])
    made.scales.copy_(ours[f"{name}.scale"].float())
    made.qzeros.copy_(ours[f"{name}.packed_zp"])
    found[f"{name}.recovered"] = made.recover().float()
    integers, points = (
        ours[f"{name}.integers"].to(torch.int32),
        ours[f"{name}.points"].to(torch.int32),
    )
    again = module(rows, columns, size, pointed)
    again.pack(
        integers if pointed else integers - 8,
        ours[f"{name}.scale"].float(),
        points if pointed else None,
        None,
    )
    found |= {f"{name}.packed_weight": again.qweight, f"{name}.scale": again.scales.half()}
    found |= {f"{name}.packed_zp": again.qzeros} if pointed else {}
    found[f"{name}.again"] = again.recover().float()
save_file(
    {name: tensor.contiguous().clone() for name, tensor in found.items()}, "theirs.safetensors"
)
"""


@pytest.mark.proof(
    formats="ipex",
    direction="both",
    programs={"neural-compressor": "neural-compressor-pt"},
    compared="weights that its weight-only linear recovers from our tensors, and ours from those "
    "that it packs, bit for bit: "
    "words, scales and zero points, symmetric and not, per group and row",
    environment="NEURAL_COMPRESSOR_ENV",
)
def test_its_weight_only_linear_recovers_our_weights_and_packs_what_we_read(
    call: Callable[..., None], tmp_path: Path
) -> None:
    rows, tensors, expected, generator = {}, {}, {}, torch.Generator().manual_seed(1)
    for size, pointed in itertools.product((32, 24, -1), (True, False)):
        name, columns = f"{size}-{pointed}".replace("-1", "row"), 96
        scheme = named(
            integers(4, size, symmetric=not pointed, where="a test"), None, "pack-quantized"
        )
        groups = 1 if size == -1 else columns // size
        qvalue = torch.randint(-8, 8, (40, columns), generator=generator).to(torch.int8)
        scale = 2.0 ** torch.randint(-9, 3, (40, groups), generator=generator)
        zero_point = (
            torch.randint(-8, 8, scale.shape, generator=generator).to(torch.int8)
            if pointed
            else None
        )
        weight = QTensor(qvalue=qvalue, scale=scale, zero_point=zero_point, scheme=scheme.weights)
        linear = QuantizedLinear(weight=weight, scheme=scheme)
        tensors |= LAYOUTS["ipex"].encode(name, linear, scale_dtype=torch.float16)
        points = torch.zeros_like(scale) if zero_point is None else zero_point
        tensors |= {f"{name}.integers": qvalue + 8, f"{name}.points": (points + 8).to(torch.int8)}
        rows[name], expected[name] = (
            [40, columns, columns if size == -1 else size, pointed],
            (linear, scheme),
        )
    save_file(tensors, tmp_path / "ours.safetensors")
    call(WEIGHT_ONLY, json.dumps(rows), cwd=tmp_path)
    theirs = load_file(tmp_path / "theirs.safetensors")
    for name, (linear, scheme) in expected.items():
        assert torch.equal(theirs[f"{name}.recovered"], linear.dequantize()), name
        assert torch.equal(theirs[f"{name}.again"], linear.dequantize()), name
        read = IPEXLayout(bare=scheme.weights.symmetric).decode(name, theirs, scheme)
        assert torch.equal(read.weight.qvalue, linear.weight.qvalue) and torch.equal(
            read.dequantize(), linear.dequantize()
        )
        if not scheme.weights.symmetric:
            assert torch.equal(theirs[f"{name}.packed_weight"], tensors[f"{name}.packed_weight"])
            assert torch.equal(theirs[f"{name}.packed_zp"], tensors[f"{name}.packed_zp"])


RANK = """
import os, sys
import torch
from transformers import AutoModelForCausalLM
from neural_compressor.torch.quantization import FP8Config, finalize_calibration, prepare

torch.set_num_threads(1)
rank = int(os.environ["LOCAL_RANK"])
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.bfloat16).eval()
model = prepare(model, FP8Config.from_json_file(os.environ["QUANT_CONFIG"]))
with torch.no_grad():
    model(
        torch.randint(
            model.config.vocab_size, (1, 64), generator=torch.Generator().manual_seed(rank)
        )
    )
finalize_calibration(model)
"""


@pytest.mark.proof(
    formats="inc",
    direction="read",
    programs={"neural-compressor": "neural-compressor-pt"},
    compared="its measurement on two ranks, unified and quantized here with its QUANT_CONFIG",
    environment="NEURAL_COMPRESSOR_ENV",
)
def test_what_the_toolkit_measured_on_two_ranks_is_unified_and_quantized_with_its_own_configuration(
    call: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A user's way: a QUANT_CONFIG to measure with the toolkit, unify, and one to quantize here."""
    (tmp_path / "hqt_output").mkdir()
    for rank in range(2):
        (tmp_path / f"rank{rank}" / "hqt_output").mkdir(parents=True)
        config = {
            "mode": "MEASURE",
            "observer": "maxabs",
            "use_qdq": True,
            "dump_stats_path": "./hqt_output/measure",
        }
        (tmp_path / f"rank{rank}" / "measure.json").write_text(
            json.dumps(config | {"blocklist": {"names": ["lm_head"]}})
        )
        variables = {"QUANT_CONFIG": "measure.json", "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
        call(RANK, EMBEDDED, cwd=tmp_path / f"rank{rank}", **variables)
        for path in (tmp_path / f"rank{rank}" / "hqt_output").glob("measure_hooks_maxabs*"):
            path.rename(tmp_path / "hqt_output" / path.name)
    monkeypatch.chdir(tmp_path)
    assert run("unify", "-g", "01", "-m", "hqt_output", "-o", "unified") == 0
    ranks = [read_triple(files).nodes for files in find_triples(Path("hqt_output")).values()]
    merged = read_triple(find_triples(Path("unified"))[0]).nodes
    assert len(merged) == 28
    for name, node in merged.items():
        assert node.inputs[0] == max(nodes[name].inputs[0] for nodes in ranks), name
    Path("quant.json").write_text(
        json.dumps({"dump_stats_path": "./unified/measure", "device_for_scales": "GAUDI2"})
    )
    monkeypatch.setenv("QUANT_CONFIG", "quant.json")
    assert run("quantize", EMBEDDED, "-o", "quantized") == 0
    schemes = json.loads(Path("quantized/quantize.json").read_text())["plan"]["schemes"]
    assert {scheme["weights"]["float8"] for scheme in schemes.values()} == {
        "gaudi2"
    } and schemes.keys() == merged.keys()
    layer = load_file("quantized/layers/00000.safetensors")
    key = next(key for key in layer if "o_proj" in key and "input_scale" in key)
    # of maxabs_hw
    raw = (merged["model.layers.0.self_attn.o_proj"].inputs[0].max().bfloat16() / 60).float().item()
    assert layer[key].item() == 2.0 ** min(
        4, max(-8, 4 * math.ceil(math.ceil(math.log2(raw) - 1e-9) / 4))
    )


@pytest.mark.proof(
    formats="inc",
    direction="written",
    programs={"neural-compressor": "neural-compressor-pt"},
    compared="the scales that it computes from our maxima, to the bit; every linear found under "
    "its name",
    environment="NEURAL_COMPRESSOR_ENV",
)
@pytest.mark.parametrize("method", METHODS)
def test_our_measurement_of_the_embedded_model_converts_there_and_the_scales_it_computes_are_ours(
    call: Callable[..., None], embedded: Path, tmp_path: Path, method: str
) -> None:
    """Every linear of the decoder layers has its name; its scales come from our maxima alone."""
    given = {"mode": "QUANTIZE", "use_qdq": True, "scale_method": method}
    (tmp_path / "given.json").write_text(json.dumps(given))
    inc = (
        "--format",
        "inc",
        "--device",
        "cpu",
        "--quant-config",
        tmp_path / "given.json",
        "--model",
        EMBEDDED,
    )
    assert run("export", embedded, "-o", tmp_path / "gaudi", *inc) == 0
    ours = tmp_path / "ours"
    ours.mkdir()
    for path in (tmp_path / "gaudi" / "hqt_output").glob(f"*_{method.upper()}.*"):
        shutil.move(path, ours / path.name)
    call(
        STOCK,
        EMBEDDED,
        "quantization_config/given.json",
        tmp_path / "found.npz",
        cwd=tmp_path / "gaudi",
    )
    with np.load(tmp_path / "found.npz") as found:
        logits, patched = found["logits"], found["patched"].tolist()
    linears = [
        name
        for name in read_triple(find_triples(tmp_path / "gaudi" / "hqt_output")[0]).nodes
        if name.endswith("_proj")
    ]
    assert sorted(patched) == sorted(linears) and len(patched) == 28

    if method == "unit_scale":  # it keeps no file of scales that depend on nothing
        assert not list(ours.iterdir()) and not list(
            (tmp_path / "gaudi" / "hqt_output").glob("*UNIT_SCALE*")
        )
    else:
        expected, computed = (
            read_triple(find_triples(folder, method=method.upper())[0]).nodes
            for folder in (ours, tmp_path / "gaudi" / "hqt_output")
        )
        # a stock model has neither caches nor products of its own
        assert sorted(computed) == sorted(linears)
        for name, node in computed.items():
            for key, value in node.tensors.items():
                assert torch.equal(value, expected[name].tensors[key]), (name, key)
        values = sum(value.numel() for node in computed.values() for value in node.tensors.values())
        print(f"\n{method}: {len(computed)} linears, {values} scales equal to the bit")
    model = AutoModelForCausalLM.from_pretrained(EMBEDDED, dtype=torch.float32).eval()
    with torch.no_grad():
        plain = model(torch.arange(2, 42)[None]).logits.numpy()
    error = np.linalg.norm(logits - plain) / np.linalg.norm(plain)
    print(f"{method}: logits {error:.4f} from the model's own")
    assert error < (0.6 if method == "unit_scale" else 0.2), error


# Modules of vLLM's mixture under the classes by which the toolkit knows them. Without a Gaudi its
# tables lack them, and there is no kernel: what it reads, derives and quantizes is its own.
MIXTURE = """
import json, os, sys
import numpy as np
import torch
from safetensors.torch import load_file
from torch import nn
from neural_compressor.torch.algorithms.fp8_quant._core import patching_common
from neural_compressor.torch.algorithms.fp8_quant._quant_common import helper_modules
from neural_compressor.torch.quantization import FP8Config, convert

torch.set_num_threads(1)
for name in ("VllmMixtureOfExpertsOp", "MoeMatmul"):
    patching_common.mod_default_dict[name] = patching_common._mod_default_dict[name]
patching_common.mod_types["dynamic_moe"] = patching_common._mod_types["dynamic_moe"]
kernels = helper_modules.get_quantized_func_wrapper
helper_modules.get_quantized_func_wrapper = lambda kind, *rest, **options: (
    None if "MOE" in kind.name else kernels(kind, *rest, **options)
)


class MoeMatmul(nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.weight = nn.Parameter(weight.bfloat16(), requires_grad=False)


class VllmMixtureOfExpertsOp(nn.Module):
    def __init__(self, experts):
        super().__init__()
        self.num_experts, self.experts_min, self.experts_max = len(experts), 0, len(experts) - 1
        self.w13_list = nn.ModuleList(MoeMatmul(torch.cat([w1, w3])) for w1, w3, w2 in experts)
        self.w2_list = nn.ModuleList(MoeMatmul(w2) for w1, w3, w2 in experts)

    def forward(self, *_, **__):
        raise NotImplementedError


class Block(nn.Module):
    def __init__(self, operator):
        super().__init__()
        self.gate = nn.Linear(4, 4, bias=False)
        self.experts = nn.Module()
        self.experts.moe_op = operator


tensors = load_file(os.path.join(sys.argv[1], "model.safetensors"))
model = nn.Module()
model.model = nn.Module()
model.model.layers = nn.ModuleList(nn.Module() for _ in range(2))
for index, layer in enumerate(model.model.layers):
    prefix = f"model.layers.{index}.block_sparse_moe.experts"
    experts = [
        [tensors[f"{prefix}.{number}.{leaf}.weight"] for leaf in ("w1", "w3", "w2")]
        for number in range(4)
    ]
    layer.block_sparse_moe = Block(VllmMixtureOfExpertsOp(experts))
model = convert(model, FP8Config.from_json_file(sys.argv[2]))
found = {}
for name, module in model.named_modules():
    kind = type(module).__name__
    if kind == "PatchedVllmMixtureOfExpertsOp":
        scales = [module.scale_input, *module.scale_intermediate]
        found[name] = np.array([float(scale) for scale in scales], dtype=np.float32)
    elif kind == "PatchedMoeMatmul":
        found[name] = np.array([float(module.dequant_weights.scale)], dtype=np.float32)
    elif "gate" in name or "Unmeasured" in kind:
        found[f"{name}: {kind}"] = np.zeros(1)
np.savez(sys.argv[3], **found)
"""


@pytest.mark.parametrize("method", ["maxabs_pow2", "maxabs_arbitrary"])
def test_a_mixtures_files_are_read_there_and_its_scales_are_ours(
    call: Callable[..., None],
    family_model: Callable[[str], Path],
    text_files: dict[str, Path],
    tmp_path: Path,
    method: str,
) -> None:
    """Every expert of vLLM's operator has its own scale; none is taken for one not measured."""
    model = family_model("mixtral")
    line = ("--calibration", text_files["calibration"], "--samples", "4", "--stats", "amax")
    assert run("measure", model, "-o", tmp_path / "m", *line) == 0
    config = tmp_path / "given.json"
    config.write_text(json.dumps({"mode": "QUANTIZE", "scale_method": method, "use_qdq": True}))
    options = ("--format", "inc", "--device", "cpu", "--quant-config", config)
    assert run("export", tmp_path / "m", "-o", tmp_path / "gaudi", *options) == 0
    vllm = tmp_path / "gaudi" / "vllm"
    scales = {}
    for source in ("ours", "theirs"):
        if source == "theirs":  # it derives them from the maxima
            for path in (vllm / "cpu").glob(f"*{method.upper()}*"):
                path.unlink()
        call(
            MIXTURE,
            model,
            vllm / "given_cpu.json",
            tmp_path / f"{source}.npz",
            cwd=vllm,
            LOCAL_RANK="0",
            WORLD_SIZE="1",
        )
        with np.load(tmp_path / f"{source}.npz") as archive:
            scales[source] = {name: archive[name].tolist() for name in archive.files}
    assert scales["ours"] == scales["theirs"]
    routers = [name for name in scales["ours"] if ":" in name]
    assert routers == [f"model.layers.{n}.block_sparse_moe.gate: Linear" for n in range(2)]
    nodes = read_triple(find_triples(vllm / "cpu")[0]).nodes
    operators = [name for name in scales["ours"] if name.endswith("moe_op")]
    assert len(operators) == 2 and len(scales["ours"]) == 2 * (1 + 1 + 2 * 4)
    goal = target("cpu")
    for name, found in scales["ours"].items():
        if name in routers:
            continue
        rule = SCALE_METHODS[method]
        node = nodes[name]
        assert node.weight is not None or name in operators
        maxima, of = (
            ((*node.inputs, *node.outputs[1:]), rule.activation)
            if node.weight is None
            else ((node.weight,), rule.weight)
        )
        expected = [
            scale_from_amax(value.max(), of, target=goal, arithmetic="BF16").item()
            for value in maxima
        ]
        assert found == expected


# Its 4-bit weights as it saves them, packed along the inputs under names of its own.
SAVED = """
import sys
import torch
from transformers import AutoModelForCausalLM
from neural_compressor.torch.algorithms.weight_only.rtn import RTNQuantizer

torch.set_num_threads(1)
asked = dict(
    dtype="int", bits=4, scheme="asym", group_size=128, group_dim=1, use_full_range=False,
    use_mse_search=False, use_double_quant=False, double_quant_dtype="int", double_quant_bits=8,
    double_quant_scheme="sym", double_quant_group_size=256,
)
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32).eval()
names = [name for name, _ in model.named_modules() if name.endswith("_proj")]
model = RTNQuantizer(quant_config={name: dict(asked) for name in names}).quantize(
    model, use_optimum_format=False
)
torch.save(model.state_dict(), "quantized_weight.pt")
with torch.no_grad():
    logits = model(torch.arange(2, 42)[None]).logits.float()
torch.save({"logits": logits.contiguous()}, "logits")
"""


@pytest.mark.proof(
    formats="ipex",
    direction="read",
    programs={"neural-compressor": "neural-compressor-pt"},
    compared="logits of the example, from the .pt file that it saves, packed along the inputs "
    "under names of its own: within 1e-4",
    environment="NEURAL_COMPRESSOR_ENV",
)
def test_a_folder_around_the_file_that_it_saves_computes_its_logits(
    call: Callable[..., None], tmp_path: Path
) -> None:
    folder = tmp_path / "folder"
    unwanted = shutil.ignore_patterns("*.safetensors", "*.py", "*.png", "training.json")
    shutil.copytree(EMBEDDED, folder, ignore=unwanted)
    call(SAVED, EMBEDDED, cwd=folder)
    (folder / "logits").rename(tmp_path / "logits")
    config = {"weight_key": "qweight", "scale_key": "scales", "zero_point_key": "qzeros"}
    (folder / "quant_config.json").write_text(json.dumps(config))
    with torch.no_grad():
        ours = load(folder, decoder="transformers").model(torch.arange(2, 42)[None]).logits
    theirs = torch.load(tmp_path / "logits", weights_only=True)["logits"]
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)
