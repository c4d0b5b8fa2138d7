"""Large bodies and answers: they are bounded, and other requests are answered meanwhile."""

from __future__ import annotations

import json
import random
import re
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from typing import Any

import pytest

from paged.base.errors import RequestError
from paged.base.strict_json import parse_json
from paged.protocol.calls.completions import CompletionCall
from paged.server.http import budgets, exchange, large_json
from paged.server.http.budgets import BodyBudget, BodyRoom
from paged.text.tokenizer import Tokenizer
from tests.server.test_refusals import LONG, posted
from tests.support.served import eventually, serving, unhurried

COMPLETION = "/v1/completions"


def test_a_text_with_far_too_many_tokens_is_not_tokenized(served, monkeypatch):
    """Only its beginning is, of a length that depends on max_model_len."""
    lengths = []
    encode = Tokenizer.encode

    def counting(tokenizer, text, **options):
        lengths.append(len(text))
        return encode(tokenizer, text, **options)

    monkeypatch.setattr(Tokenizer, "encode", counting)
    long = "def add(a, b): return a\n" * 200_000
    for body, param in [({"prompt": long}, "prompt"), ({"tokens": [5] * (4 * 2048 + 1)}, "tokens")]:
        status, _, data = served.request("POST", "/tokenize" if param == "prompt" else "/detokenize", body)
        error = json.loads(data)["error"]
        assert (status, error["param"]) == (400, param)
        assert "8,192 is the most, 4 times max_model_len 2,048" in error["message"]
    assert 0 < sum(lengths) < 10 * 4 * 2048 * 8
    words = "def " * 1900  # the limit leaves room for whole contexts
    assert served.post("/tokenize", prompt=words)["count"] >= 1900


def test_others_are_answered_while_a_text_is_tokenized(served, monkeypatch):
    """Tokenizing waits here until the other request has been answered."""
    is_begun, is_answered, encode = threading.Event(), threading.Event(), Tokenizer.encode

    def held(tokenizer, text, **options):
        is_begun.set()
        assert is_answered.wait(60)
        return encode(tokenizer, text, **options)

    monkeypatch.setattr(Tokenizer, "encode", held)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(served.post, "/tokenize", prompt="def " * 1900)
        assert is_begun.wait(60)
        assert served.request("GET", "/health")[0] == 200
        is_answered.set()
        assert answer.result()["count"] >= 1900


@pytest.mark.parametrize("name", ["params", "body"])
def test_others_are_answered_while_a_large_request_is_prepared_or_answered(name, served, monkeypatch):
    is_begun, is_answered = threading.Event(), threading.Event()
    work = getattr(CompletionCall, name)

    def held(call, *args, **options):
        is_begun.set()
        assert is_answered.wait(60)
        return work(call, *args, **options)

    monkeypatch.setattr(CompletionCall, name, held)
    body = {"prompt": [[5] * 600] * 50, "max_tokens": 1}
    assert len(json.dumps(body)) > exchange.PARSED_AT_ONCE
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(served.post, COMPLETION, **body)
        assert is_begun.wait(60)
        assert served.request("GET", "/health")[0] == 200
        is_answered.set()
        assert len(answer.result()["choices"]) == 50


def test_encoding_in_pieces():
    token = {"token": "\ud800a", "logprob": -0.5, "top_logprobs": [{"token": "b", "bytes": [1, 2]}]}
    value = {"id": "x", "choices": [{"logprobs": {"content": [token] * 2}, "n": None}], "ids": [1], "e": []}
    assert json.loads(exchange.encode_in_pieces(value)) == value
    del token["token"]
    assert exchange.encode_in_pieces(value) == exchange.encode_json(value)


def test_bodies_of_requests_in_progress_are_bounded(engine, monkeypatch):
    """While they are read, and until their responses end; small ones are not kept out by large ones."""
    monkeypatch.setattr(exchange, "WAIT_FOR_ROOM_S", 0.0)
    monkeypatch.setattr(budgets, "STALL_S", 3600.0)
    json_type = {"content-type": "application/json"}
    large = json.dumps({"prompt": "a", "max_tokens": 1}).encode().ljust(150_000)
    with serving(engine) as served:
        budget = served.front.body_budget
        budget.max_bytes = 300_000

        def check_refused() -> None:
            status, headers, data = served.request("POST", COMPLETION, large, json_type)
            assert (status, headers["retry-after"]) == (503, "1")
            assert b"300,000 bytes" in data
            served.post(COMPLETION, prompt="a", max_tokens=1)

        with served.connect() as client:  # one that is being read
            client.sendall(posted({})[:-2].replace(b": 2", b": 250000") + b" " * 200_000)
            eventually(lambda: budget.num_bytes == 200_000)
            assert not served.front.is_idle
            check_refused()
        eventually(lambda: budget.num_bytes == 0)
        with unhurried(engine), served.connect() as client:  # one that is being answered
            client.sendall(posted({**LONG, "bad_words": ["x" * 80_000] * 2}))
            eventually(lambda: served.num_requests == 1)
            assert budget.num_bytes > 150_000
            assert budget.num_containers == 2
            check_refused()
        eventually(lambda: budget.num_bytes == 0)
        assert served.request("POST", COMPLETION, large, json_type)[0] == 200
        assert served.request("POST", COMPLETION, large.replace(b'"prompt"', b'"promt"'), json_type)[0] == 400
        eventually(lambda: budget.num_bytes == 0)
        assert budget.num_containers == 0
        budget.check()


