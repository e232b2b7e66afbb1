"""The experts of a mixture as linears of their own, instead of tensors of three dimensions.

transformers 5 keeps the experts of a layer in `gate_up_proj` [E, 2 I, H] and `down_proj` [E, H, I],
or their transposes, some with biases, some without a gate. A checkpoint mostly holds a linear per
expert and projection, `experts.3.gate_proj.weight`. With this view in their place every linear of
an expert is a module of its own: watched, filled from the checkpoint, and replaced by a quantized
one like any other. For token t,

    y[t] = sum_e weight[t, e] * down_e(act(gate_e(x[t])) * up_e(x[t]))

over the experts e that the router chose. The router stays the family's own, and so does the
function that joins gate and up where it is not this product. Experts are added up in ascending
order, as in transformers' own loop over them. Sources: Shazeer et al. 2017, arXiv:1701.06538 (the
sum); Shazeer 2020, arXiv:2002.05202 (the gated linears).

DBRX keeps three tensors [E I, H], the rows of one expert after those of another. Llama 4 weighs
what an expert reads in place of what it puts out. Its own module runs every expert on every token,
most of them zeros; here an expert reads its tokens (`ScaledInputs`).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.integrations.moe import _default_apply_gate

from quantflow.files.safetensors_header import SplitTensor, TensorPart
from quantflow.models.graph import UNTRACED
from quantflow.models.names import HubNames

RoutedCallback = Callable[[Tensor], None]
# outputs of gate and up, [n, I] each -> input of down, [n, I]
Join = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True, kw_only=True)
class ExpertNames:
    """The names of an expert's linears.

    Attributes:
        gate: None where nothing is gated.
        up: first linear beside the gate.
        down: last linear.
    """

    gate: str | None = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"

    @property
    def inputs(self) -> tuple[str, ...]:
        """The linears that read the hidden state, in call order."""
        return (self.up,) if self.gate is None else (self.gate, self.up)


class Expert(nn.Module):
    """One expert; its linears have the checkpoint's names."""

    def __init__(
        self, names: ExpertNames, *, hidden: int, width: int, bias: bool, join: Join, act: Any
    ) -> None:
        """Make the linears.

        Args:
            names: names of gate, up and down.
            hidden: features of the hidden state, H.
            width: features between the linears, I.
            bias: whether each linear has one.
            join: function from the outputs of gate and up to the input of down.
            act: the activation, used alone where nothing is gated.
        """
        super().__init__()
        self.names, self._join = names, join
        self.act_fn = act
        for name in names.inputs:
            self.add_module(name, nn.Linear(hidden, width, bias=bias))
        self.add_module(names.down, nn.Linear(width, hidden, bias=bias))

    def forward(self, x: Tensor) -> Tensor:
        """Outputs down(act(gate(x)) * up(x)), [n, H] of [n, H]."""
        output: Tensor = getattr(self, self.names.down)(self.inner(x, {}))
        return output

    def inner(self, x: Tensor, others: Mapping[str, nn.Module]) -> Tensor:
        """The input of down, [n, I] of [n, H].

        Args:
            x: rows of the hidden state.
            others: name of gate or up -> linear that runs in its place.
        """
        gate, *up = (others.get(name, getattr(self, name))(x) for name in self.names.inputs)
        joined: Tensor = self._join(gate, *up) if up else self.act_fn(gate)
        return joined


