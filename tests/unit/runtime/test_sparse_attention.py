"""Sparse attention: what the indexer chooses, caches of every kind, blocks, engines, refusals."""

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, DynamicCache

from quantflow.core.scheme import PRESETS, with_group_size
from quantflow.errors import UnsupportedError
from quantflow.models import architecture
from quantflow.models.architecture import Heads
from quantflow.models.architecture import Indexer as Sizes
from quantflow.models.family import IndexerNames
from quantflow.runtime import sparse_attention
from quantflow.runtime.artifact import open_artifact
from quantflow.runtime.batching import BatchLimits, BatchRequest, Engine
from quantflow.runtime.decoding import Lookup, generate
from quantflow.runtime.kv_cache import KVCache
from quantflow.runtime.lean import LeanDecoder
from quantflow.runtime.load import load
from quantflow.runtime.operations import NO_NORM, DecoderBlock, IndexInputs, Norm, Operations
from quantflow.runtime.ranks.tensor_parallel import spans_of
from quantflow.runtime.transformers_decoder import TransformersDecoder

SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "intermediate_size": 96,
    "vocab_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 256,
    "first_k_dense_replace": 2,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_group": 1,
    "topk_group": 1,
    "kv_lora_rank": 48,
    "q_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 24,
    "v_head_dim": 32,
    "index_topk": 20,
    "index_n_heads": 19,  # no multiple of what decode.c computes at once
    "index_head_dim": 48,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
CONFIG = CONFIG_MAPPING["deepseek_v32"](**SIZES, architectures=["DeepseekV32ForCausalLM"])
SHARING = CONFIG_MAPPING["glm_moe_dsa"](
    **SIZES, indexer_types=["full", "shared", "full"], architectures=["GlmMoeDsaForCausalLM"]
)
W4A16 = with_group_size(PRESETS["W4A16"], 16)
W8A16 = PRESETS["W8A16"]


def ids(rows: int, count: int, seed: int) -> Tensor:
    return torch.randint(3, 96, (rows, count), generator=torch.Generator().manual_seed(seed))


@dataclass(frozen=True)
class Index:
    """An indexer whose inputs a test gives."""

    sizes: Sizes
    key_norm: Norm = NO_NORM

    def __call__(self, x: Tensor) -> IndexInputs:
        raise AssertionError("a test gives its inputs")


HEADS, DIM = 11, 16
TABLES = (torch.ones(256, DIM), torch.zeros(256, DIM))  # a rotation by nothing


