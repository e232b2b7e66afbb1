"""Attention beside a softmax in float64 over what each query sees, and the gate."""

import ctypes
import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quantflow.backends import native
from quantflow.errors import IntegrityError
from quantflow.models.architecture import Temperature
from quantflow.runtime import operations
from quantflow.runtime.kv_cache import KINDS, KVCache
from quantflow.runtime.operations import (
    DecoderBlock,
    Heads,
    Operations,
    argmax_logsumexp,
    product,
    why_not,
)

DIM = 16
pytestmark = pytest.mark.skipif(why_not(DIM) is not None, reason="no C compiler")


def attended(
    *,
    counts: list[int],
    query: int,
    shared: int,
    window: int,
    padding: list[int],
    seed: int,
    shift: float = 0.0,
    kind: str = "float32",
    rounds: bool = False,
    dim: int = DIM,
    **block_options,
):
    """Feed columns in pieces; their outputs [B, T, query, dim], and their queries, keys, values."""
    heads = Heads(num_heads=query, num_kv_heads=shared, head_dim=dim, scale=0.7, eps=1e-6)
    block = DecoderBlock(products=(), window=window, **block_options)
    operations = Operations(heads, [block], rounds=rounds)
    rows, capacity = len(padding), sum(counts)
    cache = KVCache(
        kind=kind, rows=rows, capacity=capacity, layers=1, kv_heads=shared, head_dim=dim
    )
    for tensor in (*cache.keys, *cache.values):
        # NaN, where there is one: nothing may be read that was not written
        tensor.view(torch.uint8).fill_(0xFF)
    cache.padding.copy_(torch.tensor(padding))
    # no rotation
    operations.begin(cache, [(torch.ones(cache.capacity, dim), torch.zeros(cache.capacity, dim))])
    qkv = torch.randn(
        rows, capacity, query + 2 * shared, dim, generator=torch.Generator().manual_seed(seed)
    )
    qkv[:, :, :query] *= (DIM / dim) ** 0.5  # scores are as large whatever the features
    # all scores fall by 0.7 shift^2
    qkv[:, :, :query, 0], qkv[:, :, query : query + shared, 0] = shift, -shift
    found = []
    for count in counts:
        operations.step(count)
        piece = qkv[:, cache.length : cache.length + count].reshape(rows * count, -1).clone()
        found.append(operations.attend(piece, 0).view(rows, count, query, dim).clone())
        cache.length += count
    return torch.cat(found, dim=1), *qkv.double().split([query, shared, shared], dim=2)


