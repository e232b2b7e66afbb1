"""The manifest, quantflow.json: an artifact's source, recipe and proof, and the hash of each file.

It holds no time, host, path, thread count or memory figure, so the same inputs give the same bytes.
`digest` is the sha256 of its own canonical JSON without that key. It covers every other hashed file
through `files`, so it is "the artifact's hash". The byte form (`readable_json`) and the digest are
defined alike in every layout version: a newer manifest is recognised as intact and newer, a damaged
one as damaged.
"""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NotRequired, TypedDict

from quantflow.errors import InputError, IntegrityError, UnsupportedError
from quantflow.files import disk
from quantflow.files.canonical import (
    MAX_JSON_BYTES,
    digest_of,
    file_digest,
    parse_json,
    readable_json,
)
from quantflow.files.folder import list_files, reading, refuse_pointer
from quantflow.files.schema import check

MANIFEST_NAME = "quantflow.json"
LAYOUT_VERSION = 1
UNHASHED = frozenset({MANIFEST_NAME, "README.md", ".gitattributes"})
BODY_KEYS = frozenset(
    {
        "kind",
        "source",
        "recipe",
        "measurement",
        "float8",
        "ledger",
        "layers",
        "proof",
        "tools",
        "made_from",
    }
)
# head: source name, errors and decisions of a quantized head, like a layer's
# lean_decoder: the reason why the lean decoder does not run this artifact
# rounded_inputs: the cost of rounding inputs that the schemes leave alone
# mtp: the same of quantized layers that predict further tokens
OPTIONAL_KEYS = frozenset({"head", "mtp", "lean_decoder", "rounded_inputs"})
KEYS = BODY_KEYS | {"layout_version", "files", "digest"}
_SHA256 = re.compile(r"[0-9a-f]{64}")
# Rounded inputs may diverge by a twentieth of the divergence of the artifact from its source.
INPUTS_SHARE = 20
_AGAIN = "copy or export the artifact again"


class _Source(TypedDict):
    """The model that an artifact was made from."""

    name: str
    revision: str | None
    files: dict[str, str]
    stored_names: NotRequired[dict[str, str]]


class _Resolved(TypedDict):
    """The resolution of the recipe."""

    algorithm: str
    transforms: list[dict[str, Any]]
    schemes: dict[str, dict[str, Any] | None]
    head: NotRequired[dict[str, Any] | None]
    mtp: NotRequired[dict[str, Any] | None]


class _MadeBy(TypedDict):
    """The recipe of one artifact."""

    name: str
    scheme: str
    resolved: _Resolved


class _Calibrated(TypedDict):
    """The text of the measurement."""

    hash: str
    sequence_length: int


class _Counts(TypedDict):
    """The amount of that text."""

    samples: int
    tokens: int


class _Measured(TypedDict):
    """The measurement that was used."""

    calibration: _Calibrated
    counts: _Counts
    sequence_heads: list[str]


class _Flavour(TypedDict):
    """The flavour of float8."""

    flavour: str


class _Error(TypedDict):
    """Relative squared errors of a linear against the original."""

    weight: float
    output: NotRequired[float]


class _Decided(TypedDict):
    """Decisions about a linear; errors of outputs are relative, on the calibration text."""

    output_error: NotRequired[float | None]
    output_error_rtn: NotRequired[float | None]
    same_as_rtn: NotRequired[bool | None]
    input_amax: NotRequired[float | None]


class _Short(TypedDict):
    """An expert that few tokens reached."""

    tokens: int
    needed: int


class _Experts(TypedDict):
    """A mixture of experts, and the tokens that reached each."""

    experts: str
    fed: str
    tokens: list[int] | None
    short: dict[str, _Short]


class _LayerRow(TypedDict):
    """The record of one layer, or of the head."""

    errors: dict[str, _Error]
    decisions: dict[str, _Decided]
    changed: NotRequired[list[str]]
    experts: NotRequired[_Experts]


class _Proof(TypedDict):
    """The proof that `export` gave."""

    kind: str
    layers: int
    digest: str
    device: NotRequired[dict[str, str]]


class _RoundedInputs(TypedDict):
    """Divergences on some tokens, nats.

    `kld` is between the artifact and itself with rounded inputs, `kld_of_artifact` between its
    source and the artifact.
    """

    kld: float
    kld_of_artifact: float
    tokens: int


class _Manifest(TypedDict):
    """The values that some code reads; `_check_files` and the ledger check theirs."""

    source: _Source
    recipe: _MadeBy
    measurement: _Measured | None
    float8: _Flavour | None
    layers: list[_LayerRow]
    head: NotRequired[_LayerRow]
    mtp: NotRequired[_LayerRow]
    lean_decoder: NotRequired[str | None]
    rounded_inputs: NotRequired[_RoundedInputs]
    proof: _Proof
    tools: dict[str, str | int]
    made_from: str


