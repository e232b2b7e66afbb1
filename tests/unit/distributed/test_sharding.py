"""What each card holds: transformers' plan or the row's, checked against shapes and heads."""

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    CodeGenConfig,
    DeepseekV3Config,
    FalconConfig,
    Gemma4TextConfig,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    MptConfig,
    OPTConfig,
    Phi3Config,
    Qwen2Config,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from quantflow.distributed.placement import (
    check_cover,
    check_placement,
    joined,
    share,
    spans_of,
)
from quantflow.distributed.sharding import placements
from quantflow.errors import InputError, StatisticsError, UnsupportedError, UsageError
from quantflow.models.names import NameMap

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "vocab_size": 50,
    "max_position_embeddings": 32,
}
CONFIGS = {
    "llama": LlamaConfig(**SIZES, num_key_value_heads=4),
    "mistral": MistralConfig(**SIZES, num_key_value_heads=4),
    "qwen2": Qwen2Config(**SIZES, num_key_value_heads=4),
    "qwen3": Qwen3Config(**SIZES, num_key_value_heads=4, head_dim=16),
    "gpt_neox": GPTNeoXConfig(**SIZES),
}


def model_of(config):
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def shapes_of(config):
    """Source name -> shape; GPT-NeoX's files call the head by another name."""
    shapes = {name: list(tensor.shape) for name, tensor in model_of(config).state_dict().items()}
    if config.model_type == "gpt_neox":
        shapes["embed_out.weight"] = shapes.pop("lm_head.weight")
    return shapes


def expert_shapes(config, *, experts, width, first="block_sparse_moe", names=("w1", "w3", "w2")):
    """Shapes of one layer with a linear per expert, as checkpoints have it."""
    hidden = config.hidden_size
    shapes = {f"model.layers.0.{first}.gate.weight": [experts, hidden]}
    for number in range(experts):
        for name in names:
            shape = [hidden, width] if name in ("w2", "down_proj") else [width, hidden]
            shapes[f"model.layers.0.{first}.experts.{number}.{name}.weight"] = shape
    return shapes


@pytest.mark.parametrize("family", list(CONFIGS))
@pytest.mark.parametrize("tp", [2, 4])
def test_each_weight_is_cut_as_transformers_itself_cuts_it(family, tp):
    """The styles are those of the plan that transformers puts together when it builds a model."""
    config = CONFIGS[family]
    model, shapes = model_of(config), shapes_of(config)
    names, seen = NameMap(model), set()
    found = placements(config, shapes, tp=tp, rank=1)
    for source in shapes:
        module = names.module_name(source).removesuffix(".weight")
        pattern = ".".join("*" if part.isdecimal() else part for part in module.split("."))
        style = model.tp_plan.get(pattern)
        placement = found.get(source.removesuffix(".weight"))
        if placement is None:
            assert len(shapes[source]) == 1 or not source.endswith(".weight")
            continue
        kind = {None: "replicated", "rowwise": "row"}.get(style, "column")
        assert (placement["kind"], placement["full_shape"]) == (kind, shapes[source]), source
        output = {
            "rowwise": "reduced",
            "colwise_gather_output": "gathered",
            "embedding_rowwise": "reduced",
        }.get(style)
        assert placement.get("output") == output, source
        seen.add(style)
    assert {"colwise", "rowwise", "colwise_gather_output"} <= seen


@pytest.mark.parametrize("family", list(CONFIGS))
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_the_shares_of_all_cards_are_the_whole_and_can_be_recorded(family, tp):
    config = CONFIGS[family]
    shapes = shapes_of(config)
    cards = [placements(config, shapes, tp=tp, rank=rank) for rank in range(tp)]
    for name in cards[0]:
        check_cover(name, [card[name] for card in cards])
        for card in cards:
            check_placement(name, card[name], where="here")
    replica = [placements(config, shapes, tp=tp, rank=tp + rank) for rank in range(tp)]
    assert replica == cards


