"""Reading the outputs of one or several prompts, whose requests end together."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress

from ...requests.request import RequestOutput

OnOutput = Callable[[RequestOutput], None]


async def finished_outputs(
    streams: Sequence[AsyncIterator[RequestOutput]], on_output: OnOutput
) -> list[RequestOutput]:
    """Return the last output of each stream. If one raises, or the caller is cancelled, all are closed."""
    if len(streams) == 1:
        return [await _last(streams[0], on_output)]
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(_last(stream, on_output)) for stream in streams]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]


async def _last(stream: AsyncIterator[RequestOutput], on_output: OnOutput) -> RequestOutput:
    output = None
    async for output in stream:
        on_output(output)
    assert output is not None
    return output


class MergedOutputs:
    """The outputs of several streams as they come, each with the index of its stream.

    An asynchronous context manager, which closes all streams when it ends. Each stream is one output ahead of
    the reader at most: what comes later waits in its mailbox, where deltas are merged.
    """

    def __init__(self, streams: Sequence[AsyncIterator[RequestOutput]]) -> None:
        self._streams = streams
        self._ready: asyncio.Queue[tuple[int, RequestOutput | Exception | None]] = asyncio.Queue(len(streams))
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> MergedOutputs:
        if len(self._streams) > 1:
            loop = asyncio.get_running_loop()
            self._tasks = [loop.create_task(self._pump(i, s)) for i, s in enumerate(self._streams)]
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        for stream in self._streams:
            await stream.aclose()

    async def batches(self) -> AsyncIterator[list[tuple[int, RequestOutput]]]:
        """Yield all outputs that are there at once, until every stream has ended."""
        if len(self._streams) == 1:
            async for output in self._streams[0]:
                yield [(0, output)]
            return
        open_streams = len(self._streams)
        while open_streams:
            batch = [await self._ready.get()]
            with suppress(asyncio.QueueEmpty):
                while True:
                    batch.append(self._ready.get_nowait())
            outputs = []
            for index, output in batch:
                if isinstance(output, Exception):
                    raise output
                if output is None:
                    open_streams -= 1
                else:
                    outputs.append((index, output))
            if outputs:
                yield outputs

    async def _pump(self, index: int, stream: AsyncIterator[RequestOutput]) -> None:
        try:
            async for output in stream:
                await self._ready.put((index, output))
        except Exception as error:
            await self._ready.put((index, error))
        else:
            await self._ready.put((index, None))