def build_manifest(
    folder: Path, *, body: Mapping[str, Any], hashes: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """The manifest of a folder that is otherwise complete.

    Args:
        folder: folder of the artifact; every file but those in UNHASHED is hashed.
        body: the keys in BODY_KEYS, and those in OPTIONAL_KEYS that have a value; `kind` is
            "artifact".
        hashes: file name -> sha256 of files whose content was hashed already. The caller makes sure
            that a reader compares them with the content before the artifact is published.

    Raises:
        InputError: `body` lacks keys or has unknown ones, JSON cannot hold a value, or the folder
            has a link.
    """
    _check_keys(set(body), expected=BODY_KEYS, name="the body of a manifest")
    listing = list_files(folder, follow_links=False)
    if listing.others:
        raise InputError(
            f"{folder / listing.others[0]}: not a regular file",
            "put the file itself into the artifact",
        )
    known_hashes = hashes or {}
    files = {
        name: {
            "sha256": known_hashes.get(name) or file_digest(folder / name),
            "bytes": (folder / name).stat().st_size,
        }
        for name in listing.files
        if name not in UNHASHED
    }
    manifest = {**body, "layout_version": LAYOUT_VERSION, "files": files}
    return {**manifest, "digest": digest_of(manifest)}


def with_note(manifest: Mapping[str, Any], key: str, value: Any) -> dict[str, Any]:
    """A manifest with one more of OPTIONAL_KEYS."""
    body = {**{name: part for name, part in manifest.items() if name != "digest"}, key: value}
    return {**body, "digest": digest_of(body)}


def rounds_inputs(manifest: Mapping[str, Any]) -> bool:
    """Whether inputs are rounded when an artifact runs.

    They are where their cost is at most a twentieth of the artifact's own divergence.
    """
    record = manifest.get("rounded_inputs")
    return record is not None and INPUTS_SHARE * record["kld"] <= record["kld_of_artifact"]


def write_manifest(folder: Path, manifest: Mapping[str, Any]) -> None:
    """Write quantflow.json and wait until it is on the disk; the folder has no final name yet.

    Raises:
        InputError: JSON cannot hold a value.
        IntegrityError: the manifest was changed after its digest was taken.
    """
    _check_digest(manifest)
    disk.write_file(folder / MANIFEST_NAME, readable_json(manifest))


def read_manifest(folder: Path) -> dict[str, Any]:
    """Read quantflow.json and check it against itself; `verify` checks the files.

    Raises:
        InputError: it is missing, or intact but without the form of a manifest.
        IntegrityError: its bytes are not those that were written.
        UnsupportedError: it is intact and of a newer layout version.
    """
    path = folder / MANIFEST_NAME
    if not os.path.exists(path):
        raise InputError(
            f"{folder}: no {MANIFEST_NAME}",
            "give the folder of an artifact that quantflow exported",
        )
    with reading(path) as file:
        data = file.read(MAX_JSON_BYTES + 1)
    refuse_pointer(data, path)
    if len(data) > MAX_JSON_BYTES:
        raise IntegrityError(f"{path}: over {MAX_JSON_BYTES} bytes", _AGAIN)
    try:
        manifest = parse_json(data, str(path))
        if not isinstance(manifest, dict):
            raise IntegrityError(f"{path}: not a table", _AGAIN)
        _check_digest(manifest)
        written = readable_json(manifest)
    except InputError as error:
        raise IntegrityError(error.cause, _AGAIN) from error
    if data != written:
        raise IntegrityError(
            f"{path}: its bytes differ from the form in which it was written", _AGAIN
        )
    version = manifest.get("layout_version")
    if type(version) is not int or version < 1:
        raise InputError(f"{path}: layout_version {version!r}, expected an integer from 1", _AGAIN)
    if version > LAYOUT_VERSION:
        cause = f"{path}: layout version {version}, this quantflow knows {LAYOUT_VERSION}"
        raise UnsupportedError(cause, "update quantflow")
    _check_keys(set(manifest), expected=KEYS, name=str(path))
    if manifest["kind"] != "artifact":
        raise InputError(
            f"{path}: kind {manifest['kind']!r}, expected 'artifact'",
            "give the folder of an artifact",
        )
    _check_files(path, manifest["files"])
    check(manifest, _Manifest, where=str(path), remedy=_AGAIN)
    return manifest


def _check_digest(manifest: Mapping[str, Any]) -> None:
    content = {key: value for key, value in manifest.items() if key != "digest"}
    recorded, actual = manifest.get("digest"), digest_of(content)
    if recorded != actual:
        raise IntegrityError(
            f"{MANIFEST_NAME}: records digest {str(recorded)[:64]}, its content has {actual}",
            _AGAIN,
        )


def _check_keys(keys: set[str], *, expected: frozenset[str], name: str) -> None:
    for what, names in (
        ("lacks", expected - keys),
        ("has the unknown key", keys - expected - OPTIONAL_KEYS),
    ):
        if names:
            cause = f"{name}: {what} {', '.join(sorted(names))}"
            raise InputError(cause, "use a quantflow of the version that wrote it")


def _check_files(path: Path, files: Any) -> None:
    """Check the form of the `files` table."""
    if not isinstance(files, dict):
        raise InputError(f"{path}: files is not a table", _AGAIN)
    for name, row in files.items():
        if not isinstance(row, dict) or set(row) != {"sha256", "bytes"}:
            raise InputError(f"{path}: files[{name!r}] needs exactly sha256 and bytes", _AGAIN)
        digest, size = row["sha256"], row["bytes"]
        if (
            not isinstance(digest, str)
            or not _SHA256.fullmatch(digest)
            or type(size) is not int
            or size < 0
        ):
            raise InputError(
                f"{path}: files[{name!r}] holds {str(digest)[:64]!r} and {size!r} bytes", _AGAIN
            )
        if name in UNHASHED:
            raise InputError(f"{path}: files names {name}, which is never hashed", _AGAIN)
