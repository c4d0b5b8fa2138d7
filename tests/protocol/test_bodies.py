"""Request bodies: what they ask of an engine, and which are refused, with the field."""

import ast
import dataclasses
import json
import math
import random
from collections import Counter
from pathlib import Path

import pytest

import paged
from paged import LLMEngine, RequestOutputKind, SamplingParams, StructuredOutputsParams
from paged.base import strict_json
from paged.base.errors import PagedError, RequestError, UnknownArgumentError
from paged.base.fields import Effect
from paged.base.kinds import Integer, Number, kinds_of
from paged.base.strict_json import parse_json
from paged.commands.options import option
from paged.protocol.endpoints import ENDPOINTS, parse_call
from paged.protocol.fields.sampling import CONSTRAINTS, SAMPLING_KINDS
from paged.protocol.jobs import SAMPLING_NAMES
from paged.protocol.limits import Limits
from tests.support.api_fields import BODIES, CHAT, COMPLETIONS, EMBEDDINGS, GENERATE, HELLO, SCORE, TOOLS

TOKENIZE, DETOKENIZE = "/tokenize", "/detokenize"
TRUSTING = Limits(trust_chat_template=True, max_logprobs=-1)


def parsed(url, limits=TRUSTING, **fields):
    return parse_call(url, {**BODIES[url], **fields}, limits)


@pytest.mark.parametrize(
    ("url", "body", "params"),
    [
        (COMPLETIONS, {}, {"max_tokens": 16}),
        (COMPLETIONS, {"max_tokens": None, "stop": None, "logprobs": 3}, {"max_tokens": 16, "logprobs": 3}),
        (COMPLETIONS, {"best_of": 3, "n": 2}, {"max_tokens": 16, "best_of": 3, "n": 2}),
        (
            COMPLETIONS,
            {"echo": True, "logprobs": 2},
            {"max_tokens": 16, "logprobs": 2, "prompt_logprobs": 2},
        ),
        (COMPLETIONS, {"echo": True, "max_tokens": 0}, {"max_tokens": 1}),
        (
            COMPLETIONS,
            {"echo": True, "logprobs": -1, "prompt_logprobs": 3},
            {"max_tokens": 16, "logprobs": -1, "prompt_logprobs": -1},
        ),
        (CHAT, {}, {}),
        (CHAT, {"max_completion_tokens": 5}, {"max_tokens": 5}),
        (CHAT, {"logprobs": True}, {"logprobs": 0}),
        (CHAT, {"logprobs": True, "top_logprobs": 20}, {"logprobs": 20}),
        (CHAT, {"logprobs": False, "top_logprobs": 0}, {}),
        (CHAT, {"logit_bias": {"50": -100}}, {"logit_bias": {50: -100.0}}),
        (CHAT, {"stop": "a", "presence_penalty": -2}, {"stop": "a", "presence_penalty": -2.0}),
        (CHAT, {"response_format": {"type": "text"}}, {}),
        (
            CHAT,
            {"response_format": {"type": "json_object"}},
            {"structured_outputs": StructuredOutputsParams(json={"type": "object"})},
        ),
        (
            CHAT,
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {}}}},
            {"structured_outputs": StructuredOutputsParams(json={})},
        ),
        (
            CHAT,
            {"structured_outputs": {"regex": "a"}},
            {"structured_outputs": StructuredOutputsParams(regex="a")},
        ),
        (GENERATE, {"logprobs": 1}, {"max_tokens": 16, "logprobs": 1}),
    ],
    ids=str,
)
def test_fields_are_sampling_parameters(text, url, body, params):
    kind = RequestOutputKind.FINAL_ONLY
    wanted = SamplingParams(**{"max_tokens": None, "output_kind": kind, **params})
    assert parsed(url, **body).params(text) == wanted


def test_a_single_prompt_may_have_large_parameters():
    parsed(COMPLETIONS, prompt="a", allowed_token_ids=[*range(10_000)], bad_words=["a" * 2**24])


def test_streams_ask_for_deltas(text):
    for url, stream, kind in (
        (CHAT, True, RequestOutputKind.DELTA),
        (CHAT, False, RequestOutputKind.FINAL_ONLY),
        (GENERATE, True, RequestOutputKind.FINAL_ONLY),  # a line for each result
        (GENERATE, "deltas", RequestOutputKind.DELTA),
    ):
        call = parsed(url, stream=stream)
        assert (call.stream, call.params(text).output_kind) == (bool(stream), kind)


