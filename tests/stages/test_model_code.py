"""transformers' model code without torch's compiler: in a process of its own, since what is imported stays."""

import subprocess
import sys

from stages._model_code import import_model_code

LEFT_OUT = ("torch._dynamo", "torch.distributed.tensor", "torch.distributed.fsdp", "sympy")


def printed(script, *arguments):
    found = subprocess.run([sys.executable, "-c", script, *map(str, arguments)], capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    return found.stdout.splitlines()


def test_a_model_runs_layer_by_layer_without_what_compiles_and_shards(family_model):
    script = """
import sys
from stages._model_code import import_model_code
import_model_code()
import torch
from quantflow.models.capture import LayerStream
from quantflow.models.graph import graph_for
from quantflow.models.load import open_source
for folder in sys.argv[1:]:
    source = open_source(folder)
    stream = LayerStream(source, graph := graph_for(source.config))
    states = stream.begin([torch.arange(8)])
    for layer in graph.layers:
        with stream.layer(layer.index) as module:
            stream.advance(module, states)
    print(bool(torch.isfinite(stream.finish(states[0].hidden)).all()))
print(*sorted(sys.modules))
"""
    *finite, modules = printed(script, *map(family_model, ("llama", "gpt_neox")))
    assert finite == ["True"] * 2
    assert not set(LEFT_OUT) & set(modules.split())


def test_torch_is_as_it_was_afterwards():
    script = """
import torch
from stages._model_code import import_model_code
import_model_code()
import torch.distributed
print(torch.distributed.is_available())
print(torch.compile(lambda x: x + 1, backend="eager")(torch.ones(1)).item())
print(torch._dynamo.__file__.endswith("__init__.py"))
"""
    assert printed(script) == ["True", "2.0", "True"]


def test_where_the_model_code_is_there_already_nothing_changes():
    import torch
    import transformers.modeling_utils  # noqa: F401

    before = sys.modules.get("torch._dynamo")
    import_model_code()
    assert sys.modules.get("torch._dynamo") is before is not None
    assert torch.distributed.is_available()
