"""A server whose model answers from a script: everything of paged but the choice of the words.

Bodies are parsed, conversations rendered, and what the engine generates is streamed as always. In place of
the rendered prompt the engine gets a short one, and a grammar of the one text that the script says: the
conversations of coding agents are longer than the demo model's context.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

from paged import AsyncLLMEngine, SamplingParams, StructuredOutputsParams
from paged.protocol.calls.call import Call
from paged.protocol.endpoints import parse_call
from paged.server import front_end
from paged.server.front_end import FrontEnd
from paged.server.http.exchange import Exchange
from tests.support.served import Served, serving

Script = Callable[[str], str]  # from a rendered conversation to the text of its answer
OPTIONS = {"chat_template": "plain", "tool_call_parser": "hermes", "enable_auto_tool_choice": True}


@dataclass
class Recorded:
    """What was sent to a scripted server.

    bodies: in their order, each with its path.
    responses: the method, path and status of all requests, in the order of their ends.
    """

    bodies: list[tuple[str, Any]] = field(default_factory=list)
    responses: list[tuple[str, str, int]] = field(default_factory=list)

    def record_ends(self, front: FrontEnd) -> None:
        """Record the requests of a front end."""
        end = front.end

        def recording(exchange: Exchange, status: int, error: BaseException | None) -> None:
            self.responses.append((exchange.method, exchange.route, status))
            end(exchange, status, error)

        front.end = recording  # type: ignore[method-assign]


@contextmanager
def scripted_server(
    engine: AsyncLLMEngine, script: Script, **options: Any
) -> Iterator[tuple[Served, Recorded]]:
    """Yield a server of the engine, and what it is sent. options: of `paged serve`."""
    recorded = Recorded()
    generate = engine.generate

    def scripted(prompt: Any, params: SamplingParams, *args: Any, **kwargs: Any) -> Any:
        only = StructuredOutputsParams(choice=[script(prompt["prompt"])])
        forced = SamplingParams(structured_outputs=only, output_kind=params.output_kind, max_tokens=None)
        return generate("x", forced, *args, **kwargs)

    def recording(path: str, body: Any, limits: Any) -> Call:
        recorded.bodies.append((path, body))
        return parse_call(path, body, limits)

    with (
        mock.patch.object(engine, "generate", scripted),
        mock.patch.object(front_end, "parse_call", recording),
        serving(engine, recorded.record_ends, **{**OPTIONS, **options}) as served,
    ):
        yield served, recorded
