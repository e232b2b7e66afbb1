"""An artifact uploaded to the hub through huggingface_hub.

1. It is verified: what `verify` refuses never leaves this machine.
2. The repository is created, private, where it does not exist.
3. The contents of large files go first, one file after the other. The hub keeps them, so that the
   same command sends none twice after an interruption.
4. One commit names all of them. Nobody ever sees a part of an artifact.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, constants, get_token
from huggingface_hub.errors import (
    HfHubHTTPError,
    HFValidationError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import (
    are_progress_bars_disabled,
    disable_progress_bars,
    enable_progress_bars,
    validate_repo_id,
)

from quantflow import __version__
from quantflow.errors import InputError, UsageError, first_line
from quantflow.exporting.model_card import model_card
from quantflow.files.canonical import read_json
from quantflow.files.checkpoint import CONFIG
from quantflow.files.manifest import MANIFEST_NAME, read_manifest
from quantflow.files.outputs import beside
from quantflow.files.verify import verify
from quantflow.progress import Progress
from quantflow.publishing.card import card, license_named_in
from quantflow.publishing.job import PushJob, PushResult
from quantflow.sources import hub
from quantflow.sources.models import REPOSITORY
from quantflow.validating.regression import read_validation

README = "README.md"
_HUBS_OWN = frozenset({".gitattributes", README})
_AGAIN = "run it again: what was uploaded stays"
_LOGIN = "set HF_TOKEN to a token with write access, or run `hf auth login`"
_LICENSE_KEYS = ("license", "license_name", "license_link")
Result = TypeVar("Result")


def plan(job: PushJob) -> PushResult:
    """What would be uploaded."""
    _check_name(job)
    manifest, sizes = _verified(job)
    validation, notes = _validation(job, manifest)
    content, more = _card(job, manifest, validation, _license_beside(job.artifact))
    return PushResult(
        address=_address(job),
        commit=None,
        files=sizes if content is None else {**sizes, README: len(content)},
        removed=(),
        public=job.public,
        validated=None if validation is None else validation["outcome"],
        notes=(*notes, *more),
    )


def run(job: PushJob, progress: Progress) -> PushResult:
    """Upload the artifact."""
    _check_name(job)
    if constants.HF_HUB_OFFLINE:
        raise InputError(
            f"push {job.repository}: HF_HUB_OFFLINE is set", "unset it, or give --dry-run"
        )
    if get_token() is None:
        raise InputError(f"push {job.repository}: no token of the hub", _LOGIN)
    progress.say(f"push {job.repository}: verifying {job.artifact}")
    manifest, sizes = _verified(job)
    validation, notes = _validation(job, manifest)
    api = HfApi(constants.ENDPOINT, library_name="quantflow", library_version=__version__)
    present, public = _repository(api, job, progress)
    foreign = sorted(present - sizes.keys() - _HUBS_OWN)
    if foreign and not job.force:
        raise UsageError(
            f"push {job.repository}: has {len(foreign)} files that the artifact lacks, such as "
            f"{foreign[0]}",
            "push to another name or --revision, or give --force to remove them",
        )
    licensed = _license_of(api, job, manifest) or _license_beside(job.artifact)
    content, more = _card(job, manifest, validation, licensed)
    for note in (*notes, *more):
        progress.say(f"push {job.repository}: {note}")
    commit = _upload(api, job, manifest, sizes, content, foreign, progress)
    return PushResult(
        address=_address(job),
        commit=commit,
        files=sizes if content is None else {**sizes, README: len(content)},
        removed=tuple(foreign),
        public=public,
        validated=None if validation is None else validation["outcome"],
        notes=(*notes, *more),
    )


def _check_name(job: PushJob) -> None:
    """Refuse names that the hub does not take.

    Raises:
        UsageError: naming it.
    """
    for name in filter(None, (job.repository, job.base_model)):
        try:
            if REPOSITORY.fullmatch(name) is None:
                raise UsageError(f"push: {name!r} is no name on the hub", "give org/name")
            validate_repo_id(name)
        except HFValidationError as error:
            raise UsageError(
                f"push: {name!r} is no name on the hub",
                "give org/name of letters, digits, '-', '_' and '.', none of the last two doubled "
                "or at an end, and 96 characters at most",
            ) from error


def _verified(job: PushJob) -> tuple[dict[str, Any], dict[str, int]]:
    """The manifest of the artifact, and its files: name -> bytes.

    Raises:
        InputError, IntegrityError, UnsupportedError: `verify` refuses it.
    """
    manifest = read_manifest(job.artifact)
    verify(job.artifact, manifest=manifest)
    names = [*manifest["files"], MANIFEST_NAME]
    if (job.artifact / README).is_file():
        names.append(README)
    return manifest, {name: (job.artifact / name).stat().st_size for name in sorted(names)}


def _validation(
    job: PushJob, manifest: Mapping[str, Any]
) -> tuple[dict[str, Any] | None, list[str]]:
    """The artifact's validation, and what is to be said of it.

    Raises:
        InputError: the one that was named cannot be read.
    """
    place = job.validation or beside(job.artifact, "-validation")
    command = f"quantflow validate {job.artifact} --baseline {manifest['source']['name']}"
    if job.validation is None and not place.exists():
        return None, [f"it was not validated, and the card says so; `{command}` compares it"]
    validation = read_validation(place)
    if validation["digest"] != manifest["digest"]:
        return None, [
            f"{place} is of another artifact, so the card has no validation; `{command}` makes one"
        ]
    if validation["outcome"] != "pass":
        return validation, [f"its gate says {validation['outcome']}, and so does the card"]
    return validation, []


def _card(
    job: PushJob,
    manifest: Mapping[str, Any],
    validation: Mapping[str, Any] | None,
    licensed: Mapping[str, str],
) -> tuple[bytes | None, list[str]]:
    """The card to upload, and what it lacks; None leaves a README.md as somebody wrote it."""
    path, config = job.artifact / README, read_json(job.artifact / CONFIG)
    own = model_card(manifest, config["quantization_config"])
    if path.is_file() and path.read_bytes() != own.encode():
        return None, ["README.md was changed since export; it goes as it is"]
    base_model = _base_model(job, manifest)
    lacks = []
    if base_model is None:
        lacks.append(
            f"the source, {manifest['source']['name']}, is no name on the hub, so the card has no "
            "base_model; --base-model org/name gives it"
        )
    if not licensed:
        lacks.append("no licence was found, so the card has none; write it there")
    text = card(
        manifest,
        config,
        owner=job.repository.partition("/")[0],
        base_model=base_model,
        license_tags=licensed,
        validation=validation,
    )
    return text.encode(), lacks


def _base_model(job: PushJob, manifest: Mapping[str, Any]) -> str | None:
    """The name of the source on the hub; None where nothing says it."""
    if job.base_model is not None:
        return job.base_model
    name = str(manifest["source"]["name"])
    return name if REPOSITORY.fullmatch(name) else None


def _license_of(api: HfApi, job: PushJob, manifest: Mapping[str, Any]) -> dict[str, str]:
    """The licence that the source's card on the hub names; empty where none can be read."""
    base_model = _base_model(job, manifest)
    if base_model is None:
        return {}
    try:
        data = _asked(job, lambda: api.model_info(base_model).card_data)
    except InputError:  # somebody else's model, or no longer there: a LICENSE may say it
        return {}
    found = {} if data is None else {key: data.get(key) for key in _LICENSE_KEYS}
    return {key: value for key, value in found.items() if isinstance(value, str)}