def test_a_llama_layer_on_the_second_of_two_cards_by_hand():
    config = CONFIGS["llama"]  # 8 heads of 8, 4 key and value heads
    found = placements(config, shapes_of(config), tp=2, rank=1)
    layer = {
        name.removeprefix("model.layers.1."): one
        for name, one in found.items()
        if name.startswith("model.layers.1.")
    }
    column = {"kind": "column", "axis": 0}
    row = {"kind": "row", "axis": 1, "output": "reduced"}
    keys = {**column, "offset": 16, "length": 16, "full_shape": [32, 64], "unit": 8, "copies": True}
    assert layer == {
        "self_attn.q_proj": {
            **column,
            "offset": 32,
            "length": 32,
            "full_shape": [64, 64],
            "unit": 8,
        },
        "self_attn.k_proj": keys,
        "self_attn.v_proj": keys,
        "self_attn.o_proj": {**row, "offset": 32, "length": 32, "full_shape": [64, 64], "unit": 8},
        "self_attn": {**column, "offset": 2, "length": 2, "full_shape": [4, 8], "copies": True},
        "mlp.gate_proj": {**column, "offset": 48, "length": 48, "full_shape": [96, 64]},
        "mlp.up_proj": {**column, "offset": 48, "length": 48, "full_shape": [96, 64]},
        "mlp.down_proj": {**row, "offset": 48, "length": 48, "full_shape": [64, 96]},
    }
    assert found["model.embed_tokens"] == {
        **column,
        "offset": 25,
        "length": 25,
        "full_shape": [50, 64],
        "output": "reduced",
    }
    assert found["lm_head"] == {
        **column,
        "offset": 25,
        "length": 25,
        "full_shape": [50, 64],
        "output": "gathered",
    }


def test_the_fused_projection_of_gpt_neox_is_cut_between_heads():
    config = CONFIGS["gpt_neox"]
    found = placements(config, shapes_of(config), tp=4, rank=3)
    fused = found["gpt_neox.layers.0.attention.query_key_value"]
    # two heads of 3 * 8 rows
    assert (fused["offset"], fused["length"], fused["unit"]) == (144, 48, 24)
    assert found["gpt_neox.layers.0.attention"] == {
        "kind": "column",
        "axis": 0,
        "offset": 6,
        "length": 2,
        "full_shape": [8, 8],
        "copies": True,
    }
    assert found["gpt_neox.embed_in"]["kind"] == "replicated"


def test_one_card_holds_everything_and_the_plan_says_how_it_would_be_cut():
    config = CONFIGS["llama"]
    found = placements(config, shapes_of(config), tp=1, rank=0)
    base = {"kind": "replicated", "axis": None, "offset": 0}
    prefix = "model.layers.0"
    assert found[f"{prefix}.self_attn.k_proj"] == {
        **base,
        "full_shape": [32, 64],
        "plan": "column",
        "unit": 8,
        "copies": True,
    }
    assert found[f"{prefix}.self_attn"] == {
        **base,
        "full_shape": [4, 8],
        "plan": "column",
        "copies": True,
    }
    assert found[f"{prefix}.self_attn.q_proj"] == {
        **base,
        "full_shape": [64, 64],
        "plan": "column",
        "unit": 8,
    }
    assert found[f"{prefix}.mlp.down_proj"] == {
        **base,
        "full_shape": [64, 96],
        "plan": "row",
        "output": "reduced",
    }


def test_a_vocabulary_that_does_not_divide_is_cut_as_torch_cuts_it():
    config = LlamaConfig(**SIZES | {"vocab_size": 51}, num_key_value_heads=4)
    shapes = shapes_of(config)
    found = [placements(config, shapes, tp=4, rank=rank)["lm_head"] for rank in range(4)]
    assert [one["length"] for one in found] == [
        len(part) for part in torch.chunk(torch.arange(51), 4)
    ]
    assert [one["offset"] for one in found] == [
        int(part[0]) for part in torch.chunk(torch.arange(51), 4)
    ]


