"""Transformers' modules in few shapes, against a cache that grows; torch counts compilations."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    FalconConfig,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    OPTConfig,
)

from quantflow.core.kv import KVScales, kv_scheme
from quantflow.errors import UnsupportedError, UsageError
from quantflow.runtime import modules, static_shapes
from quantflow.runtime.decoder import HiddenDecoder
from quantflow.runtime.decoding import Beams, Lookup, generate
from quantflow.runtime.load import load
from quantflow.runtime.shapes import Shapes, shapes_of
from quantflow.runtime.static_shapes import StaticShapeDecoder
from quantflow.runtime.transformers_decoder import TransformersDecoder

CPU = torch.device("cpu")
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 64}
ENDS = {"bos_token_id": 1, "eos_token_id": 2}
LLAMA = LlamaConfig(**SIZES, intermediate_size=48, num_key_value_heads=2)
CONFIGS = {
    "llama": LLAMA,
    "bloom": BloomConfig(hidden_size=32, n_layer=2, n_head=4, vocab_size=64),
    "falcon with alibi": FalconConfig(**SIZES, **ENDS, alibi=True),
    "gpt2": GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=64, **ENDS),
    "opt": OPTConfig(**SIZES, ffn_dim=48, word_embed_proj_dim=32),
}
RULES = {
    "static": Shapes(static=True),
    "growing": Shapes(bucket_size=5),
    "internal": Shapes(bucket_size=5, internal=True),
    "padded": Shapes(bucket_size=5, reduce_recompile=True),
    "padded, internal": Shapes(bucket_size=5, internal=True, reduce_recompile=True),
}


def random_model(config):
    torch.manual_seed(0)
    return (
        AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval().requires_grad_(False)
    )


def decoder_of(model, rules, **options):
    return StaticShapeDecoder(model, device=CPU, rules=rules, **options)


def ids(*shape, seed=0):
    return torch.randint(1, 64, shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("rules", RULES.values(), ids=RULES)
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_padded_batches_say_the_tokens_of_a_cache_that_grows_with_the_text(config, rules):
    model, prompts, padding = random_model(config), ids(3, 7), torch.tensor([0, 2, 5])
    ours, theirs = decoder_of(model, rules), TransformersDecoder(model)
    assert isinstance(ours, HiddenDecoder)
    for method, new in ((None, 12), (Beams(count=3), 6)):
        options = {"padding": padding, "max_new_tokens": new, "method": method}
        found = generate(ours, prompts, **options)
        assert torch.equal(found, generate(theirs, prompts, **options))


@pytest.mark.parametrize("rules", RULES.values(), ids=RULES)
def test_logits_and_hidden_states_are_those_of_the_growing_cache_after_a_crop_too(rules):
    model = random_model(LLAMA)
    ours, theirs = decoder_of(model, rules), TransformersDecoder(model, crops=True)
    for decoder in (ours, theirs):
        decoder.begin(rows=2, capacity=20)
    padding = torch.tensor([0, 2])
    for found, expected in zip(
        ours.forward_hidden(ids(2, 6), padding=padding),
        theirs.forward_hidden(ids(2, 6), padding=padding),
        strict=True,
    ):
        assert found.shape == expected.shape
        assert torch.allclose(found[:, 2:], expected[:, 2:], atol=1e-5)
    for decoder in (ours, theirs):
        decoder.crop(4)
    steps = [decoder.forward(ids(2, 3, seed=1), last_only=False) for decoder in (ours, theirs)]
    assert steps[0].shape == (2, 3, 64) and torch.allclose(*steps, atol=1e-5)
    with pytest.raises(UsageError, match="crop to 8 positions: the cache has 7"):
        ours.crop(8)
    with pytest.raises(UsageError, match="input_ids 2 x 14: the cache has 2 rows, 7 of 20"):
        ours.forward(ids(2, 14))


def test_the_cache_grows_by_a_bucket_at_a_time_and_tokens_are_the_same():
    decoder = decoder_of(random_model(LLAMA), Shapes(bucket_size=8))
    generate(decoder, ids(1, 3), max_new_tokens=21)
    assert list(decoder.cache_lengths) == [8, 16, 24]  # ceil((3 + 21) / 8) of them


def test_inside_of_the_model_attention_reads_whole_buckets_of_a_cache_that_never_grows():
    decoder = decoder_of(random_model(LLAMA), Shapes(bucket_size=8, internal=True))
    generate(decoder, ids(1, 3), max_new_tokens=21)
    assert list(decoder.cache_lengths) == [24]
    assert dict(decoder.shapes) == {
        (1, 3, 8, 24): 1,
        (1, 1, 8, 24): 5,
        (1, 1, 16, 24): 8,
        (1, 1, 24, 24): 7,
    }


def test_a_static_cache_has_a_shape_for_the_prompt_and_one_for_all_steps():
    decoder = decoder_of(random_model(LLAMA), Shapes(static=True))
    generate(decoder, ids(2, 3), max_new_tokens=21)
    assert dict(decoder.shapes) == {(2, 3, 24, 24): 1, (2, 1, 24, 24): 20}
    assert shapes_of(decoder) == {
        "forwards": [[2, 3, 24, 24, 1], [2, 1, 24, 24, 20]],
        "cache_lengths": [24],
        "compilations": None,
    }


def test_prompts_that_are_padded_before_the_device_sees_them_have_few_lengths():
    model = random_model(LLAMA)
    lengths = {}
    for padded in (False, True):
        decoder = decoder_of(model, Shapes(bucket_size=8, reduce_recompile=padded))
        for length in (3, 4, 5, 6, 7, 9):
            generate(decoder, ids(1, length), max_new_tokens=2)
        lengths[padded] = {tokens for _, tokens, *_ in decoder.shapes} - {1}
    assert lengths == {False: {3, 4, 5, 6, 7, 9}, True: {8, 16}}


@pytest.mark.slow
@pytest.mark.parametrize("rules", RULES.values(), ids=RULES)
def test_each_shape_is_compiled_once_and_no_other(rules, monkeypatch):
    graphs = []

    def counted(graph, inputs):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=counted))
    model = random_model(LLAMA)
    prompts = [ids(1, length) for length in (3, 4, 6, 9, 4)]
    expected = [generate(TransformersDecoder(model), one, max_new_tokens=9) for one in prompts]
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}")
    modules._compile_(SimpleNamespace(device=CPU), model, dynamic=False)
    decoder = decoder_of(model, rules, compilations=modules.compilations())
    for prompt, tokens in zip(prompts, expected, strict=True):
        assert torch.equal(generate(decoder, prompt, max_new_tokens=9), tokens)
    assert len(graphs) == len(decoder.shapes) == shapes_of(decoder)["compilations"]
    torch._dynamo.reset()


def test_a_guess_that_is_wrong_is_taken_back():
    model, prompt = random_model(LLAMA), ids(1, 3).repeat(1, 3)
    decoder = decoder_of(model, Shapes(bucket_size=4, reduce_recompile=True))
    found = generate(decoder, prompt, max_new_tokens=12, method=Lookup(tokens=3))
    assert torch.equal(found, generate(TransformersDecoder(model), prompt, max_new_tokens=12))


def test_keys_and_values_are_rounded_by_measured_scales():
    model = random_model(LLAMA)
    scales = [
        KVScales(scheme=scheme, keys=torch.tensor([0.05]), values=torch.tensor([0.02]))
        for scheme in (kv_scheme("FP8", "per_tensor"),) * 2
    ]
    options = {"kv_scales": scales}
    found = decoder_of(model, Shapes(static=True), **options)
    rounded, plain = TransformersDecoder(model, **options), TransformersDecoder(model)
    logits = []
    for decoder in (found, rounded, plain):
        decoder.begin(rows=1, capacity=9)
        decoder.forward(ids(1, 8))
        logits.append(decoder.forward(ids(1, 1, seed=1)))
    assert torch.allclose(logits[0], logits[1], atol=1e-5)
    assert not torch.allclose(logits[0], logits[2], atol=1e-5)


def test_what_has_no_static_cache_is_refused(tmp_path, llama):
    config = MistralConfig(**SIZES, intermediate_size=48, num_key_value_heads=2, sliding_window=4)
    assert "slides" in str(static_shapes.why_not(SimpleNamespace(config=config, device=CPU)))
    bloom = SimpleNamespace(config=CONFIGS["bloom"], device=torch.device("hpu"))
    assert "ALiBi" in str(static_shapes.why_not(bloom))
    with pytest.raises(UsageError, match="static shapes with the lean decoder"):
        load(llama, decoder="lean", shapes=Shapes(static=True))
    random_model(config).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedError, match="static shapes: a cache that slides"):
        load(tmp_path, shapes=Shapes(static=True))


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"internal": True}, "bucket_internal without bucket_size"),
        ({"reduce_recompile": True}, "reduce_recompile without bucket_size"),
        ({"bucket_size": 0}, "bucket_size=0"),
        ({"bucket_size": 4, "static": True}, "static_shapes with bucket_size"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(settings, told):
    with pytest.raises(UsageError, match=told):
        Shapes(**settings)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_on_a_gaudi_no_value_of_a_mask_decides_what_a_graph_holds(attention, monkeypatch):
    model, prompts, padding = random_model(LLAMA), ids(2, 5), torch.tensor([0, 2])
    model.set_attn_implementation(attention)
    expected = generate(TransformersDecoder(model), prompts, padding=padding, max_new_tokens=6)
    plain = generate(TransformersDecoder(model), prompts, max_new_tokens=6)
    masks, decoder = [], decoder_of(model, Shapes(static=True))

    def forward(**batch):
        masks.append(batch["attention_mask"])
        return model(**batch)

    decoder._forward = decoder._prompt_forward = forward
    monkeypatch.setattr(static_shapes.hpu, "NAME", "cpu")
    assert torch.equal(generate(decoder, prompts, padding=padding, max_new_tokens=6), expected)
    assert torch.equal(generate(decoder, prompts, max_new_tokens=6), plain)
    assert {mask.ndim for mask in masks} == {4} and masks[0].shape == (2, 1, 5, 11)
