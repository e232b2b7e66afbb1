"""Recipes: what a file may say, which of its sources wins, and the words of a refusal."""

from pathlib import Path

import pytest

from quantflow.errors import InputError, UsageError, nearest
from quantflow.planning.recipe import apply_settings, read_yaml, recipe_from
from quantflow.planning.requirements import algorithm_of
from quantflow.shipped import SHIPPED, find_config
from quantflow.stages.cli.environment import bars_wanted
from quantflow.stages.cli.options import overlay
from quantflow.units import parse_size
from quantflow.validating.gate import METRICS, load_gate

MINIMAL = {"model": "m", "quantize": [{"name": "a", "scheme": "W4A16"}]}
RECIPES = sorted(path.stem for path in (SHIPPED / "recipes").glob("*.yaml"))


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_values_that_nobody_gives_are_the_documented_defaults():
    recipe = recipe_from({"model": "m"})
    assert (recipe.seed, recipe.revision, recipe.quantize) == (0, None, ())
    assert (
        recipe.calibration.samples,
        recipe.calibration.sequence_length,
        recipe.calibration.pack,
    ) == (128, None, None)
    assert (recipe.measure.ranks, recipe.unify.groups) == (1, None)
    assert (recipe.export.format, recipe.export.shard_size) == ("compressed-tensors", "4GiB")
    assert (
        recipe.resources.max_memory,
        recipe.resources.max_disk,
        recipe.resources.disk_offload,
    ) == (None, None, False)
    assert (recipe.validate.tokens, recipe.validate.gate, recipe.validate.allow_inconclusive) == (
        32768,
        "auto",
        False,
    )


def test_a_flag_wins_over_set_which_wins_over_the_recipe_which_wins_over_the_default(tmp_path):
    path = write(
        tmp_path / "r.yaml",
        "model: m\nseed: 1\ncalibration: {samples: 1, sequence_length: 1, source: file}\n",
    )
    data = apply_settings(
        read_yaml(path), ["calibration.samples=2", "calibration.sequence_length=2"]
    )
    recipe = recipe_from(
        overlay(data, {"calibration.sequence_length": 3, "calibration.samples": None})
    )
    found = recipe.calibration
    assert (found.sequence_length, found.samples, found.source, recipe.seed, found.packs) == (
        3,
        2,
        "file",
        1,
        False,
    )


def test_set_reaches_into_lists_and_makes_missing_mappings():
    data = apply_settings(
        {**MINIMAL, "quantize": [dict(MINIMAL["quantize"][0])]},
        ["quantize.0.group_size=64", "unify.groups=[a]"],
    )
    recipe = recipe_from(data)
    assert recipe.quantize[0].group_size == 64
    assert recipe.unify.groups == ("a",)


def test_limits_are_sizes_and_a_mistake_in_one_is_told_with_the_recipe():
    recipe = recipe_from({"model": "m", "resources": {"max_memory": "4GiB", "disk_offload": True}})
    assert (recipe.resources.max_memory, recipe.resources.disk_offload) == ("4GiB", True)
    for resources, cause in (
        ({"max_memory": "4 apples"}, "size"),
        ({"max_ram": "4GiB"}, "max_ram"),
        ({"max_disk": 7}, "int"),
    ):
        with pytest.raises(UsageError, match=cause):
            recipe_from({"model": "m", "resources": resources})


def test_quantized_inputs_are_yes_no_or_left_to_the_stage():
    for value in (True, False, None):
        entry = {"name": "a", "scheme": "W4A16", "quantized_inputs": value}
        assert (
            recipe_from({"model": "m", "quantize": [entry]}).quantize[0].quantized_inputs is value
        )
    with pytest.raises(UsageError, match="quantized_inputs"):
        recipe_from(
            {
                "model": "m",
                "quantize": [{"name": "a", "scheme": "W4A16", "quantized_inputs": "yes"}],
            }
        )


def test_live_lines_are_silenced_by_the_environment(monkeypatch):
    monkeypatch.delenv("TQDM_DISABLE", raising=False)
    assert bars_wanted()
    monkeypatch.setenv("TQDM_DISABLE", "1")
    assert not bars_wanted()
    monkeypatch.setenv("TQDM_DISABLE", "0")
    assert bars_wanted()


