"""Token ids against the model that is to read them."""

from collections.abc import Sequence

from torch import Tensor

from quantflow.errors import InputError


def refuse_beyond(tokens: Sequence[Sequence[int] | Tensor], rows: int | None, *, where: str) -> None:
    """Refuse token ids that the model has no row of its embedding for: its tokenizer is another model's, or larger.

    Args:
        tokens: token ids of several texts.
        rows: of the embedding; None is not known.
        where: the texts, for the message.

    Raises:
        InputError: naming the largest id.
    """
    largest = max((int(max(row)) for row in tokens if len(row)), default=0)
    if rows is not None and largest >= rows:
        raise InputError(f"{where}: token id {largest}, the model has {rows}", "give the model its own tokenizer files")
