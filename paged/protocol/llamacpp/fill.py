"""Filling in the middle: the special tokens that the families of models mark prefix and suffix with."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple


class FillTokens(NamedTuple):
    """The special tokens of a family, as texts.

    middle: "" if the prefix comes last, and the answer goes on from it.
    file: of the name of another file before the text; "" if there is none.
    """

    prefix: str
    suffix: str
    middle: str
    file: str = ""


# https://github.com/ggml-org/llama.cpp/blob/master/src/llama-vocab.cpp, and the models' cards.
FILL_TOKENS = (
    FillTokens("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|file_sep|>"),  # Qwen Coder, CodeGemma
    FillTokens("<fim_prefix>", "<fim_suffix>", "<fim_middle>", "<file_sep>"),  # StarCoder 2
    FillTokens("<fim_prefix>", "<fim_suffix>", "<fim_middle>", "<filename>"),  # Granite Code
    FillTokens("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder
    FillTokens("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # Refact, SantaCoder
    FillTokens("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek Coder
    FillTokens("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),  # GLM-4
    FillTokens("▁<PRE>", "▁<SUF>", "▁<MID>"),  # CodeLlama
    FillTokens("<PRE>", "<SUF>", "<MID>"),
    FillTokens("[PREFIX]", "[SUFFIX]", ""),  # Codestral
)


def fill_tokens_of(special: Collection[str]) -> FillTokens | None:
    """Return the tokens of the first family whose tokens are all special here; None if there is none."""
    for each in FILL_TOKENS:
        if all(token in special for token in each if token):
            return each
    for each in FILL_TOKENS:  # without those of files
        if all(token in special for token in each[:3] if token):
            return each._replace(file="")
    return None