@pytest.mark.parametrize(
    ("setting", "cause"),
    [
        ("seed", "no '='"),
        ("quantize.7.name=x", "does not lead"),
        ("quantize.x.name=x", "does not lead"),
        ("model.x=1", "does not lead"),
        ("seed=[1", "not YAML"),
    ],
)
def test_a_setting_that_leads_nowhere_is_refused(setting, cause):
    with pytest.raises(UsageError) as caught:
        apply_settings({"model": "m", "quantize": [{}]}, [setting])
    assert cause in caught.value.cause and setting.partition("=")[0] in caught.value.cause


def test_a_flag_over_an_empty_section_fills_it_and_over_a_number_is_refused():
    assert overlay({"calibration": None}, {"calibration.samples": 4}) == {
        "calibration": {"samples": 4}
    }
    with pytest.raises(UsageError, match="recipe.calibration: 5 is not a mapping"):
        overlay({"calibration": 5}, {"calibration.samples": 4})


@pytest.mark.parametrize(
    ("data", "wrong", "meant"),
    [
        ({"modle": "m"}, "modle", "model"),
        ({"model": "m", "calibration": {"sample": 3}}, "sample", "samples"),
        (
            {"model": "m", "quantize": [{"name": "a", "scheme": "FP8", "algoritm": "rtn"}]},
            "algoritm",
            "algorithm",
        ),
        (
            {
                "model": "m",
                "quantize": [{"name": "a", "scheme": "FP8", "overrides": [{"mach": "x"}]}],
            },
            "mach",
            "match",
        ),
    ],
)
def test_a_misspelt_key_names_the_nearest_valid_one(data, wrong, meant):
    with pytest.raises(UsageError) as caught:
        recipe_from(data)
    assert f"unknown key {wrong!r}" in caught.value.cause
    assert f"did you mean {meant!r}?" in caught.value.remedy


@pytest.mark.parametrize(
    ("data", "where"),
    [
        ({"model": 5}, "recipe.model: 5 is int, not str"),
        ({"model": "m", "seed": True}, "recipe.seed: True is bool, not int"),
        ({"model": "m", "seed": "0"}, "recipe.seed: '0' is str, not int"),
        ({"model": "m", "seed": 1.5}, "recipe.seed: 1.5 is float, not int"),
        ({"model": "m", "calibration": None}, "recipe.calibration: None is not a mapping"),
        ({"model": "m", "calibration": {"pack": 1}}, "recipe.calibration.pack: 1 is int, not bool"),
        (
            {"model": "m", "measure": {"stats": "amax"}},
            "recipe.measure.stats: 'amax' is not a list",
        ),
        ({"model": "m", "unify": {"groups": [1]}}, "recipe.unify.groups[0]: 1 is int, not str"),
        ({"model": "m", "quantize": [5]}, "recipe.quantize[0]: 5 is not a mapping"),
        (
            {"model": "m", "quantize": [{"name": "a", "scheme": "FP8", "transforms": [3]}]},
            "transforms[0]: 3 is not a mapping",
        ),
    ],
)
def test_a_wrong_type_names_the_key_and_the_value(data, where):
    with pytest.raises(UsageError) as caught:
        recipe_from(data)
    assert where in caught.value.cause


def test_a_missing_key_is_named():
    with pytest.raises(UsageError, match="key 'model' is missing"):
        recipe_from({})
    with pytest.raises(UsageError, match=r"recipe.quantize\[0\]: key 'scheme' is missing"):
        recipe_from({"model": "m", "quantize": [{"name": "a"}]})


@pytest.mark.parametrize(
    ("entry", "cause"),
    [
        ({"name": "a", "scheme": "W4A61"}, "scheme 'W4A61' is unknown"),
        ({"name": "a/b", "scheme": "FP8"}, "name 'a/b'"),
        ({"name": "..", "scheme": "FP8"}, "name '..'"),
        ({"name": "a", "scheme": "FP8", "expect": "maybe"}, "expect='maybe'"),
        (
            {"name": "a", "scheme": "FP8", "kv_cache": {"scheme": "INT4"}},
            "kv_cache: scheme='INT4': one measured scale is too coarse for 4 bits",
        ),
    ],
)
def test_an_entry_that_no_stage_could_use_is_refused(entry, cause):
    with pytest.raises(UsageError) as caught:
        recipe_from({"model": "m", "quantize": [entry]})
    assert cause in caught.value.cause


