"""The manifest of a folder that another program quantized, as far as a validation reads it.

Such a folder does not name its source. All that can be checked is that the given model has the
same tensors in the same shapes. Its calibration text is not known
either. It is judged as if it had been calibrated, by the strictest gate of a scheme.
"""

from pathlib import Path
from typing import Any

from quantflow.algorithms import gptq
from quantflow.errors import InputError
from quantflow.files.digests import Digests
from quantflow.files.manifest import read_manifest
from quantflow.formats.programs import program_of
from quantflow.models.identity import identify
from quantflow.models.load import Source
from quantflow.runtime.artifact import is_artifact, is_model, open_folder

_ANOTHER = "another program"
_GIVE = "give the model that it was made from as --baseline"


def manifest_of(folder: Path, source: Source) -> dict[str, Any]:
    """The manifest of an artifact, or the keys of one that a validation reads of another folder.

    Args:
        folder: an artifact, or a folder in one of `quantflow.formats.LAYOUTS`.
        source: model that the folder is compared with.

    Raises:
        InputError: a folder that is neither, or that cannot be made from this model.
        QuantflowError: as `read_manifest` and `open_folder`.
    """
    if is_artifact(folder) or is_model(folder):
        return read_manifest(folder)
    artifact = open_folder(folder, backend="reference")
    checkpoint, named = artifact.checkpoint, source.checkpoint.infos
    kinds = [each.config.get("model_type") for each in (checkpoint, source.checkpoint)]
    if kinds[0] != kinds[1]:
        raise InputError(f"{folder}: is a {kinds[0]}, the baseline a {kinds[1]}", _GIVE)
    for name in artifact.names:
        linear = name.removesuffix(".weight")
        shape = (
            artifact.linears[linear].shape
            if linear in artifact.linears
            else checkpoint.infos[name].shape
        )
        if name not in named or named[name].shape != shape:
            problem = f"is {list(named[name].shape)}" if name in named else "has none"
            raise InputError(f"{name}: {list(shape)} in {folder}, the baseline {problem}", _GIVE)
    schemes = dict.fromkeys(placement.scheme.name for placement in artifact.linears.values())
    tensors = [
        {
            "name": f"{name}.weight",
            "shape": list(placement.shape),
            "action": "quantized",
            "becomes": list(artifact.layout.tensor_names(name, placement.scheme)),
        }
        for name, placement in artifact.linears.items()
    ]
    program = program_of(checkpoint.config["quantization_config"], checkpoint.files)
    return {
        "digest": identify(checkpoint, Digests()),
        "source": {"name": str(source.checkpoint.folder), "files": {}},
        "recipe": {
            "name": folder.name,
            "scheme": ", ".join(schemes),
            "resolved": {
                "algorithm": program or _ANOTHER,
                "judged_as": gptq.NAME,
                "transforms": [],
            },
        },
        "measurement": None,
        "layers": [],
        "files": {name: {"bytes": (folder / name).stat().st_size} for name in checkpoint.files},
        "ledger": {
            "tensors": tensors,
            "bytes": {"source": sum(info.nbytes for info in named.values())},
        },
    }
