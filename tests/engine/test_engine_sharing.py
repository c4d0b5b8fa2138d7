"""Samples, forks, preemption, deadlines and failures in the engine change no tokens."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from threading import Barrier
from typing import Any
from unittest import mock

import pytest
import torch

from paged import BeamSearchParams, LLMEngine, RequestError, SamplingParams
from paged.base.errors import QueueFullError
from paged.model.decoder import Decoder
from paged.requests.request import RequestOutput
from paged.runner import load as model_load
from tests.support.checkpoints import assert_all_free, checkpoint, new_engine, ragged_prompts, reference

PROMPTS = ragged_prompts([30, 1, 61, 8, 16, 17, 63])


def greedy(max_tokens: int, **options: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, **options)


def sampled(max_tokens: int = 12, **options: Any) -> SamplingParams:
    return SamplingParams(temperature=1.5, max_tokens=max_tokens, ignore_eos=True, **options)


def finish(engine: LLMEngine) -> dict[str, RequestOutput]:
    """Step until no request is left and check invariants after each step. Return the finished outputs."""
    finished = {}
    while engine.has_unfinished_requests():
        finished |= {output.request_id: output for output in engine.step() if output.finished}
        engine.scheduler.check()
    assert_all_free(engine)
    return finished


def samples_of(output: RequestOutput) -> list[list[int]]:
    return [completion.token_ids for completion in output.outputs]


def test_engines_of_two_dtypes_are_made_at_once():
    """Each thread has the dtype of its own engine, and torch's default stays what it is."""
    dtypes = ["float32", "bfloat16"] * 2
    directory = str(checkpoint("llama"))
    together = Barrier(len(dtypes))
    models = []

    def met(*args: Any) -> Decoder:
        together.wait(120)
        return Decoder(*args)

    def make(dtype: str) -> None:
        engine = LLMEngine(directory, dtype=dtype, device="cpu", skip_tokenizer_init=True, num_blocks=64)
        models.append((dtype, engine.runner.model))

    with mock.patch.object(model_load, "Decoder", met), ThreadPoolExecutor(len(dtypes)) as threads:
        for done in [threads.submit(make, dtype) for dtype in dtypes]:
            done.result(120)
    assert torch.get_default_dtype() == torch.float32
    assert len(models) == len(dtypes)
    for dtype, model in models:
        assert {model.dtype, *(each.dtype for each in model.parameters())} == {getattr(torch, dtype)}


# --- samples and forks


@pytest.mark.parametrize("prompt_len", [1, 15, 16, 17, 40])
def test_samples_share_the_prompt_and_are_what_they_are_alone(prompt_len):
    (prompt,) = ragged_prompts([prompt_len])
    engine = new_engine(checkpoint("llama"), max_num_batched_tokens=16)
    rows: list[int] = []
    engine.runner.graphs = None  # a recorded step calls no hooks
    engine.runner.model.embedding.register_forward_hook(lambda _, inputs, __: rows.append(len(inputs[0])))
    (output,) = engine.generate([prompt], sampled(n=4, seed=7), use_tqdm=False)
    # The prompt is computed once, then one token of each sample.
    assert sum(rows) == prompt_len + 4 * 11
    assert [c.index for c in output.outputs] == [0, 1, 2, 3]
    samples = samples_of(output)
    assert len(set(map(tuple, samples))) == 4
    # The first sample equals that of n=1, and neighbours change none.
    alone = new_engine(checkpoint("llama"))
    assert samples_of(alone.generate([prompt], sampled(seed=7), use_tqdm=False)[0]) == samples[:1]
    busy = alone.generate([*PROMPTS, prompt], [*[sampled()] * 7, sampled(n=4, seed=7)], use_tqdm=False)
    assert samples_of(busy[-1]) == samples
    assert_all_free(engine)


def test_samples_copy_only_the_last_block():
    engine = new_engine(checkpoint("llama"), num_blocks=64)
    engine.add_request("a", ragged_prompts([40])[0], sampled(n=4))
    engine.step()
    assert engine.stats().num_used_blocks == 3  # 40 tokens, shared by all samples
    engine.step()
    assert engine.stats().num_used_blocks == 2 + 4  # and one block for each sample to write to
    finish(engine)


