"""A model on the hub by its description alone: config, tokenizer, index and safetensors headers.

A folder is made that has the real files where they say something, and elsewhere files of the right
size without content. Of a file of weights the header is real, read by ranges of bytes. So
whatever reads headers reads them as it does of a download, with every check, and no weight is
fetched. The folder is for nobody who reads weights, and is gone afterwards.
"""

import os
import tempfile
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from huggingface_hub import constants, hf_hub_url
from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

from quantflow.errors import InputError
from quantflow.files import disk
from quantflow.files.safetensors_header import MAX_HEADER_BYTES
from quantflow.progress import Progress
from quantflow.sources import hub
from quantflow.sources.models import is_on_hub, model_folder

WEIGHTS = ".safetensors"
READ = (".json", ".jinja", ".model", ".tiktoken", ".txt")  # endings of files that are fetched whole
_FIRST = 100_000  # bytes of a file's beginning that are asked for: most headers fit
_AT_ONCE = 8  # requests


@contextmanager
def described(model: str | Path, *, revision: str | None, progress: Progress) -> Iterator[Path]:
    """The folder of a model whose weights nobody reads, for as long as the context lasts.

    Args:
        model: as for `model_folder`. What is no repository of the hub, or lies in the cache whole,
            is its folder itself.
        revision: branch, tag or commit of a model on the hub.
        progress: receiver of a line on what is read.

    Raises:
        InputError: as `model_folder`; or a file is no safetensors.
    """
    with _of_headers(model, revision, progress, hashed=False) as (folder, _):
        yield folder


@contextmanager
def hashed(
    model: str | Path, *, revision: str | None, progress: Progress
) -> Iterator[tuple[Path, Mapping[str, str]]]:
    """The same, with the hub's own sha256 of files without content; every other file is real.

    Raises:
        InputError: as `described`.
    """
    with _of_headers(model, revision, progress, hashed=True) as found:
        yield found


@contextmanager
def _of_headers(
    model: str | Path, revision: str | None, progress: Progress, *, hashed: bool
) -> Iterator[tuple[Path, Mapping[str, str]]]:
    """The folder, and the hashes of its files without content.

    Args:
        model: as for `described`, and so are
        revision: the revision, and
        progress: the receiver of a line.
        hashed: whether a file without content needs a hash, beside those of weights.
    """
    listed = None
    if is_on_hub(model) and not constants.HF_HUB_OFFLINE:
        listed = hub.listing(str(model), revision)
    if listed is None or listed.is_whole():
        yield model_folder(model, revision=revision, progress=progress), {}
        return
    weights = [
        file
        for file in listed.chosen
        if file.endswith(WEIGHTS) and (file in listed.hashes or not hashed)
    ]
    whole = [
        file
        for file in listed.chosen
        if file not in weights and (file.endswith(READ) or (hashed and file not in listed.hashes))
    ]
    progress.say(
        f"source: {model} at {listed.commit[:12]}: of {len(weights)} files of weights the headers "
        f"are read, and {len(whole)} other files"
    )
    with tempfile.TemporaryDirectory(prefix="quantflow-headers-") as room:
        # the path of a snapshot, which says name and commit
        folder = Path(room) / listed.folder.relative_to(listed.folder.parents[2])
        for file in listed.chosen:
            disk.make_folder((folder / file).parent)
            if file in whole:
                os.symlink(hub.file_at(str(model), file, listed.commit), folder / file)
            elif file not in weights:
                _make_empty(folder / file, listed.sizes[file])
        _write_headers(folder, str(model), listed.commit, weights, listed.sizes)
        yield folder, {file: sha for file, sha in listed.hashes.items() if file not in whole}


def _write_headers(
    folder: Path, name: str, commit: str, files: list[str], sizes: Mapping[str, int]
) -> None:
    def write(file: str) -> None:
        content = _header_of(name, file, commit, sizes[file])
        disk.write_file(folder / file, content)
        _make_empty(folder / file, sizes[file])

    with ThreadPoolExecutor(_AT_ONCE) as pool:
        for _ in pool.map(write, files):
            pass


def _make_empty(path: Path, nbytes: int) -> None:
    """Give a file its size; what is not written takes no room."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        os.ftruncate(descriptor, nbytes)
    finally:
        os.close(descriptor)


def _header_of(name: str, file: str, commit: str, nbytes: int) -> bytes:
    """The beginning of a file of weights up to the end of its header.

    Raises:
        InputError: the header's length is none that the format allows, or the hub refuses.
    """
    beginning = _range(name, file, commit, 0, min(_FIRST, nbytes))
    length = int.from_bytes(beginning[:8], "little")
    if length > min(MAX_HEADER_BYTES, max(nbytes - 8, 0)):
        raise InputError(
            f"{name}/{file}: a header of {length} bytes in a file of {nbytes}",
            "it is no safetensors file, or was uploaded in part; ask who uploaded it",
        )
    end = 8 + length
    if end > len(beginning):
        beginning += _range(name, file, commit, len(beginning), end)
    return beginning[:end]


def _range(name: str, file: str, commit: str, begin: int, end: int) -> bytes:
    """Bytes of a file on the hub; the answer is not read beyond them.

    Raises:
        InputError: the hub refuses, cannot be reached, or sends something else.
    """
    if end <= begin:
        return b""

    def ask() -> bytes:
        url = hf_hub_url(name, file, revision=commit)
        headers = {**build_hf_headers(), "Range": f"bytes={begin}-{end - 1}"}
        # a server that knows no ranges sends the whole file, of which the beginning is taken
        with get_session().stream("GET", url, headers=headers) as answer:
            if answer.status_code >= 400:
                answer.read()
            hf_raise_for_status(answer)
            skipped = 0 if answer.status_code == 206 else begin
            found = bytearray()
            for block in answer.iter_bytes():
                found += block
                if len(found) >= skipped + end - begin:
                    break
            return bytes(found[skipped : skipped + end - begin])

    try:
        found = hub.asked(name, commit, ask)
    except hub.Unreachable as error:
        raise InputError(f"{name}: {error}", "run it again") from error
    if len(found) != end - begin:
        raise InputError(
            f"{name}/{file}: {len(found)} bytes from {begin}, {end - begin} were asked for",
            "run it again",
        )
    return found
