"""The proof of an artifact by running it: the canary's tokens, layer by layer, as quantize did."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from quantflow.core.device import HOST, Device, open_device
from quantflow.errors import IntegrityError, UnsupportedError
from quantflow.files.canonical import read_json
from quantflow.files.safetensors_header import read_header
from quantflow.models.capture import LayerStream
from quantflow.models.hooks import KVRounder
from quantflow.models.identity import tensor_hash
from quantflow.models.open import graph_for
from quantflow.models.reading import read_tensor
from quantflow.runtime.artifact import Artifact, open_artifact
from quantflow.runtime.lean_check import LeanCheck


def prove_canary(folder: Path, quantized: Path) -> str | None:
    """Run the canary through the artifact, one layer in memory at a time.

    The artifact's files have been verified.

    Returns:
        A sentence on the difference between the lean decoder, which claims to run it, and
        transformers' modules; or None.

    Raises:
        IntegrityError: naming the layer that differs.
        UnsupportedError: the device that quantize ran on is not there.
        QuantflowError: as `open_artifact`.
    """
    device = device_of(read_json(quantized / "quantize.json"))
    with device.deterministic():
        return _proved(folder, quantized, device)


def device_of(summary: Mapping[str, Any]) -> Device:
    """The device that quantize ran on, by the quantize.json that it wrote.

    Raises:
        UnsupportedError: it is not there, or another model, driver or library is, whose bits are
            others.
    """
    made_on = summary.get("device")
    if made_on is None:
        return HOST
    device = open_device(made_on["name"])
    here = {"name": made_on["name"], **device.key().get("device", {})}
    for word, there in made_on.items():
        if here.get(word) != there:
            raise UnsupportedError(
                f"{made_on['name']}: the layers were computed with {word} {there!r}, here it is "
                f"{here.get(word)!r}",
                "bits differ between devices: export on the machine that quantized, or quantize "
                "again on this one",
            )
    return device


def _proved(folder: Path, quantized: Path, device: Device) -> str | None:
    artifact = open_artifact(folder, backend="reference", dtype=torch.float32, verify=False)
    on_device = replace(artifact, linears_device=device.kind)
    infos, _ = read_header(quantized / "canary.safetensors")
    tokens = read_tensor(quantized / "canary.safetensors", infos["tokens"])
    expected = read_json(quantized / "canary.json")
    stream = LayerStream(
        on_device,
        graph := graph_for(artifact.config),
        cache=rounder(artifact, device),
        device=device,
    )
    states = stream.begin([tokens])
    check = LeanCheck(artifact)
    claims = check.reason is None
    check.embedding(tokens, device.fetch(states[0].hidden))
    for layer, right in zip(graph.layers, expected["layers"], strict=True):
        hidden = device.fetch(states[0].hidden)
        with stream.layer(layer.index) as module:
            stream.advance(module, states)
        left = tensor_hash(output := device.fetch(states[0].hidden))
        if left != right:
            raise IntegrityError(
                f"layer {layer.index}: the artifact computes {left[:16]} on the canary, quantize "
                f"computed {right[:16]}",
                "this is a defect in the layout or the loader; keep the folder and report it",
            )
        check.layer(layer.index, *map(stream.alone, (hidden, output)))
    logits = device.fetch(stream.finish(states[0].hidden))
    if tensor_hash(logits) != expected["logits"]:
        raise IntegrityError(
            "logits: differ from quantize's on the canary", "keep the folder and report it"
        )
    check.logits(stream.alone(device.fetch(states[0].hidden)), logits)
    return check.reason if claims else None


def rounder(artifact: Artifact, device: Device = HOST) -> KVRounder | None:
    """The rounding of keys and values in the artifact's cache; None where it keeps them.

    Args:
        artifact: artifact whose scales are read.
        device: device of the layers, and so of their keys and values.
    """
    scales = [of.to(device.kind) for of in artifact.kv_scales()]
    return KVRounder(dict(enumerate(scales))) if scales else None
