"""BlockManager in small cases: prefix hits, copy-on-write, windows, groups, swapping, pins."""

from __future__ import annotations

import itertools
import timeit
import tracemalloc

import pytest

from paged.base.errors import UsageError
from paged.blocks.manager import REGISTER_EVERY, BlockManager, Copy
from paged.blocks.sequence import NEVER, SequenceBlocks


def same_hash(parent: bytes, tokens: bytes) -> bytes:  # noqa: ARG001
    """Hash everything to the same digest."""
    return bytes(32)


def started(
    manager: BlockManager, tokens: list[int], num_computed: int | None = None, namespace: bytes = b""
) -> SequenceBlocks:
    """Return a sequence whose prompt, or its first tokens, are computed."""
    seq = manager.open(tokens, namespace)
    start = manager.start(seq, manager.match(seq, tokens))
    assert computed(manager, seq, tokens, start, len(tokens) if num_computed is None else num_computed) == []
    return seq


def computed(
    manager: BlockManager, seq: SequenceBlocks, tokens: list[int], start: int, end: int
) -> list[Copy]:
    """Compute the tokens [start, end) as a step does. Return its copies."""
    copies: list[Copy] = []
    assert manager.grow(seq, start, end, copies)
    if manager.enable_prefix_caching:
        manager.register(seq, tokens, end)
    manager.check()
    return copies


def num_hits(manager: BlockManager, tokens: list[int], namespace: bytes = b"") -> int:
    """Return how many tokens of a new prompt the cache holds."""
    return manager.num_matched(manager.open(tokens, namespace), tokens)


@pytest.mark.parametrize(("num_tokens", "blocks"), [(0, 0), (1, 1), (8, 1), (9, 2), (16, 2), (17, 3)])
def test_blocks_for(num_tokens, blocks):
    assert BlockManager(4, 8).blocks_for(num_tokens) == blocks


def test_table_keeps_its_blocks_as_it_grows_and_a_refused_growth_changes_nothing():
    manager = BlockManager(3, 8)
    a, b = started(manager, [1] * 9), started(manager, [2])
    before = list(a.tables[0])
    assert manager.grow(a, 9, 16, [])
    assert list(a.tables[0]) == before
    assert a.capacity == 16
    assert not manager.grow(a, 16, 17, [])
    assert (list(a.tables[0]), a.capacity, manager.pool.num_available) == (before, 16, 0)
    manager.check()
    manager.release(b)
    manager.release(b)  # nothing is left to free
    assert manager.grow(a, 16, 17, [])
    assert list(a.tables[0])[:2] == before
    manager.check()


def test_check_finds_a_block_in_no_table():
    manager = BlockManager(4, 8)
    seq = started(manager, [1] * 20)
    manager.pool.share([seq.tables[0][0]])
    with pytest.raises(AssertionError, match="2 references, 1 holders"):
        manager.check()


def test_most_that_fits_is_what_the_pool_holds_beside_the_pins():
    manager = BlockManager(3, 4)
    assert [manager.fits(n) for n in (0, 12, 13)] == [True, True, False]
    assert (manager.longest_fit(100), manager.longest_fit(5)) == (12, 5)
    manager.release(started(manager, [1] * 4))
    assert manager.pin("system", [1] * 4) == 4
    assert manager.longest_fit(100) == 8


# Prefix hits


def test_second_prompt_shares_full_blocks_but_never_that_of_its_last_token():
    manager, tokens = BlockManager(8, 4), [1, 2, 3, 4, 5, 6, 7, 8, 9]
    first = started(manager, tokens)
    assert [num_hits(manager, tokens[:n]) for n in (4, 5, 8, 9)] == [0, 4, 4, 8]
    second = started(manager, tokens[:8])
    assert first.tables[0][:1] == second.tables[0][:1]
    assert not {*first.tables[0][1:]} & {*second.tables[0][1:]}
    assert manager.pool.refcount(first.tables[0][0]) == 2


def test_block_is_known_as_soon_as_it_is_full_and_not_before():
    manager, tokens = BlockManager(8, 4), [1, 2, 3, 4, 5, 6, 7, 8, 9]
    seq = started(manager, tokens, 3)
    assert num_hits(manager, tokens) == 0
    assert seq.register_at == 4 * REGISTER_EVERY
    computed(manager, seq, tokens, 3, 7)
    assert (num_hits(manager, tokens), seq.register_at) == (4, 4 + 4 * REGISTER_EVERY)
    computed(manager, seq, tokens, 7, 8)
    assert (num_hits(manager, tokens), seq.register_at) == (8, 8 + 4 * REGISTER_EVERY)


