"""Ranks that share a model, unified, are what one rank measures: bit for bit, or as far as their sums have another order."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from stages import measure
from stages._config import Calibration
from stages._progress import Progress

QUIET = Progress(quiet=True)
SAMPLES = 6
SUMS = {"abs_sum", "hessian_sum"}
STATS = "amax,channel_amax,min_max,mean_abs,histogram"
# What no sum over the cards has touched yet: the input of the first layer, the linears that it enters, and all weights.
UNTOUCHED = re.compile(r".*\|weight\|.*|model\.layers\.0\.self_attn\.[qkv]_proj\|.*|model\.layers\.0\.self_attn\|.*")


def command(*arguments: str | Path) -> list[str]:
    return [sys.executable, "-m", "stages.cli", *map(str, arguments)]


def quantflow(*arguments: str | Path) -> str:
    result = subprocess.run(command(*arguments), capture_output=True, text=True, check=False, timeout=600)
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def model(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight heads for queries, keys and values, so that eight ranks divide them."""
    folder = tmp_path_factory.mktemp("models") / "eight"
    torch.manual_seed(0)
    shape = {"vocab_size": 320, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 8, "max_position_embeddings": 128}
    config = LlamaConfig(**shape, **heads, bos_token_id=0, eos_token_id=1, initializer_range=0.1, attention_bias=True)
    made = LlamaForCausalLM(config)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0, 0.1)
    made.to(torch.bfloat16).save_pretrained(folder)
    for path in llama.glob("token*"):
        (folder / path.name).write_bytes(path.read_bytes())
    return folder


@pytest.fixture(scope="module")
def options(text_files: dict[str, Path]) -> list[str]:
    return ["--calibration", str(text_files["calibration"]), "--samples", str(SAMPLES), "--sequence-length", "48"]


@pytest.fixture(scope="module")
def single(model: Path, text_files: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tensor]:
    """What one rank measures."""
    folder = tmp_path_factory.mktemp("single")
    calibration = Calibration(source=str(text_files["calibration"]), samples=SAMPLES, sequence_length=48)
    job = measure.Job(model=model, output=folder, calibration=calibration, stats=tuple(STATS.split(",")))
    return statistics(measure.run(job, QUIET))


@pytest.fixture(scope="module")
def measured(model: Path, options: list[str], tmp_path_factory: pytest.TempPathFactory) -> Callable[[int, int], Path]:
    """Return the folder of a world of ranks of which `tp` share a model, measured on first use."""
    made: dict[tuple[int, int], Path] = {}

    def ranks(world: int, tp: int) -> Path:
        if (world, tp) not in made:
            folder = tmp_path_factory.mktemp(f"ranks-{world}-{tp}") / "measured"
            quantflow("measure", model, "-o", folder, *options, "--stats", STATS, "--ranks", str(world), "--tp", str(tp))
            made[world, tp] = folder
        return made[world, tp]

    return ranks


def statistics(folder: Path) -> dict[str, Tensor]:
    (rank,) = sorted(folder.glob("rank-*"))
    return load_file(rank / "statistics.safetensors")


