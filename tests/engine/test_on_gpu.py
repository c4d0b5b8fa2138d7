"""The engine on a GPU: in float32 the tokens of transformers, and where that has no equivalent, of a CPU.

On "cuda" these run by `python -m benchmarks.gpu`. CI runs the same tests on its CPU, or on the late device.
"""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import pytest
import torch

from paged import LLMEngine, SamplingParams
from paged.architectures.hf_config import read_config
from paged.device.devices import target_of
from paged.kernels.gpu.target import check_target, in_interpreter
from paged.model.decoder import Decoder
from paged.runner.model_runner import ModelRunner
from paged.runner.plan import StepPlan
from paged.scheduler.schedule import Schedule
from tests.steps import KINDS, TABLE, counts_in
from tests.support.checkpoints import (
    CONFIGS,
    assert_all_free,
    checkpoint,
    new_engine,
    ragged_prompts,
    reference,
)
from tests.support.engine_uses import (
    CASES,
    Result,
    Tokens,
    draws_of_a_gpu,
    generated,
    greedy,
    run_to_end,
)
from tests.support.fake_cuda import lacks
from tests.support.late_cuda import late_cuda
from tests.support.parameter_changes import PROMPT, changed_params

CUDA = pytest.param("cuda", marks=pytest.mark.gpu)
LATE = pytest.param(
    "late",
    marks=pytest.mark.skipif(lacks() is not None or not in_interpreter(), reason=lacks() or "a GPU is here"),
)
PLACES = [CUDA, "cpu"]
UNCLEAR = ("gemma2",)  # whose cap leaves no clear leads
MODELS = [name for name in CONFIGS if "," not in name and name not in UNCLEAR]
REHEARSED = ("llama", "phi3-longrope", "gemma3", "gpt2")  # on a CPU: other tests have its tokens of the rest
MAX_TOKENS = 8
# By how much the logit of every token leads the next one's. Rounding in float32 changes logits by 1e-5, and
# where it changes a rounded number of a quantised cache, by up to 3e-3.
MARGIN = 0.05


def options_of(place: str) -> dict[str, Any]:
    if place == "cpu":
        return {"device": place, "attention_backend": "auto"}
    # Few sizes, as each test starts an engine.
    return {"device": place, "attention_backend": "triton", "cudagraph_capture_sizes": [1, 4, 16, 64]}


