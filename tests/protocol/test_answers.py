"""Response bodies: whole and streamed ones say the same, and official clients take them."""

import base64
import itertools
import json
import math
import struct

import jsonschema
import pytest
from openai.types import Completion, CreateEmbeddingResponse
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from paged import CompletionOutput, LLMEngine, Logprob, RequestMetrics, RequestOutput, SamplingParams
from paged.base.errors import (
    ConfigError,
    EngineDeadError,
    QueueFullError,
    RequestError,
    UnknownArgumentError,
    WorkerLostError,
)
from paged.chat.chat_format import ChatFormat
from paged.engine.embedding import EmbeddingOutput, EmbeddingRequestOutput
from paged.engine.scoring import ScoreOutput
from paged.protocol.answers.errors import error_body, failure_of, status_of
from paged.protocol.answers.places import CompletionPlaces, Decoding, chat_places, prompt_places
from paged.protocol.endpoints import DEFAULT_LIMITS, parse_call
from paged.protocol.limits import Limits
from tests.support.api_fields import CHAT, COMPLETIONS, EMBEDDINGS, GENERATE, HELLO, SCORE


@pytest.fixture(scope="module")
def engine():
    return LLMEngine("demo", num_blocks=128, max_num_seqs=8, device="cpu")


def run(engine, call):
    """Return all outputs of a call's prompts, with the index of the prompt."""
    for i, prompt in enumerate(call.prompts(engine.text)):
        engine.add_request(str(i), prompt, call.params(engine.text))
    while engine.has_unfinished_requests():
        for output in engine.step():
            yield int(output.request_id), output


def whole(engine, url, limits=DEFAULT_LIMITS, **body):
    call = parse_call(url, body, limits)
    outputs = dict(run(engine, call))
    answer = call.body([outputs[i] for i in sorted(outputs)], "i", 7, "demo")
    json.dumps(answer, allow_nan=False)
    return answer


def streamed(engine, url, limits=DEFAULT_LIMITS, **body):
    call = parse_call(url, {**body, "stream": True}, limits)
    outputs = [*run(engine, call)]
    chunks = call.chunks("i", 7, "demo")
    sent = chunks.start(*outputs[0])
    for index, output in outputs:
        sent += chunks.add(index, output)
    sent += chunks.finish()
    json.dumps(sent, allow_nan=False)
    return sent


def joined(chunks, text_of):
    """Return text, token ids, log-probabilities and reason of each choice, joined."""
    found = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            own = found.setdefault(choice["index"], {"text": "", "ids": [], "logprobs": [], "reason": None})
            assert own["reason"] is None, "nothing follows the end"
            own["text"] += text_of(choice)
            own["ids"] += choice.get("token_ids", [])
            own["logprobs"].append(choice["logprobs"])
            own["reason"] = choice["finish_reason"]
    return found


SAMPLING = {"temperature": 1, "seed": 3, "max_tokens": 12, "ignore_eos": True}
USAGE = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}


def test_a_streamed_chat_joins_to_the_whole_one(engine):
    asked = {"messages": HELLO, "n": 2, "logprobs": True, "top_logprobs": 2, "return_token_ids": True}
    asked |= {"prompt_logprobs": 1, "return_prompt_text": True, **SAMPLING}
    body = whole(engine, CHAT, **asked)
    assert ChatCompletion.model_validate(body).choices[1].message.role == "assistant"
    chunks = streamed(engine, CHAT, **asked, **USAGE)
    for chunk in chunks:
        assert ChatCompletionChunk.model_validate(chunk).object == "chat.completion.chunk"
        assert chunk["usage"]["completion_tokens"] <= 24
        assert chunk["usage"]["prompt_tokens"] == body["usage"]["prompt_tokens"]
    assert [chunk["choices"][0]["delta"]["role"] for chunk in chunks[:2]] == ["assistant"] * 2
    found = joined(chunks, lambda choice: choice["delta"].get("content", ""))
    for choice in body["choices"]:
        own = found[choice["index"]]
        assert own["text"] == choice["message"]["content"]
        assert own["ids"] == choice["token_ids"]
        assert own["reason"] == choice["finish_reason"] == "length"
        places = [place for part in own["logprobs"] if part for place in part["content"]]
        assert places == choice["logprobs"]["content"]
        assert "".join(place["token"] for place in places) == choice["message"]["content"]
        assert all(len(place["top_logprobs"]) == 2 for place in places)
    (first,) = (chunk for chunk in chunks if "prompt_token_ids" in chunk)
    for name in ("prompt_token_ids", "prompt_logprobs", "prompt_text"):
        assert first[name] == body[name]
    assert body["prompt_text"] == "User: def f(x):\nAssistant:"
    assert chunks[-1]["choices"] == []
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert chunks[-1]["usage"][name] == body["usage"][name]


