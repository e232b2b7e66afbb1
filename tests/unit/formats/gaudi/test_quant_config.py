"""QUANT_CONFIG: every key and its default, the words of refusals, and the modules of the lists."""

import json
import re

import pytest

from quantflow.errors import InputError, UnsupportedError, UsageError
from quantflow.formats.gaudi.module_patterns import ModuleList, as_table, module_list, selected
from quantflow.formats.gaudi.quant_config import (
    VERBS,
    QuantConfig,
    find_quant_config,
    quant_config,
    read_quant_config,
    require_mode,
    without_meaning,
)
from quantflow.shipped import SHIPPED
from quantflow.stages.cli.environment import quant_config_variable

DEFAULTS = {
    "mode": "QUANTIZE",
    "observer": "maxabs",
    "dump_stats_path": "stats",
    "measure_exclude": "OUTPUT",
    "allowlist": ModuleList(),
    "blocklist": ModuleList(),
    "scale_params": {},
    "fp8_config": "E4M3",
    "hp_dtype": "BF16",
    "scale_format": "SCALAR",
    "device_for_scales": None,
    "recalc_scales": False,
    "ignore_modules_wo_measures": False,
    "seperate_measure_files": True,
    "fake_quant": False,
    "use_qdq": False,
    "measure_on_hpu": True,
    "dynamic_quantization": False,
    "row_parallel_linear_allreduce_quantization": False,
    "calibration_sample_interval": 0,
    "mod_dict": {},
}
BOOLEANS = [key for key, value in DEFAULTS.items() if isinstance(value, bool)]
DYNAMIC = "act_maxabs_pcs_pow2_weight_maxabs_pts_pow2_hw"
KNOWN_NAMES = {
    "maxabs_measure": "MEASURE",
    "maxabs_measure_include_outputs": "MEASURE",
    "maxabs_quant": "maxabs_hw",
    "maxabs_quant_mixtral": "maxabs_hw",
    "maxabs_quant_phi": "maxabs_hw",
    "maxabs_quant_gemma": "maxabs_hw",
    "maxabs_quant_arbitrary": "maxabs_arbitrary",
    "maxabs_quant_scalar_scales": "maxabs_hw",
    "maxabs_quant_qdq": "maxabs_hw",
    "maxabs_quant_dynamic_quantization": DYNAMIC,
    "maxabs_quant_dynamic_quantization_all_layers": DYNAMIC,
    "maxabs_quant_dynamic_quantization_weight_pcs_pow2": "maxabs_pcs_pow2",
    "unit_scale_quant": "unit_scale",
    "pow2_quant": "maxabs_pow2",
    "weight_opt_quant": "maxabs_hw_opt_weight",
    "act_maxabs_pow2_weights_pcs_opt_pow2_quant": "act_maxabs_pow2_weights_pcs_opt_pow2",
}


@pytest.mark.parametrize("key", DEFAULTS)
def test_every_key_has_the_toolkits_default(key):
    assert getattr(quant_config({}), key) == DEFAULTS[key]


def test_the_default_scale_method_is_maxabs_hw():
    assert quant_config({}).scale_method.default.name == "maxabs_hw"
    assert quant_config({}) == QuantConfig()


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("mode", "measure", "MEASURE"),
        ("mode", "Auto", "AUTO"),
        ("observer", "MAXABS_PER_CHANNEL", "maxabs_per_channel"),
        ("measure_exclude", "none", "NONE"),
        ("fp8_config", "e5m2", "E5M2"),
        ("hp_dtype", "fp32", "FP32"),
        ("scale_format", "const", "CONST"),
        ("device_for_scales", "gaudi2", "GAUDI2"),
    ],
)
def test_words_are_matched_without_regard_to_case(key, value, expected):
    assert getattr(quant_config({key: value}), key) == expected


@pytest.mark.parametrize("key", BOOLEANS)
def test_booleans_may_be_text(key):
    extra = {"scale_method": DYNAMIC} if key == "dynamic_quantization" else {}
    assert getattr(quant_config({key: "True", **extra}), key) is True
    assert getattr(quant_config({key: "False"}), key) is False
    said = rf"Invalid '{key}' value in custom config \('yes'\). Enter one of \['TRUE', 'FALSE'\]"
    with pytest.raises(UsageError, match=said):
        quant_config({key: "yes"})


