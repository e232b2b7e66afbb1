"""Gaudi's measurement files: exact names, strict reading, and one byte form."""

import json
import math

import numpy as np
import pytest
import torch

from quantflow.errors import InputError, StatisticsError
from quantflow.formats.gaudi.file_names import (
    FileName,
    TripleFiles,
    find_triples,
    holds_triples,
    parse_name,
)
from quantflow.formats.gaudi.triple import SCALES, Node, Triple, read_triple, write_triple

Q = "model.layers.0.self_attn.q_proj"
QK = "model.layers.0.self_attn.matmul_qk"


def cell(value: float) -> np.ndarray:
    return np.array([[value]], dtype=np.float32)


def nodes() -> dict:
    return {
        Q: {"inputs": [cell(1.5)], "outputs": [cell(7)], "params": {"weight": cell(0.25)}},
        QK: {"inputs": [cell(3), cell(4)]},
    }


def plain(value):
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, list) else value


def table(content=None, *, mode="DynamicRange", rank=None, **more) -> dict:
    return {
        "GlobalRank": None,
        "LocalRank": rank,
        "Mode": mode,
        **more,
        "Nodes": nodes() if content is None else content,
    }


def store(
    folder, stem: str, value: dict, *, npz: bool = True, as_json: bool = True, modules=None
) -> None:
    """Write files as the toolkit does."""
    folder.mkdir(exist_ok=True, parents=True)
    if npz:
        np.savez(folder / f"{stem}.npz", value)
    if as_json:
        (folder / f"{stem}.json").write_text(json.dumps(plain(value), indent=4))
    if modules is not None:
        (folder / f"{stem}_mod_list.json").write_text(json.dumps(modules))


def read(folder, **options) -> Triple:
    return read_triple(find_triples(folder, **options)[0])


@pytest.mark.parametrize(
    ("text", "expected", "ending"),
    [
        ("measure_hooks_maxabs.npz", FileName(prefix="measure"), ".npz"),
        ("measure_hooks_maxabs_6_8.json", FileName(prefix="measure", rank=6, world=8), ".json"),
        (
            "measure_hooks_maxabs_1_16_mod_list.json",
            FileName(prefix="measure", rank=1, world=16),
            "_mod_list.json",
        ),
        (
            "measure_hooks_maxabs_MAXABS_HW_3_8.npz",
            FileName(prefix="measure", method="MAXABS_HW", rank=3, world=8),
            ".npz",
        ),
        ("m_hooks_maxabs_MAXABS_POW2.json", FileName(prefix="m", method="MAXABS_POW2"), ".json"),
        (
            "a_1_2_hooks_maxabs_per_channel_0_1.npz",
            FileName(prefix="a_1_2", observer="maxabs_per_channel", rank=0, world=1),
            ".npz",
        ),
        ("a_hooks_b_hooks_maxabs.npz", FileName(prefix="a_hooks_b"), ".npz"),
        ("m_hooks_shape_0_2.npz", FileName(prefix="m", observer="shape", rank=0, world=2), ".npz"),
    ],
)
def test_names_are_taken_apart_and_put_together(text, expected, ending):
    assert parse_name(text) == (expected, ending)
    assert expected.stem + ending == text


@pytest.mark.parametrize(
    "text",
    [
        "config.json",
        "hooks_maxabs.npz",
        "m_hooks_maxabs_01_8.npz",
        "m_hooks_maxabs_0_08.npz",
        "m_hooks_maxabs_0.npz",
        "m.npz",
    ],
)
def test_other_names_are_not_the_toolkits(text):
    assert parse_name(text) is None


def test_card_1_of_16_is_not_card_11(tmp_path):
    for rank in range(16):
        store(
            tmp_path,
            f"m_hooks_maxabs_{rank}_16",
            table({Q: {"inputs": [cell(100 + rank)]}}, rank=rank),
        )
    files = find_triples(tmp_path)
    assert list(files) == list(range(16))
    for rank in (1, 11):
        assert files[rank].npz.name == f"m_hooks_maxabs_{rank}_16.npz"
        assert read_triple(files[rank]).nodes[Q].inputs[0].item() == 100 + rank


