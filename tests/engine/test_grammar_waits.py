"""A mask that is not computed yet delays its own request, and no other."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ALL_COMPLETED, FIRST_COMPLETED
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import paged
from paged import (
    AsyncLLMEngine,
    LLMEngine,
    QueueFullError,
    RequestOutput,
    SamplingParams,
    StructuredOutputsParams,
)
from paged.engine import grammar_waits, loop
from paged.engine.request_spec import RequestSpec
from paged.grammars import grammar_jobs
from paged.grammars.grammar_jobs import CompiledGrammar, MaskJob
from tests.support.checkpoints import assert_all_free, new_engine

DEMO = Path(paged.__file__).parent / "demo"
SLOW = "[a-z]{20,30}"
FAST = "[0-9]{20,30}"


@pytest.fixture(scope="module")
def demo() -> LLMEngine:
    return new_engine(DEMO, skip_tokenizer_init=False)


class Gate:
    """Keeps the workers of some grammars from computing masks until it opens.

    errors: what they raise then.
    """

    def __init__(self) -> None:
        self.opened = threading.Event()
        self.num_reached = 0
        self.errors: list[BaseException] = []
        self.grammars: list[CompiledGrammar] = []


@pytest.fixture
def gate(demo: LLMEngine, monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    """Slow the masks of SLOW down until the gate opens."""
    made, consume = Gate(), MaskJob._consume
    monkeypatch.setattr(grammar_waits, "ALL_HELD_S", 0.001)
    # What is compiled is cached, so this is the grammar of all later requests.
    made.grammars.append(demo.core.factory.grammars.start(StructuredOutputsParams(regex=SLOW)).grammar)

    def gated(self: MaskJob, executor: Any) -> None:
        if self._grammar in made.grammars:
            made.num_reached += 1
            assert made.opened.wait(60)
            if made.errors:
                consume(self, executor)
                raise made.errors[0]
        consume(self, executor)

    record = CompiledGrammar.record

    def recorded(self: CompiledGrammar, *, was_slow: bool) -> None:
        # On a busy machine others would be slow, too, and wait behind what the gate keeps.
        record(self, was_slow=was_slow and self in made.grammars)

    monkeypatch.setattr(MaskJob, "_consume", gated)
    monkeypatch.setattr(CompiledGrammar, "record", recorded)
    yield made
    made.opened.set()


def bound(regex: str, **params: Any) -> SamplingParams:
    given = {"max_tokens": 40, "seed": 1, **params}
    return SamplingParams(structured_outputs=StructuredOutputsParams(regex=regex), **given)


def add(engine: LLMEngine, **requests: SamplingParams) -> None:
    for name, params in requests.items():
        engine.add_request(name, [1, 2, 3], params)


def run_until(engine: LLMEngine, *names: str) -> dict[str, Any]:
    """Step until these requests have finished. Return the outputs of all that did."""
    outputs: dict[str, Any] = {}
    until = time.monotonic() + 60
    while time.monotonic() < until:
        outputs |= {output.request_id: output for output in engine.step() if output.finished}
        engine.scheduler.check()
        if outputs.keys() >= set(names):
            return outputs
    raise AssertionError(f"{names} have not finished, but {[*outputs]}")


@pytest.mark.parametrize(
    "ends",
    [
        {},
        {"ignore_eos": True},
        {"repetition_penalty": 1.3, "dry_multiplier": 0.5, "logprobs": 1},  # of tokens drawn twice
    ],
    ids=["eos", "ignore_eos", "penalties"],
)
def test_others_finish_while_a_mask_is_computed_and_tokens_are_the_same(demo, gate, ends):
    gate.opened.set()
    expected = demo.generate([[1, 2, 3]], bound(SLOW, **ends), use_tqdm=False)[0].outputs[0]
    gate.opened.clear()
    free = SamplingParams(max_tokens=10, temperature=0.0, ignore_eos=True)
    add(demo, slow=bound(SLOW, n=2, **ends), free=free, fast=bound(FAST, **ends))
    finished = run_until(demo, "free", "fast")
    assert gate.num_reached, "no mask was waited for"
    assert "slow" not in finished
    assert [sample.num_output_tokens for sample in demo.core.groups["slow"].samples] == [1, 1]
    gate.opened.set()
    slow = run_until(demo, "slow")["slow"].outputs[0]
    assert (slow.token_ids, slow.finish_reason) == (expected.token_ids, expected.finish_reason)
    assert slow.logprobs == expected.logprobs
    assert_all_free(demo)


def test_aborts_and_deadlines_hold_while_a_mask_is_computed(demo, gate, monkeypatch):
    clock = demo.scheduler.clock
    add(demo, gone=bound(SLOW), late=bound(SLOW, timeout_s=1000.0))
    while not gate.num_reached:
        demo.step()
    demo.abort_request("gone")
    monkeypatch.setattr(demo.scheduler, "clock", lambda: clock() + 1001.0)
    late = run_until(demo, "late")["late"].outputs[0]
    assert (late.finish_reason, late.stop_reason) == ("abort", "timeout_s has passed")
    assert_all_free(demo)


def test_a_held_request_that_is_preempted_goes_on_with_the_same_tokens(demo, gate):
    gate.opened.set()
    expected = demo.generate([[1, 2, 3]], bound(SLOW), use_tqdm=False)[0].outputs[0].token_ids
    gate.opened.clear()
    add(demo, slow=bound(SLOW))
    while not gate.num_reached:
        demo.step()
    demo.step()  # which holds it
    demo.scheduler.cancel()  # all blocks are lost
    free = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True)
    add(demo, free=free)
    run_until(demo, "free")
    gate.opened.set()
    assert run_until(demo, "slow")["slow"].outputs[0].token_ids == expected
    assert_all_free(demo)


def test_generate_waits_without_another_request(demo, gate):
    opener = threading.Timer(0.05, gate.opened.set)
    opener.start()
    output = demo.generate([[1, 2, 3]], bound(SLOW), use_tqdm=False)[0].outputs[0]
    opener.join()
    assert output.finish_reason == "stop"
    assert gate.num_reached


def test_a_fork_of_a_held_request_continues_its_text(demo, gate):
    add(demo, slow=bound(SLOW))
    while not gate.num_reached:
        demo.step()
    demo.step()
    demo.fork("slow", "fork", bound(SLOW, seed=2))
    gate.opened.set()
    outputs = run_until(demo, "slow", "fork")
    assert outputs["fork"].outputs[0].token_ids[0] == outputs["slow"].outputs[0].token_ids[0]
    assert outputs["fork"].outputs[0].finish_reason == "stop"


def test_an_error_of_the_library_ends_its_request_alone(demo, gate):
    gate.errors.append(RuntimeError("the grammar is too complex"))
    add(demo, slow=bound(SLOW), fast=bound(FAST))
    gate.opened.set()
    outputs = run_until(demo, "slow", "fast")
    assert outputs["slow"].outputs[0].finish_reason == "error"
    assert outputs["slow"].outputs[0].stop_reason == "structured_outputs: the grammar is too complex"
    assert outputs["fast"].outputs[0].finish_reason == "stop"


def test_an_error_of_the_library_without_stop_tokens_ends_its_request_alone(demo, gate):
    """There the mask is asked whether the output ends."""
    accepting = "[a-z]{1,90}"  # after each token
    gate.grammars.append(demo.core.factory.grammars.start(StructuredOutputsParams(regex=accepting)).grammar)
    gate.errors.append(RuntimeError("the grammar is too complex"))
    add(demo, slow=bound(accepting, ignore_eos=True), fast=bound(FAST, ignore_eos=True))
    gate.opened.set()
    outputs = run_until(demo, "slow", "fast")
    assert outputs["slow"].outputs[0].stop_reason == "structured_outputs: the grammar is too complex"
    assert outputs["fast"].outputs[0].finish_reason == "stop"


def test_one_output_that_fails_leaves_the_others_their_masks(monkeypatch):
    class Matcher:
        def __init__(self, error: str | None) -> None:
            self.error = error

        def unsafe_compute_mask_ptr(self, *_: object) -> None:
            if self.error is not None:
                raise RuntimeError(self.error)

        def is_error(self) -> bool:
            return False

    class Executor:
        def consume_token_par(self, _: object) -> None:
            pass

        def unsafe_compute_mask_ptr(self, *_: object) -> None:
            raise RuntimeError("one of them fails")

    monkeypatch.setattr(grammar_jobs, "_executor", lambda **_: Executor())
    grammar = CompiledGrammar(None, np.zeros(1, np.int32))
    for is_slow in (False, True):
        grammar.record(was_slow=is_slow)
        job = MaskJob(
            grammar, [(Matcher(error), [1]) for error in (None, "alone", None)], np.full(1, -1, np.int32)
        )
        assert job.mask(0).shape == job.mask(2).shape == (1,)
        with pytest.raises(RuntimeError, match="alone"):
            job.mask(1)


@pytest.fixture(scope="module")
def narrow() -> LLMEngine:
    """Return an engine with one seat, which a held request never gives up."""
    engine = new_engine(DEMO, skip_tokenizer_init=False, max_num_seqs=1, max_waiting=2)
    engine.scheduler.held_for_s = math.inf
    return engine


def test_a_refused_request_is_forgotten(narrow):
    """One whose output is complete as it is given would be ended by the next step."""
    free = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True)
    add(narrow, running=free)
    narrow.step()
    add(narrow, waiting=free, last=free)
    given = narrow.tokenizer.encode("ab")
    with pytest.raises(QueueFullError):
        narrow.add_request("refused", [1], bound("ab", ignore_eos=True), generated_token_ids=given)
    assert run_until(narrow, "running", "last").keys() == {"running", "waiting", "last"}
    narrow.add_request("taken", [1], bound("ab", ignore_eos=True), generated_token_ids=given)
    assert run_until(narrow, "taken")["taken"].outputs[0].finish_reason == "stop"
    assert_all_free(narrow)


def test_a_held_request_that_is_aborted_before_it_is_queued_is_forgotten(narrow):
    narrow.core.new_group("early", RequestSpec([1], bound(FAST)))
    narrow.core.hold("early", True)
    narrow.core.abort("early")
    narrow.scheduler.check()


@pytest.fixture
def late(narrow, gate, monkeypatch) -> LLMEngine:
    """Return an engine with one seat. Its masks are computed once a step waits for them beside a queue."""
    slow = narrow.core.factory.grammars.start(StructuredOutputsParams(regex=SLOW)).grammar
    gate.grammars.append(slow)
    waited = grammar_waits.wait

    def opening(futures: Any, timeout: float, return_when: str = ALL_COMPLETED) -> Any:
        if return_when == FIRST_COMPLETED and narrow.scheduler.num_waiting:
            gate.opened.set()
        return waited(futures, timeout, return_when)

    monkeypatch.setattr(grammar_waits, "wait", opening)
    return narrow


def test_a_step_waits_for_a_mask_also_where_another_request_waits_for_the_seat(late):
    add(late, slow=bound(SLOW))
    late.step()
    add(late, other=SamplingParams(max_tokens=3, ignore_eos=True))
    run_until(late, "slow", "other")
    assert_all_free(late)


def test_the_loop_leaves_that_to_the_step(late, gate, monkeypatch):
    monkeypatch.setattr(loop, "HELD_S", 1000.0)  # its own wait would not end in time

    async def read(stream: AsyncIterator[RequestOutput]) -> str | None:
        return [output async for output in stream][-1].outputs[0].finish_reason

    async def run() -> None:
        async with AsyncLLMEngine.from_engine(late) as engine:
            slow = asyncio.create_task(read(engine.generate([1, 2, 3], bound(SLOW))))
            while not gate.num_reached:
                await asyncio.sleep(0.001)
            other = read(engine.generate([1, 2, 3], SamplingParams(max_tokens=3, ignore_eos=True)))
            assert await asyncio.wait_for(asyncio.gather(slow, other), 60) == ["stop", "length"]

    asyncio.run(run())