def test_what_is_measured_of_a_row_is_the_callers_to_say():
    config = CONFIGS["llama"]
    found = placements(config, shapes_of(config), tp=2, rank=0, row_output="partial")
    outputs = {name: one["output"] for name, one in found.items() if one["kind"] == "row"}
    assert len(outputs) == 4 and set(outputs.values()) == {"partial"}


@pytest.mark.parametrize(
    ("change", "tp", "message"),
    [
        ({}, 3, r"self_attn\.q_proj: 8 heads over 3 cards"),
        (
            {"hidden_size": 96, "num_attention_heads": 12, "num_key_value_heads": 4},
            6,
            r"self_attn\.k_proj: 4 heads over 6 cards",
        ),
        ({"num_key_value_heads": 1}, 9, r"self_attn\.q_proj: 8 heads over 9 cards"),
        ({"intermediate_size": 90}, 4, r"mlp\.gate_proj: 90 rows over 4 cards"),
        ({}, 0, r"tp=0, ep=1; give 1 or more"),
    ],
)
def test_a_number_of_cards_that_does_not_divide_is_refused_with_the_numbers(change, tp, message):
    config = LlamaConfig(**{**SIZES, "num_key_value_heads": 4, **change})
    with pytest.raises(UsageError, match=message):
        placements(config, shapes_of(config), tp=tp, rank=0)


def test_key_and_value_heads_that_are_fewer_than_the_cards_are_held_by_several():
    config = LlamaConfig(**SIZES, num_key_value_heads=2)
    shapes = shapes_of(config)
    found = [placements(config, shapes, tp=4, rank=rank) for rank in range(4)]
    assert [one["model.layers.0.self_attn.v_proj"]["offset"] for one in found] == [0, 0, 8, 8]
    assert [one["model.layers.0.self_attn"]["offset"] for one in found] == [0, 0, 1, 1]
    assert [one["model.layers.0.self_attn.q_proj"]["offset"] for one in found] == [0, 16, 32, 48]


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        (
            "self_attn.q_proj",
            [60, 64],
            r"q_proj: 60 rows, config.json has num_attention_heads=8 of 8 rows each",
        ),
        (
            "self_attn.k_proj",
            [64, 64],
            r"k_proj: 64 rows, config.json has num_key_value_heads=4 of 8 rows each",
        ),
        (
            "self_attn.o_proj",
            [64, 32],
            r"o_proj: 32 columns, config.json has num_attention_heads=8 of 8 columns each",
        ),
    ],
)
@pytest.mark.parametrize("tp", [1, 2])
def test_a_weight_without_the_configurations_heads_is_refused(name, shape, message, tp):
    config = CONFIGS["llama"]
    shapes = {**shapes_of(config), f"model.layers.0.{name}.weight": shape}
    with pytest.raises(InputError, match=message):
        placements(config, shapes, tp=tp, rank=0)


def test_heads_that_hold_their_gate_too_are_whole_on_one_card_and_refused_on_two():
    kinds = ["linear_attention", "full_attention"]
    config = Qwen3_5TextConfig(**SIZES, num_key_value_heads=4, head_dim=16, layer_types=kinds)
    shapes = {name: shape for name, shape in shapes_of(config).items() if len(shape) == 2}
    found = placements(config, shapes, tp=1, rank=0)
    query = "model.layers.1.self_attn.q_proj"
    # 8 heads of 16, twice
    assert found[query] == {
        "kind": "replicated",
        "axis": None,
        "offset": 0,
        "full_shape": [256, 64],
    }
    assert found["model.layers.1.self_attn"]["full_shape"] == [4, 16]
    with pytest.raises(
        InputError, match=r"q_proj: 256 rows, config.json has num_attention_heads=8 of 16 rows each"
    ):
        placements(config, shapes, tp=2, rank=0)


