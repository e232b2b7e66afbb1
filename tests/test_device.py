"""The tests of layers and of the runtime on a simulated device, in processes of their own.

torch cannot forget a kind of device that it was told of.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize("tests", ["on_simulated_device.py", "runtime_on_simulated_device.py"])
def test_on_a_simulated_device(tests: str) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", Path(__file__).parent / tests]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
