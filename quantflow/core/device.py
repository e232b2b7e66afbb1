"""The device that runs layers: the CPU, or an accelerator with a memory of its own.

| on the device                                  | in host memory                               |
|------------------------------------------------|----------------------------------------------|
| weights of the layer that runs                 | files, the next layer as stored, output      |
| masks and position embeddings, once each       | hidden states between layers, or on disk     |
| one sequence's activations and gradients       | embedding, token ids, drawn labels           |
| hidden states of quantize, where they fit      |                                              |
| statistics and Hessians while a layer runs     | the same once the layer is done              |
| results of transforms and algorithms           | algorithms without `ON_DEVICE`: yaqa         |
| rows of weights that are rounded file to file  | scales of static inputs; contents of a file  |
| logits of one window, and its tokens' scores   | scores of all windows, and their bounds      |

Statistics and Hessians on the device are float32.

A tensor crosses between the two in these places, by `put` or `fetch` of a `Device`, a quantized
weight by its own `to`:

1. `models/load.py`, `models/capture.py`, `quantizing/rotated.py`: weights of a layer as stored;
   `placed`: buffers, last norm, head
2. `models/stand_ins.py`: masks and position embeddings, once each
3. `models/hidden.py`: a sequence's hidden state, to the device when it is taken and back when it
   is kept in host memory or written
4. `measuring/backward.py`: logits of some tokens, whose labels are drawn in host memory, and the
   labels
5. `measuring/observe.py`, `measuring/gradients.py`: statistics, once per layer
6. `quantizing/layer.py`: results of a layer; groups of algorithms that compute in host memory
7. `quantizing/layer_by_layer.py`, `quantizing/tuning.py`: measured statistics, written weights that
   are read back, the canary's outputs
8. `quantizing/file_to_file.py`: rows of weights, and their results
9. `core/kv.py`: scales of the caches that an artifact rounds to (`KVScales.to`)
10. `runtime/artifact.py`: quantized linears, before they are dequantized
    (`Artifact.linears_device`)
11. `exporting/canary.py`: outputs of the layers that are proved
12. `validating/layerwise.py`: token ids of a window that is scored, and its scores back
13. `distributed/transformers_split.py`: a rank's slices of a layer that several share
14. `distributed/team.py`: tensors between devices, where torch has no backend for that
15. `planning/probe.py`: a layer, and pieces of its weights, that are timed

Everything between runs where its inputs are. Code that makes a tensor beside others names their
device. On the CPU `put` and `fetch` return their argument, so the same code makes no copy there and
the bits of its results are those it always had. Tests measure, quantize, prove and validate on a
simulated device, which refuses an operator that mixes the two, and any other way across
(tests/simulated_gpu.py).

One unit runs at a time on a device that is not the CPU: it is parallel inside. Its kernels are
deterministic (`deterministic`), so one model of device, one driver and one version of the libraries
make the same bits. Its name and capability are in the key of every result (`key`), and a run that
is resumed on another device makes its layers again.

`cuda` needs CUDA or ROCm, `xpu` a GPU by Intel that has float64. `hpu` is refused: Gaudi has no
float64, in which statistics and errors are added up where layers run.
Source: the data types of Intel's support matrix of PyTorch on Gaudi.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from quantflow.accelerators import CUDA, GPUS, SOFTWARE, is_gpu, kind_of
from quantflow.core import groups
from quantflow.core.fixed_order import in_fixed_order
from quantflow.errors import ResourceError, UnsupportedError, first_line

# With other workspaces the sums of a product may have another order in each run. The first is the
# default.
_WORKSPACE = ("CUBLAS_WORKSPACE_CONFIG", (":4096:8", ":16:8"))
WORKSPACE_BYTES = 8 * 4096 * 1024  # the first one's, which cuBLAS allocates at its first product
PIECE_BYTES = 16 << 20  # of pinned memory, twice, through which a tensor comes back


@dataclass(frozen=True, kw_only=True)
class Device:
    """The device that runs layers.

    Attributes:
        kind: torch's device.
        model: maker's name of the model; empty for the CPU.
        capability: version of its kernels, such as `9.0`; empty for the CPU.
    """

    kind: torch.device
    model: str = ""
    capability: str = ""

    @property
    def name(self) -> str:
        """The name on the command line: `cpu`, `cuda:0`."""
        return str(self.kind)

    @property
    def is_host(self) -> bool:
        """Whether its memory is the host's, so that nothing crosses."""
        return self.kind.type == "cpu"

    @property
    def is_gpu(self) -> bool:
        """Whether torch has a module of its kind: memory, streams and pinned memory."""
        return is_gpu(self.kind.type)

    @property
    def _torch(self) -> Any:
        """Torch's module of a GPU: torch.cuda, ROCm's too, or torch.xpu."""
        return torch.get_device_module(self.kind)

    def key(self) -> dict[str, dict[str, str]]:
        """The device's part of a result's key.

        It is empty for the CPU, whose instruction set `tools` names.
        """
        if self.is_host:
            return {}
        made_for = _versions(self.kind.type)
        if self.kind.type == CUDA:
            made_for["workspace"] = os.environ.get(_WORKSPACE[0], "")
        return {
            "device": {
                "kind": self.kind.type,
                "model": self.model,
                "capability": self.capability,
                **made_for,
            }
        }

    def put(self, tensor: Tensor) -> Tensor:
        """A tensor on the device; itself where it is there already.

        A copy from pinned memory is asynchronous.
        """
        return tensor.to(self.kind, non_blocking=True) if tensor.device != self.kind else tensor

    def fetch(self, tensor: Tensor) -> Tensor:
        """A tensor in host memory that is not pinned; itself where it is there already.

        It crosses through two pinned pieces: one arrives while the one before it is moved on.
        Pinned memory cannot be swapped out, and torch allocates it in powers of two: a result that
        stayed in it would hold up to twice its bytes for as long as it lives.
        """
        if tensor.device.type == "cpu":
            return tensor
        result = torch.empty(tensor.shape, dtype=tensor.dtype)
        if not self.is_gpu or tensor.nbytes == 0:
            return result.copy_(tensor)
        source = tensor.contiguous().view(-1).view(torch.uint8)
        size = min(PIECE_BYTES, len(source))
        with self.current():
            stages = [self.host_empty((size,), dtype=torch.uint8) for _ in range(2)]
            through(stages, source, result.view(-1).view(torch.uint8), start=self._start)
        return result

    def _start(self, stage: Tensor, piece: Tensor) -> Callable[[], object]:
        """Let a piece begin to cross; what is returned waits until it has arrived."""
        stage.copy_(piece, non_blocking=True)
        arrived = self._torch.Event()
        arrived.record()
        wait: Callable[[], object] = arrived.synchronize
        return wait

    def host_empty(self, shape: Sequence[int], *, dtype: torch.dtype) -> Tensor:
        """An uninitialized tensor in host memory, pinned where the device is a GPU."""
        return torch.empty(tuple(shape), dtype=dtype, pin_memory=self.is_gpu)

    def free_bytes(self) -> int | None:
        """Free bytes of the device's memory.

        None where the device does not say, as the CPU, whose memory is the host's.
        """
        return int(self._torch.mem_get_info(self.kind)[0]) if self.is_gpu else None

    def wait(self) -> None:
        """Return when the device has done all its work, before and after a clock is read."""
        if self.is_gpu:
            self._torch.synchronize(self.kind)

    def begin_peak(self) -> None:
        """Start the count of `peak_bytes` anew."""
        if self.is_gpu:
            self._torch.reset_peak_memory_stats(self.kind)

    def peak_bytes(self) -> int | None:
        """The most bytes that tensors had at once since `begin_peak`.

        None where the device does not say.
        """
        return int(self._torch.max_memory_allocated(self.kind)) if self.is_gpu else None

    def current(self) -> AbstractContextManager[object]:
        """A context in which the calling thread uses this GPU of several, such as to pin memory."""
        return self._torch.device(self.kind) if self.is_gpu else nullcontext()

    def factories(self) -> AbstractContextManager[object]:
        """A context in which tensors made without a named device are made on this one."""
        return nullcontext() if self.is_host else self.kind

    @contextmanager
    def deterministic(self) -> Iterator[None]:
        """Let only deterministic kernels run, with products in float32, until the block ends.

        Operators of which a GPU has no such kernel are computed by core/fixed_order.py. On the CPU
        all kernels are deterministic. The allocator's cache is released at the end, since the
        process that proves an artifact shares the device.

        Raises:
            ResourceError: the memory of the device ended inside the block.
        """
        if self.is_host:
            yield
            return
        before = torch.are_deterministic_algorithms_enabled()
        warns = torch.is_deterministic_algorithms_warn_only_enabled()
        memory: Any = torch.utils.deterministic
        precision = torch.get_float32_matmul_precision()
        filled = memory.fill_uninitialized_memory
        products = torch.backends.cuda.matmul
        halved = products.allow_bf16_reduced_precision_reduction
        ordered = ExitStack()
        try:
            if self.is_gpu:
                ordered.enter_context(in_fixed_order(GPUS[self.kind.type]))
            torch.use_deterministic_algorithms(True)
            # filling would write all memory that files are read into
            memory.fill_uninitialized_memory = False
            torch.set_float32_matmul_precision("highest")
            # parts of a sum are float32, as the whole is
            products.allow_bf16_reduced_precision_reduction = False
            yield
        except torch.OutOfMemoryError as error:
            raise ResourceError(
                f"{self.name}: its memory ended ({first_line(error)})",
                "end other programs on it, or use shorter sequences, another device, or --device "
                "cpu",
            ) from error
        finally:
            ordered.close()
            if self.is_gpu:
                self._torch.empty_cache()
                torch._C._host_emptyCache()  # pinned memory, of up to twice the largest layer
            products.allow_bf16_reduced_precision_reduction = halved
            torch.use_deterministic_algorithms(before, warn_only=warns)
            torch.set_float32_matmul_precision(precision)
            memory.fill_uninitialized_memory = filled


