"""A folder's content as plain data."""

import json
import struct

import pytest

from quantflow.errors import InputError, IntegrityError
from quantflow.files.inspect import summarize
from quantflow.files.ledger import Ledger, LedgerEntry
from quantflow.files.manifest import build_manifest, write_manifest

SIZES = {"U8": 1, "F16": 2}


def tensors_file(path, tensors):
    entries, begin = {}, 0
    for name, (dtype, count) in tensors.items():
        end = begin + count * SIZES[dtype]
        entries[name] = {"dtype": dtype, "shape": [count], "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(entries).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(begin))


@pytest.fixture
def model(tmp_path):
    (tmp_path / "config.json").write_text(
        '{"model_type": "llama", "architectures": ["LlamaForCausalLM"]}'
    )
    tensors_file(tmp_path / "model.safetensors", {"a": ("U8", 3), "b": ("F16", 4), "c": ("F16", 1)})
    return tmp_path


BODY = {
    "kind": "artifact",
    "source": {"name": "tiny", "revision": None, "files": {}},
    "recipe": {
        "name": "a",
        "scheme": "W8A16",
        "resolved": {"algorithm": "rtn", "transforms": [], "schemes": {}},
    },
    "measurement": None,
    "float8": None,
    "layers": [],
    "proof": {"kind": "canary", "layers": 0, "digest": "0" * 64},
    "tools": {},
    "made_from": "0" * 64,
}


def measurement(folder):
    folder.mkdir(parents=True)
    record = {
        "kind": "measurement",
        "layout_version": 1,
        "observers": ["amax"],
        "tensors": {"q": {"kind": "replicated"}, "k": {"kind": "replicated"}, "o": {"kind": "row"}},
    }
    (folder / "measurement.json").write_text(json.dumps(record))
    tensors_file(
        folder / "statistics.safetensors", {f"{name}|input|amax": ("F16", 1) for name in "qk"}
    )
    return folder


def test_a_model_is_summarized_from_its_headers(model):
    summary = summarize(model)
    assert summary["kind"] == "checkpoint"
    assert (summary["model_type"], summary["architectures"]) == ("llama", ["LlamaForCausalLM"])
    assert (summary["tensors"], summary["bytes"]) == (3, 13)
    assert summary["dtypes"] == {
        "F16": {"tensors": 2, "bytes": 10},
        "U8": {"tensors": 1, "bytes": 3},
    }
    assert list(summary["dtypes"]) == ["F16", "U8"]
    assert summary["files"] == ["config.json", "model.safetensors"]
    assert summary["quant_method"] is None


def test_an_artifact_is_summarized_with_what_became_of_its_source(model):
    config = {
        "quantization_config": {"quant_method": "compressed-tensors", "format": "pack-quantized"}
    }
    (model / "config.json").write_text(json.dumps(config))
    rows = [("a", "copied", ("a",)), ("b", "quantized", ("b", "c")), ("d", "dropped", ())]
    entries = tuple(
        LedgerEntry(
            name=name,
            dtype="U8",
            shape=(26,),
            nbytes=26,
            action=action,
            reason="why",
            becomes=becomes,
        )
        for name, action, becomes in rows
    )
    body = {
        **BODY,
        "ledger": Ledger(tensors=entries).to_json(),
        "layers": [{"errors": {}, "decisions": {}}],
    }
    manifest = build_manifest(model, body=body)
    write_manifest(model, manifest)
    summary = summarize(model)
    assert (summary["kind"], summary["digest"]) == ("artifact", manifest["digest"])
    assert (summary["quant_method"], summary["format"]) == ("compressed-tensors", "pack-quantized")
    assert summary["source_bytes"] == {
        "source": 78,
        "quantized": 26,
        "copied": 26,
        "changed": 0,
        "dropped": 26,
    }
    assert summary["fraction_of_source"] == pytest.approx(13 / 78)
    assert summary["actions"] == [
        {"action": action, "reason": "why", "tensors": 1}
        for action in ("copied", "dropped", "quantized")
    ]
    assert summary["layers"] == 1
    (model / "quantflow.json").write_bytes(b"{}\n")
    with pytest.raises(IntegrityError, match=r"quantflow\.json"):
        summarize(model)


def test_a_measurement_is_summarized_with_its_statistics_counted(tmp_path):
    summary = summarize(measurement(tmp_path / "rank"))
    assert (summary["kind"], summary["observers"]) == ("measurement", ["amax"])
    assert summary["tensors"] == {"replicated": 2, "row": 1}
    assert summary["statistics"] == {"input|amax": 2}
    assert summary["bytes"] == 4


def test_a_folder_of_ranks_is_summarized_rank_by_rank(tmp_path):
    for rank in (0, 1):
        measurement(tmp_path / f"rank-00{rank}-of-002")
    (tmp_path / "rank-notes").mkdir()
    summary = summarize(tmp_path)
    assert summary["kind"] == "measurements"
    assert list(summary["ranks"]) == ["rank-000-of-002", "rank-001-of-002"]


def test_a_summary_is_plain_data(model):
    assert json.loads(json.dumps(summarize(model))) == summarize(model)


@pytest.mark.parametrize("text", ["[]", "{}", '{"kind": "artifact"}', "{"])
def test_a_record_that_is_not_of_a_measurement_is_refused(tmp_path, text):
    (tmp_path / "measurement.json").write_text(text)
    with pytest.raises(InputError, match=r"measurement\.json"):
        summarize(tmp_path)


@pytest.mark.parametrize(
    ("routed", "found"),
    [
        (5, None),
        ({"a": 5}, {}),
        ({"a": {"least": 1}}, {"a": {"least": 1, "median": None}}),
        ({"a": {}}, {"a": {"least": None, "median": None}}),
    ],
)
def test_a_ledger_of_experts_that_is_none_is_left_out_or_has_holes(tmp_path, routed, found):
    path = measurement(tmp_path / "rank") / "measurement.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"routed": routed}))
    assert summarize(tmp_path / "rank").get("tokens_per_expert") == found


def test_experts_of_an_artifact_that_no_token_was_counted_for_are_summarized(model):
    experts = {"experts": "e", "fed": "all", "tokens": [], "short": {}}
    layers = [{"errors": {}, "decisions": {}, "experts": experts}]
    entries = tuple(
        LedgerEntry(
            name=name,
            dtype=dtype,
            shape=(count,),
            nbytes=count * SIZES[dtype],
            action="copied",
            reason="r",
            becomes=(name,),
        )
        for name, (dtype, count) in {"a": ("U8", 3), "b": ("F16", 4), "c": ("F16", 1)}.items()
    )
    body = {**BODY, "layers": layers, "ledger": Ledger(tensors=entries).to_json()}
    write_manifest(model, build_manifest(model, body=body))
    assert summarize(model)["experts"] == {"e": {"fed": "all", "short": 0}}


def test_a_folder_that_is_none_of_these_is_refused(tmp_path):
    with pytest.raises(InputError, match="empty"):
        summarize(tmp_path)
    with pytest.raises(InputError, match="missing"):
        summarize(tmp_path / "missing")


IR = """<?xml version="1.0"?>
<net name="Model0" version="11">
\t<layers>
\t\t<layer id="0" name="input_ids" type="Parameter" version="opset1">
\t\t\t<data shape="?,?" element_type="i64" />
\t\t</layer>
\t\t<layer id="1" name="self.model.a.weight" type="Const" version="opset1">
\t\t\t<data element_type="i4" shape="2, 2, 8" offset="0" size="16" />
\t\t</layer>
\t\t<layer id="2" name="self.model.a.weight/scale" type="Const" version="opset1">
\t\t\t<data element_type="f16" shape="2, 2, 1" offset="16" size="8" />
\t\t</layer>
\t</layers>
\t<rt_info>
\t\t<quantflow>
\t\t\t<artifact value="ab12" />
\t\t</quantflow>
\t</rt_info>
</net>
"""


def test_a_graph_of_openvino_is_told_by_its_constants_and_its_artifact(tmp_path):
    (tmp_path / "openvino_model.xml").write_text(IR)
    (tmp_path / "openvino_model.bin").write_bytes(bytes(24))
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert summarize(tmp_path) == {
        "kind": "openvino_ir",
        "model_type": "llama",
        "artifact": "ab12",
        "constants": {"f16": {"constants": 1, "bytes": 8}, "i4": {"constants": 1, "bytes": 16}},
        "bytes": 24,
        "files": ["config.json", "openvino_model.bin", "openvino_model.xml"],
    }


def test_a_truncated_or_broken_graph_of_openvino_is_refused(tmp_path):
    (tmp_path / "openvino_model.xml").write_text(IR)
    with pytest.raises(InputError, match="openvino_model.bin"):
        summarize(tmp_path)
    (tmp_path / "openvino_model.bin").write_bytes(bytes(23))
    with pytest.raises(
        InputError,
        match=r"openvino_model.bin: 23 bytes, a constant ends at 24; the file is truncated",
    ):
        summarize(tmp_path)
    (tmp_path / "openvino_model.xml").write_text(IR.replace('size="8"', 'size="x"'))
    with pytest.raises(
        InputError, match="openvino_model.xml: a constant without element_type, offset and size"
    ):
        summarize(tmp_path)
