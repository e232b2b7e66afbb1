"""Our statistics as Gaudi's nodes and back, the postprocessing, and the scales of every node."""

import pytest
import torch

from quantflow.core.device_scales import target
from quantflow.core.scale_rules import SCALE_METHODS
from quantflow.errors import InputError, StatisticsError, UnsupportedError, UsageError
from quantflow.formats.gaudi.gaudi_nodes import (
    for_vllm,
    layer_type,
    nodes_from,
    parts_of,
    postprocess,
    statistics_from,
    unmeasured,
    without_cache,
    without_outputs,
)
from quantflow.formats.gaudi.scale_methods import method_config
from quantflow.formats.gaudi.scales import near_steps, scales_from
from quantflow.formats.gaudi.triple import Node

A = "model.layers.0.self_attn"
M = "model.layers.0.mlp"
INPUTS = {
    f"{A}.q_proj": 60,
    f"{A}.k_proj": 60,
    f"{A}.v_proj": 60,
    f"{A}.o_proj": 3,
    f"{M}.gate_proj": 5,
    f"{M}.up_proj": 5,
}
WEIGHTS = {
    f"{A}.q_proj": 1,
    f"{A}.k_proj": 4,
    f"{A}.v_proj": 2,
    f"{A}.o_proj": 120,
    f"{M}.gate_proj": 6,
    f"{M}.up_proj": 7,
}


def cell(value: float) -> torch.Tensor:
    return torch.tensor([[float(value)]])


@pytest.fixture
def statistics() -> dict[str, torch.Tensor]:
    found = {f"{name}|input|amax": torch.tensor(float(value)) for name, value in INPUTS.items()}
    found |= {f"{name}|weight|amax": torch.tensor(float(value)) for name, value in WEIGHTS.items()}
    found |= {f"{name}|output|amax": torch.tensor(value * 10.0) for name, value in WEIGHTS.items()}
    found |= {f"{A}|query|amax": torch.tensor(8.0), f"{A}|k_cache|amax": torch.tensor(9.0)}
    found |= {
        f"{A}|v_cache|amax": torch.tensor(11.0),
        f"{A}.q_proj|input|channel_amax": torch.tensor([1.0, 60.0]),
    }
    return found


def values(nodes: dict[str, Node]) -> dict[str, dict[str, object]]:
    return {
        name: {key: value.tolist() for key, value in node.tensors.items()}
        for name, node in nodes.items()
    }


def test_linears_caches_and_products_are_optimum_habanas_nodes(statistics):
    nodes = nodes_from(statistics)
    assert set(nodes) == {
        *INPUTS,
        *(f"{A}.{leaf}" for leaf in ("k_cache", "v_cache", "matmul_qk", "matmul_av")),
    }
    assert values(nodes)[f"{A}.k_proj"] == {
        "input 0": [[60.0]],
        "output 0": [[40.0]],
        "weight": [[4.0]],
    }
    assert values(nodes)[f"{A}.matmul_qk"] == {"input 0": [[8.0]], "input 1": [[9.0]]}
    assert values(nodes)[f"{A}.matmul_av"] == {"input 0": [[1.0]], "input 1": [[11.0]]}
    assert values(nodes)[f"{A}.k_cache"] == {"input 0": [[9.0]]}
    assert {layer_type(name, nodes[name]) for name in INPUTS} == {"Linear"}
    assert [layer_type(name, nodes[name]) for name in (f"{A}.matmul_av", f"{A}.v_cache")] == [
        "Matmul",
        "KVCache",
    ]


def test_the_way_back_gives_the_same_maxima(statistics):
    back, others = statistics_from(nodes_from(statistics))
    assert others == ()
    expected = {key: value for key, value in statistics.items() if "channel_amax" not in key}
    assert {key: value.item() for key, value in back.items()} == {
        key: value.item() for key, value in expected.items()
    }


def test_a_measurement_without_queries_has_no_product_of_queries_and_says_so(statistics):
    del statistics[f"{A}|query|amax"]
    nodes = nodes_from(statistics)
    assert unmeasured(nodes) == ("matmul_qk",)
    assert unmeasured({}) == ("matmul_qk", "matmul_av", "k_cache", "v_cache")


