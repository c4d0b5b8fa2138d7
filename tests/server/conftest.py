"""One engine, and a server of it, for all tests of the HTTP layer."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from paged import AsyncLLMEngine
from paged.server.engine_client import EngineClient
from tests.support.served import Served, UnhurriedLauncher, eventually, serving


@pytest.fixture(scope="package", autouse=True)
def no_other_engine() -> None:
    """Free the engines of tests before these, which may have another number of threads."""
    gc.collect()


OPTIONS = {"device": "cpu", "num_threads": 1, "num_blocks": 256, "max_num_seqs": 80}


@pytest.fixture(scope="package")
def engine() -> Iterator[AsyncLLMEngine]:
    engine = AsyncLLMEngine("demo", **OPTIONS)
    yield engine
    engine.shutdown()


@pytest.fixture(scope="package")
def shared(engine) -> Iterator[Served]:
    with serving(engine) as served:
        yield served


@pytest.fixture(scope="package")
def shared_client() -> Iterator[Served]:
    """Yield a server of an engine in another process."""
    client = EngineClient("demo", launcher=UnhurriedLauncher(), **OPTIONS)
    with serving(client, closes=True) as served:
        yield served


@pytest.fixture
def served(shared) -> Iterator[Served]:
    """Yield the server. After a test it has no request, and all blocks are free or cached."""
    yield shared
    _check_idle(shared)


@pytest.fixture(params=["shared", "shared_client"], ids=["in this process", "in another process"])
def served_by_either(request) -> Iterator[Served]:
    """Yield the servers of an engine in this process and of one in another, as `served` does."""
    served = request.getfixturevalue(request.param)
    yield served
    _check_idle(served)


def _check_idle(served: Served) -> None:
    eventually(lambda: served.num_requests == 0)
    eventually(lambda: not served.front.open_records)
    assert served.stats().num_used_blocks == 0
