"""Ranks that share a model, unified, are one rank's measurement.

They agree bit for bit, or as far as their sums have another order.
"""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from quantflow.errors import StatisticsError, UsageError
from quantflow.measuring import measure
from quantflow.measuring.job import MeasureJob
from quantflow.measuring.merging.ranks import unify as unify_measurements
from quantflow.measuring.record import open_measurements, read_measurement, read_meta
from quantflow.planning.recipe import Calibration, Measure, Quantize
from quantflow.quantizing import quantize
from quantflow.quantizing.job import QuantizeJob
from quantflow.reporting.progress_line import ProgressLine
from quantflow.unifying import unify
from quantflow.unifying.job import UnifyJob

QUIET = ProgressLine(quiet=True)
SAMPLES = 6
SUMS = {"abs_sum", "hessian_sum"}
STATS = "amax,channel_amax,min_max,mean_abs,histogram"
PATIENCE = 20  # seconds in which the ranks of a killed one have to end
# What every card computes as one rank does: weights, and what enters the first layer. A share of
# the outputs may come from another kernel than all of them, and later layers from sums over the
# cards.
UNTOUCHED = re.compile(r".*\|weight\|.*|model\.layers\.0\.self_attn\.[qkv]_proj\|input\|.*")


def command(*arguments: str | Path) -> list[str]:
    return [sys.executable, "-m", "quantflow", *map(str, arguments)]


def quantflow(*arguments: str | Path) -> str:
    result = subprocess.run(
        command(*arguments), capture_output=True, text=True, check=False, timeout=600
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def model(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight heads for queries, keys and values, so that eight ranks divide them."""
    folder = tmp_path_factory.mktemp("models") / "eight"
    torch.manual_seed(0)
    shape = {"vocab_size": 320, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 8, "max_position_embeddings": 128}
    config = LlamaConfig(
        **shape, **heads, bos_token_id=0, eos_token_id=1, initializer_range=0.1, attention_bias=True
    )
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
    return [
        "--calibration",
        str(text_files["calibration"]),
        "--samples",
        str(SAMPLES),
        "--sequence-length",
        "48",
    ]


def alone(model: Path, text_files: dict[str, Path], folder: Path, stats: str) -> Path:
    """Measure with one rank, in this process."""
    calibration = Calibration(
        source=str(text_files["calibration"]), samples=SAMPLES, sequence_length=48
    )
    return measure.run(
        MeasureJob(
            model=model,
            output=folder,
            calibration=calibration,
            options=Measure(stats=tuple(stats.split(","))),
        ),
        QUIET,
    )


@pytest.fixture(scope="module")
def single_folder(
    model: Path, text_files: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """What one rank measures."""
    return alone(model, text_files, tmp_path_factory.mktemp("single"), STATS)


@pytest.fixture(scope="module")
def single(single_folder: Path) -> dict[str, Tensor]:
    """Its statistics."""
    return statistics(single_folder)


@pytest.fixture(scope="module")
def measured(
    model: Path, options: list[str], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[int, int], Path]:
    """Return the folder of a world of ranks of which `tp` share a model, measured on first use."""
    made: dict[tuple[int, int], Path] = {}

    def ranks(world: int, tp: int) -> Path:
        if (world, tp) not in made:
            folder = tmp_path_factory.mktemp(f"ranks-{world}-{tp}") / "measured"
            quantflow(
                "measure",
                model,
                "-o",
                folder,
                *options,
                "--stats",
                STATS,
                "--ranks",
                str(world),
                "--tp",
                str(tp),
            )
            made[world, tp] = folder
        return made[world, tp]

    return ranks


def statistics(folder: Path) -> dict[str, Tensor]:
    (rank,) = sorted(folder.glob("rank-*"))
    return load_file(rank / "statistics.safetensors")


def compare(ours: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Equal where every card computes the same; elsewhere within 1e-5.

    Counts differ by at most the values that move over an edge.
    """
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
            torch.testing.assert_close(
                ours[key], value, rtol=1e-5, atol=1e-6, msg=lambda text, key=key: f"{key}: {text}"
            )


def unified(folder: Path, groups: int, work: Path) -> Path:
    """Unify ranks into so many groups, and where these are several, the groups into one."""
    fewer = unify.run(UnifyJob(measurement=folder, output=work / "fewer", ranks=groups), QUIET)
    assert len(list(fewer.glob("rank-*"))) == groups
    return (
        fewer if groups == 1 else unify.run(UnifyJob(measurement=fewer, output=work / "one"), QUIET)
    )


@pytest.mark.slow
@pytest.mark.parametrize("groups", [1, 2])
def test_ranks_that_share_a_model_see_what_one_rank_sees(
    measured: Callable[[int, int], Path], single: dict[str, Tensor], tmp_path: Path, groups: int
) -> None:
    compare(statistics(unified(measured(2, 2), groups, tmp_path)), single)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "tp"),
    [
        (4, 2),
        *(
            pytest.param(*larger, marks=pytest.mark.sweep)
            for larger in ((4, 4), (8, 8), (8, 4), (8, 2))
        ),
    ],
)
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_larger_worlds_in_any_number_of_groups_do_too(
    measured: Callable[[int, int], Path],
    single: dict[str, Tensor],
    tmp_path: Path,
    world: int,
    tp: int,
    groups: int,
) -> None:
    compare(statistics(unified(measured(world, tp), groups, tmp_path)), single)


