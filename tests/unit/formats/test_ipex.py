"""IPEX's low-precision checkpoint: words by hand, a plain dequantization, and whole folders."""

import json
import shutil
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from quantflow.core.qtensor import QTensor, QuantizedLinear
from quantflow.core.scheme import LinearScheme, named, preset
from quantflow.errors import InputError, UnsupportedError
from quantflow.files.checkpoint import names_by_keys
from quantflow.formats import LAYOUTS
from quantflow.formats.ipex import IPEXLayout
from quantflow.formats.weight_layout import integers
from quantflow.runtime.artifact import open_folder
from tests.shared import run

LAYOUT = LAYOUTS["ipex"]
DOWN = "model.layers.1.mlp.down_proj"


def grouped(size: int, *, symmetric: bool = True) -> LinearScheme:
    return named(integers(4, size, symmetric=symmetric, where="a test"), None, "pack-quantized")


def linear_of(scheme: LinearScheme, rows: int, columns: int, seed: int) -> QuantizedLinear:
    generator, weights = torch.Generator().manual_seed(seed), scheme.weights
    groups = columns // (weights.group_size or columns)
    qvalue = torch.randint(-8, 8, (rows, columns), generator=generator).to(torch.int8)
    scale = 2.0 ** torch.randint(-9, 3, (rows, groups), generator=generator)
    zero_point = (
        None
        if weights.symmetric
        else torch.randint(-8, 8, (rows, groups), generator=generator).to(torch.int8)
    )
    return QuantizedLinear(
        weight=QTensor(qvalue=qvalue, scale=scale, zero_point=zero_point, scheme=weights),
        scheme=scheme,
    )


def theirs(tensors: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    """The weight as `WeightOnlyLinear.recover` makes it: word by word, nibble by nibble."""
    packed, scale, zeros = (
        tensors[f"{name}.{part}"] for part in ("packed_weight", "scale", "packed_zp")
    )

    def nibbles(words: torch.Tensor, count: int) -> torch.Tensor:
        found = torch.zeros(len(words), words.shape[1] * 8)
        for word in range(words.shape[1]):
            for nibble in range(8):
                found[:, 8 * word + nibble] = (words[:, word] >> (4 * nibble)) & 0b1111
        return found[:, :count]

    rows, groups = scale.shape
    perm = tensors.get(f"{name}.gptq_perm")
    columns = packed.shape[1] * 8 if perm is None else len(perm)
    codes, points = nibbles(packed, columns), nibbles(zeros, groups)
    size = columns // groups
    real = torch.cat(
        [
            (codes[:, g * size : (g + 1) * size] - points[:, g : g + 1])
            * scale[:, g : g + 1].float()
            for g in range(groups)
        ],
        1,
    )
    return real if perm is None else real[:, torch.argsort(perm)]


def test_eight_inputs_stand_in_a_word_lowest_first_and_eight_groups_in_one_of_zero_points():
    scheme = grouped(8, symmetric=False)
    qvalue = (torch.arange(16, dtype=torch.int8) - 8)[None]  # codes 0 to 15
    zero_point = torch.tensor([[-8, 3]], dtype=torch.int8)  # stored 0 and 11
    weight = QTensor(
        qvalue=qvalue,
        scale=torch.tensor([[0.5, 2.0]]),
        zero_point=zero_point,
        scheme=scheme.weights,
    )
    tensors = LAYOUT.encode(
        "a", QuantizedLinear(weight=weight, scheme=scheme), scale_dtype=torch.float16
    )
    assert [word & 0xFFFFFFFF for word in tensors["a.packed_weight"][0].tolist()] == [
        0x76543210,
        0xFEDCBA98,
    ]
    assert tensors["a.packed_zp"].tolist() == [[0xB0]]
    assert tensors["a.scale"].dtype == torch.float16 and tensors["a.scale"].shape == (1, 2)


@settings(max_examples=40)
@given(
    st.sampled_from([-1, 8, 16, 24, 32, 128]),
    st.booleans(),
    st.integers(1, 9),
    st.integers(1, 12),
    st.booleans(),
    st.integers(0, 2**31),
)
def test_their_dequantization_has_our_values_and_reading_gives_them_back(
    size, symmetric, rows, groups, ordered, seed
):
    scheme = grouped(size, symmetric=symmetric)
    columns = 40 if size == -1 else size * groups
    linear = linear_of(scheme, rows, columns, seed)
    layout = LAYOUT
    if ordered:
        layout = LAYOUT.with_order()
        linear = replace(
            linear, order=torch.randperm(columns, generator=torch.Generator().manual_seed(seed))
        )
    tensors = layout.encode("a", linear, scale_dtype=torch.float16)
    assert tuple(tensors) == layout.tensor_names("a", scheme)
    assert torch.equal(theirs(tensors, "a"), linear.dequantize())
    found = layout.decode("a", tensors, grouped(size, symmetric=False))
    assert torch.equal(found.dequantize(), linear.dequantize())
    again = layout.encode("a", found, scale_dtype=torch.float16)
    assert all(torch.equal(again[key], tensors[key]) for key in tensors)


def test_a_file_without_zero_points_is_of_symmetric_weights_in_twos_complement():
    scheme = grouped(32)
    linear = linear_of(scheme, 16, 64, 3)
    bits = (linear.weight.qvalue.to(torch.int64) & 0b1111).view(16, 8, 8)  # two's complement
    words = (bits << (4 * torch.arange(8))).sum(dim=-1)
    words = torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)
    tensors = {"a.packed_weight": words, "a.scale": linear.weight.scale.half()}
    found = IPEXLayout(bare=True).decode("a", tensors, scheme)
    assert found.weight.zero_point is None and torch.equal(found.dequantize(), linear.dequantize())


