"""Files in OpenAI's batch format: one request per line, and one result per line.

The next run computes the results that are missing after a kill.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from ..base.errors import FileError, RequestError, reject_unknown
from ..base.strict_json import parse_json
from ..base.validation import shown
from .calls.call import AnswerCall
from .calls.vectors import EmbeddingCall
from .endpoints import parse_call
from .limits import Limits
from .result_file import ResultFile
from .run_options import RunOptions

PREFIX = b'{"id": "batch_req_'
RESULT = re.compile(re.escape(PREFIX) + rb'([0-9a-f]{32})", "custom_id": .*\}\n')
KEY_BYTES = 16
EMPTY = bytes(KEY_BYTES)
SUCCEEDED = b'"error": null}\n'
# What a line may ask for. It is trusted, as the file is that of the user.
BATCH_URLS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings")
BATCH_LIMITS = Limits(max_logprobs=-1, cached_tokens=True, trust_chat_template=True)
FIELDS = ("custom_id", "method", "url", "body")


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a batch file.

    identity: the id of the line's result, the same in every run.
    call: the request, or the error that refuses it.
    """

    identity: str
    custom_id: str | None
    call: AnswerCall | EmbeddingCall | RequestError


class IdentitySet:
    """A set of identities that takes 21 to 43 bytes per entry; a Python set takes 120.

    A batch may have ten million lines. The set is a hash table with open addressing and slots of 16 bytes; an
    identity is its own hash.
    """

    def __init__(self) -> None:
        # a power of two
        self._num_slots = 1024
        self._size = 0
        self._table = bytearray(KEY_BYTES * self._num_slots)

    def __len__(self) -> int:
        return self._size

    def __contains__(self, identity: str) -> bool:
        key = bytes.fromhex(identity)
        return self._table.startswith(key, self._find(key))

    def add(self, identity: str) -> bool:
        """Add an identity. Return whether it is new."""
        if new := identity not in self:
            if self._size >= 3 * self._num_slots // 4:
                self._grow()
            self._put(bytes.fromhex(identity))
            self._size += 1
        return new

    def _find(self, key: bytes) -> int:
        """Return the offset of the key, or of the empty slot for it."""
        slot = int.from_bytes(key[:8], "little") & (self._num_slots - 1)
        while self._table[(at := KEY_BYTES * slot) : at + KEY_BYTES] not in (key, EMPTY):
            slot = (slot + 1) & (self._num_slots - 1)
        return at

    def _put(self, key: bytes) -> None:
        at = self._find(key)
        self._table[at : at + KEY_BYTES] = key

    def _grow(self) -> None:
        old = self._table
        self._num_slots = 2 * self._num_slots
        self._table = bytearray(KEY_BYTES * self._num_slots)
        for at in range(0, len(old), KEY_BYTES):
            if (key := bytes(old[at : at + KEY_BYTES])) != EMPTY:
                self._put(key)


def count_lines(file: Path) -> int:
    """Return the number of lines that are not blank.

    Raises FileError if the file is a pipe, which `read_lines` could not read again.
    """
    if file.is_fifo() or file.is_char_device():
        raise FileError(f"{file}: not a file that can be read twice; write what comes from it to a file")
    with file.open("rb") as lines:
        return sum(not line.isspace() for line in lines)


def is_done(file: Path, done: IdentitySet) -> bool:
    """Return whether every line has a result."""
    return next(read_lines(file, done), None) is None


def read_lines(file: Path, done: IdentitySet, limits: Limits = BATCH_LIMITS) -> Iterator[Line]:
    """Yield the lines that have no result in `done`."""
    seen = IdentitySet()
    with file.open("rb") as lines:
        for number, raw in enumerate(lines, start=1):
            if raw.isspace():
                continue
            custom_id = None
            value = None
            try:
                value = parse_json(raw.decode("utf-8-sig"))
                custom_id = _custom_id(value)
                identity = _identity("custom_id", custom_id)
                if not seen.add(identity):
                    identity = _identity("again", number, custom_id)
                    raise RequestError(f"custom_id {shown(custom_id)} is that of an earlier line")
                if identity not in done:
                    yield Line(identity, custom_id, _call(value, limits))
            except (ValueError, RecursionError) as error:  # from the decoder, json, and our own
                if custom_id is None:
                    identity = _identity("line", number, raw)
                if identity not in done:
                    param = getattr(error, "param", None)
                    yield Line(identity, custom_id, RequestError(f"line {number}: {error}", param=param))


