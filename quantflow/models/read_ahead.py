"""The next layer's tensors, read from their files while a device computes this one's.

One thread reads, into host memory that is pinned where the device is a GPU, so that the copy to it
is asynchronous. The tensors and their order stay as they were: a tensor that was read ahead is
taken once instead of being read, and one that nobody takes is dropped. So no bit depends on it.
Host memory holds one layer more, as stored.

    # itself where the device is the CPU, whose workers share its memory
    with reading_ahead(source, device) as source:
        # asks for the layer after the one that it yields
        stream = LayerStream(source, graph, device=device)
"""

from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor

from torch import Tensor

from quantflow.core.device import Device
from quantflow.files.checkpoint import Checkpoint
from quantflow.models.reading import read_tensor

THREAD = "read-ahead"


class ReadAhead:
    """A thread that reads tensors before they are asked for; used by one thread at a time."""

    def __init__(self, checkpoint: Checkpoint, device: Device) -> None:
        """Begin without a read.

        Args:
            checkpoint: files of the tensors.
            device: device that the tensors go to.
        """
        self._checkpoint, self._device = checkpoint, device
        self._pool = ThreadPoolExecutor(1, thread_name_prefix=THREAD)
        self._wanted: dict[str, Future[Tensor]] = {}

    def want(self, names: Iterable[str]) -> None:
        """Begin to read tensors, in order; earlier ones that were not taken are dropped."""
        for future in self._wanted.values():
            future.cancel()
        self._wanted = {name: self._pool.submit(self._read, name) for name in names}

    def take(self, name: str) -> Tensor | None:
        """A tensor as stored, once it is read; None where it was not wanted.

        Raises:
            InputError: its file ends early, or it holds NaN or Inf.
        """
        future = self._wanted.pop(name, None)
        return None if future is None else future.result()

    def close(self) -> None:
        """Drop the tensors that were not taken and end the thread."""
        self._wanted = {}
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _read(self, name: str) -> Tensor:
        file, info = self._checkpoint.tensors[name]
        with self._device.current():
            return read_tensor(self._checkpoint.folder / file, info, empty=self._device.host_empty)