def expected(q, k, v, *, window: int, padding: list[int]):
    """Yield softmax(0.7 q k) v of every query that is text; padding is left out."""
    rows, columns, query, _ = q.shape
    repeats = query // k.shape[2]
    for row in range(rows):
        for at in range(padding[row], columns):
            first = max(padding[row], at + 1 - window) if window else padding[row]
            for head in range(query):
                keys, values = (
                    k[row, first : at + 1, head // repeats],
                    v[row, first : at + 1, head // repeats],
                )
                yield row, at, head, (0.7 * keys @ q[row, at, head]).softmax(dim=0) @ values


texts = given(
    counts=st.lists(st.sampled_from([1, 2, 5, 17, 40, 70]), min_size=1, max_size=3),
    heads=st.sampled_from([(1, 1), (3, 3), (2, 1), (6, 2), (8, 1), (9, 1), (14, 2)]),
    window=st.sampled_from([0, 1, 3, 16, 65]),
    padding=st.lists(st.sampled_from([0, 1, 20]), min_size=1, max_size=2),
    seed=st.integers(0, 3),
)


@settings(max_examples=25)
@texts
def test_every_query_attends_to_what_it_sees(counts, heads, window, padding, seed):
    query, shared = heads
    found, *inputs = attended(
        counts=counts, query=query, shared=shared, window=window, padding=padding, seed=seed
    )
    for row, at, head, output in expected(*inputs, window=window, padding=padding):
        assert (found[row, at, head].double() - output).abs().max() < 5e-6


@pytest.mark.parametrize("chunk", [1, 7, 64, 70])
@pytest.mark.parametrize(("query", "shared"), [(3, 3), (6, 2), (9, 1)])
def test_a_query_sees_its_own_chunk_alone_counted_from_the_first_token(query, shared, chunk):
    shape = {"query": query, "shared": shared, "padding": [0, 20], "seed": 0}
    found, q, k, v = attended(counts=[70, 1, 1, 17], window=0, chunk=chunk, **shape)
    for row, skip in enumerate(shape["padding"]):
        for begin in range(skip, q.shape[1], chunk):  # each chunk as a text of its own
            parts = (each[row : row + 1, begin : begin + chunk] for each in (q, k, v))
            for _, at, head, output in expected(*parts, window=0, padding=[0]):
                own = found[row, begin + at, head].double()
                assert (own - output).abs().max() < 5e-6


def test_queries_grow_with_their_positions_in_the_text():
    temperature = Temperature(floor_scale=3.0, attn_scale=0.5)
    shape = {"counts": [4, 5], "query": 2, "shared": 1, "window": 0, "seed": 0, "padding": [0, 2]}
    found, q, k, v = attended(**shape, temperature=temperature)
    # steps of three positions, by hand: the third position is the first of the second step
    steps = [0, 0, 1, 1, 1, 2, 2, 2, 3]
    for row, skip in enumerate(shape["padding"]):
        for at, step in enumerate(steps[: 9 - skip]):
            q[row, skip + at] *= 1 + 0.5 * math.log(1 + step)
    for row, at, head, output in expected(q, k, v, window=0, padding=shape["padding"]):
        assert (found[row, at, head].double() - output).abs().max() < 5e-6


# features of a head: half of a tile, a tile and a half, four sums and one more, six
@pytest.mark.parametrize(
    ("rounds", "dim"), [(False, 16), (True, 16), (True, 48), (True, 80), (True, 96)]
)
@settings(max_examples=25)
@texts
def test_over_a_bfloat16_cache_queries_and_attention_probabilities_are_rounded_where_they_may_be(
    rounds, dim, counts, heads, window, padding, seed
):
    query, shared = heads
    shape = {"query": query, "shared": shared, "window": window, "padding": padding, "seed": seed}
    shape["dim"] = dim
    found, q, k, v = attended(counts=counts, kind="bfloat16", rounds=rounds, **shape)
    k, v = k.bfloat16().double(), v.bfloat16().double()

    def furthest(queries):
        outputs = expected(queries, k, v, window=window, padding=padding)
        return max(
            (
                float((found[row, at, head].double() - y).abs().max())
                for row, at, head, y in outputs
            ),
            default=0.0,
        )

    exact = furthest(q) < 2e-6 * v.abs().max()  # sums of up to 96 features and 140 columns
    if rounds and not exact:  # a CPU that multiplies bfloat16; `expected` multiplies by 0.7
        assert furthest((q * 0.7).bfloat16().double() / 0.7) < 2**-8 * v.abs().max()
    else:
        assert exact


def test_a_query_whose_scores_are_far_below_zero_is_not_lost_behind_columns_that_it_does_not_see():
    given_ = {"query": 1, "shared": 1, "window": 5, "padding": [0], "seed": 0, "shift": 20.0}
    # the last of a tile see no column of its first block
    found, *inputs = attended(counts=[140], **given_)
    for row, at, head, output in expected(*inputs, window=5, padding=[0]):
        assert (found[row, at, head].double() - output).abs().max() < 1e-3


def test_the_bits_of_a_query_depend_neither_on_what_comes_with_it_nor_on_threads():
    threads, settings_ = (
        torch.get_num_threads(),
        {"query": 6, "shared": 2, "window": 33, "padding": [0, 7], "seed": 1},
    )
    found = []
    try:
        for count, counts in ((1, [90]), (2, [90]), (2, [50, 17, 22, 1]), (1, [1] * 90)):
            torch.set_num_threads(count)
            found.append(attended(counts=counts, **settings_)[0])
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(found[0], other) for other in found[1:])


@pytest.mark.parametrize("kind, rounds", [*((kind, False) for kind in KINDS), ("bfloat16", True)])
@pytest.mark.parametrize("window", [0, 33])
@pytest.mark.parametrize("block", [16, 32])
def test_the_bits_of_a_query_do_not_depend_on_its_blocks_nor_on_other_sequences(
    kind, rounds, window, block
):
    query, shared, lengths = 6, 2, [90, 1, 47, 64]
    heads = Heads(num_heads=query, num_kv_heads=shared, head_dim=DIM, scale=0.7, eps=1e-6)
    layer = DecoderBlock(products=(), window=window)
    generator = torch.Generator().manual_seed(2)
    texts = [torch.randn(n, (query + 2 * shared) * DIM, generator=generator) for n in lengths]
    shape = {"kind": kind, "layers": 1, "kv_heads": shared, "head_dim": DIM}

    def began(rows, capacity):
        operations, cache = (
            Operations(heads, [layer], rounds=rounds),
            KVCache(rows=rows, capacity=capacity, **shape),
        )
        for tensor in (*cache.keys, *cache.values):
            tensor.view(torch.uint8).fill_(0xFF)  # NaN, where there is one
        operations.begin(cache, [(torch.ones(96, DIM), torch.zeros(96, DIM))])
        return operations

    alone = []
    for text in texts:
        operations = began(1, 96)
        operations.step(len(text))
        alone.append(operations.attend(text.clone(), 0).clone())
    operations = began(4 * 96 // block, block)
    table = torch.randperm(4 * 96 // block, generator=generator).view(4, -1)
    together, done = [[] for _ in texts], [0] * len(texts)
    for rows, counts in (([0, 1, 2, 3], [20, 1, 46, 63]), ([3, 0, 2], [1, 1, 1]), ([0], [69])):
        first = torch.tensor([0, *counts]).cumsum(dim=0)
        start = torch.tensor([done[row] for row in rows])
        operations.step_rows(
            first, start, table[rows].contiguous(), torch.zeros(len(rows), dtype=torch.int64)
        )
        new = torch.cat(
            [
                texts[row][done[row] : done[row] + count]
                for row, count in zip(rows, counts, strict=True)
            ]
        )
        for row, part in zip(rows, operations.attend(new, 0).split(counts), strict=True):
            together[row].append(part.clone())
            done[row] += len(part)
    assert done == lengths
    assert all(
        torch.equal(torch.cat(parts), whole) for parts, whole in zip(together, alone, strict=True)
    )


@settings(max_examples=30)
@given(rows=st.integers(1, 3), width=st.integers(1, 70), seed=st.integers(0, 99))
def test_the_gate_of_any_width_is_silu_times_up(rows, width, seed):
    heads = Heads(num_heads=1, num_kv_heads=1, head_dim=DIM, scale=1.0, eps=1e-6)
    operations = Operations(heads, [])
    gate_up = 30 * torch.randn(rows, 2 * width, generator=torch.Generator().manual_seed(seed))
    found = operations.gate(gate_up).double()
    gate, up = gate_up.double().split(width, dim=1)
    assert torch.allclose(found, gate / (1 + torch.exp(-gate)) * up, rtol=1e-5, atol=1e-12)


@settings(max_examples=40)
@given(
    rows=st.one_of(st.integers(1, 60), st.just(99)),
    width=st.sampled_from([1, 15, 16, 33, 64]),
    outs=st.integers(1, 40),
    dtypes=st.sampled_from(list(itertools.product([torch.float32, torch.bfloat16], repeat=2))),
    bias=st.booleans(),
    seed=st.integers(0, 9),
)
def test_a_product_is_x_times_the_weight_and_no_row_changes_the_bits_of_another(
    rows, width, outs, dtypes, bias, seed
):
    generator, (dtype, given_dtype) = torch.Generator().manual_seed(seed), dtypes
    x, weight = (
        torch.randn(rows, width, generator=generator),
        torch.randn(outs, width, generator=generator).to(dtype),
    )
    offset = torch.randn(outs, generator=generator) if bias else None
    found = product(x, weight, offset, dtype=given_dtype)
    read = x.to(torch.bfloat16) if set(dtypes) == {torch.bfloat16} else x
    expected = read.double() @ weight.double().T + (0 if offset is None else offset.double())
    assert (found.double() - expected).abs().max() < 1e-4
    assert all(
        torch.equal(product(x[row : row + 1], weight, offset, dtype=given_dtype)[0], found[row])
        for row in range(rows)
    )


@settings(max_examples=40)
@given(
    rows=st.integers(1, 3),
    width=st.sampled_from([1, 15, 16, 100, 3000]),
    scale=st.sampled_from([0.1, 5.0, 80.0]),
)
def test_a_row_of_logits_is_summed_up_by_its_best_token_and_the_log_of_its_total(
    rows, width, scale
):
    logits = scale * torch.randn(rows, width, generator=torch.Generator().manual_seed(width))
    best, log_total = argmax_logsumexp(logits)
    assert best == logits.argmax(dim=-1).tolist()
    assert log_total == pytest.approx(
        logits.double().logsumexp(dim=-1).tolist(), rel=1e-6, abs=1e-6
    )
    assert [argmax_logsumexp(logits[row : row + 1])[1][0] for row in range(rows)] == log_total


def test_of_equal_logits_the_lowest_token_is_best_minus_infinity_counts_nothing_and_nan_shows():
    inf, nan = float("inf"), float("nan")
    logits = torch.tensor([[1.0, 3.0, 3.0], [0.0, -inf, 0.0], [0.0, nan, 0.0]])
    best, log_total = argmax_logsumexp(logits)
    assert best[:2] == [1, 0]
    assert log_total[1] == pytest.approx(0.6931472)
    assert log_total[2] != log_total[2]


def test_a_step_with_two_fields_exchanged_is_refused_before_c_reads_it():
    fields = list(operations._Step._fields_)
    at = [name for name, _ in fields].index("query_heads")
    fields[at : at + 2] = fields[at + 1], fields[at]
    exchanged = type("_Step", (ctypes.Structure,), {"_fields_": fields})
    names = ("_Norm", "_Product", "_Plain", "_Experts", "_DeltaNet", "_Layer")
    parts = [getattr(operations, name) for name in names]
    with pytest.raises(IntegrityError, match="Step, kv_heads: "):
        native.require_same_fields(operations.SOURCE, *parts, exchanged)
    native.require_same_fields(operations.SOURCE, *parts, operations._Step)
