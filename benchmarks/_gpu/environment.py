"""What the checks run on."""

import os
import subprocess
from importlib.metadata import PackageNotFoundError, version

import torch
from _report import gb, machine
from torch import distributed

from _gpu.record import Found, Place

LIBRARIES = ("torch", "transformers", "safetensors", "triton", "compressed-tensors")


def environment(place: Place, found: Found) -> None:
    """Tell the device, the driver, the libraries and the host."""
    host = machine(place.work)
    found.figure("processor", f"{host['processor']}, {host['cores']} cores")
    found.figure("memory of the host", gb(host["memory"]))
    found.figure("load average", round(float(host["load"]), 2))
    found.figure("system", f"{host['system'].split()[0]}, Python {host['python']}")
    for name in LIBRARIES:
        try:
            found.figure(name, version(name))
        except PackageNotFoundError:
            found.absent(name, "not installed")
    found.figure("threads of torch", torch.get_num_threads())
    found.figure("commit", _commit(place))
    if not place.on_gpu:
        found.absent("device, capability, driver, CUDA", f"torch {torch.__version__} finds no GPU")
        return
    about = torch.cuda.get_device_properties(place.device)
    found.figure("device", about.name)
    found.figure("compute capability", f"{about.major}.{about.minor}")
    found.figure("memory of the device", gb(about.total_memory))
    found.figure("multiprocessors", about.multi_processor_count)
    found.figure("CUDA of torch", str(torch.version.cuda))
    found.figure("cuDNN", str(torch.backends.cudnn.version()))
    found.figure("GPUs", torch.cuda.device_count())
    if distributed.is_nccl_available():
        found.figure("NCCL", ".".join(map(str, torch.cuda.nccl.version())))
    else:
        found.absent("NCCL", "torch is built without it")
    found.figure("driver", _driver())
    free, _ = torch.cuda.mem_get_info(place.device)
    found.figure("free memory of the device", gb(free))
    found.claim(
        "the device is free",
        promised="9 tenths of its memory",
        found=gb(free),
        met=free > 0.9 * about.total_memory,
    )


def _driver() -> str:
    words = [
        "nvidia-smi",
        "--query-gpu=driver_version,clocks.max.sm,clocks.max.mem,power.limit",
        "--format=csv,noheader",
    ]
    try:
        return (
            subprocess.run(words, capture_output=True, text=True, check=True, timeout=30)
            .stdout.strip()
            .splitlines()[0]
        )
    except (OSError, subprocess.SubprocessError, IndexError) as error:
        return f"nvidia-smi: {type(error).__name__}"


def _commit(place: Place) -> str:
    words = ["git", "-C", str(place.model), "rev-parse", "--short", "HEAD"]
    environment = {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}
    done = subprocess.run(words, capture_output=True, text=True, check=False, env=environment)
    return done.stdout.strip() or "not a git repository"
