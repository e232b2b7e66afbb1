"""A model over several ranks, here threads, has the bits of one process; ranks hold their rows."""

import threading
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import CodeGenConfig, LlamaConfig, Phi3Config, Qwen2Config, Qwen3Config

from quantflow.backends import kernels, native
from quantflow.core.scheme import PRESETS, with_group_size
from quantflow.errors import UnsupportedError, UsageError
from quantflow.files.safetensors_header import TensorInfo
from quantflow.models import reading
from quantflow.runtime import operations
from quantflow.runtime.artifact import open_artifact, open_folder
from quantflow.runtime.decoder import Decoder
from quantflow.runtime.decoding import Beams, Contrastive, Draft, Lookup, Sampling, generate
from quantflow.runtime.lean import LeanDecoder
from quantflow.runtime.load import load
from quantflow.runtime.ranks.leader import Leader, follow
from quantflow.runtime.ranks.tensor_parallel import Ranks, spans_of
from tests.shared import slow, slow_but
from tests.unit.runtime.conftest import random_model
from tests.unit.runtime.test_lean import FAMILIES as LEAN_FAMILIES

SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 96,
    "vocab_size": 97,
    "eos_token_id": 2,
}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}
LLAMA = LlamaConfig(
    **SIZES, head_dim=32, tie_word_embeddings=False, architectures=["LlamaForCausalLM"]
)
WIDE = LlamaConfig(
    **SIZES | {"hidden_size": 512, "intermediate_size": 640},
    head_dim=128,
    architectures=["LlamaForCausalLM"],
)
WHOLE = SIZES | {"intermediate_size": 512, "architectures": ["LlamaForCausalLM"]}
W4A16 = with_group_size(PRESETS["W4A16"], 32)
FAMILIES = {
    "biases": LlamaConfig(
        **SIZES,
        attention_bias=True,
        mlp_bias=True,
        head_dim=48,
        architectures=["LlamaForCausalLM"],
    ),
    "seven to a head": LlamaConfig(
        **SIZES | {"hidden_size": 224, "num_attention_heads": 7, "num_key_value_heads": 1},
        head_dim=32,
        architectures=["LlamaForCausalLM"],
    ),
    "a tied head, one layer slides": Qwen2Config(
        **SIZES,
        use_sliding_window=True,
        sliding_window=5,
        max_window_layers=1,
        tie_word_embeddings=True,
        architectures=["Qwen2ForCausalLM"],
    ),
    "norms over heads": Qwen3Config(**SIZES, head_dim=32, architectures=["Qwen3ForCausalLM"]),
}
exact = pytest.mark.skipif(
    native.why_not(kernels.SOURCE, cpu_flags=kernels.CPU_FLAGS) is not None
    or native.why_not(operations.SOURCE, cpu_flags=()) is not None,
    reason="bits are promised of our own kernels",
)


@pytest.fixture(scope="session")
def shared(among):
    """Return what gives what `ask` makes of a decoder over so many ranks."""

    def over_ranks(folder, world, ask, *, backend="auto", **options):
        def work(wire):
            ranks = Ranks(open_folder(folder, backend=backend, verify=False), wire)
            decoder = LeanDecoder(ranks.artifact, ranks=ranks, **options)
            if wire.rank:
                return follow(decoder, wire)
            leader = Leader(decoder, wire)
            found = ask(leader)
            leader.end()
            return found

        return among(world, work)[0]

    return over_ranks


def alone(folder, ask, *, backend="auto", **options):
    return ask(LeanDecoder(open_folder(folder, backend=backend, verify=False), **options))


def ids(rows, count, seed):
    return torch.randint(3, 96, (rows, count), generator=torch.Generator().manual_seed(seed))


