"""The "torch" backend: plain torch, on any device. Implements `backend.Kernels`."""

import sys

from ..reference import check_cache_dtype
from .logprobs import token_logprobs
from .ops import (
    add,
    copy_blocks,
    gelu,
    gelu_and_mul,
    greedy,
    layer_norm,
    paged_attention,
    plan_attention,
    rms_norm,
    rms_norm_into,
    rotary_store_kv,
    scale_and_cap,
    scale_rows,
    silu_and_mul,
    take_rows,
)
from .sampling import apply_penalties, sample_tokens

name = "torch"
has_linear = False
unpacks_steps = False
records_steps = False
compiles_at_launch = False
needs_partials = False


def head_dims() -> range:
    """Return the head dimensions that attention takes: any."""
    return range(1, sys.maxsize)
