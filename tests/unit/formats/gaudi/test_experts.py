"""Mixtures of experts and compressed caches as Gaudi's nodes, and back."""

from dataclasses import replace

import pytest
import torch

from quantflow.core.device_scales import target
from quantflow.errors import StatisticsError
from quantflow.formats.gaudi import experts
from quantflow.formats.gaudi.gaudi_nodes import (
    are_vllms,
    for_optimum_habana,
    for_vllm,
    layer_type,
    maxima_of_inputs,
    parts_of,
    postprocess,
    statistics_from,
    unmeasured,
    without_outputs,
)
from quantflow.formats.gaudi.module_patterns import ModuleList
from quantflow.formats.gaudi.scale_methods import method_config
from quantflow.formats.gaudi.scales import scales_from
from quantflow.formats.gaudi.triple import Node

MIXTRAL = "model.layers.0.block_sparse_moe"
DEEPSEEK = "model.layers.3.mlp"
ATTENTION = "model.layers.3.self_attn"
MLA = f"{ATTENTION}.mla_attn.mla_attn.impl"


def cell(value: float) -> torch.Tensor:
    return torch.tensor([[float(value)]])


def linear(inputs: float, weight: float, output: float | None = None) -> Node:
    outputs = () if output is None else (cell(output),)
    return Node(inputs=(cell(inputs),), weight=cell(weight), outputs=outputs)


def mixture(inside: dict[int, float], *, block: str = MIXTRAL) -> dict[str, Node]:
    """Experts by number, with the maximum of what lies inside each."""
    gate, up, down = (
        ("w1", "w3", "w2") if block == MIXTRAL else ("gate_proj", "up_proj", "down_proj")
    )
    nodes = {}
    for number, value in inside.items():
        prefix = f"{block}.experts.{number}"
        nodes |= {
            f"{prefix}.{gate}": linear(10 + number, 1 + number, 90),
            f"{prefix}.{up}": linear(10 + number, 2 + number, 91),
            f"{prefix}.{down}": linear(value, 3 + number, 20 + number),
        }
    return nodes


def values(node: Node) -> dict[str, float]:
    return {key: value.item() for key, value in node.tensors.items()}


def test_vllms_operator_has_one_input_and_an_output_for_each_expert_after_its_own():
    nodes = for_vllm(mixture({0: 5, 1: 7, 2: 6}))
    for inside in ("", ".routed_experts"):
        operator = f"{MIXTRAL}.experts{inside}.moe_op"
        assert values(nodes[operator]) == {
            "input 0": 12,
            "output 0": 22,
            "output 1": 5,
            "output 2": 7,
            "output 3": 6,
        }
        assert values(nodes[f"{operator}.w13_list.1"]) == {"input 0": 11, "weight": 3}
        assert values(nodes[f"{operator}.w2_list.1"]) == {"input 0": 7, "weight": 4}
    assert len(nodes) == 2 * (1 + 2 * 3) and are_vllms(nodes)
    assert parts_of(f"{MIXTRAL}.experts.moe_op.w13_list.1") == (
        f"{MIXTRAL}.experts.1.w1",
        f"{MIXTRAL}.experts.1.w3",
    )


def test_a_card_with_some_of_the_experts_counts_its_own_from_zero():
    nodes = for_vllm(mixture({4: 5, 5: 7}))
    operator = f"{MIXTRAL}.experts.moe_op"
    assert [value.item() for value in nodes[operator].outputs] == [25, 5, 7]
    assert nodes[f"{operator}.w2_list.0"].weight == 7 and f"{operator}.w2_list.4" not in nodes


def test_optimum_habanas_operator_counts_the_experts_of_the_model_and_keeps_their_linears():
    nodes = for_optimum_habana(
        mixture({2: 5, 3: 7}), patched=True, counts={f"{MIXTRAL}.experts": 4}
    )
    assert [value.item() for value in nodes[MIXTRAL].outputs] == [23, 0, 0, 5, 7]
    assert values(nodes[f"{MIXTRAL}.experts.3.w2"])["weight"] == 6
    assert layer_type(MIXTRAL, nodes[MIXTRAL]) == "GaudiMixtralSparseMoeBlock"


