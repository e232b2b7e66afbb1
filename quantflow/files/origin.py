"""Where a model's folder came from: the name and the revision that a manifest records.

A folder is known by itself: a snapshot of huggingface_hub's cache by its path, what was made from
another file by DONE.json.

    .../models--org--name/snapshots/<commit>     org/name at the commit
    .../<name>-<hash>/ with DONE.json            the file's name, and sha256:<its hash>
    any other                                    its own name
"""

import re
from dataclasses import dataclass
from pathlib import Path

from quantflow.errors import InputError
from quantflow.files import stage_folder

IMPORT = "import"  # the stage that DONE.json names
_COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True, kw_only=True)
class Origin:
    """What a model is called; `revision` None where nothing says which."""

    name: str
    revision: str | None = None


def is_snapshot(folder: Path) -> bool:
    """Return whether a folder is a snapshot of the hub's cache, whose files are links into that cache."""
    where = folder.resolve()
    in_cache = where.parent.name == "snapshots" and where.parents[1].name.startswith("models--")
    return in_cache and _COMMIT.fullmatch(where.name) is not None


def origin_of(folder: Path) -> Origin:
    """Return what the model of a folder is called and at which revision it is."""
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
