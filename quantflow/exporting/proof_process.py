"""The fresh process in which export proves an artifact; quantflow/exporting/proof.py starts it.

Every file is compared with the manifest's hash, every copied tensor outside the layers with the
source's bytes. Then, by the kind of proof that the manifest names:

    canary      The model runs the canary's tokens from the artifact, one layer in memory at a time.
                The hidden states after each layer and the logits are those that quantize computed.
                The lean decoder's layers are within rounding of them, or the manifest says that it
                is not to run this artifact. The cost of rounding inputs is measured too
                (quantflow/exporting/rounded_inputs.py). Quantized MTP layers, which it does not run
                through, are compared as below.
    tensors     Where no model ran. Every quantized linear, decoded some rows at a time, has the
                values that quantize chose, and every other tensor the source's bytes. Rounding is
                measured where that is asked for.

Example: echo '["ARTIFACT", "QUANTIZED", "SOURCE", 2, false]' | python -m
quantflow.exporting.proof_process
"""

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from quantflow import process_memory

if __name__ == "__main__":
    process_memory.search_seldom()  # first: most of its imports are torch's

import torch
from torch import Tensor

from quantflow.core.parallel import Workers
from quantflow.core.scheme import LinearScheme
from quantflow.errors import IntegrityError, QuantflowError
from quantflow.exporting.proof import CANARY, TENSORS
from quantflow.files.canonical import read_json
from quantflow.files.checkpoint import Checkpoint, open_checkpoint
from quantflow.files.manifest import read_manifest
from quantflow.files.safetensors_header import TensorInfo
from quantflow.files.verify import verify
from quantflow.formats import DEFAULT, FORMATS
from quantflow.models.open import config_of, graph_for
from quantflow.models.reading import read_into, read_tensor
from quantflow.quantizing.head_file import mtp_record_of, record_of
from quantflow.quantizing.weight_rows import StoredTensors, ValuesDigest, decoded_rows, row_step

FORMAT = FORMATS[DEFAULT]
COMPARE_BYTES = 1 << 20  # of two tensors that are in memory at once
_REPORT = "this is a defect in the layout or the loader; keep the folder and report it"


def prove(
    artifact: Path, quantized: Path, source: Path, *, workers: Workers, measures: bool = False
) -> dict[str, Any]:
    """Compare an artifact with the quantized folder and with the source.

    Args:
        artifact: folder of the artifact.
        quantized: quantized folder of the artifact.
        source: folder of the model.
        workers: number of tensors that are compared at once.
        measures: whether the cost of rounding inputs is measured where no model ran, too.

    Returns:
        The optional keys of the manifest.

    Raises:
        IntegrityError: naming the file, tensor or layer that differs.
        QuantflowError: the artifact cannot be opened.
    """
    proof = verify(artifact, map_all=workers.map)["proof"]
    opened = open_checkpoint(artifact)
    _compare_copies(opened, open_checkpoint(source), workers=workers)
    if proof["kind"] == CANARY:
        # here: the other kind starts without transformers' model code
        from quantflow.exporting import canary, rounded_inputs

        reason, cost = (
            canary.prove_canary(artifact, quantized),
            rounded_inputs.on_canary(artifact, source, quantized),
        )
        notes = {"lean_decoder": reason, "rounded_inputs": cost}
        _prove_mtp(opened, quantized, workers=workers)
    else:
        _prove_tensors(opened, quantized, workers=workers)
        notes = {}
        if measures:
            from quantflow.exporting import rounded_inputs  # here: as above

            notes = {"rounded_inputs": rounded_inputs.on_seeded_tokens(artifact, source)}
    return {key: value for key, value in notes.items() if value is not None}


def _prove_tensors(artifact: Checkpoint, quantized: Path, *, workers: Workers) -> None:
    """Decode every quantized linear and compare its values with those that quantize recorded."""
    recipe = read_manifest(artifact.folder)["recipe"]
    named = (
        recipe["resolved"]["schemes"]
        if recipe.get("linears")
        else graph_for(config_of(artifact)).linears
    )
    mtp = mtp_record_of(quantized).get("values", {})
    linears = [*named, *_heads(artifact), *mtp]
    found_schemes = FORMAT.schemes_from_config(artifact.config["quantization_config"], linears)
    schemes = {name: scheme for name, scheme in found_schemes.items() if scheme is not None}
    expected: dict[str, str] = {}
    for path in sorted((quantized / "layers").glob("*.json")):
        expected |= read_json(path)["values"]
    expected |= record_of(quantized).get("values", {}) | mtp
    _compare_values(artifact, expected, schemes, workers=workers)


def _prove_mtp(artifact: Checkpoint, quantized: Path, *, workers: Workers) -> None:
    """The same for MTP layers alone, which no canary runs through."""
    expected = mtp_record_of(quantized).get("values", {})
    table = artifact.config["quantization_config"]
    found = FORMAT.schemes_from_config(table, tuple(expected)) if expected else {}
    schemes = {name: scheme for name, scheme in found.items() if scheme is not None}
    _compare_values(artifact, expected, schemes, workers=workers)