@pytest.mark.slow
def test_hessians_of_what_every_card_sees_are_those_of_one_rank(
    model: Path, text_files: dict[str, Path], options: list[str], tmp_path: Path
) -> None:
    """Statistics of a row's input are on the cards in blocks, which unify refuses.

    They are left out here.
    """
    quantflow(
        "measure",
        model,
        "-o",
        tmp_path / "m",
        *options,
        "--stats",
        "amax,hessian",
        "--ranks",
        "4",
        "--tp",
        "2",
    )
    ranks = [read_measurement(folder) for folder in sorted((tmp_path / "m").glob("rank-*"))]
    blocks = re.compile(r".*(o_proj|down_proj)\|input\|(hessian_sum|count)")
    whole = [
        replace(
            one, statistics={k: v for k, v in one.statistics.items() if not blocks.fullmatch(k)}
        )
        for one in ranks
    ]
    (merged,) = unify_measurements(whole, [[0, 1, 2, 3]])
    expected = statistics(alone(model, text_files, tmp_path / "single", "amax,hessian"))
    hessians = [key for key in merged.statistics if key.endswith("hessian_sum")]
    assert len(hessians) == 15  # q, k, v, gate and up in each of three layers
    for key in hessians:
        assert (merged.statistics[key] - expected[key]).norm() <= 1e-6 * expected[key].norm(), key
        assert torch.equal(
            merged.statistics[key.replace("hessian_sum", "count")],
            expected[key.replace("hessian_sum", "count")],
        )


@pytest.mark.slow
def test_ranks_with_a_slice_of_every_expert_see_what_one_rank_sees(
    family_model: Callable[[str], Path],
    text_files: dict[str, Path],
    options: list[str],
    tmp_path: Path,
) -> None:
    """Qwen2-MoE's experts are cut, and the one that every token goes to is whole."""
    model = family_model("qwen2_moe")
    words = (*options, "--stats", STATS, "--ranks", "2", "--tp", "2")
    quantflow("measure", model, "-o", tmp_path / "m", *words)
    ranks = [read_measurement(folder) for folder in sorted((tmp_path / "m").glob("rank-*"))]
    expert = "model.layers.1.mlp.experts.3"
    for card, rank in enumerate(ranks):
        for linear, kind in (("gate_proj", "column"), ("up_proj", "column"), ("down_proj", "row")):
            held = rank.meta["tensors"][f"{expert}.{linear}"]
            assert (held["kind"], held["offset"], held["length"]) == (kind, 48 * card, 48)
        assert rank.statistics[f"{expert}.down_proj|input|channel_amax"].shape == (48,)
    compare(
        statistics(unified(tmp_path / "m", 1, tmp_path)),
        statistics(alone(model, text_files, tmp_path / "one", STATS)),
    )
    ledgers = [
        read_meta(next((tmp_path / name).glob("rank-*")))["routed"] for name in ("fewer", "one")
    ]
    assert ledgers[0] == ledgers[1]


