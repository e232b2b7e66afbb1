"""The config.json of an artifact whose head is no longer the embedding."""

import json

import pytest
from transformers import AutoConfig, Gemma3Config

from quantflow.models.open import graph_for
from quantflow.planning.artifact_config import artifact_config
from quantflow.planning.plan import resolve
from quantflow.planning.recipe import Quantize

TEXT = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "tie_word_embeddings": True,
}
VISION = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_attention_heads": 2,
    "num_hidden_layers": 1,
}


@pytest.mark.parametrize("untied", [True, False])
def test_the_text_of_a_model_with_images_is_untied_too(tmp_path, untied):
    source = Gemma3Config(text_config=TEXT, vision_config=VISION)
    graph = graph_for(source)
    config = source.to_dict() | {"tie_word_embeddings": True, "talker_config": {**TEXT}}
    assert config["text_config"]["tie_word_embeddings"]
    before = json.dumps(config)
    shapes = {f"{name}.weight": (64, 64) for name in graph.linears}
    plan = resolve(Quantize(name="a", scheme="W8A16"), graph, shapes)
    written = artifact_config(config, graph, plan, infos={}, unused={}, untied=untied)
    (tmp_path / "config.json").write_text(json.dumps(written))
    read = AutoConfig.from_pretrained(tmp_path)
    assert read.get_text_config().tie_word_embeddings is not untied
    assert read.tie_word_embeddings is not untied
    assert json.dumps(config) == before
    assert written["talker_config"] == TEXT
    kept = ("hidden_size", "num_hidden_layers")
    assert [written["vision_config"][key] for key in kept] == [VISION[key] for key in kept]
