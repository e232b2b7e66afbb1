"""Changes that keep a model's function and make it easier to quantize, by the name used in recipes."""

from types import ModuleType

from quantflow.transforms import smoothquant

TRANSFORMS: dict[str, ModuleType] = {"smoothquant": smoothquant}
