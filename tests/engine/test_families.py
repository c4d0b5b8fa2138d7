"""Every native family: the same bits in any company, and bfloat16 close to float32."""

from __future__ import annotations

import shutil

import pytest
import torch
import transformers

from paged import ConfigError, RequestError, SamplingParams
from paged.architectures.config import DEMO
from tests.support.checkpoints import (
    CONFIGS,
    HYBRIDS,
    MIXTURES,
    Reference,
    assert_all_free,
    checkpoint,
    edit_json,
    new_engine,
    ragged_prompts,
)

FAMILIES = [
    name for name in CONFIGS if not name.startswith(("llama", "mistral", "qwen")) and name != "ministral"
]
ALIKE = {*MIXTURES} - {"gpt_oss", "glm4_moe", "gemma4-experts"}  # these have all that others have
# test_hybrids.py has these, and what differs from them.
FAMILIES = [name for name in FAMILIES if name not in ALIKE and not name.startswith(HYBRIDS)]
FAMILIES += ["llama-dynamic"]  # whose angles each step computes
LENGTHS = [1, 30, 61, 8, 44, 63]


SWAP = {"preemption_mode": "swap", "swap_space": 0.01}
KINDS = {
    "float32": {},
    "int8": {"kv_cache_dtype": "int8", "quantization": "int8"},
    "fp8": {"kv_cache_dtype": "fp8"},
}


def run(engine, prompts, max_tokens=24, **sampling):
    """Return tokens and log-probabilities, which are equal only if the logits are bitwise equal."""
    sampling = {"temperature": 0.0, "logprobs": 1, "ignore_eos": True, **sampling}
    results = engine.generate(prompts, SamplingParams(max_tokens=max_tokens, **sampling), use_tqdm=False)
    assert_all_free(engine)
    outputs = [output for result in results for output in result.outputs]
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
    for options in ({}, SWAP):
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


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", FAMILIES)
def test_samples_have_the_bits_of_prompts(name, kind):
    """Samples share their prompt's blocks, copy the last, are swapped; a prompt may hit the prefix cache.

    No request is beyond the trained context of longrope: there a prompt is rotated otherwise than its start.
    """
    prompts = ragged_prompts([20, 40])
    alone = new_engine(checkpoint(name), **KINDS[kind])
    num_blocks = 7 * len(alone.model_config.layer_groups)
    small = {"num_blocks": num_blocks, "max_num_batched_tokens": 24}
    crowded = new_engine(checkpoint(name), **small, **SWAP, **KINDS[kind])
    _, results = run(crowded, prompts, n=2, temperature=1.0, seed=0, logprobs=0)
    assert crowded.stats().num_swap_preemptions
    for prompt, result in zip(prompts, results, strict=True):
        assert [len(output.token_ids) for output in result.outputs] == [24, 24]
        assert result.outputs[0].token_ids != result.outputs[1].token_ids
        for output in result.outputs:
            text = prompt + output.token_ids
            computed, (whole,) = run(alone, [text], 1, prompt_logprobs=0)
            for token, sampled, row in zip(
                output.token_ids, output.logprobs, whole.prompt_logprobs[len(prompt) :], strict=True
            ):
                assert sampled[token].logprob == row[token].logprob
            found, (again,) = run(alone, [text], 1)
            assert again.num_cached_tokens
            assert found == computed


@pytest.mark.parametrize(
    "name", [*FAMILIES, "qwen3_5", "lfm2", "nemotron_h", "granitemoehybrid-dense", "falcon_h1"]
)
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
        checkpoint(name), dtype=torch.bfloat16, attn_implementation="eager", experts_implementation="eager"
    ).eval()
    with torch.no_grad():
        logprobs = oracle(torch.tensor(prompts)).logits[:, :-1].float().log_softmax(-1)
    theirs = logprobs.gather(2, torch.tensor(prompts)[:, 1:, None])[..., 0]
    if name in MIXTURES:
        # A router that is as near to two experts may choose another one in either: few tokens, but far off.
        assert (narrow - wide).abs().median() < 1.2 * (theirs - wide).abs().median()
    else:
        assert (narrow - wide).norm() < 1.2 * (theirs - wide).norm()


def test_longrope_keeps_the_prefixes_of_long_requests_apart(tmp_path):
    """Keys rotated with the long factors are useless to queries rotated with the short ones.

    A request that grows long finds what a long prompt left, and the other way round. Files keep them apart.
    """
    (prompt,) = ragged_prompts([100])
    greedy = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)

    def cached(engine, length: int, params: SamplingParams = greedy) -> int:
        (output,) = engine.generate([prompt[:length]], params, use_tqdm=False)
        return output.num_cached_tokens

    engine = new_engine(checkpoint("phi3-longrope"))
    assert [cached(engine, n) for n in (48, 49, 100, 100, 70)] == [0, 48, 0, 96, 64]
    assert engine.save_prefix(tmp_path / "kv")
    other = new_engine(checkpoint("phi3-longrope"), max_model_len=400)
    assert other.load_prefix(tmp_path / "kv")
    assert [cached(other, n) for n in (49, 100)] == [48, 96]
    short = new_engine(checkpoint("phi3-longrope"), max_model_len=64)
    assert short.load_prefix(tmp_path / "kv")
    assert cached(short, 49) == 48


