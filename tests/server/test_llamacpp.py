"""llama.cpp's own routes, as editors use them."""

from __future__ import annotations

import json
import math

import pytest

from paged.base.errors import PagedError, RequestError
from paged.protocol.answers.chunks import Form, Head
from paged.protocol.endpoints import parse_call
from paged.protocol.llamacpp.answers import Indented, NativeChunks
from paged.protocol.llamacpp.calls import MEDIA_MARKER
from paged.protocol.llamacpp.fill import FILL_TOKENS, fill_tokens_of
from paged.requests.request import CompletionOutput, RequestMetrics, RequestOutput
from tests.support.lobbies import lobby_here
from tests.support.served import eventually, unhurried

PROMPT = {"prompt": "def f(x):", "n_predict": 6, "seed": 1, "temperature": 0.7}


def test_a_completion_whole_and_as_events(served):
    whole = served.post("/completion", **PROMPT)
    params = {"prompt": "def f(x):", "max_tokens": 6, "seed": 1, "temperature": 0.7}
    assert whole["content"] == served.post("/v1/completions", **params)["choices"][0]["text"]
    assert (whole["stop"], whole["stop_type"], whole["tokens_predicted"]) == (True, "limit", 6)
    assert len(whole["tokens"]) == 6
    assert whole["timings"]["predicted_n"] == 6
    events = [json.loads(each) for each in served.events("/completion", **PROMPT)]  # without [DONE]
    assert "".join(each["content"] for each in events) == whole["content"]
    assert [each["stop"] for each in events][-2:] == [False, True]
    ids = served.post("/tokenize", prompt="def f(x):")["tokens"]
    tokens = served.post("/completion", **{**PROMPT, "prompt": ids})
    assert tokens["content"] == whole["content"]


def test_stop_words_probabilities_and_grammars(served):
    whole = served.post("/completion", **PROMPT)
    word = whole["content"][3]
    cut = served.post("/completion", **PROMPT, stop=[word])
    assert (cut["stop_type"], cut["stopping_word"]) == ("word", word)
    assert cut["content"] == whole["content"].partition(word)[0]
    (first, *_) = served.post("/completion", **PROMPT, n_probs=3)["completion_probabilities"]
    assert first["id"] == whole["tokens"][0]
    assert len(first["top_logprobs"]) == 3
    assert served.post("/completion", **PROMPT, grammar='root ::= "yes"')["content"] == "yes"
    schema = {"enum": [5]}
    assert json.loads(served.post("/completion", **PROMPT, json_schema=schema)["content"]) == 5


def test_several_prompts_have_a_list_of_answers(served):
    """As llama.cpp's server has; a list of one prompt is answered as the prompt."""
    ids = served.post("/tokenize", prompt="class A:")["tokens"]
    prompts = ["def f(x):", ids, {"prompt_string": "import"}]
    alone = [served.post("/completion", **{**PROMPT, "prompt": prompt}) for prompt in prompts]
    answers = served.post("/completion", **{**PROMPT, "prompt": prompts})
    assert [each["index"] for each in answers] == [0, 1, 2]
    assert [each["content"] for each in answers] == [each["content"] for each in alone]
    assert [each["tokens_evaluated"] for each in answers] == [each["tokens_evaluated"] for each in alone]
    events = [json.loads(each) for each in served.events("/completion", **{**PROMPT, "prompt": prompts})]
    for i, answer in enumerate(answers):
        own = [each for each in events if each["index"] == i]
        assert "".join(each["content"] for each in own) == answer["content"]
        assert [each["stop"] for each in own] == [False] * (len(own) - 1) + [True]
    single = served.post("/completion", **{**PROMPT, "prompt": prompts[:1]})
    assert (single["content"], single["index"]) == (alone[0]["content"], 0)
    for wrong, message in (
        ([], "prompt must have at least 1 entry"),
        (["a", 5], "prompt[1] must be"),
        (["a", [-1]], "prompt[1][0] must be"),
        (["a", {"prompt_string": MEDIA_MARKER}], "prompt[1].prompt_string has 1 times <__media__>"),
    ):
        status, _, data = served.request("POST", "/completion", {"prompt": wrong})
        assert (status, message in json.loads(data)["error"]["message"]) == (400, True), data


