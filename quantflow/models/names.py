"""Names in the checkpoint and in the module tree, translated by transformers' conversion table.

    source name   embed_out.weight                     in ledgers, recipes and measurements
    module name   lm_head.weight                       in the model in memory

For most tensors the two are equal. transformers makes the tables of all its families when the first
is asked for, which takes longer than anything else of opening an artifact. So no table is asked for
while every name is a parameter's own.
"""

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import cached_property

from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Chunk,
    PrefixChange,
    Transpose,
    WeightConverter,
    WeightRenaming,
    rename_source_key,
)

from quantflow.errors import InputError, UnsupportedError
from quantflow.models.parameters import twins

# a part of a joined convolution's weight, and of a joined linear, as `parts_of` names them
_PART = re.compile(
    r"(?P<owner>.+)\.(?:parametrizations\.(?P<leaf>\w+)\.original(?P<number>\d+)"
    r"|parts\.(?P<linear>\d+)\.(?P<of_linear>\w+))"
)
# Buffers of old checkpoints, which transformers computes itself since then.
_COMPUTED_BUFFERS = r"rotary_emb\.inv_freq$"
# Names that torch.compile, FSDP and activation checkpointing put around a module: a checkpoint that
# was saved from within has them.
_WRAPPERS = re.compile(
    r"(?:^|(?<=\.))(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.|^module\."
)


@dataclass(frozen=True, kw_only=True)
class Binding:
    """The tensors of one checkpoint and their places in one model.

    Attributes:
        to_module: source name -> module name, one to one.
        to_source: module name -> source name; a tied parameter that the checkpoint lacks has its
            twin's. Parameters beside the language model are missing where transformers makes them
            of other tensors.
        beside: source names that are merged or split for images or sound, which no text needs.
        unused: source names that belong to no module of the model: layers that predict tokens
            further ahead (MTP), layers beyond `num_hidden_layers`, value heads, and buffers that
            transformers computes itself today.
    """

    to_module: dict[str, str]
    to_source: dict[str, str]
    beside: tuple[str, ...]
    unused: tuple[str, ...]


class HubNames:
    """The names of a model's tensors in a checkpoint that transformers writes."""

    def __init__(self, model: PreTrainedModel) -> None:
        """Reverse the table of `model`; its parameters may be on meta."""
        table = get_model_conversion_mapping(model, add_legacy=False)[::-1]
        reverse = [item.reverse_transform() for item in table if not isinstance(item, PrefixChange)]
        self._renamings = [item for item in reverse if isinstance(item, WeightRenaming)]
        self._converters = [item for item in reverse if isinstance(item, WeightConverter)]

    def of(self, name: str) -> str:
        """The source name of a parameter."""
        if part := _PART.fullmatch(name):
            whole = f"{part['owner']}.{part['leaf'] or part['of_linear']}"
            number = int(part["number"] or part["linear"])
            # other parametrizations than those of models/joined.py have none
            if (converter := self._converter(whole)) is not None:
                first, *others = converter.target_patterns
                name, _ = self._converted(whole)
                name = name if number == 0 else name.replace(first, others[number - 1], 1)
        for renaming in self._renamings:
            name, _ = renaming.rename_source_key(name)
        return name

    def of_module(self, name: str) -> str:
        """The source name of a module that has a weight."""
        return self.of(f"{name}.weight").removesuffix(".weight")

    def kept(self, name: str) -> bool:
        """Whether a tensor is saved as it is, perhaps under another name."""
        return self._converted(name)[1] is None

    def split_into(self, name: str) -> tuple[str, ...]:
        """The names of the linears that saving splits a stacked tensor into.

        There is none where the tensor stays whole.
        """
        converter = self._converter(name)
        if converter is None:
            return ()
        parts = [
            target.rpartition("*.")[2].removesuffix(".weight")
            for target in converter.target_patterns
            if "*." in target
        ]
        return tuple(parts)

    def joined_from(self, name: str) -> int:
        """The number of a checkpoint's tensors that are joined into a parameter; 1 where it is one.

        They lie one after the other.
        """
        converter = self._converter(name)
        if converter is None:
            return 1
        plain = [
            type(item) is Chunk
            and item.dim == 0
            and getattr(item, "num_shards_attribute", None) is None
            for item in converter.operations
        ]
        return len(converter.target_patterns) if plain == [True] else 1

    def exchanged(self, name: str) -> bool:
        """Whether checkpoints hold the last two axes of a tensor either way round.

        The tensor has three dimensions, and its shape says which way it is.
        """
        converter = self._converter(name)
        if converter is None or len(converter.operations) != 1:
            return False
        (operation,) = converter.operations
        return (
            type(operation) is Transpose
            and {operation.dim0, operation.dim1} == {1, 2}
            and operation.check_dims
        )

    def _converter(self, name: str) -> WeightConverter | None:
        """The converter that changes a tensor when it is saved; None where none does."""
        _, pattern = self._converted(name)
        return next((item for item in self._converters if pattern in item.source_patterns), None)

    def _converted(self, name: str) -> tuple[str, str | None]:
        """The first name that saving gives a tensor, and the pattern of its converter, if any.

        The versions of transformers have no function of one name for it.
        """
        for converter in self._converters:
            renamed, pattern = converter.rename_source_key(name)
            if pattern is not None:
                return renamed, pattern
        return name, None