def test_experts_whose_operator_the_toolkit_does_not_patch_are_left_out_and_blocked():
    nodes = mixture({0: 5, 1: 7}, block=DEEPSEEK) | {
        f"{DEEPSEEK}.shared_experts.up_proj": linear(1, 2)
    }
    kept = for_optimum_habana(nodes, patched=False, counts={f"{DEEPSEEK}.experts": 2})
    assert list(kept) == [f"{DEEPSEEK}.shared_experts.up_proj"]
    blocked = ModuleList(names=(experts.LINEARS, experts.ROUTERS))
    assert all(blocked.holds(name, "Linear") for name in nodes if ".experts." in name)
    assert not any(blocked.holds(name, "Linear") for name in kept)
    routers = ("mlp.gate", "feed_forward.router", "mlp.shared_expert_gate")
    assert all(blocked.holds(f"model.layers.0.{name}", "Linear") for name in routers)
    assert not blocked.holds("model.layers.0.mlp.gate_proj", "Linear")


def test_an_expert_without_tokens_has_the_widest_range_of_its_layer_and_is_named():
    nodes = mixture({0: 5, 1: 0, 2: 6})
    assert experts.untold(nodes) == (f"{MIXTRAL}.experts.1",)
    outputs = for_vllm(nodes)[f"{MIXTRAL}.experts.moe_op"].outputs
    assert [value.item() for value in outputs] == [22, 5, 6, 6]
    with pytest.raises(StatisticsError, match=rf"{MIXTRAL}.experts: no expert saw a token"):
        for_vllm(mixture({0: 0, 1: 0}))


def test_an_expert_without_its_last_linear_is_refused():
    nodes = mixture({0: 5})
    del nodes[f"{MIXTRAL}.experts.0.w2"]
    with pytest.raises(StatisticsError, match=r"experts\.0: gate, up measured"):
        for_vllm(nodes)


def test_an_operators_scales_are_of_its_input_and_of_each_expert():
    nodes = for_vllm(mixture({0: 61, 1: 7}))
    name = f"{MIXTRAL}.experts.moe_op"
    assert layer_type(name, nodes[name]) == "VllmMixtureOfExpertsOp"
    assert [value.item() for value in maxima_of_inputs(name, nodes[name])] == [11, 61, 7]
    scales = scales_from(
        without_outputs(nodes),
        method_config("maxabs_hw"),
        target=target("gaudi2"),
        arithmetic="BF16",
    )
    # the least power of 16 that is not below maximum / 60
    assert [float(value) for value in scales[name].inputs] == [1.0, 16.0, 1.0]
    assert scales[name].weight is None and scales[f"{name}.w2_list.1"].weight == 0.0625


def test_the_toolkits_inputs_of_zero_are_replaced_by_what_the_operator_saw():
    theirs = {
        name: replace(node, inputs=(cell(0),)) if node.weight is not None else node
        for name, node in for_vllm(mixture({0: 5, 1: 7})).items()
    }
    found, others = statistics_from(theirs)
    assert others == ()
    inputs = {key: value.item() for key, value in found.items() if "|input|" in key}
    assert inputs == {
        f"{MIXTRAL}.experts.{number}.{leaf}|input|amax": value
        for number, inside in ((0, 5), (1, 7))
        for leaf, value in (("w1", 11), ("w3", 11), ("w2", inside))
    }
    weights = {key for key in found if "|weight|" in key}
    assert weights == {f"{MIXTRAL}.experts.{number}.w2|weight|amax" for number in (0, 1)}
    habana = for_optimum_habana(
        mixture({0: 5, 1: 7}), patched=True, counts={f"{MIXTRAL}.experts": 2}
    )
    habana[f"{MIXTRAL}.experts.1.w2"] = linear(0, 4)
    found, _ = statistics_from(habana)
    assert found[f"{MIXTRAL}.experts.1.w2|input|amax"] == 7
    assert found[f"{MIXTRAL}.experts.0.w1|weight|amax"] == 1