def test_blocks_of_a_released_sequence_are_hit_until_they_are_needed_ends_first():
    manager, tokens = BlockManager(4, 4), [*range(16)]
    seq = started(manager, tokens)
    table = list(seq.tables[0])
    manager.release(seq)
    assert manager.pool.num_available == 4
    (last,) = manager.pool.allocate(1)
    assert last == table[3]
    assert num_hits(manager, [*tokens, 0]) == 12
    manager.pool.free([last])


@pytest.mark.parametrize("namespace", [b"", b"pepper"], ids=["none", "another"])
def test_salts_keep_caches_apart(namespace):
    manager, tokens = BlockManager(8, 4), [1] * 9
    started(manager, tokens, namespace=b"salt")
    assert num_hits(manager, tokens, b"salt") == 8
    assert num_hits(manager, tokens, namespace) == 0


def test_colliding_digests_never_share():
    manager = BlockManager(12, 4, hash_block=same_hash)
    a, b = started(manager, [1] * 9), started(manager, [2] * 9)
    assert not {*a.tables[0]} & {*b.tables[0]}
    assert num_hits(manager, [2] * 5) == num_hits(manager, [1] * 5) == 0  # each evicted the one before


def test_nothing_is_known_without_a_prefix_cache():
    manager = BlockManager(8, 4, enable_prefix_caching=False)
    seq = started(manager, [1] * 9)
    assert seq.register_at == NEVER
    manager.release(seq)
    assert num_hits(manager, [1] * 9) == 0
    assert (manager.pool.num_free, manager.pool.num_cached) == (8, 0)


def test_same_prompt_twice_in_a_step_is_registered_once():
    manager, tokens = BlockManager(8, 4), [1] * 9
    seqs = [manager.open(tokens) for _ in range(2)]
    hits = [manager.match(seq, tokens) for seq in seqs]  # before either is cached
    for seq, hit in zip(seqs, hits, strict=True):
        manager.start(seq, hit)
    for seq in seqs:
        computed(manager, seq, tokens, 0, 9)
    assert manager.pool.num_used == 6
    for seq in seqs:
        manager.release(seq)
    assert (manager.pool.num_free, manager.pool.num_cached) == (6, 2)
    assert num_hits(manager, tokens) == 8


def test_nothing_is_registered_behind_a_predecessor_that_is_gone():
    manager, tokens = BlockManager(8, 4), [1] * 13
    seq = started(manager, tokens, 5)
    manager.reset_prefix_cache()
    computed(manager, seq, tokens, 5, 13)
    assert seq.register_at == NEVER
    assert not manager.pool.known_blocks()


def test_reset_forgets_prefixes_and_pins_and_leaves_what_runs():
    manager, tokens = BlockManager(8, 4), [1] * 9
    seq = started(manager, tokens)
    manager.pin("system", tokens)
    manager.reset_prefix_cache()
    assert (num_hits(manager, tokens), manager.num_pinned) == (0, 0)
    assert manager.pool.num_used == seq.num_blocks == 3
    manager.release(seq)
    assert manager.pool.num_free == 8
    manager.check()


# Copy-on-write


@pytest.mark.parametrize("num_samples", [1, 2, 4])
def test_all_but_one_copy_the_block_that_is_partly_filled(num_samples):
    manager, tokens = BlockManager(12, 4), [1] * 6
    leader = started(manager, tokens)
    first, partial = leader.tables[0]
    seqs = [leader, *(manager.fork(leader, 6) for _ in range(num_samples - 1))]
    manager.check()
    assert manager.pool.num_used == 2
    copies = [computed(manager, seq, [*tokens, i], 6, 7) for i, seq in enumerate(seqs)]
    assert [len(c) for c in copies] == [1] * (num_samples - 1) + [0]
    assert {source for source, _ in itertools.chain(*copies)} <= {partial}
    tables = [seq.tables[0] for seq in seqs]
    assert {table[0] for table in tables} == {first}
    assert len({table[1] for table in tables}) == num_samples
    for seq in seqs:
        manager.release(seq)
    assert manager.pool.num_used == 0


def test_full_blocks_are_never_copied():
    manager, tokens = BlockManager(12, 4), [1] * 8
    leader = started(manager, tokens)
    child = manager.fork(leader, 8)
    assert computed(manager, leader, [*tokens, 1], 8, 9) == computed(manager, child, [*tokens, 2], 8, 9) == []
    assert leader.tables[0][:2] == child.tables[0][:2]
    assert leader.tables[0][2] != child.tables[0][2]


