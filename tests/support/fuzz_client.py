"""The client of one case: it sends what the case says, and reads what comes."""

from __future__ import annotations

import asyncio
import socket
import struct

from tests.support.http_responses import BadResponseError, Response, read_response
from tests.support.response_checks import SLOW_S, ResponseChecks
from tests.support.server_cases import Case, End

_RESET = struct.pack("ii", 1, 0)  # SO_LINGER: close sends a reset


async def play(case: Case, port: int, checks: ResponseChecks) -> tuple[list[Response], list[str]]:
    """Send what a case says. Return the responses and what is wrong with them."""
    loop = asyncio.get_running_loop()
    started = loop.time()
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**20)
    if case.end is End.RESETS:
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
    responses: list[Response] = []
    findings: list[str] = []
    missing, may_miss = "the connection ends without a response", not case.must_answer
    try:
        reading = asyncio.create_task(_read(case, reader, responses))
        await _send(case, writer)
        await reading
    except BadResponseError as error:
        if case.end is not End.SHUTS:
            findings.append(str(error))
    except ConnectionError as error:
        missing = f"the connection ends with {error!r}"
        # A server that refuses the first parts and closes resets the connection when more come.
        may_miss = len(case.parts) > 1
    finally:
        writer.close()
    # On a busy machine the server may be right not to wait for the request.
    is_late = loop.time() - started > SLOW_S
    if len(responses) < case.num_wanted and not (is_late or may_miss):
        findings.append(missing)
    for i, response in enumerate(responses):
        findings += checks.findings(response, case.targets[i], must_succeed=case.succeeds and not is_late)
    return responses, findings


async def _send(case: Case, writer: asyncio.StreamWriter) -> None:
    try:
        for part in case.parts:
            writer.write(part)
            await writer.drain()
            if case.pause_s:
                await asyncio.sleep(case.pause_s)
        if case.end is End.SHUTS:
            writer.write_eof()
    except OSError:  # the server has refused what it had read, and closed the connection
        pass


async def _read(case: Case, reader: asyncio.StreamReader, responses: list[Response]) -> None:
    """Read the responses that the case waits for. Raises BadResponseError or ConnectionError."""
    if case.end in (End.RESETS, End.LEAVES):
        if case.after:
            await reader.read(case.after)
        else:
            await asyncio.sleep(case.pause_s)
        return
    while len(responses) < len(case.targets):
        target = case.targets[len(responses)]
        response = await read_response(reader, to_head=target.method == "HEAD")
        if response is None:
            return
        responses.append(response)
        if response.headers.get("connection") == "close":
            return