@pytest.mark.parametrize(
    ("scheme", "shape", "said"),
    [
        (preset("W8A16"), (32, 64), "the layout holds integers of 4 bits"),
        (preset("W4A8"), (32, 128), "quantizes inputs"),
        (preset("FP8_DYNAMIC"), (32, 64), "quantizes inputs"),
        (grouped(-1), (32, 60), "whole words hold multiples of 8"),
    ],
)
def test_what_the_layout_cannot_hold_has_a_reason(scheme, shape, said):
    assert said in str(LAYOUT.why_not(scheme, shape))


@pytest.mark.parametrize(
    ("key", "change", "said"),
    [
        ("a.scale", None, r"a.scale: missing"),
        ("a.scale", lambda t: t * 0, "a.scale: scale 0.0"),
        ("a.packed_zp", None, "a.packed_zp: missing"),
        ("a.packed_zp", lambda t: t.repeat(1, 2), "a.packed_zp: is torch.int32"),
        ("a.packed_weight", None, "a.packed_weight: missing"),
        ("a.packed_weight", lambda t: t[:, :-1], "a.packed_weight: is torch.int32"),
        ("a.packed_weight", lambda t: t.to(torch.int64), "a.packed_weight: is torch.int64"),
        ("a.gptq_perm", lambda t: t * 0, "a.gptq_perm: does not hold each of 64 inputs once"),
        ("a.gptq_perm", lambda t: t[1:], "a.gptq_perm: is torch.int64"),
    ],
)
def test_damaged_tensors_are_refused_by_name(key, change, said):
    layout, scheme = LAYOUT.with_order(), grouped(32, symmetric=False)
    linear = replace(
        linear_of(scheme, 16, 64, 0),
        order=torch.randperm(64, generator=torch.Generator().manual_seed(0)),
    )
    tensors = layout.encode("a", linear, scale_dtype=torch.float16)
    tensors = {
        name: tensor for name, tensor in tensors.items() if name != key or change is not None
    }
    if change is not None:
        tensors[key] = change(tensors[key])
    with pytest.raises(InputError, match=said):
        layout.decode("a", tensors, scheme)


def test_groups_that_do_not_stand_together_need_the_layout_with_an_order():
    linear = replace(linear_of(grouped(32), 16, 64, 0), order=torch.arange(63, -1, -1))
    with pytest.raises(UnsupportedError, match="do not stand together"):
        LAYOUT.encode("a", linear, scale_dtype=torch.float16)


@pytest.fixture(scope="module")
def artifact(llama, tmp_path_factory):
    folder = tmp_path_factory.mktemp("ipex") / "artifact"
    line = ("--scheme", "W4A16_ASYM", "--group-size", "32", "--algorithm", "rtn")
    assert run("quantize", llama, "-o", folder, *line, "-q") == 0
    return folder


@pytest.fixture(scope="module")
def exported(artifact):
    folder = artifact.parent / "ipex"
    assert run("export", artifact, "-o", folder, "--format", "ipex", "-q") == 0
    return folder


