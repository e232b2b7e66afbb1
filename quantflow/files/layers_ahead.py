"""Layers that predict tokens further ahead (MTP): where a checkpoint has them, how they are wired.

Such a layer reads the embedding of the next token and the model's hidden state after its last norm,
each through a norm of its own, side by side through a linear, and runs one decoder layer on that. A
norm of its output, and the model's head, give the token after the next. Sources: DeepSeek-AI 2024,
arXiv:2412.19437, section 2.2; the released index files of these families.

    where                beside the decoder layer                               first comes
    beyond the last      enorm, hnorm, eh_proj, shared_head.norm                the embedding
    mtp.layers           mtp.pre_fc_norm_embedding, _hidden, mtp.fc, mtp.norm   the embedding
    model.mtp_layers     token_layernorm, hidden_layernorm, input_proj,         the hidden state
                         final_layernorm
"""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

_STORED = r"\.(?:q?weight|weight_packed)"  # a linear's tensor, quantized or not
_BEYOND = re.compile(rf"(?P<list>.*layers)\.(?P<at>\d+)\.eh_proj{_STORED}")
_LISTED = re.compile(rf"(?P<list>.*mtp_layers)\.(?P<at>\d+)\.input_proj{_STORED}")
_APART = re.compile(r"(?P<list>(?:.*\.)?mtp\.layers)\.(?P<at>\d+)\.input_layernorm\.weight")
_KEYS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_layers")


@dataclass(frozen=True, kw_only=True)
class Ahead:
    """One layer that predicts a further token; names without `.weight`.

    Attributes:
        layers, index: the list that its decoder layer is in, and its place there.
        joint: linear from the embedding and the hidden state, [H, 2 H].
        token_norm, hidden_norm: norms of the two.
        norm: norm of what its decoder layer gives.
        hidden_first: the hidden state comes first in the linear's inputs.
    """

    layers: str
    index: int
    joint: str
    token_norm: str
    hidden_norm: str
    norm: str
    hidden_first: bool = False

    @property
    def prefix(self) -> str:
        """Name of its decoder layer."""
        return f"{self.layers}.{self.index}"

    @property
    def norms(self) -> tuple[str, str, str]:
        """Its norms beside the decoder layer."""
        return self.token_norm, self.hidden_norm, self.norm


def layers_ahead(names: Collection[str]) -> tuple[Ahead, ...]:
    """The layers that predict further tokens, in their order.

    Args:
        names: names of all tensors of a checkpoint.
    """
    found = []
    for name in names:
        if match := _BEYOND.fullmatch(name):
            own = f"{match['list']}.{match['at']}"
            parts = ("eh_proj", "enorm", "hnorm", "shared_head.norm")
        elif match := _LISTED.fullmatch(name):
            own = f"{match['list']}.{match['at']}"
            parts = ("input_proj", "token_layernorm", "hidden_layernorm", "final_layernorm")
        elif match := _APART.fullmatch(name):
            own = match["list"].removesuffix(".layers")
            parts = ("fc", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
        else:
            continue
        joint, token_norm, hidden_norm, norm = (f"{own}.{part}" for part in parts)
        found.append(
            Ahead(
                layers=match["list"],
                index=int(match["at"]),
                joint=joint,
                token_norm=token_norm,
                hidden_norm=hidden_norm,
                norm=norm,
                hidden_first=parts[0] == "input_proj",
            )
        )
    return tuple(sorted(found, key=lambda each: (each.layers, each.index)))


def promised(config: Mapping[str, Any]) -> int:
    """The number of such layers that a configuration says; 0 where it says none.

    Args:
        config: content of config.json.
    """
    text = config.get("text_config")
    numbers = text if isinstance(text, dict) else config
    counts = [numbers.get(key) for key in _KEYS]
    return max((count for count in counts if type(count) is int), default=0)


def lost_words(config: Mapping[str, Any], names: Collection[str]) -> str | None:
    """A sentence about layers that config.json has and the files lack; None where none is lost.

    An engine that guesses with a layer that is not there accepts none of its guesses, and reports
    no error.

    Args:
        config: content of config.json.
        names: names of all tensors of the checkpoint.
    """
    count, found = promised(config), layers_ahead(names)
    stored = {name.rpartition(".")[0] for name in names}
    for ahead in found:
        for part in (ahead.joint, *ahead.norms):
            if part not in stored:
                return f"{part}: is missing, of {ahead.prefix}, which predicts further tokens (MTP)"
    if len(found) >= count:
        return None
    layers = "1 layer" if count == 1 else f"{count} layers"
    return (
        f"config.json has {layers} to predict further tokens (MTP), the files have "
        f"{len(found) or 'none'}: a program that guesses with them accepts no guess"
    )
