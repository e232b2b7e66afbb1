"""The ledger: what became of every tensor and file of the source, and why.

A ledger that passes its checks has no silent loss: each source tensor once, each tensor of the
artifact claimed once, and byte sums that equal the source's.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal, TypeVar, get_args

from quantflow.errors import InputError, IntegrityError
from quantflow.files.safetensors_header import TensorInfo, tensor_bytes

Action = Literal["quantized", "copied", "changed", "dropped"]
FileAction = Literal["copied", "rewritten", "dropped"]
UNUSED = "unused: "  # beginning of the reason of a tensor that no module has
_AGAIN = "quantize and export again from the intact source"
_Entry = TypeVar("_Entry", "LedgerEntry", "FileEntry")


@dataclass(frozen=True, kw_only=True)
class LedgerEntry:
    """The fate of one tensor of the source.

    Attributes:
        name: source name of the tensor.
        dtype: dtype in the source, as safetensors names it.
        shape: shape in the source.
        nbytes: bytes in the source.
        action: quantized, copied (same bytes), changed (such as a norm that absorbed a smoothing)
            or dropped. Where the head was quantized, an embedding that was also the head is copied,
            and becomes the head's tensors beside itself.
        reason: a phrase that says why.
        becomes: tensors of the artifact that exist because of it, scales included; empty exactly
            when dropped.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    action: Action
    reason: str
    becomes: tuple[str, ...]

    def __post_init__(self) -> None:
        """Check the entry on its own.

        Raises:
            InputError: the action is unknown, the bytes do not fit shape and dtype, or `becomes`
                contradicts the action.
        """
        if self.action not in get_args(Action):
            raise InputError(f"ledger entry {self.name!r}: unknown action {self.action!r}", _AGAIN)
        needed = tensor_bytes(self.dtype, self.shape)
        if needed != self.nbytes:
            cause = f"{self.dtype} {list(self.shape)} needs {needed} bytes, recorded {self.nbytes}"
            raise InputError(f"ledger entry {self.name!r}: {cause}", _AGAIN)
        if bool(self.becomes) == (self.action == "dropped"):
            raise InputError(
                f"ledger entry {self.name!r}: {self.action}, becomes {list(self.becomes)}", _AGAIN
            )


@dataclass(frozen=True, kw_only=True)
class FileEntry:
    """The fate of one file of the source.

    Attributes:
        name: name in the source folder.
        nbytes: bytes of the file there.
        action: copied, rewritten (config.json, the weights) or dropped.
        reason: a phrase that says why.
    """

    name: str
    nbytes: int
    action: FileAction
    reason: str

    def __post_init__(self) -> None:
        """Check the entry on its own.

        Raises:
            InputError: the action is unknown or the size negative.
        """
        if self.action not in get_args(FileAction) or self.nbytes < 0:
            raise InputError(
                f"ledger file {self.name!r}: action {self.action!r}, {self.nbytes} bytes", _AGAIN
            )


