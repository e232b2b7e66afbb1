"""FP8 checkpoints with `quant_method` fp8: DeepSeek's blocks, and vLLM's one scale per tensor.

| `weight_block_size`   | tensors of a linear called NAME                                       |
|-----------------------|-----------------------------------------------------------------------|
| [g, g]                | NAME.weight e4m3fn [O, I], NAME.weight_scale_inv [ceil(O / g), I / g] |
| none, inputs dynamic  | NAME.weight e4m3fn [O, I], NAME.weight_scale, one number              |
| none, inputs static   | these, and NAME.input_scale, one number                               |

1. transformers and vLLM read blocks. Their inputs have a scale per token and g features; other
   dynamic inputs have a scale per token.
2. Without blocks, transformers and what is published for it have NAME.weight_scale_inv in the place
   of NAME.weight_scale, and NAME.activation_scale in that of NAME.input_scale. Both are read.
   vLLM's names are written; transformers does not look for them.
3. All scales multiply, `weight_scale_inv` too.
4. `scale_fmt` ue8m0 means scales of blocks that are powers of two, and scales of inputs that are
   rounded up to powers of two at run time. The former are stored as float32 (DeepSeek-V3.1, V3.2)
   or as exponents of a byte, e8m0 or uint8. A float32 counts as it is, whatever it is.

Source: transformers 5.23, `integrations/finegrained_fp8.py`; vLLM 0.11, `quantization/fp8.py`;
arXiv:2412.19437, section 3.3; deepseek-ai/DeepSeek-V3.2-Exp, `inference/model.py`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from quantflow.core import microscaling
from quantflow.core.groups import expand_rows
from quantflow.core.qtensor import QTensor, QuantizedLinear
from quantflow.core.scheme import LinearScheme, TensorScheme, named
from quantflow.errors import UnsupportedError
from quantflow.formats.weight_layout import (
    SAME_NAMES,
    Infos,
    checked,
    matrix,
    only_scheme,
    scales,
    single_scale,
    tensor,
    why_not_mixed,
)

NAME = "fp8"
METHOD = "fp8"
_STORED = "F8_E4M3"  # e4m3fn in safetensors' words
_FMT = ("e4m3", "float8_e4m3fn", "float8_e4m3")  # in configurations' words; the first is written
_FLOAT, _POWERS = "float", "ue8m0"  # scale_fmt
_OF_BLOCKS, _OF_INPUTS = "weight_scale_inv", "activation_scale"  # transformers' names of scales


@dataclass(frozen=True, kw_only=True)
class FP8Layout:
    """The layout; the scheme of a linear says its kind.

    Attributes:
        reordered: always False: there is no g_idx.
        scale, input_scale: names of the scales inside a linear, in a folder without blocks.
    """

    reordered: bool = False
    scale: str = "weight_scale"
    input_scale: str = "input_scale"

    @property
    def name(self) -> str:
        """Key of the layout in `quantflow.formats.LAYOUTS`."""
        return NAME

    def with_order(self) -> "FP8Layout":
        """The layout itself: it has no words for groups of inputs that do not stand together."""
        return self

    def why_not(self, scheme: LinearScheme, shape: tuple[int, int]) -> str | None:
        """Reason why the layout cannot hold a linear of `shape` (O, I); None when it can."""
        del shape
        weights, inputs = scheme.weights, scheme.input
        if (mixed := why_not_mixed(scheme)) is not None:
            return mixed
        for part in (weights, inputs):
            if (
                part is not None
                and (part.kind, part.num_bits) == ("float", 8)
                and part.float8 != "e4m3fn"
            ):
                return f"scheme {scheme.name} has float8 of {part.float8}, the layout holds e4m3fn"
        if weights.kind != "float" or weights.num_bits != 8:
            return (
                f"scheme {scheme.name} has weights of {weights.kind}{weights.num_bits}, the layout "
                "holds e4m3fn"
            )
        granularities = {
            "per_block": ("per_group",),
            "per_tensor": ("per_token", "per_tensor"),
        }.get(weights.granularity, ())
        if inputs is None or inputs.kind != "float" or inputs.granularity not in granularities:
            taken = "as they are" if inputs is None else inputs.granularity.replace("_", " ")
            held = weights.granularity.replace("_", " ")
            return (
                f"scheme {scheme.name} has weights {held} and inputs {taken}; the layout has "
                "blocks, or one scale per tensor"
            )
        return None

    def tensor_names(self, name: str, scheme: LinearScheme) -> tuple[str, ...]:
        """Names of the tensors that hold the linear `name` (without `.weight`)."""
        blocks = scheme.weights.granularity == "per_block"
        static = scheme.input is not None and not scheme.input.dynamic
        parts = [
            "weight",
            _OF_BLOCKS if blocks else self.scale,
            *([self.input_scale] if static else []),
        ]
        return tuple(f"{name}.{part}" for part in parts)

    def encode(
        self, name: str, linear: QuantizedLinear, *, scale_dtype: torch.dtype
    ) -> dict[str, Tensor]:
        """Tensors of a linear; see `WeightLayout.encode`.

        `scale_dtype` is not read: scales are float32.
        """
        del scale_dtype
        weight, scheme = linear.weight, linear.weight.scheme
        weight.validate(name)
        codes, scale, *inputs = self.tensor_names(name, linear.scheme)
        blocks = scheme.granularity == "per_block"
        tensors = {
            codes: weight.qvalue,
            scale: weight.scale[:: scheme.block_rows].contiguous()
            if blocks
            else weight.scale[0, 0],
        }
        if linear.input_scale is not None:
            tensors[inputs[0]] = linear.input_scale[0]
        # safetensors refuses tensors that share memory
        return {key: value.clone() for key, value in tensors.items()}

    def decode(
        self, name: str, tensors: Mapping[str, Tensor], scheme: LinearScheme
    ) -> QuantizedLinear:
        """The linear; see `TensorLayout.decode`."""
        weights = scheme.weights
        weight, scale, *inputs = self.tensor_names(name, scheme)
        codes = matrix(tensors, weight)
        shape: tuple[int, ...] = ()
        if weights.granularity == "per_block":
            size = weights.block_rows
            if codes.shape[1] % size:
                cause = (
                    f"{weight}: {codes.shape[1]} input features, blocks of {size} do not divide "
                    "them"
                )
                raise UnsupportedError(cause, "use a folder whose blocks divide its linears")
            shape = (-(-codes.shape[0] // size), codes.shape[1] // size)
        codes = tensor(tensors, weight, (torch.float8_e4m3fn,), tuple(codes.shape))
        if shape:
            of_blocks = _scales_of_blocks(tensors, scale, shape, scheme)
            stored = expand_rows(of_blocks, weights.block_rows, len(codes))
        else:
            stored = single_scale(tensors, scale, weights).reshape(1, 1)
        input_scale = single_scale(tensors, inputs[0], weights).reshape(1) if inputs else None
        qtensor = QTensor(qvalue=codes, scale=stored, scheme=weights)
        return QuantizedLinear(
            weight=checked(name, qtensor), scheme=scheme, input_scale=input_scale
        )

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
        first = only_scheme(schemes, NAME)
        size = first.weights.group_size
        powers = first.input is not None and first.input.rounds_at_run_time
        return {
            "quant_method": METHOD,
            "fmt": _FMT[0],
            "activation_scheme": "dynamic"
            if first.input is None or first.input.dynamic
            else "static",
            "weight_block_size": None if size is None else [size, size],
            **({"scale_fmt": _POWERS} if powers else {}),
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
        activation = config.get("activation_scheme", "dynamic")
        blocks = config.get("weight_block_size")
        if activation not in ("dynamic", "static") or (
            blocks is not None and activation != "dynamic"
        ):
            cause = (
                f"config.json: activation_scheme {activation!r} with weight_block_size {blocks!r}"
            )
            raise UnsupportedError(cause, "use dynamic, or static without blocks")
        scale_fmt = config.get("scale_fmt") or _FLOAT
        if scale_fmt not in (_FLOAT, _POWERS) or (scale_fmt == _POWERS and blocks is None):
            cause = f"config.json: scale_fmt {scale_fmt!r} with weight_block_size {blocks!r}"
            raise UnsupportedError(cause, f"use {_FLOAT}, or {_POWERS} with blocks")
        if config.get("fmt", _FMT[0]) not in _FMT:
            cause = f"config.json: fmt {config['fmt']!r}, {', '.join(_FMT)} are known"
            raise UnsupportedError(cause, "use a folder of e4m3 weights")
        size = None
        if blocks is not None:
            square = (
                isinstance(blocks, list)
                and len(blocks) == 2
                and blocks[0] == blocks[1]
                and type(blocks[0]) is int
            )
            if not square or blocks[0] < 1:
                raise UnsupportedError(
                    f"config.json: weight_block_size {blocks!r}",
                    "use square blocks, such as [128, 128]",
                )
            size = blocks[0]
        granularity: Any = "per_tensor" if size is None else "per_block"
        weights = TensorScheme(kind="float", num_bits=8, granularity=granularity, group_size=size)
        inputs = TensorScheme(kind="float", num_bits=8, granularity="per_tensor")
        if activation == "dynamic":
            granularity = "per_token" if size is None else "per_group"
            inputs = TensorScheme(
                kind="float", num_bits=8, granularity=granularity, group_size=size, dynamic=True
            )
        scheme = named(weights, inputs, "float-quantized")
        if scale_fmt == _POWERS:
            scheme = replace(scheme, input=replace(inputs, scale_rounding="pow2"))
        return {
            name: scheme
            for name in shapes
            if (i := infos.get(f"{name}.weight")) is not None and i.dtype == _STORED
        }


def _scales_of_blocks(
    tensors: Mapping[str, Tensor], key: str, shape: tuple[int, ...], scheme: LinearScheme
) -> Tensor:
    """Scales of blocks, float32 of `shape`, from floats or from exponents of a byte."""
    stored = tensors.get(key)
    powers = scheme.input is not None and scheme.input.rounds_at_run_time
    exponents = (torch.float8_e8m0fnu, *((torch.uint8,) if powers else ()))
    if stored is not None and stored.dtype in exponents:
        tensors = {key: microscaling.unpack_e8m0(stored.view(torch.uint8))}
    return scales(tensors, key, shape, scheme.weights)


def layout_of(config: Mapping[str, Any], infos: Infos) -> FP8Layout | None:
    """The layout if a quantization_config names it; None for one of another method."""
    if config.get("quant_method") != METHOD:
        return None
    usual, leaves = FP8Layout(), {name.rpartition(".")[2] for name in infos}
    return FP8Layout(
        scale=_OF_BLOCKS if _OF_BLOCKS in leaves else usual.scale,
        input_scale=_OF_INPUTS if _OF_INPUTS in leaves else usual.input_scale,
    )


def who_reads(schemes: Mapping[str, LinearScheme]) -> str | None:
    """Sentence on the programs that read these linears; None where all programs of fp8 do."""
    if all(scheme.weights.granularity == "per_block" for scheme in schemes.values()):
        return None
    return (
        "one scale per tensor under vLLM's names: for vLLM alone, transformers does not read them "
        "and computes something else"
    )
