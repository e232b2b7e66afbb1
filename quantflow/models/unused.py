"""Tensors of a checkpoint that no module of the model has: what they are, in a phrase.

Released checkpoints hold them: layers that predict tokens further ahead (MTP), more layers than
config.json says, value heads of a training, buffers that transformers stored once. transformers
loads such a checkpoint and leaves them out. They are copied into an artifact as they are, since an
engine may read what a forward does not, and every stage says so.
"""

import re
from collections.abc import Mapping
from typing import Any

from quantflow.files.checkpoint import Checkpoint
from quantflow.units import size

_MTP = re.compile(r"(^|\.)(mtp|nextn|mtp_layers|mtp_block)(\.|$)")
_LAYER = re.compile(r"(^|\.)(layers|h|blocks|block)\.(?P<index>\d+)\.")
_BUFFER = re.compile(
    r"(inv_freq|attn\.bias|attention\.bias|masked_bias|causal_mask|position_ids|\.mask)$"
)
_VALUE_HEAD = re.compile(r"^(v_head|value_head|score|reward_head)\.")
_COUNTS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
MTP, BUFFER = "predicts tokens further ahead (MTP)", "a buffer that the model computes"
VALUE_HEAD, OTHER = "a value head", "no module of the model"


def reason_of(name: str, config: Mapping[str, Any]) -> str:
    """What an unused tensor is.

    Args:
        name: source name.
        config: content of config.json.
    """
    text = config.get("text_config")
    numbers = text if isinstance(text, dict) else config
    count = next((numbers[key] for key in _COUNTS if key in numbers), None)
    ahead = numbers.get("num_nextn_predict_layers") or 0
    layer = _LAYER.search(name)
    if _MTP.search(name):
        return MTP
    if _BUFFER.search(name):
        return BUFFER
    if layer is not None and isinstance(count, int) and int(layer["index"]) >= count:
        inside = int(layer["index"]) < count + ahead
        return MTP if inside else f"of a layer beyond the {count} of config.json"
    return VALUE_HEAD if _VALUE_HEAD.match(name) else OTHER


def unused_words(checkpoint: Checkpoint, *, done: str = "copied and not used") -> str | None:
    """A sentence that names the unused tensors by what they are; None without any.

    Args:
        checkpoint: the compared checkpoint.
        done: what becomes of them.
    """
    if not checkpoint.unused:
        return None
    by_reason: dict[str, list[str]] = {}
    for name, tensor in checkpoint.unused.items():
        by_reason.setdefault(tensor.reason, []).append(name)
    listed = "; ".join(
        f"{reason}: {names[0]}" + (f" and {len(names) - 1} more" if names[1:] else "")
        for reason, names in by_reason.items()
    )
    nbytes = sum(tensor.info.nbytes for tensor in checkpoint.unused.values())
    count = len(checkpoint.unused)
    which = "1 tensor" if count == 1 else f"{count} tensors"
    return f"{which}, {size(nbytes)}, {done}: {listed}"