def test_copy_that_has_no_room_changes_nothing_and_the_source_waits_for_the_step():
    manager, tokens = BlockManager(3, 4), [1] * 6
    leader = started(manager, tokens)
    child = manager.fork(leader, 6)
    table = list(child.tables[0])
    (taken,) = manager.pool.allocate(1)
    copies: list[Copy] = []
    assert not manager.grow(child, 6, 7, copies)
    assert (copies, list(child.tables[0])) == ([], table)
    manager.pool.free([taken])
    assert manager.grow(child, 6, 7, copies)
    assert copies == [(table[1], taken)]
    # The source has no references any more, but must not be reused before it is copied.
    manager.release(leader)
    assert manager.pool.num_available == 0
    manager.begin_step()
    manager.end_step()
    assert manager.pool.num_available == 1


def test_blocks_it_takes_to_go_on():
    manager, tokens = BlockManager(12, 4), [1] * 6
    seq = started(manager, tokens)
    assert [manager.missing_blocks(seq, n) for n in (6, 8, 9, 17)] == [0, 0, 1, 3]
    child = manager.fork(seq, 6)
    assert [manager.missing_blocks(s, 7) for s in (seq, child)] == [1, 1]  # either may need a copy
    hits = manager.match(manager.open(tokens), tokens)
    assert manager.blocks_to_start(hits, 7) == 1  # another sequence holds the first block
    manager.release(seq)
    manager.release(child)
    assert manager.blocks_to_start(hits, 7) == 2  # now it is an available block


# Windows and groups


