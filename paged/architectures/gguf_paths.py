"""GGUF files by their names, and the keys of a config.json that was made for one."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path

from ..base.errors import CheckpointError, MissingModelError

# The key of a config.json, made for a GGUF file, that has its general.architecture.
GGUF_KEY = "gguf_architecture"
# Those that have the bits of a weight, on average: of the layers, and of embedding and head.
BITS_KEYS = ("gguf_layer_bits", "gguf_table_bits")
# Tensors that are read with the config: factors of rotary embeddings.
ROPE_FACTORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
# The key that has the number of layers behind the last one, which predict further tokens and are skipped.
FURTHER_KEY = "gguf_further_layers"
# The key that has the reason why such a model has no tokenizer.
NO_TOKENIZER_KEY = "gguf_without_tokenizer"
# Of the tokens whose type the file gives wrongly.
OVERRIDDEN_KEY = "gguf_overridden_tokens"
# The key that has its pooling_type, of embeddings; and llama.cpp's numbers there, enum llama_pooling_type.
POOLING_KEY = "gguf_pooling_type"
GGUF_POOLINGS = {0: "none", 1: "mean", 2: "cls", 3: "last", 4: "rank"}
# A file that marks a directory whose files of weights have headers alone.
HEADERS_ALONE = "paged.headers_alone"
SUFFIX = ".gguf"  # in small letters or capitals
PART_NAME = re.compile(r"(.*)-(\d{5})-of-(\d{5})(\.gguf)", re.IGNORECASE | re.ASCII)
_MAX_PARTS = 1024


def is_gguf(name: str) -> bool:
    """Return whether a file has a name of GGUF files."""
    return name.lower().endswith(SUFFIX)


def gguf_files(directory: Path) -> list[str]:
    """Return the names of the GGUF files in a directory, sorted."""
    return sorted(name for name in os.listdir(directory) if is_gguf(name))


def models_of(names: Iterable[str]) -> list[str]:
    """Return the names of GGUF files that are models. A model in parts appears once, by its first part."""
    firsts = {PART_NAME.sub(r"\1-00001-of-\3\4", name) for name in names}
    return sorted(name for name in firsts if not re.search(r"mmproj|imatrix\.gguf$", name.lower()))


def listed(names: Iterable[str]) -> str:
    """List the models among some GGUF files, as the end of an error message."""
    models = models_of(names)
    more = f" and {len(models) - 20} more" if len(models) > 20 else ""
    return f"there are {', '.join(models[:20])}{more}"


def part_paths(path: Path, exists: Callable[[str], bool] = os.path.exists) -> list[Path]:
    """Return the paths of all parts of a model, given the path of one part. Raises CheckpointError."""
    match = PART_NAME.fullmatch(path.name)
    if match is None:
        return [path]
    count = int(match[3])
    if not 1 <= int(match[2]) <= count <= _MAX_PARTS:
        raise CheckpointError(f"{path}: is no part of 1 to {_MAX_PARTS} by its name")
    paths = [path.with_name(f"{match[1]}-{i:05}-of-{match[3]}{match[4]}") for i in range(1, count + 1)]
    if missing := [each for each in paths if not exists(str(each))]:
        more = f" and {len(missing) - 1} more parts" if len(missing) > 1 else ""
        raise MissingModelError(f"{missing[0]}{more} missing: the model is in {count} files")
    return paths