def test_other_files_in_the_folder_change_nothing(tmp_path):
    store(tmp_path, "m_hooks_maxabs", table(), modules=[Q, QK])
    expected = find_triples(tmp_path)
    for name in (
        "notes.json",
        "config.json",
        "m_hooks_maxabs_MAXABS_HW.json",
        "m_hooks_shape.json",
        "m_hooks_maxabs.json.bak",
    ):
        (tmp_path / name).write_text("{}")
    (tmp_path / "backup_measure_01-01_00:00:00").mkdir()
    assert find_triples(tmp_path) == expected


def test_originals_that_the_postprocessing_kept_are_not_another_run(tmp_path):
    store(tmp_path, "m_hooks_maxabs_0_1", table())
    store(tmp_path, "orig_m_hooks_maxabs_0_1", table())
    assert find_triples(tmp_path)[0].name.prefix == "m"


@pytest.mark.parametrize(
    ("stems", "said"),
    [
        ([], "holds no measurement"),
        (["m_hooks_maxabs_0_3", "m_hooks_maxabs_2_3"], "no file of rank 1 of 3"),
        (["m_hooks_maxabs_0_2", "m_hooks_maxabs_1_2", "m_hooks_maxabs_0_4"], "2 world sizes 2, 4"),
        (["m_hooks_maxabs_0_1", "m_hooks_maxabs"], "with and without ranks"),
        (["m_hooks_maxabs_2_2", "m_hooks_maxabs_0_2", "m_hooks_maxabs_1_2"], "rank 2 of 2"),
        (["m_hooks_maxabs", "n_hooks_maxabs"], "2 prefixes m, n"),
        (["m_hooks_maxabs", "m_hooks_maxabs_per_channel"], "2 observers"),
    ],
)
def test_incomplete_and_ambiguous_folders_are_refused(tmp_path, stems, said):
    for stem in stems:
        store(tmp_path, stem, table())
    with pytest.raises(InputError, match=said):
        find_triples(tmp_path)


def test_a_file_of_a_set_names_the_set_among_several(tmp_path):
    """vLLM's unified files lie beside the measured ones, of one prefix."""
    for rank, world in ((0, 2), (1, 2), (0, 3), (1, 3), (2, 3)):
        content = {Q: {"inputs": [cell(10 * world + rank)]}}
        store(tmp_path, f"m_hooks_maxabs_{rank}_{world}", table(content, rank=rank))
        store(tmp_path, f"m_hooks_maxabs_MAXABS_HW_{rank}_{world}", table())
    store(tmp_path, "other_hooks_maxabs_0_2", table())
    with pytest.raises(InputError, match="2 prefixes m, other; give one file of the set") as told:
        find_triples(tmp_path)
    assert f"such as {tmp_path}/m_hooks_maxabs_0_2.json" in str(told.value)
    for name, expected in (
        ("m_hooks_maxabs_0_2.json", [20, 21]),
        ("m_hooks_maxabs_2_3.npz", [30, 31, 32]),
    ):
        found = find_triples(tmp_path / name).values()
        assert [read_triple(files).nodes[Q].inputs[0].item() for files in found] == expected
        assert holds_triples(tmp_path / name)
    assert not holds_triples(tmp_path / "m_hooks_maxabs_0_4.json")
    (tmp_path / "m_hooks_maxabs_1_3.json").unlink()
    (tmp_path / "m_hooks_maxabs_1_3.npz").unlink()
    with pytest.raises(InputError, match="no file of rank 1 of 3"):
        find_triples(tmp_path / "m_hooks_maxabs_0_3.json")


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_memory_that_nobody_wrote_is_no_maximum_and_no_error(tmp_path, bad):
    """vLLM's row-parallel linears have it as the second output where nothing is added up."""
    down, up = "model.layers.0.mlp.down_proj", "model.layers.0.mlp.gate_up_proj"
    content = {down: {"inputs": [cell(1)], "outputs": [cell(2), cell(bad)]}}
    store(tmp_path / "a", "m_hooks_maxabs", table(content))
    assert [float(value) for value in read(tmp_path / "a").nodes[down].outputs] == [2, 0]
    content = {down: {"inputs": [cell(1)], "outputs": [cell(bad), cell(2)]}}
    store(tmp_path / "b", "m_hooks_maxabs", table(content))
    content = {up: {"inputs": [cell(1)], "outputs": [cell(2), cell(bad)]}}
    store(tmp_path / "c", "m_hooks_maxabs", table(content))
    for folder in ("b", "c"):
        with pytest.raises(StatisticsError, match="output [01] holds"):
            read(tmp_path / folder)