def walk(decoder: Decoder) -> list[torch.Tensor]:
    """Logits of all calls of a decoder: a padded prompt, steps, crop, keep, hidden states."""
    found = []
    decoder.begin(rows=2, capacity=40)
    found.append(decoder.forward(ids(2, 9, 0), padding=torch.tensor([0, 3])))
    found += [decoder.forward(ids(2, 1, seed)) for seed in (1, 2)]
    found.append(decoder.forward(ids(2, 4, 4), last_only=False))
    decoder.crop(11)
    decoder.keep(torch.tensor([1, 1, 0]))
    found.append(decoder.forward(ids(3, 12, 6), last_only=False))
    decoder.begin(rows=1, capacity=110)
    found += decoder.forward_hidden(ids(1, 100, 8))
    return found


def short_walk(decoder: Decoder) -> list[torch.Tensor]:
    """Logits of a prompt of two rows and a token, of hidden states and of a longer text."""
    found = []
    decoder.begin(rows=2, capacity=40)
    found.append(decoder.forward(ids(2, 9, 0), padding=torch.tensor([0, 3]), last_only=False))
    found.append(decoder.forward(ids(2, 1, 1)))
    decoder.begin(rows=1, capacity=60)
    found += decoder.forward_hidden(ids(1, 50, 8))
    return found


def equal(found, expected):
    return len(found) == len(expected) and all(
        torch.equal(*pair) for pair in zip(found, expected, strict=True)
    )


@exact
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_of_every_family_have_the_bits_of_one_process(
    family, tmp_path, make_artifact, shared
):
    make_artifact(tmp_path, FAMILIES[family], W4A16)
    expected = alone(tmp_path, walk)
    for world in (1, 7) if family == "seven to a head" else (1, 2, 4):
        assert equal(shared(tmp_path, world, walk), expected), world


# one of each family, and of each way to choose experts
MIXTURES = [
    "mixtral",
    "qwen2_moe, a dense layer before a sparse one",
    "qwen3_moe",
    "olmoe, norms of all heads at once",
    "gpt_oss, sinks and a gate that is clamped",
    "glm4_moe, groups of experts behind a dense layer",
    "minimax_m2, half of a head rotated",
    "ernie4_5_moe, neighbours rotated",
    "granitemoe",
    "granitemoeshared",
    "phimoe, one expert after the other",
    "deepseek_v2, queries as they are",
    "deepseek_v3",
    "llama4, a dense layer between",
    "llama4, queries that grow",
]


LEARNED = [
    "gpt2",
    "opt, norms behind and narrow embeddings, as 350m",
    "opt, no biases and no last norm",
]


# Family -> numbers of ranks. 40b's heads lie in two blocks and codegen's in four, of which a rank
# has whole ones or a part; one kv head serves unequal numbers of queries of each rank.
BLOCKS = {
    "falcon, a kv head for all, as 7b": (2, 3, 4),
    "falcon, groups and two norms, as 40b": (2, 4),
    "falcon, groups and one norm, as 11b": (4,),
    "falcon, one branch after the other and alibi, as rw": (2,),
    "falcon, alibi over one kv head": (4, 5),
    "gpt_bigcode": (3,),
    "gpt_bigcode, keys for each head": (2,),
    "gptj": (4,),
    "codegen": (2, 4, 8),
}


@exact
@pytest.mark.parametrize("family", BLOCKS)
def test_heads_in_blocks_have_the_bits_of_one_process(family, tmp_path, make_artifact, shared):
    make_artifact(tmp_path, LEAN_FAMILIES[family], with_group_size(PRESETS["W4A16"], 16))
    expected = alone(tmp_path, short_walk)
    for world in BLOCKS[family]:
        assert equal(shared(tmp_path, world, short_walk), expected), world


@exact
@pytest.mark.parametrize(
    "family",
    slow_but(
        [*MIXTURES, *LEARNED],
        "mixtral",
        "qwen2_moe, a dense layer before a sparse one",
        "qwen3_moe",
        "olmoe, norms of all heads at once",
        "gpt_oss, sinks and a gate that is clamped",
        "minimax_m2, half of a head rotated",
        "granitemoe",
        "deepseek_v3",
        "llama4, queries that grow",
        *LEARNED,
    ),
)
def test_logits_of_mixtures_and_of_learned_positions_have_the_bits_of_one_process(
    family, tmp_path, make_artifact, shared
):
    make_artifact(tmp_path, LEAN_FAMILIES[family], with_group_size(PRESETS["W4A16"], 16))
    expected = alone(tmp_path, short_walk)
    assert equal(shared(tmp_path, 4, short_walk), expected)


