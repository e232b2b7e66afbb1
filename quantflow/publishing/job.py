"""One upload: an artifact, the repository that it becomes, and who may see it."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantflow.progress import SILENT, Progress


@dataclass(frozen=True, kw_only=True)
class PushResult:
    """A finished upload, or with `commit` None the plan of one.

    Attributes:
        address: page of the repository at the revision.
        commit: commit that holds the artifact; None where nothing was uploaded.
        files: name in the repository -> bytes.
        removed: files of the repository that the commit removes.
        public: whether everybody can see it.
        validated: outcome of the artifact's validation; None without one.
        notes: sentences on what the card lacks.
    """

    address: str
    commit: str | None
    files: Mapping[str, int]
    removed: tuple[str, ...]
    public: bool
    validated: str | None
    notes: tuple[str, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return sum(self.files.values())

    def as_json(self) -> dict[str, Any]:
        """The result as plain data."""
        return {
            "address": self.address,
            "commit": self.commit,
            "files": dict(self.files),
            "bytes": self.nbytes,
            "removed": list(self.removed),
            "public": self.public,
            "validated": self.validated,
            "notes": list(self.notes),
        }


@dataclass(frozen=True, kw_only=True)
class PushJob:
    """An artifact that goes to the hub, all of it in one commit.

    Attributes:
        artifact: its folder, which is verified first.
        repository: `org/name`; it is created where it does not exist.
        revision: branch, created where it does not exist; None is the main one.
        public: let everybody see a repository that is created; an existing one stays as it is.
        base_model: name of the source on the hub; None is the manifest's, where it is such a name.
        validation: its validation.json, or the folder that holds it; None is
            `<artifact>-validation` where that exists.
        force: remove files of the repository that the artifact does not have.
    """

    artifact: Path
    repository: str
    revision: str | None = None
    public: bool = False
    base_model: str | None = None
    validation: Path | None = None
    force: bool = False

    def plan(self) -> PushResult:
        """What would be uploaded; the artifact is verified, and the hub is not asked.

        Raises:
            QuantflowError: a name that cannot be, or an artifact that is damaged.
        """
        from quantflow.publishing.push import plan

        return plan(self)

    def run(self, progress: Progress = SILENT) -> PushResult:
        """Upload; what an earlier run uploaded is not sent again.

        Raises:
            UsageError: a name that cannot be, a repository with other files, or a public one that
                was not asked for.
            InputError: no token, or the hub refuses or cannot be reached.
            IntegrityError: the artifact is damaged.
        """
        from quantflow.publishing.push import run

        return run(self, progress)
