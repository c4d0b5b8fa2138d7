"""The "torch" backend: plain torch, on any device. Implements `backend.Kernels`."""

import sys
from typing import Final

from ..reference import check_cache_dtype, copy_blocks, plan_attention, take_rows
from .logprobs import token_logprobs
from .ops import greedy, paged_attention, rms_norm, rotary_store_kv, silu_and_mul
from .sampling import apply_penalties, sample_tokens

name: Final = "torch"
head_dims: Final = range(1, sys.maxsize)
has_linear: Final = False
records_steps: Final = False
compiles_at_launch: Final = False
needs_partials: Final = False

__all__ = [
    "apply_penalties",
    "check_cache_dtype",
    "compiles_at_launch",
    "copy_blocks",
    "greedy",
    "has_linear",
    "head_dims",
    "name",
    "needs_partials",
    "paged_attention",
    "plan_attention",
    "records_steps",
    "rms_norm",
    "rotary_store_kv",
    "sample_tokens",
    "silu_and_mul",
    "take_rows",
    "token_logprobs",
]
