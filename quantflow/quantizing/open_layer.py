"""A decoder layer in memory, and the records that the steps of its quantization read.

Each step is a function of these records that returns a record of its own: Traffic
(quantflow/quantizing/layer_traffic.py), Smoothed (quantflow/quantizing/smoothing.py), RoundedLinear
here, EncodedLinear and QuantizedLayer (quantflow/quantizing/layer.py). Nothing is written into a
record of another step.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from quantflow.backends import BACKENDS
from quantflow.core.device import Device
from quantflow.core.dtypes import DTYPES
from quantflow.core.parallel import Workers
from quantflow.core.qtensor import QuantizedLinear
from quantflow.core.result import GroupResult
from quantflow.core.scheme import LinearScheme
from quantflow.distributed.team import Team
from quantflow.models.capture import LayerStream, State
from quantflow.models.graph import Layer
from quantflow.models.load import Source
from quantflow.planning.plan import Plan
from quantflow.progress import Progress
from quantflow.quantizing.rotated import Rotated
from quantflow.quantizing.static_inputs import LinearInput
from quantflow.runtime.linear import QuantLinear


@dataclass(frozen=True, kw_only=True)
class OpenLayer:
    """One decoder layer of the model, with its weights in memory.

    Attributes:
        stream: runner of the module.
        source: the tensors as stored, or as a rotation leaves them.
        module: the layer's module; the steps change its weights and put quantized linears in place.
        layer: its names.
        plan: the scheme of each linear, transforms and algorithm.
    """

    stream: LayerStream
    source: Source | Rotated
    module: nn.Module
    layer: Layer
    plan: Plan

    @property
    def device(self) -> Device:
        """The device of the module, and of everything computed from its weights and inputs."""
        return self.stream.device

    @property
    def stored(self) -> list[str]:
        """The source names of the layer's tensors."""
        return [name for name in self.source.names if name.startswith(f"{self.layer.prefix}.")]

    @property
    def rotated(self) -> list[str]:
        """The source names of tensors that are not quantized and that a rotation changed."""
        if not isinstance(self.source, Rotated):
            return []
        quantized = {
            f"{name}.weight" for name in self.layer.linears if self.plan.schemes[name] is not None
        }
        return [name for name in self.stored if self.source.changes(name) and name not in quantized]

    def read(self, name: str) -> Tensor:
        """A source tensor as stored."""
        return self.source.read([name])[name]

    def dtype_of(self, name: str) -> torch.dtype:
        """The dtype in which a source tensor is stored."""
        return DTYPES[self.source.checkpoint.infos[name].dtype]

    def child(self, name: str) -> Any:
        """The norm or linear with that source name."""
        return self.module.get_submodule(self.layer.relative(name))

    def weight(self, name: str) -> Tensor:
        """The weight of a norm or linear as it is now, by the module's source name."""
        weight: Tensor = self.child(name).weight
        return weight.detach()

    def current(self, name: str) -> Tensor:
        """A tensor of the layer as it is now, by its source name."""
        owner, _, leaf = name.rpartition(".")
        tensor: Tensor = getattr(self.child(owner), leaf)
        return tensor.detach()


@dataclass(frozen=True, kw_only=True)
class LayerText:
    """The sequences that run through a layer.

    Attributes:
        canary: the sequence that proves the artifact.
        states: this card's calibration sequences where they enter the layer; empty when the plan
            needs no text.
        stream: the model in the dtype in which the calibration sequences run, the layer's own or
            another.
        again: the same sequences as they leave the quantized layers before this one; empty where
            neither rounding is learned nor weights are refitted.
        tokens: length of each calibration sequence, those of every card in sample order.
        keep_outputs: make the original layer's outputs the states' next hidden states while the
            text runs.
        cache: the rounded KV cache of the quantized model; None without.
    """

    canary: State
    states: Sequence[State]
    tokens: Sequence[int]
    keep_outputs: bool
    stream: LayerStream
    again: Sequence[State] = ()
    cache: Cache | None = None


@dataclass(frozen=True, kw_only=True)
class LayerMeasurement:
    """The measurement's share of a layer.

    Attributes:
        statistics: linear's source name -> statistic -> tensor, of the linear's input.
        routed: expert -> tokens that the router sent to it; None where nobody counted.
        fed: the tokens that the statistics show each expert, `routed` or `all`; None where it does
            not say.
        gradient: reader of a linear's `gradient_sum`; None where it was not measured.
    """

    statistics: Mapping[str, Mapping[str, Tensor]] = field(default_factory=dict)
    routed: Mapping[str, int] | None = None
    fed: str | None = None
    gradient: Callable[[str], Tensor | None] = lambda _: None


@dataclass(frozen=True, kw_only=True)
class Execution:
    """The means by which a layer is worked on; no bit of the result depends on them.

    Attributes:
        workers: threads for independent sequences and linears; on a device other than the CPU one
            thread.
        host_workers: threads for everything that is computed in host memory, whatever the device.
        ahead: number of sequences that may be under way at once.
        progress: listener for each part.
        team: the cards that share the work.
    """

    workers: Workers
    host_workers: Workers
    ahead: int
    progress: Progress
    team: Team


@dataclass(frozen=True, kw_only=True)
class RoundedLinear:
    """A linear whose qvalues are chosen, before its layout encodes it.

    Attributes:
        result: its quantized weight, on the layer's device, and the algorithm's notes.
        scheme: its scheme.
        scale_dtype: dtype in which its layout stores scales.
        input: its input, as calibration saw it, in host memory.
        clipped_groups: share of its groups whose range a transform cut; None where none looks at
            them.
    """

    result: GroupResult
    scheme: LinearScheme
    scale_dtype: torch.dtype
    input: LinearInput
    clipped_groups: float | None = None


def reference_linear(quantized: QuantizedLinear, bias: Tensor | None) -> QuantLinear:
    """A quantized linear as the quantized layer runs it, in float32, with a linear's bias."""
    return QuantLinear(
        quantized,
        bias=None if bias is None else bias.detach().float(),
        backend=BACKENDS["reference"],
        dtype=torch.float32,
    )
