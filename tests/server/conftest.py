"""One engine, and a server of it, for all tests of the HTTP layer."""

from __future__ import annotations

import gc
import socket
from collections.abc import Iterator

import pytest

from paged import AsyncLLMEngine
from paged.server.engine_client import EngineClient
from tests.support.served import Served, eventually, serving


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
    with serving(EngineClient("demo", **OPTIONS), closes=True) as served:
        yield served


@pytest.fixture
def short_buffers(shared_client) -> Iterator[None]:
    """Let the system hold little of a response, so that a short one fills what is sent ahead."""
    listener = shared_client.server.servers[0]._listener
    size = listener.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # connections inherit it
    yield
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, size // 2)


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
    assert served.stats().num_used_blocks == 0
