"""Blocks and who has them, for any order of rows that begin, grow and end."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from quantflow.runtime.batching.pool import BlockPool, Lease


def run(pool: BlockPool, tokens: list[int], salt: str = "") -> Lease:
    """Compute a text as a row does; return its lease."""
    lease = Lease(salt=salt)
    pool.take_over(lease, tokens)
    pool.grow(lease, len(tokens))
    pool.publish(lease, tokens, computed=len(tokens))
    return lease


def test_whole_blocks_of_a_common_beginning_are_shared_and_the_last_token_is_always_computed():
    pool = BlockPool(blocks=20, block_tokens=4)
    first = run(pool, list(range(12)))
    same, longer = Lease(), Lease()
    pool.take_over(same, list(range(12)))
    assert same.blocks == first.blocks[:2]
    pool.take_over(longer, [*range(12), 99])
    assert longer.blocks == first.blocks
    other = Lease()
    pool.take_over(other, [0, 1, 2, 3, 9, 9, 9, 9, 9])
    assert other.blocks == first.blocks[:1]


def test_the_same_tokens_under_another_adapter_are_another_prefix():
    pool = BlockPool(blocks=20, block_tokens=4)
    run(pool, list(range(12)))
    other = Lease(salt="pirate")
    pool.take_over(other, list(range(12)))
    assert other.blocks == []


def test_what_was_left_longest_ago_goes_first_and_the_end_of_a_text_before_its_beginning():
    pool = BlockPool(blocks=4, block_tokens=2)
    old, new = run(pool, [1, 2, 3, 4]), run(pool, [5, 6, 7, 8])
    pool.free(old)
    pool.free(new)
    assert (pool.used, pool.cached) == (0, 4)
    pool.grow(Lease(), 2)  # one block is needed
    again = Lease()
    pool.take_over(again, [1, 2, 3, 4, 0])
    assert len(again.blocks) == 1
    recent = Lease()
    pool.take_over(recent, [5, 6, 7, 8, 0])
    assert len(recent.blocks) == 2


@settings(max_examples=100)
@given(seed=st.integers(0, 10**6), size=st.integers(1, 4))
def test_no_block_is_lost_and_none_is_written_by_two(seed, size):
    draw = random.Random(seed)
    pool = BlockPool(blocks=12, block_tokens=size)
    content: dict[int, tuple] = {}  # block -> the text up to its end, as it would lie in memory
    rows: list[tuple[Lease, list[int]]] = []
    for _ in range(60):
        reserved = sum(-(-len(tokens) // size) for _, tokens in rows)
        if draw.random() < 0.6:
            tokens = [draw.randrange(2) for _ in range(draw.randrange(1, 4 * size + 2))]
            if reserved + -(-len(tokens) // size) > pool.blocks:
                continue
            lease = Lease()
            pool.take_over(lease, tokens)
            shared = len(lease.blocks)
            assert all(
                content[block] == tuple(tokens[: (i + 1) * size])
                for i, block in enumerate(lease.blocks)
            )
            pool.grow(lease, len(tokens))
            held = {block for other, _ in rows for block in other.blocks}
            for i, block in enumerate(lease.blocks[shared:], start=shared):
                assert block not in held
                content[block] = tuple(tokens[: (i + 1) * size])
            pool.publish(lease, tokens, computed=draw.randrange(shared * size, len(tokens) + 1))
            rows.append((lease, tokens))
        elif rows:
            pool.free(rows.pop(draw.randrange(len(rows)))[0])
        assert pool.used == len({block for lease, _ in rows for block in lease.blocks})
    for lease, _ in rows:
        pool.free(lease)
    assert pool.used == 0
    pool.grow(Lease(), pool.blocks * size)  # all of them can be had
