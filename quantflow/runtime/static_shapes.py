"""Transformers' modules over a cache of few lengths, so that few shapes are compiled or captured.

Tokens stand at columns of the cache, prompts padded on the left. What has no token yet is masked,
so the tokens are those of a cache that grows with the text. Where `Shapes` says so, the cache grows
in buckets, attention reads whole buckets of it, and prompts are padded to a bucket on the CPU
before the device sees them.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import StaticCache
from transformers.cache_utils import StaticLayer

from quantflow.backends import hpu
from quantflow.core.kv import KVScales
from quantflow.models.graph import moving_rotation, text_config
from quantflow.runtime.artifact import Artifact
from quantflow.runtime.decoder import require_length, require_room
from quantflow.runtime.shapes import Shapes

Forward = Callable[..., Any]


def why_not(artifact: Artifact) -> str | None:
    """Why an artifact cannot run in few shapes, in a sentence; None when it can."""
    config: Any = artifact.config
    cache = StaticCache(config=config, max_cache_len=1)
    if not all(type(layer) is StaticLayer for layer in cache.layers):
        return "a cache that slides, or has a state, has no static length"
    if rotation := moving_rotation(config):
        return f"it knows rotations of each position alone, not rope_type {rotation}"
    alibi = config.model_type == "bloom" or getattr(config, "alibi", False)
    if alibi and artifact.device.type == hpu.NAME:
        return "ALiBi needs a mask whose values transformers reads, which a graph cannot"
    return None


class _Layer(StaticLayer):  # type: ignore[misc]
    """A layer of the cache, of whose columns the first `read` are attended to."""

    read = 0
    scales: KVScales | None = None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Take memory. Its address is no part of what is compiled: the next text has another."""
        (rows, heads), self.dtype, self.device = (
            key_states.shape[:2],
            key_states.dtype,
            key_states.device,
        )
        columns = self.max_cache_len
        self.keys = key_states.new_zeros(rows, heads, columns, key_states.shape[-1])
        self.values = value_states.new_zeros(rows, heads, columns, value_states.shape[-1])
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write keys and values [B, kv heads, T, D]; those of the columns that are read."""
        if self.scales is not None:
            key_states = self.scales.round_keys(key_states)
            value_states = self.scales.round_values(value_states)
        keys, values = super().update(key_states, value_states, *args, **kwargs)
        return keys[:, :, : self.read], values[:, :, : self.read]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Columns that are read, and the first of them."""
        return self.read, 0


