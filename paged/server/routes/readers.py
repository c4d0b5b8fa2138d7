"""Reading the outputs of the prompts of one HTTP request, whose requests end together."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Self

from ...engine.async_options import paced
from ...errors import EngineDeadError, PagedError
from ...requests.request import Logprob, RequestOutput
from ..frames import Places

if TYPE_CHECKING:
    from ..served_engine import OutputStream

Outcome = RequestOutput | PagedError
OnOutput = Callable[[RequestOutput, int], None]  # with the number of its engine


async def finished_outcomes(
    streams: Sequence[OutputStream],
    on_output: OnOutput,
    check: Callable[[Outcome], None] = lambda _: None,
) -> list[Outcome]:
    """Return the last output of each stream, or the error that refused its prompt.

    If the caller is cancelled, or the engine stops, all are closed.

    check: is called with each of them as it comes; if it raises, all are closed, and the error is raised.
    """
    if len(streams) == 1:
        return [await _last(streams[0], on_output, check)]
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(_last(stream, on_output, check)) async for stream in paced(streams)]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]


async def _last(stream: OutputStream, on_output: OnOutput, check: Callable[[Outcome], None]) -> Outcome:
    outcome: Outcome
    try:
        async for output in stream:
            on_output(output, stream.replica)
            outcome = output
    except EngineDeadError:
        raise
    except PagedError as error:
        outcome = error
    check(outcome)
    return outcome


def num_parts_of(outcomes: Iterable[Outcome]) -> int:
    """Return how many tokens and candidates outputs have."""
    return sum(_num_parts(outcome) for outcome in outcomes if isinstance(outcome, RequestOutput))


def _num_parts(output: RequestOutput) -> int:
    num = _num_candidates(output.prompt_logprobs)
    for completion in output.outputs:
        num += 1 + len(completion.token_ids) + _num_candidates(completion.logprobs)
    return num


def _num_candidates(places: Sequence[Mapping[int, Logprob] | None] | None) -> int:
    if isinstance(places, Places):
        return places.num_candidates  # without reading them
    return sum(len(place) for place in places or () if place is not None)


class MergedOutcomes:
    """The outputs of several streams as they come, each with the index of its stream.

    An asynchronous context manager, which closes all streams when it ends. Few outputs are read ahead: what
    comes later waits in the mailboxes, where deltas are merged.
    """

    def __init__(self, streams: Sequence[OutputStream], on_output: OnOutput) -> None:
        self._streams, self._on_output = streams, on_output
        self._ready: asyncio.Queue[tuple[int, Outcome | Exception]] = asyncio.Queue(len(streams))
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        if len(self._streams) > 1:
            loop = asyncio.get_running_loop()
            try:
                async for i, stream in paced(enumerate(self._streams)):
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

    async def batches(self) -> AsyncIterator[tuple[list[tuple[int, Outcome]], bool]]:
        """Yield all outputs that are there at once, and whether they are the last.

        A stream that is refused ends with the error, in place of an output. Raises what else a stream raises.
        """
        num_open = len(self._streams)
        while num_open:
            batch = [await self._next()]
            with suppress(asyncio.QueueEmpty):
                while True:
                    batch.append(self._ready.get_nowait())
            outcomes = []
            for index, outcome in batch:
                if isinstance(outcome, RequestOutput):
                    self._on_output(outcome, self._streams[index].replica)
                    num_open -= outcome.finished
                elif isinstance(outcome, PagedError) and not isinstance(outcome, EngineDeadError):
                    num_open -= 1
                else:
                    raise outcome
                outcomes.append((index, outcome))
            yield outcomes, not num_open

    async def _next(self) -> tuple[int, Outcome | Exception]:
        if self._tasks:
            return await self._ready.get()
        try:
            return 0, await anext(self._streams[0])
        except Exception as error:
            return 0, error

    async def _pump(self, index: int, stream: OutputStream) -> None:
        try:
            async for output in stream:
                await self._ready.put((index, output))
        except Exception as error:
            await self._ready.put((index, error))
