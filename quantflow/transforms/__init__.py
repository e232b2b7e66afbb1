"""Changes that keep a model's function and ease its quantization, by their names in recipes.

One file each; these two tables are the only registry. TRANSFORMS change a layer by itself, from
statistics of its inputs; ROTATIONS change the whole model, before anything is observed.
"""

from collections.abc import Mapping
from typing import Any, Protocol

from quantflow.core.parallel import SEQUENTIAL, Workers
from quantflow.core.support import Supports
from quantflow.numerics.smoothing import Fold, Outcome
from quantflow.transforms import awq, hadamard, smoothquant


class Transform(Protocol):
    """Names that the module of a smoothing transform exports."""

    NAME: str
    """Its name in recipes."""

    SUPPORTS: Supports
    """Schemes and settings that it can be combined with."""

    CHANGES_VALUES: str
    """The option by which it changes a KV cache's values, so that measured scales do not fit."""

    VERSION: int
    """Number of the changes that give other results for the same inputs; part of the resume key."""

    OPTIONS: Mapping[str, Any]
    """Options of a recipe and their defaults.

    `linears`: whether linears absorb factors too, where a fold has no norm.
    """

    def checked(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """The options, checked."""
        ...

    def needs(self, options: Mapping[str, Any]) -> tuple[str, ...]:
        """The names of the statistics of a fold's input that `solve` reads."""
        ...

    def working_bytes(
        self, features: int, rows: int, *, options: Mapping[str, Any], samples: int, workers: int
    ) -> int:
        """The most memory that `solve` takes beyond weights and statistics, in bytes."""
        ...

    def solve(
        self, fold: Fold, *, options: Mapping[str, Any], workers: Workers = SEQUENTIAL
    ) -> Outcome:
        """Choose the factors of one fold."""
        ...


class HadamardTransform(Protocol):
    """Names that the module of a Hadamard rotation of the model exports."""

    NAME: str
    """Its name in recipes."""

    SUPPORTS: Supports
    """Schemes and settings that it can be combined with."""

    CHANGES_VALUES: str
    """The option by which it changes a KV cache's values, so that measured scales do not fit."""

    VERSION: int
    """Number of the changes that give other results for the same inputs; part of the resume key."""

    OPTIONS: Mapping[str, Any]
    """Options of a recipe and their defaults."""

    def checked(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """The options, checked."""
        ...

    def needs(self, options: Mapping[str, Any]) -> tuple[str, ...]:
        """The names of the statistics that it reads."""
        ...

    MIXES_INPUTS: str
    """The option by which it mixes inputs of linears while the model runs."""

    def block_of(self, features: int) -> int:
        """The number of inputs of a linear that it mixes together then."""
        ...

    def solve(
        self, *, hidden: int, head_dim: int, options: Mapping[str, Any]
    ) -> hadamard.Rotations:
        """The rotations of a model."""
        ...


_SMOOTHING: tuple[Transform, ...] = (smoothquant, awq)
_HADAMARD: tuple[HadamardTransform, ...] = (hadamard,)
TRANSFORMS: dict[str, Transform] = {transform.NAME: transform for transform in _SMOOTHING}
ROTATIONS: dict[str, HadamardTransform] = {transform.NAME: transform for transform in _HADAMARD}
