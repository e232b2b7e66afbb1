"""Ranks are started by us alone, end together, and the one that failed is named."""

import os
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from quantflow import child_process
from quantflow.distributed import launch as launching
from quantflow.distributed.launch import (
    LOST,
    _error,
    _Failure,
    _first,
    launch,
    launched_environment,
    launched_rank,
    require_trust,
    speaks,
)
from quantflow.errors import InputError, IntegrityError, QuantflowError, ResourceError, UsageError
from quantflow.reporting.progress_line import ProgressLine

TORCHRUN = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "first", "MASTER_PORT": "29500"}


@pytest.fixture(autouse=True)
def no_rank(monkeypatch):
    for name in (*TORCHRUN, "QUANTFLOW_LAUNCHED"):
        monkeypatch.delenv(name, raising=False)


def put(monkeypatch, variables):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


def test_the_rank_is_what_the_environment_says(monkeypatch):
    assert launched_rank() is None
    put(monkeypatch, {"RANK": "1", "WORLD_SIZE": "4"})
    assert launched_rank() == (1, 4)


@pytest.mark.parametrize(
    ("rank", "world"),
    [
        *[
            ("1", None),
            (None, "4"),
            ("", "4"),
            ("1", ""),
            ("one", "4"),
            ("1", "4.0"),
            ("-1", "4"),
            ("٣", "4"),
        ],
        *[("4", "4"), ("0", "0"), ("0", "65537"), ("0", "9" * 5000)],
    ],
)
def test_a_rank_that_is_none_is_a_mistake_in_the_environment_and_not_one_process(
    monkeypatch, rank, world
):
    put(
        monkeypatch,
        {
            name: value
            for name, value in (("RANK", rank), ("WORLD_SIZE", world))
            if value is not None
        },
    )
    with pytest.raises(UsageError, match=f"RANK={rank or ''} WORLD_SIZE={world or ''}: not "):
        launched_rank()


def test_of_ranks_that_somebody_started_the_first_speaks_and_of_our_own_none(monkeypatch):
    assert speaks()
    for rank, alone in ((0, True), (1, False)):
        put(monkeypatch, {"RANK": str(rank), "WORLD_SIZE": "2"})
        assert speaks() is alone
    for rank in (0, 1):
        put(monkeypatch, launched_environment("private", rank=rank, world=2))
        assert not speaks()


def test_the_ranks_of_somebodys_torchrun_need_consent_and_an_address(monkeypatch):
    require_trust("measure", trusted=False)  # no rank
    put(monkeypatch, TORCHRUN)
    with pytest.raises(
        UsageError, match="measure: torchrun's store at first:29500 is open to everybody"
    ) as caught:
        require_trust("measure", trusted=False)
    assert "--trust-network" in caught.value.remedy and "--ranks N" in caught.value.remedy
    require_trust("measure", trusted=True)
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        for wrong in ("", "port", "70000")[: 3 if name == "MASTER_PORT" else 1]:
            with monkeypatch.context() as patch:
                patch.setenv(name, wrong)
                with pytest.raises(
                    UsageError, match=f"{name}={wrong}.*no address where ranks can meet"
                ):
                    require_trust("measure", trusted=True)
    put(monkeypatch, launched_environment("private", rank=0, world=2))
    require_trust("measure", trusted=False)  # ours meet in a private folder


@pytest.mark.parametrize(
    ("ends", "said", "named", "exit_code"),
    [
        (
            {2: 3, 0: 3, 3: -9, 1: -15},
            {2: LOST, 0: f"measure: {LOST}: reset"},
            "rank 3 of 4 was ended by SIGKILL",
            5,
        ),
        ({0: -15, 1: 3}, {1: "m.txt: not there"}, "rank 1 of 4 failed: m.txt: not there", 3),
        ({0: 5, 2: 7}, {0: LOST, 2: "x: differs"}, "rank 2 of 4 failed: x: differs", 7),
        ({0: 143, 2: 2}, {0: "terminated", 2: "use 4"}, "rank 2 of 4 failed: use 4", 2),
        ({1: 5, 0: 5}, {1: LOST, 0: LOST}, "rank 1 of 4 failed: another rank ended", 5),
        ({3: 1}, {}, "rank 3 of 4 failed: it said nothing", 3),
    ],
)
def test_the_rank_that_ended_the_others_is_named(ends, said, named, exit_code):
    """Others fail because of it: their connection breaks, or they are asked to end."""
    failures = [_Failure(cause=said[rank]) if rank in said else _Failure() for rank in range(4)]
    first = _first(ends, failures)
    assert first is not None
    error = _error(first, ends[first], failures[first], ranks=4, again="the same command continues")
    assert error.cause.startswith(named) and error.exit_code == exit_code
    assert error.remedy.endswith("the same command continues")


def test_nobody_failed_where_all_ended_well():
    assert _first({0: 0, 1: 0}, [_Failure(), _Failure()]) is None