def _compare_values(
    artifact: Checkpoint,
    expected: Mapping[str, str],
    schemes: Mapping[str, LinearScheme],
    *,
    workers: Workers,
) -> None:
    """Compare the values of linears with the digests that quantize recorded."""
    if expected.keys() != schemes.keys():
        name = min(expected.keys() ^ schemes.keys())
        raise IntegrityError(
            f"{name}: quantized in only one of the artifact and what quantize recorded", _REPORT
        )

    def digest(name: str) -> str:
        return _values(artifact, name, schemes[name])

    for name, actual in zip(expected, workers.stream(digest, expected), strict=True):
        if actual != expected[name]:
            raise IntegrityError(
                f"{name}: the exported artifact decodes to values {actual[:16]}, quantize chose "
                f"{expected[name][:16]}",
                _REPORT,
            )


def _heads(artifact: Checkpoint) -> list[str]:
    """The head where the manifest says that it is quantized."""
    head = read_manifest(artifact.folder).get("head")
    return [] if head is None else [head["linear"]]


def _values(checkpoint: Checkpoint, name: str, scheme: LinearScheme) -> str:
    """The digest of a quantized linear's values, decoded some rows at a time."""
    places = {key: checkpoint.tensors[key] for key in FORMAT.tensor_names(name, scheme)}
    tensors = {key: (checkpoint.folder / file, info) for key, (file, info) in places.items()}
    rows, columns = _shape(name, tensors)
    digest, step = ValuesDigest(), row_step(columns, scheme)
    for first in range(0, rows, step):
        count = min(step, rows - first)
        digest.update(
            decoded_rows(name, scheme, tensors, first=first, count=count, columns=columns)
        )
    return digest.hexdigest()


def _shape(name: str, tensors: StoredTensors) -> Sequence[int]:
    if f"{name}.weight_shape" in tensors:
        shape: list[int] = read_tensor(*tensors[f"{name}.weight_shape"]).tolist()
        return shape
    if f"{name}.weight" in tensors:
        return tensors[f"{name}.weight"][1].shape
    rows, halves = tensors[f"{name}.weight_packed"][1].shape  # e2m1, two to a byte
    return rows, 2 * halves


def _compare_copies(artifact: Checkpoint, source: Checkpoint, *, workers: Workers) -> None:
    """Compare every tensor that the ledger calls copied with the source's bytes."""
    manifest = read_manifest(artifact.folder)
    stored_names = manifest["source"].get("stored_names", {})
    tensors = manifest["ledger"]["tensors"]
    copied = [entry["name"] for entry in tensors if entry["action"] == "copied"]

    def same(name: str) -> bool:
        left_file, left = artifact.tensors[name]
        right_file, right = source.tensors[stored_names.get(name, name)]
        if (left.dtype, left.shape) != (right.dtype, right.shape):
            return False
        places = ((artifact.folder / left_file, left), (source.folder / right_file, right))
        return all(
            torch.equal(*(_bytes(path, info, start) for path, info in places))
            for start in range(0, left.nbytes, COMPARE_BYTES)
        )

    for name, equal in zip(copied, workers.stream(same, copied), strict=True):
        if not equal:
            raise IntegrityError(
                f"{name}: differs from the source's, of which it is a copy", _REPORT
            )


def _bytes(path: Path, info: TensorInfo, start: int) -> Tensor:
    """Read at most COMPARE_BYTES of a tensor from its byte `start`."""
    piece = torch.empty(min(COMPARE_BYTES, info.nbytes - start), dtype=torch.uint8)
    read_into(path, piece, info.offset + start, name=info.name)
    return piece


def awaited(lines: Iterable[str]) -> str:
    """The order, empty where there is none; a line before it names each expected kind of proof.

    The packages of such a kind are imported at once, so that they are there before the order.
    """
    for line in lines:
        if line.strip() == CANARY:
            from quantflow.exporting import canary, rounded_inputs  # noqa: F401  # here: as in `prove`
        elif line.strip() != TENSORS:
            return line
    return ""


def main(order: str) -> int:
    """Prove what `order` names; nothing where it is empty.

    The order is [ARTIFACT, QUANTIZED, SOURCE, WORKERS, MEASURES] in JSON.

    Returns:
        0 when the proof holds, and stdout has what `prove` returns in JSON. Otherwise the error's
        exit code, after its cause was written to stderr as one line of JSON.
    """
    if not order:  # the export has ended
        return 0
    torch.set_num_threads(1)
    *places, workers, measures = json.loads(order)
    artifact, quantized, source = map(Path, places)
    try:
        with Workers(workers) as pool, torch.no_grad():
            notes = prove(artifact, quantized, source, workers=pool, measures=measures)
    except QuantflowError as error:
        return _fail(error.cause, error.remedy, error.exit_code)
    except (OSError, MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not process_memory.ran_out(error):
            raise
        return _fail(
            f"{artifact}: {str(error) or 'out of memory'}",
            "free some memory, check the disk, and export again",
            5,
        )
    print(json.dumps(notes))
    return 0


def _fail(cause: str, remedy: str, code: int) -> int:
    told: dict[str, Any] = {"cause": cause, "remedy": remedy}
    print(json.dumps(told), file=sys.stderr)
    return code


if __name__ == "__main__":
    process_memory.give_back_freed()
    process_memory.take_huge_pages()
    ended = main(awaited(sys.stdin))
    process_memory.end_quickly()
    sys.exit(ended)
