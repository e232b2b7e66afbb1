"""Two manifests, field by field."""

from quantflow.files.diff import ABSENT, Difference, diff

ROW = {"name": "a.weight", "action": "copied", "becomes": ["a.weight"]}
MANIFEST = {
    "kind": "artifact",
    "recipe": {"scheme": "W4A16", "ignore": ["x"]},
    "ledger": {"tensors": [ROW, {**ROW, "name": "b.weight"}]},
    "files": {"config.json": {"sha256": "00", "bytes": 1}},
    "digest": "1",
}


def test_a_manifest_does_not_differ_from_itself_whatever_its_digest_says():
    assert diff(MANIFEST, {**MANIFEST, "digest": "2"}) == []


def test_differences_are_named_by_path_with_causes_before_effects():
    other = {
        **MANIFEST,
        "recipe": {"scheme": "W8A8", "ignore": ["x", "y"]},
        "ledger": {"tensors": [ROW, {**ROW, "name": "b.weight", "action": "quantized"}]},
        "files": {
            "config.json": {"sha256": "11", "bytes": 1},
            "LICENSE": {"sha256": "22", "bytes": 2},
        },
    }
    assert diff(MANIFEST, other) == [
        Difference(path="recipe.ignore[1]", left=ABSENT, right="y"),
        Difference(path="recipe.scheme", left="W4A16", right="W8A8"),
        Difference(path="files.LICENSE", left=ABSENT, right={"sha256": "22", "bytes": 2}),
        Difference(path="files[config.json].sha256", left="00", right="11"),
        Difference(path="ledger.tensors[b.weight].action", left="copied", right="quantized"),
    ]


def test_rows_are_compared_by_name_wherever_they_stand():
    inserted = {
        **MANIFEST,
        "ledger": {"tensors": [{**ROW, "name": "0.weight"}, *MANIFEST["ledger"]["tensors"]]},
    }
    assert [str(d.path) for d in diff(MANIFEST, inserted)] == ["ledger.tensors[0.weight]"]
    swapped = {**MANIFEST, "ledger": {"tensors": MANIFEST["ledger"]["tensors"][::-1]}}
    assert [d.path for d in diff(MANIFEST, swapped)] == ["ledger.tensors (order)"]


def test_rows_that_names_do_not_tell_apart_are_compared_by_position():
    twice = {**MANIFEST, "ledger": {"tensors": [ROW, {**ROW, "action": "dropped"}]}}
    paths = [d.path for d in diff({**MANIFEST, "ledger": {"tensors": [ROW, ROW]}}, twice)]
    assert paths == ["ledger.tensors[1].action"]


def test_values_that_python_calls_equal_but_that_have_other_bytes_differ():
    for left, right in ((1, True), (1, 1.0), (0.0, -0.0), (None, False), ([], {}), ("1", 1)):
        assert diff({"recipe": left}, {"recipe": right}) == [
            Difference(path="recipe", left=left, right=right)
        ]


def test_a_key_that_only_one_side_has_is_absent_on_the_other():
    assert diff({}, {"float8": None}) == [Difference(path="float8", left=ABSENT, right=None)]


def test_a_difference_reads_as_one_line_and_long_values_are_shortened():
    assert str(Difference(path="recipe.seed", left=0, right=1)) == "recipe.seed: 0 -> 1"
    line = str(Difference(path="x", left="a" * 1000, right=None))
    assert line == f"x: {'a' * 60}... (1000 characters) -> None"
