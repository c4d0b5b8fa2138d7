"""Random valid requests of all parameters that shape an answer, and the whole answer that a stream makes.

python -m tests.support.random_requests --num 500    # more than the tests send, with any --seed
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tests.support.served import Served
from tests.support.small_server import small_server

CHAT, COMPLETIONS, GENERATE = "/v1/chat/completions", "/v1/completions", "/generate"
TEXTS = [
    "def add(a, b):",
    "é😀ok",
    "naïve Straße, 東京 🇯🇵 ½",
    "  two blanks\n\tand a tab ",
    "<|endoftext|>after a special token",
    "👩‍👩‍👧 e\u0301 한국",
    "a",
]
NUM_IDS = 4096  # of the demo's vocabulary; the first are special tokens and single bytes
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 6}, "days": {"enum": [1, 20, 300]}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": SCHEMA}}
    for name in ("weather", "weather_of", "stop")
]
CONSTRAINTS = [
    {"regex": "[a-zé]{2,9}"},
    {"choice": ["東京", "Rome", "Ro"]},
    {"json": SCHEMA},
    {"json_object": True},
]


class RandomRequests:
    """A sequence of URLs and bodies from a seed."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)

    def next(self) -> tuple[str, dict[str, Any]]:
        """Return a URL and a body without `stream`."""
        url = self._rng.choice([COMPLETIONS, COMPLETIONS, CHAT, CHAT, GENERATE])
        body = self._sampling()
        body |= self._chat() if url == CHAT else self._completion(url)
        return url, body

    def _sometimes(self, share: float, **fields: Callable[[], Any]) -> dict[str, Any]:
        return {name: make() for name, make in fields.items() if self._rng.random() < share}

    def _sampling(self) -> dict[str, Any]:
        rng = self._rng
        body: dict[str, Any] = {"seed": rng.randrange(1000), "max_tokens": rng.randint(1, 14)}
        if rng.random() < 0.4:
            body["n"] = rng.randint(2, 3)
            body |= self._sometimes(0.2, best_of=lambda: body["n"] + 1)
        body |= self._sometimes(
            0.15,
            temperature=lambda: rng.choice([0, 0.7, 1.5]),
            top_p=lambda: 0.8,
            top_k=lambda: 40,
            min_p=lambda: 0.01,
            presence_penalty=lambda: 0.5,
            repetition_penalty=lambda: 1.2,
            logit_bias=lambda: {str(rng.randrange(300)): 5},
            bad_words=lambda: ["the"],
            min_tokens=lambda: rng.randint(0, body["max_tokens"]),
            stop=lambda: rng.choice(["e", ["a", "\n"], ["\ufffd", "on"], [" "]]),
            stop_token_ids=lambda: [rng.randrange(NUM_IDS) for _ in range(40)],
            include_stop_str_in_output=lambda: True,
            ignore_eos=lambda: True,
            skip_special_tokens=lambda: False,
            spaces_between_special_tokens=lambda: False,
            cache_salt=lambda: "s",
            prompt_logprobs=lambda: rng.randint(0, 3),
        )
        return body

    def _answer(self) -> dict[str, Any]:
        return self._sometimes(0.2, return_token_ids=lambda: True, return_tokens_as_token_ids=lambda: True)

    def _prompt(self) -> Any:
        rng = self._rng
        if rng.random() < 0.6:
            return "".join(rng.choice(TEXTS) for _ in range(rng.randint(1, 2)))
        return [rng.randrange(rng.choice([300, NUM_IDS])) for _ in range(rng.randint(1, 9))]

    def _completion(self, url: str) -> dict[str, Any]:
        rng = self._rng
        body = self._sometimes(0.5, logprobs=lambda: rng.randint(0, 4))
        body |= self._sometimes(0.1, detokenize=lambda: False)
        body |= self._sometimes(0.2, add_special_tokens=lambda: False)
        body |= self._sometimes(0.25, structured_outputs=lambda: rng.choice(CONSTRAINTS))
        if url == GENERATE:
            return body | {"prompts": [self._prompt() for _ in range(rng.randint(1, 3))]}
        prompts: list[Any] = [self._prompt()]
        if rng.random() < 0.2:
            same = [self._prompt() for _ in range(6)]
            prompts += [prompt for prompt in same if type(prompt) is type(prompts[0])]
        body["prompt"] = prompts if len(prompts) > 1 else prompts[0]
        body |= self._answer() | self._sometimes(0.5, echo=lambda: True)
        if "echo" in body and rng.random() < 0.1:
            body["max_tokens"] = body["min_tokens"] = 0
        return body

    def _chat(self) -> dict[str, Any]:
        rng = self._rng
        messages = [{"role": "user", "content": self._text()}]
        if rng.random() < 0.3:
            messages += [{"role": "assistant", "content": self._text()}, *messages]
        body: dict[str, Any] = {"messages": messages, **self._answer()}
        if rng.random() < 0.5:
            body |= {"logprobs": True, "top_logprobs": rng.randint(0, 4)}
        body |= self._sometimes(0.2, include_reasoning=lambda: False, return_prompt_text=lambda: True)
        if rng.random() < 0.5:
            named = {"type": "function", "function": {"name": rng.choice(TOOLS)["function"]["name"]}}
            body |= {"tools": TOOLS, "tool_choice": rng.choice(["auto", "required", named, "none"])}
            body |= self._sometimes(0.3, parallel_tool_calls=lambda: False)
        elif rng.random() < 0.4:
            body["response_format"] = rng.choice(
                [{"type": "json_object"}, {"type": "json_schema", "json_schema": {"schema": SCHEMA}}]
            )
        if rng.random() < 0.5:
            # Reasoning ends at once, so that an answer follows.
            prefilled = {"role": "assistant", "content": "<think>\n</think>" + rng.choice(["", "\n\n"])}
            body |= {"add_generation_prompt": False, "continue_final_message": True}
            body["messages"] = [*messages, prefilled]
            body["max_tokens"] = rng.randint(14, 50)
        return body

    def _text(self) -> str:
        return self._rng.choice(TEXTS)


