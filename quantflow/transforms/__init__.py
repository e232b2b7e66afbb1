"""Changes that keep a model's function and make it easier to quantize, by the name used in recipes.

One file each; these two tables are the only registry. What is in TRANSFORMS changes a layer by itself, knowing what it
reads; what is in ROTATIONS changes the whole model, before anything is observed.
"""

from collections.abc import Mapping
from typing import Any, Protocol

from quantflow.core.parallel import SEQUENTIAL, Workers
from quantflow.numerics.smoothing import Fold, Outcome
from quantflow.transforms import awq, hadamard, smoothquant


class Transform(Protocol):
    """What every file of this folder exports that moves factors between what linears read and their weights."""

    VERSION: int
    """Counts the changes that give other results for the same inputs; part of the resume key."""

    OPTIONS: Mapping[str, Any]
    """What a recipe may set, and what it is otherwise; `linears`: linears absorb factors too, where a fold has no norm."""

    def checked(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return options after looking at their values."""
        ...

    def needs(self, options: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the names of the statistics of a fold's input that `solve` reads."""
        ...

    def working_bytes(self, features: int, rows: int, *, options: Mapping[str, Any], samples: int, workers: int) -> int:
        """Return the most memory that `solve` takes beyond weights and statistics, in bytes."""
        ...

    def solve(self, fold: Fold, *, options: Mapping[str, Any], workers: Workers = SEQUENTIAL) -> Outcome:
        """Choose the factors of one fold."""
        ...


class Turn(Protocol):
    """What every file of this folder exports that rotates the model."""

    VERSION: int
    """As a `Transform` has it."""

    OPTIONS: Mapping[str, Any]
    """What a recipe may set, and what it is otherwise."""

    def checked(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return options after looking at their values."""
        ...

    def needs(self, options: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the names of the statistics that it reads."""
        ...

    def solve(self, *, hidden: int, head_dim: int, options: Mapping[str, Any]) -> hadamard.Rotations:
        """Return the rotations of a model."""
        ...


TRANSFORMS: dict[str, Transform] = {"smoothquant": smoothquant, "awq": awq}
ROTATIONS: dict[str, Turn] = {"hadamard": hadamard}
