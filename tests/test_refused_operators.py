"""No family calls an operator that deterministic mode refuses on a GPU, but for those in order.

A GPU would raise an error in the middle of a layer. torch's list is in the documentation of
`use_deterministic_algorithms`; here are the operators of aten that each line of it means, and a
mode of dispatch that notes them on the CPU, forward and back.
"""

import inspect
import json
import re
import sys
from collections import defaultdict
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from quantflow.core.fixed_order import ORDERED
from quantflow.models.skeleton import skeleton
from tests.shared import slow_but

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


def _floats(args, kwargs):
    dtype = kwargs.get("dtype") or args[0].dtype
    return dtype.is_floating_point or dtype.is_complex


def _has_weights(args, kwargs):
    return kwargs.get("weights", args[1] if len(args) > 1 else None) is not None


def _reduces(*names):
    return lambda args, kwargs: kwargs.get("reduce", args[4] if len(args) > 4 else None) in names


def _always(args, kwargs):
    return True


# What torch's documentation calls it -> operators of aten, and when they are refused.
REFUSED = {
    "AvgPool3d": {"avg_pool3d_backward": _always},
    "AdaptiveAvgPool2d": {"_adaptive_avg_pool2d_backward": _always},
    "AdaptiveAvgPool3d": {"_adaptive_avg_pool3d_backward": _always},
    "AdaptiveMaxPool2d": {"adaptive_max_pool2d_backward": _always},
    "FractionalMaxPool2d": {"fractional_max_pool2d_backward": _always},
    "FractionalMaxPool3d": {"fractional_max_pool3d_backward": _always},
    "MaxUnpool1d": {"max_unpool2d": _always},
    "MaxUnpool2d": {"max_unpool2d": _always},
    "MaxUnpool3d": {"max_unpool3d": _always},
    "interpolate": {
        f"upsample_{kind}_backward": _always
        for kind in ("linear1d", "bilinear2d", "bicubic2d", "trilinear3d")
    },
    **{f"ReflectionPad{n}d": {f"reflection_pad{n}d_backward": _always} for n in (1, 2, 3)},
    # torch 2.8 lists these too
    **{f"ReplicationPad{n}d": {f"replication_pad{n}d_backward": _always} for n in (1, 2, 3)},
    "NLLLoss": {"nll_loss2d_forward": _always, "nll_loss2d_backward": _always},
    "CTCLoss": {"_ctc_loss_backward": _always},
    "EmbeddingBag": {"_embedding_bag_dense_backward": _always},
    "put_": {"put_": _always, "put": _always},
    "histc": {"histc": lambda args, kwargs: args[0].is_floating_point()},
    "bincount": {"bincount": _has_weights},
    "median": {"median.dim": _always, "nanmedian.dim": _always},
    "grid_sample": {"grid_sampler_2d_backward": _always, "grid_sampler_3d_backward": _always},
    "cumsum": dict.fromkeys(("cumsum", "cumsum.out", "cumsum_"), _floats),
    "scatter_reduce": dict.fromkeys(
        ("scatter_reduce.two", "scatter_reduce_.two"), _reduces("prod")
    ),
    "resize_": {"resize_": lambda args, kwargs: args[0].is_quantized},
    # not in the list, but in torch's sources
    "kthvalue": {"kthvalue": _always},
    "index_reduce": {"index_reduce": _always, "index_reduce_": _always},
}
# families that sum floats: without them the test would show nothing
SUMMING = ("mamba2", "qwen3_next")
QUICK = (*SUMMING, "bamba", "llama", "qwen3_moe")


class Noted(TorchDispatchMode):
    """Notes the operators of `REFUSED` that are called."""

    def __init__(self):
        super().__init__()
        self.called = set()
        self._refused = {name: when for each in REFUSED.values() for name, when in each.items()}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = f"{func.overloadpacket.__name__}.{func._overloadname}".removesuffix(".default")
        when = self._refused.get(name)
        if when is not None and when(args, kwargs or {}):
            self.called.add(name)
        return func(*args, **(kwargs or {}))


@pytest.fixture
def tiny(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import _tiny_models

    yield _tiny_models
    for name in [name for name in sys.modules if name in ("_tiny_models", "_synthetic")]:
        del sys.modules[name]


def called_by(tiny, kind):
    """The refused operators that a tiny model of a kind calls, forward and back."""
    config = tiny.tiny_config(kind)
    if tiny.parameters_of(config) > tiny.LARGEST:
        pytest.skip(f"{kind}: its sizes go by other names")
    model, generator = skeleton(config), torch.Generator().manual_seed(0)
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                values = torch.empty(parameter.shape).normal_(0, 0.1, generator=generator)
                module._parameters[name] = torch.nn.Parameter(values)
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                module._buffers[name] = torch.zeros(buffer.shape, dtype=buffer.dtype)
    with Noted() as noted:
        logits = model(input_ids=torch.arange(2, 20)[None], use_cache=False).logits
        logits.square().mean().backward()
    return noted.called


def test_torch_refuses_nothing_that_is_not_in_the_table():
    text = inspect.getdoc(torch.use_deterministic_algorithms)
    listed = text.partition("operations will throw a")[2].partition("In addition")[0]
    named = re.findall(r"^\s*\* :(?:class|func):`([\w.]+)`", listed, flags=re.MULTILINE)
    assert len(named) > 20
    assert {name.rpartition(".")[2] for name in named} <= set(REFUSED)


@pytest.mark.parametrize("named", sorted(REFUSED))
def test_the_operators_of_the_table_are_torchs(named):
    for name in REFUSED[named]:
        packet, _, overload = name.partition(".")
        assert (overload or "default") in getattr(torch.ops.aten, packet).overloads()


def test_a_refused_operator_is_noted_and_the_same_on_integers_is_not():
    with Noted() as noted:
        torch.arange(4).cumsum(0)
        torch.bincount(torch.tensor([1]))
        torch.rand(4).median()
    assert noted.called == set()
    x = torch.rand(1, 1, 4, 4, requires_grad=True)
    with Noted() as noted:
        torch.rand(4).cumsum(0)
        torch.rand(4).median(dim=0)
        torch.nn.functional.interpolate(x, scale_factor=2, mode="bilinear").sum().backward()
    assert noted.called == {"cumsum", "median.dim", "upsample_bilinear2d_backward"}


@pytest.mark.parametrize("kind", slow_but(QUICK, *SUMMING, "llama", "qwen3_moe"))
def test_a_family_calls_none_but_those_in_order(tiny, kind):
    called = called_by(tiny, kind)
    assert called <= set(ORDERED)
    assert bool(called) == (kind in (*SUMMING, "bamba"))


@pytest.mark.slow
def test_no_family_of_transformers_calls_another(tiny):
    called, failed = defaultdict(set), {}
    for kind in tiny.KINDS:
        if kind in QUICK:
            continue
        try:
            for name in called_by(tiny, kind) - set(ORDERED):
                called[name].add(kind)
        except pytest.skip.Exception:
            failed[kind] = "large"
        except Exception as error:  # a model that needs more than token ids
            failed[kind] = f"{type(error).__name__}: {error}"
    run = json.loads((BENCHMARKS / "families.json").read_text())
    supported = {kind for kind, stages in run.items() if stages.get("measure", "not run") is None}
    assert len(supported) > 200
    assert {kind: why for kind, why in failed.items() if kind in supported} == {}
    assert not called
