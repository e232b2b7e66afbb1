"""The verb `verify`: every byte of an artifact against its manifest. It imports no torch.

With a key, certificates or an identity the signature is checked as well, and names who is meant
where it is another's.
"""

from pathlib import Path
from typing import Any

import click

from quantflow.files.signing import Trusted, require_signature
from quantflow.files.verify import verify
from quantflow.stages.cli.options import offline
from quantflow.stages.cli.output import outline, show


@click.command("verify")
@click.argument("artifact")
@click.option(
    "--key",
    metavar="PEM",
    type=click.Path(path_type=Path),
    help="Public key; the artifact must have its signature.",
)
@click.option(
    "--certificate",
    metavar="PEM",
    multiple=True,
    type=click.Path(path_type=Path),
    help="Root certificate that the signature leads to; may be given several times.",
)
@click.option(
    "--identity",
    metavar="WHO",
    help="Signer's identity at Sigstore, with --issuer; over the network.",
)
@click.option("--issuer", metavar="URL", help="Service that vouches for --identity.")
@click.option(
    "--signature",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="File of the signature (default: <artifact>.sig).",
)
@offline
def command(
    artifact: str,
    key: Path | None,
    certificate: tuple[Path, ...],
    identity: str | None,
    issuer: str | None,
    signature: Path | None,
    as_json: bool,
    **_shared: Any,
) -> None:
    """Check every byte of ARTIFACT against its manifest; exit 7 names a file that differs.

    \b
    Example: quantflow verify work/4-export
             quantflow verify work/4-export --key their-key.pub
    """
    signed = None
    if key or certificate or identity or issuer or signature:
        trusted = Trusted(key=key, roots=certificate, identity=identity, issuer=issuer)
        signed = require_signature(Path(artifact), trusted, signature=signature)
    report = verify(Path(artifact)) | ({} if signed is None else {"signature": signed["signature"]})
    show(report, as_json=as_json, text=f"intact: {outline(report)}")
