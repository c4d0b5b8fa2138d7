"""Requests with LoRA adapters: PEFT's tokens, and the same bits whatever runs beside them."""

import asyncio
import json
import random
import shutil
from dataclasses import replace
from functools import partial

import pytest
import torch
from safetensors.torch import load_file, save_file

from paged import AsyncLLMEngine, ConfigError, LoRARequest, RequestError, SamplingParams, UsageError
from paged.base.errors import UnknownArgumentError
from tests.support.checkpoints import CONFIGS, checkpoint, edit_json, new_engine, ragged_prompts, random_model
from tests.support.gguf_adapters import write_adapter
from tests.support.gguf_models import write_model
from tests.support.lora_adapters import (
    EXPERTS,
    adapter,
    adapter_of,
    adapter_of_experts,
    by_expert,
    by_peft,
    drawn_config,
    logprobs_by,
    logprobs_of,
    of_peft,
    request,
    with_experts,
)

GREEDY = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)
FAMILIES = (
    "llama", "llama-tied-bias", "mistral", "ministral3", "qwen2", "qwen3", "phi3", "granite", "olmo2",
    "gemma2", "gemma3", "gemma4", "gemma4-keys-as-values", "smollm3", "glm4", "gpt2", "gpt_neox",
    "qwen3_moe", "gpt_oss", "qwen3_5", "qwen3_next", "lfm2", "nemotron_h", "granitemoehybrid-dense",
    "falcon_h1",
)  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("adapters")


def ids(prompts):
    return [{"prompt_token_ids": prompt} for prompt in prompts]


