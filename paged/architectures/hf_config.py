"""Read config.json of a Hugging Face checkpoint: check it, add the defaults, reduce it to a ModelConfig.

transformers' own classes could check and complete it, but importing them imports torch's compiler, which is
slow to load. Their defaults are repeated here, and tests compare the two.
"""

from __future__ import annotations

import json
import re
import stat
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..base.errors import CheckpointError, MissingModelError, UnsupportedModelError
from ..base.validation import shown
from .config import ModelConfig
from .families.reading import Config, Family, activation_of
from .families.table import ARCHITECTURES, COMMON, Architecture, family_of
from .gguf_paths import BITS_KEYS, FURTHER_KEY, GGUF_KEY

if TYPE_CHECKING:
    from .families.multimodal import Multimodal
    from .schemes import Quantization

MAX_JSON_BYTES = 64 * 2**20
MAX_POINTER_BYTES = 1024
_POINTER = re.compile(rb"version \S*git-lfs\S*\s")
# Where config.json, or its text_config, says how weights are quantised.
QUANTIZATION_KEYS = ("quantization_config", "compression_config")
# The classes of transformers without a head, and those with one: sentence-transformers saves the former.
BASES = {
    name.replace("ForCausalLM", "TextModel" if known.model_type.endswith("_text") else "Model"): name
    for name, known in ARCHITECTURES.items()
    if name.endswith("ForCausalLM")
}
REQUIRED = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")


def check_file(file: Path, most: int) -> int:
    """Return the size of a regular file, or of the file that a link leads to. Raises CheckpointError.

    most: the largest allowed size in bytes.
    """
    try:
        status = file.stat()
    except OSError as error:
        raise MissingModelError(f"{file} cannot be read: {error.strerror}") from error
    if not stat.S_ISREG(status.st_mode):
        raise CheckpointError(f"{file}: is not a regular file")
    if status.st_size > most:
        raise CheckpointError(f"{file}: has {status.st_size:,} bytes; at most {most:,} are read")
    if status.st_size <= MAX_POINTER_BYTES and _POINTER.match(_beginning(file)):
        raise MissingModelError(f"{file}: is a pointer of Git LFS in place of the file; run `git lfs pull`")
    return status.st_size


def _beginning(file: Path) -> bytes:
    try:
        return file.read_bytes()[:MAX_POINTER_BYTES]
    except OSError as error:
        raise MissingModelError(f"{file} cannot be read: {error.strerror}") from error


def read_json(file: Path) -> dict[str, Any]:
    """Read the object in a JSON file of a checkpoint, of at most 64 MiB. Raises CheckpointError."""
    if not file.exists():
        from .missing_config import instead_of_config

        instead = instead_of_config(each.name for each in file.parent.glob("*"))
        raise MissingModelError(
            f"{file} does not exist; a model directory has config.json and *.safetensors{instead}"
        )
    value = _parsed(file)
    if not isinstance(value, dict):
        raise CheckpointError(f"{file}: must hold a JSON object")
    return value


def read_json_list(file: Path, most: int) -> list[Any]:
    """Read a JSON list of at most `most` entries from a file of a checkpoint. Raises CheckpointError."""
    value = _parsed(file)
    if not isinstance(value, list) or len(value) > most:
        raise CheckpointError(f"{file}: must hold a JSON list of at most {most} entries")
    return value


def _parsed(file: Path) -> Any:
    check_file(file, MAX_JSON_BYTES)
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise MissingModelError(f"{file} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file}: is not JSON: {error}") from error


def read_hf(directory: Path) -> dict[str, Any]:
    """Read config.json, with the quantisation settings that ModelOpt writes into a separate file."""
    hf = read_json(directory / "config.json")
    sidecar = directory / "hf_quant_config.json"
    if not sidecar.exists():
        return hf
    from .schemes import with_sidecar

    try:
        return with_sidecar(hf, read_json(sidecar))
    except CheckpointError as error:
        raise CheckpointError(f"{sidecar}: {error}") from None


def read_quantization(hf: Config) -> Quantization | None:
    """Return the quantisation in config.json; None if weights are not quantised. See `quantization_of`."""
    text = hf.get("text_config")
    configs = [hf, text] if isinstance(text, dict) else [hf]
    if not any(config.get(key) for config in configs for key in QUANTIZATION_KEYS):
        return None
    from .schemes import quantization_of

    return quantization_of(hf)


def read_config(directory: Path) -> ModelConfig:
    """Read and check config.json. Raises the errors of `from_hf`, with the name of the file."""
    file = directory / "config.json"
    hf = read_hf(directory)
    try:
        config = from_hf(hf)
        if quantization := read_quantization(hf):
            config = replace(config, layer_bits=quantization.layer_bits(config))
    except (UnsupportedModelError, CheckpointError) as error:
        raise type(error)(f"{file}: {error}") from None
    if GGUF_KEY not in hf:
        return config
    from .gguf_names import CONVERTED, with_gguf_names

    if hf[GGUF_KEY] not in [*CONVERTED]:  # a list, as any JSON value may come, hashable or not
        raise CheckpointError(f"{file}: {GGUF_KEY} is {shown(hf[GGUF_KEY])}; give the GGUF file itself")
    layer_bits, table_bits = (_bits(hf, key, file) for key in BITS_KEYS)
    config = replace(config, layer_bits=layer_bits, table_bits=table_bits)
    return with_gguf_names(config, hf[GGUF_KEY], hf.get(FURTHER_KEY, 0))


