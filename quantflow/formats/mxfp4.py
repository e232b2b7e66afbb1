"""MXFP4 as OpenAI's gpt-oss is published: a layer's experts in one tensor of blocks, one of scales.

| tensor       | dtype, shape             | content                                             |
|--------------|--------------------------|-----------------------------------------------------|
| STACK_blocks | uint8 [E, O, I / 32, 16] | e2m1 codes of 32 inputs, two a byte, low half first |
| STACK_scales | uint8 [E, O, I / 32]     | the exponent of each 32, plus 127; 255 is NaN       |
| STACK_bias   | [E, O]                   | the bias, unchanged                                 |

A STACK is EXPERTS.gate_up_proj, whose rows are those of gate and of up in turn, or
EXPERTS.down_proj. `split` names the share of each expert: its linear EXPERTS.3.gate_proj is
`weight_blocks` [O, I / 2], `weight_scales` [O, I / 32] and `bias` [O], which lie in the stacks'
bytes with steps between them. `stacks` is the way back.

Source: transformers 5.23, `integrations/mxfp4.py`; OCP Microscaling Formats 1.0, section 5.4.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quantflow.core import microscaling
from quantflow.core.qtensor import PackedLinear, QTensor, QuantizedLinear
from quantflow.core.scheme import PRESETS, LinearScheme
from quantflow.errors import InputError, UnsupportedError
from quantflow.files.safetensors_header import SplitTensor, TensorInfo, TensorPart
from quantflow.formats.weight_layout import (
    SAME_NAMES,
    Infos,
    checked,
    matrix,
    tensor,
    why_not_mixed,
)

NAME = "mxfp4"
METHOD = "mxfp4"
_SCHEME = PRESETS["MXFP4A16"]
_GROUP = 32
_BLOCKS, _SCALES, _BIAS = "_blocks", "_scales", "_bias"
# stack -> its linears, whose rows take turns
_LINEARS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
_EXPERT = re.compile(
    r"(?P<experts>.+[.]experts)[.](?P<number>[0-9]+)[.](?P<linear>gate_proj|up_proj|down_proj)"
)
_MODEL_TYPE = "gpt_oss"
_PLAIN = ("model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head")
_AGAIN = "download the folder again"
_LEAVE = "quantize with --ignore for all other linears, such as 're:.*self_attn.*'"


@dataclass(frozen=True, kw_only=True)
class MXFP4Layout:
    """The layout of one linear of an expert, as `split` names its tensors.

    Attributes:
        reordered: always False: there is no g_idx.
    """

    reordered: bool = False

    @property
    def name(self) -> str:
        """Key of the layout in `quantflow.formats.LAYOUTS`."""
        return NAME

    def with_order(self) -> "MXFP4Layout":
        """The layout itself: it has no words for groups of inputs that do not stand together."""
        return self

    def why_not(self, scheme: LinearScheme, shape: tuple[int, int]) -> str | None:
        """Reason why the layout cannot hold a linear of `shape` (O, I); None when it can."""
        del shape
        if (mixed := why_not_mixed(scheme)) is not None:
            return mixed
        same = (scheme.weights, scheme.input) == (_SCHEME.weights, _SCHEME.input)
        return None if same else f"scheme {scheme.name}, the layout holds {_SCHEME.name}"

    def tensor_names(self, name: str, scheme: LinearScheme) -> tuple[str, ...]:
        """Names of the tensors that hold the linear `name` (without `.weight`)."""
        del scheme
        return f"{name}.weight{_BLOCKS}", f"{name}.weight{_SCALES}"

    def encode(
        self, name: str, linear: QuantizedLinear, *, scale_dtype: torch.dtype
    ) -> dict[str, Tensor]:
        """Tensors of a linear; see `WeightLayout.encode`.

        `scale_dtype` is not read: scales are exponents.
        """
        del scale_dtype
        if _EXPERT.fullmatch(name) is None:
            raise UnsupportedError(
                f"{name}: no linear of an expert of gpt-oss; {NAME} holds these alone", _LEAVE
            )
        linear.weight.validate(name)
        parts = (
            microscaling.pack_e2m1(linear.weight.qvalue),
            microscaling.pack_e8m0(linear.weight.scale),
        )
        return dict(zip(self.tensor_names(name, linear.scheme), parts, strict=True))

    def decode(
        self, name: str, tensors: Mapping[str, Tensor], scheme: LinearScheme
    ) -> QuantizedLinear:
        """The linear; see `TensorLayout.decode`."""
        linear = self.packed(name, tensors, scheme)
        values = microscaling.unpack_e2m1(linear.codes)
        weight = checked(name, QTensor(qvalue=values, scale=linear.scale, scheme=scheme.weights))
        return QuantizedLinear(weight=weight, scheme=scheme)

    def packed(
        self, name: str, tensors: Mapping[str, Tensor], scheme: LinearScheme
    ) -> PackedLinear:
        """The linear with its codes as stored; see `PackedLayout.packed`."""
        blocks, scales = self.tensor_names(name, scheme)
        packed = matrix(tensors, blocks)
        rows, width = packed.shape[0], 2 * packed.shape[1]
        packed = tensor(tensors, blocks, (torch.uint8,), tuple(packed.shape))
        codes = tensor(tensors, scales, (torch.uint8,), (rows, width // _GROUP))
        if bad := int((codes == microscaling.NAN_E8M0).sum()):
            raise InputError(f"{scales}: {bad} of {codes.numel()} scales are NaN", _AGAIN)
        return PackedLinear(codes=packed, scale=microscaling.unpack_e8m0(codes), scheme=scheme)

    def quantization_config(
        self,
        schemes: Mapping[str, LinearScheme],
        *,
        ignore: Sequence[str],
        model_type: str,
        modules: Mapping[str, str] = SAME_NAMES,
    ) -> dict[str, Any]:
        """The `quantization_config` of config.json; see `WeightLayout.quantization_config`."""
        del schemes, ignore, modules
        if model_type != _MODEL_TYPE:
            raise UnsupportedError(
                f"model type {model_type}, format {NAME} is of {_MODEL_TYPE}",
                "use compressed-tensors",
            )
        return {"quant_method": METHOD, "modules_to_not_convert": list(_PLAIN)}

    def schemes(
        self,
        config: Mapping[str, Any],
        shapes: Mapping[str, tuple[int, int]],
        infos: Infos,
        modules: Mapping[str, str] = SAME_NAMES,
    ) -> dict[str, LinearScheme]:
        """Scheme of each quantized linear; see `WeightLayout.schemes`."""
        del config, modules
        return {name: _SCHEME for name in shapes if f"{name}.weight{_BLOCKS}" in infos}


def layout_of(config: Mapping[str, Any], infos: Infos) -> MXFP4Layout | None:
    """The layout if a quantization_config names it; None for one of another method."""
    del infos
    return MXFP4Layout() if config.get("quant_method") == METHOD else None


def split(infos: Infos) -> dict[str, SplitTensor]:
    """Tensors of all stacks, and the share that each linear of an expert has of them.

    Args:
        infos: headers of all tensors as the files have them.

    Raises:
        InputError: blocks without scales, scales without blocks, or a wrong dtype or shape of one
            of them.
        UnsupportedError: a stack of linears that gpt-oss does not have.
    """
    tensors: dict[str, SplitTensor] = {}
    for key, info in infos.items():
        stack = key.removesuffix(_BLOCKS)
        if key.endswith(_SCALES) and f"{key.removesuffix(_SCALES)}{_BLOCKS}" not in infos:
            raise InputError(f"{key}: scales, and no {key.removesuffix(_SCALES)}{_BLOCKS}", _AGAIN)
        if stack == key:
            continue
        experts, _, leaf = stack.rpartition(".")
        if leaf not in _LINEARS:
            raise UnsupportedError(
                f"{key}: experts in {' and '.join(_LINEARS)} are known",
                "use a folder of compressed-tensors",
            )
        scales = infos.get(f"{stack}{_SCALES}")
        _require_pair(info, scales, f"{stack}{_SCALES}", turns=len(_LINEARS[leaf]))
        count, rows, groups, _ = info.shape
        whole = _stack(stack, count=count, rows=rows, groups=groups)
        tensors |= {name: one for name, one in whole.items() if name in infos}
    return tensors


def stacks(shapes: Mapping[str, tuple[int, int]]) -> dict[str, SplitTensor]:
    """Stacks that stand for experts in a folder that is written, and the share of each linear.

    Args:
        shapes: name of each quantized linear -> (O, I).
    """
    counts, stacked = dict[str, int](), dict[str, SplitTensor]()
    for match in filter(None, map(_EXPERT.fullmatch, shapes)):
        counts[match["experts"]] = max(counts.get(match["experts"], 0), 1 + int(match["number"]))
    for experts, count in counts.items():
        for leaf, linears in _LINEARS.items():
            rows, columns = shapes.get(f"{experts}.0.{linears[0]}", (0, 0))
            stacked |= _stack(
                f"{experts}.{leaf}", count=count, rows=rows * len(linears), groups=columns // _GROUP
            )
    return stacked


def _stack(stack: str, *, count: int, rows: int, groups: int) -> dict[str, SplitTensor]:
    """Blocks, scales and bias of a stack, and the shares of its linears.

    The stack has `count` experts of `rows` rows, each of `groups` groups.
    """
    experts, _, leaf = stack.rpartition(".")
    size = _GROUP // 2
    stacked = {}
    for ending, kind, row, shape in (
        (_BLOCKS, f"weight{_BLOCKS}", (groups * size,), (groups, size)),
        (_SCALES, f"weight{_SCALES}", (groups,), (groups,)),
        (_BIAS, "bias", (), ()),
    ):
        parts = _shares(f"{experts}.{{}}.{{}}.{kind}", _LINEARS[leaf], count, rows, row)
        stacked[f"{stack}{ending}"] = SplitTensor(shape=(count, rows, *shape), parts=tuple(parts))
    return stacked


def _shares(
    name: str, linears: Sequence[str], count: int, rows: int, row: tuple[int, ...]
) -> Iterator[TensorPart]:
    """Yield the rows of each linear of each of `count` experts, whose rows take turns.

    Args:
        name: name of a share, with {} for the number of the expert and for the linear.
        linears: linears of an expert.
        count: number of experts.
        rows: rows of an expert, those of all its linears.
        row: shape of one row.
    """
    turns, width = len(linears), row[0] if row else 1
    strides = (turns * width, *(1 for _ in row))
    for number in range(count):
        for turn, linear in enumerate(linears):
            start = (number * rows + turn) * width
            yield TensorPart(
                name=name.format(number, linear),
                shape=(rows // turns, *row),
                strides=strides,
                start=start,
            )


def _require_pair(blocks: TensorInfo, scales: TensorInfo | None, name: str, *, turns: int) -> None:
    """Refuse blocks and scales that do not belong together.

    Args:
        blocks: header of a stack's blocks.
        scales: header of its scales; None where they are missing.
        name: name of the scales.
        turns: linears whose rows are in the stack.

    Raises:
        InputError: the two disagree; the tensor is named.
    """
    if scales is None:
        raise InputError(f"{name}: missing, {blocks.name} is there", _AGAIN)
    for each in (blocks, scales):
        if each.dtype != "U8":
            raise InputError(f"{each.name}: is {each.dtype}, U8 is needed", _AGAIN)
    if len(blocks.shape) != 4 or blocks.shape != (*scales.shape, _GROUP // 2):
        cause = (
            f"{blocks.name}: is {list(blocks.shape)}, {name} is {list(scales.shape)}: "
            f"{_GROUP // 2} bytes to a scale"
        )
        raise InputError(cause, _AGAIN)
    if blocks.shape[1] % turns:
        raise InputError(
            f"{blocks.name}: {blocks.shape[1]} rows of {turns} linears that take turns", _AGAIN
        )