def test_an_artifact_becomes_a_folder_that_torch_loads(artifact, exported, llama):
    files = {path.name for path in exported.iterdir()}
    assert "gptq_checkpoint_g32.pt" in files and not any(
        name.endswith(".safetensors") for name in files
    )
    assert "quantization_config" not in json.loads((exported / "config.json").read_text())
    table = torch.load(exported / "gptq_checkpoint_g32.pt", weights_only=True)
    opened = open_folder(artifact, backend="reference")
    assert len(opened.linears) == 14
    for name in opened.linears:
        assert f"{name}.weight" not in table
        assert torch.equal(theirs(table, name), opened.decode(name).dequantize())
    plain = set(opened.names) - {f"{name}.weight" for name in opened.linears}
    assert {key for key in table if not key.startswith(tuple(opened.linears))} == plain


def test_the_folder_is_described_run_and_turned_back(artifact, exported, tmp_path, capsys):
    assert run("inspect", exported, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["format"], found["runs"], found["verified"]) == ("ipex", None, 14)
    assert found["quant_method"] == "ipex-low-precision"
    (row,) = found["quantized"]
    assert (row["bits"], row["group_size"], row["symmetric"], row["act_order"]) == (
        4,
        32,
        False,
        False,
    )
    texts = []
    for folder in (artifact, exported):
        assert (
            run(
                "generate",
                folder,
                "--prompt",
                "def",
                "--max-new-tokens",
                "8",
                "--backend",
                "reference",
                "-q",
            )
            == 0
        )
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]
    assert (
        run("export", exported, "-o", tmp_path / "ct", "--format", "compressed-tensors", "-q") == 0
    )
    assert run("export", tmp_path / "ct", "-o", tmp_path / "ipex", "--format", "ipex", "-q") == 0
    name = "gptq_checkpoint_g32.pt"
    assert (tmp_path / "ipex" / name).read_bytes() == (exported / name).read_bytes()
    assert run("diff", exported, artifact, "--values") == 0


def test_a_model_that_is_quantized_so_is_no_source(exported, tmp_path, capsys):
    assert run("quantize", exported, "-o", tmp_path / "q", "--scheme", "W8A16") == 3
    assert "the model is quantized already, with ipex-low-precision" in capsys.readouterr().err
    line = ("quantize", exported, "-o", tmp_path / "q", "--scheme", "W8A16", "--dequantize", "-q")
    assert run(*line) == 0


def test_a_damaged_checkpoint_is_refused_and_other_pickles_stay_what_they_are(
    exported, llama, tmp_path, capsys
):
    folder = shutil.copytree(exported, tmp_path / "f")
    path = folder / "gptq_checkpoint_g32.pt"
    path.write_bytes(path.read_bytes()[:-200])
    assert (
        run("inspect", folder) == 3 and "not a whole file of torch.save" in capsys.readouterr().err
    )
    table = torch.load(exported / "gptq_checkpoint_g32.pt", weights_only=True)
    table[f"{DOWN}.scale"] = table[f"{DOWN}.scale"][:, :3]
    torch.save(table, path)
    assert (
        run("generate", folder, "--prompt", "def", "-q") == 3
        and f"{DOWN}.scale: is [64, 3]" in capsys.readouterr().err
    )
    torch.save({"model.norm.weight": torch.ones(64)}, path)
    path.rename(folder / "pytorch_model.pt")
    assert (
        run("inspect", folder) == 3
        and "pickled weights and no safetensors" in capsys.readouterr().err
    )


NAMES = {"weight_key": "w", "scale_key": "s", "zero_point_key": "z"}


@pytest.fixture
def renamed(exported, tmp_path):
    """The folder with other names of the linears' tensors, and the config that tells them."""

    def make(keys, *, place="quant_config.json"):
        table = torch.load(exported / "gptq_checkpoint_g32.pt", weights_only=True)
        usual = {"packed_weight": "weight_key", "scale": "scale_key", "packed_zp": "zero_point_key"}
        other = {}
        for name, value in table.items():
            linear, _, leaf = name.rpartition(".")
            other[f"{linear}.{keys[usual[leaf]]}" if leaf in usual else name] = value
        folder = shutil.copytree(exported, tmp_path / "renamed")
        (folder / "gptq_checkpoint_g32.pt").unlink()
        if keys["weight_key"] == "qweight":
            other[f"{DOWN}.scale_bf16_to_fp8"] = torch.zeros(1, dtype=torch.bfloat16)
        torch.save(other, folder / "theirs.pt")
        if place == "config.json":
            config = json.loads((folder / place).read_text()) | {"quantization_config": keys}
            (folder / place).write_text(json.dumps(config))
        else:
            (folder / place).write_text(json.dumps(keys))
        return folder

    return make


