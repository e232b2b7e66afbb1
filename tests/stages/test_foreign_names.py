"""Folders of other programs with other names.

Linears have several names, or none in the files; configurations stand in other places.
"""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForImageTextToText

from quantflow.core.scheme import named
from quantflow.formats.weight_layout import integers
from quantflow.runtime.artifact import open_folder
from tests.shared import run

SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "pad_token_id": 1,
}
VISION = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}
VISION |= {"image_size": 16, "patch_size": 8, "projection_dim": 32}
MODELS = {
    "tied llama": lambda: CONFIG_MAPPING["llama"](
        **SIZES, intermediate_size=128, tie_word_embeddings=True
    ),
    "opt": lambda: CONFIG_MAPPING["opt"](
        **SIZES, ffn_dim=128, word_embed_proj_dim=32, do_layer_norm_before=False
    ),
    "gpt_neox": lambda: CONFIG_MAPPING["gpt_neox"](**SIZES, intermediate_size=128),
    "llava": lambda: CONFIG_MAPPING["llava"](
        text_config={**SIZES, "intermediate_size": 128, "model_type": "llama"},
        vision_config={**VISION, "model_type": "clip_vision_model"},
        image_token_index=95,
    ),
}
LEFT = {  # what loaders may call the linears that are not quantized
    "tied llama": {"lm_head"},
    "opt": {
        "model.decoder.embed_positions",
        "model.decoder.project_in",
        "model.decoder.project_out",
        "lm_head",
    },
    "gpt_neox": {"embed_out", "lm_head"},
    "llava": {
        "language_model.lm_head",
        "lm_head",
        "model.multi_modal_projector.linear_1",
        "multi_modal_projector.linear_1",
    },
}
SYMMETRIC = named(integers(4, 32, symmetric=True, where="a test"), None, "pack-quantized")


def kind_of(name):
    return AutoModelForImageTextToText if name == "llava" else AutoModelForCausalLM


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Return a small random model, made on first use."""
    made = {}

    def make(name: str) -> Path:
        if name not in made:
            torch.manual_seed(0)
            made[name] = tmp_path_factory.mktemp("models") / name.replace(" ", "-")
            kind_of(name).from_config(MODELS[name]()).to(torch.float16).save_pretrained(made[name])
        return made[name]

    return make


def words_of(folder: Path) -> dict:
    return json.loads((folder / "config.json").read_text())["quantization_config"]


def logits(name: str, folder: Path) -> torch.Tensor:
    loaded, report = kind_of(name).from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    assert not any(report.values()), report
    with torch.no_grad():
        return loaded.eval()(input_ids=torch.arange(2, 18)[None]).logits


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.filterwarnings("ignore")
def test_stock_transformers_loads_what_a_gptq_folder_becomes(model, tmp_path, write_foreign, name):
    write_foreign(tmp_path / "gptq", model(name), "gptq", SYMMETRIC)
    for made in ("compressed-tensors", "dequantized", "awq"):
        assert run("export", tmp_path / "gptq", "-o", tmp_path / made, "--format", made, "-q") == 0
    expected, found = (
        logits(name, tmp_path / made) for made in ("dequantized", "compressed-tensors")
    )
    # its weights are in bfloat16
    torch.testing.assert_close(found, expected, rtol=0, atol=0.01 * float(expected.abs().max()))
    left = set(words_of(tmp_path / "compressed-tensors")["ignore"])
    assert left == set(words_of(tmp_path / "awq")["modules_to_not_convert"])
    assert LEFT[name] <= left if name == "llava" else LEFT[name] == left


@pytest.mark.filterwarnings("ignore")
def test_a_folder_whose_tensors_have_the_names_of_modules_keeps_its_linears_quantized(
    model, tmp_path, write_foreign
):
    """llava's checkpoints and its modules have different names; either is loaded."""
    write_foreign(tmp_path / "gptq", model("llava"), "gptq", SYMMETRIC)
    names = {"language_model.model.": "model.language_model.", "language_model.lm_head": "lm_head"}
    tensors = load_file(tmp_path / "gptq" / "model.safetensors")
    for old, new in names.items():
        tensors = {
            new + key.removeprefix(old) if key.startswith(old) else key: value
            for key, value in tensors.items()
        }
    save_file(tensors, tmp_path / "gptq" / "model.safetensors", metadata={"format": "pt"})
    for made in ("compressed-tensors", "dequantized"):
        assert run("export", tmp_path / "gptq", "-o", tmp_path / made, "--format", made, "-q") == 0
    assert not [
        name
        for name in words_of(tmp_path / "compressed-tensors")["ignore"]
        if ".layers.0.mlp.up_proj" in name
    ]
    expected, found = (
        logits("llava", tmp_path / made) for made in ("dequantized", "compressed-tensors")
    )
    torch.testing.assert_close(found, expected, rtol=0, atol=0.01 * float(expected.abs().max()))


def with_words(folder: Path, **words) -> None:
    told = json.loads((folder / "config.json").read_text())
    told["quantization_config"] |= words
    (folder / "config.json").write_text(json.dumps(told))