def test_a_streamed_completion_joins_to_the_whole_one(engine):
    asked = {
        "prompt": ["def f(x):", "import os"],
        "n": 2,
        "logprobs": 2,
        "return_token_ids": True,
        **SAMPLING,
    }
    for echo in (False, True):
        body = whole(engine, COMPLETIONS, **asked, echo=echo, prompt_logprobs=1)
        if not echo:  # the API has null for the first token of a prompt, which its client's types lack
            assert len(Completion.model_validate(body).choices) == 4
        chunks = streamed(engine, COMPLETIONS, **asked, echo=echo, prompt_logprobs=1)
        found = joined(chunks, lambda choice: choice["text"])
        for choice in body["choices"]:
            own = found[choice["index"]]
            prompt = asked["prompt"][choice["index"] // 2]
            assert own["text"] == choice["text"]
            assert choice["text"].startswith(prompt) == echo
            assert own["ids"] == choice["token_ids"]
            for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
                values = [value for part in own["logprobs"] if part for value in part[name]]
                assert values == choice["logprobs"][name]
            tokens, offsets = choice["logprobs"]["tokens"], choice["logprobs"]["text_offset"]
            assert "".join(tokens) == choice["text"]
            assert offsets == [len("".join(tokens[:i])) for i in range(len(tokens))]
            assert len(choice["prompt_logprobs"]) == len(choice["prompt_token_ids"])
    assert chunks[-1]["choices"]  # no counts without include_usage


def test_echo_alone_is_the_prompt_with_its_logprobs(engine):
    (expected,) = engine.generate(
        "def f(x):", SamplingParams(prompt_logprobs=2, max_tokens=1), use_tqdm=False
    )
    ids = expected.prompt_token_ids
    for prompt in ("def f(x):", ids):
        asked = {"prompt": prompt, "echo": True, "logprobs": 2, "max_tokens": 0, "return_token_ids": True}
        body = whole(engine, COMPLETIONS, **asked)
        (choice,) = body["choices"]
        assert (choice["text"], choice["finish_reason"], choice["token_ids"]) == ("def f(x):", "length", [])
        assert body["usage"]["completion_tokens"] == 0
        logprobs = choice["logprobs"]
        assert logprobs["token_logprobs"][0] is None
        assert logprobs["top_logprobs"][0] is None
        chosen = [place[i].logprob for i, place in zip(ids[1:], expected.prompt_logprobs[1:], strict=True)]
        assert logprobs["token_logprobs"][1:] == chosen
        assert "".join(logprobs["tokens"]) == "def f(x):"
        found = joined(streamed(engine, COMPLETIONS, **asked), lambda choice: choice["text"])
        assert found[0]["text"] == "def f(x):"
        assert found[0]["logprobs"][0] == logprobs
        assert found[0]["reason"] == "length"


def test_echo_alone_ends_with_length_whatever_the_token_that_is_left_out(text):
    call = parse_call(COMPLETIONS, {"prompt": "x", "echo": True, "max_tokens": 0})
    call.prompts(text)
    output = output_that_ended("stop", 5, "a")
    (choice,) = call.body([output], "i", 7, "demo")["choices"]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("x", "length", None)


def test_tokens_may_be_named_by_their_ids(engine):
    asked = {"logprobs": 1, "return_tokens_as_token_ids": True, "return_token_ids": True, "echo": True}
    (choice,) = whole(engine, COMPLETIONS, prompt="x", **asked, **SAMPLING)["choices"]
    ids = choice["prompt_token_ids"] + choice["token_ids"]
    assert choice["logprobs"]["tokens"] == [f"token_id:{i}" for i in ids]
    (spelled,) = whole(
        engine, COMPLETIONS, prompt="x", **asked | {"return_tokens_as_token_ids": False}, **SAMPLING
    )["choices"]
    assert choice["logprobs"]["text_offset"] == spelled["logprobs"]["text_offset"]
    assert choice["logprobs"]["text_offset"][:2] == [0, 1]
    asked = {"logprobs": True, "top_logprobs": 1, "return_tokens_as_token_ids": True}
    (choice,) = whole(engine, CHAT, messages=HELLO, **asked, **SAMPLING)["choices"]
    assert all(place["token"].startswith("token_id:") for place in choice["logprobs"]["content"])


def test_embeddings_and_scores(engine):
    for form, read in (
        ("float", list),
        ("base64", lambda text: struct.unpack("<256f", base64.b64decode(text))),
    ):
        call = parse_call(EMBEDDINGS, {"input": ["a b", "c"], "encoding_format": form, "dimensions": 256})
        outputs = engine.encode(call.prompts(engine.text), use_tqdm=False)
        body = call.body(outputs, "i", 7, "demo")
        for item, output in zip(body["data"], outputs, strict=True):
            assert [*read(item["embedding"])] == pytest.approx(output.outputs.embedding)
        if form == "float":
            assert CreateEmbeddingResponse.model_validate(body).usage.prompt_tokens == sum(
                len(output.prompt_token_ids) for output in outputs
            )
    call = parse_call(SCORE, {"prompt": "def f", "continuations": ["(x):", [5]]})
    (prompt,) = call.prompts(engine.text)
    outputs = engine.score(prompt, call.continuations, use_tqdm=False)
    body = call.body(outputs, "i", 7, "demo")
    assert [item["score"] for item in body["data"]] == [output.logprob for output in outputs]
    assert body["data"][1]["token_ids"] == [5]


def test_a_bad_prompt_of_many_is_an_error_in_its_own_result(engine):
    call = parse_call(
        GENERATE, {"prompts": ["a", 5, [10**6], [7], {"prompt": "a"}], "n": 2, "logprobs": 1, **SAMPLING}
    )
    outcomes = []
    for i, prompt in enumerate(call.prompts(engine.text)):
        try:
            engine.add_request(str(i), prompt, call.params(engine.text))
            outcomes.append(None)
        except RequestError as error:
            outcomes.append(error)
    while engine.has_unfinished_requests():
        for output in engine.step():
            outcomes[int(output.request_id)] = output
    body = call.body(outcomes, 2.0)
    assert [(result["index"], result.get("sample")) for result in body["results"]] == [
        (0, 0),
        (0, 1),
        (1, None),
        (2, None),
        (3, 0),
        (3, 1),
        (4, None),
    ]
    assert (body["total_prompts"], body["total_time_seconds"], body["avg_time_per_prompt"]) == (5, 2.0, 0.4)
    good, _, number, token, *_ = body["results"]
    assert good["generated_text"] == outcomes[0].outputs[0].text
    assert (len(good["token_ids"]), good["num_tokens"], len(good["logprobs"])) == (12, 12, 12)
    assert good["finish_reason"] == "length"
    assert good["seconds"] > 0
    assert "a prompt is text or a list of token ids" in number["error"]["message"]
    assert "the vocabulary is 0 to 4095" in token["error"]["message"]
    json.dumps(body, allow_nan=False)


def test_lines_of_deltas_join_to_the_result(engine):
    asked = {"prompts": ["a", "b"], "n": 2, "logprobs": 1, "prompt_logprobs": 1, **SAMPLING}
    call = parse_call(GENERATE, {**asked, "stream": "deltas"})
    texts, places, prompts = {}, {}, {}
    for index, output in run(engine, call):
        for line in call.deltas(index, output):
            key = line["index"], line["sample"]
            texts[key] = texts.get(key, "") + line["text"]
            places[key] = [*places.get(key, []), *line["logprobs"]]
            if "prompt_logprobs" in line:
                assert index not in prompts
                prompts[index] = line["prompt_logprobs"]
            assert line["cumulative_logprob"] < 0
    call = parse_call(GENERATE, {**asked, "stream": True})
    outputs = dict(run(engine, call))
    results = [result for i, output in outputs.items() for result in call.results(i, output)]
    assert texts == {(r["index"], r["sample"]): r["generated_text"] for r in results}
    assert places == {(r["index"], r["sample"]): r["logprobs"] for r in results}
    assert prompts == {r["index"]: r["prompt_logprobs"] for r in results}


def output_that_ended(reason, message, text="", kind=None):
    completion = CompletionOutput(0, text, [], reason, message, error_kind=kind)
    return RequestOutput("r", "x", [4], [completion], True, 0, RequestMetrics(0.0))


def test_a_choice_that_has_ended_is_not_sent_again():
    """Every output has all samples of a prompt, also those that ended before."""
    for url, body in ((CHAT, {"messages": HELLO}), (COMPLETIONS, {"prompt": "x"})):
        chunks = parse_call(url, {**body, "n": 2, "stream": True}).chunks("i", 7, "demo")
        sent = []
        for ends in (("stop", None), ("stop", None), ("stop", "length")):
            output = output_that_ended(None, None)
            output.outputs = [
                CompletionOutput(i, "" if ends[0] and not i and sent else "a", [], end)
                for i, end in enumerate(ends)
            ]
            sent += [chunk["choices"][0] for chunk in chunks.add(0, output)]
        assert [choice["index"] for choice in sent] == [0, 1, 1, 1]
        assert [choice["finish_reason"] for choice in sent] == ["stop", None, None, "length"]


def test_a_sample_that_has_ended_has_no_more_lines():
    call = parse_call(GENERATE, {"prompts": ["x"], "n": 2, "stream": "deltas"})
    output = output_that_ended("stop", None, "a")
    output.finished = False
    output.outputs.append(CompletionOutput(1, "b", [5], None, None))
    assert [line["sample"] for line in call.deltas(0, output)] == [0, 1]
    output.outputs[1].finish_reason, output.finished = "length", True
    assert [line["sample"] for line in call.deltas(0, output)] == [1]


def test_the_error_of_a_prompt_is_one_line_of_deltas():
    """Also while its other samples go on."""
    call = parse_call(GENERATE, {"prompts": ["x"], "n": 2, "stream": "deltas"})
    output = output_that_ended("error", "NaN", kind="engine")
    output.finished = False
    output.outputs.append(CompletionOutput(1, "b", [5], None, None))
    (line,) = call.deltas(0, output)
    assert line["error"]["message"] == "NaN"
    assert call.deltas(0, output) == []


def test_failures_have_a_status():
    assert failure_of([output_that_ended("stop", None)]) is None
    by_kind = {"engine": 500, "request": 400, "timeout": 504}
    for (kind, status), message in itertools.product(by_kind.items(), ["structured_outputs: x", "abort"]):
        vector = EmbeddingOutput(None, message, kind)
        for output in (
            output_that_ended("error", message, kind=kind),
            EmbeddingRequestOutput("r", "x", [4], vector, True, 0, RequestMetrics(0.0)),
            ScoreOutput([4], None, [], False, message, 1, kind),
        ):
            assert failure_of([output_that_ended("stop", None), output]) == (status, message)
    assert failure_of([output_that_ended("abort", None, kind="abort")])[0] == 503
    statuses = {QueueFullError: 429, RequestError: 400, UnknownArgumentError: 400, EngineDeadError: 503}
    for error, status in {**statuses, WorkerLostError: 503, ConfigError: 500}.items():
        assert status_of(error("x")) == status
    body = error_body(404, "no", param="model", code="model_not_found")
    kind = "invalid_request_error"
    assert body["error"] == {"message": "no", "type": kind, "param": "model", "code": "model_not_found"}
    assert error_body(401, "no")["error"]["type"] == "authentication_error"
    assert error_body(503, "no")["error"]["type"] == "server_error"


def test_impossible_tokens_are_json():
    places = [{5: Logprob(-math.inf, 3, "\ufffd"), 6: Logprob(-0.5, 1, "\ufffd"), 7: Logprob(-1.0, 2, "é")}]
    chat = chat_places(places, 2, Decoding())["content"][0]
    assert (chat["logprob"], chat["bytes"]) == (-9999.0, None)
    assert [top["token"] for top in chat["top_logprobs"]] == ["\ufffd", "é"]
    assert chat["top_logprobs"][1]["bytes"] == [195, 169]
    (top,) = CompletionPlaces(Decoding(), []).of(places)["top_logprobs"]
    assert top == {"\ufffd": -0.5, "é": -1.0}  # of two with the same text, the likelier one
    (top,) = CompletionPlaces(Decoding(), []).of([{6: places[0][6], 5: places[0][5]}])["top_logprobs"]
    assert top == {"\ufffd": -0.5}
    nothing, place = json.loads(json.dumps(prompt_places([None, *places]), allow_nan=False))
    assert (nothing, place["5"]["logprob"]) == (None, -9999.0)


WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"enum": ["Paris", "Rome"]},
                "days": {"type": "integer", "minimum": 0, "maximum": 9},
            },
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}
AUTO = {"tool_call_parser": "hermes", "enable_auto_tool_choice": True}
HERMES = Limits(chat_format=ChatFormat.of(**AUTO))
THINKING = Limits(chat_format=ChatFormat.of(**AUTO, reasoning_parser="think"))