def test_every_sampling_parameter_is_a_field():
    own = {"structured_outputs"}
    assert {field.name for field in dataclasses.fields(StructuredOutputsParams)} == {
        field.name for field in CONSTRAINTS.with_effect(Effect.HONOURED)
    }
    assert set(SAMPLING_NAMES) - own == SAMPLING_KINDS.keys()
    for url in (CHAT, COMPLETIONS, GENERATE):
        names = {field.name for field in ENDPOINTS[url].table.fields}
        assert set(SAMPLING_NAMES) <= names


OLDER_TAG = {"type": "structural_tag", "structures": [{"begin": "(", "schema": {}, "end": ")"}]}
LARGE_SCHEMA = {"schema": {"type": "object", "title": "x" * 9000}}
# Bodies that are refused: the fields, the field in `param`, and a part of the message.
WRONG = [
    (CHAT, {"messages": None}, "messages", "messages is missing"),
    (CHAT, {"messages": []}, "messages", "messages must have at least 1 entry"),
    (CHAT, {"messages": "hi"}, "messages", "messages must be a list, got 'hi'"),
    (CHAT, {"messages": [{"content": "x"}]}, "messages[0].role", "messages[0].role is missing"),
    (CHAT, {"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "must be string, or list"),
    (
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "messages[0].content[0].image_url.url",
        "messages[0].content[0].image_url.url must be a data: URL with the image in base64, got 'x'; nothing",
    ),
    (
        CHAT,
        {"messages": [*HELLO, {"role": "assistant", "tool_calls": [{"function": {"name": 5}}]}]},
        "messages[1].tool_calls[0].function.name",
        "messages[1].tool_calls[0].function.name must be a string, got 5",
    ),
    (
        CHAT,
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"arguments": "{}"}}]}]},
        "messages[0].tool_calls[0].function.name",
        "messages[0].tool_calls[0].function.name is missing",
    ),
    (CHAT, {"max_tokens": 1, "max_completion_tokens": 1}, "max_tokens", "give one of them"),
    (CHAT, {"top_logprobs": 1}, "top_logprobs", "top_logprobs needs logprobs: true"),
    (CHAT, {"logprobs": 1}, "logprobs", "logprobs must be True or False, got 1"),
    (CHAT, {"logprobs": True, "top_logprobs": 21}, "top_logprobs", "must be from 0 to 20, got 21"),
    (
        CHAT,
        {"response_format": "json"},
        "response_format",
        "whose type is one of text, json_object, json_schema",
    ),
    (
        CHAT,
        {"response_format": {"type": "json_schema"}},
        "response_format.json_schema",
        "response_format.json_schema is missing",
    ),
    (
        CHAT,
        {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
        "structured_outputs",
        "say the same; give one of them",
    ),
    (CHAT, {"structured_outputs": {"regx": "a"}}, "structured_outputs.regx", "did you mean 'regex'?"),
    (CHAT, {"structured_outputs": {}}, "structured_outputs", "takes exactly one of json, regex"),
    (CHAT, {"structured_outputs": {"json": "{"}}, "structured_outputs", "json must be a JSON schema"),
    (CHAT, {"user": 5}, "user", "user must be a string, got 5"),
    (CHAT, {"user": "\ud800"}, "user", "not valid Unicode"),
    (CHAT, {"functions": []}, "functions", "functions is not supported: their names are tools"),
    (CHAT, {"max_tokns": 1}, "max_tokns", "did you mean 'max_tokens'?"),
    (CHAT, {"x" * 1000: 1}, None, "unknown argument 'xxxx"),
    (CHAT, {"guided_json": {}}, "guided_json", 'its place is structured_outputs: {"json": ...}'),
    (CHAT, {"modalities": ["text", "audio"]}, "modalities", "answers are text alone"),
    (CHAT, {"stream_options": {"include_usage": True}}, "stream_options", "needs stream: true"),
    (CHAT, {"n": 129}, "n", "n must be from 1 to 128, got 129"),
    (CHAT, {"stop": ["a"] * 65}, "stop", "stop has 65 entries; 64 is the most"),
    (CHAT, {"stop": ""}, "stop", "stop must be a non-empty string"),
    (COMPLETIONS, {"prompt": None}, "prompt", "prompt is missing"),
    (COMPLETIONS, {"prompt": ["a", 1]}, "prompt", "prompt[1] must be a string, got 1"),
    (COMPLETIONS, {"prompt": [1, "a"]}, "prompt", "prompt[1] must be an int, at least 0, got 'a'"),
    (COMPLETIONS, {"prompt": [1, True]}, "prompt", "prompt[1] must be an int, at least 0, got True"),
    (COMPLETIONS, {"prompt": [[1], [-1]]}, "prompt", "prompt[1][0] must be at least 0, got -1"),
    (COMPLETIONS, {"prompt": {}}, "prompt", "prompt must be string, or list of token ids"),
    (COMPLETIONS, {"prompt": ["a"] * 2049}, "prompt", "prompt has 2,049 entries; 2,048 is the most"),
    (COMPLETIONS, {"prompt": ["a"] * 1025, "n": 2}, "n", "makes 2,050 choices; 2,048 is the most"),
    (
        COMPLETIONS,
        {"prompt": ["a"] * 1025, "best_of": 2},
        "best_of",
        "makes 2,050 choices; 2,048 is the most",
    ),
    (CHAT, {"request_id": "a\nb"}, "request_id", "request_id must be printable ASCII"),
    (CHAT, {"documents": [{"a": ["\ud800"]}]}, "documents", "documents[0].a[0] is not valid Unicode"),
    (
        CHAT,
        {"messages": [{"role": "user", "content": "", "own": "\ud800"}]},
        "messages",
        "messages[0].own is not valid Unicode",
    ),
    (
        CHAT,
        {"structured_outputs": {"structural_tag": {"format": {"type": "const_string", "value": "\ud800"}}}},
        "structured_outputs.structural_tag.format.value",
        "structural_tag.format.value is not valid Unicode",
    ),
    (
        CHAT,
        {"structured_outputs": {"structural_tag": '{"format": {}, "format": {}}'}},
        "structured_outputs.structural_tag",
        "'format' is given twice",
    ),
    (
        CHAT,
        {
            "response_format": {
                "type": "structural_tag",
                "format": {"type": "or", "elements": [{"type": "x"}]},
            }
        },
        "response_format.format.elements[0]",
        "must be an object whose type is one of const_string",
    ),
    (
        CHAT,
        {"response_format": {**OLDER_TAG, "triggers": ["<"]}},
        "response_format.structures[0].begin",
        "must begin with exactly one of the triggers",
    ),
    (
        CHAT,
        {"structured_outputs": {"json": {"x-guidance": {"whitespace_flexible": True}}}},
        "structured_outputs",
        "json must not have 'x-guidance'",
    ),
    (COMPLETIONS, {"suffix": "x"}, "suffix", "suffix is not supported: models that fill in the middle"),
    (COMPLETIONS, {"max_tokens": 0}, "max_tokens", "max_tokens 0 generates nothing"),
    (
        COMPLETIONS,
        {"logit_bias": {"x": 1}},
        "logit_bias",
        "a token id in logit_bias must be an int, at least 0, got 'x'",
    ),
    (
        COMPLETIONS,
        {"logit_bias": {str(i): 1 for i in range(16_385)}},
        "logit_bias",
        "logit_bias has 16,385 entries; 16,384 is the most",
    ),
    (
        COMPLETIONS,
        {"prompt": ["a"] * 2048, "allowed_token_ids": [5] * 2048, "stop": "a"},
        "allowed_token_ids",
        "allowed_token_ids is too large for 2,048 prompts",
    ),
    (
        GENERATE,
        {"prompts": ["a"] * 2000, "response_format": {"type": "json_schema", "json_schema": LARGE_SCHEMA}},
        "response_format",
        "response_format is too large for 2,000 prompts",
    ),
    (EMBEDDINGS, {"input": []}, "input", "input must have at least 1 entry"),
    (EMBEDDINGS, {"input": ""}, "input", "input must be a non-empty string"),
    (EMBEDDINGS, {"encoding_format": "int8"}, "encoding_format", "one of 'float', 'base64', got 'int8'"),
    (SCORE, {"continuations": []}, "continuations", "continuations must have at least 1 entry"),
    (SCORE, {"text_1": "a"}, "text_1", "compare embeddings"),
    (TOKENIZE, {"messages": HELLO}, "prompt", "either prompt or messages must be given, got 2"),
    (TOKENIZE, {"chat_template": "x"}, "chat_template", "chat_template needs messages"),
    (DETOKENIZE, {"tokens": [-1]}, "tokens", "tokens[0] must be at least 0, got -1"),
    (
        GENERATE,
        {"prompts": ["a"], "prompt": "b"},
        "prompts",
        "either prompts or prompt must be given, got 2",
    ),
    (GENERATE, {"stream": "lines"}, "stream", "must be one of 'results', 'deltas', got 'lines'"),
]


