"""The verb `sign`: an artifact's signature and origin. It imports no torch.

Reads    the artifact, which is verified first; a key, or certificates
Writes   ARTIFACT.sig, ARTIFACT.intoto.json and ARTIFACT.cdx.json beside it
Resumes  nothing
Fails    2 options that do not go together, 3 an unusable key, 6 model-signing is not installed,
         7 the artifact is damaged
"""

from pathlib import Path
from typing import Any

import click

from quantflow.errors import UsageError
from quantflow.files.signing import Signer, sign
from quantflow.stages.cli.options import offline
from quantflow.stages.cli.output import outline, show


@click.command("sign")
@click.argument("artifact")
@click.option(
    "--key", metavar="PEM", type=click.Path(path_type=Path), help="Private elliptic-curve key."
)
@click.option(
    "--certificate", metavar="PEM", type=click.Path(path_type=Path), help="Certificate of the key."
)
@click.option(
    "--chain",
    metavar="PEM",
    multiple=True,
    type=click.Path(path_type=Path),
    help="Certificates between --certificate and the root.",
)
@click.option(
    "--sigstore",
    is_flag=True,
    help="Sign with this machine's identity at Sigstore, over the network.",
)
@click.option(
    "--password-file", metavar="FILE", type=click.Path(path_type=Path), help="Password of the key."
)
@offline
def command(
    artifact: str,
    key: Path | None,
    certificate: Path | None,
    chain: tuple[Path, ...],
    sigstore: bool,
    password_file: Path | None,
    as_json: bool,
    **_shared: Any,
) -> None:
    """Sign ARTIFACT and its origin; `verify --key` says whether it is still the same.

    \b
    Example: quantflow sign work/4-export --key key.pem
             quantflow verify work/4-export --key key.pub

    \b
    A pair of keys: openssl ecparam -name prime256v1 -genkey -noout -out key.pem
                    openssl ec -in key.pem -pubout -out key.pub
    """
    if (
        sigstore == (key is not None)
        or (certificate is not None and key is None)
        or (chain and certificate is None)
    ):
        raise UsageError(
            "sign: give --key, --key with --certificate, or --sigstore",
            "see `quantflow sign --help`",
        )
    password = (
        None if password_file is None else password_file.read_text(encoding="utf-8").rstrip("\n")
    )
    made = sign(
        Path(artifact), Signer(key=key, password=password, certificate=certificate, chain=chain)
    )
    show(made, as_json=as_json, text=outline(made))
