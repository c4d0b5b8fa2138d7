"""Blocks: reference counts, all-or-nothing allocation, tables; against a brute-force model."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from paged.block_manager import BlockManager, BlockPool
from paged.errors import UsageError


def test_allocation_is_all_or_nothing():
    pool = BlockPool(4)
    first = pool.allocate(3)
    assert first is not None
    assert len(set(first)) == 3
    assert pool.allocate(2) is None
    assert pool.num_free == 1
    pool.check()
    last = pool.allocate(1)
    assert set(first) | set(last) == {0, 1, 2, 3}
    assert pool.allocate(0) == []
    assert pool.allocate(1) is None
    pool.check()


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
    assert pool.allocate(2) == [c, a]
    assert b not in pool.allocate(5)


@pytest.mark.parametrize("operation", ["free", "share"])
@pytest.mark.parametrize("block", [0, -1, 4, 10**9], ids=["free-already", "negative", "one-too-far", "far"])
def test_misuse_raises_and_names_the_block(operation, block):
    pool = BlockPool(4)
    pool.free(pool.allocate(4))
    with pytest.raises(UsageError, match=str(block)):
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


def test_check_finds_a_block_in_no_table():
    manager = BlockManager(4, 8)
    assert manager.grow("a", 20)
    manager.pool.share([manager.table("a")[0]])
    with pytest.raises(AssertionError, match="2 references, in 1 tables"):
        manager.check()


@pytest.mark.parametrize(("num_tokens", "blocks"), [(0, 0), (1, 1), (8, 1), (9, 2), (16, 2), (17, 3)])
def test_blocks_for(num_tokens, blocks):
    assert BlockManager(4, 8).blocks_for(num_tokens) == blocks


def test_table_keeps_its_blocks_as_it_grows_and_a_refused_growth_changes_nothing():
    manager = BlockManager(3, 8)
    assert manager.grow("a", 9)
    before = list(manager.table("a"))
    assert manager.grow("a", 16)
    assert list(manager.table("a")) == before
    assert manager.grow("b", 1)
    assert not manager.grow("a", 17)
    assert not manager.grow("c", 1)
    assert list(manager.table("a")) == before
    manager.check()
    manager.release("b")
    manager.release("b")  # nothing left to give back
    assert manager.grow("a", 17)
    assert list(manager.table("a"))[:2] == before
    manager.check()


@pytest.mark.parametrize("seed", range(3))
def test_pool_agrees_with_a_brute_force_model(seed):
    rng = random.Random(seed)
    pool, model = BlockPool(13), Counter()
    for _ in range(2000):
        match rng.randrange(3):
            case 0:
                n = rng.randrange(8)
                blocks = pool.allocate(n)
                assert (blocks is None) == (n > 13 - len(model))
                assert not set(blocks or []) & set(model)
                model.update(blocks or [])
            case 1 if model:
                block = rng.choice(sorted(model))
                pool.share([block])
                model[block] += 1
            case 2 if model:
                block = rng.choice(sorted(model))
                pool.free([block])
                model = +(model - Counter([block]))
        pool.check()
        assert pool.num_free == 13 - len(model)
        assert all(pool.refcount(block) == model[block] for block in range(13))


@pytest.mark.parametrize("seed", range(3))
def test_tables_agree_with_a_brute_force_model(seed):
    rng = random.Random(seed)
    manager = BlockManager(17, 8)
    tables: dict[str, list[int]] = {}
    for _ in range(2000):
        name = rng.choice("abcdef")
        if rng.random() < 0.25:
            manager.release(name)
            tables.pop(name, None)
        else:
            num_tokens = rng.randrange(1, 80)
            before = tables.get(name, [])
            used = sum(map(len, tables.values()))
            wanted = max(len(before), (num_tokens + 7) // 8)
            grown = manager.grow(name, num_tokens)
            assert (grown is not None) == (wanted - len(before) <= 17 - used)
            if grown:
                tables[name] = list(manager.table(name))
                assert len(tables[name]) == wanted
                assert tables[name][: len(before)] == before
        manager.check()
        held = [block for table in tables.values() for block in table]
        assert len(held) == len(set(held)) == manager.num_used_blocks
        assert all(list(manager.table(name)) == table for name, table in tables.items())
