"""The plan of quantize, resolved before any weight is read."""

import math

import pytest
from transformers import FalconConfig, LlamaConfig

from quantflow.errors import SchemeError, UsageError
from quantflow.models.open import graph_for
from quantflow.planning.plan import kept_for_few_inputs, left_out, narrowed, resolve
from quantflow.planning.recipe import Override, Quantize, Tune
from quantflow.planning.requirements import counts_in_measure, entries_of, statistics_for

GRAPH = graph_for(
    LlamaConfig(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        architectures=["LlamaForCausalLM"],
    )
)
SHAPES = {
    f"{name}.weight": (64, 96 if name.endswith("down_proj") else 64) for name in GRAPH.linears
}
SHAPES |= {
    "lm_head.weight": (320, 64),
    "model.norm.weight": (64,),
    "model.embed_tokens.weight": (320, 64),
}


def plan(scheme, **options):
    return resolve(Quantize(name="a", scheme=scheme, **options), GRAPH, SHAPES)


def test_every_linear_of_the_decoder_layers_is_quantized_and_nothing_else():
    found = plan("FP8_DYNAMIC").schemes
    assert list(found) == list(GRAPH.linears) and len(found) == 14
    assert {scheme.name for scheme in found.values()} == {"FP8_DYNAMIC"}


@pytest.mark.parametrize(
    ("scheme", "options", "needs"),
    [
        ("FP8_DYNAMIC", {}, set()),
        ("W8A16", {}, set()),
        ("FP8", {}, {"amax"}),
        ("W8A8", {}, {"channel_amax"}),
        ("W8A8", {"transforms": ()}, set()),
        ("W8A8_STATIC", {"transforms": ()}, {"min_val", "max_val"}),
        ("W8A8_STATIC", {}, {"min_val", "max_val", "channel_amax"}),
        ("W4A16", {"group_size": 32}, {"hessian_sum", "count"}),
        ("W4A16", {"group_size": 32, "algorithm": "rtn"}, set()),
        ("W3A16_ASYM", {"group_size": 32}, {"hessian_sum", "count"}),
        ("W2A16", {"group_size": 32, "algorithm": "rtn"}, set()),
        ("W4A8", {"group_size": 32}, {"hessian_sum", "count"}),
        ("FP8_BLOCK", {"group_size": 32}, set()),
        ("W4A8", {"group_size": 32, "algorithm": "rtn"}, set()),
        ("W8A16", {"overrides": (Override(match="re:.*q_proj", scheme="FP8"),)}, {"amax"}),
    ],
)
def test_the_statistics_that_are_needed_follow_from_algorithm_transforms_and_static_inputs(
    scheme, options, needs
):
    found = plan(scheme, **options)
    assert found.needs == needs
    assert found.needs_measurement == bool(needs)
    assert found.needs_hessian == ("hessian_sum" in needs)


def test_exact_names_and_patterns_are_ignored_and_the_rest_is_quantized():
    found = plan("W8A16", ignore=("model.layers.0.self_attn.q_proj", "re:.*down_proj")).schemes
    left = {name for name, scheme in found.items() if scheme is None}
    assert left == {
        "model.layers.0.self_attn.q_proj",
        "model.layers.0.mlp.down_proj",
        "model.layers.1.mlp.down_proj",
    }


def test_what_is_never_quantized_may_be_ignored_too():
    assert None not in plan("W8A16", ignore=("lm_head",)).schemes.values()


def test_an_exact_name_is_no_pattern():
    with pytest.raises(UsageError, match="matches none"):
        plan("W8A16", ignore=("model.layers.0.self_attn",))


@pytest.mark.parametrize("pattern", ["model.layers.9.self_attn.q_proj", "re:.*quack", "down_proj"])
def test_a_pattern_that_matches_nothing_is_refused(pattern):
    with pytest.raises(UsageError) as caught:
        plan("W8A16", ignore=(pattern,))
    assert repr(pattern) in caught.value.cause and "ignore" in caught.value.cause
    with pytest.raises(UsageError) as caught:
        plan("W8A16", overrides=(Override(match=pattern, scheme="FP8"),))
    assert repr(pattern) in caught.value.cause and "overrides" in caught.value.cause


def test_a_broken_pattern_is_refused():
    with pytest.raises(UsageError, match="no regular expression"):
        plan("W8A16", ignore=("re:(",))


def test_ignoring_everything_is_refused():
    with pytest.raises(UsageError, match="none of 14 linears"):
        plan("W8A16", ignore=("re:.*",))