def test_blocks_of_a_hessian_are_refused_by_name(measured: Callable[[int, int], Path]) -> None:
    """A rank has the products of its own channels of a row's input.

    No rank measured those between the cards.
    """
    key = "model.layers.0.mlp.down_proj|input|hessian_sum"
    folders = sorted(measured(2, 2).glob("rank-*"))
    ranks = [
        replace(one, statistics={**one.statistics, key: torch.eye(64)})
        for one in open_measurements({folder: read_meta(folder) for folder in folders})
    ]
    with pytest.raises(
        StatisticsError, match=re.escape(f"{key}: each card has the products of its own channels")
    ):
        unify_measurements(ranks, [[0, 1]])


def test_an_artifact_quantized_from_sharded_ranks_is_that_of_one_rank(
    model: Path, measured: Callable[[int, int], Path], single_folder: Path, tmp_path: Path
) -> None:
    """Scales are made once, of the merged maxima.

    Merging scales of shares would have to quantize their weights again.
    """
    written = []
    for name, measurement in (
        ("ranks", unified(measured(2, 2), 1, tmp_path)),
        ("one", single_folder),
    ):
        entry = Quantize(name=name, scheme="FP8")
        quantize.run(
            QuantizeJob(model=model, output=tmp_path / name, entry=entry, measurement=measurement),
            QUIET,
        )
        written.append(
            {
                k: v
                for path in sorted((tmp_path / name / "layers").glob("*.safetensors"))
                for k, v in load(path)
            }
        )
    ours, expected = written
    assert ours.keys() == expected.keys() and any("input" in key for key in ours)
    for key, value in expected.items():
        if "input" in key.rpartition(".")[2]:
            torch.testing.assert_close(ours[key], value, rtol=1e-5, atol=0.0)
        else:
            assert torch.equal(ours[key].view(torch.uint8), value.view(torch.uint8)), key


def load(path: Path) -> list[tuple[str, Tensor]]:
    return [(f"{path.stem}.{key}", value) for key, value in load_file(path).items()]


def test_a_rank_holds_its_slices_and_says_so(measured: Callable[[int, int], Path]) -> None:
    folder = measured(2, 2)
    metas = [
        json.loads((folder / f"rank-00{rank}-of-002" / "measurement.json").read_text())
        for rank in (0, 1)
    ]
    assert [meta["mesh"] for meta in metas] == [
        {"rank": rank, "world": 2, "tp": 2, "dp": 1, "ep": 1} for rank in (0, 1)
    ]
    query, down = (
        metas[1]["tensors"][f"model.layers.0.{name}"]
        for name in ("self_attn.q_proj", "mlp.down_proj")
    )
    assert (query["kind"], query["offset"], query["length"], query["full_shape"]) == (
        "column",
        32,
        32,
        [64, 64],
    )
    assert (down["kind"], down["offset"], down["length"], down["full_shape"]) == (
        "row",
        64,
        64,
        [64, 128],
    )
    found = load_file(folder / "rank-001-of-002" / "statistics.safetensors")
    assert found["model.layers.0.mlp.down_proj|input|channel_amax"].shape == (64,)
    assert found["model.layers.0.self_attn.q_proj|input|channel_amax"].shape == (64,)


