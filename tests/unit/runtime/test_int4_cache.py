"""The caches of 4 and 5 bits beside their formulas in torch: bytes, codes to the bit, attention."""

import pytest
import torch
from transformers import DynamicCache

from quantflow.core.scheme import PRESETS, with_group_size
from quantflow.errors import UnsupportedError
from quantflow.models.architecture import Heads
from quantflow.runtime.artifact import open_artifact
from quantflow.runtime.kv_cache import KVCache
from quantflow.runtime.lean import LeanDecoder
from quantflow.runtime.operations import DecoderBlock, Operations, why_not
from quantflow.runtime.transformers_decoder import TransformersDecoder
from tests.unit.runtime import test_latent_attention as latents
from tests.unit.runtime.test_lean import LLAMA, walk

pytestmark = pytest.mark.skipif(why_not(16) is not None, reason="no C compiler")
BLOCK = 64  # columns whose probabilities are rounded together
HALF = {"int4": 8, "int5": 16}  # what is added to codes


@pytest.fixture(params=HALF)
def kind(request):
    return request.param


def hadamard(x):
    """H x / sqrt(n) over the last axis, by the definition: the sign is the parity of i & j."""
    n = x.shape[-1] & -x.shape[-1]
    signs = [[(-1.0) ** (i & j).bit_count() for j in range(n)] for i in range(n)]
    return (x.unflatten(-1, (-1, n)) @ torch.tensor(signs) * (1 / torch.tensor(n).sqrt())).flatten(
        -2
    )


def group_of(dim, kind):
    return next(size for size in (64, 32, 16) if dim % size == 0 and (kind, size) != ("int4", 64))


def coded(x, kind):
    """Codes, steps and middles of numbers in groups, by the formulas in float32."""
    x, half = x.float().unflatten(-1, (-1, group_of(x.shape[-1], kind))), HALF[kind]
    low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
    step = (high / (2 * half - 1) - low / (2 * half - 1)).bfloat16().float()
    middle = (low + half * step).bfloat16().float()
    return ((x - middle) / step).round().clamp(-half, half - 1), step, middle


def rounded(x, kind):
    codes, step, middle = coded(x, kind)
    return (step * codes + middle).flatten(-2)


def began(dim, kind, *, query=2, shared=1, rows=1, capacity=200, window=0):
    heads = Heads(num_heads=query, num_kv_heads=shared, head_dim=dim, scale=dim**-0.5, eps=1e-6)
    operations = Operations(heads, [DecoderBlock(products=(), window=window)])
    cache = KVCache(
        kind=kind, rows=rows, capacity=capacity, layers=1, kv_heads=shared, head_dim=dim
    )
    for tensors in (cache.keys, cache.values, cache.key_scales, cache.value_scales):
        tensors[0].view(torch.uint8).fill_(0xFF)  # NaN, where there is one
    columns = cache.capacity
    operations.begin(cache, [(torch.ones(columns, dim), torch.zeros(columns, dim))])
    return operations, cache


def attended(operations, cache, qkv, counts):
    """Feed columns in pieces; their outputs [rows, T, query, dim]. qkv: [rows, T, heads, dim]."""
    found = []
    for count in counts:
        operations.step(count)
        piece = qkv[:, cache.length : cache.length + count].flatten(2).flatten(0, 1).clone()
        found.append(operations.attend(piece, 0).unflatten(0, (-1, count)).clone())
        cache.length += count
    return torch.cat(found, dim=1).unflatten(-1, (-1, qkv.shape[-1]))


