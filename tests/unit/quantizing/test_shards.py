"""N cards' shards, unified, are one process's result, byte by byte, and so is the artifact."""

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import safetensors.torch
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from quantflow.errors import InputError, IntegrityError, UsageError
from quantflow.exporting import export
from quantflow.exporting.job import ExportJob
from quantflow.planning.recipe import Override, Quantize
from quantflow.quantizing import quantize
from quantflow.quantizing.job import QuantizeJob
from quantflow.quantizing.weight_rows import Unit
from quantflow.reporting.progress_line import ProgressLine
from quantflow.stages.cli import cli
from quantflow.stages.cli.output import exit_code
from quantflow.unifying import unify
from quantflow.unifying.job import UnifyJob
from tests.shared import slow_but

QUIET = ProgressLine(quiet=True)
EXAMPLE = Path(__file__).parents[3] / "examples" / "tiny-llama"
SCHEMES = ["FP8_DYNAMIC", "W8A8", "W8A16", "W4A16", "W4A16_ASYM"]


def entry(scheme: str, *, group_size: int = 16, **options) -> Quantize:
    size = group_size if scheme.startswith("W4") else None
    return Quantize(
        name="x", scheme=scheme, algorithm="rtn", transforms=(), group_size=size, **options
    )


def one(model: Path, output: Path, recipe: Quantize) -> Path:
    return quantize.run(QuantizeJob(model=model, output=output, entry=recipe), QUIET)


def together(shards: Path, output: Path, **options) -> Path:
    return unify.run(UnifyJob(measurement=shards, output=output, **options), QUIET)


@pytest.fixture
def small_units(monkeypatch):
    """Cut the tiny model's weights into many units, at other rows than where the cards are cut."""
    monkeypatch.setattr("quantflow.quantizing.weight_rows.UNIT", 1536)


@pytest.fixture(scope="module")
def model(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four heads, two kv heads, biases; one card's part of some rows is zeros, and some rows."""
    folder = tmp_path_factory.mktemp("models") / "grouped"
    torch.manual_seed(1)
    shape = {"vocab_size": 320, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}
    made = LlamaForCausalLM(
        LlamaConfig(**shape, **heads, initializer_range=0.1, attention_bias=True, mlp_bias=True)
    )
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0, 0.1)
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter[3, :16] = 0.0
                parameter[5] = 0.0
                parameter[6, 20:] = -0.0
    made.to(torch.bfloat16).save_pretrained(folder)
    for path in llama.glob("token*"):
        shutil.copy(path, folder)
    return folder


def hashes(folder: Path) -> dict[str, str]:
    """The sha256 of a quantize folder's visible files, but of those about its inputs."""
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
        and not path.name.startswith(".")
        and path.name not in ("DONE.json", "joined.json")
    }


def inputs(folder: Path) -> dict:
    return json.loads((folder / "DONE.json").read_text())["inputs"]


def joined(folder: Path) -> dict[str, dict]:
    return {row["linear"]: row for row in unify.summary(folder)["joined"]}


@pytest.mark.parametrize(
    ("scheme", "ranks"),
    slow_but(
        [(scheme, ranks) for scheme in SCHEMES for ranks in (2, 4)],
        ("FP8_DYNAMIC", 4),
        ("W8A8", 2),
        ("W8A16", 4),
        ("W4A16", 2),
        ("W4A16_ASYM", 4),
    ),
)
def test_shards_unified_are_what_one_process_writes(
    model, tmp_path, cards, small_units, scheme, ranks
):
    whole = one(model, tmp_path / "whole", entry(scheme))
    made = together(
        cards(model, tmp_path / "shards", entry(scheme), ranks=ranks), tmp_path / "made"
    )
    # two layers, their records, quantize.json
    assert len(hashes(whole)) == 5 and hashes(made) == hashes(whole)
    assert inputs(made) == inputs(whole)


@pytest.mark.parametrize(
    ("scheme", "ranks"),
    slow_but(
        [(scheme, ranks) for scheme in ("FP8_DYNAMIC", "W8A8", "W4A16") for ranks in (2, 4)],
        ("W4A16", 2),
    ),
)
def test_the_embedded_model_in_shards_is_the_same_artifact(tmp_path, cards, scheme, ranks):
    recipe = entry(scheme, group_size=128)
    whole = one(EXAMPLE, tmp_path / "whole", recipe)
    made = together(cards(EXAMPLE, tmp_path / "shards", recipe, ranks=ranks), tmp_path / "made")
    assert hashes(made) == hashes(whole)
    if (scheme, ranks) == ("FP8_DYNAMIC", 4):
        artifacts = [
            export.run(ExportJob(source=path, output=path.with_suffix(".out")), QUIET)
            for path in (whole, made)
        ]
        assert len(hashes(artifacts[0])) > 5 and hashes(artifacts[0]) == hashes(artifacts[1])


