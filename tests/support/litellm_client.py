"""litellm against a server, in the environment of `make clients`: prints what it gets as JSON.

Usage: litellm_client.py URL MODEL ARGUMENTS, where ARGUMENTS are those of the requests, as JSON.
"""

import json
import os
import sys

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # it would download the prices of models
import litellm

URL, MODEL, GIVEN = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])


def chat(provider: str, **more: object) -> object:
    """Ask for an answer. Providers differ in the fields that they send."""
    return litellm.completion(
        model=f"{provider}/{MODEL}", api_base=f"{URL}/v1", api_key="none", **{**GIVEN["chat"], **more}
    )


def main() -> None:
    found: dict[str, object] = {}
    for provider in ("openai", "hosted_vllm"):
        whole = chat(provider)
        found[f"{provider} text"] = whole.choices[0].message.content
        found[f"{provider} tokens"] = whole.usage.completion_tokens
        chunks = [*chat(provider, stream=True, stream_options={"include_usage": True})]
        texts = [c.choices[0].delta.content or "" for c in chunks if c.choices]
        found[f"{provider} streamed"] = "".join(texts)
        found[f"{provider} streamed tokens"] = litellm.stream_chunk_builder(chunks).usage.completion_tokens
        message = chat(provider, **GIVEN["tools"]).choices[0].message
        found[f"{provider} calls"] = [
            [call.function.name, json.loads(call.function.arguments)] for call in message.tool_calls
        ]
        chunks = [*chat(provider, stream=True, **GIVEN["tools"])]
        message = litellm.stream_chunk_builder(chunks).choices[0].message
        found[f"{provider} streamed calls"] = [
            [call.function.name, json.loads(call.function.arguments)] for call in message.tool_calls
        ]
    try:
        chat("openai", temperature=-1)
    except litellm.BadRequestError as error:
        found["error"] = str(error)
    vectors = litellm.embedding(
        model=f"openai/{MODEL}", input=["a", "b"], api_base=f"{URL}/v1", api_key="none"
    )
    found["vectors"] = len(vectors.data)
    print(json.dumps(found))


main()
