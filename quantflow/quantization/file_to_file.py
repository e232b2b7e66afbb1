"""Quantize without a model: rows of weights are read, rounded and written, from file to file.

It serves plans whose weights follow from the source's alone: round to nearest, no transforms. Scales are per channel or per
group; for a scale that a whole weight shares, with all that have its input, a layer is read twice. What is known of a static
input is written beside the weight. Memory holds a few units (quantflow/quantization/file_units.py), whatever the size of a
tensor or a layer. Units are cut by the code's constants, and everything that is added up is added in their order, so neither
workers nor memory change a bit of what is written. One card of several writes its part of each tensor
(quantflow/quantization/shards/share.py).

A layer's file (quantflow/quantization/file_blocks.py), and after the layers that of the head where it is quantized, is written
under another name, synced and hashed while the next one is quantized.

The source is read from the disk once: the file that holds the next layers is hashed while those of this one are quantized,
and what the system's cache still holds of it then is taken from there, the rest past it (`read_once`). So a layer's key has
the hashes of the files that it lies in, and the model's fingerprint is known at the end.
"""

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

from quantflow.artifact.canonical import digest_of
from quantflow.artifact.digests import Digests
from quantflow.artifact.hashes_ahead import HashesAhead
from quantflow.artifact.safetensors_writer import Writer
from quantflow.core.parallel import Workers
from quantflow.models.graph import Graph
from quantflow.models.layer_store import finished
from quantflow.models.source import ModelFiles
from quantflow.planning.cost import READERS
from quantflow.planning.plan import Plan
from quantflow.progress import Progress
from quantflow.quantization.file_blocks import Choose, commit, write_block
from quantflow.quantization.file_units import FileBlock, head_block, layer_block, units_of
from quantflow.quantization.shards.share import WHOLE, CardShare
from quantflow.quantization.static_inputs import LinearInput


class Allowed(Protocol):
    """What is read of an allowance: how many units run at once."""

    @property
    def workers(self) -> int:
        """At least 1."""
        ...


def quantize_files(
    output: Path,
    plan: Plan,
    *,
    source: ModelFiles,
    graph: Graph,
    key: str,
    digests: Digests,
    allowance: Allowed,
    progress: Progress,
    share: CardShare = WHOLE,
    inputs: Mapping[str, LinearInput] = MappingProxyType({}),
    choose: Choose | None = None,
) -> None:
    """Bring every layer's file in `output`, and that of a head that is quantized, up to date.

    Args:
        output: the stage's folder, locked by the caller; `layers` is there.
        plan: one whose `file_to_file` is true.
        source: the checkpoint.
        graph: its linears.
        key: digest of everything that the result depends on but the weights.
        digests: of the source's files; what is not known is read.
        allowance: how many units run at once.
        progress: is told after each layer.
        share: which part of each tensor is written.
        inputs: what is known of each linear's input.
        choose: what a linear's rows become; None quantizes them by the algorithm of each block.

    Raises:
        InputError: a tensor holds NaN or Inf, or a file of the source ends early or is gone.
        OSError: the file system failed; finished layers stay.
    """
    with ExitStack() as stack:
        workers = stack.enter_context(Workers(allowance.workers + READERS))
        committer = stack.enter_context(ThreadPoolExecutor(1))
        layers, head = _blocks(plan, source, graph)
        files = [block.files for block in (*layers, *head)]
        hashes = stack.enter_context(HashesAhead(files, folder=source.checkpoint.folder, digests=digests))
        pending: list[Future[None]] = []
        # Whatever ends the loop, a layer whose bytes are complete is committed before this returns.
        stack.callback(lambda: [future.result() for future in pending])
        about: Any = {"workers": workers, "share": share, "inputs": inputs, "choose": choose}
        told: Any = {"stage": f"{'quantize' if choose is None else 'unify'} {plan.name}", "nbytes": partial(_nbytes, share)}
        for unit, blocks in (("layer", layers), ("head", head)):
            for block in progress.steps(blocks, unit=unit, **told):
                written = _written(output, block, key=key, hashes=hashes, about=about)
                if written is not None:
                    while pending:  # one layer at a time waits for the disk
                        pending.pop().result()
                    pending.append(committer.submit(commit, *written))


def _written(
    output: Path, block: FileBlock, *, key: str, hashes: HashesAhead, about: Mapping[str, Any]
) -> tuple[Writer, Path, dict[str, Any]] | None:
    """Write a block and return what `commit` needs, None where its file is finished; `about` is for `write_block`."""
    hashes.begin(block.files)

    def block_key() -> str:
        return digest_of([key, block.key, hashes.of(block.files)])

    path = output / block.path
    if path.exists() and finished(path, block_key()) is not None:  # nothing waits for hashes where nothing is there
        return None
    return write_block(output, block, key=block_key, **about)


def _blocks(plan: Plan, source: ModelFiles, graph: Graph) -> tuple[list[FileBlock], list[FileBlock]]:
    """Return the layers, and the head where it is quantized."""
    layers = [layer_block(layer, plan, source) for layer in graph.layers]
    if plan.head is None:
        return layers, []
    file, info = source.checkpoint.tensors[plan.head.tensor]
    return layers, [head_block(plan.head, source.checkpoint.folder / file, info)]


def _nbytes(share: CardShare, block: FileBlock) -> int:
    """Return the bytes that are read of a block."""
    return sum(unit.nbytes for unit in units_of(block, share))