@pytest.mark.parametrize(
    "key",
    [
        "mode",
        "observer",
        "measure_exclude",
        "fp8_config",
        "hp_dtype",
        "scale_format",
        "device_for_scales",
    ],
)
def test_a_bad_word_is_told_in_the_toolkits_own_words(key):
    with pytest.raises(
        UsageError, match=rf"Invalid '{key}' value in custom config \('nonsense'\). Enter one of \["
    ):
        quant_config({key: "nonsense"})


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ({"mod_dict": {"a": 1}}, "mod_dict: is not empty"),
        ({"calibration_sample_interval": -1}, "Invalid 'calibration_sample_interval'"),
        ({"calibration_sample_interval": True}, "Invalid 'calibration_sample_interval'"),
        ({"dump_stats_path": ""}, "Invalid 'dump_stats_path'"),
        (
            {"dump_stats_path": "", "mode": "MEASURE", "scale_method": "unit_scale"},
            "Invalid 'dump_stats_path'",
        ),
        ({"dump_stats_path": 3, "scale_method": "unit_scale"}, "Invalid 'dump_stats_path'"),
        ({"scale_params": []}, "Invalid 'scale_params'"),
        ({"scale_method": "maxabs"}, r"Invalid 'scale_method' value in custom config \('maxabs'\)"),
        (
            {"scale_method": {"nodes": {}}},
            "Scale method config should contain a default scale method",
        ),
        ({"scale_method": DYNAMIC}, "without dynamic_quantization"),
        ({"dynamic_quantization": True}, "dynamic_quantization with scale method maxabs_hw"),
        (
            {"dynamic_quantization": True, "scale_method": DYNAMIC, "mode": "MEASURE"},
            "dynamic_quantization with mode MEASURE",
        ),
        (
            {"dynamic_quantization": True, "scale_method": DYNAMIC, "use_qdq": True},
            "use_qdq or fake_quant",
        ),
        (
            {"dynamic_quantization": True, "scale_method": DYNAMIC, "fake_quant": "True"},
            "use_qdq or fake_quant",
        ),
        (
            {
                "dynamic_quantization": True,
                "scale_method": DYNAMIC,
                "row_parallel_linear_allreduce_quantization": True,
            },
            "row_parallel",
        ),
        ({"whitelist": {}, "allowlist": {}}, "whitelist and allowlist are the same key"),
        ({"blocklist": []}, "blocklist: .* is no table"),
        ({"blocklist": {"names": "lm_head"}}, "blocklist.names: 'lm_head' is no list"),
        ({"allowlist": {"modules": []}}, "allowlist: key 'modules'"),
    ],
)
def test_values_that_contradict_are_refused(table, said):
    with pytest.raises(UsageError, match=said):
        quant_config(table)


def test_old_names_of_the_lists_are_read_and_unknown_keys_are_kept():
    config = quant_config(
        {
            "whitelist": {"types": ["Linear"]},
            "blacklist": {"names": ["lm_head"]},
            "method": "HOOKS",
            "dump_stats_xlsx_path": "x",
            "world_size": 8,
        }
    )
    assert config.allowlist == ModuleList(types=("Linear",)) and config.blocklist == ModuleList(
        names=("lm_head",)
    )
    assert dict(config.unknown) == {"method": "HOOKS", "dump_stats_xlsx_path": "x"}


@pytest.mark.parametrize(
    ("table", "expected"),
    [
        ({}, "SCALAR"),
        ({"scale_format": "CONST"}, "CONST"),
        ({"scale_method": "act_maxabs_hw_weights_pcs_maxabs_pow2"}, "CONST"),
        ({"fake_quant": True}, "CONST"),
        ({"dynamic_quantization": True, "scale_method": DYNAMIC}, "CONST"),
    ],
)
def test_scales_per_channel_fake_quant_and_dynamic_force_const(table, expected):
    assert quant_config(table).effective_scale_format == expected


def test_the_dictionary_form_forces_scales_to_be_derived_again():
    part = {
        "granularity": "PTS",
        "scale_value_type": "FIXED_VALUE",
        "rounding_method": "SCALE_UNIT",
    }
    config = quant_config({"scale_method": {"default": {"weight": part, "activation": part}}})
    assert config.effective_recalc_scales and not quant_config({}).effective_recalc_scales
    assert config.spelled_scale_method["default"]["weight"]["rounding_method"] == "SCALE_UNIT"
    assert quant_config({}).spelled_scale_method == "maxabs_hw"


