"""A layer that predicts tokens further ahead (MTP) in transformers' modules.

It is a decoder layer of the model's own class, of the kind that attends to all tokens before it,
with a cache of its own. transformers has no place for such a layer in some families, Qwen3-Next and
Qwen3.5 among them. `quantflow.files.layers_ahead` says how it is wired.
"""

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel
from transformers.masking_utils import create_causal_mask

from quantflow.errors import UnsupportedError
from quantflow.files.layers_ahead import Ahead
from quantflow.models.graph import text_config
from quantflow.runtime.artifact import Artifact
from quantflow.runtime.mtp import REMEDY, ahead_of, with_unused


class ModuleAhead:
    """The layer of one model, and its cache of one sequence; see `AheadLayer`."""

    def __init__(self, artifact: Artifact, model: PreTrainedModel) -> None:
        """Read the first layer that predicts further tokens.

        Args:
            artifact: artifact of the model.
            model: the model with its weights.

        Raises:
            UnsupportedError: there is no such layer, or it is none of the model's own kind.
            InputError: a tensor that holds what it must not.
        """
        artifact = with_unused(artifact)
        ahead, folder = ahead_of(artifact), artifact.checkpoint.folder
        base: Any = model.get_decoder()
        alike = [layer for layer in base.layers if hasattr(layer, "self_attn")]
        if not alike:
            raise UnsupportedError(
                f"{folder}: no layer of a {artifact.config.model_type} attends to all tokens "
                "before it, as its layer that predicts further tokens (MTP) does",
                REMEDY,
            )
        self._config: Any = text_config(model.config)
        index = list(base.layers).index(alike[-1])
        layer = type(alike[-1])(self._config, index)
        tensors = _tensors(artifact, ahead, layer.state_dict())
        layer.load_state_dict(tensors)
        layer.self_attn.layer_idx = 0  # its place in a cache of its own
        self._layer = layer.to(artifact.dtype).eval().requires_grad_(False)
        for name in artifact.mtp:
            own = name.removeprefix(f"{ahead.prefix}.")
            if isinstance(_submodule(self._layer, own), nn.Linear):
                self._layer.set_submodule(own, artifact.prepare(name))
        self._norms = [_norm(artifact, base.norm, name) for name in ahead.norms]
        self._joint = artifact.read([f"{ahead.joint}.weight"], artifact.dtype)[
            f"{ahead.joint}.weight"
        ]
        self._hidden_first, self._rotary = ahead.hidden_first, base.rotary_emb
        self._embed, self._head = model.get_input_embeddings(), model.get_output_embeddings()
        self.begin(0)

    def begin(self, capacity: int) -> None:
        """Empty the cache; it grows with the tokens."""
        del capacity
        self._cache, self._length = DynamicCache(), 0

    def crop(self, length: int) -> None:
        """Forget every column from `length` on."""
        if length < self._length:
            self._cache.crop(length - self._length)
            self._length = length

    @torch.inference_mode()
    def forward(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        """Append the columns of tokens; see `AheadLayer.forward`."""
        token_norm, hidden_norm, norm = self._norms
        parts = [
            token_norm(self._embed(tokens[None])),
            hidden_norm(hidden[None].to(self._joint.dtype)),
        ]
        joined = torch.cat(parts[::-1] if self._hidden_first else parts, dim=-1)
        x = nn.functional.linear(joined, self._joint)  # [1, T, H]
        places = torch.arange(self._length, self._length + len(tokens))[None]
        mask = create_causal_mask(
            config=self._config,
            inputs_embeds=x,
            attention_mask=None,
            past_key_values=self._cache,
            position_ids=places,
        )
        self._length += len(tokens)
        x = self._layer(
            x,
            position_embeddings=self._rotary(x, places),
            attention_mask=mask,
            position_ids=places,
            past_key_values=self._cache,
        )
        return norm(x)[0].float()  # type: ignore[no-any-return]

    @torch.inference_mode()
    def logits(self, states: Tensor) -> Tensor:
        """The model's head of states [T, H]; [T, V] float32."""
        return self._head(states.to(self._joint.dtype)).float()  # type: ignore[no-any-return]


def _tensors(artifact: Artifact, ahead: Ahead, wanted: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The layer's tensors by the names of its module.

    Raises:
        UnsupportedError: the checkpoint lacks one.
    """

    def read(name: str) -> Tensor:
        if name.removesuffix(".weight") in artifact.mtp:
            return artifact.decode(name.removesuffix(".weight")).dequantize()
        if name not in artifact.checkpoint.tensors:
            raise UnsupportedError(
                f"{artifact.checkpoint.folder}: {name} is missing, of the layer that predicts "
                "further tokens (MTP)",
                REMEDY,
            )
        return artifact.read([name], artifact.dtype)[name]

    found = {}
    for name, empty in wanted.items():
        source, (place, _, leaf) = f"{ahead.prefix}.{name}", name.rpartition(".")
        parts = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}.get(leaf)
        if place.endswith("experts") and parts and source not in artifact.checkpoint.tensors:
            experts = [
                torch.cat(
                    [read(f"{ahead.prefix}.{place}.{number}.{part}.weight") for part in parts]
                )
                for number in range(len(empty))
            ]
            found[name] = torch.stack(experts)
        else:
            found[name] = read(source)
    return found


def _norm(artifact: Artifact, alike: nn.Module, name: str) -> nn.Module:
    """A norm as the model's last one, with a weight of its own."""
    norm: Any = copy.deepcopy(alike)
    weight = artifact.read([f"{name}.weight"], artifact.dtype)[f"{name}.weight"]
    norm.weight = nn.Parameter(weight, requires_grad=False)
    return norm  # type: ignore[no-any-return]


def _submodule(module: nn.Module, name: str) -> nn.Module | None:
    return dict(module.named_modules()).get(name)
