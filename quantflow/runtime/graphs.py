"""Transformers' modules over a cache of fixed length, whose decode steps are captured as a graph.

A step reads and writes tensors that stay where they are: the ids, their positions, the columns
where they are written, the mask of padding, and the cache. It may run twice without harm, because
it begins by telling every layer where it writes. A prompt, which has another length each time, is
not captured. The length of the cache is that of a bucket, so that a graph serves many prompts.
Small buckets that were used before keep their memory and graph, so that texts of several lengths in
turns are not captured anew each time.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import StaticCache

from quantflow.models.graph import moving_rotation, text_config
from quantflow.models.open import graph_for
from quantflow.runtime.artifact import Artifact
from quantflow.runtime.decoder import require_length, require_room

BUCKET = 256  # columns of a cache are a multiple of it
KEPT = 4096  # positions, of all rows, in the buckets that are kept beside the one in use

Step = Callable[[], Tensor]


def why_not(artifact: Artifact) -> str | None:
    """Why an artifact's decode steps cannot be captured, in a sentence; None when they can."""
    config: Any = artifact.config
    if graph_for(config).sparse:
        return "a graph sends every token to the experts of the first"
    if any(StaticCache(config=config, max_cache_len=1).is_sliding):
        return "a cache that slides counts its columns outside of the graph"
    if not getattr(config, "rope_parameters", None):
        return "it knows positions by rotation alone"
    if rotation := moving_rotation(config):
        return f"it knows rotations of each position alone, not rope_type {rotation}"
    return None if artifact.kv_cache is None else "a cache with measured scales grows with the text"


@dataclass(kw_only=True, eq=False)
class _Bucket:
    """What a step of so many rows and columns reads and writes, and its graph.

    Attributes:
        cache: of transformers; its layers allocate their memory in their first forward.
        columns: numbers of the columns, int64 [columns].
        ids: the step's tokens, int64 [B, 1].
        padding: columns before each row's text, int64 [B, 1].
        at: column that is written next, int64 [].
        step: the graph; None until it is captured.
    """

    cache: StaticCache
    columns: Tensor
    ids: Tensor
    padding: Tensor
    at: Tensor
    step: Step | None = None


class GraphDecoder:
    """A Hugging Face causal LM, quantized or not, whose decode steps are replayed.

    Attributes:
        vocab_size, positions, device: as in `quantflow.runtime.decoder.Decoder`.
    """

    def __init__(
        self, model: nn.Module, *, device: torch.device, capture: Callable[[Step], Step]
    ) -> None:
        """Take a model; there is no cache until `begin`.

        Args:
            model: model on the device, called as transformers' models are.
            device: device where it runs.
            capture: `quantflow.backends.cuda.capture`, or a function that does the same.
        """
        config: Any = text_config(model.config)
        self.vocab_size: int = config.vocab_size
        self.positions: int | None = getattr(config, "max_position_embeddings", None)
        self.device = device
        self._model, self._capture = model, capture
        self._kept: dict[tuple[int, int], _Bucket] = {}  # the one used last is the last
        self._length = 0
        self._now = self._bucket(rows=0, columns=0)

    @torch.inference_mode()
    def begin(self, *, rows: int, capacity: int) -> None:
        """Empty the cache; see `Decoder.begin`.

        As many rows in the same bucket take over the memory and the graph of an earlier batch.
        """
        self._take(rows=rows, columns=capacity + -capacity % BUCKET)
        self._now.cache.reset()
        self._now.padding.zero_()
        self._length = 0

    @torch.inference_mode()
    def forward(
        self, input_ids: Tensor, *, padding: Tensor | None = None, last_only: bool = True
    ) -> Tensor:
        """Append positions; see `Decoder.forward`.

        Raises:
            UsageError: more rows or columns than `begin` made room for.
        """
        # the layers of the cache allocate their memory in the first forward: it is not captured
        first = self._length == 0
        self._place(input_ids, padding)
        if first or input_ids.shape[1] > 1 or not last_only:
            logits: Tensor = self._run(input_ids, logits_to_keep=1 if last_only else 0).logits
            return logits[:, -1].float() if last_only else logits.float()
        now = self._now
        now.ids.copy_(input_ids)
        if now.step is None:
            now.step = self._capture(
                lambda: self._run(now.ids, logits_to_keep=1).logits[:, -1].float()
            )
        return now.step().clone()  # the next step writes where it lies

    @torch.inference_mode()
    def forward_hidden(
        self, input_ids: Tensor, *, padding: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Append positions; see `HiddenDecoder.forward_hidden`. It is not captured."""
        self._place(input_ids, padding)
        output = self._run(input_ids, output_hidden_states=True)
        return output.logits.float(), output.hidden_states[-1].float()

    @torch.inference_mode()
    def keep(self, rows: Tensor) -> None:
        """Choose sequences of the cache; see `Decoder.keep`.

        As many rows as there were keep their memory and graph.
        """
        layers, padding = self._now.cache.layers, self._now.padding[rows]
        if len(rows) != len(self._now.ids):
            self._take(rows=len(rows), columns=len(self._now.columns))
        for layer, new in zip(layers, self._now.cache.layers, strict=True):
            keys, values = layer.keys[rows], layer.values[rows]
            if not new.is_initialized:
                new.lazy_initialization(keys, values)
            new.keys.copy_(keys)
            new.values.copy_(values)
        self._now.padding.copy_(padding)

    def crop(self, length: int) -> None:
        """Forget positions; see `Decoder.crop`.

        Raises:
            UsageError: there are not so many.
        """
        require_length(length, have=self._length)
        self._length = length

    def _take(self, *, rows: int, columns: int) -> None:
        """Use the bucket of this size; of the others the longest unused go, beyond KEPT."""
        size = (rows, columns)
        known = self._kept.pop(size, None)
        while sum(rows * columns for rows, columns in self._kept) > KEPT:
            del self._kept[next(iter(self._kept))]
        self._now = self._bucket(rows=rows, columns=columns) if known is None else known
        self._kept[size] = self._now

    def _bucket(self, *, rows: int, columns: int) -> _Bucket:
        ids, padding = torch.zeros(2, rows, 1, dtype=torch.int64, device=self.device)
        return _Bucket(
            cache=StaticCache(config=self._model.config, max_cache_len=columns),
            columns=torch.arange(columns, device=self.device),
            ids=ids,
            padding=padding,
            at=torch.zeros((), dtype=torch.int64, device=self.device),
        )

    def _place(self, input_ids: Tensor, padding: Tensor | None) -> None:
        """Say where ids are written, and make room for them."""
        now = self._now
        require_room(input_ids, rows=len(now.ids), length=self._length, capacity=len(now.columns))
        if padding is not None:
            now.padding.copy_(padding[:, None])
        now.at.fill_(self._length)
        self._length += input_ids.shape[1]

    def _run(self, input_ids: Tensor, **options: Any) -> Any:
        now = self._now
        counts = [layer.cumulative_length for layer in now.cache.layers]
        torch._foreach_copy_(counts, [now.at] * len(counts))
        end = now.at + input_ids.shape[1]
        # [B, columns]; columns behind the end hold nothing yet
        real = (now.columns >= now.padding) & (now.columns < end)
        at = now.at + now.columns[: input_ids.shape[1]]  # [T]
        batch = {
            "input_ids": input_ids,
            "attention_mask": real,
            "position_ids": (at - now.padding).clamp(min=0),
        }
        return self._model(**batch, past_key_values=now.cache, use_cache=True, **options)
