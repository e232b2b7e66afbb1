"""The parts of a decoder layer, found by running the model's own forward once, without a row.

    graph = graph_of(config)          one forward of a few tokens, no weight in memory
    graph.layers[0].groups            linears that receive the same tensor, and where it comes from

Every decoder layer runs as transformers wrote it, but for its linears, which return random numbers
of the right shape. So no matrix is needed, and the outputs of a linear depend on nothing: a value
that is computed from them leads back to that linear alone. Other parameters are a single number,
stretched to their shape. All operations in between are recorded, and answer

    which linears receive the same tensor     the same value came in
    which norm put it out, for them alone     its only producer is a norm, its only readers they
    which linear feeds which                  on the way back lie operations that keep a factor of a
                                              channel: copies and views, products with numbers that
                                              do not depend on that linear, attention over values
    what is a router                          a linear inside a mixture with an output for each
                                              expert, or a single one; the linear of how much each
                                              head of an indexer counts, by its name
    where keys and values enter the cache     the module that called the cache's update

Later stages replay layers one by one, with the arguments that each was called with. So a model is
refused whose layers read anything of earlier layers but the hidden state and one tensor more that
the layer before returns (`quantflow.models.carried`).
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
from quantflow.models.family import IndexerNames
from quantflow.models.graph import Family, Graph, Layer, LinearGroup, text_config
from quantflow.models.names import HubNames
from quantflow.models.skeleton import as_written, skeleton

TOKENS = 6  # length of the sequence that is run
_BY_NAME = "round its weights alone: --algorithm rtn --linears PATTERN"
_OTHER = f"use a model whose decoder layers follow one another, or {_BY_NAME}"
_LINEARS = (nn.Linear, Conv1D)
# Operations that leave a factor of a channel unchanged, whatever they do to the axes before the
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
class TensorVersion:
    """A tensor between two operations that change it: each operation in place makes another one."""

    number: int


@dataclass(frozen=True, kw_only=True, eq=False)
class Operation:
    """One recorded operation.

    Attributes:
        name: torch's name without the overload: `aten.mul`.
        inputs: values that it reads, in the order of its arguments; None where an argument is no
            tensor.
        outputs: values that it makes.
    """

    name: str
    inputs: tuple[TensorVersion | None, ...]
    outputs: tuple[TensorVersion, ...]


@dataclass(kw_only=True, eq=False)
class LayerCall:
    """A call of a decoder layer.

    Attributes:
        hidden: its first argument, the hidden state.
        others: its other arguments, each with its name or its place behind the first.
        features: axes of the hidden state behind the tokens.
        output: the hidden state that it returned.
        tuple_of: length of the tuple that it returned, the hidden state first; 0 for no tuple.
        beside: place in the tuple -> value, dtype and shape of each further tensor.
    """

    hidden: TensorVersion
    others: tuple[tuple[str | int, TensorVersion], ...]
    features: tuple[int, ...] = ()
    output: TensorVersion | None = None
    tuple_of: int = 0
    beside: dict[int, tuple[TensorVersion, torch.dtype, tuple[int, ...]]] = field(
        default_factory=dict
    )


@dataclass(kw_only=True, eq=False)
class ForwardRecord:
    """The record of one forward.

    Attributes:
        operations: all operations in order.
        linears: linear -> its input at its first call; the order is that of the first calls.
        outputs: value -> the linear that returned it.
        norms: value -> the norm that returned it.
        cached: attention module -> shapes of the keys and of the values that enter the cache.
        called: decoder layer -> its first call.
        read_by: value -> number of reads.
        made_by: value -> the operation that made it.
        weights: linear -> its weight, which other operations may read too.
        chosen: module of experts -> number of experts that a token goes to.
        ran: modules that were called, linears apart.
    """

    operations: list[Operation] = field(default_factory=list)
    linears: dict[str, TensorVersion] = field(default_factory=dict)
    outputs: dict[TensorVersion, str] = field(default_factory=dict)
    norms: dict[TensorVersion, str] = field(default_factory=dict)
    cached: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=dict)
    called: dict[str, LayerCall] = field(default_factory=dict)
    read_by: dict[TensorVersion, int] = field(default_factory=dict)
    made_by: dict[TensorVersion, Operation] = field(default_factory=dict)
    weights: dict[str, TensorVersion] = field(default_factory=dict)
    chosen: dict[str, int] = field(default_factory=dict)
    ran: set[str] = field(default_factory=set)

    def skipped(self, layer: str) -> bool:
        """Whether nothing of a layer ran."""
        return not any(f"{name}.".startswith(f"{layer}.") for name in (*self.ran, *self.linears))


@dataclass(frozen=True, kw_only=True)
class TracedLayer:
    """A decoder layer as it ran; names are those of modules inside the layer.

    Attributes:
        prefix: name of the layer, `model.layers.3`.
        groups: every linear that ran, and those of every expert of a mixture, whether a token went
            there or not.
        routers: linears that decide which experts a token goes to and how much they count, and how
            much each head of an indexer counts.
        idle: linears that did not run, such as those that read an encoder, or whose weight
            something else read.
        skipped: the layer did not run.
        experts: module of a mixture's experts; None in a dense layer.
        chosen: number of experts that a token goes to.
        attention: module that writes the KV cache; None where nothing does.
        kv_heads, key_dim, value_dim: heads in the KV cache, and their features; 1 without a cache.
        tuple_of: length of the tuple that it returns, the hidden state first; 0 for no tuple.
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
    """Records every operation below autograd, by the identity of tensors.

    Tensors are kept alive until the end, so that no two have one identity.
    """

    def __init__(self, record: ForwardRecord) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.record = record
        self._values: dict[int, TensorVersion] = {}
        self._kept: list[Tensor] = []
        self.paused = False

    def value_of(self, tensor: Tensor) -> TensorVersion:
        """The present version of a tensor."""
        version = self._values.get(id(tensor))
        return self.renew(tensor) if version is None else version

    def renew(self, tensor: Tensor) -> TensorVersion:
        """A new version of a tensor."""
        self._kept.append(tensor)
        self._values[id(tensor)] = version = TensorVersion(len(self._kept))
        return version

    def read(self, tensor: Tensor) -> TensorVersion:
        """The present version of a tensor, which is counted as read."""
        value = self.value_of(tensor)
        self.record.read_by[value] = self.record.read_by.get(value, 0) + 1
        return value

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and record it."""
        keywords = kwargs or {}
        if self.paused:
            return func(*args, **keywords)
        inputs = tuple(self.read(item) if isinstance(item, Tensor) else None for item in args)
        lists = [item for item in args if isinstance(item, list | tuple)]
        in_lists = tuple(
            self.read(item) for items in lists for item in items if isinstance(item, Tensor)
        )
        result = func(*args, **keywords)
        results = result if isinstance(result, tuple | list) else (result,)
        outputs = tuple(self.renew(item) for item in results if isinstance(item, Tensor))
        operation = Operation(
            name=f"aten.{func._schema.name.partition('::')[2]}",
            inputs=(*inputs, *in_lists),
            outputs=outputs,
        )
        self.record.operations.append(operation)
        for output in outputs:
            self.record.made_by[output] = operation
        return result


class _Cache(DynamicCache):  # type: ignore[misc]
    """A cache that records which module put keys and values into it, and returns them."""

    def __init__(self, calling: list[str], record: ForwardRecord, config: Any) -> None:
        super().__init__(config=config)
        self._calling, self._record = calling, record

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Keys and values as they are."""
        self._record.cached[self._calling[-1]] = (
            tuple(key_states.shape),
            tuple(value_states.shape),
        )
        return key_states, value_states


