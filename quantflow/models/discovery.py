"""What a decoder layer is made of, found by running the model's own forward once: no table of families.

    graph = graph_of(config)                      one forward of a few tokens, no weight in memory
    graph.layers[0].groups                        which linears receive the same tensor, and what that tensor comes from

Every decoder layer runs as transformers wrote it, but for its linears: they hand out random numbers
of the right shape. So no matrix is needed, and the outputs of a linear depend on nothing: what is
computed from them leads back to that linear alone. Parameters are a single number, stretched to
their shape. All operations in between are recorded, and answer

    which linears receive the same tensor         the same value came in
    which norm put it out, for nobody else        its only producer is a norm, its only readers are these linears
    which linear feeds which                      on the way back lie operations through which a factor of each channel goes:
                                                  copies and views, products with numbers that do not depend on that linear, and
                                                  attention where it is the values
    what is a router                              a linear inside a mixture with an output for each expert, or a single one
    where keys and values enter the cache         the module that called the cache's update

Layers are replayed one by one later, with what each was called with. So a model is refused whose
layers read anything of earlier layers but the hidden state and one tensor more that the layer
before returns (`quantflow.models.carried`).
"""

import copy
import functools
import itertools
import json
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicCache
from transformers.pytorch_utils import Conv1D

from quantflow.errors import UnsupportedError, first_line
from quantflow.files.safetensors_header import SplitTensor, TensorPart
from quantflow.models.carried import Carried
from quantflow.models.experts import Experts, is_stacked, names_in_files
from quantflow.models.experts import split as split_experts
from quantflow.models.graph import Family, Graph, Layer, LinearGroup, text_config
from quantflow.models.load import as_written, skeleton
from quantflow.models.names import HubNames

TOKENS = 6  # of the sequence that is run
_BY_NAME = "round its weights alone: --algorithm rtn --linears PATTERN"
_OTHER = f"use a model whose decoder layers follow one another, or {_BY_NAME}"
_LINEARS = (nn.Linear, Conv1D)
# Through these a factor of a channel goes unchanged, whatever becomes of the shape in front of the
# channels.
_COPIES = frozenset(
    {
        *(
            "aten.view",
            "aten._unsafe_view",
            "aten.reshape",
            "aten.transpose",
            "aten.permute",
            "aten.t",
            "aten.unsqueeze",
        ),
        *(
            "aten.squeeze",
            "aten.expand",
            "aten.clone",
            "aten.contiguous",
            "aten._to_copy",
            "aten.alias",
            "aten.detach",
        ),
        *("aten._reshape_alias", "aten.native_dropout", "aten.slice", "aten.repeat"),
    }
)
_PRODUCTS = frozenset({"aten.mul", "aten.div"})
_ATTENTION = {  # operation -> which argument is the values
    "aten._scaled_dot_product_flash_attention_for_cpu": 2,
    "aten.scaled_dot_product_attention": 2,
    "aten._scaled_dot_product_attention_math": 2,
    "aten._fused_sdp_choice": 2,
    "aten.bmm": 1,
    "aten.matmul": 1,
}


@dataclass(frozen=True, eq=False)
class Moment:
    """A value of a tensor: an operation in place makes another one of the same tensor."""

    number: int


@dataclass(frozen=True, kw_only=True, eq=False)
class Operation:
    """One recorded operation.

    Attributes:
        name: torch's, without the overload: `aten.mul`.
        inputs: the values that it reads, in the order of its arguments; None where an argument is
            no tensor.
        outputs: the values that it makes.
    """

    name: str
    inputs: tuple[Moment | None, ...]
    outputs: tuple[Moment, ...]


@dataclass(kw_only=True, eq=False)
class Called:
    """A call of a decoder layer.

    Attributes:
        hidden: the value that it received first.
        others: the other values that it was called with, each with the name of its argument, or its
            place behind the first.
        features: the axes of the hidden state behind the tokens.
        output: the hidden state that it returned.
        tuple_of: it returned it as the first of a tuple of so many, 0 where alone.
        beside: the tensors that it returned beside it, by their place in the tuple: value, dtype
            and shape.
    """

    hidden: Moment
    others: tuple[tuple[str | int, Moment], ...]
    features: tuple[int, ...] = ()
    output: Moment | None = None
    tuple_of: int = 0
    beside: dict[int, tuple[Moment, torch.dtype, tuple[int, ...]]] = field(default_factory=dict)


