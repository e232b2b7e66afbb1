"""Row-parallel linears in Gaudi's files: the outputs that stand there are not all maxima of one.

Cards add up the products of a linear that is cut along its inputs. The toolkit writes of it

| module                         | output 0                             | output 1           |
|--------------------------------|--------------------------------------|--------------------|
| optimum-habana's               | the card's own summand               | -                  |
| vLLM's                         | element by element the largest       | the sum            |
|                                | summand of all cards, signs counted  |                    |
| vLLM's that adds nothing up:   | the card's own                       | memory that nobody |
| one card, or shared experts    |                                      | wrote, of any value|

So all cards agree on both outputs where a sum was seen. Output 0 has lost every summand below the
largest: it may be smaller than the share of a card in the sum.

Source: neural_compressor.torch.algorithms.fp8_quant, releases 3.4 to 3.10,
`_quant_common/helper_modules.py`.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

ROW_PARALLEL = (
    "o_proj",
    "down_proj",
    "dense",
    "dense_4h_to_h",
    "out_proj",
    "fc_out",
    "fc2",
    "w2",
)  # their products are added up over cards
_SMALLEST = torch.finfo(torch.float32).tiny


def is_row_parallel(node: str) -> bool:
    """Whether a node is a linear that is cut along its inputs.

    Each card has a summand of its output then.
    """
    return node.rpartition(".")[2] in ROW_PARALLEL


def without_garbage(outputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The outputs of a row-parallel linear, 0 in place of a second that is not finite."""
    if len(outputs) != 2 or torch.isfinite(outputs[1]).all():
        return outputs
    return outputs[0], torch.zeros_like(outputs[1])


def is_sum(outputs: Iterable[tuple[Tensor, ...]]) -> bool:
    """Whether the second outputs of all cards are the sum over cards.

    Memory that nobody wrote often holds parts of an address, which are subnormal numbers.

    Args:
        outputs: outputs of the linear on each card.
    """
    seen = {tuple(float(value.max()) for value in each) for each in outputs}
    return len(seen) == 1 and all(len(each) == 2 and each[1] >= _SMALLEST for each in seen)
