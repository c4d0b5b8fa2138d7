"""What answers hold is counted, and bounded for each request and in all."""

from __future__ import annotations

import asyncio
import json

import pytest

from paged import QueueFullError, RequestError, SamplingParams
from paged.engine import answer_memory
from paged.engine.answer_memory import (
    CANDIDATE_BYTES,
    PAUSE_BYTES,
    RESUME_BYTES,
    TOKEN_BYTES,
    AnswerAccount,
    AnswerBudget,
)
from paged.options.sampling_params import RequestOutputKind
from paged.server import frames
from paged.server.inbox import Inbox, bytes_of, size_of
from tests.server.test_streams import events_of, read_all, send, slow_client
from tests.support.served import eventually, unhurried

PLACE = ([*range(21)], [-1.0] * 21, [*range(21)], ["a"] * 21)
BYTES = 1 + TOKEN_BYTES + 21 * CANDIDATE_BYTES
DELTA, FINAL_ONLY = RequestOutputKind.DELTA, RequestOutputKind.FINAL_ONLY


def new_output(num_tokens: int, *, finished: bool = False) -> frames.Output:
    completion = frames.Completion(0, "a" * num_tokens, [7] * num_tokens, logprobs=[PLACE] * num_tokens)
    return frames.Output(1, [completion], finished, None, None)


def test_an_output_counts_its_text_tokens_and_candidates():
    assert size_of(new_output(3)) == 3 * BYTES
    assert bytes_of([None, PLACE]) == 21 * CANDIDATE_BYTES


def test_what_its_reader_is_done_with_is_given_back_and_what_is_merged_is_counted():
    budget = AnswerBudget()
    inbox = Inbox("r", None, [1], DELTA, account=AnswerAccount(budget, is_whole=False))
    for _ in range(5):
        inbox.put(new_output(2))
    assert budget.num_bytes == 10 * BYTES
    assert len(asyncio.run(inbox.get()).outputs[0].token_ids) == 10
    inbox.put(new_output(2))
    assert (budget.num_bytes, inbox.account.num_unread) == (12 * BYTES, 12 * BYTES)
    inbox.release()
    assert (budget.num_bytes, inbox.account.num_unread) == (2 * BYTES, 2 * BYTES)
    inbox.give_back()
    inbox.give_back()
    assert (budget.num_bytes, inbox.account.num_unread) == (0, 0)


def test_prompt_logprobs_are_held_until_the_end_and_unread_until_the_first_output_is_sent():
    account = AnswerAccount(AnswerBudget(), is_whole=False)
    inbox = Inbox("r", None, [1, 2], DELTA, account=account)
    inbox.put_prompt([None])
    inbox.put_prompt([PLACE])
    assert account.num_unread == 0, "the request would be held, and its first output never come"
    inbox.put(frames.Output(1, [], False, None, None))
    assert account.num_unread == 21 * CANDIDATE_BYTES
    places = asyncio.run(inbox.get()).prompt_logprobs
    assert places == [None, frames.place_from_wire(PLACE)]
    assert account.num_unread == 21 * CANDIDATE_BYTES
    inbox.release()
    inbox.release()
    assert (account.num_bytes, account.num_unread) == (21 * CANDIDATE_BYTES, 0)
    inbox.give_back()
    assert account.num_bytes == 0


def test_of_a_prompt_that_is_aborted_before_its_end_no_logprobs_are_shown():
    inbox = Inbox("r", None, [1, 2, 3], FINAL_ONLY)
    inbox.put_prompt([None, PLACE])
    inbox.put(frames.Output(1, [frames.Completion(0, "", [], "abort")], True, None, None))
    assert asyncio.run(inbox.get()).prompt_logprobs is None


class Requests:
    """Which requests of an account go on."""

    def __init__(self, account: AnswerAccount, num: int) -> None:
        self.account, self.going = account, set()
        for _ in range(num):
            self.add()

    def add(self) -> int:
        key = len(self.going)
        self.going.add(key)
        self.account.join(key, self.hold)
        return key

    def hold(self, keys: list[int], is_held: bool) -> None:
        assert self.going.isdisjoint(keys) is not is_held
        self.going = self.going - {*keys} if is_held else self.going | {*keys}