def parts_of(name: str, index: int) -> tuple[str, str]:
    """Module names of a part of a joined parameter (models/joined.py).

    The first is a convolution's, the second a linear's.

    Args:
        name: name of the whole.
        index: number of the part, in the order of the table.
    """
    owner, _, leaf = name.rpartition(".")
    return f"{owner}.parametrizations.{leaf}.original{index}", f"{owner}.parts.{index}.{leaf}"


class NameMap:
    """The translation of names for one model."""

    def __init__(self, model: PreTrainedModel) -> None:
        """Take the names of `model`, whose parameters may be on meta."""
        self._model, self._prefix = model, model.base_model_prefix
        self._parameters = model.state_dict()
        self._twins = twins(model)
        self._owners = {name.rpartition(".")[0] for name in self._parameters}
        patterns = [_COMPUTED_BUFFERS, *(model._keys_to_ignore_on_load_unexpected or ())]
        self._ignored = re.compile("|".join(f"(?:{pattern})" for pattern in patterns))

    def module_name(self, source: str) -> str:
        """The module name of a source name.

        A parameter's own name, or one that the table does not mention, stays as it is. A tensor
        that the table merges is a parameter of its own where the model has one of its name: the
        linears of experts.

        Raises:
            UnsupportedError: the table merges or splits this tensor, so it is no single parameter.
        """
        name, converter = self._found(source)
        if converter is not None:
            raise UnsupportedError(
                f"{source}: merged or split on load (pattern {converter[0]!r}), only one-to-one "
                "names are supported",
                "use a checkpoint whose tensors are single parameters of the model",
            )
        return name

    def whole(self, source: str) -> str | None:
        """The module name of a source name; None where the tensor is merged or split on load."""
        module, changed = self._found(source)
        return module if changed is None else None

    def _made_of(self, module: str, changed: tuple[str, WeightConverter]) -> set[str]:
        """The parameters that a converter makes of a tensor; `module` is the first."""
        first, *others = changed[1].target_patterns
        return {module, *(module.replace(first, other, 1) for other in others)}

    def _found(self, source: str) -> tuple[str, tuple[str, WeightConverter] | None]:
        """The module name of a source name, with the pattern and converter that change it, if any.

        Where a tensor is split into several parameters, the name is that of the first.
        """
        name: str
        if source in self._parameters:
            return source, None
        renamings, converters = self._table
        name, _ = rename_source_key(source, renamings, [], self._prefix, self._parameters)
        if name in self._parameters:
            return name, None
        name, pattern = rename_source_key(
            source, renamings, converters, self._prefix, self._parameters
        )
        if pattern is None:
            return name, None
        converter = next(item for item in converters if pattern in item.source_patterns)
        for part in parts_of(name, converter.source_patterns.index(pattern)):
            if part in self._parameters:
                return part, None
        return name, (pattern, converter)

    @cached_property
    def _of_text(self) -> tuple[str, ...]:
        """Prefixes of the names of parameters that a text needs; one empty prefix where all are."""
        base = self._model.base_model
        decoder = self._model.get_decoder()
        head = self._model.get_output_embeddings()
        if decoder is base or decoder is self._model:
            return ("",)
        return tuple(
            f"{name}."
            for name, module in self._model.named_modules()
            if module is decoder or module is head
        )

    @cached_property
    def _table(self) -> tuple[list[WeightRenaming], list[WeightConverter]]:
        """The renamings of tensors, and the converters that merge or split them."""
        found = get_model_conversion_mapping(self._model)
        renamings = [item for item in found if isinstance(item, WeightRenaming)]
        return renamings, [item for item in found if isinstance(item, WeightConverter)]

    def spelled(self, names: Iterable[str], wholes: Collection[str]) -> dict[str, str]:
        """The names that transformers writes, of the tensors that a checkpoint names otherwise.

        Checkpoints lack the base model's prefix, or have it twice, have the names of a version of
        transformers before or after, or those of a wrapper around the model. Tensors beside the
        language model keep their names, as engines know those of the release.

        Args:
            names: every source name.
            wholes: tensors that transformers writes and that are read in parts, by those names.
        """
        hub = HubNames(self._model)
        spelled = {}
        for name in names:
            bare = _WRAPPERS.sub("", name)
            longer = f"{self._prefix}.{bare}"
            shorter = bare.removeprefix(f"{self._prefix}.")
            own = next((each for each in (bare, longer, shorter) if each in wholes), None)
            if own is None:
                module, changed = self._found(bare)
                if changed is None and module in self._parameters:
                    inside = module.startswith(self._of_text)
                    own = hub.of(module) if inside else bare
                    own = own if self._found(own) == (module, None) else bare
            if own not in (None, name):
                spelled[name] = own
        return spelled

    def bind(self, names: Iterable[str]) -> Binding:
        """Match all tensors of a checkpoint with all parameters of the model.

        A tensor that no module has is unused: transformers loads such a checkpoint too. A tensor
        of a module that has others, such as the bias of a linear without one, is refused, since
        the model would compute other numbers without it.

        Args:
            names: every source name.

        Raises:
            InputError: a tensor that its module does not have, two tensors for one parameter, or a
                parameter without a tensor.
            UnsupportedError: a tensor of the language model is merged or split on load.
        """
        to_module: dict[str, str] = {}
        to_source: dict[str, str] = {}
        beside, unused, merged = list[str](), list[str](), list[str]()
        unread: set[str] = set()
        for source in names:
            module, changed = self._found(source)
            if changed is not None:
                made = self._made_of(module, changed)
                if made.isdisjoint(self._parameters):
                    merged.append(source)
                    unused.append(source)
                elif module.startswith(self._of_text):
                    self.module_name(source)  # raises
                else:
                    unread |= made
                    beside.append(source)
                continue
            if module not in self._parameters:
                if module.rpartition(".")[0] in self._owners and not self._ignored.search(module):
                    raise InputError(
                        f"{source}: in the checkpoint, but the model has no parameter {module}",
                        f"check that config.json belongs to these weights: a flag of it says "
                        f"whether there is such a {module.rpartition('.')[2]}",
                    )
                unused.append(source)
                continue
            if module in to_source:
                raise InputError(
                    f"{source}: names the same parameter {module} as {to_source[module]}",
                    "remove one of the two",
                )
            to_module[source], to_source[module] = module, source
        for name, twin in self._twins.items():
            if name not in to_source and twin in to_module.values():
                to_source[name] = to_source[twin]
        missing = sorted(set(self._parameters) - set(to_source) - unread - self._computed)
        if missing and merged:
            self.module_name(merged[0])  # raises
        if missing:
            raise InputError(
                f"{missing[0]}: needed by the model, not in the checkpoint "
                f"({len(missing)} missing)",
                "check that config.json belongs to these weights and that every shard is there",
            )
        return Binding(
            to_module=to_module, to_source=to_source, beside=tuple(beside), unused=tuple(unused)
        )

    @property
    def _computed(self) -> set[str]:
        """Buffers that transformers computes where a checkpoint lacks them, and says so."""
        optional = self._model._keys_to_ignore_on_load_missing or ()
        buffers = {name for name, _ in self._model.named_buffers()} & self._parameters.keys()
        return {name for name in buffers if any(re.search(one, name) for one in optional)}
