"""Generated tokens: chats and completions in OpenAI's form, and results for lists of prompts."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from ...base.errors import QueueFullError
from ...engine.async_base import RequestStream
from ...options.sampling_params import SamplingParams
from ...protocol.calls.call import AnswerCall, GenerationCall
from ...protocol.calls.conversation_call import ConversationCall
from ...protocol.calls.generate import GenerateCall
from ...protocol.llamacpp.calls import NativeCall
from ...requests.request import RequestOutput
from ..front_end import FrontEnd
from ..http.exchange import Exchange, encode_answer, in_thread_if, until_disconnect
from .readers import MergedOutcomes, OnOutput, Outcome, finished_outcomes, num_parts_of
from .streaming import Events, Lines, ObjectLines, checked, send_stream

if TYPE_CHECKING:
    from ...requests.request import Prompt

BYTES_OF_PART = 16  # of a body, which may be echoed: about as much work as a token of an answer


class AnswerRoute:
    """Returns the answer to one request, whole or streamed."""

    def __init__(self, front: FrontEnd) -> None:
        self._front = front

    def take(self, exchange: Exchange, call: AnswerCall) -> None:
        """Complete a call with the server's settings, before anything else. Raises HttpError."""

    def answering(
        self,
        exchange: Exchange,  # noqa: ARG002
        call: AnswerCall,  # noqa: ARG002
        identity: str,  # noqa: ARG002
        created: int,  # noqa: ARG002
    ) -> AbstractContextManager[None]:
        """Return a context that lasts while the engine works on a call."""
        return nullcontext()

    async def __call__(self, exchange: Exchange) -> None:
        """Answer a request. A prompt that fails is an error of the whole request."""
        front = self._front
        call = await front.read_call(exchange, AnswerCall)  # type: ignore[type-abstract]
        self.take(exchange, call)
        ready = call.immediate(front.name_of(call))
        if ready is not None:
            await exchange.respond_json(200, ready)
            return
        async with until_disconnect(exchange):
            streams, identity, on_output = await _begin(front, exchange, call)
            async with _placing(exchange, streams):
                created = int(time.time())
                with self.answering(exchange, call, identity, created):
                    terms = identity, created, front.name_of(call)
                    body = await self._answered(exchange, call, streams, terms, on_output)
            if body is not None:
                await exchange.respond(200, body)

    async def _answered(
        self,
        exchange: Exchange,
        call: AnswerCall,
        streams: Sequence[RequestStream],
        terms: tuple[str, int, str],
        on_output: OnOutput,
    ) -> bytes | None:
        """Return the whole response, or send it as a stream.

        terms: its identity, when it was created, and the name of the model.
        """
        if call.stream:
            chunks = call.chunks(*terms)
            framing = ObjectLines(call, chunks) if chunks.IS_LINES else Events(call, chunks)
            await send_stream(self._front, exchange, MergedOutcomes(streams, on_output), framing)
            return None
        if isinstance(call, NativeCall) and call.ends_early:
            return await encode_answer(await _gathered(call, streams, terms, on_output), 1)
        outputs = await _finished_outputs(call, streams, on_output)
        num_parts = exchange.num_body_bytes // BYTES_OF_PART + num_parts_of(outputs)
        return await encode_answer(partial(call.body, outputs, *terms), num_parts)


async def answer_prompts(front: FrontEnd, exchange: Exchange) -> None:
    """Return a result for each of a list of prompts, whole or as JSON lines.

    A prompt that fails has an error as its result.
    """
    call = await front.read_call(exchange, GenerateCall)
    async with until_disconnect(exchange):
        started = time.monotonic()
        streams, _, on_output = await _begin(front, exchange, call)
        async with _placing(exchange, streams):
            if call.stream:
                await send_stream(front, exchange, MergedOutcomes(streams, on_output), Lines(call))
                return
            outcomes = await finished_outcomes(streams, on_output)
            refusals = [outcome for outcome in outcomes if isinstance(outcome, QueueFullError)]
            if len(refusals) == len(outcomes):
                raise refusals[0]
            seconds = time.monotonic() - started
            body = await encode_answer(partial(call.body, outcomes, seconds), num_parts_of(outcomes))
            del outcomes
        await exchange.respond(200, body)


async def _gathered(
    call: NativeCall, streams: Sequence[RequestStream], terms: tuple[str, int, str], on_output: OnOutput
) -> Callable[[], Any]:
    """Read deltas until the answer is over. Return what makes the whole answer. Raises the first error."""
    chunks = call.chunks(*terms)
    async with MergedOutcomes(streams, on_output) as outcomes:
        async for batch in outcomes.batches():
            for index, outcome in batch.outcomes:
                chunks.add(index, checked(call, outcome))
            if chunks.has_ended:
                break
    return chunks.whole


async def _finished_outputs(
    call: AnswerCall, streams: Sequence[RequestStream], on_output: OnOutput
) -> list[RequestOutput]:
    """Return the last output of each stream. Raises the error of the first that fails."""

    def check(outcome: Outcome) -> None:
        checked(call, outcome)

    outcomes = await finished_outcomes(streams, on_output, check)
    return [outcome for outcome in outcomes if isinstance(outcome, RequestOutput)]


@asynccontextmanager
async def _placing(exchange: Exchange, streams: Sequence[RequestStream]) -> AsyncIterator[None]:
    """Close the streams at the end of the context, and record their replicas, even without an output."""
    try:
        yield
    finally:
        if exchange.record is not None:
            for stream in streams:
                exchange.record.on_place(stream.request_id, stream.replica)
        for stream in streams:
            await stream.aclose()


async def _begin(
    front: FrontEnd, exchange: Exchange, call: GenerationCall
) -> tuple[list[RequestStream], str, OnOutput]:
    """Return the streams of a call's prompts, the id of its response, and a function to record outputs."""
    identity = front.identity_of(exchange, call)
    terms = (front, exchange, call, identity)
    with front.preparing():
        if isinstance(call, ConversationCall):  # another process renders it
            await front.fetch_images(exchange, call)
            prompts, params = await front.in_pool(
                front.engine.text.rendering, exchange, call, _requests, *terms
            )
        else:
            prompts, params = await in_thread_if(exchange.has_large_body, _requests, *terms)
    engine_ids = front.engine_ids_of(call, identity, len(prompts))
    part_of = front.begin(exchange, call, engine_ids, params=params[0]).part_of
    generate = front.engine.generate
    tenant = call.tenant
    streams = []
    for prompt, own, engine_id in zip(prompts, params, engine_ids, strict=True):
        stream = generate(prompt, own, engine_id, tenant=tenant, lora_request=call.adapter)
        stream.part_of = part_of
        stream.on_prompt = front.accepting(exchange, own)
        streams.append(stream)
    front.engine.count_together(streams, is_whole=not call.stream)
    return streams, identity, exchange.on_output


def _requests(
    front: FrontEnd, exchange: Exchange, call: GenerationCall, identity: str
) -> tuple[Sequence[Prompt], list[SamplingParams]]:
    """Return the prompts of a call, and the parameters of each."""
    text = front.engine.text
    prompts = call.prompts(text)
    params = call.params(text)
    given: dict[str, Any] = {}
    if call.priority is not None:
        given["priority"] = call.priority
    if call.timeout_s is not None:
        given["timeout_s"] = exchange.time_left(call.timeout_s)
    if given:
        params = replace(params, **given)
    if params.seed is not None or params.temperature == 0:
        return prompts, [params] * len(prompts)
    return prompts, [replace(params, seed=front.seed_for(f"{identity}-{i}")) for i in range(len(prompts))]
