"""A random model whose tokenizer has the tags that chat models use for tool calls and reasoning."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import transformers
from transformers import Qwen3Config

from paged.architectures.config import DEMO
from tests.support.checkpoints import SHAPE, random_model

# As in Qwen's tokenizers, and as in those of Mistral and Llama.
TAGS = ("<tool_call>", "</tool_call>", "<think>", "</think>")
SPECIAL_TAGS = ("[TOOL_CALLS]", "[ARGS]", "<|python_tag|>")


def chat_checkpoint(directory: Path, template: str | None = None, **changed: Any) -> Path:
    """Write a checkpoint of Qwen3's shape with the demo's vocabulary and the tags. Return its directory.

    changed: values of its config.
    """
    tokenizer = transformers.AutoTokenizer.from_pretrained(DEMO)
    tokenizer.add_tokens([transformers.AddedToken(tag, normalized=False) for tag in TAGS])
    tokenizer.add_special_tokens({"additional_special_tokens": [*SPECIAL_TAGS]})
    if template is not None:
        tokenizer.chat_template = template
    shape = {**SHAPE, "vocab_size": len(tokenizer), "eos_token_id": 0, "tie_word_embeddings": True}
    config = Qwen3Config(**{**shape, **changed})
    random_model(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory
