"""What quantizing one decoder layer reads, and what it has found so far."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from quantflow.core.dtypes import DTYPES
from quantflow.core.parallel import Workers
from quantflow.core.result import GroupResult
from quantflow.core.scheme import LinearScheme
from quantflow.distributed.team import Team
from quantflow.models.capture import LayerStream, State
from quantflow.models.graph import Layer
from quantflow.models.load import Source
from quantflow.models.rotated import Rotated
from quantflow.planning.plan import Plan
from quantflow.progress import Progress
from quantflow.quantization.static_inputs import Input


@dataclass(frozen=True, kw_only=True)
class Made:
    """What became of one linear, before its layout encodes it.

    Attributes:
        result: its quantized weight, and what was decided.
        scale_dtype: in which its layout stores scales.
        seen: its input.
    """

    result: GroupResult
    scheme: LinearScheme
    scale_dtype: torch.dtype
    seen: Input


@dataclass(kw_only=True)
class LayerWork:
    """What quantizing one layer reads, and what it has found so far.

    Attributes:
        statistics: linear's source name -> statistic -> tensor, of the linear's input; changed by smoothing.
        states: this card's calibration sequences where they enter the layer; empty when the algorithm needs no Hessians.
        again: the same sequences as they leave the quantized layers before this one; empty where rounding is not learned.
        tokens: how many each calibration sequence has, those of every card in sample order.
        keep_outputs: make the original layer's outputs the states' next hidden states, while the Hessians are collected.
        ahead: how many sequences may be under way at once.
        made: linear -> what became of it; emptied where that is encoded.
        errors: linear -> {"weight", "output"}: relative squared error, output on the canary.
        decisions: linear -> what the transforms and the algorithm decided.
        tensors: what the layer's file will hold.
        changed: source names of tensors that are not quantized and not as in the source.
        routed: expert -> tokens that the router sent to it; None where nobody counted.
        fed: which tokens the measurement's statistics show each expert, `routed` or `all`; None where it does not say.
        rounded: linears that are rounded to nearest, whatever the algorithm.
        damped: linears whose Hessian is shrunk.
        experts: what the layer's record says of its experts.
        factors: what smoothing made of weights [O, I], (weight / divisors[:, None]) * columns: `<linear>|columns` [I], of what
            it reads, and `<linear>|divisors` [O], of what it puts out; what is not named stays.
        gradient: returns `gradient_sum` of a linear, read now; None where it was not measured.
    """

    stream: LayerStream
    source: Source | Rotated
    module: nn.Module
    layer: Layer
    plan: Plan
    statistics: dict[str, Mapping[str, Tensor]]
    canary: State
    states: Sequence[State]
    tokens: Sequence[int]
    keep_outputs: bool
    workers: Workers
    ahead: int
    progress: Progress
    team: Team
    again: Sequence[State] = ()
    made: dict[str, Made] = field(default_factory=dict)
    errors: dict[str, dict[str, float]] = field(default_factory=dict)
    decisions: dict[str, dict[str, Any]] = field(default_factory=dict)
    tensors: dict[str, Tensor] = field(default_factory=dict)
    changed: list[str] = field(default_factory=list)
    routed: dict[str, int] | None = None
    fed: str | None = None
    rounded: frozenset[str] = frozenset()
    damped: frozenset[str] = frozenset()
    experts: dict[str, Any] | None = None
    factors: dict[str, Tensor] = field(default_factory=dict)
    gradient: Callable[[str], Tensor | None] = lambda _: None

    @property
    def stored(self) -> list[str]:
        """The source names of the layer's tensors."""
        return [name for name in self.source.names if name.startswith(f"{self.layer.prefix}.")]

    @property
    def quantized(self) -> frozenset[str]:
        """The source names of the weights that are quantized."""
        return frozenset(f"{name}.weight" for name in self.layer.linears if self.plan.schemes[name] is not None)

    def read(self, name: str) -> Tensor:
        """Return a source tensor as stored."""
        return self.source.read([name])[name]

    def dtype_of(self, name: str) -> torch.dtype:
        """Return the dtype in which a source tensor is stored."""
        return DTYPES[self.source.checkpoint.infos[name].dtype]

    def child(self, name: str) -> Any:
        """Return the norm or linear with that source name."""
        return self.module.get_submodule(self.layer.relative(name))

    def current(self, name: str) -> Tensor:
        """Return a tensor of the layer as it is now, by its source name."""
        owner, _, leaf = name.rpartition(".")
        tensor: Tensor = getattr(self.child(owner), leaf)
        return tensor.detach()