def test_the_artifact_of_a_model_with_few_key_heads_is_the_same(model, tmp_path, cards):
    whole = one(model, tmp_path / "whole", entry("W4A16_ASYM"))
    made = together(
        cards(model, tmp_path / "shards", entry("W4A16_ASYM"), ranks=4), tmp_path / "made"
    )
    artifacts = [
        export.run(ExportJob(source=path, output=path.with_suffix(".out")), QUIET)
        for path in (whole, made)
    ]
    assert hashes(artifacts[0]) == hashes(artifacts[1])


def test_rows_that_begin_within_a_word_of_zero_points_are_joined(llama, tmp_path, cards):
    torch.manual_seed(2)
    shape = {"vocab_size": 320, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1}
    # four rows of keys per card, a word has eight
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4}
    LlamaForCausalLM(LlamaConfig(**shape, **heads)).to(torch.float16).save_pretrained(
        tmp_path / "model"
    )
    recipe = entry("W4A16_ASYM", group_size=8)
    whole = one(tmp_path / "model", tmp_path / "whole", recipe)
    made = together(
        cards(tmp_path / "model", tmp_path / "shards", recipe, ranks=2), tmp_path / "made"
    )
    assert hashes(made) == hashes(whole)


def test_rows_of_3_bits_that_begin_within_three_words_are_joined(
    model, tmp_path, cards, small_units
):
    # 16 rows of keys per card, units of 32
    recipe = Quantize(name="x", scheme="W3A16_ASYM", algorithm="rtn", group_size=16)
    whole = one(model, tmp_path / "whole", recipe)
    made = together(cards(model, tmp_path / "shards", recipe, ranks=2), tmp_path / "made")
    assert hashes(made) == hashes(whole)
    with pytest.raises(UsageError, match="64 columns over 4 are 16, 3 words hold 32"):
        cards(model, tmp_path / "four", recipe, ranks=4)


def test_blocks_of_rows_are_not_cut(model, tmp_path, cards):
    recipe = Quantize(name="x", scheme="FP8_BLOCK", group_size=16)
    with pytest.raises(
        UsageError, match="x: --ranks 2: FP8_BLOCK has one scale for a block of rows"
    ):
        cards(model, tmp_path / "shards", recipe, ranks=2)


@pytest.mark.parametrize("family", ["gpt_neox", "qwen2", "qwen3", "mistral"])
def test_every_family_and_mixed_schemes_with_ignored_linears(
    family_model, tmp_path, cards, small_units, family
):
    ignored = {"gpt_neox": ("re:.*dense_4h_to_h", "re:.*dense_h_to_4h")}.get(
        family, ("re:.*down_proj", "re:.*up_proj")
    )
    recipe = entry(
        "W8A8",
        ignore=ignored,
        overrides=(Override(match="re:.*[.]1[.].*", scheme="W4A16", group_size=32),),
    )
    whole = one(family_model(family), tmp_path / "whole", recipe)
    made = together(
        cards(family_model(family), tmp_path / "shards", recipe, ranks=2), tmp_path / "made"
    )
    assert hashes(made) == hashes(whole)