@pytest.mark.parametrize(("url", "fields", "param", "message"), WRONG, ids=lambda value: str(value)[:60])
def test_a_wrong_body_names_the_field(url, fields, param, message):
    with pytest.raises(PagedError) as refused:
        parsed(url, **fields)
    assert message in str(refused.value)
    assert refused.value.param == param
    assert isinstance(refused.value, RequestError | UnknownArgumentError)


@pytest.mark.parametrize(
    ("url", "fields", "param", "message"),
    [
        (CHAT, {"n": 2, "best_of": 1}, "best_of", "best_of 1 is less than n 2"),
        (CHAT, {"max_tokens": 1, "min_tokens": 2}, "min_tokens", "min_tokens 2 is more than max_tokens 1"),
        (COMPLETIONS, {"n": 2, "temperature": 0}, "n", "with temperature 0 would give the same output"),
        (COMPLETIONS, {"stop": "a", "detokenize": False}, "stop", "needs text"),
    ],
    ids=str,
)
def test_fields_that_contradict_each_other_name_one(text, url, fields, param, message):
    call = parsed(url, **fields)
    with pytest.raises(RequestError, match=message) as refused:
        call.params(text)
    assert refused.value.param == param


def test_errors_of_an_engine_name_the_field_with_the_prompt():
    for url, name in ((CHAT, "messages"), (COMPLETIONS, "prompt"), (EMBEDDINGS, "input")):
        call = parsed(url)
        for param in ("prompt", "prompt_token_ids", "prompt_token_ids[1]"):
            assert call.param_of(RequestError("x", param=param)) == name
        assert call.param_of(RequestError("x", param="tenant")) == "user"
        assert call.param_of(RequestError("x", param="y")) == "y"
        assert call.param_of(RequestError("the user must give a prompt")) is None  # no words are read
    newer = parsed(CHAT, max_completion_tokens=5)
    assert newer.param_of(RequestError("x", param="max_tokens")) == "max_completion_tokens"


