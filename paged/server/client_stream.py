"""ClientStream: the outputs of one request from an engine process, for one reader."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from ..errors import UsageError
from ..requests.prompts import Prompt
from ..requests.request import RequestOutput
from ..sampling_params import SamplingParams
from ..text.prompt_parser import ParsedPrompt
from .connection import EngineConnection
from .inbox import Inbox


@dataclass(frozen=True, slots=True)
class Asked:
    """What a caller asks for. `render` makes the prompt of a chat."""

    prompt: Prompt | ParsedPrompt
    params: SamplingParams
    tenant: str
    generated_token_ids: Sequence[int] = ()
    render: Callable[[], Prompt] | None = None


class Begun(NamedTuple):
    """Where a request is computed, its key there, and its outputs."""

    connection: EngineConnection
    key: int
    inbox: Inbox


class Client(Protocol):
    """What a stream needs of the `EngineClient` that made it."""

    async def begin(self, request_id: str, asked: Asked) -> Begun:
        """Send a request to an engine."""

    def forget(self, request_id: str, key: int) -> None:
        """Let another request have this id."""


class ClientStream(AsyncIterator[RequestOutput]):
    """The outputs of one request, for one reader; see `RequestStream` of `AsyncLLMEngine`."""

    def __init__(
        self,
        client: Client,
        request_id: str,
        asked: Asked | None,
        *,
        begun: Begun | None = None,
    ) -> None:
        self.request_id = request_id
        self._client, self._asked, self._begun = client, asked, begun
        self._is_over = self._is_read = False

    async def __anext__(self) -> RequestOutput:
        if self._is_over:
            raise StopAsyncIteration
        if self._is_read:
            raise UsageError(f"request {self.request_id!r} has a reader already; a stream takes one")
        self._is_read = True
        try:
            if self._begun is None:
                assert self._asked is not None
                self._begun = await self._client.begin(self.request_id, self._asked)
            output = await self._begun.inbox.get()
        except BaseException:  # cancelled, most of all
            self._end()
            raise
        finally:
            self._is_read = False
        if output.finished:
            self._end()
        return output

    @property
    def replica(self) -> int:
        """The number of the engine process that computes it; 0 until it is chosen."""
        return 0 if self._begun is None else self._begun.connection.replica

    async def aclose(self) -> None:
        """Abort the request if it is not finished."""
        self._end()

    def __del__(self) -> None:
        self._end()

    def _end(self) -> None:
        if not self._is_over:
            self._is_over = True
            if self._begun is not None:
                key = self._begun.key
                self._client.forget(self.request_id, key)
                self._begun.connection.abort(key)