def _license_beside(artifact: Path) -> dict[str, str]:
    """The licence whose text lies in the artifact; empty without one."""
    texts = sorted(path for path in artifact.glob("LICEN[CS]E*") if path.is_file())
    if not texts:
        return {}
    name = license_named_in(texts[0].read_text(encoding="utf-8", errors="replace"))
    return (
        {"license": "other", "license_link": texts[0].name} if name is None else {"license": name}
    )


def _repository(api: HfApi, job: PushJob, progress: Progress) -> tuple[set[str], bool]:
    """The files of the repository at the revision, and whether it is public.

    It is created where it does not exist, and so is the revision.

    Raises:
        UsageError: it is public, and nobody said that it may be.
        InputError: the hub refuses.
    """

    def found() -> Any:
        try:
            return api.model_info(job.repository)
        except RepositoryNotFoundError as error:
            # 401 is also what a token of nobody gets
            if "Invalid" in (error.server_message or ""):
                raise
            return None

    info = _asked(job, found)
    if info is None:
        _asked(job, lambda: api.create_repo(job.repository, private=not job.public))
        progress.say(
            f"push {job.repository}: created, "
            f"{'public' if job.public else 'private: --public or its settings open it'}"
        )
        public, present = job.public, set()
    else:
        public = not info.private
        if public and not job.public:
            raise UsageError(
                f"push {job.repository}: exists, and everybody can see it",
                "give --public, or another name",
            )
        if job.public and not public:
            progress.say(f"push {job.repository}: exists and is private; its settings open it")
        present = {item.rfilename for item in info.siblings or ()}
    if job.revision not in (None, constants.DEFAULT_REVISION):
        revision = str(job.revision)

        def listed() -> set[str] | None:
            try:
                return set(api.list_repo_files(job.repository, revision=revision))
            except RevisionNotFoundError:
                return None

        there = _asked(job, listed)
        if there is None:
            _asked(job, lambda: api.create_branch(job.repository, branch=revision))
        else:
            present = there
    return present, public


