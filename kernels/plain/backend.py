"""The "torch" backend: plain torch, on any device. Implements `backend.Kernels`.

An operation that plain torch computes no faster than the reference is the reference's.
"""

import sys

from .. import reference
from ..arguments import checked
from ..reference import check_cache_dtype
from .attention.paged_attention import paged_attention, plan_attention
from .rows.gelu_and_mul import gelu_and_mul
from .rows.greedy import greedy
from .rows.layer_norm import layer_norm
from .rows.rotary_store_kv import rotary_store_kv
from .rows.silu_and_mul import silu_and_mul
from .sampling.penalties import apply_penalties
from .sampling.sample_tokens import sample_tokens
from .sampling.token_logprobs import token_logprobs

add = checked(reference.add)
copy_blocks = checked(reference.copy_blocks)
gelu = checked(reference.gelu)
rms_norm = checked(reference.rms_norm)
rms_norm_into = checked(reference.rms_norm_into)
scale_and_cap = checked(reference.scale_and_cap)
scale_rows = checked(reference.scale_rows)
take_rows = checked(reference.take_rows)

name = "torch"
has_linear = False
unpacks_steps = False
records_steps = False
compiles_at_launch = False
needs_partials = False


def head_dims() -> range:
    """Return the head dimensions that attention takes: any."""
    return range(1, sys.maxsize)
