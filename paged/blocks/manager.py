"""BlockManager: which blocks of the pool belong to which sequence, in which order."""

from __future__ import annotations

import bisect
import itertools
from array import array
from collections import Counter
from collections.abc import Sequence

from ..errors import UsageError
from .pool import BlockId, BlockPool
from .prefix_chain import HashBlock, PrefixChain, sha256_block
from .sequence import NEVER, SequenceBlocks

# Blocks that a decoding sequence fills before the cache is told: a call costs more than a block.
REGISTER_EVERY = 4
Copy = tuple[BlockId, BlockId]  # from, to


class BlockManager:
    """Tables of blocks, their growth, sharing, and return.

    windows: the sliding window of each layer group in tokens, None where its layers see everything. Layers of
        a group share a table; a block is block_size tokens in the layers of one group.
    max_step_tokens: the most tokens one sequence computes in a step, which bounds what a window holds.
    num_host_blocks: blocks of host memory that sequences can be swapped out to.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        windows: Sequence[int | None] = (None,),
        max_step_tokens: int = 1,
        num_host_blocks: int = 0,
        enable_prefix_caching: bool = True,
        hash_block: HashBlock = sha256_block,
    ) -> None:
        self.block_size, self.windows = block_size, tuple(windows)
        self.enable_prefix_caching = enable_prefix_caching
        self.pool = BlockPool(num_blocks, block_size, len(self.windows))
        self.host_pool = BlockPool(num_host_blocks, block_size=0)  # it knows no tokens
        self._hash_block = hash_block
        # The tokens that a step computes and those in the window before them, wherever blocks begin.
        spans = [w and w - 1 + max_step_tokens for w in self.windows]
        self._most_blocks = [NEVER if s is None else -(-(s - 1) // block_size) + 1 for s in spans]
        self._sequences: set[SequenceBlocks] = set()
        self._pins: dict[str, list[list[BlockId]]] = {}
        self._pinned: Counter[BlockId] = Counter()  # how many pins hold each block

    # Sizes

    def blocks_for(self, num_tokens: int) -> int:
        """How many blocks hold this many tokens in a group without a window."""
        return -(-num_tokens // self.block_size)

    def most_blocks(self, num_tokens: int) -> int:
        """The most blocks that a sequence of this many tokens ever holds, over all groups."""
        blocks = self.blocks_for(num_tokens)
        return sum(min(blocks, most) for most in self._most_blocks)

    def fits(self, num_tokens: int) -> bool:
        """Whether a sequence of this many tokens fits the pool when it is alone with what is pinned."""
        return self.most_blocks(num_tokens) <= self.pool.num_blocks - self.num_pinned

    def longest_fit(self, most: int) -> int:
        """The most tokens of a sequence that fits, up to `most`."""
        return bisect.bisect_left(range(1, most + 1), True, key=lambda n: not self.fits(n))

    def missing_blocks(self, seq: SequenceBlocks, num_tokens: int) -> int:
        """The most blocks it takes to bring a sequence to num_tokens."""
        blocks, missing = self.blocks_for(num_tokens), 0
        for group, (table, most) in enumerate(zip(seq.tables, self._most_blocks, strict=True)):
            held = len(table) - seq.num_dropped[group]
            if most < NEVER:  # what it shares is of no use to others when it falls out of the window
                held = sum(self.pool.refcount(block) == 1 for block in seq.live(group))
            missing += max(0, min(blocks, most) - held)
            if seq.capacity < len(table) * self.block_size:
                missing += 1  # forked: its last block may have to be copied
        return missing

    def num_filled_slots(self, seq: SequenceBlocks, num_computed: int) -> int:
        """How many of the slots of its blocks hold a token."""
        return sum(max(0, num_computed - dropped * self.block_size) for dropped in seq.num_dropped)

    def blocks_to_start(self, hits: Sequence[Sequence[BlockId]], num_tokens: int) -> int:
        """The most available blocks it takes to start with these cached ones and go on to num_tokens.

        Those that somebody holds already cost nothing. In a window they do, one to each holder in the end:
        what one lets go there, the other still holds.
        """
        needed, refcount = self.most_blocks(num_tokens), self.pool.refcount
        for group, (blocks, window) in enumerate(zip(hits, self.windows, strict=False)):
            visible = blocks[self._first_visible(group, len(blocks) * self.block_size) :]
            shared = sum(refcount(block) > 0 for block in visible)
            needed += -shared if window is None else shared
        return needed

    def num_freed(self, seq: SequenceBlocks, gone: Counter[BlockId]) -> int:
        """How many blocks would come back with this sequence when others have gone.

        `gone` counts the references that went with them, and gets those of this one too.
        """
        blocks = [block for group in range(len(self.windows)) for block in seq.live(group)]
        gone.update(blocks)
        return sum(self.pool.refcount(block) == gone[block] for block in blocks)

    def num_matched(
        self, seq: SequenceBlocks, token_ids: Sequence[int], first_needed: int | None = None
    ) -> int:
        """How many tokens of a sequence the prefix cache holds that need not be computed; see `match`."""
        return len(self.match(seq, token_ids, first_needed)[0]) * self.block_size

    # A sequence's life

    def open(self, token_ids: Sequence[int], namespace: bytes = b"") -> SequenceBlocks:
        """A new sequence, which holds nothing yet. Its prompt's blocks get their keys here, once."""
        chain = None
        if self.enable_prefix_caching:
            chain = PrefixChain(namespace, self._hash_block)
            chain.extend(token_ids, (len(token_ids) - 1) // self.block_size, self.block_size)
        return SequenceBlocks(len(self.windows), chain)

    def match(
        self, seq: SequenceBlocks, token_ids: Sequence[int], first_needed: int | None = None
    ) -> list[list[BlockId]]:
        """The cached blocks of its longest known prefix, for each group. Changes nothing in the pool.

        The token `first_needed`, None for the last, and those behind it are never among them: computing the
        last gives the logits for the next, and of an earlier one somebody may want them too.
        """
        if seq.chain is None:
            return [[] for _ in self.windows]
        most = (len(token_ids) - 1) // self.block_size
        seq.chain.extend(token_ids, most, self.block_size)
        return self._match(seq.chain, most if first_needed is None else first_needed // self.block_size)

    def start(self, seq: SequenceBlocks, hits: Sequence[Sequence[BlockId]]) -> int:
        """Begin a sequence with cached blocks from `match`. Returns the number of tokens they hold."""
        num_blocks = len(hits[0])
        self._sequences.add(seq)
        for group, blocks in enumerate(hits):
            first = self._first_visible(group, num_blocks * self.block_size)
            self.pool.share(blocks[first:])
            seq.tables[group] = array("i", bytes(4 * first)) + array("i", blocks[first:])
            seq.num_dropped[group] = first
        self._go_on_from(seq, hits)
        seq.capacity = num_blocks * self.block_size
        return num_blocks * self.block_size

    def grow(self, seq: SequenceBlocks, start: int, end: int, copies: list[Copy]) -> bool:
        """Make room to write the tokens [start, end), or take no block and return False.

        Blocks that the token at `start` sees no more go back. A block that others hold too is replaced
        by a copy before it is written: `copies` gets what the step must copy before anything else.
        """
        if end <= seq.capacity:
            return True
        pool, wanted, index = self.pool, self.blocks_for(end), start // self.block_size
        if self.windows == (None,) and len(seq.tables[0]) == index == wanted - 1:  # as decodes want it
            blocks = pool.allocate(1)
            if blocks is None:
                return False
            seq.tables[0].append(blocks[0])
            seq.capacity = wanted * self.block_size
            return True
        shared = []
        for group, table in enumerate(seq.tables):
            self._drop_invisible(seq, group, start)
            if start % self.block_size and pool.refcount(table[index]) > 1:
                shared.append(group)
        missing = sum(wanted - len(table) for table in seq.tables if wanted > len(table))
        blocks = pool.allocate(missing + len(shared))
        if blocks is None:
            return False
        for group in shared:
            source, target = seq.tables[group][index], blocks.pop()
            copies.append((source, target))
            pool.keep_for_step(source)
            pool.free((source,))
            seq.tables[group][index] = target
        for table in seq.tables:
            share = wanted - len(table)
            if share > 0:
                table.extend(blocks[:share])
                del blocks[:share]
        seq.capacity = wanted * self.block_size
        return True

    def register(self, seq: SequenceBlocks, token_ids: Sequence[int], num_tokens: int) -> None:
        """Tell the prefix cache of all blocks that num_tokens fill. They are computed by the step's end."""
        pool, num_full = self.pool, num_tokens // self.block_size
        if seq.register_at == NEVER or seq.chain is None or num_full <= seq.num_registered:
            return
        seq.chain.extend(token_ids, num_full, self.block_size)
        for index in range(seq.num_registered, num_full):
            if index < max(seq.num_dropped) or (index and not all(map(pool.is_known, seq.last))):
                # Nobody could reach it behind a predecessor that is gone.
                seq.register_at = NEVER
                return
            for group, (_, serial) in enumerate(seq.last):
                known = pool.cache(seq.tables[group][index], seq.chain, index, serial, group)
                seq.last[group] = (known, pool.serial(known))
            seq.num_registered = index + 1
        seq.register_at = (num_full + REGISTER_EVERY) * self.block_size

    def fork(self, seq: SequenceBlocks, num_computed: int) -> SequenceBlocks:
        """A second sequence with the same blocks; whoever writes into the last one first copies it."""
        copy = SequenceBlocks(len(self.windows), seq.chain and seq.chain.fork())
        self._sequences.add(copy)
        copy.tables = [table[:] for table in seq.tables]
        copy.num_dropped, copy.last = seq.num_dropped.copy(), seq.last.copy()
        copy.num_registered, copy.register_at = seq.num_registered, seq.register_at
        for group in range(len(self.windows)):
            self.pool.share(seq.live(group))
        # The next write, of either, has to look at who else holds the block.
        seq.capacity = copy.capacity = min(seq.capacity, num_computed - num_computed % self.block_size)
        return copy

    def release(self, seq: SequenceBlocks) -> None:
        """Give back all blocks of a sequence, on the device and on the host; nothing if it has none."""
        self._free_tables(seq)
        for _, blocks in seq.host or ():
            self.host_pool.free(blocks)
        seq.host = None

    # Swapping

    def swap_out(self, seq: SequenceBlocks, num_computed: int, pairs: list[Copy]) -> bool:
        """Move a sequence to host memory, or change nothing and return False if that is full.

        `pairs` gets what the step must copy, (block, host block), before anything else.
        """
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
        self._free_tables(seq)
        seq.host = saved
        return True

    def swap_in(self, seq: SequenceBlocks, num_computed: int, pairs: list[Copy]) -> bool:
        """Bring a sequence back, or change nothing and return False if blocks run out.

        What the prefix cache still holds is taken from there; `pairs` gets (host block, block) for the rest,
        to be copied after what is swapped out and before any other copy.
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
            assert fresh is not None, "blocks that were counted are gone"
            pairs += zip(saved[len(blocks) :], fresh, strict=True)
            seq.tables[group] = array("i", bytes(4 * dropped)) + array("i", blocks) + fresh
            seq.num_dropped[group] = dropped
            for block in saved:
                self.host_pool.keep_for_step(block)
            self.host_pool.free(saved)
        seq.host = None
        self._go_on_from(seq, hits)
        seq.capacity = self.blocks_for(num_computed) * self.block_size
        return True

    # Steps in flight

    def begin_step(self) -> None:
        """What is held now may be read until the step ends."""
        self.pool.begin_step()
        if self.host_pool.num_blocks:
            self.host_pool.begin_step()

    def end_step(self) -> None:
        """The oldest step in flight is over: what was given back meanwhile can be used again."""
        self.pool.end_step()
        if self.host_pool.num_blocks:
            self.host_pool.end_step()

    # Pins

    def find(self, token_ids: Sequence[int], namespace: bytes = b"") -> list[list[BlockId]]:
        """The cached blocks of the longest known prefix, for each group, the last token's among them."""
        chain = PrefixChain(namespace, self._hash_block)
        num_blocks = len(token_ids) // self.block_size
        chain.extend(token_ids, num_blocks, self.block_size)
        return self._match(chain, num_blocks)

    def pin(self, name: str, token_ids: Sequence[int], namespace: bytes = b"") -> int:
        """Hold the cached blocks of a prefix under a name. Returns how many tokens they hold."""
        if name in self._pins:
            raise UsageError(f"{name!r} is pinned already")
        self._pins[name] = self.find(token_ids, namespace)
        for blocks in self._pins[name]:
            self.pool.share(blocks)
            self._pinned.update(blocks)
        return len(self._pins[name][0]) * self.block_size

    def unpin(self, name: str) -> None:
        """Let go of a pinned prefix; it stays cached until its blocks are needed."""
        if name not in self._pins:
            pinned = ", ".join(map(repr, self._pins)) or "nothing"
            raise UsageError(f"{name!r} is not pinned; {pinned} is")
        for blocks in self._pins.pop(name):
            self.pool.free(reversed(blocks))
            self._pinned.subtract(blocks)
            for block in blocks:
                if not self._pinned[block]:
                    del self._pinned[block]

    @property
    def pins(self) -> list[str]:
        """The names of what is pinned."""
        return list(self._pins)

    @property
    def num_pinned(self) -> int:
        """How many blocks are pinned."""
        return len(self._pinned)

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes, and let go of those that are pinned."""
        for name in [*self._pins]:
            self.unpin(name)
        self.pool.reset()

    # How it works

    def _match(self, chain: PrefixChain, most: int) -> list[list[BlockId]]:
        hits = [self.pool.match(chain, most, group) for group in range(len(self.windows))]
        shortest = min(map(len, hits))
        return [blocks[:shortest] for blocks in hits]

    def _go_on_from(self, seq: SequenceBlocks, hits: Sequence[Sequence[BlockId]]) -> None:
        """Register what follows behind these blocks."""
        seq.num_registered = len(hits[0])
        if seq.num_registered:
            seq.last = [(blocks[-1], self.pool.serial(blocks[-1])) for blocks in hits]
        seq.register_at = NEVER
        if seq.chain is not None:
            seq.register_at = (seq.num_registered + REGISTER_EVERY) * self.block_size

    def _first_visible(self, group: int, start: int) -> int:
        """The first block that the token at `start`, or any later one, sees."""
        window = self.windows[group]
        return 0 if window is None else max(0, start - window + 1) // self.block_size

    def _drop_invisible(self, seq: SequenceBlocks, group: int, start: int) -> None:
        first, dropped = self._first_visible(group, start), seq.num_dropped[group]
        if first > dropped:
            table = seq.tables[group]
            gone = table[dropped:first]
            gone.reverse()
            self.pool.free(gone)
            # Never read again; 0 is as good as any.
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
        """The sequences that hold blocks on the device."""
        return [seq for seq in self._sequences if seq.num_blocks]

    def check(self) -> None:
        """The pools are sound, and their references are exactly the tables, the pins and the host blocks."""
        pool = self.pool
        pool.check()
        self.host_pool.check()
        held = [block for groups in self._pins.values() for block in itertools.chain(*groups)]
        if held or self._pinned:
            assert dict(self._pinned) == dict(Counter(held)), "the pinned blocks are miscounted"
        for seq in self._sequences:
            for table, dropped in zip(seq.tables, seq.num_dropped, strict=True):
                assert dropped <= len(table), "more blocks dropped than there were"
                assert seq.capacity <= len(table) * self.block_size, "capacity beyond the blocks held"
                held += table[dropped:] if dropped else table
        references = pool.references()
        if sorted(held) != references:
            count, holders = Counter(references), Counter(held)
            wrong = [block for block in count | holders if count[block] != holders[block]]
            what = (f"block {b}: {count[b]} references, {holders[b]} holders" for b in sorted(wrong))
            raise AssertionError("; ".join(what))
