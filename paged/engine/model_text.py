"""ModelText: what turns the requests of a model into tokens, without the model itself."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..architectures.config import ModelConfig
from ..architectures.generation_config import (
    NO_DEFAULTS,
    chat_defaults,
    read_eos_token_ids,
    read_sampling_defaults,
)
from ..base.errors import RequestError, UsageError
from ..checkpoints.model_directory import resolve
from ..options.config import EngineConfig
from ..options.sampling_params import DEFAULT_MAX_TOKENS, SamplingParams
from ..text.prompt_parser import PromptParser
from ..text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from ..checkpoints.embedding_files import EmbeddingSettings
    from ..text.chat_template import ChatTemplates, Message
    from .embedding_head import EmbeddingHead

logger = logging.getLogger(__name__)

# With one of these a checkpoint says how it makes embeddings.
EMBEDDING_FILES = ("modules.json", "1_Pooling")
MOST_TOKENIZED = 4  # texts at once in threads


class ModelText:
    """The tokenizer, chat templates and sampling defaults of a checkpoint.

    It needs no torch, so a process without the model can prepare requests for an engine process.

    tokenizer: None with skip_tokenizer_init.
    has_embedding_files: whether the checkpoint has files that say how to make embeddings.
    sampling_defaults: the sampling parameters that the checkpoint sets.
    chat_defaults: further parameters that `paged chat` and the page use by default.
    eos_token_ids: the EOS ids within the vocabulary. Other ids, such as the -1 of models without EOS, can
        never be sampled.

    Raises CheckpointError for missing or wrong files.
    """

    def __init__(self, config: EngineConfig, directory: Path, model_config: ModelConfig) -> None:
        self.model_config = model_config
        self._directory = directory
        self.has_embedding_files = any((directory / name).exists() for name in EMBEDDING_FILES)
        if self.has_embedding_files:
            logger.info("embeddings: %s", self.embedding.describe())  # wrong files are refused now
        self.tokenizer = (
            None if config.skip_tokenizer_init else Tokenizer(_tokenizer_directory(config, directory))
        )
        self.sampling_defaults = _sampling_defaults(config.generation_config, directory)
        self.chat_defaults = chat_defaults(config.generation_config, self.sampling_defaults)
        vocabulary = range(model_config.vocab_size)
        self.eos_token_ids = frozenset(i for i in read_eos_token_ids(directory) if i in vocabulary)

    def new_parser(self, max_model_len: int) -> PromptParser:
        """Return a parser of prompts for contexts of up to max_model_len tokens."""
        return PromptParser(self.model_config, self.tokenizer, max_model_len)

    def get_tokenizer(self) -> Any:
        """Return the tokenizer of transformers. Raises UsageError if there is no tokenizer."""
        if self.tokenizer is None:
            raise UsageError("there is no tokenizer: the engine was made with skip_tokenizer_init=True")
        return self.tokenizer.hf

    def params_of(
        self, given: Mapping[str, Any], max_tokens: int | None = DEFAULT_MAX_TOKENS
    ) -> SamplingParams:
        """Return SamplingParams(**given), with the checkpoint's defaults for the other parameters.

        max_tokens: the default if generation_config.json has no max_new_tokens.
        """
        return SamplingParams(**{"max_tokens": max_tokens, **self.sampling_defaults, **given})

    @cached_property
    def default_params(self) -> SamplingParams:
        """The sampling parameters of requests that give none."""
        return self.params_of({})

    @cached_property
    def embedding(self) -> EmbeddingSettings:
        """How the checkpoint makes embeddings. Raises CheckpointError for wrong files."""
        from ..checkpoints.embedding_files import read_embedding_settings

        return read_embedding_settings(self._directory, self.model_config.hidden_size)

    @cached_property
    def embedding_head(self) -> EmbeddingHead | None:
        """The layers between a pooled vector and its embedding; None if there are none. Needs torch."""
        if not self.embedding.steps:
            return None
        from .embedding_head import EmbeddingHead

        return EmbeddingHead(self.embedding)

    @cached_property
    def rendering(self) -> ThreadPoolExecutor:
        """The threads that render conversations. They do nothing else, because a template may hang."""
        from ..text.chat_template import MOST_RENDERED

        return ThreadPoolExecutor(MOST_RENDERED, "paged-render")

    @cached_property
    def tokenizing(self) -> ThreadPoolExecutor:
        """The threads that tokenize long texts."""
        return ThreadPoolExecutor(MOST_TOKENIZED, "paged-tokenize")

    @cached_property
    def chat_templates(self) -> ChatTemplates:
        """The chat templates of the tokenizer. Raises RequestError without a tokenizer."""
        from ..text.chat_template import ChatTemplates

        if self.tokenizer is None:
            raise RequestError("a chat needs the tokenizer, which skip_tokenizer_init=True left out")
        return ChatTemplates(self.tokenizer.chat_templates, self.tokenizer.special_tokens)

    def render_chat(self, messages: Sequence[Message], **template: Any) -> dict[str, Any]:
        """Render a conversation to a prompt, with the arguments of `ChatTemplates.render`.

        If users or tools write the text of a special token, it stays plain text in the prompt.
        """
        if not is_conversation(messages):
            return {"prompt": self.chat_templates.render(messages, **template), "add_special_tokens": False}
        from ..text.marked_text import Placeholders

        messages = self._turns(messages, template)
        conversation = Placeholders(messages, self._markers)
        text = self.chat_templates.render(conversation.messages, **template)
        return {"prompt": conversation.restored(text), "add_special_tokens": False}

    def _turns(self, messages: Sequence[Message], template: Mapping[str, Any]) -> Sequence[Message]:
        """Return a conversation in the form that its template demands."""
        from ..chat.formats import formats_of
        from ..chat.turns import has_repeated_roles, merged, with_short_ids, with_single_calls

        name = template.get("chat_template")
        if any(message.get("tool_calls") for message in messages):
            formats = formats_of(self.chat_templates.source(name, has_tools=True))
            if formats and formats[0].has_channels:
                messages = with_single_calls(messages)
            elif formats and formats[0].id_length is not None:
                messages = with_short_ids(messages, formats[0].id_length)
        if has_repeated_roles(messages) and self.chat_templates.refuses_repeated_roles(name):
            return merged(messages)
        return messages

    @cached_property
    def _markers(self) -> re.Pattern[str]:
        """Finds the texts of special tokens, and of added tokens that a chat format reads."""
        from ..chat.formats import MARKERS
        from ..text.marked_text import pattern_of

        if self.tokenizer is None:
            return pattern_of(())
        return pattern_of(self.tokenizer.special_ids.keys() | (self.tokenizer.added_texts & MARKERS))


def is_conversation(messages: Any) -> bool:
    """Return whether `messages` looks like one conversation. The templates report what is wrong with it."""
    is_list = isinstance(messages, Sequence) and not isinstance(messages, str | bytes)
    return is_list and all(isinstance(message, Mapping) for message in messages)


def _tokenizer_directory(config: EngineConfig, directory: Path) -> Path:
    if config.tokenizer is not None:
        return resolve(config.tokenizer, config.tokenizer_revision)
    if config.tokenizer_revision in (None, config.revision):
        return directory
    return resolve(config.model, config.tokenizer_revision)


def _sampling_defaults(source: str, directory: Path) -> dict[str, Any]:
    """Return the parameters that generation_config.json sets. Logs them, as they change what is sampled."""
    if source in NO_DEFAULTS:
        return {}
    found = read_sampling_defaults(directory if source == "auto" else resolve(source))
    if found:
        values = ", ".join(f"{name}={value}" for name, value in found.items())
        logger.warning("sampling defaults from generation_config.json: %s", values)
    return found
