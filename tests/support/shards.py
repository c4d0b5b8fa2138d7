"""Shards of a model in threads of one process, which compute every step of an engine beside it."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from paged import LLMEngine
from paged.kernels.checks import TrustedContents
from paged.model.batch import Batch
from paged.model.cache.kv_cache import KVCache
from paged.model.decoder import Decoder
from paged.model.part import ModelPart, Shard
from paged.runner.load import open_model
from paged.runner.memory import new_kv_cache
from paged.runner.passes import compute, new_graphs

PATIENCE_S = 60


class Meeting:
    """Where the threads of a group exchange tensors."""

    def __init__(self, count: int) -> None:
        self.barrier = threading.Barrier(count, timeout=PATIENCE_S)
        self.brought: list[Tensor | None] = [None] * count
        self.num_exchanges = 0
        self.num_lacking = 0  # numbers that the first shard got of the others


class ThreadGroup:
    """A `TensorGroup` of threads."""

    def __init__(self, meeting: Meeting, index: int) -> None:
        self.meeting = meeting
        self.index = index

    def gather(self, tensor: Tensor, dim: int = -1) -> Tensor:
        brought = self.meeting.brought
        brought[self.index] = tensor
        self.meeting.barrier.wait()
        assert len({(each.shape, each.dtype) for each in brought}) == 1, "shards bring different tensors"
        found = torch.cat(brought, dim)
        if self.index == 0:
            self.meeting.num_exchanges += 1
            self.meeting.num_lacking += found.numel() - tensor.numel()
        self.meeting.barrier.wait()
        return found

    def collect(self, tensor: Tensor) -> Tensor | None:
        found = self.gather(tensor)
        return found if self.index == 0 else None


def shards_of(count: int) -> list[Shard]:
    """Return the shards of a group of threads."""
    meeting = Meeting(count)
    return [Shard(index, count, ThreadGroup(meeting, index)) for index in range(count)]


def together(calls: Sequence[Any]) -> list[Any]:
    """Run the calls of all shards at once, each in a thread."""
    with ThreadPoolExecutor(len(calls)) as threads:
        return [running.result() for running in [threads.submit(call) for call in calls]]


class ShardedModel:
    """The model of an engine's runner in shards, each with its own weights and KV."""

    def __init__(self, engine: LLMEngine, shards: Sequence[Shard]) -> None:
        runner = engine.runner
        self.runner = runner
        self.shards = shards
        num_layers = runner.model_config.num_layers
        self.sizes = [
            replace(runner.sizes, part=ModelPart(range(num_layers), num_layers, shard)) for shard in shards
        ]
        self.models: list[Decoder] = []
        self.caches: list[KVCache] = []
        self.bytes_read: list[int] = []
        with ExitStack() as files:
            loads = []
            for sizes in self.sizes:
                opened = open_model(
                    sizes, runner.model_config, runner.device, engine.directory, runner.model.kernels
                )
                model, loader = files.enter_context(opened)
                self.models.append(model)
                loads.append((model, loader))
            together([lambda model=model, loader=loader: model.load(loader) for model, loader in loads])
            self.bytes_read = [loader.num_bytes.total() for _, loader in loads]
        blocks = runner.kv_cache.num_blocks
        for sizes, model in zip(self.sizes, self.models, strict=True):
            model.prepare(sizes.num_tabulated_positions(blocks))
            self.caches.append(new_kv_cache(sizes, runner.device, blocks, runner.kv_cache.num_host_blocks))
        self.graphs = [
            new_graphs(sizes, model) if runner.graphs else None
            for sizes, model in zip(self.sizes, self.models, strict=True)
        ]
        self._last: tuple[Batch, list[Batch]] | None = None

    def compute(self, batch: Batch) -> Any:
        """Compute a step in all shards. Return what the driver has of it."""
        if self._last is None or self._last[0] is not batch:
            self._last = batch, [_copied(batch) for _ in self.shards]
        for own in self._last[1]:
            own.age = batch.age
            own.queries.plans.clear()

        def run(number: int) -> Any:
            with TrustedContents():
                try:
                    own = self._last[1][number]
                    return compute(self.models[number], self.graphs[number], own, self.caches[number])
                except BaseException:
                    self.shards[number].group.meeting.barrier.abort()
                    raise

        return together([lambda number=number: run(number) for number in range(len(self.shards))])[0]


def _copied(batch: Batch) -> Batch:
    queries = replace(batch.queries, plans={})
    output_queries = batch.output_queries
    if output_queries is not None:
        same = output_queries is batch.queries
        output_queries = queries if same else replace(output_queries, plans={})
    return replace(batch, queries=queries, output_queries=output_queries)


@contextmanager
def computed_in_shards(engine: LLMEngine, shards: Sequence[Shard]) -> Iterator[ShardedModel]:
    """Inside, shards compute each step of the engine too, and their logits are compared."""
    sharded = ShardedModel(engine, shards)
    runner = engine.runner
    compute_whole = runner.compute
    move_blocks = runner._move_blocks
    move_states = runner._move_states

    def compute_both(batch: Batch) -> Any:
        logits, best, hidden = compute_whole(batch)
        own_logits, own_best, own_hidden = sharded.compute(batch)
        assert_same(own_logits, logits)
        for own, expected in zip(own_best or (), best or (), strict=True):
            assert_same(own, expected)
        assert (hidden is None) is (own_hidden is None)
        if hidden is not None:
            assert_same(own_hidden, hidden)
        return logits, best, hidden

    def move_both(*pairs: Any) -> None:
        move_blocks(*pairs)
        whole = runner.kv_cache
        for cache in sharded.caches:
            runner.kv_cache = cache
            move_blocks(*pairs)
        runner.kv_cache = whole

    def move_both_states(moves: Any) -> None:
        move_states(moves)
        whole = runner.kv_cache
        for cache in sharded.caches:
            runner.kv_cache = cache
            move_states(moves)
        runner.kv_cache = whole

    moves = {"_move_blocks": move_both, "_move_states": move_both_states}
    with mock.patch.multiple(runner, compute=compute_both, **moves):
        yield sharded


def assert_same(got: Tensor, expected: Tensor) -> None:
    """Assert that two tensors have the same bits."""
    assert got.shape == expected.shape
    assert got.dtype == expected.dtype
    assert torch.equal(got.contiguous().view(torch.uint8), expected.contiguous().view(torch.uint8))
