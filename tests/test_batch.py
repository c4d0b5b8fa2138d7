"""A step as tensors: ragged, with hand-computed slots."""

from __future__ import annotations

import torch

from paged.batch import Batch
from paged.block_manager import BlockManager
from paged.request import Request
from paged.sampling_params import SamplingParams
from paged.scheduler import Schedule


def test_batch_lays_out_tokens_without_padding():
    manager = BlockManager(16, 8)
    schedule = Schedule()
    # (prompt, tokens in all, computed so far, new in this step)
    for name, prompt, total, computed, new in [("a", 3, 10, 9, 1), ("b", 12, 12, 5, 4), ("c", 2, 2, 0, 2)]:
        request = Request(name, None, list(range(100, 100 + prompt)), SamplingParams(), 99, frozenset(), 0)
        for i in range(prompt, total):
            request.append(100 + i)
        request.num_computed_tokens = computed
        schedule.add(request, new, manager.grow(name, computed + new))

    batch = Batch.from_schedule(schedule, 8, torch.device("cpu"))

    # Blocks go out in order: a has 0 and 1, b has 2 and 3, c has 4.
    assert batch.token_ids.tolist() == [109, 105, 106, 107, 108, 100, 101]
    assert batch.positions.tolist() == [9, 5, 6, 7, 8, 0, 1]
    assert batch.slot_mapping.tolist() == [9, 21, 22, 23, 24, 32, 33]
    assert batch.block_tables.tolist() == [[0, 1], [2, 3], [4, 0]]
    assert batch.seq_lens.tolist() == [10, 9, 2]
    assert batch.cu_seqlens_q.tolist() == [0, 1, 5, 7]
    assert batch.rope_lens.tolist() == [10, 12, 12, 12, 12, 2, 2]
    # b is in the middle of its prompt: nothing is sampled from it.
    assert batch.logit_rows.tolist() == [0, 6]
    assert (batch.num_tokens, batch.num_logits, batch.max_seqlen_q) == (7, 2, 4)
    assert batch.block_tables.dtype == batch.seq_lens.dtype == batch.cu_seqlens_q.dtype == torch.int32
    assert batch.token_ids.dtype == batch.slot_mapping.dtype == torch.int64


def test_batch_of_single_tokens_is_laid_out_alike():
    manager = BlockManager(16, 8)
    schedule = Schedule()
    for name, total in [("a", 9), ("b", 1), ("c", 16)]:
        request = Request(name, None, list(range(total)), SamplingParams(), 99, frozenset(), 0)
        request.num_computed_tokens = total - 1
        schedule.add(request, 1, manager.grow(name, total))
    batch = Batch.from_schedule(schedule, 8, torch.device("cpu"))
    assert batch.token_ids.tolist() == batch.positions.tolist() == [8, 0, 15]
    assert batch.slot_mapping.tolist() == [8, 16, 39]
    assert batch.block_tables.tolist() == [[0, 1], [2, 0], [3, 4]]
    assert batch.rope_lens.tolist() == batch.seq_lens.tolist() == [9, 1, 16]
    assert batch.cu_seqlens_q.tolist() == [0, 1, 2, 3]
    assert batch.logit_rows.tolist() == [0, 1, 2]
