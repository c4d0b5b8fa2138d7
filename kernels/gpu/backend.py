"""The "triton" backend: for CUDA and ROCm GPUs, or Triton's interpreter. Implements `backend.Kernels`."""

from typing import Final

import torch

from ..attention_options import MAX_HEAD_DIM, MIN_HEAD_DIM
from ..plain.logprobs import token_logprobs
from ..plain.ops import greedy
from ..reference import take_rows
from .attention.paged_attention import paged_attention, plan_attention
from .copy_blocks import copy_blocks
from .rms_norm import rms_norm
from .rotary_store_kv import rotary_store_kv
from .sampling.penalties import apply_penalties
from .sampling.sample_tokens import sample_tokens
from .silu_and_mul import silu_and_mul
from .target import check_target, current_target, in_interpreter

name: Final = "triton"
head_dims: Final = range(MIN_HEAD_DIM, MAX_HEAD_DIM + 1)
has_linear: Final = False
records_steps: Final = False
compiles_at_launch: Final = not in_interpreter()
needs_partials: Final = True


def check_cache_dtype(dtype: torch.dtype) -> None:
    """Raise ValueError if the current GPU cannot read a cache of this dtype."""
    check_target(dtype, current_target())


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
