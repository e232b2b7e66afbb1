"""Transformers' modules over a cache of fixed length, whose decode steps are captured as a graph.

A step reads and writes tensors that stay where they are: the ids, their positions, the columns
where they are written, the mask of padding, and the cache. It may run twice without harm, because
it begins by telling every layer where it writes. A prompt, which has another length each time, is
not captured. The length of the cache is that of a bucket, so that a graph serves many prompts.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import StaticCache

from quantflow.models.graph import moving_rotation, text_config
from quantflow.models.open import graph_for
from quantflow.runtime.artifact import Artifact
from quantflow.runtime.decoder import require_length, require_room

BUCKET = 256  # columns of a cache are a multiple of it

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
        self._step: Step | None = None
        self._length = 0
        self._reserve(rows=0, columns=0)

    @torch.inference_mode()
    def begin(self, *, rows: int, capacity: int) -> None:
        """Empty the cache; see `Decoder.begin`.

        As many rows in the same bucket take over the memory and the graph of the last batch.
        """
        columns = capacity + -capacity % BUCKET
        if (len(self._ids), len(self._columns)) != (rows, columns):
            self._reserve(rows=rows, columns=columns)
        self._cache.reset()
        self._padding.zero_()
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
        self._ids.copy_(input_ids)
        if self._step is None:
            self._step = self._capture(
                lambda: self._run(self._ids, logits_to_keep=1).logits[:, -1].float()
            )
        return self._step().clone()  # the next step writes where it lies

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
        layers, padding = self._cache.layers, self._padding[rows]
        if len(rows) != len(self._ids):
            self._reserve(rows=len(rows), columns=len(self._columns))
        for layer, new in zip(layers, self._cache.layers, strict=True):
            keys, values = layer.keys[rows], layer.values[rows]
            if not new.is_initialized:
                new.lazy_initialization(keys, values)
            new.keys.copy_(keys)
            new.values.copy_(values)
        self._padding.copy_(padding)

    def crop(self, length: int) -> None:
        """Forget positions; see `Decoder.crop`.

        Raises:
            UsageError: there are not so many.
        """
        require_length(length, have=self._length)
        self._length = length

    def _reserve(self, *, rows: int, columns: int) -> None:
        """Make the tensors of a step anew; the graph of the old ones is of no use."""
        self._cache = StaticCache(config=self._model.config, max_cache_len=columns)
        self._columns = torch.arange(columns, device=self.device)
        self._ids, self._padding = torch.zeros(2, rows, 1, dtype=torch.int64, device=self.device)
        self._at = torch.zeros((), dtype=torch.int64, device=self.device)
        self._step = None

    def _place(self, input_ids: Tensor, padding: Tensor | None) -> None:
        """Say where ids are written, and make room for them."""
        require_room(
            input_ids, rows=len(self._ids), length=self._length, capacity=len(self._columns)
        )
        if padding is not None:
            self._padding.copy_(padding[:, None])
        self._at.fill_(self._length)
        self._length += input_ids.shape[1]

    def _run(self, input_ids: Tensor, **options: Any) -> Any:
        counts = [layer.cumulative_length for layer in self._cache.layers]
        torch._foreach_copy_(counts, [self._at] * len(counts))
        end = self._at + input_ids.shape[1]
        # [B, columns]; columns behind the end hold nothing yet
        real = (self._columns >= self._padding) & (self._columns < end)
        at = self._at + self._columns[: input_ids.shape[1]]  # [T]
        batch = {
            "input_ids": input_ids,
            "attention_mask": real,
            "position_ids": (at - self._padding).clamp(min=0),
        }
        return self._model(**batch, past_key_values=self._cache, use_cache=True, **options)
