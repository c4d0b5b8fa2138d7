"""The "torch" backend: plain torch, on any device. Implements `operations.Kernels`.

An operation that plain torch computes no faster than the reference is the reference's.
"""

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from .. import reference
from ..checked import checked
from ..checks import check_cache_dtype
from ..steps import Needs
from .attention.paged_attention import paged_attention, plan_attention
from .rows.rotary_store_kv import rotary_store_kv
from .rows.row_kernels import gelu_and_mul, greedy, layer_norm, silu_and_mul
from .sampling.logits import apply_penalties, mask_logits, token_logprobs
from .sampling.sample_tokens import sample_tokens

add = checked(reference.add)
add_lora = checked(reference.add_lora)
clamped_swiglu = checked(reference.clamped_swiglu)
copy_blocks = checked(reference.copy_blocks)
gated_delta = checked(reference.gated_delta)
gated_norm = checked(reference.gated_norm)
gelu = checked(reference.gelu)
grouped_linear = checked(reference.grouped_linear)
mamba2_scan = checked(reference.mamba2_scan)
relu_squared = checked(reference.relu_squared)
rms_norm = checked(reference.rms_norm)
rms_norm_into = checked(reference.rms_norm_into)
route = checked(reference.route)
scale_and_cap = checked(reference.scale_and_cap)
scale_by_sigmoid = checked(reference.scale_by_sigmoid)
scale_rows = checked(reference.scale_rows)
short_conv = checked(reference.short_conv)
sort_by_expert = checked(reference.sort_by_expert)
sum_experts = checked(reference.sum_experts)
take_rows = checked(reference.take_rows)

name = "torch"
has_linear = False
has_coded_linear = False
has_grouped_linear = False
compiles_at_launch = False
unpack_step = take_parameters = None
step_recorder = None
greedy_of_allowed = None
split_keys = sys.maxsize  # contexts are not split
max_group = sys.maxsize


def compile_for(needs: Needs, progress: Any = None) -> Callable[[], None]:  # noqa: ARG001
    """Do nothing: there is nothing to compile. Return a function that returns at once."""
    return lambda: None


def most_decode_q(head_dim: int, group: int, dtype: torch.dtype, cache_dtype: torch.dtype) -> int:  # noqa: ARG001
    """Return 1: contexts are not split for sequences with more new tokens."""
    return 1


def head_dims(target: str) -> range:  # noqa: ARG001
    """Return the head dimensions that attention supports: any."""
    return range(1, sys.maxsize)


def partial_bytes(num_seqs: int, max_keys: int, num_heads: int, value_dim: int) -> int:  # noqa: ARG001
    """Return the maximum bytes of attention's partial results that a step does not already include."""
    return 0


def listening(compiled: Callable[[], None]) -> AbstractContextManager[None]:  # noqa: ARG001
    """Return a context that does nothing, since no kernel is compiled."""
    return nullcontext()