@dataclass(frozen=True, kw_only=True)
class SpreadExperts:
    """The experts of each of several cards, and how cards give each other what theirs put out.

    Every card has the same hidden states and router, so it knows how many rows each one sends.

    Attributes:
        card: number of this card.
        held: numbers of the experts of each card.
        gather: function from this card's rows, [n, H], and the number of rows of each card to the
            rows of every card.
    """

    card: int
    held: Sequence[range]
    gather: Callable[[Tensor, Sequence[int]], Sequence[Tensor]]

    def outputs(
        self, experts: nn.ModuleList, hidden_states: Tensor, top_k_index: Tensor, *, every: bool
    ) -> dict[int, Tensor]:
        """Number of an expert -> its outputs for the tokens that were routed to it, [n, H].

        Args:
            experts: the experts, of which those of this card have weights.
            hidden_states: [T, H].
            top_k_index: int64 [T, k].
            every: run this card's experts on every token.
        """
        tokens = {
            number: torch.where((top_k_index == number).T)[1] for number in range(len(experts))
        }
        mine = []
        for number in self.held[self.card]:
            if every:
                mine.append(experts[number](hidden_states)[tokens[number]])
            elif len(tokens[number]):
                mine.append(experts[number](hidden_states[tokens[number]]))
        counts = [[len(tokens[number]) for number in own] for own in self.held]
        rows = torch.cat([hidden_states.new_zeros(0, hidden_states.shape[-1]), *mine])
        found = self.gather(rows, [sum(own) for own in counts])
        return {
            number: outputs
            for own, sizes, part in zip(self.held, counts, found, strict=True)
            for number, outputs in zip(own, torch.split(part, sizes), strict=True)
        }


class Experts(nn.ModuleList):
    """The experts of a layer, called as transformers' own modules call theirs.

    Attributes:
        spread: how they lie on several cards; None where this process has all of them. The sum is
            in the same order, so its bits are those of one process.
        fetch: function from the numbers of chosen experts, ascending, to their modules in that
            order, each with its weights when its turn comes; None where they have them.
        rows_of_token: rows of a call that are of one token, each with a choice of its own.
    """

    rows_of_token: int = 1
    spread: SpreadExperts | None = None
    fetch: Callable[[Sequence[int]], Iterator[nn.Module]] | None = None

    @property
    def names(self) -> tuple[ExpertNames, ...]:
        """The names of each expert's linears."""
        return tuple(expert.names for expert in self if isinstance(expert, Expert))

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """The weighted sum of the outputs of each token's experts.

        Args:
            hidden_states: [..., H], T tokens.
            top_k_index: int64 [T, k], the experts of each token.
            top_k_weights: [T, k], the weight of each expert.

        Returns:
            [..., H] in the dtype of the hidden states.
        """
        shape = hidden_states.shape
        hidden_states = hidden_states.reshape(-1, shape[-1])  # [T, H]
        total = torch.zeros_like(hidden_states)
        ready = self._ready(hidden_states, top_k_index, every=False)
        # some routers name one more than there are: no expert
        chosen = [n for n in torch.unique(top_k_index).tolist() if n < len(self)]
        experts = (self[n] for n in chosen) if self.fetch is None else self.fetch(chosen)
        for number, expert in zip(chosen, experts, strict=True):
            place, token = torch.where((top_k_index == number).T)
            outputs = expert(hidden_states[token]) if ready is None else ready[number]
            _add_(total, outputs, token, top_k_weights[token, place])
        return total.reshape(shape)

    def _ready(
        self, hidden_states: Tensor, top_k_index: Tensor, *, every: bool
    ) -> dict[int, Tensor] | None:
        """The outputs of every card's experts; None where this process runs one after the other."""
        if self.spread is None:
            return None
        return self.spread.outputs(self, hidden_states, top_k_index, every=every)

    def of_every_token(
        self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
    ) -> Tensor:
        """The same sum with every expert run on every token.

        Outputs that were not routed are dropped.
        """
        shape = hidden_states.shape
        hidden_states = hidden_states.reshape(-1, shape[-1])  # [T, H]
        total = torch.zeros_like(hidden_states)
        ready = self._ready(hidden_states, top_k_index, every=True)
        for number, expert in enumerate(self):
            place, token = torch.where((top_k_index == number).T)
            outputs = expert(hidden_states)[token] if ready is None else ready[number]
            _add_(total, outputs, token, top_k_weights[token, place])
        return total.reshape(shape)


