"""Open an artifact with all of its weights in memory: as a model of transformers that runs, or as a decoder."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from quantflow.artifact.canonical import read_json
from quantflow.artifact.checkpoint import Checkpoint
from quantflow.artifact.manifest import read_manifest
from quantflow.artifact.verify import verify as verify_artifact
from quantflow.backends import hpu
from quantflow.core import kernels, native
from quantflow.core.kv import KVScales
from quantflow.errors import UnsupportedError, UsageError
from quantflow.models.graph import graph_for
from quantflow.models.load import load_tokenizer, skeleton
from quantflow.runtime import lean, operations, projection
from quantflow.runtime import packed as packed_file
from quantflow.runtime.artifact import Artifact, open_artifact
from quantflow.runtime.decoder import Decoder, TransformersDecoder
from quantflow.runtime.kv_scales import read_kv_scales
from quantflow.runtime.packed import Pack

_TOKENIZER_FILES = frozenset({"tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json"})
_GENERATION = "generation_config.json"
_WEIGHTS = ".safetensors"
DECODERS = ("auto", "lean", "transformers")


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
        kv_scales: of each layer's cache, for whoever keeps keys and values; none where they stay as they are.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None
    manifest: dict[str, Any]
    backends: dict[str, str]
    reasons: dict[str, dict[str, str]]
    eos_token_ids: tuple[int, ...]
    kv_scales: tuple[KVScales, ...] = ()


@dataclass(frozen=True, kw_only=True, eq=False)
class Loaded:
    """An artifact that decodes.

    Attributes:
        decoder: what runs it.
        name: lean or transformers.
        reasons: why a faster way was not taken, in sentences; empty where all that there is was used.
        backends: as in `Runtime`.
        tokenizer: as in `Runtime`.
        eos_token_ids: as in `Runtime`.
    """

    decoder: Decoder
    name: str
    reasons: tuple[str, ...]
    backends: dict[str, str]
    tokenizer: PreTrainedTokenizerBase | None
    eos_token_ids: tuple[int, ...]


def load_decoder(
    folder: str | Path,
    *,
    decoder: str = "auto",
    kv_cache: str = "auto",
    backend: str = "auto",
    dtype: torch.dtype = torch.float32,
    verify: bool = True,
    device: str | torch.device = "cpu",
    crops: bool = False,
    pack: bool = False,
) -> Loaded:
    """Open an artifact to decode with it.

    Args:
        folder: what `quantflow export` wrote.
        decoder: `lean` for `quantflow.runtime.lean`, `transformers` for its modules, `auto` for the first where it can.
        kv_cache: a key of `quantflow.runtime.kv_cache.KINDS`, which needs the lean decoder; or `auto` for 8 bits with the
            artifact's measured scales where it brings some, else for dtype.
        backend: as for `load`.
        dtype: as for `load`.
        verify: as for `load`.
        device: as for `load`.
        crops: whether `crop` will be called; speculation does.
        pack: of the lean decoder: read its weights from FOLDER-packed, as kernels want them, or put them there.

    Raises:
        UnsupportedError: the lean decoder was asked for and cannot run this artifact; and what `load` raises.
        UsageError: a decoder that is unknown, or a cache that transformers' modules do not have; and what `load` raises.
        IntegrityError: as for `load`.
        InputError: as for `load`.
    """
    if decoder not in DECODERS:
        raise UsageError(f"decoder {decoder!r} is unknown", f"use one of {', '.join(DECODERS)}")
    reason = "it was not asked for"
    if decoder != "transformers" and torch.device(device).type == "cpu":
        packed = _pack(Path(folder), backend, dtype, verify=verify) if pack else None
        whole = packed is not None and packed.complete
        if whole and verify:  # the weights' own files are not read, and the pack has been checked
            verify_artifact(
                Path(folder), map_all=lambda check, names: map(check, (n for n in names if not n.endswith(_WEIGHTS)))
            )
        artifact = open_artifact(folder, backend=backend, dtype=dtype, verify=verify and not whole)
        reason = lean.why_not(artifact) or ""
        if not reason or decoder == "lean":
            made = lean.LeanDecoder(artifact, kv_cache=kv_cache, pack=packed)
            if packed is not None:
                packed.save()
            return Loaded(
                decoder=made,
                name="lean",
                reasons=made.notes,
                backends=_backends(artifact),
                tokenizer=_tokenizer(artifact),
                eos_token_ids=_eos_token_ids(artifact.checkpoint),
            )
        verify = False  # it is done
    elif decoder == "lean":
        raise UnsupportedError(f"the lean decoder: it runs on cpu, not on {device}", "use decoder transformers")
    elif decoder == "auto":
        reason = f"it runs on cpu, not on {device}"
    if kv_cache != "auto":
        raise UsageError(f"kv cache {kv_cache}: the lean decoder has it, and is not used: {reason}", "leave kv_cache out")
    runtime = load(folder, backend=backend, dtype=dtype, verify=verify, device=device)
    return with_modules(runtime, reason=reason, device=device, crops=crops)


def with_modules(runtime: Runtime, *, reason: str, device: str | torch.device, crops: bool) -> Loaded:
    """Return transformers' modules as what decodes.

    Args:
        runtime: with whatever was attached to its model.
        reason: why the lean decoder is not used.
        device: of the model.
        crops: whether `crop` will be called.
    """
    return Loaded(
        decoder=TransformersDecoder(runtime.model, device=device, crops=crops, kv_scales=runtime.kv_scales),
        name="transformers",
        reasons=(f"the lean decoder is not used: {reason}",),
        backends=runtime.backends,
        tokenizer=runtime.tokenizer,
        eos_token_ids=runtime.eos_token_ids,
    )


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
        UnsupportedError: a family, layout version, device or scheme that this version does not know; a mixture on a Gaudi.
        UsageError: a backend that is unknown or cannot run a linear; another dtype than float32, bfloat16 and float16.
    """
    on_gaudi = torch.device(device).type == hpu.NAME
    if on_gaudi:
        hpu.require()  # before anything is read; importing the bridge makes torch know the device
    artifact = open_artifact(folder, backend=backend, dtype=dtype, verify=verify, device=device)
    if on_gaudi and graph_for(artifact.config).sparse:
        raise UnsupportedError(
            f"{folder}: experts on {hpu.NAME}: a graph that is replayed sends every token where the first went",
            "run it on the CPU",
        )
    model = skeleton(artifact.config)
    artifact.fill_(model, artifact.to_source, dtype=dtype)
    model.to(artifact.device)
    if on_gaudi:
        hpu.wrap_in_graph(model)  # replaces the model's forward by one that replays graphs, and returns the same model
    return as_runtime(artifact, model)


