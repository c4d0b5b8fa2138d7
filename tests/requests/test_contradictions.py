"""Parameters that no output can satisfy are refused when the request is made."""

from __future__ import annotations

from typing import Any

import pytest

from paged import LLMEngine, RequestError, SamplingParams, StructuredOutputsParams

PROMPT = "def add(a, b):"


@pytest.fixture(scope="module")
def engine() -> LLMEngine:
    return LLMEngine("demo", num_blocks=64, max_model_len=64)


def choice(*strings: str) -> dict[str, Any]:
    return {"structured_outputs": StructuredOutputsParams(choice=strings)}


def ids(engine: LLMEngine, text: str) -> list[int]:
    return engine.tokenizer.encode_bare(text)


def refused(engine: LLMEngine, message: str, **params: Any) -> None:
    with pytest.raises(RequestError, match=message):
        engine.add_request("a", PROMPT, SamplingParams(**params))
    assert not engine.has_unfinished_requests()


def test_allowed_tokens_that_are_all_banned(engine):
    (eos,) = engine.core.factory.eos_token_ids
    least = "allowed_token_ids leaves no token that min_tokens 2 would let be the first"
    refused(engine, least, allowed_token_ids=[eos], min_tokens=2)
    refused(engine, least, allowed_token_ids=[5, eos], stop_token_ids=[5], min_tokens=2, ignore_eos=False)
    (token,) = ids(engine, "return")
    words = [token]
    message = "allowed_token_ids leaves no token that bad_words would let be the first"
    refused(engine, message, allowed_token_ids=words, bad_words=["return"])
    both = "that bad_words and min_tokens 1 would let"
    refused(engine, both, allowed_token_ids=[*words, eos], bad_words=["return"], min_tokens=1)
    # One token that is not banned is enough.
    for possible in (
        {"allowed_token_ids": [*words, 7], "bad_words": ["return"]},
        {"allowed_token_ids": [eos]},
        {"allowed_token_ids": [eos, 7], "min_tokens": 2},
        {"allowed_token_ids": [eos], "min_tokens": 2, "ignore_eos": True},
    ):
        (output,) = engine.generate([PROMPT], SamplingParams(max_tokens=2, **possible), use_tqdm=False)
        assert output.outputs[0].finish_reason in ("stop", "length")


def test_languages_of_which_nothing_is_left(engine):
    (eos,) = engine.core.factory.eos_token_ids
    (yes,) = ids(engine, "x")
    refused(
        engine,
        "structured_outputs leaves no token that allowed_token_ids would let be the first",
        allowed_token_ids=[yes, eos],
        **choice("a", "b"),
    )
    refused(
        engine,
        "structured_outputs leaves no token that allowed_token_ids and bad_words would let be the first",
        allowed_token_ids=[yes, eos],
        bad_words=["x"],
        **choice("x"),
    )
    refused(engine, "min_tokens 4 is more than any choice .* has 3 bytes", min_tokens=4, **choice("a", "abc"))
    empty = {"structured_outputs": StructuredOutputsParams(regex="(x)?")}
    # Only the empty output would be left, which min_tokens forbids.
    params = SamplingParams(bad_words=["x"], **empty)
    (output,) = engine.generate([PROMPT], params, use_tqdm=False)
    assert (output.outputs[0].text, output.outputs[0].finish_reason) == ("", "stop")
    refused(engine, "that bad_words and min_tokens 1 would let", bad_words=["x"], min_tokens=1, **empty)
    # The remaining tokens are generated.
    params = SamplingParams(allowed_token_ids=[yes, eos], min_tokens=1, **choice("x", "y"))
    assert engine.generate([PROMPT], params, use_tqdm=False)[0].outputs[0].text == "x"


def test_min_tokens_beyond_the_context(engine):
    room = 64 - len(engine.tokenizer.encode(PROMPT))
    message = f"min_tokens {room + 1} is more than the {room} that there is room for after a prompt of"
    refused(engine, message, min_tokens=room + 1, max_tokens=None)
    params = SamplingParams(min_tokens=room, max_tokens=None, temperature=0.0)
    (output,) = engine.generate([PROMPT], params, use_tqdm=False)
    assert len(output.outputs[0].token_ids) == room


def test_choices_that_could_never_end(engine):
    (eos,) = engine.core.factory.eos_token_ids
    (a,) = ids(engine, "a")
    wanted = {"allowed_token_ids": [a], **choice("a", "aa")}
    message = "allowed_token_ids has neither EOS nor any of stop_token_ids, and so no choice"
    refused(engine, message, **wanted)
    refused(engine, message, max_tokens=3, **wanted)
    refused(engine, message, stop_token_ids=[7], **wanted)
    for possible in (
        {"max_tokens": 2},
        {"ignore_eos": True},
        {"ignore_eos": True, "stop_token_ids": [a]},
        {"stop": ["a"]},
        {"allowed_token_ids": [a, eos]},
        {"allowed_token_ids": [a, 7], "stop_token_ids": [7]},
    ):
        params = SamplingParams(**{"seed": 1, **wanted, **possible})
        (output,) = engine.generate([PROMPT], params, use_tqdm=False)
        assert output.outputs[0].finish_reason in ("stop", "length")


def test_nothing_but_the_end_which_nothing_ends(engine):
    nothing_but = "structured_outputs allows nothing but the end of the output, and neither EOS nor"
    empty = {"structured_outputs": StructuredOutputsParams(regex="")}
    refused(engine, nothing_but, ignore_eos=True, **empty)
    (output,) = engine.generate([PROMPT], SamplingParams(**empty), use_tqdm=False)
    assert (output.outputs[0].text, output.outputs[0].finish_reason) == ("", "stop")


def test_all_of_the_vocabulary(engine):
    stops = [*range(engine.model_config.vocab_size)]
    message = "the vocabulary leaves no token that min_tokens 1 would let be the first"
    refused(engine, message, stop_token_ids=stops, min_tokens=1)
    params = SamplingParams(stop_token_ids=stops[:-1], min_tokens=1, max_tokens=1)
    assert engine.generate([PROMPT], params, use_tqdm=False)[0].outputs[0].token_ids == stops[-1:]


def test_forks_are_judged_where_they_are(engine):
    (eos,) = engine.core.factory.eos_token_ids
    (a,) = ids(engine, "a")
    grammar = StructuredOutputsParams(regex="(ab)*")
    begun = SamplingParams(max_tokens=4, allowed_token_ids=[a], structured_outputs=grammar)
    engine.add_request("parent", PROMPT, begun)
    engine.step()
    for message, params in (
        (
            "allowed_token_ids leaves no token that min_tokens 3 would let be the next",
            SamplingParams(allowed_token_ids=[eos], min_tokens=3),
        ),
        ("structured_outputs leaves no token that allowed_token_ids would let be the next", begun),
        ("structured_outputs leaves no token that allowed_token_ids would let be the next", None),
        (
            "structured_outputs leaves no token that bad_words would let be the next",
            SamplingParams(bad_words=["b"], structured_outputs=grammar),
        ),
    ):
        with pytest.raises(RequestError, match=message):
            engine.fork("parent", "child", params)
    # The parent's output tokens count.
    engine.fork("parent", "child", SamplingParams(allowed_token_ids=[eos], min_tokens=1))
    engine.abort_request("parent")
    (output,) = [output for _ in range(2) for output in engine.step() if output.finished]
    assert output.outputs[0].token_ids == [a, eos]
    assert not engine.has_unfinished_requests()
