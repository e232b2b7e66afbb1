"""The account of every tensor and file of the source."""

import json
from dataclasses import replace

import pytest

from quantflow.errors import InputError, IntegrityError
from quantflow.files.ledger import FileEntry, Ledger, LedgerEntry
from quantflow.files.safetensors_header import TensorInfo


def entry(name, action="copied", becomes=None, shape=(2, 3)):
    becomes = (() if action == "dropped" else (name,)) if becomes is None else becomes
    nbytes = 2 * shape[0] * shape[1]
    return LedgerEntry(
        name=name,
        dtype="BF16",
        shape=shape,
        nbytes=nbytes,
        action=action,
        reason="why",
        becomes=becomes,
    )


def info(name, dtype="BF16", shape=(2, 3), nbytes=12):
    return TensorInfo(name=name, dtype=dtype, shape=shape, offset=100, nbytes=nbytes)


LEDGER = Ledger(
    tensors=(
        entry("q.weight", "quantized", ("q.weight_packed", "q.weight_scale")),
        entry("norm", "changed", shape=(1, 4)),
        entry("embed"),
        entry("inv_freq", "dropped"),
    ),
    files=(
        FileEntry(name="config.json", nbytes=7, action="rewritten", reason="quantization_config"),
    ),
)
SOURCE = {name: info(name) for name in ("q.weight", "embed", "inv_freq")} | {
    "norm": info("norm", shape=(1, 4), nbytes=8)
}
ARTIFACT = {
    "q.weight_packed": info("q.weight_packed", "I32", (2, 1), 8),
    "q.weight_scale": info("q.weight_scale", "BF16", (2, 1), 4),
    "norm": info("norm", "F32", (1, 4), 16),
    "embed": info("embed"),
}


def test_byte_sums_by_action_are_those_worked_by_hand():
    assert LEDGER.bytes_by_action() == {
        "source": 44,
        "quantized": 12,
        "copied": 12,
        "changed": 8,
        "dropped": 12,
    }


def test_a_ledger_survives_json():
    text = json.dumps(LEDGER.to_json())
    assert Ledger.from_json(json.loads(text)) == LEDGER


def test_a_complete_ledger_passes_against_source_and_artifact():
    LEDGER.check(SOURCE, source_files={"config.json": 7})
    LEDGER.check_artifact(ARTIFACT)


@pytest.mark.parametrize("name", SOURCE)
def test_a_source_tensor_that_is_not_in_the_ledger_is_named(name):
    ledger = replace(LEDGER, tensors=tuple(row for row in LEDGER.tensors if row.name != name))
    with pytest.raises(
        IntegrityError, match=f"source tensor '{name}': in the source, not in the ledger"
    ):
        ledger.check(SOURCE)


def test_a_ledger_entry_that_the_source_does_not_have_is_named():
    with pytest.raises(IntegrityError, match="'norm': in the ledger, not in the source"):
        LEDGER.check({name: row for name, row in SOURCE.items() if name != "norm"})


@pytest.mark.parametrize(
    "other",
    [
        info("embed", dtype="F16"),
        info("embed", shape=(3, 2)),
        info("embed", shape=(2, 4), nbytes=16),
    ],
)
def test_a_source_tensor_of_another_form_is_named_with_both_values(other):
    with pytest.raises(IntegrityError, match=r"'embed': ledger BF16 \[2, 3\], source"):
        LEDGER.check({**SOURCE, "embed": other})


@pytest.mark.parametrize("files", [{}, {"config.json": 8}, {"config.json": 7, "LICENSE": 1}])
def test_source_files_that_differ_are_named(files):
    with pytest.raises(IntegrityError, match=r"source file '(config\.json|LICENSE)'"):
        LEDGER.check(SOURCE, source_files=files)


