"""Export's comparison of the lean decoder with transformers' layers: right ones and wrong ones."""

from dataclasses import replace

import pytest
import torch
from transformers import (
    CodeGenConfig,
    FalconConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GPTJConfig,
    GPTNeoXConfig,
    GraniteConfig,
    LlamaConfig,
    OPTConfig,
    PhiConfig,
    SmolLM3Config,
)

from quantflow.core.scheme import PRESETS
from quantflow.files.manifest import read_manifest, with_note, write_manifest
from quantflow.models.architecture import read
from quantflow.models.capture import LayerStream
from quantflow.models.open import graph_for
from quantflow.runtime.artifact import open_artifact
from quantflow.runtime.lean_check import LeanCheck
from quantflow.runtime.load import load

SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 96,
    "vocab_size": 96,
    "eos_token_id": 2,
}
SIZES |= {"num_attention_heads": 4, "max_position_embeddings": 64}
PAD = {"pad_token_id": 0, "bos_token_id": 1}
GPT = {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 96}
GPT |= {"bos_token_id": 1, "eos_token_id": 2}
FALCON = {key: SIZES[key] for key in ("hidden_size", "num_hidden_layers", "vocab_size")}
FALCON |= {"num_attention_heads": 4, "bos_token_id": 1, "eos_token_id": 2}
MODELS = {
    "llama": LlamaConfig(**SIZES, architectures=["LlamaForCausalLM"]),
    "gemma2": Gemma2Config(
        **SIZES,
        num_key_value_heads=2,
        head_dim=16,
        sliding_window=5,
        query_pre_attn_scalar=4,
        attn_logit_softcapping=0.7,
        final_logit_softcapping=0.5,
        architectures=["Gemma2ForCausalLM"],
    ),
    "gemma3_text": Gemma3TextConfig(
        **SIZES,
        num_key_value_heads=2,
        head_dim=16,
        layer_types=["sliding_attention", "full_attention"],
        architectures=["Gemma3ForCausalLM"],
    ),
    "granite": GraniteConfig(
        **SIZES, residual_multiplier=0.9, logits_scaling=0.25, architectures=["GraniteForCausalLM"]
    ),
    "smollm3": SmolLM3Config(
        **SIZES,
        **PAD,
        num_key_value_heads=2,
        no_rope_layers=[1, 0],
        architectures=["SmolLM3ForCausalLM"],
    ),
    "gpt_neox": GPTNeoXConfig(**SIZES, architectures=["GPTNeoXForCausalLM"]),
    "phi": PhiConfig(**SIZES, architectures=["PhiForCausalLM"]),
    "gpt2": GPT2Config(**GPT, n_positions=64, architectures=["GPT2LMHeadModel"]),
    "falcon, as 40b": FalconConfig(
        **FALCON, new_decoder_architecture=True, num_kv_heads=2, architectures=["FalconForCausalLM"]
    ),
    "falcon, as rw": FalconConfig(
        **FALCON | {"hidden_size": 96, "num_attention_heads": 6},
        alibi=True,
        multi_query=False,
        parallel_attn=False,
        bias=True,
        architectures=["FalconForCausalLM"],
    ),
    "gptj": GPTJConfig(**GPT, rotary_dim=8, architectures=["GPTJForCausalLM"]),
    "codegen": CodeGenConfig(**GPT, rotary_dim=8, architectures=["CodeGenForCausalLM"]),
    "opt, as 350m": OPTConfig(
        **SIZES,
        **PAD,
        ffn_dim=96,
        do_layer_norm_before=False,
        word_embed_proj_dim=32,
        architectures=["OPTForCausalLM"],
    ),
}


@pytest.fixture(scope="module")
def made(tmp_path_factory, make_artifact):
    """A function from a family and a scheme to an artifact, made on first use."""
    folders = {}

    def make(family, name):
        if (family, name) not in folders:
            folders[family, name] = tmp_path_factory.mktemp("artifact")
            make_artifact(folders[family, name], MODELS[family], PRESETS[name])
        return folders[family, name]

    return make


def reason_of(folder, change=None) -> str | None:
    """Run the check as export does, with a changed idea of what the model computes."""
    artifact = open_artifact(folder, backend="reference", verify=False)
    graph, tokens = graph_for(artifact.config), torch.arange(5, 45)
    stream, check = LayerStream(artifact, graph), LeanCheck(artifact)
    check._blueprint = check._blueprint if change is None else change(check._blueprint)
    (state,) = stream.begin([tokens])
    check.embedding(tokens, state.hidden)
    for layer in graph.layers:
        given = state.hidden
        with stream.layer(layer.index) as module:
            stream.advance(module, [state])
        check.layer(layer.index, given, state.hidden)
    check.logits(state.hidden, stream.finish(state.hidden))
    return check.reason


@pytest.mark.parametrize("name", ["W8A16", "W8A8", "FP8_DYNAMIC"])
@pytest.mark.parametrize("family", MODELS)
def test_what_transformers_computes_is_no_reason(family, name, made):
    assert reason_of(made(family, name)) is None


