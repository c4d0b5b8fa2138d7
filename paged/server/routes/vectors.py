"""Embeddings, and scores of continuations."""

from __future__ import annotations

import asyncio
import time

from ...engine.async_base import cooperatively
from ...engine.embedding import EmbeddingRequestOutput
from ...engine.scoring import names_of_scores
from ...protocol.answers.errors import failure_of
from ...protocol.calls.vectors import EmbeddingCall, ScoreCall
from ...requests.request import Prompt
from ..front_end import FrontEnd
from ..http.exchange import Exchange, until_disconnect
from ..http.failures import HttpError


async def embed(front: FrontEnd, exchange: Exchange) -> None:
    """Return embeddings of texts. An input that fails is an error of the whole request."""
    call = await front.read_call(exchange, EmbeddingCall)
    async with until_disconnect(exchange):
        prompts = call.prompts(front.engine.text)
        identity = front.identity_of(exchange, call)
        engine_ids = front.engine_ids_of(call, identity, len(prompts))
        front.begin(exchange, call, engine_ids)
        timeout_s = exchange.time_left(call.timeout_s)
        with call.naming_field():
            try:
                async with asyncio.TaskGroup() as group:
                    named = zip(prompts, engine_ids, strict=True)
                    tasks = [
                        group.create_task(_embed(front, prompt, engine_id, call, exchange, timeout_s))
                        async for prompt, engine_id in cooperatively(named)
                    ]
            except BaseExceptionGroup as errors:  # all others are cancelled
                raise errors.exceptions[0] from None
        outputs = [task.result() for task in tasks]
        created = int(time.time())
        model = front.name_of(call)
        await exchange.answer(
            lambda: call.body(outputs, identity, created, model),
            len(outputs) * (call.options["dimensions"] or front.engine.text.embedding.size),
        )


async def _embed(
    front: FrontEnd,
    prompt: Prompt,
    request_id: str,
    call: EmbeddingCall,
    exchange: Exchange,
    timeout_s: float | None,
) -> EmbeddingRequestOutput:
    record = exchange.record
    assert record is not None
    output = await front.engine.encode(
        prompt,
        request_id,
        **call.options,
        priority=call.priority or 0.0,
        tenant=call.tenant,
        timeout_s=timeout_s,
        part_of=record.part_of,
        lora_request=call.adapter,
        on_prompt=front.accepting(exchange),
        on_place=record.on_place,
    )
    if failure := failure_of([output]):
        raise HttpError(*failure)
    record.on_result(
        output.request_id,
        num_prompt_tokens=len(output.prompt_token_ids),
        num_cached_tokens=output.num_cached_tokens,
        times=output.metrics,
    )
    return output


async def score(front: FrontEnd, exchange: Exchange) -> None:
    """Return log-probabilities of continuations of a prompt."""
    call = await front.read_call(exchange, ScoreCall)
    async with until_disconnect(exchange):
        (prompt,) = call.prompts(front.engine.text)
        identity = front.identity_of(exchange, call)
        engine_id = front.engine_id_of(call, identity)
        names = names_of_scores(engine_id, len(call.continuations))
        record = front.begin(exchange, call, names)
        with call.naming_field():
            outputs = await front.engine.score(
                prompt,
                call.continuations,
                engine_id,
                priority=call.priority or 0.0,
                tenant=call.tenant,
                timeout_s=exchange.time_left(call.timeout_s),
                lora_request=call.adapter,
                on_prompt=front.accepting(exchange),
                on_place=record.on_place,
            )
            if failure := failure_of(outputs):
                raise HttpError(*failure)
        for name, output in zip(names, outputs, strict=True):
            record.on_result(name, num_prompt_tokens=output.num_prompt_tokens + output.num_tokens)
        created = int(time.time())
        model = front.name_of(call)
        await exchange.answer(
            lambda: call.body(outputs, identity, created, model),
            sum(output.num_tokens for output in outputs),
        )
