"""llama.cpp's mixtures of types, by the tables of its quantizer, layer by layer."""

import pytest

from quantflow.core.scheme import MIXTURES, preset
from quantflow.formats.llama_cpp.gguf import FILE_TYPES
from quantflow.formats.llama_cpp.mixtures import Position, type_of

KEYS = "self_attn.k_proj"
VALUES, DOWN, OUTPUT = "self_attn.v_proj", "mlp.down_proj", "self_attn.o_proj"


def types(mixture, module, *, layers=32, family="llama", **changes):
    """The type of a module in each layer, as runs of (type, layers)."""
    found = []
    for layer in range(layers):
        position = Position(layer=layer, layers=layers, **changes)
        kind = type_of(mixture, module, family=family, position=position)
        if found and found[-1][0] == kind:
            found[-1] = (kind, found[-1][1] + 1)
        else:
            found.append((kind, 1))
    return found


@pytest.mark.parametrize(
    ("mixture", "module", "expected"),
    [
        ("Q2_K_S", VALUES, [("Q2_K", 32)]),
        ("Q2_K_S", DOWN, [("Q4_K", 4), ("Q2_K", 28)]),
        ("Q3_K_S", VALUES, [("Q3_K", 32)]),
        ("Q3_K_S", DOWN, [("Q3_K", 32)]),
        ("Q3_K_M", VALUES, [("Q5_K", 2), ("Q4_K", 30)]),
        ("Q3_K_M", DOWN, [("Q5_K", 2), ("Q4_K", 30)]),
        ("Q3_K_M", OUTPUT, [("Q4_K", 32)]),
        ("Q3_K_L", VALUES, [("Q5_K", 32)]),
        ("Q3_K_L", DOWN, [("Q5_K", 32)]),
        ("Q3_K_L", OUTPUT, [("Q5_K", 32)]),
        ("Q4_K_S", VALUES, [("Q5_K", 4), ("Q4_K", 28)]),
        ("Q4_K_S", DOWN, [("Q5_K", 4), ("Q4_K", 28)]),
        ("Q4_K_S", OUTPUT, [("Q4_K", 32)]),
        ("Q5_K_S", VALUES, [("Q5_K", 32)]),
        ("Q5_K_S", DOWN, [("Q5_K", 32)]),
        ("IQ4_XS", VALUES, [("IQ4_XS", 32)]),
        ("IQ4_XS", DOWN, [("IQ4_XS", 32)]),
        ("IQ4_NL", DOWN, [("IQ4_NL", 32)]),
        ("IQ3_M", VALUES, [("Q4_K", 32)]),
        ("IQ3_M", DOWN, [("Q4_K", 4), ("IQ3_S", 28)]),
        ("IQ3_M", OUTPUT, [("Q4_K", 32)]),
        ("IQ3_S", VALUES, [("IQ3_S", 32)]),
        ("IQ3_S", DOWN, [("IQ3_S", 32)]),
        ("IQ3_XXS", VALUES, [("IQ3_XXS", 32)]),
        ("IQ3_XXS", OUTPUT, [("IQ3_S", 32)]),
        ("IQ3_XXS", KEYS, [("IQ2_S", 32)]),
        ("IQ2_M", VALUES, [("IQ3_S", 32)]),
        ("IQ2_M", DOWN, [("IQ3_S", 4), ("IQ2_S", 28)]),
        ("IQ2_M", OUTPUT, [("IQ3_S", 32)]),
        ("IQ2_XS", VALUES, [("Q2_K", 32)]),
        ("IQ2_XS", DOWN, [("Q2_K", 4), ("IQ2_XS", 28)]),
        ("IQ2_XXS", OUTPUT, [("IQ2_XXS", 32)]),
        ("IQ2_XXS", KEYS, [("IQ2_XXS", 32)]),
    ],
)
def test_linears_that_count_more_have_more_bits(mixture, module, expected):
    assert types(mixture, module) == expected
    assert types(mixture, "mlp.up_proj") == [(MIXTURES[mixture], 32)]


