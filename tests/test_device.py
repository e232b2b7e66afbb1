"""The tests of layers and of the runtime on a simulated device.

test_device_quantize.py has those of quantizing.
"""

import pytest

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    "tests",
    [
        "on_simulated_device.py",
        pytest.param("runtime_on_simulated_device.py", marks=pytest.mark.slow),
    ],
)
def test_on_a_simulated_device(tests, run_apart):
    run_apart(tests)
