"""A grammar that is small to write is small in memory, or refused."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import psutil
import pytest

from paged import RequestError, StructuredOutputsParams
from paged.architectures.config import DEMO
from paged.sampling.structured_outputs import Grammars
from paged.text.tokenizer import Tokenizer

pytest.importorskip("llguidance")
MOST_BYTES = 64 * 2**20
NESTED = 'start: a{1000}\na: b{1000}\nb: c{1000}\nc: "x" | "y"'


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    tokenizer = Tokenizer(Path(DEMO))
    made = Grammars(tokenizer, len(tokenizer), frozenset([0]))
    made.start(StructuredOutputsParams(regex="a"))  # so that the vocabulary is in memory
    return made


HOSTILE = {
    "repetitions": {"regex": "((((a{100}){100}){100}){100})"},
    "an automaton of 2**200 states": {"regex": ".*a.{200}b.{200}c"},
    "long counts": {"regex": "(.*a.{1000}){30}"},
    "rules": {"grammar": NESTED},
    "multiples of numbers with few digits": {"json": {"type": "integer", "multipleOf": 9_973}},
    "a long string": {"json": {"type": "string", "minLength": 10**6, "maxLength": 10**6}},
    "a long array": {"json": {"type": "array", "items": {"type": "integer"}, "maxItems": 10**7}},
}


@pytest.mark.parametrize("case", HOSTILE)
def test_memory(grammars, case):
    process, choose = psutil.Process(), random.Random(0)
    before = process.memory_info().rss
    state = grammars.start(StructuredOutputsParams(**HOSTILE[case]))
    for _ in range(600):
        tokens = sorted(state.possible(frozenset()))
        if not tokens or state.matcher.is_error():
            break
        state.matcher.consume_token(choose.choice(tokens))
    assert process.memory_info().rss - before < MOST_BYTES


MULTIPLES: list[Any] = [
    {"type": "integer", "multipleOf": 99_999_989},
    {"type": "number", "multipleOf": 0.999983},
    {"allOf": [{"type": "integer", "multipleOf": prime} for prime in (997, 991, 983)]},
    '{"type": "integer", "multiple\\u004ff": 99999989}',
    '{"type": "integer", "multipleOf": ' + "9" * 30 + "}",
]


@pytest.mark.parametrize("schema", MULTIPLES, ids=lambda s: json.dumps(s)[:60])
def test_multiples_of_large_numbers_are_refused(grammars, schema):
    text = schema if isinstance(schema, str) else json.dumps(schema)
    for params in ({"json": schema}, {"grammar": f"start: j\nj: %json {text}"}):
        with pytest.raises(RequestError, match=r"multiples of too large numbers .* at most 10,000"):
            grammars.start(StructuredOutputsParams(**params))


@pytest.mark.parametrize("number", [100, 7, 0.01, 0.25, 1e-9, 500_000, 60_000])
def test_multiples_of_usual_numbers_are_not(grammars, number):
    grammars.start(StructuredOutputsParams(json={"type": "number", "multipleOf": number}))


def test_large_enumerations_have_fuel(grammars):
    grammars.start(StructuredOutputsParams(choice=[f"c{i}" for i in range(20_000)]))
