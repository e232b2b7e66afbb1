"""transformers' model code, imported without the parts of torch that trace, compile and shard models.

transformers imports torch._dynamo to decorate functions for `torch.compile`, and torch's sharded tensors and FSDP for
`from_pretrained` on several devices; these import sympy. Together they are three quarters of a second and 76 MB of a process,
and nothing here compiles a model or shards it that way. While the model code is imported the decorators do nothing, and torch
says that it has no distributed package; afterwards everything is as it was, and torch._dynamo can be imported as ever.

For processes of the stages alone: a program that imports the library may want from transformers what is left out here.
`measure --tp` wants it too, since it cuts models by transformers' own plans.
"""

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from torch import distributed

from stages._memory import search_as_ever

_MODULES = ("transformers.modeling_utils", "transformers.masking_utils", "transformers.integrations.moe")
_COMPILER = "torch._dynamo"


def import_model_code() -> None:
    """Import transformers' model code as above, unless it or torch._dynamo is there already."""
    if _MODULES[0] in sys.modules or _COMPILER in sys.modules:
        return
    with _without_compiler(), mock.patch.object(distributed, "is_available", lambda: False):
        for name in _MODULES:
            importlib.import_module(name)
    search_as_ever()


@contextmanager
def _without_compiler() -> Iterator[None]:
    """Put a package in torch._dynamo's place whose decorators return what they are given; its modules are the real ones."""
    stand_in = ModuleType(_COMPILER)
    stand_in.__path__ = [str(Path(torch.__file__).parent / "_dynamo")]
    for name in ("allow_in_graph", "assume_constant_result", "disable"):
        setattr(stand_in, name, _unchanged)
    sys.modules[_COMPILER] = stand_in
    torch._dynamo = stand_in
    try:
        yield
    finally:
        del sys.modules[_COMPILER], torch._dynamo


def _unchanged(function: Callable[..., Any] | None = None, *_: Any, **__: Any) -> Callable[..., Any]:
    """Decorate nothing, with options or without."""
    return function if function is not None else _unchanged