@dataclass(kw_only=True, eq=False)
class Record:
    """What happened in one forward.

    Attributes:
        operations: in order.
        linears: name of a linear -> the value that it received, first call first; a linear that is
            called again stays in place.
        outputs: value -> the linear that handed it out.
        norms: value -> the module without linears below it that returned it.
        cached: attention module -> (shape of the keys, shape of the values) as they enter the
            cache.
        called: decoder layer -> (its hidden state, the other values that it was called with, its
            output, whether in a tuple).
        read_by: value -> how often something read it.
        made_by: value -> the operation that made it.
        weights: linear -> its weight, as a tensor that something but the linear may have read.
        chosen: module of experts -> how many of them a token goes to.
        ran: modules that were called, linears apart.
    """

    operations: list[Operation] = field(default_factory=list)
    linears: dict[str, Moment] = field(default_factory=dict)
    outputs: dict[Moment, str] = field(default_factory=dict)
    norms: dict[Moment, str] = field(default_factory=dict)
    cached: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=dict)
    called: dict[str, "Called"] = field(default_factory=dict)
    read_by: dict[Moment, int] = field(default_factory=dict)
    made_by: dict[Moment, Operation] = field(default_factory=dict)
    weights: dict[str, Moment] = field(default_factory=dict)
    chosen: dict[str, int] = field(default_factory=dict)
    ran: set[str] = field(default_factory=set)

    def skipped(self, layer: str) -> bool:
        """Return whether nothing of a layer ran."""
        return not any(f"{name}.".startswith(f"{layer}.") for name in (*self.ran, *self.linears))


@dataclass(frozen=True, kw_only=True)
class TracedLayer:
    """A decoder layer as it ran; names are those of modules inside the layer.

    Attributes:
        prefix: the layer's own name, `model.layers.3`.
        groups: every linear that ran, and those of every expert of a mixture, whether a token went
            there or not.
        routers: linears that decide which experts a token goes to and what they count.
        idle: linears that did not run, such as those that read an encoder, or whose weight
            something else read.
        skipped: the layer did not run.
        experts: the module of a mixture's experts, None outside one.
        chosen: how many of them a token goes to.
        attention: the module that writes the cache, None where nothing does.
        kv_heads, key_dim, value_dim: heads that enter the cache, and their features; 1 where
            nothing does.
        tuple_of: it returns the hidden state as the first of a tuple of so many, 0 where alone.
    """

    prefix: str
    groups: tuple[LinearGroup, ...]
    routers: tuple[str, ...]
    idle: tuple[str, ...]
    skipped: bool
    experts: str | None
    chosen: int
    attention: str | None
    kv_heads: int
    key_dim: int
    value_dim: int
    tuple_of: int


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records every operation below autograd, by the identity of tensors; all of them are kept alive until the end."""

    def __init__(self, record: Record) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.record = record
        self._values: dict[int, Moment] = {}
        self._kept: list[Tensor] = []
        self.paused = False

    def value_of(self, tensor: Tensor) -> Moment:
        """Return the present value of a tensor."""
        found = self._values.get(id(tensor))
        return self.renew(tensor) if found is None else found

    def renew(self, tensor: Tensor) -> Moment:
        """Return a new value of a tensor."""
        self._kept.append(tensor)
        self._values[id(tensor)] = made = Moment(len(self._kept))
        return made

    def read(self, tensor: Tensor) -> Moment:
        """Return the present value of a tensor, and count that something reads it."""
        value = self.value_of(tensor)
        self.record.read_by[value] = self.record.read_by.get(value, 0) + 1
        return value

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and record it."""
        given = kwargs or {}
        if self.paused:
            return func(*args, **given)
        inputs = tuple(self.read(item) if isinstance(item, Tensor) else None for item in args)
        listed = [item for item in args if isinstance(item, list | tuple)]
        more = tuple(
            self.read(item) for items in listed for item in items if isinstance(item, Tensor)
        )
        result = func(*args, **given)
        results = result if isinstance(result, tuple | list) else (result,)
        outputs = tuple(self.renew(item) for item in results if isinstance(item, Tensor))
        made = Operation(
            name=f"aten.{func._schema.name.partition('::')[2]}",
            inputs=(*inputs, *more),
            outputs=outputs,
        )
        self.record.operations.append(made)
        for output in outputs:
            self.record.made_by[output] = made
        return result


