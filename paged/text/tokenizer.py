"""Tokenizer: text to token ids and back. A few tokens at a time, back is `detokenizer`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from ..errors import CheckpointError, RequestError
from ..model.hf_config import read_json
from .detokenizer import TokenBytes

# A text that may be too long is tokenised from its beginning, at first so many characters, then more.
FIRST_CHARACTERS, CHARACTERS_PER_TOKEN, GROWTH = 4096, 8, 4
# Where a text is cut, its tokens may be others: so many more than fit are wanted before it is refused.
SPARE_TOKENS, SPARE_SHARE = 256, 0.25


class Tokenizer:
    """The checkpoint's tokenizer, from transformers."""

    def __init__(self, directory: Path) -> None:
        from transformers import AutoTokenizer, PreTrainedConfig

        # Its thread pool deadlocks in forked children and gains nothing on single prompts.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        try:
            config = _config_for(directory, PreTrainedConfig)
            self.hf: Any = AutoTokenizer.from_pretrained(directory, config=config, trust_remote_code=False)
        except Exception as error:  # of any kind: the library looks at nothing before it uses it
            raise CheckpointError(
                f"{directory}: the tokenizer cannot be loaded ({error}); "
                "skip_tokenizer_init=True does without one"
            ) from error
        self.special_token_ids = frozenset(
            token_id for token_id, token in self.hf.added_tokens_decoder.items() if token.special
        )
        backend = getattr(self.hf, "backend_tokenizer", None)
        self.token_bytes = TokenBytes.of(backend)  # None: only `decode` knows what tokens make together
        self._is_local = _is_local(backend)
        # Its first call may change settings of its own. None after it does: threads may encode at once.
        self.hf("")
        self._token_texts: dict[int, str] = {}

    @property
    def chat_templates(self) -> dict[str, str]:
        """The checkpoint's chat templates by name; a single one is "default"."""
        templates = self.hf.chat_template
        return {"default": templates} if isinstance(templates, str) else dict(templates or {})

    @property
    def special_tokens(self) -> dict[str, str]:
        """What chat templates know as bos_token, eos_token and so on."""
        return dict(self.hf.special_tokens_map)

    def encode(self, text: str, *, add_special_tokens: bool = True, name: str = "the prompt") -> list[int]:
        """Token ids of a prompt, with the special tokens that the checkpoint puts in front, if wanted."""
        try:
            # Lists of ones as long as that of the ids would take three times as long.
            encoded = self.hf(
                text,
                add_special_tokens=add_special_tokens,
                return_attention_mask=False,
                return_token_type_ids=False,
                verbose=False,  # who is too long for the model is told so by an error
            )
            return list(encoded["input_ids"])
        except (UnicodeEncodeError, TypeError) as error:
            lone = next((i for i, c in enumerate(text) if "\ud800" <= c <= "\udfff"), None)
            if lone is None:
                raise
            raise RequestError(
                f"{name} is not valid Unicode text: character {lone} is the lone surrogate {text[lone]!r}"
            ) from error

    def least_tokens(self, text: str, most: int) -> int:
        """How many tokens a text has at least, as far as that must be known to see that they exceed `most`.

        0 where it may have fewer. What that takes is a matter of `most`, not of the text: tokenising ten
        megabytes only to refuse them holds up everybody. Raises RequestError like `encode`.
        """
        enough = most + int(most * SPARE_SHARE) + SPARE_TOKENS
        length = max(FIRST_CHARACTERS, CHARACTERS_PER_TOKEN * most)
        while self._is_local and GROWTH * length < len(text):
            num_tokens = len(self.encode(text[:length], add_special_tokens=False))
            if num_tokens > enough:
                return num_tokens - SPARE_TOKENS
            length *= GROWTH  # one whose blanks are dropped, perhaps
        return 0

    def encode_bare(self, text: str) -> list[int]:
        """Token ids of a piece of text, without special tokens around it."""
        return self.encode(text, add_special_tokens=False, name=repr(text))

    @cached_property
    def token_texts(self) -> list[str]:
        """What each token of the vocabulary adds to a text; a replacement for half characters."""
        # Behind another token: at the beginning of a text, some tokenizers take spaces away.
        before = self.encode_bare("a")
        start = len(self.decode(before))
        return [self.decode([*before, token])[start:] for token in range(len(self.hf))]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of these ids."""
        text = self.hf.decode(
            token_ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )
        return str(text)

    def token_text(self, token_id: int) -> str:
        """Text of one token alone, special or not."""
        text = self._token_texts.get(token_id)
        if text is None:
            text = self._token_texts[token_id] = self.decode([token_id], skip_special_tokens=False)
        return text


def _config_for(directory: Path, new_config: Any) -> Any:
    """All that AutoTokenizer asks of a model's config, or None, for it to find out itself.

    It would import the config's class, and with that torch's compiler, which is large and slow to load. The
    class itself matters only where no file names that of the tokenizer.
    """
    names = [directory / name for name in ("tokenizer_config.json", "config.json")]
    if not all(file.exists() for file in names):
        return None
    for_tokenizer, for_model = map(read_json, names)
    tokenizer_class = for_model.get("tokenizer_class")
    is_named = for_tokenizer.get("tokenizer_class") or tokenizer_class
    if not is_named or "auto_map" in for_tokenizer or "model_name" in for_model:
        return None
    config = new_config(tokenizer_class=tokenizer_class, name_or_path=str(directory))
    config.model_type = for_model.get("model_type")
    return config


def _is_local(backend: Any) -> bool:
    """Whether the tokens at the beginning of a text depend on nothing far behind it.

    A regular expression that takes text away may do so by what comes much later.
    """
    if backend is None:
        return False
    parts = (backend.normalizer, backend.pre_tokenizer)
    normalizer, splitter = (b"" if part is None else part.__getstate__() for part in parts)
    return b'"Regex"' not in normalizer and not (b'"Regex"' in splitter and b'"Removed"' in splitter)
