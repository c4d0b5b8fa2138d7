"""ModelText: what turns the requests of a model into tokens, without the model itself."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..architectures.config import ModelConfig
from ..architectures.generation_config import (
    NO_DEFAULTS,
    SHAPES,
    chat_defaults,
    read_eos_token_ids,
    read_sampling_defaults,
)
from ..architectures.hf_config import read_config
from ..base.errors import RequestError, UsageError
from ..checkpoints.model_directory import resolve
from ..options.config import DEFAULT_IMAGES, EngineConfig
from ..options.sampling_params import DEFAULT_MAX_TOKENS, SamplingParams
from ..text.prompt_parser import PromptParser
from ..text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from ..checkpoints.embedding_files import EmbeddingSettings
    from ..text.chat_template import ChatTemplates, Message
    from ..text.images import ImagePrompts
    from .chat_renderer import ChatRenderer
    from .embedding_head import EmbeddingHead

logger = logging.getLogger(__name__)

# With one of these a checkpoint says how it makes embeddings.
EMBEDDING_FILES = ("modules.json", "1_Pooling")
MOST_TOKENIZED = 4  # texts at once in threads


def read_model(config: EngineConfig, directory: Path) -> tuple[ModelConfig, str]:
    """Read config.json and the vision part of a model. Return also the reason why it takes no images, or "".

    Raises CheckpointError and UnsupportedModelError.
    """
    model = read_config(directory)
    if not model.placeholders:
        return model, ""
    from ..images.reading import with_vision

    return with_vision(config, model, directory)


class ModelText:
    """The tokenizer, chat templates and sampling defaults of a checkpoint.

    It needs no torch, so that a process without the model can prepare requests for an engine process.

    no_images: the reason why the model takes no images, if it takes none.
    most_images: maximum number of images in a prompt.
    tokenizer: None with skip_tokenizer_init.
    has_embedding_files: whether the checkpoint has files of sentence-transformers.
    sampling_defaults: the sampling parameters that the checkpoint sets.
    chat_defaults: further parameters that `paged chat` and the page use by default.
    eos_token_ids: the EOS ids within the vocabulary. Other ids, such as the -1 of models without EOS, can
        never be sampled.

    Raises CheckpointError for missing or wrong files.
    """

    def __init__(
        self, config: EngineConfig, directory: Path, model_config: ModelConfig, no_images: str = ""
    ) -> None:
        self.config = config
        self.model_config = model_config
        self.no_images = no_images or "this model takes text alone"
        self.most_images = (config.limit_mm_per_prompt or {}).get("image", DEFAULT_IMAGES)
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
        return PromptParser(self.model_config, self.tokenizer, max_model_len, self.images, self.no_images)

    @cached_property
    def images(self) -> ImagePrompts | None:
        """The parser of the images in prompts; None if the model takes no images."""
        vision = self.model_config.vision
        if vision is None:
            return None
        from ..images.reading import request_reader
        from ..text.images import ImagePrompts

        config = self.config
        read = request_reader(config, self._directory)
        return ImagePrompts(vision, self.tokenizer, self.most_images, config.allowed_media_domains, read)

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

    def set_defaults(self, sampling: Mapping[str, Any]) -> None:
        """Set default parameters of requests. They take precedence over the checkpoint's defaults.

        Raises RequestError for parameters that contradict each other.
        """
        if sampling:
            self.sampling_defaults = {**self.sampling_defaults, **sampling}
            self.chat_defaults = self.chat_defaults if SHAPES.isdisjoint(sampling) else {}
            self.params_of({})

    @cached_property
    def default_params(self) -> SamplingParams:
        """The sampling parameters of requests that give none."""
        return self.params_of({})

    @cached_property
    def embedding(self) -> EmbeddingSettings:
        """The settings for embeddings in the checkpoint. Raises CheckpointError for wrong files."""
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
        """A pool of threads that only render conversations, because a template may hang."""
        from ..text.chat_template import MOST_RENDERED

        return ThreadPoolExecutor(MOST_RENDERED, "paged-render")

    @cached_property
    def tokenizing(self) -> ThreadPoolExecutor:
        """A pool of threads that tokenize long texts."""
        return ThreadPoolExecutor(MOST_TOKENIZED, "paged-tokenize")

    @cached_property
    def chat(self) -> ChatRenderer:
        """The renderer of conversations. Raises RequestError without a tokenizer."""
        from .chat_renderer import ChatRenderer

        if self.tokenizer is None:
            raise RequestError("a chat needs the tokenizer, which skip_tokenizer_init=True left out")
        return ChatRenderer(self.tokenizer)

    @property
    def chat_templates(self) -> ChatTemplates:
        """The chat templates of the tokenizer. Raises RequestError without a tokenizer."""
        return self.chat.templates

    def render_chat(
        self,
        messages: Sequence[Message],
        *,
        fetched: Mapping[str, bytes] | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
        **template: Any,
    ) -> dict[str, Any]:
        """Render a conversation to a prompt, with the arguments of `ChatTemplates.render`.

        fetched: the images at URLs; None: this call fetches them.
        mm_processor_kwargs: how its images are processed.

        The prompt has the images of its messages in "multi_modal_data".
        """
        if not mm_processor_kwargs and not _has_parts(messages):
            return self.chat.render(messages, **template)
        from .image_chats import ImageChats

        chats = ImageChats(self.chat, self.images, self.no_images)
        return chats.render(messages, fetched, mm_processor_kwargs, template)


def _has_parts(messages: Any) -> bool:
    """Return whether a conversation has a message whose content is a list, in which images may be."""
    from .chat_renderer import is_conversation

    return is_conversation(messages) and any(
        isinstance(message.get("content"), Sequence) and not isinstance(message["content"], str | bytes)
        for message in messages
    )


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
