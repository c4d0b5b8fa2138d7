"""The "numba" backend: compiled for the CPU that it runs on. Implements `backend.Kernels`."""

from ..attention_options import MAX_HEAD_DIM, MIN_HEAD_DIM
from ..plain.backend import copy_blocks, grouped_linear, listening, partial_bytes
from ..reference import check_cache_dtype
from ..steps import UnpackStep
from .attention.paged_attention import paged_attention, plan_attention
from .attention.units import SPLIT_KEYS
from .compiling import compile_ahead
from .rows.add import add
from .rows.clamped_swiglu import clamped_swiglu
from .rows.gelu_and_mul import gelu, gelu_and_mul
from .rows.greedy import greedy
from .rows.layer_norm import layer_norm
from .rows.rms_norm import rms_norm
from .rows.rms_norm_into import rms_norm_into
from .rows.rotary_store_kv import rotary_store_kv
from .rows.route import route
from .rows.scale_and_cap import scale_and_cap
from .rows.scale_rows import scale_rows
from .rows.silu_and_mul import silu_and_mul
from .rows.sort_by_expert import sort_by_expert
from .rows.sum_experts import sum_experts
from .rows.take_rows import take_rows
from .sampling.masks import greedy_of_allowed, mask_logits
from .sampling.penalties import apply_penalties
from .sampling.sample_tokens import sample_tokens
from .sampling.token_logprobs import token_logprobs
from .step_recorder import CPUStepRecorder

name = "numba"
has_linear = True
has_coded_linear = False
has_grouped_linear = False
compiles_at_launch = False  # `compile_ahead` compiles all
unpack_step: UnpackStep | None = None
step_recorder = CPUStepRecorder
split_keys = SPLIT_KEYS


def head_dims() -> range:
    """Return the head dimensions that attention takes."""
    return range(MIN_HEAD_DIM, MAX_HEAD_DIM + 1)
