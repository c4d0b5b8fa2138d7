"""SmolLM2-135M-Instruct, a trained checkpoint, against transformers and through the server.

`make test-real` converts the checkpoint and runs this file, whose name pytest does not collect by itself.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import jsonschema
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from paged import LLM, SamplingParams, StructuredOutputsParams
from paged.server.engine_client import EngineClient
from tests.real.prompts import CHATS, LONG, TEXTS
from tests.support.served import Served, serving
from tests.text.test_chat_template import CHATML

MODEL = Path(os.environ.get("REAL_CHECKPOINT", Path(__file__).parents[2] / ".venv-real" / "model"))
MAX_TOKENS = 16
# Engines that compute the same requests differently. Without the prefix cache, each computes all tokens.
WAYS: dict[str, dict[str, Any]] = {
    "alone": {"max_num_seqs": 1},
    "batched": {"max_num_seqs": 64},
    "chunked": {"max_num_seqs": 16, "max_num_batched_tokens": 48},
    "preempted": {"max_num_seqs": 64, "num_blocks": 112, "block_size": 16},
}
# Differences of log-probabilities between engine and transformers, in which sums have another order.
MAX_DIFFERENCE = {"float32": 5e-4, "bfloat16": 0.5}
# How much more likely transformers may find another token than the one that the engine chose.
MAX_GAP = {"float32": 0.0, "bfloat16": 0.5}  # four roundings of a logit of bfloat16


class Answer(NamedTuple):
    """The tokens of a greedy answer and their log-probabilities."""

    token_ids: list[int]
    logprobs: list[float]


def _engine(**options: Any) -> LLM:
    if not (MODEL / "config.json").exists():
        pytest.exit(f"{MODEL} is not a checkpoint; `make test-real` makes it", returncode=2)
    return LLM(str(MODEL), **{"device": "cpu", "max_model_len": 2048, "num_blocks": 1024, **options})


@cache
def _tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(MODEL)


@cache
def _prompts() -> list[list[int]]:
    tokenizer = _tokenizer()
    chats = [[{"role": "user", "content": text}] for text in CHATS]
    rendered = [
        tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False) for chat in chats
    ]
    prompts = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in [*TEXTS, *rendered]]
    assert len(prompts) == 40
    assert 1400 < len(prompts[TEXTS.index(LONG)]) < 1700
    return prompts


@cache
def _answers(way: str, dtype: str) -> list[Answer]:
    """Return the engine's answers to all prompts."""
    prompts = [{"prompt_token_ids": ids} for ids in _prompts()]
    llm = _engine(dtype=dtype, enable_prefix_caching=False, **WAYS[way])
    params = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, logprobs=1, ignore_eos=True)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    preempted = sum(output.metrics.num_preemptions for output in outputs)
    assert (preempted > 0) == (way == "preempted"), f"{preempted} preemptions"
    answers = []
    for output in outputs:
        (found,) = output.outputs
        chosen = zip(found.token_ids, found.logprobs, strict=True)
        answers.append(Answer([*found.token_ids], [row[token].logprob for token, row in chosen]))
    return answers


