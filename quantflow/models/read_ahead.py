"""The next layer's tensors, read from their files while a device computes this one's.

One thread reads, into host memory that is pinned where the device is a GPU, so that the copy to it
waits for nobody. What is read, and how often, stays as it was: a tensor that was read ahead is
taken once in the place of reading it, and one that nobody takes is dropped. So no bit depends on
it. In host memory is one layer more, as it is stored.

    with reading_ahead(source, device) as source:           # itself where the device is the CPU, whose workers share its memory
        stream = LayerStream(source, graph, device=device)  # asks for the layer after the one that it yields
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
        """Read nothing yet.

        Args:
            checkpoint: the files.
            device: what the tensors go to.
        """
        self._checkpoint, self._device = checkpoint, device
        self._pool = ThreadPoolExecutor(1, thread_name_prefix=THREAD)
        self._wanted: dict[str, Future[Tensor]] = {}

    def want(self, names: Iterable[str]) -> None:
        """Begin to read tensors, in order; those that were wanted before and not taken are dropped."""
        for future in self._wanted.values():
            future.cancel()
        self._wanted = {name: self._pool.submit(self._read, name) for name in names}

    def take(self, name: str) -> Tensor | None:
        """Return a tensor as stored, once it is there; None where it was not wanted.

        Raises:
            InputError: its file ends early, or it holds NaN or Inf.
        """
        future = self._wanted.pop(name, None)
        return None if future is None else future.result()

    def close(self) -> None:
        """Drop what is not taken and end the thread."""
        self._wanted = {}
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _read(self, name: str) -> Tensor:
        file, info = self._checkpoint.tensors[name]
        with self._device.current():
            return read_tensor(self._checkpoint.folder / file, info, empty=self._device.host_empty)
