"""A rank on a simulated device of its own.

quantize_on_simulated_device.py starts some.
"""

import json
import sys
from pathlib import Path

from torch.distributed import Backend

from quantflow.core.device import HOST, Device
from quantflow.core.kv import KVScales
from quantflow.core.parallel import Workers
from quantflow.core.qtensor import QTensor, QuantizedLinear
from quantflow.measuring import measure
from quantflow.quantizing import file_to_file, quantize
from quantflow.stages.cli import cli
from quantflow.stages.cli.output import exit_code
from tests.simulated_gpu import GPU, KIND, SimulatedGpu

APART = "apart"  # the word that leaves torch without a backend between the devices


def main() -> None:
    """Run the command line that stands behind the name of a file.

    The file gets what was seen of the device.
    """
    path, *words = sys.argv[1:]
    asked: set[str] = set()

    def opened(name: str) -> Device:
        asked.add(name)
        return HOST if name == "cpu" else Device(kind=GPU, model="simulated", capability="0.0")

    for stage in (measure, quantize):
        stage.open_device = opened  # type: ignore[attr-defined]
    file_to_file.Workers = lambda _count: Workers(1)  # type: ignore[attr-defined]
    if words[0] == APART:
        del Backend.default_device_backend_map[KIND], words[0]
    with SimulatedGpu(Device.put, Device.fetch, QTensor.to, QuantizedLinear.to, KVScales.to) as gpu:
        code = exit_code(cli, words)
    seen = {
        "asked": sorted(asked),
        "operators": gpu.operators,
        "exchanged": gpu.exchanged_bytes,
        "fetched": gpu.fetched_bytes,
    }
    Path(path).write_text(json.dumps(seen))
    sys.exit(code)