class _Cache(DynamicCache):  # type: ignore[misc]
    """A cache that tells which module put keys and values into it, and returns them."""

    def __init__(self, calling: list[str], record: Record, config: Any) -> None:
        super().__init__(config=config)
        self._calling, self._record = calling, record

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Return keys and values as they are."""
        self._record.cached[self._calling[-1]] = (
            tuple(key_states.shape),
            tuple(value_states.shape),
        )
        return key_states, value_states


def graph_of(config: Any) -> Graph:
    """Return the graph of a model whose family is not in the table, found by one forward.

    Args:
        config: transformers' own.

    Raises:
        UnsupportedError: it cannot be traced, or has what nothing here quantizes yet; says what
            stood in the way.
    """
    values = config.to_dict()
    values.pop("quantization_config", None)
    return _graph_of(json.dumps(values, sort_keys=True, default=str))


# a process asks several times about one model, and about its artifact
@functools.lru_cache(maxsize=4)
def _graph_of(told: str) -> Graph:
    values = json.loads(told)
    config: PreTrainedConfig = AutoConfig.for_model(**values)
    model = skeleton(config)
    place = layers_of(model)
    layers, carried = traced(model, place)
    first = next(layer for layer in layers if not layer.skipped)
    hub, head = HubNames(model), _name_of(model, model.get_output_embeddings())
    family = Family(
        model_type=config.model_type,
        architecture=type(model).__name__,
        layers=place,
        attention=next((layer.attention for layer in layers if layer.attention is not None), ""),
        groups=first.groups,
        embedding=hub.of_module(_name_of(model, model.get_input_embeddings())),
        head=hub.of_module(head),
        head_place=head,
        discovered=True,
        tuple_of=first.tuple_of,
        carried=carried,
    )
    found = tuple(_full(model, index, layer, hub) for index, layer in enumerate(layers))
    return Graph(
        family=family,
        layers=found,
        split=_split(as_written(config), place, hub),
        others=_others(model, place, hub),
    )


def _others(model: PreTrainedModel, place: str, hub: HubNames) -> tuple[str, ...]:
    """Return the linears outside the layers but the head, as the model and as a checkpoint calls them."""
    head = model.get_output_embeddings()
    inside = f"{place}."
    linears = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and module is not head and not name.startswith(inside)
    ]
    return tuple(dict.fromkeys(known for name in linears for known in (name, hub.of_module(name))))


def _name_of(model: PreTrainedModel, module: object) -> str:
    found: str = next(name for name, part in model.named_modules() if part is module)
    return found


def _split(model: PreTrainedModel, place: str, hub: HubNames) -> dict[str, SplitTensor]:
    """Return the tensors of a checkpoint that hold linears in another form than [O, I], and what each is read as.

    Args:
        model: with transformers' own modules, on meta.
        place: the list of decoder layers.
        hub: what a checkpoint calls tensors.

    Raises:
        UnsupportedError: transformers turns the experts of a checkpoint into others, and not by
            joining linears.
    """
    inside = {
        name: module for name, module in model.named_modules() if name.startswith(f"{place}.")
    }
    found: dict[str, SplitTensor] = {}
    for name, module in inside.items():
        if isinstance(module, Conv1D):
            shape, strides = (module.nf, module.nx), (1, module.nf)
            part = TensorPart(name=f"{name}.weight", shape=shape, strides=strides)
            found[f"{name}.weight"] = SplitTensor(shape=(module.nx, module.nf), parts=(part,))
    stacked = {name: module for name, module in inside.items() if is_stacked(module)}
    for name, names in names_in_files(model, stacked).items() if stacked else ():
        own = split_experts(name, stacked[name], names, exchanged=hub.exchanged)
        if reshaped := [
            each
            for each in own
            if not (hub.kept(each) or hub.exchanged(each) or hub.split_into(each))
        ]:
            cause = f"{model.config.model_type}: {hub.of(reshaped[0])}: a checkpoint holds these experts in another form"
            raise UnsupportedError(cause, _BY_NAME)
        found |= own
    return {
        hub.of(name): _in_files(whole, hub)
        for name, whole in found.items()
        if hub.kept(name) or hub.exchanged(name)
    }


def _in_files(whole: SplitTensor, hub: HubNames) -> SplitTensor:
    """Return a tensor's parts under a checkpoint's names."""
    parts = tuple(replace(part, name=hub.of(part.name)) for part in whole.parts)
    return replace(
        whole,
        parts=parts,
        exchanged=None if whole.exchanged is None else _in_files(whole.exchanged, hub),
    )


def _full(model: PreTrainedModel, index: int, layer: TracedLayer, hub: HubNames) -> Layer:
    """Return a layer of the graph, whose names are full and those of a checkpoint.

    Raises:
        UnsupportedError: a checkpoint holds a linear in several tensors.
    """
    alone = [
        f"{layer.prefix}.{name}"
        for group in layer.groups
        if group.expert is None
        for name in group.linears
    ]
    if joined := next((name for name in alone if hub.joined_from(f"{name}.weight") > 1), None):
        raise UnsupportedError(
            f"{model.config.model_type}: {joined}: a checkpoint holds this linear in several "
            "tensors",
            _BY_NAME,
        )
    place, groups, repeats = layer.prefix, list[LinearGroup](), 1
    inside = [f"{place}.{name}" for name, _ in model.get_submodule(place).named_modules() if name]
    tensors = [f"{place}.{name}" for name in model.get_submodule(place).state_dict()]
    prefix = _common([hub.of(name) for name in tensors], index)
    known = {name: hub.of_module(name) for name in inside}
    sources = known | {name: hub.of(name) for name in tensors}
    for group in (_renamed(group, lambda name: known[f"{place}.{name}"]) for group in layer.groups):
        linear: Any = model.get_submodule(f"{place}.{layer.groups[len(groups)].linears[0]}")
        shared = layer.kv_heads * layer.value_dim
        # it reads something else than whole heads
        if group.per_head and linear.in_features % shared:
            group = replace(group, feeder=None, per_head=False)
        repeats = linear.in_features // shared if group.per_head else repeats
        groups.append(group)
    experts = None if layer.experts is None else model.get_submodule(f"{place}.{layer.experts}")
    return Layer(
        index=index,
        prefix=prefix,
        attention=None if layer.attention is None else known[f"{place}.{layer.attention}"],
        groups=tuple(groups),
        routers=tuple(known[f"{place}.{name}"] for name in layer.routers),
        idle=tuple(known[f"{place}.{name}"] for name in layer.idle),
        skipped=layer.skipped,
        place=None if place == prefix else place,
        renamed={
            source: name
            for name, source in sources.items()
            if source != f"{prefix}.{name.removeprefix(f'{place}.')}"
        },
        block=None
        if layer.experts is None
        else known[f"{place}.{layer.experts}"].rpartition(".")[0],
        block_place=(layer.experts or "").rpartition(".")[0],
        experts=0 if experts is None else len(experts),
        chosen=layer.chosen,
        repeats=repeats,
        head_dim=layer.value_dim,
        kv_heads=layer.kv_heads,
    )


def _common(names: Sequence[str], index: int) -> str:
    """Return what the names of a layer's tensors begin with, up to the layer's number where that is among it."""
    words = [name.split(".")[:-1] for name in names]
    shared = [
        column[0]
        for column in itertools.takewhile(
            lambda column: len(set(column)) == 1, zip(*words, strict=False)
        )
    ]
    number = str(index)
    while number in shared[:-1]:
        shared.pop()
    return ".".join(shared)


def traced(model: PreTrainedModel, place: str) -> tuple[tuple[TracedLayer, ...], Carried | None]:
    """Run a model without weights once; return what its decoder layers are made of, and what one hands to the next.

    Args:
        model: of `quantflow.models.load.skeleton`: parameters on meta, buffers real. It is as it
            was afterwards.
        place: the list of decoder layers; see `layers_of`.

    Raises:
        UnsupportedError: the forward does not run so, or layers cannot be run one by one; says what
            stood in the way.
    """
    names = [f"{place}.{index}" for index in range(len(model.get_submodule(place)))]
    try:
        record = _run(model, names, cached=True)
    except Exception:  # it takes no cache of this kind, or none at all
        try:
            record = _run(model, names, cached=False)
        except (
            Exception
        ) as error:  # whatever a family's forward raises where it is no ordinary decoder
            cause = f"{model.config.model_type}: its layers cannot be traced: {type(error).__name__}: {first_line(error)}"
            raise UnsupportedError(cause, _OTHER) from error
    carried = _chain(record, names, model.config)
    _require_own_weights(model, names)
    return tuple(_layer(record, model, name) for name in names), carried


def _run(model: PreTrainedModel, layers: Sequence[str], *, cached: bool) -> Record:
    """Return what happened in one forward of a few tokens."""
    record, calling = Record(), list[str]()
    recorder, config = _Recorder(record), text_config(model.config)
    with _standing_in(model, recorder, calling, layers=layers), recorder, torch.no_grad():
        ids = torch.arange(2, 2 + TOKENS)[None] % config.vocab_size
        cache = {"past_key_values": _Cache(calling, record, config)} if cached else {}
        model(input_ids=ids, use_cache=cached, **cache)
    return record


def _chain(record: Record, names: Sequence[str], config: Any) -> Carried | None:
    """Return what every layer hands to the next beside the hidden state; layers that did not run are passed over.

    Raises:
        UnsupportedError: the layers cannot be replayed one by one: none ran, or one did not return
            a hidden state, or reads of earlier layers more than the one before returned.
    """
    before: Called | None = None
    carried: Carried | None = None
    kind, inside = config.model_type, f"{names[0].rpartition('.')[0]}."
    ran = [name for name in names if not record.skipped(name)]
    if not ran:
        raise UnsupportedError(f"{kind}: none of {inside}* ran", _OTHER)
    for name in ran:
        called = record.called.get(name)
        if called is None or called.output is None:
            raise UnsupportedError(f"{kind}: {name} was not called with one hidden state", _OTHER)
        if before is not None and called.hidden is not before.output:
            raise UnsupportedError(
                f"{kind}: {name} does not read what the layer before it returned", _OTHER
            )
        handed = None if before is None else _handed(before, called, text_config(config))
        carried = carried or handed  # that of the first two layers is every layer's
        known = carried is not None and handed == carried
        others = [
            value
            for key, value in called.others
            if not (known and carried is not None and key == carried.argument)
        ]
        if read := sorted(
            linear for linear in _depends(record, others) if linear.startswith(inside)
        ):
            raise UnsupportedError(
                f"{kind}: {name} reads {read[0]} beside the hidden state", _OTHER
            )
        before = called
    return carried


def _handed(before: Called, called: Called, config: Any) -> Carried | None:
    """Return what a layer was called with that the one before returned beside the hidden state; None for nothing."""
    for argument, value in called.others:
        for output, (returned, dtype, shape) in before.beside.items():
            if value is returned and len(shape) == 3:
                name = None if dtype.is_floating_point else str(dtype).removeprefix("torch.")
                width = (
                    shape[-1] if name is None else max(shape[-1], getattr(config, "index_topk", 0))
                )
                return Carried(
                    argument=argument,
                    output=output,
                    dtype=name,
                    width=width,
                    hidden=before.features,
                )
    return None


def _require_own_weights(model: PreTrainedModel, names: Sequence[str]) -> None:
    """Refuse layers that share a weight: of a checkpoint that holds it once, each would make another one.

    Raises:
        UnsupportedError: two layers share a weight; names both.
    """
    layers = [f"{name}." for name in names]
    for name, twin in model.all_tied_weights_keys.items():
        owners = {prefix for prefix in layers for tied in (name, twin) if tied.startswith(prefix)}
        if len(owners) > 1:
            raise UnsupportedError(
                f"{model.config.model_type}: {name} and {twin} are one weight of two layers",
                _BY_NAME,
            )


def layers_of(model: PreTrainedModel) -> str:
    """Return the name of the list of decoder layers: the one that holds most linears, in the decoder where there is more.

    Raises:
        UnsupportedError: there is none.
    """
    found: dict[str, tuple[bool, bool, int, int]] = {}
    count = getattr(text_config(model.config), "num_hidden_layers", None)
    decoder = model.get_decoder()
    within = next((name for name, module in model.named_modules() if module is decoder), "")
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) and ".experts" not in f".{name}":
            linears = sum(isinstance(part, _LINEARS) for part in module.modules())
            if linears:
                found[name] = (
                    name.startswith(within),
                    len(module) == count,
                    linears,
                    -name.count("."),
                )
    if not found:
        raise UnsupportedError(
            f"{model.config.model_type}: no list of layers that hold linears", _OTHER
        )
    return max(found, key=lambda name: found[name])


@contextmanager
def _standing_in(
    model: PreTrainedModel, recorder: _Recorder, calling: list[str], *, layers: Collection[str]
) -> Iterator[None]:
    """Give parameters a number and linears a result, and watch modules, until the block ends.

    Args:
        model: as `traced` takes it.
        recorder: knows the values of tensors.
        calling: gets the names of the modules that run, the innermost last.
        layers: names of the decoder layers.
    """
    record = recorder.record

    def enter(
        module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, name: str
    ) -> None:
        calling.append(name)
        record.ran.add(name)
        if isinstance(module, Experts):
            record.chosen[name] = args[1].shape[-1]
        if name in layers:
            given: list[tuple[str | int, Any]] = [*enumerate(args, -1), *kwargs.items()]
            tensors = [
                (key, item)
                for key, one in given
                for item in (one if isinstance(one, tuple | list) else (one,))
            ]
            values = [
                (key, recorder.value_of(item)) for key, item in tensors if isinstance(item, Tensor)
            ]
            if args and isinstance(args[0], Tensor) and name not in record.called:
                (_, hidden), *others = values
                record.called[name] = Called(
                    hidden=hidden, others=tuple(others), features=tuple(args[0].shape[2:])
                )

    def leave(module: nn.Module, _: Any, output: Any, *, name: str) -> None:
        calling.pop()
        if isinstance(output, Tensor) and _is_norm(module):
            record.norms[recorder.value_of(output)] = name
        if (called := record.called.get(name)) is not None:
            tuple_of = len(output) if isinstance(output, tuple | list) else 0
            first = output[0] if tuple_of else output
            if isinstance(first, Tensor):
                called.output, called.tuple_of = recorder.value_of(first), tuple_of
            called.beside = {
                place: (recorder.value_of(item), item.dtype, tuple(item.shape))
                for place, item in enumerate(output if tuple_of else ())
                if place and isinstance(item, Tensor)
            }

    with ExitStack() as stack:
        for module in model.modules():
            for name, parameter in list(module._parameters.items()):
                if parameter is not None and parameter.is_meta:
                    stretched = torch.ones((), dtype=parameter.dtype).expand(parameter.shape)
                    module._parameters[name] = nn.Parameter(stretched, requires_grad=False)
                    stack.callback(module._parameters.__setitem__, name, parameter)
        for name, module in model.named_modules():
            if _is_linear(module):
                record.weights[name] = recorder.value_of(module.weight)
                module.forward = _stand_in(name, module, recorder)
                stack.callback(module.__dict__.pop, "forward")
            else:
                stack.callback(
                    module.register_forward_pre_hook(
                        partial(enter, name=name), with_kwargs=True
                    ).remove
                )
                stack.callback(module.register_forward_hook(partial(leave, name=name)).remove)
        yield


def _is_linear(module: nn.Module) -> bool:
    """Return whether a module computes x @ W.T + b, or Conv1D's x @ W + b; of a subclass it is tried with a small matrix."""
    if type(module).forward in (nn.Linear.forward, Conv1D.forward):
        return True
    if not isinstance(module, nn.Linear):
        return False
    generator = torch.Generator().manual_seed(0)
    weight, bias, x = (torch.randn(shape, generator=generator) for shape in ((3, 5), (3,), (2, 5)))
    trial = copy.copy(module)
    trial._parameters = {
        "weight": nn.Parameter(weight),
        "bias": None if module.bias is None else nn.Parameter(bias),
    }
    try:
        return bool(
            torch.allclose(trial(x), nn.functional.linear(x, trial.weight, trial.bias), atol=1e-6)
        )
    except (RuntimeError, TypeError):
        return False


