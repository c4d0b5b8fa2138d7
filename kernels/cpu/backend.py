"""The "numba" backend: compiled for the CPU that it runs on. Implements `operations.Kernels`.

The module of an operation is imported at its first use: a model takes few of them.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from typing import Any

import torch

from ..attention_options import MAX_GROUP, MAX_HEAD_DIM, MIN_HEAD_DIM
from ..checks import check_cache_dtype as check_cache_dtype
from ..steps import Needs
from .attention.paged_attention import SPLIT_KEYS
from .launch.code_cache import announced, missing_kernels, needed, variant
from .variants import kernels_for

name = "numba"
has_linear = True
has_coded_linear = False
has_grouped_linear = False
compiles_at_launch = False  # `compile_ahead` compiles all
unpack_step = take_parameters = None
split_keys = SPLIT_KEYS
max_group = MAX_GROUP

# The module of each operation, and what it is called there if that differs.
OPERATIONS = {
    "add": ".rows.row_kernels",
    "add_lora": ".rows.add_lora",
    "apply_penalties": ".sampling.logits",
    "clamped_swiglu": ".rows.activations",
    "copy_blocks": "..plain.backend",
    "gated_delta": ".states.gated_delta",
    "gated_norm": ".rows.gated_norm",
    "gelu": ".rows.activations",
    "gelu_and_mul": ".rows.activations",
    "greedy": ".rows.row_kernels",
    "greedy_of_allowed": ".sampling.logits",
    "grouped_linear": "..plain.backend",
    "layer_norm": ".rows.layer_norm",
    "mamba2_scan": ".states.mamba2_scan",
    "mask_logits": ".sampling.logits",
    "paged_attention": ".attention.paged_attention",
    "plan_attention": ".attention.paged_attention",
    "relu_squared": ".rows.activations",
    "rms_norm": ".rows.norms",
    "rms_norm_into": ".rows.norms",
    "rotary_store_kv": ".rows.rotary_store_kv",
    "route": ".rows.experts",
    "sample_tokens": ".sampling.sample_tokens",
    "scale_and_cap": ".rows.scales",
    "scale_by_sigmoid": ".rows.scales",
    "scale_rows": ".rows.scales",
    "short_conv": ".states.short_conv",
    "silu_and_mul": ".rows.row_kernels",
    "sort_by_expert": ".rows.experts",
    "step_recorder": ".step_recorder:CPUStepRecorder",
    "sum_experts": ".rows.experts",
    "take_rows": ".rows.take_rows",
    "token_logprobs": ".sampling.logits",
}


def __getattr__(operation: str) -> Any:
    """Import an operation at its first use."""
    if operation not in OPERATIONS:
        raise AttributeError(f"the CPU kernels have no {operation!r}")
    module, _, other_name = OPERATIONS[operation].partition(":")
    value = getattr(import_module(module, __package__), other_name or operation)
    globals()[operation] = value
    return value


def compile_ahead() -> None:
    """Compile the kernels that are not in the cache; see `compiling.compile_ahead`."""
    if missing_kernels():
        from .compiling import compile_ahead

        compile_ahead()


def compile_for(needs: Needs, progress: Any = None) -> Callable[[], None]:
    """Begin to compile the kernels that an engine needs (see `variants`).

    Returns a function that waits until they are compiled.
    """
    names, kinds = kernels_for(needs)
    for name, own in kinds.items():
        announced[name] = announced.get(name, frozenset()) | own
    names = {variant(name, announced.get(name)) for name in names}
    needed.update(names)
    if not missing_kernels(names):
        return lambda: None
    from .compiling import Compilation

    return Compilation(progress, sorted(names)).finish


def most_decode_q(head_dim: int, group: int, dtype: torch.dtype, cache_dtype: torch.dtype) -> int:  # noqa: ARG001
    """Return 1: attention splits the context only of sequences with one new token."""
    return 1


def head_dims(target: str) -> range:  # noqa: ARG001
    """Return the head dimensions that attention supports."""
    return range(MIN_HEAD_DIM, MAX_HEAD_DIM + 1)


def partial_bytes(num_seqs: int, max_keys: int, num_heads: int, value_dim: int) -> int:  # noqa: ARG001
    """Return the maximum bytes of attention's partial results that a step does not already include."""
    return 0


def listening(compiled: Callable[[], None]) -> AbstractContextManager[None]:  # noqa: ARG001
    """Return a context that does nothing, since no launch compiles a kernel."""
    return nullcontext()
