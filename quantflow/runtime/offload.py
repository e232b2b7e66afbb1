"""A model whose weights stay on disk: each is read from the artifact when its turn comes.

The weights of one token's forward are a list of pieces in the order in which they are used: the
linears of layer 0, of layer 1, ..., then the head in parts of a fixed number of rows. Each linear
of the model is a small module that takes its pieces, multiplies, and lets go, while a thread reads
and prepares the pieces that follow; after the last comes the first. The embedding is read by rows,
those of the tokens. Norms and the KV cache stay in memory.

The experts of a mixture are no part of that list: nobody knows which ones a router will choose.
They are read when they are chosen, and stay as long as there is room (`expert_cache`).

The numbers are those of `quantflow.runtime.load`: the same kernels prepare the same weights, and
where a weight is multiplied a few rows at a time each output is still one dot product of the same
length.
"""

import ctypes
from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from quantflow.core.qtensor import QuantizedLinear
from quantflow.files.signing import Trusted, open_signed
from quantflow.models.experts import Experts
from quantflow.models.names import NameMap
from quantflow.models.open import graph_for
from quantflow.models.skeleton import skeleton
from quantflow.models.stand_ins import with_rows
from quantflow.runtime.artifact import Artifact, inputs_asked, open_folder, require_rounded
from quantflow.runtime.expert_cache import (
    HOLES,
    CachedExpert,
    CachedLinear,
    ExpertCache,
    ExpertKey,
    MemoryLimit,
    Multiply,
)
from quantflow.runtime.load import Loaded
from quantflow.runtime.modules import with_modules

_PIECE = 1 << 19  # weights that are converted to the inputs' dtype at once
_LEAST_ROWS = 64  # narrower products go through other kernels, whose sums end in other digits
_MMAP_THRESHOLD = -3  # M_MMAP_THRESHOLD of <malloc.h>
_RETURNED = 1 << 20  # bytes
_PREPARING = 8  # bytes, for each of the largest weight as stored, while backends arrange it
_RUNNING = 32 << 20  # bytes of torch's own, and of activations, from the first forward on


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A part of a weight that is read at once: a quantized linear, or some rows of a plain one.

    Attributes:
        linear: source name of the linear, without `.weight`.
        start, stop: rows of its weight.
        nbytes: bytes of the rows in the artifact.
    """

    linear: str
    start: int
    stop: int
    nbytes: int


class Prefetch:
    """Makes pieces in their order, in a thread that stays ahead of the one that takes them.

    They are taken from one thread.
    """

    def __init__(
        self, make: Callable[[Piece], Multiply], order: Sequence[Piece], *, ahead: int
    ) -> None:
        """Begin with the first piece.

        Args:
            make: reads and prepares one piece; called in the thread.
            order: every piece, in the order of a forward; after the last comes the first.
            ahead: bytes, as stored, up to which pieces are made before they are asked for; one
                piece is, whatever it has.
        """
        self._make = make
        self._order = tuple(order)
        self._position = {piece: index for index, piece in enumerate(order)}
        self._limit = ahead
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="prefetch")
        self._waiting: deque[tuple[Piece, Future[Multiply]]] = deque()
        self._next = 0
        self._fill()

    def take(self, piece: Piece) -> Multiply:
        """The function of a piece; the thread goes on with those that follow.

        A piece out of order is made now.

        Raises:
            Exception: what making it raised.
        """
        if self._waiting[0][0] != piece:
            for _, future in self._waiting:
                future.cancel()
            self._waiting.clear()
            self._next = self._position[piece]
            self._fill()
        _, future = self._waiting.popleft()
        self._fill()
        return future.result()

    def _fill(self) -> None:
        while not self._waiting or sum(piece.nbytes for piece, _ in self._waiting) < self._limit:
            piece = self._order[self._next]
            if any(piece is other for other, _ in self._waiting):
                return
            self._waiting.append((piece, self._pool.submit(self._make, piece)))
            self._next = (self._next + 1) % len(self._order)


class StreamedLinear(nn.Module):
    """A linear that holds no weight: it takes its pieces when it is called, one after the other."""

    def __init__(self, pieces: Sequence[Piece], prefetch: Prefetch) -> None:
        """Take `pieces`, which together are the rows of the weight, from `prefetch`."""
        super().__init__()
        self._pieces, self._prefetch = tuple(pieces), prefetch

    def forward(self, x: Tensor) -> Tensor:
        """The product x @ W.T + bias.

        Args:
            x: [..., in_features].

        Returns:
            [..., out_features] in x's dtype.
        """
        parts = [self._prefetch.take(piece)(x) for piece in self._pieces]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)


class StreamedEmbedding(nn.Module):
    """An embedding that holds no weight: it reads the rows of the tokens that it is called with."""

    def __init__(self, embedding: nn.Module, artifact: Artifact, name: str) -> None:
        """Read rows of the tensor `name`, and do with them what the family's own module does."""
        super().__init__()
        # in a list, so that its weight is no parameter of this module
        self._own, self._artifact, self._name = [embedding], artifact, name
        nothing = torch.zeros((), dtype=artifact.dtype)
        # takes no memory; families ask for its device, dtype and rows
        self.weight = nothing.expand(artifact.checkpoint.infos[name].shape)

    def forward(self, ids: Tensor) -> Tensor:
        """The embedding of ids, [..., H] in the artifact's dtype."""
        rows, places = torch.unique(ids, return_inverse=True)
        embedded: Tensor = with_rows(
            self._own[0], self._artifact.read_rows(self._name, rows).to(self._artifact.dtype)
        )(places)
        return embedded


