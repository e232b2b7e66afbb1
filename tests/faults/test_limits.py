"""Limits of the system.

They are descriptors, memory, the size of a file, permissions, quotas, disks that are read-only or
slow, clocks.

Each stage ends with the promised code and two lines, leaves nothing partial under a final name, and
without the limit the same command makes the same bytes. `slow` is a few limits of one stage;
`sweep` is every stage with more limits.
"""

import os
import subprocess
from collections import Counter

import pytest

pytestmark = pytest.mark.slow

STAGES = (
    *("measure", "measure-gradients", "quantize", "file-to-file", "unify", "unify-shards"),
    *("export", "export-shards", "export-replace", "validate", "run"),
)
MIB = 1 << 20
SWEEPS = {
    "NOFILE": ((0, 2, 6), (0, 1, 2, 3, 4, 5, 6, 8, 10, 12, 16)),  # descriptors
    # bytes
    "FSIZE": (
        (8192, 50_000),
        (512, 8192, 12_000, 20_000, 30_000, 50_000, 75_000, 100_000, 150_000, 250_000),
    ),
    "AS": (
        (0, 8 * MIB),
        (
            0,
            MIB,
            2 * MIB,
            4 * MIB,
            8 * MIB,
            12 * MIB,
            16 * MIB,
            24 * MIB,
            32 * MIB,
            64 * MIB,
            128 * MIB,
        ),
    ),
}
SAID = {
    "NOFILE": ("Too many open files",),
    "FSIZE": ("File too large",),
    "AS": ("memory", "Resource temporarily"),
}
further = pytest.mark.sweep


def kept(command, folder, outcome, code: int) -> bool:
    """Assert that a run ended as promised; return whether it came to its end."""
    if outcome.code == 0:
        command.check_made(folder)
        return True
    assert outcome.code == code, outcome
    cause, remedy = outcome.error
    assert (
        cause.startswith("error: ")
        and remedy.startswith("  fix: ")
        and "Traceback" not in outcome.stderr
    ), outcome.stderr
    command.check_state(folder)
    return False


def sweep(command, name: str, values) -> Counter[str]:
    def strike(value: int) -> str:
        with command.folder() as folder:
            outcome = command.run(folder, limits={name: value})
            ended = kept(command, folder, outcome, 5)
            assert ended or any(words in outcome.error[0] for words in SAID[name]), (
                value,
                outcome.stderr,
            )
            command.check_continues(folder)
        return "done" if ended else "refused"

    ended = Counter(command.at_once(strike, values))
    print(f"{command.name}: {name} of {', '.join(map(str, values))}: {dict(ended)}")
    return ended


@pytest.mark.parametrize("limit", SWEEPS)
def test_a_limit_ends_a_stage_with_a_sentence_and_without_it_the_same_command_continues(
    commands, limit
):
    assert sweep(commands("quantize"), limit, SWEEPS[limit][0])["refused"] > 0


@further
@pytest.mark.parametrize("limit", SWEEPS)
@pytest.mark.parametrize("stage", STAGES)
def test_every_limit_ends_every_stage_with_a_sentence_and_without_it_the_same_command_continues(
    commands, stage, limit
):
    assert sweep(commands(stage), limit, SWEEPS[limit][1])["refused"] > 0


