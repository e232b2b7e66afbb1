"""The compressed-tensors layout as one of `quantflow.formats.LAYOUTS`.

Files by llm-compressor and its releases spell some things otherwise. They are read, and not
written:

| in the configuration  | by others                          | meaning                             |
|-----------------------|------------------------------------|-------------------------------------|
| `format`              | naive-quantized                    | the layout of the weights' type     |
|                       | missing in a group                 | that of the whole configuration     |
| `quantization_status` | frozen (early releases), missing   | compressed: the tensors say it      |
| `actorder`            | group, dynamic, true               | act-order: NAME.weight_g_idx        |

NAME.weight_g_idx int32 [I] has the group of each input; the input's codes stay in the place of the
input. `decode` puts groups side by side and returns the order of inputs. A linear of several groups
with act-order and without that tensor is refused: release 0.17 reads its groups as those of
neighbours, release 0.20 loads no such folder.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from quantflow.core import affine, float8
from quantflow.core.qtensor import PackedLinear, QuantizedLinear
from quantflow.core.scheme import LinearScheme
from quantflow.errors import InputError, SchemeError, UnsupportedError
from quantflow.formats import compressed_tensors
from quantflow.formats.weight_layout import (
    SAME_NAMES,
    Infos,
    order_of,
    require_same_scales,
    stored_scales,
    tensor,
)

_NAIVE = {"float": "float-quantized", "int": "int-quantized"}


@dataclass(frozen=True, kw_only=True)
class CompressedTensorsLayout:
    """The layout.

    Attributes:
        ordered: linears that have a weight_g_idx.
    """

    ordered: frozenset[str] = frozenset()

    @property
    def name(self) -> str:
        """Key of the layout in `quantflow.formats.LAYOUTS`."""
        return compressed_tensors.NAME

    @property
    def reordered(self) -> bool:
        """Whether groups may be of inputs that do not stand together."""
        return bool(self.ordered)

    def with_order(self) -> "CompressedTensorsLayout":
        """The layout itself: it has no words for groups of inputs that do not stand together."""
        return self

    def why_not(self, scheme: LinearScheme, shape: tuple[int, int]) -> str | None:
        """Reason why the layout cannot hold a linear of `shape` (O, I); None when it can."""
        try:
            compressed_tensors.tensor_specs("weight", scheme, shape, torch.float32)
        except UnsupportedError as error:
            return error.cause
        return None

    def tensor_names(self, name: str, scheme: LinearScheme) -> tuple[str, ...]:
        """Names of the tensors that hold the linear `name` (without `.weight`)."""
        names = compressed_tensors.tensor_names(name, scheme)
        return (*names, f"{name}.weight_g_idx") if name in self.ordered else names

    def encode(
        self, name: str, linear: QuantizedLinear, *, scale_dtype: torch.dtype
    ) -> dict[str, Tensor]:
        """Tensors of a linear; see `WeightLayout.encode`."""
        if linear.order is not None:
            cause = (
                f"{name}: its groups are of inputs that do not stand together, which no loader of "
                "the layout runs today"
            )
            raise UnsupportedError(cause, "keep it in a layout with g_idx and desc_act")
        if linear.weight.global_scale is not None:
            local = affine.local_scales(linear.weight.scale, linear.weight.global_scale)
            back = float8.widen(local) / linear.weight.global_scale
            instead = (
                "keep it in the layout that it has, or quantize the model here: its global scales "
                "are powers of two"
            )
            require_same_scales(f"{name}.weight_scale", linear.weight.scale, back, instead=instead)
        if linear.scheme.layout != "pack-quantized":
            return compressed_tensors.encode(name, linear)
        stored_scales(name, linear.weight.scale, scale_dtype)
        return compressed_tensors.encode(name, linear, scale_dtype=scale_dtype)

    def packed(
        self, name: str, tensors: Mapping[str, Tensor], scheme: LinearScheme
    ) -> PackedLinear | None:
        """The linear with its codes as stored; see `PackedLayout.packed`."""
        return None if name in self.ordered else compressed_tensors.packed(name, tensors, scheme)

    def decode(
        self, name: str, tensors: Mapping[str, Tensor], scheme: LinearScheme
    ) -> QuantizedLinear:
        """The linear; see `TensorLayout.decode`."""
        linear = compressed_tensors.decode(name, tensors, scheme)
        if name not in self.ordered:
            return linear
        key, weight = f"{name}.weight_g_idx", linear.weight
        group_of = tensor(tensors, key, (torch.int32, torch.int64), (weight.qvalue.shape[1],))
        order = order_of(key, group_of, groups=weight.scale.shape[1])
        if order is None:
            return linear
        return replace(
            linear, weight=replace(weight, qvalue=weight.qvalue[:, order].contiguous()), order=order
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
        return compressed_tensors.quantization_config(
            schemes, ignore=ignore, model_type=model_type, modules=modules
        )

    def schemes(
        self,
        config: Mapping[str, Any],
        shapes: Mapping[str, tuple[int, int]],
        infos: Infos,
        modules: Mapping[str, str] = SAME_NAMES,
    ) -> dict[str, LinearScheme]:
        """Scheme of each quantized linear; see `WeightLayout.schemes`."""
        table = _in_our_words(config)
        try:
            every_scheme = compressed_tensors.schemes_from_config(
                table, tuple(shapes), modules=modules
            )
        except SchemeError as error:
            raise UnsupportedError(f"config.json: {error.cause}", error.remedy) from error
        schemes = {name: scheme for name, scheme in every_scheme.items() if scheme is not None}
        _require_orders(
            config,
            compressed_tensors.groups_of_linears(table, tuple(schemes), modules=modules),
            schemes,
            shapes,
            infos,
        )
        return schemes


def _in_our_words(config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration in the form of `schemes_from_config`.

    Parts of another form are left to its checks.
    """
    groups = {}
    listed = config.get("config_groups")
    for label, group in (listed if isinstance(listed, dict) else {}).items():
        groups[label] = group
        if not isinstance(group, dict) or not isinstance(group.get("weights"), dict):
            continue
        weights, layout = dict(group["weights"]), group.get("format") or config.get("format")
        if layout == "naive-quantized":
            layout = _NAIVE.get(str(weights.get("type", "int")))
        if _is_ordered(group):
            weights["actorder"] = None  # the tensors say it
        groups[label] = {**group, "weights": weights, "format": layout}
    status = config.get("quantization_status")
    return {
        **config,
        "config_groups": groups or listed,
        "quantization_status": "compressed" if status in (None, "frozen") else status,
    }