def test_all_requests_of_a_reader_pause_at_the_mark_and_go_on_below_the_other():
    """Also those without an output, and those that come while the others are held."""
    account = AnswerAccount(AnswerBudget(), is_whole=False)
    requests = Requests(account, 3)
    account.grow(PAUSE_BYTES, PAUSE_BYTES)
    assert requests.going == {0, 1, 2}
    account.grow(1, 1)
    assert requests.going == set()
    account.leave(2)
    requests.going = {3}
    account.join(3, requests.hold)
    assert requests.going == set()
    account.grow(0, RESUME_BYTES - PAUSE_BYTES)
    assert requests.going == set()
    account.grow(0, -1)
    assert requests.going == {0, 1, 3}
    assert account.budget.num_pauses == 4


def test_of_results_that_grow_side_by_side_the_first_goes_on_when_they_hold_too_much():
    account = AnswerAccount(AnswerBudget(max_answer_bytes=100), is_whole=False)
    requests = Requests(account, 3)
    account.grow(51, 0)
    assert requests.going == {0}
    account.leave(0)
    account.grow(-20, 0)
    assert requests.going == {0, 1}
    account.grow(-10, 0)
    assert requests.going == {0, 1, 2}
    assert account.refusal(100) is None
    assert type(account.refusal(101)) is RequestError


def test_when_all_is_used_up_streams_pause_at_the_first_token_and_whole_answers_end():
    budget = AnswerBudget(max_bytes=100, max_answer_bytes=80)
    stream, whole = AnswerAccount(budget, is_whole=False), AnswerAccount(budget)
    requests = Requests(stream, 2)
    stream.grow(30, 30)
    whole.grow(70, 0)
    assert (requests.going, whole.refusal(70)) == ({0, 1}, None)
    stream.grow(1, 1)
    assert requests.going == set()
    assert isinstance(whole.refusal(70), QueueFullError)
    whole.grow(11, 0)
    assert type(whole.refusal(81)) is RequestError
    stream.grow(-31, -31)
    assert requests.going == {0, 1}


def test_a_large_answer_that_comes_in_one_piece_is_refused():
    account = AnswerAccount(AnswerBudget(max_answer_bytes=10 * BYTES))
    inbox = Inbox("r", None, [1], FINAL_ONLY, account=account)
    inbox.put(new_output(11, finished=True))
    refusal = inbox.refusal()
    assert type(refusal) is RequestError
    inbox.refuse(refusal)
    with pytest.raises(RequestError, match="ask for fewer, or stream it"):
        asyncio.run(inbox.get())
    assert account.num_bytes == 0


@pytest.mark.parametrize("is_whole", [True, False], ids=["whole", "streamed"])
def test_the_prompts_of_a_whole_answer_are_checked_together(is_whole):
    account = AnswerAccount(AnswerBudget(), is_whole=is_whole)
    params = SamplingParams(prompt_logprobs=20, max_tokens=1)

    def expect(num: int) -> None:
        for _ in range(num):
            account.expect(params, 1900, max_model_len=2048, vocab_size=4096)

    expect(33)
    if is_whole:
        with pytest.raises(RequestError, match=r"^prompt_logprobs of 1,900 tokens would, with all before"):
            expect(1)
    else:
        expect(100)


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
        account = AnswerAccount(AnswerBudget())
        account.expect(SamplingParams(**params, output_kind=kind), 100, **sizes)

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
    status, headers, body = shared_client.request("POST", "/v1/completions", {**WHOLE, "max_tokens": 40})
    assert (status, "retry-after" in headers) == (429, True)
    assert "the answers in progress take more than" in json.loads(body)["error"]["message"]
    eventually(lambda: shared_client.num_requests == budget.num_bytes == 0)
    assert shared_client.post("/v1/completions", **WHOLE, max_tokens=3)["usage"]["completion_tokens"] == 12
    streamed = shared_client.events("/v1/completions", **WHOLE, max_tokens=30)
    places = [choice["logprobs"] for e in streamed[:-1] for choice in json.loads(e)["choices"]]
    assert sum(len(place["tokens"]) for place in places if place) == 120
    eventually(lambda: budget.num_bytes == 0)


def test_the_prompts_of_one_request_count_together(shared_client, monkeypatch):
    """Each of 8 answers holds less than the limit, and together they hold more."""
    budget = shared_client.front.engine.budget
    monkeypatch.setattr(budget, "max_answer_bytes", 21 * BYTES)
    alone = {**WHOLE, "n": 1, "max_tokens": 20}
    assert shared_client.request("POST", "/v1/completions", alone)[0] == 200
    status, _, body = shared_client.request("POST", "/v1/completions", {**alone, "prompt": ["a"] * 8})
    assert status == 400
    assert "tokens could, with all before them, take" in json.loads(body)["error"]["message"]
    eventually(lambda: shared_client.num_requests == budget.num_bytes == 0)


