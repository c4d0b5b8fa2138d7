"""Sending outputs as they come: as server-sent events, or as JSON lines."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from ...base.errors import PagedError
from ...protocol.answers.chunks import Chunks
from ...protocol.answers.errors import failure_of
from ...protocol.calls.call import AnswerCall
from ...protocol.calls.generate import GenerateCall
from ...requests.request import RequestOutput
from ..front_end import FrontEnd
from ..http.exchange import EVENTS, JSON_LINES, PARTS_AT_ONCE, Exchange, beside_loop, encode_json
from ..http.failures import FailureResponse, HttpError
from ..http.streams import DONE, StreamedResponse, event, named_event
from .readers import MergedOutcomes, Outcome


class Framing(ABC):
    """The format of a streamed response.

    content_type: the response's content type.
    """

    content_type: str

    @property
    def has_ended(self) -> bool:
        """Whether no further part follows, although outputs would."""
        return False

    @abstractmethod
    def part(self, outcomes: Sequence[tuple[int, Outcome]]) -> bytes:
        """Return the part for some outputs, each with the index of its prompt.

        Raises an error that ends the stream.
        """

    @abstractmethod
    def end(self) -> bytes:
        """Return the last part of a stream, which follows the last output."""

    @abstractmethod
    def error(self, failure: FailureResponse) -> bytes:
        """Return the last part of a stream that ends with an error."""


def checked(call: AnswerCall, outcome: Outcome) -> RequestOutput:
    """Return an output of a call. Raises its error if it failed."""
    if isinstance(outcome, PagedError):
        call.name_field(outcome)
        raise outcome
    if outcome.finished and (failure := failure_of([outcome])):
        raise HttpError(*failure)
    return outcome


class Events(Framing):
    """Chunks as server-sent events: named events, or events without names and then [DONE].

    An output that failed ends the stream.
    """

    content_type = EVENTS

    def __init__(self, call: AnswerCall, chunks: Chunks) -> None:
        self._call = call
        self._chunks = chunks
        self._event: Callable[[dict[str, Any]], bytes] = named_event if chunks.NAMES_EVENTS else event
        self._done = DONE if chunks.ENDS_WITH_DONE and not chunks.NAMES_EVENTS else b""
        self._has_begun = False

    @property
    def has_ended(self) -> bool:
        """Whether the answer is over."""
        return self._chunks.has_ended

    def part(self, outcomes: Sequence[tuple[int, Outcome]]) -> bytes:
        """Return the events for these outputs."""
        values: list[dict[str, Any]] = []
        for index, outcome in outcomes:
            output = checked(self._call, outcome)
            if not self._has_begun:
                self._has_begun = True
                values += self._chunks.start(index, output)
            values += self._chunks.add(index, output)
        return b"".join(map(self._event, values))

    def end(self) -> bytes:
        """Return the last events."""
        return b"".join(map(self._event, self._chunks.finish())) + self._done

    def error(self, failure: FailureResponse) -> bytes:
        """Return the event of an error."""
        return self._event(self._chunks.error(failure.status, failure.body))


class ObjectLines(Events):
    """Chunks as lines of JSON. An output that failed ends the stream."""

    content_type = JSON_LINES

    def __init__(self, call: AnswerCall, chunks: Chunks) -> None:
        super().__init__(call, chunks)
        self._event = _line
        self._done = b""


def _line(value: dict[str, Any]) -> bytes:
    return encode_json(value) + b"\n"


class Lines(Framing):
    """One JSON line for each result, or for each delta. The result of a prompt that failed is its error."""

    content_type = JSON_LINES

    def __init__(self, call: GenerateCall) -> None:
        self._call = call

    def part(self, outcomes: Sequence[tuple[int, Outcome]]) -> bytes:
        """Return the lines for these outputs."""
        call = self._call
        values = []
        for index, outcome in outcomes:
            if isinstance(outcome, PagedError) or not call.streams_deltas:
                values += call.results(index, outcome)
            else:
                values += call.deltas(index, outcome)
        return b"".join(encode_json(value) + b"\n" for value in values)

    def end(self) -> bytes:
        """Return no bytes, because the stream ends with the line of the last result."""
        return b""

    def error(self, failure: FailureResponse) -> bytes:
        """Return the line of an error."""
        return encode_json(failure.body) + b"\n"


async def send_stream(
    front: FrontEnd, exchange: Exchange, outcomes: MergedOutcomes, framing: Framing
) -> None:
    """Send outputs as they arrive. An error after the first output becomes the last part of the response.

    An error before the first output is raised, so that a response with its own status can be sent.
    """
    response = StreamedResponse(exchange, framing.content_type)
    keep_alive = front.keep_alive if framing.content_type == EVENTS else None
    if keep_alive is not None:
        keep_alive.on_write(response)
    try:
        async with outcomes:
            async for batch in outcomes.batches():
                if batch.num_parts > PARTS_AT_ONCE:
                    part = await beside_loop(framing.part, batch.outcomes)
                else:
                    part = framing.part(batch.outcomes)
                if batch.is_last or framing.has_ended:
                    await response.write(part + framing.end(), more=False)
                    break
                if part:
                    await response.write(part)
                    if keep_alive is not None:
                        keep_alive.on_write(response)
    except Exception as error:  # of any kind: the last event tells it
        if not response.has_begun:
            raise
        exchange.error = error
        failure = await front.failure_of(error, exchange.request_id)
        await response.write(framing.error(failure), more=False)
    finally:
        if keep_alive is not None:
            keep_alive.remove(response)
