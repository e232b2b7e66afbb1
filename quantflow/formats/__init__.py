"""On-disk layouts, by the name used in recipes. One file each; this table is the only registry."""

from types import ModuleType

from quantflow.formats import compressed_tensors

FORMATS: dict[str, ModuleType] = {compressed_tensors.NAME: compressed_tensors}
DEFAULT: str = compressed_tensors.NAME  # what artifacts are written in, and this runtime reads
