"""A rank on a device of its own, which is simulated; quantize_on_simulated_device.py starts some."""

import json
import sys
from pathlib import Path

from quantflow.calibration import measure
from quantflow.core.device import HOST, Device
from quantflow.core.kv import KVScales
from quantflow.core.parallel import Workers
from quantflow.core.qtensor import QTensor, QuantizedLinear
from quantflow.quantization import file_to_file, quantize
from quantflow.stages.cli import cli
from quantflow.stages.cli.output import exit_code
from tests.simulated_gpu import GPU, SimulatedGpu


def main() -> None:
    """Run the command line that stands behind the name of a file, which gets the devices that were asked for."""
    path, *words = sys.argv[1:]
    asked: set[str] = set()

    def opened(name: str) -> Device:
        asked.add(name)
        return HOST if name == "cpu" else Device(kind=GPU, model="simulated", capability="0.0")

    for stage in (measure, quantize):
        stage.open_device = opened  # type: ignore[attr-defined]
    file_to_file.Workers = lambda _count: Workers(1)  # type: ignore[attr-defined]
    with SimulatedGpu(Device.put, Device.fetch, QTensor.to, QuantizedLinear.to, KVScales.to) as gpu:
        code = exit_code(cli, words)
    Path(path).write_text(json.dumps({"asked": sorted(asked), "operators": gpu.operators}))
    sys.exit(code)
