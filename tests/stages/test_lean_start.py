"""Commands import only the modules that they use.

Reading files takes no transformers, and decoding none of its model code.
"""

import json
import subprocess
import sys

import pytest

import quantflow
from quantflow.planning.recipe import Quantize

pytestmark = pytest.mark.slow

PROGRAM = """
import json, sys
from types import SimpleNamespace

told = json.loads(sys.argv[1])
{body}
print(json.dumps(sorted(name for name in sys.modules if name.startswith(tuple(told["heavy"])))))
"""
QUANTIZE = """
import quantflow
from quantflow.core.parallel import Workers
from quantflow.planning.recipe import Quantize

expected = []

# here, so that its imports are seen
def prove(artifact, quantized, source, *, workers, measures):
    from quantflow.exporting import proof_process

    with Workers(workers) as pool:
        return proof_process.prove(artifact, quantized, source, workers=pool, measures=measures)

prover = SimpleNamespace(expect=expected.append, prove=prove)
entry = Quantize(name="x", scheme=told["scheme"], algorithm="rtn")
quantflow.make_artifact(told["model"], told["out"], entry=entry, prover=prover)
assert expected == ["tensors"], expected
"""


def imported(body: str, **told) -> list[str]:
    """Return which heavy modules a program imports in an interpreter of its own."""
    given = json.dumps(
        {key: value if isinstance(value, list) else str(value) for key, value in told.items()}
    )
    called = [sys.executable, "-c", PROGRAM.replace("{body}", body), given]
    found = subprocess.run(called, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    return json.loads(found.stdout.splitlines()[-1])


@pytest.mark.parametrize("scheme", ["FP8_DYNAMIC", "W4A16"])
def test_weights_that_are_rounded_alone_are_quantized_and_proved_without_transformers(
    llama, tmp_path, scheme
):
    heavy = ["transformers", "torch._dynamo", "torch.distributed.tensor", "sympy", "scipy"]
    assert imported(QUANTIZE, model=llama, out=tmp_path / "a", scheme=scheme, heavy=heavy) == []


GENERATE = """
import quantflow
from quantflow.runtime.generate_job import GenerateJob

for folder in told["folders"]:
    found = GenerateJob(artifact=folder, prompts=("a scale",), max_new_tokens=2).run()
    assert found["decoder"] == {"name": "lean", "reasons": []}, found["decoder"]
"""
MODELING = [
    "transformers.modeling_utils",
    "transformers.models.llama",
    "transformers.conversion_mapping",
    "torch._dynamo",
]
MODELING += ["torch.distributed.tensor", "sympy", "scipy"]


def test_a_lean_artifact_and_a_model_generate_without_model_code_of_transformers(llama, tmp_path):
    entry = Quantize(name="x", scheme="FP8_DYNAMIC", algorithm="rtn")
    quantflow.make_artifact(llama, tmp_path / "a", entry=entry)
    assert imported(GENERATE, folders=[str(tmp_path / "a"), str(llama)], heavy=MODELING) == []


RUNS = """
import importlib

for name in told["names"]:
    importlib.import_module(name)
"""


def test_serving_conversations_and_benchmarks_of_speed_import_no_model_code_of_transformers():
    names = ["server.process", "runtime.conversation", "runtime.text_pipeline", "runtime.load"]
    names += ["benching.latency", "benching.generation_speed", "benching.kernel_speed"]
    assert imported(RUNS, names=[f"quantflow.{name}" for name in names], heavy=MODELING) == []
