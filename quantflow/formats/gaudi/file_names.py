"""Names of the files of Gaudi's toolkit, taken apart and put together exactly.

| name                              | content                                    |
|-----------------------------------|--------------------------------------------|
| `P_hooks_O[_S][_R_W].npz`         | statistics, or scales of the method S      |
| `P_hooks_O[_S][_R_W].json`        | the same for people                        |
| `P_hooks_O[_R_W]_mod_list.json`   | every module that the toolkit looked at    |

P is the prefix, O the observer, S the scale method of a file of scales, R the rank and W the world
size; a single process has neither. A name is matched as a whole: card 1 of 16 is `_1_16` at its
end, and never a part of `_11_16`.

A set is what one run wrote: the files of one prefix, one observer and one world size. A folder may
hold several, as vLLM's does whose unified files lie beside the measured ones; the path of any file
of a set names the set.

Source: neural_compressor.torch.algorithms.fp8_quant, and optimum-habana's unify_measurements.py.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from quantflow.errors import InputError
from quantflow.files.rank_folders import MOST_RANKS

# device -> the folder that vLLM's calibration keeps its files in
GENERATIONS = {"gaudi2": "g2", "gaudi3": "g3"}
OBSERVERS = ("maxabs", "maxabs_per_channel", "save", "shape")
_NAME = re.compile(
    r"(?P<prefix>.+)_hooks_(?P<observer>maxabs_per_channel|maxabs|save|shape)"
    r"(?:_(?P<method>[A-Z][A-Z0-9_]*?))?(?:_(?P<rank>0|[1-9]\d*)_(?P<world>[1-9]\d*))?"
    r"(?P<ending>_mod_list\.json|\.json|\.npz)"
)
_MEASURE = (
    "measure with Gaudi's toolkit first (mode MEASURE), and give the folder or folder/prefix of "
    "its dump_stats_path, or one file of the set"
)


@dataclass(frozen=True, kw_only=True)
class FileName:
    """The parts of a name that a rank's `.npz`, `.json` and `_mod_list.json` share.

    Attributes:
        prefix: last component of dump_stats_path.
        method: scale method in capitals of a file of scales; None for a measurement.
        rank, world: number of the rank and of ranks; both None when one process measured.
    """

    prefix: str
    observer: str = "maxabs"
    method: str | None = None
    rank: int | None = None
    world: int | None = None

    @property
    def stem(self) -> str:
        """The name without its ending."""
        method = "" if self.method is None else f"_{self.method}"
        suffix = "" if self.rank is None else f"_{self.rank}_{self.world}"
        return f"{self.prefix}_hooks_{self.observer}{method}{suffix}"


@dataclass(frozen=True, kw_only=True)
class TripleFiles:
    """The files of one rank; at least one of `npz` and `json` is there."""

    name: FileName
    npz: Path | None = None
    json: Path | None = None
    mod_list: Path | None = None


def parse_name(text: str) -> tuple[FileName, str] | None:
    """Parts of a file's name and its ending; None for a name that is not the toolkit's."""
    match = _NAME.fullmatch(text)
    if match is None:
        return None
    rank, world = match["rank"], match["world"]
    name = FileName(
        prefix=match["prefix"],
        observer=match["observer"],
        method=match["method"],
        rank=None if rank is None else int(rank),
        world=None if world is None else int(world),
    )
    return name, match["ending"]


def holds_triples(path: Path) -> bool:
    """Whether a folder, or folder/prefix, names files of Gaudi's toolkit.

    Scales or module lists alone count too.
    """
    return bool(_named(path))


def find_triples(
    path: Path, *, method: str | None = None, partial: bool = False
) -> dict[int, TripleFiles]:
    """Files of each rank, complete and in order; files of other names are left alone.

    Args:
        path: folder with one set of files, folder/prefix in the form of dump_stats_path, or one
            file of the set.
        method: scale method in capitals for its files of scales; None for measurements.
        partial: whether ranks may be missing.

    Raises:
        InputError: none are there; two prefixes, observers or world sizes; a rank is missing or
            beyond the world size.
    """
    names = _files_by_name(path, method=method)
    if not names:
        wanted = "measurement" if method is None else f"scales of {method}"
        scales = sorted({name.method for name, *_ in _named(path) if name.method is not None})
        beside = f", only scales of {', '.join(scales)}" if scales and method is None else ""
        raise InputError(
            f"{path}: holds no {wanted} (..._hooks_maxabs.npz, ..._hooks_maxabs_0_8.json){beside}",
            _MEASURE,
        )
    for what, values in (
        ("prefixes", {name.prefix for name in names}),
        ("observers", {name.observer for name in names}),
        ("world sizes", {1 if name.world is None else name.world for name in names}),
        (
            "kinds of names, with and without ranks,",
            {"_R_W" if name.rank is not None else "no rank" for name in names},
        ),
    ):
        if len(values) > 1:
            listed = ", ".join(map(str, sorted(values, key=str)))
            one = next(iter(names.values()))
            raise InputError(
                f"{path}: files of {len(values)} {what} {listed}",
                f"give one file of the set that is meant, such as {one.json or one.npz}",
            )
    (world,) = {1 if name.world is None else name.world for name in names}
    if world > MOST_RANKS:
        raise InputError(
            f"{path}: files of a world of {world} ranks, {MOST_RANKS} are the most", _MEASURE
        )
    ranks = {name.rank or 0: files for name, files in names.items()}
    beyond = sorted(rank for rank in ranks if rank >= world)
    missing = [] if partial else sorted(set(range(world)) - set(ranks))
    if beyond or missing:
        cause = (
            f"rank {beyond[0]} of {world}"
            if beyond
            else f"no file of rank {_some(missing)} of {world}"
        )
        raise InputError(f"{path}: {cause}", "give every rank of one run, 0 up to the world size")
    return dict(sorted(ranks.items()))


def device_folder(path: Path) -> Path:
    """Folder g2 or g3 inside a folder that has none of the files itself; else `path`.

    vLLM's calibration of a model writes such folders.

    Raises:
        InputError: both folders have files.
    """
    if not path.is_dir() or _inside(path):
        return path
    folders = [path / name for name in GENERATIONS.values() if _inside(path / name)]
    if len(folders) > 1:
        raise InputError(
            f"{path}: holds measurements of two devices, "
            f"{' and '.join(one.name for one in folders)}",
            "give one",
        )
    return folders[0] if folders else path


def _named(path: Path) -> list[tuple[FileName, str, Path]]:
    """(name, ending, path) of the toolkit's files in a folder, or of those of one prefix."""
    return _inside(device_folder(path))