def test_a_missing_measurement_is_told_with_the_step_that_makes_it(tmp_path):
    with pytest.raises(
        InputError,
        match=r"hqt_output/measure: holds no measurement .*; measure with Gaudi's toolkit first",
    ):
        find_triples(tmp_path / "hqt_output" / "measure")
    assert not holds_triples(tmp_path / "hqt_output" / "measure")


def test_one_of_several_prefixes_is_named_as_dump_stats_path_names_it(tmp_path):
    store(tmp_path, "m_hooks_maxabs", table())
    store(tmp_path, "n_hooks_maxabs", table({Q: {"inputs": [cell(9)]}}))
    assert read(tmp_path / "n").nodes[Q].inputs[0].item() == 9
    assert holds_triples(tmp_path / "m") and not holds_triples(tmp_path / "o")


@pytest.mark.parametrize(("npz", "as_json"), [(True, True), (True, False), (False, True)])
def test_the_npz_the_json_or_both_are_read(tmp_path, npz, as_json):
    store(
        tmp_path,
        "m_hooks_maxabs_0_1",
        table(rank=0, NumSamples=12),
        npz=npz,
        as_json=as_json,
        modules=[Q, QK, "lm_head"],
    )
    triple = read(tmp_path)
    node = triple.nodes[Q]
    assert (
        node.inputs[0].tolist() == [[1.5]]
        and node.outputs[0].tolist() == [[7.0]]
        and node.weight.tolist() == [[0.25]]
    )
    assert [value.item() for value in triple.nodes[QK].inputs] == [3.0, 4.0]
    assert (triple.local_rank, triple.samples, triple.modules) == (0, 12, (Q, QK, "lm_head"))


def test_a_json_that_contradicts_the_npz_is_refused(tmp_path):
    store(tmp_path, "m_hooks_maxabs", table())
    store(
        tmp_path,
        "m_hooks_maxabs",
        table({**nodes(), QK: {"inputs": [cell(3), cell(5)]}}),
        npz=False,
    )
    with pytest.raises(
        InputError, match=r"matmul_qk: input 1 differs; remove the one that is wrong"
    ):
        read(tmp_path)
    store(tmp_path, "m_hooks_maxabs", table({Q: nodes()[Q]}), npz=False)
    with pytest.raises(InputError, match="matmul_qk is in one of them alone"):
        read(tmp_path)
    store(tmp_path, "m_hooks_maxabs", table(rank=3), npz=False)
    with pytest.raises(InputError, match="LocalRank"):
        read(tmp_path)


def test_old_spellings_and_bare_arrays_are_accepted(tmp_path):
    content = {
        Q: {"input": cell(1.5), "output": cell(7), "params": {"weight": cell(0.25)}},
        QK: {"input": [cell(3), cell(4)]},
    }
    store(tmp_path, "m_hooks_maxabs", table(content))
    node = read(tmp_path).nodes[Q]
    assert node.inputs[0].tolist() == [[1.5]] and node.outputs[0].tolist() == [[7.0]]


def test_maxima_per_channel_are_read(tmp_path):
    channels = np.array([[1], [2], [3]], dtype=np.float32)
    store(
        tmp_path,
        "m_hooks_maxabs_per_channel",
        table({Q: {"inputs": [channels], "params": {"weight": channels}}}),
    )
    assert read(tmp_path).nodes[Q].inputs[0].tolist() == [[1.0], [2.0], [3.0]]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -1.0, 1e300])
