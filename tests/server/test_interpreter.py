"""Full garbage collections wait until the process is idle, but not for ever."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from paged.server.interpreter import MOST_HEAVY_S, MOST_S, Garbage


@pytest.fixture
def thresholds() -> Iterator[None]:
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)
    gc.unfreeze()


@pytest.mark.usefixtures("thresholds")
def test_full_collections_wait_until_the_process_is_idle_or_the_last_one_is_long_ago():
    now = [0.0]
    garbage = Garbage(lambda: now[0])
    before = gc.get_stats()[2]["collections"]
    kept = [[i] for i in range(200_000)]  # of which many full collections would come
    assert gc.get_stats()[2]["collections"] == before
    assert not garbage.collect(is_idle=False)
    assert garbage.collect(is_idle=True)
    assert gc.get_stats()[2]["collections"] == before + 1
    now[0] = MOST_S + 1
    assert not garbage.collect(is_idle=False, is_heavy=True)
    assert garbage.collect(is_idle=False)
    assert not garbage.collect(is_idle=False)
    now[0] += MOST_HEAVY_S + 1
    assert garbage.collect(is_idle=False, is_heavy=True)
    assert len(kept) == 200_000
