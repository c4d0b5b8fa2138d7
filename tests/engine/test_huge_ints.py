"""An int of thousands of digits, which Python refuses to print, is an error that names the field."""

from __future__ import annotations

import typing
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

import pytest

from paged import (
    BeamSearchParams,
    ConfigError,
    FileError,
    LLMEngine,
    PagedError,
    RequestError,
    SamplingParams,
)
from paged.base.validation import MAX_SHOWN, shown
from paged.options.config import EngineConfig
from paged.protocol.batch_file import IdentitySet, read_lines
from paged.protocol.endpoints import parse_call
from paged.protocol.jobs import read_jobs
from tests.support.checkpoints import checkpoint, new_engine
from tests.support.command_line import write

HUGE = 10**5000
DIGITS = "1" + "0" * 5000
NEEDED: dict[type[Any], dict[str, Any]] = {
    SamplingParams: {},
    BeamSearchParams: {"beam_width": 2, "max_tokens": 2},
    EngineConfig: {"model": "demo"},
}
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "x"}], "logprobs": True},
    COMPLETIONS: {"prompt": "x"},
}


def around(hint: Any, value: Any) -> Any:
    """Return the value in the form that a field of this type takes."""
    for member in typing.get_args(hint):
        kind = typing.get_origin(member)
        if kind is Sequence:
            return [value]
        if kind is Mapping:
            return {value: 1.0} if typing.get_args(member)[0] is int else {"a": value}
    return [value] if typing.get_origin(hint) is Sequence else value


def every_field() -> list[tuple[type[Any], str, Any]]:
    """Return each field of the classes, but mm_processor_kwargs, whose values a processor knows."""
    return [
        (owner, f.name, typing.get_type_hints(owner)[f.name])
        for owner in NEEDED
        for f in fields(owner)
        if f.name != "mm_processor_kwargs"
    ]


@pytest.mark.parametrize("value", [HUGE, -HUGE], ids=["huge", "negative"])
@pytest.mark.parametrize(
    ("owner", "name", "hint"), every_field(), ids=[f"{o.__name__}-{n}" for o, n, _ in every_field()]
)
def test_every_field_refuses_it_by_name(owner, name, hint, value):
    error = ConfigError if owner is EngineConfig else RequestError
    wrong = around(hint, value)
    more = {"scheduling_policy": "fair"} if name == "tenant_weights" else {}
    with pytest.raises(error, match="tenant" if name == "tenant_weights" else name) as raised:
        owner(**{**NEEDED[owner], name: wrong, **more})
    assert "Exceeds the limit" not in str(raised.value)
    assert len(str(raised.value)) < 300


@pytest.mark.parametrize(
    ("url", "name"),
    [
        *((CHAT, name) for name in ("max_tokens", "max_completion_tokens", "top_logprobs", "top_k", "seed")),
        *((COMPLETIONS, name) for name in ("max_tokens", "logprobs", "n", "best_of", "prompt", "user")),
    ],
    ids=str,
)
def test_bodies_refuse_it_by_name(url, name):
    with pytest.raises(RequestError, match=name):
        parse_call(url, {**BODIES[url], name: HUGE})


def test_lines_of_files_refuse_it_and_the_others_are_read(tmp_path):
    wrong = [f'{{"prompt": "x", "{name}": {DIGITS}}}' for name in ("max_tokens", "prompt")]
    wrong.append(f'{{"prompt": "x", "logit_bias": {{"{DIGITS}": 1}}}}')
    long = "1000000000000000... has 5,001 characters; no number here may be that long"
    key = "a token id in logit_bias must be an int, at least 0, got '10000000000"
    lines = [f'{{"custom_id": "{i}", "url": "{COMPLETIONS}", "body": {b}}}' for i, b in enumerate(wrong)]
    lines.append(f'{{"custom_id": "good", "url": "{COMPLETIONS}", "body": {{"prompt": "x"}}}}')
    *refused, good = read_lines(write(tmp_path / "in.jsonl", *lines), IdentitySet())
    for n, line, told in zip((1, 2, 3), refused, (long, long, key), strict=True):
        assert str(line.call).startswith(f"line {n}: {told}")
    assert not isinstance(good.call, RequestError)
    for line, told in zip(wrong, (long, long, key), strict=True):
        file = write(tmp_path / "prompts.jsonl", line)
        with pytest.raises(FileError) as raised:
            read_jobs(file, {})
        assert str(raised.value).startswith(f"{file}:1: {told}")


@pytest.fixture(scope="module")
def engine() -> LLMEngine:
    return new_engine(checkpoint("llama"))


@pytest.mark.parametrize("prompt", [[1, HUGE], HUGE, {"prompt_token_ids": HUGE}], ids=["id", "int", "dict"])
def test_prompts_refuse_it(engine, prompt):
    with pytest.raises(PagedError, match="of about 5,000 digits"):
        engine.add_request("a", prompt)


class Unprintable:
    def __repr__(self) -> str:
        raise AssertionError("it is looked at")


@pytest.mark.parametrize(
    ("value", "size"),
    [
        ([5] * 10**4 + [Unprintable()], "10,001 entries"),
        ({**dict.fromkeys(range(1000)), "x": Unprintable()}, "1,001 entries"),
        ([["a" * 10**7], Unprintable()], "2 entries"),
        ("a" * 10**7, "10,000,000 characters"),
    ],
    ids=["list", "dict", "nested", "text"],
)
def test_messages_look_at_the_beginning_of_a_large_value_alone(value, size):
    text = shown(value)
    assert text.endswith(f"… ({size})")
    assert len(text) < MAX_SHOWN + 40


def test_a_value_is_shown_as_python_prints_it():
    for value in ([], {}, [1, "a", None], {"a": [True, {"b": 1.5}], 2: ()}, (1,), "é\n'", [[[]]], {1: {}}):
        assert shown(value) == repr(value)