def calls_of(message):
    return [(call["function"]["name"], call["function"]["arguments"]) for call in message["tool_calls"]]


def test_a_demanded_call_is_streamed_as_it_is_whole(engine):
    asked = {"messages": HELLO, "tools": [WEATHER], "n": 2, "seed": 5, "max_tokens": 120}
    asked |= {"parallel_tool_calls": False}
    for choice in ("required", {"type": "function", "function": {"name": "weather"}}):
        body = whole(engine, CHAT, HERMES, **asked, tool_choice=choice)
        assert ChatCompletion.model_validate(body).choices[0].finish_reason == "tool_calls"
        chunks = streamed(engine, CHAT, HERMES, **asked, tool_choice=choice)
        for answer in body["choices"]:
            ((name, arguments),) = calls_of(answer["message"])
            jsonschema.validate(json.loads(arguments), WEATHER["function"]["parameters"])
            deltas = [
                own["delta"]
                for chunk in chunks
                for own in chunk["choices"]
                if own["index"] == answer["index"]
            ]
            parts = [part for delta in deltas for part in delta.get("tool_calls", [])]
            assert [part["function"]["name"] for part in parts if "id" in part] == [name] == ["weather"]
            assert "".join(part["function"]["arguments"] for part in parts) == arguments
            assert len(parts) > 2, "the arguments are streamed"
        ends = {own["finish_reason"] for chunk in chunks for own in chunk["choices"]}
        assert ends == {None, "tool_calls"}


