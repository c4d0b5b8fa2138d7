"""LoRA adapters over several ranks: the bits of one process, with one slot that adapters take in turns."""

import pytest

from paged import SamplingParams
from tests.support.checkpoints import assert_all_free, checkpoint, new_engine, ragged_prompts
from tests.support.lora_adapters import adapter, request
from tests.support.ranks import ranked_engines

PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=n, logprobs=1, ignore_eos=True) for n in (9, 4, 12, 6, 8)
]
# Stages and shards of models with what a cut could lose.
CASES = {
    "gemma4": (2, 2),  # layers of two shapes, K and V of others, and a projection before all layers
    "qwen3_5": (3, 1),  # states
    "gpt_neox": (1, 2),  # Q, K and V by head, in a rotated order
}


@pytest.mark.parametrize("model", CASES)
def test_adapters_over_ranks_give_the_bits_of_one_process(model, tmp_path):
    paths = [adapter(tmp_path, model, seed) for seed in (0, 1)]
    chosen = [paths[0], paths[1], None, paths[1], paths[0]]
    requests = [path and request(path, paths.index(path) + 1) for path in chosen]
    prompts = [{"prompt_token_ids": each} for each in ragged_prompts([5, 40, 17, 9, 3])]
    options = {"enable_lora": True, "max_lora_rank": 8, "num_blocks": 64, "max_num_batched_tokens": 24}

    def results():
        engine = new_engine(checkpoint(model), **options)
        outputs = engine.generate(prompts, PARAMS, lora_request=requests, use_tqdm=False)
        assert_all_free(engine)
        return [(o.outputs[0].token_ids, o.outputs[0].logprobs) for o in outputs]

    expected = results()
    with ranked_engines(*CASES[model]) as worlds:
        found = results()
    assert found == expected
    assert sum(data[:1] == b"\x08" for data in worlds[0].sent) >= 2
