"""Every sampling parameter arrives as it is written: in bodies, flags, files of prompts and models.toml."""

from __future__ import annotations

import json
from dataclasses import fields
from typing import Any

import pytest

from paged import SamplingParams, StructuredOutputsParams
from paged.base.fields import Effect
from paged.chat.chat_format import ChatFormat
from paged.commands import common, generate
from paged.commands.chat_params import NOT_OF_A_TEXT
from paged.protocol.endpoints import ENDPOINTS, parse_call
from paged.protocol.jobs import NOT_IN_JSON, read_jobs
from paged.protocol.limits import Limits
from tests.support.api_fields import BODIES
from tests.support.command_line import running, write

# For each parameter that JSON can give: another value than the default and than any model's.
VALUES: dict[str, Any] = {
    "n": 2,
    "best_of": 3,
    "temperature": 0.35,
    "top_p": 0.45,
    "top_k": 7,
    "min_p": 0.15,
    "typical_p": 0.55,
    "top_n_sigma": 1.5,
    "seed": 11,
    "presence_penalty": -1.25,
    "frequency_penalty": 0.25,
    "repetition_penalty": 1.125,
    "repetition_penalty_last_n": 13,
    "dry_multiplier": 0.75,
    "dry_base": 1.5,
    "dry_allowed_length": 4,
    "dry_sequence_breakers": [";", "."],
    "dry_penalty_last_n": 17,
    "logit_bias": {"5": -2.5, "6": 1.5},
    "allowed_token_ids": [5, 6, 7],
    "bad_words": ["bad", "worse"],
    "min_tokens": 2,
    "max_tokens": 19,
    "stop": ["a,", "[b"],
    "stop_token_ids": [7, 6],
    "include_stop_str_in_output": True,
    "ignore_eos": True,
    "logprobs": 3,
    "prompt_logprobs": 4,
    "detokenize": False,
    "skip_special_tokens": False,
    "spaces_between_special_tokens": False,
    "priority": -2.5,
    "timeout_s": 2.25,
    "cache_salt": "salt",
    "structured_outputs": {"regex": "a+"},
    "num_speculative_tokens": 1,
}
# What a value needs or excludes.
BESIDE: dict[str, dict[str, Any]] = {"best_of": {"n": 2}, "min_tokens": {"max_tokens": 19}}
LIMITS = Limits(max_logprobs=-1, chat_format=ChatFormat.of())
# Names in the bodies of Ollama and llama.cpp.
OLLAMA = {
    "max_tokens": "num_predict",
    "repetition_penalty": "repeat_penalty",
    "repetition_penalty_last_n": "repeat_last_n",
}
LLAMACPP = OLLAMA | {"max_tokens": "n_predict", "logprobs": "n_probs"}
OF_OLLAMA = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "typical_p",
    "seed",
    "stop",
    "presence_penalty",
    "frequency_penalty",
)


def wanted(name: str, beside: dict[str, Any] | None = None) -> Any:
    given = {name: VALUES[name], **(BESIDE.get(name, {}) if beside is None else beside)}
    if name == "structured_outputs":
        given[name] = StructuredOutputsParams(**given[name])
    elif name == "logit_bias":
        given[name] = {int(token): bias for token, bias in given[name].items()}
    return getattr(SamplingParams(**given), name)


def test_every_parameter_has_a_value():
    assert VALUES.keys() | NOT_IN_JSON.keys() == {field.name for field in fields(SamplingParams)}


def given_by(url: str, name: str) -> dict[str, Any] | None:
    """Return the fields of a body that give a parameter; None if the body does not take it."""
    value, beside = VALUES[name], BESIDE.get(name, {})
    taken = {field.name for field in ENDPOINTS[url].table.with_effect(Effect.HONOURED)}
    if url.startswith("/api/"):
        own = OLLAMA.get(name, name)
        if name == "logprobs":
            return {"logprobs": True, "top_logprobs": value}
        beside = {"repeat_penalty": 1.5} if name == "repetition_penalty_last_n" else {}
        return {"options": {own: value, **beside}} if name in (*OF_OLLAMA, *OLLAMA) else None
    if url in ("/completion", "/infill"):
        beside = {"repeat_penalty": 1.5} if name == "repetition_penalty_last_n" else {}
        return {LLAMACPP.get(name, name): value, **beside} if LLAMACPP.get(name, name) in taken else None
    if name == "logprobs" and "top_logprobs" in taken:
        return (
            {"logprobs": True, "top_logprobs": value}
            if url == "/v1/chat/completions"
            else {"top_logprobs": value}
        )
    theirs = {
        "/v1/responses": {"max_tokens": "max_output_tokens"},
        "/v1/messages": {"stop": "stop_sequences"},
    }
    own = theirs.get(url, {}).get(name, name)
    beside = {theirs.get(url, {}).get(key, key): part for key, part in beside.items()}
    return {own: value, **beside} if own in taken else None