HOST = Device(kind=torch.device("cpu"))


def open_device(name: str) -> Device:
    """The device of a name.

    Args:
        name: `cpu`, `hpu`, or a GPU: `cuda`, `cuda:N`, `xpu`, `xpu:N`.

    Raises:
        UnsupportedError: this machine, or this version, does not run layers on it.
    """
    if name == "cpu":
        return HOST
    kind = kind_of(name)
    if not is_gpu(kind):
        raise UnsupportedError(
            f"--device {name}: Gaudi has no float64, in which statistics and errors are added up",
            f"use --device cpu or {' or '.join(GPUS)}, or take what Gaudi's toolkit measured "
            "(--measurement), and export with --format inc",
        )
    module: Any = torch.get_device_module(kind)
    if not module.is_available():
        needed = " or ".join(SOFTWARE[kind].values())
        raise UnsupportedError(
            f"--device {name}: torch {torch.__version__} {_built(kind)} and finds no device",
            f"use --device cpu, or install a driver and a torch for {needed}",
        )
    index = torch.device(name).index or 0
    count = module.device_count()
    if index >= count:
        raise UnsupportedError(
            f"--device {name}: torch finds {count}, numbered from 0",
            f"use {kind}:0 to {kind}:{count - 1}",
        )
    if kind == CUDA:
        _settle_workspace(name)
    device = torch.device(kind, index)
    properties = module.get_device_properties(device)
    if not getattr(properties, "has_fp64", True):  # only Intel's say
        raise UnsupportedError(
            f"--device {name}: {properties.name} has no float64, in which statistics and errors "
            "are added up",
            "use --device cpu",
        )
    version = f"{properties.major}.{properties.minor}" if kind == CUDA else str(properties.version)
    return Device(kind=device, model=properties.name, capability=version)


