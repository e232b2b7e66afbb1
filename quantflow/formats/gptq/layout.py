"""GPTQ's layout, which AutoGPTQ and GPTQModel write and vLLM, TGI and transformers read.

AutoRound has the same tensors in another configuration (quantflow/formats/gptq/auto_round.py).

A linear called NAME, of bits b and G = I / group_size groups, is stored as

| tensor       | dtype, shape          | content                                               |
|--------------|-----------------------|-------------------------------------------------------|
| NAME.qweight | int32 [I * b / 32, O] | qvalue + 2 ** (b - 1); a column has input after input |
| NAME.qzeros  | int32 [G, O * b / 32] | zero_point + 2 ** (b - 1), in version 1 less one;     |
|              |                       | a row has output after output                         |
| NAME.scales  | [G, O]                | scale                                                 |
| NAME.g_idx   | int32 [I]             | the group of each input                               |

1. Bits follow each other without a gap, lowest first: of 3 bits 32 elements fill three words.
2. Version 1 (`checkpoint_format` gptq) stores zero points less one. It holds no zero point of the
   lowest code, since programs that mask read 2 ** b - 1 as 0 and the others as 2 ** b. Such a
   tensor is refused, both ways. Version 2 (gptq_v2) stores zero points unchanged.
3. Symmetric weights have zero points in the middle, and qzeros say so.
4. With `desc_act` (act-order) groups are of inputs that lie apart. They are decoded side by side,
   in the order of their groups, and `QuantizedLinear.order` is the order of inputs. A linear of
   several groups without g_idx is refused then.

Source: github.com/ModelCloud/GPTQModel, `gptqmodel/nn_modules/qlinear/`, release 5;
github.com/AutoGPTQ/AutoGPTQ 0.7.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from quantflow.core import packing
from quantflow.core.groups import group_size_for
from quantflow.core.qtensor import QTensor, QuantizedLinear
from quantflow.core.scheme import LinearScheme, TensorScheme, named
from quantflow.errors import InputError, SchemeError, UnsupportedError
from quantflow.files.patterns import Pattern
from quantflow.formats.weight_layout import (
    SAME_NAMES,
    Infos,
    checked,
    flag,
    integers,
    matrix,
    number,
    only_scheme,
    order_of,
    scales,
    stored_scales,
    tensor,
    why_not_integers,
    zero_point_of,
)

NAME = "gptq"
NAME_V2 = "gptq_v2"
METHOD = "gptq"
BITS = (2, 3, 4, 8)
_PARTS = ("qweight", "qzeros", "scales", "g_idx")
_KNOWN_RULE = {"bits", "group_size", "sym"}


@dataclass(frozen=True, kw_only=True)
class GPTQLayout:
    """A version of the layout.

    Attributes:
        stored_less: number that zero points are stored less: 1 in version 1, 0 in version 2.
        has_order: whether files have g_idx; AutoRound's have none.
        reordered: whether groups may be of inputs that lie apart (`desc_act`).
    """

    stored_less: int
    has_order: bool = True
    reordered: bool = False

    @property
    def name(self) -> str:
        """Key of the layout in `quantflow.formats.LAYOUTS`."""
        return NAME if self.stored_less else NAME_V2

    def with_order(self) -> "GPTQLayout":
        """The layout as it is written where groups may be of inputs that lie apart."""
        return replace(self, reordered=True)

    def why_not(self, scheme: LinearScheme, shape: tuple[int, int]) -> str | None:
        """Reason why the layout cannot hold a linear of `shape` (O, I); None when it can."""
        held = "the layout holds integers of 2, 3, 4 or 8 bits per group"
        if (reason := why_not_integers(scheme, BITS, held)) is not None:
            return reason
        whole = packing.elements_of_whole_words(scheme.weights.num_bits)
        for axis, size in zip(("out_features", "in_features"), shape, strict=True):
            if size % whole:
                return f"{axis}={size}, whole words hold multiples of {whole}"
        return None

    def tensor_names(self, name: str, scheme: LinearScheme) -> tuple[str, ...]:
        """Names of the tensors that hold the linear `name` (without `.weight`)."""
        del scheme
        return tuple(f"{name}.{part}" for part in (_PARTS if self.has_order else _PARTS[:-1]))

    def encode(
        self, name: str, linear: QuantizedLinear, *, scale_dtype: torch.dtype
    ) -> dict[str, Tensor]:
        """Tensors of a linear; see `WeightLayout.encode`."""
        weight, bits = linear.weight, linear.weight.scheme.num_bits
        weight.validate(name)
        columns, groups = weight.qvalue.shape[1], weight.scale.shape[1]
        zero_point = zero_point_of(weight)
        low = zero_point == weight.scheme.qmin
        if self.stored_less and low.any():
            row, group = low.nonzero()[0].tolist()
            cause = (
                f"{name}: {int(low.sum())} of {low.numel()} zero points would change, the first "
                f"(row {row}, group {group}) "
                f"from 0 to {2**bits}: version 1 stores them less one"
            )
            raise UnsupportedError(cause, f"export with --format {NAME_V2}")
        group_of = torch.arange(columns, dtype=torch.int32) // (columns // groups)
        qvalue = weight.qvalue
        if linear.order is not None and not (self.has_order and self.reordered):
            raise UnsupportedError(
                f"{name}: its groups are of inputs that do not stand together",
                "keep it in a layout with g_idx and desc_act",
            )
        if linear.order is not None:
            natural = torch.argsort(linear.order)  # input -> its column among groups side by side
            qvalue, group_of = qvalue[:, natural], group_of[natural].contiguous()
        tensors = {
            f"{name}.qweight": packing.pack(qvalue, bits).T.contiguous(),
            f"{name}.qzeros": packing.pack((zero_point - self.stored_less).T.contiguous(), bits),
            f"{name}.scales": stored_scales(name, weight.scale, scale_dtype).T.contiguous(),
            f"{name}.g_idx": group_of,
        }
        return {key: tensors[key] for key in self.tensor_names(name, linear.scheme)}

    def decode(
        self, name: str, tensors: Mapping[str, Tensor], scheme: LinearScheme
    ) -> QuantizedLinear:
        """The linear; see `TensorLayout.decode`."""
        weights, word_dtype = scheme.weights, torch.int32
        bits = weights.num_bits
        packed = matrix(tensors, f"{name}.qweight", "[words, out_features]")
        rows, columns = packed.shape[1], packed.shape[0] * 32 // bits
        packed = tensor(tensors, f"{name}.qweight", (word_dtype,), (columns * bits // 32, rows))
        try:
            groups = columns // group_size_for(weights, columns, name=f"{name}.qweight")
        except SchemeError as error:
            raise InputError(error.cause, "check bits and group_size in config.json") from error
        qvalue = packing.unpack(packed.T.contiguous(), bits, columns)
        scale = scales(tensors, f"{name}.scales", (groups, rows), weights).T.contiguous()  # [O, G]
        stored = tensor(tensors, f"{name}.qzeros", (word_dtype,), (groups, rows * bits // 32))
        zero_point = self._zero_point(
            f"{name}.qzeros", packing.unpack(stored, bits, rows).T.contiguous(), weights
        )
        order = None
        if self.has_order:
            key = f"{name}.g_idx"
            order = order_of(
                key, tensor(tensors, key, (torch.int32, torch.int64), (columns,)), groups=groups
            )
            if order is not None and not self.reordered:
                raise InputError(
                    f"{key}: groups of inputs that do not stand together, config.json says "
                    "desc_act false",
                    "set desc_act to true if the program that wrote the folder did; or download "
                    "it again",
                )
        if order is not None:
            qvalue = qvalue[:, order].contiguous()
        weight = QTensor(qvalue=qvalue, scale=scale, zero_point=zero_point, scheme=weights)
        return QuantizedLinear(weight=checked(name, weight), scheme=scheme, order=order)

    def _zero_point(self, key: str, stored: Tensor, weights: TensorScheme) -> Tensor | None:
        """Zero points of asymmetric weights, int8 [O, G]; None for symmetric ones.

        `stored` are those of the file, int8 [O, G].
        """
        if weights.symmetric:
            middle = -self.stored_less
            if (other := stored[stored != middle]).numel():
                half = 1 << (weights.num_bits - 1)
                cause = (
                    f"{key}: zero point {int(other[0]) + half} is stored, config.json says sym "
                    f"true, which is {middle + half}"
                )
                raise InputError(
                    cause, "set sym and checkpoint_format as the program that wrote the folder did"
                )
            return None
        if self.stored_less and (stored == weights.qmax).any():
            largest = 2**weights.num_bits - 1
            cause = (
                f"{key}: zero point {largest} is stored less one: some programs read {largest + 1} "
                "there, others 0"
            )
            raise InputError(cause, f"make the folder again with checkpoint_format {NAME_V2}")
        return stored + self.stored_less

    def quantization_config(
        self,
        schemes: Mapping[str, LinearScheme],
        *,
        ignore: Sequence[str],
        model_type: str,
        modules: Mapping[str, str] = SAME_NAMES,
    ) -> dict[str, Any]:
        """The `quantization_config` of config.json; see `WeightLayout.quantization_config`."""
        del model_type, modules
        weights = only_scheme(schemes, NAME).weights
        head = [name for name in schemes if name in ("lm_head", "embed_out")]
        return {
            "quant_method": METHOD,
            "checkpoint_format": NAME if self.stored_less else NAME_V2,
            "bits": weights.num_bits,
            "group_size": weights.group_size or -1,
            "sym": weights.symmetric,
            "desc_act": self.reordered,
            "lm_head": bool(head),
            "pack_dtype": "int32",
            "dynamic": {
                f"-:^{re.escape(name)}$": {}
                for name in ignore
                if name not in ("lm_head", "embed_out")
            }
            or None,
            "meta": {"quantizer": ["quantflow"]},
        }

    def schemes(
        self,
        config: Mapping[str, Any],
        shapes: Mapping[str, tuple[int, int]],
        infos: Infos,
        modules: Mapping[str, str] = SAME_NAMES,
    ) -> dict[str, LinearScheme]:
        """Scheme of each quantized linear; see `WeightLayout.schemes`."""
        base = {
            "bits": number(config, "bits", "w_bit"),
            "group_size": number(config, "group_size", "q_group_size"),
            "sym": flag(config, "sym", default=True),
        }
        by_name, patterns = {}, _patterns(config)
        for name in shapes:
            if f"{name}.qweight" not in infos:
                continue
            own_rule = _rule(config, patterns, name) or _rule(
                config, patterns, modules.get(name, name)
            )
            rule = {**base, **own_rule}
            weights = integers(rule["bits"], rule["group_size"], symmetric=rule["sym"], where=name)
            by_name[name] = named(weights, None, "pack-quantized")
            several = weights.group_size is not None and weights.group_size < shapes[name][1]
            if self.reordered and several and f"{name}.g_idx" not in infos:
                raise InputError(
                    f"{name}.g_idx: missing, config.json says desc_act true",
                    "download the folder again; or set desc_act to false if its groups are of "
                    "inputs that stand together",
                )
        return by_name


def _patterns(config: Mapping[str, Any]) -> list[tuple[Pattern, dict[str, Any]]]:
    """Rules of GPTQModel's `dynamic`: a pattern of names, and the settings of those linears.

    Linears that it leaves out have no rule.

    Raises:
        InputError: `dynamic` is no table of tables, or a pattern is no regular expression.
    """
    rules = []
    for pattern, rule in _table(config.get("dynamic"), "dynamic").items():
        if not pattern.startswith("-:"):
            try:
                rules.append(
                    (Pattern(pattern.removeprefix("+:")), _table(rule, f"dynamic: {pattern}"))
                )
            except InputError as error:
                raise InputError(f"config.json: dynamic: {error.cause}", error.remedy) from error
    return rules


def _table(value: Any, where: str) -> dict[str, Any]:
    """A table of the configuration; an empty one where there is none.

    Raises:
        InputError: the value is no table.
    """
    if value is not None and not isinstance(value, dict):
        raise InputError(
            f"config.json: {where} is {str(value)[:80]!r}, a table is needed", "repair it"
        )
    return value or {}


def _rule(
    config: Mapping[str, Any], patterns: Sequence[tuple[Pattern, dict[str, Any]]], name: str
) -> dict[str, Any]:
    """Settings of one linear alone: GPTQModel's `dynamic`, AutoRound's `extra_config`.

    Args:
        config: the configuration.
        patterns: rules of `dynamic`, from `_patterns`.
        name: name of the linear.

    Raises:
        UnsupportedError: a key that changes values and is not known here.
        InputError: a value of another kind, or a pattern that takes too long.
    """
    own_rule = next((rule for pattern, rule in patterns if pattern.match(name)), {})
    own_rule = own_rule or _table(
        _table(config.get("extra_config"), "extra_config").get(name), f"extra_config: {name}"
    )
    settings = {key: value for key, value in own_rule.items() if key in _KNOWN_RULE}
    for key, value in settings.items():
        if type(value) is not (bool if key == "sym" else int):
            raise InputError(
                f"config.json: {name}: {key} is {value!r}",
                "repair it, or download the folder again",
            )
    return settings


def layout_of(config: Mapping[str, Any], infos: Infos) -> GPTQLayout | None:
    """The version that a quantization_config names; None for one of another method.

    Raises:
        UnsupportedError: a packing of this method that is not known here.
    """
    method, has_order = config.get("quant_method"), any(name.endswith(".g_idx") for name in infos)
    if method != METHOD:
        return None
    version = config.get("checkpoint_format") or config.get("format") or NAME
    if version not in (NAME, NAME_V2):
        raise UnsupportedError(
            f"config.json: checkpoint_format {version!r}, {NAME} and {NAME_V2} are known",
            f"pack the folder as {NAME}",
        )
    if config.get("pack_dtype") not in (None, "int32"):
        raise UnsupportedError(
            f"config.json: pack_dtype {config['pack_dtype']!r}, int32 is known", "pack it in int32"
        )
    reordered = flag(config, "desc_act", default=False)
    return GPTQLayout(
        stored_less=1 if version == NAME else 0, has_order=has_order, reordered=reordered
    )