def test_scales_of_gaudi2_on_gaudi3_need_maxabs_hw():
    assert quant_config({"device_for_scales": "GAUDI2"}).scale_device("gaudi3") == "gaudi2"
    assert quant_config({"device_for_scales": "GAUDI3"}).scale_device("gaudi3") == "gaudi3"
    assert quant_config({}).scale_device("gaudi2") == "gaudi2"
    for table, device in (
        ({"device_for_scales": "GAUDI3"}, "gaudi2"),
        ({"device_for_scales": "GAUDI2", "scale_method": "maxabs_pow2"}, "gaudi3"),
        ({"device_for_scales": "GAUDI2"}, "cpu"),
    ):
        with pytest.raises(UsageError, match="device_for_scales"):
            quant_config(table).scale_device(device)


PATHS = [
    "model.layers.2.mlp.up_proj",
    "model.layers.29.mlp.up_proj",
    "model.layers.2.self_attn.q_proj",
    "lm_head",
]


def chosen(allow=None, block=None, layer_type="Linear") -> list[str]:
    lists = {
        "allow": module_list("allowlist", allow or {}),
        "block": module_list("blocklist", block or {}),
    }
    return [path for path in PATHS if selected(path, layer_type, **lists)]


@pytest.mark.parametrize(
    ("allow", "block", "expected"),
    [
        (None, None, PATHS),
        ({"names": [], "types": []}, {"names": [], "types": []}, PATHS),
        ({"names": ["mlp"]}, None, PATHS[:2]),
        ({"types": ["Linear"]}, None, PATHS),
        ({"types": ["Matmul"]}, None, []),
        ({"types": ["Matmul"], "names": ["lm_"]}, None, ["lm_head"]),
        (None, {"names": ["self_attn", "head$"]}, PATHS[:2]),
        (None, {"types": ["Linear"]}, []),
        ({"names": ["mlp"]}, {"names": ["layers\\.2\\."]}, ["model.layers.29.mlp.up_proj"]),
        (None, {"names": [r"layers\.(29|30|31)\."]}, [PATHS[0], *PATHS[2:]]),
        (None, {"names": ["layers.2"]}, ["lm_head"]),  # found anywhere: 29 as well
    ],
)
def test_lists_are_searched_and_the_blocklist_wins(allow, block, expected):
    assert chosen(allow, block) == expected


@pytest.mark.parametrize(
    ("pattern", "means", "write"),
    [
        (
            r"layers\.[29-31]\.w2",
            "'2', '1' and the range 9-3, which runs backwards",
            r"layers\\.(29|30|31)\\.w2",
        ),
        ("[10-12]", "'1', '2', and '0' to '1'", "(10|11|12)"),
        ("w[0-31]", "'1', and '0' to '3'", "w(0|1|2|"),
        ("[1-9999]", "'9', and '1' to '9'", r"\\d+"),
    ],
)
def test_brackets_around_numbers_are_explained_not_obeyed(pattern, means, write):
    with pytest.raises(UsageError) as caught:
        module_list("blocklist", {"names": ["fine", pattern]})
    cause = caught.value.cause
    assert (
        f"blocklist.names: pattern {pattern!r}" in cause
        and "is one character, not a number" in cause
    )
    assert means in cause and write in caught.value.remedy


def test_the_pattern_that_is_proposed_means_those_numbers():
    with pytest.raises(UsageError) as caught:
        module_list("blocklist", {"names": [r"layers\.[29-31]\."]})
    proposed = re.search(r"write '(.*)'$", caught.value.remedy)[1].replace("\\\\", "\\")
    found = [number for number in range(40) if re.search(proposed, f"model.layers.{number}.mlp")]
    assert found == [29, 30, 31]


@pytest.mark.parametrize("pattern", ["[0-9]", "[1-3]", "[a-z]+", "[0-35-9]", "x{2,3}"])
def test_ordinary_classes_are_obeyed(pattern):
    assert module_list("blocklist", {"names": [pattern]}).names == (pattern,)
    assert as_table(module_list("blocklist", {"names": [pattern]})) == {
        "types": [],
        "names": [pattern],
    }


