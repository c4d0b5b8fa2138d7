"""The "numba" backend: compiled for the CPU that it runs on. Implements `backend.Kernels`."""

from typing import Final

from ..attention_options import MAX_HEAD_DIM, MIN_HEAD_DIM
from ..reference import check_cache_dtype, copy_blocks
from .attention.paged_attention import paged_attention, plan_attention
from .rows.greedy import greedy
from .rows.rms_norm import rms_norm
from .rows.rotary_store_kv import rotary_store_kv
from .rows.silu_and_mul import silu_and_mul
from .rows.take_rows import take_rows
from .sampling.penalties import apply_penalties
from .sampling.sample_tokens import sample_tokens
from .sampling.token_logprobs import token_logprobs

name: Final = "numba"
head_dims: Final = range(MIN_HEAD_DIM, MAX_HEAD_DIM + 1)
has_linear: Final = True
records_steps: Final = True
compiles_at_launch: Final = False  # all are compiled, or loaded, when this module is imported
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