def test_attention_of_which_queries_alone_were_measured_is_left_out_and_named(statistics):
    for site in ("k_cache", "v_cache"):
        for key in [key for key in statistics if key.startswith(f"{A}|{site}")]:
            del statistics[key]
    assert without_cache(statistics) == (A,)
    assert not [name for name in nodes_from(statistics) if name.startswith((f"{A}.m", f"{A}.k_c"))]
    assert f"{A}.o_proj" in nodes_from(statistics)


@pytest.mark.parametrize("site", ["input", "weight"])
def test_a_linear_without_a_maximum_is_refused(statistics, site):
    del statistics[f"{A}.o_proj|{site}|amax"]
    with pytest.raises(
        StatisticsError, match=rf"o_proj: the measurement has no amax of its {site}"
    ):
        nodes_from(statistics)


def test_excluded_outputs_are_left_out_but_where_they_are_asked_for(statistics):
    nodes = without_outputs(nodes_from(statistics), but=("o_proj",))
    assert [name for name, node in nodes.items() if node.outputs] == [f"{A}.o_proj"]


def test_channels_give_both_maxima_and_strange_nodes_are_named():
    channels = torch.tensor([[1.0], [3.0], [2.0]])
    nodes = {
        "lm_head": Node(inputs=(channels,), weight=cell(1)),
        f"{A}.softmax": Node(inputs=(cell(1),), outputs=(cell(1),)),
        f"{M}.experts": Node(inputs=(cell(1), cell(2)), weight=cell(1)),
    }
    found, others = statistics_from(nodes)
    assert found["lm_head|input|amax"] == 3.0 and found["lm_head|input|channel_amax"].tolist() == [
        1.0,
        3.0,
        2.0,
    ]
    assert others == (f"{M}.experts", f"{A}.softmax")


def test_vllms_fused_names_are_made_and_read(statistics):
    nodes = for_vllm(nodes_from(statistics))
    assert values(nodes)[f"{A}.qkv_proj"] == {
        "input 0": [[60.0]],
        "output 0": [[40.0]],
        "weight": [[4.0]],
    }
    assert values(nodes)[f"{M}.gate_up_proj"]["weight"] == [[7.0]]
    assert values(nodes)[f"{A}.o_proj"]["output 1"] == [[1200.0]]  # after the sum over cards
    assert values(nodes)[f"{A}.attn.impl.matmul_qk"] == {"input 0": [[8.0]], "input 1": [[9.0]]}
    back, others = statistics_from(nodes)
    assert (
        others == () and back[f"{A}.v_proj|input|amax"] == 60.0 and back[f"{A}|k_cache|amax"] == 9.0
    )
    assert f"{A}.q_proj|weight|amax" not in back  # the maximum of three weights is none of theirs
    assert parts_of(f"{A}.qkv_proj") == (f"{A}.q_proj", f"{A}.k_proj", f"{A}.v_proj")
    assert parts_of(f"{A}.o_proj") == (f"{A}.o_proj",)


@pytest.mark.parametrize("inside", ["", ".attn.impl"])
def test_the_postprocessing_gives_products_what_the_caches_saw(inside):
    nodes = {
        f"{A}{inside}.matmul_qk": Node(inputs=(cell(1), cell(2))),
        f"{A}{inside}.matmul_av": Node(inputs=(cell(3), cell(4))),
        f"{A}{inside}.k_cache": Node(inputs=(cell(20),)),
        f"{A}{inside}.v_cache": Node(inputs=(cell(0.5),)),
        "model.layers.1.self_attn.matmul_qk": Node(inputs=(cell(1), cell(2))),
    }
    # a vision model's language model, and the second half of a pipeline
    later = f"language_model.model.layers.40.self_attn{inside}"
    nodes |= {
        f"{later}.matmul_av": Node(inputs=(cell(3), cell(4))),
        f"{later}.v_cache": Node(inputs=(cell(6),)),
    }
    found = values(postprocess(nodes))
    assert found[f"{later}.matmul_av"] == {"input 0": [[3.0]], "input 1": [[6.0]]}
    assert found[f"{A}{inside}.matmul_qk"] == {"input 0": [[1.0]], "input 1": [[20.0]]}
    assert found[f"{A}{inside}.matmul_av"] == {"input 0": [[3.0]], "input 1": [[0.5]]}
    assert found["model.layers.1.self_attn.matmul_qk"]["input 1"] == [[2.0]]
    assert nodes[f"{A}{inside}.matmul_qk"].inputs[1] == 2.0
    nodes[f"{A}{inside}.matmul_qk"] = Node(inputs=(cell(1),))
    with pytest.raises(StatisticsError, match="matmul_qk: 1 inputs"):
        postprocess(nodes)


