"""Random requests of agents' APIs, sent by the official clients: their streams make the whole answers.

python -m tests.support.random_agents --num 300    # more than the tests send, with any --seed
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import anthropic
import openai
from anthropic.types import Message, RawMessageStreamEvent
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from tests.support.random_requests import SCHEMA, TEXTS
from tests.support.served import Served
from tests.support.small_server import MODEL, small_server

EVENTS = TypeAdapter[Any](ResponseStreamEvent)
MESSAGE_EVENTS = TypeAdapter[Any](RawMessageStreamEvent)
NAMES = ("weather", "weather_of", "stop")


class RandomAgents:
    """Random arguments of `responses.create` and `messages.create`, from a seed.

    think, end_think: the tokens around reasoning.
    """

    def __init__(self, seed: int, think: int, end_think: int) -> None:
        self._rng = random.Random(seed)
        self.think = think
        self.end_think = end_think

    def _sometimes(self, share: float, **fields: Callable[[], Any]) -> dict[str, Any]:
        return {name: make() for name, make in fields.items() if self._rng.random() < share}

    def _text(self) -> str:
        return self._rng.choice(TEXTS)

    def _sampling(self) -> tuple[int, dict[str, Any]]:
        """Return most tokens, and what the clients have no argument for."""
        rng = self._rng
        extra = {"seed": rng.randrange(1000)}
        extra |= self._sometimes(0.2, min_p=lambda: 0.01, bad_words=lambda: ["the"], ignore_eos=lambda: True)
        extra["chat_template_kwargs"] = {"enable_thinking": rng.random() < 0.5}
        if rng.random() < 0.5:  # reasoning begins, and soon ends
            extra["logit_bias"] = {str(self.think): 9, str(self.end_think): 9}
        return rng.choice([3, 14, 60]), extra

    def response(self) -> dict[str, Any]:
        """Return arguments of `responses.create`."""
        rng = self._rng
        most, extra = self._sampling()
        extra |= self._sometimes(0.2, stop=lambda: rng.choice(["e", ["a", "\n"], [" "]]))
        given: dict[str, Any] = {"model": MODEL, "max_output_tokens": most, "input": self._items()}
        given |= self._sometimes(0.3, temperature=lambda: rng.choice([0, 0.7]), top_p=lambda: 0.8)
        given |= self._sometimes(0.3, instructions=self._text)
        if rng.random() < 0.5:
            given["tools"] = [
                {"type": "function", "name": name, "parameters": SCHEMA, "strict": False} for name in NAMES
            ]
            named = {"type": "function", "name": rng.choice(NAMES)}
            given["tool_choice"] = rng.choice(["auto", "required", named, "none"])
            given |= self._sometimes(0.3, parallel_tool_calls=lambda: False)
        elif rng.random() < 0.5:
            given["text"] = {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA}}
        else:
            given |= self._sometimes(0.5, top_logprobs=lambda: rng.randint(1, 4))
        return {**given, "extra_body": extra}

    def _items(self) -> Any:
        if self._rng.random() < 0.4:
            return self._text()
        call = {"type": "function_call", "call_id": "c", "name": "stop", "arguments": "{}"}
        output = {"type": "function_call_output", "call_id": "c", "output": self._text()}
        question = {"role": "user", "content": [{"type": "input_text", "text": self._text()}]}
        return [question, call, output] if self._rng.random() < 0.5 else [question]

    def message(self) -> dict[str, Any]:
        """Return arguments of `messages.create`."""
        rng = self._rng
        most, extra = self._sampling()
        given: dict[str, Any] = {"model": MODEL, "max_tokens": most, "messages": self._messages()}
        extra |= self._sometimes(0.3, temperature=lambda: rng.choice([0, 0.7]), top_k=lambda: 40)
        given |= self._sometimes(0.3, system=self._text)
        given |= self._sometimes(0.3, stop_sequences=lambda: rng.choice([["e"], ["a", "\n"], ["on"]]))
        if rng.random() < 0.6:
            given["tools"] = [{"name": name, "input_schema": SCHEMA} for name in NAMES]
            named = {"type": "tool", "name": rng.choice(NAMES)}
            given["tool_choice"] = rng.choice([{"type": "auto"}, {"type": "any"}, named, {"type": "none"}])
            if given["tool_choice"]["type"] != "none" and rng.random() < 0.3:
                given["tool_choice"] = {**given["tool_choice"], "disable_parallel_tool_use": True}
        shown = [{"type": "disabled"}, {"type": "adaptive"}, {"type": "adaptive", "display": "omitted"}]
        given |= self._sometimes(0.4, thinking=lambda: rng.choice(shown))
        return {**given, "extra_body": extra}

    def _messages(self) -> list[dict[str, Any]]:
        question = {"role": "user", "content": self._text()}
        if self._rng.random() < 0.5:
            return [question]
        call = {"type": "tool_use", "id": "c", "name": "stop", "input": {}}
        result = {"type": "tool_result", "tool_use_id": "c", "content": [{"type": "text", "text": "Done."}]}
        answered = {"role": "user", "content": [result, {"type": "text", "text": self._text()}]}
        return [question, {"role": "assistant", "content": [call]}, answered]


def _without_ids(value: Any) -> Any:
    """Return a value of JSON without what differs between two equal answers."""
    if isinstance(value, dict):
        left_out = ("id", "call_id", "created_at", "completed_at", "parsed_arguments", "parsed", "async_")
        return {key: _without_ids(part) for key, part in value.items() if key not in left_out}
    return [_without_ids(part) for part in value] if isinstance(value, list) else value


def check_response(client: openai.OpenAI, given: dict[str, Any]) -> None:
    """Check that a response's stream makes the whole response, in events that its client joins."""
    whole = client.responses.create(**given)
    Response.model_validate(whole.model_dump(by_alias=True))
    texts = dict[int, str]()
    numbers = []
    with client.responses.stream(**given) as stream:
        for event in stream:
            numbers.append(event.sequence_number)
            if event.type.endswith(".delta"):
                texts[event.output_index] = texts.get(event.output_index, "") + event.delta
            final = event
    assert numbers == [*range(len(numbers))]
    joined = _without_ids(final.response.model_dump())
    assert joined == _without_ids(whole.model_dump()), given
    for index, item in enumerate(whole.output):
        text = item.arguments if item.type == "function_call" else "".join(p.text for p in item.content)
        assert texts.get(index, "") == text, given
    for event in client.responses.create(**given, stream=True):
        EVENTS.validate_python(event.model_dump(by_alias=True))