def graph_of(config: Any) -> Graph:
    """The graph of a model, found by one forward.

    Args:
        config: transformers' configuration.

    Raises:
        UnsupportedError: the model cannot be traced, or has a part that nothing here quantizes; the
            message names the reason.
    """
    values = config.to_dict()
    values.pop("quantization_config", None)
    return _graph_of(json.dumps(values, sort_keys=True, default=str))


# A process asks several times for the graph of one model, and of its artifact.
@functools.lru_cache(maxsize=4)
def _graph_of(config_json: str) -> Graph:
    config: PreTrainedConfig = AutoConfig.for_model(**json.loads(config_json))
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
    split, stacked = _split(as_written(config), place, hub)
    return Graph(
        family=family,
        layers=tuple(_graph_layer(model, index, layer, hub) for index, layer in enumerate(layers)),
        split=split,
        stacked=stacked,
        others=_others(model, place, hub),
    )


def _others(model: PreTrainedModel, place: str, hub: HubNames) -> tuple[str, ...]:
    """The linears outside the layers but the head, by their names in model and in checkpoint."""
    head = model.get_output_embeddings()
    inside = f"{place}."
    linears = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and module is not head and not name.startswith(inside)
    ]
    return tuple(dict.fromkeys(each for name in linears for each in (name, hub.of_module(name))))


