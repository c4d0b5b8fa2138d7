"""The operations as one value, in the implementation asked for.

Importing this module, and loading "torch", needs no Triton.
"""

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Literal

from torch import Tensor

logger = logging.getLogger(__name__)

BackendName = Literal["triton", "numba", "torch"]
BACKENDS: tuple[BackendName, ...] = ("triton", "numba", "torch")


@dataclass(frozen=True)
class Kernels:
    """One implementation of every operation; the signatures are those of `reference`."""

    name: BackendName
    take_rows: Callable[[Tensor, Tensor], Tensor]
    rms_norm: Callable[..., Tensor]
    rotary_store_kv: Callable[..., Tensor]
    silu_and_mul: Callable[..., Tensor]
    copy_blocks: Callable[..., None]
    paged_attention: Callable[..., Tensor]
    apply_penalties: Callable[..., None]
    sample_tokens: Callable[..., Tensor]
    greedy: Callable[[Tensor], tuple[Tensor, Tensor]]
    token_logprobs: Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor, Tensor]]


def load_kernels(name: BackendName) -> Kernels:
    """Return the kernels of one backend.

    Raises ValueError for an unknown name, and ImportError where "triton" or "numba" is missing or numba has
    no place for what it compiles.
    """
    if name == "torch":
        return _torch_kernels()
    if name == "numba":
        return _numba_kernels()
    if name == "triton":
        return _triton_kernels()
    raise ValueError(f"attention_backend must be one of {', '.join(map(repr, BACKENDS))}, got {name!r}")


def _torch_kernels() -> Kernels:
    from . import reference
    from .plain import logprobs as torch_logprobs
    from .plain import ops as torch_ops
    from .plain import sampling as torch_sampling

    return Kernels(
        name="torch",
        take_rows=reference.take_rows,
        rms_norm=torch_ops.rms_norm,
        rotary_store_kv=torch_ops.rotary_store_kv,
        silu_and_mul=torch_ops.silu_and_mul,
        copy_blocks=reference.copy_blocks,
        paged_attention=torch_ops.paged_attention,
        apply_penalties=torch_sampling.apply_penalties,
        sample_tokens=torch_sampling.sample_tokens,
        greedy=torch_ops.greedy,
        token_logprobs=torch_logprobs.token_logprobs,
    )


def has_numba() -> bool:
    """Whether the CPU kernels' compiler is installed."""
    try:
        return find_spec("numba") is not None
    except ValueError:  # somebody took it out of sys.modules
        return False


def _numba_kernels() -> Kernels:
    if not has_numba():
        raise ImportError(
            "attention_backend='numba' needs numba, which compiles the CPU's kernels: "
            "`pip install 'paged[cpu]'`, or use attention_backend='torch', which is slower"
        )
    notice = threading.Timer(
        2.0,
        logger.warning,
        ["loading the kernels for this CPU; the first time compiles them, for a while"],
    )
    notice.daemon = True
    notice.start()
    try:
        from . import reference
        from .cpu.attention import paged_attention as numba_paged_attention
        from .cpu.rows import lookup as numba_lookup
        from .cpu.rows import ops as numba_ops
        from .cpu.sampling import logits as numba_logits
        from .cpu.sampling import sample_tokens as numba_sampling
    finally:
        notice.cancel()
    return Kernels(
        name="numba",
        take_rows=numba_lookup.take_rows,
        rms_norm=numba_ops.rms_norm,
        rotary_store_kv=numba_ops.rotary_store_kv,
        silu_and_mul=numba_ops.silu_and_mul,
        copy_blocks=reference.copy_blocks,
        paged_attention=numba_paged_attention.paged_attention,
        apply_penalties=numba_logits.apply_penalties,
        sample_tokens=numba_sampling.sample_tokens,
        greedy=numba_ops.greedy,
        token_logprobs=numba_logits.token_logprobs,
    )


def _triton_kernels() -> Kernels:
    try:
        import triton  # noqa: F401
    except ImportError as error:
        raise ImportError(
            "attention_backend='triton' needs Triton, which exists for Linux only: "
            "`pip install triton`, or use attention_backend='torch'"
        ) from error
    from .gpu.attention.paged_attention import paged_attention
    from .gpu.copy_blocks import copy_blocks
    from .gpu.rms_norm import rms_norm
    from .gpu.rotary_store_kv import rotary_store_kv
    from .gpu.sampling.penalties import apply_penalties
    from .gpu.sampling.sample_tokens import sample_tokens
    from .gpu.silu_and_mul import silu_and_mul
    from .plain.logprobs import token_logprobs
    from .plain.ops import greedy
    from .reference import take_rows

    return Kernels(
        name="triton",
        take_rows=take_rows,
        rms_norm=rms_norm,
        rotary_store_kv=rotary_store_kv,
        silu_and_mul=silu_and_mul,
        copy_blocks=copy_blocks,
        paged_attention=paged_attention,
        apply_penalties=apply_penalties,
        sample_tokens=sample_tokens,
        greedy=greedy,
        token_logprobs=token_logprobs,
    )
