"""Layers that predict further tokens in transformers' modules, and states that are restored."""

import pytest
import torch
from transformers import DynamicCache
from transformers.masking_utils import create_causal_mask

from quantflow.errors import UsageError
from quantflow.runtime.decoding import Counts, Further, Sampling, generate
from quantflow.runtime.generate_job import Lookup
from quantflow.runtime.load import load
from quantflow.runtime.loaded_mtp import layer_ahead
from quantflow.runtime.module_mtp import ModuleAhead
from quantflow.runtime.mtp import AheadLayer
from quantflow.runtime.transformers_decoder import TransformersDecoder
from quantflow.validating.ahead import acceptance
from tests.mtp_models import DELTA_FAMILIES, FAMILIES, ids, write, write_apart
from tests.shared import slow_but


@pytest.fixture(scope="module", params=DELTA_FAMILIES)
def made(request, tmp_path_factory):
    """A folder, its model and its layer ahead, as transformers has them."""
    folder = tmp_path_factory.mktemp(request.param)
    return folder, *write_apart(folder, DELTA_FAMILIES[request.param])


def opened(folder):
    loaded = load(folder, decoder="transformers", crops=True)
    return loaded, layer_ahead(loaded)


@torch.inference_mode()
def expected_states(model, theirs, hidden, tokens):
    embeds = model.model.embed_tokens(tokens)
    places = torch.arange(tokens.shape[1])[None]
    mask = create_causal_mask(
        config=model.config,
        inputs_embeds=embeds,
        attention_mask=None,
        past_key_values=DynamicCache(),
        position_ids=places,
    )
    rotary = model.model.rotary_emb(embeds, places)
    return theirs(embeds, hidden, rotary, mask, places, None)[0]


@pytest.mark.parametrize("decoder", ["transformers", "lean"])
def test_a_layer_has_the_states_of_transformers_in_one_piece_and_in_several(made, decoder):
    folder, model, theirs = made
    layer = layer_ahead(load(folder, decoder=decoder, crops=True))
    assert isinstance(layer, ModuleAhead if decoder == "transformers" else AheadLayer)
    tokens, hidden = ids(20, 1), torch.randn(1, 20, 64, generator=torch.Generator().manual_seed(2))
    expected = expected_states(model, theirs, hidden, tokens)
    layer.begin(24)
    assert torch.allclose(layer.forward(hidden[0], tokens[0]), expected, atol=2e-5, rtol=2e-5)
    layer.crop(7)
    parts = [layer.forward(hidden[0, a:b], tokens[0, a:b]) for a, b in ((7, 8), (8, 19), (19, 20))]
    assert torch.allclose(torch.cat(parts), expected[7:], atol=2e-5, rtol=2e-5)
    with torch.inference_mode():
        assert torch.allclose(layer.logits(parts[-1]), model.lm_head(expected[-1:]), atol=2e-5)


@pytest.mark.parametrize("made", slow_but(DELTA_FAMILIES, "qwen3_5"), indirect=True)
def test_tokens_are_those_without_it(made):
    loaded, layer = opened(made[0])
    for seed, count in ((3, 1), (4, 9)):
        options = {"max_new_tokens": 24, "eos_token_id": 2}
        expected = generate(loaded.decoder, ids(count, seed), **options)
        for method in (
            Further(layer=layer, tokens=1),
            Further(layer=layer, tokens=3),
            Lookup(tokens=3),
        ):
            counts = Counts()
            found = generate(
                loaded.decoder, ids(count, seed), method=method, counts=counts, **options
            )
            assert torch.equal(found, expected)
            assert counts.proposed > 0
    sampling = Sampling(temperature=0.8, seed=1)
    method = Further(layer=layer, tokens=2)
    drawn = generate(loaded.decoder, ids(5, 1), max_new_tokens=8, method=method, sampling=sampling)
    assert drawn.shape == (1, 13)


def test_states_go_back_to_any_position_of_the_last_forward(made):
    folder, model, _ = made
    decoder = load(folder, decoder="transformers", crops=True).decoder
    assert isinstance(decoder, TransformersDecoder)
    text = ids(16, 6)
    with torch.inference_mode():
        expected = model(text).logits
    for kept in (6, 8, 11):
        decoder.begin(rows=1, capacity=16)
        decoder.forward(text[:, :6])
        decoder.forward(torch.cat([text[:, 6:kept], ids(11 - kept, 9)], dim=1), last_only=False)
        decoder.crop(kept)
        rest = decoder.forward(text[:, kept:], last_only=False)
        assert torch.allclose(rest, expected[:, kept:], atol=1e-4, rtol=1e-4)
    with pytest.raises(UsageError, match="the states of 11 are the last that are kept"):
        decoder.crop(5)


def test_the_share_of_guesses_is_counted_in_transformers_modules_too(made):
    found = acceptance(made[0], [ids(20, 1), ids(7, 3)], exact=True)
    assert found["guesses"] == 25 and 0 <= found["taken"] < 25


def test_a_layer_beyond_the_last_runs_in_both_decoders(tmp_path):
    write(tmp_path, FAMILIES["glm4_moe"])
    states = []
    for decoder in ("lean", "transformers"):
        layer = layer_ahead(load(tmp_path, decoder=decoder, crops=True))
        hidden = torch.randn(9, 64, generator=torch.Generator().manual_seed(3))
        layer.begin(9)
        states.append(layer.forward(hidden, ids(9, 5)[0]))
    assert torch.allclose(*states, atol=1e-4, rtol=1e-4)
