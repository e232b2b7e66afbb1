"""Folders of ranks, `rank-003-of-008`: how they are called, and how many there may be."""

from pathlib import Path

from quantflow.errors import UsageError

MOST_RANKS = 1 << 16  # of a world; torch's own numbers of processes end there


def rank_folder(output: Path, rank: int, world: int) -> Path:
    """Return the folder of one rank."""
    return output / f"rank-{rank:03d}-of-{world:03d}"


def refuse_other_world(output: Path, world: int) -> None:
    """Refuse to measure into a folder that holds ranks of another number: unify takes those of one measurement alone.

    Raises:
        UsageError: naming such a folder.
    """
    for path in sorted(output.glob("rank-*-of-*")):
        if path.name.rpartition("-")[2] != f"{world:03d}":
            raise UsageError(
                f"{path}: is not one of {world} ranks", "give another -o, or remove that folder"
            )
