"""What answers hold is counted, and bounded for each request and in all."""

from __future__ import annotations

import asyncio
import json

import pytest

from paged import QueueFullError, RequestError, SamplingParams
from paged.engine.async_options import CANDIDATE_BYTES, PAUSE_BYTES, TOKEN_BYTES
from paged.sampling_params import RequestOutputKind
from paged.server import frames
from paged.server.answer_memory import RESUME_BYTES, AnswerAccount, AnswerBudget, size_of
from paged.server.inbox import Inbox
from tests.support.served import eventually

PLACE = ([*range(21)], [-1.0] * 21, [*range(21)], ["a"] * 21)
BYTES = 1 + TOKEN_BYTES + 21 * CANDIDATE_BYTES
DELTA, FINAL_ONLY = RequestOutputKind.DELTA, RequestOutputKind.FINAL_ONLY


def new_output(num_tokens: int, *, finished: bool = False) -> frames.Output:
    completion = frames.Completion(0, "a" * num_tokens, [7] * num_tokens, logprobs=[PLACE] * num_tokens)
    return frames.Output(1, [completion], finished, None, None)


def test_an_output_counts_its_text_tokens_and_candidates():
    assert size_of(new_output(3)) == 3 * BYTES
    assert size_of(frames.Output(1, [], True, None, None, [None, PLACE])) == 21 * CANDIDATE_BYTES


def test_what_is_read_is_given_back_and_what_is_merged_is_counted():
    budget = AnswerBudget()
    inbox = Inbox("r", None, [1], DELTA, account=AnswerAccount(budget))
    for _ in range(5):
        inbox.put(new_output(2))
    assert budget.num_bytes == 10 * BYTES
    assert len(asyncio.run(inbox.get()).outputs[0].token_ids) == 10
    assert budget.num_bytes == 0
    inbox.put(new_output(2))
    inbox.give_back()
    inbox.give_back()
    assert (budget.num_bytes, inbox.account.num_unread) == (0, 0)


def test_the_requests_of_a_reader_pause_at_the_mark_and_go_on_below_the_other():
    account, resumed = AnswerAccount(AnswerBudget()), []
    account.grow(PAUSE_BYTES, readable=True)
    assert not account.must_pause
    account.grow(1, readable=True)
    assert account.must_pause
    assert account.pause(1, lambda: resumed.append(1))
    assert not account.pause(1, lambda: resumed.append(1))
    assert account.pause(2, lambda: resumed.append(2))
    account.forget(2)
    account.on_read(PAUSE_BYTES - RESUME_BYTES)
    assert not resumed
    account.on_read(1)
    account.on_read(1)
    assert resumed == [1]
    assert account.budget.num_pauses == 2


def test_when_all_is_used_up_streams_pause_at_the_first_token_and_whole_answers_end():
    budget = AnswerBudget(max_bytes=100, max_answer_bytes=80)
    stream, whole = AnswerAccount(budget), AnswerAccount(budget)
    stream.grow(30, readable=True)
    whole.grow(70, readable=False)
    assert (stream.must_pause, whole.refusal()) == (False, None)
    stream.grow(1, readable=True)
    assert stream.must_pause
    assert isinstance(whole.refusal(), QueueFullError)
    whole.grow(11, readable=False)
    assert type(whole.refusal()) is RequestError


@pytest.mark.parametrize(
    ("params", "param"),
    [
        ({"n": 128, "logprobs": 20, "max_tokens": 1000}, "logprobs"),
        ({"best_of": 128, "logprobs": 20, "max_tokens": 10**9}, "logprobs"),
        ({"logprobs": -1, "max_tokens": 1000}, "logprobs"),
        ({"prompt_logprobs": -1, "max_tokens": 1}, "prompt_logprobs"),
        ({"n": 128, "logprobs": 20, "max_tokens": None}, None),
        ({"n": 128, "logprobs": 20, "max_tokens": 400}, None),
        ({"n": 128, "max_tokens": 1000}, None),
    ],
    ids=str,
)
def test_an_answer_that_could_be_too_large_is_refused(params, param):
    def check(kind: RequestOutputKind) -> None:
        sizes = {"max_model_len": 2048, "vocab_size": 32_000}
        AnswerBudget().check(SamplingParams(**params, output_kind=kind), 100, **sizes)

    if param is not None:
        with pytest.raises(
            RequestError, match=f"^{param} of .* MiB, and an answer has at most 256"
        ) as caught:
            check(FINAL_ONLY)
        assert caught.value.param == param
    if param != "prompt_logprobs":
        check(DELTA)
    if param is None:
        check(FINAL_ONLY)


WHOLE = {"prompt": "def f(", "n": 4, "logprobs": 20, "ignore_eos": True, "seed": 1}


def test_when_answers_hold_too_much_whole_ones_end_and_streams_go_on(shared_client, monkeypatch):
    budget = shared_client.front.engine.budget
    monkeypatch.setattr(budget, "max_bytes", 100_000)
    status, headers, body = shared_client.request("POST", "/v1/completions", {**WHOLE, "max_tokens": 200})
    assert (status, "retry-after" in headers) == (429, True)
    assert "the answers in progress take more than" in json.loads(body)["error"]["message"]
    eventually(lambda: shared_client.num_requests == budget.num_bytes == 0)
    assert shared_client.post("/v1/completions", **WHOLE, max_tokens=3)["usage"]["completion_tokens"] == 12
    streamed = shared_client.events("/v1/completions", **WHOLE, max_tokens=60)
    places = [choice["logprobs"] for e in streamed[:-1] for choice in json.loads(e)["choices"]]
    assert sum(len(place["tokens"]) for place in places if place) == 240
    eventually(lambda: budget.num_bytes == 0)


def test_the_prompts_of_one_request_count_together(shared_client, monkeypatch):
    """Each of 8 answers holds less than the limit, and together they hold more."""
    budget = shared_client.front.engine.budget
    monkeypatch.setattr(budget, "max_answer_bytes", 210 * BYTES)
    alone = {**WHOLE, "n": 1, "max_tokens": 200}
    assert shared_client.request("POST", "/v1/completions", alone)[0] == 200
    status, _, body = shared_client.request("POST", "/v1/completions", {**alone, "prompt": ["a"] * 8})
    assert status == 400
    assert "ask for fewer, or stream it" in json.loads(body)["error"]["message"]
    eventually(lambda: shared_client.num_requests == budget.num_bytes == 0)