@pytest.mark.parametrize("num_blocks", [512, 9])
def test_fork_goes_on_as_a_request_of_its_own(num_blocks):
    prompt = PROMPTS[0]
    expected, _ = reference("llama").greedy(prompt, 20)
    engine = new_engine(checkpoint("llama"), block_size=8, num_blocks=num_blocks, max_num_seqs=4)
    engine.add_request("a", prompt, greedy(20))
    for _ in range(5):
        engine.step()
    names = [engine.fork("a"), engine.fork("a", "mine"), engine.fork("a", None, sampled(9, seed=3))]
    assert names[1] == "mine"
    finished = finish(engine)
    assert set(finished) == {"a", *names}
    for name in ("a", *names[:2]):
        assert samples_of(finished[name]) == [expected]
        # Prompt tokens only, none that the parent generated.
        assert finished[name].num_cached_tokens <= len(prompt)
    # The third has the shared tokens, then its own.
    other = samples_of(finished[names[2]])[0]
    assert other[:5] == expected[:5]
    assert len(other) == 9
    alone = new_engine(checkpoint("llama"))
    (again,) = alone.generate([prompt + expected[:5]], sampled(4, seed=3), use_tqdm=False)
    assert other[5:] == samples_of(again)[0]


def test_fork_of_a_request_that_waits_waits_too():
    engine = new_engine(checkpoint("llama"))
    engine.add_request("a", PROMPTS[2], greedy(5))
    child = engine.fork("a")
    finished = finish(engine)
    assert samples_of(finished[child]) == samples_of(finished["a"])


def test_wrong_forks_are_refused():
    engine = new_engine(checkpoint("llama"))
    (output,) = engine.generate([PROMPTS[0]], greedy(3), use_tqdm=False)
    with pytest.raises(RequestError, match="no unfinished request '0'"):
        engine.fork(output.request_id)
    engine.add_request("a", PROMPTS[0], greedy(9))
    engine.add_request("several", PROMPTS[0], sampled(9, n=2))
    for _ in range(4):
        engine.step()
    with pytest.raises(RequestError, match="'a' is in use"):
        engine.fork("a", "a")
    with pytest.raises(RequestError, match="2 samples"):
        engine.fork("several")
    with pytest.raises(RequestError, match="max_tokens 2 leaves a fork nothing"):
        engine.fork("a", "b", greedy(2))
    with pytest.raises(RequestError, match="one sequence, got 4; fork as often"):
        engine.fork("a", "b", sampled(n=4))
    with pytest.raises(RequestError, match="sampling_params must be SamplingParams"):
        engine.fork("a", "b", {"max_tokens": 9})  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="cache_salt of a fork must be None or its parent's"):
        engine.fork("a", "b", greedy(9, cache_salt="another"))
    with pytest.raises(RequestError, match=r"no unfinished request \['a'\]"):
        engine.fork(["a"])  # type: ignore[arg-type]
    engine.abort_request(["a", "unknown"])
    assert set(finish(engine)) == {"several"}


def test_fork_has_a_timeout_of_its_own_or_that_of_its_parent(monkeypatch):
    engine, now = new_engine(checkpoint("llama")), [0.0]
    monkeypatch.setattr(engine.scheduler, "clock", lambda: now[-1])
    engine.add_request("a", PROMPTS[0], greedy(90, timeout_s=9.0))
    engine.step()
    engine.fork("a", "short", greedy(90, timeout_s=2.0))
    engine.fork("a", "long", greedy(90))
    for time, left in ((1.0, {"a", "short", "long"}), (3.0, {"a", "long"}), (10.0, set())):
        now.append(time)
        engine.step()
        assert set(engine.core.groups) == left
    assert_all_free(engine)


def test_more_samples_than_can_run_are_refused():
    engine = new_engine(checkpoint("llama"), max_num_seqs=3)
    for name in ("n", "best_of"):
        message = f"{name} 4 is more samples than can run at once; max_num_seqs is 3"
        with pytest.raises(RequestError, match=message):
            engine.add_request("a", [1], sampled(**{name: 4}))
    assert not engine.has_unfinished_requests()


def test_abort_ends_all_samples():
    engine = new_engine(checkpoint("llama"), max_num_batched_tokens=16)
    for num_steps in (0, 1, 6):
        engine.add_request("a", PROMPTS[2], sampled(n=3))
        for _ in range(num_steps):
            engine.step()
        engine.abort_request("a")
        assert_all_free(engine)