def _name_of(model: PreTrainedModel, module: object) -> str:
    name: str = next(name for name, part in model.named_modules() if part is module)
    return name


def _split(
    model: PreTrainedModel, place: str, hub: HubNames
) -> tuple[dict[str, SplitTensor], dict[str, SplitTensor]]:
    """The tensors of a checkpoint that hold linears in another form than [O, I] -> their parts.

    The first are those that transformers writes, the second those in whose place it writes the
    linears.

    Args:
        model: model with transformers' own modules, on meta.
        place: the list of decoder layers.
        hub: names of tensors in a checkpoint.

    Raises:
        UnsupportedError: transformers turns the experts of a checkpoint into others, and not by
            joining linears.
    """
    inside = {
        name: module for name, module in model.named_modules() if name.startswith(f"{place}.")
    }
    split: dict[str, SplitTensor] = {}
    for name, module in inside.items():
        if isinstance(module, Conv1D):
            shape, strides = (module.nf, module.nx), (1, module.nf)
            part = TensorPart(name=f"{name}.weight", shape=shape, strides=strides)
            split[f"{name}.weight"] = SplitTensor(shape=(module.nx, module.nf), parts=(part,))
    stacked = {name: module for name, module in inside.items() if is_stacked(module)}
    for name, names in names_in_files(model, stacked).items() if stacked else ():
        own = split_experts(name, stacked[name], names, exchanged=hub.exchanged)
        if reshaped := [
            each
            for each in own
            if not (hub.kept(each) or hub.exchanged(each) or hub.split_into(each))
        ]:
            raise UnsupportedError(
                f"{model.config.model_type}: {hub.of(reshaped[0])}: a checkpoint holds these "
                "experts in another form",
                _BY_NAME,
            )
        split |= own
    named: tuple[dict[str, SplitTensor], dict[str, SplitTensor]] = ({}, {})
    for name, whole in split.items():
        released = not (hub.kept(name) or hub.exchanged(name))
        named[released][hub.of(name)] = _in_files(whole, hub)
    return named


def _in_files(whole: SplitTensor, hub: HubNames) -> SplitTensor:
    """A split tensor whose parts have a checkpoint's names."""
    parts = tuple(replace(part, name=hub.of(part.name)) for part in whole.parts)
    return replace(
        whole,
        parts=parts,
        exchanged=None if whole.exchanged is None else _in_files(whole.exchanged, hub),
    )


def _graph_layer(model: PreTrainedModel, index: int, layer: TracedLayer, hub: HubNames) -> Layer:
    """A layer of the graph, whose names are full and those of a checkpoint.

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
    prefix = _common_prefix([hub.of(name) for name in tensors], index)
    source_of = {name: hub.of_module(name) for name in inside}
    sources = source_of | {name: hub.of(name) for name in tensors}
    values = layer.kv_heads * layer.value_dim  # features of all kv heads
    for traced_group in layer.groups:
        group = _renamed(traced_group, lambda name: source_of[f"{place}.{name}"])
        linear: Any = model.get_submodule(f"{place}.{traced_group.linears[0]}")
        if group.per_head and linear.in_features % values:
            # the linear reads something else than whole heads
            group = replace(group, feeder=None, per_head=False)
        repeats = linear.in_features // values if group.per_head else repeats
        groups.append(group)
    experts = None if layer.experts is None else model.get_submodule(f"{place}.{layer.experts}")
    return Layer(
        index=index,
        prefix=prefix,
        attention=None if layer.attention is None else source_of[f"{place}.{layer.attention}"],
        groups=tuple(groups),
        routers=tuple(source_of[f"{place}.{name}"] for name in layer.routers),
        idle=tuple(source_of[f"{place}.{name}"] for name in layer.idle),
        skipped=layer.skipped,
        place=None if place == prefix else place,
        renamed={
            source: name
            for name, source in sources.items()
            if source != f"{prefix}.{name.removeprefix(f'{place}.')}"
        },
        block=None
        if layer.experts is None
        else source_of[f"{place}.{layer.experts}"].rpartition(".")[0],
        block_place=(layer.experts or "").rpartition(".")[0],
        experts=0 if experts is None else len(experts),
        chosen=layer.chosen,
        repeats=repeats,
        head_dim=layer.value_dim,
        kv_heads=layer.kv_heads,
    )


def _common_prefix(names: Sequence[str], index: int) -> str:
    """The beginning of all names of a layer, up to the layer's number where that is in it."""
    parts = [name.split(".")[:-1] for name in names]
    prefix = [
        column[0]
        for column in itertools.takewhile(
            lambda column: len(set(column)) == 1, zip(*parts, strict=False)
        )
    ]
    while str(index) in prefix[:-1]:
        prefix.pop()
    return ".".join(prefix)


