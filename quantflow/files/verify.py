"""The check of an artifact against its manifest: every hashed file, every tensor, all bytes.

The order is: the manifest against itself, the list of files, the hashes, and only then the content,
so that no parser sees a byte that the manifest does not vouch for. An artifact that was replaced as
a whole cannot be detected; compare its digest for that.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from quantflow.errors import InputError, IntegrityError
from quantflow.files.canonical import file_digest
from quantflow.files.checkpoint import Checkpoint, open_checkpoint
from quantflow.files.folder import refuse_small_pointer
from quantflow.files.layers_ahead import lost_words
from quantflow.files.ledger import Ledger
from quantflow.files.manifest import MANIFEST_NAME, UNHASHED, read_manifest
from quantflow.files.sealed import require_same_names

_AGAIN = "copy or export the artifact again"


def verify(
    folder: Path,
    *,
    map_all: Callable[[Callable[[str], None], Sequence[str]], Iterable[None]] = map,
    manifest: dict[str, Any] | None = None,
    hashes: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Check an artifact, reading all of it once.

    Args:
        folder: folder of the artifact.
        map_all: function that applies another to every item, in order, such as `Workers.map`.
        manifest: content of its quantflow.json, where it has been read before.
        hashes: file -> sha256 that somebody else vouches for; of these files the size is looked at
            and the content is not read.

    Returns:
        layout_version, digest, proof; files and bytes that were hashed; the unhashed files that are
        there; tensors and tensor_bytes of the artifact; source_bytes by action of the ledger; and
        notes, where layers that predict further tokens are not there.

    Raises:
        IntegrityError: a file or tensor was changed, is missing, was added, is a link out of the
            hub's cache, or is not in the ledger; the message names it.
        InputError: the folder or its manifest is missing, or a header is malformed and its hash is
            the recorded one.
        UnsupportedError: the manifest has a newer layout version.
    """
    manifest, known = manifest or read_manifest(folder), hashes or {}
    recorded = manifest["files"]
    there = require_same_names(folder, recorded)
    for _ in map_all(
        lambda name: _check_file(folder, name, recorded[name], known.get(name)), sorted(recorded)
    ):
        pass
    checkpoint = open_checkpoint(folder)
    lost = lost_words(checkpoint.config, checkpoint.infos)
    _check_tensors(checkpoint, ledger := Ledger.from_json(manifest["ledger"]))
    return {
        "layout_version": manifest["layout_version"],
        "digest": manifest["digest"],
        "proof": manifest["proof"],
        "files": len(recorded),
        "bytes": sum(row["bytes"] for row in recorded.values()),
        "unhashed": [name for name in there if name in UNHASHED and name != MANIFEST_NAME],
        "tensors": len(checkpoint.tensors),
        "tensor_bytes": sum(info.nbytes for info in checkpoint.infos.values()),
        "source_bytes": ledger.bytes_by_action(),
        **({"notes": [lost]} if lost is not None else {}),
    }


def _check_file(folder: Path, name: str, recorded: dict[str, Any], known: str | None) -> None:
    """Check one file's size, then its hash; `known` stands for the hash of its content."""
    size = (folder / name).stat().st_size
    digest = None
    if size == recorded["bytes"]:
        digest = known or file_digest(folder / name)
    if digest == recorded["sha256"]:
        return
    try:
        refuse_small_pointer(folder / name)
    except InputError as pointer:
        raise IntegrityError(f"{name}: {pointer.cause}", pointer.remedy) from pointer
    if digest is None:
        raise IntegrityError(
            f"{name}: {size} bytes, {MANIFEST_NAME} records {recorded['bytes']}", _AGAIN
        )
    raise IntegrityError(
        f"{name}: sha256 {digest}, {MANIFEST_NAME} records {recorded['sha256']}", _AGAIN
    )


def _check_tensors(checkpoint: Checkpoint, ledger: Ledger) -> None:
    """Check that the ledger accounts for every tensor and no other weights lie there.

    An artifact has nothing left over: here an index names each tensor once, in its shard.
    """
    for note in checkpoint.notes:
        raise InputError(f"{checkpoint.folder}: {note}", _AGAIN)
    for name in checkpoint.files:
        if name.endswith(".safetensors") and name not in checkpoint.shards:
            raise IntegrityError(
                f"{name}: weights that neither index nor ledger names", "export again without it"
            )
    ledger.check_artifact(checkpoint.infos)
