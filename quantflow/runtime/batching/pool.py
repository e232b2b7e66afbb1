"""The blocks of the cache: tables of running rows, prefixes that several share, free blocks.

A block holds the keys and values of `block_tokens` tokens that follow each other. A full block is
known by the digest of all tokens up to its end and of the adapter that they were computed with, so
a prompt that begins like an earlier one takes its whole blocks over, without a copy. A block whose
rows have ended keeps its content until the room is needed. The block that was left longest ago goes
first, and the end of a text before its beginning.

The scheduler admits rows only as far as `max_batch_total_tokens` goes, so `grow` always has a block
to give.
"""

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(kw_only=True, eq=False)
class Lease:
    """The blocks of one row.

    Attributes:
        salt: name of the adapter, which decides keys and values beside the tokens.
        blocks: numbers of the blocks, in the order of the tokens.
        digests: digests of the first full blocks, as far as they are known to others.
    """

    salt: str = ""
    blocks: list[int] = field(default_factory=list)
    digests: list[bytes] = field(default_factory=list)


class BlockPool:
    """Blocks by number; their content is the cache's.

    Attributes:
        block_tokens: tokens of a block.
        blocks: number of blocks.
    """

    def __init__(self, *, blocks: int, block_tokens: int) -> None:
        """Begin with all of them free."""
        self.blocks, self.block_tokens = blocks, block_tokens
        self._free = list(range(blocks - 1, -1, -1))
        self._holders = [0] * blocks  # rows that have it in their table
        self._digest: dict[int, bytes] = {}  # block -> digest, where its content is known
        self._known: dict[bytes, int] = {}
        # known blocks that no row holds, the longest unused first
        self._left: OrderedDict[int, None] = OrderedDict()

    @property
    def used(self) -> int:
        """Blocks of running rows."""
        return self.blocks - len(self._free) - len(self._left)

    @property
    def cached(self) -> int:
        """Blocks that no row holds and whose content is kept."""
        return len(self._left)

    def take_over(self, lease: Lease, tokens: Sequence[int]) -> None:
        """Give a row the blocks in which others have computed what comes next of its prompt.

        The last token of the prompt is never taken over, since its logits are needed.

        Args:
            lease: lease of the row, which has as many blocks as digests.
            tokens: the prompt.
        """
        size = self.block_tokens
        for begin in range(len(lease.blocks) * size, (len(tokens) - 1) // size * size, size):
            digest = _extended(lease, tokens[begin : begin + size])
            block = self._known.get(digest)
            if block is None:
                break
            self._left.pop(block, None)
            self._holders[block] += 1
            lease.blocks.append(block)
            lease.digests.append(digest)

    def grow(self, lease: Lease, tokens: int) -> None:
        """Give a row blocks for so many tokens in all."""
        while len(lease.blocks) * self.block_tokens < tokens:
            block = self._free.pop() if self._free else self._evicted()
            self._holders[block] = 1
            lease.blocks.append(block)

    def publish(self, lease: Lease, tokens: Sequence[int], *, computed: int) -> None:
        """Let others share the full blocks of a row.

        Args:
            lease: lease of the row.
            tokens: tokens of the row.
            computed: number of the first tokens that have keys and values.
        """
        size = self.block_tokens
        for index in range(len(lease.digests), computed // size):
            digest, block = (
                _extended(lease, tokens[index * size : (index + 1) * size]),
                lease.blocks[index],
            )
            lease.digests.append(digest)
            # where another row has computed the same meanwhile, its block stays the known one
            if digest not in self._known:
                self._known[digest] = block
                self._digest[block] = digest

    def crop(self, lease: Lease, tokens: int) -> None:
        """Take back the blocks of a row that hold none of its first `tokens` tokens."""
        keep = -(-tokens // self.block_tokens)
        for block in reversed(lease.blocks[keep:]):
            self._release(block)
        del lease.blocks[keep:]

    def free(self, lease: Lease) -> None:
        """End a row; its known blocks keep their content as long as nobody needs the room."""
        self.crop(lease, 0)

    def _release(self, block: int) -> None:
        self._holders[block] -= 1
        if self._holders[block]:
            return
        if block in self._digest:
            self._left[block] = None
        else:
            self._free.append(block)

    def _evicted(self) -> int:
        block, _ = self._left.popitem(last=False)
        del self._known[self._digest.pop(block)]
        return block


def _extended(lease: Lease, tokens: Sequence[int]) -> bytes:
    """The digest of a lease's known tokens and of those of one more block."""
    before = lease.digests[-1] if lease.digests else hashlib.sha256(lease.salt.encode()).digest()
    return hashlib.sha256(before + array("q", tokens).tobytes()).digest()