def test_a_stalled_body_loses_its_room_to_another(engine, monkeypatch):
    """It is told so; the other one waits until then."""
    monkeypatch.setattr(budgets, "STALL_S", 0.2)
    monkeypatch.setattr(exchange, "WAIT_FOR_ROOM_S", 60.0)
    monkeypatch.setattr(exchange, "LOOK_FOR_ROOM_S", 0.01)
    with serving(engine, body_timeout_s=600) as served, ExitStack() as stack:
        budget = served.front.body_budget
        budget.max_bytes = 300_000
        stalled = [stack.enter_context(served.connect()) for _ in range(3)]
        for client in stalled:
            client.sendall(posted({})[:-2].replace(b": 2", b": 80001") + b" " * 80_000)
        eventually(lambda: budget.num_bytes == 220_000 or budget.num_bytes == 160_000)
        large = json.dumps({"prompt": "a", "max_tokens": 1}).encode().ljust(150_000)
        assert served.request("POST", COMPLETION, large, {"content-type": "application/json"})[0] == 200
        answer = stalled[0].recv(2**16)
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert b"connection: close" in answer
        assert b"others needed its room" in answer


def test_room_is_divided_among_clients():
    """Whatever they send: there is always room for one more, and what each has comes back."""
    rng = random.Random(0)
    now = [0.0]
    budget = BodyBudget(2**20, clock=lambda: now[0])
    rooms: list[BodyRoom] = []
    whole: set[BodyRoom] = set()
    lost: list[str] = []
    refused = Counter()
    for _ in range(3000):
        now[0] += rng.choice([0.0, 0.1, 0.3])
        match rng.randrange(5):
            case 0:
                client = rng.choice("aab")
                rooms.append(budget.open(client, partial(lost.append, client)))
            case 1 if rooms:
                whole.add(room := rng.choice(rooms))
                room.finish_reading()
            case 2 if rooms:
                rooms.pop(rng.randrange(len(rooms))).close()
            case _ if rooms and (room := rng.choice(rooms)) not in whole:
                refused[room.grow(rng.choice([1000, 50_000, 300_000]))] += 1
        rooms = [room for room in rooms if not room.is_lost]
        budget.check()
        assert budget.num_bytes == sum(room.num_bytes for room in rooms)
        assert budget.num_bytes < budget.max_bytes + budgets.SMALL_BODIES_BYTES
    assert min(refused.values()) > 20
    assert len(lost) > 20
    for room in rooms:
        room.close()
    assert budget.num_bytes == 0
    # A client alone may have three quarters, and the next one three quarters of the rest.
    alone, other = (budget.open(client, lambda: None) for client in "ab")
    while alone.grow(2**16):
        pass
    assert alone.num_bytes == 0.75 * 2**20
    while other.grow(2**14):
        pass
    assert 0.7 < other.num_bytes / (0.25 * 2**20) <= 1


# The values of a body


def bodies_with(entry: str, num: int) -> bytes:
    return b'{"prompt": "a", "max_tokens": 1, "metadata": {"x": [%b]}}' % b",".join([entry.encode()] * num)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (bodies_with("[]", 50_000), "objects and arrays, which is the most for 150,0"),
        (bodies_with('{"a":1}', 300_000), "more than 131,072 objects and arrays"),
        (bodies_with("1", 2**21 + 1), "more than 2,097,152 values"),
        (
            bodies_with("0." + "3" * 17, 2**16 + 1),
            "more than 65,536 numbers with more digits than float64 has",
        ),
        (bodies_with("3" * 10_000, 20), "10,000 characters; no number here may be that long"),
        (bodies_with("0." + "3" * 10_000, 20), "10,002 characters; no number here may be that long"),
        (bodies_with("3" * 10**6, 1), "a number has more than 32,768 characters"),
        (b'{"%b": 1}' % (b"k" * 10**6), "a name in an object has more than 32,768 bytes"),
        (
            b"{%b}" % b",".join(b'"%x":1' % i for i in range(2**18 + 1)),
            "an object has more than 262,144 names",
        ),
        (b"[" * 10**6, "nested more than 64 deep"),
        (b'{"prompt": "' + b"x" * 10**6, "Unterminated string"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_has_too_many_values_is_refused_before_any_is_made(body, message, served, monkeypatch):
    status, _, data = served.request("POST", COMPLETION, body, {"content-type": "application/json"})
    assert status == 400
    assert message in json.loads(data)["error"]["message"]
    if "more than" in message and " objects and" in message:
        monkeypatch.setattr(large_json, "_Parser", None)
        with pytest.raises(RequestError, match="more than"):
            large_json.parse_body(body)


def test_what_clients_send_is_within_the_bounds():
    tool = {"type": "object", "properties": {f"f{i}": {"type": "string"} for i in range(30)}}
    for value in (
        {"prompt": [i % 130_000 for i in range(2**20)]},
        {"prompt": '😀 \n"' * 20_000},
        {"prompts": [[7] * 90 for _ in range(2048)]},
        {"input": ["a text"] * 2048},
        {"logit_bias": {str(i): -1.5 for i in range(50_000)}},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}] * 4000},
        {
            "tools": [
                {"type": "function", "function": {"name": f"t{i}", "parameters": tool}} for i in range(128)
            ]
        },
    ):
        body = json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()
        assert large_json.parse_body(body) == value