def test_ranges_of_sampling_parameters_stand_once():
    """Bodies and the help of flags have those of `SamplingParams`, and say the same of a wrong value."""
    own = {"n", "best_of", "priority"}  # a body takes fewer samples than an engine, and names of priorities
    num_bounds = 0
    for name, kind in kinds_of(SamplingParams).items():
        assert (SAMPLING_KINDS[name] is kind) != (name in own)
        assert option(SamplingParams, name).help.endswith(f"[{kind.limits}]" if kind.limits else "]")
        bounds = [(kind.minimum, -1), (kind.maximum, 1)] if isinstance(kind, Integer | Number) else []
        for bound, side in bounds:
            wrong = bound + side * (1 if isinstance(kind, Integer) else 0.5 * abs(bound) + 0.5)
            if side < 0 and getattr(kind, "above", False):
                wrong = bound
            if name in own or abs(bound) == math.inf:
                continue
            num_bounds += 1
            with pytest.raises(RequestError, match=f"^{name} must be ") as in_python:
                SamplingParams(**{name: wrong})
            with pytest.raises(RequestError) as in_a_body:
                parsed(GENERATE, **{name: wrong})
            assert str(in_python.value) == str(in_a_body.value)
            assert in_python.value.param == in_a_body.value.param == name
    assert num_bounds > 25


