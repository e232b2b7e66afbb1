"""Damage to folders of other programs, of each kind and in each layout.

It is refused by name, before any token.
"""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from quantflow.core.scheme import LinearScheme, named, preset, with_group_size
from quantflow.formats.weight_layout import integers
from quantflow.stages.cli import cli
from quantflow.stages.cli.output import exit_code

pytestmark = pytest.mark.slow

DOWN = "model.layers.1.mlp.down_proj"
UP = "model.layers.1.mlp.up_proj"


def grouped(bits: int, *, symmetric: bool = True) -> LinearScheme:
    return named(integers(bits, 32, symmetric=symmetric, where="a test"), None, "pack-quantized")


@dataclass(frozen=True)
class Case:
    """A layout with what its damages are called.

    Attributes:
        scale: what is missing.
        order: groups of inputs, where the layout has them.
        swapped: words whose nibbles swap so that codes and zero points stand in different orders;
            None where nothing shows it.
        bits: another number of bits, as a path of keys in quantization_config and a value; None
            where it has no such key.
    """

    layout: str
    scheme: LinearScheme
    scale: str
    order: str | None = None
    swapped: str | None = None
    bits: tuple[tuple[str, ...], int] | None = None


WEIGHTS = ("config_groups", "group_0", "weights", "num_bits")
CASES = {
    "gptq": Case("gptq", grouped(4), "scales", "g_idx", None, (("bits",), 8)),
    "gptq asymmetric": Case(
        "gptq", grouped(4, symmetric=False), "scales", "g_idx", "qzeros", (("bits",), 3)
    ),
    "gptq 3 bits": Case("gptq", grouped(3), "scales", "g_idx", None, (("bits",), 4)),
    "gptq_v2": Case(
        "gptq_v2", grouped(4, symmetric=False), "scales", "g_idx", "qzeros", (("bits",), 2)
    ),
    "gptq_v2 8 bits": Case(
        "gptq_v2", grouped(8, symmetric=False), "scales", "g_idx", None, (("bits",), 4)
    ),
    "auto_round": Case("auto_round", grouped(4), "scales", None, None, (("bits",), 8)),
    "auto_round asymmetric": Case(
        "auto_round", grouped(4, symmetric=False), "scales", None, "qzeros", (("bits",), 3)
    ),
    "awq": Case("awq", grouped(4, symmetric=False), "scales", None, "qweight", (("bits",), 8)),
    "fp8": Case("fp8", with_group_size(preset("FP8_BLOCK"), 32), "weight_scale_inv"),
    "fp8 per tensor": Case("fp8", preset("FP8"), "weight_scale"),
    "compressed-tensors": Case(
        "compressed-tensors", grouped(4), "weight_scale", None, None, (WEIGHTS, 8)
    ),
    "compressed-tensors asymmetric": Case(
        "compressed-tensors",
        grouped(4, symmetric=False),
        "weight_scale",
        None,
        "weight_zero_point",
        (WEIGHTS, 3),
    ),
    "modelopt": Case("modelopt", preset("NVFP4A16"), "weight_scale"),
    "modelopt 8 bits": Case("modelopt", preset("MXFP8"), "weight_scale"),
}
VERBS = ("inspect", "generate", "export")


@pytest.fixture(scope="module")
def foreign(llama, tmp_path_factory, write_foreign):
    """Return the folder of a case, made on first use."""
    made = {}

    def make(name: str) -> Path:
        if name not in made:
            case, folder = CASES[name], tmp_path_factory.mktemp("foreign") / "f"
            if case.scheme.input is not None and not case.scheme.input.dynamic:
                pytest.skip("its inputs are measured")
            write_foreign(folder, llama, case.layout, case.scheme)
            made[name] = folder
        return made[name]

    return make


def refused(folder: Path, output: Path, capsys) -> list[str]:
    """The refusals of a folder by each verb.

    `inspect` may describe it and say that it does not run.
    """
    more = {
        "inspect": (),
        "generate": ("--prompt", "value", "--max-new-tokens", "2", "-q"),
        "export": ("-o", str(output), "--format", "compressed-tensors", "-q"),
    }
    found = []
    for verb in VERBS:
        capsys.readouterr()
        code, said = exit_code(cli, [verb, str(folder), *more[verb]]), capsys.readouterr()
        described = verb == "inspect" and "\nruns: no: " in said.out
        assert (code == 0 and described) or (code in (3, 6) and said.out == ""), verb
        found.append(said.out if described else said.err)
    assert not output.exists()
    return found


def damaged(folder: Path, output: Path, key: str, change) -> Path:
    shutil.copytree(folder, output)
    tensors = load_file(output / "model.safetensors")
    if change is None:
        del tensors[key]
    else:
        tensors[key] = change(tensors[key]).contiguous()
    save_file(tensors, output / "model.safetensors", metadata={"format": "pt"})
    return output


def swapped(words: torch.Tensor) -> torch.Tensor:
    data = words.contiguous().view(torch.uint8)
    return ((data << 4) | (data >> 4)).view(torch.int32)


@pytest.mark.parametrize("name", CASES)
def test_a_missing_scale_is_refused_by_its_linear(foreign, tmp_path, capsys, name):
    folder = damaged(foreign(name), tmp_path / "f", f"{DOWN}.{CASES[name].scale}", None)
    for said in refused(folder, tmp_path / "o", capsys):
        assert DOWN in said


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.order])
@pytest.mark.parametrize(
    "change", ["one group", "groups beyond the last", "a group too long", "too short"]
)
def test_a_wrong_order_of_inputs_is_refused_by_its_name(foreign, tmp_path, capsys, name, change):
    def moved(t: torch.Tensor) -> torch.Tensor:
        t = t.clone()
        t[0] = 1
        return t

    changes = {
        "one group": lambda t: t * 0,
        "groups beyond the last": lambda t: t + 1,
        "a group too long": moved,
        "too short": lambda t: t[:-1],
    }
    key = f"{DOWN}.{CASES[name].order}"
    for said in refused(
        damaged(foreign(name), tmp_path / "f", key, changes[change]), tmp_path / "o", capsys
    ):
        assert key in said


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.swapped])
def test_swapped_nibbles_are_refused_by_their_linear(foreign, tmp_path, capsys, name):
    folder = damaged(foreign(name), tmp_path / "f", f"{UP}.{CASES[name].swapped}", swapped)
    for said in refused(folder, tmp_path / "o", capsys):
        assert f"{UP}: codes and zero points of" in said or f"{UP}.{CASES[name].swapped}" in said


@pytest.mark.parametrize("name", CASES)
def test_a_truncated_file_is_refused_by_its_name(foreign, tmp_path, capsys, name):
    folder = shutil.copytree(foreign(name), tmp_path / "f")
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    for said in refused(folder, tmp_path / "o", capsys):
        assert "model.safetensors" in said and "truncated" in said


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.bits])
def test_a_wrong_number_of_bits_is_refused_by_the_first_linear(foreign, tmp_path, capsys, name):
    folder, found = shutil.copytree(foreign(name), tmp_path / "f"), CASES[name].bits
    assert found is not None
    config = json.loads((folder / "config.json").read_text())
    *path, last = found[0]
    table = config["quantization_config"]
    for key in path:
        table = table[key]
    assert table[last] != found[1]
    table[last] = found[1]
    (folder / "config.json").write_text(json.dumps(config))
    for said in refused(folder, tmp_path / "o", capsys):
        assert "_proj" in said or "bits" in said