def _is_norm(module: nn.Module) -> bool:
    """Return whether a module is one vector of weights, perhaps with a bias: what norms are."""
    own = [parameter for parameter in module.parameters()]
    return (
        bool(own)
        and all(parameter.ndim == 1 for parameter in own)
        and not any(True for _ in module.children())
    )


def _stand_in(name: str, module: Any, recorder: _Recorder) -> Callable[[Tensor], Tensor]:
    """Return the function that is called in the place of a linear."""
    width: int = module.out_features if isinstance(module, nn.Linear) else module.nf

    def forward(input: Tensor) -> Tensor:
        recorder.record.linears.setdefault(name, recorder.read(input))
        recorder.paused = True
        generator = torch.Generator().manual_seed(len(recorder.record.operations))
        output = torch.randn((*input.shape[:-1], width), generator=generator)
        recorder.paused = False
        recorder.record.outputs[recorder.renew(output)] = name
        return output

    return forward


def _layer(record: Record, model: PreTrainedModel, prefix: str) -> TracedLayer:
    """Read what a layer is made of from the record.

    Raises:
        UnsupportedError: it has more than one attention or mixture.
    """
    inside, skipped = f"{prefix}.", record.skipped(prefix)
    modules = {name: module for name, module in model.named_modules() if name.startswith(inside)}
    pools = {
        name: module
        for name, module in modules.items()
        if isinstance(module, Experts) and not skipped
    }
    of_experts = tuple(f"{name}." for name in pools)
    if len(pools) > 1:
        raise UnsupportedError(f"{prefix}: {len(pools)} mixtures, {', '.join(pools)}", _OTHER)
    linears = [
        name
        for name, module in modules.items()
        if isinstance(module, _LINEARS) and not name.startswith(of_experts)
    ]
    read = {
        name
        for name in linears
        if name in record.weights and record.read_by.get(record.weights[name])
    }
    ran = {
        name: record.linears[name]
        for name in record.linears
        if name in linears and name not in read
    }
    routers = tuple(name for name in ran if _routes(model, name))
    groups: dict[Moment, list[str]] = {}
    received = [value for name, value in ran.items() if name not in routers]
    for name, value in ran.items():
        if name not in routers:
            # what reads a view is not seen from its source
            alone = record.read_by.get(value) == received.count(value)
            groups.setdefault(_source(record, value) if alone else value, []).append(name)
    attentions = [name for name in record.cached if name.startswith(inside)]
    if len(attentions) > 1:
        raise UnsupportedError(
            f"{prefix}: {len(attentions)} modules write a cache of keys and values", _OTHER
        )
    keys, values = record.cached[attentions[0]] if attentions else ((1, 1, 1, 1), (1, 1, 1, 1))
    found = [
        _group(record, model, value, names, {ran[name] for name in routers})
        for value, names in groups.items()
    ]
    found = [_within(inside, group) for group in found]
    found += [group for name, pool in pools.items() for group in _of_experts(name, pool)]
    return TracedLayer(
        prefix=prefix,
        groups=tuple(_renamed(group, lambda name: name.removeprefix(inside)) for group in found),
        routers=tuple(name.removeprefix(inside) for name in routers),
        idle=tuple(name.removeprefix(inside) for name in linears if name not in ran),
        skipped=skipped,
        experts=next((name.removeprefix(inside) for name in pools), None),
        chosen=next((record.chosen.get(name, 0) for name in pools), 0),
        attention=attentions[0].removeprefix(inside) if attentions else None,
        kv_heads=keys[1],
        key_dim=keys[-1],
        value_dim=values[-1],
        tuple_of=0 if skipped else record.called[prefix].tuple_of,
    )


