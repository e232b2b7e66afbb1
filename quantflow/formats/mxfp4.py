"""MXFP4 as OpenAI's gpt-oss is published: experts of a layer in a tensor of blocks and one of scales. It is described, not run.

| tensor      | dtype, shape                 | content                                                  |
|-------------|------------------------------|----------------------------------------------------------|
| NAME_blocks | uint8 [..., O, I / 32, 16]   | e2m1 codes of 32 inputs, two a byte, the lower one first |
| NAME_scales | uint8 [..., O, I / 32]       | the exponent of each 32, plus 127; 255 is NaN            |

Source: transformers 5.23, `integrations/mxfp4.py`; OCP Microscaling Formats 1.0, section 5.4.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from quantflow.artifact.safetensors_header import TensorInfo
from quantflow.errors import InputError

METHOD = "mxfp4"
GROUP = 32
BLOCKS, SCALES = "_blocks", "_scales"
_AGAIN = "download the folder again"


def stacks(infos: Mapping[str, TensorInfo]) -> dict[str, tuple[int, ...]]:
    """Return NAME -> the shape of the weights that it stands for, [..., O, I].

    Args:
        infos: headers of all tensors.

    Raises:
        InputError: blocks without scales, scales without blocks, or another dtype or shape of one of them.
    """
    found = {}
    for key, info in infos.items():
        if key.endswith(SCALES) and f"{key.removesuffix(SCALES)}{BLOCKS}" not in infos:
            raise InputError(f"{key}: scales, and no {key.removesuffix(SCALES)}{BLOCKS}", _AGAIN)
        if not key.endswith(BLOCKS):
            continue
        name = key.removesuffix(BLOCKS)
        scales = infos.get(f"{name}{SCALES}")
        if scales is None:
            raise InputError(f"{name}{SCALES}: missing, {key} is there", _AGAIN)
        for each in (info, scales):
            if each.dtype != "U8":
                raise InputError(f"{each.name}: is {each.dtype}, U8 is needed", _AGAIN)
        if info.shape != (*scales.shape, GROUP // 2) or len(info.shape) < 3:
            cause = f"{key}: is {list(info.shape)}, {scales.name} is {list(scales.shape)}: {GROUP // 2} bytes to a scale"
            raise InputError(cause, _AGAIN)
        found[name] = (*scales.shape[:-1], scales.shape[-1] * GROUP)
    return found


def require_scales(key: str, scales: Tensor) -> None:
    """Refuse exponents that are NaN.  scales: uint8.

    Raises:
        InputError: naming the tensor.
    """
    if bad := int((scales == torch.iinfo(torch.uint8).max).sum()):
        raise InputError(f"{key}: {bad} of {scales.numel()} scales are NaN", _AGAIN)