def check_message(client: anthropic.Anthropic, given: dict[str, Any]) -> None:
    """Check that a message's stream makes the whole message, in events that its client joins."""
    whole = client.messages.create(**given)
    Message.model_validate(whole.model_dump())
    with client.messages.stream(**given) as stream:
        streamed = stream.get_final_message()
    made, joined = (_without_ids(message.model_dump()) for message in (whole, streamed))
    if whole.stop_reason != "tool_use":  # clients keep what is there of a call that is cut
        for message in (made, joined):
            for block in message["content"]:
                block.pop("input", None)
                block.pop("parsed_output", None)
    for block in joined["content"]:
        block.pop("parsed_output", None)
    assert joined == made, given
    for event in client.messages.create(**given, stream=True):
        MESSAGE_EVENTS.validate_python(event.model_dump())


def check_all(served: Served, num: int, seed: int) -> None:
    """Check random requests, half of them of each API."""
    tokenizer = served.front.engine.text.get_tokenizer()
    requests = RandomAgents(seed, *tokenizer.convert_tokens_to_ids(["<think>", "</think>"]))
    with (
        openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client,
        anthropic.Anthropic(base_url=served.url, api_key="none", max_retries=0) as other,
        ThreadPoolExecutor(8) as pool,
    ):
        done = [pool.submit(check_response, client, requests.response()) for _ in range(num // 2)]
        done += [pool.submit(check_message, other, requests.message()) for _ in range(num - num // 2)]
        for each in done:
            each.result()


def main() -> None:
    """Check more requests than the tests do."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    with small_server() as served:
        check_all(served, arguments.num, arguments.seed)
    print(f"{arguments.num} streams made the whole answers")


if __name__ == "__main__":
    main()
