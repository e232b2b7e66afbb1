"""Transformers' modules as a `Decoder`, with transformers' own cache."""

import copy
import inspect
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from quantflow.core.kv import KVScales
from quantflow.errors import UsageError
from quantflow.models.graph import text_config

_CUT: tuple[type[Any], ...] = (DynamicSlidingWindowLayer, DynamicLayer)  # what `crop` shortens
# attributes of a layer of the cache that has a state in place of keys and values
_STATES = (
    "conv_states",
    "recurrent_states",
    "is_conv_states_initialized",
    "is_recurrent_states_initialized",
    "has_previous_state",
)


def rounded_cache(config: Any, scales: Sequence[KVScales]) -> DynamicCache:
    """Transformers' cache, empty, with keys and values rounded by measured scales.

    Args:
        config: configuration of the model.
        scales: scales of each layer.
    """
    cache = DynamicCache(config=config)
    update = cache.update

    def rounded(keys: Tensor, values: Tensor, layer: int, *args: Any, **kwargs: Any) -> Any:
        """Append K after RoPE and V, [B, kv heads, T, head_dim], rounded; all keys and values."""
        return update(
            scales[layer].round_keys(keys),
            scales[layer].round_values(values),
            layer,
            *args,
            **kwargs,
        )

    cache.update = rounded
    return cache


def plain_cache(model: nn.Module) -> DynamicCache:
    """An empty cache of transformers.

    Where a model's own code declares a class of cache, as MiniMax' does, it is of that class.
    """
    code, config = inspect.getmodule(type(model)), cast(Any, model.config)
    for _, kind in inspect.getmembers(code, inspect.isclass):
        if issubclass(kind, DynamicCache) and inspect.getmodule(kind) is code:
            return kind()
    return DynamicCache(config=config)


class TransformersDecoder:
    """A Hugging Face causal LM, or one whose linears are QuantLinear, with transformers' own cache.

    Attributes:
        vocab_size, positions, device: as in `Decoder`.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        device: str | torch.device | None = None,
        crops: bool = False,
        kv_scales: Sequence[KVScales] = (),
    ) -> None:
        """Take a model; its cache is empty until `begin`.

        Args:
            model: called as `model(input_ids=..., past_key_values=..., use_cache=True,
                logits_to_keep=...)`.
            device: device where it runs; None asks its parameters.
            crops: whether `crop` will be called. The cache of a sliding window then keeps what lies
                before the window.
            kv_scales: scales of each layer; the cache then holds keys and values rounded with them,
                in the model's dtype.
        """
        config: Any = text_config(model.config)
        self.vocab_size: int = config.vocab_size
        positions = getattr(config, "max_position_embeddings", None)
        # XLNet's -1 is no limit
        self.positions: int | None = None if positions is not None and positions < 0 else positions
        self.device = torch.device(device or next(model.parameters(), torch.empty(0)).device)
        self._model, self._crops, self._kv_scales = model, crops, kv_scales
        self.begin(rows=0, capacity=0)

    def begin(self, *, rows: int, capacity: int) -> None:
        """Empty the cache; it grows with the tokens, so neither number is needed."""
        rounded = self._kv_scales
        self._cache = (
            rounded_cache(self._model.config, rounded) if rounded else plain_cache(self._model)
        )
        self._length = 0
        self._padding: Tensor | None = None
        for layer in self._cache.layers:
            if self._crops and getattr(layer, "is_sliding", False):
                layer.activate_past_recording()

    def forward(
        self, input_ids: Tensor, *, padding: Tensor | None = None, last_only: bool = True
    ) -> Tensor:
        """Append positions; see `Decoder.forward`."""
        # [B, T or 1, V]
        logits: Tensor = self._call(input_ids, padding, logits_to_keep=1 if last_only else 0).logits
        return logits[:, -1].float() if last_only else logits.float()

    def forward_hidden(
        self, input_ids: Tensor, *, padding: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Append positions; see `HiddenDecoder.forward_hidden`."""
        output = self._call(input_ids, padding, logits_to_keep=0, output_hidden_states=True)
        return output.logits.float(), output.hidden_states[-1].float()

    def forward_states(self, input_ids: Tensor) -> Tensor:
        """Append positions; see `StateDecoder.forward_states`."""
        output = self._call(input_ids, None, logits_to_keep=1, output_hidden_states=True)
        return output.hidden_states[-1].float()  # type: ignore[no-any-return]

    def keep(self, rows: Tensor) -> None:
        """Choose sequences of the cache; see `Decoder.keep`."""
        self._cache.reorder_cache(rows)
        if self._padding is not None:
            self._padding = self._padding[rows]

    def crop(self, length: int) -> None:
        """Forget positions; see `Decoder.crop`.

        Raises:
            UsageError: a length that the cache has not reached, or one made without `crops`.
        """
        if not self._crops or not 0 <= length <= self._length:
            cause = f"crop to {length} positions: the cache has {self._length}, crops={self._crops}"
            raise UsageError(cause, "crop to what it has, and make the decoder with crops=True")
        recurrent = self._recurrent()
        if not recurrent:
            # transformers takes how many to remove, as a negative number
            self._cache.crop(length - self._length)
            self._length = length
        elif length < self._length:
            self._go_back(recurrent, length)

    def _recurrent(self) -> list[Any]:
        """The layers of the cache whose state of all tokens so far cannot be cut."""
        return [layer for layer in self._cache.layers if hasattr(layer, "recurrent_states")]

    def _go_back(self, recurrent: Sequence[Any], length: int) -> None:
        """Restore the states from before the last forward, and run what is kept of it again.

        Raises:
            UsageError: a length before that forward.
        """
        begin, input_ids, states = self._before
        if length < begin:
            raise UsageError(
                f"crop to {length} positions: the states of {begin} are the last that are kept",
                "crop to what the last forward appended",
            )
        for layer in self._cache.layers:
            if kind := next((each for each in _CUT if isinstance(layer, each)), None):
                kind.crop(layer, begin - self._length)
        for layer, state in zip(recurrent, states, strict=True):
            vars(layer).update(copy.deepcopy(state))
        self._length = begin
        if length > begin:
            self._call(input_ids[:, : length - begin], None, logits_to_keep=1)

    def _call(self, input_ids: Tensor, padding: Tensor | None, **options: Any) -> Any:
        """Run the model.

        Padded batches get a mask and positions, others neither, as a graph was captured.
        """
        if padding is not None and bool(padding.any()):
            self._padding = padding
        if self._crops and (recurrent := self._recurrent()):
            states = [
                {name: copy.deepcopy(vars(layer)[name]) for name in _STATES} for layer in recurrent
            ]
            self._before = (self._length, input_ids, states)
        begin, self._length = self._length, self._length + input_ids.shape[1]
        if self._padding is not None:
            columns = torch.arange(self._length, device=input_ids.device)
            real = columns >= self._padding[:, None]  # [B, length]
            options["attention_mask"] = real.long()
            # [B, T]
            options["position_ids"] = (columns - self._padding[:, None]).clamp(min=0)[:, begin:]
        return self._model(
            input_ids=input_ids, past_key_values=self._cache, use_cache=True, **options
        )