def _inside(path: Path) -> list[tuple[FileName, str, Path]]:
    folder = path if path.is_dir() else path.parent
    if not folder.is_dir():
        return []
    parsed = [(parse_name(entry.name), entry) for entry in sorted(folder.iterdir())]
    return [
        (*names, entry)
        for names, entry in parsed
        if names is not None and _is_meant(names[0], entry, path)
    ]


def _is_meant(name: FileName, entry: Path, path: Path) -> bool:
    """Whether a path names a file: as its folder, its prefix, or a file of its set."""
    if path.is_dir():
        return not _is_original(entry, path)
    given = parse_name(path.name) if path.is_file() else None
    if given is None:
        return name.prefix == path.name
    meant = given[0]
    return (name.prefix, name.observer, name.world) == (meant.prefix, meant.observer, meant.world)


def _files_by_name(path: Path, *, method: str | None) -> dict[FileName, TripleFiles]:
    """Measurements, or scales of a method, in a folder or of one prefix."""
    files: dict[FileName, dict[str, Path]] = {}
    for name, ending, entry in _named(path):
        if name.method == method and name.observer != "shape":
            files.setdefault(name, {})[ending] = entry
    return {
        name: TripleFiles(
            name=name,
            npz=parts.get(".npz"),
            json=parts.get(".json"),
            mod_list=parts.get("_mod_list.json"),
        )
        for name, parts in files.items()
        if ".npz" in parts or ".json" in parts
    }


def _is_original(entry: Path, folder: Path) -> bool:
    """Whether a file is `orig_` and the name of a file beside it.

    The toolkit's postprocessing keeps such copies.
    """
    return entry.name.startswith("orig_") and (folder / entry.name.removeprefix("orig_")).exists()


def _some(values: Iterable[int]) -> str:
    listed = list(values)
    return ", ".join(map(str, listed[:8])) + (", ..." if len(listed) > 8 else "")
