"""Calls as a model of a format writes them, for conversations that a template does not render."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from .formats import CallSyntax


def written_call(syntax: CallSyntax, name: str, arguments: str) -> str:
    """Return the text of a call. Arguments that are not a JSON object are written unchanged."""
    try:
        value = json.loads(arguments)
    except ValueError:
        value = None
    if not isinstance(value, dict) or syntax.arguments == "json":
        return syntax.written(name, arguments)
    return syntax.written(name, written_arguments(syntax, value))


def written_arguments(syntax: CallSyntax, arguments: Mapping[str, Any]) -> str:
    """Return arguments in the notation that `syntax` names."""
    match syntax.arguments:
        case "tagged":
            before, between, after = syntax.parameter_texts
            return "".join(
                f"{before}{key}{between}{_plain(value)}{after}" for key, value in arguments.items()
            )
        case "python":
            return ", ".join(f"{key}={python_literal(value)}" for key, value in arguments.items())
        case "gemma":
            return gemma_literal(arguments, syntax.quote)
    return json.dumps(arguments, ensure_ascii=False)


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def python_literal(value: Any) -> str:
    """Return a JSON value as a Python literal, with JSON's quotes."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_plain_key(key)}: {python_literal(v)}" for key, v in value.items()) + "}"
    if isinstance(value, list):
        return f"[{', '.join(map(python_literal, value))}]"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)


def _plain_key(key: str) -> str:
    return json.dumps(key, ensure_ascii=False)


def gemma_literal(value: Any, quote: str) -> str:
    """Return a JSON value in Gemma's notation with braces."""
    if isinstance(value, Mapping):
        members = (f"{key}:{gemma_literal(v, quote)}" for key, v in value.items())
        return f"{{{','.join(members)}}}"
    if isinstance(value, list):
        return f"[{','.join(gemma_literal(v, quote) for v in value)}]"
    return f"{quote}{value}{quote}" if isinstance(value, str) else json.dumps(value)
