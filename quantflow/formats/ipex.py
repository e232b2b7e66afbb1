"""The low-precision checkpoint of Intel's extension for PyTorch (IPEX).

neural-compressor's weight-only export writes it. The weights are one file of torch.save,
`gptq_checkpoint_g128.pt`, beside a config.json that does not speak of them. A linear called NAME of
G = I / group_size groups is stored as

| tensor             | dtype, shape           | content                                          |
|--------------------|------------------------|--------------------------------------------------|
| NAME.packed_weight | int32 [O, ceil(I / 8)] | qvalue + 8; a word has eight inputs of a row     |
| NAME.scale         | [O, G]                 | scale                                            |
| NAME.packed_zp     | int32 [O, ceil(G / 8)] | zero_point + 8; a word has eight groups of a row |
| NAME.gptq_perm     | int64 [I], or missing  | the input that each column belongs to            |

1. The first of eight has the lowest bits. Only 4 bits are known.
2. A group has I / G inputs; one group is a scale per row.
3. Symmetric weights are stored with zero points of 8. Read again they are weights with zero points,
   of the same values.
4. A file without zero points is of symmetric weights, whose codes are two's complement: the lowest
   four bits of qvalue.
5. IPEX 2.8 takes GPTQ's and AWQ's layouts instead, and none of these names.
6. Other names are told by the folder (`quantflow.files.checkpoint.KEYS`): neural-compressor 3 packs
   so under `qweight`, `scales` and `qzeros`, without its option `use_optimum_format`.

Source: neural_compressor 3.x, `WeightOnlyLinear.pack` (compression_dtype int32, compression_dim 1),
and IPEX 2.1, `ipex.optimize_transformers(low_precision_checkpoint=...)`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quantflow.core import packing
from quantflow.core.groups import group_size_for
from quantflow.core.qtensor import QTensor, QuantizedLinear
from quantflow.core.scheme import LinearScheme, named
from quantflow.errors import InputError, SchemeError, UnsupportedError
from quantflow.files.checkpoint import KEYS, LOW_PRECISION, LOW_PRECISION_NAME
from quantflow.formats.weight_layout import (
    SAME_NAMES,
    Infos,
    beside_positive,
    checked,
    integers,
    matrix,
    only_scheme,
    scales,
    stored_scales,
    tensor,
    why_not_integers,
    zero_point_of,
)

NAME = "ipex"
METHOD = LOW_PRECISION[0]
_BITS, _PER_WORD = 4, 8
_WEIGHT, _SCALE, _ZEROS = (KEYS[key] for key in ("weight_key", "scale_key", "zero_point_key"))
_ORDER = "gptq_perm"


@dataclass(frozen=True, kw_only=True)
class IPEXLayout:
    """The layout.

    Attributes:
        reordered: whether `gptq_perm` names the inputs of the columns.
        bare: whether there are no zero points, as in files that others wrote.
    """

    reordered: bool = False
    bare: bool = False

    @property
    def name(self) -> str:
        """Key of the layout in `quantflow.formats.LAYOUTS`."""
        return NAME

    def with_order(self) -> "IPEXLayout":
        """The layout as it is written where groups are of inputs that lie apart."""
        return IPEXLayout(reordered=True, bare=self.bare)

    def why_not(self, scheme: LinearScheme, shape: tuple[int, int]) -> str | None:
        """Reason why the layout cannot hold a linear of `shape` (O, I); None when it can."""
        held = "the layout holds integers of 4 bits per group"
        if (reason := why_not_integers(scheme, (_BITS,), held)) is not None:
            return reason
        if scheme.weights.group_size is None and shape[1] % _PER_WORD:
            return (
                f"in_features={shape[1]} with a scale per row, whole words hold multiples of "
                f"{_PER_WORD}"
            )
        return None

    def tensor_names(self, name: str, scheme: LinearScheme) -> tuple[str, ...]:
        """Names of the tensors that hold the linear `name` (without `.weight`)."""
        del scheme
        parts = [
            _WEIGHT,
            _SCALE,
            *([] if self.bare else [_ZEROS]),
            *([_ORDER] if self.reordered else []),
        ]
        return tuple(f"{name}.{part}" for part in parts)

    def encode(
        self, name: str, linear: QuantizedLinear, *, scale_dtype: torch.dtype
    ) -> dict[str, Tensor]:
        """Tensors of a linear; see `WeightLayout.encode`."""
        weight = linear.weight
        weight.validate(name)
        if linear.order is not None and not self.reordered:
            raise UnsupportedError(
                f"{name}: its groups are of inputs that do not stand together, and no other "
                "linear's are",
                "export the whole folder",
            )
        qvalue, zero_point = beside_positive(weight.qvalue, zero_point_of(weight), weight.scale)
        tensors = {
            f"{name}.{_WEIGHT}": packing.pack(qvalue, _BITS),
            f"{name}.{_SCALE}": stored_scales(name, weight.scale.abs(), scale_dtype),
            f"{name}.{_ZEROS}": packing.pack(zero_point, _BITS),
        }
        if self.reordered:
            order = torch.arange(qvalue.shape[1]) if linear.order is None else linear.order
            tensors[f"{name}.{_ORDER}"] = order.to(torch.int64)
        return tensors

    def decode(
        self, name: str, tensors: Mapping[str, Tensor], scheme: LinearScheme
    ) -> QuantizedLinear:
        """The linear; see `TensorLayout.decode`."""
        weights = scheme.weights
        rows, groups = matrix(tensors, f"{name}.{_SCALE}", "[out_features, groups]").shape
        packed = tensors.get(f"{name}.{_WEIGHT}")
        word_count = -1 if packed is None or packed.ndim != 2 else packed.shape[1]
        columns = (
            groups * weights.group_size
            if weights.group_size is not None
            else word_count * _PER_WORD
        )
        try:
            group_count = (
                columns // group_size_for(weights, columns, name=f"{name}.{_WEIGHT}")
                if columns > 0
                else groups
            )
        except SchemeError as error:
            raise InputError(error.cause, "make the checkpoint again") from error
        packed = tensor(
            tensors, f"{name}.{_WEIGHT}", (torch.int32,), (rows, -(-columns // _PER_WORD))
        )
        scale = scales(tensors, f"{name}.{_SCALE}", (rows, group_count), weights)
        zero_point = None
        if not weights.symmetric:
            zeros = tensor(
                tensors, f"{name}.{_ZEROS}", (torch.int32,), (rows, -(-groups // _PER_WORD))
            )
            zero_point = packing.unpack(zeros, _BITS, groups)
        qvalue = packing.unpack(packed, _BITS, columns)
        if self.bare:
            qvalue ^= -(1 << (_BITS - 1))  # `unpack` took them for codes above the lowest one
        weight = QTensor(qvalue=qvalue, scale=scale, zero_point=zero_point, scheme=weights)
        return QuantizedLinear(
            weight=checked(name, weight), scheme=scheme, order=self._order(name, tensors, columns)
        )

    def _order(self, name: str, tensors: Mapping[str, Tensor], columns: int) -> Tensor | None:
        if not self.reordered:
            return None
        key = f"{name}.{_ORDER}"
        order = tensor(tensors, key, (torch.int64, torch.int32), (columns,)).to(torch.int64)
        if not torch.equal(order.sort().values, torch.arange(columns)):
            raise InputError(
                f"{key}: does not hold each of {columns} inputs once", "make the checkpoint again"
            )
        return None if torch.equal(order, torch.arange(columns)) else order

    def quantization_config(
        self,
        schemes: Mapping[str, LinearScheme],
        *,
        ignore: Sequence[str],
        model_type: str,
        modules: Mapping[str, str] = SAME_NAMES,
    ) -> dict[str, Any]:
        """An empty table: config.json says nothing. See `WeightLayout.quantization_config`."""
        del ignore, model_type, modules
        only_scheme(schemes, NAME)
        return {}

    def schemes(
        self,
        config: Mapping[str, Any],
        shapes: Mapping[str, tuple[int, int]],
        infos: Infos,
        modules: Mapping[str, str] = SAME_NAMES,
    ) -> dict[str, LinearScheme]:
        """Scheme of each quantized linear; see `WeightLayout.schemes`."""
        del config
        by_name = {}
        for name, (rows, columns) in shapes.items():
            if f"{name}.{_WEIGHT}" not in infos:
                continue
            scale = infos.get(f"{name}.{_SCALE}")
            groups = scale.shape[1] if scale is not None and len(scale.shape) == 2 else 0
            if not groups or columns % groups or scale is None or scale.shape[0] != rows:
                problem = "missing" if scale is None else f"is {list(scale.shape)}"
                cause = (
                    f"{name}.{_SCALE}: {problem}, [{rows}, groups] that divide {columns} inputs is "
                    "needed"
                )
                raise InputError(cause, "check that config.json belongs to this checkpoint")
            size = -1 if groups == 1 else columns // groups
            by_name[name] = named(
                integers(_BITS, size, symmetric=self.bare, where=name), None, "pack-quantized"
            )
        return by_name


def file_name(schemes: Mapping[str, LinearScheme]) -> str:
    """Name of the file in the words of the programs that write it; `schemes` are all alike."""
    size = next(iter(schemes.values())).weights.group_size
    return f"{LOW_PRECISION_NAME}{-1 if size is None else size}.pt"


def layout_of(config: Mapping[str, Any], infos: Infos) -> IPEXLayout | None:
    """The layout if a folder has such a checkpoint; None for another method."""
    if config.get("quant_method") != METHOD:
        return None
    return IPEXLayout(
        reordered=any(name.endswith(f".{_ORDER}") for name in infos),
        bare=not any(name.endswith(f".{_ZEROS}") for name in infos),
    )