@pytest.mark.slow
def test_the_cards_of_a_replica_see_the_same_sequences(
    measured: Callable[[int, int], Path],
) -> None:
    folder = measured(4, 2)
    found = [
        load_file(folder / f"rank-00{rank}-of-004" / "calibration.safetensors")["indices"].tolist()
        for rank in range(4)
    ]
    assert found == [[0, 2, 4], [0, 2, 4], [1, 3, 5], [1, 3, 5]]


@pytest.mark.parametrize(
    ("world", "tp", "message"),
    [(3, 3, "128 columns over 3 cards"), (4, 3, "4 ranks, tp=3"), (2, 0, "tp=0")],
    ids=["columns", "world", "zero"],
)
def test_a_world_that_does_not_divide_the_model_is_refused_before_anything_is_read(
    model: Path, text_files: dict[str, Path], tmp_path: Path, world: int, tp: int, message: str
) -> None:
    calibration = Calibration(
        source=str(text_files["calibration"]), samples=SAMPLES, sequence_length=48
    )
    with pytest.raises(UsageError, match=re.escape(message)):
        MeasureJob(
            model=model,
            output=tmp_path / "m",
            calibration=calibration,
            options=Measure(ranks=world, tp=tp),
        ).run(QUIET)
    assert not (tmp_path / "m").exists()


