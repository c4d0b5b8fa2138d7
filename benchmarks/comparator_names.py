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