def test_a_child_imports_nothing_from_the_folder_that_it_is_started_in(tmp_path):
    for name in ("random", "torch", "quantflow"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('code of the folder ran')")
    program = (
        "import random, sys, subprocess; "
        "subprocess.run([sys.executable, '-c', 'import random'], check=True)"
    )
    (tmp_path / "runs.py").write_text("raise SystemExit('code of the folder ran')")
    command = [*child_process.python_module("timeit")[:2], "-c", program]
    subprocess.run(command, cwd=tmp_path, env=child_process.environment(), check=True)
    result = subprocess.run(
        child_process.python_module("runs"),
        cwd=tmp_path,
        env=child_process.environment(),
        capture_output=True,
        text=True,
    )
    assert result.returncode == 1 and "No module named runs" in result.stderr


RANK = """
import os, signal, sys, time
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
{body}
"""


QUIET = ProgressLine(quiet=True)


@dataclass(frozen=True)
class Nothing:
    """A job; what the ranks of these tests do does not depend on it."""

    number: int = 0


@pytest.fixture
def started(monkeypatch, tmp_path):
    """A function that launches ranks which run `body`, and returns what `launch` does."""

    def run(body, *, ranks=2, stream=None, progress=QUIET):
        script = tmp_path / "rank.py"
        script.write_text(RANK.format(body=body))
        command = lambda _module, arguments: [sys.executable, "-P", str(script), *arguments]  # noqa: E731
        monkeypatch.setattr(launching.child_process, "python_module", command)
        monkeypatch.setattr(launching, "_GRACE", 0.5)
        return launch("measure", Nothing(), ranks=ranks, progress=progress, stream=stream)

    return run


def test_the_first_ranks_output_and_result_come_back_and_the_others_are_hushed(started):
    pieces = []
    body = (
        "print('rank', rank, 'of', world)\n"
        "if rank == 0: open(sys.argv[1] + '/result.json', 'w').write('{\"tokens\": 3}')"
    )
    assert started(body, ranks=3, stream=pieces.append) == {"tokens": 3}
    assert "".join(pieces) == "rank 0 of 3\n"


def test_the_start_of_several_ranks_is_said(started, capsys):
    started("", ranks=2, progress=ProgressLine())
    assert capsys.readouterr().err == "measure: 2 ranks start, which may take half a minute\n"
    started("", ranks=1, progress=ProgressLine())
    assert capsys.readouterr().err == ""


def test_a_rank_that_fails_ends_the_others_and_its_sentence_and_code_are_raised(started):
    body = (
        "if rank == 0: time.sleep(600)\n"
        "sys.stderr.write('error: x.npz: differs\\n  fix: copy it again\\n'); sys.exit(7)"
    )
    began = time.monotonic()
    with pytest.raises(IntegrityError, match="rank 1 of 2 failed: x.npz: differs") as caught:
        started(body)
    assert caught.value.remedy.startswith("copy it again; the same command")
    assert time.monotonic() - began < 60


def test_a_rank_that_does_not_end_when_it_is_asked_is_killed(started):
    body = (
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "if rank == 0: time.sleep(600)\n"
        "time.sleep(0.5); sys.exit(2)"
    )
    began = time.monotonic()
    with pytest.raises(UsageError, match="rank 1 of 2 failed"):
        started(body)
    assert time.monotonic() - began < 60


def test_a_killed_rank_is_named(started):
    with pytest.raises(ResourceError, match="rank 1 of 3 was ended by SIGKILL"):
        started("if rank == 1: os.kill(os.getpid(), signal.SIGKILL)\ntime.sleep(600)", ranks=3)


def test_a_rank_that_writes_bytes_that_are_no_text_is_still_heard(started):
    body = (
        "sys.stderr.buffer.write(b'\\xff\\xfe\\n'); "
        "sys.stderr.write('error: m: empty\\n'); sys.exit(3)"
    )
    with pytest.raises(InputError, match="failed: m: empty"):
        started(body)


def test_a_process_that_a_rank_leaves_does_not_hold_up_the_end(started):
    body = (
        "import subprocess; "
        "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(20)'])\n"
        "sys.exit(5)"
    )
    began = time.monotonic()
    with pytest.raises(QuantflowError):
        started(body)
    assert time.monotonic() - began < 15


@pytest.mark.skipif(sys.platform != "linux", reason="sockets are looked for in /proc")
def test_ranks_listen_on_the_loopback_interface_alone(tmp_path):
    """Two processes that make torch's group as ours do; no port of theirs is reachable."""
    program = (
        "import datetime, os, sys, time, torch\n"
        "from torch import distributed\n"
        "from quantflow.distributed.team import meet\n"
        "meet(datetime.timedelta(seconds=60))\n"
        "total = torch.ones(1); distributed.all_reduce(total); assert total == 2\n"
        "print('met', flush=True); sys.stdin.readline()\n"
    )
    (tmp_path / "private").mkdir()
    ranks = []
    for rank in range(2):
        environment = launched_environment(str(tmp_path / "private"), rank=rank, world=2)
        ranks.append(
            subprocess.Popen(
                [sys.executable, "-P", "-c", program],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        )
    try:
        assert [rank.stdout.readline() for rank in ranks] == ["met\n"] * 2
        found = [address for rank in ranks for address in listening(rank.pid)]
        assert found and set(found) <= {"127.0.0.1", "::1"}
    finally:
        for rank in ranks:
            rank.communicate("\n")


def listening(process: int) -> list[str]:
    """The addresses at which a process accepts connections."""
    inodes = set()
    for descriptor in Path(f"/proc/{process}/fd").iterdir():
        target = os.readlink(descriptor)
        if target.startswith("socket:["):
            inodes.add(target[8:-1])
    found = []
    for table, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for line in Path(f"/proc/{process}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:  # LISTEN
                raw = bytes.fromhex(fields[1].partition(":")[0])
                # of 4 bytes, in this CPU's order
                words = b"".join(raw[at : at + 4][::-1] for at in range(0, len(raw), 4))
                found.append(socket.inet_ntop(family, words))
    return found
