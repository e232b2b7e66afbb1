"""A model by the user's name for it, made a folder.

| name                       | model                                                               |
|----------------------------|---------------------------------------------------------------------|
| `./llama`                  | a folder in Hugging Face's layout                                   |
| `org/name`                 | on the hub, at --revision (quantflow/sources/hub.py)                |
| `model.Q4_1.gguf`          | a GGUF file, imported once (quantflow/sources/gguf_import.py)       |
| `org/name/model.Q4_1.gguf` | a GGUF file on the hub                                              |

What exists on disk goes before what the hub has.
"""

import re
import shlex
from pathlib import Path

from quantflow.errors import InputError
from quantflow.files.side_file_kinds import PICKLES
from quantflow.progress import Progress

REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")  # org/name
SUFFIX = ".gguf"
KINDS = "give a folder, a name on the hub such as org/name, or a GGUF file"


def model_folder(model: str | Path, *, revision: str | None = None, progress: Progress) -> Path:
    """The folder of a model.

    Args:
        model: one of the names in the table above.
        revision: revision of a model on the hub; of a folder or a file it changes nothing.
        progress: receiver of a line on what is downloaded or made.

    Raises:
        InputError: there is no such model, or it cannot be used.
        UnsupportedError: a GGUF file that is not read here.
        ResourceError: another process imports the same file.
    """
    path, name = Path(model), str(model)
    if path.is_dir():
        return path
    if path.is_file():
        return _of_file(path, progress)
    from quantflow.sources import hub  # here: a folder needs nothing of the hub's library

    if REPOSITORY.fullmatch(name):
        return hub.folder_of(name, revision, progress)
    repository, _, file = name.rpartition("/")
    if name.endswith(SUFFIX) and REPOSITORY.fullmatch(repository):
        return _of_file(hub.file_of(repository, file, revision, progress), progress)
    fetch = f"`hf download org/name --local-dir {shlex.quote(name)}` fetches one into this place"
    raise InputError(f"{name}: no such folder or file", f"{KINDS}; {fetch}")


def names_model(text: str) -> bool:
    """Whether a word names a model and not a recipe.

    That is a folder, a GGUF file, or a name on the hub.
    """
    path = Path(text)
    return (
        path.is_dir()
        or text.endswith(SUFFIX)
        or (not path.exists() and REPOSITORY.fullmatch(text) is not None)
    )


def is_on_hub(model: str | Path) -> bool:
    """Whether a name is a repository's on the hub, and no path here."""
    return not Path(model).exists() and REPOSITORY.fullmatch(str(model)) is not None


def _of_file(path: Path, progress: Progress) -> Path:
    """The folder that a file becomes, or belongs to.

    Raises:
        InputError: a file of another kind.
    """
    if path.suffix == SUFFIX:
        from huggingface_hub import constants  # here: as above

        from quantflow.sources.gguf_import import import_gguf

        return import_gguf(path, Path(constants.HF_HOME) / "quantflow" / "imported", progress)
    if path.suffix == ".safetensors":
        raise InputError(f"{path}: one file of a model", f"give its folder, {path.parent}")
    if path.suffix in PICKLES:
        raise InputError(
            f"{path}: pickled weights, which are not read",
            f"give its folder {path.parent}, whose refusal has the command that converts it",
        )
    raise InputError(f"{path}: no model", KINDS)
