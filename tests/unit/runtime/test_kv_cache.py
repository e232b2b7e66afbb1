"""The KV cache: what decode.c keeps of a number, read back by the formulas; rows and columns."""

import pytest
import torch

from quantflow.core.kv import SCHEMES, KVScales, kv_scheme, kv_words
from quantflow.errors import UsageError
from quantflow.models.architecture import Heads
from quantflow.runtime.kv_cache import KINDS, KVCache
from quantflow.runtime.operations import DecoderBlock, Operations, why_not

DIM = 16
ROTATION = torch.ones(1, 1)
while len(ROTATION) < DIM:  # Sylvester's
    ROTATION = torch.cat([torch.cat([ROTATION, sign * ROTATION], dim=1) for sign in (1, -1)])
ROTATION /= DIM**0.5
pytestmark = pytest.mark.skipif(why_not(DIM) is not None, reason="no C compiler")


def cache(kind: str, *, rows: int = 2, capacity: int = 40) -> KVCache:
    return KVCache(kind=kind, layers=2, rows=rows, kv_heads=3, capacity=capacity, head_dim=DIM)


def numbers(rows: int, count: int, seed: int) -> torch.Tensor:
    return torch.randn(rows, 3, count, DIM, generator=torch.Generator().manual_seed(seed))


