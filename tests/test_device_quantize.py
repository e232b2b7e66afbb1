"""The tests of quantizing on a simulated device, and of the memory that it takes there."""

import pytest


@pytest.mark.slow
@pytest.mark.parametrize("tests", ["quantize_on_simulated_device.py", "memory_of_simulated_device.py"])
def test_layers_are_quantized_on_a_simulated_device(tests, run_apart):
    run_apart(tests, "-m", "slow or not slow")