def test_a_shard_holds_its_part_of_every_tensor_and_says_which(model, tmp_path, cards):
    shards = cards(model, tmp_path / "shards", entry("W8A8"), ranks=4)
    source = safetensors.torch.load_file(model / "model.safetensors")
    layer = "model.layers.1"
    found = safetensors.torch.load_file(shards / "rank-002-of-004" / "layers" / "00001.safetensors")
    shapes = {name.removeprefix(f"{layer}."): list(tensor.shape) for name, tensor in found.items()}
    assert shapes["self_attn.q_proj.weight"] == [16, 64] and shapes["self_attn.q_proj.bias"] == [16]
    # the second of two heads, which the fourth card holds too
    assert shapes["self_attn.k_proj.weight"] == [16, 64]
    assert shapes["self_attn.o_proj.weight"] == [64, 16] and shapes["self_attn.o_proj.bias"] == [64]
    assert shapes["mlp.down_proj.weight"] == [64, 32] and shapes["mlp.down_proj.weight_scale"] == [
        64,
        1,
    ]
    assert torch.equal(
        found[f"{layer}.self_attn.k_proj.bias"], source[f"{layer}.self_attn.k_proj.bias"][16:]
    )
    assert torch.equal(
        found[f"{layer}.self_attn.o_proj.bias"], source[f"{layer}.self_attn.o_proj.bias"]
    )
    assert torch.equal(
        found[f"{layer}.input_layernorm.weight"], source[f"{layer}.input_layernorm.weight"]
    )
    amax = source[f"{layer}.mlp.down_proj.weight"][:, 64:96].float().abs().amax(dim=1, keepdim=True)
    expected = torch.where(amax == 0, torch.ones_like(amax), amax / 127.5)
    assert torch.equal(found[f"{layer}.mlp.down_proj.weight_scale"], expected)
    record = json.loads((shards / "rank-002-of-004" / "layers" / "00001.json").read_text())
    told = record["placements"][f"{layer}.mlp.down_proj"]
    assert (told["kind"], told["axis"], told["offset"], told["length"], told["full_shape"]) == (
        "row",
        1,
        64,
        32,
        [64, 128],
    )


def test_a_card_reads_its_part_of_each_weight_and_no_more(model, tmp_path, cards, monkeypatch):
    read: dict[str, int] = {}
    original = Unit.read

    def counted(unit: Unit) -> torch.Tensor:
        tensor = original(unit)
        read[unit.info.name] = read.get(unit.info.name, 0) + tensor.nbytes
        return tensor

    monkeypatch.setattr(Unit, "read", counted)
    cards(model, tmp_path / "shards", entry("W8A16"), ranks=4, only=(3,))
    layer = "model.layers.0"
    assert (
        read[f"{layer}.mlp.gate_proj.weight"]
        == read[f"{layer}.mlp.down_proj.weight"]
        == 2 * 64 * 128 // 4
    )
    assert read[f"{layer}.self_attn.o_proj.weight"] == 2 * 64 * 64 // 4
    assert read[f"{layer}.self_attn.v_proj.weight"] == 2 * 64 * 32 // 2  # one of two heads
    assert read[f"{layer}.input_layernorm.weight"] == 2 * 64


def test_the_report_says_how_each_linear_was_joined_and_what_was_rounded_again(
    model, tmp_path, cards
):
    made = together(
        cards(model, tmp_path / "shards", entry("FP8_DYNAMIC"), ranks=2), tmp_path / "made"
    )
    rows = joined(made)
    assert len(rows) == 14
    weight = safetensors.torch.load_file(model / "model.safetensors")[
        "model.layers.0.mlp.down_proj.weight"
    ].float()
    amax = torch.stack([half.abs().amax(dim=1) for half in weight.chunk(2, dim=1)])  # [2, 64]
    smaller = int(((amax > 0) & (amax < amax.amax(dim=0))).sum())
    assert 50 < smaller <= 64
    assert rows["model.layers.0.mlp.down_proj"] == {
        "linear": "model.layers.0.mlp.down_proj",
        "joined": "columns side by side",
        "cards": 2,
        "channels": 128,  # 64 rows on each of two cards
        "requantized": smaller,
    }
    assert rows["model.layers.0.self_attn.q_proj"]["joined"] == "rows side by side"
    assert rows["model.layers.0.self_attn.q_proj"]["requantized"] == 0


def test_groups_need_no_rounding_again(model, tmp_path, cards):
    made = together(cards(model, tmp_path / "shards", entry("W4A16"), ranks=2), tmp_path / "made")
    assert {row["requantized"] for row in joined(made).values()} == {0}


def test_four_shards_become_two_artifacts_of_a_smaller_world(model, tmp_path, cards, small_units):
    shards = cards(model, tmp_path / "four", entry("FP8_DYNAMIC"), ranks=4)
    two = cards(model, tmp_path / "two", entry("FP8_DYNAMIC"), ranks=2)
    made = together(shards, tmp_path / "made", groups=("01", "23"))
    assert len(hashes(two)) == 10 and hashes(made) == hashes(two)
    assert hashes(together(made, tmp_path / "one")) == hashes(
        one(model, tmp_path / "whole", entry("FP8_DYNAMIC"))
    )