def _upload(
    api: HfApi,
    job: PushJob,
    manifest: Mapping[str, Any],
    sizes: Mapping[str, int],
    content: bytes | None,
    foreign: list[str],
    progress: Progress,
) -> str:
    """Send what the hub lacks, and commit; return the commit.

    Raises:
        InputError: the hub refuses, or cannot be reached any more.
    """
    files: dict[str, str | bytes] = {name: str(job.artifact / name) for name in sizes}
    if content is not None:
        files[README] = content
    additions = [
        CommitOperationAdd(path_in_repo=name, path_or_fileobj=file) for name, file in files.items()
    ]

    def send(addition: CommitOperationAdd) -> Callable[[], None]:
        return lambda: api.preupload_lfs_files(
            job.repository, [addition], revision=job.revision, free_memory=False
        )

    with _quiet():
        for addition in progress.steps(
            additions,
            stage=f"push {job.repository}",
            unit="file",
            nbytes=lambda one: int(one.upload_info.size),
        ):
            _asked(job, send(addition))
        recipe = manifest["recipe"]
        commit = _asked(
            job,
            lambda: api.create_commit(
                job.repository,
                [*additions, *(CommitOperationDelete(path_in_repo=name) for name in foreign)],
                commit_message=f"{recipe['name']}: {recipe['scheme']} by quantflow {__version__}",
                revision=job.revision,
            ),
        )
    return str(commit.oid)


def _asked(job: PushJob, ask: Callable[[], Result]) -> Result:
    """The hub's answer.

    Raises:
        InputError: it refuses, or cannot be reached.
    """

    def answer() -> Result:
        try:
            return ask()
        except HfHubHTTPError as error:
            if (refusal := _refusal(job, error)) is not None:
                raise refusal from error
            raise
        except ValueError as error:  # the card's metadata, or an upload that the hub does not take
            said = f"push {job.repository}: {first_line(error)}"
            raise InputError(said, "mend it, and run it again") from error
        except Exception as error:
            # an upload's, around what the hub answered, and those of the library that sends it
            if not (isinstance(error, RuntimeError) or type(error).__name__.startswith("Xet")):
                raise
            cause = error.__cause__ or error
            refusal = _refusal(job, cause) if isinstance(cause, HfHubHTTPError) else None
            if refusal is not None:
                raise refusal from error
            raise hub.Unreachable(f"the upload failed ({first_line(cause)})") from error

    try:
        return hub.asked(job.repository, job.revision, answer)
    except hub.Unreachable as error:
        raise InputError(f"push {job.repository}: {error}", _AGAIN) from error


def _refusal(job: PushJob, error: HfHubHTTPError) -> InputError | None:
    """Our error for an answer that concerns who asks; None for any other."""
    status = getattr(error.response, "status_code", None)
    if status == 401:
        return InputError(f"push {job.repository}: the hub does not take this token", _LOGIN)
    if status == 403:
        return InputError(
            f"push {job.repository}: this token may not write there",
            "give it write access to the organization, or push to a name of yours",
        )
    said = f" ({error.server_message})" if error.server_message else ""
    if status in (400, 409, 413, 422):
        return InputError(f"push {job.repository}: the hub answers {status}{said}", _AGAIN)
    return None


@contextmanager
def _quiet() -> Iterator[None]:
    """Without huggingface_hub's bars: `Progress` shows how far it is."""
    if are_progress_bars_disabled():
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()


def _address(job: PushJob) -> str:
    at = "" if job.revision in (None, constants.DEFAULT_REVISION) else f"/tree/{job.revision}"
    return f"{constants.ENDPOINT}/{job.repository}{at}"
