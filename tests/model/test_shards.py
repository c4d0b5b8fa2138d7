"""Shards of a model compute the bits of one process: tensor parallelism, with threads for processes."""

from __future__ import annotations

import pytest

from paged import SamplingParams
from tests.support.checkpoints import assert_all_free, checkpoint, new_engine, ragged_prompts
from tests.support.shards import computed_in_shards, shards_of

CASES = {
    "llama": ({}, 2),
    "llama repeated KV heads": ({}, 4),
}


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_one_process(case):
    options, count = CASES[case]
    engine = new_engine(checkpoint(case.split()[0]), max_num_batched_tokens=48, **options)
    prompts = ragged_prompts([1, 9, 40, 17, 3, 60, 33])
    with computed_in_shards(engine, shards_of(count)) as sharded:
        engine.generate(prompts, SamplingParams(max_tokens=8, temperature=0, ignore_eos=True), use_tqdm=False)
        assert_all_free(engine)
        assert sharded.shards[0].group.meeting.num_exchanges
