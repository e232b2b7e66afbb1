"""An artifact as weights: opened and checked by its headers, then read tensor by tensor.

Every tensor of the artifact is used exactly once and every parameter of the model gets its value:
the tensors of a quantized linear are those its scheme names, all others are parameters of the
family's own module tree. `open_artifact` decides that from the headers; values are checked when
they are read. A tensor that is missing, unknown or used twice is an error.
"""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from quantflow.backends import choose, reference
from quantflow.backends.backend import Backend, Case
from quantflow.core.device import HOST, Device
from quantflow.core.kv import KVScales
from quantflow.core.qtensor import PackedLinear, QuantizedLinear
from quantflow.core.scheme import LinearScheme, TensorScheme, with_rounded_inputs
from quantflow.errors import InputError, UsageError
from quantflow.files.canonical import read_json
from quantflow.files.checkpoint import (
    CONFIG,
    Checkpoint,
    is_of_text,
    is_quantized,
    open_checkpoint,
    refuse_quantized,
)
from quantflow.files.ledger import UNUSED
from quantflow.files.manifest import MANIFEST_NAME, read_manifest, rounds_inputs
from quantflow.files.sealed import SealedFolder
from quantflow.files.verify import verify as verify_artifact
from quantflow.formats import CACHES, compressed_tensors, layout_of, split_of
from quantflow.formats.weight_layout import PackedLayout, TensorLayout
from quantflow.models.model_tensors import ModelTensors, listed, require_shapes
from quantflow.models.open import graph_for
from quantflow.models.parameters import materialize_, release_, twins
from quantflow.models.reading import read_rows, read_tensors
from quantflow.models.unused import reason_of
from quantflow.runtime.code_order import require_one_order
from quantflow.runtime.linear import QuantLinear

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

Shapes = Mapping[str, tuple[int, int]]
# What happens to inputs that the schemes leave alone: nothing; rounded where the manifest says that
# this costs little; rounded.
Inputs = Literal["stored", "usual", "rounded"]
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# dtypes of tensors that are not quantized
_OTHER_MODEL = "check that config.json belongs to these weights"


def inputs_asked(*, exact: bool, rounded_inputs: bool) -> Inputs:
    """The treatment of inputs that two options name.

    Args:
        exact: inputs that the schemes leave alone are never rounded.
        rounded_inputs: they are, whatever it costs, where a kernel multiplies integers then.

    Raises:
        UsageError: both.
    """
    if exact and rounded_inputs:
        raise UsageError("exact and rounded_inputs together", "leave one of them out")
    return "stored" if exact else "rounded" if rounded_inputs else "usual"


def require_rounded(*artifacts: "Artifact") -> None:
    """Refuse rounded inputs that were asked for where no linear of any artifact has them.

    Raises:
        UsageError: naming the schemes of the first one's linears.
    """
    linears = [linear for artifact in artifacts for linear in artifact.linears.values()]
    if any(linear.rounded for linear in linears):
        return
    first = artifacts[0]
    names = dict.fromkeys(linear.scheme.name for linear in first.linears.values())
    backends = dict.fromkeys(linear.backend.name for linear in first.linears.values())
    what = (
        f"linears of {', '.join(names)}, run by {', '.join(backends)}"
        if linears
        else "no quantized linear"
    )
    raise UsageError(
        f"{first.checkpoint.folder}: rounded inputs of {what}",
        "leave rounded_inputs out: weights of at most 4 bits in groups have them, where the scheme "
        "leaves inputs alone and our own kernels run",
    )


@dataclass(frozen=True, kw_only=True)
class RunnableLinear:
    """A quantized linear before it is read: how it is stored, and how it will run.

    Attributes:
        scheme: how it is stored, and what happens to its input when it runs.
        shape: (out_features, in_features) of the model's linear.
        backend: backend that will run it.
        reasons: why each backend that is preferred over `backend` cannot.
        elsewhere: rows of the stored linear that are no part of `shape`: other processes hold them.
        reordered: whether its columns may stand in another order than its inputs.
        rounded: whether its inputs are rounded although the stored scheme leaves them alone.
    """

    scheme: LinearScheme
    shape: tuple[int, int]
    backend: Backend
    reasons: dict[str, str]
    elsewhere: int = 0
    reordered: bool = False
    rounded: bool = False