def test_two_artifacts_of_one_name_are_refused():
    entry = {"name": "a", "scheme": "FP8"}
    with pytest.raises(UsageError, match="2 entries are named 'a'"):
        recipe_from({"model": "m", "quantize": [entry, entry]})


def test_a_transform_may_be_written_as_a_bare_name():
    recipe = recipe_from(
        {"model": "m", "quantize": [{"name": "a", "scheme": "W8A8", "transforms": ["smoothquant"]}]}
    )
    assert recipe.quantize[0].transforms == ({"smoothquant": {}},)


@pytest.mark.parametrize(
    "text", ["model: a\nmodel: b\n", "model: a\ncalibration:\n  samples: 1\n  samples: 1\n"]
)
def test_a_key_that_stands_twice_is_refused_with_its_name(tmp_path, text):
    with pytest.raises(UsageError, match="key '(model|samples)' stands twice"):
        read_yaml(write(tmp_path / "r.yaml", text))


@pytest.mark.parametrize("text", ["- a\n", "", "5\n"])
def test_yaml_that_is_no_mapping_is_refused(tmp_path, text):
    with pytest.raises(UsageError, match="a mapping is needed"):
        read_yaml(write(tmp_path / "r.yaml", text))


def test_text_that_is_no_yaml_is_told_on_one_line(tmp_path):
    with pytest.raises(UsageError, match="not YAML") as caught:
        read_yaml(write(tmp_path / "r.yaml", "a: [1\nb: {"))
    assert "\n" not in caught.value.cause and "r.yaml" in caught.value.cause


def test_a_recipe_that_is_not_utf8_is_an_input_error(tmp_path):
    path = tmp_path / "r.yaml"
    path.write_bytes(b"model: \xff\n")
    with pytest.raises(InputError, match=r"r\.yaml"):
        read_yaml(path)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1000", 1000),
        ("4GiB", 4 * 2**30),
        ("500MB", 500_000_000),
        ("1.5 KiB", 1536),
        ("2b", 2),
        ("3kb", 3000),
    ],
)
def test_a_size_is_bytes_in_decimal_or_binary_units(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "4G", "GiB", "-1GiB", "0", "4 GiB GiB", "1e9", "nan", "4TiB"])
def test_a_size_that_says_nothing_is_refused(text):
    with pytest.raises(UsageError, match="size"):
        parse_size(text)


def test_a_recipe_is_found_by_its_path_or_its_shipped_name(tmp_path):
    own = write(tmp_path / "own.yaml", "model: m\n")
    assert find_config("recipes", str(own)) == own
    assert find_config("recipes", "tiny-llama").name == "tiny-llama.yaml"
    with pytest.raises(UsageError) as caught:
        find_config("recipes", "tiny-lama")
    assert "did you mean 'tiny-llama'?" in caught.value.remedy


@pytest.mark.parametrize("name", RECIPES)
def test_every_shipped_recipe_parses_and_its_gate_fits_every_artifact(name):
    recipe = recipe_from(read_yaml(find_config("recipes", name)))
    assert recipe.quantize
    shipped = recipe.calibration.source is None and recipe.validate.text is None
    assert shipped or (recipe.calibration.source and recipe.validate.text)
    assert shipped or recipe.calibration.source != recipe.validate.text
    for entry in recipe.quantize:
        algorithm = algorithm_of(entry)
        gate = load_gate(
            recipe.validate.gate,
            scheme=entry.scheme,
            algorithm=algorithm,
            parameters=1,
            noise_top1=1.0,
        )
        assert set(gate.thresholds) == set(METRICS)


def test_there_is_a_shipped_recipe():
    assert "tiny-llama" in RECIPES


def test_the_nearest_word_is_only_offered_when_it_is_near():
    assert nearest("gptk", ["rtn", "gptq"]) == "did you mean 'gptq'? valid: rtn, gptq"
    assert nearest("zzz", ["rtn", "gptq"]) == "valid: rtn, gptq"
