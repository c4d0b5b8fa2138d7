"""Large bodies and answers: they are bounded, and other requests are answered meanwhile."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor

from paged.text.tokenizer import Tokenizer

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
    is_answered, encode = threading.Event(), Tokenizer.encode

    def held(tokenizer, text, **options):
        assert is_answered.wait(10)
        return encode(tokenizer, text, **options)

    monkeypatch.setattr(Tokenizer, "encode", held)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(served.post, "/tokenize", prompt="def " * 1900)
        assert served.request("GET", "/health")[0] == 200
        is_answered.set()
        assert answer.result()["count"] >= 1900
