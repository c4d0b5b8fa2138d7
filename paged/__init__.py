"""paged: a paged-attention runtime for large language models, with kernels in Triton."""

from .config import EngineConfig
from .engine import LLMEngine
from .errors import (
    CheckpointError,
    ConfigError,
    PagedError,
    RequestError,
    UnknownArgumentError,
    UnsupportedModelError,
    UsageError,
)
from .request import CompletionOutput, RequestMetrics, RequestOutput
from .sampling_params import SamplingParams

LLM = LLMEngine

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "CheckpointError",
    "CompletionOutput",
    "ConfigError",
    "EngineConfig",
    "LLMEngine",
    "PagedError",
    "RequestError",
    "RequestMetrics",
    "RequestOutput",
    "SamplingParams",
    "UnknownArgumentError",
    "UnsupportedModelError",
    "UsageError",
]
