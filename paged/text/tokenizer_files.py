"""The files of a checkpoint's tokenizer: errors that name what is missing or damaged."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from ..errors import CheckpointError
from ..model.hf_config import read_json

FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")
# Files that hold a vocabulary. Without one, transformers makes a tokenizer that knows no text.
VOCABULARIES = ("tokenizer.*json", "*.model", "*.tiktoken", "vocab*", "merges.txt", "tekken*.json")
WAY_OUT = "give another tokenizer with tokenizer=, or do without one: skip_tokenizer_init=True"


def check_tokenizer(directory: Path) -> None:
    """Raise CheckpointError unless the directory has a vocabulary, and what it takes to read it."""
    if not any(file for pattern in VOCABULARIES for file in directory.glob(pattern)):
        found = [name for name in FILES if (directory / name).exists()]
        but = f", found only {found[0]}" if found else ""
        files = f"{', '.join(FILES[:-1])} and {FILES[-1]}"
        raise CheckpointError(f"{directory} has no tokenizer: looked for {files}{but}; {WAY_OUT}")
    file = directory / "tokenizer.model"
    is_alone = file.exists() and not (directory / "tokenizer.json").exists()
    if is_alone and not any(map(find_spec, ("sentencepiece", "tiktoken"))):
        raise CheckpointError(f"{file} takes a package to read: pip install sentencepiece; {WAY_OUT}")


def damaged_tokenizer(directory: Path, error: Exception) -> CheckpointError:
    """Return the error for a tokenizer that was not loaded: a line with the damaged file and the reason.

    error: that of transformers, which does not always name the file.
    """
    return CheckpointError(f"{_fault(directory, error)}; {WAY_OUT}")


def _fault(directory: Path, error: Exception) -> str:
    if isinstance(error, CheckpointError):  # of a file that is not JSON
        return str(error)
    file = directory / "tokenizer.json"
    if file.exists():
        from tokenizers import Tokenizer

        try:
            read_json(file)
            Tokenizer.from_file(str(file))
        except CheckpointError as damage:
            return str(damage)
        except Exception as damage:  # the library raises nothing narrower
            return f"{file} is damaged: {_first_line(damage)}"
    return f"{directory}: the tokenizer cannot be loaded: {_first_line(error)}"


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(" :.") if lines else type(error).__name__