def as_runtime(artifact: Artifact, model: PreTrainedModel) -> Runtime:
    """Return a model together with what its artifact says about it.

    Raises:
        InputError: the tokenizer's files or generation_config.json are damaged.
    """
    return Runtime(
        model=model,
        tokenizer=_tokenizer(artifact),
        manifest=artifact.manifest,
        backends=_backends(artifact),
        reasons={name: linear.reasons for name, linear in artifact.linears.items()},
        eos_token_ids=_eos_token_ids(artifact.checkpoint),
        kv_scales=read_kv_scales(artifact),
    )


def _pack(folder: Path, backend: str, dtype: torch.dtype, *, verify: bool) -> Pack:
    """Return the pack of an artifact for these choices on this machine."""
    machine = [native.why_not(kernels.SOURCE, needs=kernels.NEEDS), native.why_not(operations.SOURCE, needs=())]
    inputs = (read_manifest(folder)["digest"], dtype, backend, *(reason is None for reason in machine))
    code = [Path(module.__file__ or "") for module in (kernels, lean, operations, packed_file, projection)]
    name = packed_file.name_of(*inputs, sources=(*code, kernels.SOURCE))
    return Pack(folder.with_name(f"{folder.name}-packed") / name, verify=verify)


def _backends(artifact: Artifact) -> dict[str, str]:
    return {name: linear.backend.NAME for name, linear in artifact.linears.items()}


def _tokenizer(artifact: Artifact) -> PreTrainedTokenizerBase | None:
    files = artifact.checkpoint.files
    return None if _TOKENIZER_FILES.isdisjoint(files) else load_tokenizer(artifact.checkpoint.folder)


def _eos_token_ids(checkpoint: Checkpoint) -> tuple[int, ...]:
    """Return the tokens that end a text: those of generation_config.json, else those of config.json."""
    config = checkpoint.config
    if _GENERATION in checkpoint.files:
        generation = read_json(checkpoint.folder / _GENERATION)
        if isinstance(generation, dict) and generation.get("eos_token_id") is not None:
            config = generation
    found = config.get("eos_token_id")
    return tuple(found) if isinstance(found, list) else () if found is None else (found,)
