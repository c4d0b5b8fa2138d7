"""Transport over gloo: order, sizes, traffic in both directions, and ranks that are gone or late."""

from __future__ import annotations

import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
from torch.distributed import HashStore

from paged import EngineConfig
from paged.base.errors import RankError
from paged.ranks import supervision
from paged.ranks.layout import RankLayout
from paged.ranks.supervision import Ranks
from paged.ranks.transport import GlooTransport, ShardGroup
from paged.simulate.model import read_model


def connected(num_ranks: int, **options: float) -> list[GlooTransport]:
    """Return the transports of ranks that have met, all in this process."""
    store = HashStore()
    store.set_timeout(timedelta(seconds=60))
    transports = [
        GlooTransport(num_ranks, rank, timeout_s=60.0, host="127.0.0.1", **options)
        for rank in range(num_ranks)
    ]
    with ThreadPoolExecutor(num_ranks) as pool:
        list(pool.map(lambda each: each.connect(store), transports))
    return transports


def test_messages_and_tensors_arrive_in_order():
    driver, *others = transports = connected(3)
    messages = [b"", b"x", bytes(1020), bytes(range(256)) * 40]
    for data in messages:
        driver.send_message(data)
    numbers = torch.arange(12).view(3, 4)
    # A message may overtake tensors, and a tensor may be changed once it is sent.
    for i in range(3):
        driver.send(numbers, 1)
        numbers += i
    half = torch.randn(2, 3).bfloat16()
    driver.send(half, 1)
    for other in others:
        assert [other.receive_message() for _ in messages] == messages
    sums = [int(others[0].receive((3, 4), torch.int64, 0).sum()) for _ in range(3)]
    assert sums == [66, 66, 78]
    assert torch.equal(others[0].receive((2, 3), torch.bfloat16, 0), half)
    for transport in transports:
        transport.close()


def test_traffic_in_both_directions_does_not_block():
    """Each sends much before it receives anything: no send waits for its receiver."""
    transports = connected(2)
    large = [torch.full((2**18,), float(rank)) for rank in range(2)]

    def exchanged(rank: int) -> list[float]:
        for _ in range(6):
            transports[rank].send(large[rank], 1 - rank)
        received = [transports[rank].receive((2**18,), torch.float32, 1 - rank) for _ in range(6)]
        group = ShardGroup(transports[rank], rank, range(2))
        gathered = group.gather(large[rank].view(4, -1))
        assert gathered.shape == (4, 2**17)
        collected = group.collect(large[rank].view(4, -1))
        assert collected is None if rank else torch.equal(collected, gathered)
        return [float(each.mean()) for each in received] + gathered[0, :: 2**16].tolist()

    with ThreadPoolExecutor(2) as pool:
        assert [*pool.map(exchanged, range(2))] == [[1.0] * 6 + [0.0, 1.0], [0.0] * 6 + [0.0, 1.0]]
    for transport in transports:
        transport.close()


def test_a_rank_that_is_late_or_gone_is_an_error():
    driver, follower = connected(2)
    driver._timeout = timedelta(seconds=0.3)
    with pytest.raises(RankError, match="rank 1 sends nothing"):
        driver.receive((4,), torch.float32, 1)
    follower.close()
    driver, follower = connected(2, message_timeout_s=60.0)
    threading.Timer(0.2, driver.close).start()
    with pytest.raises(RankError, match="closed by peer"):  # not that it took too long
        follower.receive_message()
    with pytest.raises(RankError, match="closed"):
        driver.send_message(b"")
    driver, follower = connected(2, message_timeout_s=0.3)  # under torchrun
    with pytest.raises(RankError, match="rank 0 sends nothing"):
        follower.receive_message()


def test_an_idle_driver_notices_that_a_rank_of_torchrun_is_gone(monkeypatch, tmp_path):
    """Its server would say that it is ready, and lose the next request. No file is left."""
    place = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(supervision, "torchrun_store", lambda _: HashStore())
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(supervision, "RANK_END_S", 0.1)
    monkeypatch.setattr(supervision, "ANSWER_S", 0.1)
    config = EngineConfig("demo", pipeline_parallel_size=2, rank_timeout_s=1.0)
    ranks = Ranks(config, RankLayout.of(config, read_model("demo")), tmp_path)
    ranks.transport, follower = connected(2)
    noticed = Loss()
    ranks.watch(noticed.on_loss)
    ranks.begin(())
    for _ in range(2):
        assert follower.receive_message() == b""  # it is idle
    ranks.check()
    follower.close()
    assert noticed.event.wait(60)
    with pytest.raises(RankError, match="rank 1 receives nothing") as lost:
        ranks.check()
    assert "rank 1 receives nothing" in str(ranks.end_after(lost.value))
    assert not [*tmp_path.iterdir()]
    ranks.close()


class Loss:
    """What is told of a loss."""

    def __init__(self) -> None:
        self.event = threading.Event()

    def on_loss(self) -> None:
        """Note it."""
        self.event.set()
