"""The fields of all request bodies: the page docs/api-fields.md, and a value of each that changes the call.

python -m tests.support.api_fields --write    # rewrite the page
"""

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from paged.base.fields import Effect, Field, FieldTable
from paged.base.strict_json import MAX_JSON_DEPTH
from paged.options.structural_tag import STRUCTURE_TABLE, TAG_FORMATS
from paged.protocol import limits
from paged.protocol.endpoints import ENDPOINTS
from paged.protocol.fields.common import (
    ANSWER_FIELDS,
    COMMON_FIELDS,
    STREAM_OPTIONS,
    TEMPLATE_FIELDS,
    UNSTORED_FIELDS,
)
from paged.protocol.fields.messages import CALL_TABLE, CALLED_TABLE, MESSAGE_TABLE
from paged.protocol.fields.sampling import (
    CHOICE_FIELDS,
    CONSTRAINTS,
    RESPONSE_FORMAT,
    SCHEMA_TABLE,
    TOKEN_FIELDS,
)
from paged.protocol.fields.tools import ALLOWED_TABLE, CHOICE_TABLES, FUNCTION_TABLE, TOOL_TABLE
from paged.protocol.messages import fields as message_fields
from paged.protocol.ollama import fields as ollama_fields
from paged.protocol.responses import fields as response_fields
from paged.text.prompt_parser import MAX_CONTINUED_TOKENS

