"""Large bodies and answers: they are bounded, and other requests are answered meanwhile."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from paged.protocol.calls.completions import CompletionCall
from paged.server.http import exchange
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


def test_bodies_of_requests_in_progress_are_bounded(engine):
    """While they are read, and until their responses end; small ones are not kept out by large ones."""
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
            check_refused()
        eventually(lambda: budget.num_bytes == 0)
        with unhurried(engine), served.connect() as client:  # one that is being answered
            client.sendall(posted({**LONG, "bad_words": ["x" * 80_000] * 2}))
            eventually(lambda: served.num_requests == 1)
            assert budget.num_bytes > 150_000
            check_refused()
        eventually(lambda: budget.num_bytes == 0)
        assert served.request("POST", COMPLETION, large, json_type)[0] == 200
        assert served.request("POST", COMPLETION, large.replace(b'"prompt"', b'"promt"'), json_type)[0] == 400
        eventually(lambda: budget.num_bytes == 0)
