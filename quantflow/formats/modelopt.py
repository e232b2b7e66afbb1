"""The layout of NVIDIA's Model Optimizer, which TensorRT-LLM, vLLM and SGLang read.

| `quant_algo`              | tensors of a linear called NAME                                      |
|---------------------------|----------------------------------------------------------------------|
| FP8                       | NAME.weight e4m3fn [O, I],                                           |
|                           | NAME.weight_scale and NAME.input_scale, float32 []                   |
| FP8_PER_CHANNEL_PER_TOKEN | NAME.weight e4m3fn [O, I], NAME.weight_scale float32 [O]             |
| MXFP8                     | NAME.weight e4m3fn [O, I], NAME.weight_scale uint8 [O, I / 32], e8m0 |
| NVFP4                     | NAME.weight uint8 [O, I / 2] (e2m1),                                 |
|                           | NAME.weight_scale e4m3fn [O, I / 16],                                |
|                           | NAME.weight_scale_2 and NAME.input_scale, float32 []                 |
| W4A16_NVFP4               | the same without NAME.input_scale                                    |
| a KV cache in FP8         | ATTENTION.k_proj.k_scale, ATTENTION.v_proj.v_scale, float32 []       |

1. All of these numbers multiply: weight_scale_2 and the input_scale of NVFP4 are 1 / global_scale.
2. A group of NVFP4 whose scale is 0 is one of zeros, whatever its codes are. It is read as zero
   codes beside a scale of 1.
3. A folder has one algorithm. config.json names it in the words of compressed-tensors,
   hf_quant_config.json in those that older readers look for.
4. The KV cache is FP8 where `kv_cache_quant_algo` is FP8, or `kv_cache_scheme` is float of 8 bits.
   That is read, and not written.

Source: vLLM 0.32, `model_executor/layers/quantization/modelopt.py`, which loads them; Model
Optimizer, `modelopt/torch/export/{convert_hf_config,unified_export_hf}.py`, which writes them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quantflow.core import affine, float8, microscaling
from quantflow.core.groups import to_groups
from quantflow.core.kv_scheme import kv_scheme
from quantflow.core.qtensor import QTensor, QuantizedLinear
from quantflow.core.scheme import LinearScheme, TensorScheme, preset
from quantflow.errors import InputError, UnsupportedError
from quantflow.formats.weight_layout import (
    SAME_NAMES,
    Infos,
    checked,
    matrix,
    only_scheme,
    require_same_scales,
    scales,
    single_scale,
    tensor,
    why_not_mixed,
)

NAME = "modelopt"
METHOD = "modelopt"
CONFIG_BESIDE = "hf_quant_config.json"
_INSTEAD = "quantize the model here: its global scales are powers of two"
_SCHEMES: Mapping[str, LinearScheme] = {
    "FP8": preset("FP8"),
    "FP8_PER_CHANNEL_PER_TOKEN": preset("FP8_DYNAMIC"),
    "MXFP8": preset("MXFP8"),
    "NVFP4": preset("NVFP4"),
    "W4A16_NVFP4": preset("NVFP4A16"),
}


@dataclass(frozen=True, kw_only=True)
class ModelOptLayout:
    """The layout; the scheme of a linear says its algorithm.

    Attributes:
        reordered: always False: there is no g_idx.
    """

    reordered: bool = False

    @property
    def name(self) -> str:
        """Key of the layout in `quantflow.formats.LAYOUTS`."""
        return NAME

    def with_order(self) -> "ModelOptLayout":
        """The layout itself: it has no words for groups of inputs that do not stand together."""
        return self

    def why_not(self, scheme: LinearScheme, shape: tuple[int, int]) -> str | None:
        """Reason why the layout cannot hold a linear of `shape` (O, I); None when it can."""
        del shape
        if (mixed := why_not_mixed(scheme)) is not None:
            return mixed
        if _algorithm(scheme) is None:
            names = ", ".join(known.name for known in _SCHEMES.values())
            return f"scheme {scheme.name} is none of those that it has: {names}"
        return None

    def tensor_names(self, name: str, scheme: LinearScheme) -> tuple[str, ...]:
        """Names of the tensors that hold the linear `name` (without `.weight`)."""
        parts = ["weight", "weight_scale"]
        if scheme.weights.scale_format == "e4m3":
            parts.append("weight_scale_2")
        if scheme.input is not None and scheme.input.measured:
            parts.append("input_scale")
        return tuple(f"{name}.{part}" for part in parts)

    def encode(
        self, name: str, linear: QuantizedLinear, *, scale_dtype: torch.dtype
    ) -> dict[str, Tensor]:
        """Tensors of a linear; see `WeightLayout.encode`.

        `scale_dtype` is not read: the layout has its own.
        """
        del scale_dtype
        weight, scheme = linear.weight, linear.weight.scheme
        weight.validate(name)
        codes = weight.qvalue
        scale = weight.scale.reshape(()) if scheme.granularity == "per_tensor" else weight.scale
        parts = {"weight": codes}
        if scheme.scale_format == "e4m3":
            assert weight.global_scale is not None  # beside every scale in e4m3
            second = _inverse(f"{name}.weight_scale_2", weight.global_scale)
            local = affine.local_scales(scale, weight.global_scale)
            require_same_scales(
                f"{name}.weight_scale", scale, float8.widen(local) * second, instead=_INSTEAD
            )
            parts |= {
                "weight": microscaling.pack_e2m1(codes),
                "weight_scale": local,
                "weight_scale_2": second,
            }
        elif scheme.scale_format == "e8m0":
            parts["weight_scale"] = microscaling.pack_e8m0(scale)
        else:
            parts["weight_scale"] = (
                scale.flatten() if scheme.granularity == "per_channel" else scale
            )
        if linear.input_scale is not None:
            input_scale = linear.input_scale
            parts["input_scale"] = (
                _inverse(f"{name}.input_scale", input_scale)
                if scheme.scale_format == "e4m3"
                else input_scale.reshape(())
            )
        # Linears with one input may hold one tensor for its scale; safetensors refuses tensors that
        # share memory.
        return {
            key: parts[key.removeprefix(f"{name}.")].clone()
            for key in self.tensor_names(name, linear.scheme)
        }

    def decode(
        self, name: str, tensors: Mapping[str, Tensor], scheme: LinearScheme
    ) -> QuantizedLinear:
        """The linear; see `TensorLayout.decode`."""
        weights, key = scheme.weights, f"{name}.weight"
        stored = matrix(tensors, key)
        if weights.num_bits == 4:
            qvalue = microscaling.unpack_e2m1(
                tensor(tensors, key, (torch.uint8,), tuple(stored.shape))
            )
        else:
            qvalue = tensor(tensors, key, (torch.float8_e4m3fn,), tuple(stored.shape))
        rows, columns = qvalue.shape
        if columns % (weights.group_size or 1):
            cause = (
                f"{key}: {columns} input features, groups of {weights.group_size} do not divide "
                "them"
            )
            raise InputError(cause, "check that config.json belongs to these weights")
        global_scale = input_scale = None
        key, groups = f"{name}.weight_scale", (rows, columns // (weights.group_size or columns))
        if weights.scale_format == "e4m3":
            second = single_scale(tensors, f"{name}.weight_scale_2", weights)
            local = float8.widen(tensor(tensors, key, (torch.float8_e4m3fn,), groups))
            zero = local == 0  # [O, G]
            to_groups(qvalue.view(torch.uint8), columns // groups[1]).masked_fill_(
                zero[..., None], 0
            )
            local = local.masked_fill(zero, 1.0)
            scale, global_scale = local * second, 1 / second.reshape(1)
        elif weights.scale_format == "e8m0":
            scale = microscaling.unpack_e8m0(tensor(tensors, key, (torch.uint8,), groups))
        elif weights.granularity == "per_tensor":
            scale = single_scale(tensors, key, weights).reshape(1, 1)
        else:
            scale = scales(tensors, key, (rows,), weights).reshape(rows, 1)
        if scheme.input is not None and scheme.input.measured:
            stored_input_scale = single_scale(tensors, f"{name}.input_scale", weights).reshape(1)
            input_scale = (
                1 / stored_input_scale if weights.scale_format == "e4m3" else stored_input_scale
            )
        weight = QTensor(qvalue=qvalue, scale=scale, scheme=weights, global_scale=global_scale)
        return QuantizedLinear(weight=checked(name, weight), scheme=scheme, input_scale=input_scale)

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
        arguments: dict[str, Any] = {
            "dynamic": False,
            "num_bits": first.weights.num_bits,
            "type": "float",
        }
        if first.weights.group_size is not None:
            arguments["group_size"] = first.weights.group_size
        weights = (
            {**arguments, "strategy": "channel"}
            if first.weights.granularity == "per_channel"
            else arguments
        )
        inputs = {} if first.input is None else {"input_activations": arguments}
        return {
            "quant_method": METHOD,
            "quant_algo": _algorithm(first),
            **(
                {} if first.weights.group_size is None else {"group_size": first.weights.group_size}
            ),
            "config_groups": {"group_0": {**inputs, "weights": weights, "targets": ["Linear"]}},
            "ignore": list(ignore),
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
        table = config.get("quantization", config)
        algorithm = str(table.get("quant_algo")).upper() if isinstance(table, Mapping) else "None"
        scheme = _SCHEMES.get(algorithm)
        if scheme is None:
            raise UnsupportedError(
                f"config.json: quant_algo {algorithm!r}", f"use a folder of {', '.join(_SCHEMES)}"
            )
        if algorithm == "NVFP4" and _weights_alone(table):
            scheme = _SCHEMES["W4A16_NVFP4"]
        if table.get("group_size") not in (None, 0, scheme.weights.group_size):
            cause = f"config.json: group_size {table['group_size']!r} with quant_algo {algorithm}"
            raise UnsupportedError(
                cause, f"use a folder with groups of {scheme.weights.group_size}"
            )
        # what is not known of the cache is refused, whoever asks for linears alone
        kv_scheme_from_config(config)
        return {name: scheme for name in shapes if f"{name}.weight_scale" in infos}


def kv_tensor_names(attention: str) -> tuple[str, str]:
    """Names of the scales of keys and of values in the KV cache of the module `attention`."""
    return f"{attention}.k_proj.k_scale", f"{attention}.v_proj.v_scale"


def kv_scheme_from_config(config: Mapping[str, Any]) -> TensorScheme | None:
    """Scheme of keys and values that a `quantization_config` names; None for the model's dtype.

    Raises:
        UnsupportedError: another one than float8 with one measured scale.
    """
    table = config.get("quantization", config)
    cache = (
        table.get("kv_cache_scheme") or table.get("kv_cache_quant_algo")
        if isinstance(table, Mapping)
        else None
    )
    if cache is None:
        return None
    kind = (
        (cache.get("type"), cache.get("num_bits"), cache.get("dynamic", False))
        if isinstance(cache, Mapping)
        else cache
    )
    if kind not in (("float", 8, False), "FP8"):
        raise UnsupportedError(
            f"config.json: keys and values are kept as {cache!r}",
            "use a folder without that, or with FP8",
        )
    return kv_scheme("FP8", "per_tensor")


def _algorithm(scheme: LinearScheme) -> str | None:
    """The `quant_algo` of a scheme; None where there is none."""
    matches = (
        (known.weights, known.input) == (scheme.weights, scheme.input)
        for known in _SCHEMES.values()
    )
    return next((name for name, same in zip(_SCHEMES, matches, strict=True) if same), None)


def _weights_alone(table: Mapping[str, Any]) -> bool:
    """Whether no group of a configuration quantizes inputs; vLLM reads that as weights alone."""
    groups = table.get("config_groups")
    listed = list(groups.values()) if isinstance(groups, Mapping) else []
    return bool(listed) and all(
        isinstance(one, Mapping) and one.get("input_activations") is None for one in listed
    )


def _inverse(key: str, value: Tensor) -> Tensor:
    """1 / value, float32 [], from which a reader computes the value again.

    Raises:
        UnsupportedError: the reader would compute another value.
    """
    inverse = 1 / value.reshape(())
    if (back := 1 / inverse) != value.reshape(()):
        raise UnsupportedError(
            f"{key}: the scale would change from {value.item()!r} to {back.item()!r}", _INSTEAD
        )
    return inverse


def config_beside(config: Mapping[str, Any]) -> dict[str, Any]:
    """Content of hf_quant_config.json, from what `quantization_config` returned."""
    size = {"group_size": config["group_size"]} if "group_size" in config else {}
    algorithm = {
        "quant_algo": config["quant_algo"],
        "kv_cache_quant_algo": None,
        **size,
        "exclude_modules": config["ignore"],
    }
    # older readers take the file for this name alone
    producer = {"name": METHOD, "version": "quantflow"}
    return {"producer": producer, "quantization": algorithm}


def layout_of(config: Mapping[str, Any], infos: Infos) -> ModelOptLayout | None:
    """The layout if a quantization_config names it; None for one of another method."""
    del infos
    return ModelOptLayout() if str(config.get("quant_method")).startswith(METHOD) else None