PAGE = Path(__file__).parents[2] / "docs" / "api-fields.md"
CHAT, COMPLETIONS, EMBEDDINGS = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"
SCORE, GENERATE = "/v1/score", "/generate"
RESPONSES, MESSAGES, COUNT = "/v1/responses", "/v1/messages", "/v1/messages/count_tokens"
OLLAMA_CHAT, OLLAMA_GENERATE = "/api/chat", "/api/generate"
HELLO = [{"role": "user", "content": "def f(x):"}]
# A valid body of each endpoint.
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": HELLO},
    COMPLETIONS: {"prompt": "x"},
    RESPONSES: {"input": "x"},
    MESSAGES: {"messages": HELLO, "max_tokens": 9},
    COUNT: {"messages": HELLO},
    EMBEDDINGS: {"input": "x"},
    SCORE: {"prompt": "x", "continuations": ["y", "z"]},
    "/tokenize": {"prompt": "x"},
    "/v1/load_lora_adapter": {"lora_name": "sql", "lora_path": "adapters/sql"},
    "/v1/unload_lora_adapter": {"lora_name": "sql"},
    "/detokenize": {"tokens": [5]},
    "/completion": {"prompt": "x"},
    "/infill": {"input_prefix": "x"},
    "/apply-template": {"messages": HELLO},
    OLLAMA_CHAT: {"model": "m", "messages": HELLO},
    OLLAMA_GENERATE: {"model": "m", "prompt": "x"},
    "/api/embed": {"model": "m", "input": "x"},
    "/api/embeddings": {"model": "m", "prompt": "x"},
    "/api/show": {"model": "m"},
    "/api/pull": {"model": "owner/name"},
    "/api/copy": {"source": "m", "destination": "n"},
    GENERATE: {"prompts": ["x"]},
    "/generate/batch": {"prompts": ["x"]},
}
OF_OLLAMA = [url for url in BODIES if url.startswith("/api/") and "model" in BODIES[url]]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
RESPONSE_TOOLS = [{"type": "function", "name": "f", "parameters": {"type": "object"}}]
MESSAGE_TOOLS = [{"name": "f", "input_schema": {"type": "object"}}]
_SHORT = "{{ messages[0].content }}!"
# For each honoured field: a value that changes the call, and the fields beside which it does.
CHANGES: dict[str, tuple[Any, dict[str, Any]]] = {
    "model": ("m", {}),
    "user": ("u", {}),
    "request_id": ("r", {}),
    "keep_alive": ("5m", {}),
    "n": (2, {}),
    "best_of": (2, {}),
    "temperature": (0.5, {}),
    "top_p": (0.5, {}),
    "top_k": (5, {}),
    "min_p": (0.5, {}),
    "typical_p": (0.5, {}),
    "top_n_sigma": (1, {}),
    "seed": (1, {}),
    "presence_penalty": (1, {}),
    "frequency_penalty": (1, {}),
    "repetition_penalty": (2, {}),
    "repetition_penalty_last_n": (5, {}),
    "dry_multiplier": (1, {}),
    "dry_base": (2, {}),
    "dry_allowed_length": (3, {}),
    "dry_sequence_breakers": (["a"], {}),
    "dry_penalty_last_n": (5, {}),
    "logit_bias": ({"5": 1}, {}),
    "allowed_token_ids": ([5], {}),
    "bad_words": (["a"], {}),
    "min_tokens": (1, {}),
    "max_tokens": (5, {}),
    "max_completion_tokens": (5, {}),
    "stop": ("a", {}),
    "stop_token_ids": ([5], {}),
    "include_stop_str_in_output": (True, {}),
    "ignore_eos": (True, {}),
    "logprobs": (True, {}),
    "top_logprobs": (1, {"logprobs": True}),
    "prompt_logprobs": (1, {}),
    "detokenize": (False, {}),
    "skip_special_tokens": (False, {}),
    "spaces_between_special_tokens": (False, {}),
    "priority": (1, {}),
    "timeout_s": (1, {}),
    "cache_salt": ("s", {}),
    "structured_outputs": ({"regex": "a"}, {}),
    "num_speculative_tokens": (2, {}),
    "response_format": ({"type": "json_object"}, {}),
    "stream": (True, {}),
    "stream_options": ({"include_usage": True}, {"stream": True}),
    "return_token_ids": (True, {}),
    "return_tokens_as_token_ids": (True, {"logprobs": True}),
    "return_prompt_text": (True, {}),
    "echo": (True, {}),
    "reasoning_effort": ("low", {"chat_template": "{{ reasoning_effort }}"}),
    "documents": ([{"text": "a"}], {"chat_template": "{{ documents }}"}),
    "chat_template": ("{{ messages }}", {}),
    "mm_processor_kwargs": ({"max_pixels": 9}, {}),
    "chat_template_kwargs": ({"a": 1}, {"chat_template": "{{ a }}"}),
    "add_generation_prompt": (False, {}),
    "continue_final_message": (True, {"add_generation_prompt": False, "chat_template": _SHORT}),
    "add_special_tokens": (False, {}),
    "messages": ([{"role": "user", "content": "y"}], {}),
    "tools": (TOOLS, {"chat_template": "{{ tools }}"}),
    "tool_choice": ("required", {"tools": TOOLS}),
    "parallel_tool_calls": (False, {"tools": TOOLS}),
    "include_reasoning": (False, {}),
    "prompt": ("y", {}),
    "prompts": (["y"], {}),
    "input": ("y", {}),
    "continuations": (["y"], {}),
    "tokens": ([6], {}),
    "encoding_format": ("base64", {}),
    "dimensions": (3, {}),
    "pooling": ("mean", {}),
    "normalize": (False, {}),
    "use_activation": (False, {}),
    "prompt_name": ("query", {}),
    "return_token_strs": (True, {}),
    "instructions": ("Be brief.", {}),
    "max_output_tokens": (5, {}),
    "include": (["message.output_text.logprobs"], {}),
    "text": ({"format": {"type": "json_object"}}, {}),
    "reasoning": ({"effort": "low"}, {}),
    "metadata": ({"a": "b"}, {}),
    "store": (False, {}),
    "previous_response_id": ("resp_1", {}),
    "truncation": ("auto", {}),
    "system": ("Be brief.", {}),
    "stop_sequences": (["a"], {}),
    "thinking": ({"type": "disabled"}, {}),
    "output_config": ({"effort": "low"}, {}),
    "options": ({"num_predict": 5}, {}),
    "format": ("json", {}),
    "think": (False, {}),
    "images": (["AAAA"], {}),
    "raw": (True, {}),
    "n_predict": (5, {}),
    "n_indent": (4, {}),
    "t_max_predict_ms": (500, {}),
    "repeat_penalty": (1.5, {}),
    "repeat_last_n": (0, {"repeat_penalty": 1.5}),
    "grammar": ('root ::= "a"', {}),
    "json_schema": ({"type": "object"}, {}),
    "n_probs": (2, {}),
    "input_prefix": ("y", {}),
    "input_suffix": ("y", {}),
    "input_extra": ([{"text": "y"}], {}),
    "name": ("n", {}),
    "truncate": (False, {}),
    "source": ("n", {}),
    "lora_name": ("chat", {}),
    "lora_path": ("adapters/chat", {}),
    "load_inplace": (True, {}),
    "lora_int_id": (3, {}),
    "destination": ("o", {}),
}
# The same where a body has another form of the field.
OWN_CHANGES: dict[tuple[str, str], tuple[Any, dict[str, Any]]] = {
    (COMPLETIONS, "logprobs"): (1, {}),
    (COMPLETIONS, "return_tokens_as_token_ids"): (True, {"logprobs": 1}),
    (GENERATE, "logprobs"): (1, {}),
    (CHAT, "add_special_tokens"): (True, {}),
    ("/detokenize", "skip_special_tokens"): (True, {}),
    (RESPONSES, "tools"): (RESPONSE_TOOLS, {}),
    (RESPONSES, "tool_choice"): ("required", {"tools": RESPONSE_TOOLS}),
    (RESPONSES, "parallel_tool_calls"): (False, {"tools": RESPONSE_TOOLS}),
    (RESPONSES, "stream_options"): ({"include_obfuscation": True}, {"stream": True}),
    **{(url, "tools"): (MESSAGE_TOOLS, {}) for url in (MESSAGES, COUNT)},
    **{(url, "tool_choice"): ({"type": "none"}, {"tools": MESSAGE_TOOLS}) for url in (MESSAGES, COUNT)},
    (MESSAGES, "metadata"): ({"user_id": "u"}, {}),
    **{(url, "stream"): (False, {}) for url in (OLLAMA_CHAT, OLLAMA_GENERATE, "/api/pull")},
    **{(url, "model"): ("n", {}) for url in OF_OLLAMA},
    ("/api/embed", "truncate"): (False, {"input": "x" * 3000}),
}
# Other bodies that are valid, for fields that those in BODIES do not take.
OTHER_BODIES: dict[str, dict[str, Any]] = {GENERATE: {"prompt": "x"}, "/tokenize": {"messages": HELLO}}