class StaticShapeDecoder:
    """A Hugging Face causal LM, quantized or not, over a cache of few lengths.

    Attributes:
        vocab_size, positions, device: as in `quantflow.runtime.decoder.Decoder`.
        shapes: rows, tokens, columns that are read and those of the cache -> forwards of this
            shape.
        cache_lengths: columns that the cache had, each once, in order.
        compilations: how often the forward was compiled; None: it is not.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        device: torch.device,
        rules: Shapes,
        forward: Forward | None = None,
        prompt_forward: Forward | None = None,
        compilations: Callable[[], int] | None = None,
        kv_scales: Sequence[KVScales] = (),
    ) -> None:
        """Take a model; there is no cache until `begin`.

        Args:
            model: model on the device, called as transformers' models are.
            device: device where it runs.
            rules: shapes that it runs in.
            forward: its forward, compiled or captured; None: as it is.
            prompt_forward: its forward for prompts; None: the same.
            compilations: how often it was compiled; None: it is not.
            kv_scales: scales of each layer; keys and values are rounded with them.
        """
        config: Any = text_config(model.config)
        self.vocab_size: int = config.vocab_size
        self.positions: int | None = getattr(config, "max_position_embeddings", None)
        self.device = device
        self.shapes = Counter[tuple[int, int, int, int]]()
        self.cache_lengths: dict[int, None] = {}
        self.compilations = compilations
        self._model, self._rules, self._scales = model, rules, kv_scales
        self._forward: Forward = model if forward is None else forward
        self._prompt_forward = self._forward if prompt_forward is None else prompt_forward
        self.begin(rows=0, capacity=0)

    @torch.inference_mode()
    def begin(self, *, rows: int, capacity: int) -> None:
        """Empty the cache; see `Decoder.begin`. Memory is taken at the first forward."""
        self._rows, self._capacity, self._length, self._added = rows, capacity, 0, 0
        self._padding = torch.zeros(rows, 1, dtype=torch.int64, device=self.device)
        self._cache: StaticCache | None = None

    def forward(
        self, input_ids: Tensor, *, padding: Tensor | None = None, last_only: bool = True
    ) -> Tensor:
        """Append positions; see `Decoder.forward`.

        Raises:
            UsageError: more rows or columns than `begin` made room for.
        """
        count = input_ids.shape[1]
        keep = 1 if last_only else 0
        logits: Tensor = self._run(input_ids, padding, logits_to_keep=keep).logits
        return logits[:, -1].float() if last_only else logits[:, -count:].float()

    def forward_hidden(
        self, input_ids: Tensor, *, padding: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Append positions; see `HiddenDecoder.forward_hidden`."""
        count = input_ids.shape[1]
        output = self._run(input_ids, padding, logits_to_keep=0, output_hidden_states=True)
        return output.logits[:, -count:].float(), output.hidden_states[-1][:, -count:].float()

    @torch.inference_mode()
    def keep(self, rows: Tensor) -> None:
        """Choose sequences of the cache; see `Decoder.keep`."""
        self._rows, self._padding = len(rows), self._padding[rows]
        if self._cache is not None:
            self._cache = self._like(self._cache, lambda states: states[rows])

    def crop(self, length: int) -> None:
        """Forget positions; see `Decoder.crop`.

        Raises:
            UsageError: there are not so many.
        """
        require_length(length, have=self._length - self._added)
        self._length = length + self._added

    @torch.inference_mode()
    def _run(self, input_ids: Tensor, padding: Tensor | None, **options: Any) -> Any:
        """Run the model on ids [B, T], at the columns behind those that it has read."""
        require_room(
            input_ids,
            rows=self._rows,
            length=self._length - self._added,
            capacity=self._capacity,
        )
        if padding is not None:
            self._padding.copy_(padding[:, None])
        first = self._length == 0
        if first and (more := self._rules.padding(input_ids.shape[1])):
            # on the CPU: the device would compile the padding of each length
            padded = functional.pad(input_ids.cpu(), (more, 0), value=int(input_ids[0, -1]))
            input_ids, self._added = padded.to(self.device), more
            self._padding += more
        begin, count = self._length, input_ids.shape[1]
        self._length = end = begin + count
        capacity = self._capacity + self._added
        cache = self._reserve(self._rules.allocated(end, capacity))
        columns = self._rules.read(end, capacity)
        at = torch.tensor(begin, device=self.device)
        for layer in cache.layers:
            layer.read = columns
            layer.cumulative_length.copy_(at)
        every = torch.arange(columns, device=self.device)
        places = torch.arange(count, device=self.device) + at  # [T]
        # [B, columns]; columns behind the end hold nothing yet
        mask = (every >= self._padding) & (every < end)
        if self.device.type == hpu.NAME:
            mask = self._of_each_token(mask, places)
        self.shapes[self._rows, count, columns, cache.layers[0].max_cache_len] += 1
        run = self._prompt_forward if first else self._forward
        return run(
            # a copy: strides are compiled too, and a column of the text has the text's
            input_ids=input_ids.clone(memory_format=torch.contiguous_format),
            attention_mask=mask,
            position_ids=(places - self._padding).clamp(min=0),  # [B, T]
            past_key_values=cache,
            use_cache=True,
            **options,
        )

    def _of_each_token(self, mask: Tensor, places: Tensor) -> Tensor:
        """A mask [B, columns] as what is added to the scores, [B, 1, T, columns].

        Transformers looks at the values of the other one, and leaves it away where nothing is
        padded; a graph would keep that for all prompts of the shape.
        """
        every = torch.arange(mask.shape[1], device=self.device)
        seen = mask[:, None, None, :] & (every <= places[:, None])
        dtype = next(self._model.parameters()).dtype
        return torch.zeros(seen.shape, dtype=dtype, device=self.device).masked_fill(
            ~seen, torch.finfo(dtype).min
        )

    def _reserve(self, columns: int) -> StaticCache:
        """The cache with at least so many columns; a longer one has what the old one has."""
        self.cache_lengths[columns] = None
        old = self._cache
        if old is None:
            self._cache = self._empty(columns)
        elif (more := columns - old.layers[0].max_cache_len) > 0:
            self._cache = self._like(old, lambda states: functional.pad(states, (0, 0, 0, more)))
        assert self._cache is not None
        return self._cache

    def _empty(self, columns: int) -> StaticCache:
        cache = StaticCache(config=self._model.config, max_cache_len=columns)
        cache.layers = [_Layer(max_cache_len=columns) for _ in cache.layers]
        scales: Sequence[KVScales | None] = self._scales or [None] * len(cache.layers)
        for layer, of_layer in zip(cache.layers, scales, strict=True):
            layer.cumulative_length = layer.cumulative_length.to(self.device)
            layer.scales = of_layer
        return cache

    def _like(self, old: StaticCache, change: Callable[[Tensor], Tensor]) -> StaticCache:
        """A cache whose keys and values [B, kv heads, columns, D] are those of `old`, changed."""
        states = [(change(layer.keys), change(layer.values)) for layer in old.layers]
        cache = self._empty(states[0][0].shape[2])
        for layer, (keys, values) in zip(cache.layers, states, strict=True):
            layer.lazy_initialization(keys, values)
            layer.keys.copy_(keys)
            layer.values.copy_(values)
        return cache