@dataclass(frozen=True, kw_only=True, eq=False)
class Artifact:
    """An opened artifact, safe to use from threads.

    It satisfies the `Weights` protocol of quantflow.models.weights.

    Attributes:
        checkpoint: files and tensor headers.
        manifest: content of quantflow.json.
        names: source names of the model's parameters; a quantized linear stands for the one
            parameter `NAME.weight`.
        head: source name of the linear that makes logits; the embedding's where the two are one
            tensor.
        caches: source names of the attentions whose keys and values have scales, in order of the
            layers, and the number of kv heads of each; none where they are kept as they are.
        linears: source name of each quantized linear -> its placement.
        mtp: the same of layers that predict further tokens, which the model does not run.
        modules: source name of a linear, quantized or not -> its name in transformers' model, where
            that differs.
        dtype: dtype of the parameters that are not quantized and of all inputs.
        device: device of the weights.
        linears_device: device of the quantized linears; None is `device`. Layers that run one by
            one on a device have it, since the embedding beside them is looked up in host memory.
        kv_cache: scheme in which the artifact keeps keys and values; None: as they are.
        layout: layout of its quantized linears.
        cache_names: attention -> the tensors that hold the scales of its keys and values.
    """

    checkpoint: Checkpoint
    manifest: dict[str, Any]
    names: tuple[str, ...]
    head: str
    caches: dict[str, int]
    linears: dict[str, RunnableLinear]
    dtype: torch.dtype
    device: torch.device
    kv_cache: TensorScheme | None = None
    layout: TensorLayout = compressed_tensors
    cache_names: Callable[[str], tuple[str, str]] = compressed_tensors.kv_tensor_names
    modules: Mapping[str, str] = field(default_factory=dict)
    mtp: Mapping[str, RunnableLinear] = field(default_factory=dict)
    linears_device: torch.device | None = None

    @functools.cached_property
    def config(self) -> "PreTrainedConfig":
        """Configuration of the model, without its quantization.

        The model in memory is ours, not one of transformers' quantizers.
        """
        return _config_of(self.checkpoint)

    @property
    def width(self) -> int:
        """Features of a hidden state, which the head reads."""
        placement = self.linears.get(self.head)
        if placement is not None:
            return placement.shape[1]
        return self.checkpoint.infos[f"{self.head}.weight"].shape[1]

    def read(self, names: Iterable[str], dtype: torch.dtype | None = None) -> dict[str, Tensor]:
        """Read plain tensors; see `models.reading.read_tensors`.

        Raises:
            UsageError: a tensor is quantized: `prepare` reads it.
        """
        return read_tensors(self.checkpoint, [self._plain(name) for name in names], dtype=dtype)

    def read_rows(self, name: str, rows: Tensor) -> Tensor:
        """Read rows of a plain tensor.  rows: int64 [n]; returns [n, columns], as stored.

        Raises:
            UsageError: the tensor is quantized.
        """
        file, info = self.checkpoint.tensors[self._plain(name)]
        return read_rows(self.checkpoint.folder / file, info, rows)

    def decode(self, name: str) -> QuantizedLinear:
        """Read, check and decode the quantized linear `name`, in memory of its own.

        Raises:
            InputError: a tensor holds what its scheme does not allow, or has another shape than the
                model's; codes and zero points of another program's folder do not belong together.
        """
        placement = self.linears[name]
        tensors = read_tensors(self.checkpoint, self.layout.tensor_names(name, placement.scheme))
        if placement.elsewhere and f"{name}.weight_shape" in tensors:
            tensors[f"{name}.weight_shape"][0] -= placement.elsewhere
        linear = self.layout.decode(name, tensors, placement.scheme)
        self._require_shape(name, linear.weight.qvalue.shape)
        if not self.manifest:  # another program's folder, which has no hashes
            require_one_order(name, linear)
        return linear.to(self.linears_device or self.device)

    def packed(self, name: str) -> PackedLinear | None:
        """Read and check the quantized linear `name` with its codes packed.

        None where its weights or its layout are others, or where it will be on a device.

        Raises:
            InputError: see `decode`.
        """
        scheme = self.linears[name].scheme
        weights, device = scheme.weights, self.linears_device or self.device
        rounded = self.linears[name].rounded
        if (weights.kind, weights.num_bits) != ("float", 4) or not (
            rounded or scheme.input is None
        ):
            return None
        if not isinstance(self.layout, PackedLayout) or device.type != "cpu":
            return None
        tensors = read_tensors(self.checkpoint, self.layout.tensor_names(name, scheme))
        linear = self.layout.packed(name, tensors, scheme)
        if linear is not None:
            self._require_shape(name, linear.shape)
        return linear

    def _require_shape(self, name: str, stored: Sequence[int]) -> None:
        """Refuse a linear whose weight or bias has another shape than the model's.

        Raises:
            InputError: naming the linear.
        """
        wanted = list(self.linears[name].shape)
        _, info = self.checkpoint.tensors.get(f"{name}.bias", (None, None))
        bias = None if info is None else list(info.shape)
        if list(stored) != wanted or bias not in (None, wanted[:1]):
            cause = f"{name}: weight is {list(stored)}, bias {bias}, the model needs {wanted}"
            raise InputError(cause, _OTHER_MODEL)

    def quantized(self, name: str) -> QuantizedLinear | None:
        """The decoded linear whose weight `name` is; None where it is not quantized."""
        linear = name.removesuffix(".weight")
        return self.decode(linear) if linear in self.linears else None

    def bias(self, name: str, dtype: torch.dtype | None = None) -> Tensor | None:
        """Read the bias of a linear, [out_features]; None when it has none.

        Args:
            name: source name of the linear.
            dtype: dtype of the result; None: the artifact's own.
        """
        source = f"{name}.bias"
        if source not in self.checkpoint.tensors:
            return None
        return read_tensors(self.checkpoint, [source], dtype=dtype or self.dtype)[source].to(
            self.device
        )

    def kv_scales(self) -> tuple[KVScales, ...]:
        """Read the scales of every layer's cache, onto the device.

        There are none where keys and values are kept as they are.

        Raises:
            InputError: a scale is not finite and positive, or has another shape than the model's
                heads.
        """
        if self.kv_cache is None:
            return ()
        cache_scales = []
        for name, heads in self.caches.items():
            names = self.cache_names(name)
            tensors = read_tensors(self.checkpoint, names)
            cache_scales.append(
                compressed_tensors.decode_kv(
                    name, tensors, self.kv_cache, kv_heads=heads, names=names
                )
            )
        return tuple(scales.to(self.device) for scales in cache_scales)

    def prepare(self, name: str) -> QuantLinear:
        """Read the quantized linear `name` and make the module that runs it; no model is touched.

        Raises:
            InputError: see `decode`.
        """
        return QuantLinear(
            self.decode(name),
            bias=self.bias(name),
            backend=self.linears[name].backend,
            dtype=self.dtype,
        )

    @property
    def ahead(self) -> None:
        """Nothing is read ahead."""

    def fill_(
        self,
        module: nn.Module,
        names: Mapping[str, str],
        *,
        dtype: torch.dtype,
        device: Device = HOST,
    ) -> None:
        """Give a module its weights, one linear at a time.

        Quantized linears become QuantLinear, all others parameters.

        Args:
            module: the model, or a part of it.
            names: parameter name relative to `module` -> source name; a quantized linear's bias
                comes with its weight.
            dtype: dtype of the artifact.
            device: not read: weights go to the device that the artifact was opened for.

        Raises:
            InputError: a tensor that holds what it must not, or has another shape than the model's.
            UsageError: another dtype than the artifact was opened for.
        """
        del device
        if dtype != self.dtype:
            raise UsageError(
                f"dtype {dtype}: the artifact was opened for {self.dtype}", "open it for this dtype"
            )
        tied = twins(module)
        # all are set in one call, since two twins have their own tensors, or both the one there is
        plain: dict[str, Tensor] = {}
        for name, source in names.items():
            linear, twin = source.rpartition(".")[0], tied.get(name, "")
            if linear not in self.linears and not (twin in plain and names[twin] == source):
                plain[name] = self.read([source], dtype)[source].to(self.device)
            elif source == f"{linear}.weight" and linear in self.linears:
                module.set_submodule(name.rpartition(".")[0], self.prepare(linear))
        materialize_(module, plain, dtype=dtype)

    def empty_(self, module: nn.Module, names: Iterable[str]) -> None:
        """Undo `fill_`: parameters are on meta again.

        Linears are the model's own, without storage.
        """
        names = tuple(names)
        for owner in dict.fromkeys(name.rpartition(".")[0] for name in names):
            current = module.get_submodule(owner)
            if isinstance(current, QuantLinear):
                shape = (current.in_features, current.out_features)
                plain = nn.Linear(
                    *shape, bias=current.bias is not None, device="meta"
                ).requires_grad_(False)
                module.set_submodule(owner, plain.eval())
        release_(module, names)

    def _plain(self, name: str) -> str:
        if name.endswith(".weight") and name.removesuffix(".weight") in self.linears:
            raise UsageError(
                f"{name}: quantized in this artifact",
                "prepare the linear instead of reading its weight",
            )
        return name


