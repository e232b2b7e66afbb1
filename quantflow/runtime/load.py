"""Open an artifact as a model that runs, with all of its weights in memory."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from quantflow.artifact.canonical import read_json
from quantflow.artifact.checkpoint import Checkpoint
from quantflow.backends import hpu
from quantflow.errors import UnsupportedError
from quantflow.models.graph import graph_for
from quantflow.models.load import load_tokenizer, skeleton
from quantflow.models.names import NameMap
from quantflow.runtime.artifact import Artifact, open_artifact

_TOKENIZER_FILES = frozenset({"tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json"})
_GENERATION = "generation_config.json"


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
    artifact.fill_(model, NameMap(model).bind(artifact.names).to_source, dtype=dtype)
    model.to(artifact.device)
    if on_gaudi:
        hpu.wrap_in_graph(model)  # replaces the model's forward by one that replays graphs, and returns the same model
    return as_runtime(artifact, model)


def as_runtime(artifact: Artifact, model: PreTrainedModel) -> Runtime:
    """Return a model together with what its artifact says about it.

    Raises:
        InputError: the tokenizer's files or generation_config.json are damaged.
    """
    has_tokenizer = not _TOKENIZER_FILES.isdisjoint(artifact.checkpoint.files)
    return Runtime(
        model=model,
        tokenizer=load_tokenizer(artifact.checkpoint.folder) if has_tokenizer else None,
        manifest=artifact.manifest,
        backends={name: linear.backend.NAME for name, linear in artifact.linears.items()},
        reasons={name: linear.reasons for name, linear in artifact.linears.items()},
        eos_token_ids=_eos_token_ids(artifact.checkpoint),
    )


def _eos_token_ids(checkpoint: Checkpoint) -> tuple[int, ...]:
    """Return the tokens that end a text: those of generation_config.json, else those of config.json."""
    config = checkpoint.config
    if _GENERATION in checkpoint.files:
        generation = read_json(checkpoint.folder / _GENERATION)
        if isinstance(generation, dict) and generation.get("eos_token_id") is not None:
            config = generation
    found = config.get("eos_token_id")
    return tuple(found) if isinstance(found, list) else () if found is None else (found,)