# --- preemption


@pytest.mark.parametrize("mode", ["recompute", "swap", "auto"])
@pytest.mark.parametrize("name", ["llama", "qwen2-mixed"])
def test_preempted_requests_give_the_same_tokens(mode, name):
    expected = [reference(name).greedy(prompt, 20)[0] for prompt in PROMPTS]
    engine = new_engine(
        checkpoint(name),
        num_blocks=12 if name == "llama" else 24,
        block_size=8,
        preemption_mode=mode,
        swap_space=None if mode == "recompute" else 0.001,
        watermark=0.0,
    )
    outputs = engine.generate(PROMPTS, greedy(20), use_tqdm=False)
    assert [samples_of(output)[0] for output in outputs] == expected
    stats = engine.stats()
    by_mode = {"recompute": stats.num_recompute_preemptions, "swap": stats.num_swap_preemptions}
    assert sum(by_mode.values()) == sum(output.metrics.num_preemptions for output in outputs) > 0
    assert mode == "auto" or sum(by_mode.values()) == by_mode[mode]
    assert stats.num_used_host_blocks == 0
    assert_all_free(engine)


def test_swapping_goes_over_to_recomputing_when_the_host_is_full():
    engine = new_engine(
        checkpoint("llama"),
        num_blocks=12,
        block_size=8,
        preemption_mode="swap",
        swap_space=1.5e-5,
        watermark=0.0,
    )
    assert 0 < engine.stats().num_host_blocks < 4
    engine.generate(PROMPTS, greedy(20), use_tqdm=False)
    assert engine.stats().num_recompute_preemptions > 0