def _is_ordered(group: Mapping[str, Any]) -> bool:
    """Whether a group of the configuration has act-order: groups of inputs that lie apart."""
    actorder = group["weights"].get("actorder")
    return actorder is True or actorder in ("group", "dynamic")


def _require_orders(
    config: Mapping[str, Any],
    groups: Mapping[str, str | None],
    schemes: Mapping[str, LinearScheme],
    shapes: Mapping[str, tuple[int, int]],
    infos: Infos,
) -> None:
    """Refuse a linear of several groups with act-order that does not name the group of each input.

    Args:
        config: the configuration as it was written.
        groups: quantized linear -> its group of the configuration.
        schemes: schemes of the quantized linears.
        shapes: shapes of all linears.
        infos: headers of all tensors.

    Raises:
        InputError: the tensor of the groups is missing; it is named.
    """
    ordered = {label for label, group in config["config_groups"].items() if _is_ordered(group)}
    if not ordered:
        return
    for name, label in groups.items():
        size, key = schemes[name].weights.group_size, f"{name}.weight_g_idx"
        if label in ordered and size is not None and size < shapes[name][1] and key not in infos:
            actorder = config["config_groups"][label]["weights"]["actorder"]
            raise InputError(
                f"{key}: missing, config.json says actorder {actorder}",
                "download the folder again; or set actorder to null if its groups are of inputs "
                "that stand together",
            )


def layout_of(config: Mapping[str, Any], infos: Infos) -> CompressedTensorsLayout | None:
    """The layout if a quantization_config names it; None for one of another method."""
    if config.get("quant_method") != compressed_tensors.NAME:
        return None
    suffix = ".weight_g_idx"
    return CompressedTensorsLayout(
        ordered=frozenset(name.removesuffix(suffix) for name in infos if name.endswith(suffix))
    )
