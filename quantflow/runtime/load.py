"""Open an artifact as a model that runs; anything that does not add up is an error, never a warning.

Every tensor of the artifact is used exactly once and every parameter of the model gets its value: the tensors of a
quantized linear are those its scheme names, all others are parameters of the family's own module tree.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from quantflow.artifact.canonical import read_json
from quantflow.artifact.checkpoint import Checkpoint, open_checkpoint
from quantflow.artifact.manifest import read_manifest
from quantflow.artifact.verify import verify as verify_artifact
from quantflow.backends import choose
from quantflow.core.qtensor import QuantizedLinear
from quantflow.core.scheme import LinearScheme
from quantflow.errors import InputError, UsageError
from quantflow.formats import compressed_tensors
from quantflow.models.load import load_config, load_tokenizer, materialize_, read_tensors, skeleton
from quantflow.models.names import NameMap
from quantflow.runtime.linear import QuantLinear

_TOKENIZER_FILES = frozenset({"tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json"})
_GENERATION = "generation_config.json"
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, kw_only=True, eq=False)
class Runtime:
    """A loaded artifact.

    Attributes:
        model: the Hugging Face causal LM with QuantLinear in place of its quantized linears; eval mode, no gradients.
        tokenizer: None when the artifact has no tokenizer files.
        manifest: quantflow.json.
        backends: source name of each quantized linear -> name of its backend.
        reasons: source name -> why each backend that is preferred over the chosen one cannot run that linear.
        eos_token_ids: tokens that end a text.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None
    manifest: dict[str, Any]
    backends: dict[str, str]
    reasons: dict[str, dict[str, str]]
    eos_token_ids: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class _Plan:
    """Which tensor is what.

    Attributes:
        schemes: source name of each quantized linear -> its scheme.
        modules: source name of each quantized linear -> its module name.
        parameters: source name of each other tensor -> its parameter's module name.
    """

    schemes: dict[str, LinearScheme]
    modules: dict[str, str]
    parameters: dict[str, str]


def load(
    folder: str | Path,
    *,
    backend: str = "auto",
    dtype: torch.dtype = torch.float32,
    verify: bool = True,
    device: str | torch.device = "cpu",
) -> Runtime:
    """Open an artifact.

    Weights are read and prepared one linear at a time, so memory holds the prepared model and one linear.

    Args:
        folder: what `quantflow export` wrote.
        backend: a key of quantflow.backends.BACKENDS for all quantized linears, or `auto` for the first that can.
        dtype: of the parameters that are not quantized and of all inputs.
        verify: compare every file with its recorded hash first; it reads the artifact once more.
        device: where the model runs.

    Raises:
        IntegrityError: a file differs from its hash.
        InputError: a tensor that is missing, unknown or not used; a scale that is not finite and positive; no manifest.
        UnsupportedError: a family, layout version, device or scheme that this version does not know.
        UsageError: a backend that is unknown or cannot run a linear; another dtype than float32, bfloat16 and float16.
    """
    if dtype not in _DTYPES:
        raise UsageError(f"dtype {dtype}", f"use one of {', '.join(map(str, _DTYPES))}")
    folder, device = Path(folder), torch.device(device)
    if verify:
        verify_artifact(folder)
    manifest = read_manifest(folder)
    checkpoint = open_checkpoint(folder)
    quantization = checkpoint.config.get("quantization_config")
    if not isinstance(quantization, dict):
        raise InputError(f"{folder / 'config.json'}: no quantization_config", "give the folder of an exported artifact")
    config = load_config(checkpoint)
    del config.quantization_config  # the model in memory is ours, not one of transformers' quantizers
    model = skeleton(config)
    plan = _plan(model, checkpoint, quantization)
    reasons: dict[str, dict[str, str]] = {}
    for name in plan.schemes:
        reasons[name] = _place_linear_(model, checkpoint, name, plan=plan, backend=backend, dtype=dtype, device=device)
    for name, parameter in plan.parameters.items():
        if name.removesuffix(".bias") not in plan.schemes:
            materialize_(model, {parameter: read_tensors(checkpoint, [name])[name]}, dtype=dtype)
    _check_complete(model)
    model.to(device)
    has_tokenizer = not _TOKENIZER_FILES.isdisjoint(checkpoint.files)
    return Runtime(
        model=model,
        tokenizer=load_tokenizer(folder) if has_tokenizer else None,
        manifest=manifest,
        backends={name: model.get_submodule(module).backend for name, module in plan.modules.items()},
        reasons=reasons,
        eos_token_ids=_eos_token_ids(checkpoint),
    )


