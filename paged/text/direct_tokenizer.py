"""Tokenizers that tokenizer.json describes completely, read without transformers.

transformers takes a third of an engine's start to import. It adds nothing to a checkpoint whose
tokenizer_config.json names transformers' general class and has no token or setting beyond tokenizer.json.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from ..architectures.gguf_paths import GGUF_KEY
from ..architectures.hf_config import read_json
from .tokenizer_files import SPECIAL_TOKENS
from .tokenizer_source import GENERAL_CLASSES

# Types of model for which transformers takes no other class.
MODEL_TYPES = ("llama", "qwen3")
# The settings of tokenizer_config.json that do not change what a text's tokens are, and those read here.
KNOWN = {
    "added_tokens_decoder",
    "backend",
    "chat_template",
    "clean_up_tokenization_spaces",
    "is_local",
    "model_input_names",
    "model_max_length",
    "name_or_path",
    "padding_side",
    "tokenizer_class",
    *SPECIAL_TOKENS,
}
# Files that change tokens or templates in ways that are left to transformers.
OTHER_FILES = (
    "added_tokens.json",
    "special_tokens_map.json",
    "additional_chat_templates",
    "chat_template.json",
)


class DirectTokenizer:
    """What `Tokenizer` needs of a tokenizer of transformers, under the same names."""

    def __init__(self, backend: Tokenizer, special_tokens: dict[str, str], chat_template: str | None) -> None:
        self.backend_tokenizer = backend
        self.special_tokens_map = special_tokens
        self.chat_template = chat_template

    @classmethod
    def of(cls, directory: Path) -> DirectTokenizer | None:
        """Return the tokenizer of a directory, or None if transformers must read it.

        Raises CheckpointError for a file that is not JSON, and what the library raises for its own.
        """
        files = [directory / name for name in ("config.json", "tokenizer_config.json", "tokenizer.json")]
        if not all(file.exists() for file in files) or any(
            (directory / name).exists() for name in OTHER_FILES
        ):
            return None
        for_model, settings = map(read_json, files[:2])
        is_general = settings.get("tokenizer_class") in GENERAL_CLASSES
        is_known = for_model.get("model_type") in MODEL_TYPES or GGUF_KEY in for_model
        if not (is_general and is_known and settings.keys() <= KNOWN):
            return None
        if "model_name" in for_model:
            return None
        backend = Tokenizer.from_file(str(files[2]))
        if backend.padding is not None:  # it names a special token
            return None
        named = {name: settings[name] for name in SPECIAL_TOKENS if settings.get(name) is not None}
        template = directory / "chat_template.jinja"
        chat = template.read_text(encoding="utf-8") if template.exists() else settings.get("chat_template")
        if not (chat is None or isinstance(chat, str)) or not _agree(backend, named, settings):
            return None
        backend.no_truncation()
        return cls(backend, named, chat)

    @property
    def added_tokens_decoder(self) -> Mapping[int, Any]:
        """The added tokens by their ids."""
        added: Mapping[int, Any] = self.backend_tokenizer.get_added_tokens_decoder()
        return added

    def __len__(self) -> int:
        return int(self.backend_tokenizer.get_vocab_size(with_added_tokens=True))

    def __call__(self, text: str, *, add_special_tokens: bool = True, **_: Any) -> dict[str, list[int]]:
        """Encode a text; other options of transformers change what it returns besides the ids."""
        encoded = self.backend_tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return {"input_ids": encoded.ids}

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool, **_: Any) -> str:
        """Decode tokens."""
        return str(self.backend_tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens))


def _agree(backend: Tokenizer, named: Mapping[str, Any], settings: Mapping[str, Any]) -> bool:
    """Return whether tokenizer.json has the settings' tokens; transformers would add or change others."""
    added = backend.get_added_tokens_decoder()
    special = {token.content for token in added.values() if token.special}
    listed = settings.get("added_tokens_decoder", {})
    if not isinstance(listed, dict) or not all(isinstance(token, str) for token in named.values()):
        return False
    if not all(key.isdecimal() and token == _fields(added.get(int(key))) for key, token in listed.items()):
        return False
    if "added_tokens_decoder" in settings:
        special &= {token["content"] for token in listed.values()}
    return set(named.values()) <= special


def _fields(token: Any) -> dict[str, Any]:
    names = ("content", "lstrip", "normalized", "rstrip", "single_word", "special")
    return {name: getattr(token, name, None) for name in names}