def test_ranks_that_are_not_those_of_the_launcher_are_refused(
    model: Path, text_files: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29500")
    calibration = Calibration(source=str(text_files["calibration"]), samples=SAMPLES)
    job = MeasureJob(
        model=model,
        output=tmp_path / "m",
        calibration=calibration,
        trust_network=True,
        options=Measure(ranks=4),
    )
    with pytest.raises(UsageError, match="ranks=4, torchrun started 2"):
        measure.run(job, QUIET)
    assert not (tmp_path / "m").exists()


def test_a_folder_of_other_ranks_is_refused_before_anything_is_measured(
    single_folder: Path, model: Path
) -> None:
    job = MeasureJob(
        model=model,
        output=single_folder,
        calibration=Calibration(source="not read"),
        options=Measure(ranks=2),
    )
    with pytest.raises(UsageError, match="rank-000-of-001: is not one of 2 ranks") as caught:
        measure.run(job, QUIET)
    assert caught.value.remedy == "give another -o, or remove that folder"


def test_one_rank_alone_remembers_hashes_in_the_folder_that_all_share(
    model: Path, text_files: dict[str, Path], tmp_path: Path
) -> None:
    """Two that wrote the file at once would take each other's temporary file away."""
    time.sleep(0.2)  # hashes of younger files are not remembered
    calibration = Calibration(
        source=str(text_files["calibration"]), samples=SAMPLES, sequence_length=48
    )
    job = MeasureJob(
        model=model,
        output=tmp_path / "m",
        calibration=calibration,
        options=Measure(stats=("amax",)),
    )
    measure._measure_rank(job, QUIET, rank=1, world=2)
    assert not (tmp_path / "m" / ".hashes.json").exists()
    measure._measure_rank(job, QUIET, rank=0, world=2)
    assert (tmp_path / "m" / ".hashes.json").exists()


@pytest.mark.slow
def test_machines_that_meet_under_an_outer_torchrun_measure_what_ranks_of_one_machine_do(
    model: Path, options: list[str], measured: Callable[[int, int], Path], tmp_path: Path
) -> None:
    """Two launchers that meet by an address, as on two machines.

    They write into one folder.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    launcher = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nnodes=2",
        "--nproc-per-node=1",
        "--local-addr=127.0.0.1",
    ]
    launcher += [
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint={address}",
        "--rdzv-id=one",
        "-m",
        "quantflow",
    ]
    line = [
        *launcher,
        "measure",
        str(model),
        "-o",
        str(tmp_path / "m"),
        *options,
        "--stats",
        STATS,
        "--tp",
        "2",
        "--trust-network",
    ]
    machines = [
        subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    try:
        said = []
        for machine in machines:
            out, told = machine.communicate(timeout=200)
            assert machine.returncode == 0, told
            said += out.splitlines()
    finally:
        for machine in machines:
            machine.kill()
            machine.communicate()
    assert contents(tmp_path / "m") == contents(measured(2, 2))
    assert said == [str(tmp_path / "m")]  # by the first rank, which keeps the log too
    assert "begin: quantflow measure" in (tmp_path / "m.log").read_text()


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.glob("rank-*/*")
        if path.name in measure.PARTS
    }


@pytest.mark.slow
def test_a_killed_rank_ends_the_others_and_the_same_command_makes_what_is_missing(
    model: Path, options: list[str], measured: Callable[[int, int], Path], tmp_path: Path
) -> None:
    folder, victim = tmp_path / "m", 3
    line = command(
        "measure", model, "-o", folder, *options, "--stats", STATS, "--ranks", "4", "--tp", "2"
    )
    process = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    began = kill_after_a_layer(victim, folder, process)
    _, told = process.communicate(timeout=60)
    assert time.monotonic() - began < PATIENCE
    assert process.returncode == 5, told
    assert (
        "error: rank 3 of 4 was ended by SIGKILL" in told
        and "the same command continues with what is missing" in told
    )
    assert not list(folder.glob("rank-*")) or {path.name for path in folder.glob("rank-*")} <= {
        "rank-000-of-004",
        "rank-001-of-004",
    }  # those of the other replica may have ended before; a folder of that name is a whole one:
    for path in folder.glob("rank-*"):
        read_measurement(path)
    made = {path: identity(path) for path in folder.rglob("*.safetensors")}
    assert (
        sum(path.parent.name == "layers" or path.name == "statistics.safetensors" for path in made)
        >= 4
    )
    with subprocess.Popen(
        line, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as again:
        while again.poll() is None:  # finished layers are there, unchanged, until their rank is
            for path, was in made.items():
                assert identity(path) in (was, None), path
            time.sleep(0.002)
        assert again.returncode == 0, again.communicate()[1]
    for path, was in made.items():
        if path.parent.name.startswith("rank-"):
            assert identity(path) == was
    assert contents(folder) == contents(measured(4, 2))


def identity(path: Path) -> tuple[int, int] | None:
    """Return what a file that is written again does not keep; None where there is no file."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_ino, found.st_mtime_ns


def kill_after_a_layer(victim: int, folder: Path, process: subprocess.Popen[str]) -> float:
    """Kill a rank when every rank has finished a layer; return when."""
    works = [folder / f".rank-00{rank}-of-004.work" for rank in range(4)]
    pid = wait_for(lambda: process_of(victim, folder), process)
    wait_for(lambda: any((works[victim] / "hidden").glob("0000[1-9].json")), process)
    # so that no rank of its replica can end before the others have come so far
    os.kill(pid, signal.SIGSTOP)
    for rank, work in enumerate(works):
        done = folder / work.name.removeprefix(".").removesuffix(".work")
        wait_for(
            lambda work=work, done=done: (
                any((work / "hidden").glob("0000[1-9].json")) or done.exists()
            ),
            process,
        )
        assert rank < 2 or not done.exists()
    os.kill(pid, signal.SIGKILL)
    return time.monotonic()


def wait_for(look: Callable[[], Any], process: subprocess.Popen[str]) -> Any:
    """Return what `look` finds once it finds anything."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None:
        if found := look():
            return found
        time.sleep(0.001)
    process.kill()
    raise AssertionError(f"nothing was found in time: {process.communicate()[1]}")


def process_of(rank: int, folder: Path) -> int | None:
    """Return the process of a rank, which its lock names."""
    lock = folder / f".rank-{rank:03d}-of-004.lock"
    return int(lock.read_text() or 0) or None if lock.is_file() else None
