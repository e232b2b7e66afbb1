"""The commands that docs/gaudi.md prints are run as printed.

Slow: measures and quantizes the model of this repository.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_the_commands_about_gaudi_run_as_printed(tmp_path):
    section = re.search(
        r"\n## On the example model\n(.*?)\n## ", (ROOT / "docs/gaudi.md").read_text(), re.DOTALL
    )[1]
    blocks = re.findall(r"```\n(.*?)```", section, re.DOTALL)
    commands = [block for block in blocks if "quantflow " in block]
    (shown,) = [block for block in blocks if block not in commands]
    assert [block.count("\n") for block in commands] == [6, 6]
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    (tmp_path / "bin").mkdir()
    for name, line in (
        ("quantflow", f'exec "{sys.executable}" -m quantflow "$@"'),
        ("python", f'exec "{sys.executable}" "$@"'),
    ):
        (tmp_path / "bin" / name).write_text(f"#!/bin/sh\n{line}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    environment = {
        **os.environ,
        "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
    }
    script = "set -e\n" + "".join(commands)
    result = subprocess.run(
        ["bash", "-c", script],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert shown in result.stdout
    assert (tmp_path / "work" / "artifact" / "quantflow.json").exists()
    assert (tmp_path / "work" / "two" / "measure_hooks_maxabs_1_2.npz").exists()
