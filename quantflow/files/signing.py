"""Signatures of artifacts, with the OpenSSF's model-signing.

    ARTIFACT.sig            a Sigstore bundle over the sha256 of every file of the artifact, and so
                            over the digest too
    ARTIFACT.intoto.json    what it was made from (provenance.py)
    ARTIFACT.cdx.json       the same as a bill of materials

`verify` shows that an artifact is whole, a signature shows who made it. The three files stand
beside the artifact, which stays as it is. The two texts follow from the manifest, which the
signature covers, so a change of one is detected without a signature of its own. Keys and
certificates need no network; a Sigstore identity does.
"""

import base64
import json
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path, PurePosixPath
from typing import Any

from quantflow.errors import (
    InputError,
    IntegrityError,
    QuantflowError,
    UnsupportedError,
    UsageError,
    extra,
)
from quantflow.files import disk
from quantflow.files.canonical import json_bytes, parse_json, readable_json
from quantflow.files.manifest import MANIFEST_NAME, UNHASHED, read_manifest
from quantflow.files.outputs import beside
from quantflow.files.provenance import BOM_SUFFIX, STATEMENT_SUFFIX, bill_of_materials, statement
from quantflow.files.sealed import SealedFolder, seal
from quantflow.files.verify import verify

SIGNATURE_SUFFIX = ".sig"
_UNSIGNED = tuple(sorted(UNHASHED - {MANIFEST_NAME}))  # files that a hub adds
_AGAIN = "get artifact and signature again from whom you trust, or sign it again"