def test_reasoning_and_calls_are_parts_of_an_answer(text):
    written = '<think>so</think>Look:\n<tool_call>\n{"name": "weather", "arguments": {}}\n</tool_call>'
    for given, reasoning in (({}, "so"), ({"include_reasoning": False}, None)):
        call = parse_call(CHAT, {"messages": HELLO, "tools": [WEATHER], **given}, THINKING)
        call.prompts(text)
        assert call.params(text).structured_outputs is None  # the model decides
        (choice,) = call.body([output_that_ended("stop", None, written)], "i", 7, "demo")["choices"]
        message = choice["message"]
        assert (message.get("reasoning"), message.get("reasoning_content")) == (reasoning, reasoning)
        assert message["content"].strip() == "Look:"
        assert calls_of(message) == [("weather", "{}")]
        assert choice["finish_reason"] == "tool_calls"
        chunks = call.chunks("i", 7, "demo")
        sent = chunks.add(0, output_that_ended("stop", None, written))
        parts = {name for chunk in sent for name in chunk["choices"][0]["delta"]}
        assert parts == {"content", "tool_calls"} | (
            {"reasoning", "reasoning_content"} if reasoning else set()
        )
        chunks = call.chunks("i", 7, "demo")
        sent = chunks.add(0, output_that_ended("stop", None, "a<tool_"))
        assert "".join(chunk["choices"][0]["delta"]["content"] for chunk in sent) == "a<tool_"
        (cut,) = call.body([output_that_ended("length", None, written[:-20])], "i", 7, "demo")["choices"]
        assert cut["finish_reason"] == "length"


def test_markers_that_are_special_tokens_reach_the_parser(text):
    for special, skips in (((), True), (("<tool_call>",), False)):
        limits = Limits(chat_format=ChatFormat.of(**AUTO, special_tokens=special))
        call = parse_call(CHAT, {"messages": HELLO, "tools": [WEATHER]}, limits)
        call.prompts(text)
        assert call.params(text).skip_special_tokens == skips


def test_the_model_calls_nothing_without_being_told_how(text):
    asked = {"messages": HELLO, "tools": [WEATHER]}
    off = Limits(chat_format=ChatFormat.of(enable_auto_tool_choice=False))
    with pytest.raises(RequestError, match="--no-auto-tool-choice") as refused:
        parse_call(CHAT, asked, off)
    assert refused.value.param == "tool_choice"
    call = parse_call(CHAT, {**asked, "tool_choice": "none"})
    call.prompts(text)
    assert call.params(text).structured_outputs is None
    wanted = {"tool_choice": "required", "response_format": {"type": "json_object"}}
    call = parse_call(CHAT, {**asked, **wanted})
    call.prompts(text)
    with pytest.raises(RequestError, match="leave one of them out"):
        call.params(text)
