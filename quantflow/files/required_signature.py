"""Whose signature an artifact has to have before a verb runs it: the same options for generate, bench, chat and serve."""

from dataclasses import dataclass
from pathlib import Path

from quantflow.files import signing
from quantflow.settings import setting

VERBS = ("generate", "bench", "chat", "serve")


@dataclass(frozen=True, kw_only=True)
class RequiredSignature:
    """Whom an artifact has to be signed by; nobody by default.

    Attributes:
        key: a public key, PEM.
        certificates: roots, PEM; the signer's certificate leads to one of them and is valid today.
        identity, issuer: of Sigstore, over the network.
    """

    key: Path | None = setting(
        None,
        flag="--require-signature",
        metavar="PEM",
        verbs=VERBS,
        parse=Path,
        help="A public key: the artifact has to be signed with its private one.",
    )
    certificates: tuple[str, ...] = setting(
        (),
        flag="--require-certificate",
        metavar="PEM",
        verbs=VERBS,
        help="A root that the signer's certificate leads to.",
    )
    identity: str | None = setting(
        None,
        flag="--require-identity",
        metavar="WHO",
        verbs=VERBS,
        help="Who signed it, of Sigstore; with --require-issuer.",
    )
    issuer: str | None = setting(
        None,
        flag="--require-issuer",
        metavar="URL",
        verbs=VERBS,
        help="The service that knows them.",
    )

    def __bool__(self) -> bool:
        """Whether anybody is asked for."""
        return any((self.key, self.certificates, self.identity, self.issuer))

    def __post_init__(self) -> None:
        """Refuse several, and an identity without its issuer.

        Raises:
            UsageError: naming them.
        """
        if self:
            self._trusted()

    def check(self, folder: Path) -> None:
        """Do nothing where the artifact has the signature, or none is asked for.

        Raises:
            InputError: there is no signature, or a key cannot be read.
            IntegrityError: it is another's, or the artifact was changed.
        """
        if self:
            signing.require_signature(folder, self._trusted())

    def _trusted(self) -> signing.Trusted:
        roots = tuple(map(Path, self.certificates))
        return signing.Trusted(
            key=self.key, roots=roots, identity=self.identity, issuer=self.issuer
        )