def outputs_of(*texts: str) -> list[RequestOutput]:
    """Return the deltas of an answer, a token each."""
    return [
        RequestOutput(
            request_id="r",
            prompt="x",
            prompt_token_ids=[4],
            outputs=[CompletionOutput(0, text, [i], "length" if i == len(texts) - 1 else None)],
            finished=i == len(texts) - 1,
            num_cached_tokens=0,
            metrics=RequestMetrics(0.0, 1.0, 2.0),
        )
        for i, text in enumerate(texts)
    ]


@pytest.mark.parametrize(
    ("most_ms", "kept"),
    [(1500, "a\nb\n"), (2500, "a\nb\nBc\n"), (9000, "a\nb\nBc\nd"), (math.inf, "a\nb\nBc\nd")],
)
def test_a_line_end_after_the_time_ends_the_text(most_ms, kept):
    """By a clock that the test turns: a second for each token."""
    seconds = iter(range(100))
    chunks = NativeChunks(
        Head("r", "completion", 0, "m"),
        Form(),
        index=0,
        num_probs=None,
        most_ms=most_ms,
        clock=lambda: next(seconds),
    )
    for output in outputs_of("a", "\n", "b\nB", "c", "\n", "d"):
        chunks.add(0, output)
    # The line ends come after 1, 2 and 4 seconds.
    assert chunks.whole()["content"] == kept
    assert chunks.has_ended == (kept[-1] == "\n")
    assert chunks.whole()["stop_type"] == "limit"


def test_an_answer_that_is_over_ends_its_request(served):
    """Whole or as events, and long before the engine has made all tokens."""
    body = {**PROMPT, "n_predict": 1800, "ignore_eos": True, "t_max_predict_ms": 1}
    with unhurried(served.front.engine, 0.01):
        whole = served.post("/completion", **body)
        events = [json.loads(each) for each in served.events("/completion", **body)]
        both = served.post("/completion", **{**body, "prompt": ["def f(x):", "class A:"]})
    streamed = "".join(each["content"] for each in events)
    for text in (whole["content"], streamed, *(each["content"] for each in both)):
        assert text.endswith("\n")
    assert whole["tokens_predicted"] < 1800
    assert (whole["stop_type"], events[-1]["stop"], events[-1]["stop_type"]) == ("limit", True, "limit")
    assert whole["timings"]["predicted_n"] == whole["tokens_predicted"]
    assert whole["has_new_line"]
    eventually(lambda: served.num_requests == 0)


def test_a_line_that_is_indented_less_ends_the_text(served):
    whole = served.post("/completion", **{**PROMPT, "n_predict": 60})
    text = whole["content"]
    body = {**PROMPT, "n_predict": 60, "n_indent": 4}
    cut = served.post("/completion", **body)
    assert cut["content"] == "".join(map(Indented(4).take, text)) != text  # a piece for each character
    assert cut["stop_type"] == "limit"
    events = [json.loads(each) for each in served.events("/completion", **body)]
    assert "".join(each["content"] for each in events) == cut["content"]
    for text, kept in (
        ("a\n    b\n  c\n    d", "a\n    b\n  "),
        ("    a\n\t\t\t\tb\n\n    c", "    a\n\t\t\t\tb\n"),  # an empty line has no indent
    ):
        assert Indented(4).take(text) == kept
        assert Indented(0).take(text) == text


def test_what_llama_vim_sends_is_answered(served):
    """It warms the cache with a body that generates nothing."""
    extra = [{"text": "x = 1", "time": [1, 2], "filename": "a.py"}]
    body = {"id_slot": 0, "input_prefix": "a", "input_suffix": "b", "input_extra": extra, "prompt": "    "}
    more = {"n_predict": 128, "n_indent": 4, "samplers": ["top_k", "infill"], "t_max_predict_ms": 250}
    parse_call("/infill", {**body, **more, "top_k": 40, "top_p": 0.9, "stop": [], "stream": False})
    warmed = served.post(
        "/completion", prompt="def g(y):" * 9, n_predict=0, samplers=[], response_fields=[""]
    )
    assert (warmed["content"], warmed["tokens"], warmed["tokens_predicted"]) == ("", [], 0)
    assert served.post("/completion", **{**PROMPT, "prompt": "def g(y):" * 9})["tokens_cached"] > 16