def test_salts_keep_the_prefixes_of_longrope_apart():
    """Also where the salt is in the prompt, and the request grows long."""
    (prompt,) = ragged_prompts([60])
    engine = new_engine(checkpoint("phi3-longrope"))
    params = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    salted = {"prompt_token_ids": prompt, "cache_salt": "secret"}
    (output,) = engine.generate([salted], params, use_tqdm=False)
    whole = [*prompt, *output.outputs[0].token_ids]
    for salt, num_cached in ({}, 0), ({"cache_salt": "other"}, 0), ({"cache_salt": "secret"}, 80):
        (output,) = engine.generate([{"prompt_token_ids": whole, **salt}], params, use_tqdm=False)
        assert output.num_cached_tokens == num_cached


@pytest.mark.parametrize("n", [1, 3])
def test_a_longrope_request_that_grows_long_is_forked_and_goes_on(n):
    """Its fork, a request that goes on from its tokens, and its n samples have its tokens."""
    (prompt,) = ragged_prompts([58])
    params = SamplingParams(temperature=1e-9, max_tokens=16, ignore_eos=True, n=n)
    engine = new_engine(checkpoint("phi3-longrope"))
    (output,) = engine.generate([prompt], params, use_tqdm=False)
    tokens = output.outputs[0].token_ids
    assert all(sample.token_ids == tokens for sample in output.outputs)
    greedy = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
    for num_steps in range(4, 11):
        engine.add_request("a", prompt, greedy)
        for _ in range(num_steps):
            engine.step()
        engine.fork("a", "b")
        engine.add_request("c", prompt, greedy, generated_token_ids=tokens[:num_steps])
        finished = {}
        while engine.has_unfinished_requests():
            finished |= {o.request_id: o.outputs[0].token_ids for o in engine.step() if o.finished}
        assert [finished[i] for i in "abc"] == [tokens] * 3
    reported = SamplingParams(temperature=0.0, max_tokens=16, prompt_logprobs=0)
    engine.add_request("d", prompt, reported, generated_token_ids=tokens[:6])
    with pytest.raises(RequestError, match=r"does not go with prompt_logprobs where .* have 65 tokens"):
        engine.add_request("e", prompt, reported, generated_token_ids=tokens[:7])


@pytest.mark.parametrize("failing", [False, True])
def test_the_token_that_makes_a_longrope_request_long_may_complete_a_stop_string(
    failing, tmp_path, monkeypatch
):
    """Then it is finished and is not computed anew, also where the search for the string fails first."""
    shutil.copytree(DEMO, tmp_path, dirs_exist_ok=True)
    scaling = {"short_factor": [1.0] * 32, "long_factor": [1.1] * 32, "original_max_position_embeddings": 64}
    edit_json(
        tmp_path / "config.json",
        rope_parameters={"rope_type": "longrope", "rope_theta": 10000.0, **scaling},
    )
    engine = new_engine(tmp_path, skip_tokenizer_init=False)
    prompt = engine.tokenizer.encode("def fibonacci(n):\n")

    def generate(stop: list[str]):
        params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True, stop=stop)
        (output,) = engine.generate([prompt], params, use_tqdm=False)
        assert_all_free(engine)
        return output.outputs[0]

    num_short = 65 - len(prompt)
    token_ids = generate([]).token_ids
    text, longer = (engine.tokenizer.decode(token_ids[:n]) for n in (num_short - 1, num_short))
    stop = [longer[-25:]]
    assert stop[0] not in text
    search = engine.core.outputs.end_at_stop_string

    def failing_search(request, now):
        if len(request.token_ids) == 65:
            monkeypatch.undo()
            raise KeyboardInterrupt
        search(request, now)

    if failing:
        monkeypatch.setattr(engine.core.outputs, "end_at_stop_string", failing_search)
        other = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True, stop=["never in the text"])
        engine.add_request("other", prompt, other)
        for _ in range(num_short - 1):
            engine.step()
        with pytest.raises(KeyboardInterrupt):
            engine.step()
        while engine.has_unfinished_requests():
            outputs = engine.step()
        assert outputs[0].outputs[0].token_ids == token_ids
    assert generate(stop).token_ids == token_ids[:num_short]


@pytest.mark.parametrize(
    "name",
    [name for name in FAMILIES if name.startswith(("gemma", "glm4", "granite")) and name != "glm4_moe"],
)
def test_float16_is_refused_where_it_is_too_narrow(name):
    with pytest.raises(ConfigError, match="float16 is too narrow for"):
        new_engine(checkpoint(name), dtype="float16")


@pytest.mark.parametrize("name", ["gemma2", "gemma3"])
def test_scores_are_capped_in_gemma_2_alone(name, tmp_path):
    """Gemma 3 has norms of Q and K in place of the softcap of scores; logits are capped in both.

    transformers keeps attn_logit_softcapping in the config of Gemma 3, but no layer reads it; vLLM and
    llama.cpp do not either. So whatever was trained with the key was trained without a softcap: to apply it
    would change the model. That of final logits is applied by all.
    """
    directory = tmp_path / "model"
    shutil.copytree(checkpoint(name), directory)
    prompt = ragged_prompts([40])[0]
    found = []
    for cap in (None, 0.05):
        edit_json(directory / "config.json", attn_logit_softcapping=cap, final_logit_softcapping=3.0)
        ((tokens, logprobs),), _ = run(new_engine(directory), [prompt], max_tokens=8)
        assert tokens == Reference(directory).greedy(prompt, 8)[0]
        found.append(logprobs)
    assert (found[0] == found[1]) == (name == "gemma3")