# What an engine refuses, and the field that it is about, for a model of 256 tokens.
REFUSED_BY_ENGINE = [
    ({"prompt": "a " * 300}, "prompt"),
    ({"prompt": [4096]}, "prompt"),
    ({"prompt": "x", "stop_token_ids": [4096]}, "stop_token_ids"),
    ({"prompt": "x", "allowed_token_ids": [5, 4096]}, "allowed_token_ids"),
    ({"prompt": "x", "logit_bias": {"4096": 1}}, "logit_bias"),
    ({"prompt": "x", "n": 9}, "n"),
    ({"prompt": "x", "best_of": 9}, "best_of"),
    ({"prompt": "x", "priority": 1}, "priority"),
    ({"prompt": "x", "max_tokens": 300, "min_tokens": 300}, "min_tokens"),
    ({"prompt": "x", "dry_multiplier": 1, "dry_sequence_breakers": ["a"] * 600}, "dry_sequence_breakers"),
    ({"prompt": "x", "structured_outputs": {"regex": "["}}, "structured_outputs"),
    (
        {"prompt": "x", "response_format": {"type": "json_schema", "json_schema": {"schema": {"type": 5}}}},
        "response_format.json_schema.schema.type",
    ),
    ({"prompt": "x", "structured_outputs": {"choice": ["a"]}, "min_tokens": 5}, "min_tokens"),
    ({"prompt": "x", "structured_outputs": {"choice": ["a"]}, "allowed_token_ids": [9]}, "allowed_token_ids"),
    ({"prompt": "x", "allowed_token_ids": [5], "stop_token_ids": [5], "min_tokens": 1}, "allowed_token_ids"),
]


@pytest.fixture(scope="module")
def engine() -> LLMEngine:
    return LLMEngine("demo", num_blocks=64, max_num_seqs=8, max_model_len=256, device="cpu")


def test_what_an_engine_refuses_names_its_field(engine):
    for body, param in REFUSED_BY_ENGINE:
        call = parsed(COMPLETIONS, **body)
        (prompt,) = call.prompts(engine.text)
        with pytest.raises(RequestError) as refused, call.naming_field():
            engine.add_request("r", prompt, call.params(engine.text))
        assert refused.value.param == param, (body, refused.value)


def test_every_error_of_a_parameter_carries_it():
    """None is guessed from the words of its message, such as "roles must alternate user/assistant"."""
    for path in (
        "options/sampling_params",
        "options/logits",
        "engine/request_factory",
        "requests/contradictions",
        "requests/tokenized_rules",
    ):
        tree = ast.parse((Path(paged.__file__).parent / f"{path}.py").read_text())
        made = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
        errors = [node for node in made if getattr(node.func, "id", "") == "RequestError"]
        lacking = [node.lineno for node in errors if not any(k.arg == "param" for k in node.keywords)]
        assert errors
        assert len(lacking) <= (path == "options/sampling_params"), (path, lacking)  # one is about several


@pytest.mark.parametrize("interval", [1, 5])
def test_an_interval_in_a_body_has_no_effect_and_is_refused(interval):
    for url in (CHAT, COMPLETIONS, GENERATE):
        with pytest.raises(RequestError, match="--stream-interval-s") as refused:
            parsed(url, stream_interval=interval)
        assert refused.value.param == "stream_interval"


def test_words_of_a_template_are_no_fields(text):
    template = (
        "{{ raise_exception('After the optional system message, roles must alternate user/assistant') }}"
    )
    with pytest.raises(RequestError, match="must alternate user/assistant") as refused:
        parsed(CHAT, chat_template=template).prompts(text)
    assert refused.value.param == "messages"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"structured_outputs": {"regex": "a"}}, "structured_outputs"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"tools": TOOLS, "tool_choice": "required"}, "tools"),
    ],
    ids=str,
)
def test_errors_of_a_grammar_name_the_field_that_it_comes_from(fields, param):
    assert parsed(CHAT, **fields).param_of(RequestError("x", param="structured_outputs")) == param


def test_large_numbers_fit_64_bits():
    call = parsed(COMPLETIONS, priority=10**30, temperature=10**30, timeout_s=2**63)
    assert [type(v) for v in (call.priority, call.timeout_s, call.sampling["temperature"])] == [float] * 3


def test_salts_and_special_tokens_belong_to_prompts(text):
    asked = {"cache_salt": "s", "add_special_tokens": False}
    wanted = {"prompt": "x", "add_special_tokens": False, "cache_salt": "s"}
    assert parsed(EMBEDDINGS, input=["x", "x"], **asked).prompts(text) == [wanted, wanted]
    assert parsed(EMBEDDINGS, input=[5], **asked).prompts(text) == [
        {"prompt_token_ids": [5], "cache_salt": "s"}
    ]
    assert parsed(SCORE, **asked).prompts(text) == [wanted]