def _within(inside: str, group: LinearGroup) -> LinearGroup:
    """Return a group without what it reads of other layers, which are not in memory beside it."""
    norm = group.norm if group.norm is not None and group.norm.startswith(inside) else None
    if group.feeder is None or group.feeder.startswith(inside):
        return replace(group, norm=norm)
    return replace(group, norm=norm, feeder=None, per_head=False)


def _of_experts(name: str, pool: Experts) -> Iterator[LinearGroup]:
    """Yield the groups of every expert; what goes up does not absorb factors for down: its few tokens would choose them."""
    for number, names in enumerate(pool.names):
        inside = f"{name}.{number}"
        entering = tuple(f"{inside}.{leaf}" for leaf in names.inputs)
        yield LinearGroup(linears=entering, fused=len(entering) > 1, expert=inside)
        yield LinearGroup(linears=(f"{inside}.{names.down}",), expert=inside)


def _group(
    record: Record,
    model: PreTrainedModel,
    value: Moment,
    names: Sequence[str],
    others: Iterable[Moment],
) -> LinearGroup:
    """Return the group of linears that receive a value."""
    norm = record.norms.get(value)
    readers = record.read_by.get(value, 0)
    if norm is not None and not _absorbs(model.get_submodule(norm)):
        norm = None
    feeder, per_head = _feeder(record, value) or (None, False)
    return LinearGroup(
        linears=tuple(names),
        norm=norm if readers == len(names) and value not in others else None,
        feeder=feeder,
        per_head=per_head,
        fused=len(names) > 1,
    )


