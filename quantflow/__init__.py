"""quantflow turns a Hugging Face causal LM into a proven FP8, INT8 or INT4 artifact.

Everything in here follows one equation:

    real = scale * (qvalue - zero_point)

The stages are functions (quantflow.api), what they are told are the records of a recipe
(quantflow.planning.recipe), and `quantflow.stages` is the command line around them. What is
exported here is loaded on first use, so that `import quantflow` costs nothing.
"""

from importlib import import_module

_HOMES = {
    "ALGORITHMS": "quantflow.algorithms",
    "BACKENDS": "quantflow.backends",
    "Calibration": "quantflow.planning.recipe",
    "Export": "quantflow.planning.recipe",
    "FORMATS": "quantflow.formats",
    "GenerateJob": "quantflow.runtime.generate_job",
    "LinearScheme": "quantflow.core.scheme",
    "Measure": "quantflow.planning.recipe",
    "OBSERVERS": "quantflow.observers",
    "PRESETS": "quantflow.core.scheme",
    "Progress": "quantflow.progress",
    "QTensor": "quantflow.core.qtensor",
    "QuantLinear": "quantflow.runtime.linear",
    "QuantflowError": "quantflow.errors",
    "Quantize": "quantflow.planning.recipe",
    "Recipe": "quantflow.planning.recipe",
    "Resources": "quantflow.planning.recipe",
    "TensorScheme": "quantflow.core.scheme",
    "Validate": "quantflow.planning.recipe",
    "bench": "quantflow.api",
    "export": "quantflow.api",
    "gate": "quantflow.api",
    "generate": "quantflow.api",
    "load": "quantflow.runtime.load",
    "make_artifact": "quantflow.api",
    "measure": "quantflow.api",
    "pipeline": "quantflow.runtime.text_pipeline",
    "plan": "quantflow.api",
    "preset": "quantflow.core.scheme",
    "quantize": "quantflow.api",
    "unify": "quantflow.api",
    "validate": "quantflow.api",
    "verify": "quantflow.files.verify",
}

__all__ = list(_HOMES)
__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    """Import a public name from its home on first use (PEP 562)."""
    if name not in _HOMES:
        raise AttributeError(f"module 'quantflow' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