@pytest.mark.parametrize("inside", ["", ".attn.impl", ".mla_attn.impl", ".mla_attn.mla_attn.impl"])
def test_the_output_of_fused_attention_has_the_maximum_that_the_next_linear_saw(inside):
    """It runs for prompts alone; the scale of its output is made of output 0."""
    fused = f"{A}{inside}.fused_scaled_dot_product_attention"
    attention = Node(inputs=(cell(1), cell(2), cell(3)), outputs=(cell(4), cell(1)))
    behind = Node(inputs=(cell(9),), weight=cell(1))
    for leaf, expected in (("o_proj", 9), ("out_proj", 9), ("c_proj", 9), ("gate", 4)):
        found = values(postprocess({fused: attention, f"{A}.{leaf}": behind}))[fused]
        assert found["output 0"] == [[expected]] and found["output 1"] == [[1.0]]
    smaller = Node(inputs=(cell(3),), weight=cell(1))
    assert postprocess({fused: attention, f"{A}.o_proj": smaller})[fused].outputs[0] == 4
    other = f"{A.replace('0', '1')}.o_proj"
    assert postprocess({fused: attention, other: behind})[fused].outputs[0] == 4


def test_the_scale_of_an_output_is_the_product_of_what_makes_it(statistics):
    config = method_config("maxabs_hw")
    found = scales_from(nodes_from(statistics), config, target=target("gaudi2"), arithmetic="exact")
    assert values(found)[f"{A}.q_proj"] == {"input 0": 1.0, "output 0": 2.0**-4, "weight": 2.0**-4}
    assert values(found)[f"{A}.o_proj"] == {"input 0": 2.0**-4, "output 0": 2.0**-4, "weight": 1.0}
    assert values(found)[f"{A}.matmul_qk"] == {"input 0": 1.0, "input 1": 1.0, "output 0": 1.0}
    assert values(found)[f"{A}.matmul_av"] == {
        "input 0": 2.0**-4,
        "input 1": 1.0,
        "output 0": 2.0**-4,
    }
    assert values(found)[f"{A}.v_cache"] == {"input 0": 1.0, "output 0": 1.0}


# Of maxabs_hw on Gaudi2 a scale is the least power of 16 that is not below maximum / 60, at most
# 16.
ATTENTION = {
    f"{A}.fused_scaled_dot_product_attention": (
        Node(inputs=(cell(10), cell(100), cell(3)), outputs=(cell(2.5), cell(61))),
        ([1.0, 16.0, 0.0625, 16.0], [0.0625]),
    ),
    f"{A}.attn.impl.softmax": (Node(inputs=(cell(300),), outputs=(cell(1),)), ([], [0.0625])),
    f"{A}.attn.impl.batch2block_matmul": (
        Node(inputs=(cell(1), cell(50000)), outputs=(cell(7),)),
        ([0.0625, 1.0], [0.0625]),
    ),
    f"{A}.attn.impl.block2batch_matmul": (
        Node(inputs=(cell(1), cell(0)), outputs=(cell(7),)),
        ([0.0625, 1.0], [0.0625]),
    ),
    f"{A}.other_cache": (Node(inputs=(cell(300),)), ([16.0], [16.0])),
    f"{A}.other_product": (Node(inputs=(cell(300), cell(3))), ([16.0, 0.0625], [1.0])),
}


@pytest.mark.parametrize("name", ATTENTION)
def test_what_attention_is_made_of_has_the_scales_of_its_kind(name):
    node, (inputs, outputs) = ATTENTION[name]
    found = scales_from(
        {name: node}, method_config("maxabs_hw"), target=target("gaudi2"), arithmetic="BF16"
    )[name]
    assert [float(each) for each in found.inputs] == inputs and [
        float(each) for each in found.outputs
    ] == outputs