@dataclass(frozen=True, kw_only=True)
class Ledger:
    """The whole account.

    Attributes:
        tensors: one entry for every tensor of the source.
        files: one entry for every file of the source.
        measured: tensors of the artifact that come from a measurement and from no tensor of the
            source: the scales of its caches. They are not in the byte sums, which are the source's.
    """

    tensors: tuple[LedgerEntry, ...]
    files: tuple[FileEntry, ...] = field(default=())
    measured: tuple[str, ...] = field(default=())

    def __post_init__(self) -> None:
        """Check that nothing is recorded twice.

        Raises:
            IntegrityError: a source tensor, a source file or an artifact tensor appears twice.
        """
        _refuse_repeated("source tensor", (entry.name for entry in self.tensors))
        _refuse_repeated("source file", (entry.name for entry in self.files))
        made = (name for entry in self.tensors for name in entry.becomes)
        _refuse_repeated("artifact tensor", (*made, *self.measured))

    def bytes_by_action(self) -> dict[str, int]:
        """Bytes of the source: `source` in total, and those of each action."""
        sums = {"source": sum(entry.nbytes for entry in self.tensors)}
        for action in get_args(Action):
            sums[action] = sum(entry.nbytes for entry in self.tensors if entry.action == action)
        return sums

    def check(
        self,
        source_tensors: Mapping[str, TensorInfo],
        *,
        source_files: Mapping[str, int] | None = None,
    ) -> None:
        """Check the ledger against the source: every tensor once, with its dtype, shape and bytes.

        Args:
            source_tensors: headers of the source, by tensor name.
            source_files: file name -> bytes of the source folder; None does not check the files.

        Raises:
            IntegrityError: a tensor or file is missing, foreign or different; the message names it.
        """
        recorded = {entry.name: entry for entry in self.tensors}
        _refuse_unequal(
            "source tensor", left=recorded, right=source_tensors, where=("ledger", "source")
        )
        for name, info in source_tensors.items():
            entry = recorded[name]
            if (entry.dtype, entry.shape, entry.nbytes) != (info.dtype, info.shape, info.nbytes):
                raise IntegrityError(
                    f"source tensor {name!r}: ledger {entry.dtype} {list(entry.shape)}, "
                    f"source {info.dtype} {list(info.shape)}",
                    _AGAIN,
                )
        if source_files is None:
            return
        sizes = {entry.name: entry.nbytes for entry in self.files}
        _refuse_unequal("source file", left=sizes, right=source_files, where=("ledger", "source"))
        for name, size in source_files.items():
            if sizes[name] != size:
                raise IntegrityError(
                    f"source file {name!r}: ledger {sizes[name]} bytes, source {size}", _AGAIN
                )

    def check_artifact(self, tensors: Mapping[str, TensorInfo]) -> None:
        """Check the ledger against the artifact: each claim is kept, copies have their form.

        Args:
            tensors: headers of the artifact, by tensor name.

        Raises:
            IntegrityError: a tensor contradicts the ledger; the message names it.
        """
        claimed = {name: entry for entry in self.tensors for name in entry.becomes}
        expected = claimed | dict.fromkeys(self.measured)
        _refuse_unequal(
            "artifact tensor", left=expected, right=tensors, where=("ledger", "artifact")
        )
        for name, entry in claimed.items():
            info = tensors[name]
            itself = name == entry.name or entry.name not in entry.becomes
            if (
                entry.action == "copied"
                and itself
                and (entry.dtype, entry.shape) != (info.dtype, info.shape)
            ):
                raise IntegrityError(
                    f"artifact tensor {name!r}: copied from {entry.dtype} {list(entry.shape)}, is "
                    f"{info.dtype} {list(info.shape)}",
                    _AGAIN,
                )

    def to_json(self) -> dict[str, Any]:
        """The ledger as JSON: tensors, files, the source's byte sums, `measured` where any is."""
        tensors = [
            {**asdict(entry), "shape": list(entry.shape), "becomes": list(entry.becomes)}
            for entry in self.tensors
        ]
        measured = {"measured": list(self.measured)} if self.measured else {}
        files = [asdict(entry) for entry in self.files]
        return {"tensors": tensors, "files": files, "bytes": self.bytes_by_action(), **measured}

    @classmethod
    def from_json(cls, value: Any) -> "Ledger":
        """The ledger that `to_json` returned.

        Raises:
            InputError: the value has another form.
            IntegrityError: its byte sums are not those of its entries.
        """
        if not isinstance(value, dict) or set(value) - {"measured"} != {
            "tensors",
            "files",
            "bytes",
        }:
            raise InputError(
                "ledger: needs exactly tensors, files and bytes, and may have measured", _AGAIN
            )
        measured = value.get("measured", [])
        if not _has_form("becomes", measured):
            raise InputError(f"ledger: measured is {str(measured)[:40]!r}", _AGAIN)
        tensors = _entries(LedgerEntry, value["tensors"])
        files = _entries(FileEntry, value["files"])
        ledger = cls(tensors=tensors, files=files, measured=tuple(measured))
        if value["bytes"] != ledger.bytes_by_action():
            cause = (
                f"ledger: byte sums {value['bytes']}, its entries give {ledger.bytes_by_action()}"
            )
            raise IntegrityError(cause, _AGAIN)
        return ledger


def _entries(kind: type[_Entry], rows: Any) -> tuple[_Entry, ...]:
    """Entries from JSON rows; the type of every field is checked."""
    names = {item.name for item in fields(kind)}
    if not isinstance(rows, list):
        raise InputError(f"ledger: {kind.__name__} rows are not a list", _AGAIN)
    entries = []
    for row in rows:
        if not isinstance(row, dict) or set(row) != names:
            raise InputError(f"ledger: a {kind.__name__} needs exactly {sorted(names)}", _AGAIN)
        for key, item in row.items():
            if not _has_form(key, item):
                raise InputError(
                    f"ledger entry {str(row['name'])!r}: {key} is {str(item)[:40]!r}", _AGAIN
                )
        values: dict[str, Any] = {
            key: tuple(item) if isinstance(item, list) else item for key, item in row.items()
        }
        entries.append(kind(**values))
    return tuple(entries)


def _has_form(key: str, item: Any) -> bool:
    """Whether a field of a row has its JSON type."""
    if key == "nbytes":
        return type(item) is int
    if key in {"shape", "becomes"}:
        element = int if key == "shape" else str
        return isinstance(item, list) and all(type(part) is element for part in item)
    return isinstance(item, str)


def _refuse_repeated(what: str, names: Iterable[str]) -> None:
    repeated = [name for name, count in Counter(names).items() if count > 1]
    if repeated:
        raise IntegrityError(f"{what} {repeated[0]!r}: recorded twice in the ledger", _AGAIN)


def _refuse_unequal(
    what: str, *, left: Mapping[str, Any], right: Mapping[str, Any], where: tuple[str, str]
) -> None:
    for name in (*sorted(left.keys() - right.keys()), *sorted(right.keys() - left.keys())):
        present, absent = where if name in left else where[::-1]
        raise IntegrityError(f"{what} {name!r}: in the {present}, not in the {absent}", _AGAIN)
