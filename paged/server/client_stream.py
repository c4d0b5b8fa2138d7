"""ClientStream: the outputs of one request from an engine process, for one reader."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from ..errors import UsageError
from ..requests.prompts import Prompt
from ..requests.request import RequestOutput
from ..sampling_params import SamplingParams
from ..text.prompt_parser import ParsedPrompt
from .answer_memory import AnswerAccount, AnswerBudget
from .connection import EngineConnection
from .inbox import Inbox


@dataclass(frozen=True, slots=True)
class RequestTerms:
    """What a caller requests: a prompt, or `render`, which makes the prompt of a chat, and parameters."""

    prompt: Prompt | ParsedPrompt
    params: SamplingParams
    tenant: str
    generated_token_ids: Sequence[int] = ()
    render: Callable[[], Prompt] | None = None


class SentRequest(NamedTuple):
    """Where a request is computed, its key there, and its outputs."""

    connection: EngineConnection
    key: int
    inbox: Inbox


class Client(Protocol):
    """What a stream needs of the `EngineClient` that made it."""

    budget: AnswerBudget

    async def begin(self, request_id: str, terms: RequestTerms, account: AnswerAccount | None) -> SentRequest:
        """Send a request to an engine."""

    def forget(self, request_id: str, key: int) -> None:
        """Let another request have this id."""


class ClientStream(AsyncIterator[RequestOutput]):
    """The outputs of one request, for one reader; see `RequestStream` of `AsyncLLMEngine`.

    An output counts as held until the reader asks for the next one.
    """

    def __init__(
        self,
        client: Client,
        request_id: str,
        terms: RequestTerms | None,
        *,
        sent: SentRequest | None = None,
    ) -> None:
        self.request_id = request_id
        self._client = client
        self._terms = terms
        self._sent = sent
        self._account: AnswerAccount | None = None  # of the client's budget
        self._is_over = self._is_read = False

    async def __anext__(self) -> RequestOutput:
        if self._is_over:
            self._let_go()
            raise StopAsyncIteration
        if self._is_read:
            raise UsageError(f"request {self.request_id!r} has a reader already; a stream takes one")
        self._is_read = True
        try:
            if self._sent is None:
                assert self._terms is not None
                self._sent = await self._client.begin(self.request_id, self._terms, self._account)
            self._sent.inbox.release()
            output = await self._sent.inbox.get()
        except BaseException:  # cancelled, most of all
            self._let_go()
            raise
        finally:
            self._is_read = False
        if output.finished:
            self._end()
        return output

    def count_for(self, account: AnswerAccount) -> None:
        """Count the bytes of the outputs in this account. Call it before the first output is awaited."""
        self._account = account

    @property
    def budget(self) -> AnswerBudget:
        """The budget of all answers of the client."""
        return self._client.budget

    @property
    def replica(self) -> int:
        """The number of the engine process that computes it; 0 until it is chosen."""
        return 0 if self._sent is None else self._sent.connection.replica

    async def aclose(self) -> None:
        """Abort the request if it is not finished. The reader's outputs do not count any more."""
        self._let_go()

    def __del__(self) -> None:
        if self._sent is None:
            return
        loop = self._sent.connection.loop
        try:
            is_here = asyncio.get_running_loop() is loop
        except RuntimeError:  # none runs on this thread
            is_here = False
        if is_here:
            self._let_go()
        elif loop is not None:  # it is collected on another thread
            with suppress(RuntimeError):  # the event loop is closed
                loop.call_soon_threadsafe(_let_go, self._client, self.request_id, self._sent)

    def _end(self) -> None:
        """End the request. Its last output counts until the reader asks for another one, or closes."""
        if not self._is_over:
            self._is_over = True
            if self._sent is not None:
                _abort(self._client, self.request_id, self._sent)

    def _let_go(self) -> None:
        self._end()
        if self._sent is not None:
            self._sent.inbox.give_back()


def count_together(streams: Sequence[object], *, is_whole: bool) -> None:
    """Bound the memory that all streams of one reader hold together, if they come from engine processes.

    is_whole: whether the reader sends all outputs together, when all are finished.
    """
    counted = [stream for stream in streams if isinstance(stream, ClientStream)]
    if counted:
        account = AnswerAccount(counted[0].budget, is_whole=is_whole)
        for stream in counted:
            stream.count_for(account)


def _abort(client: Client, request_id: str, sent: SentRequest) -> None:
    client.forget(request_id, sent.key)
    sent.connection.abort(sent.key)


def _let_go(client: Client, request_id: str, sent: SentRequest) -> None:
    _abort(client, request_id, sent)
    sent.inbox.give_back()
