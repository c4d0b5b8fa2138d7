"""OpenAI's Responses and Anthropic's Messages through their official clients, as agents use them."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

import agents
import anthropic
import openai
import pytest
from pydantic import BaseModel, Field

from paged.server.responses import ResponseKey
from tests.support.served import Served, eventually, serving, unhurried

STORE = 6000  # bytes: two or three responses


class Weather(BaseModel):
    """The weather in a city."""

    city: Literal["Rome", "Ulm"]
    days: int = Field(ge=1, le=9)


SCHEMA = {**Weather.model_json_schema(), "additionalProperties": False}
TOOL = openai.pydantic_function_tool(Weather, name="weather")["function"]
ASKED = {"model": "demo", "input": "How is the weather?", "temperature": 0, "max_output_tokens": 12}
MESSAGE = {"model": "demo", "messages": [{"role": "user", "content": "How is it?"}], "max_tokens": 12}


@pytest.fixture(scope="module")
def server(engine, tmp_path_factory) -> Iterator[Served]:
    keys = tmp_path_factory.mktemp("keys") / "keys"
    digests = {name: hashlib.sha256(name.encode()).hexdigest() for name in ("first", "second")}
    keys.write_text("\n".join(json.dumps({"sha256": d, "tenant": name}) for name, d in digests.items()))
    keys.chmod(0o600)
    options = {"tool_call_parser": "hermes", "enable_auto_tool_choice": True, "ignore_builtin_tools": True}
    with serving(
        engine, chat_template="plain", api_keys=str(keys), response_store=STORE, **options
    ) as served:
        yield served
        eventually(lambda: served.num_requests == 0)
        assert served.stats().num_used_blocks == 0
        served.front.responses.check()


@pytest.fixture
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="first", max_retries=0) as client:
        yield client


@pytest.fixture
def claude(server):
    with anthropic.Anthropic(base_url=server.url, api_key="first", max_retries=0) as client:
        yield client


def test_a_response_goes_on_from_a_stored_one(server, client):
    asked = {**ASKED, "instructions": "Be brief.", "metadata": {"a": "b"}}
    first = client.responses.create(**asked)
    assert (first.status, first.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert (first.store, first.metadata, first.usage.output_tokens) == (True, {"a": "b"}, 12)
    assert client.responses.retrieve(first.id) == first
    with pytest.raises(openai.BadRequestError, match="a stored response has ended"):
        client.responses.retrieve(first.id, stream=True)
    # The same conversation as items, without the earlier instructions.
    follow = {**ASKED, "input": "And tomorrow?"}
    items = [
        {"role": "user", "content": ASKED["input"]},
        *first.output,
        {"role": "user", "content": follow["input"]},
    ]
    second = client.responses.create(**follow, previous_response_id=first.id, store=False)
    alone = client.responses.create(**{**follow, "input": items})
    assert second.output_text == alone.output_text
    assert second.usage.input_tokens == alone.usage.input_tokens
    assert not second.store
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(second.id)
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError, match="no response") as caught:
        client.responses.create(**follow, previous_response_id=first.id)
    assert caught.value.param == "previous_response_id"
    # The memory is bounded: the oldest leave. Another key sees none of them.
    made = [client.responses.create(**ASKED) for _ in range(6)]
    responses = server.front.responses
    responses.check()
    kept = [one.id for one in made if responses.find(ResponseKey("first", one.id))]
    assert kept == [one.id for one in made[-len(kept) :]]
    assert 0 < len(kept) < 6
    large = {str(i): "x" * 512 for i in range(16)}  # more than all of the memory: the others stay
    assert not client.responses.create(**ASKED, metadata=large).store
    assert all(responses.find(ResponseKey("first", one)) for one in kept)
    other = client.with_options(api_key="second").responses
    for ask in (other.retrieve, other.delete, other.cancel):
        with pytest.raises(openai.NotFoundError):
            ask(kept[-1])
    with pytest.raises(openai.NotFoundError):
        other.create(**follow, previous_response_id=kept[-1])
    assert client.responses.cancel(kept[-1]).id == kept[-1]  # it has ended: nothing changes


def test_the_oldest_items_are_left_out_of_an_input_beyond_the_context(client):
    asked = {**ASKED, "instructions": "Be brief."}
    most = 2048 - ASKED["max_output_tokens"]
    turn = {"role": "user", "content": "abc " * 60}
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "c", "output": "x"}
    items = [call, *[turn] * 8, output, *[turn] * 40]
    with pytest.raises(openai.BadRequestError, match="max_model_len") as caught:
        client.responses.create(**{**asked, "input": items})
    assert caught.value.param == "input"
    cut = client.responses.create(**{**asked, "input": items}, truncation="auto")
    assert cut.truncation == "auto"
    one, two = (
        client.responses.create(**{**asked, "input": [turn] * num}).usage.input_tokens for num in (1, 2)
    )
    num_kept = 1 + (most - one) // (two - one)
    alone = client.responses.create(**{**asked, "input": [turn] * num_kept})
    assert most - (two - one) < alone.usage.input_tokens <= most
    assert (alone.output_text, alone.usage.input_tokens) == (cut.output_text, cut.usage.input_tokens)
    with pytest.raises(openai.BadRequestError, match="max_model_len"):
        client.responses.create(**{**asked, "input": "abc " * 4000}, truncation="auto")


def test_an_item_of_a_stored_response_may_be_referred_to(client):
    first = client.responses.create(**ASKED)
    (said,) = first.output
    asked = {**ASKED, "store": False}
    items = [{"role": "user", "content": ASKED["input"]}, said, {"role": "user", "content": "And tomorrow?"}]
    whole = client.responses.create(**{**asked, "input": items})
    items[1] = {"type": "item_reference", "id": said.id}
    referred = client.responses.create(**{**asked, "input": items})
    assert (referred.output_text, referred.usage) == (whole.output_text, whole.usage)
    others = (client.with_options(api_key="second"), said.id), (client, f"{said.id}1"), (client, "x")
    for asking, item_id in others:
        items[1] = {"id": item_id}  # the type may be left out
        with pytest.raises(openai.NotFoundError) as caught:
            asking.responses.create(**{**asked, "input": items})
        assert caught.value.param == "input[1].id"


def test_tools_in_several_turns_and_parsed_answers(client, caplog):
    tools = [{"type": "function", **TOOL}, {"type": "web_search"}]  # the latter is left out
    forced = {**ASKED, "tools": tools, "max_output_tokens": 300, "parallel_tool_calls": False}
    with client.responses.stream(**forced, tool_choice="required") as stream:
        kinds = [event.type.removeprefix("response.") for event in stream]
        called = stream.get_final_response()
    (call,) = called.output
    Weather.model_validate(call.parsed_arguments)
    deltas = [i for i, kind in enumerate(kinds) if kind == "function_call_arguments.delta"]
    assert kinds[:3] == ["created", "in_progress", "output_item.added"]
    assert deltas == [*range(3, len(kinds) - 3)]
    assert kinds[-3:] == ["function_call_arguments.done", "output_item.done", "completed"]
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "Rain."}
    more = client.responses.create(**{**ASKED, "input": [output]}, previous_response_id=called.id)
    assert more.output_text
    raw = client.responses.with_raw_response.create(
        **forced, tool_choice={"type": "function", "name": "weather"}
    )
    assert raw.headers["x-paged-ignored"] == "tools[1]"
    assert "are left out: web_search" in caplog.text
    bad = {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}
    form = {"type": "json_schema", "name": "a", "schema": bad}
    with pytest.raises(openai.BadRequestError, match="no finite value") as caught:
        client.responses.create(**ASKED, text={"format": form})
    assert caught.value.param.startswith("text.format.schema")
    assert "text.format is refused" in caught.value.body["message"]
    odd = [{"type": "function", "name": "f", "parameters": bad}]
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(**ASKED, tools=odd, tool_choice="required")
    assert caught.value.body["message"].startswith(caught.value.param)
    parsed = client.responses.parse(**{**ASKED, "max_output_tokens": 300}, text_format=Weather)
    assert isinstance(parsed.output_parsed, Weather)
    assert parsed.status == "completed"


def test_an_agent_calls_two_tools_and_ends(server):
    called = []

    def use(tool: str, **extra) -> None:
        settings = {"tool_choice": tool, "max_tokens": 300, "parallel_tool_calls": False}
        agent.model_settings = agents.ModelSettings(**settings, extra_body=extra)

    @agents.function_tool
    def weather(city: Literal["Rome", "Ulm"]) -> str:
        """Tell the weather."""
        called.append(city)
        use("mail")
        return "Rain."

    @agents.function_tool
    def mail(days: Literal[1, 2]) -> str:
        """Send it."""
        called.append(days)
        use("none", structured_outputs={"choice": ["All done."]})
        return "Sent."

    agent = agents.Agent("a", instructions="Help.", tools=[weather, mail], reset_tool_choice=False)
    use("weather")

    async def run() -> agents.RunResult:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="first", max_retries=0) as client:
            agent.model = agents.OpenAIResponsesModel("demo", client)
            return await agents.Runner.run(
                agent, "Mail me.", run_config=agents.RunConfig(tracing_disabled=True)
            )

    result = asyncio.run(run())
    assert called[0] in ("Rome", "Ulm")
    assert called[1] in (1, 2)
    assert len(called) == 2
    assert result.final_output == "All done."
    kinds = [item.type for item in result.new_items]
    assert kinds == ["tool_call_item", "tool_call_output_item"] * 2 + ["message_output_item"]


def test_messages_and_their_tools(claude):
    message = claude.messages.create(**MESSAGE, extra_body={"temperature": 0})
    assert (message.role, message.stop_reason, message.usage.output_tokens) == ("assistant", "max_tokens", 12)
    assert message._request_id in message.id
    count = claude.messages.count_tokens(model="demo", messages=MESSAGE["messages"])
    assert count.input_tokens == message.usage.input_tokens
    (text,) = (block.text for block in message.content)
    stop = text[len(text) // 2 :][:4]
    with claude.messages.stream(**MESSAGE, stop_sequences=[stop], extra_body={"temperature": 0}) as stream:
        ended = stream.get_final_message()
    assert (ended.stop_reason, ended.stop_sequence) == ("stop_sequence", stop)
    assert ended.content[0].text == text[: text.index(stop)]
    # An answer that has begun goes on, and is a part of the prompt.
    begun = [*MESSAGE["messages"], {"role": "assistant", "content": text[:8]}]
    goes_on = claude.messages.create(**{**MESSAGE, "messages": begun}, extra_body={"temperature": 0})
    assert not goes_on.content[0].text.startswith(text[:8])
    tools = [{"name": "weather", "input_schema": SCHEMA}, {"type": "bash_20250124", "name": "bash"}]
    forced = {"type": "any", "disable_parallel_tool_use": True}
    asked = {**MESSAGE, "tools": tools, "max_tokens": 300}
    with claude.messages.stream(**asked, tool_choice=forced) as stream:
        kinds = [event.type for event in stream if event.type != "input_json"]
        called = stream.get_final_message()
    (use,) = called.content
    Weather.model_validate(use.input)
    assert called.stop_reason == "tool_use"
    begin, end = (
        ["message_start", "content_block_start"],
        ["content_block_stop", "message_delta", "message_stop"],
    )
    assert kinds == [*begin, *["content_block_delta"] * (len(kinds) - 5), *end]
    result = {"type": "tool_result", "tool_use_id": use.id, "content": "Rain."}
    turns = [called.to_param(), {"role": "user", "content": [result]}]
    again = claude.messages.create(**{**asked, "messages": [*MESSAGE["messages"], *turns], "max_tokens": 5})
    assert again.usage.output_tokens == 5


def test_errors_and_keys_of_messages(server, claude):
    with pytest.raises(anthropic.BadRequestError) as caught:
        claude.messages.create(**{**MESSAGE, "messages": [{"role": "user", "content": [{"type": "image"}]}]})
    assert caught.value.body["type"] == "error"
    assert caught.value.body["error"]["type"] == "invalid_request_error"
    assert "messages[0].content[0]" in caught.value.body["error"]["message"]
    assert caught.value.body["request_id"]
    with pytest.raises(anthropic.NotFoundError):
        claude.messages.create(**{**MESSAGE, "model": "claude"})
    with pytest.raises(anthropic.AuthenticationError) as caught:
        claude.with_options(api_key="wrong").messages.create(**MESSAGE)
    assert caught.value.body["error"]["type"] == "authentication_error"
    bad = {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}
    fields = {
        "tools[0].input_schema": {
            "tools": [{"name": "f", "input_schema": bad}],
            "tool_choice": {"type": "any"},
        },
        "output_config.format.schema": {"output_config": {"format": {"type": "json_schema", "schema": bad}}},
    }
    for param, given in fields.items():
        with pytest.raises(anthropic.BadRequestError, match="no finite value") as caught:
            claude.messages.create(**MESSAGE, **given)
        assert param in caught.value.body["error"]["message"]
    for path, status in (("/v1/messages", 200), ("/v1/responses", 401)):
        body = MESSAGE if status == 200 else ASKED
        found, _, _ = server.request(
            "POST", path, body, {"x-api-key": "first", "anthropic-beta": "unknown-1"}
        )
        assert found == status  # the key is in its right place there alone
    long = {**MESSAGE, "max_tokens": 1500, "extra_body": {"timeout_s": 0.05, "ignore_eos": True}}
    with pytest.raises(anthropic.APIError, match="timeout_s"):
        list(claude.messages.create(**long, stream=True))


def test_streams_that_are_left_or_cancelled_free_their_blocks(server, client, claude, engine):
    long = {**ASKED, "max_output_tokens": 1900, "extra_body": {"ignore_eos": True}}
    with client.responses.create(**long, stream=True) as stream:
        next(stream)
    text = {"max_tokens": 1900, "extra_body": {"ignore_eos": True}}
    with claude.messages.create(**{**MESSAGE, **text}, stream=True) as stream:
        next(stream)
    eventually(lambda: server.num_requests == 0)
    with unhurried(engine):
        stream = client.responses.create(**long, stream=True)
        first = next(stream).response
        assert client.responses.retrieve(first.id).status == "in_progress"
        cancelled = client.responses.cancel(first.id)
    assert (cancelled.id, cancelled.status) == (first.id, "cancelled")
    *_, last = stream
    assert (last.type, last.response.status) == ("response.failed", "cancelled")
    eventually(lambda: server.num_requests == 0)
    assert server.stats().num_used_blocks == 0
    with pytest.raises(openai.NotFoundError):
        client.responses.cancel(first.id)
    # Whoever waits for the whole of a response gets a cancelled one, and no error, which clients retry.
    with unhurried(engine), ThreadPoolExecutor(1) as pool:
        waiting = client.responses.create
        whole = pool.submit(waiting, **{**long, "extra_body": {"ignore_eos": True, "request_id": "mine"}})
        eventually(lambda: server.num_requests == 1)
        assert client.responses.cancel("resp_mine").status == "cancelled"
        assert whole.result().status == "cancelled"