class ScaledInputs(nn.Module):
    """A mixture whose experts read x times the token's weight, with a shared expert (Llama 4).

    Attributes:
        router: x -> the logit of each expert; transformers' own module makes the scores as well.
        experts: called with a row for every token and choice, each of one expert and weight 1.
        shared_expert: the family's own.
    """

    def __init__(self, block: Any, experts: Experts) -> None:
        """Stand in for a `Llama4TextMoe` on meta."""
        super().__init__()
        self._chosen: int = block.top_k
        experts.rows_of_token = self._chosen
        self.router = nn.Linear(block.hidden_dim, len(experts), bias=False, device="meta")
        self.experts = experts
        self.shared_expert = block.shared_expert

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """Outputs [T, H] and the router's logits [T, E] of [..., H], T tokens."""
        x = hidden_states.reshape(-1, hidden_states.shape[-1])  # [T, H]
        logits = self.router(x)
        values, numbers = torch.topk(logits, self._chosen, dim=1)
        scores = torch.sigmoid(values.float()).to(logits.dtype)
        rows = (x[:, None] * scores[:, :, None]).flatten(0, 1)  # [T k, H]
        found = self.experts(rows, numbers.reshape(-1, 1), torch.ones_like(rows[:, :1]))
        total: Tensor = self.shared_expert(x) + found.unflatten(0, scores.shape).sum(1)
        return total, logits


def _add_(total: Tensor, outputs: Tensor, token: Tensor, weights: Tensor) -> None:
    """Add an expert's weighted outputs to some rows of the total.

    Args:
        total: [T, H], modified.
        outputs: [n, H].
        token: [n], rows of the total.
        weights: [n].
    """
    total.index_add_(0, token, (outputs * weights[:, None]).to(total.dtype))


def view_(model: PreTrainedModel) -> None:
    """Put the view in the place of a meta model's stacked experts, if it has any."""
    stacked = {name: module for name, module in model.named_modules() if is_stacked(module)}
    family = UNTRACED.get(model.config.model_type)
    if stacked and family is not None and family.mixture is not None:
        gate, up, down = family.mixture.linears
        names_of = dict.fromkeys(stacked, ExpertNames(gate=gate, up=up, down=down))
    elif stacked:
        names_of = names_in_files(model, stacked)
    for name, module in stacked.items():
        view, block = _view(module, names_of[name]), name.rpartition(".")[0]
        if type(module).__name__ in _UNDECLARED:
            model.set_submodule(block, ScaledInputs(model.get_submodule(block), view))
        else:
            model.set_submodule(name, view)


def is_stacked(module: nn.Module) -> bool:
    """Whether a module holds experts in the stacked tensors of transformers' own products."""
    if type(module).__name__ == _FLAT:
        return True
    down = getattr(module, "down_proj", None)
    known = _form(module) is not None and not getattr(module, "has_post_expert_norm", False)
    return known and isinstance(down, nn.Parameter) and down.ndim == 3


@dataclass(frozen=True, kw_only=True)
class _Form:
    """How a module of transformers holds its experts, as its own attributes say.

    Attributes:
        has_gate: gate and up are in one tensor.
        has_bias: the linears have biases.
        is_transposed: the last axes of a tensor are inputs and outputs, else the other way round.
        is_concatenated: all outputs of gate come before those of up, else they alternate.
    """

    has_gate: bool
    has_bias: bool
    is_transposed: bool
    is_concatenated: bool


_FLAT = "DbrxExperts"  # its class; the tensors are those of its module `mlp`
_FLAT_NAMES = ExpertNames(gate="w1", up="v1", down="w2")
# Classes of transformers without these attributes, whose experts read scaled inputs.
_UNDECLARED = {
    "Llama4TextExperts": _Form(
        has_gate=True, has_bias=False, is_transposed=True, is_concatenated=True
    )
}