def missing_gpu(device: torch.device) -> str | None:
    """What this machine lacks to run on a GPU, in words; None when nothing is missing.

    Args:
        device: any GPU of a kind, or the one with its number.
    """
    module: Any = torch.get_device_module(device)
    if not module.is_available():
        return f"a GPU, torch {torch.__version__} finds none"
    count = module.device_count()
    return (
        None
        if (device.index or 0) < count
        else f"a GPU of that number, torch finds {count}, numbered from 0"
    )


def _versions(kind: str) -> dict[str, str]:
    """The versions of what torch is built on for a kind of GPU, by torch's names of it."""
    found = {name: getattr(torch.version, name, None) for name in SOFTWARE.get(kind, ())}
    return {name: str(version) for name, version in found.items() if version}


def _built(kind: str) -> str:
    """What torch is built on for a kind of GPU, in words."""
    found = [f"{SOFTWARE[kind][name]} {version}" for name, version in _versions(kind).items()]
    if not found:
        return f"is built without {' or '.join(SOFTWARE[kind].values())}"
    return f"is built for {' and '.join(found)}"


def _settle_workspace(name: str) -> None:
    """Give cuBLAS workspaces with which the sums of its products have one order.

    cuBLAS reads the variable at its first product.

    Raises:
        UnsupportedError: the variable has another value already.
    """
    variable, allowed = _WORKSPACE
    setting = os.environ.setdefault(variable, allowed[0])
    if setting not in allowed:
        raise UnsupportedError(
            f"--device {name}: {variable}={setting}, with which sums have another order in "
            "each run",
            f"unset it, or set it to {' or '.join(allowed)}",
        )


