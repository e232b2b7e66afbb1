"""The quantized folder of a format: an artifact, or a folder of another program."""

from pathlib import Path

from quantflow.errors import UsageError
from quantflow.files.digests import Digests
from quantflow.files.manifest import MANIFEST_NAME
from quantflow.models.identity import identify
from quantflow.runtime.artifact import Artifact, is_artifact, is_model


def require_quantized(source: Path, output: Path, *, product: str) -> None:
    """Refuse a folder that is not quantized, or that would be written over.

    Args:
        source: folder that is read.
        output: folder that will be written.
        product: format of the result, `format gptq`.

    Raises:
        UsageError: `source` is a model, or has an artifact's config.json without the manifest;
            `output` is the same folder.
    """
    if output.resolve() == source.resolve():
        raise UsageError(
            f"{output}: the folder that is read and the one that is written", "give two folders"
        )
    if (is_artifact(source) and not (source / MANIFEST_NAME).is_file()) or is_model(source):
        cause = (
            f"{source}: {product} is made from an artifact, or from a folder that another program "
            "quantized"
        )
        raise UsageError(cause, "export it as an artifact first")


def identity_of(artifact: Artifact) -> str:
    """The digest in a folder's manifest, or one of all its files."""
    return artifact.manifest.get("digest") or identify(artifact.checkpoint, Digests())