def _absorbs(norm: nn.Module) -> bool:
    """Return whether what a norm puts out is multiplied by its weight, and its bias added: tried on random numbers.

    That of Gemma multiplies by 1 + its weight, which no factor can be folded into.
    """
    trial = copy.deepcopy(norm).float()
    features = next(norm.parameters()).shape[0]
    generator = torch.Generator().manual_seed(0)
    x, factors = (
        torch.randn(3, features, generator=generator),
        torch.rand(features, generator=generator) + 0.5,
    )
    for name, parameter in norm.named_parameters():
        values = torch.randn(parameter.shape, generator=generator)
        setattr(trial, name, nn.Parameter(values, requires_grad=False))
    try:
        before = trial(x)
        for parameter in trial.parameters():
            parameter.mul_(factors)
        return bool(torch.allclose(trial(x), before * factors, rtol=1e-4, atol=1e-5))
    except (
        RuntimeError,
        TypeError,
        IndexError,
        AttributeError,
    ):  # it takes other inputs than a norm
        return False


def _source(record: Record, value: Moment) -> Moment:
    """Return the value that another one is a view of."""
    while (made := record.made_by.get(value)) is not None and made.name in (
        "aten.view",
        "aten.alias",
        "aten.detach",
    ):
        source = made.inputs[0]
        if source is None or record.read_by.get(source, 0) != 1:
            break
        value = source
    return value