@contextmanager
def placed(module: nn.Module, device: Device) -> Iterator[None]:
    """Keep a module's parameters and buffers on the device until the block ends.

    Buffers are in host memory again then. Parameters stay on the device: the caller that read them
    releases them. Tensors on meta stay on meta.
    """
    if device.is_host:
        yield
        return
    there: dict[int, Tensor] = {}  # a tensor that two modules share is put once
    buffers: list[tuple[nn.Module, str, Tensor]] = []
    for part in module.modules():
        for leaf, parameter in part._parameters.items():
            if parameter is not None and not parameter.is_meta:
                put = there.setdefault(id(parameter), device.put(parameter.detach()))
                part._parameters[leaf] = nn.Parameter(put, requires_grad=False)
        for leaf, buffer in part._buffers.items():
            if buffer is not None and not buffer.is_meta:
                buffers.append((part, leaf, buffer))
                part._buffers[leaf] = device.put(buffer)
    try:
        yield
    finally:
        for part, leaf, buffer in buffers:
            part._buffers[leaf] = buffer


def fetched(tensors: Mapping[str, Tensor], device: Device) -> dict[str, Tensor]:
    """Tensors in host memory, by their names."""
    return {name: device.fetch(tensor) for name, tensor in tensors.items()}


def through(
    stages: Sequence[Tensor],
    source: Tensor,
    target: Tensor,
    *,
    start: Callable[[Tensor, Tensor], Callable[[], object]],
) -> None:
    """Copy a tensor in pieces through stages that take turns.

    Args:
        stages: two or more of one length, which the pieces have too.
        source: [n], what is copied.
        target: [n], of the same dtype.
        start: (stage, piece of the source) lets the piece begin to arrive in the stage, and returns
            what waits until it has.
    """
    size = len(stages[0])
    coming: list[tuple[Callable[[], object], Tensor, Tensor]] = []
    for index, piece in enumerate(groups.spans(len(source), size)):
        if len(coming) == len(stages):
            _land(*coming.pop(0))
        stage = stages[index % len(stages)][: piece.stop - piece.start]
        coming.append((start(stage, source[piece]), stage, target[piece]))
    for piece_coming in coming:
        _land(*piece_coming)


def _land(wait: Callable[[], object], stage: Tensor, place: Tensor) -> None:
    wait()
    place.copy_(stage)