def test_window_layers_give_their_blocks_back():
    """A long sequence of a model with a sliding window in half of its layers is swapped."""
    (prompt,) = ragged_prompts([400])
    expected, _ = reference("qwen2-mixed").greedy(prompt, 8)
    engine = new_engine(checkpoint("qwen2-mixed"), block_size=8, max_num_batched_tokens=32)
    engine.add_request("a", prompt, greedy(8))
    most = 0
    while engine.has_unfinished_requests():
        outputs = engine.step()
        most = max(most, engine.stats().num_used_blocks)
    assert samples_of(outputs[0]) == [expected]
    windows = [group.window for group in engine.model_config.layer_groups]
    assert None in windows
    (window,) = set(windows) - {None}
    # The full group keeps 51 blocks; each other group the blocks that its window and a chunk touch.
    assert most <= 51 + (len(windows) - 1) * (-(-(window + 32) // 8) + 1)


# --- terms


def test_priority_goes_first_and_takes_places():
    engine = new_engine(checkpoint("llama"), max_num_seqs=1, scheduling_policy="priority")
    engine.add_request("low", PROMPTS[0], greedy(10), priority=5)
    for _ in range(3):
        engine.step()
    engine.add_request("middle", PROMPTS[1], greedy(3), priority=3)
    engine.add_request("high", PROMPTS[2], greedy(3), priority=-1.5)
    finished = list(finish(engine).values())
    assert [output.request_id for output in finished] == ["high", "middle", "low"]
    assert finished[2].metrics.num_preemptions == 1
    assert samples_of(finished[2]) == [reference("llama").greedy(PROMPTS[0], 10)[0]]


def test_generate_takes_terms_for_all_prompts_or_for_each():
    engine = new_engine(checkpoint("llama"), max_num_seqs=1, scheduling_policy="priority")
    outputs = engine.generate(PROMPTS[:3], greedy(2), priority=[3, 2, 1], timeout_s=600, use_tqdm=False)
    ends = [output.metrics.finished_time for output in outputs]
    assert ends == sorted(ends, reverse=True)
    with pytest.raises(RequestError, match="2 priority for 3 prompts"):
        engine.generate(PROMPTS[:3], greedy(2), priority=[1, 2], use_tqdm=False)


@pytest.mark.parametrize(
    "terms",
    [
        {"priority": "high"},
        {"priority": float("nan")},
        {"priority": 1},  # without effect, as the policy is fcfs
        {"tenant": 3},
        {"timeout_s": 0},
        {"timeout_s": -1.0},
    ],
    ids=str,
)
def test_wrong_terms_are_refused(terms):
    engine = new_engine(checkpoint("llama"))
    with pytest.raises(RequestError, match=next(iter(terms))):
        engine.add_request("a", [1], **terms)
    assert not engine.has_unfinished_requests()


def test_request_past_its_deadline_is_aborted_with_what_it_has(monkeypatch):
    engine = new_engine(checkpoint("llama"))
    now = [0.0]
    monkeypatch.setattr(engine.scheduler, "clock", lambda: now[0])
    engine.add_request("late", PROMPTS[0], sampled(50, n=2), timeout_s=5)
    engine.add_request("calm", PROMPTS[1], greedy(9))
    finished = {}
    for _ in range(4):
        finished |= {output.request_id: output for output in engine.step() if output.finished}
        now[0] += 2
    finished |= finish(engine)
    for completion in finished["late"].outputs:
        assert (completion.finish_reason, completion.stop_reason) == ("abort", "timeout_s has passed")
        assert len(completion.token_ids) == 3
    assert finished["calm"].outputs[0].finish_reason == "length"


def test_full_queue_refuses_and_generate_waits_its_turn():
    engine = new_engine(checkpoint("llama"), max_num_seqs=1, max_waiting=2)
    outputs = engine.generate(PROMPTS, greedy(2), use_tqdm=False)
    assert [output.finished for output in outputs] == [True] * 7
    for name in "ab":
        engine.add_request(name, [1], greedy(2))
    with pytest.raises(QueueFullError, match="2 requests wait already and max_waiting is 2"):
        engine.add_request("c", [1], greedy(2))
    assert set(finish(engine)) == {"a", "b"}


@pytest.mark.parametrize("params", [{}, {"prompt_logprobs": 1}], ids=str)
def test_as_many_samples_as_the_prompt_has_tokens(params):
    """A step with as many samples as tokens need not be a decode step."""
    (prompt,) = ragged_prompts([4])
    engine = new_engine(checkpoint("llama"), enable_prefix_caching=False)
    likeliest = SamplingParams(n=4, temperature=1e-9, max_tokens=3, **params)
    (output,) = engine.generate([prompt], likeliest, use_tqdm=False)
    assert samples_of(output) == [reference("llama").greedy(prompt, 3)[0]] * 4
    assert (output.prompt_logprobs is None) == (not params)


def test_samples_beside_a_prompt_that_is_only_read():
    first, second = ragged_prompts([1, 1])
    engine = new_engine(checkpoint("llama"), enable_prefix_caching=False)
    alone = engine.encode([second], use_tqdm=False)[0]
    engine.add_request("a", first, SamplingParams(n=2, temperature=1e-9, max_tokens=2))
    beside = engine.encode([second], use_tqdm=False)[0]
    assert beside.outputs.embedding == alone.outputs.embedding
    while engine.has_unfinished_requests():
        finished = engine.step()
    assert samples_of(finished[-1]) == [reference("llama").greedy(first, 2)[0]] * 2


# --- failure


def test_step_that_fails_loses_nothing(monkeypatch):
    """Contents that a broken forward leaves in blocks are dropped, and all requests are computed again."""
    expected = [reference("llama").greedy(prompt, 8)[0] for prompt in PROMPTS]
    engine = new_engine(checkpoint("llama"), max_num_batched_tokens=64)
    for i, prompt in enumerate(PROMPTS):
        engine.add_request(str(i), prompt, SamplingParams(temperature=1e-9, max_tokens=8, n=1 + i % 2))
    compute, broken = engine.runner.compute, [2, 5, 6]
    calls = iter(range(1000))

    def failing(batch: Any) -> Any:
        if next(calls) in broken:
            engine.runner.kv_cache.tensors["kv"].fill_(float("nan"))
            raise RuntimeError("no memory")
        return compute(batch)

    monkeypatch.setattr(engine.runner, "compute", failing)
    finished, num_failed = {}, 0
    while engine.has_unfinished_requests():
        try:
            finished |= {output.request_id: output for output in engine.step() if output.finished}
        except RuntimeError:
            num_failed += 1
        engine.scheduler.check()
    assert num_failed == 3
    for i, tokens in enumerate(expected):
        assert samples_of(finished[str(i)]) == [tokens] * (1 + i % 2)
    assert_all_free(engine)


@pytest.mark.parametrize("late", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("where", ["expire", "schedule", "execute", "update", "release_finished"])
def test_exception_anywhere_in_a_step_changes_no_tokens_and_loses_nobody(monkeypatch, where, late):
    """Raise before and after each part of a step: prompts, decodes, samples, stop strings, last tokens."""
    options = {"skip_tokenizer_init": False, "block_size": 8, "num_blocks": 24, "max_num_batched_tokens": 48}
    engine = new_engine("demo", **options)
    prompts = ["import os\n", "def add(a, b):\n", "class Stack:\n    def push(self, item):", "x"]
    params = [greedy(20, stop="e imp"), sampled(9, n=2, seed=4), sampled(14, n=2, seed=5), greedy(3)]
    expected = engine.generate(prompts, params, use_tqdm=False)
    assert expected[0].outputs[0].text == "from distutils.cor"

    engine = new_engine("demo", **options)
    owner = engine.runner if where == "execute" else engine.scheduler
    part, attempt, now, broken = getattr(owner, where), 0, 0.0, {1, 4, 5, 6, 7, 8, 12}

    def interrupted(*args: Any) -> Any:
        done = part(*args) if late else None
        if attempt in broken:
            broken.remove(attempt)
            raise KeyboardInterrupt
        return done if late else part(*args)

    monkeypatch.setattr(owner, where, interrupted)
    monkeypatch.setattr(engine.scheduler, "clock", lambda: now)
    for i, (prompt, param) in enumerate(zip(prompts, params, strict=True)):
        engine.add_request(str(i), prompt, param)
    engine.add_request("late", "def", greedy(100), timeout_s=5)
    finished: dict[str, RequestOutput] = {}
    while engine.has_unfinished_requests():
        attempt += 1
        now = 10.0 * (attempt >= 4)
        try:
            outputs = engine.step()
        except KeyboardInterrupt:
            outputs = []
        engine.scheduler.check()
        live = (*engine.scheduler.running, *engine.scheduler.waiting())
        assert all(request.finish_reason is None for request in live)
        for output in outputs:
            if output.finished:
                assert output.request_id not in finished
                finished[output.request_id] = output
    assert finished.pop("late").outputs[0].stop_reason == "timeout_s has passed"
    assert [finished[str(i)].outputs for i in range(4)] == [output.outputs for output in expected]
    assert_all_free(engine)


def test_output_that_cannot_be_made_comes_with_the_next_step(monkeypatch):
    engine = new_engine(checkpoint("llama"))
    expected, _ = reference("llama").greedy(PROMPTS[0], 2)
    for name, max_tokens in (("other", 2), ("mine", 2)):
        engine.add_request(name, PROMPTS[0], greedy(max_tokens))
    engine.add_request("kept", PROMPTS[0], greedy(1))
    engine.generate(PROMPTS[1], greedy(1), use_tqdm=False)  # "kept" finishes meanwhile
    output = engine.core.outputs.output

    def broken(group: Any) -> RequestOutput:
        if group.request_id == "mine":
            monkeypatch.undo()
            raise KeyboardInterrupt
        return output(group)

    monkeypatch.setattr(engine.core.outputs, "output", broken)
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    finished = finish(engine)
    assert {name: samples_of(output)[0] for name, output in finished.items()} == {
        "other": expected,
        "mine": expected,
        "kept": expected[:1],
    }


# --- all of it at once


@pytest.mark.parametrize("seed", range(6))
def test_any_combination_gives_the_tokens_of_an_undisturbed_run(seed):
    """Preemption, swapping, prefix hits, chunks, samples, forks and aborts, with the demo model."""
    rng = random.Random(seed)
    quiet = new_engine("demo", skip_tokenizer_init=False, num_blocks=512)
    system = quiet.tokenizer.encode(
        "import os\nimport sys\n\n\nclass Reader:\n    def __init__(self, path):\n"
    )
    tails = ["def read(self):\n", "        self.path = path\n    def close", "", "x = ", "# " * 12]
    prompts = [
        system[: rng.randint(1, len(system))] + quiet.tokenizer.encode(rng.choice(tails) or "a")
        for _ in range(9)
    ]
    params = [
        SamplingParams(temperature=temperature, seed=i, n=n, max_tokens=rng.randint(1, 40))
        for i, (temperature, n) in enumerate(rng.choices([(0.0, 1), (0.9, 1), (0.9, 3)], k=9))
    ]
    expected = [
        samples_of(quiet.generate([p], [s], use_tqdm=False)[0]) for p, s in zip(prompts, params, strict=True)
    ]
    engine = new_engine(
        "demo",
        skip_tokenizer_init=False,
        block_size=8,
        num_blocks=rng.randint(14, 24),
        max_num_seqs=rng.randint(3, 6),
        max_num_batched_tokens=rng.choice((7, 16, 64)),
        long_prefill_token_threshold=rng.choice((None, 5)),
        scheduling_policy=rng.choice(("fcfs", "priority", "longest-prefix-match", "fair")),
        **rng.choice(({"preemption_mode": "recompute"}, {"preemption_mode": "swap", "swap_space": 0.003})),
        watermark=0.0,
    )
    priorities = (0, 1, 2) if engine.config.scheduling_policy == "priority" else (0,)
    waiting, forks, aborted = list(range(9)), {}, set()
    finished: dict[str, RequestOutput] = {}
    while waiting or engine.has_unfinished_requests():
        if waiting and rng.random() < 0.5:
            i = waiting.pop()
            engine.add_request(
                str(i),
                prompts[i],
                params[i],
                priority=rng.choice(priorities),
                tenant=rng.choice("ab"),
            )
        live = sorted(engine.core.groups)
        if live and rng.random() < 0.08:
            name = rng.choice(live)
            engine.abort_request(name)
            aborted.add(name)
        elif (
            live and rng.random() < 0.2 and (name := rng.choice(live)).isdigit() and params[int(name)].n == 1
        ):
            # With the same seed the same tokens must follow.
            forks[engine.fork(name, f"fork-{name}-{rng.random()}", params[int(name)])] = name
        finished |= {output.request_id: output for output in engine.step() if output.finished}
        engine.scheduler.check()
    assert len(finished) + len(aborted) == 9 + len(forks)
    for name, output in finished.items():
        assert samples_of(output) == expected[int(forks.get(name, name))], name
    assert_all_free(engine)


def test_a_fork_keeps_its_parents_priority_unless_it_has_its_own():
    engine = new_engine(checkpoint("llama"), scheduling_policy="priority")
    engine.add_request("parent", PROMPTS[0], greedy(20), priority=4)
    engine.step()
    for name, params in (("a", None), ("b", greedy(30)), ("c", replace(greedy(30), priority=2))):
        engine.fork("parent", name, params)
    found = [engine.core.groups[name].samples[0].inputs.priority for name in "abc"]
    assert found == [4, 4, 2]
    finish(engine)


def test_priority_is_refused_wherever_no_policy_reads_it():
    engine = new_engine(checkpoint("llama"))
    engine.add_request("parent", PROMPTS[0], greedy(9))
    calls = [
        lambda: engine.generate([PROMPTS[0]], greedy(2), priority=1),
        lambda: engine.fork("parent", "child", replace(greedy(20), priority=1)),
        lambda: engine.encode([PROMPTS[0]], priority=1),
        lambda: engine.score(PROMPTS[0], [[1]], priority=1),
        lambda: engine.beam_search([PROMPTS[0]], BeamSearchParams(beam_width=2, max_tokens=2), priority=1),
    ]
    for call in calls:
        with pytest.raises(
            RequestError, match="priority 1 needs scheduling_policy='priority'; this engine has"
        ):
            call()
    assert [*engine.core.groups] == ["parent"]
    engine.abort_request("parent")


def test_stop_strings_of_a_fork_apply_to_new_text():
    engine = new_engine("demo", skip_tokenizer_init=False, num_blocks=64)
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    whole = engine.generate("def fibonacci(n):", params, use_tqdm=False)[0].outputs[0]
    engine.add_request("parent", "def fibonacci(n):", params)
    shown = ""
    while len(shown) < 24:
        shown = engine.step()[0].outputs[0].text
    # A string that both the shared text and the text to come have.
    again = next(whole.text[i : i + 2] for i in range(len(shown), 60) if whole.text[i : i + 2] in shown)
    engine.fork("parent", "child", replace(params, stop=[again]))
    engine.fork("child", "grandchild")
    outputs = {name: output.outputs[0] for name, output in finish(engine).items()}
    assert outputs["parent"].text == whole.text
    for name in ("child", "grandchild"):
        assert outputs[name].stop_reason == again
        assert outputs[name].text == whole.text[: whole.text.index(again, len(shown))]
