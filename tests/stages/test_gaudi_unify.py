"""Gaudi's files of many cards through `quantflow unify`.

Commands are as its users write them; the faults are those of former versions.
"""

import json

import numpy as np
import pytest
import torch

from quantflow.core.device_scales import target
from quantflow.formats.gaudi.file_names import FileName, find_triples
from quantflow.formats.gaudi.scale_methods import method_config
from quantflow.formats.gaudi.scales import scales_from
from quantflow.formats.gaudi.triple import SCALES, Node, Triple, read_triple, write_triple
from tests.shared import run

Q, DOWN = "model.layers.0.self_attn.q_proj", "model.layers.0.mlp.down_proj"


@pytest.fixture
def said(capsys):
    def check(code, *arguments):
        capsys.readouterr()
        assert run(*arguments) == code, capsys.readouterr().err
        found = capsys.readouterr()
        return found.err if code else found

    return check


def cell(value) -> torch.Tensor:
    return torch.tensor([[float(value)]])


def card(value: float, *, weight: float = 3, **more) -> Triple:
    nodes = {
        Q: Node(inputs=(cell(value),), weight=cell(weight)),
        DOWN: Node(inputs=(cell(1000 - value),), weight=cell(weight)),
    }
    return Triple(nodes={**nodes, **more}, modules=(*nodes, *more))


def cards(folder, world: int = 8, *, prefix: str = "measure", skip=()):
    """Write what `world` cards saw: rank r the input maximum r + 1."""
    folder.mkdir(parents=True)
    for rank in range(world):
        if rank not in skip:
            triple = card(rank + 1)
            name = FileName(prefix=prefix, rank=rank, world=world)
            write_triple(
                folder, name, Triple(nodes=triple.nodes, modules=triple.modules, local_rank=rank)
            )
    return folder


def maxima(folder) -> list[float]:
    return [read_triple(files).nodes[Q].inputs[0].item() for files in find_triples(folder).values()]


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        (["-g", "01234567"], [8]),
        (["-g", "0123", "4567"], [4, 8]),
        (["-g", "0123", "-g", "4567"], [4, 8]),
        (["-g", "01 23 45 67"], [2, 4, 6, 8]),
        (["-g", "0,1,2,3", "4-7"], [4, 8]),
        (["-g", "07", "16", "25", "34"], [8, 7, 6, 5]),
        (["-g", "0,4--1,5--2,6--3,7"], [5, 6, 7, 8]),  # as vLLM's calibration writes them
        (["--ranks", "2"], [4, 8]),
        ([], [8]),
    ],
)
def test_groups_are_written_as_they_are_for_the_script_that_this_replaces(
    tmp_path, groups, expected
):
    source = cards(tmp_path / "hqt_output")
    assert (
        run("unify", *groups, "--measurements", source, "--out", tmp_path / "new" / "folder") == 0
    )
    assert maxima(tmp_path / "new" / "folder") == expected
    names = {path.name for path in (tmp_path / "new" / "folder").iterdir()}
    endings = [".json", ".npz", "_mod_list.json"]
    suffixes = (
        [""]
        if len(expected) == 1
        else [f"_{rank}_{len(expected)}" for rank in range(len(expected))]
    )
    assert names == {
        "DONE.json",
        "unified.json",
        *(f"measure_hooks_maxabs{suffix}{ending}" for suffix in suffixes for ending in endings),
    }


def test_numpy_reads_the_merged_file_as_the_toolkit_does(tmp_path):
    assert (
        run("unify", "-g", "0123", "4567", "-m", cards(tmp_path / "m"), "-o", tmp_path / "u") == 0
    )
    with np.load(tmp_path / "u" / "measure_hooks_maxabs_1_2.npz", allow_pickle=True) as archive:
        table = archive["arr_0"].item()
    assert (table["GlobalRank"], table["LocalRank"], table["Mode"]) == (None, 1, "DynamicRange")
    assert table["Nodes"][Q]["inputs"][0].tolist() == [[8.0]] and table["Nodes"][DOWN]["inputs"][
        0
    ].tolist() == [[995.0]]
    assert json.loads((tmp_path / "u" / "measure_hooks_maxabs_1_2.json").read_text())["Nodes"][Q][
        "inputs"
    ] == [[[8.0]]]
    single = tmp_path / "one"
    assert run("unify", "-g", "01234567", "-m", tmp_path / "m", "-o", single) == 0
    assert json.loads((single / "measure_hooks_maxabs.json").read_text())["LocalRank"] == -1


