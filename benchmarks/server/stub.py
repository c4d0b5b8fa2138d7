"""StubEngine: an `AsyncEngine` that answers at once, so that what is measured is the front end. No torch."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Sequence
from typing import Any

from paged.architectures.hf_config import read_config
from paged.base.errors import EngineDeadError, UsageError
from paged.chat.formats import BY_NAME
from paged.chat.writing import written_call
from paged.checkpoints.model_directory import resolve
from paged.engine.async_base import OnPrompt
from paged.engine.embedding import EmbeddingRequestOutput
from paged.engine.model_text import ModelText
from paged.engine.scoring import ScoreOutput
from paged.options.config import EngineConfig
from paged.options.lora_request import LoRARequest
from paged.options.sampling_params import RequestOutputKind, SamplingParams
from paged.requests.request import CompletionOutput, Prompt, RequestMetrics, RequestOutput
from paged.scheduler.stats import EngineStats
from paged.text.prompt_parser import ParsedPrompt

TOKEN, TEXT = 7, " word"
TOOL = {"name": "write", "parameters": {"type": "object", "properties": {"text": {"type": "string"}}}}


def call_around(parser: str) -> tuple[str, str]:
    """Return what stands around the text of a call's argument in a chat format."""
    syntax = BY_NAME[parser].calls("")
    written = written_call(syntax, str(TOOL["name"]), json.dumps({"text": TEXT}))
    before, _, after = written.partition(TEXT)
    return syntax.section[0] + before, after + syntax.section[1]


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
        text = TEXT * num_new
        if self._num_tokens == 0:
            text = self._engine.around[0] + text
        self._num_tokens += num_new
        finished = self._num_tokens == total
        if finished:
            self._times.finished_time = 0.0
            text += self._engine.around[1]
        completion = CompletionOutput(0, text, [TOKEN] * num_new, "length" if finished else None)
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
    around: the texts before and after all tokens.
    """

    def __init__(self, model: str, *, is_idle: bool = False, around: tuple[str, str] = ("", "")) -> None:
        self.around = around
        self.config = EngineConfig(model)
        directory = resolve(model, None)
        self.model_config = read_config(directory)
        self.text = ModelText(self.config, directory, self.model_config)
        self.max_model_len = 2**20
        self.prompts = self.text.new_parser(self.max_model_len)
        self.is_running = True
        self.errored = False
        self.is_idle = is_idle
        self.loaded_adapters: list[LoRARequest] = []
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
        lora_request: LoRARequest | None = None,  # noqa: ARG002
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