def test_layers_of_several_head_sizes_are_whole_on_one_card():
    kinds = ["sliding_attention", "full_attention"]
    config = Gemma4TextConfig(
        **SIZES, num_key_value_heads=4, head_dim=16, global_head_dim=32, layer_types=kinds
    )
    shapes = {name: shape for name, shape in shapes_of(config).items() if len(shape) == 2}
    found = placements(config, shapes, tp=1, rank=0)
    heads = [found[f"model.layers.{layer}.self_attn"]["full_shape"] for layer in (0, 1)]
    assert heads == [[4, 16], [4, 32]]
    assert not any("plan" in one for one in found.values())


def test_experts_are_cut_over_the_cards_as_the_stacked_tensors_are():
    config = MixtralConfig(**SIZES, num_key_value_heads=4, num_local_experts=4)
    found = placements(config, expert_shapes(config, experts=4, width=96), tp=2, rank=1)
    prefix = "model.layers.0.block_sparse_moe"
    for number in range(4):
        for name in ("w1", "w3"):
            one = found[f"{prefix}.experts.{number}.{name}"]
            assert (one["kind"], one["offset"], one["length"]) == ("column", 48, 48)
        one = found[f"{prefix}.experts.{number}.w2"]
        assert (one["kind"], one["offset"], one["length"], one["output"]) == (
            "row",
            48,
            48,
            "reduced",
        )
    assert found[f"{prefix}.gate"]["kind"] == "replicated"


def test_experts_are_spread_whole_over_ranks_where_that_is_asked_for():
    config = Qwen3MoeConfig(**SIZES, num_key_value_heads=4, num_experts=4, moe_intermediate_size=32)
    shapes = expert_shapes(
        config, experts=4, width=32, first="mlp", names=("gate_proj", "up_proj", "down_proj")
    )
    found = [placements(config, shapes, tp=2, rank=rank, ep=2) for rank in range(2)]
    held = [
        [
            number
            for number in range(4)
            if one[f"model.layers.0.mlp.experts.{number}.up_proj"]["length"]
        ]
        for one in found
    ]
    assert held == [[0, 1], [2, 3]]
    assert found[1]["model.layers.0.mlp.experts.3.down_proj"] == {
        "kind": "expert",
        "axis": None,
        "offset": 3,
        "length": 1,
        "experts": 4,
        "full_shape": [64, 32],
    }
    with pytest.raises(UsageError, match=r"4 experts over 3 cards"):
        placements(config, shapes, tp=1, rank=0, ep=3)


def test_a_missing_expert_is_named():
    config = MixtralConfig(**SIZES, num_key_value_heads=4, num_local_experts=4)
    shapes = {
        name: shape
        for name, shape in expert_shapes(config, experts=4, width=96).items()
        if ".experts.2." not in name
    }
    with pytest.raises(
        InputError, match=r"block_sparse_moe\.experts: 3 experts up to number 3, 2 is missing"
    ):
        placements(config, shapes, tp=1, rank=0, ep=3)


def test_experts_in_one_tensor_are_refused():
    config = MixtralConfig(**SIZES, num_key_value_heads=4, num_local_experts=4)
    shapes = {"model.layers.0.mlp.experts.gate_up_proj": [4, 192, 64]}
    assert placements(config, shapes, tp=1, rank=0) == {}
    with pytest.raises(
        UnsupportedError, match=r"experts\.gate_up_proj: \[4, 192, 64\], all experts in one tensor"
    ):
        placements(config, shapes, tp=2, rank=0)


def test_shared_experts_are_ordinary_linears():
    config = DeepseekV3Config(**SIZES)
    prefix = "model.layers.3.mlp.shared_experts"
    shapes = {f"{prefix}.up_proj.weight": [96, 64], f"{prefix}.down_proj.weight": [64, 96]}
    found = placements(config, shapes, tp=2, rank=0)
    assert [one["kind"] for one in found.values()] == ["column", "row"]


