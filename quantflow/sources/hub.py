"""A model by its name on the hub, through huggingface_hub.

Its cache, its HF_HOME, HF_ENDPOINT, HF_TOKEN and HF_HUB_OFFLINE are used. A revision (a branch, a
tag, a commit; `main` by default) is resolved to a commit first, and the files of that commit are
taken. Where the hub cannot be reached, or must not be, the cache's files of that revision are
taken. The token goes from the environment into huggingface_hub's requests, and nowhere else.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, TypeVar

from huggingface_hub import HfApi, constants, hf_hub_download, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from tqdm import tqdm

from quantflow.errors import InputError
from quantflow.files import disk
from quantflow.files.checkpoint import CONFIG, INDEX
from quantflow.files.manifest import MANIFEST_NAME
from quantflow.files.side_file_kinds import PICKLES, SideFiles, side_files
from quantflow.files.stage_folder import DONE
from quantflow.progress import Progress

# What is taken of a repository beside weights and side files: files that describe it.
_READ = {CONFIG, INDEX, DONE, "hf_quant_config.json", "quantize_config.json", "quant_config.json"}
_WEIGHTS, _OTHER_WEIGHTS = "*.safetensors", "consolidated*"
Result = TypeVar("Result")


class _NoBar(tqdm):  # type: ignore[misc]
    """huggingface_hub's bars, silent: `Progress` shows how far it is."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs.pop("name", None)
        super().__init__(*args, **{**kwargs, "disable": True})


@dataclass(frozen=True, kw_only=True)
class Repository:
    """A repository at one commit.

    Attributes:
        commit: the commit.
        folder: its snapshot in the cache, whether that is there or not.
        sizes: file -> bytes of all of it.
        hashes: file -> sha256 of its content, as the hub records it of large files.
        chosen: files that a model is made of, sorted.
        left: a line on the others.
    """

    commit: str
    folder: Path
    sizes: Mapping[str, int]
    hashes: Mapping[str, str]
    chosen: tuple[str, ...]
    left: str

    def missing(self) -> list[str]:
        """The chosen files that the cache lacks."""
        return [file for file in self.chosen if not (self.folder / file).exists()]

    def is_whole(self) -> bool:
        """Whether the cache has every chosen file."""
        return not self.missing()


def folder_of(name: str, revision: str | None, progress: Progress) -> Path:
    """Snapshot folder of a model, downloaded where the cache lacks it.

    Args:
        name: `org/name`.
        revision: branch, tag or commit; None is `main`.
        progress: receiver of a line on what is downloaded.

    Raises:
        InputError: the hub knows no such model or revision, or asks for another token; it cannot be
            reached and the cache has nothing; or the repository has no safetensors.
    """
    if constants.HF_HUB_OFFLINE:
        return _cached(name, revision, why="HF_HUB_OFFLINE is set")
    try:
        found = _listed(name, revision)
    except Unreachable as error:
        folder = _cached(name, revision, why=str(error))
        progress.say(f"source: {error}; the cache has {name} at {folder.name[:12]}")
        return folder
    _remember(found.folder, revision)
    missing = found.missing()
    if missing:
        total = sum(found.sizes[file] for file in missing) / 1e6
        progress.say(
            f"source: {name} at {found.commit[:12]}: {len(missing)} files of {total:,.0f} MB to "
            "download"
        )
        if found.left:
            progress.say(f"source: left on the hub: {found.left}")
    for file in progress.steps(
        missing, stage=f"source {name}", unit="file", nbytes=found.sizes.__getitem__
    ):
        file_at(name, file, found.commit)
    return found.folder


def listing(name: str, revision: str | None) -> Repository | None:
    """A repository; None where the hub cannot be reached.

    Raises:
        InputError: as `folder_of`.
    """
    try:
        found = _listed(name, revision)
    except Unreachable:
        return None
    _remember(found.folder, revision)
    return found


def file_at(name: str, file: str, commit: str) -> Path:
    """One file of a commit, downloaded where the cache lacks it.

    Raises:
        InputError: the hub refuses, or cannot be reached.
    """
    try:
        return Path(asked(name, commit, lambda: _download(name, file, commit)))
    except Unreachable as error:
        raise InputError(f"{name}: {error}", "run it again: what was downloaded stays") from error


def _listed(name: str, revision: str | None) -> Repository:
    """The repository at the commit of a revision.

    Raises:
        InputError: as `folder_of`.
        Unreachable: the hub does not answer.
    """
    info = asked(
        name,
        revision,
        lambda: HfApi(constants.ENDPOINT).model_info(name, revision=revision, files_metadata=True),
    )
    sizes = {item.rfilename: item.size or 0 for item in info.siblings or ()}
    chosen, left = _chosen(name, sizes)
    snapshots = Path(constants.HF_HUB_CACHE) / f"models--{name.replace('/', '--')}" / "snapshots"
    return Repository(
        commit=str(info.sha),
        folder=snapshots / str(info.sha),
        sizes=sizes,
        hashes={item.rfilename: item.lfs.sha256 for item in info.siblings or () if item.lfs},
        chosen=tuple(chosen),
        left=left,
    )


def file_of(name: str, file: str, revision: str | None, progress: Progress) -> Path:
    """One file of a repository, such as a GGUF file, downloaded where the cache lacks it.

    Raises:
        InputError: the cases of `folder_of`, or there is no such file.
    """
    progress.say(f"source: {file} of {name}")
    try:
        return Path(asked(name, revision, lambda: _download(name, file, revision)))
    except (Unreachable, LocalEntryNotFoundError) as error:
        raise InputError(
            f"{name}: {file} is not in the cache ({error})", "connect to the hub, or give a file"
        ) from error