def load_offloaded(
    folder: str | Path,
    *,
    backend: str = "auto",
    dtype: torch.dtype = torch.float32,
    verify: bool = True,
    crops: bool = False,
    exact: bool = False,
    rounded_inputs: bool = False,
    max_memory: str | None = None,
    require_signature: str | Path | Trusted | None = None,
) -> Loaded:
    """Open an artifact as a model whose weights stay on disk.

    The tokens are those of `load`; each costs a reading of the weights.

    Memory holds norms, the linear that runs, those that the thread is ahead with (as many bytes as
    the largest linear has, and one linear), and while a linear is prepared what its backend needs
    for that. What `max_memory` leaves beside them holds the experts of a mixture that routers chose
    last; an expert that is chosen and not there is read. What the system keeps of the files in its
    own cache is not this process's; nothing is asked to be dropped from it, since the next token
    reads it again. From here on glibc gives tensors of 1 MiB and more back to the system as soon as
    they are freed, in the whole process.

    Args:
        folder: folder that `quantflow export` wrote.
        backend: backend of `load`.
        dtype: dtype of `load`.
        verify: compare every file with its recorded hash first.
        crops: whether `crop` will be called.
        exact: leave inputs as the schemes say, as for `load`.
        rounded_inputs: round them, as for `load`.
        max_memory: bytes of the process, such as 4GiB; None: a tenth of the machine's, or more
            where the experts of one token need it.
        require_signature: signer, as for `load`; weights are compared whenever they are read.

    Raises:
        IntegrityError, InputError, UnsupportedError, UsageError: as for `load`, but for values:
            those are checked when they are read, so what they raise comes from the model's forward.
        ResourceError: `max_memory` has no room for the weights that are in memory at once, of a
            mixture with the experts of a layer that a token goes to.
    """
    inputs = inputs_asked(exact=exact, rounded_inputs=rounded_inputs)
    limit = MemoryLimit.of(max_memory)
    _return_memory()
    artifact = open_folder(
        folder,
        backend=backend,
        dtype=dtype,
        verify=verify,
        inputs=inputs,
        sealed=None
        if require_signature is None
        else open_signed(Path(folder), Trusted.of(require_signature)),
    )
    if rounded_inputs:
        require_rounded(artifact)
    model = skeleton(artifact.config, dtype=artifact.dtype)
    names = NameMap(model).bind(artifact.names)
    embedding = _name_of(model, model.get_input_embeddings())
    head = _name_of(model, model.get_output_embeddings())
    graph = graph_for(artifact.config)
    linears = {
        names.to_module[f"{name}.weight"].removesuffix(".weight"): name for name in graph.linears
    }
    # a tied head is the embedding's rows
    linears[head] = names.to_source[f"{head}.weight"].removesuffix(".weight")
    experts = _experts(artifact, model, linears)
    pieces = {
        module: _pieces(artifact, name)
        for module, name in linears.items()
        if not isinstance(model.get_submodule(module), CachedLinear)
    }
    order = [piece for parts in pieces.values() for piece in parts]
    prefetch = Prefetch(
        lambda piece: _multiply(artifact, piece), order, ahead=max(piece.nbytes for piece in order)
    )
    streamed = {
        f"{module}.{leaf}" for module in (*linears, embedding) for leaf in ("weight", "bias")
    }
    resident = {name: source for name, source in names.to_source.items() if name not in streamed}
    for module, parts in pieces.items():
        model.set_submodule(module, StreamedLinear(parts, prefetch))
    own = model.get_submodule(embedding)
    model.set_submodule(
        embedding, StreamedEmbedding(own, artifact, names.to_source[f"{embedding}.weight"])
    )
    artifact.fill_(model, resident, dtype=dtype)
    opened = with_modules(artifact, model, reason="disk_offload was asked for", crops=crops)
    dense = max(piece.nbytes for piece in order)
    largest = max([dense, *(expert.stored for expert in experts.values())])
    preparing = _PREPARING * largest + (HOLES if experts else 0)
    # resident from the first forward on: one piece runs, one and as many bytes again wait
    running = _RUNNING + 3 * dense
    if not experts:
        what = "the weights that are in memory at once"
        limit.require(limit.left(0, beside=0), running + preparing, what)
        return opened
    cache = ExpertCache(
        experts,
        budget=limit.left(0, beside=running + preparing),
        left=partial(limit.left, beside=preparing),
        chosen=max(layer.chosen for layer in graph.layers),
    )
    limit.require(cache.budget, cache.least, "the experts of a layer that a token goes to")
    for layer in dict.fromkeys(key.layer for key in experts):
        module = model.get_submodule(layer)
        assert isinstance(module, Experts)  # `_experts` found it
        module.fetch = partial(cache.fetch, layer)
    return replace(opened, experts=cache)