def test_a_value_that_is_no_maximum_is_refused_with_its_node(tmp_path, bad):
    content = nodes()
    content[QK]["inputs"][1] = np.array([[bad]], dtype=np.float64)
    for npz in (True, False):
        folder = tmp_path / str(npz)
        store(folder, "m_hooks_maxabs", table(content), npz=npz, as_json=not npz)
        with pytest.raises(StatisticsError, match=r"matmul_qk: input 1 holds"):
            read(folder)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({Q: {"inputs": [[1.0, 2.0]]}}, r"q_proj: inputs: an array"),
        ({Q: {"inputs": ["a"]}}, "q_proj: inputs"),
        ({Q: {"inputs": 1.0}}, "no list of numbers"),
        ({Q: [1.0]}, "instead of a table"),
        ({Q: {"inputs": [[[1.0]]], "weight": [[1.0]]}}, r"\['inputs', 'weight'\]"),
        ({Q: {"inputs": [[[1.0]]], "input": [[[1.0]]]}}, r"\['input', 'inputs'\]"),
        ({Q: {"inputs": [[[1.0]]], "params": {"bias": [[1.0]]}}}, r"params are \['bias'\]"),
        ({Q: {"inputs": [[[1.0]]], "params": {"weight": {"0": [1.0]}}}}, "weight is a table"),
    ],
)
def test_content_of_another_form_is_refused(tmp_path, content, said):
    store(tmp_path, "m_hooks_maxabs", table(content), npz=False)
    with pytest.raises(InputError, match=said):
        read(tmp_path)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ([], "no table with Nodes"),
        (table(mode="Shape"), "Mode is 'Shape'"),
        (table(rank="3"), "LocalRank is '3'"),
        (table(rank=2), r"LocalRank is 2, the name says None"),
    ],
)
def test_a_head_of_another_form_is_refused(tmp_path, value, said):
    (tmp_path / "m_hooks_maxabs.json").write_text(json.dumps(plain(value)))
    with pytest.raises(InputError, match=said):
        read(tmp_path)


def test_nodes_that_the_module_list_does_not_know_were_written_by_another_version(tmp_path):
    store(tmp_path, "m_hooks_maxabs", table(), modules=[Q])
    with pytest.raises(
        InputError, match=r"node .*matmul_qk is not in .*mod_list\.json .*different versions"
    ):
        read(tmp_path)


def test_scales_are_read_per_tensor_and_per_channel(tmp_path):
    content = {
        Q: {
            "inputs": [0.5],
            "outputs": [0.125],
            "params": {"weight": {"0": [0.25, 2.0], "1": [1.0, 1.0, 1.0]}},
        },
        QK: {"inputs": [1.0, 2.0], "outputs": [2.0]},
        "k": {"inputs": [4.0], "params": {"weight": 0.5}},
    }
    store(tmp_path, "m_hooks_maxabs_MAXABS_HW", table(content, mode="Scale"))
    found = read(tmp_path, method="MAXABS_HW").nodes
    assert found[Q].weight.tolist() == [0.25, 2.0] and found[Q].weight_inputs.tolist() == [
        1.0,
        1.0,
        1.0,
    ]
    assert found[QK].inputs[1].item() == 2.0 and found["k"].weight.item() == 0.5
    content[QK]["inputs"][0] = 0.0
    store(tmp_path, "m_hooks_maxabs_MAXABS_HW", table(content, mode="Scale"))
    with pytest.raises(StatisticsError, match="a scale is finite and positive"):
        read(tmp_path, method="MAXABS_HW")


TRIPLE = Triple(
    nodes={
        Q: Node(
            inputs=(torch.tensor([[0.1]]),),
            outputs=(torch.tensor([[7.0]]),),
            weight=torch.tensor([[0.25], [1.0]]),
        ),
        QK: Node(inputs=(torch.tensor([[3.0]]), torch.tensor([[4.0]]))),
    },
    local_rank=1,
    samples=5,
    modules=(Q, QK),
)
NAME = FileName(prefix="m", rank=1, world=2)