def compare(ours: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Equal where no sum over cards came before; elsewhere within 1e-5, counts within what a value beside an edge moves."""
    assert sorted(ours) == sorted(expected)
    for key, value in expected.items():
        statistic = key.rpartition("|")[2]
        assert ours[key].shape == value.shape and ours[key].dtype == value.dtype, key
        if statistic == "count" or (UNTOUCHED.fullmatch(key) and statistic not in SUMS):
            assert torch.equal(ours[key], value), key
        elif statistic == "counts":
            assert ours[key].sum() == value.sum(), key
            assert (ours[key] - value).abs().sum() <= 2e-3 * value.sum(), key
        else:
            torch.testing.assert_close(ours[key], value, rtol=1e-5, atol=1e-6, msg=lambda text, key=key: f"{key}: {text}")


@pytest.mark.parametrize(("world", "tp"), [(2, 2), (4, 2)])
def test_ranks_that_share_a_model_see_what_one_rank_sees(
    measured: Callable[[int, int], Path], single: dict[str, Tensor], tmp_path: Path, world: int, tp: int
) -> None:
    everyone = "".join(map(str, range(world)))
    quantflow("unify", "-g", everyone, "-m", measured(world, tp), "-o", tmp_path / "unified")
    compare(statistics(tmp_path / "unified"), single)


@pytest.mark.slow
@pytest.mark.parametrize(("world", "tp"), [(4, 4), (8, 8), (8, 4), (8, 2)])
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_larger_worlds_in_any_number_of_groups_do_too(
    measured: Callable[[int, int], Path], single: dict[str, Tensor], tmp_path: Path, world: int, tp: int, groups: int
) -> None:
    quantflow("unify", "--ranks", str(groups), "-m", measured(world, tp), "-o", tmp_path / "fewer")
    assert len(list((tmp_path / "fewer").glob("rank-*"))) == groups
    if groups > 1:
        everyone = "".join(map(str, range(groups)))
        quantflow("unify", "-g", everyone, "-m", tmp_path / "fewer", "-o", tmp_path / "one")
    compare(statistics(tmp_path / ("one" if groups > 1 else "fewer")), single)


def test_a_rank_holds_its_slices_and_says_so(measured: Callable[[int, int], Path]) -> None:
    folder = measured(2, 2)
    metas = [json.loads((folder / f"rank-00{rank}-of-002" / "measurement.json").read_text()) for rank in (0, 1)]
    assert [meta["mesh"] for meta in metas] == [{"rank": rank, "world": 2, "tp": 2, "dp": 1, "ep": 1} for rank in (0, 1)]
    query, down = (metas[1]["tensors"][f"model.layers.0.{name}"] for name in ("self_attn.q_proj", "mlp.down_proj"))
    assert (query["kind"], query["offset"], query["length"], query["full_shape"]) == ("column", 32, 32, [64, 64])
    assert (down["kind"], down["offset"], down["length"], down["full_shape"]) == ("row", 64, 64, [64, 128])
    found = load_file(folder / "rank-001-of-002" / "statistics.safetensors")
    assert found["model.layers.0.mlp.down_proj|input|channel_amax"].shape == (64,)
    assert found["model.layers.0.self_attn.q_proj|input|channel_amax"].shape == (64,)


def test_the_cards_of_a_replica_see_the_same_sequences(measured: Callable[[int, int], Path]) -> None:
    folder = measured(4, 2)
    found = [load_file(folder / f"rank-00{rank}-of-004" / "calibration.safetensors")["indices"].tolist() for rank in range(4)]
    assert found == [[0, 2, 4], [0, 2, 4], [1, 3, 5], [1, 3, 5]]


@pytest.mark.parametrize(
    ("world", "tp", "message"),
    [(3, 3, "128 columns over 3 cards"), (4, 3, "4 ranks, tp=3"), (2, 0, "tp=0")],
    ids=["columns", "world", "zero"],
)
def test_a_world_that_does_not_divide_the_model_is_refused_before_anything_is_read(
    model: Path, options: list[str], tmp_path: Path, world: int, tp: int, message: str
) -> None:
    arguments = command("measure", model, "-o", tmp_path / "m", *options, "--ranks", str(world), "--tp", str(tp))
    result = subprocess.run(arguments, capture_output=True, text=True, check=False, timeout=120)
    assert result.returncode == 2 and message in result.stderr, result.stderr
    assert not (tmp_path / "m").exists()


def test_a_killed_rank_ends_the_others_and_the_same_command_completes(
    model: Path, options: list[str], measured: Callable[[int, int], Path], tmp_path: Path
) -> None:
    folder = tmp_path / "m"
    arguments = command("measure", model, "-o", folder, *options, "--stats", STATS, "--ranks", "2", "--tp", "2")
    process = subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    victim = wait_for_rank(1, folder, process)
    os.kill(victim, signal.SIGKILL)
    began = time.monotonic()
    _, told = process.communicate(timeout=60)
    assert process.returncode == 5, told
    assert "rank 1 of 2 was ended by SIGKILL" in told
    assert time.monotonic() - began < 20
    assert not list(folder.glob("rank-*"))
    subprocess.run(arguments, capture_output=True, check=True, timeout=300)
    for rank in (0, 1):
        name = f"rank-00{rank}-of-002/statistics.safetensors"
        assert (folder / name).read_bytes() == (measured(2, 2) / name).read_bytes()


def wait_for_rank(rank: int, folder: Path, process: subprocess.Popen[str]) -> int:
    """Return the process of a rank once it has begun to measure."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None:
        if list(folder.glob(f".rank-00{rank}-of-002.work/hidden/*.json")):
            for entry in Path("/proc").glob("[0-9]*/environ"):
                try:
                    environment = entry.read_bytes().split(b"\0")
                except OSError:
                    continue
                if f"RANK={rank}".encode() in environment and str(folder).encode() in entry.with_name("cmdline").read_bytes():
                    return int(entry.parent.name)
        time.sleep(0.005)
    raise AssertionError("the rank ended before it could be killed")