UNITS = ['"a\\n"', '"\\ud83d\\ude00"', '"é€😀"', "[", "]", "{", "}", '"a":', ",", "12", "-0.5e3", " ", "null"]


@pytest.mark.parametrize("piece", [1, 5, 40])
def test_pieces_make_the_same_value_as_the_whole(piece, monkeypatch):
    """Or the same refusal, of whole texts and of damaged ones."""
    monkeypatch.setattr(large_json, "_PIECE", piece)
    monkeypatch.setattr(large_json, "PARSED_AT_ONCE", 0)
    monkeypatch.setattr(large_json, "FREE_CONTAINERS", 1000)
    for text in WRONG_TEXTS:
        assert {outcome(parse, text.encode())[:8] for parse in (parse_json, large_json.parse_body)} == {
            "refused:"
        }, text
    rng = random.Random(piece)
    found = Counter()
    for _ in range(600):
        data = json.dumps(random_value(rng, 0), ensure_ascii=rng.random() < 0.5).encode("utf-8", "replace")
        if rng.random() < 0.5:
            at = rng.randrange(len(data) + 1)
            data = data[:at] + rng.choice(UNITS).encode() + data[at + rng.randrange(3) :]
        outcomes = [outcome(parse, data) for parse in (parse_json, large_json.parse_body)]
        if re.match("refused: a (name in an object|number) has more than", str(outcomes[1])):
            continue  # a bound that is lower here
        is_refused = [type(each) is str and each.startswith("refused") for each in outcomes]
        assert is_refused[0] == is_refused[1], (data, outcomes)
        assert is_refused[0] or repr(outcomes[0]) == repr(outcomes[1]), data
        found[is_refused[0]] += 1
    assert min(found.values()) > 100


WRONG_TEXTS = [
    *[
        "[,1]",
        "[1,]",
        "[1,,2]",
        "[1,[,2]]",
        "[[1,],2]",
        "[1,[2,]]",
        "1,2",
        "[1],[2]",
        "[1}",
        "[1:2]",
        "[1,2]]",
    ],
    *['{"a":1,}', '{,"a":1}', '{"a":1,,"b":2}', '{"a",1}', '{"a":[1,2}', '{"a":"b","c"}', "[1,2", "[1 2,3]"],
    *[
        '{"a":1,"b":2,"a":3}',
        '{"b":[1,2],"c":3,"b":4}',
        '{"x":{"a":[1,2],"b":2,"a":1}}',
        '[{"a":1,"b":2,"a":3}]',
    ],
    *[
        "[1,01]",
        "[1,-]",
        '["a,b]',
        '[1,"\\"]',
        "[Infinity,1]",
        "[1,NaN]",
        '[-Infinity,"aaaaaaaaaaaaaaaaaaaaaaaa"]',
    ],
]


def random_value(rng: random.Random, depth: int) -> Any:
    match rng.randrange(7 if depth < 5 else 4):
        case 0:
            return rng.choice([0, -1, 10**25, 0.1, 1e300, True, None, 1.2345678901234567])
        case 1 | 2:
            return "".join(rng.choices('a"\\é€😀[],{\n\u0001Ā', k=rng.choice([0, 1, 5, 60])))
        case 3:
            return [rng.randrange(5000) for _ in range(rng.choice([0, 1, 30]))]
        case 4 | 5:
            return [random_value(rng, depth + 1) for _ in range(rng.randrange(5))]
    names = {"".join(rng.choices('ab"é,[]', k=3)) for _ in range(rng.randrange(4))}
    return {name: random_value(rng, depth + 1) for name in sorted(names)}


def outcome(parse, data: bytes) -> Any:
    try:
        return parse(data)
    except RequestError as error:
        return f"refused: {error}"