@pytest.fixture(autouse=True)
def _every_capture_succeeds(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Fail if an engine has logged why a step runs without its CUDA graph. Under memcheck there are none."""
    yield
    told = [record.getMessage() for record in caplog.get_records("call")]
    found = [text for text in told if "CUDA graph" in text and "PYTORCH_NO_CUDA_MEMORY_CACHING" not in text]
    assert not found


@functools.cache
def clear_prompts(name: str, kv: str) -> tuple[list[list[int]], Tokens]:
    """Return prompts whose greedy tokens rounding cannot change, and these tokens, with torch on a CPU."""
    engine, prompts, expected = (
        new_engine(checkpoint(name), kv_cache_dtype=kv, attention_backend="torch"),
        [],
        [],
    )
    for length in (5, 17, 30, 61):
        candidates = ragged_prompts([length] * 60, seed=length)
        outputs = engine.generate(candidates, greedy(MAX_TOKENS, logprobs=2), use_tqdm=False)
        leads = [_lead(output.outputs[0].logprobs) for output in outputs]
        best = max(range(60), key=leads.__getitem__)
        assert leads[best] > MARGIN
        prompts.append(candidates[best])
        expected.append(outputs[best].outputs[0].token_ids)
    return prompts, expected


def _lead(logprobs: Any) -> float:
    """Return the least difference between the two likeliest tokens of a row."""
    pairs = [sorted((entry.logprob for entry in row.values()), reverse=True) for row in logprobs]
    return min(first - second for first, second, *_ in pairs)


# Ways to run greedy requests. Each returns the tokens of every sample, by prompt.


def _plainly(engine: LLMEngine, prompts: list[list[int]]) -> list[Tokens]:
    return [[tokens] for tokens in generated(engine, prompts, greedy(MAX_TOKENS))]


def _under_pressure(engine: LLMEngine, prompts: list[list[int]]) -> list[Tokens]:
    """Run each prompt three times, in a cache with room for less."""
    tokens, stats = generated(engine, prompts * 3, greedy(MAX_TOKENS)), engine.stats()
    swaps = engine.config.preemption_mode == "swap"
    assert stats.num_swap_preemptions if swaps else stats.num_recompute_preemptions, "none was preempted"
    return [tokens[i :: len(prompts)] for i in range(len(prompts))]


def _shared(engine: LLMEngine, prompts: list[list[int]]) -> list[Tokens]:
    """Run prompts with two samples each; again, with hits in the prefix cache; and with a fork of each."""
    two = SamplingParams(n=2, temperature=0.5, top_k=1, max_tokens=MAX_TOKENS, ignore_eos=True)
    outputs = [*engine.generate(prompts, two, use_tqdm=False)]
    again = engine.generate(prompts, greedy(MAX_TOKENS), use_tqdm=False)
    assert [output.num_cached_tokens > 0 for output in again] == [len(p) > 16 for p in prompts]
    for i, prompt in enumerate(prompts):
        engine.add_request(f"parent {i}", prompt, greedy(MAX_TOKENS))
    engine.step()
    engine.step()
    for i in range(len(prompts)):
        engine.fork(f"parent {i}", f"child {i}")
    forked = run_to_end(engine)
    return [
        [*(s.token_ids for s in (*two.outputs, *one.outputs)), forked[f"parent {i}"], forked[f"child {i}"]]
        for i, (two, one) in enumerate(zip(outputs, again, strict=True))
    ]


SMALL = {"block_size": 8, "num_blocks": 24, "enable_prefix_caching": False}
WAYS: dict[str, tuple[dict[str, Any], Callable[[LLMEngine, list[list[int]]], list[Tokens]]]] = {
    "chunked": ({"max_num_batched_tokens": 7}, _plainly),
    "recomputed": ({**SMALL, "preemption_mode": "recompute"}, _under_pressure),
    "swapped": ({**SMALL, "preemption_mode": "swap", "swap_space": 0.01}, _under_pressure),
    "shared": ({}, _shared),
}


def check_greedy(name: str, way: str, place: str, kv: str, expected: Tokens) -> None:
    options, use = WAYS[way]
    options = {"preemption_mode": "recompute", **options}  # takes no host memory
    if "num_blocks" in options:
        options["num_blocks"] = max(24, 12 * len(read_config(checkpoint(name)).layer_groups))
    engine = new_engine(checkpoint(name), kv_cache_dtype=kv, **options_of(place), **options)
    prompts, _ = clear_prompts(name, kv)
    for found, tokens in zip(use(engine, prompts), expected, strict=True):
        assert found == [tokens] * len(found)
    assert_all_free(engine)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("place", "name"),
    [
        *[pytest.param("cuda", name, marks=pytest.mark.gpu) for name in MODELS],
        *[("cpu", name) for name in REHEARSED],
    ],
)
def test_tokens_are_those_of_transformers(place, name, way):
    prompts, _ = clear_prompts(name, "auto")
    expected = [reference(name).greedy(prompt, MAX_TOKENS)[0] for prompt in prompts]
    check_greedy(name, way, place, "auto", expected)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kv", ["int8", "fp8", "bfloat16", "float16"])
@pytest.mark.parametrize("place", PLACES)
def test_tokens_with_a_smaller_cache_are_those_of_a_cpu(place, kv, way):
    if kv == "fp8" and place == "cuda":
        try:
            check_target(torch.float8_e4m3fn, target_of(torch.device("cuda")))
        except ValueError as error:
            pytest.skip(str(error))
    _, expected = clear_prompts("qwen3", kv)
    check_greedy("qwen3", way, place, kv, expected)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("place", PLACES)
def test_results_are_those_of_a_cpu(place, name):
    case = CASES[name]
    with draws_of_a_gpu() if place == "cuda" else nullcontext():
        expected = case.use(case.engine())
    case.use(case.engine(**options_of(place))).assert_like(expected)


def every_parameter(engine: LLMEngine) -> dict[str, Result]:
    """Generate with each field of SamplingParams changed, all in one batch."""
    changed = changed_params()
    outputs = engine.generate([PROMPT] * len(changed), [*changed.values()], use_tqdm=False)
    found = {}
    for name, output in zip(changed, outputs, strict=True):
        rows = [row for sample in output.outputs for row in sample.logprobs or ()]
        rows += [row for row in output.prompt_logprobs or () if row is not None]
        numbers = [entry.logprob for row in rows for entry in row.values()]
        found[name] = Result([sample.token_ids for sample in output.outputs], numbers)
    return found


def new_demo(**options: Any) -> LLMEngine:
    common = {"skip_tokenizer_init": False, "max_model_len": 256, "scheduling_policy": "priority"}
    common["preemption_mode"] = "recompute"
    return new_engine("demo", **common, **options)


@pytest.mark.parametrize("place", PLACES)
def test_tokens_with_every_parameter_are_those_of_a_cpu(place):
    found, expected = (
        every_parameter(new_demo(**options))
        for options in (options_of(place), {"attention_backend": "torch"})
    )
    for name, result in expected.items():
        assert result.tokens or name == "timeout_s"
        found[name].assert_like(result)


@pytest.mark.parametrize("what", [*CASES, "every parameter"])
def test_no_token_depends_on_rounding(what, monkeypatch):
    """What is compared between devices stays the same with logits that are less exact than any device's."""
    exact, results = Decoder.logits, []
    for noise in (0.0, 1e-3):

        def noisy(self: Decoder, hidden: torch.Tensor, noise: float = noise) -> torch.Tensor:
            logits = exact(self, hidden)
            return logits + noise * (2 * torch.rand_like(logits) - 1)

        with draws_of_a_gpu(), monkeypatch.context() as patch:
            patch.setattr(Decoder, "logits", noisy)
            if what == "every parameter":
                found = every_parameter(new_demo(attention_backend="torch"))
                results.append({name: result.tokens for name, result in found.items()})
            else:
                results.append(CASES[what].use(CASES[what].engine()).tokens)
    assert results[0] == results[1]


# Waits

PAIR = [[5, 6, 7], [8, 9]]


@contextmanager
def counted_waits() -> Iterator[Callable[[], int]]:
    """Count the host's waits for the GPU inside: torch warns of all but those for events and devices."""
    explicit = 0

    def counting(wait: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any) -> Any:
            nonlocal explicit
            explicit += 1
            return wait(*args)

        return counted

    event = type(torch.cuda.Event())
    with (
        warnings.catch_warnings(record=True) as caught,
        mock.patch.object(event, "synchronize", counting(event.synchronize)),
        mock.patch.object(torch.cuda, "synchronize", counting(torch.cuda.synchronize)),
    ):
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield lambda: explicit + sum("synchronizing CUDA operation" in str(w.message) for w in caught)
        finally:
            torch.cuda.set_sync_debug_mode("default")


def waits_of_decodes(num_steps: int, *, runs_ahead: bool = False, **params: Any) -> list[int]:
    """Return how often the host waits in each decode step of two requests.

    runs_ahead: with a second step in flight; then return how often it waits in each launch of a decode.
    """
    found, execute, launch = [], ModelRunner.execute, ModelRunner.launch
    engine = LLMEngine(
        str(checkpoint("qwen3")),
        device="cuda",
        attention_backend="triton",
        dtype="float32",
        skip_tokenizer_init=True,
        preemption_mode="recompute",
        num_blocks=64,
        max_model_len=256,
        cudagraph_capture_sizes=[2],
        async_scheduling=runs_ahead,
    )
    sampling = SamplingParams(**{"max_tokens": num_steps + 1, "ignore_eos": True, **params})
    # The first decode may capture its graph, for which it measures memory.
    generated(engine, PAIR, dataclasses.replace(sampling, max_tokens=2))
    with counted_waits() as count:

        def counting(self: ModelRunner, schedule: Schedule) -> Any:
            before = count()
            output = execute(self, schedule)
            if schedule.is_decode:
                found.append(count() - before)
            return output

        def counting_launch(self: ModelRunner, plan: StepPlan) -> Any:
            before = count()
            pending = launch(self, plan)
            if plan.computed.is_decode:
                found.append(count() - before)
            return pending

        name, counted = ("launch", counting_launch) if runs_ahead else ("execute", counting)
        with mock.patch.object(ModelRunner, name, counted):
            generated(engine, PAIR, sampling)
    return found


ROWS: dict[str, dict[str, Any]] = {
    "model qwen3": {"temperature": 0.7},
    "temperature 0": {"temperature": 0.0},
    "logprobs": {"temperature": 0.7, "logprobs": 5},
}


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("place", [CUDA, LATE])
def test_the_host_waits_as_often_as_the_table_says(place, row):
    expected = counts_in(TABLE.read_text())[row, "decode"][KINDS.index("wait")]
    num_steps = 200 if place == "cuda" else 2
    with late_cuda(seed=1) if place == "late" else nullcontext():
        assert waits_of_decodes(num_steps, **ROWS[row]) == [expected] * num_steps


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("place", [CUDA, LATE])
def test_a_launch_waits_for_nothing_while_a_step_is_in_flight(place, row):
    num_steps = 200 if place == "cuda" else 4
    with late_cuda(seed=2) if place == "late" else nullcontext():
        assert waits_of_decodes(num_steps, runs_ahead=True, **ROWS[row]) == [0] * num_steps
