"""AWQ's gemm layout, which AutoAWQ and AutoRound write and vLLM, TGI and transformers read.

AutoRound names it `auto_round:auto_awq`. A linear called NAME of G = I / group_size groups is
stored as

| tensor       | dtype, shape         | content                                       |
|--------------|----------------------|-----------------------------------------------|
| NAME.qweight | int32 [I, O / 8]     | qvalue + 8; a word has eight outputs of a row |
| NAME.qzeros  | int32 [G, O / 8]     | zero_point + 8, in the same order             |
| NAME.scales  | [G, O]               | scale                                         |

1. Nibble i of a word, lowest first, is output ORDER[i] of the eight. Only 4 bits are known.
2. Symmetric weights are stored with zero points of 8. Read again they are weights with zero points,
   of the same values.
3. AutoRound's symmetric weights may have negative scales. Here scales beside zero points are
   positive: codes and zero points of such groups are complemented.

Source: github.com/casper-hansen/AutoAWQ 0.2.9, `awq/modules/linear/gemm.py` and
`awq/utils/packing_utils.py`; github.com/intel/auto-round 0.16.1,
`auto_round/export/export_to_awq/utils.py`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from quantflow.core import packing
from quantflow.core.groups import group_size_for
from quantflow.core.qtensor import QTensor, QuantizedLinear
from quantflow.core.scheme import LinearScheme, named
from quantflow.errors import InputError, SchemeError, UnsupportedError
from quantflow.formats.weight_layout import (
    AUTO_ROUND,
    SAME_NAMES,
    Infos,
    beside_positive,
    checked,
    flag,
    integers,
    matrix,
    number,
    only_scheme,
    scales,
    stored_scales,
    tensor,
    why_not_integers,
    zero_point_of,
)

NAME = "awq"
METHOD = "awq"
VERSION = "gemm"
ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_PARTS = ("qweight", "qzeros", "scales")
_BITS, _PER_WORD = 4, 8


@dataclass(frozen=True, kw_only=True)
class AWQLayout:
    """The layout; it has one version here.

    Attributes:
        reordered: always False: there is no g_idx.
    """

    reordered: bool = False

    @property
    def name(self) -> str:
        """Key of the layout in `quantflow.formats.LAYOUTS`."""
        return NAME

    def with_order(self) -> "AWQLayout":
        """The layout itself: it has no words for groups of inputs that do not stand together."""
        return self

    def why_not(self, scheme: LinearScheme, shape: tuple[int, int]) -> str | None:
        """Reason why the layout cannot hold a linear of `shape` (O, I); None when it can."""
        held = "the layout holds integers of 4 bits per group"
        if (reason := why_not_integers(scheme, (_BITS,), held)) is not None:
            return reason
        if shape[0] % _PER_WORD:
            return f"out_features={shape[0]}, whole words hold multiples of {_PER_WORD}"
        return None

    def tensor_names(self, name: str, scheme: LinearScheme) -> tuple[str, ...]:
        """Names of the tensors that hold the linear `name` (without `.weight`)."""
        del scheme
        return tuple(f"{name}.{part}" for part in _PARTS)

    def encode(
        self, name: str, linear: QuantizedLinear, *, scale_dtype: torch.dtype
    ) -> dict[str, Tensor]:
        """Tensors of a linear; see `WeightLayout.encode`."""
        weight = linear.weight
        weight.validate(name)
        if linear.order is not None:
            raise UnsupportedError(
                f"{name}: its groups are of inputs that do not stand together, the layout has no "
                "g_idx",
                "keep it in a layout with g_idx and desc_act",
            )
        qvalue, zero_point = beside_positive(weight.qvalue, zero_point_of(weight), weight.scale)
        return {
            f"{name}.qweight": _pack(qvalue.T),
            f"{name}.qzeros": _pack(zero_point.T),
            f"{name}.scales": stored_scales(name, weight.scale.abs(), scale_dtype).T.contiguous(),
        }

    def decode(
        self, name: str, tensors: Mapping[str, Tensor], scheme: LinearScheme
    ) -> QuantizedLinear:
        """The linear; see `TensorLayout.decode`."""
        weights, word_dtypes = scheme.weights, (torch.int32,)
        packed = matrix(tensors, f"{name}.qweight", "[in_features, words]")
        columns, rows = packed.shape[0], packed.shape[1] * _PER_WORD
        packed = tensor(tensors, f"{name}.qweight", word_dtypes, (columns, rows // _PER_WORD))
        try:
            groups = columns // group_size_for(weights, columns, name=f"{name}.qweight")
        except SchemeError as error:
            raise InputError(error.cause, "check group_size in config.json") from error
        either = replace(weights, symmetric=True)  # scales of symmetric weights have either sign
        scale = scales(tensors, f"{name}.scales", (groups, rows), either).T.contiguous()  # [O, G]
        zeros = tensor(tensors, f"{name}.qzeros", word_dtypes, (groups, rows // _PER_WORD))
        zero_point = _unpack(zeros).T.contiguous()
        if (bad := (scale < 0) & (zero_point != 0)).any():
            cause = (
                f"{name}.scales: scale {scale[bad][0].item()} beside zero point "
                f"{int(zero_point[bad][0]) + 8}"
            )
            raise InputError(
                f"{cause}, a scale beside another than 8 is positive", "download the folder again"
            )
        qvalue, zero_point = beside_positive(_unpack(packed).T.contiguous(), zero_point, scale)
        weight = QTensor(qvalue=qvalue, scale=scale.abs(), zero_point=zero_point, scheme=weights)
        return QuantizedLinear(weight=checked(name, weight), scheme=scheme)

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
        return {
            "quant_method": METHOD,
            "version": VERSION,
            "bits": _BITS,
            "group_size": weights.group_size or -1,
            "zero_point": True,
            "modules_to_not_convert": list(ignore),
        }

    def schemes(
        self,
        config: Mapping[str, Any],
        shapes: Mapping[str, tuple[int, int]],
        infos: Infos,
        modules: Mapping[str, str] = SAME_NAMES,
    ) -> dict[str, LinearScheme]:
        """Scheme of each quantized linear; see `WeightLayout.schemes`."""
        del modules
        bits = number(config, "bits", "w_bit")
        group_size = number(config, "group_size", "q_group_size")
        flag(config, "zero_point", default=True)
        if bits != _BITS:
            raise UnsupportedError(
                f"config.json: bits is {bits}, words of the {VERSION} layout hold 4",
                "check the folder",
            )
        by_name = {}
        for name in shapes:
            if f"{name}.qweight" in infos:
                by_name[name] = named(
                    integers(bits, group_size, symmetric=False, where=name), None, "pack-quantized"
                )
        return by_name


def _pack(codes: Tensor) -> Tensor:
    """Words, int32 [R, O / 8], of codes in -8..7, int8 [R, O]."""
    rows, columns = codes.shape
    eights = codes.reshape(rows, columns // _PER_WORD, _PER_WORD)  # [R, O / 8, 8]
    return packing.pack(eights[:, :, list(ORDER)].reshape(rows, columns), _BITS)


def _unpack(words: Tensor) -> Tensor:
    """Undo `_pack`."""
    rows, columns = words.shape[0], words.shape[1] * _PER_WORD
    # [R, O / 8, 8]
    eights = packing.unpack(words, _BITS, columns).reshape(rows, words.shape[1], _PER_WORD)
    back = sorted(range(_PER_WORD), key=ORDER.__getitem__)
    return eights[:, :, back].reshape(rows, columns)


def layout_of(config: Mapping[str, Any], infos: Infos) -> AWQLayout | None:
    """The layout if a quantization_config names it; None for one of another method.

    Raises:
        UnsupportedError: another version of the layout.
    """
    del infos
    method = config.get("quant_method")
    if method in AUTO_ROUND:
        packing_format = str(config.get("packing_format") or config.get("backend") or "")
        return AWQLayout() if packing_format.endswith((":auto_awq", ":awq")) else None
    if method != METHOD:
        return None
    version = str(config.get("version") or VERSION).lower()
    if version != VERSION:
        raise UnsupportedError(
            f"config.json: AWQ version {version!r}, {VERSION} is known",
            f"pack the folder as {VERSION}",
        )
    return AWQLayout()
