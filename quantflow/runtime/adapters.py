"""LoRA adapters (Hu et al. 2021) in PEFT's files: read, and put into transformers' modules.

y = base(x) + scaling * B (A x),  A [r, in_features], B [out_features, r]

An adapter stands beside a linear of any kind, or is merged into one that is not quantized.
`row_adapters.py` runs adapters beside the lean decoder, row by row.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NotRequired, TypedDict

import torch
from torch import Tensor, nn
from torch.nn import functional

from quantflow.errors import InputError, UnsupportedError, UsageError
from quantflow.files.canonical import read_json
from quantflow.files.patterns import Pattern
from quantflow.files.schema import Between, check
from quantflow.models.reading import read_file

CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_NAME = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<side>[AB])\.weight")
_ONLY = {
    "use_dora": False,
    "bias": "none",
    "modules_to_save": None,
    "fan_in_fan_out": False,
    "lora_bias": False,
}


_Alpha = Annotated[float, Between(1e-9, 1e9)]


class AdapterConfig(TypedDict):
    """What is read of adapter_config.json."""

    peft_type: str
    r: Annotated[int, Between(1, 1 << 20)]
    lora_alpha: _Alpha
    alpha_pattern: NotRequired[dict[str, _Alpha] | None]
    use_rslora: NotRequired[bool | None]


@dataclass(frozen=True, kw_only=True)
class Adapted:
    """The names of linears in the model that `attach_` gave an adapter, by where it went."""

    merged: tuple[str, ...]
    beside: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class Factors:
    """The product beside one linear, in float32.

    Attributes:
        down: A, [r, in_features].
        up: scaling * B, [out_features, r].
    """

    down: Tensor
    up: Tensor

    def require_fit(
        self, name: str, *, inputs: int | None, outputs: int | None, path: Path
    ) -> None:
        """Refuse factors that do not fit a linear.

        Args:
            name: name of the linear, as the adapter calls it.
            inputs: input features of the linear; None where they are not known.
            outputs: output features of the linear; None where they are not known.
            path: file of the adapter's weights.

        Raises:
            InputError: naming both.
        """
        here = (self.down.shape[-1], self.up.shape[0])
        fits = self.down.ndim == self.up.ndim == 2 and self.down.shape[0] == self.up.shape[1]
        unfit = [
            size
            for size, wanted in zip(here, (inputs, outputs), strict=True)
            if wanted not in (None, size)
        ]
        if not fits or unfit:
            shapes = f"A {list(self.down.shape)}, B {list(self.up.shape)}"
            raise InputError(
                f"{path}: {name} maps {inputs} to {outputs}, {shapes}",
                "give an adapter of this model",
            )


class AdaptedLinear(nn.Module):
    """A linear with a low-rank product beside it. The base stays as it is, quantized or not.

    Attributes:
        base: maps [..., in_features] to [..., out_features].
        down: A, [r, in_features].
        up: scaling * B, [out_features, r].
    """

    down: Tensor
    up: Tensor

    def __init__(self, base: nn.Module, *, down: Tensor, up: Tensor) -> None:
        """Put the product beside `base`; both factors have the dtype and device of its inputs."""
        super().__init__()
        self.base = base
        self.register_buffer("down", down, persistent=False)
        self.register_buffer("up", up, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """The product base(x) + up (down x). x: [..., in_features]."""
        added = functional.linear(functional.linear(x, self.down), self.up)
        return torch.add(self.base(x), added)


def weights_file(folder: str | Path) -> Path:
    """The file of an adapter's tensors."""
    return Path(folder) / _WEIGHTS


def read_adapter(folder: str | Path) -> dict[str, Factors]:
    """The products of an adapter, by the names of their linears in the model.

    Args:
        folder: folder with adapter_config.json and adapter_model.safetensors, as PEFT's
            `save_pretrained` writes them.

    Raises:
        InputError: files that are missing or damaged.
        UnsupportedError: another kind of adapter than plain LoRA on linears.
    """
    path = Path(folder) / CONFIG
    config, parts = _read_config(path), _parts(weights_file(folder))
    try:
        alphas = [
            (Pattern(rf"(.*\.)?({text})"), alpha)
            for text, alpha in (config.get("alpha_pattern") or {}).items()
        ]
        scales = {
            name: _scaling(config, alphas, name, rank=down.shape[0])
            for name, (down, _) in parts.items()
        }
    except InputError as error:  # a pattern's error does not name the file
        raise InputError(f"{path}: alpha_pattern: {error.cause}", error.remedy) from error
    return {
        name: Factors(down=down.float(), up=up.float() * scales[name])
        for name, (down, up) in parts.items()
    }