@pytest.mark.parametrize(
    ("name", "ignore"),
    [
        ("gpt_neox", ["lm_head"]),
        ("gpt_neox", ["embed_out"]),
        ("gpt_neox", ["re:.*lm_head"]),
        ("llava", ["re:.*vision_tower.*", "re:.*multi_modal_projector.*", "lm_head"]),
        ("llava", ["re:^vision_tower.*", "re:^multi_modal_projector.*", "language_model.lm_head"]),
    ],
)
def test_compressed_tensors_means_a_linear_by_its_tensors_or_its_module(
    model, tmp_path, write_foreign, name, ignore
):
    folder = tmp_path / "f"
    weights = write_foreign(folder, model(name), "compressed-tensors", SYMMETRIC)
    with_words(folder, ignore=ignore)
    opened = open_folder(folder)
    assert {f"{linear}.weight" for linear in opened.linears} == weights.keys()


def test_a_group_means_a_linear_by_its_tensors_or_its_module(model, tmp_path, write_foreign):
    folder = tmp_path / "f"
    write_foreign(folder, model("llava"), "compressed-tensors", SYMMETRIC)
    told = words_of(folder)["config_groups"]["group_0"]
    place = "model.language_model.layers.0"
    first, others = [f"{place}.mlp.up_proj"], [f"re:{place}.*(gate|down|q|k|v|o)_proj"]
    with_words(
        folder,
        config_groups={"a": told | {"targets": first}, "b": told | {"targets": others}},
        ignore=[],
    )
    opened = open_folder(folder)
    assert (
        len(opened.linears) == 7 and "language_model.model.layers.0.mlp.up_proj" in opened.linears
    )
    assert opened.modules["language_model.model.layers.0.mlp.up_proj"] == first[0]


OTHER_PLACES = {
    "quantize_config.json": ("tied llama", "gptq", ("bits", "group_size", "sym", "desc_act")),
    "quant_config.json": ("tied llama", "awq", ("zero_point", "group_size", "bits", "version")),
    "config.json: compression_config": ("tied llama", "compressed-tensors", None),
    "config.json: text_config.quantization_config": ("llava", "compressed-tensors", None),
}


@pytest.mark.parametrize("place", OTHER_PLACES)
def test_a_configuration_is_read_from_where_older_programs_and_wrapped_models_have_it(
    model, tmp_path, write_foreign, capsys, place
):
    name, layout, keys = OTHER_PLACES[place]
    scheme, folder = (
        named(integers(4, 32, symmetric=layout != "awq", where="a test"), None, "pack-quantized"),
        tmp_path / "f",
    )
    weights = write_foreign(folder, model(name), layout, scheme)
    told = json.loads((folder / "config.json").read_text())
    words = told.pop("quantization_config")
    if keys is not None:
        (folder / place).write_text(json.dumps({key: words[key] for key in keys}))
    elif name == "llava":
        told["text_config"]["quantization_config"] = words | {"ignore": ["language_model.lm_head"]}
    else:
        told["compression_config"] = words
    (folder / "config.json").write_text(json.dumps(told))
    capsys.readouterr()
    assert run("inspect", folder, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["configuration"], found["format"], found["runs"]) == (place, layout, None)
    assert run("inspect", folder) == 0 and place in capsys.readouterr().out
    opened = open_folder(folder)
    assert {f"{linear}.weight" for linear in opened.linears} == weights.keys()
    assert all(
        torch.equal(opened.decode(key.removesuffix(".weight")).dequantize(), weights[key])
        for key in weights
    )
    assert run("quantize", folder, "-o", tmp_path / "q", "--scheme", "W8A16", "-q") == 3
    assert f"{place} says the model is quantized already" in capsys.readouterr().err
    assert run("export", folder, "-o", tmp_path / "made", "--format", "gptq_v2", "-q") == 0
    made = json.loads((tmp_path / "made" / "config.json").read_text())
    assert made.keys() - {"quantization_config"} == told.keys() - {"compression_config"}
    assert (
        "quantization_config" not in made.get("text_config", {})
        and not (tmp_path / "made" / place).exists()
    )
    assert made["quantization_config"]["quant_method"] == "gptq"


def test_a_configuration_of_marlins_tiles_is_refused_by_its_name(
    model, tmp_path, write_foreign, capsys
):
    write_foreign(tmp_path / "f", model("tied llama"), "gptq", SYMMETRIC)
    told = json.loads((tmp_path / "f" / "config.json").read_text())
    words = told.pop("quantization_config")
    (tmp_path / "f" / "config.json").write_text(json.dumps(told))
    words = {key: words[key] for key in ("bits", "group_size", "sym", "desc_act")} | {
        "is_marlin_format": True
    }
    (tmp_path / "f" / "quantize_config.json").write_text(json.dumps(words))
    assert run("inspect", tmp_path / "f", "--json") == 0
    assert "checkpoint_format 'marlin'" in json.loads(capsys.readouterr().out)["runs"]
    (tmp_path / "f" / "quantize_config.json").write_text("[]")
    assert (
        run("inspect", tmp_path / "f") == 3
        and "quantize_config.json: not a table" in capsys.readouterr().err
    )
