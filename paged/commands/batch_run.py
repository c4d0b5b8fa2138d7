"""BatchRun: answers the lines of a batch file with an engine."""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from ..engine.embedding import EmbeddingRequestOutput, EmbeddingSpec
from ..engine.request_spec import ReportTerms
from ..errors import PagedError, RequestError
from ..protocol.answers.errors import FAILED, MODEL_NOT_FOUND, NOT_FOUND, error_body, failure_of, status_of
from ..protocol.batch_file import BatchOutput, Line
from ..protocol.calls.call import AnswerCall
from ..protocol.calls.vectors import EmbeddingCall
from ..requests.prompts import Prompt
from ..requests.request import RequestOutput

if TYPE_CHECKING:
    from ..engine.engine import LLMEngine

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Entry:
    """A line that is being answered, with the outputs so far."""

    line: Line
    call: AnswerCall | EmbeddingCall
    prompts: list[Prompt]
    outputs: dict[int, RequestOutput | EmbeddingRequestOutput] = field(default_factory=dict)
    # What reads the report of each embedding.
    reports: dict[int, Callable[[], EmbeddingRequestOutput]] = field(default_factory=dict)
    created: int = field(default_factory=lambda: int(time.time()))

    def request_id(self, index: int) -> str:
        # The same in every run, as seeds are derived from it.
        return f"{self.line.identity}-{index}"


class BatchRun:
    """Answers lines with an engine, reading only as many as keep it busy.

    ignored: how many lines had each field that has no effect.
    """

    def __init__(
        self,
        engine: LLMEngine,
        output: BatchOutput,
        model: str,
        after_line: Callable[[], object],
    ) -> None:
        self._engine = engine
        self._output = output
        self._after_line = after_line
        self._model = model
        self.ignored = Counter[str]()
        self._entries: dict[str, _Entry] = {}  # by identity
        self._queue: deque[tuple[_Entry, int]] = deque()  # prompts that the engine has not got yet
        config = engine.config
        self._most_waiting = min(config.max_num_seqs, config.max_waiting or config.max_num_seqs)

    def answer(self, lines: Iterator[Line]) -> None:
        """Answer all lines and write each result as soon as it exists."""
        engine = self._engine
        pending = next(lines, None)
        while pending is not None or self._queue or engine.has_unfinished_requests():
            while engine.scheduler.num_waiting < self._most_waiting and (self._queue or pending is not None):
                if self._queue:
                    self._add(*self._queue.popleft())
                elif pending is not None:
                    self._open(pending)
                    pending = next(lines, None)
            for output in engine.step():
                if output.finished:
                    self._take(output)

    def _open(self, line: Line) -> None:
        """Queue the prompts of a line, or write its error."""
        try:
            if isinstance(line.call, RequestError):
                raise line.call
            if line.call.model not in (None, self._model):
                message = (
                    f"the model {line.call.model!r} is not here, this is {self._model!r}; "
                    "see --served-model-name"
                )
                terms = {"param": "model", "code": MODEL_NOT_FOUND}
                self._close(line, NOT_FOUND, error_body(NOT_FOUND, message, **terms))
                return
            self.ignored.update(line.call.ignored)
            self.ignored.update(["request_id"] if line.call.request_id is not None else [])
            entry = _Entry(line, line.call, [*line.call.prompts(self._engine.text)])
        except Exception as error:
            self._refuse(line, error)
            return
        self._entries[line.identity] = entry
        self._queue += ((entry, i) for i in range(len(entry.prompts)))

    def _add(self, entry: _Entry, index: int) -> None:
        if entry.line.identity not in self._entries:  # another of its prompts was refused
            return
        call = entry.call
        try:
            with call.naming_field():
                if isinstance(call, EmbeddingCall):
                    self._add_report(entry, call, index)
                else:
                    params = call.params(self._engine.text)
                    self._engine.add_request(
                        entry.request_id(index), entry.prompts[index], params, tenant=call.tenant
                    )
        except Exception as error:
            for earlier in range(index):
                self._engine.abort_request(entry.request_id(earlier))
            del self._entries[entry.line.identity]
            self._refuse(entry.line, error)

    def _add_report(self, entry: _Entry, call: EmbeddingCall, index: int) -> None:
        core = self._engine.core
        spec = EmbeddingSpec(core.factory.prompts.parse(entry.prompts[index]), call.pooling, call.normalize)
        terms = ReportTerms(call.priority or 0.0, call.tenant, call.timeout_s)
        request = core.add_report(entry.request_id(index), spec, terms, core.outbox)
        entry.reports[index] = partial(spec.output, request)

    def _take(self, output: RequestOutput) -> None:
        identity, _, number = output.request_id.rpartition("-")
        entry = self._entries[identity]
        index = int(number)
        call = entry.call
        if isinstance(call, EmbeddingCall):
            entry.outputs[index] = entry.reports.pop(index)()
        else:
            entry.outputs[index] = output
        if len(entry.outputs) < len(entry.prompts):
            return
        del self._entries[identity]
        outputs: list[Any] = [entry.outputs[i] for i in range(len(entry.prompts))]
        if failure := failure_of(outputs):
            self._close(entry.line, failure[0], error_body(*failure))
        else:
            self._close(entry.line, 200, call.body(outputs, identity, entry.created, self._model))

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
