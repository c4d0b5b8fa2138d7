"""The sampling parameters of a batch's requests as columns of numbers, each request's written once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..device.transfers import Sent, Upload, arrived
from .seats import Sampled

if TYPE_CHECKING:
    from ..kernels.operations import Kernels

_FLOATS = ("temperature", "min_p", "top_n_sigma", "typical_p", "top_p")
WORDS = np.dtype([("seed", np.int64), *((name, np.float32) for name in _FLOATS), ("top_k", np.int32)])
_ROW = np.dtype([*WORDS.descr, ("has_edits", np.bool_), ("wants_logprobs", np.bool_)])
_FLOAT32 = torch.finfo(torch.float32)
# What keeps every token, for the filters of `sample_tokens`. top_k's is the size of the vocabulary.
_KEEPS_ALL = {"min_p": 0.0, "top_n_sigma": 0.0, "typical_p": 1.0, "top_p": 1.0}


def columns_of(requests: Sequence[Sampled], vocab_size: int) -> NDArray[Any]:
    """Return the requests' sampling parameters as a structured array, one row per request."""
    rows = [request.sampling.parameters or _write(request, vocab_size) for request in requests]
    return np.frombuffer(b"".join(rows), _ROW)


def used_filters(columns: NDArray[Any], vocab_size: int) -> list[str]:
    """Return the names of the filters that at least one row uses."""
    unused = _KEEPS_ALL | {"top_k": vocab_size}
    return [name for name, value in unused.items() if (columns[name] != value).any()]


class SentParameters:
    """The parameters of `sample_tokens` on the device, without filters that no row uses."""

    def __init__(self, columns: NDArray[Any], vocab_size: int, upload: Upload) -> None:
        self._seeds = upload.put(columns["seed"], torch.int64)
        self._temperature = upload.put(columns["temperature"], torch.float32)
        self._filters: dict[str, Sent | None] = {}
        self.filters = used = used_filters(columns, vocab_size)
        for name in (*_KEEPS_ALL, "top_k"):
            dtype = torch.int32 if name == "top_k" else torch.float32
            self._filters[name] = upload.put(columns[name], dtype) if name in used else None

    def sample(self, kernels: Kernels, logits: Tensor, positions: Tensor, highest: Tensor | None) -> Tensor:
        """Draw a token for each row; see `Kernels.sample_tokens`."""
        filters: dict[str, Any] = {name: arrived(sent) for name, sent in self._filters.items()}
        return kernels.sample_tokens(
            logits,
            self._seeds.tensor,
            positions,
            temperature=self._temperature.tensor,
            highest=highest,
            **filters,
        )


def _write(request: Sampled, vocab_size: int) -> bytes:
    """Write a request's row, and keep it for the next batches."""
    params = request.inputs.params
    row = np.zeros((), _ROW)
    row["seed"] = _signed(request.sampling.seed)
    row["has_edits"] = params.edits_beside_grammar
    row["wants_logprobs"] = request.inputs.wants_logprobs
    row["top_k"] = vocab_size
    for name, unused in _KEEPS_ALL.items():
        row[name] = unused
    if params.temperature > 0.0:  # else its filters must not exclude the likeliest token
        # Some allowed values are too large for float32, and some temperatures so small that they would be 0.
        for name in _FLOATS:
            row[name] = min(getattr(params, name), _FLOAT32.max)
        row["temperature"] = max(row["temperature"], _FLOAT32.tiny)
        if 0 < params.top_k < vocab_size:
            row["top_k"] = params.top_k
    written = request.sampling.parameters = row.tobytes()
    return written


def _signed(seed: int) -> int:
    """Return the int64 with the same 64 bits."""
    return (seed + 2**63) % 2**64 - 2**63
