"""The shared parts of the peers' programs for accuracy.py.

They are arguments, token ids and the two files that each writes. Needs numpy alone.

    accuracy_PEER.py quantize MODEL CALIBRATION OUTPUT SETTINGS     timed by the caller
    accuracy_PEER.py dequantize MODEL OUTPUT                        not timed

OUTPUT is a folder, SETTINGS JSON.

`quantize` saves into OUTPUT/model as the peer does, and writes OUTPUT/report.json: version,
settings, seconds of quantization alone. `dequantize` reads what was saved, writes
OUTPUT/weights.safetensors, and says in the report what is in it.
"""

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


@dataclass(frozen=True, kw_only=True)
class Report:
    """The report of `quantize`.

    It has the peer's version, the seconds of quantization alone, and settings that the caller did
    not give.
    """

    version: str
    seconds: float
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Saved:
    """What `dequantize` found in the saved files.

    Attributes:
        weights: name of each quantized linear -> [O, I] float32.
        stored: bytes of packed weights, scales and zero points.
        each: the same of each linear; may be empty where all have as many bits per weight.
        changed: name -> other tensors that are not the source's any more.
        input: how inputs are rounded, in the words of quantflow's TensorScheme; None where they are
            not.
        scales: name of a linear -> scale of its static input.
    """

    weights: Mapping[str, Array]
    stored: int
    each: Mapping[str, int] = field(default_factory=dict)
    changed: Mapping[str, Array] = field(default_factory=dict)
    input: Mapping[str, Any] | None = None
    scales: Mapping[str, float] = field(default_factory=dict)


def main(
    quantize: Callable[[str, list[list[int]], Path, dict[str, Any]], Report],
    dequantize: Callable[[Path, Path, dict[str, Any]], Saved],
) -> None:
    """Run the half that the command line asks for.

    Args:
        quantize: model, token ids of each sequence, folder to save into, settings.
        dequantize: model, folder that was saved into, settings.
    """
    verb, model, *rest = sys.argv[1:]
    if verb == "quantize":
        calibration, output, settings = Path(rest[0]), Path(rest[1]), json.loads(rest[2])
        rows = [json.loads(line)["input_ids"] for line in calibration.read_text().splitlines()]
        said = quantize(model, rows, output / "model", dict(settings))
        told = {**settings, **said.settings}
        _write(output, {"version": said.version, "settings": told, "seconds": said.seconds})
        return
    output = Path(rest[0])
    report = json.loads((output / "report.json").read_text())
    saved = dequantize(Path(model), output / "model", report["settings"])
    tensors = {f"{name}.weight": weight for name, weight in saved.weights.items()} | dict(
        saved.changed
    )
    write_safetensors(output / "weights.safetensors", tensors)
    found = {
        "bytes": saved.stored,
        "each": dict(saved.each),
        "linears": sorted(saved.weights),
        "input": saved.input,
        "scales": dict(saved.scales),
    }
    _write(output, report | found)


def _write(output: Path, report: Mapping[str, Any]) -> None:
    (output / "report.json").write_text(json.dumps(report, indent=1, sort_keys=True) + "\n")


def write_safetensors(path: Path, tensors: Mapping[str, Array]) -> None:
    """Write tensors as float32.

    The file has the length of the header as u64, the header in JSON, then the tensors one after
    another.
    """
    header, offset = {}, 0
    for name, tensor in tensors.items():
        size = 4 * tensor.size
        header[name] = {
            "dtype": "F32",
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + size],
        }
        offset += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors.values():
            file.write(np.ascontiguousarray(tensor, dtype="<f4").tobytes())


def unpack(words: Array, bits: int, *, axis: int) -> Array:
    """Unsigned integers that lie end to end in int32 words along `axis`, lowest bit first.

    3 bits cross from word to word, as GPTQ's first kernels had it: 32 integers in 3 words.
    """
    last = np.ascontiguousarray(np.moveaxis(words.astype("<i4"), axis, -1))
    digits = np.unpackbits(last.view(np.uint8), axis=-1, bitorder="little")
    # [..., integers]
    values = digits.reshape(*digits.shape[:-1], -1, bits) @ (1 << np.arange(bits))
    return np.moveaxis(values, -1, axis)


