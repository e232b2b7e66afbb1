"""The tensors of a model as transformers' module tree has them: made of its configuration, without storage."""

from collections.abc import Collection, Iterable, Sequence
from typing import Any

from torch import nn
from transformers import PreTrainedConfig

from quantflow.errors import InputError
from quantflow.models.graph import graph_for
from quantflow.models.load import skeleton
from quantflow.models.names import NameMap
from quantflow.runtime.layout import Bound, Parameter


class ModuleLayout:
    """The layout of any model that transformers knows; see `quantflow.runtime.layout.Layout`."""

    def __init__(self, config: PreTrainedConfig) -> None:
        """Make the modules.

        Raises:
            InputError: transformers makes no model of this configuration.
        """
        self._config, self._model = config, skeleton(config)
        self._names = NameMap(self._model)

    def linears(self, names: Iterable[str]) -> dict[str, tuple[int, int]]:
        """Return the linears among these names; see `Layout`."""
        known = {
            name: module
            for name, module in self._model.named_modules()
            if isinstance(module, nn.Linear)
        }
        modules = {
            name: known.get(self.module(name))
            for name in names
            if not self._names.beside(f"{name}.weight")
        }
        return {
            name: (module.out_features, module.in_features)
            for name, module in modules.items()
            if module is not None
        }

    def module(self, linear: str) -> str:
        """Return what the model calls a linear of the checkpoint; see `Layout`."""
        return self._names.module_name(f"{linear}.weight").removesuffix(".weight")

    def bind(self, names: Sequence[str], *, quantized: Collection[str]) -> Bound:
        """Match tensors with parameters; see `Layout`. The twin of a quantized linear has no tensor.

        Raises:
            InputError: naming the tensor or the parameter.
            UnsupportedError: a tensor that is merged or split on load.
        """
        to_source, state = self._names.bind(names).to_source, self._model.state_dict()
        for parameter, source in to_source.items():
            linear = source.rpartition(".")[0]
            if linear in quantized and parameter.rpartition(".")[0] != self.module(linear):
                raise InputError(
                    f"{parameter}: needed by the model, not in the artifact",
                    "export the artifact again",
                )
        parameters = tuple(
            Parameter(
                source=source,
                shape=tuple(state[name].shape),
                floating=state[name].is_floating_point(),
            )
            for name, source in to_source.items()
        )
        head: Any = self._model.get_output_embeddings()
        called = next(name for name, module in self._model.named_modules() if module is head)
        return Bound(
            parameters=parameters, head=to_source[f"{called}.weight"].removesuffix(".weight")
        )

    def caches(self) -> dict[str, int]:
        """Return the attentions and their heads; see `Layout`."""
        layers = graph_for(self._config).layers
        return {layer.attention: layer.kv_heads for layer in layers if layer.attention is not None}