def test_sixteen_cards_and_card_1_is_not_card_11(tmp_path):
    source = cards(tmp_path / "m", 16)
    assert run("unify", "-g", "0-7", "8-15", "-m", source, "-o", tmp_path / "u") == 0
    assert maxima(tmp_path / "u") == [8, 16]
    pairs = [f"{i},{i + 10 if i < 6 else i + 1}" for i in (2, 3, 4, 5, 6, 8)]
    groups = ("0,11", "1,10", *pairs)
    assert run("unify", "-g", *groups, "-m", source, "-o", tmp_path / "v") == 0
    assert maxima(tmp_path / "v") == [12, 11, 13, 14, 15, 16, 8, 10]


def test_vllms_files_keep_their_number_through_unify_and_export(tmp_path):
    """Its runtime looks for _0_1 where optimum-habana's single process has no number."""
    attention, source = "model.layers.0.self_attn.attn.impl", tmp_path / "g2"
    source.mkdir()
    nodes = {
        f"{attention}.k_cache": Node(inputs=(cell(2),)),
        f"{attention}.matmul_qk": Node(inputs=(cell(1), cell(9))),
    }
    for rank in range(2):
        name = FileName(prefix="inc_output", rank=rank, world=2)
        write_triple(source, name, Triple(nodes={**card(rank + 1).nodes, **nodes}, local_rank=rank))
    assert run("unify", "--ranks", "1", "-m", source, "-o", tmp_path / "u" / "g2") == 0
    assert (tmp_path / "u" / "g2" / "inc_output_hooks_maxabs_0_1.npz").exists()
    line = (
        "export",
        tmp_path / "u" / "g2",
        "-o",
        tmp_path / "a",
        "--format",
        "inc",
        "--device",
        "gaudi2",
    )
    assert run(*line) == 0
    (found,) = find_triples(tmp_path / "a" / "hqt_output").values()
    assert (found.name.rank, found.name.world) == (0, 1)
    assert read_triple(found).nodes[f"{attention}.matmul_qk"].inputs[1].item() == 2


def test_the_folder_above_vllms_g2_stands_for_it_where_it_is_the_only_one(tmp_path, said):
    """Its calibration writes <out>/<model>/g2/inc_output_hooks_....

    A configuration stands beside g2.
    """
    model = tmp_path / "Llama-3"
    cards(model / "g2", 2)
    (model / "maxabs_quant_g2.json").write_text("{}")
    assert run("unify", "-g", "01", "-m", model, "-o", tmp_path / "u") == 0
    assert maxima(tmp_path / "u") == [2]
    line = ("export", model, "-o", tmp_path / "a", "--format", "inc", "--device", "gaudi3")
    assert "folder g2 is of another device than gaudi3" in said(3, *line)
    cards(model / "g3", 2)
    assert "holds measurements of two devices, g2 and g3" in said(
        3, "unify", "-m", model, "-o", tmp_path / "v"
    )


def test_what_ipexs_calibration_keeps_is_refused_by_name(tmp_path, llama, said):
    """Its scales are of one process and of smoothed inputs.

    Nothing can be merged or derived from them.
    """
    folder = tmp_path / "saved_results"
    folder.mkdir()
    (folder / "best_configure.json").write_text('{" ": {"q_op_infos": {}}}')
    for line in (
        ("unify", "-m", folder, "-o", tmp_path / "u"),
        (
            "quantize",
            llama,
            "-o",
            tmp_path / "q",
            "--scheme",
            "W8A8_STATIC",
            "--measurement",
            folder,
        ),
        ("export", folder, "-o", tmp_path / "a", "--format", "inc", "--device", "gaudi2"),
    ):
        message = said(3, *line)
        assert (
            "best_configure.json: IPEX's scales and zero points" in message
            and "quantflow measure MODEL" in message
        )


def test_a_stray_file_changes_nothing(tmp_path):
    source = cards(tmp_path / "m", 2)
    for name in ("notes.json", "0_2.json", "old_1_2.npz", "measure_hooks_maxabs_0_2.json.bak"):
        (source / name).write_text("{}")
    assert run("unify", "-g", "01", "-m", source, "-o", tmp_path / "u") == 0
    assert maxima(tmp_path / "u") == [2]


@pytest.mark.parametrize(
    ("skip", "groups", "code", "expected"),
    [
        ([3], ["0123", "4567"], 3, "no file of rank 3 of 8"),
        ([0], ["01234567"], 3, "no file of rank 0 of 8"),
        ([], ["0123", "456"], 2, "missing 7"),
        ([], ["0123", "4566"], 2, "missing 7; named twice 6"),
        ([], ["0123", "3456"], 2, "named twice 3"),
        ([], ["012", "34567"], 2, "groups of 3 and 5 ranks"),
        ([], ["0123", "4568"], 2, "unknown 8"),
        ([], ["--ranks", "3"], 2, "8 ranks into 3 groups of one size"),
        ([], ["--expand", "4"], 3, "holds 8 ranks, one is expanded"),
    ],
)
def test_cards_that_are_missing_twice_or_left_over_are_refused_by_number(
    tmp_path, said, skip, groups, code, expected
):
    source = cards(tmp_path / "m", skip=skip)
    line = groups if groups[0].startswith("--") else ["-g", *groups]
    assert expected in said(code, "unify", *line, "-m", source, "-o", tmp_path / "u")
    assert not (tmp_path / "u").exists()


def test_files_of_two_world_sizes_or_two_runs_are_refused(tmp_path, said):
    source = cards(tmp_path / "m", 2)
    cards(tmp_path / "four", 4)
    for path in (tmp_path / "four").iterdir():
        path.rename(source / path.name)
    assert "2 world sizes 2, 4" in said(3, "unify", "-m", source, "-o", tmp_path / "u")
    both = cards(tmp_path / "both", 2)
    cards(tmp_path / "other", 2, prefix="other")
    for path in (tmp_path / "other").iterdir():
        path.rename(both / path.name)
    assert "2 prefixes measure, other" in said(3, "unify", "-m", both, "-o", tmp_path / "u")
    # as dump_stats_path names it
    assert run("unify", "-m", both / "other", "-o", tmp_path / "u") == 0
    assert (tmp_path / "u" / "other_hooks_maxabs.npz").exists()


def test_one_file_says_which_of_two_sets_in_a_folder_is_meant(tmp_path, said, llama):
    """vLLM's scripts write unified files beside the measured ones."""
    source = cards(tmp_path / "g2", 4)
    cards(tmp_path / "two", 2)
    for path in (tmp_path / "two").iterdir():
        path.rename(source / path.name)
    refused = said(3, "unify", "-m", source, "-o", tmp_path / "u")
    assert f"such as {source / 'measure_hooks_maxabs_0_2.json'}" in refused
    four = source / "measure_hooks_maxabs_2_4.npz"
    assert run("unify", "--ranks", "2", "-m", four, "-o", tmp_path / "u") == 0
    assert maxima(tmp_path / "u") == [2, 4]
    inc = ("--format", "inc", "--device", "gaudi2")
    assert run("export", four, "-o", tmp_path / "a", *inc) == 0
    assert maxima(tmp_path / "a" / "hqt_output") == [1, 2, 3, 4]
    inc = ("--format", "inc", "--device", "gaudi3")
    assert "folder g2 is of another device" in said(3, "export", four, "-o", tmp_path / "b", *inc)
    line = ("quantize", llama, "-o", tmp_path / "q", "--scheme", "FP8", "--measurement", four)
    assert "holds 4 ranks, quantize reads one" in said(3, *line)


def test_a_missing_copy_can_be_allowed_and_the_result_says_so(tmp_path, said):
    source = cards(tmp_path / "m", 4, skip=[2])
    line = (
        "unify",
        "-g",
        "01",
        "23",
        "-m",
        source,
        "-o",
        tmp_path / "u",
        "--allow-missing",
        "--json",
    )
    found = said(0, *line)
    assert "rank 1 is without ranks 2" in found.err and json.loads(found.out)["missing"] == [2]
    assert json.loads((tmp_path / "u" / "unified.json").read_text())["groups"][1]["missing"] == [2]
    assert maxima(tmp_path / "u") == [2, 4]


