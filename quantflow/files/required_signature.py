"""The signature that an artifact needs before generate, bench, chat or serve runs it."""

import functools
from dataclasses import dataclass
from pathlib import Path

from quantflow.files import signing
from quantflow.settings import setting

VERBS = ("generate", "bench", "chat", "serve")
_for_verbs = functools.partial(setting, verbs=VERBS)


@dataclass(frozen=True, kw_only=True)
class RequiredSignature:
    """The signer that an artifact needs; with no setting it needs none.

    `certificates` are roots: the signer's certificate leads to one of them and is valid today.
    Sigstore looks `identity` and `issuer` up over the network.
    """

    key: Path | None = _for_verbs(
        None,
        "--require-signature",
        metavar="PEM",
        parse=Path,
        help="Public key: the artifact has to be signed with its private one.",
    )
    certificates: tuple[str, ...] = _for_verbs(
        (),
        "--require-certificate",
        metavar="PEM",
        help="Root that the signer's certificate leads to.",
    )
    identity: str | None = _for_verbs(
        None,
        "--require-identity",
        metavar="WHO",
        help="Sigstore identity of the signer; with --require-issuer.",
    )
    issuer: str | None = _for_verbs(
        None, "--require-issuer", metavar="URL", help="Sigstore service that knows the signer."
    )

    def __bool__(self) -> bool:
        """Whether a signature is needed."""
        return any((self.key, self.certificates, self.identity, self.issuer))

    def __post_init__(self) -> None:
        """Refuse several signers, and an identity without its issuer.

        Raises:
            UsageError: the settings contradict each other; the message names them.
        """
        if self:
            self._trusted()

    def check(self, folder: Path) -> None:
        """Refuse an artifact without the signature; do nothing where none is needed.

        It is for what follows to say so early: what runs has to be opened by `trusted`.

        Raises:
            InputError: there is no signature, or a key cannot be read.
            IntegrityError: the signature is another's, or the artifact was changed.
        """
        if self:
            signing.require_signature(folder, self._trusted())

    @property
    def trusted(self) -> signing.Trusted | None:
        """The signer that is needed; None where none is. `load` takes it."""
        return self._trusted() if self else None

    def _trusted(self) -> signing.Trusted:
        roots = tuple(map(Path, self.certificates))
        return signing.Trusted(
            key=self.key, roots=roots, identity=self.identity, issuer=self.issuer
        )
