"""Folders of ranks, `rank-003-of-008`: their names and their largest number."""

from pathlib import Path

from quantflow.errors import UsageError

MOST_RANKS = 1 << 16  # largest world size; torch's own numbers of processes end there


def rank_folder(output: Path, rank: int, world: int) -> Path:
    """The folder of one rank."""
    return output / f"rank-{rank:03d}-of-{world:03d}"


def refuse_other_world(output: Path, world: int) -> None:
    """Refuse to measure into a folder that holds ranks of another world size.

    unify takes the ranks of one measurement alone.

    Raises:
        UsageError: there is such a folder; the message names it.
    """
    for path in sorted(output.glob("rank-*-of-*")):
        if path.name.rpartition("-")[2] != f"{world:03d}":
            raise UsageError(
                f"{path}: is not one of {world} ranks", "give another -o, or remove that folder"
            )
