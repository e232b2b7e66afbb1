"""LoRA adapters beside the lean decoder's products, another one for each sequence of a step.

The rows of a step that have an adapter are gathered, multiplied by its two factors, and added to
what the product gave them. Both multiplications are decode.c's, whose rows do not depend on each
other, so a row has the same bits whatever else runs. In the families that the lean decoder runs,
these linears have the same names in a checkpoint and in transformers' modules.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from quantflow.errors import InputError, UnsupportedError
from quantflow.runtime.adapters import Factors, read_adapter, weights_file
from quantflow.runtime.artifact import Artifact
from quantflow.runtime.operations import Projection, product


class RowAdapters:
    """Adapters by name, and which of them the rows of the next step have.

    Attributes:
        names: names of the adapters.
    """

    def __init__(self, artifact: Artifact, folders: Mapping[str, str | Path]) -> None:
        """Read them.

        Args:
            artifact: artifact of the model.
            folders: folder of each adapter, as PEFT writes it.

        Raises:
            InputError: files that are missing or damaged, tensors that belong to no linear of the
                model or do not fit it.
            UnsupportedError: another kind of adapter than plain LoRA on linears.
        """
        self.names = tuple(folders)
        # source name of a linear -> adapter -> its product
        self._factors: dict[str, dict[str, Factors]] = {}
        # source name -> where an adapter has it, until it stands beside a product
        self._places: dict[str, str] = {}
        self._rows: list[tuple[str, Tensor]] = []  # adapter and its rows in the next step
        for adapter, folder in folders.items():
            path = weights_file(folder)
            for name, factors in read_adapter(folder).items():
                if (
                    name not in artifact.linears
                    and f"{name}.weight" not in artifact.checkpoint.infos
                ):
                    raise InputError(
                        f"{path}: {name} is no linear of the model", "give an adapter of this model"
                    )
                outputs, inputs = shape_of(artifact, name)
                factors.require_fit(name, inputs=inputs, outputs=outputs, path=path)
                self._factors.setdefault(name, {})[adapter] = factors
                self._places.setdefault(name, f"{path}: {name}")

    def beside(
        self, base: Projection, artifact: Artifact, linears: Sequence[str], *, order: Tensor | None
    ) -> Projection:
        """A product with the adapters of its linears beside it.

        Args:
            base: product of the linears, side by side.
            artifact: artifact of the model.
            linears: source names of the linears.
            order: int64 [O], output that comes at each place; None leaves them as they are.
        """
        sides: dict[str, list[tuple[slice, Factors]]] = {}
        end = 0
        for name in linears:
            begin, end = end, end + shape_of(artifact, name)[0]
            self._places.pop(name, None)
            for adapter, factors in self._factors.get(name, {}).items():
                own = None if order is None else order[begin:end] - begin  # parts keep their places
                ordered = factors if own is None else replace(factors, up=factors.up[own])
                sides.setdefault(adapter, []).append((slice(begin, end), ordered))

        def adapted(x: Tensor) -> Tensor:
            out = base(x)
            for adapter, rows in self._rows:
                for at, factors in sides.get(adapter, ()):
                    out[:, at].index_add_(
                        0, rows, product(product(x[rows], factors.down, None), factors.up, None)
                    )
            return out

        return adapted if sides else base

    def require_used(self) -> None:
        """Refuse an adapter of a linear that is no part of a product.

        Raises:
            UnsupportedError: naming the first linear.
        """
        for place in self._places.values():
            cause = f"{place}: only linears of attention and of an MLP have adapters by request"
            raise UnsupportedError(
                cause, "train the adapter without it, or merge it into the model"
            )

    def choose(self, first: Tensor, adapters: Sequence[str | None]) -> bool:
        """Expect a step; whether any of its rows has an adapter.

        Args:
            first: [B + 1] int64, begin of each sequence's rows, and their number.
            adapters: adapter of each sequence; empty where no sequence has one.
        """
        rows: dict[str, list[Tensor]] = {}
        edges = first.tolist()
        for adapter, begin, end in zip(adapters, edges, edges[1:], strict=False):
            if adapter is not None:
                rows.setdefault(adapter, []).append(torch.arange(begin, end))
        self._rows = [(adapter, torch.cat(parts)) for adapter, parts in rows.items()]
        return bool(rows)


def shape_of(artifact: Artifact, name: str) -> tuple[int, int]:
    """The shape (out_features, in_features) of a linear by its source name."""
    if name in artifact.linears:
        return artifact.linears[name].shape
    rows, columns = artifact.checkpoint.infos[f"{name}.weight"].shape
    return rows, columns
