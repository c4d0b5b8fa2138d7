"""generate, generate_iter and stream take any number of prompts in bounded memory and leave nothing."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from tqdm import tqdm

from paged import LLMEngine, RequestError, RequestOutput, RequestOutputKind, SamplingParams
from paged.engine import generation
from paged.scheduler.schedule import Schedule, StepOutput
from tests.support.checkpoints import assert_all_free, checkpoint, new_engine, ragged_prompts

GREEDY = SamplingParams(temperature=0.0, max_tokens=4)
PROMPTS = ragged_prompts([5, 40, 1, 17])
SMALL = 64  # prompts per window


@pytest.fixture(scope="module")
def shared_engine() -> LLMEngine:
    return new_engine(checkpoint("llama"), max_num_seqs=16)


@pytest.fixture
def engine(shared_engine, monkeypatch) -> Iterator[LLMEngine]:
    """Yield an engine with random weights and a small window."""
    monkeypatch.setattr(generation, "WINDOW", SMALL)
    yield shared_engine
    assert_all_free(shared_engine)
    assert not shared_engine.core.groups


class Source:
    """An iterator over prompts without a length that counts how many were read."""

    def __init__(self, prompts: Any) -> None:
        self.prompts, self.num_taken = iter(prompts), 0

    def __iter__(self) -> Source:
        return self

    def __next__(self) -> Any:
        prompt = next(self.prompts)
        self.num_taken += 1
        return prompt


def tokens_of(outputs: Any) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


def test_many_prompts_are_taken_a_window_ahead(engine, monkeypatch):
    def execute(schedule: Schedule) -> StepOutput:
        return StepOutput([r.inputs.prompt_token_ids[0] for r in schedule.sampled_requests])

    monkeypatch.setattr(engine.runner, "execute", execute)
    # The first of every 100 prompts runs long and delays the outputs of those after it.
    source = Source([i % 200] for i in range(2_000))
    params = (SamplingParams(temperature=0.0, max_tokens=1 if i % 100 else 30) for i in range(2_000))
    timeouts = (1e6 + i for i in range(2_000))
    most = 0
    for i, output in enumerate(engine.generate_iter(source, params, timeout_s=timeouts)):
        assert output.finished
        assert output.outputs[0].token_ids == [i % 200] * (1 if i % 100 else 30)
        assert source.num_taken - i <= SMALL
        assert len(engine.core.groups) <= SMALL
        most = max(most, source.num_taken - i)
    assert (i, most) == (1_999, SMALL)


def test_iterables_give_what_a_list_gives(engine):
    expected = tokens_of(engine.generate(PROMPTS, GREEDY, use_tqdm=False))
    for prompts in (
        iter(PROMPTS),
        (p for p in PROMPTS),
        dict.fromkeys(map(tuple, PROMPTS)).keys(),
        tuple(PROMPTS),
    ):
        assert tokens_of(engine.generate(prompts, iter([GREEDY] * 4), use_tqdm=False)) == expected
    assert [*engine.generate_iter(iter([]))] == []
    last = {o.request_id: o for o in engine.stream(iter(PROMPTS), GREEDY)}
    assert tokens_of(last.values()) == expected
    with pytest.raises(RequestError, match=r"prompts\[0\]: a prompt is text or .* got 5"):
        engine.generate(iter([5, 6]), use_tqdm=False)


def test_progress_bar_counts_what_has_no_length(engine, capsys):
    engine.generate(iter(PROMPTS), GREEDY)
    assert "4request" in capsys.readouterr().err


@pytest.mark.parametrize("bad", [3, SMALL + 30], ids=["first-window", "later"])
@pytest.mark.parametrize("kind", ["prompt", "params", "source"])
def test_error_comes_in_its_place(engine, bad, kind):
    """In the first window it raises before anything runs, later after the outputs of earlier prompts."""

    def prompts() -> Iterator[Any]:
        for i in range(SMALL * 3):
            if i == bad and kind == "source":
                raise OSError("the disk is gone")
            yield [-1] if i == bad and kind == "prompt" else [i]

    params = ([GREEDY] * bad + [7] + [GREEDY] * SMALL * 3)[: SMALL * 3] if kind == "params" else GREEDY
    seen, num_steps = [], engine.scheduler.counters.num_steps
    error, named = (OSError, "disk") if kind == "source" else (RequestError, rf"prompts\[{bad}\]")
    with pytest.raises(error, match=named):
        seen.extend(engine.generate_iter(prompts(), params))
    assert [o.prompt_token_ids for o in seen] == ([[i] for i in range(bad)] if bad > SMALL else [])
    assert (engine.scheduler.counters.num_steps == num_steps) == (bad < SMALL)


@pytest.mark.parametrize(("num_params", "which"), [(SMALL + 5, "fewer"), (SMALL + 15, "more"), (2, "fewer")])
def test_column_of_another_length_is_found_out(engine, num_params, which):
    prompts = ragged_prompts([1] * (SMALL + 10))
    seen = list[RequestOutput]()
    with pytest.raises(RequestError, match=f"there are {which} sampling_params than prompts"):
        seen.extend(engine.generate_iter(iter(prompts), iter([GREEDY] * num_params)))
    assert len(seen) == (0 if num_params < SMALL else min(num_params, len(prompts)))
    with pytest.raises(RequestError, match=f"{num_params} priority for {len(prompts)} prompts"):
        engine.generate(prompts, GREEDY, priority=[0.0] * num_params, use_tqdm=False)


@pytest.mark.parametrize("call", ["generate_iter", "stream"])
@pytest.mark.parametrize("end", ["close", "drop"])
def test_end_before_the_end_aborts_what_is_left_and_nothing_else(engine, call, end):
    expected = tokens_of(engine.generate(PROMPTS[3], GREEDY, use_tqdm=False))
    outputs = getattr(engine, call)(itertools.repeat([1, 2, 3]), GREEDY)
    for _ in range(3):
        next(outputs)
    engine.add_request("mine", PROMPTS[3], GREEDY)
    assert len(engine.core.groups) > 10
    if end == "close":
        outputs.close()
    else:
        del outputs
        gc.collect()
    assert [*engine.core.groups] == ["mine"]
    seen = []
    while engine.has_unfinished_requests():
        seen += engine.step()
    assert tokens_of(seen[-1:]) == expected


def test_iterators_and_requests_side_by_side_all_get_their_own(engine):
    """Each output goes to the iterator that asked for it, whichever iterator runs the step."""
    prompts, params = PROMPTS * 5, [SamplingParams(temperature=0.0, max_tokens=n) for n in range(1, 21)]
    expected = tokens_of(engine.generate(prompts, params, use_tqdm=False))
    first, second = engine.generate_iter(prompts, params), engine.stream(prompts, params)
    seen: dict[str, list[list[int]]] = {"first": [next(first)], "second": [next(second)]}
    engine.add_request("mine", prompts[16], params[16])
    mine: list[RequestOutput] = []
    while engine.has_unfinished_requests():
        mine += engine.step()
    assert tokens_of(mine[-1:]) == expected[16:17]
    assert {o.request_id for o in mine} == {"mine"}
    seen["first"] += first
    seen["second"] += second
    assert tokens_of(seen["first"]) == expected
    assert tokens_of({o.request_id: o for o in seen["second"]}.values()) == expected


def test_abort_of_a_request_of_an_iterator_is_an_output_of_it(engine):
    outputs = engine.generate_iter(PROMPTS * 10, [GREEDY] * 38 + [SamplingParams(max_tokens=400)] * 2)
    ids = [next(outputs).request_id]
    running, waiting = [*engine.core.groups][-2:]
    engine.abort_request(running)
    engine.abort_request(waiting)
    rest = [*outputs]
    ids += [o.request_id for o in rest]
    assert ids == sorted(ids, key=int)
    assert [o.outputs[0].finish_reason for o in rest[-2:]] == ["abort", "abort"]


def test_stream_shows_every_step_as_output_kind_says(engine):
    params = [SamplingParams(temperature=0.0, max_tokens=3, output_kind=kind) for kind in RequestOutputKind]
    lengths: dict[str, list[int]] = {}
    for output in engine.stream([PROMPTS[0]] * 3, params):
        lengths.setdefault(output.request_id, []).append(len(output.outputs[0].token_ids))
    assert [*lengths.values()] == [[1, 2, 3], [1, 1, 1], [3]]


def test_outputs_may_come_as_they_complete(engine):
    params = [SamplingParams(temperature=0.0, max_tokens=n) for n in (30, 2, 9, 4)]
    ordered = engine.generate(PROMPTS, params, use_tqdm=False)
    outputs = [*engine.generate_iter(iter(PROMPTS), params, ordered=False)]
    assert [len(output.outputs[0].token_ids) for output in outputs] == [2, 4, 9, 30]
    by_id = sorted(outputs, key=lambda output: int(output.request_id))
    assert tokens_of(by_id) == tokens_of(ordered)
    with pytest.raises(RequestError, match="ordered must be True or False, got 1"):
        next(engine.generate_iter(PROMPTS, ordered=1))


def test_prompt_token_ids_take_the_place_of_prompts(engine):
    one, many = engine.generate(prompt_token_ids=PROMPTS[0]), engine.generate(prompt_token_ids=PROMPTS)
    assert [o.prompt_token_ids for o in many] == PROMPTS
    assert one[0].prompt_token_ids == PROMPTS[0]
    for given in ({}, {"prompts": PROMPTS, "prompt_token_ids": PROMPTS}):
        with pytest.raises(RequestError, match="either prompts or prompt_token_ids, got"):
            engine.generate(**given)


def test_progress_bar_may_be_of_any_class(engine):
    made = []

    class Bar(tqdm):
        def __init__(self, **options):
            made.append(options)
            super().__init__(**options)

    engine.generate(PROMPTS, GREEDY, use_tqdm=partial(Bar, leave=False))
    assert made == [{"total": 4, "desc": "Generating", "unit": "request", "disable": False, "leave": False}]


def test_max_waiting_bounds_the_queue():
    engine = new_engine(checkpoint("llama"), max_num_seqs=2, max_waiting=3)
    for output in engine.stream(itertools.repeat([5], 20), SamplingParams(max_tokens=2)):  # noqa: B007
        assert engine.scheduler.num_waiting <= 3
    assert output.finished
    assert_all_free(engine)


def test_end_of_an_iterator_spares_who_has_the_id_of_one_that_finished(engine):
    outputs = engine.generate_iter(PROMPTS, [GREEDY] * 3 + [SamplingParams(max_tokens=100)])
    first = next(outputs).request_id
    while len(engine.core.groups) > 1:
        engine.step()
    second = str(int(first) + 1)
    engine.add_request(second, PROMPTS[1], GREEDY)
    outputs.close()
    assert [*engine.core.groups] == [second]
    engine.abort_request(second)


@pytest.mark.parametrize("name", ["prompts", "sampling_params", "priority", "tenant", "timeout_s"])
def test_tensor_of_one_number_is_refused(engine, name):
    with pytest.raises(RequestError, match=f"{name}.*tensor"):
        engine.generate(**{"prompts": PROMPTS, name: torch.tensor(3.0)}, use_tqdm=False)
