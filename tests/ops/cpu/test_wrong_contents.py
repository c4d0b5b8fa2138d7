"""Launchers on a CPU read indices before a kernel uses them: a wrong one is an error, not a lost process."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from paged.kernels.attention_options import AttentionOptions
from paged.kernels.backend import load_kernels
from paged.kernels.checks import TrustedContents
from tests.support.checkpoints import checkpoint, new_engine, ragged_prompts

K = load_kernels("numba")
BLOCKS, SIZE, HEADS, DIM = 4, 8, 2, 16
FAR = 2**31 - 1


def attention(**changed: Any) -> torch.Tensor:
    """Attend with two sequences, of 9 and of 3 tokens, that have one new token each."""
    inputs: dict[str, Any] = {
        "query": torch.ones(2, HEADS, DIM),
        "key_cache": torch.ones(BLOCKS, SIZE, HEADS, DIM),
        "value_cache": torch.ones(BLOCKS, SIZE, HEADS, DIM),
        "block_tables": torch.tensor([[0, 1], [2, 3]], dtype=torch.int32),
        "seq_lens": torch.tensor([9, 3], dtype=torch.int32),
        "cu_seqlens_q": torch.tensor([0, 1, 2], dtype=torch.int32),
        "options": AttentionOptions(scale=1.0, max_seqlen_q=1),
    }
    return K.paged_attention(**{**inputs, **changed})


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize(
    "changed",
    [
        {"block_tables": torch.tensor([[0, FAR], [2, 3]], dtype=torch.int32)},
        {"block_tables": torch.tensor([[0, -1], [2, 3]], dtype=torch.int32)},
        {"block_tables": torch.tensor([[0], [2]], dtype=torch.int32)},
        {"seq_lens": ints(FAR, 3)},
        {"seq_lens": ints(9, 0)},
        {"seq_lens": ints(9, -5)},
        {"cu_seqlens_q": ints(0, 1, FAR)},
        {"cu_seqlens_q": ints(0, -1, 2)},
        {"cu_seqlens_q": ints(1, 1, 2)},
        {"query": torch.ones(2, DIM, HEADS).transpose(1, 2)},
    ],
    ids=str,
)
def test_attention(changed):
    assert torch.equal(attention(), torch.ones(2, HEADS, DIM))
    with pytest.raises(ValueError, match=r"must|tokens"):
        attention(**changed)


def test_attention_with_the_plan_of_other_lengths():
    caches = [torch.ones(BLOCKS, SIZE, HEADS, DIM) for _ in range(2)]
    tables, starts = torch.tensor([[0, 1], [2, 3]], dtype=torch.int32), ints(0, 1, 2)
    options = AttentionOptions(scale=1.0, max_seqlen_q=1)
    plan = K.plan_attention(torch.ones(2, HEADS, DIM), *caches, tables, ints(9, 3), starts, options)
    with pytest.raises(ValueError, match="the lengths of another batch"):
        K.paged_attention(torch.ones(2, HEADS, DIM), *caches, tables, ints(3, 9), starts, options, plan)


@pytest.mark.parametrize("slots", [[0, BLOCKS * SIZE], [-1, 0], [2**62, 0], [3, 3]], ids=str)
def test_rotary_store_kv(slots):
    qkv, angles = torch.ones(2, 3 * HEADS, DIM), torch.ones(2, DIM // 2)
    caches = [torch.zeros(BLOCKS, SIZE, HEADS, DIM) for _ in range(2)]
    with pytest.raises(ValueError, match="slot_mapping must"):
        K.rotary_store_kv(qkv, angles, angles, *caches, torch.tensor(slots))
    assert not any(cache.any() for cache in caches)


@pytest.mark.parametrize("index", [3, -1, 2**62], ids="index={}".format)
def test_other_indices(index):
    wrong, table = torch.tensor([0, index]), torch.ones(3, 64)
    ones, counts = torch.ones(2), torch.zeros(3, 64, dtype=torch.int32)
    cache = torch.ones(2, 3, SIZE, HEADS, DIM)
    right = torch.tensor([0, 1])
    calls = [
        lambda: K.take_rows(table, wrong),
        lambda: K.apply_penalties(table.clone(), wrong, right, counts, counts.bool(), ones, ones, ones),
        lambda: K.apply_penalties(table.clone(), right, wrong, counts, counts.bool(), ones, ones, ones),
        lambda: K.token_logprobs(torch.ones(2, 3), wrong, 1),
        lambda: K.copy_blocks(cache, torch.tensor([[0, index]])),
        lambda: K.copy_blocks(cache, torch.tensor([[index, 0]])),
    ]
    for call in calls:
        with pytest.raises(ValueError, match="must be between 0 and 2"):
            call()
    with pytest.raises(ValueError, match="num_top must be between 0 and 3, got 4"):
        K.token_logprobs(torch.ones(2, 3), right, 4)


def test_an_engine_reads_no_contents_and_has_the_same_tokens(monkeypatch):
    engine, read = new_engine(checkpoint("llama"), enforce_eager=True), []
    prompts = ragged_prompts([5, 40, 1])
    monkeypatch.setattr("paged.kernels.content_checks.check_contents", lambda *_: read.append(1))
    engine.generate(prompts, use_tqdm=False)
    assert not read
    attention()
    assert read
    with TrustedContents(), TrustedContents():
        pass
    attention()
    assert len(read) == 2
