"""Every call of Ollama's official Python client, against a server. Needs the package `ollama` alone.

python tests/support/ollama_client.py http://127.0.0.1:11434 MODEL [BODIES.json]

Prints what each call gave as JSON. BODIES.json gets the bodies that the client sent.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import ollama


def weather(city: str) -> str:
    """Tell the weather.

    Args:
        city: The city.
    """
    return f"rain in {city}"


MESSAGES = [{"role": "user", "content": "def f(x):"}]
OPTIONS = {"num_predict": 8, "seed": 1, "temperature": 0.5, "top_k": 40, "top_p": 0.9, "mirostat": 0}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer", "maximum": 9}}, "required": ["a"]}
SENT: list[dict[str, Any]] = []


def record(request: Any) -> None:
    body = request.read()
    SENT.append(
        {"method": request.method, "path": request.url.path, "body": json.loads(body) if body else None}
    )


def calls(client: ollama.Client, model: str) -> dict[str, Any]:
    """Return the result of each call, or its error."""
    found: dict[str, Any] = {}

    def call(name: str, run: Any) -> None:
        try:
            result = run()
            if not hasattr(result, "model_dump"):
                result = [*result]
            found[name] = (
                [each.model_dump(mode="json") for each in result]
                if isinstance(result, list)
                else result.model_dump(mode="json")
            )
        except ollama.ResponseError as error:
            found[name] = {"status": error.status_code, "error": error.error}

    tool = {"role": "tool", "content": "rain", "tool_name": "weather"}
    asked = [
        *MESSAGES,
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"function": {"name": "weather", "arguments": {"city": "Rome"}}}],
        },
        tool,
    ]
    call("list", client.list)
    call("show", lambda: client.show(model))
    call("chat", lambda: client.chat(model, MESSAGES, options=OPTIONS))
    call("chat stream", lambda: client.chat(model, MESSAGES, options=OPTIONS, stream=True))
    call("chat schema", lambda: client.chat(model, MESSAGES, format=SCHEMA, options={"num_predict": 60}))
    call("chat json", lambda: client.chat(model, MESSAGES, format="json", options={"num_predict": 60}))
    call("chat tools", lambda: client.chat(model, MESSAGES, tools=[weather], options=OPTIONS))
    call("chat results", lambda: client.chat(model, asked, tools=[weather], options=OPTIONS))
    call("chat think", lambda: client.chat(model, MESSAGES, think=False, options=OPTIONS))
    call(
        "chat logprobs",
        lambda: client.chat(model, MESSAGES, logprobs=True, top_logprobs=2, options={"num_predict": 2}),
    )
    call("chat keep_alive", lambda: client.chat(model, MESSAGES, keep_alive="10m", options=OPTIONS))
    call("generate", lambda: client.generate(model, "def f(x):", options=OPTIONS, keep_alive=-1))
    call("generate stream", lambda: client.generate(model, "def f(x):", stream=True, options=OPTIONS))
    call("generate raw", lambda: client.generate(model, "def f(x):", raw=True, options=OPTIONS))
    call("generate system", lambda: client.generate(model, "x", system="Be brief.", options=OPTIONS))
    call("load", lambda: client.generate(model))
    call("ps", client.ps)
    call("embed", lambda: client.embed(model, ["a", "b"]))
    call("embed one", lambda: client.embed(model, "a", truncate=True))
    call("embeddings", lambda: client.embeddings(model, "a"))
    call("unload", lambda: client.generate(model, keep_alive=0))
    call("unknown", lambda: client.chat("none", MESSAGES))
    call("unknown stream", lambda: client.chat("none", MESSAGES, stream=True))
    call("copy", lambda: client.copy(model, "copied"))
    call("delete", lambda: client.delete("copied"))
    call("pull", lambda: client.pull("owner/tiny"))
    call("pull stream", lambda: client.pull("owner/tiny", stream=True))
    call("create", lambda: client.create("x", from_=model))
    call("push", lambda: client.push("x"))
    return found


async def asynchronous(url: str, model: str) -> dict[str, Any]:
    client = ollama.AsyncClient(url)
    whole = await client.chat(model, MESSAGES, options=OPTIONS)
    parts = [part async for part in await client.chat(model, MESSAGES, options=OPTIONS, stream=True)]
    return {"whole": whole.message.content, "joined": "".join(part.message.content or "" for part in parts)}


if __name__ == "__main__":
    url, model, *file = sys.argv[1:]
    found = calls(ollama.Client(url, event_hooks={"request": [record]}), model)
    found["async"] = asyncio.run(asynchronous(url, model))
    for name in file:
        Path(name).write_text(json.dumps(SENT, indent=1) + "\n")
    print(json.dumps(found))
