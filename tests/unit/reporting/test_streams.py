"""stdout and stderr closed, unread or on a full disk: a promised exit code, never 120."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from tests.shared import slow

VERSION = Path(__file__).parents[2] / "golden" / "versions" / "0.1.0"
ARTIFACT = VERSION / "artifact"


def ended(shell, **environment):
    """Run a shell line in which $Q is the command line: exit code, stdout and stderr."""
    command = f"{sys.executable} -m quantflow"
    words = ["bash", "-c", f"set -o pipefail; {shell}"]
    variables = {**os.environ, "Q": command, "A": str(ARTIFACT), **environment}
    result = subprocess.run(words, env=variables, capture_output=True, check=False)
    return result.returncode, result.stdout.decode(), result.stderr.decode()


@pytest.mark.parametrize(
    "line", ["$Q inspect $A", "$Q inspect $A --json", "$Q verify $A", "$Q --help", "$Q --version"]
)
def test_a_full_disk_behind_stdout_is_a_sentence_and_exit_5(line):
    code, _, err = ended(f"{line} > /dev/full")
    assert (code, err.splitlines()) == (
        5,
        [
            "error: standard output: No space left on device",
            "  fix: free some space; the same command continues",
        ],
    )


def test_a_full_disk_behind_stderr_changes_no_exit_code():
    assert ended("$Q verify $A 2> /dev/full")[0] == 0
    assert ended("$Q verify /nowhere 2> /dev/full")[:2] == (3, "")
    assert ended("$Q verify /nowhere > /dev/full 2> /dev/full")[0] == 3
    assert ended("$Q verify $A > /dev/full 2> /dev/full")[0] == 5


@pytest.mark.parametrize("closed", [slow(">&-"), slow("2>&-"), ">&- 2>&-", "<&- >&- 2>&-"])
def test_closed_streams_change_no_exit_code(closed):
    assert ended(f"$Q verify $A {closed}")[0] == 0
    assert ended(f"$Q verify /nowhere {closed}")[0] == 3


def test_a_reader_that_has_enough_is_no_failure():
    assert ended("$Q inspect $A | true") == (0, "", "")
    code, out, err = ended("$Q inspect $A --json | head -n 1")
    assert (code, err) == (0, "") and out.strip() in ("{", "[")


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_line_on_stderr_is_out_before_the_process_ends(unbuffered):
    """Containers set PYTHONUNBUFFERED; a killed process must not take its tracebacks with it."""
    code = (
        "import os, sys, warnings; from quantflow.reporting.streams import guard; guard();"
        "print('said', file=sys.stderr); warnings.warn('warned');"
        "print('x', end='', flush=True); os._exit(9)"
    )
    found = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
        capture_output=True,
        check=False,
    )
    assert found.returncode == 9 and found.stdout == b"x"
    assert b"said\n" in found.stderr and b"warned" in found.stderr


def test_without_a_buffer_a_part_of_a_line_is_out_at_once():
    code = (
        "import os, sys; from quantflow.reporting.streams import guard; guard();"
        "sys.stdout.write('part'); sys.stderr.write('part'); os._exit(0)"
    )
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    found = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, check=False
    )
    assert (found.stdout, found.stderr) == (b"part", b"part")


@pytest.mark.slow
def test_what_a_gate_decides_is_the_exit_code_whoever_reads(tmp_path):
    wide, narrow = (
        {"ppl_ratio": n, "mean_kld": n, "kld_p999": n, "top1_agreement": t}
        for n, t in ((9e9, 0.0), (0.001, 1.0))
    )
    report = tmp_path / "validation"
    for name, thresholds in (("wide", wide), ("narrow", narrow)):
        (tmp_path / f"{name}.json").write_text(json.dumps({"thresholds": thresholds}))
    text = tmp_path / "t.jsonl"
    chance = random.Random(0)
    rows = [{"input_ids": chance.choices(range(3, 32), k=32)} for _ in range(8)]
    text.write_text("".join(json.dumps(row) + "\n" for row in rows))
    line = (
        f"$Q validate $A --baseline {VERSION / 'model'} --text {text} --tokens 256 -q "
        f"--report {report} --force"
    )
    assert ended(f"{line} --gate {tmp_path / 'narrow.json'}")[0] == 4
    gate = f"$Q gate {report} --gate {tmp_path / 'narrow.json'}"
    assert ended(f"{gate} | true")[0] == 4
    assert ended(f"$Q gate {report} --gate {tmp_path / 'wide.json'} | true")[0] == 0
    code, _, err = ended(f"{gate} > /dev/full")
    assert code == 5 and "standard output" in err


@pytest.mark.slow
def test_text_is_generated_until_nobody_reads_it():
    line = "$Q generate $A --prompt 'w10 w27 w5' --max-new-tokens 6 -q"
    assert ended(f"{line} | true") == (0, "", "")
    code, _, err = ended(f"{line} > /dev/full")
    assert code == 5 and err.startswith("error: standard output: No space left on device\n")
    assert ended(f"{line} >&-")[0] == 0


@pytest.mark.slow
def test_text_of_ranks_is_generated_until_nobody_reads_it(tmp_path):
    example = Path(__file__).parents[3] / "examples" / "tiny-llama"
    assert (
        ended(
            f"$Q quantize {example} -o {tmp_path / 'a'} --scheme W8A16 --algorithm rtn -q > "
            f"{tmp_path / 'said'}"
        )[0]
        == 0
    )
    line = f"$Q generate {tmp_path / 'a'} --prompt value --max-new-tokens 6 -q --ranks 2"
    assert ended(f"{line} | true") == (0, "", "")
    code, _, err = ended(f"{line} > /dev/full")
    assert code == 5 and err.startswith("error: standard output: No space left on device\n")


def test_what_the_encoding_of_a_terminal_lacks_is_spelled_out(tmp_path):
    line = f"$Q verify {tmp_path / '☃'}"
    code, _, err = ended(line, PYTHONIOENCODING="latin-1")
    assert code == 3 and "\\u2603" in err
