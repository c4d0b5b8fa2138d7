"""Reading the outputs of the prompts of one HTTP request, whose requests end together."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, Self

from ...base.errors import EngineDeadError, PagedError
from ...engine.async_base import RequestStream, cooperatively
from ...requests.request import Logprob, RequestOutput
from ..frames import Places
from ..http.exchange import PARTS_AT_ONCE

Outcome = RequestOutput | PagedError
OnOutput = Callable[[RequestOutput, int], None]  # with the number of its engine


async def finished_outcomes(
    streams: Sequence[RequestStream],
    on_output: OnOutput,
    check: Callable[[Outcome], None] = lambda _: None,
) -> list[Outcome]:
    """Return the last output of each stream, or the error that refused its prompt.

    All streams are closed if the caller is cancelled or the engine stops.

    check: called with each output as it arrives. If it raises, all streams are closed.
    """
    if len(streams) == 1:
        return [await _last(streams[0], on_output, check)]
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(_last(stream, on_output, check)) async for stream in cooperatively(streams)
            ]
    except BaseExceptionGroup as errors:  # all others are cancelled
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]


async def _last(stream: RequestStream, on_output: OnOutput, check: Callable[[Outcome], None]) -> Outcome:
    outcome: Outcome
    try:
        async for output in stream:
            on_output(output, stream.replica)
            outcome = output
            if output.finished:  # what it holds counts until the stream is closed
                break
    except EngineDeadError:
        raise
    except PagedError as error:
        outcome = error
    check(outcome)
    return outcome


def num_parts_of(outcomes: Iterable[Outcome]) -> int:
    """Return the number of tokens and candidates in the outputs."""
    outputs = [outcome for outcome in outcomes if isinstance(outcome, RequestOutput)]
    return sum(_num_candidates(output.prompt_logprobs) + _num_parts(output) for output in outputs)


def _num_parts(output: RequestOutput) -> int:
    num = 0
    for completion in output.outputs:
        num += 1 + len(completion.token_ids) + _num_candidates(completion.logprobs)
    return num


def _num_candidates(places: Sequence[Mapping[int, Logprob] | None] | None) -> int:
    if isinstance(places, Places):
        return places.num_candidates  # without reading them
    return sum(len(place) for place in places or () if place is not None)


class ReadyOutcomes(NamedTuple):
    """Outputs that are sent together, each with the index of its stream.

    num_parts: the number of tokens and candidates in the outputs.
    is_last: whether no further outputs follow.
    """

    outcomes: list[tuple[int, Outcome]]
    num_parts: int
    is_last: bool


class _Arrival(NamedTuple):
    """An output of a stream, or the error that it raised.

    stream: its index.
    sent: is set when it was sent.
    """

    stream: int
    outcome: Outcome | Exception
    sent: asyncio.Event


class MergedOutcomes:
    """The outputs of several streams as they arrive, each with the index of its stream.

    An asynchronous context manager that closes all streams at its end. One output of each stream is read
    ahead. Later outputs wait in the mailboxes, where deltas are merged. A stream is asked for its next output
    only after its last output was sent, so that it knows how much memory its reader still uses.
    """

    def __init__(self, streams: Sequence[RequestStream], on_output: OnOutput) -> None:
        self._streams = streams
        self._on_output = on_output
        self._ready: asyncio.Queue[_Arrival] = asyncio.Queue()
        self._tasks: list[asyncio.Task[None]] = []
        self._begun: set[int] = set()  # streams whose prompt was counted

    async def __aenter__(self) -> Self:
        if len(self._streams) > 1:
            loop = asyncio.get_running_loop()
            try:
                async for i, stream in cooperatively(enumerate(self._streams)):
                    self._tasks.append(loop.create_task(self._pump(i, stream)))
            except asyncio.CancelledError:  # the client is gone
                await self.__aexit__()
                raise
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        for stream in self._streams:
            await stream.aclose()

    async def batches(self) -> AsyncIterator[ReadyOutcomes]:
        """Yield batches of the outputs that have arrived. Ask for a batch only after the last one was sent.

        If a prompt was refused, the error takes the place of its output. Any other error of a stream is
        raised.
        """
        num_open = len(self._streams)
        while num_open:
            arrival = await self._next()
            outcomes = []
            all_sent = []
            num_parts = 0
            while True:
                index, outcome, sent = arrival
                if isinstance(outcome, RequestOutput):
                    self._on_output(outcome, self._streams[index].replica)
                    num_open -= outcome.finished
                    num_parts += self._num_new_parts(index, outcome)
                elif isinstance(outcome, PagedError) and not isinstance(outcome, EngineDeadError):
                    num_open -= 1
                else:
                    raise outcome
                outcomes.append((index, outcome))
                all_sent.append(sent)
                if num_parts >= PARTS_AT_ONCE or self._ready.empty():
                    break
                arrival = self._ready.get_nowait()
            yield ReadyOutcomes(outcomes, num_parts, not num_open)
            for sent in all_sent:
                sent.set()

    def _num_new_parts(self, index: int, output: RequestOutput) -> int:
        if index in self._begun:  # each output has the log-probabilities of its prompt
            return _num_parts(output)
        self._begun.add(index)
        return num_parts_of([output])

    async def _next(self) -> _Arrival:
        if self._tasks:
            return await self._ready.get()
        try:
            return _Arrival(0, await anext(self._streams[0]), asyncio.Event())
        except Exception as error:  # raised where the outputs are read
            return _Arrival(0, error, asyncio.Event())

    async def _pump(self, index: int, stream: RequestStream) -> None:
        try:
            async for output in stream:
                sent = asyncio.Event()
                self._ready.put_nowait(_Arrival(index, output, sent))
                await sent.wait()
        except Exception as error:  # raised where the outputs are read
            self._ready.put_nowait(_Arrival(index, error, asyncio.Event()))