@dataclass(frozen=True, kw_only=True)
class Signer:
    """The means of signing: `key`, `key` with `certificate`, or neither for a Sigstore identity.

    Attributes:
        key: private elliptic-curve key, PEM.
        password: password of the key.
        certificate: certificate of the key, PEM.
        chain: certificates between it and the root, PEM.
    """

    key: Path | None = None
    password: str | None = None
    certificate: Path | None = None
    chain: tuple[Path, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Trusted:
    """The signer that an artifact needs; exactly one of `key`, `roots` and `identity`.

    Attributes:
        key: public elliptic-curve key, PEM.
        roots: trusted certificates, PEM; the signer's leads to one of them and is valid today.
        identity, issuer: Sigstore's signer, and the service that knows the signer.
    """

    key: Path | None = None
    roots: tuple[Path, ...] = ()
    identity: str | None = None
    issuer: str | None = None

    def __post_init__(self) -> None:
        """Refuse no signer, and several.

        Raises:
            UsageError: there is none, or several; the message names them.
        """
        flags = [
            name
            for name, value in (
                ("key", self.key),
                ("certificate", self.roots),
                ("identity", self.identity),
            )
            if value
        ]
        if len(flags) != 1 or bool(self.identity) != bool(self.issuer):
            listed = " and ".join(flags) or "nothing"
            raise UsageError(
                f"signature: {listed} to compare with",
                "give a key, or certificates, or an identity with its issuer",
            )

    @classmethod
    def of(cls, signer: "str | Path | Trusted") -> "Trusted":
        """The signer of this public key, or itself."""
        return signer if isinstance(signer, Trusted) else cls(key=Path(signer))


def sign(folder: Path, signer: Signer) -> dict[str, str]:
    """Verify an artifact and write the three files beside it; return their paths.

    What is signed are the hashes that were verified: the files are read once.

    Raises:
        IntegrityError: the artifact is not the one that was exported.
        InputError: a key or a certificate cannot be used.
        UnsupportedError: model-signing is not installed.
    """
    library = _library()
    sealed = seal(folder)
    manifest = sealed.manifest
    with sealed.named():
        verify(sealed.place, manifest=manifest, hashes=sealed.digests)
    config = library.signing.Config().set_hashing_config(_hashed(library, sealed, _UNSIGNED))
    for path in (signer.key, signer.certificate, *signer.chain):
        if path is not None and not path.is_file():
            raise InputError(f"{path}: no such file", "give a PEM file")
    places = {
        suffix: beside(folder, suffix)
        for suffix in (SIGNATURE_SUFFIX, STATEMENT_SUFFIX, BOM_SUFFIX)
    }
    temporary = disk.temporary_for(places[SIGNATURE_SUFFIX])
    with _refusing(
        InputError,
        f"{signer.key or 'sigstore'}",
        "give an elliptic-curve key that fits its certificate, PEM",
    ):
        if signer.certificate is not None:
            config.use_certificate_signer(
                private_key=signer.key,
                signing_certificate=signer.certificate,
                certificate_chain=signer.chain,
            )
        elif signer.key is not None:
            config.use_elliptic_key_signer(private_key=signer.key, password=signer.password)
        else:
            config.use_sigstore_signer(use_ambient_credentials=True)
        disk.remove(temporary)
        config.sign(folder, temporary)
    disk.sync(temporary)
    disk.write_atomic(places[STATEMENT_SUFFIX], readable_json(statement(manifest)))
    disk.write_atomic(places[BOM_SUFFIX], readable_json(bill_of_materials(manifest)))
    disk.replace(temporary, places[SIGNATURE_SUFFIX])
    return {
        "signature": str(places[SIGNATURE_SUFFIX]),
        "provenance": str(places[STATEMENT_SUFFIX]),
        "bom": str(places[BOM_SUFFIX]),
    }


def require_signature(
    folder: Path, trusted: Trusted, *, signature: Path | None = None
) -> dict[str, Any]:
    """Check that the trusted signer signed an artifact as it is now; every file of it is hashed.

    Args:
        folder: folder of the artifact.
        trusted: trusted signer.
        signature: path of the bundle; None is `<artifact>.sig`.

    Returns:
        The paths of the compared files, and the artifact's digest.

    Raises:
        InputError: there is no signature, or a key or certificate cannot be read.
        IntegrityError: the key or identity is another, a certificate expired, or a file changed;
            the message says which.
        UnsupportedError: model-signing is not installed.
    """
    return _compare(folder, trusted, signature=signature, sealed=None)


def open_signed(folder: Path, trusted: Trusted) -> SealedFolder:
    """An artifact that the trusted signer signed, opened so that these bytes alone are read.

    Each file is read and hashed once, and the hashes are compared with the signature and with the
    manifest. What is read of the result later are the bytes that were hashed, or an IntegrityError.

    Raises:
        QuantflowError: see `require_signature`, `quantflow.files.sealed.seal` and `verify`.
    """
    _bundle(folder, None)  # before anything is hashed
    _library()
    sealed = seal(folder)
    _compare(folder, trusted, signature=None, sealed=sealed)
    with sealed.named():
        verify(sealed.place, manifest=sealed.manifest, hashes=sealed.digests)
    return sealed


def _bundle(folder: Path, signature: Path | None) -> tuple[Path, bytes]:
    """The path of a signature, and its content.

    Raises:
        InputError: there is none, or it is no JSON.
    """
    path = beside(folder, SIGNATURE_SUFFIX) if signature is None else signature
    if not path.is_file():
        raise InputError(
            f"{folder}: no signature {path}",
            "run `quantflow sign`, or get the signature from whom made the artifact",
        )
    return path, json_bytes(path)


def _compare(
    folder: Path, trusted: Trusted, *, signature: Path | None, sealed: SealedFolder | None
) -> dict[str, Any]:
    """What `require_signature` does; the hashes are those of `sealed` where it is given."""
    path, content = _bundle(folder, signature)
    bundle = parse_json(content, str(path))
    library = _library()
    unsigned = set(_UNSIGNED) - _names_in(bundle)
    hashing = _hashing(library, unsigned) if sealed is None else _hashed(library, sealed, unsigned)
    check = library.verifying.Config().set_hashing_config(hashing)
    for file in (trusted.key, *trusted.roots):
        if file is not None and not file.is_file():
            raise InputError(f"{file}: no such file", "give a PEM file")
    with _refusing(
        InputError,
        f"{trusted.key or trusted.identity or trusted.roots[0]}",
        "give a public key or certificates, PEM",
    ):
        if trusted.key is not None:
            check.use_elliptic_key_verifier(public_key=trusted.key)
        elif trusted.roots:
            check.use_certificate_verifier(certificate_chain=trusted.roots)
        else:
            check.use_sigstore_verifier(identity=trusted.identity, oidc_issuer=trusted.issuer)
    if trusted.roots:
        _require_today(bundle, path)
    with (
        tempfile.NamedTemporaryFile(suffix=SIGNATURE_SUFFIX) as copy,  # the bundle that was read
        _refusing(
            IntegrityError,
            f"{path}: not a signature of {folder} by {trusted.key or trusted.identity or 'them'}",
            _AGAIN,
        ),
    ):
        copy.write(content)
        copy.flush()
        check.verify(folder, Path(copy.name))
    manifest = read_manifest(folder) if sealed is None else sealed.manifest
    texts = {STATEMENT_SUFFIX: statement, BOM_SUFFIX: bill_of_materials}
    compared = [str(path)]
    for suffix, text in texts.items():
        place = beside(folder, suffix)
        if place.is_file():
            if place.read_bytes() != readable_json(text(manifest)):
                raise IntegrityError(f"{place}: is not what the signed manifest says", _AGAIN)
            compared.append(str(place))
    return {"signature": compared, "digest": manifest["digest"]}


def _names_in(bundle: Any) -> set[str]:
    """The names of files that a signature says to be over; empty where it says none.

    Whether it is one is not known yet.
    """
    try:
        statement = json.loads(base64.b64decode(bundle["dsseEnvelope"]["payload"]))
        return {str(one["name"]) for one in statement["predicate"]["resources"]}
    except (KeyError, TypeError, ValueError, RecursionError):
        return set()


def _hashing(library: Any, unsigned: Iterable[str]) -> Any:
    """A hashing configuration for every file but these; names are relative to the artifact."""
    ignored = [Path(name) for name in (*unsigned, ".git", ".cache")]
    return library.hashing.Config().set_ignored_paths(paths=ignored, ignore_git_paths=False)


def _hashed(library: Any, sealed: SealedFolder, unsigned: Iterable[str]) -> Any:
    """A hashing configuration of model-signing whose hashes are known: nothing is read for them."""
    from model_signing import manifest
    from model_signing._hashing.hashing import Digest

    class Hashed(library.hashing.Config):  # type: ignore[misc]
        """The hashes of a sealed folder, under the name and the method of its signature."""

        def hash(self, model_path: Path, *, files_to_hash: Any = None) -> Any:
            """The manifest of every file that counts."""
            del files_to_hash
            ignored = [model_path / path for path in self._ignored_paths]
            items = [
                manifest.FileManifestItem(
                    path=PurePosixPath(name), digest=Digest("sha256", bytes.fromhex(digest))
                )
                for name, digest in sealed.digests.items()
                if name not in unsigned
                and not {model_path / name, *(model_path / name).parents} & set(ignored)
            ]
            method = {"method": "files", "hash_type": "sha256", "allow_symlinks": False}
            left_out = [*sorted(unsigned), ".git", ".cache"]
            return manifest.Manifest(
                model_path.resolve().name,
                items,
                manifest.SerializationType.from_args({**method, "ignore_paths": left_out}),
            )

    return Hashed()


def _require_today(bundle: Any, path: Path) -> None:
    """Refuse certificates that are not valid today.

    model-signing checks them for the day on which they began to be valid.

    Raises:
        IntegrityError: a certificate is not valid; the message names the day.
    """
    from cryptography import x509

    try:
        chain = bundle["verificationMaterial"]["x509CertificateChain"]["certificates"]
        certificates = [
            x509.load_der_x509_certificate(base64.b64decode(one["rawBytes"])) for one in chain
        ]
    except (KeyError, TypeError, ValueError) as error:
        raise IntegrityError(f"{path}: holds no certificate", _AGAIN) from error
    now = datetime.now(UTC)
    for one in certificates:
        if now > one.not_valid_after_utc:
            raise IntegrityError(
                f"{path}: its certificate expired on {one.not_valid_after_utc:%Y-%m-%d}", _AGAIN
            )
        if now < one.not_valid_before_utc:
            raise IntegrityError(
                f"{path}: its certificate is valid from {one.not_valid_before_utc:%Y-%m-%d} on",
                _AGAIN,
            )


@contextmanager
def _refusing(kind: type[QuantflowError], cause: str, remedy: str) -> Iterator[None]:
    """Turn any error of a cryptography library, which has no common class, into one of ours."""
    try:
        yield
    except QuantflowError:
        raise
    except Exception as error:
        said = " ".join(str(error).split()) or type(error).__name__
        raise kind(f"{cause} ({said[:200]})", remedy) from error


def _library() -> Any:
    """The library model-signing, which is an extra.

    Raises:
        UnsupportedError: it is not installed.
    """
    try:
        import model_signing
    except ImportError as error:
        raise UnsupportedError(f"signatures need model-signing ({error})", extra("sign")) from error
    return model_signing
