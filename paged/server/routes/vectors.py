"""Embeddings, and scores of continuations."""

from __future__ import annotations

import asyncio
import time

from ...protocol.answers.errors import failure_of
from ...protocol.calls.vectors import EmbeddingCall, ScoreCall
from ..front_end import FrontEnd
from ..http.exchange import Exchange, until_disconnect
from ..http.failures import HttpError


class EmbeddingRoute:
    """Vectors of texts."""

    def __init__(self, path: str, front: FrontEnd) -> None:
        self._path, self._front = path, front

    async def __call__(self, exchange: Exchange) -> None:
        """Answer a request. An input that fails is an error of the whole request."""
        front = self._front
        call = await front.read_call(exchange, self._path, EmbeddingCall)
        async with until_disconnect(exchange):
            prompts = call.prompts(front.engine.text)
            identity = front.identity_of(exchange, call)
            engine_id = front.engine_id_of(call, identity)
            record = front.begin(exchange, call, num_requests=len(prompts))
            try:
                async with asyncio.TaskGroup() as group:
                    tasks = [
                        group.create_task(
                            front.engine.encode(
                                prompt,
                                f"{engine_id}-{i}",
                                pooling=call.pooling,
                                normalize=call.normalize,
                                priority=call.priority or 0.0,
                                tenant=call.tenant,
                            )
                        )
                        for i, prompt in enumerate(prompts)
                    ]
            except BaseExceptionGroup as errors:  # all others are cancelled
                raise errors.exceptions[0] from None
            outputs = [task.result() for task in tasks]
            if failure := failure_of(outputs):
                raise HttpError(*failure)
            for output in outputs:
                record.on_result(
                    output.request_id,
                    num_prompt_tokens=len(output.prompt_token_ids),
                    num_cached_tokens=output.num_cached_tokens,
                    times=output.metrics,
                )
            body = call.body(outputs, identity, int(time.time()), front.names[0])
            await exchange.respond_json(200, body)


class ScoreRoute:
    """Log-probabilities of continuations after a prompt."""

    def __init__(self, path: str, front: FrontEnd) -> None:
        self._path, self._front = path, front

    async def __call__(self, exchange: Exchange) -> None:
        """Answer a request."""
        front = self._front
        call = await front.read_call(exchange, self._path, ScoreCall)
        async with until_disconnect(exchange):
            (prompt,) = call.prompts(front.engine.text)
            identity = front.identity_of(exchange, call)
            engine_id = front.engine_id_of(call, identity)
            record = front.begin(exchange, call, num_requests=len(call.continuations))
            outputs = await front.engine.score(
                prompt, call.continuations, engine_id, priority=call.priority or 0.0, tenant=call.tenant
            )
            if failure := failure_of(outputs):
                raise HttpError(*failure)
            for i, output in enumerate(outputs):
                record.on_result(f"{engine_id}-{i}", num_prompt_tokens=output.num_tokens)
            body = call.body(outputs, identity, int(time.time()), front.names[0])
            await exchange.respond_json(200, body)