def test_a_node_on_one_card_alone_is_refused_wherever_it_is(tmp_path, said):
    for where in (0, 1):
        source = cards(tmp_path / f"m{where}", 2)
        extra = card(where + 1, expert=Node(inputs=(cell(1),)))
        write_triple(source, FileName(prefix="measure", rank=where, world=2), extra)
        assert f"node expert: on rank {where}, not on rank {1 - where}" in said(
            3, "unify", "-m", source, "-o", tmp_path / "u"
        )


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -1.0])
@pytest.mark.parametrize("where", [0, 1])
def test_a_value_that_is_no_maximum_is_refused_on_any_card(tmp_path, said, bad, where):
    """max(nan, 1) is nan and max(1, nan) is 1.

    Whether a bad card was seen depended on its place.
    """
    source = cards(tmp_path / "m", 2)
    for ending in (".json", ".npz", "_mod_list.json"):
        (source / f"measure_hooks_maxabs_{where}_2{ending}").unlink()
    table = {
        "GlobalRank": None,
        "LocalRank": where,
        "Mode": "DynamicRange",
        "Nodes": {Q: {"inputs": [np.array([[bad]])]}},
    }
    np.savez(source / f"measure_hooks_maxabs_{where}_2.npz", table)
    message = said(3, "unify", "-m", source, "-o", tmp_path / "u")
    assert (
        f"measure_hooks_maxabs_{where}_2.npz" in message
        and Q in message
        and "a maximum is finite" in message
    )


def test_scales_are_not_merged(tmp_path, said):
    """Files of scales beside a measurement are left alone.

    Alone they are refused, per channel or not.
    """
    source = cards(tmp_path / "m", 2)
    goal, method = target("gaudi2"), method_config("maxabs_hw")
    for rank, files in find_triples(source).items():
        scales = scales_from(read_triple(files).nodes, method, target=goal, arithmetic="BF16")
        for folder in (source, tmp_path / "alone"):
            folder.mkdir(exist_ok=True)
            name = FileName(prefix="measure", rank=rank, world=2, method="MAXABS_HW")
            write_triple(folder, name, Triple(nodes=scales, mode=SCALES, local_rank=rank))
    assert run("unify", "-m", source, "-o", tmp_path / "u") == 0
    assert not [path for path in (tmp_path / "u").iterdir() if "MAXABS_HW" in path.name]
    assert "holds no measurement" in (
        text := said(3, "unify", "-m", tmp_path / "alone", "-o", tmp_path / "v")
    )
    assert "only scales of MAXABS_HW" in text


def test_summands_of_row_parallel_linears_are_bounded_and_told(tmp_path, said):
    source = tmp_path / "m"
    source.mkdir()
    for rank in range(2):
        nodes = {DOWN: Node(inputs=(cell(1),), outputs=(cell(5),), weight=cell(rank + 1))}
        write_triple(source, FileName(prefix="measure", rank=rank, world=2), Triple(nodes=nodes))
    found = said(0, "unify", "-m", source, "-o", tmp_path / "u", "--json")
    assert "1 outputs were measured before the sum over cards and are bounded" in found.err
    result = json.loads(found.out)
    assert result["bounds"] == [f"{DOWN}|output 0"] and result["mesh"] == {"world": 1}
    assert {"statistic": "amax", "rule": "bounded by the sum", "count": 1} in result["merged"]
    assert read_triple(find_triples(tmp_path / "u")[0]).nodes[DOWN].outputs[0].item() == 10


def test_a_card_that_looks_unlike_the_others_is_told(tmp_path, said):
    source = cards(tmp_path / "m", 4)
    write_triple(source, FileName(prefix="measure", rank=2, world=4), card(800))
    found = said(0, "unify", "-m", source, "-o", tmp_path / "u")
    assert f"{Q}|input 0: rank 2 saw 800, the median rank 2" in found.err
    account = json.loads((tmp_path / "u" / "unified.json").read_text())
    assert account["groups"][0]["maxima"][f"{Q}|input 0"] == 2


