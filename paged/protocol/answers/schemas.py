"""JSON schemas of response bodies."""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]
STRING, INTEGER, NUMBER, BOOLEAN = ({"type": name} for name in ("string", "integer", "number", "boolean"))
_TEXT_OR_NULL: Schema = {"type": ["string", "null"]}
_STOP_REASON: Schema = {"type": ["integer", "string", "null"]}
_INTEGERS: Schema = {"type": "array", "items": INTEGER}
_NUMBERS: Schema = {"type": "array", "items": NUMBER}


def _list(item: Schema) -> Schema:
    return {"type": "array", "items": item}


def _or_null(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


def _object(required: Schema, optional: Schema | None = None) -> Schema:
    return {"type": "object", "required": [*required], "properties": {**required, **(optional or {})}}


def _ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


_HEAD: Schema = {"id": STRING, "object": STRING, "created": INTEGER, "model": STRING}
_USAGE_OR_NULL = {"usage": _or_null(_ref("Usage"))}
_CANDIDATE = {"token": STRING, "logprob": NUMBER, "bytes": _or_null(_INTEGERS)}
_PLACES = _list(
    _or_null({"type": "object", "additionalProperties": _object({"logprob": NUMBER, "rank": INTEGER})})
)
_CHAT_LOGPROBS = _or_null(
    _object({"content": _list(_object({**_CANDIDATE, "top_logprobs": _list(_object(_CANDIDATE))}))})
)
_COMPLETION_LOGPROBS = _or_null(
    _object(
        {
            "tokens": _list(STRING),
            "token_logprobs": _list({"type": ["number", "null"]}),
            "top_logprobs": _list({"type": ["object", "null"], "additionalProperties": NUMBER}),
            "text_offset": _INTEGERS,
        }
    )
)
_FUNCTION = _object({"arguments": STRING}, {"name": STRING})
_CALLS = _list(_object({"function": _FUNCTION}, {"index": INTEGER, "id": STRING, "type": STRING}))
_REASONING: Schema = {"reasoning": STRING, "reasoning_content": STRING}
_MESSAGE = _object({"role": STRING, "content": _TEXT_OR_NULL}, {"tool_calls": _CALLS, **_REASONING})
_DELTA = _object({}, {"role": STRING, "content": _TEXT_OR_NULL, "tool_calls": _CALLS, **_REASONING})
_OF_PROMPT = {"prompt_logprobs": _PLACES, "prompt_token_ids": _INTEGERS}
_CHAT_CHOICE = {"index": INTEGER, "logprobs": _CHAT_LOGPROBS, "finish_reason": _TEXT_OR_NULL}
_CHAT_MORE = {"stop_reason": _STOP_REASON, "token_ids": _INTEGERS}
_CHAT_OF_PROMPT = {**_OF_PROMPT, "prompt_text": _TEXT_OR_NULL}
_COMPLETION_CHOICE = _object(
    {
        "index": INTEGER,
        "text": STRING,
        "logprobs": _COMPLETION_LOGPROBS,
        "finish_reason": _TEXT_OR_NULL,
        "stop_reason": _STOP_REASON,
    },
    {**_OF_PROMPT, "token_ids": _INTEGERS},
)
_PLAIN_CANDIDATE = _object({"token_id": INTEGER, "token": _TEXT_OR_NULL, "logprob": NUMBER, "rank": INTEGER})
_PLAIN_PLACES = _list(_or_null(_list(_PLAIN_CANDIDATE)))
_RESULT = _object(
    {"index": INTEGER},
    {
        "sample": INTEGER,
        "generated_text": STRING,
        "token_ids": _INTEGERS,
        "num_prompt_tokens": INTEGER,
        "num_tokens": INTEGER,
        "finish_reason": _TEXT_OR_NULL,
        "stop_reason": _STOP_REASON,
        "seconds": NUMBER,
        "logprobs": _PLAIN_PLACES,
        "prompt_logprobs": _PLAIN_PLACES,
        "cumulative_logprob": NUMBER,
        "error": {"type": "object"},
    },
)
# By name, as they are among the components of /openapi.json.
_MODEL = _object(
    {
        "id": STRING,
        "object": STRING,
        "created": INTEGER,
        "owned_by": STRING,
        "max_model_len": INTEGER,
        "chat_defaults": {"type": "object", "additionalProperties": {"type": "number"}},
        "sampling_defaults": {"type": "object", "additionalProperties": {"type": "number"}},
    },
    {"load_seconds": _or_null(NUMBER), "state": STRING},
)

RESPONSES: dict[str, Schema] = {
    "Error": _object(
        {"error": _object({"message": STRING, "type": STRING, "param": _TEXT_OR_NULL, "code": _TEXT_OR_NULL})}
    ),
    "OllamaError": _object({"error": STRING}),
    "Usage": _object(
        {"prompt_tokens": INTEGER, "completion_tokens": INTEGER, "total_tokens": INTEGER},
        {"prompt_tokens_details": _or_null(_object({"cached_tokens": INTEGER}))},
    ),
    "ChatCompletion": _object(
        {
            **_HEAD,
            "choices": _list(_object({**_CHAT_CHOICE, "message": _MESSAGE}, _CHAT_MORE)),
            "usage": _ref("Usage"),
        },
        _CHAT_OF_PROMPT,
    ),
    "ChatCompletionChunk": _object(
        {**_HEAD, "choices": _list(_object({**_CHAT_CHOICE, "delta": _DELTA}, _CHAT_MORE))},
        {**_USAGE_OR_NULL, **_CHAT_OF_PROMPT},
    ),
    "Completion": _object(
        {**_HEAD, "choices": _list(_COMPLETION_CHOICE)},
        _USAGE_OR_NULL,  # null in the chunks of a stream
    ),
    "Response": _object(
        {
            "id": STRING,
            "object": {"const": "response"},
            "created_at": INTEGER,
            "model": STRING,
            "status": STRING,
            "error": _or_null(_object({"code": STRING, "message": STRING})),
            "incomplete_details": _or_null(_object({"reason": STRING})),
            "output": _list(_object({"type": STRING, "id": STRING, "status": STRING})),
            "usage": _or_null(
                _object({"input_tokens": INTEGER, "output_tokens": INTEGER, "total_tokens": INTEGER})
            ),
        }
    ),
    "ResponseEvent": _object({"type": STRING, "sequence_number": INTEGER}),
    "Message": _object(
        {
            "id": STRING,
            "type": {"const": "message"},
            "role": STRING,
            "model": STRING,
            "content": _list(_object({"type": STRING})),
            "stop_reason": _TEXT_OR_NULL,
            "stop_sequence": _TEXT_OR_NULL,
            "usage": _object({"input_tokens": INTEGER, "output_tokens": INTEGER}),
        }
    ),
    "MessageEvent": _object({"type": STRING}),
    "MessageTokens": _object({"input_tokens": INTEGER}),
    "MessageError": _object(
        {"type": {"const": "error"}, "error": _object({"type": STRING, "message": STRING})},
        {"request_id": STRING},
    ),
    "Embeddings": _object(
        {
            **_HEAD,
            "data": _list(
                _object({"object": STRING, "index": INTEGER, "embedding": {"anyOf": [_NUMBERS, STRING]}})
            ),
            "usage": _object({"prompt_tokens": INTEGER, "total_tokens": INTEGER}),
        }
    ),
    "Scores": _object(
        {
            **_HEAD,
            "data": _list(
                _object(
                    {
                        "object": STRING,
                        "index": INTEGER,
                        "score": NUMBER,
                        "mean_logprob": NUMBER,
                        "token_ids": _INTEGERS,
                        "token_logprobs": _NUMBERS,
                        "is_greedy": BOOLEAN,
                    }
                )
            ),
            "usage": _object(
                {"prompt_tokens": INTEGER, "completion_tokens": INTEGER, "total_tokens": INTEGER}
            ),
        }
    ),
    "Tokens": _object(
        {
            "count": INTEGER,
            "max_model_len": INTEGER,
            "tokens": _INTEGERS,
            "token_strs": _or_null(_list(STRING)),
        }
    ),
    "Text": _object({"prompt": STRING}),
    "Results": _object(
        {
            "results": _list(_RESULT),
            "total_prompts": INTEGER,
            "total_time_seconds": NUMBER,
            "avg_time_per_prompt": NUMBER,
        }
    ),
    "Model": _MODEL,
    "Models": _object(
        {
            "object": STRING,
            "data": _list(_MODEL),
        }
    ),
    "Version": _object({"version": STRING}),
    "Any": {},
}
