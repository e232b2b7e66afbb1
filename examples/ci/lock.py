"""The packages of quantflow at their tested versions, with the sha256 of each file.

    python examples/ci/lock.py > examples/ci/requirements.txt

pip resolves the dependencies of pyproject.toml under constraints.txt, and says which files it would
install on this machine; nothing is installed. A file that does not come from pip's index over
HTTPS, such as one in a folder of this machine, may be another build and is left out, and so is
torch, whose builds differ from index to index: `--with-torch` takes them all. What was left out is
said. So run it where the workflow runs, with the same Python.
"""

import argparse
import json
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
# torch, and what its builds for CUDA bring
_TORCH = ("torch", "triton", "nvidia-", "cuda-")
_BUILDS = ("setuptools",)  # what pyproject.toml is built with


def resolved() -> list[dict[str, Any]]:
    """The packages that pip would install, as its report lists them."""
    words = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet"]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    words += ["--report", "-", "-c", str(ROOT / "constraints.txt")]
    words += [*project["dependencies"], *_BUILDS]
    said = subprocess.run(words, stdout=subprocess.PIPE, check=True).stdout
    installs: list[dict[str, Any]] = json.loads(said)["install"]
    return installs


def lines(installs: list[dict[str, Any]], *, with_torch: bool) -> Iterator[tuple[str, str]]:
    """(line of the requirements, or empty where there is none; package and file)."""
    for one in sorted(installs, key=lambda one: str(one["metadata"]["name"]).lower()):
        name, version = one["metadata"]["name"], one["metadata"]["version"]
        where = one["download_info"]
        digest = where["archive_info"].get("hashes", {}).get("sha256")
        elsewhere = not where["url"].startswith("https:") or name.lower().startswith(_TORCH)
        taken = digest is not None and (with_torch or not elsewhere)
        yield (
            f"{name}=={version} --hash=sha256:{digest}" if taken else "",
            f"{name} {version}, {where['url'].rpartition('/')[2]}",
        )


def main() -> int:
    """Print the requirements; name what was left out."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--with-torch", action="store_true", help="Every file, torch's too.")
    given = parser.parse_args()
    rows = list(lines(resolved(), with_torch=given.with_torch))
    print("# made by examples/ci/lock.py; torch is installed beside these, without a hash")
    print(*(line for line, _ in rows if line), sep="\n")
    for _, package in (row for row in rows if not row[0]):
        print(f"left out: {package}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
