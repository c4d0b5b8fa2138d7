"""Tools, reasoning and parsed answers through the official client, as its users write them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Literal

import openai
import pytest
from pydantic import BaseModel, Field

from paged import AsyncLLMEngine
from tests.support.chat_checkpoints import chat_checkpoint
from tests.support.served import Served, serving

# Shows tools as Qwen's template does, and begins the reasoning of an answer.
TEMPLATE = """\
{%- if tools %}
{{- '<tools>' }}{% for tool in tools %}{{ tool | tojson }}{% endfor %}{{ '</tools>' }}
{%- endif %}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + (message.content or '') }}
{%- for call in message.tool_calls or [] %}
{{- '<tool_call>' + (call.function | tojson) + '</tool_call>' }}
{%- endfor %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n<think>\\n' }}{% endif %}
"""


class Weather(BaseModel):
    """The weather in a city."""

    city: Literal["Rome", "Ulm"]
    days: int = Field(ge=1, le=9)


TOOLS = [openai.pydantic_function_tool(Weather, name="weather")]
MESSAGES = [{"role": "user", "content": "How is the weather?"}]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    directory = chat_checkpoint(tmp_path_factory.mktemp("chat"), TEMPLATE)
    engine = AsyncLLMEngine(str(directory), device="cpu", dtype="float32", num_threads=1, num_blocks=512)
    options = {"tool_call_parser": "hermes", "enable_auto_tool_choice": True, "reasoning_parser": "qwen3"}
    with serving(engine, **options) as served:
        yield served
    engine.shutdown()


@pytest.fixture
def client(served):
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def arguments(served: Served, **more) -> dict:
    """Return arguments of a request at temperature 1 whose reasoning soon ends."""
    tokenizer = served.front.engine.text.get_tokenizer()
    end = tokenizer.convert_tokens_to_ids("</think>")
    biases = {str(end): 5}
    return {
        "model": served.front.names[0],
        "messages": MESSAGES,
        "tools": TOOLS,
        "seed": 3,
        "max_completion_tokens": 300,
        "logit_bias": biases,
        **more,
    }


NAMED = {"type": "function", "function": {"name": "weather"}}


@pytest.mark.parametrize("choice", ["required", NAMED])
def test_calls_whole_and_streamed_are_the_same(served, client, choice):
    given = arguments(served, tool_choice=choice, parallel_tool_calls=False, n=3)
    whole = client.chat.completions.create(**given)
    with client.chat.completions.stream(**given) as stream:
        for _ in stream:
            pass
        streamed = stream.get_final_completion()
    for one, other in zip(whole.choices, streamed.choices, strict=True):
        assert one.finish_reason == other.finish_reason == "tool_calls"
        assert one.message.content is None
        (call,), (same,) = one.message.tool_calls, other.message.tool_calls
        assert call.function.arguments == same.function.arguments
        assert isinstance(same.function.parsed_arguments, Weather)
        assert call.function.name == same.function.name == "weather"
        assert one.message.reasoning == one.message.reasoning_content
        assert one.message.reasoning == other.message.reasoning
    assert len({choice.message.reasoning for choice in whole.choices}) == 3


def test_a_strict_tool_that_the_model_chooses_itself(served, client):
    start = served.front.engine.text.get_tokenizer().convert_tokens_to_ids("<tool_call>")
    given = arguments(served, n=4)
    given["logit_bias"] |= {str(start): 13, "0": 10}  # 0 is EOS
    parsed = client.chat.completions.parse(**given)
    calls = [call for choice in parsed.choices for call in choice.message.tool_calls or []]
    assert len(calls) > 2
    assert all(isinstance(call.function.parsed_arguments, Weather) for call in calls)
    # The conversation goes on with what the tool found.
    call = calls[0]
    sent = call.model_dump(exclude={"function": {"parsed_arguments"}})
    message = {"role": "assistant", "content": None, "tool_calls": [sent]}
    result = {"role": "tool", "tool_call_id": call.id, "content": "Rain."}
    body = {**given, "messages": [*MESSAGES, message, result], "max_completion_tokens": 1, "n": 1}
    shown = served.post("/v1/chat/completions", **body, return_prompt_text=True)["prompt_text"]
    assert json.dumps(json.loads(call.function.arguments))[1:-1] in shown
    assert shown.endswith("tool\nRain.<|im_start|>assistant\n<think>\n")


def test_a_parsed_answer_after_reasoning(served, client):
    given = arguments(served, response_format=Weather)
    del given["tools"]
    message = client.chat.completions.parse(**given).choices[0].message
    assert isinstance(message.parsed, Weather)
    assert message.reasoning


def test_stop_strings_end_no_reasoning(served, client):
    """A letter that the reasoning has ends the answer alone, in chats and messages, streamed and whole."""
    given = arguments(served, n=4, max_completion_tokens=60)
    del given["tools"]
    free = client.chat.completions.create(**given).choices
    given["stop"] = ["e", "t", "a", "i", "s"]
    whole = client.chat.completions.create(**given).choices
    assert [choice.message.reasoning for choice in whole] == [choice.message.reasoning for choice in free]
    assert any(letter in whole[0].message.reasoning for letter in given["stop"])
    cut = [choice for choice in whole if choice.finish_reason == "stop" and choice.stop_reason]
    assert cut
    for choice, before in zip(whole, free, strict=True):
        assert before.message.content.startswith(choice.message.content)
        assert not any(letter in choice.message.content for letter in given["stop"])
    texts = [{"content": "", "reasoning": ""} for _ in whole]
    for chunk in client.chat.completions.create(**given, stream=True):
        for choice in chunk.choices:
            for name, text in texts[choice.index].items():
                texts[choice.index][name] = text + (getattr(choice.delta, name, None) or "")
    assert texts == [{name: getattr(c.message, name) for name in ("content", "reasoning")} for c in whole]
    prompt = served.post("/v1/chat/completions", **given, return_prompt_text=True)["prompt_text"]
    body = {**given, "prompt": prompt, "max_tokens": 60, "add_special_tokens": False, "n": 1}
    for name in ("messages", "max_completion_tokens"):
        del body[name]
    assert served.post("/v1/completions", **body)["choices"][0]["stop_reason"] in given["stop"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "retrieval"}]}, "tools"),
        ({"tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice"),
    ],
)
def test_errors_name_the_field(served, client, fields, param):
    with pytest.raises(openai.BadRequestError) as error:
        client.chat.completions.create(**arguments(served, **fields))
    assert error.value.param.startswith(param)


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({"type": "string", "pattern": "^(?!/etc)"}, "look-around"),
        ({"$ref": "#"}, "no finite value"),
        ({"type": "integer", "multipleOf": 3, "minimum": 9007199254740993}, "is not exact"),
        ({"const": 0.5, "type": "integer"}, "no integer"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_schema_that_is_refused_is_named_by_the_tools_own_parameter(client, served, part, message):
    schema = {"type": "object", "properties": {"path": part}, "required": ["path"]}
    tools = [*TOOLS, {"type": "function", "function": {"name": "open", "parameters": schema, "strict": True}}]
    with pytest.raises(openai.BadRequestError, match=message) as error:
        client.chat.completions.create(**arguments(served, tools=tools, tool_choice="required"))
    path = "tools[1].function.parameters.properties.path"
    assert error.value.param.startswith(path)
    assert path in error.value.body["message"]
    assert "structural_tag" not in error.value.body["message"]


def test_texts_of_special_tokens_and_large_numbers_are_arguments(served, client):
    """Whole and streamed, as arguments of a tool and as completions."""
    added = sorted(map(str, served.front.engine.text.get_tokenizer().added_tokens_decoder.values()))
    assert len(added) > 7
    ids = [9007199254740993, 18446744073709551616]
    properties = {"text": {"enum": [f"a {text} b" for text in added]}, "id": {"enum": ids}}
    schema = {
        "type": "object",
        "properties": properties,
        "required": ["text", "id"],
        "additionalProperties": False,
    }
    tool = {"type": "function", "function": {"name": "look", "parameters": schema}}
    given = arguments(served, tools=[tool], tool_choice="required", n=8)
    whole = client.chat.completions.create(**given)
    streamed = [dict[int, str]() for _ in whole.choices]
    for chunk in client.chat.completions.create(**given, stream=True):
        for choice in chunk.choices:
            for call in choice.delta.tool_calls or []:
                text = streamed[choice.index].get(call.index, "") + (call.function.arguments or "")
                streamed[choice.index][call.index] = text
    found = list[str]()
    for choice, parts in zip(whole.choices, streamed, strict=True):
        made = [call.function.arguments for call in choice.message.tool_calls]
        assert made == [parts[i] for i in range(len(parts))]
        for call in map(json.loads, made):
            assert call["text"] in properties["text"]["enum"]
            assert call["id"] in ids
            found.append(call["text"])
    assert len({*found}) > 3
    for text in added:
        language = {"structured_outputs": {"choice": [f"{text}, {text}"]}}
        body = {"model": served.front.names[0], "prompt": "x", "max_tokens": 90, "extra_body": language}
        assert client.completions.create(**body).choices[0].text == f"{text}, {text}"
        chunks = client.completions.create(**body, stream=True)
        assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == f"{text}, {text}"