def _plan(model: PreTrainedModel, checkpoint: Checkpoint, quantization: Mapping[str, Any]) -> _Plan:
    """Decide what each tensor of the artifact is.

    A quantized linear stands for the one parameter `NAME.weight`, so the family's own name table can be asked whether
    all tensors together are exactly the model's parameters.

    Raises:
        InputError: a tensor that is missing, unknown or stored twice.
    """
    names = NameMap(model)
    owners = dict.fromkeys(name.rpartition(".")[0] for name in checkpoint.tensors)
    modules = {owner: names.module_name(f"{owner}.weight").removesuffix(".weight") for owner in owners}
    linear_modules = {name for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    modules = {owner: module for owner, module in modules.items() if module in linear_modules}
    found = compressed_tensors.schemes_from_config(quantization, list(modules))
    schemes = {name: scheme for name, scheme in found.items() if scheme is not None}
    claimed = {tensor for name, scheme in schemes.items() for tensor in compressed_tensors.tensor_names(name, scheme)}
    missing = sorted(claimed - checkpoint.tensors.keys())
    if missing:
        raise InputError(f"{missing[0]}: its linear's scheme needs it, it is not in the artifact", "export it again")
    others = [name for name in checkpoint.tensors if name not in claimed]
    for name in others:
        if name.endswith(".weight") and name.removesuffix(".weight") in schemes:
            raise InputError(f"{name}: stored beside its quantized form", "export the artifact again")
    binding = names.bind([*others, *(f"{name}.weight" for name in schemes)])
    return _Plan(
        schemes=schemes,
        modules={name: modules[name] for name in schemes},
        parameters={name: binding.to_module[name] for name in others if name in binding.to_module},
    )


def _read_linear(checkpoint: Checkpoint, name: str, *, scheme: LinearScheme, device: torch.device) -> QuantizedLinear:
    """Read, check and decode one quantized linear."""
    tensors = read_tensors(checkpoint, compressed_tensors.tensor_names(name, scheme))
    linear = compressed_tensors.decode(name, tensors, scheme)
    if device.type == "cpu":
        return linear

    def moved(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor.to(device)

    weight = linear.weight
    return replace(
        linear,
        weight=replace(
            weight,
            qvalue=weight.qvalue.to(device),
            scale=weight.scale.to(device),
            zero_point=moved(weight.zero_point),
        ),
        input_scale=moved(linear.input_scale),
        input_zero_point=moved(linear.input_zero_point),
    )


def _place_linear_(
    model: nn.Module,
    checkpoint: Checkpoint,
    name: str,
    *,
    plan: _Plan,
    backend: str,
    dtype: torch.dtype,
    device: torch.device,
) -> dict[str, str]:
    """Put a QuantLinear where the model has the linear `name`; return why preferred backends cannot run it.

    Raises:
        InputError: the weight or the bias has another shape than the model's.
        UsageError: the backend cannot run it.
    """
    scheme = plan.schemes[name]
    linear = _read_linear(checkpoint, name, scheme=scheme, device=device)
    bias_name = f"{name}.bias"  # the name table has checked that it is there exactly when the model has one
    bias = read_tensors(checkpoint, [bias_name])[bias_name] if bias_name in plan.parameters else None
    original: Any = model.get_submodule(plan.modules[name])
    shape = (original.out_features, original.in_features)
    found = tuple(linear.weight.qvalue.shape)
    if found != shape or (bias is not None and tuple(bias.shape) != shape[:1]):
        raise InputError(
            f"{name}: weight is {list(found)}, bias {None if bias is None else list(bias.shape)}, "
            f"the model needs {list(shape)}",
            "check that config.json belongs to these weights",
        )
    chosen, reasons = choose(scheme, device, shape=shape, dtype=dtype, backend=backend)
    model.set_submodule(plan.modules[name], QuantLinear(linear, bias=bias, backend=chosen, dtype=dtype))
    return reasons


def _check_complete(model: nn.Module) -> None:
    """Refuse a model with a parameter that got no value, such as a twin of a quantized one.

    Raises:
        InputError: naming the parameter.
    """
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            raise InputError(f"{name}: needed by the model, not in the artifact", "export the artifact again")


def _eos_token_ids(checkpoint: Checkpoint) -> tuple[int, ...]:
    """Return the tokens that end a text: those of generation_config.json, else those of config.json."""
    config = checkpoint.config
    if _GENERATION in checkpoint.files:
        generation = read_json(checkpoint.folder / _GENERATION)
        if isinstance(generation, dict) and generation.get("eos_token_id") is not None:
            config = generation
    found = config.get("eos_token_id")
    return tuple(found) if isinstance(found, list) else () if found is None else (found,)
