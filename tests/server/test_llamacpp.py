"""llama.cpp's own routes, as editors use them."""

from __future__ import annotations

import json

import pytest

from paged.base.errors import PagedError, RequestError
from paged.protocol.endpoints import parse_call
from paged.protocol.llamacpp.answers import Indented
from paged.protocol.llamacpp.fill import FILL_TOKENS, fill_tokens_of
from tests.support.lobbies import lobby_here

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
