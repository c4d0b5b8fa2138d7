"""Every native family: the same bits in any company, and bfloat16 close to float32."""

from __future__ import annotations

import pytest
import torch
import transformers

from paged import CheckpointError, ConfigError, SamplingParams
from tests.support.checkpoints import CONFIGS, assert_all_free, checkpoint, new_engine, ragged_prompts

FAMILIES = [
    name for name in CONFIGS if not name.startswith(("llama", "mistral", "qwen")) and name != "ministral"
]
LENGTHS = [1, 30, 61, 8, 44, 63]


def run(engine, prompts):
    """Return tokens and log-probabilities, which are equal only if the logits are bitwise equal."""
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=1)
    results = engine.generate(prompts, params, use_tqdm=False)
    assert_all_free(engine)
    outputs = [result.outputs[0] for result in results]
    bits = [(o.token_ids, [{t: p.logprob for t, p in d.items()} for d in o.logprobs]) for o in outputs]
    return bits, results


@pytest.mark.parametrize("name", FAMILIES)
def test_bits_do_not_depend_on_company(name):
    """Alone, in chunks of 24 tokens while requests are preempted or swapped, and with shared prefixes."""
    prompts = ragged_prompts(LENGTHS)
    prompts[4] = prompts[2][:40] + prompts[4][:4]
    alone = new_engine(checkpoint(name), enable_prefix_caching=False)
    expected = [run(alone, [prompt])[0][0] for prompt in prompts]
    num_groups = len(alone.model_config.layer_groups)
    for options in ({}, {"preemption_mode": "swap", "swap_space": 0.01}):
        crowded = new_engine(
            checkpoint(name), num_blocks=7 * num_groups, max_num_batched_tokens=24, **options
        )
        bits, results = run(crowded, prompts)
        assert bits == expected
        assert any(result.metrics.num_preemptions for result in results)
    roomy = new_engine(checkpoint(name))
    assert run(roomy, prompts[2:3])[0] == expected[2:3]
    bits, results = run(roomy, prompts)
    assert bits == expected
    assert all(results[i].num_cached_tokens for i in (2, 4))


@pytest.mark.parametrize("name", FAMILIES)
def test_bfloat16_is_as_close_as_that_of_transformers(name):
    """Log-probabilities of prompts, against those in float32."""
    prompts = ragged_prompts([80] * 4)
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    found = []
    for dtype in ("float32", "bfloat16"):
        engine = new_engine(checkpoint(name), dtype=dtype)
        outputs = engine.generate(prompts, params, use_tqdm=False)
        rows = [zip(o.prompt_logprobs[1:], o.prompt_token_ids[1:], strict=True) for o in outputs]
        found.append(torch.tensor([[row[token].logprob for row, token in each] for each in rows]))
    wide, narrow = found
    oracle = transformers.AutoModelForCausalLM.from_pretrained(
        checkpoint(name), dtype=torch.bfloat16, attn_implementation="eager"
    ).eval()
    with torch.no_grad():
        logprobs = oracle(torch.tensor(prompts)).logits[:, :-1].float().log_softmax(-1)
    theirs = logprobs.gather(2, torch.tensor(prompts)[:, 1:, None])[..., 0]
    assert (narrow - wide).norm() < 1.2 * (theirs - wide).norm()


def test_prefixes_of_other_longrope_factors_are_refused(tmp_path):
    """Keys rotated with the long factors are useless to queries rotated with the short ones."""
    (prompt,) = ragged_prompts([40])
    long = new_engine(checkpoint("phi3-longrope"))
    run(long, [prompt])
    assert long.save_prefix(tmp_path / "kv")
    assert new_engine(checkpoint("phi3-longrope"), max_model_len=400).load_prefix(tmp_path / "kv")
    with pytest.raises(CheckpointError, match="fingerprint"):
        new_engine(checkpoint("phi3-longrope"), max_model_len=64).load_prefix(tmp_path / "kv")


@pytest.mark.parametrize("name", [name for name in FAMILIES if name.startswith(("gemma", "glm", "granite"))])
def test_float16_is_refused_where_it_is_too_narrow(name):
    with pytest.raises(ConfigError, match="float16 is too narrow for"):
        new_engine(checkpoint(name), dtype="float16")
