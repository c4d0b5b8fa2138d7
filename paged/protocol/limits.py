"""Limits of request bodies, and what the operator of a server allows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..chat.chat_format import ChatFormat

MAX_N = 128  # samples of a prompt, also best_of
MAX_PROMPTS = 2048  # prompts of a request, or inputs of an embedding
MAX_CHOICES = 2048  # prompts times n
# Characters of the parameters, four for an entry of a list, times the prompts, each of which has them.
MAX_PARAMETER_SIZE = 2**24
MAX_CONTINUATIONS = 1024  # of a score
MAX_STOP_STRINGS = 64
MAX_LOGIT_BIASES = 16_384  # each is validated in Python; the vocabulary's size would take seconds
MAX_MESSAGES = 4096  # of a conversation
MAX_TOP_LOGPROBS = 20  # of a chat, as in OpenAI's API
MAX_NAME_LENGTH = 256  # characters of a model's name, a user or a salt
MAX_REQUEST_ID_LENGTH = 128
MAX_CONTEXTS = 4  # times max_model_len: tokens of a text to tokenize, or of tokens to detokenize


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What the operator of a server allows, and the defaults for chats.

    max_logprobs: maximum number of candidates that a request may ask for at each position; -1 sets no limit.
    cached_tokens: whether answers say how many prompt tokens were in the prefix cache. From this number, a
        client may learn what others sent.
    trust_chat_template: whether a body may contain a chat template, which is code.
    chat_template: the template for bodies without one; None takes the checkpoint's.
    chat_template_kwargs: variables for the template. A body may override them.
    chat_format: how the model writes tool calls and reasoning.
    ignore_builtin_tools: whether built-in tools of hosted APIs are left out instead of refused.
    system: the system prompt of conversations that have none.
    max_model_len: the length in tokens to which long conversations are cut; None if unknown.
    """

    max_logprobs: int = 20
    cached_tokens: bool = False
    trust_chat_template: bool = False
    chat_template: str | None = None
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    chat_format: ChatFormat = field(default_factory=ChatFormat)
    ignore_builtin_tools: bool = False
    system: str | None = None
    max_model_len: int | None = None