def starve(command, count: int) -> None:
    """Refuse one of `count` blocks that tensors are made in."""
    blocks = command.outcome.allocations
    if not blocks:
        pytest.skip("the stage makes no tensor, or no compiler made the allocator")

    def strike(at: int) -> bool:
        with command.folder() as folder:
            outcome = command.run(folder, allocation=at)
            ended = kept(command, folder, outcome, 5)
            assert ended or "memory" in outcome.error[0], (at, outcome.stderr)
            command.check_continues(folder)
        return ended

    ended = Counter(
        command.at_once(strike, sorted({1 + blocks * place // count for place in range(count)}))
    )
    print(
        f"{command.name}: {count} of {blocks} blocks refused: {ended[True]} done, {ended[False]} "
        "refused"
    )
    assert ended[False] > 0


@pytest.mark.parametrize("stage", ["measure", "quantize", "export", "validate"])
def test_a_tensor_that_there_is_no_memory_for_ends_a_stage_with_a_sentence_and_it_continues(
    commands, stage
):
    starve(commands(stage), 4)


@further
@pytest.mark.parametrize("stage", STAGES)
def test_any_tensor_that_there_is_no_memory_for_ends_every_stage_with_a_sentence_and_it_continues(
    commands, stage
):
    starve(commands(stage), 16)


def turn(command, number: str, count: int, *, code: int = 3) -> None:
    """Let every change of the disk fail from one of `count` calls on."""
    calls = sum(command.outcome.counts[kind] for kind in command.outcome.counts if kind != "read")

    def strike(at: int) -> None:
        with command.folder() as folder:
            outcome = command.run(folder, since=True, at=at, do=number)
            if not kept(command, folder, outcome, code):
                assert outcome.error[0].startswith(f"error: {folder}"), outcome.stderr
            command.check_continues(folder)

    command.at_once(strike, sorted({1 + calls * place // count for place in range(count)}))


@pytest.mark.parametrize("number", ["EROFS", "EACCES"])
def test_a_disk_that_turns_read_only_ends_a_stage_with_its_name(commands, number):
    turn(commands("file-to-file"), number, 3)


@pytest.mark.parametrize("stage", ["file-to-file", pytest.param("run", marks=further)])
def test_a_quota_that_is_used_up_ends_a_stage_with_5_and_its_name(commands, stage):
    turn(commands(stage), "EDQUOT", 3, code=5)


@further
@pytest.mark.parametrize("number", ["EROFS", "EACCES"])
@pytest.mark.parametrize("stage", STAGES)
def test_a_disk_that_turns_read_only_at_any_moment_ends_every_stage_with_its_name(
    commands, stage, number
):
    turn(commands(stage), number, 20)


@pytest.mark.parametrize(
    "stage", ["file-to-file", *(pytest.param(stage, marks=further) for stage in STAGES)]
)
def test_a_folder_without_permission_to_write_ends_every_stage_before_its_work(commands, stage):
    command = commands(stage)
    with command.folder() as folder:
        folder.chmod(0o500)
        outcome = command.run(folder, plain=True)
        folder.chmod(0o700)
        assert not kept(command, folder, outcome, 3)
        assert outcome.error[0].startswith(f"error: {folder}") and outcome.error[0].endswith(
            "Permission denied"
        )
        command.check_continues(folder)


@pytest.mark.parametrize("stage", ["measure", "quantize", "file-to-file", "export"])
def test_a_source_without_permission_to_read_is_named(commands, inputs, stage):
    command = commands(stage)
    weights = inputs["model"] / "model.safetensors"
    mode = weights.stat().st_mode
    with command.folder() as folder:
        weights.chmod(0)
        try:
            outcome = command.run(folder, plain=True)
        finally:
            weights.chmod(mode)
        assert not kept(command, folder, outcome, 3)
        assert str(weights) in outcome.error[0] and "ermission denied" in outcome.error[0], (
            outcome.stderr
        )
        command.check_continues(folder)


@pytest.fixture
def read_only(tmp_path):
    """Return a folder of a file system that is mounted read-only."""
    folder = tmp_path / "mounted"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "ro,size=1m", "none", folder],
        check=False,
        capture_output=True,
    )
    if mounted.returncode:
        pytest.skip("this user mounts nothing")
    yield folder
    subprocess.run(["umount", folder], check=True)


@pytest.mark.parametrize(
    "stage", ["file-to-file", *(pytest.param(stage, marks=further) for stage in STAGES)]
)
def test_an_output_on_a_read_only_file_system_is_refused_before_any_work(
    commands, read_only, stage
):
    command = commands(stage)
    outcome = command.server.run(command.arguments(read_only), read_only)
    assert outcome.code == 3, outcome
    assert outcome.error[0].startswith(f"error: {read_only}") and outcome.error[0].endswith(
        "Read-only file system"
    )
    assert "choose another -o" in outcome.error[1]


@pytest.mark.parametrize(
    "stage", ["file-to-file", *(pytest.param(stage, marks=further) for stage in STAGES)]
)
@pytest.mark.parametrize("year", [0.0, 4102444800.0])  # 1970 and 2100
def test_a_clock_that_jumps_and_files_of_other_centuries_change_no_byte(
    commands, inputs, stage, year
):
    command = commands(stage)
    files = [path for path in inputs["model"].iterdir() if path.is_file()]
    times = [(path.stat().st_atime_ns, path.stat().st_mtime_ns) for path in files]
    with command.folder() as folder:
        for path in files:
            os.utime(path, (year, year))
        try:
            # and the clock goes back meanwhile
            outcome = command.run(folder, clock=86_400, kind="fsync", at=2, do="KILL")
            assert outcome.code == -9, outcome
            command.check_state(folder)
            command.check_continues(folder)
        finally:
            for path, (accessed, modified) in zip(files, times, strict=True):
                os.utime(path, ns=(accessed, modified))


@pytest.fixture
def inputs_read_only(inputs, commands):
    """Take the permission to write from all that stages read."""
    command = commands("export")  # and what it reads is made
    folders = [inputs["model"], command.work / "made"]
    paths = [path for folder in folders for path in (folder, *folder.rglob("*"))]
    modes = [path.stat().st_mode for path in paths]
    for path, mode in zip(paths, modes, strict=True):
        path.chmod(mode & ~0o222)
    yield
    for path, mode in zip(paths, modes, strict=True):
        path.chmod(mode)


@pytest.mark.parametrize("stage", ["measure", "quantize", "file-to-file", "export"])
def test_inputs_that_cannot_be_written_and_another_time_zone_change_no_byte(
    commands, inputs_read_only, stage
):
    command = commands(stage)
    with command.folder() as folder:
        outcome = command.run(folder, plain=True, zone="XYZ-13:45")
        assert outcome.code == 0, outcome
        command.check_made(folder)


def test_a_signal_on_a_slow_disk_ends_a_stage_with_its_code_and_the_same_command_continues(
    commands,
):
    command = commands("file-to-file")
    with command.folder() as folder:
        outcome = command.run(
            folder, slow=0.1, kind="fsync", at=command.outcome.counts["fsync"] // 2, do="TERM"
        )
        assert outcome.code == 143, outcome
        command.check_state(folder)
        command.check_continues(folder)