@pytest.mark.parametrize(
    ("keys", "place"),
    [
        (NAMES, "quant_config.json"),
        # AutoGPTQ's names over IPEX's packing, as neural-compressor 3 writes them
        (
            {"weight_key": "qweight", "scale_key": "scales", "zero_point_key": "qzeros"},
            "quantize_config.json",
        ),
        # the name that norms and embeddings have too
        ({"weight_key": "weight", "scale_key": "q.s", "zero_point_key": "q.z"}, "config.json"),
    ],
)
def test_other_names_of_the_keys_are_told_by_the_checkpoints_config(
    artifact, renamed, tmp_path, capsys, keys, place
):
    folder = renamed(keys, place=place)
    assert run("diff", folder, artifact, "--values") == 0
    capsys.readouterr()
    assert run("inspect", folder, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["quant_method"], found["verified"]) == ("ipex-low-precision", 14)
    line = ("export", folder, "-o", tmp_path / "ipex", "--format", "ipex", "-q")
    assert run(*line) == 0
    table = torch.load(tmp_path / "ipex" / "gptq_checkpoint_g32.pt", weights_only=True)
    assert f"{DOWN}.packed_weight" in table
    assert not (tmp_path / "ipex" / "quant_config.json").exists()
    assert not (tmp_path / "ipex" / "quantize_config.json").exists()
    assert run("diff", tmp_path / "ipex", artifact, "--values") == 0


def test_a_bias_by_another_name_is_the_linears():
    names = ("a.w", "a.s", "a.z", "a.b", "norm.w", "norm.b")
    spelled = names_by_keys(names, NAMES | {"bias_key": "b"}, place="x.pt")
    assert [spelled.get(name, name) for name in names] == [
        "a.packed_weight",
        "a.scale",
        "a.packed_zp",
        "a.bias",
        "norm.w",
        "norm.b",
    ]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"weight_key": "v"}, "do not match"),
        ({"scale_key": "t"}, "do not match"),
        ({"zero_point_key": "t"}, "do not match"),
        ({"weight_key": None}, "weight_key is None"),
        ({"scale_key": 3}, "scale_key is 3"),
        ({"scale_key": "w"}, "four names are needed"),
    ],
)
def test_a_config_whose_names_are_not_the_checkpoints_is_refused(renamed, capsys, change, said):
    folder = renamed(NAMES)
    (folder / "quant_config.json").write_text(json.dumps(NAMES | change))
    assert run("inspect", folder) == 3
    assert said in capsys.readouterr().err


def test_two_sets_of_names_in_one_file_are_refused(renamed, capsys):
    folder = renamed(NAMES)
    table = torch.load(folder / "theirs.pt", weights_only=True)
    table[f"{DOWN}.packed_weight"] = table[f"{DOWN}.w"]
    torch.save(table, folder / "theirs.pt")
    assert run("inspect", folder) == 3
    assert f"{DOWN}.packed_weight" in capsys.readouterr().err


@pytest.mark.parametrize("layout", ["gptq", "awq"])
def test_a_pt_file_with_gptqs_or_awqs_names_is_read_as_its_config_says(
    artifact, tmp_path, capsys, layout
):
    """What IPEX since 2.3 calls a low-precision checkpoint."""
    folder = tmp_path / layout
    assert run("export", artifact, "-o", folder, "--format", layout, "-q") == 0
    torch.save(load_file(folder / "model.safetensors"), folder / "gptq_checkpoint.pt")
    (folder / "model.safetensors").unlink()
    config = json.loads((folder / "config.json").read_text())
    name = {"gptq": "quantize_config.json", "awq": "quant_config.json"}[layout]
    (folder / name).write_text(json.dumps(config.pop("quantization_config")))
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "quantflow.json").unlink(missing_ok=True)
    capsys.readouterr()
    assert run("inspect", folder, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["format"], found["configuration"], found["verified"]) == (layout, name, 14)
    assert run("diff", folder, artifact, "--values") == 0
    (folder / name).unlink()
    assert run("inspect", folder) == 3
    assert "pickled weights and no safetensors" in capsys.readouterr().err