def _custom_id(value: Any) -> str:
    if not isinstance(value, Mapping):
        raise RequestError('a line must be an object such as {"custom_id": ..., "method": "POST", ...}')
    custom_id = value.get("custom_id")
    if not isinstance(custom_id, str) or not custom_id:
        raise RequestError(f"custom_id must be a non-empty string, got {shown(custom_id)}")
    return custom_id


def _call(value: Mapping[str, Any], limits: Limits) -> AnswerCall | EmbeddingCall:
    reject_unknown("a line", value, FIELDS)
    if value.get("method", "POST") != "POST":
        raise RequestError(f"method must be 'POST', got {value['method']!r}")
    for name in ("url", "body"):
        if name not in value:
            raise RequestError(f"{name} is missing")
    if value["url"] not in BATCH_URLS:
        raise RequestError(
            f"url {shown(value['url'])} is not supported; it is one of {', '.join(BATCH_URLS)}", param="url"
        )
    call = parse_call(value["url"], value["body"], limits)
    if call.stream:
        raise RequestError("stream must be false: results of a batch are not streamed", param="stream")
    assert isinstance(call, AnswerCall | EmbeddingCall)
    return call


def _identity(*parts: Any) -> str:
    # ascii escapes lone surrogates, which UTF-8 cannot encode.
    return hashlib.sha256(ascii(parts).encode()).hexdigest()[:32]


class BatchOutput:
    """The file of a batch's results, including results of earlier runs. A context manager that closes the
    file.

    done: identities of the lines that have a result.
    num_failed: how many of the results are errors.
    has_known_options: whether the options of the earlier runs are known.

    options: the options of this run. They must equal the options of the earlier runs.
    retry_failed: whether to replace the errors of earlier runs; lines with an error are then not in `done`.

    Raises FileError if the file contains other data, if options differ, or as `ResultFile` does.
    """

    def __init__(self, path: Path, source: Path, options: RunOptions, *, retry_failed: bool = False) -> None:
        self.done = IdentitySet()
        self.num_failed = 0
        self._file = ResultFile(path, source)
        try:
            size, has_failed = self._read(keep_failed=not retry_failed)
            self.has_known_options = options.check() if size else True
            self._file.truncate(size)
            if not size or not self.has_known_options:
                options.keep()
            # The first new result removes the old errors, so that a run that cannot start loses nothing.
            self._has_old_errors = has_failed and retry_failed
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def _read(self, *, keep_failed: bool) -> tuple[int, bool]:
        """Read the results of earlier runs. Return the bytes of all whole lines, and whether any failed."""
        size = 0
        has_failed = False
        for number, line in enumerate(self._file.lines(), start=1):
            if match := RESULT.fullmatch(line):
                failed = not line.endswith(SUCCEEDED)
                has_failed |= failed
                size += len(line)
                if keep_failed or not failed:
                    self.done.add(match[1].decode())
                    self.num_failed += failed
            elif line.endswith(b"\n") or not line.startswith(PREFIX[: len(line)]):
                raise FileError(
                    f"{self._file.path}:{number}: not a result of `paged run-batch`; name another file"
                )
        return size, has_failed

    def write(self, line: Line, status: int, body: Mapping[str, Any]) -> None:
        """Append the result of a line."""
        if self._has_old_errors:
            self._file.replace(line for line in self._file.lines() if line.endswith(SUCCEEDED))
            self._has_old_errors = False
        error = body["error"] if status != 200 else None
        self.num_failed += error is not None
        self._file.write(
            {
                "id": f"batch_req_{line.identity}",
                "custom_id": line.custom_id,
                "response": {"status_code": status, "request_id": f"req_{line.identity}", "body": body},
                "error": error and {"code": error["type"], "message": error["message"]},
            }
        )
