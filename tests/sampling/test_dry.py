"""DRY against brute force, and bad words and breakers as tokens."""

from __future__ import annotations

import math
import random
import sys
from collections import UserList
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import paged
from paged import SamplingParams
from paged.base.errors import RequestError
from paged.requests.request import Request, RequestInputs
from paged.requests.token_rules import TokenRules
from paged.requests.tokenized_rules import tokenized
from paged.sampling.dry import DryHistory
from paged.text.tokenizer import Tokenizer

VOCAB_SIZE = 13


def new_request(ids: Iterable[int], breakers: Iterable[Sequence[int]] = (), **params: Any) -> Request:
    """Make a request with this text and these breakers, as token sequences."""
    found: dict[tuple[int, ...], set[int]] = {}
    for head, *tail in breakers:
        found.setdefault((*tail,), set()).add(head)
    sampling = SamplingParams(**{"dry_multiplier": 2.0, "dry_base": 3.0, **params})
    rules = TokenRules(breakers=found)
    inputs = RequestInputs(prompt_token_ids=[*ids], params=sampling, max_total_tokens=10_000, rules=rules)
    return Request(inputs)


def new_history(*requests: Request) -> DryHistory:
    history = DryHistory(torch.device("cpu"))
    history.keep(requests)
    return history


def costs_of(history: DryHistory, num_rows: int) -> list[dict[int, float]]:
    """Update, and return the cost of each token with one, for each row."""
    history.update()
    history.check()
    logits = torch.zeros(num_rows, VOCAB_SIZE)
    history.apply(logits.view(-1), torch.arange(num_rows) * VOCAB_SIZE)
    return [{token: -x for token, x in enumerate(row) if x} for row in logits.tolist()]


def brute_force(request: Request) -> dict[int, float]:
    """Walk back from every earlier occurrence of the last token, up to the breaker that starts last."""
    params, ids = request.inputs.params, request.token_ids
    ids = ids if params.dry_penalty_last_n < 0 else ids[max(0, len(ids) - params.dry_penalty_last_n) :]
    breakers = [(head, *tail) for tail, heads in request.inputs.rules.breakers.items() for head in heads]
    behind = len(ids)
    for i in range(len(ids)):
        if ends := [i + len(b) for b in breakers if (*ids[i : i + len(b)],) == b]:
            behind = len(ids) - max(ends)
    lengths: dict[int, int] = {}
    for i in range(1, len(ids)):
        n = 0
        while n < min(i, behind) and ids[i - 1 - n] == ids[-1 - n]:
            n += 1
        lengths[ids[i]] = max(n, lengths.get(ids[i], 0))
    costs = {
        token: params.dry_multiplier * params.dry_base ** (n - params.dry_allowed_length)
        for token, n in lengths.items()
        if n >= params.dry_allowed_length and (token,) not in breakers
    }
    return {token: torch.tensor(cost, dtype=torch.float32).item() for token, cost in costs.items()}


@pytest.mark.parametrize("num_known", [1, 4, 8])
@pytest.mark.parametrize(
    ("params", "breakers", "costs"),
    [
        # 9 followed the last three tokens before: 2 * 3 ** (3 - 2).
        ({}, [], {9: 6.0}),
        ({"dry_allowed_length": 1}, [], {9: 18.0}),
        ({"dry_allowed_length": 4}, [], {}),
        ({"dry_allowed_length": 2**63 - 1}, [], {}),
        ({"dry_penalty_last_n": 6}, [], {9: 2.0}),  # the window covers two of the three
        ({"dry_penalty_last_n": 5}, [], {}),
        # No repetition reaches across a breaker, and a breaker itself costs nothing.
        ({}, [[1]], {9: 2.0}),
        ({}, [[2]], {}),
        ({}, [[9]], {}),
        # A breaker of several tokens, and one of which only the start occurs.
        ({}, [[9, 1]], {9: 2.0}),
        ({}, [[9, 1, 2]], {}),
        ({}, [[9, 2], [3, 4]], {9: 6.0}),
        # Of several breakers, the one that starts last, and of these the longest.
        ({}, [[9, 1, 2], [1]], {9: 2.0}),
        ({}, [[1], [1, 2]], {}),
    ],
    ids=str,
)
def test_by_hand(num_known, params, breakers, costs):
    ids = [5, 1, 2, 3, 9, 1, 2, 3]
    request = new_request(ids[:num_known], breakers, **params)
    history = new_history(request)
    for token in ids[num_known:]:
        request.token_ids.append(token)
        history.update()
    assert costs_of(history, 1) == [costs] == [brute_force(request)]


