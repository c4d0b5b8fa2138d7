"""What a tokenizer of transformers is loaded from, and what it is tried with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

# Tokenized when a tokenizer is loaded, so that most of what fails on some texts fails there.
PROBE = (
    "The café, naïve — 日本語 한국어 🙂👩‍👩‍👧 \ue000\x00\x7f\u0301 don't 12345.67e+89\t\r\n\n  def f(x):"
    + " " * 99
    + "ﬁ½ﷺ x"
)

MOST_OF_TOKEN = 2**16  # bytes of one token's text
# Classes of transformers that take all from tokenizer.json.
GENERAL_CLASSES = ("TokenizersBackend", "PreTrainedTokenizerFast")


class Source(NamedTuple):
    """The files and settings from which transformers loads a tokenizer.

    directory: the directory of the tokenizer's files.
    tokenizer_class, model_type, model_name: the values in config.json.
    settings: the contents of tokenizer_config.json. named_class: its tokenizer_class.
    """

    directory: str
    tokenizer_class: str | None
    model_type: str | None
    model_name: str | None
    settings: Sequence[str]
    named_class: str | None


def is_panic(error: BaseException) -> bool:
    """Return whether an error is a panic of Rust code. (The class of panics cannot be imported.)"""
    return type(error).__module__ == "pyo3_runtime"