def chosen(
    queries: Tensor, keys: Tensor, weights: Tensor, *, most: int, padding: list[int], pieces: int
) -> list[list[set[int]]]:
    """What each query [rows, T, HEADS, DIM] sees, of keys [rows, T, DIM], weights [.., HEADS]."""
    rows, count = keys.shape[:2]
    sizes = Sizes(
        names=IndexerNames(),
        heads=HEADS,
        head_dim=DIM,
        chosen=most,
        pairs=False,
        layers=(True,),
    )
    heads = Heads(num_heads=1, num_kv_heads=1, head_dim=16, scale=1.0, eps=1e-6, latent=16)
    operations = Operations(heads, [DecoderBlock(products=(), indexer=Index(sizes))])
    cache = KVCache(
        kind="float32",
        layers=1,
        rows=rows,
        kv_heads=1,
        capacity=count,
        head_dim=16,
        latent=True,
        index_dim=DIM,
    )
    operations.begin(cache, [TABLES])
    cache.padding.copy_(torch.tensor(padding))
    inputs = torch.cat([queries.flatten(2), keys], dim=2)  # [rows, T, (HEADS + 1) * DIM]
    found: list[list[set[int]]] = [[] for _ in range(rows)]
    for piece in torch.arange(count).tensor_split(pieces):
        operations.step(len(piece))
        index = inputs[:, piece].flatten(0, 1).clone()
        operations.select(
            IndexInputs(
                attention=torch.empty(0),
                index=index,
                weights=weights[:, piece].flatten(0, 1).contiguous(),
            ),
            0,
        )
        selection = operations.selection
        for row in range(rows):
            for place, column in enumerate(piece.tolist()):
                if selection is None:
                    found[row].append(set(range(padding[row], column + 1)))
                    continue
                words = selection[row * len(piece) + place].tolist()
                seen = {i for i in range(64 * len(words)) if words[i // 64] >> i % 64 & 1}
                found[row].append(seen)
        cache.length += len(piece)
    return found


@pytest.mark.parametrize("pieces", [1, 3, 150])
def test_a_query_sees_the_positions_of_the_largest_scores(pieces):
    generator = torch.Generator().manual_seed(0)
    queries, keys, weights = (
        torch.randn(2, 150, *shape, generator=generator)
        for shape in ((HEADS, DIM), (DIM,), (HEADS,))
    )
    padding = [0, 70]
    found = chosen(queries, keys, weights, most=9, padding=padding, pieces=pieces)
    dots = torch.einsum("rqhd,rkd->rqhk", queries.double(), keys.double()).clamp(min=0)
    scores = torch.einsum("rqhk,rqh->rqk", dots, weights.double())
    for row, skip in enumerate(padding):
        for at in range(skip, 150):
            own = scores[row, at, skip : at + 1]
            best = own.topk(min(9, len(own))).indices + skip
            assert found[row][at] == set(best.tolist()), (row, at)
        assert not any(found[row][at] for at in range(skip))


def test_of_equal_scores_the_earlier_positions_are_chosen():
    # no head's product is positive but those of positions 3 and 90, so all other scores are 0
    keys = -torch.ones(1, 100, DIM)
    keys[0, [3, 90]] = 1.0
    queries, weights = torch.ones(1, 100, HEADS, DIM), torch.ones(1, 100, HEADS)
    found = chosen(queries, keys, weights, most=4, padding=[0], pieces=1)
    assert found[0][99] == {0, 1, 3, 90}
    # a position that counts against itself is the last to be chosen
    found = chosen(queries, keys, -weights, most=98, padding=[0], pieces=1)
    assert found[0][99] == {*range(100)} - {3, 90}


def walk(decoder, *, prompt: int = 90) -> list[Tensor]:
    """Logits of a long prompt with padding, of single steps, and of rows behind a crop."""
    decoder.begin(rows=2, capacity=140)
    found = [decoder.forward(ids(2, prompt, 0), padding=torch.tensor([0, 3]))]
    found += [decoder.forward(ids(2, 1, seed)) for seed in (1, 2)]
    decoder.crop(prompt - 5)
    found.append(decoder.forward(ids(2, 4, 4), last_only=False))
    decoder.keep(torch.tensor([1, 1, 0]))
    found.append(decoder.forward(ids(3, 18, 6), last_only=False))
    return found


def to_int8(x: Tensor) -> Tensor:
    step = x.abs().amax(dim=-1, keepdim=True) / 127.5
    return (x / step).round().clamp(-128, 127) * step


ROUNDED = {
    "float32": lambda x: x,
    "bfloat16": lambda x: x.bfloat16().float(),
    "float8": lambda x: x.to(torch.float8_e4m3fn).float(),
    "int8": to_int8,
}


@pytest.mark.parametrize("kind", ROUNDED)
def test_a_cache_of_each_kind_gives_the_logits_of_transformers_with_rounded_keys(
    kind, tmp_path, make_artifact, monkeypatch
):
    make_artifact(tmp_path, CONFIG, W4A16)
    model = load(tmp_path, decoder="transformers", backend="reference").model
    exact = walk(TransformersDecoder(model, crops=True))
    update, update_indexer = DynamicCache.update, DynamicCache.update_indexer

    def rounding(self, latents, keys, *arguments, **options):
        # one column of the cache holds the key and the latent, and has one scale
        both = ROUNDED[kind](torch.cat([keys, latents], dim=-1))
        keys, latents = both.split([keys.shape[-1], latents.shape[-1]], dim=-1)
        return update(self, latents, keys, *arguments, **options)

    def rounding_index(self, keys, *arguments, **options):
        return update_indexer(self, ROUNDED[kind](keys), *arguments, **options)

    monkeypatch.setattr(DynamicCache, "update", rounding)
    monkeypatch.setattr(DynamicCache, "update_indexer", rounding_index)
    expected = walk(TransformersDecoder(model, crops=True))
    found = walk(LeanDecoder(open_artifact(tmp_path, backend="reference"), kv_cache=kind))
    for ours, theirs, whole in zip(found, expected, exact, strict=True):
        # a number in the middle between two codes may fall to either
        near = 2e-5 if kind == "float32" else 0.05 * float((theirs - whole).abs().max())
        assert (ours - theirs).abs().max() < near


def test_a_column_takes_the_bytes_of_a_key_a_latent_and_a_key_of_the_index(tmp_path, make_artifact):
    make_artifact(tmp_path, CONFIG, W4A16)
    decoder = LeanDecoder(open_artifact(tmp_path))
    decoder.begin(rows=1, capacity=32)
    assert decoder.cache.nbytes == 3 * 32 * (16 + 48 + 48) * 4  # layers, columns, features, bytes


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("config", [CONFIG, SHARING], ids=["all", "shared"])
def test_sequences_in_blocks_have_the_bits_that_they_have_alone(
    kind, config, tmp_path, make_artifact
):
    make_artifact(tmp_path, config, W8A16)
    decoder = LeanDecoder(open_artifact(tmp_path), kv_cache=kind)
    assert decoder.why_not_invariant is None
    texts = (ids(1, 41, 0)[0], ids(1, 70, 1)[0])
    alone = []
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        for text in texts:
            decoder.begin(rows=1, capacity=96)
            alone.append(decoder.forward(text[None], last_only=False)[0])
    finally:
        torch.set_num_threads(threads)
    decoder.begin_blocks(blocks=6, columns=32, positions=96)
    table = torch.tensor([[4, 1, 4], [0, 5, 2]])
    found = [[], []]
    # in pieces, beside each other, one column and many
    for (a, b), (c, d) in (((0, 20), (0, 33)), ((20, 21), (33, 69)), ((21, 41), (69, 70))):
        found_now = decoder.forward_rows(
            torch.cat([texts[0][a:b], texts[1][c:d]]),
            first=torch.tensor([0, b - a, b - a + d - c]),
            start=torch.tensor([a, c]),
            table=table,
            wanted=torch.arange(b - a + d - c),
        )
        found[0].append(found_now[: b - a].clone())
        found[1].append(found_now[b - a :].clone())
    for ours, theirs in zip(found, alone, strict=True):
        assert torch.equal(torch.cat(ours), theirs)


def test_a_text_that_the_index_covers_has_the_bits_of_attention_without_one(
    tmp_path, make_artifact
):
    """The positions of a text are chosen among themselves: of 20, 20 and of 21 all but one."""
    make_artifact(tmp_path, CONFIG, W8A16)
    artifact = open_artifact(tmp_path)
    decoder, whole = LeanDecoder(artifact), LeanDecoder(artifact)
    whole._operations._indexer = replace(whole._operations._indexer, chosen=1000)
    for each in (decoder, whole):
        each.begin(rows=1, capacity=32)
    ours, theirs = (each.forward(ids(1, 21, 0), last_only=False)[0] for each in (decoder, whole))
    assert torch.equal(ours[:20], theirs[:20]) and not torch.equal(ours[20], theirs[20])


def test_rows_of_an_engine_share_what_they_begin_with_and_have_their_own_bits(
    tmp_path, make_artifact
):
    make_artifact(tmp_path, CONFIG, with_group_size(PRESETS["W4A8"], 16))
    decoder = LeanDecoder(open_artifact(tmp_path))
    if decoder.why_not_invariant is not None:
        pytest.skip(decoder.why_not_invariant)
    begin = ids(1, 64, 0)[0].tolist()
    asked = [
        BatchRequest(
            input_ids=(*begin, *range(3, 3 + length)), max_new_tokens=12, lookup=Lookup(tokens=3)
        )
        for length in (1, 5, 30, 2, 17)
    ]

    def answers(limits: BatchLimits, requests: list[BatchRequest]):
        with Engine(decoder, limits=limits) as engine:
            streams = [engine.submit(request) for request in requests]
            return [list(stream) for stream in streams], engine.counters()

    alone = []
    for request in asked:
        found, _ = answers(BatchLimits(max_batch_size=1, max_total_tokens=120), [request])
        alone += found
    limits = BatchLimits(max_batch_size=3, max_total_tokens=120, prefill_chunk=7)
    together, counters = answers(limits, asked * 2)
    assert together == alone * 2 and counters.pool.hit_tokens > 0


def test_greedy_tokens_are_those_of_transformers_also_with_guesses(tmp_path, make_artifact):
    make_artifact(tmp_path, SHARING, W4A16)
    lean, theirs = (
        load(tmp_path, decoder=kind, backend="reference").decoder
        for kind in ("lean", "transformers")
    )
    for prompt in ids(2, 27, 3):
        expected = generate(theirs, prompt[None], max_new_tokens=24)
        assert torch.equal(generate(lean, prompt[None], max_new_tokens=24), expected)
        found = generate(lean, prompt[None], max_new_tokens=24, method=Lookup(tokens=3))
        assert torch.equal(found, expected)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"q_lora_rank": None}, "its indexer reads compressed queries, q_lora_rank is null"),
        ({"index_head_dim": 8}, "index_head_dim of config.json is 8, of which 16 are rotated"),
        (
            {"index_head_dim": 40},
            "16 features at once and 1024 at most, an indexer's heads have 40",
        ),
        ({"index_topk": 0}, "index_topk of config.json is 0, no positive integer"),
        ({"indexer_types": ["shared", "full", "full"]}, "the indexers ['shared', 'full', 'full']"),
        ({"indexer_types": None, "index_topk_pattern": "FSX"}, "['full', 'shared', 'X']"),
        (
            {"layer_types": ["full_attention"] * 3},
            "layer_types of config.json has 'full_attention'",
        ),
        ({"indexer_rope_interleave": False}, "it knows indexer_rope_interleave=True"),
        ({"rope_interleave": False}, "it knows rope_interleave=True of config.json, not False"),
    ],
)
def test_what_an_indexer_is_not_is_said(change, why):
    found = architecture.read(SHARING.to_dict() | change)
    reason = found if isinstance(found, str) else sparse_attention.why_not(found)
    assert reason is not None and why in reason


