"""What a directory or a repository without config.json has instead, and what to do."""

from __future__ import annotations

from collections.abc import Iterable

from .gguf_paths import is_gguf

# In the files that Mistral, and Meta with Llama, publish beside Hugging Face's or in place of these.
ORIGINAL = "params.json"


def instead_of_config(names: Iterable[str]) -> str:
    """Return a sentence about the files of a model in another format; "" if there are none."""
    names = sorted(names)
    if "adapter_config.json" in names:
        return ". This one has a LoRA adapter: give the model that it is for, and the adapter as --lora"
    if gguf := [*filter(is_gguf, names)]:
        return f". This one has {gguf[0]}: give the path of the file"
    if ORIGINAL not in names:
        return ""
    author = "Mistral" if {"tekken.json", "consolidated.safetensors"} & {*names} else "its author"
    return (
        f". This one has {ORIGINAL}, which is {author}'s own format and is not read: take the same model in "
        "Hugging Face's format, whose files are config.json, tokenizer.json and model*.safetensors"
    )