def write(kept: KVCache, layer: int, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Let decode.c write columns, keys not rotated, and attend to them with queries of 0.

    Args:
        kept: the cache.
        layer: index of a layer.
        keys, values: [rows, kv_heads, T, DIM].

    Returns:
        [rows * T, kv_heads * DIM].
    """
    shared, count = keys.shape[1:3]
    block = DecoderBlock(products=())
    operations = Operations(
        Heads(num_heads=shared, num_kv_heads=shared, head_dim=DIM, scale=1.0, eps=1.0),
        [block] * len(kept.keys),
    )
    operations.begin(kept, [(torch.ones(kept.capacity, DIM), torch.zeros(kept.capacity, DIM))])
    operations.step(count)
    # [rows, T, 3 heads, DIM]
    qkv = torch.cat([torch.zeros_like(keys), keys, values], dim=1).transpose(1, 2)
    return operations.attend(qkv.reshape(kept.rows * count, -1).contiguous(), layer)


def read(kept: KVCache, layer: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of the first columns, decoded, [rows, kv_heads, end, DIM] float32."""
    keys, values = kept.keys[layer], kept.values[layer]
    if kept.kind in ("int4", "int5"):
        return read_int4(kept, layer, end)
    if kept.kind == "bfloat16":  # by twos
        keys, values = keys.transpose(4, 5).flatten(3, 4), values.transpose(3, 4).flatten(2, 3)
    keys = keys.transpose(3, 4).flatten(2, 3)  # 16 columns lie side by side
    found = []
    for codes, scales, steps in (
        (keys, kept.key_scales, kept.key_steps),
        (values, kept.value_scales, kept.value_steps),
    ):
        codes = codes[: kept.rows, :, :end]
        x = (codes.view(torch.float8_e4m3fn) if kept.kind == "float8" else codes).float()
        x = x * steps[layer][:, None, None] if steps else x
        found.append(x * scales[layer][: kept.rows, :, :end, None] if scales else x)
    return found[0], found[1]


def read_int4(kept: KVCache, layer: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The same of int4 and int5, whose heads of 16 features are one group."""
    keys, values = kept.keys[layer], kept.values[layer]
    # int5: a word of fifth bits behind the keys, and one behind the values, four columns to a byte
    words = (keys[:, :, :, 2:].flatten(2, 4), values[:, :, :, 8:].transpose(3, 4).flatten(2, 3))
    keys, values = keys[:, :, :, :2], values[:, :, :, :8]
    keys = torch.cat([keys & 15, keys >> 4], dim=-1)  # [.., T / 16, 2, 16 columns, 8]
    values = torch.cat([values & 15, values >> 4], dim=3)  # [.., T / 4, DIM, 4 columns]
    codes = (keys.transpose(3, 4).flatten(4).flatten(2, 3), values.transpose(3, 4).flatten(2, 3))
    found = []
    half = 8 if kept.kind == "int4" else 16
    for part, word, pairs in zip(codes, words, (kept.key_scales, kept.value_scales), strict=True):
        if kept.kind == "int5":  # feature f is bit f / 4 of byte f % 4
            part = part + 16 * torch.cat([word >> place & 1 for place in range(4)], dim=-1)
        middle, step = pairs[layer].float().flatten(2, 4).split(1, dim=-1)  # [.., T, 1]
        x = (part.float() - half) * step + middle
        found.append(x[: kept.rows, :, :end])
    return found[0] @ ROTATION, found[1]


def fill(
    kept: KVCache, counts: list[int], factor: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Write columns in several pieces to both layers; return layer 1's keys and values."""
    written = []
    for seed, count in enumerate(counts):
        keys, values = (
            numbers(kept.rows, count, seed) * factor,
            numbers(kept.rows, count, seed + 100) * factor,
        )
        write(kept, 0, values, keys)
        write(kept, 1, keys, values)
        kept.length += count
        written.append((keys, values))
    keys, values = zip(*written, strict=True)
    return torch.cat(keys, dim=2), torch.cat(values, dim=2)


# Half a step, of a number: bfloat16 has 8 significant bits, e4m3 has 4; of int8 that of a largest
# number of 8 at most, clamped; of int4 and int5 the length of 16 half steps of numbers 7
# apart at most.
ROOM = {"float32": 0.0, "bfloat16": 2**-8, "float8": 2**-4, "int8": 4 / 127.5, "int4": 4 * 7 / 30}
ROOM["int5"] = 4 * 7 / 62


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_written_in_pieces_reads_back_within_the_rounding_of_its_kind(kind):
    kept = cache(kind)
    keys, values = fill(kept, [7, 1, 15, 1])
    for found, expected in zip(read(kept, 1, 24), (keys, values), strict=True):
        assert found.shape == expected.shape
        whole = kind in ("int8", "int4", "int5")
        room = ROOM[kind] * (1 if whole else expected.abs().clamp_min(2**-6))
        assert ((found - expected).abs() <= room).all()


def test_int8_has_a_scale_per_head_and_position_worked_by_hand():
    kept = KVCache(kind="int8", layers=1, rows=1, kv_heads=2, capacity=3, head_dim=DIM)
    keys, values = torch.zeros(2, 1, 2, 1, DIM)
    keys[0, 0, 0, :2], values[0, :, 0, :2] = (
        torch.tensor([2.55, -1.0]),
        torch.tensor([[255.0, 2.0], [-127.5, 1.0]]),
    )
    write(kept, 0, keys, values)
    assert kept.key_scales[0][0, :, 0].tolist() == pytest.approx([0.02, 1.0])
    # 127.5 rounds to 128, which is clamped
    assert kept.keys[0][0, :, 0, :2, 0].tolist() == [[127, -50], [0, 0]]
    assert kept.value_scales[0][0, :, 0].tolist() == [2.0, 1.0]
    assert kept.values[0][0, :, 0, :2].tolist() == [[127, 1], [-128, 1]]
    assert not kept.keys[0][0, :, 0, 2:, 0].any() and not kept.values[0][0, :, 0, 2:].any()


def test_attention_reads_every_code_of_float8():
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    codes = codes.nan_to_num(nan=-448.0).view(16, 1, 1, DIM).expand(-1, 3, -1, -1)
    found = write(cache("float8", rows=16), 0, torch.zeros_like(codes), codes)
    assert torch.equal(found, codes.transpose(1, 2).reshape(16, -1))


def test_float8_saturates_and_keeps_nan():
    kept = KVCache(kind="float8", layers=1, rows=1, kv_heads=1, capacity=1, head_dim=DIM)
    keys, values = torch.zeros(2, 1, 1, 1, DIM)
    keys[..., :2], values[..., :2] = torch.tensor([1000.0, -1000.0]), torch.tensor([torch.nan, 0.3])
    write(kept, 0, keys, values)
    keys, values = read(kept, 0, 1)
    assert keys.flatten()[:3].tolist() == [448.0, -448.0, 0.0]
    assert values.isnan().flatten().tolist() == [True] + [False] * 15
    assert values[0, 0, 0, 1] == 0.3125


def measured(scheme, layers: int = 2) -> list[KVScales]:
    count = 1 if scheme.granularity == "per_tensor" else 3
    steps = torch.tensor([2.0**-5, 2.0**-4, 2.0**-3])[:count]  # int8 saturates at 4, 8 and 16
    return [
        KVScales(scheme=scheme, keys=steps * (layer + 1), values=steps / (layer + 1))
        for layer in range(layers)
    ]


@pytest.mark.parametrize("scheme", SCHEMES, ids=kv_words)
def test_with_measured_scales_what_reads_back_is_the_reference_formula_bit_for_bit(scheme):
    scales, kind = measured(scheme), "float8" if scheme.kind == "float" else "int8"
    kept = KVCache(
        kind=kind, layers=2, rows=2, kv_heads=3, capacity=40, head_dim=DIM, scales=scales
    )
    keys, values = fill(kept, [7, 1, 15, 1], factor=5.0)
    for layer, (k, v) in enumerate(((values, keys), (keys, values))):
        found = read(kept, layer, 24)
        for part, x, steps in zip(
            found, (k, v), (scales[layer].keys, scales[layer].values), strict=True
        ):
            step = steps.reshape(-1, 1, 1)
            if scheme.kind == "float":
                expected = (x / step).clamp(-448, 448).to(torch.float8_e4m3fn).float() * step
            else:
                expected = (x / step).round().clamp(-128, 127) * step
            assert torch.equal(part, expected)
            if scheme.kind == "int":
                assert (part.abs() < x.abs() - 0.5 * step).any()  # something saturated
    assert not kept.key_scales and kept.nbytes == 2 * 2 * 2 * 3 * 48 * DIM  # no scale per position


def test_measured_scales_of_another_kind_are_refused():
    with pytest.raises(
        UsageError, match="kv cache int8: the scales are of float; use the kind that was measured"
    ):
        KVCache(
            kind="int8",
            layers=2,
            rows=1,
            kv_heads=3,
            capacity=1,
            head_dim=DIM,
            scales=measured(kv_scheme("FP8", "per_head")),
        )


@pytest.mark.parametrize("name", ["FP8", "INT8"])
def test_nan_is_kept_where_there_is_a_code_for_it(name):
    scales = measured(kv_scheme(name, "per_head"), layers=1)
    kept = KVCache(
        kind="float8" if name == "FP8" else "int8",
        layers=1,
        rows=1,
        kv_heads=3,
        capacity=1,
        head_dim=DIM,
        scales=scales,
    )
    x = torch.ones(1, 3, 1, DIM)
    x[0, 1, 0, 2] = torch.nan
    write(kept, 0, x, x)
    # keys are rotated, in pairs
    for part, features in zip(read(kept, 0, 1), ([2, 2 + DIM // 2], [2]), strict=True):
        odd = part[0, 1, 0, features]
        assert odd.isnan().all() if name == "FP8" else (odd == 0).all()
        assert part.nan_to_num().sum() == 3 * DIM - len(features)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [[1], [1, 0], [0, 0, 1, 1, 0]], ids=["fewer", "swapped", "more"])
def test_rows_are_kept_in_the_order_asked_for(kind, rows):
    kept = cache(kind)
    fill(kept, [17])
    kept.padding.copy_(torch.tensor([4, 9]))
    before = [part.clone() for part in read(kept, 1, 17)]
    kept.keep(torch.tensor(rows))
    assert kept.padding.tolist() == [[4, 9][row] for row in rows]
    for old, new in zip(before, read(kept, 1, 17), strict=True):
        assert torch.equal(new, old[rows])
    assert kept.rows == len(rows)


def test_columns_are_cropped_and_written_again():
    kept = cache("float32")
    keys, _ = fill(kept, [20])
    kept.crop(5)
    write(kept, 1, numbers(2, 3, 9), numbers(2, 3, 9))
    found, _ = read(kept, 1, 8)
    assert torch.equal(found, torch.cat([keys[:, :, :5], numbers(2, 3, 9)], dim=2))


def test_smaller_kinds_take_a_half_a_quarter_and_an_eighth_and_integers_their_scales():
    sizes = {kind: cache(kind).nbytes for kind in KINDS}
    assert sizes["bfloat16"] * 2 == sizes["float8"] * 4 == sizes["float32"]
    # layers, keys and values, rows, heads, columns, features, bytes
    assert sizes["float32"] == 2 * 2 * 2 * 3 * 48 * DIM * 4
    assert sizes["int8"] == sizes["float8"] + 2 * 2 * 2 * 3 * 48 * 4
    assert sizes["int4"] == sizes["float8"] // 2 + 2 * 2 * 2 * 3 * 48 * 4  # a group
    # 16 fifth bits are half of a word
    assert sizes["int5"] == sizes["int4"] + 2 * 2 * 2 * 3 * 48 * 4


@pytest.mark.parametrize(
    ("act", "told"),
    [
        (
            lambda kept: kept.crop(4),
            "crop to 4 positions: the cache has 3; crop to at most what there is",
        ),
        (lambda kept: kept.keep(torch.tensor([2])), r"kv cache: keep rows \[2\] of 2"),
        (
            lambda kept: kept.keep(torch.tensor([], dtype=torch.int64)),
            r"kv cache: keep rows \[\] of 2",
        ),
        (
            lambda kept: cache("int2"),
            "kv cache 'int2' is unknown; use one of float32, bfloat16, float8, int8, int4, int5",
        ),
        (lambda kept: cache("int8", rows=0), "kv cache of 0 rows and 40 positions"),
    ],
)
def test_what_there_is_not_is_an_error(act, told):
    kept = cache("float32")
    fill(kept, [3])
    with pytest.raises(UsageError, match=told):
        act(kept)
