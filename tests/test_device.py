"""The tests of layers and of the runtime on a simulated device, in processes of their own.

torch cannot forget a kind of device that it was told of.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

FILES = (
    "on_simulated_device.py",
    "runtime_on_simulated_device.py",
    "quantize_on_simulated_device.py",
    "memory_of_simulated_device.py",
)


def _run(tests: str, *words: str) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *words, Path(__file__).parent / tests]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]


@pytest.mark.parametrize("tests", FILES)
def test_on_a_simulated_device(tests: str) -> None:
    _run(tests)


@pytest.mark.slow
@pytest.mark.parametrize("tests", FILES[2:])
def test_more_layers_run_on_a_simulated_device(tests: str) -> None:
    _run(tests, "-m", "slow")