def joined(url: str, parts: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the whole answer that the parts of a stream make."""
    if url == GENERATE:
        return {"results": _joined_results(parts)}
    whole: dict[str, Any] = {"choices": {}}
    for part in parts:
        for key, value in part.items():
            if key == "choices":
                for choice in value:
                    _join(whole["choices"].setdefault(choice["index"], {}), choice)
            elif value is not None:
                whole[key] = value
    whole["choices"] = [whole["choices"][i] for i in sorted(whole["choices"])]
    for choice in whole["choices"]:
        if "delta" in choice:
            choice["message"] = choice.pop("delta")
    return whole


def _joined_results(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    found: dict[tuple[int, int], dict[str, Any]] = {}
    for line in lines:
        result = found.setdefault((line["index"], line.get("sample", 0)), {})
        _join(result, {"generated_text" if name == "text" else name: value for name, value in line.items()})
    errors = {line["index"]: line for line in lines if "error" in line}
    assert len(errors) == sum("error" in line for line in lines), "an error is said once"
    # What came before an error is no part of the whole answer.
    found = {place: result for place, result in found.items() if place[0] not in errors}
    found |= {(index, 0): line for index, line in errors.items()}
    results = [found[place] for place in sorted(found)]
    # A line of deltas has those of the prompt once for all of its samples.
    of_prompts = {r["index"]: r["prompt_logprobs"] for r in results if "prompt_logprobs" in r}
    return [
        r | ({"prompt_logprobs": of_prompts[r["index"]]} if r["index"] in of_prompts else {}) for r in results
    ]


_ONCE = (
    "index",
    "sample",
    "prompt_logprobs",
    "prompt_token_ids",
    "prompt_text",
    "id",
    "type",
    "role",
    "error",
)


def _join(whole: dict[str, Any], new: dict[str, Any]) -> None:
    """Add the new values of a delta."""
    for key, value in new.items():
        if value is None:
            whole.setdefault(key, None)
        elif key in _ONCE or key in ("finish_reason", "stop_reason", "cumulative_logprob"):
            assert whole.get(key) is None or key not in _ONCE or whole[key] == value, key
            whole[key] = value
        elif key == "tool_calls":
            calls = whole.setdefault(key, [])
            for call in value:
                calls += [{}] * (call["index"] == len(calls))
                _join(calls[call["index"]], {name: v for name, v in call.items() if name != "index"})
        elif isinstance(value, dict):
            if whole.get(key) is None:
                whole[key] = {}
            _join(whole[key], value)
        else:  # text, or a list
            whole[key] = value if whole.get(key) is None else whole[key] + value


def comparable(answer: dict[str, Any]) -> dict[str, Any]:
    """Return an answer without what differs between two equal requests."""
    kept = {
        k: v for k, v in answer.items() if k in ("choices", "usage", "results") or k.startswith("prompt_")
    }
    kept = json.loads(json.dumps(kept))
    kept.get("usage", {}).pop("prompt_tokens_details", None)
    for choice in kept.get("choices", ()):
        if not any((choice.get("logprobs") or {}).values()):
            choice["logprobs"] = None
        if (message := choice.get("message")) is not None:
            message["content"] = message.get("content") or ""
            for call in message.get("tool_calls", ()):
                call["id"] = ""
        choice.setdefault("stop_reason", None)
    for result in kept.get("results", ()):
        if "error" in result:  # of the sample that failed first, which is another one in a stream
            result["error"] = True
        for name in ("seconds", "num_prompt_tokens", "num_tokens"):
            result.pop(name, None)
    return kept


def answers(served: Served, url: str, body: dict[str, Any]) -> tuple[Any, Any]:
    """Return the whole answer to a request, and what the parts of its stream make; or the error of each."""
    status, _, data = served.request("POST", url, body)
    whole = json.loads(data)
    if url == GENERATE:
        streamed_status, _, data = served.request("POST", url, {**body, "stream": "deltas"})
        parts = [json.loads(line) for line in data.splitlines()]
    else:
        options = {"stream": True, "stream_options": {"include_usage": True}}
        streamed_status, _, data = served.request("POST", url, {**body, **options})
        events = [event.removeprefix("data: ") for event in data.decode().split("\n\n") if event.strip()]
        parts = [json.loads(event) for event in events if event != "[DONE]"]
    if status != 200 or streamed_status != 200:
        return {"error": "error" in whole}, {"error": "error" in parts[-1]}
    return comparable(whole), comparable(joined(url, parts))


def check(served: Served, url: str, body: dict[str, Any]) -> bool:
    """Check that a stream equals the whole answer. Return whether it is an answer, not an error."""
    whole, streamed = answers(served, url, body)
    assert streamed == whole, f"{url} {json.dumps(body)}\nstreamed {streamed}\nwhole    {whole}"
    return "error" not in whole


def check_all(served: Served, num: int, seed: int) -> int:
    """Check random requests, several at a time. Return how many were answered."""
    requests = RandomRequests(seed)
    drawn = [requests.next() for _ in range(num)]
    with ThreadPoolExecutor(16) as pool:
        return sum(pool.map(lambda request: check(served, *request), drawn))


def main() -> None:
    """Check more requests than the tests do."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    with small_server() as served:
        print(
            f"{check_all(served, arguments.num, arguments.seed)} of {arguments.num} were answered, all equal"
        )


if __name__ == "__main__":
    main()
