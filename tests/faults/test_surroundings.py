"""The surroundings of a stage.

A source vanishes or cannot be read, a neighbour writes, a lock outlives its owner, a log is lost.
"""

import errno
import fcntl
import os
import signal
import subprocess
import sys

import pytest

from tests.shared import slow_but

READING = ["measure", "quantize", "file-to-file", "export"]


@pytest.mark.parametrize("stage", slow_but(READING, "file-to-file", "export"))
def test_a_source_that_vanishes_is_named_and_its_return_continues(commands, inputs, stage):
    command = commands(stage)
    with command.folder() as folder:
        weights = inputs["model"] / "model.safetensors"
        outcome = command.run(folder, kind="write", at=2, do="VANISH", path=str(weights))
        gone = weights.with_name("model.safetensors.gone")
        assert gone.exists()
        gone.replace(weights)
        assert outcome.code in (0, 3), outcome.stderr
        if outcome.code == 3:
            named = (f"error: {weights}: ", f"error: {weights.parent}: no {weights.name}")
            assert outcome.error[0].startswith(named), outcome.stderr
        command.check_state(folder)
        command.check_continues(folder)


@pytest.mark.parametrize("stage", slow_but(READING, "measure", "quantize"))
def test_a_source_that_cannot_be_read_is_named_and_the_same_command_continues(
    commands, inputs, stage
):
    command = commands(stage)
    reads = command.outcome.counts["read"]
    places = sorted({1 + reads * place // 3 for place in range(3)})
    assert reads > 0

    def fail(at: int) -> None:
        with command.folder() as folder:
            outcome = command.run(folder, kind="read", at=at, do="EIO")
            assert outcome.code == 3, outcome
            assert (
                outcome.error[0]
                == f"error: {inputs['model'] / 'model.safetensors'}: Input/output error"
            ), outcome.stderr
            command.check_state(folder)
            command.check_continues(folder)

    command.at_once(fail, places)
    print(f"{stage}: {len(places)} of {reads} reads failed")


def test_a_folder_that_a_live_process_writes_is_refused_with_its_number(commands):
    command = commands("file-to-file")
    with command.folder() as folder:
        lock = folder / ".out.lock"
        program = (
            "import fcntl,os,sys\n"
            "f=open(sys.argv[1],'w'); fcntl.flock(f,fcntl.LOCK_EX); f.write(str(os.getpid())); "
            "f.flush()\n"
            "print('held',flush=True); sys.stdin.read()"
        )
        holder = subprocess.Popen(
            [sys.executable, "-c", program, str(lock)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        with holder:
            assert holder.stdout.readline() == "held\n"
            outcome = command.run(folder)
            assert outcome.code == 5
            assert (
                outcome.error[0] == f"error: {folder / 'out'}: process {holder.pid} is writing it"
            )
            holder.kill()  # and its lock is stale: nobody holds it
        assert lock.read_text() == str(holder.pid)
        command.check_continues(folder)


def test_the_lock_of_a_killed_run_is_taken_over(commands):
    command = commands("file-to-file")
    with command.folder() as folder:
        assert command.run(folder, kind="write", at=5, do="KILL").code == -signal.SIGKILL
        with open(folder / ".out.lock", "r+") as lock:
            assert lock.read().isdecimal()
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        command.check_continues(folder)


@pytest.mark.parametrize("number", ["ENOSPC", "EIO"])
def test_a_log_that_cannot_be_written_is_said_once_and_loses_nothing(commands, number):
    command = commands("file-to-file")
    with command.folder() as folder:
        outcome = command.run(folder, log=number)
        assert outcome.code == 0
        told = [line for line in outcome.stderr.splitlines() if line.startswith("log: ")]
        reason = os.strerror(getattr(errno, number))
        assert told == [f"log: {folder / 'out.log'}: {reason}; the run goes on without it"]
        command.check_made(folder)


def test_the_log_tells_the_command_every_layer_and_the_peak_of_memory(commands):
    command = commands("file-to-file")
    with command.folder() as folder:
        command.run(folder)
        lines = [line.split(" ", 1)[1] for line in (folder / "out.log").read_text().splitlines()]
        assert lines[0].startswith("begin: quantflow quantize ")
        assert [line for line in lines if "layer 1 of 2" in line] and [
            line for line in lines if "layer 2 of 2" in line
        ]
        assert lines[-1].startswith("done, after ") and "peak RSS" in lines[-1]