@pytest.mark.parametrize(
    "node",
    [
        Node(inputs=()),
        Node(inputs=(), weight=cell(1)),
        Node(inputs=(cell(5),), outputs=(cell(1),)),  # a cache, or a softmax
        Node(inputs=(cell(5), cell(6)), outputs=(cell(1),)),  # a product of either kind
    ],
)
def test_a_node_of_which_the_files_do_not_say_what_it_is_has_no_scales(node):
    nodes = {
        "lm_head": Node(inputs=(cell(60),), weight=cell(120)),
        "model.layers.0.mlp.other": node,
    }
    assert set(
        scales_from(nodes, method_config("maxabs_hw"), target=target("gaudi2"), arithmetic="BF16")
    ) == {"lm_head"}


def test_scales_per_channel_come_from_the_weight_itself():
    weight = torch.tensor([[120.0, 0.0, 0.0], [0.0, -30.0, 1.0]])
    nodes = {"lm_head": Node(inputs=(cell(60),), weight=cell(120))}
    config = method_config("act_maxabs_pow2_weights_pcs_maxabs_pow2")
    options = {"target": target("gaudi2"), "arithmetic": "exact"}
    found = scales_from(nodes, config, **options, read_weight=lambda _: weight)["lm_head"]
    assert found.weight.tolist() == [1.0, 0.25] and found.weight_inputs.tolist() == [1.0, 1.0, 1.0]
    assert found.inputs[0] == 1.0 and found.outputs[0].tolist() == [1.0, 0.25]
    with pytest.raises(InputError, match="lm_head: .* needs the weights"):
        scales_from(nodes, config, **options)


def test_each_node_has_its_own_method():
    part = {
        "granularity": "PTS",
        "scale_value_type": "FIXED_VALUE",
        "rounding_method": "SCALE_UNIT",
    }
    raw = {
        "granularity": "PTS",
        "scale_value_type": "MAXABS",
        "rounding_method": "IDENTITY",
        "backoff": 0.25,
    }
    config = method_config(
        {
            "default": {"weight": part, "activation": part},
            "layer_types": {"KVCache": {"weight": raw, "activation": raw}},
        }
    )
    nodes = {
        f"{A}.k_cache": Node(inputs=(cell(30),)),
        "lm_head": Node(inputs=(cell(30),), weight=cell(3)),
    }
    found = scales_from(nodes, config, target=target("gaudi2"), arithmetic="exact")
    assert found[f"{A}.k_cache"].inputs[0] == 0.5 and found["lm_head"].inputs[0] == 1.0


def test_scales_that_cannot_be_are_refused_with_the_node(statistics):
    nodes = nodes_from(statistics)
    with pytest.raises(UsageError, match="computes scales at run time"):
        scales_from(
            nodes, method_config("maxabs_pcs_pow2"), target=target("gaudi2"), arithmetic="BF16"
        )
    with pytest.raises(UnsupportedError, match="hardware scales"):
        scales_from(nodes, method_config("maxabs_hw"), target=target("cpu"), arithmetic="BF16")
    bad = {"lm_head": Node(inputs=(torch.tensor([[torch.nan]]),), weight=cell(1))}
    with pytest.raises(StatisticsError, match="lm_head: a maximum of nan"):
        scales_from(bad, method_config("maxabs_hw"), target=target("gaudi2"), arithmetic="BF16")


def test_a_maximum_just_above_a_step_is_told():
    nodes = {
        "above": Node(inputs=(cell(61),), weight=cell(1)),
        "at": Node(inputs=(cell(60),), weight=cell(1)),
        "far": Node(inputs=(cell(100),), weight=cell(1)),
    }
    assert near_steps(nodes, method_config("maxabs_hw"), target=target("gaudi2")) == ["above"]
    for name in ("maxabs_arbitrary", "unit_scale"):
        assert near_steps(nodes, method_config(name), target=target("gaudi2")) == []
    assert not SCALE_METHODS["unit_scale"].needs_measurement