def test_what_is_up_to_date_is_left_alone(model, tmp_path, cards):
    shards = cards(model, tmp_path / "shards", entry("W8A8"), ranks=2)
    before = {path: path.stat().st_mtime_ns for path in [*shards.rglob("*.safetensors")]}
    cards(model, tmp_path / "shards", entry("W8A8"), ranks=2)
    made = together(shards, tmp_path / "made")
    inode = (made / "DONE.json").stat().st_ino
    assert (together(shards, tmp_path / "made") / "DONE.json").stat().st_ino == inode
    assert before == {path: path.stat().st_mtime_ns for path in before}


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (
            {"scheme": "W4A16", "algorithm": "gptq", "group_size": 32},
            "gptq needs count, hessian_sum, none is given",
        ),
        ({"scheme": "W8A8"}, "needs channel_amax, none is given"),
        ({"scheme": "FP8"}, "needs amax, none is given"),
        ({"scheme": "W8A16", "ranks": 8}, "4 heads over 8 cards"),
        ({"scheme": "W8A16", "ranks": 3}, "128 columns over 3 cards"),
        (
            {"scheme": "W4A16", "algorithm": "rtn", "group_size": 32, "ranks": 4},
            "64 columns over 4 are 16, groups have 32",
        ),
        ({"scheme": "W8A16", "ranks": 0}, "ranks=0"),
    ],
)
def test_what_cannot_be_cut_is_refused_before_a_weight_is_read(model, tmp_path, options, told):
    folder = shutil.copytree(model, tmp_path / "model")
    path = folder / "model.safetensors"
    content = path.read_bytes()
    header = 8 + int.from_bytes(content[:8], "little")
    # NaN: whoever reads one says so
    path.write_bytes(content[:header] + b"\xff" * (len(content) - header))
    recipe = Quantize(name="x", **{key: value for key, value in options.items() if key != "ranks"})
    job = QuantizeJob(
        model=folder, output=tmp_path / "out", entry=recipe, ranks=options.get("ranks", 2)
    )
    with pytest.raises(UsageError, match=told):
        quantize.run(job, QUIET)
    assert not (tmp_path / "out").exists()


def test_shards_that_are_missing_foreign_or_damaged_are_refused(model, llama, tmp_path, cards):
    shards = cards(model, tmp_path / "shards", entry("W8A8"), ranks=2)
    shutil.copytree(shards / "rank-000-of-002", tmp_path / "some" / "rank-000-of-002")
    with pytest.raises(InputError, match="shards 1 of 2 are missing"):
        together(tmp_path / "some", tmp_path / "made")
    shutil.copytree(shards / "rank-000-of-002", tmp_path / "some" / "rank-001-of-002")
    with pytest.raises(InputError, match="is rank 0 of 2, so is another folder"):
        together(tmp_path / "some", tmp_path / "made")
    other = cards(llama, tmp_path / "other", entry("W8A8"), ranks=2)
    shutil.rmtree(tmp_path / "some" / "rank-001-of-002")
    shutil.copytree(other / "rank-001-of-002", tmp_path / "some" / "rank-001-of-002")
    with pytest.raises(InputError, match="config = .* in rank-000-of-002"):
        together(tmp_path / "some", tmp_path / "made")
    path = shards / "rank-001-of-002" / "layers" / "00001.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\x55")
    with pytest.raises(IntegrityError, match="00001.safetensors: differs"):
        together(shards, tmp_path / "made")
    assert not (tmp_path / "made").exists()


def test_a_source_that_is_gone_or_another_is_refused_and_can_be_named(
    model, llama, tmp_path, cards
):
    moved = shutil.copytree(model, tmp_path / "model")
    shards = cards(moved, tmp_path / "shards", entry("W8A8"), ranks=2)
    moved.rename(tmp_path / "elsewhere")
    with pytest.raises(InputError) as gone:
        together(shards, tmp_path / "made")
    assert "rounded again from the source" in gone.value.cause and "--model" in gone.value.remedy
    with pytest.raises(InputError, match="was made from"):
        together(shards, tmp_path / "made", model=llama)
    together(shards, tmp_path / "made", model=tmp_path / "elsewhere")


def test_a_source_of_several_files_is_cut_and_joined(model, tmp_path, cards):
    folder = tmp_path / "model"
    LlamaForCausalLM.from_pretrained(model, dtype=torch.bfloat16).save_pretrained(
        folder, max_shard_size="40KB"
    )
    assert len(list(folder.glob("*.safetensors"))) > 4
    whole = one(folder, tmp_path / "whole", entry("W8A8"))
    made = together(cards(folder, tmp_path / "shards", entry("W8A8"), ranks=4), tmp_path / "made")
    assert hashes(made) == hashes(whole)