@pytest.mark.parametrize(
    ("keys", "layers"),
    [
        ({}, (True,) * 7),
        ({"index_topk_freq": 3}, (True, True, False, False, True, False, False)),
        (
            {"index_topk_freq": 2, "index_skip_topk_offset": 4},
            (True, True, True, True, False, True, False),
        ),
        ({"index_topk_pattern": "FSSFFSS"}, (True, False, False, True, True, False, False)),
    ],
)
def test_layers_with_an_indexer_are_those_of_transformers(keys, layers):
    theirs = CONFIG_MAPPING["glm_moe_dsa"](**SIZES | {"num_hidden_layers": 7}, **keys)
    assert tuple(kind == "full" for kind in theirs.indexer_types) == layers
    told = {key: value for key, value in theirs.to_dict().items() if key != "indexer_types"}
    found = architecture.read(told)
    assert not isinstance(found, str), found
    assert found.indexer.layers == layers


def test_several_processes_adapters_and_caches_of_int4_are_refused(tmp_path, make_artifact):
    make_artifact(tmp_path, CONFIG, W8A16)
    artifact = open_artifact(tmp_path)
    with pytest.raises(UnsupportedError, match="2 ranks share attention, not the indexer of deeps"):
        spans_of(artifact, 2)
    with pytest.raises(UnsupportedError, match="latent attention have none"):
        LeanDecoder(artifact).adapt(artifact, {})
    with pytest.raises(UnsupportedError, match="kv cache int4: latent attention keeps"):
        LeanDecoder(artifact, kv_cache="int4")
