"""The verb `verify`: every byte of an artifact against its manifest. It imports no torch.

With a key, certificates or an identity the signature is checked as well, and names who is meant
where it is another's.
"""

from pathlib import Path
from typing import Any

import click

from quantflow.errors import UsageError
from quantflow.files.manifest import read_manifest
from quantflow.files.signing import Trusted, require_signature
from quantflow.files.verify import verify
from quantflow.reporting.progress_line import ProgressLine
from quantflow.sources.models import is_on_hub
from quantflow.stages.cli.environment import bars_wanted
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
@click.option("--revision", metavar="NAME", help="Branch, tag or commit of a name on the hub.")
@offline
def command(
    artifact: str,
    revision: str | None,
    key: Path | None,
    certificate: tuple[Path, ...],
    identity: str | None,
    issuer: str | None,
    signature: Path | None,
    as_json: bool,
    **_shared: Any,
) -> None:
    """Check every byte of ARTIFACT against its manifest; exit 7 names a file that differs.

    Of a name on the hub (org/name) nothing large is downloaded: the hub's own sha256 of large files
    is compared, and headers are read.

    \b
    Example: quantflow verify work/4-export
             quantflow verify org/llama-w4a16
             quantflow verify work/4-export --key their-key.pub
    """
    if is_on_hub(artifact):
        if key or certificate or identity or issuer or signature:
            raise UsageError(
                f"verify: a signature of {artifact}, a name on the hub",
                "download it, and give its folder and the signature",
            )
        _of_the_hub(artifact, revision, as_json=as_json)
        return
    signed = None
    if key or certificate or identity or issuer or signature:
        trusted = Trusted(key=key, roots=certificate, identity=identity, issuer=issuer)
        signed = require_signature(Path(artifact), trusted, signature=signature)
    report = verify(Path(artifact)) | ({} if signed is None else {"signature": signed["signature"]})
    show(report, as_json=as_json, text=f"intact: {outline(report)}")


def _of_the_hub(name: str, revision: str | None, *, as_json: bool) -> None:
    """Verify a repository without its weights."""
    from quantflow.sources.headers import hashed  # here: it needs the hub's library

    progress = ProgressLine(quiet=as_json, bars=bars_wanted())
    with hashed(name, revision=revision, progress=progress) as (folder, hashes):
        report = verify(folder, hashes=hashes)
        recorded = [file for file in hashes if file in read_manifest(folder)["files"]]
        report |= {"repository": name, "revision": folder.name, "by_the_hub": len(recorded)}
    text = f"intact: {outline(report)}"
    if recorded:
        text += (
            f"\n{len(recorded)} files were compared by the sha256 that the hub has of them, and "
            "not read"
        )
    show(report, as_json=as_json, text=text)