def test_json_does_not_tell_ints_from_integral_floats():
    call = parsed(COMPLETIONS, prompt=[5.0, 6], n=2.0, stop_token_ids=[7.0])
    assert call.prompts(None) == [{"prompt_token_ids": [5, 6]}]
    assert call.sampling == {"n": 2, "stop_token_ids": [7]}
    assert all(type(token_id) is int for token_id in [*call.listed[0], call.n])
    with pytest.raises(RequestError, match=r"n must be an int, from 1 to 128, got 1\.5"):
        parsed(COMPLETIONS, n=1.5)


def test_the_operator_sets_limits():
    closed = Limits(max_logprobs=5)
    for url, fields, param in (
        (CHAT, {"chat_template": "x"}, "chat_template"),
        (CHAT, {"logprobs": True, "top_logprobs": 6}, "top_logprobs"),
        (COMPLETIONS, {"logprobs": 6}, "logprobs"),
        (COMPLETIONS, {"prompt_logprobs": -1}, "prompt_logprobs"),
        (GENERATE, {"logprobs": -1}, "logprobs"),
    ):
        with pytest.raises(RequestError) as refused:
            parsed(url, limits=closed, **fields)
        assert refused.value.param == param
        assert parsed(url, **fields)
    assert parsed(COMPLETIONS, limits=closed, logprobs=5, prompt_logprobs=0)


def test_what_a_body_says_of_the_template_reaches_it(text):
    options = {
        "chat_template": "{{ x }}{{ y }}{{ documents }}{{ reasoning_effort }}{{ messages[-1].content }}",
        "chat_template_kwargs": {"x": "!"},
        "documents": [{"a": 1}],
        "reasoning_effort": "low",
    }
    rest = {"add_generation_prompt": False, "continue_final_message": True}
    limits = Limits(trust_chat_template=True, chat_template_kwargs={"x": "?", "y": "+"})
    (prompt,) = parsed(CHAT, limits, **options, **rest).prompts(text)
    assert prompt == {"prompt": "!+[{'a': 1}]lowdef f(x):", "add_special_tokens": False}
    (prompt,) = parsed(CHAT, Limits(chat_template="{{ messages[0].role }}"), add_special_tokens=True).prompts(
        text
    )
    assert prompt == {"prompt": "user", "add_special_tokens": True}
    (prompt,) = parsed(COMPLETIONS, add_special_tokens=False).prompts(text)
    assert prompt == {"prompt": "x", "add_special_tokens": False}
    assert parsed(TOKENIZE, prompt=None, messages=HELLO, **options).answer(text, 9)["count"] > 5


