"""Generated tokens: chats and completions in OpenAI's form, and results for lists of prompts."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ...errors import PagedError, QueueFullError
from ...protocol.answers.errors import failure_of
from ...protocol.calls.call import AnswerCall, GenerationCall
from ...protocol.calls.chat import ChatCall
from ...protocol.calls.generate import GenerateCall
from ...requests.request import RequestOutput
from ..front_end import FrontEnd
from ..http.exchange import Exchange, until_disconnect
from ..http.failures import HttpError
from .readers import MergedOutcomes, OnOutput, finished_outcomes
from .streaming import Events, Lines, send_stream

if TYPE_CHECKING:
    from ...requests.prompts import Prompt
    from ..served_engine import OutputStream


class AnswerRoute:
    """Chats and completions, whole or streamed."""

    def __init__(self, path: str, front: FrontEnd) -> None:
        self._path, self._front = path, front

    async def __call__(self, exchange: Exchange) -> None:
        """Answer a request. A prompt that fails is an error of the whole request."""
        front = self._front
        call = await front.read_call(exchange, self._path, AnswerCall)  # type: ignore[type-abstract]
        async with until_disconnect(exchange):
            streams, identity, on_output = await _begin(front, exchange, call)
            created, model = int(time.time()), front.names[0]
            if call.stream:
                framing = Events(call, call.chunks(identity, created, model))
                await send_stream(front, exchange, MergedOutcomes(streams, on_output), framing)
                return
            outputs: list[RequestOutput] = []
            for outcome in await finished_outcomes(streams, on_output):
                if isinstance(outcome, PagedError):
                    outcome.param = call.param_of(outcome)
                    raise outcome
                outputs.append(outcome)
            if failure := failure_of(outputs):
                raise HttpError(*failure)
            await exchange.respond_json(200, call.body(outputs, identity, created, model))


class ResultRoute:
    """Lists of prompts with a result for each, whole or as JSON lines."""

    def __init__(self, path: str, front: FrontEnd) -> None:
        self._path, self._front = path, front

    async def __call__(self, exchange: Exchange) -> None:
        """Answer a request. A prompt that fails has an error as its result."""
        front = self._front
        call = await front.read_call(exchange, self._path, GenerateCall)
        async with until_disconnect(exchange):
            started = time.monotonic()
            streams, _, on_output = await _begin(front, exchange, call)
            if call.stream:
                await send_stream(front, exchange, MergedOutcomes(streams, on_output), Lines(call))
                return
            outcomes = await finished_outcomes(streams, on_output)
            refusals = [outcome for outcome in outcomes if isinstance(outcome, QueueFullError)]
            if len(refusals) == len(outcomes):
                raise refusals[0]
            await exchange.respond_json(200, call.body(outcomes, time.monotonic() - started))


async def _begin(
    front: FrontEnd, exchange: Exchange, call: GenerationCall
) -> tuple[list[OutputStream], str, OnOutput]:
    """Return the streams of a call's prompts, the identity of its response, and what records outputs."""
    text = front.engine.text
    prompts: Sequence[Prompt]
    if isinstance(call, ChatCall):  # another process renders the conversation
        prompts = await asyncio.to_thread(call.prompts, text)
    else:
        prompts = call.prompts(text)
    params = call.params(text)
    identity = front.identity_of(exchange, call)
    front.begin(exchange, call, num_requests=len(prompts), params=params)
    needs_seed = params.seed is None and params.temperature > 0
    engine_id = front.engine_id_of(call, identity)
    streams = []
    for i, prompt in enumerate(prompts):
        streams.append(
            front.engine.generate(
                prompt,
                replace(params, seed=front.seed_for(f"{identity}-{i}")) if needs_seed else params,
                f"{engine_id}-{i}",
                priority=call.priority,
                tenant=call.tenant,
                timeout_s=call.timeout_s,
            )
        )
    return streams, identity, exchange.on_output
