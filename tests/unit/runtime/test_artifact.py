"""An artifact as weights: what is put into a module, taken out again, and read by rows."""

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import GPTNeoXConfig, LlamaConfig, Qwen2Config

from quantflow.core.parallel import Workers
from quantflow.core.scheme import PRESETS, with_group_size
from quantflow.errors import UsageError
from quantflow.models.capture import LayerStream
from quantflow.models.open import graph_for
from quantflow.models.skeleton import skeleton
from quantflow.runtime.artifact import open_artifact
from quantflow.runtime.linear import QuantLinear
from quantflow.runtime.load import load

SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 96,
    "eos_token_id": 2,
}
GROUPED = SIZES | {"intermediate_size": 96, "num_key_value_heads": 2}
LLAMA = LlamaConfig(**GROUPED, tie_word_embeddings=False, architectures=["LlamaForCausalLM"])
TIED_QWEN2 = Qwen2Config(**GROUPED, tie_word_embeddings=True, architectures=["Qwen2ForCausalLM"])
GPT_NEOX = GPTNeoXConfig(**SIZES, intermediate_size=128, architectures=["GPTNeoXForCausalLM"])

TOKENS = torch.randint(3, 96, (12,), generator=torch.Generator().manual_seed(3))
W4A16 = with_group_size(PRESETS["W4A16"], 32)
LINEAR = "model.layers.1.mlp.up_proj"


@pytest.fixture(scope="module")
def folder(tmp_path_factory, make_artifact):
    path = tmp_path_factory.mktemp("artifact")
    make_artifact(path, LLAMA, PRESETS["W8A8"])
    return path


def layer_names(module):
    return {name: f"model.layers.1.{name}" for name, _ in module.named_parameters()}


@pytest.mark.parametrize(
    "config", [LLAMA, TIED_QWEN2, GPT_NEOX], ids=lambda config: config.model_type
)
def test_the_model_run_layer_by_layer_gives_the_logits_of_the_whole_model(
    config, tmp_path, make_artifact
):
    make_artifact(tmp_path, config, PRESETS["W8A8"])
    whole = load(tmp_path, backend="reference").model
    artifact = open_artifact(tmp_path, backend="reference")
    stream = LayerStream(artifact, graph_for(artifact.config))
    states = stream.begin([TOKENS])
    for index in range(config.num_hidden_layers):
        with stream.layer(index) as layer:
            assert any(isinstance(module, QuantLinear) for module in layer.modules())
            stream.advance(layer, states)
        assert all(parameter.is_meta for parameter in layer.parameters())
    with torch.inference_mode():
        expected = whole(input_ids=TOKENS[None]).logits
    assert expected.std() > 0.01
    assert torch.equal(stream.finish(states[0].hidden), expected)


def test_a_layer_that_is_emptied_is_as_it_was_and_can_be_filled_again(folder):
    artifact = open_artifact(folder)
    layer = skeleton(artifact.config).model.layers[1]
    names = layer_names(layer)
    before = [(name, tuple(parameter.shape)) for name, parameter in layer.named_parameters()]
    outputs = []
    for _ in range(2):
        artifact.fill_(layer, names, dtype=torch.float32)
        assert isinstance(layer.mlp.up_proj, QuantLinear)
        outputs.append(layer.mlp.up_proj(torch.ones(1, 64)))
        artifact.empty_(layer, names)
        assert type(layer.mlp.up_proj) is nn.Linear
        assert [
            (name, tuple(parameter.shape)) for name, parameter in layer.named_parameters()
        ] == before
        assert all(
            parameter.is_meta and not parameter.requires_grad for parameter in layer.parameters()
        )
        assert not any(module.training for module in layer.modules())
    assert torch.equal(*outputs)


def test_only_the_rows_that_are_named_are_read_in_their_order(folder):
    expected = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    rows = torch.tensor([5, 6, 7, 2, 95, 0, 0])
    assert torch.equal(
        open_artifact(folder).read_rows("model.embed_tokens.weight", rows), expected[rows]
    )


def test_a_quantized_weight_is_prepared_and_never_read_as_if_it_were_plain(folder):
    artifact = open_artifact(folder)
    for read in (
        lambda name: artifact.read([name]),
        lambda name: artifact.read_rows(name, torch.tensor([0])),
    ):
        with pytest.raises(
            UsageError, match=rf"^{LINEAR}\.weight: quantized in this artifact; prepare the linear"
        ):
            read(f"{LINEAR}.weight")
    norm = artifact.read(["model.norm.weight"], torch.bfloat16)["model.norm.weight"]
    assert norm.shape == (64,)
    assert norm.dtype == torch.bfloat16


def test_an_artifact_is_used_in_the_dtype_that_it_was_opened_for(folder):
    artifact = open_artifact(folder, dtype=torch.bfloat16)
    layer = skeleton(artifact.config).model.layers[1]
    with pytest.raises(
        UsageError, match=r"^dtype torch.float32: the artifact was opened for torch.bfloat16;"
    ):
        artifact.fill_(layer, layer_names(layer), dtype=torch.float32)


def test_opening_reads_headers_and_preparing_reads_one_linear(folder, tmp_path, edit_tensors):
    for path in folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    edit_tensors(tmp_path, lambda tensors: tensors[f"{LINEAR}.weight_scale"].fill_(0))
    artifact = open_artifact(tmp_path, verify=False)
    assert artifact.prepare("model.layers.0.mlp.up_proj").out_features == 96
    with pytest.raises(Exception, match=rf"^{LINEAR}\.weight_scale: scale 0"):
        artifact.prepare(LINEAR)


def test_linears_prepared_by_two_threads_are_those_prepared_by_one(tmp_path, make_artifact):
    make_artifact(tmp_path, LLAMA, W4A16)
    artifact = open_artifact(tmp_path)
    names = list(artifact.linears)
    with Workers(2) as workers:
        threaded = workers.map(artifact.prepare, names)
    for name, linear in zip(names, threaded, strict=True):
        x = torch.ones(1, linear.in_features)
        assert torch.equal(linear(x), artifact.prepare(name)(x))


def test_an_artifact_that_holds_both_of_two_tied_parameters_keeps_both(
    tmp_path, make_artifact, edit_tensors
):
    # linears by name
    make_artifact(
        tmp_path, TIED_QWEN2, lambda name: PRESETS["W8A16" if "layers.0" in name else "W8A8"]
    )
    head = torch.randn(96, 64, generator=torch.Generator().manual_seed(4))
    edit_tensors(tmp_path, lambda tensors: tensors.update({"lm_head.weight": head}))
    embedding = load_file(tmp_path / "model.safetensors")["model.embed_tokens.weight"]
    model = load(tmp_path, verify=False).model
    assert torch.equal(model.lm_head.weight, head)
    assert torch.equal(model.model.embed_tokens.weight, embedding)


def test_tied_parameters_of_which_one_is_stored_are_one_parameter(tmp_path, make_artifact):
    make_artifact(tmp_path, TIED_QWEN2, PRESETS["W8A16"])
    model = load(tmp_path, verify=False).model
    assert model.lm_head.weight is model.model.embed_tokens.weight