@pytest.mark.parametrize("stream", [True, "deltas"])
def test_streamed_results_together_may_hold_more_than_a_whole_answer(stream, shared_client, monkeypatch):
    """Each of 8 results holds two thirds of the limit: all come, and none is refused."""
    budget = shared_client.front.engine.budget
    monkeypatch.setattr(budget, "max_answer_bytes", 60 * BYTES)
    body = {"prompts": ["a"] * 8, "logprobs": 20, "max_tokens": 40, "ignore_eos": True, "stream": stream}
    status, _, lines = shared_client.request("POST", "/generate", body)
    assert status == 200
    num_places = [0] * 8
    for line in lines.splitlines():
        result = json.loads(line)
        num_places[result["index"]] += len(result["logprobs"])
    assert num_places == [40] * 8
    eventually(lambda: shared_client.num_requests == budget.num_bytes == 0)


def test_a_stream_of_many_prompts_that_is_not_read_holds_little(shared_client, monkeypatch):
    """Few of its prompts are computed before a later request has ended, and all come when it is read."""
    budget = shared_client.front.engine.budget
    grow, came = AnswerAccount.grow, [0]

    def noted(account: AnswerAccount, num_bytes: int, num_unread: int) -> None:
        grow(account, num_bytes, num_unread)
        came[0] += max(num_bytes, 0)

    monkeypatch.setattr(AnswerAccount, "grow", noted)
    monkeypatch.setattr(answer_memory, "PAUSE_BYTES", PAUSE_BYTES // 8)
    monkeypatch.setattr(answer_memory, "RESUME_BYTES", RESUME_BYTES // 8)
    num_prompts, num_tokens = 40, 200
    prompts = [[5 + i] * num_tokens for i in range(num_prompts)]
    body = {"prompt": prompts, "echo": True, "logprobs": 20, "max_tokens": 1, "stream": True}
    num_pauses = budget.num_pauses
    with slow_client(shared_client) as client:
        with unhurried(shared_client.front.engine, 0.5):  # else all might come before it pauses
            send(client, body)
            eventually(lambda: budget.num_pauses > num_pauses)
        shared_client.post("/v1/completions", prompt="a", max_tokens=20)
        assert came[0] < num_prompts * num_tokens * 21 * CANDIDATE_BYTES / 2
        got = read_all(client)
    choices = [choice for event in events_of(got)[:-1] for choice in json.loads(event)["choices"]]
    places = [0] * num_prompts
    for choice in choices:
        places[choice["index"]] += len(choice["logprobs"]["tokens"]) if choice["logprobs"] else 0
    assert places == [num_tokens + 1] * num_prompts
    eventually(lambda: shared_client.num_requests == budget.num_bytes == 0)


def test_a_body_that_is_read_slowly_keeps_no_memory_from_others(shared_client, monkeypatch):
    """Once it is written as JSON, its log-probabilities count no more; and it is cut before others wait."""
    budget, responses = shared_client.front.engine.budget, shared_client.front.response_budget
    body = {**WHOLE, "max_tokens": 60}
    with slow_client(shared_client) as first:
        send(first, body)
        eventually(lambda: responses.num_bytes > 0)
        assert budget.num_bytes == 0
        monkeypatch.setattr(responses, "max_bytes", responses.num_bytes)
        choices = shared_client.post("/v1/completions", **body)["choices"]
        assert [len(choice["logprobs"]["tokens"]) for choice in choices] == [60] * 4
        with pytest.raises(ConnectionResetError):
            read_all(first)
    eventually(lambda: responses.num_bytes == 0)


def test_an_answer_whose_outputs_come_in_one_piece_is_bounded(shared_client, monkeypatch):
    """The best of several samples is known when all have ended."""
    budget = shared_client.front.engine.budget
    monkeypatch.setattr(budget, "max_answer_bytes", 50 * BYTES)
    monkeypatch.setattr(AnswerAccount, "expect", lambda *_, **__: None)
    body = {**WHOLE, "n": 1, "best_of": 2, "max_tokens": 40}
    assert shared_client.request("POST", "/v1/completions", body)[0] == 200
    status, _, data = shared_client.request("POST", "/v1/completions", {**body, "prompt": ["a", "b"]})
    assert status == 400
    assert "ask for fewer, or stream it" in json.loads(data)["error"]["message"]
    eventually(lambda: shared_client.num_requests == budget.num_bytes == 0)
