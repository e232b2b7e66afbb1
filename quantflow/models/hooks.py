"""Hooks on a running decoder layer: its linears' inputs and outputs, its attention's Q, K and V."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from transformers.cache_utils import Cache

from quantflow.core.kv import KVScales
from quantflow.errors import UsageError

LinearCallback = Callable[[Tensor, Tensor], None]
KVCallback = Callable[[int, Tensor, Tensor], None]
QueryCallback = Callable[[Tensor], None]


class _NoLayers(list[Any]):
    """The layers of a cache without layers.

    A model that keeps states of its own with a layer then runs as without a cache.
    """

    def __getitem__(self, index: Any) -> Any:
        """None, whatever the index."""


class _PassingCache(Cache):  # type: ignore[misc]
    """A cache that stores nothing.

    A layer that keeps states of another kind beside keys and values begins without them.
    """

    def __init__(self) -> None:
        """Keep nothing."""
        super().__init__(layers=_NoLayers())

    def get_conv_state(self, layer_idx: int, *args: Any, **kwargs: Any) -> None:
        """None: there is no earlier token."""

    def get_recurrent_state(self, layer_idx: int, *args: Any, **kwargs: Any) -> None:
        """None: there is no earlier token."""

    def update_conv_state(
        self, conv_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> Tensor:
        """The new states, since there are no earlier ones."""
        return conv_states

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> Tensor:
        """The new states, since there are no earlier ones."""
        return recurrent_states

    def update_indexer(self, keys: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Tensor:
        """The new keys, since there are no earlier ones."""
        return keys

    def has_previous_state(self, *args: Any, **kwargs: Any) -> bool:
        """False: there is no earlier token."""
        return False

    def is_recording_past(self, *args: Any, **kwargs: Any) -> bool:
        """False: nothing is kept."""
        return False


class KVRecorder(_PassingCache):
    """A cache that stores nothing and reports the K and V that an attention layer would store."""

    def __init__(self, callback: KVCallback) -> None:
        """Report to `callback(layer index, K after RoPE, V)`.

        K and V are [1, kv heads, S, head_dim].
        """
        super().__init__()
        self._callback = callback

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Report K and V and return them unchanged."""
        self._callback(layer_idx, key_states, value_states)
        return key_states, value_states


class KVRounder(_PassingCache):
    """A cache that stores nothing and returns the K and V of a cache of 8 bits; thread-safe."""

    def __init__(self, scales: Mapping[int, KVScales]) -> None:
        """Round by the scales of each layer's keys and values, by layer index."""
        super().__init__()
        self._scales = scales

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """K after RoPE and V, [1, kv heads, S, head_dim], rounded."""
        scales = self._scales[layer_idx]
        return scales.round_keys(key_states), scales.round_values(value_states)


class QueryRecorder(TorchFunctionMode):
    """A block of one thread that reports attention's queries.

    They are Q after RoPE, [1, heads, S, head_dim].
    """

    def __init__(self, callback: QueryCallback) -> None:
        """Report to `callback(Q)`, once per attention layer that runs."""
        super().__init__()
        self._callback = callback

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run `func` as it is; report the first argument of scaled dot product attention."""
        if func is functional.scaled_dot_product_attention:
            self._callback(args[0] if args else (kwargs or {})["query"])
        return func(*args, **(kwargs or {}))


class RepeatedHeads(TorchFunctionMode):
    """A block of one thread in which attention repeats kv heads itself, one for each query head.

    torch shares kv heads on a GPU in its flash kernel, which takes no float32, and in plain
    mathematics, which makes all scores.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run `func` as it is, but scaled dot product attention with repeated keys and values."""
        keywords = dict(kwargs or {})
        if func is functional.scaled_dot_product_attention and keywords.pop("enable_gqa", False):
            keywords |= dict(zip(("query", "key", "value"), args, strict=False))
            times = keywords["query"].shape[-3] // keywords["key"].shape[-3]
            args = args[3:]  # a mask and its like, where they are positional, stay so
            whole = [
                keywords.pop("query"),
                *(keywords.pop(name).repeat_interleave(times, dim=-3) for name in ("key", "value")),
            ]
            return func(*whole, *args, **keywords)
        return func(*args, **(kwargs or {}))


@contextmanager
def watch(module: nn.Module, callbacks: Mapping[str, LinearCallback]) -> Iterator[None]:
    """Call `callback(input, output)` whenever a submodule has run, until the block ends.

    Args:
        module: decoder layer.
        callbacks: name relative to `module` -> callback; input [1, S, I] and output [1, S, O] are
            the real ones, no copies.

    Raises:
        UsageError: a name is not in the module.
    """
    inside = dict(module.named_modules())
    for name in callbacks:
        if name not in inside:
            raise UsageError(
                f"{name}: not in {type(module).__name__}",
                f"use one of {', '.join(filter(None, inside))}",
            )
    with ExitStack() as stack:
        for name, callback in callbacks.items():
            handle = inside[name].register_forward_hook(partial(_report, callback))
            stack.callback(handle.remove)
        yield


def _report(
    callback: LinearCallback, _module: nn.Module, args: tuple[Tensor, ...], output: Tensor
) -> None:
    callback(args[0], output)
