"""Layers that predict further tokens: transformers' wiring, the same tokens, what is refused."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from quantflow.errors import UnsupportedError
from quantflow.files.layers_ahead import layers_ahead, lost_words, promised
from quantflow.runtime.decoding import Counts, Further, Sampling, generate
from quantflow.runtime.load import load
from quantflow.runtime.mtp import AheadLayer
from quantflow.validating.ahead import acceptance, first_tokens
from tests.mtp_models import FAMILIES, bigram_, ids, write


def opened(folder):
    loaded = load(folder, decoder="lean")
    return loaded, AheadLayer(loaded.artifact, loaded.decoder.shared)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_layer_has_the_states_of_transformers_in_one_piece_and_in_several(family, tmp_path):
    model, theirs = write(tmp_path, FAMILIES[family])
    _, layer = opened(tmp_path)
    tokens, hidden = ids(20, 1), torch.randn(1, 20, 64, generator=torch.Generator().manual_seed(2))
    positions = torch.arange(1, 21)[None]
    with torch.inference_mode():
        expected = theirs.forward_layer(0, hidden, positions, None, input_ids=tokens)[0]
    layer.begin(24)
    assert torch.allclose(layer.forward(hidden[0], tokens[0]), expected, atol=2e-5, rtol=2e-5)
    layer.crop(7)
    parts = [layer.forward(hidden[0, a:b], tokens[0, a:b]) for a, b in ((7, 8), (8, 19), (19, 20))]
    assert torch.allclose(torch.cat(parts), expected[7:], atol=2e-5, rtol=2e-5)
    with torch.inference_mode():
        assert torch.allclose(layer.logits(parts[-1]), model.lm_head(expected[-1:]), atol=2e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_are_those_without_it(family, tmp_path):
    write(tmp_path, FAMILIES[family])
    loaded, layer = opened(tmp_path)
    for seed, count in ((3, 1), (4, 9)):
        options = {"max_new_tokens": 30, "eos_token_id": 2}
        expected = generate(loaded.decoder, ids(count, seed), **options)
        for tokens in (1, 3):
            counts = Counts()
            method = Further(layer=layer, tokens=tokens)
            found = generate(
                loaded.decoder, ids(count, seed), method=method, counts=counts, **options
            )
            assert torch.equal(found, expected)
            assert counts.proposed > 0


def test_every_guess_of_a_layer_that_knows_the_rule_is_taken(tmp_path):
    write(tmp_path, FAMILIES["deepseek_v3"], bigram_)
    loaded, layer = opened(tmp_path)
    for tokens in (1, 2, 4):
        counts = Counts()
        method = Further(layer=layer, tokens=tokens)
        found = generate(loaded.decoder, ids(5, 1), max_new_tokens=24, method=method, counts=counts)
        assert torch.equal(found, generate(loaded.decoder, ids(5, 1), max_new_tokens=24))
        assert counts.acceptance == 1 and counts.proposed >= 24 * tokens // (tokens + 1) - tokens
    drawn = generate(
        loaded.decoder,
        ids(5, 1),
        max_new_tokens=24,
        method=Further(layer=layer, tokens=2),
        sampling=Sampling(temperature=0.8, seed=3),
        counts=(counts := Counts()),
    )
    # both draw from the same probabilities, so nothing is refused
    assert drawn.shape == (1, 29) and counts.acceptance == 1


def test_the_share_of_guesses_is_that_of_greedy_speculation(tmp_path):
    write(tmp_path / "rule", FAMILIES["deepseek_v3"], bigram_)
    found = acceptance(tmp_path / "rule", [ids(20, 1), ids(1, 2), ids(7, 3)], exact=True)
    assert found == {"guesses": 25, "taken": 25, "acceptance": 1.0}
    write(tmp_path / "random", FAMILIES["deepseek_v3"])
    loaded, layer = opened(tmp_path / "random")
    # of the model's own greedy text
    text = generate(loaded.decoder, ids(4, 1), max_new_tokens=40)
    share = acceptance(tmp_path / "random", [text], exact=True)
    assert share["guesses"] == 43 and 0 <= share["taken"] < 43
    assert [len(one[0]) for one in first_tokens([ids(20, 1), ids(7, 2)], 23)] == [20, 3]


def test_a_model_without_such_a_layer_or_with_a_part_of_it_is_refused(tmp_path):
    write(tmp_path, FAMILIES["deepseek_v3"])
    loaded, _ = opened(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    for lost, words in (
        ("model.layers.2.enorm.weight", "model.layers.2.enorm.weight is missing"),
        ("model.layers.2.eh_proj.weight", "no layer predicts further tokens"),
    ):
        rest = {name: tensor for name, tensor in tensors.items() if name != lost}
        save_file(rest, tmp_path / "model.safetensors", metadata={"format": "pt"})
        loaded = load(tmp_path, decoder="lean")
        with pytest.raises(UnsupportedError, match=words):
            AheadLayer(loaded.artifact, loaded.decoder.shared)


BEYOND = [f"model.layers.61.{part}.weight" for part in ("eh_proj", "enorm", "hnorm")]
BEYOND += ["model.layers.61.shared_head.norm.weight"]
APART = [f"mtp.{part}.weight" for part in ("fc", "norm", "layers.0.input_layernorm")]
APART += ["mtp.pre_fc_norm_embedding.weight", "mtp.pre_fc_norm_hidden.weight"]
LISTED = [
    f"model.mtp_layers.0.{part}.weight"
    for part in ("input_proj", "token_layernorm", "hidden_layernorm", "final_layernorm")
]


@pytest.mark.parametrize(
    ("names", "layer", "hidden_first"),
    [
        (BEYOND, "model.layers.61", False),  # DeepSeek V3, GLM-4.5
        (APART, "mtp.layers.0", False),  # Qwen3-Next and 3.5
        (LISTED, "model.mtp_layers.0", True),  # MiMo-7B
    ],
)
def test_the_forms_of_released_checkpoints_are_found_and_a_lost_part_is_named(
    names, layer, hidden_first
):
    config = {"num_nextn_predict_layers": 1}
    (found,) = layers_ahead(["model.layers.3.mlp.down_proj.weight", *names])
    assert (found.prefix, found.hidden_first) == (layer, hidden_first)
    assert {found.joint, *found.norms} <= {name.removesuffix(".weight") for name in names}
    assert lost_words(config, names) is None
    for part in found.norms:
        rest = [name for name in names if name != f"{part}.weight"]
        assert lost_words(config, rest) == (
            f"{part}: is missing, of {layer}, which predicts further tokens (MTP)"
        )
    assert lost_words(config, ["lm_head.weight"]) == (
        "config.json has 1 layer to predict further tokens (MTP), the files have none: a program "
        "that guesses with them accepts no guess"
    )
    assert lost_words({}, names) is None and lost_words({}, ["lm_head.weight"]) is None


def test_a_linear_that_another_program_quantized_is_found_too():
    packed = [name.replace("eh_proj.weight", "eh_proj.weight_packed") for name in BEYOND]
    assert [each.prefix for each in layers_ahead(packed)] == ["model.layers.61"]


def test_configurations_say_how_many_there_are():
    assert promised({"num_nextn_predict_layers": 1}) == 1
    assert promised({"text_config": {"mtp_num_hidden_layers": 1}}) == 1
    assert promised({"num_nextn_predict_layers": 0}) == promised({}) == 0
    assert promised({"num_nextn_predict_layers": None}) == 0
