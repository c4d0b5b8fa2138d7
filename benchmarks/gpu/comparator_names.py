"""The names of the comparators, for programs that do not import torch."""

NAMES = (
    "sdpa_cudnn",
    "sdpa_flash",
    "flex_attention",
    "varlen_attn",
    "flashinfer",
    "vllm_unified",
)
# Compile for every shape: measured only where a shape asks for it.
SLOW = ("flex_attention",)


def readiness_key(name: str, head_dim: int) -> str:
    """Return the key of a comparator that is compiled for each head_dim."""
    return f"{name}, D {head_dim}"
