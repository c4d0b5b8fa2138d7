"""The official client for Python, as its users call it."""

from __future__ import annotations

import asyncio

import openai
import pytest

from paged import QueueFullError
from tests.support.served import Served, serving

ARGS = {"model": "demo", "temperature": 0, "max_tokens": 10}
MESSAGES = [{"role": "user", "content": "def add(a, b):"}]


@pytest.fixture(scope="module")
def chatting(engine):
    """Yield a server whose model has a chat template."""
    with serving(engine, chat_template="plain", api_key=["secret"]) as served:
        yield served


@pytest.fixture
def client(chatting):
    with openai.OpenAI(base_url=f"{chatting.url}/v1", api_key="secret", max_retries=0) as client:
        yield client


def test_chats(client):
    args = {**ARGS, "temperature": 1, "seed": 7, "messages": MESSAGES}
    whole = client.chat.completions.create(n=2, logprobs=True, top_logprobs=2, **args)
    texts = [choice.message.content for choice in whole.choices]
    assert len({*texts}) == 2
    assert len(whole.choices[0].logprobs.content) == whole.usage.completion_tokens / 2 == 10
    with client.chat.completions.create(
        n=2, stream=True, stream_options={"include_usage": True}, **args
    ) as stream:
        *chunks, last = stream
    parts = ["", ""]
    for chunk in chunks:
        parts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert parts == texts
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].choices[0].finish_reason == "length"
    assert last.usage.completion_tokens == 20


def test_completions_embeddings_and_models(client):
    response = client.completions.with_raw_response.create(prompt="def add(a, b):", **ARGS)
    text = response.parse().choices[0].text
    assert response.headers["x-request-id"]
    stream = client.completions.create(prompt="def add(a, b):", stream=True, **ARGS)
    assert "".join(chunk.choices[0].text for chunk in stream) == text
    vectors = client.embeddings.create(model="demo", input=["a", "b"])  # in base64, which it decodes
    numbers = client.embeddings.create(model="demo", input="b", encoding_format="float")
    assert vectors.data[1].embedding == pytest.approx(numbers.data[0].embedding, rel=1e-5)
    assert [model.id for model in client.models.list()] == ["demo"]
    assert client.models.retrieve("demo").max_model_len == 2048
    with pytest.raises(openai.NotFoundError, match="the model 'a/b' is not here; this server has 'demo'"):
        client.models.retrieve("a/b")


def test_errors_are_the_classes_of_the_client(client):
    create = client.completions.create
    with pytest.raises(openai.BadRequestError, match="temperature must be") as caught:
        create(model="demo", prompt="a", temperature=-1)
    assert caught.value.param == "temperature"
    with pytest.raises(openai.NotFoundError, match="this server has 'demo'"):
        create(model="gpt-5", prompt="a")
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="wrong").models.list()
    with pytest.raises(openai.APIError, match="timeout_s"):
        list(create(prompt="a", stream=True, extra_body={"timeout_s": 0.05}, **{**ARGS, "max_tokens": 1500}))


class FullOnce:
    """An engine whose queue is full for the first request."""

    def __init__(self, engine) -> None:
        self._engine, self.num_requests = engine, 0

    def __getattr__(self, name: str):
        return getattr(self._engine, name)

    def generate(self, *args, **given):
        self.num_requests += 1
        if self.num_requests == 1:
            raise QueueFullError("200 requests wait already; try again later")
        return self._engine.generate(*args, **given)


def test_a_full_queue_is_tried_again(engine):
    """The client waits as long as Retry-After says, and succeeds once there is room."""
    full = FullOnce(engine)
    with serving(full) as served:
        client = openai.OpenAI(base_url=f"{served.url}/v1", api_key="none")
        assert client.completions.create(prompt="a", **ARGS).choices[0].text
    assert full.num_requests == 2


def test_the_asynchronous_client(chatting: Served):
    async def ask() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{chatting.url}/v1", api_key="secret") as client:

            async def chat() -> str:
                stream = await client.chat.completions.create(messages=MESSAGES, stream=True, **ARGS)
                return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

            return await asyncio.gather(*(chat() for _ in range(8)))

    assert len({*asyncio.run(ask())}) == 1
