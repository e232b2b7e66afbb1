"""The tests of quantizing on a simulated device, and of the memory that it takes there."""

import pytest

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("tests", "chosen"),
    [
        ("quantize_on_simulated_device.py", "not slow"),
        ("quantize_on_simulated_device.py", "slow"),
        ("memory_of_simulated_device.py", "slow or not slow"),
    ],
)
def test_layers_are_quantized_on_a_simulated_device(tests, chosen, run_apart):
    run_apart(tests, "-m", chosen)