def manifest_of(name: str, progress: Progress) -> Path:
    """A folder with the manifest of an artifact on the hub, and with nothing else that counts.

    Raises:
        InputError: the cases of `folder_of`, or it is no artifact.
    """
    if constants.HF_HUB_OFFLINE or (found := listing(name, None)) is None:
        return folder_of(name, None, progress)
    if MANIFEST_NAME not in found.sizes:
        raise InputError(f"{name}: no {MANIFEST_NAME}", "give the name of an artifact")
    progress.say(f"source: {name} at {found.commit[:12]}: {MANIFEST_NAME} alone is read")
    return file_at(name, MANIFEST_NAME, found.commit).parent


def _remember(folder: Path, revision: str | None) -> None:
    """Note the commit of a branch or tag.

    huggingface_hub does so for files that are asked for by that name.
    """
    if folder.name != revision:
        path = folder.parents[1] / "refs" / (revision or constants.DEFAULT_REVISION)
        disk.make_folder(path.parent)
        disk.write_shared(path, folder.name.encode())


def _download(name: str, file: str, revision: str | None) -> str:
    return str(
        hf_hub_download(
            name, file, revision=revision, cache_dir=constants.HF_HUB_CACHE, tqdm_class=_NoBar
        )
    )


class Unreachable(Exception):
    """The hub does not answer."""


def asked(name: str, revision: str | None, ask: Callable[[], Result]) -> Result:
    """The hub's answer.

    Raises:
        InputError: the hub refuses.
        Unreachable: the hub does not answer.
    """
    try:
        return ask()
    except GatedRepoError as error:
        raise InputError(
            f"{name}: the hub gives it to some users only", "ask for access there, and set HF_TOKEN"
        ) from error
    except RepositoryNotFoundError as error:
        remedy = "check the name; of a private model, set HF_TOKEN"
        raise InputError(
            f"{name}: no folder of this name, and no such model on {constants.ENDPOINT}", remedy
        ) from error
    except RevisionNotFoundError as error:
        raise InputError(
            f"{name}: has no revision {revision!r}", "name a branch, a tag or a commit"
        ) from error
    except OfflineModeIsEnabled as error:
        raise Unreachable("HF_HUB_OFFLINE is set") from error
    except LocalEntryNotFoundError as error:  # huggingface_hub's word for a connection that fails
        raise Unreachable(f"{constants.ENDPOINT} cannot be reached") from error
    except HfHubHTTPError as error:
        status = getattr(error.response, "status_code", "no status")
        if isinstance(status, int) and status < 500 and status != 429:
            raise InputError(
                f"{name}: the hub answers {status}", "check the name, --revision and HF_TOKEN"
            ) from error
        raise Unreachable(f"{constants.ENDPOINT} answers {status}") from error
    except OSError as error:
        if type(error).__module__.partition(".")[0] in ("builtins", "shutil"):  # the disk
            raise
        raise Unreachable(f"{constants.ENDPOINT} cannot be reached") from error
    except Exception as error:
        # what the library's client raises, whichever it is
        if type(error).__module__.partition(".")[0].startswith("http"):
            raise Unreachable(f"{constants.ENDPOINT} cannot be reached") from error
        raise


def _cached(name: str, revision: str | None, *, why: str) -> Path:
    """The cache's snapshot of a revision.

    Raises:
        InputError: it has none.
    """
    try:
        folder = Path(
            snapshot_download(
                name, revision=revision, cache_dir=constants.HF_HUB_CACHE, local_files_only=True
            )
        )
        # `plan` and `inspect` fetch what describes a model, and no weights
        if not any(folder.glob(_WEIGHTS)):
            raise FileNotFoundError(f"{folder}: no weights")
        return folder
    # the library raises several, all of which mean that the snapshot is not there
    except Exception as error:
        at = "" if revision is None else f" at {revision}"
        cause = f"{name}{at}: no folder of this name, not in {constants.HF_HUB_CACHE}, and {why}"
        raise InputError(cause, "give a folder or a GGUF file, or connect to the hub") from error


def _chosen(name: str, files: Mapping[str, int]) -> tuple[list[str], str]:
    """Files of a repository that are taken, sorted, and a line on those that are not.

    Args:
        name: `org/name`.
        files: name -> bytes of everything in it.

    Raises:
        InputError: none of them is safetensors.
    """
    beside = side_files(files, code=True)
    top = sorted(file for file in files if "/" not in file)
    # the manifest of an artifact names every file of its top folder
    taken = (
        set(top)
        if MANIFEST_NAME in files
        else _READ & set(top)
        | {
            file
            for file in top
            if fnmatchcase(file, _WEIGHTS) and not fnmatchcase(file, _OTHER_WEIGHTS)
        }
    )
    if any(fnmatchcase(file, _WEIGHTS) for file in taken):
        taken |= set(beside.copied)
        left = {file: why for file, why in beside.left.items() if file not in taken}
        return sorted(taken), str(SideFiles(copied=(), left=left))
    pickles = [file for file in top if file.endswith(PICKLES)]
    if pickles:
        folder = name.rpartition("/")[2]
        convert = (
            'convert it: python -c "from transformers import AutoModelForCausalLM as M, '
            "AutoTokenizer as T; "
            f"[X.from_pretrained('{name}').save_pretrained('{folder}') for X in (M, T)]\""
        )
        raise InputError(
            f"{name}: {pickles[0]} and no safetensors", f"{convert}, and give the folder {folder}"
        )
    ggufs = [file for file in files if file.endswith(".gguf")]
    if ggufs:
        raise InputError(
            f"{name}: {len(ggufs)} GGUF files and no safetensors", f"name one: {name}/{ggufs[0]}"
        )
    raise InputError(
        f"{name}: no safetensors among its {len(files)} files", "give a model with weights"
    )
