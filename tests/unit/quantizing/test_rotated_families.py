"""Families that a rotation goes through compute the same rotated; the others say why not."""

import json
import re
from pathlib import Path

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from quantflow.errors import UnsupportedError
from quantflow.models.capture import LayerStream
from quantflow.models.experts import Experts
from quantflow.models.family import FAMILIES
from quantflow.models.load import open_source
from quantflow.models.open import graph_for
from quantflow.planning.compatibility import check_model
from quantflow.quantizing.rotated import Rotated
from quantflow.quantizing.rotation import head_dim_of, prove_rotation
from quantflow.transforms import hadamard
from tests.shared import slow_but
from tests.unit.models.test_model_tensors import configurations

PAGE = Path(__file__).resolve().parents[3] / "docs" / "experts.md"
GO = [name for name, row in FAMILIES.items() if row.unrotated is None]
# one of each: a gated shared expert, stacked experts with biases, latent attention behind a dense
# layer, gated delta nets with norms of 1 + weight, scaled inputs of experts
DEFAULT = ("qwen2_moe", "gpt_oss", "deepseek_v3", "qwen3_next", "llama4_text")


def config_of(family):
    """The configuration with most biases among those that have a head of their own."""
    flags, number = max(
        (
            (sum(flags.values()), number)
            for number, (config, flags) in enumerate(configurations(family))
            if not config.tie_word_embeddings
        ),
    )
    del flags
    return list(configurations(family))[number][0]


def written(config, folder):
    """A random model in float32 whose norms multiply by different numbers."""
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config)
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.1)
            else:
                parameter.add_(torch.randn_like(parameter) * 0.3)
        model.save_pretrained(folder)
    return open_source(folder)


def renamed(folder, model_type):
    """The same model under the type that code beside the weights has."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"model_type": model_type}))
    return open_source(folder)


def run(weights, graph, tokens):
    """Logits, and each layer's choices of experts."""
    stream, chosen = LayerStream(weights, graph), []
    (state,) = stream.begin([tokens])
    for layer in graph.layers:
        with stream.layer(layer.index) as module:
            hooks = [
                part.register_forward_pre_hook(lambda _, args: chosen.append(args[1]))
                for part in module.modules()
                if isinstance(part, Experts)
            ]
            stream.advance(module, [state])
            for hook in hooks:
                hook.remove()
    return stream.finish(state.hidden), chosen


@pytest.mark.parametrize("family", slow_but(GO, *DEFAULT))
def test_logits_and_chosen_experts_of_a_rotated_model_are_the_sources(family, tmp_path):
    read_as = FAMILIES[family].read_as
    source = written(config_of(read_as or family), tmp_path)
    source = source if read_as is None else renamed(tmp_path, family)
    graph = graph_for(source.config)
    rotations = hadamard.solve(hidden=64, head_dim=head_dim_of(graph), options=hadamard.OPTIONS)
    turned, tokens = Rotated(source, graph, rotations, quantized=()), torch.arange(2, 50)
    prove_rotation(source, turned, graph, tokens)
    (expected, experts), (found, again) = (
        run(weights, graph, tokens) for weights in (source, turned)
    )
    # float32 rounding of a few layers
    assert (found - expected).norm() < 1e-5 * expected.norm()
    assert len(experts) == sum(layer.experts > 0 for layer in graph.layers)
    for one, other in zip(experts, again, strict=True):
        assert torch.equal(one, other)
    for name in turned._residual.readers:
        weight = f"{name}.weight"
        (before,), (after,) = (each.read([weight]).values() for each in (source, turned))
        assert (after - before).norm() > 0.5 * before.norm(), name


@pytest.mark.parametrize(
    ("family", "why"),
    [
        ("dbrx", "the norms of family dbrx subtract the mean"),
        ("phimoe", "the norms of family phimoe subtract the mean"),
        ("minimax", "the norms of family minimax take the place of the hidden state"),
        ("gemma2", "the norms of family gemma2 multiply channels of what is added"),
    ],
)
def test_a_family_that_no_rotation_goes_through_is_refused_by_name(family, why):
    *_, (config, _) = configurations(family)
    with pytest.raises(UnsupportedError, match=f"x: hadamard.*{why}"):
        check_model("x", "hadamard", hadamard.SUPPORTS, graph=graph_for(config), ranks=1)


def test_a_family_without_a_row_is_refused_by_name():
    config = CONFIG_MAPPING["olmo2"](
        vocab_size=96,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        pad_token_id=0,
    )
    with pytest.raises(UnsupportedError, match="norms of family olmo2 are not known to commute"):
        check_model("x", "hadamard", hadamard.SUPPORTS, graph=graph_for(config), ranks=1)


def test_a_linear_of_which_nothing_is_known_is_refused_by_name(monkeypatch):
    (config, _), *_ = configurations("deepseek_v3")
    graph = graph_for(config)
    monkeypatch.setattr("quantflow.models.residual._inner", lambda row: ())
    with pytest.raises(UnsupportedError, match=r"kv_b_proj: whether it reads the hidden state"):
        check_model("x", "hadamard", hadamard.SUPPORTS, graph=graph, ranks=1)


def test_the_page_names_every_mixture_as_it_is():
    words = PAGE.read_text()
    for answer, rotates in (("goes", True), ("refused", False)):
        (row,) = re.findall(rf"(?m)^\| {answer} \| (.*?) \|", words)
        assert sorted(re.findall(r"`([a-z0-9_]+)`", row)) == sorted(
            name
            for name, family in FAMILIES.items()
            if family.mixture is not None and (family.unrotated is None) == rotates
        )