def test_an_override_wins_over_the_scheme_the_last_over_the_first_and_ignore_over_both():
    overrides = (
        Override(match="re:.*q_proj", scheme="FP8_DYNAMIC"),
        Override(match="re:.*layers.1.*q_proj", scheme="W8A8"),
    )
    found = plan("W8A16", overrides=overrides, ignore=("model.layers.0.self_attn.k_proj",)).schemes
    assert found["model.layers.0.self_attn.q_proj"].name == "FP8_DYNAMIC"
    assert found["model.layers.1.self_attn.q_proj"].name == "W8A8"
    assert found["model.layers.0.self_attn.v_proj"].name == "W8A16"
    assert (
        plan("W8A16", overrides=overrides, ignore=("re:.*q_proj",)).schemes[
            "model.layers.1.self_attn.q_proj"
        ]
        is None
    )


def test_an_override_brings_its_own_group_size():
    found = plan("W8A16", overrides=(Override(match="re:.*q_proj", scheme="W4A16", group_size=16),))
    assert found.schemes["model.layers.0.self_attn.q_proj"].weights.group_size == 16


def test_a_group_size_that_does_not_divide_names_the_linear_and_both_numbers():
    with pytest.raises(SchemeError) as caught:
        plan("W4A16", group_size=64)
    assert "model.layers.0.mlp.down_proj" in caught.value.cause
    assert "96" in caught.value.cause and "64" in caught.value.cause
    assert (
        plan("W4A16", group_size=64, ignore=("re:.*down_proj",)).schemes[
            "model.layers.0.mlp.down_proj"
        ]
        is None
    )


@pytest.mark.parametrize("scheme", ["W2A16", "W2A16_ASYM", "W3A16", "W3A16_ASYM", "W4A8"])
def test_weights_of_few_bits_take_any_group_size_that_divides(scheme):
    assert (
        plan(scheme, group_size=16).schemes["model.layers.0.mlp.down_proj"].weights.group_size == 16
    )
    with pytest.raises(SchemeError, match="in_features=96 is not a multiple of group_size=64"):
        plan(scheme, group_size=64)


def test_a_preset_takes_the_largest_common_group_size_that_divides_and_says_so():
    entry = Quantize(name="a", scheme="W4A16")
    found = resolve(entry, GRAPH, SHAPES)
    sizes = {
        name.rpartition(".")[2]: scheme.weights.group_size for name, scheme in found.schemes.items()
    }
    assert sizes == {
        **dict.fromkeys(["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj"], 64),
        "down_proj": 32,
    }
    assert (
        narrowed(found, entry, SHAPES)
        == "a: groups of 64 in 12 linears, of 32 in 2 linears, whose inputs 128 does not divide"
    )
    wide = {name: (64, 256) for name in SHAPES}
    assert narrowed(resolve(entry, GRAPH, wide), entry, wide) is None
    assert plan("W8A8").schemes["model.layers.0.mlp.down_proj"].weights.group_size is None


FALCON = graph_for(
    FalconConfig(
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        architectures=["FalconForCausalLM"],
    )
)
FALCON_SHAPES = {
    f"{name}.weight": (64, 256 if name.endswith("4h_to_h") else 64) for name in FALCON.linears
}


def test_a_model_that_stock_transformers_dequantizes_has_groups_of_one_size_and_it_is_said():
    """tiiuae/falcon-7b has 4544 and 18176 inputs: 64 divides both, 128 the second alone.

    huggingface/transformers issue 47920: types that initialize linears by name crash where these
    are packed. vllm-project/llm-compressor issue 835: a packed linear has no attribute `weight`.
    """
    entry = Quantize(name="a", scheme="W4A16")
    found = resolve(entry, FALCON, FALCON_SHAPES)
    assert {scheme.weights.group_size for scheme in found.schemes.values()} == {64}
    assert narrowed(found, entry, FALCON_SHAPES) == (
        "a: groups of 64 in 8 linears: 128 does not divide the inputs of all, and stock "
        "transformers loads one size for this type"
    )
    wide = {name: (64, 256) for name in FALCON_SHAPES}
    found = resolve(entry, FALCON, wide)
    assert {scheme.weights.group_size for scheme in found.schemes.values()} == {128}
    assert narrowed(found, entry, wide) is None
    narrow = {name: (64, 64) for name in FALCON_SHAPES}
    assert (
        narrowed(resolve(entry, FALCON, narrow), entry, narrow)
        == "a: groups of 64 in 8 linears, whose inputs 128 does not divide"
    )