def test_roles(text):
    def rendered(role, template="{% for m in messages %}{{ m.role }}{{ m.content }}{% endfor %}"):
        messages = [{"role": role, "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
        (prompt,) = parsed(CHAT, messages=messages, chat_template=template).prompts(text)
        return prompt["prompt"]

    assert rendered("tool") == "toola\nb"
    assert rendered("developer") == "systema\nb"
    assert rendered("developer", "{% if messages[0].role == 'developer' %}D{% endif %}") == "D"
    assert rendered("ipython", '{% if messages[0].role == "ipython" %}I{% endif %}') == "I"
    with pytest.raises(
        RequestError, match="one of 'system', 'developer', 'user', 'assistant', 'tool'"
    ) as refused:
        rendered("usr")
    assert refused.value.param == "messages[0].role"
    with pytest.raises(RequestError, match="the chat template refuses this: no") as refused:
        rendered("user", "{{ raise_exception('no') }}")
    assert refused.value.param == "messages"


@pytest.mark.parametrize("arguments", ["[" * 10**5, '{"a": NaN}', '{"a": 1, "a": 2}', "{", "null", None])
def test_a_call_that_was_cut_is_taken_back(text, arguments):
    function = {"name": "f", "arguments": arguments}
    calls = [{"id": "c", "type": "function", "function": function}]
    messages = [{"role": "assistant", "content": None, "tool_calls": calls}]
    template = (
        "{% for k, v in messages[0].tool_calls[0].function.arguments.items() %}{{ k }}={{ v }}{% endfor %}"
    )
    (prompt,) = parsed(CHAT, messages=messages, chat_template=template).prompts(text)
    assert prompt["prompt"] == (f"raw_arguments={arguments}" if arguments not in ("null", None) else "")


def test_tokenize_and_detokenize_are_inverse(text):
    words = "def f(x):\n    return x"
    found = parsed(TOKENIZE, prompt=words, return_token_strs=True).answer(text, 2048)
    assert found["count"] == len(found["tokens"]) == len(found["token_strs"])
    assert "".join(found["token_strs"]) == words
    assert found["max_model_len"] == 2048
    assert parsed(DETOKENIZE, tokens=found["tokens"]).answer(text, 2048) == {"prompt": words}
    with pytest.raises(RequestError, match=r"tokens\[1\] is 4096; the vocabulary is 0 to 4095"):
        parsed(DETOKENIZE, tokens=[1, 4096]).answer(text, 2048)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ('{"a": 1, "a": 2}', "'a' is given twice"),
        ('{"a": NaN}', "NaN is not JSON"),
        ('{"a": -Infinity}', "-Infinity is not JSON"),
        ('{"a": 1e999}', "too large for a number"),
        ("[" * 65 + "]" * 65, "nested more than 64 deep"),
        ('{"a":' * 65 + "1" + "}" * 65, "nested more than 64 deep"),
        ("[" * 100_000, "nested more than 64 deep"),
        ('{"a": "' + "[" * 100, "this is not JSON: Unterminated string"),
        (b"\xff{}", "not JSON in UTF-8"),
        (b"", "this is not JSON: Expecting value"),
        ("1" * 5000, "no number here may be that long"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_json_that_is_refused(source, message):
    with pytest.raises(RequestError, match=message):
        parse_json(source)


def test_json_that_is_taken():
    deep = "[" * 64 + "]" * 64
    assert parse_json(deep) == json.loads(deep)
    brackets = json.dumps({"a": '[{"\\' * 100, "b": "]" * 100, "é": [1.5e3]}, ensure_ascii=False)
    assert parse_json(brackets.encode()) == json.loads(brackets)


PARTS = ['"', "\\", '\\"', "[", "]", "{", "}", " " * 70, '"[[["', "\\n" * 1030]


def depth_of(text):
    """Return how deep brackets outside of strings are nested, looking at one character after another."""
    depth = deepest = 0
    is_string = is_escaped = False
    for character in text:
        if is_escaped:
            is_escaped = False
        elif is_string:
            is_escaped = character == "\\"
            is_string = character != '"'
        elif character == '"':
            is_string = True
        elif character in "[{":
            depth += 1
            deepest = max(deepest, depth)
        elif character in "]}":
            depth -= 1
    return deepest


@pytest.mark.parametrize("piece", [7, 2**16])
def test_the_depth_of_a_text_does_not_depend_on_its_pieces(piece, monkeypatch):
    monkeypatch.setattr(strict_json, "_PIECE", piece)
    choose = random.Random(0)
    found = Counter()
    for _ in range(300):
        begin = "[]" * 9 + "[" * choose.choice([58, 60, 64])
        text = begin + "".join(choose.choices(PARTS, k=choose.randrange(40))) + "[" * choose.choice([0, 20])
        try:
            strict_json._check_depth(text)
            is_deep = False
        except RequestError:
            is_deep = True
        assert is_deep == (depth_of(text) > 64), text
        found[is_deep] += 1
    assert min(found[True], found[False]) > 50


@pytest.mark.parametrize("text", ["x" * 10**6, '"' + "x" * 10**6, '"' + "\\n" * 10**6, "1, " * 10**6])
def test_no_search_for_brackets_takes_long(text, monkeypatch):
    """Other threads, among them that of the event loop, wait as long as one takes."""
    lengths = []

    class Watched:
        def __init__(self, pattern):
            self.pattern = pattern

        def finditer(self, text, place, end):
            lengths.append(min(end, len(text)) - place)
            for match in self.pattern.finditer(text, place, end):
                lengths.append(len(match[0]))
                yield match

        def match(self, text, place):
            match = self.pattern.match(text, place)
            lengths.append(len(match[0]))
            return match

    for name in ("_BRACKETS", "_REST_OF_STRING"):
        monkeypatch.setattr(strict_json, name, Watched(getattr(strict_json, name)))
    strict_json._check_depth("[]" * 70 + text)
    assert len(lengths) > 10
    assert max(lengths) < 2**17