def test_a_family_without_a_plan_and_a_row_is_measured_on_one_card_alone():
    config = MptConfig(d_model=64, n_heads=8, n_layers=1)
    shapes = {"transformer.blocks.0.ffn.up_proj.weight": [256, 64]}
    found = placements(config, shapes, tp=1, rank=0)
    assert found["transformer.blocks.0.ffn.up_proj"]["kind"] == "replicated"
    said = (
        r"model_type 'mpt': transformers has no tensor-parallel plan, and its row has none \(it "
        r"does not know the layers of mpt\); use --tp 1"
    )
    with pytest.raises(UnsupportedError, match=said):
        placements(config, shapes, tp=2, rank=0)


def test_a_family_without_a_plan_is_cut_as_its_row_says():
    config = OPTConfig(hidden_size=64, num_attention_heads=8, ffn_dim=96, num_hidden_layers=1)
    prefix = "model.decoder.layers.0"
    shapes = {f"{prefix}.fc1.weight": [96, 64], f"{prefix}.fc2.weight": [64, 96]}
    shapes |= {
        f"{prefix}.self_attn.{each}_proj.weight": [64, 64] for each in ("q", "k", "v", "out")
    }
    found = placements(config, shapes, tp=2, rank=1)
    kinds = {name.rpartition(".")[2]: (one["kind"], one["offset"]) for name, one in found.items()}
    rows = dict.fromkeys(("q_proj", "k_proj", "v_proj"), ("column", 32)) | {"fc1": ("column", 48)}
    columns = {"out_proj": ("row", 32), "fc2": ("row", 48)}
    assert kinds == {**rows, **columns, "self_attn": ("column", 4)}


def fused(config, name, rows, *, tp, rank):
    """The runs of rows of one linear of queries, keys and values that a card holds."""
    shapes = {f"{name}.weight": [rows, config.hidden_size]}
    return placements(config, shapes, tp=tp, rank=rank)[name].get("spans")


def test_queries_keys_and_values_of_one_linear_are_cut_each_by_itself():
    """GPT-2 has all queries, then all keys, then all values."""
    config = GPT2Config(n_embd=64, n_head=8, n_layer=1)
    name = "transformer.h.0.attn.c_attn"
    assert fused(config, name, 192, tp=2, rank=1) == [[32, 32], [96, 32], [160, 32]]
    assert fused(config, name, 192, tp=8, rank=0) == [[0, 8], [64, 8], [128, 8]]


def test_heads_of_a_falcon_go_in_unequal_numbers_where_all_share_a_key():
    """Falcon 7B has 71 heads of 64, then a key and a value that every card has."""
    config = FalconConfig(hidden_size=4544, num_attention_heads=71, num_hidden_layers=1)
    name = "transformer.h.0.self_attention.query_key_value"
    assert fused(config, name, 73 * 64, tp=2, rank=0) == [[0, 35 * 64], [71 * 64, 128]]
    # the last card's queries stand beside them
    last = placements(config, {f"{name}.weight": [73 * 64, 4544]}, tp=2, rank=1)[name]
    assert (last["offset"], last["length"], "spans" in last) == (35 * 64, 38 * 64, False)


def test_a_card_has_a_part_of_a_block_where_blocks_are_fewer_than_cards():
    """Falcon 40B has eight blocks: 16 queries, a key and a value."""
    config = FalconConfig(
        hidden_size=8192,
        num_attention_heads=128,
        num_kv_heads=8,
        num_hidden_layers=1,
        new_decoder_architecture=True,
    )
    name, block = "transformer.h.0.self_attention.query_key_value", 18 * 64
    shapes = {f"{name}.weight": [8 * block, 8192]}
    whole = placements(config, shapes, tp=4, rank=3)
    assert (whole[name]["offset"], whole[name]["length"]) == (6 * block, 2 * block)
    # transformers keeps a key for each query
    assert whole["transformer.h.0.self_attention"] == {
        "kind": "column",
        "axis": 0,
        "offset": 96,
        "length": 32,
        "full_shape": [128, 64],
    }
    third = placements(config, shapes, tp=16, rank=2)[name]
    assert third["spans"] == [[block, 8 * 64], [block + 16 * 64, 2 * 64]]


