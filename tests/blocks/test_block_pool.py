"""BlockPool in small cases: reference counts, free blocks, the prefix index, deferred blocks."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import pytest

from paged.base.errors import UsageError
from paged.blocks.pool import BlockPool, bytes_of_pool
from paged.blocks.prefix_chain import HashBlock, PrefixChain, sha256_block


def same_hash(parent: bytes, tokens: bytes) -> bytes:  # noqa: ARG001
    """Hash everything to the same digest."""
    return bytes(32)


def chain_of(
    tokens: Sequence[int], namespace: bytes = b"", hash_block: HashBlock = sha256_block
) -> PrefixChain:
    """Return a chain of blocks of two tokens."""
    chain = PrefixChain(namespace, hash_block)
    chain.extend(tokens, len(tokens) // 2, 2)
    return chain


def cached(pool: BlockPool, chain: PrefixChain, group: int = 0) -> list[int]:
    """Allocate blocks and cache a whole chain in them; they stay used."""
    blocks, parent = list(pool.allocate(len(chain.digests))), 0
    for index, block in enumerate(blocks):
        assert pool.cache(block, chain, index, parent, group) == block
        parent = pool.serial(block)
    pool.check()
    return blocks


def evicted(pool: BlockPool) -> list[int]:
    """Allocate all blocks one by one. Return them in order."""
    blocks = []
    while (block := pool.allocate(1)) is not None:
        blocks += block
        pool.check()
    return blocks


def test_allocation_is_all_or_nothing():
    pool = BlockPool(4)
    first = pool.allocate(3)
    assert len(set(first)) == 3
    assert pool.allocate(2) is None
    assert (pool.num_free, pool.num_used) == (1, 3)
    pool.check()
    assert {*first, *pool.allocate(1)} == {0, 1, 2, 3}
    assert len(pool.allocate(0)) == 0
    assert pool.allocate(1) is None


def test_block_is_free_when_its_last_reference_goes():
    pool = BlockPool(2)
    (block,) = pool.allocate(1)
    pool.share([block])
    assert pool.refcount(block) == 2
    pool.free([block])
    assert pool.num_free == 1
    pool.free([block])
    assert pool.num_free == 2
    pool.check()


def test_block_freed_last_is_handed_out_first():
    pool = BlockPool(8)
    a, b, c = pool.allocate(3)
    pool.free([a])
    pool.free([c])
    assert list(pool.allocate(2)) == [c, a]
    assert b not in pool.allocate(5)


@pytest.mark.parametrize("operation", ["free", "share"])
@pytest.mark.parametrize("block", [0, -1, 4, 10**9], ids=["free-already", "negative", "one-too-far", "far"])
def test_misuse_raises_and_names_the_block(operation, block):
    pool = BlockPool(4)
    pool.free(pool.allocate(4))
    with pytest.raises(UsageError, match=rf"block {block} "):
        getattr(pool, operation)([block])
    assert pool.num_free == 4
    pool.check()


def test_check_finds_a_lost_and_a_doubled_block():
    lost, doubled = BlockPool(2), BlockPool(2)
    lost._free.pop()
    doubled._free.append(doubled._free[0])
    for pool in (lost, doubled):
        with pytest.raises(AssertionError, match="block"):
            pool.check()


# The prefix cache


def test_longest_known_prefix_is_found_and_no_more_than_asked_for():
    pool = BlockPool(8, 2)
    blocks = cached(pool, chain_of([1, 2, 3, 4, 5, 6]))
    assert pool.match(chain_of([1, 2, 3, 4, 5, 6, 7, 8]), 4) == blocks
    assert pool.match(chain_of([1, 2, 3, 4, 5, 7]), 3) == blocks[:2]
    assert pool.match(chain_of([1, 2, 3, 4, 5, 6]), 1) == blocks[:1]
    assert pool.match(chain_of([3, 4, 5, 6]), 2) == []


def test_what_is_known_already_is_gone_on_from():
    pool, chain = BlockPool(8, 2), chain_of([1, 2, 3, 4])
    first, second = cached(pool, chain)
    (own,) = pool.allocate(1)
    assert pool.cache(own, chain, 1, pool.serial(first)) == second
    assert pool.serial(own) == 0
    pool.free([own])
    assert pool.num_free == 6


def test_least_recently_used_goes_first_and_the_end_of_a_prefix_before_its_beginning():
    pool = BlockPool(5, 2)
    a0, a1, a2 = cached(pool, chain_of([1, 1, 2, 2, 3, 3]))
    (b0,) = cached(pool, chain_of([9, 9]))
    (free,) = pool.allocate(1)
    pool.free([free])
    pool.free([b0])
    pool.free([a2, a1, a0])
    pool.share([b0])  # used again
    pool.free([b0])
    assert (pool.num_free, pool.num_cached, pool.num_available) == (1, 4, 5)
    assert evicted(pool) == [free, a2, a1, a0, b0]
    assert pool.match(chain_of([9, 9]), 1) == []
    assert not pool.known_blocks()


def test_many_are_allocated_as_one_by_one():
    pool = BlockPool(5, 2)
    a0, a1 = cached(pool, chain_of([1, 1, 2, 2]))
    pool.free([a1, a0])
    blocks = pool.allocate(4)
    assert blocks[3] == a1
    assert pool.match(chain_of([1, 1, 2, 2]), 2) == [a0]
    pool.check()


def test_collision_never_serves_anothers_block():
    pool = BlockPool(4, 2)
    one, other = chain_of([1, 2], hash_block=same_hash), chain_of([3, 4], hash_block=same_hash)
    assert one.digests == other.digests
    (first,) = cached(pool, one)
    assert pool.match(other, 1) == []
    (second,) = cached(pool, other)
    assert pool.match(other, 1) == [second]
    assert pool.match(one, 1) == []
    pool.free([first, second])
    assert (pool.num_free, pool.num_cached) == (3, 1)
    pool.check()


def test_same_tokens_behind_others_are_not_the_same():
    pool = BlockPool(8, 2)
    behind_one = chain_of([1, 1, 5, 5])
    (other,) = cached(pool, chain_of([2, 2]))
    _, block = cached(pool, behind_one)
    # A collision of all 56 bits: the digest of [1, 1, 5, 5] is looked up after [2, 2].
    colliding = chain_of([2, 2, 5, 5])
    colliding.digests[1] = behind_one.digests[1]
    assert pool.match(colliding, 2) == [other]
    assert pool.match(behind_one, 2)[1] == block


@pytest.mark.parametrize("hash_block", [sha256_block, same_hash])
def test_namespaces_share_nothing(hash_block):
    pool = BlockPool(4, 2)
    salted = chain_of([1, 2], b"salt", hash_block)
    (block,) = cached(pool, salted)
    assert pool.match(salted, 1) == [block]
    for namespace in (b"", b"pepper"):
        assert pool.match(chain_of([1, 2], namespace, hash_block), 1) == []
    (plain,) = cached(pool, chain_of([1, 2], b"", hash_block))
    assert plain != block
    assert pool.match(chain_of([1, 2], b"", hash_block), 1) == [plain]


def test_groups_share_nothing():
    pool, chain = BlockPool(4, 2, num_groups=2), chain_of([1, 2])
    (one,) = cached(pool, chain, group=1)
    assert (pool.match(chain, 1, 0), pool.match(chain, 1, 1)) == ([], [one])
    (zero,) = cached(pool, chain, group=0)
    assert (pool.match(chain, 1, 0), pool.match(chain, 1, 1)) == ([zero], [one])
    assert pool.known_blocks() == [(one, 1), (zero, 0)]


def test_what_lost_its_predecessor_is_never_hit_and_can_be_replaced():
    pool, chain = BlockPool(3, 2), chain_of([1, 1, 2, 2])
    first, second = cached(pool, chain)
    pool.free([first])
    pool.allocate(2)  # the free one, and the first of the prefix
    assert pool.match(chain, 2) == []
    pool.free([first])
    (again,) = cached(pool, chain_of([1, 1]))
    assert pool.match(chain, 2) == [again]  # not `second`, which records another predecessor
    assert pool.cache(second, chain, 0, 0) == again
    pool.check()


def test_reset_forgets_everything_and_leaves_what_is_held():
    pool, chain = BlockPool(4, 2), chain_of([1, 1, 2, 2])
    first, second = cached(pool, chain)
    pool.free([second])
    pool.reset()
    assert pool.match(chain, 2) == []
    assert (pool.num_free, pool.num_used, pool.num_cached) == (3, 1, 0)
    pool.free([first])
    assert pool.num_free == 4
    pool.check()


# Steps in flight


def test_blocks_given_back_during_a_step_are_free_when_it_ends():
    pool = BlockPool(3)
    a, b, c = pool.allocate(3)
    pool.begin_step()
    pool.free([a])
    pool.begin_step()
    pool.free([b])
    assert (pool.num_available, pool.num_deferred, pool.num_used) == (0, 2, 1)
    assert pool.allocate(1) is None
    pool.end_step()
    assert list(pool.allocate(1)) == [a]
    assert pool.allocate(1) is None
    pool.end_step()
    assert list(pool.allocate(1)) == [b]
    pool.free([c])  # nothing is in flight
    assert pool.num_free == 1
    pool.check()


def test_deferred_block_can_be_shared_again():
    pool, chain = BlockPool(2, 2), chain_of([1, 2])
    (block,) = cached(pool, chain)
    pool.begin_step()
    pool.free([block])
    assert (pool.num_cached, pool.num_deferred) == (0, 1)
    pool.share(pool.match(chain, 1))
    pool.end_step()
    assert (pool.refcount(block), pool.num_deferred, pool.num_available) == (1, 0, 1)
    pool.free([block])
    assert pool.num_cached == 1
    pool.check()


def test_what_is_kept_waits_for_the_step_that_is_being_scheduled():
    pool = BlockPool(2)
    (block,) = pool.allocate(1)
    pool.keep_for_step(block)
    pool.free([block])
    assert pool.num_available == 1
    pool.begin_step()
    assert pool.num_available == 1
    pool.end_step()
    assert pool.num_available == 2
    assert list(pool.allocate(1)) == [block]
    pool.free([block])  # it was kept for one step only
    assert pool.num_free == 2


def test_what_is_kept_holds_up_nobody_else():
    pool = BlockPool(3)
    a, b, _ = pool.allocate(3)
    pool.begin_step()
    pool.keep_for_step(a)
    pool.free([a, b])
    pool.begin_step()
    pool.end_step()
    assert list(pool.allocate(1)) == [b]
    pool.end_step()
    assert list(pool.allocate(1)) == [a]
    pool.check()


def test_no_step_ends_that_never_began():
    with pytest.raises(UsageError, match="no step is in flight"):
        BlockPool(1).end_step()


# Chains


def test_digest_depends_on_all_tokens_before_and_the_namespace_only():
    chain = chain_of([1, 2, 3, 4])
    assert chain.digests[0] == chain_of([1, 2, 9, 9]).digests[0]
    assert chain.digests[1] not in (*chain_of([9, 2, 3, 4]).digests, *chain_of([3, 4, 3, 4]).digests)
    assert not set(chain.digests) & set(chain_of([1, 2, 3, 4], b"salt").digests)
    assert all(0 <= digest < 2**60 for digest in chain.digests)


def test_chain_grows_as_if_at_once_and_a_fork_by_itself():
    chain = chain_of([1, 2])
    fork = chain.fork()
    chain.extend([1, 2, 3, 4, 5], 2, 2)
    chain.extend([1, 2, 3, 4, 5], 1, 2)  # known already
    fork.extend([1, 2, 7, 8], 2, 2)
    assert (chain.digests, chain.data) == (chain_of([1, 2, 3, 4]).digests, chain_of([1, 2, 3, 4]).data)
    assert (fork.digests, fork.data) == (chain_of([1, 2, 7, 8]).digests, chain_of([1, 2, 7, 8]).data)


@pytest.mark.parametrize("block_size", [0, 16])
def test_the_memory_of_a_pool(block_size):
    parts = vars(BlockPool(1000, block_size)).values()
    taken = sum(memoryview(each).nbytes for each in parts if isinstance(each, array | bytearray))
    assert taken == pytest.approx(bytes_of_pool(1000, block_size), rel=0.01)