GENERATING = [url for url, call in ENDPOINTS.items() if hasattr(call, "params") and url != "/infill"]


# Bodies with the parameters of SamplingParams by name, and those that their answers have no place for.
ABSENT = {
    "/v1/completions": set(),
    "/v1/chat/completions": {"detokenize"},
    "/generate": set(),
    "/v1/responses": {"n", "best_of", "prompt_logprobs", "detokenize"},
    "/v1/messages": {"n", "best_of", "logprobs", "prompt_logprobs", "detokenize"},
}


def test_every_field_of_a_body_is_the_parameter_that_it_names(text):
    for url in GENERATING:
        bodies = {name: given_by(url, name) for name in VALUES}
        if url in ABSENT:
            assert ABSENT[url] == {name for name, body in bodies.items() if body is None}
        for name, body in bodies.items():
            if body is not None:
                call = parse_call(url, {**BODIES[url], **body}, LIMITS)
                call.prompts(text)
                assert (url, name, getattr(call.params(text), name)) == (url, name, wanted(name))
    assert ABSENT.keys() <= {*GENERATING}


# Given all at once, which excludes some.
TOGETHER = {
    name: value for name, value in VALUES.items() if name not in ("stop", "detokenize", "structured_outputs")
}


def all_wanted(values: dict[str, Any]) -> SamplingParams:
    return SamplingParams(**{**values, "logit_bias": {int(t): b for t, b in values["logit_bias"].items()}})


def flags_of(name: str, value: Any, form: str) -> list[str]:
    flag = f"--{name if form == 'underscores' else name.replace('_', '-')}"
    if isinstance(value, bool):
        return [flag] if value else [f"--no-{flag[2:]}"]
    texts = [f"{t}={b}" for t, b in value.items()] if isinstance(value, dict) else value
    texts = [*map(str, texts if isinstance(texts, list) else [texts])]
    return [f"{flag}={text}" for text in texts] if form == "equals" else [flag, *texts]


class StandIn:
    """An engine that says with which parameters it was asked to begin."""

    def __init__(self, _: Any) -> None:
        self.chat_templates = self

    def source(self, _: Any) -> None:
        pass

    def params_of(self, given: Any, *_: Any) -> Any:
        raise Begun(SamplingParams(**given))


class Begun(BaseException):
    pass


@pytest.mark.parametrize("command", ["generate x", "chat"])
def test_every_flag_and_every_default_of_models_toml(command, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(common, "start", StandIn)
    monkeypatch.setattr(generate, "_check_shows_text", lambda _: None)
    # A turn of a chat has one answer, which is text, and --seed is the engine's.
    left_out = ("seed", *(NOT_OF_A_TEXT if command == "chat" else ()))
    values = {name: value for name, value in TOGETHER.items() if name not in left_out}
    argv = command.split()
    with running(monkeypatch, capsys) as run:

        def begun(*more: str) -> SamplingParams:
            with pytest.raises(Begun) as found:
                pytest.fail(str(run(*argv, *more)))
            return found.value.args[0]

        for form in ("spaces", "equals", "underscores"):
            flags = [text for name, value in values.items() for text in flags_of(name, value, form)]
            assert begun("--model", "demo", *flags) == all_wanted(values)
        values["seed"] = VALUES["seed"]
        lines = [f"{name} = {toml(value)}" for name, value in values.items()]
        file = write(tmp_path / "m", "[m]", 'checkpoint = "demo"', "[m.sampling]", *lines)
        monkeypatch.setenv("PAGED_MODELS", str(file))
        assert begun("--model", "m") == all_wanted(values)
        off = {name: not value for name, value in values.items() if isinstance(value, bool)}
        found = begun(
            "--model", "m", *(text for name, value in off.items() for text in flags_of(name, value, ""))
        )
        assert found == all_wanted(values | off)
        wrong = run.refused(*argv, "--temperature=-1")
        assert wrong.startswith("paged: --temperature must be at least 0, got -1")


def toml(value: Any) -> str:
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key} = {part}' for key, part in value.items())}}}"
    return json.dumps(value)


def test_every_parameter_of_a_line_of_prompts(tmp_path):
    file = write(
        tmp_path / "a.jsonl",
        *({"prompt": "x", name: VALUES[name], **BESIDE.get(name, {})} for name in VALUES),
    )
    for name, job in zip(VALUES, read_jobs(file, {}), strict=True):
        assert getattr(SamplingParams(**job.sampling), name) == wanted(name)