def test_the_models_own_names_decide_how_its_experts_linears_are_called():
    node = "model.layers.0.mlp.experts.moe_op.w2_list.3"
    assert experts.source_names(node) == ("model.layers.0.mlp.experts.3.down_proj",)
    known = ["model.layers.0.mlp.experts.3.w2"]
    assert experts.source_names(node, known) == ("model.layers.0.mlp.experts.3.w2",)
    assert experts.source_names("lm_head") == ("lm_head",)


def compressed(*, low_rank_queries: bool) -> dict[str, Node]:
    """An attention with a compressed cache, in our names."""
    queries = ("q_a_proj", "q_b_proj") if low_rank_queries else ("q_proj",)
    nodes = {
        f"{ATTENTION}.{leaf}": linear(4, 1)
        for leaf in (*queries, "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
    }
    nodes[f"{ATTENTION}.kv_b_proj"] = linear(8, 2)
    return nodes | {
        f"{ATTENTION}.k_cache": Node(inputs=(cell(5),)),
        f"{ATTENTION}.v_cache": Node(inputs=(cell(50),)),
        f"{ATTENTION}.matmul_qk": Node(inputs=(cell(6), cell(5))),
        f"{ATTENTION}.matmul_av": Node(inputs=(cell(1), cell(50))),
    }


@pytest.mark.parametrize("low_rank_queries", [False, True])
def test_a_compressed_cache_is_bounded_and_its_products_are_left_out(low_rank_queries):
    nodes = for_vllm(compressed(low_rank_queries=low_rank_queries))
    queries = {"fused_qkv_a_proj", "q_b_proj"} if low_rank_queries else {"q_proj"}
    alone = set() if low_rank_queries else {"kv_a_proj_with_mqa"}
    linears = {f"{ATTENTION}.{leaf}" for leaf in {*queries, *alone, "kv_b_proj", "o_proj"}}
    assert nodes.keys() == {*linears, f"{MLA}.latent_cache_k"}
    assert nodes[f"{MLA}.latent_cache_k"].inputs[0] == 8  # not below keys' 5 and kv_b_proj's 8
    assert layer_type(f"{MLA}.latent_cache_k", nodes[f"{MLA}.latent_cache_k"]) == "KVCache"
    assert unmeasured(nodes) == ("matmul_qk", "matmul_av", "k_cache", "v_cache")
    kept = for_optimum_habana(
        compressed(low_rank_queries=low_rank_queries), patched=True, counts={}
    )
    assert not {f"{ATTENTION}.{leaf}" for leaf in ("k_cache", "v_cache", "kv_b_proj")} & {*kept}
    assert {"k_cache", "v_cache", "kv_b_proj", "matmul_qk"} <= {*unmeasured(kept)}


def test_what_a_compressed_cache_holds_is_no_statistic_of_ours_and_its_products_get_it():
    nodes = {
        f"{MLA}.latent_cache_k": Node(inputs=(cell(8),)),
        f"{MLA}.matmul_qk": Node(inputs=(cell(3), cell(2))),
        f"{MLA}.matmul_av": Node(inputs=(cell(1), cell(2))),
        f"{ATTENTION}.fused_qkv_a_proj": linear(4, 1),
    }
    found, others = statistics_from(nodes)
    assert {*others} == {f"{MLA}.{leaf}" for leaf in ("latent_cache_k", "matmul_qk", "matmul_av")}
    assert {key.split("|")[0] for key in found} == {
        f"{ATTENTION}.q_a_proj",
        f"{ATTENTION}.kv_a_proj_with_mqa",
    }
    completed = postprocess(nodes)
    for leaf in ("matmul_qk", "matmul_av"):
        assert completed[f"{MLA}.{leaf}"].inputs[1] == 8
    # the caches of optimum-habana's hold other tensors than its products multiply
    habana = compressed(low_rank_queries=True)
    habana[f"{ATTENTION}.matmul_av"] = Node(inputs=(cell(1), cell(2)))
    assert postprocess(habana)[f"{ATTENTION}.matmul_av"].inputs[1] == 2
