"""BlockPool and BlockManager: which block of the KV cache belongs to whom. Host integers only."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable

from .errors import UsageError

# A block holds block_size tokens of one sequence; a slot is one token's place in the cache:
# slot = block_table[pos // block_size] * block_size + pos % block_size
BlockId = int


class BlockPool:
    """Reference-counted blocks with an O(1) free list."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        # A stack: the block freed last is handed out first, while its memory is still warm and so that
        # a large pool on a CPU touches no more pages than it needs.
        self._free = list(range(num_blocks - 1, -1, -1))
        self._refcounts = [0] * num_blocks

    @property
    def num_free(self) -> int:
        """How many blocks nobody holds."""
        return len(self._free)

    def allocate(self, n: int) -> list[BlockId] | None:
        """Take n free blocks, or none at all: on None the scheduler preempts."""
        if n > len(self._free):
            return None
        cut = len(self._free) - n
        blocks = self._free[cut:]
        del self._free[cut:]
        blocks.reverse()
        for block in blocks:
            self._refcounts[block] = 1
        return blocks

    def share(self, blocks: Iterable[BlockId]) -> None:
        """Add one reference to each of these blocks, which somebody must hold already."""
        for block in blocks:
            self._require_held(block)
            self._refcounts[block] += 1

    def free(self, blocks: Iterable[BlockId]) -> None:
        """Drop one reference to each block; those without any left can be allocated again."""
        for block in blocks:
            self._require_held(block)
            self._refcounts[block] -= 1
            if self._refcounts[block] == 0:
                self._free.append(block)

    def refcount(self, block: BlockId) -> int:
        """How many references there are to this block."""
        return self._refcounts[block]

    def check(self) -> None:
        """Every block is free or referenced, never both."""
        free = set(self._free)
        assert len(free) == len(self._free), "a block is twice in the free list"
        for block, count in enumerate(self._refcounts):
            assert count >= 0, f"block {block} has refcount {count}"
            assert (count == 0) == (block in free), (
                f"block {block} has refcount {count}, free: {block in free}"
            )

    def _require_held(self, block: BlockId) -> None:
        if not 0 <= block < self.num_blocks:
            raise UsageError(f"block {block} does not exist; the pool has {self.num_blocks}")
        if self._refcounts[block] == 0:
            raise UsageError(f"block {block} is free already")


class BlockManager:
    """The block table of every request that has computed tokens."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.pool = BlockPool(num_blocks)
        self._tables: dict[str, array[int]] = {}

    def blocks_for(self, num_tokens: int) -> int:
        """How many blocks hold this many tokens."""
        return -(-num_tokens // self.block_size)

    def grow(self, request_id: str, num_tokens: int) -> array[int] | None:
        """Make room for num_tokens in all, or change nothing and return None if blocks run out.

        Returns the block table, as i32: a view for reading, which grows with the request.
        """
        table = self._tables.get(request_id)
        if table is not None and num_tokens <= len(table) * self.block_size:
            return table
        blocks = self.pool.allocate(self.missing_blocks(request_id, num_tokens))
        if blocks is None:
            return None
        if table is None:
            table = self._tables[request_id] = array("i")
        table.extend(blocks)
        return table

    def missing_blocks(self, request_id: str, num_tokens: int) -> int:
        """How many blocks `grow` would allocate."""
        return max(0, self.blocks_for(num_tokens) - len(self._tables.get(request_id, ())))

    def table(self, request_id: str) -> array[int]:
        """The request's blocks in order; see `grow`."""
        return self._tables[request_id]

    def release(self, request_id: str) -> None:
        """Give back all blocks of this request; nothing if it has none."""
        table = self._tables.pop(request_id, None)
        if table is not None:
            self.pool.free(table)

    @property
    def num_used_blocks(self) -> int:
        """How many blocks somebody holds."""
        return self.pool.num_blocks - self.pool.num_free

    def check(self) -> None:
        """The pool is sound, and its references are exactly the entries of the tables."""
        self.pool.check()
        held = Counter(block for table in self._tables.values() for block in table)
        for block in range(self.pool.num_blocks):
            count = self.pool.refcount(block)
            assert count == held[block], f"block {block}: {count} references, in {held[block]} tables"
