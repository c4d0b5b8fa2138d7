"""The "triton" backend: for CUDA and ROCm GPUs, or Triton's interpreter. Implements `operations.Kernels`."""

import torch

from ..attention_options import MAX_GROUP, MIN_HEAD_DIM
from ..plain.backend import add, compile_for, greedy, mask_logits, take_rows, token_logprobs
from .attention.config import INTERPRETED_SPLIT, MAX_DECODE_Q, SPLIT, choose_config, largest_head_dim
from .attention.paged_attention import paged_attention, plan_attention
from .attention.split_kv import most_partial_bytes
from .copy_blocks import copy_blocks
from .experts.grouped_linear import grouped_linear
from .experts.route import route
from .experts.sort_by_expert import sort_by_expert
from .experts.sum_experts import sum_experts
from .rows.activations import clamped_swiglu, gelu, gelu_and_mul, relu_squared, silu_and_mul
from .rows.add_lora import add_lora
from .rows.gated_norm import gated_norm
from .rows.norms import layer_norm, rms_norm, rms_norm_into
from .rows.rotary_store_kv import rotary_store_kv
from .rows.scale_and_cap import scale_and_cap
from .rows.scale_by_sigmoid import scale_by_sigmoid
from .rows.scale_rows import scale_rows
from .sampling.penalties import apply_penalties
from .sampling.sample_tokens import sample_tokens
from .sampling.take_parameters import take_parameters
from .states.gated_delta import gated_delta
from .states.mamba2_scan import mamba2_scan
from .states.short_conv import short_conv
from .target import check_target, current_target, in_interpreter, listening
from .unpack_step import unpack_step

name = "triton"
has_linear = False
has_coded_linear = True
has_grouped_linear = True
compiles_at_launch = not in_interpreter()
step_recorder = None
greedy_of_allowed = None
max_group = MAX_GROUP
split_keys = INTERPRETED_SPLIT if in_interpreter() else SPLIT


def most_decode_q(head_dim: int, group: int, dtype: torch.dtype, cache_dtype: torch.dtype) -> int:
    """Return the maximum number of new tokens of a decode; see max_decode_q of `paged_attention`."""
    target = current_target()
    config = choose_config(head_dim, group, dtype, "decode", target, head_dim, cache_dtype, MAX_DECODE_Q)
    return config.BLOCK_Q


def head_dims(target: str) -> range:
    """Return the head dimensions that attention supports. Raises ValueError for an unsupported GPU."""
    return range(MIN_HEAD_DIM, largest_head_dim(target or current_target()) + 1)


def check_cache_dtype(dtype: torch.dtype, target: str) -> None:
    """Raise ValueError if a target cannot read a cache of this dtype."""
    check_target(dtype, target or current_target())


def partial_bytes(num_seqs: int, max_keys: int, num_heads: int, value_dim: int) -> int:
    """Return the maximum size in bytes of the partial results of split decodes."""
    return most_partial_bytes(num_seqs, max_keys, num_heads, value_dim, SPLIT)
