"""BatchRun: answers the lines of a batch file with one engine or several."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..base.errors import EngineDeadError, PagedError, QueueFullError, RequestError
from ..engine.async_base import AsyncEngine
from ..engine.embedding import EmbeddingRequestOutput
from ..options.lora_request import LoRARequest
from ..protocol.answers.errors import FAILED, MODEL_NOT_FOUND, NOT_FOUND, error_body, failure_of, status_of
from ..protocol.batch_file import BatchOutput, Line
from ..protocol.calls.call import AnswerCall
from ..protocol.calls.vectors import EmbeddingCall
from ..requests.request import Prompt, RequestOutput

logger = logging.getLogger(__name__)

FULL_S = 0.02  # until a prompt is sent again that found the queue of its engine full
MOST_TRIES = 3  # of a prompt whose engine ends, where only the beginning can be repeated

Output = RequestOutput | EmbeddingRequestOutput


@dataclass(slots=True)
class _Entry:
    """A line that is being answered, with the outputs so far."""

    line: Line
    call: AnswerCall | EmbeddingCall
    prompts: list[Prompt]
    outputs: dict[int, Output] = field(default_factory=dict)
    is_closed: bool = False
    created: int = field(default_factory=lambda: int(time.time()))

    def request_id(self, index: int) -> str:
        # The same in every run, as seeds are derived from it.
        return f"{self.line.identity}-{index}"


class BatchRun:
    """Answers the lines of a batch file with engines. Lines are read only as far ahead as keeps the engines
    busy.

    num_engines: the number of engines behind `engine`.
    adapters: the LoRA adapters that bodies may name as their model.
    ignored: for each field without effect, the number of lines that had it.
    """

    def __init__(
        self,
        engine: AsyncEngine[Any],
        output: BatchOutput,
        model: str,
        after_line: Callable[[], object],
        *,
        num_engines: int = 1,
        adapters: Sequence[LoRARequest] = (),
    ) -> None:
        self._engine = engine
        self._output = output
        self._after_line = after_line
        self._model = model
        self._adapters = {each.lora_name: each for each in adapters}
        self.ignored = Counter[str]()
        config = engine.config
        num_waiting = min(config.num_seats, config.max_waiting or config.num_seats)
        self._most_at_once = num_engines * (config.num_seats + num_waiting)

    async def answer(self, lines: Iterator[Line]) -> None:
        """Answer all lines and write each result as soon as it exists.

        Raises EngineDeadError once no engine is left, and OSError if a result cannot be written.
        """
        prompts = self._prompts(lines)
        workers = [asyncio.create_task(self._work(prompts)) for _ in range(self._most_at_once)]
        try:
            await asyncio.gather(*workers)
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)

    async def _work(self, prompts: Iterator[tuple[_Entry, int]]) -> None:
        for entry, index in prompts:
            await self._compute(entry, index)

    def _prompts(self, lines: Iterator[Line]) -> Iterator[tuple[_Entry, int]]:
        """Yield the prompts of all lines that are not refused."""
        for line in lines:
            entry = self._open(line)
            for index in range(len(entry.prompts) if entry is not None else 0):
                assert entry is not None
                if entry.is_closed:  # another of its prompts was refused
                    break
                yield entry, index

    def _open(self, line: Line) -> _Entry | None:
        """Read the prompts of a line, or write its error."""
        try:
            if isinstance(line.call, RequestError):
                raise line.call
            if line.call.model not in (None, self._model, *self._adapters):
                here = ", ".join(map(repr, (self._model, *self._adapters)))
                message = (
                    f"the model {line.call.model!r} is not here, this is {here}; see --served-model-name"
                )
                terms = {"param": "model", "code": MODEL_NOT_FOUND}
                self._close(line, NOT_FOUND, error_body(NOT_FOUND, message, **terms))
                return None
            self.ignored.update(line.call.ignored)
            self.ignored.update(["request_id"] if line.call.request_id is not None else [])
            return _Entry(line, line.call, [*line.call.prompts(self._engine.text)])
        except Exception as error:  # of any kind: it is the line's result
            self._refuse(line, error)
            return None

    async def _compute(self, entry: _Entry, index: int) -> None:
        """Compute one prompt of a line, and write the line's result with its last one."""
        try:
            with entry.call.naming_field():
                output = await self._output_of(entry, index)
        except Exception as error:  # of any kind: it is the line's result
            if isinstance(error, EngineDeadError) and not self._engine.is_running:
                raise
            if not entry.is_closed:
                entry.is_closed = True
                await self._engine.abort(entry.request_id(i) for i in range(len(entry.prompts)))
                self._refuse(entry.line, error)
            return
        if not entry.is_closed:
            self._take(entry, index, output)

    async def _output_of(self, entry: _Entry, index: int) -> Output:
        """Return the output of a prompt. While queues are full it waits: a batch has time."""
        num_tries = 0
        while True:
            try:
                return await self._try(entry, index)
            except QueueFullError:
                await asyncio.sleep(FULL_S)
            except EngineDeadError:
                num_tries += 1
                if num_tries == MOST_TRIES or not self._engine.is_running:
                    raise

    async def _try(self, entry: _Entry, index: int) -> Output:
        call = entry.call
        prompt = entry.prompts[index]
        name = entry.request_id(index)
        adapter = None if call.model is None else self._adapters.get(call.model)
        if isinstance(call, EmbeddingCall):
            return await self._engine.encode(
                prompt,
                name,
                **call.options,
                priority=call.priority or 0.0,
                tenant=call.tenant,
                timeout_s=call.timeout_s,
                lora_request=adapter,
            )
        params = call.params(self._engine.text)
        last = None
        stream = self._engine.generate(prompt, params, name, tenant=call.tenant, lora_request=adapter)
        async for output in stream:
            last = output
        assert last is not None, "a stream ends with an output"
        return last

    def _take(self, entry: _Entry, index: int, output: Output) -> None:
        entry.outputs[index] = output
        if len(entry.outputs) < len(entry.prompts):
            return
        outputs: list[Any] = [entry.outputs[i] for i in range(len(entry.prompts))]
        if failure := failure_of(outputs):
            self._close(entry.line, failure[0], error_body(*failure))
        else:
            model = entry.call.model if entry.call.model in self._adapters else self._model
            body = entry.call.body(outputs, entry.line.identity, entry.created, model)
            self._close(entry.line, 200, body)

    def _refuse(self, line: Line, error: Exception) -> None:
        """Write the error of a line. One line must not end the others, whatever its error is."""
        if not isinstance(error, PagedError):
            logger.error("the line %r failed", line.custom_id, exc_info=error)
            self._close(line, FAILED, error_body(FAILED, f"this line failed: {error!r}"))
            return
        status = status_of(error)
        self._close(line, status, error_body(status, str(error), param=error.param))

    def _close(self, line: Line, status: int, body: dict[str, Any]) -> None:
        self._output.write(line, status, body)
        self._after_line()
