"""BlockPool: reference counts, free blocks, and the index of those that hold a prefix worth keeping."""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Iterable
from functools import lru_cache

from ..errors import UsageError
from .prefix_chain import PrefixChain

# A block holds block_size tokens of one sequence, in the layers of one group; a slot is one token's place:
# slot = block_table[pos // block_size] * block_size + pos % block_size
BlockId = int


@lru_cache(maxsize=4)
def _downwards(n: int) -> array[int]:
    """n - 1 to 0, made once for all the pools of a simulated fleet."""
    return array("i", range(n - 1, -1, -1))


class BlockPool:
    """Blocks of one memory, each in one of four states.

    - used: somebody holds a reference.
    - cached: nobody does, but its tokens are known and may be asked for again; evicted when blocks are
      needed, the least recently used first.
    - free.
    - deferred: given back while a step in flight may still read it; free or cached when that step ends.

    A full block can be cached from the moment it is scheduled: within a step all K and V of a layer are
    stored before any is read. It keeps its serial number until it is evicted, and knows that of its
    predecessor: the chain of serials is what makes a hit exact, whatever the keys collide.

    Everything is O(1) a block, in flat arrays: a cached block of 16 tokens takes less than 200 bytes.
    """

    def __init__(self, num_blocks: int, block_size: int = 16, num_groups: int = 1) -> None:
        self.num_blocks, self.block_size = num_blocks, block_size
        # A stack: the block freed last is handed out first, while its memory is still warm and so that
        # a large pool on a CPU touches no more pages than it needs.
        self._free = _downwards(num_blocks)[:]
        self._refcounts = array("i", bytes(4 * num_blocks))
        self._num_groups = num_groups
        self._index: dict[int, BlockId] = {}  # by key; of a group g, keys that are g modulo num_groups
        self._keys = array("q", bytes(8 * num_blocks))
        self._serials = array("I", bytes(4 * num_blocks))  # 0: its tokens are not known
        self._parents = array("I", bytes(4 * num_blocks))  # serial of the block before it, 0: it is the first
        self._tokens = bytearray(4 * num_blocks * block_size)
        self._namespaces: dict[BlockId, bytes] = {}  # of first blocks, where not empty
        self._next_serial = 1
        # Unreferenced cached blocks in a ring, least recently used first; its last entry is head and tail.
        self._newer = array("i", bytes(4 * (num_blocks + 1)))
        self._older = array("i", bytes(4 * (num_blocks + 1)))
        self._newer[num_blocks] = self._older[num_blocks] = num_blocks
        self.num_cached = 0
        self._steps_begun = self._steps_ended = 0
        self._deferred: dict[int, list[BlockId]] = {}  # by the step that must end first
        self._deferred_until: dict[BlockId, int] = {}
        self._kept: set[BlockId] = set()

    # Counts

    @property
    def num_free(self) -> int:
        """How many blocks hold nothing."""
        return len(self._free)

    @property
    def num_available(self) -> int:
        """How many blocks `allocate` can give: free ones and cached ones."""
        return len(self._free) + self.num_cached

    @property
    def num_deferred(self) -> int:
        """How many blocks wait for a step in flight to end."""
        return len(self._deferred_until)

    @property
    def num_used(self) -> int:
        """How many blocks somebody holds."""
        return self.num_blocks - self.num_available - self.num_deferred

    def refcount(self, block: BlockId) -> int:
        """How many references there are to this block."""
        return self._refcounts[block]

    def references(self) -> list[BlockId]:
        """Every block as often as somebody holds it, in order."""
        blocks = map(itertools.repeat, range(self.num_blocks), self._refcounts)
        return [*itertools.chain.from_iterable(blocks)]

    # References

    def allocate(self, n: int) -> array[int] | None:
        """Take n blocks, or none at all: on None the scheduler preempts. Evicts cached blocks as needed."""
        if n > len(self._free) + self.num_cached:
            return None
        free, refcounts = self._free, self._refcounts
        if n == 1 and free:
            blocks = array("i", (free.pop(),))
        else:
            cut = max(0, len(free) - n)
            blocks = free[cut:]
            del free[cut:]
            blocks.reverse()
            while len(blocks) < n:
                blocks.append(self._evict())
        for block in blocks:
            refcounts[block] = 1
        return blocks

    def share(self, blocks: Iterable[BlockId]) -> None:
        """Add a reference to each of these blocks, which somebody must hold or which must be cached."""
        for block in blocks:
            if self._refcounts[self._existing(block)] == 0:
                if not self._serials[block]:
                    raise UsageError(f"block {block} is free; only what is held or cached can be shared")
                if self._deferred_until.pop(block, None) is None:
                    self._unlink(block)
            self._refcounts[block] += 1

    def free(self, blocks: Iterable[BlockId]) -> None:
        """Drop a reference to each block, those that are to be evicted last at the end."""
        refcounts = self._refcounts
        for block in blocks:
            count = refcounts[self._existing(block)]
            if count == 0:
                raise UsageError(f"block {block} is free already")
            refcounts[block] = count - 1
            if count == 1:
                self._give_back(block)

    def keep_for_step(self, block: BlockId) -> None:
        """See to it that nobody gets this block before the step that is being scheduled has ended."""
        self._kept.add(block)

    # Steps in flight

    def begin_step(self) -> None:
        """From now on a step may read every block that is held now."""
        self._steps_begun += 1
        self._kept.clear()

    def end_step(self) -> None:
        """The oldest step in flight reads no more."""
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
        """Steps begun and not ended."""
        return self._steps_begun - self._steps_ended

    # The prefix cache

    @property
    def last_serial(self) -> int:
        """That of the block that became known last: while it stays the same, no cached prefix gets longer."""
        return self._next_serial - 1

    def match(self, chain: PrefixChain, num_blocks: int, group: int = 0) -> list[BlockId]:
        """The cached blocks of the longest known prefix, at most num_blocks of them."""
        get, parents, serials, tokens = self._index.get, self._parents, self._serials, self._tokens
        data, size, start, previous = chain.data, 4 * self.block_size, 0, 0
        keys = chain.keys[:num_blocks]
        if self._num_groups > 1:
            keys = [self._key(key, group) for key in keys]
        blocks: list[BlockId] = []
        for key in keys:
            block = get(key)
            # All tokens up to here are the same: its own by comparison, those before by the serial.
            if block is None or parents[block] != previous:
                break
            at = block * size
            if tokens[at : at + size] != data[start : start + size]:
                break
            if not blocks and self._namespaces.get(block, b"") != chain.namespace:
                break
            previous, start = serials[block], start + size
            blocks.append(block)
        return blocks

    def cache(self, block: BlockId, chain: PrefixChain, index: int, parent: int, group: int = 0) -> BlockId:
        """Make a held block known as number `index` of a chain, behind the block with serial `parent`.

        Returns the block to go on from: this one or, where the same is cached already, that.
        """
        size = 4 * self.block_size
        tokens = chain.data[index * size : (index + 1) * size]
        return self.adopt(block, chain.keys[index], tokens, parent, chain.namespace, group)

    def adopt(
        self,
        block: BlockId,
        key: int,
        tokens: bytes | bytearray,
        parent: int,
        namespace: bytes = b"",
        group: int = 0,
    ) -> BlockId:
        """`cache` for a block whose key and tokens, as i32, are at hand."""
        key, size = self._key(key, group), 4 * self.block_size
        known = self._index.get(key)
        if known is not None:
            same = (
                self._parents[known] == parent and self._tokens[known * size : (known + 1) * size] == tokens
            )
            if same and (parent or self._namespaces.get(known, b"") == namespace):
                return known
            self._forget(known)  # a collision, or what lost its predecessor: nobody can hit it
        serial = self._next_serial
        self._next_serial = serial % (2**32 - 1) + 1
        self._index[key], self._keys[block] = block, key
        self._serials[block], self._parents[block] = serial, parent
        self._tokens[block * size : (block + 1) * size] = tokens
        if not parent and namespace:
            self._namespaces[block] = namespace
        return block

    def serial(self, block: BlockId) -> int:
        """What the block is known by to its successors; 0 if it is not cached."""
        return self._serials[block]

    def is_known(self, entry: tuple[BlockId, int]) -> bool:
        """Whether a block still has this serial: it was not evicted since."""
        return self._serials[entry[0]] == entry[1]

    def reset(self) -> None:
        """Forget every cached block. Those that are held stay with their holders."""
        for block in [*self._index.values()]:
            self._forget(block)

    def known_blocks(self) -> list[tuple[BlockId, int]]:
        """Every block whose tokens are known, held or not, and its group; predecessors first."""
        known = [(block, key % self._num_groups) for key, block in self._index.items()]
        return sorted(known, key=lambda entry: self._serials[entry[0]])

    def tokens(self, block: BlockId) -> bytes:
        """The tokens of a cached block, as i32."""
        size = 4 * self.block_size
        return bytes(self._tokens[block * size : (block + 1) * size])

    def predecessor(self, block: BlockId) -> int:
        """The serial of the block before a cached one; 0 if it is the first."""
        return self._parents[block]

    def namespace(self, block: BlockId) -> bytes:
        """The namespace of a cached first block."""
        return self._namespaces.get(block, b"")

    # How it works

    def _key(self, key: int, group: int) -> int:
        return key - key % self._num_groups + group if self._num_groups > 1 else key

    def _existing(self, block: BlockId) -> BlockId:
        if not 0 <= block < self.num_blocks:
            raise UsageError(f"block {block} does not exist; the pool has {self.num_blocks}")
        return block

    def _give_back(self, block: BlockId) -> None:
        step = self._steps_begun + (block in self._kept)
        if step > self._steps_ended:
            self._deferred.setdefault(step, []).append(block)
            self._deferred_until[block] = step
        else:
            self._settle(block)

    def _settle(self, block: BlockId) -> None:
        """File a block that nobody holds or reads."""
        if self._serials[block]:
            end = self.num_blocks
            newest = self._older[end]
            self._newer[newest] = self._older[end] = block
            self._older[block], self._newer[block] = newest, end
            self.num_cached += 1
        else:
            self._free.append(block)

    def _unlink(self, block: BlockId) -> None:
        older, newer = self._older[block], self._newer[block]
        self._newer[older], self._older[newer] = newer, older
        self.num_cached -= 1

    def _evict(self) -> BlockId:
        """Take the least recently used cached block."""
        block = self._newer[self.num_blocks]
        self._unlink(block)
        self._drop_from_index(block)
        return block

    def _forget(self, block: BlockId) -> None:
        """Make a cached block unknown; free it if nobody holds it."""
        idle = self._refcounts[block] == 0 and block not in self._deferred_until
        if idle:
            self._unlink(block)
        self._drop_from_index(block)
        if idle:
            self._free.append(block)

    def _drop_from_index(self, block: BlockId) -> None:
        del self._index[self._keys[block]]
        self._serials[block] = 0
        self._namespaces.pop(block, None)

    def check(self) -> None:
        """Every block is in one state, and the index leads to every block whose tokens are known."""
        end, serials, every_block = self.num_blocks, self._serials, range(self.num_blocks)
        ring = [end]
        for _ in range(self.num_cached):
            ring.append(self._newer[ring[-1]])
        cached = ring[1:]
        assert len(cached) == self.num_cached, "less than no cached blocks"
        assert self._newer[ring[-1]] == end, "the cached blocks are miscounted"
        assert [self._older[block] for block in (*cached, end)] == ring, f"the ring is broken: {ring}"
        assert min(self._refcounts, default=0) >= 0, "a block has less than no references"
        used = [*itertools.compress(every_block, self._refcounts)]
        states = (used, self._free, cached, self._deferred_until)
        assert sorted(itertools.chain(*states)) == [*every_block], (
            f"a block is not in one state alone (used, free, cached, deferred): {states}"
        )
        known, indexed = self._index.values(), [*itertools.compress(every_block, serials)]
        assert sorted(known) == indexed, (
            f"blocks {set(indexed) ^ set(known)} are lost to the index, or in it twice or without a serial"
        )
        assert all(serials[block] for block in cached), "a cached block cannot be found"
        assert all(serials[block] for block in self._namespaces), "a namespace outlived its block"
        assert [self._keys[block] for block in known] == [*self._index], "a block has another key"