def read(cache, dim):
    """Codes, steps and middles of keys and values as they lie in memory, [rows, heads, T, ...]."""
    length, found, half = cache.length, [], HALF[cache.kind]
    group = group_of(dim, cache.kind)
    keys = cache.keys[0]  # [rows, heads, T / 16, dim / 8 and words of fifth bits, 16, 4]
    key_bits = keys[:, :, :, dim // 8 :].transpose(3, 4).flatten(2, 3)  # [rows, heads, T, words, 4]
    keys = keys[:, :, :, : dim // 8]
    keys = torch.stack([keys & 15, keys >> 4], dim=4)  # [.., dim / 8, 2, 16, 4]
    keys = keys.permute(0, 1, 2, 5, 3, 4, 6).flatten(4).flatten(2, 3)  # [rows, heads, T, dim]
    values = cache.values[0]  # [rows, heads, T / 4, dim / 2 and bytes of fifth bits, 4]
    value_bits = values[:, :, :, dim // 2 :].transpose(3, 4).flatten(2, 3)
    value_bits = value_bits.unflatten(-1, (key_bits.shape[3], 4))
    values = values[:, :, :, : dim // 2].unflatten(3, (-1, group // 2))  # [.., groups, half, 4]
    values = torch.stack([values & 15, values >> 4], dim=4)  # [.., groups, 2, half, 4]
    values = values.permute(0, 1, 2, 6, 3, 4, 5).flatten(4).flatten(2, 3)
    for codes, bits, pairs in (
        (keys, key_bits, cache.key_scales[0]),
        (values, value_bits, cache.value_scales[0]),
    ):
        pairs = pairs.permute(0, 1, 2, 4, 3, 5).flatten(2, 3).float()  # [.., T, groups, 2]
        if cache.kind == "int5":  # feature f is bit f / 4 of byte f % 4 of a word
            fifth = torch.stack([bits >> place & 1 for place in range(8)], dim=-2).flatten(-3)
            codes = codes + 16 * fifth[..., :dim]
        codes = codes.int().unflatten(-1, (-1, group)) - half
        found.append([part[:, :, :length] for part in (codes, pairs[..., 1:], pairs[..., :1])])
    return found


def random(*shape, seed=0):
    """Normal numbers in steps of 1/64: their sums are exact, so rotations have the same bits."""
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return (x * 64).round() / 64


def test_sixteen_numbers_become_eight_bytes_a_step_and_a_middle_worked_by_hand():
    operations, cache = began(16, "int4", query=1, capacity=2)
    values = torch.arange(16.0)  # step 1, middle 8: the codes are 0 to 15
    keys = hadamard(torch.arange(16.0) * 3 - 40)  # which the cache rotates back; step 3, middle -16
    attended(operations, cache, torch.stack([keys, keys, values])[None, None], [1])
    # keys: features 0 to 3 beside 4 to 7; values: the first half beside the second
    assert cache.keys[0][0, 0, 0, :, 0].tolist() == [
        [0x40, 0x51, 0x62, 0x73],
        [0xC8, 0xD9, 0xEA, 0xFB],
    ]
    assert cache.values[0][0, 0, 0, :, 0].tolist() == [0x80 + 0x11 * i for i in range(8)]
    assert cache.key_scales[0][0, 0, 0, 0, 0].tolist() == [-16.0, 3.0]
    assert cache.value_scales[0][0, 0, 0, 0, 0].tolist() == [8.0, 1.0]


def test_sixteen_numbers_become_eight_bytes_and_sixteen_fifth_bits_worked_by_hand():
    operations, cache = began(16, "int5", query=1, capacity=2)
    values = torch.tensor([0, 31, *range(14)]).float()  # step 1, middle 16: codes as they are
    keys = hadamard(torch.tensor([*range(14), 31, 16]) * 3.0 - 40)  # step 3, middle 8
    attended(operations, cache, torch.stack([keys, keys, values])[None, None], [1])
    assert cache.keys[0][0, 0, 0, :2, 0].tolist() == [
        [0x40, 0x51, 0x62, 0x73],
        [0xC8, 0xD9, 0xFA, 0x0B],
    ]
    # features 14 and 15: bit 3 of bytes 2 and 3. Of the values feature 1: bit 0 of byte 1
    assert cache.keys[0][0, 0, 0, 2, 0].tolist() == [0, 0, 8, 8]
    assert cache.values[0][0, 0, 0, :8, 0].tolist() == [
        *(0x60, 0x7F, 0x80, 0x91),
        *(0xA2, 0xB3, 0xC4, 0xD5),
    ]
    assert cache.values[0][0, 0, 0, 8:, 0].tolist() == [0, 1, 0, 0]
    assert cache.key_scales[0][0, 0, 0, 0, 0].tolist() == [8.0, 3.0]
    assert cache.value_scales[0][0, 0, 0, 0, 0].tolist() == [16.0, 1.0]


@pytest.mark.parametrize("dim", [16, 48, 64, 80, 96, 128])
def test_codes_steps_and_middles_are_those_of_the_formulas(dim, kind):
    operations, cache = began(dim, kind, shared=2, rows=2)
    qkv = random(2, 70, 6, dim, seed=dim)
    qkv[..., 3] *= 20  # an outlier
    attended(operations, cache, qkv, [33, 1, 1, 35])
    stored = (hadamard(qkv[:, :, 2:4]), qkv[:, :, 4:])
    for found, x in zip(read(cache, dim), stored, strict=True):
        expected = coded(x.transpose(1, 2), kind)
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, expected, strict=True))


def reference(qkv, kind, query, shared, *, window=0):
    """Attention by the formulas: rounded queries, keys and values; probabilities in float64."""
    dim, repeats = qkv.shape[-1], query // shared
    q, k, v = (x.transpose(1, 2) for x in qkv.split([query, shared, shared], dim=2))
    q, unit = hadamard(q), hadamard(q).abs().amax(-1, keepdim=True) / 127
    q, k = (q / unit).round().double() * unit, rounded(hadamard(k), kind).double()
    codes, step, middle = (x.double() for x in coded(v, kind))  # [rows, heads, T, groups, ..]
    scores = q @ k.repeat_interleave(repeats, 1).transpose(2, 3) * dim**-0.5
    ends, columns = torch.arange(scores.shape[2])[:, None], torch.arange(scores.shape[3])
    seen = (columns <= ends) & ((columns > ends - window) if window else True)
    p = scores.masked_fill(~seen, -torch.inf).softmax(-1)  # [rows, query, T, T]
    out = torch.zeros(*q.shape[:3], codes.shape[3], codes.shape[4], dtype=torch.float64)
    for begin in range(0, p.shape[3], BLOCK):
        part, own = p[..., begin : begin + BLOCK], slice(begin, begin + BLOCK)
        steps, middles, points = (
            x[:, :, own]
            .repeat_interleave(repeats, 1)
            .transpose(2, 3)  # [rows, query, groups, B, .]
            for x in (step, middle, codes)
        )
        weights = part[:, :, None] * steps.transpose(3, 4)  # [rows, query, groups, T, B]
        unit = weights.amax(-1, keepdim=True).clamp_min(1e-30) / 127
        sums = (weights / unit).round() * unit @ points + part[:, :, None] @ middles
        out += sums.transpose(2, 3)
    return out.flatten(3).transpose(1, 2)


@pytest.mark.parametrize("dim", [16, 64, 80, 96, 128])
@pytest.mark.parametrize(
    ("query", "shared", "window"), [(1, 1, 0), (3, 3, 0), (6, 2, 33), (8, 1, 0), (14, 2, 0)]
)
def test_attention_is_that_of_the_formulas(dim, kind, query, shared, window):
    operations, cache = began(dim, kind, query=query, shared=shared, rows=2, window=window)
    qkv = random(2, 137, query + 2 * shared, dim, seed=query)
    found = attended(operations, cache, qkv, [70, 1, 1, 65])
    away = (found.double() - reference(qkv, kind, query, shared, window=window)).abs()
    # a probability in the middle between two of 127 points may fall to either
    assert (away > 1e-5).double().mean() < 0.01 and away.max() < 0.05


@pytest.mark.parametrize("dim", [48, 64, 80])
def test_the_bits_of_a_position_do_not_depend_on_the_forward_nor_on_its_neighbours(dim, kind):
    qkv, found = random(3, 90, 10, dim), []
    for rows, counts in (([0, 1, 2], [90]), ([0, 1, 2], [50, 17, 22, 1]), ([1], [1] * 90)):
        operations, cache = began(dim, kind, query=6, shared=2, rows=len(rows))
        found.append(attended(operations, cache, qkv[rows], counts))
    assert torch.equal(found[0], found[1]) and torch.equal(found[0][1:2], found[2])


def test_a_column_that_was_cropped_and_written_again_leaves_nothing_behind(kind):
    operations, cache = began(64, kind)
    old, new = random(1, 41, 4, 64, seed=1), random(1, 41, 4, 64, seed=2)
    new[:, :18] = old[:, :18]
    attended(operations, cache, old, [41])
    cache.crop(18)
    found = attended(operations, cache, new, [1, 22])
    operations, cache = began(64, kind)
    assert torch.equal(attended(operations, cache, new, [41])[:, 18:], found)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("part", [2, 3], ids=["key", "value"])
def test_a_number_that_is_not_finite_shows_in_every_query_that_sees_it_and_in_no_other(
    bad, part, kind
):
    operations, cache = began(64, kind, capacity=80)
    qkv = random(1, 80, 4, 64)
    qkv[0, 40, part, 5] = bad
    found = attended(operations, cache, qkv, [30, 30, 20])
    group = group_of(64, kind)
    assert found[:, :40].isfinite().all() and found[:, 40:, :, :group].isnan().all()
    # a value makes its own group NaN, a key all outputs
    rest = found[:, 40:, :, group:]
    assert rest.isnan().all() if part == 2 else rest.isfinite().all()


@pytest.mark.parametrize("size", [0.0, 2.0**-133, 1e-38, 1e-20, 1e30])
def test_numbers_of_any_size_are_attended_to(size, kind):
    operations, cache = began(32, kind, query=1, capacity=16)
    qkv = random(1, 16, 3, 32) * torch.tensor([[0.0], [1.0], [size]])
    found = attended(operations, cache, qkv, [16])[0, :, 0]
    values = qkv[0, :, 2].double().cumsum(0) / torch.arange(1, 17)[:, None]  # all scores are 0
    # steps below 2**-100 count nothing
    assert (found.double() - values).abs().max() <= (0.3 * max(size, 2.0**-96) if size else 0)


def test_equal_numbers_have_no_step_and_are_kept_as_bfloat16(kind):
    operations, cache = began(32, kind, query=1, capacity=1)
    qkv = torch.full((1, 1, 3, 32), 0.3)
    found = attended(operations, cache, qkv, [1])
    assert torch.allclose(found, qkv[:, :, :1], rtol=2**-8, atol=0)


def test_the_rotation_spreads_an_outlier_that_would_take_all_codes_of_its_group():
    """Why there is a rotation: one feature of the keys is 30 times the others, as Qwen2's are."""
    operations, cache = began(64, "int4", query=4)
    qkv = random(1, 137, 6, 64)
    qkv[:, :, 4, 7] += 30
    qkv[:, :, :4, 7] /= 30
    found = attended(operations, cache, qkv, [137])
    q, k, v = (x.transpose(1, 2).double() for x in qkv.split([4, 1, 1], dim=2))
    mask = torch.ones(137, 137, dtype=torch.bool).tril()

    def attention(keys, values):
        keys, values = (x.expand_as(q) for x in (keys, values))
        return torch.nn.functional.scaled_dot_product_attention(q, keys, values, attn_mask=mask)

    exact, plain = attention(k, v), attention(*(rounded(x, "int4").double() for x in (k, v)))
    assert (found.transpose(1, 2) - exact).norm() < 0.6 * (plain - exact).norm()


@pytest.mark.parametrize(
    ("kind", "dim", "bits"),
    [("int4", 64, 5), ("int4", 80, 6), ("int5", 128, 5.5), ("int5", 96, 6), ("int5", 80, 7.2)],
)
def test_a_position_takes_so_many_bits_for_each_feature(kind, dim, bits):
    """Codes, 32 bits of each group, and where 32 does not divide a head an unfilled word."""
    cache = KVCache(kind=kind, layers=3, rows=2, kv_heads=5, capacity=32, head_dim=dim)
    assert cache.nbytes * 8 == 2 * 3 * 2 * 5 * 32 * dim * bits


def test_the_fifth_bit_takes_two_thirds_of_the_distance_away():
    """Why there is a fifth bit, although groups are twice as large: a step is 0.55 as long."""
    qkv = random(1, 137, 6, 64)
    q, k, v = (x.transpose(1, 2).double() for x in qkv.split([4, 1, 1], dim=2))
    exact = torch.nn.functional.scaled_dot_product_attention(
        q, k.expand_as(q), v.expand_as(q), is_causal=True
    )
    far = {}
    for kind in HALF:
        operations, cache = began(64, kind, query=4)
        found = attended(operations, cache, qkv, [137]).transpose(1, 2)
        far[kind] = (found - exact).square().sum()
    assert far["int5"] < 0.4 * far["int4"]


def test_a_model_has_the_logits_of_transformers_with_keys_and_values_rounded_alike(
    tmp_path, make_artifact, monkeypatch, kind
):
    model = make_artifact(tmp_path, LLAMA, with_group_size(PRESETS["W4A16"], 16))
    exact = walk(TransformersDecoder(model, crops=True))
    update = DynamicCache.update

    def rounding(self, keys, values, *arguments, **options):
        keys, values = hadamard(rounded(hadamard(keys), kind)), rounded(values, kind)
        return update(self, keys, values, *arguments, **options)

    monkeypatch.setattr(DynamicCache, "update", rounding)
    expected = walk(TransformersDecoder(model, crops=True))
    decoder = LeanDecoder(open_artifact(tmp_path, backend="reference"), kv_cache=kind)
    for ours, theirs, whole in zip(walk(decoder), expected, exact, strict=True):
        # queries and probabilities are rounded to 8 bits, which is little beside 4 and 5
        assert (ours - theirs).norm() < (0.25 if kind == "int4" else 0.5) * (theirs - whole).norm()


def test_latents_are_refused_before_a_weight_is_read(tmp_path, make_artifact, kind):
    make_artifact(tmp_path, latents.CONFIG, latents.W4A16)
    with pytest.raises(UnsupportedError, match=f"{kind}: latent attention .*; use float8 or int8"):
        LeanDecoder(open_artifact(tmp_path), kv_cache=kind)