def _ones(bits: int) -> np.int32:
    """Return a word in which every integer is 1; of bits that divide 32."""
    return np.packbits(np.tile([1] + [0] * (bits - 1), 32 // bits), bitorder="little").view("<i4")[
        0
    ]


def gptq_weight(tensors: Mapping[str, Array], name: str, *, bits: int, minus_one: bool) -> Array:
    """Return the [O, I] float32 weight of a linear in GPTQ's layout.

        weight[o, i] = scales[g, o] * (qweight[i, o] - qzeros[g, o])

    The group is g = g_idx[i], or i // group size without one.

    Args:
        tensors: name -> `qweight` int32 [I * bits / 32, O], `qzeros` int32 [G, O * bits / 32],
            `scales` [G, O], `g_idx` [I].
        name: of the linear.
        bits: of an integer.
        minus_one: zero points are stored one too small, as the layout's first version has it. Whole
            words were subtracted, but of bits that do not divide 32 each integer by itself, since
            some of them lie in two words.
    """
    zeros, scales = (
        tensors[f"{name}.qzeros"].astype("<i4"),
        tensors[f"{name}.scales"].astype(np.float32),
    )
    if minus_one and 32 % bits == 0:
        # numpy's integers wrap around, as those that were subtracted did
        zeros = zeros + _ones(bits)
    values = unpack(tensors[f"{name}.qweight"], bits, axis=0)  # [I, O]
    groups = tensors.get(f"{name}.g_idx", np.arange(len(values)) * len(scales) // len(values))
    points = unpack(zeros, bits, axis=1)  # [G, O]
    if minus_one and 32 % bits:
        points = (points + 1) % (1 << bits)
    return ((values - points[groups]) * scales[groups]).T.astype(np.float32)


def awq_weight(tensors: Mapping[str, Array], name: str) -> Array:
    """The [O, I] float32 weight of a 4-bit linear in AWQ's layout.

    All is packed along O, eight at a time in AWQ's order.
    """
    order = [0, 4, 1, 5, 2, 6, 3, 7]
    # [I, O], [G, O]
    values, points = (
        unpack(tensors[f"{name}.{part}"], 4, axis=1) for part in ("qweight", "qzeros")
    )
    values, points = (
        x.reshape(len(x), -1, 8)[:, :, order].reshape(len(x), -1) for x in (values, points)
    )
    scales = tensors[f"{name}.scales"].astype(np.float32)
    groups = np.arange(len(values)) * len(scales) // len(values)
    return ((values - points[groups]) * scales[groups]).T.astype(np.float32)


def arrays(tensors: Mapping[str, Any]) -> dict[str, Array]:
    """Return torch's tensors as numpy's arrays; floats as float32, since numpy has no bfloat16."""
    return {
        name: (tensor.float() if tensor.is_floating_point() else tensor).numpy()
        for name, tensor in tensors.items()
    }


def microscaled_weight(parts: Mapping[str, Array]) -> Array:
    """A weight of e2m1 or e4m3 with scales of groups, [O, I] float32.

    compressed-tensors stores it.

    Args:
        parts: weight_packed [O, I / 2] uint8 (e2m1) or weight [O, I] float32, its values;
            weight_scale [O, G], uint8 (e8m0) or float32; weight_global_scale [1], which divides it,
            where there is one.
    """
    if "weight_packed" in parts:
        packed = parts["weight_packed"]
        codes = np.stack([packed & 15, packed >> 4], axis=-1).reshape(len(packed), -1)  # [O, I]
        magnitudes = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=np.float32)[codes & 7]
        value = np.where(codes & 8, -magnitudes, magnitudes)
    else:
        value = parts["weight"]
    scale = parts["weight_scale"]
    scale = (
        np.ldexp(np.float32(1), scale.astype(np.int32) - 127) if scale.dtype == np.uint8 else scale
    )
    if "weight_global_scale" in parts:
        scale = scale / parts["weight_global_scale"]
    return value * np.repeat(scale, value.shape[1] // scale.shape[1], axis=1)


def stored_bytes(tensors: Mapping[str, Any], name: str) -> int:
    """Bytes of a linear in GPTQ's or AWQ's layout as saved.

    They are of torch's tensors, without the order of its columns.
    """
    return sum(int(tensors[f"{name}.{part}"].nbytes) for part in ("qweight", "qzeros", "scales"))
