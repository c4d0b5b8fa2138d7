"""Find and read a LoRA adapter by the name that a request gives it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from ..architectures.config import ModelConfig
from ..architectures.gguf_paths import GGUF_KEY, is_gguf
from ..architectures.hf_config import check_file, from_hf, read_hf
from ..base.errors import CheckpointError, MissingModelError
from .lora_adapter import CONFIG, MAX_ADAPTER_BYTES, WEIGHTS, LoraAdapter, read_lora_adapter
from .model_directory import resolve

# Architectures of GGUF files that have weights multiplied by factors, and do not tell these.
_MULTIPLIED = ("falcon-h1",)
# How the decoder's names begin in a checkpoint that has other parts, too, in newer and older ones.
_IN_WHOLE = ("model.language_model.", "language_model.model.")


def with_names_of_transformers(config: ModelConfig, directory: Path) -> ModelConfig:
    """Return the config of a model in this directory with the names that adapters may give its tensors.

    These are the names of transformers' checkpoints. The decoder of a model with other parts has the names of
    the whole model, or its own ones, as an adapter may be trained with and without the other parts.
    """
    hf = read_hf(directory)
    names = config.tensor_names
    if GGUF_KEY in hf:
        names = from_hf(hf).tensor_names
        if hf[GGUF_KEY] in _MULTIPLIED:
            names = replace(names, factors=None)
    own = [("model.", "model.")] if any(start in _IN_WHOLE for start, _ in names.prefixes) else []
    prefixes = (*((start, "model.") for start in _IN_WHOLE), *names.prefixes, *own)
    return replace(config, tensor_names=replace(names, prefixes=prefixes))


def read_adapter(name: str, model: ModelConfig) -> LoraAdapter:
    """Read an adapter: a directory in PEFT's format, a GGUF file, or a hub id.

    model: the config of its model, with the names that tensors have in transformers' checkpoints.

    Raises CheckpointError, which names file and tensor or key.
    """
    try:
        path = _expanded(name)
        if path.is_dir():
            return read_lora_adapter(path, model)
        if not path.exists():
            return read_lora_adapter(Path(resolve(name)), model)
        if not is_gguf(name):
            raise CheckpointError(
                f"{name} is a file; give the directory that holds {CONFIG} and {WEIGHTS}, or a .gguf file"
            )
        from .gguf.adapter import read_gguf_adapter

        check_file(path, MAX_ADAPTER_BYTES)
        return read_gguf_adapter(path, model)
    except OSError as error:  # a name that is too long, or a file that went, or that others may not read
        raise MissingModelError(
            f"{error.filename or name} cannot be read: {error.strerror or error}"
        ) from error


def _expanded(name: str) -> Path:
    try:
        return Path(name).expanduser()
    except RuntimeError as error:  # of a user who is not there
        raise MissingModelError(f"{name} cannot be read: {error}") from error
