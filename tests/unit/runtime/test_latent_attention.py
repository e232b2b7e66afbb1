"""Attention over latents: caches of every kind, threads, sequences in blocks, packs."""

import pytest
import torch
from transformers import DeepseekV2Config, DynamicCache

from quantflow.core.scheme import PRESETS, with_group_size
from quantflow.errors import UnsupportedError
from quantflow.runtime.artifact import open_artifact
from quantflow.runtime.decoding import generate
from quantflow.runtime.kv_cache import KVCache
from quantflow.runtime.lean import LeanDecoder
from quantflow.runtime.load import load
from quantflow.runtime.transformers_decoder import TransformersDecoder

SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 96,
    "vocab_size": 96,
    "num_attention_heads": 5,  # no multiple of what decode.c computes at once
    "max_position_embeddings": 256,
    "first_k_dense_replace": 2,
    "kv_lora_rank": 48,
    "q_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 24,
    "v_head_dim": 32,
    "num_experts_per_tok": 2,
    "eos_token_id": 2,
}
CONFIG = DeepseekV2Config(**SIZES | {"hidden_size": 80}, architectures=["DeepseekV2ForCausalLM"])
W4A16 = with_group_size(PRESETS["W4A16"], 16)
W8A16 = PRESETS["W8A16"]


def ids(rows: int, count: int, seed: int) -> torch.Tensor:
    return torch.randint(3, 96, (rows, count), generator=torch.Generator().manual_seed(seed))


def walk(decoder, *, prompt: int = 90) -> list[torch.Tensor]:
    """Logits of a long prompt with padding, of single steps, and of rows behind a crop."""
    decoder.begin(rows=2, capacity=140)
    found = [decoder.forward(ids(2, prompt, 0), padding=torch.tensor([0, 3]))]
    found += [decoder.forward(ids(2, 1, seed)) for seed in (1, 2)]
    decoder.crop(prompt - 5)
    found.append(decoder.forward(ids(2, 4, 4), last_only=False))
    decoder.keep(torch.tensor([1, 1, 0]))
    found.append(decoder.forward(ids(3, 18, 6), last_only=False))
    return found


def to_int8(x: torch.Tensor) -> torch.Tensor:
    step = x.abs().amax(dim=-1, keepdim=True) / 127.5
    return (x / step).round().clamp(-128, 127) * step


ROUNDED = {
    "float32": lambda x: x,
    "bfloat16": lambda x: x.bfloat16().float(),
    "float8": lambda x: x.to(torch.float8_e4m3fn).float(),
    "int8": to_int8,
}


@pytest.mark.parametrize("kind", ROUNDED)
def test_a_cache_of_each_kind_gives_the_logits_of_transformers_with_rounded_latents(
    kind, tmp_path, make_artifact, monkeypatch
):
    model = make_artifact(tmp_path, CONFIG, W4A16)
    exact = walk(TransformersDecoder(model, crops=True))
    update = DynamicCache.update

    def rounding(self, latents, keys, *arguments, **options):
        # one column of the cache holds the key and the latent, and has one scale
        both = ROUNDED[kind](torch.cat([keys, latents], dim=-1))
        keys, latents = both.split([keys.shape[-1], latents.shape[-1]], dim=-1)
        return update(self, latents, keys, *arguments, **options)

    monkeypatch.setattr(DynamicCache, "update", rounding)
    expected = walk(TransformersDecoder(model, crops=True))
    found = walk(LeanDecoder(open_artifact(tmp_path, backend="reference"), kv_cache=kind))
    for ours, theirs, whole in zip(found, expected, exact, strict=True):
        # a number in the middle between two codes may fall to either
        near = 2e-5 if kind == "float32" else 0.05 * float((theirs - whole).abs().max())
        assert (ours - theirs).abs().max() < near


def test_a_column_takes_the_bytes_of_a_key_and_a_latent(tmp_path, make_artifact):
    make_artifact(tmp_path, CONFIG, W4A16)
    decoder = LeanDecoder(open_artifact(tmp_path))
    decoder.begin(rows=1, capacity=32)
    assert decoder.cache.nbytes == 2 * 32 * (16 + 48) * 4  # layers, columns, features, bytes
    assert decoder.cache.values == []
    cache = KVCache(
        kind="int8", layers=2, rows=1, kv_heads=1, capacity=32, head_dim=64, latent=True
    )
    assert cache.nbytes == 2 * 32 * (64 + 4)


def test_one_and_two_threads_give_the_same_bits(tmp_path, make_artifact):
    make_artifact(tmp_path, CONFIG, W8A16)
    decoder, found = LeanDecoder(open_artifact(tmp_path)), []
    threads = torch.get_num_threads()
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            found.append(walk(decoder))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(one, two) for one, two in zip(*found, strict=True))


@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
def test_sequences_in_blocks_have_the_bits_that_they_have_alone(kind, tmp_path, make_artifact):
    make_artifact(tmp_path, CONFIG, W8A16)
    decoder = LeanDecoder(open_artifact(tmp_path), kv_cache=kind)
    assert decoder.why_not_invariant is None
    texts = (ids(1, 41, 0)[0], ids(1, 70, 1)[0])
    alone = []
    for text in texts:
        decoder.begin(rows=1, capacity=96)
        alone.append(decoder.forward(text[None], last_only=False)[0])
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


def test_latents_are_rounded_where_their_linear_rounds_inputs(tmp_path, make_artifact):
    model = make_artifact(tmp_path, CONFIG, PRESETS["W8A8_STATIC"])
    artifact = open_artifact(tmp_path, backend="reference")
    expected = walk(TransformersDecoder(model, crops=True), prompt=20)
    found = walk(LeanDecoder(artifact), prompt=20)
    # Another order of sums can move an input over a rounding boundary of its grid, which is 0.02.
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours - theirs).abs().max() < 0.2 and (ours - theirs).abs().median() < 2e-5


def test_greedy_tokens_are_those_of_transformers(tmp_path, make_artifact):
    make_artifact(tmp_path, CONFIG, W4A16)
    for prompt in ids(2, 7, 3):
        lean, theirs = (
            generate(
                load(tmp_path, decoder=kind, backend="reference").decoder,
                prompt[None],
                max_new_tokens=24,
            )
            for kind in ("lean", "transformers")
        )
        assert torch.equal(lean, theirs)


def test_a_pack_gives_the_same_bits(tmp_path, make_artifact):
    make_artifact(tmp_path / "a", CONFIG, PRESETS["W8A8_STATIC"])
    plain = walk(load(tmp_path / "a", decoder="lean").decoder, prompt=20)
    for _ in range(2):  # made, then read
        packed = load(tmp_path / "a", decoder="lean", pack=True).decoder
        assert all(torch.equal(*both) for both in zip(plain, walk(packed, prompt=20), strict=True))


def test_adapters_by_request_are_refused(tmp_path, make_artifact):
    make_artifact(tmp_path, CONFIG, W8A16)
    artifact = open_artifact(tmp_path)
    with pytest.raises(UnsupportedError, match="latent attention have none"):
        LeanDecoder(artifact).adapt(artifact, {})