def form(**changes):
    return lambda made: replace(made, form=replace(made.form, **changes))


def heads(**changes):
    return lambda made: replace(made, heads=replace(made.heads, **changes))


def fused(**changes):
    return lambda made: replace(made, fused=replace(made.fused, **changes))


WRONG = [
    ("llama", form(activation="gelu_tanh"), "layer 0"),
    ("llama", heads(eps=1e-3), "layer 0"),
    ("gemma2", lambda made: replace(made, embedding_scale=1.0), "the embedding"),
    ("gemma2", lambda made: replace(made, unit_offset=False), "layer 0"),
    ("gemma2", lambda made: replace(made, windows=(0, 0)), "layer 0"),
    ("gemma2", lambda made: replace(made, windows=(5, 5)), "layer 1"),
    ("gemma2", lambda made: replace(made, logits_cap=0.0), "logits"),
    ("gemma2", heads(cap=0.0), "layer 0"),
    ("gemma3_text", lambda made: replace(made, rope_of_layer=(1, 1)), "layer 1"),
    ("granite", form(residual=1.0), "layer 0"),
    ("granite", lambda made: replace(made, logits_scale=1.0), "logits"),
    ("smollm3", lambda made: replace(made, rope_of_layer=(0, 0)), "layer 1"),
    ("gpt_neox", form(parallel=False), "layer 0"),
    ("phi", form(centered=False), "layer 0"),
    ("falcon, as 40b", form(parallel=False), "layer 0"),
    ("falcon, as 40b", fused(blocks=1), "layer 0"),
    ("falcon, as rw", heads(rounded_alibi=False), "layer 0"),
    ("falcon, as rw", heads(slopes=()), "layer 0"),
    ("gptj", form(parallel=False), "layer 0"),
    ("codegen", fused(order="qkv"), "layer 0"),
    ("codegen", fused(blocks=1), "layer 0"),
    ("opt, as 350m", lambda made: replace(made, position_offset=1), "the embedding"),
    ("opt, as 350m", form(post=False), "layer 0"),
    ("opt, as 350m", form(activation="gelu"), "layer 0"),
]


@pytest.mark.parametrize("name", ["W8A16", "W8A8", "FP8_DYNAMIC"])
@pytest.mark.parametrize(("family", "change", "where"), WRONG)
def test_whatever_is_left_out_is_named(family, change, where, name, made):
    told = reason_of(made(family, name), change)
    assert told is not None and told.startswith(
        f"{where}: it differs from transformers' modules by "
    )


def test_inputs_with_outliers_may_fall_to_other_codes(tmp_path, make_artifact, edit_tensors):
    """Inputs beside an outlier have few codes: one code more is a large share of the output."""
    make_artifact(tmp_path, MODELS["llama"], PRESETS["W8A8"])

    def with_outlier(tensors):
        for name in tensors:
            if name.endswith("layernorm.weight"):
                tensors[name][3] = 60.0
            elif name.endswith(
                (
                    "q_proj.weight",
                    "k_proj.weight",
                    "v_proj.weight",
                    "gate_proj.weight",
                    "up_proj.weight",
                )
            ):
                tensors[name][:, 3] = 0

    edit_tensors(tmp_path, with_outlier)
    artifact = open_artifact(tmp_path, backend="reference", verify=False)
    stream, check = LayerStream(artifact, graph_for(artifact.config)), LeanCheck(artifact)
    (state,) = stream.begin([torch.arange(5, 45)])
    other_sums = 1 + 2.0**-16 * torch.randn(
        state.hidden.shape, generator=torch.Generator().manual_seed(0)
    )
    given = state.hidden * other_sums
    with stream.layer(0) as module:
        stream.advance(module, [state])
    check.layer(0, given, state.hidden)
    assert check.reason is None


def test_an_artifact_that_it_does_not_run_is_not_compared(tmp_path, make_artifact):
    make_artifact(
        tmp_path,
        PhiConfig(**SIZES, qk_layernorm=True, architectures=["PhiForCausalLM"]),
        PRESETS["W8A16"],
    )
    check = LeanCheck(open_artifact(tmp_path))
    check.layer(0, torch.zeros(1, 3, 64), torch.ones(1, 3, 64))
    assert check.reason == "it knows qk_layernorm=False of config.json, not True"
    assert isinstance(read({"model_type": "phi"}), str)


def test_a_manifest_that_says_so_sends_the_artifact_to_transformers(tmp_path, make_artifact):
    make_artifact(tmp_path, MODELS["llama"], PRESETS["W8A16"])
    before = read_manifest(tmp_path)
    write_manifest(tmp_path, with_note(before, "lean_decoder", "layer 1: it differs"))
    assert read_manifest(tmp_path)["digest"] != before["digest"]
    loaded = load(tmp_path, decoder="auto")
    told = "the lean decoder is not used: export compared it: layer 1: it differs"
    assert (loaded.name, loaded.reasons) == ("transformers", (told,))
