"""Attention of transformers' modules by choice, as functions that transformers calls by name.

softmax(q k^T * scaling + mask) v for q [B, heads, T, D] and k, v [B, kv heads, columns, D]:

| choice           | softmax                    | where                                         |
|------------------|----------------------------|-----------------------------------------------|
| eager, sdpa      | float32                    | transformers' own functions                   |
| bfloat16-softmax | bfloat16                   | the plain formula                             |
| fused            | the kernel's               | FusedSDPA on hpu; torch's flash kernel, where |
|                  |                            | it can, and its plain formula elsewhere       |

A model whose modules do not ask transformers for a function, such as BLOOM's, has no choice.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface, eager_mask, sdpa_mask

from quantflow.backends import hpu
from quantflow.errors import UnsupportedError
from quantflow.runtime.attention_choice import Attention

Attend = Callable[..., tuple[Tensor, None]]
_UNKNOWN = ("s_aux", "position_bias")  # what some families add to the scores


def choose_(model: PreTrainedModel, choice: Attention, device: torch.device) -> tuple[str, ...]:
    """Have a model attend as `choice` says; what of it the device does not have, in sentences.

    Raises:
        UnsupportedError: the model's modules have no choice.
    """
    kind = model.config.model_type
    if not model._can_set_attn_implementation():
        raise UnsupportedError(
            f"attention {choice.kind}: the modules of {kind} compute it in a way of their own",
            "leave --attention out",
        )
    if choice.name.startswith("quantflow"):
        fused = choice.kind == "fused"
        AttentionInterface.register(
            choice.name, _fused(choice, device) if fused else _bfloat16_softmax
        )
        AttentionMaskInterface.register(choice.name, sdpa_mask if fused else eager_mask)
    try:
        model.set_attn_implementation(choice.name)
    except (ValueError, ImportError) as error:
        raise UnsupportedError(
            f"attention {choice.kind} of {kind}: {error}", "choose another"
        ) from error
    asked = {"recompute": choice.recompute, "fast-softmax": choice.fast_softmax}
    missing = [word for word in asked if asked[word] and device.type != hpu.NAME]
    reasons = []
    if missing:
        reasons.append(f"attention: {' and '.join(missing)}: Gaudi's kernel alone has it")
    if choice.kind == "fused" and choice.bfloat16_softmax:
        reasons.append("attention: bfloat16-softmax: the fused kernel has a softmax of its own")
    return tuple(reasons)


def _bfloat16_softmax(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    softcap: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attention by its formula; the softmax sums in bfloat16. Returns [B, T, heads, D]."""
    _refuse(module, options)
    key, value = _repeated(query, key, value)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    scores = query @ key.transpose(2, 3) * scale  # [B, heads, T, columns]
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if attention_mask is not None:
        scores = scores + attention_mask
    weights = functional.softmax(scores.to(torch.bfloat16), dim=-1).to(value.dtype)
    return (weights @ value).transpose(1, 2).contiguous(), None


def _fused(choice: Attention, device: torch.device) -> Attend:
    """Attention in one kernel."""

    def attend(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *,
        scaling: float | None = None,
        softcap: float | None = None,
        **options: Any,
    ) -> tuple[Tensor, None]:
        """Returns [B, T, heads, D]."""
        _refuse(module, options | {"softcap": softcap}, also=("softcap",))
        key, value = _repeated(query, key, value)
        causal = attention_mask is None and query.shape[2] > 1
        if causal:  # a prompt without padding: columns behind it, if any, hold nothing yet
            count = query.shape[2]
            key, value = key[:, :, :count], value[:, :, :count]
            if not choice.causal:
                places = torch.arange(count, device=query.device)
                attention_mask, causal = (places <= places[:, None])[None, None], False
        if device.type == hpu.NAME:
            result = hpu.fused_attention(
                query,
                key,
                value,
                attention_mask,
                causal=causal,
                scale=scaling,
                fast_softmax=choice.fast_softmax,
                recompute=choice.recompute,
            )
        else:
            with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH], set_priority=True):
                result = functional.scaled_dot_product_attention(
                    query, key, value, attention_mask, is_causal=causal, scale=scaling
                )
        return result.transpose(1, 2).contiguous(), None

    return attend


def _repeated(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values of every head, [B, heads, columns, D]."""
    groups = query.shape[1] // key.shape[1]
    return key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)


def _refuse(module: nn.Module, options: dict[str, Any], also: tuple[str, ...] = ()) -> None:
    """Refuse what a family adds to the scores and the function does not compute.

    Raises:
        UnsupportedError: naming it.
    """
    for name in (*_UNKNOWN, *also):
        if options.get(name) is not None:
            raise UnsupportedError(
                f"attention: {type(module).__name__} adds {name}, which it does not compute",
                "give --attention eager",
            )