def honours(table: FieldTable, name: str) -> bool:
    """Return whether a table has an honoured field of this name."""
    return any(field.name == name for field in table.with_effect(Effect.HONOURED))


def changes() -> Iterator[tuple[str, str, dict[str, Any], dict[str, Any]]]:
    """Yield for each honoured field the URL, its name, and a body without it and with it."""
    for url, call in ENDPOINTS.items():
        same = GENERATE if url.startswith(GENERATE) else url
        for field in call.table.fields:
            if field.effect is not Effect.HONOURED:
                continue
            name = field.name
            value, others = OWN_CHANGES.get((same, name), CHANGES[name])
            body = BODIES[url]
            if same == GENERATE and name == "prompt":
                body = OTHER_BODIES[same]
            elif url == "/tokenize" and name not in ("prompt", "add_special_tokens"):
                body = OTHER_BODIES[url]
            others = {given: v for given, v in others.items() if honours(call.table, given)}
            yield url, name, {**body, **others}, {**body, **others, name: value}


# The fields that several bodies share, and where the page says so.
GROUPS: dict[str, Sequence[Field]] = {
    "In every body": COMMON_FIELDS,
    "In the bodies whose answers are not stored": UNSTORED_FIELDS,
    "In the bodies that generate": TOKEN_FIELDS,
    "In the bodies with choices or results": CHOICE_FIELDS,
    "In the bodies with choices": ANSWER_FIELDS,
    "In the bodies of chats": TEMPLATE_FIELDS,
}
# The objects within bodies that have a table, by the title of their section.
NESTED: dict[str, FieldTable] = {
    "A message": MESSAGE_TABLE,
    "An entry of a message's `tool_calls`": CALL_TABLE,
    "`function` of a call": CALLED_TABLE,
    "`stream_options`": STREAM_OPTIONS,
    "`structured_outputs`": CONSTRAINTS,
    "`response_format.json_schema`": SCHEMA_TABLE,
    "`response_format` of type structural_tag": RESPONSE_FORMAT.tables["structural_tag"],
    "An entry of `structures`": STRUCTURE_TABLE,
    "An entry of `tools`": TOOL_TABLE,
    "`function` of a tool": FUNCTION_TABLE,
    "`tool_choice` of type function": CHOICE_TABLES["function"],
    "`tool_choice` of type allowed_tools": CHOICE_TABLES["allowed_tools"],
    "`tool_choice.allowed_tools`": ALLOWED_TABLE,
    **{f"An item of type {kind} (/v1/responses)": table for kind, table in response_fields.ITEMS.items()},
    "An entry of `tools` (/v1/responses)": response_fields.FUNCTION_TOOL,
    "`text` (/v1/responses)": response_fields.TEXT_TABLE,
    "`text.format` of type json_schema (/v1/responses)": response_fields.TEXT_FORMATS["json_schema"],
    "`reasoning` (/v1/responses)": response_fields.REASONING_TABLE,
    "`stream_options` (/v1/responses)": response_fields.STREAM_TABLE,
    **{
        f"A block of type {kind} (/v1/messages)": table
        for kind, table in (message_fields.USER_BLOCKS | message_fields.ASSISTANT_BLOCKS).items()
    },
    "A block of type tool_reference (/v1/messages)": message_fields.REFERENCE_BLOCK,
    "An entry of `tools` (/v1/messages)": message_fields.CUSTOM_TOOL,
    "`tool_choice` of type tool (/v1/messages)": message_fields.TOOL_CHOICES["tool"],
    "`thinking` of type enabled (/v1/messages)": message_fields.THINKING_KINDS["enabled"],
    "`output_config` (/v1/messages)": message_fields.OUTPUT_TABLE,
    "`options` (/api/chat and /api/generate)": ollama_fields.OPTIONS,
    "A message (/api/chat)": ollama_fields.MESSAGE,
}
_INTRO = f"""# Fields of request bodies

This page is written by `python -m tests.support.api_fields --write`, from the tables that parse the bodies.

A field in a table below is honoured. A field under "No effect" is accepted and listed in the header
`x-paged-ignored`. A field under "Refused" gets status 400 with the reason. For an unknown field, the error
names the nearest valid name. `null` means that a field is not given. Errors name the field in `param`.

| limit | |
|---|---|
| samples of a prompt (`n`, `best_of`) | {limits.MAX_N} |
| prompts, or inputs to embed | {limits.MAX_PROMPTS:,} |
| prompts times `n` or `best_of` | {limits.MAX_CHOICES:,} |
| characters of the parameters, with four for each entry of a list, times the prompts of a body with several \
| {limits.MAX_PARAMETER_SIZE:,} |
| tokens of a prompt times its continuations to score | {MAX_CONTINUED_TOKENS:,} |
| stop strings | {limits.MAX_STOP_STRINGS} |
| entries of `logit_bias` | {limits.MAX_LOGIT_BIASES:,} |
| messages | {limits.MAX_MESSAGES:,} |
| continuations to score | {limits.MAX_CONTINUATIONS:,} |
| `top_logprobs` | {limits.MAX_TOP_LOGPROBS} |
| candidates at each position (`logprobs`, `prompt_logprobs`) | `--max-logprobs`, by default \
{limits.Limits().max_logprobs} |
| tokens of a text at `/tokenize`, and of `tokens` at `/detokenize` \
| {limits.MAX_CONTEXTS} × `max_model_len` |
| depth of objects and arrays | {MAX_JSON_DEPTH} |
| characters of a name, a user or a salt | {limits.MAX_NAME_LENGTH} |
| characters of `request_id` | {limits.MAX_REQUEST_ID_LENGTH} |
"""


