"""The proof of an artifact by running it: the canary's tokens, layer by layer, as quantize ran them."""

from dataclasses import replace
from pathlib import Path

import torch

from quantflow.artifact.canonical import read_json
from quantflow.artifact.safetensors_header import read_header
from quantflow.core.device import HOST, Device
from quantflow.errors import IntegrityError
from quantflow.models.capture import LayerStream
from quantflow.models.graph import graph_for
from quantflow.models.hooks import KVRounder
from quantflow.models.identity import tensor_hash
from quantflow.models.reading import read_tensor
from quantflow.runtime.artifact import Artifact, open_artifact
from quantflow.runtime.lean_check import LeanCheck


def prove_canary(folder: Path, quantized: Path) -> str | None:
    """Run the canary through the artifact, whose files have been verified, one layer in memory at a time.

    Returns:
        What the lean decoder, which claims to run it, computes otherwise than transformers' modules, in a sentence; or None.

    Raises:
        IntegrityError: naming the layer that differs.
        QuantflowError: as `open_artifact`.
    """
    artifact = open_artifact(folder, backend="reference", dtype=torch.float32, verify=False)
    infos, _ = read_header(quantized / "canary.safetensors")
    tokens = read_tensor(quantized / "canary.safetensors", infos["tokens"])
    expected = read_json(quantized / "canary.json")
    stream = LayerStream(artifact, graph := graph_for(artifact.config), cache=rounder(artifact))
    states = stream.begin([tokens])
    check = LeanCheck(artifact)
    claims = check.reason is None
    check.embedding(tokens, states[0].hidden)
    for layer, right in zip(graph.layers, expected["layers"], strict=True):
        given = states[0].hidden
        with stream.layer(layer.index) as module:
            stream.advance(module, states)
        left = tensor_hash(states[0].hidden)
        if left != right:
            raise IntegrityError(
                f"layer {layer.index}: the artifact computes {left[:16]} on the canary, quantize computed {right[:16]}",
                "this is a defect in the layout or the loader; keep the folder and report it",
            )
        check.layer(layer.index, given, states[0].hidden)
    logits = stream.finish(states[0].hidden)
    if tensor_hash(logits) != expected["logits"]:
        raise IntegrityError("logits: differ from quantize's on the canary", "keep the folder and report it")
    check.logits(states[0].hidden, logits)
    return check.reason if claims else None


def rounder(artifact: Artifact, device: Device = HOST) -> KVRounder | None:
    """Return what rounds the keys and values of every layer as the artifact's cache would; None where it keeps them.

    Args:
        artifact: its scales are read.
        device: where layers run, so that their keys and values are.
    """
    scales = [replace(of, keys=device.put(of.keys), values=device.put(of.values)) for of in artifact.kv_scales()]
    return KVRounder(dict(enumerate(scales))) if scales else None