@pytest.mark.parametrize(
    "words",
    [
        {"scheme": "W4A8"},
        {
            "scheme": "W4A16",
            "overrides": (Override(match="re:.*4h_to_h", scheme="W4A16", group_size=128),),
        },
        {"scheme": "W4A16", "overrides": (Override(match="re:.*4h_to_h", scheme="W3A16"),)},
    ],
    ids=["inputs", "a size that was asked for", "two schemes"],
)
def test_where_one_size_would_not_make_it_load_each_linear_keeps_the_largest(words):
    """Stock transformers refuses these anyway: inputs that are rounded, or several schemes."""
    schemes = resolve(Quantize(name="a", **words), FALCON, FALCON_SHAPES).schemes
    sizes = {name.rpartition(".")[2]: s.weights.group_size for name, s in schemes.items()}
    assert sizes.pop("dense_4h_to_h") == 128 and set(sizes.values()) == {64}


def test_a_linear_of_a_few_inputs_stays_as_it_is_and_is_named_unless_its_groups_are_given():
    name = "model.layers.1.self_attn.q_proj"
    shapes = SHAPES | {f"{name}.weight": (64, 4)}  # as Gemma 3n mixes its four streams
    entry = Quantize(name="a", scheme="W4A16", algorithm="rtn")
    found = resolve(entry, GRAPH, shapes)
    assert [linear for linear, scheme in found.schemes.items() if scheme is None] == [name]
    assert (
        kept_for_few_inputs(found, entry, shapes)
        == f"a: {name} stays as in the source: fewer than 16 inputs, no whole group"
    )
    smaller = "a: groups of 64 in 11 linears, of 32 in 2 linears, whose inputs 128 does not divide"
    assert (
        narrowed(found, entry, shapes) == smaller
        and kept_for_few_inputs(resolve(entry, GRAPH, SHAPES), entry, SHAPES) is None
    )
    # W8A16 has a scale per row and no groups, so few inputs are no obstacle
    assert (
        resolve(Quantize(name="a", scheme="W8A16", algorithm="rtn"), GRAPH, shapes).schemes[name]
        is not None
    )
    with pytest.raises(SchemeError, match="in_features=4 is not a multiple of group_size=32"):
        resolve(Quantize(name="a", scheme="W4A16", algorithm="rtn", group_size=32), GRAPH, shapes)


def test_stacked_experts_that_no_linear_reads_are_named_with_their_bytes():
    sizes = {name: 2 * math.prod(shape) for name, shape in SHAPES.items()}
    assert left_out("a", GRAPH, SHAPES, sizes) is None
    convolution, experts = "model.layers.0.conv.weight", "model.layers.1.experts.w1"
    assert (
        left_out("a", GRAPH, SHAPES | {convolution: (64, 1, 4)}, sizes | {convolution: 10**6})
        is None
    )
    found = left_out(
        "a", GRAPH, SHAPES | {experts: (4, 64, 96)}, sizes | {experts: 2 * 4 * 64 * 96}
    )
    assert (
        found is not None
        and "warning: model.layers.1.experts.w1 [4, 64, 96] are not quantized" in found
    )
    assert "49,152 of the layers' 172,032 bytes" in found
    small = {"model.layers.1.bias": (64, 16)}  # next to nothing of the layers
    assert left_out("a", GRAPH, SHAPES | small, sizes | dict.fromkeys(small, 100)) is None


def test_a_preset_of_an_override_adapts_and_a_given_size_does_not():
    adapted = plan("W8A16", overrides=(Override(match="re:.*q_proj", scheme="W4A16"),))
    assert adapted.schemes["model.layers.0.self_attn.q_proj"].weights.group_size == 64
    with pytest.raises(
        SchemeError, match="in_features=64 is not a multiple of group_size=128"
    ) as caught:
        plan("W8A16", overrides=(Override(match="re:.*q_proj", scheme="W4A16", group_size=128),))
    assert caught.value.remedy == "use 64 or 32, or list the layer under `ignore`"


def test_a_preset_that_no_common_size_fits_is_refused():
    odd = {name: (64, 72) for name in SHAPES}
    with pytest.raises(SchemeError, match="in_features=72 is not a multiple of group_size=128"):
        resolve(Quantize(name="a", scheme="W4A16"), GRAPH, odd)