@pytest.mark.parametrize("name", ARTIFACT)
def test_an_artifact_tensor_that_is_missing_is_named(name):
    with pytest.raises(
        IntegrityError, match=f"artifact tensor '{name}': in the ledger, not in the artifact"
    ):
        LEDGER.check_artifact({key: row for key, row in ARTIFACT.items() if key != name})


def test_an_artifact_tensor_that_nothing_claims_is_named():
    with pytest.raises(IntegrityError, match="'k_scale': in the artifact, not in the ledger"):
        LEDGER.check_artifact({**ARTIFACT, "k_scale": info("k_scale")})


@pytest.mark.parametrize("other", [info("embed", dtype="F16"), info("embed", shape=(6, 1))])
def test_a_copy_of_another_form_than_the_source_is_named(other):
    with pytest.raises(IntegrityError, match="'embed': copied from"):
        LEDGER.check_artifact({**ARTIFACT, "embed": other})


def test_what_is_recorded_twice_is_refused():
    with pytest.raises(IntegrityError, match="source tensor 'a'.*twice"):
        Ledger(tensors=(entry("a"), entry("a", becomes=("b",))))
    with pytest.raises(IntegrityError, match="artifact tensor 'c'.*twice"):
        Ledger(tensors=(entry("a", becomes=("c",)), entry("b", becomes=("c",))))
    with pytest.raises(IntegrityError, match="artifact tensor 'c'.*twice"):
        Ledger(tensors=(entry("a", becomes=("c", "c")),))
    with pytest.raises(IntegrityError, match="source file 'config.json'.*twice"):
        Ledger(tensors=(), files=LEDGER.files * 2)


@pytest.mark.parametrize(
    "change",
    [
        {"action": "lost"},
        {"nbytes": 13},
        {"dtype": "BF17"},
        {"shape": (-2, -3)},
        {"becomes": ()},
        {"action": "dropped"},
    ],
)
def test_an_entry_that_contradicts_itself_is_refused_by_name(change):
    with pytest.raises(InputError, match="'embed'"):
        replace(entry("embed"), **change)


def test_a_file_entry_with_an_unknown_action_or_negative_size_is_refused():
    for change in ({"action": "quantized"}, {"nbytes": -1}):
        with pytest.raises(InputError, match=r"config\.json"):
            replace(LEDGER.files[0], **change)


@pytest.mark.parametrize("key", ["source", "quantized", "copied", "changed", "dropped"])
def test_byte_sums_that_differ_from_the_entries_are_refused(key):
    value = LEDGER.to_json()
    value["bytes"][key] += 1
    with pytest.raises(IntegrityError, match="byte sums"):
        Ledger.from_json(value)


FORMS = {
    "no table": lambda value: [],
    "a missing key": lambda value: {"tensors": [], "files": []},
    "an unknown key": lambda value: {**value, "extra": 1},
    "rows are a table": lambda value: {**value, "tensors": {}},
    "a row is a list": lambda value: {**value, "tensors": [[]]},
    "a row lacks a key": lambda value: {**value, "files": [{"name": "x"}]},
    "a name is a number": lambda value: {**value, "files": [{**value["files"][0], "name": 1}]},
    "bytes are a fraction": lambda value: {
        **value,
        "files": [{**value["files"][0], "nbytes": 7.0}],
    },
    "bytes are a truth value": lambda value: {
        **value,
        "files": [{**value["files"][0], "nbytes": True}],
    },
    "a shape is text": lambda value: {**value, "tensors": [{**value["tensors"][0], "shape": "23"}]},
    "a dimension is text": lambda value: {
        **value,
        "tensors": [{**value["tensors"][0], "shape": ["2", 3]}],
    },
    "becomes is text": lambda value: {
        **value,
        "tensors": [{**value["tensors"][0], "becomes": "x"}],
    },
}


@pytest.mark.parametrize("change", FORMS.values(), ids=FORMS.keys())
def test_json_of_another_form_is_refused(change):
    with pytest.raises(InputError, match="ledger"):
        Ledger.from_json(change(LEDGER.to_json()))
