"""Ctrl-C at any line of a step loses nothing: all outputs are those of an undisturbed run.

python -m tests.engine.test_interrupts    # at every line that a step runs; the test takes a sample
"""

from __future__ import annotations

import random
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from tqdm import tqdm

from paged import LLMEngine, RequestOutput, RequestOutputKind, SamplingParams, StructuredOutputsParams
from paged.base.interrupts import HeldInterrupts
from paged.requests.request import Outbox
from tests.support.checkpoints import assert_all_free, new_engine
from tests.support.engine_uses import with_steps_ahead

SOURCES = str(Path(sys.modules["paged"].__file__).parent)
# The outputs leave the engine in this line: an interrupt after it is the caller's.
HANDED_OVER = Outbox.take.__code__
STOP = "ret"
REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("def f(x):", {"max_tokens": 12}),
    "stop": ("def g(x):\n    ", {"max_tokens": 24, "stop": [STOP], "temperature": 0.0}),
    "delta": ("import os", {"output_kind": RequestOutputKind.DELTA, "logprobs": 1, "max_tokens": 10}),
    "samples": ("class A:", {"n": 2, "max_tokens": 6, "prompt_logprobs": 0}),
    "json": ("x = ", {"max_tokens": 8, "structured_outputs": StructuredOutputsParams(choice=["1", "22"])}),
}


@pytest.fixture(scope="module")
def engine() -> LLMEngine:
    return new_engine("demo", skip_tokenizer_init=False, num_blocks=64)


@pytest.fixture(autouse=True)
def _as_in_a_terminal() -> None:
    """Have Ctrl-C raise; a shell starts commands in the background with SIGINT ignored."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def start(engine: LLMEngine) -> None:
    for request_id, (prompt, params) in REQUESTS.items():
        engine.add_request(request_id, prompt, SamplingParams(seed=7, **params))


def finish(engine: LLMEngine, outputs: list[RequestOutput]) -> dict[str, Any]:
    """Run to the end. Return what each reader has got: for deltas the sum of all, else the last output."""
    while engine.has_unfinished_requests():
        outputs += engine.step()
    assert_all_free(engine)
    got: dict[str, Any] = {}
    for output in outputs:
        (first, *_) = output.outputs or [None]
        if output.request_id == "delta":
            text, ids, logprobs = got.get("delta", ("", [], []))
            assert first is not None
            got["delta"] = (text + first.text, [*ids, *first.token_ids], [*logprobs, *first.logprobs])
        else:
            got[output.request_id] = [(c.text, [*c.token_ids], c.finish_reason) for c in output.outputs]
        if output.finished:
            finished = got.setdefault("finished", [])
            assert output.request_id not in finished, "a last output came twice"
            finished.append(output.request_id)
    got["finished"] = sorted(got["finished"])
    return got


def traced(function: Callable[[], Any], on_line: Callable[[str, int], bool]) -> Any:
    """Call a function, and `on_line` before each line of the package, until that returns True."""

    def trace(frame: FrameType, event: str, _arg: Any) -> Any:
        code = frame.f_code
        if not code.co_filename.startswith(SOURCES):
            return None
        is_over = code is HANDED_OVER and frame.f_lineno > code.co_firstlineno + 3
        if event == "line" and not is_over and on_line(code.co_filename, frame.f_lineno):
            sys.settrace(None)
            signal.raise_signal(signal.SIGINT)
        return trace

    sys.settrace(trace)
    try:
        return function()
    finally:
        sys.settrace(None)


def steps(engine: LLMEngine, on_line: Callable[[str, int], bool]) -> list[RequestOutput]:
    """Run the first steps, or those before an interrupt."""
    outputs = list[RequestOutput]()
    for _ in range(3):
        try:
            outputs += traced(engine.step, on_line)
        except KeyboardInterrupt:
            break
    return outputs


def lines_of_steps(engine: LLMEngine) -> list[tuple[str, int]]:
    """Return the lines that steps run, each once."""
    found: dict[tuple[str, int], None] = {}

    def on_line(*line: Any) -> bool:
        found[line] = None
        return False

    start(engine)
    finish(engine, steps(engine, on_line))
    return [*found]


def outcome(engine: LLMEngine, line: tuple[str, int]) -> dict[str, Any]:
    """Run all requests with a Ctrl-C at a line. Return what their readers got."""
    start(engine)
    return finish(engine, steps(engine, lambda *other: other == line))


def test_an_interrupt_at_any_line_of_a_step_loses_nothing(engine):
    start(engine)
    expected, lines = finish(engine, []), lines_of_steps(engine)
    assert expected["finished"] == sorted(REQUESTS)
    assert len(lines) > 400
    for line in random.Random(3).sample(lines, 40):
        assert outcome(engine, line) == expected, line


def test_an_interrupt_at_any_line_loses_nothing_while_another_step_is_in_flight():
    alone, engine = (
        new_engine("demo", skip_tokenizer_init=False, num_blocks=64, enforce_eager=True) for _ in range(2)
    )
    start(alone)
    expected = finish(alone, [])
    lines = lines_of_steps(with_steps_ahead(engine, 2))
    assert any(file.endswith("ahead.py") for file, _ in lines)
    for line in random.Random(4).sample(lines, 25):
        assert outcome(engine, line) == expected, line


def test_an_interrupt_while_a_step_is_recorded_leaves_torch_as_it_was():
    engine = new_engine("demo", num_blocks=64, attention_backend="numba")
    compute, interrupts = engine.runner.model.compute_kv, []

    def interrupted(*args):
        signal.raise_signal(signal.SIGINT)
        interrupts.append(1)
        return compute(*args)

    engine.runner.model.compute_kv = interrupted
    engine.add_request("a", [1, 2, 3], SamplingParams(max_tokens=2))
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    assert interrupts  # the step went on to its end
    assert torch.ones(2).sum() == 2
    engine.runner.model.compute_kv = compute
    assert finish(engine, [])["finished"] == ["a"]


def test_a_second_interrupt_acts_at_once():
    done = []

    def interrupted_twice() -> None:
        with HeldInterrupts():
            signal.raise_signal(signal.SIGINT)
            done.append("first")
            signal.raise_signal(signal.SIGINT)
            done.append("second")

    with pytest.raises(KeyboardInterrupt):
        interrupted_twice()
    assert done == ["first"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_handler_of_the_program_is_called_at_the_end():
    calls = []
    before = signal.signal(signal.SIGINT, lambda *_: calls.append("handled"))
    try:
        with HeldInterrupts(), HeldInterrupts():
            signal.raise_signal(signal.SIGINT)
            assert not calls
        assert calls == ["handled"]
    finally:
        signal.signal(signal.SIGINT, before)


def main() -> None:
    """Interrupt every line, one after the other."""
    engine = new_engine("demo", skip_tokenizer_init=False, num_blocks=64)
    start(engine)
    expected = finish(engine, [])
    for line in tqdm(lines_of_steps(engine), desc="Interrupting", unit="line"):
        assert outcome(engine, line) == expected, line


if __name__ == "__main__":
    main()
