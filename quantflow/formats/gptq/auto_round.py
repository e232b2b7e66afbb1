"""AutoRound's own format: GPTQ's tensors without g_idx, and a scheme for each linear.

config.json has `quant_method` auto-round and one scheme for all linears. `extra_config` has the
exceptions: other bits, group size and symmetry, or 16 bits for a linear that is not quantized.
`block_name_to_quantize` names the decoder layers, so a head counts only where `extra_config` names
it. The end of `packing_format` says how zero points are stored:

| `packing_format`     | zero points are stored           | written here for                       |
|----------------------|----------------------------------|----------------------------------------|
| auto_round:auto_gptq | less one, as in GPTQ's version 1 | symmetric weights; vLLM reads it too   |
| auto_round:gptqmodel | unchanged, as in its version 2   | other weights, since AutoRound reads   |
|                      |                                  | auto_gptq as symmetric on a CPU        |
| auto_round:auto_awq  | as in AWQ's layout               | nothing; formats/awq.py reads it       |

Source: github.com/intel/auto-round 0.16.1, `auto_round/export/export_to_autoround/export.py` and
`inference/backend.py`.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quantflow.core.qtensor import QuantizedLinear
from quantflow.core.scheme import LinearScheme, TensorScheme
from quantflow.errors import UnsupportedError
from quantflow.formats.gptq.layout import GPTQLayout
from quantflow.formats.weight_layout import AUTO_ROUND, SAME_NAMES, Infos

NAME = "auto_round"
# the end of `packing_format` -> number that zero points are stored less
_LESS = {"auto_gptq": 1, "gptqmodel": 0}
_PLAIN = {"bits": 16, "data_type": "float"}  # the rule of a linear that is not quantized


@dataclass(frozen=True, kw_only=True)
class AutoRoundLayout:
    """The format.

    Attributes:
        packing: the end of the `packing_format` of a folder that is read; None where a
            folder is written: symmetric weights get auto_gptq, others gptqmodel.
        has_order: whether files have g_idx.
    """

    packing: str | None = None
    has_order: bool = False

    @property
    def name(self) -> str:
        """Key of the layout in `quantflow.formats.LAYOUTS`."""
        return NAME

    @property
    def reordered(self) -> bool:
        """Whether groups may be of inputs that lie apart: never."""
        return False

    def with_order(self) -> "AutoRoundLayout":
        """The layout itself: it has no words for groups of inputs that do not stand together."""
        return self

    def why_not(self, scheme: LinearScheme, shape: tuple[int, int]) -> str | None:
        """Reason why the layout cannot hold a linear of `shape` (O, I); None when it can."""
        return self._tensors(scheme).why_not(scheme, shape)

    def tensor_names(self, name: str, scheme: LinearScheme) -> tuple[str, ...]:
        """Names of the tensors that hold the linear `name` (without `.weight`)."""
        return self._tensors(scheme).tensor_names(name, scheme)

    def encode(
        self, name: str, linear: QuantizedLinear, *, scale_dtype: torch.dtype
    ) -> dict[str, Tensor]:
        """Tensors of a linear; see `WeightLayout.encode`."""
        return self._tensors(linear.scheme).encode(name, linear, scale_dtype=scale_dtype)

    def decode(
        self, name: str, tensors: Mapping[str, Tensor], scheme: LinearScheme
    ) -> QuantizedLinear:
        """The linear; see `TensorLayout.decode`."""
        return self._tensors(scheme).decode(name, tensors, scheme)

    def quantization_config(
        self,
        schemes: Mapping[str, LinearScheme],
        *,
        ignore: Sequence[str],
        model_type: str,
        modules: Mapping[str, str] = SAME_NAMES,
    ) -> dict[str, Any]:
        """The `quantization_config` of config.json; see `WeightLayout.quantization_config`."""
        del model_type
        packings = {_packing(scheme.weights): name for name, scheme in schemes.items()}
        if len(packings) > 1:
            first, second = packings.values()
            cause = (
                f"{first} and {second}: one has zero points, the other none; {NAME} stores those "
                "of all linears in one way"
            )
            raise UnsupportedError(
                cause, "keep it as compressed-tensors, or quantize all linears symmetric"
            )
        rules = {name: _rule(scheme.weights) for name, scheme in schemes.items()}
        counted = Counter(tuple(rule.items()) for name, rule in rules.items() if _block(name))
        base = dict(counted.most_common(1)[0][0]) if counted else next(iter(rules.values()))
        extra = {name: rule for name, rule in rules.items() if rule != base or not _block(name)}
        extra |= {modules[name]: rule for name, rule in extra.items() if name in modules}
        extra |= {name: _PLAIN for name in ignore if _block(name)}
        (packing,) = packings
        return {
            "quant_method": AUTO_ROUND[0],
            "packing_format": f"{NAME}:{packing}",
            **base,
            "block_name_to_quantize": ",".join(dict.fromkeys(filter(None, map(_block, schemes)))),
            **({"extra_config": extra} if extra else {}),
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
        return GPTQLayout(stored_less=0).schemes(config, shapes, infos, modules)

    def _tensors(self, scheme: LinearScheme) -> GPTQLayout:
        packing = self.packing or _packing(scheme.weights)
        return GPTQLayout(stored_less=_LESS[packing], has_order=self.has_order)


def _packing(weights: TensorScheme) -> str:
    return "auto_gptq" if weights.symmetric else "gptqmodel"


def _rule(weights: TensorScheme) -> dict[str, Any]:
    return {
        "bits": weights.num_bits,
        "group_size": weights.group_size or -1,
        "sym": weights.symmetric,
        "data_type": "int",
    }


def _block(name: str) -> str | None:
    """Prefix of the decoder layers in a linear's name, `model.layers`; None outside of them."""
    match = re.match(r"(.+?)\.\d+\.", name)
    return match[1] if match else None


def layout_of(config: Mapping[str, Any], infos: Infos) -> AutoRoundLayout | None:
    """The layout if a quantization_config names it; None for another method or packing."""
    _, colon, packing = str(config.get("packing_format") or config.get("backend") or "").rpartition(
        ":"
    )
    if config.get("quant_method") not in AUTO_ROUND or not colon or packing not in _LESS:
        return None
    return AutoRoundLayout(
        packing=packing, has_order=any(name.endswith(".g_idx") for name in infos)
    )
