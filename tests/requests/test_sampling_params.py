"""SamplingParams: every wrong value is refused by name."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from paged import RequestError, SamplingParams, StructuredOutputsParams, UnknownArgumentError

BAD_VALUES = {
    "temperature": [math.nan, math.inf, -math.inf, -0.1, True, "1", None, 10**400],
    "top_p": [math.nan, math.inf, 0.0, -0.5, 1.5, True, "0.5", None],
    "min_p": [math.nan, -0.1, 1.1, True, None],
    "repetition_penalty": [0.0, -1.0, 1e-7, 1e7, math.nan, True],
    "top_k": [-2, 1.5, True, "3", None, math.nan],
    "seed": [True, 1.0, "1", 2**63, -(2**63) - 1],
    "max_tokens": [0, -1, True, 1.0, math.inf, "5"],
    "min_tokens": [-1, True, 1.0, None],
    "stop": ["", ["a", ""], [1], 3, True, {"a"}],
    "stop_token_ids": [[-1], [True], ["a"], "12", 3, [1.0], {1}],
    "ignore_eos": [1, 0, None, "yes"],
}


@pytest.mark.parametrize(
    ("name", "value"),
    [(name, value) for name, values in BAD_VALUES.items() for value in values],
    ids=lambda value: repr(value)[:20],
)
def test_bad_value_is_refused_by_name(name, value):
    with pytest.raises(RequestError, match=name):
        SamplingParams(**{name: value})


def test_min_tokens_above_max_tokens_is_refused():
    with pytest.raises(RequestError, match="min_tokens 5 is more than max_tokens 4"):
        SamplingParams(min_tokens=5, max_tokens=4)


def test_numbers_of_other_libraries_are_pythons_own():
    params = SamplingParams(
        temperature=np.float32(0.5),
        seed=np.int64(7),
        max_tokens=np.uint8(9),
        stop_token_ids=[np.int32(3), 3, 4, 3],
        logit_bias={np.int64(5): np.float64(1.0)},
    )
    assert params == SamplingParams(
        temperature=0.5, seed=7, max_tokens=9, stop_token_ids=[3, 4], logit_bias={5: 1.0}
    )
    given = (params.temperature, params.seed, params.max_tokens, *params.stop_token_ids, *params.logit_bias)
    assert {type(value) for value in given} == {int, float}


@pytest.mark.parametrize("name", ["stop_token_ids", "allowed_token_ids"])
def test_more_token_ids_than_memory_holds_are_refused_before_they_are_looked_at(name):
    with pytest.raises(RequestError, match=f"{name} has {10**15} token ids; 1048576 is the most"):
        SamplingParams(**{name: range(10**15)})
    assert len(getattr(SamplingParams(**{name: [7] * 2**20}), name)) == 1


def test_keys_of_logit_bias_may_be_text_as_in_json():
    assert SamplingParams(logit_bias={"50256": -100}) == SamplingParams(logit_bias={50256: -100})
    for wrong in ("x", "-1", "1.5", "", "\u0663", "9" * 20):
        with pytest.raises(RequestError, match="a token id in logit_bias must be an int, at least 0"):
            SamplingParams(logit_bias={wrong: 1.0})
    with pytest.raises(RequestError, match=r"logit_bias has token 7 twice, with 1.0 and 2"):
        SamplingParams(logit_bias={7: 1, "07": 2})


def test_logits_processors_take_two_arguments_or_three():
    for possible in (lambda _ids, row: row, lambda *_: 0, lambda _prompt, _ids, row: row, max):
        SamplingParams(logits_processors=[possible])
    for wrong in (lambda row: row, lambda _a, _b, _c, row: row, lambda *, row: row):
        with pytest.raises(RequestError, match=r"logits_processors\[1\] must take two arguments"):
            SamplingParams(logits_processors=[max, wrong])


def test_json_object_is_the_schema_of_an_object():
    assert StructuredOutputsParams(json_object=True) == StructuredOutputsParams(json={"type": "object"})
    with pytest.raises(RequestError, match=r"exactly one of .*, got \['json', 'json_object'\]"):
        StructuredOutputsParams(json={}, json_object=True)
    with pytest.raises(RequestError, match="exactly one of"):
        StructuredOutputsParams(json_object=False)
    with pytest.raises(RequestError, match="json_object must be True or False, got 1"):
        StructuredOutputsParams(json_object=1)


def test_unknown_keyword_is_refused_with_the_one_meant():
    with pytest.raises(UnknownArgumentError, match="'temprature'; did you mean 'temperature'"):
        SamplingParams(temprature=1.0)
    with pytest.raises(TypeError):
        SamplingParams(1.0)


def test_none_is_none_of_them():
    names = ("stop", "stop_token_ids", "bad_words", "logits_processors")
    assert SamplingParams(**dict.fromkeys(names)) == SamplingParams()


@pytest.mark.parametrize(
    ("bad_words", "message"),
    [
        (["x" * 10**7], "bad_words has 1 strings of 10000000 characters together; 262144 is the most"),
        (["x"] * 10_001, "bad_words has 10001 strings; 10000 is the most"),
        ("x" * 10**7, r"bad_words must be .*, got 'x{299}… \(10,000,000 characters\)$"),
    ],
    ids=["long", "many", "text"],
)
def test_bad_words_have_limits_and_messages_too(bad_words, message):
    with pytest.raises(RequestError, match=message):
        SamplingParams(bad_words=bad_words)


def test_lists_are_copied_and_assignments_checked():
    ids, stop = [1, 2], ["a"]
    params = SamplingParams(stop_token_ids=ids, stop=stop)
    ids.append(3)
    stop.append("b")
    assert (params.stop_token_ids, params.stop) == ((1, 2), ("a",))
    assert SamplingParams(stop="ab").stop == ("ab",)
    params.temperature = 0.0
    with pytest.raises(RequestError, match="temperature"):
        params.temperature = -1.0
    assert params == SamplingParams(stop_token_ids=[1, 2], stop=["a"], temperature=0.0)
    assert dataclasses.replace(params, temperature=0.5).temperature == 0.5


def test_every_allowed_extreme_is_accepted():
    SamplingParams(
        temperature=0, top_p=1, top_k=-1, min_p=1, seed=-(2**63), max_tokens=1, min_tokens=1, stop=()
    )


def test_a_seed_of_minus_one_is_none():
    assert SamplingParams(seed=-1) == SamplingParams()
    assert SamplingParams(seed=-2).seed == -2


def test_max_tokens_is_that_of_vllm():
    assert SamplingParams().max_tokens == 16
    assert SamplingParams(max_tokens=None).max_tokens is None