@pytest.mark.parametrize("size", [0, -32])
def test_a_group_size_below_one_is_refused(size):
    with pytest.raises(SchemeError, match=f"group_size={size}"):
        plan("W4A16", group_size=size)


def test_a_group_size_for_a_scheme_without_groups_is_refused():
    with pytest.raises(SchemeError, match="FP8 has per_tensor weights"):
        plan("FP8", group_size=32)


@pytest.mark.parametrize(
    "options",
    [
        {"scheme": "FP8"},
        {"scheme": "FP8_BLOCK", "group_size": 32},
        {"scheme": "W8A16", "overrides": (Override(match="re:.*", scheme="FP8"),)},
    ],
)
def test_gptq_takes_float8(options):
    assert plan(**options, algorithm="gptq").needs_hessian


@pytest.mark.parametrize("algorithm", ["yaqa", "hqq"])
def test_what_chooses_integers_is_refused_for_float8_with_what_to_use(algorithm):
    with pytest.raises(
        UsageError,
        match=f"{algorithm} with scheme FP8_DYNAMIC; .* use rtn, rtn_mse or gptq for float8",
    ):
        plan("FP8_DYNAMIC", algorithm=algorithm)


def test_what_searches_each_scale_is_refused_for_one_of_a_tensor_with_what_to_use():
    with pytest.raises(
        UsageError, match="rtn_mse with scheme FP8, whose weights share one scale; use rtn or gptq"
    ):
        plan("FP8", algorithm="rtn_mse")
    for scheme in ("FP8_DYNAMIC", "FP8_BLOCK"):
        entry = Quantize(
            name="a",
            scheme=scheme,
            algorithm="rtn_mse",
            group_size=32 if scheme == "FP8_BLOCK" else None,
        )
        assert resolve(entry, GRAPH, SHAPES, measured=False).file_to_file


@pytest.mark.parametrize("algorithm", ["rtn", "rtn_mse", "hqq"])
def test_what_reads_the_weights_alone_goes_from_file_to_file_where_nothing_is_measured(algorithm):
    entry = Quantize(name="a", scheme="W4A16", algorithm=algorithm, group_size=32)
    assert resolve(entry, GRAPH, SHAPES, measured=False).file_to_file
    assert not resolve(entry, GRAPH, SHAPES, measured=True).file_to_file
    gptq = Quantize(name="a", scheme="W4A16", algorithm="gptq", group_size=32)
    assert not resolve(gptq, GRAPH, SHAPES, measured=False).file_to_file


def test_an_unknown_algorithm_names_the_nearest():
    with pytest.raises(UsageError, match="algorithm 'gtpq' is unknown; did you mean 'gptq'"):
        plan("W4A16", algorithm="gtpq", group_size=32)


def test_an_unknown_scheme_in_an_override_is_refused():
    with pytest.raises(SchemeError, match="scheme 'W7A16' is unknown"):
        plan("W8A16", overrides=(Override(match="re:.*", scheme="W7A16"),))


@pytest.mark.parametrize(
    ("transform", "said"),
    [
        ({"smothquant": {}}, "did you mean 'smoothquant'"),
        ({"smoothquant": {"aplha": 0.5}}, "no option 'aplha'; did you mean 'alpha'"),
        ({"smoothquant": {"alpha": 1.01}}, "alpha=1.01"),
        ({"smoothquant": {"alpha": -0.01}}, "alpha=-0.01"),
        ({"smoothquant": {"alpha": float("nan")}}, "alpha=nan"),
        ({"smoothquant": {"alpha": "half"}}, "alpha='half'"),
        ({"smoothquant": 0.5}, "0.5 is not a mapping"),
        ({7: {}}, "transform 7 is unknown"),
    ],
)
def test_a_transform_that_cannot_be_is_refused(transform, said):
    with pytest.raises(UsageError) as caught:
        plan("W8A8", transforms=(transform,))
    assert said in str(caught.value)


def test_transforms_are_the_presets_unless_named_and_both_ends_of_alpha_are_allowed():
    assert plan("W8A8").transforms == (("smoothquant", {"alpha": 0.5, "linears": False}),)
    assert plan("FP8").transforms == ()
    for alpha in (0, 1):
        found = plan("FP8_DYNAMIC", transforms=({"smoothquant": {"alpha": alpha}},)).transforms
        assert found == (("smoothquant", {"alpha": float(alpha), "linears": False}),)


