"""The tensors of a model as transformers' module tree has them; the tree gets no storage."""

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

from torch import nn
from transformers import PreTrainedConfig

from quantflow.errors import InputError
from quantflow.models.graph import Graph
from quantflow.models.model_tensors import Bound, Parameter
from quantflow.models.names import NameMap
from quantflow.models.skeleton import skeleton


class ModuleTensors:
    """The tensors of any model that transformers knows; see `model_tensors.ModelTensors`."""

    def __init__(self, config: PreTrainedConfig, *, graph: Callable[[], Graph]) -> None:
        """Make the modules.

        Args:
            config: transformers' configuration.
            graph: called for the model's graph where `caches` is asked for.

        Raises:
            InputError: transformers makes no model of this configuration.
        """
        self._graph, self._model = graph, skeleton(config)
        self._names = NameMap(self._model)

    def linears(self, names: Iterable[str]) -> dict[str, tuple[int, int]]:
        """The linears among these names; see `ModelTensors`."""
        modules = {
            name: module
            for name, module in self._model.named_modules()
            if isinstance(module, nn.Linear)
        }
        linears = {
            name: modules.get(place.removesuffix(".weight"))
            for name in names
            if (place := self._names.whole(f"{name}.weight")) is not None
        }
        return {
            name: (module.out_features, module.in_features)
            for name, module in linears.items()
            if module is not None
        }

    def module(self, linear: str) -> str:
        """The name of a linear in transformers' model; see `ModelTensors`."""
        return self._names.module_name(f"{linear}.weight").removesuffix(".weight")

    def spelled(self, names: Iterable[str], wholes: Collection[str]) -> dict[str, str]:
        """Names that differ from those that transformers writes; see `NameMap.spelled`."""
        return self._names.spelled(names, wholes)

    def bind(self, names: Sequence[str], *, quantized: Collection[str]) -> Bound:
        """Match tensors with parameters; see `ModelTensors`.

        The twin of a quantized linear has no tensor.

        Raises:
            InputError: naming the tensor or the parameter.
            UnsupportedError: a tensor that is merged or split on load.
        """
        binding, state = self._names.bind(names), self._model.state_dict()
        to_source = binding.to_source
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
        place = next(name for name, module in self._model.named_modules() if module is head)
        return Bound(
            parameters=parameters,
            head=to_source[f"{place}.weight"].removesuffix(".weight"),
            unused=binding.unused,
        )

    def caches(self) -> dict[str, int]:
        """The attentions and their kv heads; see `ModelTensors`."""
        layers = self._graph().layers
        return {layer.attention: layer.kv_heads for layer in layers if layer.attention is not None}