def open_artifact(
    folder: str | Path,
    *,
    backend: str = "auto",
    dtype: torch.dtype = torch.float32,
    verify: bool = True,
    device: str | torch.device = "cpu",
    manifest: dict[str, Any] | None = None,
    inputs: Inputs = "stored",
    sealed: SealedFolder | None = None,
) -> Artifact:
    """Open an artifact; memory holds headers and the manifest, no weight.

    Args:
        folder: folder that `quantflow export` wrote.
        backend: backend of all quantized linears, as `quantflow.backends.choose` takes it.
        dtype: dtype of the parameters that are not quantized and of all inputs.
        verify: compare every file with its recorded hash first; it reads the artifact once more, in
            small pieces.
        device: device of the weights.
        manifest: content of quantflow.json, where it has been read before.
        inputs: treatment of inputs that the schemes leave alone. `stored`: none. `rounded`: a
            kernel that multiplies integers gets them rounded. `usual`: rounded where the manifest
            says that this costs little (`rounds_inputs`).
        sealed: what `quantflow.files.signing.open_signed` made of the folder: it is read in place
            of the folder, and nothing is verified again.

    Raises:
        IntegrityError: a file differs from its hash.
        InputError: a tensor that is missing, unknown or not used; no manifest, no
            quantization_config.
        UnsupportedError: a family, layout version or scheme that this version does not know.
        UsageError: a backend that is unknown or cannot run a linear; another dtype than float32,
            bfloat16 and float16.
    """
    if dtype not in _DTYPES:
        raise UsageError(f"dtype {dtype}", f"use one of {', '.join(map(str, _DTYPES))}")
    folder = Path(folder)
    if sealed is not None:
        manifest = sealed.manifest
        checkpoint = open_checkpoint(sealed.place).with_seal(sealed)
    else:
        manifest = manifest or read_manifest(folder)
        if verify:
            verify_artifact(folder, manifest=manifest)
        checkpoint = open_checkpoint(folder)
    table = checkpoint.config.get("quantization_config")
    if not isinstance(table, dict):
        raise InputError(
            f"{folder / 'config.json'}: no quantization_config",
            "give the folder of an exported artifact",
        )
    flavour = (manifest["float8"] or {}).get("flavour", "e4m3fn")

    def schemes(shapes: Shapes, modules: Mapping[str, str]) -> dict[str, LinearScheme]:
        headers = compressed_tensors.schemes_from_config(
            table, tuple(shapes), flavour=flavour, modules=modules
        )
        return {name: scheme for name, scheme in headers.items() if scheme is not None}

    cache = compressed_tensors.kv_scheme_from_config(table)
    quantization = _Quantization(layout=compressed_tensors, cache=cache, schemes=schemes)
    headers = _match_layout(checkpoint, quantization)
    _require_recorded(headers.checkpoint, manifest)
    rounds = inputs == "rounded" or (inputs == "usual" and rounds_inputs(manifest))
    choose_backend = functools.partial(_choose_backend, backend=backend, rounds=rounds)
    return _with_backends(
        manifest,
        quantization,
        headers,
        choose_backend=choose_backend,
        dtype=dtype,
        device=torch.device(device),
        mtp=_mtp_shapes(manifest),
    )