def test_window_gives_back_what_it_passed_and_memory_stays_bounded():
    manager = BlockManager(40, 4, windows=[6], max_step_tokens=3)
    tokens = [i % 7 for i in range(120)]
    seq = started(manager, tokens, 3)
    for start in range(3, 120, 3):
        computed(manager, seq, tokens, start, start + 3)
        # The token at `start` sees itself and five more: the first of them is start - 5.
        wanted = range(max(0, start - 5) // 4, -(-(start + 3) // 4))
        assert seq.num_blocks <= len(wanted) + 1  # checked once per block
        assert seq.num_blocks <= manager.most_blocks(120) == 3
    assert manager.pool.num_used == seq.num_blocks
    manager.release(seq)
    assert manager.pool.num_used == 0


def test_window_drops_exactly_what_no_later_token_sees():
    manager, tokens = BlockManager(10, 4, windows=[5], max_step_tokens=8), [1] * 17
    seq = started(manager, tokens, 8)
    computed(manager, seq, tokens, 8, 12)
    assert seq.num_dropped == [1]  # the token at 8 attends to 4 to 8
    computed(manager, seq, tokens, 12, 13)
    assert seq.num_dropped == [2]  # the one at 12 to 8 to 12


def test_hit_in_a_window_holds_only_what_is_seen():
    manager, tokens = BlockManager(10, 4, windows=[5], max_step_tokens=16), [*range(17)]
    first = started(manager, tokens)
    blocks = list(first.tables[0])
    second = started(manager, tokens)
    assert second.num_dropped == [3]  # the token at 16 attends to 12 to 16
    assert second.live(0)[0] == blocks[3]
    assert [manager.pool.refcount(block) for block in blocks[:4]] == [1, 1, 1, 2]


def test_groups_have_tables_of_their_own_and_hit_what_all_of_them_know():
    manager, tokens = BlockManager(20, 4, windows=[None, 5], max_step_tokens=16), [*range(17)]
    seq = started(manager, tokens, 16)
    full, window = map(list, seq.tables)
    assert not set(full) & set(window)
    assert num_hits(manager, tokens) == 16
    computed(manager, seq, tokens, 16, 17)
    assert (len(seq.live(0)), len(seq.live(1))) == (5, 2)
    assert manager.pool.num_used == 7
    # The window dropped three blocks and the last was evicted first: the group keeps the first two.
    manager.pool.allocate(manager.pool.num_free + 1)
    hits = manager.match(manager.open(tokens), tokens)
    assert hits == [full[:2], window[:2]]
    assert manager.most_blocks(100) == 25 + 6


# Swapping


def test_sequence_swapped_out_and_in_again_keeps_its_content():
    manager, tokens = BlockManager(3, 4, num_host_blocks=3, enable_prefix_caching=False), [1] * 10
    seq = started(manager, tokens)
    device, out, back = list(seq.tables[0]), list[Copy](), list[Copy]()
    assert manager.swap_out(seq, 10, out)
    manager.check()
    host = list(seq.host[0][1])
    assert out == list(zip(device, host, strict=True))
    assert (seq.num_blocks, manager.pool.num_free, manager.host_pool.num_free) == (0, 3, 0)
    manager.pool.allocate(1)
    assert not manager.swap_in(seq, 10, back)
    assert (back, seq.num_blocks) == ([], 0)
    manager.pool.free([block for block in range(3) if manager.pool.refcount(block)])
    assert manager.swap_in(seq, 10, back)
    assert back == list(zip(host, seq.tables[0], strict=True))
    assert (seq.host, seq.capacity) == (None, 12)
    manager.check()
    # This step reads the host blocks.
    assert manager.host_pool.num_available == 0
    manager.begin_step()
    manager.end_step()
    assert manager.host_pool.num_free == 3


def test_full_host_memory_refuses_and_changes_nothing():
    manager, tokens = BlockManager(4, 4, num_host_blocks=2), [1] * 10
    seq, pairs = started(manager, tokens), list[Copy]()
    table = list(seq.tables[0])
    assert not manager.swap_out(seq, 10, pairs)
    assert (pairs, list(seq.tables[0]), manager.host_pool.num_free) == ([], table, 2)
    manager.check()


def test_what_the_cache_still_holds_is_not_copied_back():
    manager, tokens = BlockManager(3, 4, num_host_blocks=3), [*range(10)]
    seq, out, back = started(manager, tokens), list[Copy](), list[Copy]()
    first, second, third = seq.tables[0]
    manager.swap_out(seq, 10, out)
    assert manager.pool.num_cached == 2
    assert list(manager.pool.allocate(2)) == [third, second]
    manager.pool.free([second])
    # Two blocks are available, but one of them is a hit, and two more are needed.
    assert not manager.swap_in(seq, 10, back)
    manager.pool.free([third])
    assert manager.swap_in(seq, 10, back)
    assert seq.tables[0][0] == first
    assert back == [(host, block) for (_, host), block in zip(out[1:], seq.tables[0][1:], strict=True)]
    manager.check()


def test_only_what_a_window_sees_is_swapped():
    manager = BlockManager(10, 4, windows=[5], max_step_tokens=16, num_host_blocks=9)
    tokens, out, back = [*range(15)], list[Copy](), list[Copy]()
    seq = started(manager, tokens)
    table = list(seq.tables[0])
    assert manager.swap_out(seq, 15, out)
    assert [block for block, _ in out] == table[2:]  # the token at 15 attends to 11 to 15
    assert manager.swap_in(seq, 15, back)
    assert (seq.num_dropped, len(seq.tables[0]), len(back)) == ([2], 4, 2)
    manager.check()


def test_release_gives_back_host_blocks():
    manager, tokens = BlockManager(4, 4, num_host_blocks=3), [1] * 10
    seq = started(manager, tokens)
    manager.swap_out(seq, 10, [])
    manager.release(seq)
    assert (seq.host, manager.host_pool.num_free) == (None, 3)
    manager.check()


def test_host_block_takes_what_counting_it_takes():
    """Host blocks store no token ids, which would take 64 bytes for 16."""
    tracemalloc.start()
    manager = BlockManager(1, 16, num_host_blocks=10_000)
    current, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert manager.host_pool.num_free == 10_000
    assert current < 50 * 10_000


# Pins and steps in flight


def test_pinned_prefix_survives_whatever_else_is_needed():
    manager, tokens = BlockManager(4, 4), [*range(9)]
    manager.release(started(manager, tokens))
    assert manager.pin("system", tokens) == 8
    assert manager.num_pinned == 2
    manager.check()
    assert manager.pool.allocate(3) is None
    manager.pool.free(manager.pool.allocate(2))
    assert num_hits(manager, tokens) == 8
    manager.unpin("system")
    assert manager.pool.num_available == 4
    assert manager.pool.allocate(4) is not None
    assert num_hits(manager, tokens) == 0


def test_pin_holds_only_what_is_cached_and_unpinned_ends_go_first():
    manager, tokens = BlockManager(4, 4), [*range(12)]
    seq = started(manager, tokens[:8])
    first, second = seq.tables[0]
    manager.release(seq)
    assert manager.pin("system", tokens) == 8
    manager.unpin("system")
    assert second in manager.pool.allocate(3)
    assert manager.match(manager.open(tokens), tokens) == [[first]]


def test_block_of_several_pins_counts_once_and_until_the_last_of_them_goes():
    manager, tokens = BlockManager(8, 4), [*range(12)]
    manager.release(started(manager, tokens))
    for name, num_tokens, num_pinned in [("long", 12, 3), ("short", 4, 3), ("same", 8, 3)]:
        manager.pin(name, tokens[:num_tokens])
        manager.check()
        assert manager.num_pinned == num_pinned
    for name, num_pinned in [("long", 2), ("same", 1), ("short", 0)]:
        manager.unpin(name)
        manager.check()
        assert manager.num_pinned == num_pinned


def test_counting_what_is_pinned_costs_the_same_however_much_it_is():
    # Admission asks often.
    manager, tokens = BlockManager(10_000, 1), [*range(10_000)]
    manager.release(started(manager, tokens))
    manager.pin("one", tokens[:1])
    one = min(timeit.repeat(lambda: manager.num_pinned, number=20, repeat=100))
    manager.pin("all", tokens)
    assert manager.num_pinned == 10_000
    assert min(timeit.repeat(lambda: manager.num_pinned, number=20, repeat=100)) < 50 * one


def test_misuse_of_pins_names_them():
    manager = BlockManager(4, 4)
    manager.pin("a", [])
    with pytest.raises(UsageError, match="'a' is pinned already"):
        manager.pin("a", [1])
    with pytest.raises(UsageError, match="'b' is not pinned; 'a' is"):
        manager.unpin("b")
    manager.unpin("a")
    with pytest.raises(UsageError, match="'a' is not pinned; nothing is"):
        manager.unpin("a")


def test_blocks_released_during_a_step_wait_for_its_end():
    manager = BlockManager(4, 4, num_host_blocks=2)
    seq = started(manager, [1] * 5)
    other = started(manager, [2] * 5)
    manager.swap_out(other, 5, [])
    manager.begin_step()
    manager.release(seq)
    manager.release(other)
    assert (manager.pool.num_deferred, manager.host_pool.num_deferred) == (2, 2)
    assert manager.pool.allocate(3) is None
    manager.end_step()
    assert (manager.pool.num_available, manager.host_pool.num_free) == (4, 2)
    manager.check()


# K and V of a draft model


def test_a_sequence_knows_how_many_of_its_tokens_a_draft_model_has_computed():
    manager, tokens = BlockManager(6, 4, num_host_blocks=6), [*range(14)]
    seq = started(manager, tokens, 13)
    manager.record_drafted(seq, 9, 2)  # and two guesses
    assert seq.num_drafted == 11
    manager.truncate(seq, 10)
    assert (seq.num_drafted, manager.fork(seq, 9).num_drafted) == (10, 10)
    assert manager.pool.drafted == {*seq.tables[0][:2]}  # full of tokens that are no guesses
    manager.check()


def test_cached_blocks_carry_what_a_draft_model_has_computed_until_they_are_used_again():
    manager, tokens = BlockManager(6, 4, num_host_blocks=6), [*range(14)]
    seq, out, back = started(manager, tokens, 13), list[Copy](), list[Copy]()
    manager.record_drafted(seq, 13)
    assert manager.swap_out(seq, 13, out)
    other = started(manager, tokens)
    assert other.num_drafted == 12
    manager.release(other)
    # The last cached block is evicted, and the next sequence computes it without the draft model.
    taken = manager.pool.allocate(4)
    manager.pool.free(taken)
    other = started(manager, tokens)
    last = started(manager, tokens)
    assert (other.num_drafted, last.num_drafted) == (8, 8)
    manager.release(last)
    assert manager.swap_in(seq, 13, back)
    assert len(back) == 1
    assert seq.num_drafted == 8
    manager.release(seq)
    assert seq.num_drafted == 0
    manager.check()


def test_swapping_keeps_what_a_draft_model_has_computed():
    manager, tokens = BlockManager(4, 4, num_host_blocks=4, enable_prefix_caching=False), [*range(14)]
    seq = started(manager, tokens, 13)
    manager.record_drafted(seq, 13)
    assert manager.swap_out(seq, 13, [])
    assert manager.swap_in(seq, 13, [])
    assert seq.num_drafted == 13
    assert not manager.pool.drafted


@pytest.mark.parametrize(("windows", "widest"), [([None], 0), ([8, None, 4], 1), ([4, 8], 1)])
def test_a_draft_model_takes_the_blocks_of_the_widest_window(windows, widest):
    assert BlockManager(4, 4, windows=windows).widest == widest