def _experts(
    artifact: Artifact, model: nn.Module, linears: Mapping[str, str]
) -> dict[ExpertKey, CachedExpert]:
    """Every expert of a model, which gets linears without weights.

    Args:
        artifact: artifact that they are read from.
        model: the model, modified.
        linears: module of a linear -> its source name.
    """
    found = {}
    for layer, experts in list(model.named_modules()):
        if not isinstance(experts, Experts):
            continue
        for number, expert in enumerate(experts):
            own = [
                (leaf, linears[f"{layer}.{number}.{leaf}"])
                for leaf, _ in expert.named_children()
                if f"{layer}.{number}.{leaf}" in linears
            ]
            pieces = {leaf: _whole(artifact, name) for leaf, name in own}
            cached = {
                leaf: CachedLinear(partial(_multiply, artifact, piece))
                for leaf, piece in pieces.items()
            }
            for leaf, linear in cached.items():
                expert.set_submodule(leaf, linear)
            found[ExpertKey(layer, number)] = CachedExpert(
                module=expert,
                linears=tuple(cached.values()),
                stored=sum(piece.nbytes for piece in pieces.values()),
                kind=tuple(_kind(artifact, name) for _, name in own),
            )
    return found


def _return_memory() -> None:
    """Let glibc return freed memory to the system.

    It would raise its threshold with every tensor otherwise, to 32 MiB, and keep 300 MB.
    """
    # other C libraries have no such function
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, _RETURNED)


def _name_of(model: nn.Module, module: nn.Module) -> str:
    found: str = next(name for name, part in model.named_modules() if part is module)
    return found