def _mtp_shapes(manifest: Mapping[str, Any]) -> Shapes:
    """(O, I) of the quantized linears of layers that predict further tokens, by source name."""
    return {
        entry["name"].removesuffix(".weight"): tuple(entry["shape"])
        for entry in manifest["ledger"]["tensors"]
        if entry["action"] == "quantized" and entry["reason"].startswith(UNUSED)
    }


def _open_foreign(
    checkpoint: Checkpoint,
    *,
    backend: str,
    dtype: torch.dtype,
    device: torch.device,
    inputs: Inputs,
) -> Artifact:
    """Open a folder that another program quantized.

    Raises:
        InputError: headers and config.json disagree; the message names the tensor.
        UnsupportedError: a layout or scheme that this version does not know.
    """
    table = checkpoint.config.get("quantization_config")
    if not isinstance(table, dict):
        raise InputError(
            f"{checkpoint.folder}/{checkpoint.quantized_by} is no table",
            "download the folder again",
        )
    checkpoint = checkpoint.in_parts(split_of(table, checkpoint.infos))
    layout, infos = layout_of(table, checkpoint.infos), checkpoint.infos
    of_cache, cache_names = CACHES.get(
        layout.name, (lambda _: None, compressed_tensors.kv_tensor_names)
    )
    marked = {
        owner
        for owner, _, leaf in (name.rpartition(".") for name in infos)
        if leaf not in ("weight", "bias")
    }

    def schemes(shapes: Shapes, modules: Mapping[str, str]) -> dict[str, LinearScheme]:
        # names in the table, such as the class Linear, mean no linear beside the language model
        if is_of_text(checkpoint):
            shapes = {name: shape for name, shape in shapes.items() if name in marked}
        return layout.schemes(table, shapes, infos, modules)

    quantization = _Quantization(
        layout=layout,
        cache=of_cache(table),
        cache_names=cache_names,
        schemes=schemes,
        reordered=layout.reordered,
    )
    try:
        headers = _match_layout(checkpoint, quantization)
    except InputError:
        # AutoGPTQ writes biases of zeros for linears that have none: no layout has a place for them
        lighter = _without_zero_biases(checkpoint)
        if lighter is checkpoint:
            raise
        headers = _match_layout(lighter, quantization)
    if not headers.schemes:
        cause = (
            f"{checkpoint.folder / CONFIG}: quant_method {table.get('quant_method')}, no linear "
            "has such tensors"
        )
        raise InputError(cause, "check that config.json belongs to these weights")
    # such a folder says nothing of what rounding costs: it is done where that is asked for
    choose_backend = functools.partial(_choose_backend, backend=backend, rounds=inputs == "rounded")
    return _with_backends(
        {},
        quantization,
        headers,
        choose_backend=choose_backend,
        dtype=dtype,
        device=device,
    )