def run(engine, prompts, requests, params=GREEDY):
    outputs = engine.generate(ids(prompts), params, lora_request=requests, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.mark.parametrize("model", FAMILIES)
def test_tokens_and_logits_are_those_of_peft(model, folder):
    """Two drawn adapters and none in one batch; all lines of a batch differ from each other's adapters."""
    paths = [adapter(folder, model, seed) for seed in (0, 1)]
    engine = new_engine(checkpoint(model), enable_lora=True, max_loras=2, max_lora_rank=8)
    prompts = ragged_prompts([5, 9, 17])
    chosen = [paths[0], paths[1], None]
    requests = [path and request(path, i + 1) for i, path in enumerate(chosen)]
    expected = [by_peft(model, path, prompt, 10) for path, prompt in zip(chosen, prompts, strict=True)]
    assert run(engine, prompts, requests) == expected
    expected = logprobs_of(of_peft(model, paths[0]), prompts[1])
    torch.testing.assert_close(logprobs_by(engine, prompts[1], requests[0]), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("model", EXPERTS)
def test_tokens_and_logits_of_adapted_experts_are_those_of_peft(model, folder):
    """Also of what is beside them, and of a stack alone."""
    paths = [adapter_of_experts(folder, model, seed) for seed in (0, 1)]
    options = {"max_lora_rank": 8, "lora_target_modules": with_experts(model)}
    engine = new_engine(checkpoint(model), enable_lora=True, max_loras=2, **options)
    prompts = ragged_prompts([5, 9])
    requests = [request(path, i + 1) for i, path in enumerate(paths)]
    expected = [by_peft(model, path, prompt, 6) for path, prompt in zip(paths, prompts, strict=True)]
    assert run(engine, prompts, requests, replace(GREEDY, max_tokens=6)) == expected
    expected = logprobs_of(of_peft(model, paths[0]), prompts[1])
    torch.testing.assert_close(logprobs_by(engine, prompts[1], requests[0]), expected, rtol=0, atol=1e-4)


def test_matrices_of_each_expert_are_those_of_a_stack(folder, tmp_path):
    """As adapters have them that were trained with transformers 4. PEFT converts them."""
    config = {"r": 3, "target_modules": ["q_proj"], "target_parameters": ["gate_up_proj", "down_proj"]}
    stacked = adapter_of("mixtral", folder / "mixtral", config, scale=0.2)
    path = by_expert(stacked, "mixtral", tmp_path / "by expert")
    options = {"enable_lora": True, "max_loras": 2, "lora_target_modules": ["q_proj", "experts"]}
    engine = new_engine(checkpoint("mixtral"), **options)
    prompts = ragged_prompts([9, 4])
    expected = [by_peft("mixtral", path, prompt, 10) for prompt in prompts]
    assert run(engine, prompts, [request(path, 1), request(stacked, 2)]) == expected


def test_experts_without_slots_are_refused_with_the_option_that_gives_them(folder):
    path = adapter_of_experts(folder, "qwen3_moe", 0)
    engine = new_engine(checkpoint("qwen3_moe"), enable_lora=True, lora_target_modules=["q_proj", "o_proj"])
    message = (
        r"model\.layers\.\d\.mlp\.experts\.\w+ is adapted, but .*: experts have slots only where "
        r"lora_target_modules names 'experts', as in \['q_proj', 'o_proj', 'experts'\]"
    )
    with pytest.raises(RequestError, match=message):
        run(engine, [[1, 2]], request(path, 1))


@pytest.mark.parametrize(
    ("model", "dtype"), [("qwen3", "bfloat16"), ("qwen3_5", "float32"), ("qwen3_moe", "bfloat16")]
)
def test_bits_do_not_depend_on_other_adapters(model, dtype, folder):
    """Chunked, preempted both ways, over a prefix cache, with more adapters than slots, drafted, sampled."""
    generator = random.Random(dtype)
    write_one = adapter_of_experts if model in EXPERTS else adapter
    paths = [write_one(folder, model, seed) for seed in range(4)]
    common = ragged_prompts([40], seed=7)[0]
    prompts = [
        (common[: generator.choice([0, 16, 40])] + own)[: generator.randint(2, 60)] or own
        for own in ragged_prompts([generator.randint(1, 30) for _ in range(24)], seed=3)
    ]
    requests = [
        generator.choice([None, *(request(path, i + 1) for i, path in enumerate(paths))]) for _ in prompts
    ]
    params = [
        SamplingParams(
            temperature=generator.choice([0.0, 0.8]), max_tokens=14, seed=i, logprobs=2, ignore_eos=True
        )
        for i in range(len(prompts))
    ]
    options = {"enable_lora": True, "max_lora_rank": 8, "dtype": dtype}
    options["lora_target_modules"] = with_experts(model) if model in EXPERTS else None
    alone = new_engine(checkpoint(model), **options, enable_prefix_caching=False, max_num_seqs=1)

    def results(engine, **given):
        outputs = engine.generate(ids(prompts), params, lora_request=requests, use_tqdm=False, **given)
        return [
            (
                list(o.outputs[0].token_ids),
                [p[t].logprob for p, t in zip(o.outputs[0].logprobs, o.outputs[0].token_ids, strict=True)],
            )
            for o in outputs
        ]

    expected = results(alone)
    for own in (
        {"max_loras": 2, "max_num_batched_tokens": 13, "block_size": 8, "num_blocks": 40, "max_num_seqs": 6},
        {"max_loras": 4, "num_blocks": 24, "block_size": 8, "swap_space": 0.01, "preemption_mode": "swap"},
        {"max_loras": 3, "speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
    ):
        engine = new_engine(checkpoint(model), **options, **own)
        assert results(engine) == expected
        engine.scheduler.check()
        assert not engine.scheduler.has_unfinished()


def test_models_and_adapters_are_in_safetensors_or_gguf(folder, tmp_path):
    config = {"r": 4, "lora_alpha": 6, "target_modules": ["q_proj", "v_proj", "down_proj"]}
    path = adapter_of("llama", folder / "either", config)
    file = write_adapter(tmp_path / "adapter.gguf", "llama", path, 6.0)
    model = write_model(tmp_path / "model.gguf", random_model(CONFIGS["llama"]()))
    prompts = ragged_prompts([9, 4])
    expected = [by_peft("llama", path, prompt, 10) for prompt in prompts]
    requests = [request(path, 1), request(file, 2)]
    for base in (checkpoint("llama"), model):
        engine = new_engine(base, enable_lora=True, max_loras=2, max_lora_rank=8)
        assert run(engine, prompts, requests) == expected


# Forms of weights that nothing is merged into, and drafts, which a model makes without an adapter.
FORMS = {
    "int8": {"quantization": "int8", "dtype": "bfloat16"},
    "int4": {"quantization": "int4", "dtype": "float32"},
    "draft": {},  # the model itself
    "suffix": {"speculative_config": {"method": "suffix", "num_speculative_tokens": 4, "adaptive": False}},
}


@pytest.mark.parametrize("name", FORMS)
def test_other_forms_of_weights_and_drafts_change_nothing(name, folder):
    """A batch of two adapters and none has the bits of each request alone, without drafts."""
    model = "demo" if name == "int4" else "llama"  # tiny ones have no whole groups
    own = {**FORMS[name], "enable_lora": True, "max_lora_rank": 8}
    if name == "draft":
        drafts = {"model": str(checkpoint(model)), "num_speculative_tokens": 3, "adaptive": False}
        own["speculative_config"] = drafts
    paths = [adapter_of(model, folder / f"{model}-{seed}", OF_FORMS, seed, 0.2) for seed in (0, 1)]
    requests = [None, *(request(path, number) for number, path in enumerate(paths, 1))]
    prompts = [[*range(20, 30), *range(20, 28)]] * 3
    together = new_engine(checkpoint_of(model), **own, max_loras=2)
    found = [run(together, prompts, requests) for _ in range(2)]  # suffixes of outputs are known by then
    alone = new_engine(checkpoint_of(model), **{**own, "speculative_config": None}, max_num_seqs=1)
    expected = run(alone, prompts, requests)
    assert found == [expected, expected]
    assert len({tuple(each) for each in expected}) == 3
    if "speculative_config" in own:
        assert together.stats().num_drafts > 0


OF_FORMS = {"r": 4, "target_modules": ["q_proj", "v_proj", "gate_proj", "down_proj"]}


def checkpoint_of(model):
    return model if model == "demo" else checkpoint(model)


def test_an_adapter_of_zeros_changes_no_bit(folder):
    path = adapter(folder, "llama", 2, scale=0.0)
    engine = new_engine(checkpoint("llama"), enable_lora=True, max_lora_rank=8, dtype="bfloat16")
    prompts = ragged_prompts([3, 20])
    params = SamplingParams(temperature=0.0, max_tokens=8, logprobs=3, ignore_eos=True)
    outputs = [
        engine.generate(ids(prompts), params, lora_request=own, use_tqdm=False)
        for own in (None, request(path, 1))
    ]
    of_base, of_zeros = ([o.outputs[0].logprobs for o in each] for each in outputs)
    assert of_base == of_zeros


def test_blocks_are_shared_within_an_adapter_alone(folder):
    engine = new_engine(checkpoint("llama"), enable_lora=True, max_lora_rank=8, max_cpu_loras=8)
    prompt = ragged_prompts([40])
    # They differ in their numbers alone.
    config = drawn_config("llama", 0)
    paths = [adapter_of("llama", folder / f"same-config-{seed}", config, seed) for seed in (0, 1)]
    first, second = (request(path, number) for number, path in enumerate(paths, 1))

    def cached(own):
        return engine.generate(ids(prompt), GREEDY, lora_request=own, use_tqdm=False)[0].num_cached_tokens

    assert [cached(own) for own in (None, first, second)] == [0, 0, 0]
    assert [cached(own) for own in (None, first, second)] == [32, 32, 32]
    again = LoRARequest("the same under another name", 9, first.lora_path)
    assert cached(again) == 32
    assert engine.list_loras() == {1, 2, 9}
    # Read again, it has the same content, so its prefixes are found.
    assert engine.remove_lora(1)
    assert not engine.remove_lora(1)
    assert engine.list_loras() == {2, 9}
    assert cached(first) == 32


def test_prefixes_are_kept_for_an_adapter_by_its_content(folder, tmp_path):
    first, second = (request(adapter(folder, "llama", seed), seed + 1) for seed in (0, 1))
    prompt, other = ids(ragged_prompts([40, 33]))
    options = {"enable_lora": True, "max_lora_rank": 8}
    engine = new_engine(checkpoint("llama"), **options)

    def cached(engine, own, prompt=prompt):
        (output,) = engine.stream(prompt, SamplingParams(temperature=0, max_tokens=1), lora_request=own)
        return output.num_cached_tokens, output.outputs[0].token_ids

    assert engine.pin_prefix(prompt, first) == 32
    assert [cached(engine, own)[0] for own in (None, second, first)] == [0, 0, 32]
    with pytest.raises(UsageError, match="not pinned; 1 others are"):
        engine.unpin_prefix(prompt)
    with pytest.raises(UsageError, match="pinned already"):
        engine.pin_prefix(prompt, lora_request=first)
    cached(engine, first, other)
    assert engine.save_prefix(tmp_path / "kv", prompt, lora_request=first) == 2
    engine.unpin_prefix(prompt, first)
    assert engine.stats().num_pinned_blocks == 0
    another = new_engine(checkpoint("llama"), **options)
    assert another.load_prefix(tmp_path / "kv") == 2
    (unseen,) = another.generate_iter(prompt, GREEDY, lora_request=second)
    assert unseen.num_cached_tokens == 0
    renamed = LoRARequest("renamed", 7, first.lora_path)
    assert cached(another, renamed) == (32, cached(engine, first)[1])
    assert cached(another, None)[0] == cached(another, renamed, other)[0] == 0
    unread = replace(second, lora_path=str(tmp_path))
    for call in (engine.pin_prefix, engine.unpin_prefix, partial(engine.save_prefix, tmp_path / "none")):
        for wrong, message in (("sql", "must be a LoRARequest"), (unread, "contradicts")):
            with pytest.raises(RequestError, match=message):
                call(prompt, lora_request=wrong)
    with pytest.raises(RequestError, match="no full block of this prompt is cached"):
        engine.save_prefix(tmp_path / "none", other, second)
    with pytest.raises(RequestError, match="lora_request needs a prompt"):
        engine.save_prefix(tmp_path / "none", lora_request=first)
    with pytest.raises(RequestError, match="enable_lora=True, got lora_request LoRARequest"):
        new_engine(checkpoint("llama")).pin_prefix(prompt, first)


def test_forks_samples_beams_scores_and_embeddings_have_the_adapter(folder):
    model, path = "qwen3", adapter(folder, "qwen3", 0)
    own = request(path, 1)
    engine = new_engine(checkpoint(model), enable_lora=True, max_lora_rank=8)
    (prompt,) = ragged_prompts([9])
    expected = by_peft(model, path, prompt, 10)
    engine.add_request("parent", {"prompt_token_ids": prompt}, GREEDY, lora_request=own)
    for _ in range(4):
        engine.step()
    engine.fork("parent", "child", GREEDY)
    found = {}
    while engine.has_unfinished_requests():
        found |= {o.request_id: list(o.outputs[0].token_ids) for o in engine.step() if o.finished}
    assert found == {"parent": expected, "child": expected}
    several = SamplingParams(n=3, temperature=0.9, seed=1, max_tokens=6, ignore_eos=True)
    drawn = [
        o.token_ids
        for o in engine.generate(ids([prompt]), several, lora_request=own, use_tqdm=False)[0].outputs
    ]
    apart = [o.token_ids for o in engine.generate(ids([prompt]), several, use_tqdm=False)[0].outputs]
    assert drawn != apart
    (score,) = engine.score({"prompt_token_ids": prompt}, [expected[:2]], lora_request=own)
    (base,) = engine.score({"prompt_token_ids": prompt}, [expected[:2]])
    assert score.logprob > base.logprob


def write(folder, name, path, edit=None, **config):
    """Copy an adapter with another config or tensors."""
    copy = folder / name
    copy.mkdir()
    tensors = load_file(path / "adapter_model.safetensors")
    save_file(edit(tensors) if edit else tensors, copy / "adapter_model.safetensors")
    (copy / "adapter_config.json").write_text((path / "adapter_config.json").read_text())
    edit_json(copy / "adapter_config.json", **config)
    return copy


def first(tensors, change):
    name = next(iter(tensors))
    return {**tensors, name: change(tensors[name])}


WRONG = {
    "dora": ({"use_dora": True}, None, "use_dora True is not supported: DoRA"),
    "bias": ({"bias": "all"}, None, "bias 'all' is not supported"),
    "saved": ({"modules_to_save": ["lm_head"]}, None, "modules_to_save .* whole weights"),
    "type": ({"peft_type": "IA3"}, None, "peft_type 'IA3' is not supported"),
    "start": ({"init_lora_weights": "pissa"}, None, "init_lora_weights 'pissa'"),
    "unknown": ({"new_method": "x"}, None, "new_method 'x' is not supported"),
    "zero": ({"new_method": 0}, None, "new_method 0 is not supported"),
    "rank": ({"r": 0}, None, "r must be an int of at least 1, got 0"),
    "alpha": ({"lora_alpha": "much"}, None, "lora_alpha must be"),
    "large alpha": ({"lora_alpha": 1e300}, None, "lora_B.* has numbers that are not finite once"),
    "pattern": ({"rank_pattern": {"(": 2}}, None, "'\\(' is no regular expression"),
    "other rank": ({"r": 77, "rank_pattern": {}}, None, "must both have the rank 77"),
    "nan": ({}, lambda t: first(t, lambda x: x * torch.nan), "not finite"),
    "no tensors": ({}, lambda _: {}, "would change nothing"),
    "half": ({}, lambda t: dict([*t.items()][:1]), "is there without"),
    "foreign": (
        {},
        lambda t: {**t, "base_model.model.lm_head.lora_embedding_A": torch.ones(2, 2)},
        "lora_embedding_A",
    ),
    "elsewhere": (
        {},
        lambda t: {k.replace("layers.0.", "layers.9."): x for k, x in t.items()},
        "layers.9.* is adapted, but the engine has no slots",
    ),
    "head": (
        {},
        lambda t: {k.replace("model.layers.0.self_attn.", "lm_head."): x for k, x in t.items()},
        "no slots|without",
    ),
    "shape": (
        {},
        lambda t: {k: x[:, :-1].contiguous() if "lora_A" in k else x for k, x in t.items()},
        "but its lora_A of shape",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_adapter_is_refused_for_its_request_alone(name, folder, tmp_path, engine):
    config, edit, message = WRONG[name]
    path = write(tmp_path, "wrong", adapter(folder, "llama", 3), edit, **config)
    with pytest.raises(RequestError, match=f"adapter 'wrong' cannot be used: .*{message}"):
        engine.generate(
            ids([[1, 2]]), GREEDY, lora_request=LoRARequest("wrong", 50, str(path)), use_tqdm=False
        )
    assert 50 not in engine.list_loras()
    good = request(adapter(folder, "llama", 3), 4)
    assert run(engine, [[1, 2, 3]], good) == [by_peft("llama", adapter(folder, "llama", 3), [1, 2, 3], 10)]


@pytest.fixture(scope="module")
def engine():
    return new_engine(checkpoint("llama"), enable_lora=True, max_loras=2, max_lora_rank=8)


def test_what_is_no_adapter_is_named(folder, tmp_path, engine):
    path = adapter(folder, "llama", 3)
    pickled = tmp_path / "pickled"
    pickled.mkdir()
    (pickled / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA"}))
    (pickled / "adapter_model.bin").write_bytes(b"")
    cases = [
        (LoRARequest("p", 60, str(pickled)), "is a pickle"),
        (LoRARequest("n", 61, str(tmp_path / "nothing" / "here")), "no such directory"),
        (LoRARequest("e", 62, str(tmp_path)), "adapter_config.json and adapter_model.safetensors"),
        (LoRARequest("f", 63, __file__), "is a file; give the directory that holds adapter_config.json"),
        (LoRARequest("l", 64, "l" * 5000), "l cannot be read: File name too long"),
        (LoRARequest("h", 65, "~nobody-of-this-name/x"), "x cannot be read: "),
        ("sql", "lora_request must be a LoRARequest, got 'sql'"),
    ]
    for own, message in cases:
        with pytest.raises(RequestError, match=message):
            engine.generate(ids([[1, 2]]), GREEDY, lora_request=own, use_tqdm=False)
    engine.add_lora(LoRARequest("one", 70, str(path)))
    other = adapter(folder, "llama", 1)
    for own in (
        LoRARequest("one", 71, str(path)),
        LoRARequest("two", 70, str(path)),
        LoRARequest("one", 70, str(other)),
    ):
        with pytest.raises(RequestError, match="contradicts 'one' with number 70"):
            engine.add_lora(own)
    for number in ("one", True, 0):
        with pytest.raises(RequestError, match="lora_id must be"):
            engine.remove_lora(number)
    assert engine.add_lora(LoRARequest("one", 70, str(other), load_inplace=True))
    assert run(engine, [[1, 2, 3]], LoRARequest("one", 70, str(other))) == [
        by_peft("llama", other, [1, 2, 3], 10)
    ]
    for wrong in ({"lora_name": ""}, {"lora_int_id": 0}, {"lora_int_id": True}, {"lora_path": None}):
        with pytest.raises(RequestError, match=next(iter(wrong))):
            LoRARequest(**{"lora_name": "a", "lora_int_id": 1, "lora_path": "b", **wrong})
    named = {"lora_name": "a", "lora_int_id": 1, "lora_path": "b"}
    assert LoRARequest(**named, base_model_name=None) == LoRARequest("a", 1, "b")
    with pytest.raises(RequestError, match="got base_model_name='x': an adapter is of the engine's model"):
        LoRARequest(**named, base_model_name="x")
    with pytest.raises(UnknownArgumentError, match="'lora_pat'; did you mean 'lora_path'"):
        LoRARequest("a", 1, lora_pat="b")


def test_other_weights_under_a_name_share_no_block(folder, tmp_path):
    """Memory holds one adapter. Its files change while another one is there."""
    first, second = (adapter(folder, "llama", seed) for seed in (0, 1))
    own = shutil.copytree(first, tmp_path / "own")
    prompt = ragged_prompts([40])[0]
    mine, other = LoRARequest("mine", 1, str(own)), request(second, 2)

    async def begin():
        async with AsyncLLMEngine.from_engine(new_engine(checkpoint("llama"), **options)) as engine:

            async def cached(lora_request):
                stream = engine.generate({"prompt_token_ids": prompt}, GREEDY, lora_request=lora_request)
                (output,) = [output async for output in stream if output.finished]
                return output.num_cached_tokens, list(output.outputs[0].token_ids)

            assert await engine.add_lora(mine)
            assert not await engine.add_lora(mine)
            assert await cached(mine) == (0, by_peft("llama", first, prompt, 10))
            for is_pinned in (True, False):
                pinning = engine.pin_prefix(
                    {"prompt_token_ids": prompt}, is_pinned=is_pinned, lora_request=mine
                )
                assert await pinning == 32
            assert (await cached(other))[0] == 0
            shutil.rmtree(own)
            shutil.copytree(second, own)
            with pytest.raises(RequestError, match="has other weights than when it was loaded"):
                await cached(mine)
            assert await engine.add_lora(replace(mine, load_inplace=True))
            # Its weights are those of the other one now, under another name, so their blocks are shared.
            assert await cached(mine) == (32, by_peft("llama", second, prompt, 10))
            assert await engine.list_loras() == {1, 2}
            assert [await engine.remove_lora(1), await engine.remove_lora(1)] == [True, False]

    options = {"enable_lora": True, "max_lora_rank": 8, "max_cpu_loras": 1}
    asyncio.run(begin())


def test_numbers_beyond_the_dtype_of_the_engine_are_refused(folder, tmp_path):
    path = write(tmp_path, "large", adapter(folder, "llama", 3), lambda t: first(t, lambda x: x * 0 + 7e4))
    engine = new_engine(checkpoint("llama"), enable_lora=True, max_lora_rank=8, dtype="float16")
    with pytest.raises(RequestError, match="reach 70000; the largest number of the engine's dtype is 65504"):
        engine.add_lora(request(path, 1))


def test_ranks_and_targets_bound_what_fits(folder):
    path = adapter(folder, "qwen2", 1)
    for options, message in (
        ({"max_lora_rank": 1}, "has rank .*max_lora_rank is 1"),
        ({"max_lora_rank": 8, "lora_target_modules": ["q_proj", "nowhere_else_q"]}, ""),
    ):
        if not message:
            with pytest.raises(
                ConfigError, match="'nowhere_else_q' names no matrix of the model, which has down_proj"
            ):
                new_engine(checkpoint("qwen2"), enable_lora=True, **options)
            continue
        with pytest.raises(RequestError, match=message):
            run(new_engine(checkpoint("qwen2"), enable_lora=True, **options), [[1]], request(path, 1))


def test_options_without_adapters_are_refused(folder):
    engine = new_engine(checkpoint("llama"))
    with pytest.raises(RequestError, match="enable_lora=True"):
        run(engine, [[1, 2]], request(adapter(folder, "llama", 3), 1))
    with pytest.raises(UsageError, match="enable_lora=True"):
        engine.list_loras()
    for wrong, message in (
        ({"max_loras": 2}, "max_loras 2 has no effect without enable_lora"),
        ({"lora_target_modules": ["q_proj"]}, "has no effect without enable_lora"),
        ({"enable_lora": True, "max_loras": 3, "max_cpu_loras": 2}, "max_cpu_loras must be"),
        ({"enable_lora": True, "lora_target_modules": "q_proj"}, "must be a list of names"),
        ({"enable_lora": 1}, "enable_lora must be"),
    ):
        with pytest.raises(ConfigError, match=message):
            new_engine(checkpoint("llama"), **wrong)