@cache
def _reference(dtype: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(
        MODEL, dtype=getattr(torch, dtype), attn_implementation="eager"
    ).eval()


def _scored(dtype: str, prompt: Sequence[int], answer: Answer) -> tuple[float, float, int]:
    """Compare an answer with transformers, which reads prompt and answer in one pass.

    Where its most likely token is the engine's at each place, its own greedy answer is the same.

    Returns the largest difference of a log-probability, how much more likely it finds another token at most,
    and at how many places it finds one.
    """
    with torch.no_grad():
        read = torch.tensor([[*prompt, *answer.token_ids[:-1]]])
        logits = _reference(dtype)(read, logits_to_keep=MAX_TOKENS).logits[0]
    rows = logits.float().log_softmax(-1)
    chosen = rows.gather(1, torch.tensor(answer.token_ids)[:, None])[:, 0]
    differences = (chosen - torch.tensor(answer.logprobs)).abs()
    gaps = rows.max(-1).values - chosen
    return float(differences.max()), float(gaps.max()), int((gaps > 0).sum())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_answers_are_those_of_transformers(dtype):
    scores = [_scored(dtype, *pair) for pair in zip(_prompts(), _answers("alone", dtype), strict=True)]
    differences, gaps, others = zip(*scores, strict=True)
    places = len(scores) * MAX_TOKENS
    print(
        f"\n{dtype}: {places} tokens of {len(scores)} prompts; at {sum(others)} transformers prefers another "
        f"by {max(gaps):.3g} at most; log-probabilities differ by {max(differences):.3g} at most"
    )
    assert max(gaps) <= MAX_GAP[dtype]
    assert max(differences) <= MAX_DIFFERENCE[dtype]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("way", [way for way in WAYS if way != "alone"])
def test_answers_are_the_same_bits(way, dtype):
    assert _answers(way, dtype) == _answers("alone", dtype)


# Bounded schemas


def _schema(choose: random.Random, depth: int = 0) -> dict[str, Any]:
    """Return a schema whose values have a bounded size."""
    kinds = ["string", "integer", "boolean", "enum", "number", *(["array", "object"] if depth < 2 else [])]
    kind = "object" if depth == 0 else choose.choice(kinds)
    if kind == "string":
        return {"type": "string", "minLength": choose.randint(0, 2), "maxLength": choose.randint(3, 12)}
    if kind in ("integer", "number"):
        least = choose.randint(-1000, 1000)
        return {"type": kind, "minimum": least, "maximum": least + choose.randint(1, 10**6)}
    if kind == "enum":
        return {"enum": choose.sample(["red", "groß", "日本", "🙂", 1, 2.5, None, True, ""], 3)}
    if kind == "array":
        return {"type": "array", "items": _schema(choose, depth + 1), "minItems": 1, "maxItems": 3}
    if kind == "object":
        names = choose.sample(["name", "age", "tags", "größe", "ok", "kind"], choose.randint(1, 4))
        properties = {name: _schema(choose, depth + 1) for name in names}
        return {"type": "object", "properties": properties, "required": names, "additionalProperties": False}
    return {"type": "boolean"}


def test_fifty_outputs_match_their_schemas():
    schemas = [_schema(random.Random(seed)) for seed in range(50)]
    params = [
        SamplingParams(
            temperature=float(i % 2),
            seed=i,
            max_tokens=1024,
            structured_outputs=StructuredOutputsParams(json=schema),
        )
        for i, schema in enumerate(schemas)
    ]
    prompts = [f"A JSON object that matches {json.dumps(schema)}:\n" for schema in schemas]
    outputs = _engine(dtype="float32").generate(prompts, params, use_tqdm=False)
    for output, schema in zip(outputs, schemas, strict=True):
        (found,) = output.outputs
        assert found.finish_reason == "stop", (schema, found.text)
        jsonschema.validate(json.loads(found.text), schema)


# The server

CHAT = "/v1/chat/completions"
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": description,
            "parameters": {
                "type": "object",
                "properties": properties,
                "required": [*properties],
                "additionalProperties": False,
            },
        },
    }
    for name, description, properties in [
        ("weather", "Return the weather of a city", {"city": {"type": "string", "maxLength": 20}}),
        (
            "add",
            "Add two whole numbers",
            {key: {"type": "integer", "minimum": 0, "maximum": 10**6} for key in ("a", "b")},
        ),
    ]
]


def _served(**options: Any) -> Any:
    client = EngineClient(str(MODEL), device="cpu", dtype="float32", max_model_len=2048, num_blocks=1024)
    return serving(client, closes=True, served_model_name="smollm2", **options)


def _post(served: Served, **body: Any) -> httpx.Response:
    """Send a chat. The machine may be slow or busy."""
    response = httpx.post(served.url + CHAT, json={"model": "smollm2", "temperature": 0, **body}, timeout=600)
    assert response.status_code == 200, response.text
    return response


def test_a_chat_ends_at_its_own_stop_token():
    """Over HTTP, whole and streamed, with the text of transformers' own generate."""
    chat = [{"role": "user", "content": CHATS[0]}]
    tokenizer = _tokenizer()
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    ids = tokenizer(prompt, add_special_tokens=False, return_tensors="pt")["input_ids"]
    theirs = _reference("float32").generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=64
    )
    with _served() as served:
        answer = _post(served, messages=chat, max_tokens=64).json()
        lines = _post(served, messages=chat, max_tokens=64, stream=True).text.splitlines()
    *events, done = [line.removeprefix("data: ") for line in lines if line]
    (choice,) = answer["choices"]
    text = choice["message"]["content"]
    assert choice["finish_reason"] == "stop"
    assert text == tokenizer.decode(theirs[0, ids.shape[1] :], skip_special_tokens=True)
    assert "Paris" in text
    assert "<|im_end|>" not in text
    assert answer["usage"]["completion_tokens"] == theirs.shape[1] - ids.shape[1] < 64
    chunks = [json.loads(event)["choices"] for event in events]
    assert done == "[DONE]"
    assert "".join(chunk[0]["delta"].get("content") or "" for chunk in chunks if chunk) == text


def test_tool_calls_match_their_schemas():
    """The checkpoint's own template knows no tools, so the server brings one."""
    schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in TOOLS}
    named = {"type": "function", "function": {"name": "add"}}
    asked = {
        "required": ["What is the weather in Paris?", "How much is 17 + 25?", "你好"],
        "add": ["2 + 3?", "Hi 🙂"],
    }
    with _served(chat_template=CHATML, tool_call_parser="hermes", enable_auto_tool_choice=True) as served:
        for choice, questions in asked.items():
            for question in questions:
                response = _post(
                    served,
                    messages=[{"role": "user", "content": question}],
                    tools=TOOLS,
                    tool_choice=named if choice == "add" else choice,
                    parallel_tool_calls=False,
                    max_tokens=256,
                )
                calls = [call["function"] for call in response.json()["choices"][0]["message"]["tool_calls"]]
                assert len(calls) == 1
                for call in calls:
                    assert choice in ("required", call["name"])
                    jsonschema.validate(json.loads(call["arguments"]), schemas[call["name"]])
