"""The names of the comparators, for programs that need not import torch."""

NAMES = (
    "sdpa_cudnn",
    "sdpa_flash",
    "flex_attention",
    "varlen_attn",
    "flashinfer",
    "vllm_unified",
    "without_cascade",
)
# To compile, for every shape anew: measured where a shape asks for it.
SLOW = ("flex_attention",)


def readiness_key(name: str, head_dim: int) -> str:
    """What a comparator is called that has to be compiled for each head_dim."""
    return f"{name}, D {head_dim}"