def test_a_pattern_that_is_none_is_refused():
    with pytest.raises(UsageError, match=r"pattern '\(' is no regular expression"):
        module_list("blocklist", {"names": ["("]})


@pytest.mark.parametrize("name", KNOWN_NAMES)
def test_the_presets_are_shipped_under_their_known_names(name):
    for spelled in (name, f"{name}.json"):
        config = read_quant_config(find_quant_config(spelled))
    assert KNOWN_NAMES[name] in (config.mode, config.scale_method.default.name)
    files = "" if config.dynamic_quantization else "./hqt_output/measure"
    assert config.dump_stats_path == files and set(config.unknown) == {"method"}


def test_no_other_preset_is_shipped_and_what_is_special_about_some():
    assert {path.stem for path in (SHIPPED / "gaudi").iterdir()} == set(KNOWN_NAMES)
    blocked = {
        name: read_quant_config(find_quant_config(name)).blocklist.names for name in KNOWN_NAMES
    }
    assert blocked["maxabs_quant_mixtral"] == ("self_attn",)
    assert blocked["maxabs_quant_phi"] == ("matmul_qk", "matmul_av", "lm_head")
    dynamic = read_quant_config(find_quant_config("maxabs_quant_dynamic_quantization"))
    assert dynamic.blocklist.types == ("Matmul", "B2BMatmul", "KVCache", "VLLMKVCache")
    assert read_quant_config(find_quant_config("maxabs_quant_qdq")).use_qdq
    assert (
        read_quant_config(find_quant_config("maxabs_measure_include_outputs")).measure_exclude
        == "NONE"
    )


def test_files_that_are_not_there_or_no_json_are_told(tmp_path):
    with pytest.raises(
        UsageError, match="QUANT_CONFIG: Can't open maxabs_qant.json!.*did you mean 'maxabs_quant'"
    ):
        find_quant_config("maxabs_qant.json")
    path = tmp_path / "a.json"
    path.write_text("{")
    with pytest.raises(InputError, match="QUANT_CONFIG: Can't load .*a.json!"):
        read_quant_config(path)
    path.write_text("[]")
    with pytest.raises(UsageError, match="a table is needed"):
        read_quant_config(path)
    path.write_text(json.dumps({"mode": "x"}))
    with pytest.raises(UsageError, match=r"QUANT_CONFIG .*a\.json: Invalid 'mode'"):
        read_quant_config(path)


@pytest.mark.parametrize("verb", VERBS)
def test_a_mode_that_contradicts_the_verb_is_refused(verb):
    for mode in ("NONE", "QUANTIZE", "MEASURE", "SHAPE", "LOAD", "AUTO"):
        config = quant_config({"mode": mode})
        if mode in ("AUTO", VERBS[verb]):
            require_mode(config, verb)
        else:
            with pytest.raises(
                UsageError,
                match=f"{verb}: QUANT_CONFIG has mode {mode}, {verb} needs {VERBS[verb]}",
            ):
                require_mode(config, verb)


@pytest.mark.parametrize("observer", ["save", "shape"])
def test_measure_refuses_observers_that_keep_no_maxima(observer):
    with pytest.raises(UnsupportedError, match=f"observer {observer}"):
        require_mode(quant_config({"mode": "MEASURE", "observer": observer}), "measure")


def test_keys_without_meaning_are_those_that_were_given_differ_from_the_default_and_are_not_used():
    config = quant_config(
        {"methods": "HOOKS", "measure_on_hpu": False, "hp_dtype": "FP32", "recalc_scales": False}
    )
    assert without_meaning(config, "quantize") == ["measure_on_hpu", "methods"]
    assert without_meaning(config, "export") == ["measure_on_hpu", "methods"]
    stored = {"method": "HOOKS", "dump_stats_xlsx_path": "a.xlsx", "quantize_weight": True}
    # in the toolkit's own files, which need no remark
    assert without_meaning(quant_config(stored), "export") == []
    assert without_meaning(quant_config({}), "measure") == []


def test_the_variable_counts_when_it_is_not_empty(monkeypatch):
    monkeypatch.delenv("QUANT_CONFIG", raising=False)
    assert quant_config_variable() is None
    monkeypatch.setenv("QUANT_CONFIG", "")
    assert quant_config_variable() is None
    monkeypatch.setenv("QUANT_CONFIG", "a.json")
    assert quant_config_variable() == "a.json"