def _pieces(artifact: Artifact, name: str) -> list[Piece]:
    """The pieces of a linear in the order of their rows."""
    infos = artifact.checkpoint.infos
    if name in artifact.linears:
        placement = artifact.linears[name]
        stored = artifact.layout.tensor_names(name, placement.scheme)
        nbytes = sum(infos[tensor].nbytes for tensor in stored)
        return [Piece(linear=name, start=0, stop=placement.shape[0], nbytes=nbytes)]
    info = infos[f"{name}.weight"]
    height, width = info.shape
    step = _rows_at_once(width)
    width_bytes = info.nbytes // height
    return [
        Piece(linear=name, start=start, stop=stop, nbytes=(stop - start) * width_bytes)
        for start, stop in _ranges(height, step)
    ]


def _whole(artifact: Artifact, name: str) -> Piece:
    """All rows of a linear as one piece."""
    parts = _pieces(artifact, name)
    return Piece(
        linear=name, start=0, stop=parts[-1].stop, nbytes=sum(part.nbytes for part in parts)
    )


def _kind(artifact: Artifact, name: str) -> Hashable:
    """What linears that take equally much memory have in common: scheme, or dtype, and shape."""
    if name in artifact.linears:
        placement = artifact.linears[name]
        return placement.scheme, placement.shape
    info = artifact.checkpoint.infos[f"{name}.weight"]
    return info.dtype, tuple(info.shape)


def _rows_at_once(columns: int) -> int:
    return max(_LEAST_ROWS, _PIECE // columns // _LEAST_ROWS * _LEAST_ROWS)


def _ranges(count: int, step: int) -> list[tuple[int, int]]:
    """The ranges of `step` rows; a remainder at the end is part of the last one."""
    starts = range(0, max(1, count // step) * step, step)
    return [(start, start + step if start + 2 * step <= count else count) for start in starts]


def _multiply(artifact: Artifact, piece: Piece) -> Multiply:
    """Read a piece; the function from an input to its rows of the output."""
    name = piece.linear
    if name in artifact.linears:
        if artifact.linears[name].backend.name != "reference":
            return artifact.prepare(name)
        return _Dequantized(
            linear=artifact.decode(name), bias=artifact.bias(name), dtype=artifact.dtype
        )
    weight = artifact.read_rows(f"{name}.weight", torch.arange(piece.start, piece.stop))
    bias = artifact.bias(name)
    return _Plain(weight=weight, bias=None if bias is None else bias[piece.start : piece.stop])


@dataclass(frozen=True, kw_only=True, eq=False)
class _Plain:
    """Rows of a linear that is not quantized, as stored."""

    weight: Tensor
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        height, width = self.weight.shape
        return _in_parts(x, (height, width), lambda rows: self.weight[rows].to(x.dtype), self.bias)


@dataclass(frozen=True, kw_only=True, eq=False)
class _Dequantized:
    """The reference backend on a weight that is dequantized a few rows at a time."""

    linear: QuantizedLinear
    bias: Tensor | None
    dtype: torch.dtype

    def __call__(self, x: Tensor) -> Tensor:
        x = self.linear.fake_quantize_input(self.linear.mixed_input(x))
        height, width = self.linear.weight.qvalue.shape
        weight = self.linear.weight
        return _in_parts(
            x,
            (height, width),
            lambda rows: weight.rows(rows).dequantize().to(self.dtype),
            self.bias,
        )


def _in_parts(
    x: Tensor, shape: tuple[int, int], weight: Callable[[slice], Tensor], bias: Tensor | None
) -> Tensor:
    """The product with a weight that is converted a few rows at a time, [..., O] of [..., I].

    Args:
        x: [..., I].
        shape: (O, I).
        weight: function from some rows to them, [rows, I] in x's dtype.
        bias: [O], or None.
    """
    height, width = shape
    parts = [
        functional.linear(x, weight(slice(start, stop)), None if bias is None else bias[start:stop])
        for start, stop in _ranges(height, _rows_at_once(width))
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)
