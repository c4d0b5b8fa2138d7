"""Memory sizing: the profiling step of a GPU, run here on a CPU with fake counters of torch.cuda."""

from __future__ import annotations

import pytest
import torch

from paged import ConfigError, LLMEngine
from paged.device.host_memory import free_on_cpu
from paged.model.batch import Batch
from paged.options.config import EngineConfig
from paged.runner.fit import kv_bytes_on_cpu, kv_bytes_on_gpu, measure_peak_bytes
from tests.support.checkpoints import checkpoint, new_engine

GIB = 2**30


@pytest.fixture
def cuda_counters(monkeypatch):
    counters = {
        "max_memory_allocated": 3 * GIB,
        "mem_get_info": (16 * GIB, 24 * GIB),
        "memory_reserved": 5 * GIB,
        "reset_peak_memory_stats": None,
        "synchronize": None,
        "empty_cache": None,
    }
    for name, value in counters.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)


@pytest.mark.usefixtures("cuda_counters")
@pytest.mark.parametrize("max_num_seqs", [1, 2, 7, 256])  # two prompts are long enough to share blocks
def test_measuring_runs_a_step_of_the_largest_size(monkeypatch, max_num_seqs):
    engine = LLMEngine(
        "demo",
        dtype="float32",
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=50,
        num_blocks=8,
        skip_tokenizer_init=True,
    )
    runner, batches = engine.runner, []
    runner.graphs = None
    monkeypatch.setattr(
        runner.model, "forward", lambda batch, *_: batches.append(batch) or hidden_states(batch)
    )
    peak, _graph_bytes = measure_peak_bytes(runner.sizes, runner.device, runner.run_in_other_cache)

    (batch,) = batches
    num_seqs = min(max_num_seqs, 50)
    assert isinstance(batch, Batch)
    assert (batch.num_tokens, batch.num_logits, len(batch.queries.seq_lens)) == (50, num_seqs, num_seqs)
    num_blocks = len(set(map(int, batch.slot_mapping[0] // 16)))
    assert peak == 3 * GIB - num_blocks * runner.sizes.block_bytes


def hidden_states(batch: Batch) -> torch.Tensor:
    return torch.zeros(batch.num_output_rows, 256)


@pytest.mark.usefixtures("cuda_counters")
def test_gpu_memory_is_shared_with_other_processes():
    config = EngineConfig(model="demo", gpu_memory_utilization=0.5)
    # Of 24 GiB half may be used. 8 are in use, 5 of them by torch itself, and a step needs 4.
    assert kv_bytes_on_gpu(config, torch.device("cuda"), peak_bytes=4 * GIB) == 12 * GIB - 3 * GIB - 4 * GIB


def test_cpu_takes_the_stated_share_of_free_memory(monkeypatch):
    free = free_on_cpu()
    assert free > 0
    monkeypatch.setattr("paged.runner.fit.free_on_cpu", lambda: free)  # others may take some
    one, half = (kv_bytes_on_cpu(EngineConfig(model="demo", cpu_memory_utilization=u)) for u in (1.0, 0.5))
    assert half == pytest.approx(one / 2, rel=0.01)


def test_error_when_not_one_block_fits(monkeypatch):
    monkeypatch.setattr("paged.runner.fit.kv_bytes_on_cpu", lambda _: 1000)
    with pytest.raises(ConfigError, match="cpu_memory_utilization"):
        LLMEngine("demo", skip_tokenizer_init=True)


def test_error_when_not_one_block_of_each_layer_group_fits(monkeypatch):
    """Gemma 3's five groups of one layer, each with blocks of 4 KiB."""
    monkeypatch.setattr("paged.runner.fit.kv_bytes_on_cpu", lambda _: 4 * 4096)
    with pytest.raises(ConfigError, match=r"a block in each layer group takes 0\.02 MiB"):
        new_engine(checkpoint("gemma3"), num_blocks=None)