def test_a_search_over_rows_runs_some_of_the_text_and_one_over_hessians_all_of_it():
    auto = plan("W8A8", transforms=({"smoothquant": {"alpha": "auto"}},))
    assert (auto.needs_rows, auto.needs_hessian, auto.needs_text) == (True, False, True)
    assert list(auto.text(range(128))) == list(range(0, 128, 4))
    assert list(auto.text(range(3))) == [0, 1, 2]
    assert not list(auto.text(()))
    static = plan("W8A8_STATIC", transforms=({"smoothquant": {"alpha": "auto"}},))
    assert (auto.rows_apart, static.rows_apart, len(static.text(range(128)))) == (1, 4, 128)
    awq = plan("W4A16", algorithm="rtn", group_size=32, transforms=({"awq": {}},))
    assert (awq.needs_rows, awq.needs_hessian, awq.clips) == (False, True, True)
    assert len(awq.text(range(128))) == 128
    assert not plan("W8A8").needs_text and not list(plan("W8A8").text(range(128)))


def test_what_a_rotated_model_needs_is_observed_in_it_with_all_of_the_text():
    static = plan("W8A8_STATIC", transforms=({"hadamard": {}}, {"smoothquant": {"alpha": 0.5}}))
    assert static.observed == ("channel_amax", "min_max")
    assert len(static.text(range(128))) == 128
    alone = plan("W8A16", transforms=({"hadamard": {}},))
    assert alone.observed == () and not alone.needs_text and not alone.file_to_file


def test_measure_observes_what_a_search_reads_and_no_rows():
    entry = Quantize(name="a", scheme="W8A8", transforms=({"smoothquant": {"alpha": "auto"}},))
    assert statistics_for([entry]) == ("channel_amax",)
    assert statistics_for([Quantize(name="a", scheme="W4A16", transforms=({"awq": {}},))]) == (
        "mean_abs",
    )


@pytest.mark.parametrize(
    ("words", "counts"),
    [
        ({"scheme": "W4A16"}, True),  # `error` refuses before the first layer
        ({"scheme": "W4A16", "experts": "damp"}, False),
        ({"scheme": "W4A16", "experts": "rtn"}, False),
        ({"scheme": "W4A16", "experts": "all"}, False),
        ({"scheme": "W4A16", "algorithm": "signround", "experts": "damp"}, False),
        ({"scheme": "W4A16", "algorithm": "rtn", "experts": "damp"}, True),  # no text runs
        ({"scheme": "W4A16", "algorithm": "rtn", "experts": "damp", "tune": Tune()}, False),
    ],
)
def test_measure_counts_tokens_of_experts_unless_quantize_does(words, counts):
    entry = Quantize(name="a", **words)
    assert counts_in_measure([entry]) == counts
    assert counts_in_measure([entry, Quantize(name="b", scheme="FP8_DYNAMIC")])
    assert counts_in_measure([])


def test_the_plan_as_data_names_every_linear_its_scheme_and_the_algorithm():
    data = plan("W4A16", group_size=32, ignore=("re:.*down_proj",)).as_json()
    assert data["algorithm"] == "gptq" and data["transforms"] == []
    assert data["schemes"]["model.layers.0.mlp.down_proj"] is None
    assert data["schemes"]["model.layers.0.mlp.up_proj"]["weights"]["group_size"] == 32


@pytest.mark.parametrize(
    ("schemes", "observers"),
    [
        ("W4A16:gptq", ()),  # its Hessian lives inside quantize, which needs the token ids alone
        ("W4A16:gptq,FP8", ("amax",)),
        ("FP8_DYNAMIC,W8A16,W4A16:rtn", ()),
        ("W4A16:rtn_mse,W4A16_ASYM:hqq", ()),
        ("W8A8_STATIC", ("channel_amax", "min_max")),
        ("FP8, W8A8", ("amax", "channel_amax")),
    ],
)
def test_schemes_ask_measure_for_the_union_of_what_they_need(schemes, observers):
    assert statistics_for(entries_of(schemes)) == observers


def test_overrides_ask_for_their_own_statistics():
    entry = Quantize(
        name="a", scheme="W8A16", overrides=(Override(match="re:.*q_proj", scheme="FP8"),)
    )
    assert statistics_for((entry,)) == ("amax",)


@pytest.mark.parametrize("schemes", ["", " , ", "FP8,FP8", "FP9", "W4A16:magic"])
def test_schemes_that_mean_nothing_are_refused(schemes):
    with pytest.raises(UsageError):
        statistics_for(entries_of(schemes))