def attach_(model: nn.Module, folder: str | Path, *, merge: bool = False) -> Adapted:
    """Give a model the adapter of a folder.

    Args:
        model: a Hugging Face causal LM, its linears of any kind; float32, bfloat16 or float16.
        folder: folder of the adapter, as for `read_adapter`.
        merge: add the product to the weight of each linear that has one in floating point, which
            costs no time afterwards; a quantized weight cannot hold it, so there the adapter stays
            beside.

    Raises:
        InputError: files that are missing or damaged, tensors that belong to no linear of the model
            or do not fit it.
        UnsupportedError: another kind of adapter than plain LoRA on linears.
        UsageError: a merge into a weight that the embedding shares.
    """
    parts, weights = read_adapter(folder), weights_file(folder)
    bases = {name: _linear(model, name, factors, path=weights) for name, factors in parts.items()}
    merged = tuple(name for name, base in bases.items() if merge and isinstance(base, nn.Linear))
    _refuse_shared(model, {name: bases[name] for name in merged})
    first = next(parameter for parameter in model.parameters() if parameter.is_floating_point())
    for name, factors in parts.items():
        base, down, up = bases[name], factors.down, factors.up
        if name in merged:
            weight: Any = base.weight
            weight.data += (up @ down).to(weight)
        else:
            model.set_submodule(name, AdaptedLinear(base, down=down.to(first), up=up.to(first)))
    return Adapted(merged=merged, beside=tuple(name for name in parts if name not in merged))


def _refuse_shared(model: nn.Module, linears: dict[str, nn.Module]) -> None:
    """Refuse to merge into a weight that the embedding shares, which would change it too.

    Raises:
        UsageError: naming the linear.
    """
    embedding: Any = getattr(model, "get_input_embeddings", lambda: None)()
    for name, linear in linears.items():
        if getattr(embedding, "weight", None) is linear.weight:
            raise UsageError(
                f"{name}: its weight is the embedding's too", "leave the adapter beside it"
            )


def _read_config(path: Path) -> dict[str, Any]:
    config: dict[str, Any] = read_json(path)
    check(config, AdapterConfig, where=str(path))
    if config.get("peft_type") != "LORA":
        raise UnsupportedError(
            f"{path}: peft_type {config.get('peft_type')}", "give a LoRA adapter"
        )
    for key, usual in _ONLY.items():
        if config.get(key, usual) not in (usual, [] if usual is None else usual):
            raise UnsupportedError(
                f"{path}: {key} is {config[key]}, {usual} is supported", "give a plain LoRA adapter"
            )
    return config


def _parts(path: Path) -> dict[str, tuple[Tensor, Tensor]]:
    """The factors (A, B) of each linear, by its name."""
    sides: dict[str, dict[str, Tensor]] = {}
    for name, tensor in read_file(path).items():
        match = _NAME.fullmatch(name)
        if match is None:
            raise UnsupportedError(
                f"{path}: {name} is no factor of a linear", "give a LoRA adapter of linears alone"
            )
        sides.setdefault(match["module"], {})[match["side"]] = tensor
    for module, pair in sides.items():
        if pair.keys() != {"A", "B"}:
            raise InputError(
                f"{path}: {module} has lora_{''.join(pair)} alone",
                "restore the file from where it came from",
            )
    for module, pair in sides.items():
        if not all(pair[side].numel() for side in "AB"):
            shapes = f"A {list(pair['A'].shape)}, B {list(pair['B'].shape)}"
            raise InputError(
                f"{path}: {module} of rank 0, {shapes}", "give an adapter that was trained"
            )
    if not sides:
        raise InputError(f"{path}: holds no tensor", "give an adapter that was trained")
    return {module: (pair["A"], pair["B"]) for module, pair in sides.items()}


def _linear(model: nn.Module, name: str, factors: Factors, *, path: Path) -> nn.Module:
    """The linear that an adapter's factors belong to; their shapes are compared."""
    try:
        base = model.get_submodule(name)
    except AttributeError as error:
        raise InputError(
            f"{path}: {name} is no linear of the model", "give an adapter of this model"
        ) from error
    # a linear that is read from disk has no such attributes
    inputs, outputs = (getattr(base, key, None) for key in ("in_features", "out_features"))
    factors.require_fit(name, inputs=inputs, outputs=outputs, path=path)
    return base


def _scaling(
    config: dict[str, Any], alphas: Sequence[tuple[Pattern, float]], name: str, *, rank: int
) -> float:
    """The factor alpha / r, or alpha / sqrt(r) if rank-stabilized (Kalajdzievski 2023)."""
    alpha = next(
        (other for pattern, other in alphas if pattern.fullmatch(name)), config["lora_alpha"]
    )
    return float(alpha / math.sqrt(rank) if config.get("use_rslora") else alpha / rank)
