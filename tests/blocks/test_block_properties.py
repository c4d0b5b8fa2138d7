"""BlockPool and BlockManager in random sequences of calls, against models of dicts and lists."""

from __future__ import annotations

import zlib
from array import array

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from hypothesis.stateful import run_state_machine_as_test as run_machine

from paged.base.errors import UsageError
from paged.blocks.manager import BlockManager, Copy
from paged.blocks.pool import BlockId, BlockPool
from paged.blocks.prefix_chain import PrefixChain, sha256_block
from paged.blocks.sequence import SequenceBlocks
from tests.simulation import slot_value, weak_hash

STEPS_PER_EXAMPLE = 50
MIN_STEPS = 6_000  # of each machine
SETTINGS = settings(
    max_examples=MIN_STEPS // STEPS_PER_EXAMPLE + 40,  # some stop early
    stateful_step_count=STEPS_PER_EXAMPLE,
    deadline=None,
    derandomize=True,
    suppress_health_check=[*HealthCheck],
)
ANY = st.integers(0, 119)  # an index into the objects there are, or an amount


class PoolMachine(RuleBasedStateMachine):
    """The model identifies a cached block by its whole prefix, and tracks when it may be reused."""

    num_rules = 0
    BLOCK_SIZE = 2

    @initialize(weak=st.booleans(), num_blocks=st.integers(2, 9), num_groups=st.integers(1, 2))
    def begin(self, weak: bool, num_blocks: int, num_groups: int) -> None:
        self.pool = BlockPool(num_blocks, self.BLOCK_SIZE, num_groups)
        self.num_groups = num_groups
        self.refs = [0] * num_blocks
        self.free_blocks = set(range(num_blocks))
        self.idle: list[BlockId] = []  # cached without references, the least recently used first
        # (digest, group) -> (block, its whole prefix, its serial, its predecessor's serial)
        self.index: dict[tuple[int, int], tuple[BlockId, tuple[bytes, bytes], int, int]] = {}
        self.begun = self.ended = 0
        self.kept: set[BlockId] = set()
        self.deferred: list[tuple[int, BlockId]] = []
        self.waiting: dict[BlockId, int] = {}
        # Nearly all prefixes of up to three blocks: each chain shares its beginning with another.
        hash_block = weak_hash if weak else sha256_block
        self.chains = []
        for namespace in (b"", b"salt"):
            for tokens in ([1, 1, 1, 1, 1, 1], [1, 1, 2, 1, 1, 1], [1, 1, 1, 1, 2, 2], [2, 1, 1, 1, 1, 1]):
                chain = PrefixChain(namespace, hash_block)
                chain.extend(tokens, 3, self.BLOCK_SIZE)
                self.chains.append(chain)

    # The model

    def known(self) -> dict[BlockId, tuple[int, int]]:
        return {entry[0]: key for key, entry in self.index.items()}

    def settle(self, block: BlockId) -> None:
        self.idle.append(block) if block in self.known() else self.free_blocks.add(block)

    def forget(self, key: tuple[int, int]) -> None:
        block = self.index.pop(key)[0]
        if block in self.idle:
            self.idle.remove(block)
            self.free_blocks.add(block)

    def longest(self, chain: PrefixChain, most: int, group: int) -> list[BlockId]:
        blocks, previous = [], 0
        for i, digest in enumerate(chain.digests[:most]):
            entry = self.index.get((self.key(digest), group))
            prefix = (chain.namespace, bytes(chain.data[: (i + 1) * 4 * self.BLOCK_SIZE]))
            if entry is None or entry[1] != prefix or entry[3] != previous:
                break
            blocks.append(entry[0])
            previous = entry[2]
        return blocks

    def key(self, digest: int) -> int:
        return digest // self.num_groups

    # One rule for all calls: of several, Hypothesis disables half in a run, and most runs then do little.

    RULES = """
        allocate cache cache cache share share_prefix free free free_all keep_for_step begin_step end_step
        end_step match reset
    """

    @rule(name=st.sampled_from(RULES.split()), which=ANY, much=ANY)
    def act(self, name: str, which: int, much: int) -> None:
        getattr(self, name)(which, much)

    def allocate(self, which: int, much: int) -> None:  # noqa: ARG002
        n = much % 3 if much < 100 else much - 100
        blocks = self.pool.allocate(n)
        if n > len(self.free_blocks) + len(self.idle):
            assert blocks is None
            return
        assert len(set(blocks)) == n
        num_evicted = max(0, n - len(self.free_blocks))
        # Free blocks are taken before the oldest cached ones.
        assert list(blocks[n - num_evicted :]) == self.idle[:num_evicted]
        assert set(blocks[: n - num_evicted]) <= self.free_blocks
        for block in self.idle[:num_evicted]:
            del self.index[self.known()[block]]
        del self.idle[:num_evicted]
        self.free_blocks -= set(blocks)
        for block in blocks:
            self.refs[block] = 1

    def share_prefix(self, which: int, much: int) -> None:
        """Share the blocks of a match."""
        for block in self.pool.match(self.chains[which % len(self.chains)], much % 4):
            self.share(block + 1, 0)

    def share(self, which: int, much: int) -> None:  # noqa: ARG002
        block = which % (len(self.refs) + 2) - 1  # also one too low and one too high
        exists = 0 <= block < len(self.refs)
        if not exists or (not self.refs[block] and block not in self.known()):
            self.refused(self.pool.share, block)
            return
        self.pool.share([block])
        if block in self.idle:
            self.idle.remove(block)
        self.waiting.pop(block, None)
        self.refs[block] += 1

    def free_all(self, which: int, much: int) -> None:  # noqa: ARG002
        """Free all used blocks from a random one on."""
        held = [block for block, count in enumerate(self.refs) if count]
        for block in [*held[which % 9 :], *held[: which % 9]]:
            self.free(block + 1, 0)

    def free(self, which: int, much: int) -> None:  # noqa: ARG002
        block = which % (len(self.refs) + 2) - 1
        if not 0 <= block < len(self.refs) or not self.refs[block]:
            self.refused(self.pool.free, block)
            return
        self.pool.free([block])
        self.refs[block] -= 1
        if self.refs[block]:
            return
        step = self.begun + (block in self.kept)
        if step > self.ended:
            self.deferred.append((step, block))
            self.waiting[block] = step
        else:
            self.settle(block)

    def refused(self, operation, block: BlockId) -> None:
        with pytest.raises(UsageError, match=f"block {block} "):
            operation([block])

    def keep_for_step(self, which: int, much: int) -> None:  # noqa: ARG002
        held = [block for block, count in enumerate(self.refs) if count]
        if held:
            block = held[which % len(held)]
            self.pool.keep_for_step(block)
            self.kept.add(block)

    def begin_step(self, which: int, much: int) -> None:  # noqa: ARG002
        self.pool.begin_step()
        self.begun += 1
        self.kept.clear()

    def end_step(self, which: int, much: int) -> None:  # noqa: ARG002
        if self.begun == self.ended:
            with pytest.raises(UsageError):
                self.pool.end_step()
            return
        self.pool.end_step()
        self.ended += 1
        due = [block for step, block in self.deferred if step == self.ended]
        self.deferred = [(step, block) for step, block in self.deferred if step > self.ended]
        for block in due:
            if self.waiting.get(block) == self.ended:
                del self.waiting[block]
                self.settle(block)

    def cache(self, which: int, much: int) -> None:
        """Index a used block after the longest known prefix of a chain."""
        group, most = much % self.num_groups, much // 2 % 4
        known = self.known()
        held = [block for block, count in enumerate(self.refs) if count and block not in known]
        chain = self.chains[which % len(self.chains)]
        before = self.longest(chain, most, group)
        index = len(before)
        if index == 3:
            return
        if not held:
            self.allocate(0, 1)
            return
        block = held[which // len(self.chains) % len(held)]
        parent = self.pool.serial(before[-1]) if before else 0
        key = (self.key(chain.digests[index]), group)
        prefix = (chain.namespace, bytes(chain.data[: (index + 1) * 4 * self.BLOCK_SIZE]))
        entry = self.index.get(key)
        used = self.pool.cache(block, chain, index, parent, group)
        if entry is not None and (entry[1], entry[3]) == (prefix, parent):
            assert used == entry[0]
            return
        assert used == block
        if entry is not None:
            self.forget(key)
        self.index[key] = (block, prefix, self.pool.serial(block), parent)
        assert self.pool.serial(block) not in [0, parent]

    def match(self, which: int, much: int) -> None:
        group, most = much % self.num_groups, much // 2 % 4
        chain = self.chains[which % len(self.chains)]
        assert self.pool.match(chain, most, group) == self.longest(chain, most, group)

    def reset(self, which: int, much: int) -> None:  # noqa: ARG002
        if which % 8 == 0:
            self.pool.reset()
            for key in [*self.index]:
                self.forget(key)

    @invariant()
    def agree(self) -> None:
        type(self).num_rules += 1
        pool = self.pool
        pool.check()
        assert [pool.refcount(block) for block in range(len(self.refs))] == self.refs
        assert (pool.num_free, pool.num_cached, pool.num_deferred, pool.num_used) == (
            len(self.free_blocks),
            len(self.idle),
            len(self.waiting),
            sum(count > 0 for count in self.refs),
        )
        assert pool.num_steps_in_flight == self.begun - self.ended
        assert {block for block, _ in pool.known_blocks()} == set(self.known())
        for block, (_, group) in self.known().items():
            assert (block, group) in pool.known_blocks()


def test_pool_agrees_with_its_model():
    run_machine(PoolMachine, settings=SETTINGS)
    assert PoolMachine.num_rules >= MIN_STEPS


PREFIXES = ([1, 1, 1, 1, 2, 1, 2, 2, 1], [1, 1, 2, 1, 1, 1, 1, 1, 1], [1] * 9)


class Sequence:
    """A sequence, the expected contents of its slots, and the step that computes it."""

    def __init__(self, tokens: list[int], namespace: bytes, blocks: SequenceBlocks) -> None:
        self.tokens, self.namespace, self.blocks = tokens, namespace, blocks
        self.num_computed = 0
        self.step = 0  # the last step that computes it

    def values(self) -> list[int]:
        """Return the expected contents of every computed slot."""
        values, value = [], zlib.crc32(self.namespace)
        for token in self.tokens[: self.num_computed]:
            value = slot_value(value, token)
            values.append(value)
        return values


class ManagerMachine(RuleBasedStateMachine):
    """The model executes each step on a memory of its own, and knows what every sequence must see there.

    Rules between two `begin_step` schedule a step; what they want copied and written is done when it begins,
    in the order that a step has: out to the host, in from there, block to block, then new slots.
    """

    num_rules = 0

    @initialize(
        size=st.integers(1, 2),
        num_blocks=st.integers(3, 8),
        num_host_blocks=st.integers(0, 8),
        windows=st.sampled_from([(None,), (None,), (3,), (None, 2), (5, None, 1)]),
        chunk=st.integers(1, 9),
        weak=st.booleans(),
        caching=st.integers(0, 4),
    )
    def begin(self, size, num_blocks, num_host_blocks, windows, chunk, weak, caching) -> None:
        self.block_size, self.windows, self.chunk = 2**size, windows, chunk
        self.manager = BlockManager(
            num_blocks * len(windows),
            self.block_size,
            windows=windows,
            max_step_tokens=chunk,
            num_host_blocks=num_host_blocks,
            enable_prefix_caching=caching > 0,
            hash_block=weak_hash if weak else sha256_block,
        )
        self.memory = [[0] * self.block_size for _ in range(num_blocks * len(windows))]
        self.host = [[0] * self.block_size for _ in range(num_host_blocks)]
        self.live: list[Sequence] = []
        self.pins: dict[str, int] = {}
        self.num_steps = self.num_ended = 0  # begun and ended
        self.readers: list[set[BlockId]] = []  # the blocks that each step in flight may read
        self.clear_step()

    def clear_step(self) -> None:
        self.out: list[Copy] = []
        self.back: list[Copy] = []
        self.copies: list[Copy] = []
        self.writes: list[tuple[BlockId, int, int]] = []  # block, place in it, value

    @property
    def is_scheduling(self) -> bool:
        return bool(self.writes or self.out or self.back)

    def choose(self, which: int, swapped: bool = False) -> Sequence | None:
        """Return a sequence that no step computes, on the device or on the host."""
        candidates = [
            s for s in self.live if s.step <= self.num_ended and (s.blocks.host is not None) == swapped
        ]
        return candidates[which % len(candidates)] if candidates else None

    # Rules

    RULES = """
        start start advance advance advance fork release swap_out swap_out swap_in swap_in swap_in pin reset
        begin_step begin_step end_step end_step
    """

    @rule(name=st.sampled_from(RULES.split()), which=ANY, much=ANY)
    def act(self, name: str, which: int, much: int) -> None:
        getattr(self, name)(which, much)

    def start(self, which: int, much: int) -> None:
        """Start a prompt that shares a beginning with others, and allocate blocks for its first tokens."""
        tokens = PREFIXES[which % 3][: much % 10]
        tokens += [1 + (much >> i & 1) for i in range(max(which // 3 % 4, not tokens))]
        namespace = b"salt" if which // 12 % 4 == 0 else b""
        seq = Sequence(tokens, namespace, self.manager.open(tokens, namespace))
        hits = self.manager.match(seq.blocks, tokens)
        num_hits = len(hits[0])
        assert num_hits <= (len(tokens) - 1) // self.block_size, "the last token is computed, always"
        assert {len(blocks) for blocks in hits} == {num_hits}
        assert self.manager.num_matched(seq.blocks, tokens) == num_hits * self.block_size
        end = min(len(tokens), num_hits * self.block_size + self.chunk)
        available = self.manager.pool.num_available
        if self.manager.blocks_to_start(hits, end) > available or len(self.live) == 5:
            return
        seq.num_computed = self.manager.start(seq.blocks, hits)
        assert seq.num_computed == num_hits * self.block_size
        self.live.append(seq)
        self.compute(seq, end)
        assert seq.num_computed == end, "blocks_to_start promised room"

    def advance(self, which: int, much: int) -> None:
        """Compute one or more of the missing tokens of a sequence."""
        seq = self.choose(which)
        if seq is None:
            return
        if seq.num_computed == len(seq.tokens):
            seq.tokens.append(1 + much % 2)
        self.compute(seq, min(len(seq.tokens), seq.num_computed + 1 + much % self.chunk))

    def compute(self, seq: Sequence, end: int) -> None:
        manager, blocks, start = self.manager, seq.blocks, seq.num_computed
        before = [table[:] for table in blocks.tables]
        promised = manager.missing_blocks(blocks, end) <= manager.pool.num_available
        # A block that leaves the window counts as available, but is deferred while a step in flight reads it.
        promised &= not self.readers or self.windows == (None,)
        taken = manager.blocks_taken(blocks, end)
        num_free, num_copies = manager.pool.num_available, len(self.copies)
        if not manager.grow(blocks, start, end, self.copies):
            assert not promised, "missing_blocks promised room"
            assert taken > num_free, "blocks_taken promised room"
            assert len(self.copies) == num_copies
            assert manager.pool.num_available >= num_free
            return
        assert num_free - manager.pool.num_available <= taken, "more blocks were taken"
        fresh = {
            table[place]
            for table, old, dropped in zip(blocks.tables, before, blocks.num_dropped, strict=True)
            for place in range(dropped, len(table))
            if place >= len(old) or table[place] != old[place]
        }
        self.not_in_use(fresh)
        for source, target in self.copies[num_copies:]:
            assert start % self.block_size, "only a block that is partly filled is copied"
            assert source in {table[start // self.block_size] for table in before}
            assert target in fresh
        assert blocks.num_blocks <= manager.most_blocks(end), "what a window lets go must go back"
        values = seq.values()
        value = values[-1] if values else zlib.crc32(seq.namespace)
        for position in range(start, end):
            value = slot_value(value, seq.tokens[position])
            for table in blocks.tables:
                block = table[position // self.block_size]
                assert manager.pool.refcount(block) == 1, "others hold what is written"
                self.writes.append((block, position % self.block_size, value))
        if end - start > 1 or end % 3 == 0:  # now, or some blocks later as decodes do
            manager.register(blocks, seq.tokens, end)
        seq.num_computed, seq.step = end, self.num_steps + 1

    def not_in_use(self, blocks: set[BlockId]) -> None:
        """Assert that no step in flight reads an allocated block, nor this one before it is written."""
        assert not blocks & set().union(*self.readers), "a block is reused before its step ends"
        assert not blocks & {source for source, _ in self.copies}, "a block is reused before it is copied"

    def fork(self, which: int, much: int) -> None:  # noqa: ARG002
        """Fork a sequence, also one that this step computes, as the n samples of a prompt do."""
        candidates = [
            s for s in self.live if s.blocks.host is None and not self.num_ended < s.step <= self.num_steps
        ]
        if not candidates or len(self.live) == 5:
            return
        seq = candidates[which % len(candidates)]
        child = Sequence(seq.tokens.copy(), seq.namespace, self.manager.fork(seq.blocks, seq.num_computed))
        child.num_computed, child.step = seq.num_computed, seq.step
        self.live.append(child)

    def release(self, which: int, much: int) -> None:
        candidates = [s for s in self.live if s.step <= self.num_steps]
        # Prefer one whose block is about to be copied.
        sources = {source for source, _ in self.copies}
        candidates = [s for s in candidates if sources & {*s.blocks.live(0)}] or candidates
        if candidates:
            seq = candidates[which % len(candidates)]
            self.live.remove(seq)
            if much % 2 and not self.is_scheduling:
                self.manager.register(seq.blocks, seq.tokens, seq.num_computed)
            self.manager.release(seq.blocks)
            assert not seq.blocks.num_blocks
            self.manager.release(seq.blocks)  # nothing is left to free

    def swap_out(self, which: int, much: int) -> None:  # noqa: ARG002
        seq, host_pool = self.choose(which), self.manager.host_pool
        if seq is None:
            return
        num_free, num_pairs = host_pool.num_available, len(self.out)
        held = seq.blocks.num_blocks
        if not self.manager.swap_out(seq.blocks, seq.num_computed, self.out):
            assert num_free < held
            assert len(self.out) == num_pairs
            return
        assert not seq.blocks.num_blocks
        pairs = self.out[num_pairs:]
        assert len(pairs) == num_free - host_pool.num_available <= held
        # A host block that this step or one in flight still reads is not overwritten.
        assert not {b for _, b in pairs} & {a for a, _ in self.back}

    def swap_in(self, which: int, much: int) -> None:  # noqa: ARG002
        seq, num_pairs = self.choose(which, swapped=True), len(self.back)
        if seq is None:
            return
        num_host = sum(len(blocks) for _, blocks in seq.blocks.host)
        if not self.manager.swap_in(seq.blocks, seq.num_computed, self.back):
            assert self.manager.pool.num_available < num_host
            assert len(self.back) == num_pairs
            return
        self.not_in_use({block for _, block in self.back[num_pairs:]})
        assert len(self.back) - num_pairs <= num_host
        seq.step = self.num_steps + 1

    def pin(self, which: int, much: int) -> None:
        if self.is_scheduling:
            return
        name, tokens = "ab"[which % 2], PREFIXES[which // 2 % 3][: much % 10]
        if name in self.pins:
            self.manager.unpin(name)
            del self.pins[name]
            return
        pinned = self.pins[name] = self.manager.pin(name, tokens)
        assert pinned <= len(tokens)
        assert pinned % self.block_size == 0

    def reset(self, which: int, much: int) -> None:  # noqa: ARG002
        if not self.is_scheduling and which % 8 == 0:
            self.manager.reset_prefix_cache()
            self.pins.clear()
            assert not self.manager.num_pinned
            assert not self.manager.pool.known_blocks()

    def begin_step(self, which: int, much: int) -> None:
        if not self.is_scheduling:
            self.advance(which, much)
            return
        self.manager.begin_step()
        self.num_steps += 1
        for pairs, source, target in (
            (self.out, self.memory, self.host),
            (self.back, self.host, self.memory),
            (self.copies, self.memory, self.memory),
        ):
            for a, b in pairs:
                target[b] = source[a].copy()
        for block, place, value in self.writes:
            self.memory[block][place] = value
        self.clear_step()
        blocks = [seq.blocks for seq in self.live]
        self.readers.append({b for s in blocks for group in range(len(self.windows)) for b in s.live(group)})

    def end_step(self, which: int, much: int) -> None:
        if not self.readers:
            self.advance(which, much)
            return
        self.manager.end_step()
        self.readers.pop(0)
        self.num_ended += 1

    @invariant()
    def agree(self) -> None:
        type(self).num_rules += 1
        self.manager.check()
        if self.is_scheduling:
            return
        for seq in self.live:
            values = seq.values()
            if seq.blocks.host is None:
                memory, tables = self.memory, seq.blocks.tables
            else:
                memory = self.host
                tables = [array("i", [-1] * dropped) + blocks for dropped, blocks in seq.blocks.host]
            for window, table in zip(self.windows, tables, strict=True):
                # The slots that the next token attends to, besides its own.
                first = 0 if window is None else max(0, len(values) - window + 1)
                seen = [
                    memory[table[p // self.block_size]][p % self.block_size]
                    for p in range(first, len(values))
                ]
                assert seen == values[first:], "a slot holds something else"

    def teardown(self) -> None:
        """Release everything, and assert that nothing is left."""
        if not hasattr(self, "manager"):
            return
        for seq in self.live:
            self.manager.release(seq.blocks)
        for name in self.pins:
            self.manager.unpin(name)
        self.manager.begin_step()
        while self.manager.pool.num_steps_in_flight:
            self.manager.end_step()
        self.manager.check()
        assert not self.manager.pool.num_used + self.manager.pool.num_deferred
        assert self.manager.host_pool.num_free == self.manager.host_pool.num_blocks


def test_manager_agrees_with_its_model():
    run_machine(ManagerMachine, settings=SETTINGS)
    assert ManagerMachine.num_rules >= MIN_STEPS
