"""BlockPool: reference counts, free blocks, and the index of cached prefixes."""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Callable, Iterable
from functools import lru_cache

from ..base.errors import UsageError
from .prefix_chain import PrefixChain

# A block holds block_size tokens of one sequence in the layers of one group; a slot is one token's place:
# slot = block_table[pos // block_size] * block_size + pos % block_size
BlockId = int


@lru_cache(maxsize=4)
def _downwards(n: int) -> array[int]:
    """Return n - 1 to 0, made once for all pools of a simulated fleet."""
    return array("i", range(n - 1, -1, -1))


def bytes_of_pool(num_blocks: int, block_size: int) -> int:
    """Return the bytes of host memory that the tables of a pool take."""
    return 4 * num_blocks * (8 + block_size)


class BlockPool:
    """The blocks of one memory, each in one of four states.

    A block belongs to one layer group, the layers that share a block table; see `BlockManager`.

    - used: it has references.
    - cached: it has no references, but the index finds it by its prefix. The least recently used is evicted
      first.
    - free.
    - deferred: freed while a step in flight may still read it; free or cached when that step ends.

    A full block is indexed when it is scheduled: within a step all K and V of a layer are stored before any
    is read. An indexed block has a serial number, and records its predecessor's: the chain of serials makes a
    hit exact even if digests collide.

    Every operation is O(1) per block. A cached block of 16 tokens takes less than 200 bytes.
    """

    def __init__(self, num_blocks: int, block_size: int = 16, num_groups: int = 1) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        # A stack: the block freed last is allocated first. Its memory is warm, and a large pool on a CPU
        # touches no more pages than it needs.
        self._free = _downwards(num_blocks)[:]
        self._refcounts = array("i", bytes(4 * num_blocks))
        self._num_groups = num_groups
        self._index: dict[int, BlockId] = {}  # by digest, whose remainder is the group: see `_in_group`
        self._digests = array("q", bytes(8 * num_blocks))
        self._serials = array("I", bytes(4 * num_blocks))  # 0: not in the index
        self._parents = array("I", bytes(4 * num_blocks))  # serials of predecessors, 0 for a first block
        self._tokens = bytearray(4 * num_blocks * block_size)
        self._namespaces: dict[BlockId, bytes] = {}  # of first blocks, where not empty
        self._contents: dict[
            BlockId, bytes
        ] = {}  # of indexed blocks, where not empty: see `PrefixChain.content`
        self._next_serial = 1
        # A ring of the cached blocks, least recently used first; entry num_blocks is its head and tail.
        self._newer = array("i", bytes(4 * (num_blocks + 1)))
        self._older = array("i", bytes(4 * (num_blocks + 1)))
        self._newer[num_blocks] = self._older[num_blocks] = num_blocks
        self.num_cached = 0
        self._steps_begun = self._steps_ended = 0
        self._deferred: dict[int, list[BlockId]] = {}  # by the number of the step that must end first
        self._deferred_until: dict[BlockId, int] = {}
        # Sources of copies in the step that is being scheduled: freed, but not yet read by that step.
        self._kept: set[BlockId] = set()
        # The blocks that hold K and V of the draft model for all of their tokens.
        self.drafted: set[BlockId] = set()
        # Called with the serial of each block that leaves the index.
        self.on_drop: Callable[[int], object] | None = None

    # Counts

    @property
    def num_free(self) -> int:
        """The number of free blocks."""
        return len(self._free)

    @property
    def num_available(self) -> int:
        """The number of blocks that `allocate` can return: free and cached ones."""
        return len(self._free) + self.num_cached

    @property
    def num_deferred(self) -> int:
        """The number of freed blocks that become available when a step in flight ends."""
        return len(self._deferred_until)

    @property
    def num_used(self) -> int:
        """The number of blocks with references."""
        return self.num_blocks - self.num_available - self.num_deferred

    def refcount(self, block: BlockId) -> int:
        """Return the number of references to a block."""
        return self._refcounts[block]

    def references(self) -> list[BlockId]:
        """Return every block once per reference, in order."""
        blocks = map(itertools.repeat, range(self.num_blocks), self._refcounts)
        return [*itertools.chain.from_iterable(blocks)]

    # References

    def allocate(self, n: int) -> array[int] | None:
        """Take n blocks, evicting cached blocks as needed, or return None if fewer are available."""
        if n > len(self._free) + self.num_cached:
            return None
        free = self._free
        refcounts = self._refcounts
        if n == 1 and free:
            blocks = array("i", (free.pop(),))
        else:
            cut = max(0, len(free) - n)
            blocks = free[cut:]
            del free[cut:]
            blocks.reverse()
            while len(blocks) < n:
                evicted = self._newer[self.num_blocks]
                self._unlink(evicted)
                self._drop_from_index(evicted)
                blocks.append(evicted)
        for block in blocks:
            refcounts[block] = 1
        if self.drafted:
            self.drafted.difference_update(blocks)
        return blocks

    def share(self, blocks: Iterable[BlockId]) -> None:
        """Add a reference to each block. None of the blocks may be free."""
        for block in blocks:
            if self._refcounts[self._existing(block)] == 0:
                if not self._serials[block]:
                    raise UsageError(f"block {block} is free; only used and cached blocks can be shared")
                if self._deferred_until.pop(block, None) is None:
                    self._unlink(block)
            self._refcounts[block] += 1

    def free(self, blocks: Iterable[BlockId]) -> None:
        """Drop one reference to each block. The last block of the list will be evicted last."""
        refcounts = self._refcounts
        for block in blocks:
            count = refcounts[self._existing(block)]
            if count == 0:
                raise UsageError(f"block {block} is free already")
            refcounts[block] = count - 1
            if count == 1:
                step = self._steps_begun + (block in self._kept)
                if step > self._steps_ended:
                    self._deferred.setdefault(step, []).append(block)
                    self._deferred_until[block] = step
                else:
                    self._settle(block)

    def keep_for_step(self, block: BlockId) -> None:
        """Prevent the reuse of a block until the step that is being scheduled has ended."""
        self._kept.add(block)

    # Steps in flight

    def begin_step(self) -> None:
        """Start a step. Until it ends, it may read any block that is used now."""
        self._steps_begun += 1
        self._kept.clear()

    def end_step(self) -> None:
        """End the oldest step in flight. Blocks freed since that step began become free or cached."""
        if self._steps_ended == self._steps_begun:
            raise UsageError("no step is in flight")
        self._steps_ended += 1
        step = self._steps_ended
        for block in self._deferred.pop(step, ()):
            if self._deferred_until.get(block) == step:
                del self._deferred_until[block]
                self._settle(block)

    @property
    def num_steps_in_flight(self) -> int:
        """The number of steps that have begun and not ended."""
        return self._steps_begun - self._steps_ended

    # The prefix cache

    @property
    def last_serial(self) -> int:
        """The serial of the newest indexed block. While it stays the same, no cached prefix gets longer."""
        return self._next_serial - 1

    def match(self, chain: PrefixChain, num_blocks: int, group: int = 0) -> list[BlockId]:
        """Return the indexed blocks of the longest known prefix, at most num_blocks."""
        get = self._index.get
        parents = self._parents
        serials = self._serials
        tokens = self._tokens
        data = chain.data
        contents = self._contents
        size = 4 * self.block_size
        start = 0
        previous = 0
        digests = chain.digests[:num_blocks]
        if self._num_groups > 1:
            digests = [self._in_group(digest, group) for digest in digests]
        blocks: list[BlockId] = []
        for digest in digests:
            block = get(digest)
            # The tokens of a block are compared; those before it are equal because the serial is.
            if block is None or parents[block] != previous:
                break
            at = block * size
            if tokens[at : at + size] != data[start : start + size]:
                break
            if not blocks and self._namespaces.get(block, b"") != chain.namespace:
                break
            if contents and contents.get(block, b"") != chain.content(len(blocks)):
                break
            previous = serials[block]
            start = start + size
            blocks.append(block)
        return blocks

    def cache(self, block: BlockId, chain: PrefixChain, index: int, parent: int, group: int = 0) -> BlockId:
        """Index a held block as number `index` of a chain, after the block with serial `parent`.

        Return the indexed block: this one, or an equal block that was indexed before.
        """
        size = 4 * self.block_size
        tokens = chain.data[index * size : (index + 1) * size]
        content = chain.content(index)
        return self.adopt(block, chain.digests[index], tokens, parent, chain.namespace, group, content)

    def adopt(
        self,
        block: BlockId,
        digest: int,
        tokens: bytes | bytearray,
        parent: int,
        namespace: bytes = b"",
        group: int = 0,
        content: bytes = b"",
    ) -> BlockId:
        """Index a block as `cache` does, from its digest, tokens (bytes of int32), namespace and content."""
        digest = self._in_group(digest, group)
        size = 4 * self.block_size
        known = self._index.get(digest)
        if known is not None:
            same = self._parents[known] == parent and self.tokens(known) == tokens
            same = same and self.content(known) == content
            if same and (parent or self.namespace(known) == namespace):
                return known
            self._forget(known)  # a collision, or its predecessor is gone: no match reaches it
        serial = self._next_serial
        self._next_serial = serial % (2**32 - 1) + 1
        self._index[digest] = block
        self._digests[block] = digest
        self._serials[block] = serial
        self._parents[block] = parent
        self._tokens[block * size : (block + 1) * size] = tokens
        if not parent and namespace:
            self._namespaces[block] = namespace
        if content:
            self._contents[block] = content
        return block

    def serial(self, block: BlockId) -> int:
        """Return the serial of an indexed block, which its successors record; 0 if it is not indexed."""
        return self._serials[block]

    def is_known(self, entry: tuple[BlockId, int]) -> bool:
        """Return whether a block is still indexed under the serial that `serial` returned for it.

        entry: the block and its serial.
        """
        return self._serials[entry[0]] == entry[1]

    def reset(self) -> None:
        """Remove every block from the index. Used blocks stay used."""
        for block in [*self._index.values()]:
            self._forget(block)

    def known_blocks(self) -> list[tuple[BlockId, int]]:
        """Return every indexed block, used or not, with its group; a block comes after its predecessor."""
        known = [(block, digest % self._num_groups) for digest, block in self._index.items()]
        return sorted(known, key=lambda entry: self._serials[entry[0]])

    def tokens(self, block: BlockId) -> bytes:
        """Return the tokens of an indexed block, as the bytes of int32."""
        size = 4 * self.block_size
        return bytes(self._tokens[block * size : (block + 1) * size])

    def predecessor(self, block: BlockId) -> int:
        """Return the serial of the block before an indexed block; 0 for a first block."""
        return self._parents[block]

    def namespace(self, block: BlockId) -> bytes:
        """Return the namespace of an indexed first block."""
        return self._namespaces.get(block, b"")

    def content(self, block: BlockId) -> bytes:
        """Return the content of an indexed block: what its KV depends on besides tokens and namespace."""
        return self._contents.get(block, b"")

    # Internals

    def _in_group(self, digest: int, group: int) -> int:
        return digest - digest % self._num_groups + group if self._num_groups > 1 else digest

    def _existing(self, block: BlockId) -> BlockId:
        if not 0 <= block < self.num_blocks:
            raise UsageError(f"block {block} does not exist; the pool has {self.num_blocks}")
        return block

    def _settle(self, block: BlockId) -> None:
        """Make a block without references, which no step reads, cached or free."""
        if self._serials[block]:
            end = self.num_blocks
            newest = self._older[end]
            self._newer[newest] = self._older[end] = block
            self._older[block] = newest
            self._newer[block] = end
            self.num_cached += 1
        else:
            self._free.append(block)

    def _unlink(self, block: BlockId) -> None:
        older = self._older[block]
        newer = self._newer[block]
        self._newer[older] = newer
        self._older[newer] = older
        self.num_cached -= 1

    def _forget(self, block: BlockId) -> None:
        """Remove a block from the index; it becomes free if it was cached."""
        idle = self._refcounts[block] == 0 and block not in self._deferred_until
        if idle:
            self._unlink(block)
        self._drop_from_index(block)
        if idle:
            self._free.append(block)

    def _drop_from_index(self, block: BlockId) -> None:
        del self._index[self._digests[block]]
        if self.on_drop is not None:
            self.on_drop(self._serials[block])
        self._serials[block] = 0
        self._namespaces.pop(block, None)
        self._contents.pop(block, None)

    def check(self) -> None:
        """Assert that every block is in exactly one state and that index and blocks agree."""
        end = self.num_blocks
        serials = self._serials
        every_block = range(self.num_blocks)
        ring = [end]
        for _ in range(self.num_cached):
            ring.append(self._newer[ring[-1]])
        cached = ring[1:]
        assert len(cached) == self.num_cached, "num_cached is negative"
        assert self._newer[ring[-1]] == end, "the cached blocks are miscounted"
        assert [self._older[block] for block in (*cached, end)] == ring, f"the ring is broken: {ring}"
        assert min(self._refcounts, default=0) >= 0, "a reference count is negative"
        used = [*itertools.compress(every_block, self._refcounts)]
        states = (used, self._free, cached, self._deferred_until)
        assert sorted(itertools.chain(*states)) == [*every_block], (
            f"a block is not in exactly one state (used, free, cached, deferred): {states}"
        )
        known = self._index.values()
        indexed = [*itertools.compress(every_block, serials)]
        assert sorted(known) == indexed, (
            f"blocks {set(indexed) ^ set(known)} are missing in the index, in it twice or without a serial"
        )
        assert all(serials[block] for block in cached), "a cached block is not in the index"
        assert all(serials[block] for block in self._namespaces), "a namespace outlived its block"
        assert all(serials[block] for block in self._contents), "a content outlived its block"
        assert [self._digests[block] for block in known] == [*self._index], "a block has another digest"
