"""TokenizeCall and DetokenizeCall: bodies that only the tokenizer answers."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ...base.errors import RequestError
from ...base.fields import Field, FieldTable
from ...base.json_kinds import Text, TokenIds
from ...base.kinds import Boolean
from ..fields.common import ADD_SPECIAL_TOKENS, BASE_FIELDS, SEEING_FIELDS, TEMPLATE_FIELDS
from ..fields.messages import MESSAGES
from ..fields.tools import TOOLS
from ..limits import MAX_CONTEXTS, Limits
from .call import Call
from .conversation import Conversation

if TYPE_CHECKING:
    from ...engine.model_text import ModelText
    from ...text.tokenizer import Tokenizer

TOKENIZE_TABLE = FieldTable(
    "/tokenize",
    [
        Field("prompt", Text(), "the text to tokenize; either it or messages is given"),
        Field(MESSAGES.name, MESSAGES.kind, "a conversation, which is rendered and tokenized"),
        *SEEING_FIELDS,
        ADD_SPECIAL_TOKENS,
        Field("return_token_strs", Boolean(), "return the text of each token, too"),
        TOOLS,
        *TEMPLATE_FIELDS,
    ],
    one_of=("prompt", "messages"),
)
DETOKENIZE_TABLE = FieldTable(
    "/detokenize",
    [
        Field("tokens", TokenIds(), "the token ids whose text is returned", required=True),
        *BASE_FIELDS,
        Field("skip_special_tokens", Boolean(), "leave special tokens out of the text, by default false"),
    ],
)


class TextCall(Call):
    """A body that needs only the tokenizer and the chat template, not the engine."""

    is_queued = False

    @abstractmethod
    def answer(self, text: ModelText, max_model_len: int) -> dict[str, Any]:
        """Return the response body. May take long. Raises RequestError."""

    @property
    def renders(self) -> bool:
        """Whether computing the response may need the chat template."""
        return "messages" in self.values


class TokenizeCall(TextCall):
    """A body of /tokenize."""

    table = TOKENIZE_TABLE

    def __init__(self, body: Mapping[str, Any], limits: Limits) -> None:
        super().__init__(body, limits)
        values = self.values
        if "messages" not in values:
            for name in ("mm_processor_kwargs", TOOLS.name, *(field.name for field in TEMPLATE_FIELDS)):
                if name in values:
                    raise RequestError(f"{name} needs messages in place of prompt", param=name)
            return
        self.conversation = Conversation(values, limits)
        self.conversation.tools = values.get("tools")

    def answer(self, text: ModelText, max_model_len: int) -> dict[str, Any]:
        """Return the response body. May take long for a long text. Raises RequestError."""
        tokenizer = _tokenizer(text)
        if "prompt" in self.values:
            name = "prompt"
            prompt = {"add_special_tokens": True, **self.values}
        else:
            name = "messages"
            assert self.conversation is not None, "a body has a prompt or messages"
            with self.naming_field(name):
                prompt = self.conversation.prompt(text)
        tokens = tokens_of(self, text, name, prompt, max_model_len)
        strings = None
        if self.values.get("return_token_strs", False):
            strings = [tokenizer.token_text(token_id, first=i == 0) for i, token_id in enumerate(tokens)]
        return {
            "count": len(tokens),
            "max_model_len": max_model_len,
            "tokens": tokens,
            "token_strs": strings,
        }


class DetokenizeCall(TextCall):
    """A body of /detokenize."""

    table = DETOKENIZE_TABLE

    def answer(self, text: ModelText, max_model_len: int) -> dict[str, Any]:
        """Return the response body. May take long for many tokens. Raises RequestError."""
        tokenizer = _tokenizer(text)
        tokens = self.values["tokens"]
        _check_length("tokens", len(tokens), max_model_len)
        size = text.model_config.vocab_size
        if tokens and max(tokens) >= size:
            i = next(i for i, token_id in enumerate(tokens) if token_id >= size)
            raise RequestError(
                f"tokens[{i}] is {tokens[i]}; the vocabulary is 0 to {size - 1}", param="tokens"
            )
        skip = self.values.get("skip_special_tokens", False)
        return {"prompt": tokenizer.decode(tokens, skip_special_tokens=skip)}


def tokens_of(
    call: Call, text: ModelText, name: str, prompt: Mapping[str, Any], max_model_len: int
) -> list[int]:
    """Return the tokens of a prompt. Raises RequestError naming the field if there are far too many."""
    tokenizer = _tokenizer(text)
    most = MAX_CONTEXTS * max_model_len
    with call.naming_field(name):
        least = tokenizer.least_tokens(prompt["prompt"], most)
        _check_length(name, least, max_model_len, at_least="at least ")
        tokens = encoded(text, tokenizer, prompt)
        _check_length(name, len(tokens), max_model_len)
    return tokens


def encoded(text: ModelText, tokenizer: Tokenizer, prompt: Mapping[str, Any]) -> list[int]:
    """Return the tokens of a prompt that is text, with the tokens of its images. Raises RequestError."""
    special = {"add_special_tokens": prompt["add_special_tokens"]}
    if "multi_modal_data" in prompt and text.images is not None:
        images = text.images.given(prompt)
        return text.images.parse(prompt["prompt"], images, **special).token_ids
    return tokenizer.encode(prompt["prompt"], **special)


def _check_length(name: str, num_tokens: int, max_model_len: int, at_least: str = "") -> None:
    most = MAX_CONTEXTS * max_model_len
    if num_tokens > most:
        raise RequestError(
            f"{name} has {at_least}{num_tokens:,} tokens; {most:,} is the most, {MAX_CONTEXTS} times "
            f"max_model_len {max_model_len:,}",
            param=name,
        )


def _tokenizer(text: ModelText) -> Tokenizer:
    if text.tokenizer is None:
        raise RequestError("this needs the tokenizer, which skip_tokenizer_init left out")
    return text.tokenizer
