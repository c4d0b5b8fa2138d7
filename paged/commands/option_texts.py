"""Values of options from texts: of flags, of the environment, and of a file that quotes them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from ..base.errors import ConfigError, RequestError
from ..base.validation import shown

# Options that are objects in JSON, and examples.
IN_JSON = {
    "limit_mm_per_prompt": '{"image": 2}',
    "mm_processor_kwargs": '{"max_pixels": 500000}',
    "default_chat_template_kwargs": '{"enable_thinking": false}',
}
# Objects of numbers, which a=1,b=2 writes too.
SHARES = ("tenant_weights", "tenants")
# Options whose text is an object in JSON, so that a flag may give a part of it: --speculative-config.method.
OBJECTS = (*IN_JSON, *SHARES, "speculative_config", "chat_template_kwargs")
# The lists of texts that one text in JSON may write; a text of a request, or a key, may begin with a bracket.
_LISTS = ("lora_target_modules", "allowed_media_domains")
# Numbers of tokens, which vLLM's 32k and 1.5M write, too: k and m are decimal, K and M binary.
TOKEN_COUNTS = ("max_model_len", "max_num_batched_tokens")
_UNITS = {"k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}
# Options that a text turns off, such as weights_cache=off.
_MAY_BE_OFF = ("weights_cache",)
_TRUE = ("true", "1", "yes", "on")
_FALSE = ("false", "0", "no", "off")


def read_texts(name: str, kind: Any, where: str, texts: Sequence[str]) -> Any:
    """Return the value of an option that texts write: one, or several of an option of several values.

    kind: the type of the option, as by `option_type`. where: the option as the user wrote it, for messages.

    Raises ConfigError.
    """
    text = texts[0] if len(texts) == 1 else ""
    if name in SHARES and not text.startswith("{"):
        from ..simulate.workload import read_shares

        return read_shares(where, texts)
    if name in SHARES or name in IN_JSON:
        return _object(where, text, IN_JSON.get(name, "a=3,b=1 or " + '{"a": 3, "b": 1}'))
    if kind == list[int]:
        return _ints(where, texts)
    if kind == list[str]:
        return _list(where, text) if text.startswith("[") else [*texts]
    if name in _MAY_BE_OFF and text.lower() in _FALSE:
        return False
    if name in TOKEN_COUNTS and text[-1:] in _UNITS:
        return _tokens(where, text)
    return read_text(kind, where, text)


def stands_for_another(name: str, kind: Any) -> bool:
    """Return whether a text of an option stands for a value of another type."""
    return kind in (bool, int, float, list[int]) or name in (*IN_JSON, *SHARES, *_LISTS, *_MAY_BE_OFF)


def read_text(kind: Any, where: str, text: str) -> Any:
    """Return the switch, number or text that a text writes. Raises ConfigError."""
    if kind is bool:
        if text.lower() not in _TRUE + _FALSE:
            raise ConfigError(f"{where} must be true or false, got {shown(text)}")
        return text.lower() in _TRUE
    if kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            wanted = "an int" if kind is int else "a number"
            raise ConfigError(f"{where} must be {wanted}, got {shown(text)}") from None
    return text


def _object(where: str, text: str, example: str) -> Any:
    from ..base.strict_json import parse_json

    try:
        return parse_json(text)
    except RequestError as error:
        raise ConfigError(f"{where} must be an object such as {example}: {error}") from None


def _tokens(where: str, text: str) -> int:
    try:
        number = Fraction(text[:-1]) * _UNITS[text[-1]]
    except (ValueError, ZeroDivisionError):
        number = Fraction(1, 2)
    if number.denominator != 1:
        raise ConfigError(f"{where} must be an int, or a number of tokens such as 32k, got {shown(text)}")
    return int(number)


def _ints(where: str, texts: Sequence[str]) -> list[int]:
    parts = [part for text in texts for part in text.strip("[] ").split(",")]
    return [read_text(int, where, part.strip()) for part in parts]


def _list(where: str, text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where} must be texts, or a list of them in JSON: {error}") from None