def _require_recorded(checkpoint: Checkpoint, manifest: Mapping[str, Any]) -> None:
    """Refuse a tensor that no module has where the ledger does not call it unused.

    Raises:
        InputError: naming the tensor.
    """
    entries = manifest["ledger"]["tensors"]
    recorded = {
        name for entry in entries if entry["reason"].startswith(UNUSED) for name in entry["becomes"]
    }
    if foreign := sorted(checkpoint.unused.keys() - recorded):
        raise InputError(
            f"{foreign[0]}: in the checkpoint, but the model has no parameter {foreign[0]}",
            f"{_OTHER_MODEL}; {MANIFEST_NAME} does not name the tensor either",
        )


def _match_layout(checkpoint: Checkpoint, quantization: "_Quantization") -> "_Contents":
    """The contents by the layout of config.json, else by that of transformers' modules."""
    return _match_listed_layout(checkpoint, quantization) or _match(
        checkpoint, _module_layout(checkpoint), quantization
    )


def _with_backends(
    manifest: dict[str, Any],
    quantization: "_Quantization",
    headers: "_Contents",
    *,
    choose_backend: Callable[[Case], tuple[LinearScheme, Backend, dict[str, str]]],
    dtype: torch.dtype,
    device: torch.device,
    mtp: Shapes | None = None,
) -> Artifact:
    """The artifact, with the backend of each linear; `mtp` are those beside the model's."""
    # linears of one scheme and shape, which are many, ask the backends once
    linears, alike = {}, functools.cache(choose_backend)
    mtp = mtp or {}
    schemes = headers.schemes | (quantization.schemes(mtp, {}) if mtp else {})
    for name, stored in schemes.items():
        shape = mtp[name] if name in mtp else headers.shapes[name]
        scheme, chosen, reasons = alike(
            Case(scheme=stored, device=device, shape=shape, dtype=dtype)
        )
        linears[name] = RunnableLinear(
            scheme=scheme,
            shape=shape,
            backend=chosen,
            reasons=reasons,
            reordered=quantization.reordered,
            rounded=scheme != stored,
        )
    return Artifact(
        checkpoint=headers.checkpoint,
        manifest=manifest,
        names=headers.names,
        head=headers.head,
        caches=headers.caches,
        linears={name: linears[name] for name in headers.schemes},
        mtp={name: linears[name] for name in mtp},
        dtype=dtype,
        device=device,
        kv_cache=quantization.cache,
        layout=quantization.layout,
        cache_names=quantization.cache_names,
        modules=headers.modules,
    )