@pytest.mark.parametrize("num_known", [1, 5])
def test_breaker_partly_outside_the_window_does_not_count(num_known):
    for last_n, costs in ((4, {1: 6.0}), (5, {})):
        request = new_request([8, 1, 1, 1, 1][:num_known], [[8, 1, 1, 1]], dry_penalty_last_n=last_n)
        history = new_history(request)
        for _ in range(5 - num_known):
            request.token_ids.append(1)
            history.update()
        assert costs_of(history, 1) == [costs] == [brute_force(request)]


def random_request(rng: random.Random) -> Request:
    breakers = [rng.choices(range(4), k=rng.choice([1, 1, 2, 3])) for _ in range(rng.randrange(3))]
    return new_request(
        rng.choices(range(rng.randrange(1, 5)), k=rng.randrange(1, 30)),
        breakers,
        dry_multiplier=rng.choice([0.3, 2.0]),
        dry_base=rng.choice([1.0, 1.0 + 1e-9, 1.1, 1.75]),
        dry_allowed_length=rng.choice([1, 2, 3, 9]),
        dry_penalty_last_n=rng.choice([-1, -1, 1, 7, 20]),
    )


@pytest.mark.parametrize("seed", range(12))
def test_equals_brute_force_after_every_token_while_requests_come_and_go(seed):
    rng = random.Random(seed)
    requests = [random_request(rng) for _ in range(8)]
    batch, history = requests[:3], new_history(*requests[:3])
    for _ in range(50):
        if rng.random() < 0.25:
            batch = rng.sample(requests, rng.randrange(len(requests)))
            history.keep(batch)
        assert costs_of(history, len(batch)) == [brute_force(request) for request in batch]
        for request in batch:
            request.token_ids.append(rng.randrange(rng.randrange(1, 5)))


def test_rows_are_changed_in_place():
    requests = [new_request([1, 2, 3, 1, 2]), new_request([4, 4, 4, 4])]
    history, logits = new_history(*requests), torch.full((4, VOCAB_SIZE), 0.5)
    logits[3, 3], logits[1, 4] = -math.inf, 7.0
    expected = logits.clone()
    expected[1, 4] -= 6.0
    history.apply(logits.view(-1), torch.tensor([3, 1]) * VOCAB_SIZE)
    assert torch.equal(logits, expected)


@pytest.mark.parametrize("num_known", [1, 4000])
def test_long_repetitions_cost_a_finite_number(num_known):
    ids = [1, 2] * 2000
    request = new_request(ids[:num_known], dry_multiplier=1e8)
    history = new_history(request)
    for token in ids[num_known:]:
        request.token_ids.append(token)
        history.update()
    logits = torch.zeros(VOCAB_SIZE)
    history.apply(logits, torch.zeros(1, dtype=torch.int64))
    assert logits.nonzero().tolist() == [[1]]
    # 3 ** 62 is the last power below 1e30.
    assert -logits[1].item() == torch.tensor(1e8 * 3.0**62, dtype=torch.float32).item() < math.inf


@pytest.mark.parametrize("step", ["one token less", "two tokens more", "the same again"])
def test_texts_that_did_not_all_grow_by_a_token(step):
    requests = [new_request([1, 2, 3, 1]), new_request([4, 5, 4, 5])]
    history = new_history(*requests)
    costs_of(history, 2)
    requests[0].token_ids += [2]
    if step == "two tokens more":
        requests[1].token_ids += [4, 5]
    elif step == "the same again":
        requests[1].token_ids += [4]
        before = costs_of(history, 2)
        assert before == costs_of(history, 2)
    assert costs_of(history, 2) == [brute_force(request) for request in requests]