def test_nothing_is_overwritten_and_nothing_is_written_into_what_is_read(tmp_path, said):
    source = cards(tmp_path / "m", 4)
    before = {path.name: path.read_bytes() for path in source.iterdir()}
    for output in (source, source / "unified", tmp_path):
        assert "lies in the" in said(2, "unify", "-m", source, "-o", output)
    assert {path.name: path.read_bytes() for path in source.iterdir()} == before
    line = ("unify", "-m", source, "-o", tmp_path / "deep" / "er" / "u")
    assert run(*line, "-g", "01", "23") == 0
    first = {path.name: path.read_bytes() for path in (tmp_path / "deep" / "er" / "u").iterdir()}
    assert "unify: up to date" in said(0, *line, "-g", "01", "23").err
    assert "finished result" in said(2, *line, "-g", "0123")
    assert {
        path.name: path.read_bytes() for path in (tmp_path / "deep" / "er" / "u").iterdir()
    } == first
    assert run(*line, "-g", "0123", "--force") == 0
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("mine")
    assert "mine.txt" in said(2, "unify", "-m", source, "-o", tmp_path / "full")


def test_a_missing_measure_step_is_told(tmp_path, said):
    (tmp_path / "empty").mkdir()
    assert "_hooks_maxabs" in said(
        3, "unify", "-g", "01", "-m", tmp_path / "empty", "-o", tmp_path / "u"
    )


def mixture_cards(folder, world: int = 4, *, experts: int = 8):
    """Cards of vLLM's with some experts each; what lies inside expert e is at most e + 1."""
    operator = "model.layers.0.mlp.experts.moe_op"
    folder.mkdir(parents=True)
    for rank in range(world):
        own = range(rank * experts // world, (rank + 1) * experts // world)
        nodes = {operator: Node(inputs=(cell(9),), outputs=(cell(1), *(cell(e + 1) for e in own)))}
        for place, expert in enumerate(own):
            for part in ("w13_list", "w2_list"):
                nodes[f"{operator}.{part}.{place}"] = Node(
                    inputs=(cell(0),), weight=cell(expert + 1)
                )
        name = FileName(prefix="inc_output", rank=rank, world=world)
        write_triple(folder, name, Triple(nodes=nodes, local_rank=rank, modules=tuple(nodes)))
    return folder


def test_experts_of_many_cards_are_put_together_and_dealt_again(tmp_path, said):
    operator, source = "model.layers.0.mlp.experts.moe_op", mixture_cards(tmp_path / "g2")
    refused = said(2, "unify", "--ranks", "2", "-m", source, "-o", tmp_path / "no")
    assert "do not say whether a card holds some experts or a part of each" in refused
    for word in ("-u", "--use_expert_paral", "--expert-parallel"):
        line = (
            "unify",
            word,
            "--ranks",
            "2",
            "-m",
            source,
            "-o",
            tmp_path / word.strip("-").replace("-", "_"),
        )
        assert run(*line) == 0
    (tmp_path / "g3").mkdir()
    one = ("unify", "-u", "--ranks", "1", "-m", source, "-o", tmp_path / "one")
    eight = ("unify", "-u", "--expand", "8", "-m", tmp_path / "one", "-o", tmp_path / "eight")
    assert run(*one) == 0 and run(*eight) == 0
    for folder, count in (("u", 2), ("use_expert_paral", 2), ("one", 1), ("eight", 8)):
        found = find_triples(tmp_path / folder)
        inside = [read_triple(files).nodes[operator].outputs[1:] for files in found.values()]
        assert len(inside) == count and {len(each) for each in inside} == {8 // count}
        assert [value.item() for each in inside for value in each] == list(range(1, 9))
        weights = [
            read_triple(files).nodes[f"{operator}.w2_list.{place}"].weight.item()
            for files in found.values()
            for place in range(8 // count)
        ]
        assert weights == list(range(1, 9))
    account = json.loads((tmp_path / "eight" / "unified.json").read_text())
    assert "the whole's, which bounds it" in {row["rule"] for row in account["merged"]}
    # what was merged is exported with scales of each expert
    inc = ("--format", "inc", "--device", "gaudi2")
    assert run("export", tmp_path / "one", "-o", tmp_path / "scales", *inc) == 0
    (scales,) = find_triples(tmp_path / "scales" / "hqt_output", method="MAXABS_HW").values()
    assert len(read_triple(scales).nodes[operator].inputs) == 1 + 8


def test_a_measurement_of_ours_needs_no_word_about_experts(tmp_path, said, llama, text_files):
    line = ("--calibration", text_files["calibration"], "--samples", "1", "--stats", "amax")
    assert run("measure", llama, "-o", tmp_path / "m", *line) == 0
    refused = said(2, "unify", "-u", "-m", tmp_path / "m", "-o", tmp_path / "u")
    assert "which says what each rank holds" in refused