def traced(model: PreTrainedModel, place: str) -> tuple[tuple[TracedLayer, ...], Carried | None]:
    """The decoder layers of a model that ran once without weights, and the value that one carries.

    Args:
        model: a model of `quantflow.models.skeleton`, parameters on meta; it is as it was
            afterwards.
        place: the list of decoder layers; see `layers_of`.

    Raises:
        UnsupportedError: the forward does not run without weights, or layers cannot be run one by
            one; the message names the reason.
    """
    names = [f"{place}.{index}" for index in range(len(model.get_submodule(place)))]
    try:
        record = _run(model, names, cached=True)
    except Exception:  # the model takes no cache of this kind, or none at all
        try:
            record = _run(model, names, cached=False)
        # a forward that is no ordinary decoder's may raise anything
        except Exception as error:
            raise UnsupportedError(
                f"{model.config.model_type}: its layers cannot be traced: {type(error).__name__}: "
                f"{first_line(error)}",
                _OTHER,
            ) from error
    carried = _chain(record, names, model.config)
    _require_own_weights(model, names)
    return tuple(_layer(record, model, name) for name in names), carried


def _run(model: PreTrainedModel, layers: Sequence[str], *, cached: bool) -> ForwardRecord:
    """The record of one forward of a few tokens."""
    record, calling = ForwardRecord(), list[str]()
    recorder, config = _Recorder(record), text_config(model.config)
    with _standing_in(model, recorder, calling, layers=layers), recorder, torch.no_grad():
        ids = torch.arange(2, 2 + TOKENS)[None] % config.vocab_size
        cache = {"past_key_values": _Cache(calling, record, config)} if cached else {}
        model(input_ids=ids, use_cache=cached, **cache)
    return record


def _chain(record: ForwardRecord, names: Sequence[str], config: Any) -> Carried | None:
    """The value that every layer hands to the next beside the hidden state; None for nothing.

    Layers that did not run are passed over.

    Raises:
        UnsupportedError: the layers cannot be replayed one by one: none ran, or one did not return
            a hidden state, or reads of earlier layers more than the one before returned.
    """
    before: LayerCall | None = None
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
        carried = carried or handed  # the first two layers set it for all
        argument = carried.argument if carried is not None and handed == carried else None
        others = [value for key, value in called.others if argument is None or key != argument]
        if read := sorted(
            linear for linear in _depends(record, others) if linear.startswith(inside)
        ):
            raise UnsupportedError(
                f"{kind}: {name} reads {read[0]} beside the hidden state", _OTHER
            )
        before = called
    return carried


