"""paged: a paged-attention runtime for large language models, with kernels for CPUs and GPUs."""

import importlib
import sys
from typing import TYPE_CHECKING, Any

from .base.from_vllm import MissingNames as _MissingNames
from .base.from_vllm import missing as _missing
from .config import EngineConfig
from .errors import (
    CheckpointError,
    ClusterError,
    ConfigError,
    DivisionError,
    EngineDeadError,
    FileError,
    PagedError,
    QueueFullError,
    RankError,
    RequestError,
    RequestKillsEngineError,
    RequestTimeoutError,
    ResourceError,
    UnknownArgumentError,
    UnsupportedModelError,
    UsageError,
    WorkerLostError,
)
from .requests.prompts import TextPrompt, TokensPrompt
from .requests.request import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from .sampling_params import BeamSearchParams, RequestOutputKind, SamplingParams, StructuredOutputsParams

if TYPE_CHECKING:
    from .engine.async_engine import AsyncLLMEngine
    from .engine.beam_search import BeamSearchOutput, BeamSearchSequence
    from .engine.embedding import EmbeddingOutput, EmbeddingRequestOutput
    from .engine.engine import LLMEngine
    from .engine.scoring import ScoreOutput

    LLM = LLMEngine

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "AsyncLLMEngine",
    "BeamSearchOutput",
    "BeamSearchParams",
    "BeamSearchSequence",
    "CheckpointError",
    "ClusterError",
    "CompletionOutput",
    "ConfigError",
    "DivisionError",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "EngineConfig",
    "EngineDeadError",
    "FileError",
    "LLMEngine",
    "Logprob",
    "PagedError",
    "QueueFullError",
    "RankError",
    "RequestError",
    "RequestKillsEngineError",
    "RequestMetrics",
    "RequestOutput",
    "RequestOutputKind",
    "RequestTimeoutError",
    "ResourceError",
    "SamplingParams",
    "ScoreOutput",
    "StructuredOutputsParams",
    "TextPrompt",
    "TokensPrompt",
    "UnknownArgumentError",
    "UnsupportedModelError",
    "UsageError",
    "WorkerLostError",
]


# Modules of the names that import torch, which takes seconds. They are imported on first use, so that
# `paged --help` and the message of a mistyped option appear at once.
_MODULES = {
    "AsyncLLMEngine": "engine.async_engine",
    "BeamSearchOutput": "engine.beam_search",
    "BeamSearchSequence": "engine.beam_search",
    "EmbeddingOutput": "engine.embedding",
    "EmbeddingRequestOutput": "engine.embedding",
    "LLMEngine": "engine.engine",
    "ScoreOutput": "engine.scoring",
}


def __getattr__(name: str) -> Any:
    found = "LLMEngine" if name == "LLM" else name
    if found in _MODULES:
        return getattr(importlib.import_module(f".{_MODULES[found]}", __name__), found)
    raise AttributeError(_missing("paged", name))


# `from paged import EngineArgs` and `import paged.inputs` look for modules, and say what to use here.
if _MissingNames not in sys.meta_path:
    sys.meta_path.append(_MissingNames)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
