"""Metadata: the checked values of a GGUF file's metadata. It notes which were read."""

from __future__ import annotations

import struct
from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...base.errors import CheckpointError, UnsupportedModelError
from ...base.validation import shown
from .gguf_file import Value

_REQUIRED: Any = object()
# Keys of a model that change nothing here.
_WITHOUT_EFFECT = (
    "vocab_size",  # that of the embedding's rows
    "tensor_data_layout",
    "rope.scaling.finetuned",
    "expert_used_count",  # of models that have experts
    "attention.layer_norm_epsilon",  # beside that of RMS norms
)


class Metadata:
    """Metadata values by key. Keys of the model are given without the architecture, as in "block_count"."""

    def __init__(self, path: Path, values: Mapping[str, Value]) -> None:
        self.path = path
        self.values = values
        self._read: set[str] = set()
        self.architecture = self.text("general.architecture")

    def _find(self, key: str, default: Any) -> Any:
        full = key if key.startswith(("general.", "tokenizer.")) else f"{self.architecture}.{key}"
        self._read.add(full)
        if full not in self.values:
            if default is _REQUIRED:
                raise CheckpointError(f"{self.path}: {full} is missing from the metadata")
            return default
        return self.values[full]

    def _wrong(self, key: str, kind: str, value: Any) -> CheckpointError:
        return CheckpointError(f"{self.path}: {key} must be {kind}, got {shown(value)}")

    def text(self, key: str, default: Any = _REQUIRED) -> Any:
        """Return a string, or the default if the key is absent."""
        value = self._find(key, default)
        if value is not default and not isinstance(value, str):
            raise self._wrong(key, "a string", value)
        return value

    def integer(self, key: str, default: Any = _REQUIRED) -> Any:
        """Return an integer. Raises UnsupportedModelError if the value differs by layer."""
        value = self._find(key, default)
        if value is default or type(value) is int:
            return value
        if isinstance(value, array) and value and value.count(value[0]) == len(value):
            return self.integer_of(key, value[0])
        if isinstance(value, array):
            raise UnsupportedModelError(f"{self.path}: {key} differs by layer, which is not supported")
        raise self._wrong(key, "a whole number", value)

    def integers(self, key: str, count: int) -> list[int]:
        """Return an integer for each of `count` layers. The file may have one integer for all."""
        value = self._find(key, _REQUIRED)
        if not isinstance(value, array):
            return [self.integer_of(key, value)] * count
        if len(value) != count:
            raise CheckpointError(f"{self.path}: {key} has {len(value)} values for {count} layers")
        return [self.integer_of(key, each) for each in value]

    def integer_of(self, key: str, value: Any) -> int:
        """Return the value as an int. Raises CheckpointError if it is not an integer."""
        if type(value) is not int:
            raise self._wrong(key, "a whole number", value)
        return value

    def number(self, key: str, default: Any = _REQUIRED) -> Any:
        """Return a number. A float32 becomes the shortest decimal that rounds to it."""
        value = self._find(key, default)
        if value is default:
            return value
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._wrong(key, "a number", value)
        return shortest(float(value))

    def flag(self, key: str, default: Any = _REQUIRED) -> Any:
        """Return True or False."""
        value = self._find(key, default)
        if value is not default and not isinstance(value, bool):
            raise self._wrong(key, "true or false", value)
        return value

    def strings(self, key: str, default: Any = _REQUIRED) -> Any:
        """Return a list of strings."""
        value = self._find(key, default)
        if value is default:
            return value
        if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
            raise self._wrong(key, "an array of strings", value)
        return value

    def numbers(self, key: str, letters: str, default: Any = _REQUIRED) -> Any:
        """Return an array of numbers.

        letters: the type codes of array.array that are allowed.
        """
        value = self._find(key, default)
        if value is default:
            return value
        if not isinstance(value, array) or value.typecode not in letters:
            kind = "an array of " + ("floats" if letters == "fd" else "integers")
            raise self._wrong(key, kind, value)
        return value

    def layers(self, key: str) -> Sequence[bool] | int | None:
        """Return a bool for each layer, or the interval of the False layers; None if the key is absent."""
        value = self._find(key, None)
        if value is None or type(value) is int:
            return value
        if isinstance(value, list) and all(isinstance(each, bool) for each in value):
            return value
        raise self._wrong(key, "a whole number, or true or false for each layer", value)

    def require_all_read(self) -> None:
        """Raise UnsupportedModelError for a key of the model that was not read but may have an effect."""
        prefix = f"{self.architecture}."
        known = self._read.union(prefix + key for key in _WITHOUT_EFFECT)
        for key, value in self.values.items():
            is_set = value if isinstance(value, int | float | str) else len(value)
            if key.startswith(prefix) and key not in known and is_set:
                raise UnsupportedModelError(f"{self.path}: {key} ({shown(value)}) is not supported")


def shortest(value: float) -> float:
    """Return the shortest decimal that rounds to the same float32 as `value`; `value` itself if none does."""
    for digits in range(1, 10):
        found = float(f"{value:.{digits}g}")
        if _float32(found) == value:
            return found
    return value


def _float32(value: float) -> float:
    try:
        rounded: float = struct.unpack("f", struct.pack("f", value))[0]
    except OverflowError:
        return value
    return rounded
