"""What running an artifact does not need is not imported."""

import subprocess
import sys

CODE = """
import importlib, pkgutil, sys
import quantflow.runtime
for module in pkgutil.walk_packages(quantflow.runtime.__path__, "quantflow.runtime."):
    importlib.import_module(module.name)
foreign = ("lm_eval", "datasets", "peft", "pyarrow", "gguf")
layers = ("observers", "algorithms", "transforms", "planning", "stages")
layers += ("measuring", "unifying", "quantizing", "exporting", "validating")
own = [f"quantflow.{name}" for name in layers]
print(*(name for name in sys.modules if name.startswith((*foreign, *own))))
"""


def test_the_runtime_imports_no_stage_no_method_and_no_data_sets():
    found = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    assert found.stdout.split() == []
