"""paged: a paged-attention runtime for large language models, with kernels in Triton."""

from typing import TYPE_CHECKING, Any

from .beam_search import BeamSearchOutput, BeamSearchParams, BeamSearchSequence
from .config import EngineConfig
from .embedding import EmbeddingOutput, EmbeddingRequestOutput
from .errors import (
    CheckpointError,
    ConfigError,
    EngineDeadError,
    PagedError,
    QueueFullError,
    RequestError,
    UnknownArgumentError,
    UnsupportedModelError,
    UsageError,
)
from .request import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from .sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams
from .scoring import ScoreOutput

if TYPE_CHECKING:
    from .async_engine import AsyncLLMEngine
    from .engine import LLMEngine

    LLM = LLMEngine

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "AsyncLLMEngine",
    "BeamSearchOutput",
    "BeamSearchParams",
    "BeamSearchSequence",
    "CheckpointError",
    "CompletionOutput",
    "ConfigError",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "EngineConfig",
    "EngineDeadError",
    "LLMEngine",
    "Logprob",
    "PagedError",
    "QueueFullError",
    "RequestError",
    "RequestMetrics",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "ScoreOutput",
    "StructuredOutputsParams",
    "UnknownArgumentError",
    "UnsupportedModelError",
    "UsageError",
]


def __getattr__(name: str) -> Any:
    # The engine brings torch, which takes seconds: `paged --help` and a typing error do without.
    if name in ("LLM", "LLMEngine"):
        from .engine import LLMEngine

        return LLMEngine
    if name == "AsyncLLMEngine":
        from .async_engine import AsyncLLMEngine

        return AsyncLLMEngine
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