def test_what_is_written_is_read_back_and_numpy_reads_it_too(tmp_path):
    write_triple(tmp_path, NAME, TRIPLE)
    files = [path.name for path in sorted(tmp_path.iterdir())]
    assert files == [
        "m_hooks_maxabs_1_2.json",
        "m_hooks_maxabs_1_2.npz",
        "m_hooks_maxabs_1_2_mod_list.json",
    ]
    whole = read_triple(
        TripleFiles(
            name=NAME,
            npz=tmp_path / files[1],
            json=tmp_path / files[0],
            mod_list=tmp_path / files[2],
        )
    )
    assert (whole.local_rank, whole.samples, whole.modules) == (1, 5, (Q, QK))
    for name, node in TRIPLE.nodes.items():
        assert {key: value.tolist() for key, value in whole.nodes[name].tensors.items()} == {
            key: value.tolist() for key, value in node.tensors.items()
        }
    with np.load(tmp_path / files[1], allow_pickle=True) as archive:
        loaded = archive["arr_0"].item()
    assert (
        loaded["LocalRank"] == 1
        and loaded["GlobalRank"] is None
        and loaded["Mode"] == "DynamicRange"
    )
    assert loaded["Nodes"][Q]["inputs"][0].dtype == np.float32
    assert np.array_equal(loaded["Nodes"][Q]["inputs"][0], np.array([[0.1]], dtype=np.float32))
    assert json.loads((tmp_path / files[0]).read_text())["Nodes"][QK] == {
        "inputs": [[[3.0]], [[4.0]]]
    }


def test_equal_content_has_equal_bytes_whatever_the_order(tmp_path):
    for folder, names in (("a", (Q, QK)), ("b", (QK, Q))):
        (tmp_path / folder).mkdir()
        ordered = Triple(nodes={name: TRIPLE.nodes[name] for name in names}, local_rank=1)
        write_triple(tmp_path / folder, NAME, ordered)
    for path in (tmp_path / "a").iterdir():
        assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes()


def test_scales_are_written_as_numbers(tmp_path):
    scales = Triple(
        nodes={
            Q: Node(
                inputs=(torch.tensor(0.5),),
                outputs=(torch.tensor([0.25, 1.0]),),
                weight=torch.tensor([0.5, 2.0]),
                weight_inputs=torch.ones(3),
            )
        },
        mode=SCALES,
    )
    write_triple(tmp_path, FileName(prefix="m", method="MAXABS_POW2"), scales)
    node = json.loads((tmp_path / "m_hooks_maxabs_MAXABS_POW2.json").read_text())["Nodes"][Q]
    assert node == {
        "inputs": [0.5],
        "outputs": [[0.25, 1.0]],
        "params": {"weight": {"0": [0.5, 2.0], "1": [1.0] * 3}},
    }
    assert read(tmp_path, method="MAXABS_POW2").nodes[Q].weight.tolist() == [0.5, 2.0]


def test_a_value_that_is_no_maximum_is_not_written(tmp_path):
    with pytest.raises(StatisticsError, match=r"q_proj: input 0"):
        write_triple(tmp_path, NAME, Triple(nodes={Q: Node(inputs=(torch.tensor([[math.nan]]),))}))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("params", [5, 0.5, [1], "x", {"weight": 1, "bias": 2}])
def test_parameters_that_are_no_table_of_a_weight_are_an_input_error(params, tmp_path):
    (tmp_path / "m_hooks_maxabs.json").write_text(
        json.dumps(table({Q: {"inputs": [[[1.0]]], "params": params}}))
    )
    with pytest.raises(InputError, match="params are"):
        read_triple(TripleFiles(name=NAME, json=tmp_path / "m_hooks_maxabs.json"))


def test_a_number_that_no_float_holds_is_an_input_error(tmp_path):
    (tmp_path / "m_hooks_maxabs.json").write_text(json.dumps(table({Q: {"inputs": [[[10**400]]]}})))
    with pytest.raises(InputError, match="not an array of numbers"):
        read_triple(TripleFiles(name=NAME, json=tmp_path / "m_hooks_maxabs.json"))
