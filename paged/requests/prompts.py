"""Prompts as users write them."""

from collections.abc import Mapping, Sequence
from typing import Any, NotRequired, TypedDict


class TextPrompt(TypedDict):
    """A prompt as text.

    cache_salt: only prompts of the same salt share cached blocks.
    add_special_tokens: False for text that contains them, such as a chat template's.
    """

    prompt: str
    cache_salt: NotRequired[str]
    add_special_tokens: NotRequired[bool]


class TokensPrompt(TypedDict):
    """A prompt as token ids."""

    prompt_token_ids: Sequence[int]
    cache_salt: NotRequired[str]


Prompt = str | Sequence[int] | TextPrompt | TokensPrompt | Mapping[str, Any]