def _feeder(record: Record, value: Moment) -> tuple[str, bool] | None:
    """Return the linear of whose outputs a value is a sum of multiples, and whether attention lies between; None for none."""
    if value in record.outputs:
        return record.outputs[value], False
    made = record.made_by.get(value)
    if made is None:
        return None
    if made.name in _COPIES and made.inputs[0] is not None:
        return _feeder(record, made.inputs[0])
    if made.name in _ATTENTION and len(made.inputs) > _ATTENTION[made.name]:
        at = _ATTENTION[made.name]
        found = None if made.inputs[at] is None else _feeder(record, made.inputs[at])  # type: ignore[arg-type]
        others = [
            item for index, item in enumerate(made.inputs) if index != at and item is not None
        ]
        clean = found is not None and found[0] not in _depends(record, others)
        return (found[0], True) if clean and found is not None else None
    if made.name in _PRODUCTS:
        for at, item in enumerate(made.inputs[: 1 if made.name == "aten.div" else None]):
            found = None if item is None else _feeder(record, item)
            others = [
                other
                for index, other in enumerate(made.inputs)
                if index != at and other is not None
            ]
            if found is not None and found[0] not in _depends(record, others):
                return found
    return None


def _depends(record: Record, values: Iterable[Moment]) -> set[str]:
    """Return the linears whose outputs the values were computed from."""
    found, seen, left = set(), set(), list(values)
    while left:
        value = left.pop()
        if value in seen:
            continue
        seen.add(value)
        if value in record.outputs:
            found.add(record.outputs[value])
        elif (made := record.made_by.get(value)) is not None:
            left += [item for item in made.inputs if item is not None]
    return found


def _routes(model: PreTrainedModel, name: str) -> bool:
    """Return whether a linear chooses experts, or says what a shared one counts: it lies beside experts and is no wider."""
    owner = name.rpartition(".")[0]
    while owner and not any(
        child == "experts" for child, _ in model.get_submodule(owner).named_children()
    ):
        owner = owner.rpartition(".")[0]
    if not owner or name.startswith(f"{owner}.experts."):
        return False
    experts = model.get_submodule(f"{owner}.experts")
    width: int = model.get_submodule(name).weight.shape[0]
    return width == 1 or (isinstance(experts, nn.ModuleList) and width == len(experts))


def _renamed(group: LinearGroup, rename: Callable[[str], str]) -> LinearGroup:
    """Return a group with other names."""
    return replace(
        group,
        linears=tuple(map(rename, group.linears)),
        norm=None if group.norm is None else rename(group.norm),
        feeder=None if group.feeder is None else rename(group.feeder),
        expert=None if group.expert is None else rename(group.expert),
    )
