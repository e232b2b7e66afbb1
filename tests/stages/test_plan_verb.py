"""`quantflow plan`: numbers from headers and recipe, compared with what a run then makes."""

import json
import math
import shutil
from pathlib import Path

import pytest

from quantflow import cpu_threads
from quantflow.core.scheme import preset, with_group_size
from quantflow.exporting import export as export_stage
from quantflow.files import checkpoint as checkpoint_module
from quantflow.models import reading
from quantflow.models.graph import UNTRACED, Graph, Layer, LinearGroup
from quantflow.planning.card_splits import cut_columns, obstacles
from quantflow.planning.forecast import spans
from quantflow.planning.sizes import ModelSize
from tests.shared import run


@pytest.fixture
def planned(capsys):
    """Plan, and return the JSON document."""

    def plan(*arguments):
        capsys.readouterr()
        assert run("plan", *arguments, "--json") == 0, capsys.readouterr().err
        return json.loads(capsys.readouterr().out)

    return plan


def stages_of(plan):
    return [(stage["stage"], stage["artifact"]) for stage in plan["stages"]]


def test_a_plan_names_stages_in_order_and_reads_no_weight(planned, llama, monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("a weight was read")

    monkeypatch.setattr(reading, "read_into", refuse)
    found = planned(llama, "--for", "W4A16:gptq,FP8_DYNAMIC", "--set", "quantize.0.group_size=32")
    assert stages_of(found) == [
        ("measure", None),
        ("quantize", "w4a16-gptq"),
        ("export", "w4a16-gptq"),
        ("quantize", "fp8_dynamic"),
        ("export", "fp8_dynamic"),
    ]
    assert [artifact["path"] for artifact in found["artifacts"]] == [
        "layer by layer",
        "file to file",
    ]
    assert found["calibration"] == {"samples": 128, "sequence_length": 128, "observers": []}
    assert found["total"]["seconds"] is None


def test_the_word_of_quantize_is_read_and_said(planned, llama, capsys):
    one, other = (planned(llama, word, "W8A16:hqq") for word in ("--scheme", "--for"))
    assert one["artifacts"] == other["artifacts"] and stages_of(one) == stages_of(other)
    assert run("plan", llama, "--scheme", "W8A16") == 0
    assert capsys.readouterr().err == "plan: --scheme W8A16 is read as --for W8A16\n"
    assert run("plan", llama, "--scheme", "W8A16", "--for", "FP8") == 2
    assert "--for FP8 beside --scheme W8A16" in capsys.readouterr().err


def test_what_needs_no_statistics_needs_no_measurement(planned, llama):
    assert stages_of(planned(llama, "--for", "FP8_DYNAMIC")) == [
        ("quantize", "fp8_dynamic"),
        ("export", "fp8_dynamic"),
    ]


def test_observers_are_those_that_the_schemes_need(planned, llama):
    assert planned(llama, "--for", "FP8,W8A8")["calibration"]["observers"] == [
        "amax",
        "channel_amax",
    ]
    assert planned(llama, "--for", "W8A8_STATIC")["calibration"]["observers"] == [
        "channel_amax",
        "min_max",
    ]


@pytest.mark.parametrize(
    "scheme", ["FP8_DYNAMIC", "FP8_BLOCK", "W8A16", "W4A8", "W3A16_ASYM", "W2A16"]
)
def test_the_bytes_of_the_artifact_are_those_that_export_writes(
    planned, llama, tmp_path, monkeypatch, scheme
):
    monkeypatch.setattr(export_stage, "_prove", lambda *_: {})  # a fresh process: test_verbs has it
    groups = preset(scheme).weights.group_size is not None
    options = ("--scheme", scheme, "--algorithm", "rtn", *(("--group-size", 32) if groups else ()))
    (artifact,) = planned(
        llama, "--for", f"{scheme}:rtn", *(("--set", "quantize.0.group_size=32") if groups else ())
    )["artifacts"]
    assert run("quantize", "--no-export", llama, "-o", tmp_path / "quantized", *options) == 0
    assert run("export", tmp_path / "quantized", "-o", tmp_path / "artifact") == 0
    written = sum(path.stat().st_size for path in (tmp_path / "artifact").iterdir())
    weights = (tmp_path / "artifact" / "model.safetensors").stat().st_size
    header = 8 + int.from_bytes(
        (tmp_path / "artifact" / "model.safetensors").read_bytes()[:8], "little"
    )
    assert artifact["tensor_bytes"] == weights - header
    # of a model whose weights are 200 kB
    assert artifact["output_bytes"] == pytest.approx(written, rel=0.05)


def test_bits_and_coverage_are_those_worked_out_by_hand(planned, llama):
    (artifact,) = planned(llama, "--for", "W8A16")["artifacts"]
    rows, columns = [64, 32, 32, 64, 128, 128, 64], [64, 64, 64, 64, 64, 64, 128]
    weights = sum(r * c for r, c in zip(rows, columns, strict=True))
    # int8, a bf16 scale per row, two int64 of shape per linear
    stored = 8 * (weights + 2 * sum(rows) + 7 * 16)
    assert artifact["bits_per_weight"] == pytest.approx(stored / weights)
    total = 2 * weights + 2 * 2 * 64 + 64 + 320 * 64 * 2
    assert artifact["coverage"]["weights"] == pytest.approx(2 * weights / total)
    row = next(row for row in artifact["schemes"] if row["tensors"].endswith("down_proj"))
    assert (row["tensors"], row["shape"], row["count"]) == (
        "model.layers.{0-1}.mlp.down_proj",
        [64, 128],
        2,
    )
    assert (row["bytes_before"], row["bytes_after"]) == (
        2 * 2 * 64 * 128,
        2 * (64 * 128 + 2 * 64 + 16),
    )


@pytest.mark.parametrize(
    ("scheme", "bits"), [("W3A16_ASYM", 3 + 16 / 32 + 3 / 32), ("W2A16", 2 + 16 / 32)]
)
def test_few_bits_are_dense_in_weights_and_zero_points(planned, llama, scheme, bits):
    (artifact,) = planned(llama, "--for", f"{scheme}:rtn", "--set", "quantize.0.group_size=32")[
        "artifacts"
    ]
    weights = sum(
        r * c for r, c in [(64, 64), (32, 64), (32, 64), (64, 64), (128, 64), (128, 64), (64, 128)]
    )
    # 128 bits of shape per linear
    assert artifact["bits_per_weight"] == pytest.approx(bits + 7 * 128 / weights)


def test_a_stage_that_does_not_fit_is_marked_and_the_others_are_planned(planned, llama, capsys):
    found = planned(llama, "--for", "FP8_DYNAMIC", "--max-memory", "100MB")
    assert all("--max-memory 100MB" in stage["refused"] for stage in found["stages"])
    assert found["artifacts"][0]["output_bytes"] > 0
    assert run("plan", llama, "--for", "FP8_DYNAMIC", "--max-memory", "100MB") == 0
    assert "does not fit: quantize: needs" in capsys.readouterr().out


def test_a_smaller_limit_takes_a_worker(planned, llama, monkeypatch):
    monkeypatch.setattr(cpu_threads, "usable_cores", lambda: 2)
    wide = planned(llama, "--for", "FP8")["stages"][0]
    limit = wide["peak_memory"] - 1
    narrow = planned(llama, "--for", "FP8", "--max-memory", f"{limit}B")["stages"][0]
    assert (wide["workers"], narrow["workers"]) == (2, 1) and narrow["peak_memory"] <= limit
    assert narrow["scratch"] == wide["scratch"]


def test_hidden_states_are_no_memory_but_disk(planned, llama):
    few, many = (
        planned(llama, "--for", "FP8", "--samples", samples)["stages"][0]
        for samples in ("128", "256")
    )
    assert many["peak_memory"] == few["peak_memory"] and many["scratch"] > few["scratch"]


def test_a_probe_says_how_long_it_takes(planned, llama):
    found = planned(
        llama, "--for", "W4A16:gptq,FP8_DYNAMIC", "--probe", "--set", "quantize.0.group_size=32"
    )
    seconds = [stage["seconds"] for stage in found["stages"]]
    assert all(math.isfinite(each) and each >= 0 for each in seconds) and sum(seconds) > 0
    assert found["total"]["seconds"] == pytest.approx(sum(seconds))


def test_a_plan_for_a_gpu_that_is_not_here_has_seconds_by_card_and_bytes_of_a_token(
    planned, llama, capsys
):
    words = (llama, "--for", "W4A16:gptq,W4A16:yaqa", "--set", "quantize.0.group_size=32")
    words += ("--set", "quantize.1.group_size=32")
    here, there = planned(*words), planned(*words, "--device", "cuda")
    assert not any("cards" in stage for stage in here["stages"])
    assert not any("token" in artifact for artifact in here["artifacts"])
    assert there["total"]["seconds"] is None  # no card is here
    for stage in there["stages"]:
        # yaqa rounds in host memory
        of_host = (stage["stage"], stage["artifact"]) == ("quantize", "w4a16-yaqa")
        assert (stage["cards"] == {}) == of_host
        assert all(math.isfinite(each) and each > 0 for each in stage["cards"].values())
    (gptq, _) = there["artifacts"]
    token = gptq["token"]
    assert token["tokens_per_second"]["H100"] == pytest.approx(3.35e12 / token["weights"])
    # everything but the embedding and the last norm is read for a token
    embedding, norm = 320 * 64 * 2, 64 * 2
    assert token["weights"] == gptq["tensor_bytes"] - embedding - norm
    assert run("plan", *words, "--device", "cuda") == 0
    out = capsys.readouterr().out
    assert "H100" in out and "a decoded token reads" in out and "--probe times" in out


def test_the_tables_say_what_a_person_asks(llama, capsys):
    assert run("plan", llama, "--for", "FP8_DYNAMIC") == 0
    out = capsys.readouterr().out
    assert "llama, 2 layers" in out and "fp8_dynamic: FP8_DYNAMIC by rtn, file to file" in out
    assert (
        "model.layers.{0-1}.self_attn.q_proj" in out
        and "tensor parallel 2: every head, row and group divides" in out
    )


def test_a_recipe_is_planned_as_run_would_run_it(planned, llama, text_files, tmp_path):
    recipe = tmp_path / "r.yaml"
    recipe.write_text(
        f"model: {llama}\ncalibration: {{source: {text_files['calibration']}, samples: 4, "
        "sequence_length: 32}\n"
        "quantize: [{name: a, scheme: FP8}, {name: b, scheme: FP8_DYNAMIC}]\n"
        f"validate: {{text: {text_files['heldout']}, tokens: 256, sequence_length: 64}}\n"
    )
    found = planned(recipe)
    assert stages_of(found) == [("measure", None)] + [
        (s, a) for a in "ab" for s in ("quantize", "export", "validate")
    ]
    assert found["calibration"] == {"samples": 4, "sequence_length": 32, "observers": ["amax"]}
    assert found["stages"][0]["scratch"] >= 2 * 4 * 64 * 4 * 32


@pytest.mark.parametrize(
    ("arguments", "code", "told"),
    [
        (("--for", "W7A16"), 2, "W7A16"),
        (("--for", "FP8,FP8"), 2, "2 of them, 1 different"),
        (("--for", ""), 2, "0 of them"),
        (("--for", "FP8:hqq"), 2, "hqq chooses integers"),
        (("--max-memory", "much"), 2, "size 'much'"),
    ],
)
def test_mistakes_are_told(llama, capsys, arguments, code, told):
    assert run("plan", llama, *arguments) == code
    assert told in capsys.readouterr().err


def test_a_config_without_its_sizes_is_refused(llama, tmp_path, capsys):
    copy = shutil.copytree(llama, tmp_path / "model")
    config = json.loads((copy / "config.json").read_text())
    del config["hidden_size"]
    (copy / "config.json").write_text(json.dumps(config))
    assert run("plan", copy, "--for", "FP8_DYNAMIC") == 3
    assert "hidden_size is None" in capsys.readouterr().err


def test_a_recipe_and_schemes_beside_it_are_refused(capsys):
    assert run("plan", "tiny-llama", "--for", "FP8") == 2
    assert "beside recipe" in capsys.readouterr().err


def test_indices_are_shortened_to_spans():
    assert [spans(i) for i in ([3], [0, 1, 2], [0, 1, 4, 6, 7])] == ["3", "{0-2}", "{0-1,4,6-7}"]


def model_with(heads, kv_heads, rows, columns):
    """A model of one layer.

    `up` stands behind a norm, [rows, 64], and `down` behind none, [64, columns].
    """
    groups = (LinearGroup(linears=("up",), norm="n"), LinearGroup(linears=("down",)))
    layer = Layer(index=0, prefix="", attention="", groups=groups)
    shapes = {"up.weight": (rows, 64), "down.weight": (64, columns)}
    infos = {
        name: checkpoint_module.TensorInfo(
            name=name, dtype="BF16", shape=shape, offset=0, nbytes=2 * shape[0] * shape[1]
        )
        for name, shape in shapes.items()
    }
    sizes = {
        "hidden": 64,
        "between": 64,
        "vocabulary": 1,
        "head_dim": 1,
        "layers": (),
        "outside": 0,
        "head": (0, 0),
    }
    return ModelSize(heads=heads, kv_heads=kv_heads, tied=False, infos=infos, **sizes), Graph(
        family=UNTRACED["llama"], layers=(layer,)
    )


@pytest.mark.parametrize(
    ("shape", "scheme", "size", "found"),
    [
        ((8, 8, 64, 1024), "W4A16", 8, []),
        ((8, 2, 64, 1024), "W4A16", 8, []),  # two key heads are copied to eight cards
        ((8, 3, 64, 1024), "W4A16", 8, ["config.json: num_key_value_heads"]),
        (
            (6, 6, 64, 1024),
            "FP8_DYNAMIC",
            4,
            ["config.json: num_attention_heads", "config.json: num_key_value_heads"],
        ),
        ((8, 8, 66, 1024), "FP8_DYNAMIC", 4, ["up"]),
        ((8, 8, 64, 1022), "FP8_DYNAMIC", 4, ["down"]),
        ((8, 8, 64, 512), "W4A16", 8, ["down"]),  # 64 columns a card, groups of 128
        ((8, 8, 256, 256), "FP8_BLOCK", 2, []),
        ((8, 8, 192, 256), "FP8_BLOCK", 2, ["up"]),  # 96 rows a card, blocks of 128
        ((8, 8, 192, 256), "FP8_BLOCK", 1, []),
        ((8, 8, 64, 72), "W8A16", 4, ["down"]),  # 18 columns a card, four to a word
        ((8, 8, 64, 72), "FP8_DYNAMIC", 4, []),
        ((7, 7, 63, 129), "FP8_DYNAMIC", 1, []),
    ],
)
def test_what_does_not_divide_over_cards_is_named(shape, scheme, size, found):
    model, graph = model_with(*shape)
    schemes = dict.fromkeys(("up", "down"), preset(scheme))
    assert [name for name, _ in obstacles(model, graph, schemes, size)] == found


@pytest.mark.parametrize(
    ("scheme", "group_size", "columns", "size", "why"),
    [
        ("W3A16", 16, 64, 2, None),
        ("W3A16", 16, 64, 4, "64 columns over 4 are 16, 3 words hold 32"),
        ("W3A16", 32, 192, 4, "192 columns over 4 are 48, groups have 32"),
        ("W2A16", 8, 64, 4, None),
        ("W2A16", 8, 64, 8, "64 columns over 8 are 8, a word holds 16"),
        ("W4A8", 4, 48, 4, "48 columns over 4 are 12, a word holds 8"),
    ],
)
def test_columns_are_cut_where_words_begin(scheme, group_size, columns, size, why):
    assert cut_columns(columns, size, with_group_size(preset(scheme), group_size)) == why


def test_a_group_size_is_that_of_every_scheme_with_groups(planned):
    model = Path(__file__).resolve().parents[2] / "examples" / "tiny-llama"
    schemes = ("--for", "W4A16:gptq,W3A16:rtn,FP8_DYNAMIC")
    found, usual = planned(model, *schemes, "--group-size", "32"), planned(model, *schemes)
    bits, before = (
        [artifact["bits_per_weight"] for artifact in told["artifacts"]] for told in (found, usual)
    )
    more = 16 / 32 - 16 / 128  # a bfloat16 scale for 32 weights instead of 128
    assert [a - b for a, b in zip(bits, before, strict=True)] == pytest.approx([more, more, 0])


def test_a_scheme_that_does_not_fit_is_named_and_the_others_are_planned(planned, llama, capsys):
    plan = planned(llama)  # inputs of 64
    (left,) = plan["left_out"]
    assert left["name"] == "fp8_block" and "in_features=64" in left["cause"]
    assert left["fix"].startswith("choose a scheme without blocks, such as FP8_DYNAMIC")
    assert "fp8_block" not in [artifact["name"] for artifact in plan["artifacts"]]
    assert len(plan["artifacts"]) > 5
    assert run("plan", llama) == 0
    assert "not planned: fp8_block: model.layers.0." in capsys.readouterr().out
    assert run("plan", llama, "--for", "FP8_BLOCK,FP8") == 2  # asked for by name
    assert "error: fp8_block: model.layers.0." in capsys.readouterr().err
