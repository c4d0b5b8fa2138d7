"""The client of one case: it sends what the case says, and reads what comes."""

from __future__ import annotations

import asyncio
import socket
import struct

from tests.support.http_responses import BadResponse, Response, read_response
from tests.support.response_checks import ResponseChecks
from tests.support.server_cases import Case, End

_RESET = struct.pack("ii", 1, 0)  # SO_LINGER: close sends a reset


async def play(case: Case, port: int, checks: ResponseChecks) -> tuple[list[Response], list[str]]:
    """Send what a case says. Return the responses and what is wrong with them."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**20)
    if case.end is End.RESETS:
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
    responses: list[Response] = []
    findings: list[str] = []
    try:
        reading = asyncio.create_task(_read(case, reader, responses))
        await _send(case, writer)
        findings += await reading
    finally:
        writer.close()
    for i, response in enumerate(responses):
        findings += checks.findings(response, case.targets[i], must_succeed=case.succeeds)
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


async def _read(case: Case, reader: asyncio.StreamReader, responses: list[Response]) -> list[str]:
    """Read the responses that the case waits for. Return what is wrong."""
    try:
        if case.end in (End.RESETS, End.LEAVES):
            # Those that are answered at once end before that.
            if case.after:
                await reader.read(case.after)
            else:
                await asyncio.sleep(case.pause_s)
            return []
        while len(responses) < len(case.targets):
            target = case.targets[len(responses)]
            response = await read_response(reader, to_head=target.method == "HEAD")
            if response is None:
                break
            responses.append(response)
            if response.headers.get("connection") == "close":
                break
    except BadResponse as error:
        return [] if case.end is End.SHUTS else [str(error)]
    except ConnectionError as error:
        return [f"the connection ends with {error!r}"] if case.must_answer and not responses else []
    wanted = len(case.targets) if case.succeeds else 1
    if case.must_answer and len(responses) < wanted:
        return [f"gets {len(responses)} of {wanted} responses"]
    return []
