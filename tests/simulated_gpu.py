"""A simulated device: tensors on `simulated:0`, whose values are computed on the CPU.

    with SimulatedGpu() as gpu:
        device = Device(kind=gpu.kind, ...)

Until the block ends, torch makes, moves and computes tensors of it.

It behaves as a GPU does where that is strict, and is stricter where a GPU would wait silently:

- an operator on tensors of both sides is refused, but for a scalar of the host (0-dim);
- a tensor may cross only inside the functions that are named to `SimulatedGpu.crossings`; `.to`,
  `.cpu()`, `copy_` anywhere else, and numpy, are refused.
- tensors go to the device of another process by a process group that has a backend of this kind of
  device, and no other. The backend is gloo on their values.

It counts what crossed and what went to other devices or came from there, in bytes, and the most
bytes that were on the device at once.
"""

import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, distributed
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

KIND = "simulated"
backend_registration._setup_privateuseone_for_python_backend(KIND)
# between simulated devices: torch's process groups get it where it is asked for
BACKEND = "exchanged"
distributed.Backend.register_backend(
    BACKEND,
    lambda store, rank, size, timeout: distributed.ProcessGroupGloo(
        store, rank, size, timeout=timeout
    ),
    devices=[KIND],
)
GPU = torch.device(KIND, 0)
# chooses a kernel by the device: that of plain mathematics has no device of its own
_FLASH = "_fused_sdp_choice"


class AcrossError(Exception):
    """A tensor of the host met one of the device, or crossed by a way without a name."""


class OnGpu(Tensor):
    """A tensor of the simulated device; `inner` has its values."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> "OnGpu":
        made: OnGpu = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=GPU,
        )
        made.inner = inner
        return made

    def tolist(self) -> Any:
        return self.inner.tolist()

    def __repr__(self, **_: Any) -> str:
        return f"OnGpu({list(self.shape)}, {self.dtype})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        mode = SimulatedGpu.current
        assert mode is not None, f"{func}: outside the simulation"
        return mode.computed(func, args, kwargs or {})


class SimulatedGpu(TorchDispatchMode):
    """The simulation; one at a time, in one thread."""

    current: "SimulatedGpu | None" = None

    def __init__(self, *crossings: Callable[..., Any]) -> None:
        """Let tensors cross inside these functions alone."""
        super().__init__()
        self.crossings = {function.__code__ for function in crossings}  # type: ignore[attr-defined]
        self.put_bytes = self.fetched_bytes = self.exchanged_bytes = 0
        self.live = self.peak = 0
        self._holders: dict[int, int] = {}  # storage -> tensors of the device that have it
        self.operators = 0

    def __enter__(self) -> "SimulatedGpu":
        SimulatedGpu.current = self
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        SimulatedGpu.current = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.computed(func, args, kwargs or {})

    def computed(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Compute an operator on the values of its tensors.

        Its result is where they are, or where the call asks.
        """
        tensors: list[Tensor] = []
        tree_map(
            lambda value: tensors.append(value) if isinstance(value, Tensor) else None,
            (args, kwargs),
        )
        there = [tensor for tensor in tensors if isinstance(tensor, OnGpu)]
        named = kwargs.get("device")
        asked = None if named is None else torch.device(named).type
        with torch.utils._python_dispatch._disable_current_modes():
            if not there and asked != KIND:
                return func(
                    *args, **{name: value for name, value in kwargs.items() if name != "pin_memory"}
                )
            name = func.overloadpacket.__name__
            if func.namespace == "c10d":
                self._allow_exchange(func, there)
            host = [
                tensor
                for tensor in tensors
                if not isinstance(tensor, OnGpu) and tensor.ndim and not tensor.is_meta
            ]
            crosses = False
            if name == "_to_copy" and asked in (KIND, "cpu"):
                crosses = (asked == KIND) != bool(there)
            elif name == "copy_":
                crosses = bool(host) and bool(there)
            if crosses:
                self._allow(func)
                if there and not (name == "copy_" and isinstance(args[0], OnGpu)):
                    self.fetched_bytes += there[0].nbytes
                else:
                    self.put_bytes += tensors[0].nbytes  # a number of the host too
            elif host and there:
                shapes = ", ".join(
                    f"{'gpu' if isinstance(t, OnGpu) else 'host'} {list(t.shape)}" for t in tensors
                )
                raise AcrossError(f"{func}: tensors on two devices: {shapes}")
            if name == _FLASH:
                return 0
            values, words = tree_map(
                lambda value: value.inner if isinstance(value, OnGpu) else value, (args, kwargs)
            )
            words = {
                key: value
                for key, value in words.items()
                if key not in ("pin_memory", "non_blocking")
            }
            if asked == KIND:
                words["device"] = torch.device("cpu")
            result = func(*values, **words)
            self.operators += 1
            back = (crosses and bool(there)) or asked in ("cpu", "meta")
            if name == "copy_" and not isinstance(args[0], OnGpu):
                return args[0]
            if back:
                return result
            known = {id(tensor.inner): tensor for tensor in there}
            return tree_map(
                lambda value: self._wrapped(value, known) if isinstance(value, Tensor) else value,
                result,
            )

    def _wrapped(self, value: Tensor, known: dict[int, OnGpu]) -> Tensor:
        """Return a result on the device: the operand itself where it was modified in place."""
        if id(value) in known:
            return known[id(value)]
        made = OnGpu(value)
        storage = value.untyped_storage()
        key, nbytes = storage._cdata, storage.nbytes()
        if not self._holders.get(key):  # views share their storage
            self.live += nbytes
            self.peak = max(self.peak, self.live)
        self._holders[key] = self._holders.get(key, 0) + 1
        weakref.finalize(made, self._release, key, nbytes)
        return made

    def _release(self, key: int, nbytes: int) -> None:
        self._holders[key] -= 1
        if not self._holders[key]:
            del self._holders[key]
            self.live -= nbytes

    def _allow_exchange(self, func: Any, tensors: Sequence[Tensor]) -> None:
        """Refuse what torch refuses of a device: a group of processes without a backend of it."""
        world = distributed.group.WORLD
        assert world is not None
        if KIND not in {device.type for device in world._device_types}:
            raise AcrossError(f"{func}: the processes have no backend of {KIND} devices")
        self.exchanged_bytes += sum(tensor.nbytes for tensor in tensors)

    def _allow(self, func: Any) -> None:
        """Refuse a crossing that none of the named functions asked for."""
        frame = sys._getframe(1)
        while frame is not None:
            if frame.f_code in self.crossings:
                return
            frame = frame.f_back  # type: ignore[assignment]
        raise AcrossError(f"{func}: a tensor crosses outside of put and fetch")
