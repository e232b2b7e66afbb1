"""Changes that keep a model's function and make it easier to quantize, by the name used in recipes.

One file each; these two tables are the only registry. What is in TRANSFORMS changes a layer by
itself, knowing what it reads; what is in ROTATIONS changes the whole model, before anything is
observed.
"""

from collections.abc import Mapping
from typing import Any, Protocol

from quantflow.core.parallel import SEQUENTIAL, Workers
from quantflow.core.support import Supports
from quantflow.numerics.smoothing import Fold, Outcome
from quantflow.transforms import awq, hadamard, smoothquant


class Transform(Protocol):
    """What every file of this folder exports that moves factors between what linears read and their weights."""

    NAME: str
    """As recipes name it."""

    SUPPORTS: Supports
    """What it goes with."""

    CHANGES_VALUES: str
    """The option by which it changes values, so that what was measured for a cache's scales is of others."""

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

    def working_bytes(
        self, features: int, rows: int, *, options: Mapping[str, Any], samples: int, workers: int
    ) -> int:
        """Return the most memory that `solve` takes beyond weights and statistics, in bytes."""
        ...

    def solve(
        self, fold: Fold, *, options: Mapping[str, Any], workers: Workers = SEQUENTIAL
    ) -> Outcome:
        """Choose the factors of one fold."""
        ...


class Turn(Protocol):
    """What every file of this folder exports that rotates the model."""

    NAME: str
    """As recipes name it."""

    SUPPORTS: Supports
    """What it goes with."""

    CHANGES_VALUES: str
    """The option by which it changes values, so that what was measured for a cache's scales is of others."""

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

    MIXES_INPUTS: str
    """The option by which it mixes inputs of linears while the model runs."""

    def block_of(self, features: int) -> int:
        """Return how many inputs of a linear it then mixes together."""
        ...

    def solve(
        self, *, hidden: int, head_dim: int, options: Mapping[str, Any]
    ) -> hadamard.Rotations:
        """Return the rotations of a model."""
        ...


_SMOOTHING: tuple[Transform, ...] = (smoothquant, awq)
_TURNS: tuple[Turn, ...] = (hadamard,)
TRANSFORMS: dict[str, Transform] = {transform.NAME: transform for transform in _SMOOTHING}
ROTATIONS: dict[str, Turn] = {turn.NAME: turn for turn in _TURNS}
