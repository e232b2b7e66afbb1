"""Two ranks under torchrun, unified, are what one rank measures."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from quantflow.errors import QuantflowError
from quantflow.measuring import measure
from quantflow.measuring.job import MeasureJob
from quantflow.planning.recipe import Calibration, Measure, Quantize
from quantflow.quantizing import quantize
from quantflow.quantizing.job import QuantizeJob
from quantflow.reporting.progress_line import ProgressLine
from quantflow.stages.cli import cli
from quantflow.stages.cli.output import exit_code
from quantflow.unifying import unify
from quantflow.unifying.job import UnifyJob
from tests.shared import slow

QUIET = ProgressLine(quiet=True)
SAMPLES = 9  # odd, so that the ranks get 5 and 4
STATISTICS = {"amax", "channel_amax", "min_val", "max_val", "counts", "count", "abs_sum"}


def quantflow(*arguments: str | Path) -> int:
    return exit_code(cli, list(map(str, arguments)))


@pytest.fixture(scope="module")
def ranks(
    llama: Path, text_files: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """What two processes measured, each every second sequence."""
    folder = tmp_path_factory.mktemp("ranks") / "measured"
    calibration = [
        "--calibration",
        text_files["calibration"],
        "--samples",
        str(SAMPLES),
        "--sequence-length",
        "64",
    ]
    assert quantflow("measure", llama, "-o", folder, *calibration, "--ranks", "2") == 0
    return folder


@pytest.fixture(scope="module")
def unified(ranks: Path) -> Path:
    folder = ranks.parent / "unified"
    assert quantflow("unify", "-g", "01", "-m", ranks, "-o", folder) == 0
    return folder


@pytest.fixture(scope="module")
def single(
    llama: Path, text_files: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The same text measured by one rank, in this process."""
    folder = tmp_path_factory.mktemp("single") / "measured"
    calibration = Calibration(
        source=str(text_files["calibration"]), samples=SAMPLES, sequence_length=64
    )
    return measure.run(MeasureJob(model=llama, output=folder, calibration=calibration), QUIET)


def statistics(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "rank-000-of-001" / "statistics.safetensors")


def test_the_ranks_share_the_sequences_alternately(ranks: Path) -> None:
    found = [
        load_file(ranks / f"rank-00{rank}-of-002" / "calibration.safetensors")["indices"].tolist()
        for rank in (0, 1)
    ]
    assert found == [[0, 2, 4, 6, 8], [1, 3, 5, 7]]


def test_maxima_ranges_histograms_and_sums_are_those_of_one_rank_bit_for_bit(
    unified: Path, single: Path
) -> None:
    ours, expected = statistics(unified), statistics(single)
    assert {key.rpartition("|")[2] for key in expected} == STATISTICS
    assert_bits(ours, expected)