def _form(module: Any) -> _Form | None:
    """How a module holds experts; None where it is no such module."""
    if getattr(module, "has_gate", None) is None:
        return _UNDECLARED.get(type(module).__name__)
    return _Form(**{field.name: getattr(module, field.name) for field in fields(_Form)})


def _form_of(stacked: nn.Module) -> _Form:
    form = _form(stacked)
    assert form is not None  # `is_stacked` has one
    return form


def names_in_files(
    model: PreTrainedModel, stacked: Mapping[str, nn.Module]
) -> dict[str, ExpertNames]:
    """A checkpoint's names of the linears of experts; transformers' own where it stacks them too.

    Args:
        model: model whose table of names is read.
        stacked: full name -> module of experts.
    """
    table = HubNames(model)
    names_of = {}
    for name, module in stacked.items():
        if type(module).__name__ == _FLAT:
            names_of[name] = _FLAT_NAMES
            continue
        gated = _form_of(module).has_gate
        up = [leaf for leaf in table.split_into(f"{name}.{'gate_up_proj' if gated else 'up_proj'}")]
        down = table.split_into(f"{name}.down_proj")
        if len(up) == 1 + bool(gated) and len(down) == 1:
            names_of[name] = ExpertNames(gate=up[0] if gated else None, up=up[-1], down=down[0])
        else:
            names_of[name] = ExpertNames() if gated else ExpertNames(gate=None)
    return names_of


def split(
    name: str, stacked: Any, names: ExpertNames, *, exchanged: Callable[[str], bool]
) -> dict[str, SplitTensor]:
    """Stacked tensor -> its split into the weights, or the biases, of every expert.

    Args:
        name: full name of the module.
        stacked: module of stacked experts.
        names: names of an expert's linears.
        exchanged: full name of a tensor -> whether checkpoints hold its last two axes either way
            round.
    """
    if type(stacked).__name__ == _FLAT:
        return {
            f"{name}.mlp.{leaf}": _split_flat(
                f"{name}.{{}}.{leaf}.weight", stacked.mlp, transposed=leaf == names.down
            )
            for leaf in (*names.inputs, names.down)
        }
    form = _form_of(stacked)
    entry = "gate_up_proj" if form.has_gate else "up_proj"
    tensors = {}
    for tensor, leaves in ((entry, names.inputs), ("down_proj", (names.down,))):
        share = partial(_split, leaves=leaves, concatenated=form.is_concatenated)
        weight = torch.empty(getattr(stacked, tensor).shape, device="meta")
        whole = share(weight, f"{name}.{{}}.{{}}.weight", transposed=form.is_transposed)
        if exchanged(f"{name}.{tensor}"):
            other = torch.empty(weight.mT.shape, device="meta")
            other_way = share(other, f"{name}.{{}}.{{}}.weight", transposed=not form.is_transposed)
            whole = replace(whole, exchanged=other_way)
        tensors[f"{name}.{tensor}"] = whole
        if form.has_bias:
            bias = torch.empty(getattr(stacked, f"{tensor}_bias").shape, device="meta")
            tensors[f"{name}.{tensor}_bias"] = share(
                bias, f"{name}.{{}}.{{}}.bias", transposed=False
            )
    return tensors


def _split(
    whole: Tensor, name: str, *, transposed: bool, leaves: Sequence[str], concatenated: bool
) -> SplitTensor:
    """The parts of a tensor that holds the linears `leaves` of all experts.

    The tensor is [E, O, ...], or [E, I, O] when transposed; O counts the rows of all leaves.
    """
    count = len(leaves)
    parts = []
    for number, both in enumerate(whole.mT if transposed else whole):
        rows_of_leaf = (
            both.chunk(count) if concatenated else [both[first::count] for first in range(count)]
        )
        for leaf, own in zip(leaves, rows_of_leaf, strict=True):
            place = {
                "shape": (*own.shape,),
                "strides": own.stride(),
                "start": int(own.storage_offset()),
            }
            parts.append(TensorPart(name=name.format(number, leaf), **place))
    return SplitTensor(shape=(*whole.shape,), parts=tuple(parts))


