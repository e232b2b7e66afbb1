"""The text of this example: the running interpreter's own standard library, split by module name.

Every machine with Python has this text, so none of it is stored in the repository. What comes in is
the `.py` files below `sysconfig`'s `stdlib` path; what goes out is two JSON-lines files with a
`text` per line:

    calibration.jsonl   excerpts of modules the model was trained on
    heldout.jsonl       pieces of the modules named in heldout_modules.txt, never trained on,
                        in a shuffled order

Left out: tests, codec tables, generated files and bundled wheels, because they are long and say
little. The text differs a little between Python versions; nothing in the project depends on its
exact bytes.

Example: python examples/tiny-llama/stdlib_text.py --output artifacts/text
"""

import argparse
import json
import random
import sysconfig
from pathlib import Path

HERE = Path(__file__).parent
EXCLUDED_TOP = {
    "site-packages",
    "dist-packages",
    "encodings",
    "pydoc_data",
    "ensurepip",
    "lib2to3",
    "lib-dynload",
}
EXCLUDED_ANYWHERE = {"test", "tests", "idle_test", "__pycache__", "__phello__"}
EXCERPT_CHARACTERS = 4000


def heldout_names() -> list[str]:
    """The top-level module names kept out of training, one per line of heldout_modules.txt."""
    lines = (HERE / "heldout_modules.txt").read_text(encoding="utf-8").splitlines()
    return [line.strip() for line in lines if line.strip() and not line.startswith("#")]


def module_files() -> dict[str, list[Path]]:
    """Return the files of each top-level module, both sorted by name."""
    root = Path(sysconfig.get_paths()["stdlib"])
    modules: dict[str, list[Path]] = {}
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).parts
        if parts[0] in EXCLUDED_TOP or parts[0].startswith(("config-", "_sysconfigdata")):
            continue
        if EXCLUDED_ANYWHERE.intersection(parts):
            continue
        modules.setdefault(parts[0].removesuffix(".py"), []).append(path)
    return modules


def documents(*, heldout: bool) -> list[str]:
    """The text of every file on one side of the split, in order of module and file names."""
    kept_out = set(heldout_names())
    texts = []
    for name, paths in sorted(module_files().items()):
        if (name in kept_out) == heldout:
            texts += [path.read_text(encoding="utf-8", errors="replace") for path in paths]
    return [text for text in texts if len(text) > 200]


def excerpts(count: int, seed: int = 0) -> list[str]:
    """Return `count` pieces of training modules, each starting at the beginning of a line."""
    generator = random.Random(seed)
    texts = documents(heldout=False)
    pieces = []
    for _ in range(count):
        text = generator.choices(texts, weights=[len(t) for t in texts])[0]
        start = generator.randrange(max(1, len(text) - EXCERPT_CHARACTERS))
        start = text.rfind("\n", 0, start) + 1
        pieces.append(text[start : start + EXCERPT_CHARACTERS])
    return pieces


def heldout_pieces(seed: int = 0) -> list[str]:
    """The held-out files cut into pieces at line ends, and shuffled.

    The first few pieces are of many modules.
    """
    pieces = []
    for text in documents(heldout=True):
        lines = text.splitlines(keepends=True)
        piece = ""
        for line in lines:
            piece += line
            if len(piece) >= EXCERPT_CHARACTERS:
                pieces.append(piece)
                piece = ""
    random.Random(seed).shuffle(pieces)
    return pieces


def write_jsonl(path: Path, texts: list[str]) -> None:
    """Write one {"text": ...} object per line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")


def main() -> None:
    """Write calibration.jsonl and heldout.jsonl."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=HERE,
        help="folder of the two files (default: beside this script)",
    )
    parser.add_argument(
        "--samples", type=int, default=128, help="excerpts in calibration.jsonl (default: 128)"
    )
    arguments = parser.parse_args()
    write_jsonl(arguments.output / "calibration.jsonl", excerpts(arguments.samples))
    write_jsonl(arguments.output / "heldout.jsonl", heldout_pieces())
    print(arguments.output)


if __name__ == "__main__":
    main()