STATES = [
    family
    for family, config in LEAN_FAMILIES.items()
    if {"linear_attention", "indexed_attention"} & {*(getattr(config, "layer_types", None) or ())}
]


@exact
@pytest.mark.slow
@pytest.mark.parametrize("name", ["W4A16", "FP8_DYNAMIC"])
@pytest.mark.parametrize("family", [family for family in LEAN_FAMILIES if family not in STATES])
def test_logits_of_all_that_the_lean_decoder_runs_have_the_bits_of_one_process(
    family, name, tmp_path, make_artifact, shared
):
    scheme, config = PRESETS[name], LEAN_FAMILIES[family]
    scheme = with_group_size(scheme, 16) if scheme.weights.group_size else scheme
    make_artifact(tmp_path, config, scheme)
    expected = alone(tmp_path, short_walk)
    assert all(logits.isfinite().all() for logits in expected)
    worlds = [world for world in (2, 4, 7) if config.num_attention_heads % world == 0]
    for world in worlds:
        assert equal(shared(tmp_path, world, short_walk), expected), world


@exact
def test_what_is_not_quantized_and_a_linear_of_several_have_the_bits_of_one_process(
    tmp_path, shared
):
    for family in ("deepseek_v3", "granitemoeshared", "phi3", "bloom", "gpt2", "codegen"):
        random_model(LEAN_FAMILIES[family]).save_pretrained(tmp_path / family)
        expected = alone(tmp_path / family, short_walk)
        assert equal(shared(tmp_path / family, 2, short_walk), expected), family


