"""The tokens and logits of transformers' greedy generation, float32, for every supported architecture.

Models with the gated delta rule are compared with transformers in float64.

Every slot that nobody owns holds NaN in all of these (`checkpoints.new_engine`).
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Ministral3Config, Olmo3Config, SmolLM3Config

from paged import LLMEngine, RequestOutput, SamplingParams
from paged.architectures.config import DEMO
from paged.architectures.families.table import ARCHITECTURES
from paged.runner.model_runner import ModelRunner
from paged.sampling.sampler import Draw
from paged.scheduler.schedule import Schedule
from tests.support.checkpoints import (
    CONFIGS,
    HYBRIDS,
    LONG,
    MIXTURES,
    SHAPE,
    STRETCHED,
    Reference,
    assert_all_free,
    checkpoint,
    exact_reference,
    new_engine,
    ragged_prompts,
    random_model,
    reference,
)

# Norms of outputs that are nearly 0 amplify the errors of both.
EXACT = ("qwen3_5", "qwen3_5_moe", "qwen3_next")


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)


def tokens_of(outputs: Sequence[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


@contextmanager
def recorded_logits(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[tuple[int, ...], Tensor]]:
    """Record logits by the tokens that they follow."""
    logits_after: dict[tuple[int, ...], Tensor] = {}
    sampled: list[tuple[int, ...]] = []  # the tokens of the step's sampled requests
    execute = ModelRunner.execute
    run = Draw.run

    def executing(runner: ModelRunner, schedule: Schedule) -> Any:
        sampled[:] = [tuple(request.token_ids) for request in schedule.sampled_requests]
        return execute(runner, schedule)

    def recording(draw: Draw, logits: Tensor, *others: Any) -> Any:
        logits_after.update(zip(sampled, logits.cpu().clone(), strict=True))
        return run(draw, logits, *others)

    with monkeypatch.context() as patch:
        patch.setattr(ModelRunner, "execute", executing)
        patch.setattr(Draw, "run", recording)
        yield logits_after


def assert_matches(
    engine: LLMEngine,
    oracle: Reference,
    prompts: list[list[int]],
    max_tokens: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with recorded_logits(monkeypatch) as logits_after:
        outputs = engine.generate(prompts, greedy(max_tokens), use_tqdm=False)
    assert_all_free(engine)
    for prompt, ours in zip(prompts, tokens_of(outputs), strict=True):
        tokens, expected = oracle.greedy(prompt, max_tokens)  # of the first alone, if that differs
        assert ours == tokens
        logits = torch.stack([logits_after[(*prompt, *tokens[:i])] for i in range(max_tokens)])
        torch.testing.assert_close(logits, expected.float(), atol=1e-4, rtol=0)


def lengths_for(name: str, count: int) -> list[int]:
    """Return prompt lengths from 1 to 400; for stretched ropes some around max_position_embeddings 64."""
    rng = random.Random(count)
    if name in STRETCHED:
        return [1, 58, 64, 65, *(rng.randint(2, 240) for _ in range(count - 4))][:count]
    if name in LONG:  # the first tokens of some are drawn with the short factors, later ones with the long
        return [400, 52, 53, 60, 63, 64, 65, *(rng.randint(1, 240) for _ in range(count - 7))][:count]
    return [1, 400, 24, 25, *(rng.randint(2, 120) for _ in range(count - 4))][:count]


def test_every_supported_architecture_is_tested():
    assert {CONFIGS[name]().model_type for name in CONFIGS} == {
        known.model_type for known in ARCHITECTURES.values()
    }


@pytest.mark.parametrize("backend", ["numba", "torch"])
@pytest.mark.parametrize("name", CONFIGS)
def test_ragged_batch_matches_transformers(name, backend, monkeypatch):
    count, max_tokens = (5, 5) if name in MIXTURES or name in HYBRIDS else (10, 12)
    prompts = ragged_prompts(lengths_for(name, count))
    engine = new_engine(checkpoint(name), attention_backend=backend)
    oracle = exact_reference(name) if name in EXACT else reference(name)
    assert_matches(engine, oracle, prompts, max_tokens, monkeypatch)


@pytest.mark.parametrize("count", [1, 64])
def test_any_number_of_prompts_matches_transformers(count, monkeypatch):
    rng = random.Random(count)
    prompts = ragged_prompts([400, *(rng.randint(1, 100) for _ in range(count - 1))], seed=count)
    assert_matches(new_engine(checkpoint("qwen2-mixed")), reference("qwen2-mixed"), prompts, 6, monkeypatch)


# Every architecture but those whose layers others have: Ministral's the mixed Qwen 2, Granite's that with
# windows, OLMo 2's OLMo 3, and those of the unified Gemma 4 the other one. Together they have biases, norms,
# tied embeddings, stretched rope and windows.
@pytest.mark.parametrize(
    "name",
    [
        *("llama-llama3", "mistral", "ministral3", "qwen2-mixed", "qwen3", "phi3", "granite-swa"),
        *("olmo3", "gemma2", "gemma3", "smollm3", "glm4", "gpt2", "gpt_neox"),
        *("gemma4", "gemma4-keys-as-values", "qwen3_5", "nemotron_h", "falcon_h1-norm"),
    ],
)
def test_triton_kernels_match_transformers(name, monkeypatch):
    # On a CPU the kernels run in Triton's interpreter, a thousand times slower: few short prompts.
    engine = new_engine(checkpoint(name), device="auto", attention_backend="triton", num_blocks=24)
    assert engine.runner.model.kernels.name == "triton"
    assert_matches(engine, reference(name), ragged_prompts([1, 30]), 2, monkeypatch)


def test_demo_model_matches_transformers(monkeypatch):
    engine = new_engine("demo", skip_tokenizer_init=False)
    texts = ["def add(a, b):", "The", "import os\nimport sys\n\n\nclass Path:\n    def"]
    prompts = [engine.tokenizer.encode(text) for text in texts]
    oracle = Reference(DEMO)
    assert_matches(engine, oracle, prompts, 16, monkeypatch)
    for text, prompt in zip(texts, prompts, strict=True):
        (output,) = engine.generate(text, greedy(16), use_tqdm=False)
        expected, _ = oracle.greedy(prompt, 16)
        assert output.outputs[0].token_ids == expected
        assert output.outputs[0].text == engine.tokenizer.decode([*prompt, *expected])[len(text) :]


def test_demo_model_matches_transformers_on_ragged_batches(monkeypatch):
    engine = new_engine("demo")
    prompts = ragged_prompts([1, 2, 15, 16, 17, 64, 200, 400])
    assert_matches(engine, Reference(DEMO), prompts, 8, monkeypatch)


def test_stop_strings_and_ids_end_where_those_of_transformers_do():
    engine = new_engine("demo", skip_tokenizer_init=False)
    text, model, tokenizer = "class Path:\n    def __init__(self", Reference(DEMO).model, engine.tokenizer.hf
    ids = torch.tensor([engine.tokenizer.encode(text)])
    (free,) = tokens_of(engine.generate(text, greedy(48), use_tqdm=False))
    middle = engine.tokenizer.decode(free[20:24])
    cases: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"stop": [middle[1:]]}, {"stop_strings": [middle[1:]], "tokenizer": tokenizer}),
        (
            {"stop": ["never seen", middle[-2:]]},
            {"stop_strings": ["never seen", middle[-2:]], "tokenizer": tokenizer},
        ),
        ({"stop_token_ids": free[9:11]}, {"eos_token_id": free[9:11]}),
    ]
    for ours, theirs in cases:
        params = SamplingParams(temperature=0.0, max_tokens=48, **ours)
        (tokens,) = tokens_of(engine.generate(text, params, use_tqdm=False))
        expected = model.generate(ids, max_new_tokens=48, do_sample=False, **theirs)[0, ids.shape[1] :]
        assert tokens == expected.tolist()
        assert len(tokens) < 48


def test_demo_model_has_learned():
    engine = new_engine("demo", skip_tokenizer_init=False)
    # Python that it was not trained on. Guessing uniformly would cost 8.3 nats per token.
    text = Path(__file__).read_text(encoding="utf-8")[:4000]
    ids = torch.tensor([engine.tokenizer.encode(text)])
    with torch.no_grad():
        loss = Reference(DEMO).model(ids, labels=ids).loss.item()
    assert loss < 4.5


# Options that must not change the tokens of a request.
VARIANTS: dict[str, dict[str, Any]] = {
    "budget1": {"max_num_batched_tokens": 1},
    "budget7": {"max_num_batched_tokens": 7},
    "budget512": {"max_num_batched_tokens": 512},
    "block8": {"block_size": 8},
    "block64": {"block_size": 64},
    "seqs2": {"max_num_seqs": 2},
    "preemption": {"num_blocks": 12, "block_size": 8},
    "preemption-budget7": {"num_blocks": 12, "block_size": 8, "max_num_batched_tokens": 7},
}
NUM_GROUPS = {"qwen2-mixed": 2, "llama-dynamic": 1}


@pytest.mark.parametrize("name", ["qwen2-mixed", "llama-dynamic"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_tokens_do_not_depend_on(variant, name):
    prompts = ragged_prompts([30, 1, 61, 8, 16, 17, 63])
    expected = [reference(name).greedy(prompt, 20)[0] for prompt in prompts]
    options = VARIANTS[variant]
    if "num_blocks" in options:  # each layer group needs as many
        options = {**options, "num_blocks": options["num_blocks"] * NUM_GROUPS[name]}
    engine = new_engine(checkpoint(name), **options)
    outputs = engine.generate(prompts, greedy(20), use_tqdm=False)
    assert tokens_of(outputs) == expected
    assert_all_free(engine)
    preemptions = sum(output.metrics.num_preemptions for output in outputs)
    assert (preemptions > 0) == ("preemption" in variant)


@pytest.mark.parametrize("name", ["qwen2-mixed", "llama-dynamic"])
def test_tokens_do_not_depend_on_neighbours(name):
    prompts = ragged_prompts([30, 1, 61, 8, 16, 17, 63])
    expected = [reference(name).greedy(prompt, 20)[0] for prompt in prompts]
    engine = new_engine(checkpoint(name))
    assert [tokens_of(engine.generate(p, greedy(20), use_tqdm=False))[0] for p in prompts] == expected
    assert tokens_of(engine.generate(prompts[::-1], greedy(20), use_tqdm=False)) == expected[::-1]
    # Added one by one, a few steps apart.
    finished = {}
    for i, prompt in enumerate(prompts):
        engine.add_request(str(i), prompt, greedy(20))
        for _ in range(3):
            finished |= {o.request_id: o.outputs[0].token_ids for o in engine.step() if o.finished}
    while engine.has_unfinished_requests():
        finished |= {o.request_id: o.outputs[0].token_ids for o in engine.step() if o.finished}
    assert [finished[str(i)] for i in range(len(prompts))] == expected
    assert_all_free(engine)


@pytest.mark.parametrize(
    ("options", "lengths", "max_tokens"),
    [
        ({"max_model_len": 64}, [1, 24, 52], 12),
        ({"num_blocks": 10}, [61, 24, 63], 12),
        ({"device": "auto", "attention_backend": "triton"}, [63, 5], 4),
    ],
)
def test_longrope_matches_transformers(options, lengths, max_tokens, monkeypatch):
    """Where no request grows long, where there are few blocks, and by Triton's kernels."""
    engine = new_engine(checkpoint("phi3-longrope"), **options)
    assert_matches(engine, reference("phi3-longrope"), ragged_prompts(lengths), max_tokens, monkeypatch)


LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0] * 8,
    "long_factor": [1.0, 1.5, 2.0, 3.0, 5.0, 8.0, 13.0, 20.0],
    "original_max_position_embeddings": 64,
}
WITH_LONGROPE = {
    "beside layers without rope": lambda: SmolLM3Config(
        **{**SHAPE, "hidden_size": 64}, no_rope_layers=[1, 0], rope_parameters=LONGROPE
    ),
    "beside another rope": lambda: Olmo3Config(
        **{**SHAPE, "hidden_size": 64, "num_hidden_layers": 5},
        sliding_window=24,
        rope_parameters={
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            "full_attention": LONGROPE,
        },
    ),
    "with factors of queries": lambda: Ministral3Config(
        **SHAPE, rope_parameters={**LONGROPE, "llama_4_scaling_beta": 0.4}
    ),
}


@pytest.mark.parametrize("name", WITH_LONGROPE)
def test_longrope_of_some_layers_matches_transformers(name, tmp_path, monkeypatch):
    random_model(WITH_LONGROPE[name]()).save_pretrained(tmp_path)
    engine = new_engine(tmp_path, max_model_len=400)
    assert_matches(engine, Reference(tmp_path), ragged_prompts([100, 66, 5]), 6, monkeypatch)


def test_longrope_without_a_table_matches_transformers(monkeypatch):
    """If the table would be too large, each step computes its angles."""
    monkeypatch.setattr("paged.runner.sizes.MAX_ROPE_TABLE_BYTES", 0)
    engine = new_engine(checkpoint("phi3-longrope"))
    assert engine.runner.model.obstacle_to_recording is not None
    prompts = ragged_prompts([61, 24, 63, 200])
    assert_matches(engine, reference("phi3-longrope"), prompts, 12, monkeypatch)