def _split_flat(name: str, mlp: Any, *, transposed: bool) -> SplitTensor:
    """The parts [I, H], or their transposes, of a tensor [E I, H] of all experts of an `mlp`."""
    width, hidden = mlp.ffn_hidden_size, mlp.hidden_size
    shape, strides = (
        ((hidden, width), (1, hidden)) if transposed else ((width, hidden), (hidden, 1))
    )
    parts = [
        TensorPart(
            name=name.format(number), shape=shape, strides=strides, start=number * width * hidden
        )
        for number in range(mlp.moe_num_experts)
    ]
    return SplitTensor(shape=(mlp.moe_num_experts * width, hidden), parts=tuple(parts))


def _view(stacked: Any, names: ExpertNames) -> Experts:
    if type(stacked).__name__ == _FLAT:
        mlp = stacked.mlp
        return _made(
            mlp.moe_num_experts,
            names,
            hidden=mlp.hidden_size,
            width=mlp.ffn_hidden_size,
            bias=False,
            join=partial(_gated, mlp.activation_fn),
            act=mlp.activation_fn,
        )
    form = _form_of(stacked)
    count, *shape = stacked.down_proj.shape
    width, hidden = shape if form.is_transposed else shape[::-1]
    act = getattr(stacked, "act_fn", None)  # a family with its own join may have none
    join: Join = partial(_gated, act)
    own_join = getattr(stacked, "_apply_gate", None)
    if own_join is not None and type(stacked)._apply_gate is not _default_apply_gate:
        join = partial(_joined, own_join, interleaved=not form.is_concatenated)
    return _made(count, names, hidden=hidden, width=width, bias=form.has_bias, join=join, act=act)


def _made(count: int, names: ExpertNames, **options: Any) -> Experts:
    """So many experts on meta."""
    with torch.device("meta"):
        return Experts(Expert(names, **options) for _ in range(count))


def _gated(act: Any, gate: Tensor, up: Tensor) -> Tensor:
    gated: Tensor = act(gate)
    return gated * up


def _joined(
    join: Callable[[Tensor], Tensor], gate: Tensor, up: Tensor, *, interleaved: bool
) -> Tensor:
    """The family's own join of gate and up, [n, I] each.

    It takes both in one tensor, [n, 2 I].
    """
    both = (
        torch.stack([gate, up], dim=-1).flatten(-2)
        if interleaved
        else torch.cat([gate, up], dim=-1)
    )
    return join(both)


@contextmanager
def every_token(module: nn.Module) -> Iterator[None]:
    """Let every expert inside a module run on every token until the block ends.

    The module returns the same. An expert's rows then come from a product with more rows, so their
    last digits may differ.
    """
    chosen: list[Any] = [part for part in module.modules() if isinstance(part, Experts)]
    try:
        for experts in chosen:
            experts.forward = experts.of_every_token
        yield
    finally:
        for experts in chosen:
            experts.__dict__.pop("forward", None)


@contextmanager
def watch_routing(module: nn.Module, callback: RoutedCallback) -> Iterator[None]:
    """Call `callback(tokens)` whenever experts inside a module are called, until the block ends.

    Args:
        module: decoder layer.
        callback: receives the number of tokens that the router sent to each expert, int64 [E].
    """
    with ExitStack() as stack:
        for part in module.modules():
            if isinstance(part, Experts):
                handle = part.register_forward_pre_hook(partial(_report, callback))
                stack.callback(handle.remove)
        yield


def _report(callback: RoutedCallback, experts: nn.Module, args: tuple[Tensor, ...]) -> None:
    assert isinstance(experts, Experts)  # the hook is registered on nothing else
    callback(torch.bincount(args[1].flatten(), minlength=len(experts))[: len(experts)])
