"""Transformers' modules with an artifact's weights: the decoder where the lean one cannot run."""

import shutil
from functools import partial

import torch
from transformers import PreTrainedModel

from quantflow.backends import cuda, hpu
from quantflow.errors import UnsupportedError
from quantflow.models.names import NameMap
from quantflow.models.open import graph_for
from quantflow.models.parameters import drop_unread_
from quantflow.models.skeleton import skeleton
from quantflow.runtime import graphs
from quantflow.runtime.artifact import Artifact
from quantflow.runtime.decoder import Decoder
from quantflow.runtime.load import Loaded, loaded
from quantflow.runtime.transformers_decoder import TransformersDecoder

_COMPILERS = ("g++", "clang++", "c++")  # torch.compile writes C++ for a CPU


def with_modules(
    artifact: Artifact, model: PreTrainedModel, *, reason: str, crops: bool, compiled: bool = False
) -> Loaded:
    """Transformers' modules as the decoder of an artifact.

    Args:
        artifact: artifact that the model has its weights from.
        model: model on the artifact's device.
        reason: why the lean decoder is not used.
        crops: whether `crop` will be called.
        compiled: torch.compile compiles the modules when they run first; no decode step is captured
            then.

    Raises:
        InputError: the tokenizer's files or generation_config.json are damaged.
        UnsupportedError: nothing here compiles C++, or Gaudi's bridge has captured the model.
    """
    if compiled:
        _compile_(artifact, model)
    decoder: Decoder = TransformersDecoder(
        model, device=artifact.device, crops=crops, kv_scales=artifact.kv_scales()
    )
    reasons = [f"the lean decoder is not used: {reason}"]
    if compiled:
        reasons.append("decode steps are not captured: torch.compile was asked for")
    elif artifact.device.type == cuda.NAME and (missing := graphs.why_not(artifact)):
        reasons.append(f"decode steps are not captured: {missing}")
    elif artifact.device.type == cuda.NAME:
        decoder = graphs.GraphDecoder(
            model, device=artifact.device, capture=partial(cuda.capture, device=artifact.device)
        )
    return loaded(artifact, decoder, model=model, reasons=tuple(reasons))


def _compile_(artifact: Artifact, model: PreTrainedModel) -> None:
    """Have torch.compile compile a model when it runs first, for prompts of any length.

    Raises:
        UnsupportedError: there is no compiler of C++, or the device is a Gaudi.
    """
    if artifact.device.type == hpu.NAME:
        raise UnsupportedError(
            f"torch_compile on {hpu.NAME}: its graphs are captured", "leave --torch-compile out"
        )
    if not any(map(shutil.which, _COMPILERS)):
        raise UnsupportedError(
            f"torch_compile: none of {', '.join(_COMPILERS)} is on PATH", "install g++"
        )
    model.forward = torch.compile(model.forward, dynamic=True)


def filled(artifact: Artifact) -> PreTrainedModel:
    """Transformers' model with an artifact's weights, on its device."""
    if artifact.device.type == hpu.NAME and graph_for(artifact.config).sparse:
        raise UnsupportedError(
            f"{artifact.checkpoint.folder}: experts on {hpu.NAME}: a graph that is replayed sends "
            "every token where the first went",
            "run it on the CPU",
        )
    model = skeleton(artifact.config, dtype=artifact.dtype)
    artifact.fill_(model, NameMap(model).bind(artifact.names).to_source, dtype=artifact.dtype)
    drop_unread_(model)
    model.to(artifact.device)
    if artifact.device.type == hpu.NAME:
        hpu.wrap_in_graph(model)
    return model