@pytest.mark.parametrize(
    ("family", "whole"),
    [
        ("qwen3_moe", ("norm", "mlp.gate.", "weight_shape")),
        ("deepseek_v3", ("norm", "mlp.gate.", "weight_shape", "q_a_proj", "kv_a_proj")),
        ("granitemoeshared", ("norm", "router", "weight_shape")),
    ],
)
def test_a_rank_reads_its_rows_of_every_expert(
    family, whole, tmp_path, make_artifact, monkeypatch, among
):
    config = LEAN_FAMILIES[family]
    make_artifact(tmp_path, config, with_group_size(PRESETS["W4A16"], 16))
    counted, fill = {}, reading._fill

    def counting(descriptor, view, offset, **options):
        counted[threading.get_ident()] += len(view)
        return fill(descriptor, view, offset, **options)

    monkeypatch.setattr(reading, "_fill", counting)

    def load_share(wire):
        counted[threading.get_ident()] = 0
        ranks = Ranks(open_artifact(tmp_path, verify=False), wire)
        LeanDecoder(ranks.artifact, ranks=ranks)
        return counted[threading.get_ident()], ranks.artifact.checkpoint.infos

    infos = open_artifact(tmp_path, verify=False).checkpoint.infos
    copied = sum(info.nbytes for name, info in infos.items() if any(map(name.count, whole)))
    for read, own in among(2, load_share):
        cut = sum(info.nbytes for name, info in own.items() if not any(map(name.count, whole)))
        wanted = (sum(info.nbytes for info in infos.values()) - copied) / 2
        assert cut == wanted, (cut, wanted)
        # a linear that held several has its shape once for each
        assert cut + copied <= read <= cut + copied + 16 * config.num_hidden_layers * 2
        experts = [
            {
                name: info.nbytes
                for name, info in held.items()
                if ".experts." in name and "weight_shape" not in name
            }
            for held in (own, infos)
        ]
        assert experts[0] == {name: nbytes // 2 for name, nbytes in experts[1].items()}


@pytest.mark.parametrize("family", STATES)
def test_models_with_states_or_an_indexer_are_refused_by_name(family, tmp_path, make_artifact):
    make_artifact(tmp_path, LEAN_FAMILIES[family], PRESETS["FP8_DYNAMIC"])
    with pytest.raises(
        UnsupportedError, match=r"^2 ranks share attention, not the (gated|indexer)"
    ):
        spans_of(open_folder(tmp_path, backend="auto", dtype=torch.float32), 2)


def test_linears_within_one_that_share_a_block_of_scales_are_refused(tmp_path, make_artifact):
    config = Phi3Config(
        **SIZES | {"hidden_size": 128, "intermediate_size": 128},
        pad_token_id=0,
        architectures=["Phi3ForCausalLM"],
    )
    make_artifact(tmp_path, config, PRESETS["FP8_BLOCK"])
    with pytest.raises(UnsupportedError, match=r"qkv_proj: linears of 128, 64, 64 rows, whose sc"):
        spans_of(open_artifact(tmp_path), 2)


@exact
@pytest.mark.parametrize(
    "name",
    [
        "W8A8",
        slow("W8A8_STATIC"),
        slow("W8A16"),
        slow("FP8"),
        "FP8_DYNAMIC",
        "FP8_BLOCK",
        "W4A16",
        "W4A16_ASYM",
        slow("W3A16_ASYM"),
        slow("W4A8"),
    ],
)
def test_logits_of_every_scheme_have_the_bits_of_one_process(name, tmp_path, make_artifact, shared):
    make_artifact(tmp_path, WIDE, PRESETS[name])
    expected = alone(tmp_path, walk)
    assert all(found.isfinite().all() for found in expected)
    for world in (2, 4):
        assert equal(shared(tmp_path, world, walk), expected), world


@exact
def test_linears_that_are_quantized_differently_or_not_have_the_bits_of_one_process(
    tmp_path, make_artifact, shared
):
    def scheme_of(name):
        return {"v_proj": None, "k_proj": PRESETS["W8A8"], "up_proj": None}.get(
            name.rpartition(".")[2], W4A16
        )

    make_artifact(tmp_path, FAMILIES["a tied head, one layer slides"], scheme_of)
    expected = alone(tmp_path, walk)
    assert equal(shared(tmp_path, 2, walk), expected) and equal(shared(tmp_path, 4, walk), expected)


@exact
@pytest.mark.parametrize("kind", ["bfloat16", "float8", "int8", "int4", "int5"])
def test_every_cache_is_cut_with_its_heads(kind, tmp_path, make_artifact, shared):
    make_artifact(tmp_path, LLAMA, W4A16)
    expected = alone(tmp_path, walk, kv_cache=kind)
    assert equal(shared(tmp_path, 4, walk, kv_cache=kind), expected)


def test_without_our_own_kernels_logits_are_those_of_one_process_within_rounding(
    tmp_path, make_artifact, shared
):
    make_artifact(tmp_path, LLAMA, W4A16)
    found, expected = (
        shared(tmp_path, 2, walk, backend="reference"),
        alone(tmp_path, walk, backend="reference"),
    )
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.allclose(ours, theirs, atol=2e-6, rtol=2e-6)


@exact
def test_every_way_to_generate_gives_the_tokens_of_one_process(tmp_path, make_artifact, shared):
    make_artifact(tmp_path / "model", LLAMA, W4A16)
    make_artifact(
        tmp_path / "draft",
        LlamaConfig(**SIZES | {"num_hidden_layers": 1}, architectures=["LlamaForCausalLM"]),
        W4A16,
    )
    prompts, padding = ids(3, 12, 0), torch.tensor([0, 4, 1])

    def every(decoder):
        def say(**options):
            return generate(
                decoder, prompts, padding=padding, max_new_tokens=12, eos_token_id=(), **options
            )

        draft = LeanDecoder(open_artifact(tmp_path / "draft", verify=False))
        return [
            say(),
            say(sampling=Sampling(temperature=0.8, top_p=0.9, seed=3)),
            say(method=Beams(count=3), returned=2),
            say(method=Contrastive(alpha=0.5, top_k=3)),
            say(method=Lookup(tokens=3)),
            say(method=Draft(decoder=draft, tokens=4)),
        ]

    expected = alone(tmp_path / "model", every)
    # not one sentence six times
    assert len({tuple(found.flatten().tolist()) for found in expected}) >= 3
    assert equal(shared(tmp_path / "model", 2, every), expected)


def test_a_rank_reads_and_holds_its_rows_and_norms_alone(
    tmp_path, make_artifact, monkeypatch, among
):
    make_artifact(tmp_path, WIDE, W4A16)
    counted = {}
    fill = reading._fill

    def counting(descriptor, view, offset, **options):
        counted[threading.get_ident()] += len(view)
        return fill(descriptor, view, offset, **options)

    monkeypatch.setattr(reading, "_fill", counting)

    def load(wire):
        counted[threading.get_ident()] = 0  # a thread whose rank is done may be given another one
        ranks = Ranks(open_artifact(tmp_path, verify=False), wire)
        LeanDecoder(ranks.artifact, ranks=ranks)
        return counted[threading.get_ident()], sum(
            info.nbytes for info in ranks.artifact.checkpoint.infos.values()
        )

    infos = open_artifact(tmp_path, verify=False).checkpoint.infos
    whole = sum(info.nbytes for info in infos.values())
    norms = sum(info.nbytes for name, info in infos.items() if "norm" in name)
    shapes = sum(info.nbytes for name, info in infos.items() if name.endswith("weight_shape"))
    heads = (
        sum(info.nbytes for name, info in infos.items() if "k_proj" in name or "v_proj" in name)
        - shapes * 2 / 7
    )
    # a row of the embedding and of the head, which 97 rows cannot be shared without
    vocabulary = 512 * 4 * 2
    for world, copies in ((2, 1), (4, 2)):
        counted.clear()
        for read, held in among(world, load):
            expected = (
                (whole - norms - shapes - heads) / world + heads * copies / world + norms + shapes
            )
            assert read == held and abs(held - expected) <= vocabulary, (world, held, expected)


@pytest.mark.parametrize(
    ("config", "scheme", "world", "told"),
    [
        (LLAMA, W4A16, 3, "3 ranks: 4 heads, 2 of keys and values, do not go whole; use 1 or 2 "
                          "or 4 ranks"),
        (LLAMA, W4A16, 8, "8 ranks: 4 heads, 2 of keys and values, do not go whole; use 1 or 2 "
                          "or 4 ranks"),
        (
            LEAN_FAMILIES["falcon, a kv head for all, as 7b"],
            with_group_size(PRESETS["W4A16"], 16), 5,
            "5 ranks: 4 heads, 1 of keys and values, do not go whole; use 1 or 2 or 3 or 4 ranks",
        ),
        (
            CodeGenConfig(
                n_embd=192, n_head=12, n_layer=1, vocab_size=96, bos_token_id=1, eos_token_id=2,
                rotary_dim=16, architectures=["CodeGenForCausalLM"],
            ),
            with_group_size(PRESETS["W4A16"], 16), 6,
            "6 ranks: 12 heads that lie in 4 blocks do not go whole; use 1 or 2 or 4 or 12 ranks",
        ),
        (
            LlamaConfig(**WHOLE | {"hidden_size": 128}, head_dim=128),
            PRESETS["FP8_BLOCK"], 2,
            "2 ranks: model.layers.0.self_attn.o_proj: 128 rows are not cut within 128, a rank "
            "would have 0 from 0 on; "
            "use 1 ranks",
        ),
        (
            LlamaConfig(**WHOLE | {"hidden_size": 512}, head_dim=64),
            PRESETS["FP8_BLOCK"], 4,
            "4 ranks: model.layers.0.self_attn.q_proj: 256 rows are not cut within 128, a rank "
            "would have 64 from 0 on; "
            "use 1 ranks",
        ),
    ],
    ids=["heads", "more than heads", "one kv head", "blocks of heads that lie together",
         "blocks of o_proj", "blocks of heads"],
)  # fmt: skip
def test_what_does_not_go_whole_is_refused_with_the_numbers_that_do(
    config, scheme, world, told, tmp_path, make_artifact
):
    make_artifact(tmp_path, config, scheme)
    with pytest.raises(UsageError) as refused:
        spans_of(open_artifact(tmp_path), world)
    assert f"{refused.value.cause}; {refused.value.remedy}" == told


def test_rows_that_do_not_divide_are_shared_in_whole_blocks(tmp_path, make_artifact):
    make_artifact(tmp_path, WIDE, PRESETS["FP8_BLOCK"])
    spans = spans_of(open_artifact(tmp_path), 4)
    # five blocks of 128
    assert spans["model.layers.0.mlp.gate_proj"] == [(0, 128), (128, 128), (256, 128), (384, 256)]
    assert spans["model.layers.1.mlp.up_proj"] == spans["model.layers.0.mlp.gate_proj"]
    assert spans["lm_head"] == [(0, 24), (24, 24), (48, 24), (72, 25)]  # 97 tokens
    # two heads on four ranks
    assert spans["model.layers.0.self_attn.v_proj"] == [(0, 128), (0, 128), (128, 128), (128, 128)]


def test_scales_of_repeated_heads_go_with_the_queries_that_they_serve(
    tmp_path, make_artifact, meeting
):
    family = "falcon, groups and two norms, as 40b"
    make_artifact(tmp_path, LEAN_FAMILIES[family], with_group_size(PRESETS["W4A16"], 16))
    artifact, attention = open_artifact(tmp_path), "transformer.h.0.self_attention"
    scale = TensorInfo(name="k_scale", dtype="F32", shape=(4, 1, 1), offset=80, nbytes=16)
    tensors = artifact.checkpoint.tensors | {f"{attention}.k_scale": ("x", scale)}
    checkpoint = replace(artifact.checkpoint, tensors=tensors)
    whole = replace(artifact, checkpoint=checkpoint, caches={attention: 4})
    for world, count in ((2, 2), (4, 1)):
        for rank in range(world):
            own = Ranks(whole, meeting(rank, world)).artifact
            info = own.checkpoint.infos[f"{attention}.k_scale"]
            assert (info.shape, info.offset) == ((count, 1, 1), 80 + 4 * count * rank)
            assert own.caches == {attention: count}


def test_scales_of_a_cache_go_with_its_heads(tmp_path, make_artifact, meeting):
    make_artifact(tmp_path, LLAMA, W4A16)
    artifact = open_artifact(tmp_path)
    own = {"k_scale": (2, 1, 1), "v_scale": (1,)}  # of each head; of all
    scales = {
        f"model.layers.1.self_attn.{name}": (
            "x",
            TensorInfo(name=name, dtype="F32", shape=shape, offset=80, nbytes=4 * shape[0]),
        )
        for name, shape in own.items()
    }
    checkpoint = replace(artifact.checkpoint, tensors=artifact.checkpoint.tensors | scales)
    whole = replace(artifact, checkpoint=checkpoint, caches={"model.layers.1.self_attn": 2})
    for rank, offset in enumerate((80, 80, 84, 84)):  # two heads on four ranks
        infos = Ranks(whole, meeting(rank, 4)).artifact.checkpoint.infos
        keys, values = (infos[name] for name in scales)
        assert (keys.shape, keys.offset, keys.nbytes) == ((1, 1, 1), offset, 4)
        assert (values.shape, values.offset, values.nbytes) == ((1,), 80, 4)


@pytest.mark.parametrize("token", [-1, 97])
def test_a_token_that_no_rank_has_is_refused(token, tmp_path, make_artifact, shared):
    make_artifact(tmp_path, LLAMA, W4A16)

    def ask(decoder):
        decoder.begin(rows=1, capacity=2)
        return decoder.forward(torch.tensor([[5, token]]))

    with pytest.raises(UsageError, match=r"model\.embed_tokens: token ids (-1 to 5|5 to 97) of 97"):
        shared(tmp_path, 2, ask)


def test_a_share_is_packed_by_itself_and_loaded_again(tmp_path, make_artifact, among):
    folder = tmp_path / "artifact"
    folder.mkdir()
    make_artifact(folder, LLAMA, W4A16)

    def ask(wire):
        loaded = load(folder, decoder="auto", pack=True, communicator=wire)
        if wire.rank:
            return follow(loaded.decoder, wire)
        leader = Leader(loaded.decoder, wire)
        found = walk(leader)
        leader.end()
        return found

    made = among(2, ask)[0]
    assert len(list((tmp_path / "artifact-packed").iterdir())) == 2
    assert equal(among(2, ask)[0], made)
    load(folder, decoder="auto", pack=True)
    assert len(list((tmp_path / "artifact-packed").iterdir())) == 3


def test_what_the_lean_decoder_does_not_run_is_refused_by_every_rank(
    tmp_path, make_artifact, meeting
):
    config = LlamaConfig(**SIZES, hidden_act="tanh", architectures=["LlamaForCausalLM"])
    make_artifact(tmp_path, config, W4A16)
    wire = meeting(0, 2)
    with pytest.raises(
        UnsupportedError, match="the lean decoder: it knows the activations .*, not tanh"
    ):
        load(tmp_path, decoder="auto", communicator=wire)
    with pytest.raises(UsageError, match="2 ranks: decoder transformers on cpu"):
        load(tmp_path, decoder="transformers", communicator=wire)


class Recorder:
    """A decoder that notes what it is asked."""

    vocab_size, positions, device = 5, None, torch.device("cpu")

    def __init__(self):
        self.calls = []

    def begin(self, **options):
        self.calls.append(("begin", options))

    def forward(self, input_ids, **options):
        options["padding"] = None if options["padding"] is None else options["padding"].tolist()
        self.calls.append(("forward", input_ids.tolist(), options))

    def forward_hidden(self, input_ids, *, padding):
        self.calls.append(
            ("forward_hidden", input_ids.tolist(), None if padding is None else padding.tolist())
        )

    def keep(self, rows):
        self.calls.append(("keep", rows.tolist()))

    def crop(self, length):
        self.calls.append(("crop", length))

    def begin_blocks(self, **options):
        self.calls.append(("begin_blocks", options))

    def forward_rows(self, input_ids, **options):
        lists = {name: tensor.tolist() for name, tensor in options.items()}
        self.calls.append(("forward_rows", input_ids.tolist(), lists))


class Said:
    """A `Communicator` that keeps what rank 0 says, and tells it afterwards."""

    rank, world = 0, 2

    def __init__(self):
        self.said, self.telling = [], False

    def broadcast(self, numbers):
        if self.telling:
            said = self.said.pop(0)
            assert said.shape == numbers.shape
            numbers.copy_(said)
        else:
            self.said.append(numbers.clone())


@given(
    rows=st.integers(1, 9),
    columns=st.integers(1, 20),
    padded=st.booleans(),
    last_only=st.booleans(),
    kept=st.lists(st.integers(0, 2**40), min_size=1, max_size=130),
    length=st.integers(0, 2**40),
)
def test_what_follows_is_asked_the_same_as_what_leads(
    rows, columns, padded, last_only, kept, length
):
    wire, first, second = Said(), Recorder(), Recorder()
    leader = Leader(first, wire)
    tokens = torch.arange(rows * columns).view(rows, columns) + 2**33
    padding = torch.arange(rows) if padded else None
    leader.begin(rows=rows, capacity=length)
    leader.forward(tokens, padding=padding, last_only=last_only)
    leader.keep(torch.tensor(kept))
    leader.forward_hidden(tokens, padding=padding)
    leader.crop(length)
    leader.begin_blocks(blocks=length, columns=columns, positions=rows)
    leader.forward_rows(
        tokens.flatten(),
        first=torch.arange(rows + 1) * columns,
        start=torch.arange(rows) + length,
        table=tokens,
        wanted=torch.tensor(kept),
    )
    leader.end()
    wire.telling = True
    follow(second, wire)
    assert second.calls == first.calls and len(first.calls) == 7 and not wire.said