def _choose_backend(
    case: Case, *, backend: str, rounds: bool
) -> tuple[LinearScheme, Backend, dict[str, str]]:
    """The scheme that a linear runs with, its backend, and why those preferred over it cannot.

    With `rounds` its inputs are rounded where that makes the product one of integers. They are not
    where the reference would have to compute it, unless that was asked for, nor in a backend by
    name that takes inputs as they are.
    """
    rounded = with_rounded_inputs(case.scheme) if rounds else None
    if rounded is not None:
        with suppress(UsageError):
            chosen, reasons = choose(replace(case, scheme=rounded), backend=backend)
            if chosen is not reference.BACKEND or backend == chosen.name:
                return rounded, chosen, reasons
    chosen, reasons = choose(case, backend=backend)
    return case.scheme, chosen, reasons


def _without_zero_biases(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint without biases of zeros; itself if it has none.

    AutoGPTQ writes such biases for linears that have none.
    """
    owners = {name.rpartition(".")[0] for name in checkpoint.tensors if name.endswith(".qweight")}
    biases = [key for name in sorted(owners) if (key := f"{name}.bias") in checkpoint.tensors]
    zero = {key for key in biases if not read_tensors(checkpoint, [key])[key].any()}
    if not zero:
        return checkpoint
    return replace(
        checkpoint,
        tensors={name: place for name, place in checkpoint.tensors.items() if name not in zero},
    )


def open_folder(
    folder: str | Path,
    *,
    backend: str = "auto",
    dtype: torch.dtype = torch.float32,
    verify: bool = True,
    device: str | torch.device = "cpu",
    manifest: dict[str, Any] | None = None,
    inputs: Inputs = "stored",
    sealed: SealedFolder | None = None,
) -> Artifact:
    """Open an artifact, a folder that another program quantized, or a model.

    A model becomes an artifact without quantized linears. No hash is known of a model or of another
    program's folder. These are checked: the family and every name, that each tensor is a parameter
    and each parameter has a tensor, the shapes against config.json, whole files, and NaN and Inf
    when a tensor is read.

    Args:
        folder: an artifact, a folder in one of `quantflow.formats.LAYOUTS`, or a Hugging Face
            model.
        backend: backend of quantized linears, as for `open_artifact`; `auto` for a model.
        dtype: dtype of parameters and inputs.
        verify: compare the files of an artifact with their hashes first.
        device: device of the weights.
        manifest: content of an artifact's quantflow.json, where it has been read before.
        inputs: treatment of inputs, as for `open_artifact`; `usual` is `stored` where there is no
            manifest.
        sealed: an artifact's, as for `open_artifact`.

    Raises:
        UsageError: a backend for a model, which has no quantized linear; see `open_artifact` for
            others.
        QuantflowError: see `open_artifact` and `quantflow.models.load.open_source`.
    """
    if sealed is not None or is_artifact(folder):
        return open_artifact(
            folder,
            backend=backend,
            dtype=dtype,
            verify=verify,
            device=device,
            manifest=manifest,
            inputs=inputs,
            sealed=sealed,
        )
    if dtype not in _DTYPES:
        raise UsageError(f"dtype {dtype}", f"use one of {', '.join(map(str, _DTYPES))}")
    if not is_model(folder):
        return _open_foreign(
            open_checkpoint(Path(folder)),
            backend=backend,
            dtype=dtype,
            device=torch.device(device),
            inputs=inputs,
        )
    if backend != "auto":
        raise UsageError(
            f"{folder}: backend {backend} for a model that is not quantized",
            "leave the backend out",
        )
    checkpoint = open_checkpoint(Path(folder))
    refuse_quantized(checkpoint)
    headers = _match_listed_layout(checkpoint, None)
    if headers is None:
        from quantflow.models.load import open_source  # here: it imports transformers' model code

        checkpoint = open_source(folder).checkpoint
        headers = _match(checkpoint, _module_layout(checkpoint), None)
    return Artifact(
        checkpoint=headers.checkpoint,
        manifest={},
        names=headers.names,
        head=headers.head,
        caches={},
        linears={},
        dtype=dtype,
        device=torch.device(device),
    )


def is_artifact(folder: str | Path) -> bool:
    """Whether a folder has a manifest, or nothing that says what else it is."""
    return (Path(folder) / MANIFEST_NAME).exists() or not (Path(folder) / CONFIG).is_file()


def is_model(folder: str | Path) -> bool:
    """Whether a folder is a model that is not quantized: nothing in it says otherwise."""
    config = Path(folder) / CONFIG
    if (Path(folder) / MANIFEST_NAME).exists() or not config.is_file():
        return False
    content = read_json(config)
    if not isinstance(content, dict):
        return False
    return not is_quantized(Path(folder), content)


@dataclass(frozen=True, kw_only=True)
class _Contents:
    """The contents of a checkpoint, matched with a layout by their headers.

    Attributes:
        schemes: source name of each quantized linear -> how it is stored.
        shapes: source name of each linear -> (out_features, in_features).
        modules, names, head, caches: fields of `Artifact`.
        checkpoint: the checkpoint, with the tensors apart that no module has.
    """

    schemes: dict[str, LinearScheme]
    shapes: dict[str, tuple[int, int]]
    modules: dict[str, str]
    names: tuple[str, ...]
    head: str
    caches: dict[str, int]
    checkpoint: Checkpoint


@dataclass(frozen=True, kw_only=True)
class _Quantization:
    """How a checkpoint says that it is quantized.

    Attributes:
        layout: layout of the quantized linears.
        cache: scheme of keys and values; None: kept as they are.
        schemes: (source name -> (O, I) of every linear, source name -> name in the model where that
            differs) -> (source name -> scheme of every quantized linear).
        reordered: whether columns of a weight may stand in another order than its inputs.
        cache_names: field of `Artifact`.
    """

    layout: TensorLayout
    cache: TensorScheme | None
    schemes: Callable[[Shapes, Mapping[str, str]], dict[str, LinearScheme]]
    reordered: bool = False
    cache_names: Callable[[str], tuple[str, str]] = compressed_tensors.kv_tensor_names


def _match_listed_layout(
    checkpoint: Checkpoint, quantization: _Quantization | None
) -> _Contents | None:
    """The contents by the layout that config.json alone says; None where they do not fit it.

    An InputError here is no verdict: the module tree knows older names of tensors. Where it does
    not fit either, its error says what is wrong.
    """
    layout = listed(checkpoint.config)
    if layout is None:
        return None
    try:
        return _match(checkpoint, layout, quantization)
    except InputError:
        return None


def _module_layout(checkpoint: Checkpoint) -> ModelTensors:
    """The tensors by transformers' module tree."""
    # here: it imports transformers' model code
    from quantflow.models.module_tensors import ModuleTensors

    config = _config_of(checkpoint)
    return ModuleTensors(config, graph=lambda: graph_for(config))


def _config_of(checkpoint: Checkpoint) -> "PreTrainedConfig":
    """The configuration of a model, without the quantization."""
    from quantflow.models.configuration import load_config  # here: it imports transformers

    config = load_config(checkpoint)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    return config


def _match(
    checkpoint: Checkpoint, layout: ModelTensors, quantization: _Quantization | None
) -> _Contents:
    """Compare the headers with a layout; without `quantization` nothing is quantized.

    Raises:
        InputError: a tensor that is missing, unknown, stored twice, or of another shape than the
            model's.
    """
    owners = dict.fromkeys(name.rpartition(".")[0] for name in checkpoint.tensors)
    shapes, schemes, caches = layout.linears(owners), dict[str, LinearScheme](), dict[str, int]()
    modules = {name: module for name in shapes if (module := layout.module(name)) != name}
    claimed: set[str] = set()
    if quantization is not None:
        schemes = quantization.schemes(shapes, modules)
        caches = {} if quantization.cache is None else layout.caches()
        claimed = _quantized_tensor_names(quantization, schemes, caches)
    parameters = _parameters(checkpoint, schemes, claimed)
    bound = layout.bind(parameters, quantized=schemes.keys())
    require_shapes(checkpoint.infos, bound.parameters, linears=schemes)
    reasons = {name: reason_of(name, checkpoint.config) for name in bound.unused}
    return _Contents(
        schemes=schemes,
        shapes=shapes,
        modules=modules,
        names=tuple(name for name in parameters if name not in reasons),
        head=bound.head,
        caches=caches,
        checkpoint=checkpoint.without(reasons) if reasons else checkpoint,
    )


def _parameters(
    checkpoint: Checkpoint, schemes: Mapping[str, LinearScheme], claimed: set[str]
) -> tuple[str, ...]:
    """The source names of the model's parameters.

    A quantized linear stands for the one parameter `NAME.weight`.

    Raises:
        InputError: a weight that is stored twice, or a tensor that a scheme names, `claimed`, is
            missing.
    """
    if missing := sorted(claimed - checkpoint.tensors.keys()):
        whose = "cache" if missing[0].endswith((".k_scale", ".v_scale")) else "linear"
        raise InputError(
            f"{missing[0]}: its {whose}'s scheme needs it, it is not in the artifact",
            "export it again",
        )
    others = [name for name in checkpoint.tensors if name not in claimed]
    quantized = [f"{name}.weight" for name in schemes]
    if twice := sorted(set(others) & set(quantized)):
        raise InputError(
            f"{twice[0]}: stored beside its quantized form", "export the artifact again"
        )
    return (*others, *quantized)


def _quantized_tensor_names(
    quantization: _Quantization, schemes: Mapping[str, LinearScheme], attentions: Iterable[str]
) -> set[str]:
    """The names of all tensors of quantized linears, and of the scales of quantized caches."""
    scales = {tensor for attention in attentions for tensor in quantization.cache_names(attention)}
    return scales | {
        tensor
        for name, scheme in schemes.items()
        for tensor in quantization.layout.tensor_names(name, scheme)
    }