@pytest.mark.parametrize("name", ["_ints", "_append", "_find"])
@pytest.mark.parametrize("change", ["update", "keep"])
def test_an_interrupted_change_is_repaired(monkeypatch, change, name):
    requests = [new_request([1, 2, 3, 1]), new_request([4, 5, 4, 5]), new_request([6, 6, 6])]
    history = new_history(*requests[:2])

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    for request in requests:
        request.token_ids.append(request.token_ids[1])
    run = history.update if change == "update" else lambda: history.keep(requests[1:])
    with monkeypatch.context() as patch:
        patch.setattr(history, name, interrupted)
        with pytest.raises(KeyboardInterrupt):
            run()
    kept = requests[:2] if change == "update" else requests[1:]
    assert costs_of(history, 2) == [brute_force(request) for request in kept]
    history.keep(requests)
    assert costs_of(history, 3) == [brute_force(request) for request in requests]


def test_memory_outside_all_windows_is_freed():
    windows = [new_request([1, 2], dry_penalty_last_n=8) for _ in range(3)]
    history = new_history(*windows)
    for i in range(300):
        for request in windows:
            request.token_ids.append(i % 5)
        history.update()
        assert history.capacity <= 64
    assert costs_of(history, 3) == [brute_force(request) for request in windows]
    # New requests are not read beyond their window either.
    assert new_history(*windows).capacity <= 64
    history.keep(windows[:1])
    assert history.capacity <= 24
    history.keep([])
    assert history.capacity == 0
    history.check()


class Watched(UserList[int]):
    """A text that counts reads of its tokens."""

    reads = 0

    def __getitem__(self, key: Any) -> Any:
        found = self.data[key]
        Watched.reads += len(found) if isinstance(key, slice) else 1
        return found


def instructions_of(history: DryHistory) -> int:
    """Count the bytecode instructions that one step executes."""
    count = 0

    def trace(frame: Any, event: str, _: Any) -> Any:
        nonlocal count
        frame.f_trace_opcodes = True
        count += event == "opcode"
        return trace

    logits, rows = torch.zeros(3 * VOCAB_SIZE), torch.arange(3) * VOCAB_SIZE
    tracing = sys.gettrace()
    sys.settrace(trace)
    try:
        history.update()
        history.apply(logits, rows)
    finally:
        sys.settrace(tracing)
    return count


@pytest.mark.parametrize("period", [1, 2, 7, 9999])
def test_work_of_a_step_does_not_depend_on_the_length_of_the_texts(period):
    """Neither the bytecode instructions executed, nor the tokens read."""
    seen = []
    for num_tokens in (40, 4000):
        texts = [[i % period % 11 for i in range(num_tokens + n)] for n in range(3)]
        requests = [new_request(ids, [[12], [11, 11]]) for ids in texts]
        history = new_history(*requests)
        for request in requests:
            request.token_ids = Watched(request.token_ids)
        for _ in range(2):  # the first allocates
            for request in requests:
                request.token_ids.append(request.token_ids[-period] if period < 40 else 5)
            Watched.reads = 0
            steps = instructions_of(history)
        seen.append((steps, Watched.reads))
    assert seen[0] == seen[1]
    assert 0 < seen[0][1] < 30


class Counted(int):
    """A token that counts comparisons."""

    comparisons = 0
    __hash__ = int.__hash__

    def __eq__(self, other: object) -> bool:
        Counted.comparisons += 1
        return int.__eq__(self, other)


@pytest.mark.parametrize("base", [1.0, 1.0 + 1e-9, 3.0])
def test_repetitive_text_is_read_in_linear_time(base):
    n = 2000
    request = new_request([Counted(1 + i % 2) for i in range(n)], dry_base=base)
    Counted.comparisons = 0
    history = new_history(request)
    assert Counted.comparisons < 10 * n
    logits = torch.zeros(VOCAB_SIZE)
    history.apply(logits, torch.zeros(1, dtype=torch.int64))
    assert logits[1] <= -2.0


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer(Path(paged.__file__).parent / "demo")


