"""StubEngine: an `AsyncEngine` that answers at once, so that what is measured is the front end. No torch."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from typing import Any

from paged.config import EngineConfig
from paged.engine.async_base import OnPrompt
from paged.engine.embedding import EmbeddingRequestOutput
from paged.engine.model_text import ModelText
from paged.engine.scoring import ScoreOutput
from paged.errors import EngineDeadError, UsageError
from paged.model.hf_config import read_config
from paged.model.hub import resolve
from paged.requests.prompts import Prompt
from paged.requests.request import CompletionOutput, RequestMetrics, RequestOutput
from paged.sampling_params import RequestOutputKind, SamplingParams
from paged.scheduler.stats import EngineStats
from paged.text.prompt_parser import ParsedPrompt

TOKEN, TEXT = 7, " word"


class StubStream:
    """The outputs of one request: a token each, or all tokens at once.

    replica: of the engine.
    """

    replica = 0

    def __init__(
        self, engine: StubEngine, prompt: Prompt | ParsedPrompt, params: SamplingParams, request_id: str
    ) -> None:
        self.request_id = request_id
        self.on_prompt: OnPrompt | None = None
        self._engine = engine
        self._prompt = prompt
        self._params = params
        self._parsed: ParsedPrompt | None = None
        self._num_tokens = 0
        self._times = RequestMetrics(0.0, 0.0, 0.0)

    def __aiter__(self) -> StubStream:
        return self

    async def __anext__(self) -> RequestOutput:
        total = self._params.max_tokens or 1
        if self._num_tokens == total:
            raise StopAsyncIteration
        if self._parsed is None:
            prompt = self._prompt
            self._parsed = prompt if isinstance(prompt, ParsedPrompt) else self._engine.parse(prompt)
            if self.on_prompt is not None:
                self.on_prompt(self.request_id, len(self._parsed.token_ids))
        elif self._engine.is_idle:
            await asyncio.Event().wait()
        else:
            await asyncio.sleep(0)  # another step: all other streams go first
        is_delta = self._params.output_kind is RequestOutputKind.DELTA
        num_new = 1 if is_delta else total
        self._num_tokens += num_new
        finished = self._num_tokens == total
        if finished:
            self._times.finished_time = 0.0
        completion = CompletionOutput(0, TEXT * num_new, [TOKEN] * num_new, "length" if finished else None)
        parsed = self._parsed
        return RequestOutput(
            self.request_id, parsed.text, parsed.token_ids, [completion], finished, 0, self._times
        )

    async def aclose(self) -> None:
        """End the stream."""
        self._num_tokens = self._params.max_tokens or 1


class StubEngine:
    """Has a checkpoint's tokenizer and chat template, and the same token for every position.

    is_idle: give every stream its first token, and no other.
    """

    def __init__(self, model: str, *, is_idle: bool = False) -> None:
        self.config = EngineConfig(model)
        directory = resolve(model, None)
        model_config = read_config(directory)
        self.text = ModelText(self.config, directory, model_config)
        self.max_model_len = 2**20
        self.prompts = self.text.new_parser(self.max_model_len)
        self.is_running = True
        self.errored = False
        self.is_idle = is_idle
        self.dead_error: EngineDeadError | None = None
        self._ids = itertools.count()

    def parse(self, prompt: Prompt) -> ParsedPrompt:
        """Return the tokens of a prompt."""
        return self.prompts.parse(prompt, None)

    def describe(self) -> str:
        """Return a line about the engine."""
        return "an engine that answers at once"

    def generate(
        self,
        prompt: Prompt | ParsedPrompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: float | None = None,  # noqa: ARG002
        tenant: str = "",  # noqa: ARG002
        timeout_s: float | None = None,  # noqa: ARG002
        generated_token_ids: Sequence[int] = (),  # noqa: ARG002
    ) -> StubStream:
        """Return the outputs of a prompt."""
        params = self.text.params_of({}) if sampling_params is None else sampling_params
        return StubStream(self, prompt, params, request_id or str(next(self._ids)))

    async def encode(self, *_: Any, **__: Any) -> EmbeddingRequestOutput:
        """Refuse: embeddings are not measured."""
        raise UsageError("this engine generates tokens only")

    async def score(self, *_: Any, **__: Any) -> list[ScoreOutput]:
        """Refuse: scores are not measured."""
        raise UsageError("this engine generates tokens only")

    async def abort(self, request_id: str) -> None:
        """Do nothing."""

    async def stats(self) -> EngineStats:
        """Refuse: there is nothing to count."""
        raise EngineDeadError("this engine counts nothing")

    async def stats_by_engine(self) -> list[EngineStats]:
        """Return nothing."""
        return []

    def count_together(self, streams: Sequence[StubStream], *, is_whole: bool) -> None:
        """Do nothing."""

    def shutdown(self) -> None:
        """Do nothing."""
