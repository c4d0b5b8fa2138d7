"""BlockManager: assigns the blocks of the pool to sequences."""

from __future__ import annotations

import bisect
import itertools
from array import array
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..base.errors import UsageError
from .pool import BlockId, BlockPool
from .prefix_chain import HashBlock, PrefixChain, sha256_block
from .sequence import NEVER, SequenceBlocks

if TYPE_CHECKING:
    from .content_chain import Content
    from .snapshots import Snapshots

# A decoding sequence registers this many full blocks at once: a call costs more than a block is worth.
REGISTER_EVERY = 4
Copy = tuple[BlockId, BlockId]  # from, to


def widest_of(windows: Sequence[int | None]) -> int:
    """Return the index of the layer group with the widest sliding window. None, full attention, is widest."""
    return max(range(len(windows)), key=lambda group: windows[group] or NEVER)


class BlockManager:
    """Block tables of sequences: their growth, sharing, swapping and release.

    windows: the sliding window of each layer group in tokens, None for full attention. The layers of a group
        share a block table; a block holds block_size tokens in the layers of one group.
    max_step_tokens: maximum number of tokens that one sequence computes in a step. It bounds the blocks of a
        window.
    num_host_blocks: number of blocks in host memory for sequences that are swapped out.
    num_host_states: number of places in host memory for recurrent states of swapped-out sequences; None if
        the model has no such states.
    snapshots: where the states of cached prefixes are. Without them a sequence with states has no prefix hit.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        windows: Sequence[int | None] = (None,),
        max_step_tokens: int = 1,
        num_host_blocks: int = 0,
        num_host_states: int | None = None,
        enable_prefix_caching: bool = True,
        hash_block: HashBlock = sha256_block,
        snapshots: Snapshots | None = None,
    ) -> None:
        self.block_size = block_size
        self.windows = tuple(windows)
        self.enable_prefix_caching = enable_prefix_caching
        self.pool = BlockPool(num_blocks, block_size, len(self.windows))
        self.host_pool = BlockPool(num_host_blocks, block_size=0)  # stores no token ids
        self.has_states = num_host_states is not None
        # The lowest is taken first. Moves of states are made in order, so that one is free at once.
        self._free_host_states = [*range((num_host_states or 0) - 1, -1, -1)]
        self._num_host_states = num_host_states or 0
        self.snapshots = snapshots
        if snapshots is not None:
            self.pool.on_drop = snapshots.drop
        assert snapshots is not None or not (self.has_states and enable_prefix_caching), "hits need states"
        self._hash_block = hash_block
        # The tokens of one step and the window before them, wherever block boundaries lie.
        spans = [w and w - 1 + max_step_tokens for w in self.windows]
        # A draft model has its K and V in the blocks of this group.
        self.widest = widest_of(self.windows)
        self._most_blocks = [NEVER if s is None else -(-(s - 1) // block_size) + 1 for s in spans]
        self._sequences: set[SequenceBlocks] = set()
        self._pins: dict[str, list[list[BlockId]]] = {}
        self._pinned: Counter[BlockId] = Counter()  # number of pins on each block
        self._pinned_states: dict[str, int] = {}  # by pin, the serial of the block before its state

    # Sizes

    def blocks_for(self, num_tokens: int) -> int:
        """Return how many blocks hold this many tokens in a group without a window."""
        return -(-num_tokens // self.block_size)

    def most_blocks(self, num_tokens: int) -> int:
        """Return the maximum number of blocks, in all groups, that a sequence holds while it grows."""
        blocks = self.blocks_for(num_tokens)
        return sum(min(blocks, most) for most in self._most_blocks)

    def fits(self, num_tokens: int) -> bool:
        """Return whether one sequence of this many tokens fits in the blocks that are not pinned."""
        return self.most_blocks(num_tokens) <= self.pool.num_blocks - self.num_pinned

    def longest_fit(self, most: int) -> int:
        """Return the length in tokens of the longest sequence that fits, up to `most`."""
        return bisect.bisect_left(range(1, most + 1), True, key=lambda n: not self.fits(n))

    def missing_blocks(self, seq: SequenceBlocks, num_tokens: int) -> int:
        """Return an upper bound of the blocks to allocate for extending a sequence to num_tokens."""
        blocks = self.blocks_for(num_tokens)
        missing = 0
        for group, (table, most) in enumerate(zip(seq.tables, self._most_blocks, strict=True)):
            held = len(table) - seq.num_dropped[group]
            if most < NEVER:  # a shared block that leaves the window does not become available
                held = sum(self.pool.refcount(block) == 1 for block in seq.live(group))
            missing += max(0, min(blocks, most) - held)
            if seq.capacity < len(table) * self.block_size:
                missing += 1  # forked: the last block may need a copy
        return missing

    def blocks_taken(self, seq: SequenceBlocks, num_tokens: int) -> int:
        """Return how many blocks `grow` takes for extending a sequence to num_tokens.

        Blocks that `grow` frees are not deducted, since they become available only when the steps in flight
        have ended.
        """
        wanted = self.blocks_for(num_tokens)
        # `fork` lowers the capacity, so that `grow` copies the shared last block.
        is_forked = seq.capacity < len(seq.tables[0]) * self.block_size
        return sum(max(0, wanted - len(table)) + is_forked for table in seq.tables)

    def num_filled_slots(self, seq: SequenceBlocks, num_computed: int) -> int:
        """Return how many slots in the blocks of a sequence hold a token."""
        return sum(max(0, num_computed - dropped * self.block_size) for dropped in seq.num_dropped)

    def blocks_to_start(self, hits: Sequence[Sequence[BlockId]], num_tokens: int) -> int:
        """Return an upper bound of the available blocks that a sequence takes until it has num_tokens tokens.

        hits: the cached blocks with which the sequence begins.

        A cached block that another sequence holds costs nothing. Under a sliding window it costs one block,
        because it stays with the other sequence when this sequence drops it.
        """
        needed = self.most_blocks(num_tokens)
        refcount = self.pool.refcount
        for group, (blocks, window) in enumerate(zip(hits, self.windows, strict=False)):
            visible = blocks[self._first_visible(group, len(blocks) * self.block_size) :]
            shared = sum(refcount(block) > 0 for block in visible)
            needed += -shared if window is None else shared
        return needed

    def num_freed(self, seq: SequenceBlocks, gone: Counter[BlockId]) -> int:
        """Return how many blocks become available if this sequence is released after other sequences.

        gone: the number of references that the other sequences held, by block. This call adds the references
            of this sequence.
        """
        blocks = [block for group in range(len(self.windows)) for block in seq.live(group)]
        gone.update(blocks)
        return sum(self.pool.refcount(block) == gone[block] for block in blocks)

    def num_matched(
        self, seq: SequenceBlocks, token_ids: Sequence[int], first_needed: int | None = None
    ) -> int:
        """Return how many tokens `match` finds in the prefix cache."""
        return len(self.match(seq, token_ids, first_needed)[0]) * self.block_size

    # The life of a sequence

    def open(
        self, token_ids: Sequence[int], namespace: bytes = b"", contents: Sequence[Content] = ()
    ) -> SequenceBlocks:
        """Create a sequence without blocks, and hash the full blocks of its prompt.

        contents: the contents, such as images, for which tokens are placeholders.
        """
        chain = None
        if self.enable_prefix_caching:
            chain = self._new_chain(namespace, contents)
            chain.extend(token_ids, (len(token_ids) - 1) // self.block_size, self.block_size)
        return SequenceBlocks(len(self.windows), chain)

    def match(
        self, seq: SequenceBlocks, token_ids: Sequence[int], first_needed: int | None = None
    ) -> list[list[BlockId]]:
        """Return the cached blocks of the longest known prefix, for each group, without adding references.

        The prefix ends before the token `first_needed`, the first whose logits are needed; None means the
        last token. Where sequences have states, it ends where there is a snapshot of them.
        """
        if seq.chain is None:
            return [[] for _ in self.windows]
        most = (len(token_ids) - 1) // self.block_size
        seq.chain.extend(token_ids, most, self.block_size)
        hits = self._match(seq.chain, most if first_needed is None else first_needed // self.block_size)
        seq.last_place = most * self.block_size
        return hits if self.snapshots is None else self._cut(hits, seq)

    def start(self, seq: SequenceBlocks, hits: Sequence[Sequence[BlockId]]) -> int:
        """Start a sequence with cached blocks from `match`. Return how many tokens they hold."""
        num_blocks = len(hits[0])
        self._sequences.add(seq)
        for group, blocks in enumerate(hits):
            first = self._first_visible(group, num_blocks * self.block_size)
            self.pool.share(blocks[first:])
            seq.tables[group] = array("i", bytes(4 * first)) + array("i", blocks[first:])
            seq.num_dropped[group] = first
        self._resume_registering(seq, hits)
        seq.num_drafted = self._num_drafted(hits[self.widest])
        seq.capacity = num_blocks * self.block_size
        return num_blocks * self.block_size

    def grow(self, seq: SequenceBlocks, start: int, end: int, copies: list[Copy]) -> bool:
        """Allocate blocks for the tokens [start, end), or allocate none and return False.

        Blocks outside the window of the token at `start` are freed. A shared block is copied before it is
        written (copy-on-write): the step must make the copies added to `copies` before anything else.
        """
        if end <= seq.capacity:
            return True
        pool = self.pool
        wanted = self.blocks_for(end)
        index = start // self.block_size
        if self.windows == (None,) and len(seq.tables[0]) == index == wanted - 1:  # most decodes
            blocks = pool.allocate(1)
            if blocks is None:
                return False
            seq.tables[0].append(blocks[0])
            seq.capacity = wanted * self.block_size
            return True
        shared = []
        for group, table in enumerate(seq.tables):
            self._drop_invisible(seq, group, start)
            if index < len(table) and pool.refcount(table[index]) > 1:
                shared.append(group)
        missing = sum(wanted - len(table) for table in seq.tables if wanted > len(table))
        blocks = pool.allocate(missing + len(shared))
        if blocks is None:
            return False
        for group in shared:
            source = seq.tables[group][index]
            target = blocks.pop()
            copies.append((source, target))
            pool.keep_for_step(source)
            pool.free((source,))
            seq.tables[group][index] = target
        for table in seq.tables:
            share = max(0, wanted - len(table))
            table.extend(blocks[:share])
            del blocks[:share]
        seq.capacity = wanted * self.block_size
        return True

    def register(self, seq: SequenceBlocks, token_ids: Sequence[int], num_tokens: int) -> None:
        """Add the full blocks of the first num_tokens, some computed by this step, to the prefix cache."""
        pool = self.pool
        num_full = num_tokens // self.block_size
        if seq.register_at == NEVER or seq.chain is None or num_full <= seq.num_registered:
            return
        seq.chain.extend(token_ids, num_full, self.block_size)
        for index in range(seq.num_registered, num_full):
            if index < max(seq.num_dropped) or (index and not all(map(pool.is_known, seq.last))):
                seq.register_at = NEVER  # `match` could not reach it: its predecessor is gone
                return
            for group, (_, serial) in enumerate(seq.last):
                known = pool.cache(seq.tables[group][index], seq.chain, index, serial, group)
                seq.last[group] = (known, pool.serial(known))
            seq.num_registered = index + 1
        seq.register_at = (num_full + REGISTER_EVERY) * self.block_size

    def fork(self, seq: SequenceBlocks, num_computed: int) -> SequenceBlocks:
        """Return a second sequence that shares all blocks. The first write into the last block copies it."""
        copy = SequenceBlocks(len(self.windows), seq.chain and seq.chain.fork())
        self._sequences.add(copy)
        copy.tables = [table[:] for table in seq.tables]
        copy.num_dropped = seq.num_dropped.copy()
        copy.last = seq.last.copy()
        copy.num_registered = seq.num_registered
        copy.register_at = seq.register_at
        copy.num_drafted = seq.num_drafted
        for group in range(len(self.windows)):
            self.pool.share(seq.live(group))
        copy.capacity = seq.capacity
        for either in (seq, copy):
            self.rewind(either, num_computed)
        return copy

    def rewind(self, seq: SequenceBlocks, num_computed: int) -> None:
        """Lower the capacity to full blocks, so that `grow` copies the next block if it is shared."""
        seq.capacity = min(seq.capacity, num_computed - num_computed % self.block_size)

    def truncate(self, seq: SequenceBlocks, num_tokens: int) -> None:
        """Free the blocks behind the first num_tokens tokens.

        No other sequence and no cache entry may refer to these blocks. K and V of the draft model behind
        these tokens were guesses, so they are forgotten.
        """
        seq.num_drafted = min(seq.num_drafted, num_tokens)
        most = self.blocks_for(num_tokens)
        if len(seq.tables[0]) <= most:
            return
        for table in seq.tables:
            gone = table[most:]
            gone.reverse()
            self.pool.free(gone)
            del table[most:]
        seq.capacity = min(seq.capacity, most * self.block_size)

    def record_drafted(self, seq: SequenceBlocks, num_tokens: int, num_guesses: int = 0) -> None:
        """Record that the draft model's K and V exist for num_tokens tokens and num_guesses guesses."""
        first = min(seq.num_drafted, num_tokens) // self.block_size
        self.pool.drafted.update(seq.tables[self.widest][first : num_tokens // self.block_size])
        seq.num_drafted = num_tokens + num_guesses

    def release(self, seq: SequenceBlocks) -> None:
        """Free all blocks of a sequence, on the device and on the host."""
        self._free_tables(seq)
        for _, blocks in seq.host or ():
            self.host_pool.free(blocks)
        seq.host = None
        if seq.host_state is not None:
            self.take_host_state(seq)
        if seq.rolling is not None and self.snapshots is not None:
            self.snapshots.release(seq.rolling[0])
            seq.rolling = None

    # Swapping

    def swap_out(self, seq: SequenceBlocks, num_computed: int, pairs: list[Copy]) -> bool:
        """Move a sequence to host memory. If that is full, change nothing and return False.

        pairs: gets the pairs (block, host block). The step must copy these before anything else.
        """
        if self.has_states and not self._free_host_states:
            return False
        for group in range(len(self.windows)):
            self._drop_invisible(seq, group, num_computed)
        num_blocks = self.blocks_for(num_computed)
        kept = [table[d:num_blocks] for table, d in zip(seq.tables, seq.num_dropped, strict=True)]
        host = self.host_pool.allocate(sum(map(len, kept)))
        if host is None:
            return False
        pairs += zip(itertools.chain(*kept), host, strict=True)
        saved = []
        for dropped, blocks in zip(seq.num_dropped, kept, strict=True):
            saved.append((dropped, host[: len(blocks)]))
            del host[: len(blocks)]
        num_drafted = seq.num_drafted
        self._free_tables(seq)
        seq.num_drafted = num_drafted
        seq.host = saved
        if self.has_states:
            seq.host_state = self._free_host_states.pop()
        return True

    def take_host_state(self, seq: SequenceBlocks) -> int:
        """Free the place in host memory of a swapped-out sequence's state. Return the place."""
        slot = seq.host_state
        assert slot is not None, "the state of the sequence is not in host memory"
        seq.host_state = None
        self._free_host_states.append(slot)
        return slot

    def swap_in(self, seq: SequenceBlocks, num_computed: int, pairs: list[Copy]) -> bool:
        """Move a sequence back to the device. If blocks run out, change nothing and return False.

        pairs: gets the pairs (host block, block) of blocks that are no longer cached; cached blocks are
            shared. The step copies the pairs after the blocks that it swaps out, and before any other.
        """
        assert seq.host is not None, "the sequence is not swapped out"
        hits: list[list[BlockId]] = [[] for _ in self.windows]
        if seq.chain is not None and self.windows == (None,):
            hits = self._match(seq.chain, num_computed // self.block_size)
        shared = [blocks[dropped:] for blocks, (dropped, _) in zip(hits, seq.host, strict=True)]
        missing = sum(len(saved) for _, saved in seq.host) - sum(map(len, shared))
        taken = sum(self.pool.refcount(block) == 0 for blocks in shared for block in blocks)
        if missing + taken > self.pool.num_available:
            return False
        self._sequences.add(seq)
        for group, (blocks, (dropped, saved)) in enumerate(zip(shared, seq.host, strict=True)):
            self.pool.share(blocks)
            fresh = self.pool.allocate(len(saved) - len(blocks))
            assert fresh is not None, "fewer blocks are available than were counted"
            pairs += zip(saved[len(blocks) :], fresh, strict=True)
            seq.tables[group] = array("i", bytes(4 * dropped)) + array("i", blocks) + fresh
            seq.num_dropped[group] = dropped
            for block in saved:
                self.host_pool.keep_for_step(block)
            self.host_pool.free(saved)
        seq.host = None
        self._resume_registering(seq, hits)
        known = self._num_drafted(hits[self.widest])
        if known < len(hits[self.widest]) * self.block_size:  # others have computed the rest
            seq.num_drafted = min(seq.num_drafted, known)
        seq.capacity = self.blocks_for(num_computed) * self.block_size
        return True

    # Steps in flight

    def begin_step(self) -> None:
        """Start a step. Until it ends, blocks in use now are not given away, since the step may read them."""
        self.pool.begin_step()
        if self.host_pool.num_blocks:
            self.host_pool.begin_step()

    def end_step(self) -> None:
        """End the oldest step in flight. Blocks freed since that step began become available."""
        self.pool.end_step()
        if self.host_pool.num_blocks:
            self.host_pool.end_step()

    # Pins

    def _new_chain(self, namespace: bytes, contents: Sequence[Content]) -> PrefixChain:
        if not contents:
            return PrefixChain(namespace, self._hash_block)
        from .content_chain import ContentChain

        return ContentChain(contents, self.block_size, namespace, self._hash_block)

    def find(
        self, token_ids: Sequence[int], namespace: bytes = b"", contents: Sequence[Content] = ()
    ) -> list[list[BlockId]]:
        """Return the cached blocks of the longest known prefix, for each group, up to the last token.

        Where sequences have states, it ends where there is a snapshot of them.
        """
        chain = self._new_chain(namespace, contents)
        num_blocks = len(token_ids) // self.block_size
        chain.extend(token_ids, num_blocks, self.block_size)
        hits = self._match(chain, num_blocks)
        return hits if self.snapshots is None else self._cut(hits, SequenceBlocks(0, None))

    def pin(
        self, name: str, token_ids: Sequence[int], namespace: bytes = b"", contents: Sequence[Content] = ()
    ) -> int:
        """Pin the cached blocks of a prefix under a name. Return how many tokens they hold."""
        if name in self._pins:
            raise UsageError(f"{name!r} is pinned already")
        self._pins[name] = self.find(token_ids, namespace, contents)
        for blocks in self._pins[name]:
            self.pool.share(blocks)
            self._pinned.update(blocks)
        if self.snapshots is not None and self._pins[name][0]:
            self._pinned_states[name] = self.pool.serial(self._pins[name][0][-1])
            self.snapshots.pin(self._pinned_states[name])
        return len(self._pins[name][0]) * self.block_size

    def unpin(self, name: str) -> None:
        """Allow the blocks of a pinned prefix to be evicted again."""
        if name not in self._pins:
            pinned = ", ".join(map(repr, self._pins)) or "nothing"
            raise UsageError(f"{name!r} is not pinned; {pinned} is")
        for blocks in self._pins.pop(name):
            self.pool.free(reversed(blocks))
            self._pinned -= Counter(blocks)  # keeps positive counts only
        if self.snapshots is not None and name in self._pinned_states:
            self.snapshots.unpin(self._pinned_states.pop(name))

    @property
    def pins(self) -> list[str]:
        """The names of the pinned prefixes."""
        return list(self._pins)

    @property
    def num_pinned(self) -> int:
        """The number of pinned blocks."""
        return len(self._pinned)

    def reset_prefix_cache(self) -> None:
        """Remove all prefixes from the cache, and unpin the pinned ones."""
        for name in self.pins:
            self.unpin(name)
        self.pool.reset()

    # Internals

    def _match(self, chain: PrefixChain, most: int) -> list[list[BlockId]]:
        hits = [self.pool.match(chain, most, group) for group in range(len(self.windows))]
        shortest = min(map(len, hits))
        return [blocks[:shortest] for blocks in hits]

    def _cut(self, hits: list[list[BlockId]], seq: SequenceBlocks) -> list[list[BlockId]]:
        """Return the hits up to the last snapshot, and note in a sequence how many there were."""
        assert self.snapshots is not None, "no hit begins with a state"
        now, later = self.snapshots.longest(map(self.pool.serial, hits[0]))
        seq.is_due = later > now
        seq.num_matched = len(hits[0]) * self.block_size
        return [blocks[:now] for blocks in hits]

    def _resume_registering(self, seq: SequenceBlocks, hits: Sequence[Sequence[BlockId]]) -> None:
        """Continue registration after these cached blocks."""
        seq.num_registered = len(hits[0])
        if seq.num_registered:
            seq.last = [(blocks[-1], self.pool.serial(blocks[-1])) for blocks in hits]
        if seq.chain is not None:
            seq.register_at = (seq.num_registered + REGISTER_EVERY) * self.block_size

    def _num_drafted(self, blocks: Sequence[BlockId]) -> int:
        """Return how many tokens the first of these blocks hold that have K and V of the draft model."""
        drafted = self.pool.drafted
        missing = (i for i, block in enumerate(blocks) if block not in drafted)
        return next(missing, len(blocks)) * self.block_size

    def _first_visible(self, group: int, start: int) -> int:
        """Return the index of the first block visible from position `start`."""
        window = self.windows[group]
        return 0 if window is None else max(0, start - window + 1) // self.block_size

    def _drop_invisible(self, seq: SequenceBlocks, group: int, start: int) -> None:
        first = self._first_visible(group, start)
        dropped = seq.num_dropped[group]
        if first > dropped:
            table = seq.tables[group]
            gone = table[dropped:first]
            gone.reverse()
            self.pool.free(gone)
            # Never read again: any block id would do.
            table[dropped:first] = array("i", bytes(4 * len(gone)))
            seq.num_dropped[group] = first

    def _free_tables(self, seq: SequenceBlocks) -> None:
        for group in range(len(self.windows)):
            blocks = seq.live(group)
            blocks.reverse()  # the cache loses the ends of prefixes first
            self.pool.free(blocks)
        seq.clear(len(self.windows))
        self._sequences.discard(seq)

    def holders(self) -> list[SequenceBlocks]:
        """Return the sequences that hold blocks on the device."""
        return [seq for seq in self._sequences if seq.num_blocks]

    def check(self) -> None:
        """Assert that both pools are sound and that each device reference belongs to a table or a pin."""
        pool = self.pool
        pool.check()
        self.host_pool.check()
        assert len(set(self._free_host_states)) == len(self._free_host_states) <= self._num_host_states
        if self.snapshots is not None:
            self.snapshots.check(self.pool, self._sequences)
        held = [block for groups in self._pins.values() for block in itertools.chain(*groups)]
        assert dict(self._pinned) == dict(Counter(held)), "the pinned blocks are miscounted"
        for seq in self._sequences:
            for table, dropped in zip(seq.tables, seq.num_dropped, strict=True):
                assert dropped <= len(table), "more blocks dropped than the table has"
                assert seq.capacity <= len(table) * self.block_size, "capacity beyond the blocks held"
                assert seq.num_drafted <= len(table) * self.block_size, "drafted beyond the blocks held"
                held += table[dropped:]
        references = pool.references()
        if sorted(held) != references:
            count = Counter(references)
            holders = Counter(held)
            wrong = [block for block in count | holders if count[block] != holders[block]]
            what = (f"block {b}: {count[b]} references, {holders[b]} holders" for b in sorted(wrong))
            raise AssertionError("; ".join(what))
