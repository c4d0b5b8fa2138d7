"""Request bodies as coding assistants send them to /v1/chat/completions."""

from __future__ import annotations

from typing import Any

_SCHEMA = "http://json-schema.org/draft-07/schema#"


def _tool(name: str, description: str, properties: dict[str, Any], **more: Any) -> dict[str, Any]:
    parameters = {
        "type": "object",
        "properties": properties,
        "required": [*properties],
        "additionalProperties": False,
    }
    function = {"name": name, "description": description, "parameters": parameters | more.pop("extra", {})}
    return {"type": "function", "function": {**function, **more}}


def _call(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


_SHELL = _tool(
    "shell",
    "Run a shell command and return its output.",
    {
        "command": {"type": "array", "items": {"type": "string"}},
        "workdir": {"type": "string", "description": "The working directory"},
        "timeout": {"type": "number", "description": "Milliseconds"},
    },
    strict=False,
)
_READ = _tool(
    "read",
    "Read a file.\n\nUsage:\n- filePath must be absolute",
    {"filePath": {"type": "string"}, "limit": {"type": "number", "default": 2000}},
    extra={"$schema": _SCHEMA, "required": ["filePath"]},
)
_EDIT = _tool(
    "edit",
    "Replace a text in a file.",
    {"filePath": {"type": "string"}, "oldString": {"type": "string"}, "newString": {"type": "string"}},
    extra={"$schema": _SCHEMA},
)
_TODO = _tool(
    "todowrite",
    "Write the list of tasks.",
    {
        "todos": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {
                    "content": {"type": "string"},
                    "status": {"type": "string", "enum": ["pending", "in_progress", "completed"]},
                },
                "required": ["content", "status"],
            },
        }
    },
)

# One with a shell, in the form of the first agents in terminals: null contents, one call at a time.
SHELL_AGENT: dict[str, Any] = {
    "messages": [
        {"role": "developer", "content": "You are a coding agent in a terminal."},
        {"role": "user", "content": "<environment_context>cwd: /repo</environment_context>"},
        {"role": "user", "content": "Why does the test fail?"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [_call("call_a1", "shell", '{"command": ["ls"], "workdir": "/repo"}')],
        },
        {
            "role": "tool",
            "tool_call_id": "call_a1",
            "content": '{"output": "a.py\\nb.py\\n", "exit_code": 0}',
        },
    ],
    "tools": [_SHELL],
    "tool_choice": "auto",
    "parallel_tool_calls": False,
    "reasoning_effort": "medium",
    "store": False,
    "prompt_cache_key": "0190c9a5-7f3e",
    "stream": True,
}
# One with many tools, through a library for several providers: parallel calls, and metadata.
EDITOR_AGENT: dict[str, Any] = {
    "messages": [
        {"role": "system", "content": "You are an interactive assistant.\nBe concise."},
        {"role": "user", "content": [{"type": "text", "text": "Rename f to g."}]},
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": "Both files may use it.",
            "tool_calls": [
                _call("call_b1", "read", '{"filePath":"/repo/a.py"}'),
                _call("call_b2", "todowrite", '{"todos":[{"content":"rename","status":"pending"}]}'),
            ],
        },
        {"role": "tool", "tool_call_id": "call_b1", "content": "00001| def f(x):\n00002|     return x"},
        {"role": "tool", "tool_call_id": "call_b2", "content": [{"type": "text", "text": "ok"}]},
        {"role": "assistant", "content": "Now the edit."},
        {
            "role": "user",
            "content": [{"type": "text", "text": "Go on."}, {"type": "text", "text": "<a/>"}],
        },
    ],
    "tools": [_READ, _EDIT, _TODO],
    "tool_choice": "auto",
    "temperature": 0,
    "top_p": 1,
    "frequency_penalty": 0,
    "presence_penalty": 0,
    "metadata": {"sessionId": "s-1", "promptId": "p-1"},
    "user": "someone@example.com",
    "stream": True,
    "stream_options": {"include_usage": True},
}
# One that asks for edits as text, with the whole conversation in parts.
TEXT_AGENT: dict[str, Any] = {
    "messages": [
        {"role": "system", "content": "Act as an expert software developer. Answer with diffs."},
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "<task>\nAdd a docstring.\n</task>"},
                {"type": "text", "text": "<environment_details>\n# Open tabs\na.py\n</environment_details>"},
            ],
        },
        {"role": "assistant", "content": "<read_file>\n<path>a.py</path>\n</read_file>"},
        {"role": "user", "content": [{"type": "text", "text": "[read_file] Result:\ndef add(a, b):"}]},
    ],
    "temperature": 0,
    "stop": ["<<<<", ">>>>"],
    "n": 1,
    "service_tier": "auto",
    "stream": True,
    "stream_options": {"include_usage": True},
}
ASSISTANT_BODIES = {"shell": SHELL_AGENT, "editor": EDITOR_AGENT, "text": TEXT_AGENT}