def test_the_processors_that_trained_a_codegen_are_its_blocks():
    """Four blocks of queries, values and keys."""
    config = CodeGenConfig(n_embd=64, n_head=8, n_layer=1, rotary_dim=8)
    name = "transformer.h.0.attn.qkv_proj"
    shapes = {f"{name}.weight": [192, 64]}
    half = placements(config, shapes, tp=2, rank=1)[name]
    assert (half["offset"], half["length"]) == (96, 96)
    assert fused(config, name, 192, tp=8, rank=3) == [[56, 8], [72, 8], [88, 8]]


def test_gate_and_up_of_one_linear_are_cut_each_by_itself():
    config = Phi3Config(**SIZES, num_key_value_heads=4, pad_token_id=0)
    shapes = {"model.layers.0.mlp.gate_up_proj.weight": [192, 64]}
    shapes |= {"model.layers.0.self_attn.qkv_proj.weight": [128, 64]}
    found = placements(config, shapes, tp=2, rank=1)
    assert found["model.layers.0.mlp.gate_up_proj"]["spans"] == [[48, 48], [144, 48]]
    assert found["model.layers.0.self_attn.qkv_proj"]["spans"] == [[32, 32], [80, 16], [112, 16]]


@pytest.mark.parametrize("cards", [2, 3, 4, 6, 8])
@pytest.mark.parametrize("queries", [5, 8, 16])
@pytest.mark.parametrize("blocks", [1, 2, 4])
def test_cards_hold_every_row_of_one_linear_in_order(cards, queries, blocks):
    parts = [{"units": queries, "uneven": True}, {"units": 1, "copies": True}]
    parts.append({"units": 1, "copies": True})
    size = blocks * (queries + 2) * 4
    whole = {"kind": "replicated", "axis": None, "offset": 0, "full_shape": [size, 3]}
    whole |= {"plan": "column", "unit": 4, "blocks": blocks, "parts": parts}
    if blocks % cards and (cards % blocks or queries < cards // blocks):
        with pytest.raises(UsageError, match=f"over {cards} cards"):
            share("fused", whole, cards=cards, card=0)
        return
    held = [share("fused", whole, cards=cards, card=card) for card in range(cards)]
    for one in held:
        check_placement("fused", one, where="here")
    check_cover("fused", held)
    assert joined(held) == whole
    every = [
        row for one in held for begin, count in spans_of(one) for row in range(begin, begin + count)
    ]
    assert set(every) == set(range(size))
    if cards % 2 == 0:
        halves = [joined(held[: cards // 2]), joined(held[cards // 2 :])]
        assert joined(halves) == whole
    del held[-1]
    with pytest.raises(StatisticsError, match=r"fused: .* cards hold .* along axis 0, in turn"):
        check_cover("fused", held)


@pytest.mark.parametrize(
    "wrong",
    [
        {"spans": [[0, 4]]},
        {"spans": [[0, 4], [2, 4]]},
        {"spans": [[4, 4], [12, 4]]},
        {"spans": [[0, 4], [28, 4]], "length": 9},
        {"spans": [[0, 4], [30, 4]]},
        {"spans": [[0, 4], ["8", 4]]},
        {"spans": {}},
        {"parts": []},
        {"parts": [{"units": 0}]},
        {"parts": [{"units": 2, "copies": 3}]},
        {"parts": [{"units": 2, "heads": 3}]},
        {"blocks": 0},
        {"uneven": 1.5},
    ],
)
def test_records_of_shares_that_lie_apart_are_checked(wrong):
    right = {"kind": "column", "axis": 0, "offset": 0, "length": 8, "full_shape": [32, 3]}
    right |= {"spans": [[0, 4], [16, 4]], "unit": 4, "blocks": 1, "uneven": True}
    right |= {"parts": [{"units": 4}, {"units": 4, "copies": True}]}
    check_placement("fused", right, where="here")
    with pytest.raises(InputError, match=r"here: tensors\.fused: .* does not fit"):
        check_placement("fused", {**right, **wrong}, where="here")
