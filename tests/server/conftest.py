"""One engine, and a server of it, for all tests of the HTTP layer."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from paged import AsyncLLMEngine
from tests.support.served import Served, eventually, serving


@pytest.fixture(scope="package", autouse=True)
def no_other_engine() -> None:
    """Free the engines of tests before these, which may have another number of threads."""
    gc.collect()


@pytest.fixture(scope="package")
def engine() -> Iterator[AsyncLLMEngine]:
    options = {"device": "cpu", "num_threads": 1, "num_blocks": 256, "max_num_seqs": 80}
    engine = AsyncLLMEngine("demo", **options)
    yield engine
    engine.shutdown()


@pytest.fixture(scope="package")
def shared(engine) -> Iterator[Served]:
    with serving(engine) as served:
        yield served


@pytest.fixture
def served(shared) -> Iterator[Served]:
    """Yield the server. After a test it has no request, and all blocks are free or cached."""
    yield shared
    thread = shared.front.engine._thread
    eventually(lambda: not thread.call(lambda engine: engine.core.groups.copy()).result())
    stats = thread.call(lambda engine: engine.stats()).result()
    assert stats.num_used_blocks == 0