def test_a_third_of_the_middle_layers_and_both_ends_have_more_bits():
    # of 16 layers the first and last two, and 4, 7, 10, 13 between
    wanted = [layer in (0, 1, 4, 7, 10, 13, 14, 15) for layer in range(16)]
    for mixture, usual in (("Q4_K_M", "Q4_K"), ("Q5_K_M", "Q5_K")):
        for module in (VALUES, DOWN):
            found = [
                kind for kind, count in types(mixture, module, layers=16) for _ in range(count)
            ]
            assert found == ["Q6_K" if more else usual for more in wanted]


@pytest.mark.parametrize(
    ("mixture", "kind"), [("Q2_K_S", "Q4_K"), ("IQ4_NL", "Q5_K"), ("IQ4_XS", "Q5_K")]
)
def test_values_that_four_queries_share_have_more_bits(mixture, kind):
    assert types(mixture, VALUES, repeats=4) == [(kind, 32)]
    assert types(mixture, VALUES, repeats=3) == [(MIXTURES[mixture], 32)]


def test_iq3_xs_is_smaller_between_the_outer_eighths_and_in_queries_and_keys():
    for module in ("mlp.gate_proj", "mlp.up_proj"):
        assert types("IQ3_XS", module) == [("IQ3_S", 4), ("IQ3_XXS", 24), ("IQ3_S", 4)]
    for module in ("self_attn.q_proj", KEYS):
        assert types("IQ3_XS", module) == [("IQ3_XXS", 32)]
    assert types("IQ3_XS", DOWN) == [("IQ3_S", 32)]


@pytest.mark.parametrize("mixture", ["IQ2_XXS", "IQ2_XS", "IQ2_M"])
def test_values_of_iq2_that_are_shared_or_beside_experts_have_four_bits(mixture):
    assert types(mixture, VALUES, repeats=4) == [("Q4_K", 32)]
    assert types(mixture, VALUES, layers=80, repeats=8) == [("Q4_K", 80)]
    beside = {"family": "mixtral", "layers": 8}
    assert types(mixture, VALUES, experts=4, **beside) == [("Q4_K", 8)]
    assert types(mixture, KEYS, experts=4, **beside) == [(MIXTURES[mixture], 8)]
    assert types(mixture, KEYS, experts=8, **beside) == [("Q4_K", 8)]
    assert types(mixture, OUTPUT, experts=8, **beside) == [("Q5_K", 8)]


def test_down_projections_of_iq4_are_larger_where_no_input_is_weighed():
    assert types("IQ4_XS", DOWN, weighed=False) == [("Q5_K", 4), ("IQ4_XS", 28)]
    assert types("Q4_K_S", DOWN, weighed=False) == types("Q4_K_S", DOWN)


def test_attention_beside_eight_experts_has_more_bits():
    beside = {"family": "mixtral", "layers": 8, "experts": 8}
    for module in (VALUES, "self_attn.k_proj"):
        assert types("Q2_K_S", module, **beside) == [("Q8_0", 8)]
    assert types("IQ4_XS", OUTPUT, **beside) == [("Q5_K", 8)]
    assert types("Q3_K_L", OUTPUT, **beside) == [("Q3_K", 8)]
    down = "block_sparse_moe.experts.3.w2"
    assert types("Q4_K_S", down, **beside) == [("Q5_K", 1), ("Q4_K", 7)]


def test_values_of_a_model_of_70_b_have_five_bits():
    large = {"layers": 80, "repeats": 8}
    assert types("Q3_K_S", VALUES, **large) == [("Q5_K", 80)]
    assert types("Q3_K_S", VALUES, **large, family="qwen3") == [("Q3_K", 80)]
    assert types("Q3_K_S", VALUES, layers=80) == [("Q3_K", 80)]


def test_a_family_that_llama_cpp_does_not_name_has_one_type():
    assert types("Q4_K_M", "anything", family="unknown") == [("Q4_K", 32)]


@pytest.mark.parametrize("mixture", MIXTURES)
def test_a_mixture_is_a_scheme_and_a_kind_of_file(mixture):
    scheme = preset(mixture)
    assert scheme.name == mixture and scheme.weights.block_type == MIXTURES[mixture]
    assert mixture in FILE_TYPES
