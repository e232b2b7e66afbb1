"""Artifacts with all weights in memory: as a decoder of our own, or as a model of transformers."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch
from transformers import PreTrainedTokenizerBase

from quantflow import cpu_threads, process_memory
from quantflow.accelerators import GPUS
from quantflow.backends import hpu, kernels, native
from quantflow.core import scheme
from quantflow.core.device import missing_gpu
from quantflow.distributed.communicator import Communicator
from quantflow.errors import UnsupportedError, UsageError
from quantflow.files import signing
from quantflow.files.manifest import read_manifest, rounds_inputs
from quantflow.files.outputs import beside
from quantflow.files.side_file_kinds import TOKENIZER_FILES
from quantflow.files.verify import verify as verify_artifact
from quantflow.models.tokenizer import load_tokenizer
from quantflow.runtime import lean, operations, packed, projection
from quantflow.runtime.artifact import (
    Artifact,
    inputs_asked,
    is_artifact,
    is_model,
    open_folder,
    require_rounded,
)
from quantflow.runtime.attention_choice import Attention
from quantflow.runtime.batch_shapes import CAPTURED, Gaudi
from quantflow.runtime.decoder import Decoder
from quantflow.runtime.generation_config import end_tokens
from quantflow.runtime.ranks.tensor_parallel import Ranks
from quantflow.runtime.shapes import NO_SHAPES, Shapes

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from quantflow.runtime.expert_cache import ExpertCache

_MISSING: Mapping[str, Callable[[torch.device], str | None]] = MappingProxyType(
    {
        "cpu": lambda _: None,
        **dict.fromkeys(GPUS, missing_gpu),
        hpu.NAME: lambda _: hpu.missing_here(),
    }
)
DECODERS = ("auto", "lean", "transformers")


@dataclass(frozen=True, kw_only=True, eq=False)
class Loaded:
    """An artifact that decodes.

    Attributes:
        artifact: opened artifact: the manifest, the backend of each quantized linear and why those
            before it cannot run it.
        decoder: decoder that runs the artifact.
        model: the Hugging Face causal LM of the transformers decoder, with QuantLinear in place of
            its quantized linears, in eval mode and without gradients; None beside the lean decoder,
            which has no modules.
        reasons: why a faster way was not taken, in sentences; empty where the fastest was.
        tokenizer: None when the artifact has no tokenizer files.
        eos_token_ids: tokens that end a text (`quantflow.runtime.generation_config.end_tokens`).
        experts: the experts in memory of a mixture whose weights stay on disk; None elsewhere.
    """

    artifact: Artifact
    decoder: Decoder
    model: "PreTrainedModel | None"
    reasons: tuple[str, ...]
    tokenizer: PreTrainedTokenizerBase | None
    eos_token_ids: tuple[int, ...]
    experts: "ExpertCache | None" = None

    @property
    def name(self) -> str:
        """Name of the decoder: lean or transformers."""
        return "lean" if self.model is None else "transformers"

    @property
    def backends(self) -> dict[str, str]:
        """Source name of each quantized linear -> name of its backend."""
        return {name: linear.backend.name for name, linear in self.artifact.linears.items()}

    @property
    def rounded_inputs(self) -> int:
        """Number of linears whose inputs are rounded although their scheme leaves them alone."""
        return sum(linear.rounded for linear in self.artifact.linears.values())


def load(
    folder: str | Path,
    *,
    decoder: str = "transformers",
    kv_cache: str = "auto",
    backend: str = "auto",
    dtype: torch.dtype = torch.float32,
    verify: bool = True,
    device: str | torch.device = "cpu",
    crops: bool = False,
    pack: bool = False,
    exact: bool = False,
    rounded_inputs: bool = False,
    compiled: bool = False,
    attention: Attention | None = None,
    shapes: Shapes = NO_SHAPES,
    gaudi: Gaudi = CAPTURED,
    communicator: Communicator | None = None,
    require_signature: str | Path | signing.Trusted | None = None,
) -> Loaded:
    """Open an artifact, or a model that is not quantized.

    Weights are read and prepared one linear at a time, so memory holds the prepared model and one
    linear.

    Args:
        folder: what `quantflow export` wrote, or a Hugging Face model
            (`quantflow.runtime.artifact.open_folder`).
        decoder: `lean` for `quantflow.runtime.lean`, `transformers` for its modules, `auto` for the
            first where it can.
        kv_cache: a key of `quantflow.runtime.kv_cache.KINDS`, which needs the lean decoder; or
            `auto` for 8 bits with the artifact's measured scales where it brings some, else for
            dtype.
        backend: as `quantflow.backends.choose` takes it, for all quantized linears: a name, `auto`,
            or several with commas.
        dtype: dtype of the parameters that are not quantized and of all inputs.
        verify: compare every file with its recorded hash first; it reads the artifact once more.
        device: device where the model runs.
        crops: whether `crop` will be called; speculation does.
        pack: read the lean decoder's weights from FOLDER-packed, arranged for the kernels, or write
            them there.
        exact: leave inputs that the schemes leave alone as they are, though the manifest says that
            rounding them costs next to nothing (`quantflow.files.manifest.rounds_inputs`).
        rounded_inputs: round them to int8 in the groups of the weights, whatever it costs and
            whoever wrote the folder, where a kernel then multiplies integers
            (`quantflow.core.scheme.with_rounded_inputs`).
        compiled: transformers' modules run, and torch.compile compiles them at the first token;
            `auto` then means them.
        attention: how transformers' modules attend; `auto` then means them.
        shapes: shapes that transformers' modules run in; where any are fixed, `auto` means them.
        gaudi: how a Gaudi runs transformers' modules.
        require_signature: public key, PEM, or identity that the signature beside the artifact has
            to have; checked first. The bytes that were checked are those that run, whatever becomes
            of the folder (`quantflow.files.sealed`).
        communicator: connection to the other processes that share the model; this one then holds
            its part of the lean decoder alone.

    Raises:
        IntegrityError: a file differs from its hash, or was changed while it was loaded and has to
            be signed.
        InputError: a tensor that is missing, unknown or not used; a scale that is not finite and
            positive; no manifest; damaged files of a tokenizer.
        UnsupportedError: a family, layout version, device or scheme that this version does not
            know; a mixture on a Gaudi; the lean decoder was asked for and cannot run this artifact.
        UsageError: a decoder or backend that is unknown, a backend that cannot run a linear, a
            cache that transformers' modules do not have; another dtype than float32, bfloat16 and
            float16; rounded inputs beside `exact`, or where no linear can have them.
    """
    inputs = inputs_asked(exact=exact, rounded_inputs=rounded_inputs)
    folder, device = Path(folder), torch.device(device)
    cpu_threads.tell_torch()
    sealed = (
        None
        if require_signature is None
        else signing.open_signed(folder, signing.Trusted.of(require_signature))
    )
    if decoder not in DECODERS:
        raise UsageError(f"decoder {decoder!r} is unknown", f"use one of {', '.join(DECODERS)}")
    if compiled and decoder == "lean":
        raise UsageError(
            "torch_compile: the lean decoder has no modules to compile", "leave one of them out"
        )
    of_modules = {
        "torch_compile": compiled,
        "attention": attention is not None,
        "static shapes": shapes.fixed,
    }
    asked = [name for name, given in of_modules.items() if given]
    if asked and decoder == "lean":
        raise UsageError(
            f"{asked[0]} with the lean decoder, which has its own way", "leave one of them out"
        )
    why = "it was not asked for"
    if asked and decoder == "auto":
        decoder, why = "transformers", f"{' and '.join(asked)} was asked for"
    if communicator is not None and (decoder == "transformers" or device.type != "cpu"):
        raise UsageError(
            f"{communicator.world} ranks: decoder {decoder} on {device}",
            "share the lean decoder, on cpu",
        )
    if device.type not in _MISSING:
        raise UsageError(f"device {device} is unknown", f"use one of {', '.join(_MISSING)}")
    if missing := _MISSING[device.type](device):  # before anything is read
        raise UnsupportedError(
            f"device {device}: needs {missing}", "use device cpu, or a machine with that"
        )
    kept = None
    manifest = None
    if pack and decoder != "transformers" and device.type == "cpu":
        if sealed is None and is_model(folder):
            raise UsageError(
                f"{folder}: a pack of a model that is not quantized, which has no hash",
                "leave pack out",
            )
        if sealed is None and not is_artifact(folder):
            raise UsageError(
                f"{folder}: a pack of another program's folder, which has no hash", "leave pack out"
            )
        manifest = read_manifest(folder) if sealed is None else sealed.manifest
        rounds = inputs == "rounded" or (inputs == "usual" and rounds_inputs(manifest))
        kept = _pack(
            folder, manifest["digest"], (backend, dtype, rounds), communicator, verify=verify
        )
        # the weights' own files are not read, and the pack has been checked
        if kept.complete and verify and sealed is None:
            others = [name for name in manifest["files"] if not name.endswith(".safetensors")]
            verify_artifact(folder, map_all=lambda check, _: map(check, others), manifest=manifest)
            verify = False
    artifact = open_folder(
        folder,
        backend=backend,
        dtype=dtype,
        verify=verify,
        device=device,
        manifest=manifest,
        inputs=inputs,
        sealed=sealed,
    )
    if rounded_inputs:
        require_rounded(artifact)
    takes_back = crops and decoder == "auto" and communicator is None
    reason = why if decoder == "transformers" else lean.why_not(artifact, crops=takes_back)
    if reason is None or decoder == "lean" or communicator is not None:
        ranks = (
            None if communicator is None or reason is not None else Ranks(artifact, communicator)
        )
        share = artifact if ranks is None else ranks.artifact
        lean_decoder = lean.LeanDecoder(share, kv_cache=kv_cache, pack=kept, ranks=ranks)
        if kept is not None:
            kept.save()
        process_memory.give_back_holes()  # between the weights, where they were made
        return loaded(artifact, lean_decoder, model=None, reasons=())
    if kv_cache != "auto":
        raise UsageError(
            f"kv cache {kv_cache}: the lean decoder has it, and is not used: {reason}",
            "leave kv_cache out",
        )
    # here: it imports transformers' model code
    from quantflow.runtime.modules import filled, with_modules

    return with_modules(
        artifact,
        filled(artifact, gaudi=gaudi),
        reason=reason,
        crops=crops,
        compiled=compiled,
        attention=attention,
        shapes=shapes,
    )


def _pack(
    folder: Path,
    digest: str,
    asked: tuple[object, ...],
    communicator: Communicator | None,
    *,
    verify: bool,
) -> packed.Pack:
    """The pack of an artifact for these choices on this machine.

    Its name hashes the code that lays weights out, so that another version of it makes another
    pack.
    """
    choices = (
        *asked,
        native.why_not(kernels.SOURCE, cpu_flags=kernels.CPU_FLAGS) is None,
        communicator and (communicator.rank, communicator.world),
    )
    code = [
        Path(module.__file__ or "")
        for module in (scheme, kernels, lean, operations, packed, projection)
    ]
    name = packed.name_of(digest, *choices, sources=(*code, kernels.SOURCE))
    return packed.Pack(beside(folder, "-packed") / name, verify=verify)


def loaded(
    artifact: Artifact,
    decoder: Decoder,
    *,
    model: "PreTrainedModel | None",
    reasons: tuple[str, ...],
) -> Loaded:
    """The artifact with its decoder, its tokenizer and the tokens that end a text.

    Raises:
        InputError: the tokenizer's files or generation_config.json are damaged.
    """
    checkpoint = artifact.checkpoint
    tokenizer = (
        None if TOKENIZER_FILES.isdisjoint(checkpoint.files) else load_tokenizer(checkpoint.folder)
    )
    return Loaded(
        artifact=artifact,
        decoder=decoder,
        model=model,
        reasons=reasons,
        tokenizer=tokenizer,
        eos_token_ids=end_tokens(checkpoint, tokenizer, vocab_size=decoder.vocab_size),
    )
