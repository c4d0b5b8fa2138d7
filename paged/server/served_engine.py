"""ServedEngine: what the routes need of an engine, in this process or in others."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Protocol

from ..config import EngineConfig
from ..engine.async_options import OnPlace, ignore_place
from ..engine.embedding import EmbeddingRequestOutput, Pooling
from ..engine.model_text import ModelText
from ..engine.scoring import ScoreOutput
from ..errors import EngineDeadError
from ..requests.prompts import Prompt
from ..requests.request import RequestOutput
from ..sampling_params import SamplingParams
from ..scheduler.stats import EngineStats
from ..text.prompt_parser import ParsedPrompt, PromptParser


class OutputStream(Protocol):
    """The outputs of one request, for one reader."""

    request_id: str

    @property
    def replica(self) -> int:
        """The number of the engine that computes it; 0 until it is chosen."""

    def __aiter__(self) -> AsyncIterator[RequestOutput]:
        """Return itself."""

    async def __anext__(self) -> RequestOutput:
        """Return the next output. Raises RequestError, QueueFullError or EngineDeadError."""

    async def aclose(self) -> None:
        """Abort the request if it is not finished."""


class ServedEngine(Protocol):
    """`AsyncLLMEngine` and `EngineClient`, whose methods are documented there."""

    @property
    def config(self) -> EngineConfig:
        """The options of the engine."""

    @property
    def max_model_len(self) -> int:
        """Most tokens of prompt and output together."""

    @property
    def text(self) -> ModelText:
        """The tokenizer, chat templates and sampling defaults of the model."""

    @property
    def prompts(self) -> PromptParser:
        """The parser of prompts."""

    @property
    def is_running(self) -> bool:
        """Whether requests are served."""

    @property
    def errored(self) -> bool:
        """Whether an engine has failed."""

    @property
    def dead_error(self) -> EngineDeadError | None:
        """The error that calls raise; None while requests are served."""

    def describe(self) -> str:
        """Return a line about the model and its KV cache."""

    def generate(
        self,
        prompt: Prompt | ParsedPrompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: float | None = None,
        tenant: str = "",
        timeout_s: float | None = None,
        generated_token_ids: Sequence[int] = (),
    ) -> OutputStream:
        """Return the outputs of a prompt."""

    async def encode(
        self,
        prompt: Prompt,
        request_id: str | None = None,
        *,
        pooling: Pooling = "last",
        normalize: bool = True,
        priority: float = 0.0,
        tenant: str = "",
        timeout_s: float | None = None,
        on_place: OnPlace = ignore_place,
    ) -> EmbeddingRequestOutput:
        """Embed a prompt."""

    async def score(
        self,
        prompt: Prompt,
        continuations: Sequence[str | Sequence[int]],
        request_id: str | None = None,
        *,
        priority: float = 0.0,
        tenant: str = "",
        timeout_s: float | None = None,
        on_place: OnPlace = ignore_place,
    ) -> list[ScoreOutput]:
        """Return the log-probability of each continuation of a prompt."""

    async def abort(self, request_id: str) -> None:
        """End a request, whose reader gets a last output."""

    async def stats(self) -> EngineStats:
        """Return current counts of requests, blocks and tokens, and totals so far."""

    async def stats_by_engine(self) -> list[EngineStats]:
        """Return the stats of each engine process, perhaps a second old."""

    async def silent_s(self) -> dict[int, float]:
        """Return for how many seconds each engine process that has not ended has sent nothing."""

    def shutdown(self) -> None:
        """Abort all requests and end the engines."""
