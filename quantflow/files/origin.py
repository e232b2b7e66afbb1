"""The origin of a model's folder: the name and the revision that a manifest records.

The folder itself tells it: a snapshot of huggingface_hub's cache by its path, an import of another
file by DONE.json.

    .../models--org--name/snapshots/<commit>     org/name at the commit
    .../<name>-<hash>/ with DONE.json            the file's name, and sha256:<its hash>
    any other                                    its own name
"""

import re
from dataclasses import dataclass
from pathlib import Path

from quantflow.errors import InputError
from quantflow.files import stage_folder

IMPORT = "import"  # stage in the DONE.json of an imported file
_COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True, kw_only=True)
class Origin:
    """Name and revision of a model; the revision is None where nothing tells it."""

    name: str
    revision: str | None = None


def is_snapshot(folder: Path) -> bool:
    """Whether a folder is a snapshot of the hub's cache, whose files are links into that cache."""
    where = folder.resolve()
    in_cache = where.parent.name == "snapshots" and where.parents[1].name.startswith("models--")
    return in_cache and _COMMIT.fullmatch(where.name) is not None


def origin_of(folder: Path) -> Origin:
    """Name and revision of the model in a folder."""
    where = folder.resolve()
    if is_snapshot(where):
        name = where.parents[1].name.removeprefix("models--").replace("--", "/")
        return Origin(name=name, revision=where.name)
    try:
        record = stage_folder.done(where)
    except InputError:  # a file of that name that is not ours
        record = None
    if record is not None and record["stage"] == IMPORT:
        return Origin(
            name=record["inputs"]["name"], revision=f"sha256:{record['inputs']['sha256']}"
        )
    return Origin(name=where.name)
