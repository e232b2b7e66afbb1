"""quantflow turns a Hugging Face causal LM into a proven FP8, INT8 or INT4 artifact.

Everything in here follows one equation:

    real = scale * (qvalue - zero_point)

The library takes tensors and names and returns tensors and names; `stages` is the application around it. What is
exported here is loaded on first use, so that `import quantflow` costs nothing.
"""

from importlib import import_module

_HOMES = {
    "ALGORITHMS": "quantflow.algorithms",
    "BACKENDS": "quantflow.backends",
    "FORMATS": "quantflow.formats",
    "LinearScheme": "quantflow.core.scheme",
    "OBSERVERS": "quantflow.observers",
    "PRESETS": "quantflow.core.scheme",
    "QTensor": "quantflow.core.qtensor",
    "QuantLinear": "quantflow.runtime.linear",
    "QuantflowError": "quantflow.errors",
    "TensorScheme": "quantflow.core.scheme",
    "generate": "quantflow.runtime.decoding",
    "load": "quantflow.runtime.load",
    "preset": "quantflow.core.scheme",
    "verify": "quantflow.artifact.verify",
}

__all__ = list(_HOMES)
__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    """Import a public name from its home on first use (PEP 562)."""
    if name not in _HOMES:
        raise AttributeError(f"module 'quantflow' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
