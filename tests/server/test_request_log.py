"""Lines of the request log: what they hold, what they never hold, and that no client can forge one."""

import io
import json
import logging
import sys
import time

import pytest

from paged.base.errors import RequestError
from paged.requests.request import CompletionOutput, RequestMetrics, RequestOutput
from paged.server.telemetry.log_lines import formatter_of
from paged.server.telemetry.log_queue import MAX_LINE_BYTES
from paged.server.telemetry.records import Observers, RequestRecord
from paged.server.telemetry.request_log import RequestLog, set_up_logging
from paged.server.telemetry.trace_context import TraceContext

SECRET = "my secret"


@pytest.fixture(autouse=True)
def _logs_as_before():
    logger = logging.getLogger("paged.server.requests")
    level, propagates = logger.level, logger.propagate
    yield
    logger.handlers = []
    logger.setLevel(level)
    logger.propagate = propagates


def written(log_format, record, **ending):
    """Return the lines about a request with one output of three tokens."""
    stream = io.StringIO()
    set_up_logging(log_format, stream)
    observers = Observers(RequestLog())
    observers.begin(record)
    if not ending:
        times = RequestMetrics(1.0, 1.5, 2.0, 4.0)
        completion = CompletionOutput(0, SECRET, [7, 8, 9], finish_reason="stop", stop_reason=SECRET)
        output = RequestOutput("a", SECRET, [1, 2, 3, 4], [completion], True, 2, times)
        record.on_output(output, record.received + 3.5)
    observers.end(record, **ending)
    observers.refused("/v1/completions", 413, request_id="id-2")
    observers.responded("/health", 200)
    return stream.getvalue()


def test_json_lines_have_counts_and_times():
    trace = TraceContext("1" * 32, "2" * 16)
    record = RequestRecord("id-1", "/v1/completions", tenant="team", model="demo", stream=True, trace=trace)
    request, refused = map(json.loads, written("json", record).splitlines())
    total = request.pop("total_s")
    assert 0 <= total <= time.monotonic() - record.received  # it is not measured up to its made-up output
    assert request.pop("time") <= refused.pop("time")
    assert request == {
        "level": "info",
        "event": "request",
        "id": "id-1",
        "tenant": "team",
        "route": "/v1/completions",
        "model": "demo",
        "stream": True,
        "status": 200,
        "reason": "stop",
        "prompts": 1,
        "prompt_tokens": 4,
        "cached_tokens": 2,
        "generated_tokens": 3,
        "preemptions": 0,
        "queue_s": 0.5,
        "prefill_s": 0.5,
        "decode_s": 2.0,
        "first_token_s": 1.5,
        "trace_id": "1" * 32,
    }
    assert refused == {
        "level": "info",
        "event": "refused",
        "id": "id-2",
        "route": "/v1/completions",
        "status": 413,
        "reason": "too_large",
    }


@pytest.mark.parametrize("num_known", [0, 1, 2])
def test_what_is_unknown_of_a_request_that_was_left_is_not_written(num_known):
    """Its counts were written as 0, or as those of its first prompts."""
    record = RequestRecord("id", "/v1/completions", num_requests=2, stream=True)
    for i in range(num_known):
        completion = CompletionOutput(0, "a", [7], finish_reason=None)
        times = RequestMetrics(1.0, 1.5, 2.0, None)
        record.on_output(RequestOutput(str(i), "a", [1, 2, 3], [completion], False, 2, times), 5.0)
    request, _ = map(json.loads, written("json", record, status=499).splitlines())
    counts = {name: request[name] for name in request if name.endswith("_tokens")}
    known = {"prompt_tokens": 6, "cached_tokens": 4, "generated_tokens": 2}
    assert counts == (known if num_known == 2 else {})
    assert request["prompts"] == 2
    assert "preemptions" not in request


@pytest.mark.parametrize("log_format", ["text", "json"])
@pytest.mark.parametrize(
    "evil",
    ["a\nrequest id=b", "a status=500", "\x1b[2Jx\r", "a\u2028b\u202e", '"', "x" * 9999, ""],
    ids=ascii,
)
def test_a_client_cannot_forge_a_line_or_a_field(evil, log_format):
    text = written(log_format, RequestRecord(evil, "/v1/completions", tenant=evil, model=evil))
    assert text.isascii()
    assert all(character.isprintable() or character == "\n" for character in text)
    request, refused, end = text.split("\n")
    assert (len(request) < 1000, "refused" in refused, end) == (True, True, "")
    assert request.count(" status=") == (log_format == "text") or "status=500" in evil
    if log_format == "json":
        assert json.loads(request)["id"] == evil[:128]
    elif not evil.isalnum():
        assert f"id={json.dumps(evil)}" in request


@pytest.mark.parametrize("character", ["x", "\n", "\x00", "\U0001f600"])
def test_a_long_line_of_json_is_shortened_within_its_texts(character):
    formatter = formatter_of("json")
    long = "begin" + character * 2**16 + "end"
    try:
        raise ValueError(long)
    except ValueError:
        error = sys.exc_info()
    for said in ({"msg": long}, {"msg": "a", "exc_info": error}, {"msg": long, "exc_info": error}):
        line = formatter.format(logging.makeLogRecord(said))
        assert MAX_LINE_BYTES // 8 < len(line) <= MAX_LINE_BYTES
        fields = json.loads(line)
        assert fields["event"] == "a" or (fields["event"][:5], fields["event"][-3:]) == ("begin", "end")
        if "exc_info" in said:
            assert fields["traceback"].startswith("Traceback")
            assert fields["traceback"].endswith("end")


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_no_prompt_and_no_answer_is_written(log_format):
    record = RequestRecord("a", "/v1/completions")
    assert SECRET not in written(log_format, record)
    failed = written(log_format, RequestRecord("a", "/x"), status=400, error=RequestError(f"got {SECRET!r}"))
    assert SECRET not in failed
    assert "RequestError" in failed