def test_shards_of_other_library_versions_are_refused(model, tmp_path, cards):
    shards = cards(model, tmp_path / "shards", entry("W8A8"), ranks=2)
    for path in shards.glob("*/DONE.json"):
        record = json.loads(path.read_text())
        record["inputs"]["tools"]["torch"] = "1.0"
        path.write_text(json.dumps(record))
    with pytest.raises(InputError, match="made with torch 1.0, here is"):
        together(shards, tmp_path / "made")


def test_other_groups_expansion_and_missing_shards_are_usage_errors(model, tmp_path, cards):
    shards = cards(model, tmp_path / "shards", entry("W8A8"), ranks=4)
    for options, told in (
        ({"groups": ("02", "13")}, "holds what neighbours hold|groups"),
        ({"groups": ("0", "123")}, "groups"),
        ({"expand": 2}, "--expand with quantized shards"),
        ({"allow_missing": True}, "--allow-missing with quantized shards"),
    ):
        with pytest.raises(UsageError, match=told):
            together(shards, tmp_path / "made", **options)


def test_export_of_shards_says_what_to_do(model, tmp_path, cards):
    shards = cards(model, tmp_path / "shards", entry("W8A8"), ranks=2)
    for folder, told in (
        (shards, "holds 2 shards"),
        (shards / "rank-001-of-002", "one of 2 shards"),
    ):
        with pytest.raises(InputError, match=told) as refused:
            export.run(ExportJob(source=folder, output=tmp_path / "out"), QUIET)
        assert f"quantflow unify -m {shards}" in refused.value.remedy


def command(*arguments: str | Path) -> list[str]:
    return [sys.executable, "-m", "quantflow", *map(str, arguments)]


def quantflow(*arguments: str | Path) -> str:
    result = subprocess.run(
        command(*arguments), capture_output=True, text=True, check=False, timeout=600
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.slow
def test_the_commands_of_the_readme(model, tmp_path, capsys):
    def quantflow(*arguments: str | Path) -> str:
        assert exit_code(cli, list(map(str, arguments))) == 0
        return capsys.readouterr().out

    shards, made = tmp_path / "shards", tmp_path / "made"
    options = ["--scheme", "FP8_DYNAMIC", "--ranks", "2"]
    assert quantflow("quantize", model, "-o", shards, *options).strip() == str(shards)
    told = quantflow("unify", "-m", shards, "-o", made).splitlines()
    assert told[0].split() == ["linear", "joined", "cards", "channels", "requantized"] and told[
        -1
    ] == str(made)
    assert any("o_proj" in line and "columns side by side" in line for line in told)
    whole = tmp_path / "whole"
    quantflow("quantize", "--no-export", model, "-o", whole, "--scheme", "FP8_DYNAMIC")
    assert hashes(made) == hashes(whole) and inputs(made) == inputs(whole)


@pytest.mark.slow
def test_a_killed_rank_leaves_nothing_partial_and_the_same_command_continues(tmp_path, cards):
    recipe = entry("FP8_DYNAMIC")
    expected = hashes(cards(EXAMPLE, tmp_path / "expected", recipe, ranks=2))
    output = tmp_path / "shards"
    arguments = [
        "quantize",
        EXAMPLE,
        "-o",
        output,
        "--scheme",
        "FP8_DYNAMIC",
        "--name",
        "x",
        "--ranks",
        "2",
    ]
    arguments += ["--algorithm", "rtn", "--set", "quantize.0.transforms=[]"]
    layers, lock = output / "rank-001-of-002" / "layers", output / ".rank-001-of-002.lock"
    with subprocess.Popen(
        command(*arguments), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as process:
        while process.poll() is None and not (layers.is_dir() and any(layers.iterdir())):
            time.sleep(0.001)
        os.kill(int(lock.read_text()), signal.SIGKILL)
        told = process.communicate()[1]
    assert process.returncode == 5 and "rank 1 of 2 was ended by SIGKILL" in told, told
    assert not (output / "rank-001-of-002" / "DONE.json").exists()
    for path in output.rglob("*.json"):
        json.loads(path.read_text())
    for path in output.glob("*/layers/*.json"):
        assert (
            json.loads(path.read_text())["sha256"]
            == hashlib.sha256(path.with_suffix(".safetensors").read_bytes()).hexdigest()
        )
    finished = {path: path.stat().st_mtime_ns for path in output.glob("*/layers/*.json")}
    quantflow(*arguments)
    assert hashes(output) == expected
    assert all(path.stat().st_mtime_ns == written for path, written in finished.items())
