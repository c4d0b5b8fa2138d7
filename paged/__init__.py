"""paged: a paged-attention runtime for large language models, with kernels for CPUs and GPUs."""

import importlib
import signal
import sys

# Ctrl-C ends the command without a traceback while this is imported, too: by the script `paged`, or by
# `python -m paged`, whose module __main__ comes after this one.
if (sys.argv[:1] == ["-m"] and ("-m", "paged") in zip(sys.orig_argv, sys.orig_argv[1:], strict=False)) or (
    sys.argv and sys.argv[0].rpartition("/")[2] == "paged"
):
    signal.signal(signal.SIGINT, signal.SIG_DFL)

from typing import TYPE_CHECKING, Any

from .base.errors import (
    CheckpointError,
    ClusterError,
    ConfigError,
    DivisionError,
    EngineDeadError,
    FileError,
    MissingModelError,
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
from .base.missing_names import MissingNames as _MissingNames
from .options.config import EngineConfig
from .options.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams
from .requests.request import (
    CompletionOutput,
    Logprob,
    RequestMetrics,
    RequestOutput,
    TextPrompt,
    TokensPrompt,
)

if TYPE_CHECKING:
    from .commands.engine_args import EngineArgs, FlexibleArgumentParser
    from .engine.async_engine import AsyncLLMEngine
    from .engine.beam_search import BeamSearchOutput, BeamSearchSequence
    from .engine.embedding import EmbeddingOutput, EmbeddingRequestOutput
    from .engine.engine import LLMEngine
    from .engine.scoring import ScoreOutput
    from .options.lora_request import LoRARequest
    from .options.other_calls import BeamSearchParams, PoolingParams

    LLM = LLMEngine
    AsyncLLM = AsyncLLMEngine
    AsyncEngineArgs = EngineArgs

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "AsyncEngineArgs",
    "AsyncLLM",
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
    "EngineArgs",
    "EngineConfig",
    "EngineDeadError",
    "FileError",
    "FlexibleArgumentParser",
    "LLMEngine",
    "LoRARequest",
    "Logprob",
    "MissingModelError",
    "PagedError",
    "PoolingParams",
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


# Modules of the names that are imported on first use. Most import torch, which takes seconds, and
# `paged --help` and the message of a mistyped option must appear at once.
_MODULES = {
    "AsyncLLMEngine": "engine.async_engine",
    "BeamSearchOutput": "engine.beam_search",
    "BeamSearchParams": "options.other_calls",
    "BeamSearchSequence": "engine.beam_search",
    "EmbeddingOutput": "engine.embedding",
    "EmbeddingRequestOutput": "engine.embedding",
    "EngineArgs": "commands.engine_args",
    "FlexibleArgumentParser": "commands.engine_args",
    "LLMEngine": "engine.engine",
    "LoRARequest": "options.lora_request",
    "PoolingParams": "options.other_calls",
    "ScoreOutput": "engine.scoring",
}


# vLLM's names of the same.
_ALIASES = {"LLM": "LLMEngine", "AsyncLLM": "AsyncLLMEngine", "AsyncEngineArgs": "EngineArgs"}


def __getattr__(name: str) -> Any:
    found = _ALIASES.get(name, name)
    if found in _MODULES:
        return getattr(importlib.import_module(f".{_MODULES[found]}", __name__), found)
    from .base.from_vllm import missing

    raise AttributeError(missing("paged", name))


# vLLM's path of the same.
sys.modules[f"{__name__}.sampling_params"] = sys.modules[SamplingParams.__module__]

# `from paged import ModelRegistry` and `import paged.inputs` look for modules, and say what to use here.
if _MissingNames not in sys.meta_path:
    sys.meta_path.append(_MissingNames)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
