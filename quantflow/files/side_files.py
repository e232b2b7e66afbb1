"""The files beside config.json and weights in an opened folder (kinds: side_file_kinds.py)."""

import re
from pathlib import Path, PurePosixPath

from quantflow.files.checkpoint import CONFIG, INDEX, Checkpoint
from quantflow.files.folder import reading
from quantflow.files.side_file_kinds import LARGEST, SideFiles, has_known_name, side_files

_OUTSIDE = "a link out of the folder"
_NAMES_CODE = b'"auto_map"'


def side_files_of(checkpoint: Checkpoint) -> SideFiles:
    """Files beside config.json, index and weights of an opened folder."""
    folder, read = checkpoint.folder, {CONFIG, checkpoint.index or INDEX, *checkpoint.shards}
    files = {name: (folder / name).stat().st_size for name in checkpoint.files if name not in read}
    code = "auto_map" in checkpoint.config or any(
        _names_code(folder / name) for name in files if re.fullmatch(r"\w*config\.json", name)
    )
    sorted_out = side_files(files, code=code)
    outside = {name: _OUTSIDE for name in sorted_out.copied if _leads_out(folder, name)}
    return SideFiles(
        copied=tuple(name for name in sorted_out.copied if name not in outside),
        left=dict(sorted({**sorted_out.left, **outside}.items())),
    )


def _names_code(path: Path) -> bool:
    """Whether a configuration names code that transformers would import."""
    with reading(path) as file:
        return _NAMES_CODE in file.read(LARGEST)


def _leads_out(folder: Path, name: str) -> bool:
    """Whether a file is a link out of the folder that nobody meant.

    Folders are put together by links to another folder's files, and the hub's cache consists of
    links to its blobs. Any other link may lead to what its owner never wanted to hand on.
    """
    if not (folder / name).is_symlink():
        return False
    target = (folder / name).resolve()
    meant = has_known_name(name) and target.name == PurePosixPath(name).name
    blob = target.parent.name == "blobs" and target.parents[1].name.startswith("models--")
    return not (meant or blob or target.is_relative_to(folder.resolve()))
