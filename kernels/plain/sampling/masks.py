"""Masks of allowed tokens, a bit each."""

from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from ...checked import checked


@checked
def mask_logits(
    logits: Tensor,  # f32[n, vocab_size], written in place
    rows: Tensor,  # i64[m]
    allowed: Tensor,  # i32[m, num_words]
) -> None:
    """Set the logits of tokens that are not allowed to -inf; see `reference.mask_logits`."""
    size = logits.shape[1]
    table = _byte_table(logits.device)
    if logits.is_cpu:
        # On this thread alone: beside other work, torch's threads wait 100 ms for each other.
        values = logits.numpy()
        biases = table.numpy()
        for row, own in zip(rows.tolist(), allowed.numpy().view(np.uint8), strict=True):
            values[row] += biases[own].reshape(-1)[:size]
        return
    # [m, bytes, 8] -> [m, vocab_size]; a table of bytes is far faster than shifts.
    bias = torch.nn.functional.embedding(allowed.view(torch.uint8).int(), table)
    # Add rather than fill, to keep NaN.
    logits.index_add_(0, rows, bias.flatten(1)[:, :size])


@lru_cache(maxsize=4)
def _byte_table(device: torch.device) -> Tensor:
    """Return f32[256, 8]: for each byte, 0 where a bit is set and -inf where it is not."""
    flags = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
    return torch.from_numpy(np.where(flags, 0.0, -np.inf)).to(device, torch.float32)