def _bits(hf: Config, key: str, file: Path) -> float | None:
    """Return the bits of a weight, on average; None: that config.json does not say."""
    value: float | None = hf.get(key)
    if value is not None and not (type(value) in (int, float) and 0 < value <= 64):
        raise CheckpointError(f"{file}: {key} must be a number from 0 to 64, got {shown(value)}")
    return value


def from_hf(hf: Config) -> ModelConfig:
    """Reduce the contents of config.json to a ModelConfig, with transformers' defaults.

    Raises UnsupportedModelError for what is not implemented, and CheckpointError for sizes that are missing
    and values that are out of range, of a wrong type, or contradict each other.
    """
    architecture = require_supported(hf)
    if architecture in BASES:
        return _without_head(hf, BASES[architecture])
    if architecture not in ARCHITECTURES:
        return _text_alone(hf, architecture)
    known = family_of(architecture)
    try:
        return _read(known, _with_own_names(hf, known))
    except (UnsupportedModelError, CheckpointError) as error:
        their = {ours: theirs for ours, theirs in known.keys.items() if theirs is not None}
        message = re.sub(r"\w+", lambda word: their.get(word[0], word[0]), str(error))
        raise type(error)(message) from None


def _without_head(hf: Config, architecture: str) -> ModelConfig:
    """Reduce the config.json of a model of embeddings, which was saved without its head."""
    config = from_hf({**hf, "architectures": [architecture]})
    return replace(config, tie_word_embeddings=True, has_head=config.tie_word_embeddings)


def _with_own_names(hf: Config, known: Family) -> Config:
    """Add transformers' defaults, and the values that the family has under other keys."""
    hf = {**COMMON, **known.defaults, **hf}
    return hf | {ours: theirs and hf.get(theirs, hf.get(ours)) for ours, theirs in known.keys.items()}


def _read(known: Family, hf: Config) -> ModelConfig:
    for name in REQUIRED:
        if hf.get(name) is None and known.keys.get(name, name) not in known.defaults:
            raise CheckpointError(f"{name} is missing")
    config = known.read(hf)
    # Gemma's files have both keys; its classes read the second, those of other families the first.
    key = "hidden_activation" if "hidden_activation" in known.defaults else "hidden_act"
    parts = [part for layer in config.layers for part in layer.feed_forwards[:1]]
    if parts and hf.get(key) is not None:  # Raises UnsupportedModelError unless it is that of the family
        activation_of(hf, key, tuple({part.activation for part in parts}))
    return config


def _text_alone(hf: Config, architecture: str) -> ModelConfig:
    """Reduce config.json of a multimodal model to its text part."""
    from .families.multimodal import (
        MULTIMODAL,
        names_around,
        placeholders_of,
        text_of,
        with_experts_in_columns,
    )

    known = MULTIMODAL[architecture]
    try:
        text = from_hf(text_of(known, hf))
    except (UnsupportedModelError, CheckpointError) as error:
        raise type(error)(f"text_config: {error}") from None
    if known.experts_in_columns:
        text = with_experts_in_columns(text)
    names = names_around(known.names, text.tensor_names)
    placeholders = placeholders_of(known, hf)
    return replace(text, architecture=architecture, tensor_names=names, placeholders=placeholders)


def require_supported(hf: Config) -> str:
    """Return the architecture named in config.json.

    Raises CheckpointError, or UnsupportedModelError for an unknown architecture, an unknown format of
    quantised weights, or a model whose tokens attend to later tokens.
    """
    names = hf.get("architectures")
    if not names:
        kind = f" (its model_type is {shown(hf['model_type'])})" if hf.get("model_type") else ""
        raise UnsupportedModelError(
            f"architectures is missing{kind}; `paged models --architectures` lists what it may name"
        )
    name = names[0] if isinstance(names, list) else names
    known = _known(name) if isinstance(name, str) else None
    if known is None:
        code = ", and the checkpoint's own code (auto_map) is never run" if hf.get("auto_map") else ""
        raise UnsupportedModelError(
            f"architecture {shown(name)} is not supported{code}; "
            "`paged models --architectures` lists those that are"
        )
    model_type = hf.get("model_type")
    if model_type != known.model_type:
        raise CheckpointError(f"{name} goes with model_type {known.model_type!r}, got {shown(model_type)}")
    read_quantization(hf)
    if hf.get("is_causal") not in (None, True):  # some that make embeddings, such as gte-Qwen2
        raise UnsupportedModelError(
            f"is_causal {shown(hf['is_causal'])} is not supported: each token attends to itself and earlier "
            "ones only"
        )
    return str(name)


def _known(name: str) -> Architecture | Multimodal | None:
    """Return the entry of an architecture; None if it is not supported."""
    name = BASES.get(name, name)
    if name in ARCHITECTURES:
        return ARCHITECTURES[name]
    from .families.multimodal import MULTIMODAL

    return MULTIMODAL.get(name)