def rules_of(tokenizer: Tokenizer, bad_words: Any = (), breakers: Any = ()) -> TokenRules:
    return tokenized(bad_words, breakers, tokenizer.encode_bare, lambda: tokenizer.token_texts)


def test_token_texts_are_what_tokens_append(tokenizer):
    texts = tokenizer.token_texts
    ids = tokenizer.encode_bare("def add(a, b):\n    return a")
    assert "".join(texts[i] for i in ids) == "def add(a, b):\n    return a"


def test_bad_words_are_spelled_with_and_without_a_space(tokenizer):
    words = rules_of(tokenizer, ["return", " import os"]).bad_words
    texts = [tokenizer.hf.decode([*word]) for word in words]
    assert texts == ["return", " return", "import os", " import os"]


def test_breakers_are_all_tokens_that_contain_them(tokenizer):
    breakers = rules_of(tokenizer, breakers=["\n"]).breakers
    holding = {i for i, text in enumerate(tokenizer.token_texts) if "\n" in text}
    assert breakers[()] == holding
    assert len(holding) > 5
    # A breaker of several characters may be spread over tokens.
    spread = rules_of(tokenizer, breakers=["):"]).breakers
    (paren,) = tokenizer.encode_bare(")")
    assert paren in spread[tuple(tokenizer.encode_bare(":"))]


def breakers_by_force(tokenizer: Tokenizer, strings: list[str]) -> dict[tuple[int, ...], set[int]]:
    """Look for every string in every token's text, and for every start of one at its end, like llama.cpp."""
    encode, found = tokenizer.encode_bare, {}
    for string in strings:
        before, together = encode("a"), encode(f"a{string}")
        wholes = [encode(string)]
        if together[: len(before)] == before:
            wholes.append(together[len(before) :])
        for whole in filter(None, wholes):
            found.setdefault((*whole[1:],), set()).add(whole[0])
        for token, text in enumerate(tokenizer.token_texts):
            if string in text:
                found.setdefault((), set()).add(token)
                continue
            for n in range(1, len(string)):
                if text.endswith(string[:n]):
                    found.setdefault((*encode(string[n:]),), set()).add(token)
    return found


def test_breakers_equal_brute_force(tokenizer):
    strings = ["\n", ":", "    return", "):\n", "aa", "aaa", "é", "\u2603", "self.self.", "\n\n\n"]
    breakers = rules_of(tokenizer, breakers=strings).breakers
    assert breakers == breakers_by_force(tokenizer, strings)
    assert sum(map(len, breakers.values())) > 300


class CountedText(str):
    """A token's text that counts searches in it."""

    looks = 0

    def __contains__(self, part: str) -> bool:
        CountedText.looks += 1
        return str.__contains__(self, part)

    def endswith(self, *args: Any) -> bool:
        CountedText.looks += 1
        return str.endswith(self, *args)


def test_many_long_breakers_are_compiled_in_linear_time():
    texts = [CountedText(chr(97 + i % 26) * (1 + i % 5)) for i in range(2000)]
    breakers = [chr(97 + i % 26) + "xyz"[i % 3] * 39 for i in range(64)]
    tokenized((), breakers, lambda text: [ord(c) for c in text], lambda: texts)
    assert CountedText.looks < 20 * len(texts)


def test_strings_that_cannot_be_tokens_are_refused(tokenizer):
    with pytest.raises(RequestError, match="not valid Unicode"):
        rules_of(tokenizer, ["\ud800"])
    with pytest.raises(RequestError, match="at most 64 strings of at most 40 characters, got 65"):
        rules_of(tokenizer, breakers=[chr(97 + i % 26) * (1 + i // 26) for i in range(65)])
    with pytest.raises(RequestError, match="bad_words need the tokenizer"):
        tokenized(["a"], (), None, list)
    with pytest.raises(RequestError, match="pass dry_sequence_breakers="):
        tokenized((), ["a"], None, list)
