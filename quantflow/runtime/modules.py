"""Transformers' modules with an artifact's weights: the decoder where the lean one cannot run."""

import shutil
from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from typing import Any

import torch
import torch._dynamo
from transformers import PreTrainedModel

from quantflow.accelerators import runs_triton
from quantflow.backends import cuda, hpu
from quantflow.errors import UnsupportedError
from quantflow.models.names import NameMap
from quantflow.models.open import graph_for
from quantflow.models.parameters import drop_unread_
from quantflow.models.skeleton import skeleton
from quantflow.runtime import graphs, static_shapes
from quantflow.runtime.artifact import Artifact
from quantflow.runtime.attention import choose_
from quantflow.runtime.attention_choice import Attention
from quantflow.runtime.batch_shapes import CAPTURED, Gaudi
from quantflow.runtime.decoder import Decoder
from quantflow.runtime.fused_gates import fuse_gates_
from quantflow.runtime.fused_norms import fuse_norms_
from quantflow.runtime.fused_rope import fuse_rotary_
from quantflow.runtime.linear import share_inputs_
from quantflow.runtime.load import Loaded, loaded
from quantflow.runtime.shapes import NO_SHAPES, Shapes
from quantflow.runtime.transformers_decoder import TransformersDecoder

_COMPILERS = ("g++", "clang++", "c++")  # torch.compile writes C++ for a CPU
_MOST_COMPILATIONS = 1024  # torch stops at 8, and runs later shapes as they are, without a word


def with_modules(
    artifact: Artifact,
    model: PreTrainedModel,
    *,
    reason: str,
    crops: bool,
    compiled: bool = False,
    attention: Attention | None = None,
    shapes: Shapes = NO_SHAPES,
) -> Loaded:
    """Transformers' modules as the decoder of an artifact.

    Args:
        artifact: artifact that the model has its weights from.
        model: model on the artifact's device.
        reason: why the lean decoder is not used.
        crops: whether `crop` will be called.
        compiled: torch.compile compiles the modules when they run first; no decode step is captured
            then.
        attention: how the modules attend; None: as transformers chooses.
        shapes: shapes that they run in.

    Raises:
        InputError: the tokenizer's files or generation_config.json are damaged.
        UnsupportedError: nothing here compiles C++, Gaudi's bridge has captured the model, it has
            no choice of attention, or its cache no fixed length.
    """
    reasons = [f"the lean decoder is not used: {reason}"]
    if attention is not None:
        reasons += choose_(model, attention, artifact.device)
    if compiled:
        _compile_(artifact, model, dynamic=not shapes.fixed)
    if shapes.fixed:
        if missing := static_shapes.why_not(artifact):
            raise UnsupportedError(
                f"{artifact.checkpoint.folder}: static shapes: {missing}", "leave them out"
            )
        in_shapes = static_shapes.StaticShapeDecoder(
            model,
            device=artifact.device,
            rules=shapes,
            compilations=compilations() if compiled else None,
            kv_scales=artifact.kv_scales(),
        )
        return loaded(artifact, in_shapes, model=model, reasons=tuple(reasons))
    decoder: Decoder = TransformersDecoder(
        model, device=artifact.device, crops=crops, kv_scales=artifact.kv_scales()
    )
    if compiled:
        reasons.append("decode steps are not captured: torch.compile was asked for")
    elif artifact.device.type == cuda.NAME and (missing := graphs.why_not(artifact)):
        reasons.append(f"decode steps are not captured: {missing}")
    elif artifact.device.type == cuda.NAME:
        decoder = graphs.GraphDecoder(
            model, device=artifact.device, capture=partial(cuda.capture, device=artifact.device)
        )
    return loaded(artifact, decoder, model=model, reasons=tuple(reasons))


def _compile_(artifact: Artifact, model: PreTrainedModel, *, dynamic: bool) -> None:
    """Have torch.compile compile a model when it runs first.

    Args:
        artifact: artifact on the device.
        model: its model.
        dynamic: one graph is for prompts of any length; else each shape has its own.

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
    run = torch.compile(model.forward, dynamic=dynamic)

    def forward(*arguments: Any, **options: Any) -> Any:
        """The compiled forward, of as many shapes as there are."""
        with torch._dynamo.config.patch(
            recompile_limit=_MOST_COMPILATIONS, accumulated_recompile_limit=_MOST_COMPILATIONS
        ):
            return run(*arguments, **options)  # type: ignore[no-untyped-call]

    model.forward = run if dynamic else forward


def compilations() -> Callable[[], int]:
    """A function that counts the graphs that torch.compile makes from now on."""
    counted = torch._dynamo.utils.counters["stats"]
    before = counted["unique_graphs"]
    return lambda: int(counted["unique_graphs"] - before)


def filled(artifact: Artifact, *, gaudi: Gaudi = CAPTURED) -> PreTrainedModel:
    """Transformers' model with an artifact's weights, on its device.

    Args:
        artifact: artifact on the device.
        gaudi: how a Gaudi runs it.

    Raises:
        UnsupportedError: experts, whose choice a graph would keep.
    """
    on_gaudi = artifact.device.type == hpu.NAME
    if on_gaudi and gaudi.captures and graph_for(artifact.config).sparse:
        raise UnsupportedError(
            f"{artifact.checkpoint.folder}: experts on {hpu.NAME}: a graph that is replayed sends "
            "every token where the first went",
            "run it on the CPU",
        )
    model = skeleton(artifact.config, dtype=artifact.dtype)
    names = NameMap(model).bind(artifact.names)
    artifact.fill_(model, names.to_source, dtype=artifact.dtype)
    if artifact.device.type not in ("cpu", hpu.NAME):
        share_inputs_(model, _groups(artifact, names.to_module))
    if runs_triton(artifact.device.type):
        _fuse_operators_(model)
    drop_unread_(model)
    model.to(artifact.device)
    if on_gaudi and gaudi.captures:
        hpu.wrap_in_graph(model)
    elif on_gaudi and gaudi.compiles:
        hpu.compile_(model)
    return model


def _fuse_operators_(model: PreTrainedModel) -> None:
    """Have norms, rotary embeddings and gates computed by a kernel each."""
    norm, rope, gate = (
        import_module(f"quantflow.backends.triton.{name}") for name in ("norm", "rope", "gate")
    )
    fuse_norms_(model, rms_norm=norm.rms_norm)
    fuse_rotary_(model, rotary=rope.rotary)
    fuse_gates_(model, gated=gate.gated)


def _groups(artifact: Artifact, to_module: Mapping[str, str]) -> list[list[str]]:
    """The modules of linears that receive the same tensor, where they are quantized."""
    return [
        [
            to_module[f"{name}.weight"].removesuffix(".weight")
            for name in group.linears
            if name in artifact.linears
        ]
        for layer in graph_for(artifact.config).layers
        for group in layer.groups
    ]