def _handed(before: LayerCall, called: LayerCall, config: Any) -> Carried | None:
    """The argument of a layer that the one before returned beside the hidden state, or None."""
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
    """Refuse layers that share a weight, since each would change the one tensor of a checkpoint.

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
    """The name of the list of decoder layers.

    Of several lists it is one in the decoder, then one of num_hidden_layers, then the one that
    holds most linears.

    Raises:
        UnsupportedError: there is none.
    """
    lists: dict[str, tuple[bool, bool, int, int]] = {}
    count = getattr(text_config(model.config), "num_hidden_layers", None)
    decoder = model.get_decoder()
    within = next((name for name, module in model.named_modules() if module is decoder), "")
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) and ".experts" not in f".{name}":
            linears = sum(isinstance(part, _LINEARS) for part in module.modules())
            if linears:
                lists[name] = (
                    name.startswith(within),
                    len(module) == count,
                    linears,
                    -name.count("."),
                )
    if not lists:
        raise UnsupportedError(
            f"{model.config.model_type}: no list of layers that hold linears", _OTHER
        )
    return max(lists, key=lambda name: lists[name])


@contextmanager
def _standing_in(
    model: PreTrainedModel, recorder: _Recorder, calling: list[str], *, layers: Collection[str]
) -> Iterator[None]:
    """Give parameters a number and linears a result, and watch modules, until the block ends.

    Args:
        model: the model of `traced`.
        recorder: the recorder of the forward.
        calling: list that holds the names of the modules that run, the innermost last.
        layers: names of the decoder layers.
    """
    record = recorder.record

    def enter(
        module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, name: str
    ) -> None:
        calling.append(name)
        record.ran.add(name)
        if isinstance(module, Experts):
            record.chosen[name] = args[1].shape[-1] * module.rows_of_token
        if name in layers:
            arguments: list[tuple[str | int, Any]] = [*enumerate(args, -1), *kwargs.items()]
            tensors = [
                (key, item)
                for key, one in arguments
                for item in (one if isinstance(one, tuple | list) else (one,))
            ]
            values = [
                (key, recorder.value_of(item)) for key, item in tensors if isinstance(item, Tensor)
            ]
            if args and isinstance(args[0], Tensor) and name not in record.called:
                (_, hidden), *others = values
                record.called[name] = LayerCall(
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
    """Whether a module computes x @ W.T + b, or Conv1D's x @ W + b.

    A subclass of Linear is tried with a small matrix.
    """
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
    """Whether a module has vectors of weights alone, as norms have."""
    own = [parameter for parameter in module.parameters()]
    return (
        bool(own)
        and all(parameter.ndim == 1 for parameter in own)
        and not any(True for _ in module.children())
    )


def _stand_in(name: str, module: Any, recorder: _Recorder) -> Callable[[Tensor], Tensor]:
    """The function that is called in the place of a linear."""
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


def _layer(record: ForwardRecord, model: PreTrainedModel, prefix: str) -> TracedLayer:
    """A layer as the record has it.

    Raises:
        UnsupportedError: the layer has more than one attention or mixture.
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
    groups: dict[TensorVersion, list[str]] = {}
    received = [value for name, value in ran.items() if name not in routers]
    for name, value in ran.items():
        if name not in routers:
            # a read of a view is not counted for its source, so go to the source only where the
            # linears are all that reads the view
            alone = record.read_by.get(value) == received.count(value)
            groups.setdefault(_source(record, value) if alone else value, []).append(name)
    attentions = [name for name in record.cached if name.startswith(inside)]
    if len(attentions) > 1:
        raise UnsupportedError(
            f"{prefix}: {len(attentions)} modules write a cache of keys and values", _OTHER
        )
    keys, values = record.cached[attentions[0]] if attentions else ((1, 1, 1, 1), (1, 1, 1, 1))
    router_inputs = {ran[name] for name in routers}
    own_groups = [
        _within(inside, _group(record, model, value, names, router_inputs))
        for value, names in groups.items()
    ]
    own_groups += [group for name, pool in pools.items() for group in _of_experts(name, pool)]
    return TracedLayer(
        prefix=prefix,
        groups=tuple(
            _renamed(group, lambda name: name.removeprefix(inside)) for group in own_groups
        ),
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
    """A group without norm and feeder of other layers, which are not in memory beside it."""
    norm = group.norm if group.norm is not None and group.norm.startswith(inside) else None
    if group.feeder is None or group.feeder.startswith(inside):
        return replace(group, norm=norm)
    return replace(group, norm=norm, feeder=None, per_head=False)


def _of_experts(name: str, pool: Experts) -> Iterator[LinearGroup]:
    """The groups of every expert.

    The up projection feeds nothing: an expert's few tokens would choose the factors.
    """
    for number, names in enumerate(pool.names):
        inside = f"{name}.{number}"
        entering = tuple(f"{inside}.{leaf}" for leaf in names.inputs)
        yield LinearGroup(linears=entering, fused=len(entering) > 1, expert=inside)
        yield LinearGroup(linears=(f"{inside}.{names.down}",), expert=inside)


def _group(
    record: ForwardRecord,
    model: PreTrainedModel,
    value: TensorVersion,
    names: Sequence[str],
    others: Iterable[TensorVersion],
) -> LinearGroup:
    """The group of linears that receive a value.

    Args:
        record: record of the forward.
        model: the model that ran.
        value: the value that the linears receive.
        names: the linears.
        others: inputs of the layer's routers.
    """
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
    """Whether a factor can be folded into a norm's weight and bias: tried on random numbers.

    Gemma's norm multiplies by 1 + its weight, so no factor can.
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
    # the module takes other inputs than a norm
    except (RuntimeError, TypeError, IndexError, AttributeError):
        return False


def _source(record: ForwardRecord, value: TensorVersion) -> TensorVersion:
    """The value that another one is a view of."""
    views = ("aten.view", "aten.alias", "aten.detach")
    while (operation := record.made_by.get(value)) is not None and operation.name in views:
        source = operation.inputs[0]
        if source is None or record.read_by.get(source, 0) != 1:
            break
        value = source
    return value


def _feeder(record: ForwardRecord, value: TensorVersion) -> tuple[str, bool] | None:
    """The linear that feeds a value, and whether attention lies between; None for none.

    A linear feeds a value that is a weighted sum of its outputs, each channel from one output, by
    weights that do not depend on that linear. So a factor of a channel goes through.
    """
    if value in record.outputs:
        return record.outputs[value], False
    operation = record.made_by.get(value)
    if operation is None:
        return None
    if operation.name in _COPIES and operation.inputs[0] is not None:
        return _feeder(record, operation.inputs[0])
    if operation.name in _ATTENTION and len(operation.inputs) > _ATTENTION[operation.name]:
        linear = _feeding(record, operation, _ATTENTION[operation.name])
        return None if linear is None else (linear[0], True)
    if operation.name in _PRODUCTS:
        # both factors of a product may be fed, but a divisor feeds nothing
        factors = 1 if operation.name == "aten.div" else len(operation.inputs)
        for at in range(factors):
            if (linear := _feeding(record, operation, at)) is not None:
                return linear
    return None


def _feeding(record: ForwardRecord, operation: Operation, at: int) -> tuple[str, bool] | None:
    """The linear that feeds one input of an operation, if the other inputs do not depend on it."""
    item = operation.inputs[at]
    linear = None if item is None else _feeder(record, item)
    others = [
        other for index, other in enumerate(operation.inputs) if index != at and other is not None
    ]
    return None if linear is None or linear[0] in _depends(record, others) else linear


def _depends(record: ForwardRecord, values: Iterable[TensorVersion]) -> set[str]:
    """The linears whose outputs the values were computed from."""
    linears, seen, left = set(), set(), list(values)
    while left:
        value = left.pop()
        if value in seen:
            continue
        seen.add(value)
        if value in record.outputs:
            linears.add(record.outputs[value])
        elif (operation := record.made_by.get(value)) is not None:
            left += [item for item in operation.inputs if item is not None]
    return linears


def _routes(model: PreTrainedModel, name: str) -> bool:
    """Whether a linear chooses experts, or says how much a shared one or an indexer's head counts.

    A router of experts lies beside them, and has an output for each of them or a single one. A
    shared expert may have as many features as there are experts (Qwen3-Next); what takes them lies
    beside it.
    """
    if name.endswith(f".{IndexerNames().weights}"):
        return True
    owner = parent = name.rpartition(".")[0]
    while owner and not any(
        child == "experts" for child, _ in model.get_submodule(owner).named_children()
    ):
        owner = owner.rpartition(".")[0]
    if not owner or name.startswith(f"{owner}.experts."):
        return False
    experts = model.get_submodule(f"{owner}.experts")
    width: int = model.get_submodule(name).weight.shape[0]
    if owner != parent and any(
        isinstance(beside, nn.Linear) and beside.in_features == width
        for beside in model.get_submodule(parent).children()
    ):
        return False
    return width == 1 or (isinstance(experts, nn.ModuleList) and width == len(experts))


def _renamed(group: LinearGroup, rename: Callable[[str], str]) -> LinearGroup:
    """A group with other names."""
    return replace(
        group,
        linears=tuple(map(rename, group.linears)),
        norm=None if group.norm is None else rename(group.norm),
        feeder=None if group.feeder is None else rename(group.feeder),
        expert=None if group.expert is None else rename(group.expert),
    )