def assert_bits(ours: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert sorted(ours) == sorted(expected)
    for key, value in expected.items():
        assert ours[key].dtype == value.dtype, key
        assert torch.equal(ours[key], value), key


@pytest.mark.slow
def test_sums_of_any_number_of_replicas_and_in_groups_are_those_of_one_rank_bit_for_bit(
    llama: Path, text_files: dict[str, Path], tmp_path: Path
) -> None:
    calibration = Calibration(
        source=str(text_files["calibration"]), samples=37, sequence_length=16, pack=True
    )
    stats = ("mean_abs", "mean_square", "fisher")
    whole = []
    for world in (1, 2, 4, 8, 16):
        folder = tmp_path / str(world)
        job = MeasureJob(
            model=llama, output=folder, calibration=calibration, options=Measure(stats=stats)
        )
        for rank in range(world):  # what torchrun's processes run
            measure._measure_rank(job, QUIET, rank=rank, world=world)
        if world > 1:  # into two, and those into one
            two = UnifyJob(measurement=folder, output=tmp_path / f"{world}-2", ranks=2)
            one = UnifyJob(measurement=unify.run(two, QUIET), output=tmp_path / f"{world}-1")
            folder = unify.run(one, QUIET)
        whole.append(statistics(folder))
    sums = [key for key in whole[0] if key.endswith("_sum")]
    # seven linears in each of two layers, two sites of fisher
    assert len(sums) == 4 * 14
    for other in whole[1:]:
        assert_bits(other, whole[0])


def test_the_ranks_saw_different_text(ranks: Path) -> None:
    first, second = (
        load_file(ranks / f"rank-00{rank}-of-002" / "statistics.safetensors") for rank in (0, 1)
    )
    assert not torch.equal(
        first["model.layers.0.mlp.down_proj|input|abs_sum"],
        second["model.layers.0.mlp.down_proj|input|abs_sum"],
    )


def test_the_sequences_are_back_in_the_order_of_one_rank(unified: Path, single: Path) -> None:
    ours, expected = (
        load_file(folder / "rank-000-of-001" / "calibration.safetensors")
        for folder in (unified, single)
    )
    assert ours["indices"].tolist() == list(range(SAMPLES))
    assert torch.equal(ours["lengths"], expected["lengths"])
    assert torch.equal(ours["tokens"], expected["tokens"])


@pytest.mark.parametrize("world", [2, slow(4), slow(8)])
def test_replicas_in_any_number_of_groups_are_one_rank(
    llama: Path,
    text_files: dict[str, Path],
    single_with_hessians: dict[str, Tensor],
    tmp_path: Path,
    world: int,
) -> None:
    for rank in range(world):  # what torchrun's processes run
        measure._measure_rank(
            hessians(llama, text_files, tmp_path / "m"), QUIET, rank=rank, world=world
        )
    for groups in (1, 2, 4):
        if groups > world:
            continue
        folder = unify.run(
            UnifyJob(measurement=tmp_path / "m", output=tmp_path / str(groups), ranks=groups),
            QUIET,
        )
        if groups > 1:
            folder = unify.run(
                UnifyJob(measurement=folder, output=tmp_path / f"{groups}-to-1"), QUIET
            )
        ours = statistics(folder)
        assert ours.keys() == single_with_hessians.keys()
        for key, value in single_with_hessians.items():
            if key.endswith("hessian_sum"):
                assert (ours[key] - value).norm() <= 1e-6 * value.norm(), key
            else:
                assert ours[key].dtype == value.dtype and torch.equal(ours[key], value), key


def hessians(llama: Path, text_files: dict[str, Path], folder: Path) -> measure.MeasureJob:
    calibration = Calibration(
        source=str(text_files["calibration"]), samples=SAMPLES, sequence_length=64
    )
    stats = (*measure.DEFAULT_STATS, "hessian")
    return MeasureJob(
        model=llama, output=folder, calibration=calibration, options=Measure(stats=stats)
    )


@pytest.fixture(scope="module")
def single_with_hessians(
    llama: Path, text_files: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Tensor]:
    found = statistics(
        measure.run(hessians(llama, text_files, tmp_path_factory.mktemp("hessians")), QUIET)
    )
    assert sum(key.endswith("hessian_sum") for key in found) == 14
    return found


def test_keys_and_values_are_measured_in_the_cache_alone_so_nothing_is_made_to_agree_afterwards(
    unified: Path,
) -> None:
    """Operands of attention have scales of their own, until a script copies them.

    They are measured beside the cache.

    Queries are in no cache, so theirs are measured where attention takes them.
    """
    sites = {
        key.split("|")[1]
        for key in statistics(unified)
        if key.startswith("model.layers.0.self_attn|")
    }
    assert sites == {"k_cache", "v_cache", "query", "k_heads", "v_heads"}


@pytest.mark.parametrize(
    "entry", [{"scheme": "FP8"}, {"scheme": "W8A8_STATIC"}], ids=lambda entry: entry["scheme"]
)
def test_what_is_quantized_from_either_is_the_same(
    entry: dict[str, str], llama: Path, unified: Path, single: Path, tmp_path: Path
) -> None:
    written = []
    for index, folder in enumerate((unified, single)):
        output = tmp_path / str(index)
        job = QuantizeJob(
            model=llama, output=output, entry=Quantize(name="x", **entry), measurement=folder
        )
        quantize.run(job, QUIET)
        written.append(
            [(output / "layers" / f"0000{layer}.safetensors").read_bytes() for layer in (0, 1)]
        )
    assert written[0] == written[1]


def test_a_measurement_of_two_ranks_is_not_quantized_before_it_is_unified(
    llama: Path, ranks: Path, tmp_path: Path
) -> None:
    job = QuantizeJob(
        model=llama,
        output=tmp_path / "out",
        entry=Quantize(name="x", scheme="FP8"),
        measurement=ranks,
    )
    with pytest.raises(QuantflowError, match="2 ranks") as caught:
        quantize.run(job, QUIET)
    assert caught.value.exit_code == 3
    assert "quantflow unify" in caught.value.remedy


@pytest.mark.slow
def test_as_many_ranks_quantize_from_the_measurement_of_two_as_from_what_unify_makes_of_it(
    llama: Path, ranks: Path, unified: Path, tmp_path: Path
) -> None:
    """Every card takes its scales whole, so the two become one.

    It has the digest of unify's folder.
    """
    line = ("quantize", llama, "--scheme", "FP8", "--ranks", "2")
    for name, folder in (("two", ranks), ("one", unified)):
        assert quantflow(*line, "-o", tmp_path / name, "--measurement", folder) == 0
    for rank in (0, 1):
        paths = sorted((tmp_path / "one" / f"rank-00{rank}-of-002").rglob("*.safetensors"))
        assert len(paths) == 2
        for path in paths:
            assert (
                tmp_path / "two" / path.relative_to(tmp_path / "one")
            ).read_bytes() == path.read_bytes()
    records = [
        (tmp_path / name / "rank-000-of-002" / "quantize.json").read_bytes()
        for name in ("one", "two")
    ]
    assert records[0] == records[1]
    assert quantflow("unify", "-m", tmp_path / "two", "-o", tmp_path / "whole") == 0


def test_a_measurement_of_another_number_of_ranks_is_refused_with_both(
    llama: Path, ranks: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = (
        "quantize",
        llama,
        "-o",
        tmp_path / "out",
        "--scheme",
        "FP8",
        "--ranks",
        "4",
        "--measurement",
        ranks,
    )
    assert quantflow(*line) == 3
    assert "holds 2 ranks; quantize reads one or, with --ranks 4, 4" in capsys.readouterr().err


def test_of_sets_that_unify_merged_the_command_that_makes_one_is_said(
    llama: Path, ranks: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert quantflow("unify", "--ranks", "2", "-m", ranks, "-o", tmp_path / "u") == 0
    line = ("quantize", llama, "-o", tmp_path / "out", "--scheme", "FP8", "--measurement")
    for given in (tmp_path / "u", tmp_path / "u" / "rank-000-of-002"):
        capsys.readouterr()
        assert quantflow(*line, given) == 3
        told = capsys.readouterr().err
        assert f"make one of all: `quantflow unify -m {tmp_path / 'u'} -o DIR` without -g" in told
    assert quantflow(*line, tmp_path / "u") == 3
    assert "holds 2 ranks, each merged of a group by unify; quantize" in capsys.readouterr().err
    assert quantflow("unify", "-m", tmp_path / "u", "-o", tmp_path / "one") == 0
    assert "next: quantflow quantize MODEL -o DIR" in capsys.readouterr().err
    assert quantflow(*line, tmp_path / "one", "--no-export") == 0


def test_finished_ranks_are_left_alone(
    llama: Path, ranks: Path, text_files: dict[str, Path]
) -> None:
    before = {path: path.stat().st_mtime_ns for path in ranks.rglob("*.safetensors")}
    calibration = Calibration(
        source=str(text_files["calibration"]), samples=SAMPLES, sequence_length=64
    )
    # starts no torchrun
    measure.run(
        MeasureJob(model=llama, output=ranks, calibration=calibration, options=Measure(ranks=2)),
        QUIET,
    )
    assert {path: path.stat().st_mtime_ns for path in ranks.rglob("*.safetensors")} == before


def drop_a_rank(folder: Path, _single: Path) -> None:
    shutil.rmtree(folder / "rank-001-of-002")


def repeat_a_rank(folder: Path, _single: Path) -> None:
    shutil.rmtree(folder / "rank-001-of-002")
    shutil.copytree(folder / "rank-000-of-002", folder / "rank-001-of-002")


def add_a_rank_of_another_world(folder: Path, single: Path) -> None:
    shutil.copytree(single / "rank-000-of-001", folder / "rank-000-of-001")


def leave_a_rank_unfinished(folder: Path, _single: Path) -> None:
    (folder / "rank-001-of-002" / "DONE.json").unlink()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (drop_a_rank, "missing 1"),
        (repeat_a_rank, "twice 0"),
        (add_a_rank_of_another_world, "1, 2 ranks"),
        (leave_a_rank_unfinished, "rank-001-of-002: is unfinished"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_ranks_that_do_not_belong_together_are_refused(
    damage: Callable[[Path, Path], None], message: str, ranks: Path, single: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "ranks"
    shutil.copytree(ranks, folder)
    damage(folder, single)
    with pytest.raises(QuantflowError, match=message) as caught:
        unify.run(UnifyJob(measurement=folder, output=tmp_path / "out"), QUIET)
    assert caught.value.exit_code == 3
    assert not (tmp_path / "out").exists()


def test_a_rank_of_another_calibration_set_is_refused(
    llama: Path, ranks: Path, text_files: dict[str, Path], tmp_path: Path
) -> None:
    """One word is another throughout; names, shapes and counts fit."""
    folder, other = tmp_path / "ranks", tmp_path / "other.jsonl"
    other.write_text(text_files["calibration"].read_text().replace("scale", "point"))
    shutil.copytree(ranks, folder)
    shutil.rmtree(folder / "rank-001-of-002")
    calibration = Calibration(source=str(other), samples=SAMPLES, sequence_length=64)
    job = MeasureJob(model=llama, output=folder, calibration=calibration, options=Measure(ranks=2))
    measure._measure_rank(job, QUIET, rank=1, world=2)  # what torchrun's second process runs
    with pytest.raises(QuantflowError, match=r"rank 1: calibration\.hash") as caught:
        unify.run(UnifyJob(measurement=folder, output=tmp_path / "out"), QUIET)
    assert caught.value.exit_code == 3


def test_a_refused_rank_exits_with_code_3_and_says_which(
    ranks: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "ranks"
    shutil.copytree(ranks / "rank-000-of-002", folder / "rank-000-of-002")
    capsys.readouterr()
    assert quantflow("unify", "-g", "01", "-m", folder, "-o", tmp_path / "out") == 3
    told = capsys.readouterr().err
    assert "error: measurements of 2 ranks: missing 1, twice none" in told
    assert len(told.splitlines()) == 2
