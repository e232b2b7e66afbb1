"""A text by the user's name for it, as a file or a folder that `read_documents` reads.

    text.txt, text.jsonl, ids.safetensors    a file
    ./texts                                  a folder, whose .txt files are read in the order of
                                             their names
    default                                  a shipped text: quantflow/configs/calibration
    org/name, org/name:config@split          a data set on the hub, which needs the package
                                             `datasets`

The first ROWS rows of a data set are taken, of the first split among train, validation and test
where none is named, and kept as a .jsonl file: a run that goes on, and the next one, read the same
text. The columns that rows.py reads are kept.
"""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any

from huggingface_hub import constants

from quantflow.errors import InputError, UnsupportedError
from quantflow.files import disk
from quantflow.files.canonical import digest_of, file_digest
from quantflow.measuring.rows import COLUMNS, KINDS_REMEDY, kind_of
from quantflow.measuring.text import SUFFIXES
from quantflow.planning.recipe import Calibration
from quantflow.progress import Progress
from quantflow.shipped import CALIBRATION, shipped_texts
from quantflow.sources.data_sets import require_reachable

ROWS = 4096
SPLITS = ("train", "validation", "test")
_NAME = re.compile(
    r"(?P<name>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(:(?P<config>[\w.-]+))?(@(?P<split>[\w.-]+))?"
)


def text_path(source: str, progress: Progress) -> Path:
    """The file or folder of a text; existing paths go before shipped names, these before the hub.

    Args:
        source: a name as in the table above.
        progress: listener for downloads.

    Raises:
        InputError: there is no such text, a data set without a column of text, or no answer of the
            hub.
        UnsupportedError: a data set, and `datasets` is not installed.
    """
    path = Path(source)
    shipped = shipped_texts()
    if path.exists() or path.suffix in SUFFIXES:
        return path
    if source in shipped:
        return shipped[source]
    match = _NAME.fullmatch(source)
    if match is None:
        accepted = (
            f"a {', '.join(SUFFIXES)} file, a folder of .txt, a data set org/name, or one of "
            f"{', '.join(shipped)}"
        )
        raise InputError(f"{source}: no such text", f"give {accepted}")
    return _from_hub(source, match.groupdict(), progress)


def with_calibration_text(calibration: Calibration, progress: Progress) -> Calibration:
    """A calibration whose source is a file or a folder; without a source it is the shipped text.

    Raises:
        InputError: there is no such text.
    """
    named = calibration.source
    source = CALIBRATION if named is None else text_path(named, progress)
    return replace(calibration, source=str(source))


def text_digest(path: Path) -> str:
    """The sha256 of a text's content: of a file, or of every .txt file of a folder.

    Raises:
        InputError: it cannot be read.
    """
    if not path.is_dir():
        return file_digest(path)
    return digest_of(
        {
            file.relative_to(path).as_posix(): file_digest(file)
            for file in sorted(path.rglob("*.txt"))
        }
    )


def _from_hub(source: str, parts: Mapping[str, str | None], progress: Progress) -> Path:
    """The file of a data set, taken now where it was not taken before."""
    path = (
        Path(constants.HF_HOME)
        / "quantflow"
        / "texts"
        / f"{source.replace('/', '--').replace(':', '--')}.jsonl"
    )
    if path.exists():
        return path
    if find_spec("datasets") is None:
        cause = (
            f"{source}: no file or folder here, and the package datasets, which reads the hub's "
            "data sets, is not installed"
        )
        raise UnsupportedError(cause, "check the path, or pip install datasets")
    require_reachable(str(parts["name"]))
    progress.say(f"text: the first {ROWS} rows of {source} become {path}")
    lines = [
        # what is no JSON, such as an image, becomes a line that cannot be read
        json.dumps(_line(row, source), ensure_ascii=False, default=lambda _: None)
        for row in islice(_rows(source, parts), ROWS)
    ]
    if not lines:
        raise InputError(f"{source}: has no row", "name another split: org/name@split")
    disk.make_folder(path.parent)
    disk.write_shared(path, "".join(f"{line}\n" for line in lines).encode())
    return path


def _rows(source: str, parts: Mapping[str, str | None]) -> Iterable[Mapping[str, Any]]:
    """The rows of a split."""
    from datasets import load_dataset

    try:
        splits = load_dataset(parts["name"], parts["config"], split=parts["split"], streaming=True)
    except Exception as error:  # the library raises what its readers and the network do
        first = next(iter(str(error).splitlines()), type(error).__name__)
        raise InputError(
            f"{source}: {first[:200]}", "check the name, the configuration and the split"
        ) from error
    if parts["split"] is None:
        split = next((split for split in SPLITS if split in splits), None)
        if split is None:
            raise InputError(
                f"{source}: has splits {', '.join(splits)}", "name one: org/name@split"
            )
        splits = splits[split]
    rows: Iterable[Mapping[str, Any]] = splits
    return rows


def _line(row: Mapping[str, Any], source: str) -> dict[str, Any]:
    kind = kind_of(row)
    if kind is None:
        raise InputError(f"{source}: columns {', '.join(map(str, row))}", KINDS_REMEDY)
    kept = {column: row[column] for column in COLUMNS if column in row}
    alone = next(iter(kept.values())) if len(kept) == 1 else None
    return {"text": alone} if isinstance(alone, str) else kept