def page() -> str:
    """Return the page."""
    parts = [_INTRO]
    for title, fields in GROUPS.items():
        parts.append(f"\n## {title}\n\n{''.join(_rows(fields))}")
    for url, call in ENDPOINTS.items():
        if url == "/generate/batch":  # the same as /generate
            continue
        names = {field.name for field in call.table.fields}
        shared = [title for title, group in GROUPS.items() if names >= {field.name for field in group}]
        known = [field for title in shared for field in GROUPS[title]]
        own = [field for field in call.table.fields if field not in known]
        title = "/generate and /generate/batch" if url == GENERATE else url
        also = ", ".join(f'"{title}"' for title in shared)
        also = f"This body also takes the fields in the sections {also}.\n\n" if shared else ""
        parts.append(f"\n## {title}\n\n{also}{''.join(_rows(own))}")
    for title, table in NESTED.items():
        parts.append(f"\n## {title}\n\n{''.join(_rows(table.fields))}")
    parts.append(f"\n## A format of a structural tag\n\n{''.join(_format_rows())}")
    return "".join(parts)


def _format_rows() -> Iterator[str]:
    yield "`type` says which; the fields marked `*` must be given.\n\n"
    yield "| type | what it matches | field | value | meaning |\n|---|---|---|---|---|\n"
    for name, table in TAG_FORMATS.items():
        kind, *own = table.with_effect(Effect.HONOURED)
        first = f"| `{name}` | {kind.meaning} |"
        for field in own:
            star = "*" if field.required else ""
            yield f"{first} `{field.name}`{star} | {field.kind} | {field.meaning} |\n"
            first = "| | |"
        if not own:
            yield f"{first} | | |\n"


def _rows(fields: Sequence[Field]) -> Iterator[str]:
    """Yield the table of the honoured fields, then lines of those without effect and of refused ones."""
    honoured = [field for field in fields if field.effect is Effect.HONOURED]
    if honoured:
        yield "| field | value | meaning |\n|---|---|---|\n"
    for field in honoured:
        name = f"`{field.name}`" + (" (required)" if field.required else "")
        yield f"| {name} | {_escaped(str(field.kind))} | {_escaped(field.meaning)} |\n"
    for effect, title in ((Effect.IGNORED, "No effect"), (Effect.REFUSED, "Refused")):
        named = dict[str, list[str]]()
        for field in fields:
            if field.effect is effect:
                named.setdefault(field.meaning, []).append(f"`{field.name}`")
        if named:
            yield f"\n{title}:\n\n"
        for meaning, names in named.items():
            yield f"- {', '.join(names)}: {meaning}\n"


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


def main() -> None:
    """Rewrite the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", required=True)
    parser.parse_args()
    PAGE.write_text(page())


if __name__ == "__main__":
    main()