def test_props_slots_and_templates(served):
    props = json.loads(served.request("GET", "/props")[2])
    assert props["default_generation_settings"]["n_ctx"] == 2048
    assert json.loads(served.request("GET", "/slots")[2]) == []
    message = [{"role": "user", "content": "hi"}]
    assert served.post("/apply-template", messages=message)["prompt"] == "User: hi\nAssistant:"


def test_of_several_models_the_last_used_is_described(engine, tmp_path):
    path = tmp_path / "models.toml"
    path.write_text('[a]\ncheckpoint = "demo"\n[b]\ncheckpoint = "demo"\n')
    with lobby_here(engine, path) as (served, _):
        status, _, data = served.request("GET", "/props")
        assert (status, json.loads(data)["error"]["code"]) == (404, "not_loaded")
        assert served.post("/completion", **PROMPT, model="b")["model"] == "b"
        assert json.loads(served.request("GET", "/props")[2])["model_alias"] == "b"
        assert served.request("GET", "/props?model=a")[0] == 404


class Spelling:
    """A tokenizer of characters, but for some special tokens."""

    def __init__(self, special: str) -> None:
        self.special_ids = {token: 1000 + i for i, token in enumerate(special.split())}
        self.added_texts = frozenset[str]()

    def encode(self, text: str, *, add_special_tokens: bool) -> list[str]:
        assert not add_special_tokens
        return [text]

    @property
    def tokenizer(self) -> Spelling:
        return self


@pytest.mark.parametrize(
    ("special", "prompt"),
    [
        ("<|fim_prefix|> <|fim_suffix|> <|fim_middle|> <|file_sep|>", "P S M with a file"),
        ("<fim_prefix> <fim_suffix> <fim_middle>", "P S M"),
        ("[PREFIX] [SUFFIX]", "S P"),
    ],
)
def test_the_families_tokens_mark_the_gap(special, prompt):
    body = {"input_prefix": "pre", "input_suffix": "suf", "prompt": "gap"}
    body["input_extra"] = [{"filename": "a.py", "text": "x"}]
    call = parse_call("/infill", body)
    (found,) = call.prompts(Spelling(special))
    first, second, *rest = special.split()
    middle = rest[0] if rest else ""
    file = rest[1] if len(rest) > 1 else ""
    text = "".join(found["prompt_token_ids"])
    extra = f"{file}a.py\nx\n"
    if prompt == "S P":
        assert text == f"{extra}{second}suf{first}pregap"
    else:
        assert text == f"{extra}{first}pre{second}suf{middle}gap"


def test_a_model_without_such_tokens_is_told(served):
    status, _, data = served.request("POST", "/infill", {"input_prefix": "x"})
    assert status == 400
    assert "no special tokens for filling in the middle" in json.loads(data)["error"]["message"]
    assert fill_tokens_of(["<fim_prefix>"]) is None
    assert len({*FILL_TOKENS}) == len(FILL_TOKENS)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"n_indent": -1}, "n_indent must be at least 0"),
        ({"mirostat": 1}, "mirostat is not supported"),
        ({"xtc_probability": 0.5}, "xtc_probability is not supported"),
        ({"grammar": "x", "json_schema": {}}, "give either grammar or json_schema"),
        ({"temprature": 1}, "did you mean 'temperature'?"),
    ],
    ids=str,
)
def test_what_is_refused_names_the_field(body, message):
    with pytest.raises(PagedError) as error:
        parse_call("/completion", {"prompt": "x", **body})
    assert isinstance(error.value, RequestError | TypeError)
    assert message in str(error.value)
    assert "options" not in str(error.value)
